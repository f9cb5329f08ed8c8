"""powersgd against its oracle: what all nodes share to the bit, the rest to rounding; conservation, convergence."""

import numpy as np
import pytest

from gcserver.codecs.powersgd import PowerSgd
from gcserver.codecs.powersgd_kernels import largest_rank
from tests.unit.codecs import oracles, vectors
from tests.unit.codecs import powersgd_oracle as oracle
from tests.unit.codecs.powersgd_nodes import LARGE, ODD, Node, matrices, pieces, step, total


@pytest.mark.parametrize(
    ("rank", "shapes"),
    [*((rank, ODD) for rank in (1, 2, 3, 4, 5, 6, 7, 8)), *((rank, LARGE) for rank in (11, 12, 16))],
)
def test_each_stage_equals_the_oracle(rank, shapes):
    nodes = [Node(PowerSgd(rank=rank, decay=0.75), shapes) for _ in range(3)]
    n = nodes[0].n
    for t in range(3):
        olds = [node.state.copy() for node in nodes]
        xs = [vectors.normal(n, seed=10 * t + i, scale=1e-3 * 10**i) for i in range(3)]
        outs, first, second = step(nodes, xs, 0.5, seed=t)
        vs = [oracles.corrected(x, old[:n], 0.5, 0.75) for x, old in zip(xs, olds, strict=True)]
        state_at = n
        for s, (rows, cols) in enumerate(shapes):
            used = oracle.used_rank(rows, cols, rank)
            sums = [list(pieces(payload, shapes, rank, stage))[s] for stage, payload in enumerate((first, second))]
            v = [list(matrices(v, shapes))[s] for v in vs]
            result = [list(matrices(out, shapes))[s] for out in outs]
            after = [list(matrices(node.state[:n], shapes))[s] for node in nodes]
            room = largest_rank(rows, cols, rank)
            kept = [state[state_at : state_at + room * cols] for state in (*olds, *(node.state for node in nodes))]
            state_at += room * cols
            if used == 0:
                exact = total(v)
                assert np.array_equal(sums[0], exact.ravel())
                for out, rest in zip(result, after, strict=True):
                    assert np.array_equal(out, exact * np.float32(1 / 3)) and not rest.any()
                continue
            warm = kept[0].reshape(room, cols).T if t else oracle.fresh(t, s, cols, used)
            p = oracle.orthonormalise(sums[0])
            expected = oracle.expand(p, sums[1], 3)
            for i in range(3):
                own_p = v[i].astype(np.float64) @ warm.astype(np.float64)
                size = np.abs(v[i]).astype(np.float64) @ np.abs(warm)
                sent = list(pieces(nodes[i].pay[0].view(np.float32), shapes, rank, 0))[s]
                assert (np.abs(sent - own_p) <= 2e-6 * size).all()
                sent = list(pieces(nodes[i].pay[1].view(np.float32), shapes, rank, 1))[s]
                own_q = v[i].T.astype(np.float64) @ p
                size = np.abs(v[i]).T.astype(np.float64) @ np.abs(p)
                assert (np.abs(sent - own_q) <= 1e-5 * size).all()
                assert np.array_equal(result[i], expected)
                rest = v[i] - p.astype(np.float64) @ sent.T
                size = np.abs(v[i]) + np.abs(p) @ np.abs(sent).T
                assert (np.abs(after[i] - rest) <= 1e-6 * size).all()
                assert np.array_equal(kept[3 + i].reshape(room, cols).T, oracle.keep(sums[1]))
        assert state_at == nodes[0].state.size


