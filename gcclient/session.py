"""A worker's membership in a job: registration, domains, failure.

What may live here: the life of a session from `init()` to `shutdown()`, what the daemon's messages mean, waiting
with a deadline. What may not: reading sockets (`daemon.py`), layouts (`domain.py`), tensors.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

from gcclient import checkpoint, reach, tracing
from gcclient.admission import Admission
from gcclient.advice import Asking
from gcclient.arena import ArenaError, BlockPlace, failure
from gcclient.arguments import Terms
from gcclient.bell import Bell
from gcclient.counters import Counters
from gcclient.daemon import CONTROL, Daemon, Link
from gcclient.domain import Domain
from gcclient.errors import GradcommError, NotInitialized, StepTimeout, from_fault, unanswered
from gcclient.membership import Membership
from gcclient.ranks import World
from gcclient.rendezvous import Introduction
from gcclient.waiters import Finishing, Pending, Watched
from gcproto import advice, lane_messages, messages, packed
from gcproto.audits import AuditAnswer
from gcproto.epoch_messages import DomainFacts, NodesWait
from gcproto.manifest import ManifestError, Section, TensorSpec
from gcproto.messages import DeclareDomain, DeclareSection, Register, Registered
from gcproto.packed import Message

log = logging.getLogger("gcclient")

#: Whoever waits says so this often, seconds.
SAY_EVERY: Final = 5.0
#: The daemon decides about deadlines; the worker only notices, this much later, that it did not.
GRACE: Final = 30.0
#: The daemon is given this long to read the goodbye, seconds.
GOODBYE_FOR: Final = 1.0
VERSION: Final = "0.1.0"


class Session:
    """One worker in one job. ``connect``, then ``register``; ``close`` once."""

    def __init__(self, label: str, socket: str) -> None:
        self.label = label
        self.socket = socket
        self.world: World | None = None
        self.registered: Registered | None = None
        self.identity: messages.IAm | None = None
        self.failure: GradcommError | None = None
        self.domains: dict[int, Domain] = {}
        self.counters = Counters()
        self.tracing = tracing.Tracing()
        #: what is to be finished before an orderly goodbye
        self.leaving: WeakSet[Finishing] = WeakSet()
        self.pending: set[Pending] = set()
        #: the newest closed step of each DDP state
        self.watched: dict[int, Watched] = {}
        #: DDP states and optimizers made so far, by kind and the ranks they span
        self.models: dict[tuple[str, tuple[int, ...]], int] = {}
        #: who hears what an audit of a domain led to
        self.audited: dict[int, Callable[[AuditAnswer], None]] = {}
        self.daemon = Daemon(self)
        self.bell = Bell(self._not_brought)
        self.asking = Asking(self)
        self.checkpoints: checkpoint.Checkpoints = checkpoint.Checkpoints(self)
        self.membership = Membership()
        self.admission = Admission(self)
        #: domains that were there when this worker came into a running job, by number
        self.found: dict[int, DomainFacts] = {}
        self.pid = os.getpid()
        self._declaring = threading.RLock()
        self._descriptors: list[deque[int]] = []
        self._asking: list[Message] = []
        #: False between a new connection and the daemon's answer to it; what is declared meanwhile waits for that
        self._attached = True
        #: how often a daemon has taken this worker: once, and again by each that was started in its place
        self.taken = 0
        self._waiting_said = 0.0
        self._waiting_for = ""

    # ---------------------------------------------------------------------------------- registration
    def connect(self) -> None:
        """Reach the daemon. Raises :class:`NoDaemon`, :class:`NotAuthorised`."""
        reach.connect(self.daemon, self.socket, self.label)

    def who(self) -> messages.IAm:
        """Ask the daemon for its name and address."""
        self._ask(messages.WhoAreYou())
        self.wait_for(lambda: self.identity is not None, "the daemon to say its name", "join", GRACE)
        assert self.identity is not None
        return self.identity

    def register(self, world: World, introduction: Introduction, terms: Terms, patience: float) -> None:
        """Join the job; returns when all ranks are there. Raises what the daemon answers otherwise."""
        self.world = world
        number = secrets.token_bytes(16) if world.rank == 0 else b""
        self._ask(Register(
            self.label, world.rank, world.size, world.local_rank, world.local_size, self.pid, number, terms.deadline,
            terms.on_loss, introduction.peers, VERSION, terms.seed, terms.plan, terms.quality, introduction.keys,
            introduction.token, terms.controller,
        ))  # fmt: skip
        self.wait_for(lambda: self.registered is not None, "the job to form", "join", patience + GRACE)
        assert self.registered is not None
        self.found = {facts.declared.domain: facts for facts in self.registered.domains}
        self.admission.begin()
        self._descriptors = [deque() for _ in self.registered.lane_sockets]
        self.daemon.connect_lanes(self.registered.lane_sockets)
        self.daemon.start()

    def _ask(self, message: Message) -> None:
        """Send what is asked again should the daemon restart before it answers."""
        with self.daemon.control.sending:
            self._asking = [message]
            self.daemon.control.post(message)

    @property
    def job(self) -> Registered:
        assert self.registered is not None
        return self.registered

    @property
    def patience(self) -> float:
        """How long to wait for what the daemon should have ended the wait for by then, seconds."""
        return self.job.deadline + GRACE

    @property
    def me(self) -> World:
        assert self.world is not None
        return self.world

    # ------------------------------------------------------------------------------------- messages
    def on_message(self, lane: int, message: Any, descriptors: list[int]) -> None:
        if descriptors and lane != CONTROL:
            self._descriptors[lane].extend(descriptors)
        try:
            _HANDLERS[type(message)](self, lane, message)
        except (ArenaError, ManifestError) as error:
            self.fail(failure(error, self.label))

    def _on_done(self, lane: int, message: lane_messages.Done) -> None:
        if (domain := self.domains.get(message.domain)) is not None:
            self.membership.heard(message.epoch)
            domain.on_done(message)

    def _on_mapped(self, lane: int, message: lane_messages.Mapped) -> None:
        waiting = self._descriptors[lane]
        descriptors = [waiting.popleft() for _ in range(min(len(message.sizes), len(waiting)))]
        domain = self.domains.get(message.domain)
        request = domain.maps[lane] if domain is not None else None
        if domain is None or request is None or message.first != request.have:
            # The answer to a question asked twice, around a restart.
            for descriptor in descriptors:
                os.close(descriptor)
            return
        domain.arenas[lane].map(message.first, message.sizes, descriptors)
        domain.maps[lane] = None

    def _on_agreed(self, lane: int, message: messages.SectionAgreed) -> None:
        if (domain := self.domains.get(message.domain)) is not None:
            domain.agreed = max(domain.agreed, message.index + 1)

    def _on_registered(self, lane: int, message: Registered) -> None:
        control = self.daemon.control
        self.tracing.hold()
        with control.sending:
            self.registered = message
            self.membership.on_registered(message)
            self._attached = True
            self.taken += 1
            for domain in self.domains.values():
                control.post(domain.declared)
                for section in domain.sections:
                    control.post(section)
            self.admission.again()
            self.asking.again()
            self.checkpoints.again()
        if self.daemon.lanes:
            self.daemon.connect_lanes(message.lane_sockets)

    def _on_waiting(self, lane: int, message: messages.Waiting) -> None:
        now = time.monotonic()
        self._waiting_for = message.what
        if now - self._waiting_said >= SAY_EVERY:
            self._waiting_said = now
            log.warning("waiting for %s", message.what)

    def _on_fault(self, lane: int, message: messages.Fault) -> None:
        self.fail(from_fault(message, self.label, self._waiting_for))

    def on_connected(self, link: Link) -> None:
        """Called with the link's sending lock held, so that nothing newer overtakes."""
        if self.registered is None:
            for message in self._asking:
                link.post(message)
            return
        me = self.me.rank
        if link.lane == CONTROL:
            self._attached = False
            link.post(messages.Reattach(self.registered.job, me, self.pid, self.registered.ticket))
            return
        for stale in self._descriptors[link.lane]:
            os.close(stale)
        self._descriptors[link.lane].clear()
        link.post(lane_messages.Attach(self.registered.job, me, self.registered.ticket))
        for domain in list(self.domains.values()):
            for message in domain.to_repeat(link.lane):
                link.post(message)
            if not self.registered.commits:
                domain.scan(link.lane)

    def on_lost(self, link: Link, seconds: float) -> None:
        if seconds > (self.job.deadline if self.registered else reach.CONNECT_FOR):
            self.fail(reach.lost(link, seconds, self.label))

    def on_refused(self, link: Link) -> None:
        self.fail(reach.refused(link, self.label, self.registered is not None))

    @property
    def over(self) -> bool:
        return self.failure is not None

    def on_quiet(self) -> None:
        """Speak for those who wait inside torch, and end their wait should the daemon have failed to."""
        for watched in list(self.watched.values()):
            waiting = watched.waiting()
            if waiting is None or self.failure is not None:
                continue
            what, step, seconds = waiting
            if seconds > self.patience:
                self.fail(unanswered(what, self.label, step, seconds))
            elif seconds > 2 * SAY_EVERY:
                log.warning("%s: no result of step %d since %.0f s", what, step, seconds)

    # ---------------------------------------------------------------------------------------- failure
    def fail(self, error: GradcommError) -> None:
        """The job is over: everything pending and everything later fails with ``error``."""
        if self.failure is not None:
            return
        self.failure = error
        for pending in list(self.pending):
            pending.fail(error.again())
        self.pending.clear()
        self.daemon.wake()

    def _not_brought(self, error: Exception) -> None:
        what = f"gradients could not be copied from their device: {error}"
        self.fail(GradcommError(what, job=self.label, phase="push", advice="look at the device's own errors"))

    def check(self) -> None:
        """Raise if this session cannot be used any more."""
        if self.failure is not None:
            raise self.failure.again()
        if self.daemon.closed or os.getpid() != self.pid:
            raise NotInitialized("gcclient is not initialised in this process", advice="call gcclient.init() first")

    def wait_for(self, ready: Callable[[], Any], what: str, phase: str, limit: float) -> None:
        """Wait until ``ready()``, saying every few seconds what for. Raises the job's failure, or
        :class:`StepTimeout` after ``limit`` seconds."""
        began = time.monotonic()
        try:
            while not self.daemon.wait(lambda: bool(ready()) or self.failure is not None, SAY_EVERY):
                self.check()
                elapsed = time.monotonic() - began
                if elapsed > limit:
                    raise StepTimeout(
                        f"waited in vain for {what}",
                        job=self.label,
                        phase=phase,
                        missing=(self._waiting_for,) if self._waiting_for else (),
                        elapsed=elapsed,
                        advice="look at the other ranks' logs; raise job.deadline if they are merely slow",
                    )
                log.warning("waiting for %s since %.0f s", what, elapsed)
            if not ready():
                self.check()
        finally:
            # Not when a wait begins: the daemon's word may have come since it was asked.
            self._waiting_for = ""

    def wait_result(self, ready: Callable[[], bool], what: str, step: int, began: float) -> None:
        """Wait until ``ready()`` for the result of a step, saying now and then what for.

        ``began``: when the wait began (``time.monotonic()``). Raises the job's failure, :class:`StepTimeout` where the
        daemon should have ended the wait and did not.
        """
        while not self.daemon.wait(ready, SAY_EVERY):
            self.check()
            elapsed = time.monotonic() - began
            if elapsed > self.patience:
                raise unanswered(what, self.label, step, elapsed)
            if elapsed > 2 * SAY_EVERY:
                log.warning("%s: no result since %.0f s", what, elapsed)

    # ---------------------------------------------------------------------------------------- domains
    def domain(self, declared: DeclareDomain) -> Domain:
        """The domain of that number, declared with its first use. All its ranks must declare it alike."""
        number, label = declared.domain, declared.label
        with self._declaring:
            if number in self.domains:
                return self.domains[number]
            declared = self.checkpoints.resumed(declared)
            domain = Domain.in_job(declared, self.job, self.me.rank, self._post_lane, self.bell)
            domain.tracing = self.tracing
            self.announce(domain.declared, lambda: self.domains.update({number: domain}))
            self.checkpoints.lay_out(domain)
            if (found := self.found.pop(number, None)) is not None:
                domain.come_into(found)
                self.wait_for(lambda: domain.mapped, f"the arena of {label}", "declare", self.patience)
            return domain

    def _post_lane(self, lane: int, record: Callable[[], None], message: Message) -> None:
        with (link := self.daemon.lanes[lane]).sending:
            record()
            link.post(message)

    def declare(self, domain: Domain, tensors: tuple[TensorSpec, ...], cuts: tuple[int, ...] = ()) -> list[BlockPlace]:
        """Declare the next section of a domain; returns its blocks once all ranks agreed and memory is mapped.

        ``cuts``: the tensors at which its groups after the first begin.
        """
        with self._declaring:
            self.check()
            if (known := domain.take_found(tensors, cuts)) is not None:
                return domain.take_up(known)
            self.checkpoints.check_single(domain, tensors)
            section = Section(len(domain.sections), tensors, cuts)
            message = DeclareSection(domain.id, section, domain.step + 1)
            self.announce(message, lambda: domain.sections.append(message))
            names = f"{tensors[0].describe()}" + (f" and {len(tensors) - 1} more" if len(tensors) > 1 else "")
            ready = f"all ranks to declare {names}"
            self.wait_for(lambda: domain.agreed > section.index, ready, "declare", self.patience)
            domain.lay_out(section)
            self.wait_for(lambda: domain.mapped, f"the arena of {names}", "declare", self.patience)
            self.checkpoints.bring(domain, section)
            return domain.take_up(section.index)

    def announce(self, message: Message, record: Callable[[], None]) -> None:
        """Tell the daemon now, or once it has answered; ``record`` notes what it must hear again after a restart.

        What cannot be encoded raises before anything is recorded: what later declarations count must have been sent.
        """
        packed.encode(message)
        with self.daemon.control.sending:
            record()
            if self._attached:
                self.daemon.control.post(message)

    def inform(self, message: Message) -> None:
        """Tell the daemon what it can do without: not while it restarts, and not again afterwards."""
        with self.daemon.control.sending:
            if self._attached:
                self.daemon.control.post(message)

    # ---------------------------------------------------------------------------------------- the end
    def close(self, orderly: bool) -> None:
        """Leave the job. Not ``orderly``: without goodbye, so that the others hear at once that this rank is lost."""
        if self.daemon.closed:
            return
        if orderly and self.registered is not None:
            self.bell.wait_quiet(GOODBYE_FOR)
            tracing.end(self)
            self.daemon.control.post(messages.Unregister())
            until = time.monotonic() + GOODBYE_FOR  # to who found the socket closed first it would be a loss
            while not self.daemon.control.heard() and time.monotonic() < until:
                time.sleep(0.001)
        self.daemon.close()
        gone = NotInitialized("gcclient was shut down", job=self.label, advice="synchronize handles before shutdown()")
        self.fail(gone)
        for domain in self.domains.values():
            domain.close()
        self.domains.clear()
        self.watched.clear()


_HANDLERS: dict[type, Callable[[Session, int, Any], None]] = {
    lane_messages.Done: Session._on_done,
    lane_messages.Mapped: Session._on_mapped,
    messages.SectionAgreed: Session._on_agreed,
    Registered: Session._on_registered,
    messages.EpochChanged: lambda self, lane, m: self.membership.on_epoch(m.epoch, m.members, m.admissions),
    NodesWait: lambda self, lane, message: self.membership.knocked(message.nodes),
    messages.IAm: lambda self, lane, message: setattr(self, "identity", message),
    messages.Waiting: Session._on_waiting,
    advice.Advised: lambda self, lane, message: self.asking.on_answer(message),
    messages.Fault: Session._on_fault,
    AuditAnswer: lambda self, lane, message: self.audited[message.domain](message),
    **checkpoint.HANDLERS,
    **tracing.HANDLERS,
}
