"""Kernels of the generated pools on a GPU: right first, then how long they take. Run by `make bench-gpu`.

Needs CUDA, and says so without; of packages, torch, triton and numpy alone. What is timed is held first against float64
and against the pool's own torch path, byte for byte, on random values, with memory that is poisoned around what is
written. Then it is timed for 1 to 131,072 tokens: calls are captured in a graph and replayed, so that of the host only
the start of a graph is measured, once for all its calls; the median counts. A line says what share of the card's copy
bandwidth the bytes are, those that have to be read and written, and how long others take in terms of it:

  torch   the obvious torch code
  pair    a kernel that quantises and one that scatters
  layers  a launch for each layer, where the pool has one for all
  copy    the device's own copy of as many bytes
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COUNTS = (1, 64, 1024, 16384, 131072)
LAYERS = 4  # of the operations on all layers
MOVED = 16384  # tokens of the largest of those
ROUNDS = 15  # replays of a graph; the median counts
CALLS = 8  # in a graph


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels of the generated pools on a GPU.")
    parser.add_argument("--json", default="bench-gpu.json", metavar="FILE", help="default: bench-gpu.json")
    arguments = parser.parse_args()
    try:
        import torch
        import triton
    except ImportError as error:
        print(f"bench-gpu needs CUDA, torch and triton: {error}")
        return 0
    if not torch.cuda.is_available():
        print("bench-gpu needs CUDA, and torch finds none here: nothing was measured")
        return 0
    checked = check("cuda", COUNTS)
    print(f"{checked} comparisons byte for byte and against float64: all equal\n", flush=True)
    card = torch.cuda.get_device_name()
    bandwidth = copy_bandwidth()
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"a copy of 1 GiB reads and writes {bandwidth / 1e9:,.0f} GB/s\n")
    print(f"{'operation':<34}{'tokens':>9}{'us':>10}{'MB':>10}{'share':>8}   ratios", flush=True)
    lines = []
    for case in cases("cuda", COUNTS):
        seconds = time_of(case.run)
        others = {name: time_of(run) / seconds for name, run in case.others.items()}
        others["copy"] = time_of(copying(case.nbytes)) / seconds
        share = case.nbytes / seconds / bandwidth
        ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in others.items())
        shown = f"{case.name:<34}{case.tokens:>9,}{seconds * 1e6:>10.2f}{case.nbytes / 1e6:>10.2f}{share:>8.0%}"
        print(f"{shown}   {ratios}", flush=True)
        lines.append(
            {
                "operation": case.name,
                "tokens": case.tokens,
                "seconds": seconds,
                "bytes": case.nbytes,
                "share_of_copy_bandwidth": share,
                "ratios": others,
            }
        )
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    document = {"card": card, **versions, "copy_bytes_per_second": bandwidth, "lines": lines}
    Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {arguments.json}")
    return 0


@dataclass
class Case:
    """An operation on some tokens, and others that do the same."""

    name: str
    tokens: int
    nbytes: int  # that have to be read and written
    run: Callable[[], object]
    others: dict[str, Callable[[], object]] = field(default_factory=dict)


# -- time


def time_of(run: Callable[[], object]) -> float:
    """Seconds of a call: CALLS of them in a graph, the median of its replays."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            run()
    taken = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken) / CALLS


def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    return 2**31 / time_of(copying(2**31))


