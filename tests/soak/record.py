"""What happened in a soak: steps, faults, failures and memory with their times; the part of it that workers write.

What may live here: the record as data, reading workers' logs into it, writing it as JSON. What may not: judging it
(`verdicts.py`), processes.

All times are seconds of the machine's monotonic clock (`time.monotonic`), which its processes share.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab.jsonlog import JsonLog
from tests.soak.schedule import Fault


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank of one life of the job learned that it was over. ``error``: the exception's name; empty: the rank
    said nothing until it was ended by force. ``typed``: whether the error is one of gcclient's."""

    life: int
    rank: int
    at: float
    error: str
    typed: bool
    text: str = ""


@dataclass(slots=True)
class Injected:
    """One fault as it happened: ``ended`` is when it was undone (a moment after it began where there is nothing to
    undo), ``life`` the life of the job it hit, ``victim`` the rank whose worker it killed or held, -1 where none,
    ``after`` the life that trained on; equal to ``life`` where the job went on. ``notes``: what the injector has to
    say (how many bytes it flipped)."""

    fault: Fault
    began: float
    life: int
    victim: int = -1
    ended: float = 0.0
    after: int = 0
    recovered: float | None = None
    notes: str = ""


@dataclass(slots=True)
class Life:
    """One incarnation of the job: rank r on node ``nodes[r]``, steps from ``first`` on.

    ``steps[r]``: (time, step, wrong elements) of every step that rank r got, in order. ``joined``: when each rank
    was in. ``left``: ranks that left in good order.
    """

    number: int
    nodes: tuple[int, ...]
    first: int
    started: float
    joined: dict[int, float] = field(default_factory=dict)
    steps: dict[int, list[tuple[float, int, int]]] = field(default_factory=lambda: defaultdict(list))
    left: set[int] = field(default_factory=set)
    _complete: list[float] = field(default_factory=list)

    def complete(self) -> list[float]:
        """When the last rank got the k-th result of this life, for as many results as every rank has."""
        ranks = [self.steps[rank] for rank in range(len(self.nodes))]
        for k in range(len(self._complete), min(map(len, ranks))):
            self._complete.append(max(rank[k][0] for rank in ranks))
        return self._complete

    @property
    def last(self) -> int:
        """The last step that every rank has; the one before ``first`` if there is none."""
        return self.first - 1 + len(self.complete())


@dataclass(slots=True)
class Sample:
    """Shared memory that all daemons hold at a time, bytes, and the jobs they have memory of, summed over nodes."""

    at: float
    shared: int
    jobs: int


@dataclass(slots=True)
class Record:
    """Everything. ``calm``: (from, to) of the undisturbed stretches at the beginning and the end."""

    seed: int
    nodes: int
    began: float
    lives: list[Life] = field(default_factory=list)
    faults: list[Injected] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    calm: list[tuple[float, float]] = field(default_factory=list)
    #: what went wrong with the run itself, such as a daemon that did not come back
    troubles: list[str] = field(default_factory=list)

    def completions(self) -> list[tuple[float, int]]:
        """(time, life) of every step that all ranks of a life got, in order of time."""
        return sorted((at, life.number) for life in self.lives for at in life.complete())

    def to_json(self) -> dict[str, Any]:
        """Plain data; times count from the beginning. Steps of all ranks are left out but for their completion."""
        began = self.began
        return {
            "seed": self.seed,
            "nodes": self.nodes,
            "faults": [
                {
                    **asdict(each.fault),
                    "began": each.began - began,
                    "ended": each.ended - began,
                    "recovered": None if each.recovered is None else each.recovered - began,
                    "life": each.life,
                    "after": each.after,
                    "victim": each.victim,
                    "notes": each.notes,
                }
                for each in self.faults
            ],
            "failures": [{**asdict(each), "at": each.at - began} for each in self.failures],
            "lives": [
                {"number": life.number, "nodes": life.nodes, "first": life.first, "last": life.last}
                for life in self.lives
            ],
            "samples": [{**asdict(each), "at": each.at - began} for each in self.samples],
            "calm": [(start - began, end - began) for start, end in self.calm],
            "completions": [(round(at - began, 4), life) for at, life in self.completions()],
            "troubles": self.troubles,
        }


class Log:
    """What the worker of a rank writes."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self._log = JsonLog(path)

    def update(self, life: Life, failures: list[Failure]) -> None:
        """Puts what is new into ``life`` and ``failures``."""
        for line in self._log.news():
            self._take(line, life, failures)

    def _take(self, line: dict[str, Any], life: Life, failures: list[Failure]) -> None:
        if "step" in line:
            life.steps[self.rank].append((line["t"], line["step"], line["wrong"]))
        elif "error" in line:
            failures.append(
                Failure(life.number, self.rank, line["t"], line["error"], line["typed"], line.get("text", ""))
            )
        elif "left" in line:
            life.left.add(self.rank)
        else:
            life.joined[self.rank] = line["t"]
