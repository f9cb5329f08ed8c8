"""What a simulated daemon remembers of its jobs, spoiled before it is started again.

What may live here: memory that cannot be what a daemon wrote, and the restart that finds it. What may not: memory that
is gone (`mistakes.py`, `faults.py`), writes that were torn by a kill (`memory.py`).

A daemon drops such a job and goes on; its workers and the other members are told (G6), nobody gets a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import msgspec

from gcproto.epoch_messages import EpochStart
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareDomain, PlanMode
from gcserver.core.control_events import JobMemory
from gcserver.core.restoring import MAX_STEP
from tests.simulation.memory import Ledger

if TYPE_CHECKING:
    from tests.simulation.world import World

Spoil = Callable[[JobMemory, Ledger], JobMemory]


def _record(memory: JobMemory, **fields: object) -> JobMemory:
    return replace(memory, record=msgspec.structs.replace(memory.record, **fields))


def _group(memory: JobMemory, **fields: object) -> JobMemory:
    """Of the first process group another declaration."""
    (declared, sections), *rest = memory.domains
    return replace(memory, domains=((msgspec.structs.replace(declared, **fields), sections), *rest))


def _sections(memory: JobMemory, *sections: Section) -> JobMemory:
    (declared, _), *rest = memory.domains
    return replace(memory, domains=((declared, sections), *rest))


def _ranks(memory: JobMemory) -> tuple[int, ...]:
    declared: DeclareDomain = memory.domains[0][0]
    return declared.ranks


def _far(memory: JobMemory, ledger: Ledger) -> JobMemory:
    ledger.settled = MAX_STEP
    return memory


def _falling(memory: JobMemory, ledger: Ledger) -> JobMemory:
    ledger.switches = [(9, 3), (5, 4)]
    return memory


def _unknown_plan(memory: JobMemory, ledger: Ledger) -> JobMemory:
    ledger.switches = [(0, 0), (5, 1 << 30)]
    return memory


def _tensor(elements: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("t", (elements,), 1),)


#: by what is then wrong
SPOILS: dict[str, Spoil] = {
    "more ranks than there are": lambda m, d: _record(m, world_size=m.record.world_size + 1),
    "no time to wait": lambda m, d: _record(m, deadline=-1.0),
    "no such partition": lambda m, d: _record(m, partition_bytes=m.record.partition_bytes + 1),
    "an epoch begun nowhere": lambda m, d: _record(m, starts=(EpochStart(1, 0, 5, 2),)),
    "a rank of somebody else": lambda m, d: replace(m, ranks=(*m.ranks, 99)),
    "a proposal nobody made": lambda m, d: replace(m, proposal=1 << 30),
    "a process group twice": lambda m, d: replace(m, domains=(*m.domains, m.domains[0])),
    "a rank twice in a group": lambda m, d: _group(m, ranks=(*_ranks(m), _ranks(m)[0])),
    "a rank beyond the world": lambda m, d: _group(m, ranks=(*_ranks(m), 99)),
    "tensors of no size": lambda m, d: _sections(m, Section(0, _tensor(-1))),
    "a section out of its place": lambda m, d: _sections(m, Section(7, _tensor(4))),
    "a step nobody counts to": _far,
    "plans that come before their time": _falling,
    "a plan nobody knows": _unknown_plan,
    "a mode nobody knows": lambda m, d: replace(m, said=PlanMode(m.record.job, "wobble")),
}


def spoiled(w: World, r: Random) -> None:
    """A daemon is killed, and finds its memory of a job changed into what it cannot have written."""
    ready = [
        (n, job)
        for n in w.nodes
        if n.supervisor is not None and n.supervisor.alive and not n.gone
        for job, memory in n.memory.jobs.items()
        if memory.domains and any(x.job == job and x.threads and not x.over for x in w.workers if x.node is n)
    ]
    if not ready:
        return
    node, job = r.choice(ready)
    what = r.choice(list(SPOILS))
    w.fatal = w.fatal or f"{node.name} remembers {what}"
    memory = node.memory.jobs[job]
    # What the checks know of the job they have from its record, which is about to be another one.
    for spec in w.specs[memory.record.label].domains:
        w.describe((job, spec.id))
    assert node.supervisor is not None
    w.kill(node.supervisor)
    node.memory.jobs[job] = SPOILS[what](memory, node.memory.ledger((job, memory.domains[0][0].domain)))
