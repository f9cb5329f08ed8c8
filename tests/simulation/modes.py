"""What operators say of who makes a simulated job's plans, and what must become of that.

What may live here: saying it, at the right node or wrongly, and a check of what nodes keep. What may not: plans
(`operators.py`).

G8: what an operator said of the mode is kept as it was said, and never goes back to what was said before.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from gcproto.messages import PlanMode
from gcproto.modes import MODES, QUALITIES
from gcserver.core import control_events as ce
from tests.simulation.checks import Violation
from tests.simulation.strangers import say

if TYPE_CHECKING:
    from gcserver.core.job import Job
    from tests.simulation.processes import ControlProcess, Process
    from tests.simulation.world import World


class Modes:
    """What was said in one world, and what each node kept of it."""

    def __init__(self) -> None:
        #: by job, as an operator said it
        self.said: set[tuple[bytes, str, str]] = set()
        #: by job and node: all that it ever kept, in order
        self.kept: dict[tuple[bytes, str], list[PlanMode]] = {}
        #: by job and life of a node's memory: what that has now
        self._now: dict[tuple[bytes, int], PlanMode] = {}

    def on_save(self, p: Process, e: ce.SaveJob) -> None:
        at, said = (e.job, p.node.memory.generation), e.memory.said
        before = self._now.get(at)
        if said == before:
            return
        if said is None or (before is not None and said.age <= before.age):
            raise Violation("G8", f"{p.name} kept {before}, and now {said}")
        if (e.job, said.mode, said.quality) not in self.said:
            raise Violation("G8", f"{p.name} keeps {said}, which nobody said")
        self._now[at] = said
        self.kept.setdefault((e.job, p.node.name), []).append(said)

    def on_forget(self, p: Process, job: bytes) -> None:
        self._now.pop((job, p.node.memory.generation), None)


def says_mode(w: World, p: ControlProcess, job: Job, mode: str, quality: str, anew: bool = True) -> None:
    w.modes.said.add((job.id, mode, quality))
    p.deliver(ce.SayMode(job.id, mode, quality, anew))


def modes(w: World, r: Random) -> None:
    """At first members an operator says it several times; some of them are killed while it is on its way."""
    for when in sorted(r.uniform(0.0, 0.3) for _ in range(r.choice([1, 3]))):
        w.at(w.now + when, _mode, w, r)


def odd_modes(w: World, r: Random) -> None:
    """A mode that no release knows, or of no job: from an operator, and from a peer."""
    for p, job in _firsts(w):
        p.deliver(ce.SayMode(b"n" * 16, "auto", "safe", True))
        p.deliver(ce.SayMode(job.id, r.choice(MODES), "wobble", True))
        for other in job.record.members:
            if other.node != p.node.name:
                say(p, other.node, PlanMode(job.id, r.choice(["", "wobble"]), "", 0, 9))


def _firsts(w: World) -> list[tuple[ControlProcess, Job]]:
    """The supervisors that answer now and are their jobs' first members."""
    there = [p for n in w.nodes if (p := n.supervisor) is not None and p.alive and not p.paused]
    return [(p, j) for p in there for j in p.machine.jobs.values() if j.ended is None and j.first == p.node.name]


def _mode(w: World, r: Random) -> None:
    if firsts := _firsts(w):
        p, job = r.choice(firsts)
        says_mode(w, p, job, r.choice(MODES), r.choice(["", *QUALITIES]), r.random() < 0.7)
        if r.random() < 0.3 and all(x.job for x in w.workers):
            w.at(w.now + r.choice([0.0001, 0.002, 0.01]), w.kill, p)


HARMLESS = (modes, odd_modes)
