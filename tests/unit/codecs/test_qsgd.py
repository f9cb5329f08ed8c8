"""qsgd against its oracle, to the bit given the same chance, and in distribution over seeds."""

import struct

import numpy as np
import pytest

from gcserver.codecs import CodecError, by_id, parse
from tests.unit.codecs import oracles, vectors
from tests.unit.codecs import quantise_oracles as truth
from tests.unit.codecs.refusals import assert_refused
from tests.unit.codecs.stochastic_cases import assert_unbiased, decode, over_seeds, run

CASES = [
    # spec, bits, steps, kind, bucket
    ("qsgd(bits=2)", 2, 0, "maxmin", 1024),
    ("qsgd(bits=3,bucket=64)", 3, 0, "maxmin", 64),
    ("qsgd", 4, 0, "maxmin", 1024),
    ("qsgd(bits=5,bucket=1536)", 5, 0, "maxmin", 1536),
    ("qsgd(bits=8,bucket=0)", 8, 0, "maxmin", 0),
    ("qsgd(kind=max,bucket=512)", 4, 7, "max", 512),
    ("qsgd(bits=6,kind=l2,bucket=128)", 6, 31, "l2", 128),
    ("qsgd(levels=64,kind=l2,bucket=0)", 8, 64, "l2", 0),
    ("qsgd(levels=5,kind=l2,bucket=4096)", 4, 5, "l2", 4096),
]


@pytest.mark.parametrize(("spec", "bits", "steps", "kind", "bucket"), CASES)
@pytest.mark.parametrize("n", [*vectors.SIZES, 5000])
def test_equals_oracle_on_awkward_vectors(spec, bits, steps, kind, bucket, n):
    plain = parse(spec)
    codec = plain if kind == "l2" else parse(f"{plain.spec}+ef(decay=0.75)")
    old = vectors.normal(n, seed=9, scale=0.1)
    for i, (name, x, bounds) in enumerate(vectors.cases(n, seed=n)):
        for residual in (None, old):
            if residual is not None and not codec.error_feedback:
                continue
            v = oracles.corrected(x, residual, 0.5, 0.75)
            choices = [(bits, steps)] * (len(bounds) - 1)
            expected, expected_new = truth.uniform(v, bounds, choices, i, kind, bucket)
            result, payload, new = run(codec, x, residual, bounds, 0.5, seed=i)
            assert payload == expected, (name, bounds)
            assert np.array_equal(new, expected_new), (name, bounds)
            assert result.nonfinite == 0
            assert result.saturated == (np.abs(v) > 2.0**126).sum()
            assert run(codec, x, residual, bounds, 0.5, seed=i, want_residual=False)[1] == expected
            assert np.array_equal(decode(codec, payload, n, 1 / 3), truth.uniform_decode(payload, 1 / 3))
            assert np.isfinite(decode(codec, payload, n)).all()


@pytest.mark.parametrize("kind", ["maxmin", "max", "l2"])
def test_every_segment_may_have_its_own_bits(kind):
    codec = parse(f"qsgd(kind={kind},bucket=128)")
    x, bounds = vectors.normal(3000), [0, 100, 100, 577, 1200, 1801, 2300, 2999, 3000]
    levels = [2, 8, 3, 4, 5, 6, 7, 8]
    choices = [(b, 0 if kind == "maxmin" else 2 ** (b - 1) - 1) for b in levels]
    expected, expected_new = truth.uniform(x, bounds, choices, 5, kind, 128)
    largest = parse(f"qsgd(bits=8,kind={kind},bucket=128)")
    _, payload, new = run(codec, x, None, bounds, seed=5, levels=levels, largest=largest)
    assert payload == expected and np.array_equal(new, expected_new)
    # Any codec of the family decodes it: the payload says what is needed.
    other = by_id(48, parse("qsgd(bits=2)").level)
    assert np.array_equal(decode(other, payload, 3000), truth.uniform_decode(payload))
    for wrong, says in (([1] * 8, r"8 in \[2, 8\]"), ([9] * 8, r"8 in \[2, 8\]"), ([4] * 7, "8 elements")):
        with pytest.raises(CodecError, match=f"levels.*{says}"):
            run(codec, x, None, bounds, levels=wrong)
    with pytest.raises(CodecError, match="out"):
        run(codec, x, None, bounds, levels=levels)  # room for 4 bits only


def test_chance_comes_from_the_seed_alone():
    codec, x = parse("qsgd"), vectors.normal(5000)
    first = run(codec, x, seed=1)[1]
    assert run(codec, vectors.unaligned(x), seed=1)[1] == first
    assert run(codec, x, seed=2)[1] != first
    assert run(codec, x, seed=np.uint64(2**62 - 1))[1] != first
    # and from an element's place in the partition, wherever segments begin
    halves = run(codec, x, bounds=[0, 2048, 5000], seed=1)[1]
    assert np.array_equal(decode(codec, halves, 5000), decode(codec, first, 5000))


