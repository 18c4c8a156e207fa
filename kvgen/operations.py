"""Operations as methods of the pool: their signatures, what they say of their arguments, and the kernels they run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvgen.kernels import (
    FLOATS,
    INTEGERS,
    TORCH_DTYPES,
    KernelMaker,
    Target,
    in_constants,
    integer_dtype,
    jit,
    local_name,
    plain_dtype,
    signature,
)
from kvgen.layout import Layout, OperationLayout
from kvgen.page import FieldLayout, Page
from kvgen.pysource import (
    STEP,
    Code,
    Group,
    Keyword,
    Raw,
    call,
    flat,
    quoted,
    returned,
    statement,
    tuple_of,
    without_brackets,
)
from kvgen.spec import KERNEL_VERBS, READING_VERBS, WHOLE_POOL_VERBS
from kvgen.text import wrap
from kvgen.types import DTYPES
from kvgen.views import HelpersView, OperationView, PoolView
from kvgen.walk import count, packed, value_fields

IN_CLASS = STEP
IN_METHOD = 2 * STEP
SKIPPED = "Slots outside the space are skipped; of tokens with one slot, each byte is from one of them."
STORES, LOADS = ("store", "put"), ("load", "get")


def pool_view(layout: Layout, has_translation: bool, has_init: bool) -> PoolView:
    return _Pool(layout, has_translation, has_init).view()


def copied_fields(layout: Layout) -> bool:
    """Whether some operation reads or writes single fields."""
    return any(item.verb in KERNEL_VERBS for item in layout.operations)


def shown_rows(layout: Layout) -> bool:
    return any(item.view == "rows" for item in layout.operations)


def reads_codes(layout: Layout) -> bool:
    """Whether some operation dequantises."""
    loads = [(item, target) for item in layout.operations if item.verb == "load" for target in _targets(layout, item)]
    return any(field.quant for item, target in loads for field in target.page.fields if field.name in item.fields)


def takes_scales(layout: Layout) -> bool:
    """Whether some operation is given scales."""
    return any(_scale_arguments(target.page, item) for item in layout.operations for target in _targets(layout, item))


def load_time_pages(layout: Layout) -> bool:
    """Whether some kernel is compiled for numbers that only load time knows."""
    targets = (target for item in layout.operations if item.verb in KERNEL_VERBS for target in _targets(layout, item))
    return any(target.needs_constants for target in targets)


def pages_of(layout: Layout, operation: OperationLayout) -> list[Page]:
    """The pages of an operation's buffers, each once."""
    found: list[Page] = []
    for buffer in layout.buffers:
        if buffer.name in operation.buffers:
            found += [case.use for case in buffer.pages if all(case.use is not page for page in found)]
    return found


def _targets(layout: Layout, operation: OperationLayout) -> Iterator[Target]:
    """What its kernels are for: each of its pages, by its name."""
    names = _names_of_pages(layout)
    for page in pages_of(layout, operation):
        users = [buffer for buffer in layout.buffers if any(case.use is page for case in buffer.pages)]
        is_moved = any(buffer.align is not None for buffer in users)
        is_divided = any(buffer.split is not None for buffer in layout.buffers)
        yield Target(page=page, name=names[id(page)], moved=is_moved, divided=is_divided)


def _names_of_pages(layout: Layout) -> dict[int, str]:
    """What kernels call each page: its format, with its slots where pages of it have several numbers of them."""
    found: dict[int, str] = {}
    for page in layout.pages:
        alike = [other for other in layout.pages if other.format == page.format]
        name = page.format if len(alike) == 1 else f"{page.format}_of_{page.slots}"
        while name in found.values() or (name != page.format and any(name == other.format for other in layout.pages)):
            name += "_"
        found[id(page)] = name
    return found


def _given(verb: str, field: FieldLayout) -> FieldLayout:
    """A field as the arguments of a verb are, or what it returns: values, or stored bytes."""
    return field if verb in ("store", "load") else packed(field) or field


