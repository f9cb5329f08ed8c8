"""The clocks of a trace's nodes, so that all its times become those of one of them.

What may live here: from samples of how clocks differ to corrected times, and how far off these may be. What may not:
measuring clocks (`gcserver.core.clocks`), what happened when (`tracefile.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Final

from gcserver.admin.spans import TraceClock
from gcserver.core.clocks import DRIFT

#: Times of a clock that began years ago are exact to so many seconds.
ROUNDING: Final = 1e-6
#: Three hundred years, s. What is further off is no time of a clock, and not to be reckoned with.
LONGEST: Final = 1e10


def is_time(seconds: float) -> bool:
    """Whether it may be a time of some clock, or the difference of two."""
    return abs(seconds) <= LONGEST


@dataclass(frozen=True, slots=True)
class Clock:
    """A node's clock beside the asked node's: ahead by ``early`` at the latter's time ``since``, by ``late`` at
    ``until``, evenly between; off by ``error`` at most. Seconds."""

    since: float
    early: float
    until: float
    late: float
    error: float

    @classmethod
    def of(cls, samples: Sequence[TraceClock]) -> Clock:
        """From a trace's samples, in order of time; none: the asked node's own. Raises ValueError for other numbers."""
        if not samples:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        first, last = samples[0], samples[-1]
        if not all(is_time(t) for s in samples for t in (s.at, s.offset, s.error)):
            raise ValueError("its clock cannot be compared: what it says of it are no times")
        error = max(s.error for s in samples)
        apart, span = abs(last.offset - first.offset), abs(last.at - first.at)
        if apart > first.error + last.error + DRIFT * span + ROUNDING:
            # No drift: one of the machines slept in between, and its clock stood. When that was nobody knows.
            error += apart
        elif span:
            # So far off may be where on the way between both samples a time is, see `ours`.
            error += apart / span * (error + apart)
        return cls(first.at, first.offset, last.at, last.offset, error)

    def offset(self, ours: float) -> float:
        """By how much it is ahead at the asked node's time ``ours``; not beyond what was seen."""
        if self.until <= self.since:
            return self.late
        share = min(1.0, max(0.0, (ours - self.since) / (self.until - self.since)))
        return self.early + share * (self.late - self.early)

    def ours(self, theirs: float) -> float:
        """A time of its clock on the asked node's."""
        # Clocks drift by thousandths of a per cent: where on the way between both samples is clear enough by the first.
        return theirs - self.offset(theirs - self.early)

    def narrowed(self, least: float, most: float) -> Clock:
        """The same, where all its times are known to be too small by ``least`` to ``most``, s: by frames, none of which
        arrives before it left. They are believed where they contradict the samples; where they contradict each other,
        as those of a clock that stood in between do, or say too little, nothing but the error is another one."""
        low, high = max(-self.error, least), min(self.error, most)
        if not low <= high + ROUNDING:
            low, high = least, most
        if not (low <= high + ROUNDING and isfinite(low) and isfinite(high)):
            known = [abs(bound) for bound in (least, most) if isfinite(bound)]
            return replace(self, error=max(self.error, *known))
        shift = (low + high) / 2
        return replace(self, early=self.early - shift, late=self.late - shift, error=max(0.0, (high - low) / 2))


@dataclass(slots=True)
class Bounds:
    """What frames between the asked node and another say of the other's corrected times."""

    least: float = -inf
    most: float = inf

    def sent(self, left: float, arrived: float) -> None:
        """A frame of the asked node left at ``left`` and arrived there at ``arrived``, a corrected time."""
        self.least = max(self.least, left - arrived)

    def received(self, left: float, arrived: float) -> None:
        """A frame left there at ``left``, a corrected time, and arrived at the asked node at ``arrived``."""
        self.most = min(self.most, arrived - left)
