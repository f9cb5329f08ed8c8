"""What the output of every round must be, computed from the program alone.

What may live here: the sums, codecs and residuals of a run without faults. What may not: anything taken from
the machines, except which codec, scheme and levels a round was decided to use (`checks.py` sees that what all nodes
must decide alike they did).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcserver.core.events import CodecChoice
from tests.simulation.memory import NAN, ZERO, Payload, Vector, add, coarsen
from tests.simulation.program import DomainSpec

#: in place of a member's index: its owner, which encodes the sum
OWNER = -1
#: levels of a block's segments by member, and those of its owner
Levels = dict[int, tuple[int, ...]]


@dataclass(slots=True)
class BlockOracle:
    """One block over the steps: residuals of each member and of the owner, and the totals for G4."""

    residuals: list[Vector]
    owner: Vector = ZERO
    given: Vector = ZERO
    delivered: Vector = ZERO
    outputs: dict[int, Payload] = field(default_factory=dict)


@dataclass(slots=True)
class DomainOracle:
    """A domain's expected outputs. ``members[i]`` are the ranks of member i."""

    spec: DomainSpec
    members: tuple[tuple[int, ...], ...]
    blocks: dict[int, BlockOracle] = field(default_factory=dict)

    def void(self, step: int) -> bool:
        return step in self.spec.nan

    def block(self, key: int) -> BlockOracle:
        found = self.blocks.get(key)
        if found is None:
            found = self.blocks[key] = BlockOracle([ZERO] * len(self.members))
        return found

    def output(self, key: int, step: int, codec: CodecChoice, scheme: str, levels: Levels, first: bool) -> Payload:
        """The output of ``key`` in ``step``; asked for in step order. ``first``: the block that carries a NaN."""
        b = self.block(key)
        found = b.outputs.get(step)
        if found is None:
            found = b.outputs[step] = self._round(b, key, step, codec, scheme, levels, first)
        return found

    def _round(
        self, b: BlockOracle, key: int, step: int, codec: CodecChoice, scheme: str, levels: Levels, first: bool
    ) -> Payload:
        divisor = len(self.spec.ranks) if self.spec.flags(key) else 1
        if self.void(step) and first:
            return NAN
        total, given, residuals = ZERO, ZERO, []
        for i, ranks in enumerate(self.members):
            x = ZERO
            for rank in ranks:
                x = add(x, self.spec.value(step, key, rank))
            given = add(given, x)
            rest = b.residuals[i]
            if codec.feedback:
                x, rest = coarsen(add(x, rest), codec, levels[i])
            elif codec.drains:
                # Nothing stays behind where everything is sent.
                x, rest = add(x, rest), ZERO
            residuals.append(rest)
            total = add(total, x)
        owner = b.owner
        if codec.feedback and scheme == "owner" and codec.rounds == 1:
            total, owner = coarsen(add(total, owner), codec, levels[OWNER])
        elif codec.drains:
            total, owner = add(total, owner), ZERO
        if not self.void(step):
            b.residuals, b.owner = residuals, owner
            b.given, b.delivered = add(b.given, given), add(b.delivered, total)
            self._conserved(b)
        return total, divisor

    def _conserved(self, b: BlockOracle) -> None:
        """G4: over committed steps, inputs = delivered + residuals."""
        held = b.owner
        for r in b.residuals:
            held = add(held, r)
        if b.given != add(b.delivered, held):
            raise AssertionError("the oracle itself loses something")
