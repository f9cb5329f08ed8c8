"""Who waits for whom in a job, and when that ends it: every wait ends.

What may live here: the deadline, leases, waits that are in vain. What may not: what a lane waits for (`domain.py`),
the time: ``now`` is a parameter, seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from gcserver.core import epochs
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import ControlEffect
from gcserver.core.effects import ReportWaiting
from gcserver.core.job import Job


def on_waiting(job: Job, lane: int, report: ReportWaiting) -> None:
    """A lane says what its oldest step waits for; step 0: for nothing any more."""
    domain = job.domains.get(report.domain[1])
    if domain is None or report.epoch != domain.config.epoch:
        return
    if report.step:
        domain.waiting[lane] = report
    else:
        domain.waiting.pop(lane, None)


def _departed(job: Job, domain: ControlDomain, report: ReportWaiting) -> tuple[str, ...]:
    """Those the report waits for (nodes, "local rank i") whose workers left before that step: it is in vain.

    What a node finished before it left is still sent again from there when it was lost on the way.
    """
    key = domain.declared_as.domain
    local = {f"local rank {i}": r for i, r in enumerate(domain.ranks)}
    return tuple(
        m
        for m in report.missing
        if (m in job.left and job.left[m].get(key, 0) < report.step) or (m in local and local[m] not in job.workers)
    )


def check_order(job: Job) -> list[ControlEffect]:
    """A rank that declares a new tensor for a step in which others push known ones waits in vain."""
    for domain in job.domains.values():
        label = domain.config.label
        for index, nodes in domain.offered_for.items():
            if index < len(domain.sections) or domain.declared.get(index):
                continue
            for node, step in nodes.items():
                if step in domain.closed:
                    return _disorder(
                        job,
                        domain,
                        step,
                        f"{node} declares a new tensor of {label} for step {step}, in which {job.node} pushes others",
                    )
        for report in domain.waiting.values():
            for ranks in domain.declared_for.values():
                for rank, step in ranks.items():
                    absent = f"local rank {domain.ranks.index(rank)}" in report.missing
                    if step == report.step and absent and len(ranks) < len(domain.ranks):
                        return _disorder(
                            job,
                            domain,
                            step,
                            f"rank {rank} declares a new tensor of {label} for step "
                            f"{step}, in which other ranks on {job.node} push others",
                        )
    return []


def _disorder(job: Job, domain: ControlDomain, step: int, message: str) -> list[ControlEffect]:
    return job.fault("TensorMismatch", message, domain=domain.config.domain, step=step, phase="declare")


def check_deadline(job: Job, now: float, patience: float) -> list[ControlEffect]:
    """End the job if a step waits longer than the deadline, or ``patience`` seconds for somebody who left."""
    for key, domain in job.domains.items():
        for report in domain.waiting.values():
            departed = _departed(job, domain, report) if now - report.since > patience else ()
            if departed and job.commits and (away := [node for node in departed if node in job.others]):
                why = f"its workers left while step {report.step} of {domain.config.label} waited for them"
                return [effect for node in away for effect in epochs.lose(job, node, why)]
            if departed:
                return job.fault(
                    "WorkerLost",
                    f"{', '.join(departed)} left the job while step {report.step} of {domain.config.label} "
                    "waited for it",
                    domain=key,
                    step=report.step,
                    phase=report.phase,
                    missing=departed,
                    elapsed=now - report.since,
                    advice="let every rank make the same number of steps before shutdown()",
                )
            if now - report.since > job.record.deadline:
                return job.fault(
                    "StepTimeout",
                    f"step {report.step} of {domain.config.label} was not finished within the deadline of "
                    f"{job.record.deadline:g} s",
                    domain=key,
                    step=report.step,
                    phase=report.phase,
                    missing=report.missing,
                    elapsed=now - report.since,
                    advice="look at the named peers; raise job.deadline if they are merely slow",
                )
    return []


def check_commits(job: Job, now: float) -> list[ControlEffect]:
    """End the job if what is ready here was not committed for as long as the deadline."""
    for key, domain in job.domains.items():
        if domain.ready <= domain.settled:
            domain.held = None
        elif domain.held is None or domain.held[0] != domain.settled + 1:
            domain.held = domain.settled + 1, now
        elif not job.frozen and now - domain.held[1] > job.record.deadline:
            step = domain.settled + 1
            missing = tuple(node for node in domain.others if domain.heard.get(node, 0) < step) or (job.node,)
            return job.fault(
                "StepTimeout",
                f"step {step} of {domain.config.label} was ready here and not on {', '.join(missing)} within the "
                f"deadline of {job.record.deadline:g} s",
                domain=key,
                step=step,
                phase="commit",
                missing=missing,
                elapsed=now - domain.held[1],
                advice="look at the named peers; raise job.deadline if they are merely slow",
            )
    return []


def check_leases(job: Job, heard: Callable[[str], float | None], now: float, lease: float) -> list[ControlEffect]:
    """A member whose daemon was not heard of for a lease, seconds, is lost; ``heard`` says when it was last."""
    out: list[ControlEffect] = []
    for name in job.others:
        last = heard(name)
        if last is not None and now - last > lease:
            why = f"nothing heard from {name} for {lease:g} s: its lease expired"
            out += epochs.lose(job, name, why, now - last, f"look at the daemon on {name}; {epochs.AGAIN}")
    return out


def check_workers(job: Job, now: float, lease: float) -> list[ControlEffect]:
    """After a restart of ours: workers that do not come back are lost."""
    out: list[ControlEffect] = []
    for rank, since in list(job.away_since.items()):
        if now - since > lease:
            del job.away_since[rank]
            if job.ended is None:
                out += job.fault(
                    "WorkerLost", f"rank {rank} did not come back to its restarted daemon", missing=(f"rank {rank}",)
                )
            out += job.worker_left(rank)
    return out
