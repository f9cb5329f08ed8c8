"""What no plan can beat: below the best of all plans, and where that is easy to see, the best itself."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import traces
from gcserver.planner.costs import clusters, codec_costs
from gcserver.planner.espresso import prepare, select
from gcserver.planner.espresso_exhaustive import exhaustive
from gcserver.planner.espresso_least import least_seconds
from gcserver.planner.options import Constraints, Device, options
from gcserver.planner.options_cost import compile_table
from gcserver.planner.options_schemes import INTER_ALLGATHER, scheme
from gcserver.planner.timeline import Training
from gcserver.planner.trace import Trace, TracedTensor

ALLOWED = Constraints(cpu=False, max_compressions=1)


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_shorter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cluster = clusters(int(rng.choice([2, 8, 64])))[seed % 2]
    codec = codec_costs(("dgc", "efsignsgd", "randomk")[seed % 3], cluster)
    sizes = (2 ** rng.uniform(14, 25, 3)).astype(int).tolist()
    ready = np.cumsum(10 ** rng.uniform(-5, -2, 3)).tolist()
    trace = Trace(
        "random", tuple(TracedTensor(str(i), n, t) for i, (n, t) in enumerate(zip(sizes, ready, strict=True)))
    )
    table = compile_table(cluster, codec, options(ALLOWED))
    best, _, _ = exhaustive(trace, table, select(trace, prepare(cluster, codec, ALLOWED)).seconds)
    least = least_seconds(Training(trace, table))
    assert 0.3 * best < least <= best * (1 + 1e-9)


def test_work_that_cannot_be_hidden() -> None:
    """One option alone: a link that is busy from the first gradient to the end, and nothing after it, is the bound."""
    cluster = clusters(8)[3]
    codec = codec_costs("dgc", cluster)
    dense = [o for o in options(Constraints(gpu=False, cpu=False, flat=False)) if not o.compressions][:1]
    table = compile_table(cluster, codec, dense)
    trace = Trace("even", tuple(TracedTensor(str(i), 10**6, 1e-4 * (i + 1)) for i in range(5)))
    training = Training(trace, table)
    exact = training.time(np.zeros(5, np.int64))
    assert least_seconds(training) == pytest.approx(exact, rel=0.02)
    assert least_seconds(Training(Trace("none", ()), table)) == 0.0


def test_every_plan_that_the_search_finds_is_above_it() -> None:
    trace = traces.read(["LSTM"])[0]
    for cluster in clusters(8):
        space = prepare(cluster, codec_costs("efsignsgd", cluster))
        found = select(trace, space).seconds
        assert trace.backward < least_seconds(Training(trace, space.everything)) <= found


def test_what_the_gpu_compresses_before_delays_what_comes_after() -> None:
    """One option, compressed on the GPU at once: three gradients, each an encoding later, and the last one's chain."""
    cluster = clusters(8)[0]
    codec = codec_costs("dgc", cluster)
    table = compile_table(cluster, codec, [scheme(INTER_ALLGATHER, Device.GPU)])
    trace = Trace("even", tuple(TracedTensor(str(i), 10**6, 1e-5 * (i + 1)) for i in range(3)))
    training = Training(trace, table)
    count, resource, seconds = training.chains(np.zeros(3, np.int64))
    lead = seconds[0, 0] if resource[0, 0] == 0 else 0.0
    by_hand = 3e-5 + 2 * lead + seconds[0, : count[0]].sum()
    assert by_hand * (1 - 1e-3) <= least_seconds(training) <= training.time(np.zeros(3, np.int64)) * (1 + 1e-9)
