"""The shipped layout against numbers worked out by hand: bytes, owners, stages, drafts, configs and their refusals.

Bytes of one token of one layer, page 64, nothing padded:

    bf16        (512 + 64) values x 2                            = 1152
    fp8_scaled  512 codes + 512/128 scales x 4 + 64 x 2          =  656
    fp8_raw     512 + 64 codes                                   =  576
    indexer     128 codes + one scale of 4                       =  132
"""

import json
import pickle
import random
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import CONFIGS, ROOT, model_config, problem_lines

from generated import glm_dsa
from generated.glm_dsa import (
    UNBOUNDED,
    Layout,
    Pool,
    bytes_for,
    cell_size,
    host_bytes_for,
    max_requests,
    max_tokens,
    slots,
)

PAGE = 64
LATENT = {"bf16": 1152, "fp8_scaled": 656, "fp8_raw": 576}
INDEX = 132
GIB = 2**30

# Frequency 4, offset 3: max(layer - 2, 0) is a multiple of 4 for 0, 1, 2 and then for 6, 10, ..., 74: 3 + 18 layers.
OWNERS = {0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74}
# The frequency alone: max(layer - 1, 0) is a multiple of 4 for 0, 1 and then for 5, 9, ..., 77: also 21 layers.
OWNERS_BY_FREQUENCY = {0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61, 65, 69, 73, 77}


