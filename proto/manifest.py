"""What a domain's parameters are called and where they live.

What may live here: tensor descriptions, sections (what is declared together), the flat address space,
its cut into blocks, owners and lanes, and the places of blocks in the arenas. Everything is a pure
function of what all nodes agreed on, so that workers, lanes and peers compute the same layout and no
layout ever crosses a wire. What may not: reading or writing memory.

A domain's address space only grows: each *section* (the parameters of a model, or one tensor given to
``push_pull``) is appended at the next free address once every member declared the same. Keys are byte
addresses of block starts, so they never depend on buckets, groups or the order of arrival.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, repeat
from typing import Final

import msgspec

from gcproto.dtypes import DType

#: Sections start at multiples of this, so that any dtype is aligned and no cache line is shared.
ADDRESS_ALIGN: Final = 64
PAGE: Final = 4096
MIN_BLOCK_BYTES: Final = 256 * 1024
MIN_PIPELINED_BYTES: Final = 2 << 20
MIN_CHUNK_BYTES: Final = 1 << 20
#: Sections and tensors a peer or a worker may announce, bounded before anything is allocated.
MAX_TENSORS: Final = 1 << 20
MAX_SECTION_ELEMENTS: Final = 1 << 40
#: The largest tensor of a domain whose tensors are never cut: it travels in one frame.
MAX_WHOLE_BYTES: Final = 1 << 31
MAX_NAME: Final = 4096
#: What no model's tensor is called: a worker's note, in a section of its own after the model's, of which gradients it
#: has (1.0 each). Dense like all float64.
USED: Final = "gradcomm.used"

LANE_HEADER_BYTES: Final = 64
RANK_HEADER_BYTES: Final = 64


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: its name, shape and dtype code (:class:`gcproto.dtypes.DType`)."""

    name: str
    shape: tuple[int, ...]
    dtype: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def describe(self) -> str:
        return f"{self.name!r} shape {list(self.shape)} dtype {DType(self.dtype).name}"


class Section(msgspec.Struct, frozen=True, array_like=True):
    """What is declared together: tensors of one dtype, in address order, averaged or summed alike.

    ``cuts``: the tensors (by index, rising) at which a group after the first begins; no block crosses one.
    """

    index: int
    tensors: tuple[TensorSpec, ...]
    cuts: tuple[int, ...] = ()

    @property
    def dtype(self) -> DType:
        return DType(self.tensors[0].dtype)

    @property
    def elements(self) -> int:
        return sum(t.elements for t in self.tensors)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def groups(self) -> Iterator[tuple[TensorSpec, ...]]:
        """The tensors of each group, in address order; without cuts all are one."""
        return (self.tensors[a:b] for a, b in pairwise((0, *self.cuts, len(self.tensors))))

    def group_reaches(self, tensor: int, nbytes: int) -> bool:
        """Whether the group that the tensor of this index is in has so many bytes.

        Looks at no more of it than that takes, at the tensor itself first: a group may have many thousands.
        """
        group = bisect_right(self.cuts, tensor)
        first = self.cuts[group - 1] if group else 0
        last = self.cuts[group] if group < len(self.cuts) else len(self.tensors)
        left = nbytes - self.tensors[tensor].elements * self.dtype.itemsize
        others = (i for i in range(first, last) if i != tensor)
        while left > 0 and (i := next(others, -1)) >= 0:
            left -= self.tensors[i].elements * self.dtype.itemsize
        return left <= 0


class ManifestError(ValueError):
    """A section that cannot be laid out, or two that should be equal and are not."""


