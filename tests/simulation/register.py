"""The simulated arbiter: one register for all nodes, which is slow and cannot always be reached.

What may live here: when it hears a question, when the answer comes, that one of them may be lost. What may not: what an
epoch means (`gcserver.core.epochs`), which faults strike (`faults.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gcproto.messages import Fault
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
        self.since: dict[str, float] = {}

    def leave(self, nodes: list[str], until: float) -> None:
        """These cannot reach it until then."""
        for node in nodes:
            if self.world.now >= self.away.get(node, 0.0):
                self.since[node] = self.world.now
            self.away[node] = until

    def on_told(self, p: Process, m: object) -> None:
        """A node halts as it may: its deadline counts from the first loss, the lease of the next one may end later, and
        since before then the register has been away for it."""
        w, node = self.world, p.node
        if not isinstance(m, Fault) or m.kind != "StepIndeterminate" or w.now >= self.away.get(node.name, 0.0):
            return
        leased = w.now + (p.machine.config.lease - m.elapsed) / node.pace + 2 * w.shape.tick
        if m.elapsed > w.shape.deadline and self.since[node.name] <= leased:
            w.excused.add(node.name)

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
