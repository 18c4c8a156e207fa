"""Adapters of specs that are not the shipped one."""

import importlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deployments import DTYPES, Deployment, build, build_own, glm_5_2

from kvgen.cli import main

ROOT = Path(__file__).parents[2]
MODEL = glm_5_2(3, indexer_types=["full", "full", "shared"])


def adapter_of(folder: Path, edit: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter of the shipped spec after an edit of its files."""
    for name in ("glm_dsa", "mla_rows", "index_rows"):
        text = (ROOT / "specs" / f"{name}.yaml").read_text().split("\nexpect:")[0] + "\n"
        (folder / f"{name}.yaml").write_text(edit(text))
    out = io.StringIO()
    package = folder.name
    words = ["build", str(folder / "glm_dsa.yaml"), "--engine", "sglang", "-o", str(folder)]
    assert main(words, io.BytesIO(), out, out) == 0, out.getvalue()
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("KVGEN_SGLANG_POOL", f"{package}.sglang.own")
    return importlib.import_module(f"{package}.sglang.own")


def renamed(text: str) -> str:
    """Other names wherever names are free, arguments and formats in another order."""
    text = re.sub(r"\blatent\b(?!_| row)", "nope", text.replace("layout: glm_dsa", "layout: own"))
    text = text.replace("cache_k_nope: nope, cache_k_rope: rope", "cache_k_rope: rope, cache_k_nope: nope")
    text = text.replace("index_k: key, index_k_scale: key_scale", "index_k_scale: key_scale, index_k: key")
    text = re.sub(r"\bkv\b(?=[,:\]])", "rows", text)
    text = text.replace("[bf16, fp8_scaled, fp8_raw]", "[fp8_raw, fp8_scaled, bf16]")
    return text.replace("move_kv_cache:", "move:").replace("get_cpu_copy:", "save:").replace("load_cpu_copy:", "load:")


@pytest.mark.parametrize("kv_format", DTYPES)
def test_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_format: str) -> None:
    module = adapter_of(tmp_path, renamed, monkeypatch)
    with Deployment(kv_format, MODEL, 0, 3).serving() as configurator:
        own, pool = build_own(configurator, 128), build(configurator, 128)
        assert type(pool) is module.TokenToKVPool
        assert pool.generated.layout.layers("rows") == (0, 1, 2)
        layer, loc = SimpleNamespace(layer_id=1), torch.randperm(191)[:50] + 1
        values = torch.randn(50, 1, 512).bfloat16(), torch.randn(50, 1, 64).bfloat16()
        codes, scales = torch.randint(0, 127, (50, 128)).to(torch.uint8).view(torch.float8_e4m3fn), torch.rand(50)
        for each in (own, pool):
            each.set_mla_kv_buffer(layer, loc, *values)
            each.set_index_k_scale_buffer(1, loc, codes, scales)
            each.move_kv_cache(loc.roll(1), loc)
            each.load_cpu_copy(each.get_cpu_copy(torch.arange(64, 128)), torch.arange(128, 192))
        buffers = ([*each.kv_buffer, *each.index_k_with_scale_buffer] for each in (own, pool))
        for one, other in zip(*buffers, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_slots_numbered_apart_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sets no choice but the format; what the others are by default has to be a pool that it can address."""

    def edit(text: str) -> str:
        text = text.replace("layout: glm_dsa", "layout: own")
        ratio = "host_to_device_ratio: {type: int, min: 1, default: "
        return text.replace(f"{ratio}1}}", f"{ratio}2}}")

    adapter_of(tmp_path, edit, monkeypatch)
    with Deployment("bf16", MODEL, 0, 3).serving() as configurator:
        message = "^own: latent and index have one slot a token in SGLang, and not here by default$"
        with pytest.raises(NotImplementedError, match=message):
            build(configurator, 128)
