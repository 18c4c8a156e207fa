"""What comes with kvgen beside its code, wherever it lies: in a folder, in a checkout, or in a zip that Python runs."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path


def package_file(name: str) -> Traversable:
    """A file of the package."""
    return files("kvgen") / name


@cache
def package_folder(name: str) -> Traversable:
    """`templates` or `specs`: in the package, or beside it in a checkout."""
    inside = package_file(name)
    return inside if inside.is_dir() else Path(str(files("kvgen"))).resolve().parent / name
