"""Two supervisors of two nodes, joined by lists instead of sockets, for the targets that feed one.

What may live here: making them, the course of a job between them with one worker each, carrying frames and messages.
What may not: hostile inputs.

They are the real thing from frames and workers' bytes inwards: `Supervisor` with its machine, registrations, planning
and files. Lanes are not there: what they would say about steps is said for them, and what they are told is encoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import msgspec

from gcproto import messages, packed
from gcproto.advice import AskAdvice
from gcproto.audits import AuditReport, TensorError
from gcproto.channel import Channel
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import (
    DeclareDomain,
    DeclareSection,
    Fault,
    Hello,
    Register,
    Registered,
    Rule,
    SectionAgreed,
    Unregister,
    WhoAreYou,
)
from gcproto.spans import RECORD_BYTES, WorkerSpans
from gcproto.timings import TensorTimes
from gcserver import config, keys
from gcserver.core import control_events as cx
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.control import ControlMachine
from gcserver.core.control_config import ControlConfig
from gcserver.planner import controllers
from gcserver.runtime import supervisor
from gcserver.runtime.advising import Advising
from gcserver.runtime.keyring import Keyring
from gcserver.runtime.linkfit import LinkFit
from gcserver.runtime.linkstates import LinkStates
from gcserver.runtime.peers import Peers
from gcserver.runtime.plannerlink import PARTS, PlannerError
from gcserver.runtime.planning import Planning
from gcserver.runtime.registrations import Registrations, _decode_worker
from gcserver.runtime.resolve import resolve
from gcserver.runtime.roll import Roll
from gcserver.runtime.room import no_room
from gcserver.runtime.setup import lane_address
from gcserver.runtime.supervisor import Supervisor
from gcserver.runtime.tickets import Tickets
from tests.fuzz.lanes import LATEST, NAMES, Clock, Frame
from tests.fuzz.tickets import lay_key
from tests.fuzz.wires import LENGTH, Pipe, crossed, framed, received
from tests.unit.key_pairs import fixed_pair

STEPS: Final = 3
SECTION: Final = Section(0, (TensorSpec("w", (64, 64), 0), TensorSpec("b", (64,), 0)), (1,))
_to_worker = packed.Decoder[Any](messages.ToWorker)
PAIRS: Final = tuple(map(fixed_pair, NAMES))
#: (name, key) of all nodes, as workers tell each other
KEYS: Final = tuple((pair.name, pair.public.decode()) for pair in PAIRS)
TOKEN: Final = b"t" * 32


class _Pipe(Pipe):
    """Addresses are read as a socket would."""

    def __init__(self) -> None:
        super().__init__()
        self.troubles: dict[int, str] = {}

    def open(self, peer: int, address: str) -> None:
        lane_address(address, 0)

    def unanswered(self, peer: int) -> str:
        return "no answer yet"

    def reconnected(self) -> list[int]:
        return []


class Worker:
    """A worker's end of its connection, and what it was told."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.sock, theirs = socket.socketpair()
        self.sock.setblocking(False)
        self.told: list[Any] = []
        self.closed = False
        self._incoming = bytearray()
        channel: Channel[Any] = Channel(theirs, _decode_worker, 0)
        node.registrations._welcome(channel)
        self.descriptor = channel.fileno()

    def say(self, *said: Any) -> None:
        for message in said:
            self.give(framed(packed.encode(message)))

    def give(self, data: bytes) -> None:
        """Bytes to the supervisor, which reads them as they come."""
        view = memoryview(data)
        while view and not self.closed:
            try:
                view = view[self.sock.send(view) :]
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    self.closed = True
            self.node.read(self.descriptor)
            self.hear()

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := self.sock.recv(1 << 16):
                self._incoming += data
            self.closed = True
        while len(self._incoming) >= 4:
            (length,) = LENGTH.unpack_from(self._incoming)
            if len(self._incoming) < 4 + length:
                break
            self.told.append(_to_worker(bytes(self._incoming[4 : 4 + length])))
            del self._incoming[: 4 + length]

    def heard(self, kind: type) -> list[Any]:
        return [m for m in self.told if isinstance(m, kind)]

    def leave(self) -> None:
        """Its process ends."""
        self.sock.close()
        self.node.read(self.descriptor)


class _Lanes:
    """Stands where the lanes are."""

    def __init__(self) -> None:
        self.table: list[Any] = [None]
        self.told: list[Any] = []
        self.link = LinkFit()

    def tell(self, message: Any, lane: int | None = None) -> None:
        self.told.append(crossed(message))

    def sockets(self) -> list[str]:
        return ["/none.lane0"]


