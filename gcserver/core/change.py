"""What a job knows of the epoch that comes after the one in force.

What may live here: the data. What may not: what is done about it (`epochs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcproto.epoch_messages import Frozen, StepReady
from gcproto.messages import EpochDecided, OfPlans
from gcserver.core.early_messages import EarlyMessages


@dataclass(slots=True)
class Change:
    """``lost``: members without whom this node wants to go on, and why; ``frozen``: it becomes ready no further."""

    lost: dict[str, str] = field(default_factory=dict)
    frozen: bool = False
    #: since when, on this life's clock
    since: float | None = None
    #: what members said as they froze in this epoch, this node too
    states: dict[str, Frozen] = field(default_factory=dict)
    #: the arbiter is being asked
    asked: bool = False
    silent: str = ""
    #: decided, and not in force yet: lanes have to report once more what this node was ready for
    pending: EpochDecided | None = None
    #: what members said in an epoch that is not in force here yet
    later: EarlyMessages[StepReady | Frozen | OfPlans] = field(default_factory=EarlyMessages)

    @property
    def missed(self) -> list[str]:
        """Members without whom this node, or one that said so as it froze, wants to go on."""
        return sorted({*self.lost, *(name for said in self.states.values() for name in said.lost)})
