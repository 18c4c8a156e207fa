"""What SGLang 0.5.23 builds, prices and describes with the generated pool, against its own."""

from typing import Any

import pytest
import torch
from deployments import DTYPES, SHARING, STAGES, Deployment, build, build_own, glm_5_2, own_cell_size
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

from generated.sglang import glm_dsa as adapter

TOKENS = 256
MODELS = {"all indexers": glm_5_2(), "sharing": glm_5_2(**SHARING)}
GLM_5_2_OWNERS = (0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74)
CELLS = {  # SGLang's, of 78 layers
    ("bf16", "all indexers"): 100152,
    ("bf16", "sharing"): 92628,
    ("fp8_scaled", "all indexers"): 61464,
    ("fp8_scaled", "sharing"): 53940,
    ("fp8_raw", "all indexers"): 55224,
    ("fp8_raw", "sharing"): 47700,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv_format", DTYPES)
def test_the_configurator_builds_the_generated_pool(kv_format: str, model: str, stage: tuple[int, int]) -> None:
    """Shapes, dtypes, owners, item lengths and cell size are those of SGLang's own; the bytes are what was priced."""
    with Deployment(kv_format, MODELS[model], *stage).serving() as configurator:
        pool, own = build(configurator, TOKENS), build_own(configurator, TOKENS)
        assert type(pool) is adapter.GlmDsaTokenToKVPool and type(own) is DSATokenToKVPool
        layout = pool.generated.layout
        assert layout.kv_format == kv_format
        assert shapes(pool.kv_buffer) == shapes(own.kv_buffer)
        assert shapes(pool.index_k_with_scale_buffer) == shapes(own.index_k_with_scale_buffer)
        start, end = stage
        held = [layer for layer in range(start, end) if model == "all indexers" or layer in GLM_5_2_OWNERS]
        assert list(layout.layers("index_k")) == held == [layer for layer in range(start, end) if owns(own, layer)]
        assert described(pool.get_contiguous_buf_infos()) == described(own.get_contiguous_buf_infos())
        assert described(pool.get_state_buf_infos()) == described(own.get_state_buf_infos())
        pointers = [rows.data_ptr() for rows in pool.kv_buffer]
        assert pool.data_ptrs.tolist() == pool.get_contiguous_buf_infos()[0] == pointers
        assert adapter.cell_size(layout) == own_cell_size(configurator)
        if stage == (0, 78):
            assert adapter.cell_size(layout) == CELLS[kv_format, model]
        assert pool.get_kv_size_bytes() == adapter.bytes_for(layout, TOKENS) == own.get_kv_size_bytes()
        tensors = [*pool.kv_buffer, *pool.index_k_with_scale_buffer]
        assert sum(tensor.nbytes for tensor in tensors) == adapter.bytes_for(layout, TOKENS)


def shapes(tensors: list[torch.Tensor]) -> list[tuple]:
    return [(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.nbytes) for tensor in tensors]


def owns(pool: Any, layer: int) -> bool:
    return len(pool.index_k_with_scale_buffer[layer - pool.start_layer]) > 0


def described(infos: tuple[list[int], list[int], list[int]]) -> tuple:
    """Lengths and item lengths; of addresses, which are none."""
    pointers, lengths, items = infos
    return [pointer == 0 for pointer in pointers], lengths, items
