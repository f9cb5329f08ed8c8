"""A plan as rules: few patterns for many tensors, and what the rules of any plan come to on a job's blocks.

What may live here: patterns, their order, the way back from rules to options. What may not: why an option was chosen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from glob import escape
from typing import Final

import msgspec

from gcproto.patterns import Patterns, last_of_each
from gcserver.planner.families import DENSE, Spec, exact_level, parse
from gcserver.planner.live import OWNER, BlockOption, Live, cost_of
from gcserver.planner.payload import segment_bytes

#: Patterns that a plan has at most beside those that somebody gave; whatever others would be for is named instead.
#: Daemons try each for every tensor, and take no more than some (`gcserver.core.plan.MAX_GLOBS`).
MOST: Final = 256
_DIGITS = re.compile(r"\d+")


class PlannedRule(msgspec.Struct, frozen=True, array_like=True):
    """The fields of `gcproto.messages.Rule`: the last rule whose ``pattern`` matches a tensor's name holds.

    ``levels``: of the tensors' segments at each notch, most bytes first; empty: the level in ``spec``.
    """

    pattern: str
    spec: str
    scheme: str = OWNER
    levels: tuple[int, ...] = ()


class TensorOption(msgspec.Struct, frozen=True):
    """What a rule says of one tensor."""

    spec: str = DENSE
    scheme: str = OWNER
    levels: tuple[int, ...] = ()


def rules(
    names: Sequence[str], wanted: Mapping[str, TensorOption], exactly: Sequence[str] = ()
) -> tuple[PlannedRule, ...]:
    """Rules under which each tensor of ``wanted`` has what is wanted; what the other ``names`` get does not matter.

    "*" has what most want. After it come patterns with a star for every number, where several names of such a pattern
    want the same, and last single names, their glob characters escaped. One option for all is one rule. What no name of
    ``wanted`` says otherwise is dense where a glob of ``exactly`` matches it.
    """
    if not wanted:
        return (PlannedRule("*", DENSE),)
    # of options that equally many want, the first to come
    common = Counter(wanted.values()).most_common(1)[0][0]
    alike: dict[str, list[str]] = {}
    for name in names:
        if name in wanted:
            alike.setdefault(_starred(name), []).append(name)
    found = [_rule("*", common)]
    for pattern, held in alike.items():
        option, count = Counter(wanted[name] for name in held).most_common(1)[0]
        # (of names that are numbers alone the pattern would be "*" once more)
        if option != common and count > 1 and pattern != "*" and len(found) <= MOST:
            found.append(_rule(pattern, option))
    if any(rule.spec != DENSE for rule in found):
        found += [PlannedRule(glob, DENSE) for glob in exactly]
    # Whatever a pattern matches beside what it was made for is put right by name.
    index = _Index(found)
    named: dict[str, PlannedRule] = {}
    for name in names:
        if name in wanted and name not in named:
            rule = index.rule(name)
            assert rule is not None  # "*" is there
            if _rule("", wanted[name]) != msgspec.structs.replace(rule, pattern=""):
                named[name] = _rule(escape(name), wanted[name])
    # As members come to a plan: a planner knows its own by its rules.
    return last_of_each((*found, *named.values()))


def levels_in_force(names: Sequence[str], plan: Sequence[PlannedRule], spec: Spec) -> dict[str, int]:
    """The level of each tensor whose rule names a codec of this name, at the last notch; without levels the rule's own.
    Empty where no rule has levels."""
    index, found, given = _Index(plan), {}, False
    for name in names:
        rule = index.rule(name)
        own = parse(rule.spec) if rule is not None else None
        if rule is not None and own is not None and own.name == spec.name:
            found[name] = rule.levels[-1] if rule.levels else own.level
            given = given or bool(rule.levels)
    return found if given else {}


def levels_of(plan: Sequence[PlannedRule], names: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """The levels, at every notch, of the tensors whose rule has some; by index."""
    index = _Index(plan)
    found = ((t, index.rule(name)) for t, name in enumerate(names))
    return {t: rule.levels for t, rule in found if rule and rule.levels}


def sent_exactly(plan: Sequence[PlannedRule], names: Sequence[str]) -> bool:
    """Whether rules send all these tensors as they are, as far as rules say: dense, or at a level that does."""
    index = _Index(plan)
    for rule in map(index.rule, names):
        if rule is not None and rule.spec != DENSE and set(rule.levels) != {exact_level(parse(rule.spec))}:
            return False
    return True


def _rule(pattern: str, option: TensorOption) -> PlannedRule:
    return PlannedRule(pattern, option.spec, option.scheme, option.levels)


class _Index:
    """The rules of a plan, ready to be asked for many tensors: a plan may name thousands of them one by one."""

    def __init__(self, plan: Sequence[PlannedRule]) -> None:
        self._plan = plan
        self._patterns = Patterns(rule.pattern for rule in plan)

    def rule(self, name: str) -> PlannedRule | None:
        """The last rule whose pattern matches."""
        last = self._patterns.last(name)
        return self._plan[last] if last >= 0 else None


def applied(live: Live, plan: Sequence[PlannedRule], notch: int = -1) -> tuple[BlockOption, ...]:
    """What each block of a job uses under the rules of a plan, in address order, as the daemon finds it.

    notch: where rules have levels. A segment's level is that of its own tensor's rule where that names the block's
    codec; else it is sent as it is, as far as the codec can. Without a rule a block is dense.
    """
    tensors = live.profile.tensors
    index_of = _Index(plan)
    of = [index_of.rule(t.name) for t in tensors]
    options = []
    for index, block in enumerate(live.blocks):
        rule = of[block.lead]
        if rule is None or rule.spec == DENSE or live.usable(index, rule.spec):
            options.append(BlockOption(DENSE, rule.scheme or OWNER if rule else OWNER))
            continue
        spec, cost, nbytes = parse(rule.spec), cost_of(live.profile, rule.spec), 0.0
        for t, n in block.parts:
            own, level = of[t], exact_level(spec)
            if own is not None and parse(own.spec).name == spec.name:
                level = own.levels[notch] if own.levels else parse(own.spec).level
            nbytes += segment_bytes(spec, cost, tensors[t].shape, n, level, block.dtype.itemsize)
        options.append(BlockOption(rule.spec, rule.scheme or OWNER, nbytes))
    return tuple(options)


def _starred(name: str) -> str:
    """A pattern of a name with a star for every number in it."""
    return "*".join(escape(part) for part in _DIGITS.split(name))
