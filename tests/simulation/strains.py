"""What worlds bear besides faults of machines and networks: clocks, slow readers, mistakes of people and programs.

What may live here: drawing them from the seed, and those that are about time. What may not: what workers do wrong
(`mistakes.py`), what foreign or faulty nodes send (`strangers.py`), what operators ask for (`operators.py`) and say
(`modes.py`), what comes late (`latecomers.py`), what is beyond bounds (`bounds.py`), what a restart finds
(`remembered.py`), which are only listed here.

All come from generators of their own, so that the faults of `faults.py` strike a seed as they did before these came.
Harmless ones must change nothing for any job; deadly ones end a job, with a fault that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.simulation import bounds, latecomers, mistakes, modes, operators, remembered, strangers

if TYPE_CHECKING:
    from tests.simulation.world import World

Strain = Callable[["World", Random], None]


def skew(w: World) -> None:
    """Every node has a clock of its own: days apart from the others', and up to a tenth faster or slower."""
    r = Random(w.seed * 64 + 21)
    for n in w.nodes:
        n.ahead, n.pace = r.choice([0.0, r.uniform(0, 3e5)]), r.uniform(0.9, 1.1)


def slow_reader(w: World, r: Random) -> None:
    """A node takes long to read what arrives: whoever sends to it runs out of credit."""
    n = r.choice(w.nodes)
    n.reading, n.slow_until = r.choice([0.001, 0.004, 0.01]), w.now + r.choice([0.1, 0.5, 1.5])


def expel(w: World, r: Random) -> None:
    """A node's key is taken out of the lists of all others, who read them within a second; links end for a minute."""
    if len(w.nodes) > 1:
        n = r.choice(w.nodes)
        w.strike(f"{n.name} is expelled", n.name)
        for other in w.nodes:
            if other is not n:
                w.network.partition(n.name, other.name, w.now + 60.0, True)
                w.at(w.now + r.uniform(0.0, 1.0), other.expelled.append, n.name)


def slow_worker(w: World, r: Random) -> None:
    """A rank computes longer than the others from now on."""
    r.choice(w.workers).slower = r.choice([0.05, 0.2, 0.8])


HARMLESS: dict[Strain, int] = {
    slow_reader: 4,
    slow_worker: 3,
    **dict.fromkeys(operators.HARMLESS, 3),
    operators.by_name: 6,
    **dict.fromkeys(strangers.HARMLESS, 2),
    **dict.fromkeys(mistakes.HARMLESS, 1),
}
#: those that can go wrong in several ways more often
DEADLY: dict[Strain, int] = {**dict.fromkeys(mistakes.DEADLY, 2), **dict.fromkeys(strangers.DEADLY, 3)}
DEADLY |= {mistakes.odd_domain: 6, mistakes.odd_section: 4, mistakes.leaves_out: 4, strangers.odd_offer: 4}
#: drawn beside those: what comes rarely otherwise
RARE: dict[Strain, int] = {
    **dict.fromkeys(latecomers.HARMLESS, 2),
    **dict.fromkeys(bounds.HARMLESS, 1),
    operators.by_name: 1,
    mistakes.lacks_a_codec: 1,
}
RARE_DEADLY: dict[Strain, int] = {
    remembered.spoiled: 12,
    **dict.fromkeys(latecomers.DEADLY, 2),
    **dict.fromkeys(bounds.DEADLY, 2),
    **dict.fromkeys(strangers.DEADLY, 3),
    mistakes.odd_domain: 2,
}
#: share of all worlds in which a node is expelled, in which an operator says who makes the plans
EXPELLED = 0.03
TOLD = 0.15
#: these make a program wrong before it starts
AT_START = frozenset((*mistakes.AT_START, *latecomers.AT_START))


def draw(w: World) -> list[tuple[float, Strain, Random]]:
    """(when, what, generator) of a seed's strains; sets its clocks."""
    r = Random(w.seed * 64 + 37)
    if r.random() < 0.5:
        skew(w)
    out: list[tuple[float, Strain, Random]] = []
    if r.random() < 0.4:
        chosen = r.choices(list(HARMLESS), list(HARMLESS.values()), k=r.choice([1, 2, 4]))
        out += [(r.uniform(0.05, 0.4), strain, r) for strain in chosen]
    own = Random(w.seed * 64 + 59)
    if own.random() < EXPELLED:
        out.append((own.uniform(0.1, 0.4), expel, own))
    said = Random(w.seed * 64 + 61)
    if said.random() < TOLD:
        out.append((said.uniform(0.05, 0.4), said.choice(modes.HARMLESS), said))
    if r.random() < 0.15:
        strain = r.choices(list(DEADLY), list(DEADLY.values()))[0]
        out.append((0.0 if strain in AT_START else r.uniform(0.1, 0.4), strain, r))
    return out + _rare(w, Random(w.seed * 64 + 53))


def _rare(w: World, r: Random) -> list[tuple[float, Strain, Random]]:
    out: list[tuple[float, Strain, Random]] = []
    if r.random() < 0.25:
        chosen = r.choices(list(RARE), list(RARE.values()), k=r.choice([1, 2, 4]))
        out += [(r.uniform(0.05, 0.4), strain, r) for strain in chosen]
    if any(job.on_loss != "fail" for job in w.shape.jobs) and r.random() < 0.3:
        out.append((r.uniform(0.1, 0.4), r.choice(latecomers.LOSSY), r))
    if r.random() < 0.08:
        strain = r.choices(list(RARE_DEADLY), list(RARE_DEADLY.values()))[0]
        out.append((0.0 if strain in AT_START else r.uniform(0.1, 0.4), strain, r))
    return out
