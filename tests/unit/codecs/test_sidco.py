"""SIDCo against its oracle, to the bit, over every way a segment can go; its fits; the golden bytes."""

import hashlib
import math

import numpy as np
import pytest

from gcserver.codecs import parse, sidco_fit
from tests.unit.codecs import oracles, sidco_oracle, sparse_oracles, vectors
from tests.unit.codecs.sparse_cases import GOLDEN_HEX, GOLDEN_X, run, same

METHODS = ["e", "gp", "p"]


def shapes(n, seed):
    """The awkward vectors, and the distributions SIDCo is for."""
    yield from vectors.shapes(n, seed)
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1.0, 1.0], n)
    yield "laplace", rng.laplace(size=n).astype(np.float32)
    yield "pareto", (signs * ((1 - rng.random(n)) ** -0.3 - 1) / 0.3).astype(np.float32)
    yield "lognormal", (signs * 1e-6 * np.exp(1.5 * rng.standard_normal(n))).astype(np.float32)
    yield "layers", (rng.standard_normal(n) * np.repeat(10 ** rng.uniform(-3, 0, 100), -(-n // 100))[:n]).astype("f4")
    yield "light tail", rng.uniform(0.999, 1, n).astype(np.float32)
    hidden = np.full(n, 1e-3, np.float32)
    hidden[n // 2 : n // 2 + n // 50] = 1 + rng.random(n // 50)
    yield "hidden from the sample", hidden


def check(method, x, residual, bounds, ratio, levels=None, steps=1, scale=1.0, decay=1.0, options=(0, 32)):
    packed, width = options
    codec = parse(f"sidco-{method}(ratio={ratio},packed={packed},values={width})+ef(decay={decay})")
    n, m = x.size, len(bounds) - 1
    state = np.zeros(codec.state_floats(n, m), np.float32)
    if residual is not None:
        state[:n] = residual
    each = np.full(m, codec.level) if levels is None else levels
    for _ in range(steps):
        result, payload, new = run(codec, x, None, bounds, scale, levels=levels, state=state)
        v = oracles.corrected(x, state[:n], scale, codec.decay)
        chosen, after = sidco_oracle.sidco(method, v, bounds, each, state[n:].reshape(m, sidco_oracle.STATE))
        expected, left = sparse_oracles.frame(chosen, v, bounds, packed, width)
        assert payload == expected
        assert result.nonfinite == oracles.nonfinite(v)
        assert same(new[:n], left)
        assert same(new[n:], after.reshape(-1))
        state = new


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_equals_oracle_on_every_distribution(method, ratio):
    n = 75_013
    old = vectors.normal(n, seed=9, scale=0.1)
    for name, x in shapes(n, 3):
        for stages in (1, 2, 4):
            codec = parse(f"sidco-{method}(ratio={ratio})+ef(decay=0.5)")
            state = np.zeros(codec.state_floats(n), np.float32)
            state[:n], state[n] = old if name in ("normal", "laplace") else 0, stages
            result, payload, new = run(codec, x, None, np.array([0, n]), 0.25, state=state)
            v = oracles.corrected(x, state[:n], 0.25, 0.5)
            chosen, after = sidco_oracle.sidco(method, v, [0, n], [codec.level], state[n:].reshape(1, -1))
            expected, left = sparse_oracles.frame(chosen, v, [0, n])
            assert payload == expected, (name, stages)
            assert same(new[:n], left), (name, stages)
            assert same(new[n:], after.reshape(-1)), (name, stages)
            assert result.nonfinite == 0
            assert len(chosen) <= codec.most(n, 1, codec.level)
            assert run(codec, x, None, np.array([0, n]), 0.25, state=state, want_state=False)[1] == payload


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", vectors.SIZES)
def test_short_segments_are_exact(n, method):
    old = vectors.normal(n, seed=9, scale=0.1)
    for _, x, bounds in vectors.cases(n, seed=n):
        check(method, x, old, bounds, 0.05)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 66_559, 66_560, 66_561])
def test_sizes_around_the_shortest_estimated_and_around_whole_blocks(n, method):
    check(method, vectors.normal(n, 1), vectors.normal(n, 2, 0.1), np.array([0, n]), 0.01, steps=2)


@pytest.mark.parametrize("method", METHODS)
def test_segments_have_levels_and_states_of_their_own(method):
    bounds = np.array([0, 70_000, 70_000, 70_100, 170_000, 240_000])
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.laplace(size=70_100), 1e-3 * rng.standard_t(3, 99_900), np.zeros(70_000)]).astype("f4")
    levels = np.array([10_000, 5, 250_000, 1_000, 1_000_000], np.uint32)
    check(method, x, None, bounds, 1, levels=levels, steps=12)
    whole = parse(f"sidco-{method}(ratio=0.01)")
    _, payload, new = run(whole, x, None, bounds)
    sent = sparse_oracles.decode(payload, x.size)
    for a, b in ((0, 70_000), (70_100, 170_000)):
        _, part, alone = run(whole, x[a:b], None, np.array([0, b - a]))
        assert np.array_equal(sparse_oracles.decode(part, b - a), sent[a:b])
        assert same(alone[: b - a], new[a:b])


