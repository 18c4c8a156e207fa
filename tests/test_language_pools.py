"""Every layout of `tests/language` and `specs`, priced and allocated: the sums are written apart from the compiler.

Each `Family` below draws configs and choices, and prices them from the published layout alone, buffer by buffer; the
generated module has to give the same bytes in its budget and in the tensors of its pool.
"""

import importlib
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import LANGUAGE, language_module, model_config, run_whole

Config = dict[str, Any]
Choices = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A spec of `tests/language`, or one that is shipped, what to try on it, and what that costs."""

    name: str
    draw: Callable[[random.Random], tuple[Config, Choices]]
    price: Callable[[Config, Choices, int, int], int]  # bytes on the device for so many tokens and requests
    granule: Callable[[Config, Choices], int]

    @property
    def module(self) -> Any:
        is_shipped = not (LANGUAGE / f"{self.name}.yaml").exists()
        return importlib.import_module(f"generated.{self.name}") if is_shipped else language_module(self.name)


def held(config: Config, choices: Choices) -> Iterator[int]:
    """The layers of the stage and role; layers at and above `num_hidden_layers` are drafts."""
    body = config["num_hidden_layers"]
    drafts = choices.get("draft_layers", config.get("num_nextn_predict_layers", 0))
    role = choices.get("role", "target")
    for layer in range(choices.get("start_layer", 0), choices.get("end_layer", body + drafts)):
        if role == "both" or (layer >= body) == (role == "draft"):
            yield layer


def stage(draw: random.Random, total: int) -> Choices:
    """Most often every layer of the body; sometimes a stage or a role."""
    choices: Choices = {}
    if draw.random() < 0.4:
        choices["role"] = draw.choice(["target", "draft", "both"])
    if draw.random() < 0.3:
        choices["start_layer"], choices["end_layer"] = sorted((draw.randint(0, total), draw.randint(0, total)))
    return choices


Shared = dict[str, tuple[set[int], set[int]]]  # owners and readers of a buffer


def nearest(layer: int, owners: set[int]) -> int | None:
    """The owner whose bytes a layer reads: itself, or the nearest before it."""
    return max((own for own in owners if own <= layer), default=None)


def in_one_pool(draw_any: Callable, shared: Callable[[Config], Shared]) -> Callable:
    """Draws where no reader is parted from its owner, by the model or by the stage."""

    def draw_one(draw: random.Random) -> tuple[Config, Choices]:
        while True:
            config, choices = draw_any(draw)
            here = set(held(config, choices))
            found = shared(config).values()
            if all(nearest(layer, owners) in here for owners, readers in found for layer in readers & here):
                return config, choices

    return draw_one


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def shard(heads: int, ranks: int) -> int:
    """Heads of one rank; below one head a rank, several ranks hold the same."""
    return max(heads // ranks, 1)


# -- corners: heads of each layer, and rows padded field by field


def draw_corners(draw: random.Random) -> tuple[Config, Choices]:
    layers = draw.randint(1, 6)
    config = {
        "num_hidden_layers": layers,
        "kv_heads": [draw.randint(1, 8) for _ in range(layers + draw.randint(0, 2))],
        "head_dim": draw.choice([None, 32, 64, 256]),
    }
    return config, {"rows": draw.choice(["q8_0", "tpu"])} | stage(draw, layers)


def price_corners(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    total = 0
    for layer in held(config, choices):
        if choices["rows"] == "q8_0":
            blocks = config["kv_heads"][layer] * (config["head_dim"] or 128) // 32
            row = 2 * blocks * (2 + 32)  # keys and values; 32 codes and their scale
        else:
            row = 1024 + 256  # 512 and 64 values of 2 bytes, each rounded up to 256
        total += (tokens // 64 + 1) * 64 * row
    return total


# -- gqa: keys and values in several orders and formats


def draw_gqa_orders(draw: random.Random) -> tuple[Config, Choices]:
    layers = draw.randint(1, 5)
    kv_format = draw.choice(["bf16", "fp8", "nvfp4", "mxfp8"])
    orders = {"bf16": ["nhd", "hnd", "x5d"], "fp8": ["nhd", "hnd", "x5d"], "nvfp4": ["nhd", "hnd"], "mxfp8": ["nhd"]}
    kv_order = draw.choice(orders[kv_format])
    pages = [128] if kv_format == "mxfp8" else [16, 32, 64, 128] if kv_order == "x5d" else [1, 3, 16, 64]
    config = {
        "num_hidden_layers": layers,
        "num_key_value_heads": draw.choice([1, 2, 4, 8, 16]),
        "head_dim": draw.choice([64, 128, 192]),
        "v_head_dim": draw.choice([64, 128]),
    }
    choices = {
        "kv_format": kv_format,
        "kv_order": kv_order,
        "page_size": draw.choice(pages),
        "tp_size": draw.choice([1, 2, 4, 8, 16, 32]),
        "split_kv": draw.random() < 0.5,
    }
    return config, choices | stage(draw, layers)


def price_gqa_orders(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    # codes, and a scale of one byte for each 16 or 32 of them
    value = {"bf16": 2, "fp8": 1, "nvfp4": Fraction(1, 2) + Fraction(1, 16), "mxfp8": 1 + Fraction(1, 32)}
    heads = shard(config["num_key_value_heads"], choices["tp_size"])
    row = heads * (config["head_dim"] + config["v_head_dim"]) * value[choices["kv_format"]]
    return int(len([*held(config, choices)]) * (tokens + choices["page_size"]) * row)


# -- gpt_oss: full and sliding layers, each kind with its own slots


def draw_gpt_oss(draw: random.Random) -> tuple[Config, Choices]:
    layers = draw.randint(1, 8)
    drafts = draw.randint(0, 2)
    config = {
        "num_hidden_layers": layers,
        "num_key_value_heads": draw.choice([1, 2, 8]),
        "head_dim": draw.choice([64, 80]),
        "layer_types": [
            draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers + draw.randint(0, 2))
        ],
    }
    choices = {
        "kv_format": draw.choice(["bf16", "fp8"]),
        "kv_order": draw.choice(["nhd", "hnd"]),
        "page_size": draw.choice([1, 7, 16, 64]),
        "tp_size": draw.choice([1, 2, 8]),
        "swa_ratio": draw.choice([0, 1, 2, "1/2", "0.1", "3/7", Fraction(5, 3), 0.25]),
        "draft_layers": drafts,
    }
    return config, choices | stage(draw, layers + drafts)


def price_gpt_oss(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    page = choices["page_size"]
    heads = shard(config["num_key_value_heads"], choices["tp_size"])
    page_bytes = page * 2 * heads * config["head_dim"] * {"bf16": 2, "fp8": 1}[choices["kv_format"]]
    full = tokens // page + 1
    sliding = floor(tokens * Fraction(str(choices["swa_ratio"])) / page) + 1
    body, types = config["num_hidden_layers"], config["layer_types"]
    return page_bytes * sum(
        sliding if layer < body and types[layer] == "sliding_attention" else full for layer in held(config, choices)
    )


# -- kimi_linear: state of each request beside a latent


def draw_kimi_linear(draw: random.Random) -> tuple[Config, Choices]:
    layers = draw.randint(1, 8)
    full = sorted(draw.sample(range(1, layers + 1), draw.randint(0, layers)))
    linear = {
        "full_attn_layers": full,
        "num_heads": draw.choice([8, 16]),
        "head_dim": draw.choice([64, 128]),
        "short_conv_kernel_size": draw.choice([2, 4]),
    }
    if draw.random() < 0.5:
        linear["kda_layers"] = [layer for layer in range(1, layers + 1) if layer not in full]
    config = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": draw.randint(0, 2),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": linear,
    }
    choices = {
        "kv_format": draw.choice(["bf16", "fp8_raw"]),
        "page_size": draw.choice([1, 16, 64]),
        "tp_size": draw.choice([1, 2, 8]),
    }
    return config, choices | stage(draw, layers + config["num_nextn_predict_layers"])


def price_kimi_linear(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    linear = config["linear_attn_config"]
    dim = linear["head_dim"]
    conv = 3 * linear["num_heads"] * dim // choices["tp_size"] * (linear["short_conv_kernel_size"] - 1) * 2
    recurrent = linear["num_heads"] // choices["tp_size"] * dim * dim * 4
    row = {"bf16": 1152, "fp8_raw": 576}[choices["kv_format"]]
    return sum(
        (tokens + choices["page_size"]) * row
        if layer >= config["num_hidden_layers"] or layer + 1 in linear["full_attn_layers"]
        else (requests + 1) * (conv + recurrent)
        for layer in held(config, choices)
    )


# -- minimax_m3: dense layers and index keys at the ratio, sparse layers at one


def draw_minimax_m3(draw: random.Random) -> tuple[Config, Choices]:
    layers = draw.randint(1, 8)
    config = {
        "num_hidden_layers": layers,
        "num_key_value_heads": draw.choice([1, 4]),
        "head_dim": draw.choice([64, 128]),
        "sparse_attention_config": {
            "sparse_index_dim": draw.choice([64, 128]),
            "sparse_attention_freq": [draw.randint(0, 1) for _ in range(layers)],
            "sparse_disable_index_value": [draw.randint(0, 1) for _ in range(layers)],
        },
    }
    choices = {
        "kv_format": draw.choice(["bf16", "fp8"]),
        "kv_order": draw.choice(["nhd", "hnd"]),
        "stack": draw.choice(["plain", "nvfp4_rows"]),
        "page_size": draw.choice([2, 16, 128]),
        "tp_size": draw.choice([1, 2, 4, 8]),
        "host_to_device_ratio": draw.choice([1, 1, 2, 3]),
    }
    return config, choices | stage(draw, layers)


def price_minimax_m3(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    page, ratio = choices["page_size"], choices["host_to_device_ratio"]
    sparse = config["sparse_attention_config"]
    plain = choices["stack"] == "plain"
    values = page * shard(config["num_key_value_heads"], choices["tp_size"]) * config["head_dim"]
    index = page * sparse["sparse_index_dim"]
    if plain:
        kv = 2 * values * {"bf16": 2, "fp8": 1}[choices["kv_format"]]
    else:  # half a byte a value, a scale for 16; every part from a multiple of 128 on
        kv = 2 * (up(values // 2, 128) + up(values // 16, 128))
    total = 0
    device, logical = tokens // page + 1, ratio * tokens // page + 1
    for layer in held(config, choices):
        if not sparse["sparse_attention_freq"][layer]:
            total += logical * kv
            continue
        total += device * kv
        if not sparse["sparse_disable_index_value"][layer]:
            total += logical * 2 * index * 2
        else:
            total += logical * (index * 2 if plain else up(index // 2, 128) + up(index // 16, 128))
    return total


# -- qwen3_next: state of each request beside keys and values, pages made equal or not


def draw_qwen3_next(draw: random.Random) -> tuple[Config, Choices]:
    layers = draw.randint(1, 8)
    interval = draw.randint(1, 4)
    config = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": draw.randint(0, 2),
        "num_key_value_heads": draw.choice([2, 4]),
        "head_dim": draw.choice([64, 256]),
        "full_attention_interval": interval,
        "linear_num_key_heads": draw.choice([4, 16]),
        "linear_num_value_heads": draw.choice([4, 32]),
        "linear_key_head_dim": draw.choice([32, 128]),
        "linear_value_head_dim": draw.choice([32, 128]),
        "linear_conv_kernel_dim": draw.choice([2, 4]),
        "mamba_ssm_dtype": draw.choice([None, "float32", "bfloat16"]),
    }
    if draw.random() < 0.5:
        config["layer_types"] = [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)
        ]
    choices = {
        "kv_format": draw.choice(["bf16", "fp8"]),
        "kv_order": draw.choice(["nhd", "hnd"]),
        "conv_order": draw.choice(["channels", "taps"]),
        "equal_pages": draw.random() < 0.5,
        "min_page": draw.choice([1, 16]),
        "tp_size": draw.choice([1, 2, 4]),
    }
    return config, choices | stage(draw, layers + config["num_nextn_predict_layers"])


def sizes_of_qwen3_next(config: Config, choices: Choices) -> tuple[int, int, int]:
    """Slots of a page of keys and values, its bytes, and the bytes of a request's state."""
    ranks = choices["tp_size"]
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    state = (keys + values) // ranks * (config["linear_conv_kernel_dim"] - 1) * 2
    state += values // ranks * config["linear_key_head_dim"] * (2 if config["mamba_ssm_dtype"] == "bfloat16" else 4)
    row = 2 * shard(config["num_key_value_heads"], ranks) * config["head_dim"]
    row *= {"bf16": 2, "fp8": 1}[choices["kv_format"]]
    page = choices["min_page"]
    if choices["equal_pages"]:  # as many rows as a state needs, in steps of the least page
        page *= ceil(Fraction(state, page * row))
        state = page * row
    return page, page * row, state


