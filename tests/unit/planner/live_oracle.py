"""The live timeline of two nodes in plain Python: what `gcserver/planner/live_kernels.py` has to come to.

What may live here: that timeline, as slow and as plain as can be. What may not: prices, and anything of the kernels but
the meaning of a price's columns.

Between two nodes there is one connection in either direction: no link is shared, and a message goes in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gcserver.planner import live_kernels as columns
from gcserver.planner.live import BlockOption, Live
from gcserver.planner.live_layout import dtype_of


@dataclass
class Job:
    """``resource``: (node, what of it); ``to``: the node that a message goes to, -1 for what is none."""

    resource: tuple[int, str]
    seconds: float
    before: list[Job]
    to: int = -1
    end: float | None = field(default=None)

    @property
    def ready(self) -> float:
        return max((job.end for job in self.before if job.end is not None), default=0.0)


class Gradient(Job):
    """A portion that is copied once it is computed."""

    computed = 0.0

    @property
    def ready(self) -> float:
        return self.computed


def step(live: Live, options: list[BlockOption]) -> float:
    """Seconds from a step's first gradient to its last copy out; for two nodes."""
    profile = live.profile
    assert profile.nodes == live.nodes == 2
    jobs: list[Job] = []
    copies: list[list[Job]] = []
    for node in (0, 1):
        copies.append([])
        latest = 0.0
        for held in live.brought:
            nbytes = sum(profile.tensors[t].elements * dtype_of(profile.tensors[t]).itemsize for t in held)
            latest = max(latest, *(profile.tensors[t].ready for t in held))
            copy = Gradient((node, "worker"), nbytes / profile.copy, [])
            copy.computed = latest
            copies[node].append(copy)
        jobs += copies[node]
    for index in live.order:
        block, price = live.blocks[index], live.price(index, options[index])
        portion = max(i for i, held in enumerate(live.brought) for t, _ in block.parts if t in held)
        arrived = [copies[node][portion] for node in (0, 1)]
        for node, done in enumerate(_block(jobs, price, block.owner, block.lane, arrived, profile.round_seconds / 2)):
            jobs.append(Job((node, "worker"), block.nbytes / profile.copy, [done]))
    return _worked_off(jobs, profile.link.latency)


def _block(jobs: list[Job], price: list[float], owner: int, lane: int, arrived: list[Job], turn: float) -> list[Job]:
    """The jobs of one block; returns what the copy out of either node waits for."""

    def work(node: int, seconds: float, *before: Job) -> Job:
        jobs.append(Job((node, f"lane {lane}"), seconds, list(before)))
        return jobs[-1]

    def send(source: int, before: Job) -> Job:
        jobs.append(Job((source, "link"), price[columns.SEND], [before], 1 - source))
        return jobs[-1]

    def added(node: int, first: Job, second: Job) -> Job:
        one = work(node, price[columns.FIRST], first)
        return work(node, price[columns.ADD], second, one)

    other = 1 - owner
    own = [work(node, price[columns.ENCODE] + turn, arrived[node]) for node in (0, 1)]
    if price[columns.SCHEME] == columns.ALL:
        come = [send(node, own[node]) for node in (0, 1)]
        out = []
        for node in (0, 1):
            parts = (own[0], come[1]) if node == 0 else (come[0], own[1])
            out.append(work(node, price[columns.FINISH] + turn, added(node, *parts)))
        return out
    total = _summed(owner, own, send, added)
    for _ in range(int(price[columns.STAGES]) - 1):
        # The first sum is there: the owner sends it and goes on, the other goes on when it has come.
        again = {owner: total, other: send(owner, total)}
        own = [work(node, price[columns.MIDDLE] + turn, again[node]) for node in (0, 1)]
        total = _summed(owner, own, send, added)
    result = work(owner, price[columns.FINISH] + turn, total)
    decoded = work(other, price[columns.DECODE] + turn, send(owner, result))
    return [result, decoded] if owner == 0 else [decoded, result]


def _summed(owner: int, own: list[Job], send: Callable[[int, Job], Job], added: Callable[[int, Job, Job], Job]) -> Job:
    """Both contributions, added by the owner in the order of members."""
    contribution = send(1 - owner, own[1 - owner])
    return added(owner, *((own[0], contribution) if owner == 0 else (contribution, own[1])))


def _worked_off(jobs: list[Job], latency: float) -> float:
    """Every resource takes what is ready first, first; of what is ready at once, what was made first."""
    free: dict[tuple[int, str], float] = {}
    left = list(enumerate(jobs))
    while left:
        open_ = [(job.ready, i, job) for i, job in left if all(b.end is not None for b in job.before)]
        ready, index, job = min(open_, key=lambda entry: entry[:2])
        start = max(ready, free.get(job.resource, 0.0))
        free[job.resource] = start + job.seconds
        job.end = start + job.seconds + (latency if job.to >= 0 else 0.0)
        left.remove((index, job))
    return max((job.end for job in jobs if job.end is not None), default=0.0)
