"""onebit against its oracle, to the bit: signs, means in a fixed order of summation, residual."""

import struct

import numpy as np
import pytest

from gcserver.codecs import CodecError, by_id, parse
from tests.unit.codecs import oracles, vectors
from tests.unit.codecs.test_topk import run


@pytest.mark.parametrize("n", vectors.SIZES)
def test_equals_oracle_on_awkward_vectors(n):
    codec = parse("onebit+ef(decay=0.75)")
    old = vectors.normal(n, seed=9, scale=0.1)
    for name, x in vectors.shapes(n, seed=n):
        for bounds in vectors.segment_tables(n):
            for residual in (None, old):
                result, payload, new = run(codec, x, residual, bounds, scale=0.5)
                v = oracles.corrected(x, residual, 0.5, 0.75)
                expected, expected_new = oracles.onebit(v, bounds)
                assert payload == expected, (name, bounds)
                assert np.array_equal(new, expected_new), (name, bounds)
                assert result.nonfinite == 0
                assert run(codec, x, residual, bounds, 0.5, want_residual=False)[1] == expected


@pytest.mark.parametrize("n", [1, 15, 17, 5000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted(n, value):
    for count in (1, n // 2, n):
        x = vectors.normal(n, seed=3)
        x[np.random.default_rng(0).permutation(n)[:count]] = value
        assert run(parse("onebit"), x, None, np.array([0, n]))[0].nonfinite == count


def test_golden_bytes():
    x = np.array([1.0, -1.0, -0.0, 3.0, -2.0, 0.0, 0.0, 2.0, -3.0], np.float32)
    _, payload, new = run(parse("onebit"), x, None, np.array([0, 9, 9]))
    assert payload.hex() == (
        "02000000"  # two segments
        "09000000" "000000c0" "0000803f"  # 9 elements, -2 and 1
        "1201"  # elements 1, 4 and 8 are negative; -0 is not
        "00000000" "00000000" "00000000"  # an empty one
    )  # fmt: skip
    assert new.tolist() == [0, 1, -1, 2, 0, -1, -1, 1, -1]


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1000])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_decode_and_decode_add(n, scale):
    codec = by_id(32, 0)
    _, payload, _ = run(codec, vectors.normal(n), None, np.array([0, n // 3, n]))
    data = vectors.unaligned(np.frombuffer(payload, np.uint8))
    out = vectors.normal(n, seed=4)
    codec.decode(data, out, scale)
    assert np.array_equal(out, oracles.onebit_decode(payload, scale))
    acc = vectors.normal(n, seed=5)
    before = acc.copy()
    codec.decode_add(data, acc)
    assert np.array_equal(acc, before + oracles.onebit_decode(payload))


def segment(n, bits):
    return struct.pack("<Iff", n, -1.0, 1.0) + bits


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b"\1\0", "cut short"),
        (struct.pack("<I", 1), "cut short"),
        (struct.pack("<I", 2**32 - 1), "cut short"),
        (struct.pack("<I", 1) + segment(10, b"\0"), "cut short"),
        (struct.pack("<I", 1) + segment(9, b"\0\0"), "add up"),
        (struct.pack("<I", 1) + segment(2**32 - 1, b"\0\0"), "add up"),
        (struct.pack("<I", 2) + segment(9, b"\0\0") * 2, "add up"),
        (struct.pack("<I", 1) + segment(10, b"\0\0\0"), "nothing after"),
        (struct.pack("<I", 1) + segment(10, b"\0\4"), "padding"),
    ],
)
def test_bad_payload_is_refused_before_anything_is_written(payload, rule):
    codec = by_id(32, 0)
    out = np.full(10, 7.0, np.float32)
    for act in (codec.decode, codec.decode_add):
        with pytest.raises(CodecError, match=rule):
            act(np.frombuffer(payload, np.uint8), out)
    assert (out == 7).all()
