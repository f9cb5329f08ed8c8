"""What operators see: the supervisor's state in the words of `gcserver.admin.source`, and its metrics.

What may live here: reading the supervisor, asking lanes for facts. What may not: changing anything, except
by the requests the control machine offers; gRPC and HTTP (`gcserver.admin`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from gcproto import wire
from gcproto.audits import AuditReport
from gcproto.manifest import MAX_NAME
from gcproto.messages import Rule
from gcproto.modes import unknown
from gcserver import __version__
from gcserver.admin.planning import Advice, DomainProfile
from gcserver.admin.source import (
    AdminError,
    DomainStatus,
    DrainResult,
    ErrorKind,
    JobState,
    JobStatus,
    LaneStatus,
    Member,
    NodeState,
    NodeStatus,
    PeerStatus,
    PlanChange,
    PlanRule,
    PlanStatus,
    TensorStatus,
    WaitingFor,
)
from gcserver.admin.spans import TracePart, TraceStarted, TraceStopped
from gcserver.core import control_events as cx
from gcserver.core import epochs
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from gcserver.core.plan import unusable
from gcserver.core.waiting import WHOLE_JOB
from gcserver.runtime import waiters
from gcserver.runtime.access import access
from gcserver.runtime.lanelink import AskBlocks, BlockFacts, StepTimes
from gcserver.runtime.peerstatus import peer_status
from gcserver.runtime.planadmin import PlanAdmin
from gcserver.runtime.planfacts import lossless
from gcserver.runtime.planstatus import without_tensors
from gcserver.runtime.tensors import Facts, in_force, space, tensors, with_facts

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: A lane that does not answer within this is restarting; its blocks are shown without facts.
FACTS_TIMEOUT = 2.0
#: Of patterns that match no tensor so many are named.
NAMED = 8


class Status:
    """Implements `gcserver.admin.source.Source` over a supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        #: when a drain with a time limit ends
        self._stop_at: asyncio.TimerHandle | None = None
        self._plans = PlanAdmin(supervisor)
        self._service: Any = None
        self._metrics: Any = None

    # ------------------------------------------------------------------------------------- start, stop
    async def start(self) -> None:
        """Serve gRPC and metrics where the configuration says so. Raises OSError naming the address or the file."""
        node = self._s.config.node
        let_in = access(self._s)
        if node.admin:
            # Imported late: gRPC is the slowest import of the daemon, and nobody trains through it.
            from gcserver.admin import service

            self._service = await service.serve(self, node.admin, let_in, self._s.logs)
        if node.metrics is not None:
            from gcserver.runtime.observe import Observer

            self._metrics = Observer(self._s, self, let_in)
            await self._metrics.start(node.metrics.host, node.metrics.port)

    async def stop(self) -> None:
        for server in (self._service, self._metrics):
            if server is not None:
                await server.stop()

    def on_settled(self, e: cx.LogSettled) -> None:
        """A step of a domain is over, for the metrics."""
        if self._metrics is not None:
            self._metrics.on_settled(e)

    def on_times(self, message: StepTimes) -> None:
        """How long steps took on a lane; comes before the reports that settle them."""
        if self._metrics is not None:
            self._metrics.on_times(message)

    def on_audit(self, job: Job, report: AuditReport) -> None:
        """What a step of a job delivered beside the exact average, for the metrics."""
        if self._metrics is not None:
            self._metrics.on_audit(job, report)

    def forget_job(self, job: bytes) -> None:
        if self._metrics is not None:
            self._metrics.forget_job(job)

    @property
    def _lanes(self) -> int:
        return len(self._s.lanes.table)

    # --------------------------------------------------------------------------------------- the node
    def node(self) -> NodeStatus:
        s = self._s
        lanes = tuple(self._lane(i) for i in range(len(s.lanes.table)))
        state, reason = NodeState.SERVING, ""
        if s.stopped.is_set():
            state = NodeState.STOPPING
        elif s.machine.draining:
            state, reason = NodeState.DRAINING, s.machine.draining
        elif not s.ready.is_set():
            state, reason = NodeState.STARTING, "lanes are starting"
        elif bad := next((lane for lane in lanes if lane.state != "ready"), None):
            state, reason = NodeState.DEGRADED, f"lane {bad.index} is {bad.state}"
        return NodeStatus(
            s.node,
            s.incarnation,
            state,
            __version__,
            wire.PROTOCOL_VERSION,
            time.time() - s.started,
            str(s.config.node.listen),
            str(s.config.node.advertise),
            reason,
            lanes,
            sum(n for _, n in self.arenas()),
            self.errors(),
            s.applicants.shown(),
            {part: seconds for part, seconds in s.planning.link.spent.items() if seconds},
        )

    def _lane(self, index: int) -> LaneStatus:
        lane = self._s.lanes.table[index]
        if lane is None:
            return LaneStatus(index, "restarting")
        state = "silent" if waiters.silent(lane) else "ready" if lane.ready else "starting"
        stats = lane.stats
        traffic = (0, 0, 0)
        if stats is not None:
            traffic = (stats.bytes_in, stats.bytes_out, sum(n for _, n in stats.rounds))
        return LaneStatus(index, state, lane.process.pid, lane.incarnation, lane.cores, lane.restarts, *traffic)

    def arenas(self) -> list[tuple[bytes, int]]:
        """(job, bytes) over all lanes."""
        return [
            pair for lane in self._s.lanes.table if lane is not None and lane.stats for pair in lane.stats.arena_bytes
        ]

    def counters(self) -> dict[tuple[str, int], int]:
        """(name, peer id) -> count, supervisor and lanes together."""
        if self._service is not None:
            self._service.settle()
        total = dict(self._s.counts)
        for lane in self._s.lanes.table:
            if lane is not None and lane.stats is not None:
                for name, peer, n in lane.stats.counts:
                    total[name, peer] = total.get((name, peer), 0) + n
        return total

    def errors(self) -> dict[str, int]:
        """Counts of everything that should not happen, by kind."""
        found: dict[str, int] = {}
        for (name, _), n in self.counters().items():
            found[name] = found.get(name, 0) + n
        return found

    def errors_by_source(self) -> list[tuple[str, str, int]]:
        """(process, kind, count): a lane that starts anew counts from zero."""
        if self._service is not None:
            self._service.settle()
        found: dict[tuple[str, str], int] = {}
        for (name, _), n in self._s.counts.items():
            found["supervisor", name] = found.get(("supervisor", name), 0) + n
        for lane in self._s.lanes.table:
            if lane is not None and lane.stats is not None:
                source = f"lane{lane.index}/{lane.incarnation}"
                for name, _, n in lane.stats.counts:
                    found[source, name] = found.get((source, name), 0) + n
        return [(source, name, n) for (source, name), n in found.items()]

    def peers(self) -> list[PeerStatus]:
        counters = self.counters()
        peers = self._s.peers
        names = [name for name in peers.addresses if peers.roll.has(name)]
        return [peer_status(self._s, name, counters, self.traffic(wire.node_id(name))) for name in names]

    def traffic(self, node: int) -> tuple[int, int]:
        """Bytes from and to a peer, over all lanes."""
        pairs = [
            (t.bytes_in, t.bytes_out)
            for lane in self._s.lanes.table
            if lane is not None and lane.stats is not None
            for t in lane.stats.peers
            if t.peer == node
        ]
        return sum(i for i, _ in pairs), sum(o for _, o in pairs)

    # ------------------------------------------------------------------------------------------- jobs
    def jobs(self) -> list[JobStatus]:
        out = []
        for job in self._s.machine.jobs.values():
            state, reason = JobState.RUNNING, ""
            waits = waiters.of_job(job)
            if job.ended is not None:
                state, reason = JobState.FAILED, f"{job.ended.kind}: {job.ended.message}"
            elif any(c is None for c in job.workers.values()):
                state, reason = JobState.RECOVERING, "workers have still to come back"
            elif job.frozen:
                state, reason = JobState.RECOVERING, f"the next epoch is being decided: {epochs.question(job)}"
            r = job.record
            domains = tuple(self._domain(job, d, waits) for d in job.domains.values())
            out.append(
                JobStatus(
                    r.label,
                    job.id.hex(),
                    state,
                    reason,
                    r.epoch,
                    sum(len(m.ranks) for m in r.members),
                    tuple(Member(m.node, m.ranks) for m in r.members),
                    max((d.settled for d in job.training), default=0),
                    job.proposal,
                    r.on_loss,
                    r.deadline,
                    domains,
                    tuple(w for w in waits if w.reason in WHOLE_JOB),
                )
            )
        for g in self._s.machine.gatherings.values():
            here = ", ".join(str(w.rank) for _, w in g.workers.values())
            waits = waiters.of_gathering(self._s, g)
            out.append(
                JobStatus(
                    g.label, "", JobState.JOINING, f"ranks {here} are here", 0, g.world_size, deadline=g.deadline,
                    waiting_for=tuple(waits),
                )
            )  # fmt: skip
        return out

    def _domain(self, job: Job, domain: ControlDomain, waits: list[WaitingFor]) -> DomainStatus:
        waiting = tuple(w for w in waits if w.reason not in WHOLE_JOB and w.domain == domain.config.domain)
        sizes: dict[str, int] = {}
        try:
            for t in tensors(domain, in_force(job, domain)[1], self._lanes):
                sizes[t.codec] = sizes.get(t.codec, 0) + t.bytes_raw
        except AdminError:
            sizes["unknown"] = 0  # the job has ended because of that
        return DomainStatus(
            domain.config.domain,
            domain.config.label,
            domain.settled,
            len(domain.voids),
            sum(len(s.tensors) for s in domain.sections),
            sum(s.elements for s in domain.sections),
            max(sizes, key=sizes.__getitem__, default="none"),
            waiting,
        )

    def _job(self, name: str) -> Job:
        jobs = self._s.machine.jobs
        found = [j for j in jobs.values() if name in ("", j.record.label, j.id.hex())]
        if len(found) == 1:
            return found[0]
        have = ", ".join(sorted(j.record.label for j in jobs.values())) or "none"
        if not jobs:
            raise AdminError(ErrorKind.NOT_FOUND, "no job runs here", "job")
        if not found:
            raise AdminError(ErrorKind.NOT_FOUND, f"no job {name!r} here; jobs: {have}", "job")
        raise AdminError(ErrorKind.PRECONDITION, f"several jobs match {name!r}; name one of: {have}", "job")

    def _running(self, name: str) -> Job:
        """The job that something is to be changed about."""
        job = self._job(name)
        if job.ended is not None:
            text = f"job {job.record.label!r} has ended, nothing about it can be changed: {job.ended.message}"
            raise AdminError(ErrorKind.NOT_FOUND, text, "job")
        return job

    async def tensors(self, job: str, domain: str, pattern: str) -> list[TensorStatus]:
        """See Source. Bytes and residual norms are asked of the lanes."""
        found = self._job(job)
        if len(pattern) > MAX_NAME:
            text = f"pattern: expected at most {MAX_NAME} characters, as names have, got {len(pattern)}"
            raise AdminError(ErrorKind.INVALID, text, "pattern")
        out: list[TensorStatus] = []
        matching = [d for d in found.domains.values() if domain in ("", d.config.label, str(d.config.domain))]
        if domain and not matching:
            have = ", ".join(d.config.label for d in found.domains.values()) or "none"
            raise AdminError(
                ErrorKind.NOT_FOUND, f"no process group {domain!r} in this job; there are: {have}", "domain"
            )
        for d in matching:
            facts = await self.ask(d, gradients=True)
            blocks = [b for section in space(d, self._lanes).blocks for b in section]
            for t in tensors(d, in_force(found, d)[1], self._lanes):
                if fnmatchcase(t.name, pattern or "*"):
                    out.append(with_facts(t, blocks, facts))
        return out

    async def ask(self, domain: ControlDomain, gradients: bool = False) -> dict[int, Facts]:
        """What the lanes of this node know of each block."""
        answers: list[BlockFacts] = await self._s.questions.ask(
            lambda number: AskBlocks(number, domain.config.id, gradients), FACTS_TIMEOUT
        )
        return {block[0]: Facts(*block[1:]) for facts in answers for block in facts.blocks}

    # --------------------------------------------------------------------------------------- requests
    async def plan(self, job: str, timeline: bool) -> PlanStatus:
        """See Source."""
        return await self._plans.plan(self._job(job), timeline)

    async def set_mode(self, job: str, mode: str, quality: str) -> PlanChange:
        """See Source."""
        for field, words in (("mode", (mode, "")), ("quality", ("", quality))):
            if why := unknown(*words):
                raise AdminError(ErrorKind.INVALID, why, field)
        return self._plans.set_mode(self._running(job), mode, quality)

    async def replan(self, job: str) -> PlanChange:
        """See Source."""
        return await self._plans.replan(self._running(job))

    async def set_controller(self, job: str, controller: str, parameters: dict[str, float]) -> PlanChange:
        """See Source."""
        return await self._plans.set_controller(self._running(job), controller, parameters)

    async def profile(self, job: str) -> tuple[DomainProfile, ...]:
        """See Source."""
        return await self._plans.profile(self._job(job))

    async def advise(self, job: str, bandwidths: tuple[float, ...]) -> tuple[Advice, ...]:
        """See Source."""
        return await self._plans.advise(self._job(job), bandwidths)

    async def set_codec(self, job: str, pattern: str, spec: str) -> PlanChange:
        """See Source. Waits until the step is known, however long the job takes to get there."""
        return await self._change(job, (Rule(pattern or "*", spec),), False, "codec")

    async def set_plan(self, job: str, rules: tuple[PlanRule, ...], replace: bool) -> PlanChange:
        """See Source. Waits as ``set_codec`` does."""
        wanted = tuple(Rule(r.pattern, r.codec, r.scheme) for r in rules)
        if bad := unusable(wanted, self._s.machine.resolve):
            field = f"rules[{bad[0]}]"
            raise AdminError(ErrorKind.INVALID, f"{field}: {bad[1]}", field)
        return await self._change(job, wanted, replace, "rules")

    async def _change(self, job: str, rules: tuple[Rule, ...], replace: bool, field: str) -> PlanChange:
        found = self._running(job)
        changes = self._s.planning.course(found).changes
        answer = await self._s.set_plan(found.id.hex(), rules, replace)
        if answer.error:
            raise AdminError(ErrorKind.INVALID, answer.error, field)
        self._s.planning.by_hand(found, changes)
        patterns = [repr(r.pattern) for r in without_tensors(found, rules)]
        more = len(patterns) - NAMED
        idle = ", ".join(patterns[:NAMED]) + (f" and {more} more" if more > 0 else "")
        notes = (answer.message, f"no tensor matches {idle}" if idle else "", lossless(found))
        return PlanChange(answer.plan, answer.step, "; ".join(filter(None, notes)))

    async def start_trace(self, job: str, steps: int, seconds: float, nodes: tuple[str, ...]) -> TraceStarted:
        """See Source."""
        return self._s.traces.start(self._job(job) if job else None, steps, seconds, nodes)

    async def stop_trace(self) -> TraceStopped:
        """See Source."""
        return await self._s.traces.stop()

    def trace(self) -> AsyncIterator[TracePart]:
        """See Source."""
        return self._s.traces.fetch()

    async def drain(self, timeout: float, reason: str) -> DrainResult:
        """See Source."""
        running = len(self._s.machine.jobs)
        self._s.feed(cx.DrainAsked(reason or self._s.machine.draining or "drained by an operator"))
        if self._stop_at is not None:
            self._stop_at.cancel()
        self._stop_at = self._s.loop.call_later(timeout, self._s.stopped.set) if timeout > 0 else None
        message = "stops when the last job has left" if running else "no job is running; stopping"
        return DrainResult(message, running)
