"""The delay monitor: the paper's four series by hand, age, skew, payloads, what it refuses, its state."""

from __future__ import annotations

import pytest

from gcserver.planner.dc2_monitor import Dc2Error, DelayMonitor, MonitorState


def monitor(window: int = 2, age: int = 10, by_payload: bool = False) -> DelayMonitor:
    return DelayMonitor(window, age, by_payload)


def test_the_series_are_those_of_the_paper() -> None:
    seen = monitor()
    for delay in (4.0, 3.0, 5.0, 6.0):
        delays = seen.add(delay, 0.0, 1)
    assert (delays.last, delays.least, delays.samples) == (6.0, 3.0, 4)
    assert delays.mean == pytest.approx((6 + 5 + 3) / 3)  # w + 1 of them
    assert delays.rise == pytest.approx(((6 - 5) + (5 - 3) + (3 - 4)) / 3)


def test_before_the_window_is_full_what_there_is_counts() -> None:
    seen = monitor(window=50, age=100)
    first, second = seen.add(4.0, 0.0, 1), seen.add(6.0, 0.0, 1)
    assert (first.least, first.mean, first.rise) == (4.0, 4.0, 0.0)
    assert (second.least, second.mean, second.rise) == (4.0, 5.0, 2.0)


def test_the_least_delay_ages() -> None:
    seen = monitor(window=2, age=4)
    least = [seen.add(delay, 0.0, 1).least for delay in (1.0, 5.0, 6.0, 7.0, 8.0, 9.0)]
    assert least == [1.0, 1.0, 1.0, 1.0, 5.0, 6.0]


def test_waiting_for_a_slow_worker_is_no_delay_of_the_network() -> None:
    plain, skewed = monitor(), monitor()
    for delay, skew in ((0.5, 8.0), (0.75, 0.0), (0.25, 2.0)):
        assert skewed.add(delay + skew, skew, 1) == plain.add(delay, 0.0, 1)
    assert skewed.add(1.0, 1.5, 1).last == 0.0


def test_a_step_that_was_all_skew_is_not_the_least_delay() -> None:
    seen = monitor()
    assert seen.add(1.0, 1.0, 1).least == 0.0
    assert seen.add(2.0, 0.0, 1).least == 2.0 and seen.add(1.0, 1.0, 1).least == 2.0


def test_a_step_that_was_all_skew_counts_in_no_series() -> None:
    calm, disturbed = monitor(window=8), monitor(window=8)
    for delay in (1.0, 3.0, 2.0):
        skewed = disturbed.add(5.0, 5.0, 1)
        assert skewed.last == 0.0
        expected, found = calm.add(delay, 0.0, 1), disturbed.add(delay, 0.0, 1)
        assert (found.least, found.mean, found.rise) == (expected.least, expected.mean, expected.rise)


def test_by_payload_the_least_is_what_this_payload_takes_at_the_best_rate() -> None:
    seen = monitor(by_payload=True)
    seen.add(1.0, 0.0, 100)  # 100 bytes/s
    assert seen.add(9.0, 0.0, 800).least == 8.0
    assert seen.add(9.0, 0.0, 10).least == 1.0  # no delay was ever shorter
    assert seen.add(2.0, 0.0, 0).least == 1.0
    assert monitor(by_payload=True).add(3.0, 0.0, 0).least == 3.0


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        ((-1.0, 0.0, 1), "delay"),
        ((float("nan"), 0.0, 1), "delay"),
        ((1.0, float("inf"), 1), "skew"),
        ((1.0, 0.0, -1), "payload"),
    ],
)
def test_what_cannot_be_measured_is_refused(sample: tuple[float, float, int], name: str) -> None:
    with pytest.raises(Dc2Error, match=f"{name} must be from 0 on"):
        monitor().add(*sample)


def test_the_state_is_bounded_and_goes_on() -> None:
    seen = monitor(window=3, age=6)
    for i in range(20):
        seen.add(1.0 + i % 7, 0.0, i)
    assert len(seen.state.delays) == len(seen.state.payloads) == 6 and seen.state.samples == 20
    twin = DelayMonitor(3, 6, False, seen.state)
    assert twin.add(2.5, 0.5, 3) == seen.add(2.5, 0.5, 3) and twin.state == seen.state
    with pytest.raises(Dc2Error, match="keeps 8 samples and saw 20"):
        DelayMonitor(6, 8, False, MonitorState((1.0,) * 6, (1,) * 6, 20))
