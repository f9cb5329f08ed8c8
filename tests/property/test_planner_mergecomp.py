"""Properties of MergeComp: exact against all cuts, Equation 7, bucket sizes as torch takes them, searches that end."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcserver.planner.fit import AffineCost, fit_affine
from gcserver.planner.mergecomp import MergeModel, best_by_count, merge, step_time, timeline
from gcserver.planner.mergecomp_groups import Grouping, ddp_bucket_caps
from gcserver.planner.mergecomp_search import MeasuredSearch
from tests.unit.planner import mergecomp_oracle

#: few values, so that sizes and gaps repeat and times tie
parts = st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(0, 8)
costs = st.builds(AffineCost, parts, parts)


@st.composite
def models(draw: st.DrawFn, longest: int = 7) -> MergeModel:
    n = draw(st.integers(1, longest))
    elements = draw(st.lists(st.sampled_from([1, 1, 2, 5]) | st.integers(1, 40), min_size=n, max_size=n))
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 1.0]) | st.floats(0, 50), min_size=n, max_size=n))
    return MergeModel(tuple(elements), tuple(np.cumsum(gaps).tolist()), draw(costs), draw(costs), draw(st.booleans()))


@st.composite
def groupings(draw: st.DrawFn, n: int) -> Grouping:
    return Grouping((*sorted(draw(st.sets(st.integers(1, n - 1), max_size=n - 1))), n) if n > 1 else (1,))


def every_grouping(n: int, groups: int) -> list[Grouping]:
    return [Grouping((*cuts, n)) for cuts in combinations(range(1, n), groups - 1)]


@settings(max_examples=150, deadline=None)
@given(model=models())
def test_no_cut_is_better_than_the_one_found(model: MergeModel) -> None:
    n = len(model.elements)
    found = best_by_count(model, n)
    assert [len(m.grouping) for m in found] == list(range(1, n + 1))
    for m in found:
        least = min(step_time(model, g) for g in every_grouping(n, len(m.grouping)))
        assert m.seconds == step_time(model, m.grouping) == pytest.approx(least, rel=1e-9, abs=1e-9)
    assert merge(model, n, 0.0).seconds <= found[0].seconds


@settings(max_examples=150, deadline=None)
@given(model=models(longest=30), most=st.integers(1, 9))
def test_kernels_cut_as_the_plain_recurrence_does(model: MergeModel, most: int) -> None:
    expected = [g.ends for g in mergecomp_oracle.best_groupings(model, most)]
    assert [m.grouping.ends for m in best_by_count(model, most)] == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data(), model=models(longest=12))
def test_equation_seven(data: st.DataObject, model: MergeModel) -> None:
    grouping = data.draw(groupings(len(model.elements)))
    times, sizes = timeline(model, grouping), grouping.sizes(model.elements)
    encoding = sum(model.encode(x) for x in sizes)
    exchanging = sum(model.exchange(x) for x in sizes)
    hidden = model.ready[-1] + encoding - times[-1].encoded  # q of the module's page: none on one device
    total = model.ready[-1] + encoding - hidden + exchanging - sum(t.overlap for t in times)
    assert step_time(model, grouping) == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert hidden >= -1e-9 and (model.own_cores or hidden == pytest.approx(0.0, abs=1e-9 * (1 + times[-1].encoded)))
    for t, x in zip(times, sizes, strict=True):
        assert 0.0 <= t.overlap <= model.exchange(x) + 1e-9


@settings(max_examples=60, deadline=None)
@given(data=st.data(), nbytes=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=12))
def test_bucket_sizes_survive_torchs_conversion(data: st.DataObject, nbytes: list[int]) -> None:
    grouping = data.draw(groupings(len(nbytes)))
    assert tuple(int(c * 1024 * 1024) for c in ddp_bucket_caps(grouping, nbytes)) == grouping.sizes(nbytes)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    most=st.integers(1, 5),
    budget=st.integers(1, 80),
    seed=st.integers(0, 1 << 16),
    levels=st.integers(1, 5),
)
def test_a_measured_search_ends_whatever_it_is_told(
    sizes: list[int], most: int, budget: int, seed: int, levels: int
) -> None:
    rng = np.random.default_rng(seed)
    search = MeasuredSearch(sizes, most=most, alpha=0.0, budget=budget)
    asked = set()
    while (grouping := search.next()) is not None:
        assert grouping not in asked and len(grouping) <= most and grouping.tensors == len(sizes)
        asked.add(grouping)
        search.tell(float(rng.integers(1, levels + 1)))
    assert len(asked) <= budget and search.best.seconds == min(search.told)


@settings(max_examples=80, deadline=None)
@given(
    base=st.floats(1e-6, 1e-2),
    slope=st.floats(1e-12, 1e-6),
    sizes=st.lists(st.integers(1, 1 << 28), min_size=2, max_size=20, unique=True),
)
def test_a_fit_of_exact_samples_predicts_them(base: float, slope: float, sizes: list[int]) -> None:
    seconds = [base + slope * x for x in sizes]
    cost = fit_affine(sizes, seconds).cost
    assert [cost(x) for x in sizes] == pytest.approx(seconds, rel=1e-6)
