"""The decision tree: the paper's counts, its valid connections, its pairs, and what constraints leave."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from gcserver.planner.options import FIRST_C, SECOND, Action, Constraints, Device, Level, Routine, _Tree, options

BOTH, GPU, CPU = Constraints(), Constraints(cpu=False), Constraints(gpu=False)


@pytest.mark.parametrize(
    ("constraints", "total", "flat", "by_compressions"),
    [
        (BOTH, 4341, 63, [9, 236, 1152, 1920, 1024]),
        (GPU, 174, 12, [9, 59, 72, 30, 4]),
        (CPU, 174, 12, [9, 59, 72, 30, 4]),
        (Constraints(gpu=False, cpu=False), 9, 3, [9]),
    ],
)
def test_the_tree_has_the_papers_options(
    constraints: Constraints, total: int, flat: int, by_compressions: list[int]
) -> None:
    tree = options(constraints)
    assert len(tree) == len(set(tree)) == total
    assert sum(o.flat for o in tree) == flat
    assert Counter(o.compressions for o in tree) == Counter(dict(enumerate(by_compressions)))
    assert all(o.compressions == 0 for o in tree[:9]) and all(o.compressions for o in tree[9:])


@pytest.mark.parametrize(("devices", "counts"), [((0, 1), [5, 12, 29, 63, 152]), ((0,), [2, 3, 5, 12, 19])])
def test_sub_trees(devices: tuple[int, ...], counts: list[int]) -> None:
    tree = _Tree([Device(d) for d in devices])
    gather = Routine.ALLGATHER
    parts = [tree.t1(Level.INTRA, gather), tree.t2(Level.INTRA, gather), tree.t5(gather, gather)]
    assert [len(set(p)) for p in (*parts, tree.t3(gather), tree.t4(gather))] == counts


def test_options_that_mix_devices() -> None:
    assert sum(len(o.devices) == 2 for o in options()) == 4002
    assert {o.on(Device.CPU) for o in options(GPU)} == set(options(CPU))


def test_the_23_valid_connections() -> None:
    """What may follow what; the paper leaves its table out."""
    found: dict[Action, set[Action]] = {}
    for option in options():
        for one, other in pairwise(option.tasks):
            found.setdefault(one.action, set()).add(other.action)
    a = Action
    assert found == {
        a.COMM: {a.COMM2, a.COMP},
        a.COMM1: {a.COMM, a.COMM1, a.COMM2, a.COMP},
        a.COMM2: {a.COMM2, a.COMP},
        a.COMP: {a.COMM_C, a.COMM1_C, a.COMM2_C},
        a.COMM_C: {a.COMM2_C, a.DECOMP},
        a.COMM1_C: {a.COMM_C, a.COMM1_C, a.COMM2_C, a.DECOMP},
        a.COMM2_C: {a.COMM2_C, a.DECOMP},
        a.DECOMP: {a.COMM, a.COMM1, a.COMM2, a.COMP},
    }
    assert sum(map(len, found.values())) == 23


def test_second_steps_pair_with_first_ones_and_nothing_stays_compressed() -> None:
    for option in options():
        firsts = {t.level: t.routine for t in option.tasks if t.action in (Action.COMM1, Action.COMM1_C)}
        compressed = False
        for task in option.tasks:
            if task.action in (Action.COMM2, Action.COMM2_C):
                assert task.level is not None
                first = firsts[task.level]
                assert first is not None and task.routine is SECOND[first]
            if task.action in (Action.COMP, Action.DECOMP):
                assert compressed is (task.action is Action.DECOMP)
                compressed = not compressed
            else:
                assert task.compressed is compressed and (compressed or task.routine not in FIRST_C)
        assert not compressed


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_cap_on_compressions(limit: int) -> None:
    kept = options(Constraints(max_compressions=limit))
    assert set(kept) == {o for o in options() if o.compressions <= limit}


def test_no_flat_collectives() -> None:
    assert len(options(Constraints(flat=False))) == 4278


def test_an_option_says_what_it_does() -> None:
    text = "intra-reduce-scatter > comp[GPU] > inter-allgather* > decomp[CPU] > intra-allgather"
    assert text in {str(o) for o in options()}
