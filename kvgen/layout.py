"""The resolved layout: every page, space, layer set and buffer, with nothing left of how the spec was written.

`resolve` takes a spec without problems. What is known at build is a number here; what is not is an expression over the
parameters, to be printed as code. Only what the buffers reach is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from kvgen.cases import truth, try_cases
from kvgen.expr import Binary, Call, Conditional, Expr, Index, Literal, Name, Unary, children, names, show, walk
from kvgen.owners import shared_layers
from kvgen.page import Page
from kvgen.placing import resolve_page
from kvgen.problems import NOWHERE, InternalError, Problem
from kvgen.scope import Entity, Scope
from kvgen.size import Size
from kvgen.space import Rate, affine, page_sizes, page_slots
from kvgen.spec import (
    WHOLE_POOL_VERBS,
    Buffer,
    Case,
    Derived,
    Format,
    LayerSet,
    Let,
    Parameter,
    Root,
    Space,
    Spec,
)
from kvgen.types import DTYPES, Bool, Int, Ratio
from kvgen.walk import fields_or_default

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Slots:
    """per_token * tokens + per_request * requests + fixed."""

    per_token: Rate
    per_request: Rate
    fixed: Rate

    @property
    def rates(self) -> tuple[Rate, Rate, Rate]:
        return self.per_token, self.per_request, self.fixed


@dataclass(frozen=True, kw_only=True)
class RootSpace:
    """floor(min(slots, at_most) / page) + reserve pages of `page` slots."""

    slots: Slots
    at_most: Slots | None
    page: Expr
    reserve: Expr
    parent: str | None  # the space whose slots an engine's table maps to these


@dataclass(frozen=True, kw_only=True)
class DerivedSpace:
    """The pages of `parent`, one for one, with page, page // divisor, or divisor slots each."""

    parent: str
    operator: str | None
    divisor: Expr | None
    where: Expr | None


@dataclass(frozen=True, kw_only=True)
class SpaceLayout:
    name: str
    origin: str
    cases: tuple[Case[RootSpace | DerivedSpace], ...]
    page_size: int | None  # slots per page, where every case has the same number


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """One buffer: whole pages of a format for each of its layers."""

    name: str
    origin: str
    space: str
    slots: int | None  # of a physical page, where that is known at build
    pages: tuple[Case[Page], ...]
    choice: str  # the name the spec gives to what `pages` are the cases of: a format
    layers: Expr
    readers: Expr | None  # layers that read the nearest owner before them; owners among them read their own
    block: Expr | None
    align: Expr | None
    split: Expr | None
    memory: str
    varies: bool  # whether layers have pages of their own size


@dataclass(frozen=True, kw_only=True)
class SetLayout:
    """Layers named by a rule, or by the first of several rules that applies."""

    name: str
    origin: str
    cases: tuple[Case[Expr], ...]


@dataclass(frozen=True, kw_only=True)
class LetLayout:
    name: str
    origin: str
    value: Expr
    varies: bool


@dataclass(frozen=True, kw_only=True)
class RequireLayout:
    that: Expr
    message: str
    origin: str
    varies: bool  # whether it must hold for every layer
    is_told: bool = False  # whether the message goes with the place, which the author did not write it for


@dataclass(frozen=True, kw_only=True)
class NoteLayout:
    when: Expr
    text: str
    origin: str
    varies: bool  # whether it is said where it holds for some layer


