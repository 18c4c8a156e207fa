"""Deployments of GLM-5.2, DeepSeek-V3 and models of keys and values per head, as a server sets them up.

SGLang's global arguments, and its configurator.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig, is_deepseek_dsa
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator, _PoolSizes, calculate_mla_kv_cache_dim
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, KVCache, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

E4M3 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp8_scaled": E4M3, "fp8_raw": E4M3}
BACKENDS = {"bf16": "flashmla_sparse", "fp8_scaled": "flashmla_sparse", "fp8_raw": "trtllm"}  # they choose the row
HEAD_DTYPES = {"bf16": torch.bfloat16, "fp8": E4M3}  # of keys and values per head
STAGES = ((0, 78), (0, 39), (39, 78), (20, 40))
PAGE = 64
CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def glm_5_2(layers: int = 78, **fields: object) -> SimpleNamespace:
    """The config.json, as far as SGLang's pools and the layout read it."""
    config = SimpleNamespace(
        architectures=["GlmMoeDsaForCausalLM"],
        num_hidden_layers=layers,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_topk=2048,
    )
    vars(config).update(fields)
    config.get_text_config = lambda: config
    return config


def deepseek_v3(layers: int = 61) -> SimpleNamespace:
    """A model without an indexer."""
    return glm_5_2(layers, architectures=["DeepseekV3ForCausalLM"], index_topk=None, index_head_dim=None)


def model_of(name: str, **fields: object) -> ModelConfig:
    """SGLang's own reading of a config.json of the tests, with other fields."""
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | fields
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        return ModelConfig(folder)


SHARING = {"index_topk_freq": 4, "index_skip_topk_offset": 3}


@dataclass(frozen=True)
class Deployment:
    """A model on one rank of a server."""

    kv_format: str = "fp8_scaled"
    config: Any = None
    start: int = 0
    end: int = 78
    ratio: int = 0  # of HiSparse; 0 is off
    draft_layers: int = 0
    is_draft: bool = False
    algorithm: str | None = None
    page: int = PAGE
    arguments: tuple[tuple[str, object], ...] = ()
    model: ModelConfig | None = None  # of keys and values per head, in place of a config
    ranks: int = 1

    @property
    def layers(self) -> int:
        return self.end - self.start

    @contextmanager
    def serving(self) -> Iterator[KVCacheConfigurator]:
        """SGLang's configurator, within the global arguments of the deployment."""
        backend = BACKENDS.get(self.kv_format)
        arguments = {
            "enable_hisparse": self.ratio > 0,
            "hisparse_config": f'{{"host_to_device_ratio": {self.ratio or 1}}}',
            "disable_radix_cache": True,
            "enable_hierarchical_cache": False,
            "disaggregation_mode": "null",
            "page_size": self.page,
            "dsa_prefill_backend": backend,
            "dsa_decode_backend": backend,
            **dict(self.arguments),
        }
        overridden = get_context().override_server_args(**arguments)
        server_args = overridden.install()
        try:
            sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), self.ranks)
            with get_parallel().override(**sizes, attn_dcp_rank=0):
                yield self.configurator(server_args)
        finally:
            overridden.restore()

    def configurator(self, server_args: Any) -> KVCacheConfigurator:
        config = self.config or glm_5_2()
        model = self.model or SimpleNamespace(
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            hf_config=config,
            hf_text_config=config,
            context_len=131072,
            linear_attn_registry_result=None,
            num_nextn_predict_layers=self.draft_layers,
        )
        layers = SimpleNamespace(
            start_layer=self.start,
            end_layer=self.end,
            num_effective_layers=self.layers,
            is_hybrid_swa_mtp_draft=False,
            swa_attention_layer_ids=[],
        )
        algorithm = self.algorithm or ("EAGLE" if self.draft_layers else None)
        return KVCacheConfigurator(
            device="cpu",
            gpu_id=0,
            attn_dp_size=1,
            pp_size=1,
            pp_group=None,
            model=None,
            model_config=model,
            server_args=server_args,
            kv_cache_dtype=(DTYPES | HEAD_DTYPES)[self.kv_format],
            kv_cache_dtype_str="auto",
            model_dtype=torch.bfloat16,
            page_size=self.page,
            sliding_window_size=None,
            spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
            is_draft_worker=self.is_draft,
            post_capture_kv_active=False,
            spec_aux_config=SpecAuxHiddenStateConfig(eagle_draft_num_layers=self.draft_layers or None),
            is_hybrid_swa=False,
            is_hybrid_swa_compress=False,
            use_mla_backend=self.model is None,
            layer_info=layers,
            forward_stream=None,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            memory_pool_config=None,
        )


def build(configurator: KVCacheConfigurator, tokens: int, code: type = KVCacheConfigurator) -> Any:
    """The pool that the code of SGLang's configurator builds, whichever class its platform names."""
    nothing = dict.fromkeys(
        ("c4_max_total_num_tokens", "c128_max_total_num_tokens", "c4_state_pool_size", "c128_state_pool_size"), 0
    )
    sizes = _PoolSizes(
        max_total_num_tokens=tokens,
        max_running_requests=8,
        full_max_total_num_tokens=None,
        swa_max_total_num_tokens=None,
        c4_state_dtype=None,
        c128_state_dtype=None,
        **nothing,
    )
    return code._build_token_to_kv_pool(
        configurator,
        sizes=sizes,
        is_dsa_model=is_deepseek_dsa(configurator.model_config.hf_config),
        is_dsv4_model=False,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.empty(9, 1)),
    )


def build_own(configurator: KVCacheConfigurator, tokens: int) -> KVCache:
    """SGLang's own pool of the same arguments: of a model with an indexer a `DSATokenToKVPool`."""
    if not configurator.use_mla_backend:
        return configurator._build_mha_kv_pool(max_total_num_tokens=tokens, mha_pool_class=MHATokenToKVPool)
    if is_deepseek_dsa(configurator.model_config.hf_config):
        return configurator._build_dsa_kv_pool(
            max_total_num_tokens=tokens, max_running_requests=9, dsa_pool_class=DSATokenToKVPool
        )
    return configurator._build_mla_kv_pool(max_total_num_tokens=tokens, mla_pool_class=MLATokenToKVPool)


def own_cell_size(configurator: KVCacheConfigurator) -> int:
    """Bytes of a token by SGLang's own function, for the target alone."""
    pricing = object.__new__(DefaultPoolConfigurator)
    pricing.kv_cache_dtype_str = configurator.kv_cache_dtype_str
    return pricing._compute_cell_size(configurator, configurator.layer_info.num_effective_layers)


def row_dim(configurator: KVCacheConfigurator) -> int:
    return calculate_mla_kv_cache_dim(
        model_config=configurator.model_config, kv_cache_dtype=configurator.kv_cache_dtype
    )
