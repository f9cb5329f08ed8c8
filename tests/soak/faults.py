"""Real faults, one after the other, while four nodes train: ``python -m tests.soak.faults``, ``make soak-faults``.

Four daemons in network namespaces with shaped links and a /dev/shm of their own, one worker beside each
(`fault_worker.py`), pushing integers whose averages are known. A seeded schedule (`schedule.py`) says which fault comes
next; each is done (`injectors.py`), undone, and training watched until it is back at its pace. Where a fault ends the
job, its workers are started again as torchrun would (`crew.py`). At the beginning and at the end nothing is disturbed.

What is judged, and how, is in `verdicts.py`; the report is one page (`report.py`). Exit status 1 if anything was not
kept, 2 where there can be no namespaces. What may live here: the course of a run.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import common
from benchmarks.lab import daemons, netns, processes, procfs
from tests.soak import command, report, schedule, verdicts
from tests.soak.crew import Crew
from tests.soak.injectors import Field, InjectionError, Injector, impossible, injector
from tests.soak.proxy import Proxy, Route
from tests.soak.record import Injected, Record, Sample
from tests.soak.schedule import KINDS, Fault, Times

NODES = 4
SHARED = 128 << 20
#: The relay on node i, on the way to the next node: lane and control link, on addresses that only node i can reach.
RELAY = 8470
#: Steps until the pace is taken for granted.
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """``seconds``: of the whole run. ``calm``: of it undisturbed, at the beginning and again at the end."""

    seconds: float
    calm: float
    seed: int
    rate: str
    times: Times
    kinds: tuple[str, ...]


class Trouble(RuntimeError):
    """The run cannot go on; the reason is in the record."""


def settings(seconds: float, seed: int, rate: str, kinds: Sequence[str] | None = None) -> Settings:
    """A run of so many seconds. Below three minutes there is no time for faults longer than the lease.

    Without ``kinds``: all for which there is time, and the programs they are done with.
    """
    brief = seconds < 180
    times = Times(gap=(1.5, 3.0), hold=(0.5, 2.0)) if brief else Times()
    lacking = impossible()
    chosen = tuple(kinds) if kinds else tuple(k for k in (schedule.BRIEF if brief else KINDS) if k not in lacking)
    return Settings(seconds, min(30.0, max(5.0, seconds / 12)), seed, rate, times, chosen)


class Soak:
    """One run. ``go`` returns when it is over; the record then holds what happened."""

    def __init__(self, field: Field, settings: Settings, record: Record) -> None:
        self.field, self.settings, self.record = field, settings, record
        self.crew = field.crew
        self._sampled = 0.0
        self._step = math.nan

    def go(self) -> None:
        """Raises Trouble when the run has to be given up."""
        end = self.record.began + self.settings.seconds
        self._until(lambda: len(self.crew.life.complete()) > WARM_UP, "the first steps", 60.0)
        self._calm()
        self._step = verdicts.pace([t for t in self.crew.life.complete() if t >= self.record.calm[0][0]])
        say(f"undisturbed: {1 / self._step:.2f} steps/s")
        left_out = 0
        for fault in schedule.plan(self.settings.seed, NODES, self.settings.times, self.settings.kinds):
            if time.monotonic() + needed(fault) + self.settings.calm <= end:
                left_out = 0
                self._wait(fault.gap)
                self._suffer(fault)
            elif (left_out := left_out + 1) == len(self.settings.kinds):
                break
        self._wait(self.settings.times.gap[0])
        self._calm()
        self.crew.stop()
        self._until(lambda: self.crew.gone, "the workers to leave", 20.0)

    def _calm(self) -> None:
        start = time.monotonic()
        self._wait(self.settings.calm)
        self.record.calm.append((start, time.monotonic()))

    def _suffer(self, fault: Fault) -> None:
        """One fault from its beginning to the recovery."""
        kind, tool = KINDS[fault.kind], injector(self.field, fault)
        injected = Injected(fault, time.monotonic(), self.crew.life.number)
        self.record.faults.append(injected)
        try:
            with self._done(tool, injected):
                self._until(tool.over, f"fault {fault.number} to be over", fault.hold + 30.0, failing=True)
        except (InjectionError, netns.LabError) as error:
            raise self._trouble(f"fault {fault.number} ({fault.kind}): {error}") from error
        injected.after = injected.life
        if kind.ends == "always" or not self._recover(injected):
            self._again(injected)
            self._recover(injected)
        injected.notes = tool.notes()
        if injected.recovered is None:
            raise self._trouble(f"no recovery from fault {fault.number} ({fault.kind})")
        say(f"{injected.began - self.record.began:6.1f} s  {report.outcome(injected)}")

    @contextlib.contextmanager
    def _done(self, tool: Injector, injected: Injected) -> Iterator[None]:
        try:
            tool.began = injected.began
            tool.begin()
            injected.victim = tool.victim
            yield
        finally:
            tool.end()
            injected.ended = time.monotonic()

    def _recover(self, injected: Injected) -> bool:
        """Watches until training is back at its pace; False where the job has ended instead."""
        since, patience = injected.ended, self.settings.times.patience

        def back() -> bool:
            found = verdicts.recovered_at(self.crew.life.complete(), since, self._step)
            injected.recovered = found
            return found is not None or self.crew.failed

        with contextlib.suppress(Trouble):
            self._until(back, "the pace", patience, failing=True)
        return not self.crew.failed

    def _again(self, injected: Injected) -> None:
        """The job has ended, or is about to: waits until every rank knows, then starts it again."""
        kind, times = KINDS[injected.fault.kind], self.settings.times
        patience = max(injected.began + schedule.limit(kind, times), injected.ended + times.margin)
        with contextlib.suppress(Trouble):
            self._until(lambda: self.crew.gone, "the ranks' errors", patience - time.monotonic(), failing=True)
        if not self.crew.failed:
            raise self._trouble(f"fault {injected.fault.number} ({injected.fault.kind}) did not end the job")
        killed = [injected.victim] if injected.fault.kind == "kill-worker" else []
        self.crew.bury(killed)
        injected.recovered = None
        self.crew.start()
        injected.after = self.crew.life.number

    # ---------------------------------------------------------------------------------------- waiting
    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= until, "time to pass", seconds + 1.0)

    def _until(self, ready: Callable[[], bool], what: str, patience: float, failing: bool = False) -> None:
        """Reads logs until ``ready()``. Raises Trouble when it takes too long, or a worker fails that should not."""
        deadline = time.monotonic() + patience
        while not ready():
            self.crew.update()
            self._sample()
            if self.crew.failed and not failing:
                self.crew.bury(())
                raise self._trouble(f"the job ended while nothing was disturbed, waiting for {what}")
            if time.monotonic() > deadline:
                raise Trouble(f"waited {patience:.0f} s for {what}")
            time.sleep(0.02)
        self.crew.update()

    def _sample(self) -> None:
        now = time.monotonic()
        if now - self._sampled >= 1.0:
            self._sampled = now
            folders = [self.field.shared / d.state.relative_to("/dev/shm") for d in self.field.cluster]
            jobs = sum(1 for folder in folders for _ in (folder / "jobs").glob("*"))
            self.record.samples.append(Sample(now, sum(map(procfs.used_bytes, folders)), jobs))

    def _trouble(self, text: str) -> Trouble:
        self.record.troubles.append(text)
        return Trouble(text)


def needed(fault: Fault) -> float:
    """Seconds that a fault takes, more or less: where it ends the job, a new life has to begin."""
    return fault.gap + fault.hold + (12.0 if KINDS[fault.kind].ends == "always" else 4.0)


def say(text: str) -> None:
    print(text, flush=True)


def run(s: Settings) -> tuple[Record, str]:
    """(what happened, the ends of the daemons' logs). Raises LabError where there can be no namespaces."""
    record = Record(s.seed, NODES, time.monotonic())
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(netns.Lab(NODES, s.rate))
        hosts, shared = lab.shared_memory(SHARED)
        proxies = [stack.enter_context(Proxy(host, _routes(lab, host))) for host in lab.hosts]
        keys = {"cluster.lease": f"{s.times.lease:g}s", "job.deadline": f"{s.times.deadline:g}s"}
        routes = {(i, (i + 1) % NODES): f"tcp://127.0.0.1:{RELAY}" for i in range(NODES)}
        cluster = stack.enter_context(daemons.Daemons(hosts, {**keys, "codec.default": "fp16"}, routes=routes))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gcfaults-")))
        record.began = time.monotonic()
        crew = stack.enter_context(Crew(lab.hosts, cluster, folder, record))
        soak = Soak(Field(lab, cluster, crew, proxies, shared, netns.bits_per_second(s.rate)), s, record)
        try:
            soak.go()
        except Trouble as error:
            if str(error) not in record.troubles:
                record.troubles.append(str(error))
        logs = "\n".join(f"{d.name}:\n{d.log_tail(25)}" for d in cluster)
    return record, logs


def _routes(lab: netns.Lab, host: netns.Host) -> list[Route]:
    """Of the relay on ``host``: the next node's lane, and its control link on the port after."""
    to = lab.hosts[(host.index + 1) % NODES].address
    return [Route(("127.0.0.1", RELAY + i), (to, daemons.PORT + i)) for i in range(2)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and of the gradients")
    parser.add_argument("--rate", default="100mbit", help="of every link (default %(default)s)")
    parser.add_argument("--kinds", help=f"faults to draw from, comma separated, of {', '.join(KINDS)}")
    parser.add_argument("--faults", type=int, help="at least so many must happen (default 3 a minute)")
    parser.add_argument("--share", type=float, default=0.95, help="of the undisturbed throughput (default %(default)s)")
    parser.add_argument("--page", type=Path, default=Path("out/faults.html"), metavar="FILE")
    args = parser.parse_args(argv)
    seconds = command.seconds(args)
    if seconds < 30:
        parser.error("--seconds: expected at least 30, or nothing is undisturbed")
    try:
        chosen = settings(seconds, args.seed, args.rate, args.kinds.split(",") if args.kinds else None)
        schedule.plan(args.seed, NODES, chosen.times, chosen.kinds)
    except ValueError as error:
        parser.error(str(error))
    wanted = args.faults if args.faults is not None else math.floor(seconds / 20)
    lacking = [f"{kind} ({program} is not installed)" for kind, program in impossible().items()]
    if lacking and not args.kinds:
        say(f"left out: {', '.join(lacking)}")
    say(f"faults on {NODES} nodes at {args.rate} for {seconds:g} s, seed {args.seed}")
    try:
        with processes.exits_on_signals():
            record, logs = run(chosen)
    except netns.LabError as error:
        print(f"no faults without namespaces: {error}", file=sys.stderr)
        return 2
    found = verdicts.judge(record, chosen.times, args.share, wanted)
    for verdict in found:
        say(f"{'ok    ' if verdict.good else 'FAILED'} {verdict.what}: {verdict.found} (wanted: {verdict.wanted})")
    failed = [v for v in found if not v.good]
    if failed:
        say(logs)
    page = report.page(record, found, f"{common.describe(common.machine())}; {args.rate}")
    args.page.parent.mkdir(parents=True, exist_ok=True)
    args.page.write_text(page)
    say(f"report: {args.page}")
    rows: list[common.Row] = [{"system": "gradcomm", "nodes": NODES, "network": args.rate, **report.figures(record)}]
    common.write_json(args.json, rows, verdicts=[asdict(v) for v in found], record=record.to_json())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
