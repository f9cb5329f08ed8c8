"""What the formula for memory says of jobs that run: for tests that compare it with what they take.

What may live here: from a job's saved memory to the parts of docs/memory.md. What may not: the formula
(`gcserver.runtime.memory`), measuring.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from gcproto.manifest import AddressSpace
from gcserver.core.control_domain import LOSSLESS
from gcserver.core.control_events import JobMemory
from gcserver.core.events import Plan, PlanRule
from gcserver.core.plan import explain
from gcserver.runtime.memory import Laid, Share, of_domain
from gcserver.runtime.memory_parts import Part
from gcserver.runtime.resolve import resolve


def expected(folder: Path, node: str, lanes: int = 1) -> list[Part]:
    """The parts of the job whose files are in ``folder``, on the node of this name, under its newest plan."""
    memory = msgspec.msgpack.decode((folder / "job.msgpack").read_bytes(), type=JobMemory)
    members = memory.record.members
    me = next(i for i, m in enumerate(members) if m.node == node)
    newest = max(memory.plans, key=lambda text: text.version, default=None)
    dense = resolve(LOSSLESS)
    parts = []
    for declared, sections in memory.domains:
        rules = [PlanRule(r.pattern, resolve(r.spec), r.scheme or "owner") for r in memory.record.rules]
        if declared.codec:
            rules.append(PlanRule("*", resolve(declared.codec)))
        if newest is not None and declared.codec != LOSSLESS:
            rules += [PlanRule(r.pattern, resolve(r.spec), r.scheme or "owner") for r in newest.rules]
        plan = Plan(0, tuple(rules), dense)
        space = AddressSpace(len(members), lanes, memory.record.partition_bytes, declared.whole)
        laid = []
        for section in sections:
            blocks = space.append(section)
            smallest = memory.record.min_compress_bytes
            laid.append(Laid(section, blocks, [explain(plan, section, b, smallest, len(members)) for b in blocks]))
        ranks = sum(r in declared.ranks for r in members[me].ranks)
        parts += of_domain(laid, Share(len(members), me, ranks), lanes)
    return parts
