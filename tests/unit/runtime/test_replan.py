"""A plan that an operator asks for: the answer, refusals, and whoever stops waiting for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gcserver.planner.profile import StepTime
from gcserver.runtime.plannerlink import PlannerError
from gcserver.runtime.unplannable import NotPlannable
from tests.unit.runtime.planned_job import TOPK, Daemon, run


def test_replan(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        first = asyncio.ensure_future(d.planning.replan(d.job))
        await asyncio.sleep(0)
        with pytest.raises(NotPlannable, match="right now"):
            await d.planning.replan(d.job)
        answer = await first
        assert answer is not None and answer.plan == 1
        assert await d.planning.replan(d.job) is None
        assert "it is the one to choose" in d.course.says
        d.link.error = PlannerError("killed")
        with pytest.raises(PlannerError, match="killed"):
            await d.planning.replan(d.job)
        assert d.course.says == "no plan for now: killed" and d.course.task is None
        d.seen = None
        with pytest.raises(NotPlannable, match="too little"):
            await d.planning.replan(d.job)
        d.planning.by_hand(d.job)
        with pytest.raises(NotPlannable, match="--mode auto"):
            await d.planning.replan(d.job)

    run(tmp_path, test)


def test_what_was_learned_before_a_drift_says_nothing_after_it(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.3, 0.01, 9))
        await d.look()
        await d.look()
        assert d.link.plans()[-1].wish.took == {"none": 0.4, "topk": 0.3}
        await d.planning.replan(d.job)
        assert d.link.plans()[-1].wish.took == {"none": 0.4, "topk": 0.3}, "nothing has drifted"
        d.steps(StepTime(1, 0.3, 0.01, 9), forward=0.3)
        await d.planning.replan(d.job)
        assert d.link.plans()[-1].wish.took == {}

    run(tmp_path, test)


def test_whoever_stops_waiting_for_a_plan_gets_it_all_the_same(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.link.gate.clear()
        asked = asyncio.ensure_future(d.planning.replan(d.job))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait({asked})
        d.link.gate.set()
        await d.idle()
        assert asked.cancelled() and d.given == [TOPK]

    run(tmp_path, test)


def test_a_job_that_ends_takes_its_planning_along(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.link.gate.clear()
        asked = asyncio.ensure_future(d.planning.replan(d.job))
        await asyncio.sleep(0)
        d.planning.forget_job(d.job.id)
        with pytest.raises(NotPlannable, match="the job ended"):
            await asked
        d.planning.tick()
        task = d.course.task
        await d.planning.close()
        await asyncio.wait({task})
        assert task.cancelled() and not d.given

    run(tmp_path, test)
