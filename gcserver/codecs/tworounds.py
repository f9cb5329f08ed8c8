"""The interface of codecs whose step takes two dependent exchanges.

What may live here: that interface and what all such codecs share; no method of compression.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gcserver.codecs.base import F32, I64, U8, U32, CodecError, Encoded
from gcserver.codecs.casts import RAW, apply_cast
from gcserver.codecs.framed import Readable
from gcserver.codecs.reduce import scale_copy

#: (rows, cols) of a segment: a matrix, or (length, 0) for what has no second dimension
Shape = tuple[int, int]


class TwoRounds(Readable):
    """A codec whose step takes two dependent exchanges of float32 vectors, each summed in member order.

    The runtime calls, for one partition and step: ``begin``, sums payload 0 over all members, ``middle`` with
    that sum, sums payload 1, ``finish`` with that sum. All three get the same segments, shapes, levels, work
    and state_out; what is between them lives in the last two only, so that a step begun again from the same
    state gives the same bytes. Frames of either round decode to float32 (`decode`, `decode_add`), of which they are
    themselves unless a codec says otherwise (`payload_bytes`, `floats_in`, `store`, `apply`).
    """

    rounds = 2
    layout = "matrix"
    #: whether the seed must be the same on all nodes (derived from job, step and key, not from the node)
    shared_seed: ClassVar[bool] = True
    #: whether payloads are the float32 of their vectors and nothing else
    plain: bool = True

    @abstractmethod
    def payload_floats(self, stage: int, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        """float32 elements of the vector exchanged in round 0 or 1 for segments of these shapes."""

    def payload_bytes(self, stage: int, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        """Bytes of that vector's payload."""
        return 4 * self.payload_floats(stage, shapes, levels)

    def floats_in(self, payload: U8) -> int:
        """float32 elements that a payload decodes to. Raises CodecError if it is none."""
        if payload.size % 4:
            raise CodecError("payload.nbytes", "a multiple of 4", payload.size)
        return payload.size // 4

    def store(self, stage: int, x: F32, out: U8, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        """The payload of a sum, as its owner sends it; the number of its non-finite elements.

        x: float32[payload_floats(stage, shapes, levels)]. out: uint8[payload_bytes(stage, shapes, levels)].
        """
        return scale_copy(np.frombuffer(out, np.float32), x, 1.0)

    def payload_range(self, stage: int, shapes: Sequence[Shape]) -> tuple[int, int]:
        """(fewest, most) float32 elements that vector may have, whatever the segments' levels."""
        most = sum(rows * cols if cols else rows for rows, cols in shapes)
        # The second is empty where all segments are sent whole.
        fewest = 0 if stage else self.payload_floats(0, shapes, np.full(len(shapes), self.levels[0], np.uint32))
        return fewest, most

    @abstractmethod
    def work_floats(self, shapes: Sequence[Shape], levels: U32 | None = None) -> int:
        """float32 elements of scratch memory that the three calls of a step share; contents before: anything."""

    @abstractmethod
    def state_floats(self, n: int, segments: int = 1, shapes: Sequence[Shape] | None = None) -> int:
        """As `Codec.state_floats`, exactly for these shapes; an upper bound for any shapes where they are None."""

    @abstractmethod
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
        """Payload 0 from ``v = x*scale + decay*residual``. As `Codec.encode`, and:

        shapes: (rows, cols) of each segment, (length, 0) for vectors. work: float32[>= work_floats(shapes,
        levels)]. out: uint8[>= payload_bytes(0, shapes, levels)]. state_out must be given where state is kept.
        """

    @abstractmethod
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
        """Payload 1 from the sum of all members' payloads 0.

        aggregate: float32[payload_floats(0, shapes, levels)]. state_out, work: those of ``begin``. out: uint8[>=
        payload_bytes(1, shapes, levels)].
        """

    @abstractmethod
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
        """The result (the mean over ``divisor``) into out, the next state into state_out; non-finite elements of out.

        aggregate: the sum of all members' payloads 1 as all of them have it, float32[payload_floats(1, ...)]. out:
        float32[n]. exact: the same before `store` rounded it, where this node did that: it keeps the difference.
        """

    def max_bytes(self, n: int, segments: int = 1) -> int:
        """4n: neither payload is ever longer than the gradient itself."""
        return 4 * n

    def encode(self, *args: Any, **more: Any) -> Encoded:
        """Refuses: one call cannot do what takes two exchanges."""
        raise CodecError("encode", f"begin, middle and finish ({self.name} takes two rounds)", "encode")

    def apply(self, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int) -> int:
        return apply_cast(self, RAW, 4, payload, nbytes, out, n, scale, mode)
