"""Why one would want gradcomm, in under four minutes: ``make demo``, or ``python -m examples.demo``.

Two daemons in network namespaces whose links are shaped to 100 Mbit/s, a GPT of three million parameters on the
standard library's sources, plain DistributedDataParallel, one worker on each side. Ten steps of every way to average
are timed; gloo and compression then train for 45 s each; a codec is changed while a job runs; a table, a picture and
the bandwidth above which it stops paying come at the end. Nothing is left behind, also after Ctrl-C.

What may live here: the order of events and what is said meanwhile. What may not: how runs are started (``runs``), what
their figures mean (``report``).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import command, common
from benchmarks.lab import daemons, netns, processes
from examples import report
from examples.runs import WINDOW, Method, Record, Run

CODEC = "onebit"
GLOO = Method("gloo", "gloo")
ALONE = Method("no communication", "off")
COMPRESSED = Method(f"gradcomm {CODEC}", "gradcomm", CODEC)
METHODS = (GLOO, Method("gradcomm none", "gradcomm", "none"), Method("gradcomm fp16", "gradcomm", "fp16"), COMPRESSED)
WARMUP = 2
TOOLS = Path(sys.executable).parent

OWN_MACHINES = """The same on two machines of your own (ADDRESS_A, ADDRESS_B), in a clone on each after `make setup`:
  on A:     .venv/bin/gcserver run --node.name a --node.listen tcp://ADDRESS_A:7470 --insecure
  on B:     .venv/bin/gcserver run --node.name b --node.listen tcp://ADDRESS_B:7470 --insecure
  on both:  .venv/bin/torchrun --nnodes=2 --nproc-per-node=1 --node-rank=RANK --master-addr=ADDRESS_A \\
                examples/train_gpt.py --seconds 45 --comm gradcomm --codec {codec}
RANK is 0 on A and 1 on B; then again with --comm gloo. --insecure does without keys, for a network that you trust;
docs/security.md says how to make some."""


@dataclass(slots=True)
class Stage:
    """Where the demo plays, and what it has found so far."""

    lab: netns.Lab | netns.Loopback
    cluster: daemons.Daemons
    folder: Path
    rate: str | None
    steps: int
    timed: list[Record] = field(default_factory=list)
    unshaped: list[Record] = field(default_factory=list)
    long: dict[str, Record] = field(default_factory=dict)

    def run(self, method: Method, *, steps: int = 0, seconds: float = 0.0, job: str | None = None) -> Run:
        return Run(method, self.lab.hosts, self.cluster, self.folder, steps=steps, seconds=seconds, job=job)


class Live:
    """One line that updates itself on a terminal; elsewhere a line every few seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self.tty, self.every, self.last, self.shown = sys.stdout.isatty(), every, time.monotonic(), ""

    def show(self, text: str) -> None:
        if self.tty:
            print(f"\r{text:<78}", end="", flush=True)
        elif time.monotonic() - self.last >= self.every:
            self.last, self.shown = time.monotonic(), text
            print(text, flush=True)

    def done(self, text: str) -> None:
        """The line as it stays."""
        if self.tty or text != self.shown:
            print(f"\r{text:<78}" if self.tty else text, flush=True)


def time_steps(stage: Stage) -> None:
    """(a) Ten timed steps of each method."""
    print(f"\n(a) {stage.steps} timed steps of each")
    steps = WARMUP + stage.steps
    for method in METHODS:
        live = Live(every=60.0)
        with stage.run(method, steps=steps) as run:
            record = run.follow(
                lambda r: live.show(f"  {r.method.name:20} step {len(r.steps)} of {steps}")  # noqa: B023
            )
        stage.timed.append(record)
        took, sent = record.step_seconds(WARMUP), record.step_bytes(WARMUP) / 1e6
        faster = stage.timed[0].step_seconds(WARMUP) / took
        live.done(f"  {method.name:20}{common.show_seconds(took):>9} a step{sent:9.2f} MB sent{faster:9.2f}x")
    if stage.rate is not None:
        stage.lab.set_rate(None)
        for method in (ALONE, COMPRESSED):
            with stage.run(method, steps=WARMUP + 2 * stage.steps) as run:  # a difference of small numbers
                stage.unshaped.append(run.follow())
        stage.lab.set_rate(stage.rate)
        alone, compressed = (common.show_seconds(r.step_seconds(WARMUP)) for r in stage.unshaped)
        print(f"  links unshaped      {compressed:>9} a step with {CODEC}, {alone} without any communication")


def progress(record: Record) -> str:
    """Where a run is."""
    now = record.steps[-1]
    return f"  {record.method.name:20}{now.seconds:6.1f} s  step {now.number:4}  loss {record.loss_at(now.number):.3f}"


