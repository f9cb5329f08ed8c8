"""What the output of every round must be, computed from the program alone.

What may live here: the sums, codecs and residuals of a run in which nothing fails but what its jobs need not survive.
What may not: anything taken from the machines, except which codec, scheme and levels a round was decided to use, who
was left in an epoch and which steps were committed in it (`checks.py` sees that what all nodes must decide alike they
did).

A step that is not committed when a node is lost is *attempted* again by the rest, from the state before it: each
attempt has an output of its own, and only what the committed one left behind counts afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcserver.core.events import CodecChoice
from tests.simulation.memory import NAN, ZERO, Payload, Vector, add, coarsen
from tests.simulation.program import DomainSpec

#: in place of a member's index: its owner, which encodes the sum
OWNER = -1
#: levels of a block's segments by member (its index in the first epoch), and those of its owner
Levels = dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One epoch's way through a step of a block: its output, and what it would leave behind. ``gone``: the residual
    of an owner that was lost, and those of members that are back."""

    output: Payload
    residuals: tuple[Vector, ...]
    owner: Vector
    owned_by: int
    given: Vector
    delivered: Vector
    gone: Vector
    void: bool


@dataclass(slots=True)
class BlockOracle:
    """One block over the committed steps: residuals of each member and of the owner, and the totals for G4."""

    residuals: tuple[Vector, ...]
    owner: Vector = ZERO
    owned_by: int = -1
    given: Vector = ZERO
    delivered: Vector = ZERO
    #: residuals of owners that were lost
    lost: Vector = ZERO
    #: steps up to here are in the totals, the last that counts as of this epoch
    folded: int = 0
    epoch: int = 1
    #: by step and epoch
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)


@dataclass(slots=True)
class DomainOracle:
    """A domain's expected outputs. ``members[i]`` are the ranks of member i of the first epoch."""

    spec: DomainSpec
    members: tuple[tuple[int, ...], ...]
    blocks: dict[int, BlockOracle] = field(default_factory=dict)
    #: who is left in an epoch, by index in the first
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: step -> the epoch whose attempt counts, and whether it was skipped instead
    committed: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def inside(self, epoch: int) -> tuple[int, ...]:
        """The members of an epoch."""
        return self.left.get(epoch) or tuple(range(len(self.members)))

    def left_between(self, i: int, first: int, last: int) -> bool:
        """Whether a member was out of the job in some of these epochs."""
        return any(i not in self.inside(x) for x in range(first, last + 1))

    def divisor(self, key: int, epoch: int) -> int:
        """What the sum of a block is divided by."""
        return sum(len(self.members[i]) for i in self.inside(epoch)) if self.spec.flags(key) else 1

    def void(self, step: int, epoch: int = 1) -> bool:
        """Whether a rank that takes part in an epoch's attempt has a gradient that is not finite."""
        rank = self.spec.nan.get(step)
        return rank is not None and any(rank in self.members[i] for i in self.inside(epoch))

    def voided(self, step: int) -> bool:
        """Whether a step that is committed counts for nothing."""
        epoch, skipped = self.committed.get(step, (1, False))
        return skipped or self.void(step, epoch)

    def block(self, key: int, before: int = 1 << 62) -> BlockOracle:
        """A block with all committed steps ``before`` a step in its totals."""
        b = self.blocks.get(key)
        if b is None:
            b = self.blocks[key] = BlockOracle((ZERO,) * len(self.members))
        for step in sorted({s for s, _ in b.attempts if b.folded < s < before}):
            self._fold(b, step)
        return b

    def _fold(self, b: BlockOracle, step: int) -> None:
        epoch, skipped = self.committed.get(step, (1, False))
        a = b.attempts.get((step, epoch))
        b.folded = step
        if a is None or skipped or a.void:
            return
        b.residuals, b.owner, b.owned_by, b.epoch = a.residuals, a.owner, a.owned_by, epoch
        b.given, b.delivered, b.lost = add(b.given, a.given), add(b.delivered, a.delivered), add(b.lost, a.gone)
        self._conserved(b)

    def output(
        self, key: int, step: int, epoch: int, codec: CodecChoice, scheme: str, levels: Levels, owner: int, first: bool
    ) -> Payload | None:
        """The output of ``key`` in an epoch's attempt at ``step``; asked for in step order. ``owner``: the index of the
        block's owner in the first epoch. ``first``: the block that carries a NaN. None for an attempt by who was left
        out, after another one has been committed."""
        b = self.block(key, step)
        found = b.attempts.get((step, epoch))
        if found is None:
            if step <= b.folded and self.committed.get(step, (epoch, False))[0] != epoch:
                return None
            found = b.attempts[step, epoch] = self._attempt(b, key, step, epoch, codec, scheme, levels, owner, first)
        return found.output

    def _attempt(
        self,
        b: BlockOracle,
        key: int,
        step: int,
        epoch: int,
        codec: CodecChoice,
        scheme: str,
        levels: Levels,
        owned_by: int,
        first: bool,
    ) -> Attempt:
        total, given, residuals = ZERO, ZERO, list(b.residuals)
        moved = b.owned_by not in (-1, owned_by) or self.left_between(owned_by, b.epoch, epoch)
        owner, gone = (ZERO, b.owner) if moved else (b.owner, ZERO)
        if self.void(step, epoch) and first:
            return Attempt(NAN, b.residuals, owner, owned_by, ZERO, ZERO, gone, True)
        for i in self.inside(epoch):
            if self.left_between(i, b.epoch, epoch):
                # Who comes back has nothing of what it held.
                gone, residuals[i] = add(gone, residuals[i]), ZERO
            x = ZERO
            for rank in self.members[i]:
                x = add(x, self.spec.value(step, key, rank))
            given = add(given, x)
            rest = residuals[i]
            if codec.feedback:
                x, rest = coarsen(add(x, rest), codec, levels[i])
            elif codec.drains:
                # Nothing stays behind where everything is sent.
                x, rest = add(x, rest), ZERO
            residuals[i] = rest
            total = add(total, x)
        if codec.feedback and scheme == "owner" and codec.rounds == 1:
            total, owner = coarsen(add(total, owner), codec, levels[OWNER])
        elif codec.drains:
            total, owner = add(total, owner), ZERO
        output = total, self.divisor(key, epoch)
        return Attempt(output, tuple(residuals), owner, owned_by, given, total, gone, self.void(step, epoch))

    def _conserved(self, b: BlockOracle) -> None:
        """G4: over committed steps, inputs = delivered + residuals, those of lost nodes counted."""
        held = add(b.owner, b.lost)
        for r in b.residuals:
            held = add(held, r)
        if b.given != add(b.delivered, held):
            raise AssertionError("the oracle itself loses something")
