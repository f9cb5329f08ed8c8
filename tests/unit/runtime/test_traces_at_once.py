"""Several traces, or several who fetch one, at once: none takes anything from another.

What may live here: such tests of `gcserver/runtime/traces.py`. What may not: one trace by itself (`test_traces.py`).
"""

from __future__ import annotations

import asyncio

import pytest

from gcproto.spans import PART_BYTES, RECORD_BYTES, AskSpans, SpansPart
from gcserver.runtime import traces
from tests.unit.runtime.traced_nodes import Node, run


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PATIENCE", 0.05)


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


def test_parts_that_are_asked_for_at_once_are_all_answered() -> None:
    """By two operators who fetch the same trace, the one ahead of the other."""

    async def work(a: Node, b: Node) -> None:
        b.spans = 2 * PART_BYTES // RECORD_BYTES
        a.traces.start(None, 0, 0.0, ())
        await asyncio.sleep(0)
        await a.traces.stop()
        number = a.told[0][1].number
        said: list[SpansPart] = []
        a.traces.on_peer = lambda peer, message: said.append(message)  # type: ignore[method-assign, assignment]
        for offset in (0, 0, PART_BYTES):
            b.traces.on_peer("a", AskSpans(number, offset))
        await asyncio.sleep(0.01)
        assert sorted(part.offset for part in said) == [0, PART_BYTES], "each once"

    run(work)
