"""What the supervisor makes of workers' audits: records, metrics, and one request for a dense plan."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gcproto.audits import AuditAnswer, AuditReport
from gcproto.messages import Rule
from gcserver.core import control_events as cx
from gcserver.runtime.audits import Audits

JOB, KEY = b"j" * 16, (b"j" * 16, 16)


class Supervisor:
    """As much of one as audits use: a job of one process group, connection 5 is its rank 3."""

    def __init__(self) -> None:
        self.by_hand: list[Any] = []
        config = SimpleNamespace(id=KEY, label="ddp.0")
        self.domain = SimpleNamespace(config=config, switches=[(0, 0)])
        self.job = SimpleNamespace(
            id=JOB, ended=None, domains={16: self.domain}, workers={3: 5}, record=SimpleNamespace(label="gpt")
        )
        self.machine = SimpleNamespace(jobs={JOB: self.job}, connections={5: (JOB, 3)})
        self.status = SimpleNamespace(on_audit=lambda job, report: self.seen.append((job.record.label, report.error)))
        self.registrations = SimpleNamespace(tell=lambda e: self.told.append((e.connection, e.message)))
        self.planning = SimpleNamespace(by_hand=self.by_hand.append)
        self.seen: list[Any] = []
        self.told: list[Any] = []
        self.plans: list[Any] = []
        self.answer: asyncio.Future[cx.AnswerRequest] = asyncio.get_running_loop().create_future()

    async def set_plan(self, job: str, rules: tuple[Rule, ...], replace: bool) -> cx.AnswerRequest:
        self.plans.append((job, rules, replace))
        return await self.answer


def report(step: int, dense: bool = False, domain: int = 16) -> AuditReport:
    return AuditReport(domain, step, 0.9, 0.4, 0.4, (), step, 0, 0.5, dense)


async def turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_the_newest_report_is_kept_and_strangers_are_not_heard() -> None:
    async def run() -> None:
        s = Supervisor()
        audits = Audits(s)  # type: ignore[arg-type]
        audits.on_report(5, report(1))
        audits.on_report(5, report(2))
        audits.on_report(5, report(3, domain=17))
        audits.on_report(6, report(4))
        (record,) = audits.of(JOB)
        assert (record.label, record.report.step, record.dense_plan) == ("ddp.0", 2, 0)
        assert s.seen == [("gpt", 0.9)] * 2 and not s.plans
        assert audits.of(b"k" * 16) == ()
        audits.forget(JOB)
        assert audits.of(JOB) == ()

    asyncio.run(run())


@pytest.mark.parametrize("late", [False, True])
def test_a_dense_plan_is_requested_once_and_its_step_told(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The request is answered by whichever process group settles first: the one that asked may be ``late``."""

    async def run() -> None:
        s = Supervisor()
        audits = Audits(s)  # type: ignore[arg-type]
        for step in (1, 2, 3):
            audits.on_report(5, report(step, dense=True))
            await turns()
        assert s.plans == [(JOB.hex(), (Rule("*", "none"),), True)]
        assert s.by_hand == [s.job]
        if not late:
            s.domain.switches.append((9, 2))
        s.answer.set_result(cx.AnswerRequest(1, 2, 300, "takes effect at step 300 on every node"))
        await turns()
        audits.on_settled(cx.LogSettled(KEY, 7, False, 2, 2))
        assert bool(s.told) is not late
        s.domain.switches = [(9, 2)]
        audits.on_settled(cx.LogSettled(KEY, 8, False, 2, 2))
        audits.on_settled(cx.LogSettled(KEY, 9, False, 2, 2))
        assert s.told == [(5, AuditAnswer(16, 2, 9))]
        (record,) = audits.of(JOB)
        assert (record.report.step, record.dense_plan, record.dense_from, record.refused) == (3, 2, 9, "")
        audits.on_report(5, report(9, dense=True))  # from before the worker heard of it
        await turns()
        assert len(s.plans) == 1
        assert caplog.text.count("the audit of step 1 of ddp.0 found an error of 0.9, above its limit of 0.5") == 1

    asyncio.run(run())


def test_a_refusal_is_told_and_may_be_asked_again() -> None:
    async def run() -> None:
        s = Supervisor()
        audits = Audits(s)  # type: ignore[arg-type]
        audits.on_report(5, report(1, dense=True))
        s.answer.set_result(cx.AnswerRequest(1, error="no"))
        await turns()
        assert s.told == [(5, AuditAnswer(16, error="no"))] and audits.of(JOB)[0].refused == "no"
        audits.on_report(5, report(2, dense=True))
        await turns()
        assert len(s.plans) == 2

    asyncio.run(run())


def test_a_job_that_ends_first_is_not_answered() -> None:
    async def run() -> None:
        s = Supervisor()
        audits = Audits(s)  # type: ignore[arg-type]
        audits.on_report(5, report(1, dense=True))
        await turns()
        s.machine.jobs.clear()
        audits.forget(JOB)
        s.answer.set_result(cx.AnswerRequest(1, error="the job ended"))
        await turns()
        audits.on_settled(cx.LogSettled(KEY, 8, False, 2, 2))
        assert s.told == [] and audits.of(JOB) == ()

    asyncio.run(run())
