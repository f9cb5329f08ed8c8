"""Dense sums and typed loads and stores, each equal to numpy to the bit."""

import numpy as np
import pytest

from gcproto.dtypes import DType
from gcserver.codecs import CodecError, reduce
from tests.unit.codecs import oracles, vectors

SIZES = [0, 1, 31, 32, 33, 1000, 4097]
NUMPY = {
    DType.F64: np.float64, DType.I8: np.int8, DType.I16: np.int16, DType.I32: np.int32, DType.I64: np.int64,
    DType.U8: np.uint8, DType.BOOL: np.uint8,
}  # fmt: skip


def target(n):
    raw, check = vectors.guarded(4 * n)
    return raw.view(np.float32), check


@pytest.mark.parametrize("n", SIZES)
def test_sums_equal_numpy(n):
    a, b, third = vectors.normal(n), vectors.unaligned(vectors.normal(n, 1)), np.float32(1 / 3)
    out, check = target(n)
    reduce.add2(out, a, b)
    assert np.array_equal(out, a + b)
    assert reduce.add2_scale(out, a, b, 1 / 3) == 0
    assert np.array_equal(out, (a + b) * third)
    acc = a.copy()
    reduce.acc_add(acc, b)
    assert np.array_equal(acc, a + b)
    assert reduce.acc_add_scale(out, acc, b, 1 / 3) == 0
    assert np.array_equal(out, (a + b + b) * third)
    assert reduce.scale_copy(out, a, 1 / 3) == 0
    assert np.array_equal(out, a * third)
    check()


@pytest.mark.parametrize("n", [1, 32, 1000])
def test_nonfinite_results_are_counted(n):
    rng = np.random.default_rng(0)
    for count in (1, n // 2, n):
        a, b = vectors.normal(n), vectors.normal(n, 1)
        a[rng.permutation(n)[:count]] = rng.choice([np.nan, np.inf, -np.inf], count)
        out = np.empty_like(a)
        assert reduce.add2_scale(out, a, b, 0.5) == count
        assert reduce.acc_add_scale(out, a, b, 0.5) == count
        assert reduce.scale_copy(out, a, 0.5) == count
    huge = np.full(n, 3e38, np.float32)
    assert reduce.add2_scale(np.empty_like(huge), huge, huge, 0.5) == n


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("n", [0, 1, 1000, 9001])
def test_sum_ranks_adds_in_rank_order(k, n):
    arrays = [vectors.normal(n, seed, 10.0**seed) for seed in range(k)]
    expected = arrays[0].copy()
    for x in arrays[1:]:
        expected = expected + x
    out, check = target(n)
    reduce.sum_ranks(out, arrays)
    check()
    assert np.array_equal(out, expected)
    in_place = arrays[0].copy()
    reduce.sum_ranks(in_place, [in_place, *arrays[1:]])
    assert np.array_equal(in_place, expected)


def test_sum_ranks_refuses_what_would_be_wrong():
    a, b = vectors.normal(8), vectors.normal(8, 1)
    with pytest.raises(CodecError, match="memory of its own"):
        reduce.sum_ranks(b, [a, b])
    with pytest.raises(CodecError, match="at least one"):
        reduce.sum_ranks(a, [])
    with pytest.raises(CodecError, match="8 elements"):
        reduce.sum_ranks(a, [a, np.zeros(9, np.float32)])


def sample(dtype, n, seed):
    """(raw bytes, the values as numpy sums them)."""
    rng = np.random.default_rng(seed)
    if dtype is DType.F32:
        x = rng.standard_normal(n).astype(np.float32)
        return x.view(np.uint8), x
    if dtype is DType.F16:
        x = rng.standard_normal(n).astype(np.float16)
        return x.view(np.uint8), x.astype(np.float32)
    if dtype is DType.BF16:
        bits = oracles.bf16(rng.standard_normal(n).astype(np.float32))[0]
        return bits.view(np.uint8), oracles.bf16_to_f32(bits)
    if dtype is DType.F64:
        x = rng.standard_normal(n)
    elif dtype is DType.BOOL:
        x = rng.integers(0, 2, n).astype(np.uint8)
    else:
        info = np.iinfo(NUMPY[dtype])
        x = rng.integers(info.min, info.max, n, NUMPY[dtype], endpoint=True)
    return x.view(np.uint8), x


def final(dtype, acc, d):
    """What ``store`` should write for an average over d."""
    if dtype in (DType.F32, DType.F16, DType.BF16):
        v = acc * np.float32(1 / d)
        if dtype is DType.F32:
            return v.view(np.uint8)
        return (oracles.fp16(v) if dtype is DType.F16 else oracles.bf16(v))[0].view(np.uint8)
    if dtype is DType.F64:
        return (acc * (1 / d)).view(np.uint8)
    if dtype is DType.BOOL:
        return acc
    quotients = [abs(int(v)) // d * (-1 if v < 0 else 1) for v in acc]
    return np.array(quotients, object).astype(acc.dtype).view(np.uint8)


@pytest.mark.parametrize("n", [0, 1, 33, 1000])
@pytest.mark.parametrize("dtype", list(DType))
def test_every_type_loads_adds_and_stores(dtype, n):
    raws, values = zip(*(sample(dtype, n, seed) for seed in range(3)), strict=True)
    acc = np.empty(n, reduce.accumulate_dtype(dtype))
    expected = values[0].astype(acc.dtype)
    reduce.load_copy(acc, vectors.unaligned(raws[0]), dtype)
    assert np.array_equal(acc, expected)
    for raw, value in zip(raws[1:], values[1:], strict=True):
        expected = expected | value if dtype is DType.BOOL else expected + value
        reduce.load_add(acc, vectors.unaligned(raw, 3), dtype)
    assert np.array_equal(acc, expected)
    for d in (1, 2, 3, 7):
        out, check = vectors.guarded(n * dtype.itemsize)
        assert reduce.store(out, acc, dtype, 1 / d) == (0, 0)
        check()
        assert np.array_equal(out, final(dtype, expected, d)), d


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float])
def test_store_counts_nonfinite_results(dtype):
    acc = np.ones(100, reduce.accumulate_dtype(dtype))
    acc[[3, 50, 99]] = [np.nan, np.inf, -np.inf]
    assert reduce.store(np.empty(100 * dtype.itemsize, np.uint8), acc, dtype, 0.5) == (3, 0)


