"""Waits that end a job, and what the fault says.

What may live here: tests of `gcserver/core/waiting.py`. What may not: what a lane waits for.
"""

from __future__ import annotations

from typing import Any

import pytest

from gcproto import packed
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import Beat, DeclareDomain, DeclareSection, Fault, JobLeft, SectionOffer
from gcproto.records import replace
from gcproto.wire import FrameType, Header
from gcserver.core import control_events as ce
from gcserver.core import waiting
from gcserver.core.control import ControlMachine
from gcserver.core.effects import Count, ReportStep, ReportWaiting
from gcserver.core.events import FrameReceived, Tick
from tests.unit.core.control_machine import (
    B,
    control_from_b,
    control_sent,
    domain_of,
    formed,
    formed_with_b,
    said,
    told,
)
from tests.unit.core.test_epochs import pair as lasting_pair


def test_a_peer_that_is_silent_for_a_lease_ends_the_job() -> None:
    m, _ = formed_with_b()
    assert not told(m.on(Tick(), 29.0))
    (fault,) = told(m.on(Tick(), 31.0))
    assert fault.kind == "PeerLost" and fault.missing == ("b",) and "lease" in fault.message


def test_a_peer_that_is_expelled_ends_the_job_at_once() -> None:
    m, _ = formed_with_b()
    assert m.on(ce.PeerExpelled("c"), 1.0) == [], "in no job here"
    out = m.on(ce.PeerExpelled("b"), 1.0)
    (fault,) = told(out)
    assert (fault.kind, fault.missing) == ("PeerLost", ("b",)) and "key of b is no longer in" in fault.message
    assert "put its key back" in fault.advice
    counted = [(e.name, e.peer, e.value) for e in out if isinstance(e, Count)]
    assert counted == [("nodes_expelled", B, 1)]
    assert m.on(ce.PeerExpelled("b"), 1.5) == [], "said again, and counted once"


def test_the_deadline_names_step_phase_and_who_is_missing() -> None:
    m = formed()
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    m.on(ce.LaneSaid(0, ReportWaiting(domain, 7, 1.0, "exchange", ("b",), ("aggregate",))), 2.0)
    assert told(m.on(Tick(), 60.0)) == []
    (fault,) = told(m.on(Tick(), 61.5))
    assert (fault.kind, fault.step, fault.phase, fault.missing) == ("StepTimeout", 7, "exchange", ("b",))
    assert fault.elapsed == pytest.approx(60.5) and fault.epoch == 1 and fault.advice


@pytest.mark.parametrize(("heard", "kind"), [(55.0, ""), (60.0, "StepTimeout")])
@pytest.mark.parametrize("of", ["step", "commit", "declaration"])
def test_who_is_silent_at_the_deadline_is_lost_to_a_job_that_goes_on(of: str, heard: float, kind: str) -> None:
    """Its lease would end some seconds later: the job is not to end for that."""
    m, record = lasting_pair("shrink")
    if of == "step":
        m.on(ce.LaneSaid(0, ReportWaiting(domain_of(m), 7, 1.0, "exchange", ("b",), ("aggregate",))), 2.0)
    elif of == "commit":
        m.on(ce.LaneSaid(0, ReportStep(domain_of(m), 1, False, 0, 0)), 1.0)
    else:
        said(m, 1, DeclareSection(0, Section(1, (TensorSpec("more", (4,), 0),)), 1))
    m.on(Tick(), 1.0)
    m.peers.links[B].heard = heard
    out = m.on(Tick(), 61.5)
    assert [f.kind for f in told(out)] == [kind] * bool(kind)
    asked = [e.record.members for e in out if isinstance(e, ce.Arbitrate)]
    assert asked == ([] if kind else [record.members[:1]])


