"""Types of expressions: what a value can be, with bounds for numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction

DTYPES = {  # name: bits
    "bf16": 16,
    "f16": 16,
    "f32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "e8m0": 8,
    "e2m1": 4,
    "u8": 8,
    "i8": 8,
    "i32": 32,
    "i64": 64,
}
MAX_LAYERS = 10_000
DERIVED_SLOTS_MAX = 2**20  # of a page that a space with other slots is derived from: the rows of all are listed
PARAMETER_MAX = 2**40  # of an int parameter that states no `max`
MAGNITUDE_MAX = 2**256  # of any number an expression can come to
FACTORS_MAX = 64  # of a ratio


WORDS_OF_THE_LANGUAGE = (
    "layer",
    "tokens",
    "requests",
    "offset",
    "slot",
    "body",
    "draft",
    "all",
    "role",
    "start_layer",
    "end_layer",
)


@dataclass(frozen=True)
class Int:
    low: int
    high: int

    def __str__(self) -> str:
        return "an int"


@dataclass(frozen=True)
class Ratio:
    sign: int = -1  # 1: certain to be above 0; 0: certain not to be below 0; -1: neither
    factors: int = 1  # numbers that its numerator or denominator may be a product of

    def __str__(self) -> str:
        return "a ratio"


@dataclass(frozen=True)
class Bool:
    def __str__(self) -> str:
        return "a bool"


@dataclass(frozen=True)
class Text:
    words: tuple[str, ...] | None = None  # the values it can have
    letters: str | None = None  # the letters it can have

    def __str__(self) -> str:
        return "a text"


@dataclass(frozen=True)
class ListOf:
    element: Int | Text

    def __str__(self) -> str:
        return "a list"


Type = Int | Ratio | Bool | Text | ListOf


def sign_of(number: int | Fraction) -> int:
    return (number > 0) - (number < 0)


def factors(kind: Int | Ratio) -> int:
    return kind.factors if isinstance(kind, Ratio) else 1


def least_sign(kind: Int | Ratio) -> int:
    """The least sign the number can have."""
    return sign_of(kind.low) if isinstance(kind, Int) else kind.sign


def closest(name: str, known: Iterable[str]) -> str | None:
    """The name that a misspelt one may stand for, or None."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return close[0] if close else None


def suggest(name: str, known: Iterable[str]) -> str | None:
    """A `did you mean` for a misspelt name, or None."""
    close = closest(name, known)
    return None if close is None else f"did you mean `{close}`?"
