"""What an operator said of who makes the plans, at whichever node, and what whoever comes to plan makes of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gcproto.messages import PlanMode
from gcserver.planner.profile import StepTime
from tests.unit.runtime.planned_job import HAND, TOPK, Daemon, proposal, run


def test_what_is_said_here_is_what_all_members_know(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.planning.set_mode(d.job, "lgreco", "")
        assert d.job.said == PlanMode(d.job.id, "lgreco", "", 0), "nobody said what plans may lose"
        d.planning.set_mode(d.job, "", "safe")
        assert d.job.said == PlanMode(d.job.id, "lgreco", "safe", 0, 2)
        d.planning.set_mode(d.job, "static", "")
        assert d.job.said == PlanMode(d.job.id, "static", "safe", 0, 3)
        assert d.course.standing.mode == "static"
        d.again()
        assert (d.course.standing.mode, d.course.standing.quality) == ("static", "safe")

    run(tmp_path, test)


def test_whoever_comes_to_plan_keeps_to_what_an_operator_said_at_another_node(tmp_path: Path) -> None:
    """The job began with `fast`; at the node that is lost somebody said `safe`."""

    async def test(d: Daemon) -> None:
        eldest = d.job.record
        d.plans_at("b")
        assert d.course.standing.quality == "fast"
        d.job.said = PlanMode(d.job.id, "auto", "safe", 0)
        assert (d.course.standing.quality, d.course.standing.chosen) == ("safe", True), "it is told here, too"
        d.newest(TOPK, planned=True)
        d.job.record = eldest
        d.link.proposal = proposal("fp16", 0.3)
        d.steps(StepTime(1, 0.2, 0.01, 9), tolerant=True)
        assert "too lossy for quality safe" in await d.look()
        assert d.link.plans()[-1].wish.quality == "safe"

    run(tmp_path, test)


def test_whoever_plans_already_hears_late_of_what_was_said_at_another_node(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await d.until_plans()
        d.job.said = PlanMode(d.job.id, "espresso", "safe", 0)
        d.planning.tick()
        d.link.gate.set()
        await d.idle()
        assert not d.given, "it was asked for in another mode"
        await d.look()
        assert (d.course.standing.mode, d.link.plans()[-1].wish.quality) == ("espresso", "safe")

    run(tmp_path, test)


def test_plans_of_operators_end_where_the_planner_was_wanted_at_a_node_that_is_lost(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.planning.set_mode(d.job, "static", "")
        assert await d.look() == "" and not d.link.asked
        d.job.said = PlanMode(d.job.id, "auto", "", 0, 2)
        assert (await d.look()).startswith("plan 1")

    run(tmp_path, test)


def test_another_controller_for_rules_that_were_there_does_not_end_the_mode(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.newest(HAND)
        d.planning.set_mode(d.job, "auto", "")
        d.newest(HAND)
        d.job.said = msgspec.structs.replace(d.job.said, since=2)
        d.planning.tick()
        await d.idle()
        assert d.course.standing.mode == "auto"
        d.again()
        d.store.save_planning(d.job.id, b"")
        d.planning.tick()
        assert d.course.standing.mode == "auto", "nor where nothing is known but that"
        await d.idle()

    run(tmp_path, test)


def test_whoever_comes_to_plan_leaves_the_plans_to_operators_who_wanted_them(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.newest(TOPK, planned=True)
        d.job.said = PlanMode(d.job.id, "static", "", 1)
        assert await d.look() == "" and d.course.standing.mode == "static" and not d.link.asked

    run(tmp_path, test)


def test_what_was_saved_before_another_node_planned_is_of_another_time(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.planning.set_mode(d.job, "auto", "fast")
        await d.look()
        d.job.said = PlanMode(d.job.id, "auto", "balanced", 7, 2)
        d.again()
        standing = d.course.standing
        assert (standing.quality, standing.plan, standing.profile) == ("balanced", 0, None)

    run(tmp_path, test)


def test_rules_that_were_being_prepared_when_the_planner_got_the_plans_may_be_planned_away(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.job.numbered = 1  # the members answer yet whether they can run it
        d.planning.set_mode(d.job, "auto", "")
        d.job.numbered = 0
        assert d.newest(HAND) == 1
        d.steps(StepTime(1, 0.4, 0.01, 9))
        assert (await d.look()).startswith("plan 2") and d.course.standing.mode == "auto"
        assert d.course.standing.before.rules == HAND
        d.newest(HAND)
        await d.look()
        assert d.course.standing.mode == "static", "given since then"

    run(tmp_path, test)


def test_with_one_node_what_compresses_goes_whatever_it_gains(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        assert (await d.look()).startswith("plan 1") and d.given == [TOPK]
        d.link.proposal = proposal("none", 0.9)
        d.steps(StepTime(1, 0.2, 0.01, 9), nodes=1)
        said = await d.look()
        assert said.startswith("plan 2") and "there is nobody to exchange with" in said
        d.steps(StepTime(2, 0.9, 0.01, 9), nodes=1)
        for _ in range(3):
            await d.look()
        assert len(d.given) == 2, "and that is that"

    run(tmp_path, test)


def test_with_one_node_what_an_operator_gave_stays(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.newest(TOPK)
        d.planning.set_mode(d.job, "auto", "")
        d.link.proposal = proposal("none", 0.9)
        d.steps(StepTime(1, 0.4, 0.01, 9), nodes=1)
        assert "the plan in force stays" in await d.look() and not d.given

    run(tmp_path, test)


def test_a_job_that_nobody_said_anything_of_begins_as_its_record_says(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.job.record = msgspec.structs.replace(d.job.record, mode="espresso", quality="safe")
        assert (d.course.standing.mode, d.course.standing.quality, d.course.standing.chosen) == (
            "espresso",
            "safe",
            False,
        )

    run(tmp_path, test)
