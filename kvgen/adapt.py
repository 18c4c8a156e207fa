"""Adapters: a resolved layout to an engine's own pool class on top of the generated one.

An engine makes a pool by a constructor of its own, calls methods by names of its own, and reads bytes where its kernels
expect them. A layout can be that pool where it says the same of all three; `kind_of` says what it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvgen.cases import reached_cases
from kvgen.emit import class_name, header, template
from kvgen.expr import Literal, Name
from kvgen.layout import DerivedSpace, Layout, OperationLayout, RootSpace
from kvgen.operations import pages_of, scale_argument
from kvgen.page import BYTE, FieldLayout, Page
from kvgen.pysource import Code, Raw, flat, quoted, statement, tuple_of
from kvgen.scope import Scope
from kvgen.size import Size
from kvgen.views import AdapterView
from kvgen.walk import count, element_walk, is_dense, slot_walk


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operation that the engine calls: its verb, what it calls the values it gives, and how a view shows them."""

    verb: str
    arguments: tuple[str, ...] = ()
    view: str | None = None
    returns: tuple[str, ...] = ()  # arguments of another call, whose fields come back in this order
    is_scaled: bool = False  # whether the engine gives the scales of codes


@dataclass(frozen=True)
class Place:
    """Where an engine's kernels find the values of a field, in bytes of a page."""

    dtype: str
    offset: Size
    slot_stride: Size
    count: Size

    def __str__(self) -> str:
        return f"{self.dtype}[{self.count}] at {self.offset}, {self.slot_stride} bytes a slot"


@dataclass(frozen=True)
class Rows:
    """Rows that follow each other through all pages, whatever their size, with fields in one of several places."""

    ways: tuple[tuple[Place, ...], ...]

    def are(self, page: Page) -> bool:
        row = page.fields[0].pieces[0][-1].stride
        return _places(page) in self.ways and page.page_bytes * BYTE == row * page.slots

    def may_be(self, page: Page) -> bool:
        return _has_known_codes(page)


@dataclass(frozen=True)
class Pages:
    """Pages of so many slots with these fields and nothing more."""

    fields: tuple[Place, ...]
    slots: int

    def are(self, page: Page) -> bool:
        size = sum((place.slot_stride for place in self.fields), Size()) * self.slots
        return _places(page) == self.fields and (page.slots, page.page_bytes) == (Size.of(self.slots), size)

    def may_be(self, page: Page) -> bool:
        return _has_known_codes(page)


