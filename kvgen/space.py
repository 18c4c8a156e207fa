"""Spaces as arithmetic: slots per token and request, and slots per page where they are known at build."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvgen.expr import Binary, Expr, Literal, Name, names
from kvgen.problems import Span
from kvgen.scope import Scope
from kvgen.size import Size
from kvgen.spec import Buffer, Derived, Root, Spec


@dataclass(frozen=True, kw_only=True)
class Rate:
    """An exact `numerator / denominator`, such as slots per token."""

    numerator: Expr
    denominator: Expr

    @property
    def known(self) -> Fraction | None:
        if isinstance(self.numerator, Literal) and isinstance(self.denominator, Literal):
            return Fraction(self.numerator.value) / Fraction(self.denominator.value)  # type: ignore[arg-type]
        return None


def page_slots(spec: Spec, scope: Scope, buffer: Buffer) -> Size | None:
    """Slots of a physical page of the buffer: a number where it is known at build. None where the space is unknown."""
    if buffer.block is not None:
        block = scope.fold(buffer.block)
        return Size.of(block.value) if isinstance(block, Literal) and type(block.value) is int else Size.of("slots")
    found = page_sizes(spec, scope, buffer.space.text)
    if found is None:
        return None
    return Size.of(found.pop()) if len(found) == 1 and None not in found else Size.of("slots")  # type: ignore[arg-type]


def page_sizes(spec: Spec, scope: Scope, name: str) -> set[int | None] | None:
    """The slots per page a space can have; None among them where it is not known at build.

    None where the space, or one it rests on, is unknown or leads back to itself.
    """
    spaces = {item.name.text: item for item in spec.spaces}
    found: dict[str, set[int | None] | None] = {}

    def visit(name: str) -> set[int | None] | None:
        if name in found or name not in spaces:
            return found.get(name)
        found[name] = None  # until it is known, so that a circle ends
        sizes: set[int | None] = set()
        for case in spaces[name].cases:
            own = _known_page(scope, case.use.page) if isinstance(case.use, Root) else _derived_pages(case.use)
            if own is None:
                return None
            sizes |= own
        found[name] = sizes
        return sizes

    def _derived_pages(use: Derived) -> set[int | None] | None:
        parents = visit(use.parent.text)
        if parents is None:
            return None
        divisor = None if use.divisor is None else scope.fold(use.divisor)
        number = 1 if divisor is None else divisor.value if isinstance(divisor, Literal) else None
        if use.operator == "%" or not isinstance(number, int):
            return {number if isinstance(number, int) else None}
        return {None if parent is None else parent // number for parent in parents}

    return visit(name)


def _known_page(scope: Scope, page: Expr) -> set[int | None]:
    folded = scope.fold(page)
    return {folded.value if isinstance(folded, Literal) and type(folded.value) is int else None}


def affine(scope: Scope, expr: Expr) -> dict[str, Rate] | None:
    """`expr` as rates of `tokens`, `requests` and 1. None where it is not affine in them."""
    one = Literal(value=1, span=expr.span)
    match expr:
        case Name(name="tokens" | "requests"):
            return {expr.name: Rate(numerator=one, denominator=one)}
        case Binary(operator="+" | "-"):
            left, right = affine(scope, expr.left), affine(scope, expr.right)
            if left is None or right is None:
                return None
            return {
                key: _sum(expr.operator, left.get(key), right.get(key), expr.span) for key in sorted({*left, *right})
            }
        case Binary(operator="*"):
            left, right = affine(scope, expr.left), affine(scope, expr.right)
            if left is None or right is None:
                return None
            constant, other = (left, right) if set(left) <= {""} else (right, left)
            if not set(constant) <= {""}:
                return None
            factor = constant.get("")
            return {key: _product(scope, rate, factor) for key, rate in other.items()} if factor else {}
        case Binary(operator="/"):
            left, right = affine(scope, expr.left), affine(scope, expr.right)
            if left is None or right is None or set(right) != {""}:
                return None
            inverse = Rate(numerator=right[""].denominator, denominator=right[""].numerator)
            return {key: _product(scope, rate, inverse) for key, rate in left.items()}
    if names(expr) & {"tokens", "requests"}:
        return None
    return {"": Rate(numerator=scope.fold(expr), denominator=one)}


def _sum(operator: str, left: Rate | None, right: Rate | None, span: Span) -> Rate:
    if right is None and left is not None:
        return left
    if left is None and right is not None and operator == "+":
        return right
    zero = Literal(value=0, span=span)
    one = Literal(value=1, span=span)
    left = left or Rate(numerator=zero, denominator=one)
    assert right is not None
    if left.denominator == right.denominator:
        return _simple(
            Binary(operator=operator, left=left.numerator, right=right.numerator, span=span), left.denominator
        )
    crossed = Binary(
        operator=operator,
        left=Binary(operator="*", left=left.numerator, right=right.denominator, span=span),
        right=Binary(operator="*", left=right.numerator, right=left.denominator, span=span),
        span=span,
    )
    return _simple(crossed, Binary(operator="*", left=left.denominator, right=right.denominator, span=span))


def _simple(numerator: Expr, denominator: Expr) -> Rate:
    def folded(expr: Expr) -> Expr:
        if isinstance(expr, Binary) and isinstance(expr.left, Literal) and isinstance(expr.right, Literal):
            a, b = Fraction(expr.left.value), Fraction(expr.right.value)  # type: ignore[arg-type]
            value = {"+": a + b, "-": a - b, "*": a * b}[expr.operator]
            return Literal(value=int(value) if value.denominator == 1 else value, span=expr.span)
        return expr

    return Rate(numerator=folded(numerator), denominator=folded(denominator))


def _product(scope: Scope, rate: Rate, factor: Rate | None) -> Rate:
    assert factor is not None

    def times(a: Expr, b: Expr) -> Expr:
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Literal) and one.value == 1:
                return other
        product = Binary(operator="*", left=a, right=b, span=a.span)
        return _simple(product, a).numerator

    return Rate(
        numerator=times(rate.numerator, factor.numerator), denominator=times(rate.denominator, factor.denominator)
    )
