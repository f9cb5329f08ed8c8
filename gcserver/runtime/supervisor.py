"""The supervisor process: the control machine between workers, lanes, peers, memory files and operators.

What may live here: starting and stopping the daemon, events into the control machine, what its parts share. What may
not: the machine's effects as calls (`performing.py`), decisions about jobs (`gcserver.core`), gradients (they never
come here), the connections (`registrations.py`, `lanes.py`, `peers.py`), the admin service (`gcserver.admin`).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from gcproto.messages import Hello, Rule
from gcserver import __version__, derivedkeys
from gcserver.admin.logs import LogHandler, LogRing
from gcserver.config import Config
from gcserver.core import control_events as cx
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.arbiter import MemoryArbiter
from gcserver.core.control import ControlMachine
from gcserver.core.control_config import ControlConfig
from gcserver.core.events import DomainKey
from gcserver.keys import KeyFileError
from gcserver.planner import controllers
from gcserver.runtime import shortage
from gcserver.runtime.applicants import Applicants
from gcserver.runtime.audits import Audits
from gcserver.runtime.etcd import EtcdArbiter
from gcserver.runtime.filing import Filing
from gcserver.runtime.keyring import Keyring, open_keyring
from gcserver.runtime.lanelink import DEFECT, LaneTrouble
from gcserver.runtime.lanes import Lanes
from gcserver.runtime.ledger import JobStore
from gcserver.runtime.notches import Notches
from gcserver.runtime.once import Once
from gcserver.runtime.peers import Peers
from gcserver.runtime.performing import perform
from gcserver.runtime.profiler import Profiler
from gcserver.runtime.questions import Questions
from gcserver.runtime.registrations import Registrations
from gcserver.runtime.resolve import resolve
from gcserver.runtime.room import no_room, no_space
from gcserver.runtime.servicemanager import ServiceManager
from gcserver.runtime.statefiles import MemoryShort, incarnation, latest, private_directory
from gcserver.runtime.status import Status
from gcserver.runtime.steering import Steering
from gcserver.runtime.tickets import Tickets
from gcserver.runtime.traces import Traces
from gcserver.runtime.transport import BindError

TICK: Final = 0.5
log = logging.getLogger("gcserver")
T = TypeVar("T")


class StartError(RuntimeError):
    """The daemon cannot start; the message says why and what to do."""


class Supervisor:
    """One daemon. ``await run()`` returns its exit status."""

    lanes: Lanes
    traces: Traces
    stopped: asyncio.Event
    # these are there once it runs
    loop: asyncio.AbstractEventLoop
    peers: Peers
    registrations: Registrations

    def __init__(self, config: Config, logs: LogRing | None = None) -> None:
        self.config = config
        self.logs = logs or LogRing()
        self.manager = ServiceManager(os.environ)
        self.node = config.node.name
        self.started = time.time()
        self.incarnation = 0
        self.state = Path(config.node.state)
        self.store = JobStore(self.state)
        self.arbiter = MemoryArbiter()
        self.etcd = EtcdArbiter(config.cluster.etcd)
        self.queue: deque[cx.ControlEvent] = deque()
        self.lanes = Lanes(self)
        self.keys: Keyring | None = None
        # Taken out of the environment: lanes and the planning process have no use for it.
        self._secret = derivedkeys.take(os.environ)
        self.counts: dict[tuple[str, int], int] = {}
        self._new = Once()
        self.signalled = False
        self.requests: dict[int, asyncio.Future[cx.AnswerRequest]] = {}
        self.last_request = 0
        self.stopped = asyncio.Event()
        self.ready = asyncio.Event()
        self.failure = ""
        self.questions = Questions(self)
        self.steering = Steering(
            self._tune, lambda job, text, planned: self.set_plan(job, (), False, text, planned), self._save_steering
        )
        self.notches = Notches(config.node.lanes)
        self.status = Status(self)
        self.filing = Filing(self.warn_once)
        self.profiler = Profiler(self)
        self.audits = Audits(self)
        self.traces = Traces(self)
        self.applicants = Applicants(self)
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
        try:
            self.keys = open_keyring(self, self.node, self.config.security, self._secret)
        except KeyFileError as error:
            raise StartError(str(error)) from None
        generation, self.incarnation = self.store.generation(), incarnation(self.state / "supervisor.incarnation")
        self.hello = Hello(self.node, self.hello.address, self.hello.lanes, self.hello.lane, generation, __version__)
        c = self.config
        self.store.keep_reserve()
        self.tickets = Tickets(self.state)
        self.lanes.start()
        # Imported late: the planner's kernels come with it, which takes as long as the rest of a daemon's start.
        from gcserver.runtime.advising import Advising
        from gcserver.runtime.linkprobe import LinkProbes
        from gcserver.runtime.planning import Planning

        self.planning, self.advising, self.probes = Planning(self), Advising(self), LinkProbes(self)
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
                controller=c.plan.controller,
                mode=c.plan.mode,
                quality=c.plan.quality,
                arbiter=bool(c.cluster.etcd),
            ),
            resolve,
            controllers.unusable,
            lambda job, text: no_room(self.state, c.node.lanes, job, text),
            lambda job, domain, section: no_space(self.state, c.node.lanes, job, domain, section),
        )
        try:
            self.peers = Peers(self)
        except BindError as error:
            raise StartError(f"{error}; another daemon? choose other ports with node.listen") from error
        self.registrations = Registrations(self)
        # Before the jobs, which name their members as those advertise themselves: the configuration knows better.
        for peer in c.others:
            self.peers.know(peer.name, str(peer.address))
        self._take_up()
        self.peers.start()
        self.registrations.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._on_signal)
        # From a terminal it means that the terminal is gone, and ends the daemon as it would any program.
        if self.manager.present or not os.isatty(0):
            self.loop.add_signal_handler(signal.SIGHUP, self.reload)
        self._tick()
        try:
            await self._serve()
        finally:
            self._shut()
            await self.planning.close()
            self.filing.close()
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
                peers = ", ".join(self.peers.addresses) or "none"
                log.info("ready: node %s listens on %s with %d lane(s), workers at %s, peers: %s", self.node,
                         self.config.node.listen, self.config.node.lanes, self.config.node.socket, peers)  # fmt: skip
                self.manager.ready(f"node {self.node}: serving")
        await stopped
        self.manager.stopping(f"node {self.node}: {self.failure or 'stopping'}")
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

    def reload(self) -> None:
        """SIGHUP: read again what may change while the daemon runs. Certificates are looked at by themselves."""
        log.info("reading the list of nodes again" if self.keys else "nothing to read again: this node has no keys")
        with self.manager.reloading():
            if self.keys is not None:
                self.keys.reload()

    def _on_signal(self) -> None:
        if self.signalled:
            self.stopped.set()
            return
        self.signalled = True
        grace = self.config.node.stop_grace
        log.info("stopping: draining for up to %g s", grace)
        self.manager.stopping(f"node {self.node}: draining")
        self.feed(cx.DrainAsked("the daemon is stopping"))
        if not self.stopped.is_set():
            self.loop.call_later(grace, self._stop_anyway)

    def _stop_anyway(self) -> None:
        if not self.stopped.is_set() and self.machine.jobs:
            log.info("leaving %d running job(s) to the next life of this daemon", len(self.machine.jobs))
        self.stopped.set()

    def _shut(self) -> None:
        self.advising.close()
        self.lanes.close()
        self.registrations.close()
        self.peers.close()
        self.profiler.close()
        if not self.machine.jobs:
            shutil.rmtree(self.state, ignore_errors=True)
        os.close(self._lock_file)

    # ---------------------------------------------------------------------------------------- machine
    def feed(self, event: cx.ControlEvent) -> None:
        """One event through the control machine, and whatever its effects answer; nothing once it has stopped."""
        if self.stopped.is_set():
            return
        self.queue.append(event)
        if len(self.queue) > 1:
            return
        while self.queue:
            try:
                for effect in self.machine.on(self.queue[0], time.monotonic()):
                    perform(self, effect)
            except Exception:
                # A defect. Half an event must not be lived on with: the next life takes up from memory.
                log.exception(
                    "%s could not be handled; stopping, so that memory is taken up anew", _kind(self.queue[0])
                )
                self.fail("a defect in the daemon (see above)")
                return
            self.queue.popleft()

    def _tick(self) -> None:
        if self.stopped.is_set():
            return
        # First of all: peers take a daemon whose clock stands still for dead.
        self.loop.call_later(TICK, self._tick)
        self.registrations.tick()
        self.peers.tick()
        if self.keys is not None:
            self.keys.tick()
        self.feed(ev.Tick(latest()))
        self.peers.frames()
        self.applicants.tick()
        self.lanes.time_trips()
        self.planning.tick()
        self.probes.tick()
        self.profiler.tick()
        self.manager.tick(self.lanes.table)

    def aside(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do ``work`` in another thread, and ``then`` in this one with what it returns. For what a job waits for, and
        what ends by itself: the daemon's end waits for it, too. For files there is `filing.py`."""
        future = self.loop.run_in_executor(None, work)
        future.add_done_callback(lambda done: None if done.cancelled() else then(done.result()))

    def warn_once(self, text: str) -> None:
        """A warning, the first time it is said."""
        if self._new(text):
            log.warning("%s", text)

    def short(self, job: bytes, what: str, error: OSError) -> None:
        """Something a job needs cannot be had: its end."""
        kind, advice = shortage.kind_of(error)
        self.trouble(LaneTrouble(job, kind, f"{what}: {shortage.text_of(error)}", advice))

    def trouble(self, message: LaneTrouble, lane: int | None = None) -> None:
        """Of a job: its end. Of none: a line for the log. ``lane``: whose it is; None: the supervisor's own."""
        job = self.machine.jobs.get(message.job)
        if job is None:
            level = logging.ERROR if message.kind == DEFECT else logging.WARNING
            log.log(level, "%s", message.message, extra={"lane": lane})
            return
        domain = next((d.config.id for d in job.domains.values()), (message.job, 0))
        report = fx.ReportFault(
            domain, message.kind, f"{self.node}: {message.message}", 0, "memory", (), message.advice
        )
        self.feed(cx.LaneSaid(0, report))

    # ----------------------------------------------------------------------------------- parts and operators
    def count(self, name: str, peer: int = 0, value: int = 1) -> None:
        """Something that should not happen; ``peer`` 0: of nobody that is known."""
        self.counts[name, peer] = self.counts.get((name, peer), 0) + value

    def _tune(self, domain: DomainKey, notch: int, level: int) -> None:
        log.debug("domain %d tuned: notch %d, level %d", domain[1], notch, level)
        self.lanes.tell(ev.Tuned(domain, notch, level))

    def _take_up(self) -> None:
        """The jobs that an earlier life left. Their controllers first: taking a job up may settle steps."""
        for memory, ledgers in self.store.load():
            self.steering.restore(memory.record.job, self.store.steering(memory.record.job))
            self.feed(cx.JobRestored(memory, ledgers))

    def _save_steering(self, job: bytes, saved: bytes) -> None:
        try:
            self.store.save_steering(job, saved)
        except OSError as error:
            self.short(job, "the job's controllers cannot be saved", error)

    async def set_plan(
        self, job: str, rules: tuple[Rule, ...], replace: bool, controller: str = "", planned: bool = False
    ) -> cx.AnswerRequest:
        """An operator's request, or the planner's; returns when the step is known at which it takes effect."""
        self.last_request += 1
        future: asyncio.Future[cx.AnswerRequest] = self.loop.create_future()
        self.requests[self.last_request] = future
        request = self.last_request
        self.feed(cx.SetPlan(request, job, rules, replace, controller, planned))
        try:
            return await future
        finally:
            self.requests.pop(request, None)


def _kind(event: cx.ControlEvent) -> str:
    """What an event is. Not what is in it: a worker's message may hold its ticket, and viewers read the log."""
    inner = getattr(event, "message", None)
    return type(event).__name__ + (f" ({type(inner).__name__})" if inner is not None else "")


def run(config: Config) -> int:
    """Run a daemon until it is told to stop. Returns its exit status. Its log is set up."""
    logs = LogRing()
    logging.getLogger().addHandler(LogHandler(logs))
    shortage.raise_descriptors()
    try:
        return asyncio.run(Supervisor(config, logs).run())
    except (StartError, MemoryShort, OSError) as error:
        log.error("%s", error)
        return 1
