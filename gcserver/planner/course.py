"""The course of a job's plans: whose they are, when one is made, what is put in force, when it is taken back.

What may live here: decisions over what is remembered of a job's plans, as pure functions. What may not: what that is
(`standing.py`), how a plan is made (`auto.py`), measuring, asking and telling anybody (`gcserver.runtime.planning`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gcproto.modes import STATIC
from gcserver.planner.auto import Proposal
from gcserver.planner.auto_levels import OVERSPENT
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.drift import drift, link_drift
from gcserver.planner.families import DENSE, kind, late_steps
from gcserver.planner.in_force import effective, lossiest, lossy
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.standing import Before, Rules, Standing, rules_of
from gcserver.planner.turns import (
    OFTEN,
    Took,
    beaten,
    decided,
    gained,
    known,
    moved,
    next_in_turn,
    noted,
    told,
    until,
    varying,
    wanted,
)
from gcserver.planner.worth import margin, worth

#: Planned again when compute or link have changed by so much.
DRIFT: Final = 0.2
#: So many steps under a plan say how long its steps take,
JUDGED_AFTER: Final = 8
#: which is a surprise where they take so much longer than expected,
SURPRISE: Final = 0.15
#: and so many of the plan before it what is lost by going back.
COMPARED: Final = 4
#: After so many steps under a plan their median is sure enough to say that machine or network have changed since it was
#: judged: they take longer by more than a surprise.
SURE_AFTER: Final = 100
#: Gradients change: what levels lose is looked at again after so many steps, and then every time there are twice as
#: many.
LOOK_AGAIN: Final = 1000


class Act(enum.Enum):
    """What is to be done about a job's plans."""

    STAY = enum.auto()
    #: the newest plan has been judged, and is good
    KEEP = enum.auto()
    PLAN = enum.auto()
    #: as PLAN, but for the family that is to be measured
    MEASURE = enum.auto()
    TAKE_BACK = enum.auto()


def by_hand(standing: Standing) -> Standing:
    """Somebody else gave the job rules, which are not to be planned away."""
    return Standing(STATIC, standing.quality, asked=standing.asked, chosen=standing.chosen, said=standing.said)


def noticed(standing: Standing, version: int, rules: Rules, planned: bool = False, asked_for: bool = False) -> Standing:
    """What is known when ``version``, with ``rules``, is the job's newest plan (0: what it began or was resumed with).
    Rules no planner made (``planned``) and that were not there, nor being prepared, when this one began or was given
    the plans, or were ``asked_for`` since, are somebody's who wants them: an operator's, at whatever node, or an
    audit's."""
    if standing.mode == STATIC:
        return standing
    if rules == standing.asked and planned:
        return replace(
            standing, rules=rules, asked=None, plan=version, stayed=False, running=standing.asked_as,
            before=standing.asked_before, asked_as="", asked_before=None, mine=True,
        )  # fmt: skip
    there = standing.said is not None and version <= standing.said.since
    if rules == standing.rules:
        # A change of controller is another version with the same rules, whose they were. Somebody who gives those of
        # the planner's plan wants them to stay.
        given = (standing.mine or asked_for) and version != standing.plan and not planned and not there
        return by_hand(standing) if given else replace(standing, plan=version, mine=planned)
    if planned or not version or there:
        # Of a planner at a node that is gone, or a life whose memory is: nothing is known of how they came about.
        return Standing(
            standing.mode, standing.quality, rules, standing.asked, plan=version, chosen=standing.chosen, mine=planned,
            said=standing.said,
        )  # fmt: skip
    return by_hand(standing)


