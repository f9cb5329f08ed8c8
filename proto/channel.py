"""Messages and descriptors over a Unix socket, between a worker and its daemon.

What may live here: framing (u32 length, then msgpack), partial reads and writes, passing descriptors, the
uid of the other side. What may not: which messages there are (`messages.py`), threads, event loops.

A plain stream socket rather than ZeroMQ's ipc: it passes arena descriptors (SCM_RIGHTS) and credentials
(SO_PEERCRED) on the same connection, shows a dead worker at once as end of file, and needs one wake-up
where ZeroMQ needs two.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from gcproto.packed import MAX_MESSAGE_BYTES, Message, MessageError, encode

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")
MAX_DESCRIPTORS: Final = 64
_READ: Final = 1 << 16


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class Channel(Generic[T]):
    """One connection. The socket is non-blocking; whoever owns it polls :meth:`fileno`.

    ``decode`` turns message bytes into a message of the other side's union. A message that does not decode
    raises :class:`~gcproto.packed.MessageError`; the connection should then be closed. ``descriptors``: how many may
    come with a message. Where none are expected the system closes them: one of the other side's own end, kept here,
    would keep this connection from ever ending.
    """

    def __init__(self, sock: socket.socket, decode: Callable[[object], T], descriptors: int = MAX_DESCRIPTORS) -> None:
        sock.setblocking(False)
        self._room = socket.CMSG_LEN(4 * descriptors) if descriptors else 0
        self._sock = sock
        self._decode = decode
        self._incoming = bytearray()
        self._descriptors: list[int] = []
        self._outgoing: list[tuple[memoryview, Sequence[int]]] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    def peer_uid(self) -> int:
        """The uid the other process had when it connected (SO_PEERCRED)."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(raw)[1])

    # ------------------------------------------------------------------------------------- sending
    @property
    def unsent_descriptors(self) -> int:
        """How many descriptors wait to be written; each is kept open until then."""
        return sum(len(descriptors) for _, descriptors in self._outgoing)

    @property
    def backlog(self) -> bool:
        """Whether something waits to be written: poll for writing, then :meth:`flush`."""
        return bool(self._outgoing)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Queue a message and write what the socket takes now. Raises :class:`ChannelClosed`.

        ``descriptors`` may be closed by the caller at once: the channel keeps copies until they are sent. OSError if no
        copies can be made; nothing is sent then.
        """
        body = encode(message)
        kept: list[int] = []
        try:
            kept.extend(os.dup(d) for d in descriptors)
        except OSError:
            for descriptor in kept:
                os.close(descriptor)
            raise
        self._outgoing.append((memoryview(_LENGTH.pack(len(body)) + body), kept))
        self.flush()

    def send_all(self, messages: Iterable[Message]) -> None:
        """:meth:`send` for several messages without descriptors, written together: the other side wakes once."""
        bodies = [encode(message) for message in messages]
        if bodies:
            self._outgoing.append((memoryview(b"".join(_LENGTH.pack(len(b)) + b for b in bodies)), ()))
            self.flush()

    def flush(self) -> None:
        while self._outgoing:
            data, descriptors = self._outgoing[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                sent = self._sock.sendmsg([data], ancillary) if ancillary else self._sock.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            for descriptor in descriptors:
                os.close(descriptor)
            if sent == len(data):
                self._outgoing.pop(0)
            else:
                # descriptors went with the first byte
                self._outgoing[0] = (data[sent:], ())

    # ----------------------------------------------------------------------------------- receiving
    def receive(self) -> list[tuple[T, list[int]]]:
        """All complete messages that have arrived, each with the descriptors it brought.

        Raises :class:`ChannelClosed` at end of file and :class:`MessageError` for anything malformed.
        Messages received in full before an end of file are returned first.
        """
        closed = False
        # Whoever writes as fast as this reads must not keep the loop here, nor fill memory: the rest comes next time.
        while len(self._incoming) < _LENGTH.size + MAX_MESSAGE_BYTES:
            try:
                data, ancillary, _, _ = self._sock.recvmsg(_READ, self._room)
            except BlockingIOError:
                break
            except OSError:
                closed = True
                break
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(raw[: len(raw) - len(raw) % 4])
                    self._descriptors.extend(received)
            if len(self._descriptors) > MAX_DESCRIPTORS:
                count = len(self._descriptors)
                raise MessageError(f"a message brings at most {MAX_DESCRIPTORS} descriptors, got {count}")
            if not data:
                closed = True
                break
            self._incoming += data
            if len(data) < _READ:
                break
        messages = self._complete()
        if closed and not messages:
            raise ChannelClosed("the other side closed the connection")
        return messages

    def _complete(self) -> list[tuple[T, list[int]]]:
        out: list[tuple[T, list[int]]] = []
        at = 0
        while len(self._incoming) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, at)
            if length > MAX_MESSAGE_BYTES:
                raise MessageError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, got {length}")
            end = at + _LENGTH.size + length
            if len(self._incoming) < end:
                break
            message = self._decode(bytes(self._incoming[at + _LENGTH.size : end]))
            at = end
            out.append((message, []))
        del self._incoming[:at]
        if out and self._descriptors:
            # One message with descriptors is in flight at a time (a worker asks, a lane answers).
            out[-1][1].extend(self._descriptors)
            self._descriptors.clear()
        return out

    def close(self) -> None:
        """Close the socket and every descriptor not sent or not claimed yet."""
        for _, descriptors in self._outgoing:
            for descriptor in descriptors:
                os.close(descriptor)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._outgoing.clear()
        self._descriptors.clear()
        self._sock.close()


def connect(path: str, decode: Callable[[object], T]) -> Channel[T]:
    """Connect to a daemon's socket. Raises OSError (FileNotFoundError, ConnectionRefusedError, ...)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return Channel(sock, decode)
