"""Espresso on the live timeline: what it leaves dense, what it compresses, over which scheme, and Remove."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from gcserver.planner import auto_options
from gcserver.planner.auto_options import DENSE_COLUMNS, SLACK, Selected, select, units
from gcserver.planner.errors import I64
from gcserver.planner.live import ALL, OWNER, BlockOption, Live
from gcserver.planner.profile import CodecCost, Curve, Profile
from tests.unit.planner.live_profiles import GBIT1, MBIT100, gpt, plain

MILLION = 1_000_000
SPEC = "topk(ratio=0.0125)"
FREE = {SPEC: CodecCost(Curve(((0, 0.0),)), Curve(((0, 0.0),)), Curve(((0, 0.0),)), 0.025)}


def decide(profile: Profile, spec: str = SPEC) -> tuple[Live, Selected]:
    live = Live(profile, tuple((i,) for i in range(len(profile.tensors))))
    columns = [
        [BlockOption(s, scheme)] * len(live.blocks)
        for s, scheme in (("none", OWNER), ("none", ALL), (spec, OWNER), (spec, ALL))
    ]
    return live, select(live, live.table(columns), units(live))


def test_what_hides_behind_computing_stays_dense() -> None:
    """The first block travels while the rest is computed; only the last one is waited for."""
    _, found = decide(plain([MILLION, MILLION], [0.0, 10.0], codecs=FREE))
    assert found.columns[0] < DENSE_COLUMNS
    assert found.columns[1] >= DENSE_COLUMNS


def test_everything_stays_dense_where_a_link_costs_nothing() -> None:
    _, found = decide(plain([MILLION] * 3, [0.0, 1.0, 2.0], bandwidth=1e15, codecs=FREE))
    assert found.columns.tolist() == [0, 0, 0]


def test_everything_is_compressed_where_the_link_is_the_bottleneck() -> None:
    _, found = decide(plain([MILLION] * 4, [0.0, 0.1, 0.2, 0.3], bandwidth=1e5, codecs=FREE))
    assert all(found.columns >= DENSE_COLUMNS)


def test_latency_asks_for_everyone_and_many_nodes_for_the_owner() -> None:
    fast = plain([MILLION] * 2, [0.0, 0.0], latency=1.0, bandwidth=1e7, codecs=FREE)
    _, found = decide(fast)
    assert found.columns.tolist() == [3, 3]
    slow = plain([MILLION] * 8, [0.0] * 8, nodes=8, bandwidth=1e4, codecs=FREE)
    _, found = decide(slow)
    assert found.columns.tolist() == [2] * 8


def test_units_before_a_bubble_that_a_decision_makes_leave_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest, decided first, makes room before the last; the first, still dense, is not tried any more."""
    left: list[list[int]] = []
    removed = auto_options._Search._removed

    def seen(search: auto_options._Search, plan: I64, units: Sequence[int]) -> list[int]:
        left.append(removed(search, plan, units))
        return left[-1]

    monkeypatch.setattr(auto_options._Search, "_removed", seen)
    _, found = decide(plain([MILLION, 8 * MILLION, MILLION], [0.0, 0.01, 0.3], bandwidth=1e8, codecs=FREE))
    assert left[:2] == [[1, 2, 0], [2]]
    assert [c >= DENSE_COLUMNS for c in found.columns] == [False, True, True]


@pytest.mark.parametrize("seed", range(6))
def test_against_every_plan_of_small_cases(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(20_000, 2_000_000, 4)]
    ready = np.cumsum(rng.uniform(0, 0.5, 4)).tolist()
    encode = Curve(((0, 1e-3), (1 << 20, 0.05)))
    cost = {SPEC: CodecCost(encode, Curve(((0, 1e-3),)), Curve(((0, 1e-3),)), 0.025)}
    live, found = decide(plain(sizes, ready, bandwidth=8e6, latency=1e-3, codecs=cost))
    columns = [[BlockOption(s, c)] * 4 for s, c in (("none", OWNER), ("none", ALL), (SPEC, OWNER), (SPEC, ALL))]
    table = live.table(columns)
    best = min(live.run(table, np.array(plan, np.int64))[0] for plan in product(range(4), repeat=4))
    assert found.seconds == live.run(table, found.columns)[0]
    # a greedy search, and one option for all may stay within half a per cent of the best
    assert best <= found.seconds <= best * 1.02


def test_never_worse_than_one_option_for_all_and_the_same_every_time() -> None:
    for bandwidth in (MBIT100, GBIT1, 1e9):
        live = Live(gpt(4, bandwidth))
        columns = [
            [BlockOption(s, c)] * len(live.blocks)
            for s, c in (("none", OWNER), ("none", ALL), ("qsgd(bits=8)", OWNER), ("qsgd(bits=8)", ALL))
        ]
        table = live.table(columns)
        found = select(live, table, units(live))
        uniform = [live.run(table, np.full(len(live.blocks), k, np.int64))[0] for k in range(4)]
        assert found.seconds <= min(uniform) * (1 + SLACK)
        again = select(live, table, units(live))
        assert again.columns.tolist() == found.columns.tolist()
        assert again.timelines == found.timelines


def test_units_are_what_one_rule_can_tell_apart() -> None:
    live = Live(gpt(2))
    found = units(live)
    assert sorted(b for unit in found for b in unit) == list(range(len(live.blocks)))
    for unit in found:
        assert len({live.blocks[b].lead for b in unit}) == 1
    few = units(live, 3)
    assert len(few) == 3
    assert sorted(b for unit in few for b in unit) == list(range(len(live.blocks)))


def test_nothing_to_decide() -> None:
    live = Live(gpt(2))
    table = live.table([[BlockOption("none", scheme)] * len(live.blocks) for scheme in (OWNER, ALL)])
    assert select(live, table, ()).columns.tolist() == [0] * len(live.blocks)