def price_qwen3_next(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    page, page_bytes, state = sizes_of_qwen3_next(config, choices)
    return sum(
        (tokens // page + 1) * page_bytes
        if layer >= config["num_hidden_layers"] or (layer + 1) % config["full_attention_interval"] == 0
        else (requests + 1) * state
        for layer in held(config, choices)
    )


# -- dsv4: a window in every layer, compressed rows in most, rings of pooling state


def draw_dsv4(draw: random.Random) -> tuple[Config, Choices]:
    layers = draw.randint(1, 8)
    drafts = draw.randint(0, 2)
    config = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafts,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "compress_ratios": [draw.choice([0, 4, 128]) for _ in range(draw.randint(0, layers + drafts))],
    }
    choices = {
        "index_format": draw.choice(["fp8", "mxfp4"]),
        "index_order": draw.choice(["plain", "amd"]),
        "swa_ratio": draw.choice([0, 1, 3, "1/10", "1/2", Fraction(7, 3)]),
        "host_to_device_ratio": draw.choice([1, 1, 2, 3]),
        "speculative": draw.random() < 0.5,
    }
    return config, choices | stage(draw, layers + drafts)


def price_dsv4(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    ratio = choices["host_to_device_ratio"]
    pages = tokens // 256 + 1
    window = floor(tokens * Fraction(str(choices["swa_ratio"])) / 256) + 1
    c4_pages = pages if ratio == 1 else floor(Fraction(tokens, 4 * ratio * 64)) + 1
    ring, long_ring = (16, 256) if choices["speculative"] else (8, 128)
    total = 0
    for layer in held(config, choices):
        total += window * up(256 * 584, 576)  # 448 codes, 64 rope values of 2 bytes, 7 scales and 1 of padding
        compressed = layer < config["num_hidden_layers"] and config["compress_ratios"][layer : layer + 1]
        if compressed == [4]:
            total += c4_pages * up(64 * 584, 576)
            total += pages * 64 * {"fp8": 132, "mxfp4": 68}[choices["index_format"]]
            total += window * ring * 2 * (2 * 512) * 4  # values and scores, twice 512 of them
            total += window * ring * 2 * (2 * 128) * 4
        elif compressed == [128]:
            total += pages * up(2 * 584, 576)
            total += (requests + 1) * long_ring * 2 * 512 * 4
    return total


# -- gemma3n: the last layers hold nothing, one in five of the others every token


def draw_gemma3n(draw: random.Random) -> tuple[Config, Choices]:
    layers = draw.randint(1, 12)
    config = {
        "num_hidden_layers": layers,
        "num_kv_shared_layers": draw.randint(0, layers - 1),
        "num_key_value_heads": draw.choice([2, 4]),
        "head_dim": draw.choice([64, 256]),
    }
    if draw.random() < 0.5:
        config["layer_types"] = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    choices = {
        "kv_format": draw.choice(["bf16", "fp8"]),
        "kv_order": draw.choice(["nhd", "hnd"]),
        "page_size": draw.choice([1, 16, 64]),
        "tp_size": draw.choice([1, 2, 8]),
        "swa_ratio": draw.choice([0, 1, "1/10", Fraction(2, 3)]),
    }
    return config, choices | stage(draw, layers)


def price_gemma3n(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    page = choices["page_size"]
    heads = shard(config["num_key_value_heads"], choices["tp_size"])
    row = 2 * heads * config["head_dim"] * {"bf16": 2, "fp8": 1}[choices["kv_format"]]
    window = floor(tokens * Fraction(str(choices["swa_ratio"])) / page) * page
    types = config.get("layer_types")
    total = 0
    for layer in held(config, choices):
        if layer < config["num_hidden_layers"] - config["num_kv_shared_layers"]:
            full = (layer + 1) % 5 == 0 if types is None else types[layer] == "full_attention"
            total += ((tokens if full else window) + page) * row
    return total


def shared_in_gemma3n(config: Config) -> Shared:
    layers, types = range(config["num_hidden_layers"]), config.get("layer_types")
    full = {layer for layer in layers if ((layer + 1) % 5 == 0 if types is None else "full" in types[layer])}
    owns = set(layers[: len(layers) - config["num_kv_shared_layers"]])
    return {"kv_full": (full & owns, full), "kv_swa": (owns - full, set(layers) - full)}


# -- dsv41: source layers alone keep compressed rows and index keys


def draw_dsv41(draw: random.Random) -> tuple[Config, Choices]:
    layers, drafts = draw.randint(1, 8), draw.randint(0, 2)
    config = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafts,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "compress_ratios": [draw.choice([0, 1, 2]) for _ in range(layers)],
        "kv_source_layer_ids": [layer for layer in range(layers) if draw.random() < 0.5],
        "index_source_layer_ids": [layer for layer in range(layers) if draw.random() < 0.5],
    }
    choices = {
        "rows": draw.choice(["split", "interleaved"]),
        "compressed": draw.choice(["fp8", "fp4"]),
        "swa_ratio": draw.choice([0, 1, "1/10", Fraction(2, 3)]),
    }
    return config, choices | stage(draw, layers + drafts)


def price_dsv41(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    pages = tokens // 256 + 1
    window = floor(tokens * Fraction(str(choices["swa_ratio"])) / 256) + 1
    row = {"fp8": 528, "fp4": 288}[choices["compressed"]]  # 512 codes and 16 scales; half of the codes, 32 scales
    total = 0
    for layer in held(config, choices):
        total += window * 256 * 528
        ratio = config["compress_ratios"][layer] if layer < config["num_hidden_layers"] else 0
        if ratio and layer in config["kv_source_layer_ids"]:
            total += pages * 256 // ratio * row
            total += (ratio == 2) * (2 * requests + 2) * 2 * 512 * 4  # values and scores of the pending pairs
        if ratio and layer in config["index_source_layer_ids"]:
            total += pages * 256 // ratio * 68
    return total


def shared_in_dsv41(config: Config) -> Shared:
    found = {}
    for ratio in (1, 2):
        readers = {layer for layer, own in enumerate(config["compress_ratios"]) if own == ratio}
        for name, sources in (("kv", "kv_source_layer_ids"), ("index", "index_source_layer_ids")):
            found[f"{name}_{ratio}"] = (readers & set(config[sources]), readers)
    return found


# -- mla: one latent a token


def draw_mla(draw: random.Random) -> tuple[Config, Choices]:
    layers, drafts = draw.randint(0, 8), draw.randint(0, 2)
    config = {
        **{"num_hidden_layers": layers, "num_nextn_predict_layers": drafts},
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    }
    choices = {
        "kv_format": draw.choice(["bf16", "fp8_scaled", "fp8_raw", "nvfp4"]),
        "page_size": draw.choice([1, 7, 16, 64, 256]),
    }
    return config, choices | stage(draw, layers + drafts)


def price_mla(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    # 512 + 64 values; with a scale of 4 bytes for 128 of them; with half bytes, one of 1 byte for 16 and a gap of 16
    rows = {"bf16": 1152, "fp8_scaled": 512 + 16 + 128, "fp8_raw": 576, "nvfp4": 256 + 32 + 16 + 128}
    return len([*held(config, choices)]) * (tokens + choices["page_size"]) * rows[choices["kv_format"]]


# -- gqa, hybrid_swa and shared_kv: keys and values per head


def draw_kv_format(draw: random.Random) -> Choices:
    """A format, an order that it has, and a page that both can be of."""
    kv_format = draw.choice(["bf16", "fp8", "int8", "mxfp8", "nvfp4", "nvfp4_swizzled"])
    kv_order = draw.choice({"mxfp8": ["nhd"], "nvfp4_swizzled": ["hnd"]}.get(kv_format, ["nhd", "hnd"]))
    sizes = [4, 16, 64, 128] if kv_format == "nvfp4_swizzled" else [1, 3, 16, 64, 128]  # scales of 4 slots side by side
    return {
        **{"kv_format": kv_format, "kv_order": kv_order, "page_size": draw.choice(sizes)},
        **{"tp_size": draw.choice([1, 2, 8, 32]), "split_kv": draw.random() < 0.5},
    }


def draw_window_pool(draw: random.Random) -> Choices:
    return {
        "swa_pool": draw.choice(["ratio", "requests"]),
        "swa_ratio": draw.choice([0, 1, 2, "1/2", "0.1", "3/7", Fraction(5, 3), 0.25]),
        "step_tokens": draw.choice([1, 2, 8192]),
    }


def price_rows(choices: Choices, heads: int, dims: int) -> int:
    """Bytes of a page of a layer of `heads`, on one rank, and of `dims` values of K and V together."""
    value = {
        **{"bf16": 2, "fp8": 1, "int8": 1, "mxfp8": 1 + Fraction(1, 32)},  # and of scales one for 32 codes,
        **dict.fromkeys(["nvfp4", "nvfp4_swizzled"], Fraction(1, 2) + Fraction(1, 16)),  # one for 16,
    }[choices["kv_format"]]
    scales = 2 * 4 if choices["kv_format"] == "int8" else 0  # or one of 4 bytes for a head
    return int(choices["page_size"] * shard(heads, choices["tp_size"]) * (dims * value + scales))


def window_pages(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    """Pages of layers with a window, the reserved one among them."""
    page = choices["page_size"]
    if choices["swa_pool"] == "ratio":
        return floor(tokens * Fraction(str(choices["swa_ratio"])) / page) + 1
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 1
    touched = ceil((window - 1 + choices["step_tokens"] - 1) / page) + 1
    return min(requests * touched, tokens // page) + 1  # no more than there are tokens


def draw_gqa(draw: random.Random) -> tuple[Config, Choices]:
    layers, drafts = draw.randint(0, 5), draw.randint(0, 2)
    config = {
        **{"num_hidden_layers": layers, "num_nextn_predict_layers": drafts},
        **{"num_key_value_heads": draw.choice([1, 2, 8, 16]), "head_dim": draw.choice([32, 64, 96, 128])},
        "v_head_dim": draw.choice([None, 32, 128]),
    }
    return config, draw_kv_format(draw) | stage(draw, layers + drafts)


def price_gqa(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    dims = config["head_dim"] + (config["v_head_dim"] or config["head_dim"])
    pages = tokens // choices["page_size"] + 1
    return len([*held(config, choices)]) * pages * price_rows(choices, config["num_key_value_heads"], dims)


def draw_hybrid_swa(draw: random.Random) -> tuple[Config, Choices]:
    layers, drafts = draw.randint(1, 8), draw.randint(0, 2)
    heads, dims = [None, 1, 4, 8], [None, 32, 64, 96]
    config = {
        **{"num_hidden_layers": layers, "num_nextn_predict_layers": drafts},
        **{"num_key_value_heads": draw.choice(heads[1:]), "head_dim": draw.choice(dims[1:])},
        **{name: draw.choice(heads) for name in ("num_global_key_value_heads", "swa_num_key_value_heads")},
        **{name: draw.choice(dims) for name in ("v_head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim")},
        **{"sliding_window": draw.choice([1, 8, 127, 128, 4096]), "attention_k_eq_v": True},
    }
    match draw.choice(["types", "pattern", "interval", "positions", "last", "chunks"]):
        case "types":
            kinds = ["sliding_attention", "full_attention", "chunked_attention"]
            types = [draw.choice(kinds) for _ in range(layers + draw.randint(0, 2))]
            types[draw.randrange(layers)] = kinds[0]
            config["layer_types"] = types
        case "pattern":
            config["hybrid_layer_pattern"] = [draw.randint(0, 1) for _ in range(layers)]
        case "interval":
            config["sliding_window_pattern"] = draw.randint(1, 6)
        case "positions":
            config |= {"no_rope_layers": [draw.randint(0, 1) for _ in range(layers)], "attention_chunk_size": 64}
        case "last":
            config |= {"max_window_layers": draw.randint(0, layers - 1), "use_sliding_window": True}
        case "chunks":
            config |= {"sliding_window": None, "attention_chunk_size": draw.choice([1, 8192])}
    return config, draw_kv_format(draw) | draw_window_pool(draw) | stage(draw, layers + drafts)


def windowed_in_hybrid_swa(config: Config) -> set[int]:
    """The layers that have a window, draft layers among them where the list of types goes on."""
    layers = range(config["num_hidden_layers"])
    if types := config.get("layer_types"):
        return {layer for layer, kind in enumerate(types) if kind != "full_attention"}
    if marks := config.get("hybrid_layer_pattern") or config.get("no_rope_layers"):
        return {layer for layer in layers if marks[layer]}
    if "max_window_layers" in config:
        return set(layers[config["max_window_layers"] :])
    interval = config.get("sliding_window_pattern", 4)
    return set(layers) - set(layers[interval - 1 :: interval])


def price_hybrid_swa(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    wide, values = config["global_head_dim"] or dim, config["v_head_dim"]
    full = price_rows(choices, config["num_global_key_value_heads"] or heads, wide + (values or wide))
    window = price_rows(
        choices,
        config["swa_num_key_value_heads"] or heads,
        (config["swa_head_dim"] or dim) + (config["swa_v_head_dim"] or values or dim),
    )
    here = set(held(config, choices))
    windowed = here & windowed_in_hybrid_swa(config)
    total = len(here - windowed) * (tokens // choices["page_size"] + 1) * full
    return total + len(windowed) * window_pages(config, choices, tokens, requests) * window


def draw_shared_kv(draw: random.Random) -> tuple[Config, Choices]:
    layers = draw.randint(2, 12)
    config = {
        **{"num_hidden_layers": layers, "num_key_value_heads": draw.choice([1, 2, 8])},
        **{"head_dim": draw.choice([32, 64]), "v_head_dim": draw.choice([None, 96])},
        draw.choice(["num_kv_shared_layers", "cla_share_factor"]): 2,
    }
    if "num_kv_shared_layers" in config:
        config["num_kv_shared_layers"] = draw.randint(1, layers - 1)
    else:
        config |= {"cla_share_factor": draw.randint(2, 4), "use_cla": True}
    match draw.choice(["none", "types", "interval"]):
        case "types":
            config["layer_types"] = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
            config["sliding_window"] = draw.choice([None, 512])
        case "interval":
            config |= {"_sliding_window_pattern": draw.randint(1, 6), "sliding_window": draw.choice([1, 100])}
    return config, draw_kv_format(draw) | draw_window_pool(draw) | stage(draw, layers)


def shared_in_shared_kv(config: Config) -> Shared:
    layers = range(config["num_hidden_layers"])
    types, interval = config.get("layer_types"), config.get("_sliding_window_pattern", 1)
    full = {layer for layer in layers if (types[layer] == "full_attention" if types else (layer + 1) % interval == 0)}
    if shared := config.get("num_kv_shared_layers"):
        owns = set(layers[:-shared])
    else:
        owns = set(layers[:: config["cla_share_factor"]])
    return {"kv_full": (full & owns, full), "kv_swa": (owns - full, set(layers) - full)}


def price_shared_kv(config: Config, choices: Choices, tokens: int, requests: int) -> int:
    """Owners alone."""
    dims = config["head_dim"] + (config["v_head_dim"] or config["head_dim"])
    pages = {
        "kv_full": tokens // choices["page_size"] + 1,
        "kv_swa": window_pages(config, choices, tokens, requests),
    }
    here = set(held(config, choices))
    owned = sum(len(owners & here) * pages[name] for name, (owners, _) in shared_in_shared_kv(config).items())
    return owned * price_rows(choices, config["num_key_value_heads"], dims)


def page_size(config: Config, choices: Choices) -> int:
    return choices["page_size"]


FAMILIES = [
    Family("corners", draw_corners, price_corners, lambda config, choices: 64),
    Family("gqa_orders", draw_gqa_orders, price_gqa_orders, page_size),
    Family("gpt_oss", draw_gpt_oss, price_gpt_oss, page_size),
    Family("kimi_linear", draw_kimi_linear, price_kimi_linear, page_size),
    Family("minimax_m3", draw_minimax_m3, price_minimax_m3, page_size),
    Family(
        "qwen3_next",
        draw_qwen3_next,
        price_qwen3_next,
        lambda config, choices: sizes_of_qwen3_next(config, choices)[0],
    ),
    Family("dsv4", draw_dsv4, price_dsv4, lambda config, choices: 256),
    Family("gemma3n", in_one_pool(draw_gemma3n, shared_in_gemma3n), price_gemma3n, page_size),
    Family("dsv41", in_one_pool(draw_dsv41, shared_in_dsv41), price_dsv41, lambda config, choices: 256),
    Family("mla", draw_mla, price_mla, page_size),
    Family("gqa", draw_gqa, price_gqa, page_size),
    Family("hybrid_swa", draw_hybrid_swa, price_hybrid_swa, page_size),
    Family("shared_kv", in_one_pool(draw_shared_kv, shared_in_shared_kv), price_shared_kv, page_size),
]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@each_family
@settings(max_examples=500, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_the_pool_allocates_what_was_priced(family: Family, draw: random.Random) -> None:
    """In the budget, in what is asked of an allocator, and in the tensors that transfers are told of."""
    module, asked = family.module, []
    config, choices = family.draw(draw)
    layout = module.Layout.from_config(config, **choices)
    assert layout.granule == family.granule(config, choices)
    tokens = layout.granule * draw.choice([0, 1, draw.randint(2, 100), draw.randint(100, 10**6)])
    requests = draw.choice([0, 1, draw.randint(2, 4096)])

    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    expected = family.price(config, choices, tokens, requests)
    assert module.bytes_for(layout, tokens, requests) == expected
    pool = module.Pool(layout, tokens, "meta", requests, allocate=allocate)
    assert pool.num_bytes() == sum(asked) == sum(region.nbytes for region in pool.transfer_regions()) == expected


@each_family
@settings(max_examples=200, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_the_most_tokens_and_requests_fit_and_one_more_does_not(family: Family, draw: random.Random) -> None:
    module = family.module
    config, choices = family.draw(draw)
    requests = draw.randint(0, 64)
    layout = module.Layout.from_config(config, **choices)
    step = layout.granule

    def price(tokens: int, requests: int) -> int:
        return family.price(config, choices, tokens, requests)

    exact = price(step * draw.randint(0, 999), requests)
    budget = draw.choice([exact, exact - 1, draw.randint(0, 2**24), draw.randint(0, 2**36)])
    tokens = module.max_tokens(layout, budget, requests)
    if price(0, requests) > budget:
        assert tokens == 0
    elif price(step * 10**9, requests) == price(step * 2 * 10**9, requests) <= budget:
        assert tokens == module.UNBOUNDED
    else:
        assert tokens % step == 0
        assert price(tokens, requests) <= budget < price(tokens + step, requests)
    some = step * draw.randint(0, 20)
    most = module.max_requests(layout, budget, some)
    if price(some, 0) > budget:
        assert most == 0
    elif price(some, 10**9) == price(some, 2 * 10**9) <= budget:
        assert most == module.UNBOUNDED
    else:
        assert price(some, most) <= budget < price(some, most + 1)


@each_family
def test_the_slope_is_exact(family: Family) -> None:
    module = family.module
    draw = random.Random(f"{family.name} slope")
    for _ in range(100):
        config, choices = family.draw(draw)
        layout = module.Layout.from_config(config, **choices)
        many = 7 * 3 * 10 * 256 * 64 * 9 * layout.granule  # whole pages in every space
        slope = Fraction(family.price(config, choices, many, 0) - family.price(config, choices, 0, 0), many)
        assert module.cell_size(layout) == slope, (config, choices)
        assert type(module.cell_size(layout)) is (int if slope.denominator == 1 else Fraction)


@each_family
def test_layouts_are_values(family: Family) -> None:
    module = family.module
    draw = random.Random(f"{family.name} values")
    for _ in range(20):
        config, choices = family.draw(draw)
        layout, again = (module.Layout.from_config(config, **choices) for _ in range(2))
        assert layout == again and hash(layout) == hash(again) and layout.fingerprint == again.fingerprint
        sent = pickle.loads(pickle.dumps(layout))
        assert sent == layout and hash(sent) == hash(layout) and sent.fingerprint == layout.fingerprint
        for buffer in layout.buffers:
            assert sent.page_fingerprint(buffer.name) == layout.page_fingerprint(buffer.name)


@each_family
def test_a_stage_with_no_layers_costs_nothing(family: Family) -> None:
    module = family.module
    draw = random.Random(f"{family.name} empty")
    for _ in range(20):
        config, choices = family.draw(draw)
        choices |= {"start_layer": 1, "end_layer": 1}
        layout = module.Layout.from_config(config, **choices)
        assert {layout.layers(buffer.name) for buffer in layout.buffers} == {()}
        tokens = 10 * layout.granule
        assert (module.cell_size(layout), module.bytes_for(layout, tokens, 3)) == (0, 0)
        assert module.max_tokens(layout, 0, 3) == module.max_requests(layout, 0, tokens) == module.UNBOUNDED
        assert module.Pool(layout, tokens, "meta", 3).num_bytes() == 0
        for buffer in layout.buffers:
            assert len(layout.page_fingerprint(buffer.name)) == 16


# -- one tensor for each plane

GQA = {"num_hidden_layers": 2, "num_key_value_heads": 8, "head_dim": 128, "v_head_dim": 64}


def test_planes_of_a_split_buffer_are_tensors_of_their_own() -> None:
    module = language_module("gqa_orders")
    asked: list[tuple[str, int, int]] = []

    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        asked.append((name, layer, nbytes))
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    layout = module.Layout.from_config(GQA)
    pool = module.Pool(layout, 48, "meta", allocate=allocate)
    # 3 + 1 pages of 16 slots x 8 heads; keys 128 values of 2 bytes, values 64
    assert pool.buffer("kv", 0, "k").shape == pool.buffer("kv", 1, plane="k").shape == (4, 16 * 8 * 128 * 2)
    assert pool.buffer("kv", 0, "v").shape == (4, 16 * 8 * 64 * 2)
    assert sorted(asked) == [
        ("kv.k", 0, 4 * 32768),
        ("kv.k", 1, 4 * 32768),
        ("kv.v", 0, 4 * 16384),
        ("kv.v", 1, 4 * 16384),
    ]
    assert pool.num_bytes() == module.bytes_for(layout, 48) == 2 * 4 * (32768 + 16384)
    for plane in (None, "q"):
        with pytest.raises(LookupError, match=r"`kv`.*'k', 'v'"):
            pool.buffer("kv", 0, plane)
    with pytest.raises(ValueError, match="layer_id"):
        pool.buffer("kv", 2, "k")


def test_scales_of_a_split_buffer_are_planes_too() -> None:
    module = language_module("gqa_orders")
    pool = module.Pool(module.Layout.from_config(GQA, kv_format="nvfp4"), 16)
    widths = {"k": 128 // 2, "k_scale": 128 // 16, "v": 64 // 2, "v_scale": 64 // 16}
    for plane, width in widths.items():
        assert pool.buffer("kv", 1, plane).shape == (2, 16 * 8 * width)
        assert not pool.buffer("kv", 1, plane).any()
    assert pool.num_bytes() == 2 * 2 * 16 * 8 * (64 + 8 + 32 + 4)


def test_a_buffer_that_is_not_split_is_one_tensor() -> None:
    module = language_module("gqa_orders")
    pool = module.Pool(module.Layout.from_config(GQA, split_kv=False), 48, "meta")
    assert pool.buffer("kv", 0).shape == (4, 49152)
    with pytest.raises(LookupError, match="`kv` is one tensor"):
        pool.buffer("kv", 0, "k")


def test_split_pages_have_another_fingerprint() -> None:
    module = language_module("gqa_orders")
    layouts = [module.Layout.from_config(GQA, split_kv=split) for split in (True, False)]
    assert len({layout.page_fingerprint("kv") for layout in layouts}) == 2
    assert module.bytes_for(layouts[0], 48) == module.bytes_for(layouts[1], 48)


# -- pages of each layer


def test_heads_of_each_layer() -> None:
    module = language_module("corners")
    layout = module.Layout.from_config({"num_hidden_layers": 3, "kv_heads": [8, 4, 2]})
    pool = module.Pool(layout, 128, "meta")
    # 64 slots x heads x 4 blocks of 34 bytes, keys and values; 2 + 1 pages
    for layer, heads in enumerate([8, 4, 2]):
        assert pool.buffer("kv", layer).shape == (3, 64 * heads * 4 * 34 * 2)
    assert pool.num_bytes() == module.bytes_for(layout, 128) == 3 * 64 * 14 * 4 * 34 * 2
    middle = module.Layout.from_config({"num_hidden_layers": 3, "kv_heads": [8, 4, 2]}, start_layer=1, end_layer=2)
    assert module.Pool(middle, 128, "meta").buffer("kv", 1).shape == (3, 69632)
    assert middle.page_fingerprint("kv") != layout.page_fingerprint("kv")


def test_a_layer_without_heads_is_refused() -> None:
    module = language_module("corners")
    with pytest.raises(ValueError, match="q8_0.*heads is 0"):
        module.Layout.from_config({"num_hidden_layers": 3, "kv_heads": [8, 4]})
    assert module.Layout.from_config({"num_hidden_layers": 3, "kv_heads": [8, 4]}, rows="tpu").layers("kv") == (0, 1, 2)


# -- what a new pool holds

DSV4 = {
    "num_hidden_layers": 3,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "compress_ratios": [0, 4, 128],
}


def dirty(name: str, layer: int, nbytes: int) -> torch.Tensor:
    memory = torch.full((nbytes + 255,), 0xAB, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + nbytes]


@pytest.mark.parametrize("allocate", [None, dirty])
def test_scores_begin_below_every_number(allocate: Callable[..., torch.Tensor] | None) -> None:
    module = language_module("dsv4")
    layout = module.Layout.from_config(DSV4, swa_ratio=1)
    pool = module.Pool(layout, 512, requests=2, allocate=allocate)
    # pages, slots of a page, and values (zeros) then scores (-inf) of a slot
    for name, layer, pages, ring, values in (
        ("c4_pooling", 1, 3, 8, 2 * 512),
        ("c4_index_pool", 1, 3, 8, 2 * 128),
        ("c128_pooling", 2, 3, 128, 512),
    ):
        state = pool.buffer(name, layer).view(torch.float32).view(pages, ring, 2, values)
        assert (state[:, :, 0] == 0).all()
        assert torch.isneginf(state[:, :, 1]).all()
    for name, layers in (("swa_kv", (0, 1, 2)), ("c4_kv", (1,)), ("c4_index", (1,)), ("c128_kv", (2,))):
        assert layout.layers(name) == layers
        for layer in layers:
            assert not pool.buffer(name, layer).any()


def test_scores_on_meta() -> None:
    module = language_module("dsv4")
    assert module.Pool(module.Layout.from_config(DSV4), 512, "meta").buffer("c4_pooling", 1).is_meta


STARTS = b"""
kvgen: 1
layout: starts
doc: Fields that do not begin as zeros, in pages that are padded.
config:
  num_layers: {type: int, from: num_hidden_layers}
choices:
  apart: {type: bool, default: false}
layers: {body: num_layers}
spaces:
  token: {slots: tokens, page: 4}
formats:
  rows:
    fields:
      below: {type: "bf16[3]", init: -inf}
      part: {type: "f32[2]", init: 0.1}
      whole: {type: "f32[1]", init: -2}
      large: {type: "i64[2]", init: 9007199254740993}
      small: {type: "i8[4]", init: -128}
      plain: "u8[4]"
    page:
      - [below, {pad: 2}, part, whole, {align: 8}]
      - [large]
      - [small, plain]
buffers:
  state: {format: rows, space: token, layers: body, split: apart}
"""


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("allocate", [None, dirty])
def test_initial_values_are_exact(apart: bool, allocate: Callable[..., torch.Tensor] | None) -> None:
    module = run_whole("starts", lambda file: STARTS)
    pool = module.Pool(module.Layout.from_config({"num_hidden_layers": 2}, apart=apart), 8, allocate=allocate)
    # 2 + 1 pages of 4 records: 24 bytes (3 x 2, a gap of 2, 2 x 4, 4, a gap of 4), then 16, then 8
    for layer in (0, 1):
        if apart:
            planes = [pool.buffer("state", layer, plane) for plane in ("below", "large", "small")]
        else:
            planes = list(pool.buffer("state", layer).split([96, 64, 32], dim=1))
        first, large, last = (plane.reshape(12, -1) for plane in planes)
        assert torch.isneginf(first[:, 0:6].contiguous().view(torch.bfloat16)).all()
        assert not first[:, 6:8].any()
        assert (first[:, 8:16].contiguous().view(torch.float32) == torch.tensor(0.1)).all()
        assert (first[:, 16:20].contiguous().view(torch.float32) == -2).all()
        assert not first[:, 20:24].any()
        assert (large.contiguous().view(torch.int64) == 9_007_199_254_740_993).all()
        assert (last[:, 0:4].view(torch.int8) == -128).all()
        assert not last[:, 4:8].any()
    assert pool.num_bytes() == module.bytes_for(pool.layout, 8) == 2 * 12 * 48


# -- requests


def test_requests_grow_the_state_and_nothing_else() -> None:
    module = language_module("kimi_linear")
    config = {
        "num_hidden_layers": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [3],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    }
    layout = module.Layout.from_config(config)
    # convolution 3 x 12,288 x 2 = 73,728 bytes and 32 x 128 x 128 x 4 = 2,097,152, in two of three layers
    state = 2 * (73_728 + 2_097_152)
    assert module.bytes_for(layout, 0, 0) == 64 * 1152 + state  # a page and a request are reserved
    assert module.bytes_for(layout, 640, 5) == 11 * 64 * 1152 + 6 * state
    pool = module.Pool(layout, 640, "meta", 5)
    assert pool.buffer("kv", 2).shape == (11, 64 * 1152)
    assert pool.buffer("state", 0, "conv").shape == (6, 73_728)
    assert pool.buffer("state", 1, "recurrent").shape == (6, 2_097_152)
    assert pool.num_bytes() == module.bytes_for(layout, 640, 5)
    fits = module.bytes_for(layout, 640, 5)
    assert (module.max_requests(layout, fits, 640), module.max_requests(layout, fits - 1, 640)) == (5, 4)
    assert (module.max_tokens(layout, fits, 5), module.max_tokens(layout, fits - 1, 5)) == (640, 576)
    assert module.slots(layout, "request", 0, 5) == 6
    assert module.slots(layout, "token", 640, 5) == 704
    with pytest.raises(ValueError, match="requests"):
        module.bytes_for(layout, 640, -1)


def test_a_request_may_take_many_slots() -> None:
    module = language_module("dsv4")
    layout = module.Layout.from_config(DSV4)
    # One layer of the three keeps a ring of 128 rows of 2 x 512 x 4 bytes for each request.
    assert module.bytes_for(layout, 0, 7) - module.bytes_for(layout, 0, 0) == 7 * 128 * 4096
    assert module.slots(layout, "c128_state", 0, 7) == 8 * 128


def test_equal_pages() -> None:
    # 2 heads of 256 in bf16: 2048 bytes a slot. State: 3 x (2 x 16 x 128 + 32 x 128 = 8192) x 2 = 49,152 bytes of
    # convolution and 32 x 128 x 128 x 4 = 2,097,152: 2,146,304, so 1048 slots, rounded up to 66 x 16 = 1056.
    module = language_module("qwen3_next")
    config = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    layout = module.Layout.from_config(config, equal_pages=True)
    assert layout.granule == 1056
    pool = module.Pool(layout, 2112, "meta", 9)
    assert pool.buffer("kv", 3).shape == (3, 2_162_688)
    assert pool.buffer("state", 0).shape == (10, 2_162_688)
    apart = module.Pool(module.Layout.from_config(config), 2112, "meta", 9)
    assert apart.buffer("state", 0, "conv").shape == (10, 49_152)
    assert apart.buffer("state", 0, "ssm").shape == (10, 2_097_152)


# -- fractions


@pytest.mark.parametrize("ratio", ["1/2", 0.5, Fraction(1, 2), "0.50"])
def test_a_fractional_ratio_is_floored_to_whole_pages(ratio: object) -> None:
    module = language_module("gpt_oss")
    config = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    one = module.Layout.from_config(config, page_size=1, swa_ratio=ratio)
    assert one.granule == 1
    assert (module.slots(one, "token", 1333), module.slots(one, "swa", 1333)) == (1334, 667)
    pool = module.Pool(one, 1333, "meta")
    assert (pool.buffer("kv_full", 1, "k").shape[0], pool.buffer("kv_swa", 0, "k").shape[0]) == (1334, 667)
    sixteen = module.Layout.from_config(config, swa_ratio=ratio)
    assert sixteen.granule == 16
    # 48 tokens: 24 slots of the window are one whole page of 16, and one page is reserved
    assert (module.slots(sixteen, "token", 48), module.slots(sixteen, "swa", 48)) == (64, 32)
    # 2 x 8 x 64 x 2 = 2048 bytes a slot: one and a half of them for each token
    assert module.cell_size(sixteen) == 3072
    assert module.bytes_for(sixteen, 48) == (64 + 32) * 2048
    assert module.bytes_for(sixteen, 64) == (80 + 48) * 2048
    # Between two counts with one more page in the window, the greatest that fits is found all the same.
    assert module.max_tokens(sixteen, (64 + 32) * 2048) == module.max_tokens(sixteen, (80 + 48) * 2048 - 1) == 48
    assert module.max_tokens(sixteen, (80 + 48) * 2048) == 64


def test_gpt_oss_in_10_gib() -> None:
    # 18 full and 18 sliding layers of 2048 bytes a slot, ratio 1/2, page 16. A page of both kinds is 2 x 18 x 32,768 =
    # 1,179,648 bytes and reserved; 32 tokens take 3 x 18 x 32,768 = 1,769,472. The rest of 10 GiB holds 6,067 times
    # that, 194,144 tokens, and leaves 851,968 bytes: enough for the 589,824 of 16 more, whose half page floors away.
    module = language_module("gpt_oss")
    config = {
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    }
    layout = module.Layout.from_config(config)
    assert 10 * 2**30 - 1_179_648 - 6_067 * 1_769_472 == 851_968
    assert module.cell_size(layout) == 55_296
    assert module.max_tokens(layout, 10 * 2**30) == 6_067 * 32 + 16 == 194_160
    drafts = {"draft_layers": 1, "role": "both"}
    assert module.cell_size(module.Layout.from_config(config, **drafts)) == 57_344


def test_a_window_of_nothing_keeps_its_reserved_page() -> None:
    module = language_module("gpt_oss")
    config = {
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "layer_types": ["sliding_attention"],
    }
    layout = module.Layout.from_config(config, swa_ratio=0)
    assert module.cell_size(layout) == 0
    assert module.bytes_for(layout, 1600) == 16 * 64 * 2 * 2
    assert module.max_tokens(layout, 4096) == module.UNBOUNDED
    assert module.max_tokens(layout, 4095) == 0


def test_a_compressed_space_has_the_pages_of_its_parent() -> None:
    module = language_module("dsv4")
    layout = module.Layout.from_config(DSV4, swa_ratio=1)
    tokens = 262_144
    # 1024 pages and the reserved one, of 256, 256/4, 256/128, 256 and 8 slots
    expected = {"token": 262_400, "c4": 65_600, "c4_device": 65_600, "c128": 2_050, "swa": 262_400, "c4_state": 8_200}
    assert {space: module.slots(layout, space, tokens) for space in expected} == expected
    # HiSparse at 3: 262,144 / 12 = 21,845.3 slots, 341 whole pages of 64 and the reserved one
    apart = module.Layout.from_config(DSV4, swa_ratio=1, host_to_device_ratio=3)
    assert module.slots(apart, "c4_device", tokens) == 342 * 64
    assert module.Pool(apart, tokens, "meta").buffer("c4_kv", 1).shape == (342, 37_440)


STEPS = b"""
kvgen: 1
layout: steps
doc: Spaces with several slots for a token, pages of their own and more than one reserved page.
config:
  num_layers: {type: int, from: num_hidden_layers}
choices:
  third: {type: int, min: 1, default: 1}
layers: {body: num_layers}
spaces:
  four: {slots: tokens * 4, page: 64}
  six: {slots: tokens * 6 + 5, page: 9, reserve: 2}
  part: {slots: tokens / 3 * third, page: 4, reserve: 0}
formats:
  rows:
    fields: {a: "u8[10]"}
    page: [[a]]
buffers:
  small_pages: {format: rows, space: four, layers: body, block: 16, align: 100}
  six: {format: rows, space: six, layers: body}
  part: {format: rows, space: part, layers: layer == 0}
"""


@pytest.mark.parametrize(
    ("third", "granule"),
    [
        (1, 48),  # a third of a slot: floored
        (2, 48),
        (3, 48),  # one slot: 4 tokens fill a page
        (6, 48),
        (30, 48),  # ten slots: 2 tokens fill 5 pages
    ],
)
def test_the_granule_is_the_least_that_fills_whole_pages(third: int, granule: int) -> None:
    module = run_whole("steps", lambda file: STEPS)
    layout = module.Layout.from_config({"num_hidden_layers": 2}, third=third)
    # 16 tokens are 64 slots of the first space, 3 are 18 of the second: both come out whole for 48.
    assert layout.granule == granule
    part = Fraction(third, 3)
    assert granule == min(
        tokens
        for tokens in range(1, 1000)
        if tokens * 4 % 64 == 0 and tokens * 6 % 9 == 0 and (part.denominator > 1 or tokens * part % 4 == 0)
    )
    tokens = 96
    # 384 slots: 6 pages and the reserved one, each of 4 pages of 16 x 10 bytes, 40 of padding; in both layers
    first = 2 * 7 * 4 * 200
    # 581 slots: 64 whole pages and two reserved; in both layers
    second = 2 * 66 * 90
    # 32 slots for each third; in one layer, nothing reserved
    rest = 32 * third // 4 * 40
    assert module.bytes_for(layout, tokens) == first + second + rest
    pool = module.Pool(layout, tokens, "meta")
    assert pool.num_bytes() == first + second + rest
    assert pool.buffer("small_pages", 1).shape == (28, 200)
    assert pool.buffer("six", 1).shape == (66, 90)
    assert pool.buffer("part", 0).shape == (8 * third, 40)
    # No tokens: the reserved pages; a space that reserves none has an empty tensor.
    assert module.bytes_for(layout, 0) == 2 * 4 * 200 + 2 * 2 * 90
    assert module.Pool(layout, 0, "meta").buffer("part", 0).shape == (0, 40)
    assert module.Pool(layout, 0, "meta").num_bytes() == module.bytes_for(layout, 0)


# -- division over ranks


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_heads_are_divided_or_repeated(ranks: int, heads: int) -> None:
    module = language_module("gqa_orders")
    layout = module.Layout.from_config(GQA, tp_size=ranks)
    assert module.cell_size(layout) == 2 * heads * (128 + 64) * 2


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (8, 12), (10, 4)])
def test_heads_that_do_not_divide_are_refused(heads: int, ranks: int) -> None:
    module = language_module("gqa_orders")
    with pytest.raises(ValueError, match=f"{heads} heads.*{ranks} ranks"):
        module.Layout.from_config(GQA | {"num_key_value_heads": heads}, tp_size=ranks)


@pytest.mark.parametrize(("fields", "ranks"), [({}, 3), ({"num_heads": 6}, 4)])
def test_a_division_with_a_remainder_is_refused(fields: Config, ranks: int) -> None:
    module = language_module("kimi_linear")
    linear = {"full_attn_layers": [2], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4} | fields
    config = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "linear_attn_config": linear}
    with pytest.raises(ValueError, match=rf"kda_heads / tp_size.*{linear['num_heads']} / {ranks}"):
        module.Layout.from_config(config, tp_size=ranks)


# -- configs

QWEN3_4B = {"num_hidden_layers": 36, "num_key_value_heads": 8, "hidden_size": 2560, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"head_dim": 128}, 147_456),  # 36 x 8 x 2 x 128 x 2; the width stated is not 2560 / 32
        ({}, 92_160),  # 80 = 2560 / 32 where none is stated
        ({"head_dim": None}, 92_160),
        ({"head_dim": 128, "v_head_dim": 64}, 110_592),  # 36 x 8 x (128 + 64) x 2
        ({"v_head_dim": 64}, 82_944),  # 36 x 8 x (80 + 64) x 2
        ({"head_dim": 128, "num_key_value_heads": None}, 589_824),  # all 32 heads
        ({"head_dim": 128, "hidden_size": None}, 147_456),
    ],
)
def test_the_first_source_that_is_there_wins(fields: Config, expected: int) -> None:
    module = language_module("gqa_orders")
    assert module.cell_size(module.Layout.from_config(QWEN3_4B | fields)) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 0}, ["hidden_size / num_attention_heads"]),
        ({"num_attention_heads": 48}, ["hidden_size / num_attention_heads", "2560", "48"]),
        ({"hidden_size": "2560"}, ["hidden_size / num_attention_heads", "'2560'"]),
        ({"hidden_size": None}, ["head_dim"]),
        ({"head_dim": 0}, ["head_dim", "0"]),
        ({"head_dim": 128, "num_key_value_heads": 0}, ["heads", "0"]),
    ],
)
def test_sources_that_do_not_come_out_are_refused(fields: Config, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        language_module("gqa_orders").Layout.from_config(QWEN3_4B | fields)
    for word in words:
        assert word in str(error.value)


def test_fields_used_are_those_that_decided() -> None:
    layout = language_module("gqa_orders").Layout.from_config(QWEN3_4B | {"v_head_dim": 64})
    assert layout.config_used == {
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "v_head_dim": 64,
    }
    assert layout.defaults_used == {}


def test_rules_of_a_set_must_agree_here_too() -> None:
    module = language_module("qwen3_next")
    config, choices = draw_qwen3_next(random.Random(0))
    config |= {"num_hidden_layers": 4, "full_attention_interval": 4}
    agreeing = ["linear_attention"] * 3 + ["full_attention"]
    assert module.Layout.from_config(config | {"layer_types": agreeing}).layers("kv") == (3,)
    with pytest.raises(ValueError, match="layer_types.*full_interval.*layer 1"):
        module.Layout.from_config(config | {"layer_types": ["linear_attention", "full_attention"] + agreeing[2:]})
    with pytest.raises(ValueError, match="full"):  # no rule at all
        module.Layout.from_config(config | {"full_attention_interval": None, "layer_types": None})


# A value of every kind that a config.json or a caller may come with.
ODD = [None, True, 0, 1, 7, -1, 2**39, 2**41, -(2**70), 1.5, float("nan"), float("inf"), "x", "", "1/0", b"x"]
ODD += [(), [], [0], [None], [[1]], ["full_attention"], {}, {"a": 1}]


@each_family
def test_whatever_is_wrong_is_a_value_error(family: Family) -> None:
    module = family.module
    draw = random.Random(f"{family.name} odd")
    refused = 0
    for _ in range(400):
        config, choices = family.draw(draw)
        places = [config, choices, *(value for value in config.values() if isinstance(value, dict))]
        for _ in range(draw.randint(1, 2)):
            place = draw.choice(places)
            place[draw.choice(sorted(place))] = draw.choice(ODD)
        try:
            layout = module.Layout.from_config(config, **choices)
        except ValueError as error:
            assert str(error).startswith(f"{family.name}: "), (config, choices)
            refused += 1
            continue
        assert module.Layout.from_config(config, **choices).fingerprint == layout.fingerprint
        assert module.bytes_for(layout, layout.granule, 1) >= module.bytes_for(layout, 0, 0) >= 0
        assert isinstance(hash(layout), int)
    assert refused > 100


def test_page_fingerprints_do_not_depend_on_the_rest_of_a_module() -> None:
    """The index page of 64 slots is the same in a layout with split buffers and initial values as in one without."""
    glm = importlib.import_module("generated.glm_dsa")
    dsv4 = language_module("dsv4")
    plain = glm.Layout.from_config(model_config("glm-5.2"))
    config = {
        "num_hidden_layers": 3,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "compress_ratios": [0, 4, 128],
    }
    other = dsv4.Layout.from_config(config)
    assert plain.page_fingerprint("index_k") == other.page_fingerprint("c4_index")
    assert plain.page_fingerprint("index_k") != other.page_fingerprint("c4_kv")
