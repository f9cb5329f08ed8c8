"""Traces on one node: what its lanes and workers record, and for the node that was asked, what all of them did.

What may live here: who is told to record and to stop, collecting records, fetching those of other nodes. What may not:
recording itself (`recording.py`, `gcclient.tracing`), how traces travel to operators (`gcserver.admin.service`), files.

The node that an operator asks leads: it tells the others over the control link, and fetches their records in parts, one
at a time from each node, so that neither its memory nor the link holds more than a part of another node's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gcproto.spans import (
    MAX_SECONDS,
    MAX_STEPS,
    PART_BYTES,
    RECORD_BYTES,
    AskSpans,
    EndTrace,
    First,
    OfTrace,
    SpansPart,
    TraceOrder,
    WorkerSpans,
    unpack,
)
from gcserver.admin.source import AdminError, ErrorKind
from gcserver.admin.spans import (
    USUAL_SECONDS,
    TraceClock,
    TraceContext,
    TracedNode,
    TraceFirst,
    TracePart,
    TraceStarted,
    TraceStopped,
)
from gcserver.core import control_events as cx
from gcserver.core.job import Job
from gcserver.runtime.recording import AskRecord, LaneSpans, RecordSpans
from gcserver.runtime.tracenames import Names

if TYPE_CHECKING:
    from gcserver.runtime.lanes import Lane
    from gcserver.runtime.supervisor import Supervisor

#: How long lanes and workers of this node may take to hand over what they recorded, seconds.
PATIENCE: Final = 3.0
#: How long another node may take for a part; for the first it asks its own lanes and workers, all at once.
PEER_PATIENCE: Final = 2 * PATIENCE
#: What so many workers have recorded is kept; of short jobs one after the other the newest.
MAX_WORKERS: Final = 256
#: So many parts are answered at once; further questions are dropped.
MAX_ANSWERING: Final = 256
log = logging.getLogger("gcserver")


@dataclass(slots=True)
class Led:
    """Of a trace that was asked for at this node: who else records, what their clocks said when, what numbers in spans
    stand for, and who did not answer when it was ended."""

    peers: tuple[str, ...]
    clocks: dict[str, list[TraceClock]] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    silent: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Local:
    """This node's part of a trace that the operator of node ``by`` asked for; ``led`` where that is this node."""

    order: TraceOrder
    by: str
    led: Led | None = None
    #: ends it when its time is over
    expiry: asyncio.TimerHandle | None = None
    ending: asyncio.Task[None] | None = None
    over: bool = False
    data: bytes = b""
    dropped: int = 0
    firsts: list[First] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    #: by (job, rank), who was told to record, what workers have sent; and who has still to
    told: set[tuple[bytes, int]] = field(default_factory=set)
    workers: dict[tuple[bytes, int], WorkerSpans] = field(default_factory=dict)
    awaited: set[tuple[bytes, int]] = field(default_factory=set)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def recording(self) -> bool:
        return self.ending is None

    def forget_expiry(self) -> None:
        """Its time no longer counts; the timer would keep all records until then."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class Traces:
    """The traces of one daemon: at most one at a time."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        self._local: Local | None = None
        #: parts that were asked for, by (node, number of the trace, offset)
        self._asked: dict[tuple[str, int, int], asyncio.Future[SpansPart]] = {}
        #: those that are being answered, likewise
        self._answering: dict[tuple[str, int, int], asyncio.Task[None]] = {}

    # ------------------------------------------------------------------------------------- operators
    def start(self, job: Job | None, steps: int, seconds: float, nodes: tuple[str, ...]) -> TraceStarted:
        """Begin. Raises AdminError: INVALID, NOT_FOUND for a node, PRECONDITION while one is being recorded."""
        if not 0 <= steps <= MAX_STEPS:
            raise AdminError(ErrorKind.INVALID, f"steps: expected 0 to {MAX_STEPS}, got {steps}", "steps")
        if not 0 <= seconds <= MAX_SECONDS:
            text = f"seconds: expected 0 to {MAX_SECONDS:g} seconds, got {seconds:g}"
            raise AdminError(ErrorKind.INVALID, text, "seconds")
        if self._local is not None and self._local.recording:
            text = f"a trace that was started at {self._local.by} is being recorded here; end it first, by `trace stop`"
            raise AdminError(ErrorKind.PRECONDITION, text)
        peers = self._chosen(job, nodes)
        seconds = seconds or USUAL_SECONDS
        order = TraceOrder(secrets.randbits(62), job.id if job is not None else b"", steps, seconds)
        self._begin(order, self._s.node, led := Led(peers))
        self._note_clocks(led)
        for peer in peers:
            self._s.feed(cx.TellPeer(peer, order))
        what = f"{steps} steps of each process group" if steps else "steps"
        of = f"job {job.record.label!r}" if job is not None else "all jobs"
        text = f"recording {what} of {of} on {1 + len(peers)} node(s), for {seconds:g} s at most"
        return TraceStarted((self._s.node, *peers), text)

    def _chosen(self, job: Job | None, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """The other nodes of a trace."""
        known = [n for n in self._s.peers.addresses if (k := self._s.machine.peers.link(n)) is not None and k.up]
        if strange := [n for n in nodes if n not in (*known, self._s.node)]:
            have = ", ".join([self._s.node, *known])
            text = f"node {strange[0]!r} is not known or not up; there are: {have}"
            raise AdminError(ErrorKind.NOT_FOUND, text, "nodes")
        members = [m.node for m in job.record.members] if job is not None else known
        return tuple(n for n in known if n in (nodes or members))

    def _leading(self) -> tuple[Local, Led]:
        if self._local is not None and self._local.led is not None:
            return self._local, self._local.led
        at = "" if self._local is None else f"; the one recorded here was started at {self._local.by}: ask that node"
        raise AdminError(ErrorKind.PRECONDITION, f"no trace was started at this node{at}")

    async def stop(self) -> TraceStopped:
        """End it on all of its nodes. Raises AdminError PRECONDITION."""
        local, led = self._leading()
        found = await asyncio.gather(self._ended(local), *(self._first_part(local, peer) for peer in led.peers))
        parts = dict(zip(led.peers, found[1:], strict=True))
        led.silent = {peer for peer, part in parts.items() if part is None}
        nodes = (self._own(local), *(self._node(led, peer, part) for peer, part in parts.items()))
        lost = sum(1 for node in nodes if node.reason)
        text = f"{sum(n.spans for n in nodes)} spans of {len(nodes) - lost} node(s)"
        return TraceStopped(nodes, text + (f"; nothing of {lost}" if lost else ""))

    async def fetch(self) -> AsyncIterator[TracePart]:
        """The whole trace, part by part. Raises AdminError PRECONDITION."""
        local, led = self._leading()
        if local.recording:
            raise AdminError(ErrorKind.PRECONDITION, "the trace is still being recorded; end it first, by `trace stop`")
        await self._ended(local)
        wall = time.time() - time.monotonic()
        ids = [self._s.node, *self._s.peers.addresses]
        yield TraceContext(self._s.node, local.order.steps, wall, led.names.nodes(ids), led.names.domains())
        yield self._own(local)
        for at in range(0, len(local.data), PART_BYTES):
            yield tuple(unpack(local.data[at : at + PART_BYTES]))
            await asyncio.sleep(0)  # frames and workers come first
        for peer in led.peers:
            # Each of many that are away would be waited for again, one after the other.
            part = await self._first_part(local, peer) if peer not in led.silent else None
            node = self._node(led, peer, part)
            yield node
            while part is not None and not node.reason and part.data:
                yield tuple(unpack(part.data))
                at = part.offset + len(part.data)
                if at >= part.total:
                    break
                part = await self._ask(local, peer, at)
                if part is None or part.error or not part.data:
                    why = part.error if part is not None and part.error else "it does not answer any more"
                    node = replace(node, reason=f"only the first {at // RECORD_BYTES} spans: {why}")
                    yield node

    # ------------------------------------------------------------------------------------ other nodes
    def _note_clocks(self, led: Led) -> None:
        for peer in led.peers:
            link, now = self._s.machine.peers.link(peer), time.monotonic()
            sample = link.clocks.best(now) if link is not None else None
            if sample is not None:
                led.clocks.setdefault(peer, []).append(TraceClock(sample.at, sample.offset, sample.error))

    def _own(self, local: Local) -> TracedNode:
        firsts = _shown(local.firsts)
        spans = len(local.data) // RECORD_BYTES
        return TracedNode(self._s.node, spans, local.dropped, (), firsts, tuple(local.absent))

    @staticmethod
    def _node(led: Led, peer: str, part: SpansPart | None) -> TracedNode:
        clocks = tuple(led.clocks.get(peer, ()))
        if part is None:
            return TracedNode(peer, reason="it does not answer")
        if part.error or not clocks:
            return TracedNode(peer, reason=part.error or "no round trip to it was measured, so its clock is not known")
        firsts = _shown(part.firsts)
        return TracedNode(peer, part.total // RECORD_BYTES, part.dropped, clocks, firsts, part.absent)

    async def _first_part(self, local: Local, peer: str) -> SpansPart | None:
        return await self._ask(local, peer, 0)

    async def _ask(self, local: Local, peer: str, offset: int) -> SpansPart | None:
        """One part of a peer's records; None if it does not come."""
        key = (peer, local.order.number, offset)
        if key not in self._asked:
            self._asked[key] = self._s.loop.create_future()
            self._s.feed(cx.TellPeer(peer, AskSpans(local.order.number, offset)))
        future = self._asked[key]
        await asyncio.wait({future}, timeout=PEER_PATIENCE)
        self._asked.pop(key, None)
        return future.result() if future.done() else None

    def on_peer(self, peer: str, message: OfTrace) -> None:
        """What another node says."""
        if isinstance(message, TraceOrder):
            if self._local is not None and self._local.recording and self._local.by != peer:
                log.info("%s wants a trace; the one for %s goes on", peer, self._local.by)
                return
            log.info("recording a trace for %s", peer)
            self._begin(message, peer, None)
        elif isinstance(message, AskSpans):
            # Operators may fetch the same trace at once, the one ahead of the other.
            key = (peer, message.number, message.offset)
            if key not in self._answering and len(self._answering) < MAX_ANSWERING:
                task = self._answering[key] = asyncio.ensure_future(self._answer(peer, message))
                task.add_done_callback(lambda _: self._answering.pop(key, None))
        else:
            future = self._asked.get((peer, message.number, message.offset))
            if future is not None and not future.done():
                future.set_result(_unusable(message) if len(message.data) % RECORD_BYTES else message)

    async def _answer(self, peer: str, ask: AskSpans) -> None:
        local, at = self._local, ask.offset
        if local is None or local.order.number != ask.number:
            text = "it knows nothing of this trace: it records another one, or its daemon was started again"
            part = SpansPart(ask.number, at, 0, 0, b"", error=text)
        else:
            await self._ended(local)
            first = (tuple(local.firsts), tuple(local.absent)) if not at else ((), ())
            data = local.data[at : at + PART_BYTES]
            part = SpansPart(ask.number, at, len(local.data), local.dropped, data, *first)
        self._s.feed(cx.TellPeer(peer, part))

    # -------------------------------------------------------------------------------------- this node
    def _begin(self, order: TraceOrder, by: str, led: Led | None) -> None:
        if self._local is not None:
            self._local.forget_expiry()
        local = self._local = Local(order, by, led)
        self._s.lanes.tell(RecordSpans(order.number, order.job, order.steps))
        for job in self._jobs(local):
            self._note_names(local, job)
            for rank, connection in job.workers.items():
                if connection is not None:
                    local.told.add((job.id, rank))
                    self._s.registrations.tell(cx.Tell(connection, order))
        local.expiry = self._s.loop.call_later(order.seconds, self._expire, local)

    def _note_names(self, local: Local, job: Job) -> None:
        if local.led is not None:
            local.led.names.note(job, len(self._s.lanes.table))

    def _jobs(self, local: Local) -> list[Job]:
        return [job for job in self._s.machine.jobs.values() if local.order.job in (b"", job.id)]

    def _expire(self, local: Local) -> None:
        if not self._s.stopped.is_set():
            self._end(local)

    async def _ended(self, local: Local) -> None:
        """Until everything that this node recorded is here."""
        await self._end(local)

    def _end(self, local: Local) -> asyncio.Task[None]:
        if local.ending is None:
            local.forget_expiry()
            if local.led is not None:
                self._note_clocks(local.led)
            local.ending = asyncio.ensure_future(self._collect(local))
        return local.ending

    async def _collect(self, local: Local) -> None:
        number = local.order.number
        for job in self._jobs(local):
            self._note_names(local, job)
            for rank, connection in job.workers.items():
                who = job.id, rank
                if who not in local.workers and (connection is not None or who in local.told):
                    # One that is away, and may be back at once, is asked then.
                    local.awaited.add(who)
                    if connection is not None:
                        self._s.registrations.tell(cx.Tell(connection, EndTrace(number)))
        # At once: who asked for all this waits no longer than PEER_PATIENCE.
        lanes = self._s.questions.ask(lambda request: AskRecord(request, number), PATIENCE)
        found, _ = await asyncio.gather(lanes, self._workers_answer(local))
        if missing := len(self._s.lanes.table) - len(found):
            local.absent.append(f"{missing} lane(s) did not answer")
        parts: list[LaneSpans | WorkerSpans] = [*found, *local.workers.values()]
        local.data = b"".join(part.data for part in parts)
        local.dropped += sum(part.dropped for part in parts)
        local.firsts = [first for part in parts for first in part.firsts]
        local.workers.clear()
        local.over = True

    async def _workers_answer(self, local: Local) -> None:
        """Until workers that were asked have answered, or had their time."""
        if local.awaited:
            try:
                await asyncio.wait_for(local.complete.wait(), PATIENCE)
            except TimeoutError:
                local.absent += [f"rank {rank} did not answer" for _, rank in sorted(local.awaited)]

    # ------------------------------------------------------------------------------- lanes and workers
    def lane_up(self, lane: Lane) -> None:
        """A lane (re)started: what it recorded in its life before is gone."""
        local = self._local
        if local is not None and local.recording:
            self._s.lanes.send(lane, RecordSpans(local.order.number, local.order.job, local.order.steps))
            local.absent.append(f"lane {lane.index} was started again: what it recorded before that is lost")

    def worker_up(self, connection: cx.Connection, job: bytes) -> None:
        """A worker was registered, or came back: with what it recorded before its connection broke."""
        local = self._local
        if local is None or local.order.job not in (b"", job):
            return
        who = self._s.machine.connections.get(connection)
        if local.recording:
            if who is not None:
                local.told.add(who)
            self._s.registrations.tell(cx.Tell(connection, local.order))
        elif who in local.awaited and not local.over:
            self._s.registrations.tell(cx.Tell(connection, EndTrace(local.order.number)))

    def on_worker(self, connection: cx.Connection, message: WorkerSpans) -> None:
        """A worker's records; of another trace, or a second time, nothing."""
        local, who = self._local, self._s.machine.connections.get(connection)
        if local is None or local.over or who is None or message.number != local.order.number:
            return
        if who in local.workers or len(message.data) % RECORD_BYTES:
            return
        local.workers[who] = message
        if len(local.workers) > MAX_WORKERS:
            made_way = local.workers.pop(next(iter(local.workers)))
            local.dropped += made_way.dropped + len(made_way.data) // RECORD_BYTES
        local.awaited.discard(who)
        if not local.awaited:
            local.complete.set()

    def declared(self, job: bytes) -> None:
        """Something about a job's memory changed: perhaps it has more tensors."""
        local = self._local
        if local is not None and local.recording and job in self._s.machine.jobs and local.order.job in (b"", job):
            self._note_names(local, self._s.machine.jobs[job])


def _shown(firsts: Iterable[First]) -> tuple[TraceFirst, ...]:
    return tuple(TraceFirst(job.hex(), domain, step) for job, domain, step in firsts)


def _unusable(part: SpansPart) -> SpansPart:
    """What is taken in place of a part that is not whole records."""
    return SpansPart(part.number, part.offset, 0, 0, b"", error="what it sends is no trace")
