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

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("version", "protocol_version", "node", "incarnation", "uptime_seconds", "listen", "advertise", "state", "reason", "lanes", "arena_bytes", "errors")
    class ErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
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
    def __init__(self, version: _Optional[str] = ..., protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., incarnation: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., listen: _Optional[str] = ..., advertise: _Optional[str] = ..., state: _Optional[_Union[NodeState, str]] = ..., reason: _Optional[str] = ..., lanes: _Optional[_Iterable[_Union[LaneStatus, _Mapping]]] = ..., arena_bytes: _Optional[int] = ..., errors: _Optional[_Mapping[str, int]] = ...) -> None: ...

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
    __slots__ = ("name", "address", "state", "reason", "incarnation", "last_heard_seconds", "rtt_seconds", "bytes_in", "bytes_out", "frames_resent", "frames_corrupt")
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
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[PeerState, str]] = ..., reason: _Optional[str] = ..., incarnation: _Optional[int] = ..., last_heard_seconds: _Optional[float] = ..., rtt_seconds: _Optional[float] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., frames_resent: _Optional[int] = ..., frames_corrupt: _Optional[int] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("label", "id", "state", "reason", "epoch", "world_size", "members", "step", "plan_version", "on_loss", "deadline_seconds", "domains")
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
    def __init__(self, label: _Optional[str] = ..., id: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ..., world_size: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., step: _Optional[int] = ..., plan_version: _Optional[int] = ..., on_loss: _Optional[str] = ..., deadline_seconds: _Optional[float] = ..., domains: _Optional[_Iterable[_Union[Domain, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("node", "since_seconds", "step", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    since_seconds: float
    step: int
    reason: str
    def __init__(self, node: _Optional[str] = ..., since_seconds: _Optional[float] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("job", "rules", "replace")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    job: str
    rules: _containers.RepeatedCompositeFieldContainer[PlanRule]
    replace: bool
    def __init__(self, job: _Optional[str] = ..., rules: _Optional[_Iterable[_Union[PlanRule, _Mapping]]] = ..., replace: bool = ...) -> None: ...

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
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("job", "job_id", "proposed_version", "rules", "domains")
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_VERSION_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    job: str
    job_id: str
    proposed_version: int
    rules: _containers.RepeatedCompositeFieldContainer[PlanRule]
    domains: _containers.RepeatedCompositeFieldContainer[DomainPlan]
    def __init__(self, job: _Optional[str] = ..., job_id: _Optional[str] = ..., proposed_version: _Optional[int] = ..., rules: _Optional[_Iterable[_Union[PlanRule, _Mapping]]] = ..., domains: _Optional[_Iterable[_Union[DomainPlan, _Mapping]]] = ...) -> None: ...

class DomainPlan(_message.Message):
    __slots__ = ("id", "label", "plan_version", "since_step", "switches", "rules", "groups", "note")
    ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    SINCE_STEP_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    id: int
    label: str
    plan_version: int
    since_step: int
    switches: _containers.RepeatedCompositeFieldContainer[PlanSwitch]
    rules: _containers.RepeatedCompositeFieldContainer[PlanRule]
    groups: _containers.RepeatedCompositeFieldContainer[PlanGroup]
    note: str
    def __init__(self, id: _Optional[int] = ..., label: _Optional[str] = ..., plan_version: _Optional[int] = ..., since_step: _Optional[int] = ..., switches: _Optional[_Iterable[_Union[PlanSwitch, _Mapping]]] = ..., rules: _Optional[_Iterable[_Union[PlanRule, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[PlanGroup, _Mapping]]] = ..., note: _Optional[str] = ...) -> None: ...

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
