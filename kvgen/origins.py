"""Origins: the places of a spec as its module names them, `formats.row.k_scale of rows.yaml`.

A module has no line numbers, so that it does not change with the lines of its spec; `origins` has them.
"""

from __future__ import annotations

from typing import Any

from kvgen.problems import Label, Span
from kvgen.spec import Spec

FILE_NAME_MAX = 64


def origin(path: str, span: Span) -> str:
    """What is at `path` of a spec, and the file that it is in."""
    return f"{path} of {file_name(span.file)}"


def labels_of(spec: Spec, error: Any, problem: str) -> tuple[Label, ...]:
    """What of the spec a problem of a module's LayoutError is about, where the module says it."""
    span = origins(spec).get(error.places.get(problem))
    return () if span is None else (Label(span, "because of this"),)


def origins(spec: Spec) -> dict[str, Span]:
    """Where what has an origin is named."""
    layers = () if spec.layers is None else spec.layers.sets
    fields = [field for format in spec.formats for field in format.fields]
    named = [*spec.formats, *fields, *layers, *spec.buffers, *spec.operations]
    return {origin(item.path, item.name.span): item.name.span for item in named}


def file_name(file: str) -> str:
    """The name of a file without its folder, as generated code can have it in a comment or a text."""
    name = file.replace("\\", "/").rsplit("/", 1)[-1]
    safe = "".join(letter if letter.isprintable() and letter.isascii() else "_" for letter in name)
    return safe if len(safe) <= FILE_NAME_MAX else f"{safe[: FILE_NAME_MAX - 3]}..."
