"""Traces between supervisors: who is told to record, what is collected, and what happens when somebody is silent.

What may live here: tests of `gcserver/runtime/traces.py` over supervisors whose links, lanes and workers are lists.
What may not: recording (`test_recording.py`), real daemons (`tests/integration/test_admin.py`).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto import wire
from gcproto.manifest import Section, TensorSpec
from gcproto.spans import PART_BYTES, RECORD_BYTES, EndTrace, Kind, Ring, Span, SpansPart, TraceOrder, WorkerSpans
from gcserver.admin.source import AdminError
from gcserver.admin.spans import TraceContext, TracedNode, TraceFirst
from gcserver.core import control_events as cx
from gcserver.core.clocks import ClockSample
from gcserver.runtime import traces
from gcserver.runtime.recording import AskRecord, LaneSpans, RecordSpans
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
        from gcproto.manifest import AddressSpace

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


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PATIENCE", 0.05)
    monkeypatch.setattr(traces, "PEER_PATIENCE", 0.2)


def test_all_lanes_and_workers_of_all_nodes_record_and_hand_over() -> None:
    async def work(a: Node, b: Node) -> None:
        b.spans = 3 * PART_BYTES // RECORD_BYTES // 2  # three parts, of two lanes
        begun = a.traces.start(a.job, 3, 0.0, ())  # type: ignore[arg-type]
        assert begun.nodes == ("a", "b") and "3 steps of each process group of job 'gpt'" in begun.message
        await asyncio.sleep(0)
        for node in (a, b):
            (order,) = node.lane_told
            assert order == RecordSpans(order.number, JOB, 3)
            assert node.told == [(WORKER, TraceOrder(order.number, JOB, 3, 60.0))]
        stopped = await a.traces.stop()
        ours, theirs = stopped.nodes
        assert (ours.name, ours.spans, ours.dropped, ours.clocks) == ("a", 2 * 4 + 2, 2 * 2 + 1, ())
        assert ours.firsts == tuple(TraceFirst(JOB.hex(), 0, first) for first in (3, 3, 4))
        assert (theirs.name, theirs.spans, theirs.reason) == ("b", 2 * b.spans + 2, "")
        assert [(c.offset, c.error) for c in theirs.clocks] == [(7.0, 0.001)] * 2, "at the begin and at the end"
        assert stopped.message == f"{ours.spans + theirs.spans} spans of 2 node(s)"
        again = await a.traces.stop()
        assert again == stopped, "as often as it is asked"
        context, nodes, spans = await everything(a)
        assert (context.node, context.steps) == ("a", 3)
        assert abs(context.wall_clock + time.monotonic() - time.time()) < 1
        assert {n.id: n.name for n in context.nodes} == {wire.node_id(n): n for n in "ab"}
        (group,) = context.domains
        assert (group.job, group.domain, group.job_label, group.label) == (JOB.hex(), 0, "gpt", "ddp.0")
        assert {block.tensor for block in group.blocks} == {"w"}, "the small one is in its block"
        assert nodes == {"a": [ours], "b": [theirs]}
        assert {name: len(found) for name, found in spans.items()} == {"a": 10, "b": 2 * b.spans + 2}
        assert {s.place for s in spans["a"]} == {0, 1, 9}

    run(work)


def test_a_trace_ends_by_itself_and_is_kept() -> None:
    async def work(a: Node, b: Node) -> None:
        a.traces.start(None, 0, 0.02, ("a",))
        assert a.lane_told[0].job == b""
        await asyncio.sleep(0.06)
        assert isinstance(a.lane_told[1], AskRecord) and isinstance(a.told[-1][1], EndTrace)
        assert b.lane_told == [], "not among the nodes"
        (own,) = (await a.traces.stop()).nodes
        assert own.spans == 10
        a.traces.start(None, 0, 0.0, ("a",))  # over, so that the next one may begin

    run(work)


def test_who_does_not_answer_is_named() -> None:
    async def work(a: Node, b: Node) -> None:
        a.workers_answer, a.answering = False, 1
        b.lost = lambda message: isinstance(message, SpansPart)
        a.traces.start(None, 0, 0.0, ())
        await asyncio.sleep(0)
        ours, theirs = (await a.traces.stop()).nodes
        assert ours.absent == ("rank 0 did not answer", "1 lane(s) did not answer") and ours.spans == 4
        assert theirs == TracedNode("b", reason="it does not answer")
        _, nodes, spans = await everything(a)
        assert nodes["b"] == [theirs] and "b" not in spans

    run(work)


def test_a_node_that_falls_silent_in_the_middle_leaves_what_it_sent() -> None:
    async def work(a: Node, b: Node) -> None:
        b.spans = 2 * PART_BYTES // RECORD_BYTES
        a.traces.start(None, 0, 0.0, ())
        await asyncio.sleep(0)
        await a.traces.stop()
        b.lost = lambda message: isinstance(message, SpansPart) and message.offset > 0
        _, nodes, spans = await everything(a)
        whole, cut = nodes["b"]
        assert not whole.reason and cut.reason == "only the first 1024 spans: it does not answer any more"
        assert len(spans["b"]) == 1024

    run(work)


def test_a_node_that_was_started_again_knows_nothing_of_it() -> None:
    async def work(a: Node, b: Node) -> None:
        a.traces.start(None, 0, 0.0, ())
        await asyncio.sleep(0)
        b.traces = Traces(b)  # type: ignore[arg-type]
        _, theirs = (await a.traces.stop()).nodes
        assert theirs.spans == 0 and "it knows nothing of this trace" in theirs.reason

    run(work)


def test_a_node_that_records_for_another_goes_on_with_that() -> None:
    async def work(a: Node, b: Node) -> None:
        b.traces.start(None, 0, 0.0, ("b",))
        a.traces.start(None, 0, 0.0, ())
        await asyncio.sleep(0)
        assert len(b.lane_told) == 1
        ours, theirs = (await a.traces.stop()).nodes
        assert ours.spans == 10 and "it records another one" in theirs.reason
        assert [node.spans for node in (await b.traces.stop()).nodes] == [10]

    run(work)


def test_what_comes_up_meanwhile_is_told_too() -> None:
    async def work(a: Node, b: Node) -> None:
        a.traces.lane_up(SimpleNamespace(index=1))  # type: ignore[arg-type]
        a.traces.worker_up(6, JOB)
        assert not a.lane_told and not a.told, "nothing is traced"
        a.traces.start(a.job, 0, 0.0, ("a",))  # type: ignore[arg-type]
        a.traces.lane_up(SimpleNamespace(index=1))  # type: ignore[arg-type]
        a.traces.worker_up(6, JOB)
        a.traces.worker_up(7, b"o" * 16)
        assert a.lane_told[0] == a.lane_told[1] and [to for to, _ in a.told] == [WORKER, 6]
        (own,) = (await a.traces.stop()).nodes
        assert own.absent == ("lane 1 was started again: what it recorded before that is lost",)

    run(work)


def test_names_of_a_job_that_has_left_are_kept() -> None:
    async def work(a: Node, b: Node) -> None:
        a.job.domains[0].sections.clear()
        a.traces.start(None, 0, 0.0, ("a",))
        a.job.domains[0].sections.append(Section(0, (TensorSpec("late", (4,), 0),)))
        a.traces.declared(JOB)
        # It leaves in good order: with what its worker recorded.
        number = a.told[0][1].number
        a.traces.on_worker(WORKER, WorkerSpans(number, 0, (), data(3, 9)))
        a.machine.jobs.clear()
        (own,) = (await a.traces.stop()).nodes
        assert own.spans == 2 * 4 + 3
        context, _, _ = await everything(a)
        assert [b.tensor for b in context.domains[0].blocks] == ["late"]

    run(work)


def test_what_is_no_answer_is_not_taken() -> None:
    async def work(a: Node, b: Node) -> None:
        a.traces.start(None, 0, 0.0, ())
        await asyncio.sleep(0)
        number = a.told[0][1].number
        a.traces.on_worker(99, WorkerSpans(number, 0, (), data(1)))
        a.traces.on_worker(WORKER, WorkerSpans(number + 1, 0, (), data(1)))
        a.traces.on_worker(WORKER, WorkerSpans(number, 0, (), data(1)[:-1]))
        for _ in range(2):  # the second counts as nothing
            a.traces.on_worker(WORKER, WorkerSpans(number, 0, (), data(1)))
        a.traces.on_peer("b", SpansPart(number, 0, 8, 0, data(1)))
        b.spans, plain = 1, b.feed

        def crooked(event: Any) -> None:
            if isinstance(event.message, SpansPart):
                event = cx.TellPeer(event.peer, SpansPart(number, 0, 99, 0, b"x" * 7))
            plain(event)

        b.feed = crooked  # type: ignore[method-assign]
        ours, theirs = (await a.traces.stop()).nodes
        assert ours.spans == 2 * 4 + 1
        assert theirs == TracedNode("b", reason="what it sends is no trace", clocks=())

    run(work)


def test_refusals() -> None:
    async def work(a: Node, b: Node) -> None:
        for steps, seconds, nodes, part in (
            (-1, 0.0, (), "steps: expected 0 to"),
            (1, 601.0, (), "seconds: expected 0 to 600 seconds, got 601"),
            (1, float("nan"), (), "seconds: expected 0 to 600 seconds, got nan"),
            (1, 1.0, ("z",), "node 'z' is not known or not up; there are: a, b"),
        ):
            with pytest.raises(AdminError, match=part):
                a.traces.start(None, steps, seconds, nodes)
        with pytest.raises(AdminError, match="no trace was started at this node"):
            await a.traces.stop()
        a.traces.start(None, 0, 0.0, ())
        await asyncio.sleep(0)
        with pytest.raises(AdminError, match="started at a is being recorded here"):
            b.traces.start(None, 0, 0.0, ())
        with pytest.raises(AdminError, match="was started at a: ask that node"):
            await b.traces.stop()
        with pytest.raises(AdminError, match="still being recorded"):
            await everything(a)

    run(work)


def test_a_trace_that_made_way_for_the_next_is_forgotten() -> None:
    """Its time would still be running, for minutes, and holds what every lane and worker recorded."""

    async def work(a: Node, b: Node) -> None:
        for _ in range(3):
            a.traces.start(None, 0, 600.0, ())
            await asyncio.sleep(0)
            await a.traces.stop()
        gc.collect()
        kept = [x for x in gc.get_objects() if isinstance(x, traces.Local)]
        assert len(kept) == 2, "of each node the newest"

    run(work)


def test_another_trace_that_begins_while_this_one_is_ended_or_fetched_changes_neither_names_nor_clocks() -> None:
    async def work(a: Node, b: Node) -> None:
        c = Node("c", a.cluster)
        b.spans = 2 * PART_BYTES // RECORD_BYTES
        a.traces.start(None, 0, 0.0, ("b",))
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(a.traces.stop())
        await asyncio.sleep(0)
        c.traces.start(None, 0, 0.0, ("a",))
        stopped = await ending
        assert [(n.name, n.reason, len(n.clocks)) for n in stopped.nodes] == [("a", "", 0), ("b", "", 2)]
        await c.traces.stop()

        a.traces.start(None, 0, 0.0, ("b",))
        await asyncio.sleep(0)
        await a.traces.stop()
        fetched, begun = [], False
        async for part in a.traces.fetch():
            if not begun and isinstance(part, tuple) and len(fetched) > 3:
                a.traces.start(None, 0, 0.0, ("a",))
                begun = True
            fetched.append(part)
        assert sum(len(part) for part in fetched if isinstance(part, tuple)) == 10 + 2 * b.spans + 2

    run(work)


def test_a_node_whose_lane_and_worker_are_silent_still_hands_over_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are waited for at once, so that the asked node's patience outlasts it."""
    monkeypatch.setattr(traces, "PEER_PATIENCE", 2 * traces.PATIENCE)

    async def work(a: Node, b: Node) -> None:
        b.workers_answer, b.answering, plain = False, 1, b._ask

        async def slow(question: Callable[[int], Any], patience: float) -> list[LaneSpans]:
            await asyncio.sleep(patience)
            return await plain(question, patience)

        b.questions.ask = slow
        a.traces.start(None, 0, 0.0, ())
        await asyncio.sleep(0)
        _, theirs = (await a.traces.stop()).nodes
        assert theirs.spans == 4 and theirs.absent == ("rank 0 did not answer", "1 lane(s) did not answer")

    run(work)


def test_clocks_are_noted_when_the_trace_ends_and_not_when_somebody_looks_at_it() -> None:
    async def work(a: Node, b: Node) -> None:
        ahead = 7.0
        a.machine.peers.link = lambda name: SimpleNamespace(
            up=True, clocks=SimpleNamespace(best=lambda now: ClockSample(now, ahead, 0.001))
        )
        a.traces.start(None, 0, 0.02, ())
        await asyncio.sleep(0.06)
        ahead = 99.0  # hours later
        _, theirs = (await a.traces.stop()).nodes
        assert [c.offset for c in theirs.clocks] == [7.0, 7.0]

    run(work)
