"""Daemons forked from a process that has loaded what they load, which takes each of their processes most of its start.

What may live here: a daemon and its lanes beginning so. What may not: following them (`daemon.py`). The code that runs
is the daemon's own from its command line on; only how a lane's process comes to be is another. Tests of that, of memory
and of UCX have interpreters (`Cluster(forked=False)`), as have soaks and fuzzing; a lane that is started again always
is one.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

import gcserver.runtime.lane
import gcserver.runtime.supervisor
from gcserver import cli
from gcserver.codecs.warmup import warmup
from gcserver.runtime import lanes
from gcserver.runtime.setup import LaneSetup
from tests.integration.daemon import LANE
from tests.integration.forked import ends_with_parent

#: bytes of a lane's arguments, at the most
_ARGUMENTS: Final = 1 << 16

warmup()
# Objects by the hundred thousand that no process forked from here lets go: its collector would look through them again
# and again, and have a copy of every page that it marks.
gc.collect()
gc.freeze()


def serve(argv: Sequence[str], count: int) -> None:
    """In a forked process: `gcserver` with these arguments, its first ``count`` lanes forked. Raises SystemExit."""
    # Now, while there are no threads, whose locks a fork would take along.
    waiting = [ForkedLane() for _ in range(count)]
    interpreter = lanes.start_process

    def start_process(argv: Sequence[str], link: int) -> subprocess.Popen[bytes]:
        if not waiting:
            return interpreter(argv, link)
        lane = waiting.pop()
        lane.begin(argv, link)
        return lane  # type: ignore[return-value]

    lanes.start_process = start_process
    raise SystemExit(cli.main(list(argv)))


class ForkedLane:
    """A lane's process, as what `Popen` of its command line gives, but that it waits to be told to begin."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._ours.close()
            _serve_lane(theirs)
        theirs.close()

    def begin(self, argv: Sequence[str], link: int) -> None:
        """With these arguments, and ``link`` as the one descriptor it gets."""
        (setup,) = argv
        with self._ours:
            socket.send_fds(self._ours, [setup.encode()], [link])

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("a forked lane", timeout or 0.0)
            time.sleep(0.002)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _serve_lane(orders: socket.socket) -> None:
    """In the process: wait, be the lane, end."""
    status = 1
    try:
        ends_with_parent()
        told, links, _, _ = socket.recv_fds(orders, _ARGUMENTS, 1)
        if told:
            orders.close()
            setup = msgspec.structs.replace(msgspec.json.decode(told, type=LaneSetup), link=links[0])
            sys.argv = ["lane", msgspec.json.encode(setup).decode()]
            os.environ.update(lanes.MALLOC | lanes.THREADS)
            Path("/proc/self/comm").write_text(LANE)
            status = gcserver.runtime.lane.main()
        else:  # the supervisor has ended before
            status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)
