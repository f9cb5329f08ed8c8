"""Planning that fails: what is said, when it is tried again, and that nothing else ends with it."""

from __future__ import annotations

import time
from pathlib import Path

from gcserver.planner.profile import StepTime
from gcserver.planner.standing import rules_of
from gcserver.runtime.plancourse import DOUBLINGS, RETRY_AFTER
from gcserver.runtime.plannerlink import PlannerError
from gcserver.runtime.unplannable import FAILED
from tests.unit.runtime.planned_job import TOPK, Daemon, proposal, run, second_job


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


def test_what_a_member_refuses_is_left_out_of_the_next_plan(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        def refuse() -> None:
            d.refuse = "b: no room for residuals" if d.given[-1] == TOPK else ""
            d.link.proposal = proposal("none", 0.3)

        d.meanwhile, first = refuse, proposal()
        assert "plan 1 since" in await d.look(), "the next best is not kept waiting"
        refused = {"topk": "b: no room for residuals"}
        assert [p.wish.refused for p in d.link.plans()] == [{}, refused] and d.given == [
            TOPK,
            rules_of(proposal("none")),
        ]
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.3, 0.01, 9))
        await d.look()
        await d.look()
        assert d.link.plans()[-1].wish.refused == refused
        d.link.proposal = first
        d.steps(StepTime(1, 0.3, 0.01, 9), forward=0.3)
        assert "it is the one to choose" in await d.look()
        assert [p.wish.refused for p in d.link.plans()][-2:] == [{}, refused], "of another time, and asked once again"

    run(tmp_path, test)


def test_where_nothing_but_refusals_come_the_last_is_said(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.refuse = "b: no room for anything"
        assert await d.look() == "no plan for now: b: no room for anything"
        assert d.given == [TOPK, TOPK] and d.course.looked > time.monotonic() + RETRY_AFTER - 1

    run(tmp_path, test)


def test_a_job_that_operators_take_over_says_what_of_the_planner_comes_yet(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.meanwhile = lambda: said.append(d.planning.set_mode(d.job, "static", ""))
        said: list[str] = []
        await d.look()
        assert "comes into force first" in said[0]
        assert (d.course.standing.mode, d.job.proposal) == ("static", 1)
        d.meanwhile = lambda: None
        d.planning.set_mode(d.job, "auto", "")
        d.link.proposal = proposal("fp16", 0.3)
        d.steps(StepTime(1, 0.4, 0.01, 9))
        await d.look()
        assert "plan 2, which was tried and is not judged yet, stays" in d.planning.set_mode(d.job, "static", "")
        assert d.planning.set_mode(d.job, "static", "").endswith("the one in force stays")

    run(tmp_path, test)
