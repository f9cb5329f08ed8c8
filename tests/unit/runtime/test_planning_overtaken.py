"""What comes between a plan that is being made, or is in force, and what planning wants: rules, modes, other plans."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gcserver.planner.profile import StepTime
from gcserver.runtime.plancourse import RETRY_AFTER
from tests.unit.runtime.planned_job import HAND, TOPK, Daemon, run


def test_an_operators_rules_win_over_a_plan_under_way(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.until_plans()
        d.newest(HAND)
        d.link.gate.set()
        await d.idle()
        assert not d.given and d.course.standing.mode == "static" and d.course.says == ""
        await d.look()
        assert len(d.link.plans()) == 1

    run(tmp_path, test)


@pytest.mark.parametrize("here", [False, True])
def test_an_operators_rules_are_not_taken_back(tmp_path: Path, here: bool) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.9, 0.01, 9))
        d.course.looked = 0.0
        d.planning.tick()
        assert d.course.task is not None, "the planner's plan is to be taken back"
        d.newest(HAND)
        if here:
            d.planning.by_hand(d.job)
        await d.idle()
        assert d.given == [TOPK] and d.course.standing.mode == "static" and d.course.says == ""

    run(tmp_path, test)


def test_an_operators_rules_win_over_a_plan_that_is_on_its_way(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        given = d.set_plan

        async def overtaken(job: str, rules: Any, replace: bool, **more: Any) -> Any:
            answer = await given(job, rules, replace, **more)
            d.newest(HAND)
            return answer

        d.set_plan = overtaken  # type: ignore[method-assign]
        assert await d.look() == ""
        assert d.given == [TOPK] and d.course.standing.mode == "static"

    run(tmp_path, test)


def test_a_plan_waits_while_members_prepare_another(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.job.preparing = {1: {"b"}}
        assert await d.look() == "no plan for now: the members prepare another plan"
        assert d.course.looked < time.monotonic() + RETRY_AFTER - 1 and not d.given
        d.job.preparing = {}
        assert (await d.look()).startswith("plan 1")

    run(tmp_path, test)


def test_rules_given_at_another_node_or_by_an_audit_are_noticed(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.newest(HAND)
        d.planning.tick()
        assert d.course.standing.mode == "static", "at once, not only when it is time to look"
        d.planning.set_mode(d.job, "auto", "safe")
        d.steps(StepTime(2, 0.4, 0.01, 9))
        assert (await d.look()).startswith("plan 3"), "from the operator's rules on"
        assert d.course.standing.before.rules == HAND and d.link.plans()[-1].wish.quality == "safe"

    run(tmp_path, test)


def test_a_change_of_mode_drops_the_plan_under_way(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.until_plans()
        assert "espresso" in d.planning.set_mode(d.job, "espresso", "")
        d.link.gate.set()
        await d.idle()
        assert not d.given and "changed meanwhile" in d.course.says
        await d.look()
        assert d.link.plans()[-1].wish.parts == {"espresso"} and d.given == [TOPK]
        assert "operators" in d.planning.set_mode(d.job, "static", "")
        assert d.course.standing.forecast_plan == 1, "what was expected of the plan in force is still told"

    run(tmp_path, test)


def test_the_same_mode_again_plans_anew_but_knows_a_plan_on_its_way(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.meanwhile = lambda: d.planning.set_mode(d.job, "auto", "") and None
        assert await d.look() == "", "what comes into force is of another time"
        d.meanwhile = lambda: None
        standing = d.course.standing
        assert (standing.mode, standing.rules, standing.plan, standing.profile) == ("auto", TOPK, 1, None)
        assert "it is the one to choose" in await d.look()
        d.planning.set_mode(d.job, "auto", "")
        assert "it is the one to choose" in await d.look()
        assert len(d.link.plans()) == 3 and d.given == [TOPK]

    run(tmp_path, test)


def test_the_same_mode_again_drops_a_plan_that_is_taken_back(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.9, 0.01, 9))
        d.course.looked = 0.0
        d.planning.tick()
        assert d.course.task is not None
        d.planning.set_mode(d.job, "auto", "")
        await d.idle()
        assert "changed meanwhile" in d.course.says and d.given == [TOPK]
        assert (d.course.standing.taken_back, d.course.standing.took) == ((), ())

    run(tmp_path, test)


def test_who_gives_the_plans_to_the_planner_after_rules_were_given_has_the_last_word(tmp_path: Path) -> None:
    """An operator's rules wait for their step, and another one wants the planner meanwhile."""

    async def test(d: Daemon) -> None:
        changes = d.course.changes
        d.planning.set_mode(d.job, "auto", "")
        d.planning.by_hand(d.job, changes)
        assert d.course.standing.mode == "auto"
        d.planning.by_hand(d.job, d.course.changes)
        assert d.course.standing.mode == "static"

    run(tmp_path, test)
