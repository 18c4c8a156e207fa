"""Kernels of one format and verb: how the values of a slot become bytes, and back, as the templates print it.

A kernel takes the slots of one layer; a program takes TOKENS of them. Fields that lie together share a row pointer, and
each field is one block of statements: loaded, converted, stored. The torch twin of a kernel does the same.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvgen.page import BYTE, FieldLayout, Page, QuantLayout
from kvgen.pysource import (
    STEP,
    WIDTH,
    Chain,
    Code,
    Group,
    Keyword,
    Raw,
    call,
    chain,
    flat,
    quoted,
    returned,
    statement,
)
from kvgen.size import Size
from kvgen.views import BlockOfKernelView, CoderView, KernelView, QuantiserView
from kvgen.walk import MAXIMA, Blocks, Walk, blocks_of, count, element_walk, is_dense, packed, slot_walk

IN_KERNEL = STEP  # columns in front of a statement of a kernel
IN_FUNCTION = STEP
FLOATS = ("bf16", "f16", "f32")
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
TORCH_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e8m0": "float8_e8m0fnu",
    "e2m1": "uint8",  # two to a byte
    "u8": "uint8",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
}


UNSPECIALISED = (  # one kernel for all values
    *("slots_stride", "count", "first_slot", "num_slots"),
    *("lengths_stride", "table_stride", "table_step", "table_pages", "num_pages", "max_length", "blocks"),
)
UNALIGNED = ("slots_ptr", "lengths_ptr", "table_ptr")  # one kernel for all addresses


TAKEN = (  # names that kernels and their twins use themselves
    *("begin", "block", "codes", "column", "count", "earlier", "element", "entry", "first", "first_slot", "inside"),
    *("kept", "length", "lengths", "max_length", "memory", "num_pages", "num_slots", "own", "page", "page_ptr"),
    *("position", "request", "row", "scales", "self", "slot", "slots", "start", "table", "table_column", "tl"),
    *("blocks", "dtypes", "float", "pair", "range", "token", "tokens", "torch", "triton", "value", "values"),
)


WIDE = 16  # values of a stretch, from which on accesses are as wide as they can be

CONSTANTS = ("PAGE_SLOTS", "PAGE_BYTES", "PAGE_SIZE", "TOKENS", "NATIVE")  # that kernels have whatever the spec says


def local_name(name: str) -> str:
    """What a field is called in code: its name, or `its_name` where that has another meaning there."""
    taken = (
        name in TAKEN
        or name.startswith("its_")
        or name.endswith(("_ptr", "_stride", "_row", "_given"))
        or keyword.iskeyword(name)
    )
    return f"its_{name}" if taken else name


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a kernel is for: a page, and the name it goes by."""

    page: Page
    name: str
    moved: bool  # whether its stride is decided at load
    divided: bool  # whether its planes may be tensors of their own

    @property
    def needs_constants(self) -> bool:
        return self.moved or not self.page.is_constant

    @property
    def entry(self) -> str:
        """What holds a buffer of a layer."""
        return "_Owned" if self.divided else "_Entry"

    def plane_of(self, name: str) -> str:
        """The plane of a field, which is called as its first one."""
        plane = next(plane for plane in self.page.planes if any(field.name == name for field in plane.fields))
        return plane.fields[0].name

    def size(self, size: Size) -> Code:
        """A size as code of a kernel: load-time names are its constants."""
        if size.known is not None:
            return Raw(str(size.known))
        products = tuple(Raw(_constants(product)) for product in size.products)
        return products[0] if len(products) == 1 else Chain(("+",) * (len(products) - 1), products)

    def operand(self, size: Size) -> str:
        """The same where a factor stands."""
        code = self.size(size)
        text = flat(code)
        return text if re.fullmatch(r"\w+", text) else f"({text})"

    def page_bytes(self, name: str) -> str:
        """From one page to the next in the memory of a field."""
        if self.divided:
            return f"{self.plane_of(name).upper()}_PAGE_BYTES"
        return "PAGE_BYTES" if self.moved else self.operand(self.page.page_bytes)

    @property
    def page_slots(self) -> str:
        return self.operand(self.page.slots)

    def constants(self, planes: tuple[str, ...]) -> tuple[str, ...]:
        """The names of its constants, as `Page.constants` and the pool have them."""
        own = ("PAGE_SLOTS", *(() if planes else ("PAGE_BYTES",)), *number_names(self.page))
        return (*(own if self.needs_constants else ()), *(f"{plane.upper()}_PAGE_BYTES" for plane in planes))


