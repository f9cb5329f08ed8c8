"""What stands where sockets are, for the targets that join two lanes or two supervisors by lists.

What may live here: messages and frames as they come out of the real thing. What may not: who sends them.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any, Final

import msgspec

from gcproto.wire import HEADER_BYTES
from gcserver.runtime import lanelink

Frame = tuple[bytes, bytes | None]
LENGTH: Final = struct.Struct("<I")


class Pipe:
    """Where ZeroMQ is: what is sent lies in ``sent``."""

    def __init__(self) -> None:
        self.sent: deque[Frame] = deque()

    def open(self, peer: int, address: str) -> None:
        pass

    def reset(self, peer: int) -> None:
        self.sent.clear()

    def send(self, peer: int, header: bytes, payload: Any, copy: bool = False) -> bool:
        self.sent.append((bytes(header), None if payload is None else bytes(payload)))
        return True


def received(frame: Frame) -> tuple[memoryview, memoryview | None]:
    """A frame as ZmqTransport gives it."""
    header, payload = frame
    if len(header) != HEADER_BYTES:
        return memoryview(b""), None
    return memoryview(header), None if payload is None else memoryview(payload)


def crossed(message: Any) -> Any:
    """What supervisor or lane says to the other, encoded and decoded as on its way there."""
    raw = lanelink._encoder.encode(message)
    return lanelink._decode(msgspec.msgpack.encode(lanelink.Envelope(type(message).__name__, msgspec.Raw(raw))))


def framed(body: bytes) -> bytes:
    """A message's bytes to or from a worker, with their length before them."""
    return LENGTH.pack(len(body)) + body
