"""Bytes of segments beside what the codecs write."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gcserver import codecs
from gcserver.planner.families import parse
from gcserver.planner.payload import segment_bytes
from gcserver.planner.profile import CodecCost, Curve


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16", "topk(ratio=0.01)", "qsgd(bits=4)"])
@pytest.mark.parametrize("n", [1, 1000, 70_001])
def test_as_the_codecs_write_them(spec: str, n: int) -> None:
    codec = codecs.parse(spec)
    x = np.random.default_rng(3).standard_normal(n).astype(np.float32)
    out = np.empty(codec.max_bytes(n), np.uint8)
    state = np.zeros(codec.state_floats(n), np.float32) if codec.state_floats(n) else None
    after = None if state is None else np.empty_like(state)
    written = codec.encode(x, state, after, out, np.array([0, n], np.int64), 1.0, 1).nbytes
    head = 0 if spec in ("none", "fp16", "bf16") else 4
    assert segment_bytes(parse(spec), None, (n,), n, 0) + head == pytest.approx(written, abs=1)


def test_levels_and_shapes_and_dtypes() -> None:
    topk, rank = parse("topk(ratio=0.01)"), parse("powersgd(rank=4)")
    assert segment_bytes(topk, None, (1000,), 1000, 100_000) == 4 + 800
    assert segment_bytes(topk, None, (1000,), 1000, 1_000_000) == 4 + 8000
    assert segment_bytes(rank, None, (100, 50), 5000, 2) == 4 * 2 * 150
    assert segment_bytes(rank, None, (100,), 100, 0) == 400
    assert segment_bytes(parse("none"), None, (10,), 10, 0, 2) == 20


def test_what_has_no_closed_form_goes_by_its_measured_ratio() -> None:
    free = Curve(((0, 0.0),))
    packed = parse("topk(ratio=0.01,packed=1)")
    assert segment_bytes(packed, CodecCost(free, free, free, 0.0125), (1000,), 1000, 0) == pytest.approx(50)
    assert segment_bytes(packed, CodecCost(free, free, free, 0.0125), (1000,), 1000, 20_000) == pytest.approx(100)
    assert segment_bytes(parse("onebit"), None, (8,), 8, 0) == 4 * math.prod((8,))