def check_section(section: Section, whole: bool = False) -> None:
    """Raises :class:`ManifestError` for an empty, mixed or oversized section and for cuts that cut nothing.

    ``whole``: its tensors are never cut.
    """
    if not 0 < len(section.tensors) <= MAX_TENSORS:
        raise ManifestError(f"a section holds 1 to {MAX_TENSORS} tensors, got {len(section.tensors)}")
    if section.index < 0:
        raise ManifestError(f"sections start at 0, got {section.index}")
    for t in section.tensors:
        if len(t.name) > MAX_NAME:
            raise ManifestError(f"a tensor's name has at most {MAX_NAME} characters, got {len(t.name)}")
    dtypes = {t.dtype for t in section.tensors}
    if len(dtypes) != 1:
        names = sorted(str(d) for d in dtypes)
        raise ManifestError(f"a section holds tensors of one dtype, got codes {names}")
    if dtypes.pop() not in DType._value2member_map_:
        raise ManifestError(f"unknown dtype code {section.tensors[0].dtype}")
    if any(d < 0 for t in section.tensors for d in t.shape):
        raise ManifestError("a dimension is negative")
    if any(d > MAX_SECTION_ELEMENTS for t in section.tensors for d in t.shape):
        raise ManifestError(f"a dimension is at most {MAX_SECTION_ELEMENTS}")
    if (elements := section.elements) > MAX_SECTION_ELEMENTS:
        raise ManifestError(f"a section has at most {MAX_SECTION_ELEMENTS} elements, got {elements}")
    count = len(section.tensors)
    if any(a >= b for a, b in pairwise((0, *section.cuts, count))):
        raise ManifestError(
            f"cuts are the tensors at which groups begin: rising, within 1..{count - 1}, got {list(section.cuts[:8])}"
        )
    largest = max(section.tensors, key=lambda t: t.elements)
    if whole and (nbytes := largest.elements * section.dtype.itemsize) > MAX_WHOLE_BYTES:
        raise ManifestError(
            f"a tensor that is never cut has at most {MAX_WHOLE_BYTES} bytes, got {nbytes}: {largest.describe()}"
        )


def difference(mine: Section, theirs: Section) -> str:
    """One sentence that names the first tensor in which two declarations differ, with both values."""
    for i, (a, b) in enumerate(zip(mine.tensors, theirs.tensors, strict=False)):
        if a != b:
            what = "name or order" if a.name != b.name else "shape" if a.shape != b.shape else "dtype"
            return f"{what} of tensor {i} differs: {a.describe()} here, {b.describe()} there"
    if len(mine.tensors) != len(theirs.tensors):
        longer, where = (mine, "only here") if len(mine.tensors) > len(theirs.tensors) else (theirs, "only there")
        extra = longer.tensors[min(len(mine.tensors), len(theirs.tensors))]
        return f"{len(mine.tensors)} tensors here, {len(theirs.tensors)} there; {extra.describe()} is {where}"
    if odd := set(mine.cuts) ^ set(theirs.cuts):
        first = min(odd)
        where = "here and not there" if first in mine.cuts else "there and not here"
        return (
            f"groups differ ({len(mine.cuts) + 1} here, {len(theirs.cuts) + 1} there): tensor {first}, "
            f"{mine.tensors[first].describe()}, begins one {where}"
        )
    return "the declarations are equal"


@dataclass(frozen=True, slots=True)
class Block:
    """One partition of the address space: group ∩ block, since no block crosses the end of a group.

    ``key`` is its byte address, ``start`` the element offset inside its section, ``bounds`` the segment
    boundaries (element offsets from the block's start, first 0, last ``elements``), one segment per
    tensor that reaches into the block; ``tensor`` the index (in the section) of the tensor that holds
    most of it. ``owner`` is a member index, ``lane`` a lane index. ``whole``: its space never cuts a tensor.
    """

    key: int
    section: int
    start: int
    elements: int
    dtype: DType
    owner: int
    lane: int
    bounds: tuple[int, ...]
    tensor: int
    whole: bool = False

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


