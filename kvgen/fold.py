"""Folding: the parts of an expression that are known at build become their values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from kvgen.expr import Binary, Call, Conditional, Expr, Index, Literal, Name, Unary, show
from kvgen.problems import InternalError, Span
from kvgen.spec import Let
from kvgen.types import Text

if TYPE_CHECKING:
    from kvgen.scope import Scope

CODES = {"KV217": "a division that leaves a remainder"}


class FoldError(Exception):
    """An expression without a value, found while folding: an inexact division, for one.

    `reported`: its types do not fit, which is a problem already.
    """

    def __init__(self, message: str, span: Span, reported: bool = False) -> None:
        super().__init__(message)
        self.message, self.span, self.reported = message, span, reported


class Folding:
    """Values of the parts of one expression that are known at build, or for the names in `known`."""

    def __init__(self, scope: Scope, known: Mapping[str, Literal | None]) -> None:
        self.scope, self.known = scope, known
        self.lets: dict[str, Expr] = {}  # folded with `known`, each once

    def fold(self, expr: Expr) -> Expr:
        try:
            return self.folded(expr)
        except (TypeError, ValueError, ZeroDivisionError):
            raise FoldError(f"`{show(expr)}` has no value", expr.span, reported=True) from None

    def folded(self, expr: Expr) -> Expr:
        match expr:
            case Literal():
                return expr
            case Name():
                return self.name(expr)
            case Unary():
                return self.unary(expr)
            case Binary(operator="and" | "or"):
                return self.logic(expr)
            case Binary():
                return self.binary(expr)
            case Conditional():
                return self.conditional(expr)
            case Index():
                return replace(expr, index=self.fold(expr.index))
            case Call(function="has", arguments=(Name(name=name),)) if name in self.known:
                return self.literal(self.known[name] is not None, expr)
            case Call(function="has" | "len"):
                return expr
            case Call(function="sizeof"):
                return replace(expr, arguments=(expr.arguments[0], self.fold(expr.arguments[1])))
            case Call():
                return self.call(expr)
        raise InternalError(f"cannot fold {type(expr).__name__}")

    def literal(self, value: object, expr: Expr) -> Literal:
        return Literal(value=value, span=expr.span)  # type: ignore[arg-type]

    def name(self, expr: Name) -> Expr:
        value = self.known.get(expr.name)
        if value is not None:
            return replace(value, span=expr.span)
        entity = self.scope.entities.get(expr.name)
        if entity is None:
            return expr
        if entity.value is not None:
            return replace(entity.value, span=expr.span)
        if self.known and isinstance(entity.definition, Let) and not entity.varies and entity.type is not None:
            if expr.name not in self.lets:
                self.lets[expr.name] = self.fold(entity.definition.value)
            value = self.lets[expr.name]
            return replace(value, span=expr.span) if isinstance(value, Literal) else expr
        return expr

    def unary(self, expr: Unary) -> Expr:
        operand = self.fold(expr.operand)
        if isinstance(operand, Literal):
            return self.literal(not operand.value if expr.operator == "not" else -operand.value, expr)  # type: ignore[operator]
        return replace(expr, operand=operand)

    def logic(self, expr: Binary) -> Expr:
        decides = expr.operator == "or"
        left = self.fold(expr.left)
        if isinstance(left, Literal):
            return left if left.value is decides else self.fold(expr.right)
        right = self.fold(expr.right)
        if isinstance(right, Literal):
            return right if right.value is decides else left
        return replace(expr, left=left, right=right)

    def binary(self, expr: Binary) -> Expr:
        left, right = self.fold(expr.left), self.fold(expr.right)
        if not (isinstance(left, Literal) and isinstance(right, Literal)):
            if expr.operator in ("==", "!=") and self.never_equal(left, right):
                return self.literal(expr.operator == "!=", expr)
            return replace(expr, left=left, right=right)
        return self.literal(self.apply(expr, left.value, right.value), expr)

    def never_equal(self, left: Expr, right: Expr) -> bool:
        """Whether one is a text that the other, a name, cannot be here (it can be, in other layouts of a fragment)."""
        for name, word in ((left, right), (right, left)):
            if isinstance(name, Name) and isinstance(word, Literal) and name.name in self.scope.entities:
                kind = self.scope.entities[name.name].type
                return isinstance(kind, Text) and kind.words is not None and word.value not in kind.words
        return False

    def apply(self, expr: Binary, a: object, b: object) -> object:
        match expr.operator:
            case "==":
                return a == b
            case "!=":
                return a != b
            case "in":
                return a in b  # type: ignore[operator]
            case "<":
                return a < b  # type: ignore[operator]
            case "<=":
                return a <= b  # type: ignore[operator]
            case ">":
                return a > b  # type: ignore[operator]
            case ">=":
                return a >= b  # type: ignore[operator]
            case "+":
                return a + b  # type: ignore[operator]
            case "-":
                return a - b  # type: ignore[operator]
            case "*":
                return a * b  # type: ignore[operator]
            case "//":
                return a // b  # type: ignore[operator]
            case "%":
                return a % b  # type: ignore[operator]
        quotient = Fraction(a) / Fraction(b)  # type: ignore[arg-type]
        if isinstance(a, int) and isinstance(b, int) and quotient.denominator != 1:
            raise FoldError(f"{a} / {b} leaves a remainder", expr.span)
        return int(quotient) if isinstance(a, int) and isinstance(b, int) else quotient

    def conditional(self, expr: Conditional) -> Expr:
        test = self.fold(expr.test)
        if isinstance(test, Literal):
            return self.fold(expr.then if test.value else expr.otherwise)
        return replace(expr, test=test, then=self.fold(expr.then), otherwise=self.fold(expr.otherwise))

    def call(self, expr: Call) -> Expr:
        arguments = tuple(self.fold(part) for part in expr.arguments)
        if not all(isinstance(part, Literal) for part in arguments):
            return replace(expr, arguments=arguments)
        values = [part.value for part in arguments]  # type: ignore[attr-defined]
        match expr.function:
            case "min":
                return self.literal(min(values), expr)
            case "max":
                return self.literal(max(values), expr)
            case "cdiv":
                return self.literal(-(-values[0] // values[1]), expr)
            case "lcm":
                return self.literal(math.lcm(*values), expr)
            case "gcd":
                return self.literal(math.gcd(*values), expr)
            case "shard":
                heads, ranks = values
                if heads % ranks and ranks % heads:
                    raise FoldError(f"{heads} heads cannot be divided over {ranks} ranks", expr.span)
                return self.literal(heads // ranks if heads % ranks == 0 else 1, expr)
        raise InternalError(f"cannot fold {expr.function}")
