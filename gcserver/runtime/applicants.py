"""Nodes that want to be let into running jobs: since when, and what that waits for, in words.

What may live here: reading jobs and jobs that form for that, telling workers that wait. What may not: who is let in and
when (`gcserver.core.admission`), which ranks a job that forms lacks (`gcserver.core.gathering`), gRPC.

    members   their workers stand at an admission point and are told here what holds it up
    who waits its workers are told by the core which ranks are missing, and here which daemons have not sent any
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gcproto import wire
from gcproto.messages import Waiting
from gcserver.admin.source import Applicant, PeerState
from gcserver.core.control_events import Connection, Tell
from gcserver.core.job import Job
from gcserver.runtime.peerstatus import standing

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: Workers that stand at an admission point are told so often what for, seconds.
SAY_EVERY: Final = 2.0
#: so many nodes are named; there may be a thousand
MOST: Final = 8


class Applicants:
    """Those of one daemon."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        #: by (job, node), when it was first seen (``time.monotonic()``)
        self._since: dict[tuple[bytes, str], float] = {}
        self._said = 0.0

    def tick(self) -> None:
        """To be called every second or so."""
        now, jobs = time.monotonic(), list(self._s.machine.jobs.values())
        self._since = {key: self._since.get(key, now) for job in jobs for key in ((job.id, n) for n in waiting(job))}
        if now - self._said < SAY_EVERY:
            return
        self._said = now
        for job in jobs:
            if job.ended is None and job.pausing:
                who = _some(waiting(job)) or "nodes"
                said = Waiting(f"{who} to be let into job {job.record.label!r}: {self.why(job)}")
                for rank in job.pausing:
                    if (connection := job.workers.get(rank)) is not None:
                        self._s.registrations.tell(Tell(connection, said))

    def shown(self) -> tuple[Applicant, ...]:
        """Who waits, as operators see it; the longest wait first."""
        now, jobs = time.monotonic(), self._s.machine.jobs
        found = [
            Applicant(node, jobs[job].record.label, now - since, self.why(jobs[job]))
            for (job, node), since in self._since.items()
            if job in jobs and node in waiting(jobs[job])
        ]
        return tuple(sorted(found, key=lambda a: -a.since))

    def why(self, job: Job) -> str:
        """What an admission waits for."""
        if job.lost:
            return f"the job goes on without {_some(sorted(job.lost))} first"
        if away := [str(rank) for rank in sorted(set(job.workers) - job.pausing)]:
            return f"ranks {_some(away)} on {job.node} have not come to gcclient.admit()"
        absent = [name for name in job.others if name not in job.change.states]
        if absent:
            return f"not there yet: {_some(absent, self._standing)}"
        silent = f": {job.change.silent}" if job.change.silent else ""
        return f"the arbiter decides the next epoch{silent}"

    def _standing(self, name: str) -> str:
        """A member that has not said that its ranks stand at the admission point."""
        node = wire.node_id(name)
        if node in self._s.peers.states.table:
            state, _, reason = standing(self._s, node, time.monotonic())
            if state is not PeerState.UP:
                return f"{name} ({state}: {reason})"
        return f"{name} (its ranks have not come to gcclient.admit())"

    def explained(self, connection: Connection, what: str) -> str:
        """What a worker of a job that has yet to form is told, with the daemons that have sent no workers."""
        machine = self._s.machine
        for g in machine.gatherings.values():
            if g.complete and any(c == connection for c, _ in g.workers.values()):
                here = machine.formation.joins.get(g.label, {})
                absent = [name for name in self._s.peers.addresses if name not in here and self._up(name)]
                on_loss = next(m.on_loss for _, m in g.workers.values()) or machine.config.on_loss
                if absent:
                    what += f"; no workers of it have come to {_some(absent)}"
                if absent and on_loss != "fail":
                    what += ", or they are in it already and let this node in when all of them call gcclient.admit()"
        return what

    def _up(self, name: str) -> bool:
        link = self._s.peers.states.table.get(wire.node_id(name))
        return link is not None and link.state is PeerState.UP


def waiting(job: Job) -> list[str]:
    """Nodes that want to come into a job."""
    inside = {m.node for m in job.record.members}
    return sorted(set(job.applicants) - inside) if job.ended is None else []


def _some(names: list[str], say: Callable[[str], str] = str) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(map(say, names[:MOST])) + more
