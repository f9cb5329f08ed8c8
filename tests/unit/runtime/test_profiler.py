"""Whose measurement is whose, and what a profile is made of.

What may live here: tests of `gcserver/runtime/profiler.py`. What may not: when it is saved and taken up again
(`test_profiler_files.py`), what samples come to (`test_measurements.py`).
"""

from __future__ import annotations

import pytest

from gcclient.timing import DEPARTED_STEPS
from gcproto.dtypes import DType
from gcproto.manifest import USED, Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection
from gcproto.records import replace
from gcproto.timings import TensorTimes
from gcserver.core.control_events import LogSettled
from gcserver.planner.drift import drift
from gcserver.runtime.lanelink import KernelTime, KernelTimes
from gcserver.runtime.measurements import SETTLING
from gcserver.runtime.profiler import GUESS
from tests.unit.core.control_machine import LARGE, declared, formed, said
from tests.unit.runtime.profiled import COSTS, JOB, LINK, WORKER, Daemon, daemon


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
