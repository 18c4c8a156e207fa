"""Notes of a layout: said by every command that makes one, and no part of its bytes."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.models import CONFIGS, ROOT

from kvgen.cli import main
from kvgen.compile import Compiled, compile_spec

GLM_DSA = str(ROOT / "specs" / "glm_dsa.yaml")
GLM_52 = str(CONFIGS / "glm-5.2.json")
V32 = str(CONFIGS / "deepseek-v3.2.json")
HISPARSE = "SGLang 0.5.23 keeps index keys in every layer with HiSparse: its own number is that of elide_shared=false"
WARNING = f"warning[KV409]: {HISPARSE}\n --> {GLM_52}\n"
SPEC = ROOT / "tests" / "golden" / "notes" / "spec.yaml"


def run(*words: object) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    status = main([str(word) for word in words], io.BytesIO(), stdout, stderr)
    return status, stdout.getvalue(), stderr.getvalue()


def document(*words: object) -> Any:
    status, out, err = run(*words, "--format", "json")
    assert err == "" and status in (0, 1), out
    return json.loads(out)


def notes(found: Any) -> list[str]:
    return [problem["message"] for problem in found["problems"] if problem["code"] == "KV409"]


def test_hisparse_and_shared_top_k() -> None:
    """GLM-5.2 at a ratio of 2: 78 rows of 656 bytes, and index keys of 132 in 21 layers; SGLang has them in all 78."""
    words = ("budget", GLM_DSA, "--config", GLM_52, "--tokens", 6400, "--set", "host_to_device_ratio=2")
    elided, whole = document(*words), document(*words, "--set", "elide_shared=false")
    assert elided["bytes_per_token"] == 56_712 == 78 * 656 + 21 * 132 * 2
    assert whole["bytes_per_token"] == 71_760 == 78 * (656 + 132 * 2)
    assert (elided["total_bytes"], whole["total_bytes"]) == (366_408_960, 463_197_696)
    assert (notes(elided), notes(whole)) == ([HISPARSE], [])
    assert run(*words)[2] == WARNING
    assert run(*words, "--format", "concise")[2] == f"{GLM_52}: warning[KV409]: {HISPARSE}\n"
    assert run(*words, "--set", "elide_shared=false")[2] == ""


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (GLM_52, "host_to_device_ratio=4 kv_format=bf16", True),
        (GLM_52, "host_to_device_ratio=2 role=both", True),
        (GLM_52, "host_to_device_ratio=1", False),
        (GLM_52, "host_to_device_ratio=2 end_layer=3", False),  # the first three layers have indexers
        (GLM_52, "host_to_device_ratio=2 end_layer=4", True),
        (GLM_52, "host_to_device_ratio=2 role=draft", False),
        (V32, "host_to_device_ratio=2", False),  # no layer shares
    ],
)
def test_where_the_two_meet(config: str, settings: str, said: bool) -> None:
    choices = [word for setting in settings.split() for word in ("--set", setting)]
    assert notes(document("budget", GLM_DSA, "--config", config, "--tokens", 64, *choices)) == [HISPARSE] * said


def test_stages_and_drafts_are_told_of_once() -> None:
    """Of three layers and the others; of a draft, whose config it is. A stage that has nothing to say says nothing."""
    words = ["budget", GLM_DSA, "--config", GLM_52, "--tokens", 64]
    assert run(*words, "--set", "host_to_device_ratio=2", "--pp", "3,40,35")[2] == WARNING
    draft = f"{GLM_DSA},host_to_device_ratio=2"
    assert run(*words, "--set", "host_to_device_ratio=2", "--draft", draft)[2] == WARNING
    assert run(*words, "--draft", draft)[2] == WARNING
    assert run(*words, "--draft", f"{draft},config={V32}")[2] == ""


def test_every_command_that_makes_a_layout_says_it() -> None:
    ratio = ("--set", "host_to_device_ratio=2")
    assert run("explain", GLM_DSA, "--config", GLM_52, *ratio)[2] == WARNING
    explained = document("explain", GLM_DSA, "--config", GLM_52, *ratio)
    assert notes(explained) == explained["notes"] == [HISPARSE]
    assert document("explain", GLM_DSA)["notes"] == [{"when": "hisparse and body and not owns_index", "says": HISPARSE}]
    assert f"\nnotes\n  {HISPARSE[:60]}" in run("explain", GLM_DSA)[1]
    sides = (f"{GLM_DSA},config={GLM_52}", f"{GLM_DSA},config={GLM_52},host_to_device_ratio=2")
    assert notes(document("diff", *sides)) == [HISPARSE]
    assert run("diff", *sides)[2] == WARNING
    (own,) = (item for item in document("specs", "--config", GLM_52, *ratio)["specs"] if item["accepted"])
    assert own["warnings"] == [HISPARSE]


def made(text: str) -> Compiled:
    found = compile_spec("spec.yaml", lambda file: text.encode())
    assert found.problems == ()
    return found


def test_notes_are_in_no_fingerprint() -> None:
    """Nor is a let that they alone use. A layout without notes has no part of a module for them."""
    text = SPEC.read_text(encoding="utf-8").partition("expect:\n")[0]
    silent = text.replace("let:\n  many: num_layers * every\n", "")
    silent = re.sub(r"^notes:\n(  - .*\n)+", "", silent, flags=re.MULTILINE)
    loud, quiet = made(text), made(silent)
    assert quiet.layout.notes == () and len(loud.layout.notes) == 3
    assert quiet.layout.fingerprint == loud.layout.fingerprint
    assert "read.note(" in loud.module.text and "note(" not in quiet.module.text
    config = {"num_hidden_layers": 4, "every": 2}
    layouts = [own.namespace.Layout.from_config(config) for own in (loud, quiet)]
    assert layouts[0].fingerprint == layouts[1].fingerprint
    assert layouts[0].notes == ("engines store every layer",) and not hasattr(layouts[1], "notes")


def test_notes_are_those_of_the_spec_word_for_word() -> None:
    config = {"num_hidden_layers": 101, "every": 1}
    layout = made(SPEC.read_text(encoding="utf-8")).namespace.Layout.from_config(config)
    assert layout.notes == ('a model of many layers: "quotes" and 100 % of {them}',)


def test_notes_of_a_file_with_a_line_break_in_its_name(tmp_path: Path) -> None:
    """The note is in one line, and its place in another."""
    config = tmp_path / "a\nb.json"
    config.write_text(Path(GLM_52).read_text(encoding="utf-8"))
    words = ("budget", GLM_DSA, "--config", config, "--tokens", 64, "--set", "host_to_device_ratio=2")
    assert len(run(*words)[2].splitlines()) == 2
