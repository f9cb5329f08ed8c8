"""Play seeded worlds: ``python -m tests.simulation.run --seeds 1000``; one of them: ``--seed 17 --trace``.

What may live here: the command, spreading seeds over processes, progress, what a failure prints. What may not:
what a world is or what is checked in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tests.simulation.faults import KINDS, strike
from tests.simulation.planted import PLANTED, planted
from tests.simulation.planted_epochs import NAMES as PLANTED_IN_EPOCHS
from tests.simulation.shape import LOSSY, draw
from tests.simulation.world import World

#: seeds a process plays before it says so
BATCH = 25
#: most worlds are small: whatever needs more events than this goes in circles
MAX_EVENTS = 200_000
#: and of a large one, for each pair of nodes
MAX_EVENTS_PAIR = 200
#: of so many worlds one loses nodes and goes on
LOSSY_EVERY = 5
#: seconds between two lines of progress where there is no terminal
SAY_EVERY = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one seed. ``error`` is empty when every guarantee held."""

    seed: int
    events: int
    steps: int
    faults: int
    fatal: str
    error: str
    #: epochs after the first that jobs went on in
    epochs: int = 0


def command(seed: int, only: tuple[str, ...] = ()) -> str:
    """The one command that replays a seed; ``only``: with many faults of these kinds."""
    faults = f" --faults {','.join(only)}" if only else ""
    return f"python -m tests.simulation.run --seed {seed}{faults} --trace"


def play(seed: int, only: tuple[str, ...] = (), trace: bool = False) -> Outcome:
    """One world from start to end."""
    world = World(draw(seed), seed, print if trace else None)
    world.max_events = MAX_EVENTS + MAX_EVENTS_PAIR * len(world.nodes) ** 2
    error = ""
    try:
        world.start()
        strike(world, only)
        world.run()
    except Exception as problem:
        where = traceback.extract_tb(problem.__traceback__)[-1]
        error = f"{type(problem).__name__} {problem} [{os.path.basename(where.filename)}:{where.lineno}]"
        if trace:
            traceback.print_exc()
    faults = sum(n for name, n in world.counts.items() if name in world.fault_names)
    epochs = sum(max(decided) - 1 for decided in world.checks.epochs.values())
    return Outcome(seed, world.events, world.steps_done, faults, world.fatal, error, epochs)


def play_batch(seeds: range) -> list[Outcome]:
    return [play(seed) for seed in seeds]


def play_all(start: int, count: int, jobs: int) -> Iterator[list[Outcome]]:
    """Outcomes of ``count`` seeds in batches, as they come."""
    batches = [range(s, min(s + BATCH, start + count)) for s in range(start, start + count, BATCH)]
    if jobs <= 1:
        yield from map(play_batch, batches)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(play_batch, batches)


def seeds(start: int, count: int) -> tuple[range, range]:
    """Those of ordinary worlds, and a share of those that lose nodes and go on; from LOSSY on there are only these."""
    losses = count // LOSSY_EVERY if start < LOSSY else 0
    return range(start, start + count - losses), range(LOSSY + start, LOSSY + start + losses)


class Progress:
    """Says how far a run is and how long it may still take: at once on a terminal, elsewhere now and then."""

    def __init__(self, seeds: int) -> None:
        self.seeds, self.began = seeds, time.monotonic()
        self.said = self.began

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def show(self, done: int, bad: int) -> None:
        terminal = sys.stderr.isatty()
        if not terminal and time.monotonic() - self.said < SAY_EVERY:
            return
        self.said = time.monotonic()
        left = self.elapsed / done * (self.seeds - done)
        minutes, seconds = divmod(round(left), 60)
        line = f"{done}/{self.seeds} seeds, {bad} bad, {minutes}:{seconds:02} min left "
        print(f"\r{line}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=1000, help=f"how many worlds, one in {LOSSY_EVERY} of those that lose nodes"
    )
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--json", type=Path, help="write figures and violations there")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print every event and effect (with --seed)")
    parser.add_argument("--faults", default="", help=f"many of these (with --seed): {', '.join(KINDS)}")
    lossy = f"; {', '.join(sorted(PLANTED_IN_EPOCHS))} show from seed {LOSSY} on"
    parser.add_argument("--planted", choices=sorted(PLANTED), help=f"with this fault in the core (with --seed){lossy}")
    args = parser.parse_args(argv)
    if args.seed is not None:
        return _one(args.seed, tuple(filter(None, args.faults.split(","))), args.trace, args.planted)
    return _many(args.start, args.seeds, args.jobs, args.json)


def _many(start: int, count: int, jobs: int, json_file: Path | None) -> int:
    progress = Progress(count)
    done = events = steps = struck = fatal = 0
    bad: list[Outcome] = []
    for outcomes in chain.from_iterable(play_all(of.start, len(of), jobs) for of in seeds(start, count)):
        for o in outcomes:
            done, events, steps, struck = done + 1, events + o.events, steps + o.steps, struck + o.faults
            fatal += bool(o.fatal)
            if o.error:
                bad.append(o)
                print(f"\nseed {o.seed}: {o.error}\n  replay: {command(o.seed)}", flush=True)
        progress.show(done, len(bad))
    took = progress.elapsed
    print(
        f"\n{done} seeds in {took:.1f} s on {jobs} processes: {steps} steps of workers, {events} events, {struck} "
        f"faults ({fatal} worlds with a fatal one), {len(bad)} violations"
    )
    if json_file is not None:
        violations = [{"seed": o.seed, "error": o.error, "replay": command(o.seed)} for o in bad]
        figures = {
            "start": start, "seeds": done, "jobs": jobs, "seconds": took, "steps": steps, "events": events,
            "faults": struck, "fatal": fatal, "violations": violations,
        }  # fmt: skip
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if bad else 0


def _one(seed: int, only: tuple[str, ...], trace: bool, fault: str | None) -> int:
    if fault is None:
        outcome = play(seed, only, trace)
    else:
        with planted(fault):
            outcome = play(seed, only or PLANTED[fault][3], trace)
    print(
        outcome.error or f"seed {seed}: every guarantee held over {outcome.events} events and {outcome.faults} faults"
    )
    return 1 if outcome.error else 0


if __name__ == "__main__":
    sys.exit(main())
