"""Sparsifiers are for optimizers that stand late gradients: which families are in question, what happens on a change.

What may live here: tests of that rule, in `families`, `auto` and `course`. What may not: how it is found out
(`tests/unit/client/test_tolerance.py`).
"""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from gcproto.messages import Rule
from gcserver.planner.auto import INTOLERANT, Proposal, Wish, compose
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.course import Act, next_act, replaced, switch
from gcserver.planner.families import SPARSE, candidates, parse
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.standing import Standing, rules_of
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
    barred = {c.spec for c in found.considered if c.why_not == INTOLERANT}
    sparse = {s.text for s in candidates(job(tolerant).codecs, quality) if s.name in SPARSE}
    assert sparse and barred == (sparse if family == "powersgd" else set())


def test_a_sparsifier_that_an_operator_asks_for_is_planned_whatever_the_optimizer_is() -> None:
    assert compose(job(False), Wish(family="topk(ratio=0.01)")).family == "topk(ratio=0.01)"


def test_another_optimizer_is_planned_for_at_once() -> None:
    standing = Standing("auto", "balanced", domain=7, profile=job(True), at=2000)
    assert next_act(standing, 7, job(True), 2500, 100)[0] is Act.STAY
    act, why = next_act(standing, 7, job(False), 2500, 100)
    assert act is Act.PLAN and why == "the model has an optimizer that may not stand late gradients"
    standing = replace(standing, profile=job(False))
    act, why = next_act(standing, 7, job(True), 2500, 100)
    assert act is Act.PLAN and why == "the model has an optimizer that stands late gradients"


def test_a_sparsifier_in_force_goes_when_the_optimizer_may_not_stand_it_however_long_steps_get() -> None:
    def standing(found: Proposal, profile: Profile) -> Standing:
        return Standing("auto", "balanced", rules_of(found), domain=7, profile=profile, proposal=found, plan=3)

    def planned(found: Proposal) -> tuple[tuple[Rule, ...], tuple[PlannedRule, ...]]:
        return rules_of(found), found.rules

    sparse = compose(job(True), Wish())
    now, wish = StepTime(3, sparse.expected, 0.01, 100), Wish(rules=sparse.rules, step=sparse.expected)
    in_force, made_by = planned(sparse)
    slower = msgspec.structs.replace(compose(job(False), wish), expected=2 * sparse.expected)
    was = standing(sparse, job(True))
    puts, why = switch(was, slower, now, in_force, made_by)
    assert puts and why.startswith(f"{sparse.family} has to go: the optimizer is not known to stand late gradients")
    assert replaced(was, in_force, now, slower, made_by) is None, "it is not to come back for shorter steps"

    same = msgspec.structs.replace(compose(job(True), Wish(family="qsgd(bits=4)")), expected=2 * sparse.expected)
    assert not switch(was, same, now, in_force, made_by)[0], "nothing else would be put in force that is slower"
