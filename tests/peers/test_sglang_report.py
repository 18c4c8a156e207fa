"""docs/sglang-report.md: what a run found, with the versions of what ran. Written with `--update-report`."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import test_sglang_bytes  # noqa: F401  for its differences
import test_sglang_mha  # noqa: F401
import torch
from deployments import (
    DTYPES,
    HEAD_DTYPES,
    PAGE,
    SHARING,
    Deployment,
    build,
    build_own,
    deepseek_v3,
    glm_5_2,
    model_of,
    own_cell_size,
)
from pairs import DIFFERENCES
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

REPORT = Path(__file__).parents[2] / "docs" / "sglang-report.md"
GLM = {
    "an indexer in all layers": Deployment(config=glm_5_2()),
    "21 of 78 layers own one": Deployment(config=glm_5_2(**SHARING)),
}
HEADS = {
    f"{name} on {ranks} ranks" if ranks > 1 else name: Deployment(end=layers, model=model_of(name), ranks=ranks)
    for name, layers in (("llama-3.1-8b", 32), ("qwen3-30b-a3b", 48))
    for ranks in (1, 4, 16)
}
MEMORY = 80 * 2**30


def test_report(request: pytest.FixtureRequest) -> None:
    text = report()
    if request.config.getoption("--update-report"):
        REPORT.write_text(text, encoding="utf-8")
    assert REPORT.read_text(encoding="utf-8") == text, "stale: make test-peers PEERS=--update-report"


def report() -> str:
    python = ".".join(map(str, sys.version_info[:2]))
    versions = f"SGLang {version('sglang')}, torch {torch.__version__}, triton {version('triton')}, Python {python}"
    return f"""# SGLang's pools and the generated ones

What `make test-peers` finds, on a CPU, with {versions}.
The run compares SGLang's own, unedited code with the generated pool behind its hook; this page is checked by it.

## GLM-5.2, 78 layers: price and allocation

The price is what SGLang's budget counts for 128 tokens, by its own functions and by the generated ones; the pools are
built by SGLang's configurator. SGLang's price leaves out the reserved page.

| row | indexers | bytes per token | SGLang's pool beyond its price | the generated pool beyond its | tokens in 80 GiB |
|---|---|---|---|---|---|
{rows("generated.sglang.glm_dsa", DTYPES, GLM)}

## DeepSeek-V3, 61 layers, with the pool of `mla`

| row | bytes per token | SGLang's pool beyond its price | the generated pool beyond its | tokens in 80 GiB |
|---|---|---|---|---|
{rows("generated.sglang.mla", ("bf16", "fp8_raw"), {"": Deployment(config=deepseek_v3(), end=61)})}

## Keys and values per head, with the pool of `gqa`

Llama-3.1-8B has 32 layers of 8 heads, Qwen3-30B-A3B 48 of 4; where there are more ranks than heads, each keeps one.

| row | model | bytes per token | SGLang's pool beyond its price | the generated pool beyond its | tokens in 80 GiB |
|---|---|---|---|---|---|
{rows("generated.sglang.gqa", HEAD_DTYPES, HEADS)}

Pages are of 64 tokens.

## The same bytes

After each of these, on the same inputs, every byte of every buffer is the same in both: `set_mla_kv_buffer` (bf16,
and e4m3 codes where rows have no scales; slots as a tensor and as `KVWriteLoc`), `set_kv_buffer`,
`set_index_k_scale_buffer`, `move_kv_cache`, `get_cpu_copy` and `load_cpu_copy` of whole pages. What these return is the
same: `get_mla_kv_buffer`, `get_index_k_scale_buffer`, `get_key_buffer`, `get_value_buffer`,
`get_index_k_with_scale_buffer`. Infinities, NaN, zeros and tiny numbers in packed rows are under the differences.

Of pools of keys and values per head: `set_kv_buffer` (bf16, e4m3 codes, other floats; with scales too, where they are
powers of two or the values no bf16), `set_kv_buffer_prefix_valid`, `move_kv_cache`, `get_cpu_copy` and
`load_cpu_copy`, and what `get_key_buffer`, `get_value_buffer` and `get_kv_buffer` return, with keys as wide as values
and wider.

## The differences

Each is a test of that name in `tests/peers/test_sglang_bytes.py`, those of MHA in `tests/peers/test_sglang_mha.py`, run
with the pools that it is said of.

{differences()}
"""


def rows(adapter: str, formats: Iterable[str], deployments: Mapping[str, Deployment]) -> str:
    """A row for each format and deployment, named where there are several."""
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVGEN_SGLANG_POOL", adapter)
        for kv_format, (name, deployment) in product(formats, deployments.items()):
            with replace(deployment, kv_format=kv_format).serving() as configurator:
                own, pool = build_own(configurator, 128), build(configurator, 128)
                pricing = DefaultPoolConfigurator(configurator)
                assert pricing._cell_size == own_cell_size(configurator)
                beyond = allocated(own) - 128 * own_cell_size(configurator)
                exact = allocated(pool) - 128 * pricing._cell_size - pricing._fixed_overhead_bytes
                tokens = pricing.calculate_pool_sizes(MEMORY, PAGE).max_total_num_tokens
                numbers = [f"{number:,}" for number in (pricing._cell_size, beyond, exact, tokens)]
                found.append(f"| {' | '.join([kv_format, *([name] if name else []), *numbers])} |")
    return "\n".join(found)


def allocated(pool: Any) -> int:
    """Bytes of a pool, which SGLang's of keys and values counts apart."""
    size = pool.get_kv_size_bytes()
    return sum(size) if isinstance(size, tuple) else size


def differences() -> str:
    lines = []
    for name, (why, pools) in DIFFERENCES.items():
        kinds = " and ".join(dict.fromkeys(own.split()[0].upper() for own in pools))
        lines.append(f"* `test_{name}` ({kinds}): {why}.")
    return "\n".join(lines)
