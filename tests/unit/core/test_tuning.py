"""The levels a node encodes at, what its frames say of them, and that a retry keeps to what was decided.

What may live here: tests of `gcserver/core/tuning.py`, and of a lane that is tuned. What may not: which levels a plan
gives a block (`test_plan.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from gcproto.manifest import AddressSpace
from gcproto.records import replace
from gcproto.wire import FrameType
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core import tuning
from gcserver.core.lane import LaneMachine
from gcserver.core.plan import Choice
from tests.unit.core.lane_machine import DENSE, ID, JOB, SECTION, A, B, contribution, faults, machine

TOPK = ev.CodecChoice(
    "topk(ratio=0.01)", 16, 10_000, False, True, levels=(1, 1_000_000), own=10_000, exact=1_000_000, tunable=True
)
RANKS = ev.CodecChoice("powersgd(rank=4)", 64, 4, False, True, levels=(1, 4), own=4, exact=65)
#: three segments, the last of which the plan sends as it is
GRADED = Choice(TOPK, "owner", None, "", ((40_000, 20_000, 1_000_000), (20_000, 9_000, 1_000_000)), (33_000, 17_000))
PLAIN = Choice(TOPK, "owner")


def decision(notch: int = -1, level: int = 0) -> ev.Decision:
    return ev.Decision(1, 0, 0, TOPK.spec, 7, notch, level)


@pytest.mark.parametrize(
    ("tuned", "graded", "plain"),
    [
        ((-1, 0), (-1, 0), (-1, 0)),
        ((0, 0), (0, 0), (-1, 0)),
        ((7, 0), (1, 0), (-1, 0)),
        ((0, 500), (-1, 500), (-1, 500)),
        ((-1, 2_000_000), (-1, 1_000_000), (-1, 1_000_000)),
    ],
)
def test_a_decision_says_what_plan_and_codec_have(
    tuned: tuple[int, int], graded: tuple[int, int], plain: tuple[int, int]
) -> None:
    assert tuning.decided(GRADED, tuned) == graded
    assert tuning.decided(PLAIN, tuned) == plain
    assert tuning.decided(Choice(RANKS, "owner", levels=((4,), (2,)), grades=(4, 4)), tuned) == (-1, 0)
    assert tuning.decided(Choice(DENSE, "owner"), tuned) == (-1, 0)


def test_levels_and_grade() -> None:
    assert tuning.own(GRADED, decision(), 3) == ((20_000, 9_000, 1_000_000), 17_000)
    assert tuning.own(GRADED, decision(0), 3) == ((40_000, 20_000, 1_000_000), 33_000)
    assert tuning.own(GRADED, decision(level=500), 3) == ((500, 500, 1_000_000), 500)
    assert tuning.own(PLAIN, decision(), 3) == ((), 10_000)
    assert tuning.own(PLAIN, decision(level=500), 3) == ((500, 500, 500), 500)
    assert tuning.own(Choice(RANKS, "owner", levels=((4, 3), (2, 65)), grades=(4, 4)), decision(), 2) == ((2, 65), 4)


def test_an_owner_finds_the_levels_of_a_grade() -> None:
    for notch in (0, 1):
        levels, grade = tuning.own(GRADED, decision(notch), 3)
        assert tuning.owners(GRADED, grade, 3) == levels
    assert tuning.owners(GRADED, 500, 3) == (500, 500, 1_000_000)
    assert tuning.owners(PLAIN, 10_000, 3) == () and tuning.owners(PLAIN, 500, 3) == (500, 500, 500)
    assert tuning.owners(Choice(RANKS, "owner", levels=((4, 3), (2, 65)), grades=(4, 4)), 4, 2) == (2, 65)
    assert tuning.owners(Choice(DENSE, "owner"), 0, 3) == ()


def lane(codec: ev.CodecChoice = TOPK, scheme: str = "owner", logged: ev.Decision | None = None) -> LaneMachine:
    """Member a of two, owner of the only block, under a plan of two notches."""
    m = machine(1 << 20)
    members = (ev.Member(A, "a", 1), ev.Member(B, "b", 1))
    config = ev.DomainConfig(JOB, 0, "ddp", 1, members, 0, 1, 2, 2, 0)
    levels = (40_000, 20_000) if codec.tunable else (3, 2)
    plan = ev.Plan(0, (ev.PlanRule("*", codec, scheme), ev.PlanRule("v", codec, scheme, levels=levels)), DENSE)
    m.on(ev.DomainOpened(config, (plan,)), 0.0)
    memory = {} if logged is None else {0: ev.BlockMemory((1,), 0, 0, 0, 0, logged)}
    m.on(ev.SectionOpened(ID, SECTION, AddressSpace(2, 1, 4 << 20).append(SECTION), memory), 0.0)
    return m


def push(m: LaneMachine, step: int = 1) -> list[Any]:
    return m.on(ev.Pushed(ID, 0, step, (0,), True), 0.0)


def of(effects: list[Any], kind: type) -> Any:
    (found,) = (e for e in effects if isinstance(e, kind))
    return found


def test_a_tuned_lane_logs_and_encodes_so_from_its_next_decision_on() -> None:
    for event, levels, grade in (
        (None, (10_000, 20_000), 15_000),
        (ev.Tuned(ID, notch=0), (10_000, 40_000), 25_000),
        (ev.Tuned(ID, level=700), (700, 700), 700),
    ):
        m = lane()
        if event is not None:
            assert m.on(event, 0.0) == []
        out = push(m)
        encode, logged = of(out, fx.Encode), of(out, fx.LogDecision).decision
        assert (encode.levels, encode.codec.level) == (levels, grade)
        assert (logged.notch, logged.level) == ((-1, 0) if event is None else (event.notch, event.level))


def test_a_restarted_lane_encodes_as_it_had_decided() -> None:
    """It has forgotten how it was tuned; the ledger has not."""
    m = lane()
    m.on(ev.Tuned(ID, notch=0), 0.0)
    before = push(m)
    again = lane(logged=of(before, fx.LogDecision).decision)
    assert again.domains[ID].tuned == tuning.UNTUNED
    out = push(again)
    assert not [e for e in out if isinstance(e, fx.LogDecision)]
    restored = again.domains[ID].partitions[0].rounds[1]
    encode = of(before, fx.Encode)
    assert (restored.levels, restored.codec) == (encode.levels, encode.codec)


@pytest.mark.parametrize(("theirs", "levels"), [(25_000, (10_000, 40_000)), (15_000, (10_000, 20_000)), (7, None)])
def test_an_owner_encodes_at_the_highest_of_its_contributors(theirs: int, levels: tuple[int, ...] | None) -> None:
    m = lane()
    push(m)
    m.on(ev.Encoded(ID, 0, 1, 5, 100, 9, False), 0.0)
    out = m.on(contribution(codec=16, level=theirs), 0.0)
    finalise = of(out, fx.Finalise)
    assert [(e.member, e.level) for e in out if isinstance(e, fx.Accumulate)] == [(1, theirs)]
    assert finalise.levels == (levels or (10_000, 20_000))
    assert finalise.codec.level == max(theirs, 15_000)
    out = m.on(ev.Finalised(ID, 0, 1, 6, 100, 9, False), 0.0)
    sent = [e.header for e in out if isinstance(e, fx.Send) and e.header.type is FrameType.DATA]
    assert [h.level for h in sent] == [max(theirs, 15_000)]


def test_levels_may_differ_only_where_the_codec_is_tunable() -> None:
    for codec, faulty in ((TOPK, False), (replace(RANKS, rounds=2), True)):
        early, late = lane(codec), lane(codec)
        push(late)
        for m, come_first in ((early, True), (late, False)):
            out = m.on(contribution(codec=codec.id, level=3), 0.0)
            if come_first:
                assert not faults(out), "what codec the round has is not known here yet"
                out = push(m)
            assert [f.kind for f in faults(out)] == (["CorruptFrame"] if faulty else [])


def test_another_member_at_another_level_is_named_once_the_codec_is_known() -> None:
    m = lane(replace(RANKS, rounds=2))
    p = m.domains[ID].partitions[0]
    r = p.round(1)
    assert m.domains[ID].same_codec(p, r, 64, 4, "b") and m.domains[ID].same_codec(p, r, 64, 2, "c")
    (fault,) = faults(push(m))
    assert fault.missing == ("b", "c") and "codec 64 at level 2" in fault.message


def test_in_the_all_scheme_nothing_is_encoded_again() -> None:
    m = lane(scheme="all")
    m.on(ev.Tuned(ID, level=700), 0.0)
    out = push(m)
    assert of(out, fx.Encode).retain == 0
    out = m.on(ev.Encoded(ID, 0, 1, 5, 100, 9, False), 0.0)
    sent = [e.header for e in out if isinstance(e, fx.Send) and e.header.type is FrameType.DATA]
    assert [h.level for h in sent] == [700]
    out = m.on(contribution(codec=16, level=15_000, flags=16), 0.0)
    finalise = of(out, fx.Finalise)
    assert finalise.codec is None and finalise.levels == ()
