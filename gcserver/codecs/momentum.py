"""DGC's momentum correction, shared by all sparsifiers: momentum accumulates before selection, not after it.

What may live here: that one pass. Deep Gradient Compression (Lin et al. 2018), section 3.1: with u the momentum
and v what accumulates until it is sent, u = m*u + g, v = v + u (Nesterov: u = m*(u + g), v = v + u + g), the
elements of largest |v| are sent, and both u and v are zeroed there (section 3.2, factor masking; `sparse.finish`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gcserver.codecs.collect import BLOCK
from gcserver.codecs.jit import place
from gcserver.codecs.vector import F32, Ops, elementwise


def _plain(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    x, r, u = values
    scale, decay, momentum = scalars
    b = ops.b
    new = b.fadd(b.fmul(momentum, u), b.fmul(x, scale))
    return [b.fadd(b.fmul(r, decay), new), new]


def _nesterov(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    x, r, u = values
    scale, decay, momentum = scalars
    b = ops.b
    g = b.fmul(x, scale)
    new = b.fmul(momentum, b.fadd(u, g))
    return [b.fadd(b.fadd(b.fmul(r, decay), new), g), new]


plain_block = elementwise([F32] * 3, [F32] * 2, _plain)
nesterov_block = elementwise([F32] * 3, [F32] * 2, _nesterov)


@njit(nogil=True)
def correct(x, r, u, ro, uo, n, scale, decay, momentum, nesterov):
    """v = decay*r + u' to ro and the new momentum u' = momentum*u + x*scale to uo; every operation rounded.

    Addresses of float32[n]; r and u may be 0 for zeros. Nesterov: u' = momentum*(u + g), v = (decay*r + u') + g with
    g = x*scale.
    """
    zeros = np.zeros(BLOCK, np.float32)
    for start in range(0, n, BLOCK):
        size, at = min(BLOCK, n - start), 4 * start
        pr = place(zeros) if r == 0 else r + at
        pu = place(zeros) if u == 0 else u + at
        if nesterov:
            nesterov_block((x + at, pr, pu, ro + at, uo + at), size, (scale, decay, momentum))
        else:
            plain_block((x + at, pr, pu, ro + at, uo + at), size, (scale, decay, momentum))


@njit(nogil=True)
def accumulated(x, r, u, ro, uo, n, scale, decay, momentum, nesterov):
    """What elements are selected from: (x, r, ro, scale, decay), those given where there is no momentum (uo = 0).

    With one, `correct` leaves v in ro: it is read from there as it is, and nothing more is kept of it.
    """
    if uo == 0:
        return x, r, ro, scale, decay
    correct(x, r, u, ro, uo, n, scale, decay, momentum, nesterov)
    return ro, np.int64(0), np.int64(0), 1.0, 0.0
