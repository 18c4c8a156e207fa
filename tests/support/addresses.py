"""Where the elements of fields lie, and from that what the operations of any pool do to its bytes, in numpy.

All of it is the formula of docs/spec-language.md over the public `Page.fields` of a layout. Element i of a field in
slot s, with b slots and `page_bytes` bytes a page, begins at byte

    (s // b) * page_bytes + offset + the sum over all pieces of (index // low % extent) * stride

where the index of axis `slot` is s % b. Bytes are held as half bytes, the low one first: values may be as small.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

HALVES = {
    "e2m1": 1,
    **dict.fromkeys(("e4m3", "e5m2", "e8m0", "u8", "i8"), 2),
    **dict.fromkeys(("bf16", "f16"), 4),
    **dict.fromkeys(("f32", "i32"), 8),
    "i64": 16,
}


def halves(data: np.ndarray) -> np.ndarray:
    """Bytes [..., n] as half bytes [..., 2n]."""
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], 2 * data.shape[-1])


def joined(data: np.ndarray) -> np.ndarray:
    """Half bytes [..., 2n] as bytes [..., n]."""
    return data[..., ::2] | data[..., 1::2] << 4


def by_slot(data: np.ndarray) -> np.ndarray:
    """[slots, axes] as [slots, values], of no slots too."""
    return data.reshape(len(data), int(np.prod(data.shape[1:])))


def _pieces(shape: object, stride: object) -> list[tuple[int, int, int]]:
    """(low, extent, half bytes of a step) of the pieces of an axis, the innermost first."""
    extents, steps = (own if isinstance(own, tuple) else (own,) for own in (shape, stride))
    found, low = [], 1
    for extent, step in zip(extents, steps, strict=True):
        found.append((low, extent, int(2 * step)))
        assert 2 * step == found[-1][2]
        low *= extent
    return found


def _walked(index: np.ndarray, shape: object, stride: object) -> np.ndarray:
    """The half bytes to an index of an axis."""
    return sum((index // low % extent * step for low, extent, step in _pieces(shape, stride)), 0 * index)


def extents(field: Any) -> tuple[int, ...]:
    """The axes of a field in one slot."""
    return tuple(int(np.prod(axis)) for axis in field.shape[1:])


@dataclass(frozen=True)
class Derived:
    """How the slots of a space follow from those of another, which is the one that callers name."""

    of: str
    page: int  # slots of a page there,
    rows: int  # and here
    row: Callable[[int], int | None]  # the slot here of a slot of a page there; None where it is not held


class Memory:
    """One tensor of a pool: a layer of a buffer, or a plane of it where the buffer is split."""

    def __init__(self, page: Any, shape: Sequence[int], plane: Any = None) -> None:
        self.page, (self.num_pages, self.page_bytes) = page, shape
        self.begin = plane.offset if plane else 0  # of the plane within the page
        own = range(self.begin, self.begin + self.page_bytes)
        self.fields = {field.name: field for field in page.fields if field.offset in own}
        self.halves = np.zeros(2 * self.num_pages * self.page_bytes, np.uint8)

    @property
    def bytes(self) -> np.ndarray:
        return joined(self.halves)

    def holds(self, slot: int) -> bool:
        return 0 <= slot < self.num_pages * self.page.slots

    def places(self, name: str, slots: Iterable[int]) -> np.ndarray:
        """The half bytes of a field: [slots, elements, half bytes of one]."""
        field = self.fields[name]
        page, place = np.divmod(np.array([*slots], np.int64), self.page.slots)
        begin = page * 2 * self.page_bytes + 2 * (field.offset - self.begin)
        begin = begin + _walked(place, field.shape[0], field.stride[0])
        element = np.indices(extents(field)).reshape(len(extents(field)), -1)
        axes = zip(element, field.shape[1:], field.stride[1:], strict=True)
        steps = sum(_walked(index, shape, stride) for index, shape, stride in axes)
        return begin[:, None, None] + steps[None, :, None] + np.arange(HALVES[field.dtype])

    def read(self, name: str, slots: Sequence[int]) -> np.ndarray:
        """Half bytes [slots, elements, half bytes of one]; zeros for a slot that is not there."""
        held = np.array([self.holds(slot) for slot in slots], bool)
        places = self.places(name, [slot if inside else 0 for slot, inside in zip(slots, held, strict=True)])
        return np.where(held[:, None, None], self.halves[places], np.uint8(0))

    def write(self, name: str, slots: Sequence[int], values: np.ndarray) -> None:
        """The reverse; what is for a slot that is not there is left out."""
        held = [index for index, slot in enumerate(slots) if self.holds(slot)]
        places = self.places(name, [slots[index] for index in held])
        self.halves[places] = values.reshape(len(slots), *places.shape[1:])[held]

    def read_bytes(self, name: str, slots: Sequence[int]) -> np.ndarray:
        """The bytes of a field, of which two values may share one: [slots, bytes]."""
        return joined(by_slot(self.read(name, slots)))

    def write_bytes(self, name: str, slots: Sequence[int], values: np.ndarray) -> None:
        """Values of a field, of its size, [slots, elements]."""
        self.write(name, slots, halves(by_slot(np.ascontiguousarray(values).view(np.uint8))))

    def make_blank(self, page: int, init: Mapping[str, Any]) -> None:
        """What a page is in a new pool: zeros, gaps too, but for fields that begin as another value."""
        size = 2 * self.page_bytes
        self.halves[page * size : (page + 1) * size] = 0
        slots = range(page * self.page.slots, (page + 1) * self.page.slots)
        for name in self.fields.keys() & init.keys():
            value = np.broadcast_to(init[name], (len(slots), int(np.prod(extents(self.fields[name])))))
            self.write_bytes(name, slots, value)


Slots = Mapping[str, Sequence[int]]  # by the space that numbers them
Key = tuple[str, str | None, int]  # buffer, plane, layer


class Model:
    """What the bytes of a pool have to be."""

    def __init__(self, pool: Any, derived: Mapping[str, Derived], init: Mapping[str, Any]) -> None:
        """`derived` tells of spaces by their names, `init` of fields that are not 0 to begin with."""
        self.derived, self.init = derived, init
        self.memories: dict[Key, Memory] = {}
        self.spaces: dict[str, Any] = {}  # of the buffers
        for buffer in pool.layout.buffers:
            if getattr(buffer, "memory", "device") == "host":
                continue
            self.spaces[buffer.name] = buffer.space
            pages = buffer.pages if hasattr(buffer, "pages") else [buffer.page] * len(buffer.layers)
            for layer, page in zip(buffer.layers, pages, strict=True):
                for plane in page.planes if getattr(page, "split", False) else (None,):
                    tensor = tensor_of(pool, (buffer.name, plane and plane.name, layer))
                    self.memories[buffer.name, plane and plane.name, layer] = Memory(page, tensor.shape, plane)
        self.clear_all()

    def root(self, buffer: str) -> str:
        """The space that numbers the slots of a buffer."""
        space = self.spaces[buffer].name
        return self.derived[space].of if space in self.derived else space

    def roots(self) -> dict[str, str]:
        """Of the space of every buffer the one that numbers its slots, in their order."""
        return {space.name: self.root(buffer) for buffer, space in self.spaces.items()}

    def num_slots(self) -> dict[str, int]:
        """Slots of every space that callers name."""
        found = {}
        for (buffer, _, _), memory in self.memories.items():
            derived = self.derived.get(self.spaces[buffer].name)
            slots = memory.num_pages * memory.page.slots
            found[self.root(buffer)] = slots // derived.rows * derived.page if derived else slots
        return found

    def page_size(self, root: str) -> int:
        """Slots of a page of a space that callers name."""
        for buffer, space in self.spaces.items():
            if self.root(buffer) == root:
                return self.derived[space.name].page if space.name in self.derived else space.page_size
        raise LookupError(root)

    def own(self, buffer: str, slots: Sequence[int]) -> list[int]:
        """The slots of a buffer that those of its root stand for; -1 where there is none."""
        derived = self.derived.get(self.spaces[buffer].name)
        if derived is None:
            return [*slots]
        found = []
        for slot in slots:
            row = derived.row(slot % derived.page)
            found.append(-1 if row is None else slot // derived.page * derived.rows + row)
        return found

    def rows(self, key: Key, slots: Slots) -> list[int]:
        """The slots of a tensor that are meant; none where nobody named its space."""
        return self.own(key[0], slots.get(self.root(key[0]), []))

    # -- operations

    def clear_all(self) -> None:
        for memory in self.memories.values():
            for page in range(memory.num_pages):
                memory.make_blank(page, self.init)

    def fill(self, random: np.random.Generator) -> None:
        """Any bytes, gaps too."""
        for memory in self.memories.values():
            memory.halves[:] = random.integers(0, 16, memory.halves.shape, np.uint8)

    def held_by_space(self, slots: Slots) -> dict[str, list[bool]]:
        """For every space of a buffer, in their order, which of the slots meant for it there are."""
        found: dict[str, list[bool]] = {}
        for key, memory in self.memories.items():
            found.setdefault(self.spaces[key[0]].name, [memory.holds(slot) for slot in self.rows(key, slots)])
        return found

    def move(self, targets: Slots, sources: Slots) -> None:
        """As if all reads came first; a pair of which one slot is not there is skipped."""
        self.restore(self.save(sources), targets)

    def save(self, slots: Slots) -> dict[Key, tuple[list[bool], dict[str, np.ndarray]]]:
        """Of each tensor which slots it holds, and what its fields have there."""
        saved = {}
        for key, memory in self.memories.items():
            own = self.rows(key, slots)
            saved[key] = [memory.holds(slot) for slot in own], {name: memory.read(name, own) for name in memory.fields}
        return saved

    def restore(self, saved: dict[Key, tuple[list[bool], dict[str, np.ndarray]]], slots: Slots) -> None:
        """Into slots that need not be the same; skipped where the copy has none."""
        for key, memory in self.memories.items():
            held, fields = saved[key]
            own = [slot if had else -1 for slot, had in zip(self.rows(key, slots), held, strict=True)]
            for name, values in fields.items():
                memory.write(name, own, values)

    def clear_pages(self, pages: Slots) -> None:
        """Pages of the spaces, which may be several of a buffer."""
        for key, memory in self.memories.items():
            blocks = self.spaces[key[0]].page_size // memory.page.slots
            for page in pages.get(self.root(key[0]), []):
                if 0 <= page < memory.num_pages // blocks:
                    for block in range(blocks):
                        memory.make_blank(page * blocks + block, self.init)


def tensor_of(pool: Any, key: Key) -> Any:
    """The tensor of a pool by buffer, plane and layer."""
    buffer, plane, layer = key
    return pool.buffer(buffer, layer) if plane is None else pool.buffer(buffer, layer, plane)
