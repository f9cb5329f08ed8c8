"""The guarantees of docs/guarantees.md (G1 to G8) as checks that run at every effect and after every event.

What may live here: what must hold, and the bookkeeping to know it. What may not: anything that changes the
world. Every failure is a :class:`Violation` that names the guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from gcproto import messages
from gcproto.records import replace
from gcserver.core import control_events as ce
from gcserver.core import effects as fx
from gcserver.core import waiting
from gcserver.core.events import CodecChoice, DomainKey
from tests.simulation.lane_process import LaneProcess
from tests.simulation.links import Links
from tests.simulation.memory import FOREIGN, BlockStore, Ledger
from tests.simulation.oracle import OWNER, DomainOracle, Levels
from tests.simulation.processes import Process

if TYPE_CHECKING:
    from tests.simulation.workers import DomainThread, Worker
    from tests.simulation.world import World

#: kinds of fault that end a step, and therefore name it (G6)
STEP_KINDS = frozenset({"StepTimeout", "CorruptFrame"})
KINDS = STEP_KINDS | {
    "PeerLost",
    "WorkerLost",
    "TensorMismatch",
    "JoinRefused",
    "NotRegistered",
    "Draining",
    "CodecError",
    "StepIndeterminate",
    "NotAuthorised",
    "OutOfMemory",
}


def mean(codec: CodecChoice, levels: tuple[int, ...], bounds: tuple[int, ...]) -> int:
    """What a frame says of segments at these levels."""
    if not codec.tunable:
        return codec.level
    if not levels:
        return codec.own
    return sum(level * (b - a) for level, a, b in zip(levels, bounds, bounds[1:], strict=False)) // bounds[-1]


class Violation(AssertionError):
    """A guarantee that did not hold. ``guarantee`` is G1..G8, "credit" or "handles"."""

    def __init__(self, guarantee: str, what: str) -> None:
        self.guarantee = guarantee
        super().__init__(f"{guarantee}: {what}")


Attempted = tuple[int, int, int]  # epoch, step, key


@dataclass(slots=True)
class DomainRecord:
    """What was seen of one domain, on all nodes together."""

    oracle: DomainOracle
    #: (epoch, step, key) -> codec and scheme
    codecs: dict[Attempted, CodecChoice] = field(default_factory=dict)
    schemes: dict[Attempted, str] = field(default_factory=dict)
    #: (epoch, step, key) -> by member what it encoded at: levels of segments, what its frame says
    levels: dict[Attempted, Levels] = field(default_factory=dict)
    grades: dict[Attempted, dict[int, int]] = field(default_factory=dict)
    plans: dict[int, tuple[int, str]] = field(default_factory=dict)
    #: step -> void, plan, the epoch whose attempt counts, whether it was skipped, who said so first
    settled: dict[int, tuple[bool, int, int, bool, str]] = field(default_factory=dict)
    #: by node: how far it has ever been ready
    ready: dict[str, int] = field(default_factory=dict)
    #: (epoch, key) -> the owner's index in the first epoch
    owners: dict[tuple[int, int], int] = field(default_factory=dict)
    #: how far each node has settled
    watermark: dict[str, int] = field(default_factory=dict)


class Checks:
    """Incremental checks over one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.domains: dict[DomainKey, DomainRecord] = {}
        #: (owner's incarnation, epoch, domain, key, step, exchange) -> next member to be accumulated (G1)
        self.accumulated: dict[tuple[int, int, DomainKey, int, int, int], int] = {}
        self.answers: dict[int, ce.AnswerRequest] = {}
        #: what operators asked for, by the wish's number: the rules, and whether they replace all others
        self.wishes: dict[int, tuple[tuple[messages.Rule, ...], bool]] = {}
        self.plans: dict[tuple[bytes, int], messages.PlanText] = {}
        self.faults: list[messages.Fault] = []
        self.links = Links(self)
        #: by job: its epochs as the arbiter decided them
        self.epochs: dict[bytes, dict[int, messages.EpochDecided]] = {}

    def fail(self, guarantee: str, what: str) -> NoReturn:
        raise Violation(guarantee, f"at {self.world.now:.4f}: {what}")

    def domain(self, key: DomainKey) -> DomainRecord:
        found = self.domains.get(key)
        if found is None:
            spec, members = self.world.describe(key)
            found = self.domains[key] = DomainRecord(DomainOracle(spec, members))
            for record in self.epochs.get(key[0], {}).values():
                self._inside(key, record)
        return found

    # ---------------------------------------------------------------------------------------- rounds
    def on_write(self, worker: Worker, thread: DomainThread, store: BlockStore, step: int) -> None:
        """G1: an input is not overwritten before its round is complete on this node."""
        old = store.pushed[thread.index]
        d = self.domains.get(thread.id)
        over = store.out_step >= old
        if d is not None and worker.spec.on_loss != "fail":
            over = d.watermark.get(worker.node.name, 0) >= old
        if not over:
            self.fail("G1", f"{worker.name} overwrites the input of step {old}, of which there is no output yet")

    def _epoch(self, p: LaneProcess, key: DomainKey) -> int:
        """The epoch of a lane's domain, whose members are those that the arbiter decided on (G2)."""
        c, oracle = p.machine.domains[key].config, self.domain(key).oracle
        inside = tuple(self.world.member_index(key, m.name) for m in c.members)
        if oracle.left.setdefault(c.epoch, inside) != inside:
            self.fail("G2", f"{p.name} has members {inside} in epoch {c.epoch}, others {oracle.left[c.epoch]}")
        record = self.epochs.get(key[0], {}).get(c.epoch)
        if record is not None and not {m.name for m in c.members} <= {m.node for m in record.members}:
            self.fail("G2", f"{p.name} is in epoch {c.epoch} with {c.members}, decided was {record.members}")
        return int(c.epoch)

    def _member(self, p: LaneProcess, key: DomainKey, member: int) -> int:
        """The index that a member had in the first epoch."""
        return self.world.member_index(key, p.machine.domains[key].config.members[member].name)

    def on_encode(self, p: LaneProcess, e: fx.Encode, store: BlockStore) -> None:
        if any(s != e.step for s in store.pushed):
            self.fail("G1", f"{p.name} encodes step {e.step} of {e.key} from inputs of steps {store.pushed}")
        d = self.domain(e.domain)
        at = self._epoch(p, e.domain), e.step, e.key
        decision = store.decision
        if decision is None or decision.step != e.step or decision.spec != e.codec.spec:
            self.fail("G4", f"{p.name} encodes step {e.step} of {e.key} without logging it: {decision}")
        known = d.codecs.setdefault(at, e.codec)
        if known != (replace(e.codec, level=known.level) if known.tunable else e.codec):
            self.fail("G8", f"{p.name} encodes step {e.step} of {e.key} with {e.codec.spec}, others with {known.spec}")
        if e.stage == 0:
            # Only what goes to everyone is retained by whoever sends it.
            scheme = "owner" if e.retain is None else "all"
            if (others := d.schemes.setdefault(at, scheme)) != scheme:
                self.fail("G8", f"{p.name} runs step {e.step} of {e.key} over {scheme}, others over {others}")
        plan, who = d.plans.setdefault(e.step, (decision.plan, p.name))
        if plan != decision.plan:
            self.fail("G8", f"step {e.step} runs plan {decision.plan} on {p.name} and {plan} on {who}")
        if (e.codec.feedback or e.flush) and e.read == e.write:
            self.fail("G4", f"{p.name} reads and writes the same residual version")
        me = self.world.member_index(e.domain, p.node.name)
        grade = decision.level or mean(e.codec, e.levels, store.block.bounds)
        if e.codec.level != grade:
            self.fail("G8", f"{p.name} says level {e.codec.level} of step {e.step} of {e.key}, which is {grade}")
        self._encoded(d, at, e, me, f"{p.name} encodes")

    def _encoded(self, d: DomainRecord, at: Attempted, e: fx.Encode | fx.Finalise, who: int, does: str) -> None:
        """G4: what is made again is made at the same levels, in either exchange."""
        assert e.codec is not None
        if (known := d.levels.setdefault(at, {}).setdefault(who, e.levels)) != e.levels:
            self.fail("G4", f"{does} step {e.step} of {e.key} at {e.levels}, before at {known}")
        if (said := d.grades.setdefault(at, {}).setdefault(who, e.codec.level)) != e.codec.level:
            self.fail("G4", f"{does} step {e.step} of {e.key} and says {e.codec.level}, before {said}")

    def on_accumulate(self, p: LaneProcess, e: fx.Accumulate) -> None:
        epoch = self._epoch(p, e.domain)
        at = (p.incarnation, epoch, e.domain, e.key, e.step, e.stage)
        expected = self.accumulated.get(at, 0)
        if e.member != expected or e.first != (e.member == 0):
            self.fail("G1", f"{p.name} adds member {e.member} of {e.key} step {e.step}, expected member {expected}")
        self.accumulated[at] = expected + 1
        store = p.store(e.domain, e.key)
        if e.step <= store.out_step:
            self.fail("G1", f"{p.name} adds to step {e.step} of {e.key}, which is complete")
        if e.codec == FOREIGN:
            return  # of a faulty member; the next payload that joins it ends the job
        d = self.domain(e.domain)
        codec = d.codecs.get((epoch, e.step, e.key))
        grades = d.grades.get((epoch, e.step, e.key), {})
        said = codec.id if codec is not None else None, grades.get(self._member(p, e.domain, e.member))
        if said != (e.codec, e.level):
            self.fail("G8", f"{p.name} decodes step {e.step} of {e.key} with codec {e.codec}, decided was {codec}")

    def on_finalise(self, p: LaneProcess, e: fx.Finalise) -> None:
        d = self.domain(e.domain)
        epoch = self._epoch(p, e.domain)
        inside = d.oracle.inside(epoch)
        if self.accumulated.pop((p.incarnation, epoch, e.domain, e.key, e.step, e.stage), 0) != len(inside):
            self.fail("G2", f"{p.name} finalises step {e.step} of {e.key} without all {len(inside)} members")
        divisor = d.oracle.divisor(e.key, epoch)
        if e.divisor != divisor:
            self.fail("G2", f"{p.name} divides step {e.step} of {e.key} by {e.divisor}, expected {divisor}")
        if e.codec is not None and e.codec.feedback and e.read == e.write:
            self.fail("G4", f"{p.name} reads and writes the same owner residual version")
        if e.codec is None:
            return
        at = epoch, e.step, e.key
        self._encoded(d, at, e, OWNER, f"{p.name} finalises")
        grades = [g for who, g in d.grades[at].items() if who != OWNER]
        bounds = p.store(e.domain, e.key).block.bounds
        if e.codec.level != max(grades):
            self.fail("G8", f"{p.name} says level {e.codec.level} of the sum of {e.key}, contributors {grades}")
        alike = [d.levels[at][i] for i in inside if d.grades[at][i] == max(grades)]
        if e.levels not in alike and mean(e.codec, e.levels, bounds) != max(grades):
            self.fail("G8", f"{p.name} finalises step {e.step} of {e.key} at {e.levels}, contributors at {alike}")

    def on_commit(self, p: LaneProcess, e: fx.CommitOutput, store: BlockStore) -> None:
        if e.step <= store.out_step:
            self.fail("G1", f"{p.name} commits step {e.step} of {e.key} after step {store.out_step}")
        epoch, owner = self._epoch(p, e.domain), self._member(p, e.domain, store.block.owner)
        known = self.domain(e.domain).owners.setdefault((epoch, e.key), owner)
        if known != owner:
            self.fail("G2", f"{p.name} takes member {owner} for the owner of {e.key}, others member {known}")
        self._compare(e.domain, e.key, e.step, epoch, store, p.name)

    def on_output(self, worker: Worker, thread: DomainThread, store: BlockStore, step: int, nonfinite: bool) -> None:
        if store.out_step != step:
            self.fail("G3", f"{worker.name} is told of step {step} of {store.block.key} and finds {store.out_step}")
        epoch = 1
        if worker.spec.on_loss != "fail":
            d = self.domain(thread.id)
            if d.watermark.get(worker.node.name, 0) < step:
                self.fail("G8", f"{worker.name} is told of step {step}, which is not committed")
            epoch, skipped = d.oracle.committed[step]
            if skipped:
                self.fail("G8", f"{worker.name} is told that step {step} counts, which is skipped")
        self._compare(thread.id, store.block.key, step, epoch, store, worker.name)
        if nonfinite != bool(store.out_flags):
            self.fail("G3", f"{worker.name}: step {step} of {store.block.key} nonfinite={nonfinite}")

    def on_skipped(self, worker: Worker, thread: DomainThread, step: int) -> None:
        """A worker is told that a step was given up."""
        if not self.domain(thread.id).oracle.committed.get(step, (0, False))[1]:
            self.fail("G8", f"{worker.name} is told that step {step} is skipped, which nobody settled as such")

    def _compare(self, key: DomainKey, block: int, step: int, epoch: int, store: BlockStore, who: str) -> None:
        """G3 and G4: the output is the one of the undisturbed run."""
        d = self.domain(key)
        at = epoch, step, block
        first = d.oracle.void(step, epoch) and block == self.world.first_key(key, step)
        if at not in d.codecs:
            self.fail("G8", f"{who}: step {step} of {block} counts in epoch {epoch}, in which nobody encoded it")
        codec, owner = d.codecs[at], d.owners[epoch, block]
        expected = d.oracle.output(block, step, epoch, codec, d.schemes[at], d.levels[at], owner, first)
        if expected is not None and store.output != expected:
            self.fail("G3", f"{who}: output of {block} step {step} is {store.output}, expected {expected}")

    def on_flip(self, p: LaneProcess, e: fx.Flip, store: BlockStore) -> None:
        d = self.domain(e.domain)
        settled = d.watermark.get(p.node.name, 0)
        if e.step > settled:
            self.fail("G4", f"{p.name} flips {e.key} for step {e.step}, settled is {settled}")
        versions = store.owner_residual if e.owner else store.residual
        void = d.oracle.voided(e.step)
        expected = versions.current if void else 1 - versions.current
        if versions.written != e.step or versions.settled >= e.step or e.version != expected:
            self.fail("G4", f"{p.name} flips {e.key} to {e.version} for step {e.step} (void={void}): {versions}")

    # ---------------------------------------------------------------------------------------- epochs
    def on_epoch(self, record: messages.EpochDecided) -> None:
        """The arbiter has decided."""
        epochs = self.epochs.setdefault(record.job, {})
        if epochs.setdefault(record.epoch, record) != record:
            self.fail("G8", f"epoch {record.epoch} was decided twice: {epochs[record.epoch]}, {record}")
        for key in [k for k in self.domains if k[0] == record.job]:
            self._inside(key, record)

    def _inside(self, key: DomainKey, record: messages.EpochDecided) -> None:
        names, there = self.world.node_names(key), record.present(record.epoch)
        self.domains[key].oracle.left[record.epoch] = tuple(i for i, name in enumerate(names) if name in there)

    def on_take_up(self, p: Process, e: ce.TakeUp) -> None:
        """G8: who comes in takes up what was settled as of the epoch it hears of; others may be in a later one."""
        record = p.machine.jobs[e.domain[0]].record
        settled = max((s.settled for s in record.starts if s.domain == e.domain[1]), default=0)
        if (self.epochs[e.domain[0]].get(record.epoch), e.settled) != (record, settled):
            self.fail("G8", f"{p.name} comes into {e.domain} after step {e.settled}, decided was {record.starts}")
        self.domain(e.domain).watermark[p.node.name] = e.settled

    def on_log_ready(self, p: Process, e: ce.LogReady) -> None:
        d = self.domain(e.domain)
        d.ready[p.node.name] = max(e.step, d.ready.get(p.node.name, 0))

    def _attempt(self, key: DomainKey, step: int) -> tuple[int, bool, set[str]]:
        """The epoch whose attempt at a step counts, whether it is skipped, and who is left now."""
        epochs = self.epochs.get(key[0])
        if not epochs:
            return 1, False, set()
        record = epochs[max(epochs)]
        for start in sorted((s for s in record.starts if s.domain == key[1]), key=lambda s: s.epoch):
            if step <= start.settled:
                left = {m.node for m in record.members if m.since < start.epoch}
                return start.epoch - 1, step > start.committed, left
        return record.epoch, False, {m.node for m in record.members}

    # --------------------------------------------------------------------------------------- control
    def on_settled(self, p: Process, e: ce.LogSettled, ledger: Ledger) -> None:
        d = self.domain(e.domain)
        if e.step != ledger.settled + 1:
            self.fail("G8", f"{p.name} settles step {e.step} after {ledger.settled}")
        epoch, skipped, left = self._attempt(e.domain, e.step)
        d.watermark[p.node.name] = e.step
        said = e.void, e.plan, epoch, skipped
        *known, who = d.settled.setdefault(e.step, (*said, p.name))
        if tuple(known) != said:
            self.fail("G8", f"step {e.step}: (void, plan, epoch, skipped) {said} on {p.name}, {tuple(known)} on {who}")
        d.oracle.committed[e.step] = epoch, skipped
        if e.void != d.oracle.voided(e.step):
            self.fail("G8", f"{p.name} settles step {e.step} with void={e.void}")
        names = [name for name in self.world.node_names(e.domain) if name in left]
        if away := [name for name in names if not skipped and d.ready.get(name, 0) < e.step]:
            self.fail("G8", f"{p.name} settles step {e.step}, for which {', '.join(away)} never was ready")
        decided = d.plans.get(e.step + e.lag)
        if decided is not None and decided[0] != e.plan:
            self.fail("G8", f"step {e.step + e.lag} ran plan {decided[0]}, settling {e.step} fixed {e.plan}")

    def on_save(self, p: Process, e: ce.SaveJob) -> None:
        """G8: a plan is the same on all nodes, and holds what was asked for."""
        for text in e.memory.plans:
            known = self.plans.setdefault((e.job, text.version), text)
            if known is text:
                self._fulfils(p, text)
            elif known != text:
                self.fail("G8", f"{p.name} knows plan {text.version} as {text.rules}, others as {known.rules}")

    def _fulfils(self, p: Process, text: messages.PlanText) -> None:
        rules, replace = self.wishes[text.request]
        if rules != (text.rules if replace else text.rules[-len(rules) :]):
            self.fail("G8", f"{p.name} makes plan {text.version} {text.rules} of {rules}, replace={replace}")

    def on_told(self, p: Process, message: messages.ToWorker) -> None:
        """G6: a fault says what failed and what to do."""
        if not isinstance(message, messages.Fault):
            return
        self.faults.append(f := message)
        if f.kind not in KINDS or not f.message or not f.advice:
            self.fail("G6", f"a fault without kind, message or advice: {f}")
        # Of a job that has not formed, and of tensors that are not agreed, there is no step yet.
        of_a_step = f.phase not in ("join", "declare")
        if f.kind in STEP_KINDS and not (f.phase and f.missing and ((f.job and f.epoch and f.step) or not of_a_step)):
            self.fail("G6", f"a fault of a step without job, epoch, step, phase or missing: {f}")

    def on_answer(self, p: Process, e: ce.AnswerRequest) -> None:
        if e.request in self.answers:
            self.fail("G6", f"request {e.request} is answered twice: {self.answers[e.request]}, {e}")
        self.answers[e.request] = e

    def on_forget(self, p: Process, job: bytes) -> None:
        """G4 at a good end: what shared memory holds back is what the undisturbed run holds back."""
        record = p.node.memory.jobs[job].record
        left = self.epochs[job][max(self.epochs[job])].members if job in self.epochs else record.members
        if self.world.may_fail(p.node) or not self.world.finished_well(job) or record.members != left:
            return
        for (key, block), store in p.node.memory.blocks.items():
            if key[0] != job:
                continue
            d = self.domain(key)
            me = self.world.member_index(key, p.node.name)
            expected = d.oracle.block(block)
            for versions, held, want in (
                (store.residual, store.residuals, expected.residuals[me]),
                (store.owner_residual, store.owner_residuals, expected.owner if expected.owned_by == me else None),
            ):
                flips = versions.settled < versions.written and not d.oracle.voided(versions.written)
                current = 1 - versions.current if flips else versions.current
                if want is not None and held[current] != want:
                    self.fail("G4", f"{p.node.name} holds back {held[current]} of {block}, expected {want}")

    # ----------------------------------------------------------------------------------------- links
    def on_send(self, p: Process, e: fx.Send) -> None:
        h = e.header
        if h.sender != p.node.id or h.incarnation != p.incarnation:
            self.fail("G8", f"{p.name} sends under another name or life: {h}")

    def after(self, p: Process, touched: set[int] | None) -> None:
        """What must hold of a process whenever it is at rest; ``touched``: by links that were used, None by all."""
        self.links.after(p, touched)

    def on_tick(self, p: Process) -> None:
        """G6: whom a job waits for is a member or a rank of this node, and since when is over."""
        for job in p.machine.jobs.values():
            known = {m.node for m in job.record.origin} | {f"rank {r}" for m in job.record.origin for r in m.ranks}
            for wait in waiting.waits(job):
                if wait.who not in known or wait.since > p.node.clock() or not wait.wanted:
                    self.fail("G6", f"{p.name} waits for {wait}, and knows {sorted(known)}")

    def at_rest(self) -> None:
        """After everyone left and the network is quiet: nothing is held any more."""
        self.links.at_rest()
