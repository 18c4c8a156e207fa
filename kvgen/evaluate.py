"""Runs the layout part of a generated module: the one evaluator behind budgets, `explain` and proved expectations."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from operator import mul
from types import ModuleType
from typing import Any

from kvgen.emit import Module

_NUMBERS = itertools.count()


def run(module: Module) -> ModuleType:
    """The layout part as a module, under a name nothing else has. It imports the standard library alone."""
    name = f"_kvgen_generated_{next(_NUMBERS)}"
    found = ModuleType(name)
    sys.modules[name] = found  # dataclasses look their module up while they are made
    exec(compile(module.layout_text, f"<{name}>", "exec", dont_inherit=True), found.__dict__)
    return found


def read_config(module: ModuleType, file: str) -> Mapping[str, Any]:
    """The fields of a config.json, as the module reads them. LayoutError or OSError where it cannot."""
    return module._Inputs(file, {}).sections[-1]


# What a module leaves out where its layout has none


def memory_of(buffer: Any) -> str:
    """Where a buffer lies: "device" or "host"."""
    return getattr(buffer, "memory", "device")


def pages_of(buffer: Any) -> tuple[Any, ...]:
    """The page of each layer, or the one page of all of them."""
    return buffer.pages if hasattr(buffer, "pages") else (buffer.page,)


def readers_of(buffer: Any) -> dict[int, int]:
    """Layers that own none of the buffer, and the layer whose bytes each reads."""
    return dict(getattr(buffer, "readers", ()))


def limit_of(space: Any) -> tuple[Any, ...]:
    """Slots for a token, for a request, and besides, that a space never exceeds together; () where it has no limit."""
    return getattr(space, "at_most", ())


def request_bytes(buffer: Any) -> Fraction:
    """What one more request costs in all layers together, beside its tokens, page padding spread over the slots."""
    slots = getattr(buffer.space, "slots_per_request", 0)
    return Fraction(buffer.layer_page_bytes * slots, getattr(buffer, "page_slots", buffer.space.page_size))


def settled(space: Any, tokens: int, requests: int) -> Any:
    """The space with its slots affine in tokens and requests: as they are up to its limit, or as the limit is there."""
    limit = limit_of(space)
    if not limit:
        return space
    names = ("slots_per_token", "slots_per_request", "fixed_slots")
    own = [getattr(space, name, 0) for name in names]
    slots, most = (sum(map(mul, rates, (tokens, requests, 1))) for rates in (own, limit))
    rates = own if slots <= most else limit
    numbers = {name: rate for name, rate in zip(names, rates, strict=True) if hasattr(space, name)}
    return replace(space, at_most=(), **numbers)


def notes_of(layout: Any) -> tuple[str, ...]:
    """What its spec says of the layout of this config and these choices."""
    return getattr(layout, "notes", ())


def is_split(page: Any) -> bool:
    """Whether each plane of the page is a tensor of its own."""
    return getattr(page, "split", False)
