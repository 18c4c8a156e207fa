"""The command line, run in this process."""

import io

from kvgen.cli import main


def kvgen(*words: object) -> tuple[int, str, str]:
    """The exit status of a command, what it prints, and its problems."""
    out, err = io.StringIO(), io.StringIO()
    status = main([str(word) for word in words], io.BytesIO(), out, err)
    return status, out.getvalue(), err.getvalue()
