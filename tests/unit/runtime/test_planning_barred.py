"""A job whose plan in force may not be any more: sparsifiers that the optimizer may not stand, and what a quality that
was lowered does not take. They go at once, and nothing brings them back.

What may live here: that course of `planning.py`. What may not: the rule (`tests/unit/planner/test_tolerance.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gcproto.agreed import Resumed
from gcproto.messages import Rule
from gcserver.planner.profile import StepTime
from gcserver.runtime.resolve import resolve
from tests.unit.runtime.planned_job import HAND, TOPK, Daemon, proposal, run

Q4 = (Rule("*", "qsgd(bits=4)", "owner"),)
Q8 = (Rule("*", "qsgd(bits=8)", "owner"),)


async def _sparse(d: Daemon) -> None:
    """A sparsifier is in force, with an optimizer that stands it."""
    d.planning.set_mode(d.job, "auto", "balanced")
    d.steps(StepTime(0, 0.4, 0.01, 9), tolerant=True)
    assert (await d.look()).startswith("plan 1") and d.given == [TOPK]


def test_a_sparsifier_on_trial_is_replaced_by_what_is_slower_and_stays_away(tmp_path: Path) -> None:
    async def test(d: Any) -> None:
        await _sparse(d)
        d.domain.settled += 3
        d.link.proposal = proposal("qsgd(bits=4)", 0.8)
        d.steps(StepTime(0, 0.4, 0.01, 9), StepTime(1, 0.2, 0.01, 4))
        said = await d.look()
        assert said.startswith("plan 2") and "sparsifiers have to go" in said and d.given == [TOPK, Q4]
        assert d.course.standing.before is None, "it is not judged by the steps of what had to go"
        d.domain.settled += 30
        d.steps(StepTime(0, 0.4, 0.01, 9), StepTime(1, 0.2, 0.01, 4), StepTime(2, 0.8, 0.01, 30))
        for _ in range(3):
            await d.look()
        assert d.given == [TOPK, Q4] and len(d.link.plans()) <= 3, "nor is it planned again and again"

    run(tmp_path, test)


def test_nothing_gives_way_to_what_may_not_be_in_force_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A quantiser on trial beside a sparsifier is slower, and the optimizer is another one by then."""

    async def test(d: Daemon) -> None:
        await _sparse(d)
        d.link.proposal = proposal("qsgd(bits=4)", 0.1)
        d.steps(StepTime(1, 0.2, 0.01, 30), tolerant=True)
        await d.look()
        await d.planning.replan(d.job)
        assert d.given == [TOPK, Q4] and d.course.standing.before is not None
        d.steps(StepTime(1, 0.2, 0.01, 30), StepTime(2, 0.8, 0.01, 30))
        caplog.set_level("INFO", "gcserver")
        await d.look()
        assert "plan 2 stays: what it would give way to" in caplog.text and "is back" not in caplog.text
        assert d.given == [TOPK, Q4] and d.course.standing.before is None, "it stays, and is known by what it takes"
        assert d.course.standing.took[-1].seconds == 0.8

    run(tmp_path, test)


