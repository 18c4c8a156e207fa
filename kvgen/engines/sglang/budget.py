"""SGLang's budget from the generated functions: what a token of the pool costs, and what its reserved pages do."""

from __future__ import annotations

import logging
from typing import Any

from kvgen.engines.sglang import PluginError, adapter

logger = logging.getLogger(__name__)

TARGET = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.__init__"


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


def is_for(kvc: Any) -> bool:
    """Whether SGLang is about to build a pool of the adapter's kind for the target model."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    kind = "dsa" if is_deepseek_dsa(kvc.model_config.hf_config) else "mla"
    return kvc.use_mla_backend and kind == adapter().KIND and not kvc.is_draft_worker


def layout_of(kvc: Any) -> Any:
    """The layout of the pool that the configurator would build: of the very arguments that it would give it."""
    module = adapter()
    if module.KIND == "mla":
        return kvc._build_mla_kv_pool(max_total_num_tokens=0, mla_pool_class=module.layout_of_arguments)
    return kvc._build_dsa_kv_pool(
        max_total_num_tokens=0, max_running_requests=1, dsa_pool_class=module.layout_of_arguments
    )


def refuse_other_pools(kvc: Any) -> None:
    """PluginError where SGLang would pass the generated pool over without a word."""
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
