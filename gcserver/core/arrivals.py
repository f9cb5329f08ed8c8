"""Whether what is sent on a link arrives, as far as its sender can tell.

What may live here: when a connection counts as one on which nothing arrives any more. What may not: how echoes and
acknowledgements come about (`link.py`), sockets.

A byte that changes in the length which ZeroMQ puts before a frame makes the receiver wait for the rest of one that
never ends, while the connection looks sound from both ends. What has arrived shows in acknowledgements and in echoes of
heartbeats. On a slow link neither comes for as long as the largest frame takes, so patience grows with what is on its
way, with what the link has taken before, and with every new connection that did not help: whatever the link's rate,
some connection lives long enough for a frame to arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

#: Nothing has arrived for so long, seconds, and by as much longer as ``SLOWEST`` bytes a second take for what is on its
#: way, though never less than twice what the link has taken lately: the connection is made anew.
STALLED_AFTER = 10.0
SLOWEST = 1_000_000
#: Half of the longest wait is forgotten after so many seconds.
FORGET_WAIT = 600.0
#: Ticks are half a second apart; who has not ticked for so long was paused, seconds.
OWN_PAUSE = 2.0
#: So often patience is doubled while new connections do not help.
MAX_DOUBLED = 6


@dataclass(slots=True)
class Arrivals:
    """What is known of one link. Times on our clock, seconds."""

    #: when something was last seen to have arrived, or the connection was made
    last: float = 0.0
    #: the newest of our clocks that came back
    echoed: float = 0.0
    #: the longest wait between two arrivals, less the older it is
    waited: float = 0.0
    #: new connections since the last arrival
    renewed: int = 0
    #: when that was last asked
    looked: float = 0.0
    #: ``last`` and ``waited`` before anything was seen at ``last``
    before: tuple[float, float] = (inf, 0.0)

    def seen(self, now: float) -> None:
        """Something is there."""
        if self.last < now:
            self.before = self.last, self.waited
        self._arrived(now)

    def _arrived(self, at: float) -> None:
        took = max(at - self.last, 0.0)
        self.waited = max(took, self.waited * 0.5 ** (took / FORGET_WAIT))
        self.last, self.renewed = at, 0

    def dated(self, silent: float, now: float) -> None:
        """What was seen at this instant had been there for ``silent`` seconds: where nothing came from the peer for
        long, it is the news that waited."""
        last, waited = self.before
        if last < now == self.last:
            self.last, self.waited = last, waited
            self._arrived(min(max(last, now - silent), now))

    def echo(self, clock: float, now: float) -> None:
        """A heartbeat that left at ``clock`` is there, unless the same was said before or cannot be."""
        if self.echoed < clock <= now:
            self.echoed = clock
            self.seen(now)

    def impatient(self, now: float) -> bool:
        """Whether it is worth counting what is on its way. To be asked at every tick: time in which this process itself
        stood still does not count."""
        pause, self.looked = now - self.looked, now
        if pause > OWN_PAUSE:
            self.last, self.before = min(self.last + pause, now), (inf, 0.0)
        return now - self.last > STALLED_AFTER

    def stalled(self, now: float, nbytes: int) -> bool:
        """Whether nothing has arrived for longer than a slow link takes, with ``nbytes`` on their way; if so, a new
        connection is counted from now on."""
        patience = max(STALLED_AFTER + nbytes / SLOWEST, 2 * self.waited) * 2**self.renewed
        if now - self.last <= patience:
            return False
        self.last, self.before, self.renewed = now, (inf, 0.0), min(self.renewed + 1, MAX_DOUBLED)
        return True
