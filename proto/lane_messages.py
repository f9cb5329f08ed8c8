"""Small messages between a worker and a lane: memory, and doorbells.

What may live here: typed messages. What may not: what a worker tells its supervisor (`messages.py`), how messages
become bytes (`packed.py`), gradients (they stay in arenas), sockets.
"""

from __future__ import annotations

from gcproto.messages import Fault
from gcproto.packed import Message


class Attach(Message, frozen=True, tag="attach"):
    """First message on a lane's socket."""

    job: bytes
    rank: int


class MapSection(Message, frozen=True, tag="map"):
    """Ask for the arena chunks of an agreed section; ``have`` chunks are mapped already."""

    domain: int
    index: int
    have: int


class Mapped(Message, frozen=True, tag="mapped"):
    """Sizes of the new chunks; their descriptors come with this message."""

    domain: int
    index: int
    first: int
    sizes: tuple[int, ...]


class Push(Message, frozen=True, tag="push"):
    """Doorbell: blocks ``keys`` of ``step`` are in the arena; ``close``: nothing more comes in this step.

    ``flags`` are wire flags (AVERAGE); ``grad_scale`` is the loss scale the gradients carry. Both are in the slots'
    headers as well; lanes read the scale there, where it outlives them.
    """

    domain: int
    step: int
    keys: tuple[int, ...]
    close: bool
    flags: int = 0
    grad_scale: float = 1.0


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


FromLaneWorker = Attach | MapSection | Push
ToLaneWorker = Mapped | Done | Fault
