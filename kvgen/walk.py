"""How an index walks over bytes: sums of `index // low % extent * stride`, as short as they can be.

A field has one walk over the slots of a page and one over the elements of a slot. What lies side by side for every slot
is a record: what moves, saves and restores copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvgen.page import BYTE, FieldLayout, Page, PieceLayout, PlaneLayout
from kvgen.size import Size
from kvgen.spec import KERNEL_VERBS
from kvgen.types import DTYPES


@dataclass(frozen=True, kw_only=True)
class Step:
    """`index // low % extent * stride`, a term of a walk. Sizes are bytes, or elements where that is said."""

    low: Size
    extent: Size
    stride: Size


Walk = tuple[Step, ...]

MAXIMA = {"e4m3": 448, "i8": 127, "e2m1": 6}  # the largest number of each kind of codes


@dataclass(frozen=True, kw_only=True)
class Record:
    """The bytes that a slot has in one stretch of even steps: of fields that lie side by side.

    Byte b of slot s of a page lies at offset + slot walk of s + byte walk of b.
    """

    fields: tuple[str, ...]
    plane: str  # its first field
    plane_offset: Size  # where the plane begins
    offset: Size  # from the start of the page
    nbytes: Size
    slot_walk: Walk
    byte_walk: Walk

    @property
    def is_dense(self) -> bool:
        return len(self.byte_walk) == 1 and self.byte_walk[0].stride == Size.of(1)


def count(field: FieldLayout) -> Size:
    """Elements of one slot."""
    total = Size.of(1)
    for extent in field.shape[1:]:
        total = total * extent
    return total


def slot_walk(field: FieldLayout) -> Walk:
    """From the place of a slot in its page to bytes."""
    return tuple(
        Step(low=Size.of(piece.low), extent=piece.extent, stride=piece.stride.divided_by(BYTE))
        for piece in field.pieces[0]
        if piece.extent.known != 1
    )


def element_walk(field: FieldLayout) -> Walk | None:
    """From the index of an element of a slot, the last axis fastest, to elements. None where values share bytes."""
    bits = field.bits.known
    steps = []
    low = Size.of(1)
    for extent, pieces in zip(reversed(field.shape[1:]), reversed(field.pieces[1:]), strict=True):
        for piece in pieces:
            if piece.extent.known == 1:
                continue
            # the bits of a dtype of load time are a factor of each stride
            stride = _without(piece.stride, field.bits) if bits is None else piece.stride.floored(bits)
            if stride is None:
                return None
            steps.append(Step(low=low * piece.low, extent=piece.extent, stride=stride))
        low = low * extent
    return merged(tuple(steps))


def _without(size: Size, factor: Size) -> Size | None:
    """The size divided by a size of one term."""
    (names, coefficient) = factor.terms[0]
    terms = []
    for product, number in size.terms:
        left = list(product)
        for name in names:
            if name not in left:
                return None
            left.remove(name)
        if number % coefficient:
            return None
        terms.append((tuple(left), number // coefficient))
    return Size(tuple(sorted(terms)))


def merged(walk: Walk) -> Walk:
    """The same walk with neighbouring steps of one stride made one."""
    found: list[Step] = []
    for step in walk:
        last = found[-1] if found else None
        if last is not None and last.low * last.extent == step.low and last.stride * last.extent == step.stride:
            found[-1] = Step(low=last.low, extent=last.extent * step.extent, stride=last.stride)
        else:
            found.append(step)
    return tuple(found)


def is_dense(walk: Walk | None) -> bool:
    """Whether elements lie side by side, in order."""
    return walk is not None and (not walk or (len(walk) == 1 and walk[0].stride == Size.of(1)))


def records(page: Page) -> tuple[Record, ...]:
    """The records of a page in the order of their bytes, fields that lie side by side in one."""
    found: list[Record] = []
    for plane in page.planes:
        first, *others = (_record(plane, field) for field in plane.fields)
        joined = [first]
        for record in others:
            last = joined[-1]
            adjacent = last.is_dense and record.is_dense and last.offset + last.nbytes == record.offset
            if adjacent and last.slot_walk == record.slot_walk:
                nbytes = last.nbytes + record.nbytes
                dense = (Step(low=Size.of(1), extent=nbytes, stride=Size.of(1)),)
                joined[-1] = replace(last, fields=last.fields + record.fields, nbytes=nbytes, byte_walk=dense)
            else:
                joined.append(record)
        found += joined
    return tuple(found)


def _record(plane: PlaneLayout, field: FieldLayout) -> Record:
    """The bytes of one field, in the order in which they lie."""
    item = Size.of(1) if field.bits.known is not None and field.bits.known < BYTE else field.bits.divided_by(BYTE)
    steps = [(item, Size.of(1))]
    pieces = [piece for own in field.pieces[1:] for piece in own]
    whole = [piece for piece in pieces if piece.extent.known != 1 and piece.stride.divisible_by(BYTE)]
    steps += [(piece.extent, piece.stride.divided_by(BYTE)) for piece in _from_inside(whole, item * BYTE)]
    walk = []
    low = Size.of(1)
    for extent, stride in steps:
        walk.append(Step(low=low, extent=extent, stride=stride))
        low = low * extent
    return Record(
        fields=(field.name,),
        plane=plane.fields[0].name,
        plane_offset=plane.offset.divided_by(BYTE),
        offset=field.offset.divided_by(BYTE),
        nbytes=low,
        slot_walk=slot_walk(field),
        byte_walk=merged(tuple(walk)),
    )


def _from_inside(pieces: list[PieceLayout], within: Size) -> Iterator[PieceLayout]:
    """The pieces so that each follows what lies within it, where one does: neighbours then make one step."""
    left = list(pieces)
    while left:
        piece = next((piece for piece in left if piece.stride == within), left[0])
        left.remove(piece)
        yield piece
        within = piece.stride * piece.extent


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The values of a field that share a scale: neighbours in the order of its elements."""

    count: Size
    values: Size
    scale: FieldLayout