@dataclass(frozen=True)
class Planes:
    """Two fields of one dtype, and nothing more: the rows of one of all slots, then those of the other."""

    dtypes: tuple[str, ...]

    def are(self, page: Page) -> bool:
        rows = [_row(field) for field in page.fields]
        strides = [place and place.slot_stride for place in _places(page)]
        return len(rows) == 2 and strides == rows and page.page_bytes == sum(rows, Size()) * page.slots

    def may_be(self, page: Page) -> bool:
        """Whether there are no scales, and whole slots follow each other: not a page of heads, which hold slots."""
        is_of_slots = all(place and place.slot_stride.at_least(_row(own)) for own, place in _fields(page))
        return {field.dtype for field in page.fields} in [{dtype} for dtype in self.dtypes] and is_of_slots


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A pool that an engine knows, printed by the template `<engine>_<name>.py.jinja`."""

    engine: str
    name: str  # as the engine calls it
    title: str
    base: str  # the engine's own class
    calls: Mapping[str, Call]
    config: tuple[str, ...]  # fields that arguments of the constructor stand for
    choice: str  # what decides the bytes of a row
    reads: Mapping[str, Rows | Pages | Planes]  # what kernels read of the pages that an operation writes


def _place_at(dtype: str, offset: int, slot_stride: int, count: int) -> Place:
    return Place(dtype, Size.of(offset), Size.of(slot_stride), Size.of(count))


# SGLang 0.5.23, as its own pools have them (srt/mem_cache/memory_pool.py, index_key_cache.py): rows of nope and rope in
# bf16; of e4m3 with a scale for each 128 values, and rope in bf16; of e4m3 for both; pages of keys before their scales;
# keys and values per head, apart.
_NEVER = "e2m1"  # codes for which SGLang has pools of other kinds, and asks these for none
_LATENT_ROWS = Rows(
    (
        (_place_at("bf16", 0, 1152, 512), _place_at("bf16", 1024, 1152, 64)),
        (_place_at("e4m3", 0, 656, 512), _place_at("f32", 512, 656, 4), _place_at("bf16", 528, 656, 64)),
        (_place_at("e4m3", 0, 576, 512), _place_at("e4m3", 512, 576, 64)),
    )
)
_INDEX_PAGES = Pages((_place_at("e4m3", 0, 128, 128), _place_at("f32", 8192, 4, 1)), slots=64)
_LATENT = {
    "set_mla_kv_buffer": Call(verb="store", arguments=("cache_k_nope", "cache_k_rope")),
    "get_mla_kv_buffer": Call(verb="load", returns=("cache_k_nope", "cache_k_rope")),
    "get_key_buffer": Call(verb="view", view="rows"),
    "get_contiguous_buf_infos": Call(verb="describe"),
}
_LATENT_CONFIG = ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")

ENGINES = {
    "sglang": (
        Kind(
            engine="sglang",
            name="dsa",
            title="the DSA pool of SGLang",
            base="DSATokenToKVPool",
            calls={
                **_LATENT,
                "set_index_k_scale_buffer": Call(verb="put", arguments=("index_k", "index_k_scale")),
                "get_index_k_scale_buffer": Call(verb="gather", returns=("index_k", "index_k_scale")),
                "get_index_k_with_scale_buffer": Call(verb="view", view="pages"),
                "get_state_buf_infos": Call(verb="describe"),
            },
            config=(*_LATENT_CONFIG, "index_head_dim", "index_kpool", "indexer_types"),
            choice="kv_format",
            reads={"set_mla_kv_buffer": _LATENT_ROWS, "set_index_k_scale_buffer": _INDEX_PAGES},
        ),
        Kind(
            engine="sglang",
            name="mla",
            title="the MLA pool of SGLang",
            base="MLATokenToKVPool",
            calls=_LATENT,
            config=_LATENT_CONFIG,
            choice="kv_format",
            reads={"set_mla_kv_buffer": _LATENT_ROWS},
        ),
        Kind(
            engine="sglang",
            name="mha",
            title="the MHA pool of SGLang",
            base="MHATokenToKVPool",
            calls={
                "set_kv_buffer": Call(verb="store", arguments=("cache_k", "cache_v"), is_scaled=True),
                "get_kv_fields": Call(verb="view", view="fields"),
                "get_contiguous_buf_infos": Call(verb="describe"),
            },
            config=("num_hidden_layers", "num_key_value_heads", "head_dim", "v_head_dim"),
            choice="kv_format",
            reads={"set_kv_buffer": Planes(("bf16", "e4m3"))},
        ),
    ),
}


def kind_of(layout: Layout, engine: str) -> tuple[Kind, tuple[str, ...]]:
    """The engine's pool that a layout is meant for, and what keeps it from being that, a line for each.

    That is the pool which calls most of the layout's operations; of several, the one that calls the fewest others.
    """
    names = {item.name for item in layout.operations}
    kind = max(ENGINES[engine], key=lambda own: (len(names & own.calls.keys()), -len(own.calls)))
    return kind, _wrong(layout, kind)


def adapt(layout: Layout, scope: Scope, kind: Kind) -> str:
    """The text of the adapter of a layout that nothing keeps from being a pool of this kind."""
    called = [item for item in layout.operations if item.name in kind.calls]
    choices = {item.name.text: item for item in layout.parameters if item.section == "choices"}
    fields = {argument: field for item in called for argument, field in _given(item).items()}
    view = AdapterView(
        kind=kind.name,
        base=kind.base,
        name=layout.name,
        class_name=class_name(layout.name),
        header=header(layout, f"kvgen build --engine {kind.engine}"),
        formats=flat(_listed(_formats(layout, scope, kind))),
        pages=statement("PAGES = ", _listed([page.format for page in _read(layout, kind)]), 0),
        buffer=next(item.buffers[0] for item in called if item.name in kind.reads),
        buffers={item.name: item.buffers[0] for item in called},
        fields=fields,
        scales={argument: scale_argument(field) for argument, field in fields.items()},
        names={item.verb: item.name for item in layout.operations},
        has_page_size="page_size" in choices,
        has_rate=any(
            root.slots.per_token.known is None for name in _spaces(layout, kind) for root in _roots(layout, name)
        ),
    )
    return template(f"{kind.engine}_{kind.name}.py.jinja").render(a=view)


def _listed(texts: Iterable[str]) -> Code:
    return tuple_of([Raw(quoted(text)) for text in texts])


def _formats(layout: Layout, scope: Scope, kind: Kind) -> list[str]:
    """The values of the choice between formats for which there may be a page that the engine's kernels read."""
    (choice,) = (item for item in layout.parameters if item.name.text == kind.choice)
    read = _read(layout, kind)
    buffers = [buffer for buffer in layout.buffers if any(case.use in read for case in buffer.pages)]
    found = []
    for _, value in choice.values or ():
        known = {kind.choice: Literal(value=value, span=choice.name.span)}
        for buffer in buffers:
            reached = reached_cases(scope, buffer.pages, known, all_apply=False)
            if value not in found and any(buffer.pages[position].use in read for position in reached):
                found.append(value)
    return [str(value) for value in found]


def _read(layout: Layout, kind: Kind) -> list[Page]:
    """The pages of rows that the engine's kernels read: those that its first operation writes."""
    name, wanted = next(iter(kind.reads.items()))
    (item,) = (own for own in layout.operations if own.name == name)
    return [page for page in pages_of(layout, item) if wanted.may_be(page) and wanted.are(page)]


def _wrong(layout: Layout, kind: Kind) -> tuple[str, ...]:
    found = [*_operations(layout, kind), *_parameters(layout, kind), *_buffers(layout, kind), *_slots(layout, kind)]
    return tuple(found or _bytes(layout, kind))


