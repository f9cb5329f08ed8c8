"""Espresso's decision tree: every way to synchronise one tensor, generated from the grammar (Espresso, section 4.2).

What may live here: tasks, options, the grammar, and what a user may rule out. What may not: costs, tensors, plans.

An option is a series of tasks. Five sub-trees name its parts, as in figure 7 of the paper::

    T1 (second intra step, input dense)              = Comm2 | Comp Comm2c Decomp
    T2 (second intra step, input compressed)         = Comm2c Decomp | Decomp T1
    T5 (second inter step and T1 or T2, input dense) = Comm2 T1 | Comp Comm2c T2
    T3 (inter and second intra, input dense)         = Comm T1 | Comm1 T5
    T4 (inter and second intra, input compressed)    = Commc T2 | Comm1c Comm2c T2 | Comm1c Decomp T5
    Flat = Comm | Comm1 T1 | Comp Commc Decomp | Comp Comm1c T2
    Hier = Comm1 (T3 | Comp T4) | Comp Comm1c (Decomp (T3 | Comp T4) | T4)

The first step of a divisible scheme decides its second, compressed or not: reduce-scatter and all-to-all end with
all-gather, reduce and gather with broadcast. ``Comp`` and ``Decomp`` choose a device each time, so that the tree has
4341 options with two devices and 174 with one; 9 of them compress nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache


class Device(enum.IntEnum):
    """Where a tensor is compressed or decompressed."""

    GPU = 0
    CPU = 1


class Level(enum.IntEnum):
    """Among whom a collective runs: all ranks, the ranks of one node, or the same rank of every node."""

    FLAT = 0
    INTRA = 1
    INTER = 2


class Action(enum.Enum):
    """The eight tasks of the paper's table 3; ``C`` marks those on compressed tensors."""

    COMP = "comp"
    DECOMP = "decomp"
    COMM = "comm"
    COMM1 = "comm1"
    COMM2 = "comm2"
    COMM_C = "comm*"
    COMM1_C = "comm1*"
    COMM2_C = "comm2*"


class Routine(enum.Enum):
    """The collectives of the paper's table 2."""

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce-scatter"
    REDUCE = "reduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    GATHER = "gather"


#: First step of a divisible scheme -> its second.
SECOND = {
    Routine.REDUCE_SCATTER: Routine.ALLGATHER,
    Routine.REDUCE: Routine.BROADCAST,
    Routine.ALLTOALL: Routine.ALLGATHER,
    Routine.GATHER: Routine.BROADCAST,
}
FIRST = (Routine.REDUCE_SCATTER, Routine.REDUCE)
FIRST_C = (Routine.ALLTOALL, Routine.GATHER)


@dataclass(frozen=True, slots=True)
class Task:
    """One step of an option: a collective at a level, or encoding or decoding on a device."""

    action: Action
    routine: Routine | None = None
    level: Level | None = None
    device: Device | None = None

    @property
    def compressed(self) -> bool:
        """Whether this is a collective whose input is compressed."""
        return self.action in (Action.COMM_C, Action.COMM1_C, Action.COMM2_C)

    def __str__(self) -> str:
        if self.device is not None:
            return f"{self.action.value}[{self.device.name}]"
        assert self.routine is not None
        assert self.level is not None
        return f"{self.level.name.lower()}-{self.routine.value}{'*' if self.compressed else ''}"


