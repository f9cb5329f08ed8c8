"""The timeline by hand: what queues behind what, bubbles, and the jobs one by one."""

from __future__ import annotations

import numpy as np
import pytest

from gcserver.planner import timeline_kernels as kernels
from gcserver.planner.costs import Cluster, CodecCosts, DeviceCosts, Link, line
from gcserver.planner.options import Constraints, Device, options
from gcserver.planner.options_cost import compile_table
from gcserver.planner.options_schemes import INTER_ALLGATHER, scheme
from gcserver.planner.timeline import Training
from gcserver.planner.trace import Trace, TracedTensor

# Two nodes of one rank: all-reduce of n elements takes 4n, encoding 2 (GPU) or 5 (CPU), the payload 1, decoding 0.5.
CLUSTER = Cluster("pair", 2, 1, Link(0.0, 1.0), Link(0.0, 1.0))
CODEC = CodecCosts(
    "unit",
    0.0,
    1.0,
    0.0,
    DeviceCosts(line(2.0, 0.0), line(0.5, 0.0), line(0.0, 0.0)),
    DeviceCosts(line(5.0, 0.0), line(0.5, 0.0), line(0.0, 0.0)),
)
DENSE = next(o for o in options(Constraints(gpu=False, cpu=False)) if str(o) == "flat-allreduce")
TABLE = compile_table(CLUSTER, CODEC, [DENSE, *(scheme(INTER_ALLGATHER, d) for d in Device)])


def training(*tensors: tuple[int, float], forward: float = 0.0) -> Training:
    """(elements, ready) of each tensor."""
    named = tuple(TracedTensor(f"t{i}", n, ready) for i, (n, ready) in enumerate(tensors))
    return Training(Trace("hand", named, forward), TABLE)


def plan(*columns: int) -> np.ndarray:
    return np.array(columns, np.int64)


def test_transfers_queue_on_their_link() -> None:
    job = training((2, 1.0), (1, 2.0))
    assert job.time(plan(0, 0)) == 1 + 8 + 4
    assert training((2, 1.0), (1, 2.0), forward=3.0).time(plan(0, 0)) == 3 + 13


def test_gpu_compression_delays_later_gradients_and_cpu_compression_does_not() -> None:
    job = training((2, 1.0), (2, 2.0))
    # GPU: encode 1..3, gradient 3..4, its transfer 4..12 behind the payload's 3..4, decoding meanwhile
    assert job.time(plan(1, 0)) == 12
    # CPU: encode 1..6, the other transfer 2..10, payload 10..11, decoding till 11.5
    assert job.time(plan(2, 0)) == 11.5


def test_decompression_waits_for_the_gradient_that_is_being_computed() -> None:
    job = training((2, 1.0), (1, 10.0))
    # encode 1..3, gradient 3..12, payload 3..4, decode 12..12.5, then the last transfer ends at 16
    jobs = {(j.tensor, j.what, j.start): j.end for j in job.jobs(plan(1, 0))}
    assert jobs == {
        (0, "compute", 0.0): 1.0,
        (0, "gpu", 1.0): 3.0,
        (1, "compute", 3.0): 12.0,
        (0, "inter", 3.0): 4.0,
        (0, "gpu", 12.0): 12.5,
        (1, "inter", 12.0): 16.0,
    }


def test_bubbles() -> None:
    """A gradient that finds everything before it complete; compressing what came before cannot help."""
    job = training((1, 1.0), (1, 2.0), (1, 9.25), (1, 9.5))
    assert job.bubbles(plan(0, 0, 0, 0)) == [2]
    assert training((1, 1.0), (1, 5.0)).bubbles(plan(0, 0)) == []  # complete just then: no gap
    assert job.time(plan(0, 0, 0, 0)) == 17.25 == job.time(plan(2, 0, 0, 0))


def test_what_was_over_before_a_changed_tensor_is_not_looked_at_again() -> None:
    """From the state at its gradient on a timeline continues; of what came before nothing is needed, known by then."""
    job = training((1, 1.0), (1, 2.0), (1, 9.25), (1, 9.5))
    before, after = plan(0, 0, 0, 0), plan(0, 0, 2, 0)
    kept, room = (kernels.make_space(4, keep, False) for keep in (True, False))
    chains = kernels.make_chains(before, job.arrays, job.priced)
    kernels.begin(job.arrays, chains, kept)
    kernels.simulate(np.int64(kernels.RECORD), kernels.INF, job.arrays, chains, kept)
    gaps, size_of = job.arrays
    gaps, added, now = gaps.copy(), np.zeros(4), before.copy()
    kernels.put(2, 2, now, job.arrays, job.priced, chains, added)
    gaps[:3], chains[2][:2], kept[3][:2], kept[4][:2] = np.nan, np.nan, -(1 << 40), np.nan
    end = kernels.resume(2, added, kernels.INF, (gaps, size_of), chains, kept, room)
    assert end == job.time(after) != job.time(before)


def test_an_empty_trace_takes_its_forward_pass() -> None:
    assert training(forward=2.0).time(plan()) == 2.0 and training().jobs(plan()) == []


def test_tensors_of_a_size_share_their_prices() -> None:
    job = training((7, 1.0), (3, 2.0), (7, 3.0))
    assert job.size_of.tolist() == [1, 0, 1] and job.prices.sizes.tolist() == [3, 7]
    assert job.gaps.tolist() == pytest.approx([1, 1, 1])
