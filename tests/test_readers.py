"""Layers that keep nothing of a buffer and read what the nearest owner before them keeps.

`golden/readers` is such a layout with every operation. Public cases that are about sharing have their names.
"""

import io
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import LANGUAGE, ROOT, language_module, problem_lines
from support.reference import interpreted, one_thread
from test_other_pools import assert_same, compiled, spec

from kvgen.budget import readers_text
from kvgen.cli import main

READERS = compiled("readers")
GEMMA3N = {"num_hidden_layers": 35, "num_kv_shared_layers": 15, "num_key_value_heads": 2, "head_dim": 256}
DSV41 = {
    "num_hidden_layers": 40,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "compress_ratios": [0, 0] + [1] * 38,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2],
}
SHARED = {"num_hidden_layers": 15, "num_kv_shared_layers": 6, "num_draft_layers": 1}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def gemma3n(shared: int = 15, **choices: Any) -> Any:
    return language_module("gemma3n").Layout.from_config({**GEMMA3N, "num_kv_shared_layers": shared}, **choices)


def readers_of(layout: Any) -> dict[str, dict[int, int]]:
    return {buffer.name: dict(buffer.readers) for buffer in layout.buffers}


# -- public cases


def test_50_shared_layers_read_the_last_of_their_kind() -> None:
    """transformers 39764: 35 layers, the last 15 shared, full attention at i mod 5 = 4, 2 heads of 256 bf16 values."""
    layout = gemma3n()
    assert language_module("gemma3n").cell_size(layout) == 40_960 == 20 * 2 * 2 * 256 * 2
    assert language_module("gemma3n").cell_size(gemma3n(0)) == 71_680
    assert layout.layers("kv_full") == (4, 9, 14, 19)
    assert layout.layers("kv_swa") == (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 15, 16, 17, 18)
    assert readers_of(layout) == {
        "kv_full": {24: 19, 29: 19, 34: 19},
        "kv_swa": dict.fromkeys((20, 21, 22, 23, 25, 26, 27, 28, 30, 31, 32, 33), 18),
    }
    assert [layout.owner("kv_swa", layer) for layer in (20, 33, 18, 0)] == [18, 18, 18, 0]
    assert [layout.owner("kv_full", layer) for layer in (24, 29, 34, 19, 4)] == [19, 19, 19, 19, 4]


