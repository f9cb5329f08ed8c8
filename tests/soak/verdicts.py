"""Whether a soak with faults kept what is promised: from its record to verdicts.

What may live here: when training has recovered from a fault, throughput with and without faults, what counts as kept.
What may not: clocks, processes, pages.

Recovered is a job as soon as it makes ``WINDOW`` steps in a row at no less than 1 / ``SLACK`` of its undisturbed pace,
and it has recovered at the first of those. What is outside the faults is therefore from a recovery to the next fault,
and whether the pace holds there is judged by itself.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.soak.record import Failure, Injected, Life, Record, Sample
from tests.soak.schedule import KINDS, Times, limit

WINDOW = 8
SLACK = 1.3
#: shared memory may be larger at the end than at the beginning by this
MEMORY = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """One promise: whether it held, the figure it rests on, what is allowed."""

    what: str
    good: bool
    found: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Rates:
    """Steps a second: undisturbed, and between the faults."""

    calm: float
    outside: float

    @property
    def share(self) -> float:
        return self.outside / self.calm if self.calm else 0.0


def pace(times: Sequence[float]) -> float:
    """Seconds a step of steps that were complete at ``times``; ValueError for fewer than two."""
    if len(times) < 2:
        raise ValueError(f"{len(times)} step(s): expected at least 2, or there is no pace")
    return (times[-1] - times[0]) / (len(times) - 1)


def recovered_at(times: Sequence[float], since: float, seconds: float) -> float | None:
    """When training was back at ``seconds`` a step, at ``since`` or later, given when steps were complete; None: not
    yet, or not seen yet."""
    late = times[bisect.bisect_left(times, since) :]
    for first, last in zip(late, late[WINDOW:], strict=False):
        if last - first <= SLACK * WINDOW * seconds:
            return first
    return None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed (nearest rank); nan of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def recoveries(record: Record) -> list[float]:
    """Seconds from the end of each fault until training was back at its pace."""
    return [f.recovered - f.ended for f in record.faults if f.recovered is not None]


def outside(record: Record) -> list[tuple[float, float]]:
    """(from, to) of the stretches between a recovery and the next fault, and from the last one to the final calm."""
    ends = [f.began for f in record.faults[1:]] + [record.calm[-1][0]] if record.calm else []
    return [(f.recovered, end) for f, end in zip(record.faults, ends, strict=False) if f.recovered is not None]


def rates(record: Record) -> Rates:
    """Over stretches as they are: from the first completed step in one to its last."""
    times = [at for at, _ in record.completions()]
    return Rates(_rate(times, record.calm), _rate(times, outside(record)))


def _rate(times: Sequence[float], stretches: Sequence[tuple[float, float]]) -> float:
    steps = seconds = 0.0
    for start, end in stretches:
        within = [t for t in times if start <= t <= end]
        if len(within) > 1:
            steps += len(within) - 1
            seconds += within[-1] - within[0]
    return steps / seconds if seconds else 0.0


def judge(record: Record, times: Times, share: float, faults: int) -> list[Verdict]:
    """Everything that was promised. ``share``: of the undisturbed throughput, at least so much between faults;
    ``faults``: at least so many have to have happened."""
    return [
        _exact(record),
        _once(record),
        *_ends(record, times),
        _recovered(record, times),
        _throughput(record, share),
        _memory(record),
        Verdict("faults", len(record.faults) >= faults, f"{len(record.faults)}", f"at least {faults}"),
        Verdict("the run itself", not record.troubles, "; ".join(record.troubles) or "in order", "in order"),
    ]


def _exact(record: Record) -> Verdict:
    wrong = [
        f"life {life.number} rank {rank} step {step}"
        for life in record.lives
        for rank, steps in life.steps.items()
        for _, step, differing in steps
        if differing
    ]
    count = sum(len(steps) for life in record.lives for steps in life.steps.values())
    found = f"{count} results, {len(wrong)} wrong" + (f": {', '.join(wrong[:3])}" if wrong else "")
    return Verdict("every delivered aggregate exact", not wrong and count > 0, found, "bit by bit, on every rank")


def _once(record: Record) -> Verdict:
    bad = [text for life in record.lives for text in _disorder(life)]
    last = record.lives[-1] if record.lives else None
    if last is not None and len(last.left) != len(last.nodes):
        bad.append(f"ranks {sorted(last.left)} of {len(last.nodes)} left the last life in good order")
    return Verdict("nothing delivered twice or left out", not bad, "; ".join(bad[:3]) or "no", "each step once a rank")


def _disorder(life: Life) -> list[str]:
    found = []
    for rank, steps in sorted(life.steps.items()):
        numbers = [step for _, step, _ in steps]
        if numbers != list(range(life.first, life.first + len(numbers))):
            at = next(i for i, n in enumerate(numbers) if n != life.first + i)
            found.append(f"life {life.number} rank {rank}: step {numbers[at]} where {life.first + at} was due")
    return found


def _ends(record: Record, times: Times) -> list[Verdict]:
    """Where the job ended: whether it may, whether every rank was told with the right error, and in time."""
    bad, late, told = [], [], 0
    worst = 0.0
    for life in record.lives:
        failures = [f for f in record.failures if f.life == life.number]
        cause = next((f for f in record.faults if f.life == life.number and f.after != f.life), None)
        if cause is None:
            bad += [f"life {life.number} ended without a fault: {_said(f)}" for f in failures[:1]]
            continue
        kind = KINDS[cause.fault.kind]
        if kind.ends == "never":
            bad.append(f"fault {cause.fault.number} ({kind.name}) ended the job: {_said(failures[0])}")
        for failure in failures:
            if failure.error and (not failure.typed or failure.error not in kind.errors):
                bad.append(f"fault {cause.fault.number} ({kind.name}): {_said(failure)}")
            due = _due(cause, failure, times)
            if not failure.error or failure.at > due:
                late.append(f"fault {cause.fault.number} ({kind.name}): {_said(failure)}")
            told += 1
            worst = max(worst, failure.at - cause.began)
        silent = set(range(len(life.nodes))) - {f.rank for f in failures} - {cause.victim}
        late += [f"fault {cause.fault.number} ({kind.name}): rank {rank} was told nothing" for rank in sorted(silent)]
    for fault in record.faults:
        if KINDS[fault.fault.kind].ends == "always" and fault.after == fault.life:
            bad.append(f"fault {fault.fault.number} ({fault.fault.kind}) should have ended the job and did not")
    return [
        Verdict("every failure typed", not bad, "; ".join(bad[:3]) or f"{told} errors on ranks", "as the fault's kind"),
        Verdict(
            "every failure in time",
            not late,
            "; ".join(late[:3]) or f"at most {worst:.1f} s after the fault began",
            f"lease {times.lease:g} s, deadline {times.deadline:g} s, {times.margin:g} s more",
        ),
    ]


def _due(cause: Injected, failure: Failure, times: Times) -> float:
    """Until when a rank must have been told: a worker that was held still can hear of it only afterwards."""
    due = cause.began + limit(KINDS[cause.fault.kind], times)
    return max(due, cause.ended + times.margin) if failure.rank == cause.victim else due


def _said(failure: Failure) -> str:
    what = failure.error or "nothing until it was killed"
    text = f" ({failure.text[:200]})" if failure.text else ""
    return f"rank {failure.rank} of life {failure.life} said {what}{text}"


def _recovered(record: Record, times: Times) -> Verdict:
    lost = [f"{f.fault.number} ({f.fault.kind})" for f in record.faults if f.recovered is None]
    found = recoveries(record)
    text = f"median {percentile(found, 0.5):.2f} s, 95th percentile {percentile(found, 0.95):.2f} s"
    return Verdict(
        "recovered from every fault",
        not lost and bool(found),
        f"not from {', '.join(lost)}" if lost else text,
        f"within {times.patience:g} s",
    )


def _throughput(record: Record, share: float) -> Verdict:
    found = rates(record)
    text = f"{found.outside:.2f} of {found.calm:.2f} steps/s: {100 * found.share:.1f} %"
    return Verdict("throughput outside the faults", found.share >= share > 0, text, f"at least {100 * share:g} %")


def _memory(record: Record) -> Verdict:
    if len(record.calm) < 2:
        return Verdict("shared memory given back", False, "no calm at both ends", "both to compare")
    first, last = (
        [s for s in record.samples if start <= s.at <= end] for start, end in (record.calm[0], record.calm[-1])
    )
    if not first or not last:
        return Verdict("shared memory given back", False, "no samples", "some at both ends")
    before, after = _median(first), _median(last)
    jobs = max(s.jobs for s in last)
    return Verdict(
        "shared memory given back",
        after <= before + MEMORY and jobs <= record.nodes,
        f"{before / 2**20:.1f} MiB at first, {after / 2**20:.1f} at last, {jobs} jobs' folders on {record.nodes} nodes",
        f"{MEMORY / 2**20:g} MiB more at most, one folder a node",
    )


def _median(samples: Sequence[Sample]) -> float:
    return statistics.median(s.shared for s in samples)
