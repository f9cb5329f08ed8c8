"""What a worker counts.

What may live here: the counters. What may not: who counts, how they are shown (`api.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What :func:`gcclient.stats` shows; bytes are of gradients, uncompressed."""

    calls: int = 0
    steps: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    nonfinite_steps: int = 0
    wait_seconds: float = 0.0
