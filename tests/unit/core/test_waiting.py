"""Waits that end a job, and what the fault says.

What may live here: tests of `gcserver/core/waiting.py`. What may not: what a lane waits for.
"""

from __future__ import annotations

import pytest

from gcproto.messages import DeclareDomain, Fault
from gcserver.core import control_events as ce
from gcserver.core.effects import ReportStep, ReportWaiting
from gcserver.core.events import Tick
from tests.unit.core.control_machine import control_sent, domain_of, formed, formed_with_b, said, told


def test_a_peer_that_is_silent_for_a_lease_ends_the_job() -> None:
    m, _ = formed_with_b()
    assert not told(m.on(Tick(), 29.0))
    (fault,) = told(m.on(Tick(), 31.0))
    assert fault.kind == "PeerLost" and fault.missing == ("b",) and "lease" in fault.message


def test_the_deadline_names_step_phase_and_who_is_missing() -> None:
    m = formed()
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    m.on(ce.LaneSaid(0, ReportWaiting(domain, 7, 1.0, "exchange", ("b",))), 2.0)
    assert told(m.on(Tick(), 60.0)) == []
    (fault,) = told(m.on(Tick(), 61.5))
    assert (fault.kind, fault.step, fault.phase, fault.missing) == ("StepTimeout", 7, "exchange", ("b",))
    assert fault.elapsed == pytest.approx(60.5) and fault.epoch == 1 and fault.advice


def test_a_wait_that_is_over_ends_no_job() -> None:
    m = formed(lanes=2)
    domain = domain_of(m)
    m.on(ce.LaneSaid(0, ReportWaiting(domain, 1, 1.0, "exchange", ("b",))), 2.0)
    for lane in (0, 1):
        m.on(ce.LaneSaid(lane, ReportStep(domain, 1, False, 0, 0)), 3.0)
    assert told(m.on(Tick(), 90.0)) == []
    m.on(ce.LaneSaid(1, ReportWaiting(domain, 2, 90.0, "exchange", ("b",))), 91.0)
    m.on(ce.LaneUp(1), 92.0)
    assert told(m.on(Tick(), 200.0)) == [], "a lane that came back says anew what it waits for"


def test_a_lost_peer_is_named_with_the_work_it_held_up() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    domain = domain_of(m)
    m.on(ce.LaneSaid(0, ReportStep(domain, 1, False, 0, 0)), 1.0)
    m.on(ce.LaneSaid(0, ReportWaiting(domain, 2, 1.0, "push", ("b",))), 2.0)
    (fault,) = told(m.on(Tick(), 31.0))
    assert (fault.kind, fault.domain, fault.step, fault.phase, fault.last_step) == ("PeerLost", 3, 2, "push", 1)


def test_a_lost_worker_is_named_with_the_step_after_the_last() -> None:
    m, _ = formed_with_b()
    said(m, 1, DeclareDomain("ddp", 3, (0, 1), True))
    m.on(ce.LaneSaid(0, ReportStep(domain_of(m), 1, False, 0, 0)), 1.0)
    fault = next(f for f in control_sent(m.on(ce.WorkerGone(1), 2.0)) if isinstance(f, Fault))
    assert (fault.kind, fault.domain, fault.step, fault.phase, fault.last_step) == ("WorkerLost", 3, 2, "push", 1)
