"""Public faults of layouts that do not come with kvgen, in the language, which has them all the same.

Each test is named after its case of `docs/cases.md`. The specs are those of `tests/language`, or stand here.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import language_module, run_whole
from support.reference import one_thread

# MiniMax-M3: three dense layers and 57 sparse ones, which have index keys alone.
M3 = {
    **{"num_hidden_layers": 60, "num_key_value_heads": 4, "head_dim": 128},
    "sparse_attention_config": {
        "sparse_index_dim": 128,
        "sparse_attention_freq": [0] * 3 + [1] * 57,
        "sparse_disable_index_value": [0] * 3 + [1] * 57,
    },
}
V4 = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
V4_FLASH = {"num_hidden_layers": 43, "num_nextn_predict_layers": 1, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}
V4_PRO = {"num_hidden_layers": 61, "num_nextn_predict_layers": 1, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]}
FULL = [*range(4, 93, 4), 93]  # of Kimi-K3, counted from 1
KIMI = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
KDA = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def layout_of(name: str, config: dict[str, Any], **choices: Any) -> Any:
    return language_module(name).Layout.from_config(config, **choices)


def cell(name: str, config: dict[str, Any], **choices: Any) -> int:
    """Bytes per token, which are those that a pool has more for 256 tokens more."""
    module, layout = language_module(name), layout_of(name, config, **choices)
    pools = [module.Pool(layout, tokens, device="meta").num_bytes() for tokens in (512, 256)]
    assert pools[0] - pools[1] == 256 * module.cell_size(layout)
    return module.cell_size(layout)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"tp_size": 4}, 45312),
        ({"tp_size": 4, "host_to_device_ratio": 2}, 61440),
        ({"tp_size": 2, "host_to_device_ratio": 2}, 93696),
    ],
)
def test_3_dense_layers_and_index_keys_have_the_host_ratio(choices: dict[str, int], expected: int) -> None:
    """sglang 40743: three dense layers and 57 index keys of 256 bytes are multiplied, 57 sparse layers are not."""
    row = 4 // choices["tp_size"] * 2 * 128 * 2
    assert expected == (3 * row + 57 * 256) * choices.get("host_to_device_ratio", 1) + 57 * row
    assert cell("minimax_m3", M3, **choices) == expected


ALIGNED = """\
kvgen: 1
layout: aligned
doc: Rows of 512 and 64 values, each padded to a multiple of 128, and index keys in every fourth layer.
config: {num_layers: {type: int, from: num_hidden_layers}}
layers:
  body: num_layers
  sets: {owns: "max(layer - 2, 0) % 4 == 0"}
spaces: {token: {slots: tokens, page: 64}}
formats:
  row: {fields: {latent: "bf16[512]", rope: "bf16[64]"}, page: [[latent, {align: 256}, rope, {align: 256}]]}
  index: {fields: {key: "bf16[128]"}, page: [[key]]}
buffers:
  kv: {format: row, space: token, layers: all}
  index_k: {format: index, space: token, layers: owns}
