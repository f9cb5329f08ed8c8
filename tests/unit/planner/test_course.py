"""Whose a job's plans are, and what is done about them: every decision by itself."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from gcproto.messages import PlanMode, Rule
from gcserver.planner.auto import Considered, Proposal
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.course import (
    COMPARED,
    JUDGED_AFTER,
    LOOK_AGAIN,
    OVERSPENT,
    SURE_AFTER,
    SURPRISE,
    Act,
    by_hand,
    judged,
    learned,
    next_act,
    noticed,
    other_network,
    replaced,
    running,
    stands,
    stays_dense,
    step_under,
    switch,
    unlearned,
)
from gcserver.planner.families import kind
from gcserver.planner.profile import LevelErrors, LinkCost, Profile, StepTime
from gcserver.planner.standing import Before, Standing
from gcserver.planner.turns import Took
from tests.unit.planner.live_profiles import plain

OLD, NEW, OTHER = (Rule("*", "fp16"),), (Rule("*", "topk(ratio=0.01)", "all"),), (Rule("*", "none"),)
PROFILE = plain([100_000], [0.1], forward=0.1, tolerant=True)


def proposal(expected: float = 0.2) -> Proposal:
    rules = (PlannedRule("*", "topk(ratio=0.01)", "all"),)
    return Proposal("topk(ratio=0.01)", rules, (), (), (), expected, 0.5, 0.1, 1.0, (), (), "topk")


def judge(
    standing: Standing, found: Proposal, now: StepTime | None, rules: tuple[Rule, ...], *declared: PlannedRule
) -> tuple[bool, str]:
    """`switch`, where models were declared with ``declared`` and the job's plan has ``rules``."""
    plan = tuple(PlannedRule(r.pattern, r.spec, r.scheme, r.levels) for r in rules)
    return switch(standing, found, now, rules, (*declared, *plan))


def measured(*steps: StepTime, **changes: object) -> Profile:
    return msgspec.structs.replace(PROFILE, steps=steps, **changes)


#: the planner's plan 3 replaced the rules OLD, under which a step took 0.4 s
PLANNED = Standing("auto", "fast", NEW, None, 7, PROFILE, proposal(), 3, Before(OLD, StepTime(2, 0.4, 0.01, 30)))


def test_what_the_planner_asked_for_is_its_plan() -> None:
    asked = Standing("auto", "fast", OLD, asked=NEW)
    assert noticed(asked, 2, OLD) == replace(asked, plan=2), "it is on its way"
    found = noticed(asked, 3, NEW, planned=True)
    assert (found.mode, found.rules, found.asked, found.plan) == ("auto", NEW, None, 3)
    assert noticed(asked, 3, NEW) == by_hand(asked), "an operator's, who wants the same just now"


def test_the_same_rules_under_another_number_are_a_change_of_controller() -> None:
    assert noticed(PLANNED, 4, NEW) == replace(PLANNED, plan=4)
    began = Standing("auto", "fast", OLD)
    assert noticed(began, 4, OLD) == replace(began, plan=4)
    mine = replace(PLANNED, mine=True)
    assert noticed(mine, 4, NEW, planned=True) == replace(mine, plan=4), "whose rules they are stays"
    # The planner chose what there was: no plan, or an operator's before the mode. Neither is its own plan.
    dense = Standing("auto", "fast", (), running="none")
    assert noticed(dense, 1, ()) == replace(dense, plan=1)
    assert noticed(dense, 1, (), planned=True) == replace(dense, plan=1, mine=True)
    confirmed = replace(began, plan=3, running="fp16")
    assert noticed(confirmed, 4, OLD) == replace(confirmed, plan=4)


def test_somebody_who_gives_the_planners_rules_wants_them_to_stay() -> None:
    mine = replace(PLANNED, mine=True)
    assert noticed(mine, 4, NEW) == by_hand(mine)
    assert noticed(PLANNED, 4, NEW, asked_for=True) == by_hand(PLANNED), "given once more, by who wants them to stay"
    assert noticed(PLANNED, PLANNED.plan, NEW, asked_for=True).mode == "auto", "not what was there when it began"


