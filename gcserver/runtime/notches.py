"""What the notches of a plan take on the wire, so that a ratio can pick one.

What may live here: bytes of a domain at each notch of a plan, remembered while neither changes. What may not: levels of
segments (`gcserver.core.plan`), picking (`steering.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import accumulate
from typing import TypeVar

import numpy as np

from gcserver.codecs import parse
from gcserver.core import resuming
from gcserver.core.control_domain import ControlDomain
from gcserver.core.events import DomainKey, Plan
from gcserver.core.job import Job
from gcserver.core.plan import Choice
from gcserver.planner import families
from gcserver.planner.controllers import Controlled
from gcserver.runtime.tensors import chosen

T = TypeVar("T")

log = logging.getLogger(__name__)

#: what was asked last of a domain: (plan version, sections), the answer
_Answers = dict[DomainKey, tuple[tuple[int, int], T]]


class Notches:
    """Of all domains of a daemon with so many lanes."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._known: _Answers[tuple[float, ...]] = {}
        self._moves: _Answers[bool] = {}

    def ratios(self, job: Job, domain: ControlDomain, version: int) -> tuple[float, ...]:
        """Bytes of a contribution by dense bytes at each notch of plan ``version``, descending, at most 1; () without
        notches. What codecs cannot say before they encode counts as much as it may take; where a codec fails to say
        anything, every notch counts as dense, so that nothing is moved."""
        if not domain.sections:
            return ()

        def found() -> tuple[float, ...]:
            plan = job.plan(domain, version)
            try:
                return _ratios(domain, plan, self._lanes)
            except Exception:  # a third party's codec must not stop a daemon whose step has settled
                log.exception("what the notches of plan %d take of %s cannot be said", version, domain.config.label)
                return (1.0,) * _notches(plan)

        return _remembered(self._known, domain, version, found)

    def still(self, job: Job, version: int) -> str:
        """The codecs of plan ``version`` where a controller can move none of them; empty where it can, or where nothing
        has been declared that a plan is for."""
        used: dict[str, None] = {}
        for domain in job.domains.values():
            if domain.lossless or not domain.sections:
                continue
            plan = job.plan(domain, version)
            if self._movable(domain, plan):
                return ""
            for _, choices in chosen(domain, plan, self._lanes):
                used.update(dict.fromkeys(c.codec.spec for c in choices))
        return ", ".join(used)

    def beyond(self, job: Job, wanted: Controlled, version: int) -> float:
        """The largest ratio that a controller may give a domain under plan ``version`` where that is above its
        ``k_max``, because the plan allows no smaller one; 0 where it is not."""
        most = dict(wanted.overrides).get("k_max", 1.0)
        domains = [d for d in job.domains.values() if not d.lossless and d.sections]
        highest = max(
            (wanted.config(self.ratios(job, d, version), least(job, d, version)).k_max for d in domains), default=0.0
        )
        return highest if highest > most else 0.0

    def moves(self, job: Job, domain: ControlDomain, version: int) -> bool:
        """Whether a controller can move anything of a domain under plan ``version``."""
        known = self._moves.get(domain.config.id)
        if known is not None and known[0][0] == version and known[1]:
            return True  # more sections change nothing of that
        return _remembered(self._moves, domain, version, lambda: self._movable(domain, job.plan(domain, version)))

    def _movable(self, domain: ControlDomain, plan: Plan) -> bool:
        notches = _notches(plan)
        # Where a plan has notches they alone are moved.
        return any(
            c.codec.tunable and (len(c.levels) > 1 if notches else not _as_it_is(c))
            for _, choices in chosen(domain, plan, self._lanes)
            for c in choices
        )

    def forget(self, job: bytes) -> None:
        self._known = {key: known for key, known in self._known.items() if key[0] != job}
        self._moves = {key: known for key, known in self._moves.items() if key[0] != job}


def _remembered(answers: _Answers[T], domain: ControlDomain, version: int, find: Callable[[], T]) -> T:
    """The answer for a domain under a plan, found once for as long as neither changes."""
    key, state = domain.config.id, (version, len(domain.sections))
    known = answers.get(key)
    if known is None or known[0] != state:
        known = answers[key] = (state, find())
    return known[1]


def _notches(plan: Plan) -> int:
    """How many a plan has. Where all that its levels say is that some tensors are sent as they are, which no controller
    changes, it has none."""
    said = any(rule.levels and rule.levels != (rule.codec.exact,) for rule in plan.rules)
    return max(len(rule.levels) for rule in plan.rules) if said else 0


def _as_it_is(choice: Choice) -> bool:
    """Whether all segments of a block are sent as they are."""
    return bool(choice.levels) and all(level == choice.codec.exact for row in choice.levels for level in row)


def least(job: Job, domain: ControlDomain, version: int) -> float:
    """The smallest ratio of a plan that a planner made, before or after a domain was resumed: its quality allows no
    smaller one. 0 for plans of operators, who say it to the controller, and where no codec has a ratio."""
    text = job.plans.get(version)
    if not (text.planned if text is not None else resuming.planned(domain.declared_as)):
        return 0.0
    rules = text.rules if text is not None else resuming.rules(domain.declared_as)
    specs = (families.parse(rule.spec) for rule in rules)
    return min((spec.level / 1e6 for spec in specs if spec.name in families.SPARSE and spec.level), default=0.0)


def _ratios(domain: ControlDomain, plan: Plan, lanes: int) -> tuple[float, ...]:
    notches = _notches(plan)
    if not notches:
        return ()
    sizes, dense = [0] * notches, 0
    for blocks, choices in chosen(domain, plan, lanes):
        for block, choice in zip(blocks, choices, strict=True):
            dense += block.nbytes
            bounds = np.array(block.bounds, np.int64)
            for notch in range(notches):
                sizes[notch] += block.nbytes if choice.codec == plan.dense else _bytes(choice, bounds, notch)
    shares = (size / dense if dense else 1.0 for size in sizes)
    return tuple(accumulate((min(share, 1.0) for share in shares), min))


def _bytes(choice: Choice, bounds: np.ndarray, notch: int) -> int:
    codec = parse(choice.codec.spec)
    if not choice.levels:
        return codec.needed(bounds, None)
    # Only codecs whose levels are ratios can be moved between notches; the others stay at the last.
    row = choice.levels[min(notch, len(choice.levels) - 1) if choice.codec.tunable else -1]
    return codec.needed(bounds, np.array(row, np.uint32))
