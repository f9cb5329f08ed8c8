"""Rules that a job's steps are made by: how lossy they are, and whether they may stay.

What may live here: what rules say for themselves. What may not: what is to be done about them (`course.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gcproto.messages import Rule
from gcserver.planner.auto import INTOLERANT
from gcserver.planner.auto_rules import PlannedRule
from gcserver.planner.families import DENSE, kind, least_level, parse, tolerated, too_lossy
from gcserver.planner.standing import Rules


def lossy(rules: Iterable[Rule | PlannedRule]) -> bool:
    """Whether rules compress anything; those of no plan do not."""
    return any(rule.spec != DENSE for rule in rules)


def lossiest(rules: Iterable[Rule | PlannedRule]) -> int:
    """The lossiest kind of codecs in a plan (`families.KINDS`)."""
    return max((kind(rule.spec) for rule in rules), default=0)


def effective(rules: Sequence[PlannedRule]) -> Sequence[PlannedRule]:
    """Of all rules of a plan, what a model was declared with among them, those that may decide: the last that matches
    does, and nothing before one for all tensors."""
    last = max((i for i, rule in enumerate(rules) if rule.pattern == "*"), default=0)
    return rules[last:]


def barred(in_force: Rules, quality: str, tolerant: bool, planned: bool = False) -> str:
    """Why the rules of a job's plan have to go, whatever that costs; empty if they may stay: sparsifiers, which
    ``quality`` does not take with its optimizer, and of a planner (``planned``) all that loses more than this quality
    lets it, levels of its tensors among that. What an operator chose otherwise stays until something is faster."""
    for rule in in_force:
        spec = parse(rule.spec)
        if not tolerated(spec, quality, tolerant):
            return f"sparsifiers have to go: {INTOLERANT}"
        if planned and (why := too_lossy(spec, quality)):
            return f"{spec.text} has to go: {why}"
        least = least_level(spec, quality)
        if planned and min(rule.levels, default=least) < least:
            return f"levels of {spec.text} have to go: quality {quality} takes {least} and more, got {min(rule.levels)}"
    return ""
