"""Faults planted in what a job does without the nodes it lost: freezing, committing, epochs.

What may live here: small patches as in `planted.py`, for worlds that lose nodes. What may not: faults that any world
brings out.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from gcproto.epoch_messages import JobState
from gcproto.records import replace
from gcserver.core import admission, commits, completion, epochs, opening, settling
from gcserver.core.control_domain import ControlDomain
from gcserver.core.domain import Domain
from gcserver.core.job import Job
from gcserver.core.rounds import Partition
from tests.simulation.planted import PLANTED, plant

_BEFORE = set(PLANTED)


@plant(commits, "_commit")
def committed_alone(original: Any) -> Any:
    """A step commits as soon as it is ready here."""

    def commit(job: Job, domain: ControlDomain) -> Any:
        domain.heard = dict.fromkeys(domain.others, domain.ready)
        return original(job, domain)

    return commit


@plant(commits, "on_report", "cut_off", "outage")
def ready_while_frozen(original: Any) -> Any:
    """A member goes on becoming ready after it has said how far it is."""

    def on_report(job: Job, domain: ControlDomain) -> Any:
        frozen, job.change.frozen = job.change.frozen, False
        try:
            return original(job, domain)
        finally:
            job.change.frozen = frozen

    return on_report


@plant(epochs, "_starts")
def committed_where_one_is_ready(original: Any) -> Any:
    """An epoch begins after the last step for which anybody was ready."""

    def starts(job: Job, left: set[str]) -> Any:
        out = original(job, left)
        ready = [(s.domain, s.ready) for m in job.change.states.values() for s in m.domains]
        best = [max(r for key, r in ready if key == start.domain) for start in out]
        return [type(s)(s.epoch, s.domain, most, max(most, s.settled)) for s, most in zip(out, best, strict=True)]

    return starts


@plant(Job, "configure")
def divisor_of_the_first_epoch(original: Any) -> Any:
    """Sums of those that are left are divided by the number of all there were."""
    return lambda self, declared: replace(original(self, declared), divisor=len(declared.ranks))


@plant(opening, "_enter_epoch")
def outputs_of_an_earlier_epoch(original: Any) -> Any:
    """What the epoch before left in the slots counts in this one."""
    return lambda d, p: None


@plant(Domain, "early")
def later_epoch_dropped(original: Any) -> Any:
    """Frames of an epoch that is not open here yet are dropped."""
    return lambda self, h: h.epoch <= self.config.epoch and original(self, h)


@plant(settling, "skip")
def skipped_step_counts(original: Any) -> Any:
    """A skipped step is settled like any other."""
    return lambda job, domain, step: [replace_void(e) for e in original(job, domain, step)]


def replace_void(e: Any) -> Any:
    """The same settlement, not void."""
    return type(e)(e.domain, e.step, False, e.plan, e.lag)


@plant(completion, "complete")
def told_before_the_commit(original: Any) -> Any:
    """Workers hear of a result before all members hold it."""

    def complete(d: Domain, p: Partition, r: Any, nonfinite: bool) -> None:
        original(d, p, r, nonfinite)
        if d.config.commits:
            d.notify(r.step, nonfinite, p.block.key, None)

    return complete


@plant(admission, "fill", "crash_worker", "dead_node")
def comes_in_at_the_first_step(original: Any) -> Any:
    """Who comes into a running job begins where that began."""
    return lambda job, state: original(job, replace_settled(state, 0))


def replace_settled(state: JobState, settled: int) -> JobState:
    """The same state, all domains settled up to a step."""
    return structs.replace(state, domains=tuple(structs.replace(d, settled=settled) for d in state.domains))


@plant(admission, "take_up", "crash_worker")
def lanes_of_an_earlier_time(original: Any) -> Any:
    """Lanes that have been in the job before go on as they are."""
    return lambda job, state, again: original(job, state, False)


#: the faults of this file
NAMES = frozenset(PLANTED) - _BEFORE
