"""Plans made by the planner for the jobs of this node: when to measure, when to plan, what became of it.

What may live here: who makes a job's plans, the course from profile to plan, taking a plan back that was slower than
what it replaced. What may not: measuring (`profiler.py`, `plannerprocess.py`), how good a plan is (`gcserver.planner`),
how members come to one (`gcserver.core.job_plans`).

The node of a job's first rank plans for all: it alone needs a mode. A job is planned once ``warmup_steps`` have settled
and its gradients have been timed; again when what was measured has drifted by DRIFT; and taken back when the measured
step is slower than before by more than the noise. A plan of an operator ends that: the mode becomes static.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gcproto.messages import Rule
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import AnswerRequest
from gcserver.core.job import Job
from gcserver.modes import AUTO, STATIC
from gcserver.planner.advice import Advice
from gcserver.planner.auto import PARTS, Proposal, Wish, worth
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.drift import drift
from gcserver.planner.live import LiveStep
from gcserver.planner.live_layout import DDP_BUCKETS
from gcserver.planner.profile import Profile, StepTime
from gcserver.runtime.peek import Watched
from gcserver.runtime.plannerlink import (
    Advise,
    Advised,
    Measure,
    Measured,
    Plan,
    Planned,
    PlannerError,
    PlannerLink,
    Predict,
    Predicted,
)
from gcserver.runtime.profiler import GUESS

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: Measured again and planned again when compute or link have changed by so much.
DRIFT: Final = 0.2
#: So many steps under a plan say how long its steps take.
JUDGED_AFTER: Final = 8
#: Seconds between two looks at whether a job's profile has drifted, and after a question that failed.
LOOK_EVERY: Final = 5.0
RETRY_AFTER: Final = 30.0
log = logging.getLogger("gcserver")


class NotPlannable(Exception):
    """Why there is no plan, profile or advice now, and what would help."""


@dataclass(slots=True)
class Settings:
    """Who makes a job's plans, and what they may lose."""

    mode: str
    quality: str


@dataclass(slots=True)
class Course:
    """How planning for a job stands. ``profile`` and ``proposal`` are the newest; ``before`` what the plan in force
    replaced: its rules and its measured step."""

    settings: Settings
    domain: int = -1
    profile: Profile | None = None
    proposal: Proposal | None = None
    plan: int = 0
    before: tuple[tuple[Rule, ...], StepTime] | None = None
    says: str = ""
    looked: float = 0.0
    task: asyncio.Task[None] | None = None
    #: rules that were slower than promised; not taken again until the profile drifts
    taken_back: set[tuple[Rule, ...]] = field(default_factory=set)


