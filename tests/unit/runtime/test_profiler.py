"""Whose measurement is whose, what a profile is made of, when it is saved and taken up again.

What may live here: tests of `gcserver/runtime/profiler.py`, over a real control machine and real files. What may not:
what samples come to (`test_measurements.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gcclient.timing import DEPARTED_STEPS
from gcproto.dtypes import DType
from gcproto.manifest import USED, Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection
from gcproto.records import replace
from gcproto.timings import TensorTimes
from gcserver.core.control import ControlMachine
from gcserver.core.control_events import LogSettled
from gcserver.planner.drift import drift
from gcserver.planner.profile import CodecCost, Curve, LinkCost, Profile, dump, load
from gcserver.runtime.lanelink import KernelTime, KernelTimes
from gcserver.runtime.measurements import SETTLING
from gcserver.runtime.profiler import GUESS, QUIET, SAVE_EVERY, Profiler
from gcserver.runtime.profilestore import file_name
from tests.unit.core.control_machine import LARGE, declared, formed, said

JOB = b"j" * 16
WORKER = (JOB, 0)
LINK = LinkCost(1e-3, 5e7, 0.1, 12)
COSTS = {"topk": CodecCost(Curve(((1, 2.0),)), Curve(((1, 1.0),)), Curve(((1, 0.5),)), 0.02)}


@dataclass
class Daemon:
    """As much of a supervisor as a profiler uses. Work for other threads waits until the test lets it run."""

    machine: ControlMachine
    folder: Path | None
    now: float = 1000.0
    warnings: list[str] = field(default_factory=list)
    waiting: list[tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node = "a"
        self.answers = True
        self.filing = SimpleNamespace(do=self.file)
        node, plan = SimpleNamespace(lanes=1), SimpleNamespace(profiles=self.folder)
        self.config = SimpleNamespace(node=node, plan=plan)
        self.profiler = Profiler(self, lambda: self.now)  # type: ignore[arg-type]

    def warn_once(self, text: str) -> None:
        self.warnings.append(text)

    def file(self, what: str, work: Callable[[], Any], then: Callable[[Any], None] = lambda _: None) -> bool:
        assert what.endswith(".json")
        if self.answers:
            self.waiting.append((work, then))
        return self.answers

    def close(self) -> None:
        self.profiler.close()
        self.work()

    def work(self) -> None:
        while self.waiting:
            work, then = self.waiting.pop(0)
            then(work())

    def times(self, *ready: int, rank: int = 0, step: int = 4, **more: Any) -> None:
        self.profiler.on_tensor_times((JOB, rank), TensorTimes(0, step, ready, 200_000, 500_000, 500_000, **more))

    def known(self) -> Profile:
        profile = self.profiler.profile(JOB, 0)
        assert profile is not None
        return profile

    def files(self) -> list[Profile]:
        assert self.folder is not None
        return [load(p.read_bytes(), p.name) for p in sorted(self.folder.glob("*.json"))]


def daemon(folder: Path | None = None) -> Daemon:
    """One node, one rank, a DDP domain of b (300) and w (300, 300)."""
    made = Daemon(declared(whole=False)[0], folder)
    made.profiler.on_declared(JOB)
    return made


def test_nothing_is_known_before_anything_was_measured() -> None:
    a = daemon()
    assert a.profiler.profile(JOB, 0, COSTS, LINK) is None
    assert a.profiler.profile(JOB, 7) is None and a.profiler.profile(b"k" * 16, 0) is None


def test_a_profile_is_made_of_what_was_measured() -> None:
    a = daemon()
    a.times(30_000, 0, copied=1_000_000, copying=500)
    a.times(40_000, 0, copied=1_000_000, copying=500, buckets=(360_000, 1200))
    a.profiler.on_kernels(KernelTimes((JOB, 0), (KernelTime("topk", "encode", 90_300, 2, 6.0),)))
    profile = a.profiler.profile(JOB, 0, COSTS, LINK)
    assert profile is not None
    assert (profile.job, profile.domain, profile.nodes, profile.local_ranks, profile.lanes) == ("train", "ddp", 1, 1, 1)
    assert [(t.name, t.shape, t.elements, t.dtype, t.ready, t.address) for t in profile.tensors] == [
        ("w", (300, 300), 90_000, "float32", 0.0, 300),
        ("b", (300,), 300, "float32", 0.03, 0),
    ]
    assert (profile.forward, profile.backward) == (0.2, 0.03)
    assert (profile.copy, profile.busy, profile.link, profile.codecs) == (2e9, 1.5, LINK, COSTS)
    assert (profile.partition_bytes, profile.min_compress_bytes) == (4 << 20, 64 << 10)
    assert profile.blocks == ((0, 90_300, 0, 0),) and not profile.whole
    assert profile.buckets == (360_000, 1200) and not profile.tolerant


def test_a_profile_says_whether_blocks_may_cut_tensors() -> None:
    a = Daemon(declared(whole=True)[0], None)
    a.times(30_000, 0)
    assert a.known().whole


def test_addresses_go_on_over_sections() -> None:
    a = daemon()
    said(a.machine, 1, DeclareSection(0, Section(1, (TensorSpec("n", (8,), int(DType.F64)),))))
    a.profiler.on_declared(JOB)
    a.times(0, 10, 20)
    assert [(t.name, t.dtype, t.address) for t in a.known().tensors][2] == ("n", "float64", 90_300)
    assert a.known().blocks[-1][:2] == (90_300, 8)
    assert [t.group for t in a.known().tensors] == [90_300 * 4, 90_300 * 4, 64]


def test_what_a_worker_brings_one_by_one_is_a_group_each() -> None:
    a = daemon()
    each = tuple(TensorSpec(name, (n,), int(DType.F32)) for name, n in (("m", 8), ("n", 6)))
    said(a.machine, 1, DeclareSection(0, Section(1, each, cuts=(1,))))
    a.profiler.on_declared(JOB)
    a.times(0, 10, 20, 30)
    assert [(t.name, t.group) for t in a.known().tensors][2:] == [("m", 32), ("n", 24)]


def test_what_a_worker_adds_to_its_model_is_no_tensor_of_it() -> None:
    a = daemon()
    said(a.machine, 1, DeclareSection(0, Section(1, (TensorSpec(USED, (2,), int(DType.F64)),))))
    a.profiler.on_declared(JOB)
    a.times(0, 10)
    assert {t.name for t in a.known().tensors} == {"b", "w"}
    assert a.known().blocks == ((0, 90_300, 0, 0),)


def test_what_was_not_measured_is_a_guess_or_neutral() -> None:
    a = daemon()
    a.times(0, 10)
    profile = a.known()
    assert (profile.link, profile.busy, profile.codecs, profile.errors, profile.steps) == (GUESS, 1.0, {}, {}, ())
    assert not profile.link.samples


def test_a_machine_faster_than_when_it_was_calibrated_is_not_less_than_free() -> None:
    a = daemon()
    a.times(0, 10)
    a.profiler.on_kernels(KernelTimes((JOB, 0), (KernelTime("topk", "encode", 90_300, 2, 1.0),)))
    profile = a.profiler.profile(JOB, 0, COSTS)
    assert profile is not None and profile.busy == 1.0


def test_what_was_given_is_remembered() -> None:
    a = daemon()
    a.times(0, 10)
    a.profiler.profile(JOB, 0, COSTS, LINK, {"topk": ()})
    assert (a.known().codecs, a.known().link, a.known().errors) == (COSTS, LINK, {"topk": ()})
    other = {"fp16": COSTS["topk"]}
    assert a.profiler.profile(JOB, 0, other).codecs == COSTS | other, "who asks for others takes nothing away"


def test_steps_count_for_the_plan_they_ran_under() -> None:
    a = daemon()
    a.times(0, 10)
    domain = a.machine.jobs[JOB].domains[0]
    domain.switches = [(0, 0), (11, 2)]
    for step in range(1, 21):
        a.now += 1.0 if step < 11 else 3.0
        a.profiler.on_settled(LogSettled((JOB, 0), step, False, 2, 2))
    assert [(s.plan, s.seconds, s.steps) for s in a.known().steps] == [
        (0, 1.0, 9 - SETTLING), (2, 3.0, 9 - SETTLING),
    ]  # fmt: skip


def test_steps_of_the_warm_up_say_nothing_of_the_plan_after_it() -> None:
    a = daemon()
    a.times(0, 10)
    domain = a.machine.jobs[JOB].domains[0]
    domain.config = replace(domain.config, warmup=30)
    for step in range(1, 61):
        a.now += 1.0 if step <= 30 else 3.0
        a.profiler.on_settled(LogSettled((JOB, 0), step, False, 0, 2))
    ((plan, seconds),) = [(s.plan, s.seconds) for s in a.known().steps]
    assert (plan, seconds) == (0, 3.0)


@pytest.mark.parametrize(("label", "seconds"), [("audit of ddp over 5 steps", 1.0), ("calls", 9.0)])
def test_steps_that_were_audited_say_nothing_of_their_plan(label: str, seconds: float) -> None:
    """Their gradients are exchanged once more before the next step, in a process group of the audit's own."""
    a = daemon()
    a.times(0, 10)
    said(a.machine, 1, DeclareDomain(label, 77, (0,), codec="none"))
    for step in range(1, 41):
        if step > 15:
            a.now += 8.0
            a.profiler.on_settled(LogSettled((JOB, 77), 2 * step, False, 0, 2))
        a.now += 1.0
        a.profiler.on_settled(LogSettled((JOB, 0), step, False, 0, 2))
    assert [s.seconds for s in a.known().steps] == [seconds]


