"""The pools of `mla`, `gqa`, `hybrid_swa` and `shared_kv`: every format and order, planes together or apart.

On both backends; `test_kv_pools_random.py` has all operations in random cases.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import test_other_pools
import torch
from support.models import ROOT, run_whole
from support.reference import interpreted, one_thread
from test_other_pools import DTYPES, Case, Layer, Rule, moved, operations, pools_of, saved_and_restored, spec

from kvgen.compile import compile_spec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NaN in numpy

FIELDS = {
    **dict.fromkeys(["bf16", "fp8"], ["k", "v"]),
    **dict.fromkeys(["int8", "mxfp8", "nvfp4", "nvfp4_swizzled"], ["k", "k_scale", "v", "v_scale"]),
}
ORDERS = {"mxfp8": ["nhd"], "nvfp4_swizzled": ["hnd"]}  # of the others there are both
CONFIG = {"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 64, "v_head_dim": 32}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(11)


NAMES = {"move": "move_kv_cache", "save": "get_cpu_copy", "restore": "load_cpu_copy"}
LATENT = {  # of each format of mla its fields in their order, and how it makes codes
    "bf16": (["latent", "rope"], {}),
    "fp8_scaled": (["latent", "latent_scale", "rope"], {"latent": Rule("latent_scale", 128)}),
    "fp8_raw": (["latent", "rope"], {"latent": Rule(), "rope": Rule()}),
    "nvfp4": (
        ["latent", "latent_scale", "rope"],
        {"latent": Rule("latent_scale", 16, code="e2m1", scales="e4m3", given=0.02)},
    ),
}


def rules(kv_format: str, head_dim: int, v_head_dim: int) -> dict[str, Rule]:
    """How a format makes codes of K and V, by the definitions of the formats in public use."""

    def both(**own: Any) -> dict[str, Rule]:
        return {"k": Rule("k_scale", **own), "v": Rule("v_scale", **own)}

    match kv_format:
        case "bf16":
            return {}
        case "fp8":
            return {"k": Rule(given=0.5, divide=True), "v": Rule(given=0.03, divide=True)}
        case "int8":
            widths = {"k": head_dim, "v": v_head_dim}
            return {name: Rule(f"{name}_scale", width, code="i8", divide=True) for name, width in widths.items()}
        case "mxfp8":
            return both(values=32, power=True, scales="e8m0")
    return both(values=16, code="e2m1", scales="e4m3", given=0.01)


KINDS = [
    (kv_format, order, split)
    for kv_format in FIELDS
    for order in ORDERS.get(kv_format, ["nhd", "hnd"])
    for split in (True, False)
]


@pytest.mark.parametrize(("kv_format", "order", "split"), KINDS)
def test_gqa(kv_format: str, order: str, split: bool, random: np.random.Generator) -> None:
    choices = {"kv_format": kv_format, "kv_order": order, "split_kv": split}
    with pools_of(Case("gqa", CONFIG, choices, tokens=48, names=NAMES), random) as pools:
        row = Layer(pools, "kv", 1, FIELDS[kv_format], rules(kv_format, 64, 32))
        row.store("set_kv_buffer", k="cache_k", v="cache_v")
        row.load("load_kv")
        moved(pools)
        saved_and_restored(pools)


HYBRID = {
    **{"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    **{"num_key_value_heads": 1, "head_dim": 64, "v_head_dim": 32, "sliding_window": 8},
    **{"swa_num_key_value_heads": 3, "swa_head_dim": 32, "swa_v_head_dim": 64},
}


@pytest.mark.parametrize(("kv_format", "order", "split"), KINDS)
def test_hybrid_swa(kv_format: str, order: str, split: bool, random: np.random.Generator) -> None:
    """Layers with a window have heads and widths of their own, and so have the kernels."""
    choices = {"kv_format": kv_format, "kv_order": order, "split_kv": split}
    with pools_of(Case("hybrid_swa", HYBRID, choices, tokens=96, names=NAMES), random) as pools:
        for buffer, layer, widths in (("kv_full", 1, (64, 32)), ("kv_swa", 2, (32, 64))):
            row = Layer(pools, buffer, layer, FIELDS[kv_format], rules(kv_format, *widths))
            row.store("set_kv_buffer", k="cache_k", v="cache_v")
            row.load("load_kv")
        moved(pools)
        saved_and_restored(pools)


# Layers 0 and 2 have windows and 1 and 3 have none; the last two read the first two.
SHARED = {
    **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window_pattern": 2, "sliding_window": 8},
    **{"num_key_value_heads": 2, "head_dim": 64, "v_head_dim": 32},
}


@pytest.mark.parametrize(("kv_format", "order", "split"), KINDS)
def test_shared_kv(kv_format: str, order: str, split: bool, random: np.random.Generator) -> None:
    """What an owner stores, its reader loads; copies and moves are of owners."""
    choices = {"kv_format": kv_format, "kv_order": order, "split_kv": split}
    with pools_of(Case("shared_kv", SHARED, choices, tokens=48, names=NAMES), random) as pools:
        assert {layer for _, _, layer in pools.model.memories} == {0, 1}
        for buffer, owner, reader in (("kv_swa", 0, 2), ("kv_full", 1, 3)):
            row = Layer(pools, buffer, owner, FIELDS[kv_format], rules(kv_format, 64, 32), reader)
            row.store("set_kv_buffer", k="cache_k", v="cache_v")
            row.load("load_kv")
        moved(pools)
        saved_and_restored(pools)


@pytest.mark.parametrize("native", [0, 1, 2], ids=["integers", "native casts", "AMD's casts"])
@pytest.mark.parametrize("kv_format", LATENT)
def test_mla(kv_format: str, native: int, random: np.random.Generator) -> None:
    fields, own = LATENT[kv_format]
    config = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    case = Case("mla", config, {"kv_format": kv_format}, tokens=64, names=NAMES)
    with pools_of(case, random, native=native) as pools:
        row = Layer(pools, "kv", 1, fields, own)
        row.store("set_mla_kv_buffer", latent="cache_k_nope", rope="cache_k_rope")
        row.load("get_mla_kv_buffer", dtypes=DTYPES)
        moved(pools)
        saved_and_restored(pools)


# -- layers that read what others own


def shared_pool(**choices: Any) -> Any:
    return Case("shared_kv", SHARED, choices, tokens=48).pool()


def test_a_reader_stores_nothing() -> None:
    pool = shared_pool()
    values = torch.ones(1, 2, 64).bfloat16(), torch.ones(1, 2, 32).bfloat16()
    for reader, buffer, owner in ((2, "kv_swa", 0), (3, "kv_full", 1)):
        with pytest.raises(ValueError) as error:
            pool.set_kv_buffer(reader, torch.tensor([17]), *values)
        assert str(error.value) == f"layer {reader} reads the `{buffer}` of layer {owner} and stores nothing of its own"
    assert not any(
        pool.buffer(name, layer, plane).any() for name, layer in (("kv_swa", 0), ("kv_full", 1)) for plane in "kv"
    )


def test_a_reader_has_the_tensors_of_its_owner() -> None:
    pool = shared_pool()
    for reader, buffer, owner in ((2, "kv_swa", 0), (3, "kv_full", 1)):
        for plane in "kv":
            assert pool.buffer(buffer, reader, plane).data_ptr() == pool.buffer(buffer, owner, plane).data_ptr()
            field = pool.get_kv_fields(reader)[plane]
            assert field.data_ptr() == pool.buffer(buffer, owner, plane).data_ptr()
    assert pool.buffer("kv_swa", 0, "k").data_ptr() != pool.buffer("kv_full", 1, "k").data_ptr()


@pytest.mark.parametrize("split", [True, False])
def test_addresses_regions_and_copies_are_of_owners(split: bool) -> None:
    """Slots are 48 and 16 reserved; a row of K is 256 bytes, of V 128; readers have zeros where engines list layers."""
    pool = shared_pool(split_kv=split)
    planes = [("k", 256), ("v", 128)] if split else [(None, 384)]
    for infos, name, owner in ((pool.get_contiguous_buf_infos, "kv_full", 1), (pool.get_state_buf_infos, "kv_swa", 0)):
        wanted = [
            (pool.buffer(name, layer, plane).data_ptr(), 64 * row, 16 * row) if layer == owner else (0, 0, 0)
            for plane, row in planes
            for layer in range(4)
        ]
        assert list(zip(*infos(), strict=True)) == wanted
    assert {(own.buffer.partition(".")[0], own.layer) for own in pool.transfer_regions()} == {
        ("kv_full", 1),
        ("kv_swa", 0),
    }
    assert sum(own.nbytes for own in pool.transfer_regions()) == pool.num_bytes() == 2 * 64 * 384
    slots = torch.tensor([17, 20])
    copy = pool.get_cpu_copy({"token": slots, "swa": slots})
    assert copy["layers"] == {"kv_full": [1], "kv_swa": [0]}
    parts = pool.describe_staging({"token": 2, "swa": 2})
    assert sum(part.nbytes for part in parts) == 2 * 2 * 384


# -- slots that are named twice, and that lie far


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kv_format", ["bf16", "int8", "mxfp8", "nvfp4_swizzled"])
def test_a_slot_twice_in_one_store(kv_format: str, backend: str) -> None:
    """Each byte is that of one token or of the other, and nothing else changes."""
    order = "nhd" if kv_format == "mxfp8" else "hnd"
    case = Case("gqa", CONFIG, {"kv_format": kv_format, "kv_order": order, "split_kv": False}, tokens=32)
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(2, 3, width, generator=generator).bfloat16() for width in (64, 32))

    def stored(*tokens: int) -> torch.Tensor:
        pool = case.pool(backend)
        pool.buffer("kv", 1).fill_(0xA5)
        pool.set_kv_buffer(1, torch.full((len(tokens),), 21), k[[*tokens]], v[[*tokens]])
        return pool.buffer("kv", 1)

    with interpreted(races=False):
        one, other, both = stored(0), stored(1), stored(0, 1)
    assert (one != other).any() and ((both == one) | (both == other)).all()


BEYOND = 2**31 // 2048  # the slot that begins at 2^31 bytes: 8 heads of 128 bf16 values


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_slots_beyond_2_31_bytes(order: str, backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is committed where it is touched, for fresh memory is not zeroed a second time."""
    config = {"num_hidden_layers": 1, "num_key_value_heads": 8, "head_dim": 128}
    slots = [1, BEYOND - 1, BEYOND, BEYOND + 17, 2 * BEYOND + 5]
    case = Case("gqa", config, {"kv_order": order}, tokens=2 * BEYOND, guard="right")
    k, v = (torch.arange(5 * 1024).view(5, 8, 128).add(own).bfloat16() for own in (1, 7))
    loc, others = torch.tensor(slots, dtype=dtype), torch.tensor([slot - 1 for slot in slots[::-1]], dtype=dtype)

    def place(slot: int, head: int) -> int:
        """Worked out in Python's integers; a page has 16 slots."""
        page, row = divmod(slot, 16)
        return page * 32768 + (row * 2048 + head * 256 if order == "nhd" else head * 4096 + row * 256)

    def found(plane: str, slots: list[int]) -> torch.Tensor:
        memory = pool.buffer("kv", 0, plane).view(-1)
        rows = [memory[place(slot, head) :][:256] for slot in slots for head in range(8)]
        return torch.stack(rows).view(torch.bfloat16).view(len(slots), 8, 128)

    with interpreted() as sanitizer:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "zero_", lambda memory: memory)
            pool = case.pool(backend)
        entries = [entry.memory for entry in pool._entries]
        pool._table = sanitizer.table(entries, ["k", "v"], torch.int64)
        pool.set_kv_buffer(0, loc, k, v)
        pool.set_kv_buffer(0, torch.tensor([-1, 2 * BEYOND + 16, 2**31 - 1, 0, -(2**31)], dtype=dtype), k, v)
        for plane, own in (("k", k), ("v", v)):
            assert torch.equal(found(plane, slots), own)
        for loaded, own in zip(pool.load_kv(0, loc), (k, v), strict=True):
            assert torch.equal(loaded, own)
        pool.move_kv_cache(others, loc)
        copy = pool.get_cpu_copy(others)
        for plane, own in (("k", k), ("v", v)):
            assert torch.equal(found(plane, others.tolist()), own)
        pool.clear_pages(torch.unique(others // 16))
        assert not found("k", others.tolist()).any() and not found("v", slots[1:2]).any()
        pool.load_cpu_copy(copy, loc)
        assert torch.equal(found("k", slots), k) and torch.equal(found("v", slots), v)


# -- refusals


def wrong(spec: str, config: dict[str, Any], call: Callable[[Any], object], **choices: Any) -> str:
    """How a pool refuses a call; nothing may have changed."""
    pool = Case(spec, config, choices, tokens=32).pool()
    with pytest.raises((ValueError, LookupError)) as error:
        call(pool)
    assert not any(entry.memory.any() for entry in pool._entries)
    return str(error.value.args[0])


K, V, LOC = torch.ones(2, 3, 64).bfloat16(), torch.ones(2, 3, 32).bfloat16(), torch.tensor([17, 18])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda pool: pool.set_kv_buffer(0, LOC, K[:, :2], V),
            "cache_k must be bfloat16 [2, 3, 64], not bfloat16 [2, 2, 64] on cpu",
        ),
        (
            lambda pool: pool.set_kv_buffer(0, LOC, K.flatten(1), V),
            "cache_k must be bfloat16 [2, 3, 64], not bfloat16 [2, 192] on cpu",
        ),
        (
            lambda pool: pool.set_kv_buffer(0, LOC, K, K),
            "cache_v must be bfloat16 [2, 3, 32], not bfloat16 [2, 3, 64] on cpu",
        ),
        (
            lambda pool: pool.set_kv_buffer(0, LOC, K[:1], V),
            "cache_k must be bfloat16 [2, 3, 64], not bfloat16 [1, 3, 64] on cpu",
        ),
        (
            lambda pool: pool.set_kv_buffer(0, LOC, K, V.half()),
            "cache_v must be bfloat16 [2, 3, 32], not float16 [2, 3, 32] on cpu",
        ),
        (lambda pool: pool.set_kv_buffer(0, LOC, K, V.to("meta")), "cache_v must be on cpu, not on meta"),
        (lambda pool: pool.set_kv_buffer(0, LOC, None, V), "cache_k must be bfloat16 [2, 3, 64], not None"),
        (
            lambda pool: pool.set_kv_buffer(0, LOC.short(), K, V),
            "loc must be int32 or int64 with 1 axis, not int16 [2] on cpu",
        ),
        (lambda pool: pool.set_kv_buffer(2, LOC, K, V), "layer_id must be a layer of this pool, [0, 1], not 2"),
        (lambda pool: pool.load_kv(0, LOC[:, None]), "loc must be int32 or int64 with 1 axis, not int64 [2, 1] on cpu"),
        (
            lambda pool: pool.load_kv(0, LOC, torch.int8),
            "dst_dtype must be bfloat16, float16 or float32, not torch.int8",
        ),
        (lambda pool: pool.load_kv(-1, LOC), "layer_id must be a layer of this pool, [0, 1], not -1"),
        (lambda pool: pool.get_kv_fields(5), "layer_id must be a layer of this pool, [0, 1], not 5"),
        (lambda pool: pool.buffer("kv", 0), "`kv` has the planes ['k', 'v'], not `None`"),
        (
            lambda pool: pool.move_kv_cache(LOC, LOC[:1]),
            "tgt_loc and src_loc must agree in slots: {'token': 2} and {'token': 1}",
        ),
        (
            lambda pool: pool.get_cpu_copy({"tokens": LOC}),
            "loc must be a mapping with an entry for each of the spaces token, not for 'tokens'",
        ),
        (
            lambda pool: pool.clear_pages(torch.ones(1)),
            "pages must be int32 or int64 with 1 axis, not float32 [1] on cpu",
        ),
    ],
)
def test_what_gqa_refuses(call: Callable[[Any], object], message: str) -> None:
    assert wrong("gqa", CONFIG, call) == message


