"""A domain on a lane comes and goes: sections laid out, with what shared memory remembers of them; the end.

What may live here: what a restart takes up again and what a close gives back. What may not: reading shared memory
(`gcserver.runtime`), what a push does (`pushes.py`).
"""

from __future__ import annotations

from gcproto.manifest import ADDRESS_ALIGN, Block, Section
from gcserver.core import completion, pushes
from gcserver.core.domain import Domain
from gcserver.core.effects import LaneEffect, ReportStep
from gcserver.core.events import BlockMemory, StepRecord
from gcserver.core.rounds import Partition


def resume(d: Domain, finished: tuple[StepRecord, ...]) -> None:
    """Tell the control machine again of finished steps it may not have heard of."""
    d.finished = {r.step: r for r in finished}
    for record in sorted(finished, key=lambda r: r.step):
        if record.step > d.steps.settled:
            d.out.append(ReportStep(d.config.id, record.step, record.nonfinite, record.proposal, record.digest))


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
            _restore(d, p, known, now)


def _restore(d: Domain, p: Partition, known: BlockMemory, now: float) -> None:
    for versions, owner in ((p.residual, False), (p.owner_residual, True)):
        if versions.settled < versions.written <= p.out_step:
            if versions.written > d.steps.settled:
                p.unsettled = max(p.unsettled, versions.written)
            else:
                completion.flip(d, p, versions.written, owner)
    for rank, step in enumerate(known.pushed):
        if step > p.out_step:
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