@pytest.mark.parametrize("standing", [PLANNED, Standing("auto", "fast", OLD, asked=NEW)])
def test_rules_of_anybody_else_end_the_mode(standing: Standing) -> None:
    found = noticed(standing, 4, OTHER)
    assert found == by_hand(standing)
    assert (found.mode, found.quality, found.plan, found.before, found.proposal) == ("static", "fast", 0, None, None)
    assert noticed(found, 5, NEW) == found


def test_a_job_is_planned_first_and_again_for_another_model() -> None:
    assert next_act(Standing("auto", "fast"), 7, PROFILE) == (Act.PLAN, "the first plan")
    assert next_act(PLANNED, 7, PROFILE)[0] is Act.STAY
    assert next_act(PLANNED, 8, PROFILE)[0] is Act.PLAN


@pytest.mark.parametrize(
    ("after", "act"),
    [
        (StepTime(3, 0.9, 0.01, JUDGED_AFTER - 1), Act.STAY),
        (StepTime(2, 0.9, 0.01, 30), Act.STAY),
        (StepTime(3, 0.9, 0.01, JUDGED_AFTER), Act.TAKE_BACK),
        (StepTime(3, 0.41, 0.01, 30), Act.KEEP),
        (StepTime(3, 0.43, 0.01, 30), Act.TAKE_BACK),
        (StepTime(3, 0.43, 0.05, 30), Act.KEEP),
        (StepTime(3, 0.2, 0.01, 30), Act.KEEP),
    ],
)
def test_a_plan_is_judged_once_enough_steps_are_beyond_the_noise(after: StepTime, act: Act) -> None:
    found, why = next_act(PLANNED, 7, measured(after))
    assert found is act
    assert ("0.4 s" in why) == (act is not Act.STAY)


def test_what_a_plan_took_is_remembered_and_a_surprise_is_planned_for_once() -> None:
    slow, quick = (measured(StepTime(3, seconds, 0.01, 30)) for seconds in (0.3, 0.21))
    known = judged(PLANNED, slow)
    assert known.before is None and known.took == (Took("topk(ratio=0.01)", 0.3, 0.2, 3, rules=NEW),)
    act, why = next_act(known, 7, slow)
    assert act is Act.PLAN and "0.3 s a step, 0.2 s were expected" in why
    assert next_act(replace(known, considered=1), 7, slow)[0] is Act.STAY, "the newest proposal knew"
    assert next_act(judged(PLANNED, quick), 7, quick)[0] is Act.STAY, "as expected"


def test_a_plan_that_replaced_nothing_measured_is_noted_too() -> None:
    standing = replace(PLANNED, before=None)
    assert next_act(standing, 7, measured(StepTime(3, 0.3, 0.01, JUDGED_AFTER - 1)))[0] is Act.STAY
    after = measured(StepTime(3, 0.3, 0.01, JUDGED_AFTER))
    assert next_act(standing, 7, after)[0] is Act.KEEP
    assert next_act(judged(standing, after), 7, after)[0] is Act.PLAN


def test_a_drift_is_planned_for_once_the_plan_has_been_judged() -> None:
    slower = measured(forward=0.3, link=LinkCost(0.0, 4e6, 0.0, 9))
    assert next_act(PLANNED, 7, slower)[0] is Act.STAY
    act, why = next_act(replace(PLANNED, before=None), 7, slower)
    assert act is Act.PLAN and "100%" in why
    assert next_act(replace(PLANNED, before=None), 7, measured(forward=0.11))[0] is Act.STAY


def test_a_proposal_is_put_in_force_if_it_pays() -> None:
    standing, now = Standing("auto", "fast", OLD), StepTime(2, 0.4, 0.01, 30)
    assert judge(standing, proposal(), now, OLD) == (True, "topk")
    assert judge(standing, proposal(), None, OLD) == (True, "topk"), "the first: nothing to compare with"
    assert judge(replace(standing, profile=PROFILE), proposal(), None, OLD) == (
        False,
        "the plan in force stays, no step under it has been measured yet (topk)",
    )
    assert not judge(standing, proposal(0.39), now, OLD)[0]
    assert not judge(standing, proposal(), now, NEW)[0], "it is in force"
    back = replace(standing, taken_back=(NEW,))
    pays, why = judge(back, proposal(), now, OLD)
    assert not pays and "gained too little" in why


