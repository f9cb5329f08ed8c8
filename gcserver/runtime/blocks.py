"""A lane's memory of one domain: arenas shared with workers, and what only the lane keeps.

What may live here: where a block's input, output, residuals and retained payloads are, and reading all that back
after a restart. What may not: the layout of records (`records.py`), arithmetic (`encoding.py`, `averaging.py`,
`exchanges.py`), decisions.

Files, in the job's directory, for domain d and lane l (`docs/memory.md` has the layouts):

    d.l.chunk<i>   arena: slot headers, inputs, outputs (descriptors go to the workers)
    d.l.records<s> private: one record for each block of section s
    d.l.heap<i>    private: states and retained payloads, once a codec needs them
    d.l.steps      ring of finished steps

Records are written field by field with aligned 8-byte stores; the store that makes a change count is always
the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcproto import slots
from gcproto.manifest import AddressSpace, ArenaPlan, Block, Section, Slot, tensors_inside
from gcproto.wire import Flag
from gcserver.core.events import BlockMemory, Decision, DomainConfig, Retained, StepRecord
from gcserver.runtime import records
from gcserver.runtime.records import KEPT, KEPT_AT, KEPT_HEAD, KEPT_STEP, RECORD, STATES, STEP, STEP_RING, WORD
from gcserver.runtime.statefiles import Heap, MappedFile, MemoryDamaged, map_file

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StateUse:
    """What a codec keeps of a block: so many float32, the residual first if it has one; ``tag`` names the rest."""

    floats: int
    residual: bool
    tag: int


@dataclass(slots=True)
class BlockState:
    """One block of this lane: its place and its views. ``inputs[r]`` and ``output`` are uint8 memory."""

    block: Block
    slot: Slot
    arena: memoryview
    inputs: tuple[memoryview, ...]
    output: memoryview
    record: Any
    #: the record's bytes
    raw: memoryview
    bounds: NDArray[np.int64]
    #: (rows, cols) of each segment; (elements, 0) of one without a second dimension, or of a part of a tensor
    shapes: tuple[tuple[int, int], ...] = ()

    def floats(self, view: memoryview) -> F32:
        return np.frombuffer(view, np.float32)

    def loss_scale(self) -> float:
        """What the pushed gradients are multiplied by; residuals are kept without it."""
        scale = slots.pushed(self.arena, self.slot, 0)[2]
        return scale if np.isfinite(scale) and scale > 0 else 1.0


@dataclass(slots=True)
class DomainMemory:
    """All blocks of one domain on this lane."""

    config: DomainConfig
    lanes: int
    lane: int
    directory: Path
    space: AddressSpace = field(init=False)
    arena: ArenaPlan = field(init=False)
    heap: Heap = field(init=False)
    chunks: list[MappedFile] = field(default_factory=list)
    blocks: dict[int, BlockState] = field(default_factory=dict)
    steps: Any = None
    ring: Any = None
    #: sections whose memory is there: workers may map these
    opened: int = 0
    _index: Path = field(init=False)

    def __post_init__(self) -> None:
        c = self.config
        stem = f"{c.domain:08x}.{self.lane}"
        self.space = c.space(self.lanes)
        self.arena = ArenaPlan(c.local_ranks)
        self.heap = Heap(self.directory, stem)
        self.heap.reopen()
        ring = map_file(self.directory / f"{stem}.steps", STEP_RING * STEP.itemsize)
        self.ring = ring.view
        self.steps = np.frombuffer(ring.view, STEP)
        self._index = self.directory / f"{stem}.records"

    # ------------------------------------------------------------------------------------- sections
    def open_section(self, section: Section) -> dict[int, BlockMemory]:
        """Allocate a section's blocks, or take up what an earlier life left of them.

        Returns what is remembered of this lane's blocks. Raises MemoryShort, and MemoryDamaged for what cannot be.
        """
        if section.index < len(self.space.sections):
            return {}
        mine = [b for b in self.space.append(section) if b.lane == self.lane]
        for index in self.arena.append(mine):
            path = self.directory / f"{self.config.domain:08x}.{self.lane}.chunk{index}"
            self.chunks.append(map_file(path, self.arena.chunks[index]))
        if not mine:
            self.opened = section.index + 1
            return {}
        name = self.directory / f"{self._index.name}{section.index}"
        file = map_file(name, -(-len(mine) * RECORD.itemsize // 4096) * 4096)
        found = np.frombuffer(file.view, RECORD, len(mine))
        memory = {}
        for i, block in enumerate(mine):
            record = found[i : i + 1]
            slot = self.arena.slots[block.key]
            view = self.chunks[slot.chunk].view
            slots.initialise(view, slot, block)
            record["key"] = block.key
            state = BlockState(
                block,
                slot,
                view,
                tuple(view[at : at + block.nbytes] for at in slot.inputs),
                view[slot.output : slot.output + block.nbytes],
                record,
                file.view[i * RECORD.itemsize : (i + 1) * RECORD.itemsize],
                np.array(block.bounds, np.int64),
                segment_shapes(section, block),
            )
            self.blocks[block.key] = state
            if file.fresh:
                record["epoch"] = self.config.epoch
            else:
                memory[block.key] = self._remembered(state)
        self.opened = section.index + 1
        return memory

    def _remembered(self, state: BlockState) -> BlockMemory:
        r = state.record[0]
        self._check(state)
        pushes = [slots.pushed(state.arena, state.slot, i) for i in range(len(state.slot.inputs))]
        # Some ranks may not have pushed the newest step yet; they may have asked for something else before.
        _, flags, _ = max(pushes, key=lambda push: push[0])
        out_step, out_flags, out_proposal = slots.output(state.arena, state.slot)
        return BlockMemory(
            tuple(p[0] for p in pushes), flags, out_step, out_flags, out_proposal,
            records.decision_of(r), records.versions_of(r, False), records.versions_of(r, True),
            tuple(records.kept_of(r)), int(r["epoch"]),
        )  # fmt: skip

    def _check(self, state: BlockState) -> None:
        """Raises MemoryDamaged where a block's record names memory that is not there."""
        r, n, key = state.record[0], state.block.elements, state.block.key
        for name, shift in (("residual_at", 0), ("owner_at", 2)):
            if not (word := int(r[name])):
                if int(r["held"]) >> shift & 3:
                    raise MemoryDamaged(f"block {key}: a residual is held back, and {name} names no states")
                continue
            at = place(word)
            there = self.heap.holds(at, STATES.itemsize)
            floats = int(np.frombuffer(self.heap.view(at, STATES.itemsize), STATES)["floats"][0]) if there else 0
            if floats < n or not self.heap.holds(at, states_bytes(floats)):
                raise MemoryDamaged(f"block {key}: {name} is {at}, where no two states of {n} elements are")
        for i in range(KEPT):
            word, room = int(r["kept_at"][i]), 0
            if word:
                at = place(word)
                room = self._room(word) if self.heap.holds(at, KEPT_HEAD) else -1
                if room < 0 or not self.heap.holds(at, KEPT_HEAD + room):
                    raise MemoryDamaged(f"block {key}: kept_at is {at}, where no payload is")
            size, codec, flags = (int(r[f"kept_{name}"][i]) for name in ("bytes", "codec", "flags"))
            # Uncompressed aggregates are in the output slot.
            most = state.block.nbytes if codec == 0 and not flags & Flag.ALL else room
            if int(r["kept_step"][i]) and (size > most or max(codec, flags) >= 1 << 16):
                raise MemoryDamaged(f"block {key}: a payload of {size} bytes, codec {codec}, where {most} bytes fit")

    # -------------------------------------------------------------------------------------- records
    def log_decision(self, key: int, d: Decision) -> None:
        records.write_decision(self.blocks[key].raw, d)

    def flip(self, key: int, step: int, version: int, owner: bool) -> None:
        self.blocks[key].record["owner" if owner else "residual"] = step << 1 | version

    def commit_kept(self, key: int, index: int, kept: Retained) -> None:
        records.write_kept(self.blocks[key].raw, index, kept)

    def enter_epoch(self, key: int, epoch: int, step: int) -> None:
        """What an earlier epoch left of steps after ``step`` is gone; the epoch last, so that a kill repeats it."""
        state = self.blocks[key]
        for at in KEPT_STEP:
            WORD.pack_into(state.raw, at, 0)
        slots.commit_output(state.arena, state.slot, step, 0, 0)
        state.record["epoch"] = epoch

    def log_step(self, record: StepRecord) -> None:
        records.write_step(self.ring, record)

    def finished(self, after: int) -> tuple[StepRecord, ...]:
        known = self.steps[self.steps["step"] > after]
        found = (
            StepRecord(
                int(s["step"]), bool(s["nonfinite"]), *(int(s[name]) for name in ("proposal", "digest", "epoch"))
            )
            for s in known
        )
        return tuple(sorted(found, key=lambda s: s.step))

    # -------------------------------------------------------------------------------- private memory
    def begin_states(
        self, key: int, step: int, versions: tuple[int, int], owner: bool, use: StateUse
    ) -> tuple[F32, F32]:
        """(state to read, state to write) of these versions for a codec in ``step``. Raises MemoryShort."""
        read, write = (self.state(key, version, owner, use) for version in versions)
        state = self.blocks[key]
        head, both = self._states(state, "owner_at" if owner else "residual_at")
        if use.residual:
            head["differ"] = 1
        elif head["differ"][0]:
            # What is written becomes current although it has no residual of its own: the other codec's goes along.
            n = state.block.elements
            both[versions[1]][:n] = both[versions[0]][:n]
            head["differ"] = 0
        records.hold(state.raw, versions[1], owner, True)
        state.record["owner_written" if owner else "residual_written"] = step
        return read, write

    def drain(self, key: int, step: int, version: int, owner: bool) -> F32:
        """The settled residual, float32[elements], for a contribution of ``step`` that takes it up.

        The other version becomes zeros; what codecs keep behind the residual goes along.
        """
        state = self.blocks[key]
        head, both = self._states(state, "owner_at" if owner else "residual_at")
        n = state.block.elements
        both[1 - version][:n] = 0.0
        both[1 - version][n:] = both[version][n:]
        head["differ"] = 1
        records.hold(state.raw, 1 - version, owner, False)
        state.record["owner_written" if owner else "residual_written"] = step
        return both[version][:n]

    def state(self, key: int, version: int, owner: bool, use: StateUse) -> F32:
        """State version 0 or 1 of a block for a codec, float32[use.floats]. Raises MemoryShort.

        The residual is handed over from codec to codec; what else one keeps starts as zeros whenever another
        used the memory before. One without a residual leaves that of an earlier one where it is.
        """
        state = self.blocks[key]
        n = state.block.elements
        total = use.floats if use.residual else n + use.floats
        name = "owner_at" if owner else "residual_at"
        head, versions = self._states(state, name)
        if head is None or head["floats"][0] < total:
            word = self._new_states(total)
            head, new = self._view_states(word)
            for old, fresh in zip(versions, new, strict=False):
                fresh[:n] = old[:n]
                head["differ"] = 1
            # One word: a kill leaves either the old place or the new one, complete.
            state.record[name] = word
            versions = new
        if head["tag"][0] != use.tag:
            for floats in versions:
                floats[n:] = 0.0
            head["tag"] = use.tag
        return versions[version][:total] if use.residual else versions[version][n:total]

    def _new_states(self, floats: int) -> int:
        """Memory for two states, all zeros, as the word that is kept of it."""
        chunk, offset = self.heap.allocate(states_bytes(floats))
        np.frombuffer(self.heap.view((chunk, offset), STATES.itemsize), STATES)["floats"] = floats
        return _word(chunk, offset)

    def _view_states(self, word: int) -> tuple[Any, tuple[F32, F32]]:
        """Header and both versions of the states at ``word``."""
        chunk, offset = place(word)
        head = np.frombuffer(self.heap.view((chunk, offset), STATES.itemsize), STATES)
        floats = int(head["floats"][0])
        at = offset + align(STATES.itemsize)
        first, second = (
            np.frombuffer(self.heap.view((chunk, at + v * align(4 * floats)), 4 * floats), np.float32) for v in (0, 1)
        )
        return head, (first, second)

    def _states(self, state: BlockState, name: str) -> tuple[Any, tuple[F32, ...]]:
        word = int(state.record[name][0])
        return self._view_states(word) if word else (None, ())

    def settled_states(self, key: int, owner: bool) -> tuple[F32, int, bool] | None:
        """(the settled state, float32 with the residual first; the tag of what is behind that; whether the residual may
        be other than zeros); None where there is none yet."""
        state = self.blocks[key]
        head, versions = self._states(state, "owner_at" if owner else "residual_at")
        if head is None:
            return None
        known = records.versions_of(state.record[0], owner)
        return versions[known.current], int(head["tag"][0]), known.holds

    def give_states(self, key: int, owner: bool, floats: int, first: int, values: F32) -> bool:
        """A piece of a settled state that was saved, ``floats`` long in all. Raises MemoryShort.

        False where there is memory of another length: what is brought again is as long as the first time.
        """
        state, name = self.blocks[key], "owner_at" if owner else "residual_at"
        if not state.record[name][0]:
            state.record[name] = self._new_states(floats)
        head, versions = self._states(state, name)
        if head["floats"][0] != floats:
            return False
        versions[records.versions_of(state.record[0], owner).current][first : first + len(values)] = values
        return True

    def keep_given(self, key: int, owner: bool, tag: int, held: bool) -> None:
        """All of it is there."""
        state = self.blocks[key]
        head, _ = self._states(state, "owner_at" if owner else "residual_at")
        head["tag"], head["differ"] = tag, 1
        records.hold(state.raw, records.versions_of(state.record[0], owner).current, owner, held)

    def residual_square(self, key: int) -> float:
        """Squared L2 norm of the contribution's settled residual; 0 where there is none."""
        state = self.blocks[key]
        _, versions = self._states(state, "residual_at")
        if not versions:
            return 0.0
        settled = versions[int(state.record["residual"][0]) & 1][: state.block.elements]
        return float(np.dot(settled, settled))

    def make_kept(self, key: int, index: int, size: int) -> memoryview:
        """Memory to write retained payload ``index`` of a block to, ``size`` bytes; what was there is no more.

        Raises MemoryShort.
        """
        raw = self.blocks[key].raw
        WORD.pack_into(raw, KEPT_STEP[index], 0)
        (word,) = WORD.unpack_from(raw, KEPT_AT[index])
        room = self._room(word) if word else 0
        if room < size:
            # What was there is lost: where levels grow step by step, few steps may ask for more.
            room = max(size, 2 * room)
            chunk, offset = self.heap.allocate(KEPT_HEAD + room)
            WORD.pack_into(self.heap.view((chunk, offset), KEPT_HEAD), 0, room)
            # One word, as with states.
            WORD.pack_into(raw, KEPT_AT[index], _word(chunk, offset))
        return self.kept(key, index, size)

    def _room(self, word: int) -> int:
        return int(WORD.unpack_from(self.heap.view(place(word), KEPT_HEAD))[0])

    def kept(self, key: int, index: int, size: int) -> memoryview:
        """The ``size`` bytes of retained payload ``index`` of a block, as `make_kept` placed them."""
        chunk, offset = place(WORD.unpack_from(self.blocks[key].raw, KEPT_AT[index])[0])
        return self.heap.view((chunk, offset + KEPT_HEAD), size)

    @property
    def nbytes(self) -> int:
        return sum(c.size for c in self.chunks) + self.heap.nbytes


def segment_shapes(section: Section, block: Block) -> tuple[tuple[int, int], ...]:
    """What each segment of a block is as a matrix: its tensor's first dimension by all others."""
    sizes = (b - a for a, b in pairwise(block.bounds))
    return tuple(
        (t.shape[0], n // t.shape[0]) if n == t.elements and len(t.shape) > 1 else (n, 0)
        for t, n in zip(tensors_inside(section, block), sizes, strict=True)
    )


def _word(chunk: int, offset: int) -> int:
    """A place in the heap as one word, never 0: a kill leaves either the old place or the new one."""
    return chunk + 1 << 48 | offset


def place(word: int) -> tuple[int, int]:
    """(chunk, offset) that a word of a record stands for."""
    return (word >> 48) - 1, word & (1 << 48) - 1


def align(n: int) -> int:
    """The next multiple of 64 bytes, where every state and payload begins."""
    return -(-n // 64) * 64


def states_bytes(floats: int) -> int:
    """Two versions of so many float32, with their head; nothing for none."""
    return align(STATES.itemsize) + 2 * align(4 * floats) if floats else 0
