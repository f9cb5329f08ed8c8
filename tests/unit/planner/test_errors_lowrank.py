"""Errors and bytes of powersgd: singular values, power iterations, and what the codec itself comes to."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.codecs import parse
from gcserver.planner.errors import TableError
from gcserver.planner.errors_lowrank import lowrank_bytes, lowrank_errors, lowrank_table, matrix_shape
from tests.unit.codecs.powersgd_nodes import Node, step

RANKS = np.array([1, 2, 3, 4, 8])


def spectrum(rows, cols, decay=1.0, seed=0):
    """A matrix whose singular values are 1, 2^-decay, 3^-decay, ..."""
    rng = np.random.default_rng(seed)
    k = min(rows, cols)
    left, right = (np.linalg.qr(rng.standard_normal((n, k)))[0] for n in (rows, cols))
    return ((left * np.arange(1, k + 1) ** -decay) @ right.T).astype(np.float32)


@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (64, 64)])
def test_svd_gives_the_norm_of_what_is_beyond_each_rank(shape):
    x = spectrum(*shape)
    values = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    expected = [np.sqrt((values[r:] ** 2).sum()) for r in RANKS]
    assert lowrank_errors(x, RANKS, method="svd") == pytest.approx(expected, rel=1e-9)


def test_power_iterations_come_close_from_above_and_repeat():
    x = spectrum(80, 120, 0.7)
    exact, power = (lowrank_errors(x, RANKS, method=m, seed=3) for m in ("svd", "power"))
    assert (power >= exact * (1 - 1e-5)).all() and power == pytest.approx(exact, rel=0.02)
    assert np.array_equal(power, lowrank_errors(x, RANKS, method="power", seed=3))
    assert np.array_equal(exact, lowrank_errors(x, RANKS))  # so small a matrix is not worth iterating


def test_auto_iterates_where_ranks_are_few_and_the_matrix_is_large():
    x = spectrum(400, 400, 1.0)
    few = np.array([1, 2])
    assert np.array_equal(lowrank_errors(x, few), lowrank_errors(x, few, method="power"))


@pytest.mark.parametrize("rank", [2, 8])
def test_error_and_bytes_are_those_of_the_codec_once_it_is_warm(rank):
    x = spectrum(70, 90)
    node = Node(parse(f"powersgd(rank={rank})+ef(decay=0)"), [x.shape])
    for _ in range(8):
        (out,), first, second = step([node], [x.ravel()])
    lost = np.linalg.norm(x.ravel().astype(np.float64) - out)
    levels = np.array([rank])
    assert lost == pytest.approx(lowrank_errors(x, levels)[0], rel=0.02)
    assert lowrank_bytes(x.shape, levels)[0] == 4 * (first.size + second.size)


@pytest.mark.parametrize("shape", [(9,), (), (6000, 18), (5, 5), (0, 7), (3, 0)])
def test_what_is_not_compressed_loses_nothing_and_costs_all(shape):
    levels = np.array([9, 64])
    x = np.ones(shape, np.float32)
    assert lowrank_errors(x, levels).tolist() == [0, 0]
    assert lowrank_bytes(shape, levels).tolist() == [4 * x.size] * 2


def test_too_large_a_rank_is_sent_as_it_is():
    # 40 x 60: compressed up to rank 11
    levels = np.array([11, 12])
    assert lowrank_bytes((40, 60), levels).tolist() == [4 * 11 * 100, 4 * 2400]
    errors = lowrank_errors(spectrum(40, 60), levels)
    assert errors[0] > 0 and errors[1] == 0


def test_convolutions_are_matrices_of_their_first_dimension():
    x = spectrum(32, 72)
    assert matrix_shape((32, 8, 3, 3)) == (32, 72) and matrix_shape((7,)) == (7, 0) and matrix_shape(()) == (1, 0)
    assert np.array_equal(lowrank_errors(x.reshape(32, 8, 3, 3), RANKS), lowrank_errors(x, RANKS))


@pytest.mark.parametrize("method", ["svd", "power"])
def test_zeros_low_rank_extremes_and_what_is_not_finite(method):
    zeros = np.zeros((50, 50), np.float32)
    assert lowrank_errors(zeros, RANKS, method=method).tolist() == [0] * 5
    thin = np.outer(np.arange(50), np.arange(50)).astype(np.float32)
    assert (lowrank_errors(thin, RANKS, method=method) <= 1e-3 * np.linalg.norm(thin)).all()
    for factor in (2.0**100, 2.0**-100):  # powers of two, so that nothing rounds
        x = spectrum(50, 50)
        scaled = lowrank_errors(x * np.float32(factor), RANKS, method=method)
        assert scaled == pytest.approx(factor * lowrank_errors(x, RANKS, method=method), rel=1e-5)
    zeros[3, 3] = np.nan
    assert np.isnan(lowrank_errors(zeros, RANKS, method=method)).all()


def test_table_and_refusals():
    gradients = {"a": spectrum(50, 60), "b": np.ones(7, np.float32)}
    table = lowrank_table(gradients, RANKS, [4, 1])
    assert table.default.tolist() == [3, 0] and table.errors[1].tolist() == [0] * 5 and table.sizes[1, 0] == 28
    with pytest.raises(TableError, match="method: expected auto or svd or power, got qr"):
        lowrank_table(gradients, RANKS, 4, method="qr")
    with pytest.raises(TableError, match="iterations: expected at least 1"):
        lowrank_table(gradients, RANKS, 4, iterations=0)
