"""The same seeded inputs through SGLang's pools and through the generated ones: the same bytes.

Where they differ, SGLang is wrong or the adapter promises more; each difference is a test of its own, with the reason.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deployments import DTYPES, E4M3, Deployment, build, build_own, glm_5_2
from pairs import DSA, PAGE, SHARED, SLOTS, TOKENS, Both, difference, layer, of
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.platforms import current_platform

raw_only = of("dsa fp8_raw")
bf16_only = of("dsa bf16")
unscaled = of("dsa bf16", "dsa fp8_raw")


# -- the same


def test_set_mla_kv_buffer(both: Both) -> None:
    """Slots as a tensor and as SGLang's KVWriteLoc, int32 and int64, slot 0 among them, which both skip."""
    for layer_id in range(4):
        for wrap in (lambda loc: loc, lambda loc: loc.int(), KVWriteLoc):
            loc = torch.cat([both.slots(100), torch.tensor([0])])
            nope, rope = both.latent(101)
            for pool in both:
                pool.set_mla_kv_buffer(layer(layer_id), wrap(loc), nope, rope)
            both.check()
            for pool in both:
                pool.set_mla_kv_buffer(None, wrap(loc), nope[:, 0], rope[:, 0], layer_id_override=SHARED)
            both.check()


@raw_only
def test_set_mla_kv_buffer_of_codes(both: Both) -> None:
    """As the trtllm backend hands them over, which quantises together with the rotation. Any bits."""
    for layer_id in range(4):
        codes = torch.from_numpy(both.random.integers(0, 256, (90, 1, 576), np.uint8)).view(E4M3)
        loc = both.slots(90)
        for pool in both:
            pool.set_mla_kv_buffer(layer(layer_id), loc, *codes.split([512, 64], -1))
        both.check()


@unscaled
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_set_mla_kv_buffer_of_other_floats(both: Both, dtype: torch.dtype) -> None:
    """Both cast once, from what is given to what is stored."""
    loc, (nope, rope) = both.slots(90), both.latent(90, torch.float32)
    for pool in both:
        pool.set_mla_kv_buffer(layer(1), loc, nope.to(dtype), rope.to(dtype))
    both.check()


@unscaled
def test_set_kv_buffer(both: Both) -> None:
    """Whole rows; both write slot 0."""
    loc = torch.cat([both.slots(50), torch.tensor([0])])
    rows = torch.cat(both.latent(51), -1)
    for pool in both:
        pool.set_kv_buffer(layer(2), KVWriteLoc(loc), rows, None)
    both.check()


def test_views(both: Both) -> None:
    """What SGLang's attention kernels read."""
    for layer_id in range(4):
        for name in ("get_key_buffer", "get_value_buffer"):
            one, other = (getattr(pool, name)(layer_id) for pool in both)
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        key, value = both.generated.get_kv_buffer(layer_id)
        assert key.data_ptr() == value.data_ptr() == both.generated.generated.buffer("kv", layer_id).data_ptr()
    assert both.own.get_kv_buffer_shape() == both.generated.get_kv_buffer_shape()
    for layer_id in range(SHARED):
        one, other = (pool.get_index_k_with_scale_buffer(layer_id) for pool in both)
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(one, other)


