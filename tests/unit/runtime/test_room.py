"""Plans that need more shared memory than there is.

What may live here: tests of `gcserver/runtime/room.py`. What may not: how a refusal reaches who asked
(`test_job_plans.py`), what happens where memory runs out all the same (`tests/integration/test_memory.py`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gcproto.messages import PlanText, Rule
from gcserver.codecs import parse
from gcserver.core.job import Job
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.resolve import resolve
from gcserver.runtime.room import no_room
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


def refused(folder: Path, job: Job, *rules: Rule) -> str:
    return no_room(folder, 1, job, PlanText(job.id, 1, 1, rules))


def test_a_plan_that_would_keep_more_than_is_free_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job()
    both = 2 * 2 * 4 * LARGE.elements  # two versions, of contributions and of what is averaged
    short_of(monkeypatch, both)
    assert refused(tmp_path, job, Rule("*", TOPK)).startswith("its codecs keep 2 MiB of shared memory more, and 1 MiB")
    short_of(monkeypatch, both + 512)
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
