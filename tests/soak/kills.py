"""kill -9 at random instants of real training, codec by codec: ``python -m tests.soak.kills --kills 200``.

Two daemons on loopback and a worker beside each train a small model with a codec (`kill_worker.py`), once undisturbed
and once while lanes, supervisors and whole daemons are killed, at instants drawn from the seed, and started again. The
weights of both runs must be the same, bit by bit, on every rank, and every kill must have been felt (the workers'
connections broke). ``--kills`` are shared among the codecs: those of the registry in turn, one spec each at least.

Exit status 1 if weights differ, a rank failed, or a kill was missed. What may live here: the drawing, the two runs,
the comparison.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import common
from benchmarks.lab import processes
from tests.integration.cluster import Cluster, Job
from tests.integration.codec_rates import RATES
from tests.integration.daemon import START_WITHIN, Daemon

NODES = 2
TRAIN = "tests.soak.kill_worker:train"
#: Steps between two kills, about; the first and the last few are left alone, so that training lasts beyond the last
#: kill. A step takes some milliseconds.
APART = 32
EDGE = 20
#: A kill comes up to this much after the step it waits for, seconds: anywhere in the steps that follow.
SPREAD = 0.02
WHAT = ("lane", "supervisor", "daemon")


@dataclass(frozen=True, slots=True)
class Kill:
    """After step ``step`` of rank 0 and ``delay`` seconds: ``what`` of node ``node``."""

    step: int
    delay: float
    node: int
    what: str


@dataclass(slots=True)
class Trial:
    """What one codec came to. ``failure`` is empty where all is well."""

    spec: str
    kills: list[Kill]
    steps: int
    seconds: float = 0.0
    reconnects: int = 0
    failure: str = ""
    done: Counter[str] = field(default_factory=Counter)


def draw(seed: int, kills: int, specs: Sequence[str]) -> list[Trial]:
    """``kills`` shared among ``specs`` as evenly as can be, the first ones getting one more; where there are fewer, a
    kill for each of as many specs drawn at random. ValueError for no kills or no specs."""
    if kills < 1 or not specs:
        raise ValueError(f"{kills} kills for {len(specs)} codecs: expected at least one of each")
    chance = random.Random(seed)
    drawn = [specs[i] for i in sorted(chance.sample(range(len(specs)), min(kills, len(specs))))]
    trials = []
    for index, spec in enumerate(drawn):
        share = kills // len(drawn) + (index < kills % len(drawn))
        steps = share * APART + 2 * EDGE
        at = sorted(chance.sample(range(EDGE, steps - EDGE), share))
        planned = [Kill(s, chance.uniform(0.0, SPREAD), chance.randrange(NODES), chance.choice(WHAT)) for s in at]
        trials.append(Trial(spec, planned, steps))
    return trials


def _lane(daemon: Daemon) -> None:
    """Waits for it to be started, should the kill before have been its supervisor's."""
    end = time.monotonic() + START_WITHIN
    while not daemon.lane_pids():
        if time.monotonic() > end:
            raise RuntimeError(f"daemon {daemon.name} has had no lane for {START_WITHIN:g} s")
        time.sleep(0.002)
    daemon.kill_lane()


_KILL: dict[str, Callable[[Daemon], None]] = {
    "lane": _lane,
    "supervisor": Daemon.restart_supervisor,
    "daemon": Daemon.restart,
}


def attempt(cluster: Cluster, trial: Trial) -> None:
    """Both runs of one codec, and what they came to, put into ``trial``."""
    began = time.monotonic()
    arguments = {"spec": trial.spec, "rate": RATES[trial.spec], "steps": trial.steps}
    try:
        calm = [outcome.ok() for outcome in cluster.run(TRAIN, range(NODES), **arguments)]
        job = cluster.start(TRAIN, range(NODES), **arguments)
        _shake(cluster, job, trial)
        shaken = [outcome.ok() for outcome in job.wait(120)]
    except (AssertionError, RuntimeError) as error:
        trial.failure = str(error) or type(error).__name__
    else:
        trial.reconnects = sum(v["reconnects"] for v in shaken)
        hashes = {v["hash"] for v in (*calm, *shaken)}
        if len(hashes) != 1:
            trial.failure = f"weights differ: {[v['hash'][:12] for v in (*calm, *shaken)]} (undisturbed first)"
        elif not all(v["finite"] for v in calm):
            trial.failure = "the undisturbed run's weights are not finite: nothing was compared"
        elif trial.reconnects < len(trial.kills):
            trial.failure = f"{len(trial.kills)} kills, but workers lost only {trial.reconnects} connections"
    trial.seconds = time.monotonic() - began


def _shake(cluster: Cluster, job: Job, trial: Trial) -> None:
    for kill in trial.kills:
        job.wait_mark(str(kill.step))
        time.sleep(kill.delay)
        if job.workers[0].process.poll() is not None:
            raise RuntimeError(f"training was over before the kill after step {kill.step}")
        _KILL[kill.what](cluster.daemons[kill.node])
        trial.done[kill.what] += 1


def run(trials: Sequence[Trial], folder: Path) -> None:
    """All of them on the same two daemons, one after the other; a line each."""
    with Cluster(folder, nodes=NODES, options={"min_compress_bytes": "4KiB"}, forked=False) as cluster:
        for trial in trials:
            attempt(cluster, trial)
            verdict = f"FAILED: {trial.failure}" if trial.failure else "the same weights"
            kinds = ", ".join(f"{trial.done[what]} {what}" for what in WHAT)
            print(f"{trial.spec:38} {trial.steps:4d} steps  {kinds:34} {trial.seconds:6.1f} s  {verdict}", flush=True)
            if trial.failure:
                print(*(f"{d.name}:\n{_tail(d)}" for d in cluster.daemons), sep="\n", flush=True)


def _tail(daemon: Daemon, lines: int = 25) -> str:
    return "\n".join(daemon.text().splitlines()[-lines:])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--codec", action="append", choices=sorted(RATES), metavar="SPEC", help="only this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error(f"--kills {args.kills}: expected at least 1")
    trials = draw(args.seed, args.kills, args.codec or list(RATES))
    print(f"{args.kills} kills among {len(trials)} codecs, seed {args.seed}", flush=True)
    with processes.exits_on_signals(), tempfile.TemporaryDirectory(prefix="gckills-") as folder:
        run(trials, Path(folder))
    done: Counter[str] = sum((t.done for t in trials), Counter())
    failed = [t for t in trials if t.failure]
    counted = ", ".join(f"{done[what]} {what}" for what in WHAT)
    alike = len(trials) - len(failed)
    print(f"{done.total()} kills ({counted}), {alike} of {len(trials)} codecs with the same weights", flush=True)
    rows: list[common.Row] = [
        {
            "system": "gradcomm", "codec": t.spec, "nodes": NODES, "steps": t.steps, "kills": t.done.total(),
            **{f"kills_{what}": t.done[what] for what in WHAT}, "reconnects": t.reconnects, "seconds": t.seconds,
            "failure": t.failure,
        }
        for t in trials
    ]  # fmt: skip
    common.write_json(args.json, rows, seed=args.seed)
    return 1 if failed or done.total() < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
