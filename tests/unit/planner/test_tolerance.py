"""Sparsifiers are for optimizers that stand late gradients: which families are in question, what happens on a change.

What may live here: tests of that rule, in `families`, `auto` and `course`. What may not: how it is found out
(`tests/unit/client/test_tolerance.py`).
"""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from gcproto.messages import Rule
from gcserver.planner.auto import INTOLERANT, Wish, compose
from gcserver.planner.course import Act, next_act, replaced, switch
from gcserver.planner.families import SPARSE, candidates, parse
from gcserver.planner.in_force import barred
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.standing import Before, Standing, rules_of
from tests.unit.planner.live_profiles import MBIT100, gpt


def job(tolerant: bool) -> Profile:
    return msgspec.structs.replace(gpt(2, MBIT100, whole=True), tolerant=tolerant)


@pytest.mark.parametrize(
    ("quality", "tolerant", "family"),
    [
        ("balanced", True, "sidco-e"),
        ("balanced", False, "powersgd"),
        ("fast", True, "sidco-e"),
        ("fast", False, "sidco-e"),
    ],
)
def test_a_plan_has_sparsifiers_where_the_optimizer_stands_late_gradients(
    quality: str, tolerant: bool, family: str
) -> None:
    found = compose(job(tolerant), Wish(quality=quality))
    assert parse(found.family).name == family
    left_out = {c.spec for c in found.considered if c.why_not == INTOLERANT}
    sparse = {s.text for s in candidates(job(tolerant).codecs, quality) if s.name in SPARSE}
    assert sparse and left_out == (sparse if family == "powersgd" else set())


@pytest.mark.parametrize(
    ("tolerant", "made", "family"), [(True, 100, "powersgd"), (False, 999, "qsgd"), (False, 1000, "powersgd")]
)
def test_rank_4_waits_ten_times_as_long_for_an_optimizer_that_may_not(tolerant: bool, made: int, family: str) -> None:
    found = compose(job(tolerant), Wish(made=made, late_after=100))
    assert parse(found.family).name == family
    waiting = {parse(c.spec).name for c in found.considered if c.why_not == "in question from step 1000 on"}
    assert waiting <= SPARSE if tolerant else waiting <= {"powersgd"}
    assert bool(waiting) is (tolerant or made < 1000)


def test_low_rank_stays_when_an_optimizer_comes_that_may_not_stand_it() -> None:
    in_force = rules_of(compose(job(True), Wish(made=150, late_after=100)))
    assert parse(in_force[-1].spec).name == "powersgd" and not barred(in_force, "balanced", False, planned=True)
    standing = Standing("auto", "balanced", in_force, domain=7, profile=job(True), at=150)
    assert next_act(standing, 7, job(False), 200, 100)[0] is Act.STAY


def test_a_sparsifier_that_an_operator_asks_for_is_planned_whatever_the_optimizer_is() -> None:
    assert compose(job(False), Wish(family="topk(ratio=0.01)")).family == "topk(ratio=0.01)"


@pytest.mark.parametrize(
    ("levels", "planned", "goes"),
    [((8, 6, 4), True, True), ((8, 8), True, False), ((), True, False), ((4,), False, False)],
)
def test_levels_below_what_a_quality_takes_have_to_go(levels: tuple[int, ...], planned: bool, goes: bool) -> None:
    rules = ruled("none", Rule("h.*", "qsgd(bits=8)", "owner", levels))
    why = barred(rules, "safe", True, planned=planned)
    assert bool(why) is goes
    assert not goes or "takes 8 and more, got 4" in why
    assert not barred(rules, "balanced", True, planned=planned)


def ruled(codec: str, *more: Rule) -> tuple[Rule, ...]:
    return (Rule("*", codec), *more)


