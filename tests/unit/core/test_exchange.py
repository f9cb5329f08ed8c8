"""Rounds of two nodes, seen from one of them: order, both exchanges, restarts between them.

What may live here: tests of `gcserver/core/exchange.py`, `frames.py` and `completion.py` with one machine. What may
not: many nodes and faults, which the simulation plays.
"""

from __future__ import annotations

from typing import Any

import pytest

from gcproto import messages, packed, wire
from gcproto.manifest import AddressSpace
from gcproto.records import replace
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.core import effects as fx
from gcserver.core import events as ev
from tests.unit.core.lane_machine import (
    DENSE,
    ID,
    JOB,
    SECOND,
    SECTION,
    A,
    B,
    contribution,
    data,
    faults,
    frame,
    hello,
    kinds,
    machine,
    open_domain,
    restarted,
    retained,
    two,
)


def test_a_round_of_two() -> None:
    m = machine()
    open_domain(m)
    out = m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    assert kinds(out) == ["LogDecision", "Encode"]
    assert kinds(m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)) == ["Accumulate"]
    out = m.on(contribution(), 0.0)
    assert kinds(out) == ["Accumulate", "Release", "Finalise"]
    out = m.on(ev.Finalised(ID, 0, 1, 6, 128, 2, False), 0.0)
    assert kinds(out) == ["CommitOutput", "Release", "LogStep", "ReportStep", "Send", "Notify"]
    assert m.on(ev.Settled(ID, 1, False, 0), 0.0) == []
    assert kinds(m.on(ev.DomainClosed(ID), 0.0)) == ["Release"], "the retained aggregate"


def test_what_comes_twice_is_counted_once() -> None:
    """A member that lost its process contributes again; what is there already keeps its place, the other goes back."""
    m = machine()
    open_domain(m)
    assert kinds(m.on(contribution(), 0.0)) == []
    assert kinds(m.on(replace(contribution(seq=2), handle=78), 0.0)) == ["Release", "contributions_duplicate"]
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    out = m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    assert [e.handle for e in out if isinstance(e, fx.Accumulate)] == [5, 77]
    assert kinds(m.on(replace(contribution(seq=3), handle=79), 0.0)) == ["Release", "contributions_duplicate"]
    assert m.links[B].taken(ID) == 3 * 128, "the credit of all three"


def test_what_waits_of_a_life_that_is_over_makes_room_for_the_next() -> None:
    """Which starts with all of its credit, and contributes again: an owner would hold both."""
    m = machine()
    open_domain(m)
    m.on(contribution(payload_bytes=600), 0.0)
    x = m.domains[ID].partitions[0].rounds[1].now
    out = m.on(hello(23), 1.0)
    assert [e.handle for e in out if isinstance(e, fx.Release)] == [77]
    assert (x.have, x.parked) == (0, {})
    m.on(replace(contribution(incarnation=23, payload_bytes=600), handle=78), 1.0)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 1.0)
    out = m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 1.0)
    assert [e.handle for e in out if isinstance(e, fx.Accumulate)] == [5, 78]
    assert m.links[B].taken(ID) == 600


def test_what_waits_of_a_life_that_goes_on_stays() -> None:
    m = machine()
    open_domain(m)
    m.on(contribution(), 0.0)
    m.links[B].refused = "for a while"
    m.on(hello(22), 1.0)
    assert m.links[B].up and m.domains[ID].partitions[0].rounds[1].now.parked.keys() == {1}


def test_sum_and_mean_of_one_tensor_end_the_job() -> None:
    m = machine()
    open_domain(m)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    (fault,) = [e for e in m.on(contribution(flags=int(Flag.AVERAGE)), 0.0) if isinstance(e, fx.ReportFault)]
    assert "b asks for the mean, others for the sum" in fault.message


@pytest.mark.parametrize("change", [{"codec": 2}, {"level": 3}])
@pytest.mark.parametrize("first", ["peer", "own"])
def test_another_codec_than_that_of_the_round_ends_the_job(change: dict[str, int], first: str) -> None:
    m = machine()
    open_domain(m)
    events: list[Any] = [ev.Pushed(ID, 0, 1, (0,), True), contribution(**change)]
    out = [e for event in (events if first == "own" else events[::-1]) for e in m.on(event, 0.0)]
    (fault,) = faults(out)
    assert fault.kind == "CorruptFrame" and fault.missing == ("b",) and "one codec" in fault.message
    assert "Accumulate" not in kinds(out)


@pytest.mark.parametrize("first", ["peer", "own"])
def test_another_scheme_than_that_of_the_round_ends_the_job(first: str) -> None:
    m = machine()
    open_domain(m)
    events: list[Any] = [ev.Pushed(ID, 0, 1, (0,), True), contribution(flags=int(Flag.ALL))]
    out = [e for event in (events if first == "own" else events[::-1]) for e in m.on(event, 0.0)]
    (fault,) = faults(out)
    assert fault.kind == "CorruptFrame" and fault.missing == ("b",) and "one scheme" in fault.message
    assert "Accumulate" not in kinds(out)