def test_where_every_call_is_a_step_there_is_no_profile() -> None:
    a = Daemon(formed(scoped=False), None)
    a.profiler.on_declared(JOB)
    a.profiler.on_tensor_times(WORKER, TensorTimes(0, 4, (0,)))
    a.profiler.on_settled(LogSettled((JOB, 0), 1, False, 0, 256))
    assert a.profiler.profile(JOB, 0) is None and not a.waiting


def test_strangers_and_other_tensors_change_nothing() -> None:
    a = daemon()
    a.profiler.on_tensor_times(None, TensorTimes(0, 4, (0, 10)))
    a.profiler.on_tensor_times((b"k" * 16, 0), TensorTimes(0, 4, (0, 10)))
    a.profiler.on_tensor_times(WORKER, TensorTimes(9, 4, (0, 10)))
    a.profiler.on_kernels(KernelTimes((b"k" * 16, 0), ()))
    assert not a.warnings
    a.times(0, 10, 20)
    assert a.profiler.profile(JOB, 0) is None
    assert "rank 0" in a.warnings[0] and "2 tensors, got 3" in a.warnings[0]


def test_what_is_measured_later_drifts_from_an_earlier_profile() -> None:
    a = daemon()
    a.times(0, 100_000)
    before = a.known()
    assert drift(before, a.known()) == 0.0
    for _ in range(DEPARTED_STEPS):
        a.times(0, 400_000)
    assert drift(before, a.known()) == pytest.approx(0.6 / 0.3 - 1)


