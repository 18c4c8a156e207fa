"""Adapters: a resolved layout to an engine's own pool class on top of the generated one.

An engine makes a pool by a constructor of its own, calls methods by names of its own, and reads bytes where its kernels
expect them. A layout can be that pool where it says the same of all three; `why_not` says what it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvgen.emit import class_name, header_file, template
from kvgen.expr import Name
from kvgen.layout import Layout, OperationLayout
from kvgen.operations import pages_of
from kvgen.page import BYTE, FieldLayout, Page
from kvgen.pysource import Raw, flat, quoted, tuple_of
from kvgen.views import AdapterView
from kvgen.walk import count, element_walk, is_dense, slot_walk


@dataclass(frozen=True, kw_only=True)
class Call:
    """An operation that the engine calls: its verb, what it calls the values it gives, and how a view shows them."""

    verb: str
    arguments: tuple[str, ...] = ()
    view: str | None = None
    returns: tuple[str, ...] = ()  # arguments of another call, whose fields come back in this order


@dataclass(frozen=True)
class Place:
    """Where an engine's kernels find the values of a field, in bytes of a page."""

    dtype: str
    offset: int
    slot_stride: int
    count: int

    def __str__(self) -> str:
        return f"{self.dtype}[{self.count}] at {self.offset}, {self.slot_stride} bytes a slot"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A pool that an engine knows."""

    name: str  # as the engine calls it
    title: str
    base: str  # the engine's own class
    template: str
    calls: Mapping[str, Call]
    config: tuple[str, ...]  # fields that arguments of the constructor stand for
    choice: str  # what decides the bytes of a row
    # What kernels read of the pages that an operation writes: the places of all fields, one way or another, and the
    # slots of a page; None where rows follow each other through all pages, whatever their size.
    reads: Mapping[str, tuple[tuple[tuple[Place, ...], ...], int | None]]


# SGLang 0.5.23, as its own pools have them (srt/mem_cache/memory_pool.py, index_key_cache.py): rows of nope and rope in
# bf16; of e4m3 with a scale for each 128 values, and rope in bf16; of e4m3 for both; pages of keys before their scales.
_BF16 = (Place("bf16", 0, 1152, 512), Place("bf16", 1024, 1152, 64))
_PACKED = (Place("e4m3", 0, 656, 512), Place("f32", 512, 656, 4), Place("bf16", 528, 656, 64))
_RAW = (Place("e4m3", 0, 576, 512), Place("e4m3", 512, 576, 64))
_KEYS = (Place("e4m3", 0, 128, 128), Place("f32", 8192, 4, 1))
_LATENT = {
    "set_mla_kv_buffer": Call(verb="store", arguments=("cache_k_nope", "cache_k_rope")),
    "get_mla_kv_buffer": Call(verb="load", returns=("cache_k_nope", "cache_k_rope")),
    "get_key_buffer": Call(verb="view", view="rows"),
    "get_contiguous_buf_infos": Call(verb="describe"),
}
_ROWS = ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")

ENGINES = {
    "sglang": (
        Kind(
            name="dsa",
            title="the DSA pool of SGLang",
            base="DSATokenToKVPool",
            template="sglang.py.jinja",
            calls={
                **_LATENT,
                "set_index_k_scale_buffer": Call(verb="put", arguments=("index_k", "index_k_scale")),
                "get_index_k_scale_buffer": Call(verb="gather", returns=("index_k", "index_k_scale")),
                "get_index_k_with_scale_buffer": Call(verb="view", view="pages"),
                "get_state_buf_infos": Call(verb="describe"),
            },
            config=(*_ROWS, "index_head_dim", "index_kpool", "indexer_types"),
            choice="kv_format",
            reads={
                "set_mla_kv_buffer": ((_BF16, _PACKED, _RAW), None),
                "set_index_k_scale_buffer": ((_KEYS,), 64),
            },
        ),
        Kind(
            name="mla",
            title="the MLA pool of SGLang",
            base="MLATokenToKVPool",
            template="sglang.py.jinja",
            calls=_LATENT,
            config=_ROWS,
            choice="kv_format",
            reads={"set_mla_kv_buffer": ((_BF16, _PACKED, _RAW), None)},
        ),
    ),
}


def adapt(layout: Layout, engine: str) -> str:
    """The text of the adapter of a layout that `why_not` finds nothing wrong with."""
    kind = next(kind for kind in ENGINES[engine] if not _wrong(layout, kind, engine))
    operations = {item.name: item for item in layout.operations}
    by_verb = {item.verb: item.name for item in layout.operations}
    choices = {item.name.text: item for item in layout.parameters if item.section == "choices"}
    formats = tuple_of([Raw(quoted(str(named))) for _, named in choices[kind.choice].values or ()])
    file = header_file(layout.file)
    pages = "get_index_k_with_scale_buffer"
    view = AdapterView(
        kind=kind.name,
        base=kind.base,
        name=layout.name,
        class_name=class_name(layout.name),
        file=file,
        header_gap=" " if len(file) < 20 else "\n# ",
        formats=flat(formats),
        latent_buffer=operations["set_mla_kv_buffer"].buffers[0],
        latent_field=_given(operations["set_mla_kv_buffer"])["cache_k_nope"],
        index_buffer=operations[pages].buffers[0] if pages in kind.calls else "",
        has_index=pages in kind.calls,
        has_page_size="page_size" in choices,
        move=by_verb["move"],
        save=by_verb["save"],
        restore=by_verb["restore"],
    )
    return template(kind.template).render(a=view)


def why_not(layout: Layout, engine: str) -> tuple[str, tuple[str, ...]]:
    """The engine's pool that a layout is, or is nearest to, and what keeps it from being that, a line for each."""
    judged = [(kind.title, _wrong(layout, kind, engine)) for kind in ENGINES[engine]]
    return min(judged, key=lambda own: len(own[1]))


