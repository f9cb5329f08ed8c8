"""What reaches a simulated daemon late, twice or by a wrong way: reports, frames, messages of an epoch that is over.

What may live here: events that a real daemon can see in an order that no schedule of `faults.py` brings about often,
and registrations that come to nothing. What may not: damage, foreign daemons (`strangers.py`).

Harmless ones must change no output; deadly ones end their job by a fault that says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

import msgspec

from gcproto import messages
from gcproto.epoch_messages import EpochStart, StepReady
from gcproto.messages import EpochDecided, JobJoin, JobLeft, MemberInfo, PlanReady, PlanRequest, Rule
from gcproto.wire import Phase
from gcserver.core import control_events as ce
from gcserver.core import resuming
from gcserver.core.control_domain import ControlDomain
from gcserver.core.effects import ReportStep, ReportWaiting
from gcserver.core.job import Job
from tests.simulation import mistakes
from tests.simulation.operators import ask
from tests.simulation.processes import ControlProcess
from tests.simulation.strangers import frame, pair, say, stray, supervisors

if TYPE_CHECKING:
    from tests.simulation.world import Node, World

#: how often those look that wait for an epoch or a step, seconds, and until when
LOOK, UNTIL = 0.05, 60.0


def _jobs(w: World) -> Iterator[tuple[ControlProcess, Job]]:
    """Supervisors that answer now, and their jobs that go on."""
    for p in supervisors(w):
        for job in p.machine.jobs.values():
            if job.ended is None and job.domains:
                yield p, job


def probes(w: World, r: Random) -> None:
    """Links are measured, also one that another probe is under way on and one to nobody."""
    for p in supervisors(w):
        for name in (*p.peers, "nobody"):
            for at in (0.0, r.uniform(0.0, 0.5)):
                w.at(w.now + at, p.deliver, ce.ProbeLink(name, b"x" * 512))


def _can_be_resumed(job: Job, domain: ControlDomain) -> None:
    """What is said of where a domain stands suffices for a later job: all its steps, a number for each node."""
    found = resuming.standing(job, domain)
    nodes = [m for m in job.record.origin if set(m.ranks) & set(domain.declared_as.ranks)]
    assert found.origin and found.steps == domain.settled + domain.config.ahead and len(found.nodes) == len(nodes)


def told_twice(w: World, r: Random) -> None:
    """A supervisor hears again that a lane is up, and what that lane finished and waited for long ago. A worker asks
    where its domains stand."""
    for p, job in _jobs(w):
        epoch = job.record.epoch
        for lane in list(p.lanes_up):
            p.deliver(ce.LaneUp(lane))
            for domain in job.domains.values():
                _can_be_resumed(job, domain)
                key = domain.config.id
                late: list[ReportStep | ReportWaiting] = [
                    ReportWaiting(key, 1, 0.0, "push", ("local rank 0",), ("push",), 1, epoch - 1)
                ]
                if domain.settled:
                    late.append(ReportStep(key, domain.settled, False, 0, 0, epoch))
                for report in late:
                    p.deliver(ce.LaneSaid(lane, report))


def late_frames(w: World, r: Random) -> None:
    """Contributions to rounds that are over, of which nothing is retained any more."""
    for back in (1, 2, 3):
        frame(w, r, back=back, phase=Phase.CONTRIBUTION)
        frame(w, r, back=back, phase=Phase.AGGREGATE)


def wrong_ways(w: World, r: Random) -> None:
    """Messages of a job that come from whoever has no business to send them, or are of what there is not."""
    one = (MemberInfo("x", "tcp://x:1", (0,)),)
    if (found := pair(w, r)) is not None:
        p, there, job = found
        forged = EpochDecided("forged", b"f" * 16, 1, 1, one, (1,))
        here = (MemberInfo(there.name, there.address, (0,)),)
        odd: list[messages.Control] = [
            JobJoin("forged", 2, one[0], 1),
            msgspec.structs.replace(forged, deadline=-1.0),
            msgspec.structs.replace(forged, starts=(EpochStart(1, 0, 5, 2),)),
            msgspec.structs.replace(forged, members=here, on_loss="pray"),
            StepReady(job.id, job.record.epoch, 99, 1),
        ]
        # For whom it is yet to form it would be the job.
        if not job.commits and job.id in there.memory.jobs:
            odd.append(msgspec.structs.replace(job.record, epoch=job.record.epoch + 1, lost=(*job.record.lost, ())))
        if there.name != job.first:
            odd.append(PlanRequest(job.id, 5, (Rule("*", "none"),)))
        if p.node.name == job.first:
            odd.append(PlanReady(job.id, 0, "too late"))
        for message in odd:
            say(p, there.name, message)
    for p in supervisors(w):
        for at, job in _jobs(w):
            if p.node is not at.node and p.node.name not in job.others:
                say(p, at.node.name, JobLeft(job.record.label, job.id, 0, ((0, 1),)))


def odd_registrations(w: World, r: Random) -> None:
    """Workers without a finite deadline, without the job's token, of ranks that do not make a world, or alone; and one
    of a job for which the arbiter cannot be asked."""
    ps = supervisors(w)
    if not ps:
        return
    a, b = ps[0], ps[-1]
    label = f"odd{w.next_handle()}"
    stray(w, a, 0.5).register(label, 0, 1, deadline=-1.0)
    stray(w, a, 4.0).register(f"{label}-alone", 0, 2)
    stray(w, a, 4.0, False).register(f"{label}-token", 0, 3, 0, 2, token=b"a")
    stray(w, a, 0.5).register(f"{label}-token", 1, 3, 1, 2, token=b"b")
    away = w.register.away.get(a.node.name, 0.0)
    w.register.leave([a.node.name], w.now + 1.0)
    stray(w, a, 4.0, False).register(f"{label}-silent", 0, 1, on_loss="shrink")
    w.register.away[a.node.name] = away
    if a is not b:
        stray(w, a, 4.0, False).register(f"{label}-tokens", 0, 2, token=b"a")
        stray(w, b, 4.0, False).register(f"{label}-tokens", 1, 2, token=b"b")
        stray(w, a, 4.0, False).register(f"{label}-ranks", 0, 3)
        stray(w, b, 4.0, False).register(f"{label}-ranks", 1, 3, 0, 2)
        stray(w, b, 4.0, False).register(f"{label}-ranks", 1, 3, 1, 2)


def odd_rules(w: World, r: Random) -> None:
    """Rules whose plain names come after a glob, and votes that are to go to everyone."""
    tensors = (t for spec in w.shape.jobs for d in spec.domains for s in d.sections for t in s.tensors)
    names = dict.fromkeys(t.name for t in tensors)
    for p, job in list(_jobs(w))[:1]:
        ask(w, p, job.record.label, (Rule("d*", "coarse"), *(Rule(n, "votes", "all") for n in names)), True)


def busy(w: World, r: Random) -> None:
    """Kernels of a node take long: what they answer comes late."""
    n = r.choice(w.nodes)
    n.kernels = r.choice([0.01, 0.05, 0.1])


# ------------------------------------------------------------------------------------- in later epochs
def old_epochs(w: World, r: Random) -> None:
    """Members of a job that goes on without a lost node say what they would have said an epoch ago or ahead."""
    ahead = [(p, n, job) for p, n, job in _members(w) if job.commits and not job.frozen]
    for p, there, job in ahead[:1]:
        say(p, there.name, StepReady(job.id, job.record.epoch + 1, next(iter(job.domains)), 0))
    _old(w)


def _members(w: World) -> Iterator[tuple[ControlProcess, Node, Job]]:
    for p, job in _jobs(w):
        for other in job.others:
            yield p, w.by_name[other], job


def _old(w: World) -> None:
    """As soon as an epoch has come into force, what is of the one before."""
    found = [(p, there, job) for p, there, job in _members(w) if job.record.epoch > 1]
    if not found:
        if w.now < UNTIL and any(spec.on_loss != "fail" for spec in w.shape.jobs) and w.open_workers:
            w.at(w.now + LOOK, _old, w)
        return
    p, there, job = found[0]
    before = job.record.epoch - 1
    stayed = (m for m in job.record.members if m not in job.record.arrivals)
    members = tuple(sorted((*stayed, *job.record.lost[-1]), key=lambda m: m.ranks[0]))
    nonces = tuple(range(len(members)))
    old = msgspec.structs.replace(
        job.record, epoch=before, members=members, nonces=nonces, lost=job.record.lost[:-1],
        starts=tuple(s for s in job.record.starts if s.epoch <= before),
    )  # fmt: skip
    say(p, there.name, old)
    key = next(iter(job.domains))
    say(p, there.name, StepReady(job.id, before, key, 0))
    for lane in list(p.lanes_up):
        p.deliver(ce.LaneSaid(lane, ReportStep((job.id, key), 1 << 20, False, 0, 0, before)))


def first_is_lost(w: World, r: Random) -> None:
    """In a job that goes on without it the first member dies between two members' answers to its plan."""
    for p, job in list(_jobs(w)):
        first, others = w.by_name[job.first], [w.by_name[n] for n in job.others]
        slow = next((n.supervisor for n in others if n is not first and n.supervisor is not None), None)
        if job.commits and p.node is not first and slow is not None and slow is not p and all(x.job for x in w.workers):
            if slow.alive and not slow.paused:
                slow.paused = True
                w.at(w.now + 1.0, slow.resume)
            ask(w, p, job.record.label, (Rule("*", r.choice(["coarse", "none"])),))
            w.at(w.now + 0.1, w.die, first)
            return


