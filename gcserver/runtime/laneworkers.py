"""A lane's workers: doorbells from them, doorbells and arena descriptors to them.

What may live here: their connections, and what has to wait until its domain is there. What may not: registration (the
supervisor's, `registrations.py`), rounds (`gcserver.core`), the loop (`lane.py`).
"""

from __future__ import annotations

import os
import select
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gcproto import lane_messages, packed
from gcproto.channel import MAX_DESCRIPTORS, Channel, ChannelClosed
from gcproto.lane_messages import Attach, Done, Mapped, MapSection, Push
from gcproto.messages import Fault
from gcproto.packed import MessageError
from gcproto.states import AskStates, GiveStates
from gcserver.core import events as ev
from gcserver.core.effects import Notify
from gcserver.runtime import refusals, shortage
from gcserver.runtime.checkpoints import Checkpoints, Unfit
from gcserver.runtime.knocking import Door
from gcserver.runtime.lanelink import LaneTrouble
from gcserver.runtime.tickets import Tickets

if TYPE_CHECKING:
    from gcserver.runtime.lane import LaneProcess

#: Most messages of one worker that wait for what they are about: a step of many single calls after a restart.
MAX_WAITING: Final = 1 << 17
_decode_worker = packed.Decoder[lane_messages.FromLaneWorker](lane_messages.FromLaneWorker)


@dataclass(slots=True)
class Worker:
    """A worker's connection. ``rank`` is its global rank once it attached."""

    channel: Channel[lane_messages.FromLaneWorker]
    job: bytes = b""
    rank: int = -1
    #: how many of its messages wait for their domain or section
    waiting: int = 0
    #: what it asks or brings of states and is not answered yet
    states: AskStates | GiveStates | None = None


class Unwelcome(Exception):
    """A worker that is sent away. ``why`` is what it is told."""

    def __init__(self, why: Fault) -> None:
        super().__init__(why.message)
        self.why = why


