"""Source: the bytes of a spec to values, with line and column of every key and value.

kvgen reads a small, plain part of YAML. PyYAML's parser supplies the events; everything that decides what a spec means
happens here: which scalars are numbers, that keys are texts and given once, that there are no anchors, tags or
directives, and how deep a file may nest. Whatever YAML readers disagree about is a problem, so that a spec means the
same to its author, to the author's editor and to kvgen.

Faults are judged at three depths: characters (before parsing), events (while nodes are built), and syntax (where the
parser gives up). All are collected, up to `MAX_SHOWN` of a kind. A syntax error behind a bad character is left out: it
may well follow from it.
"""

import re
import unicodedata
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction

import yaml

from kvgen.nodes import Entry, Mapping, Node, Scalar, Sequence, Source, format_path
from kvgen.problems import Label, Problem, Span, quote
from kvgen.scalars import Misreading, resolve

MAX_BYTES = 1 << 20  # of a file
MAX_DEPTH = 64  # mappings and sequences inside each other
MAX_KEY = 1024  # characters, PyYAML's own bound
MAX_SHOWN = 20  # problems of one kind in one file

CODES: dict[str, str] = {
    "KV001": "the file is too large",
    "KV002": "bytes that are no UTF-8",
    "KV003": "a byte order mark of UTF-16 or UTF-32",
    "KV004": "a control or invisible character",
    "KV005": "a carriage return without a line feed",
    "KV006": "a tab outside quotes",
    "KV007": "an empty file",
    "KV008": "a file that is no mapping",
    "KV009": "a second document",
    "KV010": "a directive",
    "KV011": "a tag",
    "KV012": "an anchor",
    "KV013": "an alias",
    "KV014": "a merge key",
    "KV015": "a key given twice",
    "KV016": "a key that is no text",
    "KV017": "a key that begins with `?`",
    "KV018": "a missing value",
    "KV019": "nesting that is too deep",
    "KV020": "another spelling of a boolean",
    "KV021": "another spelling of null",
    "KV022": "a number that is not decimal",
    "KV023": "another spelling of a decimal number",
    "KV024": "a number in base 60",
    "KV025": "a date or time",
    "KV026": "an infinity or NaN",
    "KV027": "a number out of range",
    "KV028": "`=` or `<<` as a value",
    "KV029": "a bracket that is not closed",
    "KV030": "a bracket that closes nothing",
    "KV031": "a quote that is not closed",
    "KV032": "an unknown escape",
    "KV033": "bad indentation",
    "KV034": "a colon inside a plain text",
    "KV035": "a character that cannot stand here",
    "KV036": "a line that is no entry",
    "KV037": "more text after a complete value",
    "KV038": "a bad head of a block text",
}


# Reading


def read_source(file: str, data: bytes) -> tuple[Source | None, list[Problem]]:
    """The spec in `data`, or every problem that can be told without it."""
    report = _Report()
    start = Span(file, 1, 1, 1, 1)
    if len(data) > MAX_BYTES:
        report.add("KV001", f"the file has more than the {MAX_BYTES} bytes that are allowed", start)
        return None, report.problems
    if encoding := _wide_encoding(data):
        report.add("KV003", f"the file is {encoding}, not UTF-8", start, help="save the file as UTF-8")
        return None, report.problems

    text = _check_characters(file, data, report)
    builder = _Builder(file, text, report)
    root = builder.build()
    problems = report.finish()
    return (Source(file, text, root) if isinstance(root, Mapping) and not problems else None), problems


def excerpt_text(data: bytes) -> str:
    """The text that problems of this file point into, good or not; empty where there is nothing to show."""
    if len(data) > MAX_BYTES or _wide_encoding(data):
        return ""
    return _decode(data).replace("\r\n", "\n")


