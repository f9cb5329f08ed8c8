"""The course of planning a job that nobody else plans for: what is waited for, planned, judged and taken back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gcproto.messages import Rule
from gcserver.planner.auto import Considered, Proposal
from gcserver.planner.course import COMPARED, JUDGED_AFTER, SURE_AFTER
from gcserver.planner.profile import LevelErrors, LinkCost, StepTime
from gcserver.planner.turns import Took
from gcserver.runtime import planwish
from gcserver.runtime.plancourse import AFRESH, HOLD, LINK_SECONDS, LOOK_EVERY
from gcserver.runtime.plannerlink import Measure, PlannerError
from gcserver.runtime.planning import REFUSED
from gcserver.runtime.unplannable import NotPlannable
from tests.unit.runtime.planned_job import PROFILE, TOPK, Daemon, proposal, run


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


def test_a_model_says_what_its_plans_may_lose_until_an_operator_does(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        declared = msgspec.structs.replace(d.domain.declared_as, quality="safe", exclude=("*.bias",), warmup=15)
        d.domain.declared_as, d.domain.config = declared, d.job.configure(declared)
        assert await d.look() == "waits for step 25 of ddp, the largest model, which has made 20"
        d.domain.settled = 25
        await d.look()
        assert (d.link.plans()[0].wish.quality, d.link.plans()[0].wish.exclude) == ("safe", ("b", "*.bias"))
        assert "(auto, safe)" in d.planning.set_mode(d.job, "auto", "")
        assert "(auto, balanced)" in d.planning.set_mode(d.job, "", "balanced")
        await d.look()
        assert d.link.plans()[-1].wish.quality == "balanced"
        d.again()
        assert planwish.quality(d.course.standing, d.domain) == "balanced", "also after a restart"

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


def test_what_comes_close_is_measured_in_turn(tmp_path: Path) -> None:
    """topk takes 0.3 s, qsgd 0.32 s, which is then in force once more, and does not stay."""

    def answers(spec: str) -> Proposal:
        seconds = {"none": 0.4, "topk": 0.3, "qsgd": 0.32}
        others = tuple(Considered(s, t, "") for s, t in seconds.items())
        return msgspec.structs.replace(proposal(spec, 0.3), considered=others)

    async def test(d: Daemon) -> None:
        d.link.proposal = answers("topk")
        await d.look()
        d.steps(StepTime(1, 0.3, 0.01, JUDGED_AFTER))
        await d.look()
        took = (Took("qsgd", 0.32, 0.32), *d.course.standing.took)
        d.course.standing = msgspec.structs.replace(d.course.standing, took=took, considered=len(took))
        d.link.proposal, d.link.error = answers("qsgd"), PlannerError("it died")
        await d.look()
        assert d.course.standing.in_turn == (), "nothing came of it: its turn is yet to come"
        await d.look()
        assert [p.wish.measure for p in d.link.plans()] == ["", "qsgd", "qsgd"]
        standing = d.course.standing
        assert (standing.family, standing.in_turn, standing.before.family) == ("qsgd", ("qsgd",), "topk")
        d.steps(StepTime(1, 0.3, 0.01, 9), StepTime(2, 0.34, 0.01, JUDGED_AFTER))
        d.refuse = "no room"
        await d.look()
        assert d.course.standing.took == took, "noted once, when it is taken back"
        d.refuse = ""
        assert "0.33 and 0.3 s in 2 turns, a gain of -10.0% where -6.0% is wanted: that one is back" in await d.look()
        assert d.given == [TOPK, (Rule("*", "qsgd", "owner"),), TOPK, TOPK]
        assert (d.course.standing.family, d.course.standing.plan) == ("topk", 3)
        d.link.proposal = answers("topk")
        d.steps(StepTime(3, 0.3, 0.01, JUDGED_AFTER))
        await d.look()
        await d.look()
        await d.look()
        assert len(d.given) == 4, "each is in turn once"

    run(tmp_path, test)


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
        assert (standing.plan, standing.before, standing.taken_back) == (2, None, (TOPK,))
        took: dict[str, Any] = {"none": 0.4, "topk": 0.9}
        assert {t.family: t.seconds for t in standing.took} == took, "what dense steps take is known as well"
        await d.look()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.9, 0.01, 9), StepTime(2, 0.405, 0.01, JUDGED_AFTER - 1))
        await d.look()
        assert len(d.link.plans()) == 1, "what is back is measured again first"
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.9, 0.01, 9), StepTime(2, 0.405, 0.01, JUDGED_AFTER))
        await d.look()
        assert "it was tried, and gained too little over the plan in force" in await d.look()
        took["none"] = pytest.approx((0.4 + 0.405) / 2)
        assert [p.wish.took for p in d.link.plans()] == [{}, took], "planned once more, knowing that"
        assert d.link.plans()[-1].wish.step == 0.405
        await d.look()
        assert len(d.link.plans()) == 2 and d.given == [TOPK, ()]
        d.steps(StepTime(2, 0.8, 0.01, 9), forward=0.3)
        assert "plan 3 since" in await d.look()
        assert d.given == [TOPK, (), TOPK]

    run(tmp_path, test)


def test_a_plan_that_is_not_in_force_yet_is_not_compared_with_what_is(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.domain.switches[-1] = (d.domain.settled + 3, 1)
        d.steps(StepTime(0, 0.4, 0.01, 20), forward=0.3)
        d.course.standing = msgspec.structs.replace(d.course.standing, before=None)
        assert "measures steps anew: what was measured has drifted" in await d.look()
        d.domain.settled += 9
        d.steps(StepTime(0, 0.4, 0.01, 20), StepTime(1, 0.2, 0.01, COMPARED), forward=0.3)
        await d.look()
        assert d.link.plans()[-1].wish.step == 0.2

    run(tmp_path, test)


def test_what_takes_longer_than_when_it_was_judged_is_planned_anew(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.2, 0.01, 9))
        await d.look()
        d.steps(StepTime(1, 0.3, 0.01, SURE_AFTER - 1))
        await d.look()
        assert d.course.standing.took and len(d.link.plans()) == 1, "a few steps may be beside a busy neighbour"
        d.steps(StepTime(1, 0.3, 0.01, SURE_AFTER))
        await d.look()
        assert d.link.plans()[-1].wish.took == {} and d.link.plans()[-1].wish.step == 0.3
        await d.look()
        assert [t.seconds for t in d.course.standing.took] == [0.3]
        await d.look()
        assert len(d.link.plans()) == 3, "and once more for what it took, a surprise"
        await d.look()
        assert len(d.link.plans()) == 3

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


def test_a_link_that_recovers_before_it_is_planned_for_has_to_change_once_more(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        slow = LinkCost(1e-4, 1e8, 0.0, 3)
        d.steps(StepTime(0, 0.4, 0.01, 7), link=slow)
        await d.look()
        d.steps(StepTime(1, 0.2, 0.01, 9), link=slow)
        await d.look()
        d.link.proposal = proposal("none", 0.15)
        fast = LinkCost(1e-4, 1e9, 0.0, 3)
        d.steps(StepTime(1, 0.2, 0.01, 200), link=fast)
        assert "measures steps anew" in await d.look()
        d.steps(StepTime(1, 0.2, 0.01, COMPARED), link=slow)
        assert "plan 1 since" in await d.look(), "nothing is waited for any more"
        assert d.course.afresh == 0.0
        d.steps(StepTime(1, 0.2, 0.01, 200), link=fast)
        assert "measures steps anew" in await d.look() and len(d.link.plans()) == 1
        assert d.seen is not None and not d.seen.steps

    run(tmp_path, test)


def test_long_steps_do_not_hold_up_a_plan_until_there_are_four(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(1, 0.2, 0.01, 9))
        await d.look()
        d.link.proposal = proposal("none", 0.15)
        d.steps(StepTime(1, 0.2, 0.01, 200), link=LinkCost(1e-4, 1e9, 0.0, 3))
        await d.look()
        d.course.afresh -= AFRESH + 1
        assert "measures steps anew" in await d.look(), "one has to be known, or nothing could be compared"
        d.steps(StepTime(1, 90.0, 0.0, 1), link=LinkCost(1e-4, 1e9, 0.0, 3))
        assert "plan 2 since" in await d.look()

    run(tmp_path, test)


def test_a_slow_link_that_nothing_was_heard_of_holds_up_the_first_plan_for_half_a_minute(tmp_path: Path) -> None:
    """Thirty steps over it may take ten minutes, and it is there that a plan is missed most."""

    async def test(d: Daemon) -> None:
        assert d.seen is not None
        d.seen = msgspec.structs.replace(d.seen, link=LinkCost(1e-4, 1.25e8))
        for _ in range(2):
            assert await d.look() == "waits until the link has been measured"
        d.course.link_since -= LINK_SECONDS + 1
        assert "plan 1 since" in await d.look()

    run(tmp_path, test)


def test_gradients_are_looked_at_again_only_where_they_may_have_changed(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.link.proposal = proposal("none", 0.39)

        async def looks_at(settled: int, **known: tuple[LevelErrors, ...]) -> bool:
            d.domain.settled = settled
            d.steps(StepTime(0, 0.4, 0.01, 9), forward=2.0 ** len(d.link.asked), errors=known)
            await d.look()
            return [r.errors for r in d.link.asked if isinstance(r, Measure)][-1]

        small, large = (LevelErrors(t.name, (1, 2), (0.2, 0.1), (1.0, 2.0)) for t in PROFILE.tensors)
        assert await looks_at(20)
        assert not await looks_at(20 + HOLD - 1, topk=(large,)), "a plan that is tried"
        assert await looks_at(20 + HOLD, topk=(large,))
        assert await looks_at(21 + HOLD, topk=(small,)), "of the large tensor nothing is known"
        assert not await looks_at(22 + HOLD, topk=(small,)), "nor was it after that look: it may never be finite"
        assert not await looks_at(2 * (21 + HOLD) - 1, topk=(large,))
        assert await looks_at(2 * (21 + HOLD), topk=(large,)), "twice as many"
        await d.planning.replan(d.job)
        assert d.link.asked[-2].errors, "an operator wants a plan of now"

    run(tmp_path, test)


def test_a_good_plan_is_kept(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.2, 0.01, 9))
        assert await d.look() == "plan 1 since step 22: topk it is"
        assert d.course.standing.before is None and d.given == [TOPK]
        assert d.course.looked == 0.0, "whether another plan is to be tried is seen at the next tick"
        d.planning.tick()
        await d.idle()
        assert d.course.looked > 0.0 and d.given == [TOPK]

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


def test_a_plan_that_cannot_be_taken_back_for_good_holds_up_no_other(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.look()
        d.steps(StepTime(1, 0.9, 0.01, 9))
        d.refuse = "no codec like that any more"
        for _ in range(REFUSED - 1):
            await d.look()
        assert d.course.standing.before is not None
        await d.look()
        assert d.course.standing.before is None and len(d.link.plans()) == 1
        d.refuse, d.link.proposal = "", proposal("none", 0.4)
        assert "plan 2 since" in await d.look(), "another one that is better"

    run(tmp_path, test)
