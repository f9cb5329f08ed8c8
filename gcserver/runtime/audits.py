"""What workers report of audits, and the change to dense that one may ask for.

What may live here: the newest report of each process group, requesting the plan, answering who asked. What may not: how
audits are made (`gcclient.auditor`), how members come to a plan (`gcserver.core.job_plans`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from gcproto.audits import AuditAnswer, AuditReport
from gcproto.messages import Rule
from gcserver.core import control_events as cx
from gcserver.core.events import DomainKey
from gcserver.logsetup import of_job

if TYPE_CHECKING:
    from gcserver.core.job import Job
    from gcserver.runtime.supervisor import Supervisor

#: The plan of a job that an audit found too far from the exact average.
DENSE: Final = (Rule("*", "none"),)
log = logging.getLogger("gcserver")


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """The newest audit of the process group ``label``, as a local worker reported it.

    ``dense_plan``, ``dense_from``: the plan this node requested because of an audit, and the first step of the group
    that it holds for (0: none, or not known yet); ``refused``: why there is none.
    """

    label: str
    report: AuditReport
    dense_plan: int = 0
    dense_from: int = 0
    refused: str = ""


class Audits:
    """Reports of the jobs of one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        self._records: dict[DomainKey, AuditRecord] = {}
        #: the rank that waits for a plan, and the request for it
        self._asked: dict[DomainKey, int] = {}
        self._requests: dict[DomainKey, asyncio.Task[None]] = {}

    def of(self, job: bytes) -> tuple[AuditRecord, ...]:
        """The newest audit of each of the job's process groups that has one here, in order of their numbers."""
        return tuple(self._records[key] for key in sorted(self._records) if key[0] == job)

    def on_report(self, connection: cx.Connection, report: AuditReport) -> None:
        """A worker's report; of a job or process group that is not known, nothing."""
        number, rank = self._s.machine.connections.get(connection, (b"", -1))
        job = self._s.machine.jobs.get(number)
        domain = job.domains.get(report.domain) if job is not None else None
        if job is None or domain is None or job.ended is not None:
            return
        key, label = domain.config.id, domain.config.label
        before = self._records.get(key, AuditRecord(label, report))
        self._records[key] = replace(before, report=report)
        self._s.status.on_audit(job, report)
        # A report may cross the answer to the one before; the first dense step still delivers what was held back.
        if report.dense and key not in self._asked and report.step > before.dense_from:
            of_job(log, job.record.label).warning(
                "job %s: the audit of step %d of %s found an error of %.3g, above its limit of %.3g: asking for an "
                "uncompressed plan ('*'='none')",
                job.record.label, report.step, label, report.error, report.limit or 0.0,
            )  # fmt: skip
            # A planner that weighs time only would take it back.
            self._s.planning.by_hand(job)
            self._asked[key] = rank
            self._requests[key] = asyncio.ensure_future(self._change(key))

    async def _change(self, key: DomainKey) -> None:
        answer = await self._s.set_plan(key[0].hex(), DENSE, True)
        if key not in self._records:
            return  # the job is over
        if answer.error:
            self._records[key] = replace(self._records[key], refused=answer.error)
            self._answer(key, AuditAnswer(key[1], error=answer.error))
        else:
            self._records[key] = replace(self._records[key], dense_plan=answer.plan, refused="")
            self._tell_when_known(key)

    def on_settled(self, e: cx.LogSettled) -> None:
        """A step settled; it may have fixed the plan that somebody waits for."""
        if e.domain in self._asked:
            self._tell_when_known(e.domain)

    def _tell_when_known(self, key: DomainKey) -> None:
        """The request is answered with the first process group's step; the one that asked may be another."""
        plan = self._records[key].dense_plan
        job: Job | None = self._s.machine.jobs.get(key[0])
        if not plan or job is None:
            return
        first = next((step for step, version in job.domains[key[1]].switches if version >= plan), None)
        if first is not None:
            self._records[key] = replace(self._records[key], dense_from=first)
            self._answer(key, AuditAnswer(key[1], plan, first))

    def _answer(self, key: DomainKey, answer: AuditAnswer) -> None:
        rank = self._asked.pop(key)
        del self._requests[key]
        job = self._s.machine.jobs.get(key[0])
        connection = job.workers.get(rank) if job is not None else None
        if connection is not None:
            self._s.registrations.tell(cx.Tell(connection, answer))

    def forget(self, job: bytes) -> None:
        """The job has left this node."""
        for table in (self._records, self._asked, self._requests):
            for key in [k for k in table if k[0] == job]:
                del table[key]
