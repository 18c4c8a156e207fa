"""Deployments: pools that share a device add up, stages of a pipeline take the least that one of them holds.

All sizes are those of the generated modules. Every count that is asked for is the greatest that fits, found by halving:
bytes never shrink when tokens or requests grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import lcm
from types import ModuleType
from typing import Any

from kvgen.compile import Compiled
from kvgen.evaluate import memory_of, request_bytes, settled
from kvgen.layout import RootSpace

UNBOUNDED = 2**62  # tokens or requests, where nothing grows with them; the same as of every module


@dataclass(frozen=True)
class Pool:
    """The cache of one model on one device."""

    compiled: Compiled
    layout: Any

    @property
    def module(self) -> ModuleType:
        assert self.compiled.namespace is not None
        return self.compiled.namespace

    @property
    def name(self) -> str:
        assert self.compiled.layout is not None
        return self.compiled.layout.name

    @cached_property
    def device_buffers(self) -> tuple[Any, ...]:
        return tuple(buffer for buffer in self.layout.buffers if memory_of(buffer) == "device")

    @property
    def cell_size(self) -> int | Fraction:
        """Bytes of one token more."""
        return self.module.cell_size(self.layout)

    @property
    def request_bytes(self) -> Fraction:
        """Bytes of one request more, beside those of its tokens."""
        return sum(map(request_bytes, self.device_buffers), Fraction(0))

    @cached_property
    def request_layers(self) -> frozenset[int]:
        """The layers in which a request costs memory beside that of its tokens."""
        grown = (buffer for buffer in self.device_buffers if getattr(buffer.space, "slots_per_request", 0))
        return frozenset(layer for buffer in grown for layer in buffer.layers)

    @cached_property
    def roots(self) -> tuple[Any, ...]:
        """The spaces in which every token of a request has slots of its own: those that are mapped to no other."""
        assert self.compiled.layout is not None
        roots = {
            space.name
            for space in self.compiled.layout.spaces
            if any(isinstance(case.use, RootSpace) and case.use.parent is None for case in space.cases)
        }
        found = (space for space in self.layout.spaces if space.name in roots and space.numbering == space.name)
        return tuple(space for space in found if space.slots_per_token)

    def at(self, tokens: int, requests: int) -> Pool:
        """The pool whose bytes are affine in tokens and requests, and the same as these at so many of both."""
        spaces = {space.name: settled(space, tokens, requests) for space in self.layout.spaces}
        buffers = (replace(buffer, space=spaces[buffer.space.name]) for buffer in self.layout.buffers)
        return replace(self, layout=replace(self.layout, spaces=tuple(spaces.values()), buffers=tuple(buffers)))

    def bytes_for(self, tokens: int, requests: int) -> int:
        return self.module.bytes_for(self.layout, tokens, requests)

    def host_bytes_for(self, tokens: int, requests: int) -> int:
        return self.module.host_bytes_for(self.layout, tokens, requests)


@dataclass(frozen=True)
class Stage:
    """The pools of one device, for the same tokens and requests. Their bytes add up."""

    pools: tuple[Pool, ...]

    @property
    def cell_size(self) -> int | Fraction:
        """Bytes of one token more."""
        return sum((pool.cell_size for pool in self.pools), Fraction(0))

    @property
    def request_bytes(self) -> Fraction:
        """Bytes of one request more, beside those of its tokens."""
        return sum((pool.request_bytes for pool in self.pools), Fraction(0))

    def bytes_for(self, tokens: int, requests: int) -> int:
        return sum(pool.bytes_for(tokens, requests) for pool in self.pools)

    def host_bytes_for(self, tokens: int, requests: int) -> int:
        return sum(pool.host_bytes_for(tokens, requests) for pool in self.pools)

    def at(self, tokens: int, requests: int) -> Stage:
        """The pools whose bytes are affine, and the same as these at so many tokens and requests."""
        return Stage(tuple(pool.at(tokens, requests) for pool in self.pools))

    def max_tokens(self, memory: int, requests: int, granule: int) -> int:
        """The most tokens that fit, a multiple of the granule; UNBOUNDED where more of them cost nothing more."""
        if not self.cell_size and self.bytes_for(UNBOUNDED // granule * granule, requests) <= memory:
            return UNBOUNDED
        return most(lambda count: self.bytes_for(count * granule, requests) <= memory) * granule


@dataclass(frozen=True)
class Deployment:
    """The stages of a pipeline, each on a device of its own, with every token on all of them."""

    stages: tuple[Stage, ...]

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        return tuple(pool for stage in self.stages for pool in stage.pools)

    @cached_property
    def granule(self) -> int:
        """Token counts are multiples of it: those of every pool."""
        return lcm(*(pool.layout.granule for pool in self.pools))

    def check(self, tokens: int) -> None:
        """ValueError with the nearest two where pools cannot hold exactly so many tokens."""
        below = tokens // self.granule * self.granule
        if tokens != below:
            nearest = f"the nearest are {below} and {below + self.granule}"
            raise ValueError(f"tokens must be a non-negative multiple of {self.granule}, not {tokens}; {nearest}")

    def fits(self, memory: int, tokens: int, requests: int) -> bool:
        """Whether no stage needs more than so much."""
        return all(stage.bytes_for(tokens, requests) <= memory for stage in self.stages)

    def max_tokens(self, memory: int, requests: int) -> int:
        """The most tokens that fit into so much memory on each device."""
        return min(stage.max_tokens(memory, requests, self.granule) for stage in self.stages)

    def enough_tokens(self, requests: int) -> int:
        """Tokens of which more would cost nothing more, where that is so: no limit of slots holds back any request."""

        def price(count: int) -> list[int]:
            return [stage.bytes_for(count * self.granule, requests) for stage in self.stages]

        dearest = price(UNBOUNDED // self.granule)
        if price(0) == dearest:
            return 0
        return 2 * (most(lambda count: price(count) != dearest) + 1) * self.granule  # clear of where pages round

    def tokens_for(self, requests: int, context: int) -> int:
        """The least tokens that are pages enough for so many requests of so many tokens each."""
        least = 0
        for pool in self.pools:
            for space in pool.roots:
                slots = requests * -(-context // space.page_size) * space.page_size
                least = max(least, -(-slots // Fraction(space.slots_per_token)))
        return -(-least // self.granule) * self.granule

    def longest_context(self, tokens: int, requests: int) -> int:
        """The most tokens that each of so many requests can have: all get the same number of whole pages.

        UNBOUNDED where no space has slots for tokens.
        """
        found = [UNBOUNDED]
        for pool in self.pools:
            for space in pool.roots:
                pages = int(space.slots_per_token * tokens // space.page_size)
                found.append(pages // requests * space.page_size)
        return min(found)

    def requests_in(self, tokens: int, context: int) -> int:
        """The most requests of so many tokens each that pages for `tokens` are enough for, whatever they cost."""
        if not self.tokens_for(1, context):
            return UNBOUNDED
        return most(lambda count: self.longest_context(tokens, count) >= context)

    def max_requests(self, memory: int, context: int) -> int:
        """The most requests of so many tokens each that fit into so much memory on each device.

        UNBOUNDED where more of them cost nothing more.
        """

        def fit(count: int) -> bool:
            return self.fits(memory, self.tokens_for(count, context), count)

        return UNBOUNDED if fit(UNBOUNDED) else most(fit)

    def most_in(self, memory: int, requests: int | None, context: int | None) -> tuple[int, int]:
        """The most tokens in so much memory on each device, and requests: those given, or the most of a context."""
        if context is not None:
            requests = self.max_requests(memory, context)
        held = 0 if requests in (None, UNBOUNDED) else requests
        return self.max_tokens(memory, held), requests or 0


def most(fits: Callable[[int], bool]) -> int:
    """The greatest count that fits, or 0. None does above one that does not, so halve the range that holds it."""
    least, above = 0, 1
    while fits(above):
        least, above = above, 2 * above
    while above - least > 1:
        middle = (least + above) // 2
        least, above = (middle, above) if fits(middle) else (least, middle)
    return least


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: the last ones have one more where they do not divide evenly, as SGLang has it."""
    full, rest = divmod(layers, stages)
    return (full,) * (stages - rest) + (full + 1,) * rest
