"""Which codec and scheme a block uses under a plan, and why.

What may live here: the rule "last match wins", what can be compressed at all, who needs an owner, what makes a rule
unusable. What may not: how good a plan is (`gcserver.planner`), when it takes effect (`steps.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from gcproto.dtypes import DType
from gcproto.manifest import Block, Section
from gcproto.messages import Rule
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


class PlanError(ValueError):
    """A rule that no plan can hold. The text says what was expected and what came."""


class Choice(Record, frozen=True):
    """What a block uses. ``rule`` is the one that matched; ``reason`` says where its wish is not followed, else ""."""

    codec: CodecChoice
    scheme: str
    rule: PlanRule | None = None
    reason: str = ""


def compiled(rule: Rule, resolve: Callable[[str], CodecChoice], origin: str = "plan") -> PlanRule:
    """A rule as a plan holds it. Raises PlanError, or what ``resolve`` raises (a ValueError) for its codec."""
    if not rule.pattern:
        raise PlanError("pattern: expected a glob of tensor names such as 'layer.*', got an empty one")
    if rule.scheme and rule.scheme not in SCHEMES:
        raise PlanError(f"scheme: expected one of {', '.join(SCHEMES)}, or nothing for the owner; got {rule.scheme!r}")
    return PlanRule(rule.pattern, resolve(rule.spec), rule.scheme or OWNER, origin)


def unusable(rules: Iterable[Rule], resolve: Callable[[str], CodecChoice]) -> tuple[int, str] | None:
    """(index, why) of the first rule that cannot be run; None if all can."""
    for i, rule in enumerate(rules):
        try:
            compiled(rule, resolve)
        except ValueError as error:
            return i, f"rule {rule.pattern!r}: {error}"
    return None


def choose(
    plan: Plan, section: Section, block: Block, min_compress_bytes: int, members: int
) -> tuple[CodecChoice, str]:
    """(codec, scheme) of ``block``, as :func:`explain` finds them."""
    choice = explain(plan, section, block, min_compress_bytes, members)
    return choice.codec, choice.scheme


def explain(plan: Plan, section: Section, block: Block, min_compress_bytes: int, members: int) -> Choice:
    """What ``block`` uses: the last rule that matches the name of the tensor filling most of it, where it can.

    Groups under ``min_compress_bytes`` and dtypes that cannot be compressed go dense; a cast applies to fp32 only,
    since it would not shrink the others. What takes whole matrices goes dense where blocks may cut them
    (:func:`cut_matrix` finds that in time). What votes or takes two exchanges needs an owner.
    """
    rule = _rule(plan, section.tensors[block.tensor].name)
    if rule is None:
        codec, why, wanted = plan.dense, "no rule matches", OWNER
    else:
        why, wanted = _not_compressed(plan, rule.codec, section, block, min_compress_bytes), rule.scheme
        codec = plan.dense if why else rule.codec
    scheme, where = _scheme(plan, codec, wanted, block, members)
    return Choice(codec, scheme, rule, "; ".join(filter(None, (why, where))))


def cut_matrix(plan: Plan, section: Section, min_compress_bytes: int) -> tuple[str, CodecChoice] | None:
    """(tensor, codec) of the first tensor that the plan gives a codec of whole matrices; None if it gives it to none.

    Where blocks may cut tensors such a tensor would go dense, which nobody asked for.
    """
    if not any(r.codec.whole for r in plan.rules):
        return None
    for i, tensor in enumerate(section.tensors):
        rule = _rule(plan, tensor.name)
        if rule is not None and rule.codec.whole and not _incompressible(section, i, min_compress_bytes):
            return tensor.name, rule.codec
    return None


def _rule(plan: Plan, name: str) -> PlanRule | None:
    return next((r for r in reversed(plan.rules) if fnmatchcase(name, r.pattern)), None)


def _incompressible(section: Section, tensor: int, min_compress_bytes: int) -> str:
    """Why nothing of the group that this tensor is in is compressed; empty if it may be."""
    if section.dtype not in COMPRESSIBLE:
        label = section.dtype.label
        return f"{label} travels as it is" if label.startswith("float") else "integers travel as they are"
    return "below min_compress_bytes" if section.group_bytes(tensor) < min_compress_bytes else ""


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
    small = codec == plan.dense and members <= SMALL_MEMBERS and block.nbytes * (members - 1) <= SMALL_BYTES
    return (ALL, "small: to everyone at once") if small else (wanted, "")
