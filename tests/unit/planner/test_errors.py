"""The table of levels: what it refuses, defaults, owners, and ranges as the paper has them."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.codecs import parse
from gcserver.planner.errors import (
    BITS,
    RANKS,
    LevelTable,
    TableError,
    default_indices,
    quantiser_levels,
    rank_levels,
    sparse_levels,
    unusable,
)
from tests.unit.planner.lgreco_tables import make_table


@pytest.mark.parametrize(
    ("sizes", "errors", "default", "said"),
    [
        ([[1, 2]], [[1, 0], [1, 0]], [0], "errors: expected 1 layers x 2 levels"),
        ([[1, -2]], [[1, 0]], [0], "sizes: expected finite numbers"),
        ([[1, np.inf]], [[1, 0]], [0], "sizes: expected finite numbers"),
        ([[1, 2]], [[1, -0.5]], [0], "errors: expected L2 norms, none negative, got -0.5"),
        ([[1, 2]], [[1, 0]], [2], "default: expected an index below 2"),
        ([[1, 2]], [[1, 0]], [0, 0], "default: expected an index below 2 for each of 1 layers"),
    ],
)
def test_a_table_that_is_none_is_refused(sizes, errors, default, said):
    arrays = np.array(sizes, np.float64), np.array(errors, np.float64), np.array(default, np.int64)
    with pytest.raises(TableError, match=said):
        LevelTable(("a",), np.array([1, 2]), *arrays)


def test_levels_ascend():
    good = make_table([[1, 2]], [[1, 0]])
    for levels in ([2, 1], [1, 1], []):
        with pytest.raises(TableError, match="levels: expected at least one level, ascending"):
            type(good)(good.names, np.array(levels, np.int64), good.sizes, good.errors, good.default)


def test_defaults_are_levels_of_the_range():
    levels = np.array([10, 100, 1000])
    assert default_indices(levels, 100, 3).tolist() == [1, 1, 1]
    assert default_indices(levels, [1000, 10], 2).tolist() == [2, 0]
    for wrong in (11, 5000, [10, 99]):
        with pytest.raises(TableError, match=r"default: expected levels of the range, \[10, 100, 1000\]"):
            default_indices(levels, wrong, 2)
    with pytest.raises(TableError, match="one for each of 3 layers, got 2 levels"):
        default_indices(levels, [10, 10], 3)


def test_other_defaults_and_owners():
    table = make_table([[1, 2], [3, 4]], [[5, 1], [7, 2]])
    assert table.default_bytes == 4 and table.with_default([2, 1]).default_bytes == 5
    assert table.with_owner(table).errors.tolist() == [[10, 2], [14, 4]]
    with pytest.raises(TableError, match="aggregate: expected a table of the same layers"):
        table.with_owner(make_table([[1, 2]], [[5, 1]]))


def test_ranges_are_the_papers_and_what_codecs_take():
    assert quantiser_levels(4).tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert rank_levels(32).tolist() == list(range(16, 65))
    assert rank_levels(32, narrower=4, wider=4).tolist() == list(range(8, 65))
    sparse = sparse_levels(10_000)
    assert sparse.size == 100 and sparse[[0, 1, 9, -1]].tolist() == [1000, 2000, 10_000, 100_000]
    few = sparse_levels(10_000, 9)
    assert few[0] == 1000 and few[-1] == 100_000 and 10_000 in few and few.size == 9
    # never rank 0, more bits than there are, or more than everything
    assert rank_levels(1).tolist() == [1, 2] and quantiser_levels(8).tolist() == [4, 5, 6, 7, 8]
    assert sparse_levels(200_000)[-1] == 1_000_000 and sparse_levels(1)[0] == 1
    assert parse("qsgd").levels == BITS and parse("powersgd(rank=64)").levels == RANKS


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: quantiser_levels(1), "default: expected 2..8, got 1"),
        (lambda: rank_levels(65), "default: expected 1..64, got 65"),
        (lambda: rank_levels(4, narrower=0), "range: expected factors"),
        (lambda: sparse_levels(0), "default: expected 1..1000000"),
        (lambda: sparse_levels(10, 1), "count: expected at least 2"),
    ],
)
def test_a_range_that_is_none_is_refused(call, said):
    with pytest.raises(TableError, match=said):
        call()


def test_what_is_not_finite_is_seen_and_what_is_large_is_not_taken_for_it():
    x = np.full(1000, np.finfo(np.float32).max, np.float32)
    assert not unusable(x) and not unusable(np.zeros(0, np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        x[500] = bad
        assert unusable(x)
    assert unusable(np.array([np.inf, -np.inf], np.float32))
