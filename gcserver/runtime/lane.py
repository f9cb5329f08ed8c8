"""A lane process: one loop over frames, workers and the supervisor.

What may live here: turning what arrives into events of the lane machine and its effects into calls of the executor, the
transport and the sockets. What may not: decisions (`gcserver.core`), arithmetic (`executor.py`), memory layout
(`blocks.py`), workers' connections (`laneworkers.py`), what the supervisor says (`laneorders.py`).

The loop waits in one poll for everything and never blocks elsewhere; kernels run in it without the
interpreter lock while ZeroMQ's own thread moves bytes.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from gcproto import wire
from gcproto.channel import ChannelClosed
from gcproto.wire import Flag
from gcserver import logsetup
from gcserver.codecs.warmup import warmup
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.events import DomainKey
from gcserver.core.lane import LaneMachine
from gcserver.core.lane_config import LaneConfig
from gcserver.keys import KeyPair
from gcserver.parent import ends_with_parent
from gcserver.runtime import incoming
from gcserver.runtime.compiling import compile_what_is_missing
from gcserver.runtime.counters import Counters
from gcserver.runtime.delays import Delays
from gcserver.runtime.endings import Endings
from gcserver.runtime.executor import Executor
from gcserver.runtime.guard import Guard
from gcserver.runtime.kernelclock import KernelClock
from gcserver.runtime.lanelink import (
    DEFECT,
    LaneKeys,
    LaneLink,
    LaneReady,
    LaneStats,
    LaneTrouble,
)
from gcserver.runtime.laneorders import LaneOrders
from gcserver.runtime.laneworkers import LaneWorkers
from gcserver.runtime.linkfit import Arrivals
from gcserver.runtime.linkstates import LinkStates
from gcserver.runtime.once import Once
from gcserver.runtime.recording import Recording
from gcserver.runtime.setup import LaneSetup, listen_unix
from gcserver.runtime.statefiles import incarnation, latest
from gcserver.runtime.stepreports import StepReports
from gcserver.runtime.steptrace import StepTracer
from gcserver.runtime.tap import Tap
from gcserver.runtime.tickets import Tickets
from gcserver.runtime.transports import lane_transport

TICK: Final = 0.5
STATS_EVERY: Final = 1.0
GC_THRESHOLD: Final = (20_000, 20, 20)


class LaneProcess:
    """The loop and its tables."""

    def __init__(
        self,
        setup: LaneSetup,
        machine: LaneMachine,
        context: zmq.Context[Any],
        link: LaneLink,
        listener: socket.socket,
    ) -> None:
        self.setup = setup
        self.machine = machine
        self.link = link
        self.executor = Executor()
        self.clock = KernelClock(self.executor)
        self.poller = select.epoll()
        self.counters = Counters()
        self.arrivals = Arrivals()
        self.delays = Delays(machine)
        self.reports = StepReports(machine, self.delays, self.send_up)
        self.workers = LaneWorkers(self, listener, Tickets(Path(setup.state)))
        tap, index = Tap(self), setup.hello.lane
        self.tracer = StepTracer(tap, index, self.send_up)
        self.recording = Recording(tap, index, machine, self.executor.domains, self.send_up)
        self._new = Once()
        self.queue: deque[ev.LaneEvent] = deque()
        self.orders = LaneOrders(self)
        self.endings = Endings(self.executor.domains, self._forget_domain, self.send_up)
        self.running = True
        self.guard = self._guard(context) if setup.secured else None
        self.transport = transport = lane_transport(setup, context, self.guard, self.trouble_once)
        self.links = LinkStates(machine.links, transport, machine.config.quiet_after)
        domains, handles = self.executor.domains, self.executor.handles
        self.perform: dict[type, Callable[[Any], object]] = {
            fx.Send: self._do_send,
            fx.Reconnect: lambda e: transport.reset(e.peer),
            fx.Release: lambda e: handles.release(e.handle),
            fx.LogDecision: lambda e: domains[e.domain].log_decision(e.key, e.decision),
            fx.Encode: self._do_encode,
            fx.Accumulate: self._do_accumulate,
            fx.Finalise: self._do_finalise,
            fx.Decode: self.executor.decode,
            fx.CommitOutput: self.executor.commit_output,
            fx.EnterEpoch: lambda e: domains[e.domain].enter_epoch(e.key, e.epoch, e.step),
            fx.LogStep: self._do_log_step,
            fx.Flip: lambda e: domains[e.domain].flip(e.key, e.step, e.version, e.owner),
            fx.Notify: self.workers.notify,
            fx.ReportStep: self.reports.add,
            fx.ReportClosed: self.send_up,
            fx.ReportWaiting: self.send_up,
            fx.ReportFault: self.send_up,
            fx.ReportLink: self.send_up,
            fx.Count: lambda e: self.counters.count(e.name, e.peer, e.value),
        }

    def _guard(self, context: zmq.Context[Any]) -> Guard:
        """Waits for the keys: nothing may be bound before."""
        keys: LaneKeys = self.link.wait()[0]
        return Guard(
            context,
            KeyPair(keys.name, keys.public, keys.secret),
            keys.admitted,
            lambda kind: self.counters.count(kind, 0),
            lambda text: self.send_up(LaneTrouble(b"", "Log", text)),
        )

    # ------------------------------------------------------------------------------------------ loop
    def run(self) -> None:
        """Serve until the supervisor is gone."""
        frames, reports, workers, orders = self.transport.fileno(), self.reports, self.workers, self.orders
        for descriptor in (frames, self.link.fileno(), workers.listener.fileno()):
            self.poller.register(descriptor, select.EPOLLIN)
        if self.guard is not None:
            self.poller.register(self.guard.fileno(), select.EPOLLIN)
            self.guard.answer()
        cores = tuple(sorted(os.sched_getaffinity(0)))
        self.send_up(LaneReady(os.getpid(), self.machine.config.incarnation, cores))
        next_tick = time.monotonic()
        next_stats = next_tick
        while self.running:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK
                for peer in self.transport.tick(now):
                    self.feed(ev.PeerReset(peer))
                self.feed(ev.Tick(latest()))
                workers.housekeeping()
            if now >= next_stats:
                next_stats = now + STATS_EVERY
                self.send_up(self._stats(), *self.clock.take(), *self.links.news(now))
            if reports.waiting and (now >= reports.by or reports.gated()):
                reports.flush()
            until = min(next_tick, next_stats, reports.by or next_tick)
            # The descriptor tells of changes, not of states: never wait while there is something to read.
            busy = self.transport.readable
            wait = 0.0 if busy or orders.asked else max(0.0, until - time.monotonic())
            ready = dict(self.poller.poll(wait))
            if orders.asked:
                orders.answer()
            if self.guard is not None and self.guard.fileno() in ready:
                self.guard.answer()
            if busy or frames in ready:
                incoming.receive(self, not busy)
            if self.link.fileno() in ready:
                orders.serve(ready[self.link.fileno()])
            if workers.listener.fileno() in ready:
                workers.accept()
            for descriptor, event in ready.items():
                if descriptor in workers.connections:
                    workers.serve(workers.connections[descriptor], event)

    def feed(self, event: ev.LaneEvent) -> None:
        """One event through the machine, and whatever its effects answer."""
        self.queue.append(event)
        while self.queue:
            event, now = self.queue.popleft(), time.monotonic()
            self.delays.on(event, now)
            for effect in self.machine.on(event, now):
                if self.endings.over and self.endings.concern(effect):
                    continue
                try:
                    self.perform[type(effect)](effect)
                except Exception as error:
                    # First of all: what else waits for this domain then meets one that is closed.
                    self.queue.appendleft(ev.DomainClosed(self.endings.end(effect, error)))

    def trouble_once(self, text: str) -> None:
        """A line for the log of the daemon, the first time it is said."""
        if self._new(text):
            self.send_up(LaneTrouble(b"", "Log", text))

    def _forget_domain(self, domain: DomainKey) -> None:
        """The domain is closed."""
        self.counters.rounds.pop(domain[0], None)
        self.reports.forget(domain)
        self.tracer.forget(domain)
        self.executor.close(domain)

    def send_up(self, *messages: Any) -> None:
        """To the supervisor; what its socket does not take now goes when it is writable."""
        try:
            self.link.send(*messages)
        except ChannelClosed:
            self.running = False
            return
        if self.link.channel.backlog:
            self.poller.modify(self.link.fileno(), select.EPOLLIN | select.EPOLLOUT)

    # --------------------------------------------------------------------------------------- effects
    def _do_send(self, e: fx.Send) -> None:
        payload: memoryview | bytes | None = e.body
        if e.handle is not None:
            payload = self.executor.handles.table[e.handle]
        self.counters.measure(e.header, e.peer, 1)
        if not self.transport.send(e.peer, wire.pack(e.header), payload, copy=bool(e.header.flags & Flag.RESENT)):
            self.counters.count("frames_unroutable", e.peer)

    def _do_encode(self, e: fx.Encode) -> None:
        self.queue.append(self.executor.encode(e))

    def _do_accumulate(self, e: fx.Accumulate) -> None:
        if not self.executor.accumulate(e):
            self.counters.count("payloads_unusable", 0)

    def _do_finalise(self, e: fx.Finalise) -> None:
        if e.codec is None or e.codec.rounds == 1 or e.stage:
            rounds = self.counters.rounds
            rounds[e.domain[0]] = rounds.get(e.domain[0], 0) + 1
        self.queue.append(self.executor.finalise(e))

    def _do_log_step(self, e: fx.LogStep) -> None:
        self.executor.domains[e.domain].log_step(ev.StepRecord(e.step, e.nonfinite, e.proposal, e.digest, e.epoch))

    def _stats(self) -> LaneStats:
        bytes_in, bytes_out = self.transport.bytes_in, self.transport.bytes_out
        return self.counters.stats(bytes_in, bytes_out, self.executor.domains, self.arrivals.take())


def serve(process: LaneProcess) -> None:
    """Serve until the supervisor is gone. A defect ends the process, and what it was is in the daemon's log too."""
    try:
        process.run()
    except Exception:
        process.send_up(LaneTrouble(b"", DEFECT, f"this lane ends by a defect\n{traceback.format_exc()}"))
        raise


def main() -> int:
    """Entry point of a lane process: one argument, the setup as JSON."""
    setup = msgspec.json.decode(sys.argv[1].encode(), type=LaneSetup)
    logsetup.begin_child(setup.voice)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Memory files make a lane's sudden end harmless; a lane without its supervisor would serve nobody.
    ends_with_parent(signal.SIGKILL)
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    gc.disable()  # loading kernels makes little garbage, and looking for it would take a fifth of the time
    compile_what_is_missing()
    warmup()
    link = LaneLink(socket.socket(fileno=setup.link))
    number = incarnation(Path(setup.state) / f"lane{setup.hello.lane}.incarnation")
    config = LaneConfig(setup.hello, number, setup.credit)
    context: zmq.Context[Any] = zmq.Context()
    listener = listen_unix(setup.worker_socket)
    process = LaneProcess(setup, LaneMachine(config), context, link, listener)
    # What is loaded now stays; looking through it for garbage again and again is time between frames.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    gc.enable()
    try:
        serve(process)
    finally:
        process.workers.close()
        process.transport.close()
        context.destroy(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
