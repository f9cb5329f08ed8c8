"""What codecs keep of a block between steps, in the terms of a lane's memory.

What may live here: from a codec and a block to the size and tag of a state, and the units it is in. What may not: the
memory itself (`blocks.py`), running a codec.
"""

from __future__ import annotations

import numpy as np

from gcproto import wire
from gcserver.codecs import Codec
from gcserver.codecs.base import U32
from gcserver.codecs.tworounds import TwoRounds
from gcserver.core.effects import Encode, Finalise
from gcserver.runtime.blocks import BlockState, StateUse

NONE_ID = 0  #: the codec that sends gradients as they are


def codec_seed(seed: int) -> int:
    """A round's seed as codecs take it, below 2**62: kernels know signed 64-bit numbers only."""
    return seed & (1 << 62) - 1


def levels_of(e: Encode | Finalise) -> U32 | None:
    """The levels of the block's segments as codecs take them, uint32[m]; None: the codec's own everywhere."""
    return np.array(e.levels, np.uint32) if e.levels else None


def unscales(codec: Codec) -> bool:
    """Whether payloads of ``codec`` are without the loss scale: residuals are kept unscaled, and votes have none."""
    return codec.units == "sum" or codec.finalise == "vote"


def state_use(codec: Codec, state: BlockState) -> StateUse | None:
    """What ``codec`` keeps of a block; None: nothing."""
    floats = codec.state_floats(state.block.elements, len(state.bounds) - 1)
    if not floats:
        return None
    tag = wire.digest(f"{codec.name}/{codec.momentum > 0}/{floats}".encode())
    return StateUse(floats, codec.error_feedback, tag)


def matrix_use(codec: TwoRounds, state: BlockState) -> StateUse | None:
    """As :func:`state_use`, for a codec that counts by shapes."""
    floats = codec.state_floats(state.block.elements, len(state.shapes), state.shapes)
    if not floats:
        return None
    return StateUse(floats, codec.error_feedback, wire.digest(f"{codec.name}/{codec.own_level}/{floats}".encode()))
