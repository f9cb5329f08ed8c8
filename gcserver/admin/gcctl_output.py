"""Where `gcctl` writes: stdout and stderr, which may be closed, full, or unable to hold a letter.

What may live here: writing, and what can go wrong with it. What may not: what is written; texts of a daemon's are made
harmless where they become lines (`tables.py`, `jsonform.py`), since a look of `gcctl top` clears the screen.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import sys
from typing import TextIO

from gcserver.admin import tables
from gcserver.admin.exits import CtlError


class OutputError(CtlError):
    """What was to be printed was not, or not all of it. ``str()`` says why."""


def _by_number(error: UnicodeError) -> tuple[str, int]:
    """Letters that an encoding has not, as JSON writes them, so that what was JSON still is."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("gcctl", _by_number)


def show(text: str) -> bool:
    """Print lines. Whether anybody reads them: False where stdout is closed or a pipe has lost its reader (head, less).
    Raises :class:`OutputError`."""
    if sys.stdout is None:  # closed before we began
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="gcctl")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _discard(sys.stdout)
        return False
    except OSError as error:
        _discard(sys.stdout)
        raise OutputError(f"standard output cannot be written: {error.strerror}") from None
    return True


def note(text: str) -> None:
    """One line on stderr, which is no end. It may quote a daemon, a file or an argument."""
    if sys.stderr is None:  # print would take stdout for it
        return
    try:
        print("gcctl:", tables.clean(" ".join(text.split())), file=sys.stderr, flush=True)
    except OSError:  # the exit status says as much
        _discard(sys.stderr)


def is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _discard(stream: TextIO) -> None:
    """Keep the interpreter from writing what is left, and from ending with another status, at its exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
