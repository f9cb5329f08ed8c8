"""What operators ask about plans: who makes them, what is expected, what was measured, what would pay.

What may live here: requests of the admin service about planning, in its words. What may not: which job is meant
(`status.py`), what is in force where (`planstatus.py`), planning (`planning.py`), controllers (`steering.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

from gcproto.modes import STATIC
from gcproto.patterns import Patterns
from gcserver.admin import planning as said
from gcserver.admin.source import AdminError, DomainPlan, ErrorKind, PlanChange, PlanStatus
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from gcserver.planner.advice import Advice
from gcserver.planner.auto import Proposal
from gcserver.planner.auto_informed import under
from gcserver.planner.controllers import controlled
from gcserver.planner.course import noticed, step_under
from gcserver.planner.live import LiveStep
from gcserver.planner.profile import Profile, dump
from gcserver.planner.standing import Standing
from gcserver.runtime import planwish
from gcserver.runtime.plancourse import Course
from gcserver.runtime.planfacts import lossless, newest_asked_for, newest_planned, newest_rules
from gcserver.runtime.plannerlink import PlannerError
from gcserver.runtime.planstatus import plan_status
from gcserver.runtime.steptrace import AskTrace, TracedJob, TracedStep
from gcserver.runtime.tensors import space
from gcserver.runtime.unplannable import TOO_SOON, NotPlannable, planner_of

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

T = TypeVar("T")
#: The step that is under way has to end, and then the one that is traced: so long is waited for them at least, s,
TRACE_TIMEOUT: Final = 8.0
#: for so many of the longest steps that were measured,
TRACED_WITHIN: Final = 2.5
#: and so long at most for all models of a job, s.
TRACE_LONGEST: Final = 45.0
#: Elements of the block for which the costs of codecs are shown.
SHOWN: Final = 1 << 20


class PlanAdmin:
    """Answers about planning, for one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        #: A lane traces one step at a time.
        self._tracing = asyncio.Lock()

    async def plan(self, job: Job, timeline: bool) -> PlanStatus:
        """See ``Source.plan``."""
        status = plan_status(job, len(self._s.lanes.table))
        course = self._s.planning.course(job)
        until = self._s.loop.time() + TRACE_LONGEST
        domains = [
            await self._domain(job, domain, shown, course, until if timeline else 0.0)
            for shown, domain in zip(status.domains, list(job.domains.values()), strict=True)
        ]
        mode, says = self._mode(job, course), course.says
        facts = self._s.planning.facts
        quality = planwish.quality(course.standing, facts.model(job), facts.others(job))
        if job.node != job.first:
            says = planner_of(job)
        return replace(status, domains=tuple(domains), mode=mode, quality=quality, planner=says)

    def _mode(self, job: Job, course: Course) -> str:
        """Who makes the job's plans. Elsewhere than at the planning node it is told as whoever came to plan next would
        tell it: by what an operator has said, else what the job began with, and by whose the newest plan is."""
        standing = course.standing
        if job.node != job.first:
            standing = noticed(standing, job.proposal, newest_rules(job), newest_planned(job), newest_asked_for(job))
        return standing.mode

    async def _domain(
        self, job: Job, domain: ControlDomain, shown: DomainPlan, course: Course, until: float
    ) -> DomainPlan:
        """``until``: when to give up tracing a step, by the loop's clock; 0: none is to be drawn."""
        controllers = tuple(
            said.ControllerState(c.controller, c.ratio, None if c.notch < 0 else c.notch, c.delay, c.skew, c.steps)
            for c in self._s.steering.describe(job.id)
            if c.domain == domain.config.label
        )
        standing = course.standing
        proposal = standing.proposal if standing.domain == domain.config.domain else None
        forecast = None
        if proposal is not None:
            forecast = _forecast(proposal, standing.forecast_plan, self._measured_step(job, domain, standing))
        predicted: tuple[said.TimelineJob, ...] = ()
        measured: tuple[said.TimelineJob, ...] = ()
        if until and domain.declared_as.scoped:
            measured = await self._traced(domain, until)
            if proposal is not None and standing.profile is not None:
                step = await self._expected(course, domain, proposal, standing.profile)
                predicted = _predicted(step, standing.profile, [m.name for m in domain.config.members])
        note = shown.note or self._others_rules(job, domain, standing)
        return replace(
            shown, note=note, forecast=forecast, controllers=controllers, predicted=predicted, measured=measured
        )

    def _measured_step(self, job: Job, domain: ControlDomain, standing: Standing) -> float:
        """Seconds of a step under the proposal's plan; 0 before it is one, and before any has been measured."""
        seen = self._s.profiler.profile(job.id, domain.config.domain) if standing.forecast_plan else None
        step = step_under(seen, standing.forecast_plan) if seen is not None else None
        return step.seconds if step is not None else 0.0

    def _others_rules(self, job: Job, domain: ControlDomain, standing: Standing) -> str:
        """Of a model that is not the one a job's plans are made for: why it has no plan of its own, and what holds
        for it; empty for others."""
        if standing.mode == STATIC or not domain.declared_as.scoped:
            return ""
        of = job.domains.get(standing.domain) if standing.proposal is not None else self._s.planning.facts.model(job)
        if of is None or of is domain:
            return ""
        text = "no plan of its own: a plan is the whole job's and its rules go by tensors' names"
        plan = job.newest
        if plan is None:
            return f"{text}; the first one will be made for the largest model, {of.config.label}"
        patterns = Patterns(rule.pattern for rule in plan.rules)
        holds = "holds here as far as the names match"
        if all(patterns.last(t.name) < 0 for s in domain.sections for t in s.tensors):
            holds = "none of its rules is for a tensor of this one"
        return f"{text}; it is made for the largest model, {of.config.label}, and {holds}"

    async def _expected(self, course: Course, domain: ControlDomain, proposal: Proposal, profile: Profile) -> LiveStep:
        """A step under the proposal, as it was priced. The same question has the same answer, and the process that has
        it costs much."""
        drawn = course.drawn
        if drawn is None or drawn[0] is not proposal or drawn[1] is not profile:
            study, learned = self._s.planning.study, under(profile, proposal.terms)
            step = await _or_refused(study.predict(domain, learned, proposal.rules))
            drawn = course.drawn = (proposal, profile, step)
        return drawn[2]

    async def _traced(self, domain: ControlDomain, until: float) -> tuple[said.TimelineJob, ...]:
        """One step as this node's lanes worked it off, and what its workers did meanwhile as far as pushes tell."""
        seen = self._s.profiler.profile(*domain.config.id)
        longest = max((s.seconds for s in seen.steps), default=0.0) if seen is not None else 0.0
        async with self._tracing:
            patience = min(max(TRACE_TIMEOUT, TRACED_WITHIN * longest), max(until - self._s.loop.time(), 0.0))
            found: list[TracedStep] = await self._s.questions.ask(
                lambda number: AskTrace(number, domain.config.id), patience
            )
        names = {
            block.key: section.tensors[block.tensor].name
            for section, blocks in zip(domain.sections, space(domain, len(self._s.lanes.table)).blocks, strict=True)
            for block in blocks
        }
        traced = joined(found)
        return tuple(
            said.TimelineJob(f"{j.what} {names.get(j.key, j.key)}", j.resource, self._s.node, j.start, j.end)
            for j in (*computed(traced), *traced)
        )

    # ---------------------------------------------------------------------------------------- requests
    def set_mode(self, job: Job, mode: str, quality: str) -> PlanChange:
        """See ``Source.set_mode``."""
        try:
            return PlanChange(0, 0, self._s.planning.set_mode(job, mode, quality))
        except NotPlannable as error:
            raise AdminError(ErrorKind.PRECONDITION, str(error), "mode") from None

    async def replan(self, job: Job) -> PlanChange:
        """See ``Source.replan``."""
        answer = await _or_refused(self._s.planning.replan(job))
        says = self._s.planning.course(job).says
        return PlanChange(0, 0, says) if answer is None else PlanChange(answer.plan, answer.step, says)

    async def set_controller(self, job: Job, controller: str, parameters: dict[str, float]) -> PlanChange:
        """See ``Source.set_controller``."""
        try:
            wanted = controlled(controller, parameters)
            if wanted.law is not None and (why := lossless(job)):
                raise AdminError(ErrorKind.PRECONDITION, f"{controller} would move nothing: {why}", "controller")
            still = self._s.notches.still(job, job.proposal) if wanted.law is not None else ""
            planned = self._mode(job, self._s.planning.course(job))
            if still and planned == STATIC:
                raise AdminError(
                    ErrorKind.PRECONDITION,
                    f"{controller} would move nothing: the plan in force uses {still}, which has no ratio that differs "
                    f"from step to step; give the job one of {', '.join(tunable())} first, as in "
                    "gcctl set-codec 'topk(ratio=0.01)'",
                    "controller",
                )
            answer = await self._s.steering.set_controller(
                job.id.hex(), controller, parameters, planned=planned != STATIC
            )
        except ValueError as error:
            raise AdminError(ErrorKind.INVALID, str(error), "controller") from None
        waits = f"; it moves nothing until the planner ({planned}) chooses another codec than {still}" if still else ""
        if wanted.law is not None and (least := self._s.notches.beyond(job, wanted, job.proposal)):
            waits += f"; the plan in force allows no ratio below {least:.4g}, which counts instead of k_max"
        return PlanChange(answer.plan, answer.step, answer.message + waits)

    async def profile(self, job: Job) -> tuple[said.DomainProfile, ...]:
        """See ``Source.profile``."""
        found = [self._s.planning.facts.seen(job, domain) for domain in job.domains.values()]
        shown = tuple(_profile(p) for p in found if p is not None)
        if not shown:
            raise AdminError(ErrorKind.PRECONDITION, f"job {job.record.label!r}: {TOO_SOON}", "job")
        return shown

    async def advise(self, job: Job, bandwidths: tuple[float, ...]) -> tuple[said.Advice, ...]:
        """See ``Source.advise``."""
        planning = self._s.planning
        domain = planning.facts.model(job, lossless=True)  # whether it should be is what is asked
        if domain is None:
            raise AdminError(ErrorKind.PRECONDITION, f"job {job.record.label!r}: {TOO_SOON}", "job")
        standing = planning.course(job).standing
        advice, link = await _or_refused(planning.study.advise(job, standing, domain, bandwidths))
        return (_advice(domain.config.label, advice, link),)


