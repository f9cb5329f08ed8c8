"""Feeds the metrics: what the supervisor and its lanes counted, when somebody scrapes.

What may live here: turning the daemon's state into calls of `gcserver.admin.metrics`. What may not: names and
labels of series (there), HTTP (`gcserver.admin.exposition`).
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Final

from gcproto import wire
from gcproto.audits import AuditReport
from gcserver import __version__
from gcserver.admin import catalogue as c
from gcserver.admin.access import OPEN, Access
from gcserver.admin.dashboard import Dashboard
from gcserver.admin.exposition import MetricsServer
from gcserver.admin.metrics import Metrics
from gcserver.core.control_events import LogSettled
from gcserver.core.events import DomainKey
from gcserver.runtime import waiters
from gcserver.runtime.lanelink import StepTimes

if TYPE_CHECKING:
    from gcserver.config_tables import NodeConfig
    from gcserver.core.job import Job
    from gcserver.runtime.status import Status
    from gcserver.runtime.supervisor import Supervisor

#: Residual norms read all residuals: at most this often, seconds.
NORMS_EVERY: Final = 10.0


def _names(node: NodeConfig) -> frozenset[str]:
    """Under which this machine is known, beside its addresses and names without a dot."""
    known = [socket.gethostname(), node.advertise.host, *([node.metrics.host] if node.metrics else [])]
    return frozenset(name.lower() for name in known)


class Observer:
    """Metrics of one daemon. Nothing happens here unless a step settles or somebody scrapes."""

    def __init__(self, supervisor: Supervisor, status: Status, access: Access = OPEN) -> None:
        self._s, self._status, self._certificates = supervisor, status, access.certificates
        self._metrics = Metrics(__version__, supervisor.node, wire.PROTOCOL_VERSION)
        dashboard = Dashboard(status, _names(supervisor.config.node))
        self._server = MetricsServer(self._metrics, self._why_not_ready, self.refresh, access, dashboard)
        self._times: dict[tuple[DomainKey, int], float] = {}
        self._labels: dict[bytes, str] = {}
        #: whose waits were shown at the newest scrape: jobs, and labels of jobs that have yet to form
        self._waited: set[str] = set()
        #: the peers that had series at the newest scrape
        self._peers: set[str] = set()
        self._norms_at = -NORMS_EVERY
        self._norms_task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Raises OSError naming the address."""
        await self._server.start(host, port)

    async def stop(self) -> None:
        if self._norms_task is not None:
            self._norms_task.cancel()
        await self._server.stop()

    def _why_not_ready(self) -> str:
        node = self._status.node()
        return "" if node.state.value in ("serving", "degraded") else f"{node.state.value}: {node.reason}"

    # ----------------------------------------------------------------------------------------- events
    def on_times(self, message: StepTimes) -> None:
        if message.domain[0] not in self._s.machine.jobs:
            return  # a lane's last word of a job that is over
        for step, seconds in message.steps:
            key = (message.domain, step)
            self._times[key] = max(seconds, self._times.get(key, 0.0))

    def on_settled(self, e: LogSettled) -> None:
        job, seconds = self._s.machine.jobs.get(e.domain[0]), self._times.pop((e.domain, e.step), None)
        if job is None:
            return
        label = self._labels[job.id] = job.record.label
        if any(d.config.id == e.domain for d in job.training):
            self._metrics.observe_step(label, "void" if e.void else "settled", seconds)

    def on_audit(self, job: Job, report: AuditReport) -> None:
        label = self._labels[job.id] = job.record.label
        self._metrics.audited(label, report.error)

    def forget_job(self, job: bytes) -> None:
        label = self._labels.pop(job, None)
        for key in [k for k in self._times if k[0][0] == job]:
            del self._times[key]
        if label is not None and label not in self._labels.values():
            self._metrics.forget_job(label)

    # ----------------------------------------------------------------------------------------- scrape
    def refresh(self) -> None:
        """Bring everything that is counted elsewhere up to date."""
        s, m = self._s, self._metrics
        names = {wire.node_id(name): name for name in s.peers.addresses if s.peers.roll.has(name)}
        jobs = {job.id: job.record.label for job in s.machine.jobs.values()}
        arenas: dict[str, int] = dict.fromkeys(jobs.values(), 0)
        for lane in s.lanes.table:
            if lane is None or lane.stats is None:
                continue
            source = f"lane{lane.index}/{lane.incarnation}"
            for t in lane.stats.peers:
                if (peer := names.get(t.peer)) is None:
                    continue
                for direction, wire_bytes, raw, frames in (
                    ("in", t.bytes_in, t.raw_in, t.frames_in),
                    ("out", t.bytes_out, t.raw_out, t.frames_out),
                ):
                    m.total(c.BYTES, source, wire_bytes, direction=direction, kind="wire", peer=peer)
                    m.total(c.BYTES, source, raw, direction=direction, kind="raw", peer=peer)
                    m.total(c.FRAMES, source, frames, direction=direction, peer=peer)
            for job, rounds in lane.stats.rounds:
                if job in jobs:
                    m.total(c.ROUNDS, f"{source}/{job.hex()}", rounds, training_job=jobs[job])
            for job, size in lane.stats.arena_bytes:
                if job in jobs:
                    arenas[jobs[job]] += size
            m.total(c.LANE_RESTARTS, f"lane{lane.index}", lane.restarts)
        for source, kind, n in self._status.errors_by_source():
            m.total(c.ERRORS, source, n, kind=kind)
        for label, size in arenas.items():
            m.set(c.ARENA, size, training_job=label)
        for running in s.machine.jobs.values():
            m.set(c.PLAN_VERSION, running.proposal, training_job=running.record.label)
        for part, seconds in s.planning.link.spent.items():
            m.total(c.PLANNING, "planning", seconds, part=part)
        for lane_status in self._status.node().lanes:
            m.set(c.LANE_READY, lane_status.state == "ready", lane=str(lane_status.index))
        for gone in self._peers - set(names.values()):
            m.forget_peer(gone)
        self._peers = set(names.values())
        for peer_status in self._status.peers():
            m.set(c.PEER_UP, peer_status.state.value == "up", peer=peer_status.name)
            for peer_lane in peer_status.lanes:
                up = peer_lane.state.value == "up"
                m.set(c.PEER_LANE_UP, up, peer=peer_status.name, lane=str(peer_lane.lane))
            if peer_status.rtt is not None:
                m.set(c.PEER_RTT, peer_status.rtt, peer=peer_status.name)
        if self._certificates is not None:
            found = self._certificates.current()
            m.set(c.EXPIRES, found.certificate.not_valid_after_utc.timestamp(), certificate="node")
            # of several CAs the one that ends first
            ends = min(ca.not_valid_after_utc.timestamp() for ca in found.ca)
            m.set(c.EXPIRES, ends, certificate="ca")
        self._waiting()
        self._norms()

    def _waiting(self) -> None:
        found: dict[str, dict[tuple[str, str], float]] = {}
        for job in self._s.machine.jobs.values():
            self._labels.setdefault(job.id, job.record.label)
            of = found.setdefault(job.record.label, {})
            for w in waiters.of_job(job):
                of[w.node, w.wanted] = max(of.get((w.node, w.wanted), 0.0), w.since)
        for g in self._s.machine.gatherings.values():
            of = found.setdefault(g.label, {})
            of.update({(w.node, w.wanted): w.since for w in waiters.of_gathering(self._s, g)})
        for label, waits in found.items():
            self._metrics.waiting(label, waits)
        for label in self._waited - found.keys() - set(self._labels.values()):
            self._metrics.forget_job(label)
        self._waited = set(found)

    def _norms(self) -> None:
        """Residual norms come with the scrape after the one that asked: lanes have to be asked."""
        now = time.monotonic()
        if now - self._norms_at < NORMS_EVERY or (self._norms_task is not None and not self._norms_task.done()):
            return
        self._norms_at = now
        self._norms_task = asyncio.ensure_future(self._ask_norms())

    async def _ask_norms(self) -> None:
        for job in list(self._s.machine.jobs.values()):
            square = 0.0
            for domain in list(job.domains.values()):
                square += sum(facts.residual for facts in (await self._status.ask(domain)).values())
            if job.id in self._s.machine.jobs:
                self._metrics.set(c.RESIDUAL_NORM, square**0.5, training_job=job.record.label)
