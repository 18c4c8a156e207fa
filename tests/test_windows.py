"""Layers with a window, priced by requests: no page too many, and never more slots than a request has tokens."""

import io
import json
import random
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.models import CONFIGS, ROOT, model_config, run_whole

from kvgen.budget import Budget
from kvgen.cli import main
from kvgen.compile import Compiled, compile_spec
from kvgen.deployment import UNBOUNDED, Deployment, Pool, Stage

GIB = 2**30
GPT_OSS = str(CONFIGS / "gpt-oss-120b.json")
LIMITS = ROOT / "tests" / "golden" / "limits" / "spec.yaml"
CELL = 36_864  # bytes of a slot in the 18 layers of either kind of gpt-oss: 8 heads of 64 + 64 values of 2 bytes


@cache
def compiled(name: str) -> Compiled:
    path = LIMITS if name == "limits" else ROOT / "specs" / f"{name}.yaml"
    made = compile_spec(str(path), lambda file: Path(file).read_bytes())
    assert made.layout is not None and not made.failed
    return made


def pool(name: str, config: object, **choices: object) -> Pool:
    return Pool(compiled(name), compiled(name).namespace.Layout.from_config(config, **choices))


@cache
def whole_module(name: str) -> ModuleType:
    """The module of a spec, its pool included."""
    path = LIMITS if name == "limits" else ROOT / "specs" / f"{name}.yaml"
    return run_whole(name, lambda file: (path if file == f"{name}.yaml" else path.parent / file).read_bytes())


def one(*pools: Pool) -> Deployment:
    return Deployment((Stage(pools),))


def run(*words: object) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    status = main([str(word) for word in words], io.BytesIO(), stdout, stderr)
    return status, stdout.getvalue(), stderr.getvalue()


def document(*words: object) -> Any:
    """What `kvgen budget --format json` prints."""
    status, out, err = run("budget", *words, "--format", "json")
    assert (status, err) == (0, ""), out
    return json.loads(out)


# Pages that a window touches


@pytest.mark.parametrize("page", [1, 2, 7, 16])
def test_pages_that_consecutive_tokens_touch(page: int) -> None:
    """Wherever the first of n tokens lies in its page, they touch at most cdiv(n - 1, page) + 1 pages."""
    for n in range(1, 4 * page + 2):
        most = max((first + n - 1) // page - first // page + 1 for first in range(page))
        layout = pool("hybrid_swa", model_config("gpt-oss-120b") | {"sliding_window": n}, page_size=page).layout
        by_requests = pool(
            "hybrid_swa", model_config("gpt-oss-120b") | {"sliding_window": n}, page_size=page, swa_pool="requests"
        ).layout
        assert by_requests.buffer("kv_swa").space.slots_per_request == most * page
        assert layout.buffer("kv_swa").space.slots_per_token == Fraction(1, 2)


@pytest.mark.parametrize(
    ("page", "step", "slots"), [(16, 1, 144), (16, 2, 144), (1, 1, 128), (64, 65, 256), (16, 18, 160), (16, 19, 176)]
)
def test_slots_of_a_request_of_gpt_oss(page: int, step: int, slots: int) -> None:
    """A window of 128 tokens; a step of 18 needs 145 of them, which touch at most 10 pages of 16."""
    own = pool("hybrid_swa", model_config("gpt-oss-120b"), page_size=page, step_tokens=step, swa_pool="requests")
    space = own.layout.buffer("kv_swa").space
    assert space.slots_per_request == slots
    tokens = 1024 * page
    cost = own.bytes_for(tokens, 1) - own.bytes_for(tokens, 0)
    assert cost == slots * CELL


def test_a_window_without_pages(tmp_path: Path) -> None:
    """Gemma 3 1B: 4 layers keep 32,768 tokens and 22 the last 512, of 1,024 bytes each; 26 slots are reserved."""
    config = {"num_hidden_layers": 26, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config | {"sliding_window_pattern": 6}))
    words = ("--config", path, "--tokens", 32768, "--requests", 1, "--set", "swa_pool=requests", "--set", "page_size=1")
    total = 128 * 2**20 + 22 * 512 * 1024 + 26 * 1024
    assert document(*words)["total_bytes"] == total == 145_778_688