def small(num_layers: int, **fields: object) -> dict[str, Any]:
    """A config of the family with so many layers and nothing shared but by the fields given."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    return {"num_hidden_layers": num_layers, **sizes, **fields}


def glm_5_2(**choices: object) -> Layout:
    return Layout.from_config(model_config("glm-5.2"), **choices)


def owners(config: object, **choices: object) -> set[int]:
    """The layers with an indexer, each of them once."""
    layers = Layout.from_config(config, **choices).layers("index_k")
    assert list(layers) == sorted(set(layers))
    return set(layers)


def refused(config: object, **choices: object) -> list[str]:
    """The problems of a refusal, one a line."""
    with pytest.raises(ValueError) as error:
        Layout.from_config(config, **choices)
    return problem_lines(error)


# -- bytes per token


@pytest.mark.parametrize(
    ("model", "choices", "expected"),
    [
        ("two layers", {"kv_format": "bf16"}, 2568),  # 2 x (1152 + 132)
        ("two layers", {"kv_format": "fp8_scaled"}, 1576),  # 2 x (656 + 132)
        ("two layers", {"kv_format": "fp8_scaled", "host_to_device_ratio": 2}, 1840),  # 2 x (656 + 2 x 132)
        ("two layers", {"kv_format": "fp8_scaled", "host_to_device_ratio": 4}, 2368),  # 2 x (656 + 4 x 132)
        ("glm-5.2", {"kv_format": "bf16", "elide_shared": False}, 100152),  # 78 x 1284
        ("glm-5.2", {"kv_format": "fp8_scaled", "elide_shared": False}, 61464),  # 78 x 788
        ("glm-5.2", {"kv_format": "fp8_raw", "elide_shared": False}, 55224),  # 78 x 708
        ("glm-5.2", {"kv_format": "bf16"}, 92628),  # 78 x 1152 + 21 x 132 = 89856 + 2772
        ("glm-5.2", {"kv_format": "fp8_scaled"}, 53940),  # 51168 + 2772
        ("glm-5.2", {"kv_format": "fp8_raw"}, 47700),  # 44928 + 2772
        # Ratio 4: every indexer row is there four times, 528 bytes a layer; 78 of them 41184, 21 of them 11088.
        ("glm-5.2", {"kv_format": "bf16", "elide_shared": False, "host_to_device_ratio": 4}, 131040),
        ("glm-5.2", {"kv_format": "fp8_scaled", "elide_shared": False, "host_to_device_ratio": 4}, 92352),
        ("glm-5.2", {"kv_format": "fp8_raw", "elide_shared": False, "host_to_device_ratio": 4}, 86112),
        ("glm-5.2", {"kv_format": "bf16", "host_to_device_ratio": 4}, 100944),
        ("glm-5.2", {"kv_format": "fp8_scaled", "host_to_device_ratio": 4}, 62256),
        ("glm-5.2", {"kv_format": "fp8_raw", "host_to_device_ratio": 4}, 56016),
        ("glm-5", {"kv_format": "fp8_raw"}, 55224),  # no sharing field: all 78 own
        ("deepseek-v3.2", {"kv_format": "fp8_scaled"}, 48068),  # 61 x 788
        ("deepseek-v3.2", {"kv_format": "bf16", "host_to_device_ratio": 2}, 86376),  # 61 x (1152 + 264)
    ],
)
def test_bytes_per_token(model: str, choices: dict[str, Any], expected: int) -> None:
    layout = Layout.from_config(small(2) if model == "two layers" else model_config(model), **choices)
    assert cell_size(layout) == expected
    assert type(cell_size(layout)) is int
    assert bytes_for(layout, 65 * PAGE) - bytes_for(layout, 64 * PAGE) == PAGE * expected


def test_the_scaled_format_shares_and_ratio_one_are_the_defaults() -> None:
    assert cell_size(glm_5_2()) == 53940
    assert glm_5_2().choices == {
        "kv_format": "fp8_scaled",
        "host_to_device_ratio": 1,
        "elide_shared": True,
        "role": "target",
        "start_layer": 0,
        "end_layer": 79,  # past the draft layer
    }


@pytest.mark.parametrize(
    ("kv_format", "elide_shared", "expected"),
    [
        # (4096 + 64) slots, as the engine allocates them
        ("bf16", False, 416_632_320),  # 4160 x 100152
        ("fp8_scaled", False, 255_690_240),  # 4160 x 61464
        ("bf16", True, 385_332_480),  # 4160 x 92628
        ("fp8_scaled", True, 224_390_400),  # 4160 x 53940
    ],
)
def test_totals_of_4096_tokens(kv_format: str, elide_shared: bool, expected: int) -> None:
    layout = glm_5_2(kv_format=kv_format, elide_shared=elide_shared)
    assert bytes_for(layout, 4096) == expected
    assert Pool(layout, 4096, device="meta").num_bytes() == expected


def test_ratio_multiplies_the_indexer_and_keeps_one_reserved_page() -> None:
    # Device: 4096/64 + 1 = 65 pages of 64 x 656 = 41984 bytes; logical: 16384/64 + 1 = 257 pages of 64 x 132 = 8448.
    layout = glm_5_2(elide_shared=False, host_to_device_ratio=4)
    assert bytes_for(layout, 4096) == 78 * 65 * 41984 + 78 * 257 * 8448 == 382_207_488
    assert slots(layout, "device", 4096) == 65 * 64
    assert slots(layout, "logical", 4096) == 257 * 64
    # The whole latent of HiSparse, in host memory: 257 pages of every layer.
    assert host_bytes_for(layout, 4096) == 78 * 257 * 41984 == 841_611_264
    assert host_bytes_for(glm_5_2(elide_shared=False), 4096) == 0


def test_no_tokens_cost_the_reserved_pages() -> None:
    layout = glm_5_2()
    assert bytes_for(layout, 0) == 78 * 41984 + 21 * 8448 == 3_452_160
    assert slots(layout, "logical", 0) == slots(layout, "device", 0) == 64
    ratio = glm_5_2(host_to_device_ratio=4)
    assert bytes_for(ratio, 0) == 3_452_160  # one reserved page in each space, whatever the ratio
    assert host_bytes_for(ratio, 0) == 78 * 41984


# -- what fits


@pytest.mark.parametrize(
    ("kv_format", "elide_shared", "expected"),
    [
        # 80 GiB = 85,899,345,920 bytes; the page of all layers is 64 x bytes per token; one page is the reserved one.
        ("bf16", False, 857_600),  # 13,401 pages of 6,409,728
        ("bf16", True, 927_232),  # 14,489 pages of 5,928,192
        ("fp8_scaled", False, 1_397_440),  # 21,836 pages of 3,933,696
        ("fp8_scaled", True, 1_592_384),  # 24,882 pages of 3,452,160
        ("fp8_raw", False, 1_555_392),  # 24,304 pages of 3,534,336
        ("fp8_raw", True, 1_800_704),  # 28,137 pages of 3,052,800
    ],
)
def test_tokens_in_80_gib(kv_format: str, elide_shared: bool, expected: int) -> None:
    layout = glm_5_2(kv_format=kv_format, elide_shared=elide_shared)
    assert max_tokens(layout, 80 * GIB) == expected
    assert bytes_for(layout, expected) <= 80 * GIB < bytes_for(layout, expected + PAGE)


def test_deepseek_in_10_gib_leaves_room_for_the_reserved_page() -> None:
    # 10,737,418,240 / (64 x 48,068 = 3,076,352) = 3,490 pages, one of them reserved. Without it: 3,490 x 64 = 223,360.
    layout = Layout.from_config(model_config("deepseek-v3.2"))
    assert max_tokens(layout, 10 * GIB) == 3489 * 64 == 223_296
    assert max_tokens(layout, 10 * GIB + bytes_for(layout, 0)) == 223_360


def test_elision_gives_the_published_gain() -> None:
    dense = glm_5_2(kv_format="fp8_raw", elide_shared=False)
    elided = glm_5_2(kv_format="fp8_raw")
    assert (cell_size(dense), cell_size(elided)) == (55224, 47700)
    assert 55224 * 10_000 // 47700 == 11_577  # 1.1577 times the capacity
    # The budgets that hold exactly 2,430,528 = 37,977 x 64 tokens with an indexer in every layer, reserved page apart.
    least = 37_977 * 64 * 55224
    greatest = 37_978 * 64 * 55224 - 1

    def held(layout: Layout, budget: int) -> int:
        return max_tokens(layout, budget + bytes_for(layout, 0))

    assert held(dense, least) == held(dense, greatest) == 2_430_528
    assert held(dense, least - 1) == 2_430_464 and held(dense, greatest + 1) == 2_430_592
    # least / (64 x 47,700) = 43,967.2... pages, greatest / (64 x 47,700) = 43,968.3...
    assert held(elided, least) == 43_967 * 64 == 2_813_888
    assert held(elided, greatest) == 43_968 * 64 == 2_813_952
    assert {held(elided, budget) for budget in range(least, greatest, 50_000)} == {2_813_888, 2_813_952}


def test_a_budget_below_the_reserved_pages_holds_nothing() -> None:
    layout = glm_5_2()
    fixed, page = 3_452_160, 64 * 53940
    for budget in (-1, 0, fixed - 1, fixed, fixed + page - 1):
        assert max_tokens(layout, budget) == 0
    assert max_tokens(layout, fixed + page) == 64
    assert max_tokens(layout, fixed + 2 * page - 1) == 64
    assert max_requests(layout, fixed - 1, 0) == 0
    assert max_requests(layout, fixed, 0) == UNBOUNDED == 2**62
    assert max_requests(layout, fixed, 64) == 0


# -- owners


@pytest.mark.parametrize("choices", [{}, {"kv_format": "bf16"}, {"kv_format": "fp8_raw", "host_to_device_ratio": 4}])
def test_owners_of_glm_5_2(choices: dict[str, Any]) -> None:
    assert len(OWNERS) == len(OWNERS_BY_FREQUENCY) == 21
    assert set(range(2)) == OWNERS & OWNERS_BY_FREQUENCY
    assert owners(model_config("glm-5.2"), **choices) == OWNERS
    assert owners(model_config("glm-5.2"), elide_shared=False, **choices) == set(range(78))
    assert glm_5_2(**choices).layers("kv") == tuple(range(78))


@pytest.mark.parametrize("absent", ["indexer_types", "index_skip_topk_offset"])
def test_either_rule_of_glm_5_2_gives_its_owners_alone(absent: str) -> None:
    config = model_config("glm-5.2")
    del config[absent]
    assert owners(config) == OWNERS


def test_the_frequency_alone_gives_other_layers() -> None:
    config = model_config("glm-5.2")
    del config["indexer_types"], config["index_skip_topk_offset"]
    assert owners(config) == OWNERS_BY_FREQUENCY


@pytest.mark.parametrize(
    ("num_layers", "fields", "expected"),
    [
        (6, {}, {0, 1, 2, 3, 4, 5}),
        (6, {"indexer_types": ["full", "shared", "shared", "full", "shared", "full"]}, {0, 3, 5}),
        (6, {"indexer_types": ("full", "shared", "shared", "full", "shared", "full")}, {0, 3, 5}),
        (5, {"indexer_types": ["full", "shared"]}, {0, 2, 3, 4}),  # past the end: owns
        (5, {"indexer_types": []}, {0, 1, 2, 3, 4}),
        (3, {"indexer_types": ["full", "shared", "full", "shared", "shared"]}, {0, 2}),
        (8, {"cli_factor": 3}, {0, 3, 6}),
        (4, {"cli_factor": 1}, {0, 1, 2, 3}),
        (6, {"index_topk_pattern": "FFSS"}, {0, 1, 4, 5}),  # past the end: owns
        (6, {"index_topk_pattern": "FSFSSF"}, {0, 2, 5}),
        (3, {"index_topk_pattern": ""}, {0, 1, 2}),
        (12, {"index_skip_topk_offset": 3, "index_topk_freq": 4}, {0, 1, 2, 6, 10}),
        (6, {"index_skip_topk_offset": 1, "index_topk_freq": 2}, {0, 2, 4}),
        (9, {"index_skip_topk_offset": 2, "index_topk_freq": 3}, {0, 1, 4, 7}),
        (5, {"index_skip_topk_offset": 50, "index_topk_freq": 3}, {0, 1, 2, 3, 4}),
        (5, {"index_skip_topk_offset": 3}, {0, 1, 2, 3, 4}),  # the frequency is 1
        (12, {"index_topk_freq": 4}, {0, 1, 5, 9}),
        (7, {"index_topk_freq": 2}, {0, 1, 3, 5}),
        (4, {"index_topk_freq": 1}, {0, 1, 2, 3}),
        (4, {"index_topk_freq": 100}, {0, 1}),
    ],
)
def test_each_rule(num_layers: int, fields: dict[str, Any], expected: set[int]) -> None:
    assert owners(small(num_layers, **fields)) == expected
    assert owners(small(num_layers, **fields), elide_shared=False) == set(range(num_layers))


# Each of the four says: every second layer of eight shares.
AGREEING = {
    "indexer_types": ["full", "shared"] * 4,
    "cli_factor": 2,
    "index_topk_pattern": "FSFSFSFS",
    "index_skip_topk_offset": 1,
}
NAMES = tuple(AGREEING)


def stated(*names: str, **other: object) -> dict[str, Any]:
    """A config of eight layers that states the rules named; the frequency comes with the offset."""
    fields = {name: AGREEING[name] for name in names} | other
    if "index_skip_topk_offset" in fields:
        fields = {"index_topk_freq": 2} | fields
    return small(8, **fields)


def test_rules_that_agree_are_taken_together() -> None:
    for first in range(4):
        for last in range(first, 4):
            assert owners(stated(*NAMES[first : last + 1])) == {0, 2, 4, 6}


@pytest.mark.parametrize(
    ("config", "first", "second", "layer"),
    [
        # shared by the types: 1 3 5 7; by every third: 1 2 4 5 7
        (stated("indexer_types", cli_factor=3), "indexer_types", "cli_factor", 2),
        # by the pattern: 1 3 7
        (stated("indexer_types", index_topk_pattern="FSFSFFFS"), "indexer_types", "index_topk_pattern", 5),
        # max(layer - 2, 0) % 2: 3 5 7
        (stated("indexer_types", index_skip_topk_offset=3), "indexer_types", "index_skip_topk_offset", 1),
        # by the pattern, which ends before layer 7: 1 3 5
        (stated("cli_factor", index_topk_pattern="FSFSFSF"), "cli_factor", "index_topk_pattern", 7),
        # layer % 4: 1 2 3 5 6 7
        (
            stated("cli_factor", index_skip_topk_offset=1, index_topk_freq=4),
            "cli_factor",
            "index_skip_topk_offset",
            2,
        ),
        # max(layer - 1, 0) % 2: 2 4 6
        (
            stated("index_topk_pattern", index_skip_topk_offset=2),
            "index_topk_pattern",
            "index_skip_topk_offset",
            1,
        ),
        # the weakest of four: 1 2 3 5 6 7
        (stated(*NAMES, index_topk_freq=4), "indexer_types", "index_skip_topk_offset", 2),
        # types that end early own the rest: 1 3
        (stated(cli_factor=2, indexer_types=["full", "shared"] * 2), "indexer_types", "cli_factor", 5),
        # nothing is shared by types that are all full
        (stated(cli_factor=2, indexer_types=["full"] * 8), "indexer_types", "cli_factor", 1),
    ],
)
def test_rules_that_disagree_are_refused(config: dict[str, Any], first: str, second: str, layer: int) -> None:
    for choices in ({}, {"elide_shared": False}, {"start_layer": 0, "end_layer": 1}, {"role": "draft"}):
        (line,) = refused(config, **choices)
        assert first in line and second in line
        assert re.search(r"layer (\d+)", line)[1] == str(layer)
        assert not [name for name in NAMES if name in line and name not in (first, second)]


def test_a_changed_list_of_glm_5_2_disagrees_with_its_frequency() -> None:
    config = model_config("glm-5.2")
    config["indexer_types"][10] = "shared"
    (line,) = refused(config)
    assert "indexer_types" in line and "index_skip_topk_offset" in line and "layer 10" in line


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"indexer_types": ["full"] * 8}, {0, 1, 2, 3, 4, 5, 6, 7}),
        ({"index_topk_pattern": "FFSFFFFF"}, {0, 1, 3, 4, 5, 6, 7}),
        ({"cli_factor": 5}, {0, 5}),
    ],
)
def test_the_frequency_alone_is_compared_with_nothing(fields: dict[str, Any], expected: set[int]) -> None:
    assert owners(small(8, index_topk_freq=4, **fields)) == expected


def test_rules_are_compared_over_the_body_alone() -> None:
    # Layer 4 is a draft layer: the types say it shares, every-second-layer says it does not.
    config = small(4, num_nextn_predict_layers=1, cli_factor=2, indexer_types=["full", "shared"] * 2 + ["shared"])
    assert owners(config, role="both") == {0, 2, 4}


# -- stages, drafts and roles


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 39, {0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38}),
        (39, 78, {42, 46, 50, 54, 58, 62, 66, 70, 74}),
        (20, 40, {22, 26, 30, 34, 38}),
        (3, 6, set()),
    ],
)
def test_pipeline_stages_of_glm_5_2(start: int, end: int, expected: set[int]) -> None:
    assert len(expected) == {0: 12, 39: 9, 20: 5, 3: 0}[start]
    layout = glm_5_2(start_layer=start, end_layer=end)
    assert set(layout.layers("index_k")) == expected
    assert layout.layers("kv") == tuple(range(start, end))
    assert layout.layers("kv_draft") == ()
    assert cell_size(layout) == (end - start) * 656 + len(expected) * 132


def test_stages_of_the_raw_format() -> None:
    # 39 x 576 + 12 x 132; 39 x 576 + 9 x 132; and the draft layer's 576 + 132 on top
    assert cell_size(glm_5_2(kv_format="fp8_raw", start_layer=0, end_layer=39)) == 24048
    assert cell_size(glm_5_2(kv_format="fp8_raw", start_layer=39)) == 23652
    assert cell_size(glm_5_2(kv_format="fp8_raw", start_layer=39, end_layer=78)) == 23652
    assert cell_size(glm_5_2(kv_format="fp8_raw", start_layer=39, role="both")) == 24360


@pytest.mark.parametrize("role", ["target", "draft", "both"])
def test_a_stage_with_no_layers_costs_nothing(role: str) -> None:
    for start in (0, 40, 79):
        layout = glm_5_2(start_layer=start, end_layer=start, role=role, host_to_device_ratio=2)
        assert [layout.layers(name) for name in ("kv", "kv_draft", "index_k")] == [(), (), ()]
        assert (cell_size(layout), bytes_for(layout, 0), bytes_for(layout, 4096)) == (0, 0, 0)
        assert host_bytes_for(layout, 4096) == 0
        assert (max_tokens(layout, 0), max_tokens(layout, 80 * GIB), max_tokens(layout, -1)) == (
            UNBOUNDED,
            UNBOUNDED,
            0,
        )
        assert (max_requests(layout, 0, 64), max_requests(layout, -1, 64)) == (UNBOUNDED, 0)
        assert layout.granule == 64
        assert slots(layout, "device", 4096) == 4160
        assert layout.page_fingerprint("kv") == glm_5_2().page_fingerprint("kv")
        assert Pool(layout, 4096, device="meta").num_bytes() == 0
        with pytest.raises(ValueError):
            bytes_for(layout, 4095)


def test_the_draft_layer_owns_an_indexer() -> None:
    draft = glm_5_2(role="draft")
    assert [draft.layers(name) for name in ("kv", "kv_draft", "index_k")] == [(), (78,), (78,)]
    both = glm_5_2(role="both")
    assert set(both.layers("index_k")) == OWNERS | {78}
    assert (len(both.layers("kv")) + len(both.layers("kv_draft")), len(both.layers("index_k"))) == (79, 22)
    assert set(glm_5_2(role="both", elide_shared=False).layers("index_k")) == set(range(79))


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"role": "draft"}, 788),  # 656 + 132
        ({"role": "both"}, 54728),  # 79 x 656 + 22 x 132 = 53940 + 788
        ({"role": "both", "kv_format": "fp8_raw"}, 48408),  # 79 x 576 + 22 x 132
        ({"role": "both", "kv_format": "bf16", "elide_shared": False}, 101436),  # 79 x 1284
        # The allocator's own ids point at the draft's latent, so that costs the ratio too: 4 x (656 + 132).
        ({"role": "draft", "host_to_device_ratio": 4}, 3152),
        ({"role": "both", "host_to_device_ratio": 4}, 65408),  # 62256 + 3152
    ],
)
def test_draft_layers_cost(choices: dict[str, Any], expected: int) -> None:
    assert cell_size(glm_5_2(**choices)) == expected


def test_draft_layers_of_a_stage() -> None:
    assert glm_5_2(role="both", start_layer=70).layers("kv_draft") == (78,)
    assert glm_5_2(role="both", start_layer=70, end_layer=78).layers("kv_draft") == ()
    assert glm_5_2(role="draft", end_layer=78).layers("kv_draft") == ()
    assert glm_5_2(role="target", start_layer=78).layers("kv") == ()
    assert glm_5_2(role="both", start_layer=78, end_layer=79).layers("index_k") == (78,)


def test_draft_layers_follow_the_body_and_always_own() -> None:
    config = small(3, num_nextn_predict_layers=2, index_topk_pattern="FSSSS")
    assert owners(config) == {0}
    assert owners(config, role="draft") == {3, 4}
    assert owners(config, role="both") == {0, 3, 4}
    assert Layout.from_config(config, role="both").layers("kv_draft") == (3, 4)


def test_a_model_without_draft_layers() -> None:
    layout = Layout.from_config(small(3), role="draft")
    assert (layout.end_layer, cell_size(layout), bytes_for(layout, 64)) == (3, 0, 0)
    assert Layout.from_config(small(0)).layers("kv") == ()


def test_the_latent_of_the_host_belongs_to_the_body_and_to_hisparse() -> None:
    assert glm_5_2(role="both").layers("kv_host") == ()
    assert glm_5_2(role="both", host_to_device_ratio=2).layers("kv_host") == tuple(range(78))
    assert glm_5_2(role="draft", host_to_device_ratio=2).layers("kv_host") == ()


def test_a_thousand_layers() -> None:
    layout = Layout.from_config(small(1000, index_topk_freq=4))
    # 0, 1, 5, ..., 997: one more than 250
    assert set(layout.layers("index_k")) == {0, *range(1, 1000, 4)}
    assert cell_size(layout) == 1000 * 656 + 251 * 132


# -- configs


def as_object(config: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**config)


def test_a_config_may_be_nested_or_an_object(tmp_path: Path) -> None:
    config = model_config("glm-5.2")
    plain = Layout.from_config(config)
    outer = {"model_type": "vision", "num_hidden_layers": 3, "kv_lora_rank": None}
    written = tmp_path / "config.json"
    written.write_text(json.dumps(outer | {"text_config": config}), encoding="utf-8")
    for form in (
        outer | {"text_config": config},
        as_object(config),
        as_object(outer | {"text_config": config}),
        as_object(outer | {"text_config": as_object(config)}),
        outer | {"text_config": as_object(config)},
        {**config, "text_config": None},
        written,
        str(written),
        CONFIGS / "glm-5.2.json",
        str(CONFIGS / "glm-5.2.json"),
    ):
        layout = Layout.from_config(form)
        assert layout == plain
        assert layout.fingerprint == plain.fingerprint
        assert layout.config_used == plain.config_used


def test_fields_that_the_text_config_lacks_come_from_the_top() -> None:
    config = small(5) | {"index_topk_freq": 2, "text_config": {"num_hidden_layers": 4, "index_topk_freq": None}}
    layout = Layout.from_config(config)
    assert layout.layers("kv") == (0, 1, 2, 3)
    assert set(layout.layers("index_k")) == {0, 1, 3}


OPTIONAL = {
    "num_nextn_predict_layers": 0,
    "index_kpool": 1,
    "indexer_types": None,
    "cli_factor": 1,
    "index_topk_pattern": None,
    "index_skip_topk_offset": None,
    "index_topk_freq": 1,
    "layer_types": None,
    "compress_ratios": None,
}


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_is_absent(field: str) -> None:
    assert Layout.from_config(small(4, **{field: None})) == Layout.from_config(small(4))
    assert Layout.from_config(as_object(small(4, **{field: None}))) == Layout.from_config(small(4))


def test_null_leaves_the_other_rules_alone() -> None:
    nothing = {"indexer_types": None, "cli_factor": None, "index_topk_pattern": None, "index_skip_topk_offset": None}
    assert owners(small(12, index_topk_freq=4, **nothing)) == {0, 1, 5, 9}
    assert owners(small(12, **nothing | {"index_skip_topk_offset": 3, "index_topk_freq": 4})) == {0, 1, 2, 6, 10}
    assert owners(small(4, **nothing | {"cli_factor": 2})) == {0, 2}


def test_fields_and_defaults_used() -> None:
    config = model_config("glm-5.2")
    layout = Layout.from_config(config)
    assert layout.config_used == {
        "num_hidden_layers": 78,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "indexer_types": config["indexer_types"],
        "index_skip_topk_offset": 3,
        "index_topk_freq": 4,
    }
    assert layout.defaults_used == {
        "index_kpool": 1,
        "cli_factor": 1,
        "index_topk_pattern": None,
        "layer_types": None,
        "compress_ratios": None,
    }
    deepseek = Layout.from_config(model_config("deepseek-v3.2"))
    assert deepseek.config_used == {
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
    }
    assert deepseek.defaults_used == {name: OPTIONAL[name] for name in OPTIONAL if name != "num_nextn_predict_layers"}
    assert Layout.from_config(small(2)).defaults_used == OPTIONAL


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": None}, ["num_hidden_layers"]),
        ({"kv_lora_rank": None}, ["kv_lora_rank"]),
        ({"index_head_dim": None}, ["index_head_dim"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_hidden_layers": 4.0}, ["num_hidden_layers", "4.0"]),
        ({"num_hidden_layers": "4"}, ["num_hidden_layers", "'4'"]),
        ({"num_hidden_layers": [4]}, ["num_hidden_layers", "[4]"]),
        ({"num_hidden_layers": 10**9}, ["1000000000"]),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers", "-1"]),
        ({"kv_lora_rank": 511}, ["kv_lora_rank", "512", "511"]),
        ({"kv_lora_rank": 512.0}, ["kv_lora_rank", "512", "512.0"]),
        ({"qk_rope_head_dim": 128}, ["qk_rope_head_dim", "64", "128"]),
        ({"index_head_dim": 64}, ["index_head_dim", "128", "64"]),
        ({"index_kpool": 2}, ["index_kpool", "not supported"]),
        ({"index_kpool": 0}, ["index_kpool", "0"]),
        ({"index_topk_freq": 0}, ["index_topk_freq", "0"]),
        ({"index_topk_freq": -4}, ["index_topk_freq", "-4"]),
        ({"index_topk_freq": 2.5}, ["index_topk_freq", "2.5"]),
        ({"index_skip_topk_offset": 0}, ["index_skip_topk_offset", "0"]),
        ({"index_skip_topk_offset": -1}, ["index_skip_topk_offset", "-1"]),
        ({"index_topk_pattern": "FSX"}, ["index_topk_pattern", "'X'"]),
        ({"index_topk_pattern": "Fs"}, ["index_topk_pattern", "'s'"]),
        ({"index_topk_pattern": ["F", "S"]}, ["index_topk_pattern", "'F', 'S'"]),
        ({"indexer_types": ["full", "shard"]}, ["indexer_types", "'shard'", "did you mean `shared`?"]),
        ({"indexer_types": ["full", "Full"]}, ["indexer_types", "1", "'Full'"]),
        ({"indexer_types": ["full", None]}, ["indexer_types", "1", "None"]),
        ({"indexer_types": "full"}, ["indexer_types", "list", "'full'"]),
        ({"indexer_types": {"0": "full"}}, ["indexer_types", "list"]),
        ({"cli_factor": "2"}, ["cli_factor", "'2'"]),
        # The first layer has nothing to share, whoever says so.
        ({"indexer_types": ["shared", "full", "full", "full"]}, ["layer 0", "first layer"]),
        ({"index_topk_pattern": "SFFF"}, ["layer 0", "first layer"]),
    ],
)
def test_a_config_that_is_refused(fields: dict[str, Any], words: list[str]) -> None:
    for choices in ({}, {"elide_shared": False, "role": "both"}):
        (line,) = refused(small(4) | fields, **choices)
        for word in words:
            assert word in line
    (line,) = refused({"text_config": as_object(small(4) | fields)})
    for word in words:
        assert word in line


@pytest.mark.parametrize("config", [None, True, 3, 2.5, [1, 2]])
def test_what_is_no_config(config: object) -> None:
    (line,) = refused(config)
    assert repr(config) in line and "config" in line


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"num_hidden_layers": 4,}',
        b"",
        b"kv: 1",
        b"[" * 100_000,
        b'{"num_hidden_layers": "\xff"}',  # not UTF-8
        b"null",
        b"[1, 2]",
        b'"config.json"',
        b"4",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_that_holds_no_config(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    for form in (path, str(path)):
        (line,) = refused(form)
        assert str(path) in line and "JSON" in line


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Layout.from_config(tmp_path / "config.json")


# -- choices


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"kv_fromat": "bf16"}, ["unknown choice", "`kv_fromat`", "did you mean `kv_format`?"]),
        ({"elide_share": True}, ["`elide_share`", "did you mean `elide_shared`?"]),
        ({"end": 3}, ["unknown choice", "`end`"]),
        ({"zzz": None}, ["unknown choice", "`zzz`"]),
        ({"kv_format": "fp8"}, ["kv_format", "bf16", "fp8_scaled", "fp8_raw", "'fp8'"]),
        ({"kv_format": "fp8_scale"}, ["kv_format", "did you mean `fp8_scaled`?"]),
        ({"kv_format": 8}, ["kv_format", "8"]),
        ({"host_to_device_ratio": 0}, ["host_to_device_ratio", "0"]),
        ({"host_to_device_ratio": 1.5}, ["host_to_device_ratio", "1.5"]),
        ({"host_to_device_ratio": True}, ["host_to_device_ratio", "True"]),
        ({"elide_shared": 1}, ["elide_shared", "1"]),
        ({"elide_shared": "false"}, ["elide_shared", "'false'"]),
        ({"role": "drafts"}, ["role", "target", "draft", "both", "did you mean `draft`?"]),
        ({"start_layer": -1}, ["start_layer", "-1"]),
        ({"end_layer": -1}, ["end_layer", "-1"]),
        ({"end_layer": 80}, ["end_layer", "80", "79"]),
        ({"start_layer": 80}, ["start_layer", "80", "79"]),
        ({"start_layer": 40, "end_layer": 39}, ["start_layer", "40", "end_layer", "39"]),
        ({"start_layer": "0"}, ["start_layer", "'0'"]),
    ],
)
def test_a_choice_that_is_refused(choices: dict[str, Any], words: list[str]) -> None:
    (line,) = refused(model_config("glm-5.2"), **choices)
    for word in words:
        assert word in line


def test_a_choice_of_none_is_the_default() -> None:
    given = {"kv_format": None, "host_to_device_ratio": None, "elide_shared": None, "role": None}
    assert glm_5_2(**given, start_layer=None, end_layer=None) == glm_5_2()


def test_all_problems_at_once() -> None:
    config = small(4) | {
        "kv_lora_rank": 256,
        "index_head_dim": None,
        "index_topk_freq": 0,
        "index_topk_pattern": "FQ",
        "indexer_types": ["full", "half"],
    }
    lines = refused(config, kv_format="fp4", elide_shared="yes", rolle="draft", ratio=2, start_layer=-1)
    names = ["kv_lora_rank", "index_head_dim", "index_topk_freq", "index_topk_pattern", "indexer_types"]
    names += ["kv_format", "elide_shared", "`rolle`", "`ratio`", "start_layer"]
    assert len(lines) == len(names)
    for name in names:
        assert len([line for line in lines if line.startswith(f"glm_dsa: {name}:") or f" {name}" in line]) == 1, name


# -- layouts as values


def test_layouts_are_frozen_hashable_and_equal_by_value() -> None:
    layout, same, other = glm_5_2(), glm_5_2(kv_format="fp8_scaled"), glm_5_2(kv_format="bf16")
    assert layout == same and hash(layout) == hash(same) and layout is not same
    assert layout != other
    assert {layout: "a", other: "b"}[same] == "a"
    with pytest.raises(FrozenInstanceError):
        layout.kv_format = "bf16"
    with pytest.raises(FrozenInstanceError):
        layout.buffers[0].name = "k"


@pytest.mark.parametrize(
    "choices", [{}, {"host_to_device_ratio": 4, "role": "both"}, {"start_layer": 3, "end_layer": 6}]
)
def test_layouts_survive_pickling(choices: dict[str, Any]) -> None:
    layout = glm_5_2(**choices)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(layout, protocol))
        assert again == layout and hash(again) == hash(layout)
        assert again.fingerprint == layout.fingerprint
        assert bytes_for(again, 4096) == bytes_for(layout, 4096)
        assert again.config_used == layout.config_used


def test_another_process_finds_the_same_fingerprints() -> None:
    program = """
