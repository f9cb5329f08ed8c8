"""DC2 on a running job whose links change their rate, beside ratios that never change.

``python -m benchmarks.dc2_live [--nodes 2,4] [--systems uniform-0.1,uniform-0.001,none,da2,da5] [--seconds 75]
[--base 100mbit] [--period 8] [--seeds 1] [--links all|first] [--loss L] [--json FILE] [--plot FILE.png]``

Each system trains the small GPT of ``examples`` with DistributedDataParallel on the hosts of a network lab, one worker
and one daemon a host, for the same time. While it trains the rate of all links, or of the first host's while those of
the others stay at ``--base``, goes through the same seeded profile: ``--base`` times 1, 1/2, 1/5 or 1/10, another every
``--period`` seconds, counted from the end of the first step. Needs namespaces (``benchmarks.lab.netns``). Columns:
steps done, median and 95th percentile of a step, megabytes a host sent a step, mean ratios over the steps of the first
and of the last host (share of the elements that it sends), loss at the end, and the time to the loss that all systems
but ``none`` reached (or ``--loss``).

What may live here: this measurement and what is said of it. What may not: training, the lab, the daemons.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import re
import statistics
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import command
from benchmarks.common import Row, Table, show_seconds, write_json
from benchmarks.lab import daemons, netns, processes
from examples.runs import Method, Record, Run
from gcserver.planner.dc2_link import RateProfile

#: what a supervisor at log.level debug says of a new ratio
TUNED: Final = re.compile(r"^(\S+ \S+) DEBUG .* tuned: notch -?\d+, level (\d+)$")
SKIP: Final = 2  # steps that open connections and rebuild buckets
#: A run may take so much longer than it should, seconds: its last step on the slowest link, starting, ending.
GRACE: Final = 120.0
DEFAULT: Final = "uniform-0.1,uniform-0.001,none,da2,da5"


@dataclass(frozen=True, slots=True)
class System:
    """What is compared: the daemons' codec and controller; ``ratio`` where it never changes."""

    name: str
    codec: str
    controller: str = "none"
    ratio: float | None = None


@dataclass(slots=True)
class Live:
    """A finished run. ``rates``: (second, bit/s) of the links that change; ``ratios``: (second, ratio) of each host;
    seconds from the first step's beginning on, ascending."""

    system: System
    record: Record
    rates: list[tuple[float, float]] = field(default_factory=list)
    ratios: list[list[tuple[float, float]]] = field(default_factory=list)

    def ratio_at(self, second: float, host: int = 0) -> float | None:
        """The ratio in force at a host; None before the first, and without compression."""
        at = bisect_right(self.ratios[host], (second, math.inf)) - 1
        return self.ratios[host][at][1] if at >= 0 else self.system.ratio

    def ratio_means(self) -> list[float | None]:
        """Of each host, over the steps that count."""
        found: list[float | None] = []
        for host in range(len(self.ratios)):
            known = [r for s in self.record.steps[SKIP:] if (r := self.ratio_at(s.seconds, host)) is not None]
            found.append(statistics.fmean(known) if known else None)
        return found

    def losses(self) -> list[float]:
        """Smoothed loss after each step."""
        return [self.record.loss_at(s.number) for s in self.record.steps]

    def seconds_to(self, loss: float) -> float | None:
        """When the smoothed loss first was ``loss`` or less, seconds; None if it never was."""
        reached = (s.seconds for s, value in zip(self.record.steps, self.losses(), strict=True) if value <= loss)
        return next(reached, None)


def system(name: str, codec: str) -> System:
    """``none``, ``uniform-RATIO`` or ``da1`` to ``da5``, of the sparsifier ``codec``; ValueError for anything else."""
    if name == "none":
        return System(name, "none")
    if re.fullmatch(r"da[1-5]", name):
        return System(name, f"{codec}(ratio=0.1)", f"dc2-{name}")
    kind, _, ratio = name.partition("-")
    try:
        value = float(ratio)
    except ValueError:
        value = math.nan
    if kind != "uniform" or not 0.0 < value <= 1.0:
        raise ValueError(f"system {name!r}: expected none, uniform-RATIO with a ratio in (0, 1], or da1 to da5")
    return System(name, f"{codec}(ratio={ratio})", ratio=value)