@dataclass(frozen=True, slots=True)
class Option:
    """One path through the tree: how a tensor is compressed and exchanged; ``*`` in its text marks compressed steps."""

    tasks: tuple[Task, ...]

    @property
    def compressions(self) -> int:
        return sum(t.action is Action.COMP for t in self.tasks)

    @property
    def devices(self) -> frozenset[Device]:
        return frozenset(t.device for t in self.tasks if t.device is not None)

    @property
    def flat(self) -> bool:
        return any(t.level is Level.FLAT for t in self.tasks)

    def on(self, device: Device) -> Option:
        """The same steps with everything that is compressed or decompressed on ``device``."""
        return Option(tuple(t if t.device is None else Task(t.action, device=device) for t in self.tasks))

    def __str__(self) -> str:
        return " > ".join(str(t) for t in self.tasks)


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a user rules out (section 4.2.2): devices, flat collectives, more than so many compressions a tensor."""

    max_compressions: int | None = None
    gpu: bool = True
    cpu: bool = True
    flat: bool = True

    @property
    def devices(self) -> tuple[Device, ...]:
        return (Device.GPU,) * self.gpu + (Device.CPU,) * self.cpu

    def allow(self, option: Option) -> bool:
        """Whether ``option`` keeps to the limits on flat collectives and on the number of compressions."""
        if option.flat and not self.flat:
            return False
        return self.max_compressions is None or option.compressions <= self.max_compressions


#: Nothing is ruled out.
ANY = Constraints()


@lru_cache(maxsize=32)
def options(constraints: Constraints = ANY) -> tuple[Option, ...]:
    """All options within ``constraints``, those that compress nothing first; the order is always the same.

    4341 without constraints, 174 with one device. Without any device the 9 that compress nothing are left.
    """
    tree = _Tree(constraints.devices)
    found = [Option(tasks) for tasks in (*tree.flat(), *tree.hierarchical())]
    return tuple(sorted((o for o in found if constraints.allow(o)), key=lambda o: o.compressions > 0))


_Tasks = tuple[Task, ...]


class _Tree:
    """The grammar for given devices; each method yields the series of tasks of one sub-tree."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.comp = [Task(Action.COMP, device=d) for d in devices]
        self.decomp = [Task(Action.DECOMP, device=d) for d in devices]

    def t1(self, level: Level, second: Routine) -> Iterator[_Tasks]:
        yield (Task(Action.COMM2, second, level),)
        for comp in self.comp:
            for decomp in self.decomp:
                yield comp, Task(Action.COMM2_C, second, level), decomp

    def t2(self, level: Level, second: Routine) -> Iterator[_Tasks]:
        for decomp in self.decomp:
            yield Task(Action.COMM2_C, second, level), decomp
            for rest in self.t1(level, second):
                yield decomp, *rest

    def t5(self, inter: Routine, intra: Routine) -> Iterator[_Tasks]:
        for rest in self.t1(Level.INTRA, intra):
            yield Task(Action.COMM2, inter, Level.INTER), *rest
        for comp in self.comp:
            for rest in self.t2(Level.INTRA, intra):
                yield comp, Task(Action.COMM2_C, inter, Level.INTER), *rest

    def t3(self, intra: Routine) -> Iterator[_Tasks]:
        for rest in self.t1(Level.INTRA, intra):
            yield Task(Action.COMM, Routine.ALLREDUCE, Level.INTER), *rest
        for first in FIRST:
            for rest in self.t5(SECOND[first], intra):
                yield Task(Action.COMM1, first, Level.INTER), *rest

    def t4(self, intra: Routine) -> Iterator[_Tasks]:
        for rest in self.t2(Level.INTRA, intra):
            yield Task(Action.COMM_C, Routine.ALLGATHER, Level.INTER), *rest
        for first in FIRST_C:
            step = Task(Action.COMM1_C, first, Level.INTER)
            for rest in self.t2(Level.INTRA, intra):
                yield step, Task(Action.COMM2_C, SECOND[first], Level.INTER), *rest
            for decomp in self.decomp:
                for rest in self.t5(SECOND[first], intra):
                    yield step, decomp, *rest

    def flat(self) -> Iterator[_Tasks]:
        yield (Task(Action.COMM, Routine.ALLREDUCE, Level.FLAT),)
        for first in FIRST:
            for rest in self.t1(Level.FLAT, SECOND[first]):
                yield Task(Action.COMM1, first, Level.FLAT), *rest
        for comp in self.comp:
            for decomp in self.decomp:
                yield comp, Task(Action.COMM_C, Routine.ALLGATHER, Level.FLAT), decomp
            for first in FIRST_C:
                for rest in self.t2(Level.FLAT, SECOND[first]):
                    yield comp, Task(Action.COMM1_C, first, Level.FLAT), *rest

    def hierarchical(self) -> Iterator[_Tasks]:
        for first in FIRST:
            for rest in self._inter(SECOND[first]):
                yield Task(Action.COMM1, first, Level.INTRA), *rest
        for comp in self.comp:
            for first in FIRST_C:
                start = comp, Task(Action.COMM1_C, first, Level.INTRA)
                for decomp in self.decomp:
                    for rest in self._inter(SECOND[first]):
                        yield *start, decomp, *rest
                for rest in self.t4(SECOND[first]):
                    yield *start, *rest

    def _inter(self, intra: Routine) -> Iterator[_Tasks]:
        yield from self.t3(intra)
        for comp in self.comp:
            for rest in self.t4(intra):
                yield comp, *rest
