"""What a restarted daemon knows of a job's planning, and what it makes of files it cannot read or write."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gcserver.core import resuming
from gcserver.planner.profile import StepTime
from gcserver.runtime.ledger import JobStore
from tests.unit.runtime.planned_job import HAND, TOPK, Daemon, proposal, run


def test_a_restart_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.planning.set_mode(d.job, "lgreco", "fast")
        await d.look()
        before = d.course.standing
        d.again()
        assert d.course.standing == before and before.plan == 1
        assert d.course.says == "plan 1 is in force: topk it is"
        d.steps(StepTime(1, 0.9, 0.01, 9))
        assert "that one is back" in await d.look(), "judged by what an earlier life measured"
        d.planning.by_hand(d.job)
        d.again()
        assert (d.course.standing.mode, d.course.standing.quality) == ("static", "fast")

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


def test_a_memory_that_cannot_be_read_begins_anew_and_plans_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a node that becomes the eldest, which never had one: the plan in force may be planned away."""

    async def test(d: Daemon) -> None:
        await d.look()
        assert d.given == [TOPK]

        def broken(store: JobStore, job: bytes) -> bytes:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(type(d.store), "planning", broken)
        d.again()
        d.link.proposal = proposal("none", 0.1)
        d.steps(StepTime(1, 0.4, 0.01, 9))
        assert "plan 2 since" in await d.look() and d.course.standing.mode == "auto"
        assert any("cannot be read" in said for said in d.warnings)

    run(tmp_path, test)


def test_what_a_job_was_resumed_with_comes_back_when_a_plan_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(d: Daemon) -> None:
        monkeypatch.setattr(resuming, "base", lambda domains: HAND)
        await d.look()
        assert d.given == [TOPK] and d.course.standing.before is not None
        d.steps(StepTime(0, 0.4, 0.01, 7), StepTime(1, 0.9, 0.01, 9))
        assert "that one is back" in await d.look()
        assert d.given == [TOPK, HAND]

    run(tmp_path, test)
