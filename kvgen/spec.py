"""A spec as its author wrote it: frozen dataclasses in which every name and expression knows its place.

`load_spec` reads a file and the fragments it includes. Nothing is judged here but the grammar of the parts that the
schema cannot see (expressions, types, pieces, included files); the rules are in check.py.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Generic, TypeVar

from kvgen.expr import Binary, Expr, Literal, Name, parse, show
from kvgen.nodes import Entry, Mapping, Node, Scalar, Sequence, Source, plain
from kvgen.problems import Label, Problem, Span, reason
from kvgen.schema import check_schema
from kvgen.source import excerpt_text, read_source

CODES = {
    "KV202": "an included file that cannot be used",
    "KV203": "a field type that does not parse",
    "KV204": "a piece, part or slot formula that does not parse",
    "KV205": "a part of the language that is not supported yet",
    "KV206": "more of something than a layout can have",
}

LIMITS = {  # entries of a section; far more than any layout has, and few enough for every pass to stay quick
    "include": 16,
    "needs": 64,
    "config": 128,
    "ignores": 128,
    "choices": 32,
    "let": 256,
    "require": 128,
    "notes": 32,
    "spaces": 32,
    "formats": 128,
    "buffers": 64,
    "operations": 128,
    "expect": 512,
}
MAX_SETS = 64
MAX_CASES = 16
MAX_PAGE_ITEMS = 64

Value = int | Fraction | bool | str | None
T = TypeVar("T")


@dataclass(frozen=True)
class Ident:
    """A name where it is written."""

    text: str
    span: Span = field(compare=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A fact of the model (`config`), a decision of the deployment (`choices`), or a name a fragment needs."""

    name: Ident
    section: str  # "config", "choices" or "needs"
    kind: str  # "int", "ratio", "bool", "text" or "list"
    values: tuple[tuple[Value, Value], ...] | None  # (as given, as named here); of a list: those of its elements
    letters: str | None  # of a text: the letters it may have
    minimum: int | Fraction | None
    maximum: int | Fraction | None
    equals: Value  # `is`: the only value this layout is for
    default: Value
    has_default: bool
    for_requests: Value  # of a choice: what a budget takes in place of the default where requests are counted
    optional: bool
    besides: str | None  # the type of values of its field that another parameter reads, and that are none here
    sources: tuple[Expr, ...]  # of a config parameter: dotted paths or expressions over them
    path: str  # place in the spec, as in "config.num_layers"
    spans: MappingType[str, Span] = field(compare=False, hash=False)  # of the values of its keys


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """A field of a config that says something about a cache, and the reason why it does not matter here."""

    name: Ident
    reason: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Let:
    name: Ident
    value: Expr
    path: str


@dataclass(frozen=True, kw_only=True)
class Require:
    that: Expr
    message: str
    path: str
    span: Span = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Note:
    """What is worth knowing of a layout for which `when` holds: for one of its layers, where it depends on them."""

    when: Expr
    text: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Case(Generic[T]):
    """One alternative; `when` is None for the one that is used otherwise."""

    when: Expr | None
    use: T
    span: Span = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class LayerSet:
    name: Ident
    cases: tuple[Case[Expr], ...]
    path: str


@dataclass(frozen=True, kw_only=True)
class Layers:
    body: Expr
    draft: Expr | None
    sets: tuple[LayerSet, ...]
    span: Span = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Root:
    """Slots that the caller names; mapped from the slots of `parent` by a table of the engine if there is one."""

    parent: Ident | None
    slots: Expr
    at_most: Expr | None  # slots that are enough for the tokens, however many requests have them
    page: Expr
    reserve: Expr


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Slots in the pages of `parent`: `offset`, `offset // divisor` or `offset % divisor`."""

    parent: Ident
    operator: str | None  # "//", "%" or None
    divisor: Expr | None
    where: Expr | None


@dataclass(frozen=True, kw_only=True)
class Space:
    name: Ident
    cases: tuple[Case[Root | Derived], ...]
    path: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    """`name`, `name//coarse`, or a plain number of elements."""

    extent: Expr  # a Name or a Literal
    coarse: Expr | None
    span: Span = field(compare=False)

    @property
    def name(self) -> str | None:
        return self.extent.name if isinstance(self.extent, Name) else None


@dataclass(frozen=True, kw_only=True)
class Quant:
    scale: Ident  # a field, "given" or "none"
    outer: bool
    floor: Fraction
    rounding: str  # "exact" or "pow2"
    code: str  # "reciprocal" or "divide"


@dataclass(frozen=True, kw_only=True)
class Field:
    name: Ident
    dtype: Ident
    axes: tuple[Axis, ...]
    quant: Quant | None
    init: str | None  # "-inf" or a number as text; None is 0
    path: str


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`axis // low % count` of an index; `count` None is what is left of the axis."""

    axis: Ident
    low: Expr | None
    count: Expr | None
    span: Span = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Gap:
    kind: str  # "pad" or "align"
    amount: Expr


