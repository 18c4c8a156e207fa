"""No two elements of a page share a bit.

Every page of every spec is enumerated from the numbers that its module states, byte by byte. Random formats are laid
out a second time here, by walking through the page as the language describes it, and compared element by element.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from math import lcm, prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvgen.compile import Compiled, compile_spec

ROOT = Path(__file__).parent.parent
LANGUAGE = ROOT / "tests" / "language"
FILES = [*sorted((ROOT / "specs").glob("*.yaml")), *sorted(LANGUAGE.glob("*.yaml"))]
LAYOUTS = [path for path in FILES if "\nlayout:" in path.read_text(encoding="utf-8")]
FRAGMENTS = [path for path in FILES if path not in LAYOUTS]

BITS = {"bf16": 16, "f16": 16, "f32": 32, "e4m3": 8, "e5m2": 8, "e8m0": 8, "e2m1": 4, "u8": 8, "i8": 8, "i32": 32}
BITS["i64"] = 64


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def compiled_file(path: Path) -> Compiled:
    return compile_spec(str(path), lambda file: Path(file).read_bytes())


def compiled_text(text: str, folder: Path = LANGUAGE) -> Compiled:
    """A spec in memory, its fragments from `folder`."""
    return compile_spec(
        "spec.yaml", lambda file: text.encode() if file == "spec.yaml" else (folder / file).read_bytes()
    )


# Enumeration of what a module states


def as_tuple(number: Any) -> tuple:
    return number if isinstance(number, tuple) else (number,)


def addresses(item: Any) -> np.ndarray:
    """The half byte that each element of a `Field` begins at; an axis for the slots and for each axis of the field."""
    found = np.zeros((1,) * len(item.shape), dtype=np.int64)
    assert len(item.shape) == len(item.stride)
    for position, (extents, strides) in enumerate(zip(item.shape, item.stride, strict=True)):
        extents, strides = as_tuple(extents), as_tuple(strides)
        assert len(extents) == len(strides)
        index = np.arange(prod(extents))
        offset = np.zeros(len(index), dtype=np.int64)
        for extent, stride in zip(extents, strides, strict=True):
            half_bytes = 2 * Fraction(stride)
            assert half_bytes.denominator == 1
            offset += index % extent * int(half_bytes)
            index //= extent
        sides = [1] * len(item.shape)
        sides[position] = len(offset)
        found = found + offset.reshape(sides)
    assert isinstance(item.offset, int)
    return found + 2 * item.offset


def tensors(page: Any) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
    """(page bytes, [(field, byte that its offset counts from)]) of each tensor that holds the fields of a page."""
    if not getattr(page, "split", False):
        yield page.page_bytes, [(item, 0) for item in page.fields]
        return
    starts = [plane.offset for plane in page.planes] + [max(item.offset for item in page.fields) + 1]
    for plane, following in zip(page.planes, starts[1:], strict=True):
        yield (
            plane.page_bytes,
            [(item, plane.offset) for item in page.fields if plane.offset <= item.offset < following],
        )


def assert_disjoint(page: Any) -> None:
    """Every element of two pages after each other is aligned, inside its page, and shares no half byte with another."""
    placed = 0
    for page_bytes, fields in tensors(page):
        taken = np.zeros(4 * page_bytes, dtype=bool)
        expected = 0
        for item, base in fields:
            placed += 1
            width = BITS[item.dtype] // 4
            first = addresses(item).ravel() - 2 * base
            assert first.min() >= 0 and first.max() + width <= 2 * page_bytes, (
                f"{page.format}.{item.name} leaves the page"
            )
            for start in (0, 2 * page_bytes):
                if width >= 2:
                    assert not ((first + start) % width).any(), f"{page.format}.{item.name} is not aligned"
                for part in range(width):
                    assert not taken[first + start + part].any(), f"{page.format}.{item.name} overlaps another field"
                    taken[first + start + part] = True
            expected += 2 * width * first.size
        assert taken.sum() == expected, f"elements of {page.format} overlap"
    assert placed == len(page.fields)


def test_overlaps_are_found() -> None:
    """The enumeration fails where it should: each breach planted in a page that is otherwise sound."""
    namespace = compiled_file(LANGUAGE / "dsv4.yaml").namespace
    assert namespace is not None
    page = namespace.INDEX_FP8_PAGE
    assert_disjoint(page)
    key, scale = page.fields
    for message, fields, page_bytes in (
        ("overlaps another", (key, replace(scale, offset=8188)), 8448),
        ("is not aligned", (key, replace(scale, offset=8190)), 8448),
        ("leaves the page", (key, scale), 8444),
        ("leaves the page", (key, replace(scale, stride=(8, 4))), 8448),
        ("elements of", (replace(key, stride=(127, 1)), scale), 8448),
        ("is not aligned", (key, scale), 8450),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_disjoint(replace(page, fields=fields, page_bytes=page_bytes))


# The pages of the specs


def inputs_of(spec: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config and the choices that say `values`, as an expectation's `given` does."""
    config: dict[str, Any] = {}
    choices: dict[str, Any] = {}
    parameters = {name: item for name, item in spec["config"].items() if name in values or "is" in item}
    for name, item in parameters.items():
        sources = item.get("from", name)
        path = (sources if isinstance(sources, list) else [sources])[0].split(".")
        raw = {named: given for given, named in item["of"].items()} if isinstance(item.get("of"), dict) else {}
        value = values.get(name, item.get("is"))
        value = [raw.get(word, word) for word in value] if isinstance(value, list) else raw.get(value, value)
        section = config
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
    choices.update({name: value for name, value in values.items() if name not in parameters})
    return config, choices


