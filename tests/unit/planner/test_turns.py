"""What plans took, told by what others take now; which are measured in turns; a machine that changes meanwhile."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gcproto.messages import Rule
from gcserver.planner.auto import Considered, Proposal
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.course import JUDGED_AFTER, Act, in_turn, judged, learned, next_act, noticed, replaced, switch
from gcserver.planner.families import kind
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.standing import Before, Standing, rules_of
from gcserver.planner.turns import (
    CLOSE,
    DOUBTED,
    NEAR,
    OFTEN,
    UNTIL,
    UNTIL_ALIKE,
    Took,
    beaten,
    gained,
    moved,
    next_in_turn,
    noted,
    told,
    undecided,
    varying,
    wanted,
)
from tests.unit.planner.live_profiles import plain

FP16, QSGD, POWERSGD, TOPK = "fp16", "qsgd(bits=4)", "powersgd(rank=4)", "topk(ratio=0.01)"


def step(seconds: float, plan: int = 5, noise: float = 0.01) -> StepTime:
    return StepTime(plan, seconds, noise, 25)


def seconds(took: tuple[Took, ...]) -> dict[str, Any]:
    return {t.family: pytest.approx(t.seconds) for t in took}


THREE = (Took(TOPK, 0.4, 0.4), Took(FP16, 0.2, 0.2, runs=3), Took(QSGD, 0.3, 0.3))


def test_a_machine_that_has_changed_has_for_all_plans() -> None:
    """Half as much for what was measured since: the change may lie before it or after."""
    assert seconds(told(THREE, FP16, step(0.3))) == {TOPK: 0.6, FP16: 0.3, QSGD: 0.3 * 1.2}
    assert seconds(told(THREE, QSGD, step(0.15))) == {TOPK: 0.2, FP16: 0.1, QSGD: 0.15}
    assert [t.family for t in told(THREE, FP16, step(0.3))] == [TOPK, QSGD, FP16], "the newest comes last"
    assert told(THREE, "none", step(0.3)) == THREE, "nothing is known of what that took before"
    assert [t.expected for t in told(THREE, FP16, step(0.3))] == [0.6, pytest.approx(0.36), pytest.approx(0.3)]


def test_what_may_be_noise_changes_no_other_plan() -> None:
    assert seconds(told(THREE, FP16, step(0.204))) == {TOPK: 0.4, FP16: 0.201, QSGD: 0.3}, "its mean, of four now"
    assert moved(THREE, FP16, step(0.205, noise=0.04)) == 1.0, "both may be off"
    assert moved(THREE, FP16, step(0.21)) == pytest.approx(1.05)
    assert moved(THREE, FP16, step(0.21, noise=0.2)) == 1.0, "of 25 steps that vary so much"
    assert moved(THREE, "none", step(0.21)) == 1.0


def test_the_newest_comes_last() -> None:
    new = noted((), FP16, step(0.2), 0.19, False)
    assert new == (Took(FP16, 0.2, 0.19, 5, 1),)
    again = noted(THREE, FP16, step(0.3, plan=7), 0.2, False)
    assert seconds(again) == {TOPK: 0.6, QSGD: 0.36, FP16: 0.3} and again[-1] == Took(FP16, 0.3, 0.2, 7, 4, alike=1)
    slower = noted(THREE, FP16, step(0.21), 0.2, False)
    assert seconds(slower) == pytest.approx({TOPK: 0.42, QSGD: 0.3 * 2.1 / 2.05, FP16: 0.21})
    assert slower[-1].agreeing == 3, "what changed was the machine: no more is known of how they compare"
    same = noted(THREE, FP16, step(0.204), 0.2, False)
    assert (seconds(same)[FP16], same[-1].agreeing) == (0.201, 4)
    beside = noted(THREE, FP16, step(0.216), 0.2, True)
    assert seconds(beside) == {TOPK: 0.4, QSGD: 0.3, FP16: 0.204}, "the plan before was measured just before"
    assert (beside[-1].runs, beside[-1].alike) == (4, 4)


def test_measurements_of_machines_that_differ_make_no_mean() -> None:
    """A quarter shorter than three times before: only those that agree with it from now on count with it."""
    first = noted(THREE, FP16, step(0.15), 0.2, True)
    assert seconds(first)[FP16] == 0.15 and not first[-1].settled
    assert undecided((Took(QSGD, 0.3, 0.3), first[-1]), QSGD, FP16), "by far the shorter, this time"
    second = noted(first, FP16, step(0.156), 0.2, True)
    assert seconds(second)[FP16] == 0.153 and (second[-1].runs, second[-1].alike) == (5, 2)
    assert second[-1].settled and not undecided((Took(QSGD, 0.3, 0.3), second[-1]), QSGD, FP16)
    assert noted((), FP16, step(0.2), 0.2, True)[-1].settled, "the first"


def test_what_wins_by_a_machine_that_changed_has_to_win_again() -> None:
    """As it was seen: the quantiser's turns took 0.84 s, then 0.66, beside 0.76 of the cast just before."""
    took = (Took(QSGD, 0.84, 0.84, 2, runs=3), Took(FP16, 0.76, 0.8, 3, runs=2))
    replaced_ = Before(rules(FP16), enough(0.76, 3), kind=1, family=FP16)
    standing = running(QSGD, 4, *took, before=replaced_, turns=(QSGD,))
    seen = measured(enough(0.76, 3), enough(0.66, 4))
    found, why = next_act(standing, 7, seen)
    assert found is Act.TAKE_BACK and why.endswith("that one is back, until another turn")
    known_ = learned(standing, seen)["took"]
    assert {t.family: t.settled for t in known_} == {FP16: True, QSGD: False}
    back = running(FP16, 5, *known_, turns=(QSGD,))
    back = judged(back, measured(enough(0.68, 5)))
    considered = (Considered(QSGD, 0.66, 0.9), Considered(FP16, 0.68, 0.9))
    assert back.proposal is not None
    back = replace(back, proposal=replace(back.proposal, considered=considered), considered=len(back.took))
    assert in_turn(back) == QSGD
    again = Before(rules(FP16), enough(0.68, 5), kind=1, family=FP16)
    standing = running(QSGD, 6, *back.took, before=again, turns=(QSGD, QSGD))
    assert next_act(standing, 7, measured(enough(0.68, 5), enough(0.63, 6)))[0] is Act.KEEP
    last = replace(standing, in_turn=(QSGD,) * UNTIL)
    assert next_act(last, 7, measured(enough(0.68, 5), enough(0.5, 6)))[0] is Act.KEEP, "there has to be an end"


