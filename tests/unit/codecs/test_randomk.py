"""randomk: the same elements everywhere from one seed, values only, unbiased if asked."""

import struct

import numpy as np
import pytest

from gcserver.codecs import CodecError, by_id, parse
from tests.unit.codecs import oracles, sparse_oracles, vectors
from tests.unit.codecs.refusals import assert_refused
from tests.unit.codecs.sparse_cases import run, same


@pytest.mark.parametrize("width", [32, 16, 8])
@pytest.mark.parametrize("ratio", [0.001, 0.07, 0.5, 1.0])
def test_equals_oracle(ratio, width):
    codec = parse(f"randomk(ratio={ratio},values={width})+ef(decay=0.5)")
    for n in vectors.SIZES:
        old = vectors.normal(n, seed=9, scale=0.1)
        for seed, (_, x, bounds) in enumerate(vectors.cases(n, seed=n)):
            result, payload, new = run(codec, x, old, bounds, 0.5, seed=seed * 0x123456789ABCD)
            v = oracles.corrected(x, old, 0.5, 0.5)
            levels = [codec.level] * (len(bounds) - 1)
            expected, left = sparse_oracles.randomk(v, bounds, levels, seed * 0x123456789ABCD, width)
            assert payload == expected and same(new, left)
            assert result.nonfinite == oracles.nonfinite(v)
            out, acc = np.empty_like(x), x.copy()
            codec.decode(payload, out, 1.0)
            assert np.array_equal(out + new, v)
            by_id(17, codec.level).decode_add(payload, acc)
            assert np.array_equal(acc, x + out)


