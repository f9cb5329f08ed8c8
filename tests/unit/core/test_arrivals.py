"""Links on which nothing arrives any more, and those that are merely slow.

What may live here: tests of `gcserver/core/arrivals.py` through a link that ticks. What may not: other things of a link
(`test_link.py`); what a stall means for a job, which the simulation plays.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from gcserver.core.arrivals import MAX_DOUBLED
from gcserver.core.effects import Count, Reconnect, Send
from gcserver.core.link import Link
from tests.unit.core.test_link import HELLO, A, B, data, kinds, pair, receive


def quiet(a: Link, until: float, since: float = 1.0) -> list[tuple[float, Any]]:
    """(when, effect) of what a link does besides heartbeats while it ticks and nothing comes."""
    out, now = [], since
    while now < until:
        now += 0.5
        out += [(now, e) for e in a.tick(now, HELLO, 1e9) if not isinstance(e, Send)]
    return out


def knowing() -> tuple[Link, Link]:
    """Two links, of which a has heard b at 1.0."""
    a, b = pair()
    a.fresh(b.heartbeat().header, 1.0, HELLO, lambda e: None)
    return a, b


def hears(b: Link, beat: Send, now: float) -> None:
    """A heartbeat comes to b."""
    b.fresh(beat.header, now, HELLO, lambda e: None)
    b.on_beat(beat.body, now, lambda e: None)


def test_a_connection_on_which_nothing_arrives_is_made_anew() -> None:
    a, _ = knowing()
    a.arrivals.last = 1.0
    assert quiet(a, 11.0) == []
    (when, effect), (_, count) = quiet(a, 12.0, 11.0)
    assert (when, effect, count) == (11.5, Reconnect(B), Count("connections_stalled", B))
    assert kinds(list(a.tick(12.5, HELLO, 1e9))) == ["HEARTBEAT"], "which shows the peer what it has missed"


def test_waits_for_something_to_arrive_double_while_new_connections_do_not_help() -> None:
    a, b = knowing()
    a.arrivals.last = 0.0
    made = [when for when, e in quiet(a, 3000.0, 0.0) if isinstance(e, Reconnect)]
    gaps = [y - x for x, y in pairwise([0.0, *made])]
    assert gaps == [10.5, 20.5, 40.5, 80.5, 160.5, 320.5, 640.5, 640.5, 640.5]
    a.on_beat(b.heartbeat(now=1.0).body, 3000.0, lambda e: None)
    assert a.arrivals.renewed == MAX_DOUBLED, "it echoes nothing of ours"
    hears(b, a.heartbeat(now=3000.0), 1.5)
    a.on_beat(b.heartbeat(now=2.0).body, 3000.5, lambda e: None)
    assert (a.arrivals.renewed, a.arrivals.last) == (0, 3000.0)


def test_echoes_and_acknowledgements_are_arrivals_and_frames_of_the_peer_are_not() -> None:
    a, b = knowing()
    hears(b, a.heartbeat(now=2.0), 2.0)
    a.on_beat(b.heartbeat(now=2.5).body, 2.5, lambda e: None)
    assert a.arrivals.last == 2.0, "half a second before the answer left"
    a.on_beat(b.heartbeat(now=5.0).body, 5.0, lambda e: None)
    assert a.arrivals.last == 2.0, "the same echo again"
    receive(b, a.send(data()))
    a.fresh(b.heartbeat().header, 7.0, HELLO, lambda e: None)
    assert a.arrivals.last == 7.0
    a.fresh(b.heartbeat().header, 8.0, HELLO, lambda e: None)
    assert a.arrivals.last == 7.0, "acknowledged before"


def test_an_echo_comes_with_the_heartbeats_behind_a_probe_too() -> None:
    a, b = knowing()
    b.heartbeat(now=2.0, pad=bytes(5000))
    hears(b, a.heartbeat(now=2.0), 2.0)
    a.on_beat(b.heartbeat(now=3.0).body, 3.0, lambda e: None)
    assert a.arrivals.last == 2.0 and a.their_clock == 0.0


def test_a_slow_link_is_not_taken_for_one_that_stands_still() -> None:
    """100 MB behind 20 Mbit/s, in frames of 8 MiB, of which each takes three seconds; and one frame of all of it."""
    a, b = knowing()
    a.arrivals.last = 1.0
    sent = [a.send(data(nbytes=8 << 20)) for _ in range(12)]
    now, out = 1.0, []
    for frame in sent:
        out += quiet(a, now + 3.3, now)
        now += 3.3
        receive(b, frame)
        a.fresh(b.heartbeat().header, now, HELLO, lambda e: None)
    assert out == [] and not a.unacked
    a.send(data(nbytes=100_000_000))
    assert quiet(a, now + 100.0, now) == []
    assert [type(e) for _, e in quiet(a, now + 115.0, now + 100.0)] == [Reconnect, Count]


def test_a_link_that_has_been_slow_is_given_that_time_again() -> None:
    a, b = knowing()
    a.arrivals.last = 1.0
    receive(b, a.send(data()))
    a.fresh(b.heartbeat().header, 61.0, HELLO, lambda e: None)
    assert quiet(a, 180.0, 61.0) == []
    assert quiet(a, 182.0, 180.0)
    for now in range(200, 3200, 10):
        receive(b, a.send(data()))
        a.fresh(b.heartbeat().header, float(now), HELLO, lambda e: None)
    assert len(quiet(a, 3215.0, 3190.0)) == 2, "long ago"


def test_what_the_answer_waited_for_is_not_what_the_frame_took() -> None:
    """Both directions stand still, the peer's connection is made anew: what it has heard is old, and ours is due."""
    a, b = knowing()
    a.arrivals.last = 1.0
    receive(b, a.send(data()))
    hears(b, a.heartbeat(now=1.5), 1.5)
    assert quiet(a, 11.0) == []
    hears(a, b.heartbeat(now=11.2), 11.2)
    assert not a.unacked and a.arrivals.last == pytest.approx(1.5) and a.arrivals.waited == pytest.approx(0.5)
    assert [type(e) for _, e in quiet(a, 12.0, 11.0)] == [Reconnect, Count]


