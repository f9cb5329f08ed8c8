"""Plans over the loss and the return of nodes, and peers that say too much, in worlds with every guarantee checked.

What may live here: what came of the worlds of `known.py`. What may not: nodes that come back (`test_rejoin.py`),
worlds drawn from seeds (`test_seeds.py`), plans by themselves (`tests/unit/core/test_plans_over_epochs.py`).
"""

from __future__ import annotations

from gcserver.core.early_messages import MAX_EARLY
from gcserver.core.entering import MAX_STATES
from tests.simulation import known
from tests.simulation.world import World


def finished(w: World) -> list[str]:
    """Nodes of workers that got to the end."""
    return [x.node.name for x in w.workers if x.fault is None and not x.killed and x.over]


def last_plan(w: World) -> int:
    """The plan that the last step of the first domain ran under."""
    plans = next(iter(w.checks.domains.values())).plans
    return plans[max(plans)][0]


def test_a_plan_that_is_made_while_a_node_comes_in_waits_for_it_and_holds() -> None:
    w = known.a_plan_is_made_while_a_node_comes_in()
    (answer,) = w.checks.answers.values()
    assert not answer.error and 10 < answer.step < 40 and last_plan(w) == answer.plan
    assert sorted(finished(w)) == ["node0", "node1", "node2"]


def test_a_plan_of_a_lost_first_member_comes_into_force_where_one_hears_of_it_before_it_hears_of_the_loss() -> None:
    w = known.the_first_is_lost_while_its_plan_is_made()
    assert sorted(finished(w)) == ["node1", "node2", "node3"]
    # Who asked was told that this is not sure.
    (answer,) = w.checks.answers.values()
    assert "was lost before plan 1 was in force" in answer.error
    assert last_plan(w) == 1


def test_what_an_operator_said_of_the_mode_outlives_the_node_that_was_told() -> None:
    w = known.the_mode_outlives_who_plans()
    assert sorted(finished(w)) == ["node0", "node1", "node2"]
    kept = {node: [(said.mode, said.quality) for said in of] for (_, node), of in w.modes.kept.items()}
    # The first member kept it before it was lost, and again when it had come back.
    assert kept == {"node0": [("auto", "safe")] * 2, "node1": [("auto", "safe")], "node2": [("auto", "safe")]}


def test_what_a_peer_says_of_jobs_that_are_not_there_costs_nobody_anything() -> None:
    w = known.is_told_too_much()
    machine = known.supervisor(w, 0).machine
    assert len(machine.entrance.states) <= MAX_STATES and len(machine.early) <= MAX_EARLY
    assert sorted(finished(w)) == ["node0", "node1", "node2"]