@dataclass(frozen=True, kw_only=True)
class OperationLayout:
    """A method of the pool: a verb, under the name and with the arguments that an engine knows."""

    name: str
    origin: str
    verb: str
    buffers: tuple[str, ...]  # those whose layers tell which one is meant; all of the pool's for move, save and restore
    fields: tuple[str, ...]  # given to a store or put, returned by a load, get or gather, shown by a view of rows
    arguments: tuple[str, ...]  # of a store or put, what each of the fields is called
    view: str | None
    at_own: bool  # whether slots are the buffer's own, not those of its root space


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything the generated module says."""

    name: str
    file: str  # name of the spec's file, without its folder
    doc: str
    license: str  # an SPDX expression, or ""
    parameters: tuple[Parameter, ...]
    steps: tuple[LetLayout | SetLayout, ...]  # each after what it needs
    requires: tuple[RequireLayout, ...]
    notes: tuple[NoteLayout, ...]
    body: Expr
    draft: Expr
    spaces: tuple[SpaceLayout, ...]
    pages: tuple[Page, ...]  # every page that some buffer or `sizeof` uses
    aliases: tuple[tuple[str, tuple[Case[str], ...]], ...]  # formats that `sizeof` asks for by a name with cases
    buffers: tuple[BufferLayout, ...]
    operations: tuple[OperationLayout, ...]
    reached: frozenset[str]  # names of parameters, lets and sets that the above mentions
    annotations: tuple[tuple[str, str], ...]  # of the names that depend on the layer: name, Python type
    fingerprint: str


def resolve(spec: Spec, scope: Scope) -> Layout:
    """The layout of a spec that has no problems."""
    return _Resolver(spec, scope).layout()


def live_cases(scope: Scope, cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases that can still hold, folded; nothing follows one that always does."""
    found: list[Case] = []
    for case in cases:
        when = None if case.when is None else scope.fold(case.when)
        if isinstance(when, Literal):
            if not when.value:
                continue
            when = None
        found.append(replace(case, when=when))
        if when is None:
            break
    return tuple(found)


