"""The simulated arbiter: one register for all nodes, which is slow and cannot always be reached.

What may live here: when it hears a question, when the answer comes, that one of them may be lost. What may not: what an
epoch means (`gcserver.core.epochs`), which faults strike (`faults.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gcserver.core import control_events as ce
from gcserver.core.arbiter import MemoryArbiter

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.world import World

#: after so long a node gives up waiting for an answer, seconds
PATIENCE = 2.0


class Register:
    """Linearisable: questions take effect one after the other. ``away[node]``: it cannot be reached until then."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.arbiter = MemoryArbiter()
        self.away: dict[str, float] = {}

    def ask(self, p: Process, e: ce.Arbitrate) -> None:
        """The question of a supervisor, which gets EpochWon or ArbiterSilent."""
        w = self.world
        if w.now < self.away.get(p.node.name, 0.0):
            if w.random.random() < 0.5:
                # The question got through, the answer will not.
                w.at(w.now + self._delay(), self._decide, None, e)
            w.at(w.now + PATIENCE, p.deliver, ce.ArbiterSilent(e.record, "the simulated register cannot be reached"))
        else:
            w.at(w.now + (self._delay() if e.expected else 0.0), self._decide, p, e)

    def _delay(self) -> float:
        return self.world.shape.arbiter_delay * self.world.random.random()

    def _decide(self, p: Process | None, e: ce.Arbitrate) -> None:
        newest = self.arbiter.compare_and_swap(e.expected, e.record)
        self.world.checks.on_epoch(newest)
        if p is not None:
            self.world.at(self.world.now + (self._delay() if e.expected else 0.0), p.deliver, ce.EpochWon(newest))