import pickle, sys
sent = pickle.load(sys.stdin.buffer)
from generated.glm_dsa import Layout, bytes_for
made = Layout.from_config(sys.argv[1], kv_format="bf16", role="both")
print(made == sent, made.fingerprint, sent.fingerprint, sent.page_fingerprint("kv"), bytes_for(sent, 4096))
"""
    layout = glm_5_2(kv_format="bf16", role="both")
    done = subprocess.run(
        [sys.executable, "-c", program, str(CONFIGS / "glm-5.2.json")],
        input=pickle.dumps(layout),
        capture_output=True,
        cwd=ROOT,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr.decode()
    # 4160 x (79 x 1152 + 22 x 132) = 4160 x 93912
    expected = [True, layout.fingerprint, layout.fingerprint, layout.page_fingerprint("kv"), 390_673_920]
    assert done.stdout.decode().split() == [str(item) for item in expected]


def test_a_refusal_survives_pickling() -> None:
    with pytest.raises(ValueError) as error:
        glm_5_2(kv_format="fp4", role="x")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_generic_names() -> None:
    assert glm_dsa.Layout is glm_dsa.GlmDsaLayout
    assert glm_dsa.Pool is glm_dsa.GlmDsaPool
    assert re.fullmatch(r"[0-9a-f]{16}", glm_dsa.LAYOUT_FINGERPRINT)


def test_fingerprints_differ_between_layouts() -> None:
    layouts = [
        glm_5_2(kv_format=kv_format, elide_shared=elide_shared, host_to_device_ratio=ratio, role=role, end_layer=end)
        for kv_format in LATENT
        for elide_shared in (True, False)
        for ratio in (1, 2, 4)
        for role in ("target", "draft", "both")
        for end in (None, 78, 39)
    ]
    layouts += [Layout.from_config(model_config("glm-5")), Layout.from_config(model_config("deepseek-v3.2"))]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts) == 3 * 2 * 3 * 3 * 3 + 2
    for layout in layouts:
        assert re.fullmatch(r"[0-9a-f]{16}", layout.fingerprint)


def test_page_fingerprints_are_of_the_page_alone() -> None:
    found: dict[str, set[str]] = {name: set() for name in (*LATENT, "index_k")}
    for kv_format in LATENT:
        for choices in (
            {},
            {"host_to_device_ratio": 4},
            {"start_layer": 3, "end_layer": 6},
            {"role": "both"},
            {"elide_shared": False},
        ):
            for config in ("glm-5.2", "deepseek-v3.2"):
                layout = Layout.from_config(model_config(config), kv_format=kv_format, **choices)
                found[kv_format] |= {layout.page_fingerprint(name) for name in ("kv", "kv_draft", "kv_host")}
                found["index_k"].add(layout.page_fingerprint("index_k"))
    assert [len(fingerprints) for fingerprints in found.values()] == [1, 1, 1, 1]
    distinct = set.union(*found.values())
    assert len(distinct) == 4
    for fingerprint in distinct:
        assert re.fullmatch(r"[0-9a-f]{16}", fingerprint)


def test_page_fingerprints_see_every_byte() -> None:
    page = glm_5_2().buffer("kv").page
    latent, scale, rope = page.fields
    others = [
        replace(page, page_bytes=page.page_bytes + 1),
        replace(page, slots=32),
        replace(page, fields=(latent, scale)),
        replace(page, fields=(replace(latent, rounding="saturating cast"), scale, rope)),
        replace(page, fields=(replace(latent, dtype="e5m2"), scale, rope)),
        replace(page, fields=(latent, replace(scale, offset=516), rope)),
        replace(page, fields=(latent, scale, replace(rope, shape=(64, 32)))),
        replace(page, fields=(latent, scale, replace(rope, stride=(656, 4)))),
    ]
    assert len({page.fingerprint, *(other.fingerprint for other in others)}) == 9


def test_a_buffer_or_space_that_is_not_there() -> None:
    layout = glm_5_2()
    for call in (layout.layers, layout.page_fingerprint):
        with pytest.raises(LookupError, match="`index_K`.*did you mean `index_k`.*kv, kv_draft, index_k"):
            call("index_K")
    with pytest.raises(LookupError, match="`devices`.*did you mean `device`.*logical, device"):
        slots(layout, "devices", 64)


# -- the bytes of a page


@pytest.mark.parametrize(
    ("choices", "buffer", "page_bytes", "fields"),
    [
        # name, dtype, elements, offset of slot 0, bytes from slot to slot
        ({"kv_format": "bf16"}, "kv", 73728, [("latent", "bf16", 512, 0, 1152), ("rope", "bf16", 64, 1024, 1152)]),
        (
            {"kv_format": "fp8_scaled"},
            "kv_draft",
            41984,
            [("latent", "e4m3", 512, 0, 656), ("latent_scale", "f32", 4, 512, 656), ("rope", "bf16", 64, 528, 656)],
        ),
        ({"kv_format": "fp8_raw"}, "kv", 36864, [("latent", "e4m3", 512, 0, 576), ("rope", "e4m3", 64, 512, 576)]),
        ({}, "index_k", 8448, [("key", "e4m3", 128, 0, 128), ("key_scale", "f32", 1, 8192, 4)]),
    ],
)
def test_pages(choices: dict[str, Any], buffer: str, page_bytes: int, fields: list[tuple[Any, ...]]) -> None:
    page = glm_5_2(**choices).buffer(buffer).page
    assert (page.page_bytes, page.slots, page.slot_bytes) == (page_bytes, 64, page_bytes // 64)
    sizes = {"bf16": 2, "e4m3": 1, "f32": 4}
    assert [(field.name, field.dtype, field.offset, field.shape, field.stride) for field in page.fields] == [
        (name, dtype, offset, (64, count), (step, sizes[dtype])) for name, dtype, count, offset, step in fields
    ]


# -- counts


@pytest.mark.parametrize("choices", [{}, {"host_to_device_ratio": 3}, {"role": "draft", "host_to_device_ratio": 64}])
def test_token_counts_are_multiples_of_the_page(choices: dict[str, Any]) -> None:
    layout = glm_5_2(**choices)
    assert layout.granule == 64
    calls = [
        lambda tokens: bytes_for(layout, tokens),
        lambda tokens: host_bytes_for(layout, tokens),
        lambda tokens: slots(layout, "logical", tokens),
        lambda tokens: max_requests(layout, 80 * GIB, tokens),
        lambda tokens: Pool(layout, tokens, device="meta"),
    ]
    for call in calls:
        for tokens, below, above in (
            (1, 0, 64),
            (63, 0, 64),
            (100, 64, 128),
            (4095, 4032, 4096),
            (-1, 0, 64),
            (-64, 0, 64),
        ):
            with pytest.raises(ValueError, match=rf"64, not {tokens};.* {below} and {above}$"):
                call(tokens)
        for wrong in (True, 64.0, "64", None):
            with pytest.raises(ValueError, match="tokens"):
                call(wrong)
        call(0)


def test_requests_cost_nothing_here_but_are_counted() -> None:
    layout = glm_5_2()
    assert bytes_for(layout, 4096, 1000) == bytes_for(layout, 4096)
    assert max_tokens(layout, 80 * GIB, 1000) == max_tokens(layout, 80 * GIB)
    for wrong in (-1, True, 1.0):
        with pytest.raises(ValueError, match="requests"):
            bytes_for(layout, 4096, wrong)


# -- budget equals allocation


def shares(config: dict[str, Any], layer: int) -> bool:
    """The strongest rule that a config states, worked out for one layer of the body."""
    if (types := config.get("indexer_types")) is not None:
        return types[layer : layer + 1] == ["shared"]
    if (factor := config.get("cli_factor") or 1) > 1:
        return layer % factor > 0
    if (pattern := config.get("index_topk_pattern")) is not None:
        return pattern[layer : layer + 1] == "S"
    first = config.get("index_skip_topk_offset") or 2  # layers before this one own
    return layer >= first and (layer - first + 1) % (config.get("index_topk_freq") or 1) > 0


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Configs with one rule or none, and draft layers."""
    body = draw(st.integers(1, 40))
    rule = draw(st.sampled_from(["none", "frequency", "offset", "pattern", "types", "factor"]))
    config = small(body, num_nextn_predict_layers=draw(st.integers(0, 3)))
    rest = draw(st.lists(st.booleans(), max_size=body + 4))
    match rule:
        case "frequency":
            config |= {"index_topk_freq": draw(st.integers(1, 9))}
        case "offset":
            config |= {"index_skip_topk_offset": draw(st.integers(1, 9)), "index_topk_freq": draw(st.integers(1, 9))}
        case "pattern":
            config |= {"index_topk_pattern": "F" + "".join("S" if share else "F" for share in rest)}
        case "types":
            config |= {"indexer_types": ["full", *("shared" if share else "full" for share in rest)]}
        case "factor":
            config |= {"cli_factor": draw(st.integers(1, 9))}
    return config