def _is_float(field: FieldLayout) -> bool:
    """Whether a load can convert the field."""
    return field.dtype in FLOATS or field.quant is not None


def _dtype_unasked(field: FieldLayout) -> str:
    """The dtype that a load returns a field in where the caller names none."""
    return plain_dtype(field) if field.quant is None else "bfloat16"


def _scale_arguments(page: Page, item: OperationLayout) -> tuple[str, ...]:
    """The arguments for the scales that a store or load on a page is given."""
    if item.verb not in ("store", "load"):
        return ()
    fields = [field for field in page.fields if field.name in item.fields and field.quant is not None]
    return tuple(scale_argument(field.name) for field in fields if field.quant.outer or field.quant.scale == "given")


def scale_argument(name: str) -> str:
    """What the given scale of a field is called."""
    return f"{name}_scale"


def by_page(targets: list[Target], values: list[str]) -> tuple[list[str], str]:
    """Entries of a dict that has a value for each page, and what to look it up by: code over an entry.

    Slots tell pages of one format apart; 0 stands for those of load time that no other page has.
    """
    formats = [target.page.format for target in targets]
    if len(set(formats)) == len(formats):
        rows = [f"{quoted(own)}: {value}" for own, value in zip(formats, values, strict=True)]
        return rows, "entry.page.format"
    known = sorted({target.page.slots.known for target in targets if target.page.slots.known is not None})
    found = {(own.page.format, own.page.slots.known or 0): value for own, value in zip(targets, values, strict=True)}
    for (format, slots), value in list(found.items()):
        if slots == 0:
            found |= {(format, other): value for other in known if (format, other) not in found}
    rows = [f"({quoted(format)}, {slots}): {value}" for (format, slots), value in found.items()]
    listed = flat(tuple_of([Raw(str(slots)) for slots in known]))
    return rows, f"entry.page.format, entry.page.slots if entry.page.slots in {listed} else 0"


