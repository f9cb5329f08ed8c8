"""Worlds that no seed brings about, or too seldom: what happens in them is scripted, and every guarantee is checked.

What may live here: worlds that play themselves to their end. What may not: what must have come of them
(`test_known.py`, `test_rejoin.py`), worlds drawn from seeds (`shape.py`), scripts with logs (`story.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gcproto.epoch_messages import JobState
from gcproto.messages import Control, PlanReady, Rule, SectionOffer
from gcserver.core.early_messages import MAX_EARLY
from gcserver.core.entering import MAX_STATES
from gcserver.core.events import CodecChoice
from tests.simulation.memory import resolve
from tests.simulation.modes import says_mode
from tests.simulation.operators import ask
from tests.simulation.processes import ControlProcess
from tests.simulation.program import DomainSpec, JobSpec
from tests.simulation.shape import KIB, Shape, section
from tests.simulation.strangers import say
from tests.simulation.world import Node, World

#: of a world's own time, seconds: what was to happen by then and has not never will
LIMIT = 200.0


# ----------------------------------------------------------------------------------------- how a node is lost
def worker_dies(w: World, node: Node) -> None:
    w.strike("a worker dies", node.name)
    next(x for x in w.workers if x.node is node).kill()


#: of a worker alone, of a machine that comes back with what it had in memory, or without it
LOSSES: tuple[Callable[[World, Node], None], ...] = (worker_dies, World.die, World.lose_memory)


# ------------------------------------------------------------------------------------------------- the worlds
def lossy_world(on_loss: str, codec: str, nodes: int = 3, ranks: int = 1, delay: float = 0.01) -> World:
    """Nodes with a domain of 40 steps, with admission points after 10, 20 and 30 of them, and a smaller one; ``delay``:
    how long the arbiter takes at most, seconds."""
    everyone = tuple(range(nodes * ranks))
    cuts = section(0, 0, [256 * KIB, 8 * KIB])
    first = DomainSpec(0, everyone, True, codec, (cuts,), (1,), 40, {7: 1, 33: 1}, frozenset({5}), 1, seed=3)
    calls = tuple(section(i, 1, [4 * KIB]) for i in range(2))
    second = DomainSpec(1, everyone, False, "", calls, (1, 6), 12, {}, frozenset(), 2, seed=4)
    layout = tuple((n, ranks) for n in range(nodes))
    job = JobSpec("j", layout, (first, second), on_loss, 3)
    return _started(Shape(nodes, 2, (job,), codec, partition_bytes=64 * KIB, arbiter_delay=delay))


def grouped_world(nodes: int = 3) -> World:
    """Nodes with a domain of 40 steps, with admission points after 10, 20 and 30 of them; the second and the third node
    have another one, in which the others have no part."""
    cuts = (section(0, 0, [256 * KIB]),)
    everyone = tuple(range(nodes))
    first = DomainSpec(0, everyone, True, "feedback", cuts, (1,), 40, {}, frozenset(), 1, seed=3)
    cuts = (section(0, 1, [64 * KIB]),)
    group = DomainSpec(1, (1, 2), True, "feedback", cuts, (1,), 40, {}, frozenset(), 1, seed=4)
    layout = tuple((n, 1) for n in range(nodes))
    return _started(Shape(nodes, 1, (JobSpec("j", layout, (first, group), "shrink", 3),)))


def _started(shape: Shape) -> World:
    world = World(shape, seed=2)
    world.start()
    return world


def play_until(w: World, so: Callable[[], bool]) -> None:
    while w.now < LIMIT and not so():
        w.step()


def play_to(w: World, step: int) -> None:
    """Until the first worker has begun this step of the first domain."""
    play_until(w, lambda: bool(w.workers[0].threads) and w.workers[0].threads[0].step >= step)


def supervisor(w: World, number: int) -> ControlProcess:
    p = w.nodes[number].supervisor
    assert p is not None and p.alive
    return p


def _stand(w: World, epoch: int, frozen: bool, *numbers: int) -> bool:
    """Whether these nodes are in this epoch, and frozen or not."""
    jobs = [job for number in numbers for job in supervisor(w, number).machine.jobs.values()]
    return {(job.record.epoch, job.change.frozen) for job in jobs} == {(epoch, frozen)}


def _plans(w: World, number: int) -> set[int]:
    """Those that a node knows of."""
    return {version for job in supervisor(w, number).machine.jobs.values() for version in job.plans}


def _lose_and_bring_back(w: World, number: int, goes: Callable[[World, Node], None] = worker_dies) -> None:
    play_to(w, 4)
    goes(w, w.nodes[number])
    w.at(w.now + 0.05, w.bring_back, w.nodes[number])


# ------------------------------------------------------------------------------------------- who comes back
def comes_back(goes: Callable[[World, Node], None], on_loss: str = "shrink", codec: str = "feedback") -> World:
    w = lossy_world(on_loss, codec)
    _lose_and_bring_back(w, 1, goes)
    w.run()
    return w


def rank_0_comes_back() -> World:
    """Its node makes the job's plans, and has two ranks."""
    w = lossy_world("shrink", "feedback", ranks=2)
    _lose_and_bring_back(w, 0, World.die)
    w.run()
    return w


