"""Differences: what sets two layouts apart, and why.

Their specs are compared statement by statement, under the places that a spec has for them. With a config on both
sides so are the objects that their modules make of it: choices, fields, spaces, and who owns which bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType
from typing import Any

from kvgen.budget import buffer_as_json, plain, readers_text, shown
from kvgen.budget_text import in_units
from kvgen.evaluate import is_split, memory_of, pages_of
from kvgen.explain import field_text, space_text, statements
from kvgen.layout import Layout
from kvgen.ranks import Divided, Parts, Ranks, same_heads
from kvgen.text import WIDTH, ending, runs, wrap

FACTS = ("readers", "space", "memory", "format", "slot_bytes", "page_bytes", "bytes_per_token")  # of a buffer


@dataclass(frozen=True)
class Priced:
    """A layout for one model and one deployment, the module that made it, and what its spec says."""

    module: ModuleType
    spec: Layout
    layout: Any


@dataclass(frozen=True)
class Change:
    """A fact on both sides; None on a side that has no such fact."""

    name: str
    a: object
    b: object

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "a": plain(self.a), "b": plain(self.b)}


@dataclass(frozen=True)
class PageDifference:
    """Two pages that cannot be exchanged, and what of them differs."""

    layers: tuple[int, ...]  # owned on both sides, whose pages these are
    same_bytes: bool  # which are then those of other heads
    fields: tuple[Change, ...]


@dataclass(frozen=True)
class SamePages:
    """Layers owned on both sides whose pages mean the same, and the ranks between which they can be exchanged."""

    layers: tuple[int, ...]
    ranks: Ranks


@dataclass(frozen=True)
class BufferDifference:
    """A buffer that a layer owns on one side at least."""

    name: str
    only_a: tuple[int, ...]  # layers
    only_b: tuple[int, ...]
    both: tuple[int, ...]
    facts: tuple[Change, ...]
    pages: tuple[PageDifference, ...]
    same_pages: tuple[SamePages, ...]

    @property
    def same(self) -> bool:
        return not (self.only_a or self.only_b or self.facts or self.pages)

    @property
    def interchangeable(self) -> bool | None:
        """Whether the pages of every layer owned on both sides can be exchanged; None where there is no such layer."""
        return not self.pages if self.both else None


@dataclass(frozen=True)
class ModelDifference:
    """Two layouts of configs and choices, compared."""

    choices: tuple[Change, ...]
    config: tuple[Change, ...]  # fields, with their defaults where they are absent
    numbers: tuple[Change, ...]  # bytes and tokens, those that are equal too
    spaces: tuple[Change, ...]
    buffers: tuple[BufferDifference, ...]  # those that are equal too

    @property
    def ratio(self) -> Fraction | None:
        """The bytes per token of B over those of A; None where a token costs nothing on either side."""
        per_token = self.numbers[0]
        return Fraction(per_token.b) / Fraction(per_token.a) if per_token.a and per_token.b else None


@dataclass(frozen=True)
class Difference:
    """Two layouts compared. They are the same where their fingerprints are."""

    names: tuple[str, str]
    fingerprints: tuple[str, str]  # of the layouts of a model where there is one, else of the specs
    statements: tuple[Change, ...]  # what their specs say, each under its place in a spec
    model: ModelDifference | None

    @property
    def same(self) -> bool:
        return self.fingerprints[0] == self.fingerprints[1]

    def as_json(self) -> dict[str, Any]:
        """The document of `kvgen diff --format json`."""
        names, fingerprints = self.names, self.fingerprints
        document: dict[str, Any] = {
            "same": self.same,
            "a": {"layout": names[0], "fingerprint": fingerprints[0]},
            "b": {"layout": names[1], "fingerprint": fingerprints[1]},
            "spec": [item.as_json() for item in self.statements],
        }
        if self.model is None:
            return document
        model = self.model
        for title, items in (("choices", model.choices), ("config", model.config), ("spaces", model.spaces)):
            document[title] = [item.as_json() for item in items]
        document["numbers"] = [item.as_json() for item in model.numbers]
        document["bytes_per_token_ratio"] = plain(model.ratio)
        document["buffers"] = [_buffer_json(buffer) for buffer in model.buffers]
        return document


def compare(
    layouts: tuple[Layout, Layout], priced: tuple[Priced, Priced] | None = None, memory: int | None = None
) -> Difference:
    """Compare two layouts: their specs, and for a model of either what their modules made of it.

    Args:
        memory: bytes that tokens are counted for.
    """
    a, b = layouts
    model = None if priced is None else _compare_models(*priced, memory)
    fingerprints = (a.fingerprint, b.fingerprint)
    if priced is not None:
        fingerprints = (priced[0].layout.fingerprint, priced[1].layout.fingerprint)
    return Difference((a.name, b.name), fingerprints, _changes(statements(a), statements(b)), model)


def _changes(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[Change, ...]:
    """The facts that differ, in the order of A, then of B."""
    both = ((name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b]))
    return tuple(Change(name, left, right) for name, left, right in both if left != right)


def _compare_models(a: Priced, b: Priced, memory: int | None) -> ModelDifference:
    left, right = a.layout, b.layout
    ours, theirs = _numbers(a, memory), _numbers(b, memory)
    names = dict.fromkeys(buffer.name for buffer in (*left.buffers, *right.buffers))
    buffers = [_compare_buffers(name, a, b) for name in names]
    return ModelDifference(
        choices=_changes(left.choices, right.choices),
        config=_changes(left.config_used | left.defaults_used, right.config_used | right.defaults_used),
        numbers=tuple(Change(name, ours[name], theirs[name]) for name in ours),
        spaces=_changes(*({space.name: space_text(space) for space in side.spaces} for side in (left, right))),
        buffers=tuple(item for item in buffers if item.only_a or item.only_b or item.both),
    )


def _numbers(side: Priced, memory: int | None) -> dict[str, object]:
    """Bytes and tokens, bytes per token first."""
    module, layout = side.module, side.layout
    on_host = (Fraction(buffer.bytes_per_token) for buffer in layout.buffers if memory_of(buffer) == "host")
    found: dict[str, object] = {
        "bytes_per_token": module.cell_size(layout),
        "host_bytes_per_token": plain(sum(on_host, Fraction())),
        "fixed_bytes": module.bytes_for(layout, 0),
        "granule": layout.granule,
    }
    if memory is not None:
        tokens = module.max_tokens(layout, memory)
        found["tokens"] = None if tokens == module.UNBOUNDED else tokens
    return found


def _compare_buffers(name: str, left: Priced, right: Priced) -> BufferDifference:
    a, b = (next((buffer for buffer in side.layout.buffers if buffer.name == name), None) for side in (left, right))
    ours, theirs = (frozenset(buffer.layers) if buffer is not None else frozenset() for buffer in (a, b))
    facts = FACTS if ours and theirs else ("bytes_per_token",)
    same, apart = _compare_pages(_pages_held(left, a), _pages_held(right, b)) if ours and theirs else ((), ())
    return BufferDifference(
        name,
        only_a=tuple(sorted(ours - theirs)),
        only_b=tuple(sorted(theirs - ours)),
        both=tuple(sorted(ours & theirs)),
        facts=_changes(_buffer_facts(left.layout, a, facts), _buffer_facts(right.layout, b, facts)),
        pages=apart,
        same_pages=same,
    )


def _buffer_facts(layout: Any, buffer: Any, facts: tuple[str, ...]) -> dict[str, object]:
    if buffer is None or not buffer.layers:
        return {}
    owned = {**buffer_as_json(layout, buffer), "readers": readers_text(buffer) or None}
    return {name: owned[name] for name in facts}


@dataclass(frozen=True)
class _Held:
    """The page of a layer, and what of it ranks divide."""

    page: Any
    parts: Parts

    @property
    def key(self) -> tuple[object, ...]:
        return self.page.fingerprint, *self.parts.items()

    @property
    def facts(self) -> dict[str, object]:
        """Its slots, its bytes, each field with its place, and the axes that are parts of something."""
        divided = {f"axis {axis} of {field}": ", ".join(map(str, own)) for (field, axis), own in self.parts.items()}
        return _page_facts(self.page) | divided


def _pages_held(side: Priced, buffer: Any) -> dict[int, _Held]:
    """The page of each layer of a buffer."""
    pages = pages_of(buffer)
    pages = pages if len(pages) > 1 else pages * len(buffer.layers)
    divided = Divided(side.spec, side.layout)
    return {
        layer: _Held(page, divided.of_page(page.format, layer))
        for layer, page in zip(buffer.layers, pages, strict=True)
    }


def _compare_pages(
    a: dict[int, _Held], b: dict[int, _Held]
) -> tuple[tuple[SamePages, ...], tuple[PageDifference, ...]]:
    """The layers whose pages are the same bytes of the same heads, and each two pages that part, with the layers.

    Where no layer is owned on both sides, the pages of the first ones are compared, without layers.
    """
    both = [layer for layer in a if layer in b]
    found = [(a[layer], b[layer], [layer]) for layer in both] or [(next(iter(a.values())), next(iter(b.values())), [])]
    same: dict[Ranks, list[int]] = {}
    apart: dict[tuple[object, ...], tuple[_Held, _Held, list[int]]] = {}
    for left, right, layers in found:
        alike = left.page.fingerprint == right.page.fingerprint
        ranks = same_heads(left.parts, right.parts) if alike else None
        if ranks is None:
            apart.setdefault((left.key, right.key), (left, right, []))[2].extend(layers)
        else:
            same.setdefault(ranks, []).extend(layers)
    return (
        tuple(SamePages(tuple(layers), ranks) for ranks, layers in same.items()),
        tuple(
            PageDifference(
                tuple(layers),
                left.page.fingerprint == right.page.fingerprint,
                _changes(left.facts, right.facts),
            )
            for left, right, layers in apart.values()
        ),
    )


def _page_facts(page: Any) -> dict[str, object]:
    """Slots, bytes, and each field with its place."""
    return {
        "slots": page.slots,
        "page_bytes": page.page_bytes,
        "split": is_split(page),
        **{field.name: field_text(field) for field in page.fields},
    }


def _buffer_json(buffer: BufferDifference) -> dict[str, Any]:
    return {
        "name": buffer.name,
        "same": buffer.same,
        "layers": {"only_a": list(buffer.only_a), "only_b": list(buffer.only_b), "both": list(buffer.both)},
        "facts": [item.as_json() for item in buffer.facts],
        "pages_interchangeable": buffer.interchangeable,
        "interchangeable": [
            {"layers": list(item.layers), "ranks": item.ranks.as_json()} for item in buffer.same_pages if item.layers
        ],
        "pages": [
            {"layers": list(page.layers), "fields": [item.as_json() for item in page.fields]} for page in buffer.pages
        ],
    }


# Text


def render(difference: Difference, memory: int | None = None) -> str:
    """The difference as text in at most 100 columns, A to the left of each arrow."""
    lines = []
    for side, name, fingerprint in zip("AB", difference.names, difference.fingerprints, strict=True):
        lines.append(f"{side}: {name}, fingerprint {fingerprint}")
    if difference.same:
        lines.append("the same layout")
    if difference.model is not None:
        lines += _model_lines(difference.model, memory)
    lines += _section("spec", difference.statements)
    return "\n".join(lines) + "\n"


def _model_lines(model: ModelDifference, memory: int | None) -> Iterator[str]:
    yield ""
    rows = [
        (_number_name(item.name, memory), _number(item.a), _number(item.b))
        for item in model.numbers
        if item.name != "host_bytes_per_token" or item.a or item.b
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, left, right in rows:
        arrow = "  " if left == right else "->"
        yield f"  {name:<{widths[0]}}  {left:>{widths[1]}} {arrow} {right:>{widths[2]}}"
    yield from _ratio_lines(model.ratio)
    yield from _section("choices", model.choices)
    yield from _section("config", model.config)
    if model.config:
        yield "  pages are compared as those of one model: whether both configs are of one is not known"
    yield from _section("spaces", model.spaces)
    for buffer in model.buffers:
        yield ""
        yield from _buffer_lines(buffer)


def _number_name(name: str, memory: int | None) -> str:
    return f"tokens in {in_units(memory)}" if name == "tokens" and memory is not None else name.replace("_", " ")


def _number(value: object) -> str:
    return "unbounded" if value is None else shown(value)


def _ratio_lines(ratio: Fraction | None) -> Iterator[str]:
    """What B costs of what A costs, and what that makes of the tokens in the same memory, reserved pages aside."""
    if ratio is not None and ratio != 1:
        less, fewer = ("less", "more") if ratio < 1 else ("more", "fewer")
        text = f"a token of B costs {ratio} of one of A: {_percent(abs(ratio - 1))} {less}, "
        yield from wrap(f"{text}for {_percent(abs(1 / ratio - 1))} {fewer} tokens in the same memory", "  ", "  ")


def _percent(part: Fraction) -> str:
    """In hundredths of a percent, to nearest."""
    hundredths = (part.numerator * 20000 + part.denominator) // (2 * part.denominator)
    return f"{hundredths // 100:,}.{hundredths % 100:02} %" if hundredths else "under 0.01 %"


def _section(title: str, items: tuple[Change, ...]) -> Iterator[str]:
    if items:
        yield ""
        yield title
        for item in items:
            yield from _change_lines(item, "  ")


def _change_lines(item: Change, margin: str) -> Iterator[str]:
    """`name: a -> b`, or what does not fit in one line below the name."""
    a, b = plain(item.a), plain(item.b)
    line = f"{margin}{item.name}: {_pair(a, b)}"
    if len(line) <= WIDTH:
        yield line
        return
    yield from wrap(f"{item.name}:", margin, margin)
    for side, value in (("A", a), ("B", b)):
        yield from wrap(f"{side}: {_value(value)}", f"{margin}  ", f"{margin}     ")


def _pair(a: object, b: object) -> str:
    """`bf16 -> fp8`; of two lists, where they part first."""
    if not (isinstance(a, list) and isinstance(b, list)):
        return f"{_value(a)} -> {_value(b)}"
    counts = f"{len(a)} -> {len(b)} values"
    apart = next((place for place, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), None)
    return counts if apart is None else f"{counts}, element {apart}: {_value(a[apart])} -> {_value(b[apart])}"


def _value(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} values"
    return "nothing" if value is None else shown(value)


def _buffer_lines(buffer: BufferDifference) -> Iterator[str]:
    if buffer.same:
        between = [f"interchangeable{_between(item.ranks)}" for item in buffer.same_pages]
        exchanged = f"; its pages are {between[0]}" if len(between) == 1 else ""
        yield from wrap(f"{buffer.name}: the same in {_layers(buffer.both)}{exchanged}", "", "    ")
        if len(between) > 1:
            yield from _same_page_lines(buffer)
        return
    yield buffer.name
    for side, layers in (("A", buffer.only_a), ("B", buffer.only_b)):
        if layers:
            yield from wrap(f"only {side} has it in {_layers(layers)}", "  ", "      ")
    if buffer.both:
        yield from wrap(f"both have it in {_layers(buffer.both)}", "  ", "      ")
    for item in buffer.facts:
        yield from _change_lines(item, "  ")
    yield from _same_page_lines(buffer)
    for page in buffer.pages:
        where = f" of {_layers(page.layers)}" if page.layers else ""
        why = "their heads are others" if page.same_bytes else "their bytes mean something else"
        yield from wrap(f"pages{where} are not interchangeable: {why}", "  ", "      ")
        for item in page.fields:
            yield from _change_lines(item, "    ")


def _same_page_lines(buffer: BufferDifference) -> Iterator[str]:
    """Which pages can be exchanged; of which layers, where not those of all that both sides own."""
    for item in buffer.same_pages:
        if not item.layers:
            yield "  no page can be exchanged, since no layer has it on both sides; their bytes mean the same"
            continue
        where = "" if item.layers == buffer.both else f" of {_layers(item.layers)}"
        heads = "their bytes mean the same" if item.ranks.groups == 1 else "the same bytes of the same heads"
        yield from wrap(f"pages{where} are interchangeable{_between(item.ranks)}: {heads}", "  ", "      ")


def _between(ranks: Ranks) -> str:
    return "" if ranks.groups == 1 else f" between {ranks}"


def _layers(layers: tuple[int, ...]) -> str:
    return f"{len(layers)} layer{ending(len(layers))}: {runs(layers)}"
