"""What the tests of qsgd, terngrad and natural share: running a codec between guards, and statistics over seeds."""

from __future__ import annotations

import numpy as np

from tests.unit.codecs import vectors


def run(codec, x, residual=None, bounds=None, scale=1.0, seed=0, levels=None, largest=None, want_residual=True):
    """(Encoded, payload, new residual) between guard zones; largest: the codec whose level is the largest given."""
    n = x.size
    bounds = np.array([0, n] if bounds is None else bounds, np.int64)
    levels = None if levels is None else np.array(levels, np.uint32)
    out, check = vectors.guarded((largest or codec).max_bytes(n, bounds.size - 1))
    raw, check_new = vectors.guarded(4 * n)
    new = raw.view(np.float32) if want_residual and codec.keeps_residual else None
    result = codec.encode(x, residual, new, out, bounds, scale, seed, levels)
    check()
    check_new()
    return result, out[: result.nbytes].tobytes(), new


def decode(codec, payload, n, scale=1.0):
    out = np.full(n, np.nan, np.float32)
    codec.decode(np.frombuffer(payload, np.uint8), out, scale)
    return out


def over_seeds(codec, x, seeds):
    """float64[seeds, n]: what x decodes to, encoded with each of so many seeds."""
    return np.array([decode(codec, run(codec, x, seed=1000 + s)[1], x.size) for s in range(seeds)], np.float64)


def assert_unbiased(decoded, x, variance, tolerance=1e-6):
    """Mean and variance over seeds are those of independent roundings.

    variance: of each element, as the method defines it. Elements that are certain must be exact but for float32
    rounding (tolerance, relative to the largest). The bounds are 4.5 standard deviations of the statistic.
    """
    seeds = decoded.shape[0]
    slack = tolerance * np.abs(x).max()
    sure = variance <= slack**2
    error = decoded.mean(0) - x
    assert (np.abs(error[sure]) <= 2 * slack).all()
    z = error[~sure] / np.sqrt(variance[~sure] / seeds)
    m = z.size
    assert m > 100, "hardly anything to measure"
    assert abs(z.mean()) < 4.5 / np.sqrt(m)
    assert abs((z * z).mean() - 1) < 4.5 * np.sqrt(2 / m) + 2 / seeds
    ratio = ((decoded - x)[:, ~sure] ** 2).mean(0).sum() / variance[~sure].sum()
    assert abs(ratio - 1) < 0.02
    # Errors of neighbours, and of one element with successive seeds, do not go together.
    e = ((decoded - x)[:, ~sure]) / np.sqrt(variance[~sure])
    for a, b in ((e[:, 1:], e[:, :-1]), (e[1:], e[:-1])):
        assert abs((a * b).mean()) < 4.5 / np.sqrt(a.size)
