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
from kvgen.pysource import STEP, WIDTH, Chain, Code, Group, Keyword, Raw, call, chain, flat, quoted, statement, tuple_of
from kvgen.size import Size
from kvgen.types import DTYPES
from kvgen.views import BlockOfKernelView, KernelView, QuantiserView
from kvgen.walk import Blocks, Walk, blocks_of, count, element_walk, is_dense, slot_walk

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
    *("block", "codes", "column", "count", "earlier", "element", "entry", "first", "first_slot", "inside", "kept"),
    *("length", "lengths", "max_length", "memory", "num_pages", "num_slots", "own", "page", "page_ptr", "position"),
    *("request", "row", "scales", "self", "slot", "slots", "start", "table", "table_column", "tl", "token", "tokens"),
    *("blocks", "dtypes", "float", "range", "torch", "triton", "value", "values"),
)


CONSTANTS = ("PAGE_SLOTS", "PAGE_BYTES", "PAGE_SIZE", "TOKENS", "NATIVE")  # that kernels have whatever the spec says


def local_name(name: str) -> str:
    """What a field is called in code: its name, or `its_name` where that has another meaning there."""
    taken = (
        name in TAKEN
        or name.startswith("its_")
        or name.endswith(("_ptr", "_stride", "_row"))
        or keyword.iskeyword(name)
    )
    return f"its_{name}" if taken else name


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a kernel is for: a page, the name it goes by, and whether its stride is decided at load."""

    page: Page
    name: str
    moved: bool

    @property
    def needs_constants(self) -> bool:
        return self.moved or not self.page.is_constant

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

    @property
    def page_bytes(self) -> str:
        return "PAGE_BYTES" if self.moved else self.operand(self.page.page_bytes)

    @property
    def page_slots(self) -> str:
        return self.operand(self.page.slots)

    def constants(self) -> tuple[str, ...]:
        """The names of its constants, as `Page.constants` has them."""
        return ("PAGE_SLOTS", "PAGE_BYTES", *number_names(self.page)) if self.needs_constants else ()


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
    return f"ITS_{upper}" if upper in CONSTANTS or upper.startswith("ITS_") else upper


def in_constants(size: Size) -> str:
    """A size as code that has an entry of the pool."""
    return re.sub(r"[A-Z]\w*", lambda name: f'entry.page.constants["{name[0]}"]', _constants(str(size)))


def integer_dtype(field: FieldLayout) -> str:
    """The integers of the size of its elements, as which they are copied."""
    return INTEGERS[DTYPES[field.dtype] // BYTE]


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


def slot_row(target: Target, field: FieldLayout) -> str:
    """Where the row of a field begins for each slot, in bytes from the memory's start, its offset left out."""
    walk = slot_walk(field)
    page = target.page
    if len(walk) == 1 and not target.moved and walk[0].stride * page.slots == page.page_bytes:
        return f"slot * {target.operand(walk[0].stride)}"
    row = (
        f"slot // {target.page_slots} * {target.page_bytes}" if page.slots.known != 1 else f"slot * {target.page_bytes}"
    )
    for step in walk:
        low = "" if step.low == Size.of(1) else f" // {target.operand(step.low)}"
        row += f" + slot{low} % {target.operand(step.extent)} * {target.operand(step.stride)}"
    return row


# -- kernels


