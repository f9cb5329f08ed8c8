"""Some hundred seeded worlds hold every guarantee (continuous integration plays 2,000), and so do the seeds that once
did not.

What may live here: which seeds the test run plays. What may not: the worlds themselves.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gcproto.messages import Fault
from tests.simulation.faults import strike
from tests.simulation.program import DomainSpec, JobSpec
from tests.simulation.run import command, play, play_all
from tests.simulation.shape import KIB, LOSSY, Shape, draw, section
from tests.simulation.world import World

SEEDS = 150
LOSSES = 60
FOUND = sorted((Path(__file__).parent / "seeds").glob("*.json"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worlds_of_many_seeds() -> None:
    jobs = max(2, len(os.sched_getaffinity(0)))
    outcomes = [o for batch in play_all(0, SEEDS, jobs) for o in batch]
    bad = [f"{o.error}\n  replay: {command(o.seed)}" for o in outcomes if o.error]
    assert not bad, "\n".join(bad)
    assert len(outcomes) == SEEDS
    # The run means something only if faults struck and work was done.
    assert sum(o.faults for o in outcomes) > SEEDS
    assert sum(o.steps for o in outcomes) > 10 * SEEDS
    assert 0.1 * SEEDS < sum(bool(o.fatal) for o in outcomes) < 0.5 * SEEDS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_worlds_that_lose_nodes_and_go_on() -> None:
    jobs = max(2, len(os.sched_getaffinity(0)))
    outcomes = [o for batch in play_all(LOSSY, LOSSES, jobs) for o in batch]
    bad = [f"{o.error}\n  replay: {command(o.seed)}" for o in outcomes if o.error]
    assert not bad, "\n".join(bad)
    # Many of them did go on in a later epoch, and most were not excused as a whole.
    assert sum(o.epochs for o in outcomes) > LOSSES / 4
    assert sum(bool(o.fatal) for o in outcomes) < LOSSES / 2


@pytest.mark.parametrize("path", FOUND, ids=lambda p: p.stem)
def test_seeds_of_bugs_found(path: Path) -> None:
    found = json.loads(path.read_text())
    only = tuple(found["faults"])
    for seed in found["seeds"]:
        outcome = play(seed, only)
        assert not outcome.error, f"{found['bug']}\n{outcome.error}\n  replay: {command(seed, only)}"


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for _ in range(2):
        lines: list[str] = []
        world = World(draw(11), 11, lines.append)
        world.start()
        strike(world)
        world.run()
        runs.append(lines)
    assert runs[0] == runs[1]
    assert len(runs[0]) > 100


@pytest.mark.slow
def test_sixty_four_nodes() -> None:
    ranks = tuple(range(64))
    domain = DomainSpec(0, ranks, True, "feedback", (section(0, 0, [512 * KIB]),), (1,), 2, {}, frozenset(), 1, seed=3)
    job = JobSpec("wide", tuple((n, 1) for n in range(64)), (domain,))
    world = World(Shape(64, 1, (job,), partition_bytes=64 * KIB, tick=1.0), seed=5)
    world.start()
    world.run()
    assert world.steps_done == 128


def test_a_fault_that_is_fatal_is_told_to_every_worker() -> None:
    """G5, G6: a host that loses its memory ends the job on all nodes, with a fault that names it."""
    ranks = tuple(range(3))
    domain = DomainSpec(0, ranks, True, "none", (section(0, 0, [256 * KIB]),), (1,), 200, {}, frozenset(), 1, seed=3)
    job = JobSpec("j", ((0, 1), (1, 1), (2, 1)), (domain,))
    world = World(Shape(3, 1, (job,)), seed=2)
    world.start()
    while world.now < 0.5:
        world.step()
    world.lose_memory(world.nodes[1])
    world.run()
    told = {w.name: w.fault for w in world.workers if w.node is not world.nodes[1]}
    assert set(told) == {"j:0", "j:2"}
    for fault in told.values():
        assert isinstance(fault, Fault)
        assert fault.kind == "PeerLost" and fault.missing == ("node1",)
        assert "start the job again" in fault.advice
