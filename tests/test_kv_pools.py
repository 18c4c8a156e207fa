"""The pools of `mla`, `gqa`, `hybrid_swa` and `shared_kv`: every format and order, planes together or apart.

On both backends; `test_kv_pools_random.py` has all operations in random cases.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import one_thread
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


@pytest.mark.parametrize("native", [False, True], ids=["integers", "native casts"])
@pytest.mark.parametrize("kv_format", LATENT)
def test_mla(kv_format: str, native: bool, random: np.random.Generator) -> None:
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
    ptrs, lens, item_lens = pool.get_contiguous_buf_infos()
    planes = [("k", 256), ("v", 128)] if split else [(None, 384)]
    wanted = [
        (pool.buffer(name, layer, plane).data_ptr() if owns else 0, 64 * row * owns, 16 * row * owns)
        for plane, row in planes
        for name, layer, owns in (("kv_swa", 0, 1), ("kv_full", 1, 1), ("kv_swa", 2, 0), ("kv_full", 3, 0))
    ]
    assert list(zip(ptrs, lens, item_lens, strict=True)) == wanted
    assert {(own.buffer.partition(".")[0], own.layer) for own in pool.transfer_regions()} == {
        ("kv_full", 1),
        ("kv_swa", 0),
    }
    assert sum(own.nbytes for own in pool.transfer_regions()) == pool.num_bytes() == 2 * 64 * 384
    slots = torch.tensor([17, 20])
    copy = pool.get_cpu_copy({"token": slots, "swa": slots})
    assert copy["layers"] == {"kv_full": (1,), "kv_swa": (0,)}
    parts = pool.describe_staging({"token": 2, "swa": 2})
    assert sum(part.nbytes for part in parts) == 2 * 2 * 384


# -- slots of windows


@pytest.mark.parametrize("spec", ["hybrid_swa", "shared_kv"])
@pytest.mark.parametrize(
    "choices", [{"swa_pool": "requests"}, {"swa_ratio": 0}, {"swa_ratio": 1}], ids=["requests", "none", "as many"]
)
def test_slots_of_windows_are_named(spec: str, choices: dict[str, Any]) -> None:
    """Whatever their number follows from: with the slots of tokens alone, half of the layers would be left out."""
    pool = Case(spec, {"hybrid_swa": HYBRID, "shared_kv": SHARED}[spec], choices, tokens=48, requests=2).pool()
    slots = torch.tensor([17, 18])
    copy = pool.get_cpu_copy({"token": slots})
    for name, call in {
        "tgt_loc": lambda: pool.move_kv_cache(slots, slots),
        "loc": lambda: pool.get_cpu_copy(slots),
        "pages": lambda: pool.clear_pages(slots),
        "n": lambda: pool.describe_staging(2),
    }.items():
        with pytest.raises(ValueError) as error:
            call()
        needed = "must be a mapping by the names of spaces that number slots apart: ['token', 'swa']"
        assert str(error.value) == f"{name} {needed}"
    with pytest.raises(ValueError, match="^loc must be a mapping"):
        pool.load_cpu_copy(copy, slots)
    pool.load_cpu_copy(copy, {"token": slots})


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
@pytest.mark.parametrize("native", [False, True], ids=["integers", "native casts"])
def test_codes_and_scales(order: str, split: bool, native: bool, random: np.random.Generator) -> None:
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
    """Each layer has its own; what a stage does not hold is not there."""
    pool = Case("hybrid_swa", HYBRID, {"end_layer": 2}, tokens=96).pool()
    ptrs, lens, _ = pool.get_contiguous_buf_infos()
    planes = [("kv_swa", 0, "k"), ("kv_full", 1, "k"), ("kv_swa", 0, "v"), ("kv_full", 1, "v")]
    assert ptrs == [pool.buffer(name, layer, plane).data_ptr() for name, layer, plane in planes]
    # 48 + 16 slots of 3 x 32 and 3 x 64 values, 96 + 16 of 64 and of 32
    assert lens == [64 * 192, 112 * 128, 64 * 384, 112 * 64]


def test_views_of_planes_are_refused() -> None:
    text = codes_spec("rows", True).replace("operations:\n", "operations:\n  rows: {view: [kv]}\n")
    found = compile_spec("own.yaml", lambda file: text.encode())
    assert [problem.message for problem in found.problems] == ["`rows` cannot show pages of `kv`"]
    assert found.problems[0].code == "KV250" and found.problems[0].help == "write `as: fields`"
