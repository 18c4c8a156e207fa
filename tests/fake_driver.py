"""A Triton driver without a GPU: kernels are compiled for a target, launches are written down instead of made.

`kernel[grid](...)` on CPU tensors takes the ordinary path: arguments are bound and specialised, the kernel is compiled,
its shared memory held against what the target has. Only interpreted kernels are out of reach, so this module stands
outside of `support`, and the tests that launch compiled kernels run in a process of their own:

    @without_interpreter
    def test_store_is_one_launch():
        with FakeDriver("sm_90") as driver:
            kernel[(4,)](...)
        (launch,) = driver.launches
        assert "st.global.v4" in launch.compiled.asm["ptx"]

The module of such a test must not import `support`. Compiled kernels stay in Triton's own cache on disk: its keys cover
the source and the compiler, its writes are atomic, so processes share it, and what was compiled once loads in 2 ms.
"""

import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver as triton_driver

from kvgen.targets import TARGETS

_ROOT = Path(__file__).parent.parent
_ELSEWHERE = "KVGEN_TESTS_WITHOUT_INTERPRETER"  # set in the process that runs such tests
_TESTS: dict[str, list[str]] = defaultdict(list)  # of each file, those that run without the interpreter
_DEVICES = itertools.count()  # a kernel remembers what it compiled for a device: every driver is a new one
_READS_FOR_THE_HOST = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
_COPIES_TO_THE_HOST = (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist)


def without_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run where Triton compiles: in one process for all such tests of a file, without `conftest.py`.

    Parameters and pytest's own fixtures are fine. To run one test in the process at hand, with a debugger say:
    `pytest --noconftest tests/test_file.py::test_name`.
    """
    if _ELSEWHERE in os.environ and knobs.runtime.interpret:
        raise RuntimeError(f"{test.__module__} imports `support`, which turns the interpreter on")
    if not knobs.runtime.interpret:
        return test
    file = str(sys.modules[test.__module__].__file__)
    _TESTS[file].append(test.__name__)

    @functools.wraps(test)
    def report(*_: object, **__: object) -> None:
        _, _, name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].partition("::")
        report_result(name, *run_without_interpreter(file, tuple(_TESTS[file])))

    return report


def report_result(name: str, results: dict[str, ElementTree.Element], output: str) -> None:
    """Fail, skip or pass as the test did in the other process."""
    if name not in results:
        pytest.fail(f"the process without the interpreter did not get to the end of this test:\n{output}", False)
    for verdict in results[name]:
        if verdict.tag in ("failure", "error"):
            pytest.fail(f"in a process without the interpreter:\n{verdict.text}", False)
        if verdict.tag == "skipped":
            pytest.skip(verdict.get("message", ""))


@functools.cache
def run_without_interpreter(file: str, tests: tuple[str, ...]) -> tuple[dict[str, ElementTree.Element], str]:
    """pytest's results of `tests` of `file`, as JUnit test cases by their name and parameters, and what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {_ELSEWHERE: "1"}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        options = ["-v", "--noconftest", "-p", "no:cacheprovider", f"--rootdir={_ROOT}", f"--junitxml={results}"]
        command = [sys.executable, "-m", "pytest", *options, *(f"{file}::{test}" for test in tests)]
        done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
        cases = ElementTree.parse(results).iter("testcase") if results.exists() else ()
        return {case.attrib["name"]: case for case in cases}, done.stdout + done.stderr


@dataclass(frozen=True)
class Launch:
    """A launch: what the kernel was called, its whole grid, all arguments by name, and the kernel with its `asm`.

    Integers are what is left of them in the type that they were compiled for, as Triton's own launchers have it.
    """

    name: str
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    compiled: CompiledKernel
    gpu: int  # that was current