@pytest.mark.parametrize(
    ("expected", "in_force", "switches"),
    [
        (0.42, NEW, True),
        (0.45, NEW, False),
        (0.42, (Rule("*", "none"), Rule("w*", "powersgd(rank=4)")), True),
        (0.41, OLD, False),
        (0.41, (Rule("*", "qsgd(bits=8)"),), False),
    ],
)
def test_a_sparse_plan_that_brings_too_little_gives_way(
    expected: float, in_force: tuple[Rule, ...], switches: bool
) -> None:
    quantised = replace(
        proposal(expected), family="qsgd(bits=4)", rules=(PlannedRule("*", "qsgd(bits=4)"),), reason="qsgd"
    )
    now = StepTime(2, 0.4, 0.01, 30)
    good, why = judge(Standing("auto", "balanced", in_force), quantised, now, in_force)
    assert (good, why) == (True, "qsgd") if switches else (not good and "the plan in force stays" in why)
    sparse = replace(proposal(expected), rules=(PlannedRule("*", "topk(ratio=0.05)"),))
    assert not judge(Standing("auto", "balanced", in_force), sparse, now, in_force)[0], "no less lossy"


def test_what_a_model_was_declared_with_is_what_a_first_plan_gives_up() -> None:
    """Going back from a sparsifier to a quantiser may cost what the sparsifier had to gain."""
    quantised = replace(proposal(0.42), family="qsgd(bits=4)", rules=(PlannedRule("*", "qsgd(bits=4)"),))
    standing, now = Standing("auto", "balanced"), StepTime(0, 0.4, 0.01, 30)
    sparse = PlannedRule("*", "topk(ratio=0.05)")
    assert judge(standing, quantised, now, (), sparse)[0]
    assert not judge(standing, quantised, now, (), PlannedRule("*", "none"))[0]
    assert not judge(standing, quantised, now, OLD, sparse)[0], "a plan for all is in force"
    assert judge(standing, quantised, now, (Rule("bias", "none"),), sparse)[0], "one for some is"


@pytest.mark.parametrize(
    ("expected", "in_force", "switches"), [(0.38, OLD, False), (0.35, OLD, True), (0.38, NEW, True)]
)
def test_a_sparse_plan_has_to_bring_more(expected: float, in_force: tuple[Rule, ...], switches: bool) -> None:
    sparse = replace(proposal(expected), rules=(PlannedRule("*", "topk(ratio=0.05)"),))
    now = StepTime(2, 0.4, 0.01, 30)
    assert judge(Standing("auto", "balanced", in_force), sparse, now, in_force)[0] is switches


def test_the_way_back_from_a_sparse_plan_may_cost_what_that_one_had_to_bring() -> None:
    back = replace(PLANNED, rules=OLD, before=Before(NEW, StepTime(2, 0.4, 0.01, 30), kind=kind("topk")))
    assert next_act(back, 7, measured(StepTime(3, 0.42, 0.01, 30)))[0] is Act.KEEP
    assert next_act(back, 7, measured(StepTime(3, 0.45, 0.01, 30)))[0] is Act.TAKE_BACK


@pytest.mark.parametrize(
    ("tolerant", "waiting"),
    [
        (True, (("low rank below 16 is", 18, 100), ("sparsifiers are", 100, 1000))),
        (False, (("low rank below 16 is", 18, 1000),)),
    ],
)
def test_codecs_that_wait_for_first_steps_are_planned_for_after_them_once(
    tolerant: bool, waiting: tuple[tuple[str, int, int], ...]
) -> None:
    seen = measured(tolerant=tolerant)
    standing = replace(PLANNED, before=None, profile=seen)
    for codecs, at, first in waiting:
        waits = replace(standing, at=at)
        assert next_act(waits, 7, seen, first - 1, 100)[0] is Act.STAY
        assert next_act(waits, 7, seen, first, 100) == (Act.PLAN, f"{codecs} in question from step {first} on")
    assert next_act(replace(standing, at=1000), 7, seen, 1900, 100)[0] is Act.STAY, "nothing else comes"
    assert next_act(replace(standing, at=18), 7, seen, 300, 0)[0] is Act.STAY, "nothing waits"
    assert next_act(replace(PLANNED, at=18, profile=seen), 7, seen, 100, 100)[0] is Act.STAY, "the plan is judged first"


