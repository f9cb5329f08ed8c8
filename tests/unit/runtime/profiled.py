"""As much of a supervisor as a profiler uses, over a real control machine and real files.

What may live here: the stand-in, and values that tests of the profiler share. What may not: tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gcproto.timings import TensorTimes
from gcserver.core.control import ControlMachine
from gcserver.planner.profile import CodecCost, Curve, LinkCost, Profile, load
from gcserver.runtime.profiler import Profiler
from tests.unit.core.control_machine import declared

JOB = b"j" * 16
WORKER = (JOB, 0)
LINK = LinkCost(1e-3, 5e7, 0.1, 12)
COSTS = {"topk": CodecCost(Curve(((1, 2.0),)), Curve(((1, 1.0),)), Curve(((1, 0.5),)), 0.02)}


@dataclass
class Daemon:
    """As much of a supervisor as a profiler uses. Work for other threads waits until the test lets it run."""

    machine: ControlMachine
    folder: Path | None
    now: float = 1000.0
    warnings: list[str] = field(default_factory=list)
    waiting: list[tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node = "a"
        self.answers = True
        self.filing = SimpleNamespace(do=self.file)
        node, plan = SimpleNamespace(lanes=1), SimpleNamespace(profiles=self.folder)
        self.config = SimpleNamespace(node=node, plan=plan)
        self.profiler = Profiler(self, lambda: self.now)  # type: ignore[arg-type]

    def warn_once(self, text: str) -> None:
        self.warnings.append(text)

    def file(self, what: str, work: Callable[[], Any], then: Callable[[Any], None] = lambda _: None) -> bool:
        assert what.endswith(".json")
        if self.answers:
            self.waiting.append((work, then))
        return self.answers

    def close(self) -> None:
        self.profiler.close()
        self.work()

    def work(self) -> None:
        while self.waiting:
            work, then = self.waiting.pop(0)
            then(work())

    def times(self, *ready: int, rank: int = 0, step: int = 4, **more: Any) -> None:
        self.profiler.on_tensor_times((JOB, rank), TensorTimes(0, step, ready, 200_000, 500_000, 500_000, **more))

    def known(self) -> Profile:
        profile = self.profiler.profile(JOB, 0)
        assert profile is not None
        return profile

    def files(self) -> list[Profile]:
        assert self.folder is not None
        return [load(p.read_bytes(), p.name) for p in sorted(self.folder.glob("*.json"))]


def daemon(folder: Path | None = None) -> Daemon:
    """One node, one rank, a DDP domain of b (300) and w (300, 300)."""
    made = Daemon(declared(whole=False)[0], folder)
    made.profiler.on_declared(JOB)
    return made