def test_the_more_turns_the_less_their_mean_varies() -> None:
    """As it was seen of the GPT on four nodes: a sparsifier gained 13 and 6 % of steps that vary by an eighth."""
    took = (Took(TOPK, 0.94, 1.0, 2, runs=2, alike=1), Took(QSGD, 1.08, 1.0, 3, runs=3))
    then, now = StepTime(3, 1.08, 0.125, JUDGED_AFTER), StepTime(4, 1.01, 0.125, JUDGED_AFTER)
    assert varying(took, TOPK, QSGD, then, now) == pytest.approx(1.25 * 0.125 / JUDGED_AFTER**0.5)
    back = Before(rules(QSGD), then, kind=kind(QSGD), family=QSGD)
    seen = measured(then, now)
    known_ = judged(running(TOPK, 4, *took, before=back), seen).took
    assert varying(known_, TOPK, QSGD, then, now) == pytest.approx(1.25 * 0.125 / (2 * JUDGED_AFTER) ** 0.5)
    found, why = next_act(running(TOPK, 4, *took, before=back, turns=(TOPK,) * 2), 7, seen)
    assert found is Act.KEEP and why.endswith("0.975 and 1.08 s in 3 turns")
    seen = measured(then, replace(now, noise=0.2))
    standing = running(TOPK, 4, *took, before=back, turns=(TOPK,) * 2)
    found, why = next_act(standing, 7, seen)
    assert found is Act.TAKE_BACK and why.endswith("a gain of 9.7% where 12.5% is wanted: that one is back")
    families = (Considered(TOPK, 0.9, 0.9), Considered(QSGD, 1.0, 0.9))
    again = running(QSGD, 5, *learned(standing, seen)["took"], turns=(TOPK,) * 2)
    assert again.proposal is not None
    again = judged(again, measured(replace(then, plan=5)))
    again = replace(again, proposal=replace(proposal(QSGD), considered=families), taken_back=(rules(TOPK),))
    assert in_turn(again) == TOPK, "it may be the steps that keep it out"
    assert in_turn(replace(again, in_turn=(TOPK,) * UNTIL)) == "", "there has to be an end"


