"""How a node that was lost comes back into a running job: who waits, what it is told, how it takes the job up.

What may live here: applicants, the state that is handed over, a job made of it. What may not: how the epoch that it
comes in with is decided (`epochs.py`), what happens on its lanes (`opening.py`).

    JobJoin of a lost node -> NodesWait to the workers of every member, which meet at their next admission point
    Admit of all workers here -> freeze; Frozen of all members -> the next epoch, with those who wait (`epochs.py`)
    it begins -> JobState and the record to who comes in: it forms the job of both, its workers take up the domains

At an admission point no rank of a member has a step open, and what it has had of results was committed: all steps
there count, and the first step that is run in the new epoch is run by its members. Who comes in begins with no
residuals; those it had were counted as lost with it. It owns no block until another owner is lost: nobody who is there
loses a block, so nobody has an owner's residual to hand over.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gcproto.epoch_messages import Applicant, DomainFacts, JobState, NodesWait
from gcproto.messages import EpochDecided, JobJoin, JobLeft, MemberInfo
from gcserver.core.control_events import ControlEffect, KnowPeer, Log, OpenSection, RenewLanes, TakeUp, ToLane
from gcserver.core.effects import Count
from gcserver.core.job import Job


# ---------------------------------------------------------------------------------------------- who waits
def on_join(jobs: Iterable[Job], node: str, join: JobJoin) -> list[ControlEffect]:
    """All workers of a node want to be in a job of this name. If one runs here, a lost member may be back."""
    out: list[ControlEffect] = []
    for job in jobs:
        if job.commits and job.ended is None and job.record.label == join.label and join.member.node == node:
            out.extend(_apply(job, join))
    return out


def _apply(job: Job, join: JobJoin) -> list[ControlEffect]:
    member = join.member
    known = next((m for m in job.record.origin if m.node == member.node), None)
    if known is None or join.world_size != job.record.world_size:
        return []
    if known.ranks != member.ranks or join.token != job.token:
        what = "has another token" if join.token != job.token else f"brings ranks {member.ranks}, had {known.ranks}"
        return [Log("warning", f"{member.node} is not let into job {job.record.label}: it {what}")]
    before = job.applicants.get(member.node)
    if before is not None and before.nonce >= join.nonce:
        return []
    job.applicants[member.node] = Applicant(member, join.nonce)
    return announce(job)


def withdrawn(jobs: Iterable[Job], node: str, m: JobLeft) -> None:
    """Workers that waited on a node have gone."""
    for job in jobs:
        known = job.applicants.get(node) if job.record.label == m.label else None
        if known is not None and known.nonce <= m.nonce:
            del job.applicants[node]


def announce(job: Job) -> list[ControlEffect]:
    """Tell this node's workers who waits, if anybody does: a node that counts as a member still does not."""
    inside = {m.node for m in job.record.members}
    waiting = tuple(sorted(set(job.applicants) - inside))
    return job.tell_workers(NodesWait(waiting)) if waiting else []


def arrivals(job: Job) -> list[Applicant]:
    """Who can come in with the next epoch: all that any member knows of."""
    inside = {m.node for m in job.record.members}
    origin = {m.node: m.ranks for m in job.record.origin}
    newest: dict[str, Applicant] = {}
    for said in job.change.states.values():
        for a in said.applicants:
            node = a.member.node
            if node not in inside and origin.get(node) == a.member.ranks:
                newest[node] = max(a, newest.get(node, a), key=lambda x: x.nonce)
    since = job.record.epoch + 1
    return [Applicant(msgspec.structs.replace(a.member, since=since), a.nonce) for _, a in sorted(newest.items())]


# --------------------------------------------------------------------------------------- what they are told
def state_for(job: Job, member: MemberInfo) -> JobState:
    """What a member must know that came in with the epoch in force."""
    domains = tuple(
        DomainFacts(d.declared_as, tuple(d.sections), d.settled, tuple(d.switches))
        for d in job.domains.values()
        if set(member.ranks) & set(d.declared_as.ranks)
    )
    plans = tuple(job.plans.values())
    return JobState(job.id, job.record.epoch, tuple(job.domains), domains, plans, job.proposal, job.numbered, job.said)


def welcome(job: Job, before: EpochDecided) -> list[ControlEffect]:
    """An epoch begins: whoever came in with it hears so, from every member."""
    out: list[ControlEffect] = []
    for member in job.record.arrivals:
        out.append(Count("nodes_admitted"))
        out.append(KnowPeer(member.node, member.address))
        out.append(Log("info", f"job {job.record.label}: {member.node} is back"))
        job.applicants.pop(member.node, None)
        introduce(job, member.node)
    if job.record.arrivals:
        # Before anything else that is said in this epoch, so that plans wait for those who came in.
        job.tell_members(job.record, *(m.node for m in before.members if m.node in job.others))
    return out


def introduce(job: Job, node: str) -> None:
    """Tell a node that came in what it must know, and then that it did; again when there is a link to it at last."""
    member = next(m for m in job.record.members if m.node == node)
    if member.since == job.record.epoch > 1:
        job.tell_members(state_for(job, member), node)
        job.tell_members(job.record, node)


# ------------------------------------------------------------------------------------- at who comes in
def fill(job: Job, state: JobState) -> None:
    """A job that ran without this node, as members describe it: its plans, its domains, and where they stand."""
    job.plans = {text.version: text for text in state.plans}
    job.proposal, job.numbered, job.said = state.proposal, state.numbered, state.said
    for facts in state.domains:
        domain = job.add_domain(facts.declared)
        domain.sections = list(facts.sections)
        domain.offered = set(range(len(facts.sections)))
        domain.settled = domain.ready = facts.settled
        domain.switches = list(facts.switches)


def take_up(job: Job, state: JobState, again: bool) -> list[ControlEffect]:
    """Begin with it: memory, ledgers, lanes. ``again``: these have been in the job before, and what they sent and spent
    then would be mixed up with what they do now; as new processes they hear of the job as they start."""
    fill(job, state)
    # Lanes first: they may not have forgotten yet what they had of the job.
    out: list[ControlEffect] = [RenewLanes()] if again else []
    out.append(job.save())
    out += [TakeUp(d.config.id, d.settled, tuple(d.switches)) for d in job.domains.values()]
    if again:
        return out
    for domain in job.domains.values():
        out += job.open_domain(domain, None)
        out += (ToLane(OpenSection(domain.config.id, s)) for s in domain.sections)
    return out
