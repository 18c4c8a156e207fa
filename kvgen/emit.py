"""Emission: a resolved layout to the text of its module.

`view_of` decides everything that is printed, as one frozen `ModuleView`; the templates only print it. Expressions come
out of `Printer` as small trees that pysource.py lays out as a formatter would.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from typing import TypeVar

import jinja2

from kvgen.bytemap import page_lines
from kvgen.expr import Binary, Call, Expr, Literal, Name, Unary, names, show
from kvgen.kernels import number_names, number_value
from kvgen.layout import (
    BufferLayout,
    DerivedSpace,
    Layout,
    LetLayout,
    RootSpace,
    SetLayout,
    SpaceLayout,
    page_names,
)
from kvgen.operations import copied_fields, load_time_pages, pool_view, reads_codes, shown_rows, takes_scales
from kvgen.origins import file_name, origin
from kvgen.page import BYTE, FieldLayout, Page
from kvgen.printer import Printer, num_body, page_constant
from kvgen.problems import InternalError, Span
from kvgen.pysource import (
    STEP,
    UNARY,
    WIDTH,
    Chain,
    Code,
    Each,
    Group,
    Keyword,
    Lambda,
    Raw,
    Ternary,
    Words,
    bracketed,
    call,
    chain,
    flat,
    keywords,
    minus,
    quoted,
    statement,
    tuple_of,
    value,
)
from kvgen.resources import package_folder
from kvgen.size import Size
from kvgen.space import Rate
from kvgen.spec import Case, Parameter
from kvgen.text import wrap
from kvgen.types import DERIVED_SLOTS_MAX, DTYPES, MAX_LAYERS
from kvgen.views import (
    BlockView,
    ChoiceView,
    ConstantPageView,
    KindsView,
    ModuleView,
    PageFunctionView,
    RuleView,
    StepView,
)
from kvgen.walk import Step, Walk, records

T = TypeVar("T")
IN_FROM_CONFIG = 3 * STEP  # columns in front of a statement there
ONE_SLOT = (Step(low=Size.of(1), extent=Size.of(1), stride=Size()),)  # the walk of a page that has one
IN_DOCSTRING = 3 * STEP  # and in front of what its docstring says about an argument


@dataclass(frozen=True)
class Module:
    """The text of a generated module: what needs the standard library alone, then what needs torch."""

    layout_text: str
    pool_text: str

    @property
    def text(self) -> str:
        return self.layout_text + self.pool_text


def emit(layout: Layout) -> Module:
    """The module of a layout. The same layout gives the same text everywhere."""
    view = view_of(layout)
    pool = pool_view(layout, view.has_translation, view.has_init)
    texts = [template(f"{half}.py.jinja").render(m=view, p=pool) for half in ("layout", "pool")]
    return Module(*(_with_even_gaps(text) for text in texts))


def _with_even_gaps(text: str) -> str:
    """At most two blank lines in front of a statement of the module, one inside anything."""
    return re.sub(r"\n{3,}(?=[ \t])", "\n\n", re.sub(r"\n{4,}", "\n\n\n", text))


def template(name: str) -> jinja2.Template:
    return _templates().get_template(name)


@cache
def _templates() -> jinja2.Environment:
    folder = package_folder("templates")
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def view_of(layout: Layout) -> ModuleView:
    return _Viewer(layout).view()


def class_name(name: str) -> str:
    """`glm_dsa` as `GlmDsa`."""
    return "".join(part.capitalize() for part in name.split("_"))


class _Viewer:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.used: set[str] = set()
        self.printer = Printer(layout, self.used)
        self.spaces = {space.name: space for space in layout.spaces}
        self.page_locals: dict[tuple[str, str], str] = {}  # by format and slots: what gives the page
        roots = [case.use for space in layout.spaces for case in space.cases if isinstance(case.use, RootSpace)]
        counts = [slots for root in roots for slots in (root.slots, root.at_most) if slots is not None]
        self.has_requests = any(slots.per_request.known != 0 for slots in counts)
        self.has_fixed = any(slots.fixed.known != 0 for slots in counts)
        self.has_limits = any(root.at_most is not None for root in roots)
        self.has_split = any(buffer.split is not None for buffer in layout.buffers)
        self.has_align = any(buffer.align is not None for buffer in layout.buffers)
        self.has_block = any(buffer.block is not None for buffer in layout.buffers)
        self.has_readers = any(buffer.readers is not None for buffer in layout.buffers)
        self.has_host = any(buffer.memory == "host" for buffer in layout.buffers)
        self.varying = any(buffer.varies for buffer in layout.buffers)
        self.has_layer_functions = any(isinstance(step, LetLayout) and step.varies for step in layout.steps)
        self.has_translation = any(form.operator is not None or form.where for form in self.derived_spaces())
        walks = [record for page in layout.pages for record in records(page)]
        self.has_walks = any(not record.is_dense or len(record.slot_walk) > 1 for record in walks)
        self.shows_fields = any(item.view == "fields" for item in layout.operations)
        self.has_init = any(field.init for page in layout.pages for field in page.fields)

    def view(self) -> ModuleView:
        layout = self.layout
        reads = tuple(self.reads())
        lets = tuple(self.lets())
        early_requires = tuple(self.requires(early=True))
        requires = tuple(self.requires(early=False))
        steps = tuple(self.layer_steps())
        layer_requires = tuple(self.layer_requires())
        readers = tuple(self.reader_blocks())
        notes = tuple(self.notes())
        spaces = tuple(self.space_blocks())
        aliases = tuple(self.alias_blocks())
        page_choices = tuple(self.page_choices())
        checks = tuple(self.buffer_checks())
        buffers = exploded(tuple(self.buffer(buffer) for buffer in layout.buffers))
        functions = tuple(self.page_functions())
        draft = self.printer.code(layout.draft)
        body = num_body(self.printer)
        total = body if flat(draft) == "0" else chain("+", body, draft)
        derived = any(not isinstance(source, Name) for item in layout.parameters for source in item.sources)
        pieces = any(len(own) > 1 for page in layout.pages for field in page.fields for own in field.pieces)
        constants = tuple(self.constant_pages())
        has_copies = copied_fields(layout)
        affine = self.is_affine()
        return ModuleView(
            name=layout.name,
            class_name=class_name(layout.name),
            header=header(layout, "kvgen build"),
            doc="\n".join(wrapped(layout.doc)),
            byte_map=tuple(self.byte_map()),
            imports=tuple(self.imports()),
            fingerprint=layout.fingerprint,
            constant_pages=constants,
            page_functions=functions,
            has_pieces=pieces,
            page_identity=self.page_identity(),
            num_slots=self.num_slots(),
            requests_parameter=", requests: int = 0" if self.has_requests else "",
            requests_argument=", requests" if self.has_requests else "",
            layer_page_bytes="sum(page.page_bytes for page in self.pages)"
            if self.varying
            else "self.page.page_bytes * len(self.layers)",
            physical_slots="self.page_slots" if self.has_block else "self.space.page_size",
            pages_multiplier=" * (self.space.page_size // self.page_slots)" if self.has_block else "",
            choices=tuple(self.choices()),
            choice_docs=tuple(self.choice_docs()),
            reads=reads,
            lets=lets,
            early_requires=early_requires,
            requires=requires,
            num_layers=flat(total),
            held=held_layers(body),
            max_layers=str(MAX_LAYERS),
            max_derived=f"2**{DERIVED_SLOTS_MAX.bit_length() - 1}",
            layer_steps=steps,
            layer_requires=layer_requires,
            readers=readers,
            notes=notes,
            spaces=spaces,
            spaces_argument=statement(
                "spaces=",
                tuple_of([Raw(f"{space.name}_space") for space in layout.spaces]),
                IN_FROM_CONFIG + STEP,
                ",",
            ),
            aliases=aliases,
            page_choices=page_choices,
            buffer_checks=checks,
            buffers=statement("buffers=", buffers, IN_FROM_CONFIG + STEP, ","),
            buffer_fingerprint="_digest(*(page.fingerprint for page in self.buffer(buffer).pages))"
            if self.varying
            else "self.buffer(buffer).page.fingerprint",
            device_buffers=self.device_buffers(),
            host_bytes=self.host_bytes(),
            source_annotation='"str | _Derived"' if derived else "str",
            word_annotation=self.word_annotation(),
            kinds=KindsView(
                **{name: name in self.used for name in KindsView.__dataclass_fields__}  # type: ignore[arg-type]
            ),
            has_item_bytes=self.has_align
            or shown_rows(layout)
            or copied_fields(layout)
            or any(field.bits.known is None for page in layout.pages for field in page.fields),
            item_bytes=item_bytes({field.dtype for page in layout.pages for field in page.fields}),
            has_init=self.has_init,
            has_split=self.has_split,
            has_align=self.has_align,
            has_block=self.has_block,
            has_requests=self.has_requests,
            has_fixed_slots=self.has_fixed,
            has_limits=self.has_limits,
            has_translation=self.has_translation,
            has_derived_spaces=any(True for _ in self.derived_spaces()),
            has_walks=self.has_walks,
            has_constants=load_time_pages(layout),
            has_field_copies=has_copies,
            has_rows=shown_rows(layout),
            field_count="math.prod(_flat(self.shape[1:]))" if pieces else "math.prod(self.shape[1:])",
            numbering="self.root or self.name" if any(True for _ in self.derived_spaces()) else "self.name",
            own_plane=", own.plane" if self.has_split else "",
            owned_class="_Owned" if self.has_split else "_Entry",
            owned_of="self._owned_of" if self.has_split else "self._entry_of",
            owned_memory="tensors[0]" if self.has_split else "memory",
            held_class="_Entry | _Owned" if self.has_split else "_Entry",
            field_memory="*entry.memory_of(field)" if self.has_split else "entry.memory",
            blank_memory="blank, 0" if self.has_split else "blank",
            field_offset="(field.offset - begin)" if self.has_split else "field.offset",
            held_memory="memory: torch.Tensor, begin: int" if self.has_split else "memory: torch.Tensor",
            has_pairs=any(field.dtype == "e2m1" for page in layout.pages for field in page.fields),
            requests_of_self=", self.requests" if self.has_requests else "",
            entry_records="entry.page.records_of(entry.plane)" if self.has_split else "entry.page.records",
            entry_name_note=", and of the plane where it is split" if self.has_split else "",
            aux_note=self.aux_note(),
            aux_bytes=self.aux_bytes(),
            blank=self.blank(),
            blank_bytes="max(own.offset + own.page_bytes for own in page.planes) if plane else page.page_bytes"
            if self.has_split
            else "page.page_bytes",
            plane_parameter=", plane: Plane | None" if self.has_split else "",
            plane_note=", or of a plane of it," if self.has_split else "",
            flat_shape="_flat(field.shape)" if pieces else "field.shape",
            flat_stride="_flat(field.stride)" if pieces else "field.stride",
            has_flat=pieces and (has_copies or self.has_init or self.shows_fields),
            has_varying_pages=self.varying,
            has_host=self.has_host,
            has_readers=self.has_readers,
            has_notes=bool(notes),
            is_affine=affine,
            has_search=not affine or self.has_requests,
            has_layer_requires=bool(layer_requires),
            has_open_rules="open rules" in self.used,
            has_derived_sources=derived,
            has_several_sources=derived or any(len(item.sources) > 1 for item in layout.parameters),
            has_dotted_paths=any(
                "." in name for item in layout.parameters for part in item.sources for name in names(part)
            ),
        )

    # -- head

    def imports(self) -> Iterator[str]:
        derived = any(True for _ in self.derived_spaces())
        yield from ("import ctypes", "import difflib", "import hashlib", "import json", "import math", "import os")
        if "ratio" in self.used:
            yield "import re"
        if any(item.verb in ("store", "put") for item in self.layout.operations):
            yield "import warnings"
        yield "import zlib"
        yield "from collections.abc import Callable, Iterable, Iterator, Mapping"
        yield f"from dataclasses import dataclass{', replace' if derived or self.has_split or self.has_align else ''}"
        yield "from fractions import Fraction"
        cached = ["cache"] if reads_codes(self.layout) else []
        if self.varying:
            cached.append("cached_property")
        if self.varying or self.has_layer_functions:
            cached.append("lru_cache")
        if cached:
            yield f"from functools import {', '.join(cached)}"
        has_products = any(item.verb in ("load", "gather") for item in self.layout.operations)
        yield f"from itertools import groupby{', product' if has_products else ''}"
        yield "from numbers import Integral"
        yield "from typing import Any, NamedTuple, NoReturn, Self"

    def byte_map(self) -> Iterator[str]:
        for position, page in enumerate(self.layout.pages):
            if position:
                yield ""
            yield from page_lines(page)

    def page_identity(self) -> str:
        """What the bytes of a page are told by; nothing of it depends on what else the module has."""
        planes = ", *(self.planes if self.split else ())" if self.has_split else ""
        return f"self.slots, self.page_bytes, fields{planes}"

    def num_slots(self) -> str:
        """Slots of a space, from its own numbers."""
        terms = ["self.slots_per_token * tokens"]
        if self.has_requests:
            terms.append("self.slots_per_request * requests")
        if self.has_fixed:
            terms.append("self.fixed_slots")
        return " + ".join(terms)

    # -- pages

    def constant_pages(self) -> Iterator[ConstantPageView]:
        for page in self.layout.pages:
            if page.is_constant:
                name = page_constant(self.layout, page)
                text = statement(f"{name} = ", self.page_literal(page, Raw(str(page.slots))), 0)
                yield ConstantPageView(origin=page.origin, assignment=text)

    def page_literal(self, page: Page, slots: Code) -> Code:
        fields = tuple(self.field_literal(field) for field in page.fields)
        items = [
            Keyword("format", Raw(quoted(page.format))),
            Keyword("slots", slots),
            Keyword("page_bytes", size_code(page.page_bytes)),
            Keyword("fields", exploded(fields)),
            Keyword("records", exploded(tuple(self.record_literals(page)))),
        ]
        if load_time_pages(self.layout) and not page.is_constant:
            numbers = [call("", Raw(quoted(name)), Raw(number_value(name))) for name in number_names(page)]
            items += [Keyword("numbers", tuple_of(numbers))] if numbers else []
        if self.has_split:
            items.append(Keyword("planes", exploded(tuple(self.plane_literals(page)))))
        return exploded(tuple(items), "Page(")

    def record_literals(self, page: Page) -> Iterator[Code]:
        for record in records(page):
            items: list[Code] = [tuple_of([Raw(quoted(name)) for name in record.fields])]
            items += keywords(offset=size_code(record.offset), nbytes=size_code(record.nbytes))
            if self.has_walks:
                items += keywords(
                    slot_walk=walk_code(record.slot_walk or ONE_SLOT), byte_walk=walk_code(record.byte_walk)
                )
            else:
                stride = record.slot_walk[0].stride if record.slot_walk else record.nbytes
                items += keywords(slot_stride=size_code(stride))
            if self.has_split:
                items += keywords(plane=Raw(quoted(record.plane)))
            yield call("Record", *items)

    def plane_literals(self, page: Page) -> Iterator[Code]:
        for plane in page.planes:
            name = Raw(quoted(plane.fields[0].name))
            yield call("Plane", name, size_code(in_bytes(plane.offset)), size_code(in_bytes(plane.nbits)))

    def field_literal(self, field: FieldLayout) -> Code:
        dtype = Raw(quoted(field.dtype)) if field.dtype in DTYPES else Raw(field.dtype)
        items: list[Code] = [Raw(quoted(field.name)), dtype]
        shape = [tuple_or_one([size_code(piece.extent) for piece in pieces]) for pieces in field.pieces]
        stride = [tuple_or_one([stride_code(piece.stride) for piece in pieces]) for pieces in field.pieces]
        items += keywords(offset=size_code(in_bytes(field.offset)), shape=tuple_of(shape), stride=tuple_of(stride))
        if field.quant is not None:
            items.append(Keyword("rounding", Words(rounding(field))))
        if field.init is not None:
            items.append(Keyword("init", Raw(quoted(field.init))))
        return call("Field", *items)

    def page_functions(self) -> Iterator[PageFunctionView]:
        for page in self.layout.pages:
            if page.is_constant:
                continue
            parameters = [f"{name}: {'str' if self.is_text(name) else 'int'}" for name in page_names(page)]
            arguments = tuple(Raw(item) for item in ("slots: int", *parameters))
            yield PageFunctionView(
                name=f"{page.format}_page",
                format=page.format,
                origin=page.origin,
                signature=statement("", Group(f"def {page.format}_page(", arguments, ") -> Page:"), 0),
                locals=tuple(self.locals(page)),
                checks=tuple(self.checks(page)),
                result=" " * STEP + statement("return ", self.page_literal(page, Raw("slots")), STEP),
            )

    def locals(self, page: Page) -> Iterator[str]:
        for local in page.locals:
            code = size_code(local.at_least)
            if local.align > 1:
                self.used.add("aligned")
                code = call("_aligned", code, Raw(str(local.align)))
            yield statement(f"{local.name} = ", code, STEP)

    def is_text(self, name: str) -> bool:
        return any(item.name.text == name and item.kind == "text" for item in self.layout.parameters)

    def checks(self, page: Page) -> Iterator[str]:
        ones = [condition for condition in page.conditions if condition.divisor is None]
        if ones:
            self.used.add("at_least_one")
            named = [Keyword(condition.what, Raw(condition.what)) for condition in ones]
            words = (Raw(quoted(page.format)), Words(ones[0].origin))
            yield statement("", call("_at_least_one", *words, *named), STEP)
        for condition in page.conditions:
            if condition.divisor is not None:
                self.used.add("multiple")
                what = Raw(quoted(f"{page.format}: {condition.what}"))
                numbers = (size_code(condition.number), size_code(condition.divisor))
                yield statement("", call("_multiple", what, *numbers, Words(condition.origin)), STEP)

    def place(self, path: str) -> Code:
        """Where the spec says something, as a message names it."""
        return Words(origin(path, Span.of_file(self.layout.file)))

    # -- config and choices

    def reads(self) -> Iterator[str]:
        for item in self.layout.parameters:
            bound = item.section == "choices" or item.name.text in self.layout.reached
            target = f"{item.name} = " if bound else ""
            reader = call(
                f"read.{self.reader(item)}",
                *self.sources(item),
                Keyword("kind", self.kind(item)),
                *([Keyword("default", value(item.default))] if item.has_default or item.optional else []),
            )
            yield statement(target, reader, IN_FROM_CONFIG)

    def reader(self, item: Parameter) -> str:
        """The method that reads a parameter."""
        if item.section == "choices":
            return "choice"
        if item.equals is None:
            return "config"
        self.used.add("fixed")
        return "fixed"

    def sources(self, item: Parameter) -> Iterator[Code]:
        if item.section == "choices":
            yield Raw(quoted(item.name.text))
            return
        for source in item.sources:
            if isinstance(source, Name):
                yield Raw(quoted(source.name))
                continue
            paths = sorted(names(source))
            inner = {path: path.replace(".", "_") for path in paths}
            odd = any(
                keyword.iskeyword(name) or name in ("l", "min", "max", "math", "_divide") for name in inner.values()
            )
            if odd or len(set(inner.values())) < len(inner):
                inner = {path: f"value_{position}" for position, path in enumerate(paths)}
            function = Lambda(", ".join(inner.values()), self.derived(source, inner))
            yield call("_Derived", Raw(quoted(show(source))), value(tuple(paths)), function)

    def derived(self, expr: Expr, inner: dict[str, str]) -> Code:
        """An expression over paths of a config; every path is an integer, every division exact."""
        match expr:
            case Name():
                return Raw(inner[expr.name])
            case Binary(operator="/"):
                self.used.add("divide")
                a, b = self.derived(expr.left, inner), self.derived(expr.right, inner)
                return call("_divide", a, b, Raw(quoted(show(expr))))
            case Binary():
                return chain(expr.operator, self.derived(expr.left, inner), self.derived(expr.right, inner))
            case Unary(operator="-"):
                return minus(self.derived(expr.operand, inner))
            case Call(function="min" | "max" | "lcm" | "gcd"):
                head = expr.function if expr.function in ("min", "max") else f"math.{expr.function}"
                return call(head, *(self.derived(part, inner) for part in expr.arguments))
            case Literal():
                return value(expr.value)
        raise InternalError(f"cannot print {show(expr)} over a config")

    def kind(self, item: Parameter) -> Code:
        """The reader of a parameter's values."""
        if item.besides is None:
            return self.own_kind(item)
        self.used.add("unless")
        other = {"int": "int", "text": "str", "list": "(list, tuple)"}[item.besides]
        return call("_unless", Raw(other), self.own_kind(item))

    def own_kind(self, item: Parameter) -> Code:
        if item.equals is not None:
            if item.kind == "ratio":
                self.used.add("ratio")
                return call("_ratio", value(Fraction(item.equals)), value(Fraction(item.equals)))
            if item.kind == "list" and item.values is not None:
                raw_of = {named: given for given, named in item.values}
                self.used.add("exactly")
                return call("_exactly", value(tuple(raw_of.get(word, word) for word in item.equals)))
            raw = [given for given, named in item.values or () if named == item.equals and given != named]
            if raw:
                return self.element(replace(item, values=tuple((given, item.equals) for given in raw)))
            self.used.add("exactly")
            return call("_exactly", value(item.equals))
        if item.kind == "list":
            self.used.add("list_of")
            return call("_list_of", self.element(item))
        return self.element(item)

    def element(self, item: Parameter) -> Code:
        if item.values is not None:
            pairs = item.values
            if any(raw != named for raw, named in pairs):
                self.used.add("renamed")
                rows = tuple(Raw(f"{flat(value(raw))}: {flat(value(named))}") for raw, named in pairs)
                return call("_renamed", Group("{", rows, "}"))
            return call("_one_of", *(value(named) for _, named in pairs))
        match item.kind:
            case "int" | "list":
                limits = {"minimum": item.minimum, "maximum": item.maximum}
                return call(
                    "_integer", *keywords(**{key: value(limit) for key, limit in limits.items() if limit is not None})
                )
            case "ratio":
                self.used.add("ratio")
                limits = {"minimum": item.minimum, "maximum": item.maximum}
                return call(
                    "_ratio",
                    *keywords(**{key: value(Fraction(limit)) for key, limit in limits.items() if limit is not None}),
                )
            case "bool":
                self.used.add("boolean")
                return Raw("_boolean")
            case "text" if item.letters is not None:
                self.used.add("letters")
                return call("_letters", Raw(quoted(item.letters)))
        self.used.add("text")
        return Raw("_text")

    def choices(self) -> Iterator[ChoiceView]:
        for item in self.layout.parameters:
            if item.section == "choices":
                yield ChoiceView(name=item.name.text, annotation=_annotation(item))

    def choice_docs(self) -> Iterator[str]:
        for item in self.layout.parameters:
            if item.section == "choices":
                line = f"{item.name}: {_domain(item)}; default {item.default}"
                yield from wrapped(line, IN_DOCSTRING, " " * STEP)
        yield "role: target (the body, default), draft, or both."
        yield "start_layer, end_layer: the pipeline stage in global ids, end exclusive; the default is every layer."

    def word_annotation(self) -> str:
        values = [named for item in self.layout.parameters for _, named in item.values or ()]
        return "str | int" if any(type(named) is int for named in values) else "str"

    # -- lets, requires and layers

    def lets(self) -> Iterator[str]:
        for step in self.layout.steps:
            if isinstance(step, LetLayout) and not step.varies:
                yield statement(f"{step.name} = ", self.printer.let(step), IN_FROM_CONFIG)
        if not isinstance(self.layout.body, (Name, Literal)):
            yield statement("num_body_layers = ", self.printer.code(self.layout.body), IN_FROM_CONFIG)

    def requires(self, *, early: bool) -> Iterator[str]:
        """Those that only an optional field can break, judged whatever else could not be read; or the others."""
        optional = {item.name.text for item in self.layout.parameters if item.optional}
        for item in self.layout.requires:
            own = names(item.that)
            is_early = len(own) == 1 and own <= optional and holds_where_absent(item.that)
            if not item.varies and is_early == early:
                rule = call("read.require", self.printer.code(item.that), Words(item.message))
                yield statement("", rule, IN_FROM_CONFIG)

    def layer_requires(self) -> Iterator[str]:
        for item in self.layout.requires:
            if item.varies:
                broken = Each("{", Raw("layer"), "for layer in layers", self.printer.negated(item.that), "}")
                place = (self.place(item.origin),) if item.is_told else ()
                yield statement("", call("read.refuse", broken, Words(item.message), *place), IN_FROM_CONFIG)

    def notes(self) -> Iterator[str]:
        for item in self.layout.notes:
            holds = self.printer.code(item.when)
            if item.varies:
                holds = Each("any(", holds, "for layer in held", None, ")")
            yield statement("", call("read.note", holds, Words(item.text)), IN_FROM_CONFIG)

    def layer_steps(self) -> Iterator[StepView]:
        annotations = dict(self.layout.annotations)
        for step in self.layout.steps:
            if isinstance(step, LetLayout) and step.varies:
                result = statement("return ", self.printer.let(step), IN_FROM_CONFIG + STEP)
                yield StepView(
                    is_function=True,
                    name=step.name,
                    origin=step.origin,
                    annotation=annotations[step.name],
                    result=result,
                )
            elif isinstance(step, SetLayout):
                yield self.set_step(step)

    def layer_set(self, rule: Expr, among: str = "layers") -> Code:
        code = self.printer.code(rule)
        if flat(code) == "True":
            return call("set", Raw(among))
        if flat(code) == "False":
            return call("set")
        return Each("{", Raw("layer"), f"for layer in {among}", code, "}")

    def set_step(self, step: SetLayout) -> StepView:
        if len(step.cases) == 1 and step.cases[0].when is None:
            text = statement(f"{step.name} = ", self.layer_set(step.cases[0].use), IN_FROM_CONFIG)
            return StepView(is_set=True, name=step.name, origin=step.origin, assignment=text)
        self.used.add("agreed")
        if step.cases[-1].when is not None:
            self.used.add("open rules")
        rules = []
        for case in step.cases:
            head = Raw("not rules") if case.when is None else self.printer.code(case.when)
            guarded = flat(head) != "True"
            label = "otherwise" if case.when is None else show(case.when)
            indent = IN_FROM_CONFIG + STEP * guarded
            rules.append(
                RuleView(
                    head=statement("if ", head, IN_FROM_CONFIG, ":"),
                    assignment=statement(f"rules[{quoted(label)}] = ", self.layer_set(case.use), indent),
                    is_guarded=guarded,
                )
            )
        found = call(
            "read.agreed", Raw(quoted(step.name)), Raw("rules"), num_body(self.printer), self.place(step.origin)
        )
        text = statement(f"{step.name} = ", found, IN_FROM_CONFIG)
        return StepView(is_rules=True, name=step.name, origin=step.origin, rules=tuple(rules), assignment=text)

    # -- spaces

    def space_blocks(self) -> Iterator[BlockView]:
        done: set[str] = set()

        def visit(space: SpaceLayout) -> Iterator[BlockView]:
            if space.name in done:
                return
            done.add(space.name)
            for case in space.cases:
                parent = case.use.parent
                if isinstance(case.use, DerivedSpace) and parent is not None:
                    yield from visit(self.spaces[parent])
            yield BlockView(
                origin=space.origin,
                text=self.branches(f"{space.name}_space", space.cases, self.space_code(space), space.name),
            )

        for space in self.layout.spaces:
            yield from visit(space)

    def derived_spaces(self) -> Iterator[DerivedSpace]:
        for space in self.layout.spaces:
            for case in space.cases:
                if isinstance(case.use, DerivedSpace):
                    yield case.use

    def space_code(self, space: SpaceLayout) -> Callable[[RootSpace | DerivedSpace], Code]:
        def code(form: RootSpace | DerivedSpace) -> Code:
            if isinstance(form, RootSpace):
                items = [Keyword("page_size", self.printer.code(form.page))]
                items.append(Keyword("slots_per_token", self.rate(form.slots.per_token)))
                if form.slots.per_request.known != 0:
                    items.append(Keyword("slots_per_request", self.rate(form.slots.per_request)))
                if form.slots.fixed.known != 0:
                    items.append(Keyword("fixed_slots", self.rate(form.slots.fixed)))
                if form.at_most is not None:
                    items.append(Keyword("at_most", tuple_of([self.rate(rate) for rate in form.at_most.rates])))
                reserve = self.printer.code(form.reserve)
                if flat(reserve) != "1":
                    items.append(Keyword("reserved_pages", reserve))
                return call("Space", Raw(quoted(space.name)), *items)
            parent = f"{form.parent}_space"
            name = Raw(quoted(space.name))
            if form.operator is None and form.where is None:
                root = Raw(f"{parent}.numbering")
                return call("replace", Raw(parent), Keyword("name", name), Keyword("root", root))
            return call(f"{parent}.paged", name, self.derived_page(space, form), self.row(form))

        return code

    def row(self, form: DerivedSpace) -> Code:
        """A function for the slot here of a slot of a page of the parent, -1 where it is not held."""
        row: Code = Raw("offset")
        if form.operator is not None and form.divisor is not None:
            row = chain(form.operator, row, bracketed(self.printer.code(form.divisor), UNARY))
        if form.where is not None:
            row = Ternary(row, self.printer.code(form.where), Raw("-1"))
        return Lambda("offset", row)

    def derived_page(self, space: SpaceLayout, form: DerivedSpace) -> Code:
        if form.operator is None:
            return Raw(f"{form.parent}_space.page_size")
        if space.page_size is not None and form.divisor is not None:
            return Raw(str(space.page_size))
        parent = Raw(f"{form.parent}_space.page_size")
        assert form.divisor is not None
        divisor = self.printer.code(form.divisor)
        self.used.add("divide")
        quotient = call("_divide", parent, divisor, Raw(quoted(f"slots of a page of {space.name}")))
        if form.operator == "//":
            return quotient
        return chain("//", parent, bracketed(quotient, UNARY))

    def rate(self, rate: Rate) -> Code:
        known = rate.known
        if known is not None:
            return value(int(known) if known.denominator == 1 else known)
        numerator = self.printer.code(rate.numerator)
        if isinstance(rate.denominator, Literal) and rate.denominator.value == 1:
            return numerator if self.whole_rate(rate) else call("_whole", numerator)
        return call("_whole", call("Fraction", numerator, self.printer.code(rate.denominator)))

    def is_affine(self) -> bool:
        """Whether bytes are affine in granules: no space rounds its slots down to whole pages, or limits them."""
        roots = [case.use for space in self.layout.spaces for case in space.cases if isinstance(case.use, RootSpace)]
        return not self.has_limits and all(
            self.whole_rate(root.slots.per_token) and root.slots.fixed.known == 0 for root in roots
        )

    def whole_rate(self, rate: Rate) -> bool:
        if rate.known is not None:
            return rate.known.denominator == 1
        if not (isinstance(rate.denominator, Literal) and rate.denominator.value == 1):
            return False
        ratios = {item.name.text for item in self.layout.parameters if item.kind == "ratio"}
        reached = set(names(rate.numerator))
        for step in reversed(self.layout.steps):
            if step.name in reached and isinstance(step, LetLayout):
                reached |= names(step.value)
        return not reached & ratios

    # -- buffers

    def branches(self, target: str, cases: tuple[Case[T], ...], code: Callable[[T], Code], what: str) -> str:
        """`target = …` or an if chain over the cases, at the margin of from_config."""
        margin = " " * IN_FROM_CONFIG
        cases = joined(cases, code)
        if len(cases) == 1 and cases[0].when is None:
            return margin + statement(f"{target} = ", code(cases[0].use), IN_FROM_CONFIG)
        lines = []
        for position, case in enumerate(cases):
            if case.when is None:
                lines.append(f"{margin}else:")
            else:
                word = "elif" if position else "if"
                lines.append(margin + statement(f"{word} ", self.printer.code(case.when), IN_FROM_CONFIG, ":"))
            inner = statement(f"{target} = ", code(case.use), IN_FROM_CONFIG + STEP)
            lines.append(f"{margin}{' ' * STEP}{inner}")
        if cases[-1].when is not None:
            lines.append(f"{margin}else:")
            message = quoted(f"no case of {what} holds")
            lines.append(f"{margin}{' ' * STEP}raise LayoutError({message})")
        return "\n".join(lines)

    def returns(self, cases: tuple[Case[T], ...], code: Callable[[T], Code], indent: int, what: str) -> str:
        """The same as a body of `return`s."""
        margin = " " * indent
        lines = []
        for case in cases:
            if case.when is None:
                lines.append(margin + statement("return ", code(case.use), indent))
                break
            lines.append(margin + statement("if ", self.printer.code(case.when), indent, ":"))
            lines.append(f"{margin}{' ' * STEP}{statement('return ', code(case.use), indent + STEP)}")
        else:
            lines.append(f"{margin}raise LayoutError({quoted(f'no case of {what} holds')})")
        return "\n".join(lines)

    def alias_blocks(self) -> Iterator[BlockView]:
        """Functions for the formats with cases that `sizeof` asks for. They stand before the lets that use them."""
        for name, cases in self.layout.aliases:

            def code(format: str) -> Code:
                page = next(
                    page for page in self.layout.pages if page.format == format and page.slots == Size.of("slots")
                )
                return self.printer.page_call(page, Raw("slots"))

            body = self.returns(cases, code, IN_FROM_CONFIG + STEP, name)
            text = f"{' ' * IN_FROM_CONFIG}def {name}_page_of(slots: int) -> Page:\n{body}"
            yield BlockView(origin=f"formats.{name}", text=text)

    def page_slots(self, buffer: BufferLayout) -> Code:
        if buffer.slots is not None:
            return Raw(str(buffer.slots))
        if buffer.block is not None:
            return self.printer.code(buffer.block)
        return Raw(f"{buffer.space}_space.page_size")

    def page_choices(self) -> Iterator[BlockView]:
        """A local for every page that buffers share, chosen by the cases of its format."""
        taken: set[str] = set()
        for buffer in self.layout.buffers:
            slots = self.page_slots(buffer)
            key = (buffer.choice, flat(slots))
            if key in self.page_locals or (len(buffer.pages) == 1 and buffer.pages[0].use.is_constant):
                continue
            counts = self.slots_of_alike(buffer)
            if len(buffer.pages) > 1:
                local = f"{buffer.choice}_page"
            else:
                local = f"{buffer.choice}_page_of" if len(counts) > 1 else f"page_of_{buffer.name}"
            if local in taken:
                local = f"page_of_{buffer.name}"
            taken.add(local)
            if buffer.varies:
                text = self.page_function(buffer, local, counts)
            else:
                self.page_locals[key] = local
                code = partial(self.printer.page_call, slots=slots)
                text = self.branches(local, buffer.pages, code, buffer.choice)
            yield BlockView(origin=f"formats.{buffer.choice}", text=text, is_function=buffer.varies)

    def slots_of_alike(self, buffer: BufferLayout) -> list[str]:
        """Slots per page of a buffer; where its layers differ, also of those that one function of pages serves."""
        found = [buffer]
        if buffer.varies:
            found += [own for own in self.layout.buffers if (own.choice, own.pages) == (buffer.choice, buffer.pages)]
        return list(dict.fromkeys(flat(self.page_slots(own)) for own in found))

    def page_function(self, buffer: BufferLayout, local: str, counts: list[str]) -> str:
        """A function for the page of each layer, and of each number of slots where there are several."""
        is_one = len(counts) == 1
        for count in counts:
            self.page_locals[buffer.choice, count] = f"{local}(layer)" if is_one else f"{local}(layer, {count})"
        code = partial(self.printer.page_call, slots=self.page_slots(buffer) if is_one else Raw("slots"))
        body = self.returns(buffer.pages, code, IN_FROM_CONFIG + STEP, buffer.choice)
        parameters = "layer: int" if is_one else "layer: int, slots: int"
        return f"{' ' * IN_FROM_CONFIG}def {local}({parameters}) -> Page:\n{body}\n"

    def buffer_checks(self) -> Iterator[str]:
        for buffer in self.layout.buffers:
            if buffer.block is not None:
                self.used.add("multiple")
                what = Raw(quoted(f"page of {buffer.space}"))
                slots = Raw(f"{buffer.space}_space.page_size")
                numbers = (slots, self.page_slots(buffer))
                yield statement("", call("_multiple", what, *numbers, self.place(buffer.origin)), IN_FROM_CONFIG)

    def buffer(self, buffer: BufferLayout) -> Code:
        items: list[Code] = [Raw(quoted(buffer.name)), Raw(f"{buffer.space}_space"), self.owners(buffer)]
        key = (buffer.choice, flat(self.page_slots(buffer)))
        own = self.page_code(buffer, self.page_locals.get(key))
        if self.varying:
            condition = self.layer_condition(buffer)
            items.append(Each("tuple(", self.adjusted(buffer, own), "for layer in held", condition, ")"))
        else:
            items.append(self.adjusted(buffer, own))
        if self.has_block:
            items.append(Keyword("page_slots", self.page_slots(buffer)))
        if buffer.memory == "host":
            items.append(Keyword("memory", Raw('"host"')))
        if buffer.readers is not None:
            items.append(Keyword("readers", Raw(f"{buffer.name}_readers")))
        return call("Buffer", *items)

    def reader_blocks(self) -> Iterator[BlockView]:
        """A local for the readers of each buffer that has some."""
        for buffer in self.layout.buffers:
            if buffer.readers is not None:
                owners, readers = self.layer_set(buffer.layers), self.layer_set(buffer.readers, "held")
                place = self.place(buffer.origin)
                found = call("read.readers", Raw(quoted(buffer.name)), Raw("held"), owners, readers, place)
                text = statement(f"{buffer.name}_readers = ", found, IN_FROM_CONFIG)
                yield BlockView(origin=f"{buffer.origin}.readers", text=text)

    def page_code(self, buffer: BufferLayout, local: str | None) -> Code:
        return Raw(local) if local is not None else Raw(page_constant(self.layout, buffer.pages[0].use))

    def adjusted(self, buffer: BufferLayout, page: Code) -> Code:
        """The page in tensors of its planes, or moved to a wider stride."""
        if buffer.split is not None:
            page = Group(f"{flat(page)}.divided(", (self.printer.code(buffer.split),))
        if buffer.align is not None:
            multiple = self.printer.code(buffer.align)
            page = Group(f"{flat(page)}.aligned(", (multiple, self.place(buffer.origin)))
        return page

    def layer_condition(self, buffer: BufferLayout) -> Code | None:
        code = self.printer.code(buffer.layers)
        return None if flat(code) == "True" else code

    def owners(self, buffer: BufferLayout) -> Code:
        condition = self.layer_condition(buffer)
        if condition is None:
            return call("tuple", Raw("held"))
        if flat(condition) == "False":
            return Raw("()")
        return Each("tuple(", Raw("layer"), "for layer in held", condition, ")")

    def aux_note(self) -> str:
        """What `aux_bytes` counts, for its docstring."""
        parts = ["the pointer table"]
        if self.has_translation:
            parts.append("the rows of slots")
        if self.has_init:
            parts.append("blank pages")
        if takes_scales(self.layout):
            parts.append("a scale of 1")
        *most, last = parts
        return f": {', '.join(most)} and {last}" if most else f": {last}"

    def aux_bytes(self) -> str:
        text = "self._table.nbytes"
        if self.has_init:
            text += " + self._blank.nbytes"
        if self.has_translation:
            text += " + sum(rows.nbytes for rows in self._rows.values())"
        if takes_scales(self.layout):
            text += " + self._one.nbytes"
        return text

    def blank(self) -> str:
        """What `clear_pages` writes."""
        return "self._blank[span.blank : span.blank + span.nbytes]" if self.has_init else "0"

    def device_buffers(self) -> str:
        if not self.has_host:
            return "layout.buffers"
        return "layout.device_buffers"

    def host_bytes(self) -> str:
        if not self.has_host:
            return "0"
        argument = ", requests" if self.has_requests else ""
        return f'sum(buffer.num_bytes(tokens{argument}) for buffer in layout.buffers if buffer.memory == "host")'


