"""Problems: what kvgen says about its input, as values, and the three ways to show them.

A pass never raises for a bad spec. It collects `Problem`s, each with one primary label (the smallest span at fault),
secondary labels (the places that explain it), notes (facts) and a help (the only part that says what to do). Messages
begin in lower case, have no full stop, and put backticks round what the author wrote.

Nothing an input holds reaches a terminal raw: every renderer passes its text through `printable`.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

EXCERPT_WIDTH = 100  # columns of the spec shown in one line of an excerpt
EXCERPT_LEAD = 30  # columns kept in front of the first label when a line is cut
TAB = " " * 4  # how an excerpt shows a tab
CUT = "..."  # stands where a line was cut


class InternalError(Exception):
    """A broken promise inside kvgen: a bug to report, never the author's fault."""


class Severity(Enum):
    """Whether a problem stops the build."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, order=True)
class Span:
    """A stretch of a file. Lines and columns count from 1, columns in characters; the end is exclusive.

    `Span.of_file` is a file as a whole, and `NOWHERE` is for what is in no file, such as a command line.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def of_file(cls, file: str) -> "Span":
        """The whole of a file, where no line of it is at fault."""
        return cls(file, 0, 0, 0, 0)

    @property
    def place(self) -> str:
        """`file:line:column` of the first character, or the file."""
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


NOWHERE = Span.of_file("")


@dataclass(frozen=True)
class Label:
    """A span and what is to be said about it there."""

    span: Span
    text: str = ""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    code: str  # "KV204"
    message: str  # what is wrong, complete without the excerpt
    primary: Label
    severity: Severity = Severity.ERROR
    secondary: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    help: str | None = None
    path: str = ""  # place in the spec: "buffers.kv.layers"

    @property
    def headline(self) -> str:
        """`error[KV204]: message`."""
        return f"{self.severity.value}[{self.code}]: {printable(self.message)}"


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """The problems in reading order, each once."""

    def place(problem: Problem) -> tuple[str, int, int, str, str]:
        span = problem.primary.span
        return span.file, span.line, span.column, problem.code, problem.message

    return sorted(dict.fromkeys(problems), key=place)


def reason(error: OSError) -> str:
    """What the system says about a file that cannot be read or written, as a part of a message."""
    words = error.strerror or str(error) or "unknown error"
    return words[0].lower() + words[1:]


# Text that is safe to show


def printable(text: str) -> str:
    """The text on one line, with an escape for every character that is no visible one."""
    return text if text.isprintable() else "".join(map(_visible, text))


def quote(text: str, limit: int = 40) -> str:
    """The author's words in backticks (in quotes if they hold one), made printable and cut to `limit` characters."""
    shown = printable(text[: limit + 1])
    mark = "'" if "`" in shown else "`"
    return f"{mark}{shown if len(shown) <= limit else shown[: limit - len(CUT)] + CUT}{mark}"


def _visible(char: str) -> str:
    if char.isprintable():
        return char
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, as `surrogateescape` decodes it
        return f"\\x{code - 0xDC00:02x}"
    if char in "\t\n\r":
        return {"\t": "\\t", "\n": "\\n", "\r": "\\r"}[char]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _cell(char: str) -> str:
    """What an excerpt shows for one character."""
    return TAB if char == "\t" else _visible(char)


def _columns(shown: str) -> int:
    """Terminal columns that printable text takes: two for a wide character, none for a combining one."""
    if shown.isascii():
        return len(shown)
    return sum(
        0 if unicodedata.category(char) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in shown
    )


# Renderers


def render_text(problems: Iterable[Problem], texts: Mapping[str, str]) -> str:
    """The problems for a reader, each with the lines it is about. `texts` holds the text of each file that has one."""
    return "\n".join("".join(f"{line}\n" for line in _problem_lines(problem, texts)) for problem in problems)


def render_concise(problems: Sequence[Problem]) -> str:
    """The problems one a line: `file:line:column: error[KV204]: message`."""
    places = (printable(problem.primary.span.place) for problem in problems)
    return "".join(
        f"{place}: {problem.headline}\n" if place else f"{problem.headline}\n"
        for place, problem in zip(places, problems, strict=True)
    )


def render_json(problems: Iterable[Problem]) -> list[dict[str, object]]:
    """The problems as plain data, ready for `json.dumps`."""
    return [
        {
            "code": problem.code,
            "severity": problem.severity.value,
            "message": printable(problem.message),
            "path": printable(problem.path),
            "span": _span_data(problem.primary.span),
            "labels": [
                {"span": _span_data(label.span), "text": printable(label.text), "primary": label is problem.primary}
                for label in (problem.primary, *problem.secondary)
            ],
            "notes": [printable(note) for note in problem.notes],
            "help": None if problem.help is None else printable(problem.help),
        }
        for problem in problems
    ]


