"""`--update-golden`, and the fixture that compares text with the file that holds what is expected."""

import difflib
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite expected texts; refused where CI is set")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-golden") and "CI" in os.environ:
        raise pytest.UsageError("--update-golden is refused where CI is set: expected texts are accepted by people")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Path], None]:
    """Compares a text with a file; a mismatch shows the difference and the command that accepts it."""

    def check(actual: str, path: Path) -> None:
        expected = path.read_bytes().decode("utf-8") if path.exists() else None
        if actual == expected:
            return
        if request.config.getoption("--update-golden"):
            path.write_bytes(actual.encode("utf-8"))
            return
        lines = [(text or "").splitlines(keepends=True) for text in (expected, actual)]
        shown = os.path.relpath(path, request.config.rootpath)
        diff = "".join(difflib.unified_diff(*lines, shown if expected is not None else "/dev/null", "what came out"))
        command = f"pytest --update-golden {shlex.quote(request.node.nodeid)}"
        pytest.fail(f"{diff}\nif this change is meant: {command}", pytrace=False)

    return check
