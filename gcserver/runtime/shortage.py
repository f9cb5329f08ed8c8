"""What is short when the system refuses something, in the words of an error that a job is told.

What may live here: from an error of the system to the kind of a fault and what to do about it. What may not: who is
told (`supervisor.py`, `lane.py`, `knocking.py`), what is given back.
"""

from __future__ import annotations

import contextlib
import errno
import resource
from typing import Final

from gcserver.core.job_faults import NEED, NO_SPACE
from gcserver.runtime.statefiles import MemoryShort

_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
#: As many open files as a daemon asks for, where its hard limit allows.
DESCRIPTORS: Final = 1 << 16


def descriptors() -> int:
    """How many files a daemon may have open: its soft limit, or what it raises that to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    return soft if soft == resource.RLIM_INFINITY else max(soft, wanted)


def raise_descriptors() -> None:
    """Let this process, and the lanes it starts, open as many files as it may: one a chunk of an arena."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(), hard))


def kind_of(error: OSError | MemoryError) -> tuple[str, str]:
    """(kind of the fault, what to do) for memory, shared memory or descriptors that cannot be had."""
    if isinstance(error, OSError) and error.errno in _DESCRIPTORS:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        advice = f"raise the limit on open files, {soft} now (LimitNOFILE= or ulimit -n), and start the daemon again"
        return "OutOfDescriptors", f"{advice}; `gcserver doctor` says how many it may need"
    if isinstance(error, MemoryShort | MemoryError) and getattr(error, "errno", None) in (None, errno.ENOMEM):
        return "OutOfMemory", f"let the daemon have more memory (its cgroup's limit, ulimit -v) or the job less; {NEED}"
    return "OutOfMemory", NO_SPACE


def text_of(error: OSError | MemoryError) -> str:
    """What could not be had, for a person."""
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return f"memory cannot be had: {error}" if str(error) else "memory cannot be had"
