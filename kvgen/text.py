"""Text for people: lines of bounded width, and words that are counted."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 100


def wrap(text: str, first: str = "", later: str = "", width: int = WIDTH) -> list[str]:
    """Lines of at most `width` columns, margins included, broken at spaces alone; `later` begins all but the first."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def ending(count: object) -> str:
    """The ending of a word that is counted."""
    return "" if count == 1 else "s"


def runs(layers: Iterable[int]) -> str:
    """Layer ids with runs written as `0-2`."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] + 1 == layer:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ", ".join("-".join(map(str, part)) for part in parts) or "none"
