"""Where vLLM's planner and the layouts differ, and formats of kernels that are not there on a CPU."""

import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import Hopper, Stub
from deployments import block_bytes, deployment, model_config, pages_of
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from generated import glm_dsa, gqa, hybrid_swa, mla, shared_kv

GIB = 2**30
DIFFERENCES: dict[str, str] = {}  # name of a test -> why it is so, for the page
OWNERS = [0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74]


def difference(why: str) -> Any:
    """Mark a test as that of a difference."""

    def remember(test: Any) -> Any:
        DIFFERENCES[test.__name__] = why
        return test

    return remember


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer, which has no build for CPUs; of its backends only the bytes that they ask for are used."""
    for name in ("", ".decode", ".prefill", ".utils", ".mla"):
        monkeypatch.setitem(sys.modules, f"flashinfer{name}", Stub(f"flashinfer{name}"))


# Formats of FlashInfer's kernels


@pytest.mark.parametrize(("model", "block"), [("deepseek-v3.2", 2764032), ("glm-5.2", 3052800)])
def test_raw_fp8_rows_beside_an_indexer(model: str, block: int, flashinfer: None) -> None:
    """Rows of 576 bytes: 64 x (61 x 576 + 61 x 132) and 64 x (78 x 576 + 21 x 132)."""
    from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseTRTLLMBackend

    vllm = deployment(model, cache_dtype="fp8")
    specs = vllm.specs_as("fp8", FlashInferMLASparseTRTLLMBackend)
    layout = glm_dsa.Layout.from_config(model_config(model), kv_format="fp8_raw")
    kv, index = layout.buffer("kv"), layout.buffer("index_k")
    expected = {("full", layer): kv.page.page_bytes for layer in kv.layers}
    expected |= {("index", layer): index.page.page_bytes for layer in index.layers}
    assert pages_of(specs) == expected
    plan = vllm.plan(40 * GIB, specs)
    assert block_bytes(plan) == block == 64 * glm_dsa.cell_size(layout)
    assert glm_dsa.max_tokens(layout, 40 * GIB) == (plan.num_blocks - 1) * 64


@pytest.mark.parametrize(("model", "ranks"), [("llama-3.1-8b", 1), ("llama-3.1-8b", 2), ("qwen3-30b-a3b", 1)])
def test_nvfp4(model: str, ranks: int, flashinfer: None) -> None:
    """Half a byte a value and a byte for 16 of them; K and V of a head are a slot of their own in vLLM."""
    from vllm.v1.attention.backends.flashinfer import FlashInferBackend

    vllm = deployment(model, block=16, ranks=ranks)
    specs = vllm.specs_as("nvfp4", FlashInferBackend)
    layout = gqa.Layout.from_config(model_config(model), kv_format="nvfp4", tp_size=ranks)
    kv = layout.buffer("kv")
    assert pages_of(specs) == {("full", layer): page for layer, page in zip(kv.layers, page_bytes(kv), strict=True)}
    plan = vllm.plan(40 * GIB, specs)
    assert block_bytes(plan) == 16 * gqa.cell_size(layout)
    assert gqa.max_tokens(layout, 40 * GIB) == (plan.num_blocks - 1) * 16


def page_bytes(buffer: Any) -> list[int]:
    """Of a page in each layer."""
    pages = buffer.pages if hasattr(buffer, "pages") else (buffer.page,) * len(buffer.layers)
    return [page.page_bytes for page in pages]


def module_of(model: str) -> ModuleType:
    """Of a model that has layers with a window."""
    return shared_kv if model == "gemma-3n-e4b" else hybrid_swa


# Differences


@difference(
    "vLLM's block 0 is never handed out, as the reserved page is not; the tokens that vLLM reports count it, those of"
    " kvgen do not"
)
@pytest.mark.parametrize(("model", "module"), [("deepseek-v3", mla), ("deepseek-v3.2", glm_dsa), ("glm-5.2", glm_dsa)])
def test_the_null_block(model: str, module: ModuleType) -> None:
    layout = module.Layout.from_config(model_config(model), kv_format="bf16")
    vllm = deployment(model)
    assert vllm.reported_tokens(40 * GIB) == vllm.plan(40 * GIB).num_blocks * 64
    assert vllm.reported_tokens(40 * GIB) == module.max_tokens(layout, 40 * GIB) + 64


@difference(
    "where a block holds all layers and its kernels are of a B200, vLLM pads it to whole rows of 656 bytes: 13,959"
    " blocks of DeepSeek-V3.2 in 40 GiB, else 13,961; a page of a layer of its own needs no padding"
)
def test_rows_of_a_b200(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,076,352 = 4,689 x 656 + 368."""
    vllm = deployment("deepseek-v3.2", cache_dtype="fp8")
    cache = vllm.vllm_config.cache_config
    hopper = vllm.specs_as("fp8_ds_mla", FlashMLASparseBackend)
    with monkeypatch.context() as patched:
        patched.setattr(Hopper, "get_device_capability", lambda device_id=0: DeviceCapability(10, 0))
        blackwell = vllm.specs_as("fp8_ds_mla", FlashMLASparseBackend)
    assert pages_of(hopper) == pages_of(blackwell)
    found = {}
    for order in ("LBNHC", "BLHNC"):  # a tensor for each layer; all layers in each block
        monkeypatch.setattr(cache, "kv_cache_layout", order)
        found |= {(order, name): vllm.plan(40 * GIB, specs) for name, specs in (("h", hopper), ("b", blackwell))}
    assert {key: plan.num_blocks for key, plan in found.items()} == {
        ("LBNHC", "h"): 13961,
        ("LBNHC", "b"): 13961,
        ("BLHNC", "h"): 13961,
        ("BLHNC", "b"): 13959,
    }
    assert {key: block_bytes(plan) for key, plan in found.items()} == {
        ("LBNHC", "h"): 3076352,
        ("LBNHC", "b"): 3076352,
        ("BLHNC", "h"): 3076352,
        ("BLHNC", "b"): 3076640,
    }
    layout = glm_dsa.Layout.from_config(model_config("deepseek-v3.2"))
    assert glm_dsa.max_tokens(layout, 40 * GIB) == 13960 * 64


