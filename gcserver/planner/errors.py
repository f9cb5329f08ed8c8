"""What each layer costs and loses at each level: the table from which L-GreCo, Accordion and k-means decide.

What may live here: the table, its checks, the ranges of levels. What may not: how a family's errors are measured
(`errors_sparse`, `errors_quantised`, `errors_lowrank`), and decisions.

Levels are the codecs' own: bits for qsgd, ratios in millionths for sparsifiers, ranks for powersgd. Errors are L2
norms, not squared, and never compared across families. They are taken of accumulated gradients, without error feedback
(L-GreCo, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

#: what the codecs accept as the level of a segment (docs/codecs.md), lowest and highest
BITS = (2, 8)
RANKS = (1, 64)
MILLIONTHS = (1, 1_000_000)


class TableError(ValueError):
    """An argument of the planner that it cannot use: names the argument, what was expected and what came."""

    def __init__(self, field: str, expected: str, got: object) -> None:
        super().__init__(f"{field}: expected {expected}, got {got}")
        self.field, self.expected, self.got = field, expected, got


@dataclass(frozen=True, slots=True, eq=False)
class LevelTable:
    """L layers, each with C levels that it may be sent at.

    names: of the layers. levels: int64[C], ascending. sizes: float64[L, C], bytes of a contribution. errors:
    float64[L, C], L2; NaN or infinity where a level must not be used. default: int64[L], each layer's default as an
    index into ``levels``. A layer whose default has no finite error keeps its default. Raises :class:`TableError`.
    """

    names: tuple[str, ...]
    levels: I64
    sizes: F64
    errors: F64
    default: I64

    def __post_init__(self) -> None:
        shape = (len(self.names), self.levels.size)
        if self.levels.ndim != 1 or not self.levels.size or bool((np.diff(self.levels) <= 0).any()):
            raise TableError("levels", "at least one level, ascending", self.levels.tolist())
        for field, array in (("sizes", self.sizes), ("errors", self.errors)):
            if array.shape != shape:
                raise TableError(field, f"{shape[0]} layers x {shape[1]} levels", array.shape)
        if not bool((np.isfinite(self.sizes) & (self.sizes >= 0)).all()):
            raise TableError("sizes", "finite numbers of bytes, none negative", float(self.sizes.min()))
        if bool((self.errors < 0).any()):
            raise TableError("errors", "L2 norms, none negative", float(np.nanmin(self.errors)))
        inside = (self.default >= 0) & (self.default < shape[1]) if self.default.shape == shape[:1] else np.False_
        if not bool(np.all(inside)):
            raise TableError(
                "default", f"an index below {shape[1]} for each of {shape[0]} layers", self.default.tolist()
            )

    def with_default(self, levels: int | Sequence[int]) -> LevelTable:
        """The same table with other default levels, one for all layers or one each; TableError if one is not in it."""
        return replace(self, default=default_indices(self.levels, levels, len(self.names)))

    def with_owner(self, aggregate: LevelTable) -> LevelTable:
        """With the error of re-encoding at the owner added: ``aggregate`` is the table of the owners' sums.

        What arrives differs from the true mean by at most the mean of the contributions' errors plus the owner's
        (triangle inequality). powersgd needs none of this: its sums are not compressed again.
        """
        if aggregate.names != self.names or not np.array_equal(aggregate.levels, self.levels):
            raise TableError("aggregate", "a table of the same layers and levels", aggregate.names)
        return replace(self, errors=self.errors + aggregate.errors)

    @property
    def default_bytes(self) -> float:
        """Bytes of all layers at their defaults."""
        return float(np.take_along_axis(self.sizes, self.default[:, None], 1).sum())


def default_indices(levels: I64, default: int | Sequence[int], layers: int) -> I64:
    """Default levels, one for all layers or one each, as int64[layers] of indices. Raises :class:`TableError`."""
    wanted = np.array([default] * layers if isinstance(default, int) else list(default), np.int64)
    if wanted.shape != (layers,):
        raise TableError("default", f"one level, or one for each of {layers} layers", f"{wanted.size} levels")
    found = np.searchsorted(levels, wanted).astype(np.int64)
    inside = found < levels.size
    missing = wanted[~inside | (levels[np.minimum(found, levels.size - 1)] != wanted)]
    if missing.size:
        raise TableError("default", f"levels of the range, {levels.tolist()}", int(missing[0]))
    return found


def unusable(gradient: F32) -> bool:
    """Whether a gradient holds NaN or infinity, so that no error can be told."""
    with np.errstate(invalid="ignore"):
        # float64: a sum of finite float32 cannot overflow there
        return not bool(np.isfinite(gradient.sum(dtype=np.float64)))


def quantiser_levels(default: int) -> I64:
    """Bits from half the default to twice it, in ones (section 5.1), as far as codecs have them. default: 2..8."""
    return _between("default", default, BITS, 2, 2)


def rank_levels(default: int, *, narrower: int = 2, wider: int = 2) -> I64:
    """Ranks from default/narrower, at least 1, to default*wider, at most 64 (section 5.1). default: 1..64."""
    return _between("default", default, RANKS, narrower, wider)


def sparse_levels(default: int, count: int | None = None) -> I64:
    """Ratios in millionths from a tenth of the default to ten times it; default: 1..1000000.

    In steps of a tenth of the default as the paper has them (100 levels), or, with ``count``, some so many at equal
    ratios to one another, which serves as well and takes less time. The default is always among them.
    """
    low, high = _range("default", default, MILLIONTHS, 10, 10)
    if count is None:
        steps = np.arange(1, 101, dtype=np.int64) * default // 10
    elif count < 2:
        raise TableError("count", "at least 2 levels", count)
    else:
        steps = np.rint(np.geomspace(low, high, count)).astype(np.int64)
    return np.unique(np.clip(np.append(steps, default), low, high))


def _range(field: str, default: int, limits: tuple[int, int], narrower: int, wider: int) -> tuple[int, int]:
    if not limits[0] <= default <= limits[1]:
        raise TableError(field, f"{limits[0]}..{limits[1]}", default)
    if narrower < 1 or wider < 1:
        raise TableError("range", "factors of at least 1", (narrower, wider))
    return max(limits[0], default // narrower), min(limits[1], default * wider)


def _between(field: str, default: int, limits: tuple[int, int], narrower: int, wider: int) -> I64:
    low, high = _range(field, default, limits, narrower, wider)
    return np.arange(low, high + 1, dtype=np.int64)