# Requests shorter than their window


@pytest.mark.parametrize(
    ("memory", "context", "step", "requests"),
    [("1GiB", 64, 1, 227), ("1GiB", 64, 2048, 227), ("80GiB", 1024, 2048, 1137), ("80GiB", 1000, 2048, 1155)],
)
def test_requests_shorter_than_their_window(memory: str, context: int, step: int, requests: int) -> None:
    """Each has a slot for each of its tokens in all 36 layers, 73,728 bytes, and two reserved pages are nobody's."""
    settings = ("--set", "swa_pool=requests", "--set", f"step_tokens={step}")
    found = document("--config", GPT_OSS, "--memory", memory, "--context", context, *settings)
    pages = -(-context // 16)
    available = int(memory.removesuffix("GiB")) * GIB - 2 * 16 * CELL
    assert found["requests"] == available // (pages * 16 * 2 * CELL) == requests
    assert found["bytes_per_token"] == 2 * CELL and found["fixed_bytes"] == 2 * 16 * CELL == 1_179_648
    assert found["total_bytes"] == found["fixed_bytes"] + found["tokens"] * 2 * CELL


def test_numbers_on_both_sides_of_the_limit() -> None:
    """A request of gpt-oss has 144 slots at most: up to 144 tokens it costs what they do, then 36,864 a token."""
    own = pool("hybrid_swa", model_config("gpt-oss-120b"), swa_pool="requests")
    for tokens, slots in ((0, 0), (16, 16), (128, 128), (144, 144), (160, 144), (10**6, 144)):
        assert own.bytes_for(tokens, 1) == (32 + tokens + slots) * CELL
        assert own.module.slots(own.layout, "swa", tokens, 1) == 16 + slots
        budget = Budget(one(own), None, tokens, 1)
        kind = (2 * CELL, 32 * CELL) if tokens < 144 else (CELL, (32 + 144) * CELL)
        assert (budget.bytes_per_token, budget.fixed_bytes) == kind
        assert budget.total_bytes == budget.fixed_bytes + budget.bytes_per_token * tokens
        assert budget.total_causes.total == budget.total_bytes
    assert own.cell_size == CELL  # of a long context


def test_requests_beside_so_many_tokens() -> None:
    """160 tokens have 160 slots with a window at most, whatever the requests: 1 takes 144, and the second 16 more."""
    own = pool("hybrid_swa", model_config("gpt-oss-120b"), swa_pool="requests")
    for spare, requests in ((-1, 0), (0, 0), (144, 1), (159, 1), (160, UNBOUNDED)):
        available = (32 + 160 + spare) * CELL
        assert own.module.max_requests(own.layout, available, 160) == requests


def all_windowed(**choices: object) -> Pool:
    """One layer of 8 heads of 8 + 8 values with a window of 32: 256 bytes a slot."""
    config = {"num_hidden_layers": 1, "num_key_value_heads": 8, "head_dim": 8, "sliding_window": 32}
    return pool("hybrid_swa", config | {"model_type": "mistral"}, swa_pool="requests", **choices)


def test_tokens_where_every_layer_has_a_window() -> None:
    """2 requests of 48 slots each: tokens are unbounded where 96 slots fit, and cost 256 bytes each up to that."""
    own = all_windowed()
    for slots, tokens in ((15, 0), (16, 0), (32, 16), (111, 80), (112, UNBOUNDED), (10**6, UNBOUNDED)):
        assert own.module.max_tokens(own.layout, slots * 256, 2) == tokens, slots
        assert one(own).max_tokens(slots * 256, 2) == tokens
    assert own.module.max_tokens(own.layout, 16 * 256, 0) == UNBOUNDED
    assert own.module.max_tokens(own.layout, 16 * 256 - 1, 0) == 0


def drawn(draw: random.Random) -> tuple[Pool, int]:
    """A pool with windows by requests, and the slots of a page of its contexts."""
    page = draw.choice([1, 2, 5, 16])
    config = {"num_hidden_layers": draw.randint(1, 6), "num_key_value_heads": 1, "head_dim": 8}
    config |= {"sliding_window": draw.randint(1, 40)}
    name = draw.choice(["hybrid_swa", "shared_kv", "limits"])
    if name == "limits":
        return pool(name, config, page_size=page), page
    config |= {"sliding_window_pattern": draw.randint(1, 5)}
    config |= {"num_kv_shared_layers": 1, "num_hidden_layers": 7} if name == "shared_kv" else {}
    choices = {"swa_pool": "requests", "split_kv": False, "page_size": page, "step_tokens": draw.choice([1, 2, 9, 64])}
    return pool(name, config, **choices), page


@pytest.mark.parametrize("seed", range(60))
def test_the_most_requests_that_fit(seed: int) -> None:
    """By counting up: the most requests of a context, and with these the most tokens."""
    draw = random.Random(seed)
    for _ in range(5):
        own, page = drawn(draw)
        deployment = one(own)
        context = draw.randint(1, 100)
        rounded = -(-context // page) * page
        memory = draw.randint(0, own.bytes_for(rounded * 8, 8))

        def largest(fits: Callable[[int], bool]) -> int:
            if fits(10**6):
                return UNBOUNDED
            return next(count for count in range(10**4) if not fits(count + 1)) if fits(0) else 0

        requests = largest(lambda count: own.bytes_for(rounded * count, count) <= memory)  # noqa: B023
        tokens = largest(lambda count: own.bytes_for(page * count, requests) <= memory)  # noqa: B023
        tokens = tokens if tokens == UNBOUNDED else page * tokens
        assert deployment.most_in(memory, None, context) == (tokens, requests)
        assert own.module.max_tokens(own.layout, memory, requests) == tokens
        beside = own.module.max_requests(own.layout, memory, rounded)
        if beside not in (0, UNBOUNDED):
            assert own.bytes_for(rounded, beside) <= memory < own.bytes_for(rounded, beside + 1)
        elif beside == UNBOUNDED:
            assert own.bytes_for(rounded, 10**9) <= memory
        else:
            assert own.bytes_for(rounded, 1) > memory


@pytest.mark.parametrize("seed", range(30))
def test_pools_have_the_bytes_of_the_budget(seed: int) -> None:
    """Also of what is derived from limited slots: whole pages, none of which is more than the budget says."""
    draw = random.Random(seed)
    own, page = drawn(draw)
    tokens, requests = page * draw.randint(0, 40), draw.randint(0, 9)
    made = whole_module(own.compiled.layout.name)
    layout = made.Layout.from_config(own.layout.config_used, **own.layout.choices)
    built = made.Pool(layout, tokens, requests=requests)
    assert built.num_bytes() == own.bytes_for(tokens, requests)
    for buffer in own.layout.buffers:
        slots = own.module.slots(own.layout, buffer.space.name, tokens, requests)
        for layer in buffer.layers:
            tensors = built.buffer(buffer.name, layer)
            for tensor in tensors.values() if isinstance(tensors, dict) else [tensors]:
                assert tensor.shape[0] * buffer.space.page_size == slots
    assert own.compiled.layout.name != "limits" or slots * 2 == own.module.slots(own.layout, "window", tokens, requests)


def test_the_last_slot_of_a_limited_space() -> None:
    """A request of 32 tokens has a slot with a window for each, and a page of 16 is reserved: 47 is the last."""
    config = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 100}
    layout = whole_module("hybrid_swa").Layout.from_config(config | {"model_type": "mistral"}, swa_pool="requests")
    built = whole_module("hybrid_swa").Pool(layout, 32, requests=1)
    rows = torch.ones(2, 1, 8, dtype=torch.bfloat16)
    built.set_kv_buffer(0, torch.tensor([47, 48]), rows, rows)
    assert built.get_kv_fields(0)["k"].flatten(0, 1).flatten(1).any(1).nonzero().tolist() == [[47]]