def considered(**expected: float) -> tuple[Considered, ...]:
    return tuple(Considered(spec, seconds, "slower") for spec, seconds in expected.items())


@pytest.mark.parametrize(("other", "act"), [(0.2, Act.PLAN), (0.22, Act.PLAN), (0.23, Act.STAY), (0.0, Act.STAY)])
def test_what_may_be_better_than_a_measured_plan_is_planned_for_once(other: float, act: Act) -> None:
    """0.15 shorter than predicted, and 0.05 better than the 0.2 s that the plan in force took."""
    found = replace(
        proposal(0.2), considered=considered(**{"topk(ratio=0.01)": 0.2, "none": 0.1, "qsgd(bits=4)": other})
    )
    standing = replace(PLANNED, proposal=found, before=None)
    after = measured(StepTime(3, 0.2, 0.01, 30))
    known = judged(standing, after)
    assert next_act(known, 7, after)[0] is act
    assert next_act(replace(known, considered=1), 7, after)[0] is Act.STAY, "the newest proposal knew"
    both = replace(known, took=(Took("qsgd(bits=8)", 0.3, 0.3), *known.took))
    assert next_act(both, 7, after)[0] is not Act.PLAN, "one of its kind was in force"


@pytest.mark.parametrize(("compute", "act"), [(0.1, Act.PLAN), (0.191, Act.STAY)])
def test_where_the_planner_chose_what_was_there_that_is_noted_too(compute: float, act: Act) -> None:
    """Dense steps from the first one on, of 0.2 s; a quantiser is expected to take as long."""
    families = considered(**{"none": 0.2, "qsgd(bits=4)": 0.2})
    dense = replace(
        proposal(), family="none", rules=(PlannedRule("*", "none"),), compute=compute, expected=0.2, considered=families
    )
    standing = Standing("auto", "fast", (), None, 7, PROFILE, dense, stayed=stays_dense(dense, ()))
    assert next_act(standing, 7, measured(StepTime(0, 0.2, 0.01, JUDGED_AFTER - 1)))[0] is Act.STAY
    after = measured(StepTime(0, 0.2, 0.01, JUDGED_AFTER))
    assert next_act(standing, 7, after)[0] is Act.KEEP
    known = judged(standing, after)
    assert known.took == (Took("none", 0.2, 0.2, 0),)
    assert next_act(known, 7, after)[0] is act, "no step is shorter than computing"
    assert next_act(replace(known, considered=1), 7, after)[0] is Act.STAY
    assert not stays_dense(dense, (PlannedRule("*", "fp16"),)) and not stays_dense(proposal(), ())
    assert next_act(replace(standing, stayed=False), 7, after)[0] is Act.STAY, "it is not what was chosen"


def test_what_was_tried_is_planned_for_with_what_it_took() -> None:
    standing = replace(PLANNED, proposal=replace(proposal(0.22), hope=0.15), before=None)
    after = measured(StepTime(3, 0.2, 0.01, 30))
    known = judged(standing, after)
    assert known.took == (Took("topk(ratio=0.01)", 0.2, pytest.approx(0.187), 3, rules=NEW),)
    assert next_act(known, 7, after)[0] is Act.PLAN
    assert next_act(replace(known, considered=1), 7, after)[0] is Act.STAY


