"""The operations of pools of every kind of layout, on both backends and against a model that knows addresses alone.

`Pools` makes the same pool on torch and on Triton, interpreted under the sanitizer, fills both with the same random
bytes, and holds every byte of both against `support.addresses.Model` after each operation, gaps included.
"""

import json
import pickle
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.addresses import Derived, Memory, Model, by_slot, extents, halves, joined, tensor_of
from support.guard import GuardedAllocator, Side
from support.models import LANGUAGE, ROOT, run_whole
from support.reference import (
    bf16_values,
    bits,
    e4m3_codes,
    e4m3_values,
    hostile_slots,
    interpreted,
    one_thread,
    rounded_bits,
    wild_bf16,
)
from support.sanitizer import Sanitizer

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NaN in numpy


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(11)


# -- layouts


@cache
def compiled(spec: str) -> ModuleType:
    """The module of a spec: its text, or the name of a file of `specs` or `tests/language`, or of a golden."""
    if "\n" in spec:
        name = re.search(r"^layout: (\w+)$", spec, re.MULTILINE).group(1)
        return run_whole(name, lambda file: spec.encode())
    folder = ROOT / "tests" / "golden" / spec
    if folder.exists():
        return run_whole(f"golden_{spec}", lambda file: (folder / "spec.yaml").read_bytes())
    own = ROOT / "specs" if (ROOT / "specs" / f"{spec}.yaml").exists() else LANGUAGE
    return run_whole(spec, lambda file: (own / file).read_bytes())


