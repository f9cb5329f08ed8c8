"""Who is left of a job that goes on without lost nodes, as a worker hears of it.

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
    """``ranks`` are those left in ``epoch``, by their numbers at the start of the job, ascending."""

    epoch: int = 0
    ranks: tuple[int, ...] = ()
    #: the newest epoch that a result was made in; its members may be told a moment later
    announced: int = 0
    callbacks: list[Callable[[int, tuple[int, ...]], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def heard(self, epoch: int) -> None:
        """A result was made in this epoch."""
        self.announced = max(self.announced, epoch)

    def on_registered(self, message: Registered) -> None:
        """The job is formed, or this worker is back at a daemon that was restarted."""
        self.on_epoch(message.epoch, tuple(m for m in message.members if m.node not in message.lost))

    def on_epoch(self, epoch: int, members: tuple[MemberInfo, ...]) -> None:
        """The members of an epoch; an old one is ignored. Called by the reading thread."""
        with self._lock:
            if epoch <= self.epoch:
                return
            before, self.epoch = self.epoch, epoch
            self.ranks = tuple(sorted(r for m in members for r in m.ranks))
        if before:
            log.warning(
                "epoch %d: %d ranks are left, on %s", epoch, len(self.ranks), ", ".join(m.node for m in members)
            )
            for callback in tuple(self.callbacks):
                try:
                    callback(epoch, self.ranks)
                except Exception:
                    # A script's own: what else the daemon has said must be read all the same.
                    log.exception("a callback of gcclient.on_change failed")

    @property
    def current(self) -> bool:
        """Whether the members of every epoch are known that a result was made in."""
        return self.epoch >= self.announced
