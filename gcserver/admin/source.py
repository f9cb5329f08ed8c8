"""What the admin service and the metrics ask of a daemon, as values.

What may live here: the frozen answers, in the words of `proto/admin.proto`, and the protocol a supervisor implements to
give them. What may not: gRPC, HTTP, the supervisor itself. So the service can be tested against any source, and the
supervisor needs to know nothing of either.

Durations in seconds, sizes in bytes, counters since the start of the daemon's incarnation, ids in lower-case hex.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from gcserver.admin.planning import Advice, ControllerState, DomainProfile, Forecast, TimelineJob
from gcserver.admin.spans import TracePart, TraceStarted, TraceStopped

#: A request has at most so many bytes: rules by name for some ten thousand tensors.
MAX_REQUEST: Final = 1 << 20


class NodeState(enum.StrEnum):
    """What the daemon as a whole is doing. See ``NodeState`` in admin.proto."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    DEGRADED = "degraded"
    STOPPING = "stopping"


class PeerState(enum.StrEnum):
    """How this node stands with a peer. See ``PeerState`` in admin.proto."""

    CONNECTING = "connecting"
    UP = "up"
    RESTARTING = "restarting"
    DEAD = "dead"
    REFUSED = "refused"


class JobState(enum.StrEnum):
    """What a job is doing. See ``JobState`` in admin.proto."""

    JOINING = "joining"
    RUNNING = "running"
    RECOVERING = "recovering"
    FAILED = "failed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """One server process. ``state`` is starting, ready, silent, restarting or stopped."""

    index: int
    state: str
    pid: int = 0
    incarnation: int = 0
    cores: tuple[int, ...] = ()
    restarts: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class Applicant:
    """A node that waits to be let into a running job, for how long, and what that waits for."""

    node: str
    job: str
    since: float
    reason: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """The daemon itself. ``reason`` is empty while it serves normally; ``errors`` maps kinds to counts, ``planning``
    what the planning process computed for to its CPU time."""

    node: str
    incarnation: int
    state: NodeState
    version: str
    protocol_version: int
    uptime: float
    listen: str
    advertise: str
    reason: str = ""
    lanes: tuple[LaneStatus, ...] = ()
    arena_bytes: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    applicants: tuple[Applicant, ...] = ()
    planning: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerLane:
    """The link of one of this node's lanes to the same lane of a peer; ``since``: for how long it has been so."""

    lane: int
    state: PeerState
    since: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Another node as this one sees it. ``last_heard`` and ``rtt`` are None before the first time; ``encrypted``: each
    knows the other by its key; ``since``: for how long it has been in that state."""

    name: str
    address: str
    state: PeerState
    reason: str = ""
    incarnation: int = 0
    last_heard: float | None = None
    rtt: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    frames_resent: int = 0
    frames_corrupt: int = 0
    encrypted: bool = False
    since: float = 0.0
    lanes: tuple[PeerLane, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A node's part in a job: the global ranks of its workers."""

    node: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitingFor:
    """One missing peer or rank, for how long, in which step and phase, and what is awaited of it. See ``WaitingFor`` in
    admin.proto. ``domain``: 0 also where it is of no process group."""

    node: str
    since: float
    step: int
    reason: str
    wanted: str = ""
    domain: int = 0


