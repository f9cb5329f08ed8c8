"""What memory is for, in bytes, and how much that is together.

What may live here: that value, and sums of it. What may not: counting (`memory.py`), imports that cost anything:
`gcserver doctor` shows such parts without what counts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gcserver.values import human_size

SHARED: Final = "shared"
PRIVATE: Final = "private"


@dataclass(frozen=True, slots=True)
class Part:
    """``nbytes`` of one kind of memory, ``SHARED`` or ``PRIVATE``, for one purpose. ``exact``: not from above."""

    what: str
    kind: str
    nbytes: int
    exact: bool = False


def total(parts: Iterable[Part], kind: str = SHARED) -> int:
    """Bytes of one kind of memory."""
    return sum(part.nbytes for part in parts if part.kind == kind)


def listed(parts: Iterable[Part], kind: str) -> str:
    """What one kind of memory is for, as a person reads it; nothing that takes none."""
    return ", ".join(f"{human_size(p.nbytes)} {p.what}" for p in parts if p.kind == kind and p.nbytes)