@dataclass(frozen=True, kw_only=True)
class Part:
    field: Ident
    order: tuple[Piece, ...] | None


@dataclass(frozen=True, kw_only=True)
class Plane:
    each: tuple[Piece, ...]
    put: tuple[Part | Gap, ...]
    span: Span = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Format:
    """Fields and a page, or (`cases`) a name for one of several formats."""

    name: Ident
    fields: tuple[Field, ...]
    same_fields_as: Ident | None
    page: tuple[Plane | Gap, ...]
    cases: tuple[Case[Ident], ...]
    path: str


@dataclass(frozen=True, kw_only=True)
class Buffer:
    name: Ident
    format: Ident
    space: Ident
    layers: Expr
    readers: Expr | None
    block: Expr | None
    align: Expr | None
    split: Expr | None
    memory: str  # "device" or "host"
    path: str


READING_VERBS = ("load", "get", "gather", "view")  # of one layer, whose buffer may be that of an earlier one
KERNEL_VERBS = ("store", "put", "load", "get", "gather")  # work on fields of one layer
WHOLE_POOL_VERBS = ("move", "save", "restore")  # work on every buffer of every layer


@dataclass(frozen=True, kw_only=True)
class Operation:
    name: Ident
    verb: str
    buffers: tuple[Ident, ...] | None  # None: every buffer
    arguments: tuple[tuple[Ident, Ident], ...]  # (argument, field)
    returns: tuple[Ident, ...] | None
    view: str | None  # "rows", "pages" or "fields"
    at: str  # "root" or "own"
    path: str


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Numbers the author worked out. `claims` are its other keys, read by expect.py."""

    config: Scalar | None
    given: tuple[Entry, ...]
    claims: tuple[Entry, ...]
    path: str
    span: Span = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Include:
    """An included fragment: what it needs of the layout, and where it was asked for."""

    file: str
    span: Span = field(compare=False)
    needs: tuple[Parameter, ...]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A layout with the lets and formats of its fragments, or a fragment alone."""

    file: str
    kind: str  # "layout" or "fragment"
    name: Ident
    doc: str
    license: Ident | None  # an SPDX expression
    includes: tuple[Include, ...]
    parameters: tuple[Parameter, ...]  # config, choices; of a fragment: needs
    ignores: tuple[Ignored, ...]
    lets: tuple[Let, ...]
    requires: tuple[Require, ...]
    notes: tuple[Note, ...]
    layers: Layers | None
    spaces: tuple[Space, ...]
    formats: tuple[Format, ...]
    buffers: tuple[Buffer, ...]
    operations: tuple[Operation, ...]
    expectations: tuple[Expectation, ...]


@dataclass(frozen=True)
class Loaded:
    """What reading came to: a spec unless there were problems, and the text of every file for excerpts."""

    spec: Spec | None
    problems: tuple[Problem, ...]
    texts: MappingType[str, str]


def load_spec(file: str, read: Callable[[str], bytes]) -> Loaded:
    """Read `file` and the fragments it includes with `read`, which raises OSError where a file cannot be read."""
    texts: dict[str, str] = {}
    problems: list[Problem] = []
    spec = _load_one(file, read(file), texts, problems)
    if spec is None or spec.kind == "fragment":
        return Loaded(spec if not problems else None, tuple(problems), texts)
    includes, lets, formats = [], list(spec.lets), list(spec.formats)
    for include in spec.includes:
        fragment = _load_fragment(spec, include, read, texts, problems)
        if fragment is not None:
            includes.append(replace(include, file=fragment.file, needs=fragment.parameters))
            lets += fragment.lets
            formats += fragment.formats
    if problems:
        return Loaded(None, tuple(problems), texts)
    merged = replace(spec, includes=tuple(includes), lets=tuple(lets), formats=tuple(formats))
    return Loaded(merged, (), texts)


