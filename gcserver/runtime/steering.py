"""DC2 on running jobs: what the lanes measured goes to a controller per domain, its ratio to the lanes.

What may live here: the controllers of this node's domains, what they are fed and what follows. What may not: measuring
(`delays.py`), the laws (`gcserver.planner.dc2`), how all nodes come to the same controller (`gcserver.core.job_plans`:
it is part of a plan), what a lane makes of a level.

Nodes decide apart: each follows its own delays. A step that settles is one step of its domain's controller; the tuning
that follows goes to the lanes before the settlement does, so that the next step of codecs with feedback has it already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gcproto.packed import UNREADABLE
from gcserver.core.control_events import AnswerRequest
from gcserver.core.events import DomainKey
from gcserver.planner import controllers
from gcserver.planner.controllers import Controlled
from gcserver.planner.dc2 import Controller, ControllerState
from gcserver.runtime.lanelink import StepDelays

#: Levels of codecs that select a share of the elements are that share in millionths.
MILLION: Final = 1_000_000
#: The controllers of a job are saved every so many steps of one of its domains.
SAVE_EVERY: Final = 16
#: Steps measured and not settled that are kept for one domain; more are never under way.
STEPS: Final = 512

#: (domain, notch or -1, level or 0) for all lanes; -1 and 0: as the plan says
Tune = Callable[[DomainKey, int, int], None]


class SteeringError(ValueError):
    """A request for a controller that was refused; ``str()`` says by whom and why."""


@dataclass(frozen=True, slots=True)
class Course:
    """What the plan in force asks for in a domain.

    ``text`` names the controller. ``ratios``: bytes on the wire by dense bytes at each notch of the plan, descending;
    empty where it has no notches. ``least``: the ratio that a planner's plan without notches allows at least.
    """

    label: str
    text: str
    ratios: tuple[float, ...] = ()
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class Steered:
    """A steered domain, for operators. ``notch`` -1: the plan has none. ``delay`` and ``skew`` of its newest measured
    step, s; ``steps`` measured so far."""

    domain: str
    controller: str
    ratio: float
    notch: int
    delay: float
    skew: float
    steps: int


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """A domain's controller as a later life of this daemon finds it."""

    domain: int
    label: str
    text: str
    ratios: tuple[float, ...]
    steps: int
    state: ControllerState
    least: float = 0.0


@dataclass(slots=True)
class _Domain:
    course: Course
    controlled: Controlled
    controller: Controller
    #: (notch, level) the lanes were told last
    told: tuple[int, int] = (-1, 0)
    delay: float = 0.0
    skew: float = 0.0
    steps: int = 0
    unsaved: int = 0

    def tuning(self) -> tuple[int, int]:
        """(notch, level) at the controller's ratio."""
        if self.course.ratios:
            return notch_at(self.controller.ratio, self.course.ratios), 0
        return -1, max(1, round(self.controller.ratio * MILLION))


@dataclass(slots=True)
class _Sum:
    """What the lanes measured of one step: the longest delay and skew, s, and all bytes."""

    delay: float = 0.0
    skew: float = 0.0
    sent: int = 0


