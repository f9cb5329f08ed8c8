"""Plain numpy statement of powersgd: what is exchanged, what every node must agree on to the bit, what is kept.

Only numpy here, nothing of gcserver. Products that stay on one node are float64 (the kernels' own order of summation
is their business); what all nodes compute for themselves is written with every rounding.
"""

from __future__ import annotations

import numpy as np

from tests.unit.codecs.oracles import bits64, lanes_sum


def used_rank(rows, cols, rank):
    """The rank of a segment: 0 where it is sent as it is."""
    return rank if 2 * rank * (rows + cols) < rows * cols else 0


def shrink(n):
    """The power of two by which n numbers below 1 are multiplied so that their sum stays below 1."""
    return 0.5 ** max(0, int(n - 1).bit_length())


def fresh(seed, segment, cols, rank):
    """Q (cols x rank) as drawn when nothing is known."""
    own = bits64(seed, segment) >> 1
    drawn = [[(bits64(own, k * cols + j) >> 40) - 2**23 for k in range(rank)] for j in range(cols)]
    return (np.array(drawn, np.float64).reshape(cols, rank) * 2.0**-23 * shrink(cols)).astype(np.float32)


def dot(x, y):
    """Sum of x*y in float64: 16 lanes in blocks of 4096, lanes in order, then blocks in order."""
    return lanes_sum(x * y, 4096)


def orthonormalise(p):
    """float32[rows, rank]: an orthonormal basis of the columns, zeros where a column depends on those before."""
    wide = p.astype(np.float64)
    for k in range(p.shape[1]):
        before = after = dot(wide[:, k], wide[:, k])
        if before > 0:
            for _ in range(2):
                for j in range(k):
                    wide[:, k] = wide[:, k] - dot(wide[:, j], wide[:, k]) * wide[:, j]
                after = dot(wide[:, k], wide[:, k])
                if k == 0 or after >= 0.25 * before:
                    break
        if not (np.isfinite(before) and np.isfinite(after)):
            wide[:, k] = np.nan
        elif before == 0 or after <= 1e-20 * before:
            wide[:, k] = 0
        else:
            wide[:, k] = wide[:, k] / np.sqrt(after)
    return wide.astype(np.float32)


def expand(p, q, divisor):
    """P Q^T / divisor in float32: products added in order of rank, then one multiplication."""
    total = np.zeros((len(p), len(q)), np.float32)
    for k in range(p.shape[1]):
        total = total + p[:, k, None] * q[None, :, k]
    return total * np.float32(1.0 / divisor)


def keep(q):
    """The next warm Q: each column times a power of two."""
    result = np.zeros_like(q)
    for k in range(q.shape[1]):
        largest = np.abs(q[:, k]).max(initial=0)
        if largest > 0 and np.isfinite(largest):
            result[:, k] = (q[:, k] * np.ldexp(1.0, -int(np.frexp(np.float64(largest))[1])) * shrink(len(q))).astype(
                np.float32
            )
    return result
