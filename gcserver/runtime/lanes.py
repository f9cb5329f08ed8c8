"""Lane processes as the supervisor sees them: started, restarted when they die, stopped.

What may live here: spawning, environment, pinning, restart pauses. What may not: what a lane does
(`lane.py`), what is said to it (`supervisor.py`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gcserver.runtime.lanelink import LaneLink, LaneStats
from gcserver.runtime.setup import LaneSetup

#: A received payload of 4 MiB touches fresh pages every time unless malloc keeps what it has: one arena on the
#: heap, nothing from mmap, nothing given back. This was worth 20-40 % of throughput.
MALLOC: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
THREADS: Final = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 5.0


@dataclass(slots=True)
class Lane:
    """One lane process and the supervisor's end of its socket pair."""

    index: int
    process: subprocess.Popen[bytes]
    link: LaneLink
    started: float
    ready: bool = False
    restarts: int = 0
    incarnation: int = 0
    cores: tuple[int, ...] = ()
    stats: LaneStats | None = None


@dataclass(slots=True)
class LanePool:
    """Starts lanes. ``pause(index)`` grows while a lane keeps dying young."""

    pauses: dict[int, float] = field(default_factory=dict)

    def start(self, setup: LaneSetup, restarts: int = 0) -> Lane:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        setup = msgspec.structs.replace(setup, link=theirs.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", "gcserver.runtime.lane", msgspec.json.encode(setup).decode()],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **MALLOC, **THREADS},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        return Lane(setup.hello.lane, process, LaneLink(ours), time.monotonic(), restarts=restarts)

    def pause(self, lane: Lane) -> float:
        """Seconds to wait before starting this lane again."""
        if time.monotonic() - lane.started > 10.0:
            self.pauses[lane.index] = FIRST_PAUSE
        pause = self.pauses.get(lane.index, FIRST_PAUSE)
        self.pauses[lane.index] = min(2 * pause, LONGEST_PAUSE)
        return pause


def cores_for(index: int, lanes: int, configured: tuple[int, ...] | None) -> tuple[int, ...]:
    """The cores lane ``index`` is pinned to: its share of the configured ones that we may use.

    With "auto" nothing is pinned: whoever shares a machine between lanes and training says which cores are
    whose. More lanes than cores share them in turn.
    """
    if configured is None:
        return ()
    allowed = sorted(set(configured) & os.sched_getaffinity(0))
    if not allowed:
        return ()
    share = max(1, len(allowed) // lanes)
    start = (index * share) % len(allowed)
    return tuple(allowed[start : start + share])
