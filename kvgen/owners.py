"""Owners: the layers that two buffers of one operation share. Such a layer does not say which buffer is meant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import combinations as pairs

from kvgen.cases import combinations, truth
from kvgen.expr import Binary, Expr, Literal
from kvgen.fold import FoldError
from kvgen.scope import Scope
from kvgen.spec import READING_VERBS, Buffer, LayerSet, Let, Operation, Spec


@dataclass(frozen=True)
class Shared:
    """Two buffers of an operation, and the condition on a layer under which it works on both."""

    operation: Operation
    one: Buffer
    other: Buffer
    both: Expr
    reads: bool  # whether layers that read a buffer count as well as those that own it

    @property
    def message(self) -> str:
        used = "owned or read" if self.reads else "owned"
        return f"{self.operation.name} cannot tell {self.one.name} from {self.other.name}: both are {used} here"


def shared_layers(spec: Spec, scope: Scope) -> Iterator[Shared]:
    """Every two buffers of an operation that are not certain to have layers of their own."""
    buffers = {item.name.text: item for item in spec.buffers}
    for operation in spec.operations:
        named = [buffers[name.text] for name in operation.buffers or () if name.text in buffers]
        for one, other in pairs(named, 2):
            reads = operation.verb in READING_VERBS and (one.readers is not None or other.readers is not None)
            ours, theirs = (_users(item, reads) for item in (one, other))
            if all(scope.disjoint(own, their) for own in ours for their in theirs):
                continue
            left, right = (reduce(_either, users) for users in (ours, theirs))
            both = Binary(operator="and", left=left, right=right, span=other.layers.span)
            yield Shared(operation, one, other, both, reads)


def first_layers(spec: Spec, scope: Scope) -> list[dict[str, Literal | None]]:
    """What is known of the first layer, for every combination of enum and bool parameters that `require` lets through.

    It is a layer of the body, which no model is without.
    """
    assert spec.layers is not None
    span = spec.layers.span
    yes, no = (Literal(value=flag, span=span) for flag in (True, False))
    steps = {name: _values(scope.entities[name].definition) for name in scope.order if scope.entities[name].varies}
    exprs = [expr for values in steps.values() for expr in values] + [item.layers for item in spec.buffers]
    found = []
    for values in combinations(scope, exprs):
        known = {**values, "layer": Literal(value=0, span=span), "all": yes, "body": yes, "draft": no}
        for name, uses in steps.items():
            folded = [_folded(scope, use, known) for use in uses]
            if isinstance(folded[0], Literal) and all(item == folded[0] for item in folded):
                known[name] = folded[0]
        found.append(known)
    return found


def always_shared(scope: Scope, shared: Shared, first: list[dict[str, Literal | None]]) -> bool:
    """Whether both buffers have the first layer, whatever the config and the choices."""
    return bool(first) and all(truth(scope, shared.both, known) is True for known in first)


def _values(definition: object) -> tuple[Expr, ...]:
    """What a let or a set of layers may be; of a set whose rules must agree, by each of them."""
    if isinstance(definition, LayerSet):
        return tuple(case.use for case in definition.cases)
    assert isinstance(definition, Let)
    return (definition.value,)


def _folded(scope: Scope, expr: Expr, known: dict[str, Literal | None]) -> Expr | None:
    try:
        return scope.fold(expr, known)
    except FoldError:
        return None


def _users(buffer: Buffer, reads: bool) -> tuple[Expr, ...]:
    """Conditions on the layers for which an operation works on the buffer: on its readers too where it `reads`."""
    return (buffer.layers, buffer.readers) if reads and buffer.readers is not None else (buffer.layers,)


def _either(one: Expr, other: Expr) -> Expr:
    return Binary(operator="or", left=one, right=other, span=one.span)
