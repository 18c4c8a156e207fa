"""Models of keys and values per head: SGLang's MHA pool against the generated one of layout `gqa`."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deployments import E4M3, HEAD_DTYPES, Deployment, build, build_own, model_of, own_cell_size
from pairs import HEADS as OF_PAIRS
from pairs import MHA, PAGE, SLOTS, TOKENS, Both, difference, layer, of
from sglang.srt.kv_canary.pool_patcher import api as pool_patcher
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.runtime_context import get_parallel

from generated import gqa
from generated.sglang import gqa as adapter
from kvgen.engines.sglang import PluginError
from kvgen.engines.sglang.budget import correct

MODELS = {
    "llama-3.1-8b": model_of("llama-3.1-8b"),
    "qwen3-30b-a3b": model_of("qwen3-30b-a3b"),
    "wide keys": model_of("llama-3.1-8b", num_hidden_layers=8, head_dim=192, v_head_dim=128, num_key_value_heads=16),
}
HEADS = {  # of a model, on each of so many ranks
    ("llama-3.1-8b", 1): 8,
    ("llama-3.1-8b", 4): 2,
    ("llama-3.1-8b", 16): 1,
    ("qwen3-30b-a3b", 1): 4,
    ("qwen3-30b-a3b", 4): 1,
    ("qwen3-30b-a3b", 16): 1,
    ("wide keys", 1): 16,
    ("wide keys", 4): 4,
    ("wide keys", 16): 1,
}
CELLS = {  # bytes of a token on one rank in bf16: layers x heads x (keys + values) x 2
    "llama-3.1-8b": 131_072,  # 32 x 8 x 256 x 2
    "qwen3-30b-a3b": 98_304,  # 48 x 4 x 256 x 2
    "wide keys": 81_920,  # 8 x 16 x 320 x 2
}
LAYERS = {"llama-3.1-8b": 32, "qwen3-30b-a3b": 48, "wide keys": 8}
every_pool = of(*MHA)
fp8_only = of("mha fp8", "mha wide fp8")
bf16_only = of("mha bf16", "mha wide bf16")


@pytest.fixture(autouse=True)
def its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_SGLANG_POOL", "generated.sglang.gqa")


def deployment(name: str = "llama-3.1-8b", kv_format: str = "bf16", **others: Any) -> Deployment:
    return Deployment(kv_format, **{"end": LAYERS[name], "page": 16, "model": MODELS[name], **others})


def shapes(pool: Any) -> list[tuple]:
    return [(tuple(rows.shape), rows.stride(), rows.dtype) for rows in (*pool.k_buffer, *pool.v_buffer)]


# -- what is built, and its price


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("part", [(0, 1), (0, 2), (1, 2)], ids=["whole", "first half", "second half"])
@pytest.mark.parametrize(("name", "ranks"), HEADS)
@pytest.mark.parametrize("kv_format", HEAD_DTYPES)
def test_the_configurator_builds_and_prices_the_generated_pool(
    kv_format: str, name: str, ranks: int, part: tuple[int, int], page: int
) -> None:
    """Shapes, item lengths and price are SGLang's, but for the reserved page, which SGLang does not price."""
    tokens, (number, parts), layers = 64, part, LAYERS[name]
    start, end = layers // parts * number, layers // parts * (number + 1)
    with deployment(name, kv_format, start=start, end=end, ranks=ranks, page=page).serving() as configurator:
        pool, own = build(configurator, tokens), build_own(configurator, tokens)
        assert type(pool) is adapter.GqaTokenToKVPool and type(own) is MHATokenToKVPool
        layout = pool.generated.layout
        assert (layout.kv_format, layout.held) == (kv_format, tuple(range(start, end)))
        assert shapes(pool) == shapes(own)
        assert pool.k_buffer[0].shape[1] == HEADS[name, ranks]
        assert pool.get_contiguous_buf_infos()[1:] == own.get_contiguous_buf_infos()[1:]
        assert pool.data_ptrs.tolist() == pool.get_contiguous_buf_infos()[0]
        assert pool.data_ptrs.tolist() == [rows.data_ptr() for rows in (*pool.k_buffer, *pool.v_buffer)]
        assert [pool.k_data_ptrs.tolist(), pool.v_data_ptrs.tolist()] == [
            pool.data_ptrs.tolist()[: end - start],
            pool.data_ptrs.tolist()[end - start :],
        ]
        assert pool.data_strides.tolist() == own.data_strides.tolist()
        assert pool.get_kv_size_bytes() == own.get_kv_size_bytes()
        assert sum(pool.get_kv_size_bytes()) == gqa.bytes_for(layout, tokens) == pool.generated.num_bytes()
        cell = own_cell_size(configurator)
        expected = CELLS[name] * HEADS[name, ranks] // HEADS[name, 1] // parts // {"bf16": 1, "fp8": 2}[kv_format]
        assert gqa.cell_size(layout) == cell == expected
        assert sum(own.get_kv_size_bytes()) - tokens * cell == page * cell
        pricing = DefaultPoolConfigurator(configurator)
        assert sum(pool.get_kv_size_bytes()) == tokens * pricing._cell_size + pricing._fixed_overhead_bytes


