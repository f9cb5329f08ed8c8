"""What a lane's private files hold, byte by byte: the record of a block, the heads of its states and payloads, a step.

What may live here: these layouts (`docs/memory.md`), writing a record's parts in an order that a kill cannot tear, and
reading them. What may not: where this memory lies and when it is written (`blocks.py`).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from gcserver.core.events import Decision, Retained, StepRecord, Versions
from gcserver.runtime.statefiles import MemoryDamaged

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
        ("notch", "i4"),
        ("level", "u4"),
        # two-version states: settled step and current version in one word, then the step written last
        ("residual", "u8"),
        ("residual_written", "u8"),
        ("owner", "u8"),
        ("owner_written", "u8"),
        # bit v: version v of the residual may be other than zeros; two bits further those of the owner's
        ("held", "u8"),
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
        # the epoch in which the block was last taken up; written last
        ("epoch", "u8"),
    ],
    align=True,
)
#: Before a block's two states: their length, what the memory behind the residual was used for last, and whether the
#: two residuals differ.
STATES = np.dtype([("floats", "u8"), ("tag", "u8"), ("differ", "u8")])
#: Before a retained payload: how many bytes there is room for.
KEPT_HEAD = 64
STEP = np.dtype([("step", "u8"), ("digest", "u8"), ("nonfinite", "u4"), ("proposal", "u4"), ("epoch", "u8")])
STEP_RING = 1024

# What is written for every block of every step is packed by hand: assigning a field of a record costs as much as the
# whole of it.
WORD = struct.Struct("=Q")
_HALF = struct.Struct("=I")
_DECISION = struct.Struct("=IIQ96siI")
_STEP = struct.Struct("=QIIQ")


def _at(name: str, index: int = 0) -> int:
    """Offset of a field of RECORD, or of its element."""
    dtype, offset = RECORD.fields[name][:2]  # type: ignore[index]
    return int(offset) + index * int(dtype.base.itemsize)


_KEPT_WIDE = tuple((_at("kept_bytes", i), _at("kept_digest", i)) for i in range(KEPT))
_KEPT = tuple(tuple(_at(f"kept_{f}", i) for f in ("codec", "level", "flags", "proposal")) for i in range(KEPT))
KEPT_STEP, KEPT_AT = (tuple(_at(name, i) for i in range(KEPT)) for name in ("kept_step", "kept_at"))
_DECISION_STEP, _PLAN, _HELD = _at("decision_step"), _at("plan"), _at("held")


def write_decision(raw: memoryview, d: Decision) -> None:
    """A torn decision must not look like one: no step while its fields change."""
    WORD.pack_into(raw, _DECISION_STEP, 0)
    _DECISION.pack_into(raw, _PLAN, d.plan, d.proposal, d.seed, d.spec.encode(), d.notch, d.level)
    WORD.pack_into(raw, _DECISION_STEP, d.step)


def decision_of(r: Any) -> Decision | None:
    """The decision in a record. Raises MemoryDamaged."""
    if not r["decision_step"]:
        return None
    step, plan, proposal, seed, notch, level = (
        int(r[name]) for name in ("decision_step", "plan", "proposal", "seed", "notch", "level")
    )
    try:
        spec = bytes(r["spec"]).decode()
    except UnicodeDecodeError as error:
        raise MemoryDamaged(f"block {int(r['key'])}: the spec of its decision is no text: {error}") from error
    return Decision(step, plan, proposal, spec, seed, notch, level)


def versions_of(r: Any, owner: bool) -> Versions:
    """The versions of the node's residual in a record, or of the owner's."""
    name = "owner" if owner else "residual"
    word, held = int(r[name]), int(r["held"]) >> 2 * owner
    return Versions(word & 1, word >> 1, int(r[f"{name}_written"]), held & 3)


def hold(raw: memoryview, version: int, owner: bool, something: bool) -> None:
    """Note whether a version of a residual, before any step not the settled one, may be other than zeros."""
    bit = 1 << version + 2 * owner
    (held,) = WORD.unpack_from(raw, _HELD)
    WORD.pack_into(raw, _HELD, held | bit if something else held & ~bit)


def write_kept(raw: memoryview, index: int, kept: Retained) -> None:
    """Payload ``index`` is whole: its step, last, makes it count."""
    values = (kept.codec, kept.level, kept.flags, kept.proposal)
    for at, wide in zip(_KEPT_WIDE[index], (kept.nbytes, kept.digest), strict=True):
        WORD.pack_into(raw, at, wide)
    for at, value in zip(_KEPT[index], values, strict=True):
        _HALF.pack_into(raw, at, value)
    WORD.pack_into(raw, KEPT_STEP[index], kept.step)


def kept_of(r: Any) -> list[Retained]:
    """The retained payloads in a record, newest first, without handles.

    A payload that was made again after a restart may be there twice, the same bytes in two places: one of them counts.
    """
    names = ("bytes", "digest", "codec", "level", "flags", "proposal")
    kept = [
        Retained(int(r["kept_step"][i]), i, None, *(int(r[f"kept_{name}"][i]) for name in names))
        for i in range(KEPT)
        if r["kept_step"][i]
    ]
    return sorted({(k.step, k.stage): k for k in kept}.values(), key=lambda k: -k.step)


def write_step(ring: memoryview, record: StepRecord) -> None:
    """A finished step in its place of the ring; torn, it is none."""
    at = record.step % STEP_RING * STEP.itemsize
    WORD.pack_into(ring, at, 0)
    _STEP.pack_into(ring, at + 8, record.digest, record.nonfinite, record.proposal, record.epoch)
    WORD.pack_into(ring, at, record.step)