class _Report:
    """The problems of one file, no more than `MAX_SHOWN` of a kind."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.counts: Counter[str] = Counter()

    def add(
        self,
        code: str,
        message: str,
        span: Span,
        label: str = "",
        *,
        secondary: tuple[Label, ...] = (),
        notes: tuple[str, ...] = (),
        help: str | None = None,
        path: str = "",
    ) -> None:
        self.counts[code] += 1
        if self.counts[code] <= MAX_SHOWN:
            primary = Label(span, label)
            self.problems.append(
                Problem(code, message, primary, secondary=secondary, notes=notes, help=help, path=path)
            )

    def finish(self) -> list[Problem]:
        """The problems; the last of a kind tells how many of its kind were left out."""
        for index in reversed(range(len(self.problems))):
            problem = self.problems[index]
            hidden = self.counts.pop(problem.code, 0) - MAX_SHOWN
            if hidden > 0:
                notes = (*problem.notes, f"{hidden} more of this kind in this file")
                self.problems[index] = replace(problem, notes=notes)
        return self.problems


class _Places:
    """Spans of a text, from character offsets."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def span(self, start: int, end: int) -> Span:
        """The span of characters [start, end), as far as there are any."""
        start, end = min(start, len(self.text)), min(end, len(self.text))
        line, end_line = bisect_right(self.starts, start), bisect_right(self.starts, end)
        column, end_column = start - self.starts[line - 1] + 1, end - self.starts[end_line - 1] + 1
        return Span(self.file, line, column, end_line, end_column)

    def line_start(self, offset: int) -> int:
        return self.starts[bisect_right(self.starts, offset) - 1]

    def line_end(self, offset: int) -> int:
        """Where the line ends, spaces at its end left out."""
        end = self.text.find("\n", offset)
        return offset + len(self.text[offset : None if end < 0 else end].rstrip())


# Characters

_BOM = b"\xef\xbb\xbf"
_BAD_CHARACTER = re.compile(
    "(?P<byte>[\udc80-\udcff]+)"  # as `surrogateescape` decodes them
    "|(?P<cr>\r(?!\n))"
    "|(?P<other>[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff"
    "\u202a-\u202e\u2066-\u2069])"  # the last two ranges reorder the text around them
)
_BAD_IN_VALUE = re.compile(f"{_BAD_CHARACTER.pattern}|[\r\ud800-\udfff]")
_CHARACTER_KINDS = {"Cc": "control character", "Cf": "invisible character", "Zl": "line break", "Zp": "line break"}


def _wide_encoding(data: bytes) -> str | None:
    if data.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "UTF-32"
    return "UTF-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else None


def _decode(data: bytes) -> str:
    return data.removeprefix(_BOM).decode("utf-8", "surrogateescape")


def _check_characters(file: str, data: bytes, report: _Report) -> str:
    """The text, each bad character reported (the first of its kind in a line) and replaced by one that parses."""
    text = _decode(data)
    places = _Places(file, text)
    seen = set()
    counted, offset = 0, len(_BOM) if data.startswith(_BOM) else 0  # characters and the bytes they take
    for match in _BAD_CHARACTER.finditer(text):
        span = places.span(*match.span())
        if (span.line, match.lastgroup) in seen:
            continue
        seen.add((span.line, match.lastgroup))
        if match.lastgroup == "byte":
            offset += len(text[counted : match.start()].encode("utf-8", "surrogateescape"))
            counted = match.start()
            message = f"byte 0x{ord(match[0][0]) - 0xDC00:02X} is no UTF-8"
            report.add(
                "KV002",
                message,
                span,
                notes=(f"byte {offset} of the file, counted from 0",),
                help="save the file as UTF-8",
            )
        elif match.lastgroup == "cr":
            report.add("KV005", "carriage return without a line feed", span, help="end lines with a line feed")
        else:
            report.add("KV004", f"{_character(match[0])} in the text", span, help="remove it")
    return _BAD_CHARACTER.sub(lambda match: "\ufffd" * len(match[0]), text).replace("\r\n", "\n")


def _character(char: str) -> str:
    return f"{_CHARACTER_KINDS.get(unicodedata.category(char), 'invalid character')} U+{ord(char):04X}"


# Events


