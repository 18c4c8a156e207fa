"""How problems look as text, one a line, and as data."""

import json
from itertools import permutations

import pytest

from kvgen.problems import (
    Label,
    Problem,
    Severity,
    Span,
    printable,
    quote,
    render_concise,
    render_json,
    render_text,
    sort_problems,
)


def span(line: int, column: int, end_column: int, file: str = "bad.yaml", end_line: int | None = None) -> Span:
    return Span(file, line, column, line if end_line is None else end_line, end_column)


def shown(problem: Problem, text: str, **others: str) -> str:
    return render_text([problem], {"bad.yaml": text, **{f"{name}.yaml": other for name, other in others.items()}})


def marks(line: str, *spans: Span) -> list[str]:
    """The excerpt of one line with a primary label and secondary ones: the line and its rows of marks."""
    labels = tuple(Label(each, "x") for each in spans[1:])
    text = shown(Problem("KV999", "wrong", Label(spans[0]), secondary=labels), line)
    return text.split("\n")[3:-1]


BLOCK = Problem(
    code="KV204",
    message="scale block does not divide the field it scales",
    primary=Label(span(12, 28, 30), "96 elements per scale"),
    secondary=(Label(span(4, 22, 25), "`latent` has 512 elements"),),
    notes=("512 = 5 x 96 + 32, so the last scale would cover only 32 elements",),
    help="use a block that divides 512, such as 64 or 128",
    path="buffers.kv.latent.scale.block",
)
BLOCK_TEXT = (
    "\n" * 3
    + "params: {latent_dim: 512, rope_dim: 64, index_dim: 128}\n"
    + "\n" * 7
    + "            scale: {block: 96, dtype: float32, at: after}\n"
)


def test_text() -> None:
    assert shown(BLOCK, BLOCK_TEXT) == (
        "error[KV204]: scale block does not divide the field it scales\n"
        "  --> bad.yaml:12:28\n"
        "   |\n"
        " 4 | params: {latent_dim: 512, rope_dim: 64, index_dim: 128}\n"
        "   |                      --- `latent` has 512 elements\n"
        "   :\n"
        "12 |             scale: {block: 96, dtype: float32, at: after}\n"
        "   |                            ^^ 96 elements per scale\n"
        "   |\n"
        "   = note: 512 = 5 x 96 + 32, so the last scale would cover only 32 elements\n"
        "   = help: use a block that divides 512, such as 64 or 128\n"
    )


def test_bare_problem_and_a_blank_line_between_two() -> None:
    first = Problem("KV001", "one", Label(span(1, 1, 2)))
    second = Problem("KV002", "two", Label(span(2, 1, 2)), severity=Severity.WARNING)
    assert render_text([first, second], {"bad.yaml": "a\nb\n"}) == (
        "error[KV001]: one\n --> bad.yaml:1:1\n  |\n1 | a\n  | ^\n"
        "\n"
        "warning[KV002]: two\n --> bad.yaml:2:1\n  |\n2 | b\n  | ^\n"
    )
    assert render_text([], {}) == ""


def test_neighbouring_lines_have_no_gap() -> None:
    problem = Problem("KV001", "one", Label(span(2, 1, 2)), secondary=(Label(span(1, 1, 2)), Label(span(4, 1, 2))))
    assert shown(problem, "a\nb\nc\nd\n").split("\n")[2:-1] == [
        "  |",
        "1 | a",
        "  | -",
        "2 | b",
        "  | ^",
        "  :",
        "4 | d",
        "  | -",
    ]


def test_other_file_has_its_own_block() -> None:
    secondary = (Label(span(3, 3, 5, "other.yaml"), "first here"),)
    problem = Problem("KV300", "`kv` has two meanings", Label(span(1, 1, 3)), secondary=secondary, help="rename one")
    assert shown(problem, "kv: 1\n", other="\n\n  kv: 2\n") == (
        "error[KV300]: `kv` has two meanings\n"
        " --> bad.yaml:1:1\n"
        "  |\n"
        "1 | kv: 1\n"
        "  | ^^\n"
        "  |\n"
        " ::: other.yaml:3:3\n"
        "  |\n"
        "3 |   kv: 2\n"
        "  |   -- first here\n"
        "  |\n"
        "  = help: rename one\n"
    )


def test_file_without_text_keeps_its_words() -> None:
    problem = Problem("KV300", "wrong", Label(span(7, 2, 3), "here"), notes=("a fact",))
    expected = "error[KV300]: wrong\n --> bad.yaml:7:2\n  | here\n  |\n  = note: a fact\n"
    assert render_text([problem], {}) == expected
    assert render_text([problem], {"bad.yaml": ""}) == expected
    assert render_text([problem], {"bad.yaml": "too\nshort\n"}) == expected


def test_marks_lie_under_their_characters() -> None:
    assert marks("abc", span(1, 2, 3)) == ["1 | abc", "  |  ^"]
    assert marks("abc", span(1, 4, 4)) == ["1 | abc", "  |    ^"]  # behind the last character
    assert marks("abc", span(1, 2, 2)) == ["1 | abc", "  |  ^"]  # no width
    assert marks("漢字x", span(1, 3, 4)) == ["1 | 漢字x", "  |     ^"]  # two columns each
    assert marks("漢字x", span(1, 2, 3)) == ["1 | 漢字x", "  |   ^^"]
    assert marks("e\u0301x", span(1, 3, 4)) == ["1 | e\u0301x", "  |  ^"]  # a combining accent takes none
    assert marks("\ta", span(1, 2, 3)) == ["1 |     a", "  |     ^"]  # a tab is shown as four
    assert marks("\ta", span(1, 1, 2)) == ["1 |     a", "  | ^^^^"]
    assert marks("a\x1bb", span(1, 3, 4)) == ["1 | a\\x1bb", "  |      ^"]
    assert marks("ab  ", span(1, 1, 9)) == ["1 | ab", "  | ^^"]


