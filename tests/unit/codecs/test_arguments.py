"""What every codec does with arrays that are read-only, unaligned, too small or of the wrong kind."""

import numpy as np
import pytest

from gcserver.codecs import CodecError, parse
from tests.unit.codecs import vectors

SPECS = ["none", "fp16", "bf16", "topk(ratio=0.1)", "onebit"]


def encode(codec, x, residual=None, offset=0):
    raw = np.zeros(codec.max_bytes(x.size) + offset, np.uint8)
    new = np.empty_like(x) if codec.error_feedback else None
    result = codec.encode(x, residual, new, raw[offset:], None)
    return raw[offset : offset + result.nbytes], new


@pytest.mark.parametrize("spec", SPECS)
def test_read_only_and_unaligned_arrays_give_the_same_bytes(spec):
    codec = parse(spec)
    x, r = vectors.normal(1001), vectors.normal(1001, seed=1)
    residual = r if codec.error_feedback else None
    plain, new = encode(codec, x, residual)
    for offset in (1, 2, 3):
        odd_r = vectors.unaligned(r, offset) if codec.error_feedback else None
        odd, odd_new = encode(codec, vectors.unaligned(x, offset), odd_r, offset)
        assert np.array_equal(odd, plain)
        assert new is None or np.array_equal(new, odd_new)
        outs = []
        for payload in (plain, vectors.unaligned(plain, offset), plain.tobytes(), memoryview(plain.tobytes())):
            out = np.empty_like(x)
            codec.decode(payload, out)
            outs.append(out)
        assert all(np.array_equal(outs[0], o) for o in outs)


@pytest.mark.parametrize("spec", SPECS)
def test_wrong_arrays_are_refused(spec):
    codec, n = parse(spec), 100
    x = vectors.normal(n)
    out = np.empty(codec.max_bytes(n), np.uint8)
    payload, _ = encode(codec, x)
    fixed = np.empty_like(x)
    fixed.flags.writeable = False

    def encoding(**change):
        args = {"x": x, "residual_in": None, "residual_out": None, "out": out, "segments": None} | change
        return lambda: codec.encode(**args)

    cases = {
        "x": [encoding(x=x.astype(np.float64)), encoding(x=vectors.normal(2 * n)[::2])],
        "out": [
            encoding(out=out[:-1]),
            encoding(out=out.view(np.int8)),
            lambda: codec.decode(payload, np.empty(n, np.float64)),
            lambda: codec.decode(payload, fixed),
        ],
        "acc": [lambda: codec.decode_add(payload, fixed)],
    }
    if codec.error_feedback:
        cases["residual_in"] = [encoding(residual_in=vectors.normal(n - 1))]
        cases["residual_out"] = [encoding(residual_out=x), encoding(residual_in=fixed, residual_out=fixed)]
        same = vectors.normal(n)
        cases["residual_out"].append(encoding(residual_in=same, residual_out=same))
        cases["segments"] = [
            encoding(segments=np.array(table, kind))
            for table, kind in (
                ([0, n], np.int32),
                ([0], np.int64),
                ([1, n], np.int64),
                ([0, n + 1], np.int64),
                ([0, 60, 40, n], np.int64),
            )
        ]
    for field, acts in cases.items():
        for act in acts:
            with pytest.raises(CodecError) as caught:
                act()
            assert caught.value.field == field


@pytest.mark.parametrize("spec", SPECS)
def test_encoding_leaves_its_inputs_alone_and_repeats(spec):
    codec = parse(spec)
    x, r = vectors.normal(5000), vectors.normal(5000, seed=1)
    residual = r if codec.error_feedback else None
    before = x.tobytes(), r.tobytes()
    first, _ = encode(codec, x, residual)
    again, _ = encode(codec, x, residual)
    assert (x.tobytes(), r.tobytes()) == before and np.array_equal(first, again)


@pytest.mark.parametrize("spec", ["topk(ratio=0.1)+ef(decay=0)", "onebit+ef(decay=0)"])
def test_without_error_feedback_an_old_residual_is_not_looked_at(spec):
    codec = parse(spec)
    x = vectors.normal(500)
    plain, _ = encode(codec, x)
    other, _ = encode(codec, x, np.full(500, np.nan, np.float32))
    assert np.array_equal(plain, other)
