"""Events and effects of the control machine.

What may live here: frozen dataclasses only. The link events (PeerAdded, FrameReceived, ...) and effects
(Send, Reconnect, Count, ...) are shared with the lane machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcproto.manifest import Section
from gcproto.messages import DeclareDomain, EpochDecided, PlanMode, PlanText, Rule, Token, ToWorker, WorkerAct
from gcproto.spans import OfTrace
from gcserver.core.effects import (
    Count,
    Reconnect,
    ReportClosed,
    ReportFault,
    ReportLink,
    ReportStep,
    ReportWaiting,
    Send,
)
from gcserver.core.events import (
    DomainClosed,
    DomainKey,
    DomainOpened,
    FrameDamaged,
    FrameReceived,
    PeerAdded,
    PeerReset,
    PlanKnown,
    ProposalKnown,
    Settled,
    Tick,
)

Connection = int


@dataclass(frozen=True, slots=True)
class OpenSection:
    """To a lane: lay out the next agreed section of a domain, allocate it, then feed SectionOpened."""

    domain: DomainKey
    section: Section


ToLaneEvent = DomainOpened | OpenSection | DomainClosed | PlanKnown | ProposalKnown | Settled | PeerAdded
FromLane = ReportStep | ReportClosed | ReportWaiting | ReportFault | ReportLink


# ------------------------------------------------------------------------------------------- events
@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """A worker's message. ``connection`` names its socket. What it measured or audited does not come here."""

    connection: Connection
    message: WorkerAct


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker's socket closed."""

    connection: Connection


@dataclass(frozen=True, slots=True)
class LaneUp:
    """A lane (re)started and wants to know everything."""

    lane: int


@dataclass(frozen=True, slots=True)
class LaneSaid:
    """A lane's report."""

    lane: int
    report: FromLane


@dataclass(frozen=True, slots=True)
class EpochWon:
    """The arbiter's answer: the record in force."""

    record: EpochDecided


@dataclass(frozen=True, slots=True)
class ArbiterSilent:
    """The arbiter could not be asked, or did not answer: whether ``record`` won is not known."""

    record: EpochDecided
    reason: str


@dataclass(frozen=True, slots=True)
class SetPlan:
    """An operator asks for rules, all in one plan. ``request`` is answered once, by AnswerRequest.

    ``replace``: these rules and no others; without it they come after those of the newest plan. ``controller``: what
    steers the levels of each node from then on; empty: what does so far. ``planned``: it is the planner that asks.
    """

    request: int
    job: str
    rules: tuple[Rule, ...]
    replace: bool = False
    controller: str = ""
    planned: bool = False


@dataclass(frozen=True, slots=True)
class SayMode:
    """At a job's first member: an operator says who makes its plans and what those may lose, see PlanMode. ``anew``:
    the mode was said, and not the quality alone."""

    job: bytes
    mode: str
    quality: str
    anew: bool


@dataclass(frozen=True, slots=True)
class ProbeLink:
    """Measure the link to ``peer`` (a name) by a heartbeat with ``pad``; the link's ``probe`` says what it took."""

    peer: str
    pad: bytes


@dataclass(frozen=True, slots=True)
class TellPeer:
    """Send what concerns a trace to ``peer`` (a name); lost while the link to it is down."""

    peer: str
    message: OfTrace


@dataclass(frozen=True, slots=True)
class PeerExpelled:
    """A node may not be talked to any more: its key is not among the admitted. Said again as long as that is so."""

    name: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take no new jobs; say Drained when the last one has left."""

    reason: str


@dataclass(frozen=True, slots=True)
class DomainLedger:
    """A domain's step ledger as it was found: settled watermark, voided steps, plan switches, the step it is ready
    up to."""

    settled: int
    voids: tuple[int, ...]
    switches: tuple[tuple[int, int], ...]
    ready: int = 0


@dataclass(frozen=True, slots=True)
class JobMemory:
    """What a restarted supervisor must know of a job. ``ranks`` are the local workers' global ranks.

    ``frozen``: the other members were told that nothing more becomes ready here in this epoch. ``token``: what the
    job's workers know each other by, see Register. ``lost``: (member, why) of those without whom this node would go on.
    ``said``: what an operator said of who makes its plans.
    """

    record: EpochDecided
    ranks: tuple[int, ...]
    domains: tuple[tuple[DeclareDomain, tuple[Section, ...]], ...]
    plans: tuple[PlanText, ...]
    proposal: int
    #: the highest plan number ever given in the job
    numbered: int = 0
    frozen: bool = False
    token: Token = b""
    lost: tuple[tuple[str, str], ...] = ()
    said: PlanMode | None = None


@dataclass(frozen=True, slots=True)
class JobRestored:
    """A job found in shared memory at start; ``ledgers`` in the order of the memory's domains."""

    memory: JobMemory
    ledgers: tuple[DomainLedger, ...]


ControlEvent = (
    WorkerSaid
    | WorkerGone
    | LaneUp
    | LaneSaid
    | EpochWon
    | ArbiterSilent
    | SetPlan
    | SayMode
    | ProbeLink
    | TellPeer
    | PeerExpelled
    | DrainAsked
    | JobRestored
    | PeerAdded
    | FrameReceived
    | FrameDamaged
    | PeerReset
    | Tick
)


# ------------------------------------------------------------------------------------------ effects
@dataclass(frozen=True, slots=True)
class Tell:
    """A message to a worker."""

    connection: Connection
    message: ToWorker


@dataclass(frozen=True, slots=True)
class ToLane:
    """An event for a lane; ``lane`` None means all of them."""

    event: ToLaneEvent
    lane: int | None = None


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """What a peer said that concerns a trace, and no job."""

    peer: str
    message: OfTrace


@dataclass(frozen=True, slots=True)
class KnowPeer:
    """Open links to a node (control and lanes): its name and advertised address."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Write the job's memory where a restarted supervisor finds it, atomically."""

    job: bytes
    memory: JobMemory


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """The job left this node: remove its memory and arenas."""

    job: bytes


@dataclass(frozen=True, slots=True)
class LogSettled:
    """Write the settlement to the domain's step ledger, before any lane hears of it."""

    domain: DomainKey
    step: int
    void: bool
    plan: int
    lag: int


@dataclass(frozen=True, slots=True)
class TakeUp:
    """Write to the ledger of a domain that this node comes into what is settled there, and (first step, version) of the
    plans in force after that."""

    domain: DomainKey
    settled: int
    switches: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RenewLanes:
    """Have every lane begin a new life: nothing that it sent for a job so far is to be taken for what it sends now."""


@dataclass(frozen=True, slots=True)
class LogReady:
    """Write to the domain's step ledger that every aggregate up to ``step`` is here, before any member hears of it."""

    domain: DomainKey
    step: int


@dataclass(frozen=True, slots=True)
class Arbitrate:
    """Ask the arbiter to make ``record`` the epoch after ``expected``; answer with EpochWon or ArbiterSilent."""

    expected: int
    record: EpochDecided


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """The answer to SetPlan: the plan's version and first step, or an error."""

    request: int
    plan: int = 0
    step: int = 0
    message: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Drained:
    """No job is left and none is taken."""


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the operator: "info", "warning" or "error"."""

    level: str
    text: str


ControlEffect = (
    Send
    | Reconnect
    | Count
    | ReportLink
    | Tell
    | ToLane
    | PeerSaid
    | KnowPeer
    | SaveJob
    | ForgetJob
    | LogSettled
    | TakeUp
    | RenewLanes
    | LogReady
    | Arbitrate
    | AnswerRequest
    | Drained
    | Log
)