@pytest.mark.parametrize("path", LAYOUTS, ids=name_of)
def test_pages_of_every_expectation(path: Path) -> None:
    """The constant pages of a module, and the pages of every layout that its spec expects something of."""
    module = compiled_file(path).namespace
    assert module is not None
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    pages = {value for value in vars(module).values() if isinstance(value, module.Page)}
    for expectation in spec["expect"]:
        if "error" in expectation or "config" in expectation:
            continue
        config, choices = inputs_of(spec, expectation["given"])
        for buffer in module.Layout.from_config(config, **choices).buffers:
            pages.update(buffer.pages if hasattr(buffer, "pages") else (buffer.page,))
    assert pages
    for page in pages:
        assert_disjoint(page)


LOAD_TIME = {  # numbers that meet the conditions of every format of the language specs, two draws of each
    "slots": (32, 96),
    "heads": (3, 1),
    "head_dim": (64, 32),
    "v_head_dim": (32, 96),
    "index_dim": (32, 48),
    "kv_lora_rank": (16, 32),
    "taps": (3, 1),
    "channels": (10, 6),
    "states": (2, 1),
    "kda_dim": (4, 6),
    "value_dim": (6, 2),
    "key_dim": (4, 5),
    "state_dtype": ("f32", "bf16"),
}


@pytest.mark.parametrize("path", LAYOUTS, ids=name_of)
def test_pages_of_load_time_numbers(path: Path) -> None:
    """Every page function of a module, for several numbers."""
    module = compiled_file(path).namespace
    assert module is not None
    for name, function in sorted(vars(module).items()):
        if not inspect.isfunction(function) or not name.endswith("_page"):
            continue
        parameters = list(inspect.signature(function).parameters)
        for values in product(*(LOAD_TIME[parameter] for parameter in parameters)):
            page = function(*values)
            assert page.slots == values[0]
            assert_disjoint(page)


def test_load_time_numbers_that_do_not_fit_are_refused() -> None:
    module = compiled_file(LANGUAGE / "gqa_orders.yaml").namespace
    assert module is not None
    for function, values, message in (
        (module.bf16_x5d_page, (8, 12, 8, 1), "bf16_x5d: head_dim must be a multiple of 8, not 12"),
        (module.bf16_x5d_page, (12, 8, 8, 1), "bf16_x5d: slot must be a multiple of 8, not 12"),
        (module.bf16_nhd_page, (16, 8, 0, 8), "bf16_nhd: heads is 0, and must be at least 1"),
        (module.nvfp4_nhd_page, (16, 8, 1, 16), "nvfp4_nhd: head_dim must be a multiple of 16, not 8"),
    ):
        names = list(inspect.signature(function).parameters)
        arguments = dict(zip(("slots", "head_dim", "heads", "v_head_dim"), values, strict=True))
        with pytest.raises(module.LayoutError) as error:
            function(**{name: arguments[name] for name in names})
        assert message in str(error.value)


# The formats of the fragments, in layouts of their own

NEEDED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "head_dim": 128, "v_head_dim": 128}
NEEDED |= {"heads": 8, "rope_dim": 64, "page_size": 128}


