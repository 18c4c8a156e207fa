"""The layout `mla`: DeepSeek-V3 and Kimi-K2, what they cost, whose bytes lie where, and what it is not for."""

from typing import Any

import numpy as np
import pytest
import torch
from support.guard import GuardedAllocator
from support.models import model_config
from support.reference import Twin, bits, hostile_slots, interpreted, wild_bf16

from generated.mla import Layout, LayoutError, Pool, cell_size, max_tokens

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


NVFP4 = [  # of 16 values each, stored under the scale 1/4: what the format makes of them
    # amax 6 has the scale 6 / 6 / (1/4) = 4, code 0x48, and codes are of the values; ties go to the even one
    (
        [6, 5, 4, 3.5, 3, 2.5, 2, 1.5, 1, 0.75, 0.5, 0.25, 0, -0.25, -5, -6],
        [0x67, 0x66, 0x45, 0x34, 0x22, 0x01, 0x80, 0xFE],
        0x48,
        [6, 4, 4, 4, 3, 2, 2, 1.5, 1, 1, 0.5, 0, 0, -0.0, -4, -6],
    ),
    ([3] * 16, [0x77] * 8, 0x40, [3] * 16),  # 3 / 6 / (1/4) = 2, and 3 / (2 x 1/4) = 6
    ([0] * 16, [0] * 8, 0, [0] * 16),
    ([0, 2.0**30] + [0] * 14, [0x70] + [0] * 7, 0x7E, [0, 672] + [0] * 14),  # the scale saturates: 448 x 1/4 x 6
    # 100 / 6 / (1/4) = 66.7, in steps of 8: 64, code 0x68; 100 / 16 saturates, -1 / 16 is -0, 50 / 16 is 3
    ([100, -1, 50] + [0] * 13, [0x87, 0x05] + [0] * 6, 0x68, [96, -0.0, 48] + [0] * 13),
    # 1 / 6 / (1/4) = 0.667, in steps of 1/16: 0.6875, code 0x33; 1 / 0.171875 = 5.8
    *[([1] * 16, [0x77] * 8, 0x33, [6 * 0.171875] * 16)] * 27,
]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_of_nvfp4(backend: str) -> None:
    """Slot 70 is bytes 30,240 to 30,671: 256 of codes, even elements in low halves, 32 of scales, a gap of 16, rope."""
    values, codes, scales, read = ([*column] for column in zip(*NVFP4, strict=True))
    latent, rope = torch.tensor(values).flatten()[None].bfloat16(), torch.arange(64)[None].bfloat16()
    pool = Pool(Layout.from_config(CONFIG, kv_format="nvfp4"), 128, backend=backend)
    pool.buffer("kv", 1).fill_(0xA5)
    with interpreted():
        pool.set_mla_kv_buffer(1, torch.tensor([70]), latent, rope, 0.25)
        loaded = pool.get_mla_kv_buffer(1, torch.tensor([70]), latent_scale=torch.tensor(0.25))
    row = [*torch.tensor(codes).flatten().tolist(), *scales, *[0xA5] * 16, *rope.view(torch.uint8).flatten().tolist()]
    memory = pool.buffer("kv", 1).view(-1)
    assert memory[30240:30672].tolist() == row and len(row) == 432
    assert memory[:30240].eq(0xA5).all() and memory[30672:].eq(0xA5).all() and not pool.buffer("kv", 0).any()
    assert bits(loaded[0]).tolist() == bits(torch.tensor(read).flatten()[None, None].bfloat16()).tolist()
    assert torch.equal(loaded[1], rope[None])


def test_what_a_server_reads() -> None:
    layout = Layout.from_config(CONFIG, kv_format="fp8_scaled")
    pool = Pool(layout, 128)
    assert pool.get_key_buffer(1).shape == (192, 656)
    assert pool.get_value_buffer(1).shape == (192, 512)
    assert pool.get_contiguous_buf_infos()[1:] == ([192 * 656] * 2, [64 * 656] * 2)
    raw = Pool(Layout.from_config(CONFIG, kv_format="fp8_raw"), 128)
    assert raw.get_key_buffer(0, torch.float8_e4m3fn).shape == (192, 1, 576)
