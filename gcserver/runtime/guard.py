"""Who may speak to the sockets of one process: CURVE keys, and the answers to ZeroMQ's questions about them.

What may live here: a node's own keys, the admitted ones, ZAP (ZeroMQ's RFC 27), counting who was refused. What may not:
where keys are kept (`gcserver/keys.py`), sockets that carry frames (`transport.py`), what a frame means.

ZeroMQ asks over a socket inside the process, at every handshake, whether a key may connect. The question is answered by
the loop that serves everything else, so there is no thread. Whoever is admitted gets the node's name as its *user id*,
which ZeroMQ attaches to every message of that connection: a frame whose header names another sender is not believed.
ZeroMQ admits everybody while nobody answers; such messages have no user id, and are not believed either.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import zmq
from zmq.utils import z85

from gcproto import wire
from gcserver.keys import Admitted, KeyPair

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
#: At most so often a line about those who were refused, seconds.
SAY_EVERY: Final = 10.0
#: A connection that has not shown an encrypted key after this has failed, seconds.
PATIENCE: Final = 2.0
_NOBLOCK: Final = int(zmq.NOBLOCK)

#: What is counted: an unknown key; a connection that showed none, was meant for another node's or ended before; a frame
#: in the name of another node than the key's.
KEY_REFUSED: Final = "keys_refused"
HANDSHAKE_FAILED: Final = "handshakes_failed"
FRAME_FORGED: Final = "frames_forged"


class Guard:
    """The keys of one process, for one context. To be made before any socket is bound.

    ``count(kind)`` hears of every refusal, ``say(text)`` of some: one line in SAY_EVERY seconds.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        pair: KeyPair,
        admitted: Admitted,
        count: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._pair, self._count, self._say = pair, count, say
        self._keys: dict[int, bytes] = {}
        self._names: dict[bytes, str] = {}
        self._senders: dict[str, int] = {}
        self._said_at, self._unsaid, self._what = -SAY_EVERY, 0, ""
        #: the last key that was refused
        self._stranger = b""
        #: connections that were made, that asked to be let in, that never did; how many were made by which time
        self._knocked = self._asked = self._failed = 0
        self._history: deque[tuple[float, int]] = deque()
        self._zap: Any = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ADDRESS)
        self.admit(admitted)

    def admit(self, admitted: Admitted) -> set[int]:
        """From now on these and no others. Returns the nodes whose key is gone or another one."""
        before = self._keys
        self._keys = {wire.node_id(name): key for name, key in admitted.items()}
        self._names = {key: name for name, key in admitted.items()}
        self._senders = {name: wire.node_id(name) for name in admitted}
        if self._unsaid == 1 and self._stranger in self._names:
            # It came a moment before it was admitted, and comes again.
            self._unsaid = 0
        return {node for node, key in before.items() if self._keys.get(node) != key}

    # ---------------------------------------------------------------------------------------- sockets
    def serve(self, socket: Any) -> None:
        """Make a socket that is not bound yet one that only the admitted can connect to."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)

    def secure(self, socket: Any, peer: int) -> bool:
        """Make a socket that is not connected yet one that talks to ``peer`` only; False: it is not admitted."""
        key = self._keys.get(peer)
        if key is None:
            return False
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, key)
        return True

    def sent_by(self, frame: Any, sender: int) -> bool:
        """Whether a message came on a connection of node ``sender``; what did not is counted."""
        name = user(frame)
        if name is not None and self._senders.get(name) == sender:
            return True
        why = "in the name of another node" if name in self._senders else "whose key is not in security.peers"
        self.refused(FRAME_FORGED, f"a frame of {name or 'a stranger'} {why}")
        return False

    # -------------------------------------------------------------------------------------------- ZAP
    def fileno(self) -> int:
        return int(self._zap.getsockopt(zmq.FD))

    def answer(self) -> None:
        """All questions that wait. The descriptor is edge triggered: this leaves nothing behind."""
        with contextlib.suppress(zmq.Again):
            while True:
                question = self._zap.recv_multipart(_NOBLOCK)
                self._asked += 1
                self._zap.send_multipart(self._decide(question))

    def _decide(self, question: list[bytes]) -> list[bytes]:
        """The answer to version, number, domain, address, identity, mechanism and key of who wants to connect."""
        number = question[1] if len(question) > 1 else b""
        if len(question) != 7 or question[0] != _VERSION or question[5] != b"CURVE" or len(question[6]) != 32:
            return [_VERSION, number, b"500", b"not understood", b"", b""]
        address, key = question[3].decode("ascii", "replace"), z85.encode(question[6])
        name = self._names.get(key)
        if name is None:
            self._stranger = key
            self.refused(KEY_REFUSED, f"{address} with key {key.decode()}, which is not in security.peers")
            return [_VERSION, number, b"400", b"key not admitted", b"", b""]
        return [_VERSION, number, b"200", b"", name.encode(), b""]

    # ------------------------------------------------------------------------------------- refusals
    def refused(self, kind: str, what: str) -> None:
        """Counted; said as long as not too much was."""
        self._count(kind)
        self._unsaid += 1
        self._what = what

    def tick(self, now: float, knocked: int = 0) -> None:
        """``knocked`` more connections were made; count those that never asked, and say what is due.

        ``now``: any monotonic clock, seconds.
        """
        self._knocked += knocked
        self._history.append((now, self._knocked))
        while now - self._history[0][0] >= PATIENCE:
            # Who asked since may have come since: that is made good by the next entries.
            for _ in range(self._history.popleft()[1] - self._asked - self._failed):
                self._failed += 1
                self.refused(HANDSHAKE_FAILED, "a connection that showed no key, or was meant for another node's")
        if self._unsaid and now - self._said_at >= SAY_EVERY:
            more = f" (the last of {self._unsaid} refusals)" if self._unsaid > 1 else ""
            self._say(f"refused: {self._what}{more}")
            self._said_at, self._unsaid = now, 0


def user(frame: Any) -> str | None:
    """Who the handshake of a message's connection said it is; None: nobody."""
    try:
        name: str = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    return name
