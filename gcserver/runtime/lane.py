"""A lane process: one loop over frames, workers and the supervisor.

What may live here: turning what arrives into events of the lane machine and its effects into calls of the
executor, the transport and the sockets. What may not: decisions (`gcserver.core`), arithmetic
(`executor.py`), memory layout (`blocks.py`).

The loop waits in one poll for everything and never blocks elsewhere; kernels run in it without the
interpreter lock while ZeroMQ's own thread moves bytes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from gcproto import messages, wire
from gcproto.channel import Channel, ChannelClosed
from gcproto.dtypes import DType
from gcproto.messages import Attach, Done, Mapped, MapSection, MessageError, Push
from gcproto.records import replace
from gcproto.wire import Flag, FrameError, FrameType, Header
from gcserver.codecs import CodecError
from gcserver.codecs.warmup import warmup
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.control_events import OpenSection
from gcserver.core.events import DomainKey
from gcserver.core.job import SCOPED_LAG
from gcserver.core.lane import LaneConfig, LaneMachine
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.executor import Executor
from gcserver.runtime.lanelink import (
    AddPeer,
    AskBlocks,
    BlockFacts,
    ForgetJob,
    LaneLink,
    LaneReady,
    LaneStats,
    LaneTrouble,
    PeerTraffic,
    StepTimes,
)
from gcserver.runtime.setup import LaneSetup, lane_address, listen_unix
from gcserver.runtime.statefiles import MemoryShort
from gcserver.runtime.transport import ZmqTransport

TICK: Final = 0.5
STATS_EVERY: Final = 1.0
GC_THRESHOLD: Final = (20_000, 20, 20)
_PR_SET_PDEATHSIG: Final = 1
#: So many different complaints about what arrives are passed on; a stranger must not fill the log.
MAX_SAID: Final = 256
ITEMSIZE: Final = {int(d): d.itemsize for d in DType}
#: Finished steps of domains with many in flight are reported together: at most so many, so many seconds late.
REPORTS: Final = 32
REPORT_WITHIN: Final = 0.01
_decode_worker = messages.Decoder[messages.FromLaneWorker](messages.FromLaneWorker)


@dataclass(slots=True)
class Worker:
    """A worker's connection. ``rank`` is its global rank once it attached."""

    channel: Channel[messages.FromLaneWorker]
    job: bytes = b""
    rank: int = -1


