"""The test support itself: casts, conversions, sanitizer, guard pages."""

import gc
import itertools
import mmap
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import conversions
import numpy as np
import planted
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from support.casts import cast_fix as fixed_casts
from support.guard import GUARD_BYTES, GuardedAllocator, Side, guarded_memory
from support.races import ATOMIC, READ, WRITE, find_conflict
from support.regions import Region
from support.sanitizer import Sanitizer, SanitizerError
from triton.runtime.errors import InterpreterError

# ---- casts and conversions

ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
# Every sign, exponent and upper mantissa; below them the ends, the middle (a tie for bf16) and its neighbours.
LOW_HALVES = [0, 1, 2, 0x3FFF, 0x4000, 0x5555, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xAAAA, 0xC000, 0xFFFD, 0xFFFE]
DENSE_FP32 = torch.tensor(
    np.add.outer(np.arange(1 << 16, dtype=np.uint32) << np.uint32(16), np.array(LOW_HALVES + [0xFFFF], np.uint32))
    .reshape(-1)
    .view(np.float32)
)
ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
E4M3_VALUES = np.array([(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(0x7F)])
E5M2_VALUES = np.array([(c & 3) * 2.0**-16 if c < 4 else (4 + (c & 3)) * 2.0 ** ((c >> 2) - 17) for c in range(0x7C)])
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@triton.jit
def cast_kernel(source, target, N: tl.constexpr, BITS: tl.constexpr):
    """A cast to the element type of `target`, or to the type BITS in a tensor of its bits."""
    index = tl.arange(0, N)
    value = tl.load(source + index)
    if BITS is None:
        tl.store(target + index, value)
    else:
        tl.store(target + index, value.to(BITS).to(target.dtype.element_ty, bitcast=True))


@triton.jit
def convert_kernel(source, target, N: tl.constexpr, CODE: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(target + index, CODE(tl.load(source + index).to(tl.float32)))


@triton.jit
def pairs_kernel(source, target, N: tl.constexpr):
    tl.store(target + tl.arange(0, N // 2), conversions.e2m1_pairs(tl.load(source + tl.arange(0, N)), N))


@triton.jit
def add_kernel(source, target, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(target + index, tl.load(source + index) + tl.load(source + index))


@triton.jit
def count_kernel(target, N: tl.constexpr, FROM: tl.constexpr):
    tl.store(target + tl.arange(0, N), tl.arange(0, N) + FROM)


def cast(source: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """`source` as `target`, cast by an interpreted kernel, as unsigned integers."""
    bits = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[target.itemsize]
    result = torch.empty(source.shape, dtype=target)
    cast_kernel[(1,)](source, result, source.numel(), None)
    return result.view(bits)


def converted(source: torch.Tensor, code: Callable[..., object]) -> torch.Tensor:
    """What one of the integer conversions makes of `source`."""
    result = torch.empty(source.shape, dtype=torch.uint8)
    convert_kernel[(1,)](source, result, source.numel(), code)
    return result


def rounded(source: torch.Tensor, values: np.ndarray, nan: int, sign: int) -> torch.Tensor:
    """The codes of `source` by the table of a format: nearest, ties to the even code, saturating."""
    exact = source.double().numpy()
    size = np.abs(exact)
    middles = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(middles, size)
    tie = (size == middles[np.minimum(code, middles.size - 1)]) & (code < middles.size)
    code = code + (tie & (code % 2 == 1)) + np.where(np.signbit(exact), sign, 0)
    return torch.tensor(np.where(np.isnan(exact), nan, code).astype(np.uint8))


def torch_cast(source: torch.Tensor, target: torch.dtype, nan: int) -> torch.Tensor:
    """torch's own cast as unsigned integers, but for the bits of NaN."""
    result = source.to(target).view({1: torch.uint8, 2: torch.uint16}[target.itemsize])
    result.numpy()[source.isnan().numpy()] = nan
    return result


def mismatches(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one.numpy() != other.numpy()).sum())


SAMPLES = {"bf16": ALL_BF16, "fp32": DENSE_FP32}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize(
    ("target", "values"), [(torch.float8_e4m3fn, E4M3_VALUES), (torch.float8_e5m2, E5M2_VALUES)], ids=["e4m3", "e5m2"]
)
def test_cast_fix_narrows_to_fp8(cast_fix: None, sample: str, target: torch.dtype, values: np.ndarray) -> None:
    codes = cast(SAMPLES[sample], target)
    assert mismatches(codes, rounded(SAMPLES[sample], values, nan=0x7F, sign=0x80)) == 0
    if target is torch.float8_e4m3fn:  # torch does not saturate to e5m2
        assert mismatches(codes, torch_cast(SAMPLES[sample], target, nan=0x7F)) == 0


def test_cast_fix_of_a_cast_that_does_not_saturate() -> None:
    """What rounds to more than 448, from 464 on, is NaN, with the sign."""
    values = [448.0, 463.5, 464.5, float("inf"), -448.0, -465.0, float("nan"), -float("nan")]
    with fixed_casts(saturating=False):
        codes = cast(torch.tensor(values), torch.float8_e4m3fn)
        assert mismatches(cast(ALL_BYTES.view(torch.float8_e4m3fn), torch.float8_e4m3fn), ALL_BYTES) == 0
    assert codes.tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0xFE, 0xFF, 0x7F, 0xFF]


def test_cast_fix_narrows_to_bf16(cast_fix: None) -> None:
    assert mismatches(cast(DENSE_FP32, torch.bfloat16), torch_cast(DENSE_FP32, torch.bfloat16, nan=0x7FFF)) == 0


def test_cast_fix_upcasts(cast_fix: None) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        wide = cast(ALL_BYTES.view(dtype), torch.float32).view(torch.float32)
        torch.testing.assert_close(wide, ALL_BYTES.view(dtype).float(), rtol=0, atol=0, equal_nan=True)
        assert mismatches(cast(ALL_BYTES.view(dtype), dtype), ALL_BYTES) == 0, "a copy is no cast"
    wide = cast(ALL_BF16, torch.float32).view(torch.float32)
    torch.testing.assert_close(wide, ALL_BF16.float(), rtol=0, atol=0, equal_nan=True)


def test_cast_fix_in_the_kernel(cast_fix: None) -> None:
    codes = torch.empty(ALL_BF16.shape, dtype=torch.uint8)
    cast_kernel[(1,)](ALL_BF16, codes, ALL_BF16.numel(), tl.float8e4nv)
    assert mismatches(codes, torch_cast(ALL_BF16, torch.float8_e4m3fn, nan=0x7F)) == 0


def stock_mistakes() -> dict[str, int]:
    upcasts = {}
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        wide = cast(ALL_BYTES.view(dtype), torch.float32).view(torch.float32)
        upcasts[str(dtype)] = int((~torch.isclose(wide, ALL_BYTES.view(dtype).float(), 0, 0, True)).sum())
    return {
        "bf16 to e4m3": mismatches(
            cast(ALL_BF16, torch.float8_e4m3fn), torch_cast(ALL_BF16, torch.float8_e4m3fn, nan=0x7F)
        ),
        "fp32 to bf16": mismatches(
            cast(DENSE_FP32, torch.bfloat16), torch_cast(DENSE_FP32, torch.bfloat16, nan=0x7FFF)
        ),
        **upcasts,
    }


STOCK_MISTAKES = {
    "bf16 to e4m3": 27_974,
    "fp32 to bf16": 495_828,  # of 1,048,576: it truncates
    "torch.float8_e4m3fn": 2,
    "torch.float8_e5m2": 8,
}


def test_the_stock_interpreter_is_wrong_before_and_after_the_fix() -> None:
    """Where this fails, triton has changed: see whether the fix is still needed."""
    assert stock_mistakes() == STOCK_MISTAKES
    with fixed_casts():
        assert set(stock_mistakes().values()) == {0}
    assert stock_mistakes() == STOCK_MISTAKES


def test_cast_fix_of_integers_to_bf16(cast_fix: None) -> None:
    target = torch.empty(1 << 10, dtype=torch.bfloat16)
    count_kernel[(1,)](target, 1 << 10, -512)
    assert torch.equal(target, torch.arange(-512, 512).to(torch.bfloat16))
    with pytest.raises(InterpreterError, match="rounded twice on its way to bf16"):
        count_kernel[(1,)](target, 1 << 10, 1 << 24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_cast_fix_refuses_arithmetic_on_bits(cast_fix: None, dtype: torch.dtype) -> None:
    ones = torch.ones(4).to(dtype)
    with pytest.raises(InterpreterError, match="computes with the bits of .*: cast to fp32 first"):
        add_kernel[(1,)](ones, torch.empty(4, dtype=dtype), 4)


def test_cast_fix_refuses_casts_of_bits(cast_fix: None) -> None:
    with pytest.raises(InterpreterError, match="casts fp64 to bf16 by its bits: go through fp32"):
        cast(torch.ones(4, dtype=torch.float64), torch.bfloat16)


@pytest.mark.parametrize("sample", SAMPLES)
def test_integer_e4m3(sample: str) -> None:
    """In the stock interpreter: integer arithmetic is right without the fix."""
    codes = converted(SAMPLES[sample].float(), conversions.e4m3_code)
    assert mismatches(codes, rounded(SAMPLES[sample], E4M3_VALUES, nan=0x7F, sign=0x80)) == 0


@pytest.mark.parametrize("sample", SAMPLES)
def test_integer_e2m1(sample: str) -> None:
    codes = converted(SAMPLES[sample].float(), conversions.e2m1_code)
    assert mismatches(codes, rounded(SAMPLES[sample], E2M1_VALUES, nan=0x7, sign=0x8)) == 0


@pytest.mark.parametrize("sample", SAMPLES)
def test_integer_ue8m0(sample: str) -> None:
    codes = converted(SAMPLES[sample].float(), conversions.ue8m0_code).numpy()
    size = np.abs(SAMPLES[sample].double().numpy())
    fraction, exponent = np.frexp(size)  # size = fraction * 2^exponent, fraction in [1/2, 1)
    ceiling = np.where(fraction == 0.5, exponent - 1, exponent)
    expected = np.where(np.isfinite(size), np.clip(ceiling + 127, 0, 254), 254)
    expected = np.where(size == 0, 0, expected)
    expected = np.where(np.isnan(size), 255, expected)
    assert int((codes != expected).sum()) == 0


def test_e2m1_pairs() -> None:
    target = torch.empty(4, dtype=torch.uint8)
    pairs_kernel[(1,)](torch.tensor([0.5, -6, 1, 1.5, -0.0, 3, 100, float("nan")]), target, 8)
    assert target.tolist() == [0xF1, 0x32, 0x58, 0x77]


# ---- sanitizer

SLOTS, WIDTH = 16, 64


def report(launch: Callable[[], object]) -> str:
    """What the sanitizer reports of a launch."""
    with pytest.raises(SanitizerError) as error:
        launch()
    return str(error.value)


def store_rows(slots: list[int], pool: torch.Tensor, *, pitch: int = WIDTH, tokens_each: int = 4) -> None:
    """Rows of ones into `pool` at `slots`, of which one more stands in memory than is counted."""
    source = torch.ones((len(slots), WIDTH), dtype=torch.uint8)
    table = torch.tensor(slots, dtype=torch.int64)
    grid = (triton.cdiv(len(slots), tokens_each),)
    planted.store_rows[grid](source, pool, table, len(slots), pitch, WIDTH, tokens_each)


def new_pool(slots: int = SLOTS) -> torch.Tensor:
    return torch.zeros((slots, WIDTH), dtype=torch.uint8)


@pytest.mark.parametrize("tokens_each", [1, 4, 8])
def test_a_good_kernel_passes(sanitizer: Sanitizer, tokens_each: int) -> None:
    pool = new_pool()
    store_rows([3, 15, 0, 7, 8], pool, tokens_each=tokens_each)
    assert pool.sum(dim=1).tolist() == [WIDTH if slot in (0, 3, 7, 8, 15) else 0 for slot in range(SLOTS)]
    assert sanitizer.launches == 1
    assert sanitizer.accesses == 3 * triton.cdiv(5, tokens_each)


@pytest.mark.parametrize(("slot", "offset"), [(SLOTS, SLOTS * WIDTH), (-1, -WIDTH), (1 << 31, WIDTH << 31)])
def test_slot_out_of_range(sanitizer: Sanitizer, slot: int, offset: int) -> None:
    pool = new_pool()
    message = report(lambda: store_rows([0, 1, 2, 3, 4, slot], pool))
    assert message == (
        f"OUT-OF-BOUNDS store of 1 byte: kernel store_rows, program (1, 0, 0), lane (1, 0), at "
        f"{planted.line('store_rows')}: address {pool.data_ptr() + offset:#x}, offset {offset} of 'pool' "
        f"[0, {SLOTS * WIDTH}) ({WIDTH} bad lanes)"
    )
    assert pool[:4].all() and not pool[4:].any(), "the program before wrote, the bad store did not"


@pytest.mark.parametrize("slot", [1 << 40, -(1 << 40), 1 << 42, 1 << 50, (1 << 42) + 3, -(1 << 57)])
def test_slot_beyond_the_address_space(sanitizer: Sanitizer, slot: int) -> None:
    """Such an offset reaches the bits of the tag, or wraps around; it must not pass for another tensor's."""
    message = report(lambda: store_rows([1, slot], new_pool()))
    assert "OUT-OF-BOUNDS store of 1 byte: kernel store_rows, program (0, 0, 0), lane (1, 0)" in message
    assert message.endswith(f" of 'pool' [0, 1024) ({WIDTH} bad lanes)") or message.endswith(
        f"an address out of 48 bits, beyond 'pool' [0, 1024) ({WIDTH} bad lanes)"
    )


def test_lanes_that_are_masked_off_are_no_accesses(sanitizer: Sanitizer) -> None:
    pool = new_pool()
    slots = torch.tensor([1, 2, SLOTS, -1, 1 << 50], dtype=torch.int64)
    planted.store_rows[(2,)](new_pool(2), pool, slots, 2, WIDTH, WIDTH, 4)
    assert not pool.any()


def test_missing_mask_of_a_load(sanitizer: Sanitizer) -> None:
    slots = torch.arange(3)
    message = report(lambda: planted.store_unmasked[(1,)](new_pool(3), new_pool(), slots, 3, WIDTH, 4, True))
    assert message == (
        f"OUT-OF-BOUNDS load of 8 bytes: kernel store_unmasked, program (0, 0, 0), lane (3,), at "
        f"{planted.line('load_unmasked')}: address {slots.data_ptr() + 24:#x}, offset 24 of 'slots' [0, 24) "
        f"(1 bad lane)"
    )


def test_missing_mask_of_a_store(sanitizer: Sanitizer) -> None:
    pool = new_pool()
    slots = torch.tensor([4, 5, 6, 7, 8])
    message = report(lambda: planted.store_unmasked[(2,)](new_pool(5), pool, slots, 5, WIDTH, 4, False))
    assert message == (
        f"DUPLICATE store of 1 byte: kernel store_unmasked, program (1, 0, 0), lane (1, 0), at "
        f"{planted.line('store_unmasked')}: address {pool.data_ptr():#x}, offset 0 of 'pool' [0, 1024) "
        f"({3 * WIDTH} bad lanes)"
    )


def test_pitch_too_large(sanitizer: Sanitizer) -> None:
    pool = new_pool()
    message = report(lambda: store_rows([0, 15], pool, pitch=WIDTH + 1))
    assert message == (
        f"OUT-OF-BOUNDS store of 1 byte: kernel store_rows, program (0, 0, 0), lane (1, 49), at "
        f"{planted.line('store_rows')}: address {pool.data_ptr() + 1024:#x}, offset 1024 of 'pool' [0, 1024) "
        f"(15 bad lanes)"
    )


def test_pitch_too_small_in_one_program(sanitizer: Sanitizer) -> None:
    pool = new_pool()
    message = report(lambda: store_rows([7, 6], pool, pitch=WIDTH - 1))
    assert message == (
        f"DUPLICATE store of 1 byte: kernel store_rows, program (0, 0, 0), lane (0, 0), at "
        f"{planted.line('store_rows')}: address {pool.data_ptr() + 7 * 63:#x}, offset {7 * 63} of 'pool' [0, 1024) "
        f"(2 bad lanes)"
    )


@pytest.mark.parametrize(("slots", "lanes"), [([6, 7], (63, 0)), ([7, 6], (0, 63))])
def test_pitch_too_small_across_programs(sanitizer: Sanitizer, slots: list[int], lanes: tuple[int, int]) -> None:
    pool = new_pool()
    message = report(lambda: store_rows(slots, pool, pitch=WIDTH - 1, tokens_each=1))
    line = planted.line("store_rows")
    assert message == (
        f"WRITE-WRITE RACE: kernel store_rows: "
        f"store of 1 byte by program (0, 0, 0), lane (0, {lanes[0]}), at {line}, and "
        f"store of 1 byte by program (1, 0, 0), lane (0, {lanes[1]}), at {line}: "
        f"address {pool.data_ptr() + 7 * 63:#x}, offset {7 * 63} of 'pool' [0, 1024)"
    )


def test_misaligned(sanitizer: Sanitizer) -> None:
    pool = torch.zeros(256, dtype=torch.uint8)
    planted.store_scale[(2,)](pool, 8, 16)
    assert pool.view(torch.float32)[[2, 6]].tolist() == [1, 1]
    message = report(lambda: planted.store_scale[(2,)](pool, 8, 17))
    assert message == (
        f"MISALIGNED store of 4 bytes: kernel store_scale, program (1, 0, 0), lane (0,), at "
        f"{planted.line('store_scale')}: address {pool.data_ptr() + 25:#x}, offset 25 of 'pool' [0, 256) (1 bad lane)"
    )
    assert "MISALIGNED store of 4 bytes" in report(lambda: planted.store_scale[(1,)](pool, 9, 16))
    assert "OUT-OF-BOUNDS store of 4 bytes" in report(lambda: planted.store_scale[(1,)](pool[:10], 8, 16))


def test_write_write_race(sanitizer: Sanitizer) -> None:
    pool = new_pool()
    planted.fill_first[(1, 1, 1)](pool, pool, WIDTH)
    message = report(lambda: planted.fill_first[(1, 3, 2)](pool, pool, WIDTH))
    line = planted.line("fill_first")
    assert message == (
        f"WRITE-WRITE RACE: kernel fill_first: store of 1 byte by program (0, 0, 0), lane (0,), at {line}, and "
        f"store of 1 byte by program (0, 0, 1), lane (0,), at {line}: address {pool.data_ptr():#x}, "
        f"offset 0 of 'pool' [0, 1024)"
    )


@pytest.mark.parametrize("reversed_lists", [False, True], ids=["reader first", "writer first"])
def test_read_write_race(sanitizer: Sanitizer, reversed_lists: bool) -> None:
    """2 to 5 and 5 to 9 at once: whoever reads slot 5, the other program writes it. One order is right by luck."""
    pool = new_pool()
    sources, targets = torch.tensor([5, 2]), torch.tensor([9, 5])
    if reversed_lists:
        sources, targets = sources.flip(0), targets.flip(0)
    message = report(lambda: planted.move_one_each[(2,)](pool, targets, sources, WIDTH))
    load = f"load of 1 byte by program ({int(reversed_lists)}, 0, 0), lane (0,), at {planted.line('move_load')}"
    store = f"store of 1 byte by program ({int(not reversed_lists)}, 0, 0), lane (0,), at {planted.line('move_store')}"
    parts = (store, load) if reversed_lists else (load, store)
    assert message == (
        f"READ-WRITE RACE: kernel move_one_each: {parts[0]}, and {parts[1]}: "
        f"address {pool.data_ptr() + 5 * WIDTH:#x}, offset {5 * WIDTH} of 'pool' [0, 1024)"
    )


def test_a_move_that_owns_columns_passes(sanitizer: Sanitizer) -> None:
    pool = torch.arange(SLOTS * WIDTH).to(torch.uint8).view(SLOTS, WIDTH)
    before = pool.clone()
    sources, targets = torch.tensor([5, 2, 9, 0]), torch.tensor([9, 5, 2, 1])
    planted.move_columns[(4,)](pool, targets, sources, WIDTH, 4, WIDTH // 4)
    expected = before.clone()
    expected[targets] = before[sources]
    assert torch.equal(pool, expected)


def test_a_race_through_two_arguments(sanitizer: Sanitizer) -> None:
    """What overlaps is memory, not tensors: one program reads row 5 of the pool as `source`, the other writes it."""
    pool, slots = new_pool(), torch.tensor([6, 5])
    planted.store_rows[(2,)](pool[8:], pool[:8], slots, 2, WIDTH, WIDTH, 1)
    message = report(lambda: planted.store_rows[(2,)](pool[5:7], pool[:8], slots, 2, WIDTH, WIDTH, 1))
    assert message.startswith("READ-WRITE RACE: kernel store_rows: load of 1 byte by program (0, 0, 0), lane (0, 0), ")
    assert message.endswith(f"address {pool[5].data_ptr():#x}, offset 0 of 'source' [0, 128)")


def test_a_slot_twice_on_purpose() -> None:
    pool = new_pool()
    with Sanitizer(races=False) as sanitizer:
        store_rows([3, 3, 3], pool, tokens_each=1)
        store_rows([3, 3, 3], pool, tokens_each=4)
        assert "OUT-OF-BOUNDS" in report(lambda: store_rows([SLOTS], pool))
    assert sanitizer.accesses == 3 * 3 + 3 + 3


def test_atomics(sanitizer: Sanitizer) -> None:
    counter, out = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    planted.count_up[(8,)](counter, False, out)
    assert counter.item() == 8
    message = report(lambda: planted.count_up[(8,)](counter, True, out))
    assert message.startswith("READ-WRITE RACE: kernel count_up: ")
    assert f"atomic of 4 bytes by program (0, 0, 0), lane (0,), at {planted.line('count_atomic')}" in message
    assert f"load of 4 bytes by program (1, 0, 0), lane (0,), at {planted.line('count_load')}" in message
    assert "OUT-OF-BOUNDS atomic of 4 bytes" in report(lambda: planted.count_up[(1,)](counter[:0], False, out))
    planted.swap_if[(1,)](counter, 0, 7)
    message = report(lambda: planted.swap_if[(1,)](counter, 1, 7))
    assert (
        f"OUT-OF-BOUNDS atomic of 4 bytes: kernel swap_if, program (0, 0, 0), lane (0,), at {planted.line('swap_if')}"
        in message
    )


LAYERS = 3


def layer_of(slab: torch.Tensor, layer: int, page_major: bool) -> torch.Tensor:
    """One layer of a slab of LAYERS layers: layer after layer, or the layers' rows side by side."""
    return slab.view(SLOTS, LAYERS, WIDTH)[:, layer] if page_major else slab.view(LAYERS, SLOTS, WIDTH)[layer]


@pytest.mark.parametrize("page_major", [False, True], ids=["layer-major", "page-major"])
def test_a_spill_into_the_next_layer_of_a_slab(sanitizer: Sanitizer, page_major: bool) -> None:
    slab = torch.zeros(LAYERS * SLOTS * WIDTH, dtype=torch.uint8)
    layer = layer_of(slab, 1, page_major)
    pitch = layer.stride(0)
    store_rows([0, SLOTS - 1], layer, pitch=pitch)
    assert layer.sum() == 2 * WIDTH == slab.sum()
    store_rows([SLOTS], slab, pitch=WIDTH)  # the slab as a whole has room for it
    # one slot too many, and the row of the neighbour
    for slots, at, bad_pitch in (([2, SLOTS], SLOTS * pitch, pitch), ([-1], -pitch, pitch), ([1], WIDTH, WIDTH)):
        if bad_pitch == WIDTH and not page_major:
            continue
        message = report(lambda slots=slots, bad_pitch=bad_pitch: store_rows(slots, layer, pitch=bad_pitch))
        assert "OUT-OF-BOUNDS store of 1 byte: kernel store_rows, program (0, 0, 0), " in message
        assert f"address {layer.data_ptr() + at:#x}, offset {at} of 'pool' [0, " in message
        assert message.endswith(f" in blocks of {WIDTH} ({WIDTH} bad lanes)") == page_major


def test_a_spill_behind_a_pointer_table(sanitizer: Sanitizer) -> None:
    slab = torch.zeros((LAYERS, SLOTS, WIDTH), dtype=torch.uint8)
    for table, name in (
        (sanitizer.table(list(slab)), "table[2]"),
        (sanitizer.table(list(slab), names=["kv 0", "kv 1", "kv 2"], dtype=torch.int64), "kv 2"),
    ):
        slab.zero_()
        planted.fill_row[(LAYERS,)](table, SLOTS - 1, WIDTH)
        assert slab.sum() == slab[:, -1].sum() == 7 * LAYERS * WIDTH
        assert "OUT-OF-BOUNDS" in report(lambda table=table: planted.fill_row[(LAYERS,)](table, SLOTS, WIDTH))
        message = report(lambda table=table: planted.fill_row[(1,)](table[2:], -1, WIDTH))
        assert message == (
            f"OUT-OF-BOUNDS store of 1 byte: kernel fill_row, program (0, 0, 0), lane (0,), at "
            f"{planted.line('fill_row')}: address {slab[2].data_ptr() - WIDTH:#x}, offset {-WIDTH} of '{name}' "
            f"[0, 1024) ({WIDTH} bad lanes)"
        )
        assert slab.sum() == 7 * LAYERS * WIDTH, "nothing else was written"


def test_a_race_behind_a_pointer_table(sanitizer: Sanitizer) -> None:
    layer = new_pool()
    message = report(lambda: planted.fill_row[(3,)](sanitizer.table([new_pool(), layer, layer]), 2, WIDTH))
    line = planted.line("fill_row")
    assert message == (
        f"WRITE-WRITE RACE: kernel fill_row: store of 1 byte by program (1, 0, 0), lane (0,), at {line}, and "
        f"store of 1 byte by program (2, 0, 0), lane (0,), at {line}: address {layer[2].data_ptr():#x}, "
        f"offset {2 * WIDTH} of 'table[1]' [0, 1024)"
    )


def test_untagged_addresses(sanitizer: Sanitizer) -> None:
    """Of a table of bare addresses, and of an entry that is none."""
    slab = torch.zeros((2, SLOTS, WIDTH), dtype=torch.uint8)
    table = torch.tensor([layer.data_ptr() for layer in slab])
    message = report(lambda: planted.fill_row[(2,)](table, 1, WIDTH))
    assert message == (
        f"WILD store of 1 byte: kernel fill_row, program (0, 0, 0), lane (0,), at {planted.line('fill_row')}: "
        f"untagged address {slab[0, 1].data_ptr():#x}, in no registered tensor (a pointer table? see Sanitizer.table) "
        f"({WIDTH} bad lanes)"
    )
    assert not slab.any()
    sanitizer.register(slab, "slab")
    planted.fill_row[(2,)](table, 1, WIDTH)
    assert slab.sum() == slab[:, 1].sum() == 2 * 7 * WIDTH
    planted.fill_row[(1,)](table, SLOTS, WIDTH)  # into the next layer: without a tag this is not seen
    assert "WILD store of 1 byte" in report(lambda: planted.fill_row[(2,)](table, SLOTS, WIDTH))
    assert "WILD store of 1 byte" in report(lambda: planted.fill_row[(1,)](table, -1, WIDTH))
    assert "of 'slab' [0, 2048)" in report(lambda: planted.fill_row[(2,)](table[:1].repeat(2), 1, WIDTH))
    assert "untagged address 0x40" in report(lambda: planted.fill_row[(1,)](sanitizer.table([None]), 1, WIDTH))


def test_tags_of_a_launch_end_with_it(sanitizer: Sanitizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tables stay, whatever the number of launches."""
    monkeypatch.setattr("support.regions.MAX_TAGS", 8)
    layer = new_pool()
    table = sanitizer.table([layer])
    for slot in range(SLOTS):
        planted.fill_row[(1,)](table, slot, WIDTH)
        store_rows([slot], new_pool())
    assert (layer == 7).all()
    with pytest.raises(RuntimeError, match="more than 7 tensors in one sanitizer"):
        sanitizer.table([layer] * 7)


def test_sanitizer_undoes_itself_and_does_not_nest() -> None:
    big = torch.zeros((2 * SLOTS, WIDTH), dtype=torch.uint8)
    with Sanitizer() as sanitizer:
        with pytest.raises(RuntimeError, match="active already"), Sanitizer():
            pass
        assert "OUT-OF-BOUNDS" in report(lambda: store_rows([SLOTS], big[:SLOTS]))
    seen = sanitizer.accesses
    store_rows([SLOTS], big[:SLOTS])  # unseen, and within the allocation
    assert (sanitizer.accesses, big.sum()) == (seen, WIDTH)


def test_other_errors_are_not_the_sanitizer_s(sanitizer: Sanitizer) -> None:
    assert "OUT-OF-BOUNDS" in report(lambda: store_rows([SLOTS], new_pool()))
    with pytest.raises(InterpreterError, match="arange's range must be a power of 2"):
        planted.fill_first[(1,)](new_pool(), new_pool(), 3)
    with pytest.raises(TypeError, match="missing"):
        planted.fill_first[(1,)](new_pool(), WIDTH=4)


def test_sanitizer_and_cast_fix_together(cast_fix: None, sanitizer: Sanitizer) -> None:
    assert mismatches(cast(ALL_BF16, torch.float8_e4m3fn), torch_cast(ALL_BF16, torch.float8_e4m3fn, 0x7F)) == 0
    assert sanitizer.accesses == 2


Interval = tuple[int, int, int, int]
intervals = st.lists(st.tuples(*[st.integers(0, 24), st.integers(1, 9), st.integers(0, 3), st.integers(0, 2)]))


def conflicting(one: Interval, other: Interval) -> bool:
    (start, size, program, kind), (start_2, size_2, program_2, kind_2) = one, other
    meet = max(start, start_2) < min(start + size, start_2 + size_2)
    harmless = kind == kind_2 and kind in (READ, ATOMIC)
    return meet and program != program_2 and not harmless


@settings(max_examples=600, deadline=None)
@given(intervals)
def test_find_conflict_is_exact(accesses: list[Interval]) -> None:
    start, size, program, kind = np.array(accesses, dtype=np.int64).reshape(-1, 4).T
    found = find_conflict(start, start + size, program, kind)
    pairs = [
        pair
        for pair in itertools.combinations(range(len(accesses)), 2)
        if conflicting(*map(accesses.__getitem__, pair))
    ]
    if found is None:
        assert not pairs
    else:
        assert tuple(sorted(found[:2])) in pairs
        assert all(start[i] <= found.address < start[i] + size[i] for i in found[:2])


def test_find_conflict_of_many() -> None:
    """A hundred thousand rows, each program its own; then one byte that another writes."""
    count = 100_000
    start = np.random.default_rng(0).permutation(count) * 600
    end, program = start + 576, np.arange(count) // 8
    kind = np.full(count, WRITE)
    assert find_conflict(start, end, program, kind) is None
    start[-1] -= 25
    found = find_conflict(start, end, program, kind)
    assert found is not None and found.address == start[-1] and count - 1 in found[:2]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_region_is_exact(data: st.DataObject) -> None:
    """Against the bytes of the view, counted one by one."""
    memory = torch.arange(4096, dtype=torch.int32).to(torch.int16)
    shape, stride, extent = [], [], 1
    for _ in range(data.draw(st.integers(1, 3))):
        count = data.draw(st.integers(1, 4))
        stride.insert(0, extent + data.draw(st.sampled_from([0, 0, 1, 5])))
        shape.insert(0, count)
        extent = stride[0] * (count - 1) + extent
    order = data.draw(st.permutations(range(len(shape))))
    view = memory[8:].as_strided(shape, stride, 8).permute(order)
    region = Region.of(view, "view")
    index = memory.new_tensor(range(4096), dtype=torch.int64).as_strided(shape, stride, 8)
    mine = {2 * int(element) + half for element in index.reshape(-1) for half in (0, 1)}
    size = data.draw(st.sampled_from([1, 2]))
    offsets = np.arange(0, 2 * (extent + 16), size)
    addresses = offsets.astype(np.uint64) + np.uint64(memory.data_ptr())
    expected = [not all(int(offset) + byte in mine for byte in range(size)) for offset in offsets]
    assert region.outside(addresses, size).tolist() == expected


def test_region_of_overlapping_rows_is_its_hull() -> None:
    memory = torch.zeros(16, dtype=torch.int16)
    for view, nbytes in ((memory[:2].expand(5, 2), 4), (memory.unfold(0, 4, 3), 32), (memory[:1].expand(3), 2)):
        region = Region.of(view, "view")
        offsets = np.arange(-2, 40)
        outside = region.outside((offsets + memory.data_ptr()).astype(np.uint64), 1)
        assert outside.tolist() == [not 0 <= offset < nbytes for offset in offsets]


def test_a_table_keeps_its_tensors_alive(sanitizer: Sanitizer) -> None:
    layer = new_pool()
    alive = weakref.ref(layer)
    table = sanitizer.table([layer])
    del layer
    gc.collect()
    assert alive() is not None
    planted.fill_row[(1,)](table, 0, WIDTH)


# ---- guard pages


@pytest.mark.parametrize("side", ["left", "right"])
def test_out_of_range_access_kills(side: Side) -> None:
    """The last row before the guard can be written by a kernel, the first behind it kills the process."""
    program = f"""
import sys, torch, planted
from support.guard import guarded_memory
pool = guarded_memory({SLOTS} * {WIDTH}, {side!r}).view({SLOTS}, {WIDTH})
source = torch.ones((1, {WIDTH}), dtype=torch.uint8)
for slot in {[0, -1] if side == "left" else [SLOTS - 1, SLOTS]}:
    planted.store_rows[(1,)](source, pool, torch.tensor([slot]), 1, {WIDTH}, {WIDTH}, 1)
    print(slot, pool.sum().item(), flush=True)
"""
    tests = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", program], cwd=tests, capture_output=True, text=True, check=False)
    assert done.stdout == f"{0 if side == 'left' else SLOTS - 1} {WIDTH}\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def mapped(address: int) -> str | None:
    """The permissions of the page at `address`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1]
    return None


@pytest.mark.parametrize("nbytes", [1, 255, 256, 4096, 4097, 64 * 656, 3 * 8448, 656])
@pytest.mark.parametrize("alignment", [1, 16, 256])
@pytest.mark.parametrize("side", ["left", "right"])
def test_guarded_memory(side: Side, alignment: int, nbytes: int) -> None:
    memory = guarded_memory(nbytes, side, alignment)
    assert (memory.dtype, memory.shape, memory.is_contiguous()) == (torch.uint8, (nbytes,), True)
    assert not memory.any()
    start = memory.data_ptr()
    end = start + nbytes
    assert start % alignment == 0
    slack = -nbytes % alignment if side == "right" else 0
    assert (mapped(start), mapped(end - 1)) == ("rw-p", "rw-p")
    if side == "left":
        assert mapped(start - 1) == "---p"
    else:
        assert mapped(end + slack) == "---p"
        assert slack == 0 or mapped(end + slack - 1) == "rw-p"
    assert mapped(start - GUARD_BYTES) == mapped(end + GUARD_BYTES - mmap.PAGESIZE) == "---p"


def test_guarded_memory_goes_back_with_the_last_view() -> None:
    memory = guarded_memory(1 << 20)
    row = memory.view(16, -1)[3]
    address = memory.data_ptr()
    del memory
    gc.collect()
    row.fill_(9)
    assert mapped(address) == "rw-p"
    del row
    gc.collect()
    assert mapped(address) != "rw-p"


def test_guarded_is_the_hook_of_a_pool(guarded: GuardedAllocator, sanitizer: Sanitizer) -> None:
    layers = [guarded("kv", layer, SLOTS * WIDTH) for layer in range(2)]
    assert all(layer.data_ptr() % 256 == 0 for layer in layers)
    planted.fill_row[(2,)](sanitizer.table(layers), SLOTS - 1, WIDTH)
    assert all(layer[-WIDTH:].sum() == layer.sum() == 7 * WIDTH for layer in layers)
    assert guarded("kv", 2, 0).numel() == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("side", ["left", "right"])
def test_last_row_of_5_gib(sanitizer: Sanitizer, side: Side) -> None:
    slots = (5 << 30) // 656
    before = resident_bytes()
    pool = guarded_memory(slots * 656, side).view(slots, 656)
    source = torch.arange(3 * 512).to(torch.uint8).view(3, 512)
    some = [0, (1 << 32) // 656 + 1, slots - 1]
    planted.store_rows[(1,)](source, pool, torch.tensor(some), 3, 656, 512, 4)
    for row, slot in zip(source, some, strict=True):
        assert torch.equal(pool[slot, :512], row)
        assert not pool[slot, 512:].any()
    message = report(lambda: planted.store_rows[(1,)](source, pool, torch.tensor([slots]), 1, 656, 512, 1))
    assert f"offset {slots * 656} of 'pool' [0, {slots * 656})" in message
    assert resident_bytes() - before < 1 << 26, "the pool is committed lazily"
