"""The k-means heuristic, beside L-GreCo at its own error."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.planner.errors import TableError
from gcserver.planner.kmeans import kmeans_levels
from gcserver.planner.lgreco import solve
from tests.unit.planner.lgreco_tables import make_table, spectra_table

RANKS = list(range(8, 65))


def test_large_insensitive_layers_get_the_lowest_level():
    sizes = [[1000, 2000, 4000]] * 3 + [[10, 20, 40]] * 3
    errors = [[1, 0.9, 0.8]] * 3 + [[100, 90, 80]] * 3
    assert kmeans_levels(make_table(sizes, errors, 1), clusters=2) == (1, 1, 1, 3, 3, 3)


def test_six_groups_span_the_range_and_a_seed_repeats():
    table = spectra_table(0, 40, RANKS, 32)
    levels = kmeans_levels(table)
    assert len(set(levels)) == 6 and min(levels) == 8 and max(levels) == 64
    assert kmeans_levels(table) == levels
    assert all(set(kmeans_levels(table, seed=s)) <= set(RANKS) for s in range(5))


@pytest.mark.parametrize("seed", range(6))
def test_lgreco_sends_less_at_the_same_error(seed):
    table = spectra_table(seed, 24, RANKS, 32)
    grouped = table.with_default(kmeans_levels(table, seed=seed))
    found = solve(grouped)  # with k-means' error as E_max
    assert found.full.bytes < grouped.default_bytes and found.full.error <= found.e_max


def test_few_equal_and_unknown_layers():
    assert kmeans_levels(make_table([[1, 2, 3]], [[3, 2, 1]])) == (2,)
    assert kmeans_levels(make_table([[1, 2, 3]] * 9, [[3, 2, 1]] * 9), clusters=6) == (2,) * 9, "one cluster has all"
    assert kmeans_levels(make_table([[1, 2, 3]] * 2, [[0, 0, 0]] * 2), clusters=1) == (2, 2)
    table = make_table([[1, 2, 3]] * 3, [[3, 2, 1], [np.nan] * 3, [30, 20, 10]], 2)
    assert kmeans_levels(table)[1] == 3
    assert kmeans_levels(make_table([], [])) == ()
    with pytest.raises(TableError, match="clusters: expected at least 1"):
        kmeans_levels(table, clusters=0)
