"""What the bytes of a buffer are for, from the pages that its module states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from math import prod
from typing import Any

from kvgen.evaluate import is_split, pages_of
from kvgen.page import BYTE, Page
from kvgen.problems import InternalError
from kvgen.types import DTYPES


@dataclass(frozen=True)
class Causes:
    """Bytes by what they are for. Every byte has one cause."""

    data: int = 0  # values
    scales: int = 0  # of the fields that some `quant` names as its scale
    alignment: int = 0  # gaps inside records and between planes
    page_padding: int = 0  # behind the last plane, up to the next page
    reserved: int = 0  # whole pages that are never handed out, whatever lies in them

    def __post_init__(self) -> None:
        if min(self.as_dict().values()) < 0:
            raise InternalError(f"bytes below 0 among {self}")

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> int:
        return sum(self.as_dict().values())

    def __add__(self, other: Causes) -> Causes:
        theirs = other.as_dict()
        return Causes(**{name: number + theirs[name] for name, number in self.as_dict().items()})

    def __mul__(self, count: int) -> Causes:
        return Causes(**{name: number * count for name, number in self.as_dict().items()})


def causes_of(buffer: Any, counts: tuple[int, ...], written: Mapping[str, Page]) -> Causes:
    """The bytes of all layers of a buffer.

    Args:
        buffer: of a layout that a module made.
        counts: what its sizes are functions of.
        written: the pages of the spec by their format: which fields are scales, and where a record begins.
    """
    pages = pages_of(buffer)
    layers = len(buffer.layers) // len(pages) if pages else 0  # that each of the pages is for
    total = Causes()
    for page in pages:
        reserved = buffer.space.reserved_pages * (buffer.space.page_size // page.slots)
        total += page_causes(page, written[page.format]) * (layers * (buffer.num_pages(*counts) - reserved))
        total += Causes(reserved=layers * reserved * page.page_bytes)
    return total


def page_causes(page: Any, written: Page) -> Causes:
    """The bytes of one page that is not reserved."""
    names = {field.quant.scale for field in written.fields if field.quant is not None}
    held = {field.name: _field_bytes(field) for field in page.fields}
    scales = sum(nbytes for name, nbytes in held.items() if name in names)
    behind = 0 if is_split(page) else page.page_bytes - _end_of_planes(page, written)
    return Causes(
        data=sum(held.values()) - scales,
        scales=scales,
        alignment=page.page_bytes - sum(held.values()) - behind,
        page_padding=behind,
    )


def _field_bytes(field: Any) -> int:
    """Bytes of the values of all slots of a page."""
    return _whole(Fraction(prod(_flat(field.shape)) * DTYPES[field.dtype], BYTE))


def _end_of_planes(page: Any, written: Page) -> int:
    """The byte where the last plane ends, with the gaps of its last record."""
    first = written.planes[-1].fields[0]
    found = next(field for field in page.fields if field.name == first.name)
    if first.record_offset.known is None:
        raise InternalError(f"{first.origin} has a gap of load time before it")
    steps = zip(_flat(found.shape), _flat(found.stride), strict=True)
    plane_bytes = max(extent * stride for extent, stride in steps)  # the outermost piece steps over all others
    return _whole(found.offset - first.record_offset.known // BYTE + plane_bytes)


def _flat(axes: tuple) -> list[Any]:
    """Extents or strides with the pieces of an axis one by one."""
    return [number for axis in axes for number in (axis if isinstance(axis, tuple) else (axis,))]


def _whole(number: int | Fraction) -> int:
    if number != int(number):
        raise InternalError(f"{number} is no whole number of bytes")
    return int(number)
