"""What a switch from one plan to another must bring: by the kinds of both, and by how sure it is what steps take.

What may live here: that share, and whether a proposal brings it. What may not: which families are compared (`auto.py`),
measurements of plans in turns (`turns.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gcserver.planner.families import GAINS, gain_wanted, kind
from gcserver.planner.profile import StepTime
from gcserver.values import human_duration

if TYPE_CHECKING:
    from gcserver.planner.auto import Proposal


def margin(noise: float, before: int = 0, then: int = 0, tolerant: bool = False) -> float:
    """The gain, as a share, that a switch must bring where steps vary by ``noise`` (standard deviation over mean), from
    one kind of codecs to another (`families.KINDS`), with an optimizer that stands late gradients or may not. Below 0
    it is what the way back may cost, from low rank and sparsifiers."""
    if then < before and GAINS[before] > GAINS[0]:
        return -max(gain_wanted(then, before, tolerant), 2.0 * noise)
    return max(gain_wanted(before, then, tolerant) if then > before else GAINS[0], 2.0 * noise)


def uncertainty(step: StepTime) -> float:
    """Standard deviation of a measured median over the median: of normal noise, 1.25 that of a step over the root of
    the steps."""
    return 1.25 * step.noise / math.sqrt(max(step.steps, 1))


def of_means(noise: float, *agreeing: int) -> float:
    """The same of means, of so many measurements each: the fewest count."""
    return noise / math.sqrt(max(1, min(agreeing)))


def worth(now: StepTime | float, proposal: Proposal, noise: float | None = None, before: int = 0) -> tuple[bool, str]:
    """(whether to switch, why) from a step that takes ``now``, measured or predicted, to what ``proposal`` expects.
    noise: standard deviation of what is compared, as a share (None: that of a measured ``now``). before: the kind of
    what is in force."""
    seconds = now.seconds if isinstance(now, StepTime) else now
    if noise is None:
        noise = uncertainty(now) if isinstance(now, StepTime) else 0.0
    if seconds <= 0:
        return False, "no step was measured yet"
    gain, wanted = 1.0 - proposal.hoped / seconds, margin(noise, before, kind(proposal.family), proposal.tolerant)
    if gain > wanted:
        change = f"{gain:.1%} less" if gain >= 0 else f"{-gain:.1%} more, but less is lost"
        return True, f"{human_duration(proposal.hoped)} a step instead of {human_duration(seconds)}: {change}"
    if gain < 0:
        return False, f"{human_duration(proposal.hoped)} a step is more than the {human_duration(seconds)} of now"
    return False, f"a gain of {gain:.1%} is not above the {wanted:.1%} that a switch must bring"