@dataclass
class FakeDriver:
    """The context manager: Triton's driver, for one of TARGETS. Launches inside are not made but listed.

    second: the target of a GPU beside the first. Both are there for pools within `on_gpu`.
    launches: in the order of the calls. They keep their arguments alive.
    kernels: what was compiled, or found on disk, for these launches: one for every specialisation of a kernel.
    gpu: the current one.
    """

    target: str
    second: str | None = None
    launches: list[Launch] = field(default_factory=list, init=False)
    kernels: list[CompiledKernel] = field(default_factory=list, init=False)
    gpu: int = field(default=0, init=False)
    _devices: tuple[int, int] = field(default_factory=lambda: (next(_DEVICES), next(_DEVICES)), init=False)
    _loading: CompiledKernel | None = field(default=None, init=False)
    _patch: pytest.MonkeyPatch = field(default_factory=pytest.MonkeyPatch, init=False)

    def __post_init__(self) -> None:
        for target in self.targets:
            if target not in TARGETS:
                raise ValueError(f"no target {target!r}: {', '.join(TARGETS)}")

    @property
    def targets(self) -> tuple[str, ...]:
        """That of each GPU."""
        return (self.target,) if self.second is None else (self.target, self.second)

    def __enter__(self) -> "FakeDriver":
        if knobs.runtime.interpret:
            raise RuntimeError("Triton interprets kernels in this process: nothing would be compiled or recorded")
        stock_load = CompiledKernel._init_handles

        def load(kernel: CompiledKernel) -> None:
            self._loading = kernel  # Triton tells a driver the parts of a kernel, never the kernel
            stock_load(kernel)

        self._patch.setattr(CompiledKernel, "_init_handles", load)
        self._patch.setattr(triton_driver, "_active", self)
        return self

    def __exit__(self, *_: object) -> None:
        for kernel in self.kernels:  # else each of them asks the next driver to unload it
            kernel.module = kernel._run = None
        self._loading = None
        self._patch.undo()

    # What Triton asks of a driver and, in `utils`, of its library.

    @property
    def utils(self) -> "FakeDriver":
        return self

    def get_current_target(self) -> Any:
        return TARGETS[self.targets[self.gpu]].as_triton()

    def get_current_device(self) -> int:
        return self._devices[self.gpu]

    def get_current_stream(self, device: int) -> int:
        return device

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": TARGETS[self.targets[self._devices.index(device)]].shared_bytes}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        assert self._loading is not None
        self.kernels.append(self._loading)
        module, function, registers, spills, most_threads = self, name, 0, 0, 1024
        return module, function, registers, spills, most_threads

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        kernel, types, gpu = self._loading, source.signature, self.gpu
        names = source.fn.arg_names

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            stream, _function, _metadata, _launch_metadata, _enter, _exit, *arguments = rest
            if (gpu, stream) != (self.gpu, self.get_current_device()):
                raise RuntimeError(f"a kernel of GPU {gpu} in stream {stream}, where GPU {self.gpu} is current")
            pairs = zip(names, arguments, strict=True)
            named = {name: _as_int32(value) if types[name] == "i32" else value for name, value in pairs}
            self.launches.append(Launch(source.fn.__name__, (x, y, z), named, kernel, gpu))

        return launch


def _as_int32(number: int) -> int:
    """What is left of a number in an argument of 32 bits: `extractI32` of Triton's drivers looks at no more."""
    return (number + 2**31) % 2**32 - 2**31


@contextmanager
def on_gpu(driver: FakeDriver, gpu: int) -> Iterator[None]:
    """Tensors inside say that they lie on a GPU, whatever memory they have; the CPU has none. GPU 0 is current."""
    own = torch.device("cuda", gpu)

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        before, driver.gpu = driver.gpu, device.index
        try:
            yield
        finally:
            driver.gpu = before

    class There(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
                return own
            kwargs = {name: value for name, value in (kwargs or {}).items() if (name, value) != ("device", own)}
            return args[0] if own in args[1:] and function is torch.Tensor.to else function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, There():
        patch.setattr(torch.cuda, "current_device", lambda: driver.gpu)
        patch.setattr(torch.cuda, "device", current)
        yield


@dataclass
class Operations:
    """What torch did. On CPU tensors too `to_host` lists what would copy to the host, or wait for a GPU, on a GPU.

    names: of all operations, such as `aten.index_copy_.default`.
    views: how many of them only make a view.
    to_host: scalars, masks as indices, results of unknown size, `cpu`, `to` the CPU, `numpy`, `tolist`. A `copy_` into
        a tensor of the host looks on the CPU like any other: count it by its name.
    """

    names: list[str] = field(default_factory=list)
    views: int = 0
    to_host: list[str] = field(default_factory=list)


@contextmanager
def count_operations() -> Iterator[Operations]:
    """The operations of torch inside, except what autograd and kernels do between themselves."""
    operations = Operations()

    class Executed(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.names.append(str(function))
            operations.views += function.is_view
            indices = args[1] if function.name().startswith("aten::index") else ()
            masks = isinstance(indices, list | tuple) and any(i is not None and i.dtype == torch.bool for i in indices)
            if masks or function.overloadpacket.__name__ in _READS_FOR_THE_HOST:
                operations.to_host.append(str(function))
            return function(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            moves = function is torch.Tensor.to and any(
                isinstance(value, str | torch.device) and torch.device(value).type == "cpu"
                for value in (*args[1:], *kwargs.values())
            )
            if moves or function in _COPIES_TO_THE_HOST:
                operations.to_host.append(f"Tensor.{function.__name__}")
            return function(*args, **kwargs)

    with Called(), Executed():
        yield operations
