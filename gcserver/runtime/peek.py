"""A job's gradients as its lanes see them, read from another process of the same user.

What may live here: where a domain's inputs, residuals and outputs are in the files of its lanes, and reading some of
their elements. What may not: writing anything, arithmetic of codecs, statistics (`errortables.py`).

Files are opened and mapped for reading only, and nothing waits for anybody: a gradient may be overwritten while it is
read. Such a torn reading holds elements of two steps, which changes nothing in the statistics it is read for. The
layout follows from what all nodes agreed on (`gcproto.manifest`), so nothing has to be asked of a lane.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcproto import slots
from gcproto.dtypes import DType
from gcproto.manifest import ArenaPlan, Block, Section, Slot
from gcproto.records import Record
from gcserver.core.events import DomainConfig
from gcserver.core.plan import COMPRESSIBLE
from gcserver.runtime.blocks import align, place
from gcserver.runtime.records import RECORD, STATES

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
#: what is sent with these leaves the mean as it is, but for rounding
PLAIN = ("none", "fp16", "bf16")


class PeekError(RuntimeError):
    """A domain's memory cannot be read: says which file, and what is wrong with it."""


class JobGone(PeekError):
    """Its files are not there: the job has ended, or has not begun."""


class Watched(Record, frozen=True, gc=False):
    """Which domain to read: the daemon's state directory, its number of lanes, and what the members agreed on."""

    state: str
    lanes: int
    config: DomainConfig
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """Some elements of one tensor, float32.

    contribution: the sum of the local ranks' gradients without loss scale, with the residual that is, or was, added to
    it before encoding. outcome: the mean over all ranks that the block's owner encoded; None where what was lost in
    that is at another node.
    """

    contribution: F32
    outcome: F32 | None


@dataclass(frozen=True, slots=True)
class Piece:
    """``elements`` of a tensor from element ``first`` of it, at element ``at`` of a block."""

    block: _Place
    first: int
    at: int
    elements: int


@dataclass(frozen=True, slots=True)
class _Place:
    block: Block
    slot: Slot
    arena: memoryview
    record: Any


@dataclass(frozen=True, slots=True)
class PeekTensor:
    """One floating-point tensor of the domain and where its parts are."""

    name: str
    shape: tuple[int, ...]
    elements: int
    pieces: tuple[Piece, ...]