class _NoPlanner:
    """Stands where the planning process is, which works for seconds: it has died."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)

    async def ask(self, request: Any) -> Any:
        msgspec.msgpack.encode(request)
        raise PlannerError("there is none")


@cache
def _configuration(me: int) -> config.Config:
    """A node's, but for its folders. Read once: that takes as long as a fifth of an input."""
    listen = f"tcp://127.0.0.{me + 1}:7470"
    flags = {"node.name": NAMES[me], "node.listen": listen, "node.admin": "", "node.metrics": ""}
    return config.load(None, flags)


class Node(Supervisor):
    """One life of one node's supervisor. ``folder`` outlives it. Made and used in a running loop."""

    def __init__(self, me: int, incarnation: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        c = _configuration(me)
        c = replace(
            c, node=replace(c.node, state=folder / "state", socket=folder / "s"),
            plan=replace(c.plan, profiles=folder / "profiles"),
        )  # fmt: skip
        super().__init__(c)
        self.broken: list[str] = []
        # What fails there is to be seen at the input that it was for.
        self.filing = SimpleNamespace(do=self._file, close=lambda: None)  # type: ignore[assignment]
        self.loop = asyncio.get_running_loop()
        self.loop.set_exception_handler(lambda loop, context: self.broken.append(repr(context)))
        self.incarnation = incarnation
        self.hello = Hello(NAMES[me], str(c.node.advertise), 1, 1, 1, "fuzz")
        self.lanes = _Lanes()  # type: ignore[assignment]
        self.planning, self.advising = Planning(self, _NoPlanner()), Advising(self)  # type: ignore[arg-type]
        self.machine = ControlMachine(
            ControlConfig(self.hello, incarnation, (), 4096, 0, 60.0, "fail", 10.0),
            resolve,
            controllers.unusable,
            lambda job, text: no_room(self.state, 1, job, text),
        )
        lay_key(self.state)
        self.tickets = Tickets(self.state)
        admitted = folder / "peers"
        admitted.write_text("".join(keys.line(pair.name, pair.public) + "\n" for pair in PAIRS))
        self.keys = Keyring(self, PAIRS[me], keys.Watch(admitted))
        peers = self.peers = Peers.__new__(Peers)
        peers._s, peers.addresses, self.pipe = self, {}, _Pipe()
        peers.transport = self.pipe  # type: ignore[assignment]
        peers.states = LinkStates(self.machine.links, self.pipe, self.machine.config.quiet_after)
        peers.roll = Roll()
        self.registrations = Registrations.__new__(Registrations)
        self.registrations._s, self.registrations.channels = self, {}
        self.feed(ev.Tick(LATEST))
        self.peers.know(NAMES[1 - me], f"tcp://127.0.0.{2 - me}:7470")

    def aside(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        then(work())

    def _file(self, _: str, work: Callable[[], Any], then: Callable[[Any], None] = lambda _: None) -> bool:
        then(work())
        return True

    def read(self, descriptor: int) -> None:
        """What asyncio does when a worker's socket is readable."""
        if descriptor in self.registrations.channels:
            self.registrations._receive(descriptor)

    def take(self, frame: Frame) -> None:
        self.peers._frame(*received(frame))

    def close(self) -> None:
        for channel in self.registrations.channels.values():
            self.loop.remove_reader(channel.fileno())
            channel.close()
        self.registrations.channels.clear()
        self.advising.close()
        self.profiler.close()


class Pair:
    """Both supervisors and a worker of each. ``before`` is called with the number of each frame that is about to reach
    node a, or of each message that its worker is about to send."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.clock = Clock()
        self._time = patch.object(supervisor, "time", self.clock)
        self._time.start()
        self.root = Path(tempfile.mkdtemp(prefix="gradcomm-fuzz-", dir="/dev/shm"))
        self.before: Callable[[int], None] = lambda number: None
        self.before_said: Callable[[int], None] = lambda number: None
        self.taken: list[Frame] = []
        self.said: list[Any] = []
        self.a, self.b = Node(0, 100, self.root / "a"), Node(1, 200, self.root / "b")
        self.workers: list[Worker] = []
        self.latest = LATEST

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.a, self.b

    def close(self) -> None:
        for worker in self.workers:
            worker.sock.close()
        self.a.close()
        self.b.close()
        self._time.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    def again(self, me: int, incarnation: int) -> None:
        """One of them is a new process, without memory of jobs."""
        (self.b if me else self.a).close()
        shutil.rmtree(self.root / NAMES[me], ignore_errors=True)
        node = Node(me, incarnation, self.root / NAMES[me])
        if me:
            self.b = node
        else:
            self.a = node

    async def carry(self) -> None:
        """Frames in both directions, and what the loop has to do, until there is nothing."""
        await asyncio.sleep(0)
        while self.a.pipe.sent or self.b.pipe.sent:
            while self.a.pipe.sent:
                self.b.take(self.a.pipe.sent.popleft())
            while self.b.pipe.sent:
                self.before(len(self.taken))
                if not self.b.pipe.sent:
                    break
                frame = self.b.pipe.sent.popleft()
                self.taken.append(frame)
                self.a.take(frame)
            await asyncio.sleep(0)
        for worker in self.workers:
            worker.hear()

    async def tick(self) -> None:
        self.clock.now += 0.5
        for node in self.nodes:
            node.feed(ev.Tick(self.latest))
        await self.carry()

    def say(self, me: int, *said: Any) -> None:
        """A worker's messages; node a's are counted."""
        for message in said:
            if me == 0:
                self.before_said(len(self.said))
                self.said.append(message)
            self.workers[me].say(message)

    # ------------------------------------------------------------------------------------------- a job
    async def play(self, label: str, number: bytes, brief: bool = False) -> str:
        """A job from start to end, as far as it goes; the first thing that did not come, or "". ``brief``: one step
        and no plans, which is enough to see that jobs are served."""
        self.workers = [Worker(self.a), Worker(self.b)]
        await self.tick()
        await self.tick()
        for me in (0, 1):
            rank = me ^ self.first
            peers = ((NAMES[1 - me], f"tcp://127.0.0.{2 - me}:7470"),)
            register = Register(
                label, rank, 2, 0, 1, 1, number if rank == 0 else b"", 60.0, "", peers, "fuzz", 7, "static", "balanced",
                KEYS, TOKEN,
            )  # fmt: skip
            self.say(me, WhoAreYou(), register)
        await self.carry()
        if any(not w.heard(Registered) for w in self.workers):
            return "not registered"
        # All of node a's at once, so that the other's come before, between and after them.
        for me in (1, 0):
            self.say(me, DeclareDomain("ddp", 0, (0, 1), True, "", False, 5), DeclareSection(0, SECTION, 1))
            await self.carry()
        if any(not w.heard(SectionAgreed) for w in self.workers):
            return "not agreed"
        steps = 1 if brief else STEPS
        if not brief:
            await self._steer(number)
        for step in range(1, steps + 1):
            for node in self.nodes:
                proposal = next((j.proposal for j in node.machine.jobs.values()), 0)
                node.feed(cx.LaneSaid(0, fx.ReportStep((number, 0), step, False, proposal, 5)))
            await self.tick()
        domains = [j.domains[0].settled for n in self.nodes for j in n.machine.jobs.values() if j.id == number]
        if domains != [steps, steps]:
            return "not settled"
        for me in (0, 1):
            self.say(me, Unregister())
            await self.carry()
        if any(number in node.machine.jobs for node in self.nodes):
            return "not over"
        return ""

    async def _steer(self, number: bytes) -> None:
        """Plans, and what workers measure and ask."""
        self.a.feed(cx.SetPlan(1, number.hex(), (Rule("w", "topk(ratio=0.01)"),)))
        self.b.feed(cx.SetPlan(2, number.hex(), (Rule("*", "fp16", "all"),)))
        await self.carry()
        for me in (0, 1):
            self.say(
                me,
                TensorTimes(0, 1, (5, 9), 100, 300, 310, 4096, 7, (), True),
                AuditReport(0, 1, 0.5, 0.9, 1.0, (TensorError("w", 0.5, 0.9, 1.0),), 1, 0, 0.1, True),
                AskAdvice(1, -1, (1e6,)),
                WorkerSpans(7, 1, ((number, 0, 1),), bytes(2 * RECORD_BYTES)),
            )
            await self.carry()

    def faults(self) -> list[Fault]:
        """What node a's worker was told went wrong."""
        return self.workers[0].heard(Fault) if self.workers else []

    async def end(self) -> None:
        """All workers are gone."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.leave()
        await self.carry()


async def alone(node: Node, worker: Worker, job: bytes) -> None:
    """A job of one worker begins."""
    worker.say(Register("train", 0, 1, 0, 1, 1, job), DeclareDomain("ddp", 0, (0,), True), DeclareSection(0, SECTION))
    await asyncio.sleep(0)
    worker.hear()
    assert worker.heard(Registered) and worker.heard(SectionAgreed), worker.told


async def undisturbed(first: int) -> tuple[tuple[Frame, ...], tuple[Any, ...]]:
    """(frames that reach node a, messages of its worker) of a job that nobody disturbs."""
    pair = Pair(first)
    try:
        what = await pair.play("train", b"j" * 16)
        assert not what, what
        found = tuple(pair.taken), tuple(pair.said)
        await pair.end()
        what = await pair.play("next", b"k" * 16, brief=True)
        assert not what, what
        assert not pair.a.failure
        return found
    finally:
        pair.close()
