"""Operators' requests for plans, made at this node: each is answered once.

What may live here: who asked for what, and what they are told. What may not: how members come to a plan
(`job_plans.py`), the operators' socket (`gcserver.admin`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcproto.messages import PlanRequest, PlanText
from gcserver.core.control_events import AnswerRequest


@dataclass(slots=True)
class PlanRequests:
    """The requests of one job that wait for an answer."""

    #: minus the wish's number, later the plan's version -> who asked
    asked: dict[int, int] = field(default_factory=dict)
    #: wishes that are in no plan yet, by number; a first member that is a new process hears them again
    wishes: dict[int, PlanRequest] = field(default_factory=dict)

    def ask(self, number: int, request: int) -> None:
        """``request`` waits for what becomes of wish ``number``."""
        self.asked[-number] = request

    def numbered(self, text: PlanText) -> None:
        """The first member made a plan of a wish."""
        self.wishes.pop(text.request, None)
        if (request := self.asked.pop(-text.request, None)) is not None:
            self.asked[text.version] = request

    def refused(self, version: int, error: str) -> list[AnswerRequest]:
        """A member cannot run the plan."""
        request = self.asked.pop(version, None)
        return [] if request is None else [AnswerRequest(request, error=error)]

    def in_force(self, plan: int, step: int) -> list[AnswerRequest]:
        """``plan`` is fixed from ``step`` on."""
        # Later plans hold the rules of those before them, unless one was asked to replace them: whoever asked for an
        # earlier one is told that it is not this one.
        out = []
        for version in sorted(v for v in self.asked if 0 < v <= plan):
            later = "" if version == plan else f"plan {plan}, made after plan {version}, "
            text = f"{later}takes effect at step {step} on every node"
            out.append(AnswerRequest(self.asked.pop(version), plan, step, text))
        return out

    def give_up(self, error: str) -> list[AnswerRequest]:
        """The job is over."""
        requests = list(self.asked.values())
        self.asked.clear()
        return [AnswerRequest(request, error=error) for request in requests]
