"""SIDCo stated in numpy and plain Python: which elements a segment sends, and the state it leaves.

Only numpy and the standard library here, nothing of gcserver. Logarithms and exponentials come from the C library,
where the kernels have their own: a threshold rounded to float32 is the same whoever computed it.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from tests.unit.codecs.oracles import magnitude_bits, topk_k
from tests.unit.codecs.sparse_oracles import largest

STATE = 8  #: stages, steps in the window, sum of their errors, achieved k^/k, errors remembered of 1..4 stages
INF = float("inf")


# ------------------------------------------------------------------------------------------------------- sums
def blocks(values):
    """float32 as (blocks, 32 groups, 4, 8 lanes), the last block filled up with zeros."""
    return np.concatenate([values, np.zeros(-len(values) % 1024, np.float32)]).reshape(-1, 32, 4, 8)


def lane_sums(parts):
    """float32[blocks, 32, 4, 8] added in the documented order: float64."""
    with np.errstate(all="ignore"):
        groups = (parts[:, :, 0] + parts[:, :, 1]) + (parts[:, :, 2] + parts[:, :, 3])
        lanes = np.zeros_like(groups[:, 0])
        for g in range(32):
            lanes = lanes + groups[:, g]
        return float(sequential(np.add.accumulate(lanes.astype(np.float64), axis=0)[-1]))


def sequential(values):
    total = 0.0
    for value in values:
        total += value
    return total


def mass(mags, cut=-1.0):
    return lane_sums(np.where(blocks(mags) > np.float32(cut), blocks(mags), np.float32(0)))


def squares(mags, unit, cut=-1.0):
    kept = np.where(blocks(mags) > np.float32(cut), blocks(mags), np.float32(0)) * np.float32(unit)
    with np.errstate(all="ignore"):
        return lane_sums(kept * kept)


def logs(mags, unit):
    """Sum of ln(max(magnitude*unit, 2**-52)), by products of mantissas."""
    padded = blocks(mags)
    scaled = np.maximum(padded * np.float32(unit), np.float32(2.0**-52))
    bits = scaled.view(np.uint32)
    mantissas = ((bits & 0x7FFFFF) | 0x3F800000).view(np.float32)
    groups = (mantissas[:, :, 0] * mantissas[:, :, 1]) * (mantissas[:, :, 2] * mantissas[:, :, 3])
    lanes = np.ones_like(groups[:, 0])
    for g in range(32):
        lanes = lanes * groups[:, g]
    mantissa, exponent = 1.0, int((bits >> 23).astype(np.int64).sum()) - 127 * bits.size
    for lane in lanes.reshape(-1):
        m, e = math.frexp(mantissa * float(lane))
        mantissa, exponent = 2 * m, exponent + e - 1
    exponent += 52 * (padded.size - len(mags))
    return math.log(mantissa) + exponent * math.log(2)


# ------------------------------------------------------------------------------------------------------- fits
def gamma_above(a, x):
    """Q(a, x), the regularised upper incomplete gamma function."""
    if x <= 0:
        return 1.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        i = 0
        while term > total * 1e-17:
            i += 1
            term *= x / (a + i)
            total += term
        return max(0.0, 1 - front * total)
    fraction = 0.0
    for i in range(400, 0, -1):
        fraction = i * (i - a) / (x + 2 * i + 1 - a - fraction)
    return front / (x + 1 - a - fraction)


class Exponential:
    def __init__(self, count, mean, **_):
        self.scale = mean

    def above(self, x):
        return math.exp(-x / self.scale)

    def quantile(self, p):
        return -self.scale * math.log(p)


class Pareto:
    def __init__(self, count, mean, second, **_):
        variance = max((second - count * mean * mean) / (count - 1), mean * mean * 1e-4)
        ratio = mean * mean / variance
        self.shape, self.scale = 0.5 * (1 - ratio), 0.5 * mean * (ratio + 1)

    def above(self, x):
        z = self.shape * x / self.scale
        return 0.0 if z <= -1 else math.exp(-math.log1p(z) / self.shape)

    def quantile(self, p):
        return self.scale * math.expm1(-self.shape * math.log(p)) / self.shape


class Gamma:
    def __init__(self, count, mean, logarithms, **_):
        s = max(math.log(mean) - logarithms / count, 1e-4)
        self.shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
        self.scale = mean / self.shape

    def above(self, x):
        return gamma_above(self.shape, x / self.scale)

    def quantile(self, p):
        low, high = -700.0, 0.0
        while high < 60 and gamma_above(self.shape, math.exp(high)) > p:
            low, high = high, high + 1
        while high - low > 1e-9:
            middle = 0.5 * (low + high)
            if gamma_above(self.shape, math.exp(middle)) > p:
                low = middle
            else:
                high = middle
        return self.scale * math.exp(0.5 * (low + high))


def fit(method, stage, mags, cut, unit):
    """The distribution of what exceeds the cut (all, in the first stage), less the cut, in units of 1/unit."""
    count = len(mags) if stage == 0 else int((mags > np.float32(cut)).sum())
    origin = 0.0 if stage == 0 else cut * unit
    level = -1.0 if stage == 0 else cut
    moment = mass(mags, level) * unit
    excess = moment - origin * count
    if count < 2 or not 0 < excess < INF:
        return None
    mean = excess / count
    if method == "e":
        return Exponential(count, mean)
    if method == "gp" and stage == 0:
        return Gamma(count, mean, logarithms=logs(mags, unit))
    return Pareto(count, mean, second=squares(mags, unit, level) + origin * (origin * count - 2 * moment))


# ----------------------------------------------------------------------------------------------------- stages
def f32(value):
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def sample_of(mags, size):
    lines = size // 32
    stride, jitter, picks = len(mags) // lines, 0x9E3779B97F4A7C15, []
    for j in range(lines):
        jitter = (jitter * 6364136223846793005 + 1442695040888963407) % 2**64
        start = j * stride + (jitter >> 33) % (stride - 31)
        picks.append(mags[start : start + 32])
    return np.concatenate(picks)


def cuts_of(method, stages, ratio, sample, unit):
    cuts, origin, cut, share = [], 0.0, -1.0, 0.25
    for stage in range(stages - 1):
        if stage and (sample > np.float32(cut)).sum() < 32:
            break
        fitted = fit(method, stage, sample, cut, unit)
        if fitted is None:
            break
        before, cut = cut, f32((origin + fitted.quantile(share)) / unit)
        if not max(0.0, before) < cut < INF:
            break
        cuts.append(cut)
        origin, share = cut * unit, math.exp(math.log(ratio / 0.25) / (stages - 1))
    return cuts


def threshold(method, mags, k, cuts, unit):
    ratio, share, origin, stage = k / len(mags), 1.0, 0.0, 0
    fitted = fit(method, 0, mags, -1.0, unit)
    if fitted is None:
        return -1.0
    while stage < len(cuts):
        cut = cuts[stage]
        beyond = share * fitted.above(cut * unit - origin)
        if beyond <= ratio or (mags > np.float32(cut)).sum() < max(32, k):
            break
        following = fit(method, stage + 1, mags, cut, unit)
        if following is None:
            break
        stage, share, origin, fitted = stage + 1, beyond, cut * unit, following
    return (origin + fitted.quantile(ratio / share)) / unit


def tune(eta, bound, candidates, k):
    """(threshold or None, ln(k^/k) of eta)."""

    def look(cut):
        count = int((candidates > np.float32(cut)).sum())
        return count, (mass(candidates, cut) / count - cut if count else 0.0)

    cut, (count, excess) = bound, look(bound)
    lower, upper, many, few, tail = bound, INF, len(candidates), 0, excess
    count = len(candidates)
    if eta > bound:
        cut, (count, excess) = eta, look(eta)
        error = math.log(max(count, 0.5) / k)
    else:
        error = math.log(count / k) + min(10.0, (bound - eta) / max(excess, 1e-6 * bound))
    for _ in range(8):
        if 0.9 * k <= count <= 1.1 * k:
            return cut, error
        if count > 1.1 * k:
            lower, many, tail = cut, count, excess
        else:
            upper, few = cut, count
        if 8 * few >= k:
            cut = f32(lower + (upper - lower) * math.log(many / k) / math.log(many / few))
        else:
            cut = f32(min(lower + tail * math.log(many / k), 0.5 * (lower + upper)))
        count, excess = look(cut)
    return None, error


def segment(method, v, k, stages):
    """(indices sent of v, ln(k^/k) before correction or None)."""
    n, mags = len(v), np.abs(v)
    exact = largest(v, 0, n, k)
    if n < 65536 or k < 32 or 4 * k > n:
        return exact, None
    size = next((s for s in (1 << 14, 1 << 15, 1 << 16) if s**3 >= 40 * n * k), 1 << 17)
    size = min(size, n // 8) // 32 * 32
    sample = sample_of(mags, size)
    with np.errstate(all="ignore"):
        mean = mass(sample, -1.0) / size if np.isfinite(sample).all() else INF
    if not 1e-30 < mean < 1e30:
        return exact, None
    unit = math.ldexp(1.0, -math.frexp(mean)[1])
    cuts = cuts_of(method, stages, k / n, sample, unit)
    share = size * (k / n)
    rank = int(share + 4 * math.sqrt(share) + 4)
    below = max(0, (int(np.sort(magnitude_bits(sample))[-rank]) >> 10 << 10) - 1)
    chosen = np.flatnonzero(magnitude_bits(v) > below)
    finite = np.isfinite(v).all() and mass(mags) < INF
    if not finite or len(chosen) > min(n, 4 * k + 8192) or (len(chosen) < k and below > 0):
        return exact, None
    if len(chosen) < k:
        return chosen, None
    bound = float(np.array([below], np.uint32).view(np.float32)[0])
    eta = f32(threshold(method, mags, k, cuts, unit))
    cut, error = tune(eta, bound, mags[chosen], k)
    return (exact if cut is None else chosen[mags[chosen] > np.float32(cut)]), error


def adapt(old, error, ratio, achieved):
    """The next state of a segment: float32[8]."""
    new = old.copy()
    new[3] = achieved
    if error is None:
        return new
    most = min(4, math.ceil(math.log2(1 / ratio) - 1e-9))
    stages = min(max(int(old[0]), 1), most)
    age, errors = int(old[1]) + 1, float(old[2]) + error
    if age >= 5:
        mean, best = errors / 5, stages
        age, errors, here = 0, 0.0, max(abs(mean), 1e-6)
        if here > math.log(1.2):
            new[4:] = (old[4:].astype(np.float64) * 0.9).astype(np.float32)
            step, smallest = -1 if mean > 0 else 1, here
            for other in (stages + step, stages - step):
                if 1 <= other <= most and new[3 + other] < smallest:
                    best, smallest = other, float(new[3 + other])
        new[3 + stages] = here
        stages = best
    new[:3] = stages, age, errors
    return new


def sidco(method, v, bounds, levels, state):
    """(sorted indices of v that are sent, new state float32[m, 8]); state: float32[m, 8]."""
    parts, after = [np.zeros(0, np.int64)], state.copy()
    for s, (a, b) in enumerate(pairwise(bounds)):
        k, error, index = topk_k(b - a, levels[s]), None, np.zeros(0, np.int64)
        if b > a:
            stages = max(1, min(4, int(state[s, 0])))
            index, error = segment(method, v[a:b], k, stages)
        parts.append(index + a)
        after[s] = adapt(state[s], error, k / max(1, b - a), len(index) / max(1, k))
    return np.concatenate(parts), after