def test_what_surpasses_another_brings_what_its_kind_must() -> None:
    old = Took(FP16, 1.0, 1.0)
    assert gained(Took(QSGD, 0.94, 1), old) == pytest.approx(0.06) and gained(old, old) == 0.0
    assert gained(Took(QSGD, 1.1, 1), old) == pytest.approx(-0.1) and gained(old, Took(QSGD, 0.0, 1)) == 0.0
    assert [wanted(new, FP16) for new in (QSGD, POWERSGD, TOPK, "bf16")] == [0.05, 0.06, 0.06, 0.0]
    assert [wanted(new, FP16, tolerant=True) for new in (QSGD, POWERSGD, TOPK, "bf16")] == [0.03, 0.03, 0.03, 0.0]
    assert [wanted(new, QSGD, tolerant=True) for new in (FP16, POWERSGD, TOPK, QSGD)] == [0.05, 0.03, 0.03, 0.0]
    assert wanted(QSGD, TOPK) == -0.06 and wanted(QSGD, TOPK, tolerant=True) == -0.03, "what loses less may cost"
    assert wanted("bf16", FP16, alike=0.05) == 0.05 and wanted(QSGD, FP16, unsure=0.05) == 0.1
    assert beaten((old, Took("bf16", 0.94, 1)), FP16) and not beaten((old, Took("bf16", 0.96, 1)), FP16), (
        "a switch pays"
    )
    assert [beaten((Took(QSGD, 1, 1), Took(TOPK, 0.96, 1)), QSGD, knows) for knows in (True, False)] == [True, False]
    assert beaten((old, Took(QSGD, 0.94, 1)), FP16) and not beaten((old, Took(QSGD, 0.96, 1)), FP16)
    assert not beaten((old,), QSGD)


def considered(**expected: float) -> tuple[Considered, ...]:
    return tuple(Considered(spec, s, "") for spec, s in expected.items())


def test_what_comes_close_is_measured_in_turn_the_shortest_first() -> None:
    families = considered(**{"none": 1.0, FP16: 0.3, QSGD: 0.2, TOPK: 0.4})
    close = Took(TOPK, 0.2 * (1 + CLOSE) - 1e-6, 0.4)
    took = (Took("none", 0.5, 1.0), Took(FP16, 0.21, 0.3), close, Took(QSGD, 0.2, 0.2))
    assert next_in_turn(families, QSGD, took, ()) == FP16
    assert next_in_turn(families, QSGD, took, (FP16,)) == TOPK
    assert next_in_turn(families, QSGD, took, (FP16, TOPK)) == "", "dense steps are far from it"
    assert next_in_turn(families[:-1], QSGD, took, (FP16,)) == "", "it is not in question any more"
    assert next_in_turn(families, "onebit", took, ()) == next_in_turn(families, QSGD, took[:-1], ()) == ""