def train(stage: Stage, seconds: float) -> None:
    """(b) Loss against wall-clock time."""
    print(f"\n(b) {seconds:g} s of training with each")
    for method in (GLOO, COMPRESSED):
        live = Live()
        with stage.run(method, seconds=seconds) as run:
            record = run.follow(lambda r: live.show(progress(r)), timeout=seconds + 120)  # noqa: B023
        live.done(progress(record))
        stage.long[method.name] = record
    at = report.common_step(list(stage.long.values()))
    gloo, compressed = (r.loss_at(at) for r in stage.long.values())
    print(
        f"  after the same {at} steps: gloo {gloo:.3f}, {CODEC} {compressed:.3f} ({compressed / gloo - 1:+.1%}; "
        f"means over the {WINDOW} steps before, same batches)"
    )


def steer(stage: Stage) -> common.Row:
    """(c) ``gcctl set-codec`` on a running job, there and back; what each node sent shows from which step it held.

    Raises RuntimeError if a step is missing or the nodes do not agree.
    """
    new, steps, job = "fp16", 40, daemons.job_name("steered")
    print(f"\n(c) a running job, {CODEC}, is told to use {new}")
    with stage.run(COMPRESSED, steps=steps, job=job) as run:
        while len(run.record.steps) < 4 and not any(w.poll() is not None for w in run.workers):
            run.update()
            time.sleep(0.02)
        there = set_codec(stage, job, new)
        back = set_codec(stage, job, CODEC)
        record = run.follow()
    if len(record.steps) != steps:
        raise RuntimeError(f"{len(record.steps)} of {steps} steps came back")
    firsts = set()
    for node in range(len(stage.lab.hosts)):
        sent = [s.sent[node] for s in record.steps]
        least = min(sent[WARMUP:])
        firsts.add(next((i + 1 for i, n in enumerate(sent) if i >= WARMUP and n > 3 * least), 0))
        around = range(max(1, there - 2), min(steps, there + 2) + 1)
        shown = "  ".join(f"{'*' if i == there else ''}{i}: {sent[i - 1] / 1e6:.2f}" for i in around)
        print(f"  {stage.cluster[node].name} sent, MB by step: {shown}")
    if stage.rate is not None and firsts != {there}:  # loopback's counters cannot tell the nodes apart
        raise RuntimeError(f"the codec changed at steps {firsts}, announced was {there}")
    print(f"  changed at step {there} on every node, and back at {back}; all {steps} steps done, none lost")
    return {"system": "gradcomm", "method": f"set-codec {new}", "effective_step": there, "steps": steps}


def set_codec(stage: Stage, job: str, codec: str) -> int:
    """Asks the first daemon; the step from which it holds everywhere. RuntimeError with what gcctl says otherwise."""
    print(f"  $ gcctl set-codec --job {job} {codec}", flush=True)
    argv = [str(TOOLS / "gcctl"), "--address", stage.cluster[0].admin, "--json", "set-codec", "--job", job, codec]
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        raise RuntimeError(answer.stderr.strip())
    said = json.loads(answer.stdout)
    print(f"    {said['message']}")
    return int(said["effective_step"])


def play(args: argparse.Namespace) -> int:
    """The whole demo. Exit status."""
    began = time.monotonic()
    shaped = netns.shaping() is not None
    print(common.describe(common.machine()))
    with tempfile.TemporaryDirectory(prefix="gcdemo-") as folder, netns.open_lab(2, args.rate) as lab:
        if shaped:
            print(f"two hosts in network namespaces ({lab.means}), links shaped to {args.rate} both ways")
        else:
            print(f"two daemons on loopback, unshaped: no speed-up to expect here ({netns.probe().reason})")
        with daemons.Daemons(lab.hosts) as cluster:
            stage = Stage(lab, cluster, Path(folder), args.rate if shaped else None, args.steps)
            time_steps(stage)
            train(stage, args.seconds)
            steered = steer(stage)
    rows = report.rows(stage.timed, stage.long, stage.rate)
    where = f"at {args.rate}" if shaped else "on unshaped loopback"
    title = f"GPT, 3.0 M parameters, two nodes {where}"
    report.plot(stage.long, rows, title, args.plot)
    print(f"\n(d) {title}\n\n{report.table(rows)}\n")
    if stage.unshaped:
        even = report.break_even(stage.timed[0], *stage.unshaped)
        print(textwrap.fill(report.say_break_even(even), 118))
        steered |= {"break_even_bits_per_second": even.bits_per_second}
    print(f"Picture: {args.plot}\n\n{OWN_MACHINES.format(codec=CODEC)}\n\n{time.monotonic() - began:.0f} s altogether")
    common.write_json(args.json, [*rows, steered])
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=command.rate, default="100mbit", help="of the links (default 100mbit)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of training with each, in part (b) (default 45)")
    parser.add_argument("--steps", type=command.count, default=10, help="timed in part (a) (default 10)")
    parser.add_argument("--plot", type=Path, default=Path("out/demo.png"), metavar="FILE", help="default out/demo.png")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        with processes.exits_on_signals():
            return play(args)
    except KeyboardInterrupt:
        print("\ninterrupted; everything that was started has been ended", file=sys.stderr)
        return 130
    except (RuntimeError, OSError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
