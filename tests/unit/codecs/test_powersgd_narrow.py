"""powersgd with P and Q of 16 bits: what travels, what is kept, what all nodes share."""

import numpy as np
import pytest

from gcserver.codecs import CodecError, by_id, parse
from gcserver.codecs.powersgd import NARROW, WHOLE, PowerSgd
from tests.unit.codecs import powersgd_oracle as oracle
from tests.unit.codecs import vectors
from tests.unit.codecs.powersgd_nodes import ODD, Node, matrices, step, total


def bfloat(x):
    """float32 rounded to bfloat16, to nearest even (no saturation: the tests' values are far from it)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def test_spec_and_level_say_it():
    codec = parse("powersgd(rank=12,values=16)")
    assert codec.spec == "powersgd(rank=12,values=16)+ef"
    assert (codec.level, codec.own_level, codec.levels) == (12 | NARROW, 12, (1, 12))
    assert by_id(codec.id, codec.level).spec == codec.spec and not by_id(codec.id, codec.level).plain
    assert parse("powersgd(rank=12,values=32)").spec == "powersgd(rank=12)+ef"
    for level in (0, 65, NARROW, NARROW | 65, 2 * NARROW | 4):
        with pytest.raises(CodecError, match="level"):
            by_id(codec.id, level)
    with pytest.raises(CodecError, match="values"):
        parse("powersgd(rank=12,values=8)")


def test_golden_bytes():
    """As with 32 bits (5x5, rank 1, warm Q = e1/8), the vector first and as it is."""
    shapes = ((5, 5), (2, 0))
    node = Node(PowerSgd(rank=1, values="16"), shapes)
    node.state[27] = 0.125
    x = np.zeros(27, np.float32)
    x[:5] = [8, -4, 2, 1, 0.5]
    x[25:] = [3, -1]
    node.begin(x)
    assert node.pay[0].tobytes().hex() == "02000000" + "00004040" + "000080bf" + "803f" + 4 * "0000"
    node.middle(node.vector(0))
    assert node.pay[1].tobytes().hex() == "00000000" + "0041" + "80c0" + "0040" + "803f" + "003f"


@pytest.mark.parametrize("rank", [1, 3, 4, 11])
def test_as_with_32_bits_but_for_the_rounding(rank):
    """The same P, Q, result and state as a codec of 32 bits whose vectors are rounded on the way."""
    narrow, wide = Node(PowerSgd(rank=rank, values="16"), ODD), Node(PowerSgd(rank=rank), ODD)
    n = wide.n
    x = vectors.normal(n, seed=rank)
    narrow.begin(x)
    wide.begin(x)
    used = [oracle.used_rank(rows, cols, rank) for rows, cols in ODD]
    sizes = [(rows * cols if cols else rows) if not r else r * rows for r, (rows, cols) in zip(used, ODD, strict=True)]
    parts = np.split(wide.pay[0].view(np.float32), np.cumsum(sizes)[:-1])
    expected = [p for p, r in zip(parts, used, strict=True) if not r]
    expected += [bfloat(p) for p, r in zip(parts, used, strict=True) if r]
    first = narrow.vector(0)
    assert np.array_equal(first, np.concatenate(expected))
    assert narrow.pay[0].size == 4 + 2 * first.size + 2 * sum(s for s, r in zip(sizes, used, strict=True) if not r)
    # the same first aggregate for both, in the order of each
    whole, factors = list(np.split(first, np.cumsum([p.size for p in expected])[:-1])), []
    it = iter(whole[: used.count(0)]), iter(whole[used.count(0) :])
    for r in used:
        factors.append(next(it[bool(r)]))
    narrow.middle(first)
    wide.middle(np.concatenate(factors))
    assert np.array_equal(narrow.vector(1), bfloat(wide.pay[1].view(np.float32)))
    # alone: the sum is the node's own, and bfloat16 already
    out = narrow.finish(narrow.vector(1), 1)
    for s, (a, v, rest, r) in enumerate(
        zip(matrices(out, ODD), matrices(x, ODD), matrices(narrow.next[:n], ODD), used, strict=True)
    ):
        if r:
            assert np.abs(a.astype(np.float64) + rest - v).max(initial=0) <= 4e-6 * np.abs(v).max(initial=0), s
        else:
            assert np.array_equal(a, v) and not rest.any(), s


@pytest.mark.parametrize("kind", [name for name, _ in vectors.shapes(10)])
def test_awkward_gradients_are_conserved(kind):
    """What is rounded off a sum is in its owner's residual, what is rounded off a contribution in the node's own."""
    shapes = ((300, 250), (40, 0), (37, 33))
    nodes = [Node(PowerSgd(rank=4, values="16"), shapes) for _ in range(3)]
    n = nodes[0].n
    x = dict(vectors.shapes(n, seed=4))[kind]
    xs = [x, x[::-1].copy(), np.roll(x, n // 3)]
    for _ in range(3):
        before = [node.state[:n].astype(np.float64) for node in nodes]
        outs, _, _ = step(nodes, xs)
        assert all(np.array_equal(out, outs[0]) for out in outs)
        assert all(np.array_equal(node.state[n:], nodes[0].state[n:]) for node in nodes)
        put_in = sum(x.astype(np.float64) + r for x, r in zip(xs, before, strict=True))
        left = sum(node.state[:n].astype(np.float64) for node in nodes)
        sizes = sum(np.abs(x) + np.abs(r) for x, r in zip(xs, before, strict=True))
        error = np.abs(3 * outs[0].astype(np.float64) + left - put_in).max(initial=0)
        assert nodes[0].bad == 0 and error <= 6e-6 * sizes.max() + 1e-44 * n


def test_without_the_owners_part_what_is_rounded_off_would_be_lost():
    shapes = ((120, 100),)
    lost = []
    for told in (True, False):
        nodes = [Node(PowerSgd(rank=4, values="16"), shapes) for _ in range(2)]
        xs = [vectors.normal(nodes[0].n, seed=i) for i in range(2)]
        first = nodes[0].stored(0, total([node.begin(x) for node, x in zip(nodes, xs, strict=True)]))
        added = total([node.middle(first) for node in nodes])
        second = nodes[0].stored(1, added)
        assert not np.array_equal(second, added)
        out = nodes[0].finish(second, 2, added if told else None)
        nodes[1].finish(second, 2)
        lost.append(np.abs(2 * out + nodes[0].next[:12000] + nodes[1].next[:12000] - xs[0] - xs[1]).max())
    assert lost[0] < 1e-5 < 1e-3 < lost[1]


def test_the_sum_over_steps_converges_to_the_sum_of_gradients():
    shapes = ((120, 100), (31, 0))
    nodes = [Node(PowerSgd(rank=2, values="16"), shapes) for _ in range(2)]
    n = nodes[0].n
    xs = [vectors.normal(n, seed=i) for i in range(2)]
    delivered, errors, mean = np.zeros(n), [], (xs[0] + xs[1]) / 2
    for t in range(1, 241):
        outs, _, _ = step(nodes, xs, seed=t)
        delivered += outs[0]
        errors.append(np.linalg.norm(delivered / t - mean) / np.linalg.norm(mean))
    assert errors[239] < 0.15 and errors[239] < 0.6 * errors[119]
    left = (nodes[0].state[:n] + nodes[1].state[:n]) / 2
    assert np.allclose(delivered + left, 240 * mean, atol=2e-3)


def test_levels_and_segments_that_are_sent_whole():
    shapes = ((60, 50), (70, 40), (30, 30))
    codec = PowerSgd(rank=4, values="16")
    node = Node(codec, shapes)
    node.levels = np.array([1, WHOLE, 2], np.uint32)
    x = vectors.normal(node.n)
    (out,), _, _ = step([node], [x])
    assert codec.payload_bytes(0, shapes, node.levels) == 4 + 4 * 2800 + 2 * (60 + 2 * 30)
    assert codec.payload_bytes(1, shapes, node.levels) == 4 + 2 * (50 + 2 * 30)
    assert np.array_equal(out[3000:5800], x[3000:5800]), "what is sent whole is exact"
    node.levels = np.full(3, WHOLE, np.uint32)
    assert codec.payload_bytes(1, shapes, node.levels) == 0
    (rest,), _, _ = step([node], [np.zeros(node.n, np.float32)])
    assert not np.allclose(out, x, atol=0.1) and np.allclose(out + rest, x, atol=1e-5), "what was held back is out"
    assert not node.state[: node.n].any()
    assert codec.max_bytes(node.n) >= codec.payload_bytes(0, shapes, node.levels)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted_and_reach_everyone(bad):
    shapes = ((41, 53), (11, 0))
    nodes = [Node(PowerSgd(rank=3, values="16"), shapes) for _ in range(2)]
    xs = [vectors.normal(nodes[0].n, seed=i) for i in range(2)]
    xs[1][[3, 500, 41 * 53 + 2]] = bad
    outs, _, _ = step(nodes, xs)
    assert nodes[0].encoded.nonfinite == 0 and nodes[1].encoded.nonfinite == 3
    matrix, vector = matrices(outs[0], shapes)
    assert not np.isfinite(matrix).any() and not np.isfinite(vector[2])


def test_without_error_feedback_nothing_is_kept_but_q():
    shapes = ((50, 60), (5, 0))
    node = Node(PowerSgd(rank=2, values="16", decay=0), shapes)
    assert node.codec.spec == "powersgd(rank=2,values=16)+ef(decay=0)" and node.state.size == 2 * 60
    x = vectors.normal(node.n)
    (first,), _, _ = step([node], [x])
    (second,), _, _ = step([node], [x])
    assert np.linalg.norm(second - x) < np.linalg.norm(first - x)
