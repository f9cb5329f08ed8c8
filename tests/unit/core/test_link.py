"""One link by itself: sequences, acknowledgements, asking again, lives, credit.

What may live here: tests of `gcserver/core/link.py` with two links and no network. What may not: rounds.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcproto import messages, packed, wire
from gcproto.messages import MAX_NACK
from gcproto.records import replace
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.core.accounts import MAX_BOOKS
from gcserver.core.effects import Count, Reconnect, ReportLink, Send
from gcserver.core.link import MAX_AHEAD, MAX_BLIND, Link
from gcserver.core.probe import PROBE_PATIENCE, Probe

A, B = wire.node_id("a"), wire.node_id("b")
D, OTHER = (b"j" * 16, 0), (b"j" * 16, 1)
HELLO = messages.Hello("a", "tcp://a:1", 1, 0, 1, "test")


def pair(credit: int = 1000) -> tuple[Link, Link]:
    """Two links that know each other."""
    a, b = Link(A, 11, B, "b", credit), Link(B, 22, A, "a", credit)
    a.adopt(22, 0.0)
    b.adopt(11, 0.0)
    return a, b


def data(phase: Phase = Phase.AGGREGATE, nbytes: int = 100) -> Header:
    return Header(FrameType.DATA, phase, job=D[0], domain=D[1], sender=A, incarnation=11, payload_bytes=nbytes)


def hear(link: Link, beat: Send) -> None:
    """A heartbeat arrives."""
    assert link.fresh(beat.header, 1.0, HELLO, lambda e: None)
    link.on_beat(beat.body, 0.0, lambda e: None)


def receive(link: Link, sent: Send) -> tuple[bool, list[Any]]:
    """Whether a sequenced frame is taken, and what the link says to it."""
    out: list[Any] = []
    return link.fresh(sent.header, 1.0, HELLO, out.append) and link.accept(sent.header, out.append), out


def kinds(effects: list[Any]) -> list[str]:
    return [e.header.type.name if isinstance(e, Send) else getattr(e, "name", type(e).__name__) for e in effects]


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=8))
def test_every_number_is_taken_once_in_any_order(order: list[int], again: list[int]) -> None:
    a, b = pair()
    sent = [a.send(data()) for _ in range(8)]
    taken = [i for i in [*order, *again] if receive(b, sent[i])[0]]
    assert sorted(taken) == list(range(8))
    assert b.received == 8 and not b.ahead and not b.missing()


def test_a_number_that_comes_early_and_again_is_taken_once() -> None:
    a, b = pair()
    first, second = a.send(data()), a.send(data())
    assert [receive(b, sent)[0] for sent in (second, second, first, first)] == [True, False, True, False]


def test_a_gap_is_asked_for_when_a_higher_number_comes() -> None:
    a, b = pair()
    first, second = a.send(data(), 7), a.send(data(), 8)
    taken, out = receive(b, second)
    assert taken and kinds(out) == ["NACK", "nacks_sent"]
    again: list[Any] = list(a.on_nack(out[0].body))
    assert kinds(again) == ["DATA", "frames_resent"]
    assert again[0].header.flags & Flag.RESENT and again[0].handle == 7
    assert replace(again[0].header, flags=0) == first.header
    assert receive(b, again[0])[0]
    assert not b.missing()


def test_a_gap_at_the_end_shows_in_the_heartbeat() -> None:
    a, b = pair()
    a.send(data())
    out: list[Any] = []
    beat = a.heartbeat()
    assert b.fresh(beat.header, 1.0, HELLO, out.append)
    assert b.on_beat(beat.body, 0.0, out.append).highest == 1
    assert kinds(out) == ["NACK", "nacks_sent"]


def test_acknowledged_frames_are_forgotten() -> None:
    a, b = pair()
    for _ in range(3):
        receive(b, a.send(data()))
    assert list(a.unacked) == [1, 2, 3]
    assert a.fresh(b.heartbeat().header, 1.0, HELLO, lambda e: None)
    assert not a.unacked
    assert a.on_nack(packed.encode(messages.Nack((2,)))) == []


def test_an_acknowledgement_covers_what_was_sent_and_no_more() -> None:
    """Whatever number a peer names; what is sent after it is kept until it is acknowledged itself."""
    a, _ = pair()
    for _ in range(3):
        a.send(data())
    heard = Header(FrameType.HEARTBEAT, sender=B, incarnation=22, to_incarnation=11)
    for ack, left in ((2, [3]), (1, [3]), (1 << 63, []), (3, [])):
        assert a.fresh(replace(heard, ack=ack), 1.0, HELLO, lambda e: None)
        assert list(a.unacked) == left
    a.send(data())
    assert a.fresh(replace(heard, ack=3), 1.0, HELLO, lambda e: None) and list(a.unacked) == [4]
    a.adopt(23, 2.0)
    a.send(data())
    assert list(a.unacked) == [1] and a.acked == 0


def test_what_is_not_wanted_any_more_comes_as_a_filler_that_returns_credit() -> None:
    a, b = pair()
    a.send(data(Phase.CONTRIBUTION, 300), 7, wanted=lambda: False)
    for _ in range(2):  # asked for twice: the second filler is as good as the first
        filler = a.on_nack(packed.encode(messages.Nack((1,))))[0]
        assert isinstance(filler, Send)
        assert filler.header.type is FrameType.FILLER and filler.header.aux == 300 and filler.handle is None
        assert receive(b, filler)[0] or b.received == 1


def test_a_filler_for_an_aggregate_costs_nothing() -> None:
    a, _ = pair()
    a.send(replace(data(), aux=1), 7, wanted=lambda: False)
    (filler,) = a.on_nack(packed.encode(messages.Nack((1,))))
    assert isinstance(filler, Send) and filler.header.aux == 0


def test_credit_is_spent_returned_and_said_in_time() -> None:
    a, b = pair(credit=1000)
    for _ in range(2):
        assert a.may_spend(D, 500, first=True)
        receive(b, a.send(data(Phase.CONTRIBUTION, 500)))
    assert not a.may_spend(D, 1, first=True)
    (notice,) = b.take(D, 500)  # a quarter of the credit and more: said at once
    assert isinstance(notice, Send)
    hear(a, notice)
    assert a.may_spend(D, 500, first=True) and not a.may_spend(D, 1, first=False)
    hear(a, notice)  # saying it twice changes nothing
    assert a.outstanding(D) == 500
    assert b.take(D, 100) == []  # little: the next frame says it
    frame = b.send(Header(FrameType.DATA, Phase.AGGREGATE, job=D[0], sender=B, incarnation=22))
    assert frame.header.credit == 600
    a.fresh(frame.header, 1.0, HELLO, lambda e: None)
    assert a.outstanding(D) == 400


def test_a_domain_without_credit_does_not_hold_up_another() -> None:
    a, b = pair(credit=100)
    a.send(data(Phase.CONTRIBUTION, 100))
    assert not a.may_spend(D, 1, first=True) and a.may_spend(OTHER, 100, first=True)
    b.take(OTHER, 50)
    hear(a, b.heartbeat())
    assert a.outstanding(D) == 100 and a.outstanding(OTHER) == 0


def test_a_heartbeat_speaks_of_what_was_taken_only() -> None:
    a, b = pair()
    a.send(data(Phase.CONTRIBUTION, 100))
    b.send(data(Phase.AGGREGATE, 100))
    decode = packed.Decoder[messages.Beat](messages.Beat)
    for link in (a, b):
        assert decode(link.heartbeat().body).credits == (), "of frames sent there is nothing to return"
    b.take(D, 100)
    assert decode(b.heartbeat().body).credits == ((*D, 100),)


def test_a_closed_domain_leaves_no_books() -> None:
    a, b = pair()
    a.send(data(Phase.CONTRIBUTION, 100))
    b.take(D, 100)
    for link in (a, b):
        link.forget(D)
        assert not link.accounts
    hear(a, b.heartbeat())
    assert not a.accounts


def test_a_frame_larger_than_the_credit_goes_once_no_more_than_half_is_out() -> None:
    a, _ = pair(credit=100)
    a.send(data(Phase.CONTRIBUTION, 50))
    assert not a.may_spend(D, 5000, first=False)
    assert a.may_spend(D, 5000, first=True)
    a.send(data(Phase.CONTRIBUTION, 5000))
    assert not a.may_spend(D, 1, first=True)


def test_later_steps_hold_no_more_than_half_so_that_the_first_one_ends() -> None:
    a, _ = pair(credit=100)
    assert a.may_spend(D, 50, first=False) and not a.may_spend(D, 51, first=False)
    a.send(data(Phase.CONTRIBUTION, 50))
    assert not a.may_spend(D, 1, first=False)
    assert a.may_spend(D, 50, first=True)
    a.send(data(Phase.CONTRIBUTION, 50))
    assert not a.may_spend(D, 1, first=True)


def test_more_credit_than_was_spent_is_not_believed() -> None:
    a, b = pair()
    a.send(data(Phase.CONTRIBUTION, 10))
    b.take(D, 10**6)
    hear(a, b.heartbeat())
    assert a.accounts[D].returned == 10 and a.outstanding(D) == 0


def test_a_new_life_starts_from_zero_on_a_fresh_socket() -> None:
    a, b = pair()
    receive(b, a.send(data(Phase.CONTRIBUTION, 10)))
    out = a.adopt(23, 2.0)
    assert out == [Reconnect(B), ReportLink(B, "up")]
    assert (a.next_seq, a.unacked, a.accounts, a.received) == (1, {}, {}, 0)


@pytest.mark.parametrize(
    ("change", "says_hello"),
    [({"incarnation": 10}, False), ({"incarnation": 12}, True), ({"to_incarnation": 21}, True)],
)
def test_frames_of_other_lives_are_refused(change: dict[str, Any], says_hello: bool) -> None:
    a, b = pair()
    header = replace(a.send(data()).header, **change)
    out: list[Any] = []
    assert not b.fresh(header, 1.0, HELLO, out.append)
    assert kinds(out) == ["frames_stale"] + ["HELLO"] * says_hello
    out.clear()
    assert not b.fresh(header, 1.01, HELLO, out.append)
    assert kinds(out) == ["frames_stale"], "one HELLO answers a burst"


def test_a_damaged_payload_is_asked_for_and_charged_once_per_frame() -> None:
    a, b = pair()
    header = a.send(data()).header
    out: list[Any] = []
    assert not b.on_damaged(header, out.append)
    assert kinds(out) == ["frames_corrupt", "NACK", "nacks_sent"]
    assert b.on_damaged(replace(header, flags=Flag.RESENT), out.append), "the same frame a second time"


def test_damage_to_frames_that_are_not_needed_is_only_counted() -> None:
    a, b = pair()
    sent = a.send(data())
    receive(b, sent)
    for header in (sent.header, replace(sent.header, incarnation=10), a.heartbeat().header):
        out: list[Any] = []
        assert not b.on_damaged(header, out.append)
        assert kinds(out) == ["frames_corrupt"]


def test_damaged_headers_in_a_row_give_the_link_up() -> None:
    a, b = pair()
    verdicts = [b.on_damaged(None, lambda e: None) for _ in range(MAX_BLIND - 1)]
    assert not any(verdicts)
    b.fresh(a.heartbeat().header, 1.0, HELLO, lambda e: None)
    assert not b.on_damaged(None, lambda e: None), "a good frame between them starts the count again"
    assert [b.on_damaged(None, lambda e: None) for _ in range(MAX_BLIND - 1)][-1]


def test_absurd_numbers_are_bounded() -> None:
    a, b = pair()
    header = replace(a.send(data()).header, link_seq=MAX_AHEAD + 2)
    out: list[Any] = []
    assert not b.accept(header, out.append)
    assert kinds(out) == ["frames_refused"]
    b.on_beat(packed.encode(messages.Beat(2**60)), 0.0, out.append)
    assert len(b.missing()) == MAX_NACK


def test_what_is_asked_for_many_times_is_sent_once() -> None:
    a, _ = pair()
    a.send(data())
    out = a.on_nack(packed.encode(messages.Nack((1,) * MAX_NACK)))
    assert kinds(out) == ["DATA", "frames_resent"]
    with pytest.raises(packed.MessageError):
        a.on_nack(packed.encode(messages.Nack((1,) * (MAX_NACK + 1))))


def test_ticks_say_hello_then_beat_and_report_silence() -> None:
    a = Link(A, 11, B, "b")
    assert kinds(list(a.tick(0.0, HELLO, 3.0))) == ["HELLO"]
    a.adopt(22, 0.0)
    assert kinds(list(a.tick(0.5, HELLO, 3.0))) == ["HELLO"], "until the peer has answered this life"
    b = Link(B, 22, A, "a")
    b.adopt(11, 0.0)
    a.fresh(b.heartbeat().header, 1.0, HELLO, lambda e: None)
    assert kinds(list(a.tick(1.5, HELLO, 3.0))) == ["HEARTBEAT"]
    assert a.tick(5.0, HELLO, 3.0)[-1] == ReportLink(B, "quiet")
    out: list[Any] = []
    a.fresh(b.heartbeat().header, 6.0, HELLO, out.append)
    assert out == [ReportLink(B, "up")]


def test_credit_is_accounted_for_so_many_domains_of_a_peer() -> None:
    _, b = pair()
    for domain in range(MAX_BOOKS):
        b.take((bytes(16), domain), 1)
    assert b.take((b"x" * 16, 0), 300) == [Count("credit_refused", A)]
    assert len(b.accounts) == MAX_BOOKS
    b.take((bytes(16), 5), 9)
    assert b.taken((bytes(16), 5)) == 10, "those that are known go on"


def test_heartbeats_measure_the_round_trip_whatever_the_clocks_say() -> None:
    """b's clock is 1000 s ahead, a frame takes 3 ms there and 5 ms back, and b answers when its own timer fires."""
    a, b = pair()
    for turn in range(3):
        start = 10.0 + turn
        b.on_beat(a.heartbeat(now=start).body, 1000 + start + 0.003, lambda e: None)
        a.on_beat(b.heartbeat(now=1000 + start + 0.4).body, start + 0.405, lambda e: None)
    assert a.rtt == pytest.approx(0.008, abs=1e-6)
    assert b.rtt == pytest.approx(0.008, abs=1e-6)
    a.adopt(b.incarnation + 1, 20.0)
    assert a.rtt is None, "another life, perhaps another clock"


