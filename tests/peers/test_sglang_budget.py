"""SGLang's budget from the generated functions: what is priced is what is allocated, drafts included."""

import random
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from deployments import (
    DTYPES,
    PAGE,
    SHARING,
    STAGES,
    Deployment,
    build,
    build_own,
    deepseek_v3,
    glm_5_2,
    model_of,
    own_cell_size,
    row_dim,
)
from sglang.srt.configs.model_config import dsa_layer_skips_topk
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.model_executor.pool_configurator import (
    DefaultPoolConfigurator,
    HybridSWAPoolConfigurator,
    SWARequestCapPoolConfigurator,
)
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.runtime_context import get_parallel

from generated import glm_dsa
from generated.sglang import glm_dsa as adapter
from kvgen.engines.sglang import PluginError
from kvgen.engines.sglang.budget import correct, refuse_windows
from kvgen.engines.sglang.platform import KvgenPlatform

MODELS = {"all indexers": glm_5_2(), "sharing": glm_5_2(**SHARING)}


@pytest.mark.parametrize("draft_layers", [0, 1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv_format", DTYPES)
def test_the_budget_is_the_allocation(kv_format: str, model: str, stage: tuple[int, int], draft_layers: int) -> None:
    """To the byte: what fits is allocated, and a page more would not have fitted."""
    deployment = Deployment(kv_format, MODELS[model], *stage, draft_layers=draft_layers)
    draft = Deployment(kv_format, MODELS[model], 0, draft_layers, is_draft=True)
    for available in (20_000_000, 23_456_789, 50_000_000):
        with deployment.serving() as configurator:
            pricing = DefaultPoolConfigurator(configurator)
            tokens = pricing.calculate_pool_sizes(available, PAGE).max_total_num_tokens
            allocated = build(configurator, tokens).get_kv_size_bytes()
        if draft_layers:
            with draft.serving() as configurator:
                allocated += build(configurator, tokens).get_kv_size_bytes()
        assert tokens % PAGE == 0
        assert allocated <= available < allocated + PAGE * pricing._cell_size


@pytest.mark.parametrize("memory", [2**33, 80 * 10**9, 2**37 + 12345])
def test_tokens_are_those_of_max_tokens(memory: int) -> None:
    with Deployment("fp8_scaled", MODELS["sharing"]).serving() as configurator:
        layout = glm_dsa.Layout.from_config(MODELS["sharing"])
        assert configurator.config_from_budget(memory).max_total_num_tokens == glm_dsa.max_tokens(layout, memory)


OVERSHOOTS = {  # bytes by which SGLang allocates more than it priced: its reserved page, 64 slots of all layers
    ("bf16", "all indexers"): 6_409_728,  # 64 x 100,152
    ("bf16", "sharing"): 5_928_192,  # 64 x 92,628
    ("fp8_scaled", "all indexers"): 3_933_696,  # 64 x 61,464
    ("fp8_scaled", "sharing"): 3_452_160,  # 64 x 53,940
    ("fp8_raw", "all indexers"): 3_534_336,  # 64 x 55,224
    ("fp8_raw", "sharing"): 3_052_800,  # 64 x 47,700
}


@pytest.mark.parametrize(("kv_format", "model"), OVERSHOOTS)
def test_how_far_budgets_are_from_allocations(kv_format: str, model: str) -> None:
    """SGLang's by its reserved page; the generated one by nothing."""
    with Deployment(kv_format, MODELS[model]).serving() as configurator:
        own, pool = build_own(configurator, 128), build(configurator, 128)
        assert own.get_kv_size_bytes() - 128 * own_cell_size(configurator) == OVERSHOOTS[kv_format, model]
        pricing = DefaultPoolConfigurator(configurator)
        assert pool.get_kv_size_bytes() - 128 * pricing._cell_size - pricing._fixed_overhead_bytes == 0


# -- HiSparse


@pytest.mark.parametrize(
    ("kv_format", "ratio", "cell"),
    [("bf16", 0, 2568), ("fp8_scaled", 0, 1576), ("fp8_scaled", 2, 1840), ("fp8_scaled", 4, 2368)],
)
def test_the_numbers_of_sglangs_own_test(kv_format: str, ratio: int, cell: int) -> None:
    """Two layers, as SGLang's unit test of its HiSparse budget has them."""
    config = glm_5_2(2)
    with Deployment(kv_format, config, 0, 2, ratio=ratio).serving() as configurator:
        assert own_cell_size(configurator) == cell
        choices = {"host_to_device_ratio": ratio or 1, "elide_shared": ratio == 0}
        layout = adapter.layout_of(config, DTYPES[kv_format], row_dim(configurator), **choices)
        assert adapter.cell_size(layout) == cell


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv_format", DTYPES)
def test_the_generated_pool_has_the_shapes_of_hisparse(kv_format: str, model: str, ratio: int) -> None:
    """Built directly: SGLang's HiSparse takes no other class. SGLang cannot leave out shared layers there."""
    tokens, config = 128, MODELS[model]
    with Deployment(kv_format, config, ratio=ratio).serving() as configurator:
        own = build_own(configurator, tokens)
        assert type(own) is HiSparseDSATokenToKVPool
        layout = glm_dsa.Layout.from_config(config, kv_format=kv_format, host_to_device_ratio=ratio, elide_shared=False)
        pool = glm_dsa.Pool(layout, tokens)
        dtype = own.store_dtype
        for layer in range(78):
            rows = pool.get_key_buffer(layer).view(dtype)[:, None]
            assert (rows.shape, rows.stride()) == (own.kv_buffer[layer].shape, own.kv_buffer[layer].stride())
            pages = pool.get_index_k_with_scale_buffer(layer)
            theirs = own.index_k_with_scale_buffer[layer]
            assert (pages.shape, pages.stride(), pages.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert pool.num_bytes() == own.get_kv_size_bytes() == glm_dsa.bytes_for(layout, tokens)
        assert glm_dsa.cell_size(layout) == own_cell_size(configurator)
        assert pool.get_contiguous_buf_infos()[1:] == own.get_contiguous_buf_infos()[1:]
        assert pool.get_state_buf_infos()[1:] == own.get_state_buf_infos()[1:]


def test_hisparse_refuses_outside_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's words for a platform that says it is an outside one."""

    class OutsidePlatform(KvgenPlatform):
        _enum = PlatformEnum.OOT

    monkeypatch.setattr(kv_cache_configurator, "current_platform", OutsidePlatform())
    with Deployment(ratio=2).serving() as configurator:
        assert configurator._resolve_kv_pool_class(kind="dsa", default=object) is adapter.GlmDsaTokenToKVPool
        with pytest.raises(
            NotImplementedError, match="reached the HiSparse DSA KV pool, which has no platform seam yet"
        ):
            build(configurator, 128)


# -- what the budget refuses and what it leaves alone


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"ratio": 2}, "HiSparse"),
        ({"arguments": (("enable_unified_memory", True),)}, "unified memory"),
    ],
)
def test_other_pools_are_refused(change: dict[str, Any], name: str) -> None:
    """For them SGLang builds classes of its own without asking the platform, or a word."""
    with Deployment(**change).serving() as configurator:
        message = f"^kvgen: SGLang builds a pool of its own for {name}; unset SGLANG_PLATFORM to use it$"
        with pytest.raises(PluginError, match=message):
            DefaultPoolConfigurator(configurator)


