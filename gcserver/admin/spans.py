"""Traces as the admin service speaks of them: what was started, what each node recorded, what spans are about.

What may live here: these values, whose fields are those of `proto/admin.proto`. What may not: gRPC, recording
(`gcserver.runtime.traces`), files (`tracefile.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gcproto.spans import Span

#: A trace that nobody stops ends after so long, seconds, unless it was told otherwise.
USUAL_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class TraceStarted:
    """``nodes``: those that were told to record, the asked one first."""

    nodes: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class TraceClock:
    """At the asked node's clock ``at`` another's was ahead by ``offset``, off by ``error`` at most. Seconds."""

    at: float
    offset: float
    error: float


@dataclass(frozen=True, slots=True)
class TraceFirst:
    """The first step of a process group that was recorded from its beginning."""

    job: str
    domain: int
    step: int


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A node's part of a trace. See ``TracedNode`` in admin.proto."""

    name: str
    spans: int = 0
    dropped: int = 0
    clocks: tuple[TraceClock, ...] = ()
    firsts: tuple[TraceFirst, ...] = ()
    absent: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TraceStopped:
    """What each node recorded."""

    nodes: tuple[TracedNode, ...]
    message: str


@dataclass(frozen=True, slots=True)
class TracedName:
    """By which number spans name a node."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class TracedBlock:
    """A block, by its key, and the tensor most of it belongs to."""

    key: int
    tensor: str


@dataclass(frozen=True, slots=True)
class TracedDomain:
    """A process group that spans may be of, and its blocks."""

    job: str
    domain: int
    job_label: str
    label: str
    blocks: tuple[TracedBlock, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What spans are about. ``node``: the asked one; ``wall_clock``: seconds since 1970 less its clock."""

    node: str
    steps: int
    wall_clock: float
    nodes: tuple[TracedName, ...] = ()
    domains: tuple[TracedDomain, ...] = ()


#: What GetTrace gives, in order: the context, then of each node itself and its spans.
TracePart = TraceContext | TracedNode | tuple[Span, ...]
