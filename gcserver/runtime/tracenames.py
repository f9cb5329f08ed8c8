"""What the numbers in a trace's spans stand for: nodes, process groups, the tensors in blocks.

What may live here: these names, noted while their jobs are here. What may not: spans, who records them (`traces.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from gcproto import wire
from gcserver.admin.spans import TracedBlock, TracedDomain, TracedName
from gcserver.core.events import DomainKey
from gcserver.core.job import Job
from gcserver.runtime.tensors import space


class Names:
    """The names of one trace."""

    def __init__(self) -> None:
        self._domains: dict[DomainKey, TracedDomain] = {}

    def note(self, job: Job, lanes: int) -> None:
        """A job's process groups and blocks as they are now; ``lanes`` there are of this daemon."""
        for domain in job.domains.values():
            blocks = [
                TracedBlock(block.key, section.tensors[block.tensor].name)
                for section, laid_out in zip(domain.sections, space(domain, lanes).blocks, strict=True)
                for block in laid_out
            ]
            number, label = domain.config.domain, domain.config.label
            self._domains[domain.config.id] = TracedDomain(job.id.hex(), number, job.record.label, label, tuple(blocks))

    def domains(self) -> tuple[TracedDomain, ...]:
        """All that were noted."""
        return tuple(self._domains.values())

    @staticmethod
    def nodes(names: Iterable[str]) -> tuple[TracedName, ...]:
        """These nodes, by the number that frames name them with."""
        return tuple(TracedName(wire.node_id(name), name) for name in names)