@difference(
    "vLLM reads index_topk_pattern and index_topk_freq, not indexer_types; of a config with that alone it gives every"
    " layer an indexer"
)
def test_indexer_types_alone() -> None:
    fields = (("index_topk_freq", None), ("index_skip_topk_offset", None))
    config = {key: value for key, value in model_config("glm-5.2").items() if key not in dict(fields)}
    pages = pages_of(deployment("glm-5.2", cache_dtype="fp8", fields=fields).specs)
    assert [layer for what, layer in pages if what == "index"] == list(range(78))
    assert list(glm_dsa.Layout.from_config(config).layers("index_k")) == OWNERS


@pytest.mark.parametrize(
    "fields",
    [{"index_topk_freq": 4}, {"index_topk_freq": 4, "index_skip_topk_offset": 3}, {"index_topk_pattern": "FFS" * 26}],
)
def test_rules_of_sharing(fields: dict[str, Any]) -> None:
    """The other rules are vLLM's, the offset of 2 where none is given included."""
    none = dict.fromkeys(("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"))
    vllm = deployment("glm-5.2", cache_dtype="fp8", fields=(*(none | fields).items(),))
    layout = glm_dsa.Layout.from_config(model_config("glm-5.2") | none | fields)
    shared = {layer for what, layer in pages_of(vllm.specs) if what == "index"}
    assert shared == set(layout.layers("index_k")) != set(range(78))