def test_few_steps_judge_nothing() -> None:
    lossless, fp16, began = (PlannedRule("*", "none"),), (PlannedRule("*", "fp16"),), Standing("auto", "fast")
    assert replaced(began, OLD, None, proposal(), fp16) is None
    assert replaced(began, OLD, StepTime(2, 0.4, 0.0, COMPARED - 1), proposal(), fp16) is None
    enough = StepTime(2, 0.4, 0.0, COMPARED)
    assert replaced(began, OLD, enough, proposal(), fp16) == Before(OLD, enough, kind=kind("fp16"))
    assert replaced(began, (), enough, proposal(), fp16) == Before((), enough, kind=kind("fp16")), (
        "of the model's own codec"
    )
    both = (*fp16, PlannedRule("*", "topk(ratio=0.01)", "all"))
    assert replaced(began, NEW, enough, proposal(), both) == Before(NEW, enough, kind=kind("topk")), (
        "not the model's own"
    )
    assert replaced(began, OTHER, enough, proposal(), (*fp16, *lossless)) == Before(OTHER, enough, True, family="none")
    assert replaced(began, (), enough, proposal(), lossless) == Before((), enough, True, family="none")
    exact = msgspec.structs.replace(proposal(), overspent=1 + 2 * OVERSPENT)
    assert replaced(began, OLD, enough, exact, fp16) is None, "what is not for speed is not taken back for want of it"


def test_a_step_is_found_by_the_version_it_was_made_under() -> None:
    assert step_under(measured(StepTime(2, 0.4, 0.0, 9)), 2) == StepTime(2, 0.4, 0.0, 9)


def test_steps_over_another_link_judge_no_plan() -> None:
    """A link that slows down within the first steps of a good plan must not bring the slower rules back."""
    link = LinkCost(1e-4, 1e9, 0.0, 9)
    standing = replace(PLANNED, profile=msgspec.structs.replace(PROFILE, link=link))
    slow = StepTime(3, 0.9, 0.01, JUDGED_AFTER)
    assert next_act(standing, 7, measured(slow, link=link))[0] is Act.TAKE_BACK
    act, why = next_act(standing, 7, measured(slow, link=replace(link, bandwidth=4e5)))
    assert act is Act.PLAN and "drifted" in why


def test_what_was_learned_is_forgotten_with_the_time_it_is_of() -> None:
    learned = replace(PLANNED, taken_back=(OTHER,), took=(Took("fp16", 0.3, 0.2),), considered=1)
    assert unlearned(learned, PROFILE) == {}
    later = replace(learned, **unlearned(learned, measured(forward=0.3)))
    assert (later.before, later.taken_back, later.took, later.considered) == (None, (), (), 0)
    found = measured(link=LinkCost(1e-4, 1e9, 0.0, 9))
    guessed = replace(learned, before=None, profile=measured(link=LinkCost(1e-4, 125e6)))
    assert next_act(guessed, 7, found)[0] is Act.PLAN and unlearned(guessed, found).keys() == {"took"}
    ruled = replace(guessed, took=(Took("fp16", 0.3, 0.2, rules=OLD),))
    assert unlearned(ruled, found) == {"took": (Took("fp16", 0.3, 0.2, runs=0),)}, (
        "by what the link is others may be the ones to choose"
    )
    assert unlearned(replace(learned, profile=found), measured(link=LinkCost(1e-4, 1e8, 0.0, 9)))


def test_dense_steps_that_a_proposal_was_not_worth_to_replace_are_known_as_such() -> None:
    """Else they would never count as measured, and nothing else would be tried."""
    none, now, fp16 = Standing("auto", "fast"), StepTime(0, 0.4, 0.01, 30), (PlannedRule("*", "fp16"),)
    dense = replace(proposal(), family="none", rules=(PlannedRule("*", "none"),))
    assert running(none, proposal(), now, (), ()) == running(none, dense, now, (), ()) == "none"
    assert running(none, proposal(), now, OTHER, dense.rules) == "none"
    assert running(none, proposal(), now, OLD, fp16) == "", "a model's own codec"
    assert running(PLANNED, proposal(), now, NEW, proposal().rules) == "topk(ratio=0.01)"
    assert running(replace(PLANNED, running="fp16"), proposal(), now, OLD, fp16) == "fp16"
    # While no step was measured it is not known what all steps are made by.
    assert running(none, dense, None, OLD, ()) == running(none, proposal(), None, (), ()) == ""
    assert running(replace(PLANNED, running="fp16"), dense, None, OLD, ()) == "fp16"


