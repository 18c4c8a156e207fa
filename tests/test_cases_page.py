"""The page of public faults says what the tests do: each case is there once, each test of a case with its number."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
CASES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24, 25, 26, 27, 28, 29),
    *(30, 31, 32, 34, 35, 36, 37, 38, 39, 40, 41, 42, 44, 47, 48, 49),
    *(50, 52, 53, 54, 55, 57, 58, 59, 61, 62, 63),
    *(65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76),
    *(77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87),
    *(88, 89, 90, 91, 92),
    *(94, 95, 97, 98, 99),
    *(100, 101, 102, 103, 105, 106, 107, 108, 109, 110),
)
ROWS = re.findall(
    r"^\| (\d+) \| ([a-h](?:, [a-h])*) \| \[(\S+) (\d+)\]\(https://github\.com/\S+/(\S+)/(?:pull|issues)/(\d+)\) "
    r"\| ([^|]+) \| (covered|not yet|not here): ([^|]+) \|$",
    PAGE,
    re.MULTILINE,
)
TESTS = {
    name
    for path in (ROOT / "tests").glob("test_*.py")
    for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
}


def named(text: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", text)


def numbers(test: str) -> list[int]:
    """The cases that the name of a test begins with, as in `test_24_26_what`."""
    return [int(part) for part in re.match(r"test_((?:\d+_(?:and_)?)*)", test)[1].replace("and_", "").split("_")[:-1]]


def test_each_case_is_there_once() -> None:
    assert len(CASES) == 97
    assert [int(row[0]) for row in ROWS] == list(CASES)
    assert PAGE.count("\n| ") == len(ROWS) + 1  # and the head


def test_rows_have_a_report_a_fault_and_a_reason() -> None:
    for number, _, repository, report, linked, linked_report, fault, _, reason in ROWS:
        assert (repository, report) == (linked, linked_report), number
        assert fault.strip() and reason.strip(), number


def test_counts_of_the_page() -> None:
    counts = [sum(row[7] == status for row in ROWS) for status in ("covered", "not yet", "not here")]
    text = " ".join(PAGE.split())
    assert sum(counts) == 97 and f"97 of them, with gaps in the numbering. Of these {counts[0]} have a test" in text
    assert f"; {counts[1]} are of families that no shipped layout has yet, and {counts[2]} of parts" in text


def test_tests_that_are_named_are_there_and_those_of_cases_are_named() -> None:
    assert set(named(PAGE)) <= TESTS
    rows = {int(row[0]): row for row in ROWS}
    for number, row in rows.items():
        own = [test for test in named(row[8]) if number in numbers(test)]
        assert own or row[7] != "covered", number
    for test in TESTS:
        for number in numbers(test):
            assert f"`{test}`" in rows[number][8], (test, number)


def test_every_kind_is_told_of() -> None:
    told = re.findall(r"^\*\*([a-z])\. ", PAGE, re.MULTILINE)
    assert told == list("abcdefgh")
    assert {kind for row in ROWS for kind in row[1].split(", ")} == set(told)
