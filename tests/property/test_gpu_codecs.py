"""GPU codecs over generated inputs: the daemon's bytes, and the daemon's verdict on hostile payloads."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gcclient.gpu_codecs import GpuCodecError
from gcserver.codecs import CodecError
from tests.fuzz.mutate import spoil
from tests.unit.client.gpu_cases import EXACT, Sides

LAYOUTS = [
    "fp16",
    "bf16",
    "topk(ratio=0.1)",
    "topk(ratio=0.1,packed=1)",
    "topk(ratio=0.1,packed=1,values=8)",
    "topk(ratio=0.1,values=16)",
    "randomk(ratio=0.1)",
    "randomk(ratio=0.1,values=8)",
    "onebit",
    "efsignsgd",
    "qsgd(bits=3,bucket=64)",
    "qsgd(bits=4,kind=max)",
    "terngrad",
    "sidco-e(ratio=0.1)",
]


@pytest.mark.parametrize("spec", EXACT)
@given(st.integers(0, 3000), st.integers(0, 2**32 - 1), st.lists(st.floats(0, 1), max_size=4), st.booleans())
@settings(max_examples=12, deadline=None)
def test_payloads_are_the_daemons(spec, n, seed, cuts, rounded):
    rng = np.random.default_rng(seed)
    sides = Sides(spec, [0, *sorted(int(c * n) for c in cuts), n])
    for step in range(2):
        x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-6, 3, n)).astype(np.float32)
        if rounded:
            x = np.round(x)  # many ties, many zeros
        (ours, payload, state), (theirs, payload_gpu, state_gpu) = sides.encode(x, 1 / 3, seed=seed + step)
        assert (ours.nonfinite, ours.saturated) == (theirs.nonfinite, theirs.saturated)
        assert payload.tobytes() == payload_gpu.tobytes()
        assert state is None or np.array_equal(state, state_gpu)
        sides.settle()


def attempt(sides, data, n):
    """Whether the GPU codec accepts a payload; one it refuses changes nothing, others decode as the daemon's."""
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    out, acc = torch.full((n,), 7.0), torch.full((n,), 7.0)
    for act in (
        lambda: sides.gpu.check(payload, n),
        lambda: sides.gpu.decode(payload, out),
        lambda: sides.gpu.decode_add(payload, acc),
    ):
        try:
            act()
        except GpuCodecError:
            assert (out == 7.0).all() and (acc == 7.0).all()
            accepted = False
        else:
            accepted = True
    if accepted:
        ours, added = np.full(n, 7.0, np.float32), np.full(n, 7.0, np.float32)
        sides.cpu.decode(np.frombuffer(data, np.uint8), ours)
        sides.cpu.decode_add(np.frombuffer(data, np.uint8), added)
        assert np.array_equal(ours, out.numpy(), equal_nan=True)
        assert np.array_equal(added, acc.numpy(), equal_nan=True)
    return accepted


@pytest.mark.parametrize("spec", LAYOUTS)
@given(st.integers(0, 2**32 - 1), st.integers(0, 300))
@settings(max_examples=6, deadline=None)
def test_hostile_payloads_get_the_daemons_verdict(spec, seed, n):
    rng = random.Random(seed)
    cuts = sorted(rng.randrange(n + 1) for _ in range(rng.randrange(4)))
    sides = Sides(spec, [0, *cuts, n])
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    (_, payload, _), _ = sides.encode(x, seed=seed)
    frame = payload.tobytes()
    assert attempt(sides, frame, n)
    for _ in range(40):
        data = spoil(rng, frame)
        try:
            sides.cpu.check(np.frombuffer(data, np.uint8), n)
            expected = True
        except CodecError:
            expected = False
        with np.errstate(all="ignore"):
            assert attempt(sides, data, n) == expected
