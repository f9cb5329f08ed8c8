"""onebit and efsignsgd against their oracle, to the bit: signs, means in a fixed order of summation, residual."""

import struct

import numpy as np
import pytest

from gcserver.codecs import by_id, parse
from tests.unit.codecs import oracles, sign_oracles, vectors
from tests.unit.codecs.refusals import assert_refused

NAMES = {"onebit": 2, "efsignsgd": 1}
BOTH = pytest.mark.parametrize("name", NAMES)


def run(codec, x, residual, bounds, scale=1.0, want_residual=True):
    """(result, payload, new residual), with guard zones around everything written."""
    out, check = vectors.guarded(codec.max_bytes(x.size, len(bounds) - 1))
    new, check_new = vectors.guarded(4 * x.size)
    new = new.view(np.float32)
    result = codec.encode(x, residual, new if want_residual else None, out, bounds, scale)
    check()
    check_new()
    return result, out[: result.nbytes].tobytes(), new


@BOTH
@pytest.mark.parametrize("n", vectors.SIZES)
def test_equals_oracle_on_awkward_vectors(name, n):
    codec = parse(f"{name}+ef(decay=0.75)")
    old = vectors.normal(n, seed=9, scale=0.1)
    for shape, x in vectors.shapes(n, seed=n):
        for bounds in vectors.segment_tables(n):
            for residual in (None, old):
                result, payload, new = run(codec, x, residual, bounds, scale=0.5)
                v = oracles.corrected(x, residual, 0.5, 0.75)
                expected, expected_new = sign_oracles.means(v, bounds, NAMES[name])
                assert payload == expected, (shape, bounds)
                assert np.array_equal(new, expected_new), (shape, bounds)
                assert result.nonfinite == 0
                assert len(payload) == codec.max_bytes(n, len(bounds) - 1) or len(bounds) > 2
                assert run(codec, x, residual, bounds, 0.5, want_residual=False)[1] == expected


@BOTH
@pytest.mark.parametrize("n", [8, 100, 4096, 9000])
def test_means_of_the_largest_floats_are_finite_and_conserve(name, n):
    x = np.where(np.arange(n) % 3 == 0, -1, 1).astype(np.float32) * np.float32(3e38)
    x[n // 2 :] *= np.float32(1e-3)  # blocks that overflow and blocks that do not
    bounds = np.array([0, n])
    result, payload, new = run(parse(name), x, None, bounds)
    expected, expected_new = sign_oracles.means(x, bounds, NAMES[name])
    assert result.nonfinite == 0
    assert payload == expected and np.array_equal(new, expected_new)
    assert np.isfinite(new).all()
    decoded = sign_oracles.decode(payload, NAMES[name])
    assert np.allclose(np.float64(decoded) + new, x, atol=1e32)


@BOTH
@pytest.mark.parametrize("n", [1, 15, 17, 5000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted(name, n, value):
    for x, count in vectors.with_some(n, value):
        assert run(parse(name), x, None, np.array([0, n]))[0].nonfinite == count


GOLDEN = np.array([1.0, -1.0, -0.0, 3.0, -2.0, 0.0, 0.0, 2.0, -3.0], np.float32)


def test_golden_bytes_of_onebit():
    _, payload, new = run(parse("onebit"), GOLDEN, None, np.array([0, 9, 9]))
    assert payload.hex() == (
        "02000000"  # two segments
        "09000000" "000000c0" "0000803f"  # 9 elements, -2 and 1
        "1201"  # elements 1, 4 and 8 are negative; -0 is not
        "00000000" "00000000" "00000000"  # an empty one
    )  # fmt: skip
    assert new.tolist() == [0, 1, -1, 2, 0, -1, -1, 1, -1]


def test_golden_bytes_of_efsignsgd():
    _, payload, new = run(parse("efsignsgd"), GOLDEN, None, np.array([0, 9, 9]))
    assert payload.hex() == (
        "02000000"  # two segments
        "09000000" "abaaaa3f"  # 9 elements, 4/3
        "1201"
        "00000000" "00000000"
    )  # fmt: skip
    third = np.float32(4 / 3)
    assert np.array_equal(new, GOLDEN - np.where(GOLDEN < 0, -third, third))


@BOTH
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1000])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_decode_and_decode_add(name, n, scale):
    codec = by_id(parse(name).id, 0)
    _, payload, _ = run(codec, vectors.normal(n), None, np.array([0, n // 3, n]))
    data = vectors.unaligned(np.frombuffer(payload, np.uint8))
    out = vectors.normal(n, seed=4)
    codec.decode(data, out, scale)
    assert np.array_equal(out, sign_oracles.decode(payload, NAMES[name], scale))
    acc = vectors.normal(n, seed=5)
    before = acc.copy()
    codec.decode_add(data, acc)
    assert np.array_equal(acc, before + sign_oracles.decode(payload, NAMES[name]))


@BOTH
def test_error_feedback_delivers_the_whole_gradient_in_time(name):
    """sum of decoded over T steps = T*g - last residual, which stays bounded where no element is far from the mean."""
    codec, n, steps = parse(name), 2000, 300
    rng = np.random.default_rng(1)
    g = (rng.uniform(0.3, 1.2, n) * rng.choice([-1, 1], n)).astype(np.float32)
    residual, total = np.zeros(n, np.float32), np.zeros(n)
    for _ in range(steps):
        _, payload, new = run(codec, g, residual, np.array([0, n]))
        total += sign_oracles.decode(payload, NAMES[name])
        residual = new.copy()
    assert np.abs(total / steps - g).max() < 0.1
    assert np.allclose(total + residual, steps * np.float64(g), atol=1e-2)


def frame(codec, *segments):
    numbers = NAMES[codec.name]
    parts = [struct.pack(f"<I{numbers}f", n, *[1.0] * numbers) + bits for n, bits in segments]
    return struct.pack("<I", len(parts)) + b"".join(parts)


@BOTH
def test_bad_payload_is_refused_before_anything_is_written(name):
    codec = by_id(parse(name).id, 0)
    for payload, rule in (
        (b"\1\0", "cut short"),
        (struct.pack("<I", 1), "cut short"),
        (struct.pack("<I", 2**32 - 1), "cut short"),
        (frame(codec, (10, b"\0")), "cut short"),
        (frame(codec, (9, b"\0\0")), "add up"),
        (frame(codec, (2**32 - 1, b"\0\0")), "add up"),
        (frame(codec, (9, b"\0\0"), (9, b"\0\0")), "add up"),
        (frame(codec, (10, b"\0\0\0")), "nothing after"),
        (frame(codec, (10, b"\0\4")), "padding"),
    ):
        assert_refused(codec, payload, rule)
