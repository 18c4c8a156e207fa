"""What the tests of generated modules share: the project on the import path, configs, and compiled language specs."""

import json
import linecache
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvgen.compile import compile_spec

ROOT = Path(__file__).parent.parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
LANGUAGE = ROOT / "tests" / "language"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # `import generated.glm_dsa`, as a server that vendors the file does


def model_config(name: str) -> dict[str, Any]:
    """A fresh copy of one of the configs of `tests/data/configs`."""
    return json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))


def problem_lines(error: pytest.ExceptionInfo[ValueError]) -> list[str]:
    """The lines of a refusal, one for each problem."""
    return str(error.value).split("\n")


def run_whole(name: str, read: Callable[[str], bytes], change: Callable[[str], str] = str) -> ModuleType:
    """The whole module of the spec `<name>.yaml`, pool included, compiled in memory, changed and run."""
    compiled = compile_spec(f"{name}.yaml", read)
    assert compiled.module is not None and not compiled.failed, compiled.problems
    text = change(compiled.module.text)
    module = ModuleType(f"generated_in_memory_{name}")
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up by name
    file = f"<{module.__name__}>"
    linecache.cache[file] = (0, None, text.splitlines(True), file)  # Triton reads its kernels there
    exec(compile(text, file, "exec"), module.__dict__)
    return module


@cache
def language_module(name: str) -> ModuleType:
    """The module of `tests/language/<name>.yaml`."""
    return run_whole(name, lambda file: (LANGUAGE / file).read_bytes())
