"""Python source as a formatter would leave it: small trees that print on one line where they fit, else broken up.

Only what generated modules need: brackets with items, comprehensions, operator chains, `a if b else c`. A bracket that
does not fit has one item on each line and a trailing comma, which formatters keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvgen.problems import InternalError

WIDTH = 120
STEP = 4

# of operators, loosest first
TERNARY, OR, AND, NOT, COMPARISON, SUM, PRODUCT, UNARY, ATOM = range(9)
LEVELS = {"or": OR, "and": AND, "+": SUM, "-": SUM, "*": PRODUCT, "//": PRODUCT, "/": PRODUCT, "%": PRODUCT}
LEVELS |= dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "in", "not in", "is", "is not"), COMPARISON)


@dataclass(frozen=True)
class Code:
    """A piece of an expression."""

    @property
    def level(self) -> int:
        return ATOM


@dataclass(frozen=True)
class Raw(Code):
    """Text that is never broken."""

    text: str
    at: int = ATOM

    @property
    def level(self) -> int:
        return self.at


@dataclass(frozen=True)
class Words(Code):
    """A text; literals below each other, cut behind blanks, where it is too wide for one."""

    text: str

    def pieces(self, columns: int) -> list[str]:
        found, rest = [], self.text
        while rest:
            end = next(end for end in range(len(rest), 0, -1) if len(quoted(rest[:end])) <= columns)
            if end < len(rest):
                end = rest.rfind(" ", 0, end) + 1 or end
            found.append(quoted(rest[:end]))
            rest = rest[end:]
        return found


@dataclass(frozen=True)
class Group(Code):
    """`head(item, item)`, `(item, item)`, `{item, item}`."""

    head: str
    items: tuple[Code, ...]
    tail: str = ")"
    lone_comma: bool = False  # whether one item alone has a comma, as in a tuple
    broken: bool = False  # one item on each line, even where all would fit on one


@dataclass(frozen=True)
class Keyword(Code):
    name: str
    value: Code


@dataclass(frozen=True)
class Lambda(Code):
    parameters: str
    body: Code


@dataclass(frozen=True)
class Each(Code):
    """`head element for variable in source if test tail`."""

    head: str
    element: Code
    clause: str
    test: Code | None
    tail: str


@dataclass(frozen=True)
class Chain(Code):
    """`a op b op c`, all of one level."""

    operators: tuple[str, ...]
    operands: tuple[Code, ...]

    @property
    def level(self) -> int:
        return LEVELS[self.operators[0]]


@dataclass(frozen=True)
class Not(Code):
    operand: Code

    @property
    def level(self) -> int:
        return NOT


@dataclass(frozen=True)
class Negative(Code):
    operand: Code

    @property
    def level(self) -> int:
        return UNARY


@dataclass(frozen=True)
class Ternary(Code):
    then: Code
    test: Code
    otherwise: Code

    @property
    def level(self) -> int:
        return TERNARY


@dataclass(frozen=True)
class Attribute(Code):
    """`owner.name`, where the owner has its own brackets or is a name."""

    owner: Code
    name: str


def chain(operator: str, left: Code, right: Code) -> Chain:
    """`left operator right` with brackets where they are needed; runs of one level are one chain."""
    level = LEVELS[operator]
    operators, operands = [operator], [bracketed(right, level + 1)]
    if isinstance(left, Chain) and left.level == level and level != COMPARISON:
        return Chain((*left.operators, operator), (*left.operands, *operands))
    return Chain(tuple(operators), (bracketed(left, level + (level == COMPARISON)), *operands))


def bracketed(code: Code, level: int) -> Code:
    """The code, in brackets if it binds more loosely than `level`."""
    return Group("(", (code,)) if code.level < level else code


def minus(code: Code) -> Code:
    """The negative of a number; of a negative one the number itself."""
    match code:
        case Negative(operand=Group(head="(", items=(operand,), lone_comma=False)):
            return operand
        case Negative():
            return code.operand
        case Raw(at=level) if level == UNARY:
            return Raw(code.text.removeprefix("-"))
    return Negative(bracketed(code, ATOM))


def flat(code: Code) -> str:
    """The code on one line."""
    match code:
        case Raw():
            return code.text
        case Words():
            return quoted(code.text)
        case Group():
            comma = "," if code.lone_comma and len(code.items) == 1 else ""
            return f"{code.head}{', '.join(flat(item) for item in code.items)}{comma}{code.tail}"
        case Keyword():
            return f"{code.name}={flat(code.value)}"
        case Lambda():
            return f"lambda {code.parameters}: {flat(code.body)}"
        case Each():
            test = "" if code.test is None else f" if {flat(bracketed(code.test, OR))}"
            return f"{code.head}{flat(code.element)} {code.clause}{test}{code.tail}"
        case Chain():
            parts = [flat(code.operands[0])]
            for operator, operand in zip(code.operators, code.operands[1:], strict=True):
                parts += [operator, flat(operand)]
            return " ".join(parts)
        case Not():
            return f"not {flat(code.operand)}"
        case Negative():
            return f"-{flat(code.operand)}"
        case Ternary():
            return f"{flat(code.then)} if {flat(code.test)} else {flat(code.otherwise)}"
        case Attribute():
            return f"{flat(code.owner)}.{code.name}"
    raise InternalError(f"cannot print {type(code).__name__}")


def is_broken(code: Code) -> bool:
    """Whether the code holds a bracket that is always broken up."""
    match code:
        case Group():
            return code.broken or any(is_broken(item) for item in code.items)
        case Keyword():
            return is_broken(code.value)
    return False


def _broken_together(code: Chain) -> list[tuple[str, Code]]:
    """Each operand with the operator in front of it; an `and` is broken where the `or` around it is."""
    found: list[tuple[str, Code]] = []
    for operator, operand in zip(("", *code.operators), code.operands, strict=True):
        if code.level == OR and isinstance(operand, Chain) and operand.level == AND:
            found += [(inner or operator, part) for inner, part in _broken_together(operand)]
        else:
            found.append((operator, operand))
    return found


def laid(code: Code, indent: int, before: int, after: int) -> str:
    """The code inside brackets: `before` columns stand in front of it, `after` follow; later lines get `indent`."""
    line = flat(code)
    if before + len(line) + after <= WIDTH and not is_broken(code):
        return line
    margin, deeper = " " * indent, " " * (indent + STEP)
    match code:
        case Words():
            return f"\n{margin}".join(code.pieces(WIDTH - max(before, indent) - after))
        case Group(items=(only,)) if code.head == "(" and not code.lone_comma and not code.broken:
            return f"(\n{deeper}{laid(only, indent + STEP, indent + STEP, 0)}\n{margin})"
        case Group() if code.items:
            items = "".join(f"{deeper}{laid(item, indent + STEP, indent + STEP, 1)},\n" for item in code.items)
            return f"{code.head}\n{items}{margin}{code.tail}"
        case Keyword():
            return f"{code.name}={laid(code.value, indent, before + len(code.name) + 1, after)}"
        case Lambda():
            head = f"lambda {code.parameters}: "
            return f"{head}{laid(code.body, indent, before + len(head), after)}"
        case Each():
            test = "" if code.test is None else f" if {flat(bracketed(code.test, OR))}"
            inside = f"{flat(code.element)} {code.clause}{test}"
            if indent + STEP + len(inside) > WIDTH:
                lines = [laid(code.element, indent + STEP, indent + STEP, 0), code.clause]
                if code.test is not None:
                    lines.append(f"if {laid(bracketed(code.test, OR), indent + STEP, indent + STEP + 3, 0)}")
                inside = f"\n{deeper}".join(lines)
            return f"{code.head}\n{deeper}{inside}\n{margin}{code.tail}"
        case Chain():
            (_, first), *rest = _broken_together(code)
            lines = [laid(first, indent, before, 0)]
            for operator, operand in rest:
                lines.append(f"{operator} {laid(operand, indent, indent + len(operator) + 1, after)}")
            return f"\n{margin}".join(lines)
        case Negative():
            return f"-{laid(code.operand, indent, before + 1, after)}"
        case Not():
            return f"not {laid(code.operand, indent, before + 4, after)}"
        case Ternary():
            lines, rest = [laid(code.then, indent, before, 0)], code
            while isinstance(rest.otherwise, Ternary):
                lines.append(f"if {laid(rest.test, indent, indent + 3, 0)}")
                rest = rest.otherwise
                lines.append(f"else {laid(rest.then, indent, indent + 5, 0)}")
            lines.append(f"if {laid(rest.test, indent, indent + 3, 0)}")
            lines.append(f"else {laid(rest.otherwise, indent, indent + 5, after)}")
            return f"\n{margin}".join(lines)
        case Attribute():
            return f"{laid(code.owner, indent, before, after + 1 + len(code.name))}.{code.name}"
    return line


def statement(head: str, code: Code, indent: int, tail: str = "") -> str:
    """`head code tail` as a statement at `indent`, such as `x = code` or `if code:`; without the first margin."""
    line = flat(code)
    fits = indent + len(head) + len(line) + len(tail) <= WIDTH and not is_broken(code)
    if fits or isinstance(code, Raw):
        return f"{head}{line}{tail}"
    if isinstance(code, (Group, Each)) or (isinstance(code, Attribute) and isinstance(code.owner, Group)):
        return f"{head}{laid(code, indent, indent + len(head), len(tail))}{tail}"
    deeper = " " * (indent + STEP)
    return f"{head}(\n{deeper}{laid(code, indent + STEP, indent + STEP, 0)}\n{' ' * indent}){tail}"


def quoted(text: str) -> str:
    """A string literal in ASCII, with the quotes a formatter prefers."""
    body = text.encode("unicode_escape").decode("ascii").replace("\x7f", "\\x7f")
    quote = "'" if body.count('"') > body.count("'") else '"'
    return quote + body.replace(quote, "\\" + quote) + quote


def value(item: object) -> Code:
    """The literal of a plain value."""
    match item:
        case None | bool() | int():
            return Raw(repr(item), UNARY if item is not None and item < 0 else ATOM)
        case Fraction():
            return Group("Fraction(", (Raw(str(item.numerator)), Raw(str(item.denominator))))
        case str():
            return Raw(quoted(item))
        case tuple():
            return Group("(", tuple(value(part) for part in item), lone_comma=True)
    raise InternalError(f"cannot print {type(item).__name__}")


def keywords(**items: Code) -> tuple[Code, ...]:
    return tuple(Keyword(name, item) for name, item in items.items())


def call(name: str, *items: Code) -> Group:
    return Group(f"{name}(", items)


def tuple_of(values: Sequence[Code]) -> Code:
    """A tuple, of one item too."""
    return Group("(", tuple(values), lone_comma=True)


def without_brackets(values: Sequence[Code]) -> str:
    """A tuple on one line as formatters leave it behind `return` and in front of `=`: one item keeps its brackets."""
    whole = flat(tuple_of(values))
    return whole if len(values) == 1 else whole[1:-1]


def returned(values: Sequence[Code], indent: int) -> str:
    """`return a, b` at `indent`, in brackets where it is too wide."""
    line = f"return {without_brackets(values)}"
    return line if indent + len(line) <= WIDTH else statement("return ", tuple_of(values), indent)
