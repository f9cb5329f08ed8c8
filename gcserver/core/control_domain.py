"""A domain of a job as its node's control machine sees it.

What may live here: what is known of a domain and small questions about it. What may not: what the job does about it
(`declarations.py`, `settling.py`, `waiting.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from gcproto import wire
from gcproto.manifest import Section
from gcproto.messages import DeclareDomain
from gcserver.core.effects import ReportStep, ReportWaiting
from gcserver.core.events import DomainConfig

#: the codec that changes nothing
LOSSLESS = "none"


@dataclass(slots=True)
class ControlDomain:
    """A domain of a job. ``declared[i][rank]``: section i as local rank declared it; ``offers[i][node]``."""

    declared_as: DeclareDomain
    config: DomainConfig
    ranks: tuple[int, ...]
    sections: list[Section] = field(default_factory=list)
    declared: dict[int, dict[int, Section]] = field(default_factory=dict)
    offers: dict[int, dict[str, int]] = field(default_factory=dict)
    offered: set[int] = field(default_factory=set)
    #: the step a section was declared for, by local rank and by node
    declared_for: dict[int, dict[int, int]] = field(default_factory=dict)
    offered_for: dict[int, dict[str, int]] = field(default_factory=dict)
    settled: int = 0
    voids: list[int] = field(default_factory=list)
    switches: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    reports: dict[int, dict[int, ReportStep]] = field(default_factory=dict)
    closing: dict[int, dict[int, int]] = field(default_factory=dict)
    closed: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, ReportWaiting] = field(default_factory=dict)
    #: in a job that outlives nodes: every aggregate up to this step is here, and, by node, there
    ready: int = 0
    heard: dict[str, int] = field(default_factory=dict)
    #: (step that is ready here and waits for the others, since when)
    held: tuple[int, float] | None = None
    #: the newest step that a peer has closed and no rank of this node begun, and since when that is known
    behind: tuple[int, float] = (0, 0.0)
    #: since when a section that not all have declared yet is waited for
    declaring: dict[int, float] = field(default_factory=dict)

    @property
    def lossless(self) -> bool:
        """Declared lossless (broadcasts, plain collectives): stays so whatever a plan says."""
        return self.declared_as.codec == LOSSLESS

    @property
    def others(self) -> list[str]:
        """The other members' names."""
        return [m.name for i, m in enumerate(self.config.members) if i != self.config.me]

    @property
    def begun(self) -> int:
        """The last step that some lane is known to have begun."""
        return max(self.settled, self.ready, *self.reports, *(r.newest for r in self.waiting.values()), 0)

    def switch(self, step: int) -> tuple[int, int]:
        """(first step, version) of the plan in force in ``step``; where that is forgotten, of the oldest that is known:
        several steps may settle at once, and change plans, before anybody is told of the first."""
        return next((switch for switch in reversed(self.switches) if switch[0] <= step), self.switches[0])

    def own(self, index: int) -> Section | None:
        """Section ``index`` as it was declared here, agreed or not."""
        if index < len(self.sections):
            return self.sections[index]
        declared = self.declared.get(index)
        return next(iter(declared.values())) if declared else None

    def digest(self, section: Section) -> int:
        """What members compare: the section and everything about its domain."""
        return wire.digest(msgspec.msgpack.encode((self.declared_as, section)))

    def agreed(self, index: int, section: Section) -> None:
        """All members have declared the next section alike: what was said about it is over."""
        self.sections.append(section)
        self.declared.pop(index, None)
        self.offers.pop(index, None)
        self.declared_for.pop(index, None)
        self.offered_for.pop(index, None)
