"""The steps of one domain on one lane: opened, closed, done, settled; and which plan a step runs under.

What may live here: bookkeeping of steps. What may not: rounds (`rounds.py`), frames, effects.

A step opens with its first push, is *closed* when every local worker said that no more blocks come, is
*done* when all its blocks are in the output slots, and is *settled* when the control machine says so. Settling
is in step order. Settling step t fixes the plan of step t + lag, so a step may be encoded only when step
t - lag is settled: that is how all nodes change plans at the same step without a message of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcproto import wire


@dataclass(slots=True)
class Step:
    """One open step. ``keys[r]`` are the blocks local rank r pushed; ``proposal`` the highest seen in its rounds."""

    number: int
    opened: float
    own_proposal: int
    keys: list[set[int]]
    closed: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    nonfinite: bool = False
    proposal: int = 0
    finished: bool = False
    said_closed: bool = False
    digest: int = 0

    @property
    def is_closed(self) -> bool:
        return len(self.closed) == len(self.keys)

    @property
    def expected(self) -> set[int]:
        return self.keys[0]

    def close(self) -> int | None:
        """Called when the last local rank closed: a key only some ranks pushed, or None if all agree."""
        first = self.keys[0]
        for other in self.keys[1:]:
            if odd := first ^ other:
                return min(odd)
        self.digest = wire.digest(b"".join(k.to_bytes(8, "little") for k in sorted(first)))
        return None


@dataclass(slots=True)
class StepBook:
    """Steps of a domain. ``switches`` are (first step, plan version), ascending; ``voids`` the voided steps."""

    local_ranks: int
    lag: int
    settled: int = 0
    voids: set[int] = field(default_factory=set)
    switches: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    #: newest plan version every member can run, as far as we know
    known_proposal: int = 0
    open: dict[int, Step] = field(default_factory=dict)

    def get(self, number: int, now: float) -> Step:
        step = self.open.get(number)
        if step is None:
            step = Step(number, now, self.known_proposal, [set() for _ in range(self.local_ranks)])
            self.open[number] = step
        return step

    def may_run(self, number: int) -> bool:
        """Whether the plan of ``number`` is fixed."""
        return number <= self.settled + self.lag

    def plan_version(self, number: int) -> int:
        first, newest = self.switches[-1]
        return newest if first <= number else next(v for first, v in reversed(self.switches) if first <= number)

    def settle(self, number: int, void: bool, plan: int) -> None:
        self.settled = number
        if void:
            self.voids.add(number)
        if self.plan_version(number + self.lag) != plan:
            self.switches.append((number + self.lag, plan))
        # A settled step's void mark is needed until its flips are done; keep a generous history.
        if len(self.voids) > 4096:
            self.voids = {v for v in self.voids if v > number - 2048}
        while len(self.switches) > 1 and self.switches[1][0] <= number:
            self.switches.pop(0)
        self.open.pop(number, None)