def test_what_was_expected_to_be_shorter_is_measured_again_before_it_is_given_up() -> None:
    """As it was seen on the CNN at 10 Gbit/s: the quantiser's only turn fell into a busy moment."""
    eight, families = "qsgd(bits=8)", considered(**{FP16: 0.63, "bf16": 0.61, "qsgd(bits=8)": 0.7, QSGD: 0.7})
    took = (Took(eight, 0.7, 0.586), Took(FP16, 0.63, 0.665, runs=3), Took("bf16", 0.61, 0.66, runs=2))
    assert next_in_turn(families, "bf16", took, (FP16,)) == eight
    assert next_in_turn(families, "bf16", took, (FP16, eight)) == "", "by that turn, others of its kind are longer"
    (first, *others) = took
    for other in (replace(first, runs=2), replace(first, expected=0.62), replace(first, seconds=0.61 * (1 + DOUBTED))):
        assert next_in_turn(families, "bf16", (other, *others), (FP16,)) == ""
    assert next_in_turn(families, "bf16", (replace(first, runs=0), *others), (FP16,)) == "", "it may get other rules"
    slower = told(took, "bf16", step(0.61 * 1.5, noise=0.0))
    assert next_in_turn(families, "bf16", slower, (FP16,)) == eight, "the machine does not make it a longer one"
    again = (*others, replace(first, seconds=0.6, runs=2, alike=1))
    assert next_in_turn(families, "bf16", again, (FP16, eight)) == QSGD, "and by this one they are not"


def test_others_of_the_kind_are_measured_by_what_predictions_of_it_are_off() -> None:
    """qsgd(bits=8) took half as much again as predicted."""
    eight, took = "qsgd(bits=8)", (Took("qsgd(bits=8)", 0.3, 0.2),)
    for four, found in ((0.2 * (1 + NEAR) - 1e-6, QSGD), (0.2 * (1 + NEAR) + 1e-6, ""), (0.0, "")):
        assert next_in_turn(considered(**{FP16: 0.1, eight: 0.2, QSGD: four}), eight, took, ()) == found
    both = (*took, Took(FP16, 0.29, 0.2))
    assert next_in_turn(considered(**{FP16: 0.29, "bf16": 0.29, eight: 0.3, QSGD: 0.3}), FP16, both, (eight,)) == QSGD
    assert next_in_turn(considered(**{FP16: 0.29, "bf16": 0.29, eight: 0.3}), FP16, both, (eight,)) == "", "casts"
    assert next_in_turn(considered(**{eight: 0.2, QSGD: 0.2}), eight, (*took, Took(QSGD, 0.36, 0.2)), ()) == ""


# ------------------------------------------------------------------------- in the course of a job's plans
PROFILE = plain([100_000], [0.1], forward=0.1)
FAMILIES = considered(**{"none": 1.0, FP16: 0.4, QSGD: 0.38})


def proposal(family: str, expected: float = 0.4, hope: float = 0.0) -> Proposal:
    rules = (PlannedRule("*", family),)
    return Proposal(family, rules, (), (), (), expected, 1.0, 0.1, 1.0, (), FAMILIES, family, hope=hope)


def measured(*steps: StepTime, **changes: object) -> Profile:
    return msgspec.structs.replace(PROFILE, steps=steps, **changes)


def rules(family: str) -> tuple[Rule, ...]:
    return rules_of(proposal(family))


def running(family: str, plan: int, *took: Took, before: Before | None = None, turns: tuple[str, ...] = ()) -> Standing:
    """A plan of ``family`` is in force, as the newest proposal has it."""
    return Standing(
        "auto", "balanced", rules(family), None, 7, PROFILE, proposal(family), plan, before,
        took=took, considered=len(took), in_turn=turns, running=family,
    )  # fmt: skip


def enough(seconds: float, plan: int) -> StepTime:
    return StepTime(plan, seconds, 0.01, JUDGED_AFTER)