@dataclass(slots=True)
class Steering:
    """All controllers of one daemon.

    ``tune`` tells all lanes; ``ask`` makes a plan of the job (label or number) with another controller, on all nodes,
    and says whether a planner makes the job's plans (where there is one already, its rules stay whose they are);
    ``save`` writes what ``restore`` gets after a restart of the daemon.
    """

    tune: Tune
    ask: Callable[[str, str, bool], Awaitable[AnswerRequest]]
    save: Callable[[bytes, bytes], None]
    _domains: dict[DomainKey, _Domain] = field(default_factory=dict)
    _measured: dict[DomainKey, dict[int, _Sum]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------ steps
    def measured(self, message: StepDelays) -> None:
        """A lane's share of some steps; comes before the reports that settle them."""
        steps = self._measured.setdefault(message.domain, {})
        for step, delay, skew, sent in message.steps:
            of = steps.get(step)
            if of is None:
                if len(steps) == STEPS:
                    del steps[next(iter(steps))]
                of = steps[step] = _Sum()
            of.delay, of.skew, of.sent = max(of.delay, delay), max(of.skew, skew), of.sent + sent

    def settled(self, key: DomainKey, step: int, idle: bool, course: Course) -> None:
        """A step is over; ``course`` is that of the next one. An ``idle`` one says nothing: it was void, so that hardly
        anything was sent, or its ratio was not the controller's. Nor does the one that a controller begins after: its
        ratio was that of what there was before, and its delay would be the least one, or a mean, for long."""
        of = self._measured.get(key, {}).pop(step, None)
        d = self._domains.get(key)
        if d is None and course.text == controllers.NONE:
            return
        before = d
        if d is None or d.course != course:
            d = self._follow(key, d, course)
        if d is None:
            return
        idle = idle or before is None or before.controlled != d.controlled
        if of is not None and not idle:
            d.controller.on_step(of.delay, of.skew, of.sent)
            d.delay, d.skew, d.steps, d.unsaved = of.delay, of.skew, d.steps + 1, d.unsaved + 1
        self._tell(key, d)
        if d.unsaved >= SAVE_EVERY:
            self._save(key[0])

    def _follow(self, key: DomainKey, d: _Domain | None, course: Course) -> _Domain | None:
        """The plan in force asks for another controller, or gives the same one other bounds."""
        wanted = controllers.read(course.text)
        if wanted.law is None:
            if d is not None:
                del self._domains[key]
                self.tune(key, -1, 0)
                self._save(key[0])
            return None
        config = wanted.config(course.ratios, course.least)
        controller = Controller(wanted.law, config)
        steps = 0
        if d is not None and d.controlled == wanted:
            state = d.controller.state
            ratio = min(max(state.ratio, config.k_min), config.k_max)
            controller = Controller(wanted.law, config, msgspec.structs.replace(state, ratio=ratio))
            steps = d.steps
        # Told anew in any case: a notch of another plan may be another level.
        d = self._domains[key] = _Domain(course, wanted, controller, steps=steps)
        self._save(key[0])
        return d

    def _tell(self, key: DomainKey, d: _Domain) -> None:
        tuning = d.tuning()
        if tuning != d.told:
            d.told = tuning
            self.tune(key, *tuning)

    def lane_up(self) -> None:
        """A lane is a new process: all hear again what they are to do."""
        for key, d in self._domains.items():
            d.told = d.tuning()
            self.tune(key, *d.told)

    # ----------------------------------------------------------------------------------------- memory
    def _save(self, job: bytes) -> None:
        mine = [(key[1], d) for key, d in self._domains.items() if key[0] == job]
        for _, d in mine:
            d.unsaved = 0
        saved = [
            _Saved(domain, c.label, c.text, c.ratios, d.steps, d.controller.state, c.least)
            for domain, d in mine
            for c in (d.course,)
        ]
        self.save(job, msgspec.msgpack.encode(saved))

    def restore(self, job: bytes, saved: bytes) -> None:
        """What an earlier life of this daemon saved (empty: nothing). What another release cannot read is dropped: its
        controllers start anew."""
        try:
            found = msgspec.msgpack.decode(saved, type=list[_Saved]) if saved else []
            for s in found:
                controlled = controllers.read(s.text)
                if controlled.law is not None:
                    course = Course(s.label, s.text, s.ratios, s.least)
                    controller = Controller(controlled.law, controlled.config(s.ratios, s.least), s.state)
                    self._domains[job, s.domain] = _Domain(course, controlled, controller, steps=s.steps)
        except (*UNREADABLE, ValueError):
            self.forget(job)

    def forget(self, job: bytes) -> None:
        """The job is over here."""
        self._domains = {key: d for key, d in self._domains.items() if key[0] != job}
        self._measured = {key: steps for key, steps in self._measured.items() if key[0] != job}

    # -------------------------------------------------------------------------------------- operators
    async def set_controller(
        self, job: str, name: str, overrides: Mapping[str, float] | None = None, planned: bool = False
    ) -> AnswerRequest:
        """Let ``name`` ("none": nothing) steer the job (label or number) on every node; the plan that says so.

        Waits until the step is known from which it holds. ``overrides`` are k_min, k_max and start, ratios in (0, 1].
        Raises Dc2Error naming what is accepted, and :class:`SteeringError` where the job or a node refuses.
        """
        wanted = controllers.controlled(name, overrides)
        answer = await self.ask(job, wanted.text, planned)
        if answer.error:
            raise SteeringError(answer.error)
        return answer

    def describe(self, job: bytes) -> tuple[Steered, ...]:
        """The job's steered domains, in the order of their numbers."""
        return tuple(
            Steered(d.course.label, d.controlled.text, d.controller.ratio, d.tuning()[0], d.delay, d.skew, d.steps)
            for key, d in sorted(self._domains.items())
            if key[0] == job
        )


def notch_at(ratio: float, ratios: tuple[float, ...]) -> int:
    """The first notch that takes no more than ``ratio`` of the dense bytes; the last one if all take more."""
    return next((i for i, r in enumerate(ratios) if r <= ratio), len(ratios) - 1)
