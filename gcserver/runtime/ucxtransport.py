"""Frames over UCX: RDMA where the machine has it, else TCP.

What may live here: which peers there are, connections that are made, lost and made again, and the calls of
`transports.py`. What may not: an end of a connection (`ucxends.py`), libucp (`ucp.py`), what a frame means.

Each direction of a pair is a connection of its own, as over ZeroMQ: a node accepts those of its peers and makes one to
each. What is sent before a connection is there waits for it, up to a bound; what was under way on one that is lost is
lost, and who connects again reports that. There is no thread: bytes move when the loop calls. UCX encrypts nothing and
trusts whoever reaches its ports, so there are no keys here (`config.py` refuses them).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from gcproto.wire import HEADER_BYTES
from gcserver.keys import Admitted
from gcserver.runtime import ucxenviron
from gcserver.runtime.transport import BATCH, ZERO_COPY_BYTES, BindError, Payload
from gcserver.runtime.ucp import Context
from gcserver.runtime.ucxends import HELD_BYTES, HELD_FRAMES, End, Incoming, Lost, Outgoing, Received
from gcserver.runtime.ucxgreeting import GreetingError
from gcserver.values import Address, read_tcp

#: A peer that there is no connection to is tried again after this, seconds; the loop's tick may make it longer.
RETRY: Final = 0.1
#: Who was accepted and has not said what it wants after this is dropped, seconds.
PATIENCE: Final = 5.0
#: Connections accepted at once: more than a cluster has nodes, and few enough for what each of them takes.
MOST: Final = 1024
_BACKLOG: Final = 128

#: Where a name leads to.
Place = tuple[str, int]


class _Peer:
    """One peer as this node sends to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.end: Outgoing | None = None
        self.up = False
        #: something that was sent has not arrived, or may not have
        self.missed = False
        self.tried = float("-inf")
        #: why the last attempt came to nothing
        self.lost = ""
        self.place: Future[Place] | None = None
        self.held: deque[tuple[bytes, Payload]] = deque()
        self.held_bytes = 0

    def hold(self, header: bytes, payload: Payload) -> bool:
        """Keep a frame until there is a connection; False: too much waits already."""
        size = len(header) + len(payload)
        if len(self.held) >= HELD_FRAMES or (self.held and self.held_bytes + size > HELD_BYTES):
            self.missed = True
            return False
        self.held.append((header, payload))
        self.held_bytes += size
        return True

    def forget(self) -> None:
        """What waits."""
        self.held.clear()
        self.held_bytes = 0


