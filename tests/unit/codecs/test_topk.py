"""topk against its oracle, to the bit, over every way its selection can go."""

import numpy as np
import pytest

from gcserver.codecs import CodecError, parse
from tests.unit.codecs import oracles, sparse_oracles, vectors
from tests.unit.codecs.sparse_cases import GOLDEN_HEX, GOLDEN_X, run, same


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("n", vectors.SIZES)
def test_equals_oracle_on_awkward_vectors(n, ratio):
    codec = parse(f"topk(ratio={ratio})")
    old = vectors.normal(n, seed=9, scale=0.1)
    for name, x, bounds in vectors.cases(n, seed=n):
        for residual in (None, old):
            result, payload, new = run(codec, x, residual, bounds)
            v = oracles.corrected(x, residual)
            expected, expected_new = oracles.topk(v, bounds, codec.level)
            assert payload == expected, (name, bounds)
            assert same(new, expected_new), (name, bounds)
            assert result.nonfinite == oracles.nonfinite(v)


# The ways through selection: the sample predicts well; it predicts badly because what is large is hidden
# from it; a histogram bin holds too many candidates; the threshold is shared by most elements.
@pytest.mark.parametrize("ratio", [0.0005, 0.01, 0.1, 0.4])
@pytest.mark.parametrize("n", [40_000, 300_007])
def test_equals_oracle_on_large_vectors(n, ratio):
    codec = parse(f"topk(ratio={ratio})+ef(decay=0.5)")
    old = vectors.normal(n, seed=5, scale=0.1)
    bounds = np.array([0, n], np.int64)
    for name, x in vectors.shapes(n, seed=1):
        for residual in (None, old) if name != "ascending" else (None,):
            _, payload, new = run(codec, x, residual, bounds, scale=0.25)
            v = oracles.corrected(x, residual, 0.25, 0.5)
            expected, expected_new = oracles.topk(v, bounds, codec.level)
            assert payload == expected, name
            assert same(new, expected_new), name
            assert run(codec, x, residual, bounds, 0.25, want_state=False)[1] == expected, name


def test_equals_oracle_where_segments_meet_within_candidates():
    # Several large segments in one workspace, ties at every threshold.
    n = 200_000
    bounds = np.array([0, 60_000, 60_007, 130_000, n])
    for seed in range(3):
        x = oracles.corrected(np.round(vectors.normal(n, seed, scale=3)), None)
        codec = parse("topk(ratio=0.05)")
        _, payload, new = run(codec, x, None, bounds)
        expected, expected_new = oracles.topk(x, bounds, codec.level)
        assert payload == expected and same(new, expected_new)


def test_levels_of_single_segments():
    n, bounds = 50_000, np.array([0, 20_000, 20_000, 30_000, 50_000])
    levels = np.array([1000, 7, 500_000, 20_000], np.uint32)
    codec = parse("topk(ratio=0.4)")
    x = vectors.normal(n)
    _, payload, new = run(codec, x, None, bounds, levels=levels)
    parts = [
        sparse_oracles.largest(x, a, b, oracles.topk_k(b - a, int(level)))
        for a, b, level in zip(bounds[:-1], bounds[1:], levels, strict=True)
    ]
    expected, left = sparse_oracles.frame(np.concatenate(parts), x, bounds)
    assert payload == expected and same(new, left)
    for wrong in (levels[:3], levels.astype(np.int64), np.array([0, 1, 1, 1], np.uint32), levels + 10**6):
        with pytest.raises(CodecError, match="levels"):
            run(codec, x, None, bounds, levels=wrong)


def test_a_buffer_must_hold_what_the_levels_ask_for():
    codec, n, bounds = parse("topk(ratio=0.01)"), 10_000, np.array([0, 1000, 10_000])
    out = np.zeros(codec.max_bytes(n, 2), np.uint8)
    with pytest.raises(CodecError, match="out: expected at least"):
        codec.encode(vectors.normal(n), None, None, out, bounds, levels=np.array([10_000, 20_000], np.uint32))
    # One segment may have more if another has less.
    levels = np.array([91_000, 1_000], np.uint32)
    assert codec.encode(vectors.normal(n), None, None, out, bounds, levels=levels).nbytes == 12 + 8 * (91 + 9)


@pytest.mark.parametrize("n", [1, 100, 5000, 100_000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted(n, value):
    codec = parse("topk(ratio=0.01)")
    for count in (1, n // 2, n):
        x = vectors.normal(n, seed=3)
        x[np.random.default_rng(0).permutation(n)[:count]] = value
        assert run(codec, x, None, np.array([0, n]))[0].nonfinite == count


def test_overflow_of_gradient_plus_residual_is_nonfinite():
    x = np.array([3e38, 1.0], np.float32)
    assert run(parse("topk(ratio=1)"), x, x, np.array([0, 2]))[0].nonfinite == 1


def test_golden_bytes():
    _, payload, new = run(parse("topk(ratio=0.5)"), GOLDEN_X, None, np.array([0, 4, 6]))
    assert payload.hex() == GOLDEN_HEX
    assert new.tolist() == [0.5, 0, 0, 0, -1, 0]


def test_k_is_exact_in_millionths():
    # 0.07 * 100 is 7.000000000000001 and 0.29 * 100 is 28.999999999999996 in binary floating point.
    for ratio, n, k in ((0.07, 100, 7), (0.29, 100, 29), (0.01, 99, 1), (0.01, 200, 2), (1e-6, 5, 1)):
        result, *_ = run(parse(f"topk(ratio={ratio})"), vectors.normal(n), None, np.array([0, n]))
        assert result.nbytes == 8 + 8 * k
