"""Small messages between a worker and a lane: memory, and doorbells.

What may live here: typed messages. What may not: what a worker tells its supervisor (`messages.py`), how messages
become bytes (`packed.py`), gradients (they stay in arenas), sockets.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from gcproto.messages import Fault
from gcproto.packed import Message
from gcproto.states import AskStates, BlockStates, GiveStates, StatesKept

#: Most blocks that one doorbell can be about.
MAX_KEYS: Final = 1 << 20
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Attach(Message, frozen=True, tag="attach"):
    """First message on a lane's socket, and the only one of its kind on it. ``ticket``: see Registered."""

    job: bytes
    rank: int
    ticket: bytes = b""


class MapSection(Message, frozen=True, tag="map"):
    """Ask for the arena chunks of an agreed section; ``have`` chunks are mapped already."""

    domain: Count
    index: Count
    have: Count


class Mapped(Message, frozen=True, tag="mapped"):
    """Sizes of the new chunks; their descriptors come with this message."""

    domain: int
    index: int
    first: int
    sizes: tuple[int, ...]


class Push(Message, frozen=True, tag="push"):
    """Doorbell: blocks ``keys`` of ``step`` are in the arena; ``close``: nothing more comes in this step.

    ``flags`` are wire flags (AVERAGE), which are in the slots' headers as well. The loss scale that the gradients carry
    is there alone, where it outlives lanes.
    """

    domain: Count
    step: Count
    keys: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_KEYS)]
    close: bool
    flags: int = 0


class Done(Message, frozen=True, tag="done"):
    """Doorbell: these blocks of ``step`` are in the output slots; ``nonfinite``: so is a NaN.

    ``skipped``: the step was given up with a lost node, and nothing of it is in the slots. ``epoch``: the one whose
    members it was made with.
    """

    domain: int
    step: int
    keys: tuple[int, ...]
    nonfinite: bool = False
    skipped: bool = False
    epoch: int = 1


FromLaneWorker = Attach | MapSection | Push | AskStates | GiveStates
ToLaneWorker = Mapped | Done | BlockStates | StatesKept | Fault
