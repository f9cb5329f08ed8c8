"""What a finished round leaves: the aggregate it retains, and an output slot that says when there is none.

What may live here: retaining, "not a number". What may not: computing the result (`averaging.py`,
`exchanges.py`), the slot's header (`executor.py`).
"""

from __future__ import annotations

import numpy as np

from gcproto import wire
from gcproto.dtypes import DType
from gcproto.wire import Flag
from gcserver.core.effects import Encode, Finalise
from gcserver.core.events import CodecChoice, Finalised, Retained
from gcserver.runtime.blocks import BlockState, DomainMemory
from gcserver.runtime.buffers import Handles


def keep(handles: Handles, memory: DomainMemory, e: Finalise, payload: memoryview, bad: bool) -> Finalised:
    """Log an aggregate as retained and answer with it; without a codec (all scheme) nothing is retained."""
    if e.codec is None:
        return Finalised(e.domain, e.key, e.step, None, 0, 0, bad)
    digest = wire.digest(payload)
    flags = e.flags | (Flag.NONFINITE if bad else 0) | (Flag.SUM_UNITS if e.codec.sum_units else 0)
    retain(memory, e, e.codec, e.retain, len(payload), digest, int(flags))
    handle = handles.add(payload) if len(payload) else None
    return Finalised(e.domain, e.key, e.step, handle, len(payload), digest, bad, e.stage)


def retain(
    memory: DomainMemory, e: Encode | Finalise, codec: CodecChoice, slot: int, nbytes: int, digest: int, flags: int
) -> None:
    """Log that the payload in retained memory ``slot`` is whole. The core says the same of it in `Retained`s."""
    memory.commit_kept(
        e.key, slot, Retained(e.step, slot, None, nbytes, digest, codec.id, codec.level, flags, e.proposal)
    )


def fill_nan(state: BlockState) -> None:
    """The output slot becomes "not a number" everywhere, in the block's own type.

    Integers cannot say it and are never asked to.
    """
    nan = np.full(1, np.nan, np.float32)
    dtype = state.block.dtype
    if dtype is DType.F64:
        np.frombuffer(state.output, np.float64)[:] = np.nan
    elif dtype is DType.F32:
        state.floats(state.output)[:] = nan
    elif dtype in (DType.F16, DType.BF16):
        np.frombuffer(state.output, np.uint16)[:] = 0x7E00 if dtype is DType.F16 else 0x7FC0
