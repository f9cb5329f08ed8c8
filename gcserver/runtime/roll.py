"""Which peers are still shown: those that are gone for good are not, after a while.

What may live here: that rule. What may not: connections, which are tried for as long as the daemon lives (`peers.py`),
what is shown of a peer (`peerstatus.py`).

A peer is shown while it is in `cluster.peers`, is or was a member of a job that is here, or is up; and `SHOWN_FOR`
longer, so that whoever looks, and every alert that waits some minutes, sees that it went. Whoever is there again is
shown again. A node that was heard and whose key was taken out of `security.peers` since is gone by the operator's word,
whatever `cluster.peers` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from gcproto import wire
from gcserver.admin.source import PeerState

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: For so long a peer is shown after it was last needed or up, seconds: three times what Prometheus looks back.
SHOWN_FOR: Final = 900.0
log = logging.getLogger("gcserver")


class Roll:
    """The peers of one daemon by name. ``now`` on any monotonic clock, seconds."""

    def __init__(self) -> None:
        #: when each was last one to be shown
        self._last: dict[str, float] = {}
        self._dropped: set[str] = set()

    def call(self, names: Iterable[str], members: set[str], wanted: Callable[[str], bool], now: float) -> None:
        """Look at all known peers. ``members``: of the jobs that are here; ``wanted(name)``: it is configured or up."""
        for name in names:
            if name in members or wanted(name):
                self._last[name] = now
                self._dropped.discard(name)
            elif now - self._last.setdefault(name, now) > SHOWN_FOR and name not in self._dropped:
                self._dropped.add(name)
                log.info("peer %s is shown no longer: it is in no job and not in cluster.peers, and away", name)

    def has(self, name: str) -> bool:
        """Whether a peer is to be shown; one that was never looked at is."""
        return name not in self._dropped


def members(s: Supervisor) -> set[str]:
    """Of all jobs that are here, with those that were lost."""
    return {m.node for job in s.machine.jobs.values() for m in job.record.origin}


def wanted(s: Supervisor, configured: frozenset[str], name: str) -> bool:
    """Whether a peer is up, or configured and not taken out since."""
    node = wire.node_id(name)
    state = s.peers.states.table.get(node)
    if state is not None and state.state is PeerState.UP:
        return True
    taken_out = s.keys is not None and name not in s.keys.admitted and s.machine.links[node].theirs != 0
    return name in configured and not taken_out
