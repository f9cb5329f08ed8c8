"""Which transport a lane speaks.

What may live here: the calls that all of them have, and the choice. What may not: how any of them works
(`transport.py`, `ucxtransport.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import zmq

from gcserver.config_keys import UCX
from gcserver.keys import Admitted
from gcserver.runtime.guard import Guard
from gcserver.runtime.setup import LaneSetup
from gcserver.runtime.transport import Payload, ZmqTransport


class Transport(Protocol):
    """Frames of one process, to peers and from them. Not thread safe: it belongs to one loop.

    Frames of a peer arrive in the order in which it sent them. While a connection lasts none is lost; when one was lost
    and made again, `tick` says so, and what was under way may be gone. A payload that is sent must not change until the
    peer has it. What comes from the network is bounded before memory is taken for it.
    """

    troubles: dict[int, str]
    bytes_in: int
    bytes_out: int

    # Frames.
    def open(self, peer: int, address: str) -> None: ...
    def send(self, peer: int, header: bytes, payload: Payload | None, copy: bool = False) -> bool: ...
    def receive(self) -> Iterator[tuple[memoryview, memoryview | None]]: ...
    def reset(self, peer: int) -> None: ...
    def close(self, linger_ms: int = 0) -> None: ...

    def unanswered(self, peer: int) -> str: ...

    # Keys, time, and waiting for frames.
    def admit(self, admitted: Admitted) -> None: ...
    def tick(self, now: float) -> list[int]: ...
    def fileno(self) -> int: ...
    @property
    def readable(self) -> bool: ...


def lane_transport(
    setup: LaneSetup, context: zmq.Context[Any], guard: Guard | None, say: Callable[[str], None]
) -> Transport:
    """What ``setup`` asks for. Raises BindError; over UCX also UcpUnusable and UcpError."""
    if setup.transport == UCX:
        # Imported here: reading the declarations of libucp takes longer than a lane may lose without need.
        from gcserver.runtime.ucxtransport import UcxTransport

        return UcxTransport(setup.listen, say)
    return ZmqTransport(context, setup.listen, guard)
