"""Text for people: lines of bounded width, and words that are counted."""

from __future__ import annotations

import textwrap

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
