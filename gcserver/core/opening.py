"""A domain on a lane comes and goes: sections laid out, with what shared memory remembers of them; the end.

What may live here: what a restart takes up again and what a close gives back. What may not: reading shared memory
(`gcserver.runtime`), what a push does (`pushes.py`).
"""

from __future__ import annotations

from gcproto.manifest import ADDRESS_ALIGN, Block, Section
from gcserver.core import completion, pushes
from gcserver.core.domain import Domain, Outward
from gcserver.core.effects import EnterEpoch, LaneEffect
from gcserver.core.events import BlockMemory, DomainOpened, StepRecord
from gcserver.core.rounds import Partition
from gcserver.core.steps import StepBook


def open_domain(e: DomainOpened, outward: Outward, lane: int, incarnation: int) -> Domain:
    """A domain of this lane, yet without sections."""
    c = e.config
    book = StepBook(c.local_ranks, c.lag, e.settled, set(e.voids), list(e.switches), e.proposal)
    d = Domain(c, outward, lane, incarnation, book, {p.version: p for p in e.plans})
    _resume(d, e.finished)
    return d


def _resume(d: Domain, finished: tuple[StepRecord, ...]) -> None:
    """Tell the control machine again of finished steps it may not have heard of.

    What was finished in an earlier epoch is settled or will be finished again.
    """
    here = (r for r in finished if r.epoch == d.config.epoch and r.step > d.steps.settled)
    d.finished = {r.step: r for r in sorted(here, key=lambda r: r.step)}
    d.out.extend(completion.report_of(d, record) for record in d.finished.values())


def carry_over(d: Domain, before: Domain, now: float) -> None:
    """A new epoch of a domain that was open: what workers said of steps that are not settled, they do not say again.

    Of a skipped step they are told that it is.
    """
    d.tuned = before.tuned
    for number, old in sorted(before.steps.open.items()):
        if d.config.skips(number):
            for rank, keys in enumerate(old.keys):
                for key in sorted(keys):
                    d.notify(number, False, key, rank, skipped=True)
        elif number > d.steps.settled:
            step = d.steps.get(number, now)
            step.keys, step.closed, step.digest = old.keys, old.closed, old.digest
            completion.try_finish(d, step)


def open_section(
    d: Domain, section: Section, blocks: tuple[Block, ...], memory: dict[int, BlockMemory], now: float
) -> None:
    """Take up a section's blocks of this lane, with whatever shared memory remembers of them."""
    d.sections.append(section)
    # As AddressSpace counts.
    d.end = -(-(d.end + max(section.nbytes, 1)) // ADDRESS_ALIGN) * ADDRESS_ALIGN
    for block in blocks:
        if block.lane != d.lane:
            continue
        known = memory.get(block.key)
        p = d.partitions[block.key] = Partition.restored(block, section, known)
        if known is not None:
            if max(known.epoch, 1) < d.config.epoch:
                _enter_epoch(d, p)
            _restore(d, p, known, now)


def _enter_epoch(d: Domain, p: Partition) -> None:
    """What an earlier epoch left of steps that do not count must not be taken for this one's, also after a restart.

    Nobody asks for what is retained: all members held every aggregate of the steps that count.
    """
    p.out_step = min(p.out_step, d.config.begins)
    d.forget(p, lambda kept: False)
    d.out.append(EnterEpoch(d.id, p.block.key, d.config.epoch, p.out_step))


def _restore(d: Domain, p: Partition, known: BlockMemory, now: float) -> None:
    for versions, owner in ((p.residual, False), (p.owner_residual, True)):
        if versions.settled < versions.written <= p.out_step:
            if versions.written > d.steps.settled:
                p.unsettled = max(p.unsettled, versions.written)
            else:
                completion.flip(d, p, versions.written, owner)
    if p.out_step > d.steps.settled and p.out_step not in d.finished:
        # That this step was void, or what it proposed, is known by its output alone, which the next step would take the
        # place of: the block waits for its workers, who ring for this one first.
        return
    for rank, step in enumerate(known.pushed):
        if step > max(p.out_step, d.steps.settled):
            pushes.join(d, p, rank, step, known.push_flags, now)


def close(d: Domain) -> list[LaneEffect]:
    """Forget everything: payloads still held are released, credit of parked ones goes back."""
    # Nothing sent earlier is sent again: its payload is gone.
    d.faulted = True
    for p in d.partitions.values():
        for r in p.rounds.values():
            for x in r.exchanges:
                completion.unpark(d, x, x.own)
            if r.now.own is not None and not r.everyone:
                d.release(r.now.own.handle)
        for kept in p.retained:
            d.release(kept.handle)
    d.partitions.clear()
    d.notices.clear()
    out, d.out = d.out, []
    return out