@pytest.mark.parametrize("draft_layers", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 4, 16])
@pytest.mark.parametrize("kv_format", HEAD_DTYPES)
def test_the_budget_is_the_allocation(kv_format: str, ranks: int, draft_layers: int) -> None:
    """To the byte, with a draft: what fits is allocated, and a page more would not have fitted."""
    own = deployment("qwen3-30b-a3b", kv_format, ranks=ranks, draft_layers=draft_layers)
    for available in (5_000_000, 5_678_901, 20_000_000):
        with own.serving() as configurator:
            pricing = DefaultPoolConfigurator(configurator)
            tokens = pricing.calculate_pool_sizes(available, 16).max_total_num_tokens
            allocated = sum(build(configurator, tokens).get_kv_size_bytes())
        if draft_layers:
            with replace(own, end=draft_layers, draft_layers=0, is_draft=True).serving() as configurator:
                pool = build(configurator, tokens)
                assert type(pool) is adapter.GqaTokenToKVPool
                allocated += sum(pool.get_kv_size_bytes())
        assert tokens % 16 == 0
        assert allocated <= available < allocated + 16 * pricing._cell_size


def test_tokens_are_those_of_max_tokens() -> None:
    """Of the model's own config on four ranks, which the layout divides itself."""
    with deployment(ranks=4).serving() as configurator:
        layout = gqa.Layout.from_config(MODELS["llama-3.1-8b"].hf_config, tp_size=4)
        for memory in (2**33, 80 * 10**9, 2**37 + 12345):
            assert configurator.config_from_budget(memory).max_total_num_tokens == gqa.max_tokens(layout, memory)


# -- the same bytes


@every_pool
def test_set_kv_buffer(both: Both) -> None:
    """Slots as a tensor and as SGLang's KVWriteLoc, int32 and int64; flat rows; layer 0 by override; slot 0 too."""
    for layer_id in range(4):
        for wrap in (lambda loc: loc, lambda loc: loc.int(), KVWriteLoc):
            loc = torch.cat([both.slots(100), torch.tensor([0])])
            k, v = both.heads(101)
            for pool in both:
                pool.set_kv_buffer(layer(layer_id), wrap(loc), k, v)
            both.check()
            for pool in both:
                pool.set_kv_buffer(layer(layer_id), wrap(loc), k.flip(0), v.flip(0), layer_id_override=0)
            both.check()
    assert torch.equal(both.generated.k_buffer[0][0], k[0].to(both.own.dtype).view(both.own.store_dtype))


@every_pool
def test_rows_that_are_flat(both: Both) -> None:
    """As SGLang's kernel on CUDA takes them."""
    loc, (k, v) = both.slots(20), both.heads(20)
    both.own.set_kv_buffer(layer(1), loc, k, v)
    both.generated.set_kv_buffer(layer(1), loc, k.reshape(20, -1), v.reshape(20, -1))
    both.check()


@fp8_only
def test_codes_are_kept_as_they_are(both: Both) -> None:
    """Any bits, whatever scales come with them."""
    for scales in ((), (0.3, 7.0)):
        k, v = (
            torch.from_numpy(both.random.integers(0, 256, tuple(rows.shape), np.uint8)).view(E4M3)
            for rows in both.heads(90)
        )
        loc = both.slots(90)
        for pool in both:
            pool.set_kv_buffer(layer(2), loc, k, v, *scales)
        both.check()


