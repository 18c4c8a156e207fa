"""The names of a spec: their types, when their values are known, and what is certain where they are used.

`Scope` types every expression and folds what is known at build. Types of numbers carry bounds, so that a division by
zero or a number that grows without end is a problem of the spec and never of a server. Facts are what the guards of an
expression make certain: that an optional name is given, that an index lies inside its list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fractions import Fraction

from kvgen.expr import (
    Binary,
    Call,
    Conditional,
    Expr,
    Index,
    Literal,
    Name,
    Unary,
    names,
    show,
)
from kvgen.problems import InternalError, Label, Problem, Span
from kvgen.spec import Case, LayerSet, Let, Parameter, Spec

CODES = {
    "KV210": "an unknown name",
    "KV211": "a name used where it has no value",
    "KV212": "an expression of the wrong type",
    "KV213": "an optional name used without `has`",
    "KV214": "an index that may lie outside its list",
    "KV215": "a divisor that may be zero",
    "KV216": "a number that may grow too large",
    "KV217": "a division that leaves a remainder",
    "KV218": "names defined in terms of each other",
}

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
MAX_LAYERS = 100_000
PARAMETER_MAX = 2**40  # of an int parameter that states no `max`
MAGNITUDE_MAX = 2**256  # of any number an expression can come to

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
Fact = tuple[str, Expr, Expr | None]  # ("<", a, b), ("<=", a, b), ("has", name, None), ("true" or "false", name, None)
Facts = frozenset[Fact]
NOTHING: Facts = frozenset()


@dataclass(frozen=True)
class Entity:
    """What a name stands for. `varies`: its value depends on the layer."""

    name: str
    type: Type | None  # None after a problem
    span: Span
    path: str
    optional: bool = False
    varies: bool = False
    value: Literal | None = None  # where it is known at build
    definition: Let | LayerSet | Parameter | None = None


@dataclass(frozen=True)
class Place:
    """Where an expression stands: the words that have a value there, and what is certain there."""

    path: str
    words: frozenset[str] = frozenset()  # of "layer", "tokens", "requests", "offset"
    facts: Facts = NOTHING

    def given(self, facts: Iterable[Fact]) -> Place:
        return replace(self, facts=self.facts | frozenset(facts))


class FoldError(Exception):
    """An expression without a value, found while folding: an inexact division, for one."""

    def __init__(self, message: str, span: Span) -> None:
        super().__init__(message)
        self.message, self.span = message, span


def suggest(name: str, known: Iterable[str]) -> str | None:
    """A `did you mean` for a misspelt name, or None."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


@dataclass
class Scope:
    """The names of one spec. Made by `scope_of`; not changed afterwards."""

    spec: Spec
    entities: dict[str, Entity] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)  # lets and sets, each after what it needs
    layered_facts: Facts = NOTHING  # certain wherever `layer` has a value
    implications: tuple[tuple[Facts, Facts], ...] = ()  # likewise: (what it takes, what is certain then)

    # -- names

    def formats(self) -> set[str]:
        return {item.name.text for item in self.spec.formats}

    def varies(self, expr: Expr) -> bool:
        """Whether the value depends on the layer."""
        return any(name == "layer" or (name in self.entities and self.entities[name].varies) for name in names(expr))

    # -- facts

    def truths(self, expr: Expr, holds: bool = True) -> Facts:
        """What is certain when `expr` is true (or, with `holds` false, when it is false)."""
        return frozenset(self._truths(expr, holds))

    def _truths(self, expr: Expr, holds: bool) -> Iterator[Fact]:
        match expr:
            case Unary(operator="not"):
                yield from self._truths(expr.operand, not holds)
            case Binary(operator="and") if holds:
                yield from self._truths(expr.left, True)
                yield from self._truths(expr.right, True)
            case Binary(operator="or") if not holds:
                yield from self._truths(expr.left, False)
                yield from self._truths(expr.right, False)
            case Binary(operator="<" | ">=", left=a, right=b):
                yield ("<", a, b) if (expr.operator == "<") == holds else ("<=", b, a)
            case Binary(operator=">" | "<=", left=a, right=b):
                yield ("<", b, a) if (expr.operator == ">") == holds else ("<=", a, b)
            case Binary(operator="==" | "!=", left=a, right=b) if (expr.operator == "==") == holds:
                yield ("<=", a, b)
                yield ("<=", b, a)
            case Call(function="has") if holds:
                yield ("has", expr.arguments[0], None)
            case Name():
                yield ("true" if holds else "false", expr, None)
                yield from self._truths_of_name(expr, holds)

    def _truths_of_name(self, name: Name, holds: bool) -> Iterator[Fact]:
        layers = self.spec.layers
        if layers is not None and ((name.name == "body" and holds) or (name.name == "draft" and not holds)):
            yield ("<", Name(name="layer", span=name.span), layers.body)
        entity = self.entities.get(name.name)
        match entity.definition if entity else None:
            case Let() as let:
                yield from self._truths(let.value, holds)
            case LayerSet(cases=(Case(when=None) as only,)):
                yield from self._truths(only.use, holds)

    def known_below(self, a: Expr, b: Expr, facts: Facts) -> bool:
        """Whether a < b is certain: stated, or through one number in between."""
        if ("<", a, b) in facts:
            return True
        if isinstance(a, Literal) and isinstance(a.value, int):
            for kind, low, high in facts:
                if high == b and isinstance(low, Literal) and type(low.value) is int:
                    least = low.value + 1 if kind == "<" else low.value
                    if a.value < least:
                        return True
        return any(
            kind == "<" and low == a and high is not None and (("<=", high, b) in facts or ("<", high, b) in facts)
            for kind, low, high in facts
        )

    # -- types

    def type_of(self, expr: Expr, place: Place, problems: list[Problem]) -> Type | None:
        """The type of `expr` standing at `place`; None after adding problems."""
        return _Typing(self, problems, place.path).of(expr, place)

    def expect(self, expr: Expr, wanted: type, place: Place, problems: list[Problem]) -> Type | None:
        """As `type_of`, and a problem where it is not the wanted type. An int is a ratio too."""
        return _Typing(self, problems, place.path).expect(expr, wanted, place)

    # -- values

    def fold(self, expr: Expr, known: Mapping[str, Literal] | None = None) -> Expr:
        """`expr` with every part that is known at build replaced by its value. FoldError where it has none."""
        return _Folding(self, known or {}).fold(expr)


