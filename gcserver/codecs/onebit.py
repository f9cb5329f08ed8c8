"""onebit: one sign bit an element and two means a segment (Seide et al. 2014), with error feedback.

What may live here: this codec. Layout and kernels are `signs`'. An element decodes to the mean of the
negative elements of its segment if it was negative, else to the mean of the others, so that signs and the
segment's sum survive; the rest goes to the residual.
"""

from __future__ import annotations

from gcserver.codecs.base import U32, Encoded, register
from gcserver.codecs.framed import Call
from gcserver.codecs.signs import Signs, means_encode


class Means(Signs):
    """Signs with means and error feedback."""

    keeps_residual = True
    units = "sum"
    conserves = True

    def write(self, call: Call, levels: U32 | None) -> Encoded:
        return Encoded(*means_encode(self.numbers, *call.arrays, call.m, call.scale, self.decay))


@register
class OneBit(Means):
    """1 bit an element plus 12 bytes a segment; error feedback by default."""

    id, name = 32, "onebit"
    numbers = 2