@pytest.mark.parametrize(("dtype", "beyond"), [(DType.F16, 7e4), (DType.BF16, 3.4e38)])
def test_store_counts_what_is_too_large_for_the_type(dtype, beyond):
    acc = np.array([1.0, beyond, -beyond, np.inf], np.float32)
    assert reduce.store(np.empty(8, np.uint8), acc, dtype, 1.0) == (1, 2)
    assert reduce.store(np.empty(8, np.uint8), acc, dtype, 0.5) == (1, 0)


def test_averages_of_integers_need_a_whole_divisor():
    acc = np.array([-7, 7], np.int64)
    out = np.empty(16, np.uint8)
    for scale in (0.3, 2.0, 0.0, -1.0):
        with pytest.raises(CodecError, match="1/d for a whole d"):
            reduce.store(out, acc, DType.I64, scale)
    assert reduce.store(out, acc, DType.I64, float(np.float32(1 / 3))) == (0, 0)
    assert out.view(np.int64).tolist() == [-2, 2]


def test_large_integers_are_exact():
    acc = np.array([2**62 + 1, -(2**62) - 1, 2**63 - 1, -(2**63)], np.int64)
    out = np.empty(32, np.uint8)
    reduce.store(out, acc, DType.I64, 1.0)
    assert np.array_equal(out.view(np.int64), acc)


def test_wrong_sizes_are_refused():
    acc = np.zeros(4, np.float32)
    with pytest.raises(CodecError, match="8 bytes"):
        reduce.load_add(acc, np.zeros(9, np.uint8), DType.F16)
    with pytest.raises(CodecError, match="float64 array"):
        reduce.load_add(acc, np.zeros(32, np.uint8), DType.F64)
    with pytest.raises(CodecError, match="8 bytes"):
        reduce.store(np.zeros(7, np.uint8), acc, DType.BF16, 1.0)
