"""Nodes that were lost come back into running jobs, and every guarantee holds: G1 to G8 are checked at every effect.

What may live here: what came of worlds in which a known node goes and comes back (`known.py`). What may not: worlds
drawn from seeds (`test_seeds.py`), one control machine by itself (`tests/unit/core/test_admission.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation import known
from tests.simulation.workers import Worker
from tests.simulation.world import Node, World


def returned(w: World) -> Worker:
    (worker,) = [x for x in w.workers if x.returned]
    return worker


def others_finished(w: World, node: int) -> bool:
    """Whether all got to the end that were never away."""
    stayed = [x for x in w.workers if x.node is not w.nodes[node]]
    return all(x.fault is None and t.step == t.spec.steps for x in stayed for t in x.threads.values())


@pytest.mark.parametrize("goes", known.LOSSES)
@pytest.mark.parametrize(("on_loss", "codec"), [("shrink", "feedback"), ("skip", "feedback"), ("shrink", "none")])
def test_a_lost_node_comes_back_and_finishes(goes: Callable[[World, Node], None], on_loss: str, codec: str) -> None:
    w = known.comes_back(goes, on_loss, codec)
    back = returned(w)
    assert back.fault is None and all(t.step == t.spec.steps for t in back.threads.values())
    ((_, epochs),) = w.checks.epochs.items()
    assert [len(epochs[e].members) for e in sorted(epochs)][:3] == [3, 2, 3] and epochs[max(epochs)].admissions == 3
    last = w.checks.domains[next(iter(w.checks.domains))].oracle.committed[40]
    assert last[0] >= 3, "the last step has all three nodes in it"


def test_the_node_of_rank_0_comes_back() -> None:
    back = [x for x in known.rank_0_comes_back().workers if x.returned]
    assert len(back) == 2 and all(x.fault is None for x in back)


def test_a_node_comes_back_and_is_lost_again() -> None:
    twice = [x for x in known.comes_back_twice().workers if x.returned]
    assert len(twice) == 2 and twice[1].fault is None and not twice[1].killed


def test_a_group_that_not_all_are_in_is_taken_up_from_who_is() -> None:
    back = returned(known.comes_into_a_group())
    assert back.fault is None and [t.step for t in back.threads.values()] == [40, 40]


def test_who_comes_too_late_is_told_so() -> None:
    fault = returned(known.comes_too_late()).fault
    assert fault is not None and (fault.kind, fault.phase) == ("StepTimeout", "join")


def test_who_cannot_run_the_plan_of_now_is_told_so_and_the_others_go_on() -> None:
    w = known.comes_back_as_another_release()
    fault = returned(w).fault
    assert fault is not None and fault.kind == "JoinRefused"
    assert "cannot run this job any more: rule '*': unknown codec 'coarse'" in fault.message
    assert others_finished(w, 1)


def test_who_is_told_too_little_of_the_job_is_gone_on_without_and_comes_in_later() -> None:
    w = known.nobody_tells_what_the_job_is_like()
    ((_, epochs),) = w.checks.epochs.items()
    members = [{m.node for m in epochs[e].members} for e in sorted(epochs)]
    let_in, all_four = {"node0", "node2", "node3"}, {"node0", "node1", "node2", "node3"}
    assert members[:4] == [all_four, let_in, all_four, let_in]
    assert others_finished(w, 1)
