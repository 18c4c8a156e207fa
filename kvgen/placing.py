"""Placing: the fields of a format to the bytes of a page.

`resolve_page` turns a format (what the values are, and a sequence of planes) into a `Page` for a number of slots, or
says what is wrong with it. What depends on numbers that only load time knows becomes a condition of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TypeVar

from kvgen.expr import Expr, Literal, Name, show
from kvgen.facts import Place
from kvgen.fold import FoldError
from kvgen.origins import origin
from kvgen.page import (
    BYTE,
    Condition,
    FieldLayout,
    Local,
    Page,
    PieceLayout,
    PlaneLayout,
    QuantLayout,
)
from kvgen.problems import InternalError, Label, Problem, Span
from kvgen.remainders import never_multiple
from kvgen.scope import Scope
from kvgen.size import Size, SizeError
from kvgen.spec import Axis, Field, Format, Gap, Ident, Part, Piece, Plane, Quant
from kvgen.types import DTYPES, Int, Text, suggest

T = TypeVar("T")
R = TypeVar("R")

CODES = {
    "KV220": "a dtype that does not exist",
    "KV221": "an axis that cannot be divided",
    "KV222": "a field that is not in the page exactly once",
    "KV223": "a piece of an axis that a field does not have",
    "KV224": "an axis covered twice or not at all",
    "KV225": "an element that is not aligned to its size",
    "KV226": "values that are not whole bytes",
    "KV227": "a number that must be known at build",
    "KV228": "a page of 0 bytes",
    "KV229": "a page that is too large",
    "KV230": "quantisation that its fields do not allow",
    "KV231": "an initial value that the dtype does not have",
}

PAGE_BYTES_MAX = 2**40


@dataclass(frozen=True)
class _Interval:
    """[low, high) of an axis in mixed radix; `high` None is the end of an axis whose length is not known."""

    low: int
    high: int | None


@dataclass
class _Axis:
    name: str | None
    coarse: int
    total: Size  # elements of the undivided axis
    span: Span
    taken: list[_Interval]

    def extent(self) -> Size:
        return self.total.floored(self.coarse)


class Refused(Exception):
    """A page with a problem; the problem is in the list already."""


def resolve_page(scope: Scope, format: Format, slots: Size, problems: list[Problem]) -> Page | None:
    """The page of `slots` slots of a format that has fields. None after adding problems."""
    try:
        return _Resolver(scope, format, slots, problems).page()
    except Refused:
        return None
    except SizeError as error:
        message = f"a page of `{format.name}` has {error}"
        problems.append(Problem("KV229", message, Label(format.name.span), path=format.path))
        return None


def fields_of(scope: Scope, format: Format) -> tuple[Field, ...]:
    """A format's own fields, or those of the format it shares them with."""
    seen = {format.name.text}
    while format.same_fields_as is not None:
        other = next((item for item in scope.spec.formats if item.name == format.same_fields_as), None)
        if other is None or other.name.text in seen:
            return ()
        seen.add(other.name.text)
        format = other
    return format.fields


