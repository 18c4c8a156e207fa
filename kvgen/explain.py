"""Explanations: the byte map of every page, and with a config who owns what."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from kvgen.budget import buffer_as_json, inputs_as_json, plain, readers_text, shown
from kvgen.bytemap import page_lines
from kvgen.emit import rounding
from kvgen.evaluate import is_split, limit_of, memory_of, notes_of, pages_of
from kvgen.expr import show
from kvgen.layout import BufferLayout, DerivedSpace, Layout, LetLayout, RootSpace, Slots, SpaceLayout
from kvgen.page import BYTE, FieldLayout, Page
from kvgen.size import Size
from kvgen.space import Rate
from kvgen.spec import Case, Parameter
from kvgen.text import ending, runs, wrap


def explain(layout: Layout, module: ModuleType | None = None, resolved: Any = None) -> str:
    """The layout as text in at most 100 columns; for one model and deployment where `resolved` is given."""
    fingerprint = resolved.fingerprint if resolved is not None else layout.fingerprint
    lines = [f"{layout.name}, fingerprint {fingerprint}", *_wrap(layout.doc, ""), ""]
    if resolved is None:
        lines += _rules(layout)
        for page in layout.pages:
            lines += ["", *page_lines(page)]
    else:
        lines += _resolved(module, resolved)
        constant = {(page.format, page.slots.known): page for page in layout.pages if page.is_constant}
        for used in dict.fromkeys(page for buffer in resolved.buffers for page in pages_of(buffer)):
            page = constant.get((used.format, used.slots))
            lines += ["", *(page_lines(page) if page is not None else _resolved_page(used))]
    return "\n".join(lines) + "\n"


def _resolved_page(page: Any) -> Iterator[str]:
    """A page whose numbers load time decided: each field with its shape and strides in bytes, slot axis first."""
    split = ", a tensor for each plane" if is_split(page) else ""
    slots = f"{page.slots} slot{ending(page.slots)}"
    yield f"{page.format}: a page of {slots} is {shown(page.page_bytes)} bytes{split}"
    width = max(len(field.name) for field in page.fields)
    for field in page.fields:
        yield from _wrap(f"{field.name:<{width}}  {_place(field)}", "  ")


def field_text(field: Any) -> str:
    """A field of a resolved page: its dtype, place and strides in bytes, and how a store makes its codes."""
    return f"{_place(field)}, {field.rounding}" if field.rounding else _place(field)


def _place(field: Any) -> str:
    return f"{field.dtype} at {field.offset}, {_tuple(field.shape)}:{_tuple(field.stride)}"


def _tuple(items: Any) -> str:
    if isinstance(items, tuple):
        return f"({', '.join(map(_tuple, items))})"
    return str(items)


def statements(layout: Layout) -> dict[str, str]:
    """All that decides a byte, in words, each statement under its place in a spec."""
    found = {"layout": layout.name}
    found |= {item.path: parameter_text(item) for item in layout.parameters}
    found |= {"layers.body": show(layout.body), "layers.draft": show(layout.draft)}
    for step in layout.steps:
        found[step.origin] = show(step.value) if isinstance(step, LetLayout) else _cases(step.cases, show)
    found |= {f"require {show(item.that)}": "required" for item in layout.requires}
    found |= {space.origin: _cases(space.cases, _space_text) for space in layout.spaces}
    for page in layout.pages:
        found |= _page_statements(page)
    found |= {f"formats.{name}": _cases(cases, str) for name, cases in layout.aliases}
    for buffer in layout.buffers:
        pages = _cases(buffer.pages, lambda page: f"{page.format}{_slots(page)}")
        where = f"in {buffer.space}{', in host memory' if buffer.memory == 'host' else ''}"
        limits = (("block", buffer.block), ("align", buffer.align), ("split", buffer.split))
        extra = "".join(f", {name} {show(value)}" for name, value in limits if value is not None)
        readers = "" if buffer.readers is None else f", readers {show(buffer.readers)}"
        found[buffer.origin] = f"{pages}, {where}, layers {show(buffer.layers)}{readers}{extra}"
    return found


def _cases(cases: tuple[Case, ...], text: Callable[[Any], str]) -> str:
    return "; ".join(f"{text(case.use)}{_when(case, cases)}" for case in cases)


def _slots(page: Page) -> str:
    """The slots of a page, where they are not just those of its space."""
    return "" if str(page.slots) == "slots" else f" of {page.slots} slots"


def _page_statements(page: Page) -> Iterator[tuple[str, str]]:
    """A page and each of its fields."""
    place = f"{page.origin}{_slots(page)}"
    locals = [f"{local.name} = {local.at_least} up to a multiple of {local.align}" for local in page.locals]
    conditions = [f"{item.number} a multiple of {item.divisor}" for item in page.conditions]
    yield place, ", ".join([f"{page.page_bytes} bytes", *locals, *conditions])
    for field in page.fields:
        shape, stride = (
            ", ".join(
                f"({', '.join(str(size(piece)) for piece in pieces)})" if len(pieces) > 1 else str(size(pieces[0]))
                for pieces in field.pieces
            )
            for size in (lambda piece: _size(piece.extent), lambda piece: _bytes(piece.stride))
        )
        codes = "" if field.quant is None else f", {rounding(field)}"
        init = "" if field.init is None else f", initially {field.init}"
        yield f"{place}: {field.name}", f"{field.dtype} at {_bytes(field.offset)}, ({shape}):({stride}){codes}{init}"


def _rules(layout: Layout) -> Iterator[str]:
    for section, title in (("config", "read from a config"), ("choices", "choices")):
        rows = [item for item in layout.parameters if item.section == section]
        if rows:
            yield title
        for item in rows:
            yield from _wrap(f"{item.name}: {parameter_text(item)}{_for_requests(item)}", "  ")
    if layout.notes:
        yield "notes"
    for item in layout.notes:
        yield from _wrap(f"{item.text}, when {show(item.when)}", "  ")
    yield "rules"
    for name, when, text in _rule_rows(layout):
        yield from _wrap(f"{name}{when}: {text}", "  ")
    yield "spaces"
    for space in layout.spaces:
        for when, text in _space_rows(space):
            yield from _wrap(f"{space.name}{when}: {text}", "  ")
    yield "buffers"
    for buffer in layout.buffers:
        host = ", in host memory" if buffer.memory == "host" else ""
        layers = f"layers {show(buffer.layers)}"
        if buffer.readers is not None:
            layers += f", readers {show(buffer.readers)}"
        yield from _wrap(f"{buffer.name}: {buffer.choice} in {buffer.space}{host}, {layers}", "  ")
        for case in buffer.pages:
            if len(buffer.pages) > 1:
                yield from _wrap(f"{case.use.format}{_when(case, buffer.pages)}", "    ")


def parameter_text(item: Parameter) -> str:
    """What a parameter may be, and what it is where nothing is said."""
    if item.equals is not None:
        text = f"must be {shown(item.equals)}"
    elif item.values is not None:
        values = (str(named) if given == named else f"{given} as {named}" for given, named in item.values)
        text = f"{'a list of ' if item.kind == 'list' else ''}{' | '.join(values)}"
    else:
        text = {"list": "a list of ints", "text": "a text"}.get(item.kind, f"{item.kind}")
    if item.letters is not None:
        text = f"a text of the letters {item.letters}"
    if item.minimum is not None:
        text += f", at least {item.minimum}"
    if item.maximum is not None:
        text += f", at most {item.maximum}"
    sources = [show(source) for source in item.sources]
    if sources and sources != [item.name.text]:
        text += f", from {' or '.join(sources)}"
    if item.besides is not None:
        text += f", and no {item.besides}"
    if item.has_default:
        text += f", default {shown(item.default)}"
    return f"{text}, or absent" if item.optional else text


def _for_requests(item: Parameter) -> str:
    """What a budget takes for a choice where requests are counted, unless that is the default. It decides no byte."""
    return "" if item.for_requests is None else f", {shown(item.for_requests)} where a budget counts requests"


def _rule_rows(layout: Layout) -> Iterator[tuple[str, str, str]]:
    """(name, when, expression) of the layer counts, lets and sets."""
    yield "body", "", show(layout.body)
    if show(layout.draft) != "0":
        yield "draft", "", show(layout.draft)
    for step in layout.steps:
        if isinstance(step, LetLayout):
            yield step.name, "", show(step.value)
            continue
        for case in step.cases:
            yield step.name, _when(case, step.cases), show(case.use)


def _space_rows(space: SpaceLayout) -> Iterator[tuple[str, str]]:
    for case in space.cases:
        yield _when(case, space.cases), _space_text(case.use)


def _when(case: Case, cases: tuple[Case, ...]) -> str:
    """` when …` or ` otherwise`; nothing where there is no alternative."""
    if case.when is None:
        return " otherwise" if len(cases) > 1 else ""
    return f" when {show(case.when)}"


def _space_text(form: RootSpace | DerivedSpace) -> str:
    if isinstance(form, DerivedSpace):
        divisor = "" if form.divisor is None else f" {form.operator} {show(form.divisor)}"
        where = "" if form.where is None else f", where {show(form.where)}"
        return f"the pages of {form.parent}, slot offset{divisor}{where}"
    limit = "" if form.at_most is None else f", at most {_slot_count(form.at_most)}"
    mapped = "" if form.parent is None else f", mapped from {form.parent}"
    return f"{_slot_count(form.slots)}{limit}, pages of {show(form.page)} slots, {show(form.reserve)} reserved{mapped}"


def _slot_count(slots: Slots) -> str:
    rates = zip(slots.rates, (" per token", " per request", ""), strict=True)
    return " + ".join(f"{_rate(rate)}{what}" for rate, what in rates if rate.known != 0) or "none"


def _rate(rate: Rate) -> str:
    if rate.known is not None:
        return str(rate.known)
    denominator = show(rate.denominator)
    return show(rate.numerator) if denominator == "1" else f"{show(rate.numerator)} / ({denominator})"


def _resolved(module: ModuleType | None, resolved: Any) -> Iterator[str]:
    choices = ", ".join(f"{name} {shown(value)}" for name, value in resolved.choices.items())
    yield from _wrap(f"choices: {choices}", "")
    for title, items in (("config", resolved.config_used), ("defaults", resolved.defaults_used)):
        text = ", ".join(f"{name} {_short(value)}" for name, value in items.items())
        if text:
            yield from _wrap(f"{title}: {text}", "")
    yield "spaces"
    for space in resolved.spaces:
        yield f"  {space.name}: {space_text(space)}"
    yield "buffers"
    for buffer in resolved.buffers:
        memory = ", in host memory" if memory_of(buffer) == "host" else ""
        pages = {(page.format, page.slots, page.page_bytes, page.slot_bytes) for page in pages_of(buffer)}
        forms = "; ".join(
            f"{form}, {shown(slot)} bytes a slot, {shown(size)} a page of {slots}"
            for form, slots, size, slot in sorted(pages, key=str)
        )
        yield from _wrap(f"{buffer.name}: {forms}, in {buffer.space.name}{memory}", "  ")
        count = f"{len(buffer.layers)} layer{ending(len(buffer.layers))}"
        yield from _wrap(f"{count}: {runs(buffer.layers)}", "    ")
        if text := readers_text(buffer):
            yield from _wrap(f"readers: {text}", "    ")
        yield f"    {shown(buffer.bytes_per_token)} bytes per token"
    if module is not None:
        yield f"bytes per token {shown(module.cell_size(resolved))}, fixed {shown(module.bytes_for(resolved, 0))}"


def space_text(space: Any) -> str:
    """A resolved space: its slots and its pages."""
    per_request = getattr(space, "slots_per_request", 0)
    request = f" and {shown(per_request)} per request" if per_request else ""
    if limit := limit_of(space):
        rates = zip(limit, (" per token", " per request", ""), strict=True)
        request += f", at most {' and '.join(f'{shown(rate)}{what}' for rate, what in rates if rate)}"
    numbered = f", numbered as {space.numbering}" if space.numbering != space.name else ""
    return (
        f"{shown(space.slots_per_token)} slot{ending(space.slots_per_token)} per token{request}, "
        f"pages of {space.page_size} slot{ending(space.page_size)}, {space.reserved_pages} reserved{numbered}"
    )


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"[{len(value)} values]"
    return value if isinstance(value, str) else json.dumps(plain(value))


def _wrap(text: str, margin: str) -> list[str]:
    return wrap(text, margin, f"{margin}    ")


def explain_json(layout: Layout, module: ModuleType | None = None, resolved: Any = None) -> dict[str, Any]:
    """The same as plain data; what load time decides is a formula in text, or a number where a config is given."""
    found: dict[str, Any] = {
        "layout": layout.name,
        "doc": layout.doc,
        "fingerprint": resolved.fingerprint if resolved is not None else layout.fingerprint,
        "parameters": [
            {"name": item.name.text, "section": item.section, "is": parameter_text(item) + _for_requests(item)}
            for item in layout.parameters
        ],
        "rules": [{"name": name, "when": when.strip(), "is": text} for name, when, text in _rule_rows(layout)],
        "notes": [{"when": show(item.when), "says": item.text} for item in layout.notes],
        "spaces": [
            {"name": space.name, "cases": [{"when": when.strip(), "is": text} for when, text in _space_rows(space)]}
            for space in layout.spaces
        ],
        "pages": [_page_json(page) for page in layout.pages],
        "buffers": [_buffer_json(buffer) for buffer in layout.buffers],
    }
    if resolved is not None and module is not None:
        found |= {
            **inputs_as_json(resolved),
            "notes": list(notes_of(resolved)),
            "bytes_per_token": plain(module.cell_size(resolved)),
            "fixed_bytes": module.bytes_for(resolved, 0),
            "pages": [
                _resolved_page_json(page)
                for page in dict.fromkeys(page for buffer in resolved.buffers for page in pages_of(buffer))
            ],
            "buffers": [buffer_as_json(resolved, buffer) for buffer in resolved.buffers],
        }
    return found


def _resolved_page_json(page: Any) -> dict[str, Any]:
    """A page in numbers; the pieces of each axis are innermost first, the slot axis comes first."""
    return {
        "format": page.format,
        "slots": page.slots,
        "page_bytes": page.page_bytes,
        "split": is_split(page),
        "fields": [
            {
                "name": field.name,
                "dtype": field.dtype,
                "offset": field.offset,
                "shape": [plain(axis) if isinstance(axis, tuple) else [axis] for axis in field.shape],
                "stride": [plain(axis) if isinstance(axis, tuple) else [plain(axis)] for axis in field.stride],
                "rounding": field.rounding,
            }
            for field in page.fields
        ],
    }


def _buffer_json(buffer: BufferLayout) -> dict[str, Any]:
    return {
        "name": buffer.name,
        "space": buffer.space,
        "memory": buffer.memory,
        "layers": show(buffer.layers),
        "readers": None if buffer.readers is None else show(buffer.readers),
        "formats": [
            {"when": None if case.when is None else show(case.when), "use": case.use.format} for case in buffer.pages
        ],
    }


def _page_json(page: Page) -> dict[str, Any]:
    return {
        "format": page.format,
        "slots": _size(page.slots),
        "page_bytes": _size(page.page_bytes),
        "planes": [
            {
                "offset": _bytes(plane.offset),
                "record_bytes": _bytes(plane.record_bits),
                "each": list(plane.each_names),
                "fields": [_field_json(field) for field in plane.fields],
            }
            for plane in page.planes
        ],
    }


def _field_json(field: FieldLayout) -> dict[str, Any]:
    return {
        "name": field.name,
        "dtype": field.dtype,
        "offset": _bytes(field.offset),
        "shape": [[_size(piece.extent) for piece in pieces] for pieces in field.pieces],
        "stride": [[_bytes(piece.stride) for piece in pieces] for pieces in field.pieces],
    }


def _size(size: Size) -> int | str:
    known = size.known
    return str(size) if known is None else known


def _bytes(bits: Size) -> int | str:
    return _size(bits.divided_by(BYTE)) if bits.divisible_by(BYTE) else f"{bits}/8"
