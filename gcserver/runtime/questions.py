"""Questions of the supervisor to all of its lanes, and their answers.

What may live here: who was asked, who has answered, giving up. What may not: what is asked (`lanelink.py`), what is
made of the answers (`status.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor


class Questions:
    """Every question has a number, which its answers repeat as ``request``."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        self._last = 0
        #: by number: lanes that have not answered, answers, done
        self._open: dict[int, tuple[set[int], list[Any], asyncio.Future[None]]] = {}

    async def ask(self, question: Callable[[int], Any], patience: float) -> list[Any]:
        """``question(number)`` to every lane that is ready; what has been answered after ``patience`` seconds at most.

        The part of a lane that dies meanwhile, or does not answer, is missing.
        """
        self._last += 1
        number = self._last
        lanes = {lane.index for lane in self._s.lanes.table if lane is not None and lane.ready}
        answers: list[Any] = []
        if not lanes:
            return answers
        done: asyncio.Future[None] = self._s.loop.create_future()
        self._open[number] = (lanes, answers, done)
        for lane in self._s.lanes.table:
            if lane is not None and lane.index in lanes:
                self._s.lanes.send(lane, question(number))
        try:
            await asyncio.wait({done}, timeout=patience)
        finally:
            del self._open[number]
        return answers

    def answered(self, lane: int, message: Any) -> None:
        """A lane's answer; one that comes too late is dropped."""
        waiting = self._open.get(message.request)
        if waiting is None:
            return
        waiting[1].append(message)
        self._done_with(lane, waiting)

    def lane_gone(self, lane: int) -> None:
        """A lane died: it answers nothing it was asked."""
        for waiting in self._open.values():
            self._done_with(lane, waiting)

    def _done_with(self, lane: int, waiting: tuple[set[int], list[Any], asyncio.Future[None]]) -> None:
        lanes, _, done = waiting
        lanes.discard(lane)
        if not lanes and not done.done():
            done.set_result(None)
