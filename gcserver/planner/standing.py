"""What is remembered of a job's plans: whose they are, what was proposed, what is in force and what it is judged by.

What may live here: that record, as it is saved and outlives restarts, and what follows from it alone. What may not:
what is done about it (`course.py`).
"""

from __future__ import annotations

import msgspec

from gcproto.messages import PlanMode, Rule
from gcserver.planner.auto import Proposal
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.turns import Took

Rules = tuple[Rule, ...]


class Before(msgspec.Struct, frozen=True):
    """What a plan replaced: rules, and the measured step under them. dense: nothing was compressed in it, nor by what
    the job's models were declared with, which rules do not say. kind: the lossiest of what compressed (`KINDS`).
    family: of the proposal that it was, `DENSE` where steps were dense without one, empty for anything else. proposal:
    that one, as far as steps were made by it; at: the model's steps when it was made."""

    rules: Rules
    step: StepTime
    dense: bool = False
    kind: int = 0
    family: str = ""
    proposal: Proposal | None = None
    at: int = 0


class Standing(msgspec.Struct, frozen=True):
    """What is to be known of a job's plans, also after a restart of the daemon.

    mode, quality: see `gcproto.modes`. rules: of the job's newest plan, as far as that is the planner's or was there
    when it began. asked: rules it has asked for and does not know yet what became of; asked_as, asked_before: what is
    then ``running`` and ``before``. domain, profile, proposal: the newest proposal, for which domain, of what. plan:
    the version of the job's newest plan, 0 while there is none. before: what that one replaced, until it has been
    judged. taken_back: rules that gained too little over those before them, refused: families that a member could not
    use, and what it said; not tried again until the profile drifts. took: what families took when they were in force,
    until it drifts, the newest last; considered: so many of these the newest proposal knew. in_turn: families that were
    put in force to be measured beside the best. chosen: the quality is an operator's, whose word comes first. at: steps
    the domain had made when the newest proposal was. stayed: that proposal is the dense steps that there were without
    any plan. running: the family of the planner's plan that is in force, which the newest proposal may only not have
    been worth to replace; empty if that is nobody's. mine: the job's newest plan is a planner's. said: what an operator
    said of the mode before all that, as every member knows it.
    """

    mode: str
    quality: str
    rules: Rules = ()
    asked: Rules | None = None
    domain: int = -1
    profile: Profile | None = None
    proposal: Proposal | None = None
    plan: int = 0
    before: Before | None = None
    taken_back: tuple[Rules, ...] = ()
    took: tuple[Took, ...] = ()
    considered: int = 0
    chosen: bool = False
    at: int = 0
    stayed: bool = False
    refused: dict[str, str] = {}
    in_turn: tuple[str, ...] = ()
    running: str = ""
    asked_as: str = ""
    asked_before: Before | None = None
    mine: bool = False
    said: PlanMode | None = None

    @property
    def proposed(self) -> Rules:
        """The newest proposal's rules; none without one."""
        return rules_of(self.proposal) if self.proposal is not None else ()

    @property
    def family(self) -> str:
        """By which steps are made, as far as the planner chose it; empty otherwise. (Older daemons kept no other than
        the newest proposal's.)"""
        return self.running or (self.proposal.family if self.proposal is not None and self.holds else "")

    @property
    def forecast_plan(self) -> int:
        """The version of the plan that the newest proposal is; 0 if it was only proposed."""
        return self.plan if self.proposal is not None and self.proposed == self.rules else 0

    @property
    def holds(self) -> bool:
        """Whether steps are made as the newest proposal says, by its plan or because it is dense as they were."""
        return self.proposal is not None and (self.stayed or self.proposed == self.rules)


def rules_of(proposal: Proposal) -> Rules:
    """A proposal's rules as a plan has them."""
    return tuple(Rule(r.pattern, r.spec, r.scheme, r.levels) for r in proposal.rules)
