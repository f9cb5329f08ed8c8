"""A private daemon for this job where GC_AUTOSTART says so: found, or started by one of the workers of this machine.

What may live here: asking for it and holding it. What may not: starting it (`gcserver.private`, a process of its own:
nothing of the server is imported here), talking to it (`session.py`).

The daemon lives for as long as any worker holds its FIFO open, that is, until the last of them ends, whatever ends it.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys

from gcclient.errors import NoDaemon
from gcproto.paths import SOCKET_NAME, USERS

#: by name: the daemon's folder, and the descriptor that keeps it alive
_held: dict[str, tuple[str, int]] = {}


def socket_for(label: str, size: int) -> str:
    """The socket of this machine's private daemon of job ``label``, of ``size`` workers on all machines.

    Whoever asks first starts it, the others wait. A single process has one of its own, whatever others are called.
    Raises :class:`NoDaemon` where it cannot be started.
    """
    name = label if size > 1 else f"{label} of process {os.getpid()}"
    if name in _held and _is_gone(_held[name][1]):
        os.close(_held.pop(name)[1])
    if name not in _held:
        _held[name] = _join(name, label)
    return os.path.join(_held[name][0], SOCKET_NAME)


def _join(name: str, label: str) -> tuple[str, int]:
    argv = [sys.executable, "-m", "gcserver.private", name]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        said = os.fsdecode(starter.stdout.readline().removesuffix(b"\n"))
        folder = said if said.startswith("/") else ""
        # Held before the starter lets go of it, which it does when its standard input ends. One that has ended by then
        # cannot be.
        with contextlib.suppress(OSError):
            if folder:
                return folder, os.open(os.path.join(folder, USERS), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    why = said.removeprefix("error: ") if said.startswith("error: ") else ""
    raise NoDaemon(
        f"GC_AUTOSTART=1, and no private daemon could be started{why and f' ({why})'}",
        job=label,
        phase="join",
        advice="what was printed before says why; pip install 'gradcomm[server]' where that is missing, or start "
        "a daemon yourself (`gcserver run`) and leave GC_AUTOSTART out",
    )


def _is_gone(hold: int) -> bool:
    """Whether the daemon's keeper is no more."""
    poller = select.poll()
    poller.register(hold, select.POLLERR)
    return bool(poller.poll(0))


def let_go() -> None:
    """In a forked child: it is not the worker, and may outlive it."""
    for _, hold in _held.values():
        os.close(hold)
    _held.clear()
