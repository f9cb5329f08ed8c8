"""Which faults happen in a soak, in which order, where and for how long: a function of a seed.

What may live here: the kinds of fault, what each may do to a job, the drawing. What may not: doing any of it
(`injectors.py`), clocks, judging what came of it (`verdicts.py`).

A fault begins ``gap`` seconds after training has recovered from the one before, so faults do not overlap, and what each
costs can be told apart. The order goes round by round: every round has every kind once, shuffled, so that a run of any
length sees as many kinds as it can.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

#: What a fault does to the job under `on_loss = fail`: nothing but delay, its end, or either.
Ends = Literal["never", "maybe", "always"]


@dataclass(frozen=True, slots=True)
class Times:
    """The times of one soak, seconds: of the daemons' configuration, and of the schedule."""

    #: `job.deadline` and `cluster.lease` of all daemons
    deadline: float = 15.0
    lease: float = 10.0
    #: shortest and longest quiet time between a recovery and the next fault
    gap: tuple[float, float] = (3.0, 7.0)
    #: how long faults that have a length last, between these
    hold: tuple[float, float] = (1.5, 4.0)
    #: training that is not back at its pace by then, after a fault is over, has not recovered
    patience: float = 45.0
    #: an error reaches every rank at most this much later than the daemons' rules say
    margin: float = 5.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault. ``errors``: what ranks may be told when it ends the job, names of `gcclient` exceptions.

    ``lasts``: "moment", "while" (as long as `Times.hold` says), "lease" (longer than the lease) or "deadline" (longer
    than the deadline).
    """

    name: str
    what: str
    lasts: Literal["moment", "while", "lease", "deadline"] = "moment"
    ends: Ends = "never"
    errors: frozenset[str] = frozenset()


_DAMAGE: Final = frozenset({"CorruptFrame", "StepTimeout", "PeerLost"})

KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("kill-worker", "kill -9 of a worker; torchrun starts all again", "moment", "always",
             frozenset({"WorkerLost"})),
        Kind("kill-lane", "kill -9 of a lane"),
        Kind("kill-supervisor", "kill -9 of a supervisor, which is started again"),
        Kind("kill-daemon", "kill -9 of a supervisor and its lanes; the daemon is started again"),
        Kind("stop-worker", "SIGSTOP, then SIGCONT, of a worker", "while"),
        Kind("stop-lane", "SIGSTOP, then SIGCONT, of a lane", "while"),
        Kind("stop-supervisor", "SIGSTOP, then SIGCONT, of a supervisor", "while"),
        Kind("stop-daemon", "SIGSTOP, then SIGCONT, of a supervisor and its lanes", "while"),
        Kind("stall-worker", "SIGSTOP of a worker beyond the deadline", "deadline", "always",
             frozenset({"StepTimeout"})),
        Kind("partition", "one node cut off from another, both ways", "while"),
        Kind("isolation", "one node cut off from all others beyond the lease", "lease", "always",
             frozenset({"PeerLost"})),
        Kind("reset", "every TCP connection of a node reset"),
        Kind("loss", "5 % of the packets that come to a node dropped", "while"),
        Kind("corruption", "bytes of a node's stream to its neighbour flipped", "while", "maybe", _DAMAGE),
        Kind("rate", "every link at a fifth of its rate", "while"),
        Kind("memory", "/dev/shm filled to the last page, and a daemon killed meanwhile", "while"),
        Kind("upgrade", "gcctl drain, then the daemon started again"),
    )
}  # fmt: skip

#: Those that fit into a minute: none lasts beyond lease or deadline.
BRIEF: Final = tuple(name for name, kind in KINDS.items() if kind.lasts in ("moment", "while"))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault to come: the ``number``-th, of kind ``kind``, at node ``node``, with ``other`` as the other end where
    it has one; ``gap`` seconds after the recovery from the one before, for ``hold`` seconds. ``seed`` is for chance of
    its own (which bytes are flipped)."""

    number: int
    kind: str
    node: int
    other: int
    gap: float
    hold: float
    seed: int


def limit(kind: Kind, times: Times) -> float:
    """Seconds from the beginning of a fault that ends the job until the daemons' rules must have told every rank.

    A dead worker shows at once, a silent node when its lease is over, everything else at the deadline.
    """
    if kind.errors == {"WorkerLost"}:
        return times.margin
    if kind.lasts == "lease":
        return times.lease + times.margin
    return times.deadline + times.margin


def plan(seed: int, nodes: int, times: Times, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Fault]:
    """Faults without end, the same for the same arguments. ValueError for an unknown kind, none, or a single node."""
    unknown = [name for name in kinds if name not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"fault kinds {', '.join(unknown) or '(none)'}: expected some of {', '.join(KINDS)}")
    if nodes < 2:
        raise ValueError(f"{nodes} node(s): expected at least 2, or there is no link to cut")
    return _draw(random.Random(seed), nodes, times, kinds)


def _draw(chance: random.Random, nodes: int, times: Times, kinds: Sequence[str]) -> Iterator[Fault]:
    number = 0
    while True:
        for name in chance.sample(list(kinds), len(kinds)):
            node = chance.randrange(nodes)
            other = (node + chance.randrange(1, nodes)) % nodes
            gap, held = chance.uniform(*times.gap), chance.uniform(*times.hold)
            hold = {"moment": 0.0, "while": held, "lease": times.lease + held, "deadline": times.deadline + held}
            number += 1
            yield Fault(number, name, node, other, gap, hold[KINDS[name].lasts], chance.randrange(1 << 32))