def _load_one(file: str, data: bytes, texts: dict[str, str], problems: list[Problem]) -> Spec | None:
    source, found = read_source(file, data)
    texts[file] = source.text if source is not None else excerpt_text(data)
    if source is not None and not found:
        found = check_schema(source)
    problems += found
    return _Builder(source, problems).spec() if source is not None and not found else None


def _load_fragment(
    layout: Spec, include: Include, read: Callable[[str], bytes], texts: dict[str, str], problems: list[Problem]
) -> Spec | None:
    def refuse(message: str, help: str | None = None) -> None:
        problems.append(Problem("KV202", message, Label(include.span), help=help, path="include"))

    if not is_plain_path(include.file):
        refuse(f"`{include.file}` is not a plain path", "name a .yaml file beside or below this one")
        return None
    if next(other for other in layout.includes if other.file == include.file) is not include:
        refuse(f"`{include.file}` is included twice")
        return None
    file = posixpath.join(posixpath.dirname(layout.file), include.file)
    try:
        data = read(file)
    except OSError as error:
        refuse(f"cannot read `{include.file}`: {reason(error)}")
        return None
    fragment = _load_one(file, data, texts, problems)
    if fragment is not None and fragment.kind != "fragment":
        refuse(f"`{include.file}` is a {fragment.kind}", "only a fragment can be included")
        return None
    return fragment


def exact_ratio(text: str) -> Fraction | str:
    """`1/2` as a fraction; any other text as it is."""
    return Fraction(text) if re.fullmatch(r"\d{1,18}/[1-9]\d{0,17}", text, re.ASCII) else text


def is_plain_path(path: str) -> bool:
    """Whether `path` is relative, leads no higher, and has no odd characters."""
    parts = path.split("/")
    return all(re.fullmatch(r"[\w.+-]+", part, re.ASCII) and part not in (".", "..") for part in parts)


_TYPE = re.compile(r"\s*(\w+)\s*\[([^\[\]]*)\]\s*", re.ASCII)
_PART = re.compile(r"\s*(\w+)\s*(?:\[([^\[\]]*)\])?\s*", re.ASCII)


