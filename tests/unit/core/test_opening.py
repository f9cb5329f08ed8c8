"""What a restart takes up of a domain, and what closing one gives back.

What may live here: tests of `gcserver/core/opening.py`. What may not: reading shared memory.
"""

from __future__ import annotations

import pytest

from gcproto.records import replace
from gcproto.wire import Flag, FrameType, Phase
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.lane import LaneMachine
from tests.unit.core.lane_machine import (
    DENSE,
    ID,
    JOB,
    SECTION,
    A,
    B,
    contribution,
    frame,
    kinds,
    machine,
    open_domain,
    restarted,
    two,
)


def test_closing_releases_what_is_parked_and_closes_the_books() -> None:
    m = machine()
    open_domain(m)
    m.on(contribution(payload_bytes=600), 0.0)
    out = m.on(ev.DomainClosed(ID), 0.0)
    assert "Release" in kinds(out) and m.links[B].taken(ID) == 0
    m.on(contribution(2, payload_bytes=600), 0.0)
    filler = contribution(3, type=FrameType.FILLER, phase=Phase.NONE, payload_bytes=0, aux=600)
    m.on(replace(filler, handle=None), 0.0)
    m.on(ev.Unusable(contribution(4, payload_bytes=600).header, "index 99 of 32"), 0.0)
    assert m.links[B].received == 4 and ID not in m.links[B].accounts, "nor do late frames open them again"


def test_closing_between_the_exchanges_releases_everything() -> None:
    m = two(0)
    m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0)
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    m.on(frame(1, 0), 0.0)
    m.on(ev.Finalised(ID, 0, 1, 6, 128, 2, False), 0.0)
    m.on(frame(2, 1), 0.0)
    out = m.on(ev.DomainClosed(ID), 0.0)
    assert [e.handle for e in out if isinstance(e, fx.Release)] == [77, 6]


def test_an_owner_restarted_before_the_first_sum_begins_again() -> None:
    m = restarted()
    assert not [e for e in m.on(ev.Pushed(ID, 0, 1, (0,), True), 0.0) if isinstance(e, fx.Encode)]
    r = m.domains[ID].partitions[0].rounds[1]
    assert r.encoding and r.decision is not None and r.decision.seed == 99
    m.on(ev.Encoded(ID, 0, 1, 5, 128, 1, False), 0.0)
    assert kinds(m.on(frame(1, 0), 0.0)) == ["Accumulate", "Release", "Finalise"]


def second_epoch(settled: int, begins: int, skipped: tuple[tuple[int, int], ...] = ()) -> ev.DomainOpened:
    """The domain of a and b without b."""
    config = ev.DomainConfig(
        JOB, 0, "ddp", 2, (ev.Member(A, "a", 1),), 0, 1, 1, 2, 0, commits=True, origin=2, remaining=((0,),),
        begins=begins, skipped=skipped,
    )  # fmt: skip
    return ev.DomainOpened(config, (ev.Plan(0, (), DENSE),), settled)


def opened(m: LaneMachine, known: ev.BlockMemory) -> list[fx.LaneEffect]:
    blocks = m.domains[ID].config.space(1).append(SECTION)
    return m.on(ev.SectionOpened(ID, SECTION, blocks, {0: known}), 0.0)


DECIDED = ev.Decision(3, 0, 0, "none", 99)


def test_a_step_that_does_not_count_is_run_again_from_its_inputs() -> None:
    m = machine()
    open_domain(m)
    m.on(ev.Pushed(ID, 0, 3, (0,), True), 0.0)
    out = m.on(second_epoch(settled=2, begins=2), 1.0)
    assert not [e for e in out if isinstance(e, fx.ReportStep)]
    kept = ev.Retained(3, 0, 60, 128, 9, 1, 0, 0, 0)
    out = opened(m, ev.BlockMemory((3,), 0, 3, decision=DECIDED, retained=(kept,), epoch=1))
    assert kinds(out) == ["Release", "EnterEpoch", "Encode"], "what epoch 1 had of it is gone"
    assert [e.step for e in out if isinstance(e, fx.EnterEpoch)] == [2]
    out = m.on(ev.Encoded(ID, 0, 3, 5, 128, 1, False), 1.0)
    assert [e.divisor for e in out if isinstance(e, fx.Finalise)] == [1]
    out = m.on(ev.Finalised(ID, 0, 3, 6, 128, 1, False), 1.0)
    assert "Notify" not in kinds(out), "not before it is committed"
    assert [(e.step, e.epoch) for e in out if isinstance(e, fx.ReportStep)] == [(3, 2)], "closed before, not again"
    assert kinds(m.on(ev.Settled(ID, 3, False, 0), 1.0)) == ["Notify"]


def test_a_restart_in_the_new_epoch_does_not_go_back_again() -> None:
    m = machine()
    m.on(second_epoch(settled=2, begins=2), 0.0)
    out = opened(m, ev.BlockMemory((3,), 0, 3, decision=DECIDED, epoch=2))
    assert out == [] and m.domains[ID].partitions[0].out_step == 3


def test_a_finished_step_of_an_earlier_epoch_is_not_reported() -> None:
    m = machine()
    e = second_epoch(settled=2, begins=2)
    done = (ev.StepRecord(3, False, 0, 7, 1), ev.StepRecord(4, False, 0, 7, 2))
    out = m.on(replace(e, finished=done), 0.0)
    assert [x.step for x in out if isinstance(x, fx.ReportStep)] == [4]