def test_layer_split_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.layers.cp.utils.get_glm_dsa_cp_layer_shard_info", lambda configurator: (0, 2))
    with Deployment().serving() as configurator, pytest.raises(PluginError, match="of its own for layer split;"):
        DefaultPoolConfigurator(configurator)


MIXED = {  # adapter -> models whose window layers or others would have its pool
    "glm_dsa": {"a DSA model": Deployment("bf16", glm_5_2())},
    "mla": {"a DSA model": Deployment("bf16", glm_5_2()), "an MLA model": Deployment("bf16", deepseek_v3())},
    "gqa": {"an MHA model": Deployment("bf16", end=32, model=model_of("llama-3.1-8b"))},
}


@pytest.mark.parametrize("configurator_class", [HybridSWAPoolConfigurator, SWARequestCapPoolConfigurator])
@pytest.mark.parametrize(("name", "model"), [(name, model) for name, models in MIXED.items() for model in models])
def test_window_layers_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, model: str, configurator_class: type
) -> None:
    """SGLang has a budget of its own for them, and builds both pools of the platform's classes."""
    monkeypatch.setenv("KVGEN_SGLANG_POOL", f"generated.sglang.{name}")
    with MIXED[name][model].serving() as configurator, pytest.raises(PluginError) as error:
        configurator_class(configurator)
    assert str(error.value) == (
        "kvgen: SGLang has a budget of its own for window layers; unset SGLANG_PLATFORM to use it"
    )


