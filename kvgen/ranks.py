"""Ranks: whose pages have the same heads, on two sides that divide heads over other numbers of ranks.

`shard(heads, ranks)` gives rank r the heads from r * heads / ranks on, and where there are more ranks than heads the
head r // (ranks / heads). Pages can be exchanged where every axis has the same elements of the same whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any

from kvgen.expr import Call, names, walk
from kvgen.layout import Layout, LetLayout
from kvgen.text import ending


@dataclass(frozen=True)
class Part:
    """What one rank has of an axis: of the heads of all ranks, an equal part or one that others have too."""

    heads: int
    ranks: int

    @property
    def groups(self) -> int:
        """Ranks that have other heads; 1 where each has all of them."""
        return min(self.heads, self.ranks)

    def __str__(self) -> str:
        return f"{self.heads} over {self.ranks} rank{ending(self.ranks)}"


Parts = Mapping[tuple[str, int], tuple[Part, ...]]  # of the axes that ranks divide, by field and position


@dataclass(frozen=True)
class Ranks:
    """Ranks that have the same heads: those of A from i * a on and those of B from i * b on, for each i below `groups`.

    With one group every rank has them.
    """

    groups: int
    a: int
    b: int

    def as_json(self) -> dict[str, int] | None:
        """None for all ranks."""
        return {"groups": self.groups, "a": self.a, "b": self.b} if self.groups > 1 else None

    def __str__(self) -> str:
        if self.groups == 1:
            return "all ranks"
        return f"{_some(self.a)} of A and {_some(self.b)} of B, i from 0 to {self.groups - 1}"


ALL_RANKS = Ranks(1, 1, 1)


def _some(ranks: int) -> str:
    return "rank i" if ranks == 1 else f"ranks {ranks}i to {ranks}i + {ranks - 1}"


class Divided:
    """What ranks divide of the pages of a layout."""

    def __init__(self, spec: Layout, layout: Any) -> None:
        """`spec` is the layout of a spec, and `layout` what its module made of a config and choices."""
        self.lets = _divided(spec)
        self.axes = {page.format: [(field.name, field.axes) for field in page.fields] for page in spec.pages}
        self.parts: dict[tuple[str, int | None], list[Part]] = {}  # of each let and layer, None for every layer
        for shard in getattr(layout, "shards", ()):
            for layer in shard.layers or (None,):
                self.parts.setdefault((shard.name, layer), []).append(Part(shard.heads, shard.ranks))

    def of_page(self, format: str, layer: int) -> Parts:
        """The parts that the page of a layer has of each axis."""
        found: dict[tuple[str, int], tuple[Part, ...]] = {}
        for field, axes in self.axes[format]:
            for position, axis in enumerate(axes):
                lets = sorted(self.lets.get(axis or "", ()))
                parts = [part for let in lets for at in (None, layer) for part in self.parts.get((let, at), ())]
                if parts:
                    found[field, position] = tuple(parts)
        return found


def _divided(spec: Layout) -> dict[str, frozenset[str]]:
    """For each let, the lets that it is made of and that divide heads over ranks, itself included."""
    found: dict[str, frozenset[str]] = {}
    for step in spec.steps:  # each after what it needs
        if isinstance(step, LetLayout):
            own = any(isinstance(part, Call) and part.function == "shard" for part in walk(step.value))
            inner = (found.get(name, frozenset()) for name in names(step.value))
            found[step.name] = frozenset({step.name} if own else ()).union(*inner)
    return found


def same_heads(ours: Parts, theirs: Parts) -> Ranks | None:
    """The ranks whose pages have the same heads, of two pages whose bytes mean the same; None where none are sure to.

    Where a side counts ranks in several ways, who has which part is known to be the same only for equal sides.
    """
    ours, theirs = _divided_only(ours), _divided_only(theirs)
    counts = {part.ranks for parts in ours.values() for part in parts}
    if ours == theirs and len(counts) != 1:
        return Ranks(max(counts), 1, 1) if counts else ALL_RANKS
    if ours.keys() != theirs.keys() or any(len(ours[axis]) != len(theirs[axis]) for axis in ours):
        return None
    pairs = {pair for axis in ours for pair in zip(ours[axis], theirs[axis], strict=True)}
    if len({(a.ranks, b.ranks) for a, b in pairs}) != 1:
        return None
    if any(a.heads != b.heads or a.groups != b.groups for a, b in pairs):
        return None
    a, b = next(iter(pairs))
    groups = lcm(*(part.groups for part, _ in pairs))
    return Ranks(groups, a.ranks // groups, b.ranks // groups)


def _divided_only(parts: Parts) -> Parts:
    """Without what every rank has all of."""
    found = {axis: tuple(part for part in own if part.groups > 1) for axis, own in parts.items()}
    return {axis: own for axis, own in found.items() if own}
