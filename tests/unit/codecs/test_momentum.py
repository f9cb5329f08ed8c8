"""DGC's momentum correction and factor masking, which all sparsifiers share, against plain numpy."""

import numpy as np
import pytest

from gcserver.codecs import CodecError, parse
from tests.unit.codecs import sparse_oracles, vectors
from tests.unit.codecs.sparse_cases import run, same

CODECS = {
    "topk": "topk(ratio=0.01{})",
    "dgc": "dgc(ratio=0.01{})",
    "randomk": "randomk(ratio=0.01{})",
    "threshold": "threshold(value=1.5{})",
    "redsync": "redsync(ratio=0.01{})",
    "gaussiank": "gaussiank(ratio=0.01{})",
    "sidco-e": "sidco-e(ratio=0.01{})",
}


@pytest.mark.parametrize("nesterov", [0, 1])
@pytest.mark.parametrize("options", ["", ",values=8"])
@pytest.mark.parametrize("name", CODECS)
def test_accumulates_before_selection_and_forgets_what_was_sent(name, options, nesterov):
    codec = parse(f"{CODECS[name].format(options)}+ef(decay=0.75)+momentum(m=0.9,nesterov={nesterov})")
    n, bounds = 30_000, np.array([0, 9_000, 9_000, 9_001, 30_000])
    floats = codec.state_floats(n, 4)
    assert floats >= 2 * n
    state = np.zeros(floats, np.float32)
    u = np.zeros(n, np.float32)
    for step in range(4):
        x = vectors.normal(n, step)
        v, u = sparse_oracles.momentum(x, state[:n], u, 0.5, 0.75, 0.9, nesterov)
        result, payload, new = run(codec, x, None, bounds, 0.5, seed=step, state=state)
        sent = np.zeros(n, np.float32)
        codec.decode(payload, sent)
        assert result.nonfinite == 0 and 0 < np.count_nonzero(sent) < n
        # What was sent: v, and what rounding lost of it stays; what was not: v, and u with it.
        mask = sent != 0
        u[mask] = 0
        assert np.array_equal(sent + new[:n], v)
        assert same(new[n : 2 * n], u)
        if not options:
            assert same(sent[mask], v[mask]) and same(new[:n][~mask], v[~mask])
        # Nobody has to want the new state for the payload to be the same.
        assert run(codec, x, None, bounds, 0.5, seed=step, state=state, want_state=False)[1] == payload
        state = new.copy()


def test_a_fresh_state_and_none_are_the_same():
    codec = parse("topk(ratio=0.01)+momentum")
    x, bounds = vectors.normal(3000), np.array([0, 3000])
    fresh = np.zeros(codec.state_floats(3000), np.float32)
    assert run(codec, x, None, bounds)[1:2] == run(codec, x, None, bounds, state=fresh)[1:2]
    assert same(run(codec, x, None, bounds)[2], run(codec, x, None, bounds, state=fresh)[2])


def test_without_anything_sent_momentum_is_the_optimizers():
    # With one element of 20,000 a step, the others' v is the sum of SGD's momentum buffer over the steps.
    codec, n = parse("topk(ratio=1e-6)+momentum(m=0.5)"), 20_000
    state = np.zeros(codec.state_floats(n), np.float32)
    buffer, total = np.zeros(n), np.zeros(n)
    for step in range(6):
        x = vectors.normal(n, step)
        buffer = 0.5 * buffer + x
        total += buffer
        state = run(codec, x, None, np.array([0, n]), state=state)[2].copy()
    near = np.isclose(state[:n], total, rtol=1e-4, atol=1e-4)
    assert n - near.sum() <= 6


def test_nonfinite_elements_are_counted_with_momentum():
    codec, n = parse("topk(ratio=0.01)+momentum"), 5000
    x = vectors.normal(n)
    x[[3, 4000]] = np.nan, np.inf
    assert run(codec, x, None, np.array([0, n]))[0].nonfinite == 2


def test_an_owner_adds_no_second_momentum():
    for name, spec in CODECS.items():
        codec = parse(spec.format(",values=8") + "+ef(decay=0.9)+momentum(m=0.5)")
        owner = codec.at_owner()
        assert owner.momentum == 0 and owner.decay == 0.9 and owner.form == codec.form and owner.level == codec.level
        assert owner.state_floats(100) < codec.state_floats(100) and type(owner) is type(codec)
        assert owner.at_owner() is owner, name
        assert parse(owner.spec).spec == owner.spec


def test_momentum_needs_error_feedback():
    with pytest.raises(CodecError, match="momentum only together with error feedback"):
        parse("topk(ratio=0.1)+ef(decay=0)+momentum")