def scope_of(spec: Spec) -> tuple[Scope, list[Problem]]:
    """The names of a spec, typed in the order in which they need each other."""
    problems: list[Problem] = []
    scope = Scope(spec)
    for parameter in spec.parameters:
        known = parameter.equals
        scope.entities.setdefault(
            parameter.name.text,
            Entity(
                name=parameter.name.text,
                type=_parameter_type(parameter),
                span=parameter.name.span,
                path=parameter.path,
                optional=parameter.optional,
                value=None if known is None else Literal(value=known, span=parameter.name.span),  # type: ignore[arg-type]
                definition=parameter,
            ),
        )
    if spec.layers is not None:
        for word in ("body", "draft", "all"):
            scope.entities[word] = Entity(word, Bool(), spec.layers.span, "layers", varies=True)
    definitions: dict[str, Let | LayerSet] = {}
    for item in (*spec.lets, *(spec.layers.sets if spec.layers else ())):
        definitions.setdefault(item.name.text, item)
    in_order = _sorted_by_need(spec, definitions, problems)
    plain = [require.that for require in spec.requires]
    for name in in_order:  # names first, so that facts can look through them
        item = definitions[name]
        varies = any(scope.varies(expr) for expr in _expressions(item)) or isinstance(item, LayerSet)
        scope.entities.setdefault(name, Entity(name, None, item.name.span, item.path, varies=varies, definition=item))
    facts = [fact for that in plain if not scope.varies(that) for fact in scope.truths(that)]
    if spec.layers is not None and (
        spec.layers.draft is None or spec.layers.draft == Literal(value=0, span=spec.layers.span)
    ):
        facts.append(("<", Name(name="layer", span=spec.layers.span), spec.layers.body))
    scope.layered_facts = frozenset(facts)
    scope.implications = tuple(
        (scope.truths(that.left, holds=False), scope.truths(that.right))
        for that in plain
        if isinstance(that, Binary) and that.operator == "or" and not scope.varies(that)
    )
    scope.order = in_order
    for name in in_order:
        if scope.entities[name].definition is definitions[name]:
            _type_definition(scope, definitions[name], problems)
    return scope, problems


def _expressions(item: Let | LayerSet) -> Iterator[Expr]:
    if isinstance(item, Let):
        yield item.value
        return
    for case in item.cases:
        if case.when is not None:
            yield case.when
        yield case.use


