"""Who hears of jobs that failed and are forgotten.

What may live here: tests of `gcserver/core/failed_jobs.py`, alone and in the control machine. What may not: how jobs
end.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gcproto import messages
from gcserver.core import control_events as ce
from gcserver.core.failed_jobs import MAX_FAILED, FailedJobs
from gcserver.core.job import Job
from tests.unit.core.control_machine import control_from_b, control_sent, formed_with_b, hello_from


def a_job(number: int, others: tuple[str, ...] = ("b",), on_loss: str = "fail") -> Job:
    job = SimpleNamespace(
        id=number.to_bytes(16, "little"), node="a", others=list(others), record=SimpleNamespace(on_loss=on_loss)
    )
    return cast(Job, job)


def fault(kind: str = "WorkerLost") -> messages.Fault:
    return messages.Fault(b"", kind, "rank 0 on a went away", missing=("rank 0",))


def test_workers_hear_what_happened_and_members_what_it_is_to_them() -> None:
    failed = FailedJobs()
    failed.keep(a_job(1), fault())
    failed.keep(a_job(2, on_loss="shrink"), fault())
    one, two = failed
    assert failed.fault(one) == failed.fault(two) == fault()
    assert failed.answer("b", one) == fault()
    lost = failed.answer("b", two)
    assert lost is not None and (lost.kind, lost.missing) == ("PeerLost", ("a",)), "the others go on without it"
    assert list(failed.unheard("b")) == [fault(), lost]


def test_only_members_are_told() -> None:
    failed = FailedJobs()
    failed.keep(a_job(1), fault())
    (job,) = failed
    assert failed.answer("c", job) is None and not list(failed.unheard("c"))
    assert failed.answer("b", b"k" * 16) is None and failed.fault(b"k" * 16) is None


def test_the_oldest_are_let_go() -> None:
    failed = FailedJobs()
    for number in range(MAX_FAILED + 3):
        failed.keep(a_job(number), fault())
    assert len(failed) == MAX_FAILED and (2).to_bytes(16, "little") not in failed


def left_alone() -> tuple[Any, messages.EpochDecided]:
    """A job of a and b whose only worker on a has vanished."""
    m, record = formed_with_b()
    m.on(ce.WorkerGone(1), 0.0)
    assert not m.jobs
    return m, record


def test_a_member_that_still_speaks_of_it_hears_why() -> None:
    m, record = left_alone()
    (why,) = control_sent(m.on(control_from_b(messages.SectionOffer(record.job, 0, 0, 1), 2), 0.0))
    assert isinstance(why, messages.Fault) and why.kind == "WorkerLost"
    assert control_sent(m.on(control_from_b(why, 3), 0.0)) == [], "an end is not answered"


def test_a_member_that_was_out_of_reach_hears_why_when_it_is_there() -> None:
    m, record = left_alone()
    (why,) = [x for x in control_sent(m.on(hello_from("b", 8, to=100), 1.0)) if isinstance(x, messages.Fault)]
    assert (why.job, why.kind) == (record.job, "WorkerLost")
