"""Which faults strike a seeded world, and when.

What may live here: drawing faults from the seed and doing them to the world. What may not: how a process dies or
a frame is lost (`world.py`, `network.py`), whether the outcome is right (`checks.py`).

Most faults are *survivable*: whatever their mix, every job must end well, with the outputs of the undisturbed
run. A *fatal* one (`World.fatal` says which) may end a job, but only by a fault that names itself, never by a
hang or a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import msgspec

from gcproto.messages import Rule
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.core import control_events as ce
from gcserver.core import events as ev
from gcserver.core.control import wish_number
from tests.simulation import modes, strains, strangers
from tests.simulation.memory import CODECS, LEVELS
from tests.simulation.processes import CONTROL, ControlProcess, Process
from tests.simulation.shape import LOSSY, sometimes_twice

if TYPE_CHECKING:
    from tests.simulation.world import Node, World

#: of every plan whose rules have levels
NOTCHES = 3
#: faults strike between the first pushes and about the end of an undisturbed run, seconds
FIRST, LAST = 0.07, 0.4


def node(w: World, r: Random) -> Node:
    return r.choice(w.nodes)


def pair(w: World, r: Random) -> tuple[str, str]:
    a, b = r.sample(w.nodes, 2)
    return a.name, b.name


def lane(w: World, r: Random) -> int:
    """A lane, or sometimes the supervisors' link."""
    return CONTROL if r.random() < 0.25 else r.randrange(w.shape.lanes)


def arm(p: Process | None, r: Random) -> None:
    """Kill a process between two of its next effects, perhaps in the middle of one that writes."""
    if p is not None and p.fuse < 0:
        p.fuse = r.randint(0, 25)
        p.tear = r.random() < 0.5


# ------------------------------------------------------------------------------------------ survivable
def crash_lane(w: World, r: Random) -> None:
    arm(w.process(node(w, r).name, r.randrange(w.shape.lanes)), r)


def crash_supervisor(w: World, r: Random) -> None:
    n = node(w, r)
    forming(w, n)
    arm(n.supervisor, r)


def crash_node(w: World, r: Random) -> None:
    """kill -9 of all processes of a daemon at one instant."""
    n = node(w, r)
    forming(w, n)
    if n.supervisor is not None:
        w.kill(n.supervisor)


def forming(w: World, n: Node) -> None:
    """A job that is only being formed need not survive the loss of a supervisor."""
    for spec in w.shape.jobs:
        if any(not x.job for x in w.workers if x.spec is spec):
            w.fatal = w.fatal or f"{n.name}'s supervisor dies while {spec.label} is being formed"


def reset(w: World, r: Random) -> None:
    if len(w.nodes) > 1:
        w.network.reset(*pair(w, r), lane(w, r), (r.random() < 0.7, r.random() < 0.7))


def lose(w: World, r: Random) -> None:
    """Frames of one direction vanish; nobody is told."""
    if len(w.nodes) > 1:
        a, b = pair(w, r)
        w.network.drop_queue(a, b, lane(w, r))


def stall(w: World, r: Random) -> None:
    """A byte changes in the length of a message: nothing of one direction arrives any more, and nobody is told."""
    if len(w.nodes) > 1:
        w.network.stall(*pair(w, r), lane(w, r))


def replay(w: World, r: Random) -> None:
    if len(w.nodes) > 1:
        for _ in range(r.randint(1, 5)):
            a, b = pair(w, r)
            w.network.replay(a, b, lane(w, r))


def corrupt(w: World, r: Random) -> None:
    if len(w.nodes) > 1:
        a, b = pair(w, r)
        w.network.spoil(a, b, r.randrange(w.shape.lanes), r.choice(["payload", "payload", "header"]), r.randint(1, 2))


def partition(w: World, r: Random) -> None:
    if len(w.nodes) > 1:
        w.network.partition(*pair(w, r), w.now + r.choice([0.1, 1.0, 8.0]), r.random() < 0.5)


def pause(w: World, r: Random) -> None:
    p = r.choice(list(node(w, r).processes()) or [None])
    if p is not None and not p.paused:
        p.paused = True
        w.at(w.now + r.choice([0.05, 0.5, 6.0]), p.resume)


def pause_supervisor(w: World, r: Random) -> None:
    """A supervisor hangs for a moment while its lanes go on."""
    p = node(w, r).supervisor
    if p is not None and p.alive and not p.paused:
        p.paused = True
        w.at(w.now + r.choice([0.02, 0.1, 0.5]), p.resume)


def set_codec(w: World, r: Random) -> None:
    """An operator changes codecs, schemes or the whole plan: everywhere at the same step, no step lost."""
    spec = r.choice(w.shape.jobs)
    codecs = ["feedback", "none", "coarse"] + (["all-feedback", "all-none"] if w.shape.everyone else [])
    pattern = r.choice(["*", "d0.*", "*t0", "d*.s1.*"])
    p = w.nodes[r.choice(spec.layout)[0]].supervisor
    if p is not None:
        request = w.next_handle()
        ask(w, p, request, spec.label, Rule(pattern, sometimes_twice(r.choice(codecs), request)))


