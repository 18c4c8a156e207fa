"""Sizes are exact, and what they prove holds for every number; pages that break a promise cannot be made."""

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.page import FieldLayout, Local, Page, PieceLayout, PlaneLayout
from kvgen.problems import InternalError
from kvgen.size import MAX_TERMS, Size, SizeError

NAMES = ("heads", "dim", "slots", "(dim // 8)")
TERMS = st.lists(st.tuples(st.lists(st.sampled_from(NAMES), max_size=3), st.integers(1, 60)), max_size=4)
NUMBERS = st.fixed_dictionaries({name: st.integers(0, 40) for name in NAMES[:3]})
PROOFS = settings(deadline=None, derandomize=True, max_examples=120)


def size_of(terms: list[tuple[list[str], int]]) -> Size:
    """A size built from its parts with the operations that kvgen has."""
    total = Size()
    for names, coefficient in terms:
        product = Size.of(coefficient)
        for name in names:
            product = product * Size.of(name)
        total = total + product
    return total


def value(terms: list[tuple[list[str], int]], numbers: dict[str, int]) -> int:
    """What the same parts come to, in plain arithmetic."""
    known = {**numbers, "(dim // 8)": numbers["dim"] // 8}
    total = 0
    for names, coefficient in terms:
        product = coefficient
        for name in names:
            product *= known[name]
        total += product
    return total


def evaluated(size: Size, numbers: dict[str, int]) -> int:
    """The value of the Python text of a size."""
    return eval(str(size), {"__builtins__": {}}, dict(numbers))


# Algebra


@PROOFS
@given(one=TERMS, other=TERMS, numbers=NUMBERS)
def test_sums_and_products_are_exact(one: Any, other: Any, numbers: dict[str, int]) -> None:
    first, second = size_of(one), size_of(other)
    assert evaluated(first, numbers) == value(one, numbers)
    assert evaluated(first + second, numbers) == value(one, numbers) + value(other, numbers)
    assert evaluated(first * second, numbers) == value(one, numbers) * value(other, numbers)
    assert evaluated(first + 7, numbers) == value(one, numbers) + 7
    assert evaluated(first * 3, numbers) == value(one, numbers) * 3
    assert first * 0 == Size()


@PROOFS
@given(one=TERMS, other=TERMS, third=TERMS)
def test_equal_sizes_are_the_same_object_however_they_came_about(one: Any, other: Any, third: Any) -> None:
    a, b, c = size_of(one), size_of(other), size_of(third)
    assert a + b == b + a and a * b == b * a
    assert (a + b) + c == a + (b + c)
    assert (a + b) * c == a * c + b * c
    assert hash(a + b) == hash(b + a) and str(a + b) == str(b + a)
    assert size_of(list(reversed(one))) == a


@PROOFS
@given(one=TERMS, other=TERMS, numbers=NUMBERS)
def test_at_least_is_a_proof(one: Any, other: Any, numbers: dict[str, int]) -> None:
    """Where it says yes, it holds for these numbers; a size is at least a part of itself."""
    first, second = size_of(one), size_of(other)
    if first.at_least(second):
        assert value(one, numbers) >= value(other, numbers)
    assert (first + second).at_least(first)
    assert first.at_least(first) and first.at_least(Size())
    assert not first.at_least(first + 1)


@PROOFS
@given(terms=TERMS, number=st.integers(1, 24), numbers=NUMBERS)
def test_divisibility_is_a_proof(terms: Any, number: int, numbers: dict[str, int]) -> None:
    size = size_of(terms)
    if size.divisible_by(number):
        assert value(terms, numbers) % number == 0
        assert evaluated(size.divided_by(number), numbers) * number == value(terms, numbers)
    else:
        with pytest.raises(InternalError, match=f"is not certain to be a multiple of {number}"):
            size.divided_by(number)
    assert (size * number).divisible_by(number)
    assert (size * number).divided_by(number) == size
    assert size.divisor({}) == gcd(*(coefficient for _, coefficient in size.terms))


@PROOFS
@given(terms=TERMS, step=st.integers(1, 6), factor=st.integers(0, 9), numbers=NUMBERS)
def test_divisibility_uses_what_is_known_of_names(terms: Any, step: int, factor: int, numbers: dict[str, int]) -> None:
    """`heads` is a multiple of `step`: what follows from it holds for every such number."""
    size, found = size_of(terms), value(terms, {**numbers, "heads": step * factor})
    assert (size * Size.of("heads")).divisible_by(step, {"heads": step})
    divisor = size.divisor({"heads": step})
    assert found % divisor == 0 if divisor else size == Size()
    for number in range(1, 13):
        assert size.divisible_by(number, {"heads": step}) == (divisor % number == 0)
        assert not size.divisible_by(number, {"heads": step}) or found % number == 0


@PROOFS
@given(terms=TERMS, other=TERMS, numbers=NUMBERS)
def test_replacing_a_name(terms: Any, other: Any, numbers: dict[str, int]) -> None:
    size, new = size_of(terms), size_of(other)
    expected = value(terms, {**numbers, "heads": value(other, numbers)})
    assert evaluated(size.replacing("heads", new), numbers) == expected
    assert size.replacing("nothing", new) == size


@PROOFS
@given(terms=TERMS, numbers=NUMBERS)
def test_text_and_names(terms: Any, numbers: dict[str, int]) -> None:
    size = size_of(terms)
    used = {name for names, _ in terms for name in names}
    assert set(size.names) == used
    assert list(size.names) == sorted(size.names)
    assert (size.known is None) == bool(used)
    if size.known is not None:
        assert size.known == value(terms, numbers) and str(size) == str(size.known)
    assert " + ".join(size.products) == str(size) or size == Size()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (Size(), "0"),
        (Size.of(0), "0"),
        (Size.of(12), "12"),
        (Size.of("heads"), "heads"),
        (Size.of("heads") * 2, "2 * heads"),
        (Size.of("dim") * Size.of("slots") * 2 + 5, "2 * slots * dim + 5"),
        (Size.of("b") + Size.of("a") * Size.of("a") + 1, "a * a + b + 1"),
        (Size.of("dim // 8") * 16, "16 * (dim // 8)"),
        (Size.of("ITEM_BYTES[kind]") * 8, "8 * ITEM_BYTES[kind]"),
        (Size.of("dim // 8"), "dim // 8"),
    ],
)
def test_text(size: Size, text: str) -> None:
    assert str(size) == text


