"""Frames between daemons: one fixed header, at most one payload.

What may live here: the byte layout of the frame header, packing, parsing and validation.
What may not: sockets, what a frame means to the protocol (`gcserver.core`), how a codec lays out a
payload (`gcserver.codecs`). `docs/wire.md` describes the same bytes for other implementations, and
`tests/unit/test_wire.py` pins them as golden bytes.

The header carries a digest over itself, and itself carries the digest of the payload. Two digests rather
than one over both let an owner hash an aggregate once and send it to n-1 members, each under its own
link sequence, and let a receiver whose payload is damaged still trust the header and ask for that very
frame again (DESIGN §4, G7).
"""

from __future__ import annotations

import enum
import struct
from typing import Final

import xxhash

from gcproto.records import Record

MAGIC: Final = b"GCF1"
PROTOCOL_VERSION: Final = 1
#: Versions this build accepts from a peer: N and N-1 (there is no N-1 yet).
ACCEPTED_VERSIONS: Final = frozenset({PROTOCOL_VERSION})

#: A partition never exceeds this; anything larger on the wire is refused before it is allocated.
MAX_PAYLOAD_BYTES: Final = 1 << 32
MAX_ELEMENTS: Final = 1 << 32

_LAYOUT: Final = struct.Struct("<4sBBBBHHI16sIIQQIIQQQQQQQQQQ")
_DIGEST: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _LAYOUT.size + _DIGEST.size

#: Offset of ``sender`` in the header.
_SENDER_AT: Final = 64

NO_JOB: Final = bytes(16)


class FrameType(enum.IntEnum):
    """What a frame is for. Types below DATA are outside the link sequence (``link_seq`` 0)."""

    HELLO = 1
    REFUSE = 2
    HEARTBEAT = 3
    NACK = 4
    DATA = 16
    CONTROL = 17
    FILLER = 18


SEQUENCED: Final = frozenset({FrameType.DATA, FrameType.CONTROL, FrameType.FILLER})
#: By names of their own, since they are asked for with every frame: looking up a member of an enum takes 0.1 us.
HELLO: Final = FrameType.HELLO
REFUSE: Final = FrameType.REFUSE
HEARTBEAT: Final = FrameType.HEARTBEAT
NACK: Final = FrameType.NACK
DATA: Final = FrameType.DATA
FILLER: Final = FrameType.FILLER


class Phase(enum.IntEnum):
    """Which half of a round a DATA frame belongs to; NONE for every other type."""

    NONE = 0
    CONTRIBUTION = 1
    AGGREGATE = 2


NO_PHASE: Final = Phase.NONE
CONTRIBUTION: Final = Phase.CONTRIBUTION
AGGREGATE: Final = Phase.AGGREGATE


class Flag:
    """Bits of the header's ``flags``; plain integers, since they are tested for every frame."""

    NONE: Final = 0
    #: the sender found NaN or infinity; the payload is empty and stands for "not a number everywhere"
    NONFINITE: Final = 1
    #: the round's result is the mean over the epoch's ranks; without it, the sum
    AVERAGE: Final = 2
    #: the payload decodes to the sum; whoever decodes applies the divisor
    SUM_UNITS: Final = 4
    #: sent a second time
    RESENT: Final = 8
    #: a contribution of the all scheme: it went to every member and nobody aggregates for others
    ALL: Final = 16
    #: contribution or aggregate of the second of two dependent exchanges of one round
    SECOND: Final = 32


_KNOWN_FLAGS: Final = Flag.NONFINITE | Flag.AVERAGE | Flag.SUM_UNITS | Flag.RESENT | Flag.ALL | Flag.SECOND
_TYPES: Final = {int(t): t for t in FrameType}
_PHASES: Final = {int(p): p for p in Phase}


class FrameError(ValueError):
    """A frame that must not be used: names the header field, what was expected and what came."""

    def __init__(self, field: str, expected: object, got: object, advice: str = "") -> None:
        self.field = field
        self.expected = expected
        self.got = got
        super().__init__(f"frame {field}: expected {expected}, got {got}" + (f"; {advice}" if advice else ""))


class Header(Record, frozen=True, gc=False):
    """One frame header. Defaults suit frames outside any job.

    ``key`` is the byte address of the partition in its domain's flat address space; ``sender`` is
    :func:`node_id` of the sending node's name; ``incarnation`` is the sending process's life and
    ``to_incarnation`` the receiver's life it is meant for (0: any). ``ack`` is the highest link sequence
    up to which the sender has received everything, ``credit`` the total of contribution payload bytes of
    ``job`` and ``domain`` from the receiver that the sender is done with, in this pair of lives.
    ``proposal`` is the newest plan version known to all contributors (§ plans in docs/wire.md).
    """

    type: FrameType
    phase: Phase = Phase.NONE
    dtype: int = 0
    flags: int = 0
    codec: int = 0
    level: int = 0
    job: bytes = NO_JOB
    domain: int = 0
    epoch: int = 0
    step: int = 0
    key: int = 0
    plan: int = 0
    proposal: int = 0
    sender: int = 0
    incarnation: int = 0
    to_incarnation: int = 0
    link_seq: int = 0
    ack: int = 0
    credit: int = 0
    elements: int = 0
    payload_bytes: int = 0
    payload_digest: int = 0
    aux: int = 0
    version: int = PROTOCOL_VERSION

    def on_link(self, *, link_seq: int, ack: int, credit: int, to_incarnation: int) -> Header:
        """The same frame as it leaves on one link."""
        # Written out: dataclasses.replace would be the costliest line of a round.
        h = self
        return Header(
            h.type, h.phase, h.dtype, h.flags, h.codec, h.level, h.job, h.domain, h.epoch, h.step, h.key, h.plan,
            h.proposal, h.sender, h.incarnation, to_incarnation, link_seq, ack, credit, h.elements, h.payload_bytes,
            h.payload_digest, h.aux, h.version,
        )  # fmt: skip


