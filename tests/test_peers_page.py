"""The page on the witnesses, without them: its numbers are those of the layouts, its tests and versions are there."""

import importlib
import re
from pathlib import Path

import pytest
from support.models import model_config

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
GIB = 2**30
CELLS = r"^\| (\w+) \| (\S+) \| (\w+) \| \w+ \| (\d+) \| (\d+) \| "
ROWS = re.findall(CELLS + r"([\d,]+) \| (\d+), (\d+), (\d+) \|$", PAGE, re.MULTILINE)
HYBRIDS = re.findall(CELLS + r"(\d+) \| ([\d,]+) \| (\d+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_pages_of_a_memory(row: tuple[str, ...]) -> None:
    name, model, kv_format, page, ranks, nbytes, *pages = row
    module = importlib.import_module(f"generated.{name}")
    choices = {"page_size": int(page)} if name != "glm_dsa" else {}
    choices |= {"tp_size": int(ranks)} if name == "gqa" else {}
    layout = module.Layout.from_config(model_config(model), kv_format=kv_format, **choices)
    assert module.cell_size(layout) * int(page) == number(nbytes)
    for memory, count in zip((10, 40, 80), pages, strict=True):
        assert module.max_tokens(layout, memory * GIB) == (int(count) - 1) * int(page)


@pytest.mark.parametrize("row", HYBRIDS, ids=" ".join)
def test_layers_with_a_window(row: tuple[str, ...]) -> None:
    name, model, kv_format, page, ranks, *cells = row
    module = importlib.import_module(f"generated.{name}")
    choices = {"kv_format": kv_format, "page_size": int(page), "tp_size": int(ranks)}
    layout = module.Layout.from_config(model_config(model), **choices)
    for buffer, layers, nbytes in (("kv_full", *cells[:2]), ("kv_swa", *cells[2:])):
        own = layout.buffer(buffer)
        assert len(own.layers) == int(layers)
        assert own.layer_page_bytes == int(layers) * number(nbytes)


def test_tests_and_versions_that_the_page_names() -> None:
    assert len(ROWS) >= 36 and len(HYBRIDS) >= 15
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "peers_vllm").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) >= 16 and all(f"def {name}(" in tests for name in named)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"sglang=={re.search(r'SGLang ([0-9.]+) ', PAGE)[1]} " in makefile
    assert f"vllm=={re.search(r'vLLM ([0-9.]+),', PAGE)[1]} " in makefile
    for link in re.findall(r"\]\(([\w.-]+)\)", PAGE):
        assert (ROOT / "docs" / link).is_file(), link
