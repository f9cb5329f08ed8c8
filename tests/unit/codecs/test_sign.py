"""signsgd and signum against their oracle, to the bit: votes, ties by seed, the momentum's two versions."""

import struct

import numpy as np
import pytest

from gcserver.codecs import CodecError, by_id, parse
from tests.unit.codecs import sign_oracles, vectors
from tests.unit.codecs.refusals import assert_refused

SEEDS = [0, 1, 2**62 - 1]


def run(codec, x, state, bounds, scale=1.0, seed=0, keep=True):
    """(result, payload, new state), with guard zones around everything written."""
    m = len(bounds) - 1
    out, check = vectors.guarded(codec.max_bytes(x.size, m))
    new, check_new = vectors.guarded(4 * codec.state_floats(x.size, m))
    new = new.view(np.float32)
    result = codec.encode(x, state, new if keep and new.size else None, out, bounds, scale, seed)
    check()
    check_new()
    return result, out[: result.nbytes].tobytes(), new


@pytest.mark.parametrize("n", vectors.SIZES)
def test_signsgd_equals_oracle_on_awkward_vectors(n):
    codec = parse("signsgd")
    for shape, x in vectors.shapes(n, seed=n):
        for bounds in vectors.segment_tables(n):
            for seed in SEEDS:
                result, payload, _ = run(codec, x, None, bounds, 0.5, seed)
                assert payload == sign_oracles.votes(x * np.float32(0.5), bounds, seed), (shape, bounds, seed)
                assert result.nonfinite == 0


@pytest.mark.parametrize("n", vectors.SIZES)
def test_signum_equals_oracle_on_awkward_vectors(n):
    codec = parse("signum(beta=0.75)")
    old = vectors.normal(n, seed=9, scale=0.1)
    for shape, x in vectors.shapes(n, seed=n):
        for bounds in vectors.segment_tables(n):
            for state in (None, old):
                result, payload, new = run(codec, x, state, bounds, 0.5, seed=7)
                expected = sign_oracles.momentum(x, state, 0.5, 0.75)
                assert np.array_equal(new, expected), (shape, bounds)
                assert payload == sign_oracles.votes(expected, bounds, 7), (shape, bounds)
                assert result.nonfinite == 0
                assert run(codec, x, state, bounds, 0.5, seed=7, keep=False)[1] == payload


