"""Whom the jobs of a daemon wait for, since when and for what, as operators see it.

What may live here: reading the control machine and the lanes' last words. What may not: what ends a wait
(`gcserver.core.waiting`, `gathering.py`), gRPC, series.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from gcserver.admin.source import WaitingFor
from gcserver.core import waiting
from gcserver.core.gathering import Gathering
from gcserver.core.job import Job

if TYPE_CHECKING:
    from gcserver.runtime.lanes import Lane
    from gcserver.runtime.supervisor import Supervisor

#: A lane says how it is every second; one that has been silent for longer than this is stopped, or very slow, seconds.
LANE_SILENT_AFTER: Final = 3.0
#: Whoever is waited for no longer than this is in time, seconds.
SHOWN_AFTER: Final = 1.0


def of_job(job: Job) -> list[WaitingFor]:
    """Whom a job has waited for for ``SHOWN_AFTER`` seconds and more, the longest wait first."""
    now = time.monotonic()
    found = [WaitingFor(w.who, now - w.since, w.step, w.phase, w.wanted, w.domain) for w in waiting.waits(job)]
    return sorted((w for w in found if w.since >= SHOWN_AFTER), key=lambda w: -w.since)


def of_gathering(supervisor: Supervisor, g: Gathering) -> list[WaitingFor]:
    """The ranks a job that has not formed yet waits for."""
    what = "rank" if g.complete else "local rank"
    since = time.monotonic() - g.since
    return [WaitingFor(f"{what} {r}", since, 0, "join", "worker") for r in supervisor.machine.formation.missing(g)]


def silent(lane: Lane) -> float:
    """For how many seconds a lane that was ready has said nothing; 0 if that is in order."""
    quiet = time.monotonic() - lane.heard
    return quiet if lane.ready and quiet > LANE_SILENT_AFTER else 0.0