@fp8_only
def test_scales_that_are_powers_of_two(both: Both) -> None:
    """Numbers, and tensors with an axis and without; division in bf16 is exact then."""
    for scales in (
        (0.25, 4.0),
        (torch.tensor(0.5), torch.tensor([2.0])),
        (None, 0.125),
        (8.0, None),
    ):
        loc, (k, v) = both.slots(90), both.heads(90)
        both.generated.set_kv_buffer(layer(1), loc, k, v, *scales)
        both.own.set_kv_buffer(layer(1), loc, k.clone(), v.clone(), *scales)
        both.check()


@bf16_only
def test_scales_beside_bf16(both: Both) -> None:
    """Kept as they come, as SGLang does with values of the cache's own dtype."""
    loc, (k, v) = both.slots(40), both.heads(40)
    for pool in both:
        pool.set_kv_buffer(layer(1), loc, k, v, 0.3, 7.0)
    both.check()


@every_pool
@pytest.mark.parametrize(
    "scales", [(), (0.3, 7.0), (torch.tensor([0.3]), torch.tensor(7.0))], ids=["no scales", "numbers", "tensors"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_floats(both: Both, dtype: torch.dtype, scales: tuple) -> None:
    """Divided in their own dtype, and cast once to what is stored."""
    loc, (k, v) = both.slots(90), both.heads(90, dtype)
    both.generated.set_kv_buffer(layer(1), loc, k, v, *scales)
    both.own.set_kv_buffer(layer(1), loc, k.clone(), v.clone(), *scales)
    both.check()


@every_pool
def test_prefixes_that_are_valid(both: Both) -> None:
    """Of drafted tokens those that were accepted."""
    loc, (k, v) = both.slots(24).view(4, 6), both.heads(24)
    for pool in both:
        pool.set_kv_buffer_prefix_valid(layer(3), loc, torch.tensor([0, 6, 1, 3]), k, v)
    both.check()


@every_pool
def test_views(both: Both) -> None:
    """What SGLang's attention kernels read."""
    for layer_id in range(4):
        for name in ("get_key_buffer", "get_value_buffer"):
            one, other = (getattr(pool, name)(layer_id) for pool in both)
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        pair = both.generated.get_kv_buffer(layer_id)
        memory = [both.generated.generated.buffer("kv", layer_id, plane) for plane in ("k", "v")]
        assert [own.data_ptr() for own in pair] == [own.data_ptr() for own in memory]
    assert both.own.get_kv_buffer_shape() == both.generated.get_kv_buffer_shape()
    assert both.own.get_v_head_dim() == both.generated.get_v_head_dim()


@of("mha bf16", "mha fp8")
def test_keys_and_values_lie_side_by_side(both: Both) -> None:
    """In whole pages: SGLang's paged kernels reach the values of a layer from the address of its keys."""
    for pool in both:
        for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True):
            assert v.data_ptr() - k.data_ptr() == k.nbytes
            assert k.nbytes % (k.stride(0) * k.itemsize * pool.page_size) == 0


@of("mha bf16")
def test_the_paged_inputs_of_a_kernel(both: Both) -> None:
    """SGLang's TensorRT-LLM backend addresses the values of a layer by blocks from its keys, and copies neither."""
    table = torch.tensor([[2, 5]], dtype=torch.int32)
    backend = SimpleNamespace(forward_metadata=SimpleNamespace(fmha_v2_block_tables=None))
    for pool in both:
        k, v = (own[1].view(-1, PAGE, OF_PAIRS, 64) for own in (pool.k_buffer, pool.v_buffer))
        backend.forward_metadata.fmha_v2_block_tables = None
        (_, pair), blocks = TRTLLMHAAttnBackend._fmha_v2_paged_inputs(backend, None, k, v, table)
        assert pair[0] is k and pair[1] is v
        assert blocks.tolist() == [[[2, 5], [2 + 9, 5 + 9]]]  # 8 pages and the reserved one


def test_memory_that_cannot_be_shared() -> None:
    """Keys of 65 slots of 64 bytes end between multiples of 256: tensors of their own."""
    model = model_of("llama-3.1-8b", num_hidden_layers=2, num_key_value_heads=1, head_dim=64)
    with Deployment("fp8", end=2, page=1, model=model).serving() as configurator:
        pool = build(configurator, 64)
        assert [tuple(rows.shape) for rows in (*pool.k_buffer, *pool.v_buffer)] == [(65, 1, 64)] * 4
        assert len({rows.untyped_storage().data_ptr() for rows in (*pool.k_buffer, *pool.v_buffer)}) == 4


@every_pool
def test_move_kv_cache(both: Both) -> None:
    """Onto slots that are not read, onto slots that are, with pairs that stay where they are, and with none."""
    slots, none = both.slots(120), torch.zeros(0).long()
    zeros = torch.zeros(3).long()
    for targets, sources in ((slots[:60], slots[60:]), (slots, slots.roll(7)), (zeros, zeros), (none, none)):
        for pool in both:
            pool.move_kv_cache(targets, sources)
        both.check()


@every_pool
def test_cpu_copy(both: Both) -> None:
    """As SGLang makes them of a request that it retracts, into other slots; in several of SGLang's chunks."""
    saved, loaded = both.slots(200), both.slots(200)
    both.own.cpu_offloading_chunk_size = 64
    copies = [pool.get_cpu_copy(saved, mamba_indices=None, req_pool_index=0) for pool in both]
    both.fill()
    for pool, copy in zip(both, copies, strict=True):
        pool.load_cpu_copy(copy, loaded, mamba_indices=None, req_pool_index=0)
    both.check()


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("kv_format", HEAD_DTYPES)
def test_layers_are_waited_for(kv_format: str, start: int) -> None:
    """Reads wait until a layer has been loaded back from the host; layers are counted from the first of the stage."""
    waited: list[int] = []
    k = torch.ones(1, 8, 128).bfloat16()
    with deployment(kv_format=kv_format, start=start, end=start + 4).serving() as configurator:
        for pool in (build_own(configurator, 64), build(configurator, 64)):
            pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
            pool.get_key_buffer(start + 3)
            pool.get_value_buffer(start + 2)
            pool.get_kv_buffer(start)
            pool.set_kv_buffer(layer(start + 1), torch.tensor([3]), k, k)
    assert waited == [3, 2, 0, 0] * 2


@of("mha bf16")
def test_sglangs_own_checks_of_slots(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its debug mode finds slots outside, and its unified pools take physical slots alone, in either pool."""
    (k, v), outside, inside = both.heads(1), torch.tensor([SLOTS]), torch.tensor([5])
    monkeypatch.setenv("SGLANG_ENABLE_ASYNC_ASSERT", "1")
    for pool in both:
        for call in (
            lambda pool=pool: pool.set_kv_buffer(layer(0), outside, k, v),
            lambda pool=pool: pool.move_kv_cache(outside, inside),
            lambda pool=pool: pool.move_kv_cache(inside, outside),
        ):
            with pytest.raises(RuntimeError, match="out of range"):
                call()
    monkeypatch.setattr("sglang.srt.mem_cache.memory_pool.KVCache.requires_physical_write_loc", True)
    for pool in both:
        with pytest.raises(ValueError, match="write loc is not marked physical"):
            pool.set_kv_buffer(layer(0), inside, k, v)
        pool.set_kv_buffer(layer(0), KVWriteLoc(inside, physical=True), k, v)


# -- different


@difference(
    "SGLang divides by a scale in place, in the dtype of the values, and rounds again to codes; the generated pool "
    "divides in fp32, rounds once, and leaves what it is given",
    "mha fp8",
    "mha wide fp8",
)
def test_scales_of_keys_and_values(both: Both) -> None:
    """1 / 0.94 = 1.0638 is above the middle of the codes of 1 and 1.125, to which bf16 rounds it: a tie, down to 1."""
    k, v = (torch.ones_like(rows) for rows in both.heads(1))
    given = [(k.clone(), v.clone()) for _ in both]
    for pool, values in zip(both, given, strict=True):
        pool.set_kv_buffer(layer(0), torch.tensor([7]), *values, 0.94, 0.94)
    assert [set(pool.k_buffer[0][7].flatten().tolist()) for pool in both] == [{0x38}, {0x39}]
    assert [set(pool.v_buffer[0][7].flatten().tolist()) for pool in both] == [{0x38}, {0x39}]
    assert [set(values[0].flatten().tolist()) for values in given] == [{1.0625}, {1.0}]
    loc, (k, v) = both.slots(200), both.heads(200)
    for scale in (0.3, torch.tensor([0.017])):
        both.generated.set_kv_buffer(layer(1), loc, k, v, scale, scale)
        both.own.set_kv_buffer(layer(1), loc, k.clone(), v.clone(), scale, scale)
        for name, values in (("k_buffer", k), ("v_buffer", v)):
            one, other = (getattr(pool, name)[1][loc] for pool in both)
            assert torch.equal(one, (values / scale).bfloat16().to(E4M3).view(torch.uint8))
            assert torch.equal(other, (values.float() / scale).to(E4M3).view(torch.uint8))
            assert 0 < (one != other).sum() < one.numel() / 20


@difference("SGLang keeps the sign of a NaN; the generated pool has one NaN", "mha fp8", "mha wide fp8")
def test_negative_nan_of_a_head(both: Both) -> None:
    k, v = (torch.ones_like(rows) for rows in both.heads(1))
    k.view(torch.int16)[0, 0, :2] = torch.tensor([0x7FC0, -0x40]).short()
    for pool in both:
        pool.set_kv_buffer(layer(0), torch.tensor([7]), k, v)
    one, other = (pool.k_buffer[0][7].flatten().tolist() for pool in both)
    assert (one[:3], other[:3]) == ([0x7F, 0xFF, 0x38], [0x7F, 0x7F, 0x38])
    assert one[3:] == other[3:]


@difference(
    "SGLang's stores fail on slots outside (an IndexError of torch); the generated pool skips them, in moves too",
    *MHA,
)
def test_slots_outside_of_heads(both: Both) -> None:
    outside = torch.tensor([5, SLOTS, 2**40, -SLOTS - 1])
    k, v = both.heads(4)
    before = [buffer.clone() for buffer in both.buffers(both.generated)]
    with pytest.raises(IndexError):
        both.own.set_kv_buffer(layer(0), outside, k, v)
    both.generated.set_kv_buffer(layer(0), outside, k, v)
    both.generated.move_kv_cache(outside.roll(1), outside)  # every pair has a slot outside
    assert not torch.equal(both.generated.k_buffer[0][5], before[0][5])
    before[0][5], before[4][5] = both.generated.k_buffer[0][5], both.generated.v_buffer[0][5]
    for ours, theirs in zip(both.buffers(both.generated), before, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@difference(
    "SGLang moves tokens only where it decodes speculatively (an assertion elsewhere); the generated pool always",
    *MHA,
)
def test_moves_without_a_draft(both: Both) -> None:
    slots = both.slots(20)
    both.own.move_kv_cache(slots[:10], slots[10:])
    with replace(both.deployment, arguments=()).serving() as configurator:
        own, pool = build_own(configurator, TOKENS), build(configurator, TOKENS)
        with pytest.raises(AssertionError, match="KV copy not initialized"):
            own.move_kv_cache(slots[:10], slots[10:])
        for ours, theirs in zip(both.buffers(pool), both.buffers(both.generated), strict=True):
            ours.copy_(theirs)
        pool.move_kv_cache(slots[:10], slots[10:])
        for ours, theirs in zip(both.buffers(pool), both.buffers(both.own), strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@difference(
    "SGLang moves 256 tokens at a time, so that later ones may be copies of copies; the generated pool moves all as if "
    "all reads came first",
    "mha bf16",
)
def test_moves_of_many_tokens(both: Both) -> None:
    """A cycle of 300: SGLang's pair 256 reads a slot that the first part of the moves has written."""
    slots = both.slots(300)
    before = both.generated.k_buffer[0].view(torch.uint8).clone()
    for pool in both:
        pool.move_kv_cache(slots, slots.roll(1))
    theirs, ours = (pool.k_buffer[0].view(torch.uint8)[slots] for pool in both)
    assert torch.equal(ours, before[slots.roll(1)])
    wrong = [place for place in range(300) if not torch.equal(theirs[place], ours[place])]
    assert wrong == [256]
    assert torch.equal(theirs[256], before[slots[254]])


@difference(
    "SGLang moves of values no more than the keys have, by whole tiles of 128 bytes or more; the generated pool all",
    "mha deep bf16",
)
def test_moves_of_values_wider_than_keys(both: Both) -> None:
    """Rows of 3 x 64 x 2 = 384 bytes of keys, three tiles, and of 1,152 bytes of values."""
    slots = both.slots(20)
    before = [rows.view(torch.uint8).flatten(1).clone() for rows in (both.own.k_buffer[0], both.own.v_buffer[0])]
    for pool in both:
        pool.move_kv_cache(slots[:10], slots[10:])
    for number, name in enumerate(("k_buffer", "v_buffer")):
        theirs, ours = (getattr(pool, name)[0].view(torch.uint8).flatten(1)[slots[:10]] for pool in both)
        assert torch.equal(ours, before[number][slots[10:]])
        assert torch.equal(theirs[:, :384], ours[:, :384])
        assert torch.equal(theirs[:, 384:], before[number][slots[:10], 384:])


@difference(
    "SGLang writes a copy of more layers, or of more slots than are named, as far as it goes, unless that is within a "
    "chunk of 8,192 slots (an assertion); the generated pool refuses a copy of another layout or length",
    "mha bf16",
)
def test_another_copy_of_heads(both: Both) -> None:
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
    "SGLang makes pools of any number of tokens, the configurator only whole pages; the generated pool refuses others",
    "mha bf16",
)
def test_a_part_of_a_page_of_heads(both: Both) -> None:
    with replace(both.deployment, end=1).serving() as configurator:
        assert len(build_own(configurator, 100).k_buffer[0]) == 164
        with pytest.raises(ValueError, match="^tokens must be a non-negative multiple of 64, not 100; "):
            build(configurator, 100)


# -- heads by the model's config, and by SGLang


def test_heads_that_sglang_rounds_down() -> None:
    """10 heads on 4 ranks: SGLang's pool has 2 of them on each, and the layout none."""
    model = model_of("llama-3.1-8b", num_key_value_heads=10)
    with deployment(model=model, ranks=4).serving() as configurator:
        assert build_own(configurator, 16).head_num == 2
        with pytest.raises(ValueError, match="^gqa: 10 heads cannot be divided over 4 ranks, nor repeated on them$"):
            DefaultPoolConfigurator(configurator)


def test_heads_that_sglang_reads_elsewhere() -> None:
    """Of a config with `multi_query`, SGLang makes pools of one head, and so does the layout.

    Falcon's newer architecture has more, which SGLang asks of models of Falcon alone: here the layout reads 8, and that
    is 2 on each rank.
    """
    with deployment(model=model_of("llama-3.1-8b", multi_query=True), ranks=4).serving() as configurator:
        assert DefaultPoolConfigurator(configurator)._cell_size == own_cell_size(configurator) == 16_384
    model = model_of("llama-3.1-8b", multi_query=True, new_decoder_architecture=True)
    with deployment(model=model, ranks=4).serving() as configurator:
        with pytest.raises(PluginError) as error:
            DefaultPoolConfigurator(configurator)
        assert str(error.value) == (
            "kvgen: gqa has k [2, 128] and v [2, 128] in 32 layers for this model on 4 ranks, "
            "and SGLang k [1, 128] and v [1, 128] in 32 layers"
        )
        layout = build(configurator, 16).generated.layout  # of what it was asked for, as SGLang's own
        assert gqa.cell_size(layout) == own_cell_size(configurator) == 16_384


def test_window_layers_in_one_pool() -> None:
    """Where SGLang is told to keep them like the others, it has one pool for all; the layout is of no windows."""
    model = model_of("llama-3.1-8b", sliding_window=1024)
    message = "layer 0: the layer has a window, and hybrid_swa keeps those apart"
    with deployment(model=model).serving() as configurator, pytest.raises(ValueError, match=message):
        DefaultPoolConfigurator(configurator)


# -- what is refused


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"swa_head_num": 4},
            NotImplementedError,
            "gqa: SGLang asks for heads of window layers, which this layout does not have",
        ),
        (
            {"quant_method": SimpleNamespace(name="nvfp4")},
            NotImplementedError,
            "gqa: SGLang asks for codes of nvfp4, which this layout does not have",
        ),
        (
            {"kv_cache_layout": "page_major_layer_major"},
            NotImplementedError,
            "gqa: SGLang asks for the order page_major_layer_major, which this layout does not have",
        ),
        (
            {"post_capture_active": True},
            NotImplementedError,
            "gqa: SGLang asks for memory backed after capture (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING), "
            "which this layout does not have",
        ),
        (
            {"dtype": torch.float8_e5m2},
            ValueError,
            "gqa: keys and values of float8_e5m2, row by row in two tensors, are none of this layout's: "
            "`bf16_nhd`, `fp8_nhd`",
        ),
        (
            {"dtype": torch.float4_e2m1fn_x2},
            ValueError,
            "gqa: keys and values of float4_e2m1fn_x2, row by row in two tensors, are none of this layout's: "
            "`bf16_nhd`, `fp8_nhd`",
        ),
    ],
)
def test_unfit_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with deployment().serving():
        assert adapter.GqaTokenToKVPool(100, **ARGUMENTS).size == 100
        with pytest.raises(error) as raised:
            adapter.GqaTokenToKVPool(100, **(ARGUMENTS | change))
        assert str(raised.value) == message


