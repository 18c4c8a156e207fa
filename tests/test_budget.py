"""`kvgen budget`: bytes by cause, several memories, requests and contexts, stages of a pipeline, draft models."""

import io
import json
import random
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import CONFIGS, LANGUAGE, ROOT, model_config
from test_language_pools import FAMILIES, Family

from kvgen.budget import Budget
from kvgen.causes import Causes, page_causes
from kvgen.cli import main
from kvgen.compile import Compiled, compile_spec
from kvgen.deployment import UNBOUNDED, Deployment, Pool, Stage, even_split
from kvgen.evaluate import is_split, pages_of
from kvgen.page import BYTE

GIB = 2**30
PAGE = (ROOT / "docs" / "budget.md").read_text(encoding="utf-8")
GQA = str(ROOT / "specs" / "gqa.yaml")
MLA = str(ROOT / "specs" / "mla.yaml")
GLM_DSA = str(ROOT / "specs" / "glm_dsa.yaml")
GLM_52 = str(CONFIGS / "glm-5.2.json")
V3 = str(CONFIGS / "deepseek-v3.json")


@dataclass(frozen=True)
class Done:
    """What a command came to."""

    status: int
    out: str
    err: str


def run(*words: object) -> Done:
    stdout, stderr = io.StringIO(), io.StringIO()
    status = main([str(word) for word in words], io.BytesIO(), stdout, stderr)
    return Done(status, stdout.getvalue(), stderr.getvalue())


def document(*words: object) -> Any:
    """What `kvgen budget --format json` prints."""
    done = run("budget", *words, "--format", "json")
    assert (done.status, done.err) == (0, ""), done.out
    return json.loads(done.out)


def refusal(*words: object) -> str:
    """The one line of a command line that cannot be read."""
    done = run("budget", *words, "--format", "concise")
    assert (done.status, done.out) == (2, "")
    (line,) = done.err.splitlines()
    return line.removeprefix("error[KV410]: ")


def written(path: Path, value: object) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def heads(layers: int, count: int = 8, dim: int = 128) -> dict[str, int]:
    return {"num_hidden_layers": layers, "num_key_value_heads": count, "head_dim": dim, "v_head_dim": dim}


@cache
def compiled(name: str) -> Compiled:
    """A spec of `tests/language` or `specs`."""
    folder = LANGUAGE if (LANGUAGE / f"{name}.yaml").exists() else ROOT / "specs"
    made = compile_spec(f"{name}.yaml", lambda file: (folder / file).read_bytes())
    assert made.layout is not None and not made.failed
    return made


def pool(name: str, config: object, **choices: object) -> Pool:
    return Pool(compiled(name), compiled(name).namespace.Layout.from_config(config, **choices))


def one(*pools: Pool) -> Deployment:
    return Deployment((Stage(pools),))


# Bytes by cause

SPEC = """\
kvgen: 1
layout: small
doc: One buffer.
config: {num_layers: {type: int, from: num_hidden_layers}}
layers: {body: num_layers}
spaces: {token: {slots: tokens, page: 8}}
formats:
  row:
    fields: {code: {type: "e4m3[7]", quant: {scale: scale}}, rope: "bf16[2]", scale: "f32[1]"}
    page: PAGE
buffers:
  kv: {format: row, space: token, layers: all, align: ALIGN, split: SPLIT}
"""


@pytest.mark.parametrize(
    ("page", "align", "split", "alignment", "padding"),
    [
        ("[[code, {pad: 1}, rope, scale]]", 1, False, 8, 0),  # 8 x 16 bytes
        ("[[scale, rope], [code], {pad: 4}]", 8, False, 0, 8),  # 8 x 15 bytes, 4 behind, and up to a multiple of 8
        ("[[scale, rope, code, {pad: 1}]]", 128, False, 8, 0),  # the gap of the last record is like that of the others
        ("[[scale], {align: 64}, [{pad: 2}, rope], [code, {pad: 9}]]", 1, False, 32 + 16 + 72, 0),
        ("[[code], [rope], [{pad: 4}, scale], {align: 256}]", 1, False, 32, 256 - 56 - 32 - 64),
        ("[[code], {pad: 8}, [{pad: 4}, scale, {pad: 4}, rope], {pad: 16}]", 1, True, 64, 0),  # tensors without gaps
        ("[[code], {pad: 8}, [{pad: 4}, scale, {pad: 4}, rope], {pad: 16}]", 32, False, 8 + 64, 32),
    ],
)
def test_gaps_of_a_page(tmp_path: Path, page: str, align: int, split: bool, alignment: int, padding: int) -> None:
    """8 slots of 7 codes, 2 bf16 and an f32: 88 bytes of data, 32 of scales; two layers, 3 pages and one reserved."""
    text = SPEC.replace("PAGE", page).replace("ALIGN", str(align)).replace("SPLIT", str(split).lower())
    words = (written(tmp_path / "small.yaml", text), "--config", written(tmp_path / "c.json", {"num_hidden_layers": 2}))
    found = document(*words, "--tokens", 24)
    page_bytes = 88 + 32 + alignment + padding
    assert found["buffers"][0]["page_bytes"] == page_bytes
    assert found["causes"] == {
        "data": 2 * 3 * 88,
        "scales": 2 * 3 * 32,
        "alignment": 2 * 3 * alignment,
        "page_padding": 2 * 3 * padding,
        "reserved": 2 * page_bytes,
    }
    assert found["causes"] == found["buffers"][0]["causes"] and sum(found["causes"].values()) == found["total_bytes"]


