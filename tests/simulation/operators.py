"""What operators ask of a simulated cluster that `faults.set_codec` does not: what cannot be done, and rules by name.

What may live here: requests and what must be answered. What may not: faults of machines (`faults.py`).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from gcproto.manifest import MAX_NAME
from gcproto.messages import Rule
from gcserver.core import control_events as ce
from gcserver.core.control import wish_number
from gcserver.core.plan import MAX_SPEC
from tests.simulation.memory import ROOMY

if TYPE_CHECKING:
    from tests.simulation.processes import ControlProcess
    from tests.simulation.world import World

#: rules that no plan can hold, each with a word of the answer
WRONG: tuple[tuple[tuple[Rule, ...], str], ...] = (
    ((Rule("", "none"),), "pattern"),
    ((Rule("x" * (MAX_NAME + 1), "none"),), "pattern"),
    ((Rule("*", "y" * (MAX_SPEC + 1)),), "codec"),
    ((Rule("*", "nosuch"),), "nosuch"),
    ((Rule("*", "none", "ring"),), "scheme"),
    ((Rule("*", "none", "", (3,)),), "levels"),
    ((Rule("*", "feedback", "", (3, 4, 1000)),), "levels"),
    ((Rule("*", "feedback", "", (3, 4, 5)), Rule("d*", "feedback", "", (3,))), "levels"),
)


def _supervisor(w: World, r: Random) -> tuple[ControlProcess, str] | None:
    """One that answers now, of a node in a job that is formed; and the job's label."""
    running = {x.spec.label for x in w.workers if x.job and not x.over}
    ready = [
        (p, spec.label)
        for spec in w.shape.jobs
        for index, _ in spec.layout
        if spec.label in running and (p := w.nodes[index].supervisor) is not None and p.alive and not p.paused
        if any(j.record.label == spec.label and j.ended is None for j in p.machine.jobs.values())
    ]
    return r.choice(ready) if ready else None


def ask(w: World, p: ControlProcess, job: str, rules: tuple[Rule, ...], replace: bool = False, more: str = "") -> int:
    request = w.next_handle()
    w.everyone |= any(x.scheme == "all" for x in rules)
    w.checks.wishes[wish_number(p.incarnation, request)] = rules, replace
    p.deliver(ce.SetPlan(request, job, rules, replace, more))
    return request


def _refused(w: World, p: ControlProcess, request: int, word: str) -> None:
    answer = w.checks.answers.get(request)
    if p.alive and (answer is None or word not in answer.error):
        w.checks.fail("G6", f"request {request} cannot be done ({word}) and is answered by {answer}")


def wrong_rules(w: World, r: Random) -> None:
    """Rules that no plan can hold are refused at once, with the value that is wrong."""
    if (found := _supervisor(w, r)) is not None:
        for rules, word in r.sample(WRONG, 4):
            _refused(w, found[0], ask(w, *found, rules), word)


def wrong_job(w: World, r: Random) -> None:
    """A request for a job that is not here, or for a controller that no node has."""
    if (found := _supervisor(w, r)) is not None:
        p, label = found
        _refused(w, p, ask(w, p, "nosuch", (Rule("*", "none"),)), "no such job")
        _refused(w, p, ask(w, p, label, (), False, "wobble"), "wobble")


def by_name(w: World, r: Random) -> None:
    """Rules with plain names among others, as planners make them, some of them older than a glob that matches too."""
    if (found := _supervisor(w, r)) is not None:
        codecs = ["none", "coarse", "feedback", "votes", "twice"]
        names = [t.name for spec in w.shape.jobs for d in spec.domains for s in d.sections for t in s.tensors]
        patterns = [*r.sample(names, min(2, len(names))), "d*.s0.*", r.choice(names), "[*]none"]
        rules = tuple(
            Rule(pattern, codec := r.choice(codecs), r.choice(["", "owner", "all"]), _levels(codec, r))
            for pattern in dict.fromkeys(patterns)
        )
        ask(w, *found, rules, r.random() < 0.7)


def _levels(codec: str, r: Random) -> tuple[int, ...]:
    return tuple(r.randint(1, 64) for _ in range(3)) if codec not in ("none", "votes") and r.random() < 0.5 else ()


def whole_matrices(w: World, r: Random) -> None:
    """A codec that takes whole matrices: where domains may cut them no member can run the plan."""
    if (found := _supervisor(w, r)) is not None:
        ask(w, *found, (Rule(r.choice(["*", "d0.*", "d1.*"]), "matrix"),))


def no_memory(w: World, r: Random) -> None:
    """A plan for which members have no memory."""
    if (found := _supervisor(w, r)) is not None:
        ask(w, *found, (Rule(ROOMY, "none"),))


def ask_and_crash(w: World, r: Random) -> None:
    """The first member dies while it prepares a plan that somebody asked for."""
    if (found := _supervisor(w, r)) is not None:
        p, label = found
        job = next(j for j in p.machine.jobs.values() if j.record.label == label)
        first = w.by_name[job.first].supervisor
        if first is not None and all(x.job for x in w.workers):
            for _ in range(r.randint(1, 3)):
                ask(w, p, label, (Rule(r.choice(["*", "d0.*"]), r.choice(["coarse", "none"])),))
            w.at(w.now + r.choice([0.0001, 0.002, 0.01]), w.kill, first)


HARMLESS = (wrong_rules, wrong_job, by_name, whole_matrices, no_memory, ask_and_crash)
