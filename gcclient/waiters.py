"""Who waits for results, as a session sees them.

What may live here: the interfaces by which a session tells those who wait of the job's end, and learns who waits. What
may not: the waiting itself (`session.py`), what is waited for.
"""

from __future__ import annotations

from typing import Protocol

from gcclient.errors import GradcommError


class Pending(Protocol):
    """Something that waits for results and must hear of the job's end."""

    def fail(self, error: GradcommError) -> None: ...


class Finishing(Protocol):
    """Something that an orderly end waits for."""

    def finish(self) -> None: ...


class Watched(Protocol):
    """A step whose results nobody waits for in Python: who waits is inside torch and cannot say so."""

    def waiting(self) -> tuple[str, int, float] | None:
        """(what, step, seconds) while results are missing."""