def test_a_page_of_deepseek_v4() -> None:
    """256 slots of 448 + 128 bytes, 7 scales and one byte of gap; the page goes up to a multiple of 576."""
    config = {"num_hidden_layers": 3, "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    page = pool("dsv4", config | {"compress_ratios": [0, 4, 128]}).layout.buffer("swa_kv").page
    written_page = next(each for each in compiled("dsv4").layout.pages if each.format == page.format)
    assert page_causes(page, written_page) == Causes(data=256 * 576, scales=256 * 7, alignment=256, page_padding=256)
    assert 256 * 585 == 149760 == page.page_bytes


def test_scales_of_half_bytes() -> None:
    """nvfp4: half a byte for each of 16 slots x 8 heads x 128, and a scale for 16 values; K and V are tensors."""
    own = pool("gqa", heads(1), kv_format="nvfp4", kv_order="hnd")
    budget = Budget(one(own), None, 160, 0)
    assert budget.total_causes == Causes(data=10 * 2 * 8192, scales=10 * 2 * 1024, reserved=2 * 9216)


def test_blocks_of_a_page() -> None:
    """Of a page of 16 slots, four blocks of 4 are reserved: 24 bytes of k, 40 of gap and 40 of v each."""
    folder = ROOT / "tests" / "golden" / "split_and_align"
    made = compile_spec("spec.yaml", lambda file: (folder / file).read_bytes())
    own = Pool(made, made.namespace.Layout.from_config({"num_hidden_layers": 3}))
    budget = Budget(one(own), None, 32, 0)
    assert budget.causes(own, own.layout.buffer("kv_blocks")) == Causes(
        data=3 * 8 * 64, alignment=3 * 8 * 40, reserved=3 * 4 * 104
    )


def occupied(page: Any, names: set[str]) -> np.ndarray:
    """Bytes of the page that those fields have, from the offset of every element."""
    found = np.zeros(page.page_bytes, bool)
    for field in page.fields:
        if field.name not in names:
            continue
        doubled = np.array([2 * field.offset])  # in half bytes
        for extents, strides in zip(field.shape, field.stride, strict=True):
            for extent, stride in zip(
                *(axis if isinstance(axis, tuple) else (axis,) for axis in (extents, strides)), strict=True
            ):
                steps = np.arange(extent) * int(2 * stride)
                doubled = (doubled[:, None] + steps).ravel()
        width = {"e2m1": 1, "bf16": 2, "f16": 2, "f32": 4, "i32": 4, "i64": 8}.get(field.dtype, 1)
        found[(doubled[:, None] // 2 + np.arange(width)).ravel()] = True
    return found


def draw_glm_dsa(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    return model_config(draw.choice(["glm-5.2", "glm-5", "deepseek-v3.2"])), {
        "kv_format": draw.choice(["bf16", "fp8_scaled", "fp8_raw"]),
        "host_to_device_ratio": draw.choice([1, 2, 3]),
        "elide_shared": draw.random() < 0.5,
        "role": draw.choice(["target", "draft", "both"]),
    }


DRAWS = {family.name: family.draw for family in FAMILIES} | {"glm_dsa": draw_glm_dsa}


def test_every_layout_is_drawn() -> None:
    paths = [*LANGUAGE.glob("*.yaml"), *(ROOT / "specs").glob("*.yaml")]
    assert set(DRAWS) == {path.stem for path in paths if "\nlayout: " in path.read_text(encoding="utf-8")}


@pytest.mark.parametrize("name", DRAWS)
@settings(max_examples=25, deadline=None)
@given(draw=st.randoms(use_true_random=False), granules=st.integers(0, 10**6), requests=st.integers(0, 4096))
def test_causes_add_up(name: str, draw: random.Random, granules: int, requests: int) -> None:
    config, choices = DRAWS[name](draw)
    own = pool(name, config, **choices)
    budget = Budget(one(own), None, granules * own.layout.granule, requests)
    assert budget.total_causes.total == budget.total_bytes
    for _, buffer, causes in budget.device_causes():
        assert causes.total == buffer.num_bytes(*budget.sizes(buffer))


@pytest.mark.parametrize("name", DRAWS)
def test_causes_are_those_of_the_bytes(name: str) -> None:
    """Marked byte by byte. The pages that are known at build say where their planes end."""
    draw = random.Random(name)
    written_pages = {page.format: page for page in compiled(name).layout.pages}
    for _ in range(10):
        config, choices = DRAWS[name](draw)
        buffers = pool(name, config, **choices).layout.buffers
        for page in {page for buffer in buffers for page in pages_of(buffer) if page.page_bytes < 2**21}:
            planes = written_pages[page.format]
            names = {field.name for field in page.fields}
            scales = {name for name in names if name.removesuffix("scale") != name}
            causes = page_causes(page, planes)
            assert causes.scales == occupied(page, scales).sum(), page
            assert causes.data == occupied(page, names - scales).sum(), page
            if is_split(page):
                assert causes.page_padding == 0
            elif planes.is_constant and planes.slots.known == page.slots:
                last = planes.planes[-1]
                end = (last.offset + last.nbits).known
                assert causes.page_padding == page.page_bytes - end // BYTE
            assert causes.page_padding <= page.page_bytes - 1 - occupied(page, names).nonzero()[0].max()


# Several memories


def test_several_memories() -> None:
    """DeepSeek-V3.2 costs 48,068 bytes a token, and the reserved page of 64 as much as 64."""
    config = str(CONFIGS / "deepseek-v3.2.json")
    found = document(GLM_DSA, "--config", config, "--memory", "10GiB", "--memory", "80GiB", "--memory", "1MiB")
    page = 64 * 48068
    held = [(memory // page - 1) * 64 for memory in (10 * GIB, 80 * GIB)]
    assert held == [223296, 1786944]
    assert [(each["memory_bytes"], each["tokens"], each["total_bytes"]) for each in found["capacities"]] == [
        (10 * GIB, held[0], (held[0] + 64) * 48068),
        (80 * GIB, held[1], (held[1] + 64) * 48068),
        (2**20, 0, page),
    ]
    assert [each["fits"] for each in found["capacities"]] == [True, True, False]
    assert (found["memory_bytes"], found["tokens"]) == (10 * GIB, held[0])
    assert document(GLM_DSA, "--config", config, "--tokens", 64)["capacities"] == []


def test_several_memories_in_text() -> None:
    done = run("budget", GLM_DSA, "--config", GLM_52, "--memory", "80GiB", "--memory", "1MiB")
    assert done.err == "warning[KV404]: `1MiB` is smaller than the fixed cost of 3,452,160 bytes\n"
    lines = done.out.splitlines()
    assert lines[lines.index("          memory                tokens           total        left") + 1 :][:2] == [
        "  85,899,345,920  80.00 GiB  1,592,384  85,896,645,120   2,700,800",
        "       1,048,576   1.00 MiB          0       3,452,160  -2,403,584",
    ]


# Requests and contexts


@pytest.mark.parametrize(
    ("tokens", "requests", "context"),
    [(0, 2, 0), (128, 2, 0), (256, 2, 128), (384, 2, 128), (512, 2, 256), (512, 1, 512), (512, 5, 0)],
)
def test_requests_take_whole_pages(tmp_path: Path, tokens: int, requests: int, context: int) -> None:
    """FreeToken 367: pages of 128, so that two requests of 2 tokens need 2 pages and not one."""
    config = written(tmp_path / "c.json", heads(2))
    words = (GQA, "--config", config, "--set", "page_size=128", "--tokens", tokens)
    assert document(*words, "--requests", requests)["context_tokens"] == context
    assert document(*words, "--context", 2)["requests"] == tokens // 128


def test_requests_at_a_context() -> None:
    """GLM-5.2: 53,940 bytes a token. A context of 100,000 takes 1,563 pages of 64; 26 of them would not fit."""
    found = document(GLM_DSA, "--config", GLM_52, "--memory", "80GiB", "--context", 100_000)
    pages = 80 * GIB // (64 * 53940) - 1
    assert (found["requests"], pages // 1563, found["tokens"]) == (15, 15, pages * 64)
    assert found["context_tokens"] == pages // 15 * 64 == 106_112
    assert document(GLM_DSA, "--config", GLM_52, "--memory", "80GiB", "--requests", 15)["tokens"] == found["tokens"]
    assert document(GLM_DSA, "--config", GLM_52, "--memory", "80GiB")["context_tokens"] is None


def test_contexts_are_in_the_slots_of_the_root() -> None:
    """HiSparse at ratio 4: 64 tokens are 64 slots on the device, and 256 where requests have their positions."""
    words = (GLM_DSA, "--config", GLM_52, "--set", "host_to_device_ratio=4")
    assert document(*words, "--tokens", 64, "--requests", 1)["context_tokens"] == 256
    assert document(*words, "--tokens", 64, "--requests", 3)["context_tokens"] == 64
    assert document(*words, "--tokens", 64, "--context", 65)["requests"] == 2


def test_requests_that_cost() -> None:
    """Two layers: 2 x 4 x 2 bytes a token, 176 a request beside it, and a reserved page of 4 slots: 64 bytes."""
    folder = ROOT / "tests" / "golden" / "requests"
    made = compile_spec("spec.yaml", lambda file: (folder / file).read_bytes())
    config = {"num_hidden_layers": 2, "state": {"dim": 8}}
    deployment = one(Pool(made, made.namespace.Layout.from_config(config)))
    price = 176 + 12 * 16  # a context of 10 takes 12 slots
    for count in (0, 1, 7):
        memory = 64 + count * price
        assert deployment.max_requests(memory, 10) == count
        assert deployment.max_requests(memory + price - 1, 10) == count
        assert deployment.most_in(memory + price - 1, None, 10) == (12 * count + (price - 1) // 64 * 4, count)


def test_nothing_that_grows_is_unbounded(tmp_path: Path) -> None:
    config = written(tmp_path / "c.json", heads(0))
    found = document(GQA, "--config", config, "--memory", "1GiB", "--context", 1000)
    assert (found["tokens"], found["requests"], found["context_tokens"], found["total_bytes"]) == (None, None, None, 0)
    done = run("budget", GQA, "--config", config, "--memory", "1GiB", "--context", 1000)
    assert re.findall(r"(\w+) +unbounded", done.out) == ["tokens", "requests"]


CONTEXT_FAMILIES = [family for family in FAMILIES if family.name in ("dsv4", "kimi_linear", "qwen3_next", "gpt_oss")]


@pytest.mark.parametrize("family", CONTEXT_FAMILIES, ids=lambda family: family.name)
@settings(max_examples=50, deadline=None)
@given(
    draw=st.randoms(use_true_random=False), memory=st.integers(0, 2**38), context=st.integers(1, 10**5), data=st.data()
)
def test_one_request_more_does_not_fit(
    family: Family, draw: random.Random, memory: int, context: int, data: st.DataObject
) -> None:
    """Priced apart, with every request in whole pages of the first space."""
    config, choices = family.draw(draw)
    own = pool(family.name, config, **choices)
    page = own.layout.spaces[0].page_size
    assert own.layout.granule % page == 0 and [space.name for space in own.roots] == [own.layout.spaces[0].name]

    def price(requests: int) -> int:
        slots = requests * -(-context // page) * page
        return family.price(config, choices, -(-slots // own.layout.granule) * own.layout.granule, requests)

    requests = one(own).max_requests(memory, context)
    if price(0) > memory:
        assert requests == 0
    elif price(10**9) == price(0):
        assert requests == UNBOUNDED
    else:
        assert price(requests) <= memory < price(requests + 1)
    tokens = own.layout.granule * data.draw(st.integers(0, 10**4))
    count = data.draw(st.integers(1, 100))
    longest = one(own).longest_context(tokens, count)
    assert count * longest <= tokens < count * (longest + page)


# Stages of a pipeline


@pytest.mark.parametrize(
    ("layers", "stages", "split"),
    [(78, 2, (39, 39)), (61, 3, (20, 20, 21)), (62, 3, (20, 21, 21)), (5, 4, (1, 1, 1, 2)), (3, 3, (1, 1, 1))],
)
def test_layers_are_split_evenly(layers: int, stages: int, split: tuple[int, ...]) -> None:
    """The last stages have one more, as of SGLang's `get_pp_indices`."""
    assert even_split(layers, stages) == split


@pytest.mark.parametrize(("role", "cells"), [("target", [24048, 23652]), ("both", [24048, 24360])])
def test_eight_stages_have_their_own_indexers(role: str, cells: list[int]) -> None:
    """TensorRT-LLM 16558: of GLM-5.2, 12 owners of 39 layers and 9 of 39; the MTP layer is on the last stage."""
    words = (GLM_DSA, "--config", GLM_52, "--set", "kv_format=fp8_raw", "--set", f"role={role}")
    found = document(*words, "--pp", 2, "--memory", "10GiB")
    stages = found["stages"]
    assert [stage["bytes_per_token"] for stage in stages] == cells
    assert cells[:2] == [39 * 576 + 12 * 132, 39 * 576 + 9 * 132 + (708 if role == "both" else 0)]
    assert [(stage["start_layer"], stage["end_layer"]) for stage in stages] == [(0, 39), (39, 79)]
    assert stages[1]["layers"] == [list(range(39, 79 if role == "both" else 78))]
    own = [(10 * GIB // (64 * cell) - 1) * 64 for cell in cells]
    assert [stage["tokens"] for stage in stages] == own
    assert found["tokens"] == min(own)
    assert [stage["decides"] for stage in stages] == [own[0] == min(own), own[1] == min(own)]
    assert found["bytes_per_token"] == max(cells) and found["total_bytes"] == (min(own) + 64) * max(cells)
    assert [stage["total_bytes"] for stage in stages] == [(min(own) + 64) * cell for cell in cells]


def test_a_stage_that_owns_nothing(tmp_path: Path) -> None:
    config = written(tmp_path / "c.json", heads(3))
    found = document(GQA, "--config", config, "--memory", "1GiB", "--pp", "2,0,1")
    assert [(stage["tokens"], stage["bytes_per_token"]) for stage in found["stages"]] == [
        ((2**30 // (2 * 65536) - 1) * 16, 2 * 4096),
        (None, 0),
        ((2**30 // 65536 - 1) * 16, 4096),
    ]
    assert [stage["decides"] for stage in found["stages"]] == [True, False, False]
    with_context = document(GQA, "--config", config, "--memory", "1GiB", "--pp", "2,0,1", "--context", 1000)
    assert (with_context["requests"], with_context["tokens"]) == (131056 // 1008, 131056)
    done = run("budget", GQA, "--config", config, "--memory", "1GiB", "--pp", "2,0,1")
    lines = done.out.splitlines()
    assert lines[lines.index("  stage  layers  bytes per token          total     tokens") + 1 :][:3] == [
        "  0      0-1               8,192  1,073,741,824    131,056  decides",
        "  1      none                  0              0  unbounded",
        "  2      2                 4,096    536,870,912    262,128",
    ]
    only_drafts = ("--memory", "1GiB", "--pp", "2", "--set", "role=draft")
    assert document(GLM_DSA, "--config", GLM_52, *only_drafts)["stages"][0]["tokens"] is None


def test_requests_are_paid_by_every_stage() -> None:
    """A state of 88 bytes for each request and layer; 2 x 8 bytes a token on one stage, 8 on the other."""
    folder = ROOT / "tests" / "golden" / "requests"
    made = compile_spec("spec.yaml", lambda file: (folder / file).read_bytes())
    config = {"num_hidden_layers": 3, "state": {"dim": 8}}
    cuts = ({"end_layer": 2}, {"start_layer": 2})
    pools = [Pool(made, made.namespace.Layout.from_config(config, **cut)) for cut in cuts]
    deployment = Deployment(tuple(Stage((own,)) for own in pools))
    memory = 5 * 176 + 64 + 100 * 64
    budget = Budget(deployment, memory, *deployment.most_in(memory, 5, None))
    assert budget.limits == (400, (memory - 5 * 88 - 32) // 32 * 4) and budget.deciding == 0
    assert (budget.tokens, budget.context) == (400, 80)
    assert deployment.most_in(memory, None, 80) == (400, 5) and deployment.max_requests(memory, 81) == 4


def test_without_a_memory_the_dearest_stage_is_shown(tmp_path: Path) -> None:
    config = written(tmp_path / "c.json", heads(4))
    found = document(GQA, "--config", config, "--tokens", 16, "--pp", "1,3")
    assert [stage["tokens"] for stage in found["stages"]] == [None, None]
    assert (found["total_bytes"], found["buffers"][0]["layers"]) == (2 * 3 * 65536, [1, 2, 3])
    assert " decides" not in run("budget", GQA, "--config", config, "--tokens", 16, "--pp", "1,3").out


def test_ranks_are_a_choice_of_the_spec(tmp_path: Path) -> None:
    """transformers 48566: 64 layers, 8 heads x 128 in bf16, on one rank and on four."""
    config = written(tmp_path / "c.json", heads(64))
    cells = [
        document(GQA, "--config", config, "--tokens", 0, "--set", f"tp_size={ranks}")["bytes_per_token"]
        for ranks in (1, 4)
    ]
    assert cells == [262144, 65536]


# Draft models


def test_9_and_26_a_draft_layer_shares_the_memory() -> None:
    """sglang 23862, TensorRT-LLM 12188: 70,272 + 1,152 bytes; 10 GiB are 150,272 tokens with the reserved page."""
    words = (MLA, "--config", V3, "--set", "kv_format=bf16", "--memory", "10GiB")
    found = document(*words, "--draft", f"{MLA},kv_format=bf16,role=draft")
    assert (found["bytes_per_token"], found["tokens"] + 64) == (71424, 150272)
    (draft,) = found["drafts"]
    assert (draft["bytes_per_token"], draft["buffers"][0]["layers"], draft["choices"]["role"]) == (1152, [61], "draft")
    assert found["total_bytes"] == 10_559_913_984 + 173_113_344 <= 10 * GIB
    assert (found["buffers"][0]["bytes"], draft["total_bytes"]) == (10_559_913_984, 173_113_344)
    alone = document(*words)
    assert (alone["bytes_per_token"], alone["drafts"]) == (70272, [])
    both = document(*words, "--set", "role=both")
    assert (both["tokens"], both["total_bytes"]) == (found["tokens"], found["total_bytes"])


def test_10_a_draft_has_its_own_layers(tmp_path: Path) -> None:
    """sglang 8482: 8 heads x 128 in bf16; one draft layer is 4,096 bytes beside 93 blocks, not 380,928 again."""
    target, draft = (written(tmp_path / f"{layers}.json", heads(layers)) for layers in (93, 1))
    found = document(GQA, "--config", target, "--tokens", 16, "--draft", f"{GQA},config={draft}")
    assert (found["drafts"][0]["bytes_per_token"], found["bytes_per_token"]) == (4096, 380928 + 4096)


@pytest.mark.parametrize(("width", "cell"), [(1, 10240), (8, 1280)])
def test_12_a_draft_is_divided_by_its_own_width(tmp_path: Path, width: int, cell: int) -> None:
    """sglang 39225: 5 layers, 8 heads x 128 in fp8, with a target on 8 ranks."""
    target, draft = written(tmp_path / "t.json", heads(64)), written(tmp_path / "d.json", heads(5))
    side = f"{GQA},config={draft},kv_format=fp8,tp_size={width}"
    found = document(GQA, "--config", target, "--set", "tp_size=8", "--tokens", 16, "--draft", side)
    assert found["drafts"][0]["bytes_per_token"] == cell
    assert found["bytes_per_token"] == 64 * 2 * 128 * 2 + cell


def test_14_a_draft_beside_windows(tmp_path: Path) -> None:
    """sglang 28219: 18 full and 18 window layers at 1/2, 2,048 bytes each, and one more; 10 GiB by whole pages."""
    kinds = ["sliding_attention", "full_attention"] * 18
    target = written(tmp_path / "t.json", heads(36, dim=64) | {"layer_types": kinds})
    draft = written(tmp_path / "d.json", heads(1, dim=64))
    words = (LANGUAGE / "gpt_oss.yaml", "--config", target, "--memory", "10GiB")
    found = document(*words, "--draft", f"{GQA},config={draft}")
    assert (document(*words)["bytes_per_token"], found["bytes_per_token"]) == (55296, 57344)

    def price(tokens: int) -> int:
        full, window = tokens // 16 + 1, tokens // 32 + 1
        return (18 * full + 18 * window + full) * 16 * 2048

    assert price(found["tokens"]) == found["total_bytes"] <= 10 * GIB < price(found["tokens"] + 16)
    reserved = price(0)
    assert 10 * GIB // 57344 // 16 * 16 == 187232 and 0 <= 187232 - found["tokens"] <= reserved // 57344 + 16


def test_a_draft_is_on_the_last_stage(tmp_path: Path) -> None:
    draft = written(tmp_path / "d.json", heads(1))
    found = document(
        *(GLM_DSA, "--config", GLM_52, "--set", "kv_format=fp8_raw", "--pp", "39,39", "--memory", "10GiB"),
        *("--draft", f"{GQA},config={draft},page_size=48"),
    )
    assert [stage["bytes_per_token"] for stage in found["stages"]] == [24048, 23652 + 4096]
    assert [len(stage["layers"]) for stage in found["stages"]] == [1, 2]
    assert (found["granule"], found["stages"][1]["decides"]) == (192, True)
    fixed = 64 * 23652 + 48 * 4096
    assert found["tokens"] == (10 * GIB - fixed) // (192 * 27748) * 192


def test_several_drafts(tmp_path: Path) -> None:
    """One page of 16 slots and a reserved one: tensors of 2 x 32,768 bytes for K and V, of 1 and of 2 layers."""
    sides = [f"{GQA},config={written(tmp_path / f'{layers}.json', heads(layers))}" for layers in (1, 2)]
    words = (GQA, "--config", written(tmp_path / "t.json", heads(4)), "--tokens", 16)
    found = document(*words, "--draft", sides[0], "--draft", sides[1])
    assert [draft["total_bytes"] for draft in found["drafts"]] == [2 * 65536, 2 * 2 * 65536]
    assert found["total_bytes"] == 7 * 2 * 65536 == found["causes"]["data"] + found["causes"]["reserved"]
    assert found["allocator_rounding_bytes"] == 7 * 2 * (2 * 2**20 - 65536)


def test_a_draft_without_a_spec_has_the_shipped_one() -> None:
    found = document("--config", V3, "--tokens", 64, "--draft", f"config={V3},role=draft")
    assert (found["layout"], found["drafts"][0]["layout"]) == ("mla", "mla")


@settings(max_examples=100, deadline=None)
@given(draw=st.randoms(use_true_random=False), memory=st.integers(0, 2**36), requests=st.integers(0, 64))
def test_pools_fill_a_memory_together(draw: random.Random, memory: int, requests: int) -> None:
    """The most tokens of two pools: both fit, and with the next multiple of both granules they do not."""
    families = [draw.choice(FAMILIES), draw.choice(FAMILIES)]
    drawn = [family.draw(draw) for family in families]
    pools = [pool(family.name, config, **choices) for family, (config, choices) in zip(families, drawn, strict=True)]
    granule = lcm(*(own.layout.granule for own in pools))

    def price(tokens: int) -> int:
        return sum(
            family.price(config, choices, tokens, requests)
            for family, (config, choices) in zip(families, drawn, strict=True)
        )

    tokens = one(*pools).max_tokens(memory, requests)
    if price(0) > memory:
        assert tokens == 0
    elif price(granule * 10**9) == price(granule * 2 * 10**9) <= memory:
        assert tokens == UNBOUNDED
    else:
        assert tokens % granule == 0 and price(tokens) <= memory < price(tokens + granule)
    alone = [one(own).max_tokens(memory, requests) for own in pools]
    assert alone == [own.module.max_tokens(own.layout, memory, requests) for own in pools]
    assert all(own.module.UNBOUNDED == UNBOUNDED for own in pools)
    stages = Deployment(tuple(Stage((own,)) for own in pools))
    expected = min(alone)
    assert stages.max_tokens(memory, requests) == (
        expected if expected == UNBOUNDED else min(each // granule * granule for each in alone if each != UNBOUNDED)
    )


# Text


def test_a_budget_of_drafts_and_stages_in_text(tmp_path: Path) -> None:
    draft = written(tmp_path / "d.json", heads(1))
    done = run(
        *("budget", GLM_DSA, "--config", GLM_52, "--pp", 2, "--tokens", 6400, "--requests", 10),
        *("--draft", f"{GQA},config={draft},split_kv=false"),
    )
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[2] == "draft gqa: kv_format bf16, kv_order nhd, page_size 16, tp_size 1, split_kv false, role target,"
    for line in (
        "  tokens                         6,400        a multiple of 64",
        "  requests                          10        at a time",
        "  context                          640        tokens for each of them, in whole pages",
        "  stage  layers          bytes per token        total",
        "  1      39-77, draft 0           30,868  199,334,144",
        "  kv (draft)  token         1       4,096      65,536  6,416   26,279,936",
        "  kv (draft)   26,214,400          0     65,536",
        "  config    of draft gqa: num_hidden_layers 1, num_key_value_heads 8, head_dim 128, v_head_dim 128",
    ):
        assert line in lines, done.out


def huge() -> Iterator[list[str]]:
    for name, config in (
        ("dsv4", {"num_hidden_layers": 43, "num_nextn_predict_layers": 1, "compress_ratios": [0, 4, 128] * 14 + [4]}),
        ("gqa", heads(61)),
    ):
        if name == "dsv4":
            config |= {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
        for amount in (
            ["--memory", "80GiB", "--memory", "8TiB", "--context", "1000000"],
            ["--memory", "900000000000TiB", "--memory", "80GiB", "--pp", "20", "--requests", "1"],
            ["--tokens", "999999999999999744", "--requests", "999999999999999999"],
        ):
            yield [GQA if name == "gqa" else str(LANGUAGE / f"{name}.yaml"), json.dumps(config), *amount]


@pytest.mark.parametrize("argv", [*huge()], ids=lambda argv: " ".join((Path(argv[0]).stem, *argv[2:])))
def test_text_fits_100_columns(tmp_path: Path, argv: list[str]) -> None:
    spec, config, *amount = argv
    done = run("budget", spec, "--config", written(tmp_path / "c.json", config), *amount)
    too_small = (  # 61 layers of 4,096 bytes a slot, 16 slots reserved
        "warning[KV404]: `80GiB` is too small for one request of 1,000,000 tokens\n"
        f"  = note: one request takes {61 * 4096 * 1_000_016:,} bytes, reserved pages included\n"
    )
    assert (done.status, done.err) == (0, too_small if "--context" in amount and spec == GQA else "")
    assert max(map(len, done.out.splitlines())) <= 100
    assert not re.search(r"[ \t]$", done.out, re.MULTILINE) and done.out.endswith("\n")
    assert "\n\n\n" not in done.out and "\u00a0" not in done.out


# Warnings


GPT_OSS = str(CONFIGS / "gpt-oss-120b.json")
NO_REQUESTS = (
    "warning[KV408]: the slots of 18 layers grow with requests, and `--requests` is 0\n"
    "  = note: their cost is not included\n"
    "  = help: add `--requests N` or `--context N`\n"
)


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("--memory 80GiB", True),
        ("--memory 80GiB --requests 0", True),
        ("--tokens 1600", True),
        ("--tokens 1600 --pp 2", True),
        ("--memory 80GiB --requests 1", False),
        ("--memory 80GiB --context 8192", False),
        ("--memory 80GiB --set swa_pool=ratio", False),
    ],
)
def test_slots_of_requests_without_requests(words: str, warned: bool) -> None:
    """Half of the 36 layers of gpt-oss have a window."""
    pool = [] if "swa_pool" in words else ["--set", "swa_pool=requests"]
    done = run("budget", "--config", GPT_OSS, *pool, *words.split())
    assert (done.status, done.err) == (0, NO_REQUESTS if warned else "")
    printed = json.loads(run("budget", "--config", GPT_OSS, *pool, *words.split(), "--format", "json").out)
    assert [problem["code"] for problem in printed["problems"]] == ["KV408"] * warned


def test_layers_of_requests_of_drafts_count(tmp_path: Path) -> None:
    one = written(tmp_path / "c.json", {**heads(1), "model_type": "mistral", "sliding_window": 4096})
    side = f"config={one},swa_pool=requests"
    done = run("budget", "--config", GLM_52, "--tokens", 64, "--draft", side)
    assert done.err.startswith("warning[KV408]: the slots of 1 layer grow with requests, and `--requests` is 0\n")


@pytest.mark.parametrize(
    ("size", "hint"),
    [
        ("80", "  = help: a size without a unit is in bytes: did you mean `80GiB`?\n"),
        ("1048575", "  = help: a size without a unit is in bytes: did you mean `1048575GiB`?\n"),
        ("1048576", ""),
        ("80kB", ""),
    ],
)
def test_a_size_without_its_unit(size: str, hint: str) -> None:
    done = run("budget", "--config", GLM_52, "--memory", size)
    assert done.status == 0
    assert done.err == f"warning[KV404]: `{size}` is smaller than the fixed cost of 3,452,160 bytes\n{hint}"


# Usage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--memory 1GiB --context 0", "--context: expected an integer of at least 1, found `0`"),
        ("--memory 1GiB --context -1", "--context: expected an integer of at least 1, found `-1`"),
        ("--memory 1GiB --context 1e5", "--context: expected an integer of at least 1, found `1e5`"),
        ("--memory 1GiB --requests x", "--requests: expected an integer of at least 0, found `x`"),
        ("--memory 1GiB --requests 1 --context 1", "argument --context: not allowed with argument --requests"),
        ("--memory 1GiB --memory 2gib", "`2gib` is not a size"),
        ("--memory 1GiB --memory 2GiB --tokens 64", "argument --tokens: not allowed with argument --memory"),
        ("--memory 1GiB --pp 0", "--pp 0: expected 1 to 78 stages: the model has 78 layers"),
        ("--memory 1GiB --pp 79", "--pp 79: expected 1 to 78 stages: the model has 78 layers"),
        ("--memory 1GiB --pp two", "--pp two: expected an integer of at least 0, found `two`"),
        ("--memory 1GiB --pp 39,", "--pp 39,: expected an integer of at least 0, found ``"),
        ("--memory 1GiB --pp 39,38", "--pp 39,38: the stages have 77 layers, and the model has 78 layers"),
        ("--memory 1GiB --pp 39,40", "--pp 39,40: the stages have 79 layers, and the model has 78 layers"),
        (
            "--memory 1GiB --pp 2 --set start_layer=3",
            "--pp 2: it sets start_layer and end_layer: leave out `--set start_layer=3`",
        ),
        (
            "--memory 1GiB --pp 2 --set end_layer=3",
            "--pp 2: it sets start_layer and end_layer: leave out `--set end_layer=3`",
        ),
        ("--memory 1GiB --draft a.yaml,fp8", "--draft: a.yaml,fp8: expected K=V, found `fp8`"),
        (
            "--tokens 32 --draft SPEC,page_size=48",
            "tokens must be a non-negative multiple of 192, not 32; the nearest are 0 and 192",
        ),
    ],
)
def test_usage(tmp_path: Path, words: str, message: str) -> None:
    draft = f"{GQA},config={written(tmp_path / 'd.json', heads(1))}"
    argv = [word.replace("SPEC", draft) for word in words.split()]
    found = refusal(GLM_DSA, "--config", GLM_52, *argv)
    assert re.sub(r" \(.*\)$", "", found) == message


def test_a_model_without_layers_has_no_stages(tmp_path: Path) -> None:
    config = written(tmp_path / "c.json", heads(0))
    assert refusal(GQA, "--config", config, "--memory", "1GiB", "--pp", 1) == "--pp 1: the model has 0 layers"


def test_what_is_wrong_with_a_draft_is_said_of_its_file(tmp_path: Path) -> None:
    draft = written(tmp_path / "d.json", {})
    done = run("budget", MLA, "--config", V3, "--tokens", 0, "--draft", f"{MLA},config={draft}", "--format", "concise")
    assert done.status == 1
    assert f"{draft}: error[KV401]: num_hidden_layers is missing from the config\n" in done.err


# The page


def test_commands_of_the_page_print_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = re.findall(r"^```console\n\$ kvgen ([^\n]*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(shown) == PAGE.count("```console") == 4
    for command, output in shown:
        assert run(*shlex.split(command)) == Done(0, output, "")


def test_the_page_names_every_option_cause_and_key() -> None:
    options = set(re.findall(r"--[a-z]+", run("budget", "--help").out)) - {"--help", "--config", "--format"}
    assert options == set(re.findall(r"^\| `(--\w+)", PAGE, re.MULTILINE))
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert named == set(Causes().as_dict()) | set(document(MLA, "--config", V3, "--tokens", 0))


def test_the_page_names_the_formats_and_ranks_of_every_layout() -> None:
    entries = json.loads(run("specs", "--format", "json").out)["specs"]
    found = {}
    for entry in entries:
        choices = dict(re.fullmatch(r"(\w+)(?: \((.*)\))?", choice).groups() for choice in entry["choices"])
        found[entry["layout"]] = (choices["kv_format"].replace(" | ", ", "), "tp_size" in choices)
    shown = re.findall(r"^\| ([a-z_, ]+) \| ([a-z0-9_, ]+) \| (none|`tp_size`)", PAGE, re.MULTILINE)
    assert {name: (formats, ranks != "none") for names, formats, ranks in shown for name in names.split(", ")} == found


def test_windows_of_the_page() -> None:
    """gpt-oss: 18 layers of each kind, 8 heads of 64 + 64 values of 2 bytes: 2,048 bytes in each."""
    pages = -(-(128 - 1 + 2048 - 1) // 16) + 1
    request = pages * 16 * 18 * 2048
    assert f"{128 - 1 + 2048:,} tokens" in PAGE and f"{pages} pages" in PAGE and f"{request:,} bytes" in PAGE
    requests = (80 * GIB - 2 * 16 * 18 * 2048) // (131072 * 18 * 2048 + request)
    assert requests == 17 and f" {requests * request:,} " in PAGE
    words = ["--config", GPT_OSS, "--memory", "80GiB", "--context", 131072]
    for ratio, expected in ((Fraction(1, 10), 16), (Fraction(1, 2), 11), (0, 17)):
        held = (80 * GIB - 2 * 16 * 18 * 2048) // ((1 + ratio) * 131072 * 18 * 2048)
        found = document(*words, "--set", "swa_pool=ratio", "--set", f"swa_ratio={ratio}")
        assert found["requests"] == held == expected
    assert "With `swa_pool=ratio` and `swa_ratio=1/10`, 16 requests" in PAGE.replace("\n", " ")
    shared = document("--config", CONFIGS / "gemma-3n-e4b.json", "--tokens", 0)
    assert (found["choices"]["swa_pool"], shared["choices"]["swa_ratio"]) == ("ratio", 1)


def test_numbers_of_the_page() -> None:
    """GLM-5.2 in 80 GiB, 53,940 bytes a token; in two stages of raw fp8, 24,360 on the last; 71,424 with the draft."""
    for memory, cell in ((80 * GIB, 53940), (141 * 10**9, 53940), (80 * GIB, 24360), (10 * GIB, 71424)):
        tokens = (memory // (64 * cell) - 1) * 64
        assert f" {tokens:,} " in PAGE and f" {(tokens + 64) * cell:,}" in PAGE
    pages = 80 * GIB // (64 * 24360) - 1
    assert pages // (131072 // 64) == 26 and f" {pages // 26 * 64:,} " in PAGE
    assert Fraction(1592384, 64) // 32 * 64 == 49728


# Spaces that rest on others, memory of requests alone, and memory of the host

MAPPED = """\
kvgen: 1
layout: mapped
doc: Rows of four tokens each, in pages of the tokens or in a numbering of their own.
config: {num_layers: {type: int, from: num_hidden_layers}}
choices: {apart: {type: bool, default: false}}
layers: {body: num_layers}
spaces:
  token: {slots: tokens, page: 64}
  rows:
    - {when: apart, use: {slots: tokens / 4, page: 16}}
    - {use: {of: token, slot: offset // 4}}
formats: {row: {fields: {k: "u8[8]"}, page: [[k]]}}
buffers:
  kv: {format: row, space: token, layers: all}
  c4: {format: row, space: rows, layers: all}
"""


@pytest.mark.parametrize(("apart", "context"), [(False, 128), (True, 32)])
def test_a_space_that_is_mapped_to_another_bounds_no_context(tmp_path: Path, apart: bool, context: int) -> None:
    """128 tokens are two pages of 64, of which rows have 16 each; apart, every token of a request has a row."""
    spec, config = written(tmp_path / "mapped.yaml", MAPPED), written(tmp_path / "c.json", {"num_hidden_layers": 1})
    words = (spec, "--config", config, "--set", f"apart={str(apart).lower()}", "--tokens", 128)
    assert document(*words, "--requests", 1)["context_tokens"] == context
    assert document(*words, "--context", 32)["requests"] == (2 if not apart else 1)


STATES = """\
kvgen: 1
layout: states
doc: Nothing but a state of 100 bytes for each request and layer.
config: {num_layers: {type: int, from: num_hidden_layers}}
layers: {body: num_layers}
spaces: {state: {slots: requests, page: 1, reserve: 0}}
formats: {row: {fields: {k: "u8[100]"}, page: [[k]]}}
buffers: {s: {format: row, space: state, layers: all}}
"""


@pytest.mark.parametrize(("memory", "tokens"), [(0, 0), (1399, 0), (1400, UNBOUNDED)])
def test_a_memory_too_small_for_the_requests_holds_no_token(memory: int, tokens: int) -> None:
    """7 requests take 7 x 2 x 100 bytes; where they fit, tokens cost nothing."""
    made = compile_spec("states.yaml", lambda file: STATES.encode())
    states = Pool(made, made.namespace.Layout.from_config({"num_hidden_layers": 2}))
    assert states.bytes_for(0, 7) == 1400
    assert Stage((states,)).max_tokens(memory, 7, 1) == one(states).max_tokens(memory, 7) == tokens


def test_a_draft_has_host_memory_of_its_own() -> None:
    """HiSparse at ratio 3: of 78 layers, and of one body layer of the draft, 3 x 656 bytes a token lie in the host.

    Both have a reserved page of 64 slots there.
    """
    words = (GLM_DSA, "--config", GLM_52, "--set", "host_to_device_ratio=3", "--tokens", 640)
    alone = document(*words)
    assert alone["host_bytes"] == 78 * (3 * 640 + 64) * 656
    side = f"{GLM_DSA},config={GLM_52},host_to_device_ratio=3,end_layer=1"
    found = document(*words, "--draft", side)
    assert found["drafts"][0]["host_bytes"] == (3 * 640 + 64) * 656
    assert found["host_bytes"] == 79 * (3 * 640 + 64) * 656


BLOCKS = """\
kvgen: 1
layout: blocks
doc: Pages of 4 slots, of which the allocator hands out 4 at a time and never the first 8.
config: {num_layers: {type: int, from: num_hidden_layers}}
layers: {body: num_layers}
spaces: {token: {slots: tokens, page: 16, reserve: 2}}
formats: {row: {fields: {k: "u8[3]"}, page: [[k], {align: 16}]}}
buffers: {kv: {format: row, space: token, block: 4, layers: all}}
"""


def test_reserved_pages_of_several_blocks(tmp_path: Path) -> None:
    """Three layers of 48 tokens: 12 blocks of 12 bytes and 4 behind them, and 2 x 4 blocks that are reserved."""
    spec, config = written(tmp_path / "blocks.yaml", BLOCKS), written(tmp_path / "c.json", {"num_hidden_layers": 3})
    found = document(spec, "--config", config, "--tokens", 48)
    assert found["total_bytes"] == 3 * (12 + 8) * 16
    assert {name: number for name, number in found["causes"].items() if number} == {
        "data": 3 * 12 * 12,
        "page_padding": 3 * 12 * 4,
        "reserved": 3 * 8 * 16,
    }
