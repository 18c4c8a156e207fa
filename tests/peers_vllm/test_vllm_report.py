"""docs/peers.md: what the witnesses say of the layouts, with the versions of what ran; written with --update-report."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from deployments import block_bytes, pages_of
from test_vllm_pages import GQA, HYBRIDS, LATENT, MEMORIES, Case
from test_vllm_planner import DIFFERENCES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "peers.md"


def test_report(request: pytest.FixtureRequest) -> None:
    text = report()
    if request.config.getoption("--update-report"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text, "stale: make test-vllm PEERS=--update-report"


def test_both_witnesses_price_the_same() -> None:
    """The bytes per token that SGLang counts are those of vLLM's block, where both serve a model in one format."""
    priced = (DOCS / "sglang-report.md").read_text(encoding="utf-8")
    section = priced.split("## DeepSeek-V3, ")[1].split("##")[0]
    rows = {
        **dict(re.findall(r"^\| (\w+) \| ([\d,]+) \|", section, re.MULTILINE)),
        "fp8_scaled": re.search(r"^\| fp8_scaled \| 21 of 78 layers own one \| ([\d,]+) \|", priced, re.MULTILINE)[1],
    }
    models = {"bf16": "deepseek-v3", "fp8_raw": "deepseek-v3", "fp8_scaled": "glm-5.2"}
    cases = {
        case.kv_format: case
        for case in LATENT
        if (case.model, case.page, case.ranks) == (models[case.kv_format], 64, 1)
    }
    assert cases.keys() == rows.keys() == models.keys()
    for kv_format, case in cases.items():
        assert block_bytes(case.vllm.plan(MEMORIES[0])) == 64 * int(rows[kv_format].replace(",", ""))


def report() -> str:
    python = ".".join(map(str, sys.version_info[:2]))
    vllm = f"vLLM {version('vllm')}"
    versions = f"{vllm}, torch {torch.__version__}, transformers {version('transformers')}, Python {python}"
    asked = "its model classes, attention backends and planner"
    return f"""# The witnesses

A number of a layout can be wrong twice, in the spec and in what its author expects of it. `make test-peers` asks
engines instead: their own code, unedited, on a CPU, each in an environment of its own. This page is checked by it.

| witness | what is asked | what is held to it |
|---|---|---|
| SGLang 0.5.23 (`tests/peers/`, `make test-sglang`) | its pools and its budget | `glm_dsa`, `mla` |
| {vllm} (`tests/peers_vllm/`, `make test-vllm`) | {asked} | {layouts()} |

[The report on SGLang](sglang-report.md) is about one pool in place of another: every byte after each operation, and
what SGLang pays for. Here no byte is written. vLLM is asked which layers keep something, how many bytes a page of it
has in each, and how many pages a memory holds; the order of bytes in a page is not compared. Where both serve a model
in one format, they price a token alike: `test_both_witnesses_price_the_same`.

## vLLM

{versions}.

A block is a page. vLLM makes each model from a config of `tests/data/configs` on the device `meta`, without weights,
takes the device for an H200 and its rank for one of so many, and plans as its engine does. Of models with other parts
the language model is made.

Not compared: draft layers, pipeline stages, HiSparse, layers with state.

### Layers of one kind

For each model, the layers are the same and so are the bytes of each (`test_layers_and_their_pages`), and there are as
many pages in 10, 40 and 80 GiB, the reserved one included, as vLLM has blocks (`test_pages_of_a_memory`).

| layout | model | format | vLLM's dtype | page | ranks | bytes of all layers | pages in 10, 40, 80 GiB |
|---|---|---|---|---|---|---|---|
{rows()}

So it is of two formats that FlashInfer's kernels read, which are not there on a CPU: the layers of the models are asked
for them, and the backends of those kernels. `fp8_raw` of `glm_dsa` is in `test_raw_fp8_rows_beside_an_indexer`, `nvfp4`
of `gqa` in `test_nvfp4`. The rules by which layers share the top-k are in `test_rules_of_sharing`; heads that ranks do
not divide are refused by both (`test_heads_that_ranks_do_not_divide`).

### Layers with a window

For each model, the layers of either kind are the same and so are the bytes of each (`test_layers_and_their_pages`). A
request needs as many pages of a layer with a window as vLLM admits blocks for (`test_pages_of_a_window`). How many
blocks a memory has is another matter, see the differences. Of a model whose last layers read what others keep, those
that keep something are counted (`test_layers_that_keep_nothing_of_their_own`); Gemma 4 with such layers, and with heads
of one number in all, is in `test_gemma_4_of_other_kinds`.

| layout | model | format | vLLM's dtype | page | ranks | full layers | bytes of each | with a window | bytes of each |
|---|---|---|---|---|---|---|---|---|---|
{hybrid_rows()}

### The differences

Each is a test of that name in `tests/peers_vllm/test_vllm_planner.py`.

{differences()}
"""


def layouts() -> str:
    return ", ".join(dict.fromkeys(f"`{names(case)[0]}`" for case in LATENT + GQA + HYBRIDS))


def names(case: Case) -> list[str]:
    layout = case.layout.__name__.removeprefix("generated.")
    return [layout, case.model, case.kv_format, case.cache_dtype, f"{case.page}", f"{case.ranks}"]


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rows() -> str:
    found = []
    for case in LATENT + GQA:
        plans = [case.vllm.plan(memory) for memory in MEMORIES]
        blocks = ", ".join(f"{plan.num_blocks}" for plan in plans)
        found.append(line([*names(case), f"{block_bytes(plans[0]):,}", blocks]))
    return "\n".join(found)


def hybrid_rows() -> str:
    found = []
    for case in HYBRIDS:
        pages = pages_of(case.vllm.specs)
        cells = names(case)
        for kind in ("full", "window"):
            own = [nbytes for (what, _), nbytes in pages.items() if what == kind]
            (nbytes,) = set(own)
            cells += [f"{len(own)}", f"{nbytes:,}"]
        found.append(line(cells))
    return "\n".join(found)


def differences() -> str:
    return "\n".join(f"* `{name}`: {why}." for name, why in DIFFERENCES.items())
