"""docs/sglang-report.md: what a run found, with the versions of what ran. Written with `--update-report`."""

import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from deployments import (
    DTYPES,
    PAGE,
    SHARING,
    Deployment,
    build,
    build_own,
    deepseek_v3,
    glm_5_2,
    own_cell_size,
)
from pairs import DIFFERENCES
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

REPORT = Path(__file__).parents[2] / "docs" / "sglang-report.md"
MODELS = {"an indexer in all layers": glm_5_2(), "21 of 78 layers own one": glm_5_2(**SHARING)}
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
{rows("generated.sglang.glm_dsa", DTYPES, MODELS)}

## DeepSeek-V3, 61 layers, with the pool of `mla`

| row | bytes per token | SGLang's pool beyond its price | the generated pool beyond its | tokens in 80 GiB |
|---|---|---|---|---|
{rows("generated.sglang.mla", ("bf16", "fp8_raw"), {"": deepseek_v3()})}

Pages are of 64 tokens.

## The same bytes

After each of these, on the same inputs, every byte of every buffer is the same in both: `set_mla_kv_buffer` (bf16,
and e4m3 codes where rows have no scales; slots as a tensor and as `KVWriteLoc`), `set_kv_buffer`,
`set_index_k_scale_buffer`, `move_kv_cache`, `get_cpu_copy` and `load_cpu_copy` of whole pages. What these return is the
same: `get_mla_kv_buffer`, `get_index_k_scale_buffer`, `get_key_buffer`, `get_value_buffer`,
`get_index_k_with_scale_buffer`. Infinities, NaN, zeros and tiny numbers in packed rows are under the differences.

## The differences

Each is a test of that name in `tests/peers/test_sglang_bytes.py`, run with the pools that it is said of.

{differences()}
"""


def rows(adapter: str, formats: Iterable[str], models: Mapping[str, Any]) -> str:
    """A row for each format and model, named where there are several."""
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVGEN_SGLANG_POOL", adapter)
        for kv_format, (model, config) in product(formats, models.items()):
            with Deployment(kv_format, config, 0, config.num_hidden_layers).serving() as configurator:
                own, pool = build_own(configurator, 128), build(configurator, 128)
                pricing = DefaultPoolConfigurator(configurator)
                assert pricing._cell_size == own_cell_size(configurator)
                beyond = own.get_kv_size_bytes() - 128 * own_cell_size(configurator)
                exact = pool.get_kv_size_bytes() - 128 * pricing._cell_size - pricing._fixed_overhead_bytes
                tokens = pricing.calculate_pool_sizes(MEMORY, PAGE).max_total_num_tokens
                numbers = [f"{number:,}" for number in (pricing._cell_size, beyond, exact, tokens)]
                found.append(f"| {' | '.join([kv_format, *([model] if model else []), *numbers])} |")
    return "\n".join(found)


def differences() -> str:
    lines = []
    for name, (why, pools) in DIFFERENCES.items():
        kinds = " and ".join(dict.fromkeys(own.split()[0].upper() for own in pools))
        lines.append(f"* `test_{name}` ({kinds}): {why}.")
    return "\n".join(lines)
