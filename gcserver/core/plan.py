"""Which codec and scheme a block uses under a plan, at which levels its segments, and why.

What may live here: the rule "last match wins", what can be compressed at all, who needs an owner, what makes a rule
unusable. What may not: how good a plan is (`gcserver.planner`), when it takes effect (`steps.py`), which of a plan's
notches is in force (`tuning.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from gcproto.dtypes import DType
from gcproto.manifest import MAX_NAME, Block, Section, tensors_inside
from gcproto.messages import Rule
from gcproto.patterns import Patterns, is_glob, unescaped
from gcproto.records import Record
from gcserver.core.events import CodecChoice, Plan, PlanRule

#: dtypes whose gradients may be compressed; everything else travels as it is
COMPRESSIBLE = frozenset({DType.F32, DType.F16, DType.BF16})

#: ids of fp16 and bf16
CASTS = frozenset({1, 2})

OWNER, ALL = "owner", "all"
SCHEMES = (OWNER, ALL)

#: A dense block goes to everyone at once where so many members would send no more than so many bytes each: the way
#: through an owner takes two trips instead of one, and saves nothing worth it.
SMALL_MEMBERS = 8
SMALL_BYTES = 32 << 10

#: Characters of a codec's spec.
MAX_SPEC = 1024
#: Of a plan's rules so many have patterns that are no plain names: each may have to be tried for every tensor, in loops
#: that must not wait. Names may be as many as there are tensors.
MAX_GLOBS = 1024
#: of a pattern in a complaint about its rule
SHOWN = 200


class PlanError(ValueError):
    """A rule that no plan can hold. The text says what was expected and what came."""


class Choice(Record, frozen=True):
    """What a block uses. ``rule`` is the one that matched; ``reason`` says where its wish is not followed, else "".

    ``levels``: at each notch of the plan the level of each segment; empty where all have the codec's own. ``grades``:
    what frames say at each notch (`tuning.py`).
    """

    codec: CodecChoice
    scheme: str
    rule: PlanRule | None = None
    reason: str = ""
    levels: tuple[tuple[int, ...], ...] = ()
    grades: tuple[int, ...] = ()


def compiled(rule: Rule, resolve: Callable[[str], CodecChoice], origin: str = "plan") -> PlanRule:
    """A rule as a plan holds it. Raises PlanError, or what ``resolve`` raises (a ValueError) for its codec."""
    if not rule.pattern:
        raise PlanError("pattern: expected a glob of tensor names such as 'layer.*', got an empty one")
    # What a glob or a spec is made of takes time that grows with the square of its length, in loops that must not wait.
    if len(unescaped(rule.pattern)) > MAX_NAME or len(rule.pattern) > 3 * MAX_NAME:
        raise PlanError(f"pattern: expected at most {MAX_NAME} characters, as names have, got {len(rule.pattern)}")
    if len(rule.spec) > MAX_SPEC:
        raise PlanError(f"codec: expected at most {MAX_SPEC} characters, got {len(rule.spec)}")
    if rule.scheme and rule.scheme not in SCHEMES:
        raise PlanError(f"scheme: expected one of {', '.join(SCHEMES)}, or nothing for the owner; got {rule.scheme!r}")
    codec = resolve(rule.spec)
    low, high = codec.levels
    if rule.levels and not high:
        raise PlanError(f"levels: expected none for {codec.spec}, which has no levels; got {list(rule.levels)}")
    if wrong := [level for level in rule.levels if not low <= level <= high]:
        raise PlanError(f"levels: expected within {low}..{high} for {codec.spec}; got {wrong[0]}")
    return PlanRule(rule.pattern, codec, rule.scheme or OWNER, origin, rule.levels)


def excluded(patterns: Iterable[str], resolve: Callable[[str], CodecChoice]) -> list[PlanRule]:
    """What keeps tensors uncompressed that a domain excludes; after all other rules. Raises PlanError."""
    return [compiled(Rule(pattern, "none"), resolve, "exclude") for pattern in patterns]


def warming(plan: Plan) -> Plan:
    """What a step of a domain's warm-up runs instead of ``plan``: everything as it is."""
    return Plan(plan.version, (PlanRule("*", plan.dense, OWNER, "warm-up"),), plan.dense)


def unusable(rules: Iterable[Rule], resolve: Callable[[str], CodecChoice]) -> tuple[int, str] | None:
    """(index, why) of the first rule that cannot be run, alone or beside those before it; None if all can."""
    graded: Rule | None = None
    globs = 0
    for i, rule in enumerate(rules):
        try:
            compiled(rule, resolve)
            globs += is_glob(rule.pattern)
            if globs > MAX_GLOBS:
                raise PlanError(
                    f"expected at most {MAX_GLOBS} rules of a plan with patterns, got more; name tensors, or put one "
                    "pattern in place of many (`--replace` drops the rules in force)"
                )
            if rule.levels:
                graded = graded or rule
                if len(rule.levels) != len(graded.levels):
                    raise PlanError(
                        f"levels: expected at {len(graded.levels)} notches, as rule {graded.pattern!r} has them; got "
                        f"{len(rule.levels)}"
                    )
        except ValueError as error:
            return i, f"rule {rule.pattern[:SHOWN]!r}: {error}"
    return None


