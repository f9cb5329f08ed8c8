"""What a worker asks its daemon for a checkpoint, and what it brings back from one.

What may live here: these messages and their bounds. What may not: what a checkpoint holds (`gcclient.saved`), what a
lane does about them (`gcserver.runtime.checkpoints`).

States of a block (`docs/memory.md`): float32, the residual first, then what else the codec keeps. They cross in
pieces, a question at a time, so that nobody holds more than a piece for the other.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from gcproto.agreed import Resumed
from gcproto.packed import Message

#: float32 in one message: 1 MiB
PIECE: Final = 1 << 18
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
#: a digest of the codec that used the memory behind the residual last
Tag = Annotated[int, msgspec.Meta(ge=0)]
Floats = Annotated[bytes, msgspec.Meta(max_length=4 * PIECE)]


def most_floats(elements: int, segments: int) -> int:
    """The longest state that can be brought for a block: twice what gradcomm's own codecs keep of one."""
    return 4 * elements + 16 * segments + 64


class AskStanding(Message, frozen=True, tag="stand?"):
    """To the supervisor: how far a domain is, and what a later job needs to go on from there."""

    domain: Count


class Standing(Message, frozen=True, tag="stands"):
    """The answer: the last step settled here, and what `DeclareDomain` is to say; None where there is no such
    domain."""

    domain: int
    settled: int = 0
    resumed: Resumed | None = None


class AskStates(Message, frozen=True, tag="states?"):
    """To a lane: the settled states of a block, of the contribution or of the block's owner, from float ``first`` on.

    It is answered once ``step`` is settled on the lane.
    """

    domain: Count
    key: Count
    owner: bool
    first: Count
    step: Count


class BlockStates(Message, frozen=True, tag="states"):
    """The answer: ``data`` of ``floats`` float32 in all (0: there are none), and what they are.

    ``held``: the residual may be other than zeros.
    """

    domain: int
    key: int
    owner: bool
    first: int
    floats: int = 0
    tag: int = 0
    held: bool = False
    data: bytes = b""


class GiveStates(Message, frozen=True, tag="give"):
    """To a lane, before the first step and by a node's first rank: what a checkpoint has of a block's states.

    The same fields as :class:`BlockStates`. With its last piece they count.
    """

    domain: Count
    key: Count
    owner: bool
    first: Count
    floats: Count
    tag: Tag
    held: bool
    data: Floats


class StatesKept(Message, frozen=True, tag="kept"):
    """The answer: the piece from float ``first`` on is where it belongs."""

    domain: int
    key: int
    owner: bool
    first: int