def test_sizes_stay_small() -> None:
    """32 terms are allowed, 33 are not; coefficients may be as large as they come."""
    many = Size()
    for number in range(8):
        many = many + Size.of(f"a{number}")
    other = Size()
    for number in range(4):
        other = other + Size.of(f"b{number}")
    assert len((many * other).terms) == MAX_TERMS == 32
    eleven, three = Size(), Size.of("b0")
    for number in range(11):
        eleven = eleven + Size.of(f"a{number}")
    for number in range(1, 3):
        three = three + Size.of(f"b{number}")
    with pytest.raises(SizeError, match="a size of more than 32 terms"):
        eleven * three
    assert (Size.of(2**200) * Size.of(2**200)).known == 2**400


@pytest.mark.parametrize("terms", [(((), 0),), (((), -1),), ((("heads",), 1), (("slots",), -4))])
def test_coefficients_are_above_zero(terms: Any) -> None:
    with pytest.raises(InternalError, match="a coefficient that is not above 0"):
        Size(terms)


# Pages that cannot be made


def piece(low: int, extent: int | str, stride: int) -> PieceLayout:
    return PieceLayout(low=low, extent=Size.of(extent), stride=Size.of(8 * stride))


def laid(name: str, offset: int, pieces: tuple[tuple[PieceLayout, ...], ...], **changes: Any) -> FieldLayout:
    """A field of one byte per element; its record is `changes['length']` bytes, 4 unless given."""
    shape = []
    for own in pieces:
        extent = Size.of(1)
        for item in own:
            extent = extent * item.extent
        shape.append(extent)
    length = changes.pop("length", 4)
    values: dict[str, Any] = {
        "name": name,
        "origin": f"formats.row.fields.{name}",
        "dtype": "u8",
        "bits": Size.of(8),
        "axes": ("slot", *("dim" for _ in pieces[1:])),
        "shape": tuple(shape),
        "pieces": pieces,
        "offset": Size.of(8 * offset),
        "record_offset": Size.of(8 * changes.pop("record_offset", offset)),
        "nbits": Size.of(8 * length),
        "quant": None,
        "init": None,
    }
    return FieldLayout(**{**values, **changes})


def rows(record: int) -> tuple[tuple[PieceLayout, ...], ...]:
    """Two slots of four bytes each, so many bytes apart."""
    return ((piece(1, 2, record),), (piece(1, 4, 1),))


def plane(*fields: FieldLayout, offset: int = 0, record: int = 8) -> PlaneLayout:
    return PlaneLayout(
        offset=Size.of(8 * offset),
        each=(Size.of(2),),
        each_names=("slot",),
        record_bits=Size.of(8 * record),
        fields=fields,
    )


