"""How a job goes on without a node it has lost: members freeze, the arbiter decides, the next epoch begins.

What may live here: from a loss to the next epoch. What may not: how a loss is found (`waiting.py`), when a step commits
(`commits.py`), who wins an epoch (`arbiter.py`), what lanes do with a new one (`opening.py`).

    a member is lost -> freeze: logged, then Frozen with how far this node is, to all members; each freezes with that
    Frozen of all that are left -> Arbitrate: the next epoch, with where every domain stands as it begins
    EpochWon, or the record from whoever heard -> enter: settle what is committed, open the domains on the lanes anew

Who is frozen becomes ready for nothing more in this epoch. So a step up to which all that are left are ready may have
been committed by anybody, and counts; a step for which one of them is not ready was committed by nobody and never will
be, not even by a lost node that is alive behind a broken link. It is run again by those that are left (`shrink`) or
skipped (`skip`). The record says which: whoever learns of an epoch learns with it where everything stands, and whoever
does not learn of it, or is not in it, ends with StepIndeterminate.
"""

from __future__ import annotations

import msgspec

from gcproto.epoch_messages import Admit, DomainState, EpochStart, Frozen, StepReady
from gcproto.messages import EpochChanged, EpochDecided, OfPlans
from gcserver.core import admission, commits, declarations, job_plans, settling
from gcserver.core.change import Change
from gcserver.core.control_domain import ControlDomain
from gcserver.core.control_events import Arbitrate, ControlEffect, Log, LogReady, OpenSection, Tell, ToLane
from gcserver.core.effects import Count, ReportStep
from gcserver.core.job import Job
from gcserver.core.job_faults import AGAIN

SKIP = "skip"
#: Who has lost most of the members may be the one that is cut off: it lets the others ask first, seconds.
MINORITY_WAITS = 10.0
#: So many numbers of plans are left out with every epoch that begins: a first member that was lost may have given some
#: that no other has heard of. Of the 2**32 that there are, `job_records.MAX_EPOCH` epochs leave out half.
NUMBERS = 1 << 12


def on_step(job: Job, lane: int, report: ReportStep) -> list[ControlEffect]:
    """A lane has finished a step, in this epoch or in one that is over."""
    if report.epoch != job.record.epoch:
        return []
    out = settling.on_step(job, lane, report)
    domain = job.domains.get(report.domain[1])
    if not job.commits or domain is None:
        return out
    return out + commits.on_report(job, domain) + _enter(job)


# ---------------------------------------------------------------------------------------------- a loss
def lose(job: Job, name: str, why: str, elapsed: float = 0.0, advice: str = AGAIN) -> list[ControlEffect]:
    """A member is lost: the end of a job that cannot do without, a new epoch for any other."""
    if not job.commits:
        return job.fault("PeerLost", why, missing=(name,), elapsed=elapsed, advice=advice)
    if job.ended is not None or name in job.lost or name not in job.others:
        return []
    job.lost[name] = why
    # Saved before anybody is asked: all that know of the loss may be started again before they learn what was decided.
    saved = _freeze(job) or [job.save()]
    return [Log("warning", f"job {job.record.label} goes on without {name}: {why}"), *saved, *_propose(job)]


def _freeze(job: Job) -> list[ControlEffect]:
    """This node becomes ready for nothing more in this epoch; members hear of it once that is saved."""
    change = job.change
    if job.node in change.states:
        return []
    change.frozen = True
    states = tuple(
        DomainState(key, d.ready, d.begun, tuple(m.name for m in d.config.members)) for key, d in job.domains.items()
    )
    change.states[job.node] = Frozen(job.id, job.record.epoch, states, tuple(job.lost), tuple(job.applicants.values()))
    job.tell_members(change.states[job.node])
    return [job.save()]


def on_frozen(job: Job, node: str, m: Frozen) -> list[ControlEffect]:
    """A member waits for the next epoch: so does this node."""
    job.change.states[node] = m
    return [*_freeze(job), *_propose(job)]


