"""Costs that grow with size, and how to find them from noisy measurements.

What may live here: the affine cost B + gamma * x and its robust fit. What may not: measuring, and any opinion of what
is measured (encoding, exchanging, decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Huber's constant: 95 % of the efficiency of least squares where noise is normal.
_HUBER: Final = 1.345
#: Median absolute deviation to standard deviation, for normal noise.
_MAD: Final = 1.4826
_ROUNDS: Final = 50


class FitError(ValueError):
    """Samples no cost can be fitted to: says what was expected, what came and what to measure."""


@dataclass(frozen=True, slots=True)
class AffineCost:
    """Seconds for ``x`` elements: ``base + per_element * x`` (MergeComp, Assumption 5: B and gamma).

    Raises :class:`FitError` if a part is negative or not finite.
    """

    base: float
    per_element: float

    def __post_init__(self) -> None:
        for name in ("base", "per_element"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise FitError(f"{name} of a cost must be a number of seconds from 0 on, got {value}")

    def __call__(self, elements: float) -> float:
        return self.base + self.per_element * elements


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost. ``noise``: standard deviation of a sample relative to the cost, outliers set aside."""

    cost: AffineCost
    samples: int
    noise: float


def fit_affine(elements: Sequence[float] | Floats, seconds: Sequence[float] | Floats) -> Fit:
    """The affine cost behind samples (``elements[i]``, ``seconds[i]``), robust to outliers in the seconds.

    Noise of measured times is relative: a big group's 5 % are larger than a small group's whole cost. So the loss is
    Huber's, of (seconds - cost) / cost, reached by re-weighting from a start that half the samples of any size cannot
    move: the Theil-Sen line through the median of every size. Both parts are kept from falling below zero.

    Raises :class:`FitError` for lists of unequal length, values that are not positive and finite, and fewer than two
    different sizes.
    """
    x, y = np.asarray(elements, np.float64), np.asarray(seconds, np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise FitError(f"a fit needs as many times as sizes, got {x.size} sizes and {y.size} times")
    for what, values in (("sizes", x), ("times", y)):
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise FitError(f"a fit needs {what} that are finite and greater than 0, got {values[:8].tolist()}")
    sizes = np.unique(x)
    if sizes.size < 2:
        raise FitError(f"a fit needs two different sizes at least, got {sizes.tolist()}: measure groups of other sizes")
    medians = np.array([np.median(y[x == size]) for size in sizes])
    base, slope = _theil_sen(sizes, medians)
    for _ in range(_ROUNDS):
        predicted = np.maximum(base + slope * x, 1e-300)
        residual = (y - predicted) / predicted
        scale = max(_MAD * float(np.median(np.abs(residual))), 1e-12)
        weight = np.minimum(1.0, _HUBER * scale / np.maximum(np.abs(residual), 1e-300)) / predicted**2
        old = (base, slope)
        base, slope = _least_squares(x, y, weight)
        if np.allclose(old, (base, slope), rtol=1e-9, atol=0.0):
            break
    residual = y / (base + slope * x) - 1.0
    noise = _MAD * float(np.median(np.abs(residual)))
    return Fit(AffineCost(base, slope), int(x.size), noise)


def _theil_sen(x: Floats, y: Floats) -> tuple[float, float]:
    """Median slope over all pairs, and the median intercept it leaves; neither below zero, not both zero."""
    i, j = np.triu_indices(x.size, 1)
    slope = max(float(np.median((y[j] - y[i]) / (x[j] - x[i]))), 0.0)
    base = float(np.median(y - slope * x))
    if base < 0.0:
        return 0.0, float(np.median(y / x))
    return (base, slope) if base + slope > 0.0 else (float(np.median(y)), 0.0)


def _least_squares(x: Floats, y: Floats, weight: Floats) -> tuple[float, float]:
    """Weighted least squares with both parts at least zero."""
    total = weight.sum()
    mx, my = (weight * x).sum() / total, (weight * y).sum() / total
    variance = (weight * (x - mx) ** 2).sum()
    slope = (weight * (x - mx) * (y - my)).sum() / variance if variance > 0.0 else 0.0
    base = my - slope * mx
    if slope < 0.0:
        return float(my), 0.0
    if base < 0.0:
        return 0.0, float((weight * x * y).sum() / (weight * x * x).sum())
    return float(base), float(slope)
