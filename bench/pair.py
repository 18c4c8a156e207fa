"""What `gpu.py` compares with: a row quantised by one kernel and scattered by another, a program for each token."""

import triton
import triton.language as tl


@triton.jit
def quantise(packed_ptr, latent_ptr, rope_ptr, latent_stride, rope_stride):
    """A row of 656 bytes: 512 codes, 4 scales, 64 values of rope."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, 4)[:, None] * 128 + tl.arange(0, 128)[None, :]
    latent = tl.load(latent_ptr + token * latent_stride + element).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(latent), 1) / 448.0, 1e-30)
    codes = (latent / scale[:, None]).to(tl.float8e4nv)
    row_ptr = packed_ptr + token * 656
    tl.store(row_ptr + element, codes.to(tl.uint8, bitcast=True))
    tl.store((row_ptr + 512).to(tl.pointer_type(tl.float32)) + tl.arange(0, 4), scale)
    column = tl.arange(0, 64)
    rope = tl.load(rope_ptr + token * rope_stride + column)
    tl.store((row_ptr + 528).to(tl.pointer_type(tl.bfloat16)) + column, rope)


@triton.jit
def scatter(rows_ptr, packed_ptr, slots_ptr):
    """A row into its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    column = tl.arange(0, 1024)
    row = tl.load(packed_ptr + token * 656 + column, mask=column < 656)
    tl.store(rows_ptr + slot * 656 + column, row, mask=column < 656)
