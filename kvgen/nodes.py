"""Nodes: the values of a file, each with its place."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from kvgen.problems import InternalError, Span


@dataclass(frozen=True)
class Scalar:
    """One value: a number, a boolean, null or a text."""

    value: int | Fraction | bool | None | str
    span: Span  # quotes included
    inset: int | None = None  # characters from the start of the span to the text, where they stand there one for one

    def part(self, start: int, end: int) -> Span:
        """The span of characters [start, end) of the text; the whole span where escapes or line breaks move them."""
        if self.inset is None:
            return self.span
        first = self.span.column + self.inset
        return replace(self.span, column=first + start, end_column=first + end)


@dataclass(frozen=True)
class Sequence:
    """Values in order."""

    items: tuple["Node", ...]
    span: Span

    def __iter__(self) -> Iterator["Node"]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Entry:
    """A key and its value."""

    key: Scalar  # always a text
    value: "Node"


@dataclass(frozen=True)
class Mapping:
    """Entries, in the order of the file, no key twice. Iterating gives the entries."""

    entries: tuple[Entry, ...]
    span: Span

    @cached_property
    def _by_key(self) -> dict[object, Entry]:
        return {entry.key.value: entry for entry in self.entries}

    def entry(self, key: str) -> Entry | None:
        """The entry of a key, if there is one."""
        return self._by_key.get(key)

    def get(self, key: str) -> "Node | None":
        """The value of a key, if there is one."""
        entry = self.entry(key)
        return None if entry is None else entry.value

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


Node = Scalar | Sequence | Mapping


@dataclass(frozen=True)
class Source:
    """A file that is well-formed."""

    file: str
    text: str  # without byte order mark, lines ended by a line feed
    root: Mapping


def node_at(root: Node, path: Iterable[str | int]) -> Node:
    """The node that a path of keys and indices leads to."""
    node: Node | None = root
    for step in path:
        if isinstance(node, Mapping) and isinstance(step, str):
            node = node.get(step)
        elif isinstance(node, Sequence) and isinstance(step, int) and step < len(node.items):
            node = node.items[step]
        else:
            node = None
    if node is None:
        raise InternalError(f"no node at {format_path(path)}")
    return node


def plain(node: Node) -> object:
    """The node as dict, list, str, int, Fraction, bool and None."""
    if isinstance(node, Mapping):
        return {entry.key.value: plain(entry.value) for entry in node.entries}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return node.value


def format_path(path: Iterable[str | int]) -> str:
    """The path as problems show it: `require[0].that`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
