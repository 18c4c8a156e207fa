"""Facts: what the guards of an expression make certain, and the places where expressions stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvgen.expr import Expr

Fact = tuple[str, Expr, Expr | None]  # ("<", a, b), ("<=", a, b), ("has", name, None), ("true" or "false", name, None)
Facts = frozenset[Fact]
NOTHING: Facts = frozenset()


@dataclass(frozen=True)
class Place:
    """Where an expression stands: the words that have a value there, and what is certain there."""

    path: str
    words: frozenset[str] = frozenset()  # of "layer", "tokens", "requests", "offset"
    facts: Facts = NOTHING

    def given(self, facts: Iterable[Fact]) -> Place:
        return replace(self, facts=self.facts | frozenset(facts))
