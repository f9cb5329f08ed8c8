"""What a restarted daemon knows of a job's planning, and what it makes of files it cannot read or write."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gcserver.planner.profile import StepTime
from tests.unit.runtime.planned_job import HAND, Daemon, run


def test_a_restart_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    async def test(d: Daemon) -> None:
        d.planning.set_mode(d.job, "lgreco", "safe")
        await d.look()
        before = d.course.standing
        d.again()
        assert d.course.standing == before and before.plan == 1
        assert d.course.says == "plan 1 is in force: topk it is"
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
