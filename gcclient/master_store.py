"""Where ranks of mpirun and srun meet: a store of rank 0's, for as long as they meet.

What may live here: when there is one, opening it, and that nobody leaves it too early. What may not: what ranks tell
each other there (`rendezvous.py`), the stores of torchrun's agent and of torch.distributed, which last.

The store lies at MASTER_ADDR and MASTER_PORT, and is gone when the ranks have met: a process group that the script
makes at the same place, and the next `init()`, find none of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from gcclient import rendezvous
from gcclient.errors import JoinRefused, StepTimeout
from gcclient.ranks import OPEN_MPI, SLURM, World

if TYPE_CHECKING:
    from torch.distributed import TCPStore

log = logging.getLogger("gcclient")
#: One try to connect takes as long, and after each it is said whom is waited for, seconds.
_SAY_EVERY = 5.0
#: Rank 0 waits so long for ranks that have met to say so, seconds: one that ended just then will not.
_PART_WITHIN = 10.0
_SOON = 0.02
_ADVICE = "MASTER_ADDR is an address of rank 0's machine that all reach, MASTER_PORT a port that is free there"


def address(world: World, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where these ranks meet; None where their launcher brings a store, or nobody says where. Raises ValueError."""
    import torch.distributed as dist

    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if world.source not in (OPEN_MPI, SLURM) or not host or not port or not dist.is_available():
        return None
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"MASTER_PORT: expected a port from 1 to 65535, got {port!r}")
    return host, int(port)


def meet(
    at: tuple[str, int], keys_under: str, world: World, mine: rendezvous.Place, timeout: float
) -> tuple[rendezvous.Place, ...]:
    """As :func:`rendezvous.meet`. Raises :class:`JoinRefused` where rank 0 cannot have the port."""
    import torch.distributed as dist

    began = time.monotonic()
    while True:
        store = _open(at, world, began, timeout)
        left = max(timeout - (time.monotonic() - began), 0.0)
        try:
            places = rendezvous.meet(store, keys_under, world.rank, world.size, mine, left)
        except dist.DistError:
            if world.rank == 0:
                raise
            # The connection is lost: to a store of an `init()` before this one, which was about to go.
            time.sleep(_SOON)
            continue
        _part(store, rendezvous.keys(keys_under, world.size), world, left)
        return places


def _open(at: tuple[str, int], world: World, began: float, timeout: float) -> TCPStore:
    import torch.distributed as dist

    (host, port), first, patience = at, world.rank == 0, timedelta(seconds=min(_SAY_EVERY, timeout))
    where = "127.0.0.1" if first else host
    while True:
        try:
            return dist.TCPStore(where, port, is_master=first, wait_for_workers=False, timeout=patience)
        except RuntimeError as error:
            elapsed = time.monotonic() - began
            # On a busy machine rank 0 may not get to its own server in time; another one is as good.
            if first and ("in use" in str(error) or elapsed >= timeout):
                raise JoinRefused(
                    f"rank 0 cannot wait for the others at port {port}: {error}", phase="join", advice=_ADVICE
                ) from None
            if elapsed >= timeout:
                raise StepTimeout(
                    f"rank 0 does not answer at {host}:{port}: {error}",
                    phase="join",
                    missing=("rank 0",),
                    elapsed=elapsed,
                    advice=f"look at the log of rank 0; {_ADVICE}",
                ) from None
        log.warning("init: waiting for rank 0 at %s:%d", where, port)
        time.sleep(_SOON)


def _part(store: TCPStore, keys: Sequence[str], world: World, left: float) -> None:
    """Nobody goes before all have read what they came for: rank 0's store would be gone with it."""
    met, over = f"{keys[0]}/met", f"{keys[0]}/over"
    if world.rank > 0:
        with suppress(RuntimeError):  # rank 0 ended, or was over before this could be said
            store.add(met, 1)
            store.wait([over], timedelta(seconds=left + _PART_WITHIN))
        return
    end = time.monotonic() + _PART_WITHIN
    while store.add(met, 0) < world.size - 1 and time.monotonic() < end:
        time.sleep(_SOON)
    # Whoever comes back before it is gone must not take what is there for what it came for.
    for key in keys:
        store.delete_key(key)
    store.set(over, "")
