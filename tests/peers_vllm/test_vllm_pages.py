"""Pages of the layouts against blocks of vLLM: which layers keep what, how many bytes, and how many in a memory."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from deployments import Deployment, block_bytes, deployment, model_config, pages_of

from generated import glm_dsa, gqa, hybrid_swa, mla, shared_kv

GIB = 2**30
MEMORIES = (10 * GIB, 40 * GIB, 80 * GIB)
KINDS = {"kv": "full", "index_k": "index", "kv_full": "full", "kv_swa": "window"}


@dataclass(frozen=True)
class Case:
    """A model in a layout and in vLLM, with the names that both have for the format of its values."""

    layout: ModuleType
    model: str
    kv_format: str
    cache_dtype: str
    page: int = 64
    ranks: int = 1

    @property
    def own(self) -> Any:
        """The layout."""
        choices: dict[str, Any] = {"kv_format": self.kv_format}
        if self.layout is not glm_dsa:
            choices["page_size"] = self.page
        if self.layout not in (glm_dsa, mla):
            choices["tp_size"] = self.ranks
        return self.layout.Layout.from_config(model_config(self.model), **choices)

    @property
    def vllm(self) -> Deployment:
        return deployment(self.model, cache_dtype=self.cache_dtype, block=self.page, ranks=self.ranks)

    def __str__(self) -> str:
        return (
            f"{self.layout.__name__.removeprefix('generated.')}-{self.model}-{self.kv_format}-{self.page}-{self.ranks}"
        )


LATENT = [
    *(Case(mla, model, "bf16", "auto", page) for model in ("deepseek-v3", "kimi-k2.5") for page in (16, 64)),
    *(Case(mla, model, "fp8_raw", "fp8", page) for model in ("deepseek-v3", "kimi-k2.5") for page in (16, 64)),
    *(Case(glm_dsa, model, "bf16", "auto") for model in ("deepseek-v3.2", "glm-5", "glm-5.2")),
    *(Case(glm_dsa, model, "fp8_scaled", "fp8") for model in ("deepseek-v3.2", "glm-5", "glm-5.2")),
    Case(mla, "kimi-k2-instruct", "bf16", "auto"),
    Case(mla, "deepseek-v3", "bf16", "auto", ranks=8),
    Case(glm_dsa, "glm-5.2", "fp8_scaled", "fp8", ranks=8),
]
GQA = [
    *(
        Case(gqa, model, kv_format, cache_dtype, page)
        for model in ("llama-3.1-8b", "qwen3-30b-a3b")
        for kv_format, cache_dtype in (("bf16", "auto"), ("fp8", "fp8"), ("int8", "int8_per_token_head"))
        for page in (16, 64)
    ),
    *(
        Case(gqa, model, "bf16", "auto", 16)
        for model in (
            "llama-3.1-70b",
            "qwen3-8b",
            "qwen3-235b-a22b",
            "mistral-7b-instruct-v0.2",
            "mistral-large-2407",
            "mixtral-8x7b",
            "minimax-m2.5",
            "minimax-m2.7",
            "hunyuan-a13b",
        )
    ),
    *(Case(gqa, "llama-3.1-70b", "fp8", "fp8", 16, ranks) for ranks in (2, 8, 16)),  # 8 heads: on 16, each is on two
    Case(gqa, "qwen3-30b-a3b", "int8", "int8_per_token_head", 16, 8),
]
HYBRIDS = [
    *(
        Case(hybrid_swa, model, kv_format, cache_dtype, 16)
        for model in ("gpt-oss-120b", "gemma-3-27b", "gemma-4-31b", "mimo-v2-flash", "llama-4-scout", "step-3.7-flash")
        for kv_format, cache_dtype in (("bf16", "auto"), ("fp8", "fp8"))
    ),
    *(
        Case(shared_kv, "gemma-3n-e4b", kv_format, cache_dtype, 16, ranks)
        for kv_format, cache_dtype, ranks in (("bf16", "auto", 1), ("fp8", "fp8", 1), ("bf16", "auto", 8))
    ),
    Case(hybrid_swa, "gemma-4-31b", "int8", "int8_per_token_head", 16),
    *(Case(hybrid_swa, model, "bf16", "auto", 64, 8) for model in ("gemma-4-31b", "mimo-v2-flash")),  # 4 heads and more
]


def own_pages(layout: Any) -> dict[tuple[str, int], int]:
    """Bytes of a page in one layer, by what is kept and the layer's id."""
    found = {}
    for buffer in layout.buffers:
        pages = buffer.pages if hasattr(buffer, "pages") else (buffer.page,) * len(buffer.layers)
        for layer, page in zip(buffer.layers, pages, strict=True):
            found[KINDS[buffer.name], layer] = page.page_bytes
    return found


@pytest.mark.parametrize("case", LATENT + GQA + HYBRIDS, ids=str)
def test_layers_and_their_pages(case: Case) -> None:
    """The same layers keep the same things in as many bytes."""
    assert own_pages(case.own) == pages_of(case.vllm.specs)


@pytest.mark.parametrize("case", LATENT + GQA, ids=str)
def test_pages_of_a_memory(case: Case) -> None:
    """As many pages as vLLM has blocks, of as many bytes: the null block is the reserved page."""
    layout = case.own
    for memory in MEMORIES:
        plan = case.vllm.plan(memory)
        tokens = case.layout.max_tokens(layout, memory)
        assert case.layout.cell_size(layout) * case.page == block_bytes(plan)
        assert tokens == (plan.num_blocks - 1) * case.page
        assert case.layout.bytes_for(layout, tokens) == plan.num_blocks * block_bytes(plan)


def test_layers_that_keep_nothing_of_their_own() -> None:
    """Of the 35 layers of Gemma 3n E4B the last 15 read the others' tokens; a page has 16 x 2 x 2 x 256 bf16 values."""
    pages = pages_of(deployment("gemma-3n-e4b", block=16).specs)
    assert pages == {("full" if layer % 5 == 4 else "window", layer): 32768 for layer in range(20)}


@pytest.mark.parametrize("v_is_k", [True, False])
@pytest.mark.parametrize(("module", "shared"), [(hybrid_swa, 0), (shared_kv, 20)])
def test_gemma_4_of_other_kinds(module: ModuleType, shared: int, v_is_k: bool) -> None:
    """The last layers read the others' tokens; heads of layers without a window are their own only where V is K."""
    fields = {"num_kv_shared_layers": shared, "attention_k_eq_v": v_is_k}
    config = model_config("gemma-4-31b")
    config["text_config"] |= fields
    pages = pages_of(deployment("gemma-4-31b", block=16, fields=(*fields.items(),)).specs)
    heads = 4 if v_is_k else 16
    assert pages == {
        **{("full", layer): 16 * heads * 1024 * 2 for layer in range(5, 60 - shared, 6)},
        **{("window", layer): 16 * 16 * 512 * 2 for layer in range(60 - shared) if layer % 6 != 5},
    }
    assert own_pages(module.Layout.from_config(config)) == pages