def test_answers_are_not_answered() -> None:
    """In the all scheme two members that are both complete exchange one answer, not one after the other."""
    m = machine()
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(JOB, 0, "ddp", 1, members, 0, 1, 2, 2, 0)
    everyone = ev.Plan(0, (ev.PlanRule("*", DENSE, "all"),), DENSE)
    m.on(ev.DomainOpened(config, (everyone,)), 0.0)
    m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 0.0)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    m.on(contribution(flags=int(Flag.ALL)), 0.0)
    m.on(ev.Finalised(ID, 0, 1, None, 0, 0, False), 0.0)
    asked = m.on(contribution(2, flags=int(Flag.ALL)), 0.0)
    (answer,) = [e for e in asked if isinstance(e, fx.Send) and e.header.type is FrameType.DATA]
    assert answer.header.aux == 1 and answer.handle == 5
    again = m.on(contribution(3, flags=int(Flag.ALL), aux=1), 0.0)
    assert kinds(again) == ["Release", "frames_stale"]


def test_a_new_life_of_a_node_outside_the_domain_is_sent_nothing() -> None:
    m = machine()
    m.on(ev.PeerAdded(wire.node_id("c"), "c"), 0.0)
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(JOB, 0, "ddp", 1, members, 0, 1, 2, 2, 0)
    m.on(ev.DomainOpened(config, (ev.Plan(0, (ev.PlanRule("*", DENSE, "all"),), DENSE),)), 0.0)
    m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 0.0)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    body = packed.encode(messages.Hello("c", "tcp://c:1", 1, 0, 1, "test"))
    h = Header(FrameType.HELLO, sender=wire.node_id("c"), incarnation=33, to_incarnation=11)
    assert data(m.on(ev.FrameReceived(h, body=body), 0.0)) == []
    assert data(m.on(hello(23), 0.0)) == [(Phase.CONTRIBUTION, 0, 5)], "a member gets it again"


def test_an_aggregate_that_is_gone_is_not_sent_again() -> None:
    """Whoever contributes to the next round has had it, by another frame than the one that it still misses."""
    m = machine()
    open_domain(m)
    for step in (1, 2):
        m.on(ev.Pushed(ID, 0, step, (0,), True), 0.0)
        m.on(ev.Encoded(ID, 0, step, 5, 128, 1, False), 0.0)
        out = m.on(contribution(step, step=step), 0.0)
        if step == 1:
            assert data(m.on(ev.Finalised(ID, 0, 1, 6, 128, 2, False), 0.0)) == [(Phase.AGGREGATE, 0, 6)]
            m.on(ev.Settled(ID, 1, False, 0), 0.0)
    assert 6 in [e.handle for e in out if isinstance(e, fx.Release)]
    nack = packed.encode(messages.Nack((1,)))
    header = Header(FrameType.NACK, sender=B, incarnation=22, to_incarnation=11)
    again = [e for e in m.on(ev.FrameReceived(header, body=nack), 0.0) if isinstance(e, fx.Send)]
    assert [(e.header.type, e.header.link_seq, e.handle) for e in again] == [(FrameType.FILLER, 1, None)]


@pytest.mark.parametrize("shared", [False, True])
def test_an_owner_draws_for_the_sum_what_it_did_not_draw_for_its_contribution(shared: bool) -> None:
    m = machine()
    open_domain(m, codec=replace(DENSE, shared_seed=shared))
    (encode,) = (e for e in m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0) if isinstance(e, fx.Encode))
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    (finalise,) = (e for e in m.on(contribution(), 0.0) if isinstance(e, fx.Finalise))
    assert (finalise.seed == encode.seed) == shared


def test_two_exchanges_at_the_owner() -> None:
    m = two(0)
    out = m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    assert kinds(out) == ["LogDecision", "Encode"] and out[1].stage == 0 and out[1].retain is None
    assert kinds(m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)) == ["Accumulate"]
    out = m.on(frame(1, 0), 0.0)
    assert kinds(out) == ["Accumulate", "Release", "Finalise"] and out[2].stage == 0
    out = m.on(ev.Finalised(ID, 0, 1, 6, 128, 2, False), 0.0)
    assert kinds(out) == ["Send", "Release", "Encode"], "no output yet"
    assert data(out) == [(Phase.AGGREGATE, 0, 6)] and out[1].handle == 5
    assert (out[2].stage, out[2].aggregate) == (1, 6)
    assert data(m.on(frame(2, 0), 0.0)) == [(Phase.AGGREGATE, 0, 6)], "asked again by who lost it"
    assert kinds(m.on(frame(3, 1), 0.0)) == [], "parked until our own is there"
    out = m.on(ev.Encoded(ID, 0, 1, 7, 64, 3, False, 1), 0.0)
    assert kinds(out) == ["Accumulate", "Accumulate", "Release", "Finalise"]
    last = out[3]
    assert (last.stage, last.divisor, last.flags, last.retain) == (1, 1, SECOND, 1)
    out = m.on(ev.Finalised(ID, 0, 1, 8, 64, 4, False, 1), 0.0)
    assert kinds(out) == ["CommitOutput", "Release", "LogStep", "ReportStep", "Send", "Notify"]
    assert data(out) == [(Phase.AGGREGATE, 1, 8)]
    assert data(m.on(frame(4, 0), 0.0)) == [(Phase.AGGREGATE, 0, 6)], "both are retained"
    assert data(m.on(frame(5, 1), 0.0)) == [(Phase.AGGREGATE, 1, 8)]
    m.on(ev.Settled(ID, 1, False, 0), 0.0)
    m.on(ev.Pushed(ID, 0, 2, (0,), True), 0.0)
    m.on(ev.Encoded(ID, 0, 2, 15, 128, 1, False), 0.0)
    out = m.on(frame(6, 0, step=2), 0.0)
    assert [e.handle for e in out if isinstance(e, fx.Release)] == [77, 8, 6], "everyone has had step 1"


