"""One step of a domain on a lane, job by job: what is drawn beside a plan's prediction.

What may live here: hooks around what a lane does anyway, there only while a step is traced; the record of it. What may
not: anything that costs a step that is not traced; drawing (`gcserver.admin.drawing`).

A trace begins where the step before ends and goes on until its own step has ended here. Kernels are on the resource
``lane 0`` and on, each lane's its own; ``push`` is a worker's doorbell; ``exchange`` runs from our payload of a block
leaving, or the first one arriving at its owner, to the last one that the block waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gcproto.wire import FrameType, Header
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.events import DomainKey

if TYPE_CHECKING:
    from gcserver.runtime.lane import LaneProcess

#: Longer traces are cut: they are for a drawing.
MOST = 20_000


@dataclass(frozen=True, slots=True)
class AskTrace:
    """To a lane: trace a step of this domain, and answer with TracedStep."""

    request: int
    domain: DomainKey


@dataclass(frozen=True, slots=True)
class TracedJob:
    """Something done for one block (its key); seconds since the step before ended."""

    what: str
    resource: str
    key: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TracedStep:
    """From a lane: one step."""

    request: int
    domain: DomainKey
    step: int
    jobs: tuple[TracedJob, ...]


_KERNELS = {fx.Encode: "encode", fx.Accumulate: "add", fx.Finalise: "finalise", fx.Decode: "decode"}


@dataclass(slots=True)
class _Trace:
    """A step being traced."""

    ask: AskTrace
    #: when the step before ended, on the monotonic clock; 0: it has not yet
    zero: float = 0.0
    step: int = 0
    jobs: list[TracedJob] = field(default_factory=list)
    #: by block, when its exchange began
    away: dict[int, float] = field(default_factory=dict)

    def is_of(self, h: Header) -> bool:
        """Whether a frame is a payload of the traced step."""
        return h.type is FrameType.DATA and (h.job, h.domain) == self.ask.domain and h.step == self.step

    def note(self, what: str, resource: str, key: int, start: float, end: float) -> None:
        if len(self.jobs) < MOST:
            self.jobs.append(TracedJob(what, resource, key, start - self.zero, end - self.zero))


class StepTracer:
    """Traces one step at a time on ``process``; asked while it does, the newest question is the one answered."""

    def __init__(self, process: LaneProcess) -> None:
        self._p = process
        self._trace: _Trace | None = None
        self._plain: dict[type, Callable[[Any], object]] = {}
        self._feed: Callable[[ev.LaneEvent], None] | None = None

    def on_ask(self, ask: AskTrace) -> None:
        """Begin with the next step."""
        self._trace = _Trace(ask)
        if self._feed is not None:
            return
        self._plain = dict(self._p.perform)
        for kind, name in _KERNELS.items():
            self._p.perform[kind] = self._timed(self._plain[kind], name, f"lane {self._p.setup.hello.lane}")
        self._p.perform[fx.Send] = self._on_send
        self._p.perform[fx.LogStep] = self._on_log_step
        self._feed = self._p.feed
        self._p.feed = self._on_event  # type: ignore[method-assign]

    def _end(self) -> None:
        self._trace = None
        self._p.perform.update(self._plain)
        # The method of the class again.
        del self._p.feed
        self._feed = None

    def _timed(self, act: Callable[[Any], object], name: str, resource: str) -> Callable[[Any], object]:
        def timed(e: Any) -> object:
            trace = self._trace
            if trace is None or e.domain != trace.ask.domain or e.step != trace.step:
                return act(e)
            start = time.monotonic()
            result = act(e)
            trace.note(name, resource, e.key, start, time.monotonic())
            return result

        return timed

    def _on_event(self, event: ev.LaneEvent) -> None:
        trace = self._trace
        if trace is not None and trace.zero:
            now = time.monotonic()
            if isinstance(event, ev.Pushed) and event.domain == trace.ask.domain:
                trace.step = trace.step or event.step
                if event.step == trace.step:
                    for key in event.keys:
                        trace.note("push", "push", key, now, now)
            elif isinstance(event, ev.FrameReceived) and trace.is_of(event.header):
                key = event.header.key
                trace.note("exchange", "exchange", key, trace.away.setdefault(key, now), now)
        assert self._feed is not None
        self._feed(event)

    def _on_send(self, e: fx.Send) -> None:
        trace = self._trace
        if trace is not None and trace.is_of(e.header):
            trace.away.setdefault(e.header.key, time.monotonic())
        self._plain[fx.Send](e)

    def _on_log_step(self, e: fx.LogStep) -> None:
        self._plain[fx.LogStep](e)
        trace = self._trace
        if trace is None or e.domain != trace.ask.domain:
            return
        now = time.monotonic()
        if not trace.zero:
            trace.zero = now
        elif e.step == trace.step:
            self._p.send_up(TracedStep(trace.ask.request, e.domain, e.step, tuple(trace.jobs)))
            self._end()

    def forget(self, domain: DomainKey) -> None:
        """The domain is gone."""
        if self._trace is not None and self._trace.ask.domain == domain:
            self._end()
