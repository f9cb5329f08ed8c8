"""What numbers in a trace stand for: noted while jobs are here, and each tensor once.

What may live here: tests of `gcserver/runtime/tracenames.py`. What may not: traces.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gcproto import wire
from gcproto.manifest import AddressSpace, Block, Section, TensorSpec
from gcserver.admin.spans import TracedBlock, TracedDomain, TracedName
from gcserver.runtime.tracenames import Names

JOB = b"j" * 16


class Counted(AddressSpace):
    """Counts what is laid out."""

    count = 0

    def append(self, section: Section) -> tuple[Block, ...]:
        Counted.count += 1
        return super().append(section)


def test_blocks_are_named_by_their_tensors_each_of_which_is_laid_out_once() -> None:
    """A job may declare thousands while it is traced."""
    Counted.count = 0
    sections: list[Section] = []
    config = SimpleNamespace(id=(JOB, 3), domain=3, label="calls", space=lambda lanes: Counted(2, lanes, 4 << 20))
    job: Any = SimpleNamespace(
        id=JOB, record=SimpleNamespace(label="gpt"), domains={3: SimpleNamespace(config=config, sections=sections)}
    )
    names = Names()
    names.note(job, 2)
    for i in range(20):
        sections.append(Section(i, (TensorSpec(f"t{i}", (10,), 0),)))
        names.note(job, 2)
    assert Counted.count == 20
    job.domains.clear()
    names.note(job, 2)
    blocks = tuple(TracedBlock(64 * i, f"t{i}") for i in range(20))
    assert names.domains() == (TracedDomain(JOB.hex(), 3, "gpt", "calls", blocks),)
    assert names.nodes(["a"]) == (TracedName(wire.node_id("a"), "a"),)
