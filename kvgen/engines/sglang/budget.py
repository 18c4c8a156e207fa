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
}


def correct(_: None, configurator: Any, kvc: Any) -> None:
    """Put the layout's figures into a `DefaultPoolConfigurator` that has just priced a model of the adapter's kind.

    What SGLang adds for the pool of a draft stays, with the reserved page that this pool has too.

    Raises:
        PluginError: a deployment in which SGLang builds another pool than the generated one.
    """
    if not is_for(kvc):
        return
    refuse_other_pools(kvc)
    module = adapter()
    layout = layout_of(kvc)
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


def refuse_other_pools(kvc: Any) -> None:
    """PluginError where SGLang would build another pool than the generated one, or a pool of its own around it."""
    from sglang.srt.layers.cp.utils import get_glm_dsa_cp_layer_shard_info
    from sglang.srt.runtime_context import get_memory

    others = {
        "HiSparse": get_memory().enable_hisparse,
        "unified memory": get_memory().enable_unified_memory,
        "KV sharding": kvc.kv_shard_rank is not None,
        "layer split": get_glm_dsa_cp_layer_shard_info(kvc)[0] is not None,
        "a hybrid with linear attention": kvc.mambaish_config is not None,
    }
    for name, is_used in others.items():
        if is_used:
            raise PluginError(f"kvgen: SGLang builds a pool of its own for {name}; unset SGLANG_PLATFORM to use it")
