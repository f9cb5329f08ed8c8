"""What the outside tells the lane machine.

What may live here: frozen records, one per thing that can happen to a lane. What may not: behaviour,
I/O, numpy, time. The control machine's events are in `control_events.py`.

A payload is an opaque integer *handle* here; the runtime (or the simulation) knows the bytes behind it.
Whoever passes a handle in a :class:`FrameReceived`, :class:`Encoded` or :class:`Finalised` keeps its
memory unchanged until the machine answers with :class:`~gcserver.core.effects.Release`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gcproto.manifest import AddressSpace, Block, Section
from gcproto.records import Record
from gcproto.wire import Flag, Header
from gcserver.core.lives import LAST_LIFE

Handle = int
#: (job number, domain id)
DomainKey = tuple[bytes, int]


class CodecChoice(Record, frozen=True, gc=False):
    """A codec as the core sees it.

    ``feedback``: keeps state (residuals, momentum), so a step waits for the one before to settle; ``sum_units``:
    payload decodes to a sum; ``shared_seed``: all nodes draw alike; ``votes``: an owner must decide by majority;
    ``whole``: takes whole matrices, so its blocks must not cut a tensor; ``owner_feedback``: where it keeps state, the
    owner keeps some as well; ``drains``: dense, so it takes up what an earlier codec held back.

    ``levels``: range of the levels of single segments, (0, 0) if there are none; ``own``: that of segments which are
    given none; ``exact``: the one at which a segment is sent as it is, 0 if none says so; ``tunable``: the members of a
    round may encode at different levels. ``level`` is what frames say.
    """

    spec: str
    id: int
    level: int
    feedback: bool
    sum_units: bool
    shared_seed: bool = False
    votes: bool = False
    rounds: int = 1
    whole: bool = False
    owner_feedback: bool = True
    drains: bool = False
    levels: tuple[int, int] = (0, 0)
    own: int = 0
    exact: int = 0
    tunable: bool = False


class PlanRule(Record, frozen=True, gc=False):
    """Tensors matching ``pattern`` use ``codec`` over ``scheme`` ("owner" or "all").

    ``origin``: whose rule it is: "default" (the daemon's ``codec.default``), "domain" (what the domain was declared
    with) or "plan" (an operator's). ``levels``: of the tensors' segments at each notch of the plan.
    """

    pattern: str
    codec: CodecChoice
    scheme: str = "owner"
    origin: str = "plan"
    levels: tuple[int, ...] = ()


class Plan(Record, frozen=True, gc=False):
    """A numbered plan; the last matching rule wins. ``dense`` serves what is too small or not fp32-like."""

    version: int
    rules: tuple[PlanRule, ...]
    dense: CodecChoice


class Member(Record, frozen=True, gc=False):
    """One node of an epoch, in member order: its id (`wire.node_id`), name and number of ranks."""

    node: int
    name: str
    ranks: int


class DomainConfig(Record, frozen=True, gc=False):
    """What is fixed for one epoch of a domain. ``me`` is this node's member index; ``divisor`` the rank count.

    ``lag``: settling step t fixes the plan of step t + lag (2 for scoped domains such as a DDP model,
    more where every blocking call is a step of its own and many are in flight).
    ``commits``: a step counts, and workers hear of it, only once all members hold it; the domain outlives members.
    ``origin``: how many members it had at first, which is what blocks are cut for; ``remaining``: which of them (by
    their first index) are left in each later epoch. What an earlier epoch left of steps after ``begins`` is void, and
    steps within ``skipped`` (first, last) are not run at all. A resumed domain draws from ``drawn_from``, this node as
    ``drawn_as`` (0: as itself), and has made ``ahead`` steps before.
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
    partition_bytes: int = 8 << 20
    #: blocks are cut between tensors only
    whole: bool = False
    #: what stochastic codecs draw from; None: the job's number
    seed: int | None = None
    commits: bool = False
    origin: int = 0
    remaining: tuple[tuple[int, ...], ...] = ()
    begins: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    #: so many first steps are dense, whatever the plan says
    warmup: int = 0
    drawn_from: bytes = b""
    ahead: int = 0
    drawn_as: int = 0

    @property
    def id(self) -> DomainKey:
        return (self.job, self.domain)

    def skips(self, step: int) -> bool:
        """Whether a step is skipped."""
        return any(first <= step <= last for first, last in self.skipped)

    def space(self, lanes: int) -> AddressSpace:
        """Its layout, yet without sections."""
        members = self.origin or len(self.members)
        return AddressSpace(members, lanes, self.partition_bytes, self.whole, self.remaining)


class Decision(Record, frozen=True, gc=False):
    """What the ledger says about one contribution: taken once, logged before use, reused on retry.

    ``notch`` of the plan (-1: its last) or, above 0, ``level`` of all segments: see `tuning.py`.
    """

    step: int
    plan: int
    proposal: int
    spec: str
    seed: int
    notch: int = -1
    level: int = 0


class Versions(Record, frozen=True, gc=False):
    """A two-version state: ``current`` (0 or 1) was settled at ``settled``; the other was written at ``written``.

    ``held``: bit v says that the residual of version v may be something other than zeros.
    """

    current: int = 0
    settled: int = 0
    written: int = 0
    held: int = 0

    @property
    def holds(self) -> bool:
        """Whether the settled residual may be something other than zeros."""
        return bool(self.held >> self.current & 1)

    def writing(self, step: int, zeros: bool = False) -> Versions:
        """As they are once ``step`` writes the version that is not current; ``zeros``: nothing stays behind in it."""
        bit = 1 << 1 - self.current
        return Versions(self.current, self.settled, step, self.held & ~bit if zeros else self.held | bit)


class Retained(Record, frozen=True, gc=False):
    """A payload kept until everyone provably has it: an owner's aggregate, or an all-scheme contribution.

    ``slot`` is which of the block's three retained memories holds it.
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

    @property
    def stage(self) -> int:
        """Which exchange of its round it belongs to."""
        return 1 if self.flags & Flag.SECOND else 0


class BlockMemory(Record, frozen=True, gc=False):
    """What shared memory remembers of one block after a restart (steps start at 1; 0 means never).

    ``epoch``: the one in which it was last taken up; 0 where that was not noted.
    """

    pushed: tuple[int, ...]
    push_flags: int = 0
    out_step: int = 0
    out_flags: int = 0
    out_proposal: int = 0
    decision: Decision | None = None
    residual: Versions = Versions()
    owner_residual: Versions = Versions()
    retained: tuple[Retained, ...] = ()
    epoch: int = 0


class StepRecord(Record, frozen=True, gc=False):
    """One finished step of a lane, as its ring in shared memory keeps it."""

    step: int
    nonfinite: bool
    proposal: int
    digest: int
    epoch: int = 1


# ------------------------------------------------------------------------------------------- events
class PeerAdded(Record, frozen=True, gc=False):
    """A peer's address is known; ``node`` is its id."""

    node: int
    name: str


class FrameReceived(Record, frozen=True, gc=False):
    """A frame whose digests hold. ``handle`` is its payload (DATA) and ``body`` its bytes (all other types)."""

    header: Header
    handle: Handle | None = None
    body: bytes = b""


class FrameDamaged(Record, frozen=True, gc=False):
    """A frame that failed. ``header`` is there when only the payload is bad; ``peer`` when the link is known."""

    header: Header | None
    peer: int | None
    reason: str


class PeerReset(Record, frozen=True, gc=False):
    """The transport lost its connection to ``peer`` (and perhaps frames); restarting, not dead."""

    peer: int


class DomainOpened(Record, frozen=True, gc=False):
    """A domain's epoch begins here (or is taken up again after a restart).

    A domain that is open in an earlier epoch is closed with that: its rounds are given up, answers to what was asked
    of them must not come any more, and all of its sections follow with what shared memory remembers.
    """

    config: DomainConfig
    plans: tuple[Plan, ...]
    #: settled watermark, voided steps and (first step, plan version) switches, from the step ledger
    settled: int = 0
    voids: tuple[int, ...] = ()
    switches: tuple[tuple[int, int], ...] = ((0, 0),)
    #: finished steps this lane still remembers
    finished: tuple[StepRecord, ...] = ()
    proposal: int = 0


class SectionOpened(Record, frozen=True, gc=False):
    """All members agreed on a section; ``blocks`` are all of its blocks, ``memory`` what is remembered of ours."""

    domain: DomainKey
    section: Section
    blocks: tuple[Block, ...]
    memory: Mapping[int, BlockMemory]


class DomainClosed(Record, frozen=True, gc=False):
    """The job ended; forget the domain."""

    domain: DomainKey


class PlanKnown(Record, frozen=True, gc=False):
    """A plan's text arrived and its codecs are compiled."""

    domain: DomainKey
    plan: Plan


class ProposalKnown(Record, frozen=True, gc=False):
    """Every member can run plan ``version``: propose it from the next step opened here."""

    domain: DomainKey
    version: int


class Tuned(Record, frozen=True, gc=False):
    """From its next decision on this node encodes at ``notch`` of the plan or, ``level`` > 0, everything at that level.

    It concerns blocks whose codec is tunable; segments that the plan sends as they are stay so. A notch that the plan
    does not have is its last. -1 and 0: as the plan says. A restarted lane has forgotten it.
    """

    domain: DomainKey
    notch: int = -1
    level: int = 0


class StatesTaken(Record, frozen=True, gc=False):
    """A worker brought what was saved of a block, before its first step: its residual may be other than zeros."""

    domain: DomainKey
    key: int
    owner: bool


class Pushed(Record, frozen=True, gc=False):
    """A worker's doorbell. ``rank`` is its local index; ``close``: no more blocks come in this step."""

    domain: DomainKey
    rank: int
    step: int
    keys: tuple[int, ...]
    close: bool
    flags: int = 0


class Encoded(Record, frozen=True, gc=False):
    """Answer to :class:`~gcserver.core.effects.Encode`: the contribution's payload (None when non-finite)."""

    domain: DomainKey
    key: int
    step: int
    handle: Handle | None
    nbytes: int
    digest: int
    nonfinite: bool
    stage: int = 0


class Finalised(Record, frozen=True, gc=False):
    """Answer to :class:`~gcserver.core.effects.Finalise`: the aggregate's payload (none in the all scheme)."""

    domain: DomainKey
    key: int
    step: int
    handle: Handle | None
    nbytes: int
    digest: int
    nonfinite: bool
    stage: int = 0


class Unusable(Record, frozen=True, gc=False):
    """A frame whose digests hold and whose payload does not decode: the sender is faulty. Payload dropped."""

    header: Header
    reason: str


class Settled(Record, frozen=True, gc=False):
    """The control machine settled ``step``: ``void`` keeps old versions; ``plan`` is that of step + lag."""

    domain: DomainKey
    step: int
    void: bool
    plan: int


class Tick(Record, frozen=True, gc=False):
    """Time passed. ``latest``: the highest number that a life of a peer can have by now."""

    latest: int = LAST_LIFE


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
    | Tuned
    | StatesTaken
    | Pushed
    | Encoded
    | Finalised
    | Unusable
    | Settled
    | Tick
)
