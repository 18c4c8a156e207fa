"""Budgets: what a layout costs, computed by the emitted module itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from types import ModuleType
from typing import Any

from kvgen.evaluate import is_split, memory_of, pages_of, readers_of
from kvgen.text import ending, runs, wrap

ALLOCATOR_STEP = 2 * 2**20  # CUDA's caching allocator rounds large tensors up to this


@dataclass(frozen=True)
class Budget:
    """A layout priced for a number of tokens, with the memory it was asked to fit into, if any.

    Where nothing grows with tokens, `unbounded` is true and the price is that of 0 tokens, the same as of any other.
    """

    module: ModuleType
    layout: Any
    tokens: int
    requests: int
    memory: int | None
    unbounded: bool = False

    @property
    def total_bytes(self) -> int:
        return self.module.bytes_for(self.layout, self.tokens, self.requests)

    @property
    def allocator_bytes(self) -> int:
        """The most that rounding every tensor up to 2 MiB can add; part of no total."""
        return sum(
            -size % ALLOCATOR_STEP * count
            for buffer in self.layout.buffers
            if memory_of(buffer) == "device"
            for size, count in tensors(buffer, self.counts(buffer))
        )

    def counts(self, buffer: Any) -> tuple[int, ...]:
        """What the sizes of a buffer are functions of: requests only where its module knows of them."""
        return (self.tokens, self.requests) if hasattr(buffer.space, "slots_per_request") else (self.tokens,)

    def as_json(self, name: str) -> dict[str, Any]:
        """The document of `kvgen budget --format json`."""
        module, layout = self.module, self.layout
        return {
            "layout": name,
            "fingerprint": layout.fingerprint,
            **inputs_as_json(layout),
            "bytes_per_token": plain(module.cell_size(layout)),
            "fixed_bytes": module.bytes_for(layout, 0, self.requests),
            "tokens": None if self.unbounded else self.tokens,
            "requests": self.requests,
            "total_bytes": self.total_bytes,
            "host_bytes": module.host_bytes_for(layout, self.tokens, self.requests),
            "memory_bytes": self.memory,
            "fits": self.memory is None or self.total_bytes <= self.memory,
            "allocator_rounding_bytes": self.allocator_bytes,
            "buffers": [self.buffer_as_json(buffer) for buffer in layout.buffers],
        }

    def buffer_as_json(self, buffer: Any) -> dict[str, Any]:
        """A buffer with its slots and bytes."""
        slots = self.module.slots(self.layout, buffer.space.name, self.tokens, self.requests)
        return buffer_as_json(self.layout, buffer) | {"slots": slots, "bytes": buffer.num_bytes(*self.counts(buffer))}


def tensors(buffer: Any, counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """(bytes, how many) of the tensors of a buffer."""
    num_pages = buffer.num_pages(*counts)
    pages = pages_of(buffer)
    count = 1 if len(pages) > 1 else len(buffer.layers)
    found = []
    for page in pages if buffer.layers else ():
        parts = [plane.page_bytes for plane in page.planes] if is_split(page) else [page.page_bytes]
        found += [(num_pages * nbytes, count) for nbytes in parts]
    return found


def plain(value: object) -> object:
    """A value as JSON has it: a fraction that is no integer as text."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else str(value)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def same(values: list[object]) -> object:
    """The one value they all are, or the list of them."""
    return values[0] if len(set(map(str, values))) == 1 else values


def inputs_as_json(layout: Any) -> dict[str, Any]:
    """What decided a resolved layout: its choices, and the fields of the config with the defaults of those absent."""
    inputs = {"choices": layout.choices, "config_used": layout.config_used, "defaults_used": layout.defaults_used}
    return {title: {name: plain(value) for name, value in items.items()} for title, items in inputs.items()}


def buffer_as_json(layout: Any, buffer: Any) -> dict[str, Any]:
    """A buffer of a resolved layout, whatever its number of tokens."""
    pages = pages_of(buffer)
    return {
        "name": buffer.name,
        "space": buffer.space.name,
        "memory": memory_of(buffer),
        "layers": list(buffer.layers),
        "readers": {str(layer): owner for layer, owner in readers_of(buffer).items()},
        "format": same([page.format for page in pages]) if pages else None,
        "slot_bytes": same([plain(page.slot_bytes) for page in pages]) if pages else None,
        "page_bytes": same([page.page_bytes for page in pages]) if pages else None,
        "page_fingerprint": layout.page_fingerprint(buffer.name),
        "bytes_per_token": plain(buffer.bytes_per_token),
    }


