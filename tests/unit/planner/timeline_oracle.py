"""The timeline in plain Python, with nothing kept: what the compiled one has to agree with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Chain = Sequence[tuple[int, float]]  # (resource, seconds) of each job


def iteration(gaps: Sequence[float], chains: Sequence[Chain]) -> tuple[float, list[bool], dict[tuple[int, int], float]]:
    """(end, whether all was complete at each gradient, start of every (tensor, job); job -1 is its computation)."""
    queues: list[deque[tuple[int, int]]] = [deque() for _ in range(4)]
    running: list[tuple[float, int, int] | None] = [None] * 4
    starts: dict[tuple[int, int], float] = {}
    bubbles, unfinished, now = [], 0, 0.0

    def seconds(tensor: int, job: int) -> float:
        return gaps[tensor] if job < 0 else chains[tensor][job][1]

    def start_what_waits() -> None:
        for r in range(4):
            if running[r] is None and queues[r]:
                tensor, job = queues[r].popleft()
                starts[tensor, job] = now
                running[r] = (now + seconds(tensor, job), tensor, job)

    if gaps:
        queues[0].append((0, -1))
    start_what_waits()
    while any(running):
        r = min((r for r in range(4) if running[r]), key=lambda r: (running[r][0], r))  # type: ignore[index]
        now, tensor, job = running[r]  # type: ignore[misc]
        running[r] = None
        if job < 0:
            bubbles.append(unfinished == 0)
            unfinished += bool(chains[tensor])
        if job + 1 < len(chains[tensor]):
            queues[chains[tensor][job + 1][0]].append((tensor, job + 1))
        elif job >= 0:
            unfinished -= 1
        if job < 0 and tensor + 1 < len(gaps):
            queues[0].append((tensor + 1, -1))
        start_what_waits()
    return now, bubbles, starts
