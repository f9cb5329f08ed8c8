"""A lane's memory of one domain: arenas shared with workers, and what only the lane keeps.

What may live here: where a block's input, output, residuals and retained payloads are, its record, and reading all that
back after a restart. What may not: arithmetic (`encoding.py`, `averaging.py`, `exchanges.py`), decisions.

Files, in the job's directory, for domain d and lane l (`docs/memory.md` has the layouts):

    d.l.chunk<i>   arena: slot headers, inputs, outputs (descriptors go to the workers)
    d.l.records<s> private: one record for each block of section s
    d.l.heap<i>    private: states and retained payloads, once a codec needs them
    d.l.steps      ring of finished steps

Records are written field by field with aligned 8-byte stores; the store that makes a change count is always
the last one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcproto import slots
from gcproto.manifest import AddressSpace, ArenaPlan, Block, Section, Slot
from gcserver.core.events import BlockMemory, Decision, DomainConfig, Retained, StepRecord, Versions
from gcserver.runtime.statefiles import Heap, MappedFile, map_file

#: retained payloads a block may have; memory for one comes when it is first needed
KEPT = 3
RECORD = np.dtype(
    [
        ("key", "u8"),
        # the logged decision
        ("decision_step", "u8"),
        ("plan", "u4"),
        ("proposal", "u4"),
        ("seed", "u8"),
        ("spec", "S96"),
        # two-version states: settled step and current version in one word, then the step written last
        ("residual", "u8"),
        ("residual_written", "u8"),
        ("owner", "u8"),
        ("owner_written", "u8"),
        # three retained payloads
        ("kept_step", "u8", KEPT),
        ("kept_bytes", "u8", KEPT),
        ("kept_digest", "u8", KEPT),
        ("kept_codec", "u4", KEPT),
        ("kept_level", "u4", KEPT),
        ("kept_flags", "u4", KEPT),
        ("kept_proposal", "u4", KEPT),
        # where the states of this block are: chunk + 1 (0: none yet) and offset in one word
        ("residual_at", "u8"),
        ("owner_at", "u8"),
        # where its retained payloads are, likewise
        ("kept_at", "u8", KEPT),
    ],
    align=True,
)
#: Before a block's two states: their length, what the memory behind the residual was used for last, and whether the
#: two residuals differ.
STATES = np.dtype([("floats", "u8"), ("tag", "u8"), ("differ", "u8")])
#: Before a retained payload: how many bytes there is room for.
KEPT_HEAD = 64
STEP = np.dtype([("step", "u8"), ("digest", "u8"), ("nonfinite", "u4"), ("proposal", "u4"), ("reserved", "u8")])
STEP_RING = 1024
F32 = NDArray[np.float32]

# What is written for every block of every step is packed by hand: assigning a field of a record costs as much as the
# whole of it.
_WORD = struct.Struct("=Q")
_HALF = struct.Struct("=I")
_DECISION = struct.Struct("=IIQ96s")
_STEP = struct.Struct("=QII")


def _at(name: str, index: int = 0) -> int:
    """Offset of a field of RECORD, or of its element."""
    dtype, offset = RECORD.fields[name][:2]  # type: ignore[index]
    return int(offset) + index * int(dtype.base.itemsize)


_KEPT_WIDE = tuple((_at("kept_bytes", i), _at("kept_digest", i)) for i in range(KEPT))
_KEPT = tuple(tuple(_at(f"kept_{f}", i) for f in ("codec", "level", "flags", "proposal")) for i in range(KEPT))
_KEPT_STEP, _KEPT_AT = (tuple(_at(name, i) for i in range(KEPT)) for name in ("kept_step", "kept_at"))
_DECISION_STEP, _PLAN = _at("decision_step"), _at("plan")


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


def _versions(word: int, written: int) -> Versions:
    return Versions(int(word) & 1, int(word) >> 1, int(written))


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
        self.space = AddressSpace(len(c.members), self.lanes, c.partition_bytes, c.whole)
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

        Returns what is remembered of this lane's blocks. Raises MemoryShort.
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
        records = np.frombuffer(file.view, RECORD, len(mine))
        memory = {}
        for i, block in enumerate(mine):
            record = records[i : i + 1]
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
            if not file.fresh:
                memory[block.key] = self._remembered(state)
        self.opened = section.index + 1
        return memory

    def _remembered(self, state: BlockState) -> BlockMemory:
        r = state.record[0]
        pushes = [slots.pushed(state.arena, state.slot, i) for i in range(len(state.slot.inputs))]
        out_step, out_flags, out_proposal = slots.output(state.arena, state.slot)
        decision = None
        if r["decision_step"]:
            decision = Decision(
                int(r["decision_step"]), int(r["plan"]), int(r["proposal"]), bytes(r["spec"]).decode(), int(r["seed"])
            )
        kept = []
        for i in range(KEPT):
            if r["kept_step"][i]:
                kept.append(
                    Retained(
                        int(r["kept_step"][i]), i, None, int(r["kept_bytes"][i]), int(r["kept_digest"][i]),
                        int(r["kept_codec"][i]), int(r["kept_level"][i]), int(r["kept_flags"][i]),
                        int(r["kept_proposal"][i]),
                    )
                )  # fmt: skip
        kept.sort(key=lambda k: -k.step)
        return BlockMemory(
            tuple(p[0] for p in pushes), pushes[0][1], pushes[0][2], out_step, out_flags, out_proposal, decision,
            _versions(r["residual"], r["residual_written"]), _versions(r["owner"], r["owner_written"]), tuple(kept),
        )  # fmt: skip

    # -------------------------------------------------------------------------------------- records
    def log_decision(self, key: int, d: Decision) -> None:
        raw = self.blocks[key].raw
        # A torn decision must not look like one: no step while its fields change.
        _WORD.pack_into(raw, _DECISION_STEP, 0)
        _DECISION.pack_into(raw, _PLAN, d.plan, d.proposal, d.seed, d.spec.encode())
        _WORD.pack_into(raw, _DECISION_STEP, d.step)

    def flip(self, key: int, step: int, version: int, owner: bool) -> None:
        self.blocks[key].record["owner" if owner else "residual"] = step << 1 | version

    def commit_kept(self, key: int, index: int, kept: Retained) -> None:
        raw = self.blocks[key].raw
        values = (kept.codec, kept.level, kept.flags, kept.proposal)
        for at, wide in zip(_KEPT_WIDE[index], (kept.nbytes, kept.digest), strict=True):
            _WORD.pack_into(raw, at, wide)
        for at, value in zip(_KEPT[index], values, strict=True):
            _HALF.pack_into(raw, at, value)
        _WORD.pack_into(raw, _KEPT_STEP[index], kept.step)

    def log_step(self, record: StepRecord) -> None:
        at = record.step % STEP_RING * STEP.itemsize
        _WORD.pack_into(self.ring, at, 0)
        _STEP.pack_into(self.ring, at + 8, record.digest, record.nonfinite, record.proposal)
        _WORD.pack_into(self.ring, at, record.step)

    def finished(self, after: int) -> tuple[StepRecord, ...]:
        known = self.steps[self.steps["step"] > after]
        found = (StepRecord(int(s["step"]), bool(s["nonfinite"]), int(s["proposal"]), int(s["digest"])) for s in known)
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
        state.record["owner_written" if owner else "residual_written"] = step
        return read, write

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
        chunk, offset = self.heap.allocate(_align(STATES.itemsize) + 2 * _align(4 * floats))
        np.frombuffer(self.heap.view((chunk, offset), STATES.itemsize), STATES)["floats"] = floats
        return _word(chunk, offset)

    def _view_states(self, word: int) -> tuple[Any, tuple[F32, F32]]:
        """Header and both versions of the states at ``word``."""
        chunk, offset = _place(word)
        head = np.frombuffer(self.heap.view((chunk, offset), STATES.itemsize), STATES)
        floats = int(head["floats"][0])
        at = offset + _align(STATES.itemsize)
        first, second = (
            np.frombuffer(self.heap.view((chunk, at + v * _align(4 * floats)), 4 * floats), np.float32) for v in (0, 1)
        )
        return head, (first, second)

    def _states(self, state: BlockState, name: str) -> tuple[Any, tuple[F32, ...]]:
        word = int(state.record[name][0])
        return self._view_states(word) if word else (None, ())

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
        _WORD.pack_into(raw, _KEPT_STEP[index], 0)
        (word,) = _WORD.unpack_from(raw, _KEPT_AT[index])
        if not word or self._room(word) < size:
            chunk, offset = self.heap.allocate(KEPT_HEAD + size)
            _WORD.pack_into(self.heap.view((chunk, offset), KEPT_HEAD), 0, size)
            # One word, as with states.
            _WORD.pack_into(raw, _KEPT_AT[index], _word(chunk, offset))
        return self.kept(key, index, size)

    def _room(self, word: int) -> int:
        return int(_WORD.unpack_from(self.heap.view(_place(word), KEPT_HEAD))[0])

    def kept(self, key: int, index: int, size: int) -> memoryview:
        """The ``size`` bytes of retained payload ``index`` of a block, as `make_kept` placed them."""
        chunk, offset = _place(_WORD.unpack_from(self.blocks[key].raw, _KEPT_AT[index])[0])
        return self.heap.view((chunk, offset + KEPT_HEAD), size)

    @property
    def nbytes(self) -> int:
        return sum(c.size for c in self.chunks) + self.heap.nbytes


def segment_shapes(section: Section, block: Block) -> tuple[tuple[int, int], ...]:
    """What each segment of a block is as a matrix: its tensor's first dimension by all others."""
    shapes = []
    start = 0
    for tensor in section.tensors:
        first, last = max(start, block.start), min(start + tensor.elements, block.start + block.elements)
        start += tensor.elements
        if first >= last:
            continue
        n = last - first
        matrix = n == tensor.elements and len(tensor.shape) > 1
        shapes.append((tensor.shape[0], n // tensor.shape[0]) if matrix else (n, 0))
    return tuple(shapes)


def _word(chunk: int, offset: int) -> int:
    """A place in the heap as one word, never 0: a kill leaves either the old place or the new one."""
    return chunk + 1 << 48 | offset


def _place(word: int) -> tuple[int, int]:
    return (word >> 48) - 1, word & (1 << 48) - 1


def _align(n: int) -> int:
    return -(-n // 64) * 64
