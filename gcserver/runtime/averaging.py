"""From contributions to the average: accumulate and finalise at a block's owner, decode at everybody else.

What may live here: which kernel adds, divides and decodes over which memory. What may not: whose contribution is due
(`gcserver.core`), kernels themselves (`gcserver.codecs`), rounds of two exchanges (`exchanges.py`).

Passes over memory are what counts: accumulating keeps references until two operands are there and adds them in one
pass, the last of them fused with the divisor and the store into the output slot; a compressed payload is decoded and
added in one pass.
"""

from __future__ import annotations

import numpy as np

from gcproto.dtypes import DType
from gcserver.codecs import Codec, by_id, parse, reduce
from gcserver.core.effects import Accumulate, Decode, Finalise
from gcserver.core.events import DomainKey, Finalised
from gcserver.runtime.blocks import F32, BlockState
from gcserver.runtime.buffers import Accumulator, Workspace, as_bytes
from gcserver.runtime.contributions import store
from gcserver.runtime.exchanges import Exchanges, two_rounds
from gcserver.runtime.results import fill_nan, keep
from gcserver.runtime.states import NONE_ID, codec_seed, levels_of, state_use, unscales


class Averager:
    """Averaging on one lane. ``finalise`` raises MemoryShort where memory must be had first."""

    def __init__(self, work: Workspace, exchanges: Exchanges) -> None:
        self.domains, self.handles, self.pool = work.domains, work.handles, work.pool
        self.exchanges = exchanges
        #: by domain, block, step and exchange
        self.sums: dict[tuple[DomainKey, int, int, int], Accumulator] = {}

    def accumulate(self, e: Accumulate) -> bool:
        """Whether the payload could be used; if not, the sum is not a number."""
        key = (e.domain, e.key, e.step, e.stage)
        if e.first:
            # A restarted round starts over; whatever was there belongs to an earlier attempt.
            self.sums[key] = Accumulator()
        acc = self.sums[key]
        if e.nonfinite:
            return True
        state = self.domains[e.domain].blocks[e.key]
        if e.codec == NONE_ID:
            if e.handle is not None:
                self._add_dense(acc, state, self.handles.table[e.handle])
            return True
        codec = by_id(e.codec, e.level)
        if codec.rounds > 1:
            return self.exchanges.add(acc, state, e, two_rounds(codec))
        if e.handle is not None:
            self._add_encoded(acc, state, self.handles.table[e.handle], codec)
        return True

    def _add_dense(self, acc: Accumulator, state: BlockState, payload: memoryview) -> None:
        dtype = state.block.dtype
        if dtype is DType.F32:
            x = np.frombuffer(payload, np.float32)
            if acc.base is None:
                acc.base = x
                return
            if acc.pending is not None:
                self._fold(acc)
            acc.pending = x
        elif acc.base is None:
            acc.base = np.empty(state.block.elements, reduce.accumulate_dtype(dtype))
            acc.owned = True
            reduce.load_copy(acc.base, as_bytes(payload), dtype)
        else:
            reduce.load_add(acc.base, as_bytes(payload), dtype)

    def _fold(self, acc: Accumulator) -> None:
        assert acc.base is not None
        assert acc.pending is not None
        if acc.owned:
            reduce.acc_add(acc.base, acc.pending)
        else:
            out = np.frombuffer(self.pool.take(acc.base.nbytes), np.float32)
            reduce.add2(out, acc.base, acc.pending)
            acc.base, acc.owned = out, True
        acc.pending = None

    def _add_encoded(self, acc: Accumulator, state: BlockState, payload: memoryview, codec: Codec) -> None:
        acc.unscaled = unscales(codec)
        if acc.base is None:
            acc.base = np.frombuffer(self.pool.take(state.block.elements * 4), np.float32)
            acc.owned = True
            codec.decode(as_bytes(payload), acc.base)
        else:
            codec.decode_add(as_bytes(payload), self._owned(acc))

    def _owned(self, acc: Accumulator) -> F32:
        """The sum in memory of its own: what it refers to may be a worker's input, which is never written."""
        if acc.pending is not None:
            self._fold(acc)
        if not acc.owned:
            assert acc.base is not None
            out = np.frombuffer(self.pool.take(acc.base.nbytes), np.float32)
            np.copyto(out, acc.base)
            acc.base, acc.owned = out, True
        return acc.base  # type: ignore[return-value]

    def finalise(self, e: Finalise) -> Finalised:
        """Accumulator to result; owner scheme: also the retained aggregate."""
        memory = self.domains[e.domain]
        state = memory.blocks[e.key]
        acc = self.sums.pop((e.domain, e.key, e.step, e.stage))
        if e.codec is not None and e.codec.rounds > 1:
            return self.exchanges.finalise(memory, state, e, acc)
        inverse = 1.0 / e.divisor
        if e.nonfinite or acc.base is None:
            fill_nan(state)
            return keep(self.handles, memory, e, memoryview(b""), True)
        if e.codec is None or e.codec.id == NONE_ID:
            bad = self._store(state, acc, inverse * state.loss_scale() if acc.unscaled else inverse)
            return keep(self.handles, memory, e, state.output, bad)
        codec = parse(e.codec.spec).at_owner()
        levels = levels_of(e)
        out = memory.make_kept(e.key, e.retain, codec.needed(state.bounds, levels))
        before = after = None
        if (use := state_use(codec, state)) is not None:
            before, after = memory.begin_states(e.key, e.step, (e.read, e.write), True, use)
        into = inverse if codec.units == "mean" else 1.0
        seed = codec_seed(e.seed)
        result = codec.encode(acc.base, before, after, as_bytes(out), state.bounds, into, seed, levels)
        if result.nonfinite:
            fill_nan(state)
            return keep(self.handles, memory, e, memoryview(b""), True)
        payload = out[: result.nbytes]
        if self._decode_into(state, payload, codec, 1.0 if codec.units == "mean" else inverse):
            fill_nan(state)
            return keep(self.handles, memory, e, memoryview(b""), True)
        return keep(self.handles, memory, e, payload, False)

    def _store(self, state: BlockState, acc: Accumulator, inverse: float) -> bool:
        """(base + pending) * inverse into the output slot; whether a result is not finite."""
        dtype = state.block.dtype
        assert acc.base is not None
        if dtype is not DType.F32:
            return store(state, state.output, acc.base, inverse)
        out = state.floats(state.output)
        if acc.pending is not None:
            return reduce.add2_scale(out, acc.base, acc.pending, inverse) > 0
        return reduce.scale_copy(out, acc.base, inverse) > 0

    def decode(self, e: Decode) -> None:
        """An owner's aggregate into the output slot."""
        state = self.domains[e.domain].blocks[e.key]
        if e.stage:
            if e.nonfinite or self.exchanges.decode(state, e):
                fill_nan(state)
            return
        if e.handle is None:
            fill_nan(state)
            return
        payload = self.handles.table[e.handle]
        if e.codec == NONE_ID:
            np.copyto(as_bytes(state.output), as_bytes(payload))
        else:
            self._decode_into(state, payload, by_id(e.codec, e.level), 1.0 / e.divisor)

    def _decode_into(self, state: BlockState, payload: memoryview, codec: Codec, scale: float) -> bool:
        """Whether a result is not finite, which only a narrow type can bring about."""
        if unscales(codec):
            scale *= state.loss_scale()
        if state.block.dtype is DType.F32:
            codec.decode(as_bytes(payload), state.floats(state.output), scale)
            return False
        wide = np.empty(state.block.elements, np.float32)
        codec.decode(as_bytes(payload), wide, scale)
        return store(state, state.output, wide, 1.0)

    def close(self, domain: DomainKey) -> None:
        for key in [k for k in self.sums if k[0] == domain]:
            del self.sums[key]
