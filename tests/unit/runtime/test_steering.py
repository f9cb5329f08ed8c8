"""Measurements in, tuning out: controllers of running jobs.

What may live here: tests of `gcserver/runtime/steering.py`. What may not: the laws (`tests/unit/planner/test_dc2.py`).
"""

from __future__ import annotations

import asyncio

import pytest

from gcserver.core.control_events import AnswerRequest
from gcserver.core.events import DomainKey
from gcserver.planner.dc2 import Controller, Dc2Config
from gcserver.planner.dc2_monitor import Dc2Error
from gcserver.runtime.lanelink import StepDelays
from gcserver.runtime.steering import SAVE_EVERY, Course, Steered, Steering, SteeringError, notch_at

JOB = b"j" * 16
ID: DomainKey = (JOB, 3)
DA2 = Course("ddp", "dc2-da2")
STILL = Course("ddp", "none")
NOTCHES = Course("ddp", "dc2-da2", (0.4, 0.1, 0.02))


class World:
    """A steering whose effects are kept; ``answer`` is what the next request is told."""

    def __init__(self, saved: bytes = b"") -> None:
        self.tuned: list[tuple[DomainKey, int, int]] = []
        self.saved: dict[bytes, bytes] = {}
        self.asked: list[tuple[str, str, bool]] = []
        self.answer = AnswerRequest(1, 2, 9, "takes effect at step 9 on every node")
        self.steering = Steering(lambda *told: self.tuned.append(told), self.ask, self.saved.__setitem__)
        self.steering.restore(JOB, saved)
        self.step = 0

    async def ask(self, job: str, text: str, planned: bool) -> AnswerRequest:
        self.asked.append((job, text, planned))
        return self.answer

    def settle(self, *lanes: tuple[float, float, int], course: Course = DA2, void: bool = False) -> None:
        """One more step, as each lane measured it."""
        self.step += 1
        for delay, skew, sent in lanes:
            self.steering.measured(StepDelays(ID, ((self.step, delay, skew, sent),)))
        self.steering.settled(ID, self.step, void, course)

    def begin(self, course: Course = DA2) -> None:
        """The step after which the controller begins, made at what there was before: whatever it took says nothing."""
        self.settle((50.0, 0.0, 100), course=course)

    @property
    def levels(self) -> list[int]:
        return [level for _, _, level in self.tuned]


def test_lanes_hear_the_first_ratio_and_every_other_one_once() -> None:
    world, law = World(), Controller("DA2")
    expected = [round(1e6 * law.on_step(d, 0.0, 100)) for d in (1.0, 1.0, 4.0, 1.0, 1.0)]
    world.begin()
    assert world.levels == [100_000] and world.steering.describe(JOB)[0].steps == 0
    for delay in (1.0, 1.0, 4.0, 1.0, 1.0):
        world.settle((delay, 0.0, 100))
    assert len(set(expected)) < len(expected), "a ratio that stays is part of this"
    changes = [level for i, level in enumerate(expected) if i == 0 or level != expected[i - 1]]
    assert world.tuned == [(ID, -1, level) for level in changes] and changes[0] == 100_000


def test_the_lanes_of_a_step_count_as_one_exchange() -> None:
    world, law = World(), Controller("DA2", Dc2Config())
    world.begin()
    for delays in (((1.0, 0.1, 60), (0.8, 0.3, 40)), ((3.0, 0.0, 10), (9.0, 0.5, 20)), ((2.0, 0.0, 10), (1.0, 1.5, 1))):
        world.settle(*delays)
        law.on_step(max(d for d, _, _ in delays), max(s for _, s, _ in delays), sum(b for _, _, b in delays))
    (steered,) = world.steering.describe(JOB)
    assert steered == Steered("ddp", "dc2-da2", law.ratio, -1, 2.0, 1.5, 3)
    assert world.steering.describe(b"other") == ()


def test_slow_exchanges_bring_the_ratio_down_and_quick_ones_up() -> None:
    world = World()
    for delay in (1.0, 1.0, 5.0):
        world.settle((delay, 0.0, 100))
    assert world.levels[-1] == 50_000
    for _ in range(3):
        world.settle((1.0, 0.0, 100))
    assert world.levels[-3:] == [55_000, 60_000, 65_000]


def test_steps_that_say_nothing_leave_the_ratio_alone() -> None:
    world = World()
    world.begin()
    for _ in range(2):
        world.settle((1.0, 0.0, 100))
    world.settle((9.0, 0.0, 100), void=True)
    world.settle()
    assert world.levels == [100_000] and world.steering.describe(JOB)[0].steps == 2


def test_where_nothing_steers_nothing_is_said_or_kept() -> None:
    world = World()
    world.settle((1.0, 0.0, 100), course=STILL)
    assert not world.tuned and not world.saved and not world.steering.describe(JOB)


