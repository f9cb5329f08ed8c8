"""What members of a job that goes on without lost nodes tell each other of epochs, beside the record of the next one.

What may live here: such messages and what they are made of, and what workers hear and say of it. What may not: the
record itself (`messages.py`), what is done about it (`gcserver.core.epochs`, `gcserver.core.admission`).
"""

from __future__ import annotations

import msgspec

from gcproto.agreed import DeclareDomain, MemberInfo, PlanMode, PlanText
from gcproto.manifest import Section
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


class Applicant(msgspec.Struct, frozen=True, array_like=True):
    """A node whose workers wait to be let into the job, and the nonce of their gathering (see JobJoin)."""

    member: MemberInfo
    nonce: int


class Frozen(Message, frozen=True, tag="frozen"):
    """The sender will not become ready in ``epoch`` beyond what it says here: the next epoch can be proposed.

    ``lost``: those without whom it wants to go on; ``applicants``: those it knows of who wait to be let in.
    """

    job: bytes
    epoch: int
    domains: tuple[DomainState, ...]
    lost: tuple[str, ...] = ()
    applicants: tuple[Applicant, ...] = ()


class DomainFacts(msgspec.Struct, frozen=True, array_like=True):
    """A domain as it is when somebody comes in: how it was declared, its agreed sections, the last step that is
    settled, and (first step, version) of the plans in force after that."""

    declared: DeclareDomain
    sections: tuple[Section, ...]
    settled: int
    switches: tuple[tuple[int, int], ...]


class JobState(Message, frozen=True, tag="state"):
    """To a node that comes in with ``epoch``: what a member knows of the job beside its record, which comes after this.

    ``known``: all domains that the member is in; ``domains``: those of them that the other one is in as well. ``said``:
    what an operator said of who makes its plans.
    """

    job: bytes
    epoch: int
    known: tuple[int, ...]
    domains: tuple[DomainFacts, ...]
    plans: tuple[PlanText, ...]
    proposal: int
    numbered: int
    said: PlanMode | None = None


class Admit(Message, frozen=True, tag="admit"):
    """From a worker: it is at the job's admission point ``number``, with no step open, and waits there until those who
    want to be let in are."""

    number: int


class NodesWait(Message, frozen=True, tag="knock"):
    """To a worker: these nodes want to be let in at the next admission point."""

    nodes: tuple[str, ...]