class _Resolver:
    """One format, one number of slots."""

    def __init__(self, scope: Scope, format: Format, slots: Size, problems: list[Problem]) -> None:
        self.scope, self.format, self.slots, self.problems = scope, format, slots, problems
        self.conditions: list[Condition] = []
        self.locals: list[Local] = []
        self.divisors: dict[str, int] = {}  # of the locals
        self.fields = {field.name.text: field for field in fields_of(scope, format)}
        self.path = f"{format.path}.page"

    def refuse(
        self,
        code: str,
        message: str,
        span: Span,
        help: str | None = None,
        notes: Iterable[str] = (),
        path: str = "",
        labels: tuple[Label, ...] = (),
    ) -> Refused:
        problem = Problem(
            code, message, Label(span), secondary=labels, help=help, notes=tuple(notes), path=path or self.path
        )
        if problem not in self.problems:
            self.problems.append(problem)
        return Refused()

    def all_of(self, judge: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """What `judge` makes of every item; Refused once all are judged, where any of them was."""
        found: list[R] = []
        refused = 0
        for item in items:
            try:
                found.append(judge(item))
            except Refused:
                refused += 1
        if refused:
            raise Refused()
        return found

    # -- numbers

    def number(self, expr: Expr, what: str) -> int:
        """A number that must be known at build, and at least 1."""
        problems: list[Problem] = []
        kind = self.scope.expect(expr, Int, Place(self.path), problems)
        self.problems += [problem for problem in problems if problem not in self.problems]
        if kind is None:
            raise Refused()
        folded = self.fold(expr)
        if not isinstance(folded, Literal):
            message = f"{what} is not known at build"
            raise self.refuse("KV227", message, expr.span, "write a number, or a name with `is`")
        value = folded.value
        assert isinstance(value, int)
        if value < 1:
            raise self.refuse("KV227", f"{what} is {value}, and the least is 1", expr.span)
        return value

    def fold(self, expr: Expr) -> Expr:
        try:
            return self.scope.fold(expr)
        except FoldError as error:
            raise self.refuse("KV217", error.message, error.span) from None

    def require_multiple(self, number: Size, divisor: Size, what: str, field: Field | None = None) -> bool:
        """Whether `number` is a multiple of `divisor`: decided now, or made a condition of load time.

        Args:
            field: what the number is of, if not of the format.
        """
        step = divisor.known
        if step is None:
            self.condition(number, divisor, what, field)
            return True
        if number.divisible_by(step, self.divisors) or self.is_required(number, step):
            return True
        if number.known is not None or never_multiple(self.scope, number, step, self.divisors):
            return False
        self.condition(number, divisor, what, field)
        return True

    def whatever(self, number: Size, step: int) -> tuple[str, ...]:
        """Why a number that is not a multiple of `step` is none for any config; nothing where it is known."""
        why = None if number.known is not None else never_multiple(self.scope, number, step, self.divisors)
        return () if why is None else (why,)

    def is_required(self, number: Size, step: int) -> bool:
        """Whether a condition of load time says so already."""
        steps = [
            other.divisor.known for other in self.conditions if other.number == number and other.divisor is not None
        ]
        return any(other is not None and other % step == 0 for other in steps)

    def condition(self, number: Size, divisor: Size | None, what: str, field: Field | None = None) -> None:
        """Add what load time checks, each once, at the first field that needs it."""
        if not any((other.number, other.divisor, other.what) == (number, divisor, what) for other in self.conditions):
            place = self.format if field is None else field
            where = origin(place.path, place.name.span)
            self.conditions.append(Condition(number=number, divisor=divisor, what=what, origin=where))

    # -- fields

    def bits(self, field: Field) -> tuple[str, Size]:
        """The dtype as it is printed, and the bits of an element."""
        name = field.dtype.text
        if name in DTYPES:
            return name, Size.of(DTYPES[name])
        entity = self.scope.entities.get(name)
        if entity is not None and entity.value is not None and entity.value.value in DTYPES:
            name = str(entity.value.value)
            return name, Size.of(DTYPES[name])
        words = entity.type.words if entity is not None and isinstance(entity.type, Text) else None
        odd = [word for word in words or () if word not in DTYPES]
        if words is None or odd:
            known = f"the dtypes are {', '.join(DTYPES)}"
            message = f"`{name}` can be `{odd[0]}`, which is no dtype" if odd else f"unknown dtype `{name}`"
            help = suggest(odd[0] if odd else name, DTYPES) or known
            raise self.refuse("KV220", message, field.dtype.span, help, path=field.path)
        sizes = {DTYPES[word] for word in words}
        if min(sizes) < BYTE and len(sizes) > 1:
            raise self.refuse("KV220", f"`{name}` mixes e2m1 with whole bytes", field.dtype.span, path=field.path)
        bits = Size.of(sizes.pop()) if len(sizes) == 1 else Size.of(f"ITEM_BYTES[{name}]") * BYTE
        return name, bits

    def axis(self, field: Field, axis: Axis) -> _Axis:
        total = self.extent(field, axis)
        coarse = 1 if axis.coarse is None else self.number(axis.coarse, "the divisor of an axis")
        what = axis.name or "an axis"
        if not self.require_multiple(total, Size.of(coarse), what, field):
            message = f"`{what}` cannot be divided into blocks of {coarse}"
            known = total.known
            if known is None:
                raise self.refuse("KV221", message, axis.span, notes=self.whatever(total, coarse), path=field.path)
            note = f"{known} = {known // coarse} x {coarse} + {known % coarse}, so the last block would be short"
            divisors = [n for n in range(2, min(known, 4096) + 1) if known % n == 0]
            close = " or ".join(str(n) for n in sorted(divisors, key=lambda n: (abs(n - coarse), n))[:2])
            help = f"use a block that divides {known}, such as {close}" if close else None
            entity = self.scope.entities.get(axis.name or "")
            labels = (Label(entity.span, f"`{axis.name}` is {known}"),) if entity is not None else ()
            raise self.refuse("KV221", message, axis.span, help, (note,), field.path, labels)
        return _Axis(axis.name, coarse, total, axis.span, [])

    def extent(self, field: Field, axis: Axis) -> Size:
        problems: list[Problem] = []
        place = Place(field.path, frozenset({"layer"}), self.scope.layered_facts)
        kind = self.scope.expect(axis.extent, Int, place, problems)
        if kind is None:
            self.problems += [problem for problem in problems if problem not in self.problems]
            raise Refused()
        folded = self.fold(axis.extent)
        if isinstance(folded, Literal):
            assert isinstance(folded.value, int)
            if folded.value < 1:
                message = f"an axis of {folded.value} elements; the least is 1"
                raise self.refuse("KV221", message, axis.span, path=field.path)
            return Size.of(folded.value)
        assert isinstance(axis.extent, Name)
        size = Size.of(axis.extent.name)
        assert isinstance(kind, Int)
        if kind.high < 1:
            message = f"`{axis.extent.name}` is never above 0, and an axis has 1 element at least"
            raise self.refuse("KV221", message, axis.span, path=field.path)
        if kind.low < 1:
            self.condition(size, None, axis.extent.name)
        return size

    # -- the page

    def page(self) -> Page:
        placed: dict[str, Span] = {}
        planes: list[PlaneLayout] = []
        end, align = Size(), 1  # the next free bit, and the multiple of bytes it moves up to where that is not known
        refused = 0
        for item in self.format.page:
            try:
                if isinstance(item, Gap):
                    end, align = self.moved(item, end, align)
                    continue
                first = next((part.field.text for part in item.put if isinstance(part, Part)), "plane")
                start = self.named(f"{first}_offset", end, align)
                plane = self.plane(item, start, placed)
            except Refused:
                refused += 1
                continue
            planes.append(plane)
            end, align = start + plane.nbits, 1
        if refused:
            raise Refused()
        end = self.named("page_bytes", end, align) if align > 1 else end
        if end == Size():
            raise self.refuse("KV228", f"a page of `{self.format.name}` has 0 bytes", self.format.name.span)
        self.all_of(self.nowhere, [field for field in self.fields.values() if field.name.text not in placed])
        if not self.require_multiple(end, Size.of(BYTE), f"bits of a page of {self.format.name}"):
            raise self.refuse("KV226", f"a page of `{self.format.name}` is not whole bytes", self.format.name.span)
        page_bytes = end.divided_by(BYTE)
        if page_bytes.known is not None and page_bytes.known > PAGE_BYTES_MAX:
            message = f"a page of `{self.format.name}` has {page_bytes.known:,} bytes; the limit is {PAGE_BYTES_MAX:,}"
            raise self.refuse("KV229", message, self.format.name.span)
        laid = [field for plane in planes for field in plane.fields]
        quantised = [field for field in self.fields.values() if field.quant is not None]
        judge = [lambda field=field: self.check_alignment(field, page_bytes) for field in laid]
        self.all_of(
            lambda rule: rule(), [*judge, *(lambda field=field: self.check_scale(field) for field in quantised)]
        )
        return Page(
            format=self.format.name.text,
            origin=self.format.path,
            slots=self.slots,
            planes=tuple(planes),
            page_bytes=page_bytes,
            locals=tuple(self.locals),
            conditions=tuple(self.conditions),
        )

    def nowhere(self, field: Field) -> None:
        """KV222: at the field, or at the format that has the fields of another."""
        span = self.format.name.span if self.format.same_fields_as is not None else field.name.span
        help = f"put it into a plane of `{self.format.name}`, or leave it out of `fields`"
        raise self.refuse("KV222", f"`{field.name}` is nowhere in the page of `{self.format.name}`", span, help)

    def moved(self, gap: Gap, end: Size, align: int) -> tuple[Size, int]:
        """The next free bit after a gap of the page."""
        if gap.kind == "pad":
            return self.named(f"pad_{len(self.locals)}_offset", end, align) + self.number(gap.amount, "`pad`") * BYTE, 1
        amount = self.number(gap.amount, "`align`")
        if align % amount and amount % align:  # one after the other, which is less than both at once
            end, align = self.named(f"pad_{len(self.locals)}_offset", end, align), 1
        if align == 1 and end.divisible_by(amount * BYTE, self.divisors):
            return end, 1
        if end.known is not None:
            return end + -end.known % (amount * BYTE), 1
        return end, lcm(align, amount)

    def named(self, name: str, end: Size, align: int) -> Size:
        """A bit of the page under a name of its own, where it is too long to repeat or has to be rounded up."""
        if align == 1 and len(end.terms) <= 1:
            return end
        at_least = end.divided_by(BYTE)
        self.locals.append(Local(name=name, at_least=at_least, align=align))
        self.divisors[name] = align if align > 1 else at_least.divisor(self.divisors)
        return Size.of(name) * BYTE

    def gap(self, gap: Gap, end: Size) -> Size:
        """Bits of a gap that begins at bit `end` of its record."""
        amount = self.number(gap.amount, f"`{gap.kind}`") * BYTE
        if gap.kind == "pad":
            return Size.of(amount)
        if end.known is not None:
            return Size.of(-end.known % amount)
        if end.divisible_by(amount):
            return Size()
        return Size.of(f"(-({end.divided_by(BYTE)}) % {amount // BYTE})") * BYTE

    def plane(self, plane: Plane, start: Size, placed: dict[str, Span]) -> PlaneLayout:
        inside = self.all_of(
            lambda part: self.part(part, placed), [part for part in plane.put if isinstance(part, Part)]
        )
        if not inside:
            help = "a gap between planes is an item of `page`, as in `{pad: 4}`"
            raise self.refuse("KV222", "a plane with no field in it", plane.span, help)
        each = [self.outer(piece, [(field, axes) for field, axes, _, _, _ in inside]) for piece in plane.each]
        fields: list[FieldLayout] = []
        end = Size()
        laid = iter(inside)
        rests: list[tuple[list[list[tuple[_Interval, Size, Size]]], Size, Size]] = []
        offsets: list[Size] = []
        for part in plane.put:
            if isinstance(part, Gap):
                end = end + self.gap(part, end)
                continue
            field, axes, own, bits, _ = next(laid)
            pieces, nbits = self.dense(field, axes, own, bits)
            if not end.divisible_by(BYTE):
                message = f"`{field.name}` does not begin on a whole byte of its record"
                raise self.refuse("KV226", message, part.field.span, "e2m1 values go in pairs")
            rests.append((pieces, nbits, bits))
            offsets.append(end)
            end = end + nbits
        if not end.divisible_by(BYTE):
            message = "the record of a plane is not whole bytes"
            raise self.refuse("KV226", message, plane.span, "e2m1 values go in pairs; add a `pad` or another value")
        strides: list[Size] = []
        stride = end
        for _, extent in reversed(each):
            strides.append(stride)
            stride = stride * extent
        strides.reverse()
        for (field, axes, _, bits, dtype), (pieces, nbits, _), offset in zip(inside, rests, offsets, strict=True):
            for (piece, extent), step in zip(each, strides, strict=True):
                for position, axis in enumerate(axes):
                    if axis.name == piece.axis.text and position == _first(axes, piece.axis.text):
                        pieces[position].append((_interval(piece, self, axis), extent, step))
            fields.append(self.field(field, dtype, axes, bits, pieces, start + offset, offset, nbits))
        return PlaneLayout(
            offset=start,
            each=tuple(extent for _, extent in each),
            each_names=tuple(_piece_text(piece) for piece, _ in each),
            record_bits=end,
            fields=tuple(fields),
        )

    def part(self, part: Part, placed: dict[str, Span]) -> tuple[Field, list[_Axis], Part, Size, str]:
        name = part.field.text
        field = self.fields.get(name)
        if field is None:
            message = f"`{self.format.name}` has no field `{name}`"
            raise self.refuse("KV222", message, part.field.span, suggest(name, self.fields))
        if name in placed:
            message = f"`{name}` is in the page twice"
            raise self.refuse("KV222", message, part.field.span, labels=(Label(placed[name], "also here"),))
        placed[name] = part.field.span
        dtype, bits = self.bits(field)
        slot = _Axis("slot", 1, self.slots, part.field.span, [])
        axes = [slot, *(self.axis(field, axis) for axis in field.axes)]
        return field, axes, part, bits, dtype

    def outer(self, piece: Piece, records: list[tuple[Field, list[_Axis]]]) -> tuple[Piece, Size]:
        """One piece of `each`: taken from the axis of that name in every field of the record."""
        extents = []
        for field, axes in records:
            position = _first(axes, piece.axis.text)
            if position is None:
                names = ", ".join(f"`{axis.name}`" for axis in axes if axis.name)
                message = f"`{field.name}` has no axis `{piece.axis}`"
                note = f"every field of a plane has the axes of its `each`; those of `{field.name}` are {names}"
                help = suggest(piece.axis.text, [axis.name for axis in axes if axis.name])
                raise self.refuse("KV223", message, piece.axis.span, help, (note,))
            extents.append(self.take(piece, axes[position], field.name))
        if any(extent != extents[0] for extent in extents):
            raise InternalError(f"{self.path}: `{piece.axis}` differs between the fields of a plane")
        return piece, extents[0]

    def take(self, piece: Piece, axis: _Axis, field: Ident) -> Size:
        """Mark the piece of the axis as placed; its extent."""
        interval = _interval(piece, self, axis)
        if interval.low % axis.coarse:
            message = f"one value of `{field}` stands for {axis.coarse} of `{piece.axis}`"
            raise self.refuse("KV224", message, piece.span, f"write `{piece.axis}//{axis.coarse}`")
        if piece.count is not None and interval.high == interval.low:
            raise self.refuse("KV224", f"`{_piece_text(piece)}` has one value only", piece.span, "leave it out")
        for other in axis.taken:
            if _overlap(interval, other):
                raise self.refuse("KV224", f"`{piece.axis}` is covered twice", piece.span)
        top = axis.total if interval.high is None else Size.of(interval.high)
        for divisor in (interval.low, interval.high or 1):
            if not self.require_multiple(axis.total, Size.of(divisor), piece.axis.text, self.fields.get(field.text)):
                has = "" if axis.total.known is None else f" has {axis.total} elements, which"
                what = f"a page of {axis.total} slots" if piece.axis.text == "slot" else f"`{piece.axis}`{has}"
                message, notes = f"{what} cannot be cut into pieces of {divisor}", self.whatever(axis.total, divisor)
                raise self.refuse("KV221", message, piece.span, notes=notes)
        axis.taken.append(interval)
        return top.floored(interval.low)

    def dense(
        self, field: Field, axes: list[_Axis], part: Part, bits: Size
    ) -> tuple[list[list[tuple[_Interval, Size, Size]]], Size]:
        """The pieces left inside a record, dense, last axis fastest (or as the part orders them)."""
        left = [(position, interval) for position, axis in enumerate(axes) for interval in self.left(axis, part)]
        if part.order is not None:
            left = self.ordered(part, axes, left)
        pieces: list[list[tuple[_Interval, Size, Size]]] = [[] for _ in axes]
        stride = bits
        for position, interval in reversed(left):
            axis = axes[position]
            top = axis.total if interval.high is None else Size.of(interval.high)
            extent = top.floored(interval.low)
            if stride.known == BYTE // 2:  # e2m1: two to a byte, so the fastest piece is cut into pairs
                if not self.require_multiple(extent, Size.of(2), axis.name or f"an axis of {field.name}", field):
                    message = f"`{field.name}` has an odd number of e2m1 values in a row; two make a byte"
                    raise self.refuse("KV226", message, axis.span, notes=self.whatever(extent, 2), path=field.path)
                pieces[position].append((_Interval(interval.low, interval.low * 2), Size.of(2), stride))
                interval = _Interval(interval.low * 2, interval.high)
                extent, stride = top.floored(interval.low), Size.of(BYTE)
            pieces[position].append((interval, extent, stride))
            stride = stride * extent
        return pieces, stride

    def left(self, axis: _Axis, part: Part) -> list[_Interval]:
        """What of an axis `each` has not taken, outermost first."""
        found = []
        low = axis.coarse
        for taken in sorted(axis.taken, key=lambda interval: (interval.low, interval.high or 0)):
            if taken.low > low:
                found.append(_Interval(low, taken.low))
            if taken.high is None:
                break
            low = taken.high
        else:
            if axis.total.known is None or axis.total.known > low or not axis.taken:
                found.append(_Interval(low, axis.total.known))
        if axis.name == "slot" and found and self.slots.known != 1:
            message = f"`each` does not cover every slot of `{part.field}`"
            raise self.refuse("KV224", message, part.field.span, "every piece of `slot` belongs in `each`")
        return [] if axis.name == "slot" else found[::-1]

    def ordered(self, part: Part, axes: list[_Axis], left: list[tuple[int, _Interval]]) -> list[tuple[int, _Interval]]:
        """The pieces of a part in the order the author gave, which must cover exactly what is left."""
        assert part.order is not None
        found: list[tuple[int, _Interval]] = []
        for piece in part.order:
            position = _first(axes, piece.axis.text)
            if piece.axis.text == "slot":
                message = f"`slot` is in the order of `{part.field}`"
                raise self.refuse("KV223", message, piece.span, "every piece of `slot` belongs in `each`")
            if position is None:
                names = [axis.name for axis in axes if axis.name not in (None, "slot")]
                help = suggest(piece.axis.text, [str(name) for name in names])
                message = f"`{part.field}` has no axis `{piece.axis}`"
                raise self.refuse("KV223", message, piece.axis.span, help)
            self.take(piece, axes[position], part.field)
            found.append((position, axes[position].taken[-1]))
        for position, axis in enumerate(axes):
            if axis.name == "slot":
                continue
            wanted = _joined(interval for at, interval in left if at == position)
            given = _joined(interval for at, interval in found if at == position)
            if wanted != given:
                name = axis.name or "a plain number"
                message = f"the order of `{part.field}` does not cover `{name}` exactly once"
                raise self.refuse("KV224", message, part.field.span)
        return found

    def field(
        self,
        field: Field,
        dtype: str,
        axes: list[_Axis],
        bits: Size,
        pieces: list[list[tuple[_Interval, Size, Size]]],
        offset: Size,
        record_offset: Size,
        nbits: Size,
    ) -> FieldLayout:
        laid = []
        for axis, own in zip(axes, pieces, strict=True):
            inner_first = sorted(own, key=lambda item: item[0].low)
            laid.append(
                tuple(
                    PieceLayout(low=interval.low // axis.coarse, extent=extent, stride=stride)
                    for interval, extent, stride in inner_first
                )
                or (PieceLayout(low=1, extent=Size.of(1), stride=nbits),)
            )
        quant = field.quant and self.quantisation(field, field.quant)
        return FieldLayout(
            name=field.name.text,
            origin=field.path,
            dtype=dtype,
            bits=bits,
            axes=tuple(axis.name for axis in axes),
            shape=tuple(axis.extent() for axis in axes),
            pieces=tuple(laid),
            offset=offset,
            record_offset=record_offset,
            nbits=nbits,
            quant=quant,
            init=self.initial(field, dtype),
        )

    def quantisation(self, field: Field, quant: Quant) -> QuantLayout:
        """As the spec says; an e8m0 scale is a power of two whatever it says."""
        scale = self.fields.get(quant.scale.text)
        powers = scale is not None and scale.dtype.text == "e8m0"
        return QuantLayout(
            scale=quant.scale.text,
            blocks=() if scale is None else tuple(self.blocks(field, scale)),
            outer=quant.outer,
            floor=str(quant.floor),
            rounding="pow2" if powers else quant.rounding,
            code=quant.code,
        )

    def blocks(self, field: Field, scale: Field) -> Iterator[str]:
        """For each axis of the codes, the values that share an element of the scale."""
        left = list(scale.axes)
        for axis in field.axes:
            own = next((other for other in left if axis.name and other.extent == axis.extent), None)
            if own is None:
                yield "all"
                continue
            left.remove(own)
            fine, coarse = (
                1 if part.coarse is None else self.number(part.coarse, "the divisor of an axis") for part in (axis, own)
            )
            yield str(coarse // fine)

    # -- rules

    def check_alignment(self, field: FieldLayout, page_bytes: Size) -> None:
        """KV225: every element of every slot of every page starts on a multiple of its size."""
        if field.bits.known is not None and field.bits.known <= BYTE:
            return
        span = self.fields[field.name].name.span
        ahead, behind = "in front of it", "at the end of its record"
        steps = [(f"offset of {field.name}", field.offset, ahead)]
        steps.append((f"offset of {field.name}", field.record_offset, ahead))  # a split buffer counts from the plane
        steps += [(f"stride of {field.name}", piece.stride, behind) for pieces in field.pieces for piece in pieces]
        steps.append((f"page of {field.name}", page_bytes * BYTE, "at the end of the page"))
        for what, bits, where in steps:
            size, number = field.bits.divided_by(BYTE), bits.divided_by(BYTE)
            if not self.require_multiple(number, size, what, self.fields[field.name]):
                message = f"`{field.name}` is not aligned: {what.split(' ')[0]} {number} is no multiple of {size}"
                help = f"put `{{align: {size}}}` {where}"
                notes = (f"{field.dtype} has {size} bytes", *self.whatever(number, size.known or 1))
                raise self.refuse("KV225", message, span, help, notes)

    def check_scale(self, field: Field) -> None:
        """KV230: codes of a narrow dtype; the scale a field whose axes are those of the codes, coarser or copies."""
        codes = ("e4m3", "e5m2", "e2m1", "i8")
        quant = field.quant
        assert quant is not None

        def refuse(message: str, span: Span, help: str | None = None, notes: Iterable[str] = ()) -> Refused:
            return self.refuse("KV230", message, span, help, notes, f"{field.path}.quant")

        if field.dtype.text not in codes:
            help = f"codes are one of {', '.join(codes)}"
            raise refuse(f"`{field.name}` is {field.dtype}, which is not a code", field.dtype.span, help)
        name = quant.scale.text
        if name == "none" and (quant.outer or quant.floor or quant.rounding != "exact" or quant.code != "reciprocal"):
            raise refuse("a cast without a scale has nothing to say but `scale: none`", quant.scale.span)
        if name in ("given", "none"):
            return
        scale = self.fields.get(name)
        if scale is None:
            message = f"no field `{name}` for the scales of `{field.name}`"
            others = [other for other in self.fields if other != field.name.text]
            help = suggest(name, others) or "name a field of the format, or write `given` or `none`"
            raise refuse(message, quant.scale.span, help)
        if scale is field:
            raise refuse(f"`{name}` is its own scale", quant.scale.span)
        if scale.dtype.text not in ("f32", "f16", "bf16", "e4m3", "e8m0"):
            raise refuse(
                f"`{name}` is {scale.dtype}, which is not a scale", scale.dtype.span, "use f32, f16, bf16, e4m3 or e8m0"
            )
        others = [
            other for other in self.fields.values() if other.quant is not None and other.quant.scale == quant.scale
        ]
        if others[0] is not field:
            raise refuse(f"`{name}` is the scale of `{others[0].name}` already", quant.scale.span)
        if scale.quant is not None:
            raise refuse(f"`{name}`, the scale of `{field.name}`, is quantised itself", scale.name.span)
        own = [(axis.name, axis.extent) for axis in field.axes]
        used: set[int] = set()
        for axis in scale.axes:
            matches = [
                i for i, item in enumerate(own) if item == (axis.name, axis.extent) and i not in used and axis.name
            ]
            if matches:
                used.add(matches[0])
                fine, coarse = (
                    1 if item.coarse is None else self.number(item.coarse, "the divisor of an axis")
                    for item in (field.axes[matches[0]], axis)
                )
                if coarse % fine:
                    message = (
                        f"a value of `{name}` is for {coarse} of `{axis.name}`, and one of `{field.name}` for {fine}"
                    )
                    raise refuse(message, axis.span)
            elif axis.name is not None:
                message = f"`{name}` has the axis `{axis.name}`, which `{field.name}` does not have"
                names = ", ".join(f"`{item}`" for item, _ in own if item)
                raise refuse(message, axis.span, notes=(f"the axes of `{field.name}` are {names}",) if names else ())
        copies = [axis for axis in scale.axes if axis.name is None and axis.extent != Literal(value=1, span=axis.span)]
        if copies and not used:
            count = show(copies[0].extent)
            message = f"`{name}` shares no axis with `{field.name}`: its {count} values would be copies of one scale"
            block = next((item for item, _ in own if item), None)
            help = (
                f"write the blocks as `{block}//n`"
                if block
                else "give the axis a name, and write its blocks as `name//n`"
            )
            raise refuse(message, copies[0].span, help)

    def initial(self, field: Field, dtype: str) -> str | None:
        """KV231: a value of the dtype, which is known at build."""
        if field.init is None or field.init == "0":
            return None  # fresh memory is zero
        limits = _LIMITS.get(dtype)
        infinite = field.init == "-inf"
        fits = limits is not None and (infinite or limits[0] <= Fraction(field.init) <= limits[1])
        if not fits or ((infinite or "/" in field.init) and dtype not in ("bf16", "f16", "f32")):
            why = f"{dtype} has no such value" if dtype in DTYPES else f"`{dtype}` is not known at build"
            message = f"`{field.name}` cannot start as {field.init}: {why}"
            raise self.refuse("KV231", message, field.name.span, path=field.path)
        return field.init


_LIMITS = {  # least and greatest value that a field can start as
    "bf16": (-(2**127), 2**127),
    "f16": (-65504, 65504),
    "f32": (-(2**127), 2**127),
    "u8": (0, 255),
    "i8": (-128, 127),
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
}


def _first(axes: list[_Axis], name: str) -> int | None:
    """The axis of that name; of two alike, the first."""
    return next((position for position, axis in enumerate(axes) if axis.name == name), None)


def _interval(piece: Piece, resolver: _Resolver, axis: _Axis) -> _Interval:
    low = 1 if piece.low is None else resolver.number(piece.low, "the size of a piece")
    if piece.count is None:
        return _Interval(low, axis.total.known)
    return _Interval(low, low * resolver.number(piece.count, "the size of a piece"))


def _piece_text(piece: Piece) -> str:
    low = "" if piece.low is None else f"//{show(piece.low)}"
    return f"{piece.axis}{low}{'' if piece.count is None else f'%{show(piece.count)}'}"


def _overlap(one: _Interval, other: _Interval) -> bool:
    return (other.high is None or one.low < other.high) and (one.high is None or other.low < one.high)


def _joined(intervals: Iterable[_Interval]) -> list[_Interval]:
    """Intervals sorted, those that meet made one."""
    found: list[_Interval] = []
    for interval in sorted(intervals, key=lambda item: item.low):
        if found and found[-1].high == interval.low:
            found[-1] = _Interval(found[-1].low, interval.high)
        else:
            found.append(interval)
    return found
