"""Questions about a job's plans that change none: what a step would take, and what is to be expected on other links.

What may live here: such questions, as the planning process answers them. What may not: making plans (`planning.py`),
the answers (`gcserver.planner`), who may ask (`planadmin.py`, `advising.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from gcproto.modes import QUALITIES
from gcproto.rates import say_rate
from gcserver.core.control_domain import ControlDomain
from gcserver.core.job import Job
from gcserver.planner.advice import Advice
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.live import LiveStep
from gcserver.planner.profile import Profile
from gcserver.planner.standing import Standing
from gcserver.runtime import planwish
from gcserver.runtime.planfacts import PlanFacts, step_now
from gcserver.runtime.plannerlink import Advise, Advised, PlannerLink, Predict, Predicted
from gcserver.runtime.unplannable import TOO_SOON, NotPlannable

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: Links for which advice is given unless told otherwise, bytes a second: 0.1, 1, 10 and 100 Gbit/s.
USUAL: Final = (12.5e6, 125e6, 1.25e9, 12.5e9)


class PlanStudy:
    """Of all jobs this node knows. ``link``: the planning process. However many questions wait here, what a plan asks
    of that process waits for one of theirs at most."""

    def __init__(self, supervisor: Supervisor, link: PlannerLink, facts: PlanFacts) -> None:
        self._s, self._link, self._facts = supervisor, link, facts
        self._turn = asyncio.Lock()

    async def predict(self, domain: ControlDomain, profile: Profile, rules: tuple[PlannedRule, ...]) -> LiveStep:
        """One step under these rules, job by job. Raises PlannerError."""
        async with self._turn:
            answer = await self._link.ask(Predict(profile, rules, planwish.buckets(domain), planwish.groups(domain)))
        assert isinstance(answer, Predicted)
        return answer.step

    async def advise(
        self, job: Job, standing: Standing, domain: ControlDomain, bandwidths: tuple[float, ...]
    ) -> tuple[Advice, float]:
        """(advice, bandwidth of the measured link or 0 where that is a guess). standing: of the job's plans. Raises
        NotPlannable, PlannerError."""
        seen = self._facts.seen(job, domain)
        if seen is None:
            raise NotPlannable(TOO_SOON)
        # Every quality is advised on, also those that the job's own plans do not take, or not yet.
        plain = replace(planwish.wish(standing, domain, self._s.config.plan), late_after=0, hope=0.0)
        async with self._turn:
            profile = await self._facts.measured(job, domain, seen, replace(plain, quality=QUALITIES[-1]), errors=False)
            now = planwish.informed(plain, standing, job, domain, step_now(domain, seen))
            answer = await self._link.ask(Advise(profile, bandwidths or USUAL, plain.quality, now))
        assert isinstance(answer, Advised)
        if profile.link.samples:
            return answer.advice, profile.link.bandwidth
        said = f"{answer.advice.verdict}; the link has not been measured, {say_rate(profile.link.bandwidth)} is a guess"
        return replace(answer.advice, verdict=said), 0.0
