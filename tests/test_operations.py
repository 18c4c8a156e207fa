"""The operations of glm_dsa on both backends, against a reference that knows where each byte lies.

`Twin` (see `support.reference`) fills a pool with random bytes and holds every byte of every buffer against the
reference after each operation: what an operation has to write is there, and nothing else changed. With the backend
"triton" the kernels are interpreted under the sanitizer; all memory lies between guard pages.
"""

import itertools
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.guard import GuardedAllocator, Side
from support.models import ROOT, model_config
from support.reference import (
    E4M3,
    ROW_BYTES,
    Memory,
    Twin,
    bf16_bits,
    bits,
    e4m3_codes,
    hostile_slots,
    index_records,
    interpreted,
    latent_records,
    latent_values,
    one_thread,
    quantised,
    tag_table,
    wild_bf16,
)
from support.sanitizer import Sanitizer

from generated.glm_dsa import Layout, Pool, bytes_for

# Inputs overflow and are signalling NaN on purpose; numpy, in which kernels are interpreted, warns of both.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning:triton.runtime.interpreter")

FORMATS = ["bf16", "fp8_scaled", "fp8_raw"]
COUNTS = [0, 1, 63, 64, 65, 1000]
E4M3_DTYPE = torch.float8_e4m3fn

# Two layers of which only the first owns an indexer, and a draft layer, which always does.
CONFIG = {
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk_pattern": "FS",
}
DRAFT = 2
OWNERS = {"kv": (0, 1), "kv_draft": (2,), "index_k": (0, 2)}
ONE_LAYER: dict[str, Any] = {"owners": {"kv": (0,), "index_k": (0,)}, "end_layer": 1}


@dataclass(frozen=True)
class Backend:
    """One of the two ways in which a pool works, and the sanitizer under which its kernels are interpreted."""

    name: str
    sanitizer: Sanitizer | None = None
    native: int = 0  # the instruction by which kernels cast to e4m3: 1 NVIDIA's, 2 AMD's; 0 in integers

    def pool(self, layout: Layout, tokens: int, side: Side = "right") -> Pool:
        pool = Pool(layout, tokens, allocate=GuardedAllocator(side), backend=self.name)
        pool._native = self.native
        return pool

    def twin(
        self,
        kv_format: str = "fp8_scaled",
        tokens: int = 128,
        *,
        side: Side = "right",
        config: Mapping[str, object] = CONFIG,
        owners: Mapping[str, Sequence[int]] = OWNERS,
        ratio: int = 1,
        role: str = "both",
        **choices: object,
    ) -> Twin:
        """A pool and its reference, of the layers that the test says it has."""
        layout = Layout.from_config(config, kv_format=kv_format, host_to_device_ratio=ratio, role=role, **choices)
        logical, device = ratio * tokens + 64, tokens + 64
        num_slots = {"kv": device, "kv_draft": logical, "index_k": logical}
        return Twin(self.pool(layout, tokens, side), kv_format, owners, num_slots, self.sanitizer)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@contextmanager
def running(name: str) -> Iterator[Backend]:
    """A backend, and what its kernels have to be interpreted under."""
    if name == "torch":
        yield Backend("torch")
    else:
        native = {"native casts": 1, "AMD's casts": 2}.get(name, 0)
        with interpreted(saturating=native != 2) as sanitizer:
            yield Backend("triton", sanitizer, native=native)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with running(request.param) as backend:
        yield backend


