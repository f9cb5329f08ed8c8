"""What plans took, in terms of the machine of now, and which are to be measured in turns.

What may live here: what measured steps of one plan say of those of others, which family is measured once more. What may
not: when that is asked, what becomes of a job's plans (`course.py`), predictions (`live.py`).

Plans are tried one after the other, and a machine that others use, or whose network is theirs too, may be a tenth
slower by the next trial: the shorter step would be the luckier one. So a plan that is back is measured again (A B A),
what all others took is taken to have changed as it did, and what came close to the best, or should have been better, is
in force once more before it is given up (A B A B).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from gcproto.messages import Rule
from gcserver.planner.auto import TIE, Considered
from gcserver.planner.families import CASTS, DENSE, kind
from gcserver.planner.profile import StepTime
from gcserver.planner.worth import margin, of_means, uncertainty

#: Families whose steps were longer than those of the plan in force by less than this share are measured in turns.
CLOSE: Final = 0.10
#: So are, by this share, those that were expected, or hoped, to be shorter and were in force once: one busy moment
#: decides over no family, and so over no kind.
DOUBTED: Final = 0.20
#: Of those that were never in force, but are of the same kind, predictions say so much within their own error.
NEAR: Final = 0.05
#: A plan that is back is measured so often, and what was slower than it is in question again where the machine has
#: changed.
OFTEN: Final = 3
#: What is measured in turns with the plan in force is again unless it gains less than it must bring by more than this
#: share, until it was in force so often.
NARROW: Final = 0.03
UNTIL: Final = 4
#: Of one kind, where the shorter wins by however little, so often: what is within `NARROW` then is about as good.
UNTIL_ALIKE: Final = 2
#: Two measurements of a family that differ by more than this share are of machines that differ: another one decides.
CHANGED: Final = 0.10


class Took(msgspec.Struct, frozen=True):
    """What a step under a plan of the planner's really took, and what was expected of it. plan: the version it was last
    measured under, -1 where that is not known; runs: how often it was; rules: of these plans, as far as they are known
    and to be kept; alike: how many of the newest measurements say the same (0: all)."""

    family: str
    seconds: float
    expected: float
    plan: int = -1
    runs: int = 1
    rules: tuple[Rule, ...] = ()
    alike: int = 0

    @property
    def settled(self) -> bool:
        """Whether the newest measurement said what those before it had."""
        return self.runs == 1 or self.alike != 1

    @property
    def agreeing(self) -> int:
        """As how many measurements ``seconds`` counts."""
        return self.alike or self.runs

    def mean(self, seconds: float) -> float:
        """Of all measurements that are alike, with one more."""
        return (self.seconds * self.agreeing + seconds) / (self.agreeing + 1)

    def changed(self, times: float) -> Took:
        """On a machine on which all takes so many times as long."""
        return replace(self, seconds=self.seconds * times, expected=self.expected * times)

    def had(self, rules: tuple[Rule, ...]) -> bool:
        """Whether it was measured under these, as far as is known."""
        return self.rules in ((), rules)

    def under(self, plan: int) -> bool:
        """Whether that version is, as far as is known, what it was last measured under."""
        return self.plan in (-1, plan)


def known(took: Sequence[Took], family: str) -> Took | None:
    """What is known of a family."""
    return next((t for t in took if t.family == family), None)


def moved(took: Sequence[Took], family: str, step: StepTime) -> float:
    """How many times as long steps of ``family`` are now as when they were measured; 1 where that may be noise."""
    before = known(took, family)
    if before is None or before.seconds <= 0:
        return 1.0
    times = step.seconds / before.seconds
    # Both are medians, of about as many steps.
    return 1.0 if abs(times - 1.0) <= max(TIE, 2.0 * math.sqrt(2.0) * uncertainty(step)) else times


def told(took: tuple[Took, ...], family: str, step: StepTime) -> tuple[Took, ...]:
    """What families took, by a new measurement of one of them, which comes last: where its steps have changed, all
    others' have as much, and half as much those that were measured in between, which are those after it."""
    before, times = known(took, family), moved(took, family, step)
    if before is None:
        return took
    place, half = took.index(before), 2.0 * times / (1.0 + times)
    others = [t.changed(times if i < place else half) for i, t in enumerate(took) if i != place]
    mean = before.mean(step.seconds) if times == 1.0 else step.seconds
    return (*others, replace(before.changed(times), seconds=mean))


