"""What a lane remembers of each block: the rounds under way, residual versions, the retained payload.

What may live here: the data of rounds and small questions about it. What may not: decisions that send or
deliver (`domain.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcproto.manifest import Block, Section
from gcproto.wire import Flag
from gcserver.core.events import BlockMemory, CodecChoice, Decision, Handle, Retained, Versions

#: flag bits on which all contributions of a round must agree
OPERATION = int(Flag.AVERAGE)


@dataclass(slots=True)
class Parked:
    """A contribution that waits for its turn in member order. ``life``: the sender's, which gets the credit back."""

    handle: Handle | None
    nbytes: int
    codec: int
    level: int
    nonfinite: bool
    life: int = 0


@dataclass(slots=True)
class Round:
    """One block in one step, on this node."""

    step: int
    flags: int | None = None
    grad_scale: float = 1.0
    local: set[int] = field(default_factory=set)
    decision: Decision | None = None
    codec: CodecChoice | None = None
    #: (codec id, level, who said it first): a round has one codec
    coding: tuple[int, int, str] | None = None
    everyone: bool = False
    encoding: bool = False
    own: Parked | None = None
    own_digest: int = 0
    have: set[int] = field(default_factory=set)
    parked: dict[int, Parked] = field(default_factory=dict)
    next_member: int = 0
    nonfinite: bool = False
    proposal: int = 0
    finalising: bool = False
    complete: bool = False


@dataclass(slots=True)
class Partition:
    """One block of this lane."""

    block: Block
    section: Section
    rounds: dict[int, Round] = field(default_factory=dict)
    out_step: int = 0
    out_nonfinite: bool = False
    out_proposal: int = 0
    residual: Versions = Versions()
    owner_residual: Versions = Versions()
    #: newest completed step whose residual versions wait for settling
    unsettled: int = 0
    #: newest first, at most two: in the all scheme a peer may still need the one before
    retained: tuple[Retained, ...] = ()
    next_slot: int = 0
    #: (plan version, codec, scheme) decided last; the rules need not be read for every step
    choice: tuple[int, CodecChoice, str] | None = None
    #: what the ledger says about the newest contribution
    logged: Decision | None = None

    @property
    def name(self) -> str:
        return self.section.tensors[self.block.tensor].name

    def round(self, step: int) -> Round:
        r = self.rounds.get(step)
        if r is None:
            r = self.rounds[step] = Round(step)
        return r

    def kept(self, step: int) -> Retained | None:
        """The retained payload of ``step``, if it is still there."""
        return next((r for r in self.retained if r.step == step), None)

    @classmethod
    def restored(cls, block: Block, section: Section, memory: BlockMemory | None) -> Partition:
        """As shared memory remembers it."""
        if memory is None:
            return cls(block, section)
        return cls(
            block,
            section,
            out_step=memory.out_step,
            out_nonfinite=bool(memory.out_flags & Flag.NONFINITE),
            out_proposal=memory.out_proposal,
            residual=memory.residual,
            owner_residual=memory.owner_residual,
            retained=memory.retained,
            next_slot=1 - memory.retained[0].slot if memory.retained else 0,
            logged=memory.decision,
        )
