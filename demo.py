"""What `make demo` shows: build the shipped layout, price GLM-5.2 for 80 GiB, check each price, and run a pool.

Prices are held against pools on torch's `meta` device, which sizes tensors without memory; the pool that runs holds the
first layers of GLM-5.2 on the CPU. No GPU is needed.
"""

import importlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from kvgen.cli import main

ROOT = Path(__file__).resolve().parent
SPEC = ROOT / "specs" / "glm_dsa.yaml"
CONFIG = ROOT / "tests" / "data" / "configs" / "glm-5.2.json"
MEMORY = "80GiB"
LAYERS = 8
TOKENS = 4096


def kvgen(*arguments: str) -> str:
    """Run one kvgen command in this process; what it prints."""
    stdout = io.StringIO()
    status = main(arguments, io.BytesIO(), stdout, sys.stderr)
    if status:
        sys.exit(status)
    return stdout.getvalue()


def demo() -> None:
    """Build, price, allocate, compare; then store, move, offload and reload."""
    print(f"$ kvgen build {SPEC.relative_to(ROOT)}")
    print(kvgen("build", str(SPEC), "-o", str(ROOT / "generated")).replace(f"{ROOT}/", ""))
    sys.path.insert(0, str(ROOT))
    glm_dsa = importlib.import_module("generated.glm_dsa")
    show_prices(glm_dsa)
    run_pool(glm_dsa)


def show_prices(glm_dsa: ModuleType) -> None:
    """What fits, and that a pool allocates exactly what was priced."""
    print(f"GLM-5.2 in {MEMORY}, priced by `kvgen budget`, against the bytes of a pool on the meta device:\n")
    print("  kv_format   indexers  bytes/token     tokens     priced bytes  allocated bytes")
    for kv_format in ("bf16", "fp8_scaled", "fp8_raw"):
        for elide_shared in (False, True):
            settings = (f"--set=kv_format={kv_format}", f"--set=elide_shared={str(elide_shared).lower()}")
            budget = ("budget", str(SPEC), "--config", str(CONFIG), "--memory", MEMORY, *settings, "--format", "json")
            priced = json.loads(kvgen(*budget))
            layout = glm_dsa.Layout.from_config(CONFIG, kv_format=kv_format, elide_shared=elide_shared)
            allocated = glm_dsa.Pool(layout, priced["tokens"], device="meta").num_bytes()
            indexers = len(layout.layers("index_k"))
            print(
                f"  {kv_format:<10}  {indexers:>8}  {priced['bytes_per_token']:>11,}  {priced['tokens']:>9,}"
                f"  {priced['total_bytes']:>15,}  {allocated:>15,}"
            )
            if allocated != priced["total_bytes"] or layout.fingerprint != priced["fingerprint"]:
                sys.exit("the pool does not allocate what was priced")
    print("\nEvery pool allocates exactly what was priced, reserved pages included.\n")


def run_pool(glm_dsa: ModuleType) -> None:
    """Every token through a pool on the CPU and back, each step verified and timed."""
    import torch

    torch.manual_seed(0)
    layout = glm_dsa.Layout.from_config(CONFIG, end_layer=LAYERS)
    pool = glm_dsa.Pool(layout, 2 * TOKENS)
    latent, rope = torch.randn(TOKENS, 512).bfloat16(), torch.randn(TOKENS, 64).bfloat16()
    key = torch.randn(TOKENS, 128).bfloat16()
    slots = 64 + torch.randperm(2 * TOKENS)
    here, there = slots[:TOKENS], slots[TOKENS:]
    nbytes = TOKENS * glm_dsa.cell_size(layout)
    source = torch.zeros(nbytes, dtype=torch.uint8)
    memcpy = seconds(lambda: source.clone())

    def store() -> None:
        for layer in layout.held:
            pool.set_mla_kv_buffer(layer, here, latent, rope)
        for layer in layout.layers("index_k"):
            pool.store_index_k(layer, here, key)

    def verify(condition: bool, what: str) -> str:
        return what if condition else sys.exit(f"\nthe pool is wrong: {what} does not hold")

    def everything_at(loc: torch.Tensor) -> list[torch.Tensor]:
        return [bytes_ for layer in layout.held for bytes_ in pool.get_mla_kv_buffer(layer, loc)] + [pool.pack(loc)]

    def report(name: str, run: Callable[[], object], check: Callable[[], str]) -> None:
        taken = seconds(run)
        speed = f"{nbytes / taken / 1e9:8.2f}  {memcpy / taken:9.1%}"
        print(f"  {name:<8}  {nbytes:>11,}  {taken * 1e3:8.1f}  {speed}   {check()}")

    print(f"{TOKENS:,} tokens through a pool of the first {LAYERS} layers of GLM-5.2, fp8_scaled, on this CPU:\n")
    print("  step            bytes        ms      GB/s  of memcpy   verified")

    def check_store() -> str:
        loads = [pool.get_mla_kv_buffer(layer, here, torch.float32) for layer in layout.held]
        blocks = latent.float().view(TOKENS, 4, 128)
        step = blocks.abs().amax(2, keepdim=True) / 448 * 16.001  # half the distance between the largest codes, rounded
        exact = all(torch.equal(loaded[:, 0].bfloat16(), rope) for _, loaded in loads)
        close = all(((loaded.view(TOKENS, 4, 128) - blocks).abs() <= step).all() for loaded, _ in loads)
        return verify(exact and close, "rope bit by bit, latent to half a step of e4m3")

    report("store", store, check_store)
    before = everything_at(here)
    report(
        "move",
        lambda: pool.move_kv_cache(there, here),
        lambda: verify(all(map(torch.equal, everything_at(there), before)), "all fields at their new slots"),
    )
    copy = pool.get_cpu_copy(there)
    packed = [pool.pack(own) for own in there.split(copy["part_slots"])]
    report(
        "offload",
        lambda: pool.get_cpu_copy(there),
        lambda: verify(all(map(torch.equal, copy["staging"], packed)), "the copy holds every field"),
    )
    pool.clear_pages(torch.arange(2 * TOKENS // 64 + 1))
    back = here.flip(0)
    report(
        "reload",
        lambda: pool.load_cpu_copy(copy, back),
        lambda: verify(all(map(torch.equal, everything_at(back), before)), "into cleared pages, other slots"),
    )


def seconds(run: Callable[[], object]) -> float:
    """The median time of five runs after one more."""
    run()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    demo()
