from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_STARTING: _ClassVar[NodeState]
    NODE_STATE_SERVING: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_DEGRADED: _ClassVar[NodeState]
    NODE_STATE_STOPPING: _ClassVar[NodeState]

class PeerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_STATE_UNSPECIFIED: _ClassVar[PeerState]
    PEER_STATE_CONNECTING: _ClassVar[PeerState]
    PEER_STATE_UP: _ClassVar[PeerState]
    PEER_STATE_RESTARTING: _ClassVar[PeerState]
    PEER_STATE_DEAD: _ClassVar[PeerState]
    PEER_STATE_REFUSED: _ClassVar[PeerState]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_JOINING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_RECOVERING: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_FINISHED: _ClassVar[JobState]

class LogLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_LEVEL_UNSPECIFIED: _ClassVar[LogLevel]
    LOG_LEVEL_DEBUG: _ClassVar[LogLevel]
    LOG_LEVEL_INFO: _ClassVar[LogLevel]
    LOG_LEVEL_WARNING: _ClassVar[LogLevel]
    LOG_LEVEL_ERROR: _ClassVar[LogLevel]
    LOG_LEVEL_CRITICAL: _ClassVar[LogLevel]

class SpanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPAN_KIND_UNSPECIFIED: _ClassVar[SpanKind]
    SPAN_KIND_READY: _ClassVar[SpanKind]
    SPAN_KIND_PUSH: _ClassVar[SpanKind]
    SPAN_KIND_PULL: _ClassVar[SpanKind]
    SPAN_KIND_ENCODE: _ClassVar[SpanKind]
    SPAN_KIND_ADD: _ClassVar[SpanKind]
    SPAN_KIND_FINALISE: _ClassVar[SpanKind]
    SPAN_KIND_DECODE: _ClassVar[SpanKind]
    SPAN_KIND_SEND: _ClassVar[SpanKind]
    SPAN_KIND_RECEIVE: _ClassVar[SpanKind]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_STARTING: NodeState