@pytest.mark.parametrize("model", ["an MLA model", "an MHA model"])
def test_window_layers_of_other_models_are_left_alone(model: str) -> None:
    """None of their pools is that of `glm_dsa`."""
    with Deployment("bf16", deepseek_v3()).serving() as configurator:
        configurator.use_mla_backend = model == "an MLA model"
        refuse_windows(None, configurator)


def test_a_draft_worker_is_left_alone() -> None:
    """Its pool is priced with the target's."""
    with Deployment("bf16", glm_5_2(), 0, 1, is_draft=True).serving() as configurator:
        pricing = DefaultPoolConfigurator(configurator)
        assert (pricing._cell_size, pricing._fixed_overhead_bytes) == (1152 + 132, 0)


def test_decode_context_parallelism_is_refused() -> None:
    with Deployment("bf16", glm_5_2(2), 0, 2).serving() as configurator, get_parallel().override(attn_dcp_size=2):
        message = "^glm_dsa: decode context parallelism is not supported by this layout$"
        with pytest.raises(NotImplementedError, match=message):
            DefaultPoolConfigurator(configurator)
        with pytest.raises(NotImplementedError, match=message):
            build(configurator, 128)


def test_kv_sharding_and_hybrids_are_refused() -> None:
    for attribute, value, name in (
        ("kv_shard_rank", 0, "KV sharding"),
        ("mambaish_config", object(), "a hybrid with linear attention"),
    ):
        with Deployment().serving() as configurator:
            pricing = DefaultPoolConfigurator(configurator)
            setattr(configurator, attribute, value)
            with pytest.raises(PluginError, match=f"a pool of its own for {name};"):
                correct(None, pricing, configurator)


def test_other_models_are_left_alone() -> None:
    """An MLA model without an indexer keeps SGLang's own price: 2 x 1152 bytes, and nothing fixed."""
    config = glm_5_2(2, architectures=["DeepseekV2ForCausalLM"], index_topk=None)
    with Deployment("bf16", config, 0, 2).serving() as configurator:
        pricing = DefaultPoolConfigurator(configurator)
        assert (pricing._cell_size, pricing._fixed_overhead_bytes) == (2304, 0)


def test_what_sglang_adds_for_another_draft_stays() -> None:
    """A draft of another kind is priced by SGLang; its pool has a reserved page of its own."""
    with Deployment("bf16", MODELS["sharing"], draft_layers=2, algorithm="STANDALONE").serving() as configurator:
        pricing = DefaultPoolConfigurator(configurator)
        draft = 2 * (1152 + 132)
        assert pricing._cell_size == 92628 + draft
        assert pricing._fixed_overhead_bytes == PAGE * (92628 + draft)


# -- which layers share


def rules(seed: int) -> dict[str, object]:
    """Some of the fields that say which layers share their top-k."""
    draw = random.Random(seed)
    layers = draw.randint(1, 40)
    fields: dict[str, object] = {
        "indexer_types": draw.choices(["full", "shared"], k=draw.randint(0, layers + 2)),
        "cli_factor": draw.choice([1, 2, 3, None]),
        "index_topk_pattern": "".join(draw.choices("FS", k=draw.randint(0, layers + 2))),
        "index_skip_topk_offset": draw.randint(1, 5),
        "index_topk_freq": draw.choice([1, 2, 3, 4, None]),
    }
    kept = draw.sample(sorted(fields), draw.choice([0, 1, 1, 1, 2, 5]))
    return {"num_hidden_layers": layers, **{name: fields[name] for name in kept}}


def test_owners_are_those_of_sglang() -> None:
    """Of the first rule that applies, over 3,000 configs.

    The layout refuses what SGLang takes without a word: rules that do not agree, and a first layer that shares.
    """
    agreed = refused = 0
    for seed in range(3000):
        fields = rules(seed)
        config = glm_5_2(fields.pop("num_hidden_layers"), **fields)
        owners = [n for n in range(config.num_hidden_layers) if not dsa_layer_skips_topk(config, n)]
        try:
            layout = glm_dsa.Layout.from_config(config)
        except glm_dsa.LayoutError as error:
            refused += 1
            said = str(error)
            assert "disagree about layer" in said or (
                0 not in owners and "the first layer has no earlier top-k" in said
            )
            continue
        agreed += 1
        assert list(layout.layers("index_k")) == owners, fields
    assert agreed > 1000 and refused > 300


