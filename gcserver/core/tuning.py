"""The levels a node encodes at: those of the plan, at the notch in force, or one that it is tuned to.

What may live here: from a block's choice and what was decided to the levels of its segments, and to the one level that
a frame's header says. What may not: which codec a block has (`plan.py`), when something is encoded (`encoding.py`), why
a node is tuned (`gcserver.planner`).

A frame has room for one level: the *grade* of a payload. At a notch of a plan it is the segments' mean, weighted by
their elements; a node tuned to a level says that level. More bytes mean a higher grade, so an owner encodes at the
highest of its contributors' grades, and finds the levels that belong to it here. Only codecs whose levels are ratios
have grades of their own (`CodecChoice.tunable`); all others run a plan's last notch, and their frames say the codec's
level.
"""

from __future__ import annotations

from gcserver.core.events import Decision
from gcserver.core.plan import Choice

#: (notch, level) that nobody has tuned: as the plan says
UNTUNED = (-1, 0)

#: (levels of the segments, empty for the codec's own everywhere; what the header says)
Levels = tuple[tuple[int, ...], int]


def decided(choice: Choice, tuned: tuple[int, int]) -> tuple[int, int]:
    """(notch, level) as a decision says it of a block, for a node tuned so: within what plan and codec have."""
    if not choice.codec.tunable:
        return UNTUNED
    notch, level = tuned
    if level > 0:
        low, high = choice.codec.levels
        return -1, min(max(level, low), high)
    last = len(choice.levels) - 1
    return (min(notch, last), 0) if notch >= 0 and last >= 0 else UNTUNED


def own(choice: Choice, decision: Decision, segments: int) -> Levels:
    """What this node encodes a block of so many segments at."""
    # What was logged is read back after a restart: never beyond what there is.
    notch, level = decided(choice, (decision.notch, decision.level))
    if level:
        return _tuned(choice, level, segments)
    if not choice.levels:
        return (), choice.codec.level
    return choice.levels[notch], choice.grades[notch]


def owners(choice: Choice, grade: int, segments: int) -> tuple[int, ...]:
    """The levels at which a block's owner encodes: those of the highest grade among its contributors'."""
    if not choice.codec.tunable:
        return choice.levels[-1] if choice.levels else ()
    if grade in choice.grades:
        # Of several notches with this grade any would do.
        return choice.levels[choice.grades.index(grade)]
    if not choice.levels and grade == choice.codec.level:
        return ()
    return _tuned(choice, grade, segments)[0]


def _tuned(choice: Choice, level: int, segments: int) -> Levels:
    """Every segment at one level; what the plan sends as it is stays so."""
    exact = choice.codec.exact
    rows = zip(*choice.levels, strict=True) if choice.levels else ((0,) for _ in range(segments))
    return tuple(exact if exact and all(x == exact for x in row) else level for row in rows), level