@dataclass(frozen=True)
class Place:
    """Where the tensors lie that operations are given: slots among others, values in columns of wider rows."""

    slot_stride: int = 3
    before: int = 0  # columns before the values, of the whole row
    each_head: bool = False  # or of the row of each head
    stride: int = 1  # of columns
    rows: int = 2  # from one row to the next
    hostile: bool = True  # whether some slots are not there

    def slots(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A tensor of the values, every third of a longer one where nothing else is said."""
        room = torch.full((len(values), self.slot_stride), 1, dtype=dtype)
        room[:, self.slot_stride // 2] = torch.tensor(values, dtype=dtype)
        return room[:, self.slot_stride // 2]

    def values(self, whole: torch.Tensor) -> torch.Tensor:
        """The same values [n, axes], elsewhere."""
        rows = whole if self.each_head else whole.flatten(1)
        *most, width = rows.shape
        room = rows.new_zeros((most[0] * self.rows, *most[1:], self.before + width * self.stride))
        own = room[:: self.rows, ..., self.before :: self.stride]
        own.copy_(rows)
        return own if self.each_head else own.unflatten(1, whole.shape[1:])


@dataclass(frozen=True)
class Case:
    """A pool, and what of its spaces and fields is not to be seen in `Page.fields`."""

    spec: str
    config: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    requests: int = 0
    derived: Mapping[str, Derived] = field(default_factory=dict)
    init: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)  # spaces with slots that share rows, and in which they do
    count: int = 24  # slots of an operation
    names: Mapping[str, str] = field(default_factory=dict)  # what a spec calls the operations of whole pools
    place: Place = field(default_factory=Place)
    guard: Side | None = None  # on which side of each tensor nobody may touch memory

    def layout(self, **changes: Any) -> Any:
        return compiled(self.spec).Layout.from_config(dict(self.config), **{**self.choices, **changes})

    def pool(self, backend: str = "torch", **changes: Any) -> Any:
        layout = self.layout(**changes)
        options: dict[str, Any] = {"requests": self.requests} if self.requests else {}
        if self.guard:
            options["allocate"] = GuardedAllocator(self.guard)
        return compiled(self.spec).Pool(layout, self.tokens, backend=backend, **options)


class Pools:
    """The same pool on both backends, and the model that both have to agree with."""

    def __init__(self, case: Case, sanitizer: Sanitizer, random: np.random.Generator, *, native: int = 0) -> None:
        self.case, self.random = case, random
        self.pools = {backend: case.pool(backend) for backend in ("torch", "triton")}
        self.torch, self.triton = self.pools.values()
        self.triton._native = native
        entries = self.triton._entries
        names = [f"{entry.name} {entry.layer}" for entry in entries]
        self.triton._table = sanitizer.table([entry.memory for entry in entries], names, torch.int64)
        self.model = Model(self.torch, case.derived, case.init)
        self.check()  # what a new pool is
        self.fill()

    def fill(self) -> None:
        self.model.fill(self.random)
        for pool in self.pools.values():
            for key, memory in self.model.memories.items():
                tensor_of(pool, key).view(-1).copy_(torch.from_numpy(memory.bytes))

    def check(self) -> None:
        for backend, pool in self.pools.items():
            for key, memory in self.model.memories.items():
                found, expected = tensor_of(pool, key).view(-1).numpy(), memory.bytes
                if not np.array_equal(found, expected):
                    wrong = np.flatnonzero(found != expected)
                    page, byte = divmod(int(wrong[0]), memory.page_bytes)
                    raise AssertionError(
                        f"{backend}: {wrong.size} bytes of {key} are wrong, the first is byte {byte} of page {page}: "
                        f"{found[wrong[0]]:#x} instead of {expected[wrong[0]]:#x}"
                    )

    def both(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """What an operation returns, which is the same on both backends."""
        name = self.case.names.get(operation, operation)
        one, other = (getattr(pool, name)(*arguments, **options) for pool in self.pools.values())
        assert_same(one, other)
        return one

    # -- slots of the whole pool

    def slots(self, dtype: torch.dtype = torch.int64) -> dict[str, list[int]]:
        """Distinct slots of every space that callers name, mixed with such as there are not, as far as a type goes."""
        found = {}
        for root, num_slots in self.model.num_slots().items():
            bad = hostile_slots(num_slots, dtype) if self.case.place.hostile else []
            count = self.case.count + (10 - len(bad) if bad else 0)  # as many of each type
            slots = self.random.permutation(num_slots)[:count].tolist()
            found[root] = [int(slot) for slot in self.random.permutation(np.array([*slots, *bad], object))]
        return found

    def given(self, slots: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.int64) -> Any:
        """Slots as a pool takes them: one tensor where there is one space."""
        tensors = {root: self.case.place.slots(own, dtype) for root, own in slots.items()}
        return tensors if len(self.torch._roots) > 1 else next(iter(tensors.values()))


strided = Place().slots


def assert_same(one: Any, other: Any) -> None:
    """That two results are equal to the bit, tensors in mappings and tuples included."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(raw(one), raw(other))
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor [n, ...] as [n, bytes]."""
    whole = tensor.clone(memory_format=torch.contiguous_format)  # of strides that `view` takes, those of axes of 1 too
    return by_slot(whole.view(torch.uint8).numpy()) if whole.numel() else np.zeros((len(whole), 0), np.uint8)


def words_of(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [n, bytes] as integers of the size of a dtype."""
    return torch.from_numpy(data.view({1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[dtype.itemsize]))


# -- operations of the whole pool


def spec(
    name: str, formats: str, buffers: str = "kv: {format: row, space: token, layers: all}", **sections: str
) -> str:
    """A layout of two layers and pages of 8 slots, where the sections do not say otherwise."""
    own = {"layers": "body: 2", "spaces": "token: {slots: tokens, page: 8}", "formats": formats, "buffers": buffers}
    lines = ["kvgen: 1", f"layout: {name}", "doc: A layout of the tests."]
    for section, text in {**own, **sections}.items():
        lines += [f"{section}:", *(f"  {line}" for line in text.strip("\n").split("\n"))]
    return "\n".join([*lines, ""])


GAPS = spec(
    "gaps",
    """
row:
  fields: {nope: "e4m3[7]", rope: "bf16[2]", scale: "e8m0[3]", one: "i64[1]"}
  page:
    - [nope, {pad: 1}, rope]
    - [scale, {align: 4}]
    - {pad: 5}
    - {align: 64}
    - [{pad: 8}, one, {pad: 8}]
    - {align: 256}
""",
)
TILES = spec(
    "tiles",
    """
row:
  fields: {key: "u8[dim]", scale: "f32[dim//16]", k: "bf16[heads, dim]", v: "f16[heads, dim]", x: "i32[heads, dim]"}
  page:
    - {each: [slot//4, dim//8, slot%4, dim%8], put: [key]}
    - {each: [slot%4, slot//4], put: [scale]}
    - {each: [heads, slot], put: [k]}
    - {each: [heads, slot//4, dim, slot%4], put: [v]}
    - {each: [slot//2%2, slot//4, dim//4%2, slot%2], put: ["x[dim//8, dim%4, heads]", {pad: 4}]}
""",
    let="dim: 32\nheads: 3",
)
ONE_SLOT = spec(  # what the one slot of a page has lies in even steps to its end, as slots do elsewhere
    "one_slot_in_pieces",
    """
of_bytes: {fields: {k: "u8[heads, 4]"}, page: [{each: [heads, slot], put: [k, {align: 8}]}]}
of_numbers: {fields: {k: "bf16[heads]"}, page: [{each: [heads, slot], put: [k, {pad: 2}]}]}
turned: {fields: {k: "f32[heads, dim]"}, page: [{each: [slot, dim], put: ["k[heads]", {pad: 12}]}]}
""",
    """
a: {format: of_bytes, space: token, layers: all}
b: {format: of_numbers, space: token, layers: all}
c: {format: turned, space: token, layers: all}
""",
    let="heads: 5\ndim: 2",
    spaces="token: {slots: tokens, page: 1}",
)
HALF_BYTES = spec(
    "half_bytes_of_all_kinds",
    """
blocks:
  fields: {k: {type: "e2m1[heads, dim]", quant: {scale: s, outer: given}}, s: "e4m3[heads, dim//16]"}
  page: [{each: [slot, heads, dim//16], put: [s, k]}]
row:
  fields: {a: "e2m1[2]", b: "e2m1[dim]", c: "e2m1[heads, dim]", d: "e2m1[heads, dim]"}
  page:
    - [a]
    - {each: [dim//16, slot], put: [b]}
    - ["c[dim, heads]", {pad: 1}]
    - {each: [heads, slot//4, dim//2, slot%4], put: [d]}
""",
    "kv: {format: row, space: token, layers: all}\nkv_blocks: {format: blocks, space: token, layers: layer == 1}",
    let="dim: 32\nheads: 2",
)
INITS = spec(
    "inits",
    """
row:
  fields:
    a: {type: "bf16[3]", init: 1.5}
    b: {type: "f16[2]", init: -0.25}
    c: {type: "f32[2]", init: -inf}
    d: {type: "i8[4]", init: -3}
    e: {type: "u8[4]", init: 200}
    f: {type: "i32[2]", init: -70000}
    g: {type: "i64[1]", init: 5000000000}
    h: "e2m1[4]"
    i: {type: "f32[heads, 4]", init: 0.1}
  page:
    - [g, c, f, a, {pad: 2}, b, d]
    - [e, h, {pad: 3}]
    - {align: 32}
    - {each: [heads, slot], put: [i]}
    - {align: 512}
""",
    """
kv: {format: row, space: token, layers: all}
kv_blocks: {format: row, space: token, layers: layer == 1, block: 2}
kv_aligned: {format: row, space: one, layers: layer == 1, align: 96}
""",
    let="heads: 3",
    spaces="token: {slots: tokens, page: 8}\none: {of: token, slots: tokens, page: 1, reserve: 3}",
)
INIT = {
    "a": np.uint16(0x3FC0),  # bf16
    "b": np.float16(-0.25),
    "c": np.float32(-np.inf),
    "d": np.int8(-3),
    "e": np.uint8(200),
    "f": np.int32(-70000),
    "g": np.int64(5_000_000_000),
    "i": np.float32(0.1),
}
SPLIT_INITS = spec(
    "split_inits",
    """
row: {fields: {t: "u8[3]", i: {type: "f32[2]", init: 0.1}}, page: [[t], {align: 64}, [i]]}
padded: {fields: {t: "u8[3]", i: {type: "f32[2]", init: 0.1}}, page: [[t], {align: 64}, [i], {align: 128}]}
""",
    """
kv: {format: row, space: token, layers: all, split: true}
kv_whole: {format: row, space: token, layers: layer == 0}
kv_aligned: {format: row, space: token, layers: layer == 1, align: 80}
kv_padded: {format: padded, space: token, layers: layer == 1}
""",
)
# Spaces that follow from `token`: two slots share a row, every second slot has one, a part of a page on this rank.
DERIVED = spec(
    "derived",
    """
row: {fields: {k: "bf16[3]", s: "f32[1]"}, page: [[k, {pad: 2}], [s]]}
""",
    """
kv: {format: row, space: token, layers: all}
kv_odd: {format: row, space: odd, layers: layer == 1}
kv_rank: {format: row, space: rank, layers: all}
kv_ring: {format: row, space: ring, layers: layer == 0}
""",
    spaces="""
token: {slots: tokens, page: 12}
odd: {of: token, slot: offset // 2, where: offset % 2 == 1}
rank: {of: token, slot: offset, where: offset // 3 == 2 or offset == 0}
ring: {of: odd, slot: offset % 3, where: offset < 3}
""",
)
SHARING = spec(
    "sharing",
    """
row: {fields: {k: "bf16[3]", s: "f32[1]"}, page: [[k, {pad: 2}], [s]]}
""",
    """
kv: {format: row, space: token, layers: all}
kv_half: {format: row, space: half, layers: all}
kv_eighth: {format: row, space: eighth, layers: layer == 0}
kv_window: {format: row, space: window, layers: layer == 1}
kv_ring: {format: row, space: ring, layers: layer == 1}
""",
    spaces="""
token: {slots: tokens, page: 16}
half: {of: token, slot: offset // 2}
eighth: {of: half, slot: offset // 4, where: offset != 1}
window: {of: token, slots: tokens / 2, page: 4}
ring: {of: window, slot: offset % 2}
""",
)
# Tokens, windows that an engine maps, and requests number their slots apart; a host buffer is no part of a pool.
APART = spec(
    "apart",
    """
row: {fields: {k: "bf16[3]"}, page: [[k]]}
state: {fields: {conv: "bf16[2]", ssm: {type: "f32[3]", init: -inf}}, page: [[conv], [ssm]]}
""",
    """
kv: {format: row, space: token, layers: all}
kv_window: {format: row, space: window, layers: layer == 0}
states: {format: state, space: request, layers: layer == 1}
kv_host: {format: row, space: host, layers: all, memory: host}
""",
    spaces="""
token: {slots: tokens, page: 4}
window: {of: token, slots: tokens / 2 + 3, page: 3, reserve: 2}
request: {slots: requests * 2, page: 2, reserve: 0}
host: {slots: tokens * 2, page: 4}
""",
)
REQUESTS = spec(  # one tensor of slots is for the only space
    "requests_alone",
    'state: {fields: {conv: "bf16[taps, width]", ssm: "f32[2]"}, page: [["conv[width, taps]"], [ssm]]}',
    "states: {format: state, space: request, layers: all}",
    config="taps: {type: int, min: 1}\nwidth: {type: int, min: 1}",
    spaces="request: {slots: requests, page: 1, reserve: 0}",
)
# Records of 16 bytes that begin at a multiple of 8 alone, by their offset and by their stride.
UNITS_OF_AN_OFFSET = spec(
    "units_of_an_offset",
    'row: {fields: {a: "u8[4]", b: "u8[16]"}, page: [[a], {align: 8}, [b], {align: 256}]}',
    spaces="token: {slots: tokens, page: 2}",
)
UNITS_OF_A_STRIDE = spec(
    "units_of_a_stride",
    'row: {fields: {a: "u8[16]"}, page: [[a, {pad: 4}]]}',
    spaces="token: {slots: tokens, page: 4}",
)

SMALL = spec(
    "small_pages",
    'row: {fields: {k: "bf16[heads, dim]", v: "u8[dim]", s: "i64[1]"}, page: [[s, k], [v], {align: 8}]}',
    config="dim: {type: int, min: 1}",
    choices="page_size: {type: int, min: 1, default: 1}\nreserved: {type: int, min: 0, default: 0}",
    let="heads: 3",
    spaces="token: {slots: tokens, page: page_size, reserve: reserved}",
)

DSV4 = {
    "config": {
        **{"num_hidden_layers": 3, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
        "compress_ratios": [0, 4, 128],
    },
    "derived": {
        "c4": Derived("token", 256, 64, lambda offset: offset // 4),
        "c4_device": Derived("token", 256, 64, lambda offset: offset // 4),
        "c128": Derived("token", 256, 2, lambda offset: offset // 128),
        "c4_state": Derived("swa", 256, 8, lambda offset: offset % 8),
    },
    "init": {"state_score": np.float32(-np.inf)},
    "shared": {"token": "c4_device", "swa": "c4_state"},
}
HISPARSE_DSV4 = {
    **DSV4,
    "derived": {name: own for name, own in DSV4["derived"].items() if name != "c4_device"},
    "shared": {"token": "c4", "swa": "c4_state"},
}
DSV41 = {
    "config": {
        **{"num_hidden_layers": 2, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
        **{"compress_ratios": [1, 2], "kv_source_layer_ids": [0, 1], "index_source_layer_ids": [0, 1]},
    },
    "derived": {"pairs": Derived("token", 256, 128, lambda offset: offset // 2)},
    "init": {"state_score": np.float32(-np.inf)},
    "shared": {"token": "pairs"},
}
GQA = {"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 64, "v_head_dim": 32}
M3 = {
    **{"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 32},
    "sparse_attention_config": {
        "sparse_index_dim": 16,
        "sparse_attention_freq": [0, 1, 1],
        "sparse_disable_index_value": [0, 0, 1],
    },
}
SAME = {"device": Derived("logical", 16, 16, lambda offset: offset)}
DELTA_NET = {
    **{"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "full_attention_interval": 3},
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4},
    "linear_conv_kernel_dim": 4,
}
KDA = {
    **{"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "linear_attn_config": {"full_attn_layers": [2], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4},
}

OWN_CASES = {
    "gaps": Case(GAPS, tokens=96, count=70),
    "tiles": Case(TILES, tokens=96),
    "one slot in pieces": Case(ONE_SLOT, tokens=60),
    "half bytes": Case(HALF_BYTES, tokens=96),
    "inits": Case(INITS, tokens=48, init=INIT),
    "split inits": Case(SPLIT_INITS, tokens=48, init={"i": np.float32(0.1)}),
    "derived": Case(
        DERIVED,
        tokens=96,
        derived={
            "odd": Derived("token", 12, 6, lambda offset: offset // 2 if offset % 2 else None),
            "rank": Derived("token", 12, 12, lambda offset: offset if offset in (0, 6, 7, 8) else None),
            "ring": Derived("token", 12, 3, lambda offset: offset // 2 if offset in (1, 3, 5) else None),
        },
    ),
    "sharing": Case(
        SHARING,
        tokens=96,
        derived={
            "half": Derived("token", 16, 8, lambda offset: offset // 2),
            "eighth": Derived("token", 16, 2, lambda offset: None if offset // 2 == 1 else offset // 8),
            "ring": Derived("window", 4, 2, lambda offset: offset % 2),
        },
        shared={"token": "half", "window": "ring"},
    ),
    "apart": Case(APART, tokens=96, requests=35, init={"ssm": np.float32(-np.inf)}),
    "requests": Case(REQUESTS, {"taps": 2, "width": 5}, requests=80, count=70),
    "units of an offset": Case(UNITS_OF_AN_OFFSET, tokens=96),
    "units of a stride": Case(UNITS_OF_A_STRIDE, tokens=96),
    "page of 1": Case(SMALL, {"dim": 4}, tokens=90),
    "page of 3": Case(SMALL, {"dim": 8}, {"page_size": 3, "reserved": 2}, tokens=90),
    "split": Case("split_and_align", {"num_hidden_layers": 2}, tokens=96),
    "aligned": Case("split_and_align", {"num_hidden_layers": 2}, {"split": False}, tokens=96),
    "layers of their own": Case(
        "layers_of_their_own",
        {"num_hidden_layers": 4, "kv_heads": [8, 4, 2, 4]},
        tokens=128,
        derived={
            "half": Derived("token", 64, 32, lambda offset: offset // 2),
            "ring": Derived("token", 64, 4, lambda offset: None if offset % 2 else offset % 4),
        },
        shared={"token": "half"},
    ),
    "load-time page": Case(
        "load_time_page",
        {"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 96},
        {"page_size": 3},
        tokens=96,
    ),
    "states of load-time types": Case(
        "requests",
        {"num_hidden_layers": 2, "state": {"dim": 6}, "state_type": "bfloat16"},
        tokens=96,
        requests=35,
        init={"score": np.float32(-np.inf)},
    ),
    "equal pages": Case("equal_pages", {"num_hidden_layers": 2, "state_dim": 9}, tokens=96, requests=80),
}
CASES = {
    **OWN_CASES,
    **{
        f"gqa {kv_format} {order}{' split' * split}": Case(
            "gqa_orders",
            GQA,
            {"kv_format": kv_format, "kv_order": order, "page_size": page, "split_kv": split},
            tokens=max(96, page),
        )
        for kv_format, order, page, split in [
            ("bf16", "nhd", 3, True),
            ("bf16", "x5d", 16, True),
            ("nvfp4", "nhd", 16, True),
            ("nvfp4", "hnd", 16, False),
            ("mxfp8", "nhd", 128, False),
        ]
    },
    "q8_0": Case("corners", {"num_hidden_layers": 3, "kv_heads": [3, 1, 3], "head_dim": 64}, tokens=64),
    "tpu": Case("corners", {"num_hidden_layers": 1, "kv_heads": [1]}, {"rows": "tpu"}, tokens=64),
    "dsv4 apart": Case(
        "dsv4", choices={"host_to_device_ratio": 2, "start_layer": 1, "end_layer": 2}, tokens=256, **HISPARSE_DSV4
    ),
    "dsv4 in tiles": Case(
        "dsv4",
        choices={"index_order": "amd", "index_format": "mxfp4", "start_layer": 1, "end_layer": 2},
        tokens=256,
        **DSV4,
    ),
    "dsv41": Case("dsv41", choices={"swa_ratio": 0}, tokens=256, requests=35, **DSV41),
    "dsv41 of planes": Case("dsv41", choices={"rows": "split", "compressed": "fp8"}, tokens=256, **DSV41),
    "minimax_m3 apart": Case("minimax_m3", M3, {"page_size": 16, "host_to_device_ratio": 2}, tokens=96),
    "minimax_m3 nvfp4": Case("minimax_m3", M3, {"page_size": 16, "stack": "nvfp4_rows"}, tokens=96, derived=SAME),
    "gpt_oss": Case(
        "gpt_oss",
        {**GQA, "layer_types": ["sliding_attention", "full_attention"]},
        {"kv_order": "hnd", "draft_layers": 1, "role": "both"},
        tokens=96,
    ),
    "qwen3_next equal": Case("qwen3_next", DELTA_NET, {"equal_pages": True}, tokens=96, requests=5),
    "kimi_linear": Case("kimi_linear", KDA, {"role": "both", "page_size": 16}, tokens=96, requests=80),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@contextmanager
def pools_of(case: Case, random: np.random.Generator, *, races: bool = True, native: int = 0) -> Iterator[Pools]:
    """Both pools of a case, with kernels interpreted under the sanitizer."""
    with interpreted(races, saturating=native != 2) as sanitizer:
        yield Pools(case, sanitizer, random, native=native)


@pytest.mark.parametrize("name", OWN_CASES)
def test_move(name: str, random: np.random.Generator) -> None:
    with pools_of(OWN_CASES[name], random) as pools:
        moved(pools)


def moved(pools: Pools) -> None:
    """Sources are targets too, so that it matters that all reads come first; some come twice."""
    sources, targets = pools.slots(), pools.slots(torch.int32)
    for own in (sources, targets):
        own |= dict.fromkeys(pools.case.shared, [])
    count = {root: min(len(sources[root]), len(targets[root])) for root in sources}
    sources, targets = ({root: own[: count[root]] for root, own in slots.items()} for slots in (sources, targets))
    for own in sources.values():
        own[1::5] = own[: len(own[1::5])]
    if any(sources.values()):
        pools.both("move", pools.given(targets, torch.int32), pools.given(sources))
        pools.model.move(targets, sources)
        pools.check()


def copied(pools: Pools) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Slots to copy and as many to write, some of them not there.

    Where slots share rows they are those of whole pages, in one order: those that share a row go to one row.
    """
    sources, targets = pools.slots(), pools.slots()
    for root in pools.case.shared:
        size, num_slots = pools.model.page_size(root), pools.model.num_slots()[root]
        places = pools.random.permutation(size).tolist()
        for own in (sources, targets):
            page = int(pools.random.integers(num_slots // size))
            own[root] = [*(page * size + place for place in places), -1, num_slots, 2**40]
    for root in sources:
        count = min(len(sources[root]), len(targets[root]))
        sources[root], targets[root] = sources[root][:count], targets[root][:count]
    return sources, targets


def test_save_and_restore(case: Case, random: np.random.Generator) -> None:
    """A copy, through a pickle, written to other slots after all bytes have changed."""
    with pools_of(case, random, races=not case.shared) as pools:  # rows that slots share are written more than once
        saved_and_restored(pools)


def saved_and_restored(pools: Pools) -> None:
    sources, targets = copied(pools)
    copy = pools.both("save", pools.given(sources))
    pools.check()
    assert copy["slots"] == {root: len(own) for root, own in sources.items()}
    saved = pools.model.save(sources)
    if any(sources.values()):
        check_staging(pools, *copy["staging"], sources)
    pools.fill()
    pools.both("restore", pickle.loads(pickle.dumps(copy)), pools.given(targets))
    pools.model.restore(saved, targets)
    pools.check()


@pytest.mark.parametrize("name", ["half bytes", "apart"])
def test_pack_and_unpack(name: str, random: np.random.Generator) -> None:
    """The device's halves of the two."""
    with pools_of(CASES[name], random) as pools:
        sources, targets = copied(pools)
        staging = pools.both("pack", pools.given(sources))
        assert_same((staging,), pools.torch.save(pools.given(sources))["staging"])
        saved = pools.model.save(sources)
        pools.both("unpack", staging, pools.given(targets))
        pools.model.restore(saved, targets)
        pools.check()


def check_staging(pools: Pools, staging: torch.Tensor, slots: Mapping[str, Sequence[int]]) -> None:
    """Staged are the records of the layers of each part, and behind the last part which slots there are."""
    saved = pools.model.save(slots)
    counts = {root: len(own) for root, own in slots.items()}
    parts = pools.both("describe_staging", counts if len(pools.torch._roots) > 1 else sum(counts.values()))
    end, seen = 0, set()
    for part in parts:
        assert part.offset == -(-end // 16) * 16
        assert not staging[end : part.offset].any()
        assert part.nbytes == len(part.layers) * part.slots * part.record_bytes
        end = part.offset + part.nbytes
        records = staging[part.offset : end].view(len(part.layers), part.slots, part.record_bytes).numpy()
        buffer, _, plane = part.buffer.partition(".")
        for layer, record in zip(part.layers, records, strict=True):
            key = buffer, plane or None, layer
            staged, begin = halves(record), 0
            for name in part.fields:  # the bytes of one are in an order that is not told
                values = by_slot(saved[key][1][name])
                own = staged[:, begin : begin + values.shape[1]]
                np.testing.assert_array_equal(np.sort(own), np.sort(values))
                begin += values.shape[1]
                seen.add((*key, name))
            assert begin == staged.shape[1]
    assert seen == {(*key, name) for key, memory in pools.model.memories.items() for name in memory.fields}
    flags, behind = staging[-(-end // 16) * 16 :].numpy(), 0
    held = pools.model.held_by_space(slots)
    for space, root in pools.model.roots().items():
        count = counts.get(root, 0)
        if space in held:  # of the others see `test_slots_of_a_space_without_layers_are_told`
            np.testing.assert_array_equal(flags[behind : behind + count], held[space])
        behind += count
    assert behind == len(flags)


def test_clear_pages(case: Case, random: np.random.Generator) -> None:
    """Pages are what they are in a new pool, gaps included; pages that are not there are left out."""
    with pools_of(case, random) as pools:
        cleared(pools)


def cleared(pools: Pools) -> None:
    pages = {}
    for root, num_slots in pools.model.num_slots().items():
        num_pages = num_slots // pools.model.page_size(root)
        chosen = pools.random.permutation(num_pages)[: min(num_pages // 2, 3)].tolist()
        pages[root] = [*chosen, -1, num_pages, 2**31, -(2**40)]
    pools.both("clear_pages", pools.given(pages))
    pools.model.clear_pages(pages)
    pools.check()


def test_transfer_regions(case: Case) -> None:
    pool = case.pool()
    told_of_regions(pool, Model(pool, case.derived, case.init))


def told_of_regions(pool: Any, model: Model) -> None:
    """Every tensor once, whose page numbers are those of the space."""
    found = {}
    for region in pool.transfer_regions():
        buffer, _, plane = region.buffer.partition(".")
        found[buffer, plane or None, region.layer] = region
        assert region.device_id == -1
    assert found.keys() == model.memories.keys()
    for key, region in found.items():
        tensor, memory = tensor_of(pool, key), model.memories[key]
        assert (region.ptr, region.nbytes) == (tensor.data_ptr(), tensor.numel())
        blocks = model.spaces[key[0]].page_size // memory.page.slots
        assert region.page_bytes == memory.page_bytes * blocks  # so that its page numbers are the space's
        assert region.page_fingerprint == memory.page.fingerprint
        assert region.space == model.spaces[key[0]].name


# -- operations of a layer

TORCH = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "e2m1": torch.uint8,  # two values
    "u8": torch.uint8,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
}


DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # that values may come back in


def operations(buffers: str, values: Sequence[str], fields: Sequence[str]) -> str:
    """One of each verb, arguments called as their fields."""

    def args(names: Sequence[str]) -> str:
        return "{" + ", ".join(f"{name}: {name}" for name in names) + "}"

    return f"""
set_values: {{store: [{buffers}], args: {args(values)}}}
set_fields: {{put: [{buffers}], args: {args(fields)}}}
get_values: {{load: [{buffers}], returns: [{", ".join(values)}]}}
get_fields: {{get: [{buffers}], returns: [{", ".join(fields)}]}}
gather_fields: {{gather: [{buffers}], returns: [{", ".join(fields)}]}}
"""


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e2m1_codes(values: np.ndarray) -> np.ndarray:
    """fp32 to the nearest e2m1, ties to the even code, saturating at 6; NaN is 7."""
    size = np.minimum(np.abs(values.astype(np.float64)), 6.0)
    distance = np.abs(size[..., None] - E2M1)
    code = np.where(distance[..., ::2].min(-1) <= distance[..., 1::2].min(-1), 0, 1)
    code = code + 2 * np.where(code == 0, distance[..., ::2].argmin(-1), distance[..., 1::2].argmin(-1))
    return np.where(np.isnan(values), 7, code + np.where(np.signbit(values), 8, 0)).astype(np.uint8)


def i8_codes(values: np.ndarray) -> np.ndarray:
    """fp32 to the nearest whole number, ties to even, from -127 to 127; NaN is 127."""
    within = np.where(np.isnan(values), 127, np.clip(values, -127, 127))
    return np.rint(within).astype(np.int8).view(np.uint8)


def _signed(codes: np.ndarray) -> np.ndarray:
    return codes.view(np.int8).astype(np.float32)


CODES = {  # the largest number, what makes codes, what reads them, and the code of NaN
    "e4m3": (448, e4m3_codes, e4m3_values, 0x7F),
    "e2m1": (6, e2m1_codes, lambda codes: np.concatenate([E2M1, -E2M1]).astype(np.float32)[codes], 7),
    "i8": (127, i8_codes, _signed, 127),
}


@dataclass(frozen=True)
class Rule:
    """How a store makes codes: scales of a field for so many values each; none where that is empty."""

    scale: str = ""
    values: int = 0
    floor: float = 0
    power: bool = False
    divide: bool = False
    code: str = "e4m3"
    scales: str = "f32"
    given: float | None = None  # the scale that a store gives: that of all values, or over those of blocks

    def stored(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of fp32 [..., values] as they are stored, each step rounded to fp32."""
        assert blocks.dtype == np.float32
        maximum, coded, _, code_of_nan = CODES[self.code]
        with np.errstate(all="ignore"):
            if not self.scale:
                scaled = blocks
                if self.given is not None:
                    scale = np.float32(self.given)
                    scaled = blocks / scale if self.divide else blocks * (np.float32(1) / scale)
                return coded(scaled), np.zeros(0, np.uint8)
            amax = np.where(np.isnan(blocks), np.float32(0), np.abs(blocks)).max(axis=-1, keepdims=True)
            amax = np.maximum(amax, np.float32(self.floor))
            scale = amax / np.float32(maximum)
            if self.given is not None:
                scale = scale / np.float32(self.given)
            scale = np.where(amax == 0, amax, np.maximum(scale, np.float32(2.0**-126)))
            if self.power:
                mantissa, exponent = np.frexp(scale)  # of 0.5 <= mantissa < 1
                above = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
                scale = np.where((scale == 0) | np.isinf(scale), scale, above)
            kept = {"f32": lambda own: own, "e8m0": e8m0_codes, "e4m3": e4m3_codes}[self.scales](scale)
            whole = self.whole(kept) if self.scales == "e4m3" else scale * np.float32(self.given or 1)
            scaled = blocks / whole if self.divide else blocks * (np.float32(1) / whole)
        assert scale.dtype == whole.dtype == scaled.dtype == np.float32
        codes = np.where((whole == 0) & ~np.isnan(blocks), np.uint8(0), coded(scaled))
        return np.where(np.isnan(blocks), np.uint8(code_of_nan), codes), kept[..., 0]

    def whole(self, stored: np.ndarray) -> np.ndarray:
        """Scales as they are stored with the one over them."""
        own = {"f32": lambda own: own, "e8m0": e8m0_values, "e4m3": e4m3_values}[self.scales](stored)
        return own if self.given is None else own * np.float32(self.given)

    def read(self, codes: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """The values of codes [n, values] with their scales [n, blocks] as they are stored."""
        values = CODES[self.code][2](codes)
        with np.errstate(all="ignore"):
            if self.scale:
                return values * np.repeat(self.whole(stored), self.values, axis=1)
            return values if self.given is None else values * np.float32(self.given)


def e8m0_codes(scales: np.ndarray) -> np.ndarray:
    """The exponents of powers of two; 0xFF, which is NaN, of infinity."""
    with np.errstate(divide="ignore"):
        return np.where(np.isinf(scales), 255, np.where(scales == 0, 0, np.log2(scales) + 127)).astype(np.uint8)


def e8m0_values(codes: np.ndarray) -> np.ndarray:
    return np.where(codes == 255, np.nan, 2.0 ** (codes.astype(np.float64) - 127)).astype(np.float32)


@dataclass
class Layer:
    """A buffer of a layer, and what operations do with it, those of `operations` where no other is named."""

    pools: Pools
    buffer: str
    layer: int
    fields: Sequence[str]  # in the order in which operations have them
    rules: Mapping[str, Rule] = field(default_factory=dict)
    reader: int | None = None  # a layer that reads what `layer` owns, by which loads ask for it

    @property
    def asked(self) -> int:
        """The layer that reading operations are given."""
        return self.layer if self.reader is None else self.reader

    def memory(self, name: str) -> Memory:
        """The tensor that a field lies in."""
        own = [
            memory for (buffer, _, layer), memory in self.pools.model.memories.items() if (buffer, layer) == self.key
        ]
        return next(memory for memory in own if name in memory.fields)

    @property
    def key(self) -> tuple[str, int]:
        return self.buffer, self.layer

    @property
    def given(self) -> dict[str, float]:
        """The scales that stores and loads are given."""
        return {f"{name}_scale": rule.given for name, rule in self.rules.items() if rule.given is not None}

    @property
    def scales(self) -> set[str]:
        return {rule.scale for rule in self.rules.values()}

    @property
    def values(self) -> list[str]:
        return [name for name in self.fields if name not in self.scales]

    def slots(self, dtype: torch.dtype) -> list[int]:
        """Slots of which no two share a row, the reserved one among them, and some that are not there."""
        model, root = self.pools.model, self.pools.model.root(self.buffer)
        num_slots = model.num_slots()[root]
        rows: dict[int, int] = {}
        for slot in [0, *self.pools.random.permutation(num_slots).tolist()]:
            rows.setdefault(model.own(self.buffer, [slot])[0], slot)
        chosen = [*rows.values()][: self.pools.case.count]
        bad = hostile_slots(num_slots, dtype) if self.pools.case.place.hostile else []
        return [int(slot) for slot in self.pools.random.permutation(np.array([*chosen, *bad], object))]

    def own(self, slots: Sequence[int]) -> list[int]:
        return self.pools.model.own(self.buffer, slots)

    def shape(self, name: str) -> tuple[int, ...]:
        return extents(self.memory(name).fields[name])

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """As the bytes have it, two e2m1 values in each."""
        *most, last = self.shape(name)
        return (*most, last // 2) if self.memory(name).fields[name].dtype == "e2m1" else (*most, last)

    def placed(self, slots: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return self.pools.case.place.slots(slots, dtype)

    def kept(self, slots: Sequence[int], skip_reserved: bool) -> list[int]:
        """The rows of slots, -1 for slot 0 where that is skipped."""
        skips = skip_reserved and self.pools.model.spaces[self.buffer].reserved_pages
        own = self.own(slots)
        return [-1 if skips and slot == 0 else row for slot, row in zip(slots, own, strict=True)]

    # -- inputs

    def any_bits(self, name: str, count: int) -> torch.Tensor:
        """Any values of the dtype of a field [count, axes], NaN among them."""
        dtype, shape = TORCH[self.memory(name).fields[name].dtype], self.stored_shape(name)
        data = self.pools.random.integers(0, 256, (count, int(np.prod(shape)) * dtype.itemsize), np.uint8)
        return self.pools.case.place.values(words_of(data, dtype).view(count, *shape)).view(dtype)

    def numbers(self, name: str, count: int) -> torch.Tensor:
        """bf16 of all kinds [count, axes]."""
        width = int(np.prod(self.shape(name)))
        wild = wild_bf16(self.pools.random, count, -(-width // 64) * 64)[:, :width]
        whole = torch.from_numpy(wild.view(np.int16).copy()).view(count, *self.shape(name))
        return self.pools.case.place.values(whole).view(torch.bfloat16)

    # -- operations

    def store(
        self,
        operation: str = "set_values",
        skip_reserved: bool = True,
        dtype: torch.dtype = torch.int32,
        **called: str,
    ) -> None:
        """`called` gives arguments by their fields where they have other names."""
        slots = self.slots(dtype)
        given = {
            name: (self.numbers if name in self.rules else self.any_bits)(name, len(slots)) for name in self.values
        }
        arguments = {called.get(name, name): tensor for name, tensor in given.items()}
        options = {} if skip_reserved else {"skip_reserved": False}
        self.pools.both(operation, self.layer, self.placed(slots, dtype), **arguments, **options, **self.given)
        own = self.kept(slots, skip_reserved)
        for name, tensor in given.items():
            rule = self.rules.get(name)
            memory = self.memory(name)
            if rule is None:
                memory.write_bytes(name, own, raw(tensor))
                continue
            values = by_slot(bf16_values(bits(tensor)))
            block = rule.values or values.shape[1]
            codes, scales = rule.stored(values.reshape(len(slots), values.shape[1] // block, block))
            codes = by_slot(codes)
            memory.write_bytes(name, own, joined(codes) if rule.code == "e2m1" else codes)
            if rule.scale:
                self.memory(rule.scale).write_bytes(rule.scale, own, scales)
        self.pools.check()

    def put(self, operation: str = "set_fields", skip_reserved: bool = True, **called: str) -> None:
        slots = self.slots(torch.int64)
        given = {name: self.any_bits(name, len(slots)) for name in self.fields}
        arguments = {called.get(name, name): tensor for name, tensor in given.items()}
        self.pools.both(operation, self.layer, self.placed(slots), **arguments, skip_reserved=skip_reserved)
        for name, tensor in given.items():
            self.memory(name).write_bytes(name, self.kept(slots, skip_reserved), raw(tensor))
        self.pools.check()

    def get(self, operation: str = "get_fields", names: Sequence[str] = ()) -> None:
        slots = self.slots(torch.int32)
        found = self.pools.both(operation, self.asked, self.placed(slots, torch.int32))
        self.holds(found, names or self.fields, self.own(slots))

    def holds(self, found: tuple[torch.Tensor, ...], names: Sequence[str], own: Sequence[int]) -> None:
        """That fields came back as they are stored."""
        assert len(found) == len(names)
        for name, data in zip(names, found, strict=True):
            assert data.dtype == torch.uint8
            np.testing.assert_array_equal(data.numpy(), self.memory(name).read_bytes(name, own), name)
        self.pools.check()

    def gather(self, operation: str = "gather_fields", names: Sequence[str] = ()) -> None:
        """Sequences of some lengths over pages in no order, some of them not there."""
        space = self.pools.model.spaces[self.buffer]
        memory = self.memory(self.fields[0])
        size, num_pages = space.page_size, memory.num_pages * memory.page.slots // space.page_size
        lengths = [2 * size + 1, 0, -3, 1, size, 3 * size + 2]
        table = self.pools.random.integers(0, num_pages, (len(lengths), 3))
        table[5, 1], table[3, 0], table[0, 2] = num_pages, -1, 2**31 - 1
        own = []
        for length, pages in zip(lengths, table.tolist(), strict=True):
            for token in range(max(length, 0)):
                page = pages[token // size] if token // size < len(pages) else -1
                own.append(page * size + token % size if 0 <= page < num_pages else -1)
        arguments = self.placed(lengths, torch.int32), torch.from_numpy(table)
        sums = {"seq_len_sum": len(own), "max_seq_len": max(lengths)} if self.pools.random.integers(2) else {}
        found = self.pools.both(operation, self.asked, *arguments, **sums)
        self.holds(found, names or self.fields, own)

    def load(
        self,
        operation: str = "get_values",
        names: Sequence[str] = (),
        dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    ) -> None:
        """Codes times their scales, rounded once; what is stored as it came as it is, but in another type.

        Where no dtype is asked for, codes come as bf16 and what is stored as it came in its own dtype.
        """
        slots = self.slots(torch.int64)
        for dtype in (None, *dtypes):
            asked = () if dtype is None else (dtype,)
            found = self.pools.both(operation, self.asked, self.placed(slots), *asked, **self.given)
            for name, values in zip(names or self.values, found, strict=True):
                shape = self.shape(name)
                assert values.shape == (len(slots), *((1, *shape) if len(shape) == 1 else shape))
                unasked = torch.bfloat16 if name in self.rules else TORCH[self.memory(name).fields[name].dtype]
                expected = self.loaded(name, self.own(slots), dtype or unasked)
                np.testing.assert_array_equal(raw(values), raw(expected), name)
                assert values.dtype == expected.dtype
        self.pools.check()

    def loaded(self, name: str, own: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        data = np.ascontiguousarray(self.memory(name).read_bytes(name, own))
        stored, rule = self.memory(name).fields[name].dtype, self.rules.get(name)
        if rule is None and stored in ("e4m3", "e5m2", "e8m0"):
            return torch.from_numpy(data)
        if rule is None and (stored not in ("bf16", "f16", "f32") or TORCH[stored] == dtype):
            return words_of(data, TORCH[stored]).view(TORCH[stored])
        if rule is None:
            with np.errstate(invalid="ignore"):  # signalling NaN
                values = {
                    "bf16": lambda: bf16_values(data.view(np.uint16)),
                    "f16": lambda: data.view(np.float16).astype(np.float32),
                    "f32": lambda: data.view(np.float32),
                }[stored]()
        else:
            scales = self.memory(rule.scale).read_bytes(rule.scale, own) if rule.scale else np.zeros((0, 0), np.uint8)
            scales = np.ascontiguousarray(scales).view(np.float32) if rule.scales == "f32" else scales
            values = rule.read(halves(data) if stored == "e2m1" else data, scales)
        rounded = rounded_bits(np.ascontiguousarray(values), dtype)
        signed = {2: np.int16, 4: np.int32}[rounded.itemsize]
        return torch.from_numpy(rounded.view(signed)).view(dtype)

    def everything(self) -> None:
        """One operation of each verb."""
        self.store()
        self.load()
        self.put(skip_reserved=False)
        self.get()
        self.gather()


HEADS_FIELDS = ["k", "k_scale", "v", "v_scale", "bias"]
HEADS = spec(
    "heads",
    """
nhd:
  fields:
    k: {type: "e4m3[heads, dim]", quant: {scale: k_scale}}
    k_scale: "f32[heads]"
    v: {type: "e4m3[heads, dim]", quant: {scale: v_scale, round: pow2}}
    v_scale: "e8m0[heads, dim//8]"
    bias: "bf16[heads, dim]"
  page: [[k], [k_scale], [v], [v_scale, {align: 4}], {align: 16}, [bias]]
rows:
  fields: nhd
  page: [["bias[dim, heads]", {pad: 4}, k_scale, {align: 4}, v_scale, v, "k[dim, heads]", {align: 64}]]
hnd:
  fields: nhd
  page:
    - {each: [heads, slot], put: [k, {pad: 8}]}
    - {each: [heads, slot], put: [k_scale]}
    - {each: [heads, slot, dim//8], put: [v_scale, v]}
    - {align: 16}
    - {each: [heads, slot], put: [bias]}
x5d:
  fields: nhd
  page:
    - {each: [heads, dim//8, slot, dim%8], put: [k]}
    - {each: [heads, slot], put: [k_scale]}
    - {each: [heads, slot//4, dim, slot%4], put: [v]}
    - {each: [slot%4, slot//4, dim//8], put: [v_scale]}
    - {align: 16}
    - {each: [heads, dim//8, slot, dim%8], put: [bias]}
row:
  - {when: order == 'nhd', use: nhd}
  - {when: order == 'rows', use: rows}
  - {when: order == 'hnd', use: hnd}
  - {use: x5d}
""",
    config="heads: {type: int, min: 1}\ndim: {type: int, min: 1}",
    choices="order: {of: [nhd, rows, hnd, x5d], default: nhd}",
    operations=operations("kv", ["k", "v", "bias"], HEADS_FIELDS),
)


@pytest.mark.parametrize(
    "order, heads, dim",
    [("nhd", 3, 40), ("rows", 3, 40), ("hnd", 5, 24), ("x5d", 3, 40), ("x5d", 1, 8)],
)
def test_heads_that_load_time_decides(order: str, heads: int, dim: int, random: np.random.Generator) -> None:
    rules = {"k": Rule("k_scale", dim), "v": Rule("v_scale", 8, power=True, scales="e8m0")}
    with pools_of(Case(HEADS, {"heads": heads, "dim": dim}, {"order": order}, tokens=48), random) as pools:
        Layer(pools, "kv", 1, HEADS_FIELDS, rules).everything()


# Ways of making codes by their fields; the scales of `a` are `a_scale`.
RULES = {
    "a": Rule("a_scale", 48),
    "b": Rule("b_scale", 96),
    "c": Rule("c_scale", 32, floor=1e-4),
    "d": Rule("d_scale", 1, power=True),
    "e": Rule("e_scale", 32, power=True, scales="e8m0"),  # as e8m0 scales always are
    "f": Rule("f_scale", 8, floor=0.25, power=True, scales="e8m0"),
    "g": Rule(),
    "h": Rule("h_scale", 24),
    "i": Rule("i_scale", 30),  # of two heads
}
ROUNDINGS = """
row:
  fields:
    a: {type: "e4m3[dim]", quant: {scale: a_scale}}
    a_scale: "f32[dim//48]"
    b: {type: "e4m3[dim]", quant: {scale: b_scale}}
    b_scale: "f32[1]"
    c: {type: "e4m3[dim]", quant: {scale: c_scale, floor: 0.0001}}
    c_scale: "f32[dim//32]"
    d: {type: "e4m3[heads, 1]", quant: {scale: d_scale, round: pow2}}
    d_scale: "f32[heads]"
    e: {type: "e4m3[dim]", quant: {scale: e_scale}}
    e_scale: "e8m0[dim//32]"
    f: {type: "e4m3[heads, half]", quant: {scale: f_scale, floor: 0.25, round: pow2}}
    f_scale: "e8m0[heads, half//8]"
    g: {type: "e4m3[7]", quant: {scale: none}}
    h: {type: "e4m3[heads, half]", quant: {scale: h_scale}}
    h_scale: "f32[heads, half//24]"
    i: {type: "e4m3[six, fifteen]", quant: {scale: i_scale}}
    i_scale: "f32[six//2]"
  page:
    - [a, a_scale, b, b_scale, c, c_scale]
    - [d, {align: 4}]
    - [d_scale]
    - [e_scale, e, f, f_scale, g]
    - {align: 4}
    - {each: [heads, slot, half//24], put: [h_scale, h]}
    - [i_scale, "i[fifteen, six]", {pad: 2}]
"""


def roundings(name: str, formats: str) -> tuple[str, list[str]]:
    """A layout of the rules, and its fields."""
    fields = [*RULES, *(rule.scale for rule in RULES.values() if rule.scale)]
    made = operations("kv", list(RULES), fields)
    return spec(name, formats, let="dim: 96\nheads: 3\nhalf: 48\nsix: 6\nfifteen: 15", operations=made), fields


@pytest.mark.parametrize("code", ["reciprocal", "divide"])
@pytest.mark.parametrize("native", [0, 1, 2], ids=["integers", "native casts", "AMD's casts"])
def test_roundings(code: str, native: int, random: np.random.Generator) -> None:
    """Every way of making codes; with native casts kernels make them by the instruction of a device."""
    text, fields = roundings(f"roundings_{code}", re.sub(r"(scale: \w_scale)", rf"\1, code: {code}", ROUNDINGS))
    rules = {name: replace(rule, divide=code == "divide") for name, rule in RULES.items()}
    with pools_of(Case(text, tokens=96), random, native=native) as pools:
        row = Layer(pools, "kv", 0, fields, rules)
        row.store()
        if native:
            return
        row.load(dtypes=DTYPES)
        row.put()  # codes and scales of any bits
        row.load(dtypes=DTYPES)


@pytest.mark.parametrize("floor", ["1e-4", "1e-40", "1000000000000"])
def test_floors(floor: str, random: np.random.Generator) -> None:
    """Some so low that they change nothing: a scale that is not 0 is at least 2^-126."""
    text = spec(
        f"floor_{floor.replace('-', '_')}",
        f"""
row:
  fields: {{k: {{type: "e4m3[dim]", quant: {{scale: s, floor: {floor}}}}}, s: "f32[dim//8]"}}
  page: [[k, s]]
""",
        let="dim: 96",
        operations=operations("kv", ["k"], ["k", "s"]),
    )
    with pools_of(Case(text, tokens=96), random) as pools:
        Layer(pools, "kv", 0, ["k", "s"], {"k": Rule("s", 8, floor=float(floor))}).store()


PLAIN_FIELDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
PLAIN = spec(
    "plain",
    """
row:
  fields:
    a: "bf16[3]"
    b: "f16[heads, 5]"
    c: "f32[2]"
    d: "i8[1]"
    e: "u8[6]"
    f: "i32[heads, 2]"
    g: "i64[dim]"
    h: "e4m3[3]"
    i: "e5m2[2]"
    j: "e8m0[4]"
  page:
    - [c, a, {pad: 2}]
    - {each: [heads, slot], put: [b]}
    - {align: 8}
    - [e, d, h]
    - {align: 8}
    - {each: [slot%4, heads, slot//4], put: [f]}
    - {each: [slot, dim], put: [g]}
    - {each: [slot], put: [i, {pad: 1}, j]}
    - {align: 8}
""",
    let="heads: 3\ndim: 3",
    operations=operations("kv", PLAIN_FIELDS, PLAIN_FIELDS),
)


def test_fields_that_are_stored_as_they_come(random: np.random.Generator) -> None:
    with pools_of(Case(PLAIN, tokens=48), random) as pools:
        row = Layer(pools, "kv", 1, PLAIN_FIELDS)
        row.everything()
        row.load(dtypes=DTYPES)


# -- names

WORDS = [
    "value",
    "slot",
    "block",
    "key",
    "token",
    "kept",
    "row",
    "column",
    "element",
    "codes",
    "scales",
    "memory",
    "page",
]
WORDS_TOO = ["slots", "table", "count", "page_ptr", "position", "lengths", "request", "start", "first", "inside", "tl"]


def rows_of(name: str, fields: Mapping[str, str], page: str = "") -> tuple[str, dict[str, str]]:
    """A layout of one row with these fields, and what arguments its operations have for them."""
    called = {field: f"argument_{index}" for index, field in enumerate(fields)}
    listed = ", ".join(fields)
    args = ", ".join(f"{argument}: {field}" for field, argument in called.items())
    types = ", ".join(f'{field}: "{type}"' for field, type in fields.items())
    text = spec(
        name,
        f"row: {{fields: {{{types}}}, page: {page or f'[[{listed}]]'}}}",
        operations=f"""
set_values: {{store: [kv], args: {{{args}}}}}
set_fields: {{put: [kv], args: {{{args}}}}}
get_values: {{load: [kv], returns: [{listed}]}}
get_fields: {{get: [kv], returns: [{listed}]}}
gather_fields: {{gather: [kv], returns: [{listed}]}}
""",
    )
    return text, called


def everything_of(text: str, called: Mapping[str, str], random: np.random.Generator) -> None:
    with pools_of(Case(text, tokens=16), random) as pools:
        row = Layer(pools, "kv", 0, [*called])
        row.store(**called)
        row.put(**called)
        row.get()
        row.load()
        row.gather()


@pytest.mark.parametrize("words", [WORDS, WORDS_TOO], ids=["words", "more words"])
def test_fields_named_as_words_of_kernels(words: list[str], random: np.random.Generator) -> None:
    everything_of(*rows_of(f"words_{words[0]}", dict.fromkeys(words, "f32[2]")), random)


@pytest.mark.parametrize(
    "names",
    ["range", "k_ptr k", "k_stride k", "k_dtype k", "slot slot_", "k k_row", "k_row k"],
)
def test_fields_whose_names_meet_in_a_kernel(names: str, random: np.random.Generator) -> None:
    """What a kernel has for a field must not be called as another field is: `k_ptr` for `k`, the field `k_ptr`."""
    first, *others = names.split()
    fields = {first: "f32[2]", **dict.fromkeys(others, "f32[3]")}
    page = "[" + ", ".join(f"[{name}]" for name in fields) + "]"
    everything_of(*rows_of(f"names_{names.replace(' ', '_and_')}", fields, page), random)


@pytest.mark.parametrize("name", ["dim", "dim2", "h2d_dim", "row_bytes", "f32_bytes", "native", "page_slots", "column"])
def test_numbers_of_load_time_by_many_names(name: str, random: np.random.Generator) -> None:
    text = spec(
        f"number_{name}",
        f"""
row:
  fields: {{k: {{type: "e4m3[{name}]", quant: {{scale: s}}}}, s: "f32[1]"}}
  page: [[k], {{align: 4}}, [s]]
""",
        config=f"{name}: {{type: int, min: 1}}",
        operations=operations("kv", ["k"], ["k", "s"]),
    )
    with pools_of(Case(text, {name: 6}, tokens=16), random) as pools:
        row = Layer(pools, "kv", 0, ["k", "s"], {"k": Rule("s", 6)})
        row.store()
        row.get()


def test_fields_with_digits_behind_one_of_load_time(random: np.random.Generator) -> None:
    """Where `k2` begins load time knows."""
    text = spec(
        "digits",
        'row: {fields: {k1: "u8[dim]", k2: "f32[3]"}, page: [[k1], {align: 4}, [k2]]}',
        config="dim: {type: int, min: 1}",
        operations=operations("kv", ["k1", "k2"], ["k1", "k2"]),
    )
    with pools_of(Case(text, {"dim": 5}, tokens=16), random) as pools:
        Layer(pools, "kv", 0, ["k1", "k2"]).everything()


def test_arguments_named_as_words_and_as_each_other(random: np.random.Generator) -> None:
    """`value` takes the field `key` and `key` the field `value`."""
    text = spec(
        "swapped",
        """
row:
  fields: {value: {type: "e4m3[dim]", quant: {scale: block}}, block: "f32[1]", key: "bf16[dim]", slot: "bf16[dim]"}
  page: [[block, value, key, slot]]
""",
        let="dim: 4",
        operations="""
set_values: {store: [kv], args: {value: key, key: slot, slot: value}}
set_fields: {put: [kv], args: {slot: block, block: slot, value: key, key: value}}
""",
    )
    with pools_of(Case(text, tokens=16), random) as pools:
        row = Layer(pools, "kv", 0, ["value", "block", "key", "slot"], {"value": Rule("block", 4)})
        row.store(key="value", slot="key", value="slot")
        row.put(block="slot", slot="block", key="value", value="key")


def test_scales_and_codes_named_as_what_makes_others(random: np.random.Generator) -> None:
    """`k_blocks` is made in another way than `k`, by what is called as the kernel's half of the way of `k`."""
    text = spec(
        "k_and_k_blocks",
        """
row:
  fields:
    k: {type: "e4m3[dim]", quant: {scale: s}}
    s: "f32[1]"
    k_blocks: {type: "e4m3[dim]", quant: {scale: t, code: divide}}
    t: "f32[1]"
  page: [[s, t, k, k_blocks]]
""",
        let="dim: 4",
        operations="set_values: {store: [kv], args: {k: k, k_blocks: k_blocks}}",
    )
    rules = {"k": Rule("s", 4), "k_blocks": Rule("t", 4, divide=True)}
    with pools_of(Case(text, tokens=16), random) as pools:
        Layer(pools, "kv", 0, ["k", "s", "k_blocks", "t"], rules).store()


@pytest.mark.parametrize("operation, names", [("get_a", ["k"]), ("get_b", ["k", "v"]), ("get_c", ["k_v"])])
def test_operations_on_some_fields(operation: str, names: list[str], random: np.random.Generator) -> None:
    """Kernels of one verb and format, one for `k` and `v`, one for `k_v`."""
    text = spec(
        "k_v_and_k_v",
        'row: {fields: {k: "f32[2]", v: "f32[3]", k_v: "f32[4]"}, page: [[k, v, k_v]]}',
        operations="""
get_a: {get: [kv], returns: [k]}
get_b: {get: [kv], returns: [k, v]}
get_c: {get: [kv], returns: [k_v]}
""",
    )
    with pools_of(Case(text, tokens=16), random) as pools:
        Layer(pools, "kv", 0, names).get(operation)


FORMATS = {
    "a page of so many slots, and a format called so": (
        """
row: {fields: {k: "f32[2]", v: "f32[3]"}, page: [[k, v]]}
row_8: {fields: {k: "f32[2]", v: "f32[3]"}, page: [[v], [k]]}
""",
        "a: {format: row, space: token, layers: layer == 0}\n"
        "b: {format: row, space: token, block: 4, layers: layer == 1}\n"
        "c: {format: row_8, space: token, layers: layer == 2}",
    ),
    "the word page": (
        """
a_page_b: {fields: {k: "f32[2]", v: "f32[3]"}, page: [[k, v]]}
a_b_page: {fields: {k: "f32[2]", v: "f32[3]"}, page: [[v], [k]]}
""",
        "a: {format: a_page_b, space: token, layers: layer == 0}\n"
        "b: {format: a_b_page, space: token, layers: layer == 1}\n"
        "c: {format: a_b_page, space: token, layers: layer == 2}",
    ),
}


@pytest.mark.parametrize("names", FORMATS)
@pytest.mark.parametrize("buffer, layer", [("a", 0), ("b", 1), ("c", 2)])
def test_formats_whose_names_meet(names: str, buffer: str, layer: int, random: np.random.Generator) -> None:
    formats, buffers = FORMATS[names]
    fields = ["k", "v"]
    text = spec(
        f"formats_{len(names)}",
        formats,
        buffers,
        layers="body: 3",
        operations=operations("a, b, c", fields, fields),
    )
    with pools_of(Case(text, tokens=16), random) as pools:
        row = Layer(pools, buffer, layer, fields)
        row.store()
        row.get()


@pytest.mark.parametrize("operation, buffer, layer", [("get_v", "kv", 0), ("get_v_of_other", "kw", 1)])
def test_a_format_named_as_one_and_its_field(
    operation: str, buffer: str, layer: int, random: np.random.Generator
) -> None:
    """Of `row` the kernel for `v` alone, and of `row_v` the only one."""
    text = spec(
        "row_and_row_v",
        """
row: {fields: {k: "f32[2]", v: "f32[3]"}, page: [[k, v]]}
row_v: {fields: {k: "f32[2]", v: "f32[3]"}, page: [[k], [v]]}
""",
        "kv: {format: row, space: token, layers: layer == 0}\nkw: {format: row_v, space: token, layers: layer == 1}",
        operations="""
get_k: {get: [kv], returns: [k]}
get_v: {get: [kv], returns: [v]}
get_v_of_other: {get: [kw], returns: [v]}
""",
    )
    with pools_of(Case(text, tokens=16), random) as pools:
        Layer(pools, buffer, layer, ["v"]).get(operation)


# -- several buffers and formats in one operation

SEVERAL = spec(
    "several",
    """
plain: {fields: {k: "bf16[heads, dim]", v: "f32[2]"}, page: [[k], {align: 4}, [v]]}
scaled:
  fields: {k: {type: "e4m3[heads, dim]", quant: {scale: s, code: divide}}, s: "f32[heads]", v: "bf16[2]"}
  page: [{each: [heads, slot], put: [k]}, {align: 4}, [s], [v]]
raw:
  fields: {k: {type: "e4m3[heads, dim]", quant: {scale: none}}, v: "f16[2]"}
  page: [["k[dim, heads]", {pad: 1}, v]]
chosen: [{when: is_raw, use: raw}, {use: scaled}]
""",
    """
one: {format: plain, space: token, layers: layer == 0}
two: {format: scaled, space: other, layers: layer == 1}
three: {format: chosen, space: token, block: 2, layers: layer == 2}
""",
    layers="body: 3",
    choices="is_raw: {type: bool, default: true}",
    let="heads: 3\ndim: 5",
    spaces="token: {slots: tokens, page: 8}\nother: {of: token, slots: tokens / 2, page: 3}",
    operations="""
set_values: {store: [one, two, three], args: {k: k, v: v}}
get_values: {load: [one, two, three], returns: [k, v]}
get_k: {load: [three, one], returns: [k]}
""",
)


@pytest.mark.parametrize(
    "buffer, layer, is_raw, scale, rules",
    [
        ("one", 0, True, [], {}),
        ("two", 1, True, ["s"], {"k": Rule("s", 5, divide=True)}),
        ("three", 2, True, [], {"k": Rule()}),
        ("three", 2, False, ["s"], {"k": Rule("s", 5, divide=True)}),
    ],
)
def test_buffers_of_several_formats(
    buffer: str, layer: int, is_raw: bool, scale: list[str], rules: dict[str, Rule], random: np.random.Generator
) -> None:
    with pools_of(Case(SEVERAL, choices={"is_raw": is_raw}, tokens=48), random) as pools:
        row = Layer(pools, buffer, layer, ["k", "v", *scale], rules)
        row.store()
        row.load()
        if buffer != "two":
            row.load("get_k", ["k"])


@pytest.mark.parametrize("buffer, layer", [("one", 0), ("two", 1)])
def test_a_field_of_another_size_in_another_format(buffer: str, layer: int, random: np.random.Generator) -> None:
    text = spec(
        "sizes",
        """
wide: {fields: {k: "f32[3]"}, page: [[k]]}
narrow: {fields: {k: "bf16[3]"}, page: [[k]]}
""",
        "one: {format: wide, space: token, layers: layer == 0}\n"
        "two: {format: narrow, space: token, layers: layer == 1}",
        operations=operations("one, two", ["k"], ["k"]),
    )
    with pools_of(Case(text, tokens=48), random) as pools:
        Layer(pools, buffer, layer, ["k"]).everything()


@pytest.mark.parametrize("buffer, layer", [("one", 0), ("two", 1)])
def test_a_field_of_numbers_in_one_format_and_of_integers_in_another(
    buffer: str, layer: int, random: np.random.Generator
) -> None:
    text = spec(
        "kinds",
        """
numbers: {fields: {k: "f32[3]"}, page: [[k]]}
integers: {fields: {k: "i32[3]"}, page: [[k]]}
""",
        "one: {format: numbers, space: token, layers: layer == 0}\n"
        "two: {format: integers, space: token, layers: layer == 1}",
        operations=operations("one, two", ["k"], ["k"]),
    )
    with pools_of(Case(text, tokens=48), random) as pools:
        Layer(pools, buffer, layer, ["k"]).everything()


def test_a_plain_number_of_values_with_one_scale(random: np.random.Generator) -> None:
    text = spec(
        "plain_number",
        'row: {fields: {k: {type: "e4m3[5]", quant: {scale: s}}, s: "f32[1]"}, page: [[s, k, {pad: 3}]]}',
        operations=operations("kv", ["k"], ["k", "s"]),
    )
    with pools_of(Case(text, tokens=16), random) as pools:
        Layer(pools, "kv", 0, ["k", "s"], {"k": Rule("s", 5)}).everything()


# -- pages and spaces

PAGES = spec(
    "pages",
    """
row:
  fields: {k: {type: "e4m3[dim]", quant: {scale: s}}, s: "f32[dim//48]", v: "u8[3]"}
  page: [[k], {align: 4}, [s], [v], {align: 4}]
""",
    """
plain: {format: row, space: token, layers: layer == 0}
aligned: {format: row, space: token, layers: layer == 1, align: 1000}
blocks: {format: row, space: token, layers: layer == 2, block: 2}
blocks_aligned: {format: row, space: token, layers: layer == 3, block: 1, align: 260}
small: {format: row, space: small, layers: layer == 4}
odd: {format: row, space: odd, layers: layer == 5}
same: {format: row, space: same, layers: layer == 6}
""",
    layers="body: 7",
    let="dim: 48",
    spaces="""
token: {slots: tokens, page: 4, reserve: 0}
small: {of: token, slots: tokens * 2, page: 1, reserve: 2}
odd: {of: token, slots: tokens, page: 3}
same: {of: token, slot: offset}
""",
    operations=operations("plain, aligned, blocks, blocks_aligned, small, odd, same", ["k", "v"], ["k", "s", "v"]),
)


@pytest.mark.parametrize(
    "layer, buffer", [*enumerate(["plain", "aligned", "blocks", "blocks_aligned", "small", "odd", "same"])]
)
def test_pages_of_every_kind(layer: int, buffer: str, random: np.random.Generator) -> None:
    """Pages of 1, 3 and 4 slots, wider strides, blocks of a page; slot 0 counts where no page is reserved."""
    with pools_of(Case(PAGES, tokens=48), random) as pools:
        Layer(pools, buffer, layer, ["k", "s", "v"], {"k": Rule("s", 48)}).everything()


@pytest.mark.parametrize("layer, buffer", [*enumerate(["load_time", "known", "twice"])])
def test_pages_of_one_format_in_several_sizes(layer: int, buffer: str, random: np.random.Generator) -> None:
    """Load time knows the slots of one, this file those of the other."""
    made = operations("load_time, known, twice", ["k"], ["k"])
    text = spec(
        "several_sizes",
        'row: {fields: {k: "f32[2]"}, page: [[k]]}',
        """
load_time: {format: row, space: token, layers: layer == 0}
known: {format: row, space: token, layers: layer == 1, block: 4}
twice: {format: row, space: twice, layers: layer == 2}
""",
        layers="body: 3",
        choices="page_size: {type: int, min: 4, default: 8}",
        spaces="token: {slots: tokens, page: page_size}\ntwice: {of: token, slots: tokens, page: 2 * page_size}",
        operations=made[: made.index("gather_fields")],
    )
    with pools_of(Case(text, tokens=48), random) as pools:
        row = Layer(pools, buffer, layer, ["k"])
        row.store()
        row.get()


def test_heads_of_each_layer(random: np.random.Generator) -> None:
    text = spec(
        "heads_of_each_layer",
        """
row:
  fields: {k: {type: "e4m3[heads, dim]", quant: {scale: s}}, s: "f32[heads, dim//4]"}
  page: [{each: [heads, slot], put: [k]}, {align: 4}, [s]]
""",
        config="heads_of: {type: list, of: int}",
        let='heads: "heads_of[layer] if layer < len(heads_of) else 1"\ndim: 8',
        layers="body: 3",
        operations=operations("kv", ["k"], ["k", "s"]),
    )
    for layer in (0, 1, 2):
        with pools_of(Case(text, {"heads_of": [3, 1, 5]}, tokens=16), random) as pools:
            Layer(pools, "kv", layer, ["k", "s"], {"k": Rule("s", 4)}).everything()


def test_heads_rounded_up_at_load_time(random: np.random.Generator) -> None:
    """What a head takes is a multiple of 16 bytes, whatever its values are."""
    text = spec(
        "heads_rounded_up",
        'row: {fields: {k: "f32[heads, dim]"}, page: [{each: [slot, heads], put: [k, {align: 16}]}]}',
        config="heads: {type: int, min: 1}\ndim: {type: int, min: 1}",
        operations=operations("kv", ["k"], ["k"]),
    )
    with pools_of(Case(text, {"heads": 3, "dim": 5}, tokens=16), random) as pools:
        Layer(pools, "kv", 1, ["k"]).everything()


@pytest.mark.parametrize("page_size", [1, 3, 8])
def test_a_page_rounded_up_at_load_time(page_size: int, random: np.random.Generator) -> None:
    """`{align: 128}` ends the page: how many bytes that is, load time knows."""
    text = spec(
        "rounded_up",
        'row: {fields: {k: {type: "e4m3[dim]", quant: {scale: s}}, s: "f32[1]"}, page: [[s, k], {align: 128}]}',
        choices="page_size: {type: int, min: 1, default: 8}",
        let="dim: 20",
        spaces="token: {slots: tokens, page: page_size}",
        operations=operations("kv", ["k"], ["k", "s"]).replace("gather_fields: {gather: [kv], returns: [k, s]}\n", ""),
    )
    with pools_of(Case(text, choices={"page_size": page_size}, tokens=48), random) as pools:
        row = Layer(pools, "kv", 1, ["k", "s"], {"k": Rule("s", 20)})
        row.store()
        row.load()
        row.put()
        row.get()


AT = spec(
    "at_root_and_own",
    'row: {fields: {k: {type: "e4m3[dim]", quant: {scale: s}}, s: "f32[1]"}, page: [[k], [s]]}',
    """
kv: {format: row, space: token, layers: layer == 0}
half: {format: row, space: half, layers: layer == 1}
rank: {format: row, space: rank, layers: layer == 2}
ring: {format: row, space: ring, layers: layer == 3}
""",
    layers="body: 4",
    let="dim: 8",
    spaces="""
token: {slots: tokens, page: 8}
half: {of: token, slot: offset // 2}
rank: {of: token, slot: offset, where: offset % 4 == 1 or offset == 0}
window: {of: token, slots: tokens / 2, page: 4}
ring: {of: window, slot: offset % 2, where: offset > 0}
""",
    operations="""
set_values: {store: [kv, half, rank, ring], args: {k: k}}
set_fields: {put: [kv, half, rank, ring], args: {k: k, s: s}}
get_values: {load: [kv, half, rank, ring], returns: [k]}
get_fields: {get: [kv, half, rank, ring], returns: [k, s]}
own_values: {store: [kv, half, rank, ring], args: {k: k}, at: own}
own_fields: {put: [kv, half, rank, ring], args: {k: k, s: s}, at: own}
own_values_there: {load: [kv, half, rank, ring], returns: [k], at: own}
own_fields_there: {get: [kv, half, rank, ring], returns: [k, s], at: own}
""",
)
AT_DERIVED = {
    "half": Derived("token", 8, 4, lambda offset: offset // 2),
    "rank": Derived("token", 8, 8, lambda offset: offset if offset in (0, 1, 5) else None),
    "ring": Derived("window", 4, 2, lambda offset: offset % 2 if offset else None),
}


@pytest.mark.parametrize("layer, buffer", [*enumerate(["kv", "half", "rank", "ring"])])
@pytest.mark.parametrize("at", ["root", "own"])
def test_slots_of_the_root_and_of_the_buffer(layer: int, buffer: str, at: str, random: np.random.Generator) -> None:
    """Slots that a space does not hold are skipped, and read as zeros; its own are told where the spec says so."""
    with pools_of(Case(AT, tokens=96, derived=AT_DERIVED if at == "root" else {}), random) as pools:
        row = Layer(pools, buffer, layer, ["k", "s"], {"k": Rule("s", 8)})
        stem = "own" if at == "own" else "set"
        for skip_reserved in (True, False):
            row.store(f"{stem}_values", skip_reserved=skip_reserved)
            row.put(f"{stem}_fields", skip_reserved=skip_reserved)
        row.load("own_values_there" if at == "own" else "get_values")
        row.get("own_fields_there" if at == "own" else "get_fields")


# -- operations of language specs


def test_stores_of_dsv4(random: np.random.Generator) -> None:
    """Latents of every 4 and of every 128 tokens by one operation, and those of windows."""
    rules = {"nope": Rule("scale", 64, power=True, scales="e8m0")}
    for layer, buffer in ((0, "swa_kv"), (1, "c4_kv"), (2, "c128_kv")):
        choices = {"start_layer": layer, "end_layer": layer + 1}
        with pools_of(Case("dsv4", choices=choices, tokens=256, **DSV4), random) as pools:
            operation = "set_swa_key_buffer" if buffer == "swa_kv" else "set_extra_key_buffer"
            Layer(pools, buffer, layer, ["nope", "rope", "scale"], rules).store(operation)


def test_operations_of_the_golden(random: np.random.Generator) -> None:
    config = {"num_hidden_layers": 3, "full_layers": [0, 2], "window_layers": [1]}
    rules = {"value": Rule("scale", 4)}
    with pools_of(Case("operations", config, tokens=16), random) as pools:
        for buffer, layer in (("full", 2), ("window", 1)):
            row = Layer(pools, buffer, layer, ["value", "scale", "rope"], rules)
            row.store("set_latent", value="latent")
            row.load("get_latent")
        row = Layer(pools, "full", 0, ["value", "scale", "rope"], rules)
        row.put("set_codes", value="codes", scale="scales")
        row.get("get_codes", ["value", "scale"])
        row.gather("gather_codes")


# -- what is named, and what is not there


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["gaps", "tiles", "apart"])
def test_no_slots(name: str, backend: str, random: np.random.Generator) -> None:
    """Operations on nothing change nothing."""
    with pools_of(CASES[name], random) as pools:
        nothing = pools.given({root: [] for root in pools.model.num_slots()})
        pool = pools.pools[backend]
        pool.move(nothing, nothing)
        pool.restore(pool.save(nothing), nothing)
        pool.clear_pages(nothing)
        pools.check()


@pytest.mark.parametrize("space", ["token", "window", "request"])
def test_a_space_named_alone(space: str, random: np.random.Generator) -> None:
    """The buffers of the others are left alone, where those are named without slots."""
    with pools_of(CASES["apart"], random) as pools:
        nothing: dict[str, list[int]] = {"token": [], "window": [], "request": []}
        sources, targets = ({**nothing, space: pools.slots()[space]} for _ in range(2))
        pools.both("move", pools.given(targets), pools.given(sources))
        pools.model.move(targets, sources)
        pools.check()
        pools.both("clear_pages", pools.given({**nothing, space: [1]}))
        pools.model.clear_pages({space: [1]})
        pools.check()


def test_tokens_alone_where_requests_have_states() -> None:
    """Whatever would leave out the states is refused, and nothing is written."""
    case = CASES["states of load-time types"]
    pool = case.pool()
    for entry in pool._entries:
        entry.memory.random_(0, 256)
    before = [entry.memory.clone() for entry in pool._entries]
    each = "must be a mapping with an entry for each of the spaces token, request"
    left_out = f"{each}, and `request` is left out; an entry of no length leaves a space as it is"
    both = {"token": SLOTS, "request": SLOTS[:1]}
    copy, staging = pool.save(both), pool.pack(both)
    for slots, needed in ((SLOTS, f"{each}, not int64 [3] on cpu"), ({"token": SLOTS}, left_out)):
        for name, call in (
            ("tgt_loc", lambda slots: pool.move(slots, both)),
            ("src_loc", lambda slots: pool.move(both, slots)),
            ("loc", pool.save),
            ("loc", pool.pack),
            ("loc", lambda slots: pool.restore(copy, slots)),
            ("loc", lambda slots: pool.unpack(staging, slots)),
            ("pages", pool.clear_pages),
        ):
            with pytest.raises(ValueError) as error:
                call(slots)
            assert str(error.value) == f"{name} {needed}"
    for entry, memory in zip(pool._entries, before, strict=True):
        assert torch.equal(entry.memory, memory)


def test_no_layers(random: np.random.Generator) -> None:
    case = replace(CASES["apart"], choices={"start_layer": 1, "end_layer": 1})
    with interpreted() as sanitizer:
        for backend in ("torch", "triton"):
            pool = case.pool(backend)
            slots = {"token": torch.tensor([0, 5, -1]), "request": torch.tensor([1])}
            pool.warmup()
            pool.move(slots, slots)
            pool.clear_pages(slots)
            copy = pool.save(slots)
            assert copy["layers"] == {"kv": [], "kv_window": [], "states": []}
            pool.restore(copy, slots)
            assert pool.describe_staging({"token": 3}) == ()
            assert pool.transfer_regions() == []
            assert pool.num_bytes() == 0
        assert not sanitizer.launches


def test_slots_of_a_space_without_layers_are_told(random: np.random.Generator) -> None:
    """A byte for each slot of each space follows what is staged: 1 where the slot was inside, if some layer uses it."""
    without_windows = replace(CASES["apart"], choices={"start_layer": 1})
    with pools_of(without_windows, random) as pools:
        slots = {"token": strided([0, 5, -1]), "window": strided([3, 2**20]), "request": strided([1])}
        assert pools.both("pack", slots)[-6:].tolist() == [1, 1, 0, 0, 0, 1]


WARM = {
    "load-time heads": Case(HEADS, {"heads": 3, "dim": 8}, tokens=16),
    "several formats": Case(SEVERAL, tokens=48),
    "derived spaces": Case(AT, tokens=96),
}


@pytest.mark.parametrize("name", WARM)
def test_warmup_changes_nothing(name: str, random: np.random.Generator) -> None:
    with pools_of(WARM[name], random) as pools:
        pools.both("warmup")
        pools.check()


# -- refusals


def refused(case: Case, operation: str, *arguments: Any, **changes: Any) -> str:
    with pytest.raises(ValueError) as error:
        getattr(case.pool(**changes), operation)(*arguments)
    return str(error.value)


SLOTS = torch.tensor([1, 2, 3])


def test_one_tensor_where_slots_are_numbered_apart() -> None:
    each = "must be a mapping with an entry for each of the spaces token, window, request"
    needed = f"{each}, not int64 [3] on cpu"
    apart, all_three = CASES["apart"], dict.fromkeys(("token", "window", "request"), SLOTS)
    assert refused(apart, "move", SLOTS, all_three) == f"tgt_loc {needed}"
    assert refused(apart, "move", all_three, SLOTS) == f"src_loc {needed}"
    for operation, name in (("save", "loc"), ("pack", "loc"), ("clear_pages", "pages")):
        assert refused(apart, operation, SLOTS) == f"{name} {needed}"
    assert refused(apart, "describe_staging", 3) == f"n {each}, not 3"
    copy = apart.pool().save(all_three)
    assert refused(apart, "restore", copy, SLOTS) == f"loc {needed}"
    assert refused(apart, "unpack", *copy["staging"], SLOTS) == f"loc {needed}"
    for left_out in all_three:
        others = {name: own for name, own in all_three.items() if name != left_out}
        came = f"and `{left_out}` is left out; an entry of no length leaves a space as it is"
        assert refused(apart, "save", others) == f"loc {each}, {came}"
        assert refused(apart, "describe_staging", dict.fromkeys(others, 3)) == f"n {each}, {came}"


def test_spaces_that_are_not_there() -> None:
    known = "must be a mapping with an entry for each of the spaces token, window, request, not for"
    apart = CASES["apart"]
    assert refused(apart, "move", {"tokens": SLOTS}, {"token": SLOTS}) == f"tgt_loc {known} 'tokens'"
    assert refused(apart, "save", {"host": SLOTS}) == f"loc {known} 'host'"
    assert refused(apart, "clear_pages", {0: SLOTS}) == f"pages {known} 0"
    derived = CASES["derived"]  # callers do not name spaces that follow from another
    each = "loc must be a mapping with an entry for each of the spaces token"
    assert refused(derived, "save", {"odd": SLOTS}) == f"{each}, not for 'odd'"
    assert refused(apart, "describe_staging", {"tokens": 1}) == f"n {known} 'tokens'"
    wrong = {"token": 1, "window": -1, "request": 1}
    assert refused(apart, "describe_staging", wrong) == "n must be a number of slots, not -1"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shared])
def test_slots_that_share_rows_are_not_moved(name: str) -> None:
    """In spaces that share none they are."""
    case = CASES[name]
    pool = case.pool()
    for root, space in case.shared.items():
        slots = {**dict.fromkeys(pool._roots, SLOTS[:0]), root: SLOTS}
        copying = "only save and restore copy them, those that share a row together"
        expected = f"slots of `{space}` share rows: {copying}"
        assert refused(case, "move", slots, slots) == expected
        assert refused(case, "pack", slots) == expected
        assert refused(case, "unpack", torch.zeros(1), slots) == expected


# Four slots of a page of 16 share a compressed row; each has a mark of its own, too.
FOURS = spec(
    "fours",
    """
row: {fields: {k: "bf16[8]"}, page: [[k]]}
mark: {fields: {m: "i64[1]"}, page: [[m]]}
""",
    """
kc: {format: row, space: comp, layers: all}
marks: {format: mark, space: token, layers: all}
""",
    layers="body: 1",
    spaces="token: {slots: tokens, page: 16}\ncomp: {of: token, slot: offset // 4}",
    operations="store_kc: {store: [kc], args: {k: k}}\nload_kc: {load: [kc], returns: [k]}",
)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_slots_that_share_rows_are_restored_together(backend: str, random: np.random.Generator) -> None:
    """Rows hold the slot over four: 16 .. 19 have row 4, 32 .. 35 row 8, and so on. What was refused wrote nothing."""
    derived = {"comp": Derived("token", 16, 4, lambda offset: offset // 4)}
    with pools_of(Case(FOURS, tokens=64, derived=derived), random, races=False) as pools:
        pool = pools.pools[backend]
        slots = torch.arange(16, 80)
        pool.store_kc(0, slots, (slots[:, None] // 4).expand(64, 8).bfloat16())

        def rows() -> list[int]:
            return pool.load_kc(0, torch.arange(16, 80, 4))[0][:, 0, 0].tolist()

        before = list(range(4, 20))
        assert rows() == before
        needs = "loc must have all slots that share a row of `comp`, as whole pages have: of the 4 slots of row"
        fits = "loc must have slots that share a row where the copy has such: row"
        whole = pool.save(torch.arange(16, 24))
        for copied, message in (
            (lambda: pool.save(torch.tensor([16])), f"{needs} 4, 1 came"),
            (lambda: pool.save(torch.tensor([16, 16, 17, 18])), f"{needs} 4, 3 came"),
            (lambda: pool.restore(whole, torch.arange(33, 41)), f"{needs} 8, 3 came"),
            (
                lambda: pool.restore(whole, torch.tensor([32, 36, 33, 37, 34, 38, 35, 39])),
                f"{fits} 8 of `comp` would be written from rows 4 and 5",
            ),
            (
                lambda: pool.restore({**whole, "rows": {}}, torch.arange(32, 40)),
                "copy must have the rows of `comp`, int64 [8], not None",
            ),
        ):
            with pytest.raises(ValueError) as error:
                copied()
            assert str(error.value) == message
            assert rows() == before
        pool.restore(whole, torch.tensor([39, 37, 38, 36, 60, 61, 63, 62]))
        assert rows() == [*before[:5], 4, *before[6:11], 5, *before[12:]]


def test_moves_of_other_slots_than_were_named() -> None:
    expected = "tgt_loc and src_loc must agree in slots: {'token': 2} and {'token': 3}"
    assert refused(CASES["gaps"], "move", SLOTS[:2], SLOTS) == expected
    targets, sources = ({"token": SLOTS, "window": SLOTS, "request": SLOTS[:count]} for count in (2, 3))
    counts = [{"token": 3, "window": 3, "request": count} for count in (2, 3)]
    expected = f"tgt_loc and src_loc must agree in slots: {counts[0]} and {counts[1]}"
    assert refused(CASES["apart"], "move", targets, sources) == expected


def test_copies_of_another_layout() -> None:
    """By the first thing that differs: the layout, a choice, the rank, the layers, a page, the number of slots."""
    small = CASES["page of 3"]
    copy = small.pool().save(SLOTS)

    def told(what: str, theirs: object, own: object) -> str:
        return f"copy must be of this layout, rank and number of slots: {what} is {theirs} in the copy and {own} here"

    def page(case: Case) -> str:
        return case.layout().page_fingerprint("kv")

    wider = replace(small, config={"dim": 16})
    assert page(wider) != page(small)
    assert refused(wider, "restore", copy, SLOTS) == told("page_fingerprints.kv", repr(page(small)), repr(page(wider)))
    assert refused(small, "restore", copy, SLOTS, end_layer=1) == told("choices.end_layer", 2, 1)
    assert refused(small, "restore", copy, SLOTS[:2]) == told("slots.token", 3, 2)
    for changed, what, theirs, own in (
        ({"layers": {"kv": [0]}}, "layers.kv", [0], [0, 1]),
        ({"layers": {"kv": [0, 1], "v": [0]}}, "layers.v", [0], None),
        ({"rank": 3}, "rank", 3, 0),
        ({"layout": "large"}, "layout", "'large'", "'small_pages'"),
        ({"fingerprint": None}, "fingerprint", None, repr(small.layout().fingerprint)),
        ({"choices": {}}, "choices.page_size", None, copy["choices"]["page_size"]),
    ):
        assert refused(small, "restore", {**copy, **changed}, SLOTS) == told(what, theirs, own)
    apart = CASES["apart"]
    copy = apart.pool().save({"token": SLOTS, "window": SLOTS, "request": SLOTS})
    fewer = {"token": SLOTS, "window": SLOTS, "request": SLOTS[:0]}
    assert refused(apart, "restore", copy, fewer) == told("slots.request", 3, 0)
    assert refused(small, "restore", copy, SLOTS) == told("layout", "'apart'", "'small_pages'")
    for broken in (None, 3, [copy]):
        expected = f"copy must be what `save` returned, not {repr(broken)[:57]}"
        assert refused(small, "restore", broken, SLOTS).startswith(expected)
    assert refused(small, "restore", {}, SLOTS) == told("layout", None, "'small_pages'")
    other_pages = replace(small, choices={"page_size": 5})  # of other slots to a page
    assert refused(other_pages, "restore", small.pool().save(SLOTS), SLOTS) == told("choices.page_size", 3, 5)


def test_a_copy_of_another_rank() -> None:
    """Ranks share a layout and hold other heads, so that nothing but their number tells their copies apart."""
    module, layout = compiled(SMALL), CASES["page of 3"].layout()
    one, other = (module.Pool(layout, 90, rank=rank) for rank in (0, 1))
    copy = one.save(SLOTS)
    with pytest.raises(ValueError, match="rank is 0 in the copy and 1 here$"):
        other.restore(copy, SLOTS)
    module.Pool(layout, 90, rank=0).restore(copy, SLOTS)
    for rank in (-1, True, "0", 1.0):
        with pytest.raises(ValueError, match="^rank must be an integer of at least 0, not "):
            module.Pool(layout, 90, rank=rank)


@pytest.mark.parametrize("name", ["page of 3", "apart", "sharing"])
def test_a_copy_whose_bytes_have_changed(name: str, random: np.random.Generator) -> None:
    """Any bit of any byte that a copy holds: nothing of it is written."""
    case = CASES[name]
    pool = case.pool()
    for entry in pool._entries:
        entry.memory.random_(0, 256)
    page = torch.arange(16, 32)
    slots = dict.fromkeys(pool._roots, page) if len(pool._roots) > 1 else page
    copy = pool.save(slots)
    pool.restore(copy, slots)
    before = [entry.memory.clone() for entry in pool._entries]
    (staging,) = copy["staging"]
    tensors = [staging, *copy.get("rows", {}).values()]
    for _ in range(200):
        tensor = tensors[random.integers(len(tensors))].view(torch.uint8)
        byte, bit = int(random.integers(tensor.numel())), 1 << int(random.integers(8))
        tensor[byte] ^= bit
        with pytest.raises(ValueError, match="^copy must have the bytes that were saved: their CRC-32 was |^loc must "):
            pool.restore(copy, slots)
        tensor[byte] ^= bit
    flags = staging[-3:].clone()
    staging[-3:] = 0  # without them, slots would be skipped
    with pytest.raises(ValueError, match="^copy must have the bytes that were saved"):
        pool.restore(copy, slots)
    staging[-3:] = flags
    for lost in (None, 0, str(copy["checksum"])):
        with pytest.raises(ValueError, match="^copy must have the bytes that were saved"):
            pool.restore({**copy, "checksum": lost}, slots)
    for entry, memory in zip(pool._entries, before, strict=True):
        assert torch.equal(entry.memory, memory)
    pool.restore(copy, slots)


# Two roots in each of which slots share rows.
PAIRS = spec(
    "pairs",
    'row: {fields: {k: "u8[8]"}, page: [[k]]}',
    """
a: {format: row, space: fours, layers: all}
b: {format: row, space: twos, layers: all}
""",
    spaces="""
token: {slots: tokens, page: 8}
window: {of: token, slots: tokens, page: 8}
fours: {of: token, slot: offset // 4}
twos: {of: window, slot: offset // 2}
""",
)


@pytest.mark.parametrize("empty", ["token", "window"])
def test_a_copy_of_one_of_two_spaces_whose_slots_share_rows(empty: str) -> None:
    """Rows of no slot, behind the bytes and in front of them, leave the checksum what it is of the others."""
    pool = Case(PAIRS, tokens=64).pool()
    for entry in pool._entries:
        entry.memory.random_(0, 256)
    slots = {"token": torch.arange(16, 32), "window": torch.arange(16, 32), empty: SLOTS[:0]}
    copy = pool.save(slots)
    (staging,) = copy["staging"]
    (rows,) = (own for own in copy["rows"].values() if len(own))
    assert copy["checksum"] == zlib.crc32(staging.numpy().tobytes() + rows.numpy().tobytes())
    for tensor in (staging, rows):
        tensor[0] ^= 1
        with pytest.raises(ValueError, match="^copy must have the bytes|^loc must have slots"):
            pool.restore(copy, slots)
        tensor[0] ^= 1
    pool.restore(copy, slots)


def test_copies_of_tensors_of_other_kinds() -> None:
    """What cannot be compared or has no bytes in memory is refused as what is not of this layout is."""
    pool = Case(PAIRS, tokens=64).pool()
    slots = {"token": torch.arange(16, 32), "window": torch.arange(16, 32)}
    copy = pool.save(slots)
    (staging,) = copy["staging"]
    many = torch.tensor([1, 2])
    for changed in (
        *({"staging": (own,)} for own in (staging.to_sparse(), torch.nested.nested_tensor([staging]))),
        {"staging": (staging.to("meta"),)},
        *({"rows": {**copy["rows"], "fours": own(copy["rows"]["fours"])}} for own in (to_sparse, to_meta)),
        *({key: many} for key in ("checksum", "rank", "layout", "layers")),
        {"slots": {"token": many, "window": 16}},
        {"choices": {**copy["choices"], "start_layer": many}},
    ):
        with pytest.raises(ValueError):
            pool.restore({**copy, **changed}, slots)


def to_sparse(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_sparse()


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def test_the_checksum_is_that_of_every_other_library() -> None:
    """CRC-32 as zip files have it, of the staging tensors one behind the other."""
    pool = CASES["page of 3"].pool()
    for entry in pool._entries:
        entry.memory.random_(0, 256)
    copy = pool.save(SLOTS)
    assert copy["checksum"] == zlib.crc32(b"".join(bytes(own.tolist()) for own in copy["staging"]))


@pytest.mark.parametrize("name", ["page of 3", "apart", "sharing", "half bytes"])
def test_a_copy_that_went_through_json(name: str) -> None:
    """All but the tensors, which go as bytes; JSON makes lists of tuples."""
    case = CASES[name]
    pool, other = case.pool(), case.pool()
    for entry in pool._entries:
        entry.memory.random_(0, 256)
    page = torch.arange(16, 32)
    slots = dict.fromkeys(pool._roots, page) if len(pool._roots) > 1 else page
    copy = pool.save(slots)
    rest = json.loads(json.dumps({key: own for key, own in copy.items() if key not in ("staging", "rows")}))
    staging = [torch.frombuffer(bytearray(own.numpy().tobytes()), dtype=torch.uint8) for own in copy["staging"]]
    rows = {key: torch.tensor(json.loads(json.dumps(own.tolist()))) for key, own in copy.get("rows", {}).items()}
    other.restore({**rest, "staging": staging, "rows": rows}, slots)
    assert_same(other.save(slots)["staging"], copy["staging"])


def test_copies_of_planes_of_their_own() -> None:
    """A copy of a buffer whose planes are tensors is one of another layout where they are not."""
    split, whole = CASES["split"], CASES["aligned"]
    copy = split.pool().save(SLOTS)
    came = "choices.split is True in the copy and False here"
    assert refused(whole, "restore", copy, SLOTS) == f"copy must be of this layout, rank and number of slots: {came}"
    copy = {**copy, "choices": {**copy["choices"], "split": False}}
    theirs, own = (case.layout().page_fingerprint("kv") for case in (split, whole))
    came = f"page_fingerprints.kv is '{theirs}' in the copy and '{own}' here"
    assert refused(whole, "restore", copy, SLOTS) == f"copy must be of this layout, rank and number of slots: {came}"


def test_what_is_no_staging_tensor() -> None:
    pool = CASES["gaps"].pool()
    staging = pool.pack(SLOTS)
    for unfit, came in (
        (staging[:-1], f"uint8 [{len(staging) - 1}] on cpu"),
        (staging.view(torch.int8), f"int8 [{len(staging)}] on cpu"),
        (None, "None"),
    ):
        with pytest.raises(ValueError) as error:
            pool.unpack(unfit, SLOTS)
        assert str(error.value) == f"staging must be uint8 [{len(staging)}] for {{'token': 3}} slots, not {came}"
    with pytest.raises(ValueError, match="^a pool on meta holds no bytes to work on$"):
        case = CASES["gaps"]
        compiled(case.spec).Pool(case.layout(), 96, device="meta").pack(SLOTS)


def test_no_slots_at_all() -> None:
    """A space without a page gives zeros for every slot, and takes none."""
    case = Case(SMALL, {"dim": 4})
    for backend in ("torch", "triton"):
        pool = case.pool(backend)
        assert pool.num_bytes() == 0
        copy = pool.save(SLOTS)
        assert not copy["staging"][0].any()
        pool.restore(copy, SLOTS)
        pool.move(SLOTS, SLOTS + 1)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["gaps", "units of a stride", "page of 3"])
def test_memory_that_is_sliced_from_a_slab(name: str, backend: str, random: np.random.Generator) -> None:
    """Bytes are found from where a tensor begins, not from where its memory does."""
    case = CASES[name]
    slab, at = torch.zeros(1 << 20, dtype=torch.uint8), [256]

    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        start, at[0] = at[0], at[0] + -(-nbytes // 256) * 256
        return slab[start : start + nbytes]

    own = case.pool("torch")
    sliced = compiled(case.spec).Pool(case.layout(), case.tokens, allocate=allocate, backend=backend)
    for one, other in zip(own._entries, sliced._entries, strict=True):
        one.memory.random_(0, 256)
        other.memory.copy_(one.memory)
    own.move(SLOTS + 10, SLOTS)
    sliced.move(SLOTS + 10, SLOTS)
    copies = [pool.save(SLOTS) for pool in (own, sliced)]
    assert_same(copies[0]["staging"], copies[1]["staging"])
    for pool, copy in zip((own, sliced), copies, strict=True):
        pool.restore(copy, SLOTS + 20)
    for one, other in zip(own._entries, sliced._entries, strict=True):
        np.testing.assert_array_equal(raw(one.memory), raw(other.memory))