@st.composite
def deployments(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config, choices), stages and roles included."""
    config = draw(configs())
    total = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    start, end = sorted((draw(st.integers(0, total)), draw(st.integers(0, total))))
    stage = draw(
        st.sampled_from([{}, {"start_layer": start}, {"end_layer": end}, {"start_layer": start, "end_layer": end}])
    )
    choices = {
        "kv_format": draw(st.sampled_from(sorted(LATENT))),
        "host_to_device_ratio": draw(st.integers(1, 5)),
        "elide_shared": draw(st.booleans()),
        "role": draw(st.sampled_from(["target", "draft", "both"])),
    }
    return config, choices | stage


def worked_out(config: dict[str, Any], choices: dict[str, Any], tokens: int) -> tuple[int, int, int]:
    """Bytes per token, bytes on the device and bytes on the host, layer by layer from the rules of the contract."""
    body, drafts = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    ratio, latent = choices["host_to_device_ratio"], LATENT[choices["kv_format"]]
    per_token = device = host = 0
    for layer in range(choices.get("start_layer", 0), choices.get("end_layer", body + drafts)):
        is_draft = layer >= body
        if choices["role"] != "both" and is_draft != (choices["role"] == "draft"):
            continue
        times = ratio if is_draft else 1
        per_token += times * latent
        device += (times * tokens + PAGE) * latent
        if is_draft or not (choices["elide_shared"] and shares(config, layer)):
            per_token += ratio * INDEX
            device += (ratio * tokens + PAGE) * INDEX
        if ratio > 1 and not is_draft:
            host += (ratio * tokens + PAGE) * latent
    return per_token, device, host


@settings(max_examples=2000, deadline=None, derandomize=True, database=None)
@given(deployment=deployments(), pages=st.integers(0, 2**24))
def test_the_pool_allocates_what_was_priced(deployment: tuple[dict[str, Any], dict[str, Any]], pages: int) -> None:
    config, choices = deployment
    tokens = pages * PAGE
    layout = Layout.from_config(config, **choices)
    per_token, device, host = worked_out(config, choices, tokens)
    assert cell_size(layout) == per_token
    assert bytes_for(layout, tokens) == device
    assert host_bytes_for(layout, tokens) == host
    assert Pool(layout, tokens, device="meta").num_bytes() == device


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(deployment=deployments(), budget=st.integers(0, 2**40))
def test_the_most_tokens_fit_and_one_page_more_does_not(
    deployment: tuple[dict[str, Any], dict[str, Any]], budget: int
) -> None:
    config, choices = deployment
    layout = Layout.from_config(config, **choices)
    fixed = worked_out(config, choices, 0)[1]
    tokens = max_tokens(layout, budget)
    if fixed > budget:
        assert tokens == 0
    elif cell_size(layout) == 0:
        assert tokens == UNBOUNDED
    else:
        assert tokens % PAGE == 0
        assert worked_out(config, choices, tokens)[1] <= budget < worked_out(config, choices, tokens + PAGE)[1]


def test_stages_add_up_to_the_whole() -> None:
    chosen = random.Random(5)
    for _ in range(100):
        cuts = [0, *sorted(chosen.sample(range(80), 3)), 79]
        choices = {
            "kv_format": chosen.choice(sorted(LATENT)),
            "role": "both",
            "host_to_device_ratio": chosen.randint(1, 4),
        }
        stages = [glm_5_2(start_layer=a, end_layer=b, **choices) for a, b in zip(cuts, cuts[1:], strict=False)]
        whole = glm_5_2(**choices)
        assert sum(bytes_for(stage, 6400) for stage in stages) == bytes_for(whole, 6400)
        for name in ("kv", "kv_draft", "index_k"):
            assert sum((stage.layers(name) for stage in stages), ()) == whole.layers(name)


# A value of every kind that a config.json or a caller may come with.
ODD = [None, True, 0, 1, 7, -1, 2**39, 2**41, -(2**70), 1.5, float("nan"), float("inf"), "FS", "x", "", b"x"]
ODD += [(), [], [0], [None], [["full"]], ["full"], {}, {"a": 1}]


def test_whatever_is_wrong_is_a_value_error() -> None:
    draw = random.Random(7)
    refusals = 0
    for _ in range(1000):
        config = model_config(draw.choice(["glm-5.2", "deepseek-v3.2"]))
        choices = glm_5_2().choices
        for _ in range(draw.randint(1, 3)):
            name = draw.choice([*OPTIONAL, *choices, "num_hidden_layers", "kv_lora_rank"])
            (choices if name in choices else config)[name] = draw.choice(ODD)
        try:
            layout = Layout.from_config(config, **choices)
        except ValueError as error:
            assert all(line.startswith("glm_dsa: ") for line in str(error).split("\n"))
            refusals += 1
            continue
        assert pickle.loads(pickle.dumps(layout)) == layout
        assert bytes_for(layout, 64) >= bytes_for(layout, 0)
    assert 100 < refusals < 1000


def test_problems_of_fixed_values_choices_and_requirements_come_together() -> None:
    config = small(3, kv_lora_rank=256, index_kpool=2)
    assert refused(config, start_layer=3, end_layer=1, kv_fmt="bf16") == [
        "glm_dsa: kv_lora_rank: this layout is for 512, found 256",
        "glm_dsa: unknown choice `kv_fmt`; did you mean `kv_format`?",
        "glm_dsa: pooled index keys (index_kpool above 1) are not supported by this layout",
        "glm_dsa: start_layer 3 and end_layer 1 are not in order within 3 layers",
    ]


def test_all_rules_that_part_from_the_first_come_together() -> None:
    """Shared are, of layers 0 to 3: 0 by the types, 1 and 3 by the factor, 2 and 3 by the pattern."""
    types = ["shared", "full", "full", "full"]
    place = "(layers.sets.shares_topk of glm_dsa.yaml)"
    first = "glm_dsa: shares_topk: the rules `has(indexer_types)`"
    assert refused(small(4, indexer_types=types, cli_factor=2, index_topk_pattern="FFSS")) == [
        f"{first} and `cli_factor > 1` disagree about layer 0 {place}",
        f"{first} and `has(index_topk_pattern)` disagree about layer 0 {place}",
        "glm_dsa: layer 0: the first layer has no earlier top-k to share",
    ]


@pytest.mark.parametrize("available", [1e9, "1GiB", True, None])
def test_memory_that_is_no_integer(available: object) -> None:
    layout = glm_5_2()
    for count in (glm_dsa.max_tokens, glm_dsa.max_requests):
        arguments = (layout, available) if count is glm_dsa.max_tokens else (layout, available, 64)
        with pytest.raises(ValueError, match="^available_bytes must be an integer, not "):
            count(*arguments)
