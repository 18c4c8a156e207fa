"""What the shipped layouts make of models' configs: figures worked out by hand, and fields that mislead."""

from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
from support.models import model_config

from generated import glm_dsa, gqa, hybrid_swa, mla, shared_kv

LAYOUTS: tuple[ModuleType, ...] = (glm_dsa, gqa, hybrid_swa, mla, shared_kv)
LATENT = {"deepseek-v3": 61, "kimi-k2-instruct": 61, "kimi-k2.5": 61}  # layers
INDEXED = {"deepseek-v3.2": (61, 61), "glm-5": (78, 78), "glm-5.2": (78, 21)}  # layers; those with an indexer
HEADS = {  # layers, heads, values of K and of V
    "hunyuan-a13b": (32, 8, 128, 128),
    "llama-3.1-70b": (80, 8, 128, 128),
    "llama-3.1-8b": (32, 8, 128, 128),
    "minimax-m2.5": (62, 8, 128, 128),
    "minimax-m2.7": (62, 8, 128, 128),
    "mistral-7b-instruct-v0.2": (32, 8, 128, 128),
    "mistral-large-2407": (88, 8, 128, 128),
    "mixtral-8x7b": (32, 8, 128, 128),
    "qwen3-235b-a22b": (94, 4, 128, 128),
    "qwen3-30b-a3b": (48, 4, 128, 128),
    "qwen3-8b": (36, 8, 128, 128),
}
WINDOWS = {  # the same of layers that see everything, and of those with a window; layers that own, of gemma-3n-e4b
    "gemma-3-27b": ((10, 16, 128, 128), (52, 16, 128, 128)),
    "gemma-3n-e4b": ((4, 2, 256, 256), (16, 2, 256, 256)),
    "gemma-4-31b": ((10, 4, 512, 512), (50, 16, 256, 256)),
    "gpt-oss-120b": ((18, 8, 64, 64), (18, 8, 64, 64)),
    "llama-4-scout": ((12, 8, 128, 128), (36, 8, 128, 128)),
    "mimo-v2-flash": ((9, 4, 192, 128), (39, 8, 192, 128)),
    "step-3.7-flash": ((12, 8, 128, 128), (33, 8, 128, 128)),
}
KEPT = {  # bytes of a token in bf16, over all layers, as they are known of these models
    "deepseek-v3": 70_272,
    "deepseek-v3.2": 78_324,
    "gemma-3-27b": 507_904,
    "gemma-3n-e4b": 40_960,
    "gemma-4-31b": 901_120,
    "glm-5": 100_152,
    "glm-5.2": 92_628,
    "gpt-oss-120b": 73_728,
    "hunyuan-a13b": 131_072,
    "kimi-k2-instruct": 70_272,
    "kimi-k2.5": 70_272,
    "llama-3.1-70b": 327_680,
    "llama-3.1-8b": 131_072,
    "llama-4-scout": 196_608,
    "mimo-v2-flash": 222_720,
    "minimax-m2.5": 253_952,
    "minimax-m2.7": 253_952,
    "mistral-7b-instruct-v0.2": 131_072,
    "mistral-large-2407": 360_448,
    "mixtral-8x7b": 131_072,
    "qwen3-235b-a22b": 192_512,
    "qwen3-30b-a3b": 98_304,
    "qwen3-8b": 147_456,
    "step-3.7-flash": 184_320,
}
LATENT_ROWS = {
    "bf16": (512 + 64) * 2,
    "fp8_scaled": 512 + 512 // 128 * 4 + 64 * 2,
    "fp8_raw": 512 + 64,
    "nvfp4": 512 // 2 + 512 // 16 + 16 + 64 * 2,
}
INDEX_ROW = 128 + 4
KV_FORMATS = ("bf16", "fp8", "int8", "mxfp8", "nvfp4")


def kv_bytes(kind: tuple[int, int, int, int], kv_format: str) -> int:
    """Of a token in so many layers."""
    layers, heads, k, v = kind
    values = heads * (k + v)
    row = {
        "bf16": 2 * values,
        "fp8": values,
        "int8": values + 2 * heads * 4,  # a float for the K and one for the V of each head
        "mxfp8": values + values // 32,
        "nvfp4": values // 2 + values // 16,
    }
    return layers * row[kv_format]


