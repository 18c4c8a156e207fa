"""SGLang's own code on a CPU: kernels in Triton's interpreter, and what else stands in for a GPU.

Nothing of SGLang is edited. `torchvision`, of which there is no build for CPUs, is a stub: SGLang imports it for
multimodal models. Triton 3.9's interpreter refuses masks that are no booleans; it is given booleans.
"""

import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
os.environ |= {
    "SGLANG_PLATFORM": os.environ.get("SGLANG_PLATFORM", "kvgen"),
    "KVGEN_SGLANG_POOL": "generated.sglang.glm_dsa",
    "SGLANG_ENABLE_ASYNC_ASSERT": "0",
    "TRITON_INTERPRET": "1",
}
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402, F401  looks for torchvision before the stub is there
import triton.runtime.interpreter as interpreter  # noqa: E402


class _Stub(types.ModuleType):
    """A module of which every attribute is a class that does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *arguments, **options: None})


for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2"):
    sys.modules.setdefault(f"torchvision{name}", _Stub(f"torchvision{name}"))


def _with_boolean_masks(operation: str, position: int) -> None:
    stock = getattr(interpreter.InterpreterBuilder, operation)

    def create(self: object, *arguments: object) -> object:
        mask = arguments[position]
        if mask is not None and mask.data.dtype != np.bool_:
            mask = interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)
        return stock(self, *arguments[:position], mask, *arguments[position + 1 :])

    setattr(interpreter.InterpreterBuilder, operation, create)


_with_boolean_masks("create_masked_load", 1)
_with_boolean_masks("create_masked_store", 2)

from sglang.srt.plugins import load_plugins  # noqa: E402
from support.casts import cast_fix  # noqa: E402

load_plugins()  # as every process of SGLang begins

from pairs import both, pools  # noqa: E402, F401

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-report", action="store_true", help="write docs/sglang-report.md")


@pytest.fixture(autouse=True)
def hardware_casts() -> Iterator[None]:
    """Kernels cast to fp8 as the hardware does."""
    with cast_fix():
        yield


@pytest.fixture(autouse=True)
def no_cuda_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's DSA pool waits for CUDA on every device."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *arguments: None)
