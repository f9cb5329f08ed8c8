"""Inputs over targets and processes.

What may live here: who feeds what, progress, and what is known of a process that ended at an input. What may not: how
one target is fed (`harness.py`), the command line (`__main__.py`).
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing as mp
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, Final

from tests.fuzz import harness
from tests.fuzz.harness import Failure, Result
from tests.fuzz.targets import LIVE, LIVE_INPUTS, TARGETS, share
from tests.integration.forked import ends_with_parent

#: Inputs of one target that one process is given at a time.
SLICE: Final = 25_000
#: Address space beyond what a process has when it begins: what is not bounded before it is allocated shows.
ROOM: Final = 3 << 30
#: A process that does not come to its next input within so many seconds, though it may be waiting, is stuck. After the
#: last one a job of running daemons has to begin and end in it, on a machine that may have other work.
STUCK: Final = 240


@dataclass(slots=True)
class Slice:
    """Inputs ``first`` to ``first + count`` of one target, those that are fed ``until`` then (monotonic seconds)."""

    target: str
    seed: int
    first: int
    count: int
    until: float = math.inf

    def indices(self) -> Iterator[int]:
        for index in range(self.first, self.first + self.count):
            if time.monotonic() > self.until:
                return
            yield index


@dataclass(slots=True)
class Worker:
    """A process at work on a slice; ``at`` is the number of the input that it has before it."""

    slice: Slice
    process: Any
    pipe: connection.Connection
    at: Any
    began: float = field(default_factory=time.monotonic)


def slices(names: list[str], inputs: int, seed: int, jobs: int, until: float = math.inf) -> list[Slice]:
    """So many inputs over the targets, by their shares (a running daemon takes few), each over all processes."""
    todo: list[Slice] = []
    live = [n for n in names if n == LIVE]
    quick = [n for n in names if n != LIVE]
    for name in live:
        todo.append(Slice(name, seed, 0, inputs if not quick else min(LIVE_INPUTS, inputs), until))
    left, shares = max(inputs - sum(s.count for s in todo), 0), sum(map(share, quick))
    given = {name: left * share(name) // shares for name in quick}
    for name in quick[:1]:
        given[name] += left - sum(given.values())
    # Those of which many are fed in little time come first: what they leave of their turns is the others'.
    for name, count in sorted(given.items(), key=lambda pair: -share(pair[0])):
        size = max(min(SLICE, -(-count // jobs)), 1)
        todo += [Slice(name, seed, first, min(size, count - first), until) for first in range(0, count, size)]
    return todo


def turn(part: Slice, waiting: int, jobs: int, now: float) -> Slice:
    """A slice that begins while so many wait, itself included: of the time that is left it may take as much as all
    others, so that the last targets have theirs on a slow machine too."""
    return replace(part, until=now + (part.until - now) * min(jobs / waiting, 1.0))


def _work(part: Slice, pipe: connection.Connection, at: Any) -> None:
    """One slice, in a process of its own, which does not outlive the one that started it."""
    ends_with_parent()
    # The process this one is forked from ends when nobody holds the other end of this pipe.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    faulthandler.enable()
    if part.target != LIVE:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))

    armed = 0.0

    def heard(index: int) -> None:
        nonlocal armed
        # It takes a thread each time, which is more than many an input takes.
        if (now := time.monotonic()) - armed > 1:
            armed = now
            faulthandler.dump_traceback_later(STUCK, exit=True)
        at.value = index

    pipe.send(harness.run(TARGETS[part.target], part.seed, part.indices(), part.count, heard))


def _lost(worker: Worker) -> Result:
    """A process that ended without a word: the input it had before it is to blame."""
    part, index = worker.slice, worker.at.value
    data = b""
    if index >= 0 and part.target != LIVE:
        data = TARGETS[part.target]().draw(harness.generator(part.target, part.seed, index))
    error = f"the process ended with {worker.process.exitcode} at this input"
    return Result(
        part.target, max(index - part.first, 0), Counter(), [Failure(part.target, part.seed, index, error, data)]
    )


def run_all(todo: list[Slice], jobs: int) -> list[Result]:
    """All slices, so many at once, with progress on stderr."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.fuzz.ready"])
    todo, running, done = list(todo), dict[Any, Worker](), list[Result]()
    total, began, said = sum(s.count for s in todo), time.monotonic(), 0.0
    while todo or running:
        while todo and len(running) < jobs:
            part = turn(todo.pop(0), len(todo) + 1, jobs, time.monotonic())
            ours, theirs = context.Pipe(False)
            at = context.Value("q", -1, lock=False)
            process = context.Process(target=_work, args=(part, theirs, at))
            process.start()
            theirs.close()
            running[ours] = Worker(part, process, ours, at)
        for pipe in connection.wait(list(running), 1.0):
            worker = running.pop(pipe)
            try:
                result = worker.pipe.recv()
            except EOFError:
                worker.process.join()
                result = _lost(worker)
            worker.process.join()
            done.append(result)
            # At once: whoever ends the run early sees it too.
            for failure in result.failures[:3]:
                print(f"{failure.command}: {failure.error}", file=sys.stderr, flush=True)
        if time.monotonic() - said > 5:
            said = time.monotonic()
            fed = sum(r.inputs for r in done) + sum(max(w.at.value - w.slice.first, 0) for w in running.values())
            bad = sum(len(r.failures) for r in done)
            names = ", ".join(sorted({w.slice.target for w in running.values()}))
            print(
                f"{said - began:6.0f} s  {fed:>9}/{total} inputs, {bad} failures  {names}", file=sys.stderr, flush=True
            )
    return done


def merged(results: list[Result]) -> list[Result]:
    """One result a target."""
    out: dict[str, Result] = {}
    for r in results:
        m = out.setdefault(r.target, Result(r.target))
        m.inputs += r.inputs
        m.outcomes += r.outcomes
        m.failures += r.failures
        # that of the slice which grew most, also where all became smaller
        if not m.resident[0] or r.resident[1] - r.resident[0] >= m.resident[1] - m.resident[0]:
            m.resident = r.resident
        m.peak = max(m.peak, r.peak)
    return list(out.values())