@dataclass(frozen=True, slots=True)
class DomainStatus:
    """The ranks of one process group. ``codec`` is that of most elements."""

    id: int
    label: str
    steps_settled: int = 0
    steps_void: int = 0
    tensors: int = 0
    elements: int = 0
    codec: str = "none"
    waiting_for: tuple[WaitingFor, ...] = ()


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One training run. ``step`` is the last one that settled: of its models, if it has any, in the one that came
    furthest."""

    label: str
    id: str
    state: JobState
    reason: str = ""
    epoch: int = 0
    world_size: int = 0
    members: tuple[Member, ...] = ()
    step: int = 0
    plan_version: int = 0
    on_loss: str = "fail"
    deadline: float = 0.0
    domains: tuple[DomainStatus, ...] = ()
    waiting_for: tuple[WaitingFor, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorStatus:
    """One tensor. ``dtype`` as torch spells it without the prefix; ``address`` is its first element's byte address.

    ``bytes_wire`` is what this node's push took in the last settled step, ``residual_norm`` the L2 norm of this
    node's residual, ``gradient_norm`` of what its workers pushed last, where something is held back. Where tensors
    share a block they share its norms too, by bytes.
    """

    name: str
    domain: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    codec: str
    bytes_raw: int
    bytes_wire: int = 0
    residual_norm: float = 0.0
    gradient_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanRule:
    """Tensors matching the glob ``pattern`` use ``codec`` over ``scheme`` ("owner", "all", "" for the owner).

    ``origin``, in answers: "default", "domain", "plan", "exclude" or "warm-up". See ``PlanRule`` in admin.proto.
    """

    pattern: str
    codec: str
    scheme: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """Blocks of a section that use the same codec and scheme for the same reason. ``rule`` is None where none matched.

    ``tensors`` are those that lie in these blocks for the most part; ``reason`` is empty where the rule is followed.
    """

    section: int
    blocks: int
    tensors: int
    first_tensor: str
    bytes: int
    codec: str
    scheme: str
    rule: PlanRule | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DomainPlan:
    """A plan as one process group runs it. ``switches`` are (first step, plan version) still to come; ``note``: why a
    plan's rules do not apply here, if so."""

    id: int
    label: str
    plan_version: int = 0
    since_step: int = 0
    switches: tuple[tuple[int, int], ...] = ()
    rules: tuple[PlanRule, ...] = ()
    groups: tuple[PlanGroup, ...] = ()
    note: str = ""
    forecast: Forecast | None = None
    controllers: tuple[ControllerState, ...] = ()
    predicted: tuple[TimelineJob, ...] = ()
    measured: tuple[TimelineJob, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """A job's newest plan that all nodes can run, its rules, and what is in force in each domain.

    ``mode``: who makes its plans; ``planner``: what the planner does or waits for.
    """

    job: str
    job_id: str
    proposed_version: int = 0
    rules: tuple[PlanRule, ...] = ()
    domains: tuple[DomainPlan, ...] = ()
    mode: str = "static"
    quality: str = "balanced"
    planner: str = ""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """The plan that carries a change and the first step that uses it, the same on every node."""

    plan_version: int
    effective_step: int
    message: str


@dataclass(frozen=True, slots=True)
class DrainResult:
    """What happens next, and how many jobs the daemon still waits for."""

    message: str
    jobs_running: int


class ErrorKind(enum.StrEnum):
    """Why a request was refused; each has its gRPC status in `statuses.py`."""

    INVALID = "invalid"  # the request itself is wrong: a spec that does not parse
    NOT_FOUND = "not_found"  # no such job, node, domain or tensor here
    PRECONDITION = "precondition"  # right, but not now: several jobs and none named, draining
    UNAVAILABLE = "unavailable"  # a peer or lane that is needed does not answer
    DEADLINE = "deadline"  # it did not happen in time
    INTERNAL = "internal"  # a defect of ours
    DENIED = "denied"  # right, but not for who asks: another role is needed
    UNAUTHENTICATED = "unauthenticated"  # who asks cannot be told, or no longer


class AdminError(Exception):
    """A request that is refused. ``str()`` names what was asked for and what would be accepted.

    ``field`` is the field of the request to blame, if one is (``codec``, ``job``, ``pattern``, ``domain``,
    ``rules[1]``).
    """

    def __init__(self, kind: ErrorKind, message: str, field: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field = field


class Source(Protocol):
    """A daemon that can be asked. Called in the daemon's own event loop: nothing here may block."""

    def node(self) -> NodeStatus: ...

    def peers(self) -> list[PeerStatus]: ...

    def jobs(self) -> list[JobStatus]: ...

    async def tensors(self, job: str, domain: str, pattern: str) -> list[TensorStatus]:
        """Tensors of ``job`` (label or id; "" for the only one) in ``domain`` (label or decimal id; "" for all) whose
        names match the glob ``pattern`` ("" for all). AdminError NOT_FOUND or PRECONDITION."""
        ...

    async def set_codec(self, job: str, pattern: str, spec: str) -> PlanChange:
        """Changes the codec of the matching tensors on every node at one step. AdminError of any kind."""
        ...

    async def set_plan(self, job: str, rules: tuple[PlanRule, ...], replace: bool) -> PlanChange:
        """Adds rules to the job's plan, or replaces them, on every node at one step. AdminError of any kind."""
        ...

    async def set_mode(self, job: str, mode: str, quality: str) -> PlanChange:
        """Says who makes the job's plans and what they may lose ("": as it is). AdminError of any kind."""
        ...

    async def plan(self, job: str, timeline: bool) -> PlanStatus:
        """What is in force in ``job``, by which rules and why; ``timeline``: with one step drawn. AdminError NOT_FOUND
        or PRECONDITION."""
        ...

    async def replan(self, job: str) -> PlanChange:
        """Makes a plan of what was measured, now. AdminError of any kind."""
        ...

    async def set_controller(self, job: str, controller: str, parameters: dict[str, float]) -> PlanChange:
        """Has a controller adapt levels, on every node. AdminError of any kind."""
        ...

    async def profile(self, job: str) -> tuple[DomainProfile, ...]:
        """What was measured. AdminError NOT_FOUND or PRECONDITION."""
        ...

    async def advise(self, job: str, bandwidths: tuple[float, ...]) -> tuple[Advice, ...]:
        """What compression would bring at these bandwidths, bytes a second (none: usual ones). AdminError."""
        ...

    async def start_trace(self, job: str, steps: int, seconds: float, nodes: tuple[str, ...]) -> TraceStarted:
        """Begins to record steps as spans, here and on other nodes. AdminError of any kind."""
        ...

    async def stop_trace(self) -> TraceStopped:
        """Ends the trace that was started here. AdminError PRECONDITION."""
        ...

    def trace(self) -> AsyncIterator[TracePart]:
        """What was recorded, part by part. AdminError PRECONDITION, when the first part is asked for."""
        ...

    async def drain(self, timeout: float, reason: str) -> DrainResult:
        """Take no new jobs, let running ones end within ``timeout`` seconds (0: however long), then exit."""
        ...
