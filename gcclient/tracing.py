"""A worker's part of a trace: when each block's gradient was ready, pushed, and taken back.

What may live here: spans of what workers do, while the daemon wants them. What may not: the record's layout and which
steps are recorded (`gcproto.spans`), pushing and copying (`domain.py` and whoever takes results).

While nothing is traced, whoever pushes or takes a block tests ``on``, and that is all.

A connection to the daemon may break while it records. What was recorded stays: the daemon, if it is the same, says
again what it wants as soon as this worker is back, and recording goes on. One that was started again knows of no trace,
and says nothing.

    ready   from the block before it, or the step's begin, until the block's gradient is in the arena (CUDA: queued)
    push    telling its lane, after waiting for a device's copies
    pull    taking its result out of the arena
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from gcclient.arena import BlockPlace
from gcproto.spans import WORKER_RECORDS, DomainKey, EndTrace, Kind, Ring, Span, TraceOrder, Window, WorkerSpans

if TYPE_CHECKING:
    from gcclient.session import Session


class Tracing:
    """What one worker records. Threads that push, wait and read may call it at once."""

    def __init__(self) -> None:
        self.on = False
        #: between coming back and hearing that the trace goes on
        self._held = False
        #: the clock of all spans
        self.now = time.monotonic
        self._order = TraceOrder(0, b"", 0, 0.0)
        self._job, self._rank = b"", 0
        self._ring, self._window = Ring(0), Window(b"", 0, {})
        #: by domain, the end of the newest ready or push, or the begin of the step
        self._last: dict[int, float] = {}
        self._domain_of: dict[BlockPlace, int] = {}
        self._lock = threading.Lock()

    def begin(self, order: TraceOrder, job: bytes, rank: int, open: Mapping[DomainKey, int]) -> None:
        """Record for rank ``rank`` of a job; what was recorded for another trace is dropped. ``open``: see Window."""
        with self._lock:
            if (self.on or self._held) and order == self._order:
                self.on, self._held = True, False
                return
            self._held = False
            self._order, self._job, self._rank = order, job, rank
            self._ring, self._window = Ring(WORKER_RECORDS), Window(order.job, order.steps, open)
            self._last.clear()
            self._domain_of.clear()
            self.on = True

    def hold(self) -> None:
        """The daemon is there again, and may know nothing of a trace: no more is recorded until it says."""
        with self._lock:
            self.on, self._held = False, self.on or self._held

    def end(self) -> WorkerSpans | None:
        """Stop; what was recorded, once. None where nothing was to be."""
        with self._lock:
            if not self.on and not self._held:
                return None
            self.on = self._held = False
            ring, self._ring = self._ring, Ring(0)
            self._domain_of.clear()
            return WorkerSpans(self._order.number, ring.dropped, self._window.firsts(), ring.content())

    # ------------------------------------------------------------------------------------------ spans
    def opened(self, domain: int) -> None:
        """A step of a domain begins."""
        self._last[domain] = self.now()

    def ready(self, domain: int, step: int, place: BlockPlace) -> None:
        """A block's gradient is in the arena."""
        now = self.now()
        began, self._last[domain] = self._last.get(domain, now), now
        self._domain_of[place] = domain
        self._add(Kind.READY, domain, step, (place,), began, now)

    def pushed(self, domain: int, step: int, places: Iterable[BlockPlace], began: float) -> None:
        """A lane was told of blocks, since ``began``."""
        now = self._last[domain] = self.now()
        self._add(Kind.PUSH, domain, step, places, began, now)

    def pulled(self, place: BlockPlace, began: float) -> None:
        """A block's result was taken, since ``began``."""
        domain = self._domain_of.get(place)
        if domain is not None:
            self._add(Kind.PULL, domain, place.step, (place,), began, self.now())

    def _add(
        self, kind: Kind, domain: int, step: int, places: Iterable[BlockPlace], began: float, ended: float
    ) -> None:
        job = self._job
        with self._lock:
            if not self.on or not self._window.holds(job, domain, step, began):
                return
            for place in places:
                block = place.block
                of = (job, domain, step, block.key, 0, 0, block.nbytes)
                self._ring.add(Span(began, ended, *of, self._rank, kind, 0))


def begin(session: Session, order: TraceOrder) -> None:
    """The daemon wants to know what this worker does."""
    job = session.job.job
    newest = {(job, number): domain.step for number, domain in list(session.domains.items())}
    session.tracing.begin(order, job, session.me.rank, newest)


def end(session: Session) -> None:
    """Tell the daemon what was recorded: it asks, or the worker leaves."""
    if (spans := session.tracing.end()) is not None:
        session.inform(spans)


#: what a session does when its daemon says so: (session, lane, message)
HANDLERS: Final[dict[type, Callable[[Session, int, Any], None]]] = {
    TraceOrder: lambda session, lane, message: begin(session, message),
    EndTrace: lambda session, lane, message: end(session),
}
