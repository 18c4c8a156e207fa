"""Which accesses of different programs meet in a byte, at least one of them to change it."""

from typing import NamedTuple

import numpy as np

READ, WRITE, ATOMIC = range(3)
_NOBODY = np.iinfo(np.int64).max


class Conflict(NamedTuple):
    """Two intervals, by their index, and the first byte that they share."""

    first: int
    second: int
    address: int


class _Visitors(NamedTuple):
    """For every cell the lowest and the highest program that visits it; equal where it is one program."""

    low: np.ndarray
    high: np.ndarray

    def meet(self, other: "_Visitors") -> np.ndarray:
        """The cells that a program of the one and a different program of the other visit."""
        low, high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        return (self.low != _NOBODY) & (other.low != _NOBODY) & (low != high)


def _lowest(start: np.ndarray, end: np.ndarray, program: np.ndarray, cells: int) -> np.ndarray:
    """For every cell the lowest `program` among the intervals of cells [start, end), by doubling steps."""
    low = np.full(cells, _NOBODY)
    if not start.size:
        return low
    level = np.log2(end - start).astype(np.int64)
    for exponent in range(int(level.max()), -1, -1):
        step = 1 << exponent
        covered = low.copy()  # until now low[i] spoke for cells [i, i + 2 * step)
        np.minimum(covered[step:], low[:-step], out=covered[step:])
        low = covered
        of_level = level == exponent
        np.minimum.at(low, start[of_level], program[of_level])
        np.minimum.at(low, end[of_level] - step, program[of_level])
    return low


def _visitors(start: np.ndarray, end: np.ndarray, program: np.ndarray, cells: int) -> _Visitors:
    low = _lowest(start, end, program, cells)
    high = -_lowest(start, end, -program, cells)
    return _Visitors(low, high)


def find_conflict(start: np.ndarray, end: np.ndarray, program: np.ndarray, kind: np.ndarray) -> Conflict | None:
    """A pair of byte intervals [start, end) of different programs that share a byte, not both READ nor both ATOMIC.

    Exact, and independent of the order in which the programs ran. All of one length, integers.
    """
    changes = kind != READ
    # Between two neighbouring ends of what is changed, the changing programs are the same: such a cell is as good as a
    # byte. A reader counts for the whole of a cell; whichever of its bytes it reads, others change that byte.
    borders = np.unique(np.concatenate([start[changes], end[changes]]))
    cells = max(borders.size - 1, 0)
    first = np.maximum(np.searchsorted(borders, start, side="right") - 1, 0)
    last = np.minimum(np.searchsorted(borders, end, side="left"), cells)
    inside = first < last
    by_kind = []
    for one in (READ, WRITE, ATOMIC):
        chosen = inside & (kind == one)
        by_kind.append(_visitors(first[chosen], last[chosen], program[chosen], cells))
    reads, writes, atomics = by_kind
    bad = writes.meet(writes) | writes.meet(reads) | writes.meet(atomics) | atomics.meet(reads)
    if not bad.any():
        return None
    cell = int(np.argmax(bad))
    there = np.flatnonzero(inside & (first <= cell) & (cell < last))
    for one in there:
        allowed = {READ: {WRITE, ATOMIC}, WRITE: {READ, WRITE, ATOMIC}, ATOMIC: {READ, WRITE}}[int(kind[one])]
        for other in there:
            if program[one] != program[other] and int(kind[other]) in allowed:
                return Conflict(int(one), int(other), int(max(start[one], start[other], borders[cell])))
    raise AssertionError(f"no pair of accesses explains the conflict in cell {cell}")
