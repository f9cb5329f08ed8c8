"""Training steps by every system, in turn on the same links: the benchmark the project is accepted by.

``python -m benchmarks.training [--mode speed|loss] [--models gpt,cnn] [--nodes 2,4] [--rates 100mbit,1gbit,10gbit]
[--systems LIST] [--buckets torch,layers,merged,mergecomp] [--json FILE] [--resume] [--plot FILE.png]``

``--mode speed`` times steps on shaped links, from the end of one to the end of the next on the slowest rank: in each
round ten of each system, or as many as begin within ``--seconds``. The first steps, which connect and rebuild buckets,
run before the links get their rate, but for ``auto``, whose planner must see the links as they are. With ``--stay`` the
systems of a cell are started once, ``auto`` last, and wait for their turns: a round takes no more than its steps, and
what is compared was measured within seconds. ``--mode loss`` trains 300 steps on links that are not shaped, with three
seeds, for the loss at the end and that of held-out batches.

Everything measured is written to ``--json`` at once, so that an interrupted run keeps what it has and ``--resume`` goes
on behind it; ``--report`` measures nothing more. The report is markdown on stdout, with the rules of acceptance as met
or missed; progress goes to stderr. No accelerator is used.

What may live here: which cells and systems run in which order, and options. What may not: a single run
(``training_run``), systems (``training_systems``), what figures mean (``training_report``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import command, common, training_report, training_run, training_systems
from benchmarks.lab import daemons, netns, processes, workers
from benchmarks.models import MODELS
from benchmarks.training_systems import System
from benchmarks.training_worker import Task
from gcserver.runtime import room
from gcserver.values import human_size


@dataclass(frozen=True, slots=True)
class Place:
    """Where systems take turns. ``network``: a rate, or one of ``netns.UNSHAPED``."""

    model: str
    nodes: int
    network: str

    @property
    def rate(self) -> str | None:
        return netns.rate_of(self.network)

    def lab(self) -> netns.Lab | netns.Loopback:
        return netns.open_network(self.nodes, self.network)


@dataclass(frozen=True, slots=True)
class Item:
    """One run, one row."""

    place: Place
    system: System
    task: Task
    mode: str
    round: int = 0

    def row(self) -> common.Row:
        """What tells this row from all others."""
        place, system = self.place, self.system
        return {
            "system": "gradcomm" if system.daemons else "compute" if system.comm == "compute" else "gloo",
            "mode": self.mode,
            "model": place.model,
            "nodes": place.nodes,
            "network": place.network,
            "method": system.method,
            "comm": system.comm,
            "codec": system.codec,
            "buckets": system.buckets,
            "seed": self.task.seed,
            "round": self.round,
        }


#: What the larger models take on one host, bytes: a rank (the GPT's 0.62 GiB), the shared memory of its job (0.46 GiB),
#: and with it a daemon's processes. The small ones take less than half.
RANK, SHARED, DAEMON = 640 << 20, 470 << 20, 512 << 20
SMALL = ("tiny", "demo")
KEY = ("mode", "model", "nodes", "network", "method", "seed", "round")


class Results:
    """The rows of a file, written anew with every new one."""

    def __init__(self, path: Path | None, resume: bool, written: str) -> None:
        self.path, self.command = path, written
        self.rows: list[common.Row] = []
        if resume and path is not None and path.exists():
            self.rows = json.loads(path.read_text())["rows"]

    def has(self, item: Item) -> bool:
        """Whether it was measured; what failed is tried again."""
        wanted = _key(item.row())
        return any(_key(row) == wanted and "error" not in row for row in self.rows)

    def add(self, row: common.Row) -> None:
        self.rows = [r for r in self.rows if _key(r) != _key(row)] + [row]
        common.write_json(self.path, self.rows, command=self.command)


def _key(row: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in KEY)


def items(args: argparse.Namespace) -> Iterator[Item]:
    """Every run that was asked for, those of one place together."""
    systems = training_systems.read_list(args.systems)
    speed = args.mode == "speed"
    if speed:
        systems = training_systems.with_buckets(systems, args.buckets.split(","))
    if args.stay:
        # its planner must see no links without a rate, which those that begin behind it would begin with
        systems.sort(key=lambda system: system.comm == training_systems.AUTO)
    networks = args.rates if speed else [args.network]
    for model, nodes, network in itertools.product(args.models.split(","), args.nodes, networks):
        place = Place(model, nodes, network)
        if speed:
            for turn, system in itertools.product(range(args.rounds), systems):
                yield Item(place, system, _task(args, place, system, 0), args.mode, turn)
        else:
            for seed, system in itertools.product(range(args.seeds), systems):
                yield Item(place, system, _task(args, place, system, seed), args.mode)


def no_room(wanted: Sequence[Item], available: int, shared: int) -> str:
    """Why systems that stay would not all fit into so much memory, or into so much that can be shared, bytes; empty if
    they do, or if none stays. Where memory runs out the kernel ends ranks, lanes and planning as it likes, and figures
    are of what is left."""
    for place, group in itertools.groupby((i for i in wanted if i.task.stays), key=lambda item: item.place):
        systems = {item.system for item in group}
        with_daemons, less = sum(s.daemons for s in systems), 2 if place.model in SMALL else 1
        for kind, need, free in (
            ("memory", place.nodes * (len(systems) * RANK + with_daemons * DAEMON) // less, available),
            ("shared memory", place.nodes * with_daemons * SHARED // less, shared),
        ):
            if need > free:
                return (
                    f"--stay: {len(systems)} systems of {place.model} on {place.nodes} nodes take about "
                    f"{human_size(need)} of {kind}, and {human_size(free)} are free: name fewer, or time them without"
                )
    return ""


def _task(args: argparse.Namespace, place: Place, system: System, seed: int) -> Task:
    speed = args.mode == "speed"
    auto = system.comm == training_systems.AUTO
    # DDP rebuilds its buckets after the first step, PowerSGD's first two are dense
    unshaped = 3 if speed and not auto and place.rate is not None else 0
    settle = (args.auto_warmup if auto else 1 if unshaped else 4) if speed else 0
    return Task(
        model=place.model,
        comm=system.comm,
        codec=system.codec,
        buckets=system.buckets,
        momentum=not system.own_momentum,
        seed=seed,
        unshaped=unshaped,
        settle=settle,
        steps=args.steps,
        seconds=args.seconds if speed else 0.0,
        held_out=not speed,
        stays=args.stay,
    )


def measure(wanted: Sequence[Item], results: Results, settings: Mapping[str, str]) -> None:
    """Runs what the results do not have yet; a system that fails is a row that says so, and the next one runs."""
    for place, group in itertools.groupby(wanted, key=lambda item: item.place):
        todo = [item for item in group if not results.has(item)]
        if not todo:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="gctraining-") as folder,
            place.lab() as lab,
            training_run.Stage(lab, place.rate, settings, Path(folder)) as stage,
        ):
            for item in todo:
                results.add(_measure(stage, item))


def _measure(stage: training_run.Stage, item: Item) -> common.Row:
    place, task, name = item.place, item.task, item.system.method
    where = f"{place.model}, {place.nodes} nodes, {place.network}: {name}"

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{where}, step {done} of {total}   ", end="", file=sys.stderr, flush=True)

    try:
        lines = stage.run(item.system, task, show)
    except (workers.WorkerError, daemons.DaemonError) as error:
        print(f"\r{where}: {error}", file=sys.stderr, flush=True)
        return item.row() | {"error": str(error).splitlines()[0]}
    row = training_run.speed_row(lines) if item.mode == "speed" else training_run.loss_row(lines, task)
    said = (
        f"{common.show_seconds(row['median_s'])} a step, {row['runs']} steps"
        if item.mode == "speed"
        else f"seed {task.seed}, loss {row['loss']:.3f}, held out {row['loss_held_out']:.3f}"
    )
    print(f"\r{where}: {said}          ", file=sys.stderr, flush=True)
    return item.row() | row


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("speed", "loss"), default="speed")
    parser.add_argument("--models", default="gpt,cnn", help=f"of {', '.join(MODELS)} (default gpt,cnn)")
    parser.add_argument("--nodes", type=command.counts, help="numbers of nodes (default 2,4; for losses 2)")
    parser.add_argument(
        "--rates",
        type=command.networks,
        default="100mbit,1gbit,10gbit",
        help="of the links; also unshaped and loopback",
    )
    parser.add_argument(
        "--network",
        type=command.network,
        help="for losses; auto's plan follows it (default: unshaped if it can be had)",
    )
    parser.add_argument(
        "--systems", default=",".join(training_systems.DEFAULT), help=f"default {','.join(training_systems.DEFAULT)}"
    )
    parser.add_argument(
        "--buckets",
        default="layers,merged",
        help="of gradcomm's systems; also torch, mergecomp and numbers (default layers,merged)",
    )
    parser.add_argument(
        "--rounds", type=command.count, default=2, help="how often each system has its turn (default 2)"
    )
    parser.add_argument(
        "--stay",
        action="store_true",
        help="start systems once and keep them between rounds (0.6 GiB a rank, with a daemon 1.1)",
    )
    parser.add_argument(
        "--steps", type=command.count, help="timed a round, at most (default 10), or for a loss (default 300)"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="timed steps begin within this (default 180)")
    parser.add_argument(
        "--auto-warmup", type=command.count, default=400, help="steps in which auto may settle (default 400)"
    )
    parser.add_argument("--seeds", type=command.count, default=3, help="for losses (default 3)")
    parser.add_argument(
        "--set", type=command.setting, action="append", default=[], metavar="KEY=VALUE", help="a key of the daemons"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="results, rewritten after every run")
    parser.add_argument("--resume", action="store_true", help="keep what --json has already and measure the rest")
    parser.add_argument("--report", action="store_true", help="report what --json has, measure nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    args = parser.parse_args(argv)
    speed = args.mode == "speed"
    args.steps = args.steps or (10 if speed else 300)
    args.network = args.network or ("unshaped" if netns.shaping() else "loopback")
    args.nodes = args.nodes or ([2, 4] if speed else [2])
    try:
        for item in items(args):
            if item.place.model not in MODELS:
                raise ValueError(f"--models: expected some of {', '.join(MODELS)}, got {item.place.model!r}")
    except ValueError as error:
        parser.error(str(error))
    if args.stay and not speed:
        parser.error("--stay: losses have no rounds")
    if (args.resume or args.report) and args.json is None:
        parser.error("--resume and --report need --json FILE")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    results = Results(args.json, args.resume or args.report, command.written("training", argv))
    wanted = [] if args.report else list(items(args))
    if netns.shaping() is None and any(item.place.network != "loopback" for item in wanted):
        print(f"only --rates loopback can be measured here: {netns.probe().reason}", file=sys.stderr)
        return 1
    todo = [item for item in wanted if not results.has(item)]
    if reason := no_room(todo, room.available(), room.free_bytes(daemons.state_folder())):
        print(reason, file=sys.stderr)
        return 1
    print(common.describe(common.machine()))
    try:
        with processes.exits_on_signals():
            settings = training_systems.LATER if args.mode == "speed" else {}
            measure(wanted, results, {**settings, **dict(args.set)})
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started has been ended", file=sys.stderr)
        return 130
    print(f"\n{training_report.report(results.rows)}")
    if args.plot is not None:
        training_report.plot(results.rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