def fragment_pages(path: Path, slots: int, formats: list[str], **values: int) -> dict[str, Any]:
    """Pages of so many slots of formats of a fragment, as a module states them."""
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    numbers = {name: values.get(name, NEEDED[name]) for name, need in spec["needs"].items() if need == "int"}
    words = {name: need[0] for name, need in spec["needs"].items() if isinstance(need, list)}
    lines = ["kvgen: 1", "layout: of_a_fragment", "doc: Formats of a fragment", f"include: [{path.name}]", "config:"]
    lines += ["  num_hidden_layers: {type: int}"]
    lines += [f"  {name}: {{type: int, is: {number}}}" for name, number in numbers.items()]
    lines += ["choices:"] if words else []
    lines += [f"  {name}: {{of: [{word}], default: {word}}}" for name, word in words.items()]
    lines += ["layers: {body: num_hidden_layers}", f"spaces: {{token: {{slots: tokens, page: {slots}}}}}", "buffers:"]
    lines += [f"  {name}: {{format: {name}, space: token, layers: body}}" for name in formats]
    module = compiled_text("\n".join(lines) + "\n", path.parent).namespace
    assert module is not None
    return {value.format: value for value in vars(module).values() if isinstance(value, module.Page)}


@pytest.mark.parametrize("path", FRAGMENTS, ids=name_of)
def test_pages_of_fragments(path: Path) -> None:
    values = {"head_dim": 512} if "dsv4" in path.stem else {}
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    formats = [name for name, item in spec["formats"].items() if isinstance(item, dict)]
    pages = fragment_pages(path, 128, formats, **values)
    assert sorted(pages) == sorted(formats)
    for page in pages.values():
        assert_disjoint(page)


HAND_WORKED = [  # fragment, format, slots, sizes, page bytes, [(field, slot, index, byte)]
    ("mla_rows", "mla_bf16", 64, {}, 64 * 1152, [("rope", 2, (1,), 2 * 1152 + 1024 + 2)]),
    ("mla_rows", "mla_fp8_raw", 64, {}, 64 * 576, [("latent", 1, (5,), 581), ("rope", 63, (63,), 36_863)]),
    (
        "mla_rows",
        "mla_fp8_scaled",  # rows of 512 codes, 4 scales and 64 bf16: 656 bytes
        64,
        {},
        41_984,
        [
            ("latent", 3, (511,), 2479),
            ("latent_scale", 3, (2,), 2488),
            ("rope", 3, (0,), 2496),
            ("rope", 3, (63,), 2622),
        ],
    ),
    (
        "mla_rows",
        "mla_nvfp4",  # 256 bytes of codes, 32 scales, 16 unused, 128 of rope
        64,
        {},
        64 * 432,
        [("latent", 1, (2,), 433), ("latent_scale", 1, (31,), 719), ("rope", 1, (0,), 736)],
    ),
    (
        "mla_rows",
        "mla_nvfp4_ds",  # scale s of a row at 320 + 8 * (s % 4) + s // 4
        64,
        {},
        64 * 352,
        [
            ("latent_scale", 0, (6,), 337),
            ("latent_scale", 0, (31,), 351),
            ("latent_scale", 1, (1,), 680),
            ("rope", 0, (0,), 256),
        ],
    ),
    (
        "index_rows",
        "index_fp8",
        64,
        {},
        8448,
        [("key", 63, (127,), 8191), ("key_scale", 0, (0,), 8192), ("key_scale", 63, (0,), 8444)],
    ),
    (
        "index_rows",
        "index_fp8_amd",  # slot 18 is in the second row of tiles, value 37 in the third tile of a row of eight
        64,
        {},
        8448,
        [("key", 18, (37,), 1 * 2048 + 2 * 256 + 2 * 16 + 5), ("key", 18, (37,), 2597), ("key_scale", 1, (0,), 8196)],
    ),
    ("index_rows", "index_mxfp4", 64, {}, 4352, [("key", 1, (126,), 127), ("key_scale", 2, (3,), 4107)]),
    ("index_rows", "index_mxfp4_amd", 64, {}, 4352, [("key", 18, (64,), 2336), ("key_scale", 18, (2,), 4096 + 146)]),
    (
        "dsv4_rows",
        "v4",  # 64 rows of 576, 64 of 8, then up to the next multiple of 576
        64,
        {"head_dim": 512},
        37_440,
        [("nope", 1, (0,), 576), ("rope", 1, (0,), 1024), ("scale", 0, (0,), 36_864), ("scale", 63, (6,), 37_374)],
    ),
    ("dsv4_rows", "v4", 256, {"head_dim": 512}, 149_760, [("nope", 44, (0,), 25_344), ("scale", 44, (0,), 147_808)]),
    ("dsv4_rows", "v41", 64, {"head_dim": 512}, 33_792, [("scale", 2, (3,), 32_768 + 35)]),
    ("dsv4_rows", "v41_new", 64, {"head_dim": 512}, 33_792, [("scale", 2, (3,), 1571)]),
    ("dsv4_rows", "v41_fp4_new", 64, {"head_dim": 512}, 18_432, [("latent", 1, (6,), 291), ("scale", 1, (31,), 575)]),
    (
        "dsv4_rows",
        "v4_two_pool",  # 448 codes, each of 7 scales twice, rows of 512; then the rope of all slots
        64,
        {"head_dim": 512},
        40_960,
        [("scale", 1, (6, 1), 973), ("scale", 1, (6, 0), 972), ("rope", 1, (0,), 32_896)],
    ),
    ("kv_rows", "bf16_nhd", 16, {}, 65_536, [("k", 5, (3, 0), 11_008), ("v", 5, (3, 0), 32_768 + 11_008)]),
    ("kv_rows", "bf16_hnd", 16, {}, 65_536, [("k", 5, (3, 0), 13_568)]),
    (
        "kv_rows",
        "bf16_x5d",
        16,
        {},
        65_536,
        [
            ("k", 5, (3, 9), 2 * (3 * 2048 + 1 * 128 + 5 * 8 + 1)),
            ("v", 9, (3, 7), 32_768 + 2 * (3 * 2048 + 1024 + 7 * 8 + 1)),
        ],
    ),
    (
        "kv_rows",
        "mxfp8_atom",  # scales of a head: 32 groups of 4 slots, 4 scales each; 3 * 512 + 4 * 16 + 3 * 4 + 2 = 1614
        128,
        {},
        270_336,
        [("k_scale", 100, (3, 2), 262_144 + 1614), ("v_scale", 100, (3, 2), 266_240 + 1614), ("v", 0, (0, 0), 131_072)],
    ),
    (
        "kv_rows",
        "nvfp4_rows",
        128,
        {"heads": 1},
        18_432,
        [("k_scale", 1, (0, 0), 8200), ("v", 0, (0, 2), 9217), ("v_scale", 127, (0, 7), 18_431)],
    ),
    ("kv_rows", "nvfp4_hnd", 16, {}, 18_432, [("v_scale", 0, (0, 0), 17_408), ("k_scale", 15, (7, 7), 9215)]),
]


