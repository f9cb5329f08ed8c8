"""What is known of a job for its planning: its model, what was measured of that, and what is in force.

What may live here: these facts, as daemon and planning process have them. What may not: what follows from them
(`planning.py`, `gcserver.planner.course`), measuring (`profiler.py`, `plannerprocess.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gcserver.core import resuming
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from gcserver.planner import course as decide
from gcserver.planner.auto import Wish
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.standing import Rules
from gcserver.runtime.peek import Watched
from gcserver.runtime.plannerlink import Measure, Measured, PlannerLink
from gcserver.runtime.profiler import GUESS
from gcserver.runtime.unplannable import LOSSLESS, NotPlannable

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor


class PlanFacts:
    """Of all jobs of this node. ``link``: the planning process, which looks at codecs and gradients."""

    def __init__(self, supervisor: Supervisor, link: PlannerLink) -> None:
        self._s, self._link = supervisor, link

    def model(self, job: Job, lossless: bool = False) -> ControlDomain | None:
        """The scoped domain with the most elements: the model. ``lossless``: also one that no plan applies to."""
        return max(_models(job, lossless), key=lambda d: sum(s.elements for s in d.sections), default=None)

    def others(self, job: Job) -> tuple[ControlDomain, ...]:
        """The job's other models, for which the rules of the largest hold as well."""
        model = self.model(job)
        return tuple(d for d in _models(job) if d is not model)

    def seen(self, job: Job, domain: ControlDomain) -> Profile | None:
        """What was measured of the running job, with the link's cost; codecs and errors as far as they are known."""
        known = self._s.profiler.profile(job.id, domain.config.domain)
        # A guess is worth less than what an earlier run measured.
        link = self._s.lanes.link.news(known.link if known is not None else GUESS, GUESS, job.others)
        return self._s.profiler.profile(job.id, domain.config.domain, link=link) if link is not None else known

    async def measured(self, job: Job, domain: ControlDomain, seen: Profile, wish: Wish, errors: bool) -> Profile:
        """What is known of the job once the codecs of a wish, and gradients if asked, have been looked at. Raises
        NotPlannable, PlannerError."""
        s = self._s
        watched = Watched(str(s.state), len(s.lanes.table), domain.config, tuple(domain.sections))
        caches = str(s.config.plan.profiles or "")
        answer = await self._link.ask(Measure(seen, wish, watched, caches, errors))
        assert isinstance(answer, Measured)
        known = s.profiler.profile(job.id, domain.config.domain, costs=answer.codecs, errors=answer.errors)
        if known is None:
            raise NotPlannable("the job ended meanwhile")
        return known


def lossless(job: Job) -> str:
    """Why no plan applies to a job: all its models were declared lossless; empty if not, or if there is none yet."""
    return LOSSLESS if _models(job, lossless=True) and not _models(job) else ""


def _models(job: Job, lossless: bool = False) -> list[ControlDomain]:
    scoped = [d for d in job.domains.values() if d.declared_as.scoped and d.sections]
    return [d for d in scoped if lossless or not d.lossless]


def newest_rules(job: Job) -> Rules:
    """Of the job's newest plan that all members can run; before the first, what it was resumed with."""
    return job.newest.rules if job.newest is not None else resuming.base(job.domains)


def newest_planned(job: Job) -> bool:
    """Whether a planner made those."""
    return job.newest.planned if job.newest is not None else resuming.base_planned(job.domains)


def newest_asked_for(job: Job) -> bool:
    """Whether somebody asked for them, and not for another controller alone."""
    return job.newest is not None and job.newest.given


def step_now(domain: ControlDomain, profile: Profile) -> StepTime | None:
    """The measured step of the newest plan; None while that is not in force yet, or no step under it was measured."""
    first, version = domain.switches[-1]
    return decide.step_under(profile, version) if first <= domain.settled + 1 else None
