"""Effects of the control machine as calls on the parts of the supervisor.

What may live here: one call for each kind of effect. What may not: decisions (`gcserver.core` made them), events, what
the parts do (their own files).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gcproto import wire
from gcserver.core import control_events as cx
from gcserver.core import effects as fx
from gcserver.core.events import DomainKey
from gcserver.logsetup import of_job
from gcserver.planner import controllers
from gcserver.runtime.lanelink import ForgetJob
from gcserver.runtime.ledger import Ledger
from gcserver.runtime.notches import least
from gcserver.runtime.statefiles import MemoryShort
from gcserver.runtime.steering import Course

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

log = logging.getLogger("gcserver")


def perform(s: Supervisor, effect: cx.ControlEffect) -> None:
    """Carry out one effect; what it answers comes to the machine as events."""
    _PERFORM[type(effect)](s, effect)


def _save(s: Supervisor, e: cx.SaveJob) -> None:
    try:
        s.store.save(e.job, e.memory)
    except OSError as error:
        s.short(e.job, "the job's memory cannot be written", error)
    s.profiler.on_declared(e.job)
    s.traces.declared(e.job)


def _forget(s: Supervisor, e: cx.ForgetJob) -> None:
    s.lanes.tell(ForgetJob(e.job))
    s.status.forget_job(e.job)
    s.planning.forget_job(e.job)
    s.profiler.forget(e.job)
    s.steering.forget(e.job)
    s.notches.forget(e.job)
    s.audits.forget(e.job)
    s.store.forget(e.job)


def _settled(s: Supervisor, e: cx.LogSettled) -> None:
    _write(s, e.domain, lambda ledger: ledger.settle(e.step, e.void, e.plan, e.lag))
    s.status.on_settled(e)
    s.profiler.on_settled(e)
    s.audits.on_settled(e)
    _steer(s, e)


def _take_up(s: Supervisor, e: cx.TakeUp) -> None:
    try:
        s.store.take_up(e.domain, e.settled, e.switches)
    except MemoryShort as error:
        s.short(e.domain[0], "steps cannot be logged", error)


def _write(s: Supervisor, domain: DomainKey, write: Callable[[Ledger], None]) -> None:
    try:
        write(s.store.ledger(domain))
    except MemoryShort as error:
        s.short(domain[0], "steps cannot be logged", error)


def _steer(s: Supervisor, e: cx.LogSettled) -> None:
    """A step of a domain is over: what its controller makes of it goes to the lanes before the settlement."""
    job = s.machine.jobs.get(e.domain[0])
    if job is None:
        return
    domain = job.domains[e.domain[1]]
    version = domain.switch(e.step + 1)[1]
    text = controllers.NONE if domain.lossless else job.controller(version)
    course, idle = Course(domain.config.label, text), e.void
    if text != controllers.NONE:
        course = Course(course.label, text, s.notches.ratios(job, domain, version), least(job, domain, version))
        # What a step took that was dense, as the model's first ones, says nothing of the ratio.
        idle = idle or e.step <= domain.config.warmup or not s.notches.moves(job, domain, domain.switch(e.step)[1])
    s.steering.settled(e.domain, e.step, idle, course)


def _arbitrate(s: Supervisor, e: cx.Arbitrate) -> None:
    if e.record.on_loss == "fail":
        s.queue.append(cx.EpochWon(s.arbiter.compare_and_swap(e.expected, e.record)))
    else:
        s.aside(lambda: s.etcd.answer(e), s.feed)


def _answer(s: Supervisor, e: cx.AnswerRequest) -> None:
    future = s.requests.pop(e.request, None)
    if future is not None and not future.done():
        future.set_result(e)


def _job_of(s: Supervisor, text: str) -> str | None:
    """The job that a line of the core is about: such a line begins with its name."""
    labels = (job.record.label for job in s.machine.jobs.values())
    begins = [label for label in labels if text.startswith((f"job {label} ", f"job {label}:", f"job {label},"))]
    return max(begins, key=len, default=None)


_PERFORM: dict[type, Callable[[Supervisor, Any], object]] = {
    fx.Send: lambda s, e: s.peers.transport.send(e.peer, wire.pack(e.header), e.body, copy=True),
    fx.Reconnect: lambda s, e: s.peers.transport.reset(e.peer),
    fx.Count: lambda s, e: s.count(e.name, e.peer, e.value),
    fx.ReportLink: lambda s, e: None,
    cx.Tell: lambda s, e: s.registrations.tell(e),
    cx.ToLane: lambda s, e: s.lanes.tell(e.event, e.lane),
    cx.KnowPeer: lambda s, e: s.loop.call_soon(s.peers.know, e.name, e.address),
    cx.PeerSaid: lambda s, e: s.traces.on_peer(e.peer, e.message),
    cx.SaveJob: _save,
    cx.ForgetJob: _forget,
    cx.LogSettled: _settled,
    cx.TakeUp: _take_up,
    cx.RenewLanes: lambda s, e: s.lanes.renew(),
    cx.LogReady: lambda s, e: _write(s, e.domain, lambda ledger: ledger.make_ready(e.step)),
    cx.Arbitrate: _arbitrate,
    cx.AnswerRequest: _answer,
    cx.Drained: lambda s, e: s.stopped.set(),
    cx.Log: lambda s, e: of_job(log, _job_of(s, e.text)).log(getattr(logging, e.level.upper()), "%s", e.text),
}
