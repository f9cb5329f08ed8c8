"""How far a peer's clock is from ours, from the round trips of heartbeats.

What may live here: that estimate and how far off it may be. What may not: how clocks are echoed (`link.py`), reading
clocks, what times are corrected by it (`gcserver.admin.tracefile`).

As NTP does (RFC 5905, section 8): a heartbeat left at our clock t1, was heard at theirs t2, theirs left at t3 and came
at our t4. With trip = (t4 - t1) - (t3 - t2), theirs was ahead of ours by t3 + trip / 2 - t4, off by trip / 2 at most:
that far only if one way took all the time. So of the newest round trips the shortest counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite

#: Of so many round trips the shortest is taken; at two heartbeats a second that is the clock of eight seconds.
KEPT = 16
#: Two quartz clocks run apart by so many seconds a second at most, usually by a tenth of it.
DRIFT = 1e-4


@dataclass(frozen=True, slots=True)
class ClockSample:
    """At our clock ``at`` the peer's was ahead by ``offset``, give or take ``error``. All in seconds."""

    at: float
    offset: float
    error: float


@dataclass(slots=True)
class Clocks:
    """The newest round trips to one peer, in one life of it."""

    samples: deque[ClockSample] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, theirs: float, trip: float, now: float) -> None:
        """A heartbeat that left at their clock ``theirs`` is here, the end of a round trip of ``trip`` seconds."""
        if isfinite(theirs):
            self.samples.append(ClockSample(now, theirs + trip / 2 - now, trip / 2))

    def best(self, now: float) -> ClockSample | None:
        """The estimate that can be off by the least now; None before the first round trip."""
        return best(self.samples, now)


def best(samples: Iterable[ClockSample], now: float) -> ClockSample | None:
    """Of several samples the one that is best at our clock ``now``, dated so; its error has grown since by DRIFT."""
    aged = (ClockSample(now, s.offset, s.error + DRIFT * abs(now - s.at)) for s in samples)
    return min(aged, key=lambda s: s.error, default=None)
