"""A domain's tensors and blocks as operators see them: where they lie, which codec they use, what it costs.

What may live here: pure functions over a job's domain and a plan. What may not: asking lanes (`status.py`), which rule
a block follows (`gcserver.core.plan`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from gcproto.dtypes import DType
from gcproto.manifest import AddressSpace, Block, Section
from gcserver.admin.source import AdminError, ErrorKind, TensorStatus
from gcserver.core.control_domain import ControlDomain
from gcserver.core.events import Plan
from gcserver.core.job import Job
from gcserver.core.plan import Choice, explain, warming


class Facts(NamedTuple):
    """Of a block: payload bytes of the newest contribution, squared norms of residual and newest gradient."""

    nbytes: int
    residual: float
    gradient: float


#: (blocks, what each of them uses) of a section
Chosen = tuple[tuple[Block, ...], list[Choice]]


def in_force(job: Job, domain: ControlDomain) -> tuple[int, Plan]:
    """(first step, plan) of the next step to settle. AdminError where a codec of the job is gone."""
    first, version = domain.switch(domain.settled + 1)
    try:
        plan = job.plan(domain, version)
        return (1, warming(plan)) if domain.settled < domain.config.warmup else (first, plan)
    except ValueError as error:
        raise AdminError(ErrorKind.PRECONDITION, f"job {job.record.label!r} cannot run here: {error}", "job") from None


def space(domain: ControlDomain, lanes: int) -> AddressSpace:
    """The layout of the agreed sections."""
    c = domain.config
    laid_out = c.space(lanes)
    for section in domain.sections:
        laid_out.append(section)
    return laid_out


def chosen(domain: ControlDomain, plan: Plan, lanes: int) -> list[Chosen]:
    """What the blocks of each section use under ``plan``."""
    c = domain.config
    return [
        (blocks, [explain(plan, section, b, c.min_compress_bytes, len(c.members)) for b in blocks])
        for section, blocks in zip(domain.sections, space(domain, lanes).blocks, strict=True)
    ]


def holders(section: Section, blocks: Sequence[Block]) -> list[int]:
    """For each tensor the index of the block that holds most of it (the first of equals)."""
    out = []
    at = i = 0
    for tensor in section.tensors:
        end = at + tensor.elements
        while i < len(blocks) - 1 and blocks[i].start + blocks[i].elements <= at:
            i += 1
        best, most, j = i, -1, i
        while j < len(blocks) and blocks[j].start < end:
            overlap = min(end, blocks[j].start + blocks[j].elements) - max(at, blocks[j].start)
            if overlap > most:
                best, most = j, overlap
            j += 1
        out.append(best)
        at = end
    return out


def tensors(domain: ControlDomain, plan: Plan, lanes: int) -> list[TensorStatus]:
    """The tensors with the codec of the block that holds most of each, without facts."""
    out = []
    for section, (blocks, choices) in zip(domain.sections, chosen(domain, plan, lanes), strict=True):
        itemsize = section.dtype.itemsize
        address = blocks[0].key if blocks else 0
        for t, i in zip(section.tensors, holders(section, blocks), strict=True):
            codec = choices[i].codec.spec if choices else plan.dense.spec
            label, nbytes = DType(t.dtype).label, t.elements * itemsize
            out.append(TensorStatus(t.name, domain.config.label, label, t.shape, address, codec, nbytes))
            address += nbytes
    return out


def with_facts(t: TensorStatus, blocks: list[Block], facts: dict[int, Facts]) -> TensorStatus:
    """Share the facts of the blocks a tensor lies in by bytes; ``facts`` by the blocks' keys.

    ``blocks``: in address order.
    """
    wire_bytes = residual = gradient = 0.0
    end = t.address + t.bytes_raw
    first = bisect_right(blocks, t.address, key=lambda b: b.key) - 1
    for b in takewhile(lambda b: b.key < end, islice(blocks, max(first, 0), None)):
        overlap = min(end, b.key + b.nbytes) - max(t.address, b.key)
        if overlap > 0 and b.key in facts:
            share = overlap / b.nbytes
            known = facts[b.key]
            wire_bytes += known.nbytes * share
            residual += known.residual * share
            gradient += known.gradient * share
    return TensorStatus(
        t.name, t.domain, t.dtype, t.shape, t.address, t.codec, t.bytes_raw, round(wire_bytes), residual**0.5,
        gradient**0.5,
    )  # fmt: skip
