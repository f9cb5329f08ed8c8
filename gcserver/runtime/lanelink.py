"""What supervisor and lane say to each other over their socket pair.

What may live here: the envelope and the list of types that may be in it. What may not: what they mean.

Core events and reports cross as they are: msgspec encodes records and frozen dataclasses, and the name in the envelope
picks the type to decode, so nothing else can appear.
"""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gcproto.channel import Channel
from gcproto.packed import UNREADABLE, Message, MessageError
from gcserver.core import effects, events
from gcserver.core.control_events import OpenSection
from gcserver.runtime.linkfit import Arrival
from gcserver.runtime.linkstates import LinksChanged
from gcserver.runtime.recording import AskRecord, LaneSpans, RecordSpans
from gcserver.runtime.steptrace import AskTrace, TracedStep


@dataclass(frozen=True, slots=True)
class AddPeer:
    """To a lane: connect to this peer's lane of the same index."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class LaneKeys:
    """To a lane that waits for it before it binds anything: this node's keys, and public keys by node (all in Z85).

    They come this way because a command line and an environment can be read by others.
    """

    name: str
    public: bytes
    secret: bytes = field(repr=False)
    admitted: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Admit:
    """To a lane: the list of admitted nodes is now this one."""

    admitted: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class ForgetJob:
    """To a lane: the job's files are about to be removed."""

    job: bytes


@dataclass(frozen=True, slots=True)
class LaneReady:
    """From a lane: it listens and wants to know everything."""

    pid: int
    incarnation: int
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """What a lane exchanged with one peer since it started. ``raw``: what gradients would have been uncompressed."""

    peer: int
    bytes_in: int = 0
    bytes_out: int = 0
    frames_in: int = 0
    frames_out: int = 0
    raw_in: int = 0
    raw_out: int = 0


@dataclass(frozen=True, slots=True)
class LaneStats:
    """From a lane: counters since it started, ``arrivals`` since the last. ``counts`` are (name, peer id, value)."""

    bytes_in: int
    bytes_out: int
    rounds: tuple[tuple[bytes, int], ...]
    arena_bytes: tuple[tuple[bytes, int], ...]
    counts: tuple[tuple[str, int, int], ...]
    peers: tuple[PeerTraffic, ...]
    arrivals: tuple[Arrival, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """From a lane: (step, seconds from its first push to its end here)."""

    domain: events.DomainKey
    steps: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """``calls`` of one operation of a codec on blocks of so many elements, and the seconds all of them took.

    ``what``: "encode", "decode", "decode_add", or "finalise": encoding the aggregate and decoding it again.
    """

    spec: str
    what: str
    elements: int
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """From a lane: what its arithmetic for a domain took in the steps it timed since it last said so."""

    domain: events.DomainKey
    times: tuple[KernelTime, ...]


@dataclass(frozen=True, slots=True)
class StepDelays:
    """From a lane: (step, delay in seconds, how much of it was arrival skew, bytes sent), as `delays.py` measures."""

    domain: events.DomainKey
    steps: tuple[tuple[int, float, float, int], ...]


#: kind of a log line about an error that nobody foresaw
DEFECT: Final = "Defect"


@dataclass(frozen=True, slots=True)
class LaneTrouble:
    """From a lane: something of a job failed here (memory, mostly); the job must end. Or, without job, a log line."""

    job: bytes
    kind: str
    message: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class AskBlocks:
    """To a lane: what do the blocks of a domain cost and hold back? Answered by BlockFacts. ``gradients``: and of how
    much, which takes reading these too."""

    request: int
    domain: events.DomainKey
    gradients: bool = False


#: of a block: key, payload bytes of the newest contribution, squared norms of its residual and of the newest gradient
BlockFact = tuple[int, int, float, float]


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """From a lane: what it knows of each block."""

    request: int
    blocks: tuple[BlockFact, ...]


_TYPES: dict[str, Any] = {
    t.__name__: t
    for t in (
        events.DomainOpened,
        events.DomainClosed,
        events.PlanKnown,
        events.ProposalKnown,
        events.Tuned,
        events.Settled,
        OpenSection,
        AddPeer,
        LaneKeys,
        Admit,
        ForgetJob,
        effects.ReportStep,
        effects.ReportClosed,
        effects.ReportWaiting,
        effects.ReportFault,
        effects.ReportLink,
        LaneReady,
        LaneStats,
        LinksChanged,
        StepTimes,
        KernelTimes,
        StepDelays,
        LaneTrouble,
        AskBlocks,
        BlockFacts,
        AskTrace,
        TracedStep,
        RecordSpans,
        AskRecord,
        LaneSpans,
    )
}
_decoders = {name: msgspec.msgpack.Decoder(t) for name, t in _TYPES.items()}


class Envelope(Message, frozen=True, tag="e", array_like=True):
    """Type name and encoded content."""

    kind: str
    content: msgspec.Raw


_envelope = msgspec.msgpack.Decoder(Envelope)
_encoder = msgspec.msgpack.Encoder()


def _decode(data: object) -> Any:
    try:
        envelope = _envelope.decode(data)  # type: ignore[arg-type]
        return _decoders[envelope.kind].decode(envelope.content)
    except (*UNREADABLE, KeyError) as error:
        raise MessageError(f"between supervisor and lane: {error}") from error


class LaneLink:
    """One end of the socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel: Channel[Any] = Channel(sock, _decode)

    def fileno(self) -> int:
        return self.channel.fileno()

    def send(self, *messages: Any) -> None:
        """Messages that belong together go in one write: the other side wakes once."""
        self.channel.send_all(Envelope(type(m).__name__, msgspec.Raw(_encoder.encode(m))) for m in messages)

    def receive(self) -> list[Any]:
        return [message for message, _ in self.channel.receive()]

    def wait(self) -> list[Any]:
        """As :meth:`receive`, once there is something: a long message comes in parts."""
        received: list[Any] = []
        while not received:
            select.select([self], [], [])
            received = self.receive()
        return received
