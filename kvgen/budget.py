"""Budgets: what a layout costs, computed by the emitted module itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from typing import Any

from kvgen.causes import Causes, causes_of
from kvgen.deployment import UNBOUNDED, Deployment, Pool, Stage
from kvgen.evaluate import is_split, memory_of, pages_of, readers_of
from kvgen.text import runs

ALLOCATOR_STEP = 2 * 2**20  # CUDA's caching allocator rounds large tensors up to this


@dataclass(frozen=True)
class Budget:
    """A deployment priced for a number of tokens and requests, with the memory of each device, if it was asked about.

    Tokens or requests that nothing grows with are UNBOUNDED; the price is then that of enough tokens for the slots of
    all requests, and of no requests, which are the prices of more of them too.
    """

    deployment: Deployment
    memory: int | None
    tokens: int
    requests: int
    counts_requests: bool = False  # whether there are requests, or a context was asked for

    @cached_property
    def counts(self) -> tuple[int, int]:
        """The tokens and requests that are priced."""
        requests = 0 if self.requests == UNBOUNDED else self.requests
        return self.deployment.enough_tokens(requests) if self.tokens == UNBOUNDED else self.tokens, requests

    @cached_property
    def limits(self) -> tuple[int | None, ...]:
        """The tokens that each stage would hold by itself; None without a memory."""
        if self.memory is None:
            return (None,) * len(self.deployment.stages)
        granule, (_, requests) = self.deployment.granule, self.counts
        return tuple(stage.max_tokens(self.memory, requests, granule) for stage in self.deployment.stages)

    @cached_property
    def deciding(self) -> int:
        """The stage that holds the fewest tokens, the dearest of those; without a memory, the dearest of all."""
        prices = [stage.bytes_for(*self.counts) for stage in self.deployment.stages]
        return min(range(len(prices)), key=lambda position: (self.limits[position] or 0, -prices[position]))

    @property
    def stage(self) -> Stage:
        """The stage that decides."""
        return self.deployment.stages[self.deciding]

    @property
    def total_bytes(self) -> int:
        """Of the stage that decides."""
        return self.stage.bytes_for(*self.counts)

    @cached_property
    def affine(self) -> Stage:
        """The same stage, with its bytes affine in tokens and requests."""
        return self.stage.at(*self.counts)

    @property
    def bytes_per_token(self) -> int | Fraction:
        """Of one token more."""
        return self.affine.cell_size

    @property
    def fixed_bytes(self) -> int:
        """What does not grow with tokens."""
        return self.affine.bytes_for(0, self.counts[1])

    @property
    def fits(self) -> bool:
        return self.memory is None or self.deployment.fits(self.memory, *self.counts)

    @property
    def context(self) -> int | None:
        """The longest context that all requests can have at a time; None where there are no requests."""
        if not 0 < self.requests < UNBOUNDED or self.tokens == UNBOUNDED:
            return None
        longest = self.deployment.longest_context(self.tokens, self.requests)
        return None if longest == UNBOUNDED else longest

    @property
    def allocator_bytes(self) -> int:
        """The most that rounding every tensor up to 2 MiB can add; part of no total."""
        return sum(
            -size % ALLOCATOR_STEP * count
            for pool in self.stage.pools
            for buffer in pool.device_buffers
            for size, count in tensors(buffer, self.sizes(buffer))
        )

    def sizes(self, buffer: Any) -> tuple[int, ...]:
        """What the sizes of a buffer are functions of: requests only where its module knows of them."""
        return self.counts if hasattr(buffer.space, "slots_per_request") else self.counts[:1]

    def causes(self, pool: Pool, buffer: Any) -> Causes:
        """What the bytes of a buffer are for."""
        assert pool.compiled.layout is not None
        written = {page.format: page for page in pool.compiled.layout.pages}
        return causes_of(buffer, self.sizes(buffer), written)

    def device_causes(self) -> Iterator[tuple[Pool, Any, Causes]]:
        """Each buffer on the device of the stage that decides, with what its bytes are for."""
        for pool in self.stage.pools:
            for buffer in pool.device_buffers:
                yield pool, buffer, self.causes(pool, buffer)

    @property
    def total_causes(self) -> Causes:
        """What all bytes of the stage that decides are for."""
        return sum((causes for _, _, causes in self.device_causes()), Causes())

    def slots(self, pool: Pool, buffer: Any) -> int:
        """Slots of a buffer, reserved pages included."""
        return pool.module.slots(pool.layout, buffer.space.name, *self.counts)


@dataclass(frozen=True)
class Question:
    """What is asked: so many tokens, or the most in a memory; of so many requests, or of the most of a context."""

    tokens: int | None
    requests: int | None
    context: int | None

    @property
    def counts_requests(self) -> bool:
        return bool(self.requests) or self.context is not None

    def answer(self, deployment: Deployment, memory: int | None) -> Budget:
        """The price of the tokens, in whole granules; or the most that fit into so much memory on each device."""
        if self.tokens is None:
            assert memory is not None
            counts = deployment.most_in(memory, self.requests, self.context)
            return Budget(deployment, memory, *counts, self.counts_requests)
        tokens = -(-self.tokens // deployment.granule) * deployment.granule
        requests = self.requests if self.context is None else deployment.requests_in(tokens, self.context)
        return Budget(deployment, None, tokens, requests or 0, self.counts_requests)


@dataclass(frozen=True)
class OtherWay:
    """The same question, with the other values of the choices that go by whether requests are counted."""

    counted: bool
    budget: Budget  # of one request, where none are counted
    pools: tuple[tuple[Pool, Pool], ...]  # whose choices differ: as they were taken, and the other way

    @staticmethod
    def of(question: Question, budget: Budget, deployment: Deployment) -> OtherWay:
        """What the other deployment of the same models comes to where the one has the budget."""
        other = question if question.counts_requests else replace(question, requests=1)
        pairs = zip(budget.deployment.stages[-1].pools, deployment.stages[-1].pools, strict=True)
        apart = tuple((own, theirs) for own, theirs in pairs if own.layout.choices != theirs.layout.choices)
        return OtherWay(question.counts_requests, other.answer(deployment, budget.memory), apart)

    def as_json(self) -> dict[str, Any]:
        """What differs, and what comes out."""
        changes = ((own.name, other_choices(own, other)) for own, other in self.pools)
        return {
            "changes": [
                {"layout": layout, "choices": {name: plain(value) for name, value in choices.items()}}
                for layout, choices in changes
            ],
            "bytes_per_token": plain(self.budget.bytes_per_token),
            "request_bytes": plain(self.budget.affine.request_bytes),
            **{key: value for key, value in capacity_as_json(self.budget).items() if key != "stage"},
        }


def other_choices(own: Pool, other: Pool) -> dict[str, object]:
    """The choices of the second of two pools of a model that are not those of the first."""
    return {name: value for name, value in other.layout.choices.items() if own.layout.choices[name] != value}


def budget_as_json(budgets: tuple[Budget, ...], other: OtherWay | None = None) -> dict[str, Any]:
    """The document of `kvgen budget --format json`: the first budget in detail, and what each memory holds.

    Where there are stages, all but `stages` and `capacities` is about the one that decides.
    """
    budget = budgets[0]
    target, *drafts = budget.stage.pools
    return {
        **identity_as_json(target),
        "bytes_per_token": plain(budget.bytes_per_token),
        "granule": budget.deployment.granule,
        "fixed_bytes": budget.fixed_bytes,
        "tokens": bounded(budget.tokens),
        "requests": bounded(budget.requests),
        "context_tokens": budget.context,
        "total_bytes": budget.total_bytes,
        "host_bytes": budget.stage.host_bytes_for(*budget.counts),
        "memory_bytes": budget.memory,
        "fits": budget.fits,
        "allocator_rounding_bytes": budget.allocator_bytes,
        "causes": budget.total_causes.as_dict(),
        "buffers": buffers_as_json(budget, target),
        "drafts": [pool_as_json(budget, pool) for pool in drafts],
        "stages": [stage_as_json(budget, position) for position in range(len(budget.deployment.stages))],
        "capacities": [capacity_as_json(each) for each in budgets if each.memory is not None],
        "other_way": None if other is None else other.as_json(),
    }


def identity_as_json(pool: Pool) -> dict[str, Any]:
    """Which layout it is, and what decided it."""
    return {"layout": pool.name, "fingerprint": pool.layout.fingerprint, **inputs_as_json(pool.layout)}


def pool_as_json(budget: Budget, pool: Pool) -> dict[str, Any]:
    """A pool that shares a device with another."""
    affine = pool.at(*budget.counts)
    return {
        **identity_as_json(pool),
        "bytes_per_token": plain(affine.cell_size),
        "fixed_bytes": affine.bytes_for(0, budget.counts[1]),
        "total_bytes": pool.bytes_for(*budget.counts),
        "host_bytes": pool.host_bytes_for(*budget.counts),
        "buffers": buffers_as_json(budget, pool),
    }


def buffers_as_json(budget: Budget, pool: Pool) -> list[dict[str, Any]]:
    """The buffers of a pool with their slots and bytes."""
    return [
        buffer_as_json(pool.layout, buffer)
        | {
            "slots": budget.slots(pool, buffer),
            "bytes": buffer.num_bytes(*budget.sizes(buffer)),
            "causes": budget.causes(pool, buffer).as_dict(),
        }
        for buffer in pool.at(*budget.counts).layout.buffers
    ]


def stage_as_json(budget: Budget, position: int) -> dict[str, Any]:
    """A stage, with the tokens that it would hold by itself and its price for those that all hold."""
    stage = budget.deployment.stages[position]
    affine = stage.at(*budget.counts)
    target = stage.pools[0].layout
    return {
        "start_layer": target.start_layer,
        "end_layer": target.end_layer,
        "layers": [list(pool.layout.held) for pool in stage.pools],
        "bytes_per_token": plain(affine.cell_size),
        "fixed_bytes": affine.bytes_for(0, budget.counts[1]),
        "tokens": bounded(budget.limits[position]),
        "total_bytes": stage.bytes_for(*budget.counts),
        "host_bytes": stage.host_bytes_for(*budget.counts),
        "decides": position == budget.deciding,
    }


def capacity_as_json(budget: Budget) -> dict[str, Any]:
    """What a memory holds."""
    return {
        "memory_bytes": budget.memory,
        "tokens": bounded(budget.tokens),
        "requests": bounded(budget.requests),
        "context_tokens": budget.context,
        "total_bytes": budget.total_bytes,
        "fits": budget.fits,
        "stage": budget.deciding,
    }


def bounded(count: int | None) -> int | None:
    """A count; None where it has no bound."""
    return None if count == UNBOUNDED else count


def tensors(buffer: Any, counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """(bytes, how many) of the tensors of a buffer."""
    num_pages = buffer.num_pages(*counts)
    pages = pages_of(buffer)
    count = 1 if len(pages) > 1 else len(buffer.layers)
    found = []
    for page in pages if buffer.layers else ():
        parts = [plane.page_bytes for plane in page.planes] if is_split(page) else [page.page_bytes]
        found += [(num_pages * nbytes, count) for nbytes in parts]
    return found


def plain(value: object) -> object:
    """A value as JSON has it: a fraction that is no integer as text."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else str(value)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def same(values: list[object]) -> object:
    """The one value they all are, or the list of them."""
    return values[0] if len(set(map(str, values))) == 1 else values