def joined(cases: tuple[Case[T], ...], code: Callable[[T], Code]) -> tuple[Case[T], ...]:
    """The cases, neighbours that say the same made one."""
    found: list[Case] = []
    for case in cases:
        if found and flat(code(found[-1].use)) == flat(code(case.use)):
            before = found.pop().when
            assert before is not None
            either = None if case.when is None else Binary(operator="or", left=before, right=case.when, span=case.span)
            case = replace(case, when=either)
        found.append(case)
    return tuple(found)


def holds_where_absent(rule: Expr) -> bool:
    """Whether a condition on one optional parameter says `not has(...) or ...`."""
    match rule:
        case Binary(operator="or"):
            return holds_where_absent(rule.left) or holds_where_absent(rule.right)
        case Unary(operator="not", operand=Call(function="has")):
            return True
    return False


def held_layers(body: Code) -> str:
    """The layers of the stage that the role selects."""
    is_body = Group("(", (chain("<", Raw("layer"), body),))
    is_target = chain("==", is_body, Group("(", (Raw('role == "target"'),)))
    selected = chain("or", Raw('role == "both"'), is_target)
    layers = Each("[", Raw("layer"), "for layer in layers[start_layer:end_layer]", selected, "]")
    return statement("held = ", layers, IN_FROM_CONFIG)


