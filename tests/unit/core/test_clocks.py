"""How far a peer's clock is off, from heartbeats: never further than is said, whatever the two ways take.

What may live here: tests of `gcserver/core/clocks.py`, by itself and as links use it. What may not: other times.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcproto import messages, wire
from gcserver.core.clocks import DRIFT, KEPT, Clocks, ClockSample, best
from gcserver.core.link import Link

A, B = wire.node_id("a"), wire.node_id("b")
WAY = st.floats(1e-5, 2.0)


def pair() -> tuple[Link, Link]:
    """Two links that know each other."""
    a, b = Link(A, 11, B, "b", 1000), Link(B, 22, A, "a", 1000)
    a.adopt(22, 0.0)
    b.adopt(11, 0.0)
    return a, b


def exchange(a: Link, b: Link, start: float, ahead: float, there: float, back: float, held: float = 0.1) -> float:
    """A heartbeat of a at ``start`` and one of b ``held`` seconds after that came; returns a's clock at the end."""
    heard = start + there
    b.on_beat(a.heartbeat(now=start).body, heard + ahead, lambda e: None)
    a.on_beat(b.heartbeat(now=heard + held + ahead).body, heard + held + back, lambda e: None)
    return heard + held + back


@given(ahead=st.floats(-1e4, 1e4), trips=st.lists(st.tuples(WAY, WAY), min_size=1, max_size=2 * KEPT))
def test_the_offset_is_never_off_by_more_than_half_the_shortest_round_trip(
    ahead: float, trips: list[tuple[float, float]]
) -> None:
    a, b = pair()
    now = 1.0
    for there, back in trips:
        now = exchange(a, b, now + 0.5, ahead, there, back)
    found = a.clocks.best(now)
    assert found is not None and found.at == now
    assert abs(found.offset - ahead) <= found.error + 1e-9
    shortest = min(there + back for there, back in trips[-KEPT:])
    worst_age = sum(there + back + 0.6 for there, back in trips[-KEPT:])
    assert found.error <= shortest / 2 + DRIFT * worst_age + 1e-9, (
        "of the round trips that are kept the shortest counts"
    )


def test_an_old_sample_gives_way_to_a_new_one_that_is_as_good_as_its_age() -> None:
    old, new = ClockSample(0.0, 5.0, 0.001), ClockSample(100.0, 5.002, 0.002)
    assert best([old, new], 100.0) == new
    assert best([old, new], 5.0) == ClockSample(5.0, 5.0, 0.001 + 5 * DRIFT)
    assert best([], 1.0) is None


def test_another_life_of_the_peer_may_have_another_clock() -> None:
    a, b = pair()
    now = exchange(a, b, 1.0, 50.0, 0.001, 0.001)
    a.adopt(23, now)
    assert a.clocks.best(now) is None


def test_probes_are_no_measure_of_clocks_since_they_are_long_on_one_way() -> None:
    a, b = pair()
    b.on_beat(a.heartbeat(now=10.0, pad=bytes(1000)).body, 11.0, lambda e: None)
    a.on_beat(b.heartbeat(now=11.1).body, 11.2, lambda e: None)
    assert a.probe is not None and a.probe.trip is not None
    assert a.clocks.best(12.0) is None


@pytest.mark.parametrize("clock", [math.nan, math.inf, -math.inf])
def test_a_clock_that_is_none_is_not_taken(clock: float) -> None:
    clocks = Clocks()
    clocks.add(clock, 0.1, 1.0)
    assert clocks.best(1.0) is None
    beat = messages.Beat(0, sent=clock, echo=9.0, held=0.5)
    a, _ = pair()
    a._round_trip(beat, 10.0)
    assert a.rtt == 0.5 and a.clocks.best(10.0) is None
