"""What outlives a process in the simulation: slots, residuals, retained payloads, ledgers, job files.

What may live here: the data a node keeps across a crash, and the integer arithmetic of the simulated
codecs on it. What may not: time, chance, protocol decisions, checks.

A gradient is a short tuple of integers however large its block claims to be, so that every sum is exact.
A payload is ``(values, divisor)``: the divisor is not divided by but remembered, so that a test can see
that it was applied once and with the right number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcproto.manifest import Block, Section
from gcproto.messages import PlanText
from gcproto.wire import Flag
from gcserver.core.control_events import DomainLedger, JobMemory, LogSettled, TakeUp
from gcserver.core.effects import Encode, Finalise
from gcserver.core.events import BlockMemory, CodecChoice, Decision, DomainKey, Retained, StepRecord, Versions
from gcserver.core.job import Job

#: elements of every simulated gradient
WIDTH = 2
Vector = tuple[int, ...]
Payload = tuple[Vector, int]
ZERO: Vector = (0,) * WIDTH
#: what a torn write leaves behind; adding it to anything shows
TORN: Vector = (10**9,) * WIDTH
#: the output of a round with a non-finite contribution
NAN: Payload = ((), 0)
RING = 1024

#: of the simulated codecs: multiples of a level are sent
LEVELS = (1, 64)


def _feedback(spec: str, level: int) -> CodecChoice:
    return CodecChoice(spec, 2, level, True, True, levels=LEVELS, own=level, exact=1, tunable=True)


CODECS = {
    "none": CodecChoice("none", 1, 0, False, False, drains=True),
    "feedback": _feedback("feedback", 4),
    "coarse": _feedback("coarse", 16),
    "twice": CodecChoice("twice", 3, 8, True, True, rounds=2, levels=LEVELS, own=8, exact=1),
    "all-none": CodecChoice("all-none", 1, 0, False, False, drains=True),
    "all-feedback": _feedback("all-feedback", 4),
    "votes": CodecChoice("votes", 4, 0, False, True, votes=True),
    "matrix": CodecChoice("matrix", 5, 4, True, True, whole=True, own=4),
}
#: the id of a codec that no node here knows: a faulty member says that it uses it
FOREIGN = 77
#: rules for such tensors need memory that no node has
ROOMY = "roomy"


def resolve(spec: str) -> CodecChoice:
    """The codec of a spec; ValueError for an unknown one, as the real registry does."""
    if spec not in CODECS:
        raise ValueError(f"unknown codec {spec!r}; one of {sorted(CODECS)}")
    return CODECS[spec]


def no_controller(text: str) -> str:
    """Why a controller cannot run: there is none here."""
    return "" if text in ("", "none") else f"unknown controller {text!r}"


def no_room(job: Job, text: PlanText) -> str:
    """Why there is no memory for a plan: there is, but for rules that say so."""
    return next((f"no memory for {r.pattern}" for r in text.rules if r.pattern.startswith(ROOMY)), "")


def scheme(spec: str) -> str:
    """The scheme that a codec's name asks for."""
    return "all" if spec.startswith("all-") else "owner"


