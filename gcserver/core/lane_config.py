"""What a lane machine is told when it is made.

What may live here: such values and what follows from them alone. What may not: state.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcproto import messages, wire
from gcserver.core.link import DEFAULT_CREDIT


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """Who this lane is. Times in seconds; ``credit`` in bytes."""

    hello: messages.Hello
    incarnation: int
    credit: int = DEFAULT_CREDIT
    quiet_after: float = 3.0
    waiting_after: float = 1.0
    #: A frame for a domain nobody opened here is kept this long: it was acknowledged and is not sent again, so it
    #: outlives any lease within which its sender or our workers would be found lost.
    early_for: float = 600.0

    @property
    def node(self) -> int:
        return wire.node_id(self.hello.node)
