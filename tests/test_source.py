"""Bytes to values with places: every number here was counted by hand."""

import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.nodes import Mapping, Node, Scalar, Sequence, Source, format_path, node_at, plain
from kvgen.problems import InternalError, Problem, Span, render_concise, render_json, render_text, sort_problems
from kvgen.source import CODES, MAX_BYTES, MAX_DEPTH, MAX_SHOWN, excerpt_text, read_source

PROBLEMS = Path(__file__).parent / "problems"
BAD = sorted(PROBLEMS.glob("KV0*.yaml"))

SPEC = b"""\
kvgen: 1
layout: pair
doc: 'One row''s worth.'
let:
  half: 0.5
  slots: tokens // 4   # words
require:
  - {that: "not a", else: -inf}
  - that: b
    else: |
      two
      lines
include: []
"""


def read(data: bytes | str) -> Source:
    source, problems = read_source("s.yaml", data.encode() if isinstance(data, str) else data)
    assert problems == []
    assert source is not None
    return source


def faults(data: bytes | str) -> list[Problem]:
    source, problems = read_source("s.yaml", data.encode() if isinstance(data, str) else data)
    assert source is None
    return sort_problems(problems)


def codes(data: bytes | str) -> list[str]:
    return [problem.code for problem in faults(data)]


def value(text: str) -> object:
    """What a plain scalar means as a value."""
    return plain(node_at(read(f"a: {text}\n").root, ["a"]))


def place(node: Node) -> tuple[int, int, int, int]:
    span = node.span
    return span.line, span.column, span.end_line, span.end_column


# Values and places


def test_values() -> None:
    assert plain(read(SPEC).root) == {
        "kvgen": 1,
        "layout": "pair",
        "doc": "One row's worth.",
        "let": {"half": Fraction(1, 2), "slots": "tokens // 4"},
        "require": [{"that": "not a", "else": "-inf"}, {"that": "b", "else": "two\nlines\n"}],
        "include": [],
    }


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([], (1, 1, 13, 12)),
        (["kvgen"], (1, 8, 1, 9)),
        (["doc"], (3, 6, 3, 25)),
        (["let"], (5, 3, 6, 21)),
        (["let", "half"], (5, 9, 5, 12)),
        (["let", "slots"], (6, 10, 6, 21)),
        (["require"], (8, 3, 12, 12)),
        (["require", 0], (8, 5, 8, 32)),
        (["require", 0, "that"], (8, 12, 8, 19)),
        (["require", 0, "else"], (8, 27, 8, 31)),
        (["require", 1], (9, 5, 12, 12)),
        (["require", 1, "else"], (10, 11, 12, 12)),
        (["include"], (13, 10, 13, 12)),
    ],
)
def test_span_of_value(path: list[str | int], expected: tuple[int, int, int, int]) -> None:
    assert place(node_at(read(SPEC).root, path)) == expected


def test_span_of_key() -> None:
    root = read(SPEC).root
    first = node_at(root, ["require", 0])
    assert isinstance(first, Mapping)
    entry = first.entry("else")
    assert entry is not None
    assert place(entry.key) == (8, 21, 8, 25)
    assert [entry.key.value for entry in root] == ["kvgen", "layout", "doc", "let", "require", "include"]
    assert root.entry("nothing") is None and root.get("nothing") is None


def test_part_of_a_scalar() -> None:
    root = read("a: x // 4\nb: \"p == 'q'\"\nc: \"a\\tb\"\nd: one\n  two\ne: 'it''s'\nf: 12\n").root

    def part(key: str, start: int, end: int) -> tuple[int, int, int, int]:
        scalar = root.get(key)
        assert isinstance(scalar, Scalar)
        return place(Scalar(None, scalar.part(start, end)))

    assert part("a", 0, 1) == (1, 4, 1, 5)
    assert part("a", 5, 6) == (1, 9, 1, 10)
    assert part("a", 6, 6) == (1, 10, 1, 10)  # behind the last character
    assert part("b", 5, 8) == (2, 10, 2, 13)  # 'q' with its quotes, in a text in quotes
    assert part("c", 0, 1) == (3, 4, 3, 10)  # an escape: the whole scalar
    assert part("d", 0, 3) == (4, 4, 5, 6)  # two lines: the whole scalar
    assert part("e", 0, 1) == (6, 4, 6, 11)
    assert part("f", 1, 2) == (7, 5, 7, 6)


