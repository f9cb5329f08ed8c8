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
from gcserver.core.events import CodecChoice, DomainKey
from gcserver.core.link import Link
from gcserver.core.plan import SMALL_BYTES
from tests.simulation.lane_process import LaneProcess
from tests.simulation.memory import FOREIGN, BlockStore, Ledger
from tests.simulation.oracle import OWNER, DomainOracle, Levels
from tests.simulation.processes import CONTROL, Process

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


@dataclass(slots=True)
class DomainRecord:
    """What was seen of one domain, on all nodes together."""

    oracle: DomainOracle
    #: (step, key) -> codec and scheme
    codecs: dict[tuple[int, int], CodecChoice] = field(default_factory=dict)
    schemes: dict[tuple[int, int], str] = field(default_factory=dict)
    #: (step, key) -> by member what it encoded at: levels of segments, what its frame says
    levels: dict[tuple[int, int], Levels] = field(default_factory=dict)
    grades: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    plans: dict[int, tuple[int, str]] = field(default_factory=dict)
    settled: dict[int, tuple[bool, int, str]] = field(default_factory=dict)
    #: how far each node has settled
    watermark: dict[str, int] = field(default_factory=dict)


class Checks:
    """Incremental checks over one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.domains: dict[DomainKey, DomainRecord] = {}
        #: (owner's incarnation, domain, key, step, exchange) -> next member to be accumulated (G1)
        self.accumulated: dict[tuple[int, DomainKey, int, int, int], int] = {}
        self.answers: dict[int, ce.AnswerRequest] = {}
        #: what operators asked for, by the wish's number: the rules, and whether they replace all others
        self.wishes: dict[int, tuple[tuple[messages.Rule, ...], bool]] = {}
        self.plans: dict[tuple[bytes, int], messages.PlanText] = {}
        self.faults: list[messages.Fault] = []

    def fail(self, guarantee: str, what: str) -> NoReturn:
        raise Violation(guarantee, f"at {self.world.now:.4f}: {what}")

    def domain(self, key: DomainKey) -> DomainRecord:
        found = self.domains.get(key)
        if found is None:
            spec, members = self.world.describe(key)
            found = self.domains[key] = DomainRecord(DomainOracle(spec, members))
        return found

    # ---------------------------------------------------------------------------------------- rounds
    def on_write(self, worker: Worker, thread: DomainThread, store: BlockStore, step: int) -> None:
        """G1: an input is not overwritten before its round is complete on this node."""
        old = store.pushed[thread.index]
        if store.out_step < old:
            self.fail("G1", f"{worker.name} overwrites the input of step {old}, of which there is no output yet")

    def on_encode(self, p: LaneProcess, e: fx.Encode, store: BlockStore) -> None:
        if any(s != e.step for s in store.pushed):
            self.fail("G1", f"{p.name} encodes step {e.step} of {e.key} from inputs of steps {store.pushed}")
        d = self.domain(e.domain)
        decision = store.decision
        if decision is None or decision.step != e.step or decision.spec != e.codec.spec:
            self.fail("G4", f"{p.name} encodes step {e.step} of {e.key} without logging it: {decision}")
        known = d.codecs.setdefault((e.step, e.key), e.codec)
        if known != (replace(e.codec, level=known.level) if known.tunable else e.codec):
            self.fail("G8", f"{p.name} encodes step {e.step} of {e.key} with {e.codec.spec}, others with {known.spec}")
        if e.stage == 0:
            # Only what goes to everyone is retained by whoever sends it.
            scheme = "owner" if e.retain is None else "all"
            if (others := d.schemes.setdefault((e.step, e.key), scheme)) != scheme:
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
        self._encoded(d, e, me, f"{p.name} encodes")

    def _encoded(self, d: DomainRecord, e: fx.Encode | fx.Finalise, who: int, does: str) -> None:
        """G4: what is made again is made at the same levels, in either exchange."""
        at = e.step, e.key
        assert e.codec is not None
        if (known := d.levels.setdefault(at, {}).setdefault(who, e.levels)) != e.levels:
            self.fail("G4", f"{does} step {e.step} of {e.key} at {e.levels}, before at {known}")
        if (said := d.grades.setdefault(at, {}).setdefault(who, e.codec.level)) != e.codec.level:
            self.fail("G4", f"{does} step {e.step} of {e.key} and says {e.codec.level}, before {said}")

    def on_accumulate(self, p: LaneProcess, e: fx.Accumulate) -> None:
        at = (p.incarnation, e.domain, e.key, e.step, e.stage)
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
        codec = d.codecs.get((e.step, e.key))
        if codec is None or (codec.id, d.grades[e.step, e.key][e.member]) != (e.codec, e.level):
            self.fail("G8", f"{p.name} decodes step {e.step} of {e.key} with codec {e.codec}, decided was {codec}")

    def on_finalise(self, p: LaneProcess, e: fx.Finalise) -> None:
        d = self.domain(e.domain)
        members = len(d.oracle.members)
        if self.accumulated.pop((p.incarnation, e.domain, e.key, e.step, e.stage), 0) != members:
            self.fail("G2", f"{p.name} finalises step {e.step} of {e.key} without all {members} members")
        divisor = len(d.oracle.spec.ranks) if d.oracle.spec.flags(e.key) else 1
        if e.divisor != divisor:
            self.fail("G2", f"{p.name} divides step {e.step} of {e.key} by {e.divisor}, expected {divisor}")
        if e.codec is not None and e.codec.feedback and e.read == e.write:
            self.fail("G4", f"{p.name} reads and writes the same owner residual version")
        if e.codec is None:
            return
        self._encoded(d, e, OWNER, f"{p.name} finalises")
        grades = [g for who, g in d.grades[e.step, e.key].items() if who != OWNER]
        bounds = p.store(e.domain, e.key).block.bounds
        if e.codec.level != max(grades):
            self.fail("G8", f"{p.name} says level {e.codec.level} of the sum of {e.key}, contributors {grades}")
        alike = [d.levels[e.step, e.key][i] for i in range(members) if d.grades[e.step, e.key][i] == max(grades)]
        if e.levels not in alike and mean(e.codec, e.levels, bounds) != max(grades):
            self.fail("G8", f"{p.name} finalises step {e.step} of {e.key} at {e.levels}, contributors at {alike}")

    def on_commit(self, p: LaneProcess, e: fx.CommitOutput, store: BlockStore) -> None:
        if e.step <= store.out_step:
            self.fail("G1", f"{p.name} commits step {e.step} of {e.key} after step {store.out_step}")
        self._compare(e.domain, e.key, e.step, store, p.name)

    def on_output(self, worker: Worker, thread: DomainThread, store: BlockStore, step: int, nonfinite: bool) -> None:
        if store.out_step != step:
            self.fail("G3", f"{worker.name} is told of step {step} of {store.block.key} and finds {store.out_step}")
        self._compare(thread.id, store.block.key, step, store, worker.name)
        if nonfinite != bool(store.out_flags):
            self.fail("G3", f"{worker.name}: step {step} of {store.block.key} nonfinite={nonfinite}")

    def _compare(self, key: DomainKey, block: int, step: int, store: BlockStore, who: str) -> None:
        """G3 and G4: the output is the one of the undisturbed run."""
        d = self.domain(key)
        codec = d.codecs[step, block]
        first = d.oracle.void(step) and block == self.world.first_key(key, step)
        expected = d.oracle.output(block, step, codec, d.schemes[step, block], d.levels[step, block], first)
        if store.output != expected:
            self.fail("G3", f"{who}: output of {block} step {step} is {store.output}, expected {expected}")

    def on_flip(self, p: LaneProcess, e: fx.Flip, store: BlockStore) -> None:
        settled = self.domain(e.domain).watermark.get(p.node.name, 0)
        if e.step > settled:
            self.fail("G4", f"{p.name} flips {e.key} for step {e.step}, settled is {settled}")
        versions = store.owner_residual if e.owner else store.residual
        void = self.domain(e.domain).oracle.void(e.step)
        expected = versions.current if void else 1 - versions.current
        if versions.written != e.step or versions.settled >= e.step or e.version != expected:
            self.fail("G4", f"{p.name} flips {e.key} to {e.version} for step {e.step} (void={void}): {versions}")

    # --------------------------------------------------------------------------------------- control
    def on_settled(self, p: Process, e: ce.LogSettled, ledger: Ledger) -> None:
        d = self.domain(e.domain)
        if e.step != ledger.settled + 1:
            self.fail("G8", f"{p.name} settles step {e.step} after {ledger.settled}")
        d.watermark[p.node.name] = e.step
        void, plan, who = d.settled.setdefault(e.step, (e.void, e.plan, p.name))
        if (void, plan) != (e.void, e.plan):
            self.fail("G8", f"step {e.step}: void={e.void} plan {e.plan} on {p.name}, {void} and {plan} on {who}")
        if e.void != d.oracle.void(e.step):
            self.fail("G8", f"{p.name} settles step {e.step} with void={e.void}")
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
        kept = text.rules if replace else text.rules[-len(rules) :]
        if kept != rules:
            self.fail("G8", f"{p.name} makes plan {text.version} {text.rules} of {rules}, replace={replace}")

    def on_told(self, p: Process, message: messages.ToWorker) -> None:
        """G6: a fault says what failed and what to do."""
        if not isinstance(message, messages.Fault):
            return
        self.faults.append(message)
        f = message
        if f.kind not in KINDS or not f.message or not f.advice:
            self.fail("G6", f"a fault without kind, message or advice: {f}")
        if f.kind in STEP_KINDS and not (f.job and f.epoch and f.step and f.phase and f.missing):
            self.fail("G6", f"a fault of a step without job, epoch, step, phase or missing: {f}")

    def on_answer(self, p: Process, e: ce.AnswerRequest) -> None:
        if e.request in self.answers:
            self.fail("G6", f"request {e.request} is answered twice: {self.answers[e.request]}, {e}")
        self.answers[e.request] = e

    def on_forget(self, p: Process, job: bytes) -> None:
        """G4 at a good end: what shared memory holds back is what the undisturbed run holds back."""
        ended = p.machine.jobs.get(job)
        if ended is None or ended.ended is not None or not self.world.finished_well(job):
            return
        for (key, block), store in p.node.memory.blocks.items():
            if key[0] != job:
                continue
            d = self.domain(key)
            me = self.world.member_index(key, p.node.name)
            expected = d.oracle.block(block)
            for versions, held, want in (
                (store.residual, store.residuals, expected.residuals[me]),
                (store.owner_residual, store.owner_residuals, expected.owner if store.block.owner == me else None),
            ):
                flips = versions.settled < versions.written and not d.oracle.void(versions.written)
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
        links = p.machine.links
        for link in links.values() if touched is None else [links[peer] for peer in touched if peer in links]:
            self._link(p, link)
        if p.lane != CONTROL:
            self._parked(p)

    @staticmethod
    def _answers(p: Process, key: DomainKey) -> int:
        """Bytes of the tiny blocks that go to everyone, of the two steps that are retained."""
        domain = p.machine.domains.get(key) if p.lane != CONTROL else None
        blocks = domain.partitions.values() if domain is not None else ()
        return sum(2 * b.block.nbytes for b in blocks if b.block.nbytes <= SMALL_BYTES)

    def _link(self, p: Process, link: Link) -> None:
        for domain in link.spent:
            out = link.outstanding(domain)
            if out < 0:
                self.fail("credit", f"{p.name} got back {-out} bytes more than it spent from {link.name}")
            # A payload larger than the credit goes alone; what a peer asks for again is not held up by credit.
            bound = max(link.credit, self.world.largest_payload)
            if out > bound and not self.world.everyone and out > bound + self._answers(p, domain):
                self.fail("credit", f"{p.name} has {out} bytes out at {link.name}, credit is {link.credit}")
        if not link.theirs:
            return
        other = self.world.process(link.name, p.lane)
        if other is None or other.incarnation != link.theirs:
            return
        back = other.machine.links.get(p.node.id)
        if back is None or back.theirs != p.incarnation:
            return
        for domain, spent in link.spent.items():
            taken = back.taken.get(domain, 0)
            if taken > spent:
                self.fail("credit", f"{other.name} returned {taken} bytes of {spent} that {p.name} spent")
            # Where the domain is closed the books of it are closed too.
            if link.returned.get(domain, 0) > taken and domain in other.machine.domains:
                self.fail("credit", f"{p.name} got {link.returned[domain]} back, {other.name} returned {taken}")
        if back.received >= link.next_seq:
            self.fail("G1", f"{other.name} received {back.received}, {p.name} sent {link.next_seq - 1}")

    def _parked(self, p: Process) -> None:
        """At an owner, at most (n-1) x credit is parked."""
        machine = p.machine
        for domain in machine.domains.values():
            parked = biggest = 0
            for part in domain.partitions.values():
                for exchange in (x for r in part.rounds.values() for x in r.exchanges):
                    for member, x in exchange.parked.items():
                        if member != domain.config.me:
                            parked += x.nbytes
                            biggest = max(biggest, x.nbytes)
            bound = (len(domain.config.members) - 1) * max(self.world.shape.credit, biggest)
            if parked > bound and not self.world.everyone:
                self.fail("credit", f"{p.name} parks {parked} bytes, bound is {bound}")

    # ------------------------------------------------------------------------------------------- end
    def at_rest(self) -> None:
        """After everyone left and the network is quiet: nothing is held any more."""
        world = self.world
        for node in world.nodes:
            for p in node.processes():
                machine = p.machine
                if not isinstance(p, LaneProcess):
                    if machine.jobs and not world.fatal:
                        self.fail("G5", f"{p.name} still has jobs {[j.record.label for j in machine.jobs.values()]}")
                    continue
                if machine.domains and not world.fatal:
                    self.fail("G5", f"{p.name} still has domains {list(machine.domains)}")
                left = set(p.handles) - p.ghosts
                if not machine.domains and not machine.early.frames and left:
                    self.fail("handles", f"{p.name} leaks {len(left)} payloads")
                for link in machine.links.values():
                    if not machine.domains and (link.spent or link.returned):
                        self.fail("credit", f"{p.name} keeps books of credit at {link.name} for domains that are over")
