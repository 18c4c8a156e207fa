"""Expressions of a layout as Python, with the names that the generated `from_config` has."""

from __future__ import annotations

from kvgen.expr import Binary, Call, Conditional, Expr, Index, Literal, Name, Unary, show
from kvgen.layout import Layout, LetLayout, SetLayout, page_names
from kvgen.page import Page
from kvgen.problems import InternalError
from kvgen.pysource import (
    ATOM,
    NOT,
    Attribute,
    Chain,
    Code,
    Group,
    Not,
    Raw,
    Ternary,
    bracketed,
    call,
    chain,
    flat,
    minus,
    quoted,
    value,
)
from kvgen.size import Size

MIRRORED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


class Printer:
    """Expressions of a layout as Python, with the names that `from_config` has."""

    def __init__(self, layout: Layout, used: set[str]) -> None:
        self.layout = layout
        self.used = used
        self.steps = {step.name: step for step in layout.steps}
        self.aliases = dict(layout.aliases)
        self.inside: LetLayout | None = None  # whose value is printed

    def let(self, step: LetLayout) -> Code:
        """The value of a let. What it divides over ranks is kept under its name."""
        self.inside = step
        code = self.code(step.value)
        self.inside = None
        return code

    def code(self, expr: Expr) -> Code:
        match expr:
            case Literal():
                return value(expr.value)
            case Name():
                return self.name(expr.name)
            case Unary(operator="-"):
                return minus(self.code(expr.operand))
            case Unary():
                return self.negated(expr.operand)
            case Binary():
                return self.binary(expr)
            case Conditional(then=Literal(value=bool(then)), otherwise=Literal(value=bool(other))) if then != other:
                return self.code(expr.test) if then else self.negated(expr.test)
            case Conditional(test=Unary(operator="not", operand=test)):
                return self.code(Conditional(then=expr.otherwise, test=test, otherwise=expr.then, span=expr.span))
            case Conditional():
                then, test = (bracketed(self.code(part), 1) for part in (expr.then, expr.test))
                return Ternary(then, test, self.code(expr.otherwise))
            case Index():
                sequence, index = self.code(expr.sequence), self.code(expr.index)
                return Group(f"{flat(bracketed(sequence, ATOM))}[", (index,), "]")
            case Call():
                return self.call(expr)
        raise InternalError(f"cannot print {type(expr).__name__}")

    def name(self, name: str) -> Code:
        if name == "layer":
            return Raw("layer")
        if name == "all":
            return Raw("True")
        if name in ("body", "draft"):
            operator = "<" if name == "body" else ">="
            return chain(operator, Raw("layer"), num_body(self))
        step = self.steps.get(name)
        if isinstance(step, SetLayout):
            return chain("in", Raw("layer"), Raw(name))
        if isinstance(step, LetLayout) and step.varies:
            return Raw(f"{name}(layer)")
        return Raw(name)

    def binary(self, expr: Binary) -> Code:
        """An operation as linters want it: no literal on the left of a comparison, nothing compared with True."""
        operator, left, right = expr.operator, expr.left, expr.right
        if operator in MIRRORED and isinstance(left, Literal):
            operator, left, right = MIRRORED[operator], right, left
        if operator in ("==", "!=") and isinstance(right, Literal) and isinstance(right.value, bool):
            return self.code(left) if (operator == "==") is right.value else self.negated(left)
        return chain(operator, self.code(left), self.code(right))

    def negated(self, operand: Expr) -> Code:
        if isinstance(operand, Unary) and operand.operator == "not":
            return self.code(operand.operand)
        code = self.code(operand)
        if isinstance(code, Not):
            return code.operand
        opposite = {"in": "not in", "is not": "is", "==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
        if isinstance(code, Chain) and len(code.operators) == 1 and code.operators[0] in opposite:
            return Chain((opposite[code.operators[0]],), code.operands)
        return Not(bracketed(code, NOT))

    def call(self, expr: Call) -> Code:
        match expr.function:
            case "has":
                return chain("is not", self.code(expr.arguments[0]), Raw("None"))
            case "sizeof":
                return Attribute(self.page_of(expr), "page_bytes")
        arguments = [self.code(part) for part in expr.arguments]
        match expr.function:
            case "exact":
                self.used.add("divide")
                a, b = expr.arguments
                what = show(Binary(operator="/", left=a, right=b, span=expr.span))
                return call("_divide", *arguments, Raw(quoted(what)))
            case "cdiv":
                return minus(chain("//", minus(arguments[0]), arguments[1]))
            case "shard":
                self.used.add("shard")
                if self.inside is None:
                    return call("_shard", *arguments)
                self.used.add("shards")
                layer = (Raw("layer"),) if self.inside.varies else ()
                return call("read.shard", Raw(quoted(self.inside.name)), *arguments, *layer)
            case "lcm" | "gcd":
                return call(f"math.{expr.function}", *arguments)
        return call(expr.function, *arguments)

    def page_of(self, expr: Call) -> Code:
        """The page that `sizeof(format, slots)` measures."""
        name, slots = expr.arguments
        assert isinstance(name, Name)
        if name.name in self.aliases:
            return call(f"{name.name}_page_of", self.code(slots))
        page = next(page for page in self.layout.pages if page.format == name.name and page.slots == Size.of("slots"))
        return self.page_call(page, self.code(slots))

    def page_call(self, page: Page, slots: Code) -> Code:
        """A page for so many slots: its constant, or a call of its function with the load-time names it depends on."""
        if page.is_constant:
            return Raw(page_constant(self.layout, page))
        return call(f"{page.format}_page", slots, *(self.name(name) for name in page_names(page)))


def num_body(printer: Printer) -> Code:
    body = printer.layout.body
    return printer.code(body) if isinstance(body, (Name, Literal)) else Raw("num_body_layers")


def page_constant(layout: Layout, page: Page) -> str:
    alike = [other for other in layout.pages if other.format == page.format and other.is_constant]
    suffix = f"_{page.slots}" if len(alike) > 1 else ""
    return f"{page.format.upper()}_PAGE{suffix}"
