"""Stores, gathers, moves and copies on a CPU: the generated pool against SGLang's, obvious torch code, and memcpy.

4,096 tokens of each of the 78 layers of GLM-5.2, all in one run, in turns; medians. A ratio says how long the other
takes for what takes the generated pool 1. Run by `make bench-cpu`: SGLang has an environment of its own, and malloc is
told to keep what is freed, as pages that come anew from the kernel would be most of what is measured.

SGLang quantises packed rows, gathers rows and stores index keys by Triton kernels alone, which do not run on a CPU:
those lines are without it. A move of the obvious code is of latent rows alone; the others move index keys too.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "peers"))

import conftest  # noqa: F401  SGLang on a CPU
import torch
from deployments import DTYPES, E4M3, SHARING, Deployment, build, build_own, glm_5_2

TOKENS, POOL_TOKENS, LAYERS, ROUNDS = 4096, 16384, 78, 9
Runs = dict[str, Callable[[], object]]


def medians(runs: Runs) -> dict[str, float]:
    """Seconds of each; the first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(own[1:]) for name, own in taken.items()}


def report(what: str, slot_bytes: int, runs: Runs) -> None:
    """A line with the time of kvgen's run and the others' in terms of it."""
    source = torch.ones(TOKENS * slot_bytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    seconds = medians({**runs, "memcpy": lambda: target.copy_(source)})
    own = seconds.pop("kvgen")
    ratios = "".join(f"{name} {other / own:5.2f}  ".rjust(16) for name, other in seconds.items())
    print(f"  {what:<10}{len(source) / 1e6:8.1f} MB{own * 1e3:10.1f} ms  {ratios}".rstrip(), flush=True)


def quantised(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Packed rows as one would write them in torch."""
    blocks = nope.view(TOKENS, 4, 128).float()
    scales = blocks.abs().amax(-1, keepdim=True) / 448
    codes = (blocks / scales).clamp(-448, 448).to(E4M3)
    parts = (codes.view(TOKENS, 512), scales.view(TOKENS, 4), rope.view(TOKENS, 64))
    return torch.cat([part.view(torch.uint8) for part in parts], -1)[:, None]


def dequantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse."""
    codes, scales, rope = rows[:, 0].split([512, 16, 128], -1)
    blocks = codes.view(E4M3).view(-1, 4, 128).float() * scales.contiguous().view(torch.float32)[:, :, None]
    return blocks.view(-1, 1, 512).bfloat16(), rope.contiguous().view(torch.bfloat16)[:, None]


def bench(kv_format: str, own: Any, pool: Any) -> None:
    slots = torch.randperm(POOL_TOKENS) + 64
    here, there = slots[:TOKENS], slots[TOKENS : 2 * TOKENS]
    pages = torch.randperm(POOL_TOKENS // 64)[: TOKENS // 64] + 1
    paged = (pages[:, None] * 64 + torch.arange(64)).flatten()
    nope, rope = torch.randn(TOKENS, 1, 512).bfloat16(), torch.randn(TOKENS, 1, 64).bfloat16()
    layers = [SimpleNamespace(layer_id=layer_id) for layer_id in range(LAYERS)]
    rows = {
        "bf16": lambda: torch.cat((nope, rope), -1),
        "fp8_raw": lambda: torch.cat((nope, rope), -1).to(E4M3).view(torch.uint8),
        "fp8_scaled": lambda: quantised(nope, rope),
    }[kv_format]
    values = {
        "bf16": lambda rows: rows.split([512, 64], -1),
        "fp8_raw": lambda rows: rows.view(E4M3).bfloat16().split([512, 64], -1),
        "fp8_scaled": dequantised,
    }[kv_format]

    def obvious_store() -> None:
        for buffer in own.kv_buffer:
            buffer[here] = rows()

    def obvious_move() -> None:
        for buffer in own.kv_buffer:
            buffer[there] = buffer[here]

    store: Runs = {
        "kvgen": lambda: [pool.set_mla_kv_buffer(layer, here, nope, rope) for layer in layers],
        "obvious": obvious_store,
    }
    if kv_format != "fp8_scaled":
        store["SGLang"] = lambda: [own.set_mla_kv_buffer(layer, here, nope, rope) for layer in layers]
    latent_bytes = own.get_contiguous_buf_infos()[2][0] // 64 * LAYERS
    slot_bytes = latent_bytes + sum(own.get_state_buf_infos()[2]) // 64
    print(f"{kv_format}:")
    report("store", latent_bytes, store)
    report(
        "gather",
        latent_bytes,
        {
            "kvgen": lambda: [pool.get_mla_kv_buffer(layer, here, torch.bfloat16) for layer in layers],
            "obvious": lambda: [values(buffer[here]) for buffer in own.kv_buffer],
        },
    )
    report(
        "move",
        slot_bytes,
        {
            "kvgen": lambda: pool.move_kv_cache(there, here),
            "obvious": obvious_move,
            "SGLang": lambda: own.move_kv_cache(there, here),
        },
    )
    copies = [each.get_cpu_copy(paged) for each in (pool, own)]
    report(
        "copy",
        slot_bytes,
        {"kvgen": lambda: pool.get_cpu_copy(paged), "SGLang": lambda: own.get_cpu_copy(paged)},
    )
    report(
        "copy back",
        slot_bytes,
        {
            "kvgen": lambda: pool.load_cpu_copy(copies[0], paged),
            "SGLang": lambda: own.load_cpu_copy(copies[1], paged),
        },
    )


def main() -> None:
    torch.cuda.synchronize = lambda *arguments: None  # SGLang's DSA pool waits for CUDA on every device
    torch.manual_seed(0)
    torch.set_num_threads(2)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {TOKENS:,} tokens x {LAYERS} layers")
    for kv_format in DTYPES:
        with Deployment(kv_format, glm_5_2(**SHARING)).serving() as configurator:
            bench(kv_format, build_own(configurator, POOL_TOKENS), build(configurator, POOL_TOKENS))


if __name__ == "__main__":
    main()