def next_act(
    standing: Standing, domain: int, seen: Profile, settled: int = 0, late_after: int = 0, why_not: str = ""
) -> tuple[Act, str]:
    """(what to do, why), from what is measured now of the job's model, which has made so many steps (``settled``);
    late_after: see `families.first_step`. why_not: see `in_force.barred`."""
    if standing.profile is None:
        return Act.PLAN, "the first plan"
    if domain != standing.domain:
        return Act.PLAN, "another model is the largest"
    if why_not:
        return Act.PLAN, why_not
    # Steps over another network say nothing of which of two plans is the better one.
    if standing.before is not None and not other_network(standing, seen):
        return _judged(standing, standing.before, seen)
    if (change := drift(standing.profile, seen)) > DRIFT:
        how = f"has drifted by {change:.0%}"
        if change == math.inf:
            how = "cannot be compared with what the plan was made for"
        return Act.PLAN, f"what was measured {how}"
    if seen.tolerant and not standing.profile.tolerant:
        return Act.PLAN, "the optimizer is known to stand late gradients now"
    if _unnoted(standing, step_under(seen, standing.plan)):
        return Act.KEEP, f"enough steps under plan {standing.plan}"
    if on_trial(standing):
        return Act.STAY, ""
    if (longer := departed(standing, seen)) > SURPRISE:
        return Act.PLAN, f"steps under plan {standing.plan} take {longer:.0%} longer than when it was judged"
    for new in standing.took[standing.considered :]:
        lost = beaten(standing.took, standing.family, seen.tolerant)
        if lost or _was_tried(standing, new.family) or _may_be_beaten(standing):
            return Act.PLAN, f"{new.family} took {new.seconds:.3g} s a step, others may take less"
        if new.seconds > new.expected * (1 + SURPRISE):
            # Another family may now be the one to choose. Each is tried once, so this comes to an end.
            return Act.PLAN, f"{new.family} took {new.seconds:.3g} s a step, {new.expected:.3g} s were expected"
    for codecs, first in late_steps(late_after, seen.tolerant):
        if standing.at < first <= settled:
            return Act.PLAN, f"{codecs} in question from step {first} on"
    if other := in_turn(standing):
        return Act.MEASURE, f"{other} is measured beside {standing.family}"
    if seen.errors and settled >= _look_again(standing):
        return Act.PLAN, f"gradients may lose more or less than {settled - standing.at} steps ago"
    return Act.STAY, ""


def _look_again(standing: Standing) -> int:
    """The step at which what levels lose is looked at again."""
    return max(2 * standing.at, standing.at + LOOK_AGAIN)


def on_trial(standing: Standing) -> bool:
    """Whether steps of the plan in force are counted, to be judged or noted."""
    took = known(standing.took, standing.family)
    return standing.before is not None or (took is not None and not took.under(standing.plan))


def in_turn(standing: Standing) -> str:
    """The family that is to be put in force to be measured beside the one that is; empty if there is none."""
    if standing.proposal is None or on_trial(standing):
        return ""
    took, family, newest = standing.took, standing.family, standing.proposal
    done = {*decided(standing.in_turn, took, family, newest.tolerant), *standing.refused}
    return next_in_turn(newest.considered, family, took, done)


def _unnoted(standing: Standing, after: StepTime | None) -> bool:
    """Whether enough steps of what the planner chose were measured, and what they took has not been noted, or was
    before another plan was in force meanwhile. Of dense steps that stayed, too: others may be better than predicted."""
    if after is None or after.steps < JUDGED_AFTER or not standing.family:
        return False
    took = known(standing.took, standing.family)
    return took is None or not took.under(standing.plan)


def judged(standing: Standing, seen: Profile) -> Standing:
    """The plan in force has been judged, and is good: what a step under it took is remembered, what one under the plan
    before took just before it, and what both say of the steps that others took."""
    step, family, before = step_under(seen, standing.plan), standing.family, standing.before
    taken_back = tuple(rules for rules in standing.taken_back if rules != standing.rules)
    done = replace(standing, before=None, taken_back=taken_back)
    if step is None or not family:
        return done
    took, considered = standing.took, {t.family for t in standing.took[: standing.considered]}
    if before is not None and (same := known(took, before.family)) is not None and same.had(before.rules):
        took = told(took, before.family, before.step)
        # (Older daemons kept no rules.)
        took = tuple(replace(t, rules=before.rules) if t.family == before.family else t for t in took)
    if before is not None and before.dense and known(took, DENSE) is None:
        took = (Took(DENSE, before.step.seconds, before.step.seconds, before.step.plan), *took)
        considered |= {DENSE}
    mine = known(took, family)
    if mine is not None and before is None and mine.runs < OFTEN and abs(moved(took, family, step) - 1.0) > margin(0.0):
        # What was slower than this was so on another machine, as it were.
        done = replace(done, taken_back=())
    newest = standing.proposal
    expected = newest.hoped if newest is not None and newest.family == family and standing.holds else step.seconds
    took = noted(took, family, step, expected, before is not None, standing.rules)
    news = next(i for i, t in enumerate(took) if t.family == family or t.family not in considered)
    return replace(done, took=took, considered=news)


def learned(standing: Standing, seen: Profile) -> dict[str, Any]:
    """What changes of a standing whose plan turns out slower than what it replaced: what is known of steps. After a
    turn the proposal that was in force before is the newest again: nothing has changed that it was made for."""
    done, before = judged(standing, seen), standing.before
    took = done.took
    if before is not None and before.family == standing.family:
        # Other rules of one family: what those took that come back counts.
        kept = noted(standing.took, before.family, before.step, before.step.seconds, True, before.rules)
        took = (*(t for t in took if t.family != before.family), kept[-1])
    found: dict[str, Any] = {"took": took, "considered": done.considered}
    if before is not None and before.proposal is not None and standing.family in standing.in_turn:
        # What has come into question since it was made is to be planned for.
        found |= {"proposal": before.proposal, "at": before.at}
    return found


