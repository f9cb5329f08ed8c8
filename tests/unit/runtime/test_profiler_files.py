"""When a profile is saved, what the disk does about it, and how the next run takes it up again.

What may live here: tests of `gcserver/runtime/profiler.py` with files. What may not: what is in a profile
(`test_profiler.py`), how files are written (`test_profilestore.py`) and by whom (`test_filing.py`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gcproto.dtypes import DType
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareSection
from gcproto.records import replace
from gcserver.core.control_events import LogSettled
from gcserver.planner.profile import LinkCost, dump
from gcserver.runtime.lanelink import KernelTime, KernelTimes
from gcserver.runtime.measurements import SETTLING
from gcserver.runtime.profiler import QUIET, SAVE_EVERY
from gcserver.runtime.profilestore import file_name
from tests.unit.core.control_machine import formed, said
from tests.unit.runtime.profiled import COSTS, JOB, LINK, Daemon, daemon


def ended(folder: Path) -> Daemon:
    """A run that measured something and ended."""
    a = daemon(folder)
    a.times(0, 10)
    a.close()
    return a


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
    ended(tmp_path)
    (before,) = tmp_path.glob("*.json")
    inode = before.stat().st_ino
    b = daemon(tmp_path)
    b.work()
    b.close()
    assert b.known() is not None and before.stat().st_ino == inode


def test_the_end_of_the_daemon_or_of_the_job_saves_what_is_due(tmp_path: Path) -> None:
    a = ended(tmp_path / "daemon")
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
    ended(tmp_path)
    b = Daemon(formed(), tmp_path)
    b.profiler.on_declared(JOB)
    b.work()
    assert b.profiler.profile(JOB, 0) is None


def test_more_tensors_are_another_profile(tmp_path: Path) -> None:
    ended(tmp_path)
    b = daemon(tmp_path)
    said(b.machine, 1, DeclareSection(0, Section(1, (TensorSpec("n", (8,), int(DType.F64)),))))
    b.profiler.on_declared(JOB)
    # What was read for the first section came late: it is of other tensors.
    b.work()
    assert b.profiler.profile(JOB, 0) is None


def test_a_broken_file_is_said_once_and_measured_anew(tmp_path: Path) -> None:
    a = ended(tmp_path)
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
