"""Deployments of vLLM: a model's class with a real config, and what its planner makes of the memory of a rank."""

import json
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    get_layers_from_vllm_config,
    set_current_vllm_config,
)
from vllm.distributed import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
    parallel_state,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_capacity
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.worker_base import WorkerBase

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
FOLDER = tempfile.TemporaryDirectory()  # of the configs as vLLM reads them
# The classes of language models, for configs of models that have other parts, or whose class is known by another name.
LANGUAGE_MODELS = {
    "gemma-3-27b": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma-3n-e4b": ("Gemma3nForCausalLM", "gemma3n_text"),
    "gemma-4-31b": ("Gemma4ForCausalLM", "gemma4_text"),
    "kimi-k2.5": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "llama-4-scout": ("Llama4ForCausalLM", "llama4_text"),
    "step-3.7-flash": ("Step3p5ForCausalLM", "step3p5"),
}
MINIMAX_M2 = {"rotary_dim": 64, "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
# What a class asks for besides, without a bearing on the cache.
OTHER_FIELDS: dict[str, dict[str, Any]] = {
    "gemma-3n-e4b": {"activation_sparsity_pattern": [0.0] * 35},
    "hunyuan-a13b": {
        "hidden_size": 4096,
        "intermediate_size": 64,
        "num_attention_heads": 32,
        "num_experts": 8,
        "moe_topk": 2,
    },
    "mimo-v2-flash": {
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "hidden_act": "silu",
        "layernorm_epsilon": 1e-5,
        "moe_layer_freq": [0] * 48,
        "partial_rotary_factor": 0.334,
        "swa_rope_theta": 10000,
    },
    "minimax-m2.5": MINIMAX_M2,
    "minimax-m2.7": MINIMAX_M2,
    "step-3.7-flash": {
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "moe_layers_enum": "3",
        "moe_num_experts": 8,
        "moe_router_scaling_factor": 3.0,
        "moe_top_k": 2,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
        "num_attention_groups": 8,  # num_key_value_heads, as the class calls it
        "rope_theta": 10000,
        "share_expert_dim": 64,
        "swiglu_limits": None,
        "swiglu_limits_shared": None,
        "use_moe_router_bias": True,
    },
}


def model_config(model: str) -> dict[str, Any]:
    """A config of `tests/data/configs`."""
    return json.loads((CONFIGS / f"{model}.json").read_text(encoding="utf-8"))


def full_config(model: str) -> dict[str, Any]:
    """The config as vLLM reads it: of the language model alone, with what its class asks for besides."""
    config = model_config(model)
    if model in LANGUAGE_MODELS:
        architecture, model_type = LANGUAGE_MODELS[model]
        config = {**config.get("text_config", config), "architectures": [architecture], "model_type": model_type}
    return {**config, "vocab_size": 3072, "max_position_embeddings": 131072, **OTHER_FIELDS.get(model, {})}


@dataclass(frozen=True)
class Deployment:
    """A model on one rank of a server."""

    model: str
    cache_dtype: str = "auto"
    block: int = 64
    ranks: int = 1
    max_len: int = 8192
    fields: tuple[tuple[str, Any], ...] = ()  # of the config, in place of its own; None is absent

    @cached_property
    def vllm_config(self) -> VllmConfig:
        config = {
            name: value for name, value in {**full_config(self.model), **dict(self.fields)}.items() if value is not None
        }
        folder = Path(tempfile.mkdtemp(dir=FOLDER.name))
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = ModelConfig(
            model=str(folder),
            tokenizer=str(folder),
            skip_tokenizer_init=True,
            max_model_len=self.max_len,
            dtype="bfloat16",
            enforce_eager=True,
        )
        return VllmConfig(
            model_config=model,
            cache_config=CacheConfig(cache_dtype=self.cache_dtype, block_size=self.block),
            parallel_config=ParallelConfig(tensor_parallel_size=self.ranks, distributed_executor_backend="mp"),
            device_config=DeviceConfig(device="cpu"),
        )

    @cached_property
    def specs(self) -> dict[str, KVCacheSpec]:
        """What each layer keeps, by the name of its module."""
        with set_current_vllm_config(self.vllm_config), pytest.MonkeyPatch.context() as patched:
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{FOLDER.name}/rendezvous", 0, "gloo")
            destroy_model_parallel()
            initialize_model_parallel()
            patched.setattr(parallel_state.get_tp_group(), "world_size", self.ranks)  # this is rank 0 of so many
            with set_default_torch_dtype(torch.bfloat16), torch.device("meta"):
                initialize_model(self.vllm_config)
        specs = get_kv_cache_spec(self.vllm_config)
        register_all_kvcache_specs(self.vllm_config)
        layouts = WorkerBase.get_supported_kv_cache_layouts(self)
        resolve_kv_cache_layout(self.vllm_config, [layouts], specs.values())
        return specs

    def specs_as(self, cache_dtype: str, backend: type[AttentionBackend]) -> dict[str, KVCacheSpec]:
        """The same for a format whose kernels are chosen on other devices: by the layers, as their backend has it."""
        found = dict(self.specs)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        with pytest.MonkeyPatch.context() as patched:
            for name, spec in self.specs.items():
                if kind(spec) != "index":
                    patched.setattr(layers[name], "kv_cache_dtype", cache_dtype)
                    patched.setattr(layers[name], "kv_cache_torch_dtype", torch.uint8, raising=False)
                    found[name] = backend.customize_spec(layers[name].get_kv_cache_spec(self.vllm_config))
        return found

    def plan(self, memory: int, specs: dict[str, KVCacheSpec] | None = None) -> KVCacheConfig:
        """What the planner makes of so many bytes, as the engine's core asks it."""
        specs = dict(specs or self.specs)
        groups = get_global_kv_cache_groups(self.vllm_config, [specs])
        return get_kv_cache_configs(self.vllm_config, [specs], [memory], groups)[0]

    def reported_tokens(self, memory: int) -> int:
        """The tokens that the server says it has room for."""
        return get_kv_cache_capacity(self.vllm_config, generate_scheduler_kv_cache_config([self.plan(memory)]))[0]


def block_bytes(plan: KVCacheConfig) -> int:
    """Bytes of one block id: of the widest group, in the one tensor behind all."""
    (size,) = {tensor.size for tensor in plan.kv_cache_tensors}
    assert size % plan.num_blocks == 0
    return size // plan.num_blocks


def pages_of(specs: dict[str, KVCacheSpec]) -> dict[tuple[str, int], int]:
    """Bytes of a block in one layer, by what is kept and the layer's id."""
    return {(kind(spec), extract_layer_index(name)): spec.page_size_bytes for name, spec in specs.items()}


def kind(spec: KVCacheSpec) -> str:
    """What a layer keeps: `index` keys, the tokens of a `window`, or those of `full` context."""
    if isinstance(spec, MLAAttentionSpec) and spec.cache_role == SparseCacheRole.INDEXER:
        return "index"
    return "window" if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec) else "full"


@cache
def deployment(model: str, **options: Any) -> Deployment:
    """One of each, as making the model is what takes long."""
    return Deployment(model, **options)
