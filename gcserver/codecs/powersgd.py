"""powersgd: a gradient matrix as the product of two thin ones (Vogels et al. 2019, algorithm 1), in two rounds.

What may live here: the codec. Where its pieces lie in payloads, state and scratch, and the kernels that walk over
segments are `powersgd_kernels`', 16-bit payloads `factors`', the interface of two rounds is `tworounds`'.

One step, on every node, for a matrix V (rows x cols, gradient plus residual) and the warm Q (cols x rank):
    begin   P = V Q                              -> payload 0; all nodes' P are summed
    middle  P^ = orthonormalise(sum P)           Q = V^T P^ -> payload 1; all nodes' Q are summed
    finish  result = P^ (sum Q)^T / divisor      residual = V - P^ Q^T      warm Q = sum Q
Both payloads are vectors of float32 and sum like uncompressed gradients (in member order): P and Q are
all-reducible. P^, the result and the warm Q come from summed bytes alone, by arithmetic whose order is fixed,
so all nodes hold the same ones.

With values=16 P and Q travel as bfloat16 (`factors`). What that rounds off a node's Q stays in its residual, what it
rounds off the sum of Q in its owner's; of P nothing need be kept, since any basis will do that all nodes have alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gcserver.codecs.base import F32, I64, U8, U32, Codec, CodecError, Encoded, Param, register
from gcserver.codecs.factors import HEAD, RULES, narrow_apply, narrow_bytes, narrow_floats, narrow_write
from gcserver.codecs.jit import address, f32_address, u8_address
from gcserver.codecs.powersgd_kernels import Layout, layout, powersgd_begin, powersgd_finish, powersgd_middle
from gcserver.codecs.tworounds import Shape, TwoRounds

RANKS = (1, 64)
#: the level of a segment that is sent as it is: larger than any rank at which one could be compressed
WHOLE = RANKS[1] + 1
#: set in the level of frames whose P and Q are 16 bits an element; the rest of it is the rank
NARROW = 1 << 8


@register
class PowerSgd(TwoRounds):
    """Rank-r approximation with a warm start and error feedback; vectors and small matrices are sent as they are.

    A segment is compressed where 2*rank*(rows + cols) < rows*cols. Its level is its own rank, up to the codec's, or
    WHOLE.
    """

    id, name = 64, "powersgd"
    params = (
        Param("rank", 4, *RANKS, "columns of P and Q", integer=True),
        Param("values", "32", 0, 0, "bits an element of P and Q is sent in", words=("32", "16")),
    )
    keeps_residual = True
    units = "sum"
    conserves = True
    levels = RANKS
    exact = WHOLE
    rules = RULES

    rank: int

    def configure(self, rank: float = 4, values: str = "32") -> None:
        self.rank, self.plain = int(rank), values == "32"
        self.level = self.rank | (0 if self.plain else NARROW)
        #: of single segments: their state has room for the codec's rank
        self.levels = (RANKS[0], self.rank)  # type: ignore[misc]

    def values(self) -> dict[str, float | str]:
        return {"rank": self.rank} if self.plain else {"rank": self.rank, "values": "16"}

    @property
    def own_level(self) -> int:
        return self.rank

    @classmethod
    def from_level(cls, level: int) -> Codec:
        rank = level & ~NARROW
        if not RANKS[0] <= rank <= RANKS[1]:
            wanted = f"{RANKS[0]}..{RANKS[1]} for powersgd (the rank), with {NARROW} added for values of 16 bits"
            raise CodecError("level", wanted, level)
        return cls(rank=rank, values="16" if level & NARROW else "32")

    def payload_floats(self, stage: int, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        return self._layout(shapes, levels).sent(stage)[0]

    def payload_bytes(self, stage: int, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        return self._bytes(stage, self._layout(shapes, levels))

    def _bytes(self, stage: int, where: Layout) -> int:
        n, whole = where.sent(stage)
        return 4 * n if self.plain else narrow_bytes(n, whole)

    def max_bytes(self, n: int, segments: int = 1) -> int:
        return super().max_bytes(n, segments) + (0 if self.plain else HEAD)

    def floats_in(self, payload: U8) -> int:
        return super().floats_in(payload) if self.plain else narrow_floats(payload)

    def store(self, stage: int, x: F32, out: U8, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        if self.plain:
            return super().store(stage, x, out, shapes, levels)
        where = self._layout(shapes, levels)
        source = f32_address("x", x, where.sent(stage)[0])
        return self._write(stage, source, u8_address("out", out, self._bytes(stage, where), write=True), where)

    def _write(self, stage: int, x: int, out: int, where: Layout) -> int:
        """The payload of 16 bits at ``out`` from the vector at ``x``; its non-finite elements."""
        n, whole = where.sent(stage)
        return int(narrow_write(x, out, n, whole)) if n else 0

    def apply(self, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int) -> int:
        if self.plain:
            return super().apply(payload, nbytes, out, n, scale, mode)
        return int(narrow_apply(payload, nbytes, out, n, scale, mode))

    def work_floats(self, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        """What P^, the sums of uncompressed segments and the node's own Q take; without error feedback V too, and with
        16 bits an element what is sent before it is rounded."""
        return self._floats(self._layout(shapes, levels))

    def state_floats(self, n: int, segments: int = 1, shapes: Sequence[Shape] | None = None) -> int:
        """The residual, then the warm Q of each segment (room for the codec's rank; below n/2 together)."""
        residual = n if self.error_feedback else 0
        return residual + (n // 2 if shapes is None else self._layout(shapes, None).state)

    def _layout(self, shapes: Sequence[Shape], levels: U32 | None) -> Layout:
        if levels is None:
            return layout(tuple(shapes), self.rank, None, not self.plain)
        address("levels", levels, np.dtype(np.uint32), len(shapes))
        ranks = tuple(levels.tolist())
        wrong = [r for r in ranks if not RANKS[0] <= r <= self.rank and r != WHOLE]
        if wrong or len(ranks) != len(shapes):
            wanted = f"ranks up to the codec's, {self.rank}, or {WHOLE} for what is sent whole, one a segment"
            raise CodecError("levels", wanted, wrong[0] if wrong else f"{len(ranks)} for {len(shapes)} segments")
        return layout(tuple(shapes), self.rank, ranks, not self.plain)

    def _open(self, segments: I64, shapes: Sequence[Shape], levels: U32 | None) -> Layout:
        where = self._layout(shapes, levels)
        bounds = [0]
        for rows, cols in shapes:
            if rows < 0 or cols < 0:
                raise CodecError("shapes", "(rows, cols), neither negative", (rows, cols))
            bounds.append(bounds[-1] + (rows * cols if cols else rows))
        if segments is None or segments.tolist() != bounds:
            got = None if segments is None else segments[:8].tolist()
            raise CodecError("segments", f"the boundaries of the shapes, {bounds[:8]}", got)
        return where

    def _before(self, where: Layout) -> int:
        """float32 of scratch before the vectors that are sent in 16 bits."""
        return where.work + (0 if self.error_feedback else where.n)

    def _floats(self, where: Layout) -> int:
        return self._before(where) + (0 if self.plain else max(where.pay0, where.pay1))

    def _memory(self, where: Layout, state_out: F32 | None, work: F32) -> tuple[int, int, int]:
        """Addresses of V, of the warm Q to write, and of what work holds besides V."""
        scratch = address("work", work, np.dtype(np.float32), self._floats(where), write=True)
        kept = where.state + (where.n if self.error_feedback else 0)
        if state_out is None:
            if self.error_feedback:
                raise CodecError("state_out", f"float32[{kept}]", "None", "V lies in it between the rounds")
            return scratch + 4 * where.work, 0, scratch
        state = f32_address("state_out", state_out, kept, write=True)
        if self.error_feedback:
            return state, state + 4 * where.n, scratch
        return scratch + 4 * where.work, state, scratch

    def begin(
        self,
        x: F32,
        state_in: F32 | None,
        state_out: F32 | None,
        work: F32,
        out: U8,
        segments: I64,
        shapes: Sequence[Shape],
        scale: float = 1.0,
        seed: int = 0,
        levels: U32 | None = None,
    ) -> Encoded:
        where = self._open(segments, shapes, levels)
        px = f32_address("x", x, where.n)
        v, new, scratch = self._memory(where, state_out, work)
        residual = warm = 0
        if state_in is not None:
            start = f32_address("state_in", state_in, where.state + (where.n if self.error_feedback else 0))
            residual, warm = (start, start + 4 * where.n) if self.error_feedback else (0, start)
            if state_in.size and state_out is not None and start == min(v, new):
                raise CodecError("state_out", "memory of its own (versions, not updates in place)", "an input's")
        target, wide = self._target(0, out, scratch, where)
        m = len(shapes)
        bad = powersgd_begin(
            px, residual, v, warm, scratch, wide, where.table.ctypes.data, m, float(scale), float(self.decay), seed
        )
        return self._encoded(0, target, wide, where, bad)

    def _target(self, stage: int, out: U8, scratch: int, where: Layout) -> tuple[int, int]:
        """Addresses of the payload and of the vector that it is made of, which may be the same."""
        target = u8_address("out", out, self._bytes(stage, where), write=True)
        return target, target if self.plain else scratch + 4 * self._before(where)

    def _encoded(self, stage: int, target: int, wide: int, where: Layout, bad: int) -> Encoded:
        """The payload at ``target``, made of the vector at ``wide`` if that is elsewhere."""
        if target != wide:
            self._write(stage, wide, target, where)
        return Encoded(self._bytes(stage, where), bad)

    def middle(
        self,
        aggregate: F32,
        state_out: F32 | None,
        work: F32,
        out: U8,
        segments: I64,
        shapes: Sequence[Shape],
        levels: U32 | None = None,
    ) -> Encoded:
        where = self._open(segments, shapes, levels)
        v, _, scratch = self._memory(where, state_out, work)
        source = f32_address("aggregate", aggregate, where.pay0)
        target, wide = self._target(1, out, scratch, where)
        table = where.table.ctypes.data
        bad = powersgd_middle(source, v, scratch, wide, table, len(shapes), not self.plain)
        return self._encoded(1, target, wide, where, bad)

    def finish(
        self,
        aggregate: F32,
        state_out: F32 | None,
        work: F32,
        out: F32,
        segments: I64,
        shapes: Sequence[Shape],
        divisor: float,
        levels: U32 | None = None,
        exact: F32 | None = None,
    ) -> int:
        where = self._open(segments, shapes, levels)
        v, warm, scratch = self._memory(where, state_out, work)
        source = f32_address("aggregate", aggregate, where.pay1)
        target = f32_address("out", out, where.n, write=True)
        if where.n and target == v:
            raise CodecError("out", "memory of its own", "state_out's")
        factor = float(np.float32(1.0 / divisor))
        table = where.table.ctypes.data
        before = 0 if exact is None or self.plain else f32_address("exact", exact, where.pay1)
        return int(powersgd_finish(source, before, v, scratch, warm, target, table, len(shapes), factor))
