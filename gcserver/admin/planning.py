"""What operators are told about planning: forecasts, timelines, controllers, profiles, advice.

What may live here: the frozen answers. What may not: gRPC, translation (`convert.py`), planning itself. Fields are
named as in `proto/admin.proto`, which says what they mean, so that one function translates all of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupForecast:
    """What one group uses, what its exchange is expected to take, and why."""

    tensors: int
    first_tensor: str
    bytes: int
    codec: str
    scheme: str
    expected_seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that are to be brought together."""

    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Considered:
    """Another plan that was looked at, and why it is not the one."""

    codec: str
    expected_seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan was made for, and what came of it. ``plan_version`` 0: only proposed."""

    plan_version: int
    expected_seconds: float
    dense_seconds: float
    compute_seconds: float
    reason: str
    measured_seconds: float = 0.0
    groups: tuple[GroupForecast, ...] = ()
    considered: tuple[Considered, ...] = ()
    alphas: tuple[float, ...] = ()
    proposed_groups: tuple[TensorGroup, ...] = ()
    bucket_caps_mb: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TimelineJob:
    """Something that happens in a step, on one resource of one node."""

    what: str
    resource: str
    node: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class ControllerState:
    """A controller of this node and what it has come to."""

    name: str
    ratio: float
    notch: int | None
    delay_seconds: float
    skew_seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class TensorProfile:
    """When one gradient gets ready."""

    name: str
    elements: int
    ready_seconds: float


@dataclass(frozen=True, slots=True)
class CodecProfile:
    """What a block of 1 Mi elements costs one core."""

    codec: str
    encode_seconds: float
    decode_seconds: float
    decode_add_seconds: float
    ratio: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Measured steps under one plan."""

    plan_version: int
    median_seconds: float
    noise: float
    steps: int


@dataclass(frozen=True, slots=True)
class DomainProfile:
    """What was measured of one process group; ``json`` is all of it."""

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
    tensors: tuple[TensorProfile, ...]
    codecs: tuple[CodecProfile, ...]
    steps: tuple[StepProfile, ...]
    json: str


@dataclass(frozen=True, slots=True)
class AdviceRow:
    """One plan at one bandwidth, bytes a second."""

    bandwidth: float
    measured: bool
    plan: str
    codec: str
    expected_seconds: float


@dataclass(frozen=True, slots=True)
class Advice:
    """What compression would bring to one process group."""

    domain: str
    verdict: str
    compute_seconds: float
    pays_below: float | None
    rows: tuple[AdviceRow, ...]
