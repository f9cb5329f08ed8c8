"""What a node does that comes into a running job: it waits for the record and for what members say of the job.

What may live here: that wait, whether the node can do its part, its part of an earlier time. What may not: who lets it
in (`admission.py`, `epochs.py`), how the job is made of what it was told (`control.py`, `admission.take_up`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gcproto.epoch_messages import JobState
from gcproto.messages import EpochDecided, Fault, MemberInfo, Register
from gcserver.core import admission, job_plans, plan_modes
from gcserver.core.control_events import ControlEffect
from gcserver.core.gathering import Formation
from gcserver.core.job import Job
from gcserver.core.job_faults import AGAIN
from gcserver.core.job_records import unknown_job
from gcserver.core.peers import Peers

#: so many jobs can be told of before their records come
MAX_STATES = 8


def started_again(jobs: Iterable[Job], m: Register) -> list[ControlEffect]:
    """A rank that a restarted daemon waits for registers as a new process: the old one will not come back."""
    out: list[ControlEffect] = []
    for job in jobs:
        if job.commits and job.record.label == m.label and job.token == m.token and m.rank in job.away_since:
            why = f"rank {m.rank} on {job.node} was started again"
            out.extend(job.fault("WorkerLost", why, missing=(f"rank {m.rank}",)))
            out.extend(job.worker_left(m.rank))
    return out


def is_over(job: Job, node: str, mine: MemberInfo | None) -> bool:
    """Whether what is here of a job is of an earlier time: ``node``, which was in it too, says that this one came in
    again since, as ``mine``."""
    return mine is not None and mine.since > job.record.epoch and any(m.node == node for m in job.record.origin)


def outlived(job: Job) -> list[ControlEffect]:
    """What is here of a job is of an earlier time: whoever still works in it is told. Members are not; they know."""
    if job.ended is not None:
        return []
    why = f"job {job.record.label!r} went on without {job.node}, and lets it in again"
    out = job.fault("StepIndeterminate", why, missing=(job.node,), advice=AGAIN)
    job.outgoing.clear()
    return out


@dataclass(slots=True)
class Held:
    """A record that lets this node in, who said so, and since when it waits for what members say of the job."""

    node: str
    record: EpochDecided
    since: float | None = None


@dataclass(slots=True)
class Entrance:
    """``states``: by job and node what members said of jobs that this node comes into; ``held``: records that wait
    for more of that. No member need know all of a job's process groups."""

    formation: Formation
    peers: Peers
    states: dict[bytes, dict[str, JobState]] = field(default_factory=dict)
    held: dict[bytes, Held] = field(default_factory=dict)

    def on_state(self, node: str, m: JobState, known: Job | None) -> Held | None:
        """What a member says of a job, ``known`` if it is here; returns the record that waited for it, if any."""
        if not self.formation.gatherings or (known is not None and known.record.epoch >= m.epoch):
            return None
        self.states.setdefault(m.job, {})[node] = m
        while len(self.states) > MAX_STATES:
            self.held.pop(oldest := next(iter(self.states)), None)
            del self.states[oldest]
        return self.held.pop(m.job, None)

    def state(self, node: str, record: EpochDecided, job: Job) -> JobState | None:
        """What the job is like that ``node`` says this one was let into, if it comes into it now. ``job``: one made of
        the record, to try."""
        if self.formation.gathering_of(record) is None:
            # Of an earlier gathering here: the others have to go on without it.
            self.peers.send(node, unknown_job(record, job.node))
            return None
        said = [m for m in self.states.get(record.job, {}).values() if m.epoch == record.epoch]
        there = {s.domain for s in record.starts if s.epoch == record.epoch}
        if not said or not there <= {key for m in said for key in m.known}:
            if record.job not in self.held or self.held[record.job].record.epoch < record.epoch:
                self.held[record.job] = Held(node, record)
            return None
        del self.states[record.job]
        state = _merged(said)
        if why := _unable(job, state):
            self._decline(record, why)
            self.formation.refuse(record, why)
            return None
        return state

    def _decline(self, record: EpochDecided, why: str) -> None:
        """The others have to go on without this node."""
        me = self.peers.config.hello.node
        fault = Fault(record.job, "PeerLost", why, epoch=record.epoch, missing=(me,))
        for member in record.members:
            self.peers.send(member.node, fault)

    def tick(self, now: float, lease: float) -> None:
        """Members who do not say what they know of a job are not waited for: the next point may do better."""
        for number, held in list(self.held.items()):
            if held.since is None:
                held.since = now
            elif now - held.since > lease:
                del self.held[number]
                self._decline(held.record, f"nobody has said within {lease:g} s what the job is like")
                self.formation.join_again(held.record)


def _merged(said: list[JobState]) -> JobState:
    """What members know together. Plans of the newest proposal are all that steps can be run under."""
    newest = max(said, key=lambda m: (m.proposal, m.numbered))
    domains = {facts.declared.domain: facts for m in said for facts in m.domains}
    plans = {text.version: text for m in said for text in m.plans}
    of_mode = [m.said for m in said if m.said is not None]
    return JobState(
        newest.job, newest.epoch, tuple(domains), tuple(domains.values()), tuple(plans.values()), newest.proposal,
        max(m.numbered for m in said), max(of_mode, key=lambda mode: mode.age, default=None),
    )  # fmt: skip


def _unable(job: Job, state: JobState) -> str:
    """Why this node cannot do its part in a job; empty if it can."""
    admission.fill(job, state)
    spaces = ((domain, section) for domain in job.domains.values() for section in domain.sections)
    bad = plan_modes.no_words(job.said) or job_plans.unresolved(job)
    return bad or next(filter(None, (job.no_space(job, d, s) for d, s in spaces)), "")
