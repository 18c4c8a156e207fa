"""Expressions of a spec: text to a tree that knows the place of every part.

The language is small and closed; Python never evaluates it:

    e := e 'if' e 'else' e | e or e | e and e | not e | e (== != < <= > >= in) e | e (+ - * / // %) e
       | -e | e[e] | f(e, ...) | name | 12 | 0.5 | 'text' | true | false

Precedence is Python's; comparisons do not chain. Length, depth and literals are bounded, so that no spec can
make the compiler slow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from kvgen.nodes import Scalar
from kvgen.problems import InternalError, Label, Problem, Span

MAX_CHARACTERS = 1_000
MAX_DEPTH = 32  # brackets, calls, `not` and `if` within each other
MAX_HEIGHT = 128  # of the tree; a sum of n parts is n high
MAX_INTEGER = 2**63 - 1

CODES = {"KV201": "an expression that does not parse"}

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=", "in")
FUNCTIONS = {  # name: least and greatest number of arguments
    "min": (1, 8),  # one argument is a list
    "max": (1, 8),
    "cdiv": (2, 2),
    "lcm": (2, 8),
    "gcd": (2, 8),
    "len": (1, 1),
    "has": (1, 1),
    "shard": (2, 2),
    "sizeof": (2, 2),
}
KEYWORDS = ("if", "else", "or", "and", "not", "in", "true", "false")


@dataclass(frozen=True, kw_only=True)
class Expr:
    """A part of an expression. Two are equal when they say the same, wherever they stand."""

    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Literal(Expr):
    value: int | Fraction | bool | str

    def __eq__(self, other: object) -> bool:
        """`1` and `true` are different literals, although Python calls them equal."""
        return isinstance(other, Literal) and (type(self.value), self.value) == (type(other.value), other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


@dataclass(frozen=True, kw_only=True)
class Name(Expr):
    name: str  # dotted only in the `from` of a config parameter


@dataclass(frozen=True, kw_only=True)
class Unary(Expr):
    operator: str  # "not" or "-"
    operand: Expr


@dataclass(frozen=True, kw_only=True)
class Binary(Expr):
    operator: str
    left: Expr
    right: Expr


@dataclass(frozen=True, kw_only=True)
class Conditional(Expr):
    then: Expr
    test: Expr
    otherwise: Expr


@dataclass(frozen=True, kw_only=True)
class Index(Expr):
    sequence: Expr
    index: Expr


@dataclass(frozen=True, kw_only=True)
class Call(Expr):
    function: str
    arguments: tuple[Expr, ...]


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct parts of an expression, in reading order."""
    match expr:
        case Unary():
            return (expr.operand,)
        case Binary():
            return (expr.left, expr.right)
        case Conditional():
            return (expr.then, expr.test, expr.otherwise)
        case Index():
            return (expr.sequence, expr.index)
        case Call():
            return expr.arguments
    return ()


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and all its parts."""
    yield expr
    for part in children(expr):
        yield from walk(part)


def names(expr: Expr) -> set[str]:
    """Every name the expression mentions, formats named in `sizeof` included."""
    return {part.name for part in walk(expr) if isinstance(part, Name)}


def _height(expr: Expr) -> int:
    """Parts on the longest way down. Without recursion: it guards the functions that recurse."""
    height, level = 0, [expr]
    while level:
        height += 1
        level = [part for parent in level for part in children(parent)]
    return height


PRECEDENCE = {"or": 1, "and": 2, "not": 3, **dict.fromkeys(COMPARISONS, 4)}
PRECEDENCE |= {"+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6}
NEGATE, POSTFIX = 7, 8


def show(expr: Expr, outer: int = 0) -> str:
    """The expression as text again, with no more brackets than it needs."""
    match expr:
        case Literal(value=bool()):
            return "true" if expr.value else "false"
        case Literal(value=str()):
            return f"'{expr.value}'"
        case Literal(value=Fraction()):
            text = _decimal(expr.value)
            own = PRECEDENCE["/"] if " " in text else POSTFIX
        case Literal():
            return str(expr.value)
        case Name():
            return expr.name
        case Index():
            return f"{show(expr.sequence, POSTFIX)}[{show(expr.index)}]"
        case Call():
            return f"{expr.function}({', '.join(show(part) for part in expr.arguments)})"
        case Unary(operator="not"):
            own, text = PRECEDENCE["not"], f"not {show(expr.operand, PRECEDENCE['not'])}"
        case Unary():
            own, text = NEGATE, f"-{show(expr.operand, NEGATE)}"
        case Binary():
            own = PRECEDENCE[expr.operator]
            left = own + 1 if expr.operator in COMPARISONS else own
            text = f"{show(expr.left, left)} {expr.operator} {show(expr.right, own + 1)}"
        case Conditional():
            own = 0
            text = f"{show(expr.then, 1)} if {show(expr.test, 1)} else {show(expr.otherwise)}"
        case _:
            raise InternalError(f"cannot show {type(expr).__name__}")
    return f"({text})" if outer > own else text


def _decimal(number: Fraction) -> str:
    """`0.5`, as a literal is written; `1 / 3` where there is no end to its digits."""
    places = next((places for places in range(1, 41) if 10**places % number.denominator == 0), None)
    if places is None:
        return f"{number.numerator} / {number.denominator}"
    digits = str(abs(number.numerator) * 10**places // number.denominator).zfill(places + 1)
    return f"{'-' if number < 0 else ''}{digits[:-places]}.{digits[-places:]}"


@dataclass(frozen=True)
class _Token:
    kind: str  # "number", "text", "name", "operator", "end"
    text: str
    start: int
    end: int


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>\d[\d_.]*[A-Za-z_]?\w*)
    | (?P<text>'[^'"\\]*'|"[^'"\\]*")
    | (?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)
    | (?P<operator>//|==|!=|<=|>=|\*\*|&&|\|\||[-+*/%<>()\[\],])
    )""",
    re.VERBOSE | re.ASCII,
)
_BLANKS = " \t\n\r\f\v"  # what `\s` above skips
_SLIPS = {
    "&&": "write `and`",
    "||": "write `or`",
    "**": "there are no powers; multiply",
    "=": "write `==`",
    "!": "write `not`",
    "True": "write `true`",
    "False": "write `false`",
    "None": "there is no null in expressions; `has(name)` asks whether an optional name is given",
    "null": "there is no null in expressions; `has(name)` asks whether an optional name is given",
    "is": "write `==`",
    "?": "write `a if test else b`",
}


