"""L-GreCo on any table at all: the budget, the range, the defaults, and a plain programme to compare with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcserver.planner.errors import LevelTable
from gcserver.planner.lgreco import solve
from gcserver.planner.lgreco_dp import FORWARD, TRACE, forward, trace
from tests.unit.planner.lgreco_tables import exact_optimum

quick = settings(max_examples=150, deadline=None)
BUCKETS = 500

#: few small integers make ties and sums that meet the budget exactly; floats of any size do not
counted = st.integers(0, 6).map(float)
anything = st.floats(1e-30, 1e30)
#: sums of tenths round this way and that
tenths = st.integers(1, 40).map(lambda i: i / 10)
either = st.one_of(counted, tenths, anything)


@st.composite
def tables(draw, layers=5, levels=4, errors=either, unknown=False):
    shape = draw(st.integers(1, layers)), draw(st.integers(1, levels))
    n = shape[0] * shape[1]
    error = st.one_of(errors, st.sampled_from([np.nan, np.inf])) if unknown else errors
    return LevelTable(
        tuple(f"layer{i}" for i in range(shape[0])),
        np.cumsum(draw(st.lists(st.integers(1, 9), min_size=shape[1], max_size=shape[1]))),
        np.reshape(draw(st.lists(st.integers(0, 50).map(float), min_size=n, max_size=n)), shape),
        np.reshape(draw(st.lists(error, min_size=n, max_size=n)), shape),
        np.array(draw(st.lists(st.integers(0, shape[1] - 1), min_size=shape[0], max_size=shape[0]))),
    )


@quick
@given(tables(unknown=True), st.lists(st.floats(0.01, 1.0), max_size=4), st.booleans(), st.sampled_from([1, 7, 500]))
def test_budget_range_and_defaults(table, alphas, weighted, buckets):
    layers = np.arange(len(table.names))
    weights = 1.0 + layers if weighted else None
    found = solve(table, alphas=[*alphas, 1.0], weights=weights, buckets=buckets)
    costs = table.sizes * (1.0 + layers if weighted else np.ones(layers.size))[:, None]
    default_cost = costs[layers, table.default].sum()
    for s in found.sets:
        assert set(s.levels) <= set(table.levels.tolist()) and len(s.levels) == layers.size
        picks = np.searchsorted(table.levels, s.levels)
        errors = table.errors[layers, picks]
        pinned = np.array([name in found.pinned for name in table.names])
        assert (picks == table.default)[pinned].all() and np.isfinite(errors[~pinned]).all()
        # never above its budget, as the errors themselves add up
        assert s.error == pytest.approx(errors[~pinned].sum()) and s.error <= s.alpha * found.e_max <= found.e_max
        assert s.cost == pytest.approx(costs[layers, picks].sum())
        assert s.bytes == table.sizes[layers, picks].sum()
    assert found.full.alpha == 1 and found.full.cost <= default_cost * (1 + 1e-12)
    assert [s.alpha for s in found.sets] == sorted({s.alpha for s in found.sets})
    assert [s.cost for s in found.sets] == sorted((s.cost for s in found.sets), reverse=True)


@quick
@given(tables(), st.floats(0.1, 1.0))
def test_between_the_optimum_and_that_of_a_budget_less_a_bucket_a_layer(table, alpha):
    """What rounding up can cost is bounded: a set that keeps alpha - L/D of E_max is found, or one as cheap."""
    found = solve(table, alphas=(alpha, 1.0), buckets=BUCKETS)
    for s in found.sets:
        # a little more, since sums of floats depend on their order
        assert s.cost >= exact_optimum(table, s.alpha * found.e_max * (1 + 1e-9))
        less = s.alpha - (len(table.names) + 2) / BUCKETS
        if less > 0:
            assert s.cost <= exact_optimum(table, less * found.e_max)


@quick
@given(tables(errors=counted))
def test_without_rounding_it_is_the_optimum(table):
    """Errors that are whole buckets: E_max, an integer, as the number of buckets."""
    e_max = int(table.errors[np.arange(len(table.names)), table.default].sum())
    found = solve(table, buckets=max(e_max, 1))
    assert found.full.cost == exact_optimum(table, e_max)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(0, 5), st.integers(1, 5), st.integers(1, 80))
def test_compiled_and_python_agree(seed, layers, choices, width):
    rng = np.random.default_rng(seed)
    units = rng.integers(0, width + 3, (layers, choices))
    costs = np.floor(rng.uniform(0, 4, (layers, choices)))  # ties
    counts = rng.integers(0, choices + 1, layers)
    plain, compiled = forward(units, costs, counts, width), FORWARD(units, costs, counts, width)
    assert all(np.array_equal(a, b) for a, b in zip(plain, compiled, strict=True))
    end = int(rng.integers(width))
    if np.isfinite(plain[0][end]):
        assert np.array_equal(trace(units, plain[1], end), TRACE(units, plain[1], end))
