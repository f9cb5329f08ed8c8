"""The header in front of every block in an arena.

What may live here: offsets and reading/writing of slot headers. What may not: where slots are
(`manifest.py`), what the numbers mean to the protocol.

Headers are the truth, messages are doorbells: a worker writes its input, then ``in_step``; a lane writes the
output, then ``out_step``. Each is one aligned 8-byte store, so a process killed at any instant leaves
either the old step or the new one. Byte order is the machine's: an arena never leaves it.

    lane part (64 bytes)                      one rank part each (64 bytes)
     0  u32 magic "GCS1"                       0  u64 in_step: the step whose gradient is in the input
     4  u16 version, u16 local ranks           8  u32 flags of that push (AVERAGE), u32 reserved
     8  u64 key                               16  f64 grad_scale
    16  u64 out_step                          24  reserved
    24  u32 out_flags, u32 out_proposal
    32  reserved
"""

from __future__ import annotations

import struct
from typing import Final

from gcproto.manifest import LANE_HEADER_BYTES, RANK_HEADER_BYTES, Block, Slot

MAGIC: Final = 0x31534347
VERSION: Final = 1

_LANE: Final = struct.Struct("@IHHQQII")
_U64: Final = struct.Struct("@Q")
_RANK: Final = struct.Struct("@QIId")
_OUT_META: Final = struct.Struct("@II")
_PUSH_META: Final = struct.Struct("@IId")


def initialise(buffer: memoryview, slot: Slot, block: Block) -> None:
    """Write a fresh header (all steps 0) unless one for this very block is there already."""
    if magic(buffer, slot) == (MAGIC, VERSION, len(slot.inputs), block.key):
        return
    _LANE.pack_into(buffer, slot.header, MAGIC, VERSION, len(slot.inputs), block.key, 0, 0, 0)
    for rank in range(len(slot.inputs)):
        _RANK.pack_into(buffer, rank_offset(slot, rank), 0, 0, 0, 1.0)


def magic(buffer: memoryview, slot: Slot) -> tuple[int, int, int, int]:
    m, version, ranks, key, *_ = _LANE.unpack_from(buffer, slot.header)
    return m, version, ranks, key


def rank_offset(slot: Slot, rank: int) -> int:
    return slot.header + LANE_HEADER_BYTES + RANK_HEADER_BYTES * rank


def commit_push(buffer: memoryview, slot: Slot, rank: int, step: int, flags: int, grad_scale: float) -> None:
    """The input of local rank ``rank`` is written: say so."""
    at = rank_offset(slot, rank)
    _PUSH_META.pack_into(buffer, at + 8, flags, 0, grad_scale)
    _U64.pack_into(buffer, at, step)


def pushed(buffer: memoryview, slot: Slot, rank: int) -> tuple[int, int, float]:
    """(in_step, flags, grad_scale) of a local rank."""
    step, flags, _, scale = _RANK.unpack_from(buffer, rank_offset(slot, rank))
    return step, flags, scale


def commit_output(buffer: memoryview, slot: Slot, step: int, flags: int, proposal: int) -> None:
    """The output is written: say so. ``flags`` are wire flags (NONFINITE)."""
    _OUT_META.pack_into(buffer, slot.header + 24, flags, proposal)
    _U64.pack_into(buffer, slot.header + 16, step)


def output(buffer: memoryview, slot: Slot) -> tuple[int, int, int]:
    """(out_step, out_flags, out_proposal)."""
    *_, step, flags, proposal = _LANE.unpack_from(buffer, slot.header)
    return step, flags, proposal