def names_of_format(spec: Spec, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """What the bytes of a format depend on: names of its axes, dtypes and pieces, or of all its cases."""
    format = next((item for item in spec.formats if item.name.text == name), None)
    if format is None or name in seen:
        return set()
    seen = seen | {name}
    found: set[str] = set()
    for case in format.cases:
        found |= names(case.when) if case.when is not None else set()
        found |= names_of_format(spec, case.use.text, seen)
    if format.same_fields_as is not None:
        found |= names_of_format(spec, format.same_fields_as.text, seen)
    for item in format.fields:
        found.add(item.dtype.text)
        for axis in item.axes:
            found |= names(axis.extent) | (names(axis.coarse) if axis.coarse is not None else set())
    return found


def _sorted_by_need(spec: Spec, definitions: Mapping[str, Let | LayerSet], problems: list[Problem]) -> list[str]:
    """Names in an order in which each stands after those it mentions. A cycle is a problem, and is left out."""
    done: dict[str, bool] = {}
    order: list[str] = []

    def visit(name: str, trail: tuple[str, ...]) -> bool:
        if name in done:
            return done[name]
        if name in trail:
            circle = " -> ".join(f"`{part}`" for part in (*trail[trail.index(name) :], name))
            item = definitions[name]
            problems.append(
                Problem(
                    "KV218",
                    f"`{name}` is defined in terms of itself",
                    Label(item.name.span),
                    notes=(circle,),
                    path=item.path,
                )
            )
            return False
        if len(trail) > 100:
            item = definitions[name]
            problems.append(
                Problem("KV218", "more than 100 names that need each other", Label(item.name.span), path=item.path)
            )
            done[name] = False
            return False
        mentioned = {part for expr in _expressions(definitions[name]) for part in names(expr)}
        for part in sorted(mentioned - set(definitions)):
            mentioned |= names_of_format(spec, part)
        visited = [visit(part, (*trail, name)) for part in sorted(mentioned) if part in definitions]
        done_here = all(visited)  # every one is visited, so that every circle is found
        done[name] = done_here
        if done_here:
            order.append(name)
        return done_here

    for name in definitions:
        visit(name, ())
    return order


def _type_definition(scope: Scope, item: Let | LayerSet, problems: list[Problem]) -> None:
    entity = scope.entities[item.name.text]
    if isinstance(item, LayerSet):
        place = Place(item.path, frozenset({"layer"}), scope.layered_facts)
        type_cases(scope, item.cases, item.path, problems, lambda use, at: scope.expect(use, Bool, at, problems), place)
        scope.entities[entity.name] = replace(entity, type=Bool())
        return
    place = Place(item.path)
    if entity.varies:
        place = Place(item.path, frozenset({"layer"}), scope.layered_facts)
    kind = scope.type_of(item.value, place, problems)
    value = None
    try:
        folded = scope.fold(item.value)
        value = folded if isinstance(folded, Literal) else None
    except FoldError as error:
        if kind is not None:
            problems.append(Problem("KV217", error.message, Label(error.span), path=item.path))
        kind = None
    if isinstance(kind, Int) and value is not None and type(value.value) is int:
        kind = Int(value.value, value.value)
    scope.entities[entity.name] = replace(entity, type=kind, value=value)


def type_cases(
    scope: Scope,
    cases: tuple[Case, ...],
    path: str,
    problems: list[Problem],
    use: Callable[[object, Place], object],
    place: Place,
) -> None:
    """Type the `when` of each case, and hand each `use` to `use` with what is certain there.

    The rules of a layer set are all looked at (those that apply must agree), so only the last, unguarded case knows
    that the others do not apply; where cases choose, every case knows it of those before it.
    """
    layered = "layer" in place.words
    before: set[Fact] = set()
    for position, case in enumerate(cases):
        here = replace(place, path=f"{path}[{position}]" if len(cases) > 1 or case.when is not None else path)
        known: set[Fact] = set(before) if case.when is None or not layered else set()
        if case.when is not None:
            when_place = replace(here, words=frozenset(), path=f"{here.path}.when").given(known)
            scope.expect(case.when, Bool, when_place, problems)
            known |= scope.truths(case.when)
            before |= scope.truths(case.when, holds=False)
        use(case.use, here.given(known))


def _parameter_type(parameter: Parameter) -> Type:
    words = None
    if parameter.values is not None:
        words = tuple(value for _, value in parameter.values)
    match parameter.kind:
        case "int":
            return _int_type(parameter, words)
        case "ratio":
            return Ratio(sign=_sign_of(0 if parameter.minimum is None else parameter.minimum))
        case "bool":
            return Bool()
        case "text":
            return Text(words=words, letters=parameter.letters)  # type: ignore[arg-type]
        case "list" if words is not None and all(type(word) is str for word in words):
            return ListOf(Text(words=words))  # type: ignore[arg-type]
        case "list":
            return ListOf(_int_type(parameter, words))
    raise InternalError(f"{parameter.path}: no type for {parameter.kind}")


def _int_type(parameter: Parameter, words: tuple[object, ...] | None) -> Int:
    if parameter.equals is not None and type(parameter.equals) is int:
        return Int(parameter.equals, parameter.equals)
    whole = [word for word in words or () if type(word) is int]
    if whole:
        return Int(min(whole), max(whole))
    low = 0 if parameter.minimum is None else int(parameter.minimum)
    high = PARAMETER_MAX if parameter.maximum is None else int(parameter.maximum)
    return Int(low, max(low, high))


class _Typing:
    """Types of one expression."""

    def __init__(self, scope: Scope, problems: list[Problem], path: str) -> None:
        self.scope, self.problems, self.path = scope, problems, path

    def report(self, code: str, message: str, expr: Expr, help: str | None = None, notes: tuple[str, ...] = ()) -> None:
        self.problems.append(Problem(code, message, Label(expr.span), help=help, notes=notes, path=self.path))

    def expect(self, expr: Expr, wanted: type, place: Place) -> Type | None:
        kind = self.of(expr, place)
        if kind is None or isinstance(kind, wanted) or (wanted is Ratio and isinstance(kind, Int)):
            return kind
        self.report("KV212", f"expected {_NAMES[wanted]}, found {kind}", expr)
        return None

    def of(self, expr: Expr, place: Place) -> Type | None:
        match expr:
            case Literal(value=bool()):
                return Bool()
            case Literal(value=int()):
                return Int(expr.value, expr.value)
            case Literal(value=Fraction()):
                return Ratio(sign=_sign_of(expr.value))
            case Literal():
                return Text(words=(expr.value,))
            case Name():
                return self.of_name(expr, place)
            case Unary(operator="not"):
                self.expect(expr.operand, Bool, place)
                return Bool()
            case Unary():
                kind = self.expect(expr.operand, Ratio, place)
                return Int(-kind.high, -kind.low) if isinstance(kind, Int) else kind and Ratio()
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
                self.report("KV211", f"`{name}` has no value here", expr, _WHERE[name])
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
            self.report("KV211", f"`{name}` depends on the layer, which has no value here", expr, _WHERE["layer"])
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
        return self.arithmetic(expr, left, right)  # type: ignore[arg-type]

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

    def arithmetic(self, expr: Binary, left: Int | Ratio, right: Int | Ratio) -> Type | None:
        operator = expr.operator
        if operator in ("/", "//", "%") and _sign(right) < 1:
            help = "the divisor must be certain to be above 0: state `min: 1` for what it is made of"
            self.report("KV215", f"`{show(expr.right)}` may be zero or less", expr.right, help)
            return None
        if isinstance(left, Ratio) or isinstance(right, Ratio):
            if operator in ("//", "%"):
                self.report("KV212", f"`{operator}` is for ints; a ratio is divided with `/`", expr)
                return None
            return Ratio(sign=-1 if operator == "-" else min(_sign(left), _sign(right)))
        corners = [_APPLY[operator](a, b) for a in (left.low, left.high) for b in (right.low, right.high)]
        low, high = min(corners), max(corners)
        if operator == "%":
            low, high = 0, right.high - 1
        if max(abs(low), abs(high)) > MAGNITUDE_MAX:
            help = "state a `max` for what it is made of"
            self.report("KV216", f"`{show(expr)}` may grow beyond {MAGNITUDE_MAX.bit_length() - 1} bits", expr, help)
            return None
        return Int(low, high)

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
                return Ratio(sign=min(_sign(one), _sign(other)))
            case Text(), Text():
                words = (*one.words, *other.words) if one.words is not None and other.words is not None else None
                return Text(words=words)
        if type(one) is type(other) and not isinstance(one, ListOf):
            return one
        self.report("KV212", f"one side is {one}, the other {other}", expr)
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
            help = f"guard it, as in `{shown} < {length} and …`, or `require` that the list is long enough"
            self.report("KV214", f"`{show(expr)}` may lie outside the list", expr, help)
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
            positive = any(
                high == expr and isinstance(low, Literal) and type(low.value) is int and low.value >= (kind_ == "<=")
                for kind_, low, high in place.facts
            )
            return Int(1 if positive else 0, MAX_LAYERS)
        wanted = Ratio if expr.function in ("min", "max") else Int
        kinds = [self.expect(part, wanted, place) for part in expr.arguments]
        if any(kind is None for kind in kinds):
            return None
        if any(isinstance(kind, Ratio) for kind in kinds):
            return Ratio(sign=min(_sign(kind) for kind in kinds))  # type: ignore[arg-type]
        return self.of_whole_numbers(expr, kinds)  # type: ignore[arg-type]

    def of_whole_numbers(self, expr: Call, kinds: list[Int]) -> Type | None:
        lows, highs = [kind.low for kind in kinds], [kind.high for kind in kinds]
        match expr.function:
            case "min":
                return Int(min(lows), min(highs))
            case "max":
                return Int(max(lows), max(highs))
            case "cdiv" | "shard" if lows[1] < 1:
                help = "the divisor must be certain to be above 0: state `min: 1` for what it is made of"
                self.report("KV215", f"`{show(expr.arguments[1])}` may be zero or less", expr.arguments[1], help)
                return None
            case "cdiv":
                return Int(-(-lows[0] // (lows[1] if lows[0] < 0 else highs[1])), -(-highs[0] // lows[1]))
            case "shard":
                return Int(min(1, lows[0]), max(1, highs[0]))
            case "gcd":
                return Int(1 if max(lows) > 0 else 0, max(abs(high) for high in (*lows, *highs)))
        high = math.prod(max(1, abs(high)) for high in highs)
        if high > MAGNITUDE_MAX:
            self.report("KV216", f"`{show(expr)}` may grow beyond {MAGNITUDE_MAX.bit_length() - 1} bits", expr)
            return None
        return Int(1 if min(lows) > 0 else 0, high)

    def of_has(self, expr: Call) -> Type | None:
        name = expr.arguments[0]
        entity = self.scope.entities.get(name.name) if isinstance(name, Name) else None
        if not isinstance(name, Name):
            self.report("KV212", "`has` asks for a name", name)
        elif entity is None:
            self.report("KV210", f"unknown name `{name.name}`", name, suggest(name.name, self.scope.entities))
        elif not entity.optional:
            self.report("KV213", f"`{name.name}` is never absent", name, "only names with `optional: true` can be")
        return Bool()

    def of_sizeof(self, expr: Call, place: Place) -> Type | None:
        name, slots = expr.arguments
        self.expect(slots, Int, place)
        if not isinstance(name, Name) or name.name not in self.scope.formats():
            message = f"unknown format `{show(name)}`"
            self.report("KV210", message, name, suggest(show(name), self.scope.formats()))
            return None
        return Int(1, 2**62)


_NAMES = {Int: "an int", Ratio: "a number", Bool: "a bool", Text: "a text", ListOf: "a list"}
_WHERE = {
    "layer": "it has one in layer sets, `layers` of a buffer, `require`, axes of fields, and in lets used there",
    "tokens": "it has one in the `slots` of a space",
    "requests": "it has one in the `slots` of a space",
    "offset": "it has one in the `slot` and `where` of a space",
}


def _sign_of(number: int | Fraction) -> int:
    return (number > 0) - (number < 0)


def _sign(kind: Int | Ratio) -> int:
    """The least sign the number can have."""
    return _sign_of(kind.low) if isinstance(kind, Int) else kind.sign


_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


class _Folding:
    """Values of the parts of one expression that are known at build, or for the names in `known`."""

    def __init__(self, scope: Scope, known: Mapping[str, Literal]) -> None:
        self.scope, self.known = scope, known

    def fold(self, expr: Expr) -> Expr:
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
            case Call(function="has" | "len"):
                return expr
            case Call(function="sizeof"):
                return replace(expr, arguments=(expr.arguments[0], self.fold(expr.arguments[1])))
            case Call():
                return self.call(expr)
        raise InternalError(f"cannot fold {type(expr).__name__}")

    def literal(self, value: object, expr: Expr) -> Literal:
        if isinstance(value, Fraction) and value.denominator == 1:
            value = int(value)
        return Literal(value=value, span=expr.span)  # type: ignore[arg-type]

    def name(self, expr: Name) -> Expr:
        if expr.name in self.known:
            return replace(self.known[expr.name], span=expr.span)
        entity = self.scope.entities.get(expr.name)
        if entity is None:
            return expr
        if entity.value is not None:
            return replace(entity.value, span=expr.span)
        if self.known and isinstance(entity.definition, Let) and not entity.varies:
            value = self.fold(entity.definition.value)
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
        try:
            match expr.operator:
                case "==":
                    return a == b
                case "!=":
                    return a != b
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
        except (TypeError, ZeroDivisionError):
            raise FoldError(f"`{show(expr)}` has no value", expr.span) from None
        quotient = Fraction(a) / Fraction(b)  # type: ignore[arg-type]
        if isinstance(a, int) and isinstance(b, int) and quotient.denominator != 1:
            raise FoldError(f"{a} / {b} leaves a remainder", expr.span)
        return quotient

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