def render(budget: Budget, name: str) -> str:
    """The budget as a table, in at most 100 columns."""
    module, layout = budget.module, budget.layout
    choices = ", ".join(f"{key} {shown(value)}" for key, value in layout.choices.items())
    lines = [*_wrapped(f"{name}: ", choices, margin=""), ""]
    tokens = "unbounded" if budget.unbounded else f"{budget.tokens:,}"
    if budget.memory is not None:
        lines.append(f"  memory           {budget.memory:>19,} bytes  {in_units(budget.memory)}")
    lines += [
        f"  tokens           {tokens:>19}        a multiple of {layout.granule:,}",
        f"  bytes per token  {shown(module.cell_size(layout)):>19}",
        f"  fixed            {module.bytes_for(layout, 0, budget.requests):>19,} bytes  {_fixed(budget)}",
        f"  total            {budget.total_bytes:>19,} bytes  {in_units(budget.total_bytes)}",
    ]
    if budget.memory is not None:
        left = budget.memory - budget.total_bytes
        lines.append(f"  {'left ' if left >= 0 else 'short'}            {abs(left):>19,} bytes")
    host = module.host_bytes_for(layout, budget.tokens, budget.requests)
    if host:
        lines.append(f"  on the host      {host:>19,} bytes  {in_units(host)}, not in the total")
    lines += [
        f"  allocator        {budget.allocator_bytes:>19,} bytes  at most, from rounding tensors to 2 MiB; in no total",
        "",
    ]
    lines += _buffer_table(budget)
    readers = [f"{buffer.name}: {text}" for buffer in layout.buffers if (text := readers_text(buffer))]
    lines += [""] if readers else []
    for position, text in enumerate(readers):
        lines += _wrapped("          " if position else "readers   ", text)
    used = ", ".join(f"{key} {_short(value)}" for key, value in layout.config_used.items())
    defaults = ", ".join(f"{key} {_short(value)}" for key, value in layout.defaults_used.items())
    lines += ["", *_wrapped("config    ", used or "nothing")]
    if defaults:
        lines += _wrapped("defaults  ", defaults)
    return "\n".join(lines) + "\n"


def _fixed(budget: Budget) -> str:
    """What the fixed bytes are for."""
    if not budget.requests:
        return "reserved pages"
    return f"reserved pages and {budget.requests:,} request{ending(budget.requests)}"


def _buffer_table(budget: Budget) -> list[str]:
    rows = [("buffer", "space", "layers", "slot bytes", "page bytes", "slots", "bytes")]
    for buffer in budget.layout.buffers:
        if not buffer.layers:
            continue
        row = budget.buffer_as_json(buffer)
        host = " (host)" if row["memory"] == "host" else ""
        numbers = [row["slots"], row["bytes"]]
        rows.append(
            (
                f"{row['name']}{host}",
                row["space"],
                str(len(buffer.layers)),
                _varied(row["slot_bytes"]),
                _varied(row["page_bytes"]),
                *(f"{number:,}" for number in numbers),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def readers_text(buffer: Any) -> str:
    """Which layers read which owner's bytes, owner by owner; nothing where each layer has its own."""
    parts = []
    for owner, group in groupby(readers_of(buffer).items(), key=lambda own: own[1]):
        layers = [layer for layer, _ in group]
        parts.append(f"{runs(layers)} {'reads' if len(layers) == 1 else 'read'} {owner}")
    return "; ".join(parts)


def _varied(value: object) -> str:
    return "by layer" if isinstance(value, list) else shown(value)


def shown(value: object) -> str:
    """A value as a person writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _short(value: object) -> str:
    text = json.dumps(plain(value)) if not isinstance(value, str) else value
    return text if len(text) <= 40 else f"[{len(value)} values]" if isinstance(value, list) else f"{text[:37]}..."


def in_units(number: int) -> str:
    """Bytes in the largest unit of which there is one, rounded down."""
    power = min(max(number.bit_length() - 1, 0) // 10, 4)
    if power == 0:
        return "under 1 KiB"
    hundredths = number * 100 // 2 ** (10 * power)
    return f"{hundredths // 100:,}.{hundredths % 100:02} {'KMGT'[power - 1]}iB"


def _wrapped(title: str, text: str, margin: str = "  ") -> list[str]:
    """A list of facts behind its title, later lines below the first fact."""
    return wrap(text, margin + title, " " * len(margin + title))
