"""Errors and bytes of powersgd at every rank: from singular values, or from a few power iterations.

What may live here: that. What may not: other families.

The best approximation of rank r loses sqrt(sum of the squares of the singular values beyond the r-th) (L-GreCo,
appendix B.1). Powersgd with its warm start comes close to that within a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gcserver.planner.errors import F32, F64, I64, LevelTable, TableError, default_indices, unusable

METHODS = ("auto", "svd", "power")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, cols) of a parameter: its first dimension, and the product of the others; cols 0 for vectors."""
    if len(shape) < 2:
        return (int(shape[0]) if shape else 1), 0
    return int(shape[0]), math.prod(shape[1:])


def compressed(rows: int, cols: int, levels: I64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Where the codec compresses at all: 2*rank*(rows + cols) < rows*cols, bool[C]; vectors and thin matrices never."""
    return np.asarray(2 * levels * (rows + cols) < rows * cols)


def lowrank_bytes(shape: Sequence[int], levels: I64, width: int = 32) -> F64:
    """Bytes of a contribution, both rounds together, float64[C]: P and Q with ``width`` bits an element, or float32
    where it is sent as it is."""
    rows, cols = matrix_shape(shape)
    return np.where(compressed(rows, cols, levels), width / 8 * levels * (rows + cols), 4.0 * math.prod(shape))


def lowrank_errors(gradient: F32, levels: I64, *, method: str = "auto", iterations: int = 5, seed: int = 0) -> F64:
    """L2 errors, float64[C]: 0 where a matrix is not compressed at that rank, NaN if the gradient is not finite.

    gradient: float32 of the parameter's shape. method: svd gives all ranks exactly; power iterates a block of as many
    columns as the largest rank, ``iterations`` times from a start drawn with ``seed``; auto takes whichever needs fewer
    operations (appendix B.3). Raises TableError.
    """
    if method not in METHODS:
        raise TableError("method", " or ".join(METHODS), method)
    if iterations < 1:
        raise TableError("iterations", "at least 1", iterations)
    if unusable(gradient):
        return np.full(levels.size, np.nan)
    rows, cols = matrix_shape(gradient.shape)
    used = compressed(rows, cols, levels)
    if not used.any():
        return np.zeros(levels.size)
    matrix = gradient.reshape(rows, cols)
    if rows > cols:
        matrix = matrix.T
    most = int(levels[used].max())
    if method == "auto":
        method = "power" if _cheaper_by_power(*matrix.shape, most, iterations) else "svd"
    tails = _by_power(matrix, most, iterations, seed) if method == "power" else _by_svd(matrix)
    ranks = np.where(used, levels, 0)
    return np.where(used, np.sqrt(tails[ranks]), 0.0)


def lowrank_table(
    gradients: Mapping[str, F32],
    levels: I64,
    default: int | Sequence[int],
    *,
    method: str = "auto",
    iterations: int = 5,
    seed: int = 0,
) -> LevelTable:
    """The table of these layers (accumulated gradients of the parameters' shapes) at ranks. Raises TableError."""
    sizes = [lowrank_bytes(g.shape, levels) for g in gradients.values()]
    errors = [
        lowrank_errors(g, levels, method=method, iterations=iterations, seed=seed + i)
        for i, g in enumerate(gradients.values())
    ]
    shape = (len(gradients), levels.size)
    chosen = default_indices(levels, default, len(gradients))
    return LevelTable(tuple(gradients), levels, np.reshape(sizes, shape), np.reshape(errors, shape), chosen)


def _cheaper_by_power(short: int, long: int, rank: int, iterations: int) -> bool:
    """Operations of the block's products and orthogonalisations, against those of the Gram matrix and its values."""
    power = (2 * iterations + 1) * 2 * short * long * rank + iterations * 4 * short * rank * rank
    return power < short * short * long + 2 * short**3


def _by_svd(matrix: F32) -> F64:
    """Squared errors of ranks 0, 1, ..., float64[short + 1], of a matrix short x long.

    Squared singular values are the eigenvalues of M M^T: a symmetric matrix as small as the shorter side, several times
    cheaper than singular values. In float64 squaring costs nothing that float32 gradients had.
    """
    wide = matrix.astype(np.float64)
    peak = float(np.abs(wide).max())
    if not peak:
        return np.zeros(matrix.shape[0] + 1)
    wide /= peak
    values = np.maximum(np.linalg.eigvalsh(wide @ wide.T), 0.0)
    # What rounding leaves of a zero is no error of the approximation.
    values[values < values[-1] * np.finfo(np.float64).eps * max(matrix.shape)] = 0.0
    tails = np.concatenate((np.zeros(1), np.cumsum(values)))[::-1]
    return np.asarray(tails * peak * peak, np.float64)


def _by_power(matrix: F32, rank: int, iterations: int, seed: int) -> F64:
    """Squared errors of ranks 0..rank, float64[rank + 1], from the best subspace that block iterations find."""
    peak = float(np.abs(matrix).max())
    if not peak:
        return np.zeros(rank + 1)
    scaled = matrix / np.float32(peak)
    basis = np.random.default_rng(seed).standard_normal((matrix.shape[1], rank), np.float32)
    for _ in range(iterations):
        left, _ = np.linalg.qr(scaled @ basis)
        basis = scaled.T @ left
    # scaled^T left: its singular values are those of the matrix within the subspace.
    kept = np.linalg.svd(basis.astype(np.float64), compute_uv=False) ** 2
    flat = scaled.reshape(-1).astype(np.float64)
    sums = np.concatenate((np.zeros(1), np.cumsum(kept)))
    return np.asarray(np.maximum(np.dot(flat, flat) - sums, 0.0) * peak * peak, np.float64)