class UcxTransport:
    """Frames of one process. Not thread safe: it belongs to one loop. Raises UcpUnusable, UcpError, BindError.

    ``say`` hears why a peer cannot be connected to, again and again.
    """

    def __init__(self, listen: str, say: Callable[[str], None] = lambda text: None) -> None:
        address = read_tcp(listen)
        self._say = say
        ucxenviron.refuse_shared_memory(os.environ)
        self._context = Context(ucxenviron.devices(address.loopback, os.environ))
        try:
            self._listener = _listen(address)
        except OSError as error:
            self._context.close()
            raise BindError(f"cannot listen on {listen}: {error.strerror or error}") from error
        self._names = ThreadPoolExecutor(1, "names")
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        #: nobody is accepted while there are no descriptors
        self._shut = False
        self._peers: dict[int, _Peer] = {}
        self._incoming: set[Incoming] = set()
        #: whom an end sends to
        self._owners: dict[End, int] = {}
        #: ends by the descriptors of their sockets and workers
        self._sockets: dict[int, End] = {}
        self._workers: dict[int, End] = {}
        #: ends whose workers may have something to do
        self._awake: set[End] = set()
        self._ready: deque[Received] = deque()
        self._found: list[int] = []
        #: why a peer cannot be connected to, in words
        self.troubles: dict[int, str] = {}
        self.bytes_in = 0
        self.bytes_out = 0

    # ------------------------------------------------------------------------------------------ frames
    def open(self, peer: int, address: str) -> None:
        """Connect to a peer; returns at once, the connection is made in the background. ValueError: no such address."""
        known = self._peers.get(peer)
        if known is not None and known.address == address:
            return
        read_tcp(address)
        if known is None:
            known = self._peers[peer] = _Peer(address)
        known.address, known.place = address, None
        self._reconnect(peer, known)

    def send(self, peer: int, header: bytes, payload: Payload | None, copy: bool = False) -> bool:
        """Queue one frame; False if there is nowhere to. ``copy`` frees the payload at once."""
        to = self._peers.get(peer)
        if to is None:
            return False
        body: Payload = b"" if payload is None else payload
        if copy or len(body) < ZERO_COPY_BYTES:
            body = bytes(body)
        if not to.up:
            kept = to.hold(header, body)
            self.bytes_out += (len(header) + len(body)) * kept
            return kept
        assert to.end is not None
        self.bytes_out += len(header) + len(body)
        try:
            to.end.send(header, body)
        except Lost:
            self._lose(to.end)
            return False
        self._awake.add(to.end)
        return True

    def receive(self) -> Iterator[Received]:
        """Frames that have arrived: header bytes, payload (its memory lives as long as the view)."""
        for descriptor, event in self._poll.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._workers:
                self._awake.add(self._workers[descriptor])
            elif descriptor in self._sockets:
                self._hear(self._sockets[descriptor], event)
        self._work()
        for _ in range(min(BATCH, len(self._ready))):
            header, payload = self._ready.popleft()
            self.bytes_in += len(header) + (len(payload) if payload is not None else 0)
            if len(header) == HEADER_BYTES:
                yield header, payload
            else:
                yield header[:0], None

    def reset(self, peer: int) -> None:
        """Drop the connection to a peer with everything queued for it, and make a new one."""
        if (to := self._peers.get(peer)) is not None:
            self._reconnect(peer, to)

    def close(self, linger_ms: int = 0) -> None:
        """Give all connections up, after at most ``linger_ms`` milliseconds for what is under way."""
        until = time.monotonic() + linger_ms / 1000
        while time.monotonic() < until and any(to.end is not None and to.end.busy for to in self._peers.values()):
            self._work()
        for end in {*self._sockets.values()}:
            self._drop(end)
        for to in self._peers.values():
            to.forget()
        self._names.shutdown(wait=False, cancel_futures=True)
        self._poll.close()
        self._listener.close()
        self._context.close()

    # ---------------------------------------------------------------------------------------- polling
    def admit(self, admitted: Admitted) -> None:
        """There are no keys here."""
        raise TypeError("UCX has no keys; a lane that speaks it is told of none")

    def tick(self, now: float) -> list[int]:
        """To be called every second or so. Returns the peers whose connection was lost and made again since.

        ``now``: any monotonic clock, seconds.
        """
        if self._shut:
            self._shut = False
            self._poll.register(self._listener, select.EPOLLIN)
        for end in [end for end in self._incoming if end.worker is None and time.monotonic() - end.since > PATIENCE]:
            self._drop(end)
        for peer, to in self._peers.items():
            if to.end is None and now - to.tried >= RETRY:
                to.tried = now
                self._try(peer, to)
        found, self._found = self._found, []
        return found

    def unanswered(self, peer: int) -> str:
        """As `ZmqTransport.unanswered`."""
        to = self._peers.get(peer)
        if to is not None and to.lost:
            return f"no connection to {to.address}: {to.lost}"
        return f"no answer yet from {to.address if to is not None else 'its address'}"

    def fileno(self) -> int:
        return self._poll.fileno()

    @property
    def readable(self) -> bool:
        """The descriptor tells of what UCX does only when it was asked to: ask this before waiting on it."""
        self._work()
        return bool(self._ready or self._awake)

    def _work(self) -> None:
        """Let the workers that are awake go on, and put those to sleep that have nothing to do."""
        for end in list(self._awake):
            try:
                asleep = end.work()
                if isinstance(end, Incoming):
                    self._ready += end.take()
                    end.check()
            except Lost:
                self._lose(end)
                continue
            except GreetingError as error:
                self._refused(end, error)
                continue
            if asleep:
                self._awake.discard(end)
            if isinstance(end, Outgoing) and end.open:
                self._up(end)

    # -------------------------------------------------------------------------------------- connections
    def _try(self, peer: int, to: _Peer) -> None:
        """Begin to connect, once it is known where to."""
        try:
            if (place := self._look_up(to)) is None:
                return
            end = Outgoing(self._context, place)
        except (OSError, Lost) as error:
            self._trouble(peer, to, str(error))
            return
        to.end, self._owners[end] = end, peer
        self._sockets[end.socket.fileno()] = end
        self._poll.register(end.socket, select.EPOLLOUT)

    def _look_up(self, to: _Peer) -> Place | None:
        """None: not known yet, ask again. Raises OSError."""
        if to.place is None:
            address = read_tcp(to.address)
            try:
                return _place(address, socket.AI_NUMERICHOST)
            except OSError:
                # A name; nobody knows how long that takes.
                to.place = self._names.submit(_place, address)
        if not to.place.done():
            return None
        place, to.place = to.place, None
        return place.result()

    def _trouble(self, peer: int, to: _Peer, text: str) -> None:
        self.troubles[peer] = f"{to.address}: {text}"
        self._say(f"{to.address} cannot be connected to: {text}")

    def _peer_of(self, end: End) -> tuple[int, _Peer] | None:
        peer = self._owners.get(end)
        return None if peer is None else (peer, self._peers[peer])

    def _hear(self, end: End, event: int) -> None:
        try:
            if isinstance(end, Outgoing) and end.connecting:
                end.connected()
                self._poll.modify(end.socket, select.EPOLLIN)
            elif event & ~select.EPOLLOUT:
                end.hear()
                if end.worker is not None:
                    self._started(end)
        except GreetingError as error:
            self._refused(end, error)
        except Lost as error:
            self._lose(end, str(error))

    def _refused(self, end: End, error: GreetingError) -> None:
        if (found := self._peer_of(end)) is not None:
            self._trouble(*found, str(error))
        self._drop(end)

    def _started(self, end: End) -> None:
        """Both sides know each other: from now on UCX."""
        assert end.worker is not None
        self._workers[end.worker.fileno()] = end
        self._poll.register(end.worker, select.EPOLLIN)
        self._awake.add(end)

    def _up(self, end: Outgoing) -> None:
        """UCX is connected; the first time, what waits for that goes."""
        found = self._peer_of(end)
        if found is None or found[1].up:
            return
        peer, to = found
        to.up, to.lost = True, ""
        self.troubles.pop(peer, None)
        if to.missed:
            to.missed = False
            self._found.append(peer)
        held = list(to.held)
        to.forget()
        try:
            for header, payload in held:
                end.send(header, payload)
        except Lost:
            self._lose(end)
            return
        self._awake.add(end)

    def _accept(self) -> None:
        while len(self._incoming) < MOST:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    break
                continue  # a connection that ended before it was accepted
            sock.setblocking(False)
            end = Incoming(self._context, sock, time.monotonic())
            self._incoming.add(end)
            self._sockets[sock.fileno()] = end
            self._poll.register(sock, select.EPOLLIN)
        # The listener would be ready all the time.
        self._shut = True
        self._poll.unregister(self._listener)

    def _lose(self, end: End, why: str = "") -> None:
        """A connection is gone, or was not made: that is nothing to speak of, the peer may be about to start."""
        if end.worker is not None and isinstance(end, Incoming):
            # What arrived before its sender went is as good as any other frame.
            self._ready += end.rest()
        found = self._peer_of(end)
        self._drop(end)
        if found is None:
            return
        _, to = found
        to.lost = why
        if to.up:
            to.up, to.missed = False, True

    def _drop(self, end: End) -> None:
        """Give an end up with everything that is under way on it."""
        self._awake.discard(end)
        self._sockets.pop(end.socket.fileno(), None)
        self._poll.unregister(end.socket)
        if end.worker is not None and self._workers.pop(end.worker.fileno(), None) is not None:
            self._poll.unregister(end.worker)
        if isinstance(end, Incoming):
            self._incoming.discard(end)
        elif (found := self._peer_of(end)) is not None:
            found[1].end = None
            del self._owners[end]
        end.close()

    def _reconnect(self, peer: int, to: _Peer) -> None:
        if to.end is not None:
            self._drop(to.end)
        to.forget()
        to.up = to.missed = False
        to.tried = time.monotonic()
        self._try(peer, to)


def _listen(address: Address) -> socket.socket:
    where = _place(address)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _place(address: Address, flags: int = 0) -> Place:
    """Where an address leads, over IPv4. Raises OSError."""
    found = socket.getaddrinfo(address.host, address.port, socket.AF_INET, socket.SOCK_STREAM, flags=flags)
    host, port = found[0][4][:2]
    return str(host), int(port)
