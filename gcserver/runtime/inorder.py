"""Frames of one connection in the order in which they were sent.

What may live here: numbers of frames, and which of those that arrived may be handed out. What may not: how frames
arrive (`ucxends.py`), what they mean.

UCX does not promise an order: what is small arrives whole, of what is large the payload is fetched once its header is
there, and both may take different ways. So senders number their frames, from 0 with each connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from gcserver.runtime.ucp import Request

_NUMBER: Final = struct.Struct("<Q")
NUMBER_BYTES: Final = _NUMBER.size
#: More than that a receiver does not keep waiting for one that is missing; a link's credit is used up long before.
WINDOW: Final = 1 << 16


class OutOfOrder(ValueError):
    """A number that no honest sender uses."""


class Frame(NamedTuple):
    """What arrived; ``request`` tells when the payload is there (None: it is)."""

    header: bytes
    payload: memoryview | None
    request: Request | None


def numbered(number: int, header: bytes) -> bytes:
    """A frame's header as it travels."""
    return _NUMBER.pack(number) + header


class InOrder:
    """Frames that arrive in any order, and leave in theirs."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, Frame] = {}

    def add(self, header: bytes, payload: memoryview | None, request: Request | None) -> None:
        """A message with a numbered header. Raises OutOfOrder where the number came before or is far ahead."""
        if len(header) < NUMBER_BYTES:
            raise OutOfOrder(f"expected a header of at least {NUMBER_BYTES} bytes, got {len(header)}")
        (number,) = _NUMBER.unpack_from(header)
        if not self._next <= number < self._next + WINDOW or number in self._waiting:
            raise OutOfOrder(f"expected a new number from {self._next} to {self._next + WINDOW - 1}, got {number}")
        self._waiting[number] = Frame(header[NUMBER_BYTES:], payload, request)

    def take(self) -> Iterator[Frame]:
        """The frames that are complete, up to the first that is not. A request that failed ends that for good."""
        while (frame := self._waiting.get(self._next)) is not None:
            if frame.request is not None and not (frame.request.done and frame.request.status == 0):
                return
            del self._waiting[self._next]
            self._next += 1
            yield frame

    @property
    def failed(self) -> bool:
        """Whether the payload of the frame that is next will not come."""
        frame = self._waiting.get(self._next)
        return frame is not None and frame.request is not None and frame.request.done and frame.request.status != 0
