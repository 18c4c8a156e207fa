"""Sizes that no config makes a multiple: found where every value is tried, and never claimed where one value fits."""

import random
from itertools import product
from math import prod

import pytest

from kvgen.remainders import never_multiple
from kvgen.scope import Scope, scope_of
from kvgen.size import Size
from kvgen.spec import load_spec

SPEC = """\
kvgen: 1
layout: numbers
doc: Numbers of every kind.
config:
  a: {type: int}
  b: {type: int, min: 1, max: 3}
  c: {of: [6, 10, 22]}
  d: {type: int, min: 2}
  kind: {of: [f32, i64]}
require:
  - {that: a > 1 and d % 8 == 4, else: a number of the wrong size}
let:
  odd: 2 * a + 1
  either: c if a > 5 else d
  below: 7 - b * 4
layers: {body: 1}
spaces: {token: {slots: tokens, page: 16}}
formats:
  row: {fields: {k: "u8[a, b, c, d, odd, either, below]", s: "kind[1]"}, page: [[k], [s]]}
buffers:
  kv: {format: row, space: token, layers: all}
"""
A, C, D = range(2, 10), (6, 10, 22), range(4, 60, 8)  # of `a` and `d`, a value for every remainder that 8 can leave
VALUES = [
    {
        **{"a": a, "b": b, "c": c, "d": d, "odd": 2 * a + 1, "either": c if a > 5 else d, "below": 7 - 4 * b},
        "ITEM_BYTES[kind]": item,
    }
    for a, b, c, d, item in product(A, (1, 2, 3), C, D, (4, 8))
]


@pytest.fixture(scope="module")
def scope() -> Scope:
    loaded = load_spec("numbers.yaml", lambda file: SPEC.encode())
    assert loaded.spec is not None and not loaded.problems
    found, problems = scope_of(loaded.spec)
    assert not problems
    return found


def size(*terms: tuple[int, str]) -> Size:
    """`(2, "a b")` is 2 * a * b."""
    total = Size()
    for factor, words in terms:
        term = Size.of(factor)
        for name in words.split():
            term = term * Size.of(name)
        total = total + term
    return total


@pytest.mark.parametrize(
    ("number", "divisor", "why"),
    [
        (size((2, "a"), (1, "")), 4, "2 * a + 1 leaves 1 or 3 when divided by 4"),
        (size((4, "a b"), (8, "a"), (3, "")), 4, "4 * a * b + 8 * a + 3 leaves 3 when divided by 4"),
        (size((1, "odd")), 2, "odd leaves 1 when divided by 2"),
        (size((1, "odd odd"), (1, "")), 4, "odd * odd + 1 leaves 2 when divided by 4"),  # 1 and 9
        (size((1, "c")), 4, "c leaves 2 when divided by 4"),
        (size((1, "d")), 8, "d leaves 4 when divided by 8"),  # what `require` says
        (size((1, "d")), 16, "d leaves 4 or 12 when divided by 16"),
        (size((1, "either"), (1, "")), 2, "either + 1 leaves 1 when divided by 2"),
        (size((1, "below")), 4, "below leaves 3 when divided by 4"),
        (size((1, "b")), 4, "b leaves 1, 2 or 3 when divided by 4"),  # at most 3
        (size((1, "ITEM_BYTES[kind]"), (2, "")), 4, "ITEM_BYTES[kind] + 2 leaves 2 when divided by 4"),
        (size((1, "at"), (2, "")), 8, "at + 2 leaves 2 or 6 when divided by 8"),  # a local that is a multiple of 4
    ],
    ids=str,
)
def test_of_no_config(scope: Scope, number: Size, divisor: int, why: str) -> None:
    assert never_multiple(scope, number, divisor, {"at": 4}) == f"{why}, whatever the config"


@pytest.mark.parametrize(
    ("number", "divisor"),
    [
        (size((1, "a"), (1, "")), 4),
        (size((2, "a"), (2, "")), 4),
        (size((1, "a b"), (1, "a c"), (1, "")), 4),  # two products, which two sizes of head make
        (size((1, "c")), 11),  # 22
        (size((1, "d")), 4),
        (size((1, "slots"), (1, "")), 4),
        (size((1, "a // 4"), (1, "")), 4),  # a computation of load time can be anything
        (size((1, "a b c d odd either below"), (1, "")), 256),  # more combinations than are tried
    ],
    ids=str,
)
def test_of_some_config(scope: Scope, number: Size, divisor: int) -> None:
    assert never_multiple(scope, number, divisor, {}) is None


def test_what_is_claimed_holds_for_every_value(scope: Scope) -> None:
    """3,000 random sizes against all values; of those that none makes a multiple, most are found."""
    rng = random.Random(11)
    claimed = never = 0
    for _ in range(3_000):
        names = rng.sample(sorted(VALUES[0]), rng.randint(1, 3))
        terms = [(rng.randint(1, 8), " ".join(rng.choices(names, k=rng.randint(1, 2)))) for _ in range(2)]
        number, divisor = size(*terms, (rng.randint(0, 7), "")), rng.choice((2, 4, 8))
        found = {
            sum(factor * prod(values[name] for name in names) for names, factor in number.terms) % divisor
            for values in VALUES
        }
        why = never_multiple(scope, number, divisor, {})
        assert why is None or 0 not in found, (number, divisor)
        never, claimed = never + (0 not in found), claimed + (why is not None)
    assert never > 500 and claimed > never * 3 // 4
