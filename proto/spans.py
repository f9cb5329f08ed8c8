"""Spans of steps, recorded by workers and lanes: records of one size, a ring of them, messages that carry them.

What may live here: the record's layout, which steps are recorded, and these messages with their bounds. What may not:
where times are taken (`gcclient.tracing`, `gcserver.runtime.recording`), who asks for spans
(`gcserver.runtime.traces`), files of them (`gcserver.admin.tracefile`).

Times are seconds of CLOCK_MONOTONIC, which all processes of one machine share (`time.monotonic()`).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec

from gcproto.packed import Message
from gcproto.wire import Flag, Header

_LAYOUT: Final = struct.Struct("<dd16s6QIHH")
RECORD_BYTES: Final = _LAYOUT.size
#: Records that a lane keeps, and that a worker does.
LANE_RECORDS: Final = 1 << 16
WORKER_RECORDS: Final = 1 << 14
#: Whoever has seen its number of steps goes on for so long, seconds: others may have begun with a later step.
GRACE: Final = 0.25
#: The most that is asked for at once.
MAX_STEPS: Final = 1_000_000
MAX_SECONDS: Final = 600.0
#: Bytes of records in one message between supervisors, so that heartbeats need not wait long behind it.
PART_BYTES: Final = 1024 * RECORD_BYTES


class Kind(enum.IntEnum):
    """What was done. The first three by a worker, the others by a lane."""

    READY = 1
    PUSH = 2
    PULL = 3
    ENCODE = 4
    ADD = 5
    FINALISE = 6
    DECODE = 7
    SEND = 8
    RECEIVE = 9


class Span(NamedTuple):
    """One record. ``key`` is the block's; ``nbytes`` the block's in its own dtype, of SEND and RECEIVE the payload's.

    ``peer``: of SEND, RECEIVE and ADD the other node's id (of ADD it may be this node's), else 0; ``seq``: of SEND and
    RECEIVE the frame's number on its link. ``place``: the worker's rank or the lane's index. ``detail``: of SEND and
    RECEIVE the frame's flags, and its phase in the upper byte; else the exchange of its round (0 or 1).
    """

    begin: float
    end: float
    job: bytes
    domain: int
    step: int
    key: int
    peer: int
    seq: int
    nbytes: int
    place: int
    kind: int
    detail: int

    @property
    def resent(self) -> bool:
        """Whether a frame was sent a second time."""
        return bool(self.detail & Flag.RESENT)

    @property
    def phase(self) -> int:
        """The phase of a frame, as a number."""
        return self.detail >> 8


def frame_detail(h: Header) -> int:
    """``detail`` of a frame's span."""
    return h.flags & 0xFF | h.phase << 8


def unpack(data: bytes) -> Iterator[Span]:
    """The records in ``data``, in order. Raises ValueError for a length that is not whole records."""
    if len(data) % RECORD_BYTES:
        raise ValueError(f"spans: expected a multiple of {RECORD_BYTES} bytes, got {len(data)}")
    return map(Span._make, _LAYOUT.iter_unpack(data))


class Ring:
    """The newest ``capacity`` records; older ones make way, and are counted. All memory is taken at once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._count = 0
        self._buffer = bytearray(capacity * RECORD_BYTES)

    def add(self, span: Span) -> None:
        _LAYOUT.pack_into(self._buffer, self._count % self._capacity * RECORD_BYTES, *span)
        self._count += 1

    @property
    def dropped(self) -> int:
        """How many made way."""
        return max(0, self._count - self._capacity)

    def content(self) -> bytes:
        """What is kept, oldest first."""
        if not self.dropped:
            return bytes(self._buffer[: self._count * RECORD_BYTES])
        at = self._count % self._capacity * RECORD_BYTES
        return bytes(self._buffer[at:] + self._buffer[:at])


#: (job, domain)
DomainKey = tuple[bytes, int]
#: (job, domain, the first step that was recorded from its beginning)
First = tuple[Annotated[bytes, msgspec.Meta(max_length=16)], int, int]


class Window:
    """Which steps are recorded: of each domain ``steps`` (0: all) that began while it lasted.

    ``open``: of each domain the newest step that had begun when recording did. A domain that is not there came later,
    and its first step is the first one seen: a lane that was started again finds its domains at any step.
    """

    def __init__(self, job: bytes, steps: int, open: Mapping[DomainKey, int]) -> None:
        self._job, self._steps = job, steps
        self._firsts = {key: newest + 1 for key, newest in open.items()}
        self._ends: dict[DomainKey, float] = {}

    def holds(self, job: bytes, domain: int, step: int, now: float) -> bool:
        """Whether something that happens ``now`` in a step is recorded."""
        if self._job and job != self._job:
            return False
        key = (job, domain)
        first = self._firsts.setdefault(key, step)
        if step < first:
            return False
        if not self._steps or step < first + self._steps:
            return True
        return now <= self._ends.setdefault(key, now + GRACE)

    def firsts(self) -> tuple[First, ...]:
        """By domain the first step that was recorded from its beginning."""
        return tuple((job, domain, first) for (job, domain), first in self._firsts.items() if self._job in (b"", job))


# ----------------------------------------------------------------------------------------- messages
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
JobNumber = Annotated[bytes, msgspec.Meta(max_length=16)]
Steps = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEPS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Firsts = Annotated[tuple[First, ...], msgspec.Meta(max_length=1 << 16)]


class TraceOrder(Message, frozen=True, tag="trace"):
    """Begin to record: steps of ``job`` (empty: of all jobs), ``steps`` of each domain (0: all that there are), for
    ``seconds`` at most. To other nodes and to workers; what was recorded before under another number is dropped."""

    number: Number
    job: JobNumber
    steps: Steps
    seconds: Seconds


class EndTrace(Message, frozen=True, tag="untrace"):
    """To a worker: stop recording, and answer with WorkerSpans."""

    number: Number


class WorkerSpans(Message, frozen=True, tag="spans"):
    """A worker's records (see Ring) and how many were dropped. Sent when it is asked and when it leaves."""

    number: Number
    dropped: Number
    firsts: Firsts
    data: Annotated[bytes, msgspec.Meta(max_length=WORKER_RECORDS * RECORD_BYTES)]


class AskSpans(Message, frozen=True, tag="spans?"):
    """To a node that records or has recorded trace ``number``: stop, and answer with the part from byte ``offset``."""

    number: Number
    offset: Number


class SpansPart(Message, frozen=True, tag="spans-part"):
    """Part of a node's records, of ``total`` bytes. ``firsts`` and ``absent`` (whose records are missing and why) come
    with the first part; ``total`` 0 and an ``error`` where there is none."""

    number: Number
    offset: Number
    total: Number
    dropped: Number
    data: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES)]
    firsts: Firsts = ()
    absent: tuple[str, ...] = ()
    error: str = ""


OfTrace = TraceOrder | AskSpans | SpansPart
