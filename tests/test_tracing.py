"""The pools' torch path under `torch.compile`: one graph, and the bytes of the same calls made without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import model_config

from generated import glm_dsa, gqa, hybrid_swa, mla, shared_kv

HEADS = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64}
WINDOWS = {**HEADS, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
POOLS: dict[str, Callable[[], Any]] = {
    **{
        f"glm_dsa {own}": lambda own=own: glm_dsa.Layout.from_config(
            {**model_config("glm-5"), "num_hidden_layers": 2}, kv_format=own
        )
        for own in ("bf16", "fp8_scaled", "fp8_raw")
    },
    "mla nvfp4": lambda: mla.Layout.from_config(
        {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, kv_format="nvfp4"
    ),
    **{
        f"gqa {own} {order}": lambda own=own, order=order: gqa.Layout.from_config(HEADS, kv_format=own, kv_order=order)
        for own, order in (
            *(("bf16", "nhd"), ("fp8", "nhd"), ("int8", "hnd"), ("mxfp8", "nhd")),
            *(("nvfp4", "hnd"), ("nvfp4_swizzled", "hnd")),
        )
    },
    "hybrid_swa": lambda: hybrid_swa.Layout.from_config(WINDOWS),
    "shared_kv": lambda: shared_kv.Layout.from_config({**HEADS, "use_cla": True, "cla_share_factor": 2}),
}
SLOTS = {  # with a NaN, zeros and an infinity among their values
    "inside": [1, 2, 60, 7, 9, 33],
    "some": [5, 0, -1, 4000, 7, 9],
    "none": [-1, -7, 4000, -1, 4001, 9999],
}


def filled(layout: Any) -> Any:
    """A pool of random bytes."""
    module = {own.Layout: own for own in (glm_dsa, gqa, hybrid_swa, mla, shared_kv)}[type(layout)]
    pool = module.Pool(layout, 2 * layout.granule * 64)
    generator = torch.Generator().manual_seed(1)
    for memory in pool._buffers.values():
        memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=generator))
    return pool


def operations(pool: Any) -> tuple[str, str, tuple[tuple[int, ...], ...]]:
    """The store and the load of a pool, and the shapes of the values of a token."""
    if hasattr(pool, "set_mla_kv_buffer"):
        return "set_mla_kv_buffer", "get_mla_kv_buffer", ((512,), (64,))
    return "set_kv_buffer", "load_kv", ((2, 64), (2, 64))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", POOLS)
def test_stores_and_loads_are_one_graph(name: str) -> None:
    torch._dynamo.reset()
    layout = POOLS[name]()
    own, traced = filled(layout), filled(layout)
    store, load, shapes = operations(own)
    compiled = torch.compile(getattr(traced, store), fullgraph=True, backend="aot_eager")
    read = torch.compile(getattr(traced, load), fullgraph=True, backend="aot_eager")
    random = torch.Generator().manual_seed(2)
    for slots in map(torch.tensor, SLOTS.values()):
        values = [torch.randn((len(slots), *shape), generator=random).bfloat16() for shape in shapes]
        values[0].view(len(slots), -1)[2:5, 3] = torch.tensor([float("nan"), float("inf"), 0])
        values[0][3] = 0
        getattr(own, store)(0, slots, *values)
        compiled(0, slots, *values)
        for key, memory in own._buffers.items():
            assert torch.equal(memory, traced._buffers[key]), key
        for one, other in zip(getattr(own, load)(0, slots), read(0, slots), strict=True):
            assert same(one, other)


def test_gathers_are_one_graph() -> None:
    """Sequences of 0 to 130 tokens, some of them behind the table's end or on pages that are none."""
    torch._dynamo.reset()
    layout = POOLS["glm_dsa bf16"]()
    own, traced = filled(layout), filled(layout)
    gather = torch.compile(traced.get_index_k_scale_buffer, fullgraph=True, backend="aot_eager")
    put = torch.compile(traced.store_index_k, fullgraph=True, backend="aot_eager")
    keys, slots = torch.randn((6, 128)).bfloat16(), torch.tensor(SLOTS["some"])
    own.store_index_k(0, slots, keys)
    put(0, slots, keys)
    assert torch.equal(own.buffer("index_k", 0), traced.buffer("index_k", 0))
    table = torch.tensor([[3, 1, 2], [7, -1, 5000], [4, 4, 4], [9, 8, 6]])
    for lengths, total, longest in (
        ([70, 130, 0, 5], 205, 130),
        ([70, 130, 0, 5], 150, 100),
        ([300, 1, 1, 1], 400, 300),
    ):
        arguments = (0, torch.tensor(lengths), table, total, longest)
        for one, other in zip(own.get_index_k_scale_buffer(*arguments), gather(*arguments), strict=True):
            assert same(one, other)


def test_by_the_default_compiler() -> None:
    """As torch compiles where nothing else is said: one layout, as it takes long."""
    torch._dynamo.reset()
    layout = POOLS["glm_dsa fp8_scaled"]()
    own, traced = filled(layout), filled(layout)
    slots, values = torch.tensor(SLOTS["some"]), (torch.randn((6, 512)).bfloat16(), torch.randn((6, 64)).bfloat16())
    own.set_mla_kv_buffer(0, slots, *values)
    torch.compile(traced.set_mla_kv_buffer, fullgraph=True)(0, slots, *values)
    assert torch.equal(own.buffer("kv", 0), traced.buffer("kv", 0))
