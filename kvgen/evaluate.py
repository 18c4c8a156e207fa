"""Runs the layout part of a generated module: the one evaluator behind budgets, `explain` and proved expectations."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
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


def is_split(page: Any) -> bool:
    """Whether each plane of the page is a tensor of its own."""
    return getattr(page, "split", False)