def _span_data(span: Span) -> dict[str, object] | None:
    """None for what is in no file; a whole file has no lines."""
    if not span.line:
        return {"file": printable(span.file)} if span.file else None
    return {
        "file": printable(span.file),
        "line": span.line,
        "column": span.column,
        "end_line": span.end_line,
        "end_column": span.end_column,
    }


# The text renderer


def _problem_lines(problem: Problem, texts: Mapping[str, str]) -> Iterator[str]:
    labels = (problem.primary, *problem.secondary)
    home = problem.primary.span.file
    files = [home, *sorted({label.span.file for label in labels} - {home})]
    margin = " " * max(len(str(label.span.line)) for label in labels)

    yield problem.headline
    for file in files:
        here = sorted((label for label in labels if label.span.file == file), key=lambda label: label.span)
        place = (problem.primary if file == home else here[0]).span.place
        if file != home:
            yield f"{margin} |"
        if place:
            yield f"{margin}{'-->' if file == home else ':::'} {printable(place)}"
        yield from _excerpt(here, texts.get(file, "").split("\n"), margin, problem.primary)
    if (problem.notes or problem.help is not None) and problem.primary.span.line:
        yield f"{margin} |"
    for note in problem.notes:
        yield f"{margin} = note: {printable(note)}"
    if problem.help is not None:
        yield f"{margin} = help: {printable(problem.help)}"


def _excerpt(labels: Sequence[Label], lines: Sequence[str], margin: str, primary: Label) -> Iterator[str]:
    """The labelled lines of one file, with a row of marks under each; only the words where there is no such line."""
    previous = 0
    for number, group in groupby(labels, key=lambda label: label.span.line):
        if number > len(lines) or lines == [""]:
            yield from (f"{margin} | {printable(label.text)}" for label in group if label.text)
            continue
        if previous == 0:
            yield f"{margin} |"
        elif number > previous + 1:
            yield f"{margin} :"
        previous = number
        cells = [_cell(char) for char in lines[number - 1].rstrip()]
        for window in _windows(list(group), cells):
            yield f"{number:>{len(margin)}} | {window.text}".rstrip()
            for label in window.labels:
                start, end = window.marks(label.span)
                mark = ("^" if label is primary else "-") * (end - start)
                yield f"{margin} | {' ' * start}{mark} {printable(label.text)}".rstrip()


@dataclass(frozen=True)
class _Window:
    """The part of a line that an excerpt shows, and the labels that lie in it."""

    cells: Sequence[str]  # of the whole line
    first: int  # cell shown first
    last: int  # cell after the last one shown
    labels: Sequence[Label]

    @property
    def text(self) -> str:
        lead = CUT if self.first else ""
        return lead + "".join(self.cells[self.first : self.last]) + (CUT if self.last < len(self.cells) else "")

    def marks(self, span: Span) -> tuple[int, int]:
        """Columns [start, end), from 0, of the marks under a span: at least one, and no more than the text shown."""
        start = min(span.column - 1, self.last)
        end = min(_end_cell(span, self.cells), self.last)
        lead = len(CUT) if self.first else 0
        left = lead + _columns("".join(self.cells[self.first : start]))
        return left, left + max(1, _columns("".join(self.cells[start:end])))


def _end_cell(span: Span, cells: Sequence[str]) -> int:
    """Where the marks of a span end in its first line."""
    return min(span.end_column - 1, len(cells)) if span.end_line == span.line else len(cells)


def _windows(labels: Sequence[Label], cells: Sequence[str]) -> Iterator[_Window]:
    """The line whole if it is short, else cut to stretches that each hold as many of the labels as fit."""
    if _columns("".join(cells)) <= EXCERPT_WIDTH:
        yield _Window(cells, 0, len(cells), labels)
        return
    rest = list(labels)
    while rest:
        first = _back(cells, min(rest[0].span.column - 1, len(cells)), EXCERPT_LEAD)
        last = _forth(cells, first, EXCERPT_WIDTH)
        inside = [label for label in rest if label is rest[0] or _end_cell(label.span, cells) <= last]
        yield _Window(cells, first, last, inside)
        rest = [label for label in rest if label not in inside]


def _back(cells: Sequence[str], start: int, columns: int) -> int:
    """The cell at most `columns` in front of `start`; the first one if a cut would save nothing."""
    while start > 0 and columns > 0:
        start -= 1
        columns -= _columns(cells[start])
    return start if start > len(CUT) else 0


def _forth(cells: Sequence[str], start: int, columns: int) -> int:
    """The cell after the last that fits in `columns` from `start`; the end if a cut would save nothing."""
    end = start
    while end < len(cells) and columns > 0:
        columns -= _columns(cells[end])
        end += 1
    return end if end < len(cells) - len(CUT) else len(cells)