def comes_back_twice() -> World:
    w = lossy_world("shrink", "feedback")
    _lose_and_bring_back(w, 1)
    play_until(w, lambda: any(x.returned and x.threads and x.threads[0].step > 12 for x in w.workers))
    next(x for x in w.workers if x.returned).kill()
    w.at(w.now + 0.05, w.bring_back, w.nodes[1])
    w.run()
    return w


def comes_into_a_group() -> World:
    """Of one of its domains not every member knows."""
    w = grouped_world()
    _lose_and_bring_back(w, 2)
    w.run()
    return w


def comes_too_late() -> World:
    """After the last admission point."""
    w = lossy_world("shrink", "feedback")
    play_to(w, 32)
    worker_dies(w, w.nodes[1])
    w.at(w.now + 0.05, w.bring_back, w.nodes[1])
    w.run()
    return w


def comes_back_as_another_release() -> World:
    """It does not know a codec that the job's plan has by now."""

    def old(spec: str) -> CodecChoice:
        if spec == "coarse":
            raise ValueError("unknown codec 'coarse'")
        return resolve(spec)

    w = lossy_world("shrink", "feedback")
    play_to(w, 4)
    w.die(w.nodes[1])
    w.nodes[1].resolve = old
    play_until(w, lambda: _stand(w, 2, False, 0, 2))
    ask(w, supervisor(w, 2), "j", (Rule("*", "coarse"),))
    w.at(w.now + 0.05, w.bring_back, w.nodes[1])
    w.run()
    return w


def nobody_tells_what_the_job_is_like() -> World:
    """Who comes in hears of the epoch from members that do not know all of the job's groups, and from no other: it
    waits for a lease, which ends first by its own clock, and has the others go on without it."""
    w = grouped_world(4)
    _lose_and_bring_back(w, 1)
    play_until(w, lambda: _stand(w, 2, True, 0, 2, 3))
    w.strike("a node is cut off", split=True)
    w.nodes[1].pace = 1.25
    w.network.partition("node1", "node2", w.now + 40.0, False)
    w.run()
    return w


# ------------------------------------------------------------------------------------------ plans meanwhile
def a_plan_is_made_while_a_node_comes_in() -> World:
    """A member answers late: the plan waits for who comes in too."""
    w = lossy_world("shrink", "feedback", delay=0.0)
    _lose_and_bring_back(w, 1)
    play_until(w, lambda: _stand(w, 2, True, 0, 2))
    slow = supervisor(w, 2)
    slow.paused = True
    w.at(w.now + 0.1, slow.resume)
    ask(w, supervisor(w, 0), "j", (Rule("*", "coarse"),))
    w.run()
    return w


def the_first_is_lost_while_its_plan_is_made() -> World:
    """The next first member asks the others again, and one of them hears that before it hears of the epoch."""
    w = lossy_world("shrink", "feedback", nodes=4)
    play_to(w, 4)
    slow = supervisor(w, 3)
    slow.paused = True
    w.at(w.now + 1.0, slow.resume)
    ask(w, supervisor(w, 1), "j", (Rule("*", "coarse"),))
    play_until(w, lambda: _plans(w, 2) == {1})
    w.die(w.nodes[0])
    # The epoch is decided by node2 alone, and node3 hears nothing of it for a while.
    w.strike("the arbiter is away")
    w.register.leave(["node1", "node3"], w.now + 35.0)
    play_until(w, lambda: any(job.change.asked for job in supervisor(w, 2).machine.jobs.values()))
    w.network.partition("node2", "node3", w.now + 3.0, False)
    w.run()
    return w


def the_mode_outlives_who_plans() -> World:
    """An operator says it at the first member, which is lost before all have heard of it, and comes back."""
    w = lossy_world("shrink", "feedback")
    play_to(w, 4)
    w.network.partition("node0", "node2", w.now + 3.0, False)
    first = supervisor(w, 0)
    says_mode(w, first, next(iter(first.machine.jobs.values())), "auto", "safe")
    play_until(w, lambda: any(node == "node1" for _, node in w.modes.kept))
    w.die(w.nodes[0])
    play_until(w, lambda: _stand(w, 2, False, 1, 2))
    w.bring_back(w.nodes[0])
    w.run()
    return w


# ------------------------------------------------------------------------------------------------ too much
def is_told_too_much() -> World:
    """A peer speaks of jobs that there are not, to a node that waits for its own, and more than anybody keeps."""
    w = lossy_world("shrink", "feedback")
    play_until(w, lambda: bool(w.nodes[0].supervisor and w.nodes[0].supervisor.machine.formation.gatherings))
    odd: list[Control] = [JobState(bytes([n]) * 16, 2, (), (), (), 0, 0) for n in range(MAX_STATES + 2)]
    odd += [SectionOffer(b"n" * 16, 0, 0, n) for n in range(MAX_EARLY + 10)]
    odd.append(PlanReady(b"n" * 16, 1))
    teller = supervisor(w, 1)
    for message in odd:
        say(teller, "node0", message)
    w.run()
    return w


#: what `reach.py` counts beside seeds and scripts
WORLDS: tuple[Callable[[], World], ...] = (
    *(partial(comes_back, goes) for goes in LOSSES),
    rank_0_comes_back,
    comes_back_twice,
    comes_into_a_group,
    comes_too_late,
    comes_back_as_another_release,
    nobody_tells_what_the_job_is_like,
    a_plan_is_made_while_a_node_comes_in,
    the_first_is_lost_while_its_plan_is_made,
    the_mode_outlives_who_plans,
    is_told_too_much,
)