def with_otherwise(scope: Scope, cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Where some case is certain to hold, the last one needs no `when`."""
    if cases and cases[-1].when is not None and try_cases(scope, cases).certain:
        return (*cases[:-1], replace(cases[-1], when=None))
    return cases


class _Resolver:
    def __init__(self, spec: Spec, scope: Scope) -> None:
        self.spec, self.scope = spec, scope
        self.formats = {item.name.text: item for item in spec.formats}
        self.pages: dict[tuple[str, Size], Page] = {}
        self.aliases: dict[str, tuple[Case[str], ...]] = {}
        self.reached: set[str] = set()
        self.steps: dict[str, LetLayout | SetLayout] = {}

    def layout(self) -> Layout:
        layers = self.spec.layers
        assert layers is not None
        body = self.take(layers.body)
        draft = self.take(layers.draft) if layers.draft is not None else Literal(value=0, span=layers.span)
        requires = tuple(
            RequireLayout(
                that=self.take(item.that), message=item.message, origin=item.path, varies=self.scope.varies(item.that)
            )
            for item in self.spec.requires
        ) + tuple(self.one_buffer_each())
        spaces = tuple(self.space(item) for item in self.spec.spaces)
        buffers = tuple(self.buffer(item) for item in self.spec.buffers)
        operations = tuple(self.operations(buffers))

        def made(notes: tuple[NoteLayout, ...], fingerprint: str) -> Layout:
            """The layout with all that is reached so far."""
            return Layout(
                name=self.spec.name.text,
                file=self.spec.file.replace("\\", "/").rsplit("/", 1)[-1],
                doc=self.spec.doc,
                license="" if self.spec.license is None else self.spec.license.text,
                parameters=self.spec.parameters,
                steps=tuple(self.steps[name] for name in self.scope.order if name in self.steps),
                requires=requires,
                notes=notes,
                body=body,
                draft=draft,
                spaces=spaces,
                pages=tuple(self.pages.values()),
                aliases=tuple(self.aliases.items()),
                buffers=buffers,
                operations=operations,
                reached=frozenset(self.reached),
                annotations=tuple(
                    (name, _annotation(entity)) for name, entity in self.scope.entities.items() if entity.varies
                ),
                fingerprint=fingerprint,
            )

        decided = fingerprint(made((), ""))  # notes decide no byte, nor does what they alone reach
        notes = tuple(
            NoteLayout(when=self.take(item.when), text=item.text, origin=item.path, varies=self.scope.varies(item.when))
            for item in self.spec.notes
        )
        return made(notes, decided)

    def one_buffer_each(self) -> Iterator[RequireLayout]:
        """That the layers of two buffers of one operation do not meet: the layer says which buffer is meant."""
        for shared in shared_layers(self.spec, self.scope):
            span = shared.both.span
            that = self.take(Unary(operator="not", operand=shared.both, span=span))
            if that != Literal(value=True, span=span):
                yield RequireLayout(
                    that=that, message=shared.message, origin=shared.operation.path, varies=True, is_told=True
                )

    def operations(self, buffers: tuple[BufferLayout, ...]) -> Iterator[OperationLayout]:
        """The operations of the spec, and those every pool has where the spec gives them no name."""
        pages = {buffer.name: buffer.pages[0].use for buffer in buffers}
        for item in self.spec.operations:
            names = tuple(name.text for name in item.buffers or ())
            fields = item.returns if item.returns is not None else tuple(field for _, field in item.arguments)
            named = tuple(field.text for field in fields)
            if names:
                named = fields_or_default(pages[names[0]], item.verb, named)
            yield OperationLayout(
                name=item.name.text,
                origin=item.path,
                verb=item.verb,
                buffers=names,
                fields=named,
                arguments=tuple(argument.text for argument, _ in item.arguments) or named,
                view=item.view,
                at_own=item.at == "own",
            )
        verbs = {item.verb for item in self.spec.operations}
        for verb in WHOLE_POOL_VERBS:
            if verb not in verbs:
                yield OperationLayout(
                    name=verb, origin="", verb=verb, buffers=(), fields=(), arguments=(), view=None, at_own=False
                )

    # -- expressions

    def take(self, expr: Expr) -> Expr:
        """The folded expression, its divisions told apart; what it needs is reached."""
        folded = self.exact(self.scope.fold(expr))
        for part in walk(folded):
            if isinstance(part, Call) and part.function == "sizeof":
                assert isinstance(part.arguments[0], Name)
                self.size_of(part.arguments[0].name)
        for name in sorted(names(folded)):
            self.reach(name)
        return folded

    def taken(self, expr: Expr | None) -> Expr | None:
        return None if expr is None else self.take(expr)

    def exact(self, expr: Expr) -> Expr:
        """The expression with `exact(a, b)` for each division that must come out whole."""
        match expr:
            case Binary():
                left, right = self.exact(expr.left), self.exact(expr.right)
                if expr.operator == "/" and not self.is_ratio(left) and not self.is_ratio(right):
                    return Call(function="exact", arguments=(left, right), span=expr.span)
                return replace(expr, left=left, right=right)
            case Unary():
                return replace(expr, operand=self.exact(expr.operand))
            case Conditional():
                parts = (self.exact(part) for part in (expr.then, expr.test, expr.otherwise))
                return Conditional(**dict(zip(("then", "test", "otherwise"), parts, strict=True)), span=expr.span)
            case Index():
                return replace(expr, index=self.exact(expr.index))
            case Call(function="has" | "len"):
                return expr
            case Call():
                return replace(expr, arguments=tuple(self.exact(part) for part in expr.arguments))
        return expr

    def is_ratio(self, expr: Expr) -> bool:
        match expr:
            case Literal():
                return isinstance(expr.value, Fraction)
            case Name():
                entity = self.scope.entities.get(expr.name)
                return entity is not None and isinstance(entity.type, Ratio)
            case Conditional():
                return self.is_ratio(expr.then) or self.is_ratio(expr.otherwise)
            case Call(function="min" | "max"):
                return any(self.is_ratio(part) for part in expr.arguments)
            case Unary() | Binary():
                return any(self.is_ratio(part) for part in children(expr))
        return False

    def reach(self, name: str) -> None:
        entity = self.scope.entities.get(name)
        if entity is None or name in self.reached:
            return
        self.reached.add(name)
        if isinstance(entity.definition, Let):
            let = entity.definition
            self.steps[name] = LetLayout(name=name, origin=let.path, value=self.take(let.value), varies=entity.varies)
        elif isinstance(entity.definition, LayerSet):
            item = entity.definition
            cases = tuple(
                replace(case, when=self.taken(case.when), use=self.take(case.use))
                for case in item.cases
                if case.when is None or truth(self.scope, case.when, {}) is not False
            )
            self.steps[name] = SetLayout(name=name, origin=item.path, cases=cases)

    # -- pages

    def page(self, format: Format, slots: Size) -> Page:
        """The page for so many slots; with its slots left to load time too, where anything is."""
        key = (format.name.text, slots)
        if key not in self.pages:
            problems: list[Problem] = []
            page = resolve_page(self.scope, format, slots, problems)
            if page is None:
                raise InternalError(f"{format.path}: {problems[0].message if problems else 'no page'}")
            if slots.known is not None and not page.is_constant:
                return self.page(format, Size.of("slots"))
            self.pages[key] = page
            for name in page_names(page):
                self.reach(name)
        return self.pages[key]

    def size_of(self, name: str) -> None:
        """Make the pages that `sizeof(name, …)` asks for, with their slots left to load time."""
        format = self.formats[name]
        if not format.cases:
            self.page(format, Size.of("slots"))
            return
        cases = self.format_cases(format)
        self.aliases[name] = cases
        for case in cases:
            self.size_of(case.use)

    def format_cases(self, format: Format) -> tuple[Case[str], ...]:
        """The formats a name stands for, cases of cases flattened."""
        if not format.cases:
            return (Case(when=None, use=format.name.text, span=format.name.span),)
        found: list[Case[str]] = []
        for case in live_cases(self.scope, format.cases):
            for inner in self.format_cases(self.formats[case.use.text]):
                found.append(Case(when=_both(case.when, inner.when), use=inner.use, span=case.span))
        covered = with_otherwise(self.scope, tuple(found))
        return tuple(replace(case, when=self.taken(case.when)) for case in covered)

    # -- spaces and buffers

    def space(self, space: Space) -> SpaceLayout:
        cases = []
        for case in with_otherwise(self.scope, live_cases(self.scope, space.cases)):
            cases.append(replace(case, when=self.taken(case.when), use=self.space_form(case.use)))
        sizes = page_sizes(self.spec, self.scope, space.name.text)
        known = sizes.pop() if sizes is not None and len(sizes) == 1 else None
        return SpaceLayout(name=space.name.text, origin=space.path, cases=tuple(cases), page_size=known)

    def space_form(self, form: Root | Derived) -> RootSpace | DerivedSpace:
        if isinstance(form, Derived):
            return DerivedSpace(
                parent=form.parent.text,
                operator=form.operator,
                divisor=self.taken(form.divisor),
                where=self.taken(form.where),
            )
        return RootSpace(
            slots=self.slots(form.slots),
            at_most=None if form.at_most is None else self.slots(form.at_most),
            page=self.take(form.page),
            reserve=self.take(form.reserve),
            parent=None if form.parent is None else form.parent.text,
        )

    def slots(self, expr: Expr) -> Slots:
        rates = affine(self.scope, expr)
        assert rates is not None
        none = Rate(numerator=Literal(value=0, span=expr.span), denominator=Literal(value=1, span=expr.span))
        rates = {
            key: Rate(numerator=self.take(rate.numerator), denominator=self.take(rate.denominator))
            for key, rate in rates.items()
        }
        return Slots(
            per_token=rates.get("tokens", none), per_request=rates.get("requests", none), fixed=rates.get("", none)
        )

    def buffer(self, buffer: Buffer) -> BufferLayout:
        slots = page_slots(self.spec, self.scope, buffer)
        assert slots is not None
        cases = self.format_cases(self.formats[buffer.format.text])
        pages = tuple(
            Case(when=case.when, use=self.page(self.formats[case.use], slots), span=case.span) for case in cases
        )
        return BufferLayout(
            name=buffer.name.text,
            origin=buffer.path,
            space=buffer.space.text,
            slots=slots.known,
            pages=pages,
            choice=buffer.format.text,
            layers=self.take(buffer.layers),
            readers=self.taken(buffer.readers),
            block=self.taken(buffer.block),
            align=self.taken(buffer.align),
            split=self.taken(buffer.split),
            memory=buffer.memory,
            varies=any(self.scope.varies(_name(name)) for case in pages for name in page_names(case.use)),
        )


def _name(name: str) -> Name:
    return Name(name=name, span=NOWHERE)


def page_names(page: Page) -> tuple[str, ...]:
    """The load-time names that the bytes of a page depend on, `slots` left out, in the order of its axes."""
    found: set[str] = set()
    sizes = [page.page_bytes, *(condition.number for condition in page.conditions)]
    sizes += [local.at_least for local in page.locals]
    made = {local.name for local in page.locals}
    for field in page.fields:
        found |= {field.dtype} - set(DTYPES)
        sizes += [field.offset, field.bits, *field.shape]
        sizes += [size for pieces in field.pieces for piece in pieces for size in (piece.extent, piece.stride)]
    for size in sizes:
        for text in size.names:
            found |= {part for part in _identifiers(text) if part not in ("slots", "ITEM_BYTES")}
    axes = [name for field in page.fields for name in (field.dtype, *field.axes) if name is not None]
    found -= made | set(DTYPES)
    return tuple(dict.fromkeys([*(name for name in axes if name in found), *sorted(found)]))


def _annotation(entity: Entity) -> str:
    return {Int: "int", Ratio: "Fraction", Bool: "bool"}.get(type(entity.type), "str")


def _identifiers(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", text)


def _both(one: Expr | None, other: Expr | None) -> Expr | None:
    if one is None or other is None:
        return other if one is None else one
    return Binary(operator="and", left=one, right=other, span=one.span)


# -- fingerprint


def fingerprint(layout: Layout) -> str:
    """16 hex digits of everything that decides a byte: formats, planes, predicates and sizes. Not of texts."""
    return hashlib.sha256(json.dumps(_canonical(layout), sort_keys=True).encode()).hexdigest()[:16]


def _canonical(layout: Layout) -> dict[str, object]:
    def cases(items: tuple[Case[T], ...], use: Callable[[T], object]) -> list[list[object]]:
        return [[None if case.when is None else show(case.when), use(case.use)] for case in items]

    def expr(value: Expr | None) -> str | None:
        return None if value is None else show(value)

    return {
        "name": layout.name,
        "parameters": {
            item.name.text: [
                item.section,
                item.kind,
                sorted(map(repr, item.values or ())),
                item.letters,
                str(item.minimum),
                str(item.maximum),
                repr(item.equals),
                repr(item.default),
                item.optional,
                [show(source) for source in item.sources],
                *([item.besides] if item.besides is not None else []),
            ]
            for item in layout.parameters
        },
        "steps": {
            step.name: cases(step.cases, show) if isinstance(step, SetLayout) else show(step.value)
            for step in layout.steps
        },
        "requires": sorted(show(item.that) for item in layout.requires),
        "layers": [show(layout.body), show(layout.draft)],
        "spaces": {item.name: cases(item.cases, _canonical_space) for item in layout.spaces},
        "pages": {f"{page.format} {page.slots}": _canonical_page(page) for page in layout.pages},
        "aliases": {name: cases(items, str) for name, items in layout.aliases},
        "buffers": {
            item.name: [
                item.space,
                cases(item.pages, lambda page: f"{page.format} {page.slots}"),
                show(item.layers),
                expr(item.block),
                expr(item.align),
                expr(item.split),
                item.memory,
                *([] if item.readers is None else [show(item.readers)]),
            ]
            for item in layout.buffers
        },
    }


def _canonical_space(form: RootSpace | DerivedSpace) -> list[str]:
    if isinstance(form, DerivedSpace):
        divisor = "" if form.divisor is None else show(form.divisor)
        return [form.parent, f"{form.operator} {divisor}", "" if form.where is None else show(form.where)]
    rates, limits = (
        [f"{show(rate.numerator)} / {show(rate.denominator)}" for rate in slots.rates] if slots is not None else []
        for slots in (form.slots, form.at_most)
    )
    return [*rates, show(form.page), show(form.reserve), form.parent or "", *limits]


def _canonical_page(page: Page) -> list[object]:
    return [
        str(page.page_bytes),
        [f"{local.name} = {local.at_least} up to {local.align}" for local in page.locals],
        [f"{condition.number} % {condition.divisor}" for condition in page.conditions],
        [
            [
                field.name,
                field.dtype,
                str(field.offset),
                [
                    [[str(piece.low), str(piece.extent), str(piece.stride)] for piece in pieces]
                    for pieces in field.pieces
                ],
                repr(field.quant),
                field.init,
            ]
            for field in page.fields
        ],
    ]
