"""Simulated training workers: what they push, in which order, and how they come back to a restarted daemon.

What may live here: the worker's half of the contract (docs/wire.md, "worker and daemon"). What may not: what it
computes (`program.py`), what the right output is (`oracle.py`, `checks.py`), daemons' decisions.

A worker keeps its doorbells of the last ``lag`` steps and rings them again at every lane it attaches to:
settling is at most ``lag`` steps behind what it has seen done, so nothing older can still be wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gcproto import lane_messages, messages
from gcproto.epoch_messages import Admit
from gcproto.manifest import AddressSpace, Block
from gcproto.wire import Flag
from gcserver.core import control_events as ce
from gcserver.core import effects as fx
from gcserver.core import events as ev
from tests.simulation.memory import BlockStore
from tests.simulation.program import DomainSpec, JobSpec

if TYPE_CHECKING:
    from tests.simulation.lane_process import LaneProcess
    from tests.simulation.world import Node, World


class DomainThread:
    """One domain's program on one worker."""

    def __init__(self, worker: Worker, spec: DomainSpec, members: tuple[messages.MemberInfo, ...], partition: int):
        self.worker, self.spec, self.world = worker, spec, worker.world
        nodes = [m for m in members if any(r in spec.ranks for r in m.ranks)]
        mine = next(m for m in nodes if worker.rank in m.ranks)
        self.index = [r for r in mine.ranks if r in spec.ranks].index(worker.rank)
        self.space = AddressSpace(len(nodes), self.world.shape.lanes, partition, spec.whole)
        self.id: ev.DomainKey = (worker.job, spec.id)
        self.stores: dict[int, BlockStore] = {}
        self.unmapped: dict[int, set[int]] = {}
        self.declared = 0
        self.step = 0
        self.pushing = False
        self.outstanding: dict[int, set[int]] = {}
        self.doorbells: dict[int, list[tuple[int, ev.Pushed]]] = {}
        self.newest_done = 0
        self.finished = False

    @property
    def pauses(self) -> bool:
        """Whether the program stands at an admission point, or does so once its steps are over."""
        return self.step >= self.worker.spec.pause(self.spec, self.worker.points)

    # ------------------------------------------------------------------------------------ declaring
    def declare(self) -> None:
        """Declare the domain and whatever sections are due; again after the daemon came back."""
        self.worker.say(self.spec.message())
        for section in self.spec.sections[: max(self.declared, self._due())]:
            self.worker.say(messages.DeclareSection(self.spec.id, section))
        self.declared = max(self.declared, self._due())

    def _due(self) -> int:
        return sum(late <= self.step + 1 for late in self.spec.late)

    def agreed(self, m: messages.SectionAgreed) -> None:
        if m.index == len(self.space.sections):
            self.space.append(self.spec.sections[m.index])
            self.unmapped[m.index] = set(range(self.world.shape.lanes))
            for lane in range(self.world.shape.lanes):
                self.worker.map(lane, lane_messages.MapSection(self.spec.id, m.index, 0), self.id)

    def mapped(self, index: int, lane: int, stores: dict[tuple[ev.DomainKey, int], BlockStore]) -> None:
        waiting = self.unmapped.get(index)
        if waiting is None or lane not in waiting:
            return
        waiting.discard(lane)
        for block in self.space.blocks[index]:
            if block.lane == lane:
                self.stores[block.key] = stores[self.id, block.key]
        if not waiting:
            del self.unmapped[index]
            self.advance()

    # ---------------------------------------------------------------------------------------- steps
    def advance(self) -> None:
        """Begin the next step if the program may."""
        if self.finished or self.pushing or self.worker.over:
            return
        if self.pauses:
            self.worker.at_point()
            return
        if self.step >= self.spec.steps:
            if not self.outstanding:
                self.finished = True
                self.worker.thread_finished()
            return
        due = self._due()
        while due > self.declared:
            section = self.spec.sections[self.declared]
            self.worker.say(messages.DeclareSection(self.spec.id, section, self.step + 1))
            self.declared += 1
        if len(self.space.sections) < due or self.unmapped:
            return
        if not self.world.may_begin(self.worker.rank, self.step + 1):
            return
        if self.outstanding and (self.spec.scoped or len(self.outstanding) >= self.spec.window):
            return
        blocks = self.spec.keys(self.step + 1, self.space.blocks)
        busy = set().union(*self.outstanding.values()) if self.outstanding else set()
        if any(b.key in busy for b in blocks):
            return
        self.step += 1
        self.pushing = True
        self.outstanding[self.step] = {b.key for b in blocks}
        self.doorbells[self.step] = []
        # a worker that reads and pushes a bucket at a time; the last bucket closes the step
        size = max(1, -(-len(blocks) // self.world.random.randint(1, 3)))
        buckets = [blocks[i : i + size] for i in range(0, len(blocks), size)]
        self._push(self.step, buckets, blocks[0].key)

    def _push(self, step: int, buckets: list[list[Block]], first: int) -> None:
        if self.worker.over:
            return
        bucket, rest = buckets[0], buckets[1:]
        for block in bucket:
            store, rank = self.stores[block.key], self.worker.rank
            self.world.checks.on_write(self.worker, self, store, step)
            nan = self.spec.is_nan(step, rank, block.key == first)
            store.inputs[self.index] = None if nan else self.spec.value(step, block.key, rank)
            store.flags[self.index] = self.spec.flags(block.key)
            store.pushed[self.index] = step
        for lane in range(self.world.shape.lanes):
            for flags in (0, int(Flag.AVERAGE)):
                keys = tuple(b.key for b in bucket if b.lane == lane and self.spec.flags(b.key) == flags)
                close = not rest and flags != 0
                if keys or close:
                    push = ev.Pushed(self.id, self.index, step, keys, close, flags)
                    self.doorbells[step].append((lane, push))
                    self.worker.ring(lane, push)
        if rest:
            self.world.at(self.world.now + self.worker.compute(), self._push, step, rest, first)
        else:
            self.pushing = False
            if not self.spec.scoped:
                self.world.at(self.world.now + self.worker.compute(), self.advance)
            if not self.outstanding[step]:
                self._step_done(step)

    def done(self, e: fx.Notify) -> None:
        """Blocks of a step are in the output slots: read them, check them, go on."""
        waiting = self.outstanding.get(e.step)
        if waiting is None:
            return
        for key in e.keys:
            if key in waiting:
                waiting.discard(key)
                if e.skipped:
                    self.world.checks.on_skipped(self.worker, self, e.step)
                    continue
                self.world.checks.on_output(self.worker, self, self.stores[key], e.step, e.nonfinite)
        self.newest_done = max(self.newest_done, e.step)
        for old in [s for s in self.doorbells if s <= self.newest_done - self.spec.lag]:
            del self.doorbells[old]
        if not waiting and not (self.pushing and e.step == self.step):
            self._step_done(e.step)

    def _step_done(self, step: int) -> None:
        if self.outstanding.pop(step, None) is not None:
            self.world.steps_done += 1
            self.world.at(self.world.now + self.worker.compute(), self.advance)


class Worker:
    """One rank of a job."""

    def __init__(self, world: World, spec: JobSpec, node: Node, rank: int, local_rank: int, local_size: int) -> None:
        self.world, self.spec, self.node = world, spec, node
        self.rank, self.local_rank, self.local_size = rank, local_rank, local_size
        self.job = b""
        self.connection = 0
        self.supervisor: Any = None
        self.threads: dict[int, DomainThread] = {}
        self.lanes: dict[int, LaneProcess] = {}
        self.fault: messages.Fault | None = None
        self.over = False
        self.ended_by_launcher = self.killed = False
        self.said_at = 0.0
        self.rang_at = [0.0] * world.shape.lanes
        self.name = f"{spec.label}:{rank}"
        self.peers: tuple[tuple[str, str], ...] = ()
        #: admission points it has passed; it stands at the next one; it was started again after its node was lost
        self.points, self.standing, self.returned = 0, False, False
        #: it takes so much longer than others to compute, seconds
        self.slower = 0.0

    def compute(self) -> float:
        return self.world.compute() + self.slower

    # ------------------------------------------------------------------------- the daemon's socket
    def connect(self) -> None:
        """Find the daemon; register, or attach again if the job was formed already."""
        if self.over or self.connection:
            return
        supervisor = self.node.supervisor
        if supervisor is None or not supervisor.alive:
            self.world.at(self.world.now + 0.05 + 0.1 * self.world.random.random(), self.connect)
            return
        self.connection = self.world.next_handle()
        self.supervisor = supervisor
        supervisor.connections[self.connection] = self
        if self.job:
            self.say(messages.Reattach(self.job, self.rank, 1000 + self.rank))
        else:
            number = self.world.random.randbytes(16) if self.rank == 0 else b""
            self.say(
                messages.Register(
                    self.spec.label, self.rank, self.spec.world_size, self.local_rank, self.local_size,
                    1000 + self.rank, number, on_loss=self.spec.on_loss, peers=self.peers,
                )
            )  # fmt: skip

    def impatient(self) -> None:
        """The job has not formed within the deadline: init() raises."""
        if not self.job and not self.over and self.world.fatal:
            self.fault = messages.Fault(b"", "StepTimeout", "waited in vain for the job to form", phase="join")
            self.leave(gracefully=False)

    def say(self, message: messages.WorkerAct) -> None:
        """In order, lost when the daemon dies first."""
        if self.connection:
            self.said_at = max(self.said_at, self.world.now + 0.0002)
            self.world.at(self.said_at, self.supervisor.deliver, ce.WorkerSaid(self.connection, message))

    def told(self, message: messages.ToWorker, connection: int) -> None:
        if connection != self.connection or self.over:
            return
        if isinstance(message, messages.Registered):
            self.registered(message)
        elif isinstance(message, messages.SectionAgreed):
            self.threads[message.domain].agreed(message)
        elif isinstance(message, messages.EpochChanged):
            self.go_on(message.admissions)
        elif isinstance(message, messages.Fault):
            self.fault = message
            self.leave(gracefully=self.world.random.random() < 0.5)

    def registered(self, m: messages.Registered) -> None:
        first = not self.job
        self.job = m.job
        if first:
            self.points = m.admissions
            for spec in self.spec.domains:
                if self.rank in spec.ranks:
                    self.threads[spec.id] = DomainThread(self, spec, m.members, m.partition_bytes)
            for facts in m.domains:
                thread = self.threads[facts.declared.domain]
                thread.step = thread.newest_done = facts.settled
            for lane in range(self.world.shape.lanes):
                self.attach(lane)
        for thread in self.threads.values():
            thread.declare()
        self.go_on(m.admissions)
        if self.standing:
            self.say(Admit(self.points + 1))
        if not self.threads:
            self.thread_finished()

    # ------------------------------------------------------------------------------- admission points
    def at_point(self) -> None:
        """A thread has come to the next admission point; the worker stands there once all have."""
        if self.standing or any(not t.pauses or t.outstanding or t.pushing for t in self.threads.values()):
            return
        self.standing = True
        self.say(Admit(self.points + 1))

    def go_on(self, admissions: int) -> None:
        """Whoever could come in at the point where this worker stands has."""
        if self.standing and admissions > self.points:
            self.standing = False
            self.points += 1
            for thread in self.threads.values():
                thread.advance()

    # ---------------------------------------------------------------------------------------- lanes
    def attach(self, lane: int) -> None:
        """Attach to a lane, ask again for what it has not mapped yet, ring again for what it may not know."""
        if self.over or lane in self.lanes:
            return
        process = self.node.lanes.get(lane)
        if process is None or not process.alive:
            self.world.at(self.world.now + 0.02 + 0.05 * self.world.random.random(), self.attach, lane)
            return
        self.lanes[lane] = process
        self._to_lane(lane, process.attach, self, self.job, self.rank)
        for thread in self.threads.values():
            for index, lanes in thread.unmapped.items():
                if lane in lanes:
                    self.map(lane, lane_messages.MapSection(thread.spec.id, index, 0), thread.id)
            for step in sorted(thread.doorbells):
                for at, push in thread.doorbells[step]:
                    if at == lane:
                        self.ring(lane, push)

    def _to_lane(self, lane: int, call: Any, *args: Any) -> None:
        self.rang_at[lane] = max(self.rang_at[lane], self.world.now + 0.0001)
        self.world.at(self.rang_at[lane], call, *args)

    def map(self, lane: int, request: lane_messages.MapSection, domain: ev.DomainKey) -> None:
        process = self.lanes.get(lane)
        if process is not None:
            self._to_lane(lane, process.map_section, self, request, domain)

    def ring(self, lane: int, push: ev.Pushed) -> None:
        process = self.lanes.get(lane)
        if process is not None:
            self._to_lane(lane, process.deliver, push)

    def lane_died(self, process: LaneProcess) -> None:
        if self.lanes.get(process.lane) is process:
            del self.lanes[process.lane]
            self.attach(process.lane)

    def mapped(self, request: lane_messages.MapSection, lane: int, process: LaneProcess) -> None:
        if self.lanes.get(lane) is process and not self.over:
            self.threads[request.domain].mapped(request.index, lane, process.stores)

    def done(self, domain: int, e: fx.Notify, process: LaneProcess, rank: int) -> None:
        thread = self.threads.get(domain)
        if thread is None or self.over or self.lanes.get(process.lane) is not process:
            return
        if e.rank is None or e.rank == thread.index:
            thread.done(e)
            thread.advance()

    # ------------------------------------------------------------------------------------------ end
    def thread_finished(self) -> None:
        if all(t.finished for t in self.threads.values()) and not self.over:
            self.leave(gracefully=True)

    def leave(self, gracefully: bool) -> None:
        """shutdown(), or the process ends without it."""
        if self.over:
            return
        self.over = True
        if gracefully:
            self._unregister()
        else:
            self._vanish()

    def _unregister(self) -> None:
        """shutdown() returns when the daemon closed the socket: only then is it known to have heard."""
        if self.node.gone:
            self._vanish()
            return
        if self.supervisor is None:
            supervisor = self.node.supervisor
            if supervisor is None or not supervisor.alive:
                self.world.at(self.world.now + 0.1, self._unregister)
                return
            self.connection, self.supervisor = self.world.next_handle(), supervisor
            supervisor.connections[self.connection] = self
            if self.job:
                self.say(messages.Reattach(self.job, self.rank, 1000 + self.rank))
        self.say(messages.Unregister())
        self.world.at(self.said_at, self._closed, self.supervisor)

    def _closed(self, supervisor: Any) -> None:
        if self.supervisor is not supervisor or not supervisor.alive:
            return  # what it heard is not known: ask the next one
        if supervisor.paused:
            self.world.at(self.world.now + 0.1, self._closed, supervisor)
        else:
            self._vanish()

    def disconnected(self, supervisor: Any) -> None:
        """The daemon went away."""
        if self.supervisor is supervisor:
            self.connection = 0
            self.supervisor = None
            if self.over:
                self._unregister()
            else:
                self.connect()

    def kill(self) -> None:
        """The training process is killed."""
        self.over = self.killed = True
        self._vanish()

    def _vanish(self) -> None:
        for lane, process in self.lanes.items():
            self._to_lane(lane, process.attached.pop, (self.job, self.rank), None)
        if self.supervisor is not None:
            self.said_at = max(self.said_at, self.world.now + 0.0002)
            connection, supervisor = self.connection, self.supervisor
            self.supervisor = None
            self.world.at(self.said_at, supervisor.deliver, ce.WorkerGone(connection))
            self.world.at(self.said_at, supervisor.connections.pop, connection, None)
        self.world.worker_over(self)
