"""Why a job has no plan, profile or advice now.

What may live here: the errors planning raises and what they say. What may not: planning (`planning.py`), how requests
are refused (`advising.py`, `planadmin.py`).
"""

from __future__ import annotations

from typing import Final

from gcserver.core.job import Job

TOO_SOON: Final = (
    "too little has been measured yet: let a model given to gcclient.state, DistributedOptimizer or attach(quality=) "
    "make some ten steps"
)
#: Why no plan or controller changes anything, and how to have it otherwise.
LOSSLESS: Final = (
    'every model was declared lossless (compression="none"), which no plan changes: leave compression= out, so that '
    "the job's plans say what is compressed"
)
FAILED: Final = "planning failed; the daemon's log has the traceback"


class NotPlannable(Exception):
    """Why there is no plan, profile or advice now, and what would help."""


class Overtaken(NotPlannable):
    """Something else happened to the job's plans while one was made: that counts, this one is dropped."""


class MemberRefused(NotPlannable):
    """A member cannot use what was planned."""


def planner_of(job: Job) -> str:
    """Who is to be asked about the plans of a job that another node plans for."""
    return f"node {job.first} plans for job {job.record.label!r}: ask its daemon (gcctl --address)"