@pytest.mark.parametrize("spec", ["hybrid_swa", "shared_kv"])
def test_a_copy_of_another_format(spec: str) -> None:
    """What lies in a page decides, and not how long it is: fp8 pages are as long in both orders."""
    config = {"hybrid_swa": HYBRID, "shared_kv": SHARED}[spec]
    both = {"token": LOC, "swa": LOC}
    copy = Case(spec, config, {"kv_format": "fp8"}, tokens=32).pool().get_cpu_copy(both)
    message = wrong(spec, config, lambda pool: pool.load_cpu_copy(copy, both), kv_format="fp8", kv_order="hnd")
    came = "choices.kv_order is 'nhd' in the copy and 'hnd' here"
    assert message == f"copy must be of this layout, rank and number of slots: {came}"


# -- faults that are planted in kernels

STORE, LOAD = "_store_nvfp4_hnd_kernel", "_load_nvfp4_hnd_kernel"
FAULTS = [
    ("gqa", STORE, " & (slot < num_slots)", "", "OUT-OF-BOUNDS|WILD"),
    ("gqa", STORE, "(slot >= first_slot) & ", "", "OUT-OF-BOUNDS|WILD"),
    ("gqa", STORE, "slot % PAGE_SLOTS * (HEAD_DIM // 2)", "slot % PAGE_SLOTS * (HEAD_DIM // 4)", "RACE|DUPLICATE"),
    ("gqa", STORE, "v_row_ptr = v_memory_ptr", "v_row_ptr = k_memory_ptr", "RACE|DUPLICATE|instead of"),
    (
        "gqa",
        STORE,
        "mask=kept[:, None] & (row < ((HEAD_DIM // 16) * HEADS))",
        "mask=kept[:, None]",
        "OUT-OF-BOUNDS|RACE",
    ),
    ("gqa", LOAD, "kept = (slot >= 0) & (slot < num_slots)", "kept = inside", "OUT-OF-BOUNDS|WILD"),
    ("gqa", LOAD, "mask=inside[:, None, None] & ", "mask=", "OUT-OF-BOUNDS"),
    ("gqa", "_packed", "low | (high << 4)", "high | (low << 4)", "not equal|instead of"),
    ("gqa", "_pack_kernel", "kept = (slot >= 0)", "kept = (slot >= -(2**62))", "OUT-OF-BOUNDS|WILD"),
    ("gqa", "_unpack_kernel", " & (held != 0)", "", "instead of"),
    ("mla", "_store_mla_nvfp4_kernel", "(row_ptr + 304)", "(row_ptr + 303)", "MISALIGNED"),
    ("mla", "_store_mla_nvfp4_kernel", "(row_ptr + 256)", "(row_ptr + 272)", "instead of"),
    ("mla", "_load_mla_nvfp4_kernel", "row_ptr + 256", "row_ptr + 255", "not equal"),
]