def test_a_plan_that_is_back_is_measured_again_and_tells_of_what_was_tried() -> None:
    """The machine became a quarter slower when qsgd was tried: it looked no better than fp16 was before."""
    standing = running(
        QSGD, 2, Took(FP16, 0.4, 0.4, 1), before=Before(rules(FP16), enough(0.4, 1), kind=1, family=FP16)
    )
    seen = measured(enough(0.4, 1), enough(0.44, 2))
    assert next_act(standing, 7, seen)[0] is Act.TAKE_BACK
    standing = replace(standing, **learned(standing, seen))
    assert seconds(standing.took) == {FP16: 0.4, QSGD: 0.44}
    # It is back as plan 3, and the newest proposal is fp16 again, which knew what qsgd took.
    standing = replace(running(FP16, 3, *standing.took), taken_back=(rules(QSGD),))
    seen = measured(*seen.steps, StepTime(3, 0.5, 0.01, JUDGED_AFTER - 1))
    assert next_act(standing, 7, seen)[0] is Act.STAY and in_turn(standing) == ""
    seen = measured(*seen.steps[:-1], enough(0.5, 3))
    assert next_act(standing, 7, seen)[0] is Act.KEEP, "what it takes now is to be noted"
    standing = judged(standing, seen)
    assert seconds(standing.took) == {QSGD: 0.44 * 2 * 1.25 / 2.25, FP16: 0.5} and standing.taken_back == ()
    assert not beaten(standing.took, FP16), "0.489 s are no gain of a twentieth over 0.5 s"
    settled = replace(standing, considered=2)
    assert next_act(settled, 7, seen) == (Act.MEASURE, f"{QSGD} is measured beside {FP16}"), "it came close"
    once = replace(settled, in_turn=(QSGD,))
    assert next_act(once, 7, seen)[0] is Act.MEASURE, "2 % of the 5 that it must bring: once more"
    often = tuple(replace(t, runs=UNTIL) for t in once.took)
    assert next_act(replace(once, took=often), 7, seen)[0] is Act.STAY
    standing = judged(running(FP16, 4, Took(FP16, 0.4, 0.4, 1), Took(QSGD, 0.42, 0.4, 2)), measured(enough(0.5, 4)))
    act, why = next_act(standing, 7, measured(enough(0.5, 4)))
    assert act is Act.PLAN and "0.5 s" in why, "0.467 s are one"


def test_what_was_in_force_often_is_not_tried_for_ever() -> None:
    moving = measured(enough(0.5, 4))
    for runs, kept in ((OFTEN - 1, ()), (OFTEN, (rules(QSGD),))):
        standing = running(FP16, 4, Took(FP16, 0.4, 0.4, 1, runs), Took(QSGD, 0.42, 0.4, 2))
        assert judged(replace(standing, taken_back=(rules(QSGD),)), moving).taken_back == kept


def test_what_is_measured_in_turn_is_put_in_force_whatever_is_expected() -> None:
    standing, now = running(FP16, 3, Took(FP16, 0.4, 0.4, 3), Took(QSGD, 0.44, 0.4, 2)), enough(0.4, 3)
    assert in_turn(standing) == QSGD and in_turn(replace(standing, in_turn=(QSGD,))) == ""
    assert in_turn(replace(standing, refused={QSGD: "no room"})) == ""
    assert in_turn(replace(standing, before=Before((), now))) == "", "it is to be judged itself"
    other, made_by = proposal(QSGD, 0.44), (PlannedRule("*", FP16),)
    back = replace(standing, taken_back=(rules(QSGD),))
    assert not switch(standing, other, now, rules(FP16), made_by)[0]
    assert switch(back, other, now, rules(FP16), made_by, QSGD) == (True, QSGD)
    assert not switch(back, other, None, rules(FP16), made_by, QSGD)[0], "nothing to compare it with"
    assert not switch(back, proposal(TOPK, 0.44), now, rules(FP16), made_by, QSGD)[0], "a member refuses qsgd"
    before = Before(rules(FP16), now, False, 1, FP16, standing.proposal, 90)
    assert replaced(replace(standing, at=90), rules(FP16), now, other, made_by) == before


