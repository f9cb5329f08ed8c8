"""Nodes that were lost come back into running jobs, and every guarantee holds: G1 to G8 are checked at every effect.

What may live here: worlds in which a known node goes and comes back. What may not: worlds drawn from seeds
(`test_seeds.py`), one control machine by itself (`tests/unit/core/test_admission.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.program import DomainSpec, JobSpec
from tests.simulation.shape import KIB, Shape, section
from tests.simulation.world import Node, World


def worker_dies(w: World, node: Node) -> None:
    w.strike("a worker dies", node.name)
    next(x for x in w.workers if x.node is node).kill()


def machine_dies(w: World, node: Node) -> None:
    """It comes back with what it had in memory."""
    w.strike("a machine dies", node.name)
    for worker in w.workers:
        if worker.node is node:
            worker.kill()
    w.remove(node)


def host_restarts(w: World, node: Node) -> None:
    w.lose_memory(node)


def lossy_world(on_loss: str, codec: str, nodes: int = 3, ranks: int = 1) -> World:
    """Nodes with a domain of 40 steps, with admission points after 10, 20 and 30 of them, and a smaller one."""
    everyone = tuple(range(nodes * ranks))
    cuts = section(0, 0, [256 * KIB, 8 * KIB])
    first = DomainSpec(0, everyone, True, codec, (cuts,), (1,), 40, {7: 1, 33: 1}, frozenset({5}), 1, seed=3)
    calls = tuple(section(i, 1, [4 * KIB]) for i in range(2))
    second = DomainSpec(1, everyone, False, "", calls, (1, 6), 12, {}, frozenset(), 2, seed=4)
    layout = tuple((n, ranks) for n in range(nodes))
    job = JobSpec("j", layout, (first, second), on_loss, 3)
    world = World(Shape(nodes, 2, (job,), codec, partition_bytes=64 * KIB, arbiter_delay=0.01), seed=2)
    world.start()
    return world


def play_until(w: World, step: int) -> None:
    """Until the first worker has begun this step of the first domain."""
    while w.now < 200 and (not w.workers[0].threads or w.workers[0].threads[0].step < step):
        w.step()


@pytest.mark.parametrize("goes", [worker_dies, machine_dies, host_restarts])
@pytest.mark.parametrize(("on_loss", "codec"), [("shrink", "feedback"), ("skip", "feedback"), ("shrink", "none")])
def test_a_lost_node_comes_back_and_finishes(goes: Callable[[World, Node], None], on_loss: str, codec: str) -> None:
    w = lossy_world(on_loss, codec)
    play_until(w, 4)
    goes(w, w.nodes[1])
    w.at(w.now + 0.05, w.bring_back, w.nodes[1])
    w.run()
    (returned,) = [x for x in w.workers if x.returned]
    assert returned.fault is None and all(t.step == t.spec.steps for t in returned.threads.values())
    ((_, epochs),) = w.checks.epochs.items()
    assert [len(epochs[e].members) for e in sorted(epochs)][:3] == [3, 2, 3] and epochs[max(epochs)].admissions == 3
    last = w.checks.domains[next(iter(w.checks.domains))].oracle.committed[40]
    assert last[0] >= 3, "the last step has all three nodes in it"


def test_the_node_of_rank_0_comes_back() -> None:
    w = lossy_world("shrink", "feedback", ranks=2)
    play_until(w, 4)
    machine_dies(w, w.nodes[0])
    w.at(w.now + 0.05, w.bring_back, w.nodes[0])
    w.run()
    back = [x for x in w.workers if x.returned]
    assert len(back) == 2 and all(x.fault is None for x in back)


def test_a_node_comes_back_and_is_lost_again() -> None:
    w = lossy_world("shrink", "feedback")
    play_until(w, 4)
    worker_dies(w, w.nodes[1])
    w.at(w.now + 0.05, w.bring_back, w.nodes[1])
    while w.now < 200 and not any(x.returned and x.threads and x.threads[0].step > 12 for x in w.workers):
        w.step()
    next(x for x in w.workers if x.returned).kill()
    w.at(w.now + 0.05, w.bring_back, w.nodes[1])
    w.run()
    twice = [x for x in w.workers if x.returned]
    assert len(twice) == 2 and twice[1].fault is None and not twice[1].killed


def test_a_group_that_not_all_are_in_is_taken_up_from_who_is() -> None:
    cuts = (section(0, 0, [256 * KIB]),)
    first = DomainSpec(0, (0, 1, 2), True, "feedback", cuts, (1,), 40, {}, frozenset(), 1, seed=3)
    group = DomainSpec(1, (1, 2), True, "feedback", (section(0, 1, [64 * KIB]),), (1,), 40, {}, frozenset(), 1, seed=4)
    w = World(Shape(3, 1, (JobSpec("j", ((0, 1), (1, 1), (2, 1)), (first, group), "shrink", 3),)), seed=2)
    w.start()
    play_until(w, 4)
    worker_dies(w, w.nodes[2])
    w.at(w.now + 0.05, w.bring_back, w.nodes[2])
    w.run()
    (returned,) = [x for x in w.workers if x.returned]
    assert returned.fault is None and [t.step for t in returned.threads.values()] == [40, 40]


def test_who_comes_too_late_is_told_so() -> None:
    w = lossy_world("shrink", "feedback")
    play_until(w, 32)
    worker_dies(w, w.nodes[1])
    w.at(w.now + 0.05, w.bring_back, w.nodes[1])
    w.run()
    (returned,) = [x for x in w.workers if x.returned]
    assert returned.fault is not None and (returned.fault.kind, returned.fault.phase) == ("StepTimeout", "join")
