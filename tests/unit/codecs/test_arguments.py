"""What every codec does with arrays that are read-only, unaligned, too small or of the wrong kind."""

import numpy as np
import pytest

from gcserver.codecs import CodecError, parse
from tests.unit.codecs import specs, vectors

SPECS = specs.USUAL


def old_state(codec, n):
    """A state whose residual is not zero and the rest of which is fresh; None for codecs without."""
    floats = codec.state_floats(n)
    state = np.zeros(floats, np.float32)
    if codec.error_feedback:
        state[:n] = vectors.normal(n, seed=1)
    return state if floats else None


def encode(codec, x, state=None, offset=0):
    raw = np.zeros(codec.max_bytes(x.size) + offset, np.uint8)
    floats = codec.state_floats(x.size)
    new = np.zeros(floats, np.float32) if floats else None
    result = codec.encode(x, state, new, raw[offset:], None)
    return raw[offset : offset + result.nbytes], new


@pytest.mark.parametrize("spec", SPECS)
def test_read_only_and_unaligned_arrays_give_the_same_bytes(spec):
    codec = parse(spec)
    x = vectors.normal(1001)
    state = old_state(codec, 1001)
    plain, new = encode(codec, x, state)
    for offset in (1, 2, 3):
        odd_state = None if state is None else vectors.unaligned(state, offset)
        odd, odd_new = encode(codec, vectors.unaligned(x, offset), odd_state, offset)
        assert np.array_equal(odd, plain)
        assert new is None or np.array_equal(new, odd_new)
        outs = []
        for payload in (plain, vectors.unaligned(plain, offset), plain.tobytes(), memoryview(plain.tobytes())):
            out = np.empty_like(x)
            codec.decode(payload, out)
            outs.append(out)
        assert all(np.array_equal(outs[0], o) for o in outs)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 60, 64])
def test_results_and_states_may_lie_anywhere_and_nothing_beside_them_is_written(spec, offset):
    codec = parse(spec)
    x = vectors.normal(2100)
    state = old_state(codec, x.size)
    payload, new = encode(codec, x, state)
    decoded = np.empty_like(x)
    codec.decode(payload, decoded)

    def guarded(n):
        raw = np.full(4 * n + 256, 0xA5, np.uint8)
        at = -raw.ctypes.data % 64 + offset
        return raw, raw[at : at + 4 * n].view(np.float32)

    raw, out = guarded(x.size)
    codec.decode(payload, out)
    assert np.array_equal(out, decoded)
    out[:] = np.frombuffer(b"\xa5" * 4, np.float32)
    assert np.all(raw == 0xA5)
    if new is not None:
        raw, kept = guarded(new.size)
        codec.encode(x, state, kept, np.zeros(codec.max_bytes(x.size), np.uint8), None)
        assert np.array_equal(kept, new)
        kept[:] = np.frombuffer(b"\xa5" * 4, np.float32)
        assert np.all(raw == 0xA5)


@pytest.mark.parametrize("spec", SPECS)
def test_wrong_arrays_are_refused(spec):
    codec, n = parse(spec), 100
    x = vectors.normal(n)
    out = np.empty(codec.max_bytes(n), np.uint8)
    payload, _ = encode(codec, x)
    fixed = np.empty_like(x)
    fixed.flags.writeable = False

    def encoding(**change):
        args = {"x": x, "state_in": None, "state_out": None, "out": out, "segments": None} | change
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
    floats = codec.state_floats(n)
    if floats:
        same, fixed_state = np.zeros(floats, np.float32), np.zeros(floats, np.float32)
        fixed_state.flags.writeable = False
        cases["state_in"] = [encoding(state_in=np.zeros(floats - 1, np.float32))]
        cases["state_out"] = [
            encoding(state_in=fixed_state, state_out=fixed_state),
            encoding(state_in=same, state_out=same),
            encoding(state_out=np.zeros(floats + 1, np.float32)),
        ]
        if floats == n:
            cases["state_out"].append(encoding(state_out=x))
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
    x, state = vectors.normal(5000), old_state(codec, 5000)
    kept = b"" if state is None else state.tobytes()
    before = x.tobytes()
    first, _ = encode(codec, x, state)
    again, _ = encode(codec, x, state)
    assert x.tobytes() == before and np.array_equal(first, again)
    assert state is None or state.tobytes() == kept


@pytest.mark.parametrize("spec", ["topk(ratio=0.1)+ef(decay=0)", "onebit+ef(decay=0)", "efsignsgd+ef(decay=0)"])
def test_without_error_feedback_an_old_residual_is_not_looked_at(spec):
    codec = parse(spec)
    x = vectors.normal(500)
    plain, _ = encode(codec, x)
    other, _ = encode(codec, x, np.full(500, np.nan, np.float32))
    assert np.array_equal(plain, other)
    audit, out = np.empty(500, np.float32), np.empty(codec.max_bytes(500), np.uint8)
    codec.encode(x, None, audit, out, None)
    sent = np.empty(500, np.float32)
    codec.decode(plain, sent)
    assert np.array_equal(audit, x - sent)  # what was lost may still be asked for