@pytest.mark.parametrize("options", [(1, 32), (0, 16), (1, 8)])
def test_every_form_of_packing(options):
    n = 90_000
    check("e", vectors.normal(n, 1), vectors.normal(n, 2), np.array([0, n]), 0.01, steps=2, options=options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nesterov", [0, 1])
def test_momentum_correction(method, nesterov):
    n, bounds = 80_000, np.array([0, 70_000, 80_000])
    codec = parse(f"sidco-{method}(ratio=0.01)+ef(decay=0.5)+momentum(m=0.9,nesterov={nesterov})")
    state = np.zeros(codec.state_floats(n, 2), np.float32)
    assert state.size == 2 * n + 2 * sidco_oracle.STATE
    state[:n], state[n : 2 * n] = vectors.normal(n, 2, 0.1), vectors.normal(n, 3, 0.1)
    for step in range(3):
        x = vectors.normal(n, 10 + step)
        _, payload, new = run(codec, x, None, bounds, 0.5, state=state)
        v, u = sparse_oracles.momentum(x, state[:n], state[n : 2 * n], 0.5, 0.5, 0.9, nesterov)
        chosen, after = sidco_oracle.sidco(method, v, bounds, [codec.level] * 2, state[2 * n :].reshape(2, -1))
        expected, left = sparse_oracles.frame(chosen, v, bounds)
        u[chosen] = 0
        assert payload == expected
        assert same(new, np.concatenate([left, u, after.reshape(-1)]))
        state = new


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 5000, 100_000])
def test_nonfinite_elements_are_counted(method, value, count):
    n = 100_000
    x = vectors.normal(n, seed=3)
    x[np.random.default_rng(1).permutation(n)[:count]] = value
    for ratio in (0.1, 0.001):
        assert run(parse(f"sidco-{method}(ratio={ratio})"), x, None, np.array([0, n]))[0].nonfinite == count


@pytest.mark.parametrize("method", METHODS)
def test_few_nonzero_elements_go_out_alone(method):
    n = 100_000
    x = np.zeros(n, np.float32)
    x[::137] = vectors.normal(len(x[::137]), 1)
    result, payload, new = run(parse(f"sidco-{method}(ratio=0.01)"), x, None, np.array([0, n]))
    assert np.array_equal(sparse_oracles.decode(payload, n), x)
    assert not new[:n].any()
    assert result.nbytes == 8 + 8 * np.count_nonzero(x)


def test_what_a_block_adds_up_to_does_not_depend_on_neighbours():
    # The same segment elsewhere in a partition, at other addresses: the same elements.
    x = vectors.normal(70_000, 5)
    codec = parse("sidco-p(ratio=0.01)")
    alone = sparse_oracles.decode(run(codec, x, None, np.array([0, 70_000]))[1], 70_000)
    shifted = np.concatenate([vectors.normal(77, 6), x])
    both = sparse_oracles.decode(run(codec, shifted, None, np.array([0, 77, 70_077]))[1], 70_077)
    assert np.array_equal(both[77:], alone)
    x_odd = vectors.unaligned(x)
    assert np.array_equal(sparse_oracles.decode(run(codec, x_odd, None, np.array([0, 70_000]))[1], 70_000), alone)


#: 11 steps each, so that stages move and thresholds are corrected
GOLDEN = {
    "e": "c7d127ab73c6dc6ad7ce5ff2150e131c",
    "gp": "d0b4e8a05500e8649b315301e31f974c",
    "p": "88e034d763c1ab5ec366a6190c2640d4",
}


