"""Properties of all sparsifiers for any floats at all: conservation in exact arithmetic, bounds, forms, momentum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gcserver.codecs import by_id, parse
from tests.unit.codecs import sparse_oracles, vectors
from tests.unit.codecs.sparse_cases import FORMS, run, same

SPECS = [
    "topk(ratio=0.1{})",
    "topk(ratio=1{})",
    "dgc(ratio=0.1{})",
    "threshold(value=1e-20,cap=0.5{})",
    "redsync(ratio=0.1{})",
    "redsync(ratio=0.1,trim=1{})",
    "gaussiank(ratio=0.2{})",
    "sidco-e(ratio=0.1{})",
    "sidco-gp(ratio=0.1{})",
    "sidco-p(ratio=0.1{})",
    "randomk(ratio=0.1{})",
]
quick = settings(max_examples=20, deadline=None)


def any_floats(limit):
    """float32[n] of any finite bits below a magnitude: denormal, zero of either sign, alike, far apart."""
    # Twice the magnitude, and the sign below it.
    drawn = hnp.arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, 2 * limit + 1))
    seeded = st.tuples(st.integers(0, 20_000), st.integers(0, 2**32 - 1), st.integers(1, 2 * limit + 1)).map(
        lambda t: np.random.default_rng(t[1]).integers(0, t[2], t[0]).astype(np.uint32)
    )
    return st.one_of(drawn, seeded).map(lambda a: (a >> np.uint32(1) | a << np.uint32(31)).view(np.float32))


#: half of the largest finite float: sums of two do not overflow
half_range = any_floats(0x7EFFFFFF)


@pytest.mark.parametrize("spec", SPECS)
@given(x=half_range, seed=st.integers(0, 2**62 - 1), data=st.data())
@quick
def test_sent_and_kept_add_up_exactly(spec, x, seed, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, x.size), max_size=3)))
    bounds = np.array([0, *cuts, x.size])
    residual = np.roll(x, 1) if data.draw(st.booleans()) else None
    v = x if residual is None else x + residual
    # randomk sends no places that could be packed.
    for options in FORMS if not spec.startswith("randomk") else ("", ",values=16", ",values=8"):
        note(options)
        codec = parse(spec.format(options) + "+momentum(m=0)")
        result, payload, new = run(codec, x, residual, bounds, seed=seed)
        assert result.nonfinite == 0 and result.nbytes <= codec.max_bytes(x.size, len(bounds) - 1)
        sent = np.full(x.size, np.nan, np.float32)
        codec.decode(payload, sent)
        assert np.isfinite(sent).all()
        # float64 holds the sum of two floats of which one is rounding of the other exactly.
        assert np.array_equal(sent.astype(np.float64) + new[: x.size], v.astype(np.float64))
        acc = np.full(x.size, 0.5, np.float32)
        by_id(codec.id, codec.level).decode_add(payload, acc)
        assert same(acc, np.float32(0.5) + sent)


@pytest.mark.parametrize("options", FORMS)
@given(x=any_floats(0x7F7FFFFF), data=st.data())
@quick
def test_payloads_of_any_indices_equal_the_oracle_and_decode_to_it(options, x, data):
    codec = parse(f"threshold(value=1e-30,cap=1{options})")
    keep = data.draw(st.floats(0, 1))
    x = np.where(np.random.default_rng(x.size).random(x.size) < keep, x, np.float32(0))
    bounds = np.array([0, *sorted(data.draw(st.lists(st.integers(0, x.size), max_size=3))), x.size])
    _, payload, new = run(codec, x, None, bounds)
    chosen = np.flatnonzero(np.abs(x) >= np.float32(1e-30))
    expected, left = sparse_oracles.frame(chosen, x, bounds, *FORMS[options])
    assert payload == expected and np.array_equal(new, left)
    out = np.empty_like(x)
    codec.decode(payload, out)
    assert same(out, sparse_oracles.decode(payload, x.size))


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith(("dgc", "sidco"))])
@given(x=half_range, seed=st.integers(0, 2**62 - 1), data=st.data())
@quick
def test_a_segment_is_treated_as_if_it_were_alone(spec, x, seed, data):
    codec = parse(spec.format(",values=8"))
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, x.size)] * 2)))
    bounds = np.array([0, a, b, x.size])
    whole, part = np.empty_like(x), np.empty(b - a, np.float32)
    codec.decode(run(codec, x, None, bounds, seed=seed)[1], whole)
    codec.decode(run(codec, x[a:b].copy(), None, np.array([0, b - a]), seed=seed)[1], part)
    assert same(whole[a:b], part)


@pytest.mark.parametrize("spec", SPECS)
@given(seed=st.integers(0, 2**62 - 1), n=st.integers(1, 3000), nesterov=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_step_repeated_or_void_leaves_no_trace(spec, seed, n, nesterov):
    codec = parse(f"{spec.format(',values=16')}+momentum(m=0.9,nesterov={int(nesterov)})")
    bounds, state = np.array([0, n // 3, n]), None
    for step in range(3):
        x = vectors.normal(n, step)
        first = run(codec, x, None, bounds, 0.5, seed, state=state)
        # A void step in between: its outcome is thrown away.
        bad = x.copy()
        bad[0] = np.nan
        assert run(codec, bad, None, bounds, 0.5, seed, state=state)[0].nonfinite == 1
        again = run(codec, x, None, bounds, 0.5, seed, state=state)
        assert first[:2] == again[:2] and same(first[2], again[2])
        state = first[2].copy()
