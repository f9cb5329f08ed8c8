"""How much uniform compression saves of a model, from its shapes alone: what every adaptive choice is compared with.

What may live here: the rule of L-GreCo's tables 2 and 3. What may not: shapes of models (`uniform_shapes`), and the
exact bytes of this project's codecs (`errors_*`).

The rule comes within 2 % of every ratio the paper prints: parameters of one dimension are sent as they are; a matrix is
sent as P and Q where 2*rank*(rows + cols) < rows*cols; an element that is picked costs two words; a bucket that is
quantised costs two more words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gcserver.planner.errors import TableError
from gcserver.planner.errors_lowrank import compressed, matrix_shape

Shapes = Sequence[Sequence[int]]


def lowrank_ratio(shapes: Shapes, rank: int) -> float:
    """Float32 bytes over those of powersgd at this rank. Raises TableError."""
    if rank < 1:
        raise TableError("rank", "at least 1", rank)
    words = 0
    for shape in shapes:
        rows, cols = matrix_shape(shape)
        smaller = bool(compressed(rows, cols, np.array([rank], np.int64))[0])
        words += rank * (rows + cols) if smaller else math.prod(shape)
    return _ratio(shapes, words)


def qsgd_ratio(shapes: Shapes, bits: int, bucket: int = 1024) -> float:
    """Float32 bytes over those of max-min quantisation with so many bits, 2 words a bucket. Raises TableError."""
    if not 1 <= bits <= 32 or bucket < 1:
        raise TableError("bits, bucket", "1..32 bits, buckets of at least 1", (bits, bucket))
    words = 0.0
    for shape in shapes:
        n = math.prod(shape)
        words += n if len(shape) < 2 else n * bits / 32 + 2 * -(-n // bucket)
    return _ratio(shapes, words)


def topk_ratio(shapes: Shapes, ratio: float) -> float:
    """Float32 bytes over those of the k largest of each parameter and their indices. Raises TableError."""
    if not 0.0 < ratio <= 1.0:
        raise TableError("ratio", "above 0, at most 1", ratio)
    words = 0
    for shape in shapes:
        n = math.prod(shape)
        words += n if len(shape) < 2 else 2 * max(1, math.floor(n * ratio))
    return _ratio(shapes, words)


def _ratio(shapes: Shapes, words: float) -> float:
    if not words:
        raise TableError("shapes", "at least one parameter that is not empty", list(shapes))
    return sum(math.prod(shape) for shape in shapes) / words