def test_62_a_layer_reads_the_nearest_source_before_it() -> None:
    """pollard-weights 80: 40 layers with sources 2, 8, 14 and 20; layer 13 reads 8, not 2 and not 14."""
    layout = language_module("dsv41").Layout.from_config(DSV41)
    assert layout.layers("kv_1") == (2, 8, 14, 20)
    owners = [layout.owner("kv_1", layer) for layer in range(2, 40)]
    assert owners == [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert layout.owner("kv_1", 13) == 8
    assert layout.owner("index_1", 39) == 2
    for layer in (0, 1):
        with pytest.raises(LookupError, match=f"layer {layer} has no `kv_1` here"):
            layout.owner("kv_1", layer)


@pytest.mark.parametrize(("shared", "owners"), [(0, 30), (10, 20)])
def test_107_no_shared_layers_are_no_owners_less(shared: int, owners: int) -> None:
    """transformers 46235: a slice up to -0 is empty."""
    config = {**GEMMA3N, "num_hidden_layers": 30, "num_kv_shared_layers": shared}
    layout = language_module("gemma3n").Layout.from_config(config)
    assert len(layout.layers("kv_full")) + len(layout.layers("kv_swa")) == owners
    assert sum(map(len, readers_of(layout).values())) == 30 - owners


@pytest.mark.parametrize("shared", [30, 31])
def test_108_layers_that_are_all_shared_are_refused(shared: int) -> None:
    """vllm 48365: there is nothing before the first layer to read, and no layer -1."""
    config = {**GEMMA3N, "num_hidden_layers": 30, "num_kv_shared_layers": shared}
    with pytest.raises(ValueError) as error:
        language_module("gemma3n").Layout.from_config(config)
    assert problem_lines(error) == ["gemma3n: every layer shares and none owns KV"]


# -- stages, roles and models that part a reader from its owner


def test_a_stage_holds_a_reader_and_its_owner_or_neither() -> None:
    """Layers 20 to 34 read 18 and 19."""
    assert readers_of(gemma3n(end_layer=20)) == {"kv_full": {}, "kv_swa": {}}
    assert readers_of(gemma3n(start_layer=18)) == readers_of(gemma3n())
    assert readers_of(gemma3n(start_layer=17, end_layer=21)) == {"kv_full": {}, "kv_swa": {20: 18}}
    assert gemma3n(start_layer=18).layers("kv_full") == (19,)


@pytest.mark.parametrize(
    ("choices", "lines"),
    [
        ({"start_layer": 19}, ["layer 20 reads the `kv_swa` of layer 18"]),
        (
            {"start_layer": 20},
            ["layer 24 reads the `kv_full` of layer 19", "layer 20 reads the `kv_swa` of layer 18"],
        ),
        ({"start_layer": 29, "end_layer": 30}, ["layer 29 reads the `kv_full` of layer 19"]),
    ],
)
def test_a_stage_without_the_owner_is_refused(choices: dict[str, int], lines: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        gemma3n(**choices)
    rest = ", which is not held here; a pool holds both or neither"
    places = [f"(buffers.{line.split('`')[1]} of gemma3n.yaml)" for line in lines]
    assert problem_lines(error) == [f"gemma3n: {line}{rest} {place}" for line, place in zip(lines, places, strict=True)]


def test_a_model_without_an_owner_before_a_reader_is_refused() -> None:
    """12 of 15 layers shared leave 0 to 2, none of them full; held elsewhere, the reader is no problem of this pool."""
    config = {**SHARED, "num_kv_shared_layers": 12}
    with pytest.raises(ValueError) as error:
        READERS.Layout.from_config(config)
    line = "layer 4 reads the `kv_full` of an owner before it, and there is none"
    assert problem_lines(error) == [f"readers: {line} (buffers.kv_full of golden_readers.yaml)"]
    assert readers_of(READERS.Layout.from_config(config, end_layer=4))["kv_swa"] == {3: 2}


DRAFTS = spec(
    "drafts_that_read",
    "row: {fields: {k: 'bf16[4]'}, page: [[k]]}",
    "kv: {format: row, space: token, layers: body, readers: draft}\nkv_own: {format: row, space: token, layers: draft}",
    layers="body: 3\ndraft: 2",
)


def test_draft_layers_may_read_the_body_where_both_are_held() -> None:
    layout = compiled(DRAFTS).Layout.from_config({}, role="both")
    assert readers_of(layout) == {"kv": {3: 2, 4: 2}, "kv_own": {}}
    assert readers_of(compiled(DRAFTS).Layout.from_config({})) == {"kv": {}, "kv_own": {}}
    with pytest.raises(ValueError) as error:
        compiled(DRAFTS).Layout.from_config({}, role="draft")
    line = "layer 3 reads the `kv` of layer 2, which is not held here; a pool holds both or neither"
    assert problem_lines(error) == [f"drafts_that_read: {line} (buffers.kv of drafts_that_read.yaml)"]


# -- the nearest owner of any model

ANY = compiled(
    spec(
        "any_readers",
        "row: {fields: {k: 'bf16[4]'}, page: [[k]]}",
        "kv: {format: row, space: token, layers: layer in owners, readers: layer in readers}",
        config="n: {type: int}\ndrafts: {type: int}\nowners: {type: list, of: int}\nreaders: {type: list, of: int}",
        layers="body: n\ndraft: drafts",
    )
)


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    body, drafts = draw(st.integers(0, 8)), draw(st.integers(0, 3))
    ids = st.lists(st.integers(0, body + drafts + 1), max_size=12)
    config = {"n": body, "drafts": drafts, "owners": draw(ids), "readers": draw(ids)}
    start, end = sorted((draw(st.integers(0, body + drafts)), draw(st.integers(0, body + drafts))))
    stage = draw(st.sampled_from([{}, {"start_layer": start, "end_layer": end}]))
    return config, {"role": draw(st.sampled_from(["target", "draft", "both"])), **stage}


@settings(max_examples=600, deadline=None)
@given(models())
def test_the_owner_is_the_nearest_before_the_layer(model: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Counted down from the layer; a model is refused that has none held here, and every owner missed is named."""
    config, choices = model
    body, count = config["n"], config["n"] + config["drafts"]
    wanted, missing = {}, {}
    held = [
        layer
        for layer in range(choices.get("start_layer", 0), choices.get("end_layer", count))
        if choices["role"] == "both" or (choices["role"] == "draft") == (layer >= body)
    ]
    for layer in held:
        if layer in config["owners"]:
            wanted[layer] = layer
        elif layer in config["readers"]:
            owner = layer - 1
            while owner >= 0 and owner not in config["owners"]:
                owner -= 1
            if owner in held:
                wanted[layer] = owner
            else:
                missing.setdefault(owner, layer)
    if missing:
        with pytest.raises(ValueError) as error:
            ANY.Layout.from_config(config, **choices)
        found = [
            re.match(r"any_readers: layer (\d+) reads .*? of (?:layer (\d+)|an)", own) for own in problem_lines(error)
        ]
        assert {int(own[2] or -1): int(own[1]) for own in found} == missing
        return
    layout = ANY.Layout.from_config(config, **choices)
    assert layout.layers("kv") == tuple(layer for layer, owner in wanted.items() if layer == owner)
    for layer in range(-1, count + 2):
        if layer in wanted:
            assert layout.owner("kv", layer) == wanted[layer]
        else:
            with pytest.raises(LookupError, match=f"layer {layer} has no `kv` here"):
                layout.owner("kv", layer)
    assert ANY.Pool(layout, 64, "meta").num_bytes() == ANY.bytes_for(layout, 64) == 9 * 64 * len(layout.layers("kv"))


# -- layouts as values


def test_the_owner_of_another_layer_names_owners_and_readers() -> None:
    layout = READERS.Layout.from_config(SHARED, role="both")
    with pytest.raises(LookupError) as error:
        layout.owner("kv_full", 5)
    message = "layer 5 has no `kv_full` here; [4] own one, [9, 14] read that of another"
    assert error.value.args == (message,)
    with pytest.raises(LookupError, match="did you mean `kv_full`"):
        layout.owner("kv_ful", 4)
    assert layout.owner("kv_draft", 15) == 15


def test_layouts_with_readers_are_values() -> None:
    layout, again = gemma3n(), gemma3n()
    assert layout == again and hash(layout) == hash(again) and layout.fingerprint == again.fingerprint
    sent = pickle.loads(pickle.dumps(layout))
    assert sent == layout and hash(sent) == hash(layout) and sent.fingerprint == layout.fingerprint
    assert [sent.owner("kv_swa", layer) for layer in (20, 18)] == [18, 18]


def test_fingerprints_tell_readers_and_pages_do_not() -> None:
    """Three modules: readers of one kind, of another, and none. A page is the same in each."""
    texts = [
        spec(
            "one_name",
            "row: {fields: {k: 'bf16[4]'}, page: [[k]]}",
            f"kv: {{format: row, space: token, layers: layer == 0{readers}}}",
            layers="body: 4",
        )
        for readers in (", readers: all", ", readers: layer > 1", "")
    ]
    modules = [compiled(text) for text in texts]
    layouts = [module.Layout.from_config({}) for module in modules]
    assert len({module.LAYOUT_FINGERPRINT for module in modules}) == 3
    assert len({layout.fingerprint for layout in layouts}) == 3
    assert len({layout.page_fingerprint("kv") for layout in layouts}) == 1
    assert len({module.cell_size(layout) for module, layout in zip(modules, layouts, strict=True)}) == 1
    stages = [modules[0].Layout.from_config({}, end_layer=end) for end in (2, 3)]  # the same owner, other readers
    assert stages[0].layers("kv") == stages[1].layers("kv") == (0,)
    assert stages[0].fingerprint != stages[1].fingerprint
    assert not hasattr(modules[2].Layout, "owner")  # nothing is there for what a spec does not have


# -- pools


@pytest.fixture
def pools() -> Iterator[tuple[Any, Any]]:
    """A pool of each backend, with 9 layers that own, 6 that read and a draft layer."""
    layout = READERS.Layout.from_config(SHARED, role="both")
    with interpreted() as sanitizer:
        one, other = (READERS.Pool(layout, 12, backend=backend) for backend in ("torch", "triton"))
        names = [f"{entry.name} {entry.layer}" for entry in other._entries]
        other._table = sanitizer.table([entry.memory for entry in other._entries], names, torch.int64)
        yield one, other


READS = {9: 4, 14: 4, 10: 8, 11: 8, 12: 8, 13: 8}


def values(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens, apart from each other and from 0."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.rand(count, 4, generator=random).add(1).to(torch.bfloat16) for _ in range(2))


def test_what_an_owner_stores_its_readers_load(pools: tuple[Any, Any]) -> None:
    """By every operation that reads, on both backends; each owner has bytes of its own."""
    slots = torch.tensor([5, 4, 15, 7])
    pages = torch.tensor([[1, 3]])
    for pool in pools:
        for owner in (4, 8, 7, 15):
            pool.set_kv(owner, slots, *values(owner, 4))
        for layer, owner in {**READS, 7: 7, 4: 4, 15: 15}.items():
            k, v = pool.get_kv(layer, slots)
            torch.testing.assert_close(v[:, 0], values(owner, 4)[1], rtol=0, atol=0)
            torch.testing.assert_close(k[:, 0], values(owner, 4)[0], rtol=2**-3, atol=0)  # 3 bits of mantissa
            for operation, arguments in (
                ("get_kv", (slots,)),
                ("get_raw", (slots,)),
                ("gather_raw", (torch.tensor([7]), pages)),
            ):
                assert_same(getattr(pool, operation)(layer, *arguments), getattr(pool, operation)(owner, *arguments))
            for view in ("pages_of", "rows_of"):
                assert getattr(pool, view)(layer).data_ptr() == getattr(pool, view)(owner).data_ptr()
            for name, field in pool.fields_of(layer).items():
                assert field.data_ptr() == pool.fields_of(owner)[name].data_ptr()
    for name, layer in (("kv_full", 14), ("kv_swa", 10), ("kv_draft", 15)):
        np.testing.assert_array_equal(*(pool.buffer(name, layer).numpy() for pool in pools))
    assert pools[0].buffer("kv_full", 14).any()


def test_what_is_put_for_an_owner_its_readers_get(pools: tuple[Any, Any]) -> None:
    slots = torch.tensor([6, 9])
    k = torch.arange(8, dtype=torch.uint8).view(2, 4).view(torch.float8_e4m3fn)
    scale, v = torch.tensor([[0.5], [2.0]]), values(3, 2)[1]
    for pool in pools:
        pool.put_raw(8, slots, k, scale, v)
        found = pool.get_raw(13, slots)
        for stored, own in zip(found, (k, scale, v), strict=True):
            np.testing.assert_array_equal(stored.numpy(), own.contiguous().view(torch.uint8).view(2, -1).numpy())


@pytest.mark.parametrize(("layer", "buffer", "owner"), [(9, "kv_full", 4), (14, "kv_full", 4), (13, "kv_swa", 8)])
def test_a_reader_stores_nothing(pools: tuple[Any, Any], layer: int, buffer: str, owner: int) -> None:
    message = f"layer {layer} reads the `{buffer}` of layer {owner} and stores nothing of its own"
    slots = torch.tensor([5])
    k, v = values(1, 1)
    for pool in pools:
        for call in (
            lambda pool=pool: pool.set_kv(layer, slots, k, v),
            lambda pool=pool: pool.put_raw(layer, slots, k.to(torch.float8_e4m3fn), torch.ones(1, 1), v),
        ):
            with pytest.raises(ValueError) as error:
                call()
            assert error.value.args == (message,)
        assert not any(pool.buffer(entry.name, entry.layer).any() for entry in pool._entries)


def test_layers_that_neither_own_nor_read(pools: tuple[Any, Any]) -> None:
    """Layer 4 has no buffer of the draft, and layer 16 is not there."""
    pool, slots = pools[0], torch.tensor([5])
    with pytest.raises(LookupError) as error:
        pool.draft_pages(4)
    assert error.value.args == ("layer 4 has no `kv_draft` here; the layers that have one are [15]",)
    with pytest.raises(LookupError) as error:
        pool.buffer("kv_full", 10)
    assert error.value.args == ("layer 10 has no `kv_full` here; [4] own one, [9, 14] read that of another",)
    for call in (lambda: pool.get_kv(16, slots), lambda: pool.set_kv(16, slots, *values(1, 1))):
        with pytest.raises(ValueError, match=r"layer_id must be a layer of this pool, .* not 16"):
            call()
    target = READERS.Pool(READERS.Layout.from_config(SHARED, role="both", start_layer=4, end_layer=6), 12)
    assert target.get_kv(5, slots)[0].shape == (1, 1, 4)
    odd = compiled(ONE_KIND).Pool(compiled(ONE_KIND).Layout.from_config({}), 8)
    with pytest.raises(LookupError) as error:
        odd.pages_of(3)
    assert error.value.args == ("layer 3 has no `kv` or `kv_late` here; [0, 4] own one, [1, 2] read that of another",)
    with pytest.raises(LookupError) as error:
        odd.set_k(3, slots, torch.zeros(1, 4, dtype=torch.bfloat16))
    assert error.value.args == ("layer 3 has no `kv` or `kv_late` here; the layers that have one are [0, 4]",)


ONE_KIND = spec(
    "one_kind",
    "row: {fields: {k: 'bf16[4]'}, page: [[k]]}",
    """
kv: {format: row, space: token, layers: layer == 0, readers: layer < 3}
kv_late: {format: row, space: token, layers: layer == 4}
""",
    layers="body: 5",
    operations="set_k: {store: [kv, kv_late], args: {k: k}}\npages_of: {view: [kv, kv_late]}",
)


def test_what_covers_all_bytes_has_each_once(pools: tuple[Any, Any]) -> None:
    """Memory, regions, copies and `describe` are of the 10 owners; a reader is zeros in `describe`."""
    for pool in pools:
        layout = pool.layout
        owners = {name: layout.layers(name) for name in ("kv_full", "kv_swa", "kv_draft")}
        assert owners == {"kv_full": (4,), "kv_swa": (0, 1, 2, 3, 5, 6, 7, 8), "kv_draft": (15,)}
        assert pool.num_bytes() == READERS.bytes_for(layout, 12) == 10 * (12 + 4) * 16
        regions = pool.transfer_regions()
        assert [(own.buffer, own.layer) for own in regions] == [(name, own) for name in owners for own in owners[name]]
        assert len({own.ptr for own in regions}) == 10
        ptrs, lens, item_lens = pool.infos()
        assert [layer for layer in layout.held if ptrs[layer]] == [*range(9), 15]
        assert lens == [256 * (layer not in READS) for layer in range(16)]
        assert item_lens == [64 * (layer not in READS) for layer in range(16)]
        assert [part.layers for part in pool.describe_staging(1)] == list(owners.values())
        assert pool.pack(torch.tensor([1, 2])).numel() >= 2 * 10 * 16


def test_moved_and_restored_slots_are_those_that_readers_see(pools: tuple[Any, Any]) -> None:
    """Slots swapped once, which twice would undo; a copy goes into another pool of the layout."""
    one, two = torch.tensor([5, 6]), torch.tensor([6, 5])
    for pool in pools:
        for owner in (4, 8):
            pool.set_kv(owner, one, *values(owner, 2))
        before = {layer: pool.get_kv(layer, one) for layer in READS}
        pool.move(two, one)
        for layer in READS:
            assert_same(pool.get_kv(layer, two), before[layer])
        copy = pool.save(two)
        pool.clear_pages(torch.tensor([1]))
        assert not any(pool.buffer("kv_full", layer).any() for layer in (4, 9, 14))
        pool.restore(copy, one)
        for layer in READS:
            assert_same(pool.get_kv(layer, one), before[layer])
    target = READERS.Layout.from_config({**SHARED, "num_draft_layers": 0})
    pool, other = READERS.Pool(target, 12), READERS.Pool(target, 24)
    pool.set_kv(4, one, *values(4, 2))
    other.restore(pool.save(one), one)
    assert_same(other.get_kv(14, one), pool.get_kv(4, one))


def test_planes_of_a_split_buffer_are_read_too() -> None:
    """gemma3n keeps keys and values in tensors of their own."""
    layout = gemma3n()
    pool = language_module("gemma3n").Pool(layout, 16)
    for plane in ("k", "v"):
        assert pool.buffer("kv_swa", 33, plane) is pool.buffer("kv_swa", 18, plane)
        assert pool.buffer("kv_full", 24, plane) is pool.buffer("kv_full", 19, plane)
    assert pool.buffer("kv_swa", 33, "k") is not pool.buffer("kv_swa", 33, "v")
    with pytest.raises(LookupError, match=re.escape("`kv_swa` has the planes ['k', 'v'], not `None`")):
        pool.buffer("kv_swa", 33)
    with pytest.raises(LookupError, match="layer 24 has no `kv_swa` here"):
        pool.buffer("kv_swa", 24, "k")
    assert pool.num_bytes() == 40_960 * 32


def test_pages_of_each_layer_are_those_of_the_owner() -> None:
    """Owners have 1 and 3 heads; a reader between and one behind have theirs, whatever the config says of them."""
    text = spec(
        "heads_of_owners",
        "row: {fields: {k: 'bf16[heads, 4]', v: 'bf16[heads, 4]'}, page: [[k, v]]}",
        "kv: {format: row, space: token, layers: layer % 2 == 0, readers: all}",
        layers="body: 4",
        let="heads: layer + 1",
    )
    module = compiled(text)
    layout = module.Layout.from_config({})
    pool = module.Pool(layout, 8)
    assert readers_of(layout) == {"kv": {1: 0, 3: 2}}
    assert [page.page_bytes for page in layout.buffer("kv").pages] == [8 * 16, 8 * 48]
    assert [pool.buffer("kv", layer).shape[1] for layer in range(4)] == [128, 128, 384, 384]
    assert pool.num_bytes() == module.bytes_for(layout, 8) == 2 * (128 + 384)


def test_readers_of_host_buffers_have_an_owner_and_no_tensor() -> None:
    text = spec(
        "host_readers",
        "row: {fields: {k: 'bf16[4]'}, page: [[k]]}",
        """
kv: {format: row, space: token, layers: layer == 0, readers: layer == 1, memory: host}
kv_own: {format: row, space: token, layers: layer == 1}
""",
    )
    module = compiled(text)
    layout = module.Layout.from_config({})
    assert layout.owner("kv", 1) == 0
    for layer in (0, 1):
        with pytest.raises(LookupError, match="`kv` lies in host memory"):
            module.Pool(layout, 8).buffer("kv", layer)
    assert module.host_bytes_for(layout, 8) == module.bytes_for(layout, 8) == 16 * 8


# -- operations over several buffers


def meeting(verb: str, rest: str = "") -> Any:
    return compiled(
        spec(
            f"meeting_{verb}",
            "row: {fields: {k: 'bf16[4]'}, page: [[k]]}",
            """
kv: {format: row, space: token, layers: layer == 0, readers: layer < n}
kw: {format: row, space: token, layers: layer == 2}
""",
            config="n: {type: int}",
            layers="body: 4",
            operations=f"op: {{{verb}: [kv, kw]{rest}}}",
        )
    )


@pytest.mark.parametrize("verb", ["load", "get", "gather", "view"])
def test_a_layer_that_reads_one_buffer_and_owns_another_cannot_say_which(verb: str) -> None:
    module = meeting(verb)
    assert readers_of(module.Layout.from_config({"n": 2})) == {"kv": {1: 0}, "kw": {}}
    with pytest.raises(ValueError) as error:
        module.Layout.from_config({"n": 3})
    line = "layer 2: op cannot tell kv from kw: both are owned or read here"
    assert problem_lines(error) == [f"meeting_{verb}: {line} (operations.op of meeting_{verb}.yaml)"]


@pytest.mark.parametrize(("verb", "rest"), [("store", ", args: {k: k}"), ("describe", "")])
def test_a_store_goes_to_what_the_layer_owns(verb: str, rest: str) -> None:
    """Layer 2 owns `kw` and reads `kv`; layer 1 only reads."""
    module = meeting(verb, rest)
    layout = module.Layout.from_config({"n": 4})
    pool = module.Pool(layout, 8)
    if verb == "describe":
        assert [bool(own) for own in pool.op()[1]] == [True, False, True, False]
        return
    row = torch.full((1, 4), 1.5, dtype=torch.bfloat16)
    pool.op(2, torch.tensor([3]), row)
    assert pool.buffer("kw", 2).any() and not pool.buffer("kv", 2).any()
    with pytest.raises(ValueError, match="layer 1 reads the `kv` of layer 0 and stores nothing of its own"):
        pool.op(1, torch.tensor([3]), row)


def test_owners_that_are_apart_may_have_readers_that_meet() -> None:
    """Even layers own `kv` and odd ones `kw`, which is certain; layer 1 would load both."""
    text = spec(
        "readers_that_meet",
        "row: {fields: {k: 'bf16[4]', v: 'bf16[4]'}, page: [[k, v]]}",
        """
kv: {format: row, space: token, layers: even, readers: layer < n}
kw: {format: row, space: token, layers: not even}
""",
        config="n: {type: int}",
        layers="body: 2\nsets: {even: layer % 2 == 0}",
        operations="get_kv: {load: [kv, kw]}",
    )
    assert compiled(text).Layout.from_config({"n": 1}).layers("kw") == (1,)
    with pytest.raises(ValueError) as error:
        compiled(text).Layout.from_config({"n": 2})
    line = "layer 1: get_kv cannot tell kv from kw: both are owned or read here"
    assert problem_lines(error) == [f"readers_that_meet: {line} (operations.get_kv of readers_that_meet.yaml)"]


def test_sets_that_are_apart_need_no_rule() -> None:
    """Layers that are full and those that are not never meet: `from_config` has nothing to check."""
    text = (ROOT / "tests" / "golden" / "readers" / "expected.py").read_text(encoding="utf-8")
    assert "set_kv(" in text and "get_kv(" in text
    assert "cannot tell" not in text


# -- what people see


def shown(command: str, *words: str, path: Path) -> str:
    """What a command prints about the config of gemma3n."""
    stdout, stderr = io.StringIO(), io.StringIO()
    (path / "config.json").write_text(json.dumps(GEMMA3N))
    given = [str(LANGUAGE / "gemma3n.yaml"), "--config", str(path / "config.json"), *words]
    assert main([command, *given], io.BytesIO(), stdout, stderr) == 0, stderr.getvalue()
    return stdout.getvalue()


def test_a_budget_tells_readers(tmp_path: Path) -> None:
    text = shown("budget", "--tokens", "1600", path=tmp_path)
    assert (
        "\n\n  readers   kv_full: 24, 29, 34 read 19\n            kv_swa: 20-23, 25-28, 30-33 read 18\n\n  by cause "
        in text
    )
    assert "read" not in shown("budget", "--tokens", "1600", "--set", "end_layer=20", path=tmp_path)
    assert "kv_swa: 20 reads 18\n" in shown("budget", "--tokens", "1600", "--set", "end_layer=21", path=tmp_path)
    document = json.loads(shown("budget", "--tokens", "1600", "--format", "json", path=tmp_path))
    full, swa = document["buffers"]
    assert (full["layers"], full["readers"]) == ([4, 9, 14, 19], {"24": 19, "29": 19, "34": 19})
    assert (len(swa["layers"]), len(swa["readers"]), set(swa["readers"].values())) == (16, 12, {18})


def test_an_explanation_tells_readers(tmp_path: Path) -> None:
    text = shown("explain", path=tmp_path)
    assert "    4 layers: 4, 9, 14, 19\n    readers: 24, 29, 34 read 19\n    8,192 bytes per token\n" in text
    document = json.loads(shown("explain", "--format", "json", path=tmp_path))
    assert [own["readers"] for own in document["buffers"]][0] == {"24": 19, "29": 19, "34": 19}


def test_rules_of_readers_are_explained() -> None:
    stdout = io.StringIO()
    assert main(["explain", str(LANGUAGE / "dsv41.yaml")], io.BytesIO(), stdout, io.StringIO()) == 0
    assert "  kv_1: extra in token, layers r1 and kv_source, readers r1\n" in stdout.getvalue()
    assert "  pair: pair_state in pending, layers r2 and kv_source\n" in stdout.getvalue()
    stdout = io.StringIO()
    words = ["explain", str(LANGUAGE / "dsv41.yaml"), "--format", "json"]
    assert main(words, io.BytesIO(), stdout, io.StringIO()) == 0
    rules = {own["name"]: own["readers"] for own in json.loads(stdout.getvalue())["buffers"]}
    assert (rules["kv_2"], rules["pair"]) == ("r2", None)


def test_several_owners_are_told_apart() -> None:
    layout = language_module("dsv41").Layout.from_config(DSV41)
    assert readers_text(layout.buffer("kv_1")) == "3-7 read 2; 9-13 read 8; 15-19 read 14; 21-39 read 20"
    assert readers_text(layout.buffer("swa_kv")) == ""