# ----------------------------------------------------------------------------------------------- keeping
def test_a_series_is_saved_once_it_is_over(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    for _ in range(3):
        a.now += 1.0
        a.times(0, 10)
        a.profiler.tick()
    a.work()
    assert not a.files()
    a.now += QUIET
    for _ in range(3):
        a.profiler.tick()
    assert len(a.waiting) == 1, "once"
    a.work()
    assert a.files() == [a.known()] and not a.warnings


def test_what_is_learned_is_saved_now_and_then(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.times(0, 10)
    a.now += QUIET
    a.profiler.tick()
    a.work()
    for i in range(10):
        a.now += 1.0
        a.profiler.profile(JOB, 0, link=LinkCost(1e-3, 1e8 + i, 0.1, 5))
        a.profiler.tick()
    assert not a.waiting
    a.now += SAVE_EVERY
    a.profiler.tick()
    a.work()
    assert a.files()[0].link.bandwidth == 1e8 + 9
    a.now += 10 * SAVE_EVERY
    a.profiler.profile(JOB, 0, link=a.known().link)
    a.profiler.tick()
    assert not a.waiting, "nothing new"


def test_the_end_saves_the_times_of_the_last_steps_too(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.times(0, 10)
    a.now += QUIET
    a.profiler.tick()
    a.work()
    for step in range(1, 10):
        a.now += 1.0
        a.profiler.on_settled(LogSettled((JOB, 0), step, False, 0, 2))
    a.close()
    assert a.files()[0].steps[0].steps == 8 - SETTLING


def test_without_a_measurement_the_end_saves_nothing(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.times(0, 10)
    a.close()
    (before,) = tmp_path.glob("*.json")
    inode = before.stat().st_ino
    b = daemon(tmp_path)
    b.work()
    b.close()
    assert b.known() is not None and before.stat().st_ino == inode


def test_the_end_of_the_daemon_or_of_the_job_saves_what_is_due(tmp_path: Path) -> None:
    a = daemon(tmp_path / "daemon")
    a.times(0, 10)
    a.close()
    assert a.files() == [a.known()]
    b = daemon(tmp_path / "job")
    b.times(0, 20)
    expected = b.known()
    b.machine.jobs.clear()
    b.profiler.forget(JOB)
    b.work()
    assert b.files() == [expected]
    b.close()


def test_a_disk_that_does_not_answer_gets_no_second_profile_before_the_end(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.work()
    a.times(0, 10)
    for _ in range(4):
        a.now += SAVE_EVERY + QUIET
        a.times(0, 20)
        a.now += QUIET
        a.profiler.tick()
    assert len(a.waiting) == 1
    a.work()
    a.now += 2 * SAVE_EVERY
    a.profiler.tick()
    assert len(a.waiting) == 1, "what was due meanwhile"
    a.close()
    assert a.files() == [a.known()]


def test_what_the_disk_did_not_take_is_tried_again(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.work()
    a.times(0, 10)
    a.now += QUIET
    a.answers = False
    a.profiler.tick()
    a.answers = True
    a.profiler.tick()
    assert not a.waiting, "not at once"
    a.now += SAVE_EVERY
    a.profiler.tick()
    a.work()
    assert a.files() == [a.known()]


def test_the_next_run_starts_from_what_was_kept(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.times(30_000, 0, tolerant=True)
    a.profiler.profile(JOB, 0, COSTS, LINK)
    for step in range(1, 10):
        a.now += 1.0
        a.profiler.on_settled(LogSettled((JOB, 0), step, False, 0, 2))
    a.close()
    b = daemon(tmp_path)
    assert b.profiler.profile(JOB, 0) is None, "not read yet: another thread does"
    b.work()
    # The numbers of plans mean something else in another run.
    assert a.known().steps and b.known() == msgspec.structs.replace(a.known(), steps=())
    assert b.known().tolerant
    b.times(50_000, 0)
    assert b.known().backward == 0.05 and b.known().codecs == COSTS and b.known().link == LINK
    assert not b.known().tolerant, "this run has another optimizer"


def test_a_job_that_goes_on_with_other_nodes_is_kept_under_their_name(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.times(30_000, 0)
    (job,) = a.machine.jobs.values()
    (domain,) = job.domains.values()
    fewer = domain.config.members[:1]
    domain.config = replace(domain.config, members=fewer)
    profile = a.profiler.profile(JOB, 0)
    assert profile is not None and (profile.nodes, profile.backward) == (1, 0.03), "what tensors take is known still"
    a.close()
    name = file_name(job.record.label, domain.config.label, tuple(domain.sections), fewer, "a")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_another_model_starts_from_nothing(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.times(0, 10)
    a.close()
    b = Daemon(formed(), tmp_path)
    b.profiler.on_declared(JOB)
    b.work()
    assert b.profiler.profile(JOB, 0) is None


def test_more_tensors_are_another_profile(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.times(0, 10)
    a.close()
    b = daemon(tmp_path)
    said(b.machine, 1, DeclareSection(0, Section(1, (TensorSpec("n", (8,), int(DType.F64)),))))
    b.profiler.on_declared(JOB)
    # What was read for the first section came late: it is of other tensors.
    b.work()
    assert b.profiler.profile(JOB, 0) is None


def test_a_broken_file_is_said_once_and_measured_anew(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.times(0, 10)
    a.close()
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(dump(a.known())[:100])
    b = daemon(tmp_path)
    b.profiler.on_settled(LogSettled((JOB, 0), 1, False, 0, 2))
    b.work()
    assert b.profiler.profile(JOB, 0) is None and len(b.warnings) == 1 and "measured anew" in b.warnings[0]
    b.times(0, 20)
    b.close()
    assert b.files() == [b.known()]


def test_a_profile_that_cannot_be_made_ends_neither_daemon_nor_job(tmp_path: Path) -> None:
    a = daemon(tmp_path)
    a.times(30_000, 0)
    a.profiler.on_kernels(KernelTimes((JOB, 0), (KernelTime("topk", "encode", 90_300, 2, 6.0),)))
    a.profiler.profile(JOB, 0, COSTS, LINK)
    watched = next(iter(a.profiler._table.values()))
    watched.learned["codecs"] = {"Topk": next(iter(COSTS.values()))}
    a.profiler.forget(JOB)
    assert "cannot be made, it is not saved: TableError" in a.warnings[-1] and not a.files()


def test_a_second_domain_has_a_profile_of_its_own() -> None:
    a = daemon()
    said(a.machine, 1, DeclareDomain("ddp.1", 3, (0,), True))
    said(a.machine, 1, DeclareSection(3, LARGE))
    a.profiler.on_declared(JOB)
    a.times(0, 10)
    a.profiler.on_tensor_times(WORKER, TensorTimes(3, 4, (90, 0)))
    first, second = a.profiler.profile(JOB, 0), a.profiler.profile(JOB, 3)
    assert first is not None and second is not None
    assert (first.domain, first.backward) == ("ddp", 1e-5) and (second.domain, second.backward) == ("ddp.1", 9e-5)