# ------------------------------------------------------------------------------------------------ running
class Weather:
    """Changes the rate of links every ``period`` seconds from :meth:`begin` on, in a thread; a context manager.

    ``changed``: (wall clock, bit/s) of what was done. An error of the lab comes out at the end of the context.
    """

    def __init__(self, shape: Callable[[str], None], rates: Sequence[float], period: float) -> None:
        self._shape, self._rates, self._period = shape, tuple(rates), period
        self._begun, self._over = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weather", daemon=True)
        self.changed: list[tuple[float, float]] = []

    def __enter__(self) -> Weather:
        self._shape(rate_text(self._rates[0]))
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._begun.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def begin(self) -> None:
        """The first step has begun; said again it changes nothing."""
        self._begun.set()

    def _run(self) -> None:
        self._begun.wait()
        start = time.monotonic()
        for i, rate in enumerate(self._rates):
            if self._over.wait(max(0.0, start + i * self._period - time.monotonic())):
                return
            try:
                if i:
                    self._shape(rate_text(rate))
            except Exception as error:
                self._error = error
                return
            self.changed.append((time.time(), rate))


def rate_text(bits: float) -> str:
    return f"{bits:.0f}bit"


def run(what: System, nodes: int, rates: Sequence[float], period: float, seconds: float, rest: str = "") -> Live:
    """One system on a lab of its own; where ``rest`` is a rate, the links of all but the first host have it.

    Raises LabError, DaemonError or what a worker ends with.
    """
    settings = {"codec.default": what.codec, "plan.controller": what.controller, "log.level": "debug"}
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.Lab(nodes, rest or None))
        cluster = stack.enter_context(daemons.Daemons(lab.hosts, settings))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dc2-live-")))
        changing = functools.partial(lab.set_rate, only=lab.hosts[0] if rest else None)
        weather = stack.enter_context(Weather(changing, rates, period))
        zero = math.inf

        def on_step(record: Record) -> None:
            nonlocal zero
            weather.begin()
            zero = min(zero, time.time() - record.steps[-1].seconds)

        training = stack.enter_context(
            Run(Method(what.name, "gradcomm"), lab.hosts, cluster, folder, seconds=seconds, job=f"dc2-{what.name}")
        )
        record = training.follow(on_step, seconds + GRACE)
        logs = [cluster[i].log.read_text(errors="replace") for i in range(nodes)]
        rates_seen = [(at - zero, rate) for at, rate in weather.changed]
        return Live(what, record, rates_seen, [[(at - zero, ratio) for at, ratio in tuned(log)] for log in logs])


def tuned(log: str) -> list[tuple[float, float]]:
    """(wall clock, ratio) of each tuning in a daemon's log; those that give the plan its way back are left out."""
    found = []
    for line in log.splitlines():
        if (match := TUNED.match(line)) and match[2] != "0":
            at = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            found.append((at, int(match[2]) / 1e6))
    return found


# ---------------------------------------------------------------------------------------------- reporting
def target(runs: Mapping[str, Live]) -> float:
    """The loss that all reached: the highest at the end of a run, those without compression left out if others ran."""
    compressed = [live for name, live in runs.items() if name != "none"] or list(runs.values())
    return max(live.losses()[-1] for live in compressed)


def row(live: Live, loss: float, **more: object) -> Row:
    """A run in numbers; ``loss`` is the one that is raced to. Raises ValueError where there are too few steps."""
    record = live.record
    if len(record.steps) <= SKIP + 1:
        raise ValueError(
            f"{live.system.name}: expected more than {SKIP + 1} steps, got {len(record.steps)}: run longer"
        )
    ratios = live.ratio_means()
    durations = record.durations(SKIP)
    return {
        "system": live.system.name, **more, "steps": len(record.steps), "median_s": record.step_seconds(SKIP),
        "mean_s": statistics.fmean(durations), "p95_s": float(np.quantile(durations, 0.95)),
        "step_bytes": record.step_bytes(SKIP), "ratio_mean": ratios[0], "ratio_means": ratios,
        "loss_end": live.losses()[-1], "loss": loss, "seconds_to_loss": live.seconds_to(loss), "runs": 1,
    }  # fmt: skip


TABLE: Final = Table(
    {"system": 16, "steps": 7, "median": 10, "p95": 10, "MB/step": 9, "ratio": 9, "last's": 9, "loss": 8, "to loss": 10}
)


def line(r: Row) -> str:
    """A row as text."""
    reached, ratios = r["seconds_to_loss"], r["ratio_means"]
    first, last = ("-" if ratio is None else f"{ratio:.4f}" for ratio in (ratios[0], ratios[-1]))
    return TABLE.line(
        r["system"], str(r["steps"]), show_seconds(r["median_s"]), show_seconds(r["p95_s"]),
        f"{r['step_bytes'] / 1e6:.2f}", first, last, f"{r['loss_end']:.3f}",
        "-" if reached is None else show_seconds(reached),
    )  # fmt: skip


