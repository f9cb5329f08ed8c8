"""The control machine at its edges: workers that come and go wrongly, members that leave, draining.

What may live here: tests of `gcserver/core/control.py` that need no lanes. What may not: rounds and restarts, which the
simulation plays.
"""

from __future__ import annotations

from gcproto import messages, packed
from gcproto.records import replace
from gcserver.core import control_events as ce
from gcserver.core.events import DomainOpened, PeerAdded
from tests.unit.core.control_machine import (
    B,
    control_from_b,
    control_sent,
    formed,
    formed_with_b,
    hello_from,
    machine,
    register,
    said,
    told,
)


def test_members_forget_a_job_together() -> None:
    """What this node's lanes retained another may still ask for."""
    m, record = formed_with_b()
    out = said(m, 1, messages.Unregister())
    assert control_sent(out) == [messages.JobLeft("train", record.job)]
    assert record.job in m.jobs and not any(isinstance(e, ce.ForgetJob) for e in out)
    out = m.on(control_from_b(messages.JobLeft("train", record.job), 2), 0.0)
    assert ce.ForgetJob(record.job) in out and not m.jobs
    again = m.on(control_from_b(messages.JobLeft("train", record.job), 3), 0.0)
    assert control_sent(again) == [messages.JobLeft("train", record.job, 1)], "it came back and asks"
    assert control_sent(m.on(control_from_b(messages.JobLeft("train", record.job, 1), 4), 0.0)) == []


def test_leaving_is_said_again_to_a_peer_that_came_back() -> None:
    m, record = formed_with_b()
    said(m, 1, messages.Unregister())
    out = m.on(hello_from("b", 8, to=100), 1.0)
    assert messages.JobLeft("train", record.job) in control_sent(out)


def test_a_member_that_does_not_know_the_job_says_so() -> None:
    m, record = formed_with_b()
    other = machine()
    other.on(PeerAdded(B, "b"), 0.0)
    other.on(hello_from("b", 7, to=100), 0.0)
    (fault,) = control_sent(other.on(control_from_b(record, 1), 0.0))
    assert fault.kind == "PeerLost" and fault.missing == ("a",) and fault.advice
    assert told(m.on(control_from_b(fault, 2), 0.0)) == [fault]


def test_a_peer_that_lost_its_memory_ends_the_job() -> None:
    m, _ = formed_with_b()
    body = packed.encode(messages.Hello("b", "tcp://b:7000", 1, 0, 2, "test"))
    out = m.on(replace(hello_from("b", 8, to=100), body=body), 1.0)
    assert [f.kind for f in told(out)] == ["PeerLost"]


def test_one_node_forms_a_job_by_itself() -> None:
    m = formed()
    (job,) = m.jobs.values()
    assert job.record.label == "train" and job.record.epoch == 1
    out = m.on(ce.LaneUp(0), 0.0)
    assert [type(e.event) for e in out if isinstance(e, ce.ToLane)] == [DomainOpened, ce.OpenSection]


def test_a_drained_daemon_takes_no_jobs_and_says_when_the_last_is_gone() -> None:
    m = formed()
    assert not any(isinstance(e, ce.Drained) for e in m.on(ce.DrainAsked("maintenance"), 0.0))
    (fault,) = told(said(m, 2, register(label="other")), 2)
    assert fault.kind == "Draining" and "maintenance" in fault.message
    out = said(m, 1, messages.Unregister())
    assert [type(e) for e in out if isinstance(e, (ce.ForgetJob, ce.Drained))] == [ce.ForgetJob, ce.Drained]
    assert not m.jobs


def test_a_worker_without_a_job_is_told_so() -> None:
    (fault,) = told(said(machine(), 1, messages.Unregister()))
    assert fault.kind == "NotRegistered" and "init()" in fault.message


def test_reattaching_to_a_daemon_without_memory() -> None:
    (fault,) = told(said(machine(), 1, messages.Reattach(b"j" * 16, 0, 1)))
    assert fault.kind == "PeerLost" and "last checkpoint" in fault.advice


def test_a_worker_that_vanishes_ends_the_job() -> None:
    m = formed()
    m.on(ce.WorkerGone(1), 0.0)
    assert not m.jobs, "nobody is left to tell"


def test_what_is_said_of_unknown_jobs_is_kept_until_the_job_is_over() -> None:
    m, record = formed_with_b()
    m.on(control_from_b(messages.SectionOffer(b"k" * 16, 0, 0, 1), 2), 0.0)
    m.on(control_from_b(messages.SectionOffer(record.job, 900, 0, 1), 3), 0.0)
    assert len(m.early) == 2
    m.on(ce.WorkerGone(1), 0.0)
    assert not m.jobs
    assert m.early.take() == [("b", messages.SectionOffer(b"k" * 16, 0, 0, 1))]


def test_who_comes_too_late_still_hears_why_a_job_ended() -> None:
    """The job is forgotten with its last worker; a peer that was away then, and a worker, ask afterwards."""
    m, record = formed_with_b()
    why = messages.Fault(record.job, "CodecError", "rule 'w': no codec 'twobit'")
    assert why in told(m.on(control_from_b(why, 2), 0.0))
    said(m, 1, messages.Unregister())
    assert not m.jobs
    assert control_sent(m.on(control_from_b(record, 3), 0.0)) == [why]
    assert told(said(m, 2, messages.Reattach(record.job, 0, 1)), 2) == [why]