@difference(
    "vLLM rounds the states of a block down, so that a block smaller than the ratio has 0 bytes and the planner"
    " divides by 0; in a spec it is the problem KV248, and glm_dsa refuses pooled keys"
)
def test_blocks_smaller_than_a_ratio() -> None:
    """Four tokens for one key of 132 bytes."""
    pooled = {
        block: MLAAttentionSpec(
            block_size=block, num_kv_heads=1, head_size=132, dtype=torch.uint8, tokens_per_state=4
        ).page_size_bytes
        for block in (1, 2, 4, 6, 64)
    }
    assert pooled == {1: 0, 2: 0, 4: 132, 6: 132, 64: 2112}
    nothing = MLAAttentionSpec(block_size=2, num_kv_heads=1, head_size=132, dtype=torch.uint8, tokens_per_state=4)
    with pytest.raises(ZeroDivisionError):
        deployment("deepseek-v3").plan(40 * GIB, {"model.layers.0.self_attn.indexer.k_cache": nothing})
    with pytest.raises(ValueError, match="pooled index keys"):
        glm_dsa.Layout.from_config({**model_config("glm-5.2"), "index_kpool": 4})


@difference(
    "a model's layers with a window and those without share vLLM's block ids: each group of layers, all"
    " of one kind, takes a block as large as the widest group needs; kvgen has a space and slots of its own for each"
)
@pytest.mark.parametrize(
    ("model", "groups", "block"),
    [
        ("gpt-oss-120b", {18: 2}, 18 * 32768),
        ("gemma-3-27b", {10: 1, 9: 4, 8: 2}, 10 * 131072),  # 52 layers with a window in 6 groups of up to 10
        ("llama-4-scout", {12: 4}, 12 * 65536),
        ("gemma-3n-e4b", {4: 5}, 4 * 32768),  # of the 20 layers that keep something
    ],
)
def test_block_ids_of_hybrids(model: str, groups: dict[int, int], block: int) -> None:
    plan = deployment(model, block=16).plan(40 * GIB)
    assert Counter(len(group.layer_names) for group in plan.kv_cache_groups) == groups
    assert block_bytes(plan) == block
    module = module_of(model)
    layout = module.Layout.from_config(model_config(model), swa_ratio=1)
    full, window = (layout.buffer(name).layer_page_bytes for name in ("kv_full", "kv_swa"))
    blocks = sum(groups.values())  # for 16 tokens of every layer
    assert blocks * block - (full + window) == {"gemma-3-27b": 8 * 131072}.get(model, 0)  # of layers that are not there
    assert module.cell_size(layout) * 16 == full + window


@difference(
    "pages of a hybrid that differ in bytes are made alike: vLLM gives the smaller ones more tokens where they divide"
    " the larger, else padding, as of Gemma 4 in int8 (66,048 to 133,120 bytes)"
)
@pytest.mark.parametrize(
    ("model", "cache_dtype", "own", "tokens", "unified"),
    [
        ("mimo-v2-flash", "auto", 40960, 32, 81920),  # 4 heads of 192 + 128 values beside 8
        ("gemma-4-31b", "auto", 131072, 32, 262144),  # 4 heads of 512 beside 16 of 256
        ("gemma-4-31b", "int8_per_token_head", 66048, 16, 133120),
    ],
)
def test_pages_of_hybrids_are_made_alike(model: str, cache_dtype: str, own: int, tokens: int, unified: int) -> None:
    kv_format = {"auto": "bf16", "int8_per_token_head": "int8"}[cache_dtype]
    vllm = deployment(model, cache_dtype=cache_dtype, block=16)
    layout = hybrid_swa.Layout.from_config(model_config(model), kv_format=kv_format)
    assert set(page_bytes(layout.buffer("kv_full"))) == {own}
    assert set(page_bytes(layout.buffer("kv_swa"))) == {unified}
    specs = [group.kv_cache_spec for group in vllm.plan(40 * GIB).kv_cache_groups]
    assert {spec.page_size_bytes for spec in specs} == {unified}
    assert {spec.block_size for spec in specs if not hasattr(spec, "max_admission_blocks_per_request")} == {tokens}