def number_names(page: Page) -> tuple[str, ...]:
    """The constants that stand for load-time names in sizes of the page, slots left out."""
    sizes = [page.page_bytes, *(local.at_least for local in page.locals)]
    for field in page.fields:
        sizes += [field.offset, field.bits, *field.shape]
        sizes += [size for pieces in field.pieces for piece in pieces for size in (piece.extent, piece.stride)]
    found = {name for size in sizes for text in size.names for name in re.findall(r"[A-Z]\w*", _constants(text))}
    return tuple(sorted(found - set(CONSTANTS)))


def number_value(name: str) -> str:
    """What a constant is in the function that makes the page."""
    if name.startswith("ITEM_BYTES_OF_"):
        return f"ITEM_BYTES[{name.removeprefix('ITEM_BYTES_OF_').lower()}]"
    return name.removeprefix("ITS_").lower()


def _constants(text: str) -> str:
    """`2 * slots * heads` as `2 * PAGE_SLOTS * HEADS`."""
    text = re.sub(r"ITEM_BYTES\[(\w+)\]", r"item_bytes_of_\1", text)
    return re.sub(r"[a-z]\w*", lambda name: _constant(name[0]), text)


def _constant(name: str) -> str:
    if name in ("slots", "page_bytes"):
        return {"slots": "PAGE_SLOTS", "page_bytes": "PAGE_BYTES"}[name]
    upper = name.upper()
    return f"ITS_{upper}" if upper in CONSTANTS or upper.startswith("ITS_") or upper.endswith("_PAGE_BYTES") else upper


def in_constants(size: Size) -> str:
    """A size as code that has an entry of the pool."""
    return re.sub(r"[A-Z]\w*", lambda name: f'entry.page.constants["{name[0]}"]', _constants(str(size)))


