"""The simulated network: frames between lives of processes, and everything that can happen to them.

What may live here: queues, delays, loss, duplicates, replay, damage, partitions, stalls. What may not: what a frame
means, checks.

A channel is (from, to, lane). Frames keep their order inside a channel unless the world's shape says they do
not; a frame that is under way when its receiver dies reaches the next life, as a frame on a retried
connection may.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gcproto import wire
from gcproto.wire import Header
from gcserver.core import effects as fx
from gcserver.core import events as ev
from tests.simulation.lane_process import LaneProcess
from tests.simulation.memory import Payload
from tests.simulation.processes import CONTROL, Process, received

if TYPE_CHECKING:
    from tests.simulation.world import World

Route = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class Frame:
    """One frame under way. ``damage``: "", "header", "payload" or "unusable"."""

    header: Header
    payload: Payload | None
    body: bytes
    damage: str = ""
    gone: bool = False


@dataclass(slots=True)
class Channel:
    """One direction between two nodes on one lane."""

    route: Route
    last: float = 0.0
    queued: deque[Frame] = field(default_factory=deque)
    #: the lives of sender and receiver between which nothing arrives any more until the sender connects anew
    stalled: tuple[int, int] = (0, 0)
    history: deque[Frame] = field(default_factory=lambda: deque(maxlen=24))


class Network:
    """All channels of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.channels: dict[Route, Channel] = {}
        #: unordered pairs that cannot talk, until when
        self.cut: dict[frozenset[str], float] = {}
        #: frames to damage: route -> (kind, how many)
        self.damage: dict[Route, list[str]] = {}
        self.damaged_once: set[tuple[int, int, int]] = set()

    def channel(self, route: Route) -> Channel:
        found = self.channels.get(route)
        if found is None:
            found = self.channels[route] = Channel(route)
        return found

    def send(self, process: Process, e: fx.Send, payload: Payload | None) -> None:
        world = self.world
        route = (process.node.name, world.names[e.peer], process.lane)
        channel = self.channel(route)
        frame = Frame(e.header, payload, e.body)
        world.checks.on_send(process, e)
        if (planned := self.damage.get(route)) and self._may_damage(e.header, planned[0]):
            frame.damage = planned.pop(0)
        channel.history.append(frame)
        if self._stalled(channel):
            return
        self._launch(channel, frame)
        shape = world.shape
        if shape.duplicates and world.random.random() < shape.duplicates:
            self._launch(channel, replace(frame, damage=""))

    def _lives(self, channel: Channel) -> tuple[int, int]:
        source, target, lane = channel.route
        ends = self.world.process(source, lane), self.world.process(target, lane)
        return (ends[0].incarnation if ends[0] else 0, ends[1].incarnation if ends[1] else 0)

    def _stalled(self, channel: Channel) -> bool:
        return channel.stalled != (0, 0) and channel.stalled == self._lives(channel)

    def _may_damage(self, h: Header, kind: str) -> bool:
        """Never the same frame twice, unless the damage is meant to be lasting."""
        if h.payload_bytes == 0 and kind != "header":
            return False
        frame = (h.sender, h.incarnation, h.link_seq)
        if not kind.endswith("!") and h.link_seq:
            if frame in self.damaged_once:
                return False
            self.damaged_once.add(frame)
        return True

    def _launch(self, channel: Channel, frame: Frame) -> None:
        world, shape = self.world, self.world.shape
        at = world.now + shape.latency * (0.5 + world.random.random())
        if shape.jitter and world.random.random() < 0.05:
            at += shape.jitter * world.random.random()
        until = self.cut.get(frozenset(channel.route[:2]), 0.0)
        if until > world.now:
            at = max(at, until + shape.latency)
        if not (shape.reorder and world.random.random() < shape.reorder):
            at = max(at, channel.last)
            channel.last = at
        channel.queued.append(frame)
        world.at(at, self._arrive, channel, frame)

    def _arrive(self, channel: Channel, frame: Frame) -> None:
        if channel.queued and channel.queued[0] is frame:
            channel.queued.popleft()
        elif frame in channel.queued:
            channel.queued.remove(frame)
        if frame.gone:
            return
        source, target, _ = channel.route
        if self.cut.get(frozenset((source, target)), 0.0) > self.world.now:
            self._launch(channel, frame)
            return
        now, node = self.world.now, self.world.by_name[target]
        if node.slow_until > now or node.reads_at > now:
            node.reads_at = max(node.reads_at, now) + (node.reading if node.slow_until > now else 0.0)
            self.world.at(node.reads_at, self._read, channel, frame)
        else:
            self._read(channel, frame)

    def _read(self, channel: Channel, frame: Frame) -> None:
        source, target, lane = channel.route
        process = self.world.process(target, lane)
        if process is not None:
            self.hand_over(process, source, frame)

    def hand_over(self, process: Process, source: str, frame: Frame) -> None:
        """What the receiving transport tells its machine."""
        if frame.damage == "unusable":
            process.deliver(ev.Unusable(frame.header, "rubbish under a proper digest"))
            return
        if frame.damage:
            header = frame.header if frame.damage.startswith("payload") else None
            process.deliver(ev.FrameDamaged(header, wire.node_id(source), f"{frame.damage} digest"))
            return
        handle = None
        if frame.payload is not None and isinstance(process, LaneProcess):
            handle = process.new_handle(frame.payload)
        process.deliver(received(frame.header, handle, frame.body))

    # ---------------------------------------------------------------------------------------- faults
    def stall(self, source: str, target: str, lane: int) -> None:
        """What a changed length does to a stream: the receiver takes all that follows for the rest of one frame."""
        channel = self.channel((source, target, lane))
        channel.stalled = self._lives(channel)

    def renew(self, source: str, target: str, lane: int) -> None:
        """The sender makes its connection anew."""
        self.drop_queue(source, target, lane)
        self.channel((source, target, lane)).stalled = (0, 0)

    def drop_queue(self, source: str, target: str, lane: int) -> int:
        """Everything under way from ``source`` to ``target`` on a lane is lost."""
        channel = self.channels.get((source, target, lane))
        if channel is None:
            return 0
        for frame in channel.queued:
            frame.gone = True
        lost = len(channel.queued)
        channel.queued.clear()
        channel.last = 0.0
        return lost

    def reset(self, a: str, b: str, lane: int, tell: tuple[bool, bool]) -> None:
        """The connection between two nodes breaks; what is under way is lost, who is told says ``tell``."""
        self.renew(a, b, lane)
        self.renew(b, a, lane)
        for here, there, told in ((a, b, tell[0]), (b, a, tell[1])):
            process = self.world.process(here, lane)
            if told and process is not None:
                process.deliver(ev.PeerReset(wire.node_id(there)))

    def replay(self, source: str, target: str, lane: int) -> None:
        """An old frame comes again, perhaps from or to a life that is over."""
        channel = self.channels.get((source, target, lane))
        if channel is not None and channel.history:
            frame = self.world.random.choice(channel.history)
            self._launch(channel, replace(frame, damage="", gone=False))

    def partition(self, a: str, b: str, until: float, lose: bool) -> None:
        both = frozenset((a, b))
        self.cut[both] = max(until, self.cut.get(both, 0.0))
        if lose:
            for lane in range(CONTROL, self.world.shape.lanes):
                self.drop_queue(a, b, lane)
                self.drop_queue(b, a, lane)

    def spoil(self, source: str, target: str, lane: int, kind: str, times: int = 1) -> None:
        """Damage the next suitable frames of a channel."""
        self.damage.setdefault((source, target, lane), []).extend([kind] * times)
