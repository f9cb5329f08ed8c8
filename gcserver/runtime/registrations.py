"""Workers at the supervisor: where they register and declare what they will send.

What may live here: their connections. What may not: what a message leads to (`gcserver.core`), gradients' doorbells (a
lane's, `laneworkers.py`).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gcproto import messages, packed
from gcproto.advice import Advised, AskAdvice
from gcproto.audits import AuditReport
from gcproto.channel import Channel, ChannelClosed
from gcproto.messages import Fault, IAm, Register, Registered, ToWorker, Waiting
from gcproto.packed import MessageError
from gcproto.spans import WorkerSpans
from gcproto.states import AskStanding, Standing
from gcproto.timings import TensorTimes
from gcserver.core import control_events as cx
from gcserver.core import resuming
from gcserver.runtime import keyring, refusals
from gcserver.runtime.knocking import Door
from gcserver.runtime.setup import listen_unix

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

_decode_worker = packed.Decoder[messages.FromWorker](messages.FromWorker)


class Registrations:
    """All worker connections of one supervisor, by descriptor. Listens from its making on; ``start`` serves."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        self.path = supervisor.config.node.socket
        self.listener = listen_unix(str(self.path))
        self.channels: dict[int, Channel[messages.FromWorker]] = {}
        self._door = Door(self.listener, _decode_worker, self._welcome, self._refused)
        #: not accepting for a moment: no descriptors are left
        self.deaf = False

    def start(self) -> None:
        self._s.loop.add_reader(self.listener.fileno(), self._accept)

    def tick(self) -> None:
        """Descriptors may have become free."""
        if self.deaf:
            self.deaf = False
            self.start()

    def close(self) -> None:
        for channel in self.channels.values():
            with contextlib.suppress(ChannelClosed):
                channel.flush()
            channel.close()
        self._door.close()
        self.listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _accept(self) -> None:
        full = self._door.admit()
        if full is not None:
            self._s.warn_once(f"a worker's connection cannot be accepted: {full}")
            self._s.loop.remove_reader(self.listener.fileno())
            self.deaf = True

    def _welcome(self, channel: Channel[messages.FromWorker]) -> None:
        descriptor = channel.fileno()
        self.channels[descriptor] = channel
        self._s.loop.add_reader(descriptor, self._receive, descriptor)

    def _refused(self, why: Fault) -> None:
        self._s.warn_once(f"a worker is refused: {why.message}")

    def _receive(self, descriptor: int) -> None:
        channel = self.channels[descriptor]
        try:
            received = channel.receive()
        except ChannelClosed:
            self._drop(descriptor)
            return
        except MessageError as error:
            self._s.warn_once(f"a worker sent something that is not a message: {error}")
            self._drop(descriptor, refusals.unreadable(error, descriptor in self._s.machine.connections))
            return
        for message, _ in received:
            if isinstance(message, TensorTimes):
                self._s.profiler.on_tensor_times(self._s.machine.connections.get(descriptor), message)
            elif isinstance(message, messages.Reattach) and not self._known(message):
                self._s.count("workers_refused")
                self._s.warn_once(f"a worker without the ticket of rank {message.rank} wants to be it")
                self._drop(descriptor, refusals.no_ticket(message.job, message.rank))
                return
            elif isinstance(message, AuditReport):
                self._s.audits.on_report(descriptor, message)
            elif isinstance(message, WorkerSpans):
                self._s.traces.on_worker(descriptor, message)
            elif isinstance(message, AskAdvice):
                self._advise(descriptor, message)
            elif isinstance(message, AskStanding):
                self._stand(descriptor, message)
            elif isinstance(message, Register) and (why := keyring.unwelcome(self._s.keys, message.keys)):
                self._s.count("keys_refused")
                self._send(descriptor, refusals.unadmitted(self._s.config.node.name, why))
            else:
                self._s.feed(cx.WorkerSaid(descriptor, message))

    def _known(self, m: messages.Reattach) -> bool:
        return self._s.tickets.valid(m.job, m.rank, m.ticket)

    def _advise(self, descriptor: int, message: AskAdvice) -> None:
        channel = self.channels[descriptor]

        def tell(answer: Advised) -> None:
            # Meanwhile the number may have become another connection's.
            if self.channels.get(descriptor) is channel:
                self._send(descriptor, answer)

        self._s.advising.asked(self._s.machine.connections.get(descriptor), message, tell)

    def _stand(self, descriptor: int, message: AskStanding) -> None:
        """Of the worker's own job, whichever domain it names."""
        machine = self._s.machine
        job = machine.jobs.get(machine.connections.get(descriptor, (b"", -1))[0])
        if job is None or (domain := job.domains.get(message.domain)) is None:
            self._send(descriptor, Standing(message.domain))
        else:
            self._send(descriptor, Standing(message.domain, domain.settled, resuming.standing(job, domain)))

    def _drop(self, descriptor: int, why: Fault | None = None) -> None:
        channel = self.channels.pop(descriptor, None)
        if channel is not None:
            self._s.loop.remove_reader(descriptor)
            self._s.loop.remove_writer(descriptor)
            self._s.feed(cx.WorkerGone(descriptor))
            if why is not None:
                refusals.tell(channel, why)
            channel.close()

    def tell(self, e: cx.Tell) -> None:
        """One message to one worker, if it is still there."""
        message = e.message
        if isinstance(message, Registered):
            _, rank = self._s.machine.connections.get(e.connection, (b"", -1))
            ticket, sockets = self._s.tickets.ticket(message.job, rank), tuple(self._s.lanes.sockets())
            message = replace(message, ticket=ticket, lane_sockets=sockets)
        elif isinstance(message, IAm) and self._s.keys is not None:
            message = replace(message, key=self._s.keys.pair.public.decode())
        elif isinstance(message, Waiting):
            message = replace(message, what=self._s.applicants.explained(e.connection, message.what))
        if e.connection in self.channels:
            self._send(e.connection, message)
            if isinstance(message, Registered):
                self._s.traces.worker_up(e.connection, message.job)

    def _send(self, descriptor: int, message: ToWorker) -> None:
        channel = self.channels[descriptor]
        try:
            channel.send(message)
        except ChannelClosed:
            return  # its end of file is on the way
        if channel.backlog:
            self._s.loop.add_writer(descriptor, self._flush, descriptor)

    def _flush(self, descriptor: int) -> None:
        channel = self.channels[descriptor]
        with contextlib.suppress(ChannelClosed):
            channel.flush()
        if not channel.backlog:
            self._s.loop.remove_writer(descriptor)
