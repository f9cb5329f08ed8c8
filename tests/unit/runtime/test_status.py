"""A job as operators see it.

What may live here: tests of `gcserver/runtime/status.py`. What may not: what its metrics count (`test_observe.py`), who
asks for it (`tests/unit/admin`).
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto.manifest import Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Fault
from gcserver.admin.source import AdminError, ErrorKind, PlanRule
from gcserver.core import control_events as ce
from gcserver.core.control import ControlMachine
from gcserver.core.effects import ReportStep
from gcserver.runtime.status import Status
from tests.unit.core.control_machine import domain_of, formed, said


def settle(m: ControlMachine, job: bytes, domain: int, steps: int) -> None:
    for step in range(1, steps + 1):
        m.on(ce.LaneSaid(0, ReportStep((job, domain), step, False, 0, 0)), 0.0)


def step_of(m: ControlMachine) -> int:
    supervisor: Any = SimpleNamespace(machine=m, lanes=SimpleNamespace(table=[None]))
    (job,) = Status(supervisor).jobs()
    return job.step


def test_the_step_of_a_job_is_that_of_its_model() -> None:
    m = formed()
    job, model = domain_of(m)
    said(m, 1, DeclareDomain("audit of ddp", 7, (0,), codec="none"))
    said(m, 1, DeclareSection(7, Section(0, (TensorSpec("w", (4,), 0),))))
    assert step_of(m) == 0
    settle(m, job, model, 5)
    settle(m, job, 7, 1)
    assert step_of(m) == 5, "one step was audited"
    settle(m, job, 7, 9)
    assert step_of(m) == 5, "nor do many calls make it more"


def test_nothing_can_be_changed_about_a_job_that_has_ended() -> None:
    m = formed()
    (job,) = m.jobs.values()
    job.ended = Fault(job.id, "PeerLost", "b was lost")
    supervisor: Any = SimpleNamespace(machine=m, lanes=SimpleNamespace(table=[None]))
    status = Status(supervisor)

    async def ask() -> None:
        for asked in (
            status.set_mode("", "auto", ""),
            status.replan("train"),
            status.set_controller("", "dc2-da2", {}),
            status.set_codec("", "*", "fp16"),
            status.set_plan("", (PlanRule("*", "topk", "owner", ""),), True),
        ):
            with pytest.raises(AdminError, match=r"job 'train' has ended, .*: b was lost") as caught:
                await asked
            assert caught.value.kind is ErrorKind.NOT_FOUND

    asyncio.run(ask())


def test_without_a_model_every_call_is_a_step() -> None:
    m = formed(scoped=False)
    job, calls = domain_of(m)
    settle(m, job, calls, 3)
    assert step_of(m) == 3


def test_a_pattern_longer_than_any_name_is_refused_before_it_is_looked_into() -> None:
    async def nothing(question: Any, patience: float) -> list[Any]:
        return []

    daemon: Any = SimpleNamespace(
        machine=formed(), lanes=SimpleNamespace(table=[None]), questions=SimpleNamespace(ask=nothing)
    )
    status = Status(daemon)
    with pytest.raises(AdminError, match="at most 4096 characters") as refused:
        asyncio.run(status.tensors("", "", "[!" * 2049))
    assert (refused.value.kind, refused.value.field) == (ErrorKind.INVALID, "pattern")
    assert [t.name for t in asyncio.run(status.tensors("", "", "w*"))] == ["w"]