def test_when_steering_ends_the_plan_holds_again() -> None:
    world = World()
    world.settle((1.0, 0.0, 100))
    world.settle((1.0, 0.0, 100), course=STILL)
    assert world.tuned == [(ID, -1, 100_000), (ID, -1, 0)]
    again = World(world.saved[JOB])
    again.steering.lane_up()
    assert not again.tuned


@pytest.mark.parametrize(("ratio", "notch"), [(1.0, 0), (0.4, 0), (0.39, 1), (0.1, 1), (0.05, 2), (0.02, 2), (0.01, 2)])
def test_the_notch_is_the_largest_that_is_not_above_the_ratio(ratio: float, notch: int) -> None:
    assert notch_at(ratio, NOTCHES.ratios) == notch


def test_with_notches_the_ratio_picks_one_between_the_first_and_the_last() -> None:
    world = World()
    for delay in (1.0, 1.0, 5.0, 1.0, 5.0, 5.0, 5.0, 5.0):
        world.settle((delay, 0.0, 100), course=NOTCHES)
    assert world.tuned == [(ID, 1, 0), (ID, 2, 0)]
    assert world.steering.describe(JOB)[0].ratio >= 0.02 and world.steering.describe(JOB)[0].notch == 2
    for _ in range(40):
        world.settle((1.0, 0.0, 100), course=NOTCHES)
    assert world.tuned[2:] == [(ID, 1, 0)]


def test_another_plan_keeps_what_the_controller_knows_and_tells_the_lanes_anew() -> None:
    world = World()
    world.begin(NOTCHES)
    for delay in (1.0, 1.0, 5.0):
        world.settle((delay, 0.0, 100), course=NOTCHES)
    before = world.steering.describe(JOB)[0]
    narrow = Course("ddp", "dc2-da2", (0.9, 0.3))
    world.settle(course=narrow)
    after = world.steering.describe(JOB)[0]
    assert (before.ratio, after.ratio, after.notch, after.steps) == (0.05, 0.3, 1, 3)
    assert world.tuned[-1] == (ID, 1, 0)
    world.settle(course=Course("ddp", "dc2-da5", (0.9, 0.3)))
    assert world.steering.describe(JOB)[0].steps == 0, "another law begins anew"


def test_a_lane_that_is_a_new_process_is_told_again() -> None:
    world = World()
    world.settle((1.0, 0.0, 100))
    world.steering.lane_up()
    world.settle((1.0, 0.0, 100))
    assert world.tuned == [(ID, -1, 100_000)] * 2


def test_a_daemon_that_comes_back_goes_on_where_it_was() -> None:
    world, twin = World(), World()
    delays = [1.0 + 0.37 * (i % 7) for i in range(SAVE_EVERY + 20)]
    world.begin()
    twin.begin()
    for delay in delays[:SAVE_EVERY]:
        world.settle((delay, 0.0, 100))
        twin.settle((delay, 0.0, 100))
    again = World(world.saved[JOB])
    again.step = world.step
    again.steering.lane_up()
    assert again.tuned == world.tuned[-1:]
    for delay in delays[SAVE_EVERY:]:
        again.settle((delay, 0.0, 100))
        twin.settle((delay, 0.0, 100))
    ours, theirs = again.steering.describe(JOB)[0], twin.steering.describe(JOB)[0]
    assert ours == theirs and ours.steps == len(delays)


def test_what_cannot_be_read_back_begins_anew() -> None:
    for saved in (b"rubbish", b"\x91\x96\x03\xa3ddp\xa3pid\x90\x00\x80"):
        world = World(saved)
        world.steering.lane_up()
        world.settle((1.0, 0.0, 100))
        assert world.levels == [100_000]


def test_a_job_that_is_over_is_forgotten() -> None:
    world = World()
    world.settle((1.0, 0.0, 100))
    world.steering.measured(StepDelays(ID, ((7, 1.0, 0.0, 1),)))
    world.steering.forget(JOB)
    world.steering.lane_up()
    assert len(world.tuned) == 1 and not world.steering.describe(JOB)


def test_a_request_is_made_of_the_job_and_answered_with_its_plan() -> None:
    world = World()
    done = asyncio.run(world.steering.set_controller("train", "dc2-da5", {"k_max": 0.2}))
    assert world.asked == [("train", "dc2-da5(k_max=0.2)", False)]
    assert (done.plan, done.step) == (2, 9)


def test_a_request_that_cannot_be_says_what_is_accepted() -> None:
    world = World()
    with pytest.raises(Dc2Error, match="a controller is one of none, dc2-da1"):
        asyncio.run(world.steering.set_controller("train", "pid"))
    assert not world.asked
    world.answer = AnswerRequest(1, error="no such job: 'train'; jobs here: none")
    with pytest.raises(SteeringError, match="no such job: 'train'"):
        asyncio.run(world.steering.set_controller("train", "none"))