def default_price(config: str) -> Fraction | int:
    """Of a token, with the choices that the layout takes by itself."""
    if config in LATENT:
        return LATENT[config] * LATENT_ROWS["bf16"]
    if config in INDEXED:
        layers, owners = INDEXED[config]
        return layers * LATENT_ROWS["fp8_scaled"] + owners * INDEX_ROW
    if config in HEADS:
        return kv_bytes(HEADS[config], "bf16")
    full, window = (kv_bytes(kind, "bf16") for kind in WINDOWS[config])
    return full + (window if config == "gemma-3n-e4b" else window // 2)


def prices(config: object, **choices: object) -> dict[str, Any]:
    """Bytes of a token in each layout that takes the config."""
    found = {}
    for module in LAYOUTS:
        try:
            layout = module.Layout.from_config(config, **choices)
        except module.LayoutError:
            continue
        found[layout_name(module)] = module.cell_size(layout)
    return found


def reasons(config: object) -> dict[str, str]:
    """What each layout that does not take the config has against it."""
    found = {}
    for module in LAYOUTS:
        try:
            module.Layout.from_config(config)
        except module.LayoutError as error:
            found[layout_name(module)] = str(error)
    return found


def layout_name(module: ModuleType) -> str:
    return module.__name__.removeprefix("generated.")


@pytest.mark.parametrize("config", KEPT)
def test_bytes_of_a_token_in_bf16(config: str) -> None:
    choices = {"swa_ratio": 1} if config in WINDOWS else {}
    module = {**dict.fromkeys(LATENT, mla), **dict.fromkeys(INDEXED, glm_dsa), **dict.fromkeys(HEADS, gqa)}.get(config)
    module = module or (shared_kv if config == "gemma-3n-e4b" else hybrid_swa)
    layout = module.Layout.from_config(model_config(config), kv_format="bf16", **choices)
    assert module.cell_size(layout) == KEPT[config]


@pytest.mark.parametrize("kv_format", LATENT_ROWS)
@pytest.mark.parametrize("config", LATENT)
def test_latent_rows(config: str, kv_format: str) -> None:
    own = prices(model_config(config), kv_format=kv_format)
    assert own == {"mla": LATENT[config] * LATENT_ROWS[kv_format]}


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_scaled", "fp8_raw"])
@pytest.mark.parametrize("config", INDEXED)
def test_latent_rows_and_index_keys(config: str, kv_format: str) -> None:
    layers, owners = INDEXED[config]
    own = prices(model_config(config), kv_format=kv_format)
    assert own == {"glm_dsa": layers * LATENT_ROWS[kv_format] + owners * INDEX_ROW}


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("config", HEADS)
def test_keys_and_values(config: str, kv_format: str) -> None:
    assert prices(model_config(config), kv_format=kv_format) == {"gqa": kv_bytes(HEADS[config], kv_format)}


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("config", WINDOWS)
def test_keys_and_values_of_layers_with_a_window(config: str, kv_format: str) -> None:
    """With as many slots as the others, a quarter as many, and none."""
    full, window = (kv_bytes(kind, kv_format) for kind in WINDOWS[config])
    name = "shared_kv" if config == "gemma-3n-e4b" else "hybrid_swa"
    for ratio in (Fraction(1), Fraction(1, 4), Fraction(0)):
        own = prices(model_config(config), kv_format=kv_format, swa_ratio=ratio)
        assert own == {name: full + window * ratio}


@pytest.mark.parametrize(
    ("config", "layers", "each"),
    [
        ("deepseek-v3", 1, 1152),
        ("deepseek-v3.2", 1, 656 + 132),
        ("glm-5.2", 1, 656 + 132),
        ("kimi-k2.5", 0, 1152),
        ("minimax-m2.5", 3, 4096),
        ("step-3.7-flash", 3, 4096),
        ("mimo-v2-flash", 0, 2560),
    ],
)
def test_draft_layers(config: str, layers: int, each: int) -> None:
    """Their number is a field's, or modules times the layers of each."""
    (price,) = prices(model_config(config), role="draft").values()
    assert price == layers * each


MHA = {"num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 32}  # heads of 64 values
WINDOW = {**MHA, "sliding_window": 512}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
DSA = {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 2048}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Heads
        (MHA, {"gqa": 4 * 32 * 128 * 2}),
        ({**MHA, "num_key_value_heads": None, "head_dim": None, "layer_types": None}, {"gqa": 4 * 32 * 128 * 2}),
        ({**MHA, "num_key_value_heads": 4, "head_dim": 128}, {"gqa": 4 * 4 * 256 * 2}),
        ({**MHA, "num_key_value_heads": 4, "v_head_dim": 32}, {"gqa": 4 * 4 * 96 * 2}),
        ({**MHA, "num_attention_groups": 4}, {"gqa": 4 * 4 * 128 * 2}),
        ({**MHA, "hidden_size": 2050}, {}),
        ({**MHA, "hidden_size": 2050, "head_dim": 64}, {"gqa": 4 * 32 * 128 * 2}),
        # Nested
        ({"num_hidden_layers": 9, "head_dim": 96, "text_config": {**MHA, "head_dim": 32}}, {"gqa": 4 * 32 * 64 * 2}),
        ({"head_dim": 96, "text_config": {**MHA, "head_dim": None}}, {"gqa": 4 * 32 * 192 * 2}),
        ({"text_config": MHA, "vision_config": {"num_hidden_layers": 27, "head_dim": 72}}, {"gqa": 4 * 32 * 128 * 2}),
        ({"vision_config": MHA}, {}),
        # Windows that no layer has
        ({**MHA, "sliding_window": None}, {"gqa": 32768}),
        ({**WINDOW, "use_sliding_window": False}, {"gqa": 32768}),
        ({**WINDOW, "use_sliding_window": False, "max_window_layers": 28}, {"gqa": 32768}),
        ({**WINDOW, "use_sliding_window": False, "max_window_layers": 2}, {"gqa": 32768}),
        ({**WINDOW, "max_window_layers": 4}, {"gqa": 32768}),
        ({**WINDOW, "layer_types": ["full_attention"] * 4}, {"gqa": 32768}),
        # Windows that some have, with half as many slots
        ({**WINDOW, "max_window_layers": 3}, {"gqa": 32768}),  # Qwen's window is off where nothing is said
        ({**WINDOW, "use_sliding_window": True, "max_window_layers": 3}, {"hybrid_swa": (3 + Fraction(1, 2)) * 8192}),
        ({**WINDOW, "layer_types": ALTERNATING}, {"hybrid_swa": 3 * 8192}),
        ({**WINDOW, "layer_types": ALTERNATING + ["sliding_attention"] * 3}, {"hybrid_swa": 3 * 8192}),
        ({**WINDOW, "layer_types": ALTERNATING[:3]}, {}),
        ({**WINDOW, "hybrid_layer_pattern": [0, 1, 1, 1]}, {"hybrid_swa": Fraction(5, 2) * 8192}),
        ({**WINDOW, "hybrid_layer_pattern": [0, 1, 1, 1, 0]}, {"hybrid_swa": Fraction(5, 2) * 8192}),
        ({**WINDOW, "hybrid_layer_pattern": "0111"}, {}),
        ({**WINDOW, "_sliding_window_pattern": 2}, {"hybrid_swa": 3 * 8192}),
        ({**WINDOW, "sliding_window_pattern": "LLLG", "layer_types": ALTERNATING}, {}),
        (WINDOW, {}),  # which layers have it is not said
        ({**WINDOW, "sliding_window": 0}, {"gqa": 32768}),
        ({**WINDOW, "max_position_embeddings": 512}, {"gqa": 32768}),  # as long as the model
        ({**WINDOW, "max_position_embeddings": 513}, {}),
        ({**WINDOW, "max_position_embeddings": 512, "layer_types": ALTERNATING}, {"hybrid_swa": 3 * 8192}),
        ({**WINDOW, "max_position_embeddings": 512, "sliding_window_pattern": 2}, {"gqa": 32768}),
        # Families with windows, where no field says more
        ({**WINDOW, "model_type": "mistral"}, {"hybrid_swa": 2 * 8192}),
        ({**WINDOW, "model_type": "mixtral"}, {"hybrid_swa": 2 * 8192}),
        ({**WINDOW, "model_type": "phimoe"}, {"hybrid_swa": 2 * 8192}),
        ({**WINDOW, "model_type": "gemma2"}, {"hybrid_swa": 3 * 8192}),
        ({**WINDOW, "model_type": "olmo3"}, {"hybrid_swa": Fraction(5, 2) * 8192}),
        ({**WINDOW, "model_type": "cohere2"}, {"hybrid_swa": Fraction(5, 2) * 8192}),
        ({**WINDOW, "model_type": "gemma3_text"}, {"hybrid_swa": 2 * 8192}),  # the sixth layer would be the first
        ({**WINDOW, "model_type": "gemma3_text", "sliding_window_pattern": 2}, {"hybrid_swa": 3 * 8192}),
        ({**WINDOW, "model_type": "mistral", "layer_types": ALTERNATING}, {"hybrid_swa": 3 * 8192}),
        # Falcon: one head, unless the decoder is a new one
        ({**MHA, "multi_query": True}, {"gqa": 4 * 128 * 2}),
        ({**MHA, "multi_query": True, "num_kv_heads": 8}, {"gqa": 4 * 128 * 2}),
        ({**MHA, "multi_query": True, "num_kv_heads": 8, "new_decoder_architecture": True}, {"gqa": 4 * 8 * 128 * 2}),
        ({**MHA, "multi_query": False, "num_kv_heads": 8}, {"gqa": 4 * 8 * 128 * 2}),
        # Llama 4 and SmolLM 3: layers without positions
        ({**MHA, "attention_chunk_size": 8192, "no_rope_layers": []}, {"hybrid_swa": Fraction(5, 2) * 8192}),
        ({**MHA, "attention_chunk_size": 8192, "no_rope_layer_interval": 2}, {"hybrid_swa": 3 * 8192}),
        ({**MHA, "attention_chunk_size": 8192, "no_rope_layers": [1, 0, 0, 0]}, {"hybrid_swa": Fraction(7, 2) * 8192}),
        ({**MHA, "no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4}, {"gqa": 32768}),
        # Layers that share
        ({**MHA, "num_kv_shared_layers": 0}, {"gqa": 32768}),
        ({**MHA, "num_kv_shared_layers": 1}, {"shared_kv": 3 * 8192}),
        ({**MHA, "cla_share_factor": 2, "use_cla": False}, {"gqa": 32768}),
        ({**MHA, "cla_share_factor": 2, "use_cla": True}, {"shared_kv": 2 * 8192}),
        ({**MHA, "cla_share_factor": 2}, {"gqa": 4 * 8192}),  # off where nothing is said, as in Hunyuan
        # Gemma 4: its widths are those of layers without a window; its heads too, where V is K
        (
            {
                **WINDOW,
                **{"layer_types": ALTERNATING, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
                "global_head_dim": 128,
            },
            {"hybrid_swa": 2 * 4 * 256 * 2 + 8192},
        ),
        ({**WINDOW, "layer_types": ALTERNATING, "num_global_key_value_heads": 4}, {"hybrid_swa": 3 * 8192}),
        (
            {**WINDOW, "layer_types": ALTERNATING, "num_global_key_value_heads": 4, "attention_k_eq_v": False},
            {"hybrid_swa": 3 * 8192},
        ),
        (
            {
                **WINDOW,
                "layer_types": ALTERNATING,
                "num_kv_shared_layers": 2,
                "global_head_dim": 128,
                "num_global_key_value_heads": 4,
                "attention_k_eq_v": True,
            },
            {"shared_kv": 4 * 256 * 2 + 8192},
        ),
        # Which layers attend
        ({**MHA, "attn_type_list": [1, 1, 1, 1]}, {"gqa": 32768}),
        ({**MHA, "attn_type_list": [0, 1, 0, 1]}, {}),
        ({**MHA, "full_attention_interval": 1, "layer_group_size": 1}, {"gqa": 32768}),
        # A latent: no head is a part of it
        ({**DSA, "head_dim": 192, "num_key_value_heads": 64}, {"glm_dsa": 4 * 788}),
        ({**DSA, "index_topk_pattern": "FSSS"}, {"glm_dsa": 4 * 656 + 132}),
        ({**DSA, "index_topk_pattern": "FSSSFFFF"}, {"glm_dsa": 4 * 656 + 132}),
        ({**DSA, "layer_types": ["indexed_attention"] * 4}, {"glm_dsa": 4 * 788}),
        ({**DSA, "layer_types": ["deepseek_sparse_attention"] * 4}, {"glm_dsa": 4 * 788}),
        ({**DSA, "layer_types": ["linear_attention", "indexed_attention"] * 2}, {}),
        ({**DSA, "index_head_dim": None, "index_topk": None, "layer_types": ["full_attention"] * 4}, {"mla": 4 * 1152}),
        ({**DSA, "index_head_dim": None, "index_topk": None, "layer_types": ["linear_attention"] * 4}, {}),
    ],
)
def test_fields_that_mislead(config: dict[str, Any], expected: dict[str, Any]) -> None:
    """At most one layout takes a config, and prices a token so."""
    assert prices(config) == expected


FAMILIES = {  # fields as they are published; layers that see everything, those with a window, bytes of a token in one
    "falcon-7b": (
        {
            **{"model_type": "falcon", "multi_query": True, "new_decoder_architecture": False},
            **{"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71},
        },
        (32, 0, 1 * (64 + 64) * 2),
    ),
    "falcon-40b": (
        {
            **{"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8},
            **{"num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128},
        },
        (60, 0, 8 * (64 + 64) * 2),
    ),
    "mistral-7b-v0.1": (
        {
            **{"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768},
            **{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        },
        (0, 32, 8 * (128 + 128) * 2),
    ),
    "phi-3-mini-4k": (
        {
            **{"model_type": "phi3", "sliding_window": 2047, "max_position_embeddings": 4096},
            **{"num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32},
        },
        (0, 32, 32 * (96 + 96) * 2),
    ),
    "phi-3-medium-128k": (
        {
            **{"model_type": "phi3", "sliding_window": 131072, "max_position_embeddings": 131072},
            **{"num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10},
        },
        (40, 0, 10 * (128 + 128) * 2),
    ),
    "phi-4-mini": (
        {
            **{"model_type": "phi3", "sliding_window": 262144, "max_position_embeddings": 131072},
            **{"num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8},
        },
        (32, 0, 8 * (128 + 128) * 2),
    ),
    "starcoder2-7b": (
        {
            **{"model_type": "starcoder2", "sliding_window": 4096, "max_position_embeddings": 16384},
            **{"num_hidden_layers": 32, "hidden_size": 4608, "num_attention_heads": 36, "num_key_value_heads": 4},
        },
        (0, 32, 4 * (128 + 128) * 2),
    ),
    "gemma-2-9b": (
        {
            **{"model_type": "gemma2", "sliding_window": 4096, "max_position_embeddings": 8192, "head_dim": 256},
            **{"num_hidden_layers": 42, "hidden_size": 3584, "num_attention_heads": 16, "num_key_value_heads": 8},
        },
        (21, 21, 8 * (256 + 256) * 2),
    ),
    "gemma-3-12b": (
        {
            "model_type": "gemma3",
            "text_config": {
                **{"model_type": "gemma3_text", "sliding_window": 1024, "head_dim": 256, "hidden_size": 3840},
                **{"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8},
            },
        },
        (8, 40, 8 * (256 + 256) * 2),
    ),
    "c4ai-command-r7b": (
        {
            **{"model_type": "cohere2", "sliding_window": 4096, "max_position_embeddings": 132096, "head_dim": 128},
            **{"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        },
        (8, 24, 8 * (128 + 128) * 2),
    ),
}


@pytest.mark.parametrize("model", FAMILIES)
def test_families(model: str) -> None:
    """Priced by their fields, or by what transformers takes for a model of that type."""
    config, (full, windows, each) = FAMILIES[model]
    for ratio in (Fraction(1), Fraction(1, 4)):
        choices = {"swa_ratio": ratio} if windows else {}
        assert prices(config, **choices) == {"hybrid_swa" if windows else "gqa": (full + windows * ratio) * each}


def test_bytes_of_families() -> None:
    """As they are known of these models in bf16, with as many slots of windows as of tokens."""
    each = {model: (full + windows) * each for model, (_, (full, windows, each)) in FAMILIES.items()}
    assert each == {
        "falcon-7b": 8_192,
        "falcon-40b": 122_880,
        "mistral-7b-v0.1": 131_072,
        "phi-3-mini-4k": 393_216,
        "phi-3-medium-128k": 204_800,
        "phi-4-mini": 131_072,
        "starcoder2-7b": 65_536,
        "gemma-2-9b": 344_064,
        "gemma-3-12b": 393_216,
        "c4ai-command-r7b": 131_072,
    }


def test_layers_of_families() -> None:
    for model, full in (("gemma-2-9b", [*range(1, 42, 2)]), ("gemma-3-12b", [*range(5, 48, 6)]), ("phi-3-mini-4k", [])):
        layout = hybrid_swa.Layout.from_config(FAMILIES[model][0])
        assert list(layout.layers("kv_full")) == full


def test_a_request_of_a_model_with_windows_alone() -> None:
    """Mistral 7B v0.1: 4,096 tokens lie in 257 pages of 16 at most; a token beyond the window costs nothing."""
    layout = hybrid_swa.Layout.from_config(FAMILIES["mistral-7b-v0.1"][0], swa_pool="requests")
    price = [hybrid_swa.bytes_for(layout, 8192, requests) for requests in (0, 1)]
    assert price[1] - price[0] == 257 * 16 * 131_072 and hybrid_swa.cell_size(layout) == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"model_type": "mistral4"},
            "hybrid_swa: sliding_window: add layer_types or sliding_window_pattern to the config",
        ),
        (
            {"model_type": "mistral", "max_position_embeddings": 512},
            "hybrid_swa: sliding_window: not shorter than max_position_embeddings, so no layer has a window",
        ),
        (
            {"num_kv_shared_layers": 1},
            "shared_kv: sliding_window: add layer_types or sliding_window_pattern to the config",
        ),
    ],
)
def test_windows_of_which_nothing_is_said(fields: dict[str, Any], reason: str) -> None:
    assert reason in reasons({**WINDOW, **fields})[reason.partition(":")[0]]


ODD_LAYERS = "num_key_value_heads_per_layer or cross_attention_layers: layers with heads of their own, or of an image"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"model_type": "nemotron-nas", "num_key_value_heads": None, "block_configs": [{"attention": {}}] * 4},
            "block_configs: every layer has heads of its own, or none",
        ),
        ({"model_type": "deci", "num_key_value_heads_per_layer": [4, 4, 2, 1]}, ODD_LAYERS),  # DeciLM
        ({"model_type": "mllama_text_model", "cross_attention_layers": [1, 3]}, ODD_LAYERS),  # Llama 3.2 Vision
    ],
)
def test_layers_that_are_not_alike(fields: dict[str, Any], reason: str) -> None:
    assert prices({**MHA, **fields}) == prices({"text_config": {**MHA, **fields}}) == {}
    found = reasons({**WINDOW, "num_kv_shared_layers": 1, **fields})
    for name in ("gqa", "hybrid_swa", "shared_kv"):
        assert f"{name}: {reason}\n" in found[name]


@pytest.mark.parametrize(
    ("layer_types", "price"),
    [
        (ALTERNATING, 8192),
        ([*ALTERNATING, "sliding_attention"], 4096),  # half as many slots
        ([*ALTERNATING, "full_attention", "sliding_attention"], 8192),
    ],
)
def test_the_window_of_a_draft_layer(layer_types: list[str], price: int) -> None:
    """The list says it after the layers of the body; a draft layer that is not in it sees everything."""
    config = {**WINDOW, "layer_types": layer_types, "num_nextn_predict_layers": 1}
    assert prices(config, role="draft") == {"hybrid_swa": price}


STATE = "mamba_d_state, ssm_state_size, linear_num_value_heads, lru_width or conv_L_cache: layers keep state"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mamba_d_state": 16, "attn_layer_period": 8, "attn_layer_offset": 4}, STATE),  # Jamba
        ({"mamba_d_state": 128, "attn_layer_indices": [1]}, STATE),  # Bamba, and Falcon-H1 with both in each layer
        ({"ssm_state_size": 128, "hybrid_override_pattern": "M-M*"}, STATE),  # Nemotron-H
        ({"lru_width": 2560, "block_types": ["recurrent", "recurrent", "attention"]}, STATE),  # RecurrentGemma
        ({"conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention", "conv"]}, STATE),  # LFM2
        ({"linear_num_value_heads": 32, "full_attention_interval": 4}, STATE),  # Qwen3-Next
        ({"layer_types": ["mamba", "mamba", "attention", "mamba"]}, "layer_types: layers that keep state"),  # Granite 4
        ({"layers_block_type": ["linear_attention", "hybrid"] * 2}, "layer_types: layers that keep state"),  # Zamba 2
        ({"layer_group_size": 4}, "layer_group_size: layers of linear attention keep state"),  # Ring-linear
        ({"attn_type_list": [0, 0, 0, 1]}, "attn_type_list: layers of linear attention keep state"),  # MiniMax-Text-01
        ({"compress_ratios": [0, 4, 128, 4]}, "compress_ratios: layers keep a latent for several tokens"),
        ({"kv_lora_rank": 256}, "kv_lora_rank: a latent per token"),
    ],
)
@pytest.mark.parametrize("unread", [{}, {"hidden_size": None}])
def test_models_that_keep_something_else(fields: dict[str, Any], reason: str, unread: dict[str, Any]) -> None:
    """Refused, and by `gqa` for what the model has, also where the size of a head is not known."""
    config = {**MHA, **fields, **unread}
    assert prices(config) == {}
    assert f"gqa: {reason}" in reasons(config)["gqa"]


ODD_NUMBERS = [True, False, 128.0, -1, 2**41, 10**400, float("nan"), float("inf"), "128", "", [], [8], {}, {"a": 1}]


@pytest.mark.parametrize("value", ODD_NUMBERS, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("config", KEPT)
def test_values_that_are_no_numbers(config: str, value: object) -> None:
    """In place of a number that the layout reads: a message that names the field and the value, and no price."""
    fields = model_config(config)
    inner = fields.get("text_config", fields)
    ((name, _),) = prices(fields).items()
    module = next(module for module in LAYOUTS if layout_name(module) == name)
    used = module.Layout.from_config(fields).config_used
    numbers = [field for field, own in used.items() if type(own) is int]
    assert numbers
    for field in numbers:
        own = inner[field]
        inner[field] = value
        assert prices(fields) == {}, field
        assert field in reasons(fields)[name]
        inner[field] = own
    assert name in prices(fields)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("layer_types", "full_attention", "layer_types: expected a list, found 'full_attention'"),
        ("layer_types", [True] * 4, "layer_types: element 0: expected one of full_attention, "),
        ("layer_types", [["full_attention"]] * 4, "layer_types: element 0: expected one of full_attention, "),
        ("layer_types", {"0": "full_attention"}, "layer_types: expected a list, found {'0': 'full_attention'}"),
        ("layer_types", ["full_attention"] * 10_001, "layer_types: expected at most 10000 elements, found 10001"),
        ("hybrid_layer_pattern", [False] * 4, "hybrid_layer_pattern: element 0: expected one of 0, 1, found False"),
        ("hybrid_layer_pattern", [1.0] * 4, "hybrid_layer_pattern: element 0: expected one of 0, 1, found 1.0"),
        ("use_sliding_window", 0, "use_sliding_window: expected true or false, found 0"),
        ("use_sliding_window", "false", "use_sliding_window: expected true or false, found 'false'"),
        ("use_cla", 0, "use_cla: expected true or false, found 0"),
        ("num_hidden_layers", 10_001, "10001 layers are more than 10000"),
        ("num_nextn_predict_layers", 2**40, "1099511627780 layers are more than 10000"),
        ("num_attention_heads", 0, "num_attention_heads: expected an integer from 1 to 1099511627776, found 0"),
        ("head_dim", 2**40, "a page of 2251799813685248 bytes is larger than 2^40"),
        ("num_key_value_heads", 2**40, "a page of 4503599627370496 bytes is larger than 2^40"),
        ("compress_ratios", 4, "compress_ratios: expected a list, found 4"),
        ("sparse_attention_config", {"sparse_index_dim": "x"}, "sparse_attention_config.sparse_index_dim: expected an"),
    ],
)
def test_other_odd_values(field: str, value: object, expected: str) -> None:
    config = {**MHA, field: value}
    assert prices(config) == {} and expected in reasons(config)["gqa"]


@pytest.mark.parametrize("text", ["x", 1, [MHA], True])
def test_a_text_config_that_holds_no_fields(text: object) -> None:
    """What it lacks is looked up at the top, as always."""
    assert prices({**MHA, "text_config": text}) == {"gqa": 32768}
    assert prices({"text_config": text}) == {}
