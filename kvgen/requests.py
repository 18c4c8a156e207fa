"""What a pool asks Triton for: its warm-up, run on a target that is not there. Nothing is launched."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kvgen.targets import TARGETS


@dataclass(frozen=True)
class Request:
    """A launch that a pool asked for."""

    kernel: Any  # Triton's JITFunction
    arguments: tuple[Any, ...]
    options: dict[str, Any]  # constants, and what Triton is told beside them

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def constants(self) -> dict[str, Any]:
        return {name: self.options[name] for name in self.kernel.arg_names if name in self.options}

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors among the arguments, by the names of the parameters."""
        named = zip(self.kernel.arg_names, self.arguments, strict=False)
        return {name: value for name, value in named if not isinstance(value, int)}

    def compiled(self) -> Any:
        """The kernel, for the target that `asking` is for."""
        return self.kernel.run(*self.arguments, grid=(1, 1, 1), warmup=True, **self.options)


class _Driver:
    """What Triton asks of a driver to compile."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return TARGETS[self.target].as_triton()

    def get_current_device(self) -> str:
        return self.target

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def asking(target: str) -> Iterator[list[Request]]:
    """The requests of the pools inside; those that are made inside may be compiled inside."""
    from triton import JITFunction
    from triton.runtime import driver

    requests: list[Request] = []
    stock, before = JITFunction.run, driver._active

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if warmup:
            return stock(kernel, *arguments, grid=grid, warmup=True, **options)
        requests.append(Request(kernel, arguments, options))
        return None

    JITFunction.run, driver._active = run, _Driver(target)
    try:
        yield requests
    finally:
        JITFunction.run, driver._active = stock, before


@contextmanager
def imported(text: str) -> Iterator[ModuleType]:
    """A generated module, from a file: Triton reads the text of kernels. Where that stands makes no difference."""
    from triton import JITFunction

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kvgen_profiled.py"
        path.write_text(text, encoding="utf-8")
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None and found.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(found)
        try:
            found.loader.exec_module(module)
            for own in vars(module).values():
                if isinstance(own, JITFunction):
                    own.starting_line_number = 0
            yield module
        finally:
            del sys.modules[path.stem]
