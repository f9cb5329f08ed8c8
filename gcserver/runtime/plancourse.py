"""How planning for one job stands while the daemon lives: what is saved of it, what is told, when to look again.

What may live here: that record, and the pauses between two attempts. What may not: what is done about a job
(`planning.py`), its decisions (`gcserver.planner.course`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from gcserver.core.control_events import AnswerRequest
from gcserver.planner.course import Standing

#: Seconds between two looks at whether a job's profile has drifted, and after a question that failed,
LOOK_EVERY: Final = 5.0
RETRY_AFTER: Final = 30.0
#: which doubles so often while nothing but failures comes: an attempt may take minutes of a core, where it fails for
#: want of time.
DOUBLINGS: Final = 6


@dataclass(slots=True)
class Course:
    """Of one job. ``failed``: attempts in a row that came to nothing; ``task``: work under way."""

    standing: Standing
    says: str = ""
    looked: float = 0.0
    failed: int = 0
    task: asyncio.Task[AnswerRequest | None] | None = None

    def later(self, now: float, overtaken: bool) -> None:
        """An attempt came to nothing; where something else happened to the job's plans (``overtaken``) the next comes
        soon."""
        if overtaken:
            self.looked = now + LOOK_EVERY
        else:
            self.looked = now + RETRY_AFTER * 2 ** min(self.failed, DOUBLINGS)
            self.failed += 1
