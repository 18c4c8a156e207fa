"""Public faults of KV caches, restated in numbers: the right value comes out, and the one of the fault does not.

Each test is named after its case of `docs/cases.md`, and its report after the project that it is of. Capacities in
reports leave the reserved page out, which is told apart here. Here are latent rows and their indexers; keys and values
are in `test_cases_kv.py`, layouts that do not come with kvgen in `test_cases_language.py`.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import kvgen
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


def test_32_pages_of_480_rows() -> None:
    """vllm 47671: page 7,768 of 480 x 576 elements is the first whose number times its stride is no int32."""
    assert 7767 * 480 * 576 < 2**31 <= 7768 * 480 * 576
    layout = mla.Layout.from_config({**DSA, "num_hidden_layers": 1}, kv_format="fp8_raw", page_size=480)
    pool = mla.Pool(layout, 7768 * 480)
    slots = torch.tensor([7768 * 480 - 1, 7768 * 480])
    pool.set_mla_kv_buffer(0, slots, torch.ones(2, 512).bfloat16(), torch.ones(2, 64).bfloat16())
    assert all(loaded.eq(1).all() for loaded in pool.get_mla_kv_buffer(0, slots))
    pages = pool.buffer("kv", 0)
    assert pages[7767, -576:].all() and pages[7768, :576].all() and not pages[0].any()


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


@pytest.mark.parametrize(("kv_format", "row"), [("bf16", 1152), ("fp8_scaled", 656), ("fp8_raw", 576), ("nvfp4", 432)])
def test_66_a_row_of_a_copy_is_a_row_of_the_device(kv_format: str, row: int) -> None:
    layout = deepseek_v3(kv_format=kv_format, end_layer=1)
    assert layout.buffer("kv").page.slot_bytes == row
    copied = sum(part.record_bytes for part in mla.Pool(layout, 64).describe_staging(1))
    assert copied == (row - 16 if kv_format == "nvfp4" else row)  # the gap of 16 bytes has no values


def test_67_a_slot_is_at_one_place_in_target_and_draft() -> None:
    """sglang 32418: row 1,000 begins at byte 656,000 in both; of a draft of 576 bytes, 80,000 bytes before."""
    pool = glm_dsa.Pool(dsa(1, {"num_nextn_predict_layers": 1}, role="both"), 1024)
    for layer, name in enumerate(("kv", "kv_draft")):
        pool.set_mla_kv_buffer(layer, torch.tensor([1000]), torch.ones(1, 512).bfloat16(), torch.ones(1, 64).bfloat16())
        places = pool.buffer(name, layer).view(-1).nonzero().flatten()
        assert (int(places[0]), int(places[-1])) == (656_000, 656_655)
    assert 656_000 - 1000 * 576 == 80_000
    hosts = glm_5_2(host_to_device_ratio=2, role="both")
    assert {hosts.buffer(name).page.slot_bytes for name in ("kv", "kv_draft", "kv_host")} == {656}


@pytest.mark.parametrize("kv_format", ["fp8_scaled", "fp8_raw"])
def test_70_rope_is_not_scaled_by_the_latent(kv_format: str) -> None:
    """vllm 42956: by a scale of 0.08 / 448, which is that of the latent, a rope of 1.0 came back as 0.08."""
    pool = mla.Pool(mla.Layout.from_config({**DSA, "num_hidden_layers": 1}, kv_format=kv_format), 64)
    pool.set_mla_kv_buffer(0, torch.tensor([70]), torch.full((1, 512), 0.08).bfloat16(), torch.ones(1, 64).bfloat16())
    latent, rope = pool.get_mla_kv_buffer(0, torch.tensor([70]))
    assert rope.eq(1).all() and latent.float().sub(0.08).abs().max() < 0.08 / 16


def test_71_a_gap_is_part_of_a_row() -> None:
    """sglang 38646: 256 + 32 bytes of codes and scales, 16 of nothing, then the rope: 432 bytes."""
    layout = mla.Layout.from_config({**DSA, "num_hidden_layers": 1}, kv_format="nvfp4")
    assert layout.buffer("kv").page.slot_bytes == 432 == 256 + 32 + 16 + 128
    pool = mla.Pool(layout, 64)
    pool.set_mla_kv_buffer(0, torch.tensor([1]), torch.ones(1, 512).bfloat16(), torch.full((1, 64), 1.5).bfloat16())
    row = pool.buffer("kv", 0).view(-1)[432:864]
    assert row[:288].all() and not row[288:304].any()
    assert row[304:].view(torch.bfloat16).eq(1.5).all() and not pool.buffer("kv", 0).view(-1)[864:].any()


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_scaled", "fp8_raw"])
def test_76_copies_of_rows_of_any_width(kv_format: str) -> None:
    """sglang 30736: rows of 576, 656 and 132 bytes are no multiples of 128; what is behind the last stays as it was."""
    held: list[torch.Tensor] = []

    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        held.append(torch.full((nbytes + 256,), 0xA5, dtype=torch.uint8))
        return held[-1][:nbytes]

    layout = dsa(1, kv_format=kv_format)
    source, target = glm_dsa.Pool(layout, 64), glm_dsa.Pool(layout, 64, allocate=allocate)
    for name in ("kv", "index_k"):
        source.buffer(name, 0).random_(1, 256)
    slots = torch.tensor([127, 126, 70])
    target.load_cpu_copy(source.get_cpu_copy(slots), slots)
    assert torch.equal(target.pack(slots), source.pack(slots))
    rows = target.get_key_buffer(0)
    assert rows.any(1).nonzero().flatten().tolist() == [70, 126, 127]
    assert all(memory[-256:].eq(0xA5).all() for memory in held)


def test_77_what_is_allocated_is_described() -> None:
    """sglang 24878: a kind of state that nobody knew was passed over as sent."""
    layout = glm_5_2(role="both")
    regions = glm_dsa.Pool(layout, 64, device="meta").transfer_regions()
    owned = [(name, layer) for name in ("kv", "kv_draft", "index_k") for layer in layout.layers(name)]
    assert sorted((region.buffer, region.layer) for region in regions) == sorted(owned)
    assert sum(region.nbytes for region in regions) == glm_dsa.bytes_for(layout, 64)
    with pytest.raises(LookupError, match="no buffer `index_state`"):
        layout.layers("index_state")


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


def test_83_spaces_are_not_mixed() -> None:
    """sglang 33043: entries of slots of two kinds were in one list, by the width of the first."""
    pool = glm_dsa.Pool(dsa(2, {"num_nextn_predict_layers": 1}, role="both", host_to_device_ratio=2), 64)
    regions = {(own.buffer, own.space, own.page_bytes) for own in pool.transfer_regions()}
    assert regions == {("kv", "device", 41984), ("kv_draft", "logical", 41984), ("index_k", "logical", 8448)}
    for run in (pool.pack, pool.get_cpu_copy):
        with pytest.raises(
            ValueError, match="a mapping with an entry for each of the spaces device, logical, not int64"
        ):
            run(torch.tensor([70]))


def test_87_operations_go_over_owners() -> None:
    """sglang 30472: with the pattern F F S S F S, moves and copies touch the keys of layers 0, 1 and 4 alone."""
    layout = dsa(6, {"index_topk_pattern": "FFSSFS"})
    pool = glm_dsa.Pool(layout, 128)
    assert layout.layers("index_k") == (0, 1, 4)
    assert [own.layer for own in pool.transfer_regions() if own.buffer == "index_k"] == [0, 1, 4]
    for layer in (0, 1, 4):
        pool.store_index_k(layer, torch.tensor([70]), torch.ones(1, 128).bfloat16())
    for layer in (2, 3, 5):
        for run in (
            lambda layer: pool.buffer("index_k", layer),
            lambda layer: pool.store_index_k(layer, torch.tensor([70]), torch.ones(1, 128).bfloat16()),
        ):
            with pytest.raises(LookupError, match=rf"^layer {layer} has no `index_k` here; .*\[0, 1, 4\]$"):
                run(layer)
    pool.move_kv_cache(torch.tensor([150]), torch.tensor([70]))
    copy = pool.get_cpu_copy(torch.tensor([150]))
    pool.clear_pages(torch.tensor([2]))
    pool.load_cpu_copy(copy, torch.tensor([90]))
    for layer in (0, 1, 4):
        keys = pool.buffer("index_k", layer)[1, :8192].view(64, 128)
        assert torch.equal(keys[90 - 64], keys[70 - 64]) and keys[70 - 64].all()


def test_88_a_token_is_moved_by_its_place_in_a_page() -> None:
    """sglang 31218: 130 to 70 are keys at 17,152 to 9,216 and scales at 25,096 to 16,664; 69 and 71 stay."""
    pool = glm_dsa.Pool(dsa(1), 192)
    memory = pool.buffer("index_k", 0).random_(0, 256).view(-1)
    expected = memory.clone()
    expected[9_216 : 9_216 + 128] = memory[17_152 : 17_152 + 128]
    expected[16_664 : 16_664 + 4] = memory[25_096 : 25_096 + 4]
    pool.move_kv_cache(torch.tensor([70]), torch.tensor([130]))
    assert torch.equal(memory, expected)
    chain = torch.arange(70, 140)
    before = pool.get_index_k_scale_buffer(0, torch.tensor([256]), torch.tensor([[0, 1, 2, 3]]))
    pool.move_kv_cache(chain + 3, chain)
    after = pool.get_index_k_scale_buffer(0, torch.tensor([256]), torch.tensor([[0, 1, 2, 3]]))
    order = torch.arange(256)
    order[73:143] = chain
    assert all(torch.equal(now, was[order]) for now, was in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"index_topk_pattern": "SFFF"}, "layer 0: the first layer has no earlier top-k to share"),
        ({"index_topk_pattern": "FXFF"}, "index_topk_pattern: expected the letters FS, found 'X'"),
        (
            {"index_topk_freq": 4, "index_skip_topk_offset": 0},
            "index_skip_topk_offset: expected an integer from 1 to 1099511627776, found 0",
        ),
    ],
)
def test_100_patterns_that_cannot_be(fields: dict[str, Any], line: str) -> None:
    """transformers 48764: each was an error of the running model, or none."""
    with pytest.raises(glm_dsa.LayoutError) as error:
        dsa(6, fields)
    assert str(error.value) == f"glm_dsa: {line}"


def test_100_a_pattern_that_is_short() -> None:
    """`FFSS` of 6 layers is F F S S F F, and no IndexError."""
    assert dsa(6, {"index_topk_pattern": "FFSS"}).layers("index_k") == (0, 1, 4, 5)


def test_101_sets_and_not_counts() -> None:
    """prime-rl 2541, TensorRT-LLM 15574: with and without an offset there are 21 owners, of which two are the same."""
    frequency = dsa(78, {"index_topk_freq": 4}).layers("index_k")
    offset = dsa(78, SHARING).layers("index_k")
    assert dsa(12, {"index_topk_freq": 4}).layers("index_k") == (0, 1, 5, 9)
    assert dsa(12, SHARING).layers("index_k") == (0, 1, 2, 6, 10)
    assert (len(frequency), len(offset), set(frequency) & set(offset)) == (21, 21, {0, 1})
    with pytest.raises(glm_dsa.LayoutError, match="disagree about layer"):
        dsa(6, {**SHARING, "index_topk_pattern": "FFSSFS"})


def test_102_layers_that_run_an_indexer_are_those_that_keep_keys() -> None:
    """vllm-ascend 11363: GLM-5.1 has weights of 78 indexers, and 21 that run where it is told to share."""
    own = model_config("glm-5")
    assert len(glm_dsa.Layout.from_config(own).layers("index_k")) == 78
    assert glm_dsa.Layout.from_config(own | SHARING).layers("index_k") == GLM_5_2_OWNERS
    with pytest.raises(glm_dsa.LayoutError, match="disagree about layer 3"):  # neither is taken in silence
        glm_dsa.Layout.from_config(own | SHARING | {"indexer_types": ["full"] * 78})


def test_110_head_dim_is_no_latent() -> None:
    """omlx 2626: GLM-5.2 says 192 and GLM-5 says 64; a latent is 576 values in both."""
    for model in ("glm-5", "glm-5.2"):
        assert model_config(model)["head_dim"] in (64, 192)
        layout = glm_dsa.Layout.from_config(model_config(model), kv_format="bf16")
        assert layout.buffer("kv").page.slot_bytes == 1152 == 2 * 576
        assert "head_dim" not in layout.config_used


def test_101_a_config_without_its_rules_shows_that_it_has_none() -> None:
    """A copy of GLM-5.2's config that was trimmed has an indexer in all layers; the default that was taken is told."""
    rules = ("indexer_types", "index_topk_freq", "index_skip_topk_offset")
    trimmed = {name: value for name, value in model_config("glm-5.2").items() if name not in rules}
    layout = glm_dsa.Layout.from_config(trimmed)
    assert len(layout.layers("index_k")) == 78
    assert layout.defaults_used["index_topk_freq"] == 1 and layout.defaults_used["indexer_types"] is None


