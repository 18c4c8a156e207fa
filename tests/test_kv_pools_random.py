"""Random operations of `mla`, `gqa`, `hybrid_swa` and `shared_kv` on the two backends: every byte is that of the model.

Models, formats, orders, pages, ranks, roles and stages are random, and so are the slots, some of which are not there,
and where values lie. Kernels are interpreted under the sanitizer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import one_thread
from test_kv_pools import FIELDS, LATENT, NAMES, ORDERS, rules
from test_language_pools import held, nearest
from test_other_pools import (
    DTYPES,
    Case,
    Layer,
    Place,
    Pools,
    cleared,
    moved,
    pools_of,
    raw,
    saved_and_restored,
    told_of_regions,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NaN in numpy

WIDTHS = {"bf16": [5, 8, 24], "fp8": [5, 8, 48], "int8": [4, 24, 64], "mxfp8": [32, 96]}  # of the others 16, 48 and 64


@dataclass(frozen=True)
class Row:
    """A buffer of a layer, whose bytes `reader` may be asked for."""

    buffer: str
    layer: int
    reader: int | None
    fields: list[str]
    rules: dict[str, Any]


@dataclass(frozen=True)
class Example:
    case: Case
    rows: tuple[Row, ...]
    native: bool  # whether kernels cast to e4m3 by an instruction
    seed: int


@st.composite
def places(draw: st.DrawFn) -> Place:
    return Place(
        slot_stride=draw(st.sampled_from([1, 1, 2, 3])),
        before=draw(st.sampled_from([0, 0, 1, 8])),
        each_head=draw(st.booleans()),
        stride=draw(st.sampled_from([1, 1, 2])),
        rows=draw(st.sampled_from([1, 1, 2])),
        hostile=draw(st.booleans()),
    )


def stages(draw: st.DrawFn, total: int) -> dict[str, Any]:
    start = draw(st.integers(0, 1))
    return {"role": draw(st.sampled_from(["target", "both"])), "start_layer": start, "end_layer": total}


@st.composite
def mla(draw: st.DrawFn) -> tuple[Case, list[Row]]:
    config = {
        **{"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    }
    kv_format, page = draw(st.sampled_from(list(LATENT))), draw(st.sampled_from([1, 3, 16]))
    choices = {"kv_format": kv_format, "page_size": page, **stages(draw, 3)}
    fields, own = LATENT[kv_format]
    rows = [Row("kv", layer, None, fields, own) for layer in held(config, choices)]
    return Case("mla", config, choices, tokens=48), rows


@st.composite
def formats(draw: st.DrawFn) -> dict[str, Any]:
    kv_format = draw(st.sampled_from(list(FIELDS)))
    pages = {"mxfp8": [3, 16, 128], "nvfp4_swizzled": [4, 8]}.get(kv_format, [1, 3, 16])
    return {
        "kv_format": kv_format,
        "kv_order": draw(st.sampled_from(ORDERS.get(kv_format, ["nhd", "hnd"]))),
        "page_size": draw(st.sampled_from(pages)),
        "split_kv": draw(st.booleans()),
        "tp_size": draw(st.sampled_from([1, 2, 3])),
    }


def widths(draw: st.DrawFn, choices: dict[str, Any]) -> tuple[int, int]:
    """Of K and of V."""
    some = WIDTHS.get(choices["kv_format"], [16, 48, 64])
    return draw(st.sampled_from(some)), draw(st.sampled_from(some))


def heads(draw: st.DrawFn, choices: dict[str, Any]) -> int:
    """Heads of all ranks; one is on every rank."""
    return draw(st.sampled_from([1, choices["tp_size"], 3 * choices["tp_size"]]))


@st.composite
def gqa(draw: st.DrawFn) -> tuple[Case, list[Row]]:
    choices = draw(formats())
    k, v = widths(draw, choices)
    config = {
        **{"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "head_dim": k, "v_head_dim": v},
        "num_key_value_heads": heads(draw, choices),
    }
    choices |= stages(draw, 3)
    own = FIELDS[choices["kv_format"]], rules(choices["kv_format"], k, v)
    rows = [Row("kv", layer, None, *own) for layer in held(config, choices)]
    return Case("gqa", config, choices, tokens=3 * choices["page_size"]), rows


@st.composite
def windows(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """Choices, tokens and requests of a layout of which some layers have a window."""
    choices = draw(formats())
    choices |= {"swa_pool": draw(st.sampled_from(["ratio", "requests"])), "step_tokens": draw(st.integers(1, 5))}
    choices["swa_ratio"] = draw(st.sampled_from([0, 1, "1/2"]))
    return choices, 4 * choices["page_size"], draw(st.integers(0, 2))


KINDS = ("sliding_attention", "full_attention")


@st.composite
def hybrid_swa(draw: st.DrawFn) -> tuple[Case, list[Row]]:
    choices, tokens, requests = draw(windows())
    widths_of = {"kv_full": widths(draw, choices), "kv_swa": widths(draw, choices)}
    kinds = draw(
        st.permutations(["sliding_attention", *draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=2))])
    )
    config = {
        **{"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 6, "num_nextn_predict_layers": 1},
        **{"num_key_value_heads": heads(draw, choices), "swa_num_key_value_heads": heads(draw, choices)},
        **{"head_dim": widths_of["kv_full"][0], "v_head_dim": widths_of["kv_full"][1]},
        **{"swa_head_dim": widths_of["kv_swa"][0], "swa_v_head_dim": widths_of["kv_swa"][1]},
    }
    choices |= stages(draw, 4)
    rows = []
    for layer in held(config, choices):
        buffer = "kv_swa" if layer < 3 and kinds[layer] == "sliding_attention" else "kv_full"
        own = FIELDS[choices["kv_format"]], rules(choices["kv_format"], *widths_of[buffer])
        rows.append(Row(buffer, layer, None, *own))
    return Case("hybrid_swa", config, choices, tokens=tokens, requests=requests), rows


@st.composite
def shared_kv(draw: st.DrawFn) -> tuple[Case, list[Row]]:
    """Of six layers the last two read, or every second and third."""
    choices, tokens, requests = draw(windows())
    k, v = widths(draw, choices)
    config = {
        **{"num_hidden_layers": 6, "num_key_value_heads": heads(draw, choices), "head_dim": k, "v_head_dim": v},
        **draw(st.sampled_from([{"num_kv_shared_layers": 2}, {"use_cla": True, "cla_share_factor": 3}])),
    }
    owners = {0, 3} if "cla_share_factor" in config else {0, 1, 2, 3}
    window = set()
    if "cla_share_factor" not in config:
        config |= {"sliding_window_pattern": 2, "sliding_window": 6}
        window = {0, 2, 4}
    own = FIELDS[choices["kv_format"]], rules(choices["kv_format"], k, v)
    rows = []
    for layer in range(6):
        alike = window if layer in window else set(range(6)) - window
        owner = nearest(layer, owners & alike)
        rows.append(Row("kv_swa" if layer in window else "kv_full", owner, None if owner == layer else layer, *own))
    return Case("shared_kv", config, choices, tokens=tokens, requests=requests), rows


@st.composite
def examples(draw: st.DrawFn, layout: Callable[[], st.SearchStrategy]) -> Example:
    case, rows = draw(layout())
    changed = {"names": NAMES, "place": draw(places()), "count": draw(st.sampled_from([0, 1, 5, 17, 24, 65]))}
    own = replace(case, **changed, guard=draw(st.sampled_from([None, None, "left", "right"])))
    return Example(own, tuple(rows), draw(st.booleans()), draw(st.integers(0, 2**32 - 1)))


Operation = Callable[[Pools, Row], None]


def of_a_layer(pools: Pools, row: Row) -> Layer:
    return Layer(pools, row.buffer, row.layer, row.fields, row.rules, row.reader)


def store(pools: Pools, row: Row) -> None:
    store, names = "set_kv_buffer", {"k": "cache_k", "v": "cache_v"}
    if pools.case.spec == "mla":
        store, names = "set_mla_kv_buffer", {"latent": "cache_k_nope", "rope": "cache_k_rope"}
    dtype = torch.int32 if pools.random.integers(2) else torch.int64
    of_a_layer(pools, row).store(store, bool(pools.random.integers(2)), dtype, **names)


def load(pools: Pools, row: Row) -> None:
    name = "get_mla_kv_buffer" if pools.case.spec == "mla" else "load_kv"
    of_a_layer(pools, row).load(name, dtypes=[DTYPES[pools.random.integers(3)]])


def look(pools: Pools, row: Row) -> None:
    """Views of all slots."""
    layer = of_a_layer(pools, row)
    for pool in pools.pools.values():
        if pools.case.spec == "mla":
            page = layer.memory("rope")
            rows = page.bytes.reshape(-1, page.page_bytes // page.page.slots)
            np.testing.assert_array_equal(pool.get_key_buffer(layer.asked).numpy(), rows)
            continue
        fields = pool.get_kv_fields(layer.asked)
        assert sorted(fields) == sorted(row.fields)
        for name, view in fields.items():
            memory = layer.memory(name)
            slots = range(memory.num_pages * memory.page.slots)
            values = raw(view.reshape(len(slots), *layer.stored_shape(name)))
            np.testing.assert_array_equal(values, memory.read_bytes(name, slots))


def of_the_pool(operation: Callable[[Pools], None]) -> Operation:
    return lambda pools, row: operation(pools)


def regions(pools: Pools, row: Row) -> None:
    for pool in pools.pools.values():
        told_of_regions(pool, pools.model)


WHOLE = [of_the_pool(operation) for operation in (moved, saved_and_restored, cleared)]
operations = st.lists(st.sampled_from([store, store, load, load, look, regions, *WHOLE]), min_size=1, max_size=3)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("layout", [mla, gqa, hybrid_swa, shared_kv], ids=lambda layout: layout.__name__)
@settings(max_examples=75, deadline=None)
@given(data=st.data())
def test_every_byte_of_random_operations(layout: Callable[[], st.SearchStrategy], data: st.DataObject) -> None:
    example = data.draw(examples(layout))
    random = np.random.default_rng(example.seed)
    with pools_of(example.case, random, native=example.native) as pools:
        for operation in data.draw(operations):
            operation(pools, data.draw(st.sampled_from(example.rows)))
