"""A seeded world of nodes in virtual time: the event queue, nodes, processes and how they live and die.

What may live here: time, the queue, starting and killing. What may not: frames (`network.py`), workers' programs
(`workers.py`), which faults strike and when (`faults.py`), what must hold (`checks.py`).

The same seed gives the same run, always: one random generator, one queue ordered by time and insertion, no
iteration over sets of anything but integers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from gcproto import wire
from gcproto.messages import EpochDecided, Rule
from gcserver.core import control_events as ce
from gcserver.core import events as ev
from gcserver.core.events import CodecChoice
from tests.simulation.checks import Checks, Violation
from tests.simulation.lane_process import LaneProcess
from tests.simulation.memory import NodeMemory, resolve
from tests.simulation.modes import Modes
from tests.simulation.network import Network
from tests.simulation.processes import CONTROL, LATEST_LIFE, ControlProcess, Process
from tests.simulation.program import DomainSpec, JobSpec
from tests.simulation.register import Register
from tests.simulation.shape import Shape
from tests.simulation.workers import Worker

#: how long a world may run after its last worker left, seconds: heartbeats, acknowledgements, credit
REST = 2.0


class Node:
    """One machine: its memory, its supervisor and lanes."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.name = f"node{index}"
        self.address = f"tcp://node{index}:7000"
        self.id = wire.node_id(self.name)
        self.memory = NodeMemory(world.next_incarnation())
        self.supervisor: ControlProcess | None = None
        self.lanes: dict[int, LaneProcess] = {}
        self.pipes: dict[tuple[int, int], float] = {}
        self.gone = False
        #: whom its list of admitted nodes does not have any more
        self.expelled: list[str] = []
        #: its clock: by how much it is ahead, seconds, and how fast it goes
        self.ahead, self.pace = 0.0, 1.0
        #: it takes so long to read a frame, seconds, until then; when it has read what has arrived
        self.reading, self.slow_until, self.reads_at = 0.0, 0.0, 0.0
        #: by how much the numbers of its processes' next lives are ahead
        self.lives_ahead = 0
        #: what its kernels take longer than usual, seconds; whether it has no memory for more tensors
        self.kernels, self.full = 0.0, False
        #: what its configuration has jobs encoded with, and the codecs that its release knows
        self.rules: tuple[Rule, ...] = (Rule(world.shape.pattern, world.shape.codec),)
        self.resolve: Callable[[str], CodecChoice] = resolve

    def clock(self) -> float:
        return self.ahead + self.pace * self.world.now

    def processes(self) -> Iterator[Process]:
        if self.supervisor is not None and self.supervisor.alive:
            yield self.supervisor
        for lane in self.lanes.values():
            if lane.alive:
                yield lane

    # ------------------------------------------------------------------------------------- starting
    def start(self) -> None:
        """The daemon starts: takes up what memory remembers, then its lanes."""
        if self.gone or (self.supervisor is not None and self.supervisor.alive):
            return
        world = self.world
        p = self.supervisor = ControlProcess(world, self)
        for memory in list(self.memory.jobs.values()):
            ledgers = tuple(self.memory.ledger((memory.record.job, d.domain)).found() for d, _ in memory.domains)
            p.deliver(ce.JobRestored(memory, ledgers))
        if world.shape.static_peers:
            for other in world.nodes:
                p.know(other.name, other.address)
        for lane in range(world.shape.lanes):
            self.start_lane(lane, p)
        world.at(world.now + world.random.random() * world.shape.tick, self._tick, p)

    def start_lane(self, lane: int, supervisor: ControlProcess) -> None:
        if not supervisor.alive:
            return
        world = self.world
        p = self.lanes[lane] = LaneProcess(world, self, lane)
        world.at(world.now + 0.001, supervisor.lane_up, p)
        world.at(world.now + world.random.random() * world.shape.tick, self._tick, p)

    def _tick(self, p: Process) -> None:
        if p.alive:
            if not p.paused:
                p.deliver(ev.Tick(LATEST_LIFE))
                for name in self.expelled if p.lane == CONTROL else ():
                    p.deliver(ce.PeerExpelled(name))
            self.world.at(self.world.now + self.world.shape.tick, self._tick, p)

    # ------------------------------------------------------------------- pipes between supervisor and lanes
    def to_lane(self, supervisor: ControlProcess, lane: LaneProcess, event: Any) -> None:
        self._pipe(supervisor.incarnation, lane.incarnation, lane.from_control, event)

    def to_control(self, lane: LaneProcess, event: Any) -> None:
        supervisor = self.supervisor
        if supervisor is not None:
            self._pipe(lane.incarnation, supervisor.incarnation, supervisor.deliver, event)

    def _pipe(self, source: int, target: int, call: Callable[[Any], None], event: Any) -> None:
        world = self.world
        at = max(self.pipes.get((source, target), 0.0), world.now + 0.0003 * world.random.random())
        self.pipes[source, target] = at
        world.at(at, call, event)