@pytest.mark.parametrize(
    ("mine", "other", "seconds_", "narrow"),
    [
        (FP16, QSGD, 0.38, True),  # just the 5 % that it must bring
        (FP16, QSGD, 0.37, True),
        (FP16, QSGD, 0.36, True),  # 10 %: steps that vary have kept it out
        (FP16, QSGD, 0.391, True),
        (FP16, QSGD, 0.40, False),
        (QSGD, FP16, 0.38, True),
        (QSGD, FP16, 0.42, False),
        (POWERSGD, QSGD, 0.42, True),  # nearly what it may cost to lose less
        (POWERSGD, QSGD, 0.40, True),  # less than it may
        (POWERSGD, QSGD, 0.44, False),
        (FP16, "bf16", 0.39, False),  # of one kind the shorter, by what was measured twice
        (FP16, "bf16", 0.42, False),
    ],
)
def test_a_narrow_decision_is_measured_in_more_turns(mine: str, other: str, seconds_: float, narrow: bool) -> None:
    took = (Took(mine, 0.4, 0.4, 3), Took(other, seconds_, 0.4, 2, UNTIL - 1))
    assert undecided(took, mine, other) is narrow
    assert not undecided((took[0], replace(took[1], runs=UNTIL)), mine, other), "that has to do"
    assert not undecided(took[:1], mine, other) and not undecided(took[1:], mine, other)
    measured_ = running(mine, 3, *took, turns=(other,))
    considered = (Considered(other, 0.4, 0.9), Considered(mine, 0.4, 0.9))
    assert measured_.proposal is not None
    measured_ = replace(measured_, proposal=replace(measured_.proposal, considered=considered))
    assert in_turn(measured_) == (other if narrow else "")
    assert in_turn(replace(measured_, in_turn=(other,) * UNTIL)) == "", "whatever its rules were each time"


@pytest.mark.parametrize(
    ("before", "then", "act"),
    [
        (0.40, 0.36, Act.KEEP),  # 0.37 and 0.40 s
        (0.40, 0.39, Act.TAKE_BACK),  # 0.385 s are less than a twentieth shorter
        (0.50, 0.44, Act.KEEP),  # a slower machine: 0.4575 s, since 0.38 s would be 0.475 now
        (0.40, 0.45, Act.TAKE_BACK),
    ],
)
def test_turns_count_alike(before: float, then: float, act: Act) -> None:
    took = (Took(QSGD, 0.38, 0.4, 2), Took(FP16, 0.4, 0.4, 3))
    replaced_ = Before(rules(FP16), enough(before, 3), kind=1, family=FP16)
    standing = running(QSGD, 4, *took, before=replaced_, turns=(QSGD,))
    found, why = next_act(standing, 7, measured(enough(before, 3), enough(then, 4)))
    assert found is act and "in 2 turns" in why


def test_with_an_optimizer_that_stands_late_gradients_sparsifiers_have_to_bring_less() -> None:
    """4 % in two turns."""
    took = (Took(TOPK, 0.384, 0.4, 2), Took(QSGD, 0.4, 0.4, 3))
    back = Before(rules(QSGD), enough(0.4, 3), kind=kind(QSGD), family=QSGD)
    standing = running(TOPK, 4, *took, before=back, turns=(TOPK,))
    seen = measured(enough(0.4, 3), enough(0.384, 4))
    assert next_act(standing, 7, seen)[0] is Act.TAKE_BACK
    assert next_act(standing, 7, msgspec.structs.replace(seen, tolerant=True))[0] is Act.KEEP
    narrow = (Took(QSGD, 0.4, 0.4, 3), Took(TOPK, 0.39, 0.4, 2, UNTIL - 1))
    assert undecided(narrow, QSGD, TOPK) is False and undecided(narrow, QSGD, TOPK, tolerant=True)


def test_of_one_kind_the_second_turn_decides() -> None:
    """There is no third, in which what came back "until another turn" would be put in force."""
    took = (Took("bf16", 0.5, 0.4, 2, runs=2, alike=2), Took(FP16, 0.4, 0.4, 3, runs=3))
    back = Before(rules(FP16), enough(0.4, 3), kind=1, family=FP16)
    seen = measured(enough(0.4, 3), enough(0.36, 4))
    for turns, act in ((1, Act.TAKE_BACK), (UNTIL_ALIKE, Act.KEEP)):
        standing = running("bf16", 4, *took, before=back, turns=("bf16",) * turns)
        assert next_act(standing, 7, seen)[0] is act


