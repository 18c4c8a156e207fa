"""Kernels for the tests of the sanitizer: some good, the others wrong in the way that their arguments choose.

A comment `# at: NAME` marks the line that a report names; `line("NAME")` finds it.
"""

from pathlib import Path

import triton
import triton.language as tl


def line(name: str) -> str:
    """`file:line` of the mark `# at: NAME` in this file."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, text in enumerate(lines, start=1) if text.endswith(f"# at: {name}"))
    return f"{__file__}:{number}"


@triton.jit
def store_rows(source, pool, slots, count, PITCH: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr):
    """Right, as long as every slot is one of the pool's and PITCH is at least WIDTH."""
    token = tl.program_id(0) * T + tl.arange(0, T)
    inside = token < count
    column = tl.arange(0, WIDTH)[None, :]
    row = tl.load(slots + token, mask=inside, other=0).to(tl.int64) * PITCH
    value = tl.load(source + token[:, None] * WIDTH + column, mask=inside[:, None], other=0)
    tl.store(pool + row[:, None] + column, value, mask=inside[:, None])  # at: store_rows


@triton.jit
def store_unmasked(source, pool, slots, count, WIDTH: tl.constexpr, T: tl.constexpr, LOAD_TOO: tl.constexpr):
    """Writes slot 0 for the tokens past `count`, or reads their slots."""
    token = tl.program_id(0) * T + tl.arange(0, T)
    column = tl.arange(0, WIDTH)[None, :]
    if LOAD_TOO:
        slot = tl.load(slots + token)  # at: load_unmasked
    else:
        slot = tl.load(slots + token, mask=token < count, other=0)
    value = tl.load(source + token[:, None] * WIDTH + column, mask=(token < count)[:, None], other=0)
    tl.store(pool + slot.to(tl.int64)[:, None] * WIDTH + column, value)  # at: store_unmasked


@triton.jit
def store_scale(pool, OFFSET: tl.constexpr, PITCH: tl.constexpr):
    """An fp32 at byte OFFSET of row `program_id`."""
    pointer = (pool + tl.program_id(0) * PITCH + OFFSET).to(tl.pointer_type(tl.float32))
    tl.store(pointer, 1.0)  # at: store_scale


@triton.jit
def move_one_each(pool, targets, sources, WIDTH: tl.constexpr):
    """A program per token: a race where one token's target is another's source."""
    token = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    row = tl.load(pool + tl.load(sources + token) * WIDTH + column)  # at: move_load
    tl.store(pool + tl.load(targets + token) * WIDTH + column, row)  # at: move_store


@triton.jit
def move_columns(pool, targets, sources, WIDTH: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr):
    """A program per block of columns, all tokens: programs never meet."""
    token = tl.arange(0, N)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    rows = tl.load(pool + tl.load(sources + token)[:, None] * WIDTH + column)
    tl.debug_barrier()
    tl.store(pool + tl.load(targets + token)[:, None] * WIDTH + column, rows)


@triton.jit
def fill_row(table, slot, WIDTH: tl.constexpr):
    """One row of each layer, a program per layer, behind a pointer table."""
    layer = tl.multiple_of(tl.load(table + tl.program_id(0)).to(tl.pointer_type(tl.uint8)), 16)
    tl.store(layer + slot * WIDTH + tl.arange(0, WIDTH), tl.full((WIDTH,), 7, tl.uint8))  # at: fill_row


@triton.jit
def fill_first(pool, other, WIDTH: tl.constexpr):
    """Every program writes the first row of `pool`."""
    tl.store(pool + tl.arange(0, WIDTH), tl.full((WIDTH,), 7, tl.uint8))  # at: fill_first


@triton.jit
def count_up(counter, READ_BACK: tl.constexpr, out):
    """Atomics of all programs on one counter; READ_BACK reads it in the plain way."""
    tl.atomic_add(counter, 1)  # at: count_atomic
    if READ_BACK:
        tl.store(out + tl.program_id(0), tl.load(counter))  # at: count_load


@triton.jit
def swap_if(lock, old, new):
    """A compare-and-swap, 4 bytes past the lock where `old` is 1."""
    tl.atomic_cas(lock + old, old, new)  # at: swap_if