def test_a_restart_begins_after_what_is_settled_though_the_lane_remembers_older_steps() -> None:
    m = machine()
    remembered = tuple(ev.StepRecord(step, False, 0, 7, 2) for step in (1, 2))
    out = m.on(replace(second_epoch(settled=4, begins=0), finished=remembered), 0.0)
    domain = m.domains[ID]
    assert kinds(out) == [] and not domain.finished
    assert domain.front == 5, "half of the credit is for this step: one behind it would wait for ever"
    m.on(ev.Settled(ID, 5, False, 0), 1.0)
    assert domain.front == 6


def test_workers_are_told_of_a_skipped_step_now_or_when_they_push_it() -> None:
    m = machine()
    open_domain(m)
    m.on(ev.Pushed(ID, 0, 3, (0,), False), 0.0)
    out = m.on(second_epoch(settled=4, begins=2, skipped=((3, 4),)), 1.0)
    assert [(e.step, e.keys, e.rank, e.skipped) for e in out if isinstance(e, fx.Notify)] == [(3, (0,), 0, True)]
    out = opened(m, ev.BlockMemory((3,), 0, 2, epoch=1))
    assert kinds(out) == ["EnterEpoch"], "nothing of it is run"
    out = m.on(ev.Pushed(ID, 0, 4, (0,), True), 2.0)
    assert [(e.step, e.skipped) for e in out if isinstance(e, fx.Notify)] == [(4, True)]
    assert "Encode" in kinds(m.on(ev.Pushed(ID, 0, 5, (0,), True), 3.0))


def test_frames_of_an_epoch_to_come_wait_for_it() -> None:
    m = machine()
    open_domain(m)
    assert kinds(m.on(contribution(epoch=2), 0.0)) == []
    out = m.on(second_epoch(settled=0, begins=0), 1.0)
    out = opened(m, ev.BlockMemory((0,), epoch=1))
    assert "frames_stale" in kinds(out), "b is no member of epoch 2"


def test_a_lane_that_restarted_tells_again_whom_it_must_once_the_step_commits() -> None:
    m = machine()
    e = second_epoch(settled=2, begins=2)
    m.on(replace(e, finished=(ev.StepRecord(3, False, 0, 7, 2),)), 0.0)
    opened(m, ev.BlockMemory((3,), 0, 3, decision=DECIDED, epoch=2))
    assert kinds(m.on(ev.Pushed(ID, 0, 3, (0,), True), 1.0)) == [], "finished, and not committed"
    (told,) = [e for e in m.on(ev.Settled(ID, 3, False, 0), 2.0) if isinstance(e, fx.Notify)]
    assert (told.step, told.keys) == (3, (0,))


@pytest.mark.parametrize("first", [0, 1])
def test_residuals_settle_whoever_of_the_ranks_has_come_back(first: int) -> None:
    m = machine()
    e = second_epoch(settled=2, begins=2)
    sparse = ev.CodecChoice("topk", 2, 4, True, True)
    config, plans = replace(e.config, local_ranks=2, divisor=2), (ev.Plan(0, (ev.PlanRule("*", sparse),), DENSE),)
    finished = (ev.StepRecord(3, False, 0, 7, 2),)
    m.on(replace(e, config=config, plans=plans, finished=finished), 0.0)
    opened(m, ev.BlockMemory((3, 3), 0, 3, decision=DECIDED, residual=ev.Versions(0, 2, 3, 2), epoch=2))
    m.on(ev.Pushed(ID, first, 3, (0,), True), 1.0)
    out = m.on(ev.Settled(ID, 3, False, 0), 2.0)
    assert [(e.step, e.version, e.owner) for e in out if isinstance(e, fx.Flip)] == [(3, 1, False)]
    m.on(ev.Pushed(ID, 1 - first, 3, (0,), True), 3.0)
    m.on(ev.Pushed(ID, 0, 4, (0,), True), 3.0)
    (encode,) = [e for e in m.on(ev.Pushed(ID, 1, 4, (0,), True), 3.0) if isinstance(e, fx.Encode)]
    assert (encode.read, encode.write) == (1, 0), "what step 3 held back is taken up"


@pytest.mark.parametrize("logged", [False, True])
def test_a_step_that_was_not_logged_is_not_overtaken_by_the_next(logged: bool) -> None:
    """Both ranks have inputs of step 2 in their slots; one has not closed step 1, of whose NaN the output tells."""
    config = ev.DomainConfig(JOB, 0, "ddp", 1, (ev.Member(A, "a", 2),), 0, 2, 2, 2, 0)
    finished = (ev.StepRecord(1, True, 0, 7, 1),) if logged else ()
    m = machine()
    m.on(ev.DomainOpened(config, (ev.Plan(0, (), DENSE),), finished=finished), 0.0)
    void = ev.BlockMemory((2, 2), 0, 1, int(Flag.NONFINITE), out_proposal=5)
    assert kinds(opened(m, void)) == (["LogDecision", "Encode"] if logged else [])
    if logged:
        return
    for rank in (0, 1):
        assert kinds(m.on(ev.Pushed(ID, rank, 1, (0,), False), 0.0)) == ["Notify"]
    m.on(ev.Pushed(ID, 0, 1, (), True), 0.0)
    (report,) = [e for e in m.on(ev.Pushed(ID, 1, 1, (), True), 0.0) if isinstance(e, fx.ReportStep)]
    assert (report.nonfinite, report.proposal) == (True, 5)
    m.on(ev.Pushed(ID, 0, 2, (0,), True), 0.0)
    assert kinds(m.on(ev.Pushed(ID, 1, 2, (0,), True), 0.0)) == ["LogDecision", "Encode"]