@pytest.mark.parametrize("rank", [1, 4, 64])
@pytest.mark.parametrize("kind", [name for name, _ in vectors.shapes(10)])
def test_awkward_gradients_are_conserved(rank, kind):
    shapes = ((300, 250), (40, 0), (37, 33))
    nodes = [Node(PowerSgd(rank=rank), shapes) for _ in range(2)]
    n = nodes[0].n
    x = dict(vectors.shapes(n, seed=4))[kind]
    xs = [x, x[::-1].copy()]
    for _ in range(2):
        before = [node.state[:n].astype(np.float64) for node in nodes]
        outs, _, _ = step(nodes, xs)
        assert np.array_equal(outs[0], outs[1])
        sent = 2 * outs[0].astype(np.float64)
        put_in = sum(x.astype(np.float64) + r for x, r in zip(xs, before, strict=True))
        left = sum(node.state[:n].astype(np.float64) for node in nodes)
        sizes = sum(np.abs(x) + np.abs(r) for x, r in zip(xs, before, strict=True))
        assert nodes[0].bad == 0 and np.isfinite(outs[0]).all()
        # Rounding happens at the scale of a matrix's largest element, since P and Q mix its rows and columns.
        assert np.abs(sent + left - put_in).max(initial=0) <= 4e-6 * sizes.max() + 1e-44 * n


def test_a_low_rank_gradient_arrives_whole():
    shapes = ((200, 170),)
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((200, 3)), rng.standard_normal((170, 3))
    node = Node(PowerSgd(rank=4), shapes)
    x = (left @ right.T).astype(np.float32).ravel()
    (out,), _, _ = step([node], [x])
    assert np.abs(out - x).max() < 1e-5 * np.abs(x).max()


def test_the_sum_over_steps_converges_to_the_sum_of_gradients():
    shapes = ((120, 100), (31, 0))
    nodes = [Node(PowerSgd(rank=2), shapes) for _ in range(2)]
    n = nodes[0].n
    xs = [vectors.normal(n, seed=i) for i in range(2)]
    mean = (xs[0] + xs[1]) / 2
    delivered, errors = np.zeros(n), []
    for t in range(1, 241):
        outs, _, _ = step(nodes, xs, seed=t)
        delivered += outs[0]
        errors.append(np.linalg.norm(delivered / t - mean) / np.linalg.norm(mean))
    assert errors[0] > 0.9 and errors[239] < 0.15
    # What is missing is what the residuals hold, and that is bounded: the error of the average falls as 1/t.
    assert errors[239] < 0.6 * errors[119]
    left = (nodes[0].state[:n] + nodes[1].state[:n]) / 2
    assert np.allclose(delivered + left, 240 * mean, atol=2e-3)


def test_without_error_feedback_nothing_is_kept_but_q():
    shapes = ((50, 60), (5, 0))
    node = Node(PowerSgd(rank=2, decay=0), shapes)
    assert node.codec.spec == "powersgd(rank=2)+ef(decay=0)"
    assert node.state.size == 2 * 60
    x = vectors.normal(node.n)
    (first,), _, _ = step([node], [x])
    (second,), _, _ = step([node], [x])
    # Power iteration: a warm Q gives a better approximation of the same matrix.
    assert np.linalg.norm(second - x) < np.linalg.norm(first - x)
    other = PowerSgd(rank=2, decay=0)
    work, out = np.zeros(other.work_floats(shapes), np.float32), np.zeros(4 * node.n, np.uint8)
    floats = [other.payload_floats(i, shapes) for i in (0, 1)]
    other.begin(x, None, None, work, out[: 4 * floats[0]], node.segments, shapes, 1.0, 7)
    aggregate = out[: 4 * floats[0]].view(np.float32).copy()
    other.middle(aggregate, None, work, out[: 4 * floats[1]], node.segments, shapes)
    result = np.zeros(node.n, np.float32)
    other.finish(out[: 4 * floats[1]].view(np.float32).copy(), None, work, result, node.segments, shapes, 1)
    assert np.array_equal(result, first)


def test_a_repeated_step_gives_the_same_bytes_and_a_void_one_leaves_no_trace():
    nodes = [Node(PowerSgd(rank=3), ODD) for _ in range(2)]
    n = nodes[0].n
    step(nodes, [vectors.normal(n, seed=i) for i in range(2)])
    kept = [node.state.copy() for node in nodes]
    xs = [vectors.normal(n, seed=5 + i) for i in range(2)]
    runs = []
    spoilt = xs[0].copy()
    spoilt[40] = np.nan
    for gradients in (xs, [spoilt, xs[1]], xs):
        copies = [x.copy() for x in gradients]
        outs, first, second = step(nodes, gradients, settle=False)
        runs.append([a.tobytes() for a in (*outs, first, second, nodes[0].next, nodes[1].next)])
        for node, old, x, copy in zip(nodes, kept, gradients, copies, strict=True):
            assert np.array_equal(node.state, old) and np.array_equal(x, copy, equal_nan=True)
    assert runs[0] == runs[2]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rank", [1, 3, 4])
