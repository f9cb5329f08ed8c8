"""Properties of the stochastic codecs for any input: conservation, replay, fusion, levels, non-finite elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gcserver.codecs import by_id, parse
from tests.unit.codecs import oracles
from tests.unit.codecs.stochastic_cases import decode, run

FEEDBACK = [
    "qsgd+ef",
    "qsgd(bits=2,bucket=64)+ef(decay=0.5)",
    "qsgd(bits=7,bucket=0,kind=max)+ef",
    "qsgd(bits=8,bucket=512,kind=l2)+ef",
    "natural+ef",
    "natural(bits=9)+ef(decay=0.5)",
]
ALL = [*FEEDBACK, "qsgd(levels=64,kind=l2,bucket=0)", "terngrad", "terngrad(clip=0,bucket=128)", "natural"]

quick = settings(max_examples=30, deadline=None)
any_finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
small = st.integers(0, 200).flatmap(lambda n: hnp.arrays(np.float32, n, elements=any_finite))


@st.composite
def cases(draw):
    """(x, residual, boundaries, seed): few drawn numbers of any magnitude, or many from a drawn seed."""
    seed = draw(st.integers(0, 2**62 - 1))
    if draw(st.booleans()):
        x = draw(small)
        n = x.size
    else:
        n, rng = draw(st.integers(0, 20_000)), np.random.default_rng(seed)
        x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-6, 3, n)).astype(np.float32)
        if draw(st.booleans()):
            x = np.round(x)  # many ties, many zeros
    residual = (np.random.default_rng(seed + 1).standard_normal(n) * 0.1).astype(np.float32)
    cuts = draw(st.lists(st.integers(0, n), max_size=4))
    return x, residual, [0, *sorted(cuts), n], seed


@pytest.mark.parametrize("spec", FEEDBACK)
@given(cases(), st.sampled_from([1.0, 0.5, 1 / 3]))
@quick
def test_what_is_sent_and_what_is_kept_add_up(spec, case, scale):
    x, residual, bounds, seed = case
    codec = parse(spec)
    result, payload, new = run(codec, x, residual, bounds, scale, seed)
    sent = decode(codec, payload, x.size)
    v = oracles.corrected(x, residual, scale, codec.decay)
    assert result.nonfinite == 0 and np.isfinite(sent).all() and np.isfinite(new).all()
    # One rounding of v - sent, one of the addition here: each half a unit of the largest term.
    largest = np.maximum.reduce([np.abs(v), np.abs(sent), np.abs(new)])
    allowed = np.spacing(np.minimum(largest, np.float32(2.0**127)))  # beyond it numpy's spacing overflows
    assert (np.abs((sent + new).astype(np.float64) - v) <= allowed).all()


@pytest.mark.parametrize("spec", ALL)
@given(cases())
@quick
def test_a_step_repeated_gives_the_same_and_leaves_its_inputs_alone(spec, case):
    x, residual, bounds, seed = case
    codec = parse(spec)
    state = residual if codec.error_feedback else None
    x_before, residual_before = x.copy(), residual.copy()
    _, first, first_new = run(codec, x, state, bounds, 0.5, seed)
    run(codec, x, state, bounds, 0.5, seed + 1)  # a step that turned out void
    _, again, again_new = run(codec, x, state, bounds, 0.5, seed)
    assert again == first
    assert first_new is again_new is None or np.array_equal(first_new, again_new)
    assert np.array_equal(x, x_before) and np.array_equal(residual, residual_before)


@pytest.mark.parametrize("spec", ALL)
@given(cases(), st.sampled_from([1.0, 1 / 3]))
@quick
def test_decode_add_is_decode_then_add(spec, case, scale):
    x, residual, bounds, seed = case
    codec = parse(spec)
    _, payload, _ = run(codec, x, None, bounds, seed=seed)
    out = decode(codec, payload, x.size)
    acc = residual.copy()
    by_id(codec.id, codec.level).decode_add(np.frombuffer(payload, np.uint8), acc)
    assert np.array_equal(acc, residual + out)
    assert np.array_equal(decode(codec, payload, x.size, scale), out * np.float32(scale))


@pytest.mark.parametrize(
    ("spec", "largest"), [("qsgd(bucket=128)", "qsgd(bits=8,bucket=128)"), ("natural", "natural(bits=9)")]
)
@given(case=cases(), data=st.data())
@quick
def test_levels_are_the_segments_own(spec, largest, case, data):
    """Segments of different levels in one frame decode to what they would decode to in frames of their level."""
    x, _, bounds, seed = case
    codec = parse(spec)
    m = len(bounds) - 1
    levels = data.draw(st.lists(st.integers(*codec.levels), min_size=m, max_size=m))
    _, payload, _ = run(codec, x, None, bounds, seed=seed, levels=levels, largest=parse(largest))
    mixed = decode(codec, payload, x.size)
    for s in range(m):
        alone = run(codec, x, None, bounds, seed=seed, levels=[levels[s]] * m, largest=parse(largest))[1]
        a, b = bounds[s], bounds[s + 1]
        assert np.array_equal(decode(codec, alone, x.size)[a:b], mixed[a:b])


@pytest.mark.parametrize("spec", ALL)
@given(case=cases(), bad=st.sampled_from([np.nan, np.inf, -np.inf]), data=st.data())
@quick
def test_nonfinite_elements_are_counted_and_crash_nothing(spec, case, bad, data):
    x, _, bounds, seed = case
    x = x.copy()
    places = data.draw(st.lists(st.integers(0, max(0, x.size - 1)), max_size=5)) if x.size else []
    x[places] = bad
    result, payload, _ = run(parse(spec), x, None, bounds, seed=seed)
    assert result.nonfinite == len(set(places))
    parse(spec).check(np.frombuffer(payload, np.uint8), x.size)
