"""How one process stands with its peers: the state of each link, since when, and what is wrong with it, in words.

What may live here: reading links and what their transport says of them. What may not: changing anything, what a node
makes of all its links to a peer (`peerstatus.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from gcserver.admin.source import PeerState
from gcserver.core.link import Link


@dataclass(frozen=True, slots=True)
class LinkState:
    """Of the link to one peer. ``since``: ``time.monotonic()``, which all processes of a machine share; of one that is
    silent (restarting, dead) when it was last heard. ``reason``: "" where it is up."""

    peer: int
    state: PeerState
    since: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LinksChanged:
    """From a lane: how it stands with those peers with which it stands otherwise than it last said."""

    links: tuple[LinkState, ...]


class Connections(Protocol):
    """What is asked of a transport."""

    #: why a peer cannot be worked with over it
    troubles: dict[int, str]

    def unanswered(self, peer: int) -> str:
        """Where it looks for a peer from which nothing comes, and what it finds there."""
        ...


class LinkStates:
    """Of one process. ``lease``: a peer that is silent for longer is dead, seconds; None: that is not decided here."""

    def __init__(
        self, links: Mapping[int, Link], connections: Connections, quiet_after: float, lease: float | None = None
    ) -> None:
        self._links, self._connections, self._quiet_after, self._lease = links, connections, quiet_after, lease
        self.table: dict[int, LinkState] = {}
        #: what was wrong with frames that told nothing but who sent them, and when
        self._foreign: dict[int, tuple[str, float]] = {}

    def foreign(self, peer: int, text: str, now: float) -> None:
        """Frames in the name of ``peer`` cannot be read; that holds until one can."""
        if peer in self._links:
            self._foreign[peer] = text, now

    def changes(self, now: float) -> tuple[LinkState, ...]:
        """Look at all links; those that are not what they were."""
        found = []
        for peer, link in self._links.items():
            state, since, reason = self._of(peer, link, now)
            before = self.table.get(peer)
            if before is None or before.state is not state or before.reason != reason:
                if before is not None and before.state is state:
                    since = before.since
                self.table[peer] = LinkState(peer, state, since, reason)
                found.append(self.table[peer])
        return tuple(found)

    def news(self, now: float) -> list[LinksChanged]:
        """What a lane has to say of them."""
        changed = self.changes(now)
        return [LinksChanged(changed)] if changed else []

    def _of(self, peer: int, link: Link, now: float) -> tuple[PeerState, float, str]:
        """(state, since when if it is new, reason)."""
        foreign, at = self._foreign.get(peer, ("", 0.0))
        if foreign and link.heard > at:
            del self._foreign[peer]
            foreign = ""
        if refused := self._connections.troubles.get(peer) or link.refused or foreign:
            return PeerState.REFUSED, now, refused
        if not link.up:
            return PeerState.CONNECTING, now, self._connections.unanswered(peer)
        quiet = now - link.heard
        if quiet <= self._quiet_after:
            return PeerState.UP, now, ""
        dead = self._lease is not None and quiet > self._lease
        return PeerState.DEAD if dead else PeerState.RESTARTING, link.heard, self._connections.unanswered(peer)
