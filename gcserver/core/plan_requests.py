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

    def lost(self, what: str) -> list[AnswerRequest]:
        """The first member is gone, which numbered the wishes. Whoever else has the text of a plan may prepare it
        further; nobody does so with a wish that no plan was made of."""
        yet = "it may come into force yet, `gcctl plan` shows whether it does"
        said = {key: f"{what} before plan {key} was in force: {yet}" for key in self.asked if key > 0}
        return [AnswerRequest(r, error=said.get(key, f"{what}; ask again")) for key, r in self._all()]

    def give_up(self, error: str) -> list[AnswerRequest]:
        """The job is over."""
        return [AnswerRequest(request, error=error) for _, request in self._all()]

    def _all(self) -> list[tuple[int, int]]:
        """(wish or plan, who asked) of all, which are asked no longer."""
        requests = list(self.asked.items())
        self.asked.clear()
        return requests
