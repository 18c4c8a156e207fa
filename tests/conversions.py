"""Float conversions in integer arithmetic, for the targets that lack the instruction, and for the interpreter.

Each takes fp32 and returns a code in uint8: what NVIDIA's `cvt` with `.satfinite` gives for every input.
"""

import support.models  # noqa: F401  the project on the path
import triton
import triton.language as tl

from generated.glm_dsa import _e4m3_code


@triton.jit
def e4m3_code(x):
    """e4m3, as generated pools make it: to nearest even, saturating at 448 (infinity too); NaN is 0x7F."""
    return _e4m3_code(x, False)


@triton.jit
def ue8m0_code(x):
    """ue8m0: the power of two at or above |x|, at least 2^-127 (code 0); infinity is 254, NaN is 255."""
    size = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    exponent = size >> 23
    mantissa = size & 0x7FFFFF
    # A subnormal up to 2^-127 has code 0, a larger one code 1.
    above = tl.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = tl.minimum(exponent + above.to(tl.uint32), 254)
    return tl.where(size > 0x7F800000, 255, code).to(tl.uint8)


@triton.jit
def e2m1_code(x):
    """e2m1, in the low four bits: to nearest even, saturating at 6; NaN is +6."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code = (size > 0x3E800000).to(tl.uint32)  # above 0.25: 0.5
    code += (size >= 0x3F400000).to(tl.uint32)  # from 0.75: 1
    code += (size > 0x3FA00000).to(tl.uint32)  # above 1.25: 1.5
    code += (size >= 0x3FE00000).to(tl.uint32)  # from 1.75: 2
    code += (size > 0x40200000).to(tl.uint32)  # above 2.5: 3
    code += (size >= 0x40600000).to(tl.uint32)  # from 3.5: 4
    code += (size > 0x40A00000).to(tl.uint32)  # above 5: 6
    return tl.where(size > 0x7F800000, 7, code | ((bits >> 28) & 8)).to(tl.uint8)


@triton.jit
def e2m1_pairs(x, COUNT: tl.constexpr):
    """COUNT values as COUNT / 2 bytes, the even element in the low four bits."""
    even, odd = tl.split(tl.reshape(e2m1_code(x), (COUNT // 2, 2)))
    return even | (odd << 4)