def test_rules_are_kept_until_gradients_are_looked_at_again() -> None:
    ruled = replace(PLANNED, before=None, took=(Took("fp16", 0.3, 0.2, rules=OLD),), at=600)
    errors = {"topk": (LevelErrors("t0", (1, 2), (0.5, 0.2), (10.0, 20.0)),)}
    seen = measured(errors=errors)
    assert unlearned(ruled, seen, 1599) == unlearned(ruled, PROFILE, 1600) == {}
    assert unlearned(ruled, seen, 1600) == {"took": (Took("fp16", 0.3, 0.2, runs=0),)}
    assert unlearned(replace(ruled, running="fp16"), seen, 1600) == {"took": ruled.took}, "it is in force"
    guess = replace(ruled, profile=measured(link=LinkCost(1e-4, 1e8)))
    assert unlearned(guess, guess.profile, 700) == {}, "still a guess"


def test_a_plan_whose_steps_have_become_longer_is_of_another_time() -> None:
    judged_at = replace(PLANNED, before=None, took=(Took("topk(ratio=0.01)", 0.2, 0.2),), considered=1)
    few, as_before, longer = (
        measured(StepTime(3, seconds, 0.01, steps))
        for seconds, steps in ((0.3, SURE_AFTER - 1), (0.2 * (1 + SURPRISE), SURE_AFTER), (0.3, SURE_AFTER))
    )
    assert next_act(judged_at, 7, few)[0] is next_act(judged_at, 7, as_before)[0] is Act.STAY
    assert unlearned(judged_at, few) == unlearned(judged_at, as_before) == {}
    act, why = next_act(judged_at, 7, longer)
    assert act is Act.PLAN and "50% longer" in why and unlearned(judged_at, longer)["took"] == ()
    assert next_act(replace(judged_at, rules=OTHER), 7, longer)[0] is Act.STAY, "of another plan nothing was noted"


def test_the_first_judged_plan_leaves_what_dense_steps_take() -> None:
    slow = measured(StepTime(3, 0.9, 0.01, JUDGED_AFTER))
    assert [t.family for t in learned(PLANNED, slow)["took"]] == ["topk(ratio=0.01)"], (
        "fp16 was noted when it was judged"
    )
    after_dense = replace(PLANNED, before=Before((), StepTime(0, 0.4, 0.01, 30), dense=True))
    found = learned(after_dense, slow)
    good = measured(StepTime(3, 0.17, 0.01, JUDGED_AFTER))
    assert next_act(after_dense, 7, good)[0] is Act.KEEP
    known = judged(after_dense, good)
    assert [(t.family, t.seconds) for t in known.took] == [("none", 0.4), ("topk(ratio=0.01)", 0.17)]
    assert next_act(known, 7, good)[0] is Act.STAY, "neither is news to plan for"
    assert [(t.family, t.seconds) for t in found["took"]] == [("none", 0.4), ("topk(ratio=0.01)", 0.9)]
    assert found["considered"] == 1, "that is no news to plan for, what the plan took is"
    again = replace(after_dense, took=(Took("none", 0.5, 0.5),), considered=1)
    assert [t.seconds for t in learned(again, slow)["took"]] == [0.5, 0.9], "as it was measured for itself"


def test_what_is_said_of_a_proposal_while_nothing_happens() -> None:
    assert stands(PLANNED) == "plan 3 is in force: topk"
    assert stands(replace(PLANNED, plan=0)) == "the plan in force stays: topk"
    back = replace(PLANNED, plan=0, rules=OLD, taken_back=(PLANNED.proposed,))
    assert stands(back) == "the plan in force stays: topk(ratio=0.01) was tried, and gained too little"
    assert stands(by_hand(PLANNED)) == stands(Standing("auto", "fast")) == ""


def test_rules_of_a_planner_that_is_gone_may_be_planned_away() -> None:
    """The eldest node left: the next one plans on."""
    began = Standing("auto", "fast", chosen=True)
    assert noticed(began, 3, NEW, planned=True) == Standing("auto", "fast", NEW, plan=3, chosen=True, mine=True)
    assert noticed(began, 3, NEW).mode == "static", "an operator's"
    assert noticed(PLANNED, 9, OTHER, planned=True) == Standing("auto", "fast", OTHER, plan=9, mine=True)


