"""Contributions that wait for credit, one queue a peer.

What may live here: the order in which waiting contributions leave. What may not: links, rounds.

Earlier steps first; within a step the highest address first: a model is laid out in the order backward
produces gradients, so the highest addresses belong to the layers the next forward pass needs first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from gcserver.core.events import DomainKey


@dataclass(slots=True)
class Outbox:
    """Waiting contributions towards one peer."""

    heap: list[tuple[int, int, DomainKey]] = field(default_factory=list)

    def add(self, domain: DomainKey, step: int, key: int) -> None:
        heapq.heappush(self.heap, (step, -key, domain))

    def peek(self) -> tuple[DomainKey, int, int] | None:
        if not self.heap:
            return None
        step, negative, domain = self.heap[0]
        return domain, step, -negative

    def pop(self) -> None:
        heapq.heappop(self.heap)

    def clear(self) -> None:
        self.heap.clear()
