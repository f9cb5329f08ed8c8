"""The simulated lane: payload handles, accumulators, sections, attached workers, and every effect of the machine.

What may live here: one life of a lane and how it carries out effects. What may not: what a correct effect is
(`checks.py`), arithmetic and what outlives the process (`memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gcproto import lane_messages, messages, wire
from gcproto.manifest import AddressSpace, Block
from gcproto.records import replace
from gcserver.core import control_events as ce
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.lane import LaneMachine
from gcserver.core.lane_config import LaneConfig
from tests.simulation.memory import NAN, ZERO, BlockStore, Payload, Vector, add, scheme
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.world import Node, World


class LaneProcess(Process):
    """A lane: its handles, accumulators and the workers attached to it."""

    machine: LaneMachine

    def __init__(self, world: World, node: Node, lane: int) -> None:
        super().__init__(world, node, lane)
        hello = messages.Hello(node.name, node.address, world.shape.lanes, lane, node.memory.generation, "sim")
        self.machine = LaneMachine(LaneConfig(hello, self.incarnation, world.shape.credit))
        self.handles: dict[int, Payload] = {}
        self.slot_of: dict[int, tuple[ev.DomainKey, int, int]] = {}
        self.accumulators: dict[tuple[ev.DomainKey, int, int, int], Vector | None] = {}
        #: (domain, key, step) of rounds of two exchanges -> what was sent in the first, residual version, first sum
        self.contexts: dict[tuple[ev.DomainKey, int, int], tuple[Vector, int, Vector | None]] = {}
        self.stores: dict[tuple[ev.DomainKey, int], BlockStore] = {}
        self.spaces: dict[ev.DomainKey, AddressSpace] = {}
        self.opened: dict[ev.DomainKey, ev.DomainConfig] = {}
        self.attached: dict[tuple[bytes, int], Any] = {}
        self.mapping: list[tuple[Any, lane_messages.MapSection, ev.DomainKey]] = []
        #: handles that foreign frames were given, which the machine never owned
        self.ghosts: set[int] = set()

    def torn(self, effect: Any) -> None:
        if type(effect) in (fx.Encode, fx.Finalise):
            self.store(effect.domain, effect.key).tear(effect)

    # ------------------------------------------------------------------------------------- payloads
    def new_handle(self, payload: Payload, slot: tuple[ev.DomainKey, int, int] | None = None) -> int:
        handle = self.world.next_handle()
        self.handles[handle] = payload
        if slot is not None:
            self.slot_of[handle] = slot
        return handle

    def payload(self, handle: int) -> Payload:
        found = self.handles.get(handle)
        if found is None:
            self.world.checks.fail("handles", f"{self.name} uses handle {handle} after its release")
            raise AssertionError
        return found

    def store(self, domain: ev.DomainKey, key: int) -> BlockStore:
        return self.stores[domain, key]

    # ------------------------------------------------------------------- what the control machine says
    def from_control(self, event: Any) -> None:
        """An event over the pipe from the supervisor: layout and memory are filled in here, as in the runtime."""
        if not self.alive:
            return
        if self.paused:
            self.backlog.append(_FromControl(event))
            return
        if isinstance(event, ce.OpenSection):
            self._open_section(event)
            return
        if isinstance(event, ce.ForgetJob):
            # What was opened while the supervisor forgot the job.
            self.node.memory.forget_blocks(event.job, self.lane)
            return
        if isinstance(event, ev.DomainOpened):
            if event.config.job not in self.node.memory.jobs:
                return  # the job's files are gone already; that it ended comes next
            self._lay_out(event)
            ring = self.node.memory.ledger(event.config.id).rings.get(self.lane, [])
            plans = tuple(self._schemes(p) for p in event.plans)
            event = ev.DomainOpened(
                event.config, plans, event.settled, event.voids, event.switches, tuple(ring), event.proposal
            )
        elif isinstance(event, ev.PlanKnown):
            event = ev.PlanKnown(event.domain, self._schemes(event.plan))
        elif isinstance(event, ev.DomainClosed):
            self.spaces.pop(event.domain, None)
            self.mapping = [m for m in self.mapping if m[2] != event.domain]
        self.handle(event)

    def deliver(self, event: Any) -> None:
        if type(event) is _FromControl:
            self.from_control(event.event)
        elif type(event) is _Answer and not self.paused and self.alive:
            self._answered(event)
        else:
            super().deliver(event)

    def answer(self, event: Any) -> None:
        super().answer(_Answer(event, self.opened[event.domain].epoch))

    def _answered(self, a: _Answer) -> None:
        """An answer to an effect, unless its domain is in a new epoch since."""
        domain, handle = a.event.domain, a.event.handle
        if domain not in self.spaces or self.opened[domain].epoch == a.epoch:
            self.handle(a.event)
        elif handle is not None:
            del self.handles[handle]
            self.slot_of.pop(handle, None)

    @staticmethod
    def _schemes(plan: ev.Plan) -> ev.Plan:
        """Codecs whose name says so go to everyone, whatever their rule says."""
        rules = tuple(replace(r, scheme="all") if scheme(r.codec.spec) == "all" else r for r in plan.rules)
        return replace(plan, rules=rules)

    def _lay_out(self, e: ev.DomainOpened) -> None:
        c = e.config
        if c.id in self.spaces and c.epoch <= self.opened[c.id].epoch:
            return
        self.spaces[c.id] = c.space(self.world.shape.lanes)
        self.opened[c.id] = c
        for book in (self.accumulators, self.contexts):
            for at in [at for at in book if at[0] == c.id]:
                del book[at]  # type: ignore[attr-defined]

    def _open_section(self, e: ce.OpenSection) -> None:
        space = self.spaces.get(e.domain)
        if space is None or e.section.index != len(space.sections):
            return
        blocks = space.append(e.section)
        known = {b.key: m for b in blocks if b.lane == self.lane and (m := self._remember(e, b)) is not None}
        self.handle(ev.SectionOpened(e.domain, e.section, blocks, known))
        if self.alive:
            ready = [m for m in self.mapping if m[2] == e.domain and m[1].index < len(space.sections)]
            self.mapping = [m for m in self.mapping if m not in ready]
            for worker, request, _ in ready:
                self.world.worker_soon(worker.mapped, request, self.lane, self)

    def _remember(self, e: ce.OpenSection, block: Block) -> ev.BlockMemory | None:
        memory = self.node.memory
        store = memory.blocks.get((e.domain, block.key))
        if store is None:
            opened = self.opened[e.domain]
            store = BlockStore.fresh(block, e.section, opened.local_ranks, opened.epoch)
            memory.blocks[e.domain, block.key] = self.stores[e.domain, block.key] = store
            return None
        self.stores[e.domain, block.key] = store
        store.block = block
        retained = []
        for kept in store.kept:
            if kept is not None:
                handle = None
                if kept.payload is not None:
                    handle = self.new_handle(kept.payload, (e.domain, block.key, kept.record.slot))
                r = kept.record
                retained.append(
                    ev.Retained(r.step, r.slot, handle, r.nbytes, r.digest, r.codec, r.level, r.flags, r.proposal)
                )
        retained.sort(key=lambda r: -r.step)
        return store.remembered(tuple(retained))

    # -------------------------------------------------------------------------------------- workers
    def attach(self, worker: Any, job: bytes, local_rank: int) -> None:
        self.attached[job, local_rank] = worker

    def map_section(self, worker: Any, request: lane_messages.MapSection, domain: ev.DomainKey) -> None:
        space = self.spaces.get(domain)
        if space is not None and request.index < len(space.sections):
            self.world.worker_soon(worker.mapped, request, self.lane, self)
        else:
            self.mapping.append((worker, request, domain))

    # -------------------------------------------------------------------------------------- effects
    def _send(self, e: fx.Send) -> None:
        payload = self.payload(e.handle) if e.handle is not None else None
        self.world.network.send(self, e, payload)

    def _release(self, e: fx.Release) -> None:
        if self.handles.pop(e.handle, None) is None:
            self.world.checks.fail("handles", f"{self.name} releases handle {e.handle} twice")
        self.slot_of.pop(e.handle, None)

    def _log_decision(self, e: fx.LogDecision) -> None:
        self.store(e.domain, e.key).decision = e.decision

    def _encode(self, e: fx.Encode) -> None:
        store = self.store(e.domain, e.key)
        self.world.checks.on_encode(self, e, store)
        if e.retain is not None:
            self._overwrites((e.domain, e.key, e.retain))
        at = (e.domain, e.key, e.step)
        if e.stage:
            assert e.aggregate is not None
            sent, write, _ = self.contexts[at]
            aggregate = self.payload(e.aggregate)[0]
            self.contexts[at] = (sent, write, aggregate)
            payload: Payload | None = store.middle(e, sent, aggregate)
        else:
            payload = store.encode(e)
            if e.codec.rounds > 1 and payload is not None:
                self.contexts[at] = (payload[0], e.write, None)
        handle = None
        nbytes = digest = 0
        if payload is not None:
            handle = self.new_handle(payload, None if e.retain is None else (e.domain, e.key, e.retain))
            nbytes, digest = store.payload_bytes(e.codec), hash(payload) & (2**64 - 1)
        self.answer(ev.Encoded(e.domain, e.key, e.step, handle, nbytes, digest, payload is None, e.stage))

    def _overwrites(self, slot: tuple[ev.DomainKey, int, int]) -> None:
        for handle, used in self.slot_of.items():
            if used == slot:
                self.world.checks.fail(
                    "handles", f"{self.name} overwrites retained memory {slot} while handle {handle} names it"
                )

    def _accumulate(self, e: fx.Accumulate) -> None:
        self.world.checks.on_accumulate(self, e)
        at = (e.domain, e.key, e.step, e.stage)
        total = ZERO if e.first else self.accumulators[at]
        if e.handle is None or total is None:
            self.accumulators[at] = None
        else:
            self.accumulators[at] = add(total, self.payload(e.handle)[0])

    def _finalise(self, e: fx.Finalise) -> None:
        store = self.store(e.domain, e.key)
        self.world.checks.on_finalise(self, e)
        if e.codec is not None:
            self._overwrites((e.domain, e.key, e.retain))
        total = self.accumulators.pop((e.domain, e.key, e.step, e.stage))
        payload = store.finalise(e, None if e.nonfinite else total)
        if e.stage and payload is not None:
            self._finish(e, payload[0], e.divisor)
        handle = None
        nbytes = digest = 0
        if payload is not None and e.codec is not None:
            handle = self.new_handle(payload, (e.domain, e.key, e.retain))
            nbytes, digest = store.payload_bytes(e.codec), hash(payload) & (2**64 - 1)
        self.answer(ev.Finalised(e.domain, e.key, e.step, handle, nbytes, digest, e.nonfinite, e.stage))

    def _finish(self, e: fx.Finalise | fx.Decode, total: Vector, divisor: int) -> None:
        sent, write, aggregate = self.contexts.pop((e.domain, e.key, e.step))
        assert aggregate is not None
        members = len(self.machine.domains[e.domain].config.members)
        self.store(e.domain, e.key).finish(total, members, sent, aggregate, write, divisor)

    def _decode(self, e: fx.Decode) -> None:
        store = self.store(e.domain, e.key)
        if e.nonfinite or e.handle is None:
            store.output = NAN
        elif e.stage:
            self._finish(e, self.payload(e.handle)[0], e.divisor)
        else:
            values, divisor = self.payload(e.handle)
            store.output = (values, divisor * e.divisor)

    def _commit_output(self, e: fx.CommitOutput) -> None:
        store = self.store(e.domain, e.key)
        self.world.checks.on_commit(self, e, store)
        store.out_step = e.step
        store.out_flags = int(wire.Flag.NONFINITE) if e.nonfinite else 0
        store.out_proposal = e.proposal

    def _enter_epoch(self, e: fx.EnterEpoch) -> None:
        store = self.store(e.domain, e.key)
        store.kept = [None, None, None]
        store.out_step = e.step
        store.epoch = e.epoch

    def _log_step(self, e: fx.LogStep) -> None:
        record = ev.StepRecord(e.step, e.nonfinite, e.proposal, e.digest, e.epoch)
        self.node.memory.ledger(e.domain).finished(self.lane, record)

    def _flip(self, e: fx.Flip) -> None:
        store = self.store(e.domain, e.key)
        self.world.checks.on_flip(self, e, store)
        old = store.owner_residual if e.owner else store.residual
        new = replace(old, current=e.version, settled=e.step)
        if e.owner:
            store.owner_residual = new
        else:
            store.residual = new

    def _notify(self, e: fx.Notify) -> None:
        job, domain = e.domain
        for (of, local), worker in list(self.attached.items()):
            if of == job:
                self.world.worker_soon(worker.done, domain, e, self, local)

    def _report(self, e: Any) -> None:
        self.node.to_control(self, ce.LaneSaid(self.lane, e))

    DO: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        fx.Send: _send,
        fx.Reconnect: Process._reconnect,
        fx.Release: _release,
        fx.LogDecision: _log_decision,
        fx.Encode: _encode,
        fx.Accumulate: _accumulate,
        fx.Finalise: _finalise,
        fx.Decode: _decode,
        fx.CommitOutput: _commit_output,
        fx.EnterEpoch: _enter_epoch,
        fx.LogStep: _log_step,
        fx.Flip: _flip,
        fx.Notify: _notify,
        fx.ReportStep: _report,
        fx.ReportClosed: _report,
        fx.ReportWaiting: _report,
        fx.ReportFault: _report,
        fx.ReportLink: _report,
        fx.Count: Process._count,
    }


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer to what was asked in an epoch of its domain."""

    event: Any
    epoch: int


class _FromControl:
    """A pipe event that waited for a stopped process."""

    def __init__(self, event: Any) -> None:
        self.event = event
