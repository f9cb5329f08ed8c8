"""Tickets: how a lane and a supervisor know a worker again that has registered.

What may live here: making and checking them, and the key they are made with. What may not: connections
(`registrations.py`, `laneworkers.py`).

A worker gets its ticket with `Registered` and shows it with `Attach` and `Reattach`. It is a keyed digest of job and
rank, so that nothing has to be remembered or told to lanes; a job's number, which operators see, is not enough to be
handed the job's arena. The key lies beside the memory of the jobs and lives as long.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import Final

from gcserver.runtime.statefiles import replace_file

_BYTES: Final = 32


class Tickets:
    """Of one daemon, whose state directory is ``state``. The supervisor makes the key; lanes read it."""

    def __init__(self, state: Path) -> None:
        """Raises OSError where the key can be neither read nor made."""
        path = state / "tickets.key"
        try:
            key = path.read_bytes()
        except FileNotFoundError:
            key = b""
        if len(key) != _BYTES:
            key = os.urandom(_BYTES)
            replace_file(path, key)
        self._key = key

    def ticket(self, job: bytes, rank: int) -> bytes:
        """For the worker that has registered as ``rank`` of ``job``."""
        return hmac.digest(self._key, b"%d:%b" % (rank, job), hashlib.sha256)

    def valid(self, job: bytes, rank: int, ticket: bytes) -> bool:
        return hmac.compare_digest(self.ticket(job, rank), ticket)
