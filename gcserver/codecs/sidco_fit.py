"""The three distributions SIDCo fits to magnitudes, as closed arithmetic: estimate, share above, quantile.

What may live here: scalar functions of sums; no array, no threshold, no stage. All of it decides bytes, so
nothing here calls a mathematical library, whose last bit depends on the machine: logarithm and exponential (of
`layouts`) and gamma function are written out in float64 operations that IEEE 754 fixes. Section 2 and appendix B.3 of
the SIDCo paper, with its printed errors corrected: the Pareto scale has the variance where Algorithm 1, line 17,
prints the deviation; (34) has Hosking's sign of the shape, the estimators (8), (9) do not; the gamma
quantile is the exact one, since the closed form of (15) is off by a factor of three at small ratios.
"""

from __future__ import annotations

import math
from typing import Any

from numba import njit

from gcproto import layouts

EXPONENTIAL, PARETO, GAMMA = range(3)

HALF_LN_2PI = 0.9189385332046727

#: natural logarithm of a positive, finite number and exponential, to some 2 units in the last place
ln: Any = njit(nogil=True)(layouts.ln)
exp: Any = njit(nogil=True)(layouts.exp)


@njit(nogil=True)
def ln_gamma(a):
    """Logarithm of the gamma function of a > 0: Stirling's series, reached by recurrence."""
    product = 1.0
    while a < 10.0:
        product *= a
        a += 1.0
    q = 1.0 / (a * a)
    series = 1.0 / 12.0 + q * (-1.0 / 360.0 + q * (1.0 / 1260.0 + q * (-1.0 / 1680.0 + q * (1.0 / 1188.0))))
    return (a - 0.5) * ln(a) - a + HALF_LN_2PI + series / a - ln(product)


@njit(nogil=True)
def gamma_above(a, x):
    """Share of a gamma distribution of shape a and scale 1 above x: Q(a, x)."""
    if x <= 0.0:
        return 1.0
    front = exp(a * ln(x) - x - ln_gamma(a))
    if x < a + 1.0:
        term = 1.0 / a
        total = term
        for i in range(1, 1000):
            term *= x / (a + i)
            total += term
            if term < total * 1e-16:
                break
        return max(0.0, 1.0 - front * total)
    # Lentz's evaluation of the continued fraction.
    b = x + 1.0 - a
    c = 1e300
    d = 1.0 / b
    h = d
    for i in range(1, 1000):
        n = -i * (i - a)
        b += 2.0
        d = 1.0 / (n * d + b)
        c = b + n / c
        step = d * c
        h *= step
        if abs(step - 1.0) < 1e-15:
            break
    return front * h


@njit(nogil=True)
def gamma_quantile(a, p):
    """x with Q(a, x) = p, by bisection of its logarithm to a relative 1e-9."""
    low, high = -700.0, 0.0
    while high < 60.0 and gamma_above(a, exp(high)) > p:
        low, high = high, high + 1.0
    while high - low > 1e-9:
        middle = 0.5 * (low + high)
        if gamma_above(a, exp(middle)) > p:
            low = middle
        else:
            high = middle
    return exp(0.5 * (low + high))


@njit(nogil=True)
def estimate(kind, count, total, squares, logs):
    """(shape, scale) of ``count`` magnitudes from the sums of them, of their squares and of their logarithms.

    squares is used by PARETO only, logs by GAMMA only. count >= 2 and total > 0. (6), (8), (9), (16), (17).
    """
    mean = total / count
    if kind == PARETO:
        # Unbiased. No spread at all: the shape runs to minus infinity and the quantile to the mean; stop early.
        variance = max((squares - total * mean) / (count - 1.0), mean * mean * 1e-4)
        ratio = mean * mean / variance
        return 0.5 * (1.0 - ratio), 0.5 * mean * (ratio + 1.0)
    if kind == GAMMA:
        s = max(ln(mean) - logs / count, 1e-4)
        shape = (3.0 - s + math.sqrt((s - 3.0) * (s - 3.0) + 24.0 * s)) / (12.0 * s)
        return shape, mean / shape
    return 1.0, mean


@njit(nogil=True)
def above(kind, shape, scale, x):
    """Share of the fitted distribution above x >= 0."""
    if kind == PARETO:
        z = shape * x / scale
        if abs(z) < 1e-6:
            return exp(-x / scale)
        return 0.0 if z <= -1.0 else exp(-ln(1.0 + z) / shape)
    if kind == GAMMA:
        return gamma_above(shape, x / scale)
    return exp(-x / scale)


@njit(nogil=True)
def quantile(kind, shape, scale, p):
    """The magnitude above which lies a share p (0 < p < 1) of the fitted distribution. (4), (7), (10), (14)."""
    if kind == PARETO:
        z = -shape * ln(p)
        if abs(z) < 1e-6:
            return -scale * ln(p)
        return scale * (exp(z) - 1.0) / shape
    if kind == GAMMA:
        return scale * gamma_quantile(shape, p)
    return -scale * ln(p)