class _Builder:
    """Turns the values of one file into a Spec, collecting problems."""

    def __init__(self, source: Source, problems: list[Problem]) -> None:
        self.file = source.file
        self.root = source.root
        self.problems = problems

    def spec(self) -> Spec | None:
        before = len(self.problems)
        for section, limit in LIMITS.items():
            node = self.root.get(section)
            if isinstance(node, (Mapping, Sequence)) and not self._few(node, limit, f"entries of `{section}`", section):
                return None
        kind = next(kind for kind in ("layout", "fragment", "contract") if self.root.get(kind))
        name = self._ident(self.root.get(kind))
        if kind == "contract":
            self._unsupported(self.root.entry("contract").key.span, "contract files")
            return None
        if self.root.get("tensors") is not None:
            self._unsupported(self.root.entry("tensors").key.span, "`tensors`")
        spec = Spec(
            file=self.file,
            kind=kind,
            name=name,
            doc=self._text(self.root.get("doc")) if self.root.get("doc") else "",
            license=self._ident(self.root.get("license")) if self.root.get("license") else None,
            includes=tuple(
                Include(file=self._text(item), span=item.span, needs=())
                for item in self._items(self.root.get("include"))
            ),
            parameters=(
                *self._parameters("needs"),
                *self._parameters("config"),
                *self._parameters("choices"),
            ),
            ignores=tuple(
                Ignored(name=self._ident(entry.key), reason=self._text(entry.value), path=f"ignores.{entry.key.value}")
                for entry in self._entries("ignores")
            ),
            lets=tuple(
                Let(
                    name=self._ident(entry.key),
                    value=self._expr(entry.value, f"let.{entry.key.value}"),
                    path=f"let.{entry.key.value}",
                )
                for entry in self._entries("let")
            ),
            requires=tuple(self._requires()),
            notes=tuple(self._notes()),
            layers=self._layers(),
            spaces=tuple(self._space(entry) for entry in self._entries("spaces")),
            formats=tuple(self._format(entry) for entry in self._entries("formats")),
            buffers=tuple(self._buffer(entry) for entry in self._entries("buffers")),
            operations=tuple(self._operation(entry) for entry in self._entries("operations")),
            expectations=tuple(self._expectations()),
        )
        return spec if len(self.problems) == before else None

    # -- small pieces

    def _entries(self, key: str) -> tuple[Entry, ...]:
        section = self.root.get(key)
        return section.entries if isinstance(section, Mapping) else ()

    @staticmethod
    def _items(node: Node | None) -> tuple[Node, ...]:
        return node.items if isinstance(node, Sequence) else ()

    @staticmethod
    def _text(node: Node | None) -> str:
        assert isinstance(node, Scalar)
        return str(node.value)

    def _ident(self, node: Node | None) -> Ident:
        assert isinstance(node, Scalar)
        return Ident(str(node.value), node.span)

    def _expr(self, node: Node | None, path: str) -> Expr:
        """The expression; a literal in its place after a problem (the spec is then dropped)."""
        assert isinstance(node, Scalar)
        return parse(node, path, self.problems) or Literal(value=0, span=node.span)

    def _optional(self, parent: Mapping, key: str, path: str) -> Expr | None:
        node = parent.get(key)
        return None if node is None else self._expr(node, f"{path}.{key}")

    def _report(self, code: str, message: str, span: Span, path: str, help: str | None = None) -> None:
        self.problems.append(Problem(code, message, Label(span), help=help, path=path))

    def _few(self, node: Mapping | Sequence, limit: int, what: str, path: str) -> bool:
        """Whether there are no more than `limit`; a problem at the first that is too many."""
        if len(node) <= limit:
            return True
        first = node.entries[limit].key.span if isinstance(node, Mapping) else node.items[limit].span
        self._report("KV206", f"{len(node)} {what}; the limit is {limit}", first, path)
        return False

    def _unsupported(self, span: Span, what: str) -> None:
        verb = "is" if what.startswith("`") else "are"
        self._report("KV205", f"{what} {verb} not supported yet", span, "")

    def _cases(self, node: Node, path: str, build: Callable[[Node, str], T]) -> tuple[Case[T], ...]:
        if not isinstance(node, Sequence):
            return (Case(when=None, use=build(node, path), span=node.span),)
        if not self._few(node, MAX_CASES, "cases", path):
            return ()
        cases = []
        for position, item in enumerate(node.items):
            assert isinstance(item, Mapping)
            where = f"{path}[{position}]"
            cases.append(
                Case(
                    when=self._optional(item, "when", where),
                    use=build(item.get("use"), f"{where}.use"),  # type: ignore[arg-type]
                    span=item.span,
                )
            )
        return tuple(cases)

    # -- sections

    def _parameters(self, section: str) -> tuple[Parameter, ...]:
        return tuple(self._parameter(section, entry) for entry in self._entries(section))

    def _parameter(self, section: str, entry: Entry) -> Parameter:
        path = f"{section}.{entry.key.value}"
        node = entry.value
        if section == "needs":
            node = _need_as_parameter(node)
        assert isinstance(node, Mapping)
        domain = node.get("of")
        kind_node = node.get("type")
        kind = self._text(kind_node) if kind_node is not None else "text"
        values, letters = None, None
        if isinstance(domain, Mapping):
            values = tuple((item.key.value, plain(item.value)) for item in domain.entries)
        elif isinstance(domain, Sequence):
            values = tuple((plain(item), plain(item)) for item in domain.items)
        elif isinstance(domain, Scalar) and kind == "text":
            letters = str(domain.value)
        elif isinstance(domain, Scalar) and (kind != "list" or domain.value != "int"):
            help = "letters are of a text; the elements of a list are `int`, `[a, b]` or `{raw: value}`"
            self._report("KV203", f"`{domain.value}` is no domain for type `{kind}`", domain.span, path, help)
        if kind_node is None and values is not None and all(type(value) is int for _, value in values):
            kind = "int"
        default = node.get("default")
        equals = node.get("is")
        for_requests = node.get("for_requests")
        source = node.get("from")
        if source is None and section == "config":
            sources: tuple[Expr, ...] = (Name(name=str(entry.key.value), span=entry.key.span),)
        else:
            nodes = source.items if isinstance(source, Sequence) else (source,) if source is not None else ()
            sources = tuple(self._expr(item, f"{path}.from") for item in nodes)
        if domain is None and kind == "list":
            help = "add `of: int`, or `of: [a, b]` with the words that an element can be"
            message = f"`{entry.key.value}` is a list and does not say what its elements are"
            self._report("KV203", message, entry.key.span, path, help)
        return Parameter(
            name=self._ident(entry.key),
            section=section,
            kind=kind,
            values=values,
            letters=letters,
            minimum=self._number(node.get("min"), kind),
            maximum=self._number(node.get("max"), kind),
            equals=None if equals is None else self._value(equals, kind),
            default=None if default is None else self._value(default, kind),
            has_default=default is not None,
            for_requests=None if for_requests is None else self._value(for_requests, kind),
            optional=node.get("optional") is not None and plain(node.get("optional")) is True,
            besides=None if node.get("besides") is None else self._text(node.get("besides")),
            sources=sources,
            path=path,
            spans={item.key.value: item.value.span for item in node.entries},
        )

    def _number(self, node: Node | None, kind: str) -> int | Fraction | None:
        value = None if node is None else self._value(node, kind)
        return value if isinstance(value, (int, Fraction)) else None

    @staticmethod
    def _value(node: Node, kind: str) -> Value:
        """A literal value; the ratio `1/2` is exact. Judged against the parameter's type in check.py."""
        value = plain(node)
        if kind == "ratio" and isinstance(value, str):
            value = exact_ratio(value)
        return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]

    def _requires(self) -> list[Require]:
        found = []
        for position, item in enumerate(self._items(self.root.get("require"))):
            assert isinstance(item, Mapping)
            path = f"require[{position}]"
            found.append(
                Require(
                    that=self._expr(item.get("that"), f"{path}.that"),
                    message=self._text(item.get("else")),
                    path=path,
                    span=item.span,
                )
            )
        return found

    def _notes(self) -> Iterator[Note]:
        for position, item in enumerate(self._items(self.root.get("notes"))):
            assert isinstance(item, Mapping)
            path = f"notes[{position}]"
            yield Note(when=self._expr(item.get("when"), f"{path}.when"), text=self._text(item.get("say")), path=path)

    def _layers(self) -> Layers | None:
        node = self.root.get("layers")
        if not isinstance(node, Mapping):
            return None
        sets = node.get("sets")
        if isinstance(sets, Mapping) and not self._few(sets, MAX_SETS, "layer sets", "layers.sets"):
            return None
        return Layers(
            body=self._expr(node.get("body"), "layers.body"),
            draft=self._optional(node, "draft", "layers"),
            sets=tuple(
                LayerSet(
                    name=self._ident(entry.key),
                    cases=self._cases(entry.value, f"layers.sets.{entry.key.value}", self._expr),
                    path=f"layers.sets.{entry.key.value}",
                )
                for entry in (sets.entries if isinstance(sets, Mapping) else ())
            ),
            span=self.root.entry("layers").key.span,
        )

    def _space(self, entry: Entry) -> Space:
        path = f"spaces.{entry.key.value}"
        return Space(name=self._ident(entry.key), cases=self._cases(entry.value, path, self._space_form), path=path)

    def _space_form(self, node: Node, path: str) -> Root | Derived:
        assert isinstance(node, Mapping)
        parent = self._ident(node.get("of")) if node.get("of") is not None else None
        slot = node.get("slot")
        if slot is None:
            reserve = node.get("reserve")
            return Root(
                parent=parent,
                slots=self._expr(node.get("slots"), f"{path}.slots"),
                at_most=self._optional(node, "at_most", path),
                page=self._expr(node.get("page"), f"{path}.page"),
                reserve=self._expr(reserve, f"{path}.reserve") if reserve else Literal(value=1, span=node.span),
            )
        formula = self._expr(slot, f"{path}.slot")
        operator, divisor = None, None
        match formula:
            case Name(name="offset"):
                pass
            case Binary(operator="//" | "%", left=Name(name="offset")):
                operator, divisor = formula.operator, formula.right
            case _:
                help = "write `offset`, `offset // n` or `offset % n`"
                self._report("KV204", f"`{show(formula)}` is not a slot formula", slot.span, f"{path}.slot", help)
        assert parent is not None
        where = self._optional(node, "where", path)
        return Derived(parent=parent, operator=operator, divisor=divisor, where=where)

    def _format(self, entry: Entry) -> Format:
        path = f"formats.{entry.key.value}"
        name = self._ident(entry.key)
        if isinstance(entry.value, Sequence):
            cases = self._cases(entry.value, path, lambda node, _: self._ident(node))
            return Format(name=name, fields=(), same_fields_as=None, page=(), cases=cases, path=path)
        assert isinstance(entry.value, Mapping)
        for key in ("fields", "page"):
            part = entry.value.get(key)
            if isinstance(part, (Mapping, Sequence)):
                self._few(part, MAX_PAGE_ITEMS, f"entries of `{key}`", f"{path}.{key}")
        fields = entry.value.get("fields")
        other = self._ident(fields) if isinstance(fields, Scalar) else None
        return Format(
            name=name,
            fields=tuple(self._field(item, f"{path}.fields") for item in fields.entries)
            if isinstance(fields, Mapping)
            else (),
            same_fields_as=other,
            page=tuple(self._page_item(item, f"{path}.page") for item in self._items(entry.value.get("page"))),
            cases=(),
            path=path,
        )

    def _field(self, entry: Entry, path: str) -> Field:
        path = f"{path}.{entry.key.value}"
        node = entry.value
        details = node if isinstance(node, Mapping) else None
        type_node = details.get("type") if details else node
        assert isinstance(type_node, Scalar)
        dtype, axes = self._type(type_node, path)
        quant = details.get("quant") if details else None
        init = details.get("init") if details else None
        return Field(
            name=self._ident(entry.key),
            dtype=dtype,
            axes=axes,
            quant=self._quant(quant) if isinstance(quant, Mapping) else None,
            init=None if init is None else self._text(init),
            path=path,
        )

    def _type(self, node: Scalar, path: str) -> tuple[Ident, tuple[Axis, ...]]:
        match = _TYPE.fullmatch(str(node.value))
        if match is None:
            help = "write a dtype and its axes, as in `bf16[heads, head_dim]`; one value per slot is `f32[1]`"
            self._report("KV203", f"`{node.value}` is not a field type", node.span, path, help)
            return Ident("u8", node.span), ()
        axes = []
        for start, end in _comma_parts(match[2], match.start(2)):
            expr = parse(node, path, self.problems, (start, end))
            span = node.part(start, end)
            match expr:
                case None:
                    pass
                case Name() | Literal(value=int()):
                    axes.append(Axis(extent=expr, coarse=None, span=span))
                case Binary(operator="//", left=Name(), right=Name() | Literal(value=int())):
                    axes.append(Axis(extent=expr.left, coarse=expr.right, span=span))
                case _:
                    help = "an axis is a number, a name, or `name//n`; give a longer expression a name under `let`"
                    self._report("KV203", f"`{show(expr)}` is not an axis", span, path, help)
        return Ident(match[1], node.part(match.start(1), match.end(1))), tuple(axes)

    def _quant(self, node: Mapping) -> Quant:
        floor = node.get("floor")
        value = Fraction(0) if floor is None else plain(floor)
        rounding, code = node.get("round"), node.get("code")
        return Quant(
            scale=self._ident(node.get("scale")),
            outer=node.get("outer") is not None,
            floor=Fraction(value),  # type: ignore[arg-type]
            rounding="exact" if rounding is None else self._text(rounding),
            code="reciprocal" if code is None else self._text(code),
        )

    def _page_item(self, node: Node, path: str) -> Plane | Gap:
        if isinstance(node, Sequence):
            slot = Piece(axis=Ident("slot", node.span), low=None, count=None, span=node.span)
            return Plane(each=(slot,), put=tuple(self._part(item, path) for item in node.items), span=node.span)
        assert isinstance(node, Mapping)
        if node.get("each") is None:
            return self._gap(node, path)
        return Plane(
            each=tuple(self._pieces(item, path) for item in self._items(node.get("each"))),
            put=tuple(self._part(item, path) for item in self._items(node.get("put"))),
            span=node.span,
        )

    def _gap(self, node: Mapping, path: str) -> Gap:
        entry = node.entries[0]
        return Gap(kind=str(entry.key.value), amount=self._expr(entry.value, path))

    def _part(self, node: Node, path: str) -> Part | Gap:
        if isinstance(node, Mapping):
            return self._gap(node, path)
        assert isinstance(node, Scalar)
        match = _PART.fullmatch(str(node.value))
        if match is None:
            help = "a part is a field, `field[piece, …]`, `{pad: n}` or `{align: n}`"
            self._report("KV204", f"`{node.value}` is not a part of a page", node.span, path, help)
            return Part(field=Ident("", node.span), order=None)
        order = None
        if match[2] is not None:
            order = tuple(self._piece(node, start, end, path) for start, end in _comma_parts(match[2], match.start(2)))
        return Part(field=Ident(match[1], node.part(match.start(1), match.end(1))), order=order)

    def _pieces(self, node: Node, path: str) -> Piece:
        assert isinstance(node, Scalar)
        return self._piece(node, 0, len(str(node.value)), path)

    def _piece(self, node: Scalar, start: int, end: int, path: str) -> Piece:
        expr = parse(node, path, self.problems, (start, end))
        span = node.part(start, end)
        low = count = None
        match expr:
            case Name():
                axis = expr
            case Binary(operator="//", left=Name()):
                axis, low = expr.left, expr.right
            case Binary(operator="%", left=Name()):
                axis, count = expr.left, expr.right
            case Binary(operator="%", left=Binary(operator="//", left=Name())):
                axis, low, count = expr.left.left, expr.left.right, expr.right
            case _:
                if expr is not None:
                    help = "a piece is `axis`, `axis//m`, `axis%n` or `axis//m%n`"
                    self._report("KV204", f"`{show(expr)}` is not a piece of an axis", span, path, help)
                axis = Name(name="slot", span=span)
        return Piece(axis=Ident(axis.name, axis.span), low=low, count=count, span=span)

    def _buffer(self, entry: Entry) -> Buffer:
        path = f"buffers.{entry.key.value}"
        node = entry.value
        assert isinstance(node, Mapping)
        if node.get("serves") is not None:
            self._unsupported(node.entry("serves").key.span, "`serves`")
        memory = node.get("memory")
        return Buffer(
            name=self._ident(entry.key),
            format=self._ident(node.get("format")),
            space=self._ident(node.get("space")),
            layers=self._expr(node.get("layers"), f"{path}.layers"),
            readers=self._optional(node, "readers", path),
            block=self._optional(node, "block", path),
            align=self._optional(node, "align", path),
            split=self._optional(node, "split", path),
            memory="device" if memory is None else self._text(memory),
            path=path,
        )

    def _operation(self, entry: Entry) -> Operation:
        node = entry.value
        assert isinstance(node, Mapping)
        verb = next(item for item in node.entries if item.key.value not in ("args", "returns", "as", "at"))
        arguments, returns, view, at = node.get("args"), node.get("returns"), node.get("as"), node.get("at")
        return Operation(
            name=self._ident(entry.key),
            verb=str(verb.key.value),
            buffers=tuple(self._ident(item) for item in verb.value.items) if isinstance(verb.value, Sequence) else None,
            arguments=tuple((self._ident(item.key), self._ident(item.value)) for item in arguments.entries)
            if isinstance(arguments, Mapping)
            else (),
            returns=tuple(self._ident(item) for item in self._items(returns)) if returns is not None else None,
            view=None if view is None else self._text(view),
            at="root" if at is None else self._text(at),
            path=f"operations.{entry.key.value}",
        )

    def _expectations(self) -> list[Expectation]:
        found = []
        for position, item in enumerate(self._items(self.root.get("expect"))):
            assert isinstance(item, Mapping)
            config, given = item.get("config"), item.get("given")
            found.append(
                Expectation(
                    config=config if isinstance(config, Scalar) else None,
                    given=given.entries if isinstance(given, Mapping) else (),
                    claims=tuple(entry for entry in item.entries if entry.key.value not in ("config", "given")),
                    path=f"expect[{position}]",
                    span=item.span,
                )
            )
        return found


def _need_as_parameter(node: Node) -> Mapping:
    """`int` as `{type: int}`, `[a, b]` as `{of: [a, b]}`."""
    key = "type" if isinstance(node, Scalar) else "of"
    entries = [Entry(Scalar(key, node.span), node)]
    if isinstance(node, Scalar) and node.value == "list":
        entries.append(Entry(Scalar("of", node.span), Scalar("int", node.span)))
    return Mapping(tuple(entries), node.span)


def _comma_parts(text: str, start: int) -> list[tuple[int, int]]:
    """The (start, end) of what stands between commas; none in an empty text."""
    if not text.strip():
        return []
    parts = []
    for part in text.split(","):
        parts.append((start, start + len(part)))
        start += len(part) + 1
    return parts
