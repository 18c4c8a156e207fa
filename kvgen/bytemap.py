"""Pages as text: where each plane and field lies, for docstrings and `kvgen explain`."""

from __future__ import annotations

from collections.abc import Iterator

from kvgen.page import BYTE, FieldLayout, Page, PlaneLayout
from kvgen.size import Size
from kvgen.text import ending, wrap


def page_lines(page: Page) -> Iterator[str]:
    """The byte map of one page, a line for each plane and field, in at most 100 columns."""
    for line in _lines(page):
        margin = " " * (len(line) - len(line.lstrip()) + 4)
        yield from wrap(line, later=margin)


def _lines(page: Page) -> Iterator[str]:
    slots = "" if page.slots.known is None else f" of {page.slots} slot{ending(page.slots.known)}"
    yield f"{page.format}: a page{slots} is {page.page_bytes} bytes"
    for local in page.locals:
        up = f", up to a multiple of {local.align}" if local.align > 1 else ""
        yield f"  {local.name} = {local.at_least}{up}"
    end = Size()
    for plane in page.planes:
        yield from _plane_lines(plane)
        end = plane.offset + plane.nbits
    if end != page.page_bytes * BYTE:
        yield f"  at {_bytes(end)}, padding up to {page.page_bytes}"


def _plane_lines(plane: PlaneLayout) -> Iterator[str]:
    steps = ", ".join(plane.each_names)
    unit = "byte" if plane.record_bits == Size.of(BYTE) else "bytes"
    yield f"  at {_bytes(plane.offset)}, a record of {_bytes(plane.record_bits)} {unit} for each {steps}"
    rows = [(_range(field), field.name, _type(field), _note(field)) for field in plane.fields]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for place, name, kind, note in rows:
        line = f"      {place:>{widths[0]}}  {name:<{widths[1]}}  {kind:<{widths[2]}}  {note}"
        yield line.rstrip()


def _range(field: FieldLayout) -> str:
    """Bytes within the record, as `first..last`."""
    first, end = field.record_offset, field.record_offset + field.nbits
    if first.known is not None and end.known is not None:
        last = (end.known - 1) // BYTE
        return f"{first.known // BYTE}..{last}" if last > first.known // BYTE else f"{last}"
    return f"at {_bytes(first)}, {_bytes(field.nbits)} bytes"


def _type(field: FieldLayout) -> str:
    """The dtype and the values per slot."""
    return f"{field.dtype}[{', '.join(str(extent) for extent in field.shape[1:])}]"


def _note(field: FieldLayout) -> str:
    if field.quant is None:
        return ""
    scale = field.quant.scale
    own = f"scaled by {scale}{', outer given' if field.quant.outer else ''}"
    return {"none": "saturating cast", "given": "scale given"}.get(scale, own)


def _bytes(bits: Size) -> str:
    return str(bits.divided_by(BYTE)) if bits.divisible_by(BYTE) else f"({bits}) / {BYTE}"