@pytest.mark.parametrize(("layout", "kernel", "before", "after", "found"), FAULTS)
def test_a_fault_in_a_kernel_is_found(
    layout: str,
    kernel: str,
    before: str,
    after: str,
    found: str,
    random: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planted(text: str) -> str:
        head, start, rest = text.partition(f"def {kernel}(")
        body, end, tail = rest.partition("\n\n\n")
        assert before in body
        return f"{head}{start}{body.replace(before, after)}{end}{tail}"

    module = run_whole(layout, lambda file: (ROOT / "specs" / file).read_bytes(), planted)
    monkeypatch.setattr(test_other_pools, "compiled", lambda spec: module)
    config = {**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64} if layout == "mla" else CONFIG
    choices = {"kv_format": "nvfp4"} | ({} if layout == "mla" else {"kv_order": "hnd"})
    with (
        pytest.raises(AssertionError, match=found),
        pools_of(Case(layout, config, choices, 64, names=NAMES), random) as pools,
    ):
        if layout == "mla":
            row = Layer(pools, "kv", 1, *LATENT["nvfp4"])
            row.store("set_mla_kv_buffer", latent="cache_k_nope", rope="cache_k_rope")
            row.load("get_mla_kv_buffer")
        else:
            row = Layer(pools, "kv", 1, FIELDS["nvfp4"], rules("nvfp4", 64, 32))
            row.store("set_kv_buffer", k="cache_k", v="cache_v")
            row.load("load_kv")
        moved(pools)
        saved_and_restored(pools)


# -- slots of windows


@pytest.mark.parametrize("spec", ["hybrid_swa", "shared_kv"])
@pytest.mark.parametrize(
    "choices", [{"swa_pool": "requests"}, {"swa_ratio": 0}, {"swa_ratio": 1}], ids=["requests", "none", "as many"]
)
def test_slots_of_windows_are_named(spec: str, choices: dict[str, Any]) -> None:
    """Whatever their number follows from: with the slots of tokens alone, half of the layers would be left out."""
    pool = Case(spec, {"hybrid_swa": HYBRID, "shared_kv": SHARED}[spec], choices, tokens=48, requests=2).pool()
    slots = torch.tensor([17, 18])
    copy = pool.get_cpu_copy({"token": slots, "swa": slots[:0]})
    for name, call in {
        "tgt_loc": lambda: pool.move_kv_cache(slots, slots),
        "loc": lambda: pool.get_cpu_copy(slots),
        "pages": lambda: pool.clear_pages(slots),
        "n": lambda: pool.describe_staging(2),
    }.items():
        with pytest.raises(ValueError) as error:
            call()
        needed = "must be a mapping with an entry for each of the spaces token, swa"
        assert str(error.value) == f"{name} {needed}, not {2 if name == 'n' else 'int64 [2] on cpu'}"
    for left_out in (slots, {"token": slots}):
        with pytest.raises(ValueError, match="^loc must be a mapping"):
            pool.load_cpu_copy(copy, left_out)
    pool.load_cpu_copy(copy, {"token": slots, "swa": slots[:0]})


# Codes of every kind, scales of every kind, in orders in which values are not side by side.
CODES = {
    "a": Rule("a_scale", 16, code="e2m1", scales="e4m3", given=0.02),
    "b": Rule("b_scale", 32, code="e2m1", scales="e8m0", power=True),
    "c": Rule("c_scale", 4, code="e2m1", scales="f32", divide=True, floor=0.25),
    "d": Rule("d_scale", 48, code="i8"),
    "e": Rule("e_scale", 16, code="i8", scales="e4m3", divide=True),
    "f": Rule("f_scale", 24, scales="e4m3", given=3.0),
    "g": Rule("g_scale", 8, scales="f32", given=0.125, floor=1e-30, divide=True),
    "h": Rule(given=0.3),
    "i": Rule(given=0.007, code="i8", divide=True),
    "j": Rule("j_scale", 8, code="i8", scales="e8m0", power=True, given=0.5),
}
QUANTS = {
    "a": "e2m1[heads, dim] scale: a_scale, outer: given",
    "b": "e2m1[wide] scale: b_scale",
    "c": "e2m1[heads, dim] scale: c_scale, code: divide, floor: 0.25",
    "d": "i8[heads, dim] scale: d_scale",
    "e": "i8[heads, dim] scale: e_scale, code: divide",
    "f": "e4m3[heads, dim] scale: f_scale, outer: given",
    "g": "e4m3[wide] scale: g_scale, outer: given, floor: 1e-30, code: divide",
    "h": "e4m3[heads, dim] scale: given",
    "i": "i8[7] scale: given, code: divide",
    "j": "i8[heads, dim] scale: j_scale, outer: given",
}
SCALES = {
    "a_scale": "e4m3[heads, dim//16]",
    "b_scale": "e8m0[wide//32]",
    "c_scale": "f32[heads, dim//4]",
    "d_scale": "f32[heads]",
    "e_scale": "e4m3[heads, dim//16]",
    "f_scale": "e4m3[heads, dim//24]",
    "g_scale": "f32[wide//8]",
    "j_scale": "e8m0[heads, dim//8]",
}
PAGES = {
    "rows": """
    - [a, a_scale, b, b_scale, {align: 4}, c, {align: 4}, c_scale]
    - [d, {align: 4}, d_scale, e, e_scale, {align: 4}, f, f_scale, {align: 4}]
    - [{align: 4}, g_scale, g, h, i, j, j_scale, {align: 4}]
""",
    "heads": """
    - {each: [heads, slot], put: [a, a_scale]}
    - {each: [slot, wide//32], put: [b_scale, b]}
    - {align: 4}
    - {each: [heads, dim//4, slot], put: [c_scale, c, {align: 4}]}
    - {each: [heads, slot], put: [d_scale, d]}
    - {each: [heads, dim//16, slot, dim%16], put: [e]}
    - {each: [heads, slot//4, dim//16, slot%4], put: [e_scale]}
    - {each: [slot, dim//24], put: ["f[heads, dim%24]", f_scale]}
    - {align: 4}
    - {each: [wide//8, slot], put: [g_scale]}
    - {each: [slot, wide], put: [g]}
    - {each: [heads, slot], put: [h, j]}
    - {each: [slot//2, slot%2], put: [i, {pad: 1}]}
    - [j_scale]
""",
}


def codes_spec(order: str, split: bool) -> str:
    types = {name: text.split("] ", 1) for name, text in QUANTS.items()}
    fields = [f'{name}: {{type: "{type}]", quant: {{{quant}}}}}' for name, (type, quant) in types.items()]
    fields += [f'{name}: "{type}"' for name, type in SCALES.items()]
    lines = "\n".join(f"    {line}" for line in fields)
    return spec(
        f"codes_{order}_{split}".lower(),
        f"row:\n  fields:\n{lines}\n  page:{PAGES[order].rstrip()}",
        f"kv: {{format: row, space: token, layers: all, split: {str(split).lower()}}}",
        let="heads: 3\ndim: 48\nwide: 96",
        operations=operations("kv", list(QUANTS), [*QUANTS, *SCALES]),
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("order", PAGES)
@pytest.mark.parametrize("native", [0, 1, 2], ids=["integers", "native casts", "AMD's casts"])
def test_codes_and_scales(order: str, split: bool, native: int, random: np.random.Generator) -> None:
    with pools_of(Case(codes_spec(order, split), tokens=32, count=10), random, native=native) as pools:
        row = Layer(pools, "kv", 1, [*QUANTS, *SCALES], CODES)
        if native:
            row.store()
        else:
            row.everything()
            row.load(dtypes=DTYPES)  # codes and scales of any bits


# -- scales that are given


def gqa_pool(kv_format: str, **choices: Any) -> Any:
    config = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 32, "v_head_dim": 16}
    return Case("gqa", config, {"kv_format": kv_format, **choices}, tokens=16).pool()


ONES = torch.ones(1, 1, 32, dtype=torch.bfloat16), torch.ones(1, 1, 16, dtype=torch.bfloat16)


def test_scales_that_are_given() -> None:
    """8 over 0.25 is 32, whose e4m3 code is 0x60; a scale may be a number, or float32 of one element, or none."""
    pool = gqa_pool("fp8")
    keys, values = ONES[0] * 8, ONES[1] * 8
    for k_scale, v_scale in ((0.25, None), (torch.tensor(0.25), 1), (torch.tensor([[0.25]]), torch.ones(1))):
        pool.set_kv_buffer(0, torch.tensor([3]), keys, values, k_scale, v_scale)
        fields = pool.get_kv_fields(0)
        assert fields["k"].view(torch.uint8)[0, 3].eq(0x60).all() and fields["v"].view(torch.uint8)[0, 3].eq(0x50).all()
        k, v = pool.load_kv(0, torch.tensor([3]), k_scale=0.25)
        assert torch.equal(k, keys) and torch.equal(v, values)
    assert pool.load_kv(0, torch.tensor([3]))[0].eq(32).all()


def test_codes_are_stored_as_they_are() -> None:
    pool = gqa_pool("fp8")
    codes = torch.arange(48, dtype=torch.uint8).view(torch.float8_e4m3fn)
    pool.set_kv_buffer(0, torch.tensor([5]), codes[None, None, :32], codes[None, None, 32:], 0.5, 0.5)
    fields = pool.get_kv_fields(0)
    stored = torch.cat([fields[name].view(torch.uint8)[0, 5, 0] for name in ("k", "v")])
    assert stored.tolist() == list(range(48))


@pytest.mark.parametrize(
    ("kv_format", "scale", "message"),
    [
        ("bf16", 0.5, "k_scale must be None: `bf16_nhd` takes no such scale"),
        ("int8", torch.ones(1), "k_scale must be None: `int8_nhd` takes no such scale"),
        ("fp8", 0, "k_scale must be a number above 0 or float32 with one element, not 0"),
        ("fp8", -1.0, "k_scale must be a number above 0 or float32 with one element, not -1.0"),
        ("fp8", float("nan"), "k_scale must be a number above 0 or float32 with one element, not nan"),
        ("fp8", True, "k_scale must be a number above 0 or float32 with one element, not True"),
        ("fp8", "1", "k_scale must be a number above 0 or float32 with one element, not '1'"),
        ("fp8", torch.ones(2), "k_scale must be a number above 0 or float32 with one element, not float32 [2] on cpu"),
        (
            "fp8",
            torch.ones(1).double(),
            "k_scale must be a number above 0 or float32 with one element, not float64 [1] on cpu",
        ),
        ("nvfp4", torch.ones(1, device="meta"), "k_scale must be on cpu, not on meta"),
    ],
)
def test_scales_that_cannot_be(kv_format: str, scale: Any, message: str) -> None:
    pool = gqa_pool(kv_format)
    for run in (
        lambda: pool.set_kv_buffer(0, torch.tensor([1]), *ONES, k_scale=scale),
        lambda: pool.load_kv(0, torch.tensor([1]), k_scale=scale),
    ):
        with pytest.raises(ValueError) as error:
            run()
        assert str(error.value) == message
    assert not any(field.view(torch.uint8).any() for field in pool.get_kv_fields(0).values())


# -- planes


def test_planes_apart_and_together() -> None:
    """Engines ask for addresses: a list of K of every layer and then V, or one of pages that hold both."""
    layers = {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 32, "v_head_dim": 16}
    apart = Case("gqa", layers, {"split_kv": True}, tokens=16).pool()
    ptrs, lens, item_lens = apart.get_contiguous_buf_infos()
    tensors = [apart.buffer("kv", layer, plane) for plane in ("k", "v") for layer in (0, 1)]
    assert ptrs == [tensor.data_ptr() for tensor in tensors]
    assert lens == [2048, 2048, 1024, 1024] and item_lens == [1024, 1024, 512, 512]  # 2 pages of 16 slots
    together = Case("gqa", layers, {"split_kv": False}, tokens=16).pool()
    ptrs, lens, item_lens = together.get_contiguous_buf_infos()
    assert ptrs == [together.buffer("kv", layer).data_ptr() for layer in (0, 1)]
    assert lens == [3072, 3072] and item_lens == [1536, 1536]
    for pool in (apart, together):
        fields = pool.get_kv_fields(1)
        assert {name: list(field.shape) for name, field in fields.items()} == {"k": [2, 16, 1, 32], "v": [2, 16, 1, 16]}


def test_addresses_of_two_buffers() -> None:
    """Each space has a list of its own, with zeros for layers of the other; what a stage does not hold is not there."""
    pool = Case("hybrid_swa", HYBRID, {"end_layer": 2}, tokens=96).pool()
    # 48 + 16 slots of 3 x 32 and 3 x 64 values, 96 + 16 of 64 and of 32
    for infos, name, layer, lens in (
        (pool.get_contiguous_buf_infos, "kv_full", 1, [0, 112 * 128, 0, 112 * 64]),
        (pool.get_state_buf_infos, "kv_swa", 0, [64 * 192, 0, 64 * 384, 0]),
    ):
        ptrs = [pool.buffer(name, layer, plane).data_ptr() for plane in ("k", "v")]
        assert [ptr for ptr in infos()[0] if ptr] == ptrs
        assert infos()[1] == lens


def test_views_of_planes_are_refused() -> None:
    text = codes_spec("rows", True).replace("operations:\n", "operations:\n  rows: {view: [kv]}\n")
    found = compile_spec("own.yaml", lambda file: text.encode())
    assert [problem.message for problem in found.problems] == ["`rows` cannot show pages of `kv`"]
    assert found.problems[0].code == "KV250" and found.problems[0].help == "write `as: fields`"