def _given(operation: OperationLayout) -> dict[str, str]:
    """The field that each argument of a store or put is for."""
    return dict(zip(operation.arguments, operation.fields, strict=True))


def _operations(layout: Layout, kind: Kind) -> Iterator[str]:
    operations = {item.name: item for item in layout.operations}
    given: dict[str, str] = {}
    for name, call in kind.calls.items():
        item = operations.get(name)
        if item is None or item.verb != call.verb:
            yield f"it has no operation `{name}` that is a {call.verb}"
        elif call.arguments and sorted(item.arguments) != sorted(call.arguments):
            yield f"the arguments of `{name}` are not {' and '.join(call.arguments)}"
        elif call.view is not None and (item.view or "pages") != call.view:
            yield f"`{name}` is not a view as {call.view}"
        else:
            given |= _given(item) if call.arguments else {}
            wanted = tuple(given[argument] for argument in call.returns if argument in given)
            if wanted and item.fields != wanted:
                yield f"`{name}` does not return {' and '.join(wanted)}"


def _buffers(layout: Layout, kind: Kind) -> Iterator[str]:
    """Buffers of the device that no call of the engine fills."""
    used = {name for item in layout.operations if item.name in kind.reads for name in item.buffers}
    for buffer in layout.buffers:
        if used and buffer.memory == "device" and buffer.name not in used:
            yield f"it has a buffer more, `{buffer.name}`"


def _parameters(layout: Layout, kind: Kind) -> Iterator[str]:
    fields = {source.name for item in layout.parameters for source in item.sources if isinstance(source, Name)}
    for name in kind.config:
        if name not in fields:
            yield f"it has no field of the config from `{name}`"
    if not any(item.name.text == kind.choice and item.values for item in layout.parameters):
        yield f"it has no choice `{kind.choice}` between formats by name (`of: [...]`)"


def _slots(layout: Layout, kind: Kind) -> Iterator[str]:
    """Spaces whose slots are not those that the engine's allocator hands out."""
    for name in _spaces(layout, kind):
        for root in _roots(layout, name):
            spare = isinstance(root.reserve, Literal) and root.reserve.value == 1
            others = root.slots.per_request.known, root.slots.fixed.known
            if root.slots.per_token.known not in (1, None) or others != (0, 0) or not spare:
                yield f"the slots of `{name}` are not one a token and a page in reserve"
                break


def _spaces(layout: Layout, kind: Kind) -> list[str]:
    """The spaces of the buffers that the engine's kernels read."""
    read = {name for item in layout.operations if item.name in kind.reads for name in item.buffers}
    return list(dict.fromkeys(buffer.space for buffer in layout.buffers if buffer.name in read))


def _roots(layout: Layout, name: str) -> Iterator[RootSpace]:
    """What the slots of a space are counted by, in each of its cases."""
    for case in next(space for space in layout.spaces if space.name == name).cases:
        if isinstance(case.use, DerivedSpace):
            yield from _roots(layout, case.use.parent)
        else:
            yield case.use


def _bytes(layout: Layout, kind: Kind) -> Iterator[str]:
    """Pages that none of the engine's kernels can read, those left out that the engine never asks for."""
    for item in layout.operations:
        if item.name not in kind.reads:
            continue
        wanted, call = kind.reads[item.name], kind.calls[item.name]
        given = [_given(item)[argument] for argument in call.arguments]
        pages = [page for page in pages_of(layout, item) if wanted.may_be(page)]
        if not pages:
            yield f"no kernel reads the bytes of any format that `{item.name}` writes"
        for page in pages:
            if [field.name for field in page.fields if field.name in given] != given or not wanted.are(page):
                shown = "; ".join(f"{field.name} {place or 'in pieces'}" for field, place in _fields(page))
                yield f"no kernel reads the bytes of `{page.format}`: {shown}"
            elif call.is_scaled and any(field.dtype == "e4m3" and not _is_scaled(field) for field in page.fields):
                yield f"`{item.name}` is given scales, which the codes of `{page.format}` do not take"


def _has_known_codes(page: Page) -> bool:
    return all(field.dtype != _NEVER for field in page.fields)


def _is_scaled(field: FieldLayout) -> bool:
    return field.quant is not None and field.quant.scale == "given"


def _fields(page: Page) -> Iterator[tuple[FieldLayout, Place | None]]:
    return zip(page.fields, _places(page), strict=True)


def _places(page: Page) -> tuple[Place | None, ...]:
    return tuple(_place(field) for field in page.fields)


def _place(field: FieldLayout) -> Place | None:
    """Where a field lies; None where that is not one stride from slot to slot, and elements side by side."""
    walk = slot_walk(field)
    if len(walk) != 1 or not field.offset.divisible_by(BYTE) or not is_dense(element_walk(field)):
        return None
    return Place(field.dtype, field.offset.divided_by(BYTE), walk[0].stride, count(field))


def _row(field: FieldLayout) -> Size:
    """Bytes of the values of a slot."""
    return (count(field) * field.bits).floored(BYTE)
