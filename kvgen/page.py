"""Pages: where every byte of every field of every slot lies. The heart of the layout.

A plane repeats one record over pieces of the slot and field axes; inside a record each field is laid out densely in the
pieces that are left. Offsets therefore only ever grow, and a page is proved by its nesting: constructing a `Page`
checks that records, fields and planes follow each other without overlap, and that every axis is covered once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kvgen.problems import InternalError
from kvgen.size import Size
from kvgen.types import DTYPES

BYTE = 8  # bits


@dataclass(frozen=True, kw_only=True)
class PieceLayout:
    """Part of one axis: index // low % extent steps `stride` bits at a time."""

    low: int
    extent: Size
    stride: Size


@dataclass(frozen=True, kw_only=True)
class FieldLayout:
    """One field in its page. Axis 0 is the slot; the pieces of an axis are innermost first.

    Bit of an element: offset + sum over axes and pieces of (index // low % extent) * stride
    """

    name: str
    origin: str
    dtype: str  # a dtype, or the name of a parameter that is one
    bits: Size  # of an element
    axes: tuple[str | None, ...]  # names, "slot" first; None for a plain number
    shape: tuple[Size, ...]
    pieces: tuple[tuple[PieceLayout, ...], ...]
    offset: Size  # bits from the start of the page
    record_offset: Size  # bits from the start of the record
    nbits: Size  # in one record
    quant: QuantLayout | None
    init: str | None


@dataclass(frozen=True, kw_only=True)
class QuantLayout:
    """How a store makes codes from values; see the quantisation keys of the language."""

    scale: str
    blocks: tuple[str, ...]  # of each axis of the codes: how many share a scale, "all" for the whole axis
    outer: bool
    floor: str
    rounding: str
    code: str


@dataclass(frozen=True, kw_only=True)
class PlaneLayout:
    """A record of fields, repeated. Sizes in bits."""

    offset: Size
    each: tuple[Size, ...]  # extents of the pieces it repeats over, outermost first
    each_names: tuple[str, ...]  # those pieces as the spec writes them
    record_bits: Size
    fields: tuple[FieldLayout, ...]

    @property
    def nbits(self) -> Size:
        total = self.record_bits
        for extent in self.each:
            total = total * extent
        return total

    def __post_init__(self) -> None:
        end = Size()
        for field in self.fields:
            if not field.record_offset.at_least(end):
                raise InternalError(f"{field.origin} overlaps the field before it")
            end = field.record_offset + field.nbits
        if not self.record_bits.at_least(end):
            raise InternalError(f"{self.fields[-1].origin} runs past its record")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What a load-time number must satisfy: `number` is a multiple of `divisor`, or (None) at least 1."""

    number: Size
    divisor: Size | None
    what: str
    origin: str  # place in the spec, with its file


@dataclass(frozen=True, kw_only=True)
class Local:
    """A byte of the page that load time computes and later bytes count from: `at_least`, rounded up to `align`."""

    name: str
    at_least: Size
    align: int


@dataclass(frozen=True, kw_only=True)
class Page:
    """Every byte of a page of `slots` slots, decided but for the names of load time.

    Constructing it proves that planes follow each other inside the page, and that every field covers each of its axes
    exactly once, innermost strides dense, each outer stride stepping over all that lies within it.
    """

    format: str
    origin: str
    slots: Size
    planes: tuple[PlaneLayout, ...]
    page_bytes: Size
    locals: tuple[Local, ...]
    conditions: tuple[Condition, ...]

    @property
    def fields(self) -> tuple[FieldLayout, ...]:
        return tuple(field for plane in self.planes for field in plane.fields)

    @property
    def is_constant(self) -> bool:
        """Whether nothing is left for load time."""
        dtypes = all(field.dtype in DTYPES for field in self.fields)
        return self.page_bytes.known is not None and self.slots.known is not None and not self.conditions and dtypes

    def is_behind(self, bit: Size, plane: PlaneLayout) -> bool:
        """Whether a bit lies behind all of a plane. Each local is at least what it was made from."""
        end = plane.offset + plane.nbits
        for local in reversed(self.locals):
            if bit.at_least(end):
                return True
            bit = bit.replacing(local.name, local.at_least)
        return bit.at_least(end)

    def __post_init__(self) -> None:
        for before, after in pairwise(self.planes):
            if not self.is_behind(after.offset, before):
                raise InternalError(f"{self.origin}: planes overlap")
        if not self.is_behind(self.page_bytes * BYTE, self.planes[-1]):
            raise InternalError(f"{self.origin}: a plane runs past the page")
        for field in self.fields:
            _prove_covered(field)


def _prove_covered(field: FieldLayout) -> None:
    """Each axis is cut into pieces that follow each other, and strides nest: no two elements share a bit."""
    for pieces, extent in zip(field.pieces, field.shape, strict=True):
        low = Size.of(1)
        for piece in pieces:
            if low.known is not None and low != Size.of(piece.low):
                raise InternalError(f"{field.origin}: pieces of an axis leave a gap")
            low = low * piece.extent
        if low.known is not None and extent.known is not None and low != extent:
            raise InternalError(f"{field.origin}: an axis is not covered")
    within = field.bits
    stepping = [piece for pieces in field.pieces for piece in pieces if piece.extent.known != 1]
    while stepping:
        outside = [piece for piece in stepping if piece.stride.at_least(within)]
        if not outside:
            raise InternalError(f"{field.origin}: elements overlap")
        piece = next((piece for piece in outside if piece.stride == within), min(outside, key=_stride_order))
        stepping.remove(piece)
        within = piece.stride * piece.extent


def _stride_order(piece: PieceLayout) -> tuple[int, int]:
    """Inner strides first: they have fewer factors, then the smaller number."""
    factors = max(len(product) for product, _ in piece.stride.terms)
    return factors, sum(coefficient for _, coefficient in piece.stride.terms)
