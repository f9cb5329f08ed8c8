"""What members say of a job, a domain or an epoch before it is there.

What may live here: keeping it in order, how much of it. What may not: what it means (`job_messages.py`), frames that
reach lanes early (`early.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gcproto import packed
from gcproto.messages import OfJob

#: So many messages of one node are kept, and so many bytes of them; the oldest go first. Members that start in another
#: order than their workers need a few; this is for those that make jobs up. One node's never displace another's.
MAX_EARLY = 4096
MAX_EARLY_BYTES = 16 << 20


M = TypeVar("M", bound=OfJob)


@dataclass(slots=True)
class _Kept(Generic[M]):
    messages: deque[tuple[M, int]] = field(default_factory=deque)
    nbytes: int = 0


@dataclass(slots=True)
class EarlyMessages(Generic[M]):
    """By node, in the order in which they came."""

    nodes: dict[str, _Kept[M]] = field(default_factory=dict)

    def keep(self, node: str, m: M) -> None:
        kept = self.nodes.setdefault(node, _Kept())
        size = len(packed.encode(m))
        kept.messages.append((m, size))
        kept.nbytes += size
        while len(kept.messages) > MAX_EARLY or kept.nbytes > MAX_EARLY_BYTES:
            kept.nbytes -= kept.messages.popleft()[1]

    def take(self) -> list[tuple[str, M]]:
        """(node, message), of each node in the order in which it said them; nothing is kept any more."""
        taken = [(node, m) for node, kept in self.nodes.items() for m, _ in kept.messages]
        self.nodes.clear()
        return taken

    def forget(self, job: bytes) -> None:
        """The job is over."""
        for kept in self.nodes.values():
            kept.messages = deque(each for each in kept.messages if each[0].job != job)
            kept.nbytes = sum(size for _, size in kept.messages)

    def __len__(self) -> int:
        return sum(len(kept.messages) for kept in self.nodes.values())
