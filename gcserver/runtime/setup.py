"""What supervisor and lane must agree on before a lane exists: its setup, addresses, sockets.

What may live here: small things both import. What may not: anything slow to import (numba, gRPC), so that the
supervisor can start its lanes at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec

from gcproto import messages
from gcserver.logsetup import Voice


class LaneSetup(msgspec.Struct, frozen=True):
    """What a lane is started with (JSON on its command line). ``link`` is its end of the socket pair; ``secured``: keys
    come over it; ``voice``: how it logs; ``transport``: as the configuration spells it."""

    hello: messages.Hello
    listen: str
    worker_socket: str
    state: str
    link: int
    cores: tuple[int, ...]
    credit: int
    secured: bool = False
    voice: Voice = Voice()
    transport: str = "zmq"


def lane_address(address: str, lane: int) -> str:
    """``tcp://host:port`` of lane ``lane`` of the daemon at ``address``; the control link is lane ``lanes``."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + lane}"


def listen_unix(path: str) -> socket.socket:
    """A listening Unix socket, mode 0600, replacing what a dead process left."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(128)
    listener.setblocking(False)
    return listener