@pytest.mark.parametrize("case", HAND_WORKED, ids=lambda case: f"{case[1]}-{case[2]}")
def test_published_formats(case: tuple) -> None:
    """Bytes worked out by hand from the formats as they are published."""
    fragment, name, slots, sizes, page_bytes, elements = case
    page = fragment_pages(LANGUAGE / f"{fragment}.yaml", slots, [name], **sizes)[name]
    assert (page.slots, page.page_bytes) == (slots, page_bytes)
    fields = {item.name: item for item in page.fields}
    for name, slot, index, byte in elements:
        assert addresses(fields[name])[(slot, *index)] == 2 * byte, f"{page.format}.{name}[{slot}, {index}]"


# A second reading of the layout rule: a walk through the page, one element after the other


@dataclass(frozen=True)
class Piece:
    """Index // low % (high // low) of an axis; `high` None is the end of the axis."""

    axis: str
    low: int
    high: int | None

    def extent(self, sizes: Mapping[str, int]) -> int:
        return (self.high or sizes[self.axis]) // self.low

    def __str__(self) -> str:
        coarse = f"//{self.low}" if self.low > 1 else ""
        return f"{self.axis}{coarse}" + (f"%{self.high // self.low}" if self.high is not None else "")


@dataclass(frozen=True)
class Axis:
    """An axis of a field: a name and how many of its values are one here, or (name "") a plain number."""

    name: str
    coarse: int = 1
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name}//{self.coarse}" if self.coarse > 1 else self.name or str(self.number)


@dataclass(frozen=True)
class Values:
    """A field."""

    name: str
    dtype: str
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Gap:
    kind: str
    amount: int


@dataclass(frozen=True)
class Part:
    values: Values
    order: tuple[tuple[int, Piece], ...]  # (axis of the field, piece), outermost first
    written: bool  # whether the order is written out, or what `its axes as declared` comes to

    def __str__(self) -> str:
        pieces = ", ".join(str(piece) for _, piece in self.order)
        return f'"{self.values.name}[{pieces}]"' if self.written else self.values.name


@dataclass(frozen=True)
class Plane:
    each: tuple[Piece, ...]
    put: tuple[Part | Gap, ...]


@dataclass(frozen=True)
class Drawn:
    """A random format, and the sizes it is used with; those in `free` are known when a layout is made."""

    planes: tuple[Plane | Gap, ...]
    sizes: dict[str, int] = field(hash=False)
    free: frozenset[str] = frozenset()
    is_split: bool = False

    @property
    def parts(self) -> list[Part]:
        planes = [item for item in self.planes if isinstance(item, Plane)]
        return [part for plane in planes for part in plane.put if isinstance(part, Part)]


