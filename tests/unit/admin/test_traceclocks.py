"""From samples of clocks to corrected times: never further off than is said, and no frame before it left.

What may live here: tests of `gcserver/admin/traceclocks.py`. What may not: files.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gcserver.admin.spans import TraceClock
from gcserver.admin.traceclocks import Bounds, Clock

AHEAD = st.floats(-1e4, 1e4)
ERROR = st.floats(0.0, 0.5)
SHARE = st.floats(-1.0, 1.0)
SECONDS = st.floats(0.0, 60.0)


@example(ahead=0.0, error=0.5, first=1.0, last=-1.0, at=0.0, drift=0.0)
@example(ahead=0.0, error=0.5, first=1.0, last=0.0, at=0.5, drift=-4.109017287216433e-05)
@given(ahead=AHEAD, error=ERROR, first=SHARE, last=SHARE, at=SECONDS, drift=st.floats(-1e-4, 1e-4))
def test_a_corrected_time_is_off_by_no_more_than_the_samples(
    ahead: float, error: float, first: float, last: float, at: float, drift: float
) -> None:
    """The true clock drifts evenly; each sample is off by a share of its error."""
    clock = Clock.of([
        TraceClock(100.0, ahead + first * error, error),
        TraceClock(160.0, ahead + 60 * drift + last * error, error),
    ])  # fmt: skip
    ours = 100.0 + at
    theirs = ours + ahead + drift * at
    assert abs(clock.ours(theirs) - ours) <= clock.error + 1e-6
    apart = 2 * error + 0.01  # of both samples, at most
    assert error <= clock.error <= error + apart / 60 * (error + apart)


def test_the_asked_nodes_own_clock_needs_none() -> None:
    clock = Clock.of(())
    assert (clock.ours(5.0), clock.offset(7.0), clock.error) == (5.0, 0.0, 0.0)


def test_beyond_the_samples_nothing_is_extrapolated() -> None:
    clock = Clock.of([TraceClock(10.0, 1.0, 0.1), TraceClock(20.0, 3.0, 0.2)])
    assert [clock.offset(at) for at in (0.0, 10.0, 15.0, 20.0, 99.0)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert Clock.of([TraceClock(10.0, 1.0, 0.1)]).offset(99.0) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sample_that_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="its clock cannot be compared"):
        Clock.of([TraceClock(1.0, bad, 0.1)])


@given(
    ahead=AHEAD, error=st.floats(1e-4, 0.5), share=SHARE,
    ways=st.lists(st.tuples(SECONDS, st.floats(0.0, 0.2), st.booleans()), max_size=10),
)  # fmt: skip
def test_frames_narrow_it_and_then_none_arrives_before_it_left(
    ahead: float, error: float, share: float, ways: list[tuple[float, float, bool]]
) -> None:
    clock = Clock.of([TraceClock(0.0, ahead + share * error, error)])
    bounds = Bounds()
    for left, way, out in ways:
        if out:
            bounds.sent(left, clock.ours(left + way + ahead))
        else:
            bounds.received(clock.ours(left + ahead), left + way)
    narrowed = clock.narrowed(bounds.least, bounds.most)
    assert abs(narrowed.offset(0.0) - ahead) <= narrowed.error + 1e-6 <= clock.error + 2e-6
    for left, way, out in ways:
        there = narrowed.ours((left + way if out else left) + ahead)
        assert (there >= left - 1e-6) if out else (there <= left + way + 1e-6)


def test_frames_that_contradict_the_samples_are_believed_and_what_was_said_of_errors_is_not() -> None:
    clock = Clock.of([TraceClock(0.0, 5.0, 0.001)])
    # too small by one to two seconds: that is where the truth is
    narrowed = clock.narrowed(1.0, 2.0)
    assert (narrowed.offset(0.0), narrowed.error) == (3.5, 0.5)
    assert clock.narrowed(math.nan, 2.0).error == 0.001
    # and where frames contradict each other, the clock has jumped in between
    assert clock.narrowed(2.0, -3.0).error == 3.0
    assert clock.narrowed(2.0, math.inf).error == 2.0, "at least"


@given(jump=st.floats(1.0, 1e4), back=st.booleans(), when=SECONDS, at=SECONDS)
def test_a_clock_that_stood_still_in_between_is_said_to_be_that_far_off(
    jump: float, back: bool, when: float, at: float
) -> None:
    """A machine that sleeps: its monotonic clock does not."""
    ahead = -jump if back else jump
    clock = Clock.of([TraceClock(0.0, 0.0, 0.001), TraceClock(60.0, ahead, 0.001)])
    theirs = at + (ahead if at >= when else 0.0)
    assert abs(clock.ours(theirs) - at) <= clock.error + 1e-6