class _Pool:
    def __init__(self, layout: Layout, has_translation: bool, has_init: bool) -> None:
        self.layout, self.has_translation, self.has_init = layout, has_translation, has_init
        self.buffers = {buffer.name: buffer for buffer in layout.buffers}
        self.maker = KernelMaker()

    def view(self) -> PoolView:
        names = {item.verb: item.name for item in self.layout.operations}
        own = [item for item in self.layout.operations if item.verb not in WHOLE_POOL_VERBS]
        operations = tuple(self.operation(item) for item in own)
        kernels = list(self.maker.kernels.items())

        def of(*verbs: str) -> tuple:
            return tuple(view for (verb, _, _), view in kernels if verb in verbs)

        stores, loads, gathers = of(*STORES), of(*LOADS), of("gather")
        uses = {name for _, view in kernels for name in view.uses}
        has_given = takes_scales(self.layout)
        has_rows = shown_rows(self.layout)
        has_reads = bool(loads or gathers)
        is_in_order = all(view.is_in_order for view in stores)
        shows_fields = any(item.is_fields for item in operations)
        return PoolView(
            operations=operations,
            kernels=(*stores, *loads, *gathers),
            stores=stores,
            loads=loads,
            gathers=gathers,
            quantisers=tuple(self.maker.quantisers.values()),
            coders=tuple(self.maker.coders.values()),
            helpers=HelpersView(**{name: name in uses for name in HelpersView.__dataclass_fields__}),  # type: ignore[arg-type]
            **self.whole_pool(),
            move=names["move"],
            save=names["save"],
            restore=names["restore"],
            warmups=tuple(self.warmups(own)),
            torch_dtypes=self.torch_dtypes(),
            integers=flat(Group("{", tuple(Raw(f"{n}: torch.{name}") for n, name in INTEGERS.items()), "}")),
            units=statement("_UNITS = ", Group("{", tuple(Raw(f"{n}: torch.{name}") for n, name in _UNITS), "}"), 0),
            constants=self.constants("e4m3_codes" in uses),
            value_names=self.value_names(),
            given_scales=self.given_scales(own),
            has_given=has_given,
            scales=", *scales" if has_given else "",
            has_owned=any(item.entry == "_owned" and not item.is_describe for item in operations),
            has_sources=any(item.entry == "_source" for item in operations),
            has_values=bool(stores),
            has_infos=any(item.is_describe for item in operations),
            has_rows=has_rows,
            has_field_views=has_reads or bool(stores) or shows_fields or self.has_init,
            has_index=has_reads or bool(stores),
            has_reads=has_reads,
            is_in_order=is_in_order,
            has_torch_dtypes=has_rows or shows_fields or self.has_init,
        )

    def whole_pool(self) -> dict[str, Any]:
        """What the kernels over all layers are given of each space: slots or pages, and how many there are."""
        own = [buffer.space for buffer in self.layout.buffers if buffer.memory == "device"]
        spaces = list(dict.fromkeys(own))

        def all_of(head: str, name: str) -> str:
            return statement(f"{head} = ", tuple_of([Raw(f"{space}_{name}") for space in spaces]), STEP)

        def parameters(what: str) -> list[str]:
            kinds = (f"{what}_ptr", f"{what}_stride", "count", f"num_{what}")
            return [f"{space}_{kind}" for space in spaces for kind in kinds]

        def decorator(what: str) -> str:
            numbers = [f"{space}_{kind}" for space in spaces for kind in (f"{what}_stride", "count", f"num_{what}")]
            return jit(numbers, [f"{space}_{what}_ptr" for space in spaces])

        def slots_or_pages(what: str) -> tuple[str, ...]:
            kinds = (f"{what}_ptr", f"{what}_stride", "count", f"num_{what}")
            names = (f"{what}_ptrs", f"{what}_strides", "counts", f"num_{what}")
            return tuple(all_of(head, name) for head, name in zip(names, kinds, strict=True))

        records = ["RECORDS: tl.constexpr", "TOKENS: tl.constexpr"]
        spans = ["SPANS: tl.constexpr", "COLUMNS: tl.constexpr"]
        copied = ["staging_ptr", "table_ptr", *parameters("slots"), *records]
        blank = ["blank_ptr"] if self.has_init else []
        cleared = ["table_ptr", *blank, *parameters("pages"), *spans]
        return {
            "pack_signature": signature("_pack_kernel", copied, ""),
            "unpack_signature": signature("_unpack_kernel", copied, ""),
            "clear_signature": signature("_clear_kernel", cleared, ""),
            "slots_decorator": decorator("slots"),
            "pages_decorator": decorator("pages"),
            "slots_lines": slots_or_pages("slots"),
            "pages_lines": slots_or_pages("pages"),
            "blocks_of_a_page": " * (entry.space.page_size // entry.page.slots)" if self.has_block() else "",
            "or_shared_rows": ", or slots that share rows" if self.has_translation else "",
            "or_parted_rows": ", or a part of the slots that share a row" if self.has_translation else "",
            "blank_argument": ", self._blank" if self.has_init else ",",
        }

    def has_block(self) -> bool:
        """Whether several pages of a buffer may make up one of its space."""
        return any(buffer.block is not None for buffer in self.layout.buffers)

    def constants(self, has_codes: bool) -> str:
        """The constants that kernels may have."""
        native = ', "NATIVE": self._native' if has_codes else ""
        gathers = [item for item in self.layout.operations if item.verb == "gather"]
        if any(self.space_page(item) == "PAGE_SIZE" for item in gathers):
            native += ', "PAGE_SIZE": entry.space.page_size'
        return f'{{"TOKENS": tokens{native}{", **entry.page.constants" if load_time_pages(self.layout) else ""}}}'

    def value_names(self) -> str:
        """The fields of each format that hold values: whose widths decide how many tokens a program takes."""
        found = {page.format: [Raw(quoted(name)) for name in value_fields(page)] for page in self.layout.pages}
        items = tuple(Raw(f"{quoted(format)}: {flat(tuple_of(names))}") for format, names in found.items())
        return statement("_VALUES = ", Group("{", items, "}", broken=True), 0)

    def torch_dtypes(self) -> str:
        own = {field.dtype for page in self.layout.pages for field in page.fields}
        names = sorted(TORCH_DTYPES if own - set(DTYPES) else own & set(TORCH_DTYPES))
        items = tuple(Raw(f"{quoted(name)}: torch.{TORCH_DTYPES[name]}") for name in names)
        return statement("_TORCH_DTYPES = ", Group("{", items, "}", broken=True), 0)

    # -- one operation

    def operation(self, item: OperationLayout) -> OperationView:
        names = tuple_of([Raw(quoted(name)) for name in item.buffers])
        arguments, doc = self.arguments(item)
        returns = {"store": "None", "put": "None", "describe": "tuple[list[int], list[int], list[int]]"}
        if item.verb in (*LOADS, "gather"):
            annotation = f"tuple[{', '.join(['torch.Tensor'] * len(item.fields))}]"
        elif item.verb == "view" and item.view == "fields":
            annotation = "dict[str, torch.Tensor]"
        else:
            annotation = returns.get(item.verb, "torch.Tensor")
        summary, rest = self.texts(item)
        return OperationView(
            signature=signature(item.name, ["self", *arguments], f" -> {annotation}", IN_CLASS),
            summary=summary,
            doc=tuple(_docstring(rest, doc, self.raises(item))),
            buffers=flat(names),
            entry="_source" if self.reads_others(item) else "_owned",
            values=tuple(self.values(item)) if item.verb in STORES else (),
            calls=tuple(self.calls(item)),
            row_fields=flat(tuple_of([Raw(quoted(name)) for name in item.fields])),
            is_store=item.verb in STORES,
            is_load=item.verb in LOADS,
            is_gather=item.verb == "gather",
            is_pages=item.verb == "view" and item.view in (None, "pages"),
            is_rows=item.verb == "view" and item.view == "rows",
            is_fields=item.verb == "view" and item.view == "fields",
            is_describe=item.verb == "describe",
            loaded_dtypes=self.loaded_dtypes(item) if item.verb == "load" else "",
            loaded_names=self.loaded_names(item),
            has_translation=self.has_translation and not item.at_own,
        )

    def loads_own_dtypes(self, item: OperationLayout) -> bool:
        """Whether a load returns some field in a dtype of its own, other than bfloat16, unless another is asked for."""
        fields = (field for target in _targets(self.layout, item) for field in target.page.fields)
        floats = [field for field in fields if field.name in item.fields and _is_float(field)]
        return any(_dtype_unasked(field) != "bfloat16" for field in floats)

    def loaded_dtypes(self, item: OperationLayout) -> str:
        """The dtypes that a load may be asked for; None among them where that asks for more than one of them does."""
        none = [Raw("None")] if self.loads_own_dtypes(item) else []
        return flat(tuple_of([*none, *(Raw(f"torch.{name}") for name in _LOADED)]))

    def loaded_names(self, item: OperationLayout) -> str:
        """The same as a refusal lists them."""
        *most, last = ["None", *_LOADED] if self.loads_own_dtypes(item) else _LOADED
        return f"{', '.join(most)} or {last}"

    def reads_others(self, item: OperationLayout) -> bool:
        """Whether it works for layers that read what another layer owns, too."""
        return item.verb in READING_VERBS and self.has_readers(item)

    def has_readers(self, item: OperationLayout) -> bool:
        return any(self.buffers[name].readers is not None for name in item.buffers)

    def arguments(self, item: OperationLayout) -> tuple[list[str], list[str]]:
        """The parameters of the method, and what its docstring says of each."""
        if item.verb == "describe":
            return [], []
        owners = " or ".join(f"`{name}`" for name in item.buffers)
        has = "owns or reads" if self.reads_others(item) else "owns"
        arguments, doc = ["layer_id: int"], [f"layer_id: global id of a layer that {has} {owners}."]
        if item.verb == "gather":
            arguments += ["seq_lens: torch.Tensor", "page_table: torch.Tensor"]
            arguments += ["seq_len_sum: int | None = None", "max_seq_len: int | None = None"]
            doc += [
                "seq_lens: tokens of each request, int32 or int64 [b].",
                "page_table: the pages of each request in order, int32 or int64 [b, pages].",
                "seq_len_sum, max_seq_len: the sum and the greatest of `seq_lens`; with both the host does not wait.",
            ]
        if item.verb in (*STORES, *LOADS):
            arguments.append("loc: torch.Tensor")
            doc.append("loc: slots, int32 or int64 [n].")
        if item.verb in STORES:
            for argument, name in zip(item.arguments, item.fields, strict=True):
                arguments.append(f"{argument}: torch.Tensor")
                dtype = " or ".join(dict.fromkeys(own for dtypes in self.dtypes(item, name).values() for own in dtypes))
                doc.append(f"{argument}: {name}, {dtype} [n, {self.shown_shape(item, name)}].")
        if item.verb == "load":
            if self.loads_own_dtypes(item):
                arguments.append("dst_dtype: torch.dtype | None = None")
                kept = "None for bfloat16 where a field is quantised and for its own dtype where it is not"
                doc.append(f"dst_dtype: of what comes back, bfloat16, float16 or float32; {kept}.")
            else:
                arguments.append("dst_dtype: torch.dtype = torch.bfloat16")
                doc.append("dst_dtype: of what comes back, bfloat16, float16 or float32.")
        given = self.scales_given(item)
        arguments += [f"{name}: torch.Tensor | float | None = None" for name in given]
        if given:
            names = ", ".join(given)
            doc.append(f"{names}: where the format takes a scale, a number above 0 or float32 [1] of the device; or 1.")
        if item.verb in STORES:
            arguments += ["*", "skip_reserved: bool = True"]
            doc.append("skip_reserved: whether slot 0 is skipped too, which padded tokens have.")
        if item.verb == "view" and item.view == "rows":
            arguments.append("dtype: torch.dtype | None = None")
            doc.append("dtype: None for bytes, or that of every value in a row.")
        return arguments, doc

    def field(self, item: OperationLayout, name: str) -> FieldLayout:
        """A field as an operation has it: values, or the bytes that they are stored as."""
        page = self.buffers[item.buffers[0]].pages[0].use
        return _given(item.verb, next(field for field in page.fields if field.name == name))

    def shown_shape(self, item: OperationLayout, name: str) -> str:
        return ", ".join(str(extent) for extent in self.field(item, name).shape[1:])

    def scales_given(self, item: OperationLayout) -> tuple[str, ...]:
        """The arguments for scales that are given, in some format of the operation's buffers."""
        found = {name for target in _targets(self.layout, item) for name in _scale_arguments(target.page, item)}
        return tuple(name for name in map(scale_argument, item.fields) if name in found)

    def given_scales(self, items: list[OperationLayout]) -> str:
        """Of each format the scales that are given, for all operations."""
        found: dict[str, list[str]] = {}
        for item in items:
            for target in _targets(self.layout, item):
                names = found.setdefault(target.page.format, [])
                names += [name for name in _scale_arguments(target.page, item) if name not in names]
        rows = [(format, tuple_of([Raw(quoted(name)) for name in names])) for format, names in found.items() if names]
        items_ = tuple(Raw(f"{quoted(format)}: {flat(names)}") for format, names in rows)
        return statement("_GIVEN_SCALES = ", Group("{", items_, "}", broken=True), 0)

    def texts(self, item: OperationLayout) -> tuple[str, str]:
        """The first line of the docstring, and the paragraph behind it."""
        owners = " or ".join(f"`{name}`" for name in item.buffers)
        *most, last = [f"`{name}`" for name in item.fields] or [""]
        fields = f"{', '.join(most)} and {last}" if most else last
        match item.verb:
            case "store":
                return f"Store tokens in {owners}, quantised where the format is. One kernel.", SKIPPED
            case "put":
                return f"Store fields as they are in {owners}. One kernel.", SKIPPED
            case "load":
                shapes = ", ".join(f"{name} [n, {self.loaded_shape(item, name)}]" for name in item.fields)
                return f"Read tokens of {owners}, dequantised. One kernel.", (
                    f"Returns {shapes}; zeros for a slot outside. A NaN that is computed is 0x7FFF in 16 bits."
                )
            case "get":
                return f"Read {fields} of tokens as stored in {owners}. One kernel.", (
                    "Returns the bytes of each, uint8 [n, bytes]; zeros for a slot outside the space."
                )
            case "gather":
                return f"Read {fields} of whole sequences as stored in {owners}. One kernel.", (
                    "Returns the bytes of each, uint8 [seq_len_sum, bytes], requests one after the other; zeros where"
                    " the page table ends, for pages outside the space, and for tokens past `max_seq_len`."
                )
            case "describe":
                return f"Addresses, bytes and bytes of a page of {owners} for each layer held.", (
                    "Three lists in the order of the layers; zeros for a layer that owns none"
                    f"{', also where it reads that of another' if self.has_readers(item) else ''}."
                )
        match item.view:
            case "rows":
                what = f"{fields} of every slot" if item.fields else "Every slot"
                return f"{what} of {owners}, a view: uint8 [slots, bytes].", (
                    "Where all of it is of one dtype, and that is given: [slots, 1, values]."
                )
            case "fields":
                summary = f"Each field of {owners}, a view: [pages, slots of a page, axes of the field]."
                return summary, self.odd_axes(item)
        return f"The pages of {owners}: uint8 [pages, bytes].", ""

    def odd_axes(self, item: OperationLayout) -> str:
        """What a view cannot show as one axis, or as one element."""
        fields = [field for page in pages_of(self.layout, item) for field in page.fields]
        notes = []
        if any(len(pieces) > 1 for field in fields for pieces in field.pieces):
            notes.append("An axis that lies in pieces is an axis for each, the outermost first.")
        if any(field.dtype == "e2m1" for field in fields):
            notes.append("Two e2m1 values are one byte.")
        return " ".join(notes)

    def loaded_shape(self, item: OperationLayout, name: str) -> str:
        shape = self.shown_shape(item, name)
        return shape if "," in shape else f"1, {shape}"

    def raises(self, item: OperationLayout) -> list[str]:
        if item.verb == "describe":
            return []
        only_reads = self.has_readers(item) and not self.reads_others(item)
        lines = [
            f"ValueError: a layer that is not held here{' or only reads' if only_reads else ''}, or an unfit argument."
        ]
        return [*lines, "LookupError: a layer without the buffer, with those that have one."]

    def dtypes(self, item: OperationLayout, name: str) -> dict[str, tuple[str, ...]]:
        """What a value of each format may be given as; what is stored without scales also as the codes."""
        found = {}
        for target in _targets(self.layout, item):
            field = next(field for field in target.page.fields if field.name == name)
            stored = TORCH_DTYPES[field.dtype]
            if item.verb == "put" or field.quant is None:
                found[target.page.format] = (stored,)
            elif field.quant.scale in ("none", "given"):
                found[target.page.format] = ("bfloat16", stored)
            else:
                found[target.page.format] = ("bfloat16",)
        return found

    def values(self, item: OperationLayout) -> Iterator[str]:
        """The arguments, checked and as rows of the slots."""
        yield from self.lookups(item, IN_METHOD)
        for argument, name in zip(item.arguments, item.fields, strict=True):
            field = self.field(item, name)
            shape = tuple_of([Raw("len(slots)"), *(Raw(in_constants(extent)) for extent in field.shape[1:])])
            only = self.only_dtype(item, name)
            given = Raw(f"torch.{only}" if only else f"*{self.local_dtypes(item, name)}")
            checked = call("self._values", Raw(quoted(argument)), Raw(argument), shape, given)
            yield statement(f"{argument} = ", checked, IN_METHOD)

    def only_dtype(self, item: OperationLayout, name: str) -> str | None:
        """What the values of a field are given as in every format; None where there are several."""
        found = {dtype for dtypes in self.dtypes(item, name).values() for dtype in dtypes}
        return found.pop() if len(found) == 1 else None

    def local_dtypes(self, item: OperationLayout, name: str) -> str:
        """The local that `lookups` makes for a field."""
        several = [self.dtypes(item, own) for own in item.fields if self.only_dtype(item, own) is None]
        return "dtypes" if all(own == several[0] for own in several) else f"{local_name(name)}_dtypes"

    def lookups(self, item: OperationLayout, indent: int) -> Iterator[str]:
        """Locals with the dtypes that values may have, by the format of the page where that tells."""
        several = [name for name in item.fields if self.only_dtype(item, name) is None]
        for local, name in {self.local_dtypes(item, name): name for name in several}.items():
            tuples = {
                format: tuple_of([Raw(f"torch.{own}") for own in dtypes])
                for format, dtypes in self.dtypes(item, name).items()
            }
            rows = tuple(Raw(f"{quoted(format)}: {flat(own)}") for format, own in tuples.items())
            first, *others = tuples.values()
            is_table = any(flat(own) != flat(first) for own in others)
            code = Group("{", rows, "}[entry.page.format]", broken=True) if is_table else first
            yield statement(f"{local} = ", code, indent)

    def calls(self, item: OperationLayout) -> Iterator[str]:
        """The kernel of the page's format."""
        if item.verb not in KERNEL_VERBS:
            return
        kernels = []
        for target in _targets(self.layout, item):
            view = self.maker.kernel(
                item.verb, target, item.fields, self.space_page(item) if item.verb == "gather" else ""
            )
            given = [Raw(view.kernel), Raw(view.twin)]
            outputs = [] if item.verb in STORES else [tuple_of(own) for own in self.outputs(item, target)]
            kernels.append((target, given, outputs))
        arguments = ["entry"]
        arguments += ["lengths", "table", "total", "longest"] if item.verb == "gather" else ["slots"]
        if item.verb in STORES:
            arguments += ["first_slot", *item.arguments]
        if given := self.scales_given(item):
            scales = call("self._scales", Raw("entry"), *(Keyword(name, Raw(name)) for name in given))
            yield statement("scales = ", scales, IN_METHOD)
            arguments.append("scales=scales")
        own = {"store": "_store", "put": "_store", "gather": "_gather"}.get(item.verb, "_load")
        _, given, outputs = kernels[0]
        alike = all(list(map(flat, others)) == list(map(flat, outputs)) for _, _, others in kernels)
        if len(kernels) == 1:
            chosen = [*given, *outputs]
        else:
            values = [flat(tuple_of([*names, *([] if alike else others)])) for _, names, others in kernels]
            rows, chosen_by = by_page([target for target, _, _ in kernels], values)
            yield statement("own = ", Group("{", tuple(map(Raw, rows)), f"}}[{chosen_by}]", broken=True), IN_METHOD)
            chosen = [Raw("*own"), *(outputs if alike else [])]
        run = call(f"self.{own}", *chosen, *map(Raw, arguments))
        if item.verb in STORES:
            yield statement("", run, IN_METHOD)
        elif item.verb == "load":
            names = without_brackets([Raw(local_name(name)) for name in item.fields])
            yield statement(f"{names} = ", run, IN_METHOD)
            yield returned([self.shaped(item, name) for name in item.fields], IN_METHOD)
        elif alike and "int" not in flat(outputs[1]).replace("uint8", ""):
            yield statement("return ", run, IN_METHOD)
        else:
            yield statement("read = ", run, IN_METHOD)
            yield "return tuple(values.view(torch.uint8) for values in read)"

    def space_page(self, item: OperationLayout) -> str:
        """Slots of a page of the page table of a gather: a number, or a constant of the kernel."""
        sizes = {space.name: space.page_size for space in self.layout.spaces}
        own = {sizes[self.buffers[name].space] for name in item.buffers}
        return "PAGE_SIZE" if len(own) > 1 or None in own else str(own.pop())

    def outputs(self, item: OperationLayout, target: Target) -> tuple[list[Code], list[Code]]:
        """Values of a slot and dtype of each field that comes back from a page."""
        fields = {field.name: field for field in target.page.fields}
        numbers, dtypes = [], []
        for name in item.fields:
            field = fields[name]
            laid = _given(item.verb, field)
            numbers.append(Raw(in_constants(count(laid))))
            dtype = f"torch.{integer_dtype(packed(field) or field)}"
            if item.verb == "load":
                dtype = f"torch.{_dtype_unasked(field)}"
                if _is_float(field):
                    dtype = f"dst_dtype or {dtype}" if self.loads_own_dtypes(item) else "dst_dtype"
            dtypes.append(Raw(dtype))
        return numbers, dtypes

    def shaped(self, item: OperationLayout, name: str) -> Code:
        """A field that was loaded, with its axes; one axis counts as that of a single head."""
        field = self.field(item, name)
        extents = [Raw(in_constants(extent)) for extent in field.shape[1:]]
        shape = tuple_of(extents if len(extents) > 1 else [Raw("1"), *extents])
        return call(f"{local_name(name)}.unflatten", Raw("1"), shape)

    def warmups(self, items: list[OperationLayout]) -> Iterator[str]:
        """Calls of every operation that launches, on slots that it skips."""
        for item in items:
            if item.verb not in KERNEL_VERBS:
                continue
            names = flat(tuple_of([Raw(quoted(name)) for name in item.buffers]))
            loops = {
                "load": f"product(nowhere, {self.loaded_dtypes(item)})",
                "gather": "product(nowhere, nowhere)",
            }
            given = {"load": "slots, dtype", "gather": "lengths, table"}.get(item.verb, "slots")
            texts = {
                "load": ["layer", "slots", "dtype"],
                "gather": ["layer", "lengths + 2", "table[:, None]", "1", "1"],
            }.get(item.verb, ["layer", "slots"])
            arguments: list[Code] = list(map(Raw, texts))
            yield f"for {given} in {loops.get(item.verb, 'nowhere')}:"
            yield f"    for layer in self._owners({names}):"
            depth = 2
            if item.verb in STORES:
                arguments += self.blanks(item)
                several = [name for name in item.fields if self.only_dtype(item, name) is None]
                if several or any("entry." in flat(argument) for argument in arguments):
                    yield f"        entry = self._owned(layer, {names})"
                for line in self.lookups(item, IN_METHOD + depth * STEP):
                    yield f"        {line}"
                for name in several:
                    yield f"{' ' * depth * STEP}for {local_name(name)}_dtype in {self.local_dtypes(item, name)}:"
                    depth += 1
            margin = " " * depth * STEP
            yield margin + statement("", call(f"self.{item.name}", *arguments), IN_METHOD + depth * STEP)

    def blanks(self, item: OperationLayout) -> Iterator[Code]:
        """A value of each argument, for one slot."""
        for name in item.fields:
            field = self.field(item, name)
            shape = tuple_of([Raw("1"), *(Raw(in_constants(extent)) for extent in field.shape[1:])])
            only = self.only_dtype(item, name)
            dtype = f"torch.{only}" if only else f"{local_name(name)}_dtype"
            yield call("self._none.new_zeros", shape, Keyword("dtype", Raw(dtype)))


def _docstring(rest: str, arguments: list[str], raises: list[str]) -> Iterator[str]:
    """The lines behind the first one of a method's docstring."""
    margin = " " * IN_METHOD
    if rest:
        yield from wrap(rest, margin, margin, 120)
    for title, entries in (("Args", arguments), ("Raises", raises)):
        if entries:
            if rest or title == "Raises":
                yield ""
            yield f"{margin}{title}:"
            for entry in entries:
                yield from wrap(entry, f"{margin}    ", f"{margin}        ", 120)


_LOADED = ("bfloat16", "float16", "float32")  # that a load converts to
_UNITS = ((1, "uint8"), (2, "int16"), (4, "int32"), (8, "int64"), (16, "complex128"))
