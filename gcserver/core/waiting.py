"""Who waits for whom in a job, and when that ends it: every wait ends.

What may live here: the deadline, leases, waits that are in vain, all waits of a job for those who show them. What may
not: what a lane waits for (`domain.py`), jobs that have yet to form (`gathering.py`), the time: ``now`` is a
parameter, seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gcproto import wire
from gcproto.records import replace
from gcserver.core import epochs
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import ControlEffect
from gcserver.core.effects import Count, ReportWaiting
from gcserver.core.job import Job
from gcserver.core.job_faults import AGAIN

#: Phases that hold up a job as a whole, not one of its domains.
WHOLE_JOB = frozenset({"attach", "epoch"})


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody a job waits for: a node by its name, or "rank 3", which is one of this node's.

    ``wanted``: what is awaited, as in `ReportWaiting`, or "tensors" (to be declared), "connection" (of a worker to its
    restarted daemon), "first push" (of a step that another node has closed and no rank here begun), "commit" (of a step
    that this node holds all of), "epoch" (of a member that has not said how far it is when one was lost). ``since``:
    seconds on the machine's clock. ``domain`` and ``step``: 0 where it is of none.
    """

    who: str
    wanted: str
    phase: str
    since: float
    domain: int = 0
    step: int = 0


def waits(job: Job) -> Iterator[Wait]:
    """Everything the job waits for here. Ends with the job."""
    if job.ended is not None:
        return
    for rank, since in job.away_since.items():
        yield Wait(f"rank {rank}", "connection", "attach", since)
    if job.frozen and job.change.since is not None:
        for who in job.others:
            if who not in job.lost and who not in job.change.states:
                yield Wait(who, "epoch", "epoch", job.change.since)
    for key, domain in job.domains.items():
        for index, since in domain.declaring.items():
            for who in _undeclared(job, domain, index) if index >= len(domain.sections) else ():
                yield Wait(who, "tensors", "declare", since, key)
        for report in domain.waiting.values():
            for who, wanted in zip(report.missing, report.wanted, strict=True):
                yield Wait(who, wanted, report.phase, report.since, key, report.step)
        if domain.held is not None:
            ready, since = domain.held
            for who in domain.others:
                if domain.heard.get(who, 0) < ready:
                    yield Wait(who, "commit", "commit", since, key, ready)
        step, since = domain.behind
        if step > domain.settled and step not in domain.closed and not domain.waiting:
            for rank in domain.ranks:
                yield Wait(f"rank {rank}", "first push", "push", since, key, step)


def on_waiting(job: Job, lane: int, report: ReportWaiting) -> None:
    """A lane says what its oldest step waits for; step 0: for nothing any more."""
    domain = job.domains.get(report.domain[1])
    if domain is None or report.epoch != domain.config.epoch:
        return
    if report.step:
        ranks = {f"local rank {i}": f"rank {r}" for i, r in enumerate(domain.ranks)}
        domain.waiting[lane] = replace(report, missing=tuple(ranks.get(name, name) for name in report.missing))
    else:
        domain.waiting.pop(lane, None)


def _departed(job: Job, domain: ControlDomain, missing: tuple[str, ...], step: int | None = None) -> tuple[str, ...]:
    """Those of ``missing`` (nodes, "rank r") whose workers left, before ``step`` if one is given: to wait is in vain.

    What a node finished before it left is still sent again from there when it was lost on the way.
    """
    key = domain.declared_as.domain
    local = {f"rank {r}": r for r in domain.ranks if r not in job.workers and r not in job.away_since}
    return tuple(
        m for m in missing if m in local or (m in job.left and (step is None or job.left[m].get(key, 0) < step))
    )


