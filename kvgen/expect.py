"""Expectations: the numbers an author worked out, proved against the very text that servers run.

A layout's expectations call `from_config` of the emitted module; a fragment's ask for the pages of its formats.
"""

from __future__ import annotations

import json
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Mapping as MappingType
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from itertools import combinations
from math import prod
from types import ModuleType
from typing import Any

from kvgen.cases import reached_cases, truth
from kvgen.check import why_outside
from kvgen.evaluate import is_split, memory_of, notes_of, pages_of, readers_of, request_bytes
from kvgen.expr import Literal, Name, names
from kvgen.nodes import Entry, Mapping, Node, Sequence, plain
from kvgen.origins import labels_of
from kvgen.page import BYTE, FieldLayout
from kvgen.placing import resolve_page
from kvgen.problems import Label, Problem, Severity, Span, reason
from kvgen.scope import Scope, scope_of
from kvgen.size import Size
from kvgen.spec import Expectation, Format, Parameter, Spec, exact_ratio, is_plain_path
from kvgen.text import ending
from kvgen.types import DTYPES, suggest

CODES = {
    "KV301": "an expectation that does not hold",
    "KV302": "an expectation that cannot be read",
    "KV303": "an expectation of an error that does not come",
    "KV304": "a config or choice of an expectation that is refused",
    "KV305": "a case that no expectation reaches (a warning)",
}

BUILT_IN = ("role", "start_layer", "end_layer")
EVIDENCE_MAX = 2**22  # parts of the layouts of all expectations
SHARES_MAX = 128  # that three are looked for among


Known = MappingType[str, Literal | None]


class _Unreadable(Exception):
    """An expectation that cannot be judged; the problem is in the list already."""


def prove(scope: Scope, module: ModuleType | None, read: Callable[[str], bytes]) -> list[Problem]:
    """Every expectation of the spec that does not hold, and the cases that none reaches.

    Args:
        scope: of a spec without problems.
        module: the emitted one; None for a fragment.
        read: gives the bytes of a config an expectation names.
    """
    spec = scope.spec
    problems: list[Problem] = []
    if module is None:
        for expectation in spec.expectations:
            with suppress(_Unreadable):
                _FragmentProof(spec, expectation, problems).prove()
        return problems
    evidence = _Evidence(module, read)
    resolved: dict[_Measured, Known] = {}
    for expectation in spec.expectations:
        with suppress(_Unreadable):
            proof = _LayoutProof(spec, expectation, problems, evidence)
            measured = proof.prove()
            if measured is not None and measured not in resolved:
                resolved[measured] = proof.known()
        if evidence.parts > EVIDENCE_MAX and len(evidence.layouts) > 1:
            problems.append(_too_much(expectation, evidence.parts))
            break
    return problems if problems else list(_unreached(scope, list(resolved.values())))


