"""Steps that settle.

What may live here: tests of `gcserver/core/settling.py`. What may not: lanes' own steps (`test_steps.py`).
"""

from __future__ import annotations

from gcserver.core import control_events as ce
from gcserver.core.effects import ReportStep
from gcserver.core.events import Settled
from tests.unit.core.control_machine import domain_of, formed, set_codec


def test_steps_settle_in_order_when_all_lanes_are_done() -> None:
    m = formed(lanes=2)
    (domain,) = [(j.id, k) for j in m.jobs.values() for k in j.domains]

    def report(lane: int, step: int, nonfinite: bool = False) -> list[tuple[int, bool]]:
        out = m.on(ce.LaneSaid(lane, ReportStep(domain, step, nonfinite, 0, 0)), 0.0)
        logged = [e for e in out if isinstance(e, ce.LogSettled)]
        sent = [e.event for e in out if isinstance(e, ce.ToLane) and isinstance(e.event, Settled)]
        assert [(e.step, e.void) for e in logged] == [(e.step, e.void) for e in sent]
        return [(e.step, e.void) for e in logged]

    assert report(0, 1) == []
    assert report(0, 2) == []
    assert report(1, 2, nonfinite=True) == []
    assert report(1, 1) == [(1, False), (2, True)]
    assert report(1, 1) == [], "an old report, again"


def test_of_steps_that_settle_at_once_the_plan_can_be_told_afterwards() -> None:
    m = formed()
    job, key = domain_of(m)
    for plan in (1, 2):
        m.on(set_codec(plan, "train", "*", "topk"), 0.0)
    for step, proposal in ((2, 1), (3, 1), (4, 2)):
        assert m.on(ce.LaneSaid(0, ReportStep((job, key), step, False, proposal, 0)), 0.0) == []
    out = m.on(ce.LaneSaid(0, ReportStep((job, key), 1, False, 1, 0)), 0.0)
    domain = m.jobs[job].domains[key]
    settled = [e.step for e in out if isinstance(e, ce.LogSettled)]
    assert settled == [1, 2, 3, 4] and domain.switches == [(3, 1), (6, 2)]
    assert {domain.switch(step) for step in settled} == {(3, 1)}, "the plan before it is forgotten"
    assert domain.switch(6) == (6, 2)
