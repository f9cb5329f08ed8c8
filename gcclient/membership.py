"""Who is in a job that goes on without lost nodes, and with those that come back, as a worker hears of it.

What may live here: epochs and the ranks in them, who is told of a new one. What may not: messages (`session.py`), what
a loss means for a step (the daemon decides that).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gcproto.messages import MemberInfo, Registered

log = logging.getLogger("gcclient")


@dataclass(slots=True)
class Membership:
    """``ranks`` are those in ``epoch``, by their numbers at the start of the job, ascending; ``since``: by rank the
    epoch that it came in with. ``admissions``: how many epochs began at an admission point so far."""

    epoch: int = 0
    ranks: tuple[int, ...] = ()
    since: dict[int, int] = field(default_factory=dict)
    admissions: int = 0
    #: nodes want to be let in at the next admission point
    waiting: bool = False
    #: those of them that this worker's daemon knows of
    nodes: tuple[str, ...] = ()
    #: the newest epoch that a result was made in; its members may be told a moment later
    announced: int = 0
    callbacks: list[Callable[[int, tuple[int, ...]], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def knocked(self, nodes: tuple[str, ...]) -> None:
        """These want to be let in."""
        self.waiting, self.nodes = True, nodes

    def heard(self, epoch: int) -> None:
        """A result was made in this epoch."""
        self.announced = max(self.announced, epoch)

    def on_registered(self, message: Registered) -> None:
        """The job is formed, or this worker is back at a daemon that was restarted."""
        members = tuple(m for m in message.members if m.node not in message.lost)
        self.on_epoch(message.epoch, members, message.admissions)

    def on_epoch(self, epoch: int, members: tuple[MemberInfo, ...], admissions: int) -> None:
        """The members of an epoch; an old one is ignored. Called by the reading thread."""
        with self._lock:
            if epoch <= self.epoch:
                return
            before, self.epoch = self.epoch, epoch
            self.since = {r: m.since for m in members for r in m.ranks}
            self.ranks = tuple(sorted(self.since))
            self.waiting &= admissions == self.admissions
            self.admissions = admissions
        if before:
            log.warning("epoch %d: %d ranks, on %s", epoch, len(self.ranks), ", ".join(m.node for m in members))
            for callback in tuple(self.callbacks):
                try:
                    callback(epoch, self.ranks)
                except Exception:
                    # A script's own: what else the daemon has said must be read all the same.
                    log.exception("a callback of gcclient.on_change failed")

    def came(self, after: int) -> tuple[int, ...]:
        """The ranks that came in with an epoch ``after`` this one."""
        return tuple(r for r in self.ranks if self.since[r] > after)

    @property
    def eldest(self) -> int:
        """The lowest of the ranks that have been in the job the longest."""
        return min(self.ranks, key=lambda r: (self.since[r], r))

    @property
    def current(self) -> bool:
        """Whether the members of every epoch are known that a result was made in."""
        return self.epoch >= self.announced