def test_unbiased_equals_oracle_and_keeps_nothing():
    codec = parse("randomk(ratio=0.1,unbiased=1)")
    assert codec.state_floats(1000) == 0 and not codec.error_feedback
    assert codec.spec == "randomk(ratio=0.1,unbiased=1)+ef(decay=0)"
    for n in vectors.SIZES:
        x, bounds = vectors.normal(n), np.array([0, n // 3, n])
        _, payload, new = run(codec, x, None, bounds, seed=n)
        expected, left = sparse_oracles.randomk(x, bounds, [codec.level] * 2, n, unbiased=True)
        assert payload == expected
        assert same(new, left), "a residual may be asked for, to look at"


def test_every_element_is_sent_equally_often_and_an_unbiased_mean_is_the_gradient():
    n, trials = 97, 20_000
    codec = parse("randomk(ratio=0.1,unbiased=1)")
    x = vectors.normal(n) + 1
    k, total, hits = 9, np.zeros(n), np.zeros(n)
    out, payload = np.empty(n, np.float32), np.zeros(codec.max_bytes(n), np.uint8)
    for seed in range(trials):
        size = codec.encode(x, None, None, payload, None, seed=seed * 0x9E3779B97F4A7C15 % 2**62).nbytes
        codec.decode(payload[:size], out)
        total += out
        hits += out != 0
    # Binomial: every element is sent with probability k/n; five deviations of 97 elements leave one in 10^4 runs.
    deviation = np.sqrt(k / n * (1 - k / n) / trials)
    assert (np.abs(hits / trials - k / n) < 5 * deviation).all()
    assert (np.abs(total / trials - x) < 5 * deviation * n / k * np.abs(x)).all()


def test_nodes_with_one_seed_pick_the_same_elements_and_the_owner_resends_their_sum_exactly():
    n, bounds = 10_000, np.array([0, 4_000, 10_000])
    for spec in ("randomk(ratio=0.02)", "randomk(ratio=0.02,unbiased=1)"):
        codec, seed = parse(spec), 77
        total = np.zeros(n, np.float32)
        for node in range(4):
            codec.decode_add(run(codec, vectors.normal(n, node), None, bounds, seed=seed)[1], total)
        assert np.count_nonzero(total) == 200
        owner = codec.at_owner()
        _, payload, new = run(owner, total, None, bounds, seed=seed)
        out = np.empty(n, np.float32)
        owner.decode(payload, out)
        assert same(out, total) and not new.any()
    assert parse("randomk(ratio=0.1)").shared_seed


def test_different_seeds_pick_different_elements():
    codec, n = parse("randomk(ratio=0.01)"), 10_000
    x = np.ones(n, np.float32)
    sets = set()
    for seed in range(50):
        out = np.empty(n, np.float32)
        codec.decode(run(codec, x, None, np.array([0, n]), seed=seed)[1], out)
        sets.add(tuple(np.flatnonzero(out)))
    assert len(sets) == 50


def test_levels_of_single_segments():
    n, bounds, levels = 5000, np.array([0, 1000, 1000, 5000]), np.array([500_000, 1, 10_000], np.uint32)
    x = vectors.normal(n)
    _, payload, _ = run(parse("randomk(ratio=0.5)"), x, None, bounds, seed=5, levels=levels)
    assert payload == sparse_oracles.randomk(x, bounds, levels.tolist(), 5)[0]


def test_nonfinite_elements_are_counted_sent_or_not():
    x = vectors.normal(5000)
    x[[0, 17, 4999]] = np.nan, np.inf, -np.inf
    for spec in ("randomk(ratio=0.001)", "randomk(ratio=0.001,unbiased=1)"):
        assert run(parse(spec), x, None, np.array([0, 2500, 5000]))[0].nonfinite == 3


def test_golden_bytes():
    x = np.arange(1, 9, dtype=np.float32)
    _, payload, new = run(parse("randomk(ratio=0.5)"), x, None, np.array([0, 6, 8]), seed=42)
    picked = [i for i in range(8) if new[i] == 0]
    assert payload.hex() == (
        "02000008" "2a00000000000000"  # two segments, form 8; the seed
        "06000000" "03000000" "02000000" "01000000"  # lengths and counts
    ) + x[picked].tobytes().hex()  # fmt: skip
    assert picked == sorted([*sparse_oracles.randomk_places(42, 6, 3), *(sparse_oracles.randomk_places(42, 2, 1) + 6)])


def frame(heads, values, form=8, seed=0):
    return struct.pack(f"<IQ{len(heads)}I", len(heads) // 2 | form << 24, seed, *heads) + values


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b"", "cut short"),
        (bytes(11), "cut short"),
        (frame([10, 2], b"")[:-1], "cut short"),
        (struct.pack("<IQ", 1 << 23 | 8 << 24, 0), "cut short"),
        (frame([10, 1], bytes(4), form=0), "form"),
        (frame([10, 1], bytes(4), form=9), "form"),
        (frame([10, 1], bytes(4), form=14), "form"),
        (frame([9, 1], bytes(4)), "add up"),
        (frame([10, 11], bytes(44)), "no more elements"),
        (frame([2**32 - 1, 1], bytes(4)), "add up"),
        (frame([10, 1], bytes(3)), "as many"),
        (frame([10, 1], bytes(5)), "as many"),
        (frame([10, 1], struct.pack("<IB", 21, 1), form=12), "range"),
    ],
)
def test_bad_payload_is_refused_before_anything_is_written(payload, rule):
    assert_refused(by_id(17, 1), payload, rule)


@pytest.mark.parametrize("spec", ["randomk(ratio=0.1,unbiased=1,values=8)", "randomk(ratio=0.1,unbiased=1)+momentum"])
def test_unbiased_refuses_what_would_bias_it(spec):
    with pytest.raises(CodecError, match="0 with momentum or rounded values"):
        parse(spec)


@pytest.mark.parametrize("decorator", ["+ef", "+ef(decay=0.9)", "+ef(decay=0.9)+momentum"])
def test_unbiased_refuses_error_feedback(decorator):
    """Nothing is missing on average: the residual that was asked for cannot be had, and is not left out silently."""
    with pytest.raises(CodecError, match=r"0 with error feedback.*got 1.*leave \+ef out"):
        parse("randomk(ratio=0.1,unbiased=1)" + decorator)
    assert parse("randomk(ratio=0.1,unbiased=0)" + decorator).error_feedback
    assert not parse("randomk(ratio=0.1,unbiased=1)+ef(decay=0)").error_feedback