def test_who_is_silent_at_the_deadline_has_its_lease_in_a_job_that_ends_with_a_loss() -> None:
    m, _ = lasting_pair("fail")
    m.on(ce.LaneSaid(0, ReportWaiting(domain_of(m), 7, 1.0, "exchange", ("b",), ("aggregate",))), 2.0)
    m.peers.links[B].heard = 50.0
    (fault,) = told(m.on(Tick(), 61.5))
    assert (fault.kind, fault.missing) == ("StepTimeout", ("b",))


def test_a_silent_node_is_not_lost_for_a_rank_that_is_late_here() -> None:
    m, _ = lasting_pair("shrink")
    m.on(ce.LaneSaid(0, ReportWaiting(domain_of(m), 7, 1.0, "push", ("local rank 0",), ("push",))), 2.0)
    m.peers.links[B].heard = 50.0
    (fault,) = told(m.on(Tick(), 61.5))
    assert (fault.kind, fault.missing) == ("StepTimeout", ("rank 0",))


def test_a_wait_that_is_over_ends_no_job() -> None:
    m = formed(lanes=2)
    domain = domain_of(m)
    m.on(ce.LaneSaid(0, ReportWaiting(domain, 1, 1.0, "exchange", ("b",), ("aggregate",))), 2.0)
    for lane in (0, 1):
        m.on(ce.LaneSaid(lane, ReportStep(domain, 1, False, 0, 0)), 3.0)
    assert told(m.on(Tick(), 90.0)) == []
    m.on(ce.LaneSaid(1, ReportWaiting(domain, 2, 90.0, "exchange", ("b",), ("aggregate",))), 91.0)
    m.on(ce.LaneUp(1), 92.0)
    assert told(m.on(Tick(), 200.0)) == [], "a lane that came back says anew what it waits for"


def test_a_lost_peer_is_named_with_the_work_it_held_up() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    domain = domain_of(m)
    m.on(ce.LaneSaid(0, ReportStep(domain, 1, False, 0, 0)), 1.0)
    m.on(ce.LaneSaid(0, ReportWaiting(domain, 2, 1.0, "push", ("b",), ("push",))), 2.0)
    (fault,) = told(m.on(Tick(), 31.0))
    assert (fault.kind, fault.domain, fault.step, fault.phase, fault.last_step) == ("PeerLost", 3, 2, "push", 1)


def test_a_lost_worker_is_named_with_the_step_after_the_last() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    m.on(ce.LaneSaid(0, ReportStep(domain_of(m), 1, False, 0, 0)), 1.0)
    fault = next(f for f in control_sent(m.on(ce.WorkerGone(1), 2.0)) if isinstance(f, Fault))
    assert (fault.kind, fault.domain, fault.step, fault.phase, fault.last_step) == ("WorkerLost", 3, 2, "push", 1)


def declared_by(m: ControlMachine, connection: int, step: int = 1) -> list[Any]:
    return said(m, connection, DeclareSection(3, Section(0, (TensorSpec("w", (4,), 0),)), step))


def waits(m: ControlMachine) -> list[tuple[str, str, str, float, int]]:
    (job,) = m.jobs.values()
    return [(w.who, w.wanted, w.phase, w.since, w.step) for w in waiting.waits(job)]


def test_tensors_that_another_node_does_not_declare_end_the_job_at_the_deadline() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    declared_by(m, 1)
    m.on(Tick(), 10.0)
    assert waits(m) == [("b", "tensors", "declare", 10.0, 0)]
    m.peers.links[B].heard = 75.0
    (fault,) = told(m.on(Tick(), 75.0))
    assert (fault.kind, fault.phase, fault.missing, fault.domain) == ("StepTimeout", "declare", ("b",), 3)
    assert fault.elapsed == 65.0 and "deadline of 60 s" in fault.message and fault.advice
    assert waits(m) == [], "a job that has ended waits for nobody"