def test_several_lines_are_marked_to_the_end_of_the_first() -> None:
    assert marks("a: [b,\n c]", span(1, 4, 4, end_line=2)) == ["1 | a: [b,", "  |    ^^^"]


def test_several_labels_on_one_line() -> None:
    assert marks("{a: 1, a: 2}", span(1, 8, 9), span(1, 2, 3)) == ["1 | {a: 1, a: 2}", "  |  - x", "  |        ^"]


def test_long_line_is_cut_round_its_label() -> None:
    line = "x" * 200 + "BAD" + "y" * 200
    excerpt, row = marks(line, span(1, 201, 204))
    assert excerpt == "1 | ..." + "x" * 30 + "BAD" + "y" * 67 + "..."
    assert row == "  | " + " " * 33 + "^^^"


def test_long_line_is_not_cut_where_that_saves_nothing() -> None:
    assert marks("x" * 100, span(1, 1, 2))[0] == "1 | " + "x" * 100
    assert marks("BAD" + "y" * 200, span(1, 1, 4))[0] == "1 | BAD" + "y" * 97 + "..."
    assert marks("x" * 200 + "BAD", span(1, 201, 204))[0] == "1 | ..." + "x" * 30 + "BAD"
    assert marks("abc" + "y" * 200, span(1, 3, 4))[0].startswith("1 | abc")


def test_long_span_is_marked_as_far_as_it_is_shown() -> None:
    excerpt, row = marks("z" * 300, span(1, 1, 301))
    assert row == "  | " + "^" * 100


def test_labels_far_apart_on_a_long_line() -> None:
    line = "a" * 10 + "ONE" + "b" * 300 + "TWO" + "c" * 10
    first, first_row, second, second_row = marks(line, span(1, 314, 317), span(1, 11, 14))
    assert first == "1 | " + line[:100] + "..."
    assert first_row == "  | " + " " * 10 + "--- x"
    assert second == "1 | ..." + "b" * 30 + "TWO" + "c" * 10
    assert second_row == "  | " + " " * 33 + "^^^"


def test_long_line_of_wide_characters() -> None:
    excerpt, row = marks("漢" * 200, span(1, 101, 102))
    assert excerpt == "1 | ..." + "漢" * 50 + "..."  # 15 in front, 100 columns in all
    assert row == "  | " + " " * 33 + "^^"


def test_concise() -> None:
    assert render_concise([BLOCK]) == "bad.yaml:12:28: error[KV204]: scale block does not divide the field it scales\n"


def test_json() -> None:
    [data] = render_json([BLOCK])
    assert json.loads(json.dumps(data)) == {
        "code": "KV204",
        "severity": "error",
        "message": "scale block does not divide the field it scales",
        "path": "buffers.kv.latent.scale.block",
        "span": {"file": "bad.yaml", "line": 12, "column": 28, "end_line": 12, "end_column": 30},
        "labels": [
            {
                "span": {"file": "bad.yaml", "line": 12, "column": 28, "end_line": 12, "end_column": 30},
                "text": "96 elements per scale",
                "primary": True,
            },
            {
                "span": {"file": "bad.yaml", "line": 4, "column": 22, "end_line": 4, "end_column": 25},
                "text": "`latent` has 512 elements",
                "primary": False,
            },
        ],
        "notes": ["512 = 5 x 96 + 32, so the last scale would cover only 32 elements"],
        "help": "use a block that divides 512, such as 64 or 128",
    }


def test_order() -> None:
    ordered = [
        Problem("KV002", "b", Label(span(1, 1, 9, "a.yaml"))),
        Problem("KV001", "b", Label(span(1, 1, 2))),
        Problem("KV002", "a", Label(span(1, 1, 2))),
        Problem("KV002", "b", Label(span(1, 1, 2))),
        Problem("KV001", "a", Label(span(1, 2, 3))),
        Problem("KV001", "a", Label(span(10, 1, 2))),
    ]
    for problems in list(permutations(ordered))[::37]:
        assert sort_problems([*problems, problems[0]]) == ordered


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x07", "\x9b31m", "\u202e", "\r", "\u2028", "\x7f", "\udcff", "\0"])
def test_nothing_reaches_the_terminal_raw(evil: str) -> None:
    problem = Problem(
        code="KV001",
        message=f"wrong {evil}",
        primary=Label(span(1, 1, 2, f"{evil}.yaml"), evil),
        secondary=(Label(span(1, 1, 2, "other.yaml"), evil),),
        notes=(evil,),
        help=evil,
        path=evil,
    )
    texts = {f"{evil}.yaml": f"a{evil}", "other.yaml": evil + "b"}
    for text in (
        render_text([problem], texts),
        render_concise([problem]),
        json.dumps(render_json([problem]), ensure_ascii=False),
    ):
        assert evil not in text
        assert all(char == "\n" or char.isprintable() for char in text)
        text.encode()


def test_printable_and_quote() -> None:
    assert printable("a é 漢") == "a é 漢"
    assert printable("\t\n\r\x1b\x7f\x9b\u202e\ue000\U000e0001\udcff") == (
        r"\t\n\r\x1b\x7f\x9b\u202e\ue000\U000e0001\xff"
    )
    assert quote("kv") == "`kv`"
    assert quote("a`b") == "'a`b'"
    assert quote("x" * 40) == f"`{'x' * 40}`"
    assert quote("x" * 41) == f"`{'x' * 37}...`"
    assert quote("\x1b") == r"`\x1b`"
