"""Rare probes of links that the jobs' own frames do not measure: what is sent when, and what it came to.

What may live here: the schedule, from echoes to a rate, and feeding both for the jobs that this node plans. What may
not: how a probe travels (`gcserver.core.link`: a heartbeat with padding), what follows from a rate (`linkfit.py`).

A plan that compresses strongly sends frames too small to measure a link by, so without probes it would be kept when the
link falls further, or has recovered and would carry everything. And frames may be slow because something else than the
link was. A probe's transfer is its round trip less that of a plain heartbeat. Probes begin small and grow while they
are over too soon to be timed; of those of one size the fastest counts, since gradients that are under way at the same
time, or processes that wait for a core, only make them slower. There are three, and more while the fastest still fell.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final

from gcproto import wire
from gcproto.modes import STATIC
from gcserver.core.control_events import ProbeLink
from gcserver.core.probe import PROBE_PATIENCE
from gcserver.planner.course import SURPRISE
from gcserver.runtime.linkfit import Probed

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: Bytes of the first probe of a peer; what is over too soon is tried again with so many times as many, up to these.
FIRST: Final = 64 << 10
GROWTH: Final = 4
LARGEST: Final = 4 << 20
#: A transfer of fewer seconds, or of fewer round trips, may as well have been waiting for a process to wake up.
LONG: Final = 0.02
TRIPS: Final = 8
#: Probes of one size, of which the fastest counts: so many at least, and at most, while one of the newest two was
#: faster by this share than all before them; and peers that are probed in one round.
TIMES: Final = 3
MOST: Final = 9
FASTER: Final = 0.05
PEERS: Final = 4
#: Where steps have become longer or shorter, which may be the link, rounds come so many times as often.
SOONER: Final = 8.0
#: The share of the link that probes may take, as seconds of quiet for each second of probing.
QUIET: Final = 1000.0


@dataclass(slots=True)
class Prober:
    """The schedule of one node: a round of probes ``every`` so many seconds. Times are seconds on one clock."""

    every: float
    _begun: float = -math.inf
    _free: float = -math.inf
    _order: deque[str] = field(default_factory=deque)
    #: peers of this round that are still to be measured; of the first one, what its probes came to
    _left: list[str] = field(default_factory=list)
    _size: int = FIRST
    _waits: float | None = None
    _took: list[float] = field(default_factory=list)
    _exact: bool = True
    _spent: float = 0.0
    #: rounds in a row that a peer left unanswered
    _silent: int = 0
    _found: dict[str, Probed] = field(default_factory=dict)

    def ask(
        self, now: float, peers: list[str], sooner: bool = False, known: bool = False, doubt: bool = False
    ) -> tuple[str, int] | None:
        """The peer to probe now, and with how many bytes; None: nothing.

        peers: whose links are to be measured. sooner: there is reason to think that they have changed. known: they were
        measured before, so that the first round has time; else it waits only for frames that may tell. doubt: frames
        say that one has become slower, which is waited for.
        """
        if self._waits is not None:
            if now - self._waits < PROBE_PATIENCE:
                return None
            self._end(now)  # a peer that is away, or comes back as a new process
        if not peers:
            if self._left:
                self._end(now)
            self._begun = -math.inf  # the next job's links have time, too
            return None
        if self._begun == -math.inf:
            self._begun = now if known else now - self.every * (1 - 1 / SOONER)
        if not self._left:
            if now < max(self._free, 0.0 if doubt else self._begun + self.every / (SOONER if sooner else 1)):
                return None
            self._begin(now, peers)
        self._waits = now
        return self._left[0], self._size

    def _begin(self, now: float, peers: list[str]) -> None:
        # With many peers each has its turn.
        self._order = deque([p for p in self._order if p in peers] + [p for p in peers if p not in self._order])
        self._left = [self._order[i] for i in range(min(PEERS, len(self._order)))]
        self._order.rotate(-len(self._left))
        self._begun, self._spent, self._size, self._exact = now, 0.0, FIRST, True
        self._took.clear()
        self._found.clear()

    def on_echo(self, peer: str, nbytes: int, trip: float, usual: float, now: float) -> dict[str, Probed] | None:
        """A probe is back after ``trip`` seconds, a plain heartbeat takes ``usual``; with a round's last its results by
        peer."""
        if self._waits is None or (peer, nbytes) != (self._left[0], self._size):
            return None
        self._waits, self._silent = None, 0
        took = max(trip - usual, 1e-6)
        self._spent += took
        exact = took >= max(LONG, TRIPS * usual)
        if not exact and self._size < LARGEST:
            self._size *= GROWTH
            self._took.clear()
            return None
        self._exact = self._exact and exact
        self._took.append(took if exact else trip)
        if self._falls() and len(self._took) < MOST:
            return None
        least, count = min(self._took), len(self._took)
        self._found[peer] = Probed(now, nbytes / least, max(self._took) / least - 1.0, count, self._exact)
        self._left.pop(0)
        self._size, self._exact = FIRST, True
        self._took.clear()
        if self._left:
            return None
        self._end(now)
        return dict(self._found)

    @property
    def peers(self) -> Collection[str]:
        """All that are probed in turn."""
        return self._order

    def _falls(self) -> bool:
        """Whether another probe of this size may be faster than all before it."""
        before = self._took[: 1 - TIMES]
        return not before or min(before) * (1 - FASTER) > min(self._took)

    def _end(self, now: float) -> None:
        self._free = self._begun + QUIET * self._spent
        if self._waits is not None:
            # Mostly the peer was away, and nothing was sent. Only a link that has become hundreds of times slower takes
            # that long: for its sake the pauses double, up to what that would have cost it.
            self._free = max(self._free, now + min(QUIET * (now - self._waits), self.every * 2.0**self._silent))
            self._silent = min(self._silent + 1, 30)
        self._waits = None
        self._left.clear()


class LinkProbes:
    """The probes of one daemon, for the jobs whose plans its planner makes."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        self._every = supervisor.config.plan.probe_every
        self._prober = Prober(self._every)
        #: of each peer, when the newest probe left whose echo is known
        self._heard: dict[str, float] = {}

    def tick(self) -> None:
        """Hear echoes; send a probe if it is time for one."""
        if not self._every:
            return
        now = time.monotonic()
        self._hear(now)
        link = self._s.lanes.link
        peers, sooner, known = self._wanted(link.in_doubt)
        if peers and not link.in_doubt and not link.silent(now, self._every / 2):
            return
        asked = self._prober.ask(now, peers, sooner, known, link.in_doubt)
        if asked is not None:
            self._s.feed(ProbeLink(asked[0], padding()[: asked[1]]))

    def _hear(self, now: float) -> None:
        for peer in self._s.peers.addresses:
            link = self._s.machine.links.get(wire.node_id(peer))
            probe = link.probe if link is not None else None
            if probe is None or probe.trip is None or probe.sent == self._heard.get(peer):
                continue
            self._heard[peer] = probe.sent
            found = self._prober.on_echo(peer, probe.nbytes, probe.trip, self._s.lanes.link.trip(peer), now)
            if found is not None:
                self._s.lanes.link.on_probes(found, self._prober.peers)

    def _wanted(self, doubt: bool) -> tuple[list[str], bool, bool]:
        """(peers of the jobs planned here, whether steps of one have become longer or shorter, whether the link of each
        was measured before). In doubt, of those with plans of operators or of other nodes' planners as well, for whom
        somebody asked."""
        peers: dict[str, None] = {}
        sooner, known = False, True
        for job in self._s.machine.jobs.values():
            if job.ended is not None or (job.node != job.first and not doubt):
                continue
            domain = self._s.planning.facts.model(job)
            if domain is None or (self._s.planning.course(job).standing.mode == STATIC and not doubt):
                continue
            if domain.settled >= self._s.config.plan.warmup_steps:
                peers.update(dict.fromkeys(job.others))
                name = job.id, domain.config.domain
                sooner = sooner or self._s.profiler.departed(*name) > SURPRISE
                known = known and self._s.profiler.knows_link(*name)
        return list(peers), sooner, known


@cache
def padding() -> bytes:
    """Bytes that no link can compress."""
    return hashlib.shake_128(b"gradcomm").digest(LARGEST)