def ask(w: World, p: ControlProcess, request: int, label: str, rule: Rule) -> None:
    """The rest of a wish, from a generator of its own: the other draws stay what they were before this one came."""
    r = Random(request * 16 + 11)
    rules, replaces = (rule,), False
    # In a fifth of all worlds operators name codecs alone: seeds of bugs found before schemes came are among those.
    if Random(w.seed * 16 + 1).random() > 0.2:
        rules = (msgspec.structs.replace(rule, scheme=r.choice(["", "owner", "all", "all"])),)
        if r.random() < 0.3:
            rules = (Rule("*", r.choice(["none", "coarse"]), r.choice(["", "all"])), Rule("d*.t0", rule.spec))
        rules = with_levels(rules, Random(request * 16 + 13))
        replaces = r.random() < 0.4
    w.everyone |= any(x.scheme == "all" for x in rules)
    w.checks.wishes[wish_number(p.incarnation, request)] = rules, replaces
    p.deliver(ce.SetPlan(request, label, rules, replaces))


def with_levels(rules: tuple[Rule, ...], r: Random) -> tuple[Rule, ...]:
    """In half of all wishes some rules with levels, at as many notches as all other plans have them."""
    if r.random() < 0.5:
        return rules
    low, high = LEVELS
    return tuple(
        msgspec.structs.replace(rule, levels=tuple(r.randint(low, high) for _ in range(NOTCHES)))
        if CODECS[rule.spec].levels[1] and r.random() < 0.8
        else rule
        for rule in rules
    )


def tune(w: World, r: Random) -> None:
    """A controller has some lanes encode at another notch or level from their next decision on."""
    r = Random(hash((w.seed, w.now)))
    for p in node(w, r).lanes.values():
        for domain in list(p.machine.domains) if p.alive and r.random() < 0.9 else ():
            level = r.choice([0, 0, r.randint(*LEVELS)])
            p.from_control(ev.Tuned(domain, r.choice([-1, 0, 1, NOTCHES - 1, NOTCHES]), level))


def old_epoch(w: World, r: Random) -> None:
    """A member that is still in another epoch sends, with a proper link sequence."""
    for p, domain, peers, part in strangers.blocks(w, r):
        peer = r.choice(peers)
        owner = domain.config.members[part.block.owner].node == p.node.id
        header = Header(
            FrameType.DATA, Phase.AGGREGATE if owner else Phase.CONTRIBUTION, dtype=int(part.block.dtype),
            flags=int(Flag.AVERAGE) if r.random() < 0.5 else 0, codec=CODECS["none"].id, job=domain.config.job,
            domain=domain.config.domain, epoch=domain.config.epoch - 1, step=part.out_step + 1, key=part.block.key,
            sender=p.node.id, incarnation=p.incarnation, elements=part.block.elements, payload_bytes=0,
        )  # fmt: skip
        strangers.send_torn(p, peer, header)
        return


SURVIVABLE: dict[Callable[[World, Random], None], int] = {
    crash_lane: 6,
    crash_supervisor: 3,
    crash_node: 2,
    reset: 4,
    lose: 4,
    replay: 4,
    corrupt: 3,
    partition: 2,
    pause: 2,
    pause_supervisor: 2,
    set_codec: 4,
    old_epoch: 1,
}


# ----------------------------------------------------------------------------------------------- fatal
def lose_memory(w: World, r: Random) -> None:
    n = node(w, r)
    w.lose_memory(n)
    returns(w, n, r)


def long_partition(w: World, r: Random) -> None:
    if len(w.nodes) > 1:
        a, b = pair(w, r)
        w.strike(f"{a} and {b} are apart for longer than a lease", split=True)
        w.network.partition(a, b, w.now + 45.0, True)


def dead_node(w: World, r: Random) -> None:
    """A machine that does not come back."""
    n = node(w, r)
    w.die(n)
    returns(w, n, r)


def corrupt_twice(w: World, r: Random) -> None:
    if len(w.nodes) > 1:
        a, b = pair(w, r)
        w.fatal = w.fatal or f"frames from {a} to {b} stay damaged"
        w.network.spoil(a, b, r.randrange(w.shape.lanes), "payload!", 4)


def crash_worker(w: World, r: Random) -> None:
    alive = [x for x in w.workers if not x.over]
    if alive:
        worker = r.choice(alive)
        w.strike(f"{worker.name} dies", worker.node.name)
        worker.kill()
        returns(w, worker.node, r)


FATAL: tuple[Callable[[World, Random], None], ...] = (
    lose_memory,
    long_partition,
    dead_node,
    corrupt_twice,
    crash_worker,
)


# ---------------------------------------------------------------- in worlds whose jobs go on without lost nodes
def returns(w: World, n: Node, r: Random) -> None:
    """A machine that was lost comes back after a while, where its jobs have admission points."""
    own = Random(hash((w.seed, w.now, n.index)))
    if any(job.points for job in w.shape.jobs) and own.random() < 0.8:
        for delay in own.sample([0.01, 0.1, 1.0, 5.0, 32.0, 50.0], 2):
            w.at(w.now + delay, w.bring_back, n)


