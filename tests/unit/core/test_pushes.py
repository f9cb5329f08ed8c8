"""Workers' pushes that do not fit each other, their step or the peers'.

What may live here: tests of `gcserver/core/pushes.py`. What may not: what is made of the inputs.
"""

from __future__ import annotations

import pytest

from gcserver.core import effects as fx
from gcserver.core import events as ev
from tests.unit.core.lane_machine import ID, contribution, faults, kinds, machine, open_domain


def test_a_key_that_only_the_peer_pushed_ends_the_job() -> None:
    m = machine()
    open_domain(m)
    m.on(contribution(), 0.0)
    (fault,) = [e for e in m.on(ev.Pushed(ID, 0, 1, (), True), 0.0) if isinstance(e, fx.ReportFault)]
    assert fault.kind == "TensorMismatch" and "'w'" in fault.message and fault.advice


@pytest.mark.parametrize("settled", [False, True])
def test_a_new_tensor_in_a_closed_step_ends_the_job(settled: bool) -> None:
    m = machine()
    open_domain(m)
    m.on(ev.Pushed(ID, 0, 1, (), True), 0.0)
    if settled:
        m.on(ev.Settled(ID, 1, False, 0), 0.0)
    (fault,) = faults(m.on(ev.Pushed(ID, 0, 1, (0,), False), 0.0))
    assert (fault.kind, fault.step) == ("TensorMismatch", 1) and "after it had closed" in fault.message


def test_the_same_push_again_is_no_new_tensor() -> None:
    m = machine()
    open_domain(m)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    assert m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0) == []


@pytest.mark.parametrize(("rank", "step"), [(0, 0), (0, -1), (1, 1), (-1, 1)])
def test_impossible_pushes_are_counted(rank: int, step: int) -> None:
    m = machine()
    open_domain(m)
    assert kinds(m.on(ev.Pushed(ID, rank, step, (0,), True), 0.0)) == ["pushes_unusable"]
