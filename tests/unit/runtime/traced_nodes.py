"""Nodes whose supervisors trace, without daemons: their links, lanes and workers are lists.

What may live here: as much of a supervisor as traces use, running work with two of them. What may not: assertions about
traces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from gcproto.manifest import AddressSpace
from gcproto.spans import PART_BYTES, RECORD_BYTES, EndTrace, Kind, Ring, Span, WorkerSpans
from gcserver.admin.spans import TraceContext, TracedNode
from gcserver.core import control_events as cx
from gcserver.core.clocks import ClockSample
from gcserver.runtime.recording import AskRecord, LaneSpans
from gcserver.runtime.traces import Traces
from tests.unit.core.control_machine import LARGE

JOB = b"j" * 16
#: a's connections: rank 0 is 5, rank 1 is away
WORKER = 5


def data(count: int, place: int = 0) -> bytes:
    ring = Ring(count)
    for i in range(count):
        ring.add(Span(float(i), i + 0.5, JOB, 0, 3, 0, 0, 0, 8, place, Kind.ENCODE, 0))
    return ring.content()


class Node:
    """As much of a supervisor as traces use. Frames to other nodes go through ``cluster``, in turns of the loop."""

    def __init__(self, name: str, cluster: dict[str, Node], lanes: int = 2) -> None:
        self.node, self.cluster = name, cluster
        self.loop = asyncio.get_running_loop()
        self.stopped = asyncio.Event()
        self.told: list[tuple[int, Any]] = []
        self.lane_told: list[Any] = []
        self.spans = 4
        #: lanes that answer, and whether workers do
        self.answering = lanes
        self.workers_answer = True
        #: what is lost on the way from here
        self.lost: Callable[[Any], bool] = lambda message: False
        config = SimpleNamespace(id=(JOB, 0), domain=0, label="ddp.0", members=(1, 2), space=self._space)
        self.job = SimpleNamespace(
            id=JOB, domains={0: SimpleNamespace(config=config, sections=[LARGE])}, workers={0: WORKER, 1: None},
            record=SimpleNamespace(label="gpt", members=[SimpleNamespace(node=n) for n in "ab"]),
        )  # fmt: skip
        self.machine = SimpleNamespace(
            jobs={JOB: self.job}, connections={WORKER: (JOB, 0)}, peers=SimpleNamespace(link=self._link)
        )
        self.lanes = SimpleNamespace(
            table=[None] * lanes, tell=self.lane_told.append, send=lambda lane, message: self.lane_told.append(message)
        )
        self.registrations = SimpleNamespace(tell=self._tell_worker)
        self.questions = SimpleNamespace(ask=self._ask)
        cluster[name] = self
        self.traces = Traces(self)  # type: ignore[arg-type]

    @property
    def peers(self) -> Any:
        return SimpleNamespace(addresses={name: "tcp://" for name in self.cluster if name != self.node})

    @staticmethod
    def _space(lanes: int) -> Any:
        return AddressSpace(2, lanes, 4 << 20)

    def _link(self, name: str) -> Any:
        sample = ClockSample(time.monotonic(), 7.0, 0.001)
        return SimpleNamespace(up=name != "down", clocks=SimpleNamespace(best=lambda now: sample))

    def _tell_worker(self, e: cx.Tell) -> None:
        self.told.append((e.connection, e.message))
        if isinstance(e.message, EndTrace) and self.workers_answer:
            answer = WorkerSpans(e.message.number, 1, ((JOB, 0, 4),), data(2, 9))
            self.loop.call_soon(self.traces.on_worker, e.connection, answer)

    async def _ask(self, question: Callable[[int], Any], patience: float) -> list[LaneSpans]:
        asked = question(1)
        assert isinstance(asked, AskRecord)
        self.lane_told.append(asked)
        return [LaneSpans(1, 2, ((JOB, 0, 3),), data(self.spans, i)) for i in range(self.answering)]

    def feed(self, event: Any) -> None:
        assert isinstance(event, cx.TellPeer)
        if not self.lost(event.message):
            self.loop.call_soon(self.cluster[event.peer].traces.on_peer, self.node, event.message)


def run(work: Callable[[Node, Node], Awaitable[None]]) -> None:
    """With two nodes, a and b."""

    async def both() -> None:
        cluster: dict[str, Node] = {}
        await work(Node("a", cluster), Node("b", cluster))

    asyncio.run(both())


async def everything(node: Node) -> tuple[TraceContext, dict[str, list[TracedNode]], dict[str, list[Span]]]:
    context, nodes, spans, newest = None, {}, {}, ""
    async for part in node.traces.fetch():
        if isinstance(part, TraceContext):
            context = part
        elif isinstance(part, TracedNode):
            newest = part.name
            nodes.setdefault(newest, []).append(part)
        else:
            assert len(part) * RECORD_BYTES <= PART_BYTES
            spans.setdefault(newest, []).extend(part)
    assert context is not None
    return context, nodes, spans
