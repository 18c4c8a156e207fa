"""Public faults of KV caches, restated in numbers: the right value comes out, and the one of the fault does not.

Each test is named after its case; the reports are those of SGLang, vLLM, TensorRT-LLM and LMCache that are named in it.
Capacities in reports leave the reserved page out, which is told apart here.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from support.models import model_config

from generated import glm_dsa, mla

GLM_5_2_OWNERS = (0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74)
DSA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
SHARING = {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def dsa(layers: int, config: dict[str, Any] | None = None, **choices: Any) -> glm_dsa.Layout:
    return glm_dsa.Layout.from_config({**DSA, "num_hidden_layers": layers, **(config or {})}, **choices)


def glm_5_2(**choices: Any) -> glm_dsa.Layout:
    return glm_dsa.Layout.from_config(model_config("glm-5.2"), **choices)


def deepseek_v3(**choices: Any) -> mla.Layout:
    return mla.Layout.from_config(model_config("deepseek-v3"), **choices)


def in_pages(nbytes: int, page_bytes: int) -> tuple[int, int]:
    """Tokens of pages of 64 that fit, as reports count them, and with the reserved page paid for."""
    pages = nbytes // page_bytes
    return pages * 64, (pages - 1) * 64


def test_1_the_indexer_and_not_the_latent_has_the_host_ratio() -> None:
    """sglang 31992: priced with 576 bytes of latent and without the ratio, the sum was 6,240 bytes short."""
    cells = {
        (kv_format, ratio): glm_dsa.cell_size(dsa(78, kv_format=kv_format, host_to_device_ratio=ratio))
        for kv_format, ratio in (("fp8_scaled", 4), ("fp8_scaled", 1), ("bf16", 4))
    }
    assert cells == {("fp8_scaled", 4): 92352, ("fp8_scaled", 1): 61464, ("bf16", 4): 131040}
    assert 92352 - 86112 == 6240 == 78 * (656 - 576)


def test_2_one_of_two_terms() -> None:
    """sglang 28752: 61 layers in bf16 at ratio 2; neither term doubled is 78,324, both are 156,648."""
    assert glm_dsa.cell_size(dsa(61, kv_format="bf16", host_to_device_ratio=2)) == 86376 == 61 * (1152 + 264)


def test_4_the_indexer_is_priced_and_reported() -> None:
    """sglang 11309: DeepSeek-V3.2 in 10 GiB holds 223,360 tokens, a page less with the reserved one; not 268,288."""
    layout = glm_dsa.Layout.from_config(model_config("deepseek-v3.2"))
    assert glm_dsa.cell_size(layout) == 48068 == 61 * 788
    reported, own = in_pages(10 * 2**30, 64 * 48068)
    assert (reported, own) == (223360, 223296)
    assert glm_dsa.max_tokens(layout, 10 * 2**30) == own
    assert in_pages(10 * 2**30, 64 * 61 * 656)[0] == 268288
    pool = glm_dsa.Pool(layout, 640, device="meta")
    buffers = [pool.buffer(name, layer) for name in ("kv", "index_k") for layer in range(61)]
    assert sum(buffer.numel() for buffer in buffers) == pool.num_bytes() == glm_dsa.bytes_for(layout, 640)


@pytest.mark.parametrize(("elide_shared", "cell"), [(False, 55224), (True, 47700)])
def test_6_layers_that_share_hold_no_indexer_keys(elide_shared: bool, cell: int) -> None:
    """sglang 30531: 57 of 78 layers; 7,524 bytes a token."""
    layout = glm_5_2(kv_format="fp8_raw", elide_shared=elide_shared)
    assert glm_dsa.cell_size(layout) == cell
    assert glm_dsa.bytes_for(layout, 64) == glm_dsa.Pool(layout, 64, device="meta").num_bytes() == 2 * 64 * cell
    assert 55224 - 47700 == 7524 == 57 * 132


def test_7_keys_are_bytes_whatever_the_latent_is() -> None:
    """TensorRT-LLM 15088: 132 bytes of keys beside a bf16 latent, not 264."""
    assert glm_dsa.cell_size(dsa(78, kv_format="bf16")) == 100152 != 110448


def test_8_pipeline_stages() -> None:
    """TensorRT-LLM 16558: 12 and 9 owners of 39 layers, the draft layer on the last stage, and a stage of none."""
    first, last = (glm_5_2(kv_format="fp8_raw", start_layer=start, end_layer=start + 39) for start in (0, 39))
    assert [len(stage.layers("index_k")) for stage in (first, last)] == [12, 9]
    assert [glm_dsa.cell_size(stage) for stage in (first, last)] == [24048, 23652]
    assert glm_dsa.cell_size(glm_5_2(kv_format="fp8_raw", start_layer=39, role="both")) == 24360
    empty = glm_5_2(start_layer=39, end_layer=39)
    assert glm_dsa.cell_size(empty) == glm_dsa.bytes_for(empty, 6400) == glm_dsa.Pool(empty, 64).num_bytes() == 0


def test_9_a_draft_layer_is_a_row_more() -> None:
    """sglang 23862: DeepSeek-V3 and its NextN layer."""
    assert mla.cell_size(deepseek_v3(role="both")) == 71424 == 62 * 1152
    assert mla.cell_size(deepseek_v3()) == 70272


@pytest.mark.parametrize(("kv_format", "page"), [("fp8_raw", 36864), ("fp8_scaled", 41984), ("bf16", 73728)])
def test_17_three_rows_by_name(kv_format: str, page: int) -> None:
    """vllm 47043: bytes of a page of 64 tokens of a layer."""
    assert deepseek_v3(kv_format=kv_format).buffer("kv").page.page_bytes == page
    assert glm_5_2(kv_format=kv_format).buffer("kv").page.page_bytes == page


def test_21_all_layers_of_a_page() -> None:
    """sglang 5161: 4,497,408 bytes for 64 tokens of 61 layers."""
    layout = deepseek_v3()
    assert mla.bytes_for(layout, 64) - mla.bytes_for(layout, 0) == 4_497_408 == 64 * 70272


def test_22_target_and_draft_share_a_count_of_pages() -> None:
    """sglang 30581: 170 GiB hold 58,918 pages of both, of which one is reserved; of the target alone, 63,482."""
    layout = glm_5_2(kv_format="fp8_raw", role="both")
    assert glm_dsa.cell_size(layout) == 48408 == 44928 + 2772 + 708
    # the report divides by what a page of 64 tokens costs
    assert 170 * 2**30 // (64 * 48408) == 58918
    assert glm_dsa.max_tokens(layout, 170 * 2**30) == (58918 - 1) * 64


def test_24_26_latents_are_not_keys_and_values() -> None:
    """LMCache 688, TensorRT-LLM 12188: DeepSeek-V3 is 70,272 bytes a token, not 124,928; target and draft in 10 GiB."""
    assert mla.cell_size(deepseek_v3()) == 70272 != 124928
    layout = deepseek_v3(role="both")
    reported, own = in_pages(10 * 2**30, 64 * 71424)
    assert mla.max_tokens(layout, 10 * 2**30) == own == reported - 64
    assert reported == 150272


@pytest.mark.parametrize(("kv_format", "safe"), [("fp8_raw", 3_728_270), ("fp8_scaled", 3_273_603)])
def test_31_addresses_have_64_bits(kv_format: str, safe: int) -> None:
    """tokenspeed 501: behind the last slot whose byte fits 32 bits. The reserved page stays untouched."""
    row = {"fp8_raw": 576, "fp8_scaled": 656}[kv_format]
    assert safe * row < 2**31 <= (safe + 1) * row
    layout = mla.Layout.from_config({**DSA, "num_hidden_layers": 1}, kv_format=kv_format)
    pool = mla.Pool(layout, -(-(safe + 2) // 64) * 64)
    latent, rope = torch.ones(2, 512).bfloat16(), torch.ones(2, 64).bfloat16()
    pool.set_mla_kv_buffer(0, torch.tensor([safe, safe + 1]), latent, rope)
    loaded = pool.get_mla_kv_buffer(0, torch.tensor([safe, safe + 1]))
    assert torch.equal(loaded[0][:, 0], latent) and torch.equal(loaded[1][:, 0], rope)
    assert not pool.get_key_buffer(0)[:64].any()


def test_36_37_39_slots_that_are_none() -> None:
    """TensorRT-LLM 18673, sglang 32477, 34613: -1, the slot behind the last, the reserved one; also of pages of 1."""
    for page_size in (1, 64):
        layout = mla.Layout.from_config({**DSA, "num_hidden_layers": 1}, page_size=page_size)
        pool = mla.Pool(layout, 128)
        behind = 128 + page_size
        latent, rope = torch.ones(5, 512).bfloat16(), torch.ones(5, 64).bfloat16()
        loc = torch.tensor([5, -1, -1, behind, 0])
        pool.set_mla_kv_buffer(0, loc, latent, rope)
        assert pool.get_key_buffer(0).any(1).nonzero().flatten().tolist() == [5]
        pool.set_mla_kv_buffer(0, loc, latent, rope, skip_reserved=False)
        assert pool.get_key_buffer(0).any(1).nonzero().flatten().tolist() == [0, 5]


def test_40_layers_by_their_own_ids() -> None:
    """sglang 29887: a stage from layer 16 on has no layer 0, which as an index of -16 would be layer 16."""
    pool = mla.Pool(deepseek_v3(start_layer=16, end_layer=32), 64)
    assert pool.buffer("kv", 16).data_ptr() != pool.buffer("kv", 31).data_ptr()
    for layer in (0, 15, 32, -1):
        with pytest.raises(ValueError, match="^layer_id must be a layer of this pool"):
            pool.get_key_buffer(layer)


def test_58_59_regions_of_two_widths() -> None:
    """LMCache 5002, vllm 54756: 78 latents and 21 of keys; a page of all is a multiple of neither."""
    regions = glm_dsa.Pool(glm_5_2(kv_format="fp8_raw"), 64, device="meta").transfer_regions()
    widths = {name: {own.page_bytes for own in regions if own.buffer == name} for name in ("kv", "index_k")}
    assert len(regions) == 99 and widths == {"kv": {36864}, "index_k": {8448}}
    assert 78 * 36864 + 21 * 8448 == 3_052_800 and np.gcd(36864, 8448) == 768
    glm_5 = glm_dsa.Layout.from_config(model_config("glm-5"), role="both")
    assert len(glm_dsa.Pool(glm_5, 64, device="meta").transfer_regions()) == 158


def test_63_the_draft_layer_owns_an_indexer() -> None:
    """ATOM 1362, sglang 30922: whatever the rule would say of layer 78."""
    assert glm_5_2(role="both").layers("index_k") == (*GLM_5_2_OWNERS, 78)
    assert glm_5_2(role="draft").layers("index_k") == (78,)


def test_66_a_row_of_the_host_is_a_row_of_the_device() -> None:
    """sglang 13431: 656 bytes on either side, not 576 on the host."""
    for kv_format, row in (("bf16", 1152), ("fp8_scaled", 656), ("fp8_raw", 576)):
        layout = glm_5_2(kv_format=kv_format, host_to_device_ratio=2)
        assert layout.buffer("kv_host").page.slot_bytes == layout.buffer("kv").page.slot_bytes == row


def test_80_82_copies_hold_latent_and_keys_of_target_and_draft() -> None:
    """sglang 23346, 28896: cleared and loaded into other slots; 61,464 bytes a token, and 788 of the draft."""
    layout = dsa(2, {"num_nextn_predict_layers": 1}, role="both")
    pool = glm_dsa.Pool(layout, 256)
    for name, layer in itertools.product(("kv", "kv_draft", "index_k"), range(3)):
        if layer in layout.layers(name):
            pool.buffer(name, layer).random_(0, 256)
    loc = torch.arange(70, 100)
    before = pool.pack(loc)
    copy = pool.get_cpu_copy(loc)
    pool.clear_pages(torch.arange(5))
    pool.load_cpu_copy(copy, loc + 100)
    assert torch.equal(pool.pack(loc + 100), before) and not torch.equal(pool.pack(loc), before)
    records = sum(part.nbytes for part in pool.describe_staging(30))
    assert records == 30 * (2 * 788 + 788)
    assert glm_dsa.cell_size(dsa(78)) == 61464 == 78 * 788


def test_101_sets_and_not_counts() -> None:
    """prime-rl 2541, TensorRT-LLM 15574: with and without an offset there are 21 owners, of which two are the same."""
    frequency = dsa(78, {"index_topk_freq": 4}).layers("index_k")
    offset = dsa(78, SHARING).layers("index_k")
    assert dsa(12, {"index_topk_freq": 4}).layers("index_k") == (0, 1, 5, 9)
    assert dsa(12, SHARING).layers("index_k") == (0, 1, 2, 6, 10)
    assert (len(frequency), len(offset), set(frequency) & set(offset)) == (21, 21, {0, 1})
    with pytest.raises(glm_dsa.LayoutError, match="disagree about layer"):
        dsa(6, {**SHARING, "index_topk_pattern": "FFSSFS"})


def test_110_head_dim_is_no_latent() -> None:
    """omlx 2626: GLM-5.2 says 192 and GLM-5 says 64; a latent is 576 values in both."""
    for model in ("glm-5", "glm-5.2"):
        assert model_config(model)["head_dim"] in (64, 192)
        layout = glm_dsa.Layout.from_config(model_config(model), kv_format="bf16")
        assert layout.buffer("kv").page.slot_bytes == 1152 == 2 * 576
        assert "head_dim" not in layout.config_used
