"""How a node stands with a peer, in the words of `gcserver.admin.source`.

What may live here: reading links and leases. What may not: changing anything, this node's own state (`status.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gcproto import wire
from gcserver.admin.source import PeerState, PeerStatus

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor


def peer_status(
    s: Supervisor, name: str, counters: Mapping[tuple[str, int], int], traffic: tuple[int, int]
) -> PeerStatus:
    """Of a known peer. ``counters`` by (name, peer id); ``traffic``: bytes from and to it."""
    node, now = wire.node_id(name), time.monotonic()
    link = s.machine.links[node]
    state, reason = PeerState.CONNECTING, "no answer yet"
    if trouble := s.peers.transport.troubles.get(node, ""):
        state, reason = PeerState.REFUSED, trouble
    elif link.refused:
        state, reason = PeerState.REFUSED, link.refused
    elif link.up:
        quiet, lease = now - link.heard, s.config.cluster.lease
        state, reason = PeerState.UP, ""
        if quiet > lease:
            state, reason = PeerState.DEAD, f"nothing heard for {quiet:.0f} s, lease {lease:g} s"
        elif quiet > s.machine.config.quiet_after:
            state, reason = PeerState.RESTARTING, f"nothing heard for {quiet:.0f} s"
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
    )
