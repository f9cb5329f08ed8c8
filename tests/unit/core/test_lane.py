"""The lane machine at its edges: strangers, frames that come too early, wrong payloads, unreadable bodies.

What may live here: tests of `gcserver/core/lane.py` with one machine. What may not: whole rounds, which the
scenarios and the simulation play.
"""

from __future__ import annotations

from typing import Any

import pytest

from gcproto import messages, wire
from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.records import replace
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.lane import LaneConfig, LaneMachine

A, B = wire.node_id("a"), wire.node_id("b")
JOB = b"j" * 16
ID = (JOB, 0)
DENSE = ev.CodecChoice("none", 1, 0, False, False)
SECTION = Section(0, (TensorSpec("w", (8192,), 0), TensorSpec("v", (8192,), 0)))


def machine(credit: int = 1000) -> LaneMachine:
    m = LaneMachine(LaneConfig(messages.Hello("a", "tcp://a:1", 1, 0, 1, "test"), 11, credit))
    m.on(ev.PeerAdded(B, "b"), 0.0)
    m.on(hello(22), 0.0)
    return m


def hello(incarnation: int, lanes: int = 1) -> ev.FrameReceived:
    body = messages.encode(messages.Hello("b", "tcp://b:1", lanes, 0, 1, "test"))
    header = Header(FrameType.HELLO, sender=B, incarnation=incarnation, to_incarnation=11)
    return ev.FrameReceived(header, body=body)


def open_domain(m: LaneMachine, section: bool = True) -> None:
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(JOB, 0, "ddp", 1, members, 0, 1, 2, 2, 0)
    m.on(ev.DomainOpened(config, (ev.Plan(0, (), DENSE),)), 0.0)
    if section:
        m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 0.0)


def encoded_seed(job: bytes, seed: int | None) -> int:
    """What the first contribution of a job's first block draws from."""
    m = machine()
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(job, 0, "ddp", 1, members, 0, 1, 2, 2, 0, seed=seed)
    m.on(ev.DomainOpened(config, (ev.Plan(0, (), DENSE),)), 0.0)
    m.on(ev.SectionOpened((job, 0), SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 0.0)
    out = m.on(ev.Pushed((job, 0), 0, 1, (0,), False), 0.0)
    (encode,) = (e for e in out if isinstance(e, fx.Encode))
    return encode.seed


def test_a_seed_makes_two_jobs_draw_alike() -> None:
    other = b"k" * 16
    assert encoded_seed(JOB, 5) == encoded_seed(other, 5) != encoded_seed(JOB, 6)
    assert encoded_seed(JOB, None) == encoded_seed(JOB, None) != encoded_seed(other, None)


def contribution(seq: int = 1, **change: Any) -> ev.FrameReceived:
    header = Header(
        FrameType.DATA, Phase.CONTRIBUTION, job=JOB, epoch=1, step=1, sender=B, incarnation=22, to_incarnation=11,
        link_seq=seq, elements=16384, payload_bytes=128, codec=1,
    )  # fmt: skip
    return ev.FrameReceived(replace(header, **change), handle=77)


def kinds(effects: list[Any]) -> list[str]:
    return [getattr(e, "name", type(e).__name__) for e in effects]


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


def test_strangers_and_unknown_domains() -> None:
    m = machine()
    assert kinds(m.on(contribution(sender=99), 0.0)) == ["Release", "frames_unknown_sender"]
    assert m.on(contribution(), 0.0) == [], "kept: the domain may be about to open here"
    open_domain(m)
    assert m.domains[ID].partitions[0].rounds[1].now.have == {1}


def test_what_came_too_early_is_dropped_in_the_end_and_its_credit_returned() -> None:
    m = machine()
    m.on(contribution(payload_bytes=600), 0.0)
    m.on(ev.Tick(), 599.0)
    assert not m.links[B].taken, "acknowledged: it is not sent again, and the job's lease has not expired"
    out = m.on(ev.Tick(), 601.0)
    assert "Release" in kinds(out)
    assert m.links[B].taken == {ID: 600}


def test_the_credit_of_an_earlier_life_is_not_given_to_the_next() -> None:
    m = machine()
    m.on(contribution(payload_bytes=600), 0.0)
    m.on(hello(23), 1.0)
    m.on(ev.Tick(), 601.0)
    assert m.links[B].taken == {}


def test_frames_of_a_closed_job_are_dropped_at_once() -> None:
    m = machine()
    open_domain(m)
    m.on(ev.DomainClosed(ID), 0.0)
    assert kinds(m.on(contribution(), 0.0)) == ["Release"]
    assert m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0) == []


