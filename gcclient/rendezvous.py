"""How ranks find each other's daemons without a peer list: through torch's store.

What may live here: choosing the store, publishing this rank's daemon, reading the others'. What may not:
the daemon's connection, what is done with the addresses.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from gcclient.errors import JoinRefused, StepTimeout

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("gcclient")
_SAY_EVERY = timedelta(seconds=5)
_ATTEMPTS = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank lives: its daemon's name, advertised address and public key, and what tells its machine from others
    (empty: unknown). ``token``: rank 0's for the job."""

    node: str
    address: str
    key: str = ""
    token: str = ""
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker tells its daemon of the nodes it is to work with: (name, address) and (name, public key) of each
    other one, and the digest of the token by which they know each other."""

    peers: tuple[tuple[str, str], ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    token: bytes = b""


def find_store(patience: float) -> Store | None:
    """The default group's store; else, under torchrun, the agent's; else None.

    ``patience``: how long the agent's may take to answer, seconds.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return None
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True" and os.environ.get("MASTER_PORT"):
        return dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=patience),
        )
    return None


def prefix(label: str) -> str:
    """Keys of one ``init()`` of one job; a second one, or torchrun's restart, must not read the first one's."""
    global _ATTEMPTS
    _ATTEMPTS += 1
    return f"gradcomm/{label}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_ATTEMPTS}"


def keys(keys_under: str, size: int) -> list[str]:
    """The keys of all ranks, by rank."""
    return [f"{keys_under}/{rank}" for rank in range(size)]


def meet(store: Any, keys_under: str, rank: int, size: int, mine: Place, timeout: float) -> tuple[Place, ...]:
    """Publish ``mine`` and collect the places of all ranks, in rank order.

    Says every five seconds whom it waits for. Raises :class:`StepTimeout` after ``timeout`` seconds.
    """
    under = keys(keys_under, size)
    store.set(under[rank], json.dumps(asdict(mine)))
    began = time.monotonic()
    while True:
        try:
            store.wait(under, _SAY_EVERY)
            break
        except RuntimeError:  # torch's DistStoreError on timeout
            missing = tuple(f"rank {r}" for r in range(size) if not store.check([under[r]]))
            elapsed = time.monotonic() - began
            if elapsed > timeout:
                raise StepTimeout(
                    "not all ranks called gcclient.init()",
                    phase="join",
                    missing=missing,
                    elapsed=elapsed,
                    advice="look at the logs of the named ranks; raise job.deadline if they are merely slow to start",
                ) from None
            log.warning("init: waiting for %s to publish their daemon", ", ".join(missing) or "the store")
    places = []
    for raw in store.multi_get(under):
        entry = json.loads(bytes(raw))
        # Of another release may be less: its daemon, or ours, then says what does not fit.
        places.append(Place(*(str(entry.get(name, "")) for name in ("node", "address", "key", "token", "machine"))))
    return tuple(places)


def local_part(places: Sequence[Place], rank: int) -> tuple[int, int]:
    """(local rank, local size): ranks whose daemon is this rank's, in rank order. Two daemons on one machine are
    two nodes, whatever LOCAL_RANK says."""
    here = [r for r, place in enumerate(places) if place.node == places[rank].node]
    return here.index(rank), len(here)


def introduce(places: Sequence[Place], me: int, token: str) -> Introduction:
    """What rank ``me`` says of all; ``token``: the one it was given, which goes before the one drawn by rank 0.

    Raises :class:`JoinRefused` as :func:`peers` does.
    """
    others = peers(places, me)
    keys = {place.node: place.key for place in places}
    return Introduction(others, tuple((name, keys[name]) for name, _ in others), digest(token or places[0].token))


def draw(rank: int, token: str) -> str:
    """The token that a rank publishes: rank 0 draws one where none was given."""
    return secrets.token_hex(16) if rank == 0 and not token else ""


def digest(token: str) -> bytes:
    """As daemons see a token: they need not know it. Empty for none."""
    return hashlib.blake2b(token.encode(), digest_size=32, person=b"gradcomm token").digest() if token else b""


def machine() -> str:
    """The same for all processes that reach each other over loopback, and for no others; empty where nobody knows."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def _loopback(address: str) -> bool:
    """Whether ``tcp://host:port`` leads every machine to itself."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def peers(places: Sequence[Place], me: int) -> tuple[tuple[str, str], ...]:
    """(name, address) of every other node. Raises :class:`JoinRefused` when one name has two addresses, and where a
    node on another machine than this rank's has a loopback address."""
    found: dict[str, str] = {}
    for rank, place in enumerate(places):
        if found.setdefault(place.node, place.address) != place.address:
            raise JoinRefused(
                f"two daemons are called {place.node!r}: at {found[place.node]} and at {place.address} (rank {rank})",
                phase="join",
                advice="give each daemon its own node.name",
            )
    here = places[me].machine
    for rank, place in enumerate(places):
        if here and place.machine and place.machine != here and _loopback(place.address):
            raise JoinRefused(
                f"the daemon {place.node!r} of rank {rank} is on another machine, and its address is {place.address}",
                phase="join",
                advice="let daemons listen on an address that the others reach, with keys or insecure = true: "
                "`gcserver run --node.listen tcp://ADDRESS:7470 ...`, `gcrun --node.listen tcp://ADDRESS:0 ... -- ...` "
                "(GC_NODE_LISTEN; keys by GC_JOB_SECRET)",
            )
    return tuple((n, a) for n, a in sorted(found.items()) if n != places[me].node)
