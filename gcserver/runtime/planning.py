"""Plans made by the planner for the jobs of this node: when to measure, when to plan, what became of it.

What may live here: the course from profile to plan, and what is said of it. What may not: questions that change no plan
(`planstudy.py`), its decisions (`gcserver.planner.course`), measuring (`profiler.py`, `plannerprocess.py`), how good a
plan is (`gcserver.planner`), how members come to one (`gcserver.core.job_plans`).

The eldest member of a job plans for all (`JobRecord.eldest`); others know what was said of the mode, no more. A job is
planned once ``warmup_steps`` have settled and its gradients have been timed; again when what was measured has drifted;
and taken back when the measured step is slower than before by more than the noise. Rules of anybody else, at whatever
node, end that: the mode becomes static. How a job's planning stands is saved beside its other memory, so that a daemon
that restarts goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gcproto.modes import AUTO, STATIC
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import AnswerRequest, SayMode
from gcserver.core.job import Job
from gcserver.logsetup import of_job
from gcserver.planner import course as decide
from gcserver.planner.auto import Wish
from gcserver.planner.course import Act
from gcserver.planner.families import DENSE
from gcserver.planner.in_force import barred
from gcserver.planner.profile import Profile
from gcserver.planner.standing import Before, Rules, Standing, rules_of
from gcserver.runtime import planwish
from gcserver.runtime.plancourse import LOOK_EVERY, LOOK_SOON, RETRY_AFTER, Course, begun, heard, left, saved_or_begun
from gcserver.runtime.planfacts import PlanFacts, lossless, newest_asked_for, newest_planned, newest_rules, step_now
from gcserver.runtime.plannerlink import Plan, Planned, PlannerError, PlannerLink
from gcserver.runtime.planstudy import PlanStudy
from gcserver.runtime.unplannable import FAILED, TOO_SOON, MemberRefused, NotPlannable, Overtaken, planner_of

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: A plan waits so many steps for a measurement of the link, or `LINK_SECONDS`. Payloads that never queue up say nothing
#: of it.
LINK_PATIENCE: Final = 30
#: A plan that cannot be taken back stays after so many attempts, until there is a better one.
REFUSED: Final = 3
log = logging.getLogger("gcserver")


def _log(job: Job) -> logging.LoggerAdapter[logging.Logger]:
    return of_job(log, job.record.label)


class Planning:
    """All jobs this node plans for."""

    def __init__(self, supervisor: Supervisor, link: PlannerLink | None = None) -> None:
        self._s = supervisor
        self.link = link or PlannerLink(voice=supervisor.config.voice())
        self.facts = PlanFacts(supervisor, self.link)
        self.study = PlanStudy(supervisor, self.link, self.facts)
        self._courses: dict[bytes, Course] = {}

    async def close(self) -> None:
        """Stop planning, and end the planning process."""
        for course in self._courses.values():
            if course.task is not None:
                course.task.cancel()
        await self.link.ended()

    # ------------------------------------------------------------------------------------------ modes
    def course(self, job: Job) -> Course:
        """How planning for ``job`` stands: as it was saved, else begun as an operator has said or as its record says.
        Elsewhere than on the node that plans it is as it begins, since how it went on only that node knows."""
        if job.node != job.first:
            return Course(begun(job))
        found = self._courses.get(job.id)
        if found is None:
            found = self._courses[job.id] = Course(saved_or_begun(self._s, job))
        found.heed(job)
        return found

    def set_mode(self, job: Job, mode: str, quality: str) -> str:
        """Who makes the job's plans from now on ("": as it is); what was done. Raises NotPlannable elsewhere than on
        the node that plans."""
        self._must_be_first(job)
        course = self.course(job)
        old = course.standing
        chosen = old.chosen or bool(quality)
        anew, mode, quality = bool(mode), mode or old.mode, quality or old.quality
        self._s.feed(SayMode(job.id, mode, quality if chosen else "", anew))
        course.standing = msgspec.structs.replace(old, said=job.said)
        course.begin_anew()
        if mode == STATIC:
            self._now(job, mode=mode, quality=quality, before=None, chosen=chosen)
            return f"plans are made by operators from now on; {left(old)}"
        # Rules that are there now may be planned away; a plan that is on its way is still known as the planner's.
        course.standing = Standing(
            mode, quality, newest_rules(job), old.asked, plan=job.proposal, chosen=chosen, said=job.said
        )
        self._now(job)
        said = planwish.quality(course.standing, self.facts.model(job), self.facts.others(job))
        return f"plans are made by the planner ({mode}, {said}) from now on"

    def by_hand(self, job: Job, changes: int | None = None) -> None:
        """An operator gave the job rules: they are not to be planned away, unless somebody has given the plans to the
        planner since (``changes``: those of the course when the rules were given). Other nodes' operators are noticed
        by what they gave."""
        course = self.course(job)
        if job.node == job.first and course.standing.mode != STATIC and changes in (None, course.changes):
            course.standing = decide.by_hand(course.standing)
            course.forget()
            self._now(job)

    def forget_job(self, job: bytes) -> None:
        course = self._courses.pop(job, None)
        if course is not None and course.task is not None:
            course.task.cancel()

    def _must_be_first(self, job: Job) -> None:
        if job.node != job.first:
            raise NotPlannable(planner_of(job))

    # ----------------------------------------------------------------------------------------- memory
    def _now(self, job: Job, **changes: Any) -> None:
        """Change how planning stands, and save it."""
        course = self.course(job)
        course.standing = msgspec.structs.replace(course.standing, **changes)
        try:
            self._s.store.save_planning(job.id, msgspec.msgpack.encode(course.standing))
        except OSError as error:
            self._s.warn_once(f"how planning stands cannot be saved, a restart forgets it: {error}")

    # ------------------------------------------------------------------------------------------- course
    def tick(self) -> None:
        """Look at every job, now and then."""
        now = time.monotonic()
        for job in list(self._s.machine.jobs.values()):
            if job.node != job.first or job.ended is not None:
                continue
            course = self.course(job)
            if course.standing.mode == STATIC or course.task is not None:
                continue
            self._notice(job, course)
            if course.standing.mode == STATIC or now < course.looked:
                continue
            course.looked = now + (LOOK_SOON if decide.on_trial(course.standing) else LOOK_EVERY)
            try:
                self._look(job, course)
            except Exception:
                # A defect here must not stop the daemon's clock, nor the job.
                course.result, course.looked = FAILED, now + RETRY_AFTER
                _log(job).exception("job %r: planning failed", job.record.label)

    def _notice(self, job: Job, course: Course) -> None:
        """Whose the job's newest plan is."""
        planned, asked_for = newest_planned(job), newest_asked_for(job)
        found = decide.noticed(course.standing, job.proposal, newest_rules(job), planned, asked_for)
        if found == course.standing:
            return
        if found.mode == STATIC:
            course.forget()
            _log(job).info(
                "job %r: plan %d is not the planner's: operators make the plans", job.record.label, job.proposal
            )
        course.standing = found
        self._now(job)

    def _look(self, job: Job, course: Course) -> None:
        course.waits = ""
        domain = self.facts.model(job)
        if domain is None:
            course.wait(lossless(job) or "waits for a model to be declared")
            return
        # What a plan would be compared with are steps after the model's own warm-up.
        warmup = self._s.config.plan.warmup_steps + domain.config.warmup
        if domain.settled < warmup:
            made = f"has made {domain.settled}" if domain.settled else "has made none yet"
            course.wait(f"waits for step {warmup} of {domain.config.label}, the largest model, which {made}")
            return
        seen = self.facts.seen(job, domain)
        if seen is None:
            course.wait(f"waits until the gradients of {domain.config.label} have been timed")
            return
        unsure = not seen.link.samples or (course.standing.profile is None and self._s.lanes.link.in_doubt)
        if unsure and domain.settled < warmup + LINK_PATIENCE and course.waits_for_link(time.monotonic()):
            course.wait("waits until the link has been measured")
            return
        others = self.facts.others(job)
        late_after = planwish.late_after(course.standing, domain, self._s.config.plan, others)
        quality = planwish.quality(course.standing, domain, others)
        why_not = planwish.why_not(job, course.standing, quality, seen)
        settled = planwish.made(domain)
        act, why = decide.next_act(course.standing, domain.config.domain, seen, settled, late_after, why_not)
        before = course.standing.before
        if act is Act.TAKE_BACK and before and barred(before.rules, quality, seen.tolerant, before.family != ""):
            act, why = Act.KEEP, "what it would give way to may not be in force any more"
        plans = act in (Act.PLAN, Act.MEASURE)
        if not plans or not decide.other_network(course.standing, seen):
            course.afresh = 0.0  # a network that is again as it was has to change once more
        if act is Act.KEEP:
            _log(job).info("job %r: plan %d stays: %s", job.record.label, course.standing.plan, why)
            course.standing, course.looked = decide.judged(course.standing, seen), 0.0  # what follows is seen at once
            self._now(job)
        elif plans:
            step = step_now(domain, seen)
            if why_not:
                enough = True  # whatever steps take without it
            elif decide.other_network(course.standing, seen):
                # The step that a plan has to beat is one over the network of now.
                begins, enough = course.begins_afresh(time.monotonic(), step)
                if begins:
                    self._s.profiler.measure_again(job.id, domain.config.domain)
            else:
                # Nor can it be compared with steps that were not made yet, after a plan was taken back.
                enough = course.standing.profile is None or (step is not None and step.steps >= decide.COMPARED)
            if not enough:
                course.waits = f"measures steps anew: {why}"
                return
            course.afresh = 0.0
            _log(job).info("job %r is planned: %s", job.record.label, why)
            self._now(job, **decide.unlearned(course.standing, seen, settled))
            measure = decide.in_turn(course.standing) if act is Act.MEASURE else ""
            self._begin(job, course, lambda: self._plan(job, domain, course, seen, measure))
        elif act is Act.TAKE_BACK:
            _log(job).warning("job %r: %s", job.record.label, why)
            learned, wanted = decide.learned(course.standing, seen), course.wanted
            self._begin(job, course, lambda: self._take_back(job, course, why, wanted, learned))

    def _begin(
        self, job: Job, course: Course, work: Callable[[], Awaitable[AnswerRequest | None]]
    ) -> asyncio.Task[AnswerRequest | None]:
        """Work on a job's plan beside everything else; what goes wrong is said, and raised as NotPlannable or
        PlannerError."""

        async def guarded() -> AnswerRequest | None:
            try:
                answer = await work()
                course.failed = 0
                return answer
            except (NotPlannable, PlannerError) as error:
                self._failed(job, course, f"no plan for now: {error}", isinstance(error, Overtaken))
                raise
            except Exception:
                # A defect here must not end the job, whose plan in force is as good as before.
                _log(job).exception("job %r: its plan could not be made or taken back", job.record.label)
                self._failed(job, course, FAILED)
                raise NotPlannable(FAILED) from None
            finally:
                course.task, course.waits = None, ""

        course.task = self._s.loop.create_task(guarded())
        course.task.add_done_callback(heard)
        return course.task

    def _failed(self, job: Job, course: Course, says: str, overtaken: bool = False) -> None:
        _log(job).warning("job %r: %s", job.record.label, says)
        course.later(time.monotonic(), overtaken)
        if course.standing.mode != STATIC:
            course.result = says

    async def _plan(
        self, job: Job, domain: ControlDomain, course: Course, seen: Profile, measure: str = ""
    ) -> AnswerRequest | None:
        """Measure what is missing, plan, and put the plan in force if it is worth that, or of the family that is to be
        measured (``measure``)."""
        wanted = course.wanted
        now = step_now(domain, seen)  # before this work slows the steps down
        course.waits = "measures codecs and gradients"
        others, settled = self.facts.others(job), planwish.made(domain)
        plain = planwish.wish(course.standing, domain, self._s.config.plan, others)
        looks = course.looks_at_gradients(seen, settled)
        profile = await self.facts.measured(job, domain, seen, plain, errors=looks)
        if looks:
            course.told(seen, profile, settled)
        course.waits = "plans"
        wish = planwish.informed(plain, course.standing, job, domain, now)
        wish, was = msgspec.structs.replace(wish, measure=measure), course.standing
        while True:
            answer = await self.link.ask(Plan(profile, wish))
            assert isinstance(answer, Planned)
            self._still(job, course, wanted)
            if planwish.quality(course.standing, domain, self.facts.others(job)) != wish.quality:
                raise Overtaken("another model was declared, with which plans may lose less")
            proposal, rules = answer.proposal, newest_rules(job)
            # Kept only once something has come of it: else it would not be planned again.
            found = {
                "profile": profile, "proposal": proposal, "domain": domain.config.domain, "considered": len(wish.took),
                "at": settled, "stayed": now is not None and decide.stays_dense(proposal, wish.rules),
                "in_turn": (*was.in_turn, measure) if measure else was.in_turn,
            }  # fmt: skip
            why_not = planwish.why_not(job, course.standing, wish.quality, profile)
            pays, reason = decide.switch(course.standing, proposal, now, rules, wish.rules, measure, why_not)
            if not pays:
                self._now(job, **found, running=decide.running(course.standing, proposal, now, rules, wish.rules))
                course.result = reason
                _log(job).info("job %r: %s", job.record.label, reason)
                return None
            before = decide.replaced(was, rules, now, proposal, wish.rules, why_not)
            try:
                answered = await self._put(job, course, rules_of(proposal), proposal.family, before)
                break
            except MemberRefused as error:
                # The same would be proposed again, and refused again: the next best is.
                wish = self._without(job, course, wish, proposal.family, error)
        # Whoever changed the mode or the quality meanwhile wants another plan, which then is the first one.
        if course.wanted == wanted:
            if before is None:
                found |= decide.anew(course.standing, proposal.family)
            self._now(job, **found)
            course.result = f"plan {answered.plan} since step {answered.step}: {reason}"
            _log(job).info("job %r: %s (expected %.3g s a step)", job.record.label, course.result, proposal.expected)
        return answered

    def _without(self, job: Job, course: Course, wish: Wish, family: str, why: MemberRefused) -> Wish:
        """The wish with a family left out that a member refused; raises the refusal where none is left."""
        if family == DENSE or family in wish.refused:
            raise why
        refused = wish.refused | {family: str(why)}
        if course.standing.mode != STATIC:
            self._now(job, refused=refused)
        _log(job).warning("job %r: the next plan is one without %s: %s", job.record.label, family, why)
        return msgspec.structs.replace(wish, refused=refused)

    async def _take_back(
        self, job: Job, course: Course, why: str, wanted: tuple[str, str, int], learned: dict[str, Any]
    ) -> AnswerRequest:
        """Put in force again what was before; ``learned``: what then changes besides."""
        self._still(job, course, wanted)
        before, tried = course.standing.before, course.standing.rules
        assert before is not None
        try:
            answered = await self._put(job, course, before.rules, before.family)
        except MemberRefused as error:
            if course.failed + 1 >= REFUSED:
                # The rules before cannot come back; other ones can still be better than these.
                self._now(job, before=None, **learned)
            # Nothing else can be asked for instead: it is tried again later.
            raise NotPlannable(str(error)) from None
        if course.wanted == wanted:
            self._now(job, taken_back=(*course.standing.taken_back, tried), **learned)
            course.result = why
        return answered

    def _still(self, job: Job, course: Course, wanted: tuple[str, str, int]) -> None:
        """Raises Overtaken where what was begun is not wanted any more."""
        if job.ended is not None:
            raise Overtaken("the job ended meanwhile")
        self._notice(job, course)
        if course.wanted != wanted:
            raise Overtaken("who makes the plans, or what they may lose, was changed meanwhile")

    async def _put(
        self, job: Job, course: Course, rules: Rules, family: str, before: Before | None = None
    ) -> AnswerRequest:
        """Give the job these rules, of ``family``, to be judged by ``before``; returns when they are in force. Raises
        NotPlannable."""
        if job.preparing or job.queue:
            raise Overtaken("the members prepare another plan")
        self._now(job, asked=rules, asked_as=family, asked_before=before)
        answered = await self._s.set_plan(job.id.hex(), rules, True, planned=True)
        if not answered.error:
            self._notice(job, course)
        self._now(job, asked=None, asked_as="", asked_before=None)
        if answered.error:
            raise MemberRefused(answered.error)
        return answered

    # ---------------------------------------------------------------------------------------- requests
    async def replan(self, job: Job) -> AnswerRequest | None:
        """Plan now, whatever was decided before; None if the plan in force stays (the course says why).

        Raises NotPlannable, PlannerError.
        """
        self._must_be_first(job)
        course = self.course(job)
        if course.standing.mode == STATIC:
            who = f"the plans of job {job.record.label!r} are made by operators"
            raise NotPlannable(f"{who}; `gcctl set-plan --mode {AUTO}` changes that")
        if course.task is not None:
            raise NotPlannable("a plan is being made right now; `gcctl plan` shows how that stands")
        domain = self.facts.model(job)
        seen = self.facts.seen(job, domain) if domain is not None else None
        if domain is None or seen is None:
            raise NotPlannable(lossless(job) or TOO_SOON)
        free = {"taken_back": (), "refused": {}, "took": decide.released(course.standing)}
        self._now(job, **free | decide.unlearned(course.standing, seen))
        course.looked_at = -1
        task = self._begin(job, course, lambda: self._plan(job, domain, course, seen))
        try:
            # Whoever asked may give up waiting; the plan is made all the same.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise NotPlannable("the job ended meanwhile") from None
            raise