class Peek:
    """A domain's memory, mapped for reading. Raises `JobGone`, or `PeekError` where files are not as agreed."""

    def __init__(self, watched: Watched) -> None:
        self.config = watched.config
        self._folder = Path(watched.state) / "jobs" / watched.config.job.hex()
        self._heaps: dict[str, memoryview] = {}
        self.tensors: list[PeekTensor] = []
        c = watched.config
        space = c.space(watched.lanes)
        arenas = [ArenaPlan(c.local_ranks) for _ in range(watched.lanes)]
        sections = []
        for section in watched.sections:
            blocks = space.append(section)
            for lane, arena in enumerate(arenas):
                arena.append(b for b in blocks if b.lane == lane)
            sections.append((section, blocks))
        chunks = [
            [self._map(f"{self._stem(lane)}.chunk{i}", size) for i, size in enumerate(arena.chunks)]
            for lane, arena in enumerate(arenas)
        ]
        for section, blocks in sections:
            places = self._places(section, blocks, arenas, chunks)
            if section.dtype in COMPRESSIBLE:
                self.tensors += _cut(section, places)

    def __enter__(self) -> Peek:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Forgets the mappings; they go when no reading refers to them."""
        self.tensors.clear()
        self._heaps.clear()

    def alive(self) -> None:
        """Raises `JobGone` unless the job's files are still there."""
        if not self._folder.is_dir():
            raise JobGone(f"{self._folder} is not there: the job has ended, or has not begun")

    def read(self, tensor: PeekTensor, picks: I64 | None = None) -> Reading | None:
        """The elements at ``picks`` (ascending, of the flat tensor; None: all); None before the first push.

        Raises `JobGone` or `PeekError`.
        """
        total = tensor.elements if picks is None else picks.size
        contribution, outcome = np.empty(total, np.float32), np.empty(total, np.float32)
        known = True
        done = 0
        for piece in tensor.pieces:
            chosen: Any = slice(piece.at, piece.at + piece.elements)
            count = piece.elements
            if picks is not None:
                first, last = np.searchsorted(picks, (piece.first, piece.first + piece.elements))
                chosen, count = picks[first:last] - (piece.first - piece.at), int(last - first)
            if not count:
                continue
            into = slice(done, done + count)
            done += count
            if not self._contribution(piece.block, chosen, contribution[into]):
                return None
            known = self._outcome(piece.block, chosen, outcome[into]) and known
        return Reading(contribution, outcome if known else None)

    # --------------------------------------------------------------------------------------- values
    def _contribution(self, at: _Place, chosen: Any, out: F32) -> bool:
        """Whether every local rank has pushed this block at least once."""
        pushed = [slots.pushed(at.arena, at.slot, rank) for rank in range(len(at.slot.inputs))]
        step = min(p[0] for p in pushed)
        if not step:
            return False
        out[:] = 0.0
        for where in at.slot.inputs:
            out += _elements(at, where, chosen)
        out /= _loss_scale(at)
        settled, current = _word(at, "residual")
        # Once a step is settled the other version is what went into it, until the next step writes there.
        residual = self._state(at, "residual_at", current if step > settled else 1 - current)
        if residual is not None:
            out += residual[chosen]
        return True

    def _outcome(self, at: _Place, chosen: Any, out: F32) -> bool:
        """Whether it can be told."""
        step, _, _ = slots.output(at.arena, at.slot)
        if not step:
            return False
        out[:] = _elements(at, at.slot.output, chosen)
        out /= _loss_scale(at)
        name = bytes(at.record["spec"]).decode().partition("(")[0].partition("+")[0]
        if at.block.owner != self.config.me:
            return name in PLAIN
        settled, current = _word(at, "owner")
        residual = self._state(at, "owner_at", current if step <= settled else 1 - current)
        if residual is not None and name not in PLAIN:
            out += residual[chosen] / np.float32(self.config.divisor)
        return True

    def _state(self, at: _Place, name: str, version: int) -> F32 | None:
        """A version of the residual of a contribution or of the owner, float32[elements]; None: there is none yet."""
        word = int(at.record[name])
        if not word:
            return None
        chunk, offset = place(word)
        heap = self._heap(f"{self._stem(at.block.lane)}.heap{chunk}")
        if offset + STATES.itemsize > len(heap):
            return None
        floats = int(np.frombuffer(heap, STATES, 1, offset)["floats"][0])
        first = offset + align(STATES.itemsize) + version * align(4 * floats)
        # Written and moved by another process: what makes no sense is no residual.
        if floats < at.block.elements or first + 4 * floats > len(heap):
            return None
        return np.frombuffer(heap, np.float32, at.block.elements, first)

    # ---------------------------------------------------------------------------------------- files
    def _stem(self, lane: int) -> str:
        return f"{self.config.domain:08x}.{lane}"

    def _heap(self, name: str) -> memoryview:
        if name not in self._heaps:
            self._heaps[name] = self._map(name, 1)
        return self._heaps[name]

    def _map(self, name: str, size: int) -> memoryview:
        """A file of at least ``size`` bytes."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except FileNotFoundError:
            raise JobGone(f"{path} is not there: the job has ended, or has not begun") from None
        except (OSError, ValueError) as error:
            raise PeekError(f"{path} cannot be mapped: {error}") from error
        if len(mapped) < size:
            raise PeekError(f"{path}: expected at least {size} bytes, got {len(mapped)}; is it another job's layout?")
        return memoryview(mapped)

    def _places(
        self, section: Section, blocks: tuple[Block, ...], arenas: list[ArenaPlan], chunks: list[list[memoryview]]
    ) -> list[_Place]:
        """Where the blocks of a section are, in order of address."""
        records: dict[int, Any] = {}
        seen: dict[int, int] = {}
        places = []
        for block in blocks:
            lane = block.lane
            mine = sum(b.lane == lane for b in blocks)
            if lane not in records:
                view = self._map(f"{self._stem(lane)}.records{section.index}", mine * RECORD.itemsize)
                records[lane] = np.frombuffer(view, RECORD, mine)
            index = seen[lane] = seen.get(lane, -1) + 1
            slot = arenas[lane].slots[block.key]
            arena = chunks[lane][slot.chunk]
            found = slots.magic(arena, slot)
            wanted = (slots.MAGIC, slots.VERSION, len(slot.inputs), block.key)
            if found != wanted:
                raise PeekError(f"block {block.key} of lane {lane}: expected header {wanted}, got {found}")
            places.append(_Place(block, slot, arena, records[lane][index]))
        return places


def _cut(section: Section, places: list[_Place]) -> list[PeekTensor]:
    """Tensors of a section and the blocks that hold them."""
    tensors = []
    start = 0
    left = list(places)
    for spec in section.tensors:
        stop = start + spec.elements
        pieces = []
        while left and left[0].block.start < stop:
            b = left[0].block
            first, last = max(start, b.start), min(stop, b.start + b.elements)
            pieces.append(Piece(left[0], first - start, first - b.start, last - first))
            if b.start + b.elements > stop:
                break
            left.pop(0)
        if spec.elements:
            tensors.append(PeekTensor(spec.name, spec.shape, spec.elements, tuple(pieces)))
        start = stop
    return tensors


def _word(at: _Place, name: str) -> tuple[int, int]:
    """(settled step, current version) of a two-version state."""
    word = int(at.record[name])
    return word >> 1, word & 1


def _loss_scale(at: _Place) -> np.float32:
    scale = slots.pushed(at.arena, at.slot, 0)[2]
    return np.float32(scale if np.isfinite(scale) and scale > 0 else 1.0)


def _elements(at: _Place, where: int, chosen: Any) -> F32:
    """Chosen elements of the block's memory at byte ``where``, as float32."""
    n = at.block.elements
    if at.block.dtype is DType.BF16:
        halves = np.frombuffer(at.arena, np.uint16, n, where)[chosen]
        return (halves.astype(np.uint32) << 16).view(np.float32)
    dtype = np.float16 if at.block.dtype is DType.F16 else np.float32
    return np.frombuffer(at.arena, dtype, n, where)[chosen].astype(np.float32, copy=False)
