"""The lane machine at its edges: strangers, wrong payloads, unreadable bodies.

What may live here: tests of `gcserver/core/lane.py` with one machine. What may not: whole rounds, which the
scenarios and the simulation play.
"""

from __future__ import annotations

import pytest

from gcproto import messages
from gcproto.records import replace
from gcproto.wire import FrameType, Header
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.lane import LaneMachine
from gcserver.core.lane_config import LaneConfig
from tests.unit.core.lane_machine import ID, B, contribution, hello, kinds, machine, open_domain


def test_frames_of_a_closed_job_are_dropped_at_once() -> None:
    m = machine()
    open_domain(m)
    m.on(ev.DomainClosed(ID), 0.0)
    assert kinds(m.on(contribution(), 0.0)) == ["Release", "frames_stale"]
    assert m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0) == []


def test_plans_that_are_over_are_forgotten() -> None:
    m = machine()
    open_domain(m)
    domain = m.domains[ID]
    first = domain.plans[0]
    for version in (1, 2):
        m.on(ev.PlanKnown(ID, replace(first, version=version)), 0.0)
    lag, seen = domain.config.lag, []
    for step in range(1, lag + 3):
        m.on(ev.Settled(ID, step, False, 1 if step == 1 else 2), 0.0)
        seen.append(sorted(domain.plans))
    assert seen[lag - 1 :] == [[0, 1, 2], [1, 2], [2]], "each is needed until the next is in force"


@pytest.mark.parametrize(("field", "value"), [("elements", 31), ("dtype", 3)])
def test_another_size_or_type_ends_the_job(field: str, value: int) -> None:
    m = machine()
    open_domain(m)
    (fault,) = [e for e in m.on(contribution(**{field: value}), 0.0) if isinstance(e, fx.ReportFault)]
    assert fault.kind == "TensorMismatch" and "b sent" in fault.message and "'w'" in fault.message


def test_a_payload_that_does_not_decode_ends_the_job_and_names_the_sender() -> None:
    m = machine()
    open_domain(m)
    out = m.on(ev.Unusable(contribution().header, "index 99 of 32"), 0.0)
    (fault,) = [e for e in out if isinstance(e, fx.ReportFault)]
    assert fault.kind == "CorruptFrame" and fault.missing == ("b",) and "index 99 of 32" in fault.message


def test_another_number_of_lanes_is_refused() -> None:
    m = LaneMachine(LaneConfig(messages.Hello("a", "tcp://a:1", 1, 0, 1, "test"), 11))
    m.on(ev.PeerAdded(B, "b"), 0.0)
    out = m.on(hello(22, lanes=4), 0.0)
    (report,) = [e for e in out if isinstance(e, fx.ReportLink)]
    assert report.state == "refused" and "set node.lanes" in report.reason
    assert not m.links[B].up


@pytest.mark.parametrize("kind", [FrameType.HELLO, FrameType.REFUSE, FrameType.HEARTBEAT, FrameType.NACK])
def test_bodies_that_cannot_be_read_are_counted(kind: FrameType) -> None:
    header = Header(kind, sender=B, incarnation=22, to_incarnation=11)
    assert "frames_unusable" in kinds(machine().on(ev.FrameReceived(header, body=b"\xc1"), 0.0))


def waiting(m: LaneMachine, now: float) -> list[tuple[int, float, str, tuple[str, ...], tuple[str, ...]]]:
    """(step, since, phase, missing, wanted) of what a tick reports."""
    said = [e for e in m.on(ev.Tick(), now) if isinstance(e, fx.ReportWaiting)]
    return [(e.step, e.since, e.phase, e.missing, e.wanted) for e in said]


def test_it_is_said_what_is_waited_for() -> None:
    m = machine()
    open_domain(m)
    m.on(ev.Pushed(ID, 0, 1, (0,), False), 0.0)
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 9, False), 0.0)
    assert waiting(m, 2.0) == [(1, 0.0, "exchange", ("b",), ("contribution",))]
