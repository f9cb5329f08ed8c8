"""Properties that hold for every codec and every input: conservation, fusion, segments, hostile payloads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gcserver.codecs import CodecError, by_id, parse
from gcserver.codecs.base import BY_NAME
from tests.unit.codecs import oracles, specs, vectors

#: with error feedback, whole and decayed, and without momentum, which adds what is not of this step
FEEDBACK = {
    name: [
        spec + decay + ("+momentum(m=0)" if BY_NAME[name].takes_momentum else "")
        for spec in specs.variants(name)
        for decay in ("", "+ef(decay=0.5)")
        if parse(spec).error_feedback
    ]
    for name in specs.FEEDBACK
}
#: what these select or average depends on the segment alone
BY_SEGMENT = ["topk(ratio=0.01)", "topk(ratio=0.4)", "topk(ratio=0.1)+ef(decay=0.5)", "onebit", "efsignsgd", "signsgd"]

#: of each of some twenty codecs; what is drawn goes to every variant of a codec, since drawing takes longest
quick = settings(max_examples=20, deadline=None)
finite = st.floats(-(2.0**100), 2.0**100, width=32)
small = st.integers(0, 200).flatmap(lambda n: hnp.arrays(np.float32, n, elements=finite))


@st.composite
def gradients(draw):
    """(x, residual, boundaries): few drawn numbers, or many from a drawn seed."""
    if draw(st.booleans()):
        x = draw(small)
        n = x.size
        residual = draw(hnp.arrays(np.float32, n, elements=finite))
    else:
        n, seed = draw(st.integers(0, 60_000)), draw(st.integers(0, 2**32 - 1))
        rng = np.random.default_rng(seed)
        x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-6, 3, n)).astype(np.float32)
        if draw(st.booleans()):
            x = np.round(x)  # many ties, many zeros
        residual = (rng.standard_normal(n) * 0.1).astype(np.float32)
    cuts = draw(st.lists(st.integers(0, n), max_size=4))
    return x, residual, np.array([0, *sorted(cuts), n], np.int64)


def every(found):
    """The codecs of these specs, each noted, so that a failure says which it was."""
    for spec in found:
        note(spec)
        yield parse(spec)


def encode(codec, x, residual, bounds, scale=1.0, seed=5):
    """(payload, new state) from a state whose residual is given and the rest of which is fresh."""
    m = len(bounds) - 1
    out, check = vectors.guarded(codec.max_bytes(x.size, m))
    floats = codec.state_floats(x.size, m)
    old = new = None
    if codec.state_floats(1):
        old, new = np.zeros(floats, np.float32), np.full(floats, 7, np.float32)
        if codec.error_feedback:
            old[: x.size] = residual
    before = None if old is None else old.tobytes()
    result = codec.encode(x, old, new, out, bounds, scale, seed)
    check()
    assert old is None or old.tobytes() == before
    return out[: result.nbytes].copy(), new


def decode(codec, payload, n):
    out = np.full(n, np.nan, np.float32)
    codec.decode(payload, out)
    return out


@pytest.mark.parametrize("name", FEEDBACK)
@given(gradients(), st.sampled_from([1.0, 0.5, 1 / 3]))
@quick
def test_what_is_sent_and_what_is_kept_add_up(name, case, scale):
    x, residual, bounds = case
    for codec in every(FEEDBACK[name]):
        payload, state = encode(codec, x, residual, bounds, scale)
        new = state[: x.size]
        sent = decode(codec, payload, x.size)
        v = oracles.corrected(x, residual, scale, codec.decay)
        if codec.takes_momentum and "values" not in codec.spec:
            # Sparsifiers that send values as they are: exactly, and no element is both sent and kept.
            assert np.array_equal(sent + new, v)
            assert not (sent * new).any()
        else:
            # One rounding of v - sent, one of the addition here: each half a unit of the largest term.
            allowed = np.spacing(np.maximum.reduce([np.abs(v), np.abs(sent), np.abs(new)]))
            assert (np.abs((sent + new) - v) <= allowed).all()


@pytest.mark.parametrize("name", specs.FLAT)
@given(gradients(), st.integers(0, 2**62 - 1))
@quick
def test_a_repeated_step_gives_the_same_bytes_and_state(name, case, seed):
    x, residual, bounds = case
    for codec in every(specs.variants(name)):
        first, again = (encode(codec, x, residual, bounds, 0.5, seed) for _ in range(2))
        assert np.array_equal(first[0], again[0])
        assert first[1] is None or np.array_equal(first[1].view("u4"), again[1].view("u4"))


@pytest.mark.parametrize("name", specs.FLAT)
@given(gradients(), st.integers(0, 2**32 - 1))
@quick
def test_decode_add_is_decode_then_add(name, case, seed):
    x, residual, bounds = case
    before = np.random.default_rng(seed).standard_normal(x.size).astype(np.float32)
    for codec in every(specs.variants(name)):
        payload, _ = encode(codec, x, residual, bounds)
        acc = before.copy()
        by_id(codec.id, codec.level).decode_add(payload, acc)
        assert np.array_equal(acc, before + decode(codec, payload, x.size))


@pytest.mark.parametrize("spec", BY_SEGMENT)
@given(gradients())
@quick
def test_merging_segments_changes_nothing(spec, case):
    x, residual, bounds = case
    codec = parse(spec)
    payload, new = encode(codec, x, residual, bounds)
    whole = decode(codec, payload, x.size)
    for a, b in pairwise(bounds):
        part, part_new = encode(codec, x[a:b], residual[a:b], np.array([0, b - a]))
        assert np.array_equal(decode(codec, part, b - a), whole[a:b])
        assert new is None or np.array_equal(part_new, new[a:b])


@pytest.mark.parametrize("name", specs.FLAT)
@given(case=gradients(), bad=st.sampled_from([np.nan, np.inf, -np.inf]), data=st.data())
@quick
def test_nonfinite_elements_are_counted_and_crash_nothing(name, case, bad, data):
    x, _, bounds = case
    x = x.copy()
    places = data.draw(st.lists(st.integers(0, max(0, x.size - 1)), max_size=5)) if x.size else []
    x[places] = bad
    for codec in every(specs.variants(name)):
        out, check = vectors.guarded(codec.max_bytes(x.size, len(bounds) - 1))
        new, check_new = vectors.guarded(4 * codec.state_floats(x.size, len(bounds) - 1))
        result = codec.encode(x, None, new.view(np.float32) if new.size else None, out, bounds)
        check()
        check_new()
        assert result.nonfinite == len(set(places))


def attempt(codec, payload, n):
    """Both ways to decode a hostile payload: they agree on refusing it, and write nowhere but in ``out``."""
    verdicts = []
    for add in (False, True):
        raw, check = vectors.guarded(4 * n, fill=0x3C)
        out = raw.view(np.float32)
        before = out.copy()
        try:
            codec.decode_add(payload, out) if add else codec.decode(payload, out)
            verdicts.append(True)
        except CodecError:
            assert np.array_equal(out, before)
            verdicts.append(False)
        check()
    assert verdicts[0] == verdicts[1]
    return verdicts[0]


@pytest.mark.parametrize("name", specs.FLAT)
@given(st.binary(max_size=200), st.integers(0, 70))
@settings(max_examples=30, deadline=None)
def test_any_bytes_give_a_result_or_an_error(name, payload, n):
    for codec in every(specs.variants(name)):
        attempt(codec, np.frombuffer(payload, np.uint8), n)