@pytest.mark.parametrize(
    ("rules", "quality", "tolerant", "goes"),
    [
        (ruled("topk(ratio=0.01)"), "balanced", False, True),
        (ruled("topk(ratio=0.01)"), "safe", False, True),
        (ruled("topk(ratio=0.01)"), "fast", False, False),
        (ruled("topk(ratio=0.01)"), "balanced", True, False),
        (ruled("fp16", Rule("h.*", "sidco-e(ratio=0.01,packed=1)", "all", (5000, 3000))), "balanced", False, True),
        (ruled("powersgd(rank=4)"), "balanced", False, False),
        ((), "balanced", False, False),
    ],
)
def test_rules_in_force_are_barred_if_a_sparsifier_is_among_them(
    rules: tuple[Rule, ...], quality: str, tolerant: bool, goes: bool
) -> None:
    assert bool(barred(rules, quality, tolerant)) is goes


@pytest.mark.parametrize(
    ("codec", "quality", "why"),
    [
        ("qsgd(bits=4)", "safe", "qsgd(bits=4) has to go: quality safe takes bits from 8 on"),
        ("powersgd(rank=4)", "safe", "powersgd(rank=4) has to go: powersgd is too lossy for quality safe"),
        ("topk( ratio = 0.005 )", "balanced", "topk(ratio=0.005) has to go: quality balanced takes ratio from 0.01 on"),
        ("qsgd(bits=8)", "safe", ""),
        ("qsgd(bits=4)", "balanced", ""),
        ("none", "safe", ""),
    ],
)
def test_what_a_lower_quality_does_not_take_goes_if_a_planner_chose_it(codec: str, quality: str, why: str) -> None:
    assert barred(ruled(codec), quality, True, planned=True) == why
    assert barred(ruled(codec), quality, True) == "", "an operator's stays until something is faster"


@pytest.mark.parametrize("on_trial", [None, Before(ruled("fp16"), StepTime(2, 0.4, 0.01, 30), kind=1)])
def test_what_is_barred_is_planned_away_at_once_also_while_it_is_on_trial(on_trial: Before | None) -> None:
    standing = Standing("auto", "balanced", domain=7, profile=job(True), at=2000, before=on_trial)
    act, why = next_act(standing, 7, job(False), 2500, 100, "sparsifiers have to go: of this")
    assert act is Act.PLAN and why == "sparsifiers have to go: of this"
    assert next_act(standing, 7, job(False), 2500, 100)[0] is Act.STAY, "nothing in force is barred"


def test_an_optimizer_that_stands_late_gradients_is_planned_for_once() -> None:
    standing = Standing("auto", "balanced", domain=7, profile=job(False), at=2000)
    act, why = next_act(standing, 7, job(True), 2500, 100)
    assert act is Act.PLAN and why == "the optimizer is known to stand late gradients now"
    assert next_act(replace(standing, profile=job(True)), 7, job(True), 2500, 100)[0] is Act.STAY


@pytest.mark.parametrize("inherited", [False, True])
def test_a_sparsifier_in_force_goes_however_long_steps_get_and_does_not_come_back(inherited: bool) -> None:
    """Also one that the planner did not choose: an operator's before the mode was given, or of another quality."""
    sparse = compose(job(True), Wish())
    rules, now = rules_of(sparse), StepTime(3, sparse.expected, 0.01, 100)
    was = Standing(
        "auto", "balanced", rules, domain=7, profile=job(True), plan=3, proposal=None if inherited else sparse
    )
    wish = Wish(rules=sparse.rules, step=sparse.expected)
    slower = msgspec.structs.replace(compose(job(False), wish), expected=2 * sparse.expected)
    why_not = barred(rules, "balanced", False)
    puts, why = switch(was, slower, now, rules, sparse.rules, why_not=why_not)
    assert puts and why.startswith("sparsifiers have to go: the optimizer is not known to stand late gradients")
    assert replaced(was, rules, now, slower, sparse.rules, why_not) is None, "it is not to come back for shorter steps"
    assert not barred(rules_of(slower), "balanced", False, planned=True), "which ends it"
    assert not switch(was, slower, now, rules, sparse.rules)[0], "nothing else that is slower would be put in force"
