"""A job's state: what it tells its domains, what a restart takes up, its end.

What may live here: tests of `gcserver/core/job.py`. What may not: what is decided in a job.
"""

from __future__ import annotations

import pytest

from gcproto import messages
from gcproto.messages import Fault
from gcproto.records import replace
from gcserver.core import control_events as ce
from gcserver.core.effects import ReportFault
from gcserver.core.events import DomainOpened
from tests.unit.core.control_machine import (
    control_from_b,
    control_sent,
    declared,
    formed,
    formed_with_b,
    machine,
    register,
    said,
    told,
)


def test_the_seed_of_rank_0_reaches_every_domain() -> None:
    m = machine()
    out = said(m, 1, replace(register(), seed=77))
    (arbitrate,) = (e for e in out if isinstance(e, ce.Arbitrate))
    assert arbitrate.record.seed == 77
    m.on(ce.EpochWon(arbitrate.record), 0.0)
    out = said(m, 1, messages.DeclareDomain("calls", 0, (0,)))
    opened = [e.event for e in out if isinstance(e, ce.ToLane) and isinstance(e.event, DomainOpened)]
    assert [e.config.seed for e in opened] == [77]


@pytest.mark.parametrize(
    ("asked", "mode", "quality", "controller"),
    [
        ({}, "lgreco", "safe", "dc2-da5"),
        ({"plan": "auto"}, "auto", "safe", "dc2-da5"),
        ({"quality": "fast"}, "lgreco", "fast", "dc2-da5"),
        ({"controller": "none"}, "lgreco", "safe", "none"),
    ],
)
def test_the_mode_that_rank_0_wants_or_its_node_has_reaches_every_worker(
    asked: dict[str, str], mode: str, quality: str, controller: str
) -> None:
    m = machine(mode="lgreco", quality="safe", controller="dc2-da5")
    said(m, 1, replace(register(0, 2, 0, 2), **asked))
    out = said(m, 2, replace(register(1, 2, 1, 2), plan="mergecomp", quality="balanced", controller="dc2-da2"))
    (arbitrate,) = (e for e in out if isinstance(e, ce.Arbitrate))
    assert (arbitrate.record.mode, arbitrate.record.quality) == (mode, quality)
    assert (arbitrate.record.controller, arbitrate.record.controller_named) == (controller, "controller" in asked)
    out = m.on(ce.EpochWon(arbitrate.record), 0.0)
    assert [told(out, worker)[0].mode for worker in (1, 2)] == [mode, mode]
    memory = next(e.memory for e in out if isinstance(e, ce.SaveJob))
    again = machine()
    again.on(ce.JobRestored(memory, ()), 0.0)
    (back,) = told(said(again, 5, messages.Reattach(memory.record.job, 1, 1234)), 5)
    assert back.mode == mode


def test_a_restarted_supervisor_lays_a_domain_out_as_before() -> None:
    m, out = declared(whole=True)
    memory = next(e.memory for e in reversed(out) if isinstance(e, ce.SaveJob))
    again = machine()
    again.on(ce.JobRestored(memory, (ce.DomainLedger(0, (), ((0, 0),)),)), 0.0)
    opened = [e.event for e in again.on(ce.LaneUp(0), 0.0) if isinstance(e, ce.ToLane)]
    (config,) = [e.config for e in opened if isinstance(e, DomainOpened)]
    assert config.whole and config == m.jobs[memory.record.job].domains[0].config


def test_a_fault_is_passed_on_once() -> None:
    m, record = formed_with_b()
    fault = Fault(record.job, "PeerLost", "gone", missing=("c",), advice="start again")
    assert control_sent(m.on(control_from_b(fault, 2), 0.0)) == [fault]
    assert control_sent(m.on(control_from_b(fault, 3), 0.0)) == []


def test_a_lanes_fault_reaches_the_worker_once() -> None:
    m = formed()
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]
    fault = ReportFault(domain, "CorruptFrame", "damaged twice", 3, "exchange", ("b",), "look")
    assert len(told(m.on(ce.LaneSaid(0, fault), 0.0))) == 1
    assert told(m.on(ce.LaneSaid(0, fault), 0.0)) == []
