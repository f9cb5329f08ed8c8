"""What an operator says of who makes a job's plans and what those may lose, as every member comes to know it.

What may live here: saying it, keeping the newest, passing it on. What may not: plans (`job_plans.py`), what a planner
makes of it (`gcserver.runtime.planning`).

    PlanMode (the first member -> all, and again by all in an epoch without it): for whoever is the first after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from gcproto import modes
from gcproto.messages import PlanMode
from gcproto.records import replace
from gcserver.core.control_events import ControlEffect, Log, SayMode
from gcserver.core.job import Job


def on_say_mode(jobs: Mapping[bytes, Job], wish: SayMode) -> list[ControlEffect]:
    """An operator says it at the first member of a job; nothing comes of it where that is over."""
    job = jobs.get(wish.job)
    return say(job, wish.mode, wish.quality, wish.anew) if job is not None else []


def say(job: Job, mode: str, quality: str, anew: bool) -> list[ControlEffect]:
    """At the first member: an operator says who makes the plans from now on, and what those may lose (empty: nobody
    has said that). Where the mode is said (``anew``), plans that are being prepared and wishes that wait were there
    before."""
    number, since = job.said.age if job.said is not None else (0, 0)
    since = job.numbered + len(job.queue) if anew else since
    out = on_said(job, PlanMode(job.id, mode, quality, since, number + 1))
    pass_on(job)
    return out


def on_said(job: Job, said: PlanMode) -> list[ControlEffect]:
    """Keep what was said, if it is news."""
    if why := no_words(said):
        return [Log("error", f"job {job.record.label}: who makes its plans stays as it was: {why}")]
    if job.said is not None and job.said.age >= said.age:
        return []
    job.said = said
    return [job.save()]


def pass_on(job: Job, *nodes: str) -> None:
    """Tell ``nodes``, or all other members, what was said of the mode."""
    if job.said is not None:
        job.tell_members(job.said, *nodes)


def as_old(job: Job, before: int, version: int) -> None:
    """Plan ``version`` has the rules of plan ``before`` with another controller: where those were there when the mode
    was said, so were these."""
    if job.said is not None and before <= job.said.since:
        job.said = replace(job.said, since=version)
        pass_on(job)


def no_words(said: PlanMode | None) -> str:
    """Why nothing can be made of what was said of the mode; empty if something can, or nothing was said."""
    if said is None:
        return ""
    return modes.unknown(said.mode, said.quality) if said.mode else "no mode was said"
