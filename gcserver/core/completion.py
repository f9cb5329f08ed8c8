"""The end of an exchange, of a round, of a step: output slots, step reports, residual versions.

What may live here: what is committed, given back and told when something is over. What may not: what is sent on
(`exchange.py`), what may begin after it (`encoding.py`).
"""

from __future__ import annotations

from gcproto.records import replace
from gcserver.core.domain import Domain
from gcserver.core.effects import CommitOutput, Flip, LogStep, ReportStep
from gcserver.core.events import Settled, StepRecord
from gcserver.core.rounds import Exchange, Parked, Partition, Round
from gcserver.core.steps import Step


def complete(d: Domain, p: Partition, r: Round, nonfinite: bool) -> None:
    """The result of a round is in the output slot."""
    key = p.block.key
    d.out.append(CommitOutput(d.id, key, r.step, nonfinite, r.proposal))
    r.complete = True
    del p.rounds[r.step]
    p.out_step, p.out_nonfinite, p.out_proposal = r.step, nonfinite, r.proposal
    end_exchange(d, r)
    for x in r.exchanges:
        if x.parked:
            unpark(d, x, None)
    if r.codec is not None and (r.codec.feedback or r.flush):
        p.unsettled = r.step
    if not d.config.commits:
        d.notify(r.step, nonfinite, key, None)
    step = d.steps.open[r.step]
    step.done.add(key)
    step.nonfinite |= nonfinite
    step.proposal = max(step.proposal, r.proposal)
    try_finish(d, step)


def try_finish(d: Domain, step: Step) -> None:
    """Log and report a closed step whose blocks are all out."""
    if step.finished or not step.is_closed or len(step.done) < len(step.expected):
        return
    step.finished = True
    record = StepRecord(step.number, step.nonfinite, step.proposal, step.digest, d.config.epoch)
    d.finished[step.number] = record
    d.out.append(LogStep(d.id, step.number, step.nonfinite, step.proposal, step.digest, d.config.epoch))
    d.out.append(report_of(d, record))


def report_of(d: Domain, r: StepRecord) -> ReportStep:
    """What the control machine is told of a finished step."""
    return ReportStep(d.id, r.step, r.nonfinite, r.proposal, r.digest, r.epoch)


def settle(d: Domain, e: Settled) -> bool:
    """Make the new residuals current, unless the step is void. False if it is an old story."""
    if e.step <= d.steps.settled:
        return False
    step = d.steps.open.get(e.step)
    d.steps.settle(e.step, e.void, e.plan)
    if len(d.plans) > 1:
        oldest = d.steps.switches[0][1]
        d.plans = {version: plan for version, plan in d.plans.items() if version >= oldest}
    d.finished.pop(e.step, None)
    d.remote.pop(e.step, None)
    # After a restart it may settle while local ranks still ring for it again: only once closed is all of it known.
    for key in step.expected if step is not None and step.is_closed else list(d.partitions):
        p = d.partitions[key]
        if p.unsettled == e.step:
            for owner in (False, True):
                flip(d, p, e.step, owner)
    if d.config.commits and step is not None:
        _committed(d, step)
    return True


def _committed(d: Domain, step: Step) -> None:
    """All members hold the step: only now do workers hear of it. After a restart not all may have rung again yet."""
    for rank, keys in enumerate(step.keys[:1] if step.is_closed else step.keys):
        for key in sorted(keys):
            d.notify(step.number, d.partitions[key].out_nonfinite, key, None if step.is_closed else rank)


def flip(d: Domain, p: Partition, step: int, owner: bool) -> None:
    """Make what ``step`` wrote the block's current residual version, or, in a void step, leave the one before it."""
    versions = p.owner_residual if owner else p.residual
    if versions.written != step or versions.settled >= step:
        return
    if step in d.steps.voids:
        new = replace(versions, settled=step)
    else:
        new = replace(versions, current=1 - versions.current, settled=step)
    if owner:
        p.owner_residual = new
    else:
        p.residual = new
    d.out.append(Flip(d.id, p.block.key, step, new.current, owner))


def end_exchange(d: Domain, r: Round) -> None:
    """Nobody needs our payload of it any more, nor what others sent."""
    x = r.now
    x.over = True
    own, x.own = x.own, None
    if own is not None and not r.everyone:
        d.release(own.handle)
    if x.parked:
        unpark(d, x, own)


def unpark(d: Domain, x: Exchange, own: Parked | None) -> None:
    """Whatever is still parked goes back."""
    for member, parked in sorted(x.parked.items()):
        if parked is not own and member != d.config.me:
            d.release(parked.handle)
            d.outward.take(d.config.members[member].node, parked.nbytes, parked.life)
    x.parked.clear()
