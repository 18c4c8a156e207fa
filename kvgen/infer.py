"""Inference: the type of an expression where it stands, or what is wrong with it there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from kvgen.expr import Binary, Call, Conditional, Expr, Index, Literal, Name, Unary, show
from kvgen.facts import Place
from kvgen.problems import InternalError, Label, Problem
from kvgen.types import (
    FACTORS_MAX,
    MAGNITUDE_MAX,
    MAX_LAYERS,
    PARAMETER_MAX,
    Bool,
    Int,
    ListOf,
    Ratio,
    Text,
    Type,
    factors,
    least_sign,
    sign_of,
    suggest,
)

if TYPE_CHECKING:
    from kvgen.scope import Scope

CODES = {
    "KV210": "an unknown name",
    "KV211": "a name used where it has no value",
    "KV212": "an expression of the wrong type",
    "KV213": "an optional name used without `has`",
    "KV214": "an index that may lie outside its list",
    "KV215": "a divisor that may be zero",
    "KV216": "a number that may grow too large",
}


class Typing:
    """Types of one expression."""

    def __init__(self, scope: Scope, problems: list[Problem], path: str) -> None:
        self.scope, self.problems, self.path = scope, problems, path

    def report(self, code: str, message: str, expr: Expr, help: str | None = None, notes: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(code, message, Label(expr.span), help=help, notes=notes, path=self.path))

    def expect(self, expr: Expr, wanted: type, place: Place) -> Type | None:
        kind = self.of(expr, place)
        if kind is None or isinstance(kind, wanted) or (wanted is Ratio and isinstance(kind, Int)):
            return kind
        help = None
        if wanted is Bool and isinstance(kind, ListOf) and "layer" in place.words:
            help = f"write `layer in {show(expr)}`"
        self.report("KV212", f"expected {_NAMES[wanted]}, found {kind}", expr, help)
        return None

    def of(self, expr: Expr, place: Place) -> Type | None:
        match expr:
            case Literal(value=bool()):
                return Bool()
            case Literal(value=int()):
                return Int(expr.value, expr.value)
            case Literal(value=Fraction()):
                return Ratio(sign=sign_of(expr.value))
            case Literal():
                return Text(words=(expr.value,))
            case Name():
                return self.of_name(expr, place)
            case Unary(operator="not"):
                self.expect(expr.operand, Bool, place)
                return Bool()
            case Unary():
                kind = self.expect(expr.operand, Ratio, place)
                return Int(-kind.high, -kind.low) if isinstance(kind, Int) else kind and replace(kind, sign=-1)
            case Binary():
                return self.of_binary(expr, place)
            case Conditional():
                return self.of_conditional(expr, place)
            case Index():
                return self.of_index(expr, place)
            case Call():
                return self.of_call(expr, place)
        raise InternalError(f"no type for {type(expr).__name__}")

    def of_name(self, expr: Name, place: Place) -> Type | None:
        name = expr.name
        if name in ("layer", "tokens", "requests", "offset"):
            if name not in place.words:
                if name not in self.scope.entities:  # a name of the spec: refused as a word of the language
                    self.report("KV211", f"`{name}` has no value here", expr, notes=(_WHERE[name],))
                return None
            return {"layer": Int(0, MAX_LAYERS - 1), "offset": Int(0, PARAMETER_MAX)}.get(name, Ratio(sign=0))
        entity = self.scope.entities.get(name)
        if entity is None:
            known = {*self.scope.entities, *place.words}
            help = suggest(name, known)
            if name in self.scope.formats():
                help = "a format has a size: `sizeof(format, slots)`"
            self.report("KV210", f"unknown name `{name}`", expr, help)
            return None
        if entity.varies and "layer" not in place.words:
            message = f"`{name}` depends on the layer, which has no value here"
            self.report("KV211", message, expr, notes=(_WHERE["layer"],))
            return None
        if entity.optional and ("has", expr, None) not in place.facts:
            help = f"guard it, as in `has({name}) and …`, or give it a `default`"
            self.report("KV213", f"`{name}` is optional and may be absent here", expr, help)
            return None
        return entity.type

    def of_binary(self, expr: Binary, place: Place) -> Type | None:
        operator = expr.operator
        if operator in ("and", "or"):
            self.expect(expr.left, Bool, place)
            after = place.given(self.scope.truths(expr.left, holds=operator == "and"))
            self.expect(expr.right, Bool, after)
            return Bool()
        left, right = self.of(expr.left, place), self.of(expr.right, place)
        if operator in ("==", "!="):
            self.comparable(expr, left, right)
            return Bool()
        if operator == "in":
            if right is not None and not isinstance(right, ListOf):
                self.report("KV212", f"expected a list, found {right}", expr.right)
            elif right is not None:
                self.comparable(expr, left, right.element)
            return Bool()
        if operator in ("<", "<=", ">", ">="):
            for part, kind in ((expr.left, left), (expr.right, right)):
                self.numeric(part, kind)
            return Bool()
        if not self.numeric(expr.left, left) or not self.numeric(expr.right, right):
            return None
        return self.arithmetic(expr, left, right, place)  # type: ignore[arg-type]

    def numeric(self, expr: Expr, kind: Type | None) -> bool:
        if kind is not None and not isinstance(kind, (Int, Ratio)):
            self.report("KV212", f"expected a number, found {kind}", expr)
        return isinstance(kind, (Int, Ratio))

    def comparable(self, expr: Binary, left: Type | None, right: Type | None) -> None:
        if left is None or right is None:
            return
        numbers = (Int, Ratio)
        if not (type(left) is type(right) or (isinstance(left, numbers) and isinstance(right, numbers))):
            self.report("KV212", f"{left} is compared with {right}", expr)
            return
        if isinstance(left, ListOf):
            self.report("KV212", "lists are not compared", expr, "compare elements, or `len(…)`")
        if isinstance(left, Text) and isinstance(right, Text):
            for part, own, other in ((expr.left, left, right), (expr.right, right, left)):
                self.possible(part, own, other)

    def possible(self, expr: Expr, own: Text, other: Text) -> None:
        """A literal must be one of the values it is compared with. A fragment's is judged when it stands alone."""
        if not isinstance(expr, Literal) or not isinstance(expr.value, str) or expr.span.file != self.scope.spec.file:
            return
        word = expr.value
        if other.words is not None and word not in other.words:
            values = ", ".join(f"`{value}`" for value in other.words)
            self.report(
                "KV212",
                f"`{word}` is never a value here",
                expr,
                suggest(word, other.words),
                (f"the values are {values}",),
            )
        if other.letters is not None and not set(word) <= set(other.letters):
            self.report("KV212", f"`{word}` is never a value here", expr, notes=(f"the letters are `{other.letters}`",))

    def arithmetic(self, expr: Binary, left: Int | Ratio, right: Int | Ratio, place: Place) -> Type | None:
        operator = expr.operator
        if operator in ("/", "//", "%"):
            if not self.divides(expr.right, right, place):
                return None
            right = _above_zero(right)
        if isinstance(left, Ratio) or isinstance(right, Ratio):
            if operator in ("//", "%"):
                help = "divide a ratio with `/`" if operator == "//" else None
                self.report("KV212", f"`{operator}` is for ints, and one side is a ratio", expr, help)
                return None
            parts = factors(left) + factors(right)
            if parts > FACTORS_MAX:
                self.report("KV216", f"`{show(expr)}` may have too many digits", expr, "use fewer ratios")
                return None
            signs = least_sign(left), least_sign(right)
            sign = -1 if operator == "-" else min(signs)
            return Ratio(max(signs) if operator == "+" and sign == 0 else sign, parts)
        corners = [_APPLY[operator](a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
        low, high = min(corners), max(corners)
        if operator == "%":
            low, high = 0, right.high - 1
        if max(abs(low), abs(high)) > MAGNITUDE_MAX:
            help = "state a `max` for what it is made of"
            self.report("KV216", f"`{show(expr)}` may grow beyond {MAGNITUDE_MAX.bit_length() - 1} bits", expr, help)
            return None
        return Int(low, high)

    def divides(self, expr: Expr, kind: Int | Ratio, place: Place) -> bool:
        """Whether a divisor is certain to be above 0, by its bounds or by a guard; a problem where it is not."""
        if least_sign(kind) > 0 or self.scope.known_below(Literal(value=0, span=expr.span), expr, place.facts):
            return True
        if isinstance(kind, Int) and kind.low == kind.high:
            self.report("KV215", f"division by {kind.low}", expr)
            return False
        help = f"state `min: 1` for what it is made of, or guard it, as in `{show(expr)} > 0 and …`"
        if isinstance(expr, Call) and expr.function == "len":
            help = f"guard it, as in `{show(expr)} > 0 and …`"
        self.report("KV215", f"`{show(expr)}` is a divisor and may be 0 or less", expr, help)
        return False

    def of_conditional(self, expr: Conditional, place: Place) -> Type | None:
        self.expect(expr.test, Bool, place)
        then = self.of(expr.then, place.given(self.scope.truths(expr.test)))
        otherwise = self.of(expr.otherwise, place.given(self.scope.truths(expr.test, holds=False)))
        if then is None or otherwise is None:
            return None
        return self.either(expr, then, otherwise)

    def either(self, expr: Expr, one: Type, other: Type) -> Type | None:
        match one, other:
            case Int(), Int():
                return Int(min(one.low, other.low), max(one.high, other.high))
            case ((Int() | Ratio()), (Int() | Ratio())):
                return Ratio(min(least_sign(one), least_sign(other)), max(factors(one), factors(other)))
            case Text(), Text():
                words = (*one.words, *other.words) if one.words is not None and other.words is not None else None
                return Text(words=words)
        if type(one) is type(other) and not isinstance(one, ListOf):
            return one
        self.report("KV212", f"one value is {one}, the other {other}", expr)
        return None

    def of_index(self, expr: Index, place: Place) -> Type | None:
        sequence = self.of(expr.sequence, place)
        index = self.expect(expr.index, Int, place)
        if sequence is None or index is None:
            return None
        if not isinstance(sequence, ListOf) and not (isinstance(sequence, Text) and sequence.letters is not None):
            self.report("KV212", f"expected a list, found {sequence}", expr.sequence)
            return None
        if not self.inside(expr, index, place):  # type: ignore[arg-type]
            shown, length = show(expr.index), f"len({show(expr.sequence)})"
            what = "text" if isinstance(sequence, Text) else "list"
            help, notes = f"guard it, as in `{shown} < {length} and …`, or `require` that the {what} is long enough", ()
            if index.low < 0:  # type: ignore[union-attr]
                help, notes = f"write `max({shown}, 0)`", (f"`{shown}` may be below 0",)
            self.report("KV214", f"`{show(expr)}` may lie outside the {what}", expr, help, notes)
        return Text(words=tuple(sequence.letters)) if isinstance(sequence, Text) else sequence.element  # type: ignore[arg-type]

    def inside(self, expr: Index, index: Int, place: Place) -> bool:
        length = Call(function="len", arguments=(expr.sequence,), span=expr.span)
        if index.low < 0:
            return False
        match expr.index:
            case Binary(operator="%") if expr.index.right == length:
                return True  # the divisor is certain to be above 0, or that is a problem already
        facts = place.facts
        for taken, gained in self.scope.implications if "layer" in place.words else ():
            facts = facts | gained if taken <= facts else facts
        return self.scope.known_below(expr.index, length, facts)

    def of_call(self, expr: Call, place: Place) -> Type | None:
        if expr.function == "has":
            return self.of_has(expr)
        if expr.function == "sizeof":
            return self.of_sizeof(expr, place)
        if expr.function == "len":
            kind = self.of(expr.arguments[0], place)
            if kind is not None and not isinstance(kind, ListOf) and not (isinstance(kind, Text) and kind.letters):
                self.report("KV212", f"expected a list, found {kind}", expr.arguments[0])
                return None
            if kind is None:
                return None
            positive = any(
                high == expr and isinstance(low, Literal) and type(low.value) is int and low.value >= (kind_ == "<=")
                for kind_, low, high in place.facts
            )
            return Int(1 if positive else 0, MAX_LAYERS)
        if expr.function in ("min", "max") and len(expr.arguments) == 1:
            return self.of_least_or_greatest(expr, place)
        wanted = Ratio if expr.function in ("min", "max") else Int
        kinds = [self.expect(part, wanted, place) for part in expr.arguments]
        if any(kind is None for kind in kinds):
            return None
        if any(isinstance(kind, Ratio) for kind in kinds):
            return Ratio(min(map(least_sign, kinds)), max(map(factors, kinds)))  # type: ignore[arg-type]
        if expr.function in ("cdiv", "shard"):
            if not self.divides(expr.arguments[1], kinds[1], place):  # type: ignore[arg-type]
                return None
            kinds[1] = _above_zero(kinds[1])  # type: ignore[arg-type]
        return self.of_whole_numbers(expr, kinds)  # type: ignore[arg-type]

    def of_least_or_greatest(self, expr: Call, place: Place) -> Type | None:
        """`min` or `max` of the elements of a list of ints, which must not be empty."""
        (items,) = expr.arguments
        kind = self.of(items, place)
        if kind is None:
            return None
        if not isinstance(kind, ListOf) or not isinstance(kind.element, Int):
            self.report("KV212", f"`{expr.function}` of one argument is of a list of ints, not of {kind}", items)
            return None
        length = Call(function="len", arguments=(items,), span=items.span)
        if not self.scope.known_below(Literal(value=0, span=items.span), length, place.facts):
            help = f"guard it, as in `len({show(items)}) > 0 and …`"
            self.report("KV214", f"`{show(items)}` may be empty", items, help)
        return kind.element

    def of_whole_numbers(self, expr: Call, kinds: list[Int]) -> Type | None:
        lows, highs = [kind.low for kind in kinds], [kind.high for kind in kinds]
        match expr.function:
            case "min":
                return Int(min(lows), min(highs))
            case "max":
                return Int(max(lows), max(highs))
            case "cdiv":
                least, most = lows[1] if lows[0] < 0 else highs[1], highs[1] if highs[0] < 0 else lows[1]
                return Int(-(-lows[0] // least), -(-highs[0] // most))
            case "shard":
                return Int(min(1, lows[0]), max(1, highs[0]))
            case "gcd":
                return Int(1 if max(lows) > 0 else 0, max(abs(high) for high in (*lows, *highs)))
        high = math.prod(max(1, abs(kind.low), abs(kind.high)) for kind in kinds)
        if high > MAGNITUDE_MAX:
            help = "state a `max` for what it is made of"
            self.report("KV216", f"`{show(expr)}` may grow beyond {MAGNITUDE_MAX.bit_length() - 1} bits", expr, help)
            return None
        return Int(1 if min(lows) > 0 else 0, high)

    def of_has(self, expr: Call) -> Type | None:
        name = expr.arguments[0]
        entity = self.scope.entities.get(name.name) if isinstance(name, Name) else None
        if not isinstance(name, Name):
            self.report("KV212", f"`has` asks about a name, not about `{show(name)}`", name)
        elif entity is None:
            self.report("KV210", f"unknown name `{name.name}`", name, suggest(name.name, self.scope.entities))
        elif not entity.optional:
            notes = ("only a config parameter with `optional: true` can be absent",)
            self.report("KV213", f"`{name.name}` is never absent", name, notes=notes)
        return Bool()

    def of_sizeof(self, expr: Call, place: Place) -> Type | None:
        name, slots = expr.arguments
        kind = self.expect(slots, Int, place)
        if isinstance(kind, Int) and kind.low < 1:
            known = kind.low == kind.high
            message = f"a page of {kind.low} slots has no size" if known else f"`{show(slots)}` slots may be none"
            self.report("KV212", message, slots, None if known else "state `min: 1` for what it is made of")
        if not isinstance(name, Name) or name.name not in self.scope.formats():
            message = f"unknown format `{show(name)}`"
            self.report("KV210", message, name, suggest(show(name), self.scope.formats()))
            return None
        if "layer" not in place.words and self.scope.varies(expr):
            message = f"a page of `{name.name}` depends on the layer, which has no value here"
            self.report("KV211", message, name, notes=(_WHERE["layer"],))
            return None
        return Int(1, 2**62)


_NAMES = {Int: "an int", Ratio: "a number", Bool: "a bool", Text: "a text", ListOf: "a list"}
_WHERE = {
    "layer": "`layer` has a value in sets (not in their `when`), `layers`, `require` and axes, and in lets used there",
    "tokens": "`tokens` has a value in the `slots` of a space",
    "requests": "`requests` has a value in the `slots` of a space",
    "offset": "`offset` has a value in the `slot` and `where` of a space",
}


def _above_zero(kind: Int | Ratio) -> Int | Ratio:
    """The type of a divisor that a guard makes certain to be above 0."""
    return Int(max(1, kind.low), max(1, kind.high)) if isinstance(kind, Int) else kind


_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}
