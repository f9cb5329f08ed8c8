"""Frames over ZeroMQ: one socket in, one socket out for each peer.

What may live here: sockets, and getting frames into and out of them without copying payloads. What may not:
what a frame means, which calls a transport has (`transports.py`).

Every node binds one PULL socket and connects a PUSH socket to each peer, so each direction of a pair is a
TCP stream of its own. A PUSH socket lives as long as one life of the peer: `reset` closes it with linger 0,
and everything still queued for the earlier life is gone. A dropped connection is reconnected by ZeroMQ, and
reported, because ZeroMQ loses frames silently then.

With a :class:`~gcserver.runtime.guard.Guard` all of it is CURVE: the PULL socket is a server that admits the keys on
the list, each PUSH socket a client that talks to its peer's key only. When a key goes, the address is bound anew: that
drops every connection, those of admitted peers come back at once, and what was lost on them is asked for again.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Final

import zmq

from gcproto.wire import HEADER_BYTES, MAX_PAYLOAD_BYTES, sender_hint
from gcserver.keys import Admitted
from gcserver.runtime.guard import Guard

#: Payloads from this size on are sent without copying; pyzmq's bookkeeping for that costs some microseconds.
ZERO_COPY_BYTES: Final = 64 << 10
RECONNECT_MS: Final = 50
RECONNECT_MAX_MS: Final = 1000
#: ZeroMQ gives up a peer that refuses our key or speaks another mechanism; it is tried again after this, seconds.
RETRY: Final = 2.0
#: Frames handed out by one call of receive, so that a busy link does not keep the loop from its workers.
BATCH: Final = 64

# As plain numbers: combining enum members costs more than sending a small frame.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
_PUT_OFF: Final = int(zmq.EVENT_CONNECT_RETRIED)
_DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
_SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_KEY_REFUSED: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_MISUNDERSTOOD: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_CUT_OFF: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)

_WATCHED: Final = _PUT_OFF | _DISCONNECTED | _SUCCEEDED | _KEY_REFUSED | _MISUNDERSTOOD | _CUT_OFF

#: Why there is no connection to a peer.
NO_KEY: Final = "it is not in this node's security.peers"
UNWANTED: Final = "it does not admit this node's key; add that to the security.peers of its daemon"
MISMATCH: Final = (
    "the handshake fails: it has another key than this node's security.peers says, only one of the two has keys, or "
    "something else answers there"
)

Payload = memoryview | bytes


class BindError(OSError):
    """An address cannot be listened on."""


class ZmqTransport:
    """Frames of one process. Not thread safe: it belongs to one loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listen: str, guard: Guard | None = None) -> None:
        self._context, self._listen, self._guard = context, listen, guard
        self._in = context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, 0)
        # Refused before it is allocated; a stranger's connection is dropped, not served.
        self._in.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        self._in.setsockopt(zmq.LINGER, 0)
        self._in.setsockopt(zmq.IPV6, "[" in listen)
        self._knocks: zmq.Socket[bytes] | None = None
        if guard is not None:
            guard.serve(self._in)
            # Not for failed handshakes: ZeroMQ reports a message that cannot be decrypted in the same way, and while
            # somebody listens for that it does not end the connection, which then carries nothing any more.
            self._knocks = self._in.get_monitor_socket(_ACCEPTED)
        try:
            self._in.bind(listen)
        except zmq.ZMQError as error:
            self._close_in()
            raise BindError(f"cannot listen on {listen}: {error.strerror}") from error
        self._addresses: dict[int, str] = {}
        self._out: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, zmq.Socket[bytes]] = {}
        self._dropped: set[int] = set()
        #: peers that there was no descriptor for yet
        self._unopened: set[int] = set()
        self._cut_off: set[int] = set()
        self._retries: dict[int, float] = {}
        #: the address was let go and could not be bound again yet
        self._unbound = False
        #: why a peer cannot be connected to, in words
        self.troubles: dict[int, str] = {}
        #: peers at whose address nobody takes a connection
        self._absent: set[int] = set()
        self.bytes_in = 0
        self.bytes_out = 0

    # ------------------------------------------------------------------------------------------ frames
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
            elif self._guard is None or self._guard.sent_by(first, sender_hint(header)):
                yield header, payload

    def reset(self, peer: int) -> None:
        """Drop the socket to a peer with everything queued in it, and connect a new one."""
        if peer in self._addresses:
            self._try(peer)

    def _try(self, peer: int) -> None:
        """Connect to an address that may be one that nobody has tried yet."""
        try:
            self._connect(peer)
        except zmq.ZMQError as error:
            self.troubles[peer] = f"{self._addresses[peer]}: {error.strerror}"

    def close(self, linger_ms: int = 0) -> None:
        for peer in list(self._out):
            self._disconnect(peer, linger_ms)
        self._close_in()

    def _close_in(self) -> None:
        if self._knocks is not None:
            self._in.disable_monitor()
            self._knocks.close(0)
        self._in.close(0)

    # ------------------------------------------------------------------------------------------- keys
    def admit(self, admitted: Admitted) -> None:
        """Another list of keys: connections of those that are gone from it end. Only with a guard."""
        assert self._guard is not None
        gone = self._guard.admit(admitted)
        for peer in self._addresses:
            if peer in gone or peer not in self._out:
                self._try(peer)
        if gone and not self._unbound:
            self._in.unbind(self._in.getsockopt_string(zmq.LAST_ENDPOINT))
            self._unbound = True
            self._bind_again()

    def _bind_again(self) -> None:
        """ZeroMQ lets an address go in its own time, some milliseconds."""
        try:
            self._in.bind(self._listen)
        except zmq.ZMQError:
            return
        self._unbound = False

    def tick(self, now: float) -> list[int]:
        """To be called every second or so. Returns what :meth:`reconnected` does; ``now`` as for `Guard.tick`."""
        found = self.reconnected()
        for peer, since in list(self._retries.items()):
            if not since:
                self._retries[peer] = now
            elif now - since >= RETRY:
                self._connect(peer)
        if self._guard is not None:
            if self._unbound:
                self._bind_again()
            assert self._knocks is not None
            self._guard.tick(now, sum(1 for _ in _events(self._knocks)))
        return found

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
            if peer in self._out:
                found.append(peer)
        for peer, monitor in self._monitors.items():
            for number in _events(monitor):
                if number == _DISCONNECTED:
                    self._dropped.add(peer)
                elif number == _PUT_OFF:
                    self._absent.add(peer)
                elif number == _SUCCEEDED:
                    self.troubles.pop(peer, None)
                    self._absent.discard(peer)
                    self._cut_off.discard(peer)
                    if peer in self._dropped:
                        self._dropped.discard(peer)
                        found.append(peer)
                elif number == _CUT_OFF and peer not in self._cut_off:
                    # Once, a peer that ends does that too.
                    self._cut_off.add(peer)
                else:
                    self.troubles[peer] = UNWANTED if number == _KEY_REFUSED else MISMATCH
                    if number != _CUT_OFF:
                        self._retries.setdefault(peer, 0.0)
        return found

    def unanswered(self, peer: int) -> str:
        """Where a peer is looked for from which nothing comes, and what is found there."""
        address = self._addresses.get(peer, "its address")
        if peer in self._absent:
            return f"no connection to {address}: nothing listens there, or it cannot be reached"
        return f"no answer yet from {address}"

    def _connect(self, peer: int) -> None:
        self._disconnect(peer, 0)
        self._unopened.discard(peer)
        self._absent.discard(peer)
        self._retries.pop(peer, None)
        try:
            socket = self._context.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            self._put_off(peer, error)
            return
        if self._guard is not None and not self._guard.secure(socket, peer):
            socket.close(0)
            self.troubles[peer] = NO_KEY
            return
        if self.troubles.get(peer) == NO_KEY:
            del self.troubles[peer]
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.setsockopt(zmq.IPV6, "[" in self._addresses[peer])
        # Watched from before the first event on.
        try:
            monitor = socket.get_monitor_socket(_WATCHED)
        except zmq.ZMQError as error:
            socket.close(0)
            self._put_off(peer, error)
            return
        try:
            socket.connect(self._addresses[peer])
        except zmq.ZMQError:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)
            raise
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
            # The reading end lives until nothing is told any more: a thread of ZeroMQ that has an event for an end that
            # is closed waits for another one for ever, and whoever stops the monitor waits for that thread.
            monitor = self._monitors.pop(peer)
            socket.disable_monitor()
            monitor.close(0)
            socket.close(linger_ms)


def _events(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    """What a monitor has seen since it was last asked."""
    while True:
        try:
            event = monitor.recv_multipart(_NOBLOCK)
        except zmq.Again:
            return
        yield int.from_bytes(event[0][:2], "little")
