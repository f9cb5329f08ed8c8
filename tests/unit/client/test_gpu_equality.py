"""GPU codecs against the daemon's: the same bytes where nothing is summed, else 1e-6 in scalars."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.unit.client.gpu_cases import EXACT, SUMMED, Sides, decoded
from tests.unit.codecs import vectors

SIZES = [0, 1, 7, 32, 33, 1024, 1025, 10_002]


def same_state(a, b):
    assert (a is None and b is None) or np.array_equal(a, b)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", EXACT)
def test_payloads_and_states_are_equal_to_the_bit(spec, n):
    for name, x, bounds in vectors.cases(n, seed=n):
        sides = Sides(spec, bounds)
        # A second step is another one where there is a state; without one its seed is all that is new.
        for step in range(1 if sides.old is None and name != "normal" else 2):
            (ours, payload, state), (theirs, payload_gpu, state_gpu) = sides.encode(x, 0.5, seed=77 + step)
            told, told_gpu = ((e.nbytes, e.nonfinite, e.saturated) for e in (ours, theirs))
            assert told == told_gpu, name
            assert payload.tobytes() == payload_gpu.tobytes(), (name, bounds)
            same_state(state, state_gpu)
            sides.settle()
        decoded(sides, payload)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("spec", SUMMED)
def test_scalars_agree_to_a_millionth(spec, n):
    for name, x, bounds in vectors.cases(n, seed=n):
        sides = Sides(spec, bounds)
        (ours, payload, state), (theirs, payload_gpu, state_gpu) = sides.encode(x, 0.5, seed=77)
        assert (ours.nbytes, ours.nonfinite, ours.saturated) == (theirs.nbytes, theirs.nonfinite, theirs.saturated)
        a, b = decoded(sides, payload), decoded(sides, payload_gpu)
        # Values are small multiples of the scalars: as far apart as those, but for elements on an edge.
        close = np.abs(a - b) <= 1e-6 * np.abs(a) + 1e-44
        assert (~close).sum() <= 1e-4 * n, name
        if state is not None and close.all():
            # A residual is a difference: it inherits the scalars' error.
            assert np.allclose(state, state_gpu, rtol=1e-5, atol=4e-6 * float(np.abs(x).max(initial=0)))


@pytest.mark.parametrize("spec", ["onebit", "efsignsgd"])
def test_signs_are_equal_to_the_bit(spec):
    x = vectors.normal(3001)
    sides = Sides(spec, [0, 1000, 3001])
    (_, payload, _), (_, payload_gpu, _) = sides.encode(x)
    numbers = {"onebit": 8, "efsignsgd": 4}[spec]
    for a, length in ((4, 1000), (4 + 4 + numbers + 125, 2001)):
        assert np.array_equal(payload[a : a + 4], payload_gpu[a : a + 4])
        ours, theirs = (p[a + 4 : a + 4 + numbers].view(np.float32) for p in (payload, payload_gpu))
        assert np.allclose(ours, theirs, rtol=1e-6, atol=0)
        start = a + 4 + numbers
        assert np.array_equal(
            payload[start : start + (length + 7) // 8], payload_gpu[start : start + (length + 7) // 8]
        )


@pytest.mark.parametrize("spec", EXACT + SUMMED + ["sidco-e(ratio=0.1)"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_are_counted_alike(spec, bad):
    x = vectors.normal(5000)
    x[[0, 17, 4999]] = bad
    sides = Sides(spec, [0, 1000, 5000])
    (ours, _, _), (theirs, _, _) = sides.encode(x)
    assert ours.nonfinite == theirs.nonfinite == 3


@pytest.mark.parametrize(("spec", "levels"), [
    ("topk(ratio=0.01)", [10_000, 1_000_000, 250_000]),
    ("topk(ratio=0.5,packed=1,values=8)", [1, 100_000, 20_000]),
    ("randomk(ratio=0.01)", [500_000, 1, 10_000]),
    ("qsgd(bits=4)", [2, 5, 8]),
    ("qsgd(bits=4,kind=max,bucket=128)", [7, 3, 2]),
    ("sidco-e(ratio=0.01)", [500_000, 100_000, 300_000]),
])  # fmt: skip
def test_levels_of_single_segments(spec, levels):
    sides = Sides(spec, [0, 500, 2501, 4000])
    (_, payload, state), (_, payload_gpu, state_gpu) = sides.encode(vectors.normal(4000), levels=levels)
    assert payload.tobytes() == payload_gpu.tobytes()
    same_state(state, state_gpu)


def heavy(n, seed):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * np.exp(1.5 * rng.standard_normal(n))).astype(np.float32)


def laplace(n, seed):
    return np.random.default_rng(seed).laplace(size=n).astype(np.float32)


DRAWS = {"normal": vectors.normal, "laplace": laplace, "heavy": heavy}


#: what is drawn decides with every ratio, and what options make of it with one of them
DECIDES = [(kind, ratio, "") for kind in DRAWS for ratio in (0.1, 0.01, 0.001)] + [
    (kind, 0.01, options) for kind in DRAWS for options in (",packed=1,values=16", "+momentum(m=0.9)", "+ef(decay=0)")
]


@pytest.mark.parametrize(("kind", "ratio", "options"), DECIDES)
def test_sidco_decides_as_the_daemon_does(kind, ratio, options):
    """Thresholds agree to 1e-6: payloads can differ only in elements as close as that to them."""
    spec = f"sidco-e(ratio={ratio}{options})" if options.startswith(",") else f"sidco-e(ratio={ratio}){options}"
    bounds = [0, 5_000, 72_000, 140_007]
    sides = Sides(spec, bounds)
    for step in range(12):
        (ours, payload, state), (theirs, payload_gpu, state_gpu) = sides.encode(DRAWS[kind](140_007, step), 0.5)
        assert ours.nonfinite == theirs.nonfinite == 0
        a, b = decoded(sides, payload, 1.0), decoded(sides, payload_gpu, 1.0)
        differ = (a != 0) != (b != 0)
        for start, stop in pairwise(bounds):
            sent = np.abs(a[start:stop][a[start:stop] != 0])
            here = differ[start:stop]
            near = np.abs(np.maximum(np.abs(a), np.abs(b))[start:stop][here] - sent.min()) <= 1e-5 * sent.min()
            assert here.sum() <= 3 and near.all(), (step, start)
        if state is not None:
            behind = state.size - 8 * 3
            assert np.allclose(state[behind:], state_gpu[behind:], rtol=1e-4, atol=1e-5), step
            # From here on together, so that one element's difference does not add up.
            sides.new_gpu.copy_(torch.from_numpy(state))
        sides.settle()


@pytest.mark.parametrize("kind", ["zeros", "all equal", "sparse", "denormal", "huge", "few values", "hot start"])
def test_sidco_of_what_fits_no_distribution(kind):
    x = dict(vectors.shapes(100_000, seed=5))[kind]
    sides = Sides("sidco-e(ratio=0.01)", [0, 100_000])
    for _ in range(3):
        (_, payload, state), (_, payload_gpu, state_gpu) = sides.encode(x)
        assert payload.tobytes() == payload_gpu.tobytes()
        same_state(state[:-8], state_gpu[:-8])
        assert np.allclose(state[-8:], state_gpu[-8:], rtol=1e-6)
        sides.settle()


def test_a_large_partition_agrees():
    """More elements than a block, a bucket or 2**16, with the residual of several steps."""
    for spec in ("topk(ratio=0.001)", "qsgd(bits=4)+ef", "randomk(ratio=0.001)", "terngrad(clip=0)"):
        sides = Sides(spec, [0, 70_001, 300_000])
        for step in range(3):
            (_, payload, state), (_, payload_gpu, state_gpu) = sides.encode(heavy(300_000, step), 1 / 3, seed=step)
            assert payload.tobytes() == payload_gpu.tobytes(), spec
            same_state(state, state_gpu)
            sides.settle()
