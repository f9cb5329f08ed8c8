"""A job whose optimizer may not stand the sparsifiers in force: they go at once, and nothing brings them back.

What may live here: that course of `planning.py`. What may not: the rule (`tests/unit/planner/test_tolerance.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gcproto.messages import Rule
from gcserver.planner.profile import StepTime
from tests.unit.runtime.planned_job import HAND, TOPK, Daemon, proposal, run

Q4 = (Rule("*", "qsgd(bits=4)", "owner"),)


def test_a_sparsifier_on_trial_is_replaced_by_what_is_slower_and_stays_away(tmp_path: Path) -> None:
    async def test(d: Any) -> None:
        d.planning.set_mode(d.job, "auto", "balanced")
        d.steps(StepTime(0, 0.4, 0.01, 9), tolerant=True)
        assert (await d.look()).startswith("plan 1") and d.given == [TOPK]
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
