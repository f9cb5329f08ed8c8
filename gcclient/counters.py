"""What a worker counts, for :func:`gcclient.stats`.

What may live here: the counters of one session. What may not: what is counted where (`calls.py`, `scope.py`, ...).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Counters:
    """What :func:`gcclient.stats` shows; bytes are of gradients, uncompressed but for those within the node."""

    calls: int = 0
    steps: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    #: sent to other workers of the node for their shards of sums, as they went (``hierarchy``)
    bytes_within_node: int = 0
    nonfinite_steps: int = 0
    skipped_steps: int = 0
    #: blocks whose saved states found no place
    states_dropped: int = 0
    wait_seconds: float = 0.0
    #: the newest audit's report
    audit: dict[str, Any] | None = None