def test_a_probe_is_timed_by_itself_and_leaves_the_usual_trip_alone() -> None:
    """b's clock is 1000 s ahead; a plain frame takes 4 ms each way, a padded one 300 ms."""
    a, b = pair()
    nothing = lambda e: None  # noqa: E731
    b.on_beat(a.heartbeat(now=10.0).body, 1010.004, nothing)
    a.on_beat(b.heartbeat(now=1010.4).body, 10.404, nothing)
    assert a.rtt == pytest.approx(0.008, abs=1e-6) and a.probe is None
    padded = a.heartbeat(now=10.5, pad=bytes(100_000)).body
    assert a.probe == Probe(10.5, 100_000) and len(padded) > 100_000
    # the next plain one comes right behind it, and must not be what b echoes
    plain = a.heartbeat(now=10.7).body
    a.on_beat(b.heartbeat(now=1010.75).body, 10.754, nothing)
    assert a.probe.trip is None, "b has not heard it yet"
    b.on_beat(padded, 1010.8, nothing)
    b.on_beat(plain, 1010.801, nothing)
    for answer in (1011.0, 1011.5):
        a.on_beat(b.heartbeat(now=answer).body, answer - 1000 + 0.004, nothing)
        assert a.probe.trip == pytest.approx(0.304, abs=1e-6)
        assert a.rtt == pytest.approx(0.008, abs=1e-6)
    b.on_beat(a.heartbeat(now=12.0).body, 1012.004, nothing)
    assert b.their_clock == 12.0, "heartbeats have clocks again"
    a.adopt(b.incarnation + 1, 20.0)
    assert a.probe is None


def test_a_probe_that_is_never_echoed_does_not_stop_the_clock_for_ever() -> None:
    a, b = pair()
    a.heartbeat(now=10.0, pad=b"x")
    for now, clock in ((10.0 + PROBE_PATIENCE - 1, 0.0), (10.0 + PROBE_PATIENCE, 10.0 + PROBE_PATIENCE)):
        b.on_beat(a.heartbeat(now=now).body, 5.0, lambda e: None)
        assert b.their_clock == clock


@pytest.mark.parametrize(("echo", "held"), [(5e9, 0.0), (1.0, 50.0), (1.0, -3.0), (float("nan"), 0.0), (1.0, 1e300)])
def test_round_trips_that_cannot_be_are_not_believed(echo: float, held: float) -> None:
    a, _ = pair()
    a.on_beat(packed.encode(messages.Beat(0, sent=7.0, echo=echo, held=held)), 10.0, lambda e: None)
    assert a.rtt is None


def test_bodies_that_are_no_messages_are_message_errors() -> None:
    a, _ = pair()
    for call in (lambda: a.on_nack(b"\xc1"), lambda: a.on_beat(b"noise", 0.0, lambda e: None)):
        with pytest.raises(packed.MessageError):
            call()
    assert a.nack() == []