def integer_dtype(field: FieldLayout) -> str:
    """The integers of the size of its elements, as which they are copied."""
    return INTEGERS[(field.bits.known or 0) // BYTE]


def plain_dtype(field: FieldLayout) -> str:
    """What values that are stored as they come are read as; codes as bytes."""
    return "uint8" if field.dtype in ("e4m3", "e5m2", "e8m0") else TORCH_DTYPES[field.dtype]


def walked(target: Target, walk: Walk, index: str) -> Code:
    """The walk of an index whose steps reach up to its end."""
    terms: list[Code] = []
    for step in walk:
        term: Code = Raw(index)
        if step.low != Size.of(1):
            term = chain("//", term, Raw(target.operand(step.low)))
        if step is not walk[-1]:
            term = chain("%", term, Raw(target.operand(step.extent)))
        if step.stride != Size.of(1):
            term = chain("*", term, Raw(target.operand(step.stride)))
        terms.append(term)
    if not terms:
        return Raw(index)
    whole = terms[-1]
    for term in reversed(terms[:-1]):
        whole = chain("+", whole, term)
    return whole


def sum_of(terms: Sequence[str]) -> Code:
    return Chain(("+",) * (len(terms) - 1), tuple(map(Raw, terms)))


def slot_row(target: Target, field: FieldLayout) -> tuple[str, ...]:
    """Where the row of a field begins for each slot, in bytes from the memory's start, its offset left out: a sum."""
    walk = slot_walk(field)
    page, page_bytes = target.page, target.page_bytes(field.name)
    is_fixed = not target.moved and not target.divided
    if is_fixed and len(walk) == 1 and walk[0].stride * page.slots == page.page_bytes:
        return (f"slot * {target.operand(walk[0].stride)}",)
    row = [f"slot // {target.page_slots} * {page_bytes}" if page.slots.known != 1 else f"slot * {page_bytes}"]
    for step in walk:
        low = "" if step.low == Size.of(1) else f" // {target.operand(step.low)}"
        stride = "" if step.stride == Size.of(1) else f" * {target.operand(step.stride)}"
        row.append(f"slot{low} % {target.operand(step.extent)}{stride}")
    return tuple(row)


# -- kernels


class KernelMaker:
    """The kernels of a module, each made once, and the ways of making codes that they share."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, str, tuple[str, ...]], KernelView] = {}
        self.quantisers: dict[tuple, QuantiserView] = {}
        self.coders: dict[tuple, CoderView] = {}

    def kernel(self, verb: str, target: Target, names: tuple[str, ...], space_page: str = "") -> KernelView:
        key = (verb, target.name, names)
        if key not in self.kernels:
            base = f"_{verb}_{target.name}"
            taken = {view.twin for view in self.kernels.values()}
            if base in taken:
                base += f"_{'_'.join(names)}"
            while base in taken:
                base += "_"
            self.kernels[key] = _Kernel(self, verb, target, names).view(base, space_page)
        return self.kernels[key]

    def quantiser(self, page: Page, field: FieldLayout, scale: FieldLayout) -> QuantiserView:
        quant = field.quant
        assert quant is not None
        rule = (field.dtype, scale.dtype, quant.floor, quant.rounding, quant.code, quant.outer)
        if rule not in self.quantisers:
            name = _unused(f"_quantise_{field.name}", page, self.quantisers.values())
            self.quantisers[rule] = _quantiser_view(name, field.dtype, scale.dtype, quant)
        return self.quantisers[rule]

    def coder(self, page: Page, field: FieldLayout) -> CoderView:
        """For the scale that a store is given."""
        quant = field.quant
        assert quant is not None
        rule = (field.dtype, quant.code)
        if rule not in self.coders:
            name = _unused(f"_code_{field.name}", page, self.coders.values())
            what = "divided by" if quant.code == "divide" else "times the inverse of"
            self.coders[rule] = CoderView(
                name=name,
                kernel=name.replace("_code", "_coded", 1),
                doc=f"{field.dtype} codes of values {what} a scale that is given.",
                kernel_parameters=f"x, scale{_NATIVE if _native(field.dtype) else ''}",
                code=f"_{field.dtype}_code",
                codes=f"_{field.dtype}_codes",
                native=", NATIVE" if _native(field.dtype) else "",
                has_division=quant.code == "divide",
            )
        return self.coders[rule]


_NATIVE = ", NATIVE: tl.constexpr"


def _unused(name: str, page: Page, views: Iterable[QuantiserView] | Iterable[CoderView]) -> str:
    taken = {view.name for view in views}
    while name in taken:
        name += f"_{page.format}"
    return name


def _native(*dtypes: str) -> bool:
    """Whether some of these is made by the instruction of a device, where there is one."""
    return "e4m3" in dtypes


def _quantiser_view(name: str, dtype: str, scale: str, quant: QuantLayout) -> QuantiserView:
    floor = Fraction(quant.floor)
    power = ", a power of two" if quant.rounding == "pow2" else ""
    over = ", over a scale that is given" if quant.outer else ""
    ratio, ratios = "largest", "largest"
    if floor:
        ratio = f"tl.maximum(largest, {float(floor)!r})"
    ratio, ratios = f"tl.div_rn({ratio}, {MAXIMA[dtype]}.0)", f"{ratios} / torch.full_like(largest, {MAXIMA[dtype]}.0)"
    if quant.outer:
        ratio, ratios = f"tl.div_rn({ratio}, outer)", f"{ratios} / outer"
    whole, wholes = ("_e4m3_value(stored)", "stored.view(torch.float8_e4m3fn).float()")
    if scale != "e4m3":
        whole, wholes = "stored", "stored"
    has_whole = scale == "e4m3" or quant.outer
    kept, kepts = ("stored", "stored") if has_whole else ("scale", "scales")
    is_power = scale == "e8m0"
    return QuantiserView(
        name=name,
        kernel=name.replace("_quantise", "_quantised", 1),
        doc=f"{dtype} codes and the {scale} scale of each block{power}{over}.",
        kernel_parameters=f"x{', outer' if quant.outer else ''}{_NATIVE if _native(dtype, scale) else ''}",
        parameters=f"blocks: torch.Tensor{', outer: torch.Tensor' if quant.outer else ''}",
        floor=repr(float(floor)),
        ratio=ratio,
        ratios=ratios,
        code=f"_{dtype}_code",
        codes=f"_{dtype}_codes",
        native=", NATIVE" if _native(dtype) else "",
        whole=f"{whole} * outer" if quant.outer else whole,
        wholes=f"{wholes} * outer" if quant.outer else wholes,
        stored="_e4m3_code(scale, NATIVE)" if scale == "e4m3" else "scale",
        stored_scales="_e4m3_codes(scales, has_nan=True)" if scale == "e4m3" else "scales",
        result=f"_e8m0_code({kept})" if is_power else kept,
        results=f"_e8m0_codes({kepts})" if is_power else kepts,
        has_floor=floor > 0,
        has_least=0 < floor < Fraction(1, 10**30),
        has_zeros=floor == 0 or has_whole,
        has_whole=has_whole,
        is_power=quant.rounding == "pow2",
        has_division=quant.code == "divide",
    )


class _Kernel:
    """One verb on some fields of a page."""

    def __init__(self, maker: KernelMaker, verb: str, target: Target, names: tuple[str, ...]) -> None:
        self.maker, self.verb, self.target, self.names = maker, verb, target, names
        self.fields = {field.name: field for field in target.page.fields}
        self.laid = {name: packed(field) or field for name, field in self.fields.items()}  # as bytes
        self.rows: dict[tuple[str, ...], str] = {}  # where the rows of fields begin, and what that is called
        self.uses: set[str] = set()
        self.loop = ""  # in which a block of statements stands
        self.given: list[str] = []  # fields with a scale that the caller gives

    @property
    def is_given(self) -> bool:
        return self.verb in ("store", "put")

    @property
    def is_native(self) -> bool:
        return self.is_given and "e4m3_codes" in self.uses

    def view(self, base: str, space_page: str) -> KernelView:
        kinds = {"store": self.store, "put": self.put, "load": self.load, "get": self.get, "gather": self.get}
        scattered = [self.row_key(name) for name in self.touched()]
        for key in dict.fromkeys(scattered):
            first = next(name for name in self.touched() if self.row_key(name) == key)
            self.rows[key] = "row_ptr" if len(set(scattered)) == 1 else f"{first}_row_ptr"
        blocks, twins = [], []
        for name in self.names:
            block, twin = kinds[self.verb](name)
            blocks.append(block)
            twins += twin
        sized = ("PAGE_SIZE",) if space_page == "PAGE_SIZE" else ()
        planes = self.planes()
        constants = [*self.target.constants(planes), *sized, "TOKENS", *(("NATIVE",) if self.is_native else ())]
        parameters = [*self.parameters(), *(f"{name}: tl.constexpr" for name in constants)]
        locals = [local_name(name) for name in self.names]
        own = locals if self.is_given else ["dtypes"]
        before = ["entry"] if self.is_given else ["entry", "slots", "kept"]
        annotated = {
            "entry": self.target.entry,
            **({} if self.is_given else {"dtypes": "tuple[torch.dtype, ...]"}),
        }
        given = [f"{local_name(name)}_given" for name in self.given]
        arguments = [f"{name}: {annotated.get(name, 'torch.Tensor')}" for name in (*before, *own, *given)]
        returns = "dict[str, torch.Tensor]" if self.is_given else "tuple[torch.Tensor, ...]"
        return KernelView(
            kernel=f"{base}_kernel",
            twin=base,
            signature=signature(f"{base}_kernel", parameters, ""),
            twin_signature=signature(base, arguments, f" -> {returns}"),
            doc=self.doc(),
            twin_doc=f"The fields of `{self.target.page.format}` for values, [slots, values] each."
            if self.is_given
            else self.doc(),
            decorator=self.decorator(),
            rows=tuple(self.lay(f"{name} = ", sum_of(key)) for key, name in self.rows.items()),
            blocks=tuple(blocks),
            twin_lines=tuple(twins),
            result=self.stored_fields() if self.is_given else returned([Raw(name) for name in locals], IN_FUNCTION),
            is_in_order=all(is_dense(element_walk(self.laid[name])) for name in self.touched()),
            space_page=space_page,
            uses=frozenset(self.uses),
            is_store=self.is_given,
            is_load=self.verb in ("load", "get"),
            is_gather=self.verb == "gather",
        )

    def decorator(self) -> str:
        """Slots, tables and scales that are given may lie anywhere; rows of values are aligned before."""
        own, pointers = self.parameters(), (*UNALIGNED, *self.given_pointers())
        return jit([name for name in own if name in UNSPECIALISED], [name for name in own if name in pointers])

    def given_pointers(self) -> tuple[str, ...]:
        return tuple(f"{local_name(name)}_given_ptr" for name in self.given)

    def planes(self) -> tuple[str, ...]:
        """The planes that it touches, where they may be tensors of their own."""
        names = [self.target.plane_of(name) for name in self.touched()] if self.target.divided else []
        return tuple(dict.fromkeys(names))

    def parameters(self) -> tuple[str, ...]:
        """Of the kernel, its constants left out."""
        slots = ("slots_ptr", "slots_stride", "count", *(("first_slot",) if self.is_given else ()), "num_slots")
        table = ("table_ptr", "table_stride", "table_step", "table_pages", "num_pages", "max_length", "count", "blocks")
        gathered = ("lengths_ptr", "lengths_stride", *table)
        values = []
        for name in map(local_name, self.names):
            values += [f"{name}_ptr", f"{name}_stride"] if self.is_given else [f"{name}_ptr"]
        planes = tuple(f"{name}_memory_ptr" for name in self.planes())
        memories = planes if self.target.divided else ("memory_ptr",)
        return (*memories, *(gathered if self.verb == "gather" else slots), *values, *self.given_pointers())

    def touched(self) -> Iterator[str]:
        """Fields whose bytes are written or read, scales included, in the order of the page."""
        wanted = set(self.names)
        if self.verb in ("store", "load"):
            quants = [self.fields[name].quant for name in self.names]
            wanted |= {quant.scale for quant in quants if quant is not None}
        return (name for name in self.fields if name in wanted)

    def doc(self) -> str:
        format = self.target.page.format
        quantises = self.verb == "store" and any(self.fields[name].quant for name in self.names)
        return {
            "store": f"{'Quantise values and write them' if quantises else 'Write values'} into slots of `{format}`.",
            "put": f"Write stored fields into slots of `{format}`.",
            "load": f"Read values from slots of `{format}`; zeros for a slot outside.",
            "get": f"Read stored fields from slots of `{format}`; zeros for a slot outside.",
            "gather": f"Read stored fields of whole sequences from `{format}`; zeros for a page outside.",
        }[self.verb]

    # -- addresses

    def row_key(self, name: str) -> tuple[str, ...]:
        memory = f"{self.target.plane_of(name)}_memory_ptr" if self.target.divided else "memory_ptr"
        return (memory, *slot_row(self.target, self.laid[name]))

    def pointer(self, name: str, dtype: str, axes: str) -> str:
        """The row of a field for each token, with the new axes of a block."""
        field = self.laid[name]
        row = self.rows[self.row_key(name)]
        offset = (field.record_offset if self.target.divided else field.offset).divided_by(BYTE)
        at = row if offset.known == 0 else f"{row} + {flat(self.target.size(offset))}"
        if dtype == "uint8":
            return f"{row}{axes}" if at == row else f"({at}){axes}"
        at = row if at == row else f"({at})"
        return f"{at}.to(tl.pointer_type(tl.{dtype})){axes}"

    def element(self, name: str, index: str) -> Code:
        walk = element_walk(self.laid[name])
        assert walk is not None
        return Raw(index) if is_dense(walk) else walked(self.target, walk, index)

    def place(self, name: str, dtype: str, axes: str, index: str) -> Code:
        """Where the elements of a field lie."""
        return chain("+", Raw(self.pointer(name, dtype, axes)), self.element(name, index))

    def width(self, size: Size) -> tuple[str, str | None]:
        """A power of two that covers so many values, and that many where they are fewer."""
        if size.known is None:
            text = flat(self.target.size(size))
            return f"triton.next_power_of_2({text})", self.target.operand(size)
        width = 1 << (size.known - 1).bit_length()
        return str(width), None if width == size.known else str(size.known)

    def stretch(self, size: Size, values: int = 1) -> tuple[str, str | None]:
        """The numbers up to a size, of blocks of so many values, and where they end if they have to be masked.

        A known size that is no power of two is taken in a loop of stretches that are one, where those are wide enough.
        """
        known = size.known or 0
        step = known & -known  # the largest power of two that divides it
        if known == step or step * values < WIDE:
            width, end = self.width(size)
            return f"tl.arange(0, {width})", end
        self.loop = f"for begin in tl.static_range(0, {known}, {step}):"
        return f"begin + tl.arange(0, {step})", None

    # -- blocks of statements

    def block(self, name: str, what: str, lines: list[str]) -> BlockOfKernelView:
        field = self.fields[name]
        shape = ", ".join(flat(self.target.size(extent)) for extent in field.shape[1:])
        if self.loop:
            inside = "\n".join(lines).splitlines()
            lines, self.loop = [self.loop, *(f"    {line}" for line in inside)], ""
        return BlockOfKernelView(comment=f"{field.name}: {field.dtype}[{shape}]{what}", lines=tuple(lines))

    def column(self, size: Size, kept: str) -> tuple[list[str], str]:
        """The index of so many elements, and the mask of those that are."""
        numbers, end = self.stretch(size)
        lines = [f"column = {in_brackets(numbers)}[None, :]"]
        mask = f"{kept}[:, None]"
        return lines, mask if end is None else f"{mask} & (column < {end})"

    def lay(self, head: str, code: Code) -> str:
        return statement(head, code, IN_KERNEL + STEP if self.loop else IN_KERNEL)

    def loaded(self, pointer: Code, mask: str, other: str = "0") -> Group:
        return call("tl.load", pointer, Keyword("mask", Raw(mask)), Keyword("other", Raw(other)))

    def stored(self, pointer: Code, value: Code, mask: str) -> str:
        return self.lay("", call("tl.store", pointer, value, Keyword("mask", Raw(mask))))

    def source(self, name: str, axes: str, index: str) -> Code:
        return Raw(f"{name}_ptr + token{axes} * {name}_stride + {index}")

    def target_of(self, name: str, axes: str, size: Size, index: str) -> Code:
        return Raw(f"{name}_ptr + token{axes} * {self.target.operand(size)} + {index}")

    def native(self, *dtypes: str) -> str:
        """The last argument of what makes codes."""
        self.uses |= {f"{dtype}_codes" for dtype in dtypes if dtype != "f32"}
        return ", NATIVE" if _native(*dtypes) else ""

    def given_scale(self, name: str) -> str:
        """The scale that the caller gives for a field."""
        self.given.append(name)
        return f"tl.load({local_name(name)}_given_ptr)"

    def scales(self, name: str) -> FieldLayout:
        """The field with the scales of another."""
        quant = self.fields[name].quant
        assert quant is not None
        return self.fields[quant.scale]

    def store(self, name: str) -> tuple[BlockOfKernelView, list[str]]:
        quant = self.fields[name].quant
        if quant is None:
            return self.put(name)
        self.uses.add("widening")
        return (self.store_cast if quant.scale in ("none", "given") else self.store_scaled)(name)

    def put(self, field: str) -> tuple[BlockOfKernelView, list[str]]:
        name, item = local_name(field), integer_dtype(self.laid[field])
        lines, mask = self.column(count(self.laid[field]), "kept")
        lines.append(self.lay(f"{name} = ", self.loaded(self.source(name, "[:, None]", "column"), mask)))
        lines.append(self.stored(self.place(field, item, "[:, None]", "column"), Raw(name), mask))
        return self.block(field, "", lines), []

    def store_cast(self, field: str) -> tuple[BlockOfKernelView, list[str]]:
        """Codes without scales of blocks: cast as they are, or for a scale that is given."""
        name, quant, dtype = local_name(field), self.fields[field].quant, self.fields[field].dtype
        assert quant is not None
        lines, mask = self.column(count(self.laid[field]), "kept")
        lines.append(self.lay(f"{name} = ", self.loaded(self.source(name, "[:, None]", "column"), mask)))
        if quant.scale == "given":
            coder = self.maker.coder(self.target.page, self.fields[field])
            code = f"{coder.kernel}(_bf16_value({name}), {self.given_scale(field)}{self.native(dtype)})"
            codes, what = f"{coder.name}({name}, {name}_given)", ", for a scale that is given, unless given as codes"
        else:
            self.uses.add("casts")
            code = f"_{dtype}_code(_bf16_value({name}){self.native(dtype)})"
            codes, what = f"_cast_codes({name})", ", a saturating cast unless given as codes"
        lines.append(f"if {name}_ptr.dtype.element_ty != tl.uint8:")
        lines.append(f"    {name} = {code}")
        lines.append(self.stored(self.place(field, "uint8", "[:, None]", "column"), Raw(name), mask))
        twin = [f"if {name}.dtype != torch.uint8:", f"    {name} = {codes}"]
        return self.block(field, what, lines), twin

    def block_lines(self, field: str, values: Size, kept: str, index: str) -> tuple[list[str], str, str]:
        """The index of an element of each block of so many, and the masks of elements and of scales."""
        blocks, laid = self.blocks_of(field)
        size = blocks.count
        width, last = self.width(values)
        is_whole = self.width(laid)[1] is None and self.width(blocks.values)[1] is None
        numbers, end = self.stretch(size, (laid.known or 0) if is_whole else 0)
        lines = [f"row = {in_brackets(numbers)}[None, :]", "block = row[:, :, None]"]
        lines += [f"value = tl.arange(0, {width})[None, None, :]"]
        lines += [f"{index} = block * {self.target.operand(values)} + value"]
        mask, scale_mask = f"{kept}[:, None, None]", f"{kept}[:, None]"
        if end is not None:
            mask += f" & (block < {end})"
            scale_mask += f" & (row < {end})"
        if last is not None:
            mask += f" & (value < {last})"
        return lines, mask, scale_mask

    def blocks_of(self, name: str) -> tuple[Blocks, Size]:
        """The blocks of a field, and elements of each as they lie: bytes, where two values share one."""
        blocks = blocks_of(self.target.page, self.fields[name])
        assert blocks is not None
        return blocks, blocks.values.floored(2) if self.is_packed(name) else blocks.values

    def is_packed(self, name: str) -> bool:
        """Whether two values share a byte."""
        return self.laid[name].bits != self.fields[name].bits

    def store_scaled(self, field: str) -> tuple[BlockOfKernelView, list[str]]:
        name = local_name(field)
        blocks, laid = self.blocks_of(field)
        scale = blocks.scale
        scale_name, dtype = local_name(scale.name), self.fields[field].dtype
        quantiser = self.maker.quantiser(self.target.page, self.fields[field], scale)
        lines, mask, scale_mask = self.block_lines(field, blocks.values, "kept", "element")
        index = "element"
        lines.append(self.lay(f"{name} = ", self.loaded(self.source(name, "[:, None, None]", index), mask)))
        arguments = f"_bf16_value({name})"
        given = ""
        if self.outer(field):
            arguments += f", {self.given_scale(field)}"
            given = f"{name}_given"
        if scale.dtype == "e4m3":  # codes are made with what it is rounded to
            self.uses.add("e4m3_values")
        arguments += self.native(dtype, scale.dtype)
        lines.append(self.lay(f"{name}, {scale_name} = ", Raw(f"{quantiser.kernel}({arguments})")))
        if self.is_packed(field):
            index = "pair"
            more, mask, _ = self.block_lines(field, laid, "kept", index)
            lines += [f"{name} = _packed({name})", *more[2:]]
        lines.append(self.stored(self.place(field, "uint8", "[:, None, None]", index), Raw(name), mask))
        stored = "float32" if scale.dtype == "f32" else "uint8"
        lines.append(self.stored(self.place(scale.name, stored, "[:, None]", "row"), Raw(scale_name), scale_mask))
        values = [unflattened(name, blocks), *([Raw(given)] if given else [])]
        twin = [self.lay_twin(f"{name}, {scale_name} = ", call(quantiser.name, *values))]
        if self.is_packed(field):
            twin.append(f"{name} = _packed_codes({name})")
        return self.block(field, self.scale_note(field, blocks), lines), twin

    def outer(self, name: str) -> bool:
        quant = self.fields[name].quant
        return quant is not None and quant.outer

    def scale_note(self, name: str, blocks: Blocks) -> str:
        over = " over one that is given" if self.outer(name) else ""
        return f", with {blocks.scale.name} for each {flat(self.target.size(blocks.values))}{over}"

    def stored_fields(self) -> str:
        """Return what a slot holds of each field, by name."""
        rows = tuple(Raw(f"{quoted(name)}: {local_name(name)}") for name in self.touched())
        return statement("return ", Group("{", rows, "}"), IN_FUNCTION)

    def get(self, field: str) -> tuple[BlockOfKernelView, list[str]]:
        name, laid = local_name(field), self.laid[field]
        lines, mask = self.column(count(laid), "kept")
        place = self.place(field, integer_dtype(laid), "[:, None]", "column")
        lines.append(self.lay(f"{name} = ", self.loaded(place, mask)))
        _, out_mask = self.column(count(laid), "inside")
        lines.append(self.stored(self.target_of(name, "[:, None]", count(laid), "column"), Raw(name), out_mask))
        twin = [self.lay_twin(f"{name} = ", self.reads(field, self.dtype_of(field)))]
        return self.block(field, "", lines), twin

    def load(self, name: str) -> tuple[BlockOfKernelView, list[str]]:
        quant = self.fields[name].quant
        self.uses.add("rounding")
        if quant is None:
            return self.load_plain(name)
        self.uses.add(f"{self.fields[name].dtype}_values")
        return (self.load_cast if quant.scale in ("none", "given") else self.load_scaled)(name)

    def dtype_of(self, name: str) -> str:
        """What a field comes back as, in a twin."""
        return f"dtypes[{self.names.index(name)}]"

    def rounded(self, name: str) -> Raw:
        return Raw(f"_rounded({name}, {name}_ptr.dtype.element_ty)")

    def reads(self, name: str, dtype: str) -> Group:
        arguments = ("entry", quoted(name), "slots", "kept", dtype)
        return call("_read", *(Raw(text) for text in arguments))

    def load_plain(self, field: str) -> tuple[BlockOfKernelView, list[str]]:
        name, dtype, laid = local_name(field), plain_dtype(self.fields[field]), self.laid[field]
        lines, mask = self.column(count(laid), "kept")
        place = self.place(field, dtype, "[:, None]", "column")
        lines.append(self.lay(f"{name} = ", self.loaded(place, mask, "0.0" if "float" in dtype else "0")))
        _, out_mask = self.column(count(laid), "inside")
        stored = self.stored(self.target_of(name, "[:, None]", count(laid), "column"), Raw(name), out_mask)
        if laid.dtype in FLOATS:
            lines.append(f"if {name}_ptr.dtype.element_ty != tl.{dtype}:")
            wide = (
                f"_bf16_value({name}.to(tl.int16, bitcast=True))" if dtype == "bfloat16" else f"{name}.to(tl.float32)"
            )
            lines.append(f"    {name} = _rounded({wide}, {name}_ptr.dtype.element_ty)")
            self.uses |= {"widening"} if dtype == "bfloat16" else set()
        lines.append(stored)
        twin = [self.lay_twin(f"{name} = ", self.reads(field, f"torch.{dtype}"))]
        if laid.dtype in FLOATS:
            twin.append(f"if {self.dtype_of(field)} != torch.{dtype}:")
            twin.append(f"    {name} = _rounded_values({name}.float(), {self.dtype_of(field)})")
        return self.block(field, "", lines), twin

    def load_cast(self, field: str) -> tuple[BlockOfKernelView, list[str]]:
        name, dtype, laid = local_name(field), self.fields[field].dtype, self.laid[field]
        quant = self.fields[field].quant
        assert quant is not None
        is_scaled = quant.scale == "given"
        lines, mask = self.column(count(laid), "kept")
        place = self.place(field, "uint8", "[:, None]", "column")
        lines.append(self.lay(f"{name} = ", call(f"_{dtype}_value", self.loaded(place, mask))))
        if is_scaled:
            lines.append(f"{name} *= {self.given_scale(field)}")
        _, out_mask = self.column(count(laid), "inside")
        place = self.target_of(name, "[:, None]", count(laid), "column")
        lines.append(self.stored(place, self.rounded(name), out_mask))
        first = "torch.float32" if is_scaled else self.dtype_of(field)
        values = call(f"_{dtype}_values", self.reads(field, "torch.uint8"), Raw(first))
        twin = [self.lay_twin(f"{name} = ", values)]
        if is_scaled:
            twin.append(f"{name} = _rounded_values({name} * {name}_given, {self.dtype_of(field)})")
        return self.block(field, ", times a scale that is given" if is_scaled else "", lines), twin

    def load_scaled(self, field: str) -> tuple[BlockOfKernelView, list[str]]:
        name, dtype = local_name(field), self.fields[field].dtype
        blocks, laid = self.blocks_of(field)
        scale = blocks.scale
        scale_name, is_coded = local_name(scale.name), scale.dtype != "f32"
        index = "pair" if self.is_packed(field) else "element"
        lines, mask, scale_mask = self.block_lines(field, laid, "kept", index)
        loaded: Code = self.loaded(self.place(field, "uint8", "[:, None, None]", index), mask)
        if self.is_packed(field):
            loaded = call("_unpacked", loaded)
        lines.append(self.lay(f"{name} = ", call(f"_{dtype}_value", loaded)))
        place = self.place(scale.name, "uint8" if is_coded else "float32", "[:, None]", "row")
        loaded = self.loaded(place, scale_mask, "0" if is_coded else "0.0")
        lines.append(self.lay(f"{scale_name} = ", call(f"_{scale.dtype}_value", loaded) if is_coded else loaded))
        if self.outer(field):
            lines.append(f"{scale_name} *= {self.given_scale(field)}")
        lines.append(f"{name} *= {scale_name}[:, :, None]")
        more, out_mask, _ = self.block_lines(field, blocks.values, "inside", "element")
        lines += more[2:] if self.is_packed(field) else []
        place = self.target_of(name, "[:, None, None]", count(self.fields[field]), "element")
        lines.append(self.stored(place, self.rounded(name), out_mask))
        scales = self.reads(scale.name, "torch.uint8" if is_coded else "torch.float32")
        if is_coded:
            self.uses.add(f"{scale.dtype}_values")
            extra = [Raw("torch.float32")] if scale.dtype == "e4m3" else []
            scales = call(f"_{scale.dtype}_values", scales, *extra)
        codes = call(f"_{dtype}_values", self.reads(field, "torch.uint8"), Raw("torch.float32"))
        twin = [
            self.lay_twin("codes = ", codes),
            self.lay_twin("scales = ", chain("*", scales, Raw(f"{name}_given")) if self.outer(field) else scales),
            self.lay_twin("codes = ", unflattened("codes", blocks)),
            f"{name} = _rounded_values((codes * scales[:, :, None]).flatten(1), {self.dtype_of(field)})",
        ]
        return self.block(field, self.scale_note(field, blocks), lines), twin

    # -- the torch twin

    def lay_twin(self, head: str, code: Code) -> str:
        return statement(head, code, IN_FUNCTION)


def in_brackets(code: str) -> str:
    """A sum in brackets, where it is one."""
    return f"({code})" if " + " in code else code


def unflattened(name: str, blocks: Blocks) -> Group:
    """Rows as blocks of values."""
    shape = Group("(", (Raw(in_constants(blocks.count)), Raw(in_constants(blocks.values))))
    return call(f"{name}.unflatten", Raw("1"), shape)


def jit(unspecialised: Iterable[str], unaligned: Iterable[str]) -> str:
    """The decorator of a kernel that is compiled once for all values, or alignments, of arguments of those names."""
    lists = [Group("[", tuple(Raw(quoted(name)) for name in names), "]") for names in (unspecialised, unaligned)]
    code = call(
        "@triton.jit",
        Keyword("do_not_specialize", lists[0]),
        Keyword("do_not_specialize_on_alignment", lists[1]),
    )
    return statement("", code, 0)


def signature(name: str, parameters: Sequence[str], returns: str, indent: int = 0) -> str:
    """`def name(…) -> returns:` on one line, with its parameters on one of their own, or each on its own."""
    margin = " " * indent
    if len(line := f"{margin}def {name}({', '.join(parameters)}){returns}:") <= WIDTH:
        return line
    if len(inside := f"{margin}    {', '.join(parameters)}") > WIDTH:
        inside = "\n".join(f"{margin}    {parameter}," for parameter in parameters)
    return f"{margin}def {name}(\n{inside}\n{margin}){returns}:"
