"""An address sanitizer for interpreted Triton kernels.

Inside `with Sanitizer():` every pointer that a kernel gets is tagged with the tensor it came from. The tag survives
arithmetic and casts, so each access of each lane that its mask lets through is held against that one tensor, gaps of
a strided view included: a row that spills into the next layer of a slab is caught though the memory is allocated.
Reported, as a `SanitizerError`:

* at once, before memory is touched: OUT-OF-BOUNDS (outside the tensor), WILD (no tag, and in no registered tensor),
  MISALIGNED (not a multiple of the element), DUPLICATE store (two lanes of one store write one byte);
* when the launch ends: WRITE-WRITE and READ-WRITE RACE, two programs of a launch that meet in a byte, in whatever
  order the interpreter ran them. Atomics race with plain accesses, not with each other.

Addresses that a kernel loads from a table have no tag unless the table holds tagged pointers: fill it with
`Sanitizer.table`. `Sanitizer.register` lets untagged addresses into a tensor, without telling tensors apart.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from .races import ATOMIC, READ, WRITE, find_conflict
from .regions import ADDRESS, LOST, TAG_SHIFT, Region, Tags, outside_all

_KINDS = {READ: "load", WRITE: "store", ATOMIC: "atomic"}
_NOT_THE_KERNEL = (str(Path(triton.__file__).parent), __file__)


class SanitizerError(AssertionError):
    """A kernel touched what it must not touch."""


@dataclass(frozen=True)
class _Access:
    """One load, store or atomic of one program, and the lanes that its mask lets through."""

    kind: int
    size: int
    program: tuple[int, int, int]
    site: str
    active: np.ndarray

    def describe(self, position: int) -> str:
        """Who accesses: the active lane number `position`."""
        flat = np.flatnonzero(self.active)[position]
        lane = tuple(int(index) for index in np.unravel_index(flat, self.active.shape))
        return f"program {self.program}, lane {lane}, at {self.site}"

    def __str__(self) -> str:
        return f"{_KINDS[self.kind]} of {self.size} byte{'s' * (self.size != 1)}"


class _Runs(NamedTuple):
    """The active lanes of an access in runs of neighbouring addresses."""

    first: np.ndarray  # of each run the first lane, counted among the active ones
    start: np.ndarray  # its tagged pointer
    end: np.ndarray

    @classmethod
    def of(cls, lanes: np.ndarray, size: int) -> "_Runs":
        first = np.concatenate([[0], np.flatnonzero(np.diff(lanes) != size) + 1])
        last = np.append(first[1:], lanes.size) - 1
        return cls(first, lanes[first], lanes[last] + np.uint64(size))

    def overlap(self) -> bool:
        order = np.argsort(self.start, kind="stable")
        return bool((self.start[order][1:] < np.maximum.accumulate(self.end[order])[:-1]).any())


@dataclass
class Sanitizer:
    """The context manager. `accesses` counts what was checked, so that a test can tell that something was.

    races: whether programs, and lanes of one store, may not meet in a byte. False for a test that stores to one slot
        twice on purpose.
    """

    races: bool = True
    accesses: int = field(default=0, init=False)
    launches: int = field(default=0, init=False)
    _tags: Tags = field(default_factory=Tags, init=False)
    _registered: list[Region] = field(default_factory=list, init=False)
    _alive: list[torch.Tensor] = field(default_factory=list, init=False)
    _patch: pytest.MonkeyPatch | None = field(default=None, init=False)
    _kernel: str = field(default="", init=False)
    _names: Iterator[str] = field(default_factory=lambda: iter(()), init=False)  # of the arguments to come
    _name: str = field(default="", init=False)
    _log: list[tuple[_Access, _Runs]] = field(default_factory=list, init=False)
    _report: SanitizerError | None = field(default=None, init=False)

    def table(
        self,
        tensors: Sequence[torch.Tensor | None],
        names: Sequence[str] | None = None,
        dtype: torch.dtype = torch.uint64,
    ) -> torch.Tensor:
        """A pointer table that keeps provenance: the tagged pointers of `tensors`, 0 for None.

        Kernels interpreted under this sanitizer alone can follow them. Reports call the tensors `names`, by default
        `table[0]` and so on.
        """
        pointers = []
        for index, tensor in enumerate(tensors):
            if tensor is None:
                pointers.append(0)
                continue
            self._alive.append(tensor)
            name = f"table[{index}]" if names is None else names[index]
            pointers.append(self._tags.pointer(Region.of(tensor, name)))
        return torch.tensor(pointers, dtype=dtype)

    def register(self, tensor: torch.Tensor, name: str) -> None:
        """Let untagged addresses into `tensor`."""
        self._alive.append(tensor)
        self._registered.append(Region.of(tensor, name))

    def __enter__(self) -> "Sanitizer":
        if hasattr(interpreter.GridExecutor.__call__, "sanitizer"):
            raise RuntimeError("a sanitizer is active already")
        self._patch = pytest.MonkeyPatch()
        self._wrap_launch(self._patch)
        self._wrap_accesses(self._patch)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._patch is not None
        self._patch.undo()
        self._patch = None

    def _wrap_launch(self, patch: pytest.MonkeyPatch) -> None:
        """Tag the tensors that a launch is given, and look for races when it is over."""
        stock_launch, stock_convert = interpreter.GridExecutor.__call__, interpreter._implicit_cvt
        converting = False

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            persistent = len(self._tags)
            self.launches += 1
            self._kernel = executor.fn.__name__
            self._names = (name for name in executor.arg_names if name not in executor.constexprs)
            self._log, self._report = [], None
            try:
                stock_launch(executor, *args, **kwargs)
                self._check_races()
            except Exception:
                if self._report is None:
                    raise
            finally:
                self._log = []
                self._tags.shrink(persistent)
            if self._report is not None:  # the interpreter wraps what a kernel raises
                raise self._report

        def convert(argument: Any) -> Any:
            nonlocal converting
            outermost = not converting
            if outermost:
                self._name = next(self._names)
            converting = True
            try:
                value = stock_convert(argument)
            finally:
                converting = not outermost
            if hasattr(argument, "data_ptr"):
                region = Region.of(interpreter._unwrap_tensor(argument), self._name)
                value.handle.data = np.array([self._tags.pointer(region)], dtype=np.uint64)
            return value

        launch.sanitizer = self  # type: ignore[attr-defined]
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        patch.setattr(interpreter, "_implicit_cvt", convert)

    def _wrap_accesses(self, patch: pytest.MonkeyPatch) -> None:
        """Check each access before the interpreter makes it, with the bare address."""
        builder = interpreter.InterpreterBuilder
        stock_add = builder.create_addptr
        stock_load, stock_store = builder.create_masked_load, builder.create_masked_store
        stock_rmw, stock_cas = builder.create_atomic_rmw, builder.create_atomic_cas

        def add(self_: Any, pointer: TensorHandle, offset: TensorHandle) -> TensorHandle:
            moved = stock_add(self_, pointer, offset)
            changed = moved.data ^ pointer.data
            if np.bitwise_or.reduce(changed, axis=None) > ADDRESS:
                lost = (pointer.data & ~ADDRESS) | LOST | (moved.data & ADDRESS)
                moved.data = np.where(changed > ADDRESS, lost, moved.data)
            return moved

        def load(self_: Any, pointers: TensorHandle, mask: TensorHandle, *rest: Any) -> TensorHandle:
            bare = self._check(READ, pointers, mask.data)
            return stock_load(self_, bare, mask, *rest)

        def store(self_: Any, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any) -> Any:
            bare = self._check(WRITE, pointers, mask.data)
            return stock_store(self_, bare, value, mask, *rest)

        def rmw(self_: Any, op: Any, pointers: TensorHandle, *operands: Any) -> Any:
            _, mask, *_ = operands
            bare = self._check(ATOMIC, pointers, mask.data)
            return stock_rmw(self_, op, bare, *operands)

        def cas(self_: Any, pointers: TensorHandle, *operands: Any) -> Any:
            return stock_cas(self_, self._check(ATOMIC, pointers, np.True_), *operands)

        replacements: dict[str, Callable[..., Any]] = {
            "create_addptr": add,
            "create_masked_load": load,
            "create_masked_store": store,
            "create_atomic_rmw": rmw,
            "create_atomic_cas": cas,
        }
        for name, replacement in replacements.items():
            patch.setattr(builder, name, replacement)

    def _check(self, kind: int, pointers: TensorHandle, mask: np.ndarray) -> TensorHandle:
        """The pointers without their tags, once every active lane has been found good."""
        self.accesses += 1
        active = np.broadcast_to(mask, pointers.data.shape)
        lanes = pointers.data.reshape(-1) if active.all() else pointers.data[active]
        if lanes.size:
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            access = _Access(kind, size, interpreter.interpreter_builder.grid_idx, _site(), active)
            self._check_bounds(access, lanes)
            if size > 1 and np.bitwise_or.reduce(lanes) & np.uint64(size - 1):
                self._fail_lanes("MISALIGNED", access, lanes, lanes & np.uint64(size - 1) != 0)
            if self.races:
                self._note(access, lanes)
        return TensorHandle(pointers.data & ADDRESS, pointers.dtype)

    def _check_bounds(self, access: _Access, lanes: np.ndarray) -> None:
        """Hold the pointers of the active lanes against the tensors that they came from."""
        low, high = int(lanes.min()), int(lanes.max())
        if low >> int(TAG_SHIFT) == high >> int(TAG_SHIFT):
            region = self._tags.region(low)
            dense = region is not None and not region.steps and not low & int(LOST)
            if dense and region.start <= low & int(ADDRESS) and (high & int(ADDRESS)) + access.size <= region.end:
                return  # the usual case, without a look at each lane
        tags = lanes >> TAG_SHIFT
        for tag in np.unique(tags):
            pointer = int(tag) << int(TAG_SHIFT)
            region = self._tags.region(pointer)
            bad = tags == tag
            if region is None:
                bad &= outside_all(self._registered, lanes & ADDRESS, access.size)
            elif not pointer & int(LOST):
                bad &= region.outside(lanes & ADDRESS, access.size)
            if bad.any():
                self._fail_lanes("WILD" if region is None else "OUT-OF-BOUNDS", access, lanes, bad)

    def _note(self, access: _Access, lanes: np.ndarray) -> None:
        """Log an access for the end of the launch; refuse a store that writes a byte twice."""
        runs = _Runs.of(lanes, access.size)
        if access.kind == WRITE and runs.overlap():
            by_address = np.sort(lanes)
            twice = by_address[1:] - by_address[:-1] < np.uint64(access.size)
            bad = np.isin(lanes, [by_address[1:][twice], by_address[:-1][twice]])
            self._fail_lanes("DUPLICATE", access, lanes, bad)
        if np.prod(interpreter.interpreter_builder.grid_dim) > 1:
            self._log.append((access, runs))

    def _check_races(self) -> None:
        """Look for two programs of the launch that met in a byte."""
        if all(access.kind == READ for access, _ in self._log):
            return
        accesses = [access for access, _ in self._log]
        all_runs = [runs for _, runs in self._log]
        owner = np.repeat(np.arange(len(accesses)), [runs.start.size for runs in all_runs])
        first, start, end = (np.concatenate(column) for column in zip(*all_runs, strict=True))
        bare_start, bare_end = (start & ADDRESS).astype(np.int64), (end & ADDRESS).astype(np.int64)
        _, ny, nz = interpreter.interpreter_builder.grid_dim
        program = np.array([(x * ny + y) * nz + z for x, y, z in (access.program for access in accesses)])
        kind = np.array([access.kind for access in accesses])
        conflict = find_conflict(bare_start, bare_end, program[owner], kind[owner])
        if conflict is None:
            return
        parts = []
        for run in (conflict.first, conflict.second):
            access = accesses[owner[run]]
            lane = int(first[run]) + (conflict.address - int(bare_start[run])) // access.size
            parts.append(f"{access} by {access.describe(lane)}")
        reads = READ in (kind[owner[conflict.first]], kind[owner[conflict.second]])
        pointer = (int(start[conflict.first]) & ~int(ADDRESS)) | conflict.address
        self._fail(
            f"{'READ-WRITE' if reads else 'WRITE-WRITE'} RACE: kernel {self._kernel}: "
            f"{parts[0]}, and {parts[1]}: {self._place(pointer)}"
        )

    def _place(self, pointer: int) -> str:
        """Where a tagged pointer points, in the words of a report."""
        address = pointer & int(ADDRESS)
        region = self._tags.region(pointer)
        if region is None:
            region = next((known for known in self._registered if known.start <= address < known.end), None)
        if region is None:
            return f"untagged address {address:#x}, in no registered tensor (a pointer table? see Sanitizer.table)"
        if pointer & int(LOST):
            return f"an address out of 48 bits, beyond {region}"
        return f"address {address:#x}, offset {address - region.start} of {region}"

    def _fail_lanes(self, problem: str, access: _Access, lanes: np.ndarray, bad: np.ndarray) -> NoReturn:
        """Report an access by the first of its bad lanes."""
        position, count = int(np.argmax(bad)), int(bad.sum())
        self._fail(
            f"{problem} {access}: kernel {self._kernel}, {access.describe(position)}: "
            f"{self._place(int(lanes[position]))} ({count} bad lane{'s' * (count != 1)})"
        )

    def _fail(self, message: str) -> NoReturn:
        self._report = SanitizerError(message)
        raise self._report


def _site() -> str:
    """The file and line of the kernel that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_KERNEL):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
