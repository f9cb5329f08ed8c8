"""L-GreCo's choice: near the optimum, within its budget, and the cases in which the released code fails."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.planner.accordion import accordion
from gcserver.planner.errors import TableError
from gcserver.planner.lgreco import solve
from tests.unit.planner.lgreco_tables import drawn_table, exact_optimum, make_table, spectra_table


@pytest.mark.parametrize(("layers", "count", "seeds"), [(1, 7, 20), (2, 7, 30), (4, 7, 20), (8, 7, 10), (20, 10, 3)])
def test_within_one_percent_of_the_exact_optimum(layers, count, seeds):
    for seed in range(seeds):
        table = drawn_table(seed, layers, count, 3)
        found = solve(table)
        assert found.full.cost <= 1.01 * exact_optimum(table, found.e_max)
        assert found.full.error <= found.e_max


def test_within_one_percent_with_many_ranks():
    for seed in range(3):
        table = spectra_table(seed, 10, list(range(8, 65)), 32)
        found = solve(table)
        assert found.full.cost <= 1.01 * exact_optimum(table, found.e_max) < table.default_bytes


def test_coarser_buckets_are_worse_but_within_the_budget():
    table = spectra_table(1, 16, list(range(8, 65)), 32)
    fine, coarse = solve(table), solve(table, buckets=40)
    assert fine.full.cost < coarse.full.cost <= table.default_bytes and coarse.full.error <= coarse.e_max


# ---------------------------------------------------------------- cases that the released code gets wrong
def test_a_single_layer_gets_its_default():
    assert solve(make_table([[1, 2, 3]], [[3, 2, 1]], 1)).full.levels == (2,)


def test_equal_layers_get_equal_levels():
    for layers in (2, 3, 17):
        found = solve(make_table([[1, 2, 4]] * layers, [[3, 2, 1]] * layers))
        assert found.full.levels == (1,) * layers


def test_the_default_is_feasible_at_any_end_of_the_range():
    # every error rounded up, the released code finds nothing here and answers with one less than the range
    errors = [[1.00003, 0.1], [1.00007, 0.2], [0.99991, 0.3]]
    for default in (0, 1):
        found = solve(make_table([[1, 2]] * 3, errors, default))
        assert found.full.levels == (default + 1,) * 3 and found.full.error == found.e_max


def test_what_rounding_up_pushes_beyond_the_last_bucket_is_still_found():
    # with 10 buckets for 6 layers what is good ends beyond the tenth; stopping there costs 1.7 and 2.6 times as much
    for seed in (3, 4):
        table = drawn_table(seed, 6, 5, 3)
        found = solve(table, buckets=10)
        assert found.full.cost <= 1.3 * exact_optimum(table, found.e_max) and found.full.reason == "dp"


def test_gradients_of_zero_cost_nothing_to_compress():
    found = solve(make_table([[1, 2]] * 2, [[0, 0]] * 2, 1))
    assert found.e_max == 0 and found.full.levels == (1, 1)
    # one layer of zeros beside another
    found = solve(make_table([[1, 2]] * 2, [[0, 0], [2, 1]], 1))
    assert found.full.levels == (1, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_layer_of_unknown_error_keeps_its_default(bad):
    found = solve(make_table([[1, 2, 3]] * 3, [[9, 4, 1], [bad] * 3, [3.5, 3, 2]], 1))
    assert found.pinned == ("layer1",) and found.full.levels[1] == 2
    assert found.e_max == 7 and found.full.error <= 7
    single = solve(make_table([[1, 2, 3]], [[bad] * 3], 2))
    assert single.pinned == ("layer0",) and single.full.levels == (3,) and single.full.bytes == 3


def test_levels_without_an_error_are_not_used():
    found = solve(make_table([[1, 2, 3]], [[np.nan, np.inf, 0.5]], 2))
    assert not found.pinned and found.full.levels == (3,)


def test_errors_beyond_the_budget_are_skipped_not_cut_to_it():
    # cut to D, the first layer's cheapest level would look as if it fitted
    found = solve(make_table([[1, 100], [1, 1]], [[50, 1], [0, 0]], 1))
    assert found.full.levels == (2, 1) and found.full.error == 1


def test_a_cheaper_level_of_no_larger_error_is_taken():
    # a thin matrix is sent whole above some rank, so that sizes need not ascend
    assert solve(make_table([[5, 3, 9]], [[2, 1, 0]], 0)).full.levels == (2,)
    assert solve(make_table([[2, 2, 2]], [[1, 0, 0]], 0)).full.cost == 2


def test_combined_with_accordion_nothing_is_below_the_range():
    # all layers critical, so the defaults are the most precise of the range: the released code answers with rank 1
    table = spectra_table(2, 12, list(range(8, 65)), 16)
    high = accordion(None, [1.0] * 12, low=16, high=64)
    found = solve(table.with_default(high))
    assert min(found.full.levels) >= 8 and found.full.error <= found.e_max
    assert found.full.bytes <= table.with_default(high).default_bytes


# ---------------------------------------------------------------- budgets
def test_one_programme_gives_sets_for_smaller_budgets():
    table = drawn_table(5, 12, 8, 3)
    found = solve(table, alphas=np.linspace(0.4, 1.0, 7))
    assert [s.alpha for s in found.sets] == sorted(s.alpha for s in found.sets) and len(found.sets) == 7
    for s in found.sets:
        assert s.error <= s.alpha * found.e_max
        assert s.cost <= 1.01 * exact_optimum(table, s.alpha * found.e_max)
    costs = [s.cost for s in found.sets]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
    assert found.full is found.sets[-1]
    assert found.at(1.0) is found.sets[-1] and found.at(0.55) is found.sets[1] and found.at(0.1) is found.sets[0]


def test_a_budget_that_nothing_keeps_gets_the_most_precise_levels():
    table = make_table([[1, 2, 4]] * 2, [[5, 3, 2]] * 2, 1)
    found = solve(table, alphas=(0.1, 0.2, 1.0))
    first = found.sets[0]
    assert first.levels == (3, 3) and first.reason == "precise"
    assert first.alpha == pytest.approx(4 / 6) and first.error <= first.alpha * found.e_max
    assert len(found.sets) == 2 and found.full.alpha == 1


def test_the_reason_is_told():
    assert solve(drawn_table(0, 6, 7, 3)).full.reason == "dp"
    # with one bucket everything is rounded up to all of the budget
    assert solve(make_table([[1, 2, 3]] * 4, [[1.5, 1, 0.5]] * 4, 1), buckets=1).full.reason in ("default", "dp")


def test_weights_move_bytes_to_where_they_cost_less():
    table = make_table([[1, 2]] * 2, [[2, 1]] * 2, [0, 1])
    for weights, levels in (([1.0, 3.0], (2, 1)), ([3.0, 1.0], (1, 2))):
        found = solve(table, weights=np.array(weights)).full
        assert found.levels == levels and found.bytes == 3 and found.cost == 5


def test_ties_fall_the_same_way_every_time():
    table = make_table([[3, 3, 3], [3, 3, 3], [1, 2, 3]], [[2, 2, 2], [1, 1, 1], [2, 2, 2]], 2)
    assert solve(table) == solve(table) and solve(table).full.levels == (1, 1, 1)


def test_no_layers():
    found = solve(make_table([], []))
    assert found.full.levels == () and found.full.cost == 0 == found.e_max


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"alphas": ()}, "alphas: expected budgets above 0"),
        ({"alphas": (0.5, 1.5)}, "alphas: expected budgets above 0, at most 1"),
        ({"alphas": (0.0,)}, "alphas: expected budgets above 0"),
        ({"weights": np.array([1.0])}, "weights: expected a positive number for each of 2 layers"),
        ({"weights": np.array([1.0, 0.0])}, "weights: expected a positive number"),
        ({"buckets": 0}, "buckets: expected at least 1"),
    ],
)
def test_refusals(more, said):
    with pytest.raises(TableError, match=said):
        solve(make_table([[1, 2]] * 2, [[2, 1]] * 2), **more)