@dataclass
class LaneProcess:
    """The loop and its tables."""

    setup: LaneSetup
    machine: LaneMachine
    transport: ZmqTransport
    link: LaneLink
    listener: socket.socket
    executor: Executor = field(default_factory=Executor)
    poller: select.epoll = field(default_factory=select.epoll)
    workers: dict[int, Worker] = field(default_factory=dict)
    ranks: dict[tuple[bytes, int], Worker] = field(default_factory=dict)
    waiting_maps: list[tuple[Worker, MapSection]] = field(default_factory=list)
    waiting_pushes: list[tuple[Worker, Push]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    #: per peer: bytes in, out, frames in, out, uncompressed bytes in, out
    traffic: dict[int, list[int]] = field(default_factory=dict)
    rounds: dict[bytes, int] = field(default_factory=dict)
    step_began: dict[tuple[DomainKey, int], float] = field(default_factory=dict)
    reports: list[fx.ReportStep] = field(default_factory=list)
    report_by: float = 0.0
    queue: deque[ev.LaneEvent] = field(default_factory=deque)
    #: questions about blocks that are being answered: request, what is left, what was found
    asked: deque[tuple[int, Iterator[tuple[int, int, float]], list[tuple[int, int, float]]]] = field(
        default_factory=deque
    )
    running: bool = True
    #: not accepting workers for a moment: no descriptors are left
    deaf: bool = False

    # ------------------------------------------------------------------------------------------ loop
    def run(self) -> None:
        frames = self.transport.fileno()
        for descriptor in (frames, self.link.fileno(), self.listener.fileno()):
            self.poller.register(descriptor, select.EPOLLIN)
        cores = tuple(sorted(os.sched_getaffinity(0)))
        self._send_up(LaneReady(os.getpid(), self.machine.config.incarnation, cores))
        next_tick = time.monotonic()
        next_stats = next_tick
        while self.running:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK
                for peer in self.transport.reconnected():
                    self.feed(ev.PeerReset(peer))
                self.feed(ev.Tick())
                self._housekeeping()
            if now >= next_stats:
                next_stats = now + STATS_EVERY
                self._send_up(self.stats())
            if self.reports and (now >= self.report_by or self._gated()):
                self._flush_reports()
            until = min(next_tick, next_stats, self.report_by or next_tick)
            # ZeroMQ's descriptor tells of changes, not of states: never wait while there is something to read.
            busy = self.transport.readable
            wait = 0.0 if busy or self.asked else max(0.0, until - time.monotonic())
            ready = dict(self.poller.poll(wait))
            if self.asked:
                self._answer()
            if busy or frames in ready:
                self._frames()
            if self.link.fileno() in ready:
                self._supervisor(ready[self.link.fileno()])
            if self.listener.fileno() in ready:
                self._accept()
            for descriptor, event in ready.items():
                if descriptor in self.workers:
                    self._worker(self.workers[descriptor], event)

    def _answer(self) -> None:
        """One more block of the oldest question: a large model's residuals take longer than frames may wait."""
        request, left, found = self.asked[0]
        block = next(left, None)
        if block is not None:
            found.append(block)
        else:
            self.asked.popleft()
            self._send_up(BlockFacts(request, tuple(found)))

    def _housekeeping(self) -> None:
        """Forget what nobody will ask for any more."""
        if self.deaf:
            self.deaf = False
            self.poller.modify(self.listener.fileno(), select.EPOLLIN)
        alive = [w for w in self.workers.values() if w.job not in self.machine.ended]
        if self.waiting_maps:
            self.waiting_maps = [(w, m) for w, m in self.waiting_maps if w in alive]
        if self.waiting_pushes:
            self.waiting_pushes = [(w, p) for w, p in self.waiting_pushes if w in alive]

    def feed(self, event: ev.LaneEvent) -> None:
        """One event through the machine, and whatever its effects answer."""
        self.queue.append(event)
        while self.queue:
            for effect in self.machine.on(self.queue.popleft(), time.monotonic()):
                _PERFORM[type(effect)](self, effect)

    def _gated(self) -> bool:
        """Whether a push waits for a settlement, so that reports must not."""
        return any(domain.gated for domain in self.machine.domains.values())

    # ---------------------------------------------------------------------------------------- frames
    def _frames(self) -> None:
        for raw, payload in self.transport.receive():
            try:
                header = wire.parse(raw)
            except FrameError as error:
                if error.field in ("magic", "version", "length"):
                    self._count("frames_refused", 0)
                if error.field == "version":
                    self._trouble_once(f"a peer speaks another protocol version: {error}")
                elif error.field == "digest":
                    self.feed(ev.FrameDamaged(None, wire.sender_hint(raw), str(error)))
                continue
            self._measure(header, header.sender, 0)
            try:
                wire.check_payload(header, payload)
            except FrameError as error:
                self.feed(ev.FrameDamaged(header, header.sender, str(error)))
                continue
            if header.type is not FrameType.DATA:
                try:
                    self.feed(ev.FrameReceived(header, None, bytes(payload) if payload is not None else b""))
                except MessageError as error:
                    self._count("frames_refused", header.sender)
                    self._trouble_once(f"from {self.names.get(header.sender, hex(header.sender))}: {error}")
                continue
            try:
                self.executor.check(header, payload)
            except (CodecError, ValueError) as error:
                self.feed(ev.Unusable(header, str(error)))
                continue
            handle = self.executor.handles.add(payload) if payload is not None and len(payload) else None
            self.feed(ev.FrameReceived(header, handle))

    def _measure(self, h: Header, peer: int, direction: int) -> None:
        if peer not in self.names:
            return
        counted = self.traffic.get(peer)
        if counted is None:
            counted = self.traffic[peer] = [0] * 6
        counted[direction] += wire.HEADER_BYTES + h.payload_bytes
        counted[2 + direction] += 1
        if h.type is FrameType.DATA and not h.flags & Flag.SECOND:
            counted[4 + direction] += h.elements * ITEMSIZE.get(h.dtype, 0)

    def _trouble_once(self, text: str) -> None:
        if len(self.said) < MAX_SAID and text not in self.said:
            self.said.add(text)
            self._send_up(LaneTrouble(b"", "Log", text))

    # ------------------------------------------------------------------------------------ supervisor
    def _supervisor(self, event: int) -> None:
        try:
            if event & select.EPOLLOUT:
                self.link.channel.flush()
                if not self.link.channel.backlog:
                    self.poller.modify(self.link.fileno(), select.EPOLLIN)
            if not event & ~select.EPOLLOUT:
                return
            received = self.link.receive()
        except (ChannelClosed, MessageError):
            self.running = False
            return
        for message in received:
            try:
                self._from_supervisor(message)
            except MemoryShort as error:
                domain = message.config.id if isinstance(message, ev.DomainOpened) else message.domain
                self.executor.close(domain)
                self._memory_short(domain[0], error)

    def _from_supervisor(self, message: Any) -> None:
        if isinstance(message, AddPeer):
            node = wire.node_id(message.name)
            self.names[node] = message.name
            self.transport.open(node, lane_address(message.address, self.setup.hello.lane))
            self.feed(ev.PeerAdded(node, message.name))
        elif isinstance(message, ev.DomainOpened):
            self._open_domain(message)
        elif isinstance(message, OpenSection):
            self._open_section(message)
        elif isinstance(message, ev.DomainClosed):
            self.feed(message)
            self.rounds.pop(message.domain[0], None)
            for key in [k for k in self.step_began if k[0] == message.domain]:
                del self.step_began[key]
            self.executor.close(message.domain)
        elif isinstance(message, ForgetJob):
            for descriptor, worker in list(self.workers.items()):
                if worker.job == message.job:
                    self._drop_worker(descriptor)
            # A section that was being opened while the supervisor removed the folder has made it anew.
            shutil.rmtree(self._job_directory(message.job), ignore_errors=True)
        elif isinstance(message, AskBlocks):
            self.asked.append((message.request, self.executor.facts(message.domain), []))
        else:
            self.feed(message)

    def _send_up(self, *messages: Any) -> None:
        """To the supervisor; what its socket does not take now goes when it is writable."""
        try:
            self.link.send(*messages)
        except ChannelClosed:
            self.running = False
            return
        if self.link.channel.backlog:
            self.poller.modify(self.link.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _job_directory(self, job: bytes) -> Path:
        return Path(self.setup.state) / "jobs" / job.hex()

    def _open_domain(self, e: ev.DomainOpened) -> None:
        c = e.config
        if c.id in self.executor.domains or not self._job_directory(c.job).exists():
            # Known already; or the job is gone, and its end is on the way.
            return
        hello = self.setup.hello
        memory = DomainMemory(c, hello.lanes, hello.lane, self._job_directory(c.job))
        self.executor.domains[c.id] = memory
        self.feed(replace(e, finished=memory.finished(e.settled)))
        waiting, self.waiting_pushes = self.waiting_pushes, []
        for worker, push in waiting:
            self._push(worker, push)

    def _open_section(self, e: OpenSection) -> None:
        memory = self.executor.domains.get(e.domain)
        if memory is None or e.section.index < len(memory.space.sections):
            return
        remembered = memory.open_section(e.section)
        for key, known in remembered.items():
            kept = tuple(replace(k, handle=self.executor.retained_handle(memory, key, k)) for k in known.retained)
            remembered[key] = replace(known, retained=kept)
        self.feed(ev.SectionOpened(e.domain, e.section, memory.space.blocks[e.section.index], remembered))
        waiting, self.waiting_maps = self.waiting_maps, []
        for worker, request in waiting:
            self._map(worker, request)

    def _memory_short(self, job: bytes, error: MemoryShort) -> None:
        advice = "make /dev/shm larger or the model smaller; `gcserver doctor --params N` prints the need"
        self._send_up(LaneTrouble(job, "OutOfMemory", str(error.strerror or error), advice))

    # --------------------------------------------------------------------------------------- workers
    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors: whoever knocks is served when there are some again.
                self._trouble_once(f"a worker's connection cannot be accepted: {error}")
                self.poller.modify(self.listener.fileno(), 0)
                self.deaf = True
                return
            channel: Channel[messages.FromLaneWorker] = Channel(sock, _decode_worker)
            if channel.peer_uid() not in (os.getuid(), 0):
                channel.close()
                self._count("workers_refused", 0)
                continue
            self.workers[channel.fileno()] = Worker(channel)
            self.poller.register(channel.fileno(), select.EPOLLIN)

    def _worker(self, worker: Worker, ready: int) -> None:
        try:
            if ready & select.EPOLLOUT:
                worker.channel.flush()
                if not worker.channel.backlog:
                    self.poller.modify(worker.channel.fileno(), select.EPOLLIN)
            if ready & ~select.EPOLLOUT:
                for message, descriptors in worker.channel.receive():
                    for descriptor in descriptors:
                        os.close(descriptor)
                    self._from_worker(worker, message)
        except ChannelClosed:
            self._drop_worker(worker.channel.fileno())
        except MessageError as error:
            self._trouble_once(f"a worker sent something that is not a message: {error}")
            self._drop_worker(worker.channel.fileno())

    def _drop_worker(self, descriptor: int) -> None:
        worker = self.workers.pop(descriptor)
        self.poller.unregister(descriptor)
        if self.ranks.get((worker.job, worker.rank)) is worker:
            del self.ranks[worker.job, worker.rank]
        worker.channel.close()

    def _from_worker(self, worker: Worker, message: messages.FromLaneWorker) -> None:
        if isinstance(message, Attach):
            worker.job, worker.rank = message.job, message.rank
            self.ranks[message.job, message.rank] = worker
        elif isinstance(message, MapSection):
            self._map(worker, message)
        else:
            self._push(worker, message)

    def _push(self, worker: Worker, push: Push) -> None:
        domain = (worker.job, push.domain)
        memory = self.executor.domains.get(domain)
        if memory is None:
            # Restarted a moment ago and not told of the job yet: the worker's place in it is not known either.
            if worker.job not in self.machine.ended:
                self.waiting_pushes.append((worker, push))
            return
        if worker.rank not in memory.config.ranks:
            self._trouble_once(f"rank {worker.rank} pushed to a process group it is not in")
            return
        self.step_began.setdefault((domain, push.step), time.monotonic())
        rank = memory.config.ranks.index(worker.rank)
        self.feed(ev.Pushed(domain, rank, push.step, push.keys, push.close, push.flags, push.grad_scale))

    def _map(self, worker: Worker, request: MapSection) -> None:
        """Answer with the chunks the worker does not have yet; wait if the section is still to come."""
        memory = self.executor.domains.get((worker.job, request.domain))
        if memory is None or request.index >= memory.opened:
            if worker.job not in self.machine.ended:
                self.waiting_maps.append((worker, request))
            return
        chunks = memory.chunks[request.have :]
        sizes = tuple(c.size for c in chunks)
        descriptors: list[int] = []
        try:
            descriptors.extend(c.open_descriptor() for c in chunks)
            self._tell(worker, Mapped(request.domain, request.index, request.have, sizes), descriptors)
        except OSError as error:
            # The job is being removed, or descriptors are exhausted.
            advice = "raise the limit on open files (`gcserver doctor` names it)"
            self._send_up(LaneTrouble(worker.job, "OutOfMemory", f"an arena cannot be opened: {error}", advice))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _tell(self, worker: Worker, message: messages.ToLaneWorker, descriptors: list[int] | None = None) -> None:
        try:
            worker.channel.send(message, descriptors or ())
        except ChannelClosed:
            return
        if worker.channel.backlog:
            self.poller.modify(worker.channel.fileno(), select.EPOLLIN | select.EPOLLOUT)

    # --------------------------------------------------------------------------------------- effects
    def _do_send(self, e: fx.Send) -> None:
        payload: memoryview | bytes | None = e.body
        if e.handle is not None:
            payload = self.executor.handles.table[e.handle]
        self._measure(e.header, e.peer, 1)
        if not self.transport.send(e.peer, wire.pack(e.header), payload, copy=bool(e.header.flags & Flag.RESENT)):
            self._count("frames_unroutable", e.peer)

    def _do_encode(self, e: fx.Encode) -> None:
        try:
            self.queue.append(self.executor.encode(e))
        except MemoryShort as error:
            self._memory_short(e.domain[0], error)

    def _do_accumulate(self, e: fx.Accumulate) -> None:
        if not self.executor.accumulate(e):
            self._count("payloads_unusable", 0)

    def _do_finalise(self, e: fx.Finalise) -> None:
        if e.codec is None or e.codec.rounds == 1 or e.stage:
            self.rounds[e.domain[0]] = self.rounds.get(e.domain[0], 0) + 1
        try:
            self.queue.append(self.executor.finalise(e))
        except MemoryShort as error:
            self._memory_short(e.domain[0], error)

    def _do_log_step(self, e: fx.LogStep) -> None:
        self.executor.domains[e.domain].log_step(ev.StepRecord(e.step, e.nonfinite, e.proposal, e.digest))

    def _do_report_step(self, e: fx.ReportStep) -> None:
        """Where many steps are in flight, their settling is in no hurry: the supervisor is woken for several."""
        self.reports.append(e)
        lag = self.machine.domains[e.domain].config.lag
        if lag <= SCOPED_LAG or len(self.reports) >= REPORTS:
            self._flush_reports()
        elif self.report_by == 0.0:
            self.report_by = time.monotonic() + REPORT_WITHIN

    def _flush_reports(self) -> None:
        self.report_by = 0.0
        reports, self.reports = self.reports, []
        now = time.monotonic()
        times: dict[DomainKey, list[tuple[int, float]]] = {}
        for report in reports:
            began = self.step_began.pop((report.domain, report.step), None)
            if began is not None:
                times.setdefault(report.domain, []).append((report.step, now - began))
        self._send_up(*(StepTimes(domain, tuple(steps)) for domain, steps in times.items()), *reports)

    def _do_notify(self, e: fx.Notify) -> None:
        memory = self.executor.domains.get(e.domain)
        if memory is None:
            return
        done = Done(e.domain[1], e.step, e.keys, e.nonfinite)
        for index, rank in enumerate(memory.config.ranks):
            worker = self.ranks.get((e.domain[0], rank))
            if worker is not None and e.rank in (None, index):
                self._tell(worker, done)

    def _count(self, name: str, peer: int, value: int = 1) -> None:
        if peer not in self.names:
            peer = 0
        self.counts[name, peer] = self.counts.get((name, peer), 0) + value

    def stats(self) -> LaneStats:
        domains = self.executor.domains
        arenas: dict[bytes, int] = {}
        for key, memory in domains.items():
            arenas[key[0]] = arenas.get(key[0], 0) + memory.nbytes
        counts = tuple((name, peer, value) for (name, peer), value in self.counts.items())
        peers = tuple(PeerTraffic(peer, *numbers) for peer, numbers in self.traffic.items())
        return LaneStats(
            self.transport.bytes_in,
            self.transport.bytes_out,
            tuple(self.rounds.items()),
            tuple(arenas.items()),
            counts,
            peers,
        )


_PERFORM: dict[type, Any] = {
    fx.Send: LaneProcess._do_send,
    fx.Reconnect: lambda self, e: self.transport.reset(e.peer),
    fx.Release: lambda self, e: self.executor.handles.release(e.handle),
    fx.LogDecision: lambda self, e: self.executor.domains[e.domain].log_decision(e.key, e.decision),
    fx.Encode: LaneProcess._do_encode,
    fx.Accumulate: LaneProcess._do_accumulate,
    fx.Finalise: LaneProcess._do_finalise,
    fx.Decode: lambda self, e: self.executor.decode(e),
    fx.CommitOutput: lambda self, e: self.executor.commit_output(e),
    fx.LogStep: LaneProcess._do_log_step,
    fx.Flip: lambda self, e: self.executor.domains[e.domain].flip(e.key, e.step, e.version, e.owner),
    fx.Notify: LaneProcess._do_notify,
    fx.ReportStep: LaneProcess._do_report_step,
    fx.ReportClosed: lambda self, e: self._send_up(e),
    fx.ReportWaiting: lambda self, e: self._send_up(e),
    fx.ReportFault: lambda self, e: self._send_up(e),
    fx.ReportLink: lambda self, e: self._send_up(e),
    fx.Count: lambda self, e: self._count(e.name, e.peer, e.value),
}


def main() -> int:
    """Entry point of a lane process: one argument, the setup as JSON."""
    setup = msgspec.json.decode(sys.argv[1].encode(), type=LaneSetup)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Memory files make a lane's sudden end harmless; a lane without its supervisor would serve nobody.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    warmup()
    link = LaneLink(socket.socket(fileno=setup.link))
    config = LaneConfig(setup.hello, time.time_ns(), setup.credit)
    context: zmq.Context[Any] = zmq.Context()
    transport = ZmqTransport(context, setup.listen)
    listener = listen_unix(setup.worker_socket)
    process = LaneProcess(setup, LaneMachine(config), transport, link, listener)
    # What is loaded now stays; looking through it for garbage again and again is time between frames.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    try:
        process.run()
    finally:
        transport.close()
        context.destroy(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
