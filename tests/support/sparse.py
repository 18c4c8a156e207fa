"""Tensors larger than memory, and launches larger than patience.

Memory is committed when it is touched, so that a tensor of many GiB costs what a test reads and writes of it; and of a
grid of millions of programs the interpreter runs the few that a test is about.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

from .guard import guarded_memory

_LARGE = 1 << 30  # bytes
_MAKE = (torch.zeros, torch.empty, torch.Tensor.new_zeros, torch.Tensor.new_empty)

Program = tuple[int, int, int]


def sparse(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> torch.Tensor:
    """Zeros of a shape that end at a guard; strides, which may make rows overlap, are those of dense memory."""
    if strides is None:
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    nbytes = (last + 1) * dtype.itemsize
    return guarded_memory(nbytes, alignment=16)[:nbytes].view(dtype).as_strided(shape, strides)


@contextmanager
def large_tensors() -> Iterator[None]:
    """What torch allocates inside, of a GiB and more, is `sparse`."""

    class Sparse(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function in _MAKE and "dtype" in kwargs:
                own = [argument for argument in args if not isinstance(argument, torch.Tensor)]
                shape = tuple(own[0]) if isinstance(own[0], tuple | list) else tuple(own)
                if prod(shape) * kwargs["dtype"].itemsize >= _LARGE:
                    return sparse(shape, kwargs["dtype"])
            return function(*args, **kwargs)

    with Sparse():
        yield


@contextmanager
def only_programs(*chosen: Program) -> Iterator[None]:
    """Of every launch inside these programs run alone, negative numbers counted from the end of the grid."""
    executor, builder = interpreter.GridExecutor, interpreter.interpreter_builder
    stock, grid = executor.__init__, (1, 1, 1)

    def make(self: Any, function: Any, names: Any, whole: Program, *rest: Any) -> None:
        nonlocal grid
        grid = whole
        stock(self, function, names, (len(chosen), 1, 1), *rest)

    def begin(*_: int) -> None:
        builder.grid_dim = grid

    def turn(index: int, *_: int) -> None:
        builder.grid_idx = tuple(own % extent for own, extent in zip(chosen[index], grid, strict=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "__init__", make)
        patch.setattr(builder, "set_grid_dim", begin)
        patch.setattr(builder, "set_grid_idx", turn)
        yield