def _wrong(layout: Layout, kind: Kind, engine: str) -> tuple[str, ...]:
    found = [*_operations(layout, kind), *_parameters(layout, kind), *_buffers(layout, kind)]
    if layout.name == engine:
        found.append(f"its name is that of the folder of adapters, `{engine}`")
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
        yield f"it has no choice `{kind.choice}` of several formats"


def _bytes(layout: Layout, kind: Kind) -> Iterator[str]:
    """Pages that none of the engine's kernels can read."""
    for item in layout.operations:
        alternatives, page_slots = kind.reads.get(item.name, ((), None))
        for page in pages_of(layout, item) if alternatives else ():
            places = tuple(_place(field) for field in page.fields)
            if places not in alternatives or not _is_filled(page, page_slots):
                listed = zip(page.fields, places, strict=True)
                shown = "; ".join(f"{field.name} {place or 'where load time decides'}" for field, place in listed)
                yield f"no kernel reads the bytes of `{page.format}`: {shown}"


def _is_filled(page: Page, page_slots: int | None) -> bool:
    """Whether rows follow each other without a gap, or else whether the page has so many slots and nothing more."""
    strides = [field.pieces[0][-1].stride for field in page.fields]
    if page_slots is None:
        return page.page_bytes * BYTE == strides[0] * page.slots
    total = sum(stride.known or 0 for stride in strides) * page_slots
    return page.slots.known == page_slots and (page.page_bytes * BYTE).known == total


def _place(field: FieldLayout) -> Place | None:
    """Where a field lies; None where that is not one stride from slot to slot, known at build."""
    walk, number, offset = slot_walk(field), count(field).known, field.offset.known
    if len(walk) != 1 or number is None or offset is None or not is_dense(element_walk(field)):
        return None
    stride = walk[0].stride.known
    return None if stride is None else Place(field.dtype, offset // BYTE, stride, number)
