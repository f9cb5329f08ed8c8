"""What workers and their programs do wrong in a simulated cluster: declarations, doorbells, ranks, endings.

What may live here: the mistakes, done to a world by what a worker would say or push. What may not: faults of machines
and networks (`faults.py`), what right programs are (`program.py`).

A deadly mistake ends its job on all nodes, by a fault that says what was wrong (G6), never by a wrong number or a hang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from random import Random
from typing import TYPE_CHECKING, Any

from gcproto import messages
from gcproto.manifest import Section, TensorSpec
from gcproto.wire import Flag
from gcserver.core import events as ev
from gcserver.core.control_domain import LOSSLESS
from gcserver.core.declarations import MAX_DOMAIN
from tests.simulation.memory import NodeMemory, resolve
from tests.simulation.program import DomainSpec
from tests.simulation.shape import section

if TYPE_CHECKING:
    from gcserver.core.events import CodecChoice
    from tests.simulation.workers import Worker
    from tests.simulation.world import World


def _at_work(w: World) -> list[Worker]:
    """Workers in a job with a connection to their daemon and domains to train."""
    return [x for x in w.workers if x.job and x.connection and not x.over and x.threads]


def _working(w: World, r: Random, what: str) -> Worker | None:
    """One of them; its job ends by what it is about to do."""
    alive = _at_work(w)
    if not alive:
        return None
    worker = r.choice(alive)
    w.fatal = w.fatal or f"{worker.name} {what}"
    return worker


# --------------------------------------------------------------------------------------- declarations
def odd_domain(w: World, r: Random) -> None:
    """A process group that cannot be."""
    if (worker := _working(w, r, "declares an impossible process group")) is not None:
        known = next(iter(worker.threads.values())).spec.message()
        everyone = tuple(range(worker.spec.world_size))
        odd = [
            messages.DeclareDomain("far", MAX_DOMAIN + 1, everyone),
            messages.DeclareDomain("others", 7, (*everyone, 99)),
            messages.DeclareDomain("without me", 7, tuple(x for x in everyone if x != worker.rank)),
            messages.DeclareDomain("unknown codec", 7, everyone, codec="nosuch"),
            messages.DeclareDomain("cut matrices", 7, everyone, True, "matrix"),
            messages.DeclareDomain(known.label, known.domain, known.ranks, not known.scoped, known.codec, known.whole),
        ]
        worker.say(r.choice(odd))


def odd_section(w: World, r: Random) -> None:
    """Tensors that nobody else has, of a group that is not there, or of a size that nothing has."""
    if (worker := _working(w, r, "declares tensors that cannot be")) is not None:
        domain = next(iter(worker.threads))
        tensor = worker.threads[domain].spec.sections[0].tensors[0]
        longer = Section(0, (TensorSpec("another", (tensor.elements + 1,), tensor.dtype),))
        nothing = Section(0, (TensorSpec("nothing", (-1,), tensor.dtype),))
        odd = [(99, longer), (domain, longer), (domain, nothing)]
        worker.say(messages.DeclareSection(*r.choice(odd)))


def _wrong_program(w: World, r: Random, what: str, change: Callable[[DomainSpec], DomainSpec]) -> None:
    """One rank of a job of several runs another program than the others in its first domain."""
    several = [x for x in w.workers if x.spec.world_size > 1 and not x.job]
    if several:
        worker = r.choice(several)
        w.fatal = w.fatal or f"{worker.name} {what}"
        first, *rest = worker.spec.domains
        worker.spec = replace(worker.spec, domains=(change(first), *rest))


def _changed(spec: DomainSpec, kind: type[DomainSpec] = DomainSpec, **values: Any) -> DomainSpec:
    return kind(**({f.name: getattr(spec, f.name) for f in fields(DomainSpec)} | values))


def other_tensors(w: World, r: Random) -> None:
    """One rank has another model."""
    nbytes = r.choice([4, 4096])

    def change(spec: DomainSpec) -> DomainSpec:
        return _changed(spec, sections=(section(0, 77, [nbytes]), *spec.sections[1:]))

    _wrong_program(w, r, "has another model", change)


def other_group(w: World, r: Random) -> None:
    """One rank makes the same calls in a group of another name."""

    def change(spec: DomainSpec) -> DomainSpec:
        return _changed(spec, codec="coarse" if spec.codec != "coarse" else "none")

    _wrong_program(w, r, "declares another codec", change)


def leaves_out(w: World, r: Random) -> None:
    """One rank leaves a tensor out in a step in which the others push it."""

    def change(spec: DomainSpec) -> DomainSpec:
        return _changed(spec, skip=frozenset(range(1, spec.steps + 1)) - spec.skip)

    _wrong_program(w, r, "leaves out a tensor", change)


class _Contrary(DomainSpec):
    """Asks for sums where the others ask for means."""

    __slots__ = ()

    def flags(self, key: int) -> int:
        return DomainSpec.flags(self, key) ^ int(Flag.AVERAGE)


def other_operation(w: World, r: Random) -> None:
    _wrong_program(w, r, "asks for the sum where others ask for the mean", lambda spec: _changed(spec, _Contrary))


def ends_early(w: World, r: Random) -> None:
    """One rank makes fewer steps than the others and leaves in good order."""
    _wrong_program(
        w, r, "makes fewer steps", lambda spec: _changed(spec, steps=max(1, spec.steps // 2), late=spec.late)
    )


def new_tensor(w: World, r: Random) -> None:
    """One rank declares a new tensor for a step in which the others push those that all know."""

    def change(spec: DomainSpec) -> DomainSpec:
        more = section(len(spec.sections), 78, [4096])
        return _changed(spec, sections=(*spec.sections, more), late=(*spec.late, max(2, spec.steps // 2)))

    _wrong_program(w, r, "declares a tensor that only it has", change)


# ----------------------------------------------------------------------------------------- doorbells
def odd_doorbell(w: World, r: Random) -> None:
    """A push of an address that is not there, or of one more tensor after the step was closed."""
    if (worker := _working(w, r, "rings for what it may not push")) is not None:
        thread = next(iter(worker.threads.values()))
        lane = r.randrange(w.shape.lanes)
        keys = [k for k, store in thread.stores.items() if store.block.lane == lane]
        if r.random() < 0.5 or not keys or not thread.step:
            worker.ring(lane, ev.Pushed(thread.id, thread.index, thread.step + 1, (12345,), True, 0))
        else:
            worker.ring(lane, ev.Pushed(thread.id, thread.index, thread.step, (), True, 0))
            worker.ring(lane, ev.Pushed(thread.id, thread.index, thread.step, (r.choice(keys),), False, 0))
        w.at(w.now + 90.0, give_up, w, worker)


def idle_doorbell(w: World, r: Random) -> None:
    """A push by a rank that is not there, or of no step: counted, nothing else."""
    if alive := _at_work(w):
        worker = r.choice(alive)
        thread = next(iter(worker.threads.values()))
        worker.ring(r.randrange(w.shape.lanes), ev.Pushed(thread.id, r.choice([-1, 99]), 1, (), False, 0))
        worker.ring(r.randrange(w.shape.lanes), ev.Pushed(thread.id, thread.index, 0, (), True, 0))


# ----------------------------------------------------------------------------------- ends of programs
def give_up(w: World, worker: Worker) -> None:
    """What a launcher does in the end."""
    if not worker.over:
        worker.ended_by_launcher = True
        worker.kill()


def hangs(w: World, r: Random) -> None:
    """A rank stands still for ever, its process alive: the deadline ends its job, the launcher the rank."""
    if (worker := _working(w, r, "stands still")) is not None:
        for thread in worker.threads.values():
            thread.advance = lambda: None  # type: ignore[method-assign]
        w.at(w.now + 2 * w.shape.deadline, give_up, w, worker)


def does_not_return(w: World, r: Random) -> None:
    """A rank does not come back to its daemon after that was restarted."""
    if (worker := _working(w, r, "does not come back to its daemon")) is not None:
        for thread in worker.threads.values():
            thread.advance = lambda: None  # type: ignore[method-assign]
        worker.connect = lambda: None  # type: ignore[method-assign]
        assert worker.node.supervisor is not None
        w.kill(worker.node.supervisor)
        w.at(w.now + 120.0, give_up, w, worker)


# --------------------------------------------------------------------------- a node loses what it had
def empty_memory(w: World, r: Random) -> None:
    """A daemon comes back and finds nothing in shared memory, while its workers live: they are told so."""
    if (worker := _working(w, r, "has a daemon that comes back without memory")) is not None:
        assert worker.node.supervisor is not None
        w.kill(worker.node.supervisor)
        worker.node.memory = NodeMemory(w.next_incarnation())


def downgrade(w: World, r: Random) -> None:
    """A daemon is restarted with a release that lacks the codecs of its job, and a configuration without them: with one
    that names what the release has not, a daemon does not start."""
    if (worker := _working(w, r, "has a daemon of another release")) is not None:

        def lacking(spec: str) -> CodecChoice:
            if spec == LOSSLESS:
                return resolve(spec)
            raise ValueError(f"no codec {spec!r} in this release")

        assert worker.node.supervisor is not None
        worker.node.resolve, worker.node.rules = lacking, ()
        w.kill(worker.node.supervisor)


def lacks_a_codec(w: World, r: Random) -> None:
    """A node's release does not know a codec that operators ask for: the plan is refused, the job goes on; unless it
    is to go on from a checkpoint with that codec in its plan, which nobody may replace by another. What a daemon knew
    when its job formed it knows as long as it runs."""

    def lacking(spec: str) -> CodecChoice:
        if spec == "coarse":
            raise ValueError("no codec 'coarse' in this release")
        return resolve(spec)

    jobs = [j for n in w.nodes if n.supervisor is not None for j in n.supervisor.machine.jobs.values()]
    resumed = [d.resumed for x in w.workers for d in x.spec.domains if d.resumed is not None]
    saved = any(rule.spec == "coarse" for known in resumed for rule in known.rules)
    if any(j.plans for j in jobs) or (saved and jobs):
        return
    n = r.choice(w.nodes)
    if saved:
        w.fatal = w.fatal or f"{n.name} lacks a codec of a checkpoint"
    n.resolve = lacking
    if n.supervisor is not None:
        n.supervisor.machine.resolve = lacking
        for job in n.supervisor.machine.jobs.values():
            job.resolve = lacking


AT_START = (other_tensors, other_group, leaves_out, other_operation, ends_early, new_tensor)
DEADLY = (*AT_START, odd_domain, odd_section, odd_doorbell, hangs, does_not_return, empty_memory, downgrade)
HARMLESS = (idle_doorbell, lacks_a_codec)