def slow_register(w: World, r: Random) -> None:
    """For a node the arbiter is away for a while, a shorter one than the deadline."""
    w.strike("the arbiter is away")
    w.register.leave([node(w, r).name], w.now + r.choice([0.5, 5.0, 40.0]))


def outage(w: World, r: Random) -> None:
    """The arbiter is away for everyone, about when a lost node is found lost; not for as long as the deadline is by a
    clock that goes too fast, nor twice within it."""
    until = w.now + r.choice([35.0, 45.0, 50.0])
    if any(before > w.now - 60.0 for before in w.register.away.values()):
        return
    w.strike("the arbiter is away")
    w.register.leave([n.name for n in w.nodes], until)


def lost_register(w: World, r: Random) -> None:
    """For a node the arbiter is away for good: it may have to halt."""
    n = node(w, r)
    w.strike(f"the arbiter is lost for {n.name}", n.name)
    w.register.leave([n.name], w.now + 1000.0)


def cut_off(w: World, r: Random) -> None:
    """All links of a node break for longer than a lease; it lives on, and perhaps reaches the arbiter."""
    n = node(w, r)
    w.strike(f"{n.name} is cut off", split=True)
    until = w.now + r.choice([33.0, 45.0])
    for other in w.nodes:
        if other is not n:
            w.network.partition(n.name, other.name, until, r.random() < 0.5)
    if r.random() < 0.5:
        w.register.leave([n.name], until)


LOSSES: dict[Callable[[World, Random], None], int] = {
    dead_node: 6,
    lose_memory: 3,
    crash_worker: 3,
    long_partition: 1,
    cut_off: 3,
    slow_register: 3,
    outage: 2,
    lost_register: 1,
}
#: what strikes again about when a lost node is found lost
LATE = (crash_lane, crash_supervisor, crash_node, reset, lose, pause_supervisor)


#: ``tune`` is no fault, and drawn apart; so are ``stall``, ``expel`` and what is said of modes, which came later
KINDS = {
    k.__name__: k
    for kinds in (
        SURVIVABLE, LOSSES, [tune, stall, strains.expel, *modes.HARMLESS],
        strains.HARMLESS, strains.RARE, strains.DEADLY, strains.RARE_DEADLY,
    )
    for k in kinds
}  # fmt: skip


def strike(w: World, only: tuple[str, ...] = ()) -> None:
    """Put a seed's faults into the world's queue; ``only``: of these kinds, and many."""
    r = Random(w.seed * 2 + 999)
    tuned = Random(w.seed * 16 + 7)
    for when, strain, its in strains.draw(w) if not only else ():
        w.at(when, act, w, strain, its)
    if not only and tuned.random() < 0.5:
        for _ in range(tuned.choice([1, 3, 8])):
            w.at(tuned.uniform(FIRST, LAST), act, w, tune, tuned)
    stalls = Random(w.seed * 64 + 29)
    if not only and stalls.random() < 0.08:
        for _ in range(stalls.choice([1, 1, 2])):
            w.at(stalls.uniform(FIRST, LAST), act, w, stall, stalls)
    if only:
        kinds = [KINDS[k] for k in only]
        faults = r.choices(kinds, k=r.choice([4, 8, 12]))
    elif r.random() < 0.1:
        return
    else:
        kinds = r.sample(list(SURVIVABLE), r.randint(1, 5))
        faults = r.choices(kinds, [SURVIVABLE[k] for k in kinds], k=r.choice([1, 2, 4, 8, 12]))
    for fault in faults:
        early = r.random() < 0.05
        when = r.uniform(0.0, FIRST) if early else r.uniform(FIRST, LAST)
        w.at(0.0 if fault in strains.AT_START else when, act, w, fault, r)
    if w.seed >= LOSSY:
        _lose_nodes(w, Random(w.seed * 16 + 5))
    elif not only and r.random() < 0.15:
        w.at(r.uniform(FIRST, LAST), act, w, r.choice(FATAL), r)


def _lose_nodes(w: World, r: Random) -> None:
    """Some nodes in most worlds, at once or one after the other."""
    if r.random() < 0.9:
        for loss in r.choices(list(LOSSES), list(LOSSES.values()), k=r.choice([1, 1, 2, 3])):
            w.at(r.uniform(2 * FIRST, LAST) + r.choice([0.0, 0.0, 30.0]), act, w, loss, r)
    if r.random() < 0.6:
        for fault in r.choices(LATE, k=r.randint(1, 5)):
            w.at(r.uniform(30.0, 31.5) if r.random() < 0.7 else r.uniform(30.0, 36.0), act, w, fault, r)


def act(w: World, fault: Callable[[World, Random], None], r: Random) -> None:
    if w.open_workers:
        w.say("fault", fault.__name__)
        w.fault_names.add(fault.__name__)
        w.counts[fault.__name__] = w.counts.get(fault.__name__, 0) + 1
        fault(w, r)
