"""The service manager that may have started this daemon: what it is told (sd_notify(3)), and its watchdog.

What may live here: that protocol, and whether lanes still answer. What may not: what a daemon does when it is told
something (`supervisor.py`), lanes themselves (`lanes.py`).

systemd hands over a datagram socket in ``NOTIFY_SOCKET`` and takes lines ``NAME=value``. Without one nothing is said.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from gcserver.runtime import waiters

if TYPE_CHECKING:
    from gcserver.runtime.lanes import Lane

#: For how long a change of state may wait for a service manager that does not read, seconds.
PATIENCE: Final = 5.0
#: A lane that was started again and is not ready after this long hangs, seconds; it loads compiled kernels, no more.
LANE_STARTS_WITHIN: Final = 60.0
log = logging.getLogger("gcserver")


class ServiceManager:
    """What is said to the service manager. A socket that fails is logged once and stops nothing.

    Takes its variables out of ``environ``, so that lanes and other children do not speak in the daemon's name.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        interval, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        #: seconds between two signs of life, a quarter of what the watchdog allows; 0: there is none
        self.every = 0.0
        if self._address and interval.isdecimal() and pid in ("", str(os.getpid())):
            self.every = int(interval) / 4e6
        self._next = 0.0
        self._hung: tuple[int, ...] = ()
        self._ready = False
        self._failed = False

    @property
    def present(self) -> bool:
        return bool(self._address)

    def ready(self, status: str) -> None:
        """The daemon serves."""
        self._ready = True
        self._say("READY=1", _status(status))

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Around reading files again. Nothing is said of it by a daemon that is not ready, or is not any more."""
        if self._ready:
            self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            if self._ready:
                self._say("READY=1")

    def stopping(self, status: str) -> None:
        """The daemon begins to end."""
        self._ready = False
        self._say("STOPPING=1", _status(status))

    def tick(self, table: Iterable[Lane | None]) -> None:
        """A sign of life when one is due, though only while all lanes answer: what hangs has to be started again."""
        now = time.monotonic()
        if not self.every or now < self._next:
            return
        hung = hanging(table)
        if hung and hung != self._hung:
            which = ", ".join(map(str, hung))
            log.error("lane %s does not answer: the service manager's watchdog is left to run out", which)
        self._hung = hung
        if not hung:
            self._next = now + self.every
            self._say("WATCHDOG=1", patience=0.0)

    def _say(self, *lines: str, patience: float = PATIENCE) -> None:
        if not self._address:
            return
        # "@" stands for the zero byte with which abstract names begin (unix(7))
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(patience)
                sock.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            if not self._failed:
                log.warning("the service manager cannot be told %s at %s: %s", lines[0], self._address, error)
            self._failed = True


def _status(text: str) -> str:
    # a line of its own would be taken for something else that is said
    return f"STATUS={' '.join(text.split())}"


def hanging(table: Iterable[Lane | None]) -> tuple[int, ...]:
    """Lanes that do not answer: ready ones that have gone silent, and those that do not become ready."""
    now = time.monotonic()
    return tuple(
        lane.index
        for lane in table
        if lane is not None
        and (waiters.silent(lane) if lane.ready else lane.restarts and now - lane.started > LANE_STARTS_WITHIN)
    )