ARGUMENTS = {
    "page_size": 1,
    "dtype": torch.bfloat16,
    "head_num": 2,
    "head_dim": 128,
    "layer_num": 2,
    "device": "cpu",
    "enable_memory_saver": False,
}


def test_heads_before_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own switch for HND pages."""
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    with deployment().serving() as configurator:
        assert build_own(configurator, 64).k_buffer[0].shape == (5, 8, 16, 128)
        for make in (lambda: build(configurator, 64), lambda: DefaultPoolConfigurator(configurator)):
            with pytest.raises(NotImplementedError) as error:
                make()
            assert str(error.value) == (
                "gqa: SGLang asks for the order HND (SGLANG_USE_HND_KVCACHE), which this layout does not have"
            )


def test_decode_context_parallelism() -> None:
    message = "^gqa: decode context parallelism is not supported by this layout$"
    k = torch.ones(1, 4, 128).bfloat16()
    with deployment(ranks=2).serving() as configurator:
        pool = build(configurator, 64)
        with pytest.raises(NotImplementedError, match=message):
            pool.set_kv_buffer(layer(0), torch.tensor([1]), k, k, dcp_kv_mask=torch.tensor([True]))
        with get_parallel().override(attn_dcp_size=2):
            for make in (lambda: build(configurator, 64), lambda: DefaultPoolConfigurator(configurator)):
                with pytest.raises(NotImplementedError, match=message):
                    make()


@pytest.mark.parametrize(
    ("change", "arguments", "name"),
    [
        ({"kv_cache_dtype_str": "mxfp8"}, (), "mxfp8"),
        ({}, (("prefill_only_disable_kv_cache", True),), "a prefill that keeps nothing"),
        ({}, (("enable_unified_memory", True),), "unified memory"),
        ({"kv_shard_rank": 0}, (), "KV sharding"),
        ({"mambaish_config": object()}, (), "a hybrid with linear attention"),
    ],
)
def test_other_pools_are_refused(change: dict[str, Any], arguments: tuple, name: str) -> None:
    """For them SGLang builds classes of its own without asking the platform, or a word."""
    with deployment(arguments=arguments).serving() as configurator:
        for attribute, value in change.items():
            setattr(configurator, attribute, value)
        message = f"^kvgen: SGLang builds a pool of its own for {name}; unset SGLANG_PLATFORM to use it$"
        with pytest.raises(PluginError, match=message):
            correct(None, None, configurator)


def test_sparse_attention_of_minimax_is_refused() -> None:
    model = model_of("llama-3.1-8b")
    model.hf_config.architectures = ["MiniMaxM3SparseForCausalLM"]
    with deployment(model=model).serving() as configurator:
        message = "^kvgen: SGLang builds a pool of its own for the sparse attention of MiniMax; "
        with pytest.raises(PluginError, match=message):
            correct(None, None, configurator)


def test_other_models_are_left_alone() -> None:
    """A DSA model keeps SGLang's own pool and price where the adapter is that of `gqa`."""
    with Deployment("bf16", None, 0, 2).serving() as configurator:
        pricing = DefaultPoolConfigurator(configurator)
        assert (pricing._cell_size, pricing._fixed_overhead_bytes) == (2568, 0)
        assert not hasattr(build(configurator, 128), "generated")


