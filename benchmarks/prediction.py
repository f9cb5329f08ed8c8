"""Step times that the planner expects beside those that it gets.

``python -m benchmarks.prediction [--models demo] [--nodes 2] [--rates 100mbit,1gbit] [--steps 40] [--json FILE]``

Each model trains with ``plan.mode=auto``: dense first, then by what the planner makes of what it has measured, until a
plan has lasted for ``--steps`` steps. Every plan that was in force for some steps is a row: the step time expected when
it was made, and the median of those that the slowest rank took under it. ``none`` are the steps before the first plan,
beside what the first plan's timeline expects of them. Codecs that send late are in question at once
(``plan.late_after=0``), as where steps are timed. ``error`` is measured over expected, less one; wanted is at most
15 % either way. Models are those of ``benchmarks.training``; ``demo`` is the demo's.

What may live here: this measurement. What may not: training, planning.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks import command, common
from benchmarks.lab import daemons, netns, workers
from benchmarks.models import MODELS
from benchmarks.training_run import MOST, Lines
from benchmarks.training_systems import AUTO, LATER, TORCH
from benchmarks.training_worker import Task
from gcproto import admin_pb2, admin_pb2_grpc

SKIP: Final = 2  #: steps that a plan needs to take hold: those under way, and first uses
FEWEST: Final = 5  #: steps that make a figure
ASK_EVERY: Final = 0.5  # s
WITHIN: Final = 0.15  #: errors are wanted to be, either way
TABLE: Final = common.Table(
    {"plan": 6, "codec": 34, "expected": 11, "measured": 11, "steps": 7, "error": 8, "within 15 %": 16}
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of the planner's: what most of it uses, the step it is in force from, and what a step should take, s."""

    version: int
    since: int
    codec: str
    expected: float


@dataclass(slots=True)
class Watch:
    """What the planner said while a job ran. ``dense``: what a step without any compression should take, s, as it said
    first; None before. ``since``: the step from which each version was in force, also those of which it said nothing,
    which put back what was before."""

    dense: float | None = None
    plans: dict[int, Plan] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    changed: int = 0  # the step of the last change

    def hear(self, answer: admin_pb2.GetPlanResponse, step: int) -> None:
        """Takes what is new of an answer given when ``step`` steps were done."""
        for domain in answer.domains:
            if not domain.HasField("forecast"):
                continue
            forecast = domain.forecast
            if self.dense is None:
                self.dense, self.changed = forecast.dense_seconds, step
            if domain.plan_version and domain.plan_version not in self.since:
                self.since[domain.plan_version] = self.changed = domain.since_step
            version = forecast.plan_version
            if version and version == domain.plan_version and version not in self.plans:
                most = max(forecast.groups, key=lambda group: group.bytes)
                self.plans[version] = Plan(version, domain.since_step, most.codec, forecast.expected_seconds)


def rows(watch: Watch, durations: Mapping[int, float], **more: Any) -> list[common.Row]:
    """A row for the dense steps and for each plan. ``durations``: seconds of each step, by number.

    ``fitted``: what was expected is no prediction, since steps of this codec had been measured by then: dense ones, by
    which the planner learns what its timeline leaves out, and those of a codec that is in force again.
    """
    if watch.dense is None:
        return []
    plans = [Plan(0, 1, "none", watch.dense), *watch.plans.values()]
    found, known = [], {"none"}
    for plan in plans:
        end = min((since for since in watch.since.values() if since > plan.since), default=max(durations) + 1)
        fitted = plan.codec in known
        known.add(plan.codec)
        times = [seconds for step, seconds in durations.items() if plan.since + SKIP <= step < end]
        if len(times) >= FEWEST:
            row = common.median_row(
                "gradcomm", times, **more, plan=plan.version, codec=plan.codec, expected_s=plan.expected
            )
            found.append(row | {"error": row["median_s"] / plan.expected - 1.0, "fitted": fitted})
    return found


def measure(model: str, nodes: int, network: str, args: argparse.Namespace) -> Iterator[list[common.Row]]:
    """Trains on a cluster of its own; yields all rows at once. Raises LabError, DaemonError or WorkerError."""
    task = Task(model, AUTO, "", TORCH, True, seed=0, unshaped=0, settle=0, steps=MOST, seconds=0.0, held_out=False)
    argv = ["-m", "benchmarks.training_worker", "--task", task.text()]
    job, watch = daemons.job_name("prediction"), Watch()
    with (
        tempfile.TemporaryDirectory(prefix="gcprediction-") as folder,
        netns.open_network(nodes, network) as lab,
        daemons.Daemons(lab.hosts, {"plan.mode": "auto", **LATER, **dict(args.set)}) as cluster,
        workers.Workers(f"{model}, {network}", argv, lab.hosts, cluster, Path(folder), job) as ranks,
        grpc.insecure_channel(cluster[0].admin) as channel,
    ):
        stub = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        ask_at = 0.0

        def look() -> None:
            nonlocal ask_at
            if time.monotonic() > ask_at:
                watch.hear(stub.GetPlan(admin_pb2.GetPlanRequest(job=job), timeout=30.0), done())
                ask_at = time.monotonic() + ASK_EVERY

        def done() -> int:
            return min(map(len, ranks.lines))

        ranks.wait(args.seconds, look, lambda: watch.dense is not None and done() >= watch.changed + args.steps)
        took = Lines.of(ranks.lines, untimed=0).seconds()
    durations = dict(enumerate(took, start=2))  # the first step has no end before it
    yield rows(watch, durations, model=model, nodes=nodes, network=network)


def show(row: common.Row) -> str:
    """A row as text."""
    return TABLE.line(
        str(row["plan"]), row["codec"], common.show_seconds(row["expected_s"]),
        common.show_seconds(row["median_s"]), str(row["runs"]), f"{100 * row['error']:+.0f} %",
        ("met" if abs(row["error"]) <= WITHIN else "MISSED") + (" (fitted)" if row["fitted"] else ""),
    )  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo", help=f"of {', '.join(MODELS)} (default demo)")
    parser.add_argument("--nodes", type=command.counts, default=[2], help="numbers of nodes (default 2)")
    parser.add_argument("--rates", type=command.networks, default="100mbit,1gbit", help="of the links")
    parser.add_argument("--steps", type=command.count, default=40, help="under the last plan (default 40)")
    parser.add_argument("--seconds", type=float, default=600.0, help="a model may take at most (default 600)")
    parser.add_argument(
        "--set", type=command.setting, action="append", default=[], metavar="KEY=VALUE", help="a key of the daemons"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    args.models = args.models.split(",")
    for model in args.models:
        if model not in MODELS:
            parser.error(f"--models: expected some of {', '.join(MODELS)}, got {model!r}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.network = next((network for network in args.rates if network != "loopback"), "loopback")
    parts = (
        (f"{model}, {nodes} nodes, {network}\n{TABLE.head()}", measure(model, nodes, network, args))
        for model, nodes, network in itertools.product(args.models, args.nodes, args.rates)
    )
    return command.run(args, command.written("prediction", argv), parts, show)


if __name__ == "__main__":
    sys.exit(main())