def plot(path: Path, runs: Mapping[int, Mapping[str, Live]]) -> None:
    """Rate of the links, ratio, time of a step and loss over time; side by side for each number of hosts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (2 + 8 * len(runs), 11)
    figure, axes = pyplot.subplots(4, len(runs), sharex="col", squeeze=False, figsize=size, layout="constrained")
    for column, (nodes, systems) in zip(axes.T, runs.items(), strict=True):
        column[0].set_title(f"{nodes} hosts")
        _plot_column(column, systems)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_column(axes: Sequence[Any], runs: Mapping[str, Live]) -> None:
    """The four pictures of one number of hosts, below one another."""
    rate, ratio, duration, loss = axes
    first = next(iter(runs.values()))
    end = max(live.record.steps[-1].seconds for live in runs.values())
    edges = [*first.rates, (end, first.rates[-1][1])] if first.rates else []
    rate.step([at for at, _ in edges], [bits / 1e6 for _, bits in edges], where="post", color="black", linewidth=1)
    rate.set_ylabel("links, Mbit/s")
    for i, (name, live) in enumerate(runs.items()):
        style = {"label": name, "linewidth": 1, "color": f"C{i}"}
        times = [s.seconds for s in live.record.steps]
        ratios = [live.ratio_at(t) for t in times]
        if all(r is not None for r in ratios[1:]):
            ratio.plot(times[1:], ratios[1:], **style)
        duration.plot(times[1:], live.record.durations(1), **style)
        loss.plot(times, live.losses(), **style)
    for axis, label in ((ratio, "ratio"), (duration, "step, s")):
        axis.set_yscale("log")
        axis.set_ylabel(label)
    loss.set_ylabel("loss, nats (10 steps)")
    loss.set_xlabel("s")
    for axis in axes:
        axis.grid(alpha=0.3)
    loss.legend(loc="upper right", ncols=5, fontsize="small")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=command.counts, default="2", help="how many hosts, as 2 or 2,4 (default 2)")
    parser.add_argument("--systems", default=DEFAULT, help=f"in their order (default {DEFAULT})")
    parser.add_argument("--codec", default="topk", help="the sparsifier whose ratio is set or steered (default topk)")
    parser.add_argument("--seconds", type=float, default=75.0, help="how long each system trains (default 75)")
    parser.add_argument(
        "--base", type=command.rate, default="100mbit", help="the rate of the links at its highest (default 100mbit)"
    )
    parser.add_argument("--period", type=float, default=8.0, help="seconds between changes of the rate (default 8)")
    parser.add_argument("--seeds", type=command.counts, default="1", help="of profiles of rates, as 1 or 1,2,3")
    parser.add_argument(
        "--links", choices=("all", "first"), default="all", help="whose rate changes: all, or the first host's alone"
    )
    parser.add_argument("--loss", type=float, help="the loss that is raced to, nats a character")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="the runs of the first seed")
    args = parser.parse_args(argv)
    try:
        args.systems = [system(name, args.codec) for name in args.systems.split(",")]
        args.profiles = [RateProfile(seed, netns.bits_per_second(args.base), args.period) for seed in args.seeds]
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse()
    if netns.shaping() is None:
        raise SystemExit(netns.probe().reason)
    rows: list[Row] = []
    drawn: dict[int, Mapping[str, Live]] = {}
    rest = args.base if args.links == "first" else ""
    for profile, nodes in itertools.product(args.profiles, args.nodes):
        rates = profile.rates(args.seconds + GRACE)
        with processes.exits_on_signals():
            runs = {what.name: run(what, nodes, rates, args.period, args.seconds, rest) for what in args.systems}
        loss = target(runs) if args.loss is None else args.loss
        print(
            f"links of {args.links}, seed {profile.seed}: "
            f"{', '.join(f'{r / 1e6:g}' for r in profile.rates(args.seconds))} Mbit/s\n"
            f"{nodes} hosts, {args.seconds:g} s each, to loss {loss:.3f}\n{TABLE.head()}"
        )
        about = {"network": args.base, "links": args.links, "period_s": args.period, "seed": profile.seed}
        for live in runs.values():
            rows.append(row(live, loss, nodes=nodes, **about))
            print(line(rows[-1]), flush=True)
        write_json(args.json, rows)
        if args.plot and profile.seed == args.seeds[0]:
            drawn[nodes] = runs
            plot(args.plot, drawn)


if __name__ == "__main__":
    main()
