"""How planning for one job stands while the daemon lives: what is saved of it, what is told, when to look again.

What may live here: that record, and the pauses between two attempts. What may not: what is done about a job
(`planning.py`), its decisions (`gcserver.planner.course`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from gcserver.core.control_events import AnswerRequest
from gcserver.planner.auto import Proposal
from gcserver.planner.course import COMPARED, Standing
from gcserver.planner.live import LiveStep
from gcserver.planner.profile import Profile, StepTime

#: Seconds between two looks at whether a job's profile has drifted, and after a question that failed,
LOOK_EVERY: Final = 5.0
RETRY_AFTER: Final = 30.0
#: which doubles so often while nothing but failures comes: an attempt may take minutes of a core, where it fails for
#: want of time.
DOUBLINGS: Final = 6
#: A plan for a link that has changed waits so many seconds at most for steps that were made over it.
AFRESH: Final = 60.0


@dataclass(slots=True)
class Course:
    """Of one job. ``failed``: attempts in a row that came to nothing; ``task``: work under way."""

    standing: Standing
    says: str = ""
    looked: float = 0.0
    failed: int = 0
    task: asyncio.Task[AnswerRequest | None] | None = None
    #: since when steps are measured anew because the link is another one; 0: they are not
    afresh: float = 0.0
    #: what was predicted of which proposal over which profile, when somebody last wanted to see it
    drawn: tuple[Proposal, Profile, LiveStep] | None = None

    def later(self, now: float, overtaken: bool) -> None:
        """An attempt came to nothing; where something else happened to the job's plans (``overtaken``) the next comes
        soon."""
        if overtaken:
            self.looked = now + LOOK_EVERY
        else:
            self.looked = now + RETRY_AFTER * 2 ** min(self.failed, DOUBLINGS)
            self.failed += 1

    def begins_afresh(self, now: float, step: StepTime | None) -> tuple[bool, bool]:
        """The link has changed, ``step`` is what one under the plan in force takes: (whether steps have to be measured
        anew from now on, whether enough have been)."""
        if not self.afresh:
            self.afresh = now
            return True, False
        return False, (step is not None and step.steps >= COMPARED) or now > self.afresh + AFRESH


def heard(done: asyncio.Task[Any]) -> None:
    """What a task raised has been said already; asyncio is not to say it again."""
    if not done.cancelled():
        done.exception()