def test_columns_count_characters() -> None:
    assert place(node_at(read("doc: é漢𝕏\na: {é: 1, b: 2}\n").root, ["a", "b"])) == (2, 14, 2, 15)


def test_byte_order_mark_and_crlf_move_nothing() -> None:
    marked = read(b"\xef\xbb\xbf" + SPEC.replace(b"\n", b"\r\n"))
    assert marked == read(SPEC)


def test_nodes() -> None:
    source = read("a: [1, {b: c}]\n")
    assert source.file == "s.yaml" and source.text == "a: [1, {b: c}]\n"
    items = source.root.get("a")
    assert isinstance(items, Sequence) and len(items) == 2
    assert plain(node_at(source.root, ["a", 1, "b"])) == "c"
    for path in (["b"], ["a", 2], ["a", "b"], ["a", 0, 0]):
        with pytest.raises(InternalError):
            node_at(source.root, path)


def test_format_path() -> None:
    assert format_path([]) == ""
    assert format_path(["require", 0, "that"]) == "require[0].that"
    assert format_path([0, "a"]) == "[0].a"


# Plain scalars


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("-12", -12),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775807", -(2**63) + 1),
        ("0.5", Fraction(1, 2)),
        ("-0.25", Fraction(-1, 4)),
        ("1e-4", Fraction(1, 10000)),
        ("1.5E3", Fraction(1500)),
        ("2.0e+1", Fraction(20)),
        ("0." + "1" * 39, Fraction(int("1" * 39), 10**39)),
        ("1e-64", Fraction(1, 10**64)),
        ("true", True),
        ("false", False),
        ("null", None),
    ],
)
def test_number_or_constant(text: str, expected: object) -> None:
    got = value(text)
    assert got == expected and type(got) is type(expected)
    assert value(f'"{text}"') == text and value(f"'{text}'") == text


@pytest.mark.parametrize(
    "text",
    ["-inf", "offset // 4", "1/2", "64 * index_kpool", "not hisparse", "1.2.3", "e4m3", "12abc", "1e", "0b12", "0xg"]
    + [
        "0o8",
        "1:99",
        "1 000",
        "y",
        "N",
        "none",
        "tRue",
        "nul",
        "--",
        "...x",
        "_1",
        "1-2",
        "inf",
        ".",
        "x=",
        "a#b",
        "a:b",
        "2024-1-31",
        "<",
        "?x",
        "1_a",
        "é",
        "１",
    ],
)
def test_text(text: str) -> None:
    assert value(text) == text


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ("KV020", "yes Yes YES no No NO on On ON off Off OFF True TRUE False FALSE"),
        ("KV021", "~ Null NULL"),
        ("KV022", "0777 -07 00 08 0_7 0x1F 0X1f +0x1 0x_1 0b1 0B10 0o17 0O7"),
        ("KV023", "1_000 1_ .5 -.5 5. +1 +0.5 1_0.5 00.5 .5e3 5.e3 1.5_0"),
        ("KV024", "1:30 -1:30 1:30:00 1:5 1_0:30 1:30.5"),
        ("KV025", "2024-01-31 2024-01-31T10:00:00Z 2024-1-1t1:00:00.5"),
        ("KV026", ".inf .Inf .INF -.inf +.inf .nan .NaN .NAN"),
        (
            "KV027",
            "9223372036854775808 -9223372036854775808 1e999999999 1e-65 1e19 9.3e18 " + "1" * 41 + " 1e" + "9" * 500,
        ),
        ("KV028", "= <<"),
    ],
)
def test_refused_spelling(code: str, texts: str) -> None:
    for text in texts.split():
        assert codes(f"a: {text}\n") == [code], text
        assert codes(f"a: [{text}]\n") == [code], text
        assert codes(f"{text}: a\n") == ["KV014" if text == "<<" else code], text
        assert value(f"'{text}'") == text


