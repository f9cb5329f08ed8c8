"""How planning for one job stands while the daemon lives: what is saved of it, what is told, when to look again.

What may live here: that record, and the pauses between two attempts. What may not: what is done about a job
(`planning.py`), its decisions (`gcserver.planner.course`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from gcproto.packed import UNREADABLE
from gcserver.core import resuming
from gcserver.core.control_events import AnswerRequest
from gcserver.core.job import Job
from gcserver.core.plan import COMPRESSIBLE
from gcserver.planner.auto import Proposal
from gcserver.planner.course import COMPARED, stands
from gcserver.planner.errors_sparse import EXACT
from gcserver.planner.live import LiveStep
from gcserver.planner.profile import Profile, StepTime
from gcserver.planner.standing import Standing

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

#: Seconds between two looks at whether a job's profile has drifted, while a plan is tried, and after a question that
#: failed,
LOOK_EVERY: Final = 5.0
LOOK_SOON: Final = 1.0
RETRY_AFTER: Final = 30.0
#: which doubles so often while nothing but failures comes: an attempt may take minutes of a core, where it fails for
#: want of time.
DOUBLINGS: Final = 6
#: A plan for a network that has changed waits so many seconds for steps that were made over it, then for one.
AFRESH: Final = 60.0
#: The first plan waits so many seconds for a measurement of the link: on a slow one, where it is missed most, thirty
#: steps may take ten minutes.
LINK_SECONDS: Final = 30.0
#: Errors of gradients hold for so many steps, and until there are twice as many: plans that are tried one after the
#: other are made with the same ones, since a look takes seconds of a core that the steps need.
HOLD: Final = 50
_LOSSY: Final = frozenset(dtype.label for dtype in COMPRESSIBLE)


@dataclass(slots=True)
class Course:
    """Of one job. ``result``: what became of the last attempt, ``waits``: what the next one waits for or is at;
    ``failed``: attempts in a row that came to nothing; ``task``: work under way; ``looked_at``: the step at which
    gradients were last looked at, below 0 where they are to be before the next plan; ``changes``: how often somebody
    said who makes the plans, or what they may lose."""

    standing: Standing
    result: str = ""
    waits: str = ""
    looked: float = 0.0
    failed: int = 0
    looked_at: int = -1
    changes: int = 0
    #: how many large tensors the last look left unknown, where it told of none anew
    untold: int = 0
    task: asyncio.Task[AnswerRequest | None] | None = None
    #: since when steps are measured anew because the network is another one; 0: they are not
    afresh: float = 0.0
    #: since when the link's measurement is waited for; 0: it is not
    link_since: float = 0.0
    #: what was predicted of which proposal over which profile, when somebody last wanted to see it
    drawn: tuple[Proposal, Profile, LiveStep] | None = None

    @property
    def says(self) -> str:
        """How planning stands, in one sentence; empty where operators make the plans or nothing has happened."""
        return self.waits or self.result or stands(self.standing)

    @property
    def wanted(self) -> tuple[str, str, int]:
        """What work on a plan is for: it has come to nothing where this is another one meanwhile."""
        return self.standing.mode, self.standing.quality, self.changes

    def wait(self, what: str) -> None:
        """Nothing can be done before that; it is looked for at every tick."""
        self.waits, self.looked = what, 0.0

    def waits_for_link(self, now: float) -> bool:
        """Whether a measurement of the link is still worth waiting for."""
        self.link_since = self.link_since or now
        return now < self.link_since + LINK_SECONDS

    def heed(self, job: Job) -> None:
        """What an operator said last counts. It may have been said at a node that is lost, and be heard of only now;
        the plans whose rules were there when it was said grow by those that only bring another controller."""
        if outdated(self.standing, job):
            self.begin_anew()
            self.standing = begun(job)
        elif self.standing.said != job.said:
            self.standing = replace(self.standing, said=job.said)

    def forget(self) -> None:
        """What was said is of plans that are somebody else's now."""
        self.result = self.waits = ""

    def begin_anew(self) -> None:
        """Somebody wants it otherwise: what was tried and put off is tried at once."""
        self.forget()
        self.looked, self.failed, self.afresh, self.looked_at = 0.0, 0, 0.0, -1
        self.changes += 1

    def looks_at_gradients(self, seen: Profile, settled: int) -> bool:
        """Whether a plan at this step has to look at gradients first, since errors of large tensors are not known or
        are those of other times."""
        holds = self.looked_at >= 0 and settled < max(self.looked_at + HOLD, 2 * self.looked_at)
        return not holds or _unknown(seen) > self.untold

    def told(self, before: Profile, after: Profile, settled: int) -> None:
        """Gradients were looked at, at this step. What they did not tell once more (some are never finite) waits until
        all are looked at again."""
        left = _unknown(after)
        self.looked_at, self.untold = settled, left if left >= _unknown(before) else 0

    def later(self, now: float, overtaken: bool) -> None:
        """An attempt came to nothing; where something else happened to the job's plans (``overtaken``) the next comes
        soon."""
        if overtaken:
            self.looked = now + LOOK_EVERY
        else:
            self.looked = now + RETRY_AFTER * 2 ** min(self.failed, DOUBLINGS)
            self.failed += 1

    def begins_afresh(self, now: float, step: StepTime | None) -> tuple[bool, bool]:
        """The network has changed, ``step`` is what one under the plan in force takes: (whether steps have to be
        measured anew from now on, whether enough have been)."""
        if not self.afresh:
            self.afresh = now
            return True, False
        return False, step is not None and (step.steps >= COMPARED or now > self.afresh + AFRESH)


def _unknown(seen: Profile) -> int:
    """Of how many large tensors, of those that may be compressed, errors are not known."""
    known = {row.name for rows in seen.errors.values() for row in rows}
    return sum(t.name not in known for t in seen.tensors if t.elements >= EXACT and t.dtype in _LOSSY)


def begun(job: Job) -> Standing:
    """How planning for a job begins: as its record says it, which is what rank 0's worker wanted, else what the first
    node's configuration says; or as an operator has said since, at whichever node."""
    rules, said = resuming.base(job.domains), job.said
    if said is None:
        return Standing(job.record.mode, job.record.quality, rules)
    return Standing(said.mode, said.quality or job.record.quality, rules, chosen=said.quality != "", said=said)


def saved_or_begun(daemon: Supervisor, job: Job) -> Standing:
    """How planning for a job stood when it was saved, else as it begins: also where an operator has said otherwise
    since, when another node planned."""
    try:
        saved = daemon.store.planning(job.id)
        standing = msgspec.msgpack.decode(saved, type=Standing) if saved else begun(job)
    except OSError as error:
        daemon.warn_once(f"how planning stood cannot be read, it begins anew: {error}")
        return begun(job)
    except UNREADABLE:
        return begun(job)  # another release's, or damaged
    return begun(job) if outdated(standing, job) else standing


def outdated(standing: Standing, job: Job) -> bool:
    """Whether an operator has said otherwise, when another node planned."""
    said = standing.said
    return job.said is not None and (said is None or said.number != job.said.number)


def left(standing: Standing) -> str:
    """Which plan operators are left with who take over, in words."""
    if standing.asked is not None:
        return "the planner's newest one, which the members agree on right now, comes into force first"
    if standing.before is not None:
        return f"plan {standing.plan}, which was tried and is not judged yet, stays"
    return "the one in force stays"


def heard(done: asyncio.Task[Any]) -> None:
    """What a task raised has been said already; asyncio is not to say it again."""
    if not done.cancelled():
        done.exception()