# -- arguments of the constructor


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"page_size": 128}, ValueError, "glm_dsa: a page of this layout has 64 slots, not 128"),
        (
            {"dcp_replicated": True},
            NotImplementedError,
            "glm_dsa: decode context parallelism is not supported by this layout",
        ),
        (
            {"index_buf_size": 512},
            NotImplementedError,
            "glm_dsa: an index of another size than the latent is not supported here",
        ),
        (
            {"index_kpool": 4},
            ValueError,
            "glm_dsa: pooled index keys (index_kpool above 1) are not supported by this layout",
        ),
        ({"index_head_dim": 64}, ValueError, "glm_dsa: index_head_dim: this layout is for 128, found 64"),
        (
            {"kv_cache_dim": 600},
            ValueError,
            "glm_dsa: a row of float8_e4m3fn with 600 bytes is none of this layout's: "
            "bf16 with 1152 bytes, e4m3 with 656 bytes, e4m3 with 576 bytes",
        ),
    ],
)
def test_unfit_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "page_size": 64,
        "kv_lora_rank": 512,
        "dtype": DTYPES["fp8_scaled"],
        "qk_rope_head_dim": 64,
        "layer_num": 2,
        "device": "cpu",
        "index_head_dim": 128,
        "enable_memory_saver": False,
        "kv_cache_dim": 656,
    }
    with Deployment().serving():
        assert adapter.GlmDsaTokenToKVPool(256, **arguments).size == 256
        with pytest.raises(error) as raised:
            adapter.GlmDsaTokenToKVPool(256, **(arguments | change))
        assert str(raised.value) == message


def test_memory_comes_from_sglangs_regions() -> None:
    """The buffers, and they alone, are allocated where its memory saver and its memory pool are at work."""
    entered: list[str] = []

    class Region:
        def region(self, tag: str) -> "Region":
            entered.append(tag)
            return self

        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *error: object) -> None:
            entered.append("out")

    with Deployment("bf16", glm_5_2(2), 0, 2).serving() as configurator:
        pool = build(configurator, 128)
        pool.memory_saver_adapter = Region()
        pool._create_buffers()
    assert entered == ["kv_cache", "in", "out"] * 4  # latent and index keys of two layers


def test_memory_comes_from_sglangs_own_pool_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []
    monkeypatch.setattr("torch.cuda.use_mem_pool", lambda memory_pool: used.append(memory_pool) or nullcontext())
    with Deployment("bf16", glm_5_2(2), 0, 2).serving() as configurator:
        pool = build(configurator, 128)
        assert used == []
        pool.custom_mem_pool = "a memory pool"
        pool._create_buffers()
    assert used == ["a memory pool"] * 4


def test_what_a_pool_has_and_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are compiled, the stage is SGLang's, and cleared buffers are gone."""
    warmed: list[object] = []
    monkeypatch.setattr(glm_dsa.Pool, "warmup", lambda pool: warmed.append(pool))
    with Deployment("bf16", glm_5_2(), 20, 40).serving() as configurator:
        pool, own = build(configurator, 128), build_own(configurator, 128)
    assert warmed == [pool.generated]
    for name in (
        "start_layer",
        "end_layer",
        "layer_num",
        "model_layer_ids",
        "size",
        "page_size",
        "kv_cache_dim",
        "dtype",
    ):
        assert getattr(pool, name) == getattr(own, name), name
    rows = weakref.ref(pool.generated)
    warmed.clear()
    pool._clear_buffers()
    assert not hasattr(pool, "kv_buffer") and not hasattr(pool.index_key_cache, "buffer")
    assert rows() is None


def test_what_hicache_keeps_is_declared() -> None:
    """The bytes and layers of index keys, as SGLang declares them for its own pool."""
    for model, stage in (("all indexers", (0, 4)), ("sharing", (0, 12)), ("sharing", (20, 40)), ("sharing", (3, 6))):
        with Deployment("fp8_scaled", MODELS[model], *stage).serving() as configurator:
            pool, own = build(configurator, 64), build_own(configurator, 64)
            ours, theirs = ([declared(decl) for decl in each.host_pool_decls()] for each in (pool, own))
            assert ours == theirs
            assert all(decl.device_pool is pool for decl in pool.host_pool_decls())
            infos = [each.get_device_pool_infos()[0] for each in (pool, own)]
            assert infos[0].layer_ids == infos[1].layer_ids
            for info in infos:
                info.buffer_info.validate(layer_ids=info.layer_ids)
    assert len(ours) == 1  # a stage of layers that all share keeps no index keys


def declared(decl: Any) -> SimpleNamespace:
    names = [name for name in decl.__struct_fields__ if name not in ("device_pool", "host_pool_builder")]
    return SimpleNamespace(**{name: getattr(decl, name) for name in names})
