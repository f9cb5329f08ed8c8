"""A TCP hop between two daemons that remembers what went over it.

What may live here: forwarding, and taking ZeroMQ's messages out of what was recorded (ZMTP 3, RFC 23, without keys).
What may not: what a frame means.
"""

from __future__ import annotations

import selectors
import socket
import threading
from types import TracebackType

from benchmarks.lab.ports import free_ports

_GREETING = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class Relay:
    """Forwards ``ports`` successive ports to those from ``target`` on. A context manager; ``address``: the first's."""

    def __init__(self, target: str, ports: int) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        first = free_ports(ports)
        self.address = f"tcp://127.0.0.1:{first}"
        self._listeners = [socket.create_server(("127.0.0.1", first + i)) for i in range(ports)]
        self._recorded: list[list[bytearray]] = [[] for _ in range(ports)]
        self._selector = selectors.DefaultSelector()
        for index, listener in enumerate(self._listeners):
            self._selector.register(listener, selectors.EVENT_READ, index)
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def frames(self, index: int) -> list[tuple[bytes, bytes]]:
        """(header, payload) of every message that came to port ``index`` so far, in order."""
        return [message for recorded in self._recorded[index] for message in _messages(bytes(recorded))]

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.1):
                if isinstance(key.data, int):
                    self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
                elif key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # not closed with its other end just now
                    self._forward(key.fileobj, *key.data)  # type: ignore[arg-type]

    def _accept(self, listener: socket.socket, index: int) -> None:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((self._target[0], self._target[1] + index))
        except ConnectionRefusedError:
            near.close()
            return
        self._recorded[index].append(bytearray())
        self._selector.register(near, selectors.EVENT_READ, (far, self._recorded[index][-1]))
        self._selector.register(far, selectors.EVENT_READ, (near, None))

    def _forward(self, source: socket.socket, sink: socket.socket, recorded: bytearray | None) -> None:
        try:
            data = source.recv(1 << 18)
            sink.sendall(data)
        except OSError:
            data = b""
        if recorded is not None:
            recorded += data
        if not data:
            for end in (source, sink):
                self._selector.unregister(end)
                end.close()


def _messages(stream: bytes) -> list[tuple[bytes, bytes]]:
    at, parts, found = _GREETING, [], []
    while at + 2 <= len(stream):
        flags = stream[at]
        width = 8 if flags & _LONG else 1
        size = int.from_bytes(stream[at + 1 : at + 1 + width], "big")
        begin = at + 1 + width
        at = begin + size
        if at > len(stream):
            break
        if flags & _COMMAND:
            continue
        parts.append(stream[begin:at])
        if not flags & _MORE:
            found.append((parts[0], parts[1] if len(parts) > 1 else b""))
            parts = []
    return found
