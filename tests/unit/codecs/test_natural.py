"""natural compression against its oracle, to the bit given the same chance, and in distribution over seeds."""

import struct

import numpy as np
import pytest

from gcserver.codecs import CodecError, by_id, parse
from tests.unit.codecs import oracles, vectors
from tests.unit.codecs import quantise_oracles as truth
from tests.unit.codecs.refusals import assert_refused
from tests.unit.codecs.stochastic_cases import assert_unbiased, decode, over_seeds, run


@pytest.mark.parametrize("bits", [8, 9])
@pytest.mark.parametrize("n", [*vectors.SIZES, 5000])
def test_equals_oracle_on_awkward_vectors(bits, n):
    codec = parse(f"natural(bits={bits})+ef(decay=0.75)")
    old = vectors.normal(n, seed=9, scale=0.1)
    for i, (name, x) in enumerate(vectors.shapes(n, seed=n)):
        for bounds in vectors.segment_tables(n):
            for residual in (None, old):
                v = oracles.corrected(x, residual, 0.5, 0.75)
                expected, expected_new = truth.natural(v, bounds, [bits] * (len(bounds) - 1), i)
                result, payload, new = run(codec, x, residual, bounds, 0.5, seed=i)
                assert payload == expected, (name, bounds)
                assert np.array_equal(new, expected_new), (name, bounds)
                assert result.nonfinite == 0
                assert result.saturated == (np.abs(v) > (2.0**40 if bits == 8 else 2.0**127)).sum()
                assert run(codec, x, residual, bounds, 0.5, seed=i, want_residual=False)[1] == expected
                assert np.array_equal(decode(codec, payload, n, 1 / 3), truth.natural_decode(payload, 1 / 3))


def test_every_segment_may_have_its_own_bits():
    codec, x, bounds = parse("natural"), vectors.normal(3000), [0, 100, 100, 1777, 3000]
    expected, expected_new = truth.natural(x, bounds, [9, 8, 9, 8], 5)
    _, payload, new = run(codec, x, None, bounds, seed=5, levels=[9, 8, 9, 8], largest=parse("natural(bits=9)"))
    assert payload == expected and np.array_equal(new, expected_new)
    assert np.array_equal(decode(by_id(50, 8), payload, 3000), truth.natural_decode(payload))
    with pytest.raises(CodecError, match=r"4 in \[8, 9\]"):
        run(codec, x, None, bounds, levels=[8, 8, 8, 7])


@pytest.mark.parametrize("bits", [8, 9])
def test_unbiased_with_the_variance_of_the_paper(bits):
    x = vectors.normal(3000, scale=0.01)
    low = np.exp2(np.floor(np.log2(np.abs(x).astype(np.float64))))
    variance = (np.abs(x) - low) * (2 * low - np.abs(x))
    assert (variance <= x.astype(np.float64) ** 2 / 8 * (1 + 1e-6)).all()  # theorem 3
    assert_unbiased(over_seeds(parse(f"natural(bits={bits})"), x, 400), x, variance)


def test_below_the_smallest_power_it_stays_unbiased():
    x = vectors.normal(3000, scale=2.0**-88)
    low = np.where(np.abs(x) < 2.0**-86, 0, np.exp2(np.floor(np.log2(np.abs(x).astype(np.float64)))))
    high = np.where(low == 0, 2.0**-86, 2 * low)
    variance = (np.abs(x) - low) * (high - np.abs(x))
    factor = 2.0**90  # float64 keeps it, and the comparison needs no tiny numbers
    decoded = over_seeds(parse("natural"), x, 400) * factor
    assert_unbiased(decoded, x.astype(np.float64) * factor, variance * factor**2)


def test_powers_of_two_are_sent_exactly_and_the_largest_saturate():
    powers = np.exp2(np.arange(-86, 41)).astype(np.float32)
    x = np.concatenate([powers, -powers, [0]]).astype(np.float32)
    for seed in range(20):
        assert np.array_equal(decode(parse("natural"), run(parse("natural"), x, seed=seed)[1], x.size), x)
    all_powers = np.exp2(np.arange(-126, 128)).astype(np.float32)
    nine = parse("natural(bits=9)")
    assert np.array_equal(decode(nine, run(nine, all_powers)[1], all_powers.size), all_powers)
    huge = np.array([3e12, -3e38, 2.0**40], np.float32)
    result, payload, _ = run(parse("natural"), huge)
    assert (result.saturated, result.nonfinite) == (2, 0)
    assert decode(parse("natural"), payload, 3).tolist() == [2.0**40, -(2.0**40), 2.0**40]


