"""How two nodes that speak UCX find each other: a TCP connection beside it, with a greeting each way.

What may live here: the bytes of the greetings, and reading them. What may not: sockets' lives (`ucxends.py`), UCX.

The listeners of UCX itself do not do. In 1.13 they lead to no transport over shared memory at all, leave their address
unusable for a minute after a restart, and of a peer's death UCX tells only where a transport can tell. The connection
described here is made first and lives as long as what it introduced: when a process ends the kernel closes it, whatever
carries the frames. Who connects says that it speaks this; who listens answers with the address of a UCX worker.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_MAGIC: Final = b"GCU1"
_HELLO: Final = struct.Struct("<4sB3x")
_ANSWER: Final = struct.Struct("<4sB3xI")
_PORT: Final = struct.Struct("<H")
HELLO_BYTES: Final = _HELLO.size
#: A worker's address is some hundred bytes for each network device.
MAX_ADDRESS_BYTES: Final = 64 << 10

#: UCX's transports within a machine; none of them in 1.13 notices that the other process is gone.
_SHARED_MEMORY: Final = frozenset({"sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem", "self"})
NETWORK: Final = 0
SHARED_MEMORY: Final = 1
_WORDS: Final = {NETWORK: "a network", SHARED_MEMORY: "shared memory only"}


class GreetingError(ValueError):
    """The other side is not what it should be; the text goes after the name of the peer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Whom to connect to."""

    way: int
    address: bytes


def way(environ: Mapping[str, str]) -> int:
    """What UCX is told to use: SHARED_MEMORY if ``UCX_TLS`` names nothing else, else NETWORK."""
    named = {word.strip() for word in environ.get("UCX_TLS", "all").split(",")}
    return SHARED_MEMORY if named <= _SHARED_MEMORY else NETWORK


def hello(way: int) -> bytes:
    """What who connects says."""
    return _HELLO.pack(_MAGIC, way)


def read_hello(raw: bytes) -> int | None:
    """The other's way, once all of its greeting is there. Raises GreetingError."""
    _begins(raw)
    if len(raw) < HELLO_BYTES:
        return None
    if len(raw) > HELLO_BYTES:
        raise GreetingError("it says more than a greeting")
    return int(_HELLO.unpack(raw)[1])


def answer(way: int, address: bytes) -> bytes:
    """What who listens says."""
    return _ANSWER.pack(_MAGIC, way, len(address)) + address


def read_answer(raw: bytes, mine: int) -> Answer | None:
    """Where to connect to, once all of it is there. Raises GreetingError, also where ways differ."""
    _begins(raw)
    if len(raw) < _ANSWER.size:
        return None
    _, theirs, size = _ANSWER.unpack_from(raw)
    if theirs != mine:
        raise GreetingError(
            f"it uses {_WORDS.get(theirs, 'something unknown')}, this node {_WORDS[mine]}: set UCX_TLS alike"
        )
    if not 0 < size <= MAX_ADDRESS_BYTES:
        raise GreetingError(f"expected a UCX address of 1 to {MAX_ADDRESS_BYTES} bytes, got one of {size}")
    if len(raw) > _ANSWER.size + size:
        raise GreetingError("it says more than a greeting")
    return Answer(theirs, raw[_ANSWER.size :]) if len(raw) == _ANSWER.size + size else None


def port(number: int) -> bytes:
    """The place of a worker that listens for whom it was introduced to, at the address of this connection."""
    return _PORT.pack(number)


def read_port(address: bytes) -> int:
    """Raises GreetingError."""
    if len(address) != _PORT.size:
        raise GreetingError(f"expected a port of {_PORT.size} bytes, got {len(address)}")
    return int(_PORT.unpack(address)[0])


def _begins(raw: bytes) -> None:
    if not raw.startswith(_MAGIC[: len(raw)]):
        raise GreetingError("something else answers there, or it runs with another node.transport")


def devices(loopback: bool, environ: Mapping[str, str]) -> str:
    """The network devices for UCX to use, "" for all: who listens on loopback opens no port elsewhere either."""
    return "lo" if loopback and "UCX_NET_DEVICES" not in environ else ""
