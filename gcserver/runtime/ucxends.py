"""The two ends of a connection over UCX: who made it sends, who accepted it receives.

What may live here: the TCP connection of the greetings, the UCX worker of one end, and how both end together. What may
not: which peers there are, when connecting is tried again (`ucxtransport.py`), the bytes of greetings
(`ucxgreeting.py`).

Each end has a UCX worker of its own, so that giving up a connection gives up everything that was under way on it.
"""

from __future__ import annotations

import errno
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from typing import Final

from gcproto.wire import MAX_PAYLOAD_BYTES
from gcserver.runtime import ucxgreeting as greeting
from gcserver.runtime.inorder import NUMBER_BYTES, InOrder, OutOfOrder, numbered
from gcserver.runtime.transport import ZERO_COPY_BYTES, Payload
from gcserver.runtime.ucp import Context, Request, UcpError, Worker
from gcserver.runtime.ucxgreeting import GreetingError

#: What is kept for a peer that there is no connection to yet: as much as a link may send unanswered, and some.
HELD_BYTES: Final = 64 << 20
HELD_FRAMES: Final = 4096
#: Rounds of UCX's work in one go, so that a busy connection does not keep the loop from its workers.
ROUNDS: Final = 64
_READ: Final = 1 << 16
_UNREACHED: Final = "it greets, but UCX does not get there: what UCX_TLS and UCX_NET_DEVICES allow, or a firewall"

Received = tuple[memoryview, memoryview | None]


class Lost(Exception):
    """The connection is gone, in words; empty where a peer that ends may do the same."""


class End(ABC):
    """What both ends share: a socket on which nothing is said after the greetings, and a worker after them."""

    def __init__(self, context: Context, sock: socket.socket) -> None:
        self._context, self.socket = context, sock
        self.worker: Worker | None = None
        self._heard = b""

    def hear(self) -> None:
        """Whatever the socket has. Raises Lost, GreetingError."""
        try:
            said = self.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            raise Lost(error.strerror or str(error)) from None
        if not said:
            raise Lost("")
        if self.worker is not None:
            raise Lost("it says more than a greeting")
        self._heard += said
        self.greeted(self._heard)

    @abstractmethod
    def greeted(self, heard: bytes) -> None:
        """Go on from what the other side has said so far. Raises GreetingError, Lost."""

    def say(self, text: bytes) -> None:
        """A greeting fits into the socket's buffer. Raises Lost."""
        try:
            if self.socket.send(text) != len(text):
                raise Lost("the socket takes no greeting")
        except OSError as error:
            raise Lost(error.strerror or str(error)) from None

    def start(self) -> Worker:
        """Raises Lost."""
        try:
            self.worker = Worker(self._context, self.arrived, self.refused, MAX_PAYLOAD_BYTES)
        except UcpError as error:
            raise Lost(str(error)) from None
        return self.worker

    @abstractmethod
    def arrived(self, header: bytes, payload: memoryview | None, request: Request | None) -> None:
        """A message came."""

    @abstractmethod
    def refused(self, header: bytes) -> None:
        """One came whose payload is larger than any frame's."""

    def work(self) -> bool:
        """Let UCX work. True: there is nothing more to do until the worker's descriptor says so. Raises Lost."""
        assert self.worker is not None
        try:
            return any(not self.worker.progress() and self.worker.arm() for _ in range(ROUNDS))
        except UcpError as error:
            raise Lost(str(error)) from None

    def close(self) -> None:
        """With everything that is under way."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        self.socket.close()


class Outgoing(End):
    """The end that sends, once it is ``open``."""

    def __init__(self, context: Context, address: tuple[str, int]) -> None:
        super().__init__(context, socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        self._sent: deque[Request] = deque()
        self._number = 0
        #: UCX has made its own connection: until then nothing may be sent. Of a peer that dies before, UCX 1.13 takes
        #: what it sent for damaged memory, and aborts
        self.open = False
        self._opening: Request | None = None
        #: not before this may anything be read
        self.connecting = True
        status = self.socket.connect_ex(address)
        if status not in (0, errno.EINPROGRESS):
            self.socket.close()
            raise Lost(os.strerror(status))

    def connected(self) -> None:
        """The socket may be written to: either it is connected, or that failed. Raises Lost."""
        self.connecting = False
        if status := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise Lost(os.strerror(status))
        keep_alive(self.socket)
        self.say(greeting.hello())

    def greeted(self, heard: bytes) -> None:
        port = greeting.read_answer(heard)
        if port is None:
            return
        worker = self.start()
        try:
            worker.dial(self.socket.getpeername()[0], port)
            self._opening = worker.flush()
        except UcpError as error:
            raise GreetingError(f"{error}; {_UNREACHED}") from None

    def arrived(self, header: bytes, payload: memoryview | None, request: Request | None) -> None:
        """The end that sends expects none, and drops it."""

    def refused(self, header: bytes) -> None:
        """Nor this."""

    def send(self, header: bytes, payload: Payload) -> None:
        """Raises Lost."""
        assert self.worker is not None
        try:
            large = len(payload) >= ZERO_COPY_BYTES
            request = self.worker.send(numbered(self._number, header), payload, large)
        except UcpError as error:
            raise Lost(str(error)) from None
        self._number += 1
        if request is not None:
            self._sent.append(request)

    def work(self) -> bool:
        assert self.worker is not None
        asleep = super().work()
        while self._sent and self._sent[0].done:
            self._sent.popleft()
        failed = self._opening is not None and self._opening.done and self._opening.status != 0
        if self.worker.broken or failed:
            raise Lost("UCX finds the connection broken") if self.open else GreetingError(f"UCX fails; {_UNREACHED}")
        self.open = self._opening is None or self._opening.done
        return asleep

    @property
    def busy(self) -> bool:
        """Whether something is still on its way."""
        return bool(self._sent)

    def close(self) -> None:
        super().close()
        # Only now: what the worker was sending from had to stay.
        self._sent.clear()


class Incoming(End):
    """The end that receives."""

    def __init__(self, context: Context, sock: socket.socket, since: float) -> None:
        super().__init__(context, sock)
        #: when it was accepted
        self.since = since
        self._order = InOrder()
        self._nonsense = ""
        keep_alive(sock)

    def greeted(self, heard: bytes) -> None:
        if not greeting.read_hello(heard):
            return
        try:
            self.say(greeting.answer(self.start().listen(self.socket.getsockname()[0])))
        except (UcpError, OSError) as error:
            raise Lost(str(error)) from None

    def arrived(self, header: bytes, payload: memoryview | None, request: Request | None) -> None:
        try:
            self._order.add(header, payload, request)
        except OutOfOrder as error:
            self._nonsense = str(error)

    def refused(self, header: bytes) -> None:
        # Its place in the order remains, and nothing else of it.
        self.arrived(header[:NUMBER_BYTES], None, None)

    def take(self) -> list[Received]:
        """Frames that are complete, in order."""
        return [(memoryview(frame.header), frame.payload) for frame in self._order.take()]

    def rest(self) -> list[Received]:
        """What UCX still has of a sender that is gone."""
        try:
            self.work()
        except Lost:
            return []
        return self.take()

    def close(self) -> None:
        super().close()
        # Payloads that did not come whole.
        self._order = InOrder()

    def check(self) -> None:
        """Raises Lost where nothing more can come in order."""
        assert self.worker is not None
        if self._nonsense or self._order.failed or self.worker.broken:
            raise Lost(self._nonsense or "UCX finds the connection broken")


def keep_alive(sock: socket.socket) -> None:
    """A machine that is gone without a word is noticed after some 30 s; links notice sooner, and reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