def page(*planes: PlaneLayout, page_bytes: Size | int = 16, locals: tuple[Local, ...] = ()) -> Page:
    return Page(
        format="row",
        origin="formats.row",
        slots=Size.of(2),
        planes=planes,
        page_bytes=Size.of(page_bytes) if isinstance(page_bytes, int) else page_bytes,
        locals=locals,
        conditions=(),
    )


def field_with(pieces: tuple[tuple[PieceLayout, ...], ...], **changes: Any) -> Page:
    return page(plane(laid("k", 0, pieces, **changes)))


def test_a_sound_page() -> None:
    """Two slots; a record of two fields of four bytes. What is planted below starts from this."""
    made = page(plane(laid("k", 0, rows(8)), laid("v", 4, rows(8))))
    assert made.is_constant
    assert [item.name for item in made.fields] == ["k", "v"]
    assert made.planes[0].nbits == Size.of(128)
    behind = page(
        plane(laid("k", 0, rows(8))), plane(laid("v", 16, rows(8), record_offset=0), offset=16), page_bytes=32
    )
    assert len(behind.fields) == 2


def second_plane(offset: int) -> PlaneLayout:
    return plane(laid("v", offset, rows(8), record_offset=0), offset=offset)


def load_time_page(start: Size, at_least: Size) -> Page:
    """A plane of `heads` bytes for each slot, then one at the local `v_offset`, which starts at `start`."""
    first = PlaneLayout(
        offset=Size(),
        each=(Size.of(2),),
        each_names=("slot",),
        record_bits=Size.of("heads") * 8,
        fields=(
            laid(
                "k",
                0,
                (
                    (PieceLayout(low=1, extent=Size.of(2), stride=Size.of("heads") * 8),),
                    (PieceLayout(low=1, extent=Size.of("heads"), stride=Size.of(8)),),
                ),
                nbits=Size.of("heads") * 8,
            ),
        ),
    )
    local = Local(name="v_offset", at_least=at_least, align=64)
    second = replace(plane(laid("v", 0, rows(8))), offset=start)
    return page(first, second, page_bytes=(start + 128).divided_by(8), locals=(local,))


def test_a_sound_load_time_page() -> None:
    made = load_time_page(Size.of("v_offset") * 8, Size.of("heads") * 2)
    assert not made.is_constant
    assert made.is_behind(Size.of("v_offset") * 8 + 1, made.planes[0])


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("v overlaps the field before it", lambda: plane(laid("k", 0, rows(8)), laid("v", 3, rows(8)))),
        ("v overlaps the field before it", lambda: plane(laid("k", 4, rows(8)), laid("v", 0, rows(8)))),
        ("v runs past its record", lambda: plane(laid("k", 0, rows(8)), laid("v", 5, rows(8)))),
        ("k runs past its record", lambda: plane(laid("k", 0, rows(4), length=9))),
        ("planes overlap", lambda: page(second_plane(0), second_plane(15), page_bytes=32)),
        ("planes overlap", lambda: page(second_plane(16), second_plane(0), page_bytes=32)),
        ("a plane runs past the page", lambda: page(second_plane(0), page_bytes=15)),
        ("a plane runs past the page", lambda: page(second_plane(0), second_plane(16), page_bytes=31)),
        ("pieces of an axis leave a gap", lambda: field_with(((piece(1, 2, 8),), (piece(1, 2, 1), piece(4, 2, 2))))),
        ("pieces of an axis leave a gap", lambda: field_with(((piece(1, 2, 8),), (piece(2, 4, 1),)))),
        ("pieces of an axis leave a gap", lambda: field_with(((piece(1, 2, 8),), (piece(1, 4, 1), piece(2, 2, 4))))),
        ("an axis is not covered", lambda: field_with(rows(8), shape=(Size.of(2), Size.of(8)))),
        ("an axis is not covered", lambda: field_with(rows(8), shape=(Size.of(3), Size.of(4)))),
        ("elements overlap", lambda: field_with(((piece(1, 2, 3),), (piece(1, 4, 1),)))),
        ("elements overlap", lambda: field_with(((piece(1, 2, 8),), (piece(1, 4, 0),)))),
        ("elements overlap", lambda: field_with(((piece(1, 2, 8),), (piece(1, 2, 1), piece(2, 2, 1))))),
        ("elements overlap", lambda: field_with(rows(8), bits=Size.of(16))),
        ("planes overlap", lambda: load_time_page(Size.of("v_offset") * 8, Size.of("heads"))),
        ("planes overlap", lambda: load_time_page(Size.of("heads") * 8, Size.of("heads") * 2)),
    ],
)
def test_a_page_that_breaks_a_promise_cannot_be_made(message: str, make: Callable[[], object]) -> None:
    with pytest.raises(InternalError, match=message):
        make()
