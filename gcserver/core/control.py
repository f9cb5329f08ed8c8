"""The control machine: one per node, in the supervisor. Events in, effects out.

What may live here: links between supervisors, workers' arrival and departure, gathering a job, leases,
draining. What may not: what happens inside a job (`job.py`), I/O, clocks, random numbers.

How a job forms. Workers of one label register with their daemon; when all of a node's workers are there the
node says JobJoin to every peer it knows. The node of rank 0 collects joins until they cover all ranks, asks
the arbiter to make that the first epoch, and announces the record; members then answer their workers. A join
carries a nonce and is used once, so that what is left of an earlier run never enters a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gcproto import messages, wire
from gcproto.manifest import PAGE
from gcproto.messages import (
    EpochDecided,
    Fault,
    JobJoin,
    JobLeft,
    JoinRefusal,
    MemberInfo,
    Register,
    Registered,
    Waiting,
)
from gcproto.wire import FrameType, Header
from gcserver.core.control_events import (
    AnswerRequest,
    Arbitrate,
    Connection,
    ControlEffect,
    ControlEvent,
    DrainAsked,
    Drained,
    EpochWon,
    ForgetJob,
    JobRestored,
    KnowPeer,
    LaneSaid,
    LaneUp,
    Log,
    SetCodec,
    Tell,
    ToLane,
    WorkerGone,
    WorkerSaid,
)
from gcserver.core.effects import (
    Count,
    ReportClosed,
    ReportFault,
    ReportLink,
    ReportStep,
    ReportWaiting,
)
from gcserver.core.events import CodecChoice, DomainClosed, FrameDamaged, FrameReceived, PeerAdded, PeerReset, Tick
from gcserver.core.job import Job
from gcserver.core.link import Link

_hello = messages.Decoder[messages.Hello](messages.Hello)
_refuse = messages.Decoder[messages.Refuse](messages.Refuse)
_control = messages.Decoder[messages.Control](messages.Control)

#: In JobLeft of a job: an answer, which needs none.
ANSWER = 1
JOB_BYTES = len(wire.NO_JOB)
#: What to do when ranks and sizes do not fit together.
CHECK_RANKS = "check RANK, WORLD_SIZE and LOCAL_RANK on every machine"
#: A worker that waits is told what for after this long, then again as often, seconds.
SAY_WAITING = 2.0


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Who this node is and what its jobs get when they are formed here. Times in seconds."""

    hello: messages.Hello
    incarnation: int
    rules: tuple[messages.Rule, ...]
    partition_bytes: int
    min_compress_bytes: int
    deadline: float
    on_loss: str
    lease: float = 30.0
    quiet_after: float = 3.0

    @property
    def node(self) -> int:
        return wire.node_id(self.hello.node)


@dataclass(slots=True)
class Gathering:
    """Workers of one label on this node that wait for their job."""

    label: str
    nonce: int
    since: float
    world_size: int
    local_size: int
    workers: dict[int, tuple[Connection, Register]] = field(default_factory=dict)
    said: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.workers) == self.local_size

    def member(self, hello: messages.Hello) -> MemberInfo:
        ranks = tuple(sorted(r.rank for _, r in self.workers.values()))
        return MemberInfo(hello.node, hello.address, ranks)


