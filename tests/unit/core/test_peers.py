"""The control machine's links: peers that do not fit.

What may live here: tests of `gcserver/core/peers.py`. What may not: a link's own arithmetic (`test_link.py`).
"""

from __future__ import annotations

from gcproto import messages, packed
from gcproto.records import replace
from gcproto.spans import AskSpans, TraceOrder
from gcproto.wire import FrameType
from gcserver.core import control_events as ce
from gcserver.core.effects import Count, Send
from gcserver.core.events import PeerAdded, Tick
from gcserver.core.lives import LAST_LIFE
from gcserver.core.peers import MAX_STRANGERS
from gcserver.core.probe import Probe
from tests.unit.core.control_machine import B, control_from_b, control_sent, hello_from, machine


def test_another_number_of_lanes_is_refused_on_both_sides() -> None:
    m = machine(lanes=2)
    m.on(PeerAdded(B, "b"), 0.0)
    out = m.on(hello_from("b", 7, lanes=3), 0.0)
    (refusal,) = [e for e in out if isinstance(e, Send)]
    assert refusal.header.type is FrameType.REFUSE and b"set node.lanes" in refusal.body
    (line,) = [e for e in out if isinstance(e, ce.Log)]
    assert "b has 3 lanes and a has 2" in line.text
    assert not m.links[B].up


def test_a_name_used_twice_is_said() -> None:
    m = machine()
    out = m.on(hello_from("a", 999), 0.0)
    assert any(isinstance(e, ce.Log) and "names must differ" in e.text for e in out)


def test_a_peer_nobody_told_us_of_becomes_known_by_its_hello() -> None:
    assert ce.KnowPeer("b", "tcp://b:7000") in machine().on(hello_from("b", 7), 0.0)


def test_strangers_are_bounded_and_those_who_are_known_stay_so() -> None:
    m = machine()
    for i in range(MAX_STRANGERS):
        assert any(isinstance(e, ce.KnowPeer) for e in m.on(hello_from(f"n{i}", 7), 0.0))
    assert m.on(hello_from("late", 7), 0.0) == [Count("peers_refused")]
    assert any(isinstance(e, ce.KnowPeer) for e in m.on(hello_from("n3", 8), 0.0)), "it says hello again"


def test_a_life_numbered_ahead_of_all_clocks_is_refused_and_leaves_the_next_one_its_place() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    m.on(Tick(1000), 0.0)
    m.on(hello_from("b", 7, to=100), 0.0)
    out = m.on(hello_from("b", LAST_LIFE, to=100), 0.0)
    (refusal,) = [e for e in out if isinstance(e, Send)]
    assert refusal.header.type is FrameType.REFUSE and b"set the clocks" in refusal.body
    assert Count("lives_refused", B) in out and any(isinstance(e, ce.Log) for e in out)
    assert m.links[B].theirs == 7 and m.links[B].up, "who was there is not disturbed"
    assert not any(isinstance(e, ce.Log) for e in m.on(hello_from("b", LAST_LIFE, to=100), 0.0)), "said once"
    m.on(hello_from("b", 8, to=100), 0.0)
    assert m.links[B].theirs == 8
    m.on(Tick(2000), 0.0)
    m.on(hello_from("b", 1500, to=100), 0.0)
    assert m.links[B].theirs == 1500, "time has come"


def test_a_frame_that_cannot_be_read_is_counted() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    bad = replace(hello_from("b", 7), body=b"\xc1noise")
    assert Count("frames_unusable", B) in m.on(bad, 0.0)
    assert not m.links[B].up


def test_a_peer_of_another_release_is_said() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    hello = packed.encode(messages.Hello("b", "tcp://b:7000", 1, 0, 1, "9.9"))
    out = m.on(replace(hello_from("b", 7), body=hello), 0.0)
    (line,) = [e for e in out if isinstance(e, ce.Log)]
    assert line.text == "peer b is up with release 9.9; this is test"
    other = machine()
    other.on(PeerAdded(B, "b"), 0.0)
    out = other.on(hello_from("b", 7), 0.0)
    assert ce.Log("info", "peer b is up") in out


def test_what_concerns_a_trace_passes_by_the_jobs() -> None:
    m = machine()
    order, ask = TraceOrder(5, b"", 3, 60.0), AskSpans(5, 0)
    m.on(PeerAdded(B, "b"), 0.0)
    assert control_sent(m.on(ce.TellPeer("b", order), 0.0)) == [], "the link is not up"
    m.on(hello_from("b", 7, to=100), 0.0)
    assert control_sent(m.on(ce.TellPeer("b", order), 0.0)) == [order]
    assert control_sent(m.on(ce.TellPeer("nobody", order), 0.0)) == []
    assert ce.PeerSaid("b", ask) in m.on(control_from_b(ask, 1), 0.0)
    assert not any(isinstance(e, ce.PeerSaid) for e in m.on(control_from_b(ask, 1), 0.0)), "each frame counts once"


def test_a_probe_is_a_padded_heartbeat_to_a_peer_that_is_there() -> None:
    m = machine()
    m.on(PeerAdded(B, "b"), 0.0)
    assert m.on(ce.ProbeLink("b", bytes(5000)), 1.0) == [], "it has not answered yet"
    assert m.on(ce.ProbeLink("nobody", bytes(5000)), 1.0) == []
    m.on(hello_from("b", 7, to=100), 1.0)
    (probe,) = m.on(ce.ProbeLink("b", bytes(5000)), 2.0)
    assert isinstance(probe, Send) and probe.header.type is FrameType.HEARTBEAT and len(probe.body) > 5000
    assert m.links[B].probe == Probe(2.0, 5000)
