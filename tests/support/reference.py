"""What the operations of `glm_dsa` write and return, to the bit, in numpy and one token at a time.

Written from the contract, with no look at the code under test: where the bytes lie is arithmetic of its own, e4m3 is
a table of values, and nothing here imports kvgen or a generated module. Pages have 64 slots.

    latent row   bf16        512 bf16, 64 bf16                       1152 bytes, slot after slot
                 fp8_scaled  512 e4m3, 4 fp32 scales, 64 bf16         656
                 fp8_raw     512 e4m3, 64 e4m3                        576
    index page   64 x 128 e4m3, then 64 fp32 scales                  8448

bf16 is held as its bits, uint16. A *record* is all bytes of one slot of a buffer, fields in the order above: a row as
it lies; for the indexer 128 key bytes and the 4 bytes of their scale, which lie apart.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .casts import cast_fix
from .sanitizer import Sanitizer

PAGE = 64
LATENT, ROPE, KEY = 512, 64, 128
BLOCK = 128  # values with one scale
ROW_BYTES = {"bf16": 1152, "fp8_scaled": 656, "fp8_raw": 576}
INDEX_PAGE_BYTES = 8448
INDEX_RECORD_BYTES = KEY + 4
INDEX_FLOOR = 1e-4  # an fp32 once it meets one

E4M3_NAN = 0x7F
# The 127 finite values of codes 0 to 0x7E: subnormals in units of 2^-9, then 8 mantissas for each exponent.
E4M3 = np.array([c * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(0x7F)])
_ALL_E4M3 = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]]).astype(np.float32)


# -- numbers


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 bits as fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """fp32 to the nearest bf16, ties to even; NaN is 0x7FFF."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """fp32 to the nearest e4m3, ties to the even code, saturating at 448; NaN is 0x7F whatever its sign."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        size = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    code = np.searchsorted(middles, size)  # a tie gets the lower code
    tie = size == np.append(middles, np.inf)[np.minimum(code, middles.size)]
    code = code + (tie & (code % 2 == 1)) + np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), E4M3_NAN, code).astype(np.uint8)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    """Codes as fp32."""
    return _ALL_E4M3[codes]


