"""A plan as rules: few patterns for many tensors, and what the rules of any plan come to on a job's blocks.

What may live here: patterns, their order, the way back from rules to options. What may not: why an option was chosen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape

import msgspec

from gcserver.planner.families import DENSE, exact_level, parse
from gcserver.planner.live import OWNER, BlockOption, Live, cost_of
from gcserver.planner.payload import segment_bytes

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


def rules(names: Sequence[str], wanted: Mapping[str, TensorOption]) -> tuple[PlannedRule, ...]:
    """Rules under which each tensor of ``wanted`` has what is wanted; what the other ``names`` get does not matter.

    "*" has what most want. After it come patterns with a star for every number, where several names of such a pattern
    want the same, and last single names, their glob characters escaped. One option for all is one rule.
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
        if option != common and count > 1:
            found.append(_rule(pattern, option))
    # Whatever a pattern matches beside what it was made for is put right by name.
    for name in names:
        if name in wanted and _rule("", wanted[name]) != msgspec.structs.replace(_match(found, name), pattern=""):
            found.append(_rule(escape(name), wanted[name]))
    return tuple(found)


def _rule(pattern: str, option: TensorOption) -> PlannedRule:
    return PlannedRule(pattern, option.spec, option.scheme, option.levels)


def _match(plan: Sequence[PlannedRule], name: str) -> PlannedRule:
    """The rule of a plan that begins with "*"."""
    return next(r for r in reversed(plan) if fnmatchcase(name, r.pattern))


def applied(live: Live, plan: Sequence[PlannedRule], notch: int = -1) -> tuple[BlockOption, ...]:
    """What each block of a job uses under the rules of a plan, in address order, as the daemon finds it.

    notch: where rules have levels. A segment's level is that of its own tensor's rule where that names the block's
    codec; else it is sent as it is, as far as the codec can. Without a rule a block is dense.
    """
    tensors = live.profile.tensors
    of = [next((r for r in reversed(plan) if fnmatchcase(t.name, r.pattern)), None) for t in tensors]
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