def test_what_has_to_go_does_not_wait_for_steps_to_compare_with(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        await _sparse(d)
        d.link.proposal = proposal("qsgd(bits=4)", 0.8)
        d.steps(StepTime(0, 0.4, 0.01, 9))
        assert "sparsifiers have to go" in await d.look() and d.given == [TOPK, Q4], "plan 1 has made no step yet"

    run(tmp_path, test)


def test_a_model_that_may_lose_less_declared_meanwhile_is_planned_for(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.planning.set_mode(d.job, "auto", "")
        d.link.proposal = proposal("qsgd(bits=4)", 0.2)
        d.steps(StepTime(0, 0.4, 0.01, 9))
        await d.until_plans()
        d.domain.declared_as = msgspec.structs.replace(d.domain.declared_as, quality="safe")
        d.link.gate.set()
        await d.idle()
        assert not d.given and "another model was declared" in d.course.says
        d.link.proposal = proposal("qsgd(bits=8)", 0.25)
        await d.look()
        assert d.given == [Q8] and d.link.plans()[-1].wish.quality == "safe"

    run(tmp_path, test)


def test_an_operators_sparsifier_goes_once_the_planner_has_the_job(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.newest(TOPK)
        d.planning.by_hand(d.job)
        d.steps(StepTime(1, 0.2, 0.01, 30))
        await d.look()
        assert not d.given, "an operator's word comes first"
        d.planning.set_mode(d.job, "auto", "balanced")
        d.link.proposal = proposal("qsgd(bits=4)", 0.8)
        assert "sparsifiers have to go" in await d.look() and d.given == [Q4]

    run(tmp_path, test)


def test_other_codecs_of_an_operator_stay_where_nothing_is_faster(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.newest(HAND)
        d.planning.set_mode(d.job, "auto", "balanced")
        d.steps(StepTime(1, 0.2, 0.01, 30))
        d.link.proposal = proposal("qsgd(bits=4)", 0.8)
        assert "stays" in await d.look() and not d.given

    run(tmp_path, test)


@pytest.mark.parametrize("steered", [True, False])
@pytest.mark.parametrize("planned", [True, False])
def test_what_a_checkpoint_brought_goes_only_where_a_planner_had_made_it(
    tmp_path: Path, planned: bool, steered: bool
) -> None:
    """``steered``: a plan that only names a controller came since; its rules are those there were."""

    async def test(d: Daemon) -> None:
        d.job.resolve = resolve
        resumed = Resumed(b"o", 5, (), Q4, planned=planned)
        d.domain.declared_as = msgspec.structs.replace(d.domain.declared_as, resumed=resumed)
        version = d.newest(Q4, planned=planned) if steered else 0
        d.planning.set_mode(d.job, "auto", "safe")
        d.steps(StepTime(version, 0.2, 0.01, 30))
        d.link.proposal = proposal("qsgd(bits=8)", 0.8)
        said = await d.look()
        assert ("stays" in said, d.given) == (not planned, [Q8] if planned else [])

    run(tmp_path, test)


def test_a_lower_quality_takes_the_lossier_plan_away_though_that_is_faster(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.job.resolve = resolve
        d.newest(Q4, planned=True)
        d.planning.set_mode(d.job, "auto", "safe")
        d.steps(StepTime(1, 0.2, 0.01, 30))
        d.link.proposal = proposal("qsgd(bits=8)", 0.25)
        said = await d.look()
        assert "qsgd(bits=4) has to go: quality safe takes bits from 8 on" in said and d.given == [Q8]
        assert d.course.standing.before is None, "it is not judged by the steps of what had to go"
        d.domain.settled += 30
        d.steps(StepTime(1, 0.2, 0.01, 30), StepTime(2, 0.25, 0.01, 30))
        for _ in range(3):
            await d.look()
        assert d.given == [Q8] and len(d.link.plans()) <= 2, "nor is it planned again and again"

    run(tmp_path, test)


def test_an_operators_codec_that_came_back_stays_though_the_planner_would_not_take_it(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.job.resolve = resolve
        strong = (Rule("*", "topk(ratio=0.001)"),)
        d.newest(strong)
        d.planning.set_mode(d.job, "auto", "balanced")
        d.steps(StepTime(1, 0.3, 0.01, 30), tolerant=True)
        d.link.proposal = proposal("qsgd(bits=4)", 0.2)
        await d.look()
        d.domain.settled += 30
        d.steps(StepTime(1, 0.3, 0.01, 30), StepTime(2, 0.5, 0.01, 30), tolerant=True)
        assert "that one is back" in await d.look() and d.given == [Q4, strong]
        d.domain.settled += 30
        d.steps(StepTime(2, 0.5, 0.01, 30), StepTime(3, 0.3, 0.01, 30), tolerant=True)
        for _ in range(3):
            await d.look()
        assert d.given == [Q4, strong]

    run(tmp_path, test)


def test_a_quality_lowered_while_a_plan_comes_into_force_is_planned_for(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.job.resolve = resolve
        d.planning.set_mode(d.job, "auto", "balanced")
        d.link.proposal = proposal("qsgd(bits=4)", 0.2)

        def lowered() -> None:
            d.planning.set_mode(d.job, "auto", "safe")
            d.link.proposal = proposal("qsgd(bits=8)", 0.25)
            d.meanwhile = lambda: None

        d.meanwhile = lowered
        d.steps(StepTime(0, 0.4, 0.01, 9))
        await d.look()
        assert d.given == [Q4] and d.course.standing.quality == "safe"
        d.domain.settled += 30
        d.steps(StepTime(0, 0.4, 0.01, 9), StepTime(1, 0.2, 0.01, 30))
        await d.look()
        assert d.given == [Q4, Q8] and [p.wish.quality for p in d.link.plans()] == ["balanced", "safe"]

    run(tmp_path, test)


def test_a_spec_with_spaces_is_planned_like_any_other(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.job.resolve = resolve
        d.newest((Rule("*", "topk( ratio = 0.01 ) + ef( decay = 0.9 )"),))
        d.planning.set_mode(d.job, "auto", "balanced")
        d.steps(StepTime(1, 0.2, 0.01, 30))
        d.link.proposal = proposal("qsgd(bits=4)", 0.8)
        assert "sparsifiers have to go" in await d.look() and d.given == [Q4]

    run(tmp_path, test)