class KernelMaker:
    """The kernels of a module, each made once, and the ways of quantising that they share."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, str, tuple[str, ...]], KernelView] = {}
        self.quantisers: dict[tuple[str, str], QuantiserView] = {}

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

    def quantiser(self, page: Page, field: FieldLayout) -> QuantiserView:
        quant = field.quant
        assert quant is not None
        rule = (quant.floor, f"{quant.rounding} {quant.code}")
        if rule not in self.quantisers:
            name = f"_quantise_{field.name}"
            taken = {view.name for view in self.quantisers.values()}
            while name in taken:
                name += f"_{page.format}"
            self.quantisers[rule] = _quantiser_view(name, quant)
        return self.quantisers[rule]


def _quantiser_view(name: str, quant: QuantLayout) -> QuantiserView:
    floor = Fraction(quant.floor)
    power = ", a power of two" if quant.rounding == "pow2" else ""
    return QuantiserView(
        name=name,
        kernel=name.replace("_quantise", "_quantised", 1),
        doc=f"e4m3 codes and the scale of each block{power}.",
        maximum="448.0",
        floor=repr(float(floor)),
        has_floor=floor > 0,
        has_least=0 < floor < Fraction(1, 10**30),
        is_power=quant.rounding == "pow2",
        has_division=quant.code == "divide",
    )


class _Kernel:
    """One verb on some fields of a page."""

    def __init__(self, maker: KernelMaker, verb: str, target: Target, names: tuple[str, ...]) -> None:
        self.maker, self.verb, self.target, self.names = maker, verb, target, names
        self.fields = {field.name: field for field in target.page.fields}
        self.rows: dict[str, str] = {}  # what a row pointer adds to the memory's, and the pointer's name
        self.codes = self.casts = self.values = self.powers = self.rounds = self.widens = False

    @property
    def is_given(self) -> bool:
        return self.verb in ("store", "put")

    def view(self, base: str, space_page: str) -> KernelView:
        kinds = {"store": self.store, "put": self.put, "load": self.load, "get": self.get, "gather": self.get}
        scattered = [self.row_key(self.fields[name]) for name in self.touched()]
        for key in dict.fromkeys(scattered):
            first = next(name for name in self.touched() if self.row_key(self.fields[name]) == key)
            self.rows[key] = "row_ptr" if len(set(scattered)) == 1 else f"{first}_row_ptr"
        blocks, twins = [], []
        for name in self.names:
            block, twin = kinds[self.verb](self.fields[name])
            blocks.append(block)
            twins += twin
        sized = ("PAGE_SIZE",) if space_page == "PAGE_SIZE" else ()
        constants = [*self.target.constants(), *sized, "TOKENS", *(("NATIVE",) if self.codes else ())]
        parameters = [*self.parameters(), *(f"{name}: tl.constexpr" for name in constants)]
        locals = [local_name(name) for name in self.names]
        own = locals if self.is_given else ["dtypes"]
        before = ["entry"] if self.is_given else ["entry", "slots", "kept"]
        annotated = {"entry": "_Entry", **({} if self.is_given else {"dtypes": "tuple[torch.dtype, ...]"})}
        arguments = [f"{name}: {annotated.get(name, 'torch.Tensor')}" for name in (*before, *own)]
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
            rows=tuple(f"{name} = memory_ptr + {key}" for key, name in self.rows.items()),
            blocks=tuple(blocks),
            twin_lines=tuple(twins),
            result=self.stored_fields() if self.is_given else flat(tuple_of([Raw(name) for name in locals]))[1:-1],
            is_in_order=all(is_dense(element_walk(self.fields[name])) for name in self.touched()),
            space_page=space_page,
            is_store=self.is_given,
            is_load=self.verb in ("load", "get"),
            is_gather=self.verb == "gather",
            has_codes=self.codes,
            has_casts=self.casts,
            has_values=self.values,
            has_powers=self.powers,
            has_rounding=self.rounds,
            has_widening=self.widens,
        )

    def decorator(self) -> str:
        """Slots and tables may lie anywhere. So may values of few bytes; others are laid at multiples of 16 before."""
        small: list[str] = []
        if self.is_given:
            small = [local_name(name) for name in self.names if not self.is_wide(self.fields[name])]
        numbers = (*UNSPECIALISED, *(f"{name}_stride" for name in small))
        pointers = (*UNALIGNED, *(f"{name}_ptr" for name in small))
        own = self.parameters()
        return jit([name for name in own if name in numbers], [name for name in own if name in pointers])

    def is_wide(self, field: FieldLayout) -> bool:
        """Whether rows of the values that are given for a field can lie at multiples of 16 bytes."""
        is_scaled = self.verb == "store" and field.quant is not None and field.quant.scale != "none"
        bits = 16 if is_scaled else DTYPES[field.dtype]  # codes may be given for what is stored by a cast
        nbytes = count(field).known
        return nbytes is None or nbytes * bits // BYTE % 16 == 0

    def parameters(self) -> tuple[str, ...]:
        """Of the kernel, its constants left out."""
        slots = ("slots_ptr", "slots_stride", "count", *(("first_slot",) if self.is_given else ()), "num_slots")
        table = ("table_ptr", "table_stride", "table_step", "table_pages", "num_pages", "max_length", "count", "blocks")
        gathered = ("lengths_ptr", "lengths_stride", *table)
        values = []
        for name in map(local_name, self.names):
            values += [f"{name}_ptr", f"{name}_stride"] if self.is_given else [f"{name}_ptr"]
        return ("memory_ptr", *(gathered if self.verb == "gather" else slots), *values)

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

    def row_key(self, field: FieldLayout) -> str:
        return slot_row(self.target, field)

    def pointer(self, field: FieldLayout, dtype: str, axes: str) -> str:
        """The row of a field for each token, with the new axes of a block."""
        row = self.rows[self.row_key(field)]
        offset = field.offset.divided_by(BYTE)
        at = row if offset.known == 0 else f"{row} + {flat(self.target.size(offset))}"
        if dtype == "uint8":
            return f"{row}{axes}" if at == row else f"({at}){axes}"
        at = row if at == row else f"({at})"
        return f"{at}.to(tl.pointer_type(tl.{dtype})){axes}"

    def element(self, field: FieldLayout, index: str) -> Code:
        walk = element_walk(field)
        assert walk is not None
        return Raw(index) if is_dense(walk) else walked(self.target, walk, index)

    def width(self, size: Size) -> tuple[str, str | None]:
        """A power of two that covers so many values, and that many where they are fewer."""
        if size.known is None:
            text = flat(self.target.size(size))
            return f"triton.next_power_of_2({text})", self.target.operand(size)
        width = 1 << (size.known - 1).bit_length()
        return str(width), None if width == size.known else str(size.known)

    # -- blocks of statements

    def comment(self, field: FieldLayout, what: str) -> str:
        shape = ", ".join(flat(self.target.size(extent)) for extent in field.shape[1:])
        return f"{field.name}: {field.dtype}[{shape}]{what}"

    def column(self, field: FieldLayout, kept: str) -> tuple[list[str], str]:
        """The index of an element, and the mask of those that are."""
        width, end = self.width(count(field))
        lines = [f"column = tl.arange(0, {width})[None, :]"]
        mask = f"{kept}[:, None]"
        return lines, mask if end is None else f"{mask} & (column < {end})"

    def lay(self, head: str, code: Code) -> str:
        return statement(head, code, IN_KERNEL)

    def loaded(self, pointer: Code, mask: str, other: str = "0") -> Group:
        return call("tl.load", pointer, Keyword("mask", Raw(mask)), Keyword("other", Raw(other)))

    def stored(self, pointer: Code, value: Code, mask: str) -> str:
        return self.lay("", call("tl.store", pointer, value, Keyword("mask", Raw(mask))))

    def source(self, name: str, axes: str, index: str) -> Code:
        return Raw(f"{name}_ptr + token{axes} * {name}_stride + {index}")

    def target_of(self, name: str, axes: str, size: Size, index: str) -> Code:
        return Raw(f"{name}_ptr + token{axes} * {self.target.operand(size)} + {index}")

    def store(self, field: FieldLayout) -> tuple[BlockOfKernelView, list[str]]:
        if field.quant is None:
            return self.put(field)
        self.codes = self.widens = True
        if field.quant.scale == "none":
            self.casts = True
            return self.store_cast(field)
        return self.store_scaled(field)

    def put(self, field: FieldLayout) -> tuple[BlockOfKernelView, list[str]]:
        name, item = local_name(field.name), integer_dtype(field)
        lines, mask = self.column(field, "kept")
        lines.append(self.lay(f"{name} = ", self.loaded(self.source(name, "[:, None]", "column"), mask)))
        place = chain("+", Raw(self.pointer(field, item, "[:, None]")), self.element(field, "column"))
        lines.append(self.stored(place, Raw(name), mask))
        return BlockOfKernelView(comment=self.comment(field, ""), lines=tuple(lines)), []

    def store_cast(self, field: FieldLayout) -> tuple[BlockOfKernelView, list[str]]:
        name = local_name(field.name)
        lines, mask = self.column(field, "kept")
        lines.append(self.lay(f"{name} = ", self.loaded(self.source(name, "[:, None]", "column"), mask)))
        place = chain("+", Raw(self.pointer(field, "uint8", "[:, None]")), self.element(field, "column"))
        lines.append(f"if {name}_ptr.dtype.element_ty != tl.uint8:")
        lines.append(f"    {name} = _e4m3_code(_bf16_value({name}), NATIVE)")
        lines.append(self.stored(place, Raw(name), mask))
        twin = [
            f"if {name}.dtype != torch.uint8:",
            f"    {name} = _cast_codes({name})",
        ]
        return BlockOfKernelView(
            comment=self.comment(field, ", a saturating cast unless given as codes"), lines=tuple(lines)
        ), twin

    def block_lines(self, field: FieldLayout, blocks: Blocks, kept: str) -> tuple[list[str], str, str, str]:
        """The index of an element of each block; masks of elements and of scales; the element's place."""
        number, end = self.width(blocks.count)
        width, last = self.width(blocks.values)
        lines = [f"block = tl.arange(0, {number})[None, :, None]", f"value = tl.arange(0, {width})[None, None, :]"]
        lines.append(f"element = block * {self.target.operand(blocks.values)} + value")
        mask, scale_mask = f"{kept}[:, None, None]", f"{kept}[:, None]"
        if end is not None:
            mask += f" & (block < {end})"
            scale_mask += f" & (tl.arange(0, {number})[None, :] < {end})"
        if last is not None:
            mask += f" & (value < {last})"
        return lines, mask, scale_mask, f"tl.arange(0, {number})[None, :]"

    def store_scaled(self, field: FieldLayout) -> tuple[BlockOfKernelView, list[str]]:
        name = local_name(field.name)
        blocks = blocks_of(self.target.page, field)
        assert blocks is not None
        scale = blocks.scale
        lines, mask, scale_mask, block = self.block_lines(field, blocks, "kept")
        lines.append(self.lay(f"{name} = ", self.loaded(self.source(name, "[:, None, None]", "element"), mask)))
        quantiser = self.maker.quantiser(self.target.page, field)
        scale_name = local_name(scale.name)
        lines.append(self.lay(f"{name}, {scale_name} = ", Raw(f"{quantiser.kernel}(_bf16_value({name}), NATIVE)")))
        place = chain("+", Raw(self.pointer(field, "uint8", "[:, None, None]")), self.element(field, "element"))
        lines.append(self.stored(place, Raw(name), mask))
        is_power = scale.dtype == "e8m0"
        self.powers |= is_power
        dtype = "uint8" if is_power else "float32"
        place = chain("+", Raw(self.pointer(scale, dtype, "[:, None]")), self.element(scale, block))
        lines.append(self.stored(place, Raw(f"_e8m0_code({scale_name})" if is_power else scale_name), scale_mask))
        shape = f"({in_constants(blocks.count)}, {in_constants(blocks.values)})"
        values = Raw(f"{name}.unflatten(1, {shape})")
        twin = [self.lay_twin(f"{name}, {scale_name} = ", call(quantiser.name, values))]
        if is_power:
            twin.append(f"{scale_name} = _e8m0_codes({scale_name})")
        what = f", with {scale.name} for each {flat(self.target.size(blocks.values))}"
        return BlockOfKernelView(comment=self.comment(field, what), lines=tuple(lines)), twin

    def stored_fields(self) -> str:
        """What a slot holds of each field, by name."""
        rows = tuple(Raw(f"{quoted(name)}: {local_name(name)}") for name in self.touched())
        return statement("", Group("{", rows, "}"), IN_FUNCTION + len("return "))

    def get(self, field: FieldLayout) -> tuple[BlockOfKernelView, list[str]]:
        name, item = local_name(field.name), integer_dtype(field)
        lines, mask = self.column(field, "kept")
        place = chain("+", Raw(self.pointer(field, item, "[:, None]")), self.element(field, "column"))
        lines.append(self.lay(f"{name} = ", self.loaded(place, mask)))
        _, out_mask = self.column(field, "inside")
        lines.append(self.stored(self.target_of(name, "[:, None]", count(field), "column"), Raw(name), out_mask))
        twin = [self.lay_twin(f"{name} = ", self.reads(field, self.dtype_of(field)))]
        return BlockOfKernelView(comment=self.comment(field, ""), lines=tuple(lines)), twin

    def load(self, field: FieldLayout) -> tuple[BlockOfKernelView, list[str]]:
        self.rounds = True
        if field.quant is None:
            return self.load_plain(field)
        self.values = True
        if field.quant.scale == "none":
            return self.load_cast(field)
        return self.load_scaled(field)

    def dtype_of(self, field: FieldLayout) -> str:
        """What a field comes back as, in a twin."""
        return f"dtypes[{self.names.index(field.name)}]"

    def rounded(self, name: str) -> Raw:
        return Raw(f"_rounded({name}, {name}_ptr.dtype.element_ty)")

    def reads(self, field: FieldLayout, dtype: str) -> Group:
        arguments = ("entry", quoted(field.name), "slots", "kept", dtype)
        return call("_read", *(Raw(text) for text in arguments))

    def load_plain(self, field: FieldLayout) -> tuple[BlockOfKernelView, list[str]]:
        name = local_name(field.name)
        dtype = plain_dtype(field)
        lines, mask = self.column(field, "kept")
        place = chain("+", Raw(self.pointer(field, dtype, "[:, None]")), self.element(field, "column"))
        lines.append(self.lay(f"{name} = ", self.loaded(place, mask, "0.0" if "float" in dtype else "0")))
        _, out_mask = self.column(field, "inside")
        place = self.target_of(name, "[:, None]", count(field), "column")
        stored = self.stored(place, Raw(name), out_mask)
        if field.dtype in FLOATS:
            lines.append(f"if {name}_ptr.dtype.element_ty != tl.{dtype}:")
            wide = (
                f"_bf16_value({name}.to(tl.int16, bitcast=True))" if dtype == "bfloat16" else f"{name}.to(tl.float32)"
            )
            lines.append(f"    {name} = _rounded({wide}, {name}_ptr.dtype.element_ty)")
            self.widens |= dtype == "bfloat16"
        lines.append(stored)
        twin = [self.lay_twin(f"{name} = ", self.reads(field, f"torch.{dtype}"))]
        if field.dtype in FLOATS:
            twin.append(f"if {self.dtype_of(field)} != torch.{dtype}:")
            twin.append(f"    {name} = _rounded_values({name}.float(), {self.dtype_of(field)})")
        return BlockOfKernelView(comment=self.comment(field, ""), lines=tuple(lines)), twin

    def load_cast(self, field: FieldLayout) -> tuple[BlockOfKernelView, list[str]]:
        name = local_name(field.name)
        lines, mask = self.column(field, "kept")
        place = chain("+", Raw(self.pointer(field, "uint8", "[:, None]")), self.element(field, "column"))
        lines.append(self.lay(f"{name} = ", call("_e4m3_value", self.loaded(place, mask))))
        _, out_mask = self.column(field, "inside")
        place = self.target_of(name, "[:, None]", count(field), "column")
        lines.append(self.stored(place, self.rounded(name), out_mask))
        values = call("_e4m3_values", self.reads(field, "torch.uint8"), Raw(self.dtype_of(field)))
        twin = [self.lay_twin(f"{name} = ", values)]
        return BlockOfKernelView(comment=self.comment(field, ""), lines=tuple(lines)), twin

    def load_scaled(self, field: FieldLayout) -> tuple[BlockOfKernelView, list[str]]:
        name = local_name(field.name)
        blocks = blocks_of(self.target.page, field)
        assert blocks is not None
        scale = blocks.scale
        lines, mask, scale_mask, block = self.block_lines(field, blocks, "kept")
        place = chain("+", Raw(self.pointer(field, "uint8", "[:, None, None]")), self.element(field, "element"))
        lines.append(self.lay(f"{name} = ", call("_e4m3_value", self.loaded(place, mask))))
        is_power = scale.dtype == "e8m0"
        dtype = "uint8" if is_power else "float32"
        place = chain("+", Raw(self.pointer(scale, dtype, "[:, None]")), self.element(scale, block))
        loaded = self.loaded(place, scale_mask, "0" if is_power else "0.0")
        lines.append(self.lay(f"{local_name(scale.name)} = ", call("_e8m0_value", loaded) if is_power else loaded))
        lines.append(f"{name} *= {local_name(scale.name)}[:, :, None]")
        _, out_mask, _, _ = self.block_lines(field, blocks, "inside")
        place = self.target_of(name, "[:, None, None]", count(field), "element")
        lines.append(self.stored(place, self.rounded(name), out_mask))
        shape = f"({in_constants(blocks.count)}, {in_constants(blocks.values)})"
        scales = self.reads(scale, f"torch.{dtype}")
        if is_power:
            scales = call("_e8m0_values", scales)
        codes = call("_e4m3_values", self.reads(field, "torch.uint8"), Raw("torch.float32"))
        twin = [
            self.lay_twin("codes = ", codes),
            self.lay_twin("scales = ", scales),
            f"values = codes.unflatten(1, {shape}) * scales[:, :, None]",
            f"{name} = _rounded_values(values.flatten(1), {self.dtype_of(field)})",
        ]
        self.powers |= is_power
        what = f", with {scale.name} for each {flat(self.target.size(blocks.values))}"
        return BlockOfKernelView(comment=self.comment(field, what), lines=tuple(lines)), twin

    # -- the torch twin

    def lay_twin(self, head: str, code: Code) -> str:
        return statement(head, code, IN_FUNCTION)


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
