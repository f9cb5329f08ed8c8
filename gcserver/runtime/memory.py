"""What a job takes of a node's memory, counted from its layout: the formula of docs/memory.md.

What may live here: bytes of each part, shared and private, for blocks and what they use. What may not: taking memory
(`blocks.py`, `statefiles.py`), what is free (`room.py`), how it is shown (`gcserver.doctor`).

Shared memory is files: their sizes are counted as they are made, the heaps' from above, since what lies in them depends
on the order in which it is asked for. Private memory is counted from above: what a step may have under way at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gcproto.manifest import PAGE, AddressSpace, ArenaPlan, Block, Section, TensorSpec
from gcserver.codecs import Codec, parse
from gcserver.codecs.base import U32
from gcserver.codecs.tworounds import TwoRounds
from gcserver.core.events import CodecChoice, Plan, PlanRule
from gcserver.core.link import DEFAULT_CREDIT
from gcserver.core.plan import ALL, Choice, explain
from gcserver.runtime.blocks import align, segment_shapes, states_bytes
from gcserver.runtime.buffers import rounded
from gcserver.runtime.ledger import LEDGER_BYTES
from gcserver.runtime.memory_parts import PRIVATE, SHARED, Part
from gcserver.runtime.records import KEPT_HEAD, RECORD, STEP, STEP_RING
from gcserver.runtime.resolve import resolve
from gcserver.runtime.statefiles import MIN_CHUNK, OWN_CHUNK

#: A lane before it has a job, and the supervisor: interpreter, libraries, kernels. 98 and 58 MiB were measured.
LANE_BYTES: Final = 128 << 20
SUPERVISOR_BYTES: Final = 128 << 20
#: What a lane and the supervisor remember of a block in Python objects. 8.3 KiB were measured in the midst of a step.
BLOCK_BYTES: Final = 16 << 10
#: The largest matrix a model is taken to have, rows and columns.
MATRIX: Final = 4096


@dataclass(frozen=True, slots=True)
class Share:
    """Where a node stands in a domain: number ``me`` of ``members`` nodes, with ``local_ranks`` workers."""

    members: int
    me: int
    local_ranks: int
    credit: int = DEFAULT_CREDIT


@dataclass(frozen=True, slots=True)
class Laid:
    """A section, its blocks, and what each of them uses."""

    section: Section
    blocks: Sequence[Block]
    choices: Sequence[Choice]


def a_model(
    parameters: int, spec: str, members: int, lanes: int, partition_bytes: int, min_compress_bytes: int
) -> tuple[Laid, ...]:
    """A model of so many float32 parameters, all of which use one codec. Raises CodecError.

    It is one tensor; for a codec that takes matrices several, as large and as square as ``MATRIX`` allows.
    """
    choice = resolve(spec)
    shapes: list[tuple[int, ...]] = [] if choice.whole else [(parameters,)]
    left = parameters if choice.whole else 0
    while left:
        side = min(MATRIX, int(left**0.5))
        shapes.append((side, min(MATRIX, left // side)))
        left -= side * shapes[-1][1]
    section = Section(0, tuple(TensorSpec(f"model.{i}", shape, 0) for i, shape in enumerate(shapes)))
    blocks = AddressSpace(members, lanes, partition_bytes, choice.whole).append(section)
    plan = Plan(0, (PlanRule("*", choice),), resolve("none"))
    return (Laid(section, blocks, [explain(plan, section, b, min_compress_bytes, members) for b in blocks]),)


def of_domain(laid: Sequence[Laid], share: Share, lanes: int) -> list[Part]:
    """Everything one domain takes on one node, all lanes together."""
    gradients = sum(b.nbytes for x in laid for b in x.blocks)
    chunks = records = heap = 0
    contributions = owners = kept = 0
    for lane in range(lanes):
        arena = ArenaPlan(share.local_ranks)
        sizes: list[int] = []
        for x in laid:
            mine = [(b, c) for b, c in zip(x.blocks, x.choices, strict=True) if b.lane == lane]
            arena.append([b for b, _ in mine])
            records += _paged(len(mine) * RECORD.itemsize)
            for block, choice in mine:
                own = [states_of(choice.codec, x.section, block, False)]
                owned = [states_of(choice.codec, x.section, block, True)] if block.owner == share.me else []
                retained = [KEPT_HEAD + n for n in retained_of(choice, x.section, block, share.me)]
                contributions, owners, kept = contributions + sum(own), owners + sum(owned), kept + sum(retained)
                sizes += [size for size in (*own, *owned, *retained) if size]
        chunks += sum(arena.chunks)
        heap += heap_bytes(sizes)
    fixed = lanes * STEP_RING * STEP.itemsize + LEDGER_BYTES
    ranks = f"{share.local_ranks} local rank{'s' if share.local_ranks > 1 else ''}"
    return [
        Part(f"gradients of {ranks}", SHARED, gradients * share.local_ranks, True),
        Part("averages", SHARED, gradients, True),
        Part("slot headers and alignment", SHARED, chunks - gradients * (share.local_ranks + 1), True),
        Part("block records, steps, ledger", SHARED, records + fixed, True),
        Part("codec states of this node, two versions", SHARED, contributions),
        Part("codec states of the blocks it owns, two versions", SHARED, owners),
        Part("aggregates it keeps until the step is over", SHARED, kept),
        Part("what is left over in the heaps' files", SHARED, heap - contributions - owners - kept),
        *_private(laid, share, lanes),
    ]


def of_daemon(lanes: int) -> list[Part]:
    """What a daemon takes without any job."""
    text = f"{lanes} lane{'s' if lanes > 1 else ''}, before any job"
    return [Part(text, PRIVATE, lanes * LANE_BYTES), Part("supervisor, before any job", PRIVATE, SUPERVISOR_BYTES)]


def heap_bytes(sizes: Sequence[int]) -> int:
    """At most what the files of a heap take that hands out memory of these sizes, in any order (`statefiles.Heap`)."""
    small = sum(align(size) for size in sizes if size <= OWN_CHUNK)
    files = -(-small // (MIN_CHUNK - OWN_CHUNK))
    return files * MIN_CHUNK + sum(_paged(size) for size in sizes if size > OWN_CHUNK)


def _private(laid: Sequence[Laid], share: Share, lanes: int) -> list[Part]:
    """What lanes may have under way in one step: every block at once."""
    sums = own = aggregates = parked = scratch = 0
    for lane in range(lanes):
        theirs = largest = 0
        for x in laid:
            for block, choice in zip(x.blocks, x.choices, strict=True):
                if block.lane != lane:
                    continue
                everyone = choice.scheme == ALL
                owned = block.owner == share.me
                payload = max(_payloads(choice, x.section, block))
                scratch += _scratch(choice, x.section, block)
                if owned or everyone:
                    sums += rounded(4 * block.elements)
                    theirs, largest = theirs + payload, max(largest, payload)
                else:
                    aggregates += payload
                # A dense contribution of one rank is sent from the arena; what goes to everyone is retained.
                if not everyone and (choice.codec.id or share.local_ranks > 1):
                    own += rounded(payload)
        parked += (share.members - 1) * min(max(share.credit, share.credit // 2 + largest), theirs)
    count = sum(len(x.blocks) for x in laid)
    return [
        Part("sums of the blocks it owns", PRIVATE, sums),
        Part("contributions on their way to owners", PRIVATE, own),
        Part(f"contributions that wait for their turn, {share.members - 1} x credit", PRIVATE, parked),
        Part("aggregates on their way from owners", PRIVATE, aggregates),
        Part("scratch of codecs of two exchanges", PRIVATE, scratch),
        Part("bookkeeping of blocks, lanes and supervisor", PRIVATE, count * BLOCK_BYTES),
    ]


def states_of(choice: CodecChoice, section: Section, block: Block, owner: bool) -> int:
    """Bytes of both versions of what a codec keeps of a block at a contributor, or at the block's ``owner``."""
    return states_bytes(floats_of(choice, section, block, owner))


