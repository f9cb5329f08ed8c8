"""What the environment tells UCX, as far as a daemon has a say in it.

What may live here: reading UCX's variables, and refusing what would end a daemon. What may not: the library, which
reads them too (`ucp.py`), connections (`ucxends.py`).

With ``UCX_TLS=sm,self`` UCX 1.13.1 fetches a large payload by reading the sender's memory. Where the sender was killed,
reset its connection or closed it meanwhile, reading fails, UCX frees the endpoint, and finds it freed in the next
message, which ends the process; as it does when a worker is destroyed that still has an answer for a process that takes
none. No order of ending keeps that from who is killed. What copies through shared memory in pieces can be made to
report failures (``UCX_MM_ERROR_HANDLING``) and was not seen to abort then where there was a network beside it, but is
slower than TCP on loopback (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gcserver.runtime.ucp import UcpUnusable

#: UCX's transports within a machine.
_SHARED_MEMORY: Final = frozenset({"sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem", "self"})


class UcpRefused(UcpUnusable):
    """UCX is told to use what would end the process."""

    fix = "name a network as well (UCX_TLS=tcp; rc,sm,self for verbs), or set node.transport to zmq"


def refuse_shared_memory(environ: Mapping[str, str]) -> None:
    """Where ``UCX_TLS`` names nothing else; beside a network UCX leaves it out. Raises UcpRefused."""
    told = environ.get("UCX_TLS", "all")
    if {word.strip() for word in told.split(",")} <= _SHARED_MEMORY:
        raise UcpRefused(
            f"UCX_TLS={told} names shared memory only, over which UCX aborts a daemon when a peer ends under load"
        )


def devices(loopback: bool, environ: Mapping[str, str]) -> str:
    """The network devices for UCX to use, "" for all: who listens on loopback opens no port elsewhere either."""
    return "lo" if loopback and "UCX_NET_DEVICES" not in environ else ""
