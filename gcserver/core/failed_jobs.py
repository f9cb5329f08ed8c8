"""Jobs that failed on this node and are forgotten, for those who have not heard why.

What may live here: what is kept of them, and who is told. What may not: how a job ends (`job.py`), what is said of it
(`job_faults.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gcproto.messages import Fault
from gcserver.core.job import Job
from gcserver.core.job_faults import abroad

#: so many jobs are remembered
MAX_FAILED: Final = 64


@dataclass(frozen=True, slots=True)
class Failure:
    """``fault`` is for workers, ``told`` for ``others``, the job's other members."""

    fault: Fault
    told: Fault
    others: tuple[str, ...]


class FailedJobs(dict[bytes, Failure]):
    """By job; the newest ones."""

    def keep(self, job: Job, fault: Fault) -> None:
        self[job.id] = Failure(fault, abroad(fault, job.record, job.node), tuple(job.others))
        while len(self) > MAX_FAILED:
            self.pop(next(iter(self)))

    def fault(self, job: bytes) -> Fault | None:
        """Why it ended, if it failed here."""
        failure = self.get(job)
        return None if failure is None else failure.fault

    def unheard(self, node: str) -> Iterator[Fault]:
        """What a node that has just come up may not have heard, and would wait for this one."""
        return (failure.told for failure in self.values() if node in failure.others)

    def answer(self, node: str, job: bytes) -> Fault | None:
        """What a member hears that still speaks of a job: it was out of reach when that ended here."""
        failure = self.get(job)
        return failure.told if failure is not None and node in failure.others else None
