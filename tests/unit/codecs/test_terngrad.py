"""terngrad against its oracle, to the bit given the same chance, and in distribution over seeds."""

import numpy as np
import pytest

from gcserver.codecs import CodecError, by_id, parse
from tests.unit.codecs import oracles, vectors
from tests.unit.codecs import quantise_oracles as truth
from tests.unit.codecs.stochastic_cases import assert_unbiased, decode, over_seeds, run


@pytest.mark.parametrize(("clip", "bucket"), [(2.5, 0), (0, 0), (2.5, 512), (1.25, 4096)])
@pytest.mark.parametrize("n", [*vectors.SIZES, 5000])
def test_equals_oracle_on_awkward_vectors(clip, bucket, n):
    codec = parse(f"terngrad(clip={clip},bucket={bucket})")
    for i, (name, x) in enumerate(vectors.shapes(n, seed=n)):
        for bounds in vectors.segment_tables(n):
            v = oracles.corrected(x, None, 0.5)
            expected, _ = truth.uniform(v, bounds, [(2, 1)] * (len(bounds) - 1), i, "max", bucket, clip)
            result, payload, _ = run(codec, x, None, bounds, 0.5, seed=i)
            assert payload == expected, (name, bounds)
            assert result.nonfinite == 0 and result.saturated == (np.abs(v) > 2.0**126).sum()
            assert np.array_equal(decode(codec, payload, n, 1 / 3), truth.uniform_decode(payload, 1 / 3))


def test_without_clipping_it_is_unbiased():
    x = vectors.normal(3000, scale=0.01)
    s = np.abs(x).max().astype(np.float64)
    assert_unbiased(over_seeds(parse("terngrad(clip=0)"), x, 400), x, np.abs(x) * (s - np.abs(x)))


def test_with_clipping_it_is_unbiased_for_what_is_not_clipped():
    x = vectors.normal(3000, scale=0.01)
    s = 2.5 * np.sqrt((x.astype(np.float64) ** 2).mean())
    clipped = np.clip(x, -s, s)
    assert (clipped != x).any()
    variance = np.abs(clipped) * (s - np.abs(clipped))
    assert_unbiased(over_seeds(parse("terngrad"), x, 400), clipped, variance)


def test_three_values_and_zero_stays_zero():
    x = np.where(np.random.default_rng(0).random(9000) < 0.5, vectors.normal(9000), 0).astype(np.float32)
    out = decode(parse("terngrad"), run(parse("terngrad"), x, seed=1)[1], 9000)
    assert np.unique(out).size == 3 and not out[x == 0].any()
    assert (np.sign(out) * np.sign(x) >= 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted(value):
    for n in (1, 33, 5000):
        for count in (1, n // 2, n):
            x = vectors.normal(n, seed=3)
            x[np.random.default_rng(0).permutation(n)[:count]] = value
            assert run(parse("terngrad"), x)[0].nonfinite == count


def test_golden_bytes():
    x = np.array([1, -1, 0, -0.0, 0.5, -0.5, 0.25, 0.75, 1], np.float32)
    assert run(parse("terngrad(clip=0)"), x, bounds=[0, 9, 9], seed=2)[1].hex() == (
        "02000000"  # two segments
        "09000000" "02810000"  # 9 elements, 2 bits, 1 level a side of the largest magnitude, no buckets
        "00000000" "02810000"
        "0000803f"  # 1
        "52a502"  # 1 -1 0 0 | at random 0 0 1 1 | 1, each plus one
    )  # fmt: skip


def test_specs_levels_and_state():
    codec = parse("terngrad")
    assert codec.spec == "terngrad(clip=2.5,bucket=0)"
    assert parse("terngrad(clip=0,bucket=512)").spec == "terngrad(clip=0,bucket=512)"
    assert by_id(49, parse("terngrad(bucket=512)").level).level == parse("terngrad(bucket=512)").level
    assert codec.state_floats(10) == 0 and codec.units == "sum"
    for spec, says in (
        ("terngrad+ef", "ef applies to"),
        ("terngrad(clip=-1)", r"\[0, 1000000\]"),
        ("terngrad(bucket=7)", "multiple of 64"),
    ):
        with pytest.raises(CodecError, match=says):
            parse(spec)
    for level in (0, 2, 3, 4 | 129 << 8, 2 | 1 << 8, 2**32 - 1):
        with pytest.raises(CodecError):
            by_id(49, level)
    with pytest.raises(CodecError, match="keeps none"):
        codec.encode(vectors.normal(4), None, np.empty(4, np.float32), np.empty(99, np.uint8), None)


def test_bytes_are_what_the_document_says():
    n = 100_000
    assert run(parse("terngrad"), vectors.normal(n))[0].nbytes == 12 + 4 + n // 4
