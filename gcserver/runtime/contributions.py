"""What the workers of this node put into a block's input slots, as one sum in rank order.

What may live here: these sums, also with what earlier codecs held back. What may not: encoding them (`encoding.py`,
`exchanges.py`), where the slots are (`blocks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcproto.dtypes import DType
from gcserver.codecs import reduce
from gcserver.runtime.blocks import F32, BlockState
from gcserver.runtime.buffers import Pool, as_bytes


def dense_contribution(pool: Pool, state: BlockState, held: Sequence[F32] = ()) -> tuple[memoryview, bool]:
    """The sum in the block's own type, and whether it did not fit; of a single rank its input in the arena, which is
    not copied. ``held``: residuals to be added."""
    if held:
        total = with_held(pool, state, held)
        if state.block.dtype is DType.F32:
            return memoryview(total).cast("B"), False  # type: ignore[arg-type]
        out = pool.take(state.block.nbytes)
        return out, store(state, out, total, 1.0)
    if len(state.inputs) == 1:
        return state.inputs[0], False
    out = pool.take(state.block.nbytes)
    if state.block.dtype is DType.F32:
        reduce.sum_ranks(np.frombuffer(out, np.float32), [state.floats(i) for i in state.inputs])
    else:
        return out, store(state, out, _typed_sum(state), 1.0)
    return out, False


def store(state: BlockState, out: memoryview, acc: NDArray[Any], scale: float) -> bool:
    """out = acc*scale in the block's own type; whether a result is not finite.

    Under a loss scale one too large for the type counts as such: the scaler must see that the type was not wide
    enough, or it never backs off. Without one it becomes the largest value there is, which harms less than infinity.
    """
    stored = reduce.store(as_bytes(out), acc, state.block.dtype, scale)
    return stored.nonfinite > 0 or (stored.saturated > 0 and state.loss_scale() != 1.0)


def _typed_sum(state: BlockState) -> NDArray[Any]:
    dtype = state.block.dtype
    acc = np.empty(state.block.elements, reduce.accumulate_dtype(dtype))
    reduce.load_copy(acc, as_bytes(state.inputs[0]), dtype)
    for more in state.inputs[1:]:
        reduce.load_add(acc, as_bytes(more), dtype)
    return acc


def with_held(pool: Pool, state: BlockState, held: Sequence[F32]) -> F32:
    """The local ranks' sum and residuals as float32[elements]; those are kept without the loss scale inputs carry."""
    total = np.frombuffer(pool.take(4 * state.block.elements), np.float32)
    np.copyto(total, node_sum(pool, state))
    scale = np.float32(state.loss_scale())
    for residual in held:
        total += residual * scale
    return total


def node_sum(pool: Pool, state: BlockState) -> F32:
    """The local ranks' sum as float32[elements], for compression."""
    if state.block.dtype is not DType.F32:
        return _typed_sum(state)
    if len(state.inputs) == 1:
        return state.floats(state.inputs[0])
    out = np.frombuffer(pool.take(state.block.nbytes), np.float32)
    reduce.sum_ranks(out, [state.floats(i) for i in state.inputs])
    return out