# ---------------------------------------------------------------------------------------------- deadly
def no_space(w: World, r: Random) -> None:
    """A node has not the memory for what its ranks declare."""
    n = r.choice([w.nodes[i] for spec in w.shape.jobs for i, _ in spec.layout])
    w.fatal = w.fatal or f"{n.name} has no room for tensors"
    n.full = True


def declares_nothing(w: World, r: Random) -> None:
    """A rank joins and declares no tensors, and does not hear that its job is over."""
    several = [x for x in w.workers if x.spec.world_size > 1]
    if several:
        worker = r.choice(several)
        w.fatal = w.fatal or f"{worker.name} declares nothing"
        said, told = worker.say, worker.told

        def silent(message: messages.WorkerAct) -> None:
            if not isinstance(message, messages.DeclareSection):
                said(message)

        def deaf(message: messages.ToWorker, connection: int) -> None:
            if not isinstance(message, messages.Fault):
                told(message, connection)

        worker.say, worker.told = silent, deaf  # type: ignore[method-assign]
        w.at(w.now + 1.2 * w.shape.deadline, mistakes.give_up, w, worker)


def dies_while_busy(w: World, r: Random) -> None:
    """A worker dies while kernels of all nodes have much to do."""
    alive = [x for x in w.workers if x.job and not x.over and x.threads]
    if alive:
        worker = r.choice(alive)
        w.fatal = w.fatal or f"{worker.name} dies"
        for n in w.nodes:
            n.kernels = 0.05
        w.at(w.now + r.uniform(0.0, 0.1), mistakes.give_up, w, worker)


HARMLESS = (probes, told_twice, late_frames, wrong_ways, odd_registrations, odd_rules, busy)
#: in jobs that go on without lost nodes
LOSSY = (old_epochs, first_is_lost)
AT_START = (no_space, declares_nothing)
DEADLY = (*AT_START, dies_while_busy)
