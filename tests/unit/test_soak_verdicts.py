"""What is judged of a soak with faults, on records made up for it: also those that must not pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from tests.soak import report
from tests.soak.record import Failure, Injected, Life, Record, Sample
from tests.soak.schedule import Fault, Times
from tests.soak.verdicts import WINDOW, judge, outside, pace, percentile, rates, recovered_at, recoveries

TIMES = Times(deadline=15.0, lease=10.0, margin=5.0, patience=45.0)
RANKS = 2
PROMISES = {
    "exact": "every delivered aggregate exact",
    "once": "nothing delivered twice or left out",
    "typed": "every failure typed",
    "in time": "every failure in time",
    "recovered": "recovered from every fault",
    "throughput": "throughput outside the faults",
    "memory": "shared memory given back",
    "faults": "faults",
    "run": "the run itself",
}


def train(life: Life, start: float, end: float, rate: float = 10.0) -> None:
    """Steps of all ranks from ``start`` to ``end``."""
    step = life.first + len(life.steps[0])
    for k in range(math.floor((end - start) * rate + 1e-6)):
        for rank in range(RANKS):
            life.steps[rank].append((start + (k + 1) / rate + 0.001 * rank, step + k, 0))


def fault(number: int, kind: str) -> Fault:
    return Fault(number, kind, 0, 1, 3.0, 0.0, 1)


def record() -> Record:
    """A run in which all is well: a lane is killed at 20 and training goes on at 22, a worker at 40, which is told at
    40.2 to the other, after which a new life begins at 45, from step 301 on."""
    r = Record(1, RANKS, 0.0, calm=[(2.0, 18.0), (60.0, 80.0)])
    first, second = Life(0, (0, 1), 1, 0.0), Life(1, (1, 0), 301, 41.0)
    train(first, 0.0, 20.0)
    train(first, 22.0, 40.0)
    train(second, 45.0, 80.0)
    second.left = {0, 1}
    r.lives = [first, second]
    r.faults = [
        Injected(fault(1, "kill-lane"), 20.0, 0, ended=20.0, after=0, recovered=22.1),
        Injected(fault(2, "kill-worker"), 40.0, 0, victim=0, ended=40.0, after=1, recovered=45.1),
    ]
    r.failures = [Failure(0, 1, 40.2, "WorkerLost", True, "rank 0 went away")]
    r.samples = [Sample(float(t), 20 << 20, RANKS) for t in range(80)]
    return r


def kept(r: Record, share: float = 0.95, faults: int = 2) -> set[str]:
    """Short names of the promises that were not kept."""
    bad = {v.what for v in judge(r, TIMES, share, faults) if not v.good}
    return {short for short, what in PROMISES.items() if what in bad}


def test_a_good_run_keeps_everything() -> None:
    r = record()
    assert {v.what for v in judge(r, TIMES, 0.95, 2)} == set(PROMISES.values())
    assert kept(r) == set()


def wrong(r: Record) -> None:
    at, step, _ = r.lives[1].steps[1][7]
    r.lives[1].steps[1][7] = (at, step, 3)


def nothing(r: Record) -> None:
    for life in r.lives:
        life.steps.clear()


def twice(r: Record) -> None:
    r.lives[0].steps[1].insert(5, r.lives[0].steps[1][4])


def skipped(r: Record) -> None:
    del r.lives[0].steps[1][5]


def stayed(r: Record) -> None:
    r.lives[1].left = {0}


def untyped(r: Record) -> None:
    r.failures = [Failure(0, 1, 40.2, "WorkerLost", False)]


def other_error(r: Record) -> None:
    r.failures = [Failure(0, 1, 40.2, "CorruptFrame", True)]


def silent(r: Record) -> None:
    r.failures = []


def killed(r: Record) -> None:
    r.failures = [Failure(0, 1, 41.0, "", False)]


def late(r: Record) -> None:
    r.failures = [Failure(0, 1, 45.1, "WorkerLost", True)]


def ended_by_a_lane(r: Record) -> None:
    r.faults[1] = Injected(fault(2, "kill-lane"), 40.0, 0, ended=40.0, after=1, recovered=45.1)
    r.failures.append(Failure(0, 0, 40.2, "PeerLost", True))


def went_on(r: Record) -> None:
    r.faults[0] = Injected(fault(1, "kill-worker"), 20.0, 0, victim=0, ended=20.0, after=0, recovered=22.1)


def without_fault(r: Record) -> None:
    r.failures.append(Failure(1, 0, 70.0, "PeerLost", True))


def never_back(r: Record) -> None:
    r.faults[1].recovered = None


def slow(r: Record) -> None:
    steps = r.lives[0].steps
    for rank in range(RANKS):
        steps[rank] = [s for s in steps[rank] if s[0] < 21.0]
    train(r.lives[0], 22.0, 40.0, rate=8.0)


def leak(r: Record) -> None:
    for sample in r.samples[60:]:
        sample.shared += 2 << 20


def leftover(r: Record) -> None:
    for sample in r.samples[60:]:
        sample.jobs += 1


def few(r: Record) -> None:
    del r.faults[0]


def trouble(r: Record) -> None:
    r.troubles.append("n1 still runs though it was told to drain")


@pytest.mark.parametrize(("spoil", "found"), [
    (wrong, {"exact"}),
    (nothing, {"exact", "throughput"}),
    (twice, {"once"}),
    (skipped, {"once"}),
    (stayed, {"once"}),
    (untyped, {"typed"}),
    (other_error, {"typed"}),
    (silent, {"in time"}),
    (killed, {"in time"}),
    (late, {"in time"}),
    (ended_by_a_lane, {"typed"}),
    (went_on, {"typed"}),
    (without_fault, {"typed"}),
    (never_back, {"recovered"}),
    (slow, {"throughput"}),
    (leak, {"memory"}),
    (leftover, {"memory"}),
    (few, {"faults"}),
    (trouble, {"run"}),
])  # fmt: skip
def test_what_is_not_kept_is_found(spoil: Callable[[Record], None], found: set[str]) -> None:
    r = record()
    spoil(r)
    assert found <= kept(r)
    assert kept(r) <= found | {"throughput"}


def test_a_held_worker_may_hear_of_it_when_it_goes_on() -> None:
    r = record()
    stalled = Injected(fault(2, "stall-worker"), 40.0, 0, victim=0, ended=58.0, after=1, recovered=65.0)
    r.faults[1] = stalled
    r.failures = [Failure(0, 1, 55.4, "StepTimeout", True), Failure(0, 0, 58.3, "StepTimeout", True)]
    assert "in time" not in kept(r)
    r.failures[0] = Failure(0, 1, 60.1, "StepTimeout", True)  # the one that was not held
    assert "in time" in kept(r)


def test_a_job_may_outlive_damage_or_end_of_it() -> None:
    r = record()
    r.faults[0] = Injected(fault(1, "corruption"), 20.0, 0, ended=20.0, after=0, recovered=22.1)
    r.faults[1] = Injected(fault(2, "corruption"), 40.0, 0, ended=40.0, after=1, recovered=45.1)
    r.failures = [Failure(0, rank, 40.2, "CorruptFrame", True) for rank in range(RANKS)]
    assert kept(r) == set()


def test_recovery_counts_from_the_end_of_the_fault() -> None:
    assert recoveries(record()) == pytest.approx([2.1, 5.1])


def test_outside_is_from_a_recovery_to_the_next_fault() -> None:
    assert outside(record()) == [(22.1, 40.0), (45.1, 60.0)]
    assert rates(record()).share == pytest.approx(1.0, rel=1e-3)


def test_training_is_back_only_with_a_full_window_at_its_pace() -> None:
    before = [0.1 * k for k in range(10)]
    # one straggler right after the fault, then a second of nothing, then the pace
    after = [1.05, *(2.0 + 0.1 * k for k in range(WINDOW + 1))]
    assert recovered_at([*before, *after], 1.0, 0.1) == 2.0
    assert recovered_at([*before, *after[:-1]], 1.0, 0.1) is None
    slow = [2.0 + 0.15 * k for k in range(30)]
    assert recovered_at(slow, 1.0, 0.1) is None


def test_pace_and_percentiles() -> None:
    assert pace([1.0, 1.5, 3.0]) == 1.0
    with pytest.raises(ValueError, match="at least 2"):
        pace([1.0])
    values = [float(v) for v in range(1, 21)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile(values, 1.0)) == (10.0, 19.0, 20.0)
    assert percentile([3.0], 0.95) == 3.0
    assert math.isnan(percentile([], 0.5))


def test_the_page_shows_every_fault_and_needs_nothing_else() -> None:
    r = record()
    r.faults[0].notes = "<b>4</b> bytes"
    page = report.page(r, judge(r, TIMES, 0.95, 2), "a machine")
    assert "2 faults on 2 nodes: passed" in page
    plot = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    assert len(plot.findall("rect")) == len(r.calm) + len(r.faults)
    line = plot.findall("polyline")[0].attrib["points"].split()
    assert len(line) == 2 * 81  # two corners a second
    assert "kill-lane" in page and "WorkerLost on 1" in page and "&lt;b&gt;4" in page
    assert "http" not in page and "src=" not in page
    r.faults[1].recovered = None
    assert "FAILED" in report.page(r, judge(r, TIMES, 0.95, 2), "a machine")


def test_figures_are_those_of_the_record() -> None:
    found = report.figures(record())
    assert (found["faults"], found["lives"], found["steps"]) == (2, 2, 730)
    assert found["results"] == 1460
    assert found["recovery_p95_s"] == pytest.approx(5.1)
    assert found["recovery_median_job_kept_s"] == pytest.approx(2.1)


def test_the_record_as_json_counts_from_the_beginning() -> None:
    r = record()
    r.began = 1.0
    plain = r.to_json()
    assert plain["faults"][0]["began"] == 19.0 and plain["faults"][0]["kind"] == "kill-lane"
    assert plain["lives"][1] == {"number": 1, "nodes": (1, 0), "first": 301, "last": 650}
    assert len(plain["completions"]) == 730