def _waits_in_vain(
    job: Job,
    domain: ControlDomain,
    departed: tuple[str, ...],
    what: str,
    advice: str,
    phase: str,
    elapsed: float,
    step: int = 0,
) -> list[ControlEffect]:
    """``what`` waits for those who left: their nodes are lost where the job goes on without, else it ends."""
    if job.commits and (away := [node for node in departed if node in job.others]):
        why = f"its workers left while {what} waited for them"
        return [effect for node in away for effect in epochs.lose(job, node, why)]
    return job.fault(
        "WorkerLost",
        f"{', '.join(departed)} left the job while {what} waited for it",
        domain=domain.declared_as.domain,
        step=step,
        phase=phase,
        missing=departed,
        elapsed=elapsed,
        advice=advice,
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
                    absent = f"rank {rank}" in report.missing
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


def _silent(
    job: Job, domain: ControlDomain, what: str, missing: tuple[str, ...], ages: dict[str, float], patience: float
) -> list[ControlEffect]:
    """``what`` has waited for ``missing`` until the deadline: members whose daemons have been silent for ``patience``
    are lost then, though their leases still run. Nothing in a job that ends with its first loss."""
    if not job.commits or not set(missing).intersection(domain.others):
        return []
    # Not only of those that are missing: they may be waiting for the silent one themselves.
    found = [(name, age) for name in domain.others if (age := ages.get(name, 0.0)) > patience]
    why = "nothing heard from {} for {:.0f} s at the deadline of {}"
    return [effect for name, age in found for effect in epochs.lose(job, name, why.format(name, age, what))]


def check_deadline(job: Job, ages: dict[str, float], now: float, patience: float) -> list[ControlEffect]:
    """End the job if a step, or a declaration, waits longer than the deadline, or ``patience`` seconds for somebody who
    left."""
    for key, domain in job.domains.items():
        for report in domain.waiting.values():
            waited, what = now - report.since, f"step {report.step} of {domain.config.label}"
            if waited > patience and (departed := _departed(job, domain, report.missing, report.step)):
                advice = "let every rank make the same number of steps before shutdown()"
                return _waits_in_vain(job, domain, departed, what, advice, report.phase, waited, report.step)
            if waited > job.record.deadline:
                if out := _silent(job, domain, what, report.missing, ages, patience):
                    return out
                return job.fault(
                    "StepTimeout",
                    f"{what} was not finished within the deadline of {job.record.deadline:g} s",
                    domain=key,
                    step=report.step,
                    phase=report.phase,
                    missing=report.missing,
                    elapsed=waited,
                    advice="look at the named peers; raise job.deadline if they are merely slow",
                )
    return _check_declarations(job, ages, now, patience)


def _undeclared(job: Job, domain: ControlDomain, index: int) -> tuple[str, ...]:
    """Who has not declared section ``index`` yet: ranks of this node, then other members."""
    mine = domain.declared.get(index, {})
    ranks = tuple(f"rank {r}" for r in domain.ranks if r not in mine)
    offers = domain.offers.get(index, {})
    return ranks + tuple(m.name for m in domain.config.members if m.name != job.node and m.name not in offers)


def _check_declarations(job: Job, ages: dict[str, float], now: float, patience: float) -> list[ControlEffect]:
    """End the job if tensors that some ranks declared were not declared by all within the deadline, or ``patience``
    seconds after somebody left who has yet to."""
    for key, domain in job.domains.items():
        pending = {i for i in (*domain.declared, *domain.offers) if i >= len(domain.sections)}
        domain.declaring = {i: domain.declaring.get(i, now) for i in sorted(pending)}
        for index, since in domain.declaring.items():
            if (waited := now - since) <= min(patience, job.record.deadline):
                continue
            missing, what = (
                _undeclared(job, domain, index),
                f"tensors of {domain.config.label} that some ranks declared",
            )
            if waited > patience and (departed := _departed(job, domain, missing)):
                advice = "let every rank declare the same before shutdown() or the end of its process"
                return _waits_in_vain(job, domain, departed, what, advice, "declare", waited)
            if waited <= job.record.deadline:
                continue
            if out := _silent(job, domain, what, missing, ages, patience):
                return out
            return job.fault(
                "StepTimeout",
                f"{what} were not declared by all within the deadline of {job.record.deadline:g} s",
                domain=key,
                phase="declare",
                missing=missing,
                elapsed=waited,
                advice="look at the named ranks and nodes; raise job.deadline if they are merely slow",
            )
    return []


def check_commits(job: Job, ages: dict[str, float], now: float, patience: float) -> list[ControlEffect]:
    """End the job if what is ready here was not committed for as long as the deadline."""
    for key, domain in job.domains.items():
        if domain.ready <= domain.settled:
            domain.held = None
        elif domain.held is None or domain.held[0] != domain.settled + 1:
            domain.held = domain.settled + 1, now
        elif not job.frozen and now - domain.held[1] > job.record.deadline:
            step = domain.settled + 1
            what = f"step {step} of {domain.config.label}"
            missing = tuple(node for node in domain.others if domain.heard.get(node, 0) < step) or (job.node,)
            if out := _silent(job, domain, what, missing, ages, patience):
                return out
            return job.fault(
                "StepTimeout",
                f"{what} was ready here and not on {', '.join(missing)} within the "
                f"deadline of {job.record.deadline:g} s",
                domain=key,
                step=step,
                phase="commit",
                missing=missing,
                elapsed=now - domain.held[1],
                advice="look at the named peers; raise job.deadline if they are merely slow",
            )
    return []


def tick(
    job: Job, heard: Callable[[str], float | None], now: float, lease: float, patience: float
) -> list[ControlEffect]:
    """All that may have become due in a job; parameters are those of the checks below."""
    out: list[ControlEffect] = []
    ages = {name: now - last for name in job.others if (last := heard(name)) is not None}
    if job.ended is None:
        out += check_leases(job, ages, lease)
    if job.ended is None and not job.frozen:
        out += check_order(job) or check_deadline(job, ages, now, patience)
    if job.ended is None and job.commits:
        out += check_commits(job, ages, now, patience) or epochs.tick(job, now)
    return out + check_workers(job, now, lease)


def check_leases(job: Job, ages: dict[str, float], lease: float) -> list[ControlEffect]:
    """A member whose daemon was not heard of for a lease, seconds, is lost; ``ages``: how long since each was heard."""
    out: list[ControlEffect] = []
    for name in job.others:
        if (age := ages.get(name, 0.0)) > lease:
            why = f"nothing heard from {name} for {lease:g} s: its lease expired"
            out += epochs.lose(job, name, why, age, f"look at the daemon on {name}; {AGAIN}")
    return out


def expel(job: Job, name: str) -> list[ControlEffect]:
    """A member that may not be talked to any more is lost at once: nothing it says would be believed."""
    if job.ended is not None or name not in job.others or name in job.lost:
        return []
    why = f"the key of {name} is no longer in security.peers of {job.node}"
    advice = f"start the job again without {name}, or put its key back first"
    return [Count("nodes_expelled", wire.node_id(name)), *epochs.lose(job, name, why, advice=advice)]


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
