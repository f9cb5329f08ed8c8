"""What the members of a job agree on before any gradient: who is in it, its process groups, its plans.

What may live here: the types that several kinds of messages are made of. What may not: what only one message has
(`messages.py`, `epoch_messages.py`), what is done about it (`gcserver.core`).
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from gcproto.packed import Message

#: of a plan: 0 is what a job begins with, and frames have 32 bits for it
Version = Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]
#: Ranks of a job: whatever is as long as a job has ranks is bounded by this before it is made.
MAX_RANKS: Final = 1 << 16
#: A name of a job or a node, or an address, has at most so many characters.
MAX_LABEL: Final = 1024
#: A model leaves out at most so many patterns of names, and is warm after at most so many steps.
MAX_EXCLUDE: Final = 1024
MAX_WARMUP: Final = 1_000_000
#: A plan that is resumed has at most so many rules: one for each tensor, and some.
MAX_RULES: Final = 1 << 21
#: So many steps a domain can have made before it is resumed: those that follow have room.
MAX_STEPS_BEFORE: Final = 1 << 61
#: Bytes that seeds are drawn from: a job's number, or its seed.
MAX_ORIGIN: Final = 16
#: of a node, drawn from its name
NodeNumber = Annotated[int, msgspec.Meta(ge=0)]
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]


class MemberInfo(msgspec.Struct, frozen=True, array_like=True):
    """One node of a job: name, advertised address, global ranks in ascending order, and the epoch in which it came in:
    the first one, or a later one in which it came back."""

    node: Label
    address: Label
    ranks: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RANKS)]
    since: int = 1


class Rule(msgspec.Struct, frozen=True, array_like=True):
    """Tensors whose name matches ``pattern`` (shell glob) use codec ``spec`` over ``scheme``; the last match wins.

    ``scheme``: "owner" (through each block's owner) or "all" (to every member at once); empty: the owner. ``levels``:
    the codec's level of the tensors' segments at each *notch* of the plan, from the most bytes to the fewest; a
    controller moves between notches, without one the last is in force. Empty: the level in ``spec``.
    """

    pattern: str
    spec: str
    scheme: str = ""
    levels: tuple[int, ...] = ()


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """What a domain goes on from that was saved in an earlier job (`gcclient.load_state_dict`).

    ``origin``: what stochastic codecs drew from there; ``steps``: how many the domain has made since; ``nodes``: the
    numbers (as `wire.node_id`) that its nodes drew with, in member order (empty: their own). ``rules``: what plan 0
    says here in place of a plan's text; ``controller`` steers it (empty: as the job says). ``default``: what was the
    job's default there (empty: what it is here), which comes before any plan's text. ``planned``: a planner made
    ``rules``, as a plan's text says it.
    """

    origin: Annotated[bytes, msgspec.Meta(max_length=MAX_ORIGIN)]
    steps: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEPS_BEFORE)]
    nodes: Annotated[tuple[NodeNumber, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    rules: Annotated[tuple[Rule, ...], msgspec.Meta(max_length=MAX_RULES)] = ()
    controller: Label = ""
    default: Annotated[tuple[Rule, ...], msgspec.Meta(max_length=MAX_RULES)] = ()
    planned: bool = False


class DeclareDomain(Message, frozen=True, tag="domain"):
    """A process group enters: its label and the global ranks in it.

    ``scoped``: a step is a whole backward or optimizer step, not one call. ``codec``: what its tensors use
    until a plan says otherwise (empty: the daemon's ``codec.default``). ``whole``: blocks are cut between tensors only,
    for codecs that take whole matrices. ``audit``: every so many steps all ranks audit one together (0: never).
    ``exclude``: globs of tensors that travel uncompressed whatever a plan says. ``warmup``: so many first steps are
    uncompressed as a whole. ``quality``: what automatic plans for it may lose (empty: what the job says). ``resumed``:
    what it goes on from that an earlier job saved.
    """

    label: str
    domain: int
    ranks: tuple[int, ...]
    scoped: bool = False
    codec: str = ""
    whole: bool = False
    audit: int = 0
    exclude: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_EXCLUDE)] = ()
    warmup: Annotated[int, msgspec.Meta(ge=0, le=MAX_WARMUP)] = 0
    quality: str = ""
    resumed: Resumed | None = None


class PlanText(Message, frozen=True, tag="plan"):
    """The first member's numbered plan; members compile it and answer PlanReady. ``controller``, ``planned``: see
    PlanRequest. ``given``: somebody asked for rules, though they may be those there were; else for a controller."""

    job: bytes
    version: Version
    request: int
    rules: tuple[Rule, ...]
    controller: str = ""
    planned: bool = False
    given: bool = False


class PlanMode(Message, frozen=True, tag="mode"):
    """What an operator said last of who makes the job's plans and what those may lose, passed on among its members.

    ``mode``, ``quality``: words of `modes.py`, the second empty where no operator said it. ``since``: rules of plans up
    to this number were there or on their way when the mode was said, and may be planned away. ``number``: counts what
    was said in the job; the higher (number, since) is the newer one.
    """

    job: bytes
    mode: Label
    quality: Label = ""
    since: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)] = 0
    number: Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)] = 1

    @property
    def age(self) -> tuple[int, int]:
        """The higher is the newer."""
        return self.number, self.since
