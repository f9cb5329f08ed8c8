"""The other daemons, as the supervisor is connected to them: the control link.

What may live here: which peers are known under which address, and their frames up to the control machine. What may not:
what a frame means (`gcserver.core`), how frames travel (`transport.py`), lanes' links (`lane.py`).
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from gcproto import wire
from gcproto.packed import MessageError
from gcproto.wire import FrameError, FrameType
from gcserver.core import events as ev
from gcserver.runtime import roll
from gcserver.runtime.guard import Guard
from gcserver.runtime.lanelink import AddPeer
from gcserver.runtime.linkstates import LinkStates
from gcserver.runtime.roll import Roll
from gcserver.runtime.setup import lane_address
from gcserver.runtime.transport import BindError, ZmqTransport
from gcserver.values import read_tcp

if TYPE_CHECKING:
    from gcserver.runtime.supervisor import Supervisor

log = logging.getLogger("gcserver")


class Peers:
    """The control link of one daemon. Raises BindError if its address cannot be listened on."""

    transport: ZmqTransport

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        #: of each peer by name
        self.addresses: dict[str, str] = {}
        #: who of them is shown
        self.roll = Roll()
        self._configured = frozenset(peer.name for peer in supervisor.config.others)
        self._context: zmq.Context[Any] = zmq.Context()
        self._guard = None
        if (keys := supervisor.keys) is not None:
            say = partial(log.warning, "%s")
            self._guard = Guard(self._context, keys.pair, keys.admitted, supervisor.count, say)
        try:
            self.transport = ZmqTransport(self._context, str(supervisor.config.node.control), self._guard)
        except BindError:
            self._context.destroy(0)
            raise
        quiet_after, lease = supervisor.machine.config.quiet_after, supervisor.config.cluster.lease
        self.states = LinkStates(supervisor.machine.links, self.transport, quiet_after, lease)

    def start(self) -> None:
        self._s.loop.add_reader(self.transport.fileno(), self.frames)
        if self._guard is not None:
            self._s.loop.add_reader(self._guard.fileno(), self._guard.answer)
            self._guard.answer()

    def tick(self) -> None:
        for peer in self.transport.tick(time.monotonic()):
            self._s.feed(ev.PeerReset(peer))
        now, s = time.monotonic(), self._s
        self.states.changes(now)
        self.roll.call(self.addresses, roll.members(s), lambda name: roll.wanted(s, self._configured, name), now)

    def close(self) -> None:
        self.transport.close()
        self._context.destroy(0)

    def know(self, name: str, address: str) -> None:
        """Connect to a peer, and have every lane do so."""
        if name == self._s.node or self.addresses.get(name) == address:
            return
        node = wire.node_id(name)
        try:
            # Workers and peers may name peers too, so the address is tried before it is believed.
            self.transport.open(node, lane_address(str(read_tcp(address)), self._s.config.node.lanes))
        except (ValueError, zmq.ZMQError) as error:
            self._s.warn_once(f"peer {name!r} cannot be reached at {address!r}: {error}; expected tcp://host:port")
            return
        self.addresses[name] = address
        self._s.lanes.tell(AddPeer(name, address))
        self._s.feed(ev.PeerAdded(node, name))

    def frames(self) -> None:
        """Everything that has arrived."""
        while True:
            for raw, payload in self.transport.receive():
                self._frame(raw, payload)
            if not self.transport.readable:
                return

    def _frame(self, raw: memoryview, payload: memoryview | None) -> None:
        try:
            header = wire.parse(raw)
        except FrameError as error:
            if error.field == "version":
                self.states.foreign(
                    wire.sender_hint(raw), f"it speaks another protocol version: {error}", time.monotonic()
                )
            if error.field in ("magic", "version", "length"):
                self._s.warn_once(f"a peer's frame is refused: {error}")
            else:
                self._s.feed(ev.FrameDamaged(None, wire.sender_hint(raw), str(error)))
            return
        try:
            wire.check_payload(header, payload)
        except FrameError as error:
            self._s.feed(ev.FrameDamaged(header, header.sender, str(error)))
            return
        if header.type is FrameType.DATA:
            self._s.warn_once("a lane's frame came to the control port: lane counts differ; set node.lanes alike")
            return
        try:
            self._s.feed(ev.FrameReceived(header, None, bytes(payload) if payload is not None else b""))
        except MessageError as error:
            self._s.warn_once(f"a peer's control message is refused: {error}")
