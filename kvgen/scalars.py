"""Plain scalars: which texts without quotes are numbers and words, and which YAML readers disagree about."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_INTEGER = 2**63 - 1  # magnitude of any number
MAX_DIGITS = 40  # of a decimal number
MAX_EXPONENT = 64  # magnitude of the power of ten of a decimal number

_DECIMAL = re.compile(r"(-?)(0|[1-9][0-9]*)(?:\.([0-9]+))?(?:[eE]([-+]?[0-9]+))?")
_CONSTANTS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Misreading:
    """A spelling that some YAML reader takes for something else than a text, and that kvgen refuses."""

    code: str
    message: str  # with a place for the quoted text
    respell: Callable[[str], str | None] = lambda text: None  # how kvgen writes what such a reader reads
    otherwise: str = "put quotes round it if a text is meant"  # the help if there is no such way

    def help(self, text: str) -> str:
        """What to write instead."""
        spelling = self.respell(text)
        return self.otherwise if spelling is None else f"write `{spelling}`, or put quotes round it if a text is meant"


def _in_decimal(text: str) -> str | None:
    """An integer with a base prefix, in decimal, unless it is long. A leading zero has two readings, so it has none."""
    digits = text.lower().lstrip("+-").replace("_", "")
    base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2])
    if base is None or not 2 < len(digits) <= 18:
        return None
    return f"{'-' if text[0] == '-' else ''}{int(digits[2:], base)}"


def _respelled(text: str) -> str | None:
    """A number without plus sign, leading zeros, underscores or bare point, unless it is long."""
    number = text.lstrip("+").replace("_", "")
    number = re.sub(r"(?<![0-9])\.", "0.", number)
    number = re.sub(r"\.(?![0-9])", "", number)
    number = re.sub(r"^(-?)0+(?=[0-9])", r"\1", number)
    return number if len(number) <= MAX_DIGITS and _DECIMAL.fullmatch(number) else None


_BOOLEAN, _NULL, _INFINITY, _SPECIAL = (
    Misreading(
        "KV020",
        "{} is a boolean in some versions of YAML only",
        lambda text: "true" if text.lower() in ("true", "yes", "on") else "false",
    ),
    Misreading("KV021", "{} is another spelling of null", lambda text: "null"),
    Misreading(
        "KV026", "{} is another spelling of an infinity or NaN", lambda text: text.lower().replace(".", "").lstrip("+")
    ),
    Misreading("KV028", "{} has a meaning of its own in YAML"),
)
_MISREAD_WORDS = {
    spelling: misreading
    for misreading, words in (
        (_BOOLEAN, ("yes", "no", "on", "off", "true", "false")),
        (_NULL, ("~", "null")),
        (_INFINITY, (".nan", ".NaN", ".inf", "-.inf", "+.inf")),
        (_SPECIAL, ("=", "<<")),
    )
    for word in words
    for spelling in (word, word.title(), word.upper())
}
_MISREAD_NUMBERS = tuple(
    (re.compile(pattern), misreading)
    for pattern, misreading in (
        (
            "[-+]?0(?:[0-9_]+|[xX][0-9a-fA-F_]+|[oO][0-7_]+|[bB][01_]+)",
            Misreading(
                "KV022",
                "{} is not a plain decimal number",
                _in_decimal,
                "write the number in decimal, or put quotes round it if a text is meant",
            ),
        ),
        (
            r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?",
            Misreading(
                "KV023",
                "{} is another spelling of a number",
                _respelled,
                "write plain decimal digits, or put quotes round it if a text is meant",
            ),
        ),
        (
            r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?",
            Misreading("KV024", "{} is a number in base 60 in some versions of YAML only"),
        ),
        (
            "[0-9]{4}-(?:[0-9]{2}-[0-9]{2}|[0-9]{1,2}-[0-9]{1,2}(?:[Tt]|[ ]+)[0-9]{1,2}:[0-9]{2}:[0-9]{2}.*)",
            Misreading("KV025", "{} is a date in some versions of YAML only"),
        ),
    )
)


def resolve(text: str) -> int | Fraction | bool | None | str | Misreading:
    """What a plain scalar means, or why it is refused. Raises OverflowError, naming the bound, for one beyond it."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text in _MISREAD_WORDS:
        return _MISREAD_WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    if match := _DECIMAL.fullmatch(text):
        return _number(*match.groups(default=""))
    return next((misreading for pattern, misreading in _MISREAD_NUMBERS if pattern.fullmatch(text)), text)


def _number(sign: str, whole: str, fraction: str, exponent: str) -> int | Fraction:
    """The exact number: an int if it is written as one, else a Fraction."""
    if len(whole + fraction) > MAX_DIGITS:
        raise OverflowError(f"a number has at most {MAX_DIGITS} digits")
    if len(exponent) > MAX_DIGITS or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise OverflowError(f"an exponent is at most {MAX_EXPONENT} in magnitude")
    number: int | Fraction = int(sign + whole + fraction)
    if fraction or exponent:
        number = number * Fraction(10) ** (int(exponent or 0) - len(fraction))
    if abs(number) > MAX_INTEGER:
        raise OverflowError(f"a number is at most {MAX_INTEGER} in magnitude")
    return number