def examples(
    spec: Spec, module: ModuleType, read: Callable[[str], bytes]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Configs and choices that the layout of a spec takes: those of the expectations that are about no error.

    Between them they reach every format, which `prove` sees to. The spec's expectations hold.
    """
    evidence = _Evidence(module, read)
    proofs = (_LayoutProof(spec, expectation, [], evidence) for expectation in spec.expectations)
    return [proof.inputs() for proof in proofs if "error" not in proof.claims]


def _too_much(expectation: Expectation, parts: int) -> Problem:
    """KV206: layouts that together take longer than anybody waits for."""
    message = f"the layouts of the expectations up to here have {parts:,} parts, more than {EVIDENCE_MAX:,}"
    note = "a part is a layer of a buffer or a row of a derived space; a page that layers do not share counts for 16"
    help = "expect the numbers of large models in fewer entries, each with several of them"
    return Problem("KV206", message, Label(expectation.span), notes=(note,), help=help, path=expectation.path)


class _Evidence:
    """What expectations share: configs that are read once, and layouts that are resolved once."""

    def __init__(self, module: ModuleType, read: Callable[[str], bytes]) -> None:
        self.module, self.read = module, read
        self.configs: dict[str, Any] = {}
        self.layouts: dict[str, Any] = {}  # a _Measured, or the LayoutError instead
        self.parts = 0  # of the layouts so far, by which their time and memory go

    def config(self, file: str) -> Any:
        """What a JSON file holds, not to be changed. OSError, ValueError or RecursionError where it cannot be read."""
        if file not in self.configs:
            self.configs[file] = json.loads(self.read(file))
        return self.configs[file]

    def layout(self, config: dict[str, Any], choices: dict[str, Any]) -> _Measured:
        """The layout of a config and choices. LayoutError where there is none."""
        key = repr((config, choices))
        if key not in self.layouts:
            try:
                self.layouts[key] = _Measured(self.module.Layout.from_config(config, **choices))
                self.parts += self.layouts[key].parts
            except self.module.LayoutError as error:
                self.layouts[key] = error
        found = self.layouts[key]
        if isinstance(found, Exception):
            raise found.with_traceback(None)
        return found


class _Measured:
    """A layout, and what claims ask of its buffers, which may have thousands of layers: worked out once."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        alike: dict[tuple[object, ...], _MeasuredBuffer] = {}
        self.buffers: dict[str, _MeasuredBuffer] = {}
        for buffer in layout.buffers:
            key = (tuple(map(id, pages_of(buffer))), buffer.layers, *readers_of(buffer).items())
            self.buffers[buffer.name] = alike.setdefault(key, _MeasuredBuffer(buffer))
        pages = {id(page) for buffer in layout.buffers if len(pages_of(buffer)) > 1 for page in buffer.pages}
        rows = sum(len(getattr(space, "rows", ())) for space in layout.spaces)
        self.parts = len(layout.held) * len(layout.buffers) + rows + 16 * len(pages)


class _MeasuredBuffer:
    """What is asked of all layers of a buffer, and of others with the same pages in the same layers."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    @cached_property
    def pages(self) -> dict[int, tuple[Any, int, int]]:
        """Each different page by its `id`, with the first layer that has it, and how many layers have it."""
        pages, layers = pages_of(self.buffer), self.buffer.layers
        if len(pages) == 1:
            return {id(pages[0]): (pages[0], layers[0] if layers else 0, len(layers))}
        first = {id(page): (page, layer) for page, layer in zip(reversed(pages), reversed(layers), strict=True)}
        counts = Counter(map(id, pages))
        return {key: (*first[key], count) for key, count in counts.items()}

    @cached_property
    def sizes(self) -> dict[str, dict[Fraction | int, tuple[Any, int]]]:
        """Of `page_bytes` and of `slot_bytes`, each different one with the first page that has it, and its layer."""
        found: dict[str, dict[Fraction | int, tuple[Any, int]]] = {"page_bytes": {}, "slot_bytes": {}}
        for page, layer, _ in self.pages.values():
            for name, sizes in found.items():
                sizes.setdefault(getattr(page, name), (page, layer))
        return found

    @cached_property
    def parts(self) -> dict[str, Fraction]:
        """Bytes of a slot in all layers together, by field, and of the padding."""
        found: dict[str, Fraction] = {}
        for page, _, count in self.pages.values():
            for name, nbytes in _parts(page).items():
                found[name] = found.get(name, Fraction(0)) + nbytes * count
        return found

    @cached_property
    def owners(self) -> dict[int, int]:
        """The layers that own the buffer or read it, each with the layer whose bytes it reads."""
        return {**readers_of(self.buffer), **{layer: layer for layer in self.buffer.layers}}


def _unreached(scope: Scope, resolved: list[Known]) -> Iterator[Problem]:
    """KV305: a case of this file that no expectation reaches has numbers nobody worked out."""
    spec = scope.spec
    sets = spec.layers.sets if spec.layers is not None else ()
    for item in (*sets, *spec.spaces, *spec.formats):
        if len(item.cases) < 2 or item.name.span.file != spec.file:
            continue
        reached: set[int] = set()
        for known in resolved:
            reached |= reached_cases(scope, item.cases, known, all_apply=item in sets)
        for position, case in enumerate(item.cases):
            if position not in reached:
                yield Problem(
                    "KV305",
                    f"no expectation reaches this case of `{item.name}`",
                    Label(case.span),
                    severity=Severity.WARNING,
                    help="add an entry under `expect` with a number worked out for it",
                    path=f"{item.path}[{position}]",
                )


class _Proof:
    """One expectation."""

    def __init__(self, spec: Spec, expectation: Expectation, problems: list[Problem]) -> None:
        self.spec, self.expectation, self.problems = spec, expectation, problems
        self.parameters = {item.name.text: item for item in spec.parameters}
        self.claims = {str(entry.key.value): entry for entry in expectation.claims}

    def report(
        self,
        code: str,
        message: str,
        span: Span,
        help: str | None = None,
        notes: tuple[str, ...] = (),
        labels: tuple[Label, ...] = (),
    ) -> None:
        path = self.expectation.path
        self.problems.append(Problem(code, message, Label(span), secondary=labels, help=help, notes=notes, path=path))

    def unreadable(self, message: str, span: Span, help: str | None = None) -> _Unreadable:
        self.report("KV302", message, span, help)
        return _Unreadable()

    def equal(
        self, what: str, span: Span, found: object, wanted: object, notes: Callable[[], tuple[str, ...]] = tuple
    ) -> None:
        """KV301 with the notes, which are worked out where they are needed, unless the two are equal."""
        if found != wanted:
            message = f"{what} is {_written(found)}, expected {_written(wanted)}"
            self.report("KV301", message, span, notes=notes())

    def given(self) -> Iterator[tuple[Parameter | None, str, Any, Entry]]:
        """(parameter or None for a built-in name, name, value, entry) of everything under `given`."""
        for entry in self.expectation.given:
            name = str(entry.key.value)
            parameter = self.parameters.get(name)
            built_in = name in BUILT_IN and self.spec.kind == "layout"
            if parameter is None and not built_in:
                known = {*self.parameters, *(BUILT_IN if self.spec.kind == "layout" else ())}
                raise self.unreadable(f"unknown parameter `{name}`", entry.key.span, suggest(name, known))
            yield parameter, name, _exact(plain(entry.value), parameter), entry


class _LayoutProof(_Proof):
    """An expectation of a layout, with the emitted module."""

    def __init__(self, spec: Spec, expectation: Expectation, problems: list[Problem], evidence: _Evidence) -> None:
        super().__init__(spec, expectation, problems)
        self.evidence, self.module = evidence, evidence.module
        self.layout: Any = None
        self.measured: dict[str, _MeasuredBuffer] = {}

    def known(self) -> Known:
        """Values of the parameters, as far as one value can stand for them; None for those that are absent."""
        found: dict[str, Literal | None] = {}
        for item in self.spec.parameters:
            value = self.layout.choices.get(item.name.text)
            if item.section == "config":
                value = self.config_value(item)
                if value is None and item.optional:
                    found[item.name.text] = None
            if isinstance(value, (bool, int, Fraction, str)):
                found[item.name.text] = Literal(value=value, span=item.name.span)
        return found

    def config_value(self, item: Parameter) -> Any:
        if item.equals is not None:
            return item.equals
        named = dict(item.values or ())
        for source in item.sources:
            if isinstance(source, Name) and source.name in self.layout.config_used:
                value = self.layout.config_used[source.name]
                return named.get(value, value) if not isinstance(value, list) else value
        return item.default

    def prove(self) -> _Measured | None:
        """Judge every claim. The layout, where it is about one."""
        wanted = self.claims.get("error")
        config, choices = self.inputs()
        try:
            found = self.evidence.layout(config, choices)
        except self.module.LayoutError as error:
            if wanted is None:
                message = f"the config or a choice is refused: {error.problems[0]}"
                labels = labels_of(self.spec, error, error.problems[0])
                self.report("KV304", message, self.expectation.span, notes=tuple(error.problems[1:]), labels=labels)
            elif str(plain(wanted.value)) not in str(error):
                self.report("KV303", "the error says something else", wanted.value.span, notes=tuple(error.problems))
            return None
        self.layout, self.measured = found.layout, found.buffers
        if wanted is not None:
            self.report("KV303", "no error comes: the config and the choices are accepted", wanted.value.span)
            return found
        for name, entry in self.claims.items():
            if name in ("layer", "slot", "index", "byte"):
                continue
            getattr(self, f"claim_{name}", self.unsupported)(entry)
        return found

    def inputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The config and the keyword choices."""
        config = dict(self.config_file())
        target = config
        if isinstance(config.get("text_config"), dict):
            target = config["text_config"] = dict(config["text_config"])
        choices: dict[str, Any] = {}
        for parameter, name, value, entry in self.given():
            if parameter is None or parameter.section == "choices":
                choices[name] = value
                continue
            path = next((source.name for source in parameter.sources if isinstance(source, Name)), None)
            if path is None:
                message = f"`{name}` is computed from several fields of a config, and cannot be given"
                raise self.unreadable(message, entry.key.span, "name a `config` that has those fields")
            _put(target, path, _as_raw(parameter, value))
        if self.expectation.config is None:
            for parameter in self.spec.parameters:
                source = parameter.sources[0] if parameter.sources else None
                if parameter.equals is not None and isinstance(source, Name) and _get(config, source.name) is None:
                    _put(config, source.name, parameter.equals)
        return config, choices

    def config_file(self) -> dict[str, Any]:
        scalar = self.expectation.config
        if scalar is None:
            return {}
        name = str(scalar.value)
        if not is_plain_path(name):
            raise self.unreadable(
                f"`{name}` is not a plain path", scalar.span, "name a .json file beside or below the spec"
            )
        try:
            found = self.evidence.config(posixpath.join(posixpath.dirname(self.spec.file), name))
        except OSError as error:
            raise self.unreadable(f"cannot read `{name}`: {reason(error)}", scalar.span) from None
        except (ValueError, RecursionError):
            raise self.unreadable(f"`{name}` is not JSON", scalar.span) from None
        if not isinstance(found, dict):
            raise self.unreadable(f"`{name}` is not a JSON object", scalar.span)
        return found

    # -- claims

    def unsupported(self, entry: Entry) -> None:
        self.report("KV302", f"`{entry.key.value}` is not supported yet", entry.key.span)

    def claim_bytes_per_token(self, entry: Entry) -> None:
        found, wanted = self.module.cell_size(self.layout), _number(entry.value)
        notes = partial(self.shares, "device", found, wanted, self.slots_per("token"), "slots per token")
        self.equal("`bytes_per_token`", entry.value.span, found, wanted, notes)

    def claim_host_bytes_per_token(self, entry: Entry) -> None:
        found = sum((Fraction(item.bytes_per_token) for item in self.buffers("host")), Fraction(0))
        wanted = _number(entry.value)
        notes = partial(self.shares, "host", found, wanted, self.slots_per("token"), "slots per token")
        self.equal("`host_bytes_per_token`", entry.value.span, found, wanted, notes)

    def claim_request_bytes(self, entry: Entry) -> None:
        found = sum(map(request_bytes, self.buffers("device")), Fraction(0))
        wanted = _number(entry.value)
        notes = partial(self.shares, "device", found, wanted, self.slots_per("request"), "slots per request")
        self.equal("`request_bytes`", entry.value.span, found, wanted, notes)

    def claim_page_total(self, entry: Entry) -> None:
        found, wanted = sum(item.layer_page_bytes for item in self.layout.buffers), _number(entry.value)
        notes = partial(self.shares, None, found, wanted, lambda buffer: pages_of(buffer)[0].slots, "slots")
        self.equal("`page_total`", entry.value.span, found, wanted, notes)

    def claim_total_bytes(self, entry: Entry) -> None:
        assert isinstance(entry.value, Mapping)
        total = entry.value.get("is")
        assert total is not None
        counts = self.counts(entry.value)
        found, wanted = self.module.bytes_for(self.layout, *counts), _number(total)

        def notes() -> tuple[str, ...]:
            shares = self.shares("device", found, wanted, lambda buffer: self.num_slots(buffer, counts), "slots")
            reserved = abs(found - wanted) == self.module.bytes_for(self.layout, 0)
            return (*shares, "that is what the reserved pages cost") if reserved else shares

        self.equal("`total_bytes`", total.span, found, wanted, notes)

    def claim_page_bytes(self, entry: Entry) -> None:
        self.claim_size("page_bytes", entry)

    def claim_slot_bytes(self, entry: Entry) -> None:
        self.claim_size("slot_bytes", entry)

    def claim_size(self, size: str, entry: Entry) -> None:
        """The bytes of a page, or of a slot, in every layer; of layers that differ, the first that is wrong is told."""
        for buffer, item in self.each_buffer(entry):
            wanted, sizes = _number(item.value), self.measured[buffer.name].sizes[size]
            for found, (page, layer) in sizes.items():
                where = f" in layer {layer}" if len(sizes) > 1 else ""
                slots = page.slots if size == "page_bytes" else 1
                notes = partial(_page_notes, _parts(page), slots, found, wanted)
                self.equal(f"`{size}` of `{buffer.name}`{where}", item.value.span, found, wanted, notes)
                if found != wanted:
                    break

    def claim_slots(self, entry: Entry) -> None:
        assert isinstance(entry.value, Mapping)
        counts = self.counts(entry.value)
        for buffer, item in self.each_buffer(entry, skip=("tokens", "requests")):
            found = self.num_slots(buffer, counts)
            self.equal(f"`slots` of `{buffer.name}`", item.value.span, found, _number(item.value))

    def claim_owners(self, entry: Entry) -> None:
        for buffer, item in self.each_buffer(entry):
            wanted = plain(item.value)
            if isinstance(wanted, list):
                self.equal(f"`owners` of `{buffer.name}`", item.value.span, list(buffer.layers), wanted)
            else:
                self.equal(f"the number of `owners` of `{buffer.name}`", item.value.span, len(buffer.layers), wanted)

    def claim_reads(self, entry: Entry) -> None:
        for buffer, item in self.each_buffer(entry):
            assert isinstance(item.value, Mapping)
            for own in item.value.entries:
                layer = int(str(own.key.value))
                what = f"`reads` of layer {layer} of `{buffer.name}`"
                self.equal(what, own.value.span, self.owner(buffer, layer, own.key.span), _number(own.value))

    def claim_notes(self, entry: Entry) -> None:
        assert isinstance(entry.value, Sequence)
        found, wanted = notes_of(self.layout), [str(plain(item)) for item in entry.value.items]
        if len(found) == len(wanted) and all(part in text for part, text in zip(wanted, found, strict=True)):
            return
        message = (
            f"{len(found)} note{ending(len(found))} {'is' if len(found) == 1 else 'are'} said, expected {len(wanted)}"
        )
        if len(found) == len(wanted):
            message = "the notes say something else"
        self.report("KV301", message, entry.value.span, notes=found)

    def claim_at(self, entry: Entry) -> None:
        name, _, field_name = str(plain(entry.value)).partition(".")
        buffer = self.find(name, self.layout.buffers, "buffer", entry.value.span)
        claims = {key: plain(item.value) for key, item in self.claims.items()}
        layer = claims.get("layer", buffer.layers[0] if buffer.layers else None)
        if layer is None:
            raise self.unreadable(f"no layer has `{name}` here", entry.value.span)
        if "layer" in self.claims:
            layer = self.owner(buffer, layer, self.claims["layer"].value.span)
        pages = pages_of(buffer)
        page = pages[buffer.layers.index(layer)] if len(pages) > 1 else pages[0]
        field = self.find(field_name, page.fields, "field", entry.value.span)
        index = claims.get("index") or [0] * (len(field.shape) - 1)
        if len(index) != len(field.shape) - 1:
            message = f"`index` into `{name}.{field_name}` has {len(index)} numbers, not {len(field.shape) - 1}"
            raise self.unreadable(message, self.claims["index"].value.span)
        number, slot = divmod(claims.get("slot", 0), page.slots)
        for number_of, (position, extent) in enumerate(zip(index, field.shape[1:], strict=True)):
            whole = prod(extent) if isinstance(extent, tuple) else extent
            if position >= whole:
                span = self.claims["index"].value.items[number_of].span  # type: ignore[union-attr]
                raise self.unreadable(f"{position} is outside 0..{whole - 1}", span)
        found = number * _stride(page, field) + _offset(page, field) + _element(field, (slot, *index))
        self.equal(f"`byte` of `{name}.{field_name}`", self.claims["byte"].value.span, found, claims["byte"])

    # -- what the module knows

    def counts(self, node: Mapping) -> tuple[int, int]:
        """The `tokens` and `requests` of a claim."""
        values = [plain(node.get(key)) if node.get(key) is not None else 0 for key in ("tokens", "requests")]
        tokens, requests = int(values[0]), int(values[1])  # type: ignore[call-overload]
        try:
            self.module.bytes_for(self.layout, tokens, requests)
        except ValueError as error:
            raise self.unreadable(str(error), node.get("tokens").span) from None  # type: ignore[union-attr]
        return tokens, requests

    def owner(self, buffer: Any, layer: int, span: Span) -> int:
        """The layer whose bytes a layer reads: its own, or those of the owner that it is a reader of."""
        owners = self.measured[buffer.name].owners
        owner = owners.get(layer)
        if owner is None:
            help = f"the layers that have it are {', '.join(map(str, sorted(owners)))}" if owners else None
            raise self.unreadable(f"layer {layer} has no `{buffer.name}`", span, help)
        return owner

    def num_slots(self, buffer: Any, counts: tuple[int, int]) -> int:
        return self.module.slots(self.layout, buffer.space.name, *counts)

    @staticmethod
    def slots_per(what: str) -> Callable[[Any], Fraction]:
        return lambda buffer: Fraction(getattr(buffer.space, f"slots_per_{what}", 0))

    def buffers(self, memory: str) -> list[Any]:
        return [item for item in self.layout.buffers if memory_of(item) == memory]

    def each_buffer(self, entry: Entry, skip: tuple[str, ...] = ()) -> Iterator[tuple[Any, Entry]]:
        assert isinstance(entry.value, Mapping)
        for item in entry.value.entries:
            if item.key.value not in skip:
                yield self.find(str(item.key.value), self.layout.buffers, "buffer", item.key.span), item

    def find(self, name: str, items: tuple[Any, ...], what: str, span: Span) -> Any:
        found = next((item for item in items if item.name == name), None)
        if found is None:
            raise self.unreadable(f"unknown {what} `{name}`", span, suggest(name, [item.name for item in items]))
        return found

    def shares(
        self,
        memory: str | None,
        found: Fraction | int,
        wanted: Fraction | int,
        slots: Callable[[Any], Fraction | int],
        unit: str,
    ) -> tuple[str, ...]:
        """What each buffer costs, and which fields make up the difference, where some do.

        Args:
            memory: whose buffers count; None for all.
            found: the number that came out.
            wanted: the number that was expected.
            slots: of a buffer, how many of them count in each layer.
            unit: what those slots are called.
        """
        notes: list[str] = []
        shares: dict[str, Fraction] = {}
        for buffer in self.layout.buffers if memory is None else self.buffers(memory):
            count = slots(buffer) if buffer.layers else 0
            if not count:
                continue
            measured = self.measured[buffer.name]
            layers = f"{len(buffer.layers)} layer{ending(len(buffer.layers))}"
            own = sum(measured.parts.values()) * count
            page = pages_of(buffer)[0]
            each = _slot_note(_parts(page)) if len(measured.sizes["slot_bytes"]) == 1 else "different pages"
            notes.append(f"`{buffer.name}`: {own} = {layers} x {each}" + (f" x {count} {unit}" if count != 1 else ""))
            for name, nbytes in measured.parts.items():
                key = f"the padding of `{buffer.name}`" if name == "padding" else f"`{buffer.name}.{name}`"
                shares[key] = shares.get(key, Fraction(0)) + nbytes * count
        return (*notes, _difference(shares, found, wanted))


class _FragmentProof(_Proof):
    """An expectation of a fragment: the bytes of a page of one of its formats."""

    def prove(self) -> None:
        for key in ("format", "slots", "bytes"):
            if key not in self.claims:
                raise self.unreadable(
                    f"`{key}` is missing", self.expectation.span, "a fragment expects `format`, `slots` and `bytes`"
                )
        values: dict[str, Any] = {}
        for parameter, name, value, given in self.given():
            values[name] = tuple(value) if isinstance(value, list) else value
            why = why_outside(parameter, values[name]) if parameter is not None else None
            if why is not None:
                raise self.unreadable(f"`{_written(value)}` {why}", given.value.span)
        fixed = tuple(replace(item, equals=values.get(item.name.text, item.equals)) for item in self.spec.parameters)
        scope, _ = scope_of(replace(self.spec, parameters=fixed))
        entry = self.claims["format"]
        format = self.resolve(scope, str(plain(entry.value)), entry.value.span)
        found: list[Problem] = []
        page = resolve_page(scope, format, Size.of(int(plain(self.claims["slots"].value))), found)  # type: ignore[call-overload]
        if page is None:
            note = found[0].message if found else "no page"
            self.report("KV304", f"`{format.name}` has no page for these values", self.expectation.span, notes=(note,))
            return
        wanted = self.claims["bytes"].value
        if page.page_bytes.known is None:
            listed = ", ".join(f"`{name}`" for name in page.page_bytes.names)
            raise self.unreadable(f"the bytes depend on {listed}", wanted.span, f"add {listed} to `given`")
        slots, nbytes, number = page.slots.known or 1, page.page_bytes.known, _number(wanted)
        parts = {field.name: Fraction(_known_bits(field), BYTE) for field in page.fields}
        parts |= _padding(Fraction(nbytes, slots), parts)
        notes = partial(_page_notes, parts, slots, nbytes, number)
        self.equal(f"`bytes` of `{format.name}`", wanted.span, nbytes, number, notes)

    def resolve(self, scope: Scope, name: str, span: Span) -> Format:
        formats = {item.name.text: item for item in self.spec.formats}
        if name not in formats:
            raise self.unreadable(f"unknown format `{name}`", span, suggest(name, formats))
        format = formats[name]
        if not format.cases:
            return format
        for case in format.cases:
            state = True if case.when is None else truth(scope, case.when, {})
            if state is None:
                listed = ", ".join(f"`{item}`" for item in sorted(names(case.when)))  # type: ignore[arg-type]
                raise self.unreadable(f"`given` does not decide a case of `{name}`", span, f"add {listed} to `given`")
            if state:
                return self.resolve(scope, case.use.text, span)
        raise self.unreadable(f"no case of `{name}` holds for these values", span)


# -- small things


def _exact(value: object, parameter: Parameter | None) -> object:
    """A given value as the reader takes it: lists stay lists, a ratio in a text is exact."""
    if parameter is not None and parameter.kind == "ratio" and isinstance(value, str):
        return exact_ratio(value)
    return value


def _as_raw(parameter: Parameter, value: Any) -> Any:
    """A value in the config's own words."""
    raw = {named: given for given, named in parameter.values or ()}
    if isinstance(value, list):
        return [raw.get(item, item) for item in value]
    return raw.get(value, value)


def _put(config: dict[str, Any], path: str, value: object) -> None:
    """Set a field at a dotted path; of what lies below the config, a copy is changed."""
    *parents, last = path.split(".")
    for key in parents:
        below = config.get(key)
        config[key] = dict(below) if isinstance(below, dict) else {}
        config = config[key]
    config[last] = value


def _get(config: MappingType[str, Any], path: str) -> object:
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _number(node: Node) -> Fraction | int:
    value = plain(node)
    return Fraction(value) if isinstance(value, str) else value  # type: ignore[return-value]


def _written(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _field_bytes(field: Any) -> Fraction:
    elements = prod(prod(extent) if isinstance(extent, tuple) else extent for extent in field.shape[1:])
    return Fraction(elements * DTYPES[field.dtype], 8)


def _known_bits(field: FieldLayout) -> int:
    """Bits of a field for one slot of a page whose bytes are known."""
    return prod(size.known or 0 for size in (field.bits, *field.shape[1:]))


def _parts(page: Any) -> dict[str, Fraction]:
    """Bytes a slot by field, and of the padding, where there is some, under that name."""
    parts = {field.name: _field_bytes(field) for field in page.fields}
    return parts | _padding(Fraction(page.page_bytes, page.slots), parts)


def _padding(slot_bytes: Fraction, parts: MappingType[str, Fraction]) -> dict[str, Fraction]:
    rest = slot_bytes - sum(parts.values())
    return {"padding": rest} if rest else {}


def _slot_note(parts: MappingType[str, Fraction]) -> str:
    listed = " + ".join(f"{name} {_written(nbytes)}" for name, nbytes in parts.items())
    return f"{_written(sum(parts.values()))} bytes a slot ({listed})"


def _page_notes(
    parts: MappingType[str, Fraction], slots: int, found: Fraction | int, wanted: Fraction | int
) -> tuple[str, ...]:
    """What the slots of a page are made of, and the fields that make up the difference."""
    shares = {"the padding" if name == "padding" else f"`{name}`": nbytes * slots for name, nbytes in parts.items()}
    times = "" if slots == 1 else f"{_written(found)} = {slots} slots x "
    return (f"{times}{_slot_note(parts)}", _difference(shares, found, wanted))


def _difference(shares: MappingType[str, Fraction], found: Fraction | int, wanted: Fraction | int) -> str:
    """The difference, as the fewest of the shares that make it up, where three do."""
    difference = abs(Fraction(found) - Fraction(wanted))
    chosen = _making_up(tuple(sorted(shares.items())), difference) if difference else ()
    if not chosen:
        return f"the difference is {_written(difference)}"
    return f"the difference of {_written(difference)} is {' and '.join(chosen)}"


@lru_cache
def _making_up(shares: tuple[tuple[str, Fraction], ...], total: Fraction) -> tuple[str, ...]:
    """The names of the fewest of the shares that add up to a total, three at most; () where none do."""
    places: dict[Fraction, list[int]] = {}
    for place, (_, share) in enumerate(shares):
        places.setdefault(share, []).append(place)
    for size in (1, 2, 3) if len(shares) <= SHARES_MAX else (1, 2):
        for chosen in combinations(range(len(shares)), size - 1):
            rest = total - sum(shares[place][1] for place in chosen)
            last = next((place for place in places.get(rest, ()) if not chosen or place > chosen[-1]), None)
            if last is not None:
                return tuple(shares[place][0] for place in (*chosen, last))
    return ()


def _element(field: Any, index: tuple[int, ...]) -> int:
    """Bytes from the first element of slot 0 to this one, by the shape and stride the module states."""
    total = Fraction(0)
    for position, extent, stride in zip(index, field.shape, field.stride, strict=True):
        extents = extent if isinstance(extent, tuple) else (extent,)
        strides = stride if isinstance(stride, tuple) else (stride,)
        for size, step in zip(extents, strides, strict=True):
            position, part = divmod(position, size)
            total += part * step
    return int(total)


def _plane(page: Any, field: Any) -> Any:
    return [plane for plane in page.planes if plane.offset <= field.offset][-1]


def _stride(page: Any, field: Any) -> int:
    return _plane(page, field).page_bytes if is_split(page) else page.page_bytes


def _offset(page: Any, field: Any) -> int:
    return field.offset - (_plane(page, field).offset if is_split(page) else 0)
