"""A plan of mixed options keeps every resource busy, and is a start that the others do not replace."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import traces
from gcserver.planner import espresso
from gcserver.planner.costs import clusters, codec_costs
from gcserver.planner.espresso import Space, candidates, prepare, quickest, select
from gcserver.planner.espresso_mix import mixed
from gcserver.planner.options_cost import Floats, Ints
from gcserver.planner.timeline import Training

BERT = traces.read(["bert"])[0]
PCIE = clusters(8)[1]


@pytest.fixture(scope="module")
def space() -> Space:
    """Not at import: it takes a second, and many more where its kernels were never compiled."""
    return prepare(PCIE, codec_costs("randomk", PCIE))


def ends(training: Training, plan: Ints) -> Floats:
    """Seconds of work of the GPU, with all computation, the CPU and both links."""
    load: Floats = training.prices.work[training.size_of, plan, :4].sum(axis=0)
    load[0] += training.gaps.sum()
    return load


def test_every_resource_is_busy(space: Space) -> None:
    training = Training(BERT, space.table)
    everything = np.ones(len(space.compresses), np.bool_)
    length, columns = candidates(training, everything)
    plan = mixed(training, length, columns)
    assert all(plan[i] in columns[s, : length[s]] for i, s in enumerate(training.size_of.tolist()))
    busy, alone = ends(training, plan), ends(training, quickest(training, everything))
    assert busy.min() > 0.5 * busy.max() and alone.min() < 0.1 * alone.max()
    large = int(training.size_of[training.elements == 2359296][0])
    assert len(set(plan[training.size_of == large].tolist())) > 1, "no single option balances them"
    assert np.array_equal(plan, mixed(training, length, columns))


def test_it_leads_where_no_other_start_does(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    found = select(BERT, space).seconds
    monkeypatch.setattr(espresso, "MANY", 10**6)
    assert found < 0.95 * select(BERT, space).seconds
