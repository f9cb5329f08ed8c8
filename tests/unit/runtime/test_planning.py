"""The course of planning a job: what is waited for, planned, judged, taken back, and what overtakes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gcserver.planner.course import COMPARED
from gcserver.planner.profile import LinkCost, StepTime
from gcserver.runtime.plancourse import AFRESH, DOUBLINGS, LOOK_EVERY, RETRY_AFTER
from gcserver.runtime.plannerlink import Measure, PlannerError
from gcserver.runtime.planning import FAILED, NotPlannable
from tests.unit.runtime.planned_job import HAND, TOPK, Daemon, proposal, second_job

Test = Callable[[Daemon], Awaitable[None]]


def run(folder: Path, test: Test, **more: Any) -> None:
    async def all_of_it() -> None:
        await test(Daemon(folder, **more))

    asyncio.run(all_of_it())


def test_a_job_is_planned_when_it_is_warm_and_measured(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        sections, d.domain.sections = d.domain.sections, []
        assert await d.look() == "waits for a model to be declared"
        d.domain.sections, d.domain.settled = sections, 9
        assert await d.look() == "waits for step 10 of ddp, the largest model, which has made 9"
        d.domain.settled = 0
        assert await d.look() == "waits for step 10 of ddp, the largest model, which has made none yet"
        d.domain.settled, seen, d.seen = 10, d.seen, None
        assert await d.look() == "waits until the gradients of ddp have been timed"
        assert d.course.looked == 0.0 and not d.link.asked
        d.seen = seen
        assert await d.look() == "plan 1 since step 12: topk it is"
        measure, plan = d.link.asked
        assert isinstance(measure, Measure) and (measure.errors, measure.caches) == (True, "")
        assert (plan.wish.quality, plan.wish.exclude, len(plan.wish.parts)) == ("fast", ("b",), 3)
        assert d.given == [TOPK]
        standing = d.course.standing
        assert (standing.plan, standing.rules, standing.before.rules) == (1, TOPK, ())
        assert standing.before.step == StepTime(0, 0.4, 0.01, 7)
        await d.look()
        assert len(d.link.plans()) == 1, "once"

    run(tmp_path, test)


def test_a_plan_that_gains_too_little_is_not_put_in_force(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.link.proposal = proposal("none", 0.39)
        assert "the plan in force stays" in await d.look()
        assert not d.given and d.course.standing.proposal == d.link.proposal
        assert d.course.standing.forecast_plan == 0

    run(tmp_path, test)


def test_nothing_is_planned_where_operators_or_another_node_do(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        assert not d.link.asked
        d.planning.set_mode(d.job, "auto", "")
        d.plans_at("b")
        await d.look()
        assert not d.link.asked
        with pytest.raises(NotPlannable, match="b plans for job 'train': ask its daemon"):
            d.planning.set_mode(d.job, "static", "")
        with pytest.raises(NotPlannable, match="b plans"):
            await d.planning.replan(d.job)
        d.planning.by_hand(d.job)
        assert d.course.standing.mode == "auto", "that node notices by itself"

    run(tmp_path, test, mode="static")


def test_a_slower_plan_is_taken_back_and_not_tried_again_until_a_drift(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.9, 0.01, 5))
        await d.look()
        assert d.given == [TOPK], "too few steps"
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.9, 0.01, 9))
        assert "took 0.9 s a step" in await d.look()
        assert d.given == [TOPK, ()]
        standing = d.course.standing
        assert (standing.plan, standing.before, standing.taken_back) == (0, None, (TOPK,))
        assert "slower than the plan in force when it was tried" in await d.look()
        assert [p.wish.took for p in d.link.plans()] == [{}, {"topk": 0.9}], "planned once more, knowing that"
        await d.look()
        assert len(d.link.plans()) == 2 and d.given == [TOPK, ()]
        d.steps(StepTime(2, 0.8, 0.01, 9), forward=0.3)
        assert "plan 3 since" in await d.look()
        assert d.given == [TOPK, (), TOPK]

    run(tmp_path, test)


def test_a_plan_for_another_link_is_compared_with_steps_over_that_link(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.2, 0.01, 9))
        await d.look()
        # The link recovers; of 200 steps all but a few were made before.
        d.link.proposal = proposal("none", 0.15)
        fast = LinkCost(1e-4, 1e9, 0.0, 3)
        d.steps(StepTime(1, 0.2, 0.01, 200), link=fast)
        assert (await d.look()).startswith("measures steps anew: what was measured has drifted")
        assert d.seen is not None and not d.seen.steps and len(d.link.plans()) == 1
        d.steps(StepTime(1, 0.19, 0.01, COMPARED - 1), link=fast)
        assert "measures steps anew" in await d.look()
        d.steps(StepTime(1, 0.19, 0.01, COMPARED), link=fast)
        assert "plan 2 since" in await d.look()
        assert d.link.plans()[-1].wish.step == 0.19
        assert d.course.afresh == 0.0 and d.course.standing.before.step.seconds == 0.19

    run(tmp_path, test)


def test_steps_that_do_not_come_hold_up_no_plan_for_ever(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(1, 0.2, 0.01, 9))
        await d.look()
        d.link.proposal = proposal("none", 0.15)
        d.steps(StepTime(1, 0.2, 0.01, 200), link=LinkCost(1e-4, 1e9, 0.0, 3))
        await d.look()
        d.course.afresh -= AFRESH + 1
        assert "plan 2 since" in await d.look()

    run(tmp_path, test)


def test_a_good_plan_is_kept(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.2, 0.01, 9))
        assert await d.look() == "plan 1 since step 22: topk it is"
        assert d.course.standing.before is None and d.given == [TOPK]

    run(tmp_path, test)


def test_a_plan_that_cannot_be_taken_back_is_tried_again(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(1, 0.9, 0.01, 9))
        d.refuse = "no codec like that any more"
        assert await d.look() == "no plan for now: no codec like that any more"
        assert d.course.looked > time.monotonic() + LOOK_EVERY
        assert d.course.standing.plan == 1 and d.course.standing.before is not None
        d.refuse = ""
        assert "that one is back" in await d.look()
        assert d.given == [TOPK, (), ()]

    run(tmp_path, test)


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

        async def overtaken(job: str, rules: Any, replace: bool) -> Any:
            answer = await given(job, rules, replace)
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
        assert (await d.look()).startswith("plan 1")
        d.meanwhile = lambda: None
        assert d.course.standing.mode == "auto" and d.course.standing.rules == TOPK
        await d.look()
        assert len(d.link.plans()) == 1 and d.course.standing.plan == 1
        d.planning.set_mode(d.job, "auto", "")
        assert "it is the one to choose" in await d.look()
        assert len(d.link.plans()) == 2 and d.given == [TOPK]

    run(tmp_path, test)


def test_a_restart_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.planning.set_mode(d.job, "lgreco", "safe")
        await d.look()
        before = d.course.standing
        d.again()
        assert d.course.standing == before and before.plan == 1
        d.steps(StepTime(1, 0.9, 0.01, 9))
        assert "that one is back" in await d.look(), "judged by what an earlier life measured"
        d.planning.by_hand(d.job)
        d.again()
        assert (d.course.standing.mode, d.course.standing.quality) == ("static", "safe")

    run(tmp_path, test)


def test_a_restart_while_a_plan_is_on_its_way_knows_it_as_its_own(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        old = d.planning
        d.meanwhile = d.again
        old.tick()
        task = old.course(d.job).task
        assert task is not None
        await asyncio.wait({task})
        assert d.planning is not old and d.job.proposal == 1
        await d.look()
        assert (d.course.standing.mode, d.course.standing.plan) == ("auto", 1)

    run(tmp_path, test)


@pytest.mark.parametrize("saved", [b"\xc1 of another release", b"\x81\xa4mode\xa1\xff"])
def test_what_cannot_be_read_begins_anew(tmp_path: Path, saved: bytes) -> None:
    async def test(d: Daemon) -> None:
        d.store.save_planning(d.job.id, saved)
        assert d.course.standing.mode == "auto"
        d.newest(HAND)
        await d.look()
        assert d.course.standing.mode == "static", "nobody knows whose those rules are"

    run(tmp_path, test)


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.store.directory(d.job.id).rmdir()
        assert (await d.look()).startswith("plan 1")
        assert any("cannot be saved" in w for w in d.warnings)

    run(tmp_path, test)


def test_no_answer_is_said_and_asked_again_later(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.link.error = PlannerError("no answer to Plan within 120 s")
        assert await d.look() == "no plan for now: no answer to Plan within 120 s"
        d.planning.tick()
        assert d.course.task is None, "not at once"
        assert (await d.look()).startswith("plan 1")

    run(tmp_path, test)


def test_what_fails_again_and_again_is_tried_ever_less_often(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        waits = []
        for _ in range(DOUBLINGS + 3):
            d.link.error = PlannerError("no answer to Plan within 120 s")
            await d.look()
            waits.append(round((d.course.looked - time.monotonic()) / RETRY_AFTER))
        assert waits == [*(2**i for i in range(DOUBLINGS + 1)), 2**DOUBLINGS, 2**DOUBLINGS]
        assert (await d.look()).startswith("plan 1")
        d.planning.set_mode(d.job, "auto", "")
        d.link.error = PlannerError("killed")
        await d.look()
        assert d.course.looked < time.monotonic() + RETRY_AFTER + 1, "what succeeded is forgiven"

    run(tmp_path, test)


def test_a_defect_ends_neither_the_clock_nor_other_jobs(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.link.error = KeyError("a defect in planning")
        assert await d.look() == FAILED
        seen = d.profiler.profile
        d.profiler.profile = lambda *a, **b: 1 / 0
        other = second_job(d)
        assert await d.look() == FAILED
        assert d.planning.course(other).says == "waits for a model to be declared"
        d.profiler.profile = seen
        assert (await d.look()).startswith("plan 1")

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
