"""Payloads of two exchanges with 16 bits an element: lengths, refusals, rounding."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcserver.codecs import CodecError
from gcserver.codecs.factors import HEAD, narrow_bytes, narrow_floats
from gcserver.codecs.powersgd import PowerSgd
from tests.unit.codecs import vectors

CODEC = PowerSgd(rank=1, values="16")
SHAPES = ((9, 9), (3, 0))


def payload(x):
    out = np.zeros(CODEC.payload_bytes(0, SHAPES), np.uint8)
    assert CODEC.store(0, x, out, SHAPES) == 0
    return out


def test_lengths():
    assert [narrow_bytes(n, whole) for n, whole in ((0, 0), (1, 0), (1, 1), (12, 3))] == [0, 6, 8, HEAD + 12 + 18]
    assert CODEC.payload_floats(0, SHAPES) == 12 and CODEC.payload_bytes(0, SHAPES) == HEAD + 12 + 18
    assert CODEC.payload_bytes(1, SHAPES) == HEAD + 18


def test_what_is_sent_as_it_is_comes_first_and_the_rest_is_rounded_to_nearest_even():
    x = np.array([1 / 3, -2e-30, 3e38, 1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7, -7, 0, -0.0, 1e-40, 65504], np.float32)
    data = payload(x)
    out = np.empty(12, np.float32)
    CODEC.decode(vectors.unaligned(data), out)
    assert np.array_equal(out[:3], x[:3])
    assert out[3:10].tolist() == [1, 1, 1 + 2**-6, 1 + 2**-7, -7, 0, 0] and np.signbit(out[9])
    assert out[10] == pytest.approx(1e-40, rel=2**-6) and out[11] == 65536
    acc = np.ones(12, np.float32)
    CODEC.decode_add(data, acc)
    assert np.array_equal(acc, 1 + out)
    CODEC.decode(data, out, 0.5)
    assert out[11] == 32768


def test_what_is_not_finite_is_counted_and_what_rounds_beyond_float32_is_not():
    x = np.ones(12, np.float32)
    x[[0, 5]] = np.nan, np.inf
    out = np.zeros(CODEC.payload_bytes(0, SHAPES), np.uint8)
    assert CODEC.store(0, x, out, SHAPES) == 2
    x[[0, 5]] = 1, np.finfo(np.float32).max
    assert CODEC.store(0, x, out, SHAPES) == 0
    back = np.empty(12, np.float32)
    CODEC.decode(out, back)
    assert np.isfinite(back).all() and back[5] == pytest.approx(3.39e38, rel=1e-2)


@given(st.binary(max_size=64), st.integers(0, 16))
def test_any_bytes_decode_or_are_refused(data, n):
    raw, out = np.frombuffer(data, np.uint8), np.zeros(n, np.float32)
    whole = int.from_bytes(data[:4], "little")
    good = (not data and n == 0) or (len(data) > 4 and whole <= n and len(data) == 4 + 4 * whole + 2 * (n - whole))
    if good:
        assert narrow_floats(raw) == n
        CODEC.check(raw, n)
        CODEC.decode(raw, out)
    else:
        with contextlib.suppress(CodecError):
            assert narrow_floats(raw) != n
        for read in (lambda: CODEC.check(raw, n), lambda: CODEC.decode(raw, out), lambda: CODEC.decode_add(raw, out)):
            with pytest.raises(CodecError, match="powersgd"):
                read()
        assert not out.any(), "nothing is written of what is refused"
