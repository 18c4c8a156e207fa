"""The names of a spec: their types, when their values are known, and what is certain where they are used.

`Scope` types every expression and folds what is known at build. Types of numbers carry bounds, so that a division by
zero or a number that grows without end is a problem of the spec and never of a server. Facts are what the guards of an
expression make certain: that an optional name is given, that an index lies inside its list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from kvgen.expr import Binary, Call, Expr, Literal, Name, Unary, names, walk
from kvgen.facts import NOTHING, Fact, Facts, Place
from kvgen.fold import FoldError, Folding
from kvgen.infer import Typing
from kvgen.problems import InternalError, Label, Problem, Span
from kvgen.spec import Case, LayerSet, Let, Parameter, Spec
from kvgen.types import PARAMETER_MAX, Bool, Int, ListOf, Ratio, Text, Type, sign_of

CODES = {"KV218": "names defined in terms of each other"}

DEPTH_MAX = 100  # of names that each need the next


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
        """Whether the value depends on the layer; of `sizeof`, whether the pages of the format do."""
        found = names(expr)
        for part in walk(expr):
            if isinstance(part, Call) and part.function == "sizeof" and isinstance(part.arguments[0], Name):
                found |= names_of_format(self.spec, part.arguments[0].name)
        return any(name == "layer" or (name in self.entities and self.entities[name].varies) for name in found)

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
            case Binary(operator="==" | "!=", left=Call(function="len") as length, right=Literal(value=0) as zero):
                yield ("<", zero, length)  # not 0, and never below
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

    def disjoint(self, one: Expr, other: Expr) -> bool:
        """Whether two conditions on a layer are certain never to hold together."""
        opposite = {"true": "false", "false": "true"}
        facts, others = self.truths(one), self.truths(other)
        if any((opposite.get(kind), name, rest) in others for kind, name, rest in facts):
            return True
        words = [
            {name.name for kind, name, _ in side if kind == "true" and isinstance(name, Name)}
            for side in (facts, others)
        ]
        return any("body" in words[here] and "draft" in words[1 - here] for here in (0, 1))

    def implies(self, one: Expr, other: Expr) -> bool:
        """Whether it is certain that the second of two conditions on a layer holds wherever the first does."""
        return one == other or (_is_told(other, True) and self.truths(other) <= self.truths(one))

    def certain(self, expr: Expr) -> bool | None:
        """Whether a condition holds for every layer (true) or for none (false), where that is known at build."""
        folded = self.fold(expr)
        if isinstance(folded, Literal):
            return folded.value if isinstance(folded.value, bool) else None
        if self.disjoint(expr, expr):
            return False
        known = {"all": True}
        if _has_body_alone(self.spec):
            known |= {"body": True, "draft": False}
        return known.get(folded.name) if isinstance(folded, Name) else None

    # -- types

    def type_of(self, expr: Expr, place: Place, problems: list[Problem]) -> Type | None:
        """The type of `expr` standing at `place`; None after adding problems."""
        return Typing(self, problems, place.path).of(expr, place)

    def expect(self, expr: Expr, wanted: type, place: Place, problems: list[Problem]) -> Type | None:
        """As `type_of`, and a problem where it is not the wanted type. An int is a ratio too."""
        return Typing(self, problems, place.path).expect(expr, wanted, place)

    # -- values

    def fold(self, expr: Expr, known: Mapping[str, Literal | None] | None = None) -> Expr:
        """`expr` with every part that is known at build replaced by its value. FoldError where it has none.

        Args:
            expr: an expression of this spec.
            known: values to take for names; None says that an optional one is absent.
        """
        return Folding(self, known or {}).fold(expr)


def scope_of(spec: Spec) -> tuple[Scope, list[Problem]]:
    """The names of a spec, typed in the order in which they need each other."""
    problems: list[Problem] = []
    scope = Scope(spec)
    for parameter in spec.parameters:
        known = _known(parameter)
        scope.entities.setdefault(
            parameter.name.text,
            Entity(
                name=parameter.name.text,
                type=_parameter_type(parameter),
                span=parameter.name.span,
                path=parameter.path,
                optional=parameter.optional,
                value=None if known is None else Literal(value=known, span=parameter.name.span),
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
    for name, item in definitions.items():  # those without a place in the order: a name still, of no type
        scope.entities.setdefault(name, Entity(name, None, item.name.span, item.path))
    facts = [fact for that in plain if not scope.varies(that) for fact in scope.truths(that)]
    if spec.layers is not None and _has_body_alone(spec):
        facts.append(("<", Name(name="layer", span=spec.layers.span), spec.layers.body))
    scope.layered_facts = frozenset(facts)
    scope.implications = tuple(
        (scope.truths(that.left, holds=False), scope.truths(that.right))
        for that in plain
        if isinstance(that, Binary) and that.operator == "or" and _is_told(that.left, False) and not scope.varies(that)
    )
    scope.order = in_order
    for name in in_order:
        if scope.entities[name].definition is definitions[name]:
            _type_definition(scope, definitions[name], problems)
    return scope, problems


def _has_body_alone(spec: Spec) -> bool:
    """Whether a model of the spec has no draft layers."""
    layers = spec.layers
    return layers is not None and (layers.draft is None or layers.draft == Literal(value=0, span=layers.span))


def _is_told(expr: Expr, holds: bool) -> bool:
    """Whether the facts of `expr` being true (or false) are no less than that it is."""
    match expr:
        case Unary(operator="not"):
            return _is_told(expr.operand, not holds)
        case Binary(operator="and" | "or"):
            return (expr.operator == "and") == holds and all(_is_told(part, holds) for part in (expr.left, expr.right))
        case Binary(operator="==" | "!="):
            return (expr.operator == "==") == holds
        case Binary(operator="<" | "<=" | ">" | ">=") | Name():
            return True
    return isinstance(expr, Call) and expr.function == "has" and holds


def _expressions(item: Let | LayerSet) -> Iterator[Expr]:
    if isinstance(item, Let):
        yield item.value
        return
    for case in item.cases:
        if case.when is not None:
            yield case.when
        yield case.use


def names_of_format(spec: Spec, name: str) -> set[str]:
    """What the bytes of a format depend on: names of its axes, dtypes and pieces, or of all its cases."""
    formats = {item.name.text: item for item in spec.formats}
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        format = formats.get(waiting.pop())
        if format is None or format.name.text in seen:
            continue
        seen.add(format.name.text)
        for case in format.cases:
            found |= names(case.when) if case.when is not None else set()
            waiting.append(case.use.text)
        if format.same_fields_as is not None:
            waiting.append(format.same_fields_as.text)
        for item in format.fields:
            found.add(item.dtype.text)
            for axis in item.axes:
                found |= names(axis.extent) | (names(axis.coarse) if axis.coarse is not None else set())
    return found


def _sorted_by_need(spec: Spec, definitions: Mapping[str, Let | LayerSet], problems: list[Problem]) -> list[str]:
    """Names in an order in which each stands after those it mentions. A cycle is a problem, and is left out."""
    done: dict[str, bool] = {}
    depths: dict[str, int] = {}  # names that each need the next, on the longest way down
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
        if len(trail) > DEPTH_MAX:
            return False  # the first of them is told
        mentioned = {part for expr in _expressions(definitions[name]) for part in names(expr)}
        for part in sorted(mentioned - set(definitions)):
            mentioned |= names_of_format(spec, part)
        visited = [visit(part, (*trail, name)) for part in sorted(mentioned) if part in definitions]
        depths[name] = 1 + max((depths.get(part, 0) for part in mentioned), default=0)
        if depths[name] > DEPTH_MAX or (len(trail) == DEPTH_MAX and not all(visited)):
            item = definitions[name]
            if not any(problem.code == "KV218" for problem in problems):
                message = f"more than {DEPTH_MAX} names that each need the next"
                problems.append(Problem("KV218", message, Label(item.name.span), path=item.path))
            visited.append(False)
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
        value = folded if isinstance(folded, Literal) and kind is not None else None
    except FoldError as error:
        if not error.reported:
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


def _known(parameter: Parameter) -> Any:
    """The value that `is` states, where it is one of the type."""
    wanted = {"int": (int,), "ratio": (int, Fraction), "bool": (bool,), "text": (str,), "list": (tuple,)}
    return parameter.equals if type(parameter.equals) in wanted[parameter.kind] else None


def _parameter_type(parameter: Parameter) -> Type:
    words = None
    if parameter.values is not None:
        words = tuple(value for _, value in parameter.values)
    match parameter.kind:
        case "int":
            return _int_type(parameter, words)
        case "ratio":
            return Ratio(sign=sign_of(0 if parameter.minimum is None else parameter.minimum))
        case "bool":
            return Bool()
        case "text":
            named = None if words is None else tuple(map(str, words))
            return Text(words=named, letters=parameter.letters)
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
