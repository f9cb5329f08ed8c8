"""Which codec and scheme a block uses under a plan.

What may live here: the rule "last match wins" and what can be compressed at all. What may not: how good a
plan is (`gcserver.planner`), when it takes effect (`steps.py`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from gcproto.dtypes import DType
from gcproto.manifest import Block, Section
from gcserver.core.events import CodecChoice, Plan, PlanRule

#: dtypes whose gradients may be compressed; everything else travels as it is
COMPRESSIBLE = frozenset({DType.F32, DType.F16, DType.BF16})

#: ids of fp16 and bf16
CASTS = frozenset({1, 2})

#: A dense block goes to everyone at once where so many members would send no more than so many bytes each: the way
#: through an owner takes two trips instead of one, and saves nothing worth it.
SMALL_MEMBERS = 8
SMALL_BYTES = 32 << 10


def choose(
    plan: Plan, section: Section, block: Block, min_compress_bytes: int, members: int
) -> tuple[CodecChoice, str]:
    """(codec, scheme) of ``block``: the last rule that matches the name of the tensor filling most of it.

    Sections under ``min_compress_bytes`` and dtypes that cannot be compressed go dense; a cast applies to fp32 only,
    since it would not shrink the others. What takes whole matrices goes dense where blocks may cut them
    (:func:`cut_matrix` finds that in time). What votes needs an owner to count.
    """
    rule = _rule(plan, section.tensors[block.tensor].name)
    if rule is None:
        return plan.dense, _scheme("owner", block, members)
    codec = rule.codec
    if not _compressible(section, min_compress_bytes) or (block.dtype is not DType.F32 and codec.id in CASTS):
        codec = plan.dense
    if codec.whole and not block.whole:
        codec = plan.dense
    if codec is plan.dense:
        return codec, _scheme(rule.scheme, block, members)
    return codec, "owner" if codec.votes or codec.rounds > 1 else rule.scheme


def cut_matrix(plan: Plan, section: Section, min_compress_bytes: int) -> tuple[str, CodecChoice] | None:
    """(tensor, codec) of the first tensor that the plan gives a codec of whole matrices; None if it gives it to none.

    Where blocks may cut tensors such a tensor would go dense, which nobody asked for.
    """
    if not _compressible(section, min_compress_bytes) or not any(r.codec.whole for r in plan.rules):
        return None
    for tensor in section.tensors:
        rule = _rule(plan, tensor.name)
        if rule is not None and rule.codec.whole:
            return tensor.name, rule.codec
    return None


def _rule(plan: Plan, name: str) -> PlanRule | None:
    return next((r for r in reversed(plan.rules) if fnmatchcase(name, r.pattern)), None)


def _compressible(section: Section, min_compress_bytes: int) -> bool:
    return section.nbytes >= min_compress_bytes and section.dtype in COMPRESSIBLE


def _scheme(wanted: str, block: Block, members: int) -> str:
    small = members <= SMALL_MEMBERS and block.nbytes * (members - 1) <= SMALL_BYTES
    return "all" if small else wanted