@pytest.mark.parametrize(
    ("text", "spelling"),
    [
        ("On", "true"),
        ("NO", "false"),
        ("~", "null"),
        ("0x1F", "31"),
        ("-0b11", "-3"),
        ("0o17", "15"),
        ("1_000", "1000"),
        ("-.5", "-0.5"),
        ("5.", "5"),
        ("5.e3", "5e3"),
        ("+1", "1"),
        ("00.5", "0.5"),
        ("-.INF", "-inf"),
    ],
)
def test_help_says_what_to_write(text: str, spelling: str) -> None:
    [problem] = faults(f"a: {text}\n")
    assert problem.help == f"write `{spelling}`, or put quotes round it if a text is meant"


@pytest.mark.parametrize("text", ["0777", "08", "0x_", "0x" + "f" * 5000, "1" + "_" * 5000, "1:30", "2024-01-31", "="])
def test_help_without_a_reading(text: str) -> None:
    [problem] = faults(f"a: {text}\n")
    assert problem.help is not None and problem.help.endswith("put quotes round it if a text is meant")
    assert len(problem.message) < 120


# Whole files


def test_bad_files_have_their_own_code() -> None:
    found = {path.name[:5] for path in BAD}
    assert found == set(CODES) - {"KV001"}  # a file of 1 MiB is made below


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_file(path: Path) -> None:
    data = path.read_bytes()
    source, problems = read_source(path.name, data)
    assert source is None
    assert path.name[:5] in {problem.code for problem in problems}
    text = render_text(sort_problems(problems), {path.name: excerpt_text(data)})
    assert text == path.with_suffix(".txt").read_bytes().decode()


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_no_wording_of_the_parser(path: Path) -> None:
    for problem in read_source(path.name, path.read_bytes())[1]:
        words = " ".join((problem.message, *problem.notes, problem.help or ""))
        assert not re.search("while|expected|found|token|scalar|<|stream|node", words.replace("`<<`", ""))


def test_all_problems_at_once() -> None:
    data = b"a: on\nb: 0x10\nb: ~\nc: &x {d: , 1: 2}\ne: \tz\nf: !t x\n"
    assert [(problem.code, problem.primary.span.line) for problem in faults(data)] == [
        ("KV020", 1),
        ("KV022", 2),
        ("KV015", 3),
        ("KV021", 3),
        ("KV012", 4),
        ("KV018", 4),
        ("KV016", 4),
        ("KV006", 5),
        ("KV011", 6),
    ]


def test_syntax_behind_a_bad_character_is_left_out() -> None:
    assert codes(b"a: \xff\nb: [1\n") == ["KV002"]
    assert codes(b"a:\n\tb: 1\n  c: 1\n") == ["KV006"]
    assert codes(b"a: ]\nb: \xff\n") == ["KV030", "KV002"]


def test_path() -> None:
    data = "let:\n  page: yes\nrequire:\n  - {that: a}\n  - {that: [x, 0x1]}\n"
    assert [problem.path for problem in faults(data)] == ["let.page", "require[1].that[1]"]
    assert [problem.path for problem in faults("a: {b: 1, b: 2, 3: 4, c: }\n")] == ["a.b", "a", "a.c"]


def test_only_so_many_of_a_kind() -> None:
    problems = faults("a: on\n" * 50)
    assert [problem.code for problem in problems].count("KV020") == MAX_SHOWN
    assert {problem.code for problem in problems} == {"KV015", "KV020"}
    assert [problem.notes for problem in problems if problem.notes] == [
        ("30 more of this kind in this file",),
        ("29 more of this kind in this file",),
    ]


def test_size() -> None:
    room = MAX_BYTES - len(b"a: 1\n# \n")
    assert plain(read(b"a: 1\n# " + b"x" * room + b"\n").root) == {"a": 1}
    [problem] = faults(b"a: 1\n# " + b"x" * (room + 1) + b"\n")
    assert problem.code == "KV001"
    assert problem.primary.span == Span("s.yaml", 1, 1, 1, 1)
    assert excerpt_text(b"x" * (MAX_BYTES + 1)) == ""


