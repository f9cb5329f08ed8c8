"""threshold, redsync and gaussiank against their oracles, to the bit, and what their caps hold back."""

from statistics import NormalDist

import numpy as np
import pytest

from gcserver.codecs import by_id, parse
from tests.unit.codecs import sparse_oracles, vectors
from tests.unit.codecs.sparse_cases import FORMS, check_against, run

PLAIN = {"": FORMS[""], ",packed=1,values=8": FORMS[",packed=1,values=8"]}


@pytest.mark.parametrize("value", [1e-30, 0.01, 2.0, 1e30])
@pytest.mark.parametrize("cap", [0.01, 1.0])
def test_threshold_equals_oracle(value, cap):
    for n in vectors.SIZES:
        old = vectors.normal(n, seed=9, scale=0.1)
        for _, x, bounds in vectors.cases(n, seed=n):
            check_against(
                f"threshold(value={value},cap={cap}{{}})+ef(decay=0.5)",
                lambda v, bounds=bounds: sparse_oracles.threshold(v, bounds, value, cap),
                x,
                old,
                bounds,
                0.5,
                forms=PLAIN,
            )


def test_what_equals_the_threshold_is_sent():
    x = np.array([0.1, -0.1, np.nextafter(np.float32(0.1), np.float32(0)), 0], np.float32)
    result, *_ = run(parse("threshold(value=0.1,cap=1)"), x, None, np.array([0, 4]))
    assert result.nbytes == 8 + 8 * 2


def test_a_cap_sends_the_largest_and_keeps_the_rest():
    n = 100_000
    codec = parse("threshold(value=0.5,cap=0.05)")
    x = vectors.normal(n)
    _, payload, new = run(codec, x, None, np.array([0, n]))
    out = np.empty(n, np.float32)
    codec.decode(payload, out)
    assert np.count_nonzero(out) == 5000 and np.array_equal(out + new, x)
    assert np.abs(out[out != 0]).min() >= np.abs(new).max() >= 0.5


def levels_of(codec, bounds):
    return [codec.level] * (len(bounds) - 1)


@pytest.mark.parametrize("spec", ["redsync(ratio={},cap={}{{}})", "redsync(ratio={},trim=1,cap={}{{}})"])
@pytest.mark.parametrize(("ratio", "cap"), [(0.01, 2), (0.1, 1), (0.3, 1000)])
def test_redsync_equals_oracle(spec, ratio, cap):
    template = spec.format(ratio, cap)
    codec = parse(template.format(""))
    trim = "trim" in spec

    def choose(bounds):
        return lambda v: sparse_oracles.redsync(v, bounds, levels_of(codec, bounds), trim, cap)

    for n in (*vectors.SIZES, 50_000):
        old = vectors.normal(n, seed=9, scale=0.1)
        for _, x, bounds in vectors.cases(n, seed=n):
            check_against(template, choose(bounds), x, old if n % 2 else None, bounds, 0.5, forms=PLAIN)


@pytest.mark.parametrize(("ratio", "cap"), [(0.01, 1.333), (0.1, 1), (0.5, 1000)])
def test_gaussiank_equals_oracle(ratio, cap):
    template = f"gaussiank(ratio={ratio},cap={cap}{{}})"
    codec = parse(template.format(""))

    def choose(bounds):
        return lambda v: sparse_oracles.gaussiank(v, bounds, levels_of(codec, bounds), cap, NormalDist().inv_cdf)

    for n in (*vectors.SIZES, 50_000):
        old = vectors.normal(n, seed=9, scale=0.1)
        for _, x, bounds in vectors.cases(n, seed=n):
            check_against(template, choose(bounds), x, old if n % 2 else None, bounds, 0.5, forms=PLAIN)


def test_levels_of_single_segments():
    n, bounds = 60_000, np.array([0, 30_000, 30_000, 40_000, 60_000])
    levels = np.array([1000, 7, 100_000, 20_000], np.uint32)
    x = vectors.normal(n)
    for spec, chosen in (
        ("redsync(ratio=0.1)", sparse_oracles.redsync(x, bounds, levels.tolist(), False, 2)),
        ("gaussiank(ratio=0.1)", sparse_oracles.gaussiank(x, bounds, levels.tolist(), 1.333, NormalDist().inv_cdf)),
    ):
        assert run(parse(spec), x, None, bounds, levels=levels)[1] == sparse_oracles.frame(chosen, x, bounds)[0]
    # A threshold's level is its float32.
    values = np.array([3.5, 1, 2, 2.5], np.float32)
    _, payload, _ = run(parse("threshold(value=1)"), x, None, bounds, levels=values.view(np.uint32))
    chosen = np.flatnonzero(np.abs(x) >= np.repeat(values, np.diff(bounds)))
    assert payload == sparse_oracles.frame(chosen, x, bounds)[0]


def test_gaussiank_sends_about_k_of_normal_data_and_redsync_is_far_off():
    n = 500_000
    x, bounds = vectors.normal(n), np.array([0, n])
    counts = {}
    for name in ("gaussiank", "redsync"):
        for ratio in (0.1, 0.01, 0.001):
            result, *_ = run(parse(f"{name}(ratio={ratio},cap=1000)"), x, None, bounds)
            counts[name, ratio] = (result.nbytes - 8) / 8 / (n * ratio)
    assert all(0.95 < counts["gaussiank", ratio] < 1.05 for ratio in (0.1, 0.01, 0.001))
    assert any(not 0.5 < counts["redsync", ratio] < 2 for ratio in (0.1, 0.01, 0.001))


@pytest.mark.parametrize("spec", ["threshold(value=2)", "redsync(ratio=0.01)", "gaussiank(ratio=0.01)"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted(spec, value):
    codec = parse(spec)
    for n in (1, 100, 5000, 100_000):
        for count in (1, n // 2, n):
            x = vectors.normal(n, seed=3)
            x[np.random.default_rng(0).permutation(n)[:count]] = value
            assert run(codec, x, None, np.array([0, n]))[0].nonfinite == count


def test_the_level_is_the_threshold():
    for value in (1e-30, 1e-9, 0.001, 0.1, 1 / 3, 12345.678, 1e30):
        codec = parse(f"threshold(value={value!r})")
        twin = by_id(19, codec.level)
        assert twin.level == codec.level and twin.values()["value"] == codec.values()["value"]
        assert np.float32(codec.values()["value"]) == np.float32(value)
