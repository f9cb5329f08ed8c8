"""none, fp16, bf16: every rounding case, saturation, and the count of non-finite elements."""

import numpy as np
import pytest

from gcserver.codecs import CodecError, by_id, parse
from tests.unit.codecs import oracles, vectors

SPECIAL = np.array(
    [0x0, 0x80000000, 1, 0x007FFFFF, 0x33000000, 0x33000001, 0x38800000, 0x387FE000, 0x387FF000, 0x477FE000,
     0x477FEFFF, 0x477FF000, 0xC77FF000, 0x477FF001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000,
     0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F801000, 0x3F803000],
    np.uint32,
).view(np.float32)  # fmt: skip


def inputs():
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, 200_003, dtype=np.uint32).view(np.float32)
    near_half = (rng.integers(0x33000000 - 9999, 0x47800000 + 9999, 100_003)).astype(np.uint32).view(np.float32)
    halves = (np.arange(65536, dtype=np.uint16).view(np.float16)).astype(np.float32)
    middles = (halves.view(np.uint32) + np.uint32(0x1000)).view(np.float32)
    return np.concatenate([SPECIAL, any_bits, near_half, halves, middles])


def encode(codec, x, scale=1.0):
    out, check = vectors.guarded(codec.max_bytes(x.size))
    result = codec.encode(x, None, None, out, None, scale)
    check()
    assert result.nbytes == out.size
    return result, out


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_rounding_equals_oracle(name):
    x = inputs()
    result, payload = encode(parse(name), x)
    expected, saturated = (oracles.fp16 if name == "fp16" else oracles.bf16)(x)
    got, nan = payload.view(np.uint16), np.isnan(x)
    assert np.array_equal(got[~nan], expected[~nan])
    widened = np.empty_like(x)
    parse(name).decode(payload, widened)
    assert np.isnan(widened[nan]).all() and not np.isnan(widened[~nan]).any()
    assert result.nonfinite == oracles.nonfinite(x) and result.saturated == saturated > 0


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_every_code_decodes_exactly(name):
    codes = np.arange(65536, dtype=np.uint16)
    expected = codes.view(np.float16).astype(np.float32) if name == "fp16" else oracles.bf16_to_f32(codes)
    out = np.empty(65536, np.float32)
    parse(name).decode(codes.view(np.uint8), out)
    nan = np.isnan(expected)
    assert np.array_equal(out[~nan].view("u4"), expected[~nan].view("u4")) and np.isnan(out[nan]).all()


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("n", vectors.SIZES)
def test_sizes_scales_and_adding(name, n):
    codec, x = parse(name), vectors.normal(n)
    for scale in (1.0, 0.25, 1 / 3):
        _, payload = encode(codec, x, scale)
        v = x * np.float32(scale)
        bits = {"none": v.view("u1"), "fp16": oracles.fp16(v)[0].view("u1"), "bf16": oracles.bf16(v)[0].view("u1")}
        assert np.array_equal(payload, bits[name])
        out, acc = np.empty_like(x), vectors.normal(n, seed=3)
        before = acc.copy()
        codec.decode(payload, out)
        codec.decode_add(vectors.unaligned(payload), acc)
        assert np.array_equal(acc, before + out)
        scaled = np.empty_like(x)
        codec.decode(payload, scaled, scale)
        assert np.array_equal(scaled, out * np.float32(scale))


def test_golden_bytes():
    x = np.array([1.0, -2.5, 1e6, 1 / 3], np.float32)
    assert encode(parse("none"), x)[1].tobytes().hex() == "0000803f000020c000247449abaaaa3e"
    assert encode(parse("fp16"), x)[1].tobytes().hex() == "003c00c1ff7b5535"
    assert encode(parse("bf16"), x)[1].tobytes().hex() == "803f20c07449ab3e"


@pytest.mark.parametrize(("id_", "itemsize"), [(0, 4), (1, 2), (2, 2)])
def test_wrong_length_is_refused(id_, itemsize):
    out = np.full(3, 7.0, np.float32)
    for nbytes in (0, 3 * itemsize - 1, 3 * itemsize + 1, 4 * itemsize):
        for act in (by_id(id_, 0).decode, by_id(id_, 0).decode_add):
            with pytest.raises(CodecError, match=f"expected {3 * itemsize} "):
                act(np.zeros(nbytes, np.uint8), out)
    assert (out == 7).all()


def test_casts_keep_no_residual():
    x = np.ones(4, np.float32)
    with pytest.raises(CodecError, match="keeps none"):
        parse("fp16").encode(x, None, np.empty_like(x), np.empty(8, np.uint8), None)
