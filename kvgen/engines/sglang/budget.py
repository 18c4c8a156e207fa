"""SGLang's budget from the generated functions: what a token of the pool costs, and what its reserved pages do."""

from __future__ import annotations

import logging
from typing import Any

from kvgen.engines.sglang import PluginError, adapter

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.__init__"
WINDOWS = "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator.__init__"
# How SGLang's configurator builds each kind of pool: its method, the class that it takes, and what else it needs.
BUILDERS = {
    "dsa": ("_build_dsa_kv_pool", "dsa_pool_class", {"max_running_requests": 1}),
    "mla": ("_build_mla_kv_pool", "mla_pool_class", {}),
    "mha": ("_build_mha_kv_pool", "mha_pool_class", {}),
}


def correct(_: None, configurator: Any, kvc: Any) -> None:
    """Put the layout's figures into a `DefaultPoolConfigurator` that has just priced a model of the adapter's kind.

    What SGLang adds for the pool of a draft stays, with the reserved page that this pool has too.

    Raises:
        PluginError: a deployment in which SGLang builds another pool than the generated one, or one of other heads.
        ValueError: a config that the layout refuses.
    """
    if not is_for(kvc):
        return
    refuse_other_pools(kvc)
    module = adapter()
    layout = layout_of(kvc)
    refuse_other_heads(kvc, layout)
    draft = configurator._cell_size - configurator._compute_cell_size(kvc, kvc.layer_info.num_effective_layers)
    configurator._cell_size = module.cell_size(layout) + draft
    configurator._fixed_overhead_bytes += module.bytes_for(layout, 0) + kvc.pool_page_size * draft
    cell, fixed = configurator._cell_size, configurator._fixed_overhead_bytes
    logger.info("kvgen: the KV cache is that of %s: %d bytes a token, %d fixed", module.__file__, cell, fixed)


def refuse_windows(_: Any, kvc: Any) -> None:
    """PluginError before a `HybridSWAPoolConfigurator` prices pools of which the generated one would be some.

    SGLang prices window layers and the others by a budget of its own, and builds the pools of both, in slots of their
    own, of the classes that its platform names.
    """
    used = {_kind(kvc), "mla" if kvc.use_mla_backend else "mha"}  # the latter for the window layers
    if adapter().KIND in used:
        raise PluginError("kvgen: SGLang has a budget of its own for window layers; unset SGLANG_PLATFORM to use it")


def is_for(kvc: Any) -> bool:
    """Whether SGLang is about to build a pool of the adapter's kind for the target model."""
    return _kind(kvc) == adapter().KIND and not kvc.is_draft_worker


def _kind(kvc: Any) -> str:
    """The kind of pool that SGLang builds for the layers of a model, its window layers aside."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    if not kvc.use_mla_backend:
        return "mha"
    return "dsa" if is_deepseek_dsa(kvc.model_config.hf_config) else "mla"


def layout_of(kvc: Any) -> Any:
    """The layout of the pool that the configurator would build: of the very arguments that it would give it."""
    module = adapter()
    method, argument, others = BUILDERS[module.KIND]
    return getattr(kvc, method)(max_total_num_tokens=0, **{argument: module.layout_of_arguments}, **others)


def refuse_other_heads(kvc: Any, layout: Any) -> None:
    """PluginError where SGLang's rank has other heads than the layout of the model's own config on as many ranks.

    SGLang divides the heads before it makes a pool. A layout that does has to come to the same, and so has what else
    it takes from the config; one without ranks has nothing to be held against.
    """
    from sglang.srt.runtime_context import get_parallel

    if "tp_size" not in layout.choices:
        return
    ranks = get_parallel().attn_tp_size
    own = type(layout).from_config(kvc.model_config.hf_config, **layout.choices | {"tp_size": ranks})
    if own.buffers != layout.buffers:
        ours, theirs = map(_shown, (own, layout))
        raise PluginError(f"kvgen: {adapter().NAME} has {ours} for this model on {ranks} ranks, and SGLang {theirs}")


def _shown(layout: Any) -> str:
    """The values of a slot, and the layers that have them."""
    listed = []
    for buffer in layout.buffers:
        fields = " and ".join(f"{field.name} {list(field.shape[1:])}" for field in buffer.page.fields)
        listed.append(f"{fields} in {len(buffer.layers)} layers")
    return ", ".join(listed)


def refuse_other_pools(kvc: Any) -> None:
    """PluginError where SGLang would build another pool than the generated one, or a pool of its own around it."""
    from sglang.srt.configs.model_config import is_minimax_sparse
    from sglang.srt.layers.cp.utils import get_glm_dsa_cp_layer_shard_info
    from sglang.srt.runtime_context import get_memory, get_schedule

    others = {
        "HiSparse": get_memory().enable_hisparse,
        "unified memory": get_memory().enable_unified_memory,
        "KV sharding": kvc.kv_shard_rank is not None,
        "layer split": get_glm_dsa_cp_layer_shard_info(kvc)[0] is not None,
        "a hybrid with linear attention": kvc.mambaish_config is not None,
        "the sparse attention of MiniMax": is_minimax_sparse(kvc.model_config.hf_config),
        "mxfp8": kvc.kv_cache_dtype_str == "mxfp8",
        "a prefill that keeps nothing": get_schedule().prefill_only_disable_kv_cache,
    }
    for name, is_used in others.items():
        if is_used:
            raise PluginError(f"kvgen: SGLang builds a pool of its own for {name}; unset SGLANG_PLATFORM to use it")
