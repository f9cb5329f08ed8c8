"""Carries out the lane machine's arithmetic: encode, accumulate, finalise, decode.

What may live here: which kernel runs over which memory, and the table of payload handles. What may not:
decisions of the protocol (`gcserver.core`), kernels themselves (`gcserver.codecs`), sockets.

Passes over memory are what counts. A dense contribution of a single local rank is sent straight from the
arena; accumulating keeps references until two operands are there and adds them in one pass, the last of
them fused with the divisor and the store into the output slot; a compressed payload is decoded and added in
one pass.

A codec of two exchanges works in memory that ``begin`` fills and ``finish`` empties. None of it outlives the process:
a restarted one begins again from the same state and seed, which gives the same bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcproto import slots, wire
from gcproto.dtypes import DType
from gcproto.wire import Flag, Header
from gcserver.codecs import Codec, CodecError, by_id, parse, reduce
from gcserver.codecs.base import Encoded as Result
from gcserver.codecs.tworounds import TwoRounds
from gcserver.core.effects import Accumulate, CommitOutput, Decode, Encode, Finalise
from gcserver.core.events import DomainKey, Encoded, Finalised, Retained
from gcserver.core.plan import COMPRESSIBLE
from gcserver.runtime.blocks import BlockState, DomainMemory, StateUse

NONE_ID = 0
F32 = NDArray[np.float32]


class Pool:
    """Reusable buffers; one returns by itself when nothing refers to its memory any more."""

    def __init__(self, keep_bytes: int = 256 << 20) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._kept = 0
        self._keep_bytes = keep_bytes

    def take(self, size: int) -> memoryview:
        """``size`` bytes of unspecified content."""
        rounded = max(4096, 1 << (max(size, 1) - 1).bit_length())
        stack = self._free.get(rounded)
        if stack:
            base = stack.pop()
            self._kept -= rounded
        else:
            base = np.empty(rounded, np.uint8)
        # numpy collapses chains of views to the owner, so the thing whose end we watch is an array object
        # that only the memoryview (and whatever is cut from it) refers to.
        watched = base[:]
        weakref.finalize(watched, self._give, base)
        return memoryview(watched)[:size]  # type: ignore[arg-type]

    def _give(self, base: NDArray[np.uint8]) -> None:
        if self._kept + base.nbytes <= self._keep_bytes:
            self._free.setdefault(base.nbytes, []).append(base)
            self._kept += base.nbytes


@dataclass(slots=True)
class Accumulator:
    """Sum so far of one round: an own buffer, or references to one or two operands not yet added."""

    base: NDArray[Any] | None = None
    owned: bool = False
    pending: NDArray[Any] | None = None
    #: the sum lacks the loss scale that the result has to carry
    unscaled: bool = False
    #: a payload had the wrong length: there is no sum
    poisoned: bool = False


@dataclass(slots=True)
class Handles:
    """Payloads by the number the machine knows them by."""

    table: dict[int, memoryview] = field(default_factory=dict)
    last: int = 0

    def add(self, payload: memoryview) -> int:
        self.last += 1
        self.table[self.last] = payload
        return self.last

    def release(self, handle: int) -> None:
        del self.table[handle]


@dataclass(slots=True)
class Between:
    """What a round of two exchanges works with in one process, from ``begin`` to ``finish``."""

    codec: TwoRounds
    state_out: F32 | None
    work: F32


class Executor:
    """Arithmetic of one lane. Methods raise MemoryShort where memory must be had first."""

    def __init__(self) -> None:
        self.handles = Handles()
        self.domains: dict[DomainKey, DomainMemory] = {}
        self.pool = Pool()
        self._sums: dict[tuple[DomainKey, int, int, int], Accumulator] = {}
        self._between: dict[tuple[DomainKey, int, int], Between] = {}
        #: payload bytes of each block's newest contribution
        self.wire_bytes: dict[DomainKey, dict[int, int]] = {}

    # ---------------------------------------------------------------------------------------- encode
    def encode(self, e: Encode) -> Encoded:
        """The node's contribution: local ranks summed in rank order, then encoded."""
        if e.codec.rounds > 1:
            return self._begin(e) if e.stage == 0 else self._middle(e)
        memory = self.domains[e.domain]
        state = memory.blocks[e.key]
        retained = None
        if e.codec.id == NONE_ID:
            payload = self._dense_contribution(state)
            if e.retain is not None:
                kept = memory.make_kept(e.key, e.retain, len(payload))
                kept[:] = payload
                payload = retained = kept
            nonfinite = False
        else:
            codec = parse(e.codec.spec)
            x = self._node_sum(state)
            bound = codec.max_bytes(state.block.elements, len(state.bounds) - 1)
            out = memory.make_kept(e.key, e.retain, bound) if e.retain is not None else self.pool.take(bound)
            before = after = None
            if (use := state_use(codec, state)) is not None:
                before = memory.state(e.key, e.read, False, use)
                after = memory.state(e.key, e.write, False, use)
                memory.begin_write(e.key, e.step, False)
            scale = self._scale(state) if unscales(codec) else 1.0
            result = codec.encode(x, before, after, _bytes(out), state.bounds, 1.0 / scale, e.seed & (1 << 62) - 1)
            # A loss scaler must see that fp16 was not wide enough, or it never backs off.
            clipped = result.saturated > 0 and self._scale(state) != 1.0
            nonfinite = result.nonfinite > 0 or clipped
            payload = out[: 0 if nonfinite else result.nbytes]
            retained = payload if e.retain is not None else None
        # What stays on this node is never hashed.
        stays = e.retain is None and state.block.owner == memory.config.me
        digest = 0 if stays else wire.digest(payload)
        self.wire_bytes.setdefault(e.domain, {})[e.key] = len(payload)
        handle = self.handles.add(payload) if len(payload) else None
        if e.retain is not None and retained is not None:
            flags = e.flags | Flag.ALL | (Flag.NONFINITE if nonfinite else 0)
            memory.commit_kept(
                e.key,
                e.retain,
                Retained(
                    e.step, e.retain, None, len(payload), digest, e.codec.id, e.codec.level, int(flags), e.proposal
                ),
            )
        return Encoded(e.domain, e.key, e.step, handle, len(payload), digest, nonfinite)

    def _begin(self, e: Encode) -> Encoded:
        """The first of two contributions."""
        memory = self.domains[e.domain]
        state = memory.blocks[e.key]
        codec = _two_rounds(parse(e.codec.spec))
        before = after = None
        if (use := matrix_use(codec, state)) is not None:
            before = memory.state(e.key, e.read, False, use)
            after = memory.state(e.key, e.write, False, use)
            memory.begin_write(e.key, e.step, False)
        work = np.frombuffer(self.pool.take(4 * codec.work_floats(state.shapes)), np.float32)
        self._between[e.domain, e.key, e.step] = Between(codec, after, work)
        out = self.pool.take(4 * codec.payload_floats(0, state.shapes))
        x = self._node_sum(state)
        scale = 1.0 / self._scale(state)
        seed = e.seed & (1 << 62) - 1
        result = codec.begin(x, before, after, work, _bytes(out), state.bounds, state.shapes, scale, seed)
        self.wire_bytes.setdefault(e.domain, {})[e.key] = 0
        return self._half(e, state, out, result)

    def _middle(self, e: Encode) -> Encoded:
        """The second, from the sum of all first ones."""
        state = self.domains[e.domain].blocks[e.key]
        between = self._between[e.domain, e.key, e.step]
        codec = between.codec
        out = self.pool.take(4 * codec.payload_floats(1, state.shapes))
        aggregate = self._floats_of(e.aggregate)
        result = codec.middle(aggregate, between.state_out, between.work, _bytes(out), state.bounds, state.shapes)
        return self._half(e, state, out, result)

    def _half(self, e: Encode, state: BlockState, out: memoryview, result: Result) -> Encoded:
        nonfinite = result.nonfinite > 0
        payload = out[: 0 if nonfinite else result.nbytes]
        stays = state.block.owner == self.domains[e.domain].config.me
        digest = 0 if stays else wire.digest(payload)
        self.wire_bytes[e.domain][e.key] += len(payload)
        handle = self.handles.add(payload) if len(payload) else None
        return Encoded(e.domain, e.key, e.step, handle, len(payload), digest, nonfinite, e.stage)

    def _floats_of(self, handle: int | None) -> F32:
        """A payload of plain float32; without a handle it is empty."""
        return np.frombuffer(b"" if handle is None else self.handles.table[handle], np.float32)

    def _dense_contribution(self, state: BlockState) -> memoryview:
        if len(state.inputs) == 1:
            return state.inputs[0]
        out = self.pool.take(state.block.nbytes)
        if state.block.dtype is DType.F32:
            reduce.sum_ranks(np.frombuffer(out, np.float32), [state.floats(i) for i in state.inputs])
        else:
            reduce.store(_bytes(out), self._typed_sum(state), state.block.dtype, 1.0)
        return out

    def _typed_sum(self, state: BlockState) -> NDArray[Any]:
        dtype = state.block.dtype
        acc = np.empty(state.block.elements, reduce.accumulate_dtype(dtype))
        reduce.load_copy(acc, _bytes(state.inputs[0]), dtype)
        for more in state.inputs[1:]:
            reduce.load_add(acc, _bytes(more), dtype)
        return acc

    def _node_sum(self, state: BlockState) -> F32:
        """The local ranks' sum as float32[elements], for compression."""
        if state.block.dtype is not DType.F32:
            return self._typed_sum(state)
        if len(state.inputs) == 1:
            return state.floats(state.inputs[0])
        out = np.frombuffer(self.pool.take(state.block.nbytes), np.float32)
        reduce.sum_ranks(out, [state.floats(i) for i in state.inputs])
        return out

    def _scale(self, state: BlockState) -> float:
        """The loss scale the gradients carry; residuals are kept without it."""
        scale = slots.pushed(state.arena, state.slot, 0)[2]
        return scale if np.isfinite(scale) and scale > 0 else 1.0

    # ------------------------------------------------------------------------------------ accumulate
    def accumulate(self, e: Accumulate) -> bool:
        """Whether the payload could be used; if not, the sum is not a number."""
        key = (e.domain, e.key, e.step, e.stage)
        if e.first:
            # A restarted round starts over; whatever was there belongs to an earlier attempt.
            self._sums[key] = Accumulator()
        acc = self._sums[key]
        if e.nonfinite:
            return True
        state = self.domains[e.domain].blocks[e.key]
        if e.codec == NONE_ID:
            if e.handle is not None:
                self._add_dense(acc, state, self.handles.table[e.handle])
            return True
        codec = by_id(e.codec, e.level)
        if codec.rounds > 1:
            return self._add_floats(acc, state, e, _two_rounds(codec))
        if e.handle is not None:
            self._add_encoded(acc, state, self.handles.table[e.handle], codec)
        return True

    def _add_floats(self, acc: Accumulator, state: BlockState, e: Accumulate, codec: TwoRounds) -> bool:
        """Either payload of two exchanges. Its length could not be checked when it came before its block was known."""
        payload = memoryview(b"") if e.handle is None else self.handles.table[e.handle]
        n = codec.payload_floats(e.stage, state.shapes)
        if len(payload) != 4 * n:
            acc.poisoned = True
            return False
        if acc.base is None:
            acc.base = np.frombuffer(self.pool.take(4 * n), np.float32)
            acc.owned = True
            if n:
                codec.decode(_bytes(payload), acc.base)
        elif n:
            codec.decode_add(_bytes(payload), acc.base)
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
            reduce.load_copy(acc.base, _bytes(payload), dtype)
        else:
            reduce.load_add(acc.base, _bytes(payload), dtype)

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
            codec.decode(_bytes(payload), acc.base)
        else:
            codec.decode_add(_bytes(payload), self._owned(acc))

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

    # -------------------------------------------------------------------------------------- finalise
    def finalise(self, e: Finalise) -> Finalised:
        """Accumulator to result; owner scheme: also the retained aggregate."""
        memory = self.domains[e.domain]
        state = memory.blocks[e.key]
        acc = self._sums.pop((e.domain, e.key, e.step, e.stage))
        if e.codec is not None and e.codec.rounds > 1:
            return self._finalise_floats(memory, state, e, acc)
        inverse = 1.0 / e.divisor
        if e.nonfinite or acc.base is None:
            _fill_nan(state)
            return self._keep(memory, state, e, memoryview(b""), True)
        if e.codec is None or e.codec.id == NONE_ID:
            bad = self._store(state, acc, inverse * self._scale(state) if acc.unscaled else inverse)
            if e.codec is None:
                return Finalised(e.domain, e.key, e.step, None, 0, 0, bad > 0)
            return self._keep(memory, state, e, state.output, bad > 0)
        codec = parse(e.codec.spec).at_owner()
        bound = codec.max_bytes(state.block.elements, len(state.bounds) - 1)
        out = memory.make_kept(e.key, e.retain, bound)
        before = after = None
        if (use := state_use(codec, state)) is not None:
            before = memory.state(e.key, e.read, True, use)
            after = memory.state(e.key, e.write, True, use)
            memory.begin_write(e.key, e.step, True)
        into = inverse if codec.units == "mean" else 1.0
        result = codec.encode(acc.base, before, after, _bytes(out), state.bounds, into, e.seed & (1 << 62) - 1)
        if result.nonfinite:
            _fill_nan(state)
            return self._keep(memory, state, e, memoryview(b""), True)
        payload = out[: result.nbytes]
        self._decode_into(state, payload, codec, 1.0 if codec.units == "mean" else inverse)
        return self._keep(memory, state, e, payload, False)

    def _finalise_floats(self, memory: DomainMemory, state: BlockState, e: Finalise, acc: Accumulator) -> Finalised:
        """The plain sum of one of two exchanges; of the second also the result."""
        bad = e.nonfinite or acc.poisoned or acc.base is None
        if not bad:
            assert acc.base is not None
            nbytes = acc.base.nbytes
            out = memory.make_kept(e.key, e.retain, max(nbytes, 4))[:nbytes]
            # One pass: the copy counts what is not finite.
            if acc.base.size:
                bad = reduce.scale_copy(np.frombuffer(out, np.float32), acc.base, 1.0) > 0
            if not bad and e.stage:
                bad = self._finish(state, e, np.frombuffer(out, np.float32), e.divisor)
            if not bad:
                return self._keep(memory, state, e, out, False)
        _fill_nan(state)
        return self._keep(memory, state, e, memoryview(b""), True)

    def _finish(self, state: BlockState, e: Finalise | Decode, aggregate: F32, divisor: int) -> bool:
        """The second sum as the result into the output slot; whether it is not finite."""
        b = self._between.pop((e.domain, e.key, e.step))
        narrow = state.block.dtype is not DType.F32
        out = np.empty(state.block.elements, np.float32) if narrow else state.floats(state.output)
        per = divisor / self._scale(state)
        bad = b.codec.finish(aggregate, b.state_out, b.work, out, state.bounds, state.shapes, per)
        if narrow:
            bad += reduce.store(_bytes(state.output), out, state.block.dtype, 1.0)
        return bad > 0

    def _store(self, state: BlockState, acc: Accumulator, inverse: float) -> int:
        """(base + pending) * inverse into the output slot; returns the number of non-finite results."""
        dtype = state.block.dtype
        assert acc.base is not None
        if dtype is not DType.F32:
            return reduce.store(_bytes(state.output), acc.base, dtype, inverse)
        out = state.floats(state.output)
        if acc.pending is not None:
            return reduce.add2_scale(out, acc.base, acc.pending, inverse)
        return reduce.scale_copy(out, acc.base, inverse)

    def _keep(self, memory: DomainMemory, state: BlockState, e: Finalise, payload: memoryview, bad: bool) -> Finalised:
        if e.codec is None:
            return Finalised(e.domain, e.key, e.step, None, 0, 0, bad)
        digest = wire.digest(payload)
        flags = e.flags | (Flag.NONFINITE if bad else 0) | (Flag.SUM_UNITS if e.codec.sum_units else 0)
        memory.commit_kept(
            e.key,
            e.retain,
            Retained(e.step, e.retain, None, len(payload), digest, e.codec.id, e.codec.level, int(flags), e.proposal),
        )
        handle = self.handles.add(payload) if len(payload) else None
        return Finalised(e.domain, e.key, e.step, handle, len(payload), digest, bad, e.stage)

    # ---------------------------------------------------------------------------------------- decode
    def decode(self, e: Decode) -> None:
        """An owner's aggregate into the output slot."""
        state = self.domains[e.domain].blocks[e.key]
        if e.stage:
            if e.nonfinite or self._finish_here(state, e):
                _fill_nan(state)
            return
        if e.handle is None:
            _fill_nan(state)
            return
        payload = self.handles.table[e.handle]
        if e.codec == NONE_ID:
            np.copyto(_bytes(state.output), _bytes(payload))
        else:
            self._decode_into(state, payload, by_id(e.codec, e.level), 1.0 / e.divisor)

    def _finish_here(self, state: BlockState, e: Decode) -> bool:
        aggregate = self._floats_of(e.handle)
        codec = self._between[e.domain, e.key, e.step].codec
        if aggregate.size != codec.payload_floats(1, state.shapes):
            return True
        return self._finish(state, e, aggregate, e.divisor)

    def _decode_into(self, state: BlockState, payload: memoryview, codec: Codec, scale: float) -> None:
        if unscales(codec):
            scale *= self._scale(state)
        if state.block.dtype is DType.F32:
            codec.decode(_bytes(payload), state.floats(state.output), scale)
            return
        wide = np.empty(state.block.elements, np.float32)
        codec.decode(_bytes(payload), wide, scale)
        reduce.store(_bytes(state.output), wide, state.block.dtype, 1.0)

    def commit_output(self, e: CommitOutput) -> None:
        state = self.domains[e.domain].blocks[e.key]
        flags = int(Flag.NONFINITE) if e.nonfinite else 0
        slots.commit_output(state.arena, state.slot, e.step, flags, e.proposal)
        # What a round that ended early, or again after a restart, left behind.
        self._between.pop((e.domain, e.key, e.step), None)
        for stage in (0, 1):
            self._sums.pop((e.domain, e.key, e.step, stage), None)

    # ------------------------------------------------------------------------------- frames, restart
    def check(self, h: Header, payload: memoryview | None) -> None:
        """Whether a frame's payload will decode. Raises CodecError; afterwards decoding cannot fail."""
        codec = by_id(h.codec, h.level)
        if codec.rounds > 1 and not h.flags & Flag.NONFINITE:
            self._check_floats(h, _two_rounds(codec), 0 if payload is None else len(payload))
            return
        if h.flags & Flag.SECOND and codec.rounds == 1:
            raise CodecError("flags", f"no second exchange ({codec.name} takes one)", f"{h.flags:#x}")
        if payload is None or not len(payload):
            if h.elements and not h.flags & Flag.NONFINITE:
                raise CodecError("payload.nbytes", "some", 0)
            return
        if h.codec == NONE_ID:
            size = h.elements * DType(h.dtype).itemsize
            if len(payload) != size:
                raise CodecError("payload.nbytes", size, len(payload))
        else:
            if h.dtype not in COMPRESSIBLE:
                raise CodecError("dtype", [d.name for d in COMPRESSIBLE], h.dtype)
            codec.check(_bytes(payload), h.elements)

    def _check_floats(self, h: Header, codec: TwoRounds, nbytes: int) -> None:
        """A payload of two exchanges: exactly as long as its block's must be, where that is known."""
        if h.dtype not in COMPRESSIBLE:
            raise CodecError("dtype", [d.name for d in COMPRESSIBLE], h.dtype)
        memory = self.domains.get((h.job, h.domain))
        state = memory.blocks.get(h.key) if memory is not None else None
        if state is not None:
            wanted = 4 * codec.payload_floats(1 if h.flags & Flag.SECOND else 0, state.shapes)
            if nbytes != wanted:
                raise CodecError("payload.nbytes", wanted, nbytes)
        elif nbytes % 4 or nbytes > 4 * h.elements:
            raise CodecError("payload.nbytes", f"a multiple of 4, at most {4 * h.elements}", nbytes)

    def retained_handle(self, memory: DomainMemory, key: int, kept: Retained) -> int | None:
        """A handle for a payload that an earlier life retained."""
        if not kept.nbytes:
            return None
        if kept.codec == NONE_ID and not kept.flags & Flag.ALL:
            return self.handles.add(memory.blocks[key].output)
        return self.handles.add(memory.kept(key, kept.slot, kept.nbytes))

    def facts(self, domain: DomainKey) -> Iterator[tuple[int, int, float]]:
        """(key, payload bytes of the newest contribution, squared norm of the settled residual) of each block.

        Reads a residual at every step, so the caller may do other things in between; ends when the domain does.
        """
        memory = self.domains.get(domain)
        sizes = self.wire_bytes.get(domain, {})
        for key in tuple(memory.blocks) if memory is not None else ():
            if memory is None or self.domains.get(domain) is not memory:
                return
            yield key, sizes.get(key, 0), memory.residual_square(key)

    def close(self, domain: DomainKey) -> None:
        self.domains.pop(domain, None)
        self.wire_bytes.pop(domain, None)
        for key in [k for k in self._sums if k[0] == domain]:
            del self._sums[key]
        for begun in [k for k in self._between if k[0] == domain]:
            del self._between[begun]


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
    return StateUse(floats, codec.error_feedback, wire.digest(f"{codec.name}/{codec.level}/{floats}".encode()))


def _two_rounds(codec: Codec) -> TwoRounds:
    assert isinstance(codec, TwoRounds)
    return codec


def _bytes(view: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(view, np.uint8)


def _fill_nan(state: BlockState) -> None:
    """ "Not a number everywhere", in the block's own type (integers cannot say it and are never asked to)."""
    nan = np.full(1, np.nan, np.float32)
    dtype = state.block.dtype
    if dtype is DType.F64:
        np.frombuffer(state.output, np.float64)[:] = np.nan
    elif dtype is DType.F32:
        state.floats(state.output)[:] = nan
    elif dtype in (DType.F16, DType.BF16):
        np.frombuffer(state.output, np.uint16)[:] = 0x7E00 if dtype is DType.F16 else 0x7FC0