@pytest.mark.parametrize("silent", [float("nan"), float("inf"), -1e300])
def test_an_answer_that_came_at_no_time_changes_no_patience_for_the_worse(silent: float) -> None:
    a, _ = knowing()
    a.arrivals.last = 1.0
    a.arrivals.seen(5.0)
    a.arrivals.dated(silent, 5.0)
    assert a.arrivals.last in (1.0, 5.0) and a.arrivals.waited in (0.0, 4.0)


def test_who_was_paused_does_not_take_its_links_for_stalled() -> None:
    a, _ = knowing()
    a.arrivals.last = 1.0
    assert quiet(a, 5.0) == []
    assert quiet(a, 65.5, 60.0) == [], "four seconds before, six after"
    assert [type(e) for _, e in quiet(a, 68.0, 65.5)] == [Reconnect, Count]


def test_a_peer_that_never_spoke_is_connected_to_again_now_and_then() -> None:
    """It may be there, and our first HELLO stuck on its way: in both directions, or it knows us by that alone."""
    a = Link(A, 11, B, "b")
    found = quiet(a, 3000.0)
    assert {e for _, e in found} == {Reconnect(B)}, "and nothing is counted"
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(found)]
    assert gaps == [20.5, 40.5, 80.5, 160.5, 320.5, 640.5, 640.5, 640.5], "less often the longer it is away"
    assert kinds(list(a.tick(3000.5, HELLO, 1e9))) == ["HELLO"]
    a.adopt(7, 3001.0)
    assert quiet(a, 3011.0, 3001.0) == [] and a.arrivals.renewed == 0