def item_bytes(dtypes: set[str]) -> str:
    """Bytes of an element of these dtypes, of every one where load time decides; for e2m1 what two values share."""
    names = dtypes if dtypes <= DTYPES.keys() else DTYPES
    items = tuple(Raw(f"{quoted(name)}: {max(1, DTYPES[name] // BYTE)}") for name in sorted(names))
    return statement("ITEM_BYTES = ", Group("{", items, "}"), 0)


def header(layout: Layout, command: str) -> str:
    """The comment at the head of a module: its spec, the command that makes it again, and its license."""
    name = file_name(layout.file)
    said, again = f"# @generated by kvgen from {name}. Edit the spec, then:", f"{command} {name}"
    line = f"{said} {again}"
    lines = [line] if len(line) <= WIDTH else [said, f"# {again}"]
    if layout.license:
        lines.append(f"# SPDX-License-Identifier: {layout.license}")
    return "\n".join(lines)


def wrapped(text: str, before: int = 0, later: str = "") -> list[str]:
    """Text that is safe inside a docstring, with a full stop, in lines with `before` columns in front of them."""
    safe = text.replace("\\", "\\\\").replace('"', '\\"')
    safe = safe if safe.endswith((".", "!", "?")) else f"{safe}."
    columns = WIDTH - before if safe.isascii() else (WIDTH - before) // 2  # letters may be two columns wide
    return wrap(safe, later=later, width=columns)


