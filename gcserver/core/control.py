"""The control machine: one per node, in the supervisor. Events in, effects out.

What may live here: which part of the machine an event concerns, workers' arrival and departure, draining. What may
not: links to peers (`peers.py`), how a job forms (`gathering.py`), what happens inside one (`job.py` says where), I/O,
clocks, random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gcproto import messages, wire
from gcproto.epoch_messages import Admit, JobState
from gcproto.messages import EpochDecided, JobJoin, JobLeft, JoinRefusal, Register
from gcserver.core import admission, declarations, entering, epochs, job_messages, job_plans, settling, waiting
from gcserver.core.control_config import ControlConfig
from gcserver.core.control_events import (
    ArbiterSilent,
    Connection,
    ControlEffect,
    ControlEvent,
    DrainAsked,
    Drained,
    EpochWon,
    ForgetJob,
    JobRestored,
    LaneSaid,
    LaneUp,
    Log,
    PeerExpelled,
    ProbeLink,
    SayMode,
    SetPlan,
    Tell,
    TellPeer,
    ToLane,
    WorkerGone,
    WorkerSaid,
)
from gcserver.core.early_messages import EarlyMessages
from gcserver.core.effects import ReportClosed, ReportLink, ReportStep, ReportWaiting
from gcserver.core.entering import Entrance
from gcserver.core.events import CodecChoice, DomainClosed, FrameDamaged, FrameReceived, PeerAdded, PeerReset, Tick
from gcserver.core.failed_jobs import FailedJobs
from gcserver.core.gathering import Formation, Gathering, fault_without_job
from gcserver.core.job import Job, NoSpace, any_controller, any_plan, any_section
from gcserver.core.job_faults import AGAIN, abroad
from gcserver.core.job_records import misfit, unknown_job, why_unusable
from gcserver.core.link import Link
from gcserver.core.peers import Peers, PeerUp
from gcserver.core.plan_modes import on_say_mode
from gcserver.core.restoring import damage

#: In JobLeft of a job: an answer, which needs none.
ANSWER = 1


def wish_number(incarnation: int, request: int) -> int:
    """By what all members know an operator's request: no two of a cluster have the same."""
    return wire.digest(f"{incarnation}/{request}".encode()) >> 2


