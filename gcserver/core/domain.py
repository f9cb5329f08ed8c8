"""One domain on one lane: what it is made of, and what all that happens in it shares.

What may live here: the state of a domain, what its members must agree on, faults, whom a step waits for. What may
not: links and queues (`lane.py`), steps' bookkeeping (`steps.py`), I/O, and what an event does: those are functions
over a domain, one file a subject: `opening.py` (sections, restart, close), `pushes.py`, `encoding.py`, `exchange.py`,
`frames.py`, `completion.py`.

A round, owner scheme:

    push (all local ranks) -> decide, log -> Encode -> Encoded
        owner:  own contribution parked          others: contribution to the owner
        owner:  in member order Accumulate -> all there: Finalise -> Finalised -> aggregate to all, CommitOutput
        others: aggregate -> Decode -> CommitOutput
    CommitOutput -> Notify; last block of a closed step: LogStep, ReportStep; Settled: Flip.

All scheme: the contribution goes to every member, everyone accumulates in member order and finalises
without encoding again. A contribution for a round that is complete here is how a peer that came back asks
for what it missed: the retained payload of that round is the answer.

Two exchanges (codecs with ``rounds`` 2), always through the owner: Finalise of stage 0 gives a sum, which goes to
all; everyone encodes stage 1 from it and contributes that; Finalise of stage 1 gives the result. The owner retains both
aggregates: a member that lost its process redoes both stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gcproto.manifest import Section
from gcproto.wire import Flag, Header
from gcserver.core.effects import LaneEffect, Notify, Release, ReportClosed, ReportFault, ReportWaiting
from gcserver.core.events import DomainConfig, DomainKey, Handle, Plan, Retained, StepRecord
from gcserver.core.rounds import OPERATION, Partition, Round
from gcserver.core.steps import Step, StepBook
from gcserver.core.tuning import UNTUNED

#: Rounds are begun for steps at most so many lags ahead of what is settled: twice what members need.
FAR = 4


@dataclass(slots=True)
class Outward:
    """What a domain needs of its lane: a numbered send, a queued contribution, credit back to a peer."""

    send: Callable[[int, Header, Handle | None, Callable[[], bool]], None]
    queue: Callable[[int, int, int], None]
    #: (peer, bytes, the life of the peer that spent them)
    take: Callable[[int, int, int], None]


@dataclass(slots=True)
class Domain:
    """One domain on one lane. ``out`` collects the effects of the event being handled."""

    config: DomainConfig
    outward: Outward
    lane: int
    incarnation: int
    steps: StepBook
    plans: dict[int, Plan]
    #: (notch, level) that this node is told to encode at
    tuned: tuple[int, int] = UNTUNED
    partitions: dict[int, Partition] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)
    out: list[LaneEffect] = field(default_factory=list)
    gated: dict[int, int] = field(default_factory=dict)
    notices: dict[tuple[int, bool, int | None, bool], list[int]] = field(default_factory=dict)
    #: steps that are over on this lane and not settled yet
    finished: dict[int, StepRecord] = field(default_factory=dict)
    #: blocks that peers contributed to, by steps not closed here yet
    remote: dict[int, set[int]] = field(default_factory=dict)
    #: end of the address space as far as its sections are open
    end: int = 0
    faulted: bool = False
    waiting_said: bool = False
    #: asked for with every frame: what the configuration says of them; node -> member index
    id: DomainKey = field(init=False)
    index: dict[int, int] = field(init=False)
    #: nodes of all members but this one
    others: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        members, me = self.config.members, self.config.me
        self.id = self.config.id
        self.index = {m.node: i for i, m in enumerate(members)}
        self.others = tuple(m.node for i, m in enumerate(members) if i != me)

    # ------------------------------------------------------------------- what members must agree on
    def mismatch(self, step: int, name: str) -> None:
        """A tensor that only some ranks pushed ends the job."""
        self.fault(
            "TensorMismatch",
            f"in step {step} tensor {name!r} was pushed by some ranks and not by others",
            step,
            "push",
            advice="let every rank make the same calls in the same order",
        )

    def same_operation(self, p: Partition, r: Round, flags: int, who: str) -> bool:
        """Whether ``who`` asks for what the round's others ask for, the sum or the mean; if not the job ends."""
        operation = flags & OPERATION
        if r.flags is None:
            r.flags = operation
        elif r.flags != operation:
            ours, theirs = (("the mean" if f & Flag.AVERAGE else "the sum") for f in (r.flags, operation))
            self.fault(
                "TensorMismatch",
                f"tensor {p.name!r}, step {r.step}: {who} asks for {theirs}, others for {ours}",
                r.step,
                "push",
                advice="give the same `average=` on every rank",
            )
            return False
        return True

    def same_codec(self, p: Partition, r: Round, codec: int, level: int, who: str, tunable: bool | None = None) -> bool:
        """Whether ``who`` uses the round's codec, at its level unless levels may differ; if not the job ends.

        ``tunable``: whether they may; None: the round's codec is not known here yet.
        """
        if r.coding is None:
            r.coding = (codec, level, who)
        elif r.coding[0] == codec and (r.coding[1] == level or tunable is None):
            if r.coding[1] != level:
                r.apart = level, who
        elif r.coding[0] != codec or not tunable:
            theirs = (r.coding[2], f"uses codec {r.coding[0]} at level {r.coding[1]}")
            self._apart(p, r, theirs, (who, f"codec {codec} at level {level}"), "codec")
            return False
        return True

    def same_scheme(self, p: Partition, r: Round, everyone: bool, who: str) -> bool:
        """Whether ``who`` takes the round's contributions to go where its others do; if not the job ends."""
        if r.scheme is None:
            r.scheme = (everyone, who)
        elif r.everyone != everyone:
            ways = {True: "to every member", False: "to its owner"}
            self._apart(p, r, (r.scheme[1], f"sends it {ways[r.everyone]}"), (who, ways[everyone]), "scheme")
            return False
        return True

    def _apart(self, p: Partition, r: Round, first: tuple[str, str], other: tuple[str, str], what: str) -> None:
        """Two members, each with what it does to a block of a round that has one ``what``: the job ends."""
        me = self.config.members[self.config.me].name
        self.fault(
            "CorruptFrame",
            f"tensor {p.name!r}, step {r.step}: {' '.join(first)}, {' '.join(other)}; a round has one {what}",
            r.step,
            "exchange",
            tuple(name for name, _ in (first, other) if name != me),
            "run the same release on every node; the step was not averaged",
        )

    def early(self, h: Header) -> bool:
        """Whether a frame is for an epoch or a section that is not open here yet."""
        epoch = self.config.epoch
        return h.epoch > epoch or (h.epoch == epoch and h.key not in self.partitions)

    def far(self, h: Header) -> bool:
        """Whether a frame's step is further ahead than that of any member can be for long.

        Who encodes step t has settled t - lag, to which this node contributed, so t - 2 lag is settled here or about to
        be. Only steps in which nobody pushed anything take a member further; its frames come when this node follows.
        """
        return h.epoch == self.config.epoch and h.step > self.steps.settled + FAR * self.config.lag

    # -------------------------------------------------------------------------------------- payloads
    def give_back(self, h: Header, handle: Handle | None) -> None:
        """A contribution that is of no use: its payload goes, its credit goes back."""
        self.release(handle)
        self.outward.take(h.sender, h.payload_bytes, h.incarnation)

    def release(self, handle: Handle | None) -> None:
        if handle is not None:
            self.out.append(Release(handle))

    def forget(self, p: Partition, but: Callable[[Retained], bool]) -> None:
        """Release what is retained, except where ``but`` says so."""
        for old in p.retained:
            if not but(old):
                self.release(old.handle)
        p.retained = tuple(k for k in p.retained if but(k))

    # --------------------------------------------------------------------------------------- notices
    def notify(self, step: int, nonfinite: bool, key: int, rank: int | None, skipped: bool = False) -> None:
        """Tell local rank ``rank`` (None: all of them) that a block is in its output slot, or never will be."""
        self.notices.setdefault((step, nonfinite, rank, skipped), []).append(key)

    def take_notices(self) -> list[LaneEffect]:
        """What the event just handled has for workers; they hear of it after everything is logged."""
        notices, self.notices = self.notices, {}
        return [
            Notify(self.id, step, tuple(keys), nonfinite, rank, skipped)
            for (step, nonfinite, rank, skipped), keys in notices.items()
        ]

    # ---------------------------------------------------------------------------- faults and waiting
    def fault(
        self, kind: str, message: str, step: int, phase: str, missing: tuple[str, ...] = (), advice: str = ""
    ) -> None:
        """The job cannot go on; the control machine tells everyone."""
        if not self.faulted:
            self.faulted = True
            self.out.append(ReportFault(self.id, kind, message, step, phase, missing, advice))

    @property
    def oldest_step(self) -> int:
        """The step that is held up when something is wrong with a link."""
        return min(self._unfinished(), default=self.steps.settled + 1)

    @property
    def front(self) -> int:
        """The first step that is not over on this lane. Whatever waits for a later one may wait for this one."""
        return min(self._unfinished(), default=max(self.finished, default=self.steps.settled) + 1)

    def _unfinished(self) -> Iterator[int]:
        return (n for n, s in self.steps.open.items() if not s.finished)

    def report_waiting(self, now: float, after: float) -> None:
        """Say whom the oldest open step waits for, once it is older than ``after`` seconds."""
        step = min(self.steps.open.values(), key=lambda s: s.number, default=None)
        if step is None or now - step.opened < after or step.finished:
            if self.waiting_said:
                self.waiting_said = False
                self.out.append(ReportWaiting(self.id, 0, 0.0, "", (), (), 0, self.config.epoch))
            return
        self.waiting_said = True
        if step.is_closed and not step.said_closed:
            # A finished step says what was in it by ReportStep; one that hangs may hang on just that.
            step.said_closed = True
            self.out.append(ReportClosed(self.id, step.number, step.digest))
        phase, missing = self._missing(step)
        names, newest = tuple(sorted(missing)), max(self.steps.open)
        wanted = tuple(missing[name] for name in names)
        self.out.append(
            ReportWaiting(self.id, step.number, step.opened, phase, names, wanted, newest, self.config.epoch)
        )

    def _missing(self, step: Step) -> tuple[str, dict[str, str]]:
        """The phase a step is in, and by name what it waits for."""
        members, me = self.config.members, self.config.me
        absent = {f"local rank {r}" for r in range(self.config.local_ranks) if r not in step.closed}
        contributors: set[str] = set()
        owners: set[str] = set()
        for p in self.partitions.values():
            r = p.rounds.get(step.number)
            if r is None:
                continue
            if r.stage == 0 and r.now.own is None:
                absent |= {f"local rank {i}" for i in range(self.config.local_ranks) if not r.local >> i & 1}
            elif r.everyone or p.block.owner == me:
                contributors |= {members[i].name for i in range(len(members)) if not r.now.have >> i & 1}
            else:
                owners.add(members[p.block.owner].name)
        if not contributors and not owners:
            return "push", dict.fromkeys(absent, "push")
        away = dict.fromkeys(contributors, "contribution") | dict.fromkeys(owners, "aggregate")
        return "exchange", away | dict.fromkeys(contributors & owners, "contribution and aggregate")