def in_bytes(bits: Size) -> Size:
    return bits.divided_by(BYTE)


def size_code(size: Size) -> Code:
    products = tuple(Raw(product) for product in size.products)
    if len(products) > 1:
        return Chain(("+",) * (len(products) - 1), products)
    return products[0] if products else Raw("0")


def walk_code(walk: Walk) -> Code:
    return tuple_of([call("", *(size_code(size) for size in (step.low, step.extent, step.stride))) for step in walk])


def stride_code(bits: Size) -> Code:
    """Bytes from one element to the next; half a byte for e2m1."""
    if bits.divisible_by(BYTE):
        return size_code(in_bytes(bits))
    return value(Fraction(bits.known or 0, BYTE))


def tuple_or_one(items: list[Code]) -> Code:
    return items[0] if len(items) == 1 else Group("(", tuple(items))


def exploded(items: tuple[Code, ...], head: str = "(") -> Code:
    """A bracket with one item on each line; a tuple of one item only where it has to be."""
    return Group(head, items, lone_comma=head == "(", broken=len(items) > 1 or head != "(")


def rounding(field: FieldLayout) -> str:
    quant = field.quant
    assert quant is not None
    if quant.scale == "none":
        return "saturating cast"
    blocks = f" for blocks of {' x '.join(quant.blocks)}" if quant.blocks else ""
    parts = [f"scale {quant.scale}{blocks}", quant.rounding, quant.code]
    if quant.outer:
        parts.append("outer given")
    if quant.floor != "0":
        parts.append(f"floor {quant.floor}")
    return ", ".join(parts)


def _annotation(item: Parameter) -> str:
    if item.kind == "text":
        return "str"
    return {"int": "int", "ratio": "Fraction", "bool": "bool"}.get(item.kind, "tuple")


def _domain(item: Parameter) -> str:
    if item.values is not None:
        return ", ".join(str(raw) for raw, _ in item.values)
    match item.kind:
        case "int" if item.maximum is None:
            return f"an integer of at least {item.minimum or 0}"
        case "int":
            return f"an integer from {item.minimum or 0} to {item.maximum}"
        case "ratio":
            return "an exact number such as 1/2"
        case "bool":
            return "True or False"
    return "a text"
