"""The state of each link of a process: since when, and why.

What may live here: tests of `gcserver/runtime/linkstates.py` and `peerstatus.py` over links made here. What may not:
sockets (`test_transport.py`), daemons.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gcproto import wire
from gcproto.wire import FrameType, Header
from gcserver.admin.source import PeerState
from gcserver.core.link import Link
from gcserver.runtime import incoming
from gcserver.runtime.counters import Counters
from gcserver.runtime.linkstates import LinksChanged, LinkState, LinkStates
from gcserver.runtime.peers import Peers
from gcserver.runtime.peerstatus import LANES_COME_WITHIN, overall

B = 2
UP = LinkState(B, PeerState.UP, 100.0)


class Wires:
    """A transport that has connections, or says why not."""

    def __init__(self) -> None:
        self.troubles: dict[int, str] = {}

    def unanswered(self, peer: int) -> str:
        return "no answer yet from tcp://b:7470"


def watched(lease: float | None = None) -> tuple[LinkStates, Link, Wires]:
    """One link that was made at 10 s, silent after 3 s."""
    link, wires = Link(1, 5, B, "b", heard=10.0), Wires()
    return LinkStates({B: link}, wires, 3.0, lease), link, wires


def test_only_what_changed_is_told_and_since_when() -> None:
    states, link, _ = watched()
    assert states.changes(10.0) == (LinkState(B, PeerState.CONNECTING, 10.0, "no answer yet from tcp://b:7470"),)
    assert states.changes(12.0) == () and states.news(12.5) == []
    link.adopt(7, 13.0)
    assert states.news(13.5) == [LinksChanged((LinkState(B, PeerState.UP, 13.5),))]
    assert states.table[B].state is PeerState.UP


def test_a_trouble_of_the_connection_is_told_until_it_is_up_again() -> None:
    states, link, wires = watched()
    states.changes(10.0)
    wires.troubles[B] = "it has another key"
    assert states.changes(11.0) == (LinkState(B, PeerState.REFUSED, 11.0, "it has another key"),)
    wires.troubles[B] = "it does not admit this node's key"
    assert states.changes(12.0) == (LinkState(B, PeerState.REFUSED, 11.0, "it does not admit this node's key"),)
    del wires.troubles[B]
    link.adopt(7, 14.0)
    assert states.changes(14.0) == (LinkState(B, PeerState.UP, 14.0),)
    link.refused = "b has 2 lanes and a has 1"
    assert states.changes(15.0) == (LinkState(B, PeerState.REFUSED, 15.0, "b has 2 lanes and a has 1"),)


def test_frames_of_another_version_are_a_trouble_until_one_can_be_read() -> None:
    states, link, _ = watched()
    states.foreign(B, "it speaks version 9", 11.0)
    states.foreign(99, "nobody knows this node", 11.0)
    assert states.changes(11.0) == (LinkState(B, PeerState.REFUSED, 11.0, "it speaks version 9"),)
    link.adopt(7, 12.0)
    assert states.changes(12.0) == (LinkState(B, PeerState.UP, 12.0),)
    assert states.changes(12.5) == () and set(states.table) == {B}


def test_a_silent_peer_is_so_since_it_was_heard_and_dead_where_a_lease_is_known() -> None:
    for lease, late in ((20.0, PeerState.DEAD), (None, PeerState.RESTARTING)):
        states, link, _ = watched(lease)
        link.adopt(7, 20.0)
        states.changes(20.0)
        reason = "no answer yet from tcp://b:7470"
        assert states.changes(24.0) == (LinkState(B, PeerState.RESTARTING, 20.0, reason),)
        states.changes(50.0)
        assert states.table[B] == LinkState(B, late, 20.0, reason)


def test_a_peer_is_as_the_worst_of_its_links() -> None:
    connecting = LinkState(B, PeerState.CONNECTING, 101.0, "no connection to tcp://b:7471")
    silent = LinkState(B, PeerState.RESTARTING, 90.0, "no answer yet from tcp://b:7472")
    refused = LinkState(B, PeerState.REFUSED, 105.0, "another key")
    assert overall(UP, [(0, UP)], 110.0, 20.0) == (PeerState.UP, 100.0, "")
    assert overall(UP, [(0, connecting)], 101.0 + LANES_COME_WITHIN, 20.0) == (PeerState.UP, 100.0, "")
    late = "lane 0: no connection to tcp://b:7471"
    assert overall(UP, [(0, connecting), (1, UP)], 110.0, 20.0) == (PeerState.CONNECTING, 101.0, late)
    state, since, reason = overall(UP, [(0, connecting), (1, silent), (2, refused)], 110.0, 20.0)
    assert (state, since) == (PeerState.REFUSED, 105.0)
    assert reason == f"{late}; lane 1: nothing heard for 20 s; no answer yet from tcp://b:7472; lane 2: another key"


def test_the_supervisors_link_comes_before_those_of_lanes() -> None:
    dead = LinkState(B, PeerState.DEAD, 50.0, "no connection to tcp://b:7472")
    assert overall(dead, [(0, UP)], 110.0, 20.0) == (
        PeerState.DEAD, 50.0, "nothing heard for 60 s, lease 20 s; no connection to tcp://b:7472",
    )  # fmt: skip


def test_both_kinds_of_sockets_tell_of_frames_of_another_version() -> None:
    h = Header(FrameType.HEARTBEAT, sender=B, incarnation=7)
    raw = bytearray(wire.pack(h))
    raw[4] = 99
    states, _, _ = watched()
    fed: list[Any] = []
    lane: Any = SimpleNamespace(
        transport=SimpleNamespace(receive=lambda: [(memoryview(raw), None)]), counters=Counters(), links=states,
        trouble_once=fed.append,
    )  # fmt: skip
    incoming.receive(lane, False)
    (told,) = states.changes(20.0)
    assert (
        told.state is PeerState.REFUSED and "it speaks another protocol version" in told.reason and "99" in told.reason
    )
    peers = Peers.__new__(Peers)
    peers.states = watched()[0]
    peers._s = SimpleNamespace(warn_once=fed.append)  # type: ignore[assignment]
    peers._frame(memoryview(raw), None)
    assert peers.states.changes(20.0)[0].reason == told.reason and len(fed) == 2