@pytest.mark.parametrize("method", METHODS)
def test_golden_bytes(method):
    # Quotients of integers: the same on every machine, with a heavy tail.
    i = np.arange(100_000, dtype=np.uint64)
    noise = (i * np.uint64(2654435761)) % np.uint64(1 << 20) + np.uint64(1)
    x = ((1 << 20) / noise.astype(np.float32)).astype(np.float32)
    x[i % np.uint64(3) == 1] *= -1
    codec = parse(f"sidco-{method}(ratio=0.01)")
    state, digest = np.zeros(codec.state_floats(x.size), np.float32), hashlib.sha256()
    for _ in range(11):
        _, payload, state = run(codec, x, None, np.array([0, x.size]), state=state)
        digest.update(payload)
        digest.update(state.tobytes())
    assert digest.hexdigest()[:32] == GOLDEN[method]


def test_golden_layout():
    _, payload, new = run(parse("sidco-e(ratio=0.5)"), GOLDEN_X, None, np.array([0, 4, 6]))
    assert payload.hex() == GOLDEN_HEX
    assert new.tolist() == [0.5, 0, 0, 0, -1, 0, *([0, 0, 0, 1, 0, 0, 0, 0] * 2)]


# ------------------------------------------------------------------------------------------------------- fits
def test_elementary_functions():
    for x in (1e-300, 1e-5, 0.5, 0.7, 0.7071067811865476, 1.0, 1.3, 7.0, 1e10, 1e300):
        assert math.isclose(sidco_fit.ln(x), math.log(x), rel_tol=4e-16, abs_tol=1e-16)
    for x in np.linspace(-690, 690, 1001):
        assert math.isclose(sidco_fit.exp(x), math.exp(x), rel_tol=1e-15)
    assert sidco_fit.exp(-701.0) == 0
    for a in (0.01, 0.1, 0.5, 1.0, 2.0, 3.3, 20.0, 100.0):
        assert math.isclose(sidco_fit.ln_gamma(a), math.lgamma(a), rel_tol=1e-13, abs_tol=1e-13)
    for x in (0.01, 0.5, 1.4, 1.6, 5.0, 20.0):
        assert math.isclose(sidco_fit.gamma_above(0.5, x), math.erfc(math.sqrt(x)), rel_tol=1e-11)
        assert math.isclose(sidco_fit.gamma_above(1.0, x), math.exp(-x), rel_tol=1e-12)


@pytest.mark.parametrize(("kind", "shape"), [(0, 1.0), (1, 0.3), (1, -0.4), (1, 1e-9), (2, 0.05), (2, 0.5), (2, 4.0)])
def test_quantile_is_the_inverse_of_the_share_above(kind, shape):
    for p in (0.5, 0.25, 0.1, 0.01, 0.001, 1e-6):
        x = sidco_fit.quantile(kind, shape, 3.0, p)
        assert math.isclose(sidco_fit.above(kind, shape, 3.0, x), p, rel_tol=1e-7)


@pytest.mark.parametrize(
    ("kind", "draw", "shape", "scale"),
    [
        (0, lambda rng, n: rng.exponential(3, n), 1.0, 3.0),
        (1, lambda rng, n: 2 * ((1 - rng.random(n)) ** -0.2 - 1) / 0.2, 0.2, 2.0),
        (1, lambda rng, n: 2 * ((1 - rng.random(n)) ** 0.3 - 1) / -0.3, -0.3, 2.0),
        (2, lambda rng, n: rng.gamma(0.5, 2, n), 0.5, 2.0),
        (2, lambda rng, n: rng.gamma(2, 2, n), 2.0, 2.0),
    ],
)
def test_estimates_find_the_parameters(kind, draw, shape, scale):
    x = draw(np.random.default_rng(0), 400_000)
    found = sidco_fit.estimate(kind, float(x.size), x.sum(), (x * x).sum(), np.log(x).sum())
    # The gamma estimator is Minka's closed approximation, good to 1.5 %.
    assert found == pytest.approx((shape, scale), rel=0.04)


def test_the_pareto_scale_has_the_variance_not_the_deviation():
    # Algorithm 1, line 17, prints sigma; on an exponential of mean 0.1 the scale is 0.1 with sigma**2 only.
    x = np.random.default_rng(0).exponential(0.1, 400_000)
    shape, scale = sidco_fit.estimate(1, float(x.size), x.sum(), (x * x).sum(), 0.0)
    assert abs(shape) < 0.02
    assert scale == pytest.approx(0.1, rel=0.02)
