"""Rounds of two exchanges: a codec whose second payload depends on the sum of the first.

What may live here: what a lane computes for them in either exchange, and the memory in between. What may not: the order
of the exchanges (`gcserver.core`), the codec's own arithmetic, rounds of one exchange (`encoding.py`, `averaging.py`).

A codec works in memory that ``begin`` fills and ``finish`` empties. None of it outlives the process: a restarted one
begins again from the same state and seed, which gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gcproto import wire
from gcproto.dtypes import DType
from gcproto.wire import Flag, Header
from gcserver.codecs import Codec, CodecError, parse
from gcserver.codecs.base import U32
from gcserver.codecs.base import Encoded as Result
from gcserver.codecs.tworounds import TwoRounds
from gcserver.core.effects import Accumulate, Decode, Encode, Finalise
from gcserver.core.events import DomainKey, Encoded, Finalised
from gcserver.core.plan import COMPRESSIBLE
from gcserver.runtime.blocks import F32, BlockState, DomainMemory
from gcserver.runtime.buffers import Accumulator, Workspace, as_bytes
from gcserver.runtime.contributions import node_sum, store
from gcserver.runtime.results import fill_nan, keep
from gcserver.runtime.states import codec_seed, levels_of, matrix_use


@dataclass(slots=True)
class Between:
    """What a round of two exchanges works with in one process, from ``begin`` to ``finish``."""

    codec: TwoRounds
    state_out: F32 | None
    work: F32
    levels: U32 | None


class Exchanges:
    """Arithmetic of these rounds on one lane. Methods raise MemoryShort where memory must be had first."""

    def __init__(self, work: Workspace) -> None:
        self.domains, self.handles, self.pool, self.wire_bytes = work.domains, work.handles, work.pool, work.wire_bytes
        #: by domain, block and step
        self.between: dict[tuple[DomainKey, int, int], Between] = {}

    def begin(self, e: Encode) -> Encoded:
        """The first of two contributions."""
        memory = self.domains[e.domain]
        state = memory.blocks[e.key]
        codec = two_rounds(parse(e.codec.spec))
        before = after = None
        if (use := matrix_use(codec, state)) is not None:
            before, after = memory.begin_states(e.key, e.step, (e.read, e.write), False, use)
        levels = levels_of(e)
        work = np.frombuffer(self.pool.take(4 * codec.work_floats(state.shapes, levels)), np.float32)
        self.between[e.domain, e.key, e.step] = Between(codec, after, work, levels)
        out = self.pool.take(codec.payload_bytes(0, state.shapes, levels))
        x = node_sum(self.pool, state)
        scale = 1.0 / state.loss_scale()
        seed = codec_seed(e.seed)
        result = codec.begin(x, before, after, work, as_bytes(out), state.bounds, state.shapes, scale, seed, levels)
        self.wire_bytes.setdefault(e.domain, {})[e.key] = 0
        return self._half(e, state, out, result)

    def middle(self, e: Encode) -> Encoded:
        """The second, from the sum of all first ones."""
        state = self.domains[e.domain].blocks[e.key]
        between = self.between[e.domain, e.key, e.step]
        codec, levels = between.codec, between.levels
        aggregate = self._floats_of(codec, self._payload(e.aggregate))
        if aggregate.size != codec.payload_floats(0, state.shapes, levels):
            # Not the sum of payloads such as ours: the owner hears of it as of a number that is not finite.
            return self._half(e, state, memoryview(b""), Result(0, 1))
        out = self.pool.take(codec.payload_bytes(1, state.shapes, levels))
        where = between.state_out, between.work, as_bytes(out), state.bounds, state.shapes, levels
        return self._half(e, state, out, codec.middle(aggregate, *where))

    def _half(self, e: Encode, state: BlockState, out: memoryview, result: Result) -> Encoded:
        nonfinite = result.nonfinite > 0
        payload = out[: 0 if nonfinite else result.nbytes]
        stays = state.block.owner == self.domains[e.domain].config.me
        digest = 0 if stays else wire.digest(payload)
        self.wire_bytes[e.domain][e.key] += len(payload)
        handle = self.handles.add(payload) if len(payload) else None
        return Encoded(e.domain, e.key, e.step, handle, len(payload), digest, nonfinite, e.stage)

    def _payload(self, handle: int | None) -> memoryview:
        return memoryview(b"") if handle is None else self.handles.table[handle]

    def _floats_of(self, codec: TwoRounds, payload: memoryview) -> F32:
        """The vector of a payload that was checked, or is our own."""
        if codec.plain:
            return np.frombuffer(payload, np.float32)
        data = as_bytes(payload)
        x = np.frombuffer(self.pool.take(4 * codec.floats_in(data)), np.float32)
        codec.decode(data, x)
        return x

    def add(self, acc: Accumulator, state: BlockState, e: Accumulate, codec: TwoRounds) -> bool:
        """Either payload of two exchanges. How long it must be depends on levels that are not known before this node
        has decided: all are as long as the first, and `finalise` sees whether that was right."""
        payload = as_bytes(self._payload(e.handle))
        between = self.between.get((e.domain, e.key, e.step))
        try:
            n = codec.floats_in(payload)
            if between is not None and n != (wanted := codec.payload_floats(e.stage, state.shapes, between.levels)):
                raise CodecError("payload", f"of {wanted} elements", n)
            if acc.base is None:
                acc.base = np.frombuffer(self.pool.take(4 * n), np.float32)
                acc.owned = True
                codec.decode(payload, acc.base)
            else:
                codec.decode_add(payload, acc.base)
        except CodecError:
            acc.poisoned = True
            return False
        return True

    def finalise(self, memory: DomainMemory, state: BlockState, e: Finalise, acc: Accumulator) -> Finalised:
        """The sum of one of two exchanges as its owner sends it; of the second also the result."""
        assert e.codec is not None
        codec, levels = two_rounds(parse(e.codec.spec)), levels_of(e)
        total = None if e.nonfinite or acc.poisoned else acc.base
        if total is not None and total.size == codec.payload_floats(e.stage, state.shapes, levels):
            nbytes = codec.payload_bytes(e.stage, state.shapes, levels)
            out = memory.make_kept(e.key, e.retain, max(nbytes, 4))[:nbytes]
            # One pass: the copy counts what is not finite.
            bad = total.size > 0 and codec.store(e.stage, total, as_bytes(out), state.shapes, levels) > 0
            if not bad and e.stage:
                bad = self._finish(state, e, self._floats_of(codec, out), e.divisor, total)
            if not bad:
                return keep(self.handles, memory, e, out, False)
        fill_nan(state)
        return keep(self.handles, memory, e, memoryview(b""), True)

    def _finish(
        self, state: BlockState, e: Finalise | Decode, aggregate: F32, divisor: int, exact: F32 | None = None
    ) -> bool:
        """The second sum as the result into the output slot; whether it is not finite. exact: as its owner added it
        up."""
        b = self.between.pop((e.domain, e.key, e.step))
        narrow = state.block.dtype is not DType.F32
        out = np.empty(state.block.elements, np.float32) if narrow else state.floats(state.output)
        per = divisor / state.loss_scale()
        where = b.state_out, b.work, out, state.bounds, state.shapes
        bad = b.codec.finish(aggregate, *where, per, b.levels, exact) > 0
        return store(state, state.output, out, 1.0) or bad if narrow else bad

    def decode(self, state: BlockState, e: Decode) -> bool:
        """The second sum, as its owner sent it, into the output slot; whether it is not finite or of another length."""
        between = self.between[e.domain, e.key, e.step]
        aggregate = self._floats_of(between.codec, self._payload(e.handle))
        if aggregate.size != between.codec.payload_floats(1, state.shapes, between.levels):
            return True
        return self._finish(state, e, aggregate, e.divisor)

    def check(self, h: Header, codec: TwoRounds, payload: memoryview | None) -> None:
        """A payload of two exchanges: of some length that its block's can have, where that is known.

        The plan's levels fix it; what is as long as other levels would have it makes the round void (`add`).
        """
        if h.dtype not in COMPRESSIBLE:
            raise CodecError("dtype", [d.name for d in COMPRESSIBLE], h.dtype)
        memory = self.domains.get((h.job, h.domain))
        state = memory.blocks.get(h.key) if memory is not None else None
        low, high = 0, h.elements
        if state is not None:
            stage = 1 if h.flags & Flag.SECOND else 0
            low, high = codec.payload_range(stage, state.shapes)
        n = codec.floats_in(as_bytes(memoryview(b"") if payload is None else payload))
        if not low <= n <= high:
            raise CodecError("payload", f"of {low}..{high} elements", n)

    def close(self, domain: DomainKey) -> None:
        for key in [k for k in self.between if k[0] == domain]:
            del self.between[key]


def two_rounds(codec: Codec) -> TwoRounds:
    """The same, known to be such a codec."""
    assert isinstance(codec, TwoRounds)
    return codec
