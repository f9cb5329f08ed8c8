"""What the outside tells the lane machine.

What may live here: frozen dataclasses, one per thing that can happen to a lane. What may not: behaviour,
I/O, numpy, time. The control machine's events are in `control_events.py`.

A payload is an opaque integer *handle* here; the runtime (or the simulation) knows the bytes behind it.
Whoever passes a handle in a :class:`FrameReceived`, :class:`Encoded` or :class:`Finalised` keeps its
memory unchanged until the machine answers with :class:`~gcserver.core.effects.Release`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gcproto.manifest import Block, Section
from gcproto.wire import Header

Handle = int
#: (job number, domain id)
DomainKey = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """A codec as the core sees it. ``feedback``: keeps residuals; ``sum_units``: payload decodes to a sum."""

    spec: str
    id: int
    level: int
    feedback: bool
    sum_units: bool


@dataclass(frozen=True, slots=True)
class PlanRule:
    """Tensors matching ``pattern`` use ``codec`` over ``scheme`` ("owner" or "all")."""

    pattern: str
    codec: CodecChoice
    scheme: str = "owner"


@dataclass(frozen=True, slots=True)
class Plan:
    """A numbered plan; the last matching rule wins. ``dense`` serves what is too small or not fp32-like."""

    version: int
    rules: tuple[PlanRule, ...]
    dense: CodecChoice


@dataclass(frozen=True, slots=True)
class Member:
    """One node of an epoch, in member order: its id (`wire.node_id`), name and number of ranks."""

    node: int
    name: str
    ranks: int


@dataclass(frozen=True, slots=True)
class DomainConfig:
    """What is fixed for one epoch of a domain. ``me`` is this node's member index; ``divisor`` the rank count.

    ``lag``: settling step t fixes the plan of step t + lag (2 for scoped domains such as a DDP model,
    more where every blocking call is a step of its own and many are in flight).
    """

    job: bytes
    domain: int
    label: str
    epoch: int
    members: tuple[Member, ...]
    me: int
    local_ranks: int
    divisor: int
    lag: int
    min_compress_bytes: int
    #: global ranks of the local workers, ascending; a rank's place here is its local index
    ranks: tuple[int, ...] = ()
    partition_bytes: int = 4 << 20

    @property
    def id(self) -> DomainKey:
        return (self.job, self.domain)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the ledger says about one contribution: taken once, logged before use, reused on retry."""

    step: int
    plan: int
    proposal: int
    spec: str
    seed: int


@dataclass(frozen=True, slots=True)
class Versions:
    """A two-version state: ``current`` (0 or 1) was settled at ``settled``; the other was written at ``written``."""

    current: int = 0
    settled: int = 0
    written: int = 0


@dataclass(frozen=True, slots=True)
class Retained:
    """A payload kept until everyone provably has it: an owner's aggregate, or an all-scheme contribution.

    ``slot`` is which of the block's two retained memories holds it.
    """

    step: int
    slot: int
    handle: Handle | None
    nbytes: int
    digest: int
    codec: int
    level: int
    flags: int
    proposal: int


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """What shared memory remembers of one block after a restart (steps start at 1; 0 means never)."""

    pushed: tuple[int, ...]
    push_flags: int = 0
    grad_scale: float = 1.0
    out_step: int = 0
    out_flags: int = 0
    out_proposal: int = 0
    decision: Decision | None = None
    residual: Versions = Versions()
    owner_residual: Versions = Versions()
    retained: tuple[Retained, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step of a lane, as its ring in shared memory keeps it."""

    step: int
    nonfinite: bool
    proposal: int
    digest: int


# ------------------------------------------------------------------------------------------- events
@dataclass(frozen=True, slots=True)
class PeerAdded:
    """A peer's address is known; ``node`` is its id."""

    node: int
    name: str


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A frame whose digests hold. ``handle`` is its payload (DATA) and ``body`` its bytes (all other types)."""

    header: Header
    handle: Handle | None = None
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class FrameDamaged:
    """A frame that failed. ``header`` is there when only the payload is bad; ``peer`` when the link is known."""

    header: Header | None
    peer: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class PeerReset:
    """The transport lost its connection to ``peer`` (and perhaps frames); restarting, not dead."""

    peer: int


@dataclass(frozen=True, slots=True)
class DomainOpened:
    """A domain's epoch begins here (or is taken up again after a restart)."""

    config: DomainConfig
    plans: tuple[Plan, ...]
    #: settled watermark, voided steps and (first step, plan version) switches, from the step ledger
    settled: int = 0
    voids: tuple[int, ...] = ()
    switches: tuple[tuple[int, int], ...] = ((0, 0),)
    #: finished steps this lane still remembers
    finished: tuple[StepRecord, ...] = ()
    proposal: int = 0


@dataclass(frozen=True, slots=True)
class SectionOpened:
    """All members agreed on a section; ``blocks`` are all of its blocks, ``memory`` what is remembered of ours."""

    domain: DomainKey
    section: Section
    blocks: tuple[Block, ...]
    memory: Mapping[int, BlockMemory]


@dataclass(frozen=True, slots=True)
class DomainClosed:
    """The job ended; forget the domain."""

    domain: DomainKey


@dataclass(frozen=True, slots=True)
class PlanKnown:
    """A plan's text arrived and its codecs are compiled."""

    domain: DomainKey
    plan: Plan


@dataclass(frozen=True, slots=True)
class ProposalKnown:
    """Every member can run plan ``version``: propose it from the next step opened here."""

    domain: DomainKey
    version: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """A worker's doorbell. ``rank`` is its local index; ``close``: no more blocks come in this step."""

    domain: DomainKey
    rank: int
    step: int
    keys: tuple[int, ...]
    close: bool
    flags: int = 0
    grad_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Encoded:
    """Answer to :class:`~gcserver.core.effects.Encode`: the contribution's payload (None when non-finite)."""

    domain: DomainKey
    key: int
    step: int
    handle: Handle | None
    nbytes: int
    digest: int
    nonfinite: bool


@dataclass(frozen=True, slots=True)
class Finalised:
    """Answer to :class:`~gcserver.core.effects.Finalise`: the aggregate's payload (none in the all scheme)."""

    domain: DomainKey
    key: int
    step: int
    handle: Handle | None
    nbytes: int
    digest: int
    nonfinite: bool


@dataclass(frozen=True, slots=True)
class Unusable:
    """A frame whose digests hold and whose payload does not decode: the sender is faulty. Payload dropped."""

    header: Header
    reason: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The control machine settled ``step``: ``void`` keeps old versions; ``plan`` is that of step + lag."""

    domain: DomainKey
    step: int
    void: bool
    plan: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


LaneEvent = (
    PeerAdded
    | FrameReceived
    | FrameDamaged
    | PeerReset
    | DomainOpened
    | SectionOpened
    | DomainClosed
    | PlanKnown
    | ProposalKnown
    | Pushed
    | Encoded
    | Finalised
    | Unusable
    | Settled
    | Tick
)
