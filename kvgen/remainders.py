"""Remainders: what the numbers of a spec can leave when they are divided, whatever a config says.

A set has at least every remainder that can come: a number may be anything unless its type, its definition or a
`require` says otherwise. A set without 0 is therefore a proof that no config makes a multiple.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import gcd, prod

from kvgen.expr import Binary, Conditional, Expr, Literal, Name, Unary
from kvgen.scope import Scope
from kvgen.size import Size
from kvgen.spec import Let, Parameter
from kvgen.types import DTYPES, Int, Text

TRIALS_MAX = 1_024  # combinations of remainders that are tried
BYTE = 8


def never_multiple(scope: Scope, number: Size, divisor: int, divisors: Mapping[str, int]) -> str | None:
    """Why a number of load time is a multiple of `divisor` for no config; None where it may be one.

    Args:
        divisors: names that load time computes, and what they are multiples of.
    """
    while divisor % 2 == 0 and divisor > TRIALS_MAX:
        divisor //= 2  # what is not a multiple of the half is not one of the whole
    if divisor > TRIALS_MAX:
        return None
    left = _Remainders(scope, divisor, divisors).of_size(number)
    if not left or 0 in left:
        return None
    *most, last = map(str, sorted(left))
    shown = "a remainder" if len(most) > 7 else f"{', '.join(most)} or {last}" if most else last
    return f"{number} leaves {shown} when divided by {divisor}, whatever the config"


class _Remainders:
    """The remainders of one division. Every definition is looked at once."""

    def __init__(self, scope: Scope, divisor: int, divisors: Mapping[str, int]) -> None:
        self.scope, self.divisor, self.divisors = scope, divisor, divisors
        self.any = frozenset(range(divisor))
        self.entities: dict[str, frozenset[int]] = {}

    def of_size(self, number: Size) -> frozenset[int]:
        """The names are tried together, since each has one value wherever it is mentioned."""
        values = [sorted(self.of_name(name)) for name in number.names]
        if prod(map(len, values)) > TRIALS_MAX:
            return self.any
        found: set[int] = set()
        for chosen in product(*values):
            known = dict(zip(number.names, chosen, strict=True))
            total = sum(factor * prod(known[name] for name in names) for names, factor in number.terms)
            found.add(total % self.divisor)
            if 0 in found:
                return self.any
        return frozenset(found)

    def of_name(self, name: str) -> frozenset[int]:
        """Of a name of a size: of the spec, or of load time, which also calls a computation by its text."""
        if name in self.divisors:
            return frozenset(range(0, self.divisor, gcd(self.divisors[name], self.divisor)))
        if name.startswith("ITEM_BYTES["):
            return self.of_item_bytes(name[len("ITEM_BYTES[") : -1])
        return self.of_entity(name) if name in self.scope.entities else self.any

    def of_item_bytes(self, dtype: str) -> frozenset[int]:
        kind = self.scope.entities[dtype].type
        words = kind.words if isinstance(kind, Text) and kind.words is not None else tuple(DTYPES)
        return frozenset(DTYPES[word] // BYTE % self.divisor for word in words)

    def of_entity(self, name: str) -> frozenset[int]:
        """Of a parameter or a let."""
        if name not in self.entities:
            self.entities[name] = self.any  # of a name that needs itself
            self.entities[name] = self.of_definition(name)
        return self.entities[name]

    def of_definition(self, name: str) -> frozenset[int]:
        entity, divisor, found = self.scope.entities[name], self.divisor, self.any
        match entity.definition:
            case Let() as let:
                found = self.of_expr(let.value)
            case Parameter(values=values, kind="int") if values is not None:
                found = frozenset(value % divisor for _, value in values if type(value) is int)
        if isinstance(entity.type, Int) and entity.type.high - entity.type.low < divisor:
            found &= {value % divisor for value in range(entity.type.low, entity.type.high + 1)}
        for step, rest in self.required(name):
            common = gcd(step, divisor)
            found = frozenset(value for value in found if value % common == rest % common)
        return found

    def required(self, name: str) -> Iterator[tuple[int, int]]:
        """Step and remainder of each `require` that says `name % step == remainder`."""
        waiting = [item.that for item in self.scope.spec.requires]
        while waiting:
            match waiting.pop():
                case Binary(operator="and", left=left, right=right):
                    waiting += [left, right]
                case Binary(
                    operator="==",
                    left=Binary(operator="%", left=Name(name=of), right=Literal(value=int(step))),
                    right=Literal(value=int(rest)),
                ) if of == name and step > 0:
                    yield step, rest

    def of_expr(self, expr: Expr) -> frozenset[int]:
        match expr:
            case Literal(value=int(value)):
                return frozenset({value % self.divisor})
            case Name(name=name) if name in self.scope.entities:
                return self.of_entity(name)
            case Unary(operator="-", operand=operand):
                return frozenset(-value % self.divisor for value in self.of_expr(operand))
            case Conditional(then=then, otherwise=otherwise):
                return self.of_expr(then) | self.of_expr(otherwise)
            case Binary(operator="+" | "-" | "*", left=left, right=right):
                ours, theirs = self.of_expr(left), self.of_expr(right)
                if len(ours) * len(theirs) > TRIALS_MAX:
                    return self.any
                return frozenset(_apply(expr.operator, a, b) % self.divisor for a, b in product(ours, theirs))
        return self.any


def _apply(operator: str, a: int, b: int) -> int:
    return a * b if operator == "*" else a + b if operator == "+" else a - b
