"""Questions to all lanes: who is waited for, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from gcserver.runtime.questions import Questions

LONG = 600.0


class Daemon:
    """Lanes that note what they are asked: two ready ones, one that starts, one that is away."""

    def __init__(self) -> None:
        lanes = [SimpleNamespace(index=i, ready=i < 2) for i in range(3)]
        self.sent: list[tuple[int, int]] = []
        self.lanes = SimpleNamespace(table=[*lanes, None], send=lambda lane, n: self.sent.append((lane.index, n)))
        self.loop = asyncio.get_running_loop()
        self.questions = Questions(self)  # type: ignore[arg-type]

    async def ask(self, patience: float = LONG) -> asyncio.Task[list[Any]]:
        task = asyncio.ensure_future(self.questions.ask(lambda number: number, patience))
        await asyncio.sleep(0)
        return task

    def answer(self, lane: int, number: int, text: str = "") -> Any:
        message = SimpleNamespace(request=number, text=text)
        self.questions.answered(lane, message)
        return message


def run(test: Callable[[Daemon], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await test(Daemon())

    asyncio.run(all_of_it())


def test_all_ready_lanes_answer() -> None:
    async def test(d: Daemon) -> None:
        first, second = await d.ask(), await d.ask()
        assert d.sent == [(0, 1), (1, 1), (0, 2), (1, 2)]
        b = d.answer(1, 2)
        a = d.answer(0, 1)
        assert not first.done()
        c = d.answer(1, 1)
        assert await first == [a, c]
        last = d.answer(0, 2)
        assert await second == [b, last]

    run(test)


def test_a_lane_that_dies_is_not_waited_for() -> None:
    async def test(d: Daemon) -> None:
        first, second = await d.ask(), await d.ask()
        a = d.answer(0, 1)
        d.questions.lane_gone(1)
        assert await first == [a]
        assert not second.done()
        d.questions.lane_gone(0)
        assert await second == []

    run(test)


def test_a_lane_that_hangs_is_waited_for_so_long() -> None:
    async def test(d: Daemon) -> None:
        asked = await d.ask(0.01)
        a = d.answer(1, 1)
        assert await asked == [a]
        d.answer(0, 1)
        d.questions.lane_gone(0)

    run(test)


def test_without_lanes_there_is_no_answer() -> None:
    async def test(d: Daemon) -> None:
        d.lanes.table = d.lanes.table[2:]
        assert await (await d.ask()) == [] and not d.sent

    run(test)