V4 = {"head_dim": 512, "num_key_value_heads": 1, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 512}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
HYBRID = {"num_key_value_heads": 2, "head_dim": 256}
FOREIGN = {
    "DeepSeek-V4": V4 | {"compress_ratios": [0, 0, 4, 128], "sliding_window": 128},
    "MiniMax-M3": HYBRID | {"sparse_attention_config": {"sparse_index_dim": 128}},
    "Kimi-K3": MLA | {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}},
    "Kimi-K3, by its full layers": MLA | {"linear_attn_config": {"full_attn_layers": [4]}},
    "Qwen3-Next": HYBRID | {"full_attention_interval": 4},
    "Qwen3.5": HYBRID | {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "GLM-5.3-Flash": DSA | {"qk_rope_head_dim": 0, "index_kpool": 4},
    "pooled keys": DSA | {"index_kpool": 4, "index_topk": 2048},
}


@pytest.mark.parametrize("model", FOREIGN)
def test_families_of_no_layout_are_refused(model: str, tmp_path: Path) -> None:
    """Nothing that comes with kvgen prices them as if they had keys of every token in every layer."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 4} | FOREIGN[model]), encoding="utf-8")
    status, out, err = kvgen("budget", "--config", config, "--tokens", 6400)
    assert (status, out) == (1, "") and err.startswith("error[KV406]: no shipped layout is for this config\n")