# -- memory, and what HiCache and other parts of SGLang are told


def test_memory_comes_from_sglangs_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers, and they alone, are allocated where its memory saver and its memory pool are at work."""
    entered: list[object] = []

    class Region:
        def region(self, tag: str) -> "Region":
            entered.append(tag)
            return self

        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *error: object) -> None:
            entered.append("out")

    monkeypatch.setattr("torch.cuda.use_mem_pool", lambda memory_pool: entered.append(memory_pool) or nullcontext())
    with deployment(end=2).serving() as configurator:
        pool = build(configurator, 64)
        assert entered == []
        pool.memory_saver_adapter, pool.custom_mem_pool = Region(), "a memory pool"
        pool._create_buffers()
    assert entered == ["a memory pool", "kv_cache", "in", "out"] * 2  # keys and values of two layers
    assert pool.data_ptrs.tolist() == [rows.data_ptr() for rows in (*pool.k_buffer, *pool.v_buffer)]


def test_what_a_pool_has_and_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are compiled, the stage is SGLang's, and cleared buffers are gone."""
    warmed: list[object] = []
    monkeypatch.setattr(gqa.Pool, "warmup", lambda pool: warmed.append(pool))
    arguments = (("speculative_algorithm", "EAGLE"),)
    with deployment(start=20, end=30, arguments=arguments).serving() as configurator:
        pool, own = build(configurator, 64), build_own(configurator, 64)
    assert warmed == [pool.generated] and pool._kv_copy_config is None
    names = ("start_layer", "end_layer", "layer_num", "model_layer_ids", "size", "page_size", "dtype", "store_dtype")
    for name in (*names, "head_num", "head_dim", "v_head_dim", "row_dim", "v_row_dim", "kv_cache_layout", "mem_usage"):
        assert getattr(pool, name) == getattr(own, name), name
    rows = weakref.ref(pool.generated)
    warmed.clear()
    pool._clear_buffers()
    assert not hasattr(pool, "k_buffer") and not hasattr(pool, "v_buffer")
    assert rows() is None


