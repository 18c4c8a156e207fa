"""The README's example and server snippet do what they say."""

import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvgen.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    """The fenced blocks of that kind."""
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


def block(kind: str) -> str:
    """The one fenced block of that kind."""
    (found,) = blocks(kind)
    return found


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(block("yaml"))
    Path("config.json").write_text(block("json"))
    shown = re.split(r"^\$ (.*)\n", block("console"), flags=re.MULTILINE)[1:]
    commands = list(zip(shown[::2], shown[1::2], strict=True))
    assert [command.split()[1] for command, _ in commands] == ["build", "budget"]
    for command, output in commands:
        stdout, stderr = io.StringIO(), io.StringIO()
        assert main(command.split()[1:], io.BytesIO(), stdout, stderr) == 0, stderr.getvalue()
        assert stdout.getvalue() == output
    assert Path("out/tiny.py").exists()


def test_example_in_a_checkout() -> None:
    """Tried where this file lies, it writes nothing where shipped files are, and nothing that git sees."""
    commands = re.findall(r"^\$ kvgen (.*)$", block("console"), re.MULTILINE)
    (spec,) = {word for command in commands for word in command.split() if word.endswith(".yaml")}
    written = re.findall(r"^wrote: (.*)$", block("console"), re.MULTILINE)
    assert f"Save this as `{spec}`" in README and written
    assert not (ROOT / "specs" / spec).exists()
    assert {Path(path).parts[0] for path in written} == {"out"}
    assert "out/" in (ROOT / ".gitignore").read_text().splitlines()


def test_modules_that_no_spec_makes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "specs", "specs")
    specs = sorted(map(str, Path("specs").glob("*.yaml")))
    Path("tiny.yaml").write_text(block("yaml"))
    for words, status, last in (
        (["build", *specs], 0, "wrote: generated/shared_kv.py"),
        (["build", "tiny.yaml"], 0, "wrote: generated/tiny.py"),
        (["build", "--check", *specs], 1, "extra: generated/tiny.py"),
    ):
        stdout = io.StringIO()
        assert main(words, io.BytesIO(), stdout, io.StringIO()) == status
        assert stdout.getvalue().splitlines()[-1] == last


def test_every_layout_is_described() -> None:
    _, _, rest = README.partition("\n## The shipped layouts\n")
    section, _, _ = rest.partition("\n## ")
    files = sorted((ROOT / "specs").glob("*.yaml"))
    layouts = {path.name for path in files if "\nlayout: " in path.read_text()}
    assert set(re.findall(r"`specs/(\w+\.yaml)`", section)) == layouts
    assert set(re.findall(r"`(\w+\.yaml)`", section)) == {path.name for path in files} - layouts


def test_example_numbers() -> None:
    """61 x 1152 + 31 x 132 bytes a token; 64 slots of each layer are reserved; the rest is what 40 GiB hold."""
    per_token = 61 * 1152 + 31 * 132
    tokens = (40 * 2**30 - 64 * per_token) // (64 * per_token) * 64
    output = block("console")
    for number in (per_token, 64 * per_token, tokens, (tokens + 64) * per_token):
        assert f" {number:,}" in output


def test_server_snippet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One page of 64 slots is reserved; GLM-5.2 costs 53,940 bytes a token."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    names: dict[str, Any] = {}
    exec(blocks("python")[0], names)
    assert names["tokens"] == 8 * 2**30 // (64 * 53940) * 64 - 64
    assert names["pool"].buffer("kv", 5).shape == (names["tokens"] // 64 + 1, 41984)


def test_pool_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its assertions hold, and what was moved and cleared is where the text says."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    names: dict[str, Any] = {}
    exec(blocks("python")[1], names)
    rows = names["pool"].get_key_buffer(3)
    assert rows[2064:2164].any(1).all() and not rows[:2064].any() and not rows[2164:].any()
    assert names["copy"]["slots"] == {"logical": 100}


def test_commands_are_all_there() -> None:
    stdout = io.StringIO()
    assert main(["--help"], io.BytesIO(), stdout, io.StringIO()) == 0
    listed = set(re.findall(r"^    kvgen (\w+)", README, re.MULTILINE))
    assert listed == set(re.findall(r"^    (\w+) ", stdout.getvalue(), re.MULTILINE))


def test_linked_pages_exist() -> None:
    pages = re.findall(r"\]\((\S+?)\)", README)
    assert pages and all((ROOT / page).exists() for page in pages)