def test_what_is_said_after_a_turn_is_of_the_plan_that_stays() -> None:
    before = Before(rules(FP16), enough(0.4, 3), kind=1, family=FP16, proposal=proposal(FP16))
    took = (Took(QSGD, 0.4, 0.4, 2), Took(FP16, 0.4, 0.4, 3))
    standing = running(QSGD, 4, *took, before=before, turns=(QSGD,))
    lost, won = measured(enough(0.4, 3), enough(0.42, 4)), measured(enough(0.4, 3), enough(0.36, 4))
    assert learned(standing, lost)["proposal"] == proposal(FP16), "what that was made for has not changed"
    assert "proposal" not in learned(replace(standing, in_turn=()), lost), "what was hoped for is planned for anew"
    standing = judged(standing, won)
    act, why = next_act(standing, 7, won)
    assert act is Act.PLAN and why == f"{QSGD} took 0.36 s a step, others may take less", "not to be measured any more"


def test_what_comes_into_question_during_turns_is_planned_for() -> None:
    """What the proposal that is back was made from knew nothing of it."""
    known = {"profile": msgspec.structs.replace(PROFILE, tolerant=True)}
    standing = replace(running(FP16, 3, Took(FP16, 0.4, 0.4, 3), Took(QSGD, 0.42, 0.4, 2)), at=90, **known)
    seen = measured(enough(0.4, 3), tolerant=True)
    assert next_act(standing, 7, seen, 99, 100) == (Act.MEASURE, f"{QSGD} is measured beside {FP16}")
    act, why = next_act(standing, 7, seen, 100, 100)
    assert act is Act.PLAN and why.endswith("in question from step 100 on"), "before others are measured"
    # The turn began at step 99, and its plan was made at 100.
    before = Before(rules(FP16), enough(0.4, 3), kind=1, family=FP16, proposal=proposal(FP16), at=90)
    turn = replace(running(QSGD, 4, *standing.took, before=before, turns=(QSGD,)), at=100, **known)
    found = learned(turn, measured(enough(0.4, 3), enough(0.42, 4), tolerant=True))
    assert (found["proposal"], found["at"]) == (proposal(FP16), 90)
    back = replace(turn, rules=rules(FP16), plan=5, running=FP16, before=None, **found)
    back = judged(back, again := measured(enough(0.4, 5), tolerant=True))
    assert next_act(back, 7, again, 120, 100)[0] is Act.PLAN
    assert next_act(replace(back, at=100), 7, again, 120, 100)[0] is not Act.PLAN


def test_what_several_turns_have_found_is_not_undone_by_one_measurement() -> None:
    """Of eight steps that vary by an eighth, which may be off by 11 %."""
    now = StepTime(5, 0.4, 0.125, JUDGED_AFTER)
    for runs, back in ((1, True), (UNTIL, False)):
        took = (Took(FP16, 0.44, 0.4, 4, runs), Took(TOPK, 0.4, 0.4, 5, runs))
        standing = running(TOPK, 5, *took)
        assert switch(standing, proposal(FP16, 0.44), now, rules(TOPK), (PlannedRule("*", TOPK),))[0] is back


def test_a_plan_that_was_not_worth_to_replace_by_one_of_its_family_is_known_by_it() -> None:
    """The newest proposal has other rules than those in force, for a gain that does not pay."""
    standing = replace(running(QSGD, 2), proposal=proposal(TOPK), running=QSGD)
    assert not standing.holds and standing.family == QSGD
    seen = measured(enough(0.4, 2))
    assert next_act(standing, 7, seen)[0] is Act.KEEP
    assert judged(standing, seen).took == (Took(QSGD, 0.4, 0.4, 2, rules=rules(QSGD)),)


def test_another_plan_of_the_same_family_is_judged_by_its_steps() -> None:
    """Other levels: both are known by one name."""
    took, before = (Took(QSGD, 0.4, 0.4, 2),), Before((Rule("a", QSGD),), enough(0.5, 3), kind=2, family=QSGD)
    standing = running(QSGD, 4, *took, before=before, turns=(QSGD,))
    for after, act in ((0.44, Act.KEEP), (0.54, Act.TAKE_BACK)):
        assert next_act(standing, 7, measured(enough(0.5, 3), enough(after, 4)))[0] is act


