"""Contributions that wait for credit, one queue a peer.

What may live here: the order in which waiting contributions leave. What may not: links, rounds.

Every domain has credit of its own, so one without does not hold up the others. Earlier steps first; within a
step the highest address first: a model is laid out in the order backward produces gradients, so the highest
addresses belong to the layers the next forward pass needs first.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field

from gcserver.core.events import DomainKey


@dataclass(slots=True)
class Outbox:
    """Waiting contributions towards one peer."""

    heaps: dict[DomainKey, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, domain: DomainKey, step: int, key: int) -> None:
        heapq.heappush(self.heaps.setdefault(domain, []), (step, -key))

    def peek(self, blocked: Collection[DomainKey] = ()) -> tuple[DomainKey, int, int] | None:
        """(domain, step, key) of what leaves next, passing over domains that have no credit left."""
        if len(self.heaps) == 1 and not blocked:
            ((domain, heap),) = self.heaps.items()
            return domain, heap[0][0], -heap[0][1]
        heads = ((*heap[0], domain) for domain, heap in self.heaps.items() if domain not in blocked)
        step, negative, head = min(heads, default=(0, 0, None))
        return None if head is None else (head, step, -negative)

    def pop(self, domain: DomainKey) -> None:
        """What left is no longer waiting."""
        heap = self.heaps[domain]
        heapq.heappop(heap)
        if not heap:
            del self.heaps[domain]


class Outboxes(dict[int, Outbox]):
    """By peer, of those that something waits for; the first contribution to a peer opens one."""

    def __missing__(self, peer: int) -> Outbox:
        box = self[peer] = Outbox()
        return box