@difference(
    "the tokens that vLLM reports of a hybrid are those of requests of the longest length that fit at a time, and"
    " depend on that length; slots do not"
)
def test_reported_tokens_of_hybrids() -> None:
    short, long = (deployment("gemma-3-27b", max_len=length) for length in (8192, 131072))
    assert short.plan(80 * GIB).num_blocks == long.plan(80 * GIB).num_blocks == 16384
    assert (short.reported_tokens(80 * GIB), long.reported_tokens(80 * GIB)) == (218595, 847467)
    same = [deployment("deepseek-v3", max_len=length).reported_tokens(80 * GIB) for length in (8192, 131072)]
    assert same == [19099 * 64] * 2


@pytest.mark.parametrize("model", ["gpt-oss-120b", "gemma-3-27b", "gemma-3n-e4b", "mimo-v2-flash"])
@pytest.mark.parametrize("step", [1, 256, 2048])
def test_pages_of_a_window(model: str, step: int) -> None:
    """A request needs as many pages of a layer with a window as vLLM admits blocks for."""
    vllm = deployment(model, block=16)
    (blocks,) = {
        spec.max_admission_blocks_per_request(max_in_flight_tokens=step, max_model_len=131072)
        for spec in vllm.specs.values()
        if hasattr(spec, "max_admission_blocks_per_request")
    }
    module = module_of(model)
    layout = module.Layout.from_config(model_config(model), swa_pool="requests", step_tokens=step)
    reserved, tokens = module.slots(layout, "swa", 0), 131072
    assert module.slots(layout, "swa", tokens, requests=1) - reserved == blocks * 16


@difference(
    "vLLM admits a request with a page more than its window can touch where a step needs one token more than whole"
    " pages have: n tokens touch cdiv(n - 1, page) + 1 pages at most, and vLLM counts cdiv(n, page) + 1"
)
def test_a_page_more_than_a_window_touches() -> None:
    """A window of 128 tokens, and 2 of a step: 129 tokens touch 9 pages of 16, wherever the first of them lies."""
    assert max((first + 128) // 16 - first // 16 + 1 for first in range(16)) == 9
    specs = deployment("gpt-oss-120b", block=16).specs.values()
    admitted = {
        spec.max_admission_blocks_per_request(max_in_flight_tokens=2, max_model_len=131072)
        for spec in specs
        if hasattr(spec, "max_admission_blocks_per_request")
    }
    layout = hybrid_swa.Layout.from_config(model_config("gpt-oss-120b"), swa_pool="requests", step_tokens=2)
    assert admitted == {10}
    assert hybrid_swa.slots(layout, "swa", 131072, requests=1) - hybrid_swa.slots(layout, "swa", 0) == 9 * 16


@difference(
    "a chunk of Llama 4 begins with a page, so that vLLM admits a request without the page more that a window needs;"
    " hybrid_swa takes a chunk for a window, which may begin anywhere"
)
def test_pages_of_a_chunk() -> None:
    """8,192 tokens and one more are 513 pages; a window of 8,192 lies in 513 at most."""
    specs = deployment("llama-4-scout", block=16).specs.values()
    for step, blocks, pages in ((1, 513, 513), (256, 528, 529), (2048, 640, 641)):
        admitted = {
            spec.max_admission_blocks_per_request(max_in_flight_tokens=step, max_model_len=131072)
            for spec in specs
            if hasattr(spec, "max_admission_blocks_per_request")
        }
        layout = hybrid_swa.Layout.from_config(model_config("llama-4-scout"), swa_pool="requests", step_tokens=step)
        assert admitted == {blocks}
        assert hybrid_swa.slots(layout, "swa", 131072, requests=1) - hybrid_swa.slots(layout, "swa", 0) == pages * 16


def test_heads_that_ranks_do_not_divide() -> None:
    """8 heads over 12 ranks: neither makes such a cache."""
    with pytest.raises(AssertionError):
        _ = deployment("minimax-m2.5", ranks=12).specs
    with pytest.raises(ValueError, match="8 heads cannot be divided over 12 ranks"):
        gqa.Layout.from_config(model_config("minimax-m2.5"), tp_size=12)
