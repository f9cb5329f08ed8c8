"""A dense contribution takes up what earlier codecs held back: when, which residuals, and what a void step changes.

What may live here: tests of the decision in `gcserver/core/encoding.py` and of `Versions`. What may not: arithmetic.
"""

from __future__ import annotations

from typing import Any

from gcproto.manifest import AddressSpace
from gcproto.records import replace
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.lane import LaneMachine
from tests.unit.core.lane_machine import DENSE, ID, JOB, SECTION, A, B, contribution, machine

DRAINS = replace(DENSE, drains=True)


def lane(me: int, residual: ev.Versions, owner: ev.Versions, out_step: int, settled: int) -> LaneMachine:
    """Member a (owner of the only block) under a dense plan, restarted with these residuals."""
    m = machine(1 << 20)
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(JOB, 0, "ddp", 1, members, me, 1, 2, 2, 0)
    m.on(ev.DomainOpened(config, (ev.Plan(0, (), DRAINS),), settled), 0.0)
    known = ev.BlockMemory((out_step,), 0, out_step, 0, 0, None, residual, owner)
    m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), {0: known}), 0.0)
    return m


def push(m: LaneMachine, step: int) -> list[Any]:
    return m.on(ev.Pushed(ID, 0, step, (0,), True), 0.0)


def encodes(effects: list[Any]) -> list[tuple[int, int, int, int]]:
    return [(e.flush, e.read, e.write, e.owner_read) for e in effects if isinstance(e, fx.Encode)]


def finish(m: LaneMachine, step: int) -> None:
    """The round's other contribution comes, and the sum."""
    m.on(ev.Encoded(ID, 0, step, 5, 100, 9, False), 0.0)
    m.on(contribution(step, step=step), 0.0)
    m.on(ev.Finalised(ID, 0, step, 6, 100, 9, False), 0.0)


def test_versions_know_what_they_hold() -> None:
    v = ev.Versions()
    assert not v.holds and not v.writing(1).holds
    settled = replace(v.writing(1), current=1, settled=1)
    assert settled.holds and settled.held == 2
    zeros = settled.writing(2, zeros=True)
    assert zeros.holds and not replace(zeros, current=0, settled=2).holds
    assert zeros.writing(3).held == 3, "a void step later the version is written again"


def test_what_is_settled_is_taken_up_once() -> None:
    held = ev.Versions(1, 3, 3, 2)
    m = lane(0, held, replace(held, current=0, held=1), 3, 3)
    assert encodes(push(m, 4)) == [(3, 1, 0, 0)]
    finish(m, 4)
    # The next step waits for this one, whose residuals may not count if it is void.
    assert encodes(push(m, 5)) == []
    out = m.on(ev.Settled(ID, 4, False, 0), 0.0)
    assert [(e.version, e.owner) for e in out if isinstance(e, fx.Flip)] == [(0, False), (1, True)]
    assert encodes(out) == [(0, 0, 1, 1)]
    finish(m, 5)
    assert encodes(push(m, 6)) == [(0, 0, 1, 1)], "nothing is held: nothing is waited for"


def test_a_void_step_leaves_it_to_the_next() -> None:
    m = lane(0, ev.Versions(1, 3, 3, 2), ev.Versions(), 3, 3)
    assert encodes(push(m, 4)) == [(1, 1, 0, 0)]
    finish(m, 4)
    push(m, 5)
    out = m.on(ev.Settled(ID, 4, True, 0), 0.0)
    assert encodes(out) == [(1, 1, 0, 0)]


def test_what_is_not_settled_is_waited_for() -> None:
    """A restart finds the round of a compressed step complete, its residual not settled."""
    m = lane(0, ev.Versions(0, 2, 3, 3), ev.Versions(), 3, 2)
    assert encodes(push(m, 4)) == []
    out = m.on(ev.Settled(ID, 3, False, 0), 0.0)
    assert encodes(out) == [(1, 1, 0, 0)]


def test_without_anything_held_nothing_is_waited_for() -> None:
    m = lane(0, ev.Versions(), ev.Versions(), 0, 0)
    assert encodes(push(m, 1)) == [(0, 0, 1, 0)]
    finish(m, 1)
    assert encodes(push(m, 2)) == [(0, 0, 1, 0)]