class World:
    """Everything. ``run`` plays it to its end; a :class:`Violation` is raised where a guarantee breaks."""

    def __init__(self, shape: Shape, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.shape, self.seed, self.trace = shape, seed, trace
        self.random = Random(seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._order = self._handle = self._incarnation = 0
        self.events = self.steps_done = 0
        self.max_events = 1 << 62
        self.counts: dict[str, int] = {}
        self.fault_names: set[str] = set()
        self.checks = Checks(self)
        self.network = Network(self)
        self.register, self.modes = Register(self), Modes()
        #: nodes that their jobs may go on without
        self.excused: set[str] = set()
        #: links were broken for longer than a lease: the arbiter decides who is left
        self.split = False
        #: something struck that a job need not survive: faults are allowed, a hang is not
        self.fatal = ""
        self.restarts = True
        #: whether blocks that are not tiny may go to everyone
        self.everyone = shape.everyone
        whole = [d for job in shape.jobs for d in job.domains if d.whole]
        longest = [t.elements * s.dtype.itemsize for d in whole for s in d.sections for t in s.tensors]
        self.largest_payload = max(shape.partition_bytes, *longest, 0)
        self.nodes: list[Node] = [Node(self, i) for i in range(shape.nodes)]
        self.names = {n.id: n.name for n in self.nodes}
        self.by_name = {n.name: n for n in self.nodes}
        self.specs = {j.label: j for j in shape.jobs}
        #: jobs as they were first saved: a lane may still work in one that all supervisors have forgotten
        self.records: dict[bytes, EpochDecided] = {}
        self.workers: list[Worker] = []
        self.open_workers = 0
        self._described: dict[ev.DomainKey, tuple[DomainSpec, tuple[tuple[int, ...], ...], tuple[str, ...]]] = {}
        self._first: dict[tuple[ev.DomainKey, int], int] = {}

    # -------------------------------------------------------------------------------------- numbers
    def next_incarnation(self) -> int:
        self._incarnation += 1
        return 1_000_000 + self._incarnation * 1000

    def stranger(self) -> str:
        """A name that stands for no node of the world; frames to it go nowhere."""
        number = len(self.by_name)
        other = Node(self, number)
        self.names[other.id] = other.name
        self.by_name[other.name] = other
        return other.name

    def next_handle(self) -> int:
        self._handle += 1
        return self._handle

    def at(self, when: float, call: Callable[..., Any], *args: Any) -> None:
        self._order += 1
        heapq.heappush(self.queue, (when, self._order, call, args))

    def compute(self) -> float:
        """How long a worker computes."""
        return 0.002 + 0.015 * self.random.random()

    def may_begin(self, rank: int, step: int) -> bool:
        """Whether a worker may begin a step; scenario scripts hold it back."""
        return True

    def worker_soon(self, call: Callable[..., Any], *args: Any) -> None:
        """A message to a worker: soon, and in order."""
        self.at(self.now + 0.0002, call, *args)

    def say(self, who: str, what: object) -> None:
        if self.trace is not None:
            self.trace(f"{self.now:9.4f} {who:18} {what}")

    # ------------------------------------------------------------------------------------ processes
    def process(self, node: str, lane: int) -> Process | None:
        n = self.by_name[node]
        p: Process | None = n.supervisor if lane == CONTROL else n.lanes.get(lane)
        return p if p is not None and p.alive else None

    def kill(self, p: Process) -> None:
        """kill -9: a lane comes back by its supervisor, a supervisor takes its lanes along."""
        if not p.alive:
            return
        self.say(p.name, "is killed")
        p.alive = False
        node = p.node
        if isinstance(p, ControlProcess):
            for lane in node.lanes.values():
                self.kill(lane)
            for worker in list(p.connections.values()):
                self.at(self.now + 0.001, worker.disconnected, p)
            if self.restarts:
                self.at(self.now + 0.05 + 0.5 * self.random.random(), node.start)
            return
        assert isinstance(p, LaneProcess)
        for worker in self.workers:
            if worker.node is node and not worker.over:
                self.at(self.now + 0.001, worker.lane_died, p)
        supervisor = node.supervisor
        if supervisor is not None and supervisor.lanes_up.get(p.lane) is p:
            del supervisor.lanes_up[p.lane]
        if supervisor is not None and supervisor.alive and self.restarts:
            self.at(self.now + 0.02 + 0.2 * self.random.random(), node.start_lane, p.lane, supervisor)

    def strike(self, what: str, *nodes: str, split: bool = False) -> None:
        """Something a job need not survive, or which only these nodes need not. One that is being formed never need."""
        formed = all(w.job or w.over for w in self.workers)
        if formed and all(job.on_loss != "fail" for job in self.shape.jobs):
            self.excused.update(nodes)
            self.split |= split
        else:
            self.fatal = self.fatal or what

    def remove(self, node: Node) -> None:
        """The machine is gone for good."""
        node.gone = True
        if node.supervisor is not None:
            self.kill(node.supervisor)

    def die(self, node: Node) -> None:
        """So is it with its workers, at once."""
        self.strike(f"{node.name} dies", node.name)
        for worker in self.workers:
            if worker.node is node and not worker.over:
                worker.kill()
        self.remove(node)

    def lose_memory(self, node: Node) -> None:
        """The host restarts: everything under /dev/shm is gone, workers too."""
        self.strike(f"{node.name} loses its memory", node.name)
        for worker in self.workers:
            if worker.node is node and not worker.over:
                worker.kill()
        if node.supervisor is not None:
            self.kill(node.supervisor)
        node.memory = NodeMemory(self.next_incarnation())

    def bring_back(self, node: Node) -> None:
        """A machine that was lost is well again: its daemon starts, and all workers that it had."""
        gone = [w for w in self.workers if w.node is node]
        if any(not w.over for w in gone) or not self.open_workers:
            return
        node.gone = False
        node.start()
        for worker in {(w.spec.label, w.rank): w for w in gone}.values():
            if worker.spec.points and (worker.fault is not None or worker.killed):
                index = self.nodes.index(node)
                self.add_worker(worker.spec, index, worker.rank, worker.local_rank, worker.local_size, worker.peers)
                self.workers[-1].returned = True

    # ------------------------------------------------------------------------------------------ jobs
    def describe(self, key: ev.DomainKey) -> tuple[DomainSpec, tuple[tuple[int, ...], ...]]:
        spec, members, _ = self._domain(key)
        return spec, members

    def _domain(self, key: ev.DomainKey) -> tuple[DomainSpec, tuple[tuple[int, ...], ...], tuple[str, ...]]:
        found = self._described.get(key)
        if found is None:
            record = self.records[key[0]]
            spec = next(d for d in self.specs[record.label].domains if d.id == key[1])
            inside = [(m.node, tuple(r for r in m.ranks if r in spec.ranks)) for m in record.origin]
            inside = [(n, r) for n, r in inside if r]
            found = (spec, tuple(r for _, r in inside), tuple(n for n, _ in inside))
            self._described[key] = found
        return found

    def node_names(self, key: ev.DomainKey) -> tuple[str, ...]:
        """The members of a domain in its first epoch."""
        return self._domain(key)[2]

    def member_index(self, key: ev.DomainKey, node: str) -> int:
        return self._domain(key)[2].index(node)

    def first_key(self, key: ev.DomainKey, step: int) -> int:
        """The block that carries the NaN of a void step: the first that its rank pushes, whose program may be a wrong
        one, by itself once all others are lost."""
        found = self._first.get((key, step))
        if found is None:
            it = key[0], self._domain(key)[0].nan[step]
            pushing = (t for x in self.workers if (x.job, x.rank) == it for t in x.threads.values() if t.id == key)
            thread = next(t for t in pushing if t.step >= step)
            found = self._first[key, step] = thread.spec.keys(step, thread.space.blocks)[0].key
        return found

    def finished_well(self, job: bytes) -> bool:
        """Whether all workers got to the end, of nodes that had to."""
        had_to = [w for w in self.workers if w.job == job and not self.may_fail(w.node)]
        return all(w.over and w.fault is None and not w.killed for w in had_to)

    def may_fail(self, node: Node) -> bool:
        """Whether workers of a node need not get to the end: it was lost, or a split left it out."""
        if node.name in self.excused:
            return True
        newest = [epochs[max(epochs)] for epochs in self.checks.epochs.values()]
        return self.split and any(
            node.name in {m.node for m in record.origin} - {m.node for m in record.members} for record in newest
        )

    def start(self) -> None:
        """Daemons start, then workers."""
        for node in self.nodes:
            self.at(self.random.random() * 0.05, node.start)
        for spec in self.shape.jobs:
            rank = 0
            peers = tuple((self.nodes[n].name, self.nodes[n].address) for n, _ in spec.layout)
            for index, count in spec.layout:
                for local in range(count):
                    self.add_worker(spec, index, rank, local, count, peers)
                    rank += 1

    def add_worker(
        self, spec: JobSpec, node: int, rank: int, local: int, count: int, peers: tuple[tuple[str, str], ...]
    ) -> None:
        worker = Worker(self, spec, self.nodes[node], rank, local, count)
        worker.peers = () if self.shape.static_peers else peers
        self.workers.append(worker)
        self.open_workers += 1
        self.at(0.05 + self.random.random() * 0.05, worker.connect)
        self.at(self.shape.deadline, worker.impatient)

    def worker_over(self, worker: Worker) -> None:
        self.open_workers -= 1
        self.say(worker.name, "is done" if worker.fault is None else f"ends by {worker.fault.kind}")
        if worker.fault is not None or worker.killed:
            # As torchrun does: when one rank fails, the others of the run are ended after a while.
            for other in self.workers:
                if other.spec is worker.spec and not other.over and not other.job and not other.returned:
                    self.at(self.now + 1.0, self._end, other)

    def _end(self, worker: Worker) -> None:
        if not worker.over:
            worker.ended_by_launcher = True
            worker.kill()

    # ------------------------------------------------------------------------------------------ run
    def step(self) -> None:
        if self.events > self.max_events:
            raise Violation("G5", f"{self.events} events and no end: something goes in circles")
        when, _, call, args = heapq.heappop(self.queue)
        self.now = max(self.now, when)
        call(*args)

    def run(self, limit: float = 300.0) -> None:
        """Play until every worker is done, then until the network rests. Raises :class:`Violation`."""
        while self.open_workers:
            if self.now > limit:
                left = [f"{w.name} ({', '.join(self._where(w))})" for w in self.workers if not w.over]
                raise Violation("G5", f"after {limit:g} s still waiting: {'; '.join(left)}")
            self.step()
        if not self.fatal:
            had_to = [w for w in self.workers if not self.may_fail(w.node)]
            failed = [w for w in had_to if w.fault is not None or w.ended_by_launcher]
            if failed:
                raise Violation("G4", f"{failed[0].name} failed though nothing fatal struck: {failed[0].fault}")
        # A member that was cut off or stopped still has to say that it left.
        patience = self.now + limit
        while self.now < patience and self._busy():
            self.step()
        until = self.now + REST
        while self.queue and self.queue[0][0] < until:
            self.step()
        self.checks.at_rest()

    def _busy(self) -> bool:
        """Whether a supervisor still has a job, or will once it is started again, or a process is stopped."""
        if self.restarts and any(n.memory.jobs for n in self.nodes if not n.gone):
            return True
        return any(p.paused or (p.lane == CONTROL and p.machine.jobs) for n in self.nodes for p in n.processes())

    def _where(self, w: Worker) -> Iterator[str]:
        if not w.job:
            yield "in init"
        for t in w.threads.values():
            keys = {s: sorted(k) for s, k in t.outstanding.items()}
            yield f"domain {t.spec.id} step {t.step} of {t.spec.steps} waiting for {keys} unmapped {t.unmapped}"