def test_rules_that_were_on_their_way_when_the_planner_got_the_plans_may_be_planned_away() -> None:
    began = Standing("auto", "fast", OLD, plan=2, said=PlanMode(b"j" * 16, "auto", "", 4))
    found = noticed(began, 4, NEW)
    assert found == Standing("auto", "fast", NEW, plan=4, said=began.said)
    assert noticed(found, 4, NEW, asked_for=True) == found
    assert noticed(replace(began, plan=1), 3, OLD, asked_for=True) == replace(began, plan=3)
    assert noticed(found, 5, OTHER) == by_hand(found) and by_hand(found).said == began.said


def test_what_a_job_was_resumed_with_may_be_planned_away() -> None:
    resumed = noticed(Standing("auto", "fast"), 0, OLD)
    assert (resumed.mode, resumed.rules) == ("auto", OLD)
    assert noticed(resumed, 1, OLD) == replace(resumed, plan=1), "with a controller alone"
    assert noticed(resumed, 1, NEW).mode == "static"


def test_more_or_fewer_nodes_are_another_network() -> None:
    slow = StepTime(3, 0.9, 0.01, JUDGED_AFTER)
    assert not other_network(PLANNED, PROFILE) and other_network(PLANNED, measured(nodes=3))
    why = "what was measured cannot be compared with what the plan was made for"
    assert next_act(PLANNED, 7, measured(slow, nodes=3)) == (Act.PLAN, why)
    assert not other_network(Standing("auto", "fast"), PROFILE)


def test_gradients_are_looked_at_again_ever_less_often() -> None:
    standing, seen = replace(PLANNED, before=None, at=20), measured(errors={"topk": ()})
    assert next_act(standing, 7, seen, 20 + LOOK_AGAIN - 1)[0] is Act.STAY
    act, why = next_act(standing, 7, seen, 20 + LOOK_AGAIN)
    assert act is Act.PLAN and "1000 steps ago" in why
    later = replace(standing, at=5 * LOOK_AGAIN)
    assert next_act(later, 7, seen, 10 * LOOK_AGAIN - 1)[0] is Act.STAY
    assert next_act(later, 7, seen, 10 * LOOK_AGAIN)[0] is Act.PLAN
    assert next_act(standing, 7, PROFILE, 10 * LOOK_AGAIN)[0] is Act.STAY, "nothing was looked at to begin with"


def test_levels_that_lose_more_than_they_may_are_replaced_whatever_that_costs() -> None:
    standing, now = Standing("auto", "fast", OLD, taken_back=(NEW,)), StepTime(2, 0.4, 0.01, 30)
    over = msgspec.structs.replace(proposal(0.5), overspent=1.3)
    good, why = judge(standing, over, now, OLD)
    assert good and why.startswith("levels in force lose 30% more than they may")
    assert not judge(standing, over, now, NEW)[0], "it is in force"
    assert not judge(standing, msgspec.structs.replace(over, overspent=1.05), now, OLD)[0]


@pytest.mark.parametrize(
    "adopted", [Standing("auto", "fast", NEW, plan=3), noticed(Standing("auto", "fast"), 3, NEW, True)]
)
def test_a_plan_that_was_there_before_is_judged_by_its_own_steps(adopted: Standing) -> None:
    """An operator gave the mode anew, or another node planned: what is chosen again is in force already."""
    standing = replace(adopted, domain=7, profile=PROFILE, proposal=proposal(0.5))
    dense, own = StepTime(0, 1.0, 0.01, 50), StepTime(3, 0.5, 0.01, JUDGED_AFTER)
    assert standing.forecast_plan == 3
    assert next_act(standing, 7, measured(dense)) == (Act.STAY, ""), "plan 0's steps say nothing of it"
    assert next_act(standing, 7, measured(dense, own))[0] is Act.KEEP
    assert judged(standing, measured(dense, own)).took == (Took("topk(ratio=0.01)", 0.5, 0.5, 3, rules=NEW),)