def test_what_other_rules_of_a_family_took_does_not_count() -> None:
    some, all_ = (Rule("a", QSGD),), rules(QSGD)
    took = noted((), QSGD, step(0.4, 2), 0.4, False, some)
    assert noted(took, QSGD, step(0.3, 3), 0.3, True, some)[0].runs == 2
    assert noted(took, QSGD, step(0.3, 3), 0.3, True, all_) == (Took(QSGD, 0.3, 0.3, 3, 1, all_),)
    free = (replace(took[0], rules=(), runs=0),)
    assert noted(free, QSGD, step(0.3, 3), 0.3, True, all_) == (Took(QSGD, 0.3, 0.3, 3, 1, all_, alike=1),)
    old = (replace(took[0], rules=()),)
    assert noted(old, QSGD, step(0.4, 3), 0.3, True, all_)[0].runs == 2, "an older daemon's, which kept no rules"


def test_of_two_plans_of_a_family_what_the_one_that_stays_took_is_kept() -> None:
    some, all_ = (Rule("a", QSGD),), rules(QSGD)
    before = Before(some, enough(0.5, 3), kind=2, family=QSGD)
    standing = running(QSGD, 4, Took(QSGD, 0.47, 0.45, 2, 2, some), before=before)
    good = judged(standing, measured(enough(0.5, 3), enough(0.3, 4))).took
    assert good == (Took(QSGD, 0.3, 0.4, 4, 1, all_),)
    slower = measured(enough(0.5, 3), enough(0.51, 4))
    assert next_act(standing, 7, slower)[0] is Act.TAKE_BACK, "it must be shorter"
    (back,) = learned(standing, slower)["took"]
    assert back == Took(QSGD, pytest.approx((2 * 0.47 + 0.5) / 3), 0.5, 3, 3, some, alike=3)


def test_an_expectation_is_that_of_the_plan_in_force() -> None:
    """Not of what was only proposed."""
    standing = running(QSGD, 2)
    assert judged(standing, measured(enough(0.5, 2))).took[0].expected == pytest.approx(0.4)
    proposed = replace(standing, rules=(Rule("a", QSGD),), running=QSGD)
    assert judged(proposed, measured(enough(0.5, 2))).took[0].expected == 0.5


def test_what_was_tried_is_known_before_anything_else_is() -> None:
    """qsgd was tried and is taken back: fp16 is measured again first, and the plan after that knows both."""
    standing = replace(running(FP16, 3, Took(FP16, 0.4, 0.4, 1), Took(QSGD, 0.5, 0.4, 2)), considered=1)
    standing = replace(standing, proposal=proposal(QSGD, hope=0.15), running=FP16)
    seen = measured(StepTime(3, 0.4, 0.01, JUDGED_AFTER - 1))
    assert next_act(standing, 7, seen)[0] is Act.STAY
    standing = judged(standing, measured(enough(0.4, 3)))
    assert [t.family for t in standing.took] == [QSGD, FP16] and standing.considered == 0
    act, why = next_act(standing, 7, measured(enough(0.4, 3)))
    assert act is Act.PLAN and why.startswith(QSGD)


def test_a_plan_that_is_good_is_not_one_that_was_taken_back() -> None:
    before = Before(rules(FP16), enough(0.4, 3), kind=1, family=FP16)
    standing = replace(running(QSGD, 4, before=before), taken_back=(rules(TOPK), rules(QSGD)))
    assert judged(standing, measured(enough(0.3, 4))).taken_back == (rules(TOPK),)


def test_a_restart_knows_what_was_asked_for() -> None:
    """Dense steps had stayed when qsgd was asked for, and the daemon was killed before it heard that it is in force."""
    before = Before((), enough(0.4, 0), True, family="none")
    asked = replace(
        running("none", 0), rules=(), stayed=True, asked=rules(QSGD), asked_as=QSGD, asked_before=before
    )  # fmt: skip
    found = noticed(asked, 1, rules(QSGD), planned=True)
    assert (found.family, found.before, found.plan, found.stayed) == (QSGD, before, 1, False)
    assert (found.asked, found.asked_as, found.asked_before) == (None, "", None)
    assert next_act(found, 7, measured(enough(0.4, 0), enough(0.5, 1)))[0] is Act.TAKE_BACK