@dataclass
class Walked:
    """Where a walk has put every element, in half bytes, and whether a page like that can be."""

    starts: dict[str, np.ndarray]
    half_bytes: int
    of_planes: int  # half bytes without the gaps between planes
    is_sound: bool  # records and the page are whole bytes, elements aligned in their record

    def is_aligned(self, dtypes: Mapping[str, str]) -> bool:
        for name, first in self.starts.items():
            width = BITS[dtypes[name]] // 4
            if width > 1 and ((first % width).any() or self.half_bytes % width):
                return False
        return True


def up(position: int, multiple: int) -> int:
    return -(-position // multiple) * multiple


def walk(drawn: Drawn, sizes: Mapping[str, int]) -> Walked:
    """Go through a page and note where each element begins. Sizes in half bytes."""
    starts = {}
    for part in drawn.parts:
        shape = [sizes["slot"]]
        shape += [sizes[axis.name] // axis.coarse if axis.name else axis.number for axis in part.values.axes]
        starts[part.values.name] = np.full(shape, -1, dtype=np.int64)
    at, of_planes, is_sound = 0, 0, True
    for item in drawn.planes:
        if isinstance(item, Gap):
            at = at + 2 * item.amount if item.kind == "pad" else up(at, 2 * item.amount)
            continue
        start = at
        for outer in product(*(range(piece.extent(sizes)) for piece in item.each)):
            record, inside = at, 0
            taken: dict[str, int] = {}
            for digit, piece in zip(outer, item.each, strict=True):
                taken[piece.axis] = taken.get(piece.axis, 0) + digit * piece.low
            for part in item.put:
                if isinstance(part, Gap):
                    inside = inside + 2 * part.amount if part.kind == "pad" else up(inside, 2 * part.amount)
                    continue
                axes = part.values.axes
                base = [taken.get(axis.name, 0) for axis in axes]
                width = BITS[part.values.dtype] // 4
                is_sound = is_sound and inside % max(2, width) == 0
                for inner in product(*(range(piece.extent(sizes)) for _, piece in part.order)):
                    index = list(base)
                    for digit, (position, piece) in zip(inner, part.order, strict=True):
                        index[position] += digit * piece.low
                    place = (taken["slot"], *(number // axis.coarse for number, axis in zip(index, axes, strict=True)))
                    assert starts[part.values.name][place] == -1
                    starts[part.values.name][place] = record + inside
                    inside += width
            is_sound = is_sound and inside % 2 == 0
            at = record + inside
        of_planes += at - start
    assert all((first >= 0).all() for first in starts.values())
    return Walked(starts, at, of_planes, is_sound and at % 2 == 0)


# Random formats

AXES = ("a", "b", "c")
SIZES = (2, 3, 4, 6, 8, 12, 16)


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def cuts(draw: st.DrawFn, axis: str, low: int, total: int) -> list[Piece]:
    """An axis from `low` on cut into pieces that follow each other, innermost first."""
    found = []
    while low < total:
        high = low * draw(st.sampled_from(divisors(total // low)[1:]))
        is_top = high == total
        found.append(Piece(axis, low, None if is_top else high))
        low = high
    return found


@st.composite
def gaps(draw: st.DrawFn, width: int) -> list[Gap]:
    """Nothing, or what makes the next element aligned, or something else."""
    kind = draw(st.sampled_from(("none", "align", "align", "align", "pad", "odd")))
    if kind == "none":
        return []
    if kind == "odd":
        some = st.builds(Gap, st.sampled_from(("pad", "align")), st.integers(1, 6))
        return draw(st.lists(some, min_size=1, max_size=3))
    return [Gap(kind, max(1, width // 2) * draw(st.integers(1, 3)))]


@st.composite
def planes(draw: st.DrawFn, sizes: Mapping[str, int], number: int) -> Plane:
    shared = draw(st.lists(st.sampled_from(AXES), unique=True, max_size=2))
    fields = []
    for position in range(draw(st.integers(1, 2))):
        extra = draw(st.lists(st.sampled_from(AXES), unique=True, max_size=1))
        names = draw(st.permutations([*shared, *(name for name in extra if name not in shared)]))
        axes = [Axis(name, draw(st.sampled_from((1, 1, 1, *divisors(sizes[name])[:3])))) for name in names]
        if not axes or draw(st.booleans()):
            axes.insert(draw(st.integers(0, len(axes))), Axis("", number=draw(st.integers(1, 4))))
        dtype = draw(st.sampled_from(("u8", "bf16", "e4m3", "f32", "i64", "e2m1", "e2m1")))
        fields.append(Values(f"v{number}{position}", dtype, tuple(axes)))
    each = draw(cuts("slot", 1, sizes["slot"])) or [Piece("slot", 1, None)]
    for name in shared:
        start = lcm(*(axis.coarse for values in fields for axis in values.axes if axis.name == name))
        each += [piece for piece in draw(cuts(name, start, sizes[name])) if draw(st.booleans())]
    each = draw(st.permutations(each))
    put: list[Part | Gap] = []
    for values in fields:
        put += draw(gaps(BITS[values.dtype] // 4))
        put.append(draw(parts(values, each, sizes)))
    widest = max(BITS[values.dtype] // 4 for values in fields)
    return Plane(tuple(each), (*put, *draw(gaps(widest))))


@st.composite
def parts(draw: st.DrawFn, values: Values, each: list[Piece], sizes: Mapping[str, int]) -> Part:
    """A field with what is left of its axes, as declared or in an order of its own."""
    left: list[tuple[int, Piece]] = []
    for position, axis in enumerate(values.axes):
        if not axis.name:
            left.append((position, Piece("", 1, axis.number)))
            continue
        own: list[Piece] = []
        low: int | None = axis.coarse
        for piece in sorted((piece for piece in each if piece.axis == axis.name), key=lambda piece: piece.low):
            own += [Piece(axis.name, low, piece.low)] * (piece.low > low)
            low = piece.high
        own += [Piece(axis.name, low, None)] if low is not None else []
        left += [(position, piece) for piece in reversed(own)]
    named = [item for item in left if item[1].axis]
    if len(named) < len(left) or not named or draw(st.booleans()):
        return Part(values, tuple(left), written=False)
    finer = []
    for position, piece in named:
        smaller = draw(cuts(piece.axis, piece.low, piece.high or sizes[piece.axis])) or [piece]
        smaller[-1] = replace(smaller[-1], high=piece.high)
        finer += [(position, item) for item in smaller]
    return Part(values, tuple(draw(st.permutations(finer))), written=True)


@st.composite
def formats(draw: st.DrawFn) -> Drawn:
    sizes = {name: draw(st.sampled_from(SIZES)) for name in AXES}
    sizes["slot"] = draw(st.sampled_from((1, 2, 3, 4, 8, 12)))
    items: list[Plane | Gap] = []
    for number in range(draw(st.integers(1, 3))):
        plane = draw(planes(sizes, number))
        if items:
            items += draw(gaps(max(BITS[part.values.dtype] // 4 for part in plane.put if isinstance(part, Part))))
        items.append(plane)
    items += draw(gaps(max(BITS[part.values.dtype] // 4 for part in Drawn(tuple(items), sizes).parts)))
    return Drawn(tuple(items), sizes, draw(st.frozensets(st.sampled_from((*AXES, "slot")))), draw(st.booleans()))


def gap_text(gap: Gap) -> str:
    return f"{{{gap.kind}: {gap.amount}}}"


def spec_of(drawn: Drawn) -> str:
    """A layout with one buffer of the format."""
    used = {axis.name for part in drawn.parts for axis in part.values.axes if axis.name}
    lines = ["kvgen: 1", "layout: drawn", "doc: A random format", "config:", "  num_hidden_layers: {type: int}"]
    for name in sorted(used):
        known = "min: 1" if name in drawn.free else f"is: {drawn.sizes[name]}"
        lines.append(f"  {name}: {{type: int, {known}}}")
    if "slot" in drawn.free:
        lines += ["choices:", "  page_size: {type: int, min: 1, default: 1}"]
    lines += ["layers: {body: num_hidden_layers}", "spaces:"]
    lines.append(f"  token: {{slots: tokens, page: {'page_size' if 'slot' in drawn.free else drawn.sizes['slot']}}}")
    lines += ["formats:", "  row:", "    fields:"]
    for part in drawn.parts:
        axes = ", ".join(map(str, part.values.axes))
        lines.append(f'      {part.values.name}: "{part.values.dtype}[{axes}]"')
    lines.append("    page:")
    for item in drawn.planes:
        if isinstance(item, Gap):
            lines.append(f"      - {gap_text(item)}")
            continue
        put = ", ".join(gap_text(part) if isinstance(part, Gap) else str(part) for part in item.put)
        lines.append(f"      - {{each: [{', '.join(map(str, item.each))}], put: [{put}]}}")
    split = ", split: true" if drawn.is_split else ""
    lines += ["buffers:", f"  kv: {{format: row, space: token, layers: body{split}}}"]
    return "\n".join(lines) + "\n"


def may_be_refused(drawn: Drawn, walked: Walked, sizes: Mapping[str, int]) -> bool:
    """Whether a format breaks a rule, or comes near one: a stride that no second element uses counts as well."""
    dtypes = {part.values.name: part.values.dtype for part in drawn.parts}
    pieces = [piece for item in drawn.planes if isinstance(item, Plane) for piece in item.each]
    pieces += [piece for part in drawn.parts for _, piece in part.order]
    numbers = [axis.number for part in drawn.parts for axis in part.values.axes if not axis.name]
    is_odd = any(
        part.values.dtype == "e2m1" and (not part.order or part.order[-1][1].extent(sizes) % 2) for part in drawn.parts
    )
    is_single = sizes["slot"] == 1 or 1 in numbers or any(piece.extent(sizes) == 1 for piece in pieces)
    is_single = is_single or any(
        axis.name and sizes[axis.name] == axis.coarse for p in drawn.parts for axis in p.values.axes
    )
    return not walked.is_sound or not walked.is_aligned(dtypes) or is_odd or is_single


ROWS = """\
kvgen: 1
layout: rows
doc: A page worked out by hand
config:
  num_hidden_layers: {{type: int}}
  a: {{type: int, {a}}}
layers: {{body: num_hidden_layers}}
spaces: {{token: {{slots: tokens, page: {slots}}}}}
formats:
  row:
    fields: {fields}
    page: {page}
buffers: {{kv: {{format: row, space: token, layers: body}}}}
"""


@pytest.mark.parametrize("known", ["min: 1", "is: {a}"])
@pytest.mark.parametrize(
    ("slots", "a", "fields", "page", "expected", "page_bytes"),
    [
        # What `each` leaves of an axis is laid out outermost first: index // 4, then index % 2, four to a record.
        (1, 8, '{k: "u8[a]"}', '[{each: [slot, "a//2%2"], put: [k]}]', {"k": [0, 1, 4, 5, 2, 3, 6, 7]}, 8),
        (1, 8, '{k: "u8[a]"}', '[{each: [slot, "a//2%2"], put: ["k[a%2, a//4]"]}]', {"k": [0, 2, 4, 6, 1, 3, 5, 7]}, 8),
        (2, 2, '{k: "u8[a]"}', "[{each: [a, slot], put: [k]}]", {"k": [0, 2, 1, 3]}, 4),
        # One alignment after another: 2 moves up to 4, and 4 to 6; both at once would be 12.
        (2, 1, '{k: "u8[a]", v: "u8[a]"}', "[[k], {align: 4}, {align: 6}, [v]]", {"v": [6, 7]}, 8),
        (2, 1, '{k: "u8[a]", v: "u8[a]"}', "[[k], {align: 4}, {align: 8}, [v]]", {"v": [8, 9]}, 10),
        (2, 1, '{k: "u8[a]", v: "u8[a]"}', "[[k], {align: 8}, {align: 4}, [v]]", {"v": [8, 9]}, 10),
        (
            2,
            5,
            '{k: "u8[a]", v: "u8[a]"}',
            "[[k], {align: 4}, {pad: 1}, {align: 2}, [v], {align: 5}]",
            {"v": list(range(14, 24))},
            25,
        ),
        (2, 1, '{k: "u8[a]", v: "u8[a]"}', "[[k, {align: 3}, v, {align: 4}]]", {"k": [0, 4], "v": [3, 7]}, 8),
        (2, 3, '{k: "e2m1[2, a]"}', "[[{pad: 1}, k]]", None, None),
        (1, 4, '{k: "e2m1[a]"}', "[[{pad: 1}, k]]", {"k": [1, 1.5, 2, 2.5]}, 3),
    ],
)
def test_pages_worked_out_by_hand(
    slots: int,
    a: int,
    fields: str,
    page: str,
    expected: dict[str, list[float]] | None,
    page_bytes: int | None,
    known: str,
) -> None:
    """The same bytes whether `a` is known at build or at load; None where neither is possible."""
    made = compiled_text(ROWS.format(slots=slots, a=known.format(a=a), fields=fields, page=page))
    if expected is None and made.namespace is None:
        assert [problem.code for problem in made.problems] == ["KV226"]
        return
    assert made.namespace is not None, made.problems
    if expected is None:
        with pytest.raises(made.namespace.LayoutError, match="must be a multiple of 2, not 3"):
            made.namespace.Layout.from_config({"num_hidden_layers": 1, "a": a})
        return
    found = made.namespace.Layout.from_config({"num_hidden_layers": 1, "a": a}).buffers[0].page
    assert found.page_bytes == page_bytes
    for item in found.fields:
        if item.name in expected:
            assert (addresses(item).ravel() / 2).tolist() == expected[item.name]


@pytest.mark.parametrize(
    ("fields", "page", "code", "message"),
    [
        ('{k: "u8[3]", v: "bf16[1]"}', "[[k, v]]", "KV225", "`v` is not aligned: offset 3 is no multiple of 2"),
        ('{k: "u8[1]", v: "bf16[1]"}', "[[v, k]]", "KV225", "`v` is not aligned: stride 3 is no multiple of 2"),
        ('{v: "f32[1]"}', "[[v], {pad: 2}]", "KV225", "`v` is not aligned: page 10 is no multiple of 4"),
        ('{v: "i64[a]"}', "[[v], {align: 12}]", "KV225", "`v` is not aligned: page 36 is no multiple of 8"),
        ('{v: "e2m1[3]"}', "[[v]]", "KV226", "`v` has an odd number of e2m1 values in a row; two make a byte"),
        (
            '{k: "e2m1[a]", v: "e2m1[a]"}',
            "[{each: [slot, a], put: [k, v]}]",
            "KV226",
            "`v` does not begin on a whole byte of its record",
        ),
        ('{k: "e2m1[a]"}', "[{each: [slot, a], put: [k]}]", "KV226", "the record of a plane is not whole bytes"),
    ],
)
def test_elements_that_cannot_lie_there(fields: str, page: str, code: str, message: str) -> None:
    made = compiled_text(ROWS.format(slots=2, a="is: 2", fields=fields, page=page))
    assert [(problem.code, problem.message) for problem in made.problems if problem.code != "KV242"] == [
        (code, message)
    ]


def test_planes_of_a_split_page_are_aligned_alone() -> None:
    """A plane of its own begins with its first byte, wherever the plane before it ended."""
    planes = (
        Plane(
            (Piece("slot", 1, None),), (Part(Values("a", "u8", (Axis("", number=3),)), ((0, Piece("", 1, 3)),), False),)
        ),
        Plane(
            (Piece("slot", 1, None),),
            (
                Gap("pad", 1),
                Part(Values("b", "bf16", (Axis("", number=1),)), ((0, Piece("", 1, 1)),), False),
                Gap("pad", 1),
            ),
        ),
    )
    compiled = compiled_text(spec_of(Drawn(planes, {"slot": 1}, is_split=True)))
    assert [problem.message for problem in compiled.problems] == ["`b` is not aligned: offset 1 is no multiple of 2"]


@settings(max_examples=90, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=formats(), factors=st.fixed_dictionaries({name: st.integers(1, 3) for name in (*AXES, "slot")}))
def test_random_formats_are_where_a_walk_puts_them(drawn: Drawn, factors: dict[str, int]) -> None:
    """Layout and emission against a second opinion: the same bytes, or a refusal that the walk agrees with."""
    compiled = compiled_text(spec_of(drawn))
    if compiled.namespace is None:
        event("refused at build")
        assert {problem.code for problem in compiled.problems} <= {"KV225", "KV226"}, compiled.problems
        assert may_be_refused(drawn, walk(drawn, drawn.sizes), drawn.sizes), compiled.problems
        return
    module = compiled.namespace
    used = {axis.name for part in drawn.parts for axis in part.values.axes if axis.name}
    for factor in (dict.fromkeys(factors, 1), factors):
        sizes = {name: size * (factor[name] if name in drawn.free else 1) for name, size in drawn.sizes.items()}
        walked = walk(drawn, sizes)
        config = {"num_hidden_layers": 1, **{name: sizes[name] for name in used}}
        choices = {"page_size": sizes["slot"]} if "slot" in drawn.free else {}
        try:
            page = module.Layout.from_config(config, **choices).buffers[0].page
        except module.LayoutError as error:
            event("refused at load")
            assert "must be a multiple of" in str(error)
            assert may_be_refused(drawn, walked, sizes), str(error)
            continue
        event("laid out")
        assert 2 * page.page_bytes == (walked.of_planes if drawn.is_split else walked.half_bytes)
        assert page.slots == sizes["slot"]
        assert {item.name for item in page.fields} == set(walked.starts)
        for item in page.fields:
            first = addresses(item)
            assert first.shape == walked.starts[item.name].shape
            assert (first == walked.starts[item.name]).all(), item.name
        assert_disjoint(page)
