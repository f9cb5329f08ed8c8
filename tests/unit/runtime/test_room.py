"""Plans and tensors that need more shared memory than there is.

What may live here: tests of `gcserver/runtime/room.py`. What may not: how a refusal reaches who asked
(`test_job_plans.py`), what happens where memory runs out all the same (`tests/integration/test_memory.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gcproto.manifest import AddressSpace, Section, TensorSpec
from gcproto.messages import PlanText, Rule
from gcproto.records import replace
from gcserver.codecs import parse
from gcserver.core.job import Job
from gcserver.runtime import room
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.resolve import resolve
from gcserver.runtime.room import no_room, no_space
from gcserver.runtime.states import state_use
from tests.unit.core.control_machine import LARGE, declared

TOPK = "topk(ratio=0.01)"


def a_job() -> Job:
    """One node, which owns all; a bias of 300 and a matrix of 90000 elements."""
    m, _ = declared(whole=False)
    (job,) = m.jobs.values()
    job.resolve = resolve
    return job


def short_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    def usage(path: Any) -> Any:
        return shutil._ntuple_diskusage(1 << 30, 1 << 30, free)  # type: ignore[attr-defined]

    monkeypatch.setattr("gcserver.runtime.room.shutil.disk_usage", usage)
    monkeypatch.setattr("gcserver.runtime.room.available", lambda: 1 << 50)


def refused(folder: Path, job: Job, *rules: Rule) -> str:
    return no_room(folder, 1, job, PlanText(job.id, 1, 1, rules))


def test_a_plan_that_would_keep_more_than_is_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job()
    both = 2 * 2 * 4 * LARGE.elements  # two versions, of contributions and of what is averaged
    short_of(monkeypatch, both)
    assert refused(tmp_path, job, Rule("*", TOPK)).startswith("its codecs keep 2 MiB of shared memory more, and 1 MiB")
    short_of(monkeypatch, both + 2 * 4096)  # each has a file of its own, of whole pages
    assert refused(tmp_path, job, Rule("*", TOPK)) == ""


def test_what_keeps_nothing_needs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_of(monkeypatch, 0)
    job = a_job()
    for rule in (Rule("*", "fp16"), Rule("*", "qsgd(bits=4)"), Rule("other", TOPK)):
        assert refused(tmp_path, job, rule) == ""


def test_blocks_that_have_states_need_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_of(monkeypatch, 0)
    job = a_job()
    (domain,) = job.domains.values()
    memory = DomainMemory(domain.config, 1, 0, tmp_path / "jobs" / job.id.hex())
    memory.open_section(LARGE)
    assert refused(tmp_path, job, Rule("*", TOPK))
    codec = resolve(TOPK)
    assert codec.feedback and codec.owner_feedback
    for key, state in memory.blocks.items():
        use = state_use(parse(TOPK), state)
        assert use is not None
        for owner in (False, True):
            memory.state(key, 0, owner, use)
    assert refused(tmp_path, job, Rule("*", TOPK)) == ""


def test_records_that_a_lane_was_ended_before_it_made_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_of(monkeypatch, 0)
    job = a_job()
    (domain,) = job.domains.values()
    folder = tmp_path / "jobs" / job.id.hex()
    DomainMemory(domain.config, 1, 0, folder).open_section(LARGE)
    (records,) = folder.glob("*.records0")
    for left in (b"", records.read_bytes()[:7]):
        records.write_bytes(left)
        assert refused(tmp_path, job, Rule("*", TOPK)).startswith("its codecs keep 2 MiB of shared memory more")


def test_tensors_that_do_not_fit_are_refused_with_all_they_would_come_to_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job()
    (domain,) = job.domains.values()
    job.plans[1] = PlanText(job.id, 1, 1, (Rule("*", TOPK),))
    for proposal, needed in ((0, 2 * LARGE.nbytes), (1, (2 + 2 * 2) * LARGE.nbytes)):
        job.proposal = proposal
        short_of(monkeypatch, needed - 1)
        why = no_space(tmp_path, 1, job, domain, LARGE)
        assert why.startswith("'b' shape [300] dtype F32 and 1 more of ddp would take")
        assert "of shared memory (353 KiB gradients of 1 local rank" in why and f"free in {tmp_path}" in why
        assert ("codec states" in why) == (proposal == 1)
        short_of(monkeypatch, 2 * needed + (2 << 20))
        assert no_space(tmp_path, 1, job, domain, LARGE) == ""


def test_what_surely_fits_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laying out a hundred thousand tensors takes seconds in which nobody else is served."""
    short_of(monkeypatch, 1 << 40)
    monkeypatch.setattr(room.memory, "of_domain", None)
    job = a_job()
    (domain,) = job.domains.values()
    assert no_space(tmp_path, 1, job, domain, LARGE) == ""


def test_after_a_loss_tensors_are_counted_as_they_will_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are cut for as many as the job began with, whoever is left of them."""
    job = a_job()
    (domain,) = job.domains.values()
    domain.config = replace(domain.config, origin=2, remaining=((0,),))
    cut: list[int] = []

    def count(laid: Any, *_: Any) -> list[Any]:
        cut.extend(len(x.blocks) for x in laid)
        return []

    monkeypatch.setattr(room.memory, "of_domain", count)
    short_of(monkeypatch, 0)
    large = Section(0, (TensorSpec("w", (3 << 20,), 0),))
    no_space(tmp_path, 1, job, domain, large)
    assert cut == [len(domain.config.space(1).append(large))] and cut != [
        len(AddressSpace(1, 1, 8 << 20).append(large))
    ]


def test_memory_behind_a_file_system_may_be_less_than_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 999 kB\nMemAvailable: 700 kB\nSwapFree: 100 kB\n")
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(room, "CGROUP", tmp_path)
    assert room.available() == 800 << 10
    for name, text in {"max": "500000", "current": "450000", "stat": "anon 1\ninactive_file 30000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert room.available() == 80_000 == room.free_bytes(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert room.available() == 800 << 10
    (tmp_path / "meminfo").unlink()
    assert room.available() == 1 << 62, "where the system does not say, files are tried"


def test_many_small_states_share_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job()
    (domain,) = job.domains.values()
    many = Section(1, tuple(TensorSpec(f"t{i}", (20_000,), 0) for i in range(60)), tuple(range(1, 60)))
    domain.sections = [LARGE, many]
    states = 2 * 2 * (60 * 80_000 + 4 * LARGE.elements)
    short_of(monkeypatch, round(1.4 * states) + (1 << 20))
    assert refused(tmp_path, job, Rule("*", TOPK)) == ""
    short_of(monkeypatch, states)
    assert "of shared memory more" in refused(tmp_path, job, Rule("*", TOPK))
