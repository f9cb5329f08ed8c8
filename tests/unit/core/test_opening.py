"""What a restart takes up of a domain, and what closing one gives back.

What may live here: tests of `gcserver/core/opening.py`. What may not: reading shared memory.
"""

from __future__ import annotations

from gcserver.core import effects as fx
from gcserver.core import events as ev
from tests.unit.core.lane_machine import ID, B, contribution, frame, kinds, machine, open_domain, restarted, two


def test_closing_releases_what_is_parked_and_closes_the_books() -> None:
    m = machine()
    open_domain(m)
    m.on(contribution(payload_bytes=600), 0.0)
    out = m.on(ev.DomainClosed(ID), 0.0)
    assert "Release" in kinds(out) and m.links[B].taken == {}
    m.on(contribution(2, payload_bytes=600), 0.0)
    assert m.links[B].taken == {}, "nor do late frames open them again"


def test_closing_between_the_exchanges_releases_everything() -> None:
    m = two(0)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    m.on(frame(1, 0), 0.0)
    m.on(ev.Finalised(ID, 0, 1, 6, 128, 2, False), 0.0)
    m.on(frame(2, 1), 0.0)
    out = m.on(ev.DomainClosed(ID), 0.0)
    assert [e.handle for e in out if isinstance(e, fx.Release)] == [77, 6]


def test_an_owner_restarted_before_the_first_sum_begins_again() -> None:
    m = restarted()
    assert not [e for e in m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0) if isinstance(e, fx.Encode)]
    r = m.domains[ID].partitions[0].rounds[1]
    assert r.encoding and r.decision is not None and r.decision.seed == 99
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    assert kinds(m.on(frame(1, 0), 0.0)) == ["Accumulate", "Release", "Finalise"]