class Planning:
    """All jobs this node plans for."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        self._link = PlannerLink()
        self._courses: dict[bytes, Course] = {}

    def close(self) -> None:
        for course in self._courses.values():
            if course.task is not None:
                course.task.cancel()
        self._link.close()

    # ------------------------------------------------------------------------------------------ modes
    def course(self, job: Job) -> Course:
        """How planning for ``job`` stands; begun with the mode of its record, which is what rank 0's worker wanted,
        else what the first node's configuration says."""
        found = self._courses.get(job.id)
        if found is None:
            found = self._courses[job.id] = Course(Settings(job.record.mode, job.record.quality))
        return found

    def set_mode(self, job: Job, mode: str, quality: str) -> str:
        """Who makes the job's plans from now on ("": as it is); what was done. Raises NotPlannable elsewhere than on
        the node that plans."""
        self._must_be_first(job)
        course = self.course(job)
        course.settings = Settings(mode or course.settings.mode, quality or course.settings.quality)
        course.looked, course.says = 0.0, ""
        course.taken_back.clear()
        course.plan, course.before = 0, None
        if course.settings.mode == STATIC:
            return "plans are made by operators from now on; the one in force stays"
        return f"plans are made by the planner ({course.settings.mode}, {course.settings.quality}) from now on"

    def by_hand(self, job: Job) -> None:
        """An operator gave the job rules: they are not to be planned away."""
        course = self.course(job)
        if course.settings.mode != STATIC:
            course.settings = Settings(STATIC, course.settings.quality)
            course.says = ""

    def forget_job(self, job: bytes) -> None:
        course = self._courses.pop(job, None)
        if course is not None and course.task is not None:
            course.task.cancel()

    def _must_be_first(self, job: Job) -> None:
        if job.node != job.first:
            raise NotPlannable(f"{job.first} plans for job {job.record.label!r}: ask its daemon")

    # ------------------------------------------------------------------------------------------- course
    def tick(self) -> None:
        """Look at every job, now and then."""
        now = time.monotonic()
        for job in list(self._s.machine.jobs.values()):
            if job.node != job.first or job.ended is not None:
                continue
            course = self.course(job)
            if course.settings.mode == STATIC or course.task is not None or now < course.looked:
                continue
            course.looked = now + LOOK_EVERY
            self._look(job, course)

    def _look(self, job: Job, course: Course) -> None:
        domain = self.model(job)
        if domain is None:
            course.says = "waits for a model to be declared"
            return
        warmup = self._s.config.plan.warmup_steps
        if domain.settled < warmup:
            course.says = f"waits for step {warmup}"
            course.looked = 0.0
            return
        seen = self._seen(job, domain)
        if seen is None:
            course.says = "waits until the gradients have been timed"
            course.looked = 0.0
            return
        if course.plan and self._judge(job, domain, course, seen):
            return
        if course.profile is None or drift(course.profile, seen) > DRIFT:
            why = "the first plan" if course.profile is None else "what was measured has drifted"
            course.taken_back.clear()
            course.task = self._s.loop.create_task(self._run(job, domain, course, why))

    def model(self, job: Job) -> ControlDomain | None:
        """The scoped domain with the most elements: the model."""
        scoped = [d for d in job.domains.values() if d.declared_as.scoped and not d.lossless and d.sections]
        return max(scoped, key=lambda d: sum(s.elements for s in d.sections), default=None)

    def _seen(self, job: Job, domain: ControlDomain) -> Profile | None:
        """What was measured of the running job, with the link's cost; codecs and errors as far as they are known."""
        link = self._s.lanes.link.cost(GUESS)
        # A guess is worth less than what an earlier run measured.
        return self._s.profiler.profile(job.id, domain.config.domain, link=link if link.samples else None)

    async def _run(self, job: Job, domain: ControlDomain, course: Course, why: str) -> None:
        try:
            await self._plan(job, domain, course)
        except (NotPlannable, PlannerError) as error:
            course.says = f"no plan for now: {error}"
            course.looked = time.monotonic() + RETRY_AFTER
            log.warning("job %r: %s", job.record.label, course.says)
        except Exception:
            # A defect here must not end the job, whose plan in force is as good as before.
            course.says = "planning failed; the daemon's log has the traceback"
            course.looked = time.monotonic() + RETRY_AFTER
            log.exception("job %r: planning failed (%s)", job.record.label, why)
        finally:
            course.task = None

    async def _plan(self, job: Job, domain: ControlDomain, course: Course) -> AnswerRequest | None:
        """Measure what is missing, plan, and put the plan in force if it is worth that."""
        course.says = "measures codecs and gradients"
        profile = await self._measured(job, domain, course, errors=True)
        course.says = "plans"
        answer = await self._link.ask(Plan(profile, self._wish(course, domain)))
        assert isinstance(answer, Planned)
        proposal = answer.proposal
        course.profile, course.proposal, course.domain = profile, proposal, domain.config.domain
        rules = tuple(Rule(r.pattern, r.spec, r.scheme, r.levels) for r in proposal.rules)
        now = self._step_now(job, domain, profile)
        if rules in course.taken_back:
            course.says = f"{proposal.reason}; but it was slower than the plan in force when it was tried"
            return None
        if now is not None:
            good, reason = worth(now, proposal)
            if not good:
                course.says = f"the plan in force stays: {reason}"
                return None
        before = self._rules(job)
        answered = await self._s.set_plan(job.id.hex(), rules, True)
        if answered.error:
            raise NotPlannable(answered.error)
        course.plan = answered.plan
        course.before = (before, now) if now is not None else None
        course.says = f"plan {answered.plan} since step {answered.step}: {proposal.reason}"
        log.info("job %r: %s (expected %.3g s a step)", job.record.label, course.says, proposal.expected)
        return answered

    def _judge(self, job: Job, domain: ControlDomain, course: Course, seen: Profile) -> bool:
        """Take the newest plan back if its steps are slower than those before it; whether that was done."""
        after = next((s for s in seen.steps if s.plan == course.plan), None)
        if course.before is None or after is None or after.steps < JUDGED_AFTER:
            return False
        rules, before = course.before
        course.before = None
        if after.seconds <= before.seconds * (1 + max(0.05, 2 * after.noise, 2 * before.noise)):
            return False
        said = (
            f"plan {course.plan} took {after.seconds:.3g} s a step, the one before it {before.seconds:.3g} s: that one "
            "is back"
        )
        log.warning("job %r: %s", job.record.label, said)
        course.taken_back.add(self._rules(job))
        course.says, course.plan = said, 0
        course.task = self._s.loop.create_task(self._take_back(job, course, rules))
        return True

    async def _take_back(self, job: Job, course: Course, rules: tuple[Rule, ...]) -> None:
        try:
            await self._s.set_plan(job.id.hex(), rules, True)
        finally:
            course.task = None

    # ---------------------------------------------------------------------------------------- requests
    async def replan(self, job: Job) -> AnswerRequest | None:
        """Plan now, whatever was decided before; None if the plan in force stays (the course says why).

        Raises NotPlannable, PlannerError.
        """
        self._must_be_first(job)
        course = self.course(job)
        if course.settings.mode == STATIC:
            raise NotPlannable(
                f"the plans of job {job.record.label!r} are made by operators; `gcctl set-plan --mode {AUTO}` changes "
                "that"
            )
        if course.task is not None:
            raise NotPlannable("a plan is being made right now; `gcctl plan` shows how that stands")
        domain = self.model(job)
        if domain is None or self._seen(job, domain) is None:
            raise NotPlannable(TOO_SOON)
        course.taken_back.clear()
        work = asyncio.ensure_future(self._plan(job, domain, course))
        course.task = self._s.loop.create_task(_wait(work))
        try:
            return await work
        finally:
            course.task = None

    async def predict(self, domain: ControlDomain, profile: Profile, rules: tuple[PlannedRule, ...]) -> LiveStep:
        """One step under these rules, job by job. Raises PlannerError."""
        answer = await self._link.ask(Predict(profile, rules, _buckets(domain)))
        assert isinstance(answer, Predicted)
        return answer.step

    async def advise(self, job: Job, domain: ControlDomain, bandwidths: tuple[float, ...]) -> tuple[Advice, float]:
        """(advice, bandwidth of the measured link). Raises NotPlannable, PlannerError."""
        course = self.course(job)
        profile = await self._measured(job, domain, course, errors=False)
        answer = await self._link.ask(Advise(profile, bandwidths or USUAL, course.settings.quality))
        assert isinstance(answer, Advised)
        return answer.advice, profile.link.bandwidth

    async def _measured(self, job: Job, domain: ControlDomain, course: Course, errors: bool) -> Profile:
        seen = self._seen(job, domain)
        if seen is None:
            raise NotPlannable(TOO_SOON)
        s = self._s
        watched = Watched(str(s.state), len(s.lanes.table), domain.config, tuple(domain.sections))
        request = Measure(seen, self._wish(course, domain), watched, str(s.config.plan.profiles), errors)
        answer = await self._link.ask(request)
        assert isinstance(answer, Measured)
        known = s.profiler.profile(job.id, domain.config.domain, costs=answer.codecs, errors=answer.errors)
        if known is None:
            raise NotPlannable("the job ended meanwhile")
        return known

    def _wish(self, course: Course, domain: ControlDomain) -> Wish:
        mode = course.settings.mode
        parts = PARTS if mode in (AUTO, STATIC) else frozenset({mode})
        quality, exclude = course.settings.quality, self._s.config.plan.exclude
        return Wish(quality, parts, exclude=exclude, buckets=_buckets(domain))

    def _rules(self, job: Job) -> tuple[Rule, ...]:
        newest = job.plans.get(job.proposal)
        return newest.rules if newest is not None else ()

    def _step_now(self, job: Job, domain: ControlDomain, profile: Profile) -> StepTime | None:
        """The measured step of the plan in force."""
        version = next(v for f, v in reversed(domain.switches) if f <= domain.settled + 1)
        return next((s for s in profile.steps if s.plan == version), None)


#: Links for which advice is given unless told otherwise, bytes a second: 0.1, 1, 10 and 100 Gbit/s.
USUAL: Final = (12.5e6, 125e6, 1.25e9, 12.5e9)
TOO_SOON: Final = "too little has been measured yet: let a model declared by gcclient.state make some ten steps"


def _buckets(domain: ControlDomain) -> tuple[int, ...]:
    """Bytes of the buckets in which a worker brings gradients; empty if it brings them one by one."""
    return DDP_BUCKETS if domain.config.label.startswith("ddp.") else ()


async def _wait(work: asyncio.Future[AnswerRequest | None]) -> None:
    await asyncio.wait({work})