def inputs_as_json(layout: Any) -> dict[str, Any]:
    """What decided a resolved layout: its choices, and the fields of the config with the defaults of those absent."""
    inputs = {"choices": layout.choices, "config_used": layout.config_used, "defaults_used": layout.defaults_used}
    return {title: {name: plain(value) for name, value in items.items()} for title, items in inputs.items()}


def buffer_as_json(layout: Any, buffer: Any) -> dict[str, Any]:
    """A buffer of a resolved layout, whatever its number of tokens."""
    pages = pages_of(buffer)
    return {
        "name": buffer.name,
        "space": buffer.space.name,
        "memory": memory_of(buffer),
        "layers": list(buffer.layers),
        "readers": {str(layer): owner for layer, owner in readers_of(buffer).items()},
        "format": same([page.format for page in pages]) if pages else None,
        "slot_bytes": same([plain(page.slot_bytes) for page in pages]) if pages else None,
        "page_bytes": same([page.page_bytes for page in pages]) if pages else None,
        "page_fingerprint": layout.page_fingerprint(buffer.name),
        "bytes_per_token": plain(buffer.bytes_per_token),
    }


def readers_text(buffer: Any) -> str:
    """Which layers read which owner's bytes, owner by owner; nothing where each layer has its own."""
    parts = []
    for owner, group in groupby(readers_of(buffer).items(), key=lambda own: own[1]):
        layers = [layer for layer, _ in group]
        parts.append(f"{runs(layers)} {'reads' if len(layers) == 1 else 'read'} {owner}")
    return "; ".join(parts)


def shown(value: object) -> str:
    """A value as a person writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
