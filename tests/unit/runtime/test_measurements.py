"""Samples of a running job and what they come to."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcclient.timing import DEPARTED_STEPS, FIRST_STEPS
from gcproto.modes import QUALITIES
from gcproto.timings import TensorTimes
from gcserver.codecs import registry
from gcserver.planner.families import DENSE, LADDER
from gcserver.planner.profile import CodecCost, Curve, StepTime
from gcserver.runtime.lanelink import KernelTime
from gcserver.runtime.measurements import (
    CALLS,
    INTERVALS,
    KINDS,
    PLANS,
    RECENT,
    SETTLING,
    STEPS,
    Kernels,
    Paces,
    Readiness,
)


def sample(*ready: int, forward: int = 1000, between: int = 10_000, typical: int = 10_000, **more: int) -> TensorTimes:
    return TensorTimes(0, 4, ready, forward, between, typical, **more)


def test_computing_is_the_lower_quartile_over_steps() -> None:
    found = Readiness(2)
    for ready, forward in ((9_000, 1_500), (5_000, 3_000), (6_000, 2_000), (8_000, 1_000), (7_000, 2_500)):
        assert found.add(0, sample(0, ready, forward=forward))
    assert found.ready() == [0.0, 0.006] and found.forward() == 0.0015 and found.count == 5


@given(
    quiet=st.integers(1, 10**7),
    slower=st.lists(st.integers(0, 10**7), min_size=STEPS - 3, max_size=STEPS - 3),
    order=st.randoms(use_true_random=False),
)
def test_steps_that_were_slowed_down_do_not_count_beside_three_that_were_not(
    quiet: int, slower: list[int], order: random.Random
) -> None:
    times = [quiet] * 3 + [quiet + more for more in slower]
    order.shuffle(times)
    found = Readiness(1)
    for time in times:
        found.add(0, sample(time, forward=time))
    assert found.ready() == [quiet / 1e6] and found.forward() == quiet / 1e6


def test_as_many_steps_as_are_measured_again_outvote_those_before() -> None:
    found = Readiness(1)
    for time in [100] * FIRST_STEPS + [900] * DEPARTED_STEPS:
        found.add(0, sample(time))
    assert found.ready() == [9e-4]


def test_of_several_ranks_the_last_counts() -> None:
    found = Readiness(2)
    found.add(0, sample(0, 5_000, forward=2_000))
    found.add(1, sample(1_000, 0, forward=3_000))
    assert found.ready() == [0.001, 0.005] and found.forward() == 0.003 and found.count == 1


def test_buckets_are_those_of_the_newest_step() -> None:
    found = Readiness(2)
    assert found.buckets() == ()
    for rank, step, buckets in ((1, 4, (100, 20)), (0, 5, (60, 60)), (1, 5, (60, 60)), (0, 6, (80, 40))):
        found.add(rank, msgspec.structs.replace(sample(0, 5_000), step=step, buckets=buckets))
    assert found.buckets() == (80, 40)


def test_optimizers_stand_late_gradients_if_all_ranks_said_so_last() -> None:
    found = Readiness(1)
    assert not found.tolerant()
    for rank, says, all_do in ((0, True, True), (1, False, False), (1, True, True), (0, False, False)):
        found.add(rank, msgspec.structs.replace(sample(5_000), tolerant=says))
        assert found.tolerant() is all_do
    assert not found.add(0, msgspec.structs.replace(sample(5_000, between=30_000), tolerant=True))
    assert found.tolerant(), "also of a step that was disturbed"


def test_what_is_not_known_does_not_count() -> None:
    found = Readiness(3)
    found.add(0, sample(0, -1, 4_000, forward=-1))
    found.add(0, sample(0, -1, -1, forward=-1))
    found.add(0, sample(0, -1, 8_000, forward=-1))
    assert found.ready() == [0.0, 0.004, 0.004], "without a gradient: ready when the pass is over"
    assert found.forward() == 0.0


def test_disturbed_and_empty_steps_are_left_out() -> None:
    found = Readiness(1)
    assert not found.add(0, sample(0, between=20_001)) and not found.add(0, sample(-1))
    assert found.count == 0
    assert found.add(0, sample(0, between=20_000)) and found.add(0, sample(0, between=90_000, typical=-1))


def test_only_the_newest_steps_count() -> None:
    found = Readiness(1)
    for time in [900] * STEPS + [100] * STEPS:
        found.add(0, sample(time))
    assert found.ready() == [1e-4] and found.count == 2 * STEPS


def test_times_of_other_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="times of 2 tensors, got 1"):
        Readiness(2).add(0, sample(0))


def test_copying_is_bytes_a_second() -> None:
    found = Readiness(1)
    assert found.copy() is None
    found.add(0, sample(0))
    assert found.copy() is None, "nothing was copied"
    for micros in (1_000, 2_000, 1_000):
        found.add(0, sample(0, copied=4_000_000, copying=micros))
    assert found.copy() == 4e9


def _settle(paces: Paces, plan: int, first: int, seconds: list[float], at: float) -> float:
    for i, s in enumerate(seconds):
        at += s
        paces.settled(first + i, plan, at)
    return at


def test_a_plan_has_a_median_and_a_noise_once_it_settled() -> None:
    paces = Paces()
    start = [9.0] * (1 + SETTLING)
    at = _settle(paces, 0, 1, [*start, 1.0, 1.2, 0.8, 1.1, 1.0], 50.0)
    assert paces.steps() == (StepTime(0, 1.0, pytest.approx(1.4826 * 0.1), 5),)
    _settle(paces, 3, 1 + len(start) + 5, [*start, 2.0, 2.0], at)
    assert paces.steps()[1] == StepTime(3, 2.0, 0.0, 2)


def test_a_void_step_tells_nothing_and_ends_no_series() -> None:
    paces = Paces()
    at = _settle(paces, 0, 1, [1.0] * 8, 0.0)
    paces.settled(9, 0, at + 0.1, void=True)
    paces.settled(10, 0, at + 1.1)
    assert paces.steps() == (StepTime(0, 1.0, 0.0, 8 - SETTLING),)


def test_steps_that_become_longer_or_shorter_are_noticed_until_all_are() -> None:
    paces = Paces()
    at = _settle(paces, 0, 1, [1.0] * (2 * RECENT + SETTLING), 0.0)
    assert paces.departed() == 0.0, "too few"
    at = _settle(paces, 0, 1 + 2 * RECENT + SETTLING, [1.0] * 20, at)
    assert paces.departed() == 0.0
    first = 21 + 2 * RECENT + SETTLING
    at = _settle(paces, 0, first, [0.5] * (RECENT - 1), at)
    assert paces.departed() == pytest.approx(0.5)
    at = _settle(paces, 0, first + RECENT - 1, [0.5] * INTERVALS, at)
    assert paces.departed() == 0.0
    paces.forget()
    assert paces.steps() == () and paces.departed() == 0.0
    _settle(paces, 0, first + RECENT - 1 + INTERVALS, [2.0], at)
    assert paces.steps() == (StepTime(0, 2.0, 0.0, 1),), "the next step counts"


def test_a_gap_between_steps_is_no_interval() -> None:
    paces = Paces()
    at = _settle(paces, 0, 1, [1.0] * 8, 0.0)
    before = paces.steps()
    paces.settled(20, 0, at + 100.0)
    assert paces.steps() == before and before[0].seconds == 1.0


def test_intervals_and_plans_are_bounded() -> None:
    paces = Paces()
    at, step = 0.0, 1
    for plan in range(PLANS + 2):
        for _ in range(INTERVALS // 4):
            at += 1.0
            paces.settled(step, plan, at)
            step += 1
    assert [s.plan for s in paces.steps()] == list(range(2, PLANS + 2))
    for _ in range(2 * INTERVALS):
        at += 1.0
        paces.settled(step, 99, at)
        step += 1
    assert paces.steps()[-1].steps == INTERVALS


def flat(seconds: float) -> Curve:
    return Curve(((1, seconds),))


COST = CodecCost(flat(2.0), flat(1.0), flat(0.5), 0.1)


@pytest.mark.parametrize(("what", "alone"), [("encode", 2.0), ("decode", 1.0), ("decode_add", 0.5), ("finalise", 3.0)])
def test_busy_is_live_over_alone(what: str, alone: float) -> None:
    kernels = Kernels()
    kernels.add([KernelTime("topk", what, 100, 4, 4 * alone * 1.5)])
    assert kernels.busy({"topk": COST}) == pytest.approx(1.5)
    assert kernels.busy({"fp16": COST}) is None and kernels.busy({}) is None


@pytest.mark.parametrize("spec", [spec for quality in QUALITIES for spec in LADDER[quality] if spec != DENSE])
def test_what_lanes_call_a_codec_is_what_plans_call_it(spec: str) -> None:
    """``qsgd(bits=4)`` is timed as ``qsgd(bits=4,bucket=1024,kind=maxmin)``, powersgd with its error feedback."""
    kernels = Kernels()
    kernels.add([KernelTime(registry.parse(spec).spec, "encode", 100, 4, 4 * 3.0)])
    assert kernels.busy({DENSE: COST, spec: COST}) == pytest.approx(1.5)


def test_old_calls_fade() -> None:
    kernels = Kernels()
    for _ in range(20):
        kernels.add([KernelTime("topk", "encode", 100, CALLS + 1, (CALLS + 1) * 2.0)])
    for _ in range(20):
        kernels.add([KernelTime("topk", "encode", 100, CALLS + 1, (CALLS + 1) * 4.0)])
    assert kernels.busy({"topk": COST}) == pytest.approx(2.0, rel=1e-3)


def test_kinds_of_calls_are_bounded() -> None:
    """Under a controller nearly every step has levels, and so specs, of its own."""
    kernels = Kernels()
    for i in range(3 * KINDS):
        used = KernelTime("topk", "encode", 100, 1, 3.0)
        kernels.add([used, KernelTime(f"topk(ratio={i})", "decode", 100, 1, 1.0)])
    assert kernels.busy({"topk": COST}) == pytest.approx(1.5), "what goes on being used is known"
    known = [i for i in range(3 * KINDS) if kernels.busy({f"topk(ratio={i})": COST}) is not None]
    assert known == list(range(2 * KINDS + 1, 3 * KINDS))