def tensors_inside(section: Section, block: Block) -> list[TensorSpec]:
    """The tensors that a block's segments belong to, in order; those without elements have none.

    Found from the one that fills most of it: a section may have a hundred thousand, and this is asked for every block.
    """
    sizes = [b - a for a, b in pairwise(block.bounds)]
    largest = sizes.index(max(sizes))
    tensors, middle = section.tensors, block.tensor
    before = (tensors[i] for i in range(middle - 1, -1, -1) if tensors[i].elements)
    after = (tensors[i] for i in range(middle + 1, len(tensors)) if tensors[i].elements)
    found = [*islice(before, largest)][::-1]
    return [*found, tensors[middle], *islice(after, len(sizes) - largest - 1)]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a block lives in its lane's arena: ``chunk`` file, byte offsets inside it.

    The slot header is ``LANE_HEADER_BYTES`` written by the lane, then ``RANK_HEADER_BYTES`` for each
    local rank, written by that rank's worker; ``inputs[r]`` is local rank r's input, ``output`` the result.
    """

    chunk: int
    header: int
    inputs: tuple[int, ...]
    output: int


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def block_sizes(group_bytes: int, members: int, partition_bytes: int) -> Iterator[int]:
    """Lengths of a group's blocks, bytes, in address order; multiples of a page but for the last.

    Every block costs the daemon a fixed time, so few large ones are best for throughput; at least two an owner, as
    soon as that leaves 2 MiB each, keep both directions of every link busy and let copies overlap with transfer.
    Never below 256 KiB, where per-message costs win, nor above ``partition_bytes``. What leaves last has to travel,
    be summed and travel back with nothing to overlap with: the lowest addresses, which are sent last, are cut finer.
    """
    left = group_bytes
    for size in _wanted_sizes(group_bytes, members, partition_bytes):
        if left <= 0:
            return
        yield min(size, left)
        left -= size


def whole_sizes(tensor_bytes: Sequence[int], members: int, partition_bytes: int) -> Iterator[int]:
    """:func:`block_sizes` where no tensor is cut: each block takes tensors up to the wanted size, and one at least."""
    wanted = _wanted_sizes(sum(tensor_bytes), members, partition_bytes)
    most, size = next(wanted), 0
    for nbytes in tensor_bytes:
        if size and size + nbytes > most:
            yield size
            most, size = next(wanted), 0
        size += nbytes
    if size:
        yield size


def _wanted_sizes(group_bytes: int, members: int, partition_bytes: int) -> Iterator[int]:
    """The longest each block should be, one after the other, without end."""
    members = max(members, 1)
    two = group_bytes // (2 * members)
    wanted = two if two >= MIN_PIPELINED_BYTES else -(-group_bytes // members)
    size = min(max(_align(wanted, PAGE), MIN_BLOCK_BYTES), partition_bytes)
    fine = size // 2 // PAGE * PAGE
    if fine >= MIN_PIPELINED_BYTES and group_bytes >= 2 * members * size:
        yield from repeat(fine, 2 * members)
    yield from repeat(size)


@dataclass(slots=True)
class AddressSpace:
    """The layout of one domain: append sections, get blocks and slots.

    Each group of a section is cut into blocks as if it were a section by itself. ``members`` is the number of nodes,
    ``lanes`` of lanes, ``partition_bytes`` the longest block. ``whole``: blocks are cut between tensors only, for
    codecs that take whole matrices; a tensor longer than that is a block of its own.
    Placement is greedy by bytes: a block goes to the member with the fewest bytes so far (lowest index on
    ties), and likewise among the lanes; it never moves while the epoch lasts.

    ``remaining``: for each epoch after the first the members that are in it, by their first index. Members keep their
    blocks as long as they are there; those of a lost one go to the rest, by bytes again. One that comes back has none
    until another one is lost. The cut into blocks, their keys and their lanes stay what they were. A block's owner is
    an index among those that are in the last epoch.
    """

    members: int
    lanes: int
    partition_bytes: int
    whole: bool = False
    remaining: tuple[tuple[int, ...], ...] = ()
    sections: list[Section] = field(default_factory=list)
    blocks: list[tuple[Block, ...]] = field(default_factory=list)
    next_address: int = 0
    #: by epoch and member: bytes owned
    _owned: list[list[int]] = field(default_factory=list)
    _laned: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.partition_bytes % PAGE:
            raise ManifestError(f"partition_bytes must be a multiple of {PAGE}, got {self.partition_bytes}")
        self._owned = [[0] * self.members for _ in range(len(self.remaining) + 1)]
        self._laned = [0] * self.lanes

    def append(self, section: Section) -> tuple[Block, ...]:
        """Lay out the next section. Raises :class:`ManifestError` if it is not the next one or is malformed."""
        check_section(section, self.whole)
        if section.index != len(self.sections):
            raise ManifestError(f"expected section {len(self.sections)}, got {section.index}")
        itemsize = section.dtype.itemsize
        ends: list[int] = []
        total = 0
        for spec in section.tensors:
            total += spec.elements
            ends.append(total)
        blocks = []
        tensor = 0
        stop = 0
        for size in self._sizes(section):
            start, stop = stop, stop + size // itemsize
            while ends[tensor] <= start:
                tensor += 1
            bounds, biggest, most, at, t = [0], tensor, -1, start, tensor
            while at < stop:
                end = min(ends[t], stop)
                if end > at:
                    bounds.append(end - start)
                    if end - at > most:
                        biggest, most = t, end - at
                at, t = end, t + 1
            lane = min(range(self.lanes), key=self._laned.__getitem__)
            # count a little for every block, so that many tiny ones spread as well
            weight = (stop - start) * itemsize + ADDRESS_ALIGN
            owner = self._place(weight)
            self._laned[lane] += weight
            blocks.append(
                Block(self.next_address + start * itemsize, section.index, start, stop - start,
                      section.dtype, owner, lane, tuple(bounds), biggest, self.whole)
            )  # fmt: skip
        self.sections.append(section)
        self.blocks.append(tuple(blocks))
        self.next_address = _align(self.next_address + max(section.nbytes, 1), ADDRESS_ALIGN)
        return self.blocks[-1]

    def _place(self, weight: int) -> int:
        """The owner of the next block, after all losses, as an index among those that are left."""
        everyone = tuple(range(self.members))
        owner = -1
        for owned, left in zip(self._owned, (everyone, *self.remaining), strict=True):
            if owner not in left and left:
                owner = min(left, key=owned.__getitem__)
            owned[owner] += weight
        return (self.remaining[-1] if self.remaining else everyone).index(owner)

    def _sizes(self, section: Section) -> Iterator[int]:
        for group in section.groups:
            tensors = [t.elements * section.dtype.itemsize for t in group]
            if self.whole:
                yield from whole_sizes(tensors, self.members, self.partition_bytes)
            else:
                yield from block_sizes(sum(tensors), self.members, self.partition_bytes)


@dataclass(slots=True)
class ArenaPlan:
    """Places blocks of one lane into chunk files; append-only, the same on worker and lane.

    ``chunks`` lists the sizes of the files in bytes. Inputs and outputs of a page or more start on a page, and so do
    those of every block after the first of a section: a worker can map a section's inputs side by side.
    """

    local_ranks: int
    chunks: list[int] = field(default_factory=list)
    slots: dict[int, Slot] = field(default_factory=dict)
    _used: int = 0

    def _place(self, at: int, block: Block) -> tuple[int, Slot]:
        """(end, slot) of ``block`` if its header starts at or after offset ``at`` of the current chunk."""
        align = PAGE if block.nbytes >= PAGE or block.start else ADDRESS_ALIGN
        header = _align(at, ADDRESS_ALIGN)
        at = _align(header + LANE_HEADER_BYTES + RANK_HEADER_BYTES * self.local_ranks, align)
        offsets = []
        for _ in range(self.local_ranks + 1):
            offsets.append(at)
            at = _align(at + block.nbytes, align)
        return at, Slot(max(len(self.chunks) - 1, 0), header, tuple(offsets[:-1]), offsets[-1])

    def append(self, blocks: Iterable[Block]) -> list[int]:
        """Place the blocks of one section on this lane. Returns the indices of chunks that are new."""
        todo: Sequence[Block] = list(blocks)
        if not todo:
            return []
        end = self._used
        for block in todo:
            end, _ = self._place(end, block)
        new: list[int] = []
        if not self.chunks or end > self.chunks[-1]:
            self.chunks.append(0)
            self._used = end = 0
            for block in todo:
                end, _ = self._place(end, block)
            self.chunks[-1] = _align(max(end, MIN_CHUNK_BYTES), PAGE)
            new.append(len(self.chunks) - 1)
        for block in todo:
            self._used, slot = self._place(self._used, block)
            self.slots[block.key] = slot
        return new