def explain(plan: Plan, section: Section, block: Block, min_compress_bytes: int, members: int) -> Choice:
    """What ``block`` uses: the last rule that matches the name of the tensor filling most of it, where it can.

    Groups under ``min_compress_bytes`` and dtypes that cannot be compressed go dense; a cast applies to fp32 only,
    since it would not shrink the others. What takes whole matrices goes dense where blocks may cut them
    (:func:`cut_matrix` finds that in time). What votes or takes two exchanges needs an owner.

    Each segment follows the rule of its own tensor as far as the block's codec goes: at the levels of a rule for the
    same family, sent as it is under a rule for another, a dense one or none, where a level of the codec says so.
    """
    rule = _rule(plan, section.tensors[block.tensor].name)
    if rule is None:
        codec, why, wanted = plan.dense, "no rule matches", OWNER
    else:
        why, wanted = _not_compressed(plan, rule.codec, section, block, min_compress_bytes), rule.scheme
        codec = plan.dense if why else rule.codec
    scheme, where = _scheme(plan, codec, wanted, block, members)
    levels = _levels(plan, codec, section, block) if codec.levels[1] else ()
    grades = tuple(_grade(codec, row, block.bounds) for row in levels)
    return Choice(codec, scheme, rule, "; ".join(filter(None, (why, where))), levels, grades)


def _levels(plan: Plan, codec: CodecChoice, section: Section, block: Block) -> tuple[tuple[int, ...], ...]:
    """At each notch the levels of the block's segments; empty if all have the codec's own at all of them."""
    columns = [_segment(codec, _rule(plan, t.name)) for t in tensors_inside(section, block)]
    if all(column == (codec.own,) for column in columns):
        return ()
    rows = tuple(
        tuple(column[min(notch, len(column) - 1)] for column in columns) for notch in range(max(map(len, columns)))
    )
    if any(row != rows[0] for row in rows):
        return rows
    return () if all(level == codec.own for level in rows[0]) else rows[:1]


def _segment(codec: CodecChoice, rule: PlanRule | None) -> tuple[int, ...]:
    """The levels, one for all notches or one for each, of a segment whose own tensor has this rule."""
    if rule is None or rule.codec.id != codec.id:
        return (codec.exact or codec.own,)
    low, high = codec.levels
    # The rule may be for a codec that goes further (powersgd of a higher rank): as far as this block's goes.
    return tuple(min(max(level, low), high) for level in rule.levels or (rule.codec.own,))


def _grade(codec: CodecChoice, levels: tuple[int, ...], bounds: tuple[int, ...]) -> int:
    """What frames say of segments at these levels: their mean, weighted by elements, where levels are ratios."""
    if not codec.tunable:
        return codec.level
    total = sum(level * (b - a) for level, (a, b) in zip(levels, pairwise(bounds), strict=True))
    return max(codec.levels[0], total // bounds[-1])


def cut_matrix(
    plan: Plan, section: Section, min_compress_bytes: int, planned: bool = False
) -> tuple[str, CodecChoice] | None:
    """(tensor, codec) of the first tensor that the plan gives a codec of whole matrices; None if it gives it to none.

    Where blocks may cut tensors such a tensor would go dense, which nobody asked for. Nobody asked for the codec either
    where its rule is of a text that is ``planned``: these are left out.
    """
    if not any(r.codec.whole for r in plan.rules):
        return None
    for i, tensor in enumerate(section.tensors):
        rule = _rule(plan, tensor.name)
        if rule is None or not rule.codec.whole or (planned and rule.origin == "plan"):
            continue
        if not _incompressible(section, i, min_compress_bytes):
            return tensor.name, rule.codec
    return None


def _rule(plan: Plan, name: str) -> PlanRule | None:
    last = _index(_Rules(plan.rules)).last(name)
    return plan.rules[last] if last >= 0 else None


@dataclass(frozen=True, slots=True, eq=False)
class _Rules:
    """A plan's rules as a key: the same object, since comparing thousands of rules takes longer than using one."""

    rules: tuple[PlanRule, ...]

    def __hash__(self) -> int:
        return id(self.rules)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Rules) and other.rules is self.rules


@lru_cache(maxsize=16)
def _index(of: _Rules) -> Patterns:
    return Patterns(rule.pattern for rule in of.rules)


def _incompressible(section: Section, tensor: int, min_compress_bytes: int) -> str:
    """Why nothing of the group that this tensor is in is compressed; empty if it may be."""
    if section.dtype not in COMPRESSIBLE:
        label = section.dtype.label
        return f"{label} travels as it is" if label.startswith("float") else "integers travel as they are"
    return "" if section.group_reaches(tensor, min_compress_bytes) else "below min_compress_bytes"


def _not_compressed(plan: Plan, codec: CodecChoice, section: Section, block: Block, min_compress_bytes: int) -> str:
    """Why a block goes dense although its rule says ``codec``; empty if it does as the rule says."""
    # Compared by value: a lane has its plans from a message, where no two records are the same object.
    if codec == plan.dense:
        return ""
    if why := _incompressible(section, block.tensor, min_compress_bytes):
        return why
    if block.dtype is not DType.F32 and codec.id in CASTS:
        return f"a cast would not shrink {block.dtype.label}"
    return "matrices may be cut: dense" if codec.whole and not block.whole else ""


def _scheme(plan: Plan, codec: CodecChoice, wanted: str, block: Block, members: int) -> tuple[str, str]:
    """(scheme, why it is not the one that is wanted)."""
    if wanted == ALL:
        if codec.votes:
            return OWNER, "votes need an owner"
        return (OWNER, "two exchanges need an owner") if codec.rounds > 1 else (ALL, "")
    # Where there is nobody else, what goes to everyone would only be retained.
    few = 1 < members <= SMALL_MEMBERS
    small = codec == plan.dense and few and block.nbytes * (members - 1) <= SMALL_BYTES
    return (ALL, "small: to everyone at once") if small else (wanted, "")
