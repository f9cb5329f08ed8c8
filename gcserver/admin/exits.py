"""How `gcctl` ends: its exit statuses, and the errors that lead to them.

What may live here: the table that scripts go by, in code, in `--help` and in docs/gcctl.md. What may not: which error
is which (`gcctl.py` for what a daemon says, else where it is raised).
"""

from __future__ import annotations

import enum
from typing import Final


class Exit(enum.IntEnum):
    """Numbers keep their meaning from release to release; ``about`` says what it is."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    DENIED = 4
    REFUSED = 5
    NOT_FOUND = 6
    TIMEOUT = 7
    UNAVAILABLE = 8
    INTERRUPTED = 130

    @property
    def about(self) -> str:
        return _ABOUT[self]


_ABOUT: Final = {
    Exit.OK: "done",
    Exit.FAILED: "what no other number says: a file that cannot be written, a defect of daemon or gcctl",
    Exit.USAGE: "the command line, a variable or the file of contexts is wrong; no daemon was asked",
    Exit.UNREACHABLE: "nothing answers at that address, or it went away",
    Exit.DENIED: "not authorised: certificates that do not fit or have ended, or a role that may not do that",
    Exit.REFUSED: "the daemon refused: a spec or rule that cannot be run, or not now (several jobs and none named); "
    "or it is too old to know the command",
    Exit.NOT_FOUND: "no such job, node, domain or tensor there",
    Exit.TIMEOUT: "no answer within --timeout, or a change that did not come into force in time (it may yet)",
    Exit.UNAVAILABLE: "the daemon answers, and a peer, a lane or a planning process that it needs does not; try again",
    Exit.INTERRUPTED: "interrupted (Ctrl-C)",
}


class CtlError(Exception):
    """Why a command came to nothing. ``str()`` is one sentence that says what to do; ``status`` how `gcctl` ends."""

    status: Exit = Exit.FAILED
