"""The daemon's clock, and how it takes up jobs.

What may live here: tests of `gcserver/runtime/supervisor.py` that need no daemon. What may not: its parts, and daemons
(`tests/integration`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto.messages import Reattach
from gcserver.core.control_events import JobRestored, WorkerSaid
from gcserver.runtime.lanelink import DEFECT, LaneTrouble, StepDelays
from gcserver.runtime.steering import SAVE_EVERY, Course, Steering
from gcserver.runtime.supervisor import TICK, Supervisor


def test_a_defect_in_what_the_clock_drives_does_not_stop_it() -> None:
    later: list[tuple[float, Any]] = []
    daemon: Any = Supervisor.__new__(Supervisor)
    daemon.stopped = asyncio.Event()
    daemon.loop = SimpleNamespace(call_later=lambda *args: later.append(args))
    daemon.registrations = SimpleNamespace(tick=lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        daemon._tick()
    assert later == [(TICK, daemon._tick)]
    daemon.stopped.set()
    daemon._tick()
    assert len(later) == 1


def test_a_job_that_settles_steps_as_it_is_taken_up_keeps_its_controller() -> None:
    domain, course, files = (b"j" * 16, 0), Course("ddp", "dc2-da2"), dict[bytes, bytes]()

    def steering() -> Steering:
        return Steering(lambda *told: None, None, files.__setitem__)  # type: ignore[arg-type]

    before = steering()
    before.settled(domain, 0, False, course)
    for step in range(1, SAVE_EVERY + 1):
        before.measured(StepDelays(domain, ((step, 1.0 if step < 3 else 9.0, 0.0, 100),)))
        before.settled(domain, step, False, course)
    (kept,) = before.describe(domain[0])
    assert kept.steps == SAVE_EVERY
    daemon: Any = Supervisor.__new__(Supervisor)
    daemon.steering = steering()
    memory = SimpleNamespace(record=SimpleNamespace(job=domain[0]))
    daemon.store = SimpleNamespace(load=lambda: [(memory, ())], steering=files.__getitem__)

    def feed(event: JobRestored) -> None:
        assert event.memory is memory
        daemon.steering.settled(domain, SAVE_EVERY + 1, True, course)

    daemon.feed = feed
    daemon._take_up()
    (found,) = daemon.steering.describe(domain[0])
    assert (found.steps, found.ratio) == (kept.steps, kept.ratio)


def test_what_a_lane_says_is_logged_as_its_own(caplog: pytest.LogCaptureFixture) -> None:
    daemon: Any = Supervisor.__new__(Supervisor)
    daemon.machine = SimpleNamespace(jobs={})
    with caplog.at_level(logging.INFO):
        daemon.trouble(LaneTrouble(b"", "Log", "a worker is sent away"), 1)
        daemon.trouble(LaneTrouble(b"", DEFECT, "this lane ends by a defect"), 0)
        daemon.trouble(LaneTrouble(b"", "Log", "no room"))
    said = [(r.levelname, r.getMessage(), getattr(r, "lane", None)) for r in caplog.records]
    assert said == [
        ("WARNING", "a worker is sent away", 1),
        ("ERROR", "this lane ends by a defect", 0),
        ("WARNING", "no room", None),
    ]


def test_a_defect_is_logged_without_what_a_worker_says_in_confidence(caplog: pytest.LogCaptureFixture) -> None:
    daemon: Any = Supervisor.__new__(Supervisor)
    daemon.stopped, daemon.queue, daemon.failure = asyncio.Event(), deque(), ""
    daemon.machine = SimpleNamespace(on=lambda event, now: 1 // 0)
    daemon.feed(WorkerSaid(3, Reattach(b"j" * 16, 0, 1, b"hush")))
    assert daemon.stopped.is_set() and daemon.failure == "a defect in the daemon (see above)"
    assert "WorkerSaid (Reattach) could not be handled" in caplog.text and "ZeroDivisionError" in caplog.text
    assert "hush" not in caplog.text
