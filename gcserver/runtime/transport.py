"""Frames over ZeroMQ: one socket in, one socket out for each peer.

What may live here: sockets, and getting frames into and out of them without copying payloads. What may not:
what a frame means. The interface is five calls wide (`open`, `send`, `receive`, `reset`, `close`); the
simulation has its own, and RDMA will.

Every node binds one PULL socket and connects a PUSH socket to each peer, so each direction of a pair is a
TCP stream of its own. A PUSH socket lives as long as one life of the peer: `reset` closes it with linger 0,
and everything still queued for the earlier life is gone. A dropped connection is reconnected by ZeroMQ, and
reported, because ZeroMQ loses frames silently then.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final

import zmq

from gcproto.wire import HEADER_BYTES, MAX_PAYLOAD_BYTES

#: Payloads from this size on are sent without copying; pyzmq's bookkeeping for that costs some microseconds.
ZERO_COPY_BYTES: Final = 64 << 10
RECONNECT_MS: Final = 50
RECONNECT_MAX_MS: Final = 1000
#: Frames handed out by one call of receive, so that a busy link does not keep the loop from its workers.
BATCH: Final = 64

# As plain numbers: combining enum members costs more than sending a small frame.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

Payload = memoryview | bytes


class BindError(OSError):
    """An address cannot be listened on."""


class ZmqTransport:
    """Frames of one process. Not thread safe: it belongs to one loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listen: str) -> None:
        self._context = context
        self._in = context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        # Refused before it is allocated; a stranger's connection is dropped, not served.
        self._in.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        self._in.setsockopt(zmq.LINGER, 0)
        self._in.setsockopt(zmq.IPV6, "[" in listen)
        try:
            self._in.bind(listen)
        except zmq.ZMQError as error:
            self._in.close(0)
            raise BindError(f"cannot listen on {listen}: {error.strerror}") from error
        self._addresses: dict[int, str] = {}
        self._out: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, zmq.Socket[bytes]] = {}
        self._dropped: set[int] = set()
        #: peers that there was no descriptor for yet
        self._unopened: set[int] = set()
        self.bytes_in = 0
        self.bytes_out = 0

    # -------------------------------------------------------------------------------------- the five
    def open(self, peer: int, address: str) -> None:
        """Connect to a peer; returns at once, the connection is made in the background. ZMQError: no such address."""
        if self._addresses.get(peer) == address:
            return
        before = self._addresses.get(peer)
        self._addresses[peer] = address
        try:
            self._connect(peer)
        except zmq.ZMQError:
            if before is None:
                del self._addresses[peer]
            else:
                self._addresses[peer] = before
            raise

    def send(self, peer: int, header: bytes, payload: Payload | None, copy: bool = False) -> bool:
        """Queue one frame; False if there is no socket for the peer. ``copy`` frees the payload at once."""
        socket = self._out.get(peer)
        if socket is None:
            return False
        self.bytes_out += len(header) + (len(payload) if payload is not None else 0)
        try:
            if payload is None or not len(payload):
                socket.send(header, _NOBLOCK)
            else:
                socket.send(header, _MORE)
                socket.send(payload, _NOBLOCK, copy=copy or len(payload) < ZERO_COPY_BYTES)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Iterator[tuple[memoryview, memoryview | None]]:
        """Frames that have arrived: header bytes, payload (its memory lives as long as the view)."""
        for _ in range(BATCH):
            try:
                first = self._in.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return
            header, payload = first.buffer, None
            self.bytes_in += len(header)
            extra = False
            while first.more:
                # The parts of a message arrive together, so this does not wait.
                first = self._in.recv(copy=False)
                extra = payload is not None
                payload = first.buffer
                self.bytes_in += len(payload)
            if len(header) != HEADER_BYTES or extra:
                yield header[:0], None
            else:
                yield header, payload

    def reset(self, peer: int) -> None:
        """Drop the socket to a peer with everything queued in it, and connect a new one."""
        if peer in self._addresses:
            self._connect(peer)

    def close(self, linger_ms: int = 0) -> None:
        for peer in list(self._out):
            self._disconnect(peer, linger_ms)
        self._in.close(0)

    # ---------------------------------------------------------------------------------------- polling
    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The socket to poll for reading."""
        return self._in

    def fileno(self) -> int:
        return int(self._in.getsockopt(zmq.FD))

    @property
    def readable(self) -> bool:
        """The descriptor is edge triggered: ask this before waiting on it."""
        return bool(self._in.getsockopt(_EVENTS) & _POLLIN)  # type: ignore[operator]

    def reconnected(self) -> list[int]:
        """Peers whose connection was lost and made again since the last call. Tries again what had no descriptor."""
        found = []
        for peer in sorted(self._unopened):
            self._connect(peer)
            if peer not in self._unopened:
                found.append(peer)
        for peer, monitor in self._monitors.items():
            while True:
                try:
                    event = monitor.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                number = int.from_bytes(event[0][:2], "little")
                if number == zmq.EVENT_DISCONNECTED:
                    self._dropped.add(peer)
                elif peer in self._dropped:
                    self._dropped.discard(peer)
                    found.append(peer)
        return found

    def _connect(self, peer: int) -> None:
        self._disconnect(peer, 0)
        self._unopened.discard(peer)
        try:
            socket = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            self._put_off(peer, error)
            return
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.setsockopt(zmq.IPV6, "[" in self._addresses[peer])
        try:
            socket.connect(self._addresses[peer])
        except zmq.ZMQError:
            socket.close(0)
            raise
        try:
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        except zmq.ZMQError as error:
            socket.close(0)
            self._put_off(peer, error)
            return
        self._monitors[peer] = monitor
        self._out[peer] = socket
        self._dropped.discard(peer)

    def _put_off(self, peer: int, error: zmq.ZMQError) -> None:
        """Without a descriptor a peer is connected to later; what is sent until then is asked for again."""
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise error
        self._unopened.add(peer)

    def _disconnect(self, peer: int, linger_ms: int) -> None:
        socket = self._out.pop(peer, None)
        if socket is not None:
            self._monitors.pop(peer, None)
            socket.disable_monitor()
            socket.close(linger_ms)