"""


def test_5_padding_of_both_buffers_is_priced() -> None:
    """sglang-jax 1533: 640 values of 78 layers, 128 of 21; the second buffer was missing."""
    module = run_whole("aligned", lambda file: ALIGNED.encode())
    layout = module.Layout.from_config({"num_hidden_layers": 78})
    assert [buffer.bytes_per_token for buffer in layout.buffers] == [99840, 5376] == [78 * 640 * 2, 21 * 128 * 2]
    assert module.cell_size(layout) == 105216
    assert module.Pool(layout, 64, device="meta").num_bytes() == 2 * 64 * 105216 == module.bytes_for(layout, 64)


def test_16_states_are_as_many_as_are_addressed() -> None:
    """sglang 40337: a ring of 8 for each page of 256 slots with a window, and not for each window of 128."""
    layout = layout_of("dsv4", {**V4, "num_hidden_layers": 1, "compress_ratios": [4]}, swa_ratio=1)
    assert language_module("dsv4").slots(layout, "c4_state", 262_144) == 8192 + 8  # 8 are reserved
    assert 262_143 // 256 * 8 + 262_143 % 8 == 8191


@pytest.mark.parametrize(("index_format", "page"), [("mxfp4", 4352), ("fp8", 8448)])
def test_18_keys_of_four_bits_have_rows_of_their_own(index_format: str, page: int) -> None:
    """vllm 48993: 64 + 4 bytes a key, where 132 were reserved."""
    layout = layout_of("dsv4", {**V4, "num_hidden_layers": 1, "compress_ratios": [4]}, index_format=index_format)
    assert layout.buffer("c4_index").page.page_bytes == page == 64 * (68 if index_format == "mxfp4" else 132)


def test_30_pages_behind_2_31_bytes() -> None:
    """sglang 39948: page 14,340 of 149,760 bytes begins where 32 bits do not reach."""
    module = language_module("dsv4")
    assert 14_339 * 149_760 < 2**31 <= 14_340 * 149_760 and 14_340 * 256 == 3_671_040
    layout = layout_of("dsv4", {**V4, "num_hidden_layers": 1, "compress_ratios": [0]}, swa_ratio=1)
    pool = module.Pool(layout, 14_340 * 256)
    pool.set_swa_key_buffer(0, torch.tensor([3_671_040]), torch.ones(1, 448).bfloat16(), torch.ones(1, 64).bfloat16())
    pages = pool.buffer("swa_kv", 0)
    assert pages.shape == (14_341, 149_760)
    assert pages[14_340, :576].all() and not pages[:64].any() and not pages[14_339].any()


def test_61_lists_count_from_1_and_end_as_they_do() -> None:
    """inference-sim 1635: 24 of 93 layers of Kimi-K3 have latent rows, 7 of 27 of Kimi-Linear."""
    assert FULL[-2:] == [92, 93] and len(FULL) == 24
    k3 = {**KIMI, "num_hidden_layers": 93, "linear_attn_config": {**KDA, "num_heads": 96, "full_attn_layers": FULL}}
    assert layout_of("kimi_linear", k3).layers("kv") == (*range(3, 92, 4), 92)
    assert cell("kimi_linear", k3) == 27648 == 24 * 1152
    linear = {**KDA, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}
    small = {**KIMI, "num_hidden_layers": 27, "linear_attn_config": linear}
    assert cell("kimi_linear", small) == 8064 == 7 * 1152


def test_65_a_page_is_what_its_reader_strides() -> None:
    """sglang 32059: 64 rows of 584 bytes are a page of 37,440; the scales of a page of 256 come behind its data."""
    module = language_module("dsv4")
    assert 64 * 584 % 576 == 512 and 64 * 584 + 64 == 37440
    config = {**V4, "num_hidden_layers": 2, "compress_ratios": [0, 4]}
    layout = layout_of("dsv4", config, swa_ratio=1)
    assert layout.buffer("c4_kv").page.page_bytes == 37440
    pool = module.Pool(layout, 512)
    latent, rope = torch.zeros(1, 448).bfloat16(), torch.ones(1, 64).bfloat16()
    latent[0, 0] = 448
    pool.set_swa_key_buffer(0, torch.tensor([256 + 44]), latent, rope)
    places = pool.buffer("swa_kv", 0).view(-1).nonzero().flatten().tolist()
    assert places[0] == 175_104 == 149_760 + 44 * 576
    assert places[-1] // 8 * 8 == 297_568 == 149_760 + 147_456 + 44 * 8


def test_72_rows_and_strides_are_of_the_format() -> None:
    """vllm 56893: 528 bytes of DeepSeek-V4.1 fill a page of 64 to 33,792 as they are; those of V4 are padded."""
    config = {**V4, "num_hidden_layers": 1, "compress_ratios": [0], "kv_source_layer_ids": []}
    layout = layout_of("dsv41", {**config, "index_source_layer_ids": []}, rows="split")
    assert layout.buffer("swa_kv").page.page_bytes == 256 * 528 == 4 * 33792 and 33792 % 512 == 0


Q8_0 = """\
kvgen: 1
layout: q8_0
doc: Blocks of a half float and 32 codes.
config: {num_layers: {type: int, from: num_hidden_layers}}
let: {heads: 8, dim: 128}
layers: {body: num_layers}
spaces: {token: {slots: tokens, page: 32}}
formats:
  row:
    fields: {k_scale: "f16[heads, dim//32]", k: "i8[heads, dim]", v_scale: "f16[heads, dim//32]", v: "i8[heads, dim]"}
    page:
      - {each: [slot, heads, dim//32], put: [k_scale, "k[dim%32]"]}
      - {each: [slot, heads, dim//32], put: [v_scale, "v[dim%32]"]}
buffers:
  kv: {format: row, space: token, layers: all}
"""


def test_75_blocks_are_no_elements() -> None:
    """node-llama-cpp 608: 34 bytes for 32 values; Llama-3.1-8B has 65,536 of them a token."""
    module = run_whole("q8_0", lambda file: Q8_0.encode())
    layout = module.Layout.from_config({"num_hidden_layers": 32})
    assert 32 * 8 * 2 * 128 == 65536 and 65536 * 34 == 2_228_224
    assert module.cell_size(layout) == 69632 == 65536 // 32 * 34
    assert module.Pool(layout, 32, device="meta").num_bytes() == 64 * 69632


def test_79_regions_of_index_keys_are_there() -> None:
    """tokenspeed 758: a page of 128 tokens is 5,799,936 bytes, of 57 regions of index keys and 60 each of K and V."""
    layout = layout_of("minimax_m3", M3, tp_size=4)
    pool = language_module("minimax_m3").Pool(layout, 256, device="meta")
    regions = pool.transfer_regions()
    assert sum(region.page_bytes for region in regions) == 5_799_936 == 128 * 45312
    names = [region.buffer for region in regions]
    assert names.count("index_k") == 57 and len(names) == 57 + 60 + 60


ROWS = """\
kvgen: 1
layout: two_rows
doc: Two rows of 8 heads a token.
let: {rows: 2, heads: 8}
layers: {body: 1}
spaces: {token: {slots: tokens, page: 32}}
formats:
  row: {fields: {k: "bf16[rows, heads, 128]", v: "bf16[rows, heads, 128]"}, page: [[k], [v]]}
buffers:
  kv: {format: row, space: token, layers: all, split: true}
"""


def test_86_all_rows_of_a_token_are_copied() -> None:
    """sglang 40304: two rows of 8 heads of K are 4,096 bytes a token, on the device and in a copy."""
    module = run_whole("two_rows", lambda file: ROWS.encode())
    pool = module.Pool(module.Layout.from_config({}), 32)
    assert pool.buffer("kv", 0, "k").numel() == 64 * 4096
    assert [part.record_bytes for part in pool.describe_staging(1)] == [4096, 4096] == [2 * 8 * 128 * 2] * 2


@pytest.mark.parametrize(("model", "c4", "c128", "none"), [(V4_FLASH, 21, 20, 2), (V4_PRO, 30, 31, 0)])
def test_103_ratios_of_body_and_draft(model: dict[str, Any], c4: int, c128: int, none: int) -> None:
    """vllm 48304: the list has an entry for the draft layer, whose ratio is 0; ratios there are none of are refused."""
    body = model["num_hidden_layers"]
    assert len(model["compress_ratios"]) == body + 1 and c4 + c128 + none == body
    layout = layout_of("dsv4", {**V4, **model}, role="both")
    assert [len(layout.layers(name)) for name in ("c4_kv", "c128_kv", "swa_kv")] == [c4, c128, body + 1]
    assert body not in layout.layers("c4_kv") + layout.layers("c128_kv")
    with pytest.raises(ValueError, match="compress_ratios: element 0: expected one of 0, 4, 128, found 8"):
        layout_of("dsv4", {**V4, **model, "compress_ratios": [8]})