def _propose(job: Job, waited: float = 0.0) -> list[ControlEffect]:
    """Ask for the next epoch once all that are left have said how far they are, ``waited`` seconds after this froze."""
    change, record = job.change, job.record
    if not change.frozen or change.asked or change.pending is not None or not (job.lost or job.pauses):
        return []
    if 2 * len(job.lost) > len(record.members) and waited < MINORITY_WAITS:
        return []
    kept = [(m, n) for m, n in zip(record.members, record.nonces, strict=True) if m.node not in job.lost]
    if any(m.node not in change.states for m, _ in kept):
        return []
    change.asked = True
    # A loss comes first: who waits is let in by an epoch of its own.
    came = [] if job.lost else [(a.member, a.nonce) for a in admission.arrivals(job)]
    members, nonces = zip(*sorted([*kept, *came], key=lambda pair: pair[0].ranks[0]), strict=True)
    following = msgspec.structs.replace(
        record,
        epoch=record.epoch + 1,
        members=members,
        nonces=nonces,
        lost=(*record.lost, tuple(m for m in record.members if m.node in job.lost)),
        starts=(*record.starts, *_starts(job, {m.node for m, _ in kept})),
        admissions=record.admissions + (not job.lost),
    )
    return [Arbitrate(record.epoch, following)]


def _starts(job: Job, left: set[str]) -> list[EpochStart]:
    """Where each domain stands as the next epoch begins."""
    said = {node: {s.domain: s for s in m.domains} for node, m in job.change.states.items() if node in left}
    begun_at = {s.domain: s.settled for s in job.record.starts}
    domains = {key: s.nodes for states in said.values() for key, s in states.items()}
    out = []
    for key, nodes in sorted(domains.items()):
        # Who has not declared it yet is ready for nothing in it but what was over when this epoch began.
        states = [said[node].get(key) for node in nodes if node in left]
        committed = min(s.ready if s is not None else begun_at.get(key, 0) for s in states)
        begun = max(s.begun for s in states if s is not None)
        skips = job.record.on_loss == SKIP and not left.issuperset(nodes)
        out.append(EpochStart(job.record.epoch + 1, key, committed, max(begun, committed) if skips else committed))
    return out


def on_admit(job: Job, rank: int, m: Admit) -> list[ControlEffect]:
    """A local rank stands at an admission point. With the last one this node freezes; the epoch that follows, whoever
    it lets in, sends all of them on."""
    if m.number <= job.record.admissions:
        worker = job.workers.get(rank)
        return [] if worker is None else [Tell(worker, _changed(job))]
    job.pausing.add(rank)
    return [*_freeze(job), *_propose(job)] if job.pauses else []


def _changed(job: Job) -> EpochChanged:
    return EpochChanged(job.record.epoch, job.record.members, job.record.admissions)


def on_silent(job: Job, reason: str) -> list[ControlEffect]:
    """The arbiter did not answer: it is asked again with the next tick, and given up with the deadline."""
    job.change.asked = False
    job.change.silent = reason
    return []


def tick(job: Job, now: float) -> list[ControlEffect]:
    """Ask again; give up once the next epoch is not known for as long as the deadline."""
    change = job.change
    if not change.frozen:
        return []
    if change.since is None:
        change.since = now
    if now - change.since <= job.record.deadline:
        # In a restarted process nobody has heard this life's yet.
        return [*_freeze(job), *_propose(job, now - change.since)]
    absent = tuple(n for n in job.others if n not in job.lost and n not in change.states)
    why = f"; the arbiter: {change.silent}" if change.silent else ""
    return job.fault(
        "StepIndeterminate",
        f"{job.node} did not learn within the deadline of {job.record.deadline:g} s how the job goes on after epoch "
        f"{job.record.epoch}: {question(job)} is not decided{why}",
        missing=absent or tuple(job.lost) or tuple(job.others),
        elapsed=now - change.since,
        advice=f"look at etcd and at the network of this node; {AGAIN}, or let it join one that goes on",
    )


def question(job: Job) -> str:
    """What the next epoch is to decide."""
    if (missed := job.change.missed) or not job.pausing:
        return f"without {', '.join(missed) or 'whom'}"
    return f"with {', '.join(sorted(job.applicants)) or 'whoever waits'}"


# ------------------------------------------------------------------------------------- the next epoch
def on_record(job: Job, node: str, record: EpochDecided) -> list[ControlEffect]:
    """An epoch was decided; ``node`` said so, or the arbiter (empty)."""
    change = job.change
    if not node:
        change.asked = False
    newest = change.pending or job.record
    if record.epoch < job.record.epoch and node:
        job.tell_members(job.record, node)
    if record.epoch <= newest.epoch or job.ended is not None:
        return []
    if not job.commits or (node and node not in job.others):
        text = f"{node} sent epoch {record.epoch} of job {job.record.label}, which is not its business"
        return [Log("error", text)]
    if not node:
        # Those who are left out too: they are not to wait for the deadline.
        job.tell_members(record)
    if all(m.node != job.node for m in record.members):
        return job.fault(
            "StepIndeterminate",
            f"epoch {record.epoch} of job {record.label!r} was decided without {job.node}: the others take it for "
            "lost, and whether a step that is not settled here counts only they know",
            missing=(job.node,),
            advice="look at the network and the load of this node; " + AGAIN,
        )
    change.pending = record
    return _enter(job)


