"""The supervisor process: control machine, worker sockets, lanes, memory files, admin.

What may live here: turning what arrives into events of the control machine and its effects into calls. What
may not: decisions about jobs (`gcserver.core`), gradients (they never come here), the admin service itself
(`gcserver.admin`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import zmq

from gcproto import messages, wire
from gcproto.channel import Channel, ChannelClosed
from gcproto.messages import Hello, MessageError, Registered, Rule
from gcproto.wire import FrameError, FrameType
from gcserver import __version__
from gcserver.config import Config
from gcserver.core import control_events as cx
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.arbiter import MemoryArbiter
from gcserver.core.control import ControlConfig, ControlMachine
from gcserver.core.link import DEFAULT_CREDIT
from gcserver.runtime.lanelink import AddPeer, BlockFacts, ForgetJob, LaneReady, LaneStats, LaneTrouble, StepTimes
from gcserver.runtime.lanes import Lane, LanePool, cores_for
from gcserver.runtime.ledger import JobStore
from gcserver.runtime.resolve import resolve
from gcserver.runtime.setup import LaneSetup, lane_address, listen_unix
from gcserver.runtime.statefiles import MemoryShort, private_directory
from gcserver.runtime.status import Status
from gcserver.runtime.transport import BindError, ZmqTransport

TICK: Final = 0.5
#: How long SIGTERM waits for jobs to end before it leaves them to the next life of this daemon.
STOP_GRACE: Final = 2.0
#: So many different complaints about what arrives are logged; a stranger must not fill the log.
MAX_SAID: Final = 256
_decode_worker = messages.Decoder[messages.FromWorker](messages.FromWorker)
log = logging.getLogger("gcserver")


class StartError(RuntimeError):
    """The daemon cannot start; the message says why and what to do."""


class Supervisor:
    """One daemon. ``await run()`` returns its exit status."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.node = config.node.name
        self.started = time.time()
        self.incarnation = time.time_ns()
        self.state = Path(config.node.state)
        self.store = JobStore(self.state)
        self.arbiter = MemoryArbiter()
        self.queue: deque[cx.ControlEvent] = deque()
        self.workers: dict[int, Channel[messages.FromWorker]] = {}
        self.lanes: list[Lane | None] = [None] * config.node.lanes
        self.pool = LanePool()
        self.addresses: dict[str, str] = {}
        self.counts: dict[tuple[str, int], int] = {}
        self.said: set[str] = set()
        #: not accepting workers for a moment: no descriptors are left
        self.deaf = False
        self.signalled = False
        self.requests: dict[int, asyncio.Future[cx.AnswerRequest]] = {}
        self.last_request = 0
        self.stopped = asyncio.Event()
        self.ready = asyncio.Event()
        self.failure = ""
        self.status = Status(self)
        self.hello = Hello(self.node, str(config.node.advertise), config.node.lanes, config.node.lanes, 0, __version__)

    # ------------------------------------------------------------------------------------- start, stop
    async def run(self) -> int:
        """Serve until SIGTERM or a failure. Returns the exit status."""
        self.loop = asyncio.get_running_loop()
        self._lock()
        laid_out = self.store.lanes(self.config.node.lanes)
        if laid_out != self.config.node.lanes:
            raise StartError(
                f"jobs in {self.state} were begun with {laid_out} lane(s), node.lanes is {self.config.node.lanes}: "
                "start with the old number until they end, or remove that folder to drop them"
            )
        # Lanes need the longest to start; the rest is done while they load their kernels.
        generation = self.store.generation()
        self.hello = Hello(self.node, self.hello.address, self.hello.lanes, self.hello.lane, generation, __version__)
        c = self.config
        for index in range(c.node.lanes):
            self._start_lane(index)
        rules = () if c.codec.default == "none" else (Rule("*", c.codec.default),)
        self.machine = ControlMachine(
            ControlConfig(
                self.hello,
                self.incarnation,
                rules,
                c.partition_bytes,
                c.min_compress_bytes,
                c.job.deadline,
                c.job.on_loss,
                c.cluster.lease,
            ),
            resolve,
        )
        self.context: zmq.Context[Any] = zmq.Context()
        try:
            self.transport = ZmqTransport(self.context, str(c.node.control))
        except BindError as error:
            raise StartError(f"{error}; another daemon? choose other ports with node.listen") from error
        self.listener = listen_unix(str(c.node.socket))
        for memory, ledgers in self.store.load():
            self.feed(cx.JobRestored(memory, ledgers))
        self.loop.add_reader(self.transport.fileno(), self._frames)
        self.loop.add_reader(self.listener.fileno(), self._accept)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._on_signal)
        for peer in c.others:
            self._know_peer(peer.name, str(peer.address))
        self._tick()
        try:
            await self._serve()
        finally:
            self._shut()
        if self.failure:
            log.error("%s", self.failure)
            return 1
        return 0

    async def _serve(self) -> None:
        # The first job needs the codecs' descriptions; loading them takes a while, so not when it asks.
        self.loop.run_in_executor(None, resolve, "none")
        ready = asyncio.ensure_future(self.ready.wait())
        stopped = asyncio.ensure_future(self.stopped.wait())
        await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
        admin = False
        if self.ready.is_set() and not self.stopped.is_set():
            try:
                await self.status.start()
                admin = True
            except OSError as error:
                self.fail(str(error))
            else:
                peers = ", ".join(self.addresses) or "none"
                log.info("ready: node %s listens on %s with %d lane(s), workers at %s, peers: %s", self.node,
                         self.config.node.listen, len(self.lanes), self.config.node.socket, peers)  # fmt: skip
        await stopped
        ready.cancel()
        if admin:
            await self.status.stop()

    def fail(self, why: str) -> None:
        """Stop with an error."""
        self.failure = self.failure or why
        self.stopped.set()

    def _lock(self) -> None:
        """One daemon a state directory; the lock goes with the process, however it ends."""
        private_directory(self.state.parent if self.state.parent.name.startswith("gradcomm") else self.state)
        private_directory(self.state)
        self._lock_file = os.open(self.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(
                f"another daemon named {self.node!r} runs on this machine (it holds {self.state}/lock); "
                "give this one another node.name, or stop that one"
            ) from None

    def _on_signal(self) -> None:
        if self.signalled:
            self.stopped.set()
            return
        self.signalled = True
        log.info("stopping: draining for up to %g s", STOP_GRACE)
        self.feed(cx.DrainAsked("the daemon is stopping"))
        if not self.stopped.is_set():
            self.loop.call_later(STOP_GRACE, self._stop_anyway)

    def _stop_anyway(self) -> None:
        if not self.stopped.is_set() and self.machine.jobs:
            log.info("leaving %d running job(s) to the next life of this daemon", len(self.machine.jobs))
        self.stopped.set()

    def _shut(self) -> None:
        for lane in self.lanes:
            if lane is not None:
                self.loop.remove_reader(lane.link.fileno())
                self.loop.remove_writer(lane.link.fileno())
                lane.link.channel.close()
                lane.process.kill()
                lane.process.wait()
        for channel in self.workers.values():
            with contextlib.suppress(ChannelClosed):
                channel.flush()
            channel.close()
        self.transport.close()
        self.context.destroy(0)
        self.listener.close()
        for path in [self.config.node.socket, *map(Path, self._lane_sockets())]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if not self.machine.jobs:
            shutil.rmtree(self.state, ignore_errors=True)
        os.close(self._lock_file)

    # ---------------------------------------------------------------------------------------- machine
    def feed(self, event: cx.ControlEvent) -> None:
        """One event through the control machine, and whatever its effects answer."""
        self.queue.append(event)
        if len(self.queue) > 1:
            return
        while self.queue:
            try:
                for effect in self.machine.on(self.queue[0], time.monotonic()):
                    _PERFORM[type(effect)](self, effect)
            except Exception:
                # A defect. Half an event must not be lived on with: the next life takes up from memory.
                log.exception("%s could not be handled; stopping, so that memory is taken up anew", self.queue[0])
                self.fail("a defect in the daemon (see above)")
                return
            self.queue.popleft()

    def _tick(self) -> None:
        if self.stopped.is_set():
            return
        if self.deaf:
            self.deaf = False
            self.loop.add_reader(self.listener.fileno(), self._accept)
        for peer in self.transport.reconnected():
            self.feed(ev.PeerReset(peer))
        self.feed(ev.Tick())
        self._frames()
        self.loop.call_later(TICK, self._tick)

    # ------------------------------------------------------------------------------------------ peers
    def _know_peer(self, name: str, address: str) -> None:
        if name == self.node or self.addresses.get(name) == address:
            return
        node = wire.node_id(name)
        try:
            # Workers and peers may name peers too, so the address is tried before it is believed.
            self.transport.open(node, lane_address(address, self.config.node.lanes))
        except (ValueError, zmq.ZMQError) as error:
            self._warn_once(f"peer {name!r} cannot be reached at {address!r}: {error}; expected tcp://host:port")
            return
        self.addresses[name] = address
        for lane in self.lanes:
            if lane is not None and lane.ready:
                self.to_lane(lane, AddPeer(name, address))
        self.feed(ev.PeerAdded(node, name))

    def _frames(self) -> None:
        while True:
            for raw, payload in self.transport.receive():
                self._frame(raw, payload)
            if not self.transport.readable:
                return

    def _frame(self, raw: memoryview, payload: memoryview | None) -> None:
        try:
            header = wire.parse(raw)
        except FrameError as error:
            if error.field in ("magic", "version", "length"):
                self._warn_once(f"a peer's frame is refused: {error}")
            else:
                self.feed(ev.FrameDamaged(None, wire.sender_hint(raw), str(error)))
            return
        try:
            wire.check_payload(header, payload)
        except FrameError as error:
            self.feed(ev.FrameDamaged(header, header.sender, str(error)))
            return
        if header.type is FrameType.DATA:
            self._warn_once("a lane's frame came to the control port: lane counts differ; set node.lanes alike")
            return
        try:
            self.feed(ev.FrameReceived(header, None, bytes(payload) if payload is not None else b""))
        except MessageError as error:
            self._warn_once(f"a peer's control message is refused: {error}")

    def _warn_once(self, text: str) -> None:
        if len(self.said) < MAX_SAID and text not in self.said:
            self.said.add(text)
            log.warning("%s", text)

    # ---------------------------------------------------------------------------------------- workers
    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors: whoever knocks is served when there are some again.
                self._warn_once(f"a worker's connection cannot be accepted: {error}")
                self.loop.remove_reader(self.listener.fileno())
                self.deaf = True
                return
            channel: Channel[messages.FromWorker] = Channel(sock, _decode_worker)
            if channel.peer_uid() not in (os.getuid(), 0):
                log.warning(
                    "refused a worker of uid %d: only uid %d and root may connect", channel.peer_uid(), os.getuid()
                )
                channel.close()
                continue
            descriptor = channel.fileno()
            self.workers[descriptor] = channel
            self.loop.add_reader(descriptor, self._worker, descriptor)

    def _worker(self, descriptor: int) -> None:
        channel = self.workers[descriptor]
        try:
            received = channel.receive()
        except (ChannelClosed, MessageError) as error:
            if isinstance(error, MessageError):
                log.warning("a worker sent something that is not a message: %s", error)
            self._drop_worker(descriptor)
            return
        for message, descriptors in received:
            for extra in descriptors:
                os.close(extra)
            self.feed(cx.WorkerSaid(descriptor, message))

    def _drop_worker(self, descriptor: int) -> None:
        channel = self.workers.pop(descriptor, None)
        if channel is not None:
            self.loop.remove_reader(descriptor)
            self.loop.remove_writer(descriptor)
            self.feed(cx.WorkerGone(descriptor))
            channel.close()

    def _do_tell(self, e: cx.Tell) -> None:
        channel = self.workers.get(e.connection)
        if channel is None:
            return
        message = e.message
        if isinstance(message, Registered):
            message = Registered(
                message.job, message.epoch, message.node, message.members, tuple(self._lane_sockets()),
                message.partition_bytes, message.deadline,
            )  # fmt: skip
        try:
            channel.send(message)
        except ChannelClosed:
            return  # its end of file is on the way
        if channel.backlog:
            self.loop.add_writer(e.connection, self._flush, e.connection)

    def _flush(self, descriptor: int) -> None:
        channel = self.workers[descriptor]
        with contextlib.suppress(ChannelClosed):
            channel.flush()
        if not channel.backlog:
            self.loop.remove_writer(descriptor)

    # ------------------------------------------------------------------------------------------ lanes
    def _lane_sockets(self) -> list[str]:
        return [f"{self.config.node.socket}.lane{i}" for i in range(self.config.node.lanes)]

    def _start_lane(self, index: int, restarts: int = 0) -> None:
        c = self.config.node
        hello = Hello(self.node, self.hello.address, c.lanes, index, self.hello.generation, __version__)
        setup = LaneSetup(
            hello, str(c.listen.plus(index)), self._lane_sockets()[index], str(self.state), -1,
            cores_for(index, c.lanes, c.cores), DEFAULT_CREDIT,
        )  # fmt: skip
        lane = self.lanes[index] = self.pool.start(setup, restarts)
        self.loop.add_reader(lane.link.fileno(), self._lane, lane)

    def _lane(self, lane: Lane) -> None:
        try:
            received = lane.link.receive()
        except (ChannelClosed, MessageError):
            self._lane_gone(lane)
            return
        for message in received:
            if isinstance(message, LaneReady):
                self._lane_ready(lane, message)
            elif isinstance(message, LaneStats):
                lane.stats = message
            elif isinstance(message, LaneTrouble):
                self._lane_trouble(message)
            elif isinstance(message, StepTimes):
                self.status.on_times(message)
            elif isinstance(message, BlockFacts):
                self.status.on_facts(lane.index, message)
            else:
                self.feed(cx.LaneSaid(lane.index, message))

    def _lane_ready(self, lane: Lane, message: LaneReady) -> None:
        lane.ready, lane.incarnation, lane.cores = True, message.incarnation, message.cores
        for name, address in self.addresses.items():
            self.to_lane(lane, AddPeer(name, address))
        self.feed(cx.LaneUp(lane.index))
        if all(other is not None and other.ready for other in self.lanes):
            self.ready.set()

    def _lane_trouble(self, message: LaneTrouble) -> None:
        job = self.machine.jobs.get(message.job)
        if job is None:
            log.warning("%s", message.message)
            return
        domain = next((d.config.id for d in job.domains.values()), (message.job, 0))
        report = fx.ReportFault(
            domain, message.kind, f"{self.node}: {message.message}", 0, "memory", (), message.advice
        )
        self.feed(cx.LaneSaid(0, report))

    def _lane_gone(self, lane: Lane) -> None:
        # The next socket may get the same number: asyncio must not go on watching it for this one.
        self.loop.remove_reader(lane.link.fileno())
        self.loop.remove_writer(lane.link.fileno())
        lane.link.channel.close()
        lane.process.kill()
        status = lane.process.wait()
        if self.lanes[lane.index] is not lane or self.stopped.is_set():
            return
        self.lanes[lane.index] = None
        if not lane.ready and not lane.restarts:
            self.fail(f"lane {lane.index} could not start (exit status {status}); its message is above")
            return
        pause = self.pool.pause(lane)
        log.warning("lane %d died (status %d); starting it again in %.2f s", lane.index, status, pause)
        self.loop.call_later(pause, self._restart_lane, lane.index, lane.restarts + 1)

    def _restart_lane(self, index: int, restarts: int) -> None:
        if not self.stopped.is_set():
            self._start_lane(index, restarts)

    def to_lane(self, lane: Lane, message: Any) -> None:
        with contextlib.suppress(ChannelClosed):
            lane.link.send(message)
        if lane.link.channel.backlog:
            self.loop.add_writer(lane.link.fileno(), self._flush_lane, lane)

    def _flush_lane(self, lane: Lane) -> None:
        with contextlib.suppress(ChannelClosed):
            lane.link.channel.flush()
        if not lane.link.channel.backlog:
            self.loop.remove_writer(lane.link.fileno())

    def _do_to_lane(self, e: cx.ToLane) -> None:
        for lane in self.lanes:
            # A lane that is not ready hears everything when it is.
            if lane is not None and lane.ready and e.lane in (None, lane.index):
                self.to_lane(lane, e.event)

    # ---------------------------------------------------------------------------------------- effects
    def _do_send(self, e: fx.Send) -> None:
        self.transport.send(e.peer, wire.pack(e.header), e.body, copy=True)

    def _do_save(self, e: cx.SaveJob) -> None:
        try:
            self.store.save(e.job, e.memory)
        except OSError as error:
            self._lane_trouble(LaneTrouble(e.job, "OutOfMemory", f"the job's memory cannot be written: {error}"))

    def _do_forget(self, e: cx.ForgetJob) -> None:
        for lane in self.lanes:
            if lane is not None and lane.ready:
                self.to_lane(lane, ForgetJob(e.job))
        self.status.forget_job(e.job)
        self.store.forget(e.job)

    def _do_log_settled(self, e: cx.LogSettled) -> None:
        try:
            self.store.ledger(e.domain).settle(e.step, e.void, e.plan, e.lag)
        except MemoryShort as error:
            self._lane_trouble(LaneTrouble(e.domain[0], "OutOfMemory", str(error)))
        self.status.on_settled(e)

    def _do_arbitrate(self, e: cx.Arbitrate) -> None:
        self.queue.append(cx.EpochWon(self.arbiter.compare_and_swap(e.expected, e.record)))

    def _do_answer(self, e: cx.AnswerRequest) -> None:
        future = self.requests.pop(e.request, None)
        if future is not None and not future.done():
            future.set_result(e)

    def _do_drained(self, e: cx.Drained) -> None:
        self.stopped.set()

    def _do_count(self, e: fx.Count) -> None:
        self.counts[e.name, e.peer] = self.counts.get((e.name, e.peer), 0) + e.value

    def _do_log(self, e: cx.Log) -> None:
        log.log(getattr(logging, e.level.upper()), "%s", e.text)

    async def set_codec(self, job: str, pattern: str, spec: str) -> cx.AnswerRequest:
        """An operator's request; returns when the step is known at which it takes effect."""
        self.last_request += 1
        future: asyncio.Future[cx.AnswerRequest] = self.loop.create_future()
        self.requests[self.last_request] = future
        request = self.last_request
        self.feed(cx.SetCodec(request, job, pattern, spec))
        try:
            return await future
        finally:
            self.requests.pop(request, None)


_PERFORM: dict[type, Any] = {
    fx.Send: Supervisor._do_send,
    fx.Reconnect: lambda self, e: self.transport.reset(e.peer),
    fx.Count: Supervisor._do_count,
    fx.ReportLink: lambda self, e: None,
    cx.Tell: Supervisor._do_tell,
    cx.ToLane: Supervisor._do_to_lane,
    cx.KnowPeer: lambda self, e: self.loop.call_soon(self._know_peer, e.name, e.address),
    cx.SaveJob: Supervisor._do_save,
    cx.ForgetJob: Supervisor._do_forget,
    cx.LogSettled: Supervisor._do_log_settled,
    cx.Arbitrate: Supervisor._do_arbitrate,
    cx.AnswerRequest: Supervisor._do_answer,
    cx.Drained: Supervisor._do_drained,
    cx.Log: Supervisor._do_log,
}


def run(config: Config) -> int:
    """Run a daemon until it is told to stop. Returns its exit status."""
    logging.basicConfig(
        level=config.log.level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s {config.node.name}: %(message)s",
    )
    try:
        return asyncio.run(Supervisor(config).run())
    except (StartError, MemoryShort, OSError) as error:
        log.error("%s", error)
        return 1
