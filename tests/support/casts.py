"""The float casts of Triton's interpreter, put right for the time of a test.

Triton 3.9 interprets kernels with numpy, keeps bf16 and fp8 as integers, and gets what it does with them wrong: casts
to fp8 round ties away from zero, lose carries and do not saturate; fp32 to bf16 truncates; NaN and infinity of fp8
become numbers; an integer cast to bf16, and any arithmetic on bf16 or fp8, work on the bits (1 + 1 = 1.7e38).

Under `cast_fix` casts among fp32, fp16, bf16, e4m3 and e5m2 do what NVIDIA's `cvt.rn.satfinite` does: round to
nearest even, saturate in fp8, and store the canonical NaN (0x7F in fp8, 0x7FFF in bf16) whatever the sign of the
input. torch keeps the sign in fp8, and its bf16 NaN depends on the processor. What cannot be put right is refused.

Under `cast_fix(saturating=False)` those to e4m3 do what gfx950's `v_cvt_scalef32_pk_fp8_f32` does: what rounds to more
than 448 is NaN, and a NaN keeps its sign.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_BEFORE_NAN = 464.0  # half-way from 448 to the next number that e4m3 would have; to even, it is 448
_CANONICAL_NAN = {tl.float8e4nv: 0x7F, tl.float8e5: 0x7F, tl.bfloat16: 0x7FFF}
_AS_BITS = (tl.bfloat16, tl.float8e4nv, tl.float8e5, tl.float8e4b8, tl.float8e5b16, tl.float8e4b15)
_NEAREST_EVEN = (None, interpreter._ir.ROUNDING_MODE.RTNE)
_EXACT_IN_FP32 = 1 << 24


def converted_bits(data: np.ndarray, source: tl.dtype, target: tl.dtype, saturating: bool = True) -> np.ndarray:
    """`data`, values of `source` as the interpreter keeps them, as the bits of `target`; both of them in `_TORCH`."""
    values = torch.from_numpy(np.array(data, order="C")).view(_TORCH[source]).float()
    largest = _LARGEST.get(target)
    in_range = values if largest is None else values.clamp(-largest, largest)
    result = in_range.to(_TORCH[target])
    bits = result.view(_BITS[result.element_size()]).numpy()
    if target in _CANONICAL_NAN:
        bits[values.isnan().numpy()] = _CANONICAL_NAN[target]
    if target is tl.float8e4nv and not saturating:
        is_nan = ~(values.abs() <= _BEFORE_NAN)
        bits[is_nan.numpy()] = np.where(values[is_nan].signbit().numpy(), 0xFF, 0x7F)
    return bits


@contextmanager
def cast_fix(saturating: bool = True) -> Iterator[None]:
    """Kernels interpreted inside cast floats as the hardware does."""
    builder = interpreter.InterpreterBuilder
    stock_convert, stock_cast = interpreter._convert_float, builder.cast_impl

    def convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
        if source in _TORCH and target in _TORCH and rounding in _NEAREST_EVEN:
            return converted_bits(data, source, target, saturating)
        return stock_convert(data, source, target, rounding)

    def cast(self: Any, handle: Any, target: tl.dtype) -> Any:
        source, scalar = handle.dtype.scalar, target.scalar
        if source.is_int() and scalar is tl.bfloat16:
            if (np.abs(handle.data.astype(np.float64)) > _EXACT_IN_FP32).any():
                raise NotImplementedError("an integer beyond 2^24 is rounded twice on its way to bf16: cast it to fp32")
            handle = interpreter.TensorHandle(handle.data.astype(np.float32), tl.float32)
        elif {source, scalar} & set(_AS_BITS) and {source, scalar} != {tl.float32, tl.bfloat16}:
            raise NotImplementedError(f"the interpreter casts {source} to {scalar} by its bits: go through fp32")
        return stock_cast(self, handle, target)

    def refusing(name: str) -> Any:
        stock = getattr(builder, name)

        def operation(self: Any, *operands: Any) -> Any:
            for operand in operands:
                if isinstance(operand, interpreter.TensorHandle) and operand.dtype.scalar in _AS_BITS:
                    raise NotImplementedError(
                        f"the interpreter computes with the bits of {operand.dtype.scalar}: cast to fp32 first"
                    )
            return stock(self, *operands)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_float)
        patch.setattr(builder, "cast_impl", cast)
        for name in ("binary_op", "unary_op", "create_fma"):
            patch.setattr(builder, name, refusing(name))
        yield
