"""What is remembered of a job's plans: what follows from it alone, and that it is read as it was written."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from gcproto.messages import Rule
from gcserver.planner.auto import Proposal
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.families import DENSE
from gcserver.planner.profile import StepTime
from gcserver.planner.standing import Before, Standing, rules_of
from gcserver.planner.turns import Took
from tests.unit.planner.live_profiles import plain

OLD, NEW = (Rule("*", "fp16"),), (Rule("*", "topk(ratio=0.01)", "all"),)
PROPOSAL = Proposal(
    "topk(ratio=0.01)", (PlannedRule("*", "topk(ratio=0.01)", "all"),), (), (), (), 0.2, 0.5, 0.1, 1.0, (), (), "topk"
)
BEGUN = Standing("auto", "fast")
#: the proposal is plan 3, which replaced the rules OLD
PLANNED = Standing(
    "auto", "fast", NEW, None, 7, plain([100_000], [0.1]), PROPOSAL, 3, Before(OLD, StepTime(2, 0.4, 0.01, 30))
)


def test_a_plan_has_the_rules_of_its_proposal() -> None:
    levels = PlannedRule("a", "qsgd(bits=4)", "owner", (2, 4))
    assert rules_of(replace(PROPOSAL, rules=(levels,))) == (Rule("a", "qsgd(bits=4)", "owner", (2, 4)),)
    assert PLANNED.proposed == NEW
    assert BEGUN.proposed == ()


def test_a_forecast_is_of_a_plan_only_while_that_is_in_force() -> None:
    assert PLANNED.forecast_plan == 3
    assert replace(PLANNED, rules=OLD).forecast_plan == 0
    assert BEGUN.forecast_plan == 0


def test_steps_are_made_as_proposed_by_the_proposals_plan_or_as_dense_as_they_were() -> None:
    assert PLANNED.holds
    assert not replace(PLANNED, rules=OLD).holds
    assert replace(PLANNED, rules=(), stayed=True).holds
    assert not replace(BEGUN, stayed=True).holds, "nothing was proposed"


def test_the_family_in_force_is_the_planners_own_alone() -> None:
    assert PLANNED.family == "topk(ratio=0.01)"
    assert replace(PLANNED, rules=OLD).family == BEGUN.family == "", "of somebody else's rules"
    assert replace(PLANNED, running="fp16").family == "fp16", "what was proposed was not worth to replace it"
    assert replace(PLANNED, rules=(), proposal=replace(PROPOSAL, family=DENSE), stayed=True).family == DENSE


def test_a_standing_is_read_as_it_was_written() -> None:
    standing = replace(
        PLANNED, asked=OLD, asked_before=PLANNED.before, taken_back=(OLD, ()), took=(Took("fp16", 0.3, 0.2, rules=OLD),)
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(standing), type=Standing) == standing
