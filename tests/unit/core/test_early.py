"""What comes before its domain or section is open.

What may live here: tests of `gcserver/core/early.py` in a lane machine. What may not: restarts, which the simulation
plays.
"""

from __future__ import annotations

import pytest

from gcproto import wire
from gcproto.manifest import AddressSpace
from gcproto.records import replace
from gcserver.core import early
from gcserver.core import events as ev
from tests.unit.core.lane_machine import ID, SECTION, B, contribution, faults, hello, kinds, machine, open_domain


def test_strangers_and_unknown_domains() -> None:
    m = machine()
    assert kinds(m.on(contribution(sender=99), 0.0)) == ["Release", "frames_unknown_sender"]
    early = hello(5)
    stranger = replace(early, header=replace(early.header, sender=99))
    assert m.on(stranger, 0.0) == [], "it heard of this node first, and says hello again"
    assert m.on(contribution(), 0.0) == [], "kept: the domain may be about to open here"
    open_domain(m)
    assert m.domains[ID].partitions[0].rounds[1].now.have == 1 << 1


def test_what_came_too_early_is_dropped_in_the_end_and_its_credit_returned() -> None:
    m = machine()
    m.on(contribution(payload_bytes=600), 0.0)
    m.on(ev.Tick(), 599.0)
    assert not m.links[B].taken(ID), "acknowledged: it is not sent again, and the job's lease has not expired"
    out = m.on(ev.Tick(), 601.0)
    assert "Release" in kinds(out)
    assert m.links[B].taken(ID) == 600


def test_the_credit_of_an_earlier_life_is_not_given_to_the_next() -> None:
    m = machine()
    m.on(contribution(payload_bytes=600), 0.0)
    m.on(hello(23), 1.0)
    m.on(ev.Tick(), 601.0)
    assert m.links[B].taken(ID) == 0


def test_what_a_life_said_too_early_that_is_over_its_next_says_again() -> None:
    m = machine()
    m.on(contribution(payload_bytes=600), 0.0)
    m.on(hello(23), 1.0)
    open_domain(m, section=False)
    out = m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 1.0)
    assert kinds(out) == ["Release"] and not m.domains[ID].partitions[0].rounds
    assert m.links[B].taken(ID) == 0
    m.on(contribution(incarnation=23), 1.0)
    assert m.domains[ID].partitions[0].rounds[1].now.have == 1 << 1


def test_a_close_does_not_overtake_the_pushes_it_closes() -> None:
    """After a restart a worker rings for a section that is not open yet, then closes."""
    m = machine()
    open_domain(m, section=False)
    assert m.on(ev.Pushed(ID, 0, 1, (0,), False), 0.0) == []
    assert m.on(ev.Pushed(ID, 0, 1, (), True), 0.0) == []
    out = m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 0.0)
    assert kinds(out) == ["LogDecision", "Encode"]
    assert m.domains[ID].steps.open[1].digest == wire.digest(bytes(8)), "closed with the key, and after it"


def test_only_addresses_of_sections_to_come_are_waited_for() -> None:
    m = machine()
    open_domain(m)
    assert m.on(ev.Pushed(ID, 0, 1, (65536,), False), 0.0) == [], "where the next section will start"
    assert m.early.pushes
    m = machine()
    open_domain(m)
    (fault,) = faults(m.on(ev.Pushed(ID, 0, 1, (64,), False), 0.0))
    assert fault.kind == "TensorMismatch" and "unknown address 64" in fault.message
    m = machine()
    open_domain(m)
    assert faults(m.on(ev.Pushed(ID, 0, 1, (-4,), False), 0.0))


def test_what_nobody_here_knows_of_does_not_fill_memory_and_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MAX_BYTES", 1000)
    m = machine()
    for seq in (1, 2):
        assert m.on(contribution(seq, payload_bytes=600, step=seq), 0.0) == []
    assert kinds(m.on(contribution(3, payload_bytes=600, step=3), 0.0)) == ["Release", "frames_refused"]
    assert (m.links[B].received, m.early.count, m.early.nbytes) == (2, 2, 1200), "not taken: it is asked for again"
    open_domain(m)
    assert (m.early.count, m.early.nbytes) == (0, 0)
    m.on(contribution(3, payload_bytes=600, step=3), 0.0)
    assert m.links[B].received == 3
    assert set(m.domains[ID].partitions[0].rounds) == {1, 2, 3}


def test_a_known_domain_holds_no_more_of_what_is_too_early_than_an_unknown_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MAX_FRAMES", 2)
    m = machine()
    open_domain(m)
    for seq, change in ((1, {"key": 65536}), (2, {"epoch": 2})):
        assert m.on(contribution(seq, **change), 0.0) == []
    assert kinds(m.on(contribution(3, key=65536), 0.0)) == ["Release", "frames_refused"]
    m.on(contribution(3), 0.0)
    assert m.links[B].received == 3 and set(m.domains[ID].partitions[0].rounds) == {1}


def test_steps_far_ahead_are_not_begun_and_come_again_when_they_are_near() -> None:
    """No member can be so far: to encode step t it has settled t - lag (2 here), which takes our contribution."""
    m = machine()
    open_domain(m)
    m.on(contribution(1, step=8), 0.0)
    assert kinds(m.on(contribution(2, step=9), 0.0)) == ["Release", "frames_refused"]
    assert kinds(m.on(contribution(2, step=1 << 60), 0.0)) == ["Release", "frames_refused"]
    assert set(m.domains[ID].partitions[0].rounds) == set(m.domains[ID].remote) == {8}
    assert m.links[B].received == 1, "not taken: it is asked for again"
    m.on(ev.Settled(ID, 1, False, 0), 0.0)
    m.on(contribution(2, step=9), 0.0)
    assert m.links[B].received == 2 and set(m.domains[ID].partitions[0].rounds) == {8, 9}


def test_steps_far_ahead_are_not_begun_either_when_their_domain_opens() -> None:
    m = machine()
    m.on(contribution(1, step=9), 0.0)
    m.on(contribution(2, step=1 << 60, payload_bytes=600), 0.0)
    open_domain(m, section=False)
    assert kinds(m.on(contribution(3, step=9), 1.0)) == ["Release", "frames_refused"], "nor kept for a section to come"
    m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 1.0)
    assert not m.domains[ID].partitions[0].rounds and m.early.count == 2
    m.on(ev.Settled(ID, 1, False, 0), 2.0)
    assert set(m.domains[ID].partitions[0].rounds) == {9}, "it was taken, and would not come again"
    assert "Release" in kinds(m.on(ev.Tick(), 600.5)) and m.links[B].taken(ID) == 600, "since it came, not since later"
    assert (m.early.count, m.early.nbytes) == (0, 0)


def test_an_open_domain_keeps_no_more_of_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early, "MAX_BYTES", 1000)
    m = machine()
    open_domain(m)
    for seq in (1, 2):
        m.on(contribution(seq, payload_bytes=600, step=seq, epoch=2), 0.0)
    assert (m.links[B].received, m.early.nbytes) == (2, 1200)
    assert kinds(m.on(contribution(3, payload_bytes=600, epoch=2), 0.0)) == ["Release", "frames_refused"]
    m.on(contribution(3, payload_bytes=600), 0.0)
    assert m.links[B].received == 3, "what it knows it takes"


def test_what_is_dropped_in_the_end_counts_no_more() -> None:
    m = machine()
    m.on(contribution(payload_bytes=600), 0.0)
    assert (m.early.count, m.early.nbytes) == (1, 600)
    m.on(ev.Tick(), 601.0)
    assert (m.early.count, m.early.nbytes) == (0, 0)
