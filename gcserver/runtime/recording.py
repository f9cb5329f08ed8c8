"""A lane's part of a trace: a span for each kernel and each frame of the steps that are recorded.

What may live here: from what a tap hears to records; the messages by which a supervisor begins and ends it. What may
not: hooks (`tap.py`), the record's layout (`gcproto.spans`), other nodes' spans and clocks (`traces.py`).

A frame sent is a span of the time that queueing it took, one received of all that followed from it here, the kernels
that it let run among it; from the one to the other it was on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gcproto.spans import LANE_RECORDS, Firsts, Kind, Ring, Span, Window, frame_detail
from gcproto.wire import DATA, Header
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.events import DomainKey
from gcserver.runtime.tap import Tap

if TYPE_CHECKING:  # the supervisor takes the messages from here, and nothing that is slow to load
    from gcserver.core.domain import Domain
    from gcserver.core.lane import LaneMachine
    from gcserver.runtime.blocks import DomainMemory

_KERNELS: Final[dict[Any, Kind]] = {
    fx.Encode: Kind.ENCODE,
    fx.Accumulate: Kind.ADD,
    fx.Finalise: Kind.FINALISE,
    fx.Decode: Kind.DECODE,
}


@dataclass(frozen=True, slots=True)
class RecordSpans:
    """To a lane: record as a TraceOrder says; what it recorded before is dropped."""

    number: int
    job: bytes
    steps: int


@dataclass(frozen=True, slots=True)
class AskRecord:
    """To a lane: stop recording, and answer with LaneSpans. ``number``: of the trace; of another one, nothing."""

    request: int
    number: int


@dataclass(frozen=True, slots=True)
class LaneSpans:
    """From a lane: its records (see Ring), how many were dropped, and where they begin."""

    request: int
    dropped: int
    firsts: Firsts
    data: bytes


class Recording:
    """What lane ``index`` records, if anything. ``domains``: its memory of each, which knows sizes and members."""

    def __init__(
        self,
        tap: Tap,
        index: int,
        machine: LaneMachine,
        domains: Mapping[DomainKey, DomainMemory],
        send_up: Callable[..., None],
    ) -> None:
        self._tap, self._index, self._machine, self._domains, self._send_up = tap, index, machine, domains, send_up
        self._number = 0
        self._ring = Ring(0)
        self._window = Window(b"", 0, {})

    def take(self, message: RecordSpans | AskRecord) -> None:
        """What the supervisor says."""
        if isinstance(message, RecordSpans):
            self._number, self._ring = message.number, Ring(LANE_RECORDS)
            open = {key: _newest(domain) for key, domain in self._machine.domains.items()}
            self._window = Window(message.job, message.steps, open)
            self._tap.add(self)
            return
        self._tap.remove(self)
        known = message.number == self._number
        answer = (self._ring.dropped, self._window.firsts(), self._ring.content()) if known else (0, (), b"")
        self._ring, self._number = Ring(0), 0
        self._send_up(LaneSpans(message.request, *answer))

    # ------------------------------------------------------------------------------ what the tap hears
    def before(self, event: ev.LaneEvent, now: float) -> None:
        """All of an event is one span: see ``after``."""

    def after(self, event: ev.LaneEvent, began: float, ended: float) -> None:
        if isinstance(event, ev.FrameReceived) and event.header.type is DATA:
            self._frame(Kind.RECEIVE, event.header, event.header.sender, began, ended)

    def done(self, effect: Any, began: float, ended: float) -> None:
        kind = _KERNELS.get(type(effect))
        if kind is not None:
            self._kernel(kind, effect, began, ended)
        elif isinstance(effect, fx.Send) and effect.header.type is DATA:
            self._frame(Kind.SEND, effect.header, effect.peer, began, ended)

    def _kernel(self, kind: Kind, e: Any, began: float, ended: float) -> None:
        job, domain = e.domain
        memory = self._domains.get(e.domain)
        if memory is None or not self._window.holds(job, domain, e.step, began):
            return
        peer = memory.config.members[e.member].node if kind is Kind.ADD else 0
        nbytes = memory.blocks[e.key].block.nbytes
        self._ring.add(Span(began, ended, job, domain, e.step, e.key, peer, 0, nbytes, self._index, kind, e.stage))

    def _frame(self, kind: Kind, h: Header, peer: int, began: float, ended: float) -> None:
        if self._window.holds(h.job, h.domain, h.step, began):
            of = (h.job, h.domain, h.step, h.key, peer, h.link_seq, h.payload_bytes)
            self._ring.add(Span(began, ended, *of, self._index, kind, frame_detail(h)))


def _newest(domain: Domain) -> int:
    """The newest step of a domain that has begun on this lane."""
    return max([domain.steps.settled, *domain.steps.open, *domain.finished])