@pytest.mark.parametrize(("spec", "bits", "steps", "kind", "bucket"), CASES)
def test_unbiased(spec, bits, steps, kind, bucket):
    codec, x = parse(spec), vectors.normal(2000, scale=0.01)
    variance = np.empty(x.size)
    for start in range(0, x.size, bucket or x.size):
        part = x[start : start + (bucket or x.size)]
        low, step, _ = (float(s) for s in truth.scale_of(part, bits, steps, kind, 0.0))
        fraction = (part - low) / step % 1.0
        variance[start : start + part.size] = fraction * (1 - fraction) * step**2
    assert_unbiased(over_seeds(codec, x, 400), x, variance)


def test_what_a_level_holds_exactly_is_sent_exactly():
    x = np.repeat(np.arange(16, dtype=np.float32) - 3, 64)
    for seed in range(20):
        assert np.array_equal(decode(parse("qsgd"), run(parse("qsgd"), x, seed=seed)[1], x.size), x)
    y = np.repeat(np.array([-7, -1, 0, 3, 7], np.float32), 100)
    codec = parse("qsgd(kind=max)")
    for seed in range(20):
        assert np.array_equal(decode(codec, run(codec, y, seed=seed)[1], y.size), y)


def test_zeros_stay_zeros_where_levels_are_symmetrical():
    x = np.where(np.random.default_rng(0).random(3000) < 0.1, vectors.normal(3000), 0).astype(np.float32)
    for kind in ("l2", "max"):
        codec = parse(f"qsgd(kind={kind})")
        assert not decode(codec, run(codec, x, seed=1)[1], 3000)[x == 0].any()


@pytest.mark.parametrize("kind", ["maxmin", "l2", "max"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted(kind, value):
    codec = parse(f"qsgd(kind={kind})")
    for n in (1, 33, 1024, 5000):
        for count in (1, n // 2, n):
            x = vectors.normal(n, seed=3)
            x[np.random.default_rng(0).permutation(n)[:count]] = value
            assert run(codec, x, seed=1)[0].nonfinite == count


@pytest.mark.parametrize("kind", ["maxmin", "l2", "max"])
def test_huge_elements_saturate_and_are_counted(kind):
    codec, x = parse(f"qsgd(kind={kind})"), vectors.normal(2000)
    x[:3] = 3.4e38, -3.4e38, 2.0**126
    result, payload, _ = run(codec, x, seed=1)
    assert (result.nonfinite, result.saturated) == (0, 2)
    out = decode(codec, payload, 2000)
    assert np.isfinite(out).all() and out[:3].tolist() == [2.0**126, -(2.0**126), 2.0**126]


def test_ranges_too_small_to_invert_decode_to_the_minimum():
    x = np.full(100, 2.0**-130, np.float32)
    x[0] = 0
    assert not decode(parse("qsgd"), run(parse("qsgd"), x)[1], 100).any()


def test_golden_bytes():
    x = np.array([0, 1, 2, 3, 15, 0.5, 7.25, -0.0, 4], np.float32)
    _, payload, new = run(parse("qsgd"), x, bounds=[0, 9, 9], seed=1)
    assert payload.hex() == (
        "02000000"  # two segments
        "09000000" "04001000"  # 9 elements, 4 bits, maxmin, buckets of 16*64
        "00000000" "04001000"  # none
        "00000000" "0000803f"  # minimum 0, step 1
        "1032" "1f08" "04"  # 0 1 2 3 15 and, at random: 1 for 0.5, 8 for 7.25; 0 4
    )  # fmt: skip
    assert new.tolist() == [0, 0, 0, 0, 0, -0.5, -0.75, 0, 0]
    y = np.array([3, 0, -4, 0], np.float32)
    assert run(parse("qsgd(levels=10,kind=l2,bucket=0)"), y, seed=3)[1].hex() == (
        "01000000"
        "04000000" "050a0000"  # 4 elements, 5 bits, 10 levels a side, norm of the segment
        "0000003f"  # step: norm 5 by 10
        "500905"  # 16 10 2 10
    )  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000, 5001])
@pytest.mark.parametrize("bits", range(2, 9))
def test_decode_and_decode_add(n, bits):
    codec = parse(f"qsgd(bits={bits},bucket=192)")
    _, payload, _ = run(codec, vectors.normal(n), bounds=[0, n // 3, n], seed=4)
    data = vectors.unaligned(np.frombuffer(payload, np.uint8))
    acc = vectors.normal(n, seed=5)
    before = acc.copy()
    by_id(48, codec.level).decode_add(data, acc)
    assert np.array_equal(acc, before + truth.uniform_decode(payload))


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b"\1\0", "cut short"),
        (struct.pack("<I", 1), "cut short"),
        (struct.pack("<I", 2**32 - 1), "cut short"),
        (struct.pack("<III", 1, 10, 4) + bytes(12), "cut short"),
        (struct.pack("<III", 1, 10, 4) + bytes(14), "nothing after"),
        (struct.pack("<III", 1, 9, 4) + bytes(13), "add up"),
        (struct.pack("<III", 1, 2**32 - 1, 4) + bytes(13), "add up"),
        (struct.pack("<III", 1, 9, 4) + bytes(12) + b"\x10", "padding"),
        (struct.pack("<III", 1, 10, 3) + bytes(8) + b"\0\0\0\x40", "padding"),
        (struct.pack("<III", 1, 10, 1) + bytes(10), "2..8 bits"),
        (struct.pack("<III", 1, 10, 9) + bytes(20), "2..8 bits"),
        (struct.pack("<III", 1, 10, 4 | 8 << 8) + bytes(9), "2..8 bits"),
        (struct.pack("<III", 1, 10, 4 | 128 << 8) + bytes(13), "2..8 bits"),
    ],
)
def test_bad_payload_is_refused_before_anything_is_written(payload, rule):
    assert_refused(parse("qsgd"), payload, rule)


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("qsgd", "qsgd(bits=4,bucket=1024,kind=maxmin)"),
        ("qsgd+ef", "qsgd(bits=4,bucket=1024,kind=maxmin)+ef"),
        ("qsgd+ef(decay=0)", "qsgd(bits=4,bucket=1024,kind=maxmin)"),
        ("qsgd(bits=8, kind=max)+ef(decay=0.9)", "qsgd(bits=8,bucket=1024,kind=max)+ef(decay=0.9)"),
        ("qsgd(levels=64,bucket=0)", "qsgd(levels=64,bucket=0,kind=l2)"),
        ("qsgd(levels=127,kind=max)", "qsgd(levels=127,bucket=1024,kind=max)"),
        ("qsgd(bits=8,bucket=512,kind=l2)+ef", "qsgd(bits=8,bucket=512,kind=l2)+ef"),
    ],
)
def test_specs_and_levels(spec, canonical):
    codec = parse(spec)
    assert codec.spec == canonical and parse(canonical).spec == canonical
    twin = by_id(48, codec.level)
    assert twin.level == codec.level and not twin.error_feedback
    assert codec.state_floats(10) == (10 if "+ef" in canonical else 0)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("qsgd(bits=1)", r"\[2, 8\]"),
        ("qsgd(levels=128,kind=l2)", r"\[0, 127\]"),
        ("qsgd(levels=7,kind=maxmin)", "l2 or max with levels=7"),
        ("qsgd(bucket=100)", "multiple of 64"),
        ("qsgd(kind=l1)", "auto, maxmin, l2, max"),
        ("qsgd(kind=l2)+ef", r"levels\*\*2 above the bucket"),
        ("qsgd(levels=64,bucket=0)+ef", r"levels\*\*2 above the bucket"),
        ("qsgd(bits=2,kind=max)+ef", "max: 2 or more"),
    ],
)
def test_refusals_say_what_is_accepted(spec, says):
    with pytest.raises(CodecError, match=says):
        parse(spec)