def test_a_short_deadline_names_who_has_not_declared_as_well() -> None:
    m, record = formed_with_b()
    (job,) = m.jobs.values()
    job.record = shorter = replace(record, deadline=m.config.quiet_after)
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    declared_by(m, 1)
    m.on(Tick(), 10.0)
    assert told(m.on(Tick(), 10.0 + shorter.deadline)) == []
    (fault,) = told(m.on(Tick(), 10.1 + shorter.deadline))
    assert (fault.kind, fault.phase, fault.missing) == ("StepTimeout", "declare", ("b",))


@pytest.mark.parametrize("lasting", [False, True])
def test_who_has_left_is_not_waited_for_with_tensors_to_declare(lasting: bool) -> None:
    m, record = lasting_pair("shrink") if lasting else formed_with_b()
    if lasting:
        said(m, 1, DeclareSection(0, Section(1, (TensorSpec("more", (4,), 0),)), 1))
    else:
        said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
        declared_by(m, 1)
    m.on(Tick(), 10.0)
    m.on(control_from_b(JobLeft(record.label, record.job), 3 if lasting else 2), 10.5)
    m.peers.links[B].heard = 20.0
    assert told(m.on(Tick(), 10.0 + 2 * m.config.quiet_after)) == []
    out = m.on(Tick(), 10.5 + 2 * m.config.quiet_after)
    if lasting:
        asked = [e.record.members for e in out if isinstance(e, ce.Arbitrate)]
        assert not told(out) and asked == [record.members[:1]], "its node is lost, the job goes on"
        return
    (fault,) = told(out)
    assert (fault.kind, fault.phase, fault.missing, fault.domain) == ("WorkerLost", "declare", ("b",), 3)
    assert fault.message == "b left the job while tensors of ddp that some ranks declared waited for it"


def test_a_declaration_that_all_have_made_is_waited_for_no_more() -> None:
    m, record = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    declared_by(m, 1)
    m.on(Tick(), 10.0)
    (job,) = m.jobs.values()
    digest = job.domains[3].digest(Section(0, (TensorSpec("w", (4,), 0),)))
    m.on(control_from_b(SectionOffer(record.job, 3, 0, digest, 1), 2), 11.0)
    assert waits(m) == []
    m.peers.links[B].heard = 75.0
    assert told(m.on(Tick(), 75.0)) == []


def test_ranks_are_named_by_their_number_in_the_job() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    missing, wanted = ("b", "local rank 0"), ("contribution", "push")
    m.on(ce.LaneSaid(0, ReportWaiting(domain_of(m), 7, 1.0, "exchange", missing, wanted)), 2.0)
    assert waits(m) == [("b", "contribution", "exchange", 1.0, 7), ("rank 0", "push", "exchange", 1.0, 7)]


def test_a_worker_that_has_not_come_back_is_waited_for() -> None:
    m = formed()
    (job,) = m.jobs.values()
    job.away_since[0] = 5.0
    assert waits(m) == [("rank 0", "connection", "attach", 5.0, 0)]


def test_a_step_that_another_node_has_closed_waits_for_the_ranks_here() -> None:
    m, record = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    beat = Header(FrameType.HEARTBEAT, sender=B, incarnation=7, to_incarnation=100)

    def closed(step: int, now: float) -> None:
        body = packed.encode(Beat(0, closed=((record.job, 3, step, 99),)))
        m.on(FrameReceived(beat, body=body), now)

    closed(1, 4.0)
    closed(1, 5.0)
    assert waits(m) == [("rank 0", "first push", "push", 4.0, 1)]
    m.on(ce.LaneSaid(0, ReportWaiting(domain_of(m), 1, 6.0, "push", ("local rank 0",), ("push",))), 7.0)
    assert waits(m) == [("rank 0", "push", "push", 6.0, 1)], "its lane knows more"
    m.on(ce.LaneSaid(0, ReportStep(domain_of(m), 1, False, 0, 99)), 8.0)
    assert waits(m) == []
    closed(2, 9.0)
    assert waits(m) == [("rank 0", "first push", "push", 9.0, 2)]
