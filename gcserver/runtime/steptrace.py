"""One step of a domain on a lane, job by job: what is drawn beside a plan's prediction.

What may live here: the record of it. What may not: hooks (`tap.py`), spans of many steps and nodes (`recording.py`),
drawing (`gcserver.admin.drawing`).

A trace begins where the step before ends and goes on until its own step has ended here. Kernels are on the resource
``lane 0`` and on, each lane's its own; ``push`` is a worker's doorbell; ``exchange`` runs from our payload of a block
leaving, or the first one arriving at its owner, to the last one that the block waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gcproto.wire import FrameType, Header
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.events import DomainKey
from gcserver.runtime.tap import Tap

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
    """From a lane: one step. ``zero``: when the one before ended there, on the monotonic clock, which all lanes of a
    machine share."""

    request: int
    domain: DomainKey
    step: int
    jobs: tuple[TracedJob, ...]
    zero: float = 0.0


_KERNELS: dict[Any, str] = {fx.Encode: "encode", fx.Accumulate: "add", fx.Finalise: "finalise", fx.Decode: "decode"}


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
    """Traces one step at a time on lane ``index``; asked while it does, the newest question is the one answered, from
    where the trace is if it is about the same domain."""

    def __init__(self, tap: Tap, index: int, send_up: Callable[..., None]) -> None:
        self._tap, self._resource, self._send_up = tap, f"lane {index}", send_up
        self._trace: _Trace | None = None

    def on_ask(self, ask: AskTrace) -> None:
        """Begin with the next step; who asks for the domain that is being traced gets that."""
        if self._trace is not None and self._trace.ask.domain == ask.domain:
            self._trace.ask = ask
            return
        self._trace = _Trace(ask)
        self._tap.add(self)

    def _end(self) -> None:
        self._trace = None
        self._tap.remove(self)

    def before(self, event: ev.LaneEvent, now: float) -> None:
        trace = self._trace
        if trace is None or not trace.zero:
            return
        if isinstance(event, ev.Pushed) and event.domain == trace.ask.domain:
            trace.step = trace.step or event.step
            if event.step == trace.step:
                for key in event.keys:
                    trace.note("push", "push", key, now, now)
        elif isinstance(event, ev.FrameReceived) and trace.is_of(event.header):
            key = event.header.key
            trace.note("exchange", "exchange", key, trace.away.setdefault(key, now), now)

    def after(self, event: ev.LaneEvent, began: float, ended: float) -> None:
        """What follows from an event is heard of by itself."""

    def done(self, effect: Any, began: float, ended: float) -> None:
        trace = self._trace
        if trace is None:
            return
        if isinstance(effect, fx.Send):
            if trace.is_of(effect.header):
                trace.away.setdefault(effect.header.key, began)
        elif effect.domain == trace.ask.domain:
            if isinstance(effect, fx.LogStep):
                self._step_over(trace, effect, ended)
            elif effect.step == trace.step:
                trace.note(_KERNELS[type(effect)], self._resource, effect.key, began, ended)

    def _step_over(self, trace: _Trace, e: fx.LogStep, now: float) -> None:
        if not trace.zero:
            trace.zero = now
        elif e.step == trace.step:
            self._send_up(TracedStep(trace.ask.request, e.domain, e.step, tuple(trace.jobs), trace.zero))
            self._end()
        elif e.step > trace.step:
            # The traced step was given up with a lost node, or nothing was pushed in it: another one.
            self._trace = _Trace(trace.ask, now)

    def forget(self, domain: DomainKey) -> None:
        """The domain is gone."""
        if self._trace is not None and self._trace.ask.domain == domain:
            self._end()