@cache
def tunable() -> tuple[str, ...]:
    """Names of the codecs whose ratio a controller can move."""
    from gcserver.codecs import names, parse

    found = []
    for name in names():
        for spec in (name, f"{name}(ratio=0.01)"):
            with contextlib.suppress(ValueError):
                if parse(spec).tunable and name not in found:
                    found.append(name)
    return tuple(found)


async def _or_refused(work: Awaitable[T]) -> T:
    try:
        return await work
    except NotPlannable as error:
        raise AdminError(ErrorKind.PRECONDITION, str(error), "job") from None
    except PlannerError as error:
        raise AdminError(ErrorKind.UNAVAILABLE, str(error)) from None


def _forecast(p: Proposal, plan: int, measured: float) -> said.Forecast:
    groups = tuple(
        said.GroupForecast(
            len(w.tensors), w.tensors[0] if w.tensors else "", w.bytes, w.codec, w.scheme, w.seconds, w.why
        )
        for w in p.why
    )
    considered = tuple(said.Considered(c.spec, c.expected, c.why_not) for c in p.considered if c.why_not)
    # Groups without sizes for DDP are those that the worker has.
    proposed = tuple(map(said.TensorGroup, p.groups)) if p.caps else ()
    return said.Forecast(
        plan, p.expected, p.dense, p.compute, p.reason, measured, groups, considered, p.alphas, proposed, p.caps
    )


