"""Hostile payloads: at least 100,000 a codec, most of them valid frames gone wrong.

Each gives a result or a CodecError, the same from check, decode and decode_add, and nothing is written but
``out``, and that only when the payload is accepted. hypothesis draws the frames, a generator seeded by it
batches of mutants.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcserver.codecs import CodecError, by_id, parse
from tests.unit.codecs import specs, vectors

BATCH, BATCHES = 1000, 104
EDGES = [0, 1, 2, 7, 8, 31, 32, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1]


def mutate(rng, frame):
    """A frame with one to three of its bytes, bits, words, lengths or ranges changed."""
    data = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(8)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
        elif kind == 4:
            del data[at : at + rng.choice((1, 4, 8))]
        elif kind == 5:
            word = at & ~3
            data[word : word + 4] = rng.choice(EDGES).to_bytes(4, "little")
        elif kind == 6:
            word = at & ~3
            near = int.from_bytes(data[word : word + 4], "little") + rng.choice((-1, 1))
            data[word : word + 4] = (near % 2**32).to_bytes(4, "little")
        else:
            other = rng.randrange(len(data) + 1)
            data[at : at + 4] = data[other : other + 4]
    return bytes(data)


class Target:
    """float32[n] between guard zones, filled with a pattern that decoding must leave alone or overwrite whole."""

    def __init__(self, n):
        self.raw, self.guard = vectors.guarded(4 * n, fill=0x3C)
        self.out = self.raw.view(np.float32)

    def verdict(self, act):
        """Whether a payload was accepted; nothing may be written outside, nor at all if it was not."""
        self.raw[:] = 0x3C
        try:
            act(self.out)
        except CodecError:
            assert (self.raw == 0x3C).all()
            return False
        finally:
            self.guard()
        return True


def attempt(codec, payload, target):
    data = np.frombuffer(payload, np.uint8)
    checked = target.verdict(lambda out: codec.check(data, out.size))
    assert target.verdict(lambda out: codec.decode(data, out)) == checked
    assert target.verdict(lambda out: codec.decode_add(data, out)) == checked
    return checked


def frame(codec, n, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32)
    x[rng.random(n) < 0.2] = 0
    bounds = np.array([0, *sorted(rng.integers(0, n + 1, rng.integers(0, 4))), n], np.int64)
    out = np.empty(codec.max_bytes(n, len(bounds) - 1), np.uint8)
    return out[: codec.encode(x, None, None, out, bounds, seed=seed).nbytes].tobytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", specs.FLAT)
def test_any_bytes_give_a_result_or_an_error_and_write_nowhere_else(name):
    variants = specs.variants(name)
    seen = {"inputs": 0, "accepted": 0}

    @given(st.integers(0, 80), st.integers(0, 2**32 - 1))
    @settings(max_examples=-(-BATCHES // len(variants)), deadline=None, database=None)
    def batch(spec, n, seed):
        rng = random.Random(seed)
        codec = parse(spec)
        decoder, valid, target = by_id(codec.id, codec.level), frame(codec, n, seed), Target(n)
        assert attempt(decoder, valid, target)
        for i in range(BATCH):
            # Now and then bytes that never were a frame.
            payload = rng.randbytes(rng.randrange(100)) if i % 20 == 0 else mutate(rng, valid)
            seen["accepted"] += attempt(decoder, payload, target)
            seen["inputs"] += 1

    for spec in variants:
        batch(spec)
    assert seen["inputs"] >= 100_000
    assert 0 < seen["accepted"] < seen["inputs"]
