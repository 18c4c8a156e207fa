"""Strides, counts and staging tensors beyond 2^31: kernels compute addresses in 64 bits, and interpreted they do too.

Every argument that fits is a number of 32 bits there, as on a GPU, and products of such numbers wrap around. Memory is
committed where it is touched, and of large grids the programs run that a test is about.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import interpreted, latent_records, one_thread, tag_table
from support.sanitizer import Sanitizer
from support.sparse import large_tensors, only_programs, sparse
from test_other_pools import Case, spec

from generated.glm_dsa import Layout, Pool

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers that wrap around, where there are any

FAR = 2**30  # elements from one row to the next: the third begins at 2^31
COUNT = 2**31 + 5
MODEL = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
SLOTS = [70, 3, 127]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(params=["torch", "triton"])
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Of 128 slots of bf16: a row of 1,152 bytes, and pages of 64 x 128 codes with 64 scales behind."""
    with interpreted() as sanitizer:
        yield made(sanitizer, request.param)


@pytest.fixture
def triton_pool() -> Iterator[Any]:
    with interpreted() as sanitizer:
        yield made(sanitizer, "triton")


def made(sanitizer: Sanitizer, backend: str) -> Any:
    pool = Pool(Layout.from_config(MODEL, kv_format="bf16"), 64, backend=backend)
    if backend == "triton":
        tag_table(pool, [("kv", 0), ("index_k", 0)], sanitizer)
    return pool


def far(rows: torch.Tensor, step: int = FAR) -> torch.Tensor:
    """The same rows, or numbers, so many elements apart."""
    own = sparse(rows.shape, rows.dtype, (step, 1)[: rows.ndim])
    own.copy_(rows)
    return own


