"""Schema: whether a file has the keys and kinds of values that the language gives it.

`spec.schema.json` is the rule book, for this pass and for editors. jsonschema finds what breaks it; every message is
worded here, at the key or value at fault. In the schema, a choice between forms is an `if` on what tells the forms
apart, never an `oneOf` over whole forms, so that an error is about the form that the author meant.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Any

from kvgen.nodes import Entry, Mapping, Node, Scalar, Sequence, Source, format_path, node_at, plain
from kvgen.problems import InternalError, Label, Problem, Span, quote
from kvgen.resources import package_file

CODES: dict[str, str] = {
    "KV101": "a file that is no layout, fragment or contract, or several of them",
    "KV102": "an unknown key",
    "KV103": "a missing key",
    "KV104": "a value of the wrong type",
    "KV105": "a value that is not one of those allowed",
    "KV106": "a name that is none",
    "KV107": "a text of the wrong form",
    "KV108": "a text, list or mapping with too little in it",
    "KV109": "a text that is too long",
    "KV110": "a number that is too small",
    "KV111": "an item that is in a list twice",
    "KV112": "keys that exclude each other",
    "KV113": "a key without the one it goes with",
    "KV114": "an unsupported version of the language",
}

_KINDS = ("layout", "fragment", "contract")
_VERSION = 1
_MAX_SHOWN = 20  # problems of one kind in one file
_MAX_GUESSED = 64  # characters of a word that "did you mean" is tried for
_TYPE_WORDS = {
    "string": "text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "a boolean",
    "array": "a list",
    "object": "a mapping",
}

Path = tuple[str | int, ...]


def load_schema() -> dict[str, Any]:
    """The JSON Schema of a spec."""
    return json.loads(package_file("spec.schema.json").read_text(encoding="utf-8"))


@cache
def _schema() -> dict[str, Any]:
    """The schema, read once; not to be changed."""
    return load_schema()


def check_schema(source: Source) -> list[Problem]:
    """What is wrong with the keys and values of a file, in reading order."""
    problems = list(_check_kind(source.root)) + list(_check_version(source.root))
    if not problems:
        faults = list(_without_followers(_find_faults(source.root)))
        problems = [problem for fault in faults for problem in _WORDINGS[fault.keyword](fault)]
        if faults and not problems:
            raise InternalError(f"no words for {', '.join(fault.keyword for fault in faults)}")
    return _limited(sorted(dict.fromkeys(problems), key=lambda problem: (problem.primary.span, problem.code)))


# What file this is


def _check_kind(root: Mapping) -> Iterator[Problem]:
    """KV101: a file is one of the three kinds."""
    found = [entry for entry in root if entry.key.value in _KINDS]
    help = "give the file one of the keys `layout`, `fragment` and `contract`, with its name"
    if not found:
        start = root.entries[0].key.span if root.entries else root.span
        yield Problem("KV101", "the file is no layout, fragment or contract", Label(start), help=help)
    elif len(found) > 1:
        first, second = found[:2]
        yield Problem(
            "KV101",
            f"the file is a {first.key.value} and a {second.key.value} at once",
            Label(second.key.span),
            secondary=(Label(first.key.span),),
            help=help,
            path=str(second.key.value),
        )


def _check_version(root: Mapping) -> Iterator[Problem]:
    """KV114: the language is the one that this kvgen reads; nothing else is judged by the rules of another."""
    version = root.get("kvgen")
    if isinstance(version, Scalar) and type(version.value) is int and version.value != _VERSION:
        message = f"version {version.value} of the language is not supported"
        notes = (f"this kvgen reads version {_VERSION}",)
        yield Problem("KV114", message, Label(version.span), notes=notes, path="kvgen")


# What breaks the schema


@dataclass(frozen=True)
class _Fault:
    """A rule of the schema that a key or value breaks."""

    root: Mapping
    keyword: str  # "required"
    rule: Any  # what the schema says under the keyword
    schema: dict[str, Any]  # the part of the schema that the keyword is in
    path: Path  # of the value, or of the mapping that has the key
    key: str | None  # the key at fault, where it is not a value

    @cached_property
    def node(self) -> Node:
        return node_at(self.root, self.path)

    @property
    def mapping(self) -> Mapping:
        assert isinstance(self.node, Mapping)
        return self.node

    @property
    def place(self) -> tuple[Path, str | None]:
        return self.path, self.key

    @property
    def where(self) -> str:
        """The value as messages name it."""
        if not self.path:
            return "the file"
        keys = [step for step in self.path if isinstance(step, str)]
        return f"`{self.path[-1]}`" if isinstance(self.path[-1], str) else f"item of `{keys[-1]}`"

    @property
    def anchor(self) -> Span:
        """Where a mapping is named: at its key, or at its own first key where it is an item or the file."""
        if self.path and isinstance(self.path[-1], str):
            parent = node_at(self.root, self.path[:-1])
            assert isinstance(parent, Mapping)
            return _entry(parent, self.path[-1]).key.span
        kind = [entry for entry in self.mapping if not self.path and entry.key.value in _KINDS]
        first = [*kind, *self.mapping.entries]
        return first[0].key.span if first else self.mapping.span

    def unknown_keys(self) -> list[str]:
        """Keys of the mapping that the schema does not have."""
        return [str(entry.key.value) for entry in self.mapping if entry.key.value not in self.schema["properties"]]

    def intended(self, unknown: str) -> str | None:
        """The legal key that an unknown one was likely meant to be, if it is not there as well."""
        return _closest(unknown, [key for key in self.schema["properties"] if self.mapping.get(key) is None])

    def problem(
        self,
        code: str,
        message: str,
        span: Span | None = None,
        *,
        label: str = "",
        secondary: tuple[Label, ...] = (),
        notes: Iterable[str] = (),
        help: str | None = None,
        key: str | None = None,
    ) -> Problem:
        """A problem at `span`, or else at the value; `key` is appended to the path."""
        path = format_path(self.path if key is None else (*self.path, key))
        primary = Label(span or self.node.span, label)
        return Problem(code, message, primary, secondary=secondary, notes=tuple(notes), help=help, path=path)


def _find_faults(root: Mapping) -> Iterator[_Fault]:
    """Every rule that the file breaks."""
    kind = next(kind for kind in _KINDS if root.get(kind) is not None)
    for error in _validator(kind).iter_errors(plain(root)):
        key = str(error.instance) if "propertyNames" in error.absolute_schema_path else None
        yield _Fault(root, error.validator, error.validator_value, error.schema, tuple(error.absolute_path), key)


@cache
def _validator(kind: str) -> Any:
    """A jsonschema validator of one kind of file. jsonschema is imported here, where its cost cannot be avoided."""
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def check_pattern(_: object, pattern: str, instance: object, __: object) -> Iterator[ValidationError]:
        # In JSON Schema `$` is the very end of the text; in Python it is also before a last line feed.
        if isinstance(instance, str) and not re.search(re.sub(r"\$$", r"\\Z", pattern), instance):
            yield ValidationError(f"does not match {pattern}")

    rules = {"$schema": _schema()["$schema"], "$ref": f"#/$defs/{kind}_file", "$defs": _schema()["$defs"]}
    return extend(Draft202012Validator, {"pattern": check_pattern})(rules)


def _without_followers(faults: Iterable[_Fault]) -> Iterator[_Fault]:
    """The faults less those that come of another: more about a value of the wrong type, or about a misspelt key."""
    faults = list(faults)
    types = {fault.place: fault for fault in reversed(faults) if fault.keyword == "type"}
    misspelt = {
        (fault.path, fault.intended(key))
        for fault in faults
        if fault.keyword == "additionalProperties"
        for key in fault.unknown_keys()
    }
    for fault in faults:
        if types.get(fault.place, fault) is not fault:
            continue
        if fault.keyword in ("anyOf", "oneOf") and any((fault.path, key) in misspelt for key in _options(fault)):
            continue
        if fault.keyword == "required":
            missing = [key for key in fault.rule if (fault.path, key) not in misspelt]
            fault = replace(fault, rule=missing)
        yield fault


# How each rule is worded


def _word_unknown_keys(fault: _Fault) -> Iterator[Problem]:
    """KV102."""
    for key in fault.unknown_keys():
        intended = fault.intended(key)
        homes = [kind for kind in _KINDS if not fault.path and key in _keys_of(kind)]
        help = f"did you mean `{intended}`?" if intended else f"`{key}` belongs in a {homes[0]}" if homes else None
        yield fault.problem(
            "KV102",
            f"unknown key {quote(key)}",
            _entry(fault.mapping, key).key.span,
            notes=(f"keys here: {_listed(sorted(fault.schema['properties']))}",),
            help=help,
            key=key,
        )


def _word_missing_keys(fault: _Fault) -> Iterator[Problem]:
    """KV103."""
    for key in fault.rule:
        if fault.mapping.get(key) is None:
            notes = (_as_note(fault.schema["description"]), f"`{key}`: {_as_note(_description_of(fault.schema, key))}")
            yield fault.problem("KV103", f"missing key `{key}`", fault.anchor, label=f"has no `{key}`", notes=notes)


def _word_options(fault: _Fault) -> Iterator[Problem]:
    """KV103, KV112: of some keys, one."""
    options = _options(fault)
    given = [entry for entry in fault.mapping if entry.key.value in options]
    note = _as_note(fault.schema["description"])
    if not given:
        yield fault.problem("KV103", f"missing key: one of {_listed(options)}", fault.anchor, notes=(note,))
        return
    first, second = given[:2]
    yield fault.problem(
        "KV112",
        f"`{first.key.value}` and `{second.key.value}` exclude each other",
        second.key.span,
        secondary=(Label(first.key.span),),
        notes=(note,),
        key=str(second.key.value),
    )


def _word_partners(fault: _Fault) -> Iterator[Problem]:
    """KV113."""
    for key, partners in fault.rule.items():
        for partner in partners:
            if fault.mapping.get(key) is not None and fault.mapping.get(partner) is None:
                span = _entry(fault.mapping, key).key.span
                note = f"`{partner}`: {_as_note(_description_of(fault.schema, partner))}"
                yield fault.problem("KV113", f"`{key}` needs `{partner}` beside it", span, notes=(note,), key=key)


def _word_type(fault: _Fault) -> Iterator[Problem]:
    """KV104."""
    types = [fault.rule] if isinstance(fault.rule, str) else fault.rule
    if "number" in types:
        types = [name for name in types if name != "integer"]
    words = [_TYPE_WORDS[name] for name in types]
    expected = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    help = None
    if (
        "array" in types
        and "string" not in types
        and isinstance(fault.node, Scalar)
        and isinstance(fault.node.value, str)
    ):
        help = f"write {quote(f'[{fault.node.value}]')}"
    yield fault.problem(
        "KV104",
        f"{fault.where}: expected {expected}, found {_found(fault.node)}",
        notes=_notes(fault),
        help=help,
    )


def _word_allowed(fault: _Fault) -> Iterator[Problem]:
    """KV105."""
    allowed = [fault.rule] if fault.keyword == "const" else fault.rule
    value = plain(fault.node)
    closest = _closest(value, [item for item in allowed if isinstance(item, str)]) if isinstance(value, str) else None
    yield fault.problem(
        "KV105",
        f"{fault.where}: {quote(_spelt(value))} is not allowed here",
        notes=(f"allowed: {_listed([_spelt(item) for item in allowed])}", *_notes(fault)),
        help=f"did you mean `{closest}`?" if closest else None,
    )


def _word_pattern(fault: _Fault) -> Iterator[Problem]:
    """KV106, KV107."""
    text = fault.key if fault.key is not None else str(plain(fault.node))
    is_name = fault.rule == _schema()["$defs"]["name"]["pattern"]
    name = re.sub("[^a-z0-9_]+", "_", text.lower()).strip("_")
    yield fault.problem(
        "KV106" if is_name else "KV107",
        f"{quote(text)} is not {fault.schema['title']}",
        _span_of_text(fault),
        notes=_notes(fault),
        help=f"write `{name}`" if is_name and len(name) <= _MAX_GUESSED and re.search(fault.rule, name) else None,
        key=fault.key,
    )


def _word_too_little(fault: _Fault) -> Iterator[Problem]:
    """KV108."""
    node = fault.node
    if isinstance(node, Scalar):
        message = f"{fault.where}: empty text"
    else:
        kind, unit = ("list", "item") if isinstance(node, Sequence) else ("mapping", "key")
        message = (
            f"{fault.where}: expected at least {fault.rule} {unit}s, found {len(node)}"
            if len(node)
            else (f"{fault.where}: empty {kind}")
        )
    yield fault.problem("KV108", message, notes=_notes(fault))


def _word_too_long(fault: _Fault) -> Iterator[Problem]:
    """KV109."""
    text = fault.key if fault.key is not None else str(plain(fault.node))
    message = f"{quote(text)} has {len(text)} characters, at most {fault.rule} are allowed"
    yield fault.problem("KV109", message, _span_of_text(fault), notes=_notes(fault), key=fault.key)


def _word_too_small(fault: _Fault) -> Iterator[Problem]:
    """KV110."""
    value = _spelt(plain(fault.node))
    yield fault.problem("KV110", f"{fault.where}: {value} is below {fault.rule}", notes=_notes(fault))


def _word_repeated(fault: _Fault) -> Iterator[Problem]:
    """KV111."""
    assert isinstance(fault.node, Sequence)
    first_of: dict[tuple[type, object], Node] = {}
    for position, item in enumerate(fault.node):
        value = plain(item)
        if isinstance(value, (list, dict)):
            continue  # a problem of its own
        first = first_of.setdefault((type(value), value), item)
        if first is not item:
            message = f"{fault.where}: {quote(_spelt(value))} is there twice"
            problem = fault.problem("KV111", message, item.span, secondary=(Label(first.span),))
            yield replace(problem, path=format_path((*fault.path, position)))


_WORDINGS: dict[str, Callable[[_Fault], Iterator[Problem]]] = {
    "additionalProperties": _word_unknown_keys,
    "required": _word_missing_keys,
    "anyOf": _word_options,
    "oneOf": _word_options,
    "dependentRequired": _word_partners,
    "type": _word_type,
    "enum": _word_allowed,
    "const": _word_allowed,
    "pattern": _word_pattern,
    "minLength": _word_too_little,
    "minItems": _word_too_little,
    "minProperties": _word_too_little,
    "maxLength": _word_too_long,
    "minimum": _word_too_small,
    "uniqueItems": _word_repeated,
}


# Small pieces


def _entry(mapping: Mapping, key: str) -> Entry:
    """The entry of a key that is there."""
    entry = mapping.entry(key)
    assert entry is not None
    return entry


def _span_of_text(fault: _Fault) -> Span:
    """The span of the key at fault, or else of the value."""
    return fault.node.span if fault.key is None else _entry(fault.mapping, fault.key).key.span


def _options(fault: _Fault) -> list[str]:
    """The keys that an `anyOf` or `oneOf` asks one of."""
    return [option["required"][0] for option in fault.rule]


def _keys_of(kind: str) -> dict[str, Any]:
    """The top keys of a kind of file."""
    return _schema()["$defs"][f"{kind}_file"]["properties"]


def _description_of(schema: dict[str, Any], key: str) -> str:
    """What the schema says about a key."""
    return schema["properties"][key]["description"]


def _as_note(description: str) -> str:
    """A description as a note: without capital and full stop."""
    return description[0].lower() + description[1:].removesuffix(".")


def _notes(fault: _Fault) -> tuple[str, ...]:
    """What the schema says about the value, if it does."""
    return (_as_note(fault.schema["description"]),) if "description" in fault.schema else ()


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _closest(word: str, words: list[str]) -> str | None:
    """The word most like another, if one is much like it."""
    close = get_close_matches(word, words, n=1) if len(word) <= _MAX_GUESSED else []
    return close[0] if close else None


def _found(node: Node) -> str:
    """The type of a value in words."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    match node.value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case str():
            return "text"
    return "a decimal number"


def _spelt(value: object) -> str:
    """A value about as a spec writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_spelt, value))}]"
    return "{...}" if isinstance(value, dict) else str(value)


def _limited(problems: list[Problem]) -> list[Problem]:
    """The first `_MAX_SHOWN` problems of each code; the last tells how many more there are."""
    counts = Counter(problem.code for problem in problems)
    seen: Counter[str] = Counter()
    shown = []
    for problem in problems:
        seen[problem.code] += 1
        hidden = counts[problem.code] - _MAX_SHOWN
        if seen[problem.code] == _MAX_SHOWN and hidden > 0:
            problem = replace(problem, notes=(*problem.notes, f"{hidden} more of this kind in this file"))
        if seen[problem.code] <= _MAX_SHOWN:
            shown.append(problem)
    return shown
