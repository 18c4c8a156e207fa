"""Runs the layout part of a generated module: the one evaluator behind budgets, `explain` and proved expectations."""

from __future__ import annotations

import sys
from types import ModuleType

from kvgen.emit import Module


def run(module: Module) -> ModuleType:
    """The layout part as a module, under a name nothing else has. It imports the standard library alone."""
    name = f"_kvgen_generated_{len([key for key in sys.modules if key.startswith('_kvgen_generated_')])}"
    found = ModuleType(name)
    sys.modules[name] = found  # dataclasses look their module up while they are made
    exec(compile(module.layout_text, f"<{name}>", "exec", dont_inherit=True), found.__dict__)
    return found