@pytest.mark.parametrize("opener", ["[", "{a: ", "- ", "[{a: ", "? ", "{? ", "[[a]: "])
def test_deep_nesting_ends_early(opener: str) -> None:
    data = ("a:\n  " + opener * (MAX_BYTES // len(opener)))[: MAX_BYTES - 1]
    assert "KV019" in codes(data)


def test_depth_limit() -> None:
    inside = MAX_DEPTH - 1  # the root is the first level
    assert plain(read("a: " + "[" * inside + "]" * inside + "\n").root) is not None
    [problem] = faults("a: " + "[" * (inside + 1) + "]" * (inside + 1) + "\n")
    assert problem.code == "KV019"
    assert problem.primary.span.column == 4 + inside


def test_quoted_tabs_and_block_texts() -> None:
    data = 'a: "x\ty"\nb: |\n  p\tq\nc: >-\n  one\n  two\n# a\tb\n'
    assert plain(read(data).root) == {"a": "x\ty", "b": "p\tq\n", "c": "one two"}


def test_document_marks_around_one_document() -> None:
    assert plain(read("# words\n---\na: 1\n...\n").root) == {"a": 1}


def test_torn_expression_is_one_problem() -> None:
    [problem] = faults("let: {a: min(x, y, z), b: 1}\n")
    assert problem.code == "KV018"
    assert problem.help == "put quotes round an expression that holds a comma or bracket"
    assert codes("let: {a: min(x, y[0])}\n") == ["KV018"]
    assert codes("let: {a: f(x, y), b: f(x, y)}\n") == ["KV018", "KV018"]


# Properties

TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Cf", "Zl", "Zp", "Cn"))).filter(str.isprintable)


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_integer_round_trip(number: int) -> None:
    assert value(str(number)) == number


@given(st.decimals(-(10**18), 10**18, allow_nan=False, places=9))
def test_decimal_round_trip(number: object) -> None:
    text = f"{number:f}"
    assert value(text) == Fraction(text)


@given(TEXT)
def test_single_quoted_text_round_trip(text: str) -> None:
    quoted = text.replace("'", "''")
    assert value(f"'{quoted}'") == text


@given(TEXT, st.data())
def test_part_is_that_part(text: str, data: st.DataObject) -> None:
    text = text.replace("'", "")
    source = read(f"doc: x\nlist: [1, '{text}']\n")
    node = node_at(source.root, ["list", 1])
    assert isinstance(node, Scalar)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    span = node.part(start, end)
    line = source.text.split("\n")[span.line - 1]
    assert line[span.column - 1 : span.end_column - 1] == text[start:end]


def check_any(data: bytes) -> None:
    """Whatever the bytes, there is a source or there are problems, each with a place, and all can be shown."""
    source, problems = read_source("s.yaml", data)
    assert (source is None) == bool(problems)
    lines = excerpt_text(data).split("\n")
    for problem in problems:
        assert problem.code in CODES
        assert not problem.message[0].isupper() and not problem.message.endswith(".")
        for label in (problem.primary, *problem.secondary):
            span = label.span
            assert (span.line, span.column) <= (span.end_line, span.end_column)
            for line, column in ((span.line, span.column), (span.end_line, span.end_column)):
                assert column <= len(lines[line - 1]) + 1
    text = render_text(problems, {"s.yaml": excerpt_text(data)})
    assert all(char == "\n" or char.isprintable() for char in text)
    assert render_concise(problems).count("\n") == len(render_json(problems)) == len(problems)


@given(st.binary(max_size=400))
@settings(deadline=None)
def test_any_bytes(data: bytes) -> None:
    check_any(data)


PIECES = list("[]{},:-?&*!|>%@`#'\"\\~=ab \n\t\r\0\u2028\ufeff漢")
PIECES += ["<<", "---", "...", "&a", "*a", "!t", "!!str", "!a!b", "!<u>", "|2-", ">0", "on", "0x1", "1e9", "  ", "\n  "]
PIECES += ["\r\n", ": ", "- ", "? ", " #", "\\U", "\\x", "%YAML 1.1\n"]


@given(st.lists(st.sampled_from(PIECES), max_size=40))
@settings(deadline=None, max_examples=400)
def test_any_pieces(pieces: list[str]) -> None:
    check_any("".join(pieces).encode())


@given(
    st.randoms(use_true_random=False),
    st.lists(st.sampled_from([piece.encode() for piece in PIECES] + [b"\xff"]), max_size=4),
)
@settings(deadline=None, max_examples=200)
def test_any_mutation(rng: random.Random, pieces: list[bytes]) -> None:
    data = bytearray(SPEC)
    for piece in pieces:
        at = rng.randrange(len(data))
        data[at : at + rng.choice([0, 0, 1, 5])] = piece
    check_any(bytes(data))
