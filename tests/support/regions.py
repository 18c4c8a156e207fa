"""The bytes that belong to a tensor, and the tags by which a pointer remembers its tensor.

A tagged pointer is 64 bits: the address in bits 0 to 47, the tag of its region in bits 48 to 62. Bit 63 is set once
arithmetic has carried the address out of its 48 bits, so that it cannot pass for another tensor's.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

TAG_SHIFT = np.uint64(48)
ADDRESS = np.uint64((1 << 48) - 1)
LOST = np.uint64(1 << 63)
MAX_TAGS = 1 << 15


@dataclass(frozen=True)
class Region:
    """The bytes [start, end) of a tensor.

    A view with gaps is blocks of `block` bytes, at `steps` of (count, stride); an access has to lie in one of them.
    """

    name: str
    start: int
    end: int
    block: int
    steps: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> "Region":
        """The region of `tensor`. Where its rows overlap, or its strides do not nest, gaps are not looked for."""
        itemsize, start = tensor.element_size(), tensor.data_ptr()
        if not tensor.numel():
            return cls(name, start, start, 0)
        shape = zip(tensor.shape, tensor.stride(), strict=True)
        dims = sorted(((count, stride * itemsize) for count, stride in shape if count > 1), key=lambda dim: dim[1])
        extent = block = itemsize
        steps: list[tuple[int, int]] = []
        nested = True
        for count, stride in dims:
            nested = nested and stride >= extent
            extent += (count - 1) * stride
            if stride == block:
                block = extent
            else:
                steps.insert(0, (count, stride))
        if not nested or not steps:
            return cls(name, start, start + extent, extent)
        return cls(name, start, start + extent, block, tuple(steps))

    def outside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which of the accesses of `size` bytes at `addresses` touch a byte that is not the tensor's."""
        bad = (addresses < np.uint64(self.start)) | (addresses + np.uint64(size) > np.uint64(self.end))
        if self.steps:
            offset = addresses - np.uint64(self.start)
            for count, stride in self.steps:
                index = np.minimum(offset // np.uint64(stride), np.uint64(count - 1))
                offset -= index * np.uint64(stride)
            bad |= offset + np.uint64(size) > np.uint64(self.block)
        return bad

    def __str__(self) -> str:
        gaps = f" in blocks of {self.block}" if self.steps else ""
        return f"'{self.name}' [0, {self.end - self.start}){gaps}"


class Tags:
    """The regions that tagged pointers stand for. Tag 0 is no tag: an address that came from nowhere known."""

    def __init__(self) -> None:
        self._regions: list[Region | None] = [None]

    def __len__(self) -> int:
        return len(self._regions)

    def pointer(self, region: Region) -> int:
        """The tagged pointer to the first byte of `region`."""
        if len(self._regions) == MAX_TAGS:
            raise RuntimeError(f"more than {MAX_TAGS - 1} tensors in one sanitizer: enter a fresh one")
        self._regions.append(region)
        return (len(self._regions) - 1) << int(TAG_SHIFT) | region.start

    def region(self, pointer: int) -> Region | None:
        """The region of a tagged pointer, None where it has none."""
        tag = pointer >> int(TAG_SHIFT) & (MAX_TAGS - 1)
        return self._regions[tag] if tag < len(self._regions) else None

    def shrink(self, length: int) -> None:
        """Forget the tags made since `len(self)` was `length`."""
        del self._regions[length:]


def outside_all(regions: Iterable[Region], addresses: np.ndarray, size: int) -> np.ndarray:
    """Which of the accesses lie wholly in none of `regions`."""
    bad = np.ones(addresses.shape, dtype=bool)
    for region in regions:
        bad &= region.outside(addresses, size)
    return bad
