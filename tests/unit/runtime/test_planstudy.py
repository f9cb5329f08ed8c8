"""Questions that change no plan, beside plans that are to be made by the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from gcserver.planner.advice import Advice
from gcserver.planner.auto import Wish
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.live import LiveStep
from gcserver.runtime.plannerlink import Advise, Advised, Answer, Plan, Predict, Predicted, Request
from tests.unit.runtime.planned_job import PROFILE, Daemon, Link, run

RULES = (PlannedRule("*", "topk"),)
LINKS = (1e6, 1e7)


class InTurn(Link):
    """Answers one question after the other, as the process does, and each when the others have asked theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = asyncio.Lock()
        self.answered: list[str] = []

    async def ask(self, request: Request) -> Answer:
        async with self.turn:
            await asyncio.sleep(0.001)
            self.answered.append(type(request).__name__)
            if isinstance(request, Advise):
                return Advised(Advice(0.2, (), 0.0, "don't"))
            if isinstance(request, Predict):
                return Predicted(LiveStep(0.3, 1e6, ()))
            return await super().ask(request)


class Asked(Daemon):
    """A daemon that is asked for advice and predictions."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.link = self.planning.study._link = self.planning.facts._link = InTurn()  # type: ignore[assignment]

    def advise(self) -> Coroutine[Any, Any, Any]:
        return self.planning.study.advise(self.job, self.course.standing, self.domain, LINKS)

    def predict(self) -> Coroutine[Any, Any, Any]:
        return self.planning.study.predict(self.domain, PROFILE, RULES)


@pytest.mark.parametrize(("what", "first"), [("advise", ["Measure"]), ("predict", ["Predict"])])
def test_a_plan_waits_for_one_question_of_those_that_wait(tmp_path: Path, what: str, first: list[str]) -> None:
    async def test(d: Asked) -> None:
        studies = [asyncio.ensure_future(getattr(d, what)()) for _ in range(4)]
        await asyncio.sleep(0)
        await d.link.ask(Plan(PROFILE, Wish("fast")))
        assert d.link.answered == [*first, "Plan"]
        await asyncio.gather(*studies)
        assert d.link.answered.count(what.capitalize()) == 4

    run(tmp_path, test, Asked)


def test_a_question_that_fails_leaves_the_next_its_turn(tmp_path: Path) -> None:
    async def test(d: Asked) -> None:
        gone = asyncio.ensure_future(d.predict())
        waits = asyncio.ensure_future(d.predict())
        await asyncio.sleep(0)
        gone.cancel()
        assert await waits
        advice, link = await d.advise()
        assert (advice.verdict, link) == ("don't", PROFILE.link.bandwidth)

    run(tmp_path, test, Asked)
