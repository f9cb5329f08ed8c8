"""Who decides a job's membership, epoch by epoch.

What may live here: the interface of an arbiter and the one that needs no service. What may not: calls to a
real store (`gcserver.runtime`), what a membership is for (`job.py`).

An epoch is decided by one compare-and-swap on the job's epoch number: whoever swaps expected -> expected+1
first wins, everyone else reads the winner's record. With ``on_loss = fail`` a job has one epoch, proposed by
the node of rank 0 alone, so a register in that node's memory is enough. The policies that change membership
put the same records into a store that survives any single node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from gcproto.messages import EpochDecided


class Arbiter(Protocol):
    """Compare-and-swap over epoch records. May block or be remote: called by the runtime, never by the core."""

    def compare_and_swap(self, expected: int, record: EpochDecided) -> EpochDecided:
        """If the job's newest epoch is ``expected``, make ``record`` the next. Returns the newest record."""
        ...


@dataclass(slots=True)
class MemoryArbiter:
    """Records in this process's memory: right where only one node ever proposes."""

    records: dict[bytes, EpochDecided] = field(default_factory=dict)

    def compare_and_swap(self, expected: int, record: EpochDecided) -> EpochDecided:
        newest = self.records.get(record.job)
        if (newest.epoch if newest is not None else 0) == expected:
            newest = self.records[record.job] = record
        assert newest is not None  # a job without a record has epoch 0, and nobody expects less
        return newest