@dataclass(slots=True)
class ControlMachine:
    """``resolve`` turns a codec spec into a choice (ValueError if it cannot); ``no_...`` as in ``Job``."""

    config: ControlConfig
    resolve: Callable[[str], CodecChoice]
    no_controller: Callable[[str], str] = any_controller
    no_room: Callable[[Job, messages.PlanText], str] = any_plan
    no_space: NoSpace = any_section
    jobs: dict[bytes, Job] = field(default_factory=dict)
    connections: dict[Connection, tuple[bytes, int]] = field(default_factory=dict)
    early: EarlyMessages[messages.OfJob] = field(default_factory=EarlyMessages)
    failed: FailedJobs = field(default_factory=FailedJobs)
    draining: str = ""
    #: effects of the event being handled; the parts share it, so that effects stay in order
    out: list[ControlEffect] = field(default_factory=list)
    peers: Peers = field(init=False)
    formation: Formation = field(init=False)
    entrance: Entrance = field(init=False)

    def __post_init__(self) -> None:
        self.peers = Peers(self.config, self.out)
        self.formation = Formation(
            self.config, self.peers, self.out, lambda m: why_unusable(m, self.config, self.resolve, self.no_controller),
            self.no_controller,
        )  # fmt: skip
        self.entrance = Entrance(self.formation, self.peers)

    @property
    def links(self) -> dict[int, Link]:
        """By peer, for those who show them."""
        return self.peers.links

    @property
    def gatherings(self) -> dict[str, Gathering]:
        """By label, for those who show them."""
        return self.formation.gatherings

    def on(self, event: ControlEvent, now: float) -> list[ControlEffect]:
        _HANDLERS[type(event)](self, event, now)
        for job in self.jobs.values():
            for node, message in job.outgoing:
                self.peers.send(node, message)
            job.outgoing.clear()
        for job in [j for j in self.jobs.values() if j.over]:
            self._forget(job)
        out = self.out.copy()
        self.out.clear()
        return out

    # ----------------------------------------------------------------------------------------- peers
    def _on_received(self, e: FrameReceived, now: float) -> None:
        heard = self.peers.receive(e, now)
        if heard is None:
            return
        name, what = heard
        if isinstance(what, PeerUp):
            self._peer_up(name, what.lost_memory)
        elif isinstance(what, messages.Beat):
            self.out.extend(settling.compare_beat(self.jobs, name, what, now))
        else:
            self._on_control(name, what)

    def _peer_up(self, name: str, lost_memory: bool) -> None:
        for job in self.jobs.values():
            self.out.extend(job_messages.on_peer_up(job, name, lost_memory))
        for fault in self.failed.unheard(name):
            self.peers.send(name, fault)
        self.formation.peer_up(name)

    # --------------------------------------------------------------------------------------- workers
    def _on_worker(self, e: WorkerSaid, now: float) -> None:
        m = e.message
        if isinstance(m, messages.WhoAreYou):
            hello = self.config.hello
            self.out.append(Tell(e.connection, messages.IAm(hello.node, hello.address, hello.lanes)))
        elif isinstance(m, Register):
            if why := self.draining:
                self.out.append(fault_without_job(e.connection, "Draining", f"this daemon takes no new jobs: {why}"))
            else:
                self.out.extend(entering.started_again(self.jobs.values(), m))
                self.formation.register(e.connection, m, now)
        elif isinstance(m, messages.Reattach):
            self._reattach(e.connection, m)
        else:
            job_id, rank = self.connections.get(e.connection, (b"", -1))
            job = self.jobs.get(job_id)
            if job is None:
                why = "this worker is not part of a job; call init() first"
                self.out.append(fault_without_job(e.connection, "NotRegistered", why))
            elif isinstance(m, messages.Unregister):
                self.connections.pop(e.connection, None)
                self.out.extend(job.worker_left(rank))
            elif job.ended is not None:
                self.out.append(Tell(e.connection, job.ended))
            elif isinstance(m, Admit):
                self.out.extend(epochs.on_admit(job, rank, m))
            elif isinstance(m, messages.DeclareDomain):
                self.out.extend(declarations.declare_domain(job, rank, m))
                self.out.extend(job_messages.replay(self.jobs, self.early))
            else:
                self.out.extend(declarations.declare_section(job, rank, m))

    def _on_epoch_won(self, e: EpochWon, now: float) -> None:
        known = self.jobs.get(e.record.job)
        if known is not None:
            self._follow(known, "", e.record)
            return
        self._form(e.record)
        if (job := self.jobs.get(e.record.job)) is not None:
            job.tell_members(e.record)
        else:
            self.formation.left_out(e.record)

    def _on_arbiter_silent(self, e: ArbiterSilent, now: float) -> None:
        if (job := self.jobs.get(e.record.job)) is not None:
            self.out.extend(epochs.on_silent(job, e.reason))
        else:
            self.formation.on_silent(e.record, e.reason)

    def _follow(self, job: Job, node: str, record: EpochDecided) -> None:
        """An epoch of a job that runs here was decided; ``node`` said so, or the arbiter (empty)."""
        self.out.extend(job_messages.on_record(job, node, record))
        self.formation.use(job.record)  # who was let in did not join for a job that is yet to form

    def _form(self, record: EpochDecided, state: JobState | None = None) -> None:
        """The job exists, for who comes in later as in ``state``: answer the workers of its gathering here."""
        self.formation.use(record)
        g = self.formation.take(record)
        if g is None:
            return
        job = self._job(record)
        job.token = g.token
        self.jobs[record.job] = job
        self.peers.meet((member.node, member.address) for member in record.members)
        for connection, worker in g.workers.values():
            job.worker_back(worker.rank, connection)
            self.connections[connection] = (job.id, worker.rank)
        again = self.failed.pop(record.job, None) is not None
        self.out.extend([job.save()] if state is None else admission.take_up(job, state, again))
        ranks = ", ".join(f"{m.node}: {len(m.ranks)}" for m in record.members)
        self.out.append(Log("info", f"job {record.label} formed, {record.world_size} ranks ({ranks})"))
        self.out.extend(job.tell_workers(job.registered(state.domains if state is not None else ())))
        self.out.extend(job_messages.replay(self.jobs, self.early))

    def _job(self, record: EpochDecided) -> Job:
        hello = self.config.hello
        return Job(record, hello.node, hello.lanes, self.resolve, self.no_controller, self.no_room, self.no_space)

    def _reattach(self, connection: Connection, m: messages.Reattach) -> None:
        if (job := self.jobs.get(m.job)) is None and (fault := self.failed.fault(m.job)) is not None:
            self.out.append(Tell(connection, fault))
            return
        if job is None or m.rank not in job.workers:
            why = "the daemon came back without the memory of this job"
            self.out.append(fault_without_job(connection, "PeerLost", why, AGAIN))
            return
        job.worker_back(m.rank, connection)
        self.connections[connection] = (job.id, m.rank)
        self.out.append(Tell(connection, job.registered()))
        self.out.extend(admission.announce(job))
        if job.ended is not None:
            self.out.append(Tell(connection, job.ended))

    def _on_worker_gone(self, e: WorkerGone, now: float) -> None:
        self.formation.worker_gone(e.connection)
        job_id, rank = self.connections.pop(e.connection, (b"", -1))
        if (job := self.jobs.get(job_id)) is None or job.workers.get(rank) != e.connection:
            return
        if job.ended is None:
            why = f"rank {rank} on {job.node} went away without shutdown()"
            self.out.extend(job.fault("WorkerLost", why, missing=(f"rank {rank}",)))
        self.out.extend(job.worker_left(rank))

    def _forget(self, job: Job) -> None:
        """The job is over for this node and, unless it failed, for all others."""
        if job.ended is None:
            for domain in job.domains.values():
                self.out.append(ToLane(DomainClosed(domain.config.id)))
            self.out.extend(job.requests.give_up("the job ended before the plan took effect"))
        else:
            self.failed.keep(job, job.ended)
        self.out.append(ForgetJob(job.id))
        del self.jobs[job.id]
        self.early.forget(job.id)
        self._maybe_drained()

    # ------------------------------------------------------------------------------- peers' messages
    def _on_control(self, node: str, m: messages.OfJobs) -> None:
        if isinstance(m, JobJoin):
            self.formation.on_peer_join(node, m)
            self.out.extend(admission.on_join(self.jobs.values(), node, m))
        elif isinstance(m, JobState):
            if (held := self.entrance.on_state(node, m, self.jobs.get(m.job))) is not None:
                self._on_record(held.node, held.record)
        elif isinstance(m, JobLeft):
            self._on_left(node, m)
        elif isinstance(m, JoinRefusal):
            self.formation.on_refusal(node, m)
        elif isinstance(m, EpochDecided):
            self._on_record(node, m)
        else:
            if not isinstance(m, messages.Fault) and (fault := self.failed.answer(node, m.job)) is not None:
                self.peers.send(node, fault)
            self.out.extend(job_messages.take(self.jobs, node, m, self.early))

    def _on_record(self, node: str, m: EpochDecided) -> None:
        me, job = self.config.hello.node, self.jobs.get(m.job)
        bad = misfit(m) if job is not None else self.formation.unusable(m)
        if bad is not None:
            self.formation.refuse_record(node, m, *bad)
            return
        mine = next((member for member in m.members if member.node == me), None)
        if job is not None and entering.is_over(job, node, mine):
            self._replace(job)
            job = None
        if job is not None:
            self._follow(job, node, m)
        elif mine is not None and mine.since > 1:
            if (state := self.entrance.state(node, m, self._job(m))) is not None:
                self._form(m, state)
        else:
            self._form(m)
            if m.job not in self.jobs and mine is not None:
                # Whoever waits here may be let in once the others have gone on without this node.
                self.peers.send(node, abroad(self.failed.fault(m.job) or unknown_job(m, me), m, me))

    def _replace(self, job: Job) -> None:
        self.out.extend(entering.outlived(job))
        self.connections = {c: known for c, known in self.connections.items() if known[0] != job.id}
        self._forget(job)

    def _on_left(self, node: str, m: JobLeft) -> None:
        if not m.job:
            self.formation.on_left(node, m)
            admission.withdrawn(self.jobs.values(), node, m)
        elif (job := self.jobs.get(m.job)) is not None:
            job.on_left(node, m.steps)
        elif m.nonce != ANSWER:
            # It came back after we had heard from everyone and forgot the job.
            self.peers.send(node, JobLeft(m.label, m.job, ANSWER))

    # ----------------------------------------------------------------------------------------- lanes
    def _on_lane_up(self, e: LaneUp, now: float) -> None:
        for job in self.jobs.values():
            self.out.extend(job.lane_up(e.lane))

    def _on_lane(self, e: LaneSaid, now: float) -> None:
        r = e.report
        if isinstance(r, ReportLink):
            if r.state == "refused":
                self.out.append(Log("error", f"lane {e.lane}: {r.reason}"))
            return
        job = self.jobs.get(r.domain[0])
        if job is None or job.ended is not None:
            return
        if isinstance(r, ReportStep):
            self.out.extend(epochs.on_step(job, e.lane, r))
        elif isinstance(r, ReportClosed):
            settling.on_closed(job, e.lane, r.domain[1], r.step, r.digest)
        elif isinstance(r, ReportWaiting):
            waiting.on_waiting(job, e.lane, r)
        else:
            self.out.extend(job.on_lane_fault(r))

    # ---------------------------------------------------------------------------- operators, restart
    def _on_set_plan(self, e: SetPlan, now: float) -> None:
        self.out.extend(job_plans.asked(self.jobs.values(), wish_number(self.config.incarnation, e.request), e))

    def _on_drain(self, e: DrainAsked, now: float) -> None:
        self.draining = e.reason or "draining"
        self.out.append(Log("info", f"draining: {self.draining}; {len(self.jobs)} job(s) still run"))
        self._maybe_drained()

    def _maybe_drained(self) -> None:
        if self.draining and not self.jobs:
            self.out.append(Drained())

    def _on_expelled(self, e: PeerExpelled, now: float) -> None:
        for job in self.jobs.values():
            self.out.extend(waiting.expel(job, e.name))

    def _on_restored(self, e: JobRestored, now: float) -> None:
        record = e.memory.record
        if why := damage(e.memory, e.ledgers, self.config.hello.node):
            text = f"the memory of job {record.label!r} cannot be used and is dropped: {why}"
            self.out += (Log("error", text), ForgetJob(record.job))
            return
        job = self._job(record)
        job.restore(e.memory, e.ledgers)
        for rank in e.memory.ranks:
            job.workers[rank] = None
            job.away_since[rank] = now
        self.jobs[job.id] = job
        self.peers.meet((member.node, member.address) for member in job.record.members)
        step = max((d.settled for d in job.training), default=0)
        self.out.append(Log("info", f"job {job.record.label} taken up again at step {step}"))
        if why := job_plans.unresolved(job):
            advice = "start it again from its last checkpoint with codecs every node knows, or put that version back"
            self.out.extend(job.fault("CodecError", why, missing=(job.node,), advice=advice))
        else:
            for domain, ledger in zip(job.domains.values(), e.ledgers, strict=True):
                self.out.extend(settling.catch_up(domain, ledger.settled))
            self.out.extend(job_plans.resume(job))

    # ------------------------------------------------------------------------------------------ time
    def _on_tick(self, e: Tick, now: float) -> None:
        self.peers.latest = e.latest
        self.peers.tick(now, tuple(c for job in self.jobs.values() for c in settling.closed_steps(job)))
        lease, patience = self.config.lease, 2 * self.config.quiet_after
        for job in list(self.jobs.values()):
            self.out.extend(waiting.tick(job, self.peers.heard, now, lease, patience))
        self.formation.tick(now)
        self.entrance.tick(now, lease)


_HANDLERS: dict[type, Callable[[ControlMachine, Any, float], None]] = {
    PeerAdded: lambda machine, e, now: machine.peers.on_added(e, now),
    PeerReset: lambda machine, e, now: machine.peers.on_reset(e),
    FrameReceived: ControlMachine._on_received,
    FrameDamaged: lambda machine, e, now: machine.peers.on_damaged(e),
    WorkerSaid: ControlMachine._on_worker,
    WorkerGone: ControlMachine._on_worker_gone,
    LaneUp: ControlMachine._on_lane_up,
    LaneSaid: ControlMachine._on_lane,
    EpochWon: ControlMachine._on_epoch_won,
    ArbiterSilent: ControlMachine._on_arbiter_silent,
    SetPlan: ControlMachine._on_set_plan,
    SayMode: lambda machine, e, now: machine.out.extend(on_say_mode(machine.jobs, e)),
    ProbeLink: lambda machine, e, now: machine.peers.on_probe(e, now),
    TellPeer: lambda machine, e, now: machine.peers.send(e.peer, e.message),
    PeerExpelled: ControlMachine._on_expelled,
    DrainAsked: ControlMachine._on_drain,
    JobRestored: ControlMachine._on_restored,
    Tick: ControlMachine._on_tick,
}
