"""The end of one domain's job on a lane, whatever ends it: memory that is short or damaged, a codec that raises.

What may live here: whose an exception is and what its job is told, and which domains ended here before the supervisor
closed them. What may not: what is short in words (`shortage.py`), which codec failed where (`codecfaults.py`), what a
job's end does on the other nodes (`gcserver.core`).

A lane that died of it would die of it again in its next life, while other jobs wait. So the job ends that needs what
cannot be had, and the lane goes on with the others. What is of no domain is the lane's own and ends it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

from gcproto import wire
from gcserver.core import effects as fx
from gcserver.core.events import DomainKey, DomainOpened
from gcserver.core.job_faults import AGAIN
from gcserver.runtime import shortage
from gcserver.runtime.blocks import DomainMemory
from gcserver.runtime.codecfaults import codec_fault
from gcserver.runtime.lanelink import LaneTrouble
from gcserver.runtime.statefiles import MemoryDamaged, MemoryShort

Report = fx.ReportFault | LaneTrouble


class Endings:
    """Domains of one lane that ended here. ``forget`` gives back what the lane has of a domain, ``tell`` is for the
    supervisor."""

    def __init__(
        self,
        memories: Mapping[DomainKey, DomainMemory],
        forget: Callable[[DomainKey], None],
        tell: Callable[..., None],
    ) -> None:
        self._memories, self._forget, self._tell = memories, forget, tell
        #: until the supervisor closes them too
        self.over: set[DomainKey] = set()

    def concern(self, what: Any) -> bool:
        """Whether this effect or message is of a domain that is over: it may meet memory that is not there."""
        return domain_of(what) in self.over

    def end(self, what: Any, error: Exception) -> DomainKey:
        """What carrying out an effect, or a message of the supervisor, raised: its job ends, and its domain here at
        once. Returns the domain; raises ``error`` where it is of no domain, or a defect of the daemon's own."""
        domain = domain_of(what)
        reports = reports_of(what, domain, error, self._memories) if domain is not None else ()
        if domain is None or not reports:
            raise error
        self._tell(*reports)
        self.over.add(domain)
        self._forget(domain)
        return domain

    def closed(self, domain: DomainKey) -> None:
        """The supervisor has closed it."""
        self._forget(domain)
        self.over.discard(domain)


def domain_of(what: Any) -> DomainKey | None:
    """The domain an effect or a message of the supervisor is for, if it is for one."""
    if isinstance(what, fx.Send):
        return (what.header.job, what.header.domain) if what.header.job != wire.NO_JOB else None
    if isinstance(what, DomainOpened):
        return what.config.id
    return getattr(what, "domain", None)


def reports_of(
    what: Any, domain: DomainKey, error: Exception, memories: Mapping[DomainKey, DomainMemory]
) -> tuple[Report, ...]:
    """What the supervisor is told of ``error``, in order; nothing where it is a defect of the daemon's own."""
    if isinstance(error, MemoryDamaged):
        # Served from such memory the job would not know what it gets.
        text = f"what an earlier life of this lane left is damaged: {error}"
        return (LaneTrouble(domain[0], "PeerLost", text, AGAIN),)
    if isinstance(error, MemoryShort | MemoryError):
        kind, advice = shortage.kind_of(error)
        return (LaneTrouble(domain[0], kind, shortage.text_of(error), advice),)
    fault = codec_fault(what, error, memories)
    if fault is None:
        return ()
    log = "".join(traceback.format_exception(error))
    return fault, LaneTrouble(b"", "Log", f"{fault.message}\n{log}")
