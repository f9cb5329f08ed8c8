"""Reaching this node's daemon: how long a worker tries, and what it means when that is in vain.

What may live here: the first connection, and the errors of connections that cannot be had or do not last. What may
not: sockets (`daemon.py`), what is said on them (`session.py`).
"""

from __future__ import annotations

import logging
import os
import time
from typing import Final

from gcclient.daemon import Daemon, Link
from gcclient.errors import GradcommError, JoinRefused, NoDaemon, NotAuthorised, PeerLost

log = logging.getLogger("gcclient")

#: A worker looks for its daemon this long before it gives up, seconds.
CONNECT_FOR: Final = 5.0
_SAME_VERSION: Final = "look at the daemon's log, which says why; install the same version of gradcomm on both sides"


def connect(daemon: Daemon, path: str, job: str) -> None:
    """Connect ``daemon`` to the supervisor's socket. Raises :class:`NoDaemon` after CONNECT_FOR seconds,
    :class:`NotAuthorised` at once where the socket is another user's."""
    began, said = time.monotonic(), False
    while True:
        try:
            daemon.connect(path)
            return
        except PermissionError as error:
            raise NotAuthorised(
                f"the daemon's socket {path} is not open to uid {os.getuid()} ({_owner(path)}{error.strerror})",
                job=job,
                phase="join",
                advice="run the worker as the daemon's user, or start `gcserver run` as this one with a node.socket of "
                "its own and set GC_NODE_SOCKET to that",
            ) from None
        except OSError as error:
            elapsed = time.monotonic() - began
            if elapsed >= CONNECT_FOR:
                raise NoDaemon(
                    f"no gradcomm daemon answers at {path} ({error.strerror or error})",
                    job=job,
                    phase="join",
                    elapsed=elapsed,
                    advice="start `gcserver run` on this machine, or set GC_NODE_SOCKET to its node.socket",
                ) from None
            if not said:
                log.warning("no daemon at %s yet (%s); trying for %g s", path, error.strerror, CONNECT_FOR)
                said = True
        time.sleep(0.05)


def _owner(path: str) -> str:
    """Whose ``path`` is, as far as this user may know."""
    try:
        return f"it belongs to uid {os.stat(path).st_uid}; "
    except OSError:
        return ""


def lost(link: Link, seconds: float, job: str) -> PeerLost:
    """The error of a connection that was lost ``seconds`` ago and is given up."""
    return PeerLost(
        f"{link.name} on this node did not come back",
        job=job,
        phase="attach",
        missing=(link.path,),
        elapsed=seconds,
        advice="look at the daemon's log; restart from the last checkpoint",
    )


def refused(link: Link, job: str, joined: bool) -> GradcommError:
    """The error of connections that the other side closes, one after the other, without a word."""
    kind = PeerLost if joined else JoinRefused
    return kind(
        f"{link.name} at {link.path} closed {link.unanswered} connections in a row without an answer ({link.why})",
        job=job,
        phase="attach" if joined else "join",
        advice=_SAME_VERSION,
    )
