"""The specs that come with kvgen, and what each reads of a config."""

from __future__ import annotations

import posixpath
from typing import Any

from kvgen.compile import Compiled
from kvgen.expr import show
from kvgen.resources import package_folder
from kvgen.spec import Parameter


def shipped_specs() -> tuple[str, ...]:
    """The files of the specs that are installed with kvgen, or lie beside it in a checkout; fragments among them."""
    found = (str(entry) for entry in package_folder("specs").iterdir())
    return tuple(sorted(file for file in found if file.endswith(".yaml")))


def read_shipped(file: str) -> bytes:
    """The bytes of a shipped spec, or of what one names. OSError where there is no such file."""
    folder = package_folder("specs")
    return (folder / posixpath.relpath(file, str(folder))).read_bytes()


def summary(compiled: Compiled) -> dict[str, Any]:
    """What there is to say of a layout: its name, file and doc, fields of a config, and choices with their values."""
    assert compiled.spec is not None and compiled.layout is not None
    config = [item for item in compiled.spec.parameters if item.section == "config"]
    choices = [item for item in compiled.spec.parameters if item.section == "choices"]
    return {
        "layout": compiled.layout.name,
        "file": compiled.file,
        "doc": compiled.layout.doc,
        "needs": [_field(item) for item in config if not item.has_default and not item.optional],
        "reads": [_field(item) for item in config if item.has_default or item.optional],
        "choices": [_choice(item) for item in choices],
    }


def _field(item: Parameter) -> str:
    """`kv_lora_rank = 512`, by the name that it has in a config."""
    name = " or ".join(show(source) for source in item.sources)
    return name if item.equals is None else f"{name} = {item.equals}"


def _choice(item: Parameter) -> str:
    """`kv_format (bf16 | fp8_raw)`."""
    if item.values is None:
        return item.name.text
    return f"{item.name.text} ({' | '.join(str(given) for given, _ in item.values)})"