def departed(standing: Standing, seen: Profile) -> float:
    """By which share steps under the plan in force take longer than when it was judged; 0 while that is not sure."""
    step, took = step_under(seen, standing.plan), known(standing.took, standing.family)
    if step is None or took is None or step.steps < SURE_AFTER:
        return 0.0
    return step.seconds / took.seconds - 1.0


def _was_tried(standing: Standing, family: str) -> bool:
    """Whether a family was in force to see how long its steps are: what is said of it and of others is of before."""
    newest, stays = standing.proposal, family == standing.family and family in standing.in_turn
    return newest is not None and newest.family == family and (newest.hope > 0 or stays)


def _may_be_beaten(standing: Standing) -> bool:
    """Whether a family of a kind that was never in force would be the fastest, if its steps were shorter than predicted
    by as much as predictions may be off."""
    proposal, tried = standing.proposal, {0, *(kind(t.family) for t in standing.took)}
    if proposal is None:
        return False
    untried = [c.expected for c in proposal.considered if c.expected and kind(c.spec) not in tried]
    least = min(t.seconds for t in standing.took)
    return max(min(untried, default=math.inf) * (1 - SURPRISE), proposal.compute) < least * (1 - margin(0.0))


def unlearned(standing: Standing, seen: Profile, settled: int = 0) -> dict[str, Any]:
    """What changes of a standing where what was learned of plans is of another time; nothing where it is not. A link
    that was a guess until now is the one that steps were measured over, but what is not in force may get other rules by
    what it is, and so it may by gradients that have changed (``settled``: steps that the model has made)."""
    if (profile := standing.profile) is not None:
        measured = profile if profile.link.samples else msgspec.structs.replace(profile, link=seen.link)
        if drift(measured, seen) <= DRIFT and departed(standing, seen) <= SURPRISE:
            first = seen.link.samples > 0 and not profile.link.samples
            again = bool(seen.errors) and settled >= _look_again(standing)
            return {"took": released(standing)} if first or again else {}
    return {"before": None, "taken_back": (), "took": (), "considered": 0, "refused": {}, "in_turn": ()}


def released(standing: Standing) -> tuple[Took, ...]:
    """What families took, those that are not in force free to get other rules: then what they take counts anew."""
    return tuple(t if t.family == standing.family else replace(t, rules=(), runs=0, alike=0) for t in standing.took)


def anew(standing: Standing, family: str) -> dict[str, Any]:
    """What changes of a standing where a plan of ``family`` came that is compared with nothing before it: neither is
    it with what other rules of its family took."""
    took = tuple(t for t in standing.took if t.family != family)
    return {"took": took, "considered": len(took)}


def stands(standing: Standing) -> str:
    """What the newest proposal came to, in one sentence; empty where there is none or operators make the plans."""
    if standing.mode == STATIC or standing.proposal is None:
        return ""
    which = f"plan {standing.plan} is in force" if standing.forecast_plan else "the plan in force stays"
    if not standing.forecast_plan and standing.proposed in standing.taken_back:
        return f"{which}: {standing.proposal.family} was tried, and gained too little"
    return f"{which}: {standing.proposal.reason}"


def other_network(standing: Standing, seen: Profile) -> bool:
    """Whether there are more or fewer nodes than what the newest proposal was made for, or the link is another one as
    far as that was measured."""
    before = standing.profile
    if before is None:
        return False
    return before.nodes != seen.nodes or (before.link.samples > 0 and link_drift(before, seen) > DRIFT)