NODE_STATE_SERVING: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_DEGRADED: NodeState
NODE_STATE_STOPPING: NodeState
PEER_STATE_UNSPECIFIED: PeerState
PEER_STATE_CONNECTING: PeerState
PEER_STATE_UP: PeerState
PEER_STATE_RESTARTING: PeerState
PEER_STATE_DEAD: PeerState
PEER_STATE_REFUSED: PeerState
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_JOINING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_RECOVERING: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_FINISHED: JobState
LOG_LEVEL_UNSPECIFIED: LogLevel
LOG_LEVEL_DEBUG: LogLevel
LOG_LEVEL_INFO: LogLevel
LOG_LEVEL_WARNING: LogLevel
LOG_LEVEL_ERROR: LogLevel
LOG_LEVEL_CRITICAL: LogLevel
SPAN_KIND_UNSPECIFIED: SpanKind
SPAN_KIND_READY: SpanKind
SPAN_KIND_PUSH: SpanKind
SPAN_KIND_PULL: SpanKind
SPAN_KIND_ENCODE: SpanKind
SPAN_KIND_ADD: SpanKind
SPAN_KIND_FINALISE: SpanKind
SPAN_KIND_DECODE: SpanKind
SPAN_KIND_SEND: SpanKind
SPAN_KIND_RECEIVE: SpanKind

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "protocol_version", "node", "incarnation", "uptime_seconds", "listen", "advertise", "state", "reason", "lanes", "arena_bytes", "errors", "applicants", "planning_cpu_seconds")
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PlanningCpuSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LISTEN_FIELD_NUMBER: _ClassVar[int]
    ADVERTISE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    APPLICANTS_FIELD_NUMBER: _ClassVar[int]
    PLANNING_CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol_version: int
    node: str
    incarnation: int
    uptime_seconds: float
    listen: str
    advertise: str
    state: NodeState
    reason: str
    lanes: _containers.RepeatedCompositeFieldContainer[LaneStatus]
    arena_bytes: int
    errors: _containers.ScalarMap[str, int]
    applicants: _containers.RepeatedCompositeFieldContainer[Applicant]
    planning_cpu_seconds: _containers.ScalarMap[str, float]
    def __init__(self, version: _Optional[str] = ..., protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., incarnation: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., listen: _Optional[str] = ..., advertise: _Optional[str] = ..., state: _Optional[_Union[NodeState, str]] = ..., reason: _Optional[str] = ..., lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ..., arena_bytes: _Optional[int] = ..., errors: _Optional[_Mapping[str, int]] = ..., applicants: _Optional[_Iterable[_Union[Applicant, _Mapping]]] = ..., planning_cpu_seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Applicant(_message.Message):
    __slots__ = ("node", "job", "since_seconds", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    job: str
    since_seconds: float
    reason: str
    def __init__(self, node: _Optional[str] = ..., job: _Optional[str] = ..., since_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class LaneStatus(_message.Message):
    __slots__ = ("index", "pid", "incarnation", "cores", "state", "restarts", "bytes_in", "bytes_out", "rounds")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    pid: int
    incarnation: int
    cores: _containers.RepeatedScalarFieldContainer[int]
    state: str
    restarts: int
    bytes_in: int
    bytes_out: int
    rounds: int
    def __init__(self, index: _Optional[int] = ..., pid: _Optional[int] = ..., incarnation: _Optional[int] = ..., cores: _Optional[_Iterable[int]] = ..., state: _Optional[str] = ..., restarts: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., rounds: _Optional[int] = ...) -> None: ...

class ListPeersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPeersResponse(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("name", "address", "state", "reason", "incarnation", "last_heard_seconds", "rtt_seconds", "bytes_in", "bytes_out", "frames_resent", "frames_corrupt", "encrypted", "since_seconds", "lanes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RTT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_RESENT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTED_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    state: PeerState
    reason: str
    incarnation: int
    last_heard_seconds: float
    rtt_seconds: float
    bytes_in: int
    bytes_out: int
    frames_resent: int
    frames_corrupt: int
    encrypted: bool
    since_seconds: float
    lanes: _containers.RepeatedCompositeFieldContainer[PeerLane]
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[PeerState, str]] = ..., reason: _Optional[str] = ..., incarnation: _Optional[int] = ..., last_heard_seconds: _Optional[float] = ..., rtt_seconds: _Optional[float] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., frames_resent: _Optional[int] = ..., frames_corrupt: _Optional[int] = ..., encrypted: bool = ..., since_seconds: _Optional[float] = ..., lanes: _Optional[_Iterable[_Union[PeerLane, _Mapping]]] = ...) -> None: ...

class PeerLane(_message.Message):
    __slots__ = ("lane", "state", "reason", "since_seconds")
    LANE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lane: int
    state: PeerState
    reason: str
    since_seconds: float
    def __init__(self, lane: _Optional[int] = ..., state: _Optional[_Union[PeerState, str]] = ..., reason: _Optional[str] = ..., since_seconds: _Optional[float] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("label", "id", "state", "reason", "epoch", "world_size", "members", "step", "plan_version", "on_loss", "deadline_seconds", "domains", "waiting_for")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    ON_LOSS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    label: str
    id: str
    state: JobState
    reason: str
    epoch: int
    world_size: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    step: int
    plan_version: int
    on_loss: str
    deadline_seconds: float
    domains: _containers.RepeatedCompositeFieldContainer[Domain]
    waiting_for: _containers.RepeatedCompositeFieldContainer[WaitingFor]
    def __init__(self, label: _Optional[str] = ..., id: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., world_size: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., step: _Optional[int] = ..., plan_version: _Optional[int] = ..., on_loss: _Optional[str] = ..., deadline_seconds: _Optional[float] = ..., domains: _Optional[_Iterable[_Union[Domain, _Mapping]]] = ..., waiting_for: _Optional[_Iterable[_Union[WaitingFor, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("node", "ranks")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    node: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, node: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Domain(_message.Message):
    __slots__ = ("id", "label", "steps_settled", "steps_void", "tensors", "elements", "codec", "waiting_for")
    ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    STEPS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    STEPS_VOID_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    id: int
    label: str
    steps_settled: int
    steps_void: int
    tensors: int
    elements: int
    codec: str
    waiting_for: _containers.RepeatedCompositeFieldContainer[WaitingFor]
    def __init__(self, id: _Optional[int] = ..., label: _Optional[str] = ..., steps_settled: _Optional[int] = ..., steps_void: _Optional[int] = ..., tensors: _Optional[int] = ..., elements: _Optional[int] = ..., codec: _Optional[str] = ..., waiting_for: _Optional[_Iterable[_Union[WaitingFor, _Mapping]]] = ...) -> None: ...

class WaitingFor(_message.Message):
    __slots__ = ("node", "since_seconds", "step", "reason", "wanted")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    node: str
    since_seconds: float
    step: int
    reason: str
    wanted: str
    def __init__(self, node: _Optional[str] = ..., since_seconds: _Optional[float] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ..., wanted: _Optional[str] = ...) -> None: ...

class ListTensorsRequest(_message.Message):
    __slots__ = ("job", "domain", "pattern")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    job: str
    domain: str
    pattern: str
    def __init__(self, job: _Optional[str] = ..., domain: _Optional[str] = ..., pattern: _Optional[str] = ...) -> None: ...

class ListTensorsResponse(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "domain", "dtype", "shape", "address", "codec", "bytes_raw", "bytes_wire", "residual_norm")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BYTES_RAW_FIELD_NUMBER: _ClassVar[int]
    BYTES_WIRE_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_NORM_FIELD_NUMBER: _ClassVar[int]
    name: str
    domain: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    address: int
    codec: str
    bytes_raw: int
    bytes_wire: int
    residual_norm: float
    def __init__(self, name: _Optional[str] = ..., domain: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., address: _Optional[int] = ..., codec: _Optional[str] = ..., bytes_raw: _Optional[int] = ..., bytes_wire: _Optional[int] = ..., residual_norm: _Optional[float] = ...) -> None: ...

class SetCodecRequest(_message.Message):
    __slots__ = ("job", "pattern", "codec")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    job: str
    pattern: str
    codec: str
    def __init__(self, job: _Optional[str] = ..., pattern: _Optional[str] = ..., codec: _Optional[str] = ...) -> None: ...

class SetCodecResponse(_message.Message):
    __slots__ = ("plan_version", "effective_step", "message")
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_STEP_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    plan_version: int
    effective_step: int
    message: str
    def __init__(self, plan_version: _Optional[int] = ..., effective_step: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class GetLogsRequest(_message.Message):
    __slots__ = ("since_seconds", "level", "follow", "after_sequence", "incarnation")
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    since_seconds: float
    level: LogLevel
    follow: bool
    after_sequence: int
    incarnation: int
    def __init__(self, since_seconds: _Optional[float] = ..., level: _Optional[_Union[LogLevel, str]] = ..., follow: bool = ..., after_sequence: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class GetLogsResponse(_message.Message):
    __slots__ = ("records", "lost", "incarnation")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[LogRecord]
    lost: int
    incarnation: int
    def __init__(self, records: _Optional[_Iterable[_Union[LogRecord, _Mapping]]] = ..., lost: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class LogRecord(_message.Message):
    __slots__ = ("sequence", "time", "level", "node", "lane", "logger", "message", "trace")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    LOGGER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: float
    level: LogLevel
    node: str
    lane: int
    logger: str
    message: str
    trace: str
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[float] = ..., level: _Optional[_Union[LogLevel, str]] = ..., node: _Optional[str] = ..., lane: _Optional[int] = ..., logger: _Optional[str] = ..., message: _Optional[str] = ..., trace: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds", "reason")
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    reason: str
    def __init__(self, timeout_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("message", "jobs_running")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    JOBS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    message: str
    jobs_running: int
    def __init__(self, message: _Optional[str] = ..., jobs_running: _Optional[int] = ...) -> None: ...

class PlanRule(_message.Message):
    __slots__ = ("pattern", "codec", "scheme", "origin")
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    codec: str
    scheme: str
    origin: str
    def __init__(self, pattern: _Optional[str] = ..., codec: _Optional[str] = ..., scheme: _Optional[str] = ..., origin: _Optional[str] = ...) -> None: ...

class SetPlanRequest(_message.Message):
    __slots__ = ("job", "rules", "replace", "mode", "quality")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    job: str
    rules: _containers.RepeatedCompositeFieldContainer[PlanRule]
    replace: bool
    mode: str
    quality: str
    def __init__(self, job: _Optional[str] = ..., rules: _Optional[_Iterable[_Union[PlanRule, _Mapping]]] = ..., replace: bool = ..., mode: _Optional[str] = ..., quality: _Optional[str] = ...) -> None: ...

class SetPlanResponse(_message.Message):
    __slots__ = ("plan_version", "effective_step", "message")
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_STEP_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    plan_version: int
    effective_step: int
    message: str
    def __init__(self, plan_version: _Optional[int] = ..., effective_step: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ("job", "timeline")
    JOB_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    job: str
    timeline: bool
    def __init__(self, job: _Optional[str] = ..., timeline: bool = ...) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("job", "job_id", "proposed_version", "rules", "domains", "mode", "quality", "planner")
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_VERSION_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    job: str
    job_id: str
    proposed_version: int
    rules: _containers.RepeatedCompositeFieldContainer[PlanRule]
    domains: _containers.RepeatedCompositeFieldContainer[DomainPlan]
    mode: str
    quality: str
    planner: str
    def __init__(self, job: _Optional[str] = ..., job_id: _Optional[str] = ..., proposed_version: _Optional[int] = ..., rules: _Optional[_Iterable[_Union[PlanRule, _Mapping]]] = ..., domains: _Optional[_Iterable[_Union[DomainPlan, _Mapping]]] = ..., mode: _Optional[str] = ..., quality: _Optional[str] = ..., planner: _Optional[str] = ...) -> None: ...

class DomainPlan(_message.Message):
    __slots__ = ("id", "label", "plan_version", "since_step", "switches", "rules", "groups", "note", "forecast", "controllers", "predicted", "measured")
    ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    SINCE_STEP_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    id: int
    label: str
    plan_version: int
    since_step: int
    switches: _containers.RepeatedCompositeFieldContainer[PlanSwitch]
    rules: _containers.RepeatedCompositeFieldContainer[PlanRule]
    groups: _containers.RepeatedCompositeFieldContainer[PlanGroup]
    note: str
    forecast: Forecast
    controllers: _containers.RepeatedCompositeFieldContainer[ControllerState]
    predicted: _containers.RepeatedCompositeFieldContainer[TimelineJob]
    measured: _containers.RepeatedCompositeFieldContainer[TimelineJob]
    def __init__(self, id: _Optional[int] = ..., label: _Optional[str] = ..., plan_version: _Optional[int] = ..., since_step: _Optional[int] = ..., switches: _Optional[_Iterable[_Union[PlanSwitch, _Mapping]]] = ..., rules: _Optional[_Iterable[_Union[PlanRule, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[PlanGroup, _Mapping]]] = ..., note: _Optional[str] = ..., forecast: _Optional[_Union[Forecast, _Mapping]] = ..., controllers: _Optional[_Iterable[_Union[ControllerState, _Mapping]]] = ..., predicted: _Optional[_Iterable[_Union[TimelineJob, _Mapping]]] = ..., measured: _Optional[_Iterable[_Union[TimelineJob, _Mapping]]] = ...) -> None: ...

class Forecast(_message.Message):
    __slots__ = ("plan_version", "expected_seconds", "measured_seconds", "dense_seconds", "compute_seconds", "reason", "groups", "considered", "alphas", "proposed_groups", "bucket_caps_mb")
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DENSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    ALPHAS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_CAPS_MB_FIELD_NUMBER: _ClassVar[int]
    plan_version: int
    expected_seconds: float
    measured_seconds: float
    dense_seconds: float
    compute_seconds: float
    reason: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupForecast]
    considered: _containers.RepeatedCompositeFieldContainer[Considered]
    alphas: _containers.RepeatedScalarFieldContainer[float]
    proposed_groups: _containers.RepeatedCompositeFieldContainer[TensorGroup]
    bucket_caps_mb: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, plan_version: _Optional[int] = ..., expected_seconds: _Optional[float] = ..., measured_seconds: _Optional[float] = ..., dense_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupForecast, _Mapping]]] = ..., considered: _Optional[_Iterable[_Union[Considered, _Mapping]]] = ..., alphas: _Optional[_Iterable[float]] = ..., proposed_groups: _Optional[_Iterable[_Union[TensorGroup, _Mapping]]] = ..., bucket_caps_mb: _Optional[_Iterable[float]] = ...) -> None: ...

class TensorGroup(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tensors: _Optional[_Iterable[str]] = ...) -> None: ...

class GroupForecast(_message.Message):
    __slots__ = ("tensors", "first_tensor", "bytes", "codec", "scheme", "expected_seconds", "reason")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TENSOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    tensors: int
    first_tensor: str
    bytes: int
    codec: str
    scheme: str
    expected_seconds: float
    reason: str
    def __init__(self, tensors: _Optional[int] = ..., first_tensor: _Optional[str] = ..., bytes: _Optional[int] = ..., codec: _Optional[str] = ..., scheme: _Optional[str] = ..., expected_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Considered(_message.Message):
    __slots__ = ("codec", "expected_seconds", "reason")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    codec: str
    expected_seconds: float
    reason: str
    def __init__(self, codec: _Optional[str] = ..., expected_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class TimelineJob(_message.Message):
    __slots__ = ("what", "resource", "node", "start_seconds", "end_seconds")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    what: str
    resource: str
    node: str
    start_seconds: float
    end_seconds: float
    def __init__(self, what: _Optional[str] = ..., resource: _Optional[str] = ..., node: _Optional[str] = ..., start_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ...) -> None: ...

class ControllerState(_message.Message):
    __slots__ = ("name", "ratio", "notch", "delay_seconds", "skew_seconds", "steps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    NOTCH_FIELD_NUMBER: _ClassVar[int]
    DELAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SKEW_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    ratio: float
    notch: int
    delay_seconds: float
    skew_seconds: float
    steps: int
    def __init__(self, name: _Optional[str] = ..., ratio: _Optional[float] = ..., notch: _Optional[int] = ..., delay_seconds: _Optional[float] = ..., skew_seconds: _Optional[float] = ..., steps: _Optional[int] = ...) -> None: ...

class ReplanRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ReplanResponse(_message.Message):
    __slots__ = ("plan_version", "effective_step", "message")
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_STEP_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    plan_version: int
    effective_step: int
    message: str
    def __init__(self, plan_version: _Optional[int] = ..., effective_step: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class SetControllerRequest(_message.Message):
    __slots__ = ("job", "controller", "parameters")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    job: str
    controller: str
    parameters: _containers.ScalarMap[str, float]
    def __init__(self, job: _Optional[str] = ..., controller: _Optional[str] = ..., parameters: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SetControllerResponse(_message.Message):
    __slots__ = ("plan_version", "effective_step", "message")
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_STEP_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    plan_version: int
    effective_step: int
    message: str
    def __init__(self, plan_version: _Optional[int] = ..., effective_step: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class GetProfileRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class GetProfileResponse(_message.Message):
    __slots__ = ("domains",)
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    domains: _containers.RepeatedCompositeFieldContainer[DomainProfile]
    def __init__(self, domains: _Optional[_Iterable[_Union[DomainProfile, _Mapping]]] = ...) -> None: ...

class DomainProfile(_message.Message):
    __slots__ = ("job", "domain", "nodes", "forward_seconds", "backward_seconds", "link_latency_seconds", "link_bandwidth", "link_noise", "link_samples", "busy", "tensors", "codecs", "steps", "json")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINK_LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINK_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    LINK_NOISE_FIELD_NUMBER: _ClassVar[int]
    LINK_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    job: str
    domain: str
    nodes: int
    forward_seconds: float
    backward_seconds: float
    link_latency_seconds: float
    link_bandwidth: float
    link_noise: float
    link_samples: int
    busy: float
    tensors: _containers.RepeatedCompositeFieldContainer[TensorProfile]
    codecs: _containers.RepeatedCompositeFieldContainer[CodecProfile]
    steps: _containers.RepeatedCompositeFieldContainer[StepProfile]
    json: str
    def __init__(self, job: _Optional[str] = ..., domain: _Optional[str] = ..., nodes: _Optional[int] = ..., forward_seconds: _Optional[float] = ..., backward_seconds: _Optional[float] = ..., link_latency_seconds: _Optional[float] = ..., link_bandwidth: _Optional[float] = ..., link_noise: _Optional[float] = ..., link_samples: _Optional[int] = ..., busy: _Optional[float] = ..., tensors: _Optional[_Iterable[_Union[TensorProfile, _Mapping]]] = ..., codecs: _Optional[_Iterable[_Union[CodecProfile, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[StepProfile, _Mapping]]] = ..., json: _Optional[str] = ...) -> None: ...

class TensorProfile(_message.Message):
    __slots__ = ("name", "elements", "ready_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    READY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    elements: int
    ready_seconds: float
    def __init__(self, name: _Optional[str] = ..., elements: _Optional[int] = ..., ready_seconds: _Optional[float] = ...) -> None: ...

class CodecProfile(_message.Message):
    __slots__ = ("codec", "encode_seconds", "decode_seconds", "decode_add_seconds", "ratio")
    CODEC_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    codec: str
    encode_seconds: float
    decode_seconds: float
    decode_add_seconds: float
    ratio: float
    def __init__(self, codec: _Optional[str] = ..., encode_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., decode_add_seconds: _Optional[float] = ..., ratio: _Optional[float] = ...) -> None: ...

class StepProfile(_message.Message):
    __slots__ = ("plan_version", "median_seconds", "noise", "steps")
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    plan_version: int
    median_seconds: float
    noise: float
    steps: int
    def __init__(self, plan_version: _Optional[int] = ..., median_seconds: _Optional[float] = ..., noise: _Optional[float] = ..., steps: _Optional[int] = ...) -> None: ...

class AdviseRequest(_message.Message):
    __slots__ = ("job", "bandwidths")
    JOB_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTHS_FIELD_NUMBER: _ClassVar[int]
    job: str
    bandwidths: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, job: _Optional[str] = ..., bandwidths: _Optional[_Iterable[float]] = ...) -> None: ...

class AdviseResponse(_message.Message):
    __slots__ = ("domains",)
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    domains: _containers.RepeatedCompositeFieldContainer[Advice]
    def __init__(self, domains: _Optional[_Iterable[_Union[Advice, _Mapping]]] = ...) -> None: ...

class Advice(_message.Message):
    __slots__ = ("domain", "verdict", "compute_seconds", "pays_below", "rows")
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAYS_BELOW_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    domain: str
    verdict: str
    compute_seconds: float
    pays_below: float
    rows: _containers.RepeatedCompositeFieldContainer[AdviceRow]
    def __init__(self, domain: _Optional[str] = ..., verdict: _Optional[str] = ..., compute_seconds: _Optional[float] = ..., pays_below: _Optional[float] = ..., rows: _Optional[_Iterable[_Union[AdviceRow, _Mapping]]] = ...) -> None: ...

class AdviceRow(_message.Message):
    __slots__ = ("bandwidth", "measured", "plan", "codec", "expected_seconds")
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    bandwidth: float
    measured: bool
    plan: str
    codec: str
    expected_seconds: float
    def __init__(self, bandwidth: _Optional[float] = ..., measured: bool = ..., plan: _Optional[str] = ..., codec: _Optional[str] = ..., expected_seconds: _Optional[float] = ...) -> None: ...

class PlanSwitch(_message.Message):
    __slots__ = ("first_step", "plan_version")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    plan_version: int
    def __init__(self, first_step: _Optional[int] = ..., plan_version: _Optional[int] = ...) -> None: ...

class PlanGroup(_message.Message):
    __slots__ = ("section", "blocks", "tensors", "first_tensor", "bytes", "codec", "scheme", "rule", "reason")
    SECTION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TENSOR_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    section: int
    blocks: int
    tensors: int
    first_tensor: str
    bytes: int
    codec: str
    scheme: str
    rule: PlanRule
    reason: str
    def __init__(self, section: _Optional[int] = ..., blocks: _Optional[int] = ..., tensors: _Optional[int] = ..., first_tensor: _Optional[str] = ..., bytes: _Optional[int] = ..., codec: _Optional[str] = ..., scheme: _Optional[str] = ..., rule: _Optional[_Union[PlanRule, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class StartTraceRequest(_message.Message):
    __slots__ = ("job", "steps", "seconds", "nodes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    job: str
    steps: int
    seconds: float
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job: _Optional[str] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class StartTraceResponse(_message.Message):
    __slots__ = ("nodes", "message")
    NODES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[str]
    message: str
    def __init__(self, nodes: _Optional[_Iterable[str]] = ..., message: _Optional[str] = ...) -> None: ...

class StopTraceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopTraceResponse(_message.Message):
    __slots__ = ("nodes", "message")
    NODES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[TracedNode]
    message: str
    def __init__(self, nodes: _Optional[_Iterable[_Union[TracedNode, _Mapping]]] = ..., message: _Optional[str] = ...) -> None: ...

class TracedNode(_message.Message):
    __slots__ = ("name", "spans", "dropped", "clocks", "firsts", "absent", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRSTS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    spans: int
    dropped: int
    clocks: _containers.RepeatedCompositeFieldContainer[TraceClock]
    firsts: _containers.RepeatedCompositeFieldContainer[TraceFirst]
    absent: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, name: _Optional[str] = ..., spans: _Optional[int] = ..., dropped: _Optional[int] = ..., clocks: _Optional[_Iterable[_Union[TraceClock, _Mapping]]] = ..., firsts: _Optional[_Iterable[_Union[TraceFirst, _Mapping]]] = ..., absent: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class TraceClock(_message.Message):
    __slots__ = ("at", "offset", "error")
    AT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    at: float
    offset: float
    error: float
    def __init__(self, at: _Optional[float] = ..., offset: _Optional[float] = ..., error: _Optional[float] = ...) -> None: ...

class TraceFirst(_message.Message):
    __slots__ = ("job", "domain", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    domain: int
    step: int
    def __init__(self, job: _Optional[str] = ..., domain: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("context", "node", "spans")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    context: TraceContext
    node: TracedNode
    spans: _containers.RepeatedCompositeFieldContainer[TraceSpan]
    def __init__(self, context: _Optional[_Union[TraceContext, _Mapping]] = ..., node: _Optional[_Union[TracedNode, _Mapping]] = ..., spans: _Optional[_Iterable[_Union[TraceSpan, _Mapping]]] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("node", "steps", "wall_clock", "nodes", "domains")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WALL_CLOCK_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    node: str
    steps: int
    wall_clock: float
    nodes: _containers.RepeatedCompositeFieldContainer[TracedName]
    domains: _containers.RepeatedCompositeFieldContainer[TracedDomain]
    def __init__(self, node: _Optional[str] = ..., steps: _Optional[int] = ..., wall_clock: _Optional[float] = ..., nodes: _Optional[_Iterable[_Union[TracedName, _Mapping]]] = ..., domains: _Optional[_Iterable[_Union[TracedDomain, _Mapping]]] = ...) -> None: ...

class TracedName(_message.Message):
    __slots__ = ("id", "name")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    id: int
    name: str
    def __init__(self, id: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class TracedDomain(_message.Message):
    __slots__ = ("job", "domain", "job_label", "label", "blocks")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    JOB_LABEL_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    job: str
    domain: int
    job_label: str
    label: str
    blocks: _containers.RepeatedCompositeFieldContainer[TracedBlock]
    def __init__(self, job: _Optional[str] = ..., domain: _Optional[int] = ..., job_label: _Optional[str] = ..., label: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[TracedBlock, _Mapping]]] = ...) -> None: ...

class TracedBlock(_message.Message):
    __slots__ = ("key", "tensor")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    key: int
    tensor: str
    def __init__(self, key: _Optional[int] = ..., tensor: _Optional[str] = ...) -> None: ...

class TraceSpan(_message.Message):
    __slots__ = ("kind", "begin", "end", "job", "domain", "step", "key", "place", "bytes", "peer", "link_seq", "phase", "resent")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    LINK_SEQ_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RESENT_FIELD_NUMBER: _ClassVar[int]
    kind: SpanKind
    begin: float
    end: float
    job: str
    domain: int
    step: int
    key: int
    place: int
    bytes: int
    peer: int
    link_seq: int
    phase: int
    resent: bool
    def __init__(self, kind: _Optional[_Union[SpanKind, str]] = ..., begin: _Optional[float] = ..., end: _Optional[float] = ..., job: _Optional[str] = ..., domain: _Optional[int] = ..., step: _Optional[int] = ..., key: _Optional[int] = ..., place: _Optional[int] = ..., bytes: _Optional[int] = ..., peer: _Optional[int] = ..., link_seq: _Optional[int] = ..., phase: _Optional[int] = ..., resent: bool = ...) -> None: ...
