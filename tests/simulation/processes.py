"""Simulated processes: they carry out effects as the runtime does, and can die anywhere.

What may live here: one life of a process, and the supervisor; lanes are in `lane_process.py`. What may not: what a
correct effect is (`checks.py`), which faults happen (`faults.py`).

Every process has a *fuse*: the number of effects it still carries out before it is killed. That is how a
kill falls between any two effects of one batch, or into the middle of one that writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from gcproto import messages, wire
from gcproto.wire import FrameType
from gcserver.core import control_events as ce
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.arbiter import MemoryArbiter
from gcserver.core.control import ControlMachine
from gcserver.core.control_config import ControlConfig
from tests.simulation.memory import no_controller, no_room

if TYPE_CHECKING:
    from gcproto.manifest import Section
    from gcserver.core.control_domain import ControlDomain
    from gcserver.core.job import Job
    from tests.simulation.lane_process import LaneProcess
    from tests.simulation.world import Node, World

CONTROL = -1
#: no life of a process has a higher number, as each is told at its ticks
LATEST_LIFE = 1 << 40
#: with more links than this only those that an event used are checked after it; all of them at every tick
FEW_LINKS = 8


class Killed(Exception):
    """The fuse burnt down: the process is gone between two effects."""


class Process:
    """One life of one process. ``lane`` is CONTROL for a supervisor."""

    machine: Any

    def __init__(self, world: World, node: Node, lane: int) -> None:
        self.world, self.node, self.lane = world, node, lane
        self.incarnation = world.next_incarnation() + node.lives_ahead
        self.alive = True
        self.paused = False
        self.backlog: list[Any] = []
        self.fuse = -1
        self.tear = False
        self.dies_before = ""
        self.answers_at = 0.0
        self.name = f"{node.name}/{'control' if lane == CONTROL else lane}"

    def deliver(self, event: Any) -> None:
        """Something happened to this process; lost when it is dead, later when it is stopped."""
        if not self.alive:
            return
        if self.paused:
            self.backlog.append(event)
            return
        self.handle(event)

    def resume(self) -> None:
        self.paused = False
        backlog, self.backlog = self.backlog, []
        for event in backlog:
            self.deliver(event)

    def handle(self, event: Any) -> None:
        world = self.world
        world.events += 1
        if world.trace is not None and type(event) is not ev.Tick:
            world.say(self.name, event)
        effects = self.machine.on(event, self.node.clock())
        few = len(self.machine.links) <= FEW_LINKS or type(event) is ev.Tick
        touched = None if few else _peers(event, effects)
        try:
            for effect in effects:
                if self.fuse >= 0 or self.dies_before:
                    self._burn(effect)
                if world.trace is not None:
                    world.say(self.name + " ->", effect)
                self.DO[type(effect)](self, effect)
        except Killed:
            world.kill(self)
            return
        world.checks.after(self, touched)
        if type(event) is ev.Tick and self.lane == CONTROL:
            world.checks.on_tick(self)

    def _burn(self, effect: Any) -> None:
        if self.dies_before:
            if type(effect).__name__ == self.dies_before:
                raise Killed
            return
        self.fuse -= 1
        if self.fuse >= 0:
            return
        if self.tear:
            self.torn(effect)
        raise Killed

    def torn(self, effect: Any) -> None:
        """Killed in the middle of ``effect``."""

    def answer(self, event: Any) -> None:
        """An answer to an effect: after this batch or later, in order."""
        world = self.world
        delay = world.random.random() * world.shape.answer_delay + self.node.kernels
        self.answers_at = max(self.answers_at, world.now + delay)
        world.at(self.answers_at, self.deliver, event)

    def _send(self, e: fx.Send) -> None:
        self.world.network.send(self, e, None)

    def _reconnect(self, e: fx.Reconnect) -> None:
        self.world.network.renew(self.node.name, self.world.names[e.peer], self.lane)

    def _count(self, e: fx.Count) -> None:
        counts = self.world.counts
        counts[e.name] = counts.get(e.name, 0) + e.value

    #: what carries out each kind of effect
    DO: ClassVar[dict[type, Callable[[Any, Any], None]]] = {}


class ControlProcess(Process):
    """A supervisor: the control machine, its lanes' pipes and its workers' sockets."""

    machine: ControlMachine

    def __init__(self, world: World, node: Node) -> None:
        super().__init__(world, node, CONTROL)
        shape = world.shape
        hello = messages.Hello(node.name, node.address, shape.lanes, 0, node.memory.generation, "sim")
        config = ControlConfig(
            hello, self.incarnation, node.rules, shape.partition_bytes, shape.min_compress_bytes, shape.deadline,
            "fail", arbiter=True,
        )  # fmt: skip
        self.machine = ControlMachine(config, node.resolve, no_controller, no_room, self._no_space)
        self.arbiter = MemoryArbiter()
        self.connections: dict[int, Any] = {}
        self.lanes_up: dict[int, LaneProcess] = {}
        self.peers: dict[str, str] = {}

    def _no_space(self, job: Job, domain: ControlDomain, section: Section) -> str:
        return f"no room for section {section.index}" if self.node.full else ""

    def lane_up(self, lane: LaneProcess) -> None:
        """A lane (re)started: from now on it hears what all lanes hear."""
        if self.alive and lane.alive:
            self.lanes_up[lane.lane] = lane
            for name in self.peers:
                lane.deliver(ev.PeerAdded(wire.node_id(name), name))
            self.deliver(ce.LaneUp(lane.lane))

    def know(self, name: str, address: str) -> None:
        if name not in self.peers and name != self.node.name:
            self.peers[name] = address
            self.deliver(ev.PeerAdded(wire.node_id(name), name))
            for lane in list(self.lanes_up.values()):
                self.node.to_lane(self, lane, ev.PeerAdded(wire.node_id(name), name))

    # -------------------------------------------------------------------------------------- effects
    def _tell(self, e: ce.Tell) -> None:
        worker = self.connections.get(e.connection)
        if worker is not None:
            self.world.checks.on_told(self, e.message)
            self.world.register.on_told(self, e.message)
            self.world.worker_soon(worker.told, e.message, e.connection)

    def _to_lane(self, e: ce.ToLane) -> None:
        for lane in [x for x in self.lanes_up.values() if e.lane is None or x.lane == e.lane]:
            self.node.to_lane(self, lane, e.event)

    def _know_peer(self, e: ce.KnowPeer) -> None:
        self.world.at(self.world.now, self.know, e.name, e.address)

    def _save_job(self, e: ce.SaveJob) -> None:
        self.world.checks.on_save(self, e)
        self.world.modes.on_save(self, e)
        self.node.memory.jobs[e.job] = e.memory
        self.world.records.setdefault(e.job, e.memory.record)

    def _forget_job(self, e: ce.ForgetJob) -> None:
        self.world.checks.on_forget(self, e.job)
        self.world.modes.on_forget(self, e.job)
        self.node.memory.forget(e.job)
        for lane in self.lanes_up.values():
            self.node.to_lane(self, lane, e)

    def _log_settled(self, e: ce.LogSettled) -> None:
        ledger = self.node.memory.ledger(e.domain)
        self.world.checks.on_settled(self, e, ledger)
        ledger.log(e)

    def _take_up(self, e: ce.TakeUp) -> None:
        self.world.checks.on_take_up(self, e)
        self.node.memory.take_up(e)

    def _renew_lanes(self, e: ce.RenewLanes) -> None:
        for lane in list(self.lanes_up.values()):
            self.world.kill(lane)

    def _log_ready(self, e: ce.LogReady) -> None:
        self.world.checks.on_log_ready(self, e)
        self.node.memory.ledger(e.domain).ready = e.step

    def _arbitrate(self, e: ce.Arbitrate) -> None:
        if e.record.on_loss == "fail":
            self.answer(ce.EpochWon(self.arbiter.compare_and_swap(e.expected, e.record)))
        else:
            self.world.register.ask(self, e)

    def _answer_request(self, e: ce.AnswerRequest) -> None:
        self.world.checks.on_answer(self, e)

    def _drained(self, e: ce.Drained) -> None:
        self.world.say(self.name, e)

    def _log(self, e: ce.Log | fx.ReportLink) -> None:
        self.world.say(self.name, e)

    DO: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        fx.Send: Process._send,
        fx.Reconnect: Process._reconnect,
        fx.Count: Process._count,
        fx.ReportLink: _log,
        ce.Tell: _tell,
        ce.ToLane: _to_lane,
        ce.KnowPeer: _know_peer,
        ce.SaveJob: _save_job,
        ce.ForgetJob: _forget_job,
        ce.LogSettled: _log_settled,
        ce.TakeUp: _take_up,
        ce.RenewLanes: _renew_lanes,
        ce.LogReady: _log_ready,
        ce.Arbitrate: _arbitrate,
        ce.AnswerRequest: _answer_request,
        ce.Drained: _drained,
        ce.Log: _log,
    }


def _peers(event: Any, effects: list[Any]) -> set[int]:
    """Whose links an event was about, and whose were used because of it."""
    peers = {e.peer for e in effects if type(e) is fx.Send}
    if type(event) is ev.FrameReceived:
        peers.add(event.header.sender)
    return peers


def received(header: wire.Header, handle: int | None, body: bytes) -> ev.FrameReceived:
    """A frame as the transport hands it over: a handle for DATA, the bytes for everything else."""
    return ev.FrameReceived(header, handle if header.type is FrameType.DATA else None, body)
