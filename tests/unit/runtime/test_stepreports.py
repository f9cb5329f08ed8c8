"""Finished steps on their way up: at once where few are in flight, together where many are.

What may live here: tests of `gcserver/runtime/stepreports.py`. What may not: settling.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gcserver.core.effects import ReportStep
from gcserver.core.job import SCOPED_LAG
from gcserver.runtime.delays import Delays
from gcserver.runtime.lanelink import StepDelays, StepTimes
from gcserver.runtime.stepreports import REPORTS, StepReports

ID = (b"j" * 16, 0)


@pytest.fixture
def sent() -> list[tuple[object, ...]]:
    return []


def reports(lag: int, sent: list[tuple[object, ...]], gated: bool = False, commits: bool = False) -> StepReports:
    machine = SimpleNamespace(
        domains={ID: SimpleNamespace(config=SimpleNamespace(lag=lag, commits=commits), gated=gated)}
    )
    return StepReports(machine, Delays(machine), lambda *messages: sent.append(messages))  # type: ignore[arg-type]


def step(number: int) -> ReportStep:
    return ReportStep(ID, number, False, 0, 0)


def test_with_few_in_flight_each_goes_at_once_with_its_time(sent: list[tuple[object, ...]]) -> None:
    up = reports(SCOPED_LAG, sent)
    up.began[ID, 1] = 0.0
    up.add(step(1))
    up.add(step(2))
    ((times, first), (second,)) = sent
    assert isinstance(times, StepTimes) and times.domain == ID and [s for s, _ in times.steps] == [1]
    assert (first, second) == (step(1), step(2)) and not up.waiting and not up.began


def test_what_was_measured_goes_before_the_report(sent: list[tuple[object, ...]]) -> None:
    measured = SimpleNamespace(take=lambda domain, number: (0.5, 0.1, 99) if number == 2 else None)
    machine = SimpleNamespace(domains={ID: SimpleNamespace(config=SimpleNamespace(lag=SCOPED_LAG + 1, commits=False))})
    up = StepReports(machine, measured, lambda *messages: sent.append(messages))  # type: ignore[arg-type]
    up.add(step(1))
    up.add(step(2))
    up.flush()
    assert sent == [(StepDelays(ID, ((2, 0.5, 0.1, 99),)), step(1), step(2))]


def test_with_many_in_flight_they_go_together(sent: list[tuple[object, ...]]) -> None:
    up = reports(SCOPED_LAG + 1, sent)
    for number in range(1, REPORTS):
        up.add(step(number))
    assert not sent and up.by > 0.0 and len(up.waiting) == REPORTS - 1
    up.add(step(REPORTS))
    assert sent == [tuple(step(number) for number in range(1, REPORTS + 1))] and up.by == 0.0


def test_a_push_that_waits_for_a_settlement_is_seen(sent: list[tuple[object, ...]]) -> None:
    assert reports(2, sent, gated=True).gated() and not reports(2, sent).gated()


def test_a_closed_domain_leaves_nothing_behind(sent: list[tuple[object, ...]]) -> None:
    up = reports(2, sent)
    other = (b"k" * 16, 0)
    up.began = {(ID, 1): 0.0, (other, 1): 0.0}
    up.forget(ID)
    assert list(up.began) == [(other, 1)]


def test_what_waited_for_a_closed_domain_alone_is_due_no_more(sent: list[tuple[object, ...]]) -> None:
    up = reports(SCOPED_LAG + 1, sent)
    up.add(step(1))
    up.forget(ID)
    assert not up.waiting and up.by == 0.0, "the lane's loop would not wait any more"


def test_where_members_wait_for_each_other_each_goes_at_once(sent: list[tuple[object, ...]]) -> None:
    up = reports(SCOPED_LAG + 254, sent, commits=True)
    up.add(step(1))
    assert sent == [(step(1),)]