@dataclass(slots=True)
class ControlMachine:
    """``resolve`` turns a codec spec into a choice (ValueError if it cannot)."""

    config: ControlConfig
    resolve: Callable[[str], CodecChoice]
    links: dict[int, Link] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    jobs: dict[bytes, Job] = field(default_factory=dict)
    connections: dict[Connection, tuple[bytes, int]] = field(default_factory=dict)
    gatherings: dict[str, Gathering] = field(default_factory=dict)
    joins: dict[str, dict[str, JobJoin]] = field(default_factory=dict)
    #: (label, node) -> newest nonce that made it into a job
    used: dict[tuple[str, str], int] = field(default_factory=dict)
    early: list[tuple[str, messages.Control]] = field(default_factory=list)
    draining: str = ""
    nonces: int = 0
    out: list[ControlEffect] = field(default_factory=list)

    def on(self, event: ControlEvent, now: float) -> list[ControlEffect]:
        _HANDLERS[type(event)](self, event, now)
        for job in self.jobs.values():
            for node, message in job.outgoing:
                self._send(node, message)
            job.outgoing.clear()
        for job in [j for j in self.jobs.values() if j.over]:
            self._forget(job)
        out, self.out = self.out, []
        return out

    # ----------------------------------------------------------------------------------------- links
    def _on_peer_added(self, e: PeerAdded, now: float) -> None:
        if e.node not in self.links and e.node != self.config.node:
            link = Link(self.config.node, self.config.incarnation, e.node, e.name, heard=now)
            self.links[e.node] = link
            self.names[e.name] = e.node
            self.out.append(link.hello(self.config.hello))

    def _on_peer_reset(self, e: PeerReset, now: float) -> None:
        link = self.links.get(e.peer)
        if link is not None and link.up:
            self.out.append(link.heartbeat())

    def _send(self, node: str, message: messages.Control) -> None:
        """One control message. Lost if the link is down: what matters is said again when it comes up."""
        link = self.links.get(self.names.get(node, 0))
        if link is not None and link.up:
            body = messages.encode(message)
            header = Header(
                FrameType.CONTROL,
                sender=self.config.node,
                incarnation=self.config.incarnation,
                payload_bytes=len(body),
                payload_digest=wire.digest(body),
            )
            self.out.append(link.send(header, body=body))

    def _on_received(self, e: FrameReceived, now: float) -> None:
        try:
            self._on_frame(e, now)
        except messages.MessageError as error:
            # Its digests hold: a faulty or foreign sender. Nothing of it was used.
            self.out.append(Count("frames_unusable", e.header.sender))
            self.out.append(Log("error", f"a {e.header.type.name} frame cannot be read: {error}"))

    def _on_frame(self, e: FrameReceived, now: float) -> None:
        h = e.header
        if h.sender == self.config.node:
            if h.incarnation != self.config.incarnation:
                self.out.append(
                    Log("error", f"another daemon uses the name {self.config.hello.node!r}; names must differ")
                )
            return
        link = self.links.get(h.sender)
        if h.type is FrameType.HELLO:
            self._on_hello(link, h, e.body, now)
            return
        if link is None:
            self.out.append(Count("frames_unknown_sender"))
            return
        if h.type is FrameType.REFUSE:
            reason = _refuse(e.body).reason
            if link.refused != reason:
                self.out.append(Log("error", f"peer {link.name} refuses this node: {reason}"))
            link.refused = reason
            return
        if not link.fresh(h, now, self.config.hello, self.out.append):
            return
        if h.type is FrameType.HEARTBEAT:
            beat = link.on_beat(e.body, now, self.out.append)
            for job_id, domain, step, digest in beat.closed:
                if (job := self.jobs.get(job_id)) is not None:
                    self.out.extend(job.compare_closed(link.name, domain, step, digest))
        elif h.type is FrameType.NACK:
            self.out.extend(link.on_nack(e.body))
        elif link.accept(h, self.out.append) and h.type is FrameType.CONTROL:
            self._on_control(link.name, _control(e.body), now)

    def _on_hello(self, link: Link | None, h: Header, body: bytes, now: float) -> None:
        hello = _hello(body)
        if link is None:
            # A peer that knows us and that nobody told us of: answer at the address it gives.
            if wire.node_id(hello.node) == h.sender:
                self.out.append(KnowPeer(hello.node, hello.address))
            return
        if h.incarnation < link.theirs:
            self.out.append(Count("frames_stale", link.peer))
            return
        reason = ""
        if hello.node != link.name:
            reason = f"the peer at {link.name}'s address calls itself {hello.node}"
        elif hello.lanes != self.config.hello.lanes:
            reason = (
                f"{hello.node} has {hello.lanes} lanes and {self.config.hello.node} has "
                f"{self.config.hello.lanes}; set node.lanes to the same number everywhere"
            )
        if reason:
            if link.refused != reason:
                self.out.append(Log("error", f"refusing {link.name}: {reason}"))
                link.refused = reason
            self.out.append(link.refuse(reason))
            return
        lost = self.generations.get(link.name, hello.generation) != hello.generation
        self.generations[link.name] = hello.generation
        if h.incarnation > link.theirs or link.refused:
            again = link.theirs != 0
            self.out.extend(e for e in link.adopt(h.incarnation, now) if not isinstance(e, ReportLink))
            self.out.append(link.hello(self.config.hello))
            self.out.append(Log("info", f"peer {link.name} is {'back' if again else 'up'}"))
            self._peer_up(link.name, lost)
        elif h.to_incarnation != self.config.incarnation:
            self.out.append(link.hello(self.config.hello))
        link.heard = now
        if h.to_incarnation == self.config.incarnation:
            link.knows_us = True

    def _peer_up(self, name: str, lost_memory: bool) -> None:
        for job in self.jobs.values():
            if job.ended is not None:
                self._send(name, job.ended)
            elif name in job.others:
                if lost_memory:
                    self.out.extend(
                        job.fault(
                            "PeerLost",
                            f"{name} came back without its memory (the host was restarted)",
                            missing=(name,),
                            advice="start the job again from its last checkpoint",
                        )
                    )
                job.resend(name)
        for gathering in self.gatherings.values():
            if gathering.complete:
                self._send(name, self._join(gathering))

    def _on_damaged(self, e: FrameDamaged, now: float) -> None:
        peer = e.header.sender if e.header is not None else e.peer
        link = self.links.get(peer) if peer is not None else None
        if link is None:
            self.out.append(Count("frames_corrupt"))
        elif link.on_damaged(e.header, self.out.append):
            self.out.append(Log("warning", f"control frames from {link.name} are damaged again and again: {e.reason}"))

    # --------------------------------------------------------------------------------------- workers
    def _on_worker(self, e: WorkerSaid, now: float) -> None:
        m = e.message
        if isinstance(m, messages.WhoAreYou):
            hello = self.config.hello
            self.out.append(Tell(e.connection, messages.IAm(hello.node, hello.address, hello.lanes)))
        elif isinstance(m, Register):
            self._register(e.connection, m, now)
        elif isinstance(m, messages.Reattach):
            self._reattach(e.connection, m)
        else:
            job_id, rank = self.connections.get(e.connection, (b"", -1))
            job = self.jobs.get(job_id)
            if job is None:
                self._tell_fault(e.connection, "NotRegistered", "this worker is not part of a job; call init() first")
            elif isinstance(m, messages.Unregister):
                self.connections.pop(e.connection, None)
                self._leave(job, rank)
            elif job.ended is not None:
                self.out.append(Tell(e.connection, job.ended))
            elif isinstance(m, messages.DeclareDomain):
                self.out.extend(job.declare_domain(rank, m))
                self._replay_early()
            else:
                self.out.extend(job.declare_section(rank, m))

    def _tell_fault(self, connection: Connection, kind: str, message: str, advice: str = "start the job again") -> None:
        self.out.append(Tell(connection, Fault(b"", kind, message, advice=advice)))

    def _register(self, connection: Connection, m: Register, now: float) -> None:
        if self.draining:
            self._tell_fault(connection, "Draining", f"this daemon takes no new jobs: {self.draining}")
            return
        if not (0 <= m.rank < m.world_size and 0 <= m.local_rank < m.local_size <= m.world_size):
            self._tell_fault(
                connection,
                "JoinRefused",
                f"rank {m.rank} of {m.world_size}, local rank {m.local_rank} of "
                f"{m.local_size}: ranks start at 0 and end below the size",
            )
            return
        if m.rank == 0 and len(m.number) != JOB_BYTES:
            self._tell_fault(
                connection, "JoinRefused", f"rank 0 draws the job's number of {JOB_BYTES} bytes, got {len(m.number)}"
            )
            return
        if m.on_loss not in ("", "fail"):
            self._tell_fault(
                connection,
                "JoinRefused",
                f"on_loss={m.on_loss!r} comes in a later release; this one knows 'fail' only",
                "leave on_loss out",
            )
            return
        for name, address in m.peers:
            if name != self.config.hello.node and name not in self.names:
                self.out.append(KnowPeer(name, address))
        g = self.gatherings.get(m.label)
        if g is None or (g.world_size, g.local_size) != (m.world_size, m.local_size):
            self._dissolve(g)
            self.nonces += 1
            g = Gathering(m.label, self.config.incarnation + self.nonces, now, m.world_size, m.local_size, said=now)
            self.gatherings[m.label] = g
        before = g.workers.get(m.local_rank)
        if before is not None and before[0] != connection:
            self._tell_fault(
                before[0],
                "JoinRefused",
                f"another worker registered as local rank {m.local_rank} of "
                f"job {m.label!r}; give concurrent jobs different names (GC_JOB)",
            )
        g.workers[m.local_rank] = (connection, m)
        if g.complete:
            join = self._join(g)
            for name in self.names:
                self._send(name, join)
            self._collect(join)

    def _dissolve(self, g: Gathering | None) -> None:
        if g is not None:
            for connection, _ in g.workers.values():
                self._tell_fault(
                    connection,
                    "JoinRefused",
                    f"another run of job {g.label!r} with another world size "
                    "registered; give concurrent jobs different names (GC_JOB)",
                )

    def _join(self, g: Gathering) -> JobJoin:
        return JobJoin(g.label, g.world_size, g.member(self.config.hello), g.nonce)

    def _collect(self, join: JobJoin) -> None:
        """A node is ready. The node of rank 0 proposes the epoch once all ranks are covered."""
        node = join.member.node
        if join.nonce <= self.used.get((join.label, node), 0) or not join.member.ranks:
            return
        joins = self.joins.setdefault(join.label, {})
        joins[node] = join
        g = self.gatherings.get(join.label)
        first = next((r for _, r in g.workers.values() if r.rank == 0), None) if g is not None else None
        if g is None or first is None or not g.complete:
            return
        chosen = [j for j in joins.values() if j.world_size == g.world_size]
        ranks = [r for j in chosen for r in j.member.ranks]
        if len(ranks) < g.world_size:
            return
        if sorted(ranks) != list(range(g.world_size)):
            self._refuse_gathering(g, f"ranks {sorted(ranks)} do not make a world of {g.world_size}")
            return
        chosen.sort(key=lambda j: j.member.ranks[0])
        c = self.config
        record = EpochDecided(
            join.label,
            first.number,
            1,
            g.world_size,
            tuple(j.member for j in chosen),
            tuple(j.nonce for j in chosen),
            c.rules,
            c.partition_bytes,
            c.min_compress_bytes,
            first.deadline or c.deadline,
            first.on_loss or c.on_loss,
            first.seed,
        )
        self.out.append(Arbitrate(0, record))

    def _refuse_gathering(self, g: Gathering, why: str) -> None:
        joins = self.joins.pop(g.label, {})
        refusal = JoinRefusal(g.label, tuple((j.member.node, j.nonce) for j in joins.values()), why)
        for name in self.names:
            self._send(name, refusal)
        self._end_gathering(g, "JoinRefused", why, CHECK_RANKS)

    def _end_gathering(self, g: Gathering, kind: str, why: str, advice: str) -> None:
        self.gatherings.pop(g.label, None)
        self._unjoin(g.label, self.config.hello.node)
        for connection, _ in g.workers.values():
            self._tell_fault(connection, kind, why, advice)

    def _on_refusal(self, node: str, m: JoinRefusal) -> None:
        """The node of rank 0 refused these gatherings; one of them may be ours and still waiting."""
        for name, nonce in m.gatherings:
            if (join := self.joins.get(m.label, {}).get(name)) is not None and join.nonce <= nonce:
                self._unjoin(m.label, name)
        g = self.gatherings.get(m.label)
        if g is not None and (self.config.hello.node, g.nonce) in m.gatherings:
            self._end_gathering(g, "JoinRefused", f"{node}: {m.reason}", CHECK_RANKS)

    def _unjoin(self, label: str, node: str) -> None:
        joins = self.joins.get(label, {})
        joins.pop(node, None)
        if not joins:
            self.joins.pop(label, None)

    def _on_epoch_won(self, e: EpochWon, now: float) -> None:
        self._form(e.record)
        job = self.jobs.get(e.record.job)
        if job is not None:
            job.tell_members(e.record)

    def _form(self, record: EpochDecided) -> None:
        """The job exists: answer the workers of the gathering it was made of."""
        for member, nonce in zip(record.members, record.nonces, strict=True):
            self.used[(record.label, member.node)] = max(nonce, self.used.get((record.label, member.node), 0))
            self._unjoin(record.label, member.node)
        if record.job in self.jobs:
            return
        g = self.gatherings.get(record.label)
        mine = next(
            ((m, n) for m, n in zip(record.members, record.nonces, strict=True) if m.node == self.config.hello.node),
            None,
        )
        if g is None or mine is None or mine[1] != g.nonce:
            return
        del self.gatherings[record.label]
        job = Job(record, self.config.hello.node, self.config.hello.lanes, self.resolve)
        self.jobs[record.job] = job
        for member in record.members:
            if member.node != job.node and member.node not in self.names:
                self.out.append(KnowPeer(member.node, member.address))
        for connection, worker in g.workers.values():
            job.worker_back(worker.rank, connection)
            self.connections[connection] = (job.id, worker.rank)
        self.out.append(job.save())
        ranks = ", ".join(f"{m.node}: {len(m.ranks)}" for m in record.members)
        self.out.append(Log("info", f"job {record.label} formed, {record.world_size} ranks ({ranks})"))
        self.out.extend(job.tell_workers(self._registered(job)))
        self._replay_early()

    def _registered(self, job: Job) -> Registered:
        r = job.record
        return Registered(job.id, r.epoch, job.node, r.members, (), r.partition_bytes, r.deadline)

    def _reattach(self, connection: Connection, m: messages.Reattach) -> None:
        job = self.jobs.get(m.job)
        if job is None or m.rank not in job.workers:
            self._tell_fault(
                connection,
                "PeerLost",
                "the daemon came back without the memory of this job",
                "start the job again from its last checkpoint",
            )
            return
        job.worker_back(m.rank, connection)
        self.connections[connection] = (job.id, m.rank)
        self.out.append(Tell(connection, self._registered(job)))
        if job.ended is not None:
            self.out.append(Tell(connection, job.ended))

    def _on_worker_gone(self, e: WorkerGone, now: float) -> None:
        for g in list(self.gatherings.values()):
            for local_rank, (connection, _) in list(g.workers.items()):
                if connection == e.connection:
                    # Whoever comes next is another gathering; the join already sent must not be used.
                    del g.workers[local_rank]
                    self._unjoin(g.label, self.config.hello.node)
                    for name in self.names:
                        self._send(name, JobLeft(g.label, b"", g.nonce))
                    self.nonces += 1
                    g.nonce = self.config.incarnation + self.nonces
                    if not g.workers:
                        del self.gatherings[g.label]
        job_id, rank = self.connections.pop(e.connection, (b"", -1))
        job = self.jobs.get(job_id)
        if job is None or job.workers.get(rank) != e.connection:
            return
        if job.ended is None:
            self.out.extend(
                job.fault(
                    "WorkerLost",
                    f"rank {rank} on {job.node} went away without shutdown()",
                    missing=(f"rank {rank}",),
                    advice="its own log says why; start the job again",
                )
            )
        self._leave(job, rank)

    def _leave(self, job: Job, rank: int) -> None:
        self.out.extend(job.worker_left(rank))

    def _forget(self, job: Job) -> None:
        """The job is over for this node and, unless it failed, for all others."""
        if job.ended is None:
            for domain in job.domains.values():
                self.out.append(ToLane(DomainClosed(domain.config.id)))
            for request in job.requests.values():
                self.out.append(AnswerRequest(request, error="the job ended before the plan took effect"))
        self.out.append(ForgetJob(job.id))
        del self.jobs[job.id]
        self._maybe_drained()

    # ------------------------------------------------------------------------------- peers' messages
    def _on_control(self, node: str, m: messages.Control, now: float) -> None:
        if isinstance(m, JobJoin):
            self._collect(m)
        elif isinstance(m, JobLeft):
            self._on_left(node, m)
        elif isinstance(m, JoinRefusal):
            self._on_refusal(node, m)
        elif isinstance(m, EpochDecided):
            me = self.config.hello.node
            if m.job not in self.jobs and (bad := self._unusable(m)) is not None:
                self._refuse_record(node, m, *bad)
                return
            self._form(m)
            if m.job not in self.jobs and any(member.node == me for member in m.members):
                self._send(
                    node,
                    Fault(
                        m.job,
                        "PeerLost",
                        f"{me} does not know job {m.label!r}: it ended there, or its daemon restarted while the job "
                        "was being formed",
                        epoch=m.epoch,
                        missing=(me,),
                        advice="start the job again from its last checkpoint",
                    ),
                )
        else:
            job = self.jobs.get(m.job)
            if job is None:
                if not isinstance(m, Fault):
                    self.early.append((node, m))
                    del self.early[:-4096]
                return
            self.out.extend(self._dispatch(job, node, m))

    def _unusable(self, m: EpochDecided) -> tuple[str, str] | None:
        """(kind, why) a peer's record cannot be followed here, or None."""
        ranks = [r for member in m.members for r in member.ranks]
        whole = sorted(ranks) == list(range(m.world_size)) if m.world_size == len(ranks) else False
        if len(m.members) != len(m.nonces) or not whole or any(not member.ranks for member in m.members):
            return "JoinRefused", (
                f"the record of job {m.label!r} does not fit together: {len(m.members)} members, {len(m.nonces)} "
                f"nonces, {len(ranks)} ranks of {m.world_size}"
            )
        if len(m.job) != JOB_BYTES or m.partition_bytes <= 0 or m.partition_bytes % PAGE:
            return "JoinRefused", (
                f"the record of job {m.label!r} has a number of {len(m.job)} bytes and partitions of "
                f"{m.partition_bytes}; expected {JOB_BYTES} and a positive multiple of {PAGE}"
            )
        if all(member.node != self.config.hello.node for member in m.members):
            return None
        for rule in m.rules:
            try:
                self.resolve(rule.spec)
            except ValueError as error:
                return "CodecError", f"{self.config.hello.node} cannot run the rules of job {m.label!r}: {error}"
        return None

    def _refuse_record(self, node: str, m: EpochDecided, kind: str, why: str) -> None:
        advice = "run the same release with the same codecs on every node"
        self.out.append(Log("error", f"refusing a job record from {node}: {why}"))
        missing = (self.config.hello.node,)
        self._send(node, Fault(m.job, kind, why, epoch=m.epoch, missing=missing, advice=advice))
        g = self.gatherings.get(m.label)
        nonces = [n for x, n in zip(m.members, m.nonces, strict=False) if x.node == self.config.hello.node]
        if g is not None and g.nonce in nonces:
            self._end_gathering(g, kind, why, advice)

    def _on_left(self, node: str, m: JobLeft) -> None:
        if not m.job:
            join = self.joins.get(m.label, {}).get(node)
            if join is not None and join.nonce <= m.nonce:
                self._unjoin(m.label, node)
        elif (job := self.jobs.get(m.job)) is not None:
            job.on_left(node, m.steps)
        elif m.nonce != ANSWER:
            # It came back after we had heard from everyone and forgot the job.
            self._send(node, JobLeft(m.label, m.job, ANSWER))

    def _dispatch(self, job: Job, node: str, m: messages.Control) -> list[ControlEffect]:
        if isinstance(m, Fault):
            return job.on_fault(m)
        if job.ended is not None:
            job.tell_members(job.ended, node)
            return []
        if isinstance(m, messages.SectionOffer):
            return job.on_offer(node, m, self.early)
        if isinstance(m, messages.SectionList):
            return job.on_list(node, m)
        if isinstance(m, messages.PlanRequest):
            return job.on_request(node, m)
        if isinstance(m, messages.PlanText):
            return job.on_plan(node, m)
        if isinstance(m, messages.PlanReady):
            return job.on_ready(node, m)
        if isinstance(m, messages.PlanGo):
            return job.on_go(m)
        return []

    def _replay_early(self) -> None:
        early, self.early = self.early, []
        for node, message in early:
            job = self.jobs.get(getattr(message, "job", b""))
            if job is None:
                self.early.append((node, message))
            else:
                self.out.extend(self._dispatch(job, node, message))

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
            self.out.extend(job.on_step(e.lane, r))
        elif isinstance(r, ReportClosed):
            job.on_closed(e.lane, r.domain[1], r.step, r.digest)
        elif isinstance(r, ReportWaiting):
            job.on_waiting(e.lane, r)
        elif isinstance(r, ReportFault):
            self.out.extend(job.on_lane_fault(r))

    # ---------------------------------------------------------------------------- operators, restart
    def _on_set_codec(self, e: SetCodec, now: float) -> None:
        matching = [j for j in self.jobs.values() if e.job in ("", j.record.label, j.id.hex()) and j.ended is None]
        if len(matching) != 1:
            have = ", ".join(sorted(j.record.label for j in self.jobs.values())) or "none"
            what = "no such job" if not matching else "more than one job matches"
            self.out.append(AnswerRequest(e.request, error=f"{what}: {e.job!r}; jobs here: {have}"))
            return
        number = wire.digest(f"{self.config.incarnation}/{e.request}".encode()) >> 2
        self.out.extend(matching[0].set_codec(e.request, number, e.pattern, e.spec))

    def _on_drain(self, e: DrainAsked, now: float) -> None:
        self.draining = e.reason or "draining"
        self._maybe_drained()

    def _maybe_drained(self) -> None:
        if self.draining and not self.jobs:
            self.out.append(Drained())

    def _on_restored(self, e: JobRestored, now: float) -> None:
        job = Job(e.memory.record, self.config.hello.node, self.config.hello.lanes, self.resolve)
        job.restore(e.memory, e.ledgers)
        for rank in e.memory.ranks:
            job.workers[rank] = None
            job.away_since[rank] = now
        self.jobs[job.id] = job
        for member in job.record.members:
            if member.node != job.node and member.node not in self.names:
                self.out.append(KnowPeer(member.node, member.address))
        self.out.append(
            Log(
                "info",
                f"job {job.record.label} taken up again at step "
                f"{max((d.settled for d in job.domains.values()), default=0)}",
            )
        )

    # ------------------------------------------------------------------------------------------ time
    def _on_tick(self, e: Tick, now: float) -> None:
        closed = tuple(c for job in self.jobs.values() for c in job.closed_steps())
        for link in self.links.values():
            quiet = link.tick(now, self.config.hello, self.config.quiet_after, closed)
            self.out.extend(x for x in quiet if not isinstance(x, ReportLink))
            if any(isinstance(x, ReportLink) for x in quiet):
                self.out.append(Log("warning", f"nothing heard from {link.name} for {self.config.quiet_after:g} s"))
        for job in list(self.jobs.values()):
            if job.ended is None:
                self._check_leases(job, now)
            if job.ended is None:
                self.out.extend(job.check_order() or job.check_deadline(now, 2 * self.config.quiet_after))
            self._check_workers(job, now)
        for g in list(self.gatherings.values()):
            self._check_gathering(g, now)

    def _check_leases(self, job: Job, now: float) -> None:
        for name in job.others:
            link = self.links.get(self.names.get(name, 0))
            if link is not None and now - link.heard > self.config.lease:
                self.out.extend(
                    job.fault(
                        "PeerLost",
                        f"nothing heard from {name} for {self.config.lease:g} s: its lease expired",
                        missing=(name,),
                        elapsed=now - link.heard,
                        advice=f"look at the daemon on {name}; start the job again from its last checkpoint",
                    )
                )
                return

    def _check_workers(self, job: Job, now: float) -> None:
        """After a restart of ours: workers that do not come back are lost."""
        for rank, since in list(job.away_since.items()):
            if now - since > self.config.lease:
                del job.away_since[rank]
                if job.ended is None:
                    self.out.extend(
                        job.fault(
                            "WorkerLost",
                            f"rank {rank} did not come back to its restarted daemon",
                            missing=(f"rank {rank}",),
                        )
                    )
                self._leave(job, rank)

    def _check_gathering(self, g: Gathering, now: float) -> None:
        if now - g.said < SAY_WAITING:
            return
        g.said = now
        if not g.complete:
            missing = sorted(set(range(g.local_size)) - set(g.workers))
            what = f"local ranks {missing} of job {g.label!r} on {self.config.hello.node}"
        else:
            joined = self.joins.get(g.label, {})
            down = [f"{k.name} ({k.refused or 'no answer'})" for k in self.links.values() if not k.up]
            alike = [j for j in joined.values() if j.world_size == g.world_size]
            there = {r for j in alike for r in j.member.ranks} | set(g.member(self.config.hello).ranks)
            missing = sorted(set(range(g.world_size)) - there)
            what = f"ranks {missing} of job {g.label!r}" + (f"; peers not reached: {', '.join(down)}" if down else "")
            if other := sorted((j.member.node, j.world_size) for j in joined.values() if j not in alike):
                sizes = ", ".join(f"{size} on {name}" for name, size in other)
                what += f"; WORLD_SIZE differs: {g.world_size} here, {sizes}"
            if not self.links:
                what += "; no peers are known: set cluster.peers, or start with torchrun so that they are found"
        for connection, _ in g.workers.values():
            self.out.append(Tell(connection, Waiting(what)))


_HANDLERS: dict[type, Callable[[ControlMachine, Any, float], None]] = {
    PeerAdded: ControlMachine._on_peer_added,
    PeerReset: ControlMachine._on_peer_reset,
    FrameReceived: ControlMachine._on_received,
    FrameDamaged: ControlMachine._on_damaged,
    WorkerSaid: ControlMachine._on_worker,
    WorkerGone: ControlMachine._on_worker_gone,
    LaneUp: ControlMachine._on_lane_up,
    LaneSaid: ControlMachine._on_lane,
    EpochWon: ControlMachine._on_epoch_won,
    SetCodec: ControlMachine._on_set_codec,
    DrainAsked: ControlMachine._on_drain,
    JobRestored: ControlMachine._on_restored,
    Tick: ControlMachine._on_tick,
}