class _Events(yaml.SafeLoader):
    """PyYAML's parser, the one in Python: the same on every machine. It also notes what the events do not tell."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tabs: list[int] = []  # offset of each run of tabs between tokens
        self.question_marks: deque[int] = deque()  # offset of each `?` that begins a key

    def scan_to_next_token(self) -> None:
        super().scan_to_next_token()
        while self.peek() == "\t":
            self.tabs.append(self.index)
            while self.peek() == "\t":
                self.forward()
            super().scan_to_next_token()

    def fetch_key(self) -> None:
        self.question_marks.append(self.index)
        super().fetch_key()


@dataclass
class _Open:
    """A mapping or sequence whose end has not come yet."""

    start: int  # offset
    is_mapping: bool
    bracket: str  # that began it; empty for one told by indentation
    children: list[Node | Entry] = field(default_factory=list)
    key: Node | None = None  # of the value that comes next
    key_end: int = 0  # offset
    torn: int | None = None  # the last child that has neither colon nor value, as if a comma tore it off
    first: dict[str, Span] = field(default_factory=dict)  # where each key was given first

    @property
    def step(self) -> str | int | None:
        """Where in this one the next node lies; None for a key, or below a key that is no text."""
        if not self.is_mapping:
            return len(self.children)
        return self.key.value if isinstance(self.key, Scalar) and isinstance(self.key.value, str) else None


_PROLOGUE = re.compile(r"(?:[ \t]*(?:#.*)?\n|%.*\n)*(?:%.*)?")
_DIRECTIVE = re.compile("^%", re.MULTILINE)
_PROPERTY = re.compile(r"\s*(!<[^>\s]*>|[&!][^\s,\[\]{}]*)")
_KEY_WITHOUT_COLON = re.compile(r" *([a-z][a-z0-9_]*) [\[{]")
_INDENTED_KEY = re.compile(r" +([^\s:\"'\[\]{}-][^:]*)")
_GAP = re.compile(r"\s*")
_TABS = re.compile(r"\t+")
_WORD = re.compile(r"[^\s,\[\]{}]*")
_QUOTE_EXPRESSION = "put quotes round an expression that holds a comma or bracket"


def _quote_text(sign: str) -> str:
    return f"put quotes round a text that begins with {quote(sign)}"


class _Builder:
    """Builds the nodes of one text from events, with a stack of its own, and reports what is wrong with them.

    Once something is reported, nodes are only built to carry on: a text with problems has no `Source`.
    """

    def __init__(self, file: str, text: str, report: _Report) -> None:
        self.text = text
        self.report = report
        self.places = _Places(file, text)
        self.span = self.places.span
        self.stack: list[_Open] = []
        self.root: Node | None = None

    def build(self) -> Node | None:
        """The root node, if there is one."""
        bad_spans = [problem.primary.span for problem in self.report.problems]
        events = _Events(self._without_directives())
        failure: yaml.MarkedYAMLError | None = None
        try:
            while (event := events.get_event()) is not None and self._take(event, events.question_marks):
                pass
        except yaml.MarkedYAMLError as error:
            failure = error
        except (ValueError, OverflowError):  # the number in an escape such as "\UFFFFFFFF" is no character
            failure = yaml.MarkedYAMLError(problem="escape", problem_mark=events.get_mark())
        bad_spans += self._check_tabs(events.tabs)
        if failure is not None:
            place = self.span(failure.problem_mark.index, failure.problem_mark.index)
            if not any(span < place for span in bad_spans):
                self._report_syntax(failure)
        elif not self.report.problems:
            self._check_root()
        return self.root

    def _without_directives(self) -> str:
        """The text with the directives in front of the document reported and made comments."""
        head = _PROLOGUE.match(self.text)[0]
        for match in _DIRECTIVE.finditer(head):
            self._report_directive(match.start())
        return _DIRECTIVE.sub("#", head) + self.text[len(head) :]

    def _report_directive(self, start: int) -> None:
        span = self.span(start, self.places.line_end(start))
        self.report.add("KV010", "a line that begins with `%` is a directive", span, help="remove the line")

    def _check_tabs(self, tabs: Iterable[int]) -> list[Span]:
        """The span of the first run of tabs of each line, each reported."""
        spans: dict[int, Span] = {}
        for offset in tabs:
            span = self.span(offset, _TABS.match(self.text, offset).end())
            if span.line not in spans:
                spans[span.line] = span
                self._report_tab(span, offset)
        return list(spans.values())

    def _report_tab(self, span: Span, offset: int) -> None:
        if self.text[self.places.line_start(offset) : offset].strip():
            self.report.add(
                "KV006", "tab outside quotes", span, help="use spaces, or put quotes round a text that holds a tab"
            )
        else:
            self.report.add("KV006", "tab in the indentation", span, help="indent with spaces")

    # Events to nodes

    def _take(self, event: yaml.Event, question_marks: deque[int]) -> bool:
        """Whether to go on after this event."""
        start, end = event.start_mark.index, event.end_mark.index
        if isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            self.report.add(
                "KV009", "a second document begins here", self.span(start, end), help="write one spec per file"
            )
            return False
        if isinstance(event, yaml.CollectionEndEvent):
            self._close(end if end > start else None)
        if not isinstance(event, yaml.NodeEvent):
            return True

        top = self.stack[-1] if self.stack else None
        is_key = top is not None and top.is_mapping and top.key is None
        is_collection = isinstance(event, yaml.CollectionStartEvent)
        if is_key:
            self._check_key_form(event, start, is_collection, question_marks)
        if isinstance(event, yaml.AliasEvent):
            message, span = f"alias {quote('*' + event.anchor)} is not allowed", self.span(start, end)
            self.report.add("KV013", message, span, help="write the value out", path=self._path())
            self._add(Scalar(None, span), end)
            return True
        self._check_properties(event, start)
        if not is_collection:
            self._add(self._scalar(event, start, end, is_key), end)
            return True
        if len(self.stack) == MAX_DEPTH:
            message = f"mappings and lists are nested deeper than {MAX_DEPTH} levels"
            self.report.add("KV019", message, self.span(start, start + 1))
            return False
        bracket = ""
        if event.flow_style and end > start and self.text[end - 1] in "[{":  # else an entry `[a: 1]` without braces
            start, bracket = end - 1, self.text[end - 1]  # without tag and anchor
        self.stack.append(_Open(start, isinstance(event, yaml.MappingStartEvent), bracket))
        return True

    def _close(self, end: int | None) -> None:
        """Make a node of the innermost open collection. One told by indentation ends with its last child."""
        top = self.stack.pop()
        if end is None:
            last = top.children[-1]
            tail = (last.value if isinstance(last, Entry) else last).span
            span = replace(self.span(top.start, top.start), end_line=tail.end_line, end_column=tail.end_column)
        else:
            span = self.span(top.start, end)
        children = tuple(top.children)
        self._add(Mapping(children, span) if top.is_mapping else Sequence(children, span), end or 0)

    def _add(self, node: Node, end: int) -> None:
        """Put a finished node, which ends at offset `end`, where it belongs."""
        if not self.stack:
            self.root = node
            return
        top = self.stack[-1]
        if not top.is_mapping:
            top.children.append(node)
        elif top.key is None:
            top.key, top.key_end = node, end
        else:
            if top.torn != len(top.children):
                self._check_unique(top)
            top.children.append(Entry(top.key, node))
            top.key = None

    def _path(self) -> str:
        """Where the next node lies in the spec."""
        return format_path(opened.step for opened in self.stack if opened.step is not None)

    # Checks of one event

    def _check_key_form(
        self, event: yaml.NodeEvent, start: int, is_collection: bool, question_marks: deque[int]
    ) -> None:
        mark = None
        while question_marks and question_marks[0] <= start:
            mark = question_marks.popleft()
        if mark is not None:
            help = "write `key: value`, with quotes round a key that begins with `?`"
            self.report.add("KV017", "key begins with `?`", self.span(mark, mark + 1), help=help)
        elif is_collection:
            kind = "mapping" if isinstance(event, yaml.MappingStartEvent) else "list"
            help = "put quotes round a text that begins with a bracket"
            self.report.add("KV016", f"a {kind} stands as a key", self.span(start, start + 1), help=help)

    def _check_properties(self, event: yaml.NodeEvent, start: int) -> None:
        """Refuse the anchor and the tag of a node. Its event begins where they do."""
        properties = (event.anchor is not None) + (event.tag is not None)
        while properties and (match := _PROPERTY.match(self.text, start)):
            name, span, start = match[1], self.span(*match.span(1)), match.end()
            if name[0] == "&":
                message, help = f"anchor {quote(name)} is not allowed", "write the value out at each place"
                self.report.add("KV012", message, span, help=help, path=self._path())
            else:
                message, help = f"tag {quote(name)} is not allowed", "remove the tag"
                self.report.add("KV011", message, span, help=help, path=self._path())
            properties -= 1

    def _scalar(self, event: yaml.ScalarEvent, start: int, end: int, is_key: bool) -> Scalar:
        text: str = event.value
        if event.style in ("|", ">"):
            end = start + len(self.text[start:end].rstrip())
        span = self.span(start, end)
        if not self.stack:
            return Scalar(None, span)
        if event.style is None and text == "":
            if event.anchor is None and event.tag is None:
                self._report_missing(start, is_key)
            return Scalar(None, span)

        value = self._plain_value(text, span, is_key) if event.style is None else text
        if match := _BAD_IN_VALUE.search(text):
            self.report.add(
                "KV004", f"{_character(match[0])} in the text, written as an escape", span, path=self._path()
            )
        inset = 0 if event.style is None else 1
        is_verbatim = self.text[start + inset : end - inset] == text and "\n" not in text
        return Scalar(value, span, inset if is_verbatim else None)

    def _plain_value(self, text: str, span: Span, is_key: bool) -> int | Fraction | bool | None | str:
        """What an unquoted scalar means. A key must be a text, a value nothing that YAML readers disagree about."""
        if is_key and text == "<<":
            self.report.add(
                "KV014", "merge keys are not allowed", span, help="write the entries out", path=self._path()
            )
            return None
        try:
            value = resolve(text)
        except OverflowError as error:
            self.report.add("KV027", f"{quote(text)} is out of range", span, notes=(str(error),), path=self._path())
            return None
        if isinstance(value, Misreading):
            message = value.message.format(quote(text))
            self.report.add(value.code, message, span, help=value.help(text), path=self._path())
            return None
        if is_key and not isinstance(value, str):
            kind = "null" if value is None else "a boolean" if isinstance(value, bool) else "a number"
            help = f'put quotes round it if a text is meant: `"{text}"`'
            self.report.add("KV016", f"key {quote(text)} is {kind}, not a text", span, help=help, path=self._path())
        return value

    def _check_unique(self, top: _Open) -> None:
        key = top.step
        if isinstance(key, str) and (first := top.first.setdefault(key, top.key.span)) is not top.key.span:
            message, secondary = f"key {quote(key)} is given twice", (Label(first, "first here"),)
            self.report.add("KV015", message, top.key.span, "again here", secondary=secondary, path=self._path())

    def _check_root(self) -> None:
        """The whole file is one mapping."""
        root = self.root
        if root is None or root.span.line == root.span.end_line and root.span.column == root.span.end_column:
            self.report.add("KV007", "the file is empty", Span(self.places.file, 1, 1, 1, 1))
        elif not isinstance(root, Mapping):
            kind = "list" if isinstance(root, Sequence) else "single value"
            help = "write `key: value` lines, with a space behind each colon"
            self.report.add("KV008", f"the file holds a {kind}, not a mapping", root.span, help=help)

    def _report_missing(self, offset: int, is_key: bool) -> None:
        """An entry without key, a key without value, or a list item without anything."""
        top = self.stack[-1]
        if is_key:
            self.report.add("KV016", "entry has no key", self.span(offset, offset), path=self._path())
        elif not top.is_mapping:
            self.report.add("KV018", "list item has no value", self.span(offset - 1, offset), path=self._path())
        else:
            self._report_valueless(top, offset)

    def _report_valueless(self, top: _Open, offset: int) -> None:
        """A key without value. PyYAML puts the missing value behind the colon, or else in front of what comes next."""
        key, colon = top.step, _GAP.match(self.text, top.key_end).end()
        has_colon = self.text.startswith(":", colon)
        if not isinstance(key, str) or (has_colon and offset <= colon):  # a fault of the key itself, or of the syntax
            return
        if has_colon:
            help = "write a value, or remove the key"
        else:
            help = "write a space behind the colon" if ":" in key else _QUOTE_EXPRESSION
            follows = self._is_torn(top)
            top.torn = len(top.children)
            if follows:
                return
        self.report.add("KV018", f"{quote(key)} has no value", top.key.span, help=help, path=self._path())

    def _is_torn(self, opened: _Open) -> bool:
        """Whether the last entry was torn off by a comma, and reported: what follows it is no second fault."""
        return opened.torn is not None and opened.torn == len(opened.children) - 1

    # Syntax errors: what PyYAML's parser gives up on, in kvgen's words

    def _report_syntax(self, error: yaml.MarkedYAMLError) -> None:
        """Report where the parser gave up. Its wording tells the cases apart, and the text does where it can."""
        at: int = error.problem_mark.index
        begin: int = error.context_mark.index if error.context_mark else at
        context, what = error.context or "", error.problem or ""
        char = self.text[at : at + 1]
        add, span, places = self.report.add, self.span, self.places
        if char == "\t":
            self._report_tab(span(at, at + 1), at)
        elif "escape" in what and "URI" not in what and char:
            slash = self.text.rfind("\\", 0, at + 1)
            help = "write `\\\\` for a backslash, or use single quotes"
            add("KV032", f"{quote(self.text[slash : slash + 2])} begins no escape", span(slash, slash + 2), help=help)
        elif "quoted scalar" in context:
            add(
                "KV031",
                f"quote {quote(self.text[begin])} is not closed",
                span(begin, begin + 1),
                help="end the text with it",
            )
        elif "directive" in context + what or ("document" in what and "flow" not in context):
            self._report_outside(begin)
        elif "tag" in context or "tag" in what:
            word = self._word(max(begin, self.text.rfind("!", 0, at + 1)))
            add("KV011", "a value that begins with `!` is a tag", word, help=_quote_text("!"))
        elif "anchor" in context or "alias" in context:
            code, kind = ("KV013", "alias") if "alias" in context else ("KV012", "anchor")
            sign = self.text[begin]
            message = f"a value that begins with {quote(sign)} is an {kind}"
            add(code, message, self._word(begin), help=_quote_text(sign))
        elif "block scalar" in context:
            sign = self.text[begin]
            message = f"text stands behind the {quote(sign)} that begins a block text"
            help = f"begin the text on the next line, or {_quote_text(sign)}"
            add("KV038", message, span(begin, places.line_end(begin)), help=help)
        elif "simple key" in context:
            self._report_no_entry(begin)
        elif "mapping values" in what:
            self._report_colon(at)
        elif "sequence entries" in what:
            add("KV036", "list begins on the line of its key", span(at, at + 1), help="begin the list on the next line")
        elif "mapping keys" in what:
            add("KV017", "key begins with `?`", span(at, at + 1), help=_quote_text("?"))
        elif "start any token" in what:
            add(
                "KV035",
                f"{quote(char)} cannot begin a value",
                span(at, at + 1),
                help=_quote_text(char),
            )
        elif "flow" in context:
            self._report_in_brackets(at, what)
        elif "block" in context:
            self._report_in_block(at, begin, what)
        else:
            add("KV035", f"{quote(char)} cannot stand here", span(at, at + 1))

    def _report_outside(self, at: int) -> None:
        """A directive, or text, behind the end of the document."""
        directive = self.text.rfind("\n%", 0, at + 1) + 1
        if directive in (self.places.line_start(at), at) or at == len(self.text):
            self._report_directive(directive)
        else:
            self.report.add("KV037", "text follows the end of the mapping", self.span(at, self.places.line_end(at)))

    def _word(self, start: int) -> Span:
        return self.span(start, max(start + 1, _WORD.match(self.text, start).end()))

    def _report_no_entry(self, start: int) -> None:
        end = self.places.line_end(start)
        line = self.text[start:end]
        if len(line) > MAX_KEY:
            self.report.add("KV036", f"key is longer than {MAX_KEY} characters", self.span(start, end))
            return
        help = "write a space behind the colon" if re.match(r"\w+:\S", line) else "write `key: value`"
        self.report.add("KV036", f"{quote(line)} is no entry of a mapping", self.span(start, end), help=help)

    def _report_colon(self, at: int) -> None:
        """A colon where no key can be: behind a key that belongs to the text of the line above, or in a plain text."""
        if key := self._key_of_line(at):
            message = "line is indented deeper than the entry above, so that it continues its value"
            self.report.add("KV033", message, key, help="indent the entries of one mapping alike")
        elif at - self.places.line_start(at) > MAX_KEY and ": " not in self.text[self.places.line_start(at) : at]:
            key = self.span(self.places.line_start(at), at)
            self.report.add("KV036", f"key is longer than {MAX_KEY} characters", key)
        else:
            help = "put quotes round a text that holds a colon and a space"
            self.report.add("KV034", "colon inside a plain text", self.span(at, at + 1), help=help)

    def _key_of_line(self, at: int) -> Span | None:
        """The span of the plain words between the indentation and a colon at `at`, if nothing else stands there."""
        line_start = self.places.line_start(at)
        match = _INDENTED_KEY.fullmatch(self.text, line_start, at)
        return self.span(match.start(1), at) if match else None

    def _open_quote(self, start: int) -> str | None:
        """What to look for where the line of a bracket has a quote without its pair."""
        line = self.text[self.places.line_start(start) : self.places.line_end(start)]
        odd = next((mark for mark in "\"'" if line.count(mark) % 2), None)
        return None if odd is None else f"a quote {odd} may be missing in its line"

    def _report_in_brackets(self, at: int, what: str) -> None:
        """Something between brackets is neither an entry nor a comma."""
        add, span, char = self.report.add, self.span, self.text[at : at + 1]
        inner = next((opened for opened in reversed(self.stack) if opened.bracket), None)
        if inner is None:
            add("KV035", f"{quote(char)} cannot stand here", span(at, at + 1))
            return
        if self._is_torn(inner):
            return
        start, bracket, closer = inner.start, inner.bracket, "]" if inner.bracket == "[" else "}"
        opener = Label(span(start, start + 1), "opened here")
        is_end = any(end in what for end in ("<stream end>", "<document start>", "<document end>"))
        if is_end or self._is_outdented(at, start):
            due = () if is_end else (Label(span(at, at + 1), f"a comma or `{closer}` is missing in front of this"),)
            add("KV029", f"bracket `{bracket}` is not closed", opener.span, secondary=due, help=self._open_quote(start))
        elif char in ("]", "}"):
            add("KV030", f"bracket `{char}` does not close `{bracket}`", span(at, at + 1), secondary=(opener,))
        elif char == ":" and (key := self._key_of_line(at)):
            add(
                "KV037",
                "text follows a value that is complete",
                key,
                help=f"write a comma or `{closer}` in front of it",
            )
        elif char == ":":
            self._report_colon(at)
        elif char == ",":
            add("KV018", "comma has no value in front of it", span(at, at + 1))
        elif char in ("?", "-"):
            help = f"put quotes round a text that holds {quote(char)}"
            message = f"{quote(char)} cannot {'begin a value' if char == '-' else 'stand'} between brackets"
            add("KV035", message, span(at, at + 1), help=help)
        else:
            help = f"write a comma or `{closer}`; {_QUOTE_EXPRESSION}"
            add("KV037", "text follows a value that is complete", self._word(at), help=help)

    def _is_outdented(self, at: int, start: int) -> bool:
        """Whether the line of `at` is a later one than that of `start` and no deeper: an entry of another mapping."""
        lines = [self.places.line_start(offset) for offset in (at, start)]
        indents = [_GAP.match(self.text, line).end() - line for line in lines]
        return lines[0] > lines[1] and indents[0] <= indents[1] and self.text[at] not in "]}"

    def _report_in_block(self, at: int, begin: int, what: str) -> None:
        """A line does not fit the mapping or list that it is in."""
        add, span, char = self.report.add, self.span, self.text[at : at + 1]
        if "start>" in what:
            column = span(begin, begin).column
            secondary = (Label(span(begin, begin + 1), f"the entries around it begin in column {column}"),)
            help = "indent the entries of one mapping alike"
            add("KV033", "indentation fits nothing around it", self._word(at), secondary=secondary, help=help)
        elif char in ("]", "}"):
            add("KV030", f"bracket `{char}` closes nothing", span(at, at + 1))
        elif "'-'" in what:
            add("KV036", "list item stands among the entries of a mapping", span(at, at + 1))
        elif "':'" in what:
            add("KV016", "entry has no key", span(at, at + 1))
        elif "'?'" in what:
            add("KV036", "entry stands among the items of a list", self._word(at))
        elif char == "," and "content" in what:
            add(
                "KV035",
                "`,` cannot begin a value",
                span(at, at + 1),
                help=_quote_text(","),
            )
        else:
            line = self.text[self.places.line_start(at) : self.places.line_end(at)]
            key = _KEY_WITHOUT_COLON.match(line)
            help = f"write a colon behind `{key[1]}`" if key else "put quotes round the whole text"
            add("KV037", "text follows a value that is complete", self._word(at), help=help)