def quantised(values: np.ndarray, floor: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [n, k * 128] as codes [n, k * 128] and fp32 scales [n, k], every step rounded to fp32."""
    blocks = values.reshape(len(values), values.shape[1] // BLOCK, BLOCK)
    with np.errstate(all="ignore"):
        amax = np.maximum(np.where(np.isnan(blocks), 0, np.abs(blocks)).max(axis=2), np.float32(floor))
        scale = np.where(amax == 0, np.float32(0), np.maximum(amax / np.float32(448), np.float32(2.0**-126)))
        product = blocks * (np.float32(1) / scale)[:, :, None]
    assert scale.dtype == product.dtype == np.float32
    codes = np.where((scale == 0)[:, :, None] & ~np.isnan(blocks), 0, e4m3_codes(product))
    codes = np.where(np.isnan(blocks), E4M3_NAN, codes).astype(np.uint8)
    return codes.reshape(values.shape), scale


# -- records


def _as_bytes(values: np.ndarray) -> np.ndarray:
    """[n, k] as its bytes [n, k * itemsize]."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.shape[1] * values.itemsize)


def latent_records(kv_format: str, nope: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """The rows of bf16 [n, 512] and [n, 64], or of codes where no scale is stored."""
    if kv_format == "bf16":
        return np.hstack([_as_bytes(nope), _as_bytes(rope)])
    if kv_format == "fp8_raw":
        return np.hstack([own if own.dtype == np.uint8 else e4m3_codes(bf16_values(own)) for own in (nope, rope)])
    codes, scales = quantised(bf16_values(nope))
    return np.hstack([codes, _as_bytes(scales), _as_bytes(rope)])


def latent_values(kv_format: str, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What rows hold, as fp32 [n, 512] and [n, 64]."""

    def field(start: int, end: int, dtype: type) -> np.ndarray:
        return np.ascontiguousarray(records[:, start:end]).view(dtype)

    if kv_format == "bf16":
        return bf16_values(field(0, 1024, np.uint16)), bf16_values(field(1024, 1152, np.uint16))
    if kv_format == "fp8_raw":
        return e4m3_values(records[:, :512]), e4m3_values(records[:, 512:])
    with np.errstate(all="ignore"):
        latent = e4m3_values(records[:, :512]) * np.repeat(field(512, 528, np.float32), BLOCK, axis=1)
    return latent, bf16_values(field(528, 656, np.uint16))


def index_records(key: np.ndarray) -> np.ndarray:
    """The records of bf16 [n, 128]."""
    return put_records(*quantised(bf16_values(key), INDEX_FLOOR))


def put_records(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The records of codes [n, 128] and fp32 scales [n, 1] that come as they are to be stored."""
    return np.hstack([codes, _as_bytes(scales)])


# -- buffers


@dataclass
class Memory:
    """The bytes of one buffer of one layer."""

    record_bytes: int  # 132 for the indexer, else a row
    num_slots: int
    bytes: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        assert self.num_slots % PAGE == 0
        self.bytes = np.zeros(self.num_pages * self.page_bytes, np.uint8)

    @property
    def num_pages(self) -> int:
        return self.num_slots // PAGE

    @property
    def page_bytes(self) -> int:
        return INDEX_PAGE_BYTES if self.record_bytes == INDEX_RECORD_BYTES else PAGE * self.record_bytes

    def holds(self, slot: int) -> bool:
        return 0 <= slot < self.num_slots

    def parts(self, slot: int) -> list[slice]:
        """Where the bytes of a slot lie, in the order of its record."""
        if self.record_bytes != INDEX_RECORD_BYTES:
            return [slice(slot * self.record_bytes, (slot + 1) * self.record_bytes)]
        page, row = divmod(slot, PAGE)
        key = page * 8448 + row * 128
        scale = page * 8448 + 8192 + row * 4
        return [slice(key, key + 128), slice(scale, scale + 4)]

    def read(self, slots: Iterable[int]) -> np.ndarray:
        """The records of slots, zeros where there is no such slot."""
        records = [
            np.concatenate([self.bytes[part] for part in self.parts(slot)])
            if self.holds(slot)
            else np.zeros(self.record_bytes, np.uint8)
            for slot in slots
        ]
        return np.array(records, np.uint8).reshape(len(records), self.record_bytes)

    def write(self, slots: Sequence[int], records: np.ndarray, first: int = 0) -> None:
        """Records into slots, but for slots below `first` and slots that do not exist."""
        for slot, record in zip(slots, records, strict=True):
            if self.holds(slot) and slot >= first:
                start = 0
                for part in self.parts(slot):
                    self.bytes[part] = record[start : start + part.stop - part.start]
                    start += part.stop - part.start

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """All reads first; pairs of which one slot does not exist are skipped."""
        pairs = [pair for pair in zip(targets, sources, strict=True) if all(map(self.holds, pair))]
        records = self.read([source for _, source in pairs])
        self.write([target for target, _ in pairs], records)

    def clear_pages(self, pages: Iterable[int]) -> None:
        for page in pages:
            if 0 <= page < self.num_pages:
                self.bytes[page * self.page_bytes : (page + 1) * self.page_bytes] = 0

    def sequences(self, lengths: Sequence[int], page_table: np.ndarray) -> np.ndarray:
        """The records of whole sequences, one after the other; token t lies in page t // 64 of its row of the table."""
        slots = []
        for length, pages in zip(lengths, page_table.tolist(), strict=True):
            for token in range(max(length, 0)):
                page = pages[token // PAGE] if token // PAGE < len(pages) else -1
                slots.append(page * PAGE + token % PAGE if 0 <= page < self.num_pages else -1)
        return self.read(slots)


# -- inputs

HOSTILE = [-1, -64, 2**31 - 1, 2**31, 2**40, -(2**40)]  # and the first two slots past the end


def hostile_slots(num_slots: int, dtype: torch.dtype = torch.int64) -> list[int]:
    """Slots that a space of so many does not have, as far as the type can say them."""
    info = torch.iinfo(dtype)
    slots = [*HOSTILE, num_slots, num_slots + 1, info.min, info.max]
    return [slot for slot in slots if info.min <= slot <= info.max]


def wild_bf16(random: np.random.Generator, count: int, width: int) -> np.ndarray:
    """bf16 [count, width] in blocks of 64, each of a kind of its own: quantisation has to get all of them right."""
    shape = (count, width // 64, 64)
    normal = bf16_bits(random.normal(0, 1, shape) * 2.0 ** random.integers(-12, 12, shape[:2])[:, :, None])
    sign = random.integers(0, 2, shape, np.uint16) << 15
    one = np.arange(64) == random.integers(0, 64, shape[:2])[:, :, None]
    some = random.integers(0, 8, shape) == 0
    nan = sign | 0x7F80 | random.integers(1, 128, shape, np.uint16)
    eighths = bf16_bits(random.integers(-256, 257, shape) / 16.0)  # many of them half-way between two codes
    kinds = [
        normal,
        random.integers(0, 1 << 16, shape, np.uint16),  # any bits
        sign,  # zeros
        sign | random.integers(0, 128, shape, np.uint16),  # denormals
        np.where(one, sign | 0x7F80, normal),  # an infinity
        np.where(some, nan, normal),
        nan,
        eighths,
        sign | 0x7F00 | random.integers(0, 128, shape, np.uint16),  # as large as they get
        np.where(one, bf16_bits(np.float32(2.0**13)), normal),  # the others become subnormal codes
        np.where(one, sign | 1, sign),  # the least denormal alone
    ]
    chosen = random.integers(0, len(kinds), shape[:2])[:, :, None]
    return np.select([chosen == kind for kind in range(len(kinds))], kinds).astype(np.uint16).reshape(count, width)


# -- a pool held against the reference

SPACES = {"kv": "device", "kv_draft": "logical", "index_k": "logical"}  # with HiSparse; else all are "logical"
Slots = torch.Tensor | Mapping[str, torch.Tensor]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor of any strides as unsigned integers."""
    integer, unsigned = {
        1: (torch.uint8, np.uint8),
        2: (torch.int16, np.uint16),
        4: (torch.int32, np.uint32),
    }[tensor.element_size()]
    return np.ascontiguousarray(tensor.view(integer).numpy()).view(unsigned)


@contextmanager
def one_thread() -> Iterator[None]:
    """For tensors as small as these, waking torch's other threads takes longer than what they have to do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def interpreted(races: bool = True, saturating: bool = True) -> Iterator[Sanitizer]:
    """Kernels interpreted inside cast as the hardware does, and every access of theirs is checked."""
    with cast_fix(saturating), Sanitizer(races) as sanitizer:
        yield sanitizer


def rounded_bits(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """fp32 rounded to a type of floats, as bits; NaN is all ones but for the sign."""
    with np.errstate(over="ignore", invalid="ignore"):
        return {
            torch.float32: lambda: np.where(np.isnan(values), 0x7FFFFFFF, values.view(np.uint32)),
            torch.float16: lambda: np.where(np.isnan(values), 0x7FFF, values.astype(np.float16).view(np.uint16)),
            torch.bfloat16: lambda: bf16_bits(values),
        }[dtype]()


@dataclass(frozen=True)
class Saved:
    """A copy in host memory, the records that it has to hold, and of which slots there were any."""

    copy: Any
    records: dict[tuple[str, int], np.ndarray]
    held: dict[tuple[str, int], list[bool]]


class Twin:
    """A pool filled with random bytes, and `memory`, what they have to be.

    The operations have the pool's names and arguments. Each does to `memory` what it has the pool do, holds what the
    pool returned against that, and then every byte of every buffer.
    """

    def __init__(
        self,
        pool: Any,
        kv_format: str,
        layers: Mapping[str, Sequence[int]],
        num_slots: Mapping[str, int],
        sanitizer: Sanitizer | None = None,
        seed: int = 0,
    ) -> None:
        """`layers` and `num_slots` of the buffers `kv`, `kv_draft` and `index_k`, reserved slots included.

        Where their numbers of slots differ, so do the spaces that number them.
        """
        self.pool = pool
        self.apart = len(set(num_slots.values())) > 1
        self.kv_format = kv_format
        self.memory = {
            (name, layer): Memory(INDEX_RECORD_BYTES if name == "index_k" else ROW_BYTES[kv_format], num_slots[name])
            for name, ids in layers.items()
            for layer in ids
        }
        self.fill(seed)
        if sanitizer is not None:
            tag_table(pool, list(self.memory), sanitizer)

    def fill(self, seed: int) -> None:
        """Other random bytes everywhere."""
        random = np.random.default_rng(seed)
        for (name, layer), memory in self.memory.items():
            memory.bytes[:] = random.integers(0, 256, memory.bytes.shape, np.uint8)
            self.pool.buffer(name, layer).view(-1).copy_(torch.from_numpy(memory.bytes))

    def latent(self, layer: int) -> Memory:
        name = "kv" if ("kv", layer) in self.memory else "kv_draft"
        return self.memory[name, layer]

    def index(self, layer: int) -> Memory:
        return self.memory["index_k", layer]

    def slots_of(self, slots: Slots, name: str) -> list[int]:
        """The slots that are meant for a buffer; none where its space is not named."""
        if not isinstance(slots, Mapping):
            return slots.tolist()
        space = SPACES[name] if self.apart else "logical"
        return slots[space].tolist() if space in slots else []

    def check(self) -> None:
        """That every buffer has the bytes it has to have."""
        for (name, layer), memory in self.memory.items():
            found = self.pool.buffer(name, layer).view(-1).numpy()
            if not np.array_equal(found, memory.bytes):
                wrong = np.flatnonzero(found != memory.bytes)
                first = int(wrong[0])
                raise AssertionError(
                    f"{wrong.size} bytes of `{name}` of layer {layer} are wrong, first byte {first}, of page "
                    f"{first // memory.page_bytes}: {found[first]:#x} instead of {memory.bytes[first]:#x}"
                )

    # -- operations of a layer

    def set_mla_kv_buffer(
        self, layer: int, loc: torch.Tensor, nope: torch.Tensor, rope: torch.Tensor, **options: bool
    ) -> None:
        self.pool.set_mla_kv_buffer(layer, loc, nope, rope, **options)
        records = latent_records(self.kv_format, bits(nope).reshape(-1, LATENT), bits(rope).reshape(-1, ROPE))
        self.latent(layer).write(loc.tolist(), records, _first(options))
        self.check()

    def store_index_k(self, layer: int, loc: torch.Tensor, key: torch.Tensor, **options: bool) -> None:
        self.pool.store_index_k(layer, loc, key, **options)
        self.index(layer).write(loc.tolist(), index_records(bits(key)), _first(options))
        self.check()

    def set_index_k_scale_buffer(
        self, layer: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor, **options: bool
    ) -> None:
        self.pool.set_index_k_scale_buffer(layer, loc, index_k, index_k_scale, **options)
        records = put_records(bits(index_k), bits(index_k_scale).reshape(-1, 1))
        self.index(layer).write(loc.tolist(), records, _first(options))
        self.check()

    def get_mla_kv_buffer(
        self, layer: int, loc: torch.Tensor, dst_dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored in bf16 comes back in bf16 with the bits it has, whatever kind of NaN that is."""
        nope, rope = self.pool.get_mla_kv_buffer(layer, loc, dst_dtype)
        assert nope.dtype == rope.dtype == dst_dtype
        assert (nope.shape, rope.shape) == ((len(loc), 1, LATENT), (len(loc), 1, ROPE))
        values = latent_values(self.kv_format, self.latent(layer).read(loc.tolist()))
        kept = {"bf16": (True, True), "fp8_scaled": (False, True), "fp8_raw": (False, False)}[self.kv_format]
        for found, own, as_it_is in zip((nope, rope), values, kept, strict=True):
            copied = as_it_is and dst_dtype == torch.bfloat16
            expected = (own.view(np.uint32) >> 16).astype(np.uint16) if copied else rounded_bits(own, dst_dtype)
            np.testing.assert_array_equal(bits(found[:, 0]), expected)
        self.check()
        return nope, rope

    def get_index_k_scale_buffer(
        self, layer: int, seq_lens: torch.Tensor, page_table: torch.Tensor, **sums: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`sums` that are right; for those that lie see the tests."""
        key, scale = self.pool.get_index_k_scale_buffer(layer, seq_lens, page_table, **sums)
        records = self.index(layer).sequences(seq_lens.tolist(), page_table.numpy())
        assert key.dtype == scale.dtype == torch.uint8
        assert (key.shape, scale.shape) == ((len(records), KEY), (len(records), 4))
        np.testing.assert_array_equal(np.hstack([key.numpy(), scale.numpy()]), records)
        self.check()
        return key, scale

    # -- operations of the whole pool

    def move_kv_cache(self, tgt_loc: Slots, src_loc: Slots) -> None:
        self.pool.move_kv_cache(tgt_loc, src_loc)
        for (name, _), memory in self.memory.items():
            memory.move(self.slots_of(tgt_loc, name), self.slots_of(src_loc, name))
        self.check()

    def get_cpu_copy(self, loc: Slots) -> Saved:
        copy = self.pool.get_cpu_copy(loc)
        self.check()
        slots = {key: self.slots_of(loc, key[0]) for key in self.memory}
        records = {key: memory.read(slots[key]) for key, memory in self.memory.items()}
        held = {key: list(map(memory.holds, slots[key])) for key, memory in self.memory.items()}
        return Saved(copy, records, held)

    def load_cpu_copy(self, saved: Saved, loc: Slots) -> None:
        """Pairs of which the saved slot or the new one does not exist are skipped."""
        self.pool.load_cpu_copy(saved.copy, loc)
        for key, memory in self.memory.items():
            targets = self.slots_of(loc, key[0])
            kept = [slot if held else -1 for slot, held in zip(targets, saved.held[key], strict=True)]
            memory.write(kept, saved.records[key])
        self.check()

    def clear_pages(self, pages: Slots) -> None:
        self.pool.clear_pages(pages)
        for (name, _), memory in self.memory.items():
            memory.clear_pages(self.slots_of(pages, name))
        self.check()


def _first(options: Mapping[str, bool]) -> int:
    """The first slot that a store writes."""
    return 1 if options.get("skip_reserved", True) else 0


def tag_table(pool: Any, owners: Sequence[tuple[str, int]], sanitizer: Sanitizer) -> None:
    """Give the pointer table of a pool the sanitizer's pointers, by which it knows a layer's memory from another's."""
    buffers = {pool.buffer(*owner).data_ptr(): owner for owner in owners}
    entries = [buffers[pointer] for pointer in pool._table.view(-1).tolist()]
    tagged = sanitizer.table(
        [pool.buffer(*owner) for owner in entries], [f"{name} {layer}" for name, layer in entries], pool._table.dtype
    )
    pool._table = tagged.view(pool._table.shape)