def copying(nbytes: int) -> Callable[[], object]:
    """A copy that reads and writes so many bytes together."""
    import torch

    source = torch.ones(max(nbytes // 2, 1), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


# -- pools


DSA = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
HEADS = {"num_hidden_layers": 1, "num_key_value_heads": 8, "head_dim": 128}


def generated(name: str) -> Any:
    """A module of the checkout."""
    import importlib

    root = str(Path(__file__).parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module(f"generated.{name}")


def pool_of(name: str, tokens: int, device: str, backend: str = "triton", layers: int = 1, **choices: Any) -> Any:
    module = generated(name)
    config = (HEADS if name == "gqa" else DSA) | {"num_hidden_layers": layers}
    layout = module.Layout.from_config(config, **choices)
    return module.Pool(layout, -(-tokens // layout.granule) * layout.granule, device, backend=backend)


@dataclass(frozen=True)
class Kind:
    """A store and a load of one layer of a pool."""

    spec: str
    choices: dict[str, str]
    title: str
    buffer: str
    store: str
    load: str | None
    widths: tuple[tuple[int, ...], ...]  # of the values of a token

    def values(self, count: int, device: str) -> list[Any]:
        """Random bf16 of every size, with blocks of zeros among them."""
        import torch

        found = []
        for width in self.widths:
            own = torch.randn((count, *width), device=device)
            own *= torch.exp(3 * torch.randn((count,) + (1,) * len(width), device=device))
            own[::7] = 0
            found.append(own.bfloat16())
        return found

    def read(self, pool: Any, slots: Any, dtype: Any) -> tuple[Any, ...]:
        assert self.load is not None
        return getattr(pool, self.load)(0, slots, dtype)


MLA = {"buffer": "kv", "store": "set_mla_kv_buffer", "load": "get_mla_kv_buffer", "widths": ((512,), (64,))}
MHA = {"buffer": "kv", "store": "set_kv_buffer", "load": "load_kv", "widths": ((8, 128), (8, 128))}
KINDS = (
    *(Kind("glm_dsa", {"kv_format": own}, f"glm_dsa {own}", **MLA) for own in ("bf16", "fp8_scaled", "fp8_raw")),
    Kind("glm_dsa", {"kv_format": "bf16"}, "glm_dsa keys", "index_k", "store_index_k", None, ((128,),)),
    *(
        Kind("gqa", {"kv_format": own, "split_kv": "false", "page_size": "64"}, f"gqa {own}", **MHA)
        for own in ("bf16", "fp8", "int8", "mxfp8")
    ),
)


def choices_of(kind: Kind) -> dict[str, Any]:
    named = {"false": False, "64": 64}
    return {name: named.get(value, value) for name, value in kind.choices.items()}


# -- right


def check(device: str, counts: tuple[int, ...]) -> int:
    """Hold every operation against the pool's torch path and float64: the number of comparisons, or AssertionError."""
    import torch

    torch.manual_seed(0)
    done = 0
    for kind in KINDS:
        for count in counts:
            size = max(2 * count, 128)
            pools = [pool_of(kind.spec, size, device, backend, **choices_of(kind)) for backend in ("triton", "torch")]
            memories = [memory for pool in pools for memory in [pool.buffer(kind.buffer, 0)]]
            poison = torch.randint(0, 256, memories[0].shape, dtype=torch.uint8, device=device)
            slots = torch.randperm(size, device=device)[:count]  # one of them may be the reserved slot 0
            values = kind.values(count, device)
            for pool, memory in zip(pools, memories, strict=True):
                memory.copy_(poison)
                getattr(pool, kind.store)(0, slots, *values, skip_reserved=False)
            assert torch.equal(*memories), f"{kind.title}: a store of {count} tokens differs from torch"
            done += 1
            if kind.load is not None:
                read = [kind.read(pool, slots, torch.float32) for pool in pools]
                for name, own, other, value in zip("kv", *read, values, strict=True):
                    assert torch.equal(own, other), f"{kind.title}: a load of {count} tokens differs from torch"
                    check_values(f"{kind.title}, {name}", own, value, str(kind.choices["kv_format"]))
                    done += 2
            done += check_copies(pools, memories, size)
    return done


def check_values(title: str, read: Any, given: Any, kv_format: str) -> None:
    """What comes back is what was given, as near as the codes can be, in float64."""
    import torch

    read, given = read.double().flatten(1), given.double().flatten(1)
    if kv_format == "bf16":
        assert torch.equal(read, given), title
        return
    if kv_format == "int8":
        largest = given.unflatten(1, (-1, 128)).abs().amax(-1, keepdim=True)
        bound = (largest / 127 / 2).expand(-1, -1, 128).flatten(1) * (1 + 1e-5)
    else:
        given = given.clamp(-448, 448) if kv_format in ("fp8", "fp8_raw") else given
        block = {"fp8_scaled": 128, "mxfp8": 32}.get(kv_format, given.shape[1])
        is_kept = kv_format == "fp8_scaled" and given.shape[1] == 64  # rope, in bf16
        largest = given.unflatten(1, (-1, min(block, given.shape[1]))).abs().amax(-1, keepdim=True)
        scale = torch.ones_like(largest) if kv_format in ("fp8", "fp8_raw") else 2 * largest / 448
        step = scale.expand(-1, -1, min(block, given.shape[1])).flatten(1) * 2.0**-10
        bound = torch.zeros_like(given) if is_kept else torch.maximum(given.abs() * 2.0**-4, step) * (1 + 1e-5)
    worst = ((read - given).abs() - bound).max().item()
    assert worst <= 0, f"{title}: off by {worst} more than {kv_format} codes are apart"


def check_copies(pools: list[Any], memories: list[Any], size: int) -> int:
    """Moves, packs and clears of random slots, against torch."""
    import torch

    device = memories[0].device
    order = torch.randperm(size, device=device)
    targets, sources = order[: size // 2], order[size // 2 : size // 2 * 2]
    for pool in pools:
        pool.move_kv_cache(targets, sources)
    assert torch.equal(*memories), "a move differs from torch"
    staged = [pool.pack(sources) for pool in pools]
    assert torch.equal(*staged), "a pack differs from torch"
    for pool, staging in zip(pools, staged, strict=True):
        pool.unpack(staging, targets)
        pool.clear_pages(torch.tensor([1], device=device))
    assert torch.equal(*memories), "an unpack or clear differs from torch"
    return 3


# -- what is timed


def cases(device: str, counts: tuple[int, ...]) -> Iterator[Case]:
    for kind in KINDS:
        for count in counts:
            yield from stores_and_loads(kind, count, device)
    for count in (own for own in counts if own <= MOVED):
        yield from copies(count, device)


def stores_and_loads(kind: Kind, count: int, device: str) -> Iterator[Case]:
    import torch

    pool = pool_of(kind.spec, 2 * count + 64, device, **choices_of(kind))
    size = pool.tokens
    slots = torch.randperm(size, device=device)[:count] + 64
    values = kind.values(count, device)
    memory = pool.buffer(kind.buffer, 0)
    page = pool.layout.buffer(kind.buffer).page
    given, stored = sum(own[0].numel() * 2 for own in values), int(page.slot_bytes)
    store = getattr(pool, kind.store)
    rows = memory.view(-1, stored)
    flat = [own.flatten(1) for own in values]
    others = {"torch": obvious_store(kind, rows, slots, flat)}
    if kind.choices["kv_format"] == "fp8_scaled":
        others["pair"] = pair_of_kernels(rows, slots, *flat)
    yield Case(f"{kind.title} store", count, count * (given + stored + 8), lambda: store(0, slots, *values), others)
    if kind.load is not None:
        read = lambda: kind.read(pool, slots, torch.bfloat16)  # noqa: E731
        yield Case(
            f"{kind.title} load",
            count,
            count * (given + stored + 8),
            read,
            {"torch": obvious_load(kind, rows, slots, flat)},
        )


def blocks(values: Any, size: int) -> Any:
    return values.float().unflatten(1, (-1, size))


def obvious_store(kind: Kind, rows: Any, slots: Any, values: list[Any]) -> Callable[[], object]:
    """As one would write it, for rows of a token; pages in which K comes before V are written as such rows too."""
    import torch

    def codes_and_scales(own: Any, size: int, most: float, dtype: Any) -> list[Any]:
        scales = (blocks(own, size).abs().amax(-1, keepdim=True) / most).clamp(min=2.0**-126)
        codes = (blocks(own, size) / scales).clamp(-most, most)
        codes = codes.round().to(dtype) if dtype == torch.int8 else codes.to(dtype)
        return [codes.flatten(1), scales.flatten(1)]

    def parts() -> list[Any]:
        kv_format = kind.choices["kv_format"]
        if kind.buffer == "index_k":
            return codes_and_scales(values[0], 128, 448, torch.float8_e4m3fn)
        if kv_format == "fp8_scaled":
            return [*codes_and_scales(values[0], 128, 448, torch.float8_e4m3fn), values[1]]
        if kv_format in ("fp8", "fp8_raw"):
            return [own.float().clamp(-448, 448).to(torch.float8_e4m3fn) for own in values]
        if kv_format == "int8":
            return [part for own in values for part in codes_and_scales(own, 128, 127, torch.int8)]
        if kv_format == "mxfp8":
            found = []
            for own in values:
                codes, scales = codes_and_scales(own, 32, 448, torch.float8_e4m3fn)
                found += [codes, (scales.view(torch.int32) >> 23).to(torch.uint8)]
            return found
        return values

    def run() -> None:
        rows[slots] = torch.cat([part.contiguous().view(torch.uint8) for part in parts()], 1)

    return run


def obvious_load(kind: Kind, rows: Any, slots: Any, values: list[Any]) -> Callable[[], object]:
    """The same the other way round."""
    import torch

    widths = [own.shape[1] for own in values]
    e4m3 = torch.float8_e4m3fn

    def run() -> list[Any]:
        own = rows[slots]
        kv_format = kind.choices["kv_format"]
        if kv_format == "bf16":
            return list(own.view(torch.bfloat16).split(widths, 1))
        if kv_format == "fp8_scaled":
            codes, scales = own[:, :512].view(e4m3).float(), own[:, 512:528].contiguous().view(torch.float32)
            latent = (codes.unflatten(1, (4, 128)) * scales[:, :, None]).flatten(1).bfloat16()
            return [latent, own[:, 528:].contiguous().view(torch.bfloat16)]
        if kv_format in ("fp8", "fp8_raw"):
            return [part.contiguous().view(e4m3).bfloat16() for part in own.split(widths, 1)]
        found, at = [], 0
        size, scale_bytes = (128, 4) if kv_format == "int8" else (32, 1)
        for width in widths:
            codes = own[:, at : at + width].contiguous()
            at += width
            scales = own[:, at : at + width // size * scale_bytes].contiguous()
            at += scales.shape[1]
            if kv_format == "int8":
                numbers, factors = codes.view(torch.int8).float(), scales.view(torch.float32)
            else:
                numbers, factors = codes.view(e4m3).float(), (scales.int() << 23).view(torch.float32)
            found.append((numbers.unflatten(1, (-1, size)) * factors[:, :, None]).flatten(1).bfloat16())
        return found

    return run


def pair_of_kernels(rows: Any, slots: Any, latent: Any, rope: Any) -> Callable[[], object]:
    """Rows of 656 bytes quantised into a temporary by one kernel, and scattered by another."""
    import torch

    kernels = pair_module()
    count = len(slots)
    packed = torch.empty((count, 656), dtype=torch.uint8, device=rows.device)

    def run() -> None:
        kernels.quantise[(count,)](packed, latent, rope, latent.stride(0), rope.stride(0), num_warps=4)
        kernels.scatter[(count,)](rows, packed, slots, num_warps=4)

    return run


def pair_module() -> Any:
    """The two kernels, in a module of their own: they need Triton, which is imported late."""
    import importlib

    return importlib.import_module("pair")


def copies(count: int, device: str) -> Iterator[Case]:
    """Operations on all layers: one launch for all of them, or for each."""
    import torch

    pool = pool_of("glm_dsa", 2 * count + 64, device, layers=LAYERS, kv_format="fp8_scaled")
    single = [pool_of("glm_dsa", 2 * count + 64, device, kv_format="fp8_scaled") for _ in range(LAYERS)]
    order = torch.randperm(2 * count, device=device) + 64
    targets, sources = order[:count], order[count:]
    nbytes = count * LAYERS * (656 + 132) * 2
    rows = [pool.buffer("kv", layer).view(-1, 656) for layer in range(LAYERS)]
    keys = [pool.buffer("index_k", layer) for layer in range(LAYERS)]

    def obvious() -> None:
        for own, pages in zip(rows, keys, strict=True):
            own[targets] = own[sources]
            codes, scales = pages[:, :8192].view(-1, 64, 128), pages[:, 8192:].view(-1, 64, 4)
            for part in (codes, scales):
                part[targets // 64, targets % 64] = part[sources // 64, sources % 64]

    def each() -> None:
        for own in single:
            own.move_kv_cache(targets, sources)

    yield Case(
        f"move of {LAYERS} layers",
        count,
        2 * nbytes,  # packed and unpacked
        lambda: pool.move_kv_cache(targets, sources),
        {"torch": obvious, "layers": each},
    )
    yield Case(
        f"pack of {LAYERS} layers",
        count,
        nbytes,
        lambda: pool.pack(sources),
        {"layers": lambda: [own.pack(sources) for own in single]},
    )


if __name__ == "__main__":
    sys.exit(main())
