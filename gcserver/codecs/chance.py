"""Random bits inside sparsifiers' kernels: the same for a seed and a counter on any machine, in any order.

What may live here: the generator. Who draws what with which counter is the codec's business, and part of its format.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True)
def bits64(seed, counter):
    """64 random bits, uint64: output number ``counter`` (from 0) of splitmix64 started with ``seed`` (int64)."""
    z = np.uint64(seed) + (np.uint64(counter) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(nogil=True)
def draw(seed, counter, limit):
    """A whole number in [0, limit), limit <= 2**31: the upper 32 bits of ``bits64``, times limit, divided by 2**32."""
    return np.int64(((bits64(seed, counter) >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32))