@pytest.mark.parametrize("bits", [8, 9])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted(bits, value):
    for n in (1, 33, 1024, 5000):
        for count in (1, n // 2, n):
            x = vectors.normal(n, seed=3)
            x[np.random.default_rng(0).permutation(n)[:count]] = value
            result = run(parse(f"natural(bits={bits})"), x)[0]
            assert (result.nonfinite, result.saturated) == (count, 0)


def test_golden_bytes():
    x = np.array([1, -2, 0, -0.0, 0.5, 3, -3, 1e-30, 1e30], np.float32)
    assert run(parse("natural"), x, bounds=[0, 9, 9], seed=2)[1].hex() == (
        "02000000" "09000000" "08000000" "00000000" "08000000"
        "57" "d8" "00" "00" "56" "58" "d8" "00" "7f"  # 2^0 -2^1 0 0 2^-1, 3 and -3 down, 0 for 1e-30, 2^40 for 1e30
    )  # fmt: skip
    assert run(parse("natural(bits=9)"), x, seed=2)[1].hex() == (
        "01000000" "09000000" "09000000"
        "7f" "80" "00" "00" "7e" "80" "80" "1b" "e3"  # biased exponents
        "4200"  # -2 and -3
    )  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000, 5001])
@pytest.mark.parametrize("bits", [8, 9])
def test_decode_and_decode_add(n, bits):
    codec = parse(f"natural(bits={bits})")
    _, payload, _ = run(codec, vectors.normal(n), bounds=[0, n // 3, n], seed=4)
    data = vectors.unaligned(np.frombuffer(payload, np.uint8))
    acc = vectors.normal(n, seed=5)
    before = acc.copy()
    by_id(50, bits).decode_add(data, acc)
    assert np.array_equal(acc, before + truth.natural_decode(payload))


def test_every_byte_decodes():
    codes = np.arange(256, dtype=np.uint8)
    eight = struct.pack("<III", 1, 256, 8) + codes.tobytes()
    assert np.array_equal(decode(parse("natural"), eight, 256), truth.natural_decode(eight))
    nine = struct.pack("<III", 1, 256, 9) + codes.tobytes() + bytes(range(32))
    assert np.array_equal(decode(parse("natural"), nine, 256), truth.natural_decode(nine))


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b"\1\0", "cut short"),
        (struct.pack("<I", 1), "cut short"),
        (struct.pack("<I", 2**32 - 1), "cut short"),
        (struct.pack("<III", 1, 10, 8) + bytes(9), "cut short"),
        (struct.pack("<III", 1, 10, 9) + bytes(11), "cut short"),
        (struct.pack("<III", 1, 10, 8) + bytes(11), "nothing after"),
        (struct.pack("<III", 1, 9, 8) + bytes(9), "add up"),
        (struct.pack("<III", 1, 2**32 - 1, 8) + bytes(9), "add up"),
        (struct.pack("<III", 1, 10, 7) + bytes(10), "8 or 9 bits"),
        (struct.pack("<III", 1, 10, 9) + bytes(11) + b"\4", "padding"),
    ],
)
def test_bad_payload_is_refused_before_anything_is_written(payload, rule):
    assert_refused(parse("natural"), payload, rule)


def test_specs_levels_and_bytes():
    assert parse("natural").spec == "natural(bits=8)" and parse("natural+ef").spec == "natural(bits=8)+ef"
    assert by_id(50, 9).spec == "natural(bits=9)"
    for level in (0, 7, 10, 2**32 - 1):
        with pytest.raises(CodecError, match="8 or 9"):
            by_id(50, level)
    n = 80_000
    assert run(parse("natural"), vectors.normal(n))[0].nbytes == 12 + n
    assert run(parse("natural(bits=9)"), vectors.normal(n))[0].nbytes == 12 + n + n // 8
