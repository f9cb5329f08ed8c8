"""Small messages: between daemons' supervisors (CONTROL frames), and between a worker and its supervisor.

What may live here: typed messages and their bounds. What may not: what a worker says to lanes (`lane_messages.py`), how
messages become bytes (`packed.py`), gradients (they stay in arenas and DATA frames), sockets, decisions.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from gcproto.advice import Advised, AskAdvice
from gcproto.agreed import MAX_RANKS as MAX_RANKS
from gcproto.agreed import DeclareDomain as DeclareDomain
from gcproto.agreed import Label, Version
from gcproto.agreed import MemberInfo as MemberInfo
from gcproto.agreed import PlanMode as PlanMode
from gcproto.agreed import PlanText as PlanText
from gcproto.agreed import Rule as Rule
from gcproto.audits import AuditAnswer, AuditReport
from gcproto.epoch_messages import Admit, DomainFacts, EpochStart, Frozen, JobState, NodesWait, StepReady
from gcproto.manifest import Section
from gcproto.modes import BALANCED, STATIC
from gcproto.packed import Message
from gcproto.spans import EndTrace, OfTrace, TraceOrder, WorkerSpans
from gcproto.states import AskStanding, Standing
from gcproto.timings import TensorTimes

LAST_SEED: Final = (1 << 63) - 1
Seed = Annotated[int, msgspec.Meta(ge=0, le=LAST_SEED)]
#: A receiver that misses more asks for these first.
MAX_NACK: Final = 1024
#: what separates jobs of one name while they form: a digest of their secret, empty where there is none
Token = Annotated[bytes, msgspec.Meta(max_length=32)]


# ------------------------------------------------------------------------------- between supervisors
class Hello(Message, frozen=True, tag="hello"):
    """First frame on a link: who is there, of which release, what it remembers.

    ``generation`` names the node's memory (a new one means that shared memory was lost). ``version``: the release,
    which the log tells where it is another one; what daemons speak is in the header of every frame, and nothing is
    decided by this.
    """

    node: str
    address: str
    lanes: int
    lane: int
    generation: int
    version: str


class Refuse(Message, frozen=True, tag="refuse"):
    """Why a hello was not accepted."""

    reason: str


class Beat(Message, frozen=True, tag="beat"):
    """Highest sequence sent on the link; on the control link also each domain's last closed step.

    ``credits``: (job, domain, contribution bytes from the receiver that the sender is done with).

    ``sent``: the sender's clock; ``echo``: the receiver's, as its last heartbeat said it ``held`` seconds ago. What is
    left of the time since then is the round trip.

    ``pad``: bytes without meaning, by whose time on the way the sender measures the link. ``silent``: seconds since
    anything of the receiver's arrived.
    """

    highest: int
    closed: tuple[tuple[bytes, int, int, int], ...] = ()
    credits: tuple[tuple[bytes, int, int], ...] = ()
    sent: float = 0.0
    echo: float = 0.0
    held: float = 0.0
    pad: bytes = b""
    silent: float = 0.0


class Nack(Message, frozen=True, tag="nack"):
    """Link sequences the receiver is missing."""

    missing: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_NACK)]


class JobJoin(Message, frozen=True, tag="join"):
    """A node's workers of a job label are all there. ``nonce`` tells one gathering from the next; ``token``: see
    Register."""

    label: Label
    world_size: int
    member: MemberInfo
    nonce: int
    token: Token = b""


class JoinRefusal(Message, frozen=True, tag="norun"):
    """The node of rank 0 cannot make a job of these gatherings, (node, nonce): their workers are told why.

    ``kind`` is the client's exception name.
    """

    label: Label
    gatherings: tuple[tuple[str, int], ...]
    reason: str
    kind: str = "JoinRefused"


class EpochDecided(Message, frozen=True, tag="epoch"):
    """The arbiter's decision on a job's membership; members are in order of their lowest rank.

    What all members must do alike comes with it, from the first member's configuration. ``seed``: what stochastic
    codecs draw from instead of the job's number, so that two runs with the same one give the same bytes. ``controller``
    steers the levels of each node until a plan says otherwise ("none": nothing does), also in groups that were saved
    with another one if ``controller_named``: a worker's word. ``mode``: who makes the job's
    plans at first, ``quality``: what automatic ones may lose (words of `modes.py`; rank 0's worker may have said them).

    ``lost``: who left at the beginning of each epoch after the first; ``starts``: where domains stood then, of all
    epochs. ``world_size`` is that of the first epoch, and ranks keep their numbers. ``admissions``: how many epochs,
    this one too, began at an admission point, to let in who waited.
    """

    label: Label
    job: bytes
    epoch: int
    world_size: int
    members: tuple[MemberInfo, ...]
    nonces: tuple[int, ...]
    rules: tuple[Rule, ...] = ()
    partition_bytes: int = 8 << 20
    min_compress_bytes: int = 64 << 10
    deadline: float = 1800.0
    on_loss: str = "fail"
    seed: Seed | None = None
    controller: str = "none"
    mode: str = STATIC
    quality: str = BALANCED
    lost: tuple[tuple[MemberInfo, ...], ...] = ()
    starts: tuple[EpochStart, ...] = ()
    admissions: int = 0
    controller_named: bool = False

    @property
    def origin(self) -> tuple[MemberInfo, ...]:
        """The members of the first epoch, in order; of who was in the job more than once the newest that is known."""
        everyone = {m.node: m for m in (*(m for gone in self.lost for m in gone), *self.members)}
        return tuple(sorted(everyone.values(), key=lambda m: m.ranks[0]))

    @property
    def eldest(self) -> MemberInfo:
        """Of the members that have been in the job the longest the first."""
        return min(self.members, key=lambda m: (m.since, m.ranks[0]))

    @property
    def arrivals(self) -> tuple[MemberInfo, ...]:
        """Who came in with this epoch; nobody in the first."""
        return tuple(m for m in self.members if m.since == self.epoch > 1)

    def present(self, epoch: int) -> set[str]:
        """The members of an epoch up to this one, by name."""
        gone = {m.node for i, left in enumerate(self.lost, 2) for m in left if m.since <= epoch < i}
        return gone | {m.node for m in self.members if m.since <= epoch}


class SectionOffer(Message, frozen=True, tag="offer"):
    """A member's local ranks declared section ``index`` of a domain before its ``step``; equal digests agree."""

    job: bytes
    domain: int
    index: int
    digest: int
    step: int = 0


class SectionList(Message, frozen=True, tag="list"):
    """The whole declaration, sent only when digests differ, so that the difference can be named."""

    job: bytes
    domain: int
    declared: DeclareDomain
    section: Section
    rank: int


class PlanRequest(Message, frozen=True, tag="plan?"):
    """To the job's first member: please make this the next plan.

    ``replace``: these rules and no others; without it they come after those of the newest plan. ``controller``: what
    steers the levels of each node from then on; empty: what does so far. ``planned``: the rules are the planner's, and
    not somebody's who wants them.
    """

    job: bytes
    request: int
    rules: tuple[Rule, ...]
    replace: bool = False
    controller: str = ""
    planned: bool = False


class PlanReady(Message, frozen=True, tag="ready"):
    """A member can run plan ``version``; ``error`` says why it cannot."""

    job: bytes
    version: Version
    error: str = ""


class PlanGo(Message, frozen=True, tag="go"):
    """Every member can run plan ``version``: propose it from the next step on."""

    job: bytes
    version: Version


class Fault(Message, frozen=True, tag="fault"):
    """A job's end by an error (G6): what failed and what to do. ``kind`` is the client's exception name."""

    job: bytes
    kind: str
    message: str
    domain: int = 0
    step: int = 0
    epoch: int = 0
    phase: str = ""
    missing: tuple[str, ...] = ()
    elapsed: float = 0.0
    last_step: int = 0
    advice: str = ""


class JobLeft(Message, frozen=True, tag="left"):
    """All workers of a job on this node have left; without ``job``: gathering ``nonce`` was given up.

    Members forget a job together, when all have said this: what one has retained another may still ask for.
    With ``job``, ``nonce`` 1 marks the answer of a node that has forgotten it already, and ``steps`` are (domain, last
    step settled there): what a peer still waits for up to that step will come, later steps will not.
    """

    label: Label
    job: bytes
    nonce: int = 0
    steps: tuple[tuple[int, int], ...] = ()


OfPlans = PlanRequest | PlanText | PlanReady | PlanGo | PlanMode
#: what is of one job, once that is formed
OfJob = SectionOffer | SectionList | OfPlans | Fault | StepReady | Frozen
OfJobs = JobJoin | JoinRefusal | EpochDecided | JobLeft | JobState | OfJob
Control = OfJobs | OfTrace
Link = Hello | Refuse | Beat | Nack


# --------------------------------------------------------------------------- worker <-> supervisor
class Register(Message, frozen=True, tag="register"):
    """A worker's first message. ``number`` is drawn by global rank 0 (empty elsewhere).

    ``seed`` is what stochastic codecs draw from instead of the number; ``plan`` and ``quality`` are words of
    `modes.py`, ``controller`` is what steers the job (empty: the daemon's); of all four rank 0's count. ``peers`` are
    (name, address) pairs learned through torch's store, for clusters without a static list, ``keys`` the (name, public
    key) that those nodes' daemons go by (empty: it has none). ``version``: as in Hello; a message that the other
    release cannot read is refused by what is wrong with it. ``token``: only workers with the same one become a job.
    """

    label: Label
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    pid: int
    number: bytes = b""
    deadline: float = 0.0
    on_loss: str = ""
    peers: tuple[tuple[str, str], ...] = ()
    version: str = ""
    seed: Seed | None = None
    plan: str = ""
    quality: str = ""
    keys: tuple[tuple[str, str], ...] = ()
    token: Token = b""
    controller: Label = ""


class Reattach(Message, frozen=True, tag="reattach"):
    """The same worker again, after its daemon came back. ``ticket``: the one that came with Registered."""

    job: bytes
    rank: int
    pid: int
    ticket: bytes = b""


class Registered(Message, frozen=True, tag="registered"):
    """The job is formed: its number, epoch and members, where the lanes listen, and who makes its plans at first.

    ``ticket`` is what this worker shows to be let in again, here and at the lanes. ``members`` are those of the first
    epoch, which is what memory is laid out for; ``lost`` the nodes that are gone since. ``commits``: results come once
    all members hold them, and not before the daemon says so. ``admissions``: as in EpochDecided; ``domains``: what
    there is already in a job that this worker comes (back) into.
    """

    job: bytes
    epoch: int
    node: str
    members: tuple[MemberInfo, ...]
    lane_sockets: tuple[str, ...]
    partition_bytes: int
    deadline: float
    mode: str = STATIC
    ticket: bytes = b""
    lost: tuple[str, ...] = ()
    commits: bool = False
    admissions: int = 0
    domains: tuple[DomainFacts, ...] = ()


class EpochChanged(Message, frozen=True, tag="changed"):
    """The job goes on with these members: lost ones are missing, others may have come. Ranks keep their numbers."""

    epoch: int
    members: tuple[MemberInfo, ...]
    admissions: int = 0


class WhoAreYou(Message, frozen=True, tag="who"):
    """Ask a daemon for its name and address (before the store is filled)."""


class IAm(Message, frozen=True, tag="iam"):
    """Answer to WhoAreYou: name, advertised address ``tcp://host:port`` and public key (Z85; empty: it has none)."""

    node: str
    address: str
    lanes: int
    key: str = ""


class DeclareSection(Message, frozen=True, tag="section"):
    """The next section of a domain, as this rank sees it; ``step`` is the one it is declared for (0: unknown)."""

    domain: int
    section: Section
    step: int = 0


class SectionAgreed(Message, frozen=True, tag="agreed"):
    """All members declared the same: the section has its addresses."""

    domain: int
    index: int
    digest: int


class Unregister(Message, frozen=True, tag="unregister"):
    """The worker leaves in good order."""


class Waiting(Message, frozen=True, tag="waiting"):
    """What the daemon is waiting for, for a worker to show while it waits (never a silent hang)."""

    what: str


WorkerAct = Register | Reattach | WhoAreYou | DeclareDomain | DeclareSection | Admit | Unregister
FromWorker = WorkerAct | TensorTimes | AuditReport | AskAdvice | AskStanding | WorkerSpans
WorkerAnswer = AuditAnswer | Advised | Standing
ToTraced = TraceOrder | EndTrace
ToWorker = Registered | EpochChanged | NodesWait | IAm | SectionAgreed | Fault | Waiting | WorkerAnswer | ToTraced