@pytest.mark.parametrize("level", [0, 1, 9, 4 | 8 << 8, 4 | 128 << 8, 8 | 3 << 8, 2**32 - 1])
def test_levels_no_peer_of_ours_sends_are_refused(level):
    with pytest.raises(CodecError):
        by_id(48, level)


def test_bytes_are_what_the_document_says():
    n = 1 << 20
    for spec, nbytes in (
        ("qsgd", 12 + n // 2 + 8 * n // 1024),
        ("qsgd(bits=8,kind=max,bucket=512)", 12 + n + 4 * n // 512),
        ("qsgd(levels=64,kind=l2,bucket=0)", 12 + n + 4),
    ):
        assert run(parse(spec), vectors.normal(n))[0].nbytes == nbytes
    assert 7.7 < 4 * n / (12 + n // 2 + 8 * n // 1024) < 7.9  # L-GreCo's tables 2 and 4 print 7.8


@pytest.mark.parametrize("spec", ["qsgd(bits=2)", "qsgd(bits=3,kind=max)", "qsgd(bits=6,kind=l2,bucket=512)"])
def test_error_feedback_delivers_everything_and_its_residual_stays_bounded(spec):
    codec, n = parse(f"{spec}+ef"), 4096
    total, given, residual = np.zeros(n), np.zeros(n), np.zeros(n, np.float32)
    largest = 0.0
    for step in range(200):
        x = vectors.normal(n, seed=step)
        _, payload, residual = run(codec, x, residual, seed=step)
        given += x
        total += decode(codec, payload, n)
        largest = max(largest, float(np.abs(residual).max()))
    assert np.allclose(total + residual, given, atol=1e-3)
    assert largest < 30


def test_levels_that_would_let_a_residual_grow_are_refused_for_single_segments_too():
    x, bounds = vectors.normal(100), [0, 50, 100]
    for spec, low in (("qsgd(kind=max)+ef", 3), ("qsgd(bits=8,kind=l2,bucket=512)+ef", 6), ("qsgd+ef", 2)):
        codec = parse(spec)
        assert codec.levels == (low, 8)
        for bits in range(2, low):
            with pytest.raises(CodecError, match=f"in .{low}, 8"):
                run(codec, x, None, bounds, levels=[8, bits])
    assert parse("qsgd(bits=2,kind=max)").levels == (2, 8)
