"""onebit: one sign bit an element and two means a segment (Seide et al. 2014), with error feedback.

What may live here: this codec. Layout and kernels are `signs`'. An element decodes to the mean of the
negative elements of its segment if it was negative, else to the mean of the others, so that signs and the
segment's sum survive; the rest goes to the residual.
"""

from __future__ import annotations

from gcserver.codecs.base import F32, I64, U8, U32, Encoded, register
from gcserver.codecs.jit import level_address, segment_table, state_addresses, u8_address
from gcserver.codecs.signs import Signs, means_encode


class Means(Signs):
    """Signs with means and error feedback."""

    keeps_residual = True
    units = "sum"
    conserves = True

    def encode(
        self,
        x: F32,
        state_in: F32 | None,
        state_out: F32 | None,
        out: U8,
        segments: I64 | None,
        scale: float = 1.0,
        seed: int = 0,
        levels: U32 | None = None,
    ) -> Encoded:
        n = x.size
        table, m, alive = segment_table(segments, n)
        px, r, ro = state_addresses(self, x, state_in, state_out, m)
        level_address(self, levels, m)
        target = u8_address("out", out, self.max_bytes(n, m), write=True)
        nbytes, bad = means_encode(self.numbers, px, r, ro, target, table, m, float(scale), self.decay)
        del alive
        return Encoded(nbytes, bad)


@register
class OneBit(Means):
    """1 bit an element plus 12 bytes a segment; error feedback by default."""

    id, name = 32, "onebit"
    numbers = 2