def noted(
    took: tuple[Took, ...], family: str, step: StepTime, expected: float, compared: bool, rules: tuple[Rule, ...] = ()
) -> tuple[Took, ...]:
    """With what a step under a plan of ``family`` took, which has these rules; the newest comes last. What it took
    under other rules does not count. compared: the plan before it was measured just before, so that this says nothing
    of others."""
    before = known(took, family)
    others = [t for t in took if t.family != family]
    if before is None or not before.had(rules):
        return (*others, Took(family, step.seconds, expected, step.plan, rules=rules))
    # What is off by so much was measured on another machine, as it were, or this is: the two make no mean.
    same = abs(step.seconds - before.seconds) <= CHANGED * before.seconds or before.seconds <= 0
    steady = same if compared else moved(took, family, step) == 1.0
    if not compared:
        *others, _ = told(took, family, step)
    seconds = before.mean(step.seconds) if steady else step.seconds
    # Steps that changed say how much the machine did, and nothing more of how they compare with others'.
    alike = before.agreeing + steady if same else 1
    return (*others, Took(family, seconds, expected, step.plan, before.runs + 1, rules, alike))


def beaten(took: Sequence[Took], family: str, tolerant: bool = False) -> bool:
    """Whether another family, as it was measured, gains so much over this one that a switch pays."""
    mine, others = known(took, family), [t for t in took if t.family != family]
    least = margin(0.0)
    return mine is not None and any(gained(t, mine) > wanted(t.family, family, 0.0, tolerant, least) for t in others)


def gained(new: Took, old: Took) -> float:
    """The share by which measured steps of ``new`` are shorter than those of ``old``; below 0 where they are longer."""
    return 1.0 - new.seconds / old.seconds if old.seconds > 0 else 0.0


def wanted(new: str, old: str, unsure: float = 0.0, tolerant: bool = False, alike: float = 0.0) -> float:
    """The share by which steps of a family must be shorter than those of another, by their kinds; below 0 what losing
    less may cost, and ``alike`` where they are of one kind. unsure: standard deviation of what both took, as a share;
    tolerant: see `worth.margin`."""
    then, before = kind(new), kind(old)
    return alike if then == before else margin(unsure, before, then, tolerant)


def varying(took: Sequence[Took], new: str, old: str, *steps: StepTime) -> float:
    """Standard deviation of what two families took, as a share, by the newest measurements (``steps``): the more of
    them a mean is of, the less."""
    both = (known(took, new), known(took, old))
    return of_means(max(map(uncertainty, steps)), *(t.agreeing if t is not None else 1 for t in both))


def undecided(took: Sequence[Took], family: str, other: str, tolerant: bool = False) -> bool:
    """Whether another turn of ``other`` may change which of both is to stay, ``family`` being in force."""
    mine, new = known(took, family), known(took, other)
    if mine is None or new is None:
        return False
    if not new.settled:
        return True  # the machine changed between the two, or since what was known was measured
    if new.runs >= until(family, other):
        return False
    # What gains more than its kind must bring, and is not in force, was kept out by steps that varied.
    return gained(new, mine) > wanted(other, family, 0.0, tolerant) - NARROW


def until(family: str, other: str) -> int:
    """How often a family is in force beside another one."""
    return UNTIL_ALIKE if kind(family) == kind(other) else UNTIL


def decided(in_turn: Sequence[str], took: Sequence[Took], family: str, tolerant: bool = False) -> set[str]:
    """Of the families that were in turn, one after the other, those that need no other turn beside ``family``."""
    # Rules that cannot be kept make each measurement of a family its first one: so turns are counted, too.
    return {f for f in in_turn if in_turn.count(f) >= until(family, f) or not undecided(took, family, f, tolerant)}


def next_in_turn(considered: Sequence[Considered], family: str, took: Sequence[Took], done: Collection[str]) -> str:
    """The family to be measured beside ``family``, which is in force; empty if there is none. considered: those of the
    newest proposal; done: those that are not to be.

    These are what was in force and took at most `CLOSE` longer, or `DOUBTED`, where it was in force once and expected
    to be shorter; and what was not, but is of a kind that was (casts differ by their kernels alone, which are
    measured), and is at most `NEAR` longer by what predictions of its kind are off: prices are not that exact.
    """
    expected = {c.spec: c.expected for c in considered if c.expected > 0}
    if (mine := known(took, family)) is None or family not in expected:
        return ""
    off: dict[int, list[float]] = {}
    for t in took:
        if t.family in expected and kind(t.family) not in (kind(DENSE), kind(CASTS[0])):
            off.setdefault(kind(t.family), []).append(t.seconds / expected[t.family])
    guesses = {s: seconds * statistics.mean(off[kind(s)]) for s, seconds in expected.items() if kind(s) in off}
    close = {s: seconds for s, seconds in guesses.items() if seconds < mine.seconds * (1.0 + NEAR)}
    close |= {t.family: t.seconds for t in took if t.family in expected}
    doubted = {t.family for t in took if t.runs == 1 and t.expected < mine.seconds}
    longest = {s: mine.seconds * (1.0 + (DOUBTED if s in doubted else CLOSE)) for s in close}
    left_out = {family, *done}
    possible = (s for s, seconds in close.items() if s not in left_out and seconds < longest[s])
    return min(possible, key=close.__getitem__, default="")
