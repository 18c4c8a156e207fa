"""Models without an indexer: SGLang's MLA pool against the generated one of layout `mla`."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deployments import E4M3, Deployment, build, build_own, deepseek_v3, own_cell_size
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

from generated import mla
from generated.sglang import mla as adapter

CELLS = {"bf16": 70272, "fp8_raw": 35136}  # 61 x 2 x 576, and 61 x 576


@pytest.fixture(autouse=True)
def its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_SGLANG_POOL", "generated.sglang.mla")


def shapes(pool: Any) -> list[tuple]:
    return [(tuple(rows.shape), rows.stride(), rows.dtype) for rows in pool.kv_buffer]


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("stage", [(0, 61), (0, 31), (31, 61)])
@pytest.mark.parametrize("kv_format", CELLS)
def test_the_configurator_builds_and_prices_the_generated_pool(
    kv_format: str, stage: tuple[int, int], page: int
) -> None:
    """Shapes, item lengths and price are SGLang's, but for the reserved page, which SGLang does not price."""
    tokens = 128
    with Deployment(kv_format, deepseek_v3(), *stage, page=page).serving() as configurator:
        pool, own = build(configurator, tokens), build_own(configurator, tokens)
        assert type(pool) is adapter.MlaTokenToKVPool and type(own) is MLATokenToKVPool
        assert pool.generated.layout.kv_format == kv_format
        assert shapes(pool) == shapes(own)
        assert pool.get_contiguous_buf_infos()[1:] == own.get_contiguous_buf_infos()[1:]
        assert pool.data_ptrs.tolist() == pool.get_contiguous_buf_infos()[0]
        assert pool.get_kv_size_bytes() == own.get_kv_size_bytes() == mla.bytes_for(pool.generated.layout, tokens)
        cell = own_cell_size(configurator)
        assert mla.cell_size(pool.generated.layout) == cell == CELLS[kv_format] * (stage[1] - stage[0]) // 61
        assert own.get_kv_size_bytes() - tokens * cell == page * cell
        pricing = DefaultPoolConfigurator(configurator)
        assert pool.get_kv_size_bytes() == tokens * pricing._cell_size + pricing._fixed_overhead_bytes
        assert len(pool.host_pool_decls()) == len(own.host_pool_decls()) == 1


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("kv_format", CELLS)
def test_a_draft_is_priced_too(kv_format: str, page: int) -> None:
    """Two layers and a draft of one: of bf16 rows 3 x 1152 bytes a token, and a reserved page of each pool."""
    cell = {"bf16": 3 * 1152, "fp8_raw": 3 * 576}[kv_format]
    fixed = {("bf16", 64): 221_184, ("fp8_raw", 64): 110_592, ("bf16", 1): 3456, ("fp8_raw", 1): 1728}
    target = Deployment(kv_format, deepseek_v3(2), 0, 2, draft_layers=1, page=page)
    draft = Deployment(kv_format, deepseek_v3(2), 0, 1, is_draft=True, page=page)
    with target.serving() as configurator:
        pricing = DefaultPoolConfigurator(configurator)
        assert (pricing._cell_size, pricing._fixed_overhead_bytes) == (cell, fixed[kv_format, page])
        tokens = pricing.calculate_pool_sizes(10_000_000, page).max_total_num_tokens
        pools = [build(configurator, tokens)]
    with draft.serving() as configurator:
        pools.append(build(configurator, tokens))
    assert [type(pool) for pool in pools] == [adapter.MlaTokenToKVPool] * 2
    allocated = sum(pool.get_kv_size_bytes() for pool in pools)
    assert allocated == tokens * cell + fixed[kv_format, page] <= 10_000_000 < allocated + page * cell


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("kv_format", CELLS)
def test_the_same_bytes(kv_format: str, page: int) -> None:
    random = np.random.default_rng(7)
    tokens = 256
    with Deployment(kv_format, deepseek_v3(3), 0, 3, page=page).serving() as configurator:
        pools = build_own(configurator, tokens), build(configurator, tokens)
        for one, other in zip(*(pool.kv_buffer for pool in pools), strict=True):
            one.view(torch.uint8).random_(0, 256)
            other.copy_(one)

        def slots(count: int) -> torch.Tensor:
            return torch.from_numpy(random.permutation(tokens + page - 1)[:count] + 1)

        def both(call: Any) -> list[Any]:
            results = [call(pool) for pool in pools]
            for one, other in zip(*(pool.kv_buffer for pool in pools), strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            return results

        layer = SimpleNamespace(layer_id=2)
        loc = torch.cat([slots(60), torch.tensor([0])])
        nope, rope = torch.randn(61, 1, 576).bfloat16().split([512, 64], -1)
        both(lambda pool: pool.set_mla_kv_buffer(layer, KVWriteLoc(loc), nope, rope))
        both(lambda pool: pool.set_kv_buffer(layer, loc, torch.cat([nope, rope], -1), None, layer_id_override=0))
        if kv_format == "fp8_raw":
            codes = torch.from_numpy(random.integers(0, 256, (61, 1, 576), np.uint8)).view(E4M3)
            both(lambda pool: pool.set_mla_kv_buffer(layer, loc, *codes.split([512, 64], -1)))
        sources, targets = slots(80), slots(80)
        both(lambda pool: pool.move_kv_cache(targets, sources))
        saved, loaded = slots(90), slots(90)
        copies = both(lambda pool: pool.get_cpu_copy(saved))
        for pool, copy in zip(pools, copies, strict=True):
            pool.load_cpu_copy(copy, loaded)
        for dtype in (torch.bfloat16, None):
            for one, other in zip(
                *both(lambda pool, dtype=dtype: pool.get_mla_kv_buffer(layer, loc, dtype)), strict=True
            ):
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for name in ("get_key_buffer", "get_value_buffer"):
            one, other = (getattr(pool, name)(1) for pool in pools)
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_other_models_are_left_alone() -> None:
    """A DSA model keeps SGLang's own pool and price where the adapter is that of `mla`."""
    with Deployment("bf16", None, 0, 2).serving() as configurator:
        pricing = DefaultPoolConfigurator(configurator)
        assert (pricing._cell_size, pricing._fixed_overhead_bytes) == (2568, 0)
        assert not hasattr(build(configurator, 128), "generated")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"dcp_replicated": True},
            NotImplementedError,
            "mla: decode context parallelism is not supported by this layout",
        ),
        ({"use_dsa": True}, NotImplementedError, "mla: this layout has no indexer keys"),
        ({"kv_lora_rank": 256}, ValueError, "mla: kv_lora_rank: this layout is for 512, found 256"),
        (
            {"dtype": torch.float16},
            ValueError,
            "mla: a row of float16 with 1152 bytes is none of this layout's: "
            "bf16 with 1152 bytes, e4m3 with 656 bytes, e4m3 with 576 bytes",
        ),
    ],
)
def test_unfit_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "page_size": 1,
        "dtype": torch.bfloat16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    with Deployment("bf16", deepseek_v3(2), 0, 2).serving():
        assert adapter.MlaTokenToKVPool(100, **arguments).size == 100
        with pytest.raises(error) as raised:
            adapter.MlaTokenToKVPool(100, **(arguments | change))
        assert str(raised.value) == message
