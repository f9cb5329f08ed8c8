"""Properties of SIDCo on segments long enough to be estimated: the oracle's bytes, conservation, bounds, no trace."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcserver.codecs import by_id, parse
from tests.unit.codecs import oracles, sidco_oracle, sparse_oracles
from tests.unit.codecs.sparse_cases import run, same

LONG = 1 << 16
USUAL = [1000, 10_000, 100_000, 1_000_000]


@st.composite
def cases(draw):
    """(x, residual, boundaries, levels): from one or two families of distributions, at any scale a float32 has."""
    n = draw(st.integers(LONG, 3 * LONG))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    power, scale = draw(st.floats(0.2, 6.0)), 10.0 ** draw(st.floats(-38, 30))
    with np.errstate(over="ignore", under="ignore"):
        x = rng.standard_normal(n)
        x = (np.sign(x) * np.abs(x) ** power * scale).astype(np.float32)
    x[~np.isfinite(x)] = 0
    if draw(st.booleans()):
        x[rng.random(n) < draw(st.floats(0.3, 0.9999))] = 0
    if draw(st.booleans()):
        steps = draw(st.integers(1, 1000)) / max(float(np.abs(x).max()), 1e-30)
        x = (np.round(x * steps) / steps).astype(np.float32)  # ties
    residual = (0.3 * np.roll(x, 1)).astype(np.float32)
    cut = draw(st.sampled_from([0, n]) | st.integers(0, n))
    levels = draw(st.lists(st.integers(1, 260_000) | st.sampled_from(USUAL), min_size=2, max_size=2))
    return x, residual, np.array([0, cut, n]), np.array(levels, np.uint32)


@pytest.mark.parametrize("name", ["sidco-e", "sidco-gp", "sidco-p"])
@given(case=cases(), stages=st.integers(0, 4), seen=st.floats(-2, 2))
@settings(max_examples=40, deadline=None)
def test_bytes_state_and_conservation(name, case, stages, seen):
    x, residual, bounds, levels = case
    n, codec = x.size, parse(f"{name}(ratio=1)+ef(decay=0.5)")
    state = np.zeros(codec.state_floats(n, 2), np.float32)
    state[:n] = residual
    for s in range(2):
        state[n + 8 * s :][:3] = stages, 4 * (stages > 0), seen * (stages > 0)
    before = state.copy()
    result, payload, new = run(codec, x, None, bounds, 0.5, levels=levels, state=state)
    v = oracles.corrected(x, residual, 0.5, 0.5)
    chosen, after = sidco_oracle.sidco(codec.name[6:], v, bounds, levels, before[n:].reshape(2, -1))
    expected, left = sparse_oracles.frame(chosen, v, bounds)
    assert payload == expected
    assert same(new, np.concatenate([left, after.reshape(-1)]))
    assert result.nonfinite == oracles.nonfinite(v)
    # Sent plus kept is what there was, and nothing is both.
    sent = np.empty_like(x)
    codec.decode(np.frombuffer(payload, np.uint8), sent)
    assert np.array_equal(sent + new[:n], v)
    assert not (sent * new[:n]).any()
    # A repeated step gives the same and leaves no trace.
    assert same(state, before)
    again = run(codec, x, None, bounds, 0.5, levels=levels, state=state)
    assert again[1] == payload
    assert same(again[2], new)
    # Never more than a tenth above k: what max_bytes promises for the highest level.
    highest = by_id(codec.id, int(levels.max()))
    assert result.nbytes <= highest.max_bytes(n, 2)
    for (a, b), level in zip(((0, bounds[1]), (bounds[1], n)), levels, strict=True):
        k = oracles.topk_k(b - a, int(level))
        assert ((chosen >= a) & (chosen < b)).sum() <= k + k // 10
    # decode_add is decode, then add.
    acc = np.roll(x, 7)
    total = acc + sent
    codec.decode_add(np.frombuffer(payload, np.uint8), acc)
    assert np.array_equal(acc, total)
