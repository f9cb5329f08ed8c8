"""How large what workers pushed is: the measure of what compression holds back.

What may live here: norms of what lies in a block's slot. What may not: residuals (`blocks.py`), errors of levels
(`errortables.py`).
"""

from __future__ import annotations

import numpy as np

from gcproto import slots
from gcproto.dtypes import DType
from gcserver.core.plan import COMPRESSIBLE
from gcserver.runtime.blocks import F32, BlockState


def gradient_square(state: BlockState) -> float:
    """Squared L2 norm of the sum of the local ranks' newest inputs, without loss scale.

    0 before all of them have pushed, and for what is never compressed. Nothing waits for anybody: of inputs that are
    being overwritten it is the norm of some of each. Not finite where they are not.
    """
    if state.block.dtype not in COMPRESSIBLE:
        return 0.0
    if not all(slots.pushed(state.arena, state.slot, rank)[0] for rank in range(len(state.inputs))):
        return 0.0
    total = _floats(state, state.inputs[0])
    for view in state.inputs[1:]:
        total = total + _floats(state, view)
    # Twice, since the square of what a worker wrote there may be no number, or zero.
    return float(np.dot(total, total)) / state.loss_scale() / state.loss_scale()


def _floats(state: BlockState, view: memoryview) -> F32:
    if state.block.dtype is DType.BF16:
        return (np.frombuffer(view, np.uint16).astype(np.uint32) << 16).view(np.float32)
    dtype = np.float16 if state.block.dtype is DType.F16 else np.float32
    return np.frombuffer(view, dtype).astype(np.float32, copy=False)