def floats_of(choice: CodecChoice, section: Section, block: Block, owner: bool) -> int:
    """float32 of one of these versions, the residual's place included; 0: the codec keeps nothing there."""
    if not (choice.owner_feedback if owner else choice.feedback):
        return 0
    codec = parse(choice.spec)
    return _state_floats(codec.at_owner() if owner else codec, section, block)


def _state_floats(codec: Codec, section: Section, block: Block) -> int:
    """float32 that ``codec`` keeps in one version of a block's states; 0: none.

    A codec without a residual keeps what it keeps behind the one of an earlier codec.
    """
    if isinstance(codec, TwoRounds):
        shapes = segment_shapes(section, block)
        floats = codec.state_floats(block.elements, len(shapes), shapes)
    else:
        floats = codec.state_floats(block.elements, len(block.bounds) - 1)
    return floats if not floats or codec.error_feedback else block.elements + floats


def retained_of(choice: Choice, section: Section, block: Block, me: int, steered: bool = True) -> tuple[int, ...]:
    """Bytes of the payloads that a block comes to retain at member ``me``, each in a place of its own: those of two
    steps in turn, or both aggregates of a round of two exchanges.

    ``steered``: whether something moves the job's levels, so that any notch may come to be run and not the last alone.
    """
    owned = block.owner == me and choice.codec.id != 0
    if choice.scheme != ALL and not owned:
        return ()
    payloads = _payloads(choice, section, block, choice.scheme != ALL, steered)
    return payloads if choice.codec.rounds > 1 else payloads * 2


def _payloads(
    choice: Choice, section: Section, block: Block, owner: bool = False, steered: bool = True
) -> tuple[int, ...]:
    """At most the bytes of a block's payload in each exchange of a round: of contributions, or as its ``owner`` encodes
    what they come to."""
    if not choice.codec.id:
        return (block.nbytes,)
    codec, levels = parse(choice.codec.spec), _notches(choice, steered)
    if isinstance(codec, TwoRounds):
        shapes = segment_shapes(section, block)
        # One without elements has a place all the same (`exchanges.py`).
        return tuple(max(4, *(codec.payload_bytes(stage, shapes, row) for row in levels)) for stage in (0, 1))
    codec, bounds = codec.at_owner() if owner else codec, np.array(block.bounds, np.int64)
    return (max(codec.needed(bounds, row) for row in levels),)


def _scratch(choice: Choice, section: Section, block: Block) -> int:
    """Bytes that a block needs between its two exchanges, and for a sum that is not sent as float32."""
    codec = parse(choice.codec.spec) if choice.codec.rounds > 1 else None
    if not isinstance(codec, TwoRounds):
        return 0
    shapes, (levels, *_) = segment_shapes(section, block), _notches(choice, False)
    work = rounded(4 * codec.work_floats(shapes, levels))
    if codec.plain:
        return work
    return work + rounded(4 * max(codec.payload_floats(stage, shapes, levels) for stage in (0, 1)))


def _notches(choice: Choice, steered: bool) -> list[U32 | None]:
    """The levels of a block's segments at all notches that may come to be run; None for the codec's own."""
    # What has no ratios runs the last notch whatever steers (`gcserver.core.tuning`).
    notches = choice.levels if steered and choice.codec.tunable else choice.levels[-1:]
    return [np.array(row, np.uint32) for row in notches] or [None]


def _paged(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