def _enter(job: Job) -> list[ControlEffect]:
    """The decided epoch comes into force, once lanes have reported again what is committed with it."""
    record = job.change.pending
    if record is None:
        return []
    starts = {s.domain: s for s in record.starts if s.epoch == record.epoch}
    for key, domain in job.domains.items():
        steps = range(domain.settled + 1, starts[key].committed + 1) if key in starts else ()
        if not all(settling.finished(job, domain, step) for step in steps):
            return []
    out: list[ControlEffect] = []
    for key, domain in job.domains.items():
        while key in starts and domain.settled < starts[key].committed:
            out.extend(settling.settle(job, domain, domain.settled + 1))
        # What this node was ready for beyond that is not to be found again after a restart.
        out.append(LogReady(domain.config.id, domain.settled))
    gone = [m.node for m in job.record.members if m not in record.members]
    before, job.record = job.record, record
    later = job.change.later.take()
    lost = {n: why for n, why in job.lost.items() if n in job.others}
    job.change = Change(lost)
    for node in (*gone, *(m.node for m in record.arrivals)):
        job.left.pop(node, None)
    if record.admissions > before.admissions:
        job.pausing.clear()
    job.numbered += (record.epoch - before.epoch) * NUMBERS
    out.append(job.save())
    for key, domain in job.domains.items():
        # Once it is saved why: a restart before that would take a skipped step for one that was run.
        while key in starts and domain.settled < starts[key].settled:
            out.extend(settling.skip(job, domain, domain.settled + 1))
        domain.ready = domain.settled
        _renew(job, domain, gone)
        out.extend(job.open_domain(domain, None))
        out.extend(ToLane(OpenSection(domain.config.id, s)) for s in domain.sections)
    out.append(Count("nodes_lost", value=len(gone)))
    out.append(
        Log("warning", f"job {record.label}: epoch {record.epoch} with {', '.join(m.node for m in record.members)}")
    )
    out.extend(admission.welcome(job, before))
    out.extend(job.tell_workers(_changed(job)))
    out.extend(admission.announce(job))
    out.extend(declarations.agree_again(job))
    out.extend(job_plans.without(job, gone, before.eldest.node))
    job_plans.include(job, [m.node for m in record.arrivals])
    if lost or job.pauses:
        out.extend([*_freeze(job), *_propose(job)])
    for node, message in later:
        out.extend(on_message(job, node, message))
    return out


def _renew(job: Job, domain: ControlDomain, gone: list[str]) -> None:
    """A domain in the epoch in force: nothing said of the one before it counts."""
    domain.config = job.configure(domain.declared_as)
    domain.held, domain.behind = None, (0, 0.0)
    for book in (domain.reports, domain.closing, domain.waiting, domain.heard):
        book.clear()
    for offers in (*domain.offers.values(), *domain.offered_for.values()):
        for node in gone:
            offers.pop(node, None)


# ------------------------------------------------------------------------------------------- messages
def on_message(job: Job, node: str, m: StepReady | Frozen | OfPlans) -> list[ControlEffect]:
    """What a member says in an epoch: in a later one it waits, in one that is over the member hears what came of it."""
    if not isinstance(m, StepReady | Frozen):
        return job_plans.on_message(job, node, m)
    if m.epoch > job.record.epoch:
        job.change.later.keep(node, m)
        return []
    if m.epoch < job.record.epoch:
        job.tell_members(job.record, node)
        return []
    return on_frozen(job, node, m) if isinstance(m, Frozen) else commits.on_ready(job, node, m)


def stale(job: Job, node: str, epoch: int) -> bool:
    """Whether what a member said in ``epoch`` (0: it did not say) is of an earlier time that it was in the job."""
    return any(m.node == node and 0 < epoch < m.since for m in job.record.members)


def departed(job: Job, node: str) -> bool:
    """Whether a node was a member in an earlier epoch and is none any more."""
    return any(m.node == node for gone in job.record.lost for m in gone)


def resend(job: Job, node: str) -> None:
    """A member is a new process: say again how far this node is."""
    if (mine := job.change.states.get(job.node)) is not None:
        job.tell_members(mine, node)
    if job.commits:
        commits.resend(job, node)
