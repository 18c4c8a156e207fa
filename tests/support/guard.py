"""Memory between two pages that nobody may touch.

An access one byte past the guarded end kills the process with SIGSEGV, whoever makes it: torch, C, or an interpreted
kernel. Memory is committed when it is touched, so that a pool larger than 2^32 bytes costs what a test writes of it.
"""

import ctypes
import mmap
import weakref
from dataclasses import dataclass
from typing import Literal

import torch

Side = Literal["left", "right"]

GUARD_BYTES = 1 << 26
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000  # not in Python's `mmap` before 3.12
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def guarded_memory(nbytes: int, side: Side = "right", alignment: int = 256) -> torch.Tensor:
    """`nbytes` zeros, flush against a guard on one `side` and within a page of one on the other.

    The first byte is aligned to `alignment`, a power of two. On the right this leaves `-nbytes % alignment` bytes
    between the last byte and the guard: none where `nbytes` is a multiple of it; `alignment=1` is always flush.
    The memory goes back to the system with the last tensor that views it.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    body = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    total = body + 2 * GUARD_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    mapping = _LIBC.mmap(None, total, 0, flags, -1, 0)
    if mapping == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map {total} bytes")
    first = mapping + GUARD_BYTES
    if _LIBC.mprotect(first, body, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), f"cannot make {body} bytes writable")
    start = first if side == "left" else (first + body - nbytes) // alignment * alignment
    buffer = (ctypes.c_uint8 * nbytes).from_address(start)
    weakref.finalize(buffer, _LIBC.munmap, mapping, total).atexit = False
    return torch.frombuffer(buffer, dtype=torch.uint8)


@dataclass(frozen=True)
class GuardedAllocator:
    """The `allocate` hook of a pool: every buffer of every layer between guards of its own."""

    side: Side = "right"

    def __call__(self, name: str, layer: int, nbytes: int) -> torch.Tensor:
        return guarded_memory(nbytes, self.side)
