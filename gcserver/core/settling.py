"""Steps of a job: settled in order once all lanes have finished them, and compared between members when closed.

What may live here: which step settles, void or not, and which plan that fixes. What may not: rounds and residuals
(`completion.py`), who waits for whom (`waiting.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import count

from gcproto import wire
from gcproto.messages import Beat
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import ControlEffect, Log, LogSettled, ToLane
from gcserver.core.effects import ReportStep
from gcserver.core.events import PlanKnown, Settled
from gcserver.core.job import Job

#: How many closed steps a node can compare with what its peers say they closed.
RECENT = 256


def on_step(job: Job, lane: int, report: ReportStep) -> list[ControlEffect]:
    """A lane has finished a step; steps that all lanes have finished settle, in order, unless members have to commit
    them together (`commits.py`)."""
    domain = job.domains.get(report.domain[1])
    if domain is None or report.step <= domain.settled:
        return []
    domain.reports.setdefault(report.step, {})[lane] = report
    on_closed(job, lane, report.domain[1], report.step, report.digest)
    out: list[ControlEffect] = []
    while not job.commits and finished(job, domain, domain.settled + 1):
        out.extend(settle(job, domain, domain.settled + 1))
    return out


def finished(job: Job, domain: ControlDomain, step: int) -> bool:
    """Whether all lanes here have finished ``step``."""
    return len(domain.reports.get(step, ())) == job.lanes


def settle(job: Job, domain: ControlDomain, step: int) -> list[ControlEffect]:
    """All lanes have finished ``step``: whether it is void, and the plan of the step a lag later."""
    reports = domain.reports.pop(step).values()
    void = any(r.nonfinite for r in reports)
    lag = domain.config.lag
    before = domain.switches[-1][1]
    plan = max(before, *(r.proposal for r in reports))
    domain.settled = step
    for lane in [n for n, r in domain.waiting.items() if r.step <= step]:
        del domain.waiting[lane]
    if job.node in job.left:
        job.tell_members(job.leaving())
    if void:
        domain.voids = [*domain.voids[-1023:], step]
    if plan != before:
        domain.switches.append((step + lag, plan))
        while len(domain.switches) > 1 and domain.switches[1][0] <= step:
            domain.switches.pop(0)
    key = domain.config.id
    out: list[ControlEffect] = [LogSettled(key, step, void, plan, lag)]
    if plan != before and domain.lossless:
        # A lane that restarted meanwhile was not told of a plan whose text is forgotten.
        out.append(ToLane(PlanKnown(key, job.plan(domain, plan))))
    out.append(ToLane(Settled(key, step, void, plan)))
    if plan != before:
        out.append(Log("info", f"job {job.record.label}, {domain.config.label}: plan {plan} from step {step + lag}"))
        # The steps of other process groups are not those that whoever asks counts.
        if any(d is domain for d in job.training):
            out.extend(job.requests.in_force(plan, step + lag))
    return out


def skip(job: Job, domain: ControlDomain, step: int) -> list[ControlEffect]:
    """``step`` is given up with a lost node: void, whatever lanes have of it."""
    domain.reports.pop(step, None)
    domain.settled = step
    domain.voids = [*domain.voids[-1023:], step]
    return [LogSettled(domain.config.id, step, True, domain.switches[-1][1], domain.config.lag)]


def catch_up(domain: ControlDomain, logged: int) -> list[ControlEffect]:
    """Log what was skipped after step ``logged``, the last one that is: an epoch that was saved says so, and this node
    was killed before it could, or learns only now that there is such a domain."""
    last = next(s for s in count(logged + 1) if s > domain.settled or not domain.config.skips(s))
    config, plan = domain.config, domain.switches[-1][1]
    return [LogSettled(config.id, step, True, plan, config.lag) for step in range(logged + 1, last)]


def on_closed(job: Job, lane: int, key: int, step: int, digest: int) -> None:
    """Remember what was pushed in a step, so that peers' heartbeats can be compared with it."""
    domain = job.domains.get(key)
    if domain is None or step in domain.closed:
        return
    lanes = domain.closing.setdefault(step, {})
    lanes[lane] = digest
    if len(lanes) == job.lanes:
        del domain.closing[step]
        domain.closed[step] = wire.digest(struct.pack(f"<{job.lanes}Q", *(lanes[i] for i in range(job.lanes))))
        domain.closed.pop(step - RECENT, None)


def closed_steps(job: Job) -> list[tuple[bytes, int, int, int]]:
    """(job, domain, step, digest of what was pushed) of the newest closed step of each domain, for heartbeats."""
    out = []
    for key, domain in job.domains.items():
        if domain.closed and job.ended is None:
            step = max(domain.closed)
            out.append((job.id, key, step, domain.closed[step]))
    return out


def compare_beat(jobs: Mapping[bytes, Job], node: str, beat: Beat, now: float) -> list[ControlEffect]:
    """A peer's heartbeat says what was pushed there in the newest steps of all jobs."""
    out: list[ControlEffect] = []
    for number, domain, step, digest in beat.closed:
        if (job := jobs.get(number)) is not None:
            out += compare_closed(job, node, domain, step, digest, now)
    return out


def compare_closed(job: Job, node: str, key: int, step: int, digest: int, now: float) -> list[ControlEffect]:
    """A peer's heartbeat says what was pushed there in a step: other tensors than here end the job."""
    domain = job.domains.get(key)
    if domain is None:
        return []
    if step > max(domain.behind[0], domain.settled) and step not in domain.closed:
        domain.behind = (step, now)
    mine = domain.closed.get(step)
    if mine is None or mine == digest:
        return []
    return job.fault(
        "TensorMismatch",
        f"step {step} of {domain.config.label}: {node} pushed other tensors than {job.node}",
        domain=key,
        step=step,
        phase="push",
        advice="let every rank make the same calls in the same order",
    )
