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
HYBRID_SWA = str(ROOT / "specs" / "hybrid_swa.yaml")
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


# Which way is taken


GEMMA = str(CONFIGS / "gemma-3-27b.json")
SLOT = 8192  # bytes: 16 heads of 128 + 128 values of 2 bytes; 10 layers are full, 52 have a window of 1,024


def test_requests_that_are_counted_have_windows_of_their_own() -> None:
    """Gemma 3 27B in 40 GiB, contexts of 128k: 3 requests, of which a share of half the slots leaves 1."""
    found = document(HYBRID_SWA, "--config", GEMMA, "--memory", "40GiB", "--context", 131072)
    window = (-(-1023 // 16) + 1) * 16  # 65 pages
    each = (131072 * 10 + window * 52) * SLOT
    assert found["requests"] == (40 * GIB - 16 * 62 * SLOT) // each == 3
    assert found["choices"]["swa_pool"] == "requests"
    other = found["other_way"]
    assert other["changes"] == [{"layout": "hybrid_swa", "choices": {"swa_pool": "ratio"}}]
    assert other["tokens"] == 145_616 == 9101 * 16  # a page more would be the second of a page with a window
    page, left = 16 * SLOT, 40 * GIB - 62 * 16 * SLOT
    assert (10 * 9101 + 52 * 4550) * page <= left < (10 * 9102 + 52 * 4551) * page
    assert (other["requests"], other["context_tokens"], other["request_bytes"]) == (1, 145_616, 0)
    assert other["bytes_per_token"] == 36 * SLOT
    _, out, _ = run("budget", HYBRID_SWA, "--config", GEMMA, "--memory", "40GiB", "--context", 131072)
    assert (
        "\n\n  requests are counted, so swa_pool is requests; with swa_pool=ratio: 145,616 tokens of 1 request\n"
        "  (whatever slots their windows need), 294,912 bytes per token, 42,948,624,384 bytes in total\n\n"
    ) in out


def test_without_requests_the_other_way_is_told_of_one() -> None:
    found = document(HYBRID_SWA, "--config", GEMMA, "--memory", "40GiB")
    assert (found["choices"]["swa_pool"], found["requests"], found["tokens"]) == ("ratio", 0, 145_616)
    request = 65 * 16 * 52 * SLOT
    tokens = (40 * GIB - 16 * 62 * SLOT - request) // (16 * 10 * SLOT) * 16
    assert found["other_way"] == {
        "changes": [{"layout": "hybrid_swa", "choices": {"swa_pool": "requests"}}],
        "bytes_per_token": 10 * SLOT,
        "request_bytes": request,
        "memory_bytes": 40 * GIB,
        "tokens": tokens,
        "requests": 1,
        "context_tokens": tokens,
        "total_bytes": (16 * 62 + tokens * 10) * SLOT + request,
        "fits": True,
    }
    _, out, _ = run("budget", HYBRID_SWA, "--config", GEMMA, "--memory", "40GiB")
    assert (
        "\n\n  no requests are counted, so swa_pool is ratio; with swa_pool=requests: 518,768 tokens of 1\n"
        "  request, 81,920 bytes per token and 443,023,360 per request, 42,948,624,384 bytes in total\n\n"
    ) in out
    _, out, _ = run("budget", HYBRID_SWA, "--config", GEMMA, "--memory", "1MiB")
    assert "0 tokens of 1 request,\n  507,904 bytes per token, 8,126,464 bytes in total, which do not fit\n\n" in out


def test_a_price_for_tokens_has_the_other_way_too() -> None:
    """1,600 tokens: of one request they take 1,040 slots with a window, and 1,600 of 14 requests of 112."""
    for words, requests, slots in (((), 1, 1040), (("--requests", 14), 14, 800), (("--context", 100), 14, 800)):
        found = document(HYBRID_SWA, "--config", GEMMA, "--tokens", 1600, *words)
        other = found["other_way"]
        assert (other["tokens"], other["requests"], other["memory_bytes"]) == (1600, requests, None)
        assert other["total_bytes"] == (16 * 62 + 1600 * 10 + slots * 52) * SLOT
        mine = 1600 if words else 800
        assert found["total_bytes"] == (16 * 62 + 1600 * 10 + mine * 52) * SLOT


@pytest.mark.parametrize(
    ("words", "pool"),
    [
        ("--memory 40GiB --requests 0", "ratio"),
        ("--tokens 1600 --requests 0", "ratio"),
        ("--memory 40GiB --requests 1", "requests"),
        ("--tokens 1600 --requests 1 --pp 2", "requests"),
        ("--tokens 1600 --pp 2", "ratio"),
        ("--memory 40GiB --memory 80GiB --context 9 --set step_tokens=3", "requests"),
    ],
)
def test_the_way_that_is_taken(words: str, pool: str) -> None:
    found = document(HYBRID_SWA, "--config", GEMMA, *words.split())
    assert found["choices"]["swa_pool"] == pool
    (change,) = found["other_way"]["changes"]
    assert {pool, change["choices"]["swa_pool"]} == {"ratio", "requests"}


@pytest.mark.parametrize("way", ["ratio", "requests"])
@pytest.mark.parametrize("words", ["--memory 40GiB --context 131072", "--tokens 1600 --requests 2"])
def test_what_is_set_is_taken(way: str, words: str) -> None:
    found = document(HYBRID_SWA, "--config", GEMMA, *words.split(), "--set", f"swa_pool={way}")
    assert (found["choices"]["swa_pool"], found["other_way"]) == (way, None)
    assert (
        "are counted" not in run("budget", HYBRID_SWA, "--config", GEMMA, *words.split(), "--set", f"swa_pool={way}")[1]
    )


def test_without_windows_there_is_one_way(tmp_path: Path) -> None:
    """Pairs of layers that share: no layer has a window, so that nothing depends on the choice."""
    path = tmp_path / "c.json"
    config = {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 8, "use_cla": True, "cla_share_factor": 2}
    path.write_text(json.dumps(config))
    for words in ((), ("--context", 16), ("--requests", 2)):
        found = document("--config", path, "--memory", "1GiB", *words)
        assert (found["layout"], found["choices"]["swa_pool"], found["other_way"]) == ("shared_kv", "ratio", None)
    glm = document("--config", CONFIGS / "glm-5.2.json", "--memory", "80GiB", "--context", 1000)
    assert glm["other_way"] is None


def test_drafts_have_their_own_way(tmp_path: Path) -> None:
    """A target without windows, and two drafts with one, of which one has its way set."""
    path = tmp_path / "c.json"
    config = {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 32}
    path.write_text(json.dumps(config | {"model_type": "mistral"}))
    words = ["--config", CONFIGS / "glm-5.2.json", "--tokens", 6400, "--requests", 2]
    words += ["--draft", f"config={path}", "--draft", f"config={path},swa_pool=ratio"]
    found = document(*words)
    assert [draft["choices"]["swa_pool"] for draft in found["drafts"]] == ["requests", "ratio"]
    assert found["other_way"]["changes"] == [{"layout": "hybrid_swa", "choices": {"swa_pool": "ratio"}}]
    assert [draft["total_bytes"] for draft in found["drafts"]] == [(16 + 2 * 48) * 32, (16 + 3200) * 32]
    assert found["other_way"]["total_bytes"] - found["total_bytes"] == (3200 - 2 * 48) * 32


SPEC = """\
kvgen: 1
layout: several
doc: Choices of each type that go by whether requests are counted.
config: {num_layers: {type: int, from: num_hidden_layers}}
choices:
  shared: {type: bool, default: true, for_requests: false}
  share: {type: ratio, default: 1/2, for_requests: 1/3}
  slots_each: {type: int, min: 1, default: 1, for_requests: 32}
  kinds: {type: list, of: [a, b], default: [a], for_requests: [b, a]}
require: [{that: len(kinds) > 0 and (num_layers < 9 or slots_each == 1), else: too many layers}]
layers: {body: num_layers}
spaces:
  token: {slots: tokens, page: 16}
  window:
    - {when: shared, use: {of: token, slots: tokens * share, page: 16}}
    - {use: {of: token, slots: requests * slots_each, at_most: tokens * share, page: 16}}
formats:
  row: {fields: {k: "u8[1]"}, page: [[k]]}
buffers:
  kv: {format: row, space: token, layers: "kinds[0] == 'a'"}
  kv_window: {format: row, space: window, layers: all}
"""


def test_choices_of_every_type(tmp_path: Path) -> None:
    spec, config = tmp_path / "several.yaml", tmp_path / "c.json"
    spec.write_text(SPEC)
    config.write_text('{"num_hidden_layers": 2}')
    words = (spec, "--config", config, "--tokens", 480)
    found = document(*words, "--requests", 3)
    assert {"shared": False, "share": "1/3", "slots_each": 32, "kinds": ["b", "a"]}.items() <= found["choices"].items()
    assert found["total_bytes"] == 2 * (16 + 96)
    (change,) = found["other_way"]["changes"]
    assert change["choices"] == {"shared": True, "share": "1/2", "slots_each": 1, "kinds": ["a"]}
    assert found["other_way"]["total_bytes"] == 2 * (16 + 480) + 2 * (16 + 240)
    set_one = document(*words, "--requests", 3, "--set", "kinds=a", "--set", "slots_each=64")
    assert set_one["total_bytes"] == 2 * (16 + 480) + 2 * (16 + 160)
    assert "kinds" not in set_one["other_way"]["changes"][0]["choices"]
    _, out, _ = run("explain", spec)
    assert "\n  shared: bool, default true, false where a budget counts requests\n" in out
    printed = json.loads(run("explain", spec, "--format", "json")[1])
    assert {"name": "share", "section": "choices"} | {
        "is": "ratio, default 1/2, 1/3 where a budget counts requests"
    } in printed["parameters"]


def test_a_way_that_is_refused(tmp_path: Path) -> None:
    """The model is refused where it would be priced so, and has one way where it would not."""
    spec, config = tmp_path / "several.yaml", tmp_path / "c.json"
    spec.write_text(SPEC)
    config.write_text('{"num_hidden_layers": 9}')
    words = ("budget", spec, "--config", config, "--tokens", 480, "--format", "concise")
    assert run(*words, "--requests", 3) == (1, "", f"{config}: error[KV401]: too many layers\n")
    assert document(*words[1:-2])["other_way"] is None


def test_what_a_budget_takes_is_in_no_module() -> None:
    """Nor in a fingerprint: it decides no byte."""
    text = (ROOT / "specs" / "hybrid_swa.yaml").read_text(encoding="utf-8")
    other = text.replace(", for_requests: requests", "")
    assert other != text

    def made(text: str) -> Compiled:
        return compile_spec(
            "hybrid_swa.yaml",
            lambda file: text.encode() if file == "hybrid_swa.yaml" else (ROOT / "specs" / file).read_bytes(),
        )

    assert made(other).module == made(text).module


def test_requests_in_blocks_of_a_page() -> None:
    """8 slots of a request are two blocks of 4 slots, of 16 bytes each, in two layers."""
    text = SPEC[: SPEC.index("config:")] + SPEC[SPEC.index("formats:") :].replace("kinds[0] == 'a'", "all")
    text = text.replace("space: window, ", "space: state, block: 4, ").replace("u8[1]", "u8[4]")
    text += "layers: {body: 2}\nspaces:\n  token: {slots: tokens, page: 16}\n  state: {slots: requests * 8, page: 8}\n"
    text += "expect: [{bytes_per_token: 8, request_bytes: 64}]\n"
    made = compile_spec("several.yaml", lambda file: text.encode())
    assert made.problems == ()
    own = Pool(made, made.namespace.Layout.from_config({}))
    assert own.bytes_for(160, 6) - own.bytes_for(160, 5) == own.request_bytes == 64


def test_requests_where_tokens_have_no_slots_of_their_own() -> None:
    """Contexts take no slots, so that there are no tokens to limit: any number fits beside the reserved page."""
    text = SPEC[: SPEC.index("config:")] + SPEC[SPEC.index("formats:") :].replace("  kv: {", "# ", 1)
    text += "layers: {body: 2}\nspaces:\n  window: {slots: requests * 32, at_most: tokens, page: 16}\n"
    made = compile_spec("several.yaml", lambda file: text.encode())
    assert made.problems == ()
    own = Pool(made, made.namespace.Layout.from_config({}))
    assert [one(own).max_requests(memory, 64) for memory in (31, 32)] == [0, UNBOUNDED]
    assert [one(own).max_tokens(memory, 1) for memory in (31, 32, 95, 96)] == [0, 15, 31, UNBOUNDED]  # whole pages


def test_a_model_of_windows_alone(tmp_path: Path) -> None:
    """Mistral 7B 0.1: 131,072 bytes a slot in 32 layers; a window of 4,096 tokens lies in 257 pages of 16 at most."""
    config = tmp_path / "config.json"
    fields = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config.write_text(json.dumps({**fields, "model_type": "mistral", "sliding_window": 4096}))
    request, reserved = 257 * 16 * 131_072, 16 * 131_072
    assert (80 * GIB - reserved) // request == 159
    for words, requests in (("--context 32768", 159), ("--requests 10", 10), ("--requests 159", 159)):
        found = document(HYBRID_SWA, "--config", str(config), "--memory", "80GiB", *words.split())
        assert (found["tokens"], found["requests"]) == (None, requests)
        assert found["total_bytes"] == found["fixed_bytes"] == requests * request + reserved
        assert found["bytes_per_token"] == 0
        (buffer,) = (own for own in found["buffers"] if own["layers"])
        assert (buffer["name"], buffer["slots"]) == ("kv_swa", requests * 257 * 16 + 16)
    two = document(HYBRID_SWA, "--config", str(config), "--memory", "80GiB", "--context", "32768", "--pp", "2")
    assert (two["requests"], two["total_bytes"]) == (318, 318 * request // 2 + reserved // 2)


def test_a_context_that_does_not_fit_once() -> None:
    """gpt-oss-120b: 131,072 x 36,864 bytes, 144 slots of the windows, and 16 reserved slots of all layers."""
    status, out, err = run("budget", HYBRID_SWA, "--config", GPT_OSS, "--memory", "1GiB", "--context", 131072)
    assert status == 0
    one = 131_072 * 36_864 + 144 * 36_864 + 16 * 73_728
    assert err == (
        "warning[KV404]: `1GiB` is too small for one request of 131,072 tokens\n"
        f"  = note: one request takes {one:,} bytes, reserved pages included\n"
    )
    assert "\n  requests                           0        at a time\n" in out


def test_a_comparison_counts_no_requests() -> None:
    sides = [f"config={GPT_OSS}", f"config={GPT_OSS},swa_pool=requests"]
    _, _, err = run("diff", *sides, "--memory", "80GiB")
    assert err == (
        "warning[KV408]: the slots of 18 layers grow with requests, and none are counted\n"
        "  = note: their cost is not included\n"
    )
    assert run("diff", *sides)[2] == ""