def node_id(name: str) -> int:
    """The 64-bit number that stands for a node's name in ``sender``; never 0."""
    return xxhash.xxh3_64_intdigest(name.encode()) or 1


def digest(payload: object) -> int:
    """xxh3-64 of a payload (any buffer); 0 for an empty one."""
    return xxhash.xxh3_64_intdigest(payload) if payload is not None and len(payload) else 0  # type: ignore[arg-type]


def pack(h: Header) -> bytes:
    """Header as ``HEADER_BYTES`` bytes, its own digest last."""
    body = _LAYOUT.pack(
        MAGIC, h.version, h.type, h.phase, h.dtype, h.flags, h.codec, h.level, h.job, h.domain, h.epoch,
        h.step, h.key, h.plan, h.proposal, h.sender, h.incarnation, h.to_incarnation, h.link_seq, h.ack,
        h.credit, h.elements, h.payload_bytes, h.payload_digest, h.aux,
    )  # fmt: skip
    return body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))


def parse(data: bytes | memoryview) -> Header:
    """Parse and validate a header.

    Raises :class:`FrameError` naming the first bad field. The digest is checked before any other field
    except magic and version, so that a stranger or another version is named as such rather than as
    corruption.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError("length", f"{HEADER_BYTES} header bytes", len(data))
    raw = bytes(data)
    if raw[:4] != MAGIC:
        raise FrameError("magic", MAGIC, raw[:4], "the peer is not a gradcomm daemon")
    if raw[4] not in ACCEPTED_VERSIONS:
        raise FrameError("version", sorted(ACCEPTED_VERSIONS), raw[4], "upgrade the older daemon")
    body = raw[: _LAYOUT.size]
    (claimed,) = _DIGEST.unpack_from(raw, _LAYOUT.size)
    actual = xxhash.xxh3_64_intdigest(body)
    if claimed != actual:
        raise FrameError("digest", f"{claimed:#018x}", f"{actual:#018x}", "the header was damaged on the way")
    (
        _, version, type_, phase, dtype, flags, codec, level, job, domain, epoch, step, key, plan, proposal,
        sender, incarnation, to_incarnation, link_seq, ack, credit, elements, payload_bytes, payload_digest,
        aux,
    ) = _LAYOUT.unpack(body)  # fmt: skip
    frame_type, frame_phase = _TYPES.get(type_), _PHASES.get(phase)
    if frame_type is None:
        raise FrameError("type", [t.name for t in FrameType], type_)
    if frame_phase is None:
        raise FrameError("phase", [p.name for p in Phase], phase)
    header = Header(
        frame_type, frame_phase, dtype, flags, codec, level, job, domain, epoch, step, key, plan, proposal,
        sender, incarnation, to_incarnation, link_seq, ack, credit, elements, payload_bytes, payload_digest,
        aux, version,
    )  # fmt: skip
    validate(header)
    return header


def sender_hint(data: bytes | memoryview) -> int:
    """Whom a damaged header names as its sender: a hint at whom to ask again, which may itself be damaged."""
    (sender,) = _DIGEST.unpack_from(data, _SENDER_AT)
    return int(sender)


def validate(h: Header) -> None:
    """Bounds that hold whatever the frame means. Raises :class:`FrameError`."""
    if h.payload_bytes > MAX_PAYLOAD_BYTES:
        raise FrameError("payload_bytes", f"at most {MAX_PAYLOAD_BYTES}", h.payload_bytes)
    if h.elements > MAX_ELEMENTS:
        raise FrameError("elements", f"at most {MAX_ELEMENTS}", h.elements)
    if h.sender == 0:
        raise FrameError("sender", "a node id", 0)
    if h.incarnation == 0:
        raise FrameError("incarnation", "a non-zero life number", 0)
    if (h.type in SEQUENCED) != (h.link_seq > 0):
        raise FrameError("link_seq", "positive for sequenced types, else 0", h.link_seq)
    if (h.type is DATA) != (h.phase is not NO_PHASE):
        raise FrameError("phase", "CONTRIBUTION or AGGREGATE on DATA, NONE elsewhere", h.phase.name)
    if h.flags & ~_KNOWN_FLAGS:
        raise FrameError("flags", "known bits only", f"{h.flags:#06x}")


def check_payload(h: Header, payload: object) -> None:
    """Length and digest of the payload that came with ``h``. Raises :class:`FrameError`."""
    length = 0 if payload is None else len(payload)  # type: ignore[arg-type]
    if length != h.payload_bytes:
        raise FrameError("payload_bytes", h.payload_bytes, length)
    actual = digest(payload)
    if actual != h.payload_digest:
        raise FrameError(
            "payload_digest", f"{h.payload_digest:#018x}", f"{actual:#018x}", "the payload was damaged on the way"
        )
