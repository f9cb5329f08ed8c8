"""Tickets that are the same in every run, so that an input can show a true one.

What may live here: the key they are made with, making them, and laying the key where a daemon looks for it. What may
not: checking them (the daemon's `gcserver.runtime.tickets` does).
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Final

from gcserver.runtime.tickets import Tickets

FILE: Final = "tickets.key"
KEY: Final = bytes(range(32))


def lay_key(state: Path) -> None:
    """Make the state directory if need be, and the key in it unless there is one."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (state / FILE).exists():
        (state / FILE).write_bytes(KEY)


@lru_cache(maxsize=1)
def _tickets() -> Tickets:
    with tempfile.TemporaryDirectory(prefix="gradcomm-fuzz-", dir="/dev/shm") as folder:
        lay_key(Path(folder))
        return Tickets(Path(folder))


def ticket(job: bytes, rank: int) -> bytes:
    """What a daemon with that key gives to the worker of this rank."""
    return _tickets().ticket(job, rank)