class _Refusal(Exception):
    """Carries the first problem of one expression out of the parser."""

    def __init__(self, start: int, end: int, message: str, help: str | None = None) -> None:
        super().__init__(message)
        self.start, self.end, self.message, self.help = start, end, message, help


def parse(scalar: Scalar, path: str, problems: list[Problem], part: tuple[int, int] | None = None) -> Expr | None:
    """The tree of a scalar's text, or of the characters `part` of it; a number or boolean is itself.

    None after adding the first problem to `problems`.
    """
    if isinstance(scalar.value, (int, Fraction)):  # bool is an int
        return Literal(value=scalar.value, span=scalar.span)
    if not isinstance(scalar.value, str):
        problems.append(_problem(scalar.span, path, "an expression is missing", None))
        return None
    try:
        return _Parser(scalar, *(part or (0, len(scalar.value)))).whole()
    except _Refusal as refusal:
        first = part[0] if part else 0
        span = scalar.part(first + refusal.start, first + refusal.end)
        problems.append(_problem(span, path, refusal.message, refusal.help))
        return None


def _problem(span: Span, path: str, message: str, help: str | None) -> Problem:
    return Problem(code="KV201", message=message, primary=Label(span), help=help, path=path)


class _Parser:
    """Precedence climbing over the tokens of one expression."""

    def __init__(self, scalar: Scalar, first: int, last: int) -> None:
        self.scalar = scalar
        self.first = first
        self.text = str(scalar.value)[first:last]
        if len(self.text) > MAX_CHARACTERS:
            message = f"expression of {len(self.text):,} characters; the limit is {MAX_CHARACTERS:,}"
            raise _Refusal(0, len(self.text), message, "name its parts under `let`")
        self.tokens = list(self._scan())
        self.at = 0
        self.depth = 0

    def _scan(self) -> Iterator[_Token]:
        position, end = 0, len(self.text.rstrip(_BLANKS))
        while position < end:
            match = _TOKEN.match(self.text, position)
            if match is None:
                position += len(self.text[position:]) - len(self.text[position:].lstrip(_BLANKS))
                raise self._unreadable(position)
            kind = str(match.lastgroup)
            token = _Token(kind, match[kind], match.start(kind), match.end(kind))
            if token.text in _SLIPS:
                raise _Refusal(
                    token.start, token.end, f"`{token.text}` is not part of the language", _SLIPS[token.text]
                )
            if kind == "text" and not token.text.isprintable():
                raise _Refusal(token.start, token.end, "text with a character that cannot be printed")
            yield token
            position = match.end()
        yield _Token("end", "end of the expression", end, end + 1 if end == 0 else end)

    def _unreadable(self, position: int) -> _Refusal:
        character = self.text[position]
        if character in "'\"":
            closing = self.text.find(character, position + 1)
            message = "text with a quote or backslash in it" if closing >= 0 else "text is not closed"
            return _Refusal(position, len(self.text), message, "texts are plain words in single quotes, as in 'full'")
        help = _SLIPS.get(character, "the language has + - * / // % == != < <= > >= in and or not if else [ ] ( )")
        shown = character if character.isprintable() else f"U+{ord(character):04X}"
        return _Refusal(position, position + 1, f"`{shown}` is not part of the language", help)

    def whole(self) -> Expr:
        expr = self.conditional()
        if self.here.kind != "end":
            raise self._unexpected("an operator or the end")
        if _height(expr) > MAX_HEIGHT:
            raise _Refusal(0, len(self.text), "expression with too many parts", "name its parts under `let`")
        return expr

    @property
    def here(self) -> _Token:
        return self.tokens[self.at]

    def _unexpected(self, wanted: str) -> _Refusal:
        token = self.here
        if token.kind == "end":
            last = self.tokens[self.at - 1] if self.at else token
            return _Refusal(
                last.start, max(last.end, last.start + 1), f"the expression ends where {wanted} was expected"
            )
        help = None
        if token.text == "not" and self.at and self.tokens[min(self.at + 1, len(self.tokens) - 1)].text == "in":
            help = "write `not a in b`"
        elif token.text == "[":
            help = "expressions have no lists of their own; read one from the config, or compare with `or`"
        elif token.text in COMPARISONS:
            help = "comparisons do not chain; join two with `and`"
        return _Refusal(token.start, token.end, f"`{token.text}` stands where {wanted} was expected", help)

    def _take(self, *texts: str) -> _Token | None:
        token = self.here
        if token.kind in ("operator", "name") and token.text in texts:
            self.at += 1
            return token
        return None

    def _expect(self, text: str) -> _Token:
        token = self._take(text)
        if token is None:
            raise self._unexpected(f"`{text}`")
        return token

    def _nested(self, rule: Callable[[], Expr]) -> Expr:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _Refusal(
                self.here.start, self.here.end, f"expression nested over {MAX_DEPTH} deep", "name its parts under `let`"
            )
        expr = rule()
        self.depth -= 1
        return expr

    def _span(self, start: int) -> Span:
        return self.scalar.part(self.first + start, self.first + self.tokens[self.at - 1].end)

    def conditional(self) -> Expr:
        start = self.here.start
        then = self.either()
        if not self._take("if"):
            return then
        test = self._nested(self.either)
        self._expect("else")
        otherwise = self._nested(self.conditional)
        return Conditional(then=then, test=test, otherwise=otherwise, span=self._span(start))

    def either(self) -> Expr:
        return self._left_to_right(self.both, "or")

    def both(self) -> Expr:
        return self._left_to_right(self.negation, "and")

    def negation(self) -> Expr:
        start = self.here.start
        if self._take("not"):
            operand = self._nested(self.negation)
            return Unary(operator="not", operand=operand, span=self._span(start))
        return self.comparison()

    def comparison(self) -> Expr:
        start = self.here.start
        left = self.sum()
        token = self._take(*COMPARISONS)
        if token is None:
            return left
        right = self.sum()
        if self.here.text in COMPARISONS:
            raise self._unexpected("`and`, `or` or the end")
        return Binary(operator=token.text, left=left, right=right, span=self._span(start))

    def sum(self) -> Expr:
        return self._left_to_right(self.product, "+", "-")

    def product(self) -> Expr:
        return self._left_to_right(self.signed, "*", "/", "//", "%")

    def _left_to_right(self, part: Callable[[], Expr], *operators: str) -> Expr:
        start = self.here.start
        expr = part()
        while token := self._take(*operators):
            expr = Binary(operator=token.text, left=expr, right=part(), span=self._span(start))
        return expr

    def signed(self) -> Expr:
        start = self.here.start
        if self._take("-"):
            operand = self._nested(self.signed)
            if isinstance(operand, Literal) and type(operand.value) in (int, Fraction):
                return Literal(value=-operand.value, span=self._span(start))  # type: ignore[operator]
            return Unary(operator="-", operand=operand, span=self._span(start))
        return self.postfix()

    def postfix(self) -> Expr:
        start = self.here.start
        expr = self.atom()
        while self._take("["):
            index = self._nested(self.conditional)
            self._expect("]")
            expr = Index(sequence=expr, index=index, span=self._span(start))
        return expr

    def atom(self) -> Expr:
        token = self.here
        if self._take("("):
            expr = self._nested(self.conditional)
            self._expect(")")
            return expr
        if token.kind == "number":
            self.at += 1
            return Literal(value=self._number(token), span=self._span(token.start))
        if token.kind == "text":
            self.at += 1
            return Literal(value=token.text[1:-1], span=self._span(token.start))
        if token.kind == "name" and token.text in ("true", "false"):
            self.at += 1
            return Literal(value=token.text == "true", span=self._span(token.start))
        if token.kind == "name" and token.text not in KEYWORDS:
            self.at += 1
            if self._take("("):
                return self._call(token)
            return Name(name=token.text, span=self._span(token.start))
        raise self._unexpected("a value")

    def _number(self, token: _Token) -> int | Fraction:
        if not re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?", token.text, re.ASCII):
            raise _Refusal(
                token.start, token.end, f"`{token.text}` is not a decimal number", "write it plainly, as in 64 or 0.5"
            )
        if len(token.text) > 40 or Fraction(token.text) > MAX_INTEGER:
            raise _Refusal(token.start, token.end, "number too large; the limit is 2^63 - 1")
        return Fraction(token.text) if "." in token.text else int(token.text)

    def _call(self, token: _Token) -> Expr:
        if token.text not in FUNCTIONS:
            known = ", ".join(sorted(FUNCTIONS))
            raise _Refusal(token.start, token.end, f"unknown function `{token.text}`", f"the functions are {known}")
        arguments = []
        if not self._take(")"):
            arguments.append(self._nested(self.conditional))
            while self._take(","):
                arguments.append(self._nested(self.conditional))
            self._expect(")")
        least, most = FUNCTIONS[token.text]
        if not least <= len(arguments) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            message = f"`{token.text}` takes {wanted} argument{'' if wanted == '1' else 's'}, not {len(arguments)}"
            raise _Refusal(token.start, self.tokens[self.at - 1].end, message)
        return Call(function=token.text, arguments=tuple(arguments), span=self._span(token.start))
