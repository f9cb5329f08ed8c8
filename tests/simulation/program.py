"""What simulated jobs compute: domains, sections, which blocks a step pushes, the gradients themselves.

What may live here: pure functions of a program's description. What may not: workers' behaviour (`workers.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gcproto import messages
from gcproto.agreed import Resumed
from gcproto.manifest import Block, Section
from gcproto.wire import Flag
from gcserver.core.job import CALL_LAG, SCOPED_LAG
from tests.simulation.memory import WIDTH, Vector


@dataclass(frozen=True, slots=True)
class DomainSpec:
    """A domain's program: what all its ranks declare and do, in the same order.

    ``late[i]`` is the step before which section i is declared (1: at once); ``nan`` maps a step to the rank
    whose first gradient is not finite; ``skip`` steps leave out the lowest address (an unused parameter). ``resumed``:
    what it goes on from, as if an earlier job had been saved.
    """

    id: int
    ranks: tuple[int, ...]
    scoped: bool
    codec: str
    sections: tuple[Section, ...]
    late: tuple[int, ...]
    steps: int
    nan: dict[int, int]
    skip: frozenset[int]
    window: int
    seed: int
    whole: bool = False
    warmup: int = 0
    resumed: Resumed | None = None

    @property
    def lag(self) -> int:
        return SCOPED_LAG if self.scoped else CALL_LAG

    def message(self) -> messages.DeclareDomain:
        return messages.DeclareDomain(
            f"group-{self.id}", self.id, self.ranks, self.scoped, self.codec, self.whole,
            warmup=self.warmup, resumed=self.resumed,
        )  # fmt: skip

    def keys(self, step: int, blocks: list[tuple[Block, ...]]) -> list[Block]:
        """The blocks of ``step``, in the order they are pushed: highest address first, as backward produces them."""
        there = [i for i in range(len(self.sections)) if self.late[i] <= step]
        if not self.scoped:
            there = [there[step % len(there)]]
        chosen = sorted((b for i in there for b in blocks[i]), key=lambda b: -b.key)
        return chosen[:-1] if step in self.skip and len(chosen) > 1 and self.scoped else chosen

    def is_nan(self, step: int, rank: int, first: bool) -> bool:
        return first and self.nan.get(step) == rank

    def value(self, step: int, key: int, rank: int) -> Vector:
        h = hash((self.seed, self.id, step, key, rank))
        return tuple(((h >> (7 * i)) & 127) - 64 for i in range(WIDTH))

    def flags(self, key: int) -> int:
        return int(Flag.AVERAGE) if hash((self.seed, key)) & 1 else 0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job: its label, on which nodes its ranks are (by node index, ascending ranks), its domains, what becomes of it
    when a node is lost, and at how many points of the program lost ones may come back."""

    label: str
    layout: tuple[tuple[int, int], ...]
    domains: tuple[DomainSpec, ...]
    on_loss: str = "fail"
    points: int = 0

    def pause(self, domain: DomainSpec, point: int) -> int:
        """The step of a domain after which its ranks stand at an admission point, from 0; beyond all where there is
        none."""
        return 1 << 62 if point >= self.points else domain.steps * (point + 1) // (self.points + 1)

    @property
    def world_size(self) -> int:
        return sum(n for _, n in self.layout)
