"""Properties of powersgd over generated partitions: agreement, conservation, counting, nothing written outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcserver.codecs import CodecError
from gcserver.codecs.powersgd import PowerSgd
from gcserver.codecs.powersgd_kernels import largest_rank
from tests.unit.codecs.powersgd_nodes import Node, step

side = st.one_of(st.integers(0, 40), st.integers(41, 200))
partitions = st.lists(st.tuples(side, side), max_size=4)


values = st.sampled_from(["32", "16"])


@given(partitions, st.integers(1, 64), values, st.integers(1, 3), st.integers(0, 2**32 - 1), st.data())
@settings(max_examples=200, deadline=None)
def test_nodes_agree_and_nothing_is_lost(shapes, rank, values, count, seed, data):
    codec = PowerSgd(rank=rank, values=values)
    nodes = [Node(codec, shapes) for _ in range(count)]
    n, rng = nodes[0].n, np.random.default_rng(seed)
    levels = None
    if shapes and data.draw(st.booleans()):
        levels = np.array(data.draw(st.lists(st.integers(1, rank), min_size=len(shapes), max_size=len(shapes))), "u4")
    for _ in range(2):
        xs = [(rng.standard_normal(n) * 10.0 ** rng.uniform(-6, 3)).astype(np.float32) for _ in nodes]
        before = [node.state.copy() for node in nodes]
        for node in nodes:
            node.levels = levels
        outs, first, second = step(nodes, xs, seed=seed)
        assert all(np.array_equal(out, outs[0]) for out in outs)
        assert all(np.array_equal(node.state[n:], nodes[0].state[n:]) for node in nodes)
        assert all(node.encoded.nonfinite == node.second.nonfinite == node.bad == 0 for node in nodes)
        put_in = sum(x.astype(np.float64) + old[:n] for x, old in zip(xs, before, strict=True))
        left = sum(node.state[:n].astype(np.float64) for node in nodes)
        size = max(np.abs(x).max(initial=0) + np.abs(old[:n]).max(initial=0) for x, old in zip(xs, before, strict=True))
        assert np.abs(count * outs[0].astype(np.float64) + left - put_in).max(initial=0) <= 1e-5 * count * size
        assert first.size + second.size <= n
        assert all(payload.size <= codec.max_bytes(n) for node in nodes for payload in node.pay)


@given(partitions, st.integers(1, 8), values, st.sampled_from([np.nan, np.inf, -np.inf]), st.data())
@settings(max_examples=80, deadline=None)
def test_nonfinite_elements_are_counted(shapes, rank, values, bad, data):
    nodes = [Node(PowerSgd(rank=rank, values=values), shapes) for _ in range(2)]
    x = np.zeros(nodes[0].n, np.float32)
    places = data.draw(st.lists(st.integers(0, max(0, x.size - 1)), max_size=5)) if x.size else []
    x[places] = bad
    outs, _, _ = step(nodes, [np.ones_like(x), x])
    assert nodes[1].encoded.nonfinite == len(set(places)) and nodes[0].encoded.nonfinite == 0
    assert nodes[0].bad == (~np.isfinite(outs[0])).sum() and (nodes[0].bad > 0) == bool(places)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 64))
def test_what_is_compressed_is_the_rule(rows, cols, rank):
    best = largest_rank(rows, cols, rank)
    assert best <= rank
    for r in (best, best + 1):
        if 1 <= r <= rank:
            assert (2 * r * (rows + cols) < rows * cols) == (r <= best)


@given(st.binary(max_size=64), st.integers(0, 16))
@settings(max_examples=300, deadline=None)
def test_any_bytes_decode_or_are_refused(data, n):
    codec, out = PowerSgd(rank=1), np.zeros(n, np.float32)
    if len(data) != 4 * n:
        with pytest.raises(CodecError):
            codec.decode(data, out)
        assert not out.any()
    else:
        codec.check(data, n)
        codec.decode(data, out)
        assert out.tobytes() == (np.frombuffer(data, "<f4") * np.float32(1)).tobytes()
