"""What the numbers in a trace's spans stand for: nodes, process groups, the tensors in blocks.

What may live here: these names, noted while their jobs are here. What may not: spans, who records them (`traces.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gcproto import wire
from gcproto.manifest import AddressSpace
from gcserver.admin.spans import TracedBlock, TracedDomain, TracedName
from gcserver.core.events import DomainKey
from gcserver.core.job import Job


class Names:
    """The names of one trace."""

    def __init__(self) -> None:
        #: by process group its job's label and its own, and its layout as far as it was noted
        self._domains: dict[DomainKey, tuple[str, str, AddressSpace]] = {}

    def note(self, job: Job, lanes: int) -> None:
        """A job's process groups and blocks as they are now; ``lanes`` there are of this daemon.

        Asked for with every tensor that is declared, so only what is new is laid out.
        """
        for domain in job.domains.values():
            key = domain.config.id
            if key not in self._domains:
                self._domains[key] = job.record.label, domain.config.label, domain.config.space(lanes)
            _, _, space = self._domains[key]
            for section in domain.sections[len(space.sections) :]:
                space.append(section)

    def domains(self) -> tuple[TracedDomain, ...]:
        """All that were noted."""
        return tuple(
            TracedDomain(job.hex(), number, job_label, label, tuple(_blocks(space)))
            for (job, number), (job_label, label, space) in self._domains.items()
        )

    @staticmethod
    def nodes(names: Iterable[str]) -> tuple[TracedName, ...]:
        """These nodes, by the number that frames name them with."""
        return tuple(TracedName(wire.node_id(name), name) for name in names)


def _blocks(space: AddressSpace) -> Iterator[TracedBlock]:
    for section, blocks in zip(space.sections, space.blocks, strict=True):
        for block in blocks:
            yield TracedBlock(block.key, section.tensors[block.tensor].name)