@pytest.mark.parametrize("name", ["signsgd", "signum"])
@pytest.mark.parametrize("n", [1, 15, 64, 5000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted(name, n, value):
    for x, count in vectors.with_some(n, value):
        assert run(parse(name), x, None, np.array([0, n]))[0].nonfinite == count
    state = vectors.normal(n)
    state[-1] = value
    if name == "signum":
        assert run(parse(name), vectors.normal(n), state, np.array([0, n]))[0].nonfinite == 1


def test_golden_bytes():
    x = np.array([1.0, -1.0, 3.0, -2.0, 2.0, -3.0], np.float32)
    for name in ("signsgd", "signum"):
        _, payload, _ = run(parse(name), x, None, np.array([0, 6, 6]))
        assert payload.hex() == "02000000060000002a00000000"  # two segments: 6 elements, then none


def test_golden_bytes_of_undecided_elements():
    # splitmix64 started with 0 begins with e220a8397b1dcdaf, 6e789e6aa1b965f4.
    _, payload, _ = run(parse("signsgd"), np.zeros(128, np.float32), None, np.array([0, 128]))
    words = struct.unpack("<IIQQ", payload)
    assert words == (1, 128, 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4)


def test_undecided_elements_fall_either_way_with_equal_odds_and_others_never():
    codec, n = parse("signsgd"), 20_000
    x = np.where(np.arange(n) % 2 == 0, 0, np.where(np.arange(n) % 4 == 1, -1, 1)).astype(np.float32)
    x[::6] = -0.0
    votes = np.zeros(n, np.float32)
    for seed in range(64):
        _, payload, _ = run(codec, x, None, np.array([0, n]), seed=seed)
        codec.decode_add(np.frombuffer(payload, np.uint8), votes)
    assert np.array_equal(votes[x != 0], 64 * x[x != 0])
    undecided = votes[x == 0]
    # A sum of 64 fair signs has variance 64; its mean over 10,000 of them lies within five deviations.
    assert abs(undecided.mean()) < 5 * 8 / 100 and 60 < undecided.var() < 68
    assert np.abs(undecided).max() <= 48


@pytest.mark.parametrize("name", ["signsgd", "signum"])
def test_majority_wins_whatever_the_number_of_members(name):
    codec, n = parse(name), 1001
    for members in (1, 2, 3, 4, 7):
        gradients = [vectors.normal(n, seed=s) for s in range(members)]
        acc = np.zeros(n, np.float32)
        for seed, g in enumerate(gradients):
            _, payload, _ = run(codec, g, None, np.array([0, n]), seed=seed)
            codec.decode_add(np.frombuffer(payload, np.uint8), acc)
        tally = sum(np.sign(g) for g in gradients)
        assert np.array_equal(acc, tally)
        _, payload, _ = run(codec.at_owner(), acc, None, np.array([0, n]), scale=1 / members, seed=99)
        out = np.empty(n, np.float32)
        codec.decode(np.frombuffer(payload, np.uint8), out, 1.0)
        assert set(np.unique(out)) <= {-1.0, 1.0}
        assert np.array_equal(out[tally != 0], np.sign(tally)[tally != 0])


def test_signum_follows_its_momentum_and_not_the_last_gradient():
    codec, n = parse("signum(beta=0.9)"), 500
    steady, state = vectors.normal(n), np.zeros(n, np.float32)
    for _ in range(20):
        _, payload, state = run(codec, steady, state, np.array([0, n]))
        state = state.copy()
    _, payload, new = run(codec, -steady, state, np.array([0, n]))
    assert np.array_equal(sign_oracles.decode(payload, 0), np.sign(steady))
    assert np.allclose(new, 0.9 * state - 0.1 * steady, atol=1e-6)


def test_a_void_or_repeated_step_leaves_no_trace():
    codec, n = parse("signum"), 3000
    x, old = vectors.normal(n), vectors.normal(n, seed=1)
    before = old.tobytes()
    bad = x.copy()
    bad[5] = np.nan
    first = run(codec, x, old, np.array([0, n]), seed=11)
    assert run(codec, bad, old, np.array([0, n]), seed=11)[0].nonfinite == 1
    again = run(codec, x, old, np.array([0, n]), seed=11)
    assert old.tobytes() == before
    assert first[1] == again[1] and np.array_equal(first[2], again[2])


@pytest.mark.parametrize("name", ["signsgd", "signum"])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1000])
def test_decode_and_decode_add(name, n):
    codec = by_id(parse(name).id, 0)
    _, payload, _ = run(codec, vectors.normal(n), None, np.array([0, n // 3, n]))
    data = vectors.unaligned(np.frombuffer(payload, np.uint8))
    for scale in (1.0, 1 / 3):
        out = vectors.normal(n, seed=4)
        codec.decode(data, out, scale)
        assert np.array_equal(out, sign_oracles.decode(payload, 0, scale))
    acc = vectors.normal(n, seed=5)
    before = acc.copy()
    codec.decode_add(data, acc)
    assert np.array_equal(acc, before + sign_oracles.decode(payload, 0))


def test_what_the_runtime_needs_to_know():
    for name, floats in (("signsgd", 0), ("signum", 100)):
        codec = parse(name)
        assert (codec.units, codec.finalise, codec.conserves, codec.error_feedback) == ("mean", "vote", False, False)
        assert codec.state_floats(100, 3) == floats
        assert codec.at_owner().state_floats(100, 3) == 0 and type(codec.at_owner()) is type(codec)
    for name in ("onebit", "efsignsgd"):
        codec = parse(name)
        assert (codec.units, codec.finalise, codec.conserves) == ("sum", "mean", True)
        assert codec.state_floats(100, 3) == 100 and parse(f"{name}+ef(decay=0)").state_floats(100, 3) == 0


def test_wrong_states_are_refused():
    x, out = vectors.normal(100), np.empty(1000, np.uint8)
    with pytest.raises(CodecError, match="signsgd keeps none"):
        parse("signsgd").encode(x, x.copy(), None, out, None)
    for state_in, state_out, field in (
        (np.zeros(99, np.float32), None, "state_in"),
        (None, np.zeros(101, np.float32), "state_out"),
        (None, x, "state_out"),
    ):
        with pytest.raises(CodecError) as caught:
            parse("signum").encode(x, state_in, state_out, out, None)
        assert caught.value.field == field
    with pytest.raises(CodecError, match=r"levels: expected 1 in \[0, 0\]"):
        parse("signsgd").encode(x, None, None, out, None, levels=np.array([3], np.uint32))


def test_bad_payload_is_refused_before_anything_is_written():
    codec = by_id(33, 0)
    for payload, rule in (
        (b"", "cut short"),
        (struct.pack("<II", 1, 10) + b"\0", "cut short"),
        (struct.pack("<II", 1, 9) + b"\0\0", "add up"),
        (struct.pack("<I", 2) + (struct.pack("<I", 9) + b"\0\0") * 2, "add up"),
        (struct.pack("<II", 1, 10) + b"\0\0\0", "nothing after"),
        (struct.pack("<II", 1, 10) + b"\0\4", "padding"),
    ):
        assert_refused(codec, payload, rule)