@unscaled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
def test_get_mla_kv_buffer(both: Both, dtype: torch.dtype | None) -> None:
    loc, (nope, rope) = both.slots(80), both.latent(80)
    for pool in both:
        pool.set_mla_kv_buffer(layer(1), loc, nope, rope)
    for one, other in zip(*(pool.get_mla_kv_buffer(layer(1), loc[:70], dtype) for pool in both), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_set_index_k_scale_buffer(both: Both) -> None:
    """Scales with an axis of 1 and without; both write slot 0."""
    for layer_id in range(SHARED):
        loc = torch.cat([both.slots(100), torch.tensor([0])])
        codes, scales = both.keys(101)
        for pool in both:
            pool.set_index_k_scale_buffer(layer_id, loc, codes, scales[:, None] if layer_id else scales)
        both.check()


def test_get_index_k_scale_buffer(both: Both) -> None:
    """Sequences of several pages in any order, one of them empty."""
    pages = torch.from_numpy(both.random.permutation(SLOTS // PAGE)[:8].reshape(4, 2)).int()
    lengths = torch.tensor([100, 0, 64, 3])
    for layer_id in range(SHARED):
        results = [pool.get_index_k_scale_buffer(layer_id, lengths, pages, 167, 100) for pool in both]
        for one, other in zip(*results, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert torch.equal(one, other)
        assert [tuple(own.shape) for own in results[0]] == [(167, 128), (167, 4)]


def test_move_kv_cache(both: Both) -> None:
    """Onto slots that are not read, onto slots that are, and with pairs that stay where they are."""
    slots = both.slots(120)
    for targets, sources in (
        (slots[:60], slots[60:]),
        (slots, slots.roll(7)),
        (torch.zeros(3).long(), torch.zeros(3).long()),
    ):
        for pool in both:
            pool.move_kv_cache(targets.view(-1, 1), sources.view(-1, 1))
        both.check()


def test_cpu_copy_of_whole_pages(both: Both) -> None:
    """As SGLang makes them of a request that it retracts: whole pages, in any order, into other pages."""
    pages = both.random.permutation(SLOTS // PAGE - 1) + 1
    saved, loaded = (
        torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in own]) for own in (pages[:3], pages[3:6])
    )
    copies = [pool.get_cpu_copy(saved, mamba_indices=None, req_pool_index=0) for pool in both]
    both.fill()
    for pool, copy in zip(both, copies, strict=True):
        pool.load_cpu_copy(copy, loaded, mamba_indices=None, req_pool_index=0)
    both.check()


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("kv_format", DTYPES)
def test_layers_are_waited_for(kv_format: str, start: int) -> None:
    """Reads wait until a layer has been loaded back from the host; layers are counted from the first of the stage."""
    waited: list[int] = []
    loc, lengths, table = torch.tensor([3]), torch.tensor([1]), torch.tensor([[1]])
    nope, rope = torch.ones(1, 512).bfloat16(), torch.ones(1, 64).bfloat16()
    codes, scales = torch.zeros(1, 128).to(E4M3), torch.ones(1)
    with Deployment(kv_format, glm_5_2(), start, start + 4).serving() as configurator:
        for pool in (build_own(configurator, TOKENS), build(configurator, TOKENS)):
            pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
            pool.get_mla_kv_buffer(layer(start + 1), loc, torch.bfloat16)
            pool.get_index_k_scale_buffer(start + 2, lengths, table, 1, 1)
            pool.get_index_k_with_scale_buffer(start)
            pool.get_key_buffer(start + 3)
            pool.get_value_buffer(start + 2)
            if kv_format == "fp8_raw":
                pool.get_mla_kv_buffer(layer(start), loc)
            pool.set_mla_kv_buffer(layer(start), loc, nope, rope)
            pool.set_index_k_scale_buffer(start, loc, codes, scales)
    assert waited == [1, 2, 0, 3, 2, *([0] if kv_format == "fp8_raw" else [])] * 2


@unscaled
def test_layers_by_override(both: Both) -> None:
    """The layer that is named beside the one of the module, layer 0 too."""
    loc, (nope, rope) = both.slots(30), both.latent(30)
    for pool in both:
        pool.set_mla_kv_buffer(layer(2), loc, nope, rope, layer_id_override=0)
        pool.set_kv_buffer(layer(2), loc, torch.cat([rope, nope], -1), None, layer_id_override=0)
        pool.set_kv_buffer(layer(2), loc, torch.cat([nope, rope], -1), None, layer_id_override=SHARED)
    both.check()


@raw_only
def test_codes_come_back_as_they_are(both: Both) -> None:
    """In two tensors of their own; zeros for slots outside."""
    loc = both.slots(40)
    results = [pool.get_mla_kv_buffer(layer(1), loc) for pool in both]
    for one, other in zip(*results, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    outside = both.generated.get_mla_kv_buffer(layer(1), torch.tensor([-1, SLOTS, 2**40]))
    assert not any(own.view(torch.uint8).any() for own in outside)


def test_sums_of_lengths_as_sglang_takes_them(both: Both) -> None:
    """NumPy's integers and tensors of one, and page tables of more requests than there are."""
    lengths, pages = torch.tensor([70, 3]), torch.tensor([[1, 2], [3, 0], [4, 5]])
    for sums in ((np.int64(73), np.int64(70)), (torch.tensor(73), torch.tensor(70))):
        one, other = (pool.get_index_k_scale_buffer(1, lengths, pages, *sums) for pool in both)
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_copies_wait_for_other_streams(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model writes on another stream than the scheduler copies on."""
    order: list[str] = []
    pool = both.generated
    monkeypatch.setattr(type(current_platform), "synchronize", lambda self: order.append("wait"))
    for name in ("get_cpu_copy", "load_cpu_copy"):
        own = getattr(pool.generated, name)
        monkeypatch.setattr(pool.generated, name, lambda *all, name=name, own=own: (order.append(name), own(*all))[1])
    copy = pool.get_cpu_copy(torch.arange(64, 128))
    pool.load_cpu_copy(copy, torch.arange(64, 128))
    assert order == ["wait", "get_cpu_copy", "wait", "load_cpu_copy", "wait"]


@bf16_only
def test_sglangs_own_checks_of_slots(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its debug mode finds slots outside, and its unified pools take physical slots alone, in either pool."""
    (nope, rope), outside, inside = both.latent(1), torch.tensor([SLOTS]), torch.tensor([5])
    rows = torch.cat([nope, rope], -1)
    monkeypatch.setenv("SGLANG_ENABLE_ASYNC_ASSERT", "1")
    for pool in both:
        for call in (
            lambda pool=pool: pool.set_mla_kv_buffer(layer(0), outside, nope, rope),
            lambda pool=pool: pool.set_kv_buffer(layer(0), outside, rows, None),
            lambda pool=pool: pool.move_kv_cache(outside, inside),
            lambda pool=pool: pool.move_kv_cache(inside, outside),
        ):
            with pytest.raises(RuntimeError, match="out of range"):
                call()
    monkeypatch.setattr("sglang.srt.mem_cache.memory_pool.KVCache.requires_physical_write_loc", True)
    for pool in both:
        with pytest.raises(ValueError, match="write loc is not marked physical"):
            pool.set_mla_kv_buffer(layer(0), inside, nope, rope)
        with pytest.raises(ValueError, match="write loc is not marked physical"):
            pool.set_kv_buffer(layer(0), inside, rows, None)
        pool.set_mla_kv_buffer(layer(0), KVWriteLoc(inside, physical=True), nope, rope)


# -- different


@difference(
    "SGLang stores the code of -448 for zeros whose block has no other value, of which it reads back -0",
    "dsa fp8_scaled",
)
def test_block_of_zeros(both: Both) -> None:
    nope, rope = torch.zeros(1, 1, 512).bfloat16(), torch.zeros(1, 1, 64).bfloat16()
    stored = stored_rows(both, nope, rope)
    assert stored == [[0xFE] * 512 + [0] * 144, [0] * 656]


@difference("SGLang stores the code of -448 for a NaN; the generated pool stores a NaN", "dsa fp8_scaled")
def test_nan(both: Both) -> None:
    nope, rope = torch.ones(1, 1, 512).bfloat16(), torch.zeros(1, 1, 64).bfloat16()
    nope.view(torch.int16)[0, 0, [5, 200]] = torch.tensor([0x7FC0, -0x40]).short()  # a NaN of either sign
    one, other = stored_rows(both, nope, rope)
    assert [row[5] for row in (one, other)] == [0xFE, 0x7F]
    assert [row[200] for row in (one, other)] == [0xFE, 0x7F]
    one[5] = one[200] = 0x7F
    assert one == other  # the others of the block, and its scale, are as if it were not there


@difference(
    "SGLang reads an infinity of either sign back as -infinity; the generated pool reads it back as NaN",
    "dsa fp8_scaled",
)
def test_infinity(both: Both) -> None:
    nope, rope = torch.ones(1, 1, 512).bfloat16(), torch.zeros(1, 1, 64).bfloat16()
    nope[0, 0, 5], nope[0, 0, 200] = float("inf"), float("-inf")
    one, other = stored_rows(both, nope, rope)
    infinite = [0, 0, 0x80, 0x7F]
    assert one[512:520] == other[512:520] == infinite * 2
    assert [row[5] for row in (one, other)] == [row[200] for row in (one, other)] == [0xFE, 0x7F]
    one[5] = one[200] = 0x7F
    assert one == other


@difference(
    "SGLang stores scales under 2^-126, for which its own 1/scale overflows; the generated pool stores 2^-126",
    "dsa fp8_scaled",
)
def test_scale_under_the_normal_numbers(both: Both) -> None:
    nope, rope = torch.zeros(1, 1, 512).bfloat16(), torch.zeros(1, 1, 64).bfloat16()
    nope[0, 0] = 2.0**-133
    nope[0, 0, :4] = torch.tensor([2.0**-120, -(2.0**-121), 2.0**-126, 0.0])
    one, other = stored_rows(both, nope, rope)
    # amax / 448 = 2^-128.8: SGLang's scale is a denormal, 1 / scale infinite, and each code that of +-448, or of a NaN.
    assert np.frombuffer(bytes(one[512:516]), np.float32)[0] == np.float32(2.0**-120) / np.float32(448)
    assert one[:4] == [0x7E, 0xFE, 0x7E, 0xFE]
    # With 2^-126: 2^6 = 64, -2^5, 1 and 0.
    assert np.frombuffer(bytes(other[512:516]), np.float32)[0] == np.float32(2.0**-126)
    assert other[:4] == [0x68, 0xE0, 0x38, 0]
    assert other[4] == 0x04  # 2^-133 * 2^126 = 2^-7, 4 units of 2^-9


@difference("SGLang keeps the sign of a NaN; the generated pool has one NaN", "dsa fp8_raw", "mla fp8_raw")
def test_negative_nan(both: Both) -> None:
    nope, rope = torch.ones(1, 1, 512).bfloat16(), torch.ones(1, 1, 64).bfloat16()
    nope.view(torch.int16)[0, 0, :2] = torch.tensor([0x7FC0, -0x40]).short()
    one, other = stored_rows(both, nope, rope)
    assert (one[:3], other[:3]) == ([0x7F, 0xFF, 0x38], [0x7F, 0x7F, 0x38])
    assert one[3:] == other[3:]


@difference(
    "SGLang quantises other floats than bf16 as they are; the generated pool takes bf16, to which they are cast",
    "dsa fp8_scaled",
)
def test_other_floats_in_packed_rows(both: Both) -> None:
    loc, (nope, rope) = both.slots(40), both.latent(40, torch.float16)
    for pool in both:
        pool.set_mla_kv_buffer(layer(0), loc, nope, rope)
    rows = [pool.kv_buffer[0][loc, 0] for pool in both]
    assert not torch.equal(rows[0][:, :528], rows[1][:, :528])
    both.generated.set_mla_kv_buffer(layer(1), loc, nope.bfloat16(), rope.bfloat16())
    assert torch.equal(both.generated.kv_buffer[1][loc, 0], rows[1])


@difference(
    "SGLang stores index keys in slot 0 too, where padded tokens write; the adapter has the generated pool do so", *DSA
)
def test_slot_0_of_the_index(both: Both) -> None:
    codes, scales = both.keys(1)
    slot = torch.tensor([0])
    before = both.generated.index_k_with_scale_buffer[0].clone()
    both.generated.generated.set_index_k_scale_buffer(0, slot, codes, scales)  # which skips it unless it is told
    assert torch.equal(both.generated.index_k_with_scale_buffer[0], before)
    for pool in both:
        pool.set_index_k_scale_buffer(0, slot, codes, scales)
    both.check()
    assert torch.equal(both.generated.index_k_with_scale_buffer[0][0, :128], codes[0].view(torch.uint8))


@difference(
    "SGLang's get_mla_kv_buffer takes the bytes of a packed row for values; the generated pool dequantises, "
    "not to e4m3",
    "dsa fp8_scaled",
)
def test_gather_from_a_packed_row(both: Both) -> None:
    loc, (nope, rope) = both.slots(40), both.latent(40)
    for pool in both:
        pool.set_mla_kv_buffer(layer(0), loc, nope, rope)
    theirs, ours = (pool.get_mla_kv_buffer(layer(0), loc, torch.bfloat16) for pool in both)
    rows = both.own.kv_buffer[0][loc, 0]
    assert torch.equal(theirs[0][:, 0], rows[:, :512].view(E4M3).bfloat16())  # codes without their scales
    assert torch.equal(theirs[1][:, 0].nan_to_num(), rows[:, 512:576].view(E4M3).bfloat16().nan_to_num())  # the scales
    scales = rows[:, 512:528].view(torch.float32).repeat_interleave(128, 1)
    assert torch.equal(ours[0][:, 0], (rows[:, :512].view(E4M3).float() * scales).bfloat16())
    assert torch.equal(ours[1], rope)
    with pytest.raises(ValueError, match="^dst_dtype must be bfloat16, float16 or float32, not torch.float8_e4m3fn$"):
        both.generated.get_mla_kv_buffer(layer(0), loc)


@difference(
    "SGLang has no set_kv_buffer for packed rows (an assertion); the generated pool quantises", "dsa fp8_scaled"
)
def test_whole_rows_into_packed_rows(both: Both) -> None:
    loc, (nope, rope) = both.slots(40), both.latent(40)
    with pytest.raises(AssertionError):
        both.own.set_kv_buffer(layer(0), loc, torch.cat([nope, rope], -1), None)
    both.generated.set_kv_buffer(layer(0), loc, torch.cat([nope, rope], -1), None)
    both.own.set_mla_kv_buffer(layer(0), loc, nope, rope)
    both.check()


@difference(
    "SGLang's stores and moves fail on slots outside (an IndexError of torch); the generated pool skips them",
    *DSA,
    "mla bf16",
    "mla fp8_raw",
)
def test_slots_outside(both: Both) -> None:
    outside = torch.tensor([5, SLOTS, 2**40, -SLOTS - 1])
    nope, rope = both.latent(4)
    before = [buffer.clone() for buffer in both.buffers(both.generated)]
    with pytest.raises(IndexError):
        both.own.set_mla_kv_buffer(layer(0), outside, nope, rope)
    with pytest.raises(IndexError):
        both.own.move_kv_cache(outside, outside)
    both.generated.set_mla_kv_buffer(layer(0), outside, nope, rope)
    both.generated.move_kv_cache(outside.roll(1), outside)  # every pair has a slot outside
    before[0][5] = both.generated.kv_buffer[0][5]
    assert not torch.equal(both.own.kv_buffer[0][5], before[0][5])
    for ours, theirs in zip(both.buffers(both.generated), before, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    latent, rope = both.generated.get_mla_kv_buffer(layer(0), outside[1:], torch.bfloat16)
    assert not latent.any() and not rope.any()  # SGLang reads whatever lies there


def test_slots_of_the_index_outside(both: Both) -> None:
    """The generated pool skips them; SGLang's kernel looks at no bounds."""
    before = [buffer.clone() for buffer in both.buffers(both.generated)]
    both.generated.set_index_k_scale_buffer(0, torch.tensor([SLOTS, 2**40, -SLOTS - 1]), *both.keys(3))
    for ours, theirs in zip(both.buffers(both.generated), before, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@difference(
    "SGLang has a buffer at the address 0 for a layer without index keys; the generated pool refuses a store there",
    *DSA,
)
def test_a_layer_without_index_keys(both: Both) -> None:
    assert both.own.index_k_with_scale_buffer[SHARED].data_ptr() == 0
    codes, scales = both.keys(1)
    message = r"^layer 3 has no `index_k` here; the layers that have one are \[0, 1, 2\]$"
    with pytest.raises(LookupError, match=message):
        both.generated.set_index_k_scale_buffer(SHARED, torch.tensor([1]), codes, scales)


@difference(
    "SGLang copies the index keys of whole pages, of slots that were not named too; the generated pool, of the slots",
    *DSA,
)
def test_cpu_copy_of_a_part_of_a_page(both: Both) -> None:
    named = torch.arange(70, 80)  # of page 1, slots 64 to 127
    copies = [pool.get_cpu_copy(named) for pool in both]
    before = [pool.index_k_with_scale_buffer[0][1].clone() for pool in both]
    assert torch.equal(*before)
    both.fill()
    between = both.generated.index_k_with_scale_buffer[0][1].clone()
    for pool, copy in zip(both, copies, strict=True):
        pool.load_cpu_copy(copy, named)
    theirs, ours = (pool.index_k_with_scale_buffer[0][1] for pool in both)
    assert torch.equal(theirs, before[0])  # the 54 other slots are what they were when the copy was made
    expected = between.clone()
    expected[6 * 128 : 16 * 128] = before[1][6 * 128 : 16 * 128]
    expected[8192 + 6 * 4 : 8192 + 16 * 4] = before[1][8192 + 6 * 4 : 8192 + 16 * 4]
    assert torch.equal(ours, expected)
    for one, other in zip(both.own.kv_buffer, both.generated.kv_buffer, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@difference(
    "SGLang writes a copy of more layers, or of more slots than are named, as far as it goes, unless that is within a "
    "chunk of 8,192 slots (an assertion); the generated pool refuses a copy of another layout or length",
    "dsa bf16",
    "mla bf16",
)
def test_another_copy(both: Both) -> None:
    copies = [pool.get_cpu_copy(torch.arange(64, 192)) for pool in both]
    refused = "^copy must be of this layout, rank and number of slots: "
    both.own.load_cpu_copy(copies[0], torch.arange(64, 64))  # nothing of it is written, and nothing said
    with pytest.raises(AssertionError):
        both.own.load_cpu_copy(copies[0], torch.arange(64, 128))
    for loc in (torch.arange(64, 64), torch.arange(64, 128)):
        with pytest.raises(ValueError, match=refused):
            both.generated.load_cpu_copy(copies[1], loc)
    with replace(both.deployment, end=2).serving() as configurator:
        build_own(configurator, TOKENS).load_cpu_copy(copies[0], torch.arange(64, 192))
        with pytest.raises(ValueError, match=refused):
            build(configurator, TOKENS).load_cpu_copy(copies[1], torch.arange(64, 192))


@difference(
    "SGLang reads rows of bf16 as e4m3 too; the generated pool reads them as bf16, float16 or float32",
    "dsa bf16",
    "mla bf16",
)
def test_bf16_as_e4m3(both: Both) -> None:
    loc, (nope, rope) = both.slots(40), both.latent(40)
    for pool in both:
        pool.set_mla_kv_buffer(layer(0), loc, nope, rope)
    for found, stored in zip(both.own.get_mla_kv_buffer(layer(0), loc, E4M3), (nope, rope), strict=True):
        assert torch.equal(found.view(torch.uint8), stored.to(E4M3).view(torch.uint8))
    with pytest.raises(ValueError, match="^dst_dtype must be bfloat16, float16 or float32, not torch.float8_e4m3fn$"):
        both.generated.get_mla_kv_buffer(layer(0), loc, E4M3)


@difference(
    "The first layer cannot share: it has no earlier top-k. SGLang makes such a pool, the layout refuses it", "dsa bf16"
)
def test_a_first_layer_that_shares(both: Both) -> None:
    with Deployment("bf16", glm_5_2(2, indexer_types=["shared", "full"]), 0, 2).serving() as configurator:
        assert build_own(configurator, TOKENS).skip_topk_layers == [True, False]
        with pytest.raises(ValueError, match="^glm_dsa: layer 0: the first layer has no earlier top-k to share$"):
            build(configurator, TOKENS)


@difference(
    "SGLang makes pools of any number of tokens, the configurator only whole pages; the generated pool refuses others",
    "dsa bf16",
    "mla bf16",
)
def test_a_part_of_a_page_of_tokens(both: Both) -> None:
    with replace(both.deployment, end=1).serving() as configurator:
        assert len(build_own(configurator, 100).kv_buffer[0]) == 164
        with pytest.raises(ValueError, match="^tokens must be a non-negative multiple of 64, not 100; "):
            build(configurator, 100)


def stored_rows(both: Both, nope: torch.Tensor, rope: torch.Tensor) -> list[list[int]]:
    """The bytes of the row of slot 7 in either pool."""
    for pool in both:
        pool.set_mla_kv_buffer(layer(0), torch.tensor([7]), nope, rope)
    return [pool.kv_buffer[0][7].view(torch.uint8).flatten().tolist() for pool in both]
