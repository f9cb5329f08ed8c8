"""Advice for workers: their questions over the registration socket, answered by the planning of this node.

What may live here: questions under way, answers in the words of messages. What may not: connections
(`registrations.py`), how advice comes about (`planstudy.py`, `gcserver.planner.advice`).

Any node answers, from its own profile: advice changes nothing, so it need not come from the node that plans.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gcproto.advice import BANDWIDTH_FORM, AdviceRow, Advised, AskAdvice, is_bandwidth
from gcserver.runtime.plannerlink import PlannerError
from gcserver.runtime.unplannable import TOO_SOON, NotPlannable

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: So many questions may wait; whoever asks more is sent away.
MOST_WAITING: Final = 32
LATER: Final = "ask again after some more steps"
log = logging.getLogger("gcserver")


class Advising:
    """Questions of one supervisor's workers. ``close`` forgets them."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        self._under_way: set[asyncio.Task[None]] = set()

    def asked(self, worker: tuple[bytes, int] | None, message: AskAdvice, tell: Callable[[Advised], None]) -> None:
        """A worker, as (job, rank), wants advice: ``tell`` is called once with the answer."""
        if len(self._under_way) >= MOST_WAITING:
            tell(Advised(message.request, error=f"{MOST_WAITING} questions wait already", advice="ask again later"))
            return
        task = self._s.loop.create_task(self._answer(worker, message, tell))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def close(self) -> None:
        for task in self._under_way:
            task.cancel()

    async def _answer(
        self, worker: tuple[bytes, int] | None, message: AskAdvice, tell: Callable[[Advised], None]
    ) -> None:
        try:
            tell(await self._advice(worker, message))
        except Exception:
            log.exception("a worker's question for advice could not be answered")
            tell(Advised(message.request, error="a defect in the daemon", advice="the daemon's log has the traceback"))

    async def _advice(self, worker: tuple[bytes, int] | None, message: AskAdvice) -> Advised:
        def refused(why: str, advice: str = LATER) -> Advised:
            return Advised(message.request, error=why, advice=advice)

        job = self._s.machine.jobs.get(worker[0]) if worker is not None else None
        if job is None:
            return refused("this worker is not part of a job", "call init() first")
        if not all(map(is_bandwidth, message.bandwidths)):
            return refused(f"bandwidths: expected {BANDWIDTH_FORM}, got {message.bandwidths}", "correct them")
        planning = self._s.planning
        domain = planning.facts.model(job, lossless=True) if message.domain < 0 else job.domains.get(message.domain)
        if domain is None or not domain.declared_as.scoped:
            return refused(TOO_SOON)
        try:
            standing = planning.course(job).standing
            found, link = await planning.study.advise(job, standing, domain, message.bandwidths)
        except NotPlannable as error:
            return refused(str(error))
        except PlannerError as error:
            return refused(f"the planner failed: {error}", "look at the daemon's log on this node")
        rows = tuple(AdviceRow(*step) for step in found.steps(link))
        return Advised(message.request, found.verdict, found.compute, found.pays_below, rows)
