"""The layout `mla`: DeepSeek-V3 and Kimi-K2, what they cost, whose bytes lie where, and what it is not for."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.guard import GuardedAllocator
from support.models import model_config
from support.reference import Twin, hostile_slots, interpreted, wild_bf16

from generated.mla import Layout, LayoutError, Pool, bytes_for, cell_size, max_tokens

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning:triton.runtime.interpreter")

ROWS = {"bf16": 1152, "fp8_scaled": 656, "fp8_raw": 576}  # 2 x (512 + 64), 512 + 4 x 4 + 2 x 64, 512 + 64
CONFIG = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2.5"])
@pytest.mark.parametrize(("kv_format", "cell"), [("bf16", 70272), ("fp8_scaled", 40016), ("fp8_raw", 35136)])
def test_models(model: str, kv_format: str, cell: int) -> None:
    """61 layers; the head counts and head widths of the config have no part in it."""
    layout = Layout.from_config(model_config(model), kv_format=kv_format)
    assert cell_size(layout) == cell == 61 * ROWS[kv_format]
    assert layout.layers("kv") == tuple(range(61))
    # 10 GiB hold whole pages and the reserved one; without that it would be a page more.
    pages = 10 * 2**30 // (64 * cell)
    assert max_tokens(layout, 10 * 2**30) == (pages - 1) * 64


def test_draft_of_deepseek_v3() -> None:
    config = model_config("deepseek-v3")
    assert Layout.from_config(config, role="draft").layers("kv") == (61,)
    assert cell_size(Layout.from_config(config, role="both")) == 62 * 1152
    assert Layout.from_config(model_config("kimi-k2.5"), role="draft").layers("kv") == ()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("deepseek-v3.2", "index_topk: sparse attention has indexer keys too, which the layout glm_dsa has"),
        ("glm-5.2", "index_topk: sparse attention has indexer keys too, which the layout glm_dsa has"),
    ],
)
def test_models_of_other_layouts(model: str, why: str) -> None:
    """Priced by their latent alone they would be short by their indexer keys: a tenth of DeepSeek-V3.2 in bf16."""
    with pytest.raises(LayoutError) as error:
        Layout.from_config(model_config(model))
    assert str(error.value) == f"mla: {why}"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}}, "linear_attn_config"),
        ({"linear_attn_config": {"full_attn_layers": [2]}}, "linear_attn_config"),
        ({"num_hidden_layers": 80, "layer_group_size": 8}, "layer_group_size"),  # seven of eight layers
    ],
)
def test_a_hybrid_with_linear_attention(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(LayoutError) as error:
        Layout.from_config({**CONFIG, **fields})
    assert str(error.value) == f"mla: {name}: layers of linear attention have state, no latent rows"


@pytest.mark.parametrize("fields", [{"linear_attn_config": {"kda_layers": []}}, {"layer_group_size": 1}])
def test_a_config_that_has_no_layer_of_linear_attention(fields: dict[str, Any]) -> None:
    """It has the fields of a hybrid, and latent rows in every layer."""
    assert Layout.from_config({**CONFIG, **fields}).layers("kv") == (0, 1)


@given(st.data())
def test_budget_is_allocation(data: st.DataObject) -> None:
    layers, drafts = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 2))
    start = data.draw(st.integers(0, layers + drafts))
    end = data.draw(st.integers(start, layers + drafts))
    role = data.draw(st.sampled_from(["target", "draft", "both"]))
    kv_format = data.draw(st.sampled_from(sorted(ROWS)))
    page_size, pages = data.draw(st.integers(1, 256)), data.draw(st.integers(0, 50))
    config = {**CONFIG, "num_hidden_layers": layers, "num_nextn_predict_layers": drafts}
    choices = {"kv_format": kv_format, "page_size": page_size, "role": role, "start_layer": start, "end_layer": end}
    layout = Layout.from_config(config, **choices)
    held = [layer for layer in range(start, end) if role == "both" or (layer < layers) == (role == "target")]
    priced = len(held) * (pages + 1) * page_size * ROWS[kv_format]
    pool = Pool(layout, pages * page_size, device="meta")
    assert bytes_for(layout, pages * page_size) == pool.num_bytes() == priced
    assert sum(pool.buffer("kv", layer).numel() for layer in held) == priced
    if held:
        assert max_tokens(layout, priced) == pages * page_size
        assert max_tokens(layout, priced - 1) == max(pages - 1, 0) * page_size


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(20310)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kv_format", ROWS)
def test_every_byte(random: np.random.Generator, kv_format: str, backend: str) -> None:
    """Stores, reads, moves and copies on both backends against a reference, with hostile slots and strided values."""

    def some(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        slots = [*(random.permutation(319)[:count] + 1).tolist(), *hostile_slots(320, dtype), 0]
        return torch.tensor(slots, dtype=dtype)

    def values(count: int) -> list[torch.Tensor]:
        rows = torch.from_numpy(wild_bf16(random, count, 576).view(np.int16)).view(torch.bfloat16)
        return list(rows[:, None].split([512, 64], -1))

    with interpreted() as sanitizer:
        layout = Layout.from_config(CONFIG, kv_format=kv_format)
        pool = Pool(layout, 256, allocate=GuardedAllocator("right"), backend=backend)
        own: Any = sanitizer if backend == "triton" else None
        twin = Twin(pool, kv_format, {"kv": (0, 1)}, {"kv": 320}, own)
        for layer in (0, 1):
            loc = some(70)
            twin.set_mla_kv_buffer(layer, loc, *values(len(loc)))
            loc = some(70, torch.int32)
            twin.set_mla_kv_buffer(layer, loc, *values(len(loc)), skip_reserved=False)
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                twin.get_mla_kv_buffer(layer, some(70), dtype)
        twin.move_kv_cache(some(90), some(90))
        saved = twin.get_cpu_copy(some(90))
        twin.fill(3)
        twin.load_cpu_copy(saved, some(90))
        twin.clear_pages(torch.tensor([2, 4, 9]))


def test_what_a_server_reads() -> None:
    layout = Layout.from_config(CONFIG, kv_format="fp8_scaled")
    pool = Pool(layout, 128)
    assert pool.get_key_buffer(1).shape == (192, 656)
    assert pool.get_value_buffer(1).shape == (192, 512)
    assert pool.get_contiguous_buf_infos()[1:] == ([192 * 656] * 2, [64 * 656] * 2)
    raw = Pool(Layout.from_config(CONFIG, kv_format="fp8_raw"), 128)
    assert raw.get_key_buffer(0, torch.float8_e4m3fn).shape == (192, 1, 576)