@pytest.fixture(params=["torch", "triton", "native casts", "AMD's casts"])
def caster(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend in a test where it matters by which instructions codes are made."""
    with running(request.param) as backend:
        yield backend


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


# -- inputs


def tensor(values: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Unsigned integers as the bits of a dtype of their size."""
    signed = {1: np.uint8, 2: np.int16, 4: np.int32}[values.itemsize]
    return torch.from_numpy(np.ascontiguousarray(values).view(signed)).view(dtype)


def latent(random: np.random.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor(wild_bf16(random, count, 512)), tensor(wild_bf16(random, count, 64))


def key(random: np.random.Generator, count: int) -> torch.Tensor:
    return tensor(wild_bf16(random, count, 128))


def stored_key(random: np.random.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of any bits."""
    codes = tensor(random.integers(0, 256, (count, 128), np.uint8), E4M3_DTYPE)
    return codes, tensor(random.integers(0, 1 << 32, count, np.uint32), torch.float32)


def some_slots(random: np.random.Generator, count: int, num_slots: int = 192, first: int = 1) -> list[int]:
    """Slots of a space in no order, none of them twice."""
    return (random.permutation(num_slots - first)[:count] + first).tolist()


def locs(slots: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(slots, dtype=dtype)


def with_hostile(random: np.random.Generator, slots: Sequence[int], num_slots: int, dtype: torch.dtype) -> torch.Tensor:
    """Slots mixed with all that a space of so many does not have."""
    return locs(random.permutation(np.array([*slots, *hostile_slots(num_slots, dtype)], dtype=object)).tolist(), dtype)


def laid(values: torch.Tensor, how: str) -> torch.Tensor:
    """A tensor [n, width] with the same values, in other strides."""
    count, width = values.shape
    poison = torch.full((count + 1, 2 * width + 3), -1, dtype=torch.uint8).repeat(1, values.element_size())
    room = poison.view(torch.uint8).view(values.dtype)
    if how == "dense":
        return values
    if how == "columns of a wider tensor":
        view = room[:count, width // 2 : width // 2 + width]
    elif how == "rows of odd length":
        view = room[:count, 1 : 1 + width]
    elif how == "every second value":
        view = room[:count, 1 : 1 + 2 * width : 2]
    elif how == "transposed":
        view = room.view(-1)[: count * width].view(width, count).t()
    else:
        assert how == "one head of three"
        view = torch.empty((count, 3, width), dtype=values.dtype)[:, 1:2]
        values = values[:, None]
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    view.view(integer).copy_(values.view(integer))
    return view


LAID = ["dense", "columns of a wider tensor", "rows of odd length", "every second value", "transposed"]
LOCS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda loc: loc,
    "every second": lambda loc: torch.stack([loc, torch.full_like(loc, 77)], dim=1)[:, 0],
    "column of a table": lambda loc: torch.full((len(loc), 5), 99, dtype=loc.dtype).index_copy(
        1, locs([3]), loc[:, None]
    )[:, 3],
}


# -- the reference itself, against bytes worked out by hand


def f32(value: float) -> list[int]:
    return np.array([value], "<f4").view(np.uint8).tolist()


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (1.0, 0x38),  # exponent bias 7
        (-2.0, 0xC0),
        (448.0, 0x7E),
        (1.0625, 0x38),  # half-way between 1.0 and 1.125: to the even code
        (1.1875, 0x3A),  # half-way between 1.125 and 1.25
        (1.9375, 0x40),  # half-way between 1.875 and 2.0: the carry goes to the exponent
        (2.0**-9, 0x01),  # the least
        (2.0**-10, 0x00),  # half of it
        (1.5 * 2.0**-9, 0x02),
        (-(2.0**-11), 0x80),
        (2.0**-6, 0x08),  # the least with a hidden bit
        (464.0, 0x7E),  # half-way to what would come next
        (1e30, 0x7E),
        (-np.inf, 0xFE),
        (np.nan, 0x7F),
        (-np.nan, 0x7F),
    ],
)
def test_reference_e4m3(value: float, code: int) -> None:
    assert e4m3_codes(np.array([value], np.float32)).tolist() == [code]


def test_reference_e4m3_table() -> None:
    codes = torch.arange(0x7F, dtype=torch.int32).to(torch.uint8)
    assert E4M3.tolist() == codes.view(E4M3_DTYPE).double().tolist()
    assert e4m3_codes(E4M3.astype(np.float32)).tolist() == codes.tolist()


def test_reference_bf16() -> None:
    # 1 + 2^-8 is half-way between 1 and 1 + 2^-7; 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6
    values = np.array([1, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -np.inf, np.nan, 3.4e38], np.float32)
    assert bf16_bits(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xFF80, 0x7FFF, 0x7F80]


def test_reference_scales() -> None:
    """3 / 448 is 12/7 x 2^-8, and 5/7 x 2^23 is 5991862.86; 3 times the rounded 1/448 would end in ...B8.

    0.609375 / 13 * 448 is 21, half-way between 20 (code 0x5A) and 22. Times the rounded inverse of the rounded scale it
    is a little more; divided by the scale it would be 21 and give the even code.
    """
    blocks = np.zeros((1, 512), np.float32)
    blocks[0, [0, 128, 129, 256]] = [3.0, 13.0, 0.609375, 2.0**-133]
    codes, scales = quantised(blocks)
    assert scales.view(np.uint32).tolist() == [[0x3BDB6DB7, 0x3CEDB6DB, 0x00800000, 0]]
    assert codes[0, [0, 1, 128, 129, 256, 384]].tolist() == [0x7E, 0, 0x7E, 0x5B, 4, 0]  # 2^-133 * 2^126 is 4 * 2^-9
    floor = index_records(np.zeros((1, 128), np.uint16))
    assert floor[0].tolist() == [0] * 128 + f32(np.float32(1e-4) / np.float32(448))


def test_reference_bytes() -> None:
    nope = np.full((1, 512), 0x4000, np.uint16)  # 2.0
    rope = np.arange(0x3F80, 0x3F80 + 64, dtype=np.uint16)[None]  # 1.0 and what follows
    rope_bytes = list(itertools.chain(*((0x80 + i if i < 128 else 0, 0x3F) for i in range(64))))
    assert latent_records("bf16", nope, rope)[0].tolist() == [0, 0x40] * 512 + rope_bytes
    assert latent_records("fp8_scaled", nope, rope)[0].tolist() == [0x7E] * 512 + f32(2 / 448) * 4 + rope_bytes
    # 64 values from 1 to 1.4921875 in steps of 1/128: nearest multiples of 1/8, halves to even
    codes = [0x38 + round(i / 16) for i in range(64)]
    assert latent_records("fp8_raw", nope, rope)[0].tolist() == [0x40] * 512 + codes
    latent_read, rope_read = latent_values("fp8_scaled", latent_records("fp8_scaled", nope, rope))
    assert (latent_read == np.float32(448) * np.float32(2 / 448)).all()
    assert rope_read[0, [0, 1, 63]].tolist() == [1.0, 1.0078125, 1.4921875]


def test_reference_places() -> None:
    """Slot 130 is slot 2 of page 2: 2 x 8448 + 2 x 128, and 2 x 8448 + 8192 + 2 x 4. Slot 70 is slot 6 of page 1."""
    memory = Memory(132, 192)
    assert memory.parts(130) == [slice(17_152, 17_280), slice(25_096, 25_100)]
    assert memory.parts(70) == [slice(9_216, 9_344), slice(16_664, 16_668)]
    assert memory.bytes.shape == (25_344,)
    assert Memory(656, 128).parts(127) == [slice(83_312, 83_968)]
    memory.write([-1, 0, 64, 192], np.full((4, 132), 5, np.uint8), first=1)
    assert np.flatnonzero(memory.bytes).tolist() == [*range(8448, 8576), *range(16_640, 16_644)]
    assert memory.read([64, 192]).sum(axis=1).tolist() == [5 * 132, 0]


# -- stores of the latent


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("count", COUNTS)
def test_store_latent(caster: Backend, random: np.random.Generator, kv_format: str, count: int) -> None:
    twin = caster.twin(kv_format, 1024)
    for layer in (1, DRAFT)[: 1 if count == 1000 else 2]:
        twin.set_mla_kv_buffer(layer, locs(some_slots(random, count, 1088)), *latent(random, count))


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("how", [*LAID, "one head of three"])
def test_store_latent_from_strided_inputs(
    backend: Backend, random: np.random.Generator, kv_format: str, how: str
) -> None:
    twin = backend.twin(kv_format)
    nope, rope = latent(random, 30)
    loc = locs(some_slots(random, 30))
    twin.set_mla_kv_buffer(0, loc, laid(nope, how), laid(rope, how))
    twin.set_mla_kv_buffer(1, loc, laid(nope, how), rope)
    twin.set_mla_kv_buffer(DRAFT, loc, nope[:, None], laid(rope, how))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_store_latent_from_one_tensor(backend: Backend, random: np.random.Generator, kv_format: str) -> None:
    """The latent and the rope as an engine has them: columns of what a projection made; and one row for all tokens."""
    twin = backend.twin(kv_format)
    both = tensor(wild_bf16(random, 33, 576))
    loc = locs(some_slots(random, 33))
    twin.set_mla_kv_buffer(0, loc, both[:, :512], both[:, 512:])
    twin.set_mla_kv_buffer(1, loc, both[:, None, :512], both[:, None, 512:])
    twin.set_mla_kv_buffer(DRAFT, loc, both[:1, :512].expand(33, 512), both[:1, 512:].expand(33, 64))


@pytest.mark.parametrize(
    ("how", "dtype"), [("dense", torch.int32), ("every second", torch.int64), ("column of a table", torch.int32)]
)
def test_slot_tensors(backend: Backend, random: np.random.Generator, how: str, dtype: torch.dtype) -> None:
    """Of both dtypes and any stride, in every operation that takes one."""
    twin = backend.twin()
    loc, other = (LOCS[how](locs(some_slots(random, 60), dtype)) for _ in range(2))
    twin.set_mla_kv_buffer(0, loc, *latent(random, 60))
    twin.store_index_k(0, loc, key(random, 60))
    twin.set_index_k_scale_buffer(DRAFT, loc, *stored_key(random, 60))
    twin.get_mla_kv_buffer(0, loc)
    twin.move_kv_cache(loc, other.to(torch.int64))
    twin.load_cpu_copy(twin.get_cpu_copy(loc), other)
    twin.get_mla_kv_buffer(1, loc[:1].expand(70))


def test_slot_0_is_skipped_unless_told_otherwise(backend: Backend, random: np.random.Generator) -> None:
    twin = backend.twin()
    slots = locs([63, 0, 64, 1])  # the rest of the reserved page is an allocator's affair
    for options in ({}, {"skip_reserved": True}, {"skip_reserved": False}):
        for layer in (0, DRAFT):
            twin.set_mla_kv_buffer(layer, slots, *latent(random, 4), **options)
            twin.store_index_k(layer, slots, key(random, 4), **options)
            twin.set_index_k_scale_buffer(layer, slots, *stored_key(random, 4), **options)
    for operation, inputs in (
        ("set_mla_kv_buffer", latent(random, 4)),
        ("store_index_k", (key(random, 4),)),
        ("set_index_k_scale_buffer", stored_key(random, 4)),
    ):
        with pytest.raises(TypeError):  # by name only
            getattr(twin.pool, operation)(0, slots, *inputs, False)
        twin.check()


def test_padded_tokens(backend: Backend, random: np.random.Generator) -> None:
    """Many tokens at once for slot 0 and for no slot: nobody writes, so nobody races."""
    twin = backend.twin()
    slots = locs([0, -1] * 40 + [100] + [192] * 7)
    twin.set_mla_kv_buffer(0, slots, *latent(random, 88))
    twin.store_index_k(0, slots, key(random, 88))
    twin.set_index_k_scale_buffer(0, slots, *stored_key(random, 88))


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_slot_twice_in_one_store(name: str, kv_format: str, random: np.random.Generator) -> None:
    """One writer's bytes or another's, nothing else changes."""
    with interpreted(races=False) as sanitizer:
        twin = Backend(name, sanitizer if name == "triton" else None).twin(kv_format)
        slots = [70, 5, 70, 130, 5, 70, *[130] * 30]
        nope, rope = latent(random, 36)
        keys, (codes, scales) = key(random, 36), stored_key(random, 36)
        stores: list[tuple[str, int, Memory, tuple[torch.Tensor, ...], np.ndarray]] = [
            ("set_mla_kv_buffer", 1, twin.latent(1), (nope, rope), latent_records(kv_format, bits(nope), bits(rope))),
            ("store_index_k", 0, twin.index(0), (keys,), index_records(bits(keys))),
            (
                "set_index_k_scale_buffer",
                DRAFT,
                twin.index(DRAFT),
                (codes, scales),
                np.hstack([bits(codes), bits(scales)[:, None].view(np.uint8)]),
            ),
        ]
        for operation, layer, memory, inputs, records in stores:
            getattr(twin.pool, operation)(layer, locs(slots), *inputs)
            found = Memory(memory.record_bytes, memory.num_slots)
            buffer = twin.pool.buffer("kv" if operation == "set_mla_kv_buffer" else "index_k", layer)
            found.bytes[:] = buffer.view(-1).numpy()
            for slot in set(slots):
                (record,) = found.read([slot])
                writers = [one for one, target in zip(records, slots, strict=True) if target == slot]
                assert any(np.array_equal(record, one) for one in writers)
                memory.write([slot], record[None])
            twin.check()


# -- codes and scales


def stored_latent(backend: Backend, values: torch.Tensor, kv_format: str = "fp8_scaled") -> tuple[bytes, bytes, bytes]:
    """The codes, scales and rope bytes of slot 70 after a latent was stored there: bytes 70 x 656 and on."""
    twin = backend.twin(kv_format)
    rope = torch.linspace(-3, 3, 64).to(torch.bfloat16)[None]
    twin.set_mla_kv_buffer(0, locs([70]), values[None], rope)
    pitch = {"fp8_scaled": 656, "fp8_raw": 576}[kv_format]
    row = bytes(twin.pool.buffer("kv", 0).view(-1)[70 * pitch : 71 * pitch].tolist())
    return row[:512], row[512:528], row[528:]


def test_zero_blocks_store_zeros(caster: Backend) -> None:
    values = torch.zeros(512, dtype=torch.bfloat16)
    values[128:256] = -0.0
    values[256] = 1.0
    codes, scales, _ = stored_latent(caster, values)
    assert codes == bytes(256) + b"\x7e" + bytes(255)
    assert scales == bytes(8) + bytes(f32(1 / 448)) + bytes(4)


def test_nan_stores_0x7f_and_nothing_else(caster: Backend) -> None:
    values = torch.zeros(512, dtype=torch.bfloat16)
    values[0] = float("nan")  # in a block of zeros
    values[129:131] = tensor(np.array([0xFFC1, 0x7F81], np.uint16))  # negative, and signalling
    values[131] = 448.0
    values[256:384] = float("nan")  # a block of nothing else
    codes, scales, _ = stored_latent(caster, values)
    assert codes == b"\x7f" + bytes(127) + b"\0\x7f\x7f\x7e" + bytes(124) + b"\x7f" * 128 + bytes(128)
    assert scales == bytes(4) + bytes(f32(1.0)) + bytes(8)


@pytest.mark.parametrize("infinity", [float("inf"), -float("inf")])
def test_an_infinity_spoils_its_own_block_alone(caster: Backend, infinity: float) -> None:
    values = torch.full((512,), 448.0, dtype=torch.bfloat16)
    values[200] = infinity
    codes, scales, _ = stored_latent(caster, values)
    assert codes == b"\x7e" * 128 + bytes(72) + b"\x7f" + bytes(55) + b"\x7e" * 256
    assert scales == bytes(f32(1.0) + f32(np.inf) + f32(1.0) * 2)
    twin = caster.twin()
    twin.set_mla_kv_buffer(1, locs([3]), values[None], torch.zeros((1, 64), dtype=torch.bfloat16))
    nope, _ = twin.get_mla_kv_buffer(1, locs([3]))
    assert nope.isnan().flatten().tolist() == [128 <= i < 256 for i in range(512)]


def test_the_least_denormal_survives(caster: Backend) -> None:
    """2^-133 with the least scale, 2^-126, is 2^-7: four times the least code. It reads back as itself."""
    values = torch.zeros(512, dtype=torch.bfloat16)
    values[:2] = tensor(np.array([0x0001, 0x8001], np.uint16))
    codes, scales, _ = stored_latent(caster, values)
    assert codes == b"\x04\x84" + bytes(510)
    assert scales == b"\0\0\x80\0" + bytes(12)
    twin = caster.twin()
    twin.set_mla_kv_buffer(0, locs([3]), values[None], torch.zeros((1, 64), dtype=torch.bfloat16))
    nope, _ = twin.get_mla_kv_buffer(0, locs([3]))
    assert bits(nope)[0, 0].tolist() == [0x0001, 0x8001] + [0] * 510


def test_scales_are_quotients_and_codes_products(caster: Backend) -> None:
    """See `test_reference_scales` for the numbers."""
    values = torch.zeros(512, dtype=torch.bfloat16)
    values[0] = 3.0
    values[128:130] = bf16(13.0, 0.609375)
    codes, scales, _ = stored_latent(caster, values)
    assert codes[:2] + codes[128:131] == b"\x7e\0\x7e\x5b\0"
    assert scales[:8] == bytes.fromhex("b76ddb3b dbb6ed3c")


# Every mantissa with exponents of all kinds: denormals, the least, those about the indexer's floor, and the greatest.
MAXIMA = np.add.outer(np.array([0, 1, 2, 8, 9, 112, 113, 114, 127, 200, 254]) << 7, np.arange(128)).astype(np.uint16)


def blocks_of_every_maximum() -> np.ndarray:
    """bf16 [1408, 128]: for each of MAXIMA 127 values that are no larger."""
    maxima = MAXIMA.reshape(-1, 1)
    below = np.random.default_rng(3).integers(0, 0x7F80, (maxima.size, 127), np.uint16) % (maxima + 1)
    return np.hstack([maxima, below])


def test_every_maximum_of_a_block(caster: Backend) -> None:
    nope = tensor(blocks_of_every_maximum().reshape(-1, 512))
    twin = caster.twin(tokens=384)
    twin.set_mla_kv_buffer(0, torch.arange(1, 353), nope, torch.zeros((352, 64), dtype=torch.bfloat16))


def test_raw_codes_saturate(caster: Backend) -> None:
    values = torch.zeros(512, dtype=torch.bfloat16)
    values[:8] = bf16(1.0625, 464, 480, -1e30, float("inf"), -float("inf"), float("nan"), -0.0)
    values[8] = tensor(np.array([0xFFC0], np.uint16))[0]
    codes, more_codes, rest = stored_latent(caster, values, "fp8_raw")
    assert codes[:9] == bytes.fromhex("38 7e 7e fe 7e fe 7f 80 7f")
    assert not any(codes[9:])
    rope = torch.linspace(-3, 3, 64).to(torch.bfloat16)
    assert more_codes + rest == bytes(e4m3_codes(rope.float().numpy()).tolist())


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_scaled"])
def test_bf16_bits_are_kept(backend: Backend, kv_format: str) -> None:
    """All 65,536 of them, signalling NaN included, where values are stored as they come."""
    every = np.arange(1 << 16, dtype=np.uint16)
    twin = backend.twin(kv_format, 1024)
    slots = torch.arange(1, 1025)
    nope = (
        tensor(np.repeat(every, 8).reshape(1024, 512))
        if kv_format == "bf16"
        else latent(np.random.default_rng(0), 1024)[0]
    )
    twin.set_mla_kv_buffer(1, slots, nope, tensor(every.reshape(1024, 64)))
    row = twin.pool.buffer("kv", 1).view(1088, ROW_BYTES[kv_format])[1:1025]
    assert np.array_equal(row[:, -128:].contiguous().numpy().view(np.uint16).reshape(-1), every)
    if kv_format == "bf16":
        assert np.array_equal(row[:, :1024].contiguous().numpy().view(np.uint16).reshape(-1), np.repeat(every, 8))


# -- reads of the latent


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("count", COUNTS)
def test_load_latent(backend: Backend, random: np.random.Generator, kv_format: str, count: int) -> None:
    """Of random bytes: every code, every kind of scale. Slots may come more than once; the ends are slots."""
    twin = backend.twin(kv_format, 1024)
    loc = torch.from_numpy(random.integers(0, 1088, count))
    loc[-1:] = 1087
    loc[:1] = 0
    for layer in (1, DRAFT)[: 1 if count == 1000 else 2]:
        twin.get_mla_kv_buffer(layer, loc)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_load_latent_as(backend: Backend, random: np.random.Generator, kv_format: str, dtype: torch.dtype) -> None:
    twin = backend.twin(kv_format)
    loc = with_hostile(random, some_slots(random, 100), 192, torch.int64)
    twin.set_mla_kv_buffer(0, locs(some_slots(random, 150)), *latent(random, 150))
    twin.get_mla_kv_buffer(0, loc, dtype)
    twin.get_mla_kv_buffer(DRAFT, loc, dst_dtype=dtype)


def test_load_latent_is_bf16_unless_told_otherwise(backend: Backend) -> None:
    for kv_format in FORMATS:
        nope, rope = backend.twin(kv_format).pool.get_mla_kv_buffer(0, locs([5, 6]))
        assert (nope.dtype, rope.dtype) == (torch.bfloat16, torch.bfloat16)
        assert (nope.shape, rope.shape) == ((2, 1, 512), (2, 1, 64))


def test_a_load_of_bf16_keeps_the_bits(backend: Backend) -> None:
    twin = backend.twin("bf16", 1024)
    every = np.arange(1 << 16, dtype=np.uint16).reshape(1024, 64)
    twin.set_mla_kv_buffer(0, torch.arange(1, 1025), tensor(np.tile(every, 8)), tensor(every))
    nope, rope = twin.get_mla_kv_buffer(0, torch.arange(1, 1025))
    assert np.array_equal(bits(rope)[:, 0], every)
    assert np.array_equal(bits(nope)[:, 0], np.tile(every, 8))


# -- the indexer


@pytest.mark.parametrize("count", COUNTS)
def test_store_index(caster: Backend, random: np.random.Generator, count: int) -> None:
    twin = caster.twin("bf16", 1024)
    for layer in (0, DRAFT):
        twin.store_index_k(layer, locs(some_slots(random, count, 1088)), key(random, count))
        codes, scales = stored_key(random, count)
        loc = locs(some_slots(random, count, 1088))
        twin.set_index_k_scale_buffer(layer, loc, codes, scales)
        twin.set_index_k_scale_buffer(layer, loc, codes, scales[:, None])


@pytest.mark.parametrize("how", LAID)
def test_store_index_from_strided_inputs(backend: Backend, random: np.random.Generator, how: str) -> None:
    twin = backend.twin("bf16")
    loc = locs(some_slots(random, 30))
    twin.store_index_k(0, loc, laid(key(random, 30), how))
    codes, scales = stored_key(random, 30)
    twin.set_index_k_scale_buffer(0, loc, laid(codes, how), laid(scales[:, None], how))
    twin.set_index_k_scale_buffer(DRAFT, loc, laid(codes, how), laid(scales[:, None], how)[:, 0])
    twin.set_index_k_scale_buffer(0, loc, codes[:1].expand(30, 128), scales[:1].expand(30))


def test_index_scales(caster: Backend) -> None:
    """The floor 1e-4, quotients, an infinity, NaN, and a block of zeros, at the bytes of slot 70: 9,216 and 16,664."""
    twin = caster.twin()
    floor, inf, nan = f32(np.float32(1e-4) / np.float32(448)), float("inf"), float("nan")
    # the floor's inverse is 4480000 to four digits: 2^-14 times it is 273.4, nearer to 288 than to 256
    for first, second, codes, scale in [
        (0.0, -0.0, [0x00, 0x80], floor),
        (2.0**-14, nan, [0x79, 0x7F], floor),
        (nan, -nan, [0x7F, 0x7F], floor),
        (3.0, 0.0, [0x7E, 0x00], [0xB7, 0x6D, 0xDB, 0x3B]),
        (13.0, 0.609375, [0x7E, 0x5B], [0xDB, 0xB6, 0xED, 0x3C]),
        (inf, 1.0, [0x7F, 0x00], f32(inf)),
        (-inf, 0.0, [0x7F, 0x00], f32(inf)),
    ]:
        values = torch.zeros((1, 128), dtype=torch.bfloat16)
        values[0, :2] = bf16(first, second)
        twin.store_index_k(0, locs([70]), values)
        found = twin.pool.buffer("index_k", 0).view(-1)
        assert found[9216:9344].tolist() == codes + [0] * 126
        assert found[16_664:16_668].tolist() == scale


def test_programs_of_few_tokens(random: np.random.Generator) -> None:
    """As on a GPU: more programs than one for a handful of tokens, and native casts. Elsewhere it takes 65 tokens."""
    with interpreted() as sanitizer:
        twin = Backend("triton", sanitizer, native=1).twin()
        twin.pool._tokens = 4
        loc, other = (locs([*some_slots(random, 9), -1, 192]) for _ in range(2))
        twin.set_mla_kv_buffer(1, loc, *latent(random, 11))
        twin.store_index_k(0, loc, key(random, 11))
        twin.set_index_k_scale_buffer(DRAFT, loc, *stored_key(random, 11))
        twin.get_mla_kv_buffer(1, other)
        twin.get_index_k_scale_buffer(0, locs([9, 0, 6]), locs([[1], [1], [2]]))
        twin.move_kv_cache(other, loc)
        twin.load_cpu_copy(twin.get_cpu_copy(loc), other)


def test_every_maximum_of_a_key(caster: Backend) -> None:
    twin = caster.twin(tokens=1408, **ONE_LAYER)
    twin.store_index_k(0, torch.arange(1, 1409), tensor(blocks_of_every_maximum()))


@pytest.mark.parametrize(
    ("known", "dtype"),
    [
        ([], torch.int32),
        (["seq_len_sum"], torch.int64),
        (["max_seq_len"], torch.int32),
        (["seq_len_sum", "max_seq_len"], torch.int64),
    ],
)
def test_gather_index(backend: Backend, random: np.random.Generator, known: list[str], dtype: torch.dtype) -> None:
    twin = backend.twin("bf16", 1024)
    for lengths in ([], [0], [1], [0, 64, 0], [63, 64, 65, 1, 0, 192], [1000]):
        pages = torch.from_numpy(random.integers(0, 17, (len(lengths), 16))).to(dtype)
        sums = {"seq_len_sum": sum(lengths), "max_seq_len": max(lengths, default=0)}
        given = {name: sums[name] for name in known}
        for layer in (0, DRAFT) if len(known) == 2 else (0,):
            twin.get_index_k_scale_buffer(layer, locs(lengths, dtype), pages, **given)


def test_gather_index_through_strided_tables(backend: Backend, random: np.random.Generator) -> None:
    twin = backend.twin("bf16")
    table = torch.from_numpy(random.integers(0, 3, (9, 11)))
    lengths = locs([100, 3, 64, 0])
    twin.get_index_k_scale_buffer(0, torch.stack([lengths, lengths + 9], dim=1)[:, 0], table[:4, 2:5])
    twin.get_index_k_scale_buffer(0, lengths, table[1::2, ::3])
    twin.get_index_k_scale_buffer(0, lengths, table.t()[:4, :2])
    twin.get_index_k_scale_buffer(0, lengths.to(torch.int32), table[:1, :3].expand(4, 3))


def test_gather_index_of_pages_that_do_not_exist(backend: Backend) -> None:
    """Zeros, from a page out of range and from a token past its row of the table; nothing is read outside of either."""
    for side in ("left", "right"):
        twin = backend.twin("bf16", side=side)  # pages 0, 1 and 2
        pages = [1, *hostile_slots(3), 2]
        table = locs([pages, pages[::-1]])
        lengths = locs([64 * len(pages), 64 * len(pages) - 10])
        for given in ({}, {"seq_len_sum": int(lengths.sum()), "max_seq_len": int(lengths.max())}):
            twin.get_index_k_scale_buffer(0, lengths, table, **given)
            twin.get_index_k_scale_buffer(DRAFT, locs([200, 0, 130]), locs([[1, 2], [1, 1], [2, 0]])[:, :2])
        twin.get_index_k_scale_buffer(0, locs([5, -3, 7]), locs([[1], [2], [2]]))


def test_gather_index_with_sums_that_lie(backend: Backend, random: np.random.Generator) -> None:
    """The result has the rows that were asked for: those of the sequences as far as they go, then zeros."""
    twin = backend.twin("bf16")
    lengths, table = locs([70, 0, 130, 5]), torch.from_numpy(random.integers(0, 3, (4, 3)))
    records = twin.index(0).sequences(lengths.tolist(), table.numpy())
    assert len(records) == 205
    for total, longest in [(205, 500), (300, 130), (100, 130), (0, 130), (204, 192), (206, 130)]:
        key, scale = twin.pool.get_index_k_scale_buffer(0, lengths, table, total, longest)
        assert (key.shape, scale.shape) == ((total, 128), (total, 4))
        expected = np.vstack([records, np.zeros((100, 132), np.uint8)])[:total]
        np.testing.assert_array_equal(np.hstack([key.numpy(), scale.numpy()]), expected)
    for longest in (0, 1, 64, 129):  # tokens past it are not gathered
        key, scale = twin.pool.get_index_k_scale_buffer(0, lengths, table, 205, longest)
        expected = records.copy()
        for first, length in ((0, 70), (70, 130), (200, 5)):
            expected[first + min(length, longest) : first + length] = 0
        np.testing.assert_array_equal(np.hstack([key.numpy(), scale.numpy()]), expected)
    twin.check()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_index_of_lengths_that_lie(backend: Backend, dtype: torch.dtype) -> None:
    """Beyond any memory, whose sums wrap around: what follows lies past the end of the result."""
    twin = backend.twin("bf16")
    huge = torch.iinfo(dtype).max
    table = locs([[1, 2], [2, 1], [1, 1], [2, 2], [0, 1]], dtype)
    lengths = locs([5, huge, huge, -huge, 9], dtype)
    first, second = (twin.index(0).read(slots) for slots in (range(64, 69), range(128, 192)))
    key, scale = twin.pool.get_index_k_scale_buffer(0, lengths, table, 90, 64)
    expected = np.vstack([first, second, np.zeros((21, 132), np.uint8)])
    np.testing.assert_array_equal(np.hstack([key.numpy(), scale.numpy()]), expected)
    twin.check()


def test_gather_index_of_many_requests(backend: Backend) -> None:
    """300 requests, 0 to 4 tokens of page 1 or 2 each, in turn."""
    twin = backend.twin("bf16")
    lengths = [number % 5 for number in range(300)]
    pages = [1 + number % 2 for number in range(300)]
    slots = [64 * page + token for length, page in zip(lengths, pages, strict=True) for token in range(length)]
    key, scale = twin.pool.get_index_k_scale_buffer(0, locs(lengths), locs([[page] for page in pages]), 600, 4)
    np.testing.assert_array_equal(np.hstack([key.numpy(), scale.numpy()]), twin.index(0).read(slots))
    twin.check()


def test_staging_that_begins_anywhere(backend: Backend, random: np.random.Generator) -> None:
    """`unpack` takes a staging tensor at an odd address, or with gaps, as it takes one that `pack` made."""
    pool = backend.twin("fp8_scaled").pool
    loc, there = locs([70, 65, 130, 3]), locs([90, 91, 92, 93])
    staging = pool.pack(loc)
    odd = torch.cat([staging[:3], staging])[3:]
    for given in (odd, torch.stack([staging, staging], 1)[:, 0]):
        pool.clear_pages(locs([1]))
        pool.unpack(given, there)
        assert torch.equal(pool.pack(there)[:-4], pool.pack(there.int())[:-4])
        assert torch.equal(pool.pack(there), staging)
        pool.unpack(staging, loc)


# -- views


@pytest.mark.parametrize("kv_format", FORMATS)
def test_views_of_the_latent(backend: Backend, kv_format: str) -> None:
    twin = backend.twin(kv_format)
    row = ROW_BYTES[kv_format]
    latent_bytes = {"bf16": 1024, "fp8_scaled": 512, "fp8_raw": 512}[kv_format]
    for name, layer in (("kv", 1), ("kv_draft", DRAFT)):
        buffer = twin.pool.buffer(name, layer)
        rows = twin.pool.get_key_buffer(layer)
        assert (rows.dtype, rows.shape, rows.stride()) == (torch.uint8, (192, row), (row, 1))
        assert rows.data_ptr() == buffer.data_ptr()
        codes = twin.pool.get_value_buffer(layer)
        assert (codes.dtype, codes.shape, codes.stride()) == (torch.uint8, (192, latent_bytes), (row, 1))
        assert codes.data_ptr() == buffer.data_ptr()
        rows[191, 5] = codes[70, 9] = 33  # they are views
        for byte in (191 * row + 5, 70 * row + 9):
            assert buffer.view(-1)[byte] == 33
            twin.latent(layer).bytes[byte] = 33
        twin.check()


@pytest.mark.parametrize(("kv_format", "dtype"), [("bf16", torch.bfloat16), ("fp8_raw", E4M3_DTYPE)])
def test_typed_views_of_the_latent(backend: Backend, kv_format: str, dtype: torch.dtype) -> None:
    twin = backend.twin(kv_format)
    for name, layer in (("kv", 0), ("kv_draft", DRAFT)):
        rows, values = twin.pool.get_key_buffer(layer, dtype), twin.pool.get_value_buffer(layer, dtype=dtype)
        assert (rows.dtype, rows.shape, values.dtype, values.shape) == (dtype, (192, 1, 576), dtype, (192, 1, 512))
        assert rows.data_ptr() == values.data_ptr() == twin.pool.buffer(name, layer).data_ptr()
        everything = bits(twin.pool.buffer(name, layer).view(192, -1).view(dtype))
        assert np.array_equal(bits(rows)[:, 0], everything)
        assert np.array_equal(bits(values)[:, 0], everything[:, :512])


@pytest.mark.parametrize(
    ("operation", "kv_format", "dtype"),
    [
        ("get_key_buffer", "fp8_scaled", E4M3_DTYPE),
        ("get_key_buffer", "fp8_scaled", torch.bfloat16),
        ("get_value_buffer", "fp8_scaled", torch.bfloat16),
        ("get_key_buffer", "bf16", E4M3_DTYPE),
        ("get_value_buffer", "bf16", torch.float16),
        ("get_key_buffer", "fp8_raw", torch.bfloat16),
        ("get_value_buffer", "fp8_raw", torch.float8_e5m2),
    ],
)
def test_views_of_another_type_are_refused(operation: str, kv_format: str, dtype: torch.dtype) -> None:
    pool = Pool(Layout.from_config(CONFIG, kv_format=kv_format), 64)
    with pytest.raises(ValueError, match="dtype") as error:
        getattr(pool, operation)(0, dtype)
    assert str(dtype).removeprefix("torch.") in str(error.value)


def test_view_of_the_indexer(backend: Backend) -> None:
    twin = backend.twin()
    for layer in (0, DRAFT):
        pages = twin.pool.get_index_k_with_scale_buffer(layer)
        assert (pages.dtype, pages.shape) == (torch.uint8, (3, 8448))
        assert pages.data_ptr() == twin.pool.buffer("index_k", layer).data_ptr()


# -- moves


def test_move_of_one_token_in_a_page_of_64(backend: Backend) -> None:
    """130 to 70: key bytes 17,152.. to 9,216.., scale bytes 25,096.. to 16,664.., and nothing else."""
    twin = backend.twin()
    before = {layer: twin.pool.buffer("index_k", layer).view(-1).clone() for layer in (0, DRAFT)}
    rows = {(name, layer): twin.pool.buffer(name, layer).view(192, 656).clone() for name, layer in LATENT_OWNERS}
    twin.move_kv_cache(locs([70]), locs([130]))
    for layer, expected in before.items():
        expected[9_216 : 9_216 + 128] = expected[17_152 : 17_152 + 128].clone()
        expected[16_664 : 16_664 + 4] = expected[25_096 : 25_096 + 4].clone()
        assert torch.equal(twin.pool.buffer("index_k", layer).view(-1), expected)
    for owner, expected in rows.items():
        expected[70] = expected[130].clone()
        assert torch.equal(twin.pool.buffer(*owner).view(192, 656), expected)


LATENT_OWNERS = [("kv", 0), ("kv", 1), ("kv_draft", 2)]


@pytest.mark.parametrize(
    "pairs",
    [
        [(3, 70), (70, 130)],  # a chain: 3 gets what was in 70, 70 what was in 130
        [(3, 70), (70, 3)],
        [(3, 70), (70, 130), (130, 3)],
        [(5, 5), (6, 5), (7, 6)],  # one source for two, and one that stays
        [(0, 70), (71, 0)],  # the reserved slot is a slot
    ],
    ids=["chain", "swap", "cycle", "fork", "slot 0"],
)
def test_move_reads_before_it_writes(backend: Backend, pairs: list[tuple[int, int]]) -> None:
    for order in (pairs, pairs[::-1]):
        twin = backend.twin()
        targets, sources = zip(*order, strict=True)
        twin.move_kv_cache(locs(targets), locs(sources))


@pytest.mark.parametrize("shift", [3, -3])
def test_move_of_400_tokens_by_3(backend: Backend, shift: int) -> None:
    for flip in (False, True):
        twin = backend.twin(tokens=448, **ONE_LAYER)
        sources = torch.arange(50, 450)
        sources = sources.flip(0) if flip else sources
        twin.move_kv_cache(sources + shift, sources)


@pytest.mark.parametrize("count", [*COUNTS, 257])
def test_move_of_a_permutation(backend: Backend, random: np.random.Generator, count: int) -> None:
    """Sources and targets among the same slots: everything moves, and most of it onto what moves as well."""
    twin = backend.twin(tokens=1024, **({} if count == 65 else ONE_LAYER))
    slots = np.array(some_slots(random, count, 1088), np.int64)
    twin.move_kv_cache(torch.from_numpy(slots), torch.from_numpy(random.permutation(slots)))


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_raw"])
def test_move_of_a_permutation_of_other_rows(backend: Backend, random: np.random.Generator, kv_format: str) -> None:
    twin = backend.twin(kv_format)
    slots = np.array(some_slots(random, 40), np.int64)
    twin.move_kv_cache(torch.from_numpy(slots), torch.from_numpy(random.permutation(slots)))


# -- values that are codes already


@pytest.mark.parametrize("given", ["codes", "latent codes", "rope codes"])
def test_codes_are_stored_as_they_are(backend: Backend, random: np.random.Generator, given: str) -> None:
    """Of any bits, NaN of either sign included, in a format without scales; each value as codes or in bf16."""
    twin = backend.twin("fp8_raw")
    loc = locs([*some_slots(random, 40), *hostile_slots(192, torch.int64)])
    nope, rope = latent(random, len(loc))
    if given != "rope codes":
        nope = tensor(random.integers(0, 256, (len(loc), 512), np.uint8), E4M3_DTYPE)
    if given != "latent codes":
        rope = tensor(random.integers(0, 256, (len(loc), 64), np.uint8), E4M3_DTYPE)
    twin.set_mla_kv_buffer(0, loc, nope[:, None], rope)
    twin.set_mla_kv_buffer(DRAFT, loc, nope, rope[:, None], skip_reserved=False)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_which_values_a_format_takes(backend: Backend, random: np.random.Generator, kv_format: str) -> None:
    twin = backend.twin(kv_format)
    nope, rope = latent(random, 2)
    wanted = "bfloat16 or float8_e4m3fn" if kv_format == "fp8_raw" else "bfloat16"
    with pytest.raises(ValueError) as error:
        twin.pool.set_mla_kv_buffer(0, locs([3, 4]), nope.float(), rope)
    assert str(error.value) == f"cache_k_nope must be {wanted} [2, 512], not float32 [2, 512] on cpu"
    with pytest.raises(ValueError) as error:
        twin.pool.set_mla_kv_buffer(0, locs([3, 4]), nope, rope.to(torch.float8_e5m2))
    assert str(error.value) == f"cache_k_rope must be {wanted} [2, 64], not float8_e5m2 [2, 64] on cpu"
    twin.check()


# -- copies


@pytest.mark.parametrize(
    ("kv_format", "count"), [("bf16", 40), ("fp8_raw", 40), *(("fp8_scaled", count) for count in COUNTS)]
)
def test_offload_and_reload(backend: Backend, random: np.random.Generator, kv_format: str, count: int) -> None:
    """Into other slots, after all that was there is gone."""
    twin = backend.twin(kv_format, 1024, **({} if count in (40, 65) else ONE_LAYER))
    saved = twin.get_cpu_copy(locs(some_slots(random, count, 1088)))
    twin.fill(1)
    twin.load_cpu_copy(saved, locs(some_slots(random, count, 1088)))


@pytest.mark.parametrize("count", [0, 1, 4, 5, 10, 12])
def test_a_copy_of_many_parts(
    backend: Backend, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """5 slots of 3 x 656 + 2 x 132 = 2232 bytes fit into 11,160; a byte less, and 4 do."""
    for staged_bytes, part_slots in ((11_160, 5), (11_159, 4), (1, 1)):
        monkeypatch.setattr("generated.glm_dsa._STAGED_BYTES", staged_bytes)
        twin = backend.twin()
        sources = [*some_slots(random, count), -1, 192]
        saved = twin.get_cpu_copy(locs(sources))
        assert saved.copy["part_slots"] == part_slots
        sizes = [min(len(sources) - at, part_slots) for at in range(0, len(sources), part_slots)]
        assert [len(own) for own in saved.copy["staging"]] == [
            sum(part.nbytes + -part.nbytes % 16 for part in twin.pool.describe_staging(size)) + 2 * size
            for size in sizes
        ]
        monkeypatch.setattr("generated.glm_dsa._STAGED_BYTES", 2**26)  # a copy says itself how it is parted
        twin.fill(1)
        twin.load_cpu_copy(saved, locs([*some_slots(random, count), 5, 6]))


def test_a_part_that_does_not_fit_leaves_all_as_it_is(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generated.glm_dsa._STAGED_BYTES", 2 * 2232)
    twin = backend.twin()
    copy = twin.pool.get_cpu_copy(locs([3, 70, 71, 72, 80]))
    for change in (
        lambda own: own[:-1],
        lambda own: own.view(torch.int8),
        lambda own: own.to("meta"),
        lambda own: None,
    ):
        staging = list(copy["staging"])
        staging[2] = change(staging[2])
        with pytest.raises(ValueError, match="^staging must be uint8 "):
            twin.pool.load_cpu_copy({**copy, "staging": staging}, locs([10, 11, 12, 13, 14]))
        twin.check()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_inference_mode_and_what_follows_it(random: np.random.Generator, kv_format: str) -> None:
    """Operations of a pool may come in inference mode first, as in a server, and outside it afterwards."""
    twin = Backend("torch").twin(kv_format)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            twin.set_mla_kv_buffer(0, locs(some_slots(random, 40)), *latent(random, 40))
            twin.store_index_k(0, locs(some_slots(random, 40)), key(random, 40))
            twin.move_kv_cache(locs(some_slots(random, 40)), locs(some_slots(random, 40)))
            twin.load_cpu_copy(twin.get_cpu_copy(locs(some_slots(random, 40))), locs(some_slots(random, 40)))
            twin.get_mla_kv_buffer(1, locs(some_slots(random, 40)))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_memory_that_is_sliced_from_a_slab(backend: Backend, random: np.random.Generator, kv_format: str) -> None:
    """Fields are found from where a tensor begins, not from where its memory does."""
    slab, taken = torch.zeros(1 << 21, dtype=torch.uint8), [256]

    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        start, taken[0] = taken[0], taken[0] + -(-nbytes // 256) * 256
        return slab[start : start + nbytes]

    layout = Layout.from_config(CONFIG, kv_format=kv_format)
    plain, sliced = Pool(layout, 128, backend=backend.name), Pool(layout, 128, allocate=allocate, backend=backend.name)
    loc, values, keys = locs(some_slots(random, 50)), latent(random, 50), key(random, 50)
    lengths, table = locs([70, 3]), torch.tensor([[1, 0], [2, 0]])
    results = []
    for pool in (plain, sliced):
        pool.set_mla_kv_buffer(0, loc, *values)
        pool.store_index_k(0, loc, keys)
        gathered = pool.get_index_k_scale_buffer(0, lengths, table, 73, 70)
        results.append([*pool.get_mla_kv_buffer(0, loc), *gathered, pool.buffer("kv", 0), pool.buffer("index_k", 0)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


def test_parts_of_spaces_of_other_lengths(
    backend: Backend, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("generated.glm_dsa._STAGED_BYTES", 3 * 2232)
    twin = backend.twin(ratio=2)
    saved = twin.get_cpu_copy({"device": locs(some_slots(random, 2)), "logical": locs(some_slots(random, 8))})
    assert len(saved.copy["staging"]) == 3
    twin.fill(1)
    twin.load_cpu_copy(saved, {"device": locs(some_slots(random, 2)), "logical": locs(some_slots(random, 8))})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part_slots": 0}, "copy must say the part_slots of a staging tensor, not 0"),
        ({"part_slots": True}, "copy must say the part_slots of a staging tensor, not True"),
        ({"part_slots": None}, "copy must say the part_slots of a staging tensor, not None"),
        ({"part_slots": 1}, "copy must have 2 staging tensors, not (tensor("),
        ({"staging": ()}, "copy must have 1 staging tensors, not ()"),
        ({"staging": (1, 2)}, "copy must have 1 staging tensors, not (1, 2)"),
        ({"staging": None}, "copy must have 1 staging tensors, not None"),
    ],
)
def test_parts_that_do_not_fit(backend: Backend, change: dict[str, Any], message: str) -> None:
    twin = backend.twin()
    copy = twin.pool.get_cpu_copy(locs([3, 70]))
    with pytest.raises(ValueError) as error:
        twin.pool.load_cpu_copy({**copy, **change}, locs([3, 70]))
    assert str(error.value).startswith(message)
    twin.check()


def test_a_copy_survives_pickling(backend: Backend, random: np.random.Generator) -> None:
    twin = backend.twin()
    saved = twin.get_cpu_copy(locs(some_slots(random, 60)))
    twin.fill(1)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        again = pickle.loads(pickle.dumps(saved.copy, protocol))
        twin.load_cpu_copy(replace(saved, copy=again), locs(some_slots(random, 60)))


def test_a_copy_is_a_mapping_of_host_tensors_with_its_page_fingerprints(backend: Backend) -> None:
    pool = backend.twin().pool
    copy = pool.get_cpu_copy(locs([3, 70]))
    assert isinstance(copy, Mapping)
    assert copy["page_fingerprints"] == {name: pool.layout.page_fingerprint(name) for name in OWNERS}
    assert copy["layers"] == {name: list(layers) for name, layers in OWNERS.items()}
    assert copy["slots"] == {"logical": 2}
    (staging,) = copy["staging"]
    assert (staging.dtype, staging.device) == (torch.uint8, torch.device("cpu"))


def test_a_copy_that_another_process_pickled(tmp_path: Path) -> None:
    """Identity and checksum are those of this process: nothing in them depends on addresses or hashes."""
    script = f"""
import pickle, torch
from generated import glm_dsa
pool = glm_dsa.Pool(glm_dsa.Layout.from_config({CONFIG!r}, role="both"), 64)
for entry in pool._entries:
    entry.memory.copy_(torch.arange(entry.memory.numel()).view(entry.memory.shape) % 251)
with open({str(tmp_path / "copy")!r}, "wb") as file:
    pickle.dump(pool.get_cpu_copy(torch.arange(64, 72)), file)
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    pool = Pool(Layout.from_config(CONFIG, role="both"), 64)
    pool.load_cpu_copy(pickle.loads((tmp_path / "copy").read_bytes()), torch.arange(64, 72))
    row = torch.arange(64 * 656, 65 * 656) % 251  # of slot 64, the first of its page
    assert torch.equal(pool.get_key_buffer(1)[64], row.to(torch.uint8))


def test_a_copy_for_a_pool_of_another_size(backend: Backend, random: np.random.Generator) -> None:
    small, large = backend.twin(tokens=64), backend.twin(tokens=256)
    large.fill(5)
    saved = small.get_cpu_copy(locs(some_slots(random, 50, 128)))
    large.load_cpu_copy(saved, locs(some_slots(random, 50, 320)))


def test_a_copy_for_the_other_backend(random: np.random.Generator) -> None:
    with interpreted() as sanitizer:
        one, other = Backend("torch").twin(), Backend("triton", sanitizer).twin()
        for source, target in ((one, other), (other, one)):
            source.fill(8)
            target.fill(9)
            target.load_cpu_copy(source.get_cpu_copy(locs(some_slots(random, 60))), locs(some_slots(random, 60)))


# -- staging


def staged(copy: Mapping[str, Any]) -> torch.Tensor:
    """The staging tensor of a copy that has one part, or none."""
    assert len(copy["staging"]) <= 1
    return torch.cat([torch.empty(0, dtype=torch.uint8), *copy["staging"]])


RECORD_FIELDS = {
    "bf16": {"latent": 1024, "rope": 128},
    "fp8_scaled": {"latent": 512, "latent_scale": 16, "rope": 128},
    "fp8_raw": {"latent": 512, "rope": 64},
    "index": {"key": 128, "key_scale": 4},
}


def staged_records(
    pool: Pool, copy: Mapping[str, Any], n: int | Mapping[str, int]
) -> dict[tuple[str, int], np.ndarray]:
    """The records of each buffer and layer in a copy, from where `describe_staging` says that their fields are."""
    fields: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for part in pool.describe_staging(n):
        widths = RECORD_FIELDS["index" if part.buffer == "index_k" else pool.layout.kv_format]
        assert part.record_bytes == sum(widths[name] for name in part.fields)
        assert part.nbytes == len(part.layers) * part.slots * part.record_bytes
        assert part.offset % 16 == 0
        rows = staged(copy)[part.offset : part.offset + part.nbytes].numpy()
        shape = (len(part.layers), part.slots, part.record_bytes)
        for layer, own in zip(part.layers, rows.reshape(shape), strict=True):
            start = 0
            for name in part.fields:
                fields.setdefault((part.buffer, layer), {})[name] = own[:, start : start + widths[name]]
                start += widths[name]
    return {
        owner: np.hstack([own[name] for name in RECORD_FIELDS["index" if "key" in own else pool.layout.kv_format]])
        for owner, own in fields.items()
    }


def test_staging_is_described(backend: Backend) -> None:
    """Three slots: 2 x 3 rows of 656 bytes, 3 rows of the draft layer, 2 x 3 keys, 2 x 3 scales on a multiple of 16."""
    pool = backend.twin().pool
    parts = [
        ("kv", (0, 1), ("latent", "latent_scale", "rope"), 0, 656, 3, 3936),
        ("kv_draft", (2,), ("latent", "latent_scale", "rope"), 3936, 656, 3, 1968),
        ("index_k", (0, 2), ("key",), 5904, 128, 3, 768),
        ("index_k", (0, 2), ("key_scale",), 6672, 4, 3, 24),
    ]
    for n in (3, {"logical": 3}):
        described = pool.describe_staging(n)
        found = [
            (part.buffer, part.layers, part.fields, part.offset, part.record_bytes, part.slots, part.nbytes)
            for part in described
        ]
        assert found == parts
    staging = staged(pool.get_cpu_copy(locs([5, -1, 191])))
    assert staging.shape == (6704 + 6,)  # and for each slot of each space whether it was there
    assert staging[6704:].tolist() == [1, 0, 1] * 2


def test_staging_of_spaces_apart(backend: Backend) -> None:
    """Two slots where the latent of the body lies, one of the others."""
    pool = backend.twin("fp8_raw", ratio=2).pool
    parts = [(part.buffer, part.offset, part.slots) for part in pool.describe_staging({"device": 2, "logical": 1})]
    # 2 x 2 x 576; 576; 2 x 128; 2 x 4 on a multiple of 16
    assert parts == [("kv", 0, 2), ("kv_draft", 2304, 1), ("index_k", 2880, 1), ("index_k", 3136, 1)]
    staging = staged(pool.get_cpu_copy({"device": locs([5, 192]), "logical": locs([192])}))
    assert staging.shape == (3152 + 3,)
    assert staging[3152:].tolist() == [1, 0, 1]


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 65])
def test_a_copy_is_what_the_staging_describes(
    backend: Backend, random: np.random.Generator, kv_format: str, count: int
) -> None:
    twin = backend.twin(kv_format)
    saved = twin.get_cpu_copy(locs(some_slots(random, count)))
    records = staged_records(twin.pool, saved.copy, count)
    assert set(records) == set(saved.records)
    for owner, expected in saved.records.items():
        np.testing.assert_array_equal(records[owner], expected)


@pytest.mark.parametrize("n", [-1, 1.0, "3", None, True, {"device": 3}, {"logical": -1}, torch.tensor(3)])
def test_staging_of_what_is_no_count_is_refused(backend: Backend, n: object) -> None:
    with pytest.raises(ValueError, match="^n must be"):
        backend.twin().pool.describe_staging(n)


def test_pack_and_unpack(backend: Backend, random: np.random.Generator) -> None:
    """The halves of a copy that work on the device."""
    twin = backend.twin()
    loc = locs([*some_slots(random, 60), -1, 192])
    saved = twin.get_cpu_copy(loc)
    staging = twin.pool.pack(loc)
    assert torch.equal(staging, staged(saved.copy))
    twin.fill(1)
    targets = locs([*some_slots(random, 60), 0, 5])
    twin.pool.unpack(staging, targets)
    expected = backend.twin()
    expected.fill(1)
    expected.load_cpu_copy(saved, targets)
    for owner in twin.memory:
        assert torch.equal(twin.pool.buffer(*owner), expected.pool.buffer(*owner))


@pytest.mark.parametrize(
    "change",
    [
        lambda staging: staging[:-1],
        lambda staging: torch.cat([staging, staging[:1]]),
        lambda staging: staging[None],
        lambda staging: staging.view(torch.int8),
        lambda staging: staging.to("meta"),
        lambda staging: staging.tolist(),
        lambda staging: None,
    ],
    ids=["short", "long", "2 axes", "int8", "meta", "list", "None"],
)
def test_unfit_staging_is_refused(backend: Backend, change: Callable[[torch.Tensor], object]) -> None:
    twin = backend.twin()
    loc = locs([3, 70])
    staging = change(twin.pool.pack(loc))
    with pytest.raises(ValueError, match="^staging must be "):
        twin.pool.unpack(staging, loc)
    twin.check()
    if not isinstance(staging, torch.Tensor) or not staging.is_meta:
        with pytest.raises(ValueError, match="staging must be "):
            twin.pool.load_cpu_copy({**twin.pool.get_cpu_copy(loc), "staging": (staging,)}, loc)
        twin.check()


# -- copies that do not fit


def refused(error: pytest.ExceptionInfo[Exception], *words: str) -> None:
    """That a message has all of these words."""
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


@pytest.mark.parametrize(
    ("kv_format", "other"), [("fp8_scaled", "bf16"), ("bf16", "fp8_raw"), ("fp8_raw", "fp8_scaled")]
)
def test_a_copy_of_another_format_is_refused_by_name(backend: Backend, kv_format: str, other: str) -> None:
    loc = locs([3, 70])
    saved = backend.twin(kv_format).get_cpu_copy(loc)
    twin = backend.twin(other)
    with pytest.raises(ValueError) as error:
        twin.pool.load_cpu_copy(saved.copy, loc)
    refused(error, "copy", f"choices.kv_format is '{kv_format}' in the copy and '{other}' here")
    twin.check()


@pytest.mark.parametrize(
    ("choices", "owners"),
    [
        ({"role": "target"}, {"kv": (0, 1), "index_k": (0,)}),
        ({"role": "draft"}, {"kv_draft": (2,), "index_k": (2,)}),
        ({"start_layer": 1}, {"kv": (1,), "kv_draft": (2,), "index_k": (2,)}),
        ({"end_layer": 1}, {"kv": (0,), "index_k": (0,)}),
        ({"elide_shared": False}, {"kv": (0, 1), "kv_draft": (2,), "index_k": (0, 1, 2)}),
    ],
)
def test_a_copy_of_other_layers_is_refused(
    backend: Backend, choices: dict[str, Any], owners: dict[str, tuple[int, ...]]
) -> None:
    loc = locs([3, 70])
    one, other = backend.twin(), backend.twin(owners=owners, **choices)
    for source, target in ((one, other), (other, one)):
        saved = source.get_cpu_copy(loc)
        with pytest.raises(ValueError) as error:
            target.pool.load_cpu_copy(saved.copy, loc)
        refused(error, "copy", *(f"choices.{name} is" for name in choices))
        target.check()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_copy_of_another_count_is_refused(backend: Backend, count: int) -> None:
    twin = backend.twin()
    saved = twin.get_cpu_copy(locs([3, 70]))
    with pytest.raises(ValueError) as error:
        twin.pool.load_cpu_copy(saved.copy, torch.arange(5, 5 + count))
    refused(error, "copy", "slots", str(count), "2")
    twin.check()


@pytest.mark.parametrize("copy", [None, {}, {"kv": torch.zeros(3)}, torch.zeros(3)], ids=["None", "{}", "kv", "tensor"])
def test_what_is_no_copy_is_refused(backend: Backend, copy: object) -> None:
    twin = backend.twin()
    with pytest.raises(ValueError, match="copy"):
        twin.pool.load_cpu_copy(copy, locs([3]))
    twin.check()


# -- pages


@pytest.mark.parametrize(("dtype", "side"), [(torch.int32, "left"), (torch.int64, "right")])
def test_clear_pages(backend: Backend, dtype: torch.dtype, side: Side) -> None:
    twin = backend.twin(side=side)
    for pages in ([], [2, *hostile_slots(3, dtype), 1], hostile_slots(3, dtype)):
        twin.fill(1)
        twin.clear_pages(LOCS["every second"](locs(pages, dtype)))


# -- slots that a space does not have


KINDS_OF_SLOTS = pytest.mark.parametrize(
    ("kv_format", "dtype", "side"),
    [
        ("fp8_scaled", torch.int32, "left"),
        ("fp8_scaled", torch.int64, "right"),
        ("bf16", torch.int64, "left"),
        ("fp8_raw", torch.int32, "right"),
    ],
)


@KINDS_OF_SLOTS
def test_hostile_slots_of_a_layer(
    backend: Backend, random: np.random.Generator, kv_format: str, dtype: torch.dtype, side: Side
) -> None:
    twin = backend.twin(kv_format, side=side)
    bad = locs(hostile_slots(192, dtype), dtype)
    mixed = with_hostile(random, [1, 191, 0, 64, 100], 192, dtype)
    for layer in (0, DRAFT):
        for loc, options in (
            (bad, {}),
            (bad[:0], {}),
            (mixed, {"skip_reserved": True}),
            (LOCS["every second"](mixed), {"skip_reserved": False}),
        ):
            twin.set_mla_kv_buffer(layer, loc, *latent(random, len(loc)), **options)
            twin.store_index_k(layer, loc, key(random, len(loc)), **options)
            twin.set_index_k_scale_buffer(layer, loc, *stored_key(random, len(loc)), **options)
            nope, rope = twin.get_mla_kv_buffer(layer, loc)
            outside = (loc < 0) | (loc >= 192)
            assert not nope[outside].any() and not rope[outside].any()


@KINDS_OF_SLOTS
def test_hostile_slots_of_the_pool(
    backend: Backend, random: np.random.Generator, kv_format: str, dtype: torch.dtype, side: Side
) -> None:
    """Moves and reloads skip a pair of which one end does not exist; a copy of such a slot holds zeros."""
    twin = backend.twin(kv_format, side=side)
    bad = hostile_slots(192, dtype)
    good, other = some_slots(random, len(bad), 96), (np.array(some_slots(random, len(bad), 96)) + 96).tolist()
    both = locs([*good, *bad, 7], dtype), locs([*bad, *other, 191], dtype)
    for targets, sources in (both, both[::-1], (both[0][:0], both[1][:0])):
        twin.move_kv_cache(targets, sources)
        saved = twin.get_cpu_copy(sources)
        twin.fill(len(targets))
        twin.load_cpu_copy(saved, targets)


def test_a_copy_of_bad_slots_holds_zeros(backend: Backend) -> None:
    twin = backend.twin()
    bad = hostile_slots(192)
    assert not staged(twin.pool.get_cpu_copy(locs(bad))).any()
    copy = twin.pool.get_cpu_copy(locs([-1, 5, 192]))
    for (name, layer), records in staged_records(twin.pool, copy, 3).items():
        expected = np.zeros(records.shape, np.uint8)
        expected[1] = twin.memory[name, layer].read([5])[0]
        np.testing.assert_array_equal(records, expected)


# -- HiSparse: the latent of the body in a space of its own


def hisparse_slots(
    random: np.random.Generator, counts: Mapping[str, int], num_slots: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    return {space: locs(some_slots(random, counts[space], num_slots[space])) for space in counts}


@pytest.mark.parametrize("kv_format", FORMATS)
def test_hisparse(backend: Backend, random: np.random.Generator, kv_format: str) -> None:
    """128 tokens at ratio 2: the body's latent has 192 slots, the draft's and the indexer 320."""
    twin = backend.twin(kv_format, ratio=2)
    loc = locs([5, 191, 192, 200, 319, 320, -1])
    for layer in (0, DRAFT):  # slots from 192 on exist for the draft layer only
        twin.set_mla_kv_buffer(layer, loc, *latent(random, 7))
        twin.get_mla_kv_buffer(layer, loc)
        twin.store_index_k(layer, loc, key(random, 7))
        twin.set_index_k_scale_buffer(layer, loc, *stored_key(random, 7))
        twin.get_index_k_scale_buffer(layer, locs([320, 70]), locs([[0, 1, 2, 3, 4], [5, 4, 3, 2, 1]]))
    assert twin.pool.get_key_buffer(1).shape == (192, ROW_BYTES[kv_format])
    assert twin.pool.get_key_buffer(DRAFT).shape == (320, ROW_BYTES[kv_format])
    assert twin.pool.get_index_k_with_scale_buffer(DRAFT).shape == (5, 8448)


SPACES_OF_128 = {"logical": 320, "device": 192}


@pytest.mark.parametrize("counts", [(60, 3), (0, 64), (65, 0)])
def test_hisparse_takes_slots_for_each_space(
    backend: Backend, random: np.random.Generator, counts: tuple[int, int]
) -> None:
    """The spaces need not have the same number of slots to move."""
    twin = backend.twin(ratio=2)
    by_space = dict(zip(("logical", "device"), counts, strict=True))
    targets, sources = (hisparse_slots(random, by_space, SPACES_OF_128) for _ in range(2))
    twin.move_kv_cache(targets, sources)
    saved = twin.get_cpu_copy(sources)
    twin.fill(2)
    twin.load_cpu_copy(replace(saved, copy=pickle.loads(pickle.dumps(saved.copy))), targets)
    twin.clear_pages({"logical": locs([4, 5, -1]), "device": locs([2, 3])})


def test_hisparse_hostile_slots(backend: Backend, random: np.random.Generator) -> None:
    """Slots 192 to 319 exist in one space and not in the other."""
    twin = backend.twin(ratio=2)
    bad = {space: hostile_slots(num_slots) for space, num_slots in SPACES_OF_128.items()}
    targets = {"logical": locs([*bad["logical"], 319, 200, 7]), "device": locs([*bad["device"], 191, 200, 7])}
    sources = {"logical": locs([250] * 10 + [5, 6, 193]), "device": locs([150] * 10 + [5, 6, 193])}
    for to, source in ((targets, sources), ({space: slots.flip(0) for space, slots in sources.items()}, targets)):
        distinct = {space: slots if len(set(slots.tolist())) > 4 else torch.arange(13) for space, slots in to.items()}
        twin.move_kv_cache(distinct, source)
        twin.load_cpu_copy(twin.get_cpu_copy(source), distinct)


@pytest.mark.parametrize("space", ["logical", "device"])
def test_hisparse_takes_slots_of_one_space(backend: Backend, random: np.random.Generator, space: str) -> None:
    """The buffers of the other are left alone, where it is named with no slots; else the call is refused."""
    twin = backend.twin(ratio=2)
    other = "logical" if space == "device" else "device"
    targets, sources = (hisparse_slots(random, {space: 60, other: 0}, SPACES_OF_128) for _ in range(2))
    twin.move_kv_cache(targets, sources)
    saved = twin.get_cpu_copy(sources)
    twin.fill(2)
    twin.load_cpu_copy(saved, targets)
    twin.clear_pages({space: locs([1]), other: locs([])})
    left_out = f"must be a mapping with an entry for each of the spaces device, logical, and `{other}` is left out"
    for operation, name in (("get_cpu_copy", "loc"), ("pack", "loc"), ("clear_pages", "pages")):
        with pytest.raises(ValueError) as error:
            getattr(twin.pool, operation)({space: locs([1])})
        assert str(error.value) == f"{name} {left_out}; an entry of no length leaves a space as it is"
    for bad in (GOOD_MAPPING, {space: locs([]), other: locs(range(60))}):
        with pytest.raises(ValueError) as error:
            twin.pool.move_kv_cache(bad, sources)
        refused(error, "tgt_loc", "src_loc", "60")
        with pytest.raises(ValueError, match="copy"):
            twin.pool.load_cpu_copy(saved.copy, bad)
        twin.check()


def test_one_numbering_has_one_name(backend: Backend, random: np.random.Generator) -> None:
    """Without HiSparse all slots are numbered by `logical`."""
    twin = backend.twin()
    targets, sources = ({"logical": locs(some_slots(random, 60))} for _ in range(2))
    twin.move_kv_cache(targets, sources["logical"])
    twin.load_cpu_copy(twin.get_cpu_copy(sources), targets)
    twin.clear_pages({"logical": locs([2])})
    for bad in ({"device": locs([3])}, {"logical": locs([3]), "device": locs([3])}):
        with pytest.raises(ValueError) as error:
            twin.pool.get_cpu_copy(bad)
        refused(error, "loc", "logical", "'device'")


WHOLE_POOL: dict[str, Callable[[Twin, Any], object]] = {
    "move_kv_cache, targets": lambda twin, slots: twin.pool.move_kv_cache(slots, GOOD_MAPPING),
    "move_kv_cache, sources": lambda twin, slots: twin.pool.move_kv_cache(GOOD_MAPPING, slots),
    "get_cpu_copy": lambda twin, slots: twin.pool.get_cpu_copy(slots),
    "load_cpu_copy": lambda twin, slots: twin.pool.load_cpu_copy(twin.pool.get_cpu_copy(GOOD_MAPPING), slots),
    "clear_pages": lambda twin, slots: twin.pool.clear_pages(slots),
}
GOOD_MAPPING = {"logical": torch.tensor([3, 4]), "device": torch.tensor([5, 6])}


@pytest.mark.parametrize("operation", WHOLE_POOL)
def test_hisparse_refuses_slots_of_no_space(backend: Backend, operation: str) -> None:
    twin = backend.twin(ratio=2)
    for bad in (
        locs([3, 4]),
        {**GOOD_MAPPING, "devices": locs([3, 4])},
        {"logical": locs([3, 4]), "devices": locs([3, 4])},
        {0: locs([3, 4])},
    ):
        with pytest.raises(ValueError) as error:
            WHOLE_POOL[operation](twin, bad)
        refused(error, "logical", "device")
        twin.check()


# -- which layers have what


SIX = {**CONFIG, "num_hidden_layers": 6, "num_nextn_predict_layers": 0, "index_topk_pattern": "FSSFSF"}
SIX_OWNERS = {"kv": (0, 1, 2, 3, 4, 5), "index_k": (0, 3, 5)}
SMALL_POOLS: dict[str, dict[str, Any]] = {
    "all elided but three": {"config": SIX, "owners": SIX_OWNERS},
    "none elided": {"config": SIX, "owners": {**SIX_OWNERS, "index_k": (0, 1, 2, 3, 4, 5)}, "elide_shared": False},
    "one layer": ONE_LAYER,
    "one layer without an indexer": {"owners": {"kv": (1,)}, "role": "target", "start_layer": 1},
    "the draft layer": {"owners": {"kv_draft": (2,), "index_k": (2,)}, "role": "draft"},
    "a stage": {"owners": {"kv": (1,), "kv_draft": (2,), "index_k": (2,)}, "start_layer": 1},
    "a stage of GLM-5.2": {
        "config": model_config("glm-5.2"),
        "owners": {"kv": (5, 6, 7, 8), "index_k": (6,)},
        "start_layer": 5,
        "end_layer": 9,
    },
    "no layer": {"owners": {}, "start_layer": 1, "end_layer": 1},
}


@pytest.mark.parametrize("kind", SMALL_POOLS)
def test_every_operation_of_a_pool(backend: Backend, random: np.random.Generator, kind: str) -> None:
    """Whole-pool operations work whoever owns what; those of a layer work where it has the buffer, by its global id."""
    twin = backend.twin(**SMALL_POOLS[kind])
    assert twin.pool.num_bytes() == bytes_for(twin.pool.layout, 128)
    loc, other = locs(some_slots(random, 40)), locs(some_slots(random, 40))
    for name, layer in twin.memory:
        if name == "index_k":
            twin.store_index_k(layer, loc, key(random, 40))
            twin.get_index_k_scale_buffer(layer, locs([60]), locs([[2, 1]]))
            twin.pool.get_index_k_with_scale_buffer(layer)
        else:
            twin.set_mla_kv_buffer(layer, loc, *latent(random, 40))
            twin.get_mla_kv_buffer(layer, other)
    twin.move_kv_cache(loc, other)
    saved = twin.get_cpu_copy(loc)
    twin.fill(1)
    twin.load_cpu_copy(saved, other)
    twin.clear_pages(locs([1]))
    twin.move_kv_cache(loc[:0], loc[:0])
    twin.load_cpu_copy(twin.get_cpu_copy(loc[:0]), loc[:0])


INDEX_CALLS: dict[str, Callable[[Pool, Any], object]] = {
    "store_index_k": lambda pool, layer: pool.store_index_k(layer, locs([3]), torch.zeros((1, 128)).bfloat16()),
    "set_index_k_scale_buffer": lambda pool, layer: pool.set_index_k_scale_buffer(
        layer, locs([3]), torch.zeros((1, 128)).to(E4M3_DTYPE), torch.ones(1)
    ),
    "get_index_k_scale_buffer": lambda pool, layer: pool.get_index_k_scale_buffer(layer, locs([3]), locs([[1]])),
    "get_index_k_with_scale_buffer": lambda pool, layer: pool.get_index_k_with_scale_buffer(layer),
}
LATENT_CALLS: dict[str, Callable[[Pool, Any], object]] = {
    "set_mla_kv_buffer": lambda pool, layer: pool.set_mla_kv_buffer(
        layer, locs([3]), torch.zeros((1, 512)).bfloat16(), torch.zeros((1, 64)).bfloat16()
    ),
    "get_mla_kv_buffer": lambda pool, layer: pool.get_mla_kv_buffer(layer, locs([3])),
    "get_key_buffer": lambda pool, layer: pool.get_key_buffer(layer),
    "get_value_buffer": lambda pool, layer: pool.get_value_buffer(layer),
}


@pytest.mark.parametrize("operation", INDEX_CALLS)
def test_the_indexer_of_a_layer_that_has_none(backend: Backend, operation: str) -> None:
    twin = backend.twin(config=SIX, owners=SIX_OWNERS)
    for layer in (1, 2, 4):
        with pytest.raises(LookupError, match=rf"layer {layer} .*index_k.*\[0, 3, 5\]"):
            INDEX_CALLS[operation](twin.pool, layer)
        twin.check()


@pytest.mark.parametrize("operation", [*INDEX_CALLS, *LATENT_CALLS])
def test_a_layer_outside_the_pool(backend: Backend, operation: str) -> None:
    call = {**INDEX_CALLS, **LATENT_CALLS}[operation]
    stage = backend.twin(config=SIX, owners={"kv": (3, 4), "index_k": (3,)}, start_layer=3, end_layer=5)
    body = backend.twin(owners={"kv": (0, 1), "index_k": (0,)}, role="target")
    nothing = backend.twin(**SMALL_POOLS["no layer"])
    for twin, layers in ((stage, [0, 2, 5, -1, "3", None, 3.0, True]), (body, [2, -1, 3, 2**40]), (nothing, [0, 1])):
        for layer in layers:
            with pytest.raises(ValueError, match="layer_id") as error:
                call(twin.pool, layer)
            refused(error, repr(layer))
        twin.check()


def test_layers_share_no_byte(backend: Backend, random: np.random.Generator) -> None:
    """A store of one layer, through every slot, leaves all others alone: `Twin` looks at each of them."""
    twin = backend.twin()
    every = torch.arange(192)
    for layer in range(3):
        twin.set_mla_kv_buffer(layer, every, *latent(random, 192), skip_reserved=False)
    for layer in (0, DRAFT):
        twin.store_index_k(layer, every, key(random, 192), skip_reserved=False)


# -- what a pool says of its memory


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("ratio", [1, 2])
def test_buf_infos(backend: Backend, kv_format: str, ratio: int) -> None:
    """Pointer, bytes and bytes of a page for each layer in order; zeros for layers without the buffer."""
    pool = backend.twin(kv_format, ratio=ratio).pool
    page = 64 * ROW_BYTES[kv_format]
    draft_pages = 1 + 2 * ratio
    pointers, lengths, item_lengths = pool.get_contiguous_buf_infos()
    owners = [("kv", 0), ("kv", 1), ("kv_draft", 2)]
    assert list(pointers) == [pool.buffer(*owner).data_ptr() for owner in owners]
    assert list(lengths) == [3 * page, 3 * page, draft_pages * page]
    assert list(item_lengths) == [page] * 3
    pointers, lengths, item_lengths = pool.get_state_buf_infos()
    at = [pool.buffer("index_k", layer).data_ptr() for layer in (0, 2)]
    assert list(pointers) == [at[0], 0, at[1]]
    assert list(lengths) == [draft_pages * 8448, 0, draft_pages * 8448]
    assert list(item_lengths) == [8448, 0, 8448]


def test_buf_infos_of_parts_of_a_model(backend: Backend) -> None:
    stage = backend.twin(**SMALL_POOLS["a stage"]).pool
    assert [len(column) for column in stage.get_contiguous_buf_infos()] == [2, 2, 2]
    assert list(stage.get_state_buf_infos()[2]) == [0, 8448]
    nothing = backend.twin(**SMALL_POOLS["no layer"]).pool
    assert [list(column) for column in nothing.get_state_buf_infos()] == [[], [], []]
    bare = backend.twin(**SMALL_POOLS["one layer without an indexer"]).pool
    assert [list(column) for column in bare.get_state_buf_infos()] == [[0], [0], [0]]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_transfer_regions(backend: Backend, kv_format: str) -> None:
    """One region for each buffer of each layer, all of it, with the fingerprint of its page."""
    pool = backend.twin(kv_format, ratio=2).pool
    page = 64 * ROW_BYTES[kv_format]
    expected = {("kv", layer): ("device", 3, page) for layer in (0, 1)}
    expected["kv_draft", 2] = ("logical", 5, page)
    expected.update({("index_k", layer): ("logical", 5, 8448) for layer in (0, 2)})
    regions = {(region.buffer, region.layer): region for region in pool.transfer_regions()}
    assert len(pool.transfer_regions()) == len(regions) == 5
    assert list(regions) == list(expected)
    for (name, layer), (space, pages, page_bytes) in expected.items():
        region = regions[name, layer]
        assert (region.space, region.nbytes, region.page_bytes) == (space, pages * page_bytes, page_bytes)
        assert region.ptr == pool.buffer(name, layer).data_ptr()
        assert region.page_fingerprint == pool.layout.page_fingerprint(name)
        assert region.device_id == -1
    assert backend.twin(**SMALL_POOLS["no layer"]).pool.transfer_regions() == []


def test_regions_of_different_pages_have_different_fingerprints() -> None:
    seen = {}
    for kv_format in FORMATS:
        pool = Pool(Layout.from_config(CONFIG, kv_format=kv_format, role="both"), 64)
        seen[kv_format] = {region.buffer: region.page_fingerprint for region in pool.transfer_regions()}
        assert seen[kv_format]["kv"] == seen[kv_format]["kv_draft"]
    assert len({prints["kv"] for prints in seen.values()}) == 3
    assert len({prints["index_k"] for prints in seen.values()}) == 1


# -- memory


def test_addresses_never_change(backend: Backend, random: np.random.Generator) -> None:
    twin = backend.twin()
    before = twin.pool.get_contiguous_buf_infos(), twin.pool.get_state_buf_infos()
    loc = locs(some_slots(random, 60))
    twin.pool.warmup()
    twin.set_mla_kv_buffer(0, loc, *latent(random, 60))
    twin.move_kv_cache(loc, loc.flip(0))
    twin.load_cpu_copy(twin.get_cpu_copy(loc), loc)
    twin.clear_pages(locs([1]))
    assert (twin.pool.get_contiguous_buf_infos(), twin.pool.get_state_buf_infos()) == before


@pytest.mark.parametrize("ratio", [1, 2])
def test_aux_bytes(backend: Backend, ratio: int) -> None:
    """Eight bytes of a pointer table for each tensor, where there are kernels to read it; no cache buffer."""
    pool = backend.twin(ratio=ratio).pool
    assert pool.aux_bytes() == (8 * 5 if backend.name == "triton" else 0)
    assert pool.num_bytes() == bytes_for(pool.layout, 128)


def test_the_cpu_works_without_kernels_unless_told_otherwise(random: np.random.Generator) -> None:
    layout = Layout.from_config(CONFIG)
    with interpreted() as sanitizer:
        for backend in ("auto", "torch"):
            pool = Pool(layout, 128, backend=backend)
            pool.warmup()
            pool.set_mla_kv_buffer(0, locs([3]), *latent(random, 1))
            pool.move_kv_cache(locs([3]), locs([4]))
            assert sanitizer.launches == 0
        Pool(layout, 128, backend="triton").set_mla_kv_buffer(0, locs([3]), *latent(random, 1))
        assert sanitizer.launches == 1


def test_operations_of_a_pool_on_meta() -> None:
    """It has no bytes to work on, and says so; addresses are 0."""
    for backend in ("auto", "torch", "triton"):
        pool = Pool(Layout.from_config(CONFIG), 128, "meta", backend=backend)
        for operation in OPERATIONS:
            arguments = {
                name: value.to("meta") if isinstance(value, torch.Tensor) else value
                for name, value in good_arguments(operation).items()
            }
            with pytest.raises(ValueError, match="meta"):
                getattr(pool, operation)(**arguments)
        assert pool.get_key_buffer(0).shape == (192, 656)
        assert set(pool.get_contiguous_buf_infos()[0]) == {region.ptr for region in pool.transfer_regions()} == {0}


def test_warmup_changes_nothing(backend: Backend) -> None:
    for choices in ({"ratio": 2}, SMALL_POOLS["one layer without an indexer"], SMALL_POOLS["no layer"]):
        twin = backend.twin(**choices)
        twin.pool.warmup()
        twin.check()


def test_inputs_are_left_alone(backend: Backend, random: np.random.Generator) -> None:
    for kv_format in FORMATS:
        twin = backend.twin(kv_format)
        nope, rope = latent(random, 40)
        keys, (codes, scales) = key(random, 40), stored_key(random, 40)
        loc = locs(some_slots(random, 40))
        inputs = (nope, rope, keys, codes, scales)
        before = [bits(value).copy() for value in inputs], loc.clone()
        twin.set_mla_kv_buffer(0, loc, nope, rope)
        twin.store_index_k(0, loc, keys)
        twin.set_index_k_scale_buffer(DRAFT, loc, codes, scales)
        twin.move_kv_cache(loc, loc.flip(0))
        for value, bits_before in zip(inputs, before[0], strict=True):
            assert np.array_equal(bits(value), bits_before)
        assert torch.equal(loc, before[1])


def launches(twin: Twin, sanitizer: Sanitizer, count: int) -> dict[str, int]:
    """How many kernels each operation launches."""
    random = np.random.default_rng(0)
    loc, other = locs(some_slots(random, count, 1088)), locs(some_slots(random, count, 1088))
    nope, rope = latent(random, count)
    codes, scales = stored_key(random, count)
    pool = twin.pool
    copy = pool.get_cpu_copy(loc)
    calls: dict[str, Callable[[], object]] = {
        "set_mla_kv_buffer": lambda: pool.set_mla_kv_buffer(0, loc, nope, rope),
        "get_mla_kv_buffer": lambda: pool.get_mla_kv_buffer(0, loc),
        "store_index_k": lambda: pool.store_index_k(0, loc, key(random, count)),
        "set_index_k_scale_buffer": lambda: pool.set_index_k_scale_buffer(0, loc, codes, scales),
        "get_index_k_scale_buffer": lambda: pool.get_index_k_scale_buffer(
            0, locs([count, 5]), torch.ones((2, 17), dtype=torch.int64), count + 5, count
        ),
        "move_kv_cache": lambda: pool.move_kv_cache(loc, other),
        "get_cpu_copy": lambda: pool.get_cpu_copy(loc),
        "load_cpu_copy": lambda: pool.load_cpu_copy(copy, other),
        "clear_pages": lambda: pool.clear_pages(locs([1])),
    }
    counted = {}
    for name, call in calls.items():
        before = sanitizer.launches
        call()
        counted[name] = sanitizer.launches - before
    return counted


def test_launches_do_not_depend_on_the_layers() -> None:
    """Nor on the number of tokens."""
    with interpreted() as sanitizer:
        backend = Backend("triton", sanitizer)
        few = launches(backend.twin(tokens=1024, **ONE_LAYER), sanitizer, 130)
        many = launches(backend.twin(tokens=1024, config=SIX, owners=SIX_OWNERS), sanitizer, 7)
    assert few == many
    assert {name: number for name, number in few.items() if name != "move_kv_cache"} == {
        "set_mla_kv_buffer": 1,
        "get_mla_kv_buffer": 1,
        "store_index_k": 1,
        "set_index_k_scale_buffer": 1,
        "get_index_k_scale_buffer": 1,
        "get_cpu_copy": 1,
        "load_cpu_copy": 1,
        "clear_pages": 1,
    }
    assert few["move_kv_cache"] in (1, 2)


# -- beyond 2^31 bytes

HUGE = 17_000_000  # tokens: 11.2 GB of latent in a layer, more than 2^33, and 2.24 GB of indexer, more than 2^31
FIRST_BEYOND = 3_273_604  # 3,273,604 x 656 is 2^31 + 576
HUGE_SLOTS = [1, FIRST_BEYOND - 1, FIRST_BEYOND, FIRST_BEYOND + 1, 6_547_208, 16_269_057, HUGE + 62, HUGE + 63]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def huge(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool of one layer whose memory is committed where it is touched: fresh memory is not zeroed a second time."""
    zero = torch.Tensor.zero_

    def zero_what_is_small(memory: torch.Tensor) -> torch.Tensor:
        return memory if memory.numel() > 1 << 30 else zero(memory)

    before = resident_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "zero_", zero_what_is_small)
        pool = backend.pool(Layout.from_config(CONFIG, end_layer=1), HUGE)
    if backend.sanitizer is not None:
        tag_table(pool, [("kv", 0), ("index_k", 0)], backend.sanitizer)
    yield pool
    assert resident_bytes() - before < 1 << 27, "the pool is committed lazily"


def huge_records(pool: Pool, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The rows and index records of slots, from bytes whose places are worked out here in Python's integers."""
    rows, index = pool.buffer("kv", 0).view(-1), pool.buffer("index_k", 0).view(-1)
    keys = [slot // 64 * 8448 + slot % 64 * 128 for slot in slots]
    scales = [slot // 64 * 8448 + 8192 + slot % 64 * 4 for slot in slots]
    return (
        np.stack([rows[slot * 656 : slot * 656 + 656].numpy() for slot in slots]),
        np.stack(
            [torch.cat([index[k : k + 128], index[s : s + 4]]).numpy() for k, s in zip(keys, scales, strict=True)]
        ),
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_beyond_2_31_bytes(huge: Pool, random: np.random.Generator, dtype: torch.dtype) -> None:
    count = len(HUGE_SLOTS)
    loc = locs(HUGE_SLOTS, dtype)
    (nope, rope), keys = latent(random, count), key(random, count)
    rows, records = latent_records("fp8_scaled", bits(nope), bits(rope)), index_records(bits(keys))
    huge.set_mla_kv_buffer(0, loc, nope, rope)
    huge.store_index_k(0, loc, keys)
    for found, expected in zip(huge_records(huge, HUGE_SLOTS), (rows, records), strict=True):
        np.testing.assert_array_equal(found, expected)
    huge.set_mla_kv_buffer(
        0, locs(hostile_slots(HUGE + 64, dtype), dtype), *latent(random, len(hostile_slots(0, dtype)))
    )

    nope_read, rope_read = huge.get_mla_kv_buffer(0, loc, torch.float32)
    for values, expected in zip((nope_read, rope_read), latent_values("fp8_scaled", rows), strict=True):
        np.testing.assert_array_equal(values[:, 0].numpy(), expected)

    pages = locs([[slot // 64] for slot in HUGE_SLOTS], dtype)
    gathered = huge.get_index_k_scale_buffer(0, locs([64] * count, dtype), pages, 64 * count, 64)
    where = [64 * row + slot % 64 for row, slot in enumerate(HUGE_SLOTS)]
    np.testing.assert_array_equal(torch.cat(gathered, dim=1)[where].numpy(), records)

    huge.move_kv_cache(loc, loc.flip(0))
    for found, expected in zip(huge_records(huge, HUGE_SLOTS), (rows, records), strict=True):
        np.testing.assert_array_equal(found, expected[::-1])

    copy = huge.get_cpu_copy(loc)
    huge.clear_pages(locs(sorted({slot // 64 for slot in HUGE_SLOTS[1:]}), dtype))
    for found in huge_records(huge, HUGE_SLOTS[1:]):
        assert not found.any()
    others = [slot - 3 for slot in HUGE_SLOTS[1:]] + [HUGE_SLOTS[0]]
    huge.load_cpu_copy(copy, locs(others, dtype))
    for found, expected in zip(huge_records(huge, others), (rows, records), strict=True):
        np.testing.assert_array_equal(found, expected[::-1])


# -- errors: the argument, what came, and what was expected


def good_arguments(operation: str) -> dict[str, Any]:
    """By name, what an operation takes: five tokens of layer 0."""
    loc = locs([5, 6, 7, 8, 9])
    return {
        "set_mla_kv_buffer": {
            "layer_id": 0,
            "loc": loc,
            "cache_k_nope": torch.zeros((5, 1, 512), dtype=torch.bfloat16),
            "cache_k_rope": torch.zeros((5, 64), dtype=torch.bfloat16),
        },
        "get_mla_kv_buffer": {"layer_id": 0, "loc": loc, "dst_dtype": torch.bfloat16},
        "set_index_k_scale_buffer": {
            "layer_id": 0,
            "loc": loc,
            "index_k": torch.zeros((5, 128)).to(E4M3_DTYPE),
            "index_k_scale": torch.ones((5, 1)),
        },
        "store_index_k": {"layer_id": 0, "loc": loc, "key": torch.zeros((5, 128), dtype=torch.bfloat16)},
        "get_index_k_scale_buffer": {
            "layer_id": 0,
            "seq_lens": locs([70, 3]),
            "page_table": locs([[1, 2], [2, 1]]),
            "seq_len_sum": 73,
            "max_seq_len": 70,
        },
        "move_kv_cache": {"tgt_loc": loc, "src_loc": loc + 70},
        "get_cpu_copy": {"loc": loc},
        "clear_pages": {"pages": locs([1])},
    }[operation]


OPERATIONS = [
    "set_mla_kv_buffer",
    "get_mla_kv_buffer",
    "set_index_k_scale_buffer",
    "store_index_k",
    "get_index_k_scale_buffer",
    "move_kv_cache",
    "get_cpu_copy",
    "clear_pages",
]
SLOT_ARGUMENTS = [
    ("set_mla_kv_buffer", "loc"),
    ("get_mla_kv_buffer", "loc"),
    ("set_index_k_scale_buffer", "loc"),
    ("store_index_k", "loc"),
    ("move_kv_cache", "tgt_loc"),
    ("move_kv_cache", "src_loc"),
    ("get_cpu_copy", "loc"),
    ("clear_pages", "pages"),
]
BAD_SLOTS = [
    (torch.ones(5), ["float32", "int32", "int64"]),
    (torch.ones(5, dtype=torch.int16), ["int16", "int32", "int64"]),
    (torch.ones(5, dtype=torch.uint8), ["uint8", "int32", "int64"]),
    (torch.ones(5, dtype=torch.bool), ["bool", "int32", "int64"]),
    (torch.ones((5, 1), dtype=torch.int64), ["5, 1"]),
    (torch.ones((), dtype=torch.int64), []),
    (torch.ones(5, dtype=torch.int64, device="meta"), ["meta", "cpu"]),
    ([5, 6, 7, 8, 9], ["[5, 6, 7, 8, 9]"]),
    (np.arange(5, 10), ["array([5, 6, 7, 8, 9])"]),
    (None, ["None"]),
]


def bad_call(twin: Twin, operation: str, **changed: Any) -> pytest.ExceptionInfo[Exception]:
    """How an operation refuses good arguments but for some; nothing may have changed."""
    with pytest.raises(ValueError) as error:
        getattr(twin.pool, operation)(**{**good_arguments(operation), **changed})
    twin.check()
    return error


@pytest.mark.parametrize("operation", OPERATIONS)
def test_good_arguments_are_good(backend: Backend, operation: str) -> None:
    getattr(backend.twin().pool, operation)(**good_arguments(operation))


@pytest.mark.parametrize(("operation", "argument"), SLOT_ARGUMENTS)
def test_bad_slot_tensors(backend: Backend, operation: str, argument: str) -> None:
    twin = backend.twin()
    for bad, words in BAD_SLOTS:
        refused(bad_call(twin, operation, **{argument: bad}), argument, *words)


BF16 = {"dtype": torch.bfloat16}
BAD_VALUES: list[tuple[str, str, Any, list[str]]] = [
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros((5, 511), **BF16), ["511", "512"]),
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros((5, 576), **BF16), ["576", "512"]),
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros((4, 512), **BF16), ["4, 512", "5"]),
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros((6, 1, 512), **BF16), ["6, 1, 512", "5"]),
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros((5, 2, 512), **BF16), ["5, 2, 512"]),
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros((1, 5, 512), **BF16), ["1, 5, 512"]),
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros(5 * 512, **BF16), ["2560"]),
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros((5, 512)), ["float32", "bfloat16"]),
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros((5, 512), dtype=torch.float16), ["float16", "bfloat16"]),
    ("set_mla_kv_buffer", "cache_k_nope", torch.zeros((5, 512), device="meta", **BF16), ["meta", "cpu"]),
    ("set_mla_kv_buffer", "cache_k_nope", None, ["None"]),
    ("set_mla_kv_buffer", "cache_k_rope", torch.zeros((5, 512), **BF16), ["512", "64"]),
    ("set_mla_kv_buffer", "cache_k_rope", torch.zeros((4, 1, 64), **BF16), ["4, 1, 64", "5"]),
    ("set_mla_kv_buffer", "cache_k_rope", torch.zeros((5, 64)), ["float32", "bfloat16"]),
    ("set_mla_kv_buffer", "cache_k_rope", torch.zeros((5, 64), device="meta", **BF16), ["meta", "cpu"]),
    ("get_mla_kv_buffer", "dst_dtype", torch.int8, ["int8"]),
    ("get_mla_kv_buffer", "dst_dtype", torch.int32, ["int32"]),
    ("get_mla_kv_buffer", "dst_dtype", "bf16", ["bf16"]),
    ("set_index_k_scale_buffer", "index_k", torch.zeros((5, 128), **BF16), ["bfloat16", "e4m3"]),
    ("set_index_k_scale_buffer", "index_k", torch.zeros((5, 128)).to(torch.float8_e5m2), ["e5m2", "e4m3"]),
    ("set_index_k_scale_buffer", "index_k", torch.zeros((5, 64)).to(E4M3_DTYPE), ["64", "128"]),
    ("set_index_k_scale_buffer", "index_k", torch.zeros((6, 128)).to(E4M3_DTYPE), ["6, 128", "5"]),
    ("set_index_k_scale_buffer", "index_k", torch.zeros((5, 128), device="meta", dtype=E4M3_DTYPE), ["meta", "cpu"]),
    ("set_index_k_scale_buffer", "index_k_scale", torch.zeros(5, **BF16), ["bfloat16", "float32"]),
    ("set_index_k_scale_buffer", "index_k_scale", torch.zeros(6), ["6", "5"]),
    ("set_index_k_scale_buffer", "index_k_scale", torch.zeros((5, 2)), ["5, 2"]),
    ("set_index_k_scale_buffer", "index_k_scale", torch.zeros(5, device="meta"), ["meta", "cpu"]),
    ("store_index_k", "key", torch.zeros((5, 128)), ["float32", "bfloat16"]),
    ("store_index_k", "key", torch.zeros((5, 127), **BF16), ["127", "128"]),
    ("store_index_k", "key", torch.zeros((4, 128), **BF16), ["4, 128", "5"]),
    ("store_index_k", "key", torch.zeros((5, 128), device="meta", **BF16), ["meta", "cpu"]),
    ("get_index_k_scale_buffer", "seq_lens", torch.zeros(2), ["float32", "int32", "int64"]),
    ("get_index_k_scale_buffer", "seq_lens", torch.zeros((2, 1), dtype=torch.int64), ["2, 1"]),
    ("get_index_k_scale_buffer", "seq_lens", torch.zeros(2, dtype=torch.int64, device="meta"), ["meta", "cpu"]),
    ("get_index_k_scale_buffer", "seq_lens", [70, 3], ["[70, 3]"]),
    ("get_index_k_scale_buffer", "page_table", torch.zeros((2, 2)), ["float32", "int32", "int64"]),
    ("get_index_k_scale_buffer", "page_table", torch.zeros(2, dtype=torch.int64), ["2"]),
    ("get_index_k_scale_buffer", "page_table", torch.zeros((3, 2), dtype=torch.int64), ["3", "2"]),
    ("get_index_k_scale_buffer", "page_table", torch.zeros((2, 2), dtype=torch.int64, device="meta"), ["meta", "cpu"]),
    ("get_index_k_scale_buffer", "seq_len_sum", -1, ["-1"]),
    ("get_index_k_scale_buffer", "seq_len_sum", 73.0, ["73.0"]),
    ("get_index_k_scale_buffer", "max_seq_len", -1, ["-1"]),
    ("get_index_k_scale_buffer", "max_seq_len", "70", ["70"]),
]


@pytest.mark.parametrize(
    ("operation", "argument", "value", "words"),
    BAD_VALUES,
    ids=[f"{operation}-{argument}-{number}" for number, (operation, argument, _, _) in enumerate(BAD_VALUES)],
)
def test_bad_arguments(backend: Backend, operation: str, argument: str, value: Any, words: list[str]) -> None:
    refused(bad_call(backend.twin(), operation, **{argument: value}), argument, *words)


@pytest.mark.parametrize("count", [0, 4, 6])
def test_a_move_of_unequal_lists(backend: Backend, count: int) -> None:
    error = bad_call(backend.twin(), "move_kv_cache", src_loc=torch.arange(100, 100 + count))
    refused(error, "src_loc", str(count), "5")


def test_no_bad_slot_is_an_error(backend: Backend) -> None:
    """What is an error is decided by shapes and types, never by values, which a GPU would have to be asked for."""
    twin = backend.twin()
    for operation, argument in SLOT_ARGUMENTS:
        arguments = good_arguments(operation)
        arguments[argument] = arguments[argument] * -(2**40)
        getattr(twin.pool, operation)(**arguments)
        twin.check()


def test_operations_by_position(backend: Backend) -> None:
    """In the order in which the contract names the arguments."""
    twin = backend.twin()
    for operation in OPERATIONS:
        getattr(twin.pool, operation)(*good_arguments(operation).values())
