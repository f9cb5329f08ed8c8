"""Hostile payloads: at least 10,000 a codec (100,000 in `make test-long`), most of them valid frames gone wrong.

Each gives a result or a CodecError, the same from check, decode and decode_add, and nothing is written but
``out``, and that only when the payload is accepted. hypothesis draws the frames, a generator seeded by it
batches of mutants.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcserver.codecs import by_id, parse
from tests.fuzz.mutate import spoil
from tests.fuzz.payloads import Room, attempt, frame
from tests.unit.codecs import specs

BATCH = 1000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("batches", [13, pytest.param(104, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", specs.FLAT)
def test_any_bytes_give_a_result_or_an_error_and_write_nowhere_else(name, batches):
    variants = specs.variants(name)
    seen = {"inputs": 0, "accepted": 0}

    @given(st.integers(0, 80), st.integers(0, 2**32 - 1))
    @settings(max_examples=-(-batches // len(variants)), deadline=None, database=None)
    def batch(spec, n, seed):
        rng = random.Random(seed)
        codec = parse(spec)
        decoder, valid, target = by_id(codec.id, codec.level), frame(codec, n, seed), Room(n)
        assert attempt(decoder, valid, target)
        for i in range(BATCH):
            # Now and then bytes that never were a frame.
            payload = rng.randbytes(rng.randrange(100)) if i % 20 == 0 else spoil(rng, valid)
            seen["accepted"] += attempt(decoder, payload, target)
            seen["inputs"] += 1

    for spec in variants:
        batch(spec)
    assert seen["inputs"] >= batches * BATCH * 96 // 100
    assert 0 < seen["accepted"] < seen["inputs"]
