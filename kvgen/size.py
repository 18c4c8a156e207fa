"""Exact sizes: sums of products of names, an int where everything is known at build.

A name stands for an int that is at least 0 when a layout is made. Every coefficient is above 0, so a size is never
negative and grows with each of its names; comparing two sizes term by term is therefore a proof for every value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod

from kvgen.problems import InternalError

MAX_TERMS = 32


@dataclass(frozen=True)
class Size:
    """`terms`: (names of the product, coefficient), sorted; no terms is 0. A name may be any Python operand."""

    terms: tuple[tuple[tuple[str, ...], int], ...] = ()

    def __post_init__(self) -> None:
        if any(coefficient <= 0 for _, coefficient in self.terms):
            raise InternalError(f"size with a coefficient that is not above 0: {self.terms}")

    @staticmethod
    def of(value: int | str) -> Size:
        """A number, or the name of one."""
        if isinstance(value, str):
            return Size((((value,), 1),))
        return Size((((), value),)) if value else Size()

    @property
    def known(self) -> int | None:
        """The number, where no name is left."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({name for product, _ in self.terms for name in product}))

    def __add__(self, other: Size | int) -> Size:
        total = dict(self.terms)
        for product, coefficient in _size(other).terms:
            total[product] = total.get(product, 0) + coefficient
        return _from(total)

    def __mul__(self, other: Size | int) -> Size:
        total: dict[tuple[str, ...], int] = {}
        for left, a in self.terms:
            for right, b in _size(other).terms:
                product = tuple(sorted((*left, *right)))
                total[product] = total.get(product, 0) + a * b
        if len(total) > MAX_TERMS:
            raise SizeError(f"a size of more than {MAX_TERMS} terms")
        return _from(total)

    def divisible_by(self, number: int, divisors: Mapping[str, int] | None = None) -> bool:
        """Whether it is a multiple of `number` whatever the names stand for. False is no proof of the contrary.

        Args:
            number: at least 1.
            divisors: names that are known to be multiples of something.
        """
        known = divisors or {}
        return all(
            coefficient * prod(known.get(name, 1) for name in product) % number == 0
            for product, coefficient in self.terms
        )

    def divisor(self, divisors: Mapping[str, int]) -> int:
        """The greatest number it is certain to be a multiple of, given those of some names; 0 for 0."""
        return gcd(
            *(coefficient * prod(divisors.get(name, 1) for name in product) for product, coefficient in self.terms)
        )

    def divided_by(self, number: int) -> Size:
        """Exactly; InternalError where it is not certain to be a multiple."""
        if not self.divisible_by(number):
            raise InternalError(f"{self} is not certain to be a multiple of {number}")
        return Size(tuple((product, coefficient // number) for product, coefficient in self.terms))

    def floored(self, divisor: int) -> Size:
        """self // divisor, kept as one name where what it comes to is not known."""
        if divisor == 1:
            return self
        if self.known is not None:
            return Size.of(self.known // divisor)
        if self.divisible_by(divisor):
            return self.divided_by(divisor)
        text = str(self) if len(self.terms) == 1 and self.names == (str(self),) else f"({self})"
        return Size.of(f"{text} // {divisor}")

    def replacing(self, name: str, size: Size) -> Size:
        """The same with `size` for every mention of the name."""
        total = Size()
        for product, coefficient in self.terms:
            term = Size.of(coefficient)
            for part in product:
                term = term * (size if part == name else Size.of(part))
            total = total + term
        return total

    def at_least(self, other: Size) -> bool:
        """Whether self >= other for every value of the names. False is no proof of the contrary."""
        own = dict(self.terms)
        return all(own.get(product, 0) >= coefficient for product, coefficient in other.terms)

    def __str__(self) -> str:
        """As Python."""
        return " + ".join(self.products) or "0"

    @property
    def products(self) -> tuple[str, ...]:
        """The terms as Python, a name alone first, then the highest products."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0]
        parts = []
        for product, coefficient in sorted(self.terms, key=lambda term: (-len(term[0]), term[0])):
            factors = [str(coefficient)] if coefficient != 1 or not product else []
            names = sorted(product, key=lambda name: (name != "slots", name))
            parts.append(" * ".join([*factors, *(_operand(name) for name in names)]))
        return tuple(parts)


class SizeError(Exception):
    """A size that grows beyond what a page could mean."""


def _operand(name: str) -> str:
    return name if name.isidentifier() or name.endswith(("]", ")")) else f"({name})"


def _size(value: Size | int) -> Size:
    return value if isinstance(value, Size) else Size.of(value)


def _from(total: dict[tuple[str, ...], int]) -> Size:
    return Size(tuple(sorted((product, number) for product, number in total.items() if number)))