def add(a: Vector, b: Vector) -> Vector:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def coarsen(x: Vector, codec: CodecChoice, levels: tuple[int, ...]) -> tuple[Vector, Vector]:
    """(what is sent, what stays behind) of the feedback codec: multiples of a level and their remainders.

    ``levels``: of the block's segments, among which the elements are shared out; empty: the codec's own.
    """
    steps = levels or (codec.own,)
    sent = tuple(v - v % steps[i * len(steps) // WIDTH] for i, v in enumerate(x))
    return sent, tuple(a - b for a, b in zip(x, sent, strict=True))


@dataclass(slots=True)
class Kept:
    """One retained memory of a block: the record, and the payload (None when non-finite)."""

    record: Retained
    payload: Payload | None


@dataclass(slots=True)
class BlockStore:
    """Everything shared memory holds of one block on one node."""

    block: Block
    section: Section
    pushed: list[int]
    flags: list[int]
    inputs: list[Vector | None]
    out_step: int = 0
    out_flags: int = 0
    out_proposal: int = 0
    output: Payload = NAN
    decision: Decision | None = None
    residuals: list[Vector] = field(default_factory=lambda: [ZERO, ZERO])
    residual: Versions = Versions()
    owner_residuals: list[Vector] = field(default_factory=lambda: [ZERO, ZERO])
    owner_residual: Versions = Versions()
    kept: list[Kept | None] = field(default_factory=lambda: [None, None, None])
    epoch: int = 1

    @classmethod
    def fresh(cls, block: Block, section: Section, local_ranks: int, epoch: int) -> BlockStore:
        return cls(block, section, [0] * local_ranks, [0] * local_ranks, [None] * local_ranks, epoch=epoch)

    def remembered(self, retained: tuple[Retained, ...]) -> BlockMemory:
        """What a restarted lane is told; ``retained`` with this life's handles, newest first."""
        newest = max(range(len(self.pushed)), key=self.pushed.__getitem__)
        return BlockMemory(
            tuple(self.pushed),
            self.flags[newest],
            self.out_step,
            self.out_flags,
            self.out_proposal,
            self.decision,
            self.residual,
            self.owner_residual,
            retained,
            self.epoch,
        )

    def payload_bytes(self, codec: CodecChoice) -> int:
        return self.block.nbytes // (2 if codec.feedback else 1)

    def middle(self, e: Encode, sent: Vector, aggregate: Vector) -> Payload:
        """The second payload of "twice": what was sent, plus the first sum."""
        self.residuals[e.write] = add(self.residuals[e.write], sent)
        return add(sent, aggregate), 1

    def finish(self, total: Vector, members: int, sent: Vector, aggregate: Vector, write: int, divisor: int) -> None:
        """Output and next residual of "twice": without the very first sum and own payload they come out wrong."""
        self.output = tuple(t - members * a for t, a in zip(total, aggregate, strict=True)), divisor
        self.residuals[write] = tuple(v - 2 * s for v, s in zip(self.residuals[write], sent, strict=True))

    def encode(self, e: Encode) -> Payload | None:
        """Sum the inputs in rank order and encode; None when one is not finite. Commits residual and payload."""
        finite = [x for x in self.inputs if x is not None]
        payload: Payload | None = None
        if len(finite) == len(self.inputs):
            total = ZERO
            for x in finite:
                total = add(total, x)
            if e.codec.feedback:
                whole = add(total, self.residuals[e.read])
                total, rest = coarsen(whole, e.codec, e.levels)
                # Between two exchanges the state is where a codec keeps what it works on.
                self.residuals[e.write] = rest if e.codec.rounds == 1 else whole
            if e.flush & 1:
                total = add(total, self.residuals[e.read])
            if e.flush & 2:
                total = add(total, self.owner_residuals[e.owner_read])
            payload = (total, 1)
        elif e.codec.feedback:
            self.residuals[e.write] = TORN
        if e.codec.feedback:
            self.residual = self.residual.writing(e.step)
        if e.flush & 1:
            self.residuals[e.write] = ZERO
            self.residual = self.residual.writing(e.step, zeros=True)
        if e.flush & 2:
            self.owner_residuals[1 - e.owner_read] = ZERO
            self.owner_residual = self.owner_residual.writing(e.step, zeros=True)
        if e.retain is not None:
            flags = int(e.flags | Flag.ALL | (Flag.NONFINITE if payload is None else 0))
            self._keep(e.retain, e.step, e.codec, flags, e.proposal, payload)
        return payload

    def finalise(self, e: Finalise, total: Vector | None) -> Payload | None:
        """The aggregate as a payload (owner scheme), its value in the output slot. ``total`` None: non-finite."""
        if e.codec is None:
            self.output = NAN if total is None else (total, e.divisor)
            return None
        payload: Payload | None = None
        if e.codec.rounds > 1:
            payload = None if total is None else (total, 1)
            if total is None:
                self.output = NAN
        elif total is None:
            self.output = NAN
            if e.codec.feedback:
                self.owner_residuals[e.write] = TORN
        elif e.codec.feedback:
            sent, rest = coarsen(add(total, self.owner_residuals[e.read]), e.codec, e.levels)
            self.owner_residuals[e.write] = rest
            payload = (sent, 1)
            self.output = (sent, e.divisor)
        elif e.codec.sum_units:
            payload, self.output = (total, 1), (total, e.divisor)
        else:
            payload = self.output = (total, e.divisor)
        if e.codec.feedback and e.codec.rounds == 1:
            self.owner_residual = self.owner_residual.writing(e.step)
        flags = e.flags | (Flag.NONFINITE if payload is None else 0) | (Flag.SUM_UNITS if e.codec.sum_units else 0)
        self._keep(e.retain, e.step, e.codec, int(flags), e.proposal, payload)
        return payload

    def _keep(
        self, slot: int, step: int, codec: CodecChoice, flags: int, proposal: int, payload: Payload | None
    ) -> None:
        nbytes = 0 if payload is None else self.payload_bytes(codec)
        record = Retained(step, slot, None, nbytes, digest(payload), codec.id, codec.level, flags, proposal)
        self.kept[slot] = Kept(record, payload)

    def tear(self, e: Encode | Finalise) -> None:
        """The process died in the middle of ``e``: whatever it was writing is garbage, nothing is committed."""
        if isinstance(e, Encode):
            if e.codec.feedback or e.flush & 1:
                self.residuals[e.write] = TORN
            if e.flush & 2:
                self.owner_residuals[1 - e.owner_read] = TORN
            if e.retain is not None:
                self.kept[e.retain] = None
            return
        double = e.codec is not None and e.codec.rounds > 1
        if not double or e.stage or e.nonfinite:
            self.output = (TORN, -1)
        if e.codec is not None:
            self.kept[e.retain] = None
            if double and e.stage:
                self.residuals[e.write] = TORN
            elif e.codec.feedback and not double:
                self.owner_residuals[e.write] = TORN


def digest(payload: Payload | None) -> int:
    """Stands for the digest of a payload's bytes."""
    return 0 if payload is None else hash(payload) & (2**64 - 1)


@dataclass(slots=True)
class Ledger:
    """A domain's step ledger, and each lane's ring of finished steps."""

    settled: int = 0
    voids: list[int] = field(default_factory=list)
    switches: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    rings: dict[int, list[StepRecord]] = field(default_factory=dict)
    ready: int = 0

    def log(self, e: LogSettled) -> None:
        self.settled = e.step
        if e.void:
            self.voids.append(e.step)
        if self.switches[-1][1] != e.plan:
            self.switches.append((e.step + e.lag, e.plan))

    def found(self) -> DomainLedger:
        switches = self.switches
        # As the file is read: whose place another had taken by the last settled step is not told.
        while len(switches) > 1 and switches[1][0] <= self.settled:
            switches = switches[1:]
        return DomainLedger(self.settled, tuple(self.voids), tuple(switches), self.ready)

    def finished(self, lane: int, record: StepRecord) -> None:
        ring = self.rings.setdefault(lane, [])
        ring.append(record)
        del ring[:-RING]


@dataclass(slots=True)
class NodeMemory:
    """All files of one node. ``generation`` changes when they are lost."""

    generation: int
    jobs: dict[bytes, JobMemory] = field(default_factory=dict)
    blocks: dict[tuple[DomainKey, int], BlockStore] = field(default_factory=dict)
    ledgers: dict[DomainKey, Ledger] = field(default_factory=dict)

    def ledger(self, domain: DomainKey) -> Ledger:
        found = self.ledgers.get(domain)
        if found is None:
            found = self.ledgers[domain] = Ledger()
        return found

    def take_up(self, e: TakeUp) -> None:
        """A domain that the node comes into, with nothing of an earlier time."""
        self.blocks = {k: v for k, v in self.blocks.items() if k[0] != e.domain}
        self.ledgers[e.domain] = Ledger(e.settled, [], list(e.switches), {}, e.settled)

    def forget_blocks(self, job: bytes, lane: int) -> None:
        self.blocks = {k: v for k, v in self.blocks.items() if k[0][0] != job or v.block.lane != lane}

    def forget(self, job: bytes) -> None:
        self.jobs.pop(job, None)
        self.blocks = {k: v for k, v in self.blocks.items() if k[0][0] != job}
        self.ledgers = {k: v for k, v in self.ledgers.items() if k[0] != job}