class LaneWorkers:
    """All worker connections of one lane."""

    def __init__(self, process: LaneProcess, listener: socket.socket, tickets: Tickets) -> None:
        self._p, self._poller, self._tickets = process, process.poller, tickets
        self.listener = listener
        self._door = Door(listener, _decode_worker, self._welcome, self._refused)
        self.connections: dict[int, Worker] = {}
        self.ranks: dict[tuple[bytes, int], Worker] = {}
        self.waiting_maps: list[tuple[Worker, MapSection]] = []
        self.waiting_pushes: list[tuple[Worker, Push]] = []
        self._checkpoints = Checkpoints(process)
        #: not accepting for a moment: no descriptors are left
        self.deaf = False

    def close(self) -> None:
        """Hang up on all of them."""
        for worker in self.connections.values():
            worker.channel.close()
        self._door.close()

    def accept(self) -> None:
        """Whoever knocks."""
        full = self._door.admit()
        if full is not None:
            self._p.trouble_once(f"a worker's connection cannot be accepted: {full}")
            self._poller.modify(self.listener.fileno(), 0)
            self.deaf = True

    def _welcome(self, channel: Channel[lane_messages.FromLaneWorker]) -> None:
        self.connections[channel.fileno()] = Worker(channel)
        self._poller.register(channel.fileno(), select.EPOLLIN)

    def _refused(self, why: Fault) -> None:
        self._p.counters.count("workers_refused", 0)

    def serve(self, worker: Worker, ready: int) -> None:
        """What the poll says of a connection."""
        try:
            if ready & select.EPOLLOUT:
                worker.channel.flush()
                if not worker.channel.backlog:
                    self._poller.modify(worker.channel.fileno(), select.EPOLLIN)
                    self._answer(worker)
            if ready & ~select.EPOLLOUT:
                for message, _ in worker.channel.receive():
                    self._from_worker(worker, message)
        except ChannelClosed:
            self._drop(worker.channel.fileno())
        except Unwelcome as error:
            self._send_away(worker, error.why)
        except MessageError as error:
            self._p.trouble_once(f"a worker sent something that is not a message: {error}")
            refusals.tell(worker.channel, refusals.unreadable(error, joined=True))
            self._drop(worker.channel.fileno())

    def _send_away(self, worker: Worker, why: Fault) -> None:
        self._p.counters.count("workers_refused", 0)
        self._p.trouble_once(f"a worker is sent away: {why.message}")
        refusals.tell(worker.channel, why)
        self._drop(worker.channel.fileno())

    def _drop(self, descriptor: int) -> None:
        worker = self.connections.pop(descriptor)
        self._poller.unregister(descriptor)
        if self.ranks.get((worker.job, worker.rank)) is worker:
            del self.ranks[worker.job, worker.rank]
        worker.channel.close()

    def _from_worker(self, worker: Worker, message: lane_messages.FromLaneWorker) -> None:
        if isinstance(message, Attach):
            self._attach(worker, message)
        elif worker.rank < 0:
            raise Unwelcome(refusals.out_of_order(b"", "its first message was no Attach"))
        elif isinstance(message, MapSection):
            self._map(worker, message)
        elif isinstance(message, AskStates | GiveStates):
            if worker.states is not None:
                raise Unwelcome(refusals.out_of_order(worker.job, "it asks for states before it has the last answer"))
            worker.states = message
            self._answer(worker)
        else:
            self._push(worker, message)

    def _attach(self, worker: Worker, message: Attach) -> None:
        """Whose arena a connection may name is said once, and proved."""
        if worker.rank >= 0:
            raise Unwelcome(refusals.out_of_order(worker.job, "it attached a second time"))
        if message.rank < 0 or not self._tickets.valid(message.job, message.rank, message.ticket):
            raise Unwelcome(refusals.no_ticket(message.job, message.rank))
        worker.job, worker.rank = message.job, message.rank
        self.ranks[message.job, message.rank] = worker

    def _wait(self, worker: Worker) -> None:
        """One more of its messages has to wait."""
        worker.waiting += 1
        if worker.waiting > MAX_WAITING:
            raise Unwelcome(refusals.out_of_order(worker.job, f"more than {MAX_WAITING} of its messages wait"))

    def _push(self, worker: Worker, push: Push) -> None:
        domain = (worker.job, push.domain)
        memory = self._p.executor.domains.get(domain)
        if memory is None:
            # Restarted a moment ago and not told of the job yet: the worker's place in it is not known either.
            if worker.job not in self._p.machine.ended:
                self._wait(worker)
                self.waiting_pushes.append((worker, push))
            return
        if worker.rank not in memory.config.ranks:
            self._p.trouble_once(f"rank {worker.rank} pushed to a process group it is not in")
            return
        self._p.reports.began.setdefault((domain, push.step), time.monotonic())
        rank = memory.config.ranks.index(worker.rank)
        self._p.feed(ev.Pushed(domain, rank, push.step, push.keys, push.close, push.flags))

    def _map(self, worker: Worker, request: MapSection) -> None:
        """Answer with the chunks the worker does not have yet; wait if the section is still to come."""
        memory = self._p.executor.domains.get((worker.job, request.domain))
        if memory is None or request.index >= memory.opened:
            if worker.job not in self._p.machine.ended:
                self._wait(worker)
                self.waiting_maps.append((worker, request))
            return
        if worker.channel.unsent_descriptors >= MAX_DESCRIPTORS:
            raise Unwelcome(refusals.out_of_order(worker.job, "it asks for arenas and does not read the answers"))
        chunks = memory.chunks[request.have :]
        sizes = tuple(c.size for c in chunks)
        descriptors: list[int] = []
        try:
            descriptors.extend(c.open_descriptor() for c in chunks)
            self._tell(worker, Mapped(request.domain, request.index, request.have, sizes), descriptors)
        except OSError as error:
            # The job is being removed, or descriptors are exhausted.
            kind, advice = shortage.kind_of(error)
            self._p.send_up(LaneTrouble(worker.job, kind, f"an arena cannot be opened: {error}", advice))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _answer(self, worker: Worker) -> None:
        """What it asks of states, if that can be said and it has read everything else."""
        if worker.states is None or worker.channel.backlog:
            return
        try:
            answer = self._checkpoints.answer(worker.job, worker.rank, worker.states)
        except Unfit as error:
            raise Unwelcome(error.why) from error
        if answer is not None:
            worker.states = None
            self._tell(worker, answer)

    def answer_all(self) -> None:
        """A step has settled, or memory is there: who waits for states gets them."""
        for worker in [w for w in self.connections.values() if w.states is not None]:
            try:
                self._answer(worker)
            except Unwelcome as error:
                self._send_away(worker, error.why)

    def _tell(self, worker: Worker, message: lane_messages.ToLaneWorker, descriptors: list[int] | None = None) -> None:
        try:
            worker.channel.send(message, descriptors or ())
        except ChannelClosed:
            return
        if worker.channel.backlog:
            self._poller.modify(worker.channel.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def notify(self, e: Notify) -> None:
        """Ring those whose blocks are out."""
        memory = self._p.executor.domains.get(e.domain)
        if memory is None:
            return
        done = Done(e.domain[1], e.step, e.keys, e.nonfinite, e.skipped, memory.config.epoch)
        for index, rank in enumerate(memory.config.ranks):
            worker = self.ranks.get((e.domain[0], rank))
            if worker is not None and e.rank in (None, index):
                self._tell(worker, done)

    def drop_job(self, job: bytes) -> None:
        for descriptor, worker in list(self.connections.items()):
            if worker.job == job:
                self._drop(descriptor)

    def domain_opened(self) -> None:
        """Pushes that came before their domain get another try."""
        waiting, self.waiting_pushes = self.waiting_pushes, []
        for worker, push in waiting:
            worker.waiting -= 1
            self._push(worker, push)

    def section_opened(self) -> None:
        """So do the requests for its memory."""
        waiting, self.waiting_maps = self.waiting_maps, []
        for worker, request in waiting:
            worker.waiting -= 1
            if self.connections.get(worker.channel.fileno()) is not worker:
                continue  # gone, or sent away for an earlier one of these
            try:
                self._map(worker, request)
            except Unwelcome as error:
                self._send_away(worker, error.why)
        self.answer_all()

    def housekeeping(self) -> None:
        """Forget what nobody will ask for any more."""
        if self.deaf:
            self.deaf = False
            self._poller.modify(self.listener.fileno(), select.EPOLLIN)
        alive = [w for w in self.connections.values() if w.job not in self._p.machine.ended]
        if self.waiting_maps:
            self.waiting_maps = [(w, m) for w, m in self.waiting_maps if w in alive]
        if self.waiting_pushes:
            self.waiting_pushes = [(w, p) for w, p in self.waiting_pushes if w in alive]
