"""topk against its oracle, to the bit, over every way its selection can go."""

import struct

import numpy as np
import pytest

from gcserver.codecs import CodecError, by_id, parse
from tests.unit.codecs import oracles, vectors


def run(codec, x, residual, bounds, scale=1.0, want_residual=True):
    out, check = vectors.guarded(codec.max_bytes(x.size, len(bounds) - 1))
    new, check_new = vectors.guarded(4 * x.size)
    new = new.view(np.float32)
    result = codec.encode(x, residual, new if want_residual else None, out, bounds, scale)
    check()
    check_new()
    return result, out[: result.nbytes].tobytes(), new


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("n", vectors.SIZES)
def test_equals_oracle_on_awkward_vectors(n, ratio):
    codec = parse(f"topk(ratio={ratio})")
    old = vectors.normal(n, seed=9, scale=0.1)
    for name, x in vectors.shapes(n, seed=n):
        for bounds in vectors.segment_tables(n):
            for residual in (None, old):
                result, payload, new = run(codec, x, residual, bounds)
                v = oracles.corrected(x, residual)
                expected, expected_new = oracles.topk(v, bounds, codec.level)
                assert payload == expected, (name, bounds)
                assert np.array_equal(new.view("u4"), expected_new.view("u4")), (name, bounds)
                assert result.nonfinite == oracles.nonfinite(v)


# The ways through selection: the sample predicts well; it predicts badly because what is large is hidden
# from it; a histogram bin holds too many candidates; the threshold is shared by most elements.
@pytest.mark.parametrize("ratio", [0.0005, 0.01, 0.1, 0.4])
@pytest.mark.parametrize("n", [40_000, 300_007])
def test_equals_oracle_on_large_vectors(n, ratio):
    codec = parse(f"topk(ratio={ratio})+ef(decay=0.5)")
    old = vectors.normal(n, seed=5, scale=0.1)
    bounds = np.array([0, n], np.int64)
    for name, x in vectors.shapes(n, seed=1):
        for residual in (None, old) if name != "ascending" else (None,):
            _, payload, new = run(codec, x, residual, bounds, scale=0.25)
            v = oracles.corrected(x, residual, 0.25, 0.5)
            expected, expected_new = oracles.topk(v, bounds, codec.level)
            assert payload == expected, name
            assert np.array_equal(new.view("u4"), expected_new.view("u4")), name
            assert run(codec, x, residual, bounds, 0.25, want_residual=False)[1] == expected, name


@pytest.mark.parametrize("n", [1, 100, 5000, 100_000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted(n, value):
    codec = parse("topk(ratio=0.01)")
    for count in (1, n // 2, n):
        x = vectors.normal(n, seed=3)
        x[np.random.default_rng(0).permutation(n)[:count]] = value
        assert run(codec, x, None, np.array([0, n]))[0].nonfinite == count


def test_overflow_of_gradient_plus_residual_is_nonfinite():
    x = np.array([3e38, 1.0], np.float32)
    assert run(parse("topk(ratio=1)"), x, x, np.array([0, 2]))[0].nonfinite == 1


def test_golden_bytes():
    x = np.array([0.5, -2.0, 2.0, 0.0, -1.0, 3.0], np.float32)
    _, payload, new = run(parse("topk(ratio=0.5)"), x, None, np.array([0, 4, 6]))
    assert payload.hex() == (
        "02000000" "02000000" "01000000"  # two segments, of 2 and 1 elements
        "01000000" "02000000" "05000000"  # indices in the partition
        "000000c0" "00000040" "00004040"  # -2, 2, 3
    )  # fmt: skip
    assert new.tolist() == [0.5, 0, 0, 0, -1, 0]


def test_k_is_exact_in_millionths():
    # 0.07 * 100 is 7.000000000000001 and 0.29 * 100 is 28.999999999999996 in binary floating point.
    for ratio, n, k in ((0.07, 100, 7), (0.29, 100, 29), (0.01, 99, 1), (0.01, 200, 2), (1e-6, 5, 1)):
        result, *_ = run(parse(f"topk(ratio={ratio})"), vectors.normal(n), None, np.array([0, n]))
        assert result.nbytes == 8 + 8 * k


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
def test_decode_and_decode_add(scale):
    n = 5000
    codec = parse("topk(ratio=0.05)")
    _, payload, _ = run(codec, vectors.normal(n), None, np.array([0, 1000, n]))
    data = np.frombuffer(payload, np.uint8)
    out = vectors.normal(n, seed=4)
    codec.decode(data, out, scale)
    expected = oracles.topk_decode(payload, n)
    assert np.array_equal(out, expected * np.float32(scale))
    acc = vectors.normal(n, seed=5)
    before = acc.copy()
    by_id(16, codec.level).decode_add(vectors.unaligned(data), acc)
    assert np.array_equal(acc, before + expected)


def frame(counts, indices, values):
    return struct.pack(f"<I{len(counts)}I", len(counts), *counts) + struct.pack(
        f"<{len(indices)}I{len(values)}f", *indices, *values
    )


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b"", "cut short"),
        (b"\1\0\0", "cut short"),
        (struct.pack("<I", 2**32 - 1), "cut short"),
        (struct.pack("<II", 1, 2**32 - 1), "as many"),
        (frame([2], [1, 2], [1.0, 2.0])[:-1], "as many"),
        (frame([2], [1, 2], [1.0, 2.0]) + b"\0", "as many"),
        (frame([2], [2, 2], [1.0, 2.0]), "ascending"),
        (frame([1, 1], [3, 2], [1.0, 2.0]), "ascending"),
        (frame([2], [2, 10], [1.0, 2.0]), "inside"),
        (frame([1], [2**32 - 1], [1.0]), "inside"),
    ],
)
def test_bad_payload_is_refused_before_anything_is_written(payload, rule):
    codec = by_id(16, 10_000)
    out = np.full(10, 7.0, np.float32)
    for act in (codec.decode, codec.decode_add):
        with pytest.raises(CodecError, match=rule):
            act(np.frombuffer(payload, np.uint8), out)
    assert (out == 7).all()