def test_closing_releases_what_is_parked_and_closes_the_books() -> None:
    m = machine()
    open_domain(m)
    m.on(contribution(payload_bytes=600), 0.0)
    out = m.on(ev.DomainClosed(ID), 0.0)
    assert "Release" in kinds(out) and m.links[B].taken == {}
    m.on(contribution(2, payload_bytes=600), 0.0)
    assert m.links[B].taken == {}, "nor do late frames open them again"


@pytest.mark.parametrize(("field", "value"), [("elements", 31), ("dtype", 3)])
def test_another_size_or_type_ends_the_job(field: str, value: int) -> None:
    m = machine()
    open_domain(m)
    (fault,) = [e for e in m.on(contribution(**{field: value}), 0.0) if isinstance(e, fx.ReportFault)]
    assert fault.kind == "TensorMismatch" and "b sent" in fault.message and "'w'" in fault.message


def test_sum_and_mean_of_one_tensor_end_the_job() -> None:
    m = machine()
    open_domain(m)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    (fault,) = [e for e in m.on(contribution(flags=int(Flag.AVERAGE)), 0.0) if isinstance(e, fx.ReportFault)]
    assert "b asks for the mean, others for the sum" in fault.message


def test_a_key_that_only_the_peer_pushed_ends_the_job() -> None:
    m = machine()
    open_domain(m)
    m.on(contribution(), 0.0)
    (fault,) = [e for e in m.on(ev.Pushed(ID, 0, 1, (), True), 0.0) if isinstance(e, fx.ReportFault)]
    assert fault.kind == "TensorMismatch" and "'w'" in fault.message and fault.advice


def test_a_close_does_not_overtake_the_pushes_it_closes() -> None:
    """After a restart a worker rings for a section that is not open yet, then closes."""
    m = machine()
    open_domain(m, section=False)
    assert m.on(ev.Pushed(ID, 0, 1, (0,), False), 0.0) == []
    assert m.on(ev.Pushed(ID, 0, 1, (), True), 0.0) == []
    out = m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {}), 0.0)
    assert kinds(out) == ["LogDecision", "Encode"]
    assert m.domains[ID].steps.open[1].digest == wire.digest(bytes(8)), "closed with the key, and after it"


def test_a_payload_that_does_not_decode_ends_the_job_and_names_the_sender() -> None:
    m = machine()
    open_domain(m)
    out = m.on(ev.Unusable(contribution().header, "index 99 of 32"), 0.0)
    (fault,) = [e for e in out if isinstance(e, fx.ReportFault)]
    assert fault.kind == "CorruptFrame" and fault.missing == ("b",) and "index 99 of 32" in fault.message


def test_another_number_of_lanes_is_refused() -> None:
    m = LaneMachine(LaneConfig(messages.Hello("a", "tcp://a:1", 1, 0, 1, "test"), 11))
    m.on(ev.PeerAdded(B, "b"), 0.0)
    out = m.on(hello(22, lanes=4), 0.0)
    (report,) = [e for e in out if isinstance(e, fx.ReportLink)]
    assert report.state == "refused" and "set node.lanes" in report.reason
    assert not m.links[B].up


@pytest.mark.parametrize("kind", [FrameType.HELLO, FrameType.REFUSE, FrameType.HEARTBEAT, FrameType.NACK])
def test_bodies_that_cannot_be_read_are_counted(kind: FrameType) -> None:
    header = Header(kind, sender=B, incarnation=22, to_incarnation=11)
    assert "frames_unusable" in kinds(machine().on(ev.FrameReceived(header, body=b"\xc1"), 0.0))


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


def faults(effects: list[Any]) -> list[fx.ReportFault]:
    return [e for e in effects if isinstance(e, fx.ReportFault)]


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


@pytest.mark.parametrize("settled", [False, True])
def test_a_new_tensor_in_a_closed_step_ends_the_job(settled: bool) -> None:
    m = machine()
    open_domain(m)
    m.on(ev.Pushed(ID, 0, 1, (), True), 0.0)
    if settled:
        m.on(ev.Settled(ID, 1, False, 0), 0.0)
    (fault,) = faults(m.on(ev.Pushed(ID, 0, 1, (0,), False), 0.0))
    assert (fault.kind, fault.step) == ("TensorMismatch", 1) and "after it had closed" in fault.message


def test_the_same_push_again_is_no_new_tensor() -> None:
    m = machine()
    open_domain(m)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    assert m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0) == []