def blocks_of(page: Page, field: FieldLayout) -> Blocks | None:
    """None where blocks are not runs of elements in the order of the scales."""
    quant = field.quant
    assert quant is not None
    scale = next(other for other in page.fields if other.name == quant.scale)
    values = Size.of(1)
    inside = True  # whether all later axes are shared whole
    for block, extent in zip(reversed(quant.blocks), reversed(field.shape[1:]), strict=True):
        if inside:
            whole = block == "all" or extent == Size.of(int(block))
            values = values * (extent if whole else Size.of(int(block)))
            inside = whole
        elif block != "1":
            return None
    number = count(scale)
    if field.axes[1:] and [axis for axis in scale.axes[1:] if axis] != [
        axis for axis in field.axes[1:] if axis and axis in scale.axes[1:]
    ]:
        return None
    total = number * values
    return Blocks(count=number, values=values, scale=scale) if _same(total, count(field)) else None


def packed(field: FieldLayout) -> FieldLayout | None:
    """A field as the bytes that it has. Of two e2m1 values that is one; None where they are no neighbours."""
    if field.bits.known is None or field.bits.known >= BYTE:
        return field
    *axes, last = field.pieces
    if not axes or last[0].extent.known != BYTE // field.bits.known or last[0].stride != field.bits:
        return None
    inner, *outer = last
    pieces = tuple(replace(piece, low=piece.low // 2) for piece in outer) or (replace(inner, extent=Size.of(1)),)
    shape = (*field.shape[:-1], field.shape[-1].floored(2))
    return replace(field, bits=Size.of(BYTE), shape=shape, pieces=(*axes, pieces))


def _same(one: Size, other: Size) -> bool:
    """Equal, `head_dim // 32 * 32` taken as `head_dim`: blocks divide their axis, which the page checks."""
    for name in one.names:
        if quotient := re.fullmatch(r"(\w+) // (\d+)", name):
            one, other = one.replacing(name, Size.of(quotient[1])), other * int(quotient[2])
    return one == other


def value_fields(page: Page) -> tuple[str, ...]:
    """Fields that hold values, not the scales of others: what a store is given."""
    scales = {field.quant.scale for field in page.fields if field.quant is not None}
    return tuple(field.name for field in page.fields if field.name not in scales)


def fields_or_default(page: Page, verb: str, named: tuple[str, ...]) -> tuple[str, ...]:
    """What an operation works on: the fields it names, else the values (store, load) or all (put, get, gather)."""
    if named or verb not in KERNEL_VERBS:
        return named
    return value_fields(page) if verb in ("store", "load") else tuple(field.name for field in page.fields)


def side_by_side(page: Page, names: tuple[str, ...]) -> bool:
    """Whether the bytes of these fields follow each other in every slot."""
    return any(
        record.is_dense and record.fields[start : start + len(names)] == names
        for record in records(page)
        for start in range(len(record.fields))
    )


def unsupported(page: Page, verb: str, names: tuple[str, ...]) -> str | None:
    """What of an operation on these fields no kernel does yet, or None."""
    for name in names:
        field = next(field for field in page.fields if field.name == name)
        if field.dtype not in DTYPES:
            return f"a {verb} of `{name}`, whose dtype is known at load time,"
        if packed(field) is None:
            return f"a {verb} of `{name}`, whose bytes hold values that are no neighbours,"
        quant = field.quant if verb in ("store", "load") else None
        if quant is None:
            if verb in ("store", "load") and DTYPES[field.dtype] < BYTE:
                return f"a {verb} of `{name}`, whose values share bytes and have no `quant`,"
            continue
        if field.dtype not in MAXIMA:
            return f"a {verb} of {field.dtype} codes"
        if quant.scale in ("none", "given"):
            if DTYPES[field.dtype] < BYTE:
                return f"a {verb} of {field.dtype} codes without scales of blocks"
            continue
        blocks = blocks_of(page, field)
        if blocks is None:
            return f"a {verb} of `{name}`, whose blocks are not runs of values in the order of their scales,"
        if DTYPES[field.dtype] < BYTE and blocks.values.known is not None and blocks.values.known % 2:
            return f"a {verb} of `{name}`, of which two blocks share a byte,"
        if blocks.scale.dtype not in ("f32", "e8m0", "e4m3"):
            return f"a {verb} with {blocks.scale.dtype} scales"
    return None
