"""Traces between supervisors: who is told to record, what is collected, and what happens when somebody is silent.

What may live here: tests of `gcserver/runtime/traces.py` over supervisors whose links, lanes and workers are lists.
What may not: recording (`test_recording.py`), real daemons (`tests/integration/test_admin.py`).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto import wire
from gcproto.manifest import Section, TensorSpec
from gcproto.spans import (
    PART_BYTES,
    RECORD_BYTES,
    EndTrace,
    SpansPart,
    TraceOrder,
    WorkerSpans,
)
from gcserver.admin.source import AdminError
from gcserver.admin.spans import TracedNode, TraceFirst
from gcserver.core import control_events as cx
from gcserver.core.clocks import ClockSample
from gcserver.runtime import traces
from gcserver.runtime.recording import AskRecord, LaneSpans, RecordSpans
from gcserver.runtime.traces import Traces
from tests.unit.runtime.traced_nodes import JOB, WORKER, Node, data, everything, run


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PATIENCE", 0.05)


async def ended(node: Node) -> None:
    """Until its lanes were asked for what they recorded, by the trace's own timer."""
    while len(node.lane_told) < 2:
        await asyncio.sleep(0.005)


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
        await ended(a)
        assert isinstance(a.lane_told[1], AskRecord) and isinstance(a.told[-1][1], EndTrace)
        assert b.lane_told == [], "not among the nodes"
        (own,) = (await a.traces.stop()).nodes
        assert own.spans == 10
        a.traces.start(None, 0, 0.0, ("a",))  # over, so that the next one may begin

    run(work)


def test_who_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PEER_PATIENCE", 1.0)

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


def test_a_node_that_falls_silent_in_the_middle_leaves_what_it_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PEER_PATIENCE", 1.0)

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


@pytest.mark.parametrize("back", [True, False])
def test_a_worker_whose_connection_broke_is_asked_when_it_is_back(back: bool) -> None:
    async def work(a: Node, b: Node) -> None:
        a.traces.start(a.job, 0, 0.0, ("a",))  # type: ignore[arg-type]
        number = a.told[0][1].number
        a.job.workers[0] = None
        ending = asyncio.ensure_future(a.traces.stop())
        while a.traces._local is None or not a.traces._local.awaited:
            await asyncio.sleep(0)
        assert len(a.told) == 1, "nobody is there to be asked"
        if back:
            a.job.workers[0], a.machine.connections[6] = 6, (JOB, 0)
            a.traces.worker_up(6, JOB)
            assert a.told[1:] == [(6, EndTrace(number))]
        (own,) = (await ending).nodes
        assert own.spans == 2 * 4 + (2 if back else 0)
        assert own.absent == (() if back else ("rank 0 did not answer",))

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


def test_a_node_whose_lane_and_worker_are_silent_still_hands_over_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are waited for at once, so that the asked node's patience outlasts it."""
    monkeypatch.setattr(traces, "PATIENCE", 0.5)
    monkeypatch.setattr(traces, "PEER_PATIENCE", 2 * 0.5)

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
        await ended(a)
        ahead = 99.0  # hours later
        _, theirs = (await a.traces.stop()).nodes
        assert [c.offset for c in theirs.clocks] == [7.0, 7.0]

    run(work)


def test_what_was_recorded_by_a_clock_that_is_not_known_is_not_handed_over() -> None:
    async def work(a: Node, b: Node) -> None:
        a.machine.peers.link = lambda name: SimpleNamespace(up=True, clocks=SimpleNamespace(best=lambda now: None))
        a.traces.start(None, 0, 0.0, ())
        await asyncio.sleep(0)
        stopped = await a.traces.stop()
        assert stopped.message == "10 spans of 1 node(s); nothing of 1"
        _, nodes, spans = await everything(a)
        (theirs,) = nodes["b"]
        assert "no round trip to it was measured" in theirs.reason and "b" not in spans

    run(work)


def test_of_many_workers_that_come_and_go_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_WORKERS", 2)

    async def work(a: Node, b: Node) -> None:
        a.traces.start(None, 0, 0.0, ("a",))
        number = a.told[0][1].number
        for i in range(4):
            a.machine.connections[100 + i] = (bytes([i]) * 16, 0)
            a.traces.on_worker(100 + i, WorkerSpans(number, 1, (), data(3, 10 + i)))
        a.workers_answer, a.job.workers[0] = False, None
        (own,) = (await a.traces.stop()).nodes
        _, _, spans = await everything(a)
        assert {s.place for s in spans["a"]} == {0, 1, 12, 13} and own.dropped == 2 * 2 + 2 * (3 + 1) + 2

    run(work)
