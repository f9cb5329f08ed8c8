"""What members of a job that goes on without lost nodes tell each other of epochs, beside the record of the next one.

What may live here: such messages and what they are made of. What may not: the record itself (`messages.py`), what is
done about it (`gcserver.core.epochs`).
"""

from __future__ import annotations

import msgspec

from gcproto.packed import Message


class EpochStart(msgspec.Struct, frozen=True, array_like=True):
    """Where a domain stands as an epoch begins: its steps up to ``committed`` count with what the epoch before gave
    them, those up to ``settled`` do not count at all (skipped), all later ones run in the new epoch."""

    epoch: int
    domain: int
    committed: int
    settled: int


class StepReady(Message, frozen=True, tag="have"):
    """In a job that goes on without a lost node: the sender holds every aggregate of a domain up to ``step``.

    It is logged before it is said. A step commits once all members of the domain have said so.
    """

    job: bytes
    epoch: int
    domain: int
    step: int


class DomainState(msgspec.Struct, frozen=True, array_like=True):
    """How far a member is in a domain: the step it is ready up to, the last one begun, and the domain's nodes."""

    domain: int
    ready: int
    begun: int
    nodes: tuple[str, ...]


class Frozen(Message, frozen=True, tag="frozen"):
    """The sender will not become ready in ``epoch`` beyond what it says here: the next epoch can be proposed.

    ``lost``: those without whom it wants to go on.
    """

    job: bytes
    epoch: int
    domains: tuple[DomainState, ...]
    lost: tuple[str, ...] = ()
