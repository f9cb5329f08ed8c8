"""How a job forms: workers of one label gather on each node, nodes join, the node of rank 0 proposes the epoch.

What may live here: gatherings, joins, what makes them unusable. What may not: what makes a record so
(`job_records.py`), the job that comes of it (`job.py`), who wins an epoch (`arbiter.py`).

Workers of one label register with their daemon; when all of a node's workers are there the node says JobJoin to every
peer it knows. The node of rank 0 collects joins until they cover all ranks, asks the arbiter to make that the first
epoch, and announces the record; members then answer their workers. A join carries a nonce and is used once, so that
what is left of an earlier run never enters a later one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from gcproto import messages, modes, wire
from gcproto.messages import MAX_RANKS, EpochDecided, Fault, JobJoin, JobLeft, JoinRefusal, MemberInfo, Register
from gcserver.core.control_config import ControlConfig
from gcserver.core.control_events import Arbitrate, Connection, ControlEffect, Log, Tell
from gcserver.core.effects import Count
from gcserver.core.job_records import JOB_BYTES
from gcserver.core.peers import Peers

#: What to do when ranks and sizes do not fit together.
CHECK_RANKS = "check RANK, WORLD_SIZE and LOCAL_RANK on every machine"
CHECK_TOKEN = "give all workers of the job the same GC_JOB_TOKEN, and concurrent jobs different names (GC_JOB)"
SAME_RELEASE = "run the same release with the same codecs on every node"
#: what a refusal's kind calls for
ADVICE = {"NotAuthorised": CHECK_TOKEN, "CodecError": SAME_RELEASE}
#: A worker that waits is told what for after this long, then again as often, seconds.
SAY_WAITING = 2.0
#: it is told so many ranks by number
SAY_RANKS = 32
#: A node may wait in so many jobs that have not formed, with MAX_RANKS ranks in all of them.
MAX_JOINS = 256
#: So many newest nonces are remembered.
MAX_USED = 1 << 14


def fault_without_job(connection: Connection, kind: str, message: str, advice: str = "start the job again") -> Tell:
    """What a worker is told that is in no job."""
    return Tell(connection, Fault(b"", kind, message, advice=advice))


def _some(ranks: tuple[int, ...]) -> str:
    """Ranks for people: there may be thousands, and this is said again and again."""
    more = f" and {len(ranks) - SAY_RANKS} more" if len(ranks) > SAY_RANKS else ""
    return f"{list(ranks[:SAY_RANKS])}{more}"


@dataclass(slots=True)
class Gathering:
    """Workers of one label on this node that wait for their job, for ``deadline`` seconds at most."""

    label: str
    nonce: int
    since: float
    world_size: int
    local_size: int
    deadline: float
    token: bytes = b""
    workers: dict[int, tuple[Connection, Register]] = field(default_factory=dict)
    said: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.workers) == self.local_size

    def member(self, hello: messages.Hello) -> MemberInfo:
        ranks = tuple(sorted(r.rank for _, r in self.workers.values()))
        return MemberInfo(hello.node, hello.address, ranks)


@dataclass(slots=True)
class Formation:
    """The gatherings of a node, and the joins of all. ``out`` is the machine's list of effects; ``unusable`` says why
    a record cannot be followed here, ``no_controller`` why a controller cannot be run."""

    config: ControlConfig
    peers: Peers
    out: list[ControlEffect]
    unusable: Callable[[EpochDecided], tuple[str, str] | None]
    no_controller: Callable[[str], str]
    gatherings: dict[str, Gathering] = field(default_factory=dict)
    joins: dict[str, dict[str, JobJoin]] = field(default_factory=dict)
    #: (label, node) -> newest nonce that made it into a job
    used: dict[tuple[str, str], int] = field(default_factory=dict)
    nonces: int = 0

    # --------------------------------------------------------------------------------------- workers
    def register(self, connection: Connection, m: Register, now: float) -> None:
        """A worker is there; the last one of a gathering makes this node join."""
        if not (0 <= m.rank < m.world_size and 0 <= m.local_rank < m.local_size <= m.world_size):
            self._refuse(
                connection,
                "JoinRefused",
                f"rank {m.rank} of {m.world_size}, local rank {m.local_rank} of "
                f"{m.local_size}: ranks start at 0 and end below the size",
            )
            return
        if m.world_size > MAX_RANKS:
            why = f"a world of {m.world_size} ranks: a job has at most {MAX_RANKS}"
            self._refuse(connection, "JoinRefused", why, CHECK_RANKS)
            return
        if m.rank == 0 and len(m.number) != JOB_BYTES:
            self._refuse(
                connection, "JoinRefused", f"rank 0 draws the job's number of {JOB_BYTES} bytes, got {len(m.number)}"
            )
            return
        if why := self.config.no_policy(m.on_loss or self.config.on_loss):
            self._refuse(connection, "JoinRefused", why, "leave on_loss out, or set cluster.etcd on every node")
            return
        if not 0 <= m.deadline < inf:
            why = f"a deadline of {m.deadline} s: expected a finite time, or 0 for the daemon's"
            self._refuse(connection, "JoinRefused", why, "correct the deadline (GC_JOB_DEADLINE)")
            return
        if why := modes.unknown(m.plan, m.quality):
            self._refuse(connection, "JoinRefused", why, "correct plan or quality (GC_PLAN, GC_QUALITY)")
            return
        if m.controller and (why := self.no_controller(m.controller)):
            self._refuse(connection, "JoinRefused", why, "correct the controller (GC_CONTROLLER)")
            return
        self.peers.meet(m.peers)
        g = self.gatherings.get(m.label)
        if g is not None and g.token != m.token:
            # Those who are here go on: whoever knows no more than the name must not be able to disturb them.
            self.out.append(Count("tokens_refused"))
            why = f"workers with another token wait on {self.config.hello.node} for a job named {m.label!r}"
            self._refuse(connection, "NotAuthorised", why, CHECK_TOKEN)
            return
        if g is None or (g.world_size, g.local_size) != (m.world_size, m.local_size):
            self._dissolve(g)
            self.nonces += 1
            nonce, deadline = self.config.incarnation + self.nonces, m.deadline or self.config.deadline
            g = Gathering(m.label, nonce, now, m.world_size, m.local_size, deadline, m.token, said=now)
            self.gatherings[m.label] = g
        before = g.workers.get(m.local_rank)
        if before is not None and before[0] != connection:
            self._refuse(
                before[0],
                "JoinRefused",
                f"another worker registered as local rank {m.local_rank} of "
                f"job {m.label!r}; give concurrent jobs different names (GC_JOB)",
            )
        g.workers[m.local_rank] = (connection, m)
        if g.complete:
            join = self._join(g)
            self.peers.tell_all(join)
            self.on_join(join)

    def worker_gone(self, connection: Connection) -> None:
        """Whoever comes next is another gathering; the join already sent must not be used."""
        for g in list(self.gatherings.values()):
            for local_rank, (waiting, _) in list(g.workers.items()):
                if waiting == connection:
                    del g.workers[local_rank]
                    self._unjoin(g.label, self.config.hello.node)
                    self.peers.tell_all(JobLeft(g.label, b"", g.nonce))
                    self.nonces += 1
                    g.nonce = self.config.incarnation + self.nonces
                    if not g.workers:
                        del self.gatherings[g.label]

    def _refuse(self, connection: Connection, kind: str, message: str, advice: str = "start the job again") -> None:
        self.out.append(fault_without_job(connection, kind, message, advice))

    def _dissolve(self, g: Gathering | None) -> None:
        if g is not None:
            for connection, _ in g.workers.values():
                self._refuse(
                    connection,
                    "JoinRefused",
                    f"another run of job {g.label!r} with another world size "
                    "registered; give concurrent jobs different names (GC_JOB)",
                )

    def _join(self, g: Gathering) -> JobJoin:
        return JobJoin(g.label, g.world_size, g.member(self.config.hello), g.nonce, g.token)

    # ----------------------------------------------------------------------------------------- peers
    def peer_up(self, name: str) -> None:
        """Say again what is still waited for."""
        for g in self.gatherings.values():
            if g.complete:
                self.peers.send(name, self._join(g))

    def on_peer_join(self, node: str, join: JobJoin) -> None:
        """A node speaks for its own workers only."""
        if join.member.node != node:
            self.out.append(Count("frames_forged", wire.node_id(node)))
        elif join.nonce > self.peers.latest:
            # They follow the number of a node's life: after this one no join of its next lives would count.
            self.out.append(Count("lives_refused", wire.node_id(node)))
        else:
            self.on_join(join)

    def on_join(self, join: JobJoin) -> None:
        """A node is ready. The node of rank 0 proposes the epoch once all ranks are covered."""
        node = join.member.node
        if join.nonce <= self.used.get((join.label, node), 0) or not join.member.ranks:
            return
        others = [joins[node] for label, joins in self.joins.items() if node in joins and label != join.label]
        if len(others) >= MAX_JOINS or sum(len(j.member.ranks) for j in (*others, join)) > MAX_RANKS:
            self._refuse_join(join)
            return
        joins = self.joins.setdefault(join.label, {})
        joins[node] = join
        g = self.gatherings.get(join.label)
        first = next((r for _, r in g.workers.values() if r.rank == 0), None) if g is not None else None
        if g is None or first is None or not g.complete:
            return
        for stranger in [j for j in joins.values() if j.token != g.token]:
            self._refuse_token(stranger)
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
            join.label, first.number, 1, g.world_size, tuple(j.member for j in chosen), tuple(j.nonce for j in chosen),
            c.rules, c.partition_bytes, c.min_compress_bytes, first.deadline or c.deadline, first.on_loss or c.on_loss,
            first.seed, first.controller or c.controller, first.plan or c.mode, first.quality or c.quality,
            controller_named=bool(first.controller),
        )  # fmt: skip
        if bad := self.unusable(record):
            # A third party's codec of its configuration that fails only now.
            self._refuse_gathering(g, bad[1], SAME_RELEASE, bad[0])
        else:
            self.out.append(Arbitrate(0, record))

    def _refuse_join(self, join: JobJoin) -> None:
        """A node that joins job after job and forms none: what nobody waits for must not fill memory."""
        node = join.member.node
        self.out.append(Count("joins_refused", wire.node_id(node)))
        why = (
            f"{node} waits in too many jobs that have not formed: {self.config.hello.node} keeps {MAX_JOINS} of a "
            f"node, with {MAX_RANKS} ranks"
        )
        self.peers.send(node, JoinRefusal(join.label, ((node, join.nonce),), why))

    def _refuse_gathering(self, g: Gathering, why: str, advice: str = CHECK_RANKS, kind: str = "JoinRefused") -> None:
        joins = self.joins.pop(g.label, {})
        refusal = JoinRefusal(g.label, tuple((j.member.node, j.nonce) for j in joins.values()), why, kind)
        self.peers.tell_all(refusal)
        self._end_gathering(g, kind, why, advice)

    def _refuse_token(self, join: JobJoin) -> None:
        """Workers elsewhere that go by the name of a job here and do not have its token."""
        node = join.member.node
        self.out.append(Count("tokens_refused", wire.node_id(node)))
        self._unjoin(join.label, node)
        why = f"the token of the workers on {node} is not that of job {join.label!r}"
        self.peers.tell_all(JoinRefusal(join.label, ((node, join.nonce),), why, "NotAuthorised"))

    def _end_gathering(self, g: Gathering, kind: str, why: str, advice: str) -> None:
        self.gatherings.pop(g.label, None)
        self._unjoin(g.label, self.config.hello.node)
        for connection, _ in g.workers.values():
            self._refuse(connection, kind, why, advice)

    def on_refusal(self, node: str, m: JoinRefusal) -> None:
        """The node of rank 0 refused these gatherings; one of them may be ours and still waiting."""
        for name, nonce in m.gatherings:
            if (join := self.joins.get(m.label, {}).get(name)) is not None and join.nonce <= nonce:
                self._unjoin(m.label, name)
        g = self.gatherings.get(m.label)
        if g is not None and (self.config.hello.node, g.nonce) in m.gatherings:
            self._end_gathering(g, m.kind, f"{node}: {m.reason}", ADVICE.get(m.kind, CHECK_RANKS))

    def on_left(self, node: str, m: JobLeft) -> None:
        """A gathering elsewhere lost a worker: its join must not be used."""
        join = self.joins.get(m.label, {}).get(node)
        if join is not None and join.nonce <= m.nonce:
            self._unjoin(m.label, node)

    def on_silent(self, record: EpochDecided, reason: str) -> None:
        """The arbiter of a job that needs one did not answer: there is no job."""
        if (g := self.take(record)) is not None:
            self._refuse_gathering(
                g, f"the first epoch cannot be decided: {reason}", "look at etcd; start the job again"
            )

    def left_out(self, record: EpochDecided) -> None:
        """A job was formed of gatherings that are over and goes on without this node: who waits here waits in vain."""
        g = self.gatherings.get(record.label)
        if g is not None and record.on_loss != "fail" and g.world_size == record.world_size:
            why = f"job {g.label!r} was formed before a daemon was restarted, and goes on without this node's workers"
            self._end_gathering(g, "JoinRefused", why, "start the job again")

    def _unjoin(self, label: str, node: str) -> None:
        joins = self.joins.get(label, {})
        joins.pop(node, None)
        if not joins:
            self.joins.pop(label, None)

    # --------------------------------------------------------------------------------------- records
    def use(self, record: EpochDecided) -> None:
        """The joins of a record have made it into a job: they are not used again."""
        for member, nonce in zip(record.members, record.nonces, strict=True):
            newest = max(min(nonce, self.peers.latest), self.used.get((record.label, member.node), 0))
            self.used[(record.label, member.node)] = newest
            self._unjoin(record.label, member.node)
        while len(self.used) > MAX_USED:
            del self.used[next(iter(self.used))]

    def gathering_of(self, record: EpochDecided) -> Gathering | None:
        """The gathering here that a record was made of; None if there is none."""
        g = self.gatherings.get(record.label)
        nonces = [n for m, n in zip(record.members, record.nonces, strict=True) if m.node == self.config.hello.node]
        return None if g is None or nonces[:1] != [g.nonce] else g

    def join_again(self, record: EpochDecided) -> None:
        """A record cannot be followed by its gathering here, which goes on waiting: for the next one."""
        if (g := self.gathering_of(record)) is not None:
            self.nonces += 1
            g.nonce = self.config.incarnation + self.nonces
            self.peers.tell_all(self._join(g))

    def take(self, record: EpochDecided) -> Gathering | None:
        """As :meth:`gathering_of`; it is over with that."""
        g = self.gathering_of(record)
        return None if g is None else self.gatherings.pop(record.label)

    def refuse(self, record: EpochDecided, why: str) -> None:
        """What a record was made of here cannot do its part: its workers are told why."""
        if (g := self.gathering_of(record)) is not None:
            self._end_gathering(g, "JoinRefused", why, "mend that; then start this node's workers again")

    def refuse_record(self, node: str, m: EpochDecided, kind: str, why: str) -> None:
        """A peer's record cannot be followed here: tell the peer, and the workers it was made of."""
        self.out.append(Log("error", f"refusing a job record from {node}: {why}"))
        missing = (self.config.hello.node,)
        # Who has just been let into a job is lost again by this, and does not end it.
        told = "PeerLost" if any(x.node == missing[0] and x.since > 1 for x in m.members) else kind
        self.peers.send(node, Fault(m.job, told, why, epoch=m.epoch, missing=missing, advice=SAME_RELEASE))
        g = self.gatherings.get(m.label)
        nonces = [n for x, n in zip(m.members, m.nonces, strict=False) if x.node == self.config.hello.node]
        if g is not None and g.nonce in nonces:
            self._end_gathering(g, kind, why, SAME_RELEASE)

    # ------------------------------------------------------------------------------------------ time
    def tick(self, now: float) -> None:
        for g in list(self.gatherings.values()):
            if now - g.since > g.deadline:
                self._too_late(g, now)
            else:
                self._say_waiting(g, now)

    def missing(self, g: Gathering) -> tuple[int, ...]:
        """The ranks a gathering waits for: of this node, as long as not all of its workers are there by their number
        among them; then of the others. Whoever has heard of them all waits for the node of rank 0, which says that the
        job exists; empty only there, where the arbiter is asked."""
        if not g.complete:
            return tuple(sorted(set(range(g.local_size)) - set(g.workers)))
        there = {
            r for j in self.joins.get(g.label, {}).values() if j.world_size == g.world_size for r in j.member.ranks
        }
        mine = g.member(self.config.hello).ranks
        return tuple(sorted(set(range(g.world_size)) - there - set(mine))) or ((0,) if 0 not in mine else ())

    def _too_late(self, g: Gathering, now: float) -> None:
        """A job has not formed in time: its workers are told who was missing, and nobody counts on them any more."""
        what = "local rank" if not g.complete else "rank"
        missing = tuple(f"{what} {r}" for r in self.missing(g)) or ("arbiter",)
        text = f"job {g.label!r} did not form within its deadline of {g.deadline:g} s"
        advice = "look at the logs of the missing ranks; raise job.deadline if they are merely slow to start"
        fault = Fault(b"", "StepTimeout", text, phase="join", missing=missing, elapsed=now - g.since, advice=advice)
        del self.gatherings[g.label]
        self._unjoin(g.label, self.config.hello.node)
        self.peers.tell_all(JobLeft(g.label, b"", g.nonce))
        self.out.extend(Tell(connection, fault) for connection, _ in g.workers.values())

    def _say_waiting(self, g: Gathering, now: float) -> None:
        if now - g.said < SAY_WAITING:
            return
        g.said = now
        missing = _some(self.missing(g))
        if not g.complete:
            what = f"local ranks {missing} of job {g.label!r} on {self.config.hello.node}"
        else:
            joined = self.joins.get(g.label, {})
            down = [f"{k.name} ({k.refused or 'no answer'})" for k in self.peers.links.values() if not k.up]
            alike = [j for j in joined.values() if j.world_size == g.world_size]
            what = f"ranks {missing} of job {g.label!r}" + (f"; peers not reached: {', '.join(down)}" if down else "")
            if other := sorted((j.member.node, j.world_size) for j in joined.values() if j not in alike):
                sizes = ", ".join(f"{size} on {name}" for name, size in other)
                what += f"; WORLD_SIZE differs: {g.world_size} here, {sizes}"
            if not self.peers.links:
                what += "; no peers are known: set cluster.peers, or start with torchrun so that they are found"
        for connection, _ in g.workers.values():
            self.out.append(Tell(connection, messages.Waiting(what)))