@pytest.mark.parametrize(("rank", "step"), [(0, 0), (0, -1), (1, 1), (-1, 1)])
def test_impossible_pushes_are_counted(rank: int, step: int) -> None:
    m = machine()
    open_domain(m)
    assert kinds(m.on(ev.Pushed(ID, rank, step, (0,), True), 0.0)) == ["pushes_unusable"]


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


TWICE = ev.CodecChoice("twice", 3, 8, True, True, rounds=2)
SECOND = int(Flag.SECOND)


def two(me: int, memory: dict[int, ev.BlockMemory] | None = None) -> LaneMachine:
    """A domain of a (owner of the only block) and b whose codec takes two exchanges; this is a (0) or b (1)."""
    names = ("a", "b")
    m = LaneMachine(LaneConfig(messages.Hello(names[me], "tcp://x:1", 1, 0, 1, "test"), 11, 1000))
    m.on(ev.PeerAdded((B, A)[me], names[1 - me]), 0.0)
    body = messages.encode(messages.Hello(names[1 - me], "tcp://y:1", 1, 0, 1, "test"))
    m.on(ev.FrameReceived(Header(FrameType.HELLO, sender=(B, A)[me], incarnation=22, to_incarnation=11), body=body), 0)
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(JOB, 0, "ddp", 1, members, me, 1, 2, 2, 0)
    m.on(ev.DomainOpened(config, (ev.Plan(0, (ev.PlanRule("*", TWICE, "all"),), DENSE),)), 0.0)
    m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), memory or {}), 0.0)
    return m


def frame(seq: int, stage: int, phase: Phase = Phase.CONTRIBUTION, **change: Any) -> ev.FrameReceived:
    """What the other member sends."""
    flags = change.pop("flags", 0) | (SECOND if stage else 0) | (int(Flag.SUM_UNITS) if phase is Phase.AGGREGATE else 0)
    sender = A if phase is Phase.AGGREGATE else B
    return contribution(seq, phase=phase, sender=sender, codec=3, level=8, flags=flags, **change)


def data(effects: list[Any]) -> list[tuple[Phase, int, int | None]]:
    """(phase, exchange, handle) of the frames that go out."""
    sent = [e for e in effects if isinstance(e, fx.Send) and e.header.type is FrameType.DATA]
    return [(e.header.phase, 1 if e.header.flags & SECOND else 0, e.handle) for e in sent]


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


def retained(stage: int, flags: int = 0, step: int = 1, slot: int = 0) -> ev.Retained:
    flags |= int(Flag.SUM_UNITS) | (SECOND if stage else 0)
    return ev.Retained(step, slot, 60 + stage, 128, 9, 3, 8, flags, 4)


def restarted(*kept: ev.Retained, out_step: int = 0) -> LaneMachine:
    decision = ev.Decision(1, 0, 0, "twice", 99)
    return two(0, {0: ev.BlockMemory((1,), 0, 1.0, out_step, 0, 0, decision, retained=kept)})


def test_an_owner_restarted_before_the_first_sum_begins_again() -> None:
    m = restarted()
    (encode,) = [e for e in m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0) if isinstance(e, fx.Encode)] or [None]
    r = m.domains[ID].partitions[0].rounds[1]
    assert encode is None and r.encoding and r.decision is not None and r.decision.seed == 99
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    assert kinds(m.on(frame(1, 0), 0.0)) == ["Accumulate", "Release", "Finalise"]


def test_an_owner_restarted_between_the_exchanges_goes_on_with_its_first_sum() -> None:
    m = restarted(retained(0), retained(1, step=0, slot=1))
    m.on(frame(1, 0), 0.0)
    assert kinds(m.on(frame(2, 1), 0.0)) == [], "of members that had the sum: parked"
    out = m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    assert data(out) == [(Phase.AGGREGATE, 0, 60)], "whoever contributed again has not had it"
    (encode,) = [e for e in out if isinstance(e, fx.Encode)]
    assert (encode.stage, encode.aggregate) == (1, 60)
    released = [e.handle for e in out if isinstance(e, fx.Release)]
    assert released == [5, 77] and m.links[B].taken == {ID: 128}
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


def test_closing_between_the_exchanges_releases_everything() -> None:
    m = two(0)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    m.on(frame(1, 0), 0.0)
    m.on(ev.Finalised(ID, 0, 1, 6, 128, 2, False), 0.0)
    m.on(frame(2, 1), 0.0)
    out = m.on(ev.DomainClosed(ID), 0.0)
    assert [e.handle for e in out if isinstance(e, fx.Release)] == [77, 6]