@every_pool
def test_what_hicache_keeps_is_declared(both: Both) -> None:
    """One pool on the host, of the same rows and layers."""
    for pool in both:
        (decl,) = pool.host_pool_decls()
        assert decl.device_pool is pool
    infos = [pool.get_device_pool_infos() for pool in both]
    (one,), (other,) = infos
    assert (one.pool_name, one.layer_ids) == (other.pool_name, other.layer_ids)
    names = ("page_size", "head_num", "head_dim", "v_head_dim", "dtype", "device", "scales")
    for name in names:
        assert getattr(one.buffer_info, name) == getattr(other.buffer_info, name)
    for info in (one, other):
        info.buffer_info.validate(layer_ids=info.layer_ids)
    assert one.buffer_info.buffers.layout == other.buffer_info.buffers.layout


def test_sglangs_canary_has_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks a pool up by its very class, for which it has a function of its own."""
    attachers = dict(pool_patcher._POOL_ATTACHERS)
    monkeypatch.setattr(pool_patcher, "_POOL_ATTACHERS", attachers)
    with deployment(end=2).serving() as configurator:
        pool = build(configurator, 64)
    words = {"pool": pool, "device": torch.device("cpu"), "kv_token_id_vs_position_offset": 0}
    message = "^kv-canary: no attacher registered for pool class GqaTokenToKVPool; "
    with pytest.raises(NotImplementedError, match=message):
        pool_patcher.attach_canary_buffers(**words, config=None)
    pool_patcher.register_pool_attacher(adapter.TokenToKVPool, pool_patcher.attach_mha)
    monkeypatch.setattr(pool_patcher, "resolve_real_kv_read_bytes", lambda config: 16)
    (group,) = pool_patcher.attach_canary_buffers(**words, config=None)
    assert [len(own) for own in (group.k_head, group.v_tail)] == [80, 80]
    assert pool.get_contiguous_buf_infos()[0] != pool.generated.get_contiguous_buf_infos()[0]