def latents(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [count, 512] and [count, 64] that are small whole numbers."""
    return tuple((torch.arange(count * width) % 251).view(count, width).bfloat16() for width in (512, 64))


def records(latent: torch.Tensor, rope: torch.Tensor) -> np.ndarray:
    both = [own.contiguous().view(torch.int16).numpy().view(np.uint16) for own in (latent, rope)]
    return latent_records("bf16", *both)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("what", ["slots", "rows"])
def test_a_store_of_rows_far_apart(pool: Any, what: str, dtype: torch.dtype) -> None:
    slots, (latent, rope) = torch.tensor(SLOTS, dtype=dtype), latents(3)
    if what == "slots":
        pool.set_mla_kv_buffer(0, far(slots), latent, rope)
    else:
        pool.set_mla_kv_buffer(0, slots, far(latent), far(rope))
    expected = np.zeros((128, 1152), np.uint8)
    expected[SLOTS] = records(latent, rope)
    np.testing.assert_array_equal(pool.buffer("kv", 0).view(128, 1152).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_load_of_slots_far_apart(pool: Any, dtype: torch.dtype) -> None:
    bits = torch.arange(128 * 576).short().view(128, 576)
    pool.buffer("kv", 0).view(128, 1152).copy_(bits.view(torch.uint8))
    latent, rope = pool.get_mla_kv_buffer(0, far(torch.tensor(SLOTS, dtype=dtype)))
    assert torch.equal(latent[:, 0].view(torch.int16), bits[SLOTS, :512])
    assert torch.equal(rope[:, 0].view(torch.int16), bits[SLOTS, 512:])


@pytest.mark.parametrize("what", ["lengths", "requests", "columns"])
def test_a_gather_of_tables_far_apart(pool: Any, what: str) -> None:
    """Three requests of 1, 65 and 2 tokens; page p of the table has p + slot in all bytes of its codes."""
    pages = (torch.arange(2)[:, None] + torch.arange(64)).to(torch.uint8)
    pool.buffer("index_k", 0)[:, :8192].view(2, 64, 128).copy_(pages[:, :, None].expand(2, 64, 128))
    lengths, table = torch.tensor([1, 65, 2]), torch.tensor([[1, 0], [0, 1], [1, 1]])
    if what == "lengths":
        lengths = far(lengths)
    elif what == "requests":
        table = far(table)
    else:
        wide = sparse((3, 2), torch.int64, (1, 2 * FAR))
        table = wide.copy_(table)
    codes, _ = pool.get_index_k_scale_buffer(0, lengths, table, 68, 65)
    expected = [1, *range(64), 1, 1, 2]
    assert codes.view(torch.uint8)[:, 0].tolist() == expected
    assert codes.view(torch.uint8)[:, 127].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_whole_pool_through_slots_far_apart(pool: Any, dtype: torch.dtype) -> None:
    numbers = torch.arange(128).to(torch.uint8)[:, None]
    rows = pool.buffer("kv", 0).view(128, 1152)
    rows.copy_(numbers.expand(128, 1152))
    sources, targets = (far(torch.tensor(own, dtype=dtype)) for own in ([3, 100, 90], [70, 4, 127]))
    pool.move_kv_cache(targets, sources)
    expected = [*range(128)]
    expected[70], expected[4], expected[127] = 3, 100, 90
    assert rows[:, 0].tolist() == rows[:, -1].tolist() == expected
    pool.unpack(pool.pack(targets), far(torch.tensor([10, 11, 12], dtype=dtype)))
    expected[10:13] = [3, 100, 90]
    assert rows[:, 0].tolist() == rows[:, -1].tolist() == expected
    pool.clear_pages(far(torch.tensor([7, 9, 1], dtype=dtype)))
    assert rows[:, 0].tolist() == expected[:64] + [0] * 64


# -- counts


def test_a_store_of_a_count_beyond_2_31(triton_pool: Any) -> None:
    """The last program has 5 tokens: the others of its 64 are not there, and nothing is read behind the last slot."""
    loc = sparse((COUNT,), torch.int32)
    loc[-5:] = torch.tensor([70, 3, 127, 64, 5])
    latent, rope = latents(1)
    with only_programs((-1, 0, 0)):
        triton_pool.set_mla_kv_buffer(0, loc, latent.expand(COUNT, 512), rope.expand(COUNT, 64))
    expected = np.zeros((128, 1152), np.uint8)
    expected[[70, 3, 127, 64, 5]] = records(latent, rope)
    np.testing.assert_array_equal(triton_pool.buffer("kv", 0).view(128, 1152).numpy(), expected)


def test_a_load_of_a_count_beyond_2_31(triton_pool: Any) -> None:
    bits = torch.arange(128 * 576).short().view(128, 576)
    triton_pool.buffer("kv", 0).view(128, 1152).copy_(bits.view(torch.uint8))
    loc = sparse((COUNT,), torch.int32)
    loc[-5:] = torch.tensor([70, 3, 127, 64, 5])
    with only_programs((-1, 0, 0)), large_tensors():
        latent, rope = triton_pool.get_mla_kv_buffer(0, loc)
    assert torch.equal(latent[-5:, 0].view(torch.int16), bits[loc[-5:], :512])
    assert torch.equal(rope[-5:, 0].view(torch.int16), bits[loc[-5:], 512:])


def test_a_gather_of_a_count_beyond_2_31(triton_pool: Any) -> None:
    """One sequence, whose page table says page 1 for every page; the last tokens are those of its first slots."""
    triton_pool.buffer("index_k", 0)[1, :8192].view(64, 128).copy_(torch.arange(1, 65)[:, None].expand(64, 128))
    table = torch.ones((1, 1), dtype=torch.int32).expand(1, COUNT // 64 + 1)
    with only_programs((-1, 0, 0)), large_tensors():
        codes, _ = triton_pool.get_index_k_scale_buffer(0, torch.tensor([COUNT]), table, COUNT, COUNT)
    assert codes[-5:].view(torch.uint8)[:, 127].tolist() == [1, 2, 3, 4, 5]


# -- staging tensors

TINY = spec(
    "tiny_records",
    """
byte: {fields: {k: "u8[1]"}, page: [[k]]}
pair: {fields: {k: "u8[2]"}, page: [[k]]}
""",
    "a: {format: byte, space: token, layers: all}\nb: {format: pair, space: token, layers: all}",
    layers="body: 3",
)


@pytest.mark.parametrize("count", [2**30 + 5, COUNT], ids=["rows beyond 2^31", "slots beyond 2^31"])
def test_staging_beyond_2_31_bytes(count: int) -> None:
    """Three layers of 1 byte a slot, then of 2: the rows of layer 2 begin at 2 x count, those of `b` behind 3 x count.

    The last program of each layer has 5 slots. The parts begin at multiples of 16, and flags lie behind.
    """
    case = Case(TINY, tokens=16)
    second = -(-3 * count // 16) * 16  # where the part of `b` begins
    flags = second + -(-6 * count // 16) * 16
    last = tuple((-1, layer, 0) for layer in range(6))
    loc = sparse((count,), torch.int32)
    loc[-5:] = torch.tensor([9, 2, 23, 99, 1])  # of which 99 is not there
    with interpreted() as sanitizer:
        pool = case.pool("triton")
        entries = pool._entries
        names = [f"{entry.name} {entry.layer}" for entry in entries]
        pool._table = sanitizer.table([entry.memory for entry in entries], names, torch.int64)
        for layer in range(3):
            pool.buffer("a", layer).view(-1).copy_(torch.arange(24) + 40 * layer)
            pool.buffer("b", layer).view(-1).copy_(torch.arange(48) + 50 * layer)
        with only_programs(*last), large_tensors():
            staging = pool.pack(loc)
        assert [part.offset for part in pool.describe_staging(count)] == [0, second]
        assert len(staging) == flags + count
        for layer in range(3):
            end = (layer + 1) * count
            expected = [slot + 40 * layer if slot != 99 else 0 for slot in (9, 2, 23, 99, 1)]
            assert staging[end - 5 : end].tolist() == expected
            end = second + 2 * (layer + 1) * count
            pairs = [[2 * slot + 50 * layer, 2 * slot + 1 + 50 * layer] for slot in (9, 2, 23)]
            pairs += [[0, 0], [2 + 50 * layer, 3 + 50 * layer]]
            assert staging[end - 10 : end].view(5, 2).tolist() == pairs
        assert staging[flags + count - 5 :].tolist() == [1, 1, 1, 0, 1]
        loc[-5:] = torch.tensor([10, 11, 12, 13, 50])  # and now the fifth
        with only_programs(*last):
            pool.unpack(staging, loc)
    for layer in range(3):
        expected = [slot + 40 * layer for slot in range(24)]
        expected[10:13] = [slot + 40 * layer for slot in (9, 2, 23)]
        assert pool.buffer("a", layer).flatten().tolist() == expected
        both = [byte + 50 * layer for byte in range(48)]
        both[20:26] = [byte + 50 * layer for slot in (9, 2, 23) for byte in (2 * slot, 2 * slot + 1)]
        assert pool.buffer("b", layer).flatten().tolist() == both


THREE = spec(
    "three_spaces",
    'byte: {fields: {k: "u8[1]"}, page: [[k]]}',
    "\n".join(f"in_{name}: {{format: byte, space: {name}, layers: all}}" for name in ("a", "b", "c")),
    layers="body: 1",
    spaces="\n".join(f"{name}: {{slots: tokens, page: 8}}" for name in ("a", "b", "c")),
)


def test_slots_of_three_spaces_that_are_beyond_2_31_together() -> None:
    """Each has 2^30 + 5: the flags of the third lie behind those of the first two, more than 2^31."""
    count = 2**30 + 5
    flags = 3 * -(-count // 16) * 16
    with interpreted() as sanitizer:
        pool = Case(THREE, tokens=16).pool("triton")
        names = [entry.name for entry in pool._entries]
        pool._table = sanitizer.table([entry.memory for entry in pool._entries], names, torch.int64)
        slots = {}
        for index, name in enumerate(("a", "b", "c")):
            pool.buffer(f"in_{name}", 0).view(-1).copy_(torch.arange(24) + 40 * index)
            slots[name] = sparse((count,), torch.int64)
            slots[name][-5:] = torch.tensor([9, 2 + index, 99, 23, 1])
        last = tuple((-1, entry, 0) for entry in range(3))
        with only_programs(*last), large_tensors():
            staging = pool.pack(slots)
            assert len(staging) == flags + 3 * count
            for index in range(3):
                end = index * (flags // 3) + count
                assert staging[end - 5 : end].tolist() == [own + 40 * index for own in (9, 2 + index)] + [
                    0,
                    *(own + 40 * index for own in (23, 1)),
                ]
                end = flags + (index + 1) * count
                assert staging[end - 5 : end].tolist() == [1, 1, 0, 1, 1]
            for own in slots.values():
                own[-5:] = torch.tensor([10, 11, 12, 13, -1])
            pool.unpack(staging, slots)
    for index, name in enumerate(("a", "b", "c")):
        expected = [slot + 40 * index for slot in range(24)]
        expected[10], expected[11], expected[13] = (own + 40 * index for own in (9, 2 + index, 23))
        assert pool.buffer(f"in_{name}", 0).flatten().tolist() == expected
