"""How two nodes that speak UCX find each other: a TCP connection beside it, with a greeting each way.

What may live here: the bytes of the greetings, and reading them. What may not: sockets' lives (`ucxends.py`), UCX.

The listeners of UCX itself do not do. In 1.13 they leave their address unusable for a minute after a restart, and of a
peer's death UCX tells only where a transport can tell, and when it likes. The connection described here is made first
and lives as long as what it introduced: when a process ends the kernel closes it, whatever carries the frames. Who
connects says that it speaks this; who listens answers with the port of a UCX worker that waits for it alone.
"""

from __future__ import annotations

import struct
from typing import Final

_MAGIC: Final = b"GCU1"
_HELLO: Final = struct.Struct("<4s4x")
_ANSWER: Final = struct.Struct("<4s4xIH")
_PORT_BYTES: Final = 2
HELLO_BYTES: Final = _HELLO.size


class GreetingError(ValueError):
    """The other side is not what it should be; the text goes after the name of the peer."""


def hello() -> bytes:
    """What who connects says."""
    return _HELLO.pack(_MAGIC)


def read_hello(raw: bytes) -> bool:
    """Whether all of the other's greeting is there. Raises GreetingError."""
    return _whole(raw, _HELLO)


def answer(port: int) -> bytes:
    """What who listens says: where UCX waits for who was introduced, at the address of this connection."""
    return _ANSWER.pack(_MAGIC, _PORT_BYTES, port)


def read_answer(raw: bytes) -> int | None:
    """The port to connect to, once all of it is there. Raises GreetingError."""
    if not _whole(raw, _ANSWER):
        return None
    _, size, port = _ANSWER.unpack(raw)
    if size != _PORT_BYTES:
        raise GreetingError(f"expected a port of {_PORT_BYTES} bytes, got {size}")
    return int(port)


def _whole(raw: bytes, expected: struct.Struct) -> bool:
    if not raw.startswith(_MAGIC[: len(raw)]):
        raise GreetingError("something else answers there, or it runs with another node.transport")
    if len(raw) > expected.size:
        raise GreetingError("it says more than a greeting")
    return len(raw) == expected.size
