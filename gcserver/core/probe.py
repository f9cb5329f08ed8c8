"""A probe: a heartbeat with padding, by whose way there and back a link is measured.

What may live here: what is known of one. What may not: when links are probed (`gcserver.runtime.linkprobe`), how clocks
are echoed (`link.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

#: A probe whose echo has not come after so many seconds is given up.
PROBE_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Probe:
    """``nbytes`` more bytes than usual, sent at ``sent`` on our clock; ``trip``: the round trip, s, None until it is
    back."""

    sent: float
    nbytes: int
    trip: float | None = None

    def awaited(self, now: float) -> bool:
        """Whether its echo may still come."""
        return self.trip is None and now - self.sent < PROBE_PATIENCE
