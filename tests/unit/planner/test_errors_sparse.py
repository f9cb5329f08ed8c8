"""Errors and bytes of sparsifiers: those of the codecs themselves."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.codecs import parse
from gcserver.planner.errors import TableError, sparse_levels
from gcserver.planner.errors_sparse import EXACT, sparse_bytes, sparse_counts, sparse_errors, sparse_table
from tests.unit.codecs.sparse_cases import run

LEVELS = np.array([1000, 10_000, 50_000, 500_000, 1_000_000])


@pytest.mark.parametrize("n", [1, 7, 500, 5000])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "heavy"])
def test_error_and_bytes_are_those_of_topk(n, kind):
    rng = np.random.default_rng(n)
    x = {"normal": rng.standard_normal(n), "ties": rng.integers(-3, 4, n), "zeros": np.zeros(n)}.get(
        kind, rng.standard_t(2, n)
    )
    x = x.astype(np.float32)
    errors, sizes = sparse_errors(x, LEVELS), sparse_bytes(n, LEVELS)
    for level, error, size in zip(LEVELS, errors, sizes, strict=True):
        codec = parse(f"topk(ratio={level / 1e6})")
        _, payload, lost = run(codec, x, None, np.array([0, n]))
        assert error == pytest.approx(np.linalg.norm(lost.astype(np.float64)), rel=1e-9, abs=0)
        assert size == len(payload) - 4  # a frame has four bytes of its own
    assert (np.diff(errors) <= 0).all() and errors[-1] == 0


@pytest.mark.parametrize("name", ["sidco-e", "sidco-p"])
def test_what_estimates_its_threshold_loses_no_more_than_said(name):
    x = np.random.default_rng(0).laplace(size=EXACT).astype(np.float32)
    errors = sparse_errors(x, LEVELS[:3], estimated=True)
    assert (errors > sparse_errors(x, LEVELS[:3])).all()
    for level, error in zip(LEVELS[:3], errors, strict=True):
        _, _, lost = run(parse(f"{name}(ratio={level / 1e6})"), x, None, np.array([0, x.size]))
        assert np.linalg.norm(lost[: x.size].astype(np.float64)) <= error


def test_small_segments_few_elements_and_large_ratios_are_exact_even_then():
    x = np.random.default_rng(0).standard_normal(EXACT).astype(np.float32)
    small = x[:-1]
    assert np.array_equal(sparse_errors(small, LEVELS, estimated=True), sparse_errors(small, LEVELS))
    odd = np.array([400, 250_001, 1_000_000])  # k = 26, more than a quarter
    assert np.array_equal(sparse_errors(x, odd, estimated=True), sparse_errors(x, odd))


def test_any_shape_tiny_empty_and_not_finite():
    x = np.arange(12, dtype=np.float32)
    assert np.array_equal(sparse_errors(x.reshape(3, 4), LEVELS), sparse_errors(x, LEVELS))
    assert x.tolist() == list(range(12)), "the gradient is not touched"
    assert sparse_counts(12, LEVELS).tolist() == [1, 1, 1, 6, 12]
    assert sparse_errors(x[:0], LEVELS).tolist() == [0] * 5 and sparse_bytes(0, LEVELS).tolist() == [4] * 5
    x[3] = np.nan
    assert np.isnan(sparse_errors(x, LEVELS)).all()


def test_table():
    gradients = {"a": np.ones((10, 100), np.float32), "b": np.zeros(50, np.float32)}
    table = sparse_table(gradients, sparse_levels(10_000, 5), 10_000, element=2.2)
    assert table.names == ("a", "b") and table.errors.shape == (2, 5) and table.levels[table.default[0]] == 10_000
    assert table.sizes[0, 2] == pytest.approx(4 + 2.2 * 10)
    assert sparse_table({}, LEVELS, 1000).errors.shape == (0, 5)
    with pytest.raises(TableError, match="element: expected a positive"):
        sparse_table(gradients, LEVELS, 1000, element=0)
