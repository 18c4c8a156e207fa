"""Kernels as machine code, without a device: what each is compiled to for a target, against what it has to move.

These figures are no measurement of speed. They show what would keep a kernel from it: narrow accesses, spills.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

from kvgen.kernels import local_name
from kvgen.layout import Layout
from kvgen.machine import Code, read_code
from kvgen.page import BYTE
from kvgen.requests import Request, asking, imported
from kvgen.resources import package_file
from kvgen.text import ending
from kvgen.types import DTYPES

WIDE = 16  # bytes of the widest access that all targets have
Inputs = tuple[Mapping[str, Any], Mapping[str, Any]]  # the fields of a config, and choices


@dataclass(frozen=True)
class KernelProfile:
    """A kernel, compiled for the dtypes of its arguments and the sizes of a layout."""

    kernel: str
    variant: str  # the dtypes of its slots and values
    tokens: int | None  # that a program takes; None where it takes a page
    warps: int  # of a program
    code: Code
    accessed: int  # bytes of global memory that threads access for a token or page, those that several read included
    least: int  # bytes that have to be read and written

    def as_json(self) -> dict[str, Any]:
        own = asdict(self)
        code = own.pop("code")
        widths = {name: {str(width): count for width, count in code.pop(name).items()} for name in ("loads", "stores")}
        return {**own, **code, **widths}


def profile(text: str, layout: Layout, inputs: Sequence[Inputs], target: str) -> list[KernelProfile]:
    """The kernels of a module for a target.

    Args:
        text: the module.
        layout: what it was printed from.
        inputs: configs and choices, those that the layout refuses left out; a kernel is compiled for the sizes of the
            first that has it.
        target: one of TARGETS.
    """
    with imported(text) as module, asking(target) as requests:
        chosen: dict[str, list[tuple[Request, Any]]] = {}
        for config, choices in inputs:
            try:
                pool = _pool(module, config, choices)
            except module.LayoutError:
                continue
            before = len(requests)
            pool.warmup()
            new = [request for request in requests[before:] if request.name not in chosen]
            for request in new:
                chosen.setdefault(request.name, []).append((request, pool))
        found: dict[str, KernelProfile] = {}
        for name in chosen:
            for request, pool in chosen[name]:
                key = f"{name} {_variant(request)}"
                if key not in found:
                    found[key] = _profiled(request, pool, layout)
    return [found[key] for key in sorted(found)]


def profiles(
    text: str, layout: Layout, inputs: Sequence[Inputs], targets: Sequence[str]
) -> dict[str, list[KernelProfile]]:
    """The kernels of a module for each target, a process for each where there are several."""
    if len(targets) == 1:
        return {target: profile(text, layout, inputs, target) for target in targets}
    workers = min(len(targets), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        found = {target: pool.submit(profile, text, layout, inputs, target) for target in targets}
        return {target: future.result() for target, future in found.items()}


def _pool(module: Any, config: Mapping[str, Any], choices: Mapping[str, Any]) -> Any:
    """A pool of two pages on the CPU, that launches kernels."""
    layout = module.Layout.from_config(config, **choices)
    return module.Pool(layout, 2 * layout.granule, requests=1, backend="triton")


def _variant(request: Request) -> str:
    """`slots int64, latent bfloat16, rope bfloat16`."""
    named = {name.removesuffix("_ptr"): value for name, value in request.tensors.items()}
    if "lengths" in named:  # the table is of the pages of sequences, not of pointers
        named = {"pages" if name == "table" else name: value for name, value in named.items()}
    shown = {name: value.dtype for name, value in named.items() if not _is_memory(name)}
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in shown.items())


def _is_memory(name: str) -> bool:
    return name in ("memory", "table", "staging", "blank") or name.endswith(("_memory", "_given"))


def _profiled(request: Request, pool: Any, layout: Layout) -> KernelProfile:
    compiled = request.compiled()
    code = _cached(compiled.hash, lambda: read_code(compiled))
    tokens, warps = request.constants.get("TOKENS"), compiled.metadata.num_warps
    threads = warps * compiled.metadata.warp_size
    moved = sum(width * count for widths in (code.loads, code.stores) for width, count in widths.items())
    return KernelProfile(
        kernel=request.name.removeprefix("_").removesuffix("_kernel"),
        variant=_variant(request),
        tokens=tokens,
        warps=warps,
        code=code,
        accessed=moved * threads // (tokens or 1),
        least=_least(request, pool, layout),
    )


def _cached(key: str, made: Callable[[], Code]) -> Code:
    """The code of a kernel, kept beside it where Triton keeps kernels: by its text, target, Triton and reader."""
    from triton.runtime.cache import get_cache_manager

    reader = hashlib.sha256(package_file("machine.py").read_bytes()).hexdigest()[:16]
    manager, name = get_cache_manager(key), f"kvgen-{reader}.json"
    file = manager.get_file(name)
    if file is not None:
        with open(file, encoding="utf-8") as opened:
            found = json.load(opened)
        for what in ("loads", "stores"):
            found[what] = {int(width): count for width, count in found[what].items()}
        return Code(**found)
    code = made()
    manager.put(json.dumps(asdict(code)), name, binary=False)
    return code


def _least(request: Request, pool: Any, layout: Layout) -> int:
    """Bytes of a token that have to be read and written; of a page, for a kernel that takes pages."""
    own = request.constants
    if "SPANS" in own:
        reads_too = "blank_ptr" in request.tensors
        return sum(span.nbytes * (2 if reads_too else 1) for span in own["SPANS"])
    tensors = {name.removesuffix("_ptr"): value for name, value in request.tensors.items()}
    if "RECORDS" in own:
        slots = [value.element_size() for name, value in tensors.items() if name.endswith("_slots")]
        return sum(2 * record.nbytes + slots[record.space] for record in own["RECORDS"])
    page = next(entry.page for entry in _entries(pool) if request.name in entry.kernels)
    written = next(item for item in layout.pages if item.format == page.format)
    total = tensors["slots"].element_size() if "slots" in tensors else 0  # a gather reads one number for a page
    for field in written.fields:
        value = tensors.get(local_name(field.name))
        if value is None:
            continue
        names = [field.name]
        if request.name.startswith(("_store", "_load")) and field.quant is not None:
            names.append(field.quant.scale)
        total += value.shape[-1] * value.element_size()
        total += sum(_slot_bytes(own) for own in page.fields if own.name in names)
    return total


def _entries(pool: Any) -> list[Any]:
    """What holds the buffers of layers."""
    return list((pool._owned_of if hasattr(pool, "_owned_of") else pool._entry_of).values())


def _slot_bytes(field: Any) -> int:
    return field.count * max(DTYPES[field.dtype], BYTE) // BYTE  # e2m1 counts bytes


# -- what people see


def render(profiles: Sequence[KernelProfile], target: str) -> str:
    """A line for each kernel, and one for its dtypes."""
    lines = [f"{target}"]
    for own in profiles:
        code = own.code
        shape = f"{own.tokens} token{ending(own.tokens)}" if own.tokens else "a page"
        lines += [
            f"  {own.kernel}: {shape}, {own.warps} warp{ending(own.warps)}",
            f"    {own.variant}",
            f"    {code.registers} registers, {code.spills or 'no'} spills, {code.shared_bytes:,} bytes shared,"
            f" {code.instructions:,} instructions",
            f"    loads {_widths(code.loads)}; stores {_widths(code.stores)}; {own.accessed:,} bytes a"
            f" {'token' if own.tokens else 'page'} accessed, of {own.least:,} that must be",
        ]
    return "\n".join(lines) + "\n"


def _widths(counts: Mapping[int, int]) -> str:
    """`9 x 16, 1 x 4`: how many of so many bytes."""
    return ", ".join(f"{count} x {width}" for width, count in counts.items()) or "none"


# -- against an earlier profile


def losses(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    """What is worse in one profile than in another, both as JSON: a lost width, a spill, a fifth more registers."""
    for what in ("loads", "stores"):
        for width in sorted({*now[what], *before[what]}, key=int):
            count, was = now[what].get(width, 0), before[what].get(width, 0)
            if int(width) < WIDE and count > was:
                yield f"{what} of {width} byte{ending(int(width))}: {count}, not {was}"
    if now["spills"] > before["spills"]:
        yield f"spills: {now['spills']}, not {before['spills']}"
    if 5 * now["registers"] > 6 * before["registers"]:
        yield f"registers: {now['registers']}, not {before['registers']}"
