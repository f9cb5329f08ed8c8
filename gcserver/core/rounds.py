"""What a lane remembers of each block: the rounds under way, residual versions, the retained payload.

What may live here: the data of rounds and small questions about it. What may not: decisions that send or
deliver (`exchange.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcproto.manifest import Block, Section
from gcproto.records import Record
from gcproto.wire import Flag
from gcserver.core.events import BlockMemory, CodecChoice, Decision, Handle, Retained, Versions
from gcserver.core.plan import Choice

#: flag bits on which all contributions of a round must agree
OPERATION = int(Flag.AVERAGE)


class Parked(Record, frozen=True, gc=False):
    """A contribution that waits for its turn in member order. ``life``: the sender's, which gets the credit back."""

    handle: Handle | None
    nbytes: int
    codec: int
    level: int
    nonfinite: bool
    life: int = 0


@dataclass(slots=True)
class Exchange:
    """One way to the owner and back: what this node sends, and what came of the others. ``over``: its sum is there."""

    own: Parked | None = None
    own_digest: int = 0
    #: bit i: the contribution of member i is there, or was
    have: int = 0
    parked: dict[int, Parked] = field(default_factory=dict)
    next_member: int = 0
    #: the highest grade (`tuning.py`) among the contributions
    grade: int = 0
    nonfinite: bool = False
    finalising: bool = False
    over: bool = False


@dataclass(slots=True)
class Round:
    """One block in one step, on this node. ``stage``: the exchange it is in; most codecs have only the first."""

    step: int
    flags: int | None = None
    #: bit i: local rank i has its input in the slot
    local: int = 0
    decision: Decision | None = None
    #: with the level that our own payload says
    codec: CodecChoice | None = None
    levels: tuple[int, ...] = ()
    #: which residuals our payload takes up: see `effects.Encode`
    flush: int = 0
    #: (codec id, level, who said it first): a round has one codec
    coding: tuple[int, int, str] | None = None
    #: (level, who) that differs from it, come before we knew whether this codec's levels may
    apart: tuple[int, str] | None = None
    #: (whether contributions go to every member, who said it first): a round has one scheme; None: nobody has said yet
    scheme: tuple[bool, str] | None = None
    encoding: bool = False
    stage: int = 0
    #: as far as any is needed; a second one only where somebody speaks of it
    exchanges: list[Exchange] = field(default_factory=lambda: [Exchange()])
    proposal: int = 0
    #: the retained memory that the payload being made goes to
    slot: int = 0
    complete: bool = False

    @property
    def now(self) -> Exchange:
        """The exchange it is in."""
        return self.exchanges[self.stage]

    def exchange(self, stage: int) -> Exchange:
        """The first (0) or the second exchange (1)."""
        if stage == len(self.exchanges):
            self.exchanges.append(Exchange())
        return self.exchanges[stage]

    @property
    def everyone(self) -> bool:
        """Whether contributions go to every member, as far as anybody has said."""
        return self.scheme is not None and self.scheme[0]

    @property
    def double(self) -> bool:
        return self.codec is not None and self.codec.rounds > 1


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
    #: newest first, at most three: both aggregates of a round of two exchanges; in the all scheme a peer may still need
    #: what came before
    retained: tuple[Retained, ...] = ()
    next_slot: int = 0
    #: (plan version, what it gives this block) of the last decision; the rules need not be read for every step
    choice: tuple[tuple[int, bool], Choice] | None = None
    #: what the ledger says about the newest contribution
    logged: Decision | None = None

    @property
    def name(self) -> str:
        return self.section.tensors[self.block.tensor].name

    @property
    def held(self) -> bool:
        """Whether some version of a residual may be something other than zeros."""
        return bool(self.residual.held | self.owner_residual.held)

    @property
    def segments(self) -> int:
        return len(self.block.bounds) - 1

    def round(self, step: int) -> Round:
        r = self.rounds.get(step)
        if r is None:
            r = self.rounds[step] = Round(step)
        return r

    def kept(self, step: int, stage: int = 0) -> Retained | None:
        """The retained payload of an exchange of ``step``, if it is still there."""
        for r in self.retained:
            if r.step == step and r.stage == stage:
                return r
        return None

    def free_slot(self) -> int:
        """A retained memory that nothing needs. Two in turn, and a third where both aggregates of a round are kept."""
        used = {r.slot for r in self.retained}
        return next(s for s in (self.next_slot, 0, 1, 2) if s not in used)

    def retain(self, new: Retained) -> None:
        """Keep a payload that peers may ask for again."""
        self.retained = (new, *self.retained)
        self.next_slot = int(new.slot == 0)

    @classmethod
    def restored(cls, block: Block, section: Section, memory: BlockMemory | None) -> Partition:
        """As shared memory remembers it."""
        if memory is None:
            return cls(block, section)
        retained = tuple(sorted(memory.retained, key=lambda r: (-r.step, -r.stage)))
        return cls(
            block,
            section,
            out_step=memory.out_step,
            out_nonfinite=bool(memory.out_flags & Flag.NONFINITE),
            out_proposal=memory.out_proposal,
            residual=memory.residual,
            owner_residual=memory.owner_residual,
            retained=retained,
            next_slot=int(retained[0].slot == 0) if retained else 0,
            logged=memory.decision,
        )