def _judged(standing: Standing, replaced: Before, seen: Profile) -> tuple[Act, str]:
    before, after = replaced.step, step_under(seen, standing.plan)
    if after is None or after.steps < JUDGED_AFTER:
        return Act.STAY, ""
    took = f"plan {standing.plan} took {after.seconds:.3g} s a step, the one before it {before.seconds:.3g} s"
    if standing.family in standing.in_turn and replaced.family not in ("", standing.family):
        # Both were measured before, and what they took then counts as much.
        after_both = judged(standing, seen).took
        old, new = known(after_both, replaced.family), known(after_both, standing.family)
        if old is not None and new is not None:
            turns = "turn" if new.runs == 1 else "turns"
            took += f", {new.seconds:.3g} and {old.seconds:.3g} s in {new.runs} {turns}"
            unsure = varying(after_both, new.family, old.family, before, after)
            gain, least = gained(new, old), wanted(new.family, old.family, unsure, seen.tolerant)
            if gain <= least:
                return Act.TAKE_BACK, f"{took}, a gain of {gain:.1%} where {least:.1%} is wanted: that one is back"
            if not new.settled and standing.in_turn.count(standing.family) < until(replaced.family, standing.family):
                return Act.TAKE_BACK, f"{took}, and something else before: that one is back, until another turn"
            return Act.KEEP, took
    noise = max(before.noise, after.noise)
    # What came into force because it loses less may cost what it was let cost. (Older daemons kept no kind.)
    gave_up = max(replaced.kind, lossiest(replaced.rules))
    allowed = max(margin(noise), -margin(noise, gave_up, lossiest(standing.rules), seen.tolerant))
    if replaced.family == standing.family != "":
        allowed = 0.0  # nothing else would say which of two plans of one family is the shorter
    if after.seconds > before.seconds * (1 + allowed):
        return Act.TAKE_BACK, f"{took}: that one is back"
    return Act.KEEP, took


def switch(
    standing: Standing,
    proposal: Proposal,
    now: StepTime | None,
    in_force: Rules,
    made_by: Sequence[PlannedRule],
    measure: str = "",
    why_not: str = "",
) -> tuple[bool, str]:
    """(whether to put a proposal in force, why). in_force: the rules of the job's plan. ``now``: the measured step
    under them and what they leave to its models, if there is one; made_by: all of these. measure: the family that is to
    be measured, whatever is expected of it. why_not: see `in_force.barred`."""
    rules = rules_of(proposal)
    if rules == in_force:
        return False, f"the plan in force stays, it is the one to choose: {proposal.reason}"
    if proposal.overspent > 1 + OVERSPENT:
        # No step is so short that it pays for more error than was agreed on.
        return True, f"levels in force lose {proposal.overspent - 1:.0%} more than they may; {proposal.reason}"
    if why_not:
        return True, f"{why_not}; {proposal.reason}"
    if proposal.family == measure and now is not None:
        return True, proposal.reason
    if rules in standing.taken_back:
        return False, f"{proposal.reason}; but it was tried, and gained too little over the plan in force"
    if now is None and standing.profile is not None:
        # Any but the first would neither be known to gain nor be judged.
        return False, f"the plan in force stays, no step under it has been measured yet ({proposal.reason})"
    if now is None:
        return True, proposal.reason
    unsure = varying(standing.took, proposal.family, standing.family, now)
    good, reason = worth(now, proposal, unsure, lossiest(effective(made_by)))
    return good, proposal.reason if good else f"the plan in force stays: {reason} ({proposal.reason})"


def stays_dense(proposal: Proposal, in_force: Sequence[PlannedRule]) -> bool:
    """Whether a proposal is dense and so are the rules that steps are made by, those of no plan among them."""
    return proposal.family == DENSE and not lossy(effective(in_force))


def running(
    standing: Standing, proposal: Proposal, now: StepTime | None, in_force: Rules, made_by: Sequence[PlannedRule]
) -> str:
    """The family by which steps go on where a proposal does not come into force; empty if that is nobody's. now,
    in_force, made_by: as in `switch`. Dense steps count as what was chosen: others may be better than predicted."""
    if rules_of(proposal) == in_force:
        return proposal.family
    # Without a step, it is not known what all the rules are that steps are made by.
    dense = now is not None and not lossy(effective(made_by))
    return proposal.family if dense and proposal.family == DENSE else standing.family or (DENSE if dense else "")


def replaced(
    standing: Standing,
    rules: Rules,
    now: StepTime | None,
    proposal: Proposal,
    in_force: Sequence[PlannedRule],
    why_not: str = "",
) -> Before | None:
    """What the next plan is judged by; None where too few steps were measured to judge it, or it is not for speed.
    standing: as it was until now; in_force: all rules that steps were made by, those of no plan among them. why_not:
    see `in_force.barred`."""
    if now is None or now.steps < COMPARED or proposal.overspent > 1 + OVERSPENT or why_not:
        return None
    decide = effective(in_force)
    dense = not lossy(decide)
    made_by = standing.proposal if standing.holds else None
    family = standing.family or (DENSE if dense else "")
    return Before(rules, now, dense, lossiest(decide), family, made_by, standing.at)


def step_under(profile: Profile, plan: int) -> StepTime | None:
    """The measured step under a version of the plan."""
    return next((s for s in profile.steps if s.plan == plan), None)