def test_two_exchanges_at_a_member() -> None:
    m = two(1)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    assert data(m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)) == [(Phase.CONTRIBUTION, 0, 5)]
    sent = m.links[A].unacked[1]
    assert sent.wanted()
    early = m.on(frame(1, 1, Phase.AGGREGATE), 0.0)
    assert kinds(early) == ["Release", "frames_unexpected"], "the second sum means nothing without the first"
    out = m.on(frame(2, 0, Phase.AGGREGATE), 0.0)
    assert kinds(out) == ["Release", "Encode", "Release"]
    assert (out[1].stage, out[1].aggregate) == (1, 77)
    assert not sent.wanted(), "its payload is released"
    assert kinds(m.on(frame(3, 0, Phase.AGGREGATE), 0.0)) == ["Release", "frames_unexpected"], "it came twice"
    assert data(m.on(ev.Encoded(ID, 0, 1, 7, 64, 3, False, 1), 0.0)) == [(Phase.CONTRIBUTION, 1, 7)]
    out = m.on(frame(4, 1, Phase.AGGREGATE), 0.0)
    assert kinds(out)[:4] == ["Decode", "Release", "CommitOutput", "Release"] and out[0].stage == 1


def test_an_owner_restarted_between_the_exchanges_goes_on_with_its_first_sum() -> None:
    m = restarted(retained(0), retained(1, step=0, slot=1))
    m.on(frame(1, 0), 0.0)
    assert kinds(m.on(frame(2, 1), 0.0)) == [], "of members that had the sum: parked"
    out = m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    assert data(out) == [(Phase.AGGREGATE, 0, 60)], "whoever contributed again has not had it"
    (encode,) = [e for e in out if isinstance(e, fx.Encode)]
    assert (encode.stage, encode.aggregate) == (1, 60)
    released = [e.handle for e in out if isinstance(e, fx.Release)]
    assert released == [5, 77] and m.links[B].taken(ID) == 128
    assert data(m.on(frame(3, 0), 0.0)) == [(Phase.AGGREGATE, 0, 60)]
    out = m.on(ev.Encoded(ID, 0, 1, 7, 64, 3, False, 1), 0.0)
    assert kinds(out) == ["Accumulate", "Accumulate", "Release", "Release", "Finalise"]
    assert out[-1].retain == 1 and out[-1].proposal == 4


def test_an_owner_restarted_with_a_first_sum_that_is_not_finite_voids_the_round() -> None:
    m = restarted(retained(0, int(Flag.NONFINITE)))
    out = m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    assert kinds(out)[:2] == ["Decode", "CommitOutput"] and out[0].nonfinite and out[1].nonfinite


def test_an_owner_restarted_after_the_round_answers_for_both_exchanges() -> None:
    m = restarted(retained(0), retained(1, slot=1), out_step=1)
    assert data(m.on(frame(1, 0), 0.0)) == [(Phase.AGGREGATE, 0, 60)]
    assert data(m.on(frame(2, 1), 0.0)) == [(Phase.AGGREGATE, 1, 61)]


@pytest.mark.parametrize("own", [True, False])
def test_a_first_exchange_that_is_not_finite_is_the_last(own: bool) -> None:
    m = two(0)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    m.on(ev.Encoded(ID, 0, 1, None if own else 5, 0, 1, own), 0.0)
    out = m.on(frame(1, 0, flags=0 if own else int(Flag.NONFINITE)), 0.0)
    assert out[-1].nonfinite
    out = m.on(ev.Finalised(ID, 0, 1, None, 0, 0, True), 0.0)
    assert [e.nonfinite for e in out if isinstance(e, fx.CommitOutput)] == [True]
    assert "Encode" not in kinds(out) and data(out) == [(Phase.AGGREGATE, 0, None)]
    m = two(1)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    out = m.on(frame(1, 0, Phase.AGGREGATE, flags=int(Flag.NONFINITE)), 0.0)
    assert kinds(out)[0] == "Decode" and out[0].nonfinite and "Encode" not in kinds(out)
