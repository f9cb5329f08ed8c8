"""Planning that fails: what is said, when it is tried again, and that nothing else ends with it."""

from __future__ import annotations

import time
from pathlib import Path

from gcserver.runtime.plancourse import DOUBLINGS, RETRY_AFTER
from gcserver.runtime.plannerlink import PlannerError
from gcserver.runtime.unplannable import FAILED
from tests.unit.runtime.planned_job import Daemon, run, second_job


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