def joined(found: Sequence[TracedStep]) -> list[TracedJob]:
    """What all lanes did in one step, since the step before was over on the last of them. A lane that was asked a step
    earlier than others traced another one: that part is left out."""
    newest = max((step.step for step in found), default=0)
    steps = [step for step in found if step.step == newest]
    zero = max((step.zero for step in steps), default=0.0)
    return [
        replace(j, start=max(j.start + step.zero - zero, 0.0), end=max(j.end + step.zero - zero, 0.0))
        for step in steps
        for j in step.jobs
    ]


def computed(traced: Sequence[TracedJob]) -> list[TracedJob]:
    """What workers did in a traced step, as far as lanes can tell: from the end of the step before to the first push,
    and from each push to the next, they computed (or waited for a core) what was pushed then. What they do after the
    last push is waiting."""
    found: list[TracedJob] = []
    before = 0.0
    for push in sorted((j for j in traced if j.what == "push"), key=lambda j: j.start):
        if push.start > before:
            found.append(TracedJob("compute", "worker", push.key, before, push.start))
            before = push.start
    return found


def _predicted(step: LiveStep, profile: Profile, members: Sequence[str]) -> tuple[said.TimelineJob, ...]:
    nodes = 1 + max((j.node for j in step.jobs), default=0)
    names = list(members) if nodes == len(members) else ["each node"] * nodes  # of many, one is simulated for all

    def what(job: str, index: int) -> str:
        named = job == "compute" and 0 <= index < len(profile.tensors)
        return f"{job} {profile.tensors[index].name}" if named else f"{job} {index}" if index >= 0 else job

    return tuple(
        said.TimelineJob(what(j.what, j.index), _RESOURCES.get(j.resource, j.resource), names[j.node], j.start, j.end)
        for j in step.jobs
    )


#: the timeline's resources in the words of a drawing
_RESOURCES: Final = {"worker": "worker", "link out": "out", "link in": "in"}


def _profile(p: Profile) -> said.DomainProfile:
    codecs = tuple(
        said.CodecProfile(spec, c.encode(SHOWN), c.decode(SHOWN), c.decode_add(SHOWN), c.ratio)
        for spec, c in sorted(p.codecs.items())
    )
    return said.DomainProfile(
        p.job, p.domain, p.nodes, p.forward, p.backward, p.link.latency, p.link.bandwidth, p.link.noise,
        p.link.samples, p.busy, tuple(said.TensorProfile(t.name, t.elements, t.ready) for t in p.tensors), codecs,
        tuple(said.StepProfile(s.plan, s.seconds, s.noise, s.steps) for s in p.steps), dump(p).decode(),
    )  # fmt: skip


def _advice(label: str, a: Advice, link: float) -> said.Advice:
    rows = tuple(said.AdviceRow(*step) for step in a.steps(link))
    return said.Advice(label, a.verdict, a.compute, a.pays_below, rows)
