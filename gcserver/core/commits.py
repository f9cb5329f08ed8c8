"""Steps of a job that outlives its nodes: ready once all aggregates are here, committed once they are everywhere.

What may live here: what is said and heard of readiness, and when a step commits. What may not: what settling is
(`settling.py`), what becomes of steps that are not committed when a node is lost (`epochs.py`).

A member is *ready* for step t when its lanes hold every aggregate of all steps up to t. It logs that before it says so,
so that a restart cannot take it back. A step commits, which is to say that it settles, once all members of its domain
are ready for it: whoever is left after a loss then holds it too, and nobody can have committed what one of those that
are left was not ready for.
"""

from __future__ import annotations

from gcproto.epoch_messages import StepReady
from gcserver.core import settling
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import ControlEffect, LogReady
from gcserver.core.job import Job


def on_report(job: Job, domain: ControlDomain) -> list[ControlEffect]:
    """Lanes have finished a step: say how far this node is, unless it has said that it goes no further."""
    before = domain.ready
    while not job.frozen and settling.finished(job, domain, domain.ready + 1):
        domain.ready += 1
    if domain.ready == before:
        # Of steps that became ready in an earlier life reports come again.
        return _commit(job, domain)
    if domain.others:
        job.tell_members(_ready(job, domain), *domain.others)
    return [LogReady(domain.config.id, domain.ready), *_commit(job, domain)]


def on_ready(job: Job, node: str, m: StepReady) -> list[ControlEffect]:
    """A member holds every aggregate of a domain up to a step of the epoch in force."""
    domain = job.domains.get(m.domain)
    if domain is None:
        return []
    domain.heard[node] = max(m.step, domain.heard.get(node, 0))
    return _commit(job, domain)


def _commit(job: Job, domain: ControlDomain) -> list[ControlEffect]:
    out: list[ControlEffect] = []
    everywhere = min([domain.ready, *(domain.heard.get(node, 0) for node in domain.others)])
    while domain.settled < everywhere and settling.finished(job, domain, domain.settled + 1):
        out.extend(settling.settle(job, domain, domain.settled + 1))
    return out


def _ready(job: Job, domain: ControlDomain) -> StepReady:
    return StepReady(job.id, job.record.epoch, domain.config.domain, domain.ready)


def resend(job: Job, node: str) -> None:
    """A member is a new process: say again how far this node is."""
    for domain in job.domains.values():
        if domain.ready and node in domain.others:
            job.tell_members(_ready(job, domain), node)