def test_nonfinite_elements_are_counted_and_reach_everyone(bad, rank):
    shapes = ((41, 53), (11, 0))
    nodes = [Node(PowerSgd(rank=rank), shapes) for _ in range(2)]
    xs = [vectors.normal(nodes[0].n, seed=i) for i in range(2)]
    xs[1][[3, 500, 41 * 53 + 2]] = bad
    outs, _, _ = step(nodes, xs)
    assert nodes[0].encoded.nonfinite == 0 and nodes[1].encoded.nonfinite == 3
    assert np.array_equal(outs[0], outs[1], equal_nan=True)
    matrix, vector = matrices(outs[0], shapes)
    assert not np.isfinite(matrix).any() and not np.isfinite(vector[2])
    assert nodes[0].bad == matrix.size + 1


def test_large_gradients_do_not_overflow_on_the_way():
    shapes = ((100, 90),)
    node = Node(PowerSgd(rank=4), shapes)
    for _ in range(3):
        x = np.full(node.n, 1e36, np.float32)
        (out,), _, _ = step([node], [x])
        assert np.isfinite(out).all() and node.bad == 0
        node.state[: node.n] = 0
    assert np.allclose(out, 1e36, rtol=1e-5)


def test_nearly_equal_columns_become_orthonormal():
    """Gram-Schmidt once would leave columns that differ by 1e-5 far from orthogonal."""
    shapes = ((500, 90),)
    node = Node(PowerSgd(rank=6), shapes)
    node.begin(vectors.normal(node.n))
    p = vectors.normal(500)[None, :] + 1e-5 * vectors.normal(6 * 500, seed=1).reshape(6, 500)
    p[3] = 2 * p[1]  # dependent
    p[4] = 0
    node.middle(p.astype(np.float32).ravel())
    basis = node.work[: 6 * 500].reshape(6, 500).astype(np.float64)
    assert not basis[3:5].any()
    assert np.allclose(basis @ basis.T, np.diag([1, 1, 1, 0, 0, 1]), atol=1e-6)


def test_a_direction_that_died_is_drawn_afresh():
    shapes = ((60, 50),)
    node = Node(PowerSgd(rank=2), shapes)
    step([node], [np.zeros(node.n, np.float32)], seed=1)
    assert not node.state.any()
    x = vectors.normal(node.n)
    (again,), _, _ = step([node], [x], seed=2)
    fresh = Node(PowerSgd(rank=2), shapes)
    (expected,), _, _ = step([fresh], [x], seed=2)
    assert np.array_equal(again, expected) and again.any()


def test_levels_are_ranks_of_single_segments():
    shapes = ((60, 50), (70, 40), (30, 30))
    codec = PowerSgd(rank=4)
    node = Node(codec, shapes)
    whole = node.state.size
    x = vectors.normal(node.n)
    node.levels = np.array([1, 4, 2], np.uint32)
    assert codec.payload_floats(0, shapes, node.levels) == 60 + 4 * 70 + 2 * 30
    assert codec.payload_floats(1, shapes, node.levels) == 50 + 4 * 40 + 2 * 30
    (out,), _, _ = step([node], [x])
    for s, rank in enumerate((1, 4, 2)):
        part = Node(PowerSgd(rank=rank), shapes[s : s + 1])
        a, b = node.segments[s : s + 2]
        assert np.linalg.matrix_rank(out[a:b].reshape(shapes[s]), tol=1e-3) == rank
        if s == 0:  # the first segment of another partition draws the same Q
            (alone,), _, _ = step([part], [x[a:b]])
            assert np.array_equal(alone, out[a:b])
    node.levels = np.array([4, 1, 4], np.uint32)
    step([node], [x])
    node.levels = None
    (out,), _, _ = step([node], [x])
    assert node.state.size == whole and np.linalg.matrix_rank(out[:3000].reshape(60, 50), tol=1e-3) == 4
