"""How a node stands with a peer, in the words of `gcserver.admin.source`.

What may live here: reading what supervisor and lanes say of their links. What may not: changing anything, what the
state of one link is (`linkstates.py`), this node's own state (`status.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from gcproto import wire
from gcserver.admin.source import PeerLane, PeerState, PeerStatus
from gcserver.runtime.linkstates import LinkState

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: A lane may need so long to be connected after the supervisor is, before anybody is told, seconds.
LANES_COME_WITHIN: Final = 3.0
#: What a lane's link makes of a peer whose supervisor is heard, the worst first.
_WORST: Final = (PeerState.REFUSED, PeerState.RESTARTING, PeerState.CONNECTING)


def peer_status(
    s: Supervisor, name: str, counters: Mapping[tuple[str, int], int], traffic: tuple[int, int]
) -> PeerStatus:
    """Of a known peer. ``counters`` by (name, peer id); ``traffic``: bytes from and to it."""
    node, now = wire.node_id(name), time.monotonic()
    link = s.machine.links[node]
    s.peers.states.changes(now)
    state, since, reason = standing(s, node, now)
    return PeerStatus(
        name,
        s.peers.addresses[name],
        state,
        reason,
        link.theirs,
        now - link.heard if link.up else None,
        link.rtt,
        *traffic,
        counters.get(("frames_resent", node), 0),
        counters.get(("frames_corrupt", node), 0),
        s.keys is not None,
        now - since,
        tuple(PeerLane(i, lane.state, now - lane.since, _words(lane, now)) for i, lane in _lanes(s, node)),
    )


def standing(s: Supervisor, node: int, now: float) -> tuple[PeerState, float, str]:
    """(state, since when, why) of a known peer, as it was looked at last."""
    return overall(s.peers.states.table[node], _lanes(s, node), now, s.config.cluster.lease)


def _lanes(s: Supervisor, node: int) -> list[tuple[int, LinkState]]:
    """What lanes say of their links to a peer."""
    lanes = [lane for lane in s.lanes.table if lane is not None and lane.ready]
    return [(lane.index, lane.links[node]) for lane in lanes if node in lane.links]


def overall(
    control: LinkState, lanes: Iterable[tuple[int, LinkState]], now: float, lease: float
) -> tuple[PeerState, float, str]:
    """(state, since when, why) of a peer: that of the supervisor's link while there is something about it, else the
    worst of the lanes' links."""
    if control.state is not PeerState.UP:
        return control.state, control.since, _words(control, now, lease)
    away = [
        (index, lane)
        for index, lane in lanes
        if lane.state in _WORST and (lane.state is not PeerState.CONNECTING or now - lane.since > LANES_COME_WITHIN)
    ]
    if not away:
        return control.state, control.since, ""
    worst = min((lane for _, lane in away), key=lambda lane: (_WORST.index(lane.state), lane.since))
    return worst.state, worst.since, "; ".join(f"lane {index}: {_words(lane, now)}" for index, lane in away)


def _words(link: LinkState, now: float, lease: float = 0.0) -> str:
    if link.state not in (PeerState.RESTARTING, PeerState.DEAD):
        return link.reason
    expired = f", lease {lease:g} s" if link.state is PeerState.DEAD else ""
    return f"nothing heard for {now - link.since:.0f} s{expired}; {link.reason}"
