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


@pytest.mark.parametrize("form", ["packed=0,values=16", "values=8", "packed=1", "packed=1,values=16"])
@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_packing_makes_sparse_payloads_as_short_as_the_codecs_do(form: str, ratio: float) -> None:
    """And as long as docs/codecs.md says: the gaps of normal data are those of a random choice."""
    n, text = 1 << 20, f"topk(ratio={ratio},{form})"
    codec = codecs.parse(text)
    x = np.random.default_rng(5).standard_normal(n).astype(np.float32)
    out = np.empty(codec.max_bytes(n), np.uint8)
    state = np.zeros(codec.state_floats(n), np.float32)
    written = codec.encode(x, state, np.empty_like(state), out, np.array([0, n], np.int64), 1.0, 1).nbytes
    expected = segment_bytes(parse(text), None, (n,), n, 0)
    assert expected + 4 == pytest.approx(written, rel=0.01 if "packed=1" in form else 1e-6)


def test_what_is_sent_as_it_is_costs_hardly_any_index() -> None:
    assert segment_bytes(parse("topk(ratio=0.01,packed=1)"), None, (4096,), 4096, 1_000_000) == 4 + 4096 * 4.03125


def test_levels_and_shapes_and_dtypes() -> None:
    topk, rank = parse("topk(ratio=0.01)"), parse("powersgd(rank=4)")
    assert segment_bytes(topk, None, (1000,), 1000, 100_000) == 4 + 800
    assert segment_bytes(topk, None, (1000,), 1000, 1_000_000) == 4 + 8000
    assert segment_bytes(rank, None, (100, 50), 5000, 2) == 4 * 2 * 150
    assert segment_bytes(rank, None, (100,), 100, 0) == 400
    narrow = parse("powersgd(rank=4,values=16)")
    assert segment_bytes(narrow, None, (100, 50), 5000, 0) == 2 * 4 * 150
    assert segment_bytes(narrow, None, (100,), 100, 0) == segment_bytes(narrow, None, (100, 50), 5000, 1 << 20) / 50
    assert segment_bytes(parse("none"), None, (10,), 10, 0, 2) == 20


def test_what_has_no_closed_form_goes_by_its_measured_ratio() -> None:
    free = Curve(((0, 0.0),))
    buckets = parse("qsgd(bits=4,bucket=64)")
    assert segment_bytes(buckets, CodecCost(free, free, free, 0.15), (1000,), 1000, 0) == pytest.approx(600)
    assert segment_bytes(buckets, CodecCost(free, free, free, 0.15), (1000,), 1000, 8) == pytest.approx(1200)
    assert segment_bytes(parse("onebit"), None, (8,), 8, 0) == 4 * math.prod((8,))
