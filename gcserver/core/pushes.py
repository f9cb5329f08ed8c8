"""Workers' pushes: which step they belong to, and when a round has all local inputs.

What may live here: what a doorbell means for rounds and steps. What may not: what is made of the inputs
(`encoding.py`), steps' bookkeeping (`steps.py`).
"""

from __future__ import annotations

from gcserver.core import completion, encoding
from gcserver.core.domain import Domain
from gcserver.core.effects import Count
from gcserver.core.events import Pushed
from gcserver.core.rounds import Partition
from gcserver.core.steps import Step


def on_push(d: Domain, e: Pushed, now: float) -> None:
    """A local rank has inputs of a step in their slots, and perhaps no more to come."""
    if d.faulted:
        return
    if e.step <= 0 or not 0 <= e.rank < d.config.local_ranks:
        d.out.append(Count("pushes_unusable"))
        return
    # Of a finished step that waits for its commit we must know whom to tell.
    commits = d.config.commits
    over = e.step <= d.steps.settled or (e.step in d.finished and not commits)
    step = None if over else d.steps.get(e.step, now)
    if commits and step is not None and e.step in d.finished:
        step.finished = True
    skipped = commits and d.config.skips(e.step)
    for key in e.keys:
        p = d.partitions.get(key)
        if p is None:
            d.fault("TensorMismatch", f"a worker pushed unknown address {key}", e.step, "push")
            return
        if skipped:
            d.notify(e.step, False, key, e.rank, skipped=True)
            continue
        late = e.step > p.out_step if step is None else e.rank in step.closed and key not in step.keys[e.rank]
        if late:
            d.fault(
                "TensorMismatch",
                f"local rank {e.rank} pushed tensor {p.name!r} in step {e.step} after it had closed that step",
                e.step,
                "push",
            )
            return
        if step is not None:
            step.keys[e.rank].add(key)
        if e.step <= p.out_step:
            # The same push again, after a restart of ours: the result is there.
            if step is not None:
                step.done.add(key)
                if e.step == p.out_step:
                    step.nonfinite |= p.out_nonfinite
                    step.proposal = max(step.proposal, p.out_proposal)
            if over or not commits:
                d.notify(e.step, p.out_nonfinite, key, e.rank)
        else:
            join(d, p, e.rank, e.step, e.flags, now)
    if step is not None and e.close and e.rank not in step.closed:
        _close_step(d, step, e.rank)


def _close_step(d: Domain, step: Step, rank: int) -> None:
    step.closed.add(rank)
    if not step.is_closed:
        return
    odd = step.close()
    if odd is None:
        odd = min(d.remote.pop(step.number, set()) - step.expected, default=None)
    if odd is not None:
        d.mismatch(step.number, d.partitions[odd].name)
        return
    completion.try_finish(d, step)


def join(d: Domain, p: Partition, rank: int, step: int, flags: int, now: float) -> None:
    """Local rank ``rank`` has its input of ``step`` in the slot."""
    r = p.round(step)
    if r.local >> rank & 1:
        return
    d.steps.get(step, now).keys[rank].add(p.block.key)
    if not d.same_operation(p, r, flags, f"local rank {rank}"):
        return
    r.local |= 1 << rank
    if r.local.bit_count() == d.config.local_ranks:
        encoding.ready(d, p, r, now)
