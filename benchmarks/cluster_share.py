"""A share of the nodes of a large cluster, in one process: real lane machines, frames handed over in memory.

What may live here: nodes, what their kernels and control machines would answer, frames between shares. What may not:
processes and figures (``benchmarks.cluster_size``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from gcproto import messages, wire
from gcproto.dtypes import DType
from gcproto.manifest import PAGE, AddressSpace, Section, TensorSpec
from gcproto.wire import DATA, Header
from gcserver.core import events as ev
from gcserver.core.effects import Accumulate, CommitOutput, Decode, Encode, Finalise, ReportStep, Send
from gcserver.core.lane import LaneMachine
from gcserver.core.lane_config import LaneConfig

JOB = b"cluster of sizes"
DOMAIN: ev.DomainKey = (JOB, 0)
NONE = ev.CodecChoice("none", 1, 0, False, False, drains=True)
PLAN = ev.Plan(0, (ev.PlanRule("*", NONE, "owner", "default"),), NONE)
#: virtual seconds: nothing happens by time here but for the heartbeats that are asked for
NOW = 1.0
#: of a frame between processes: receiver, sum, bytes of the body
_CROSSING = struct.Struct("<IqI")
NO_SUM = -1


@dataclass(slots=True)
class Traffic:
    """What one node has sent: frames, bytes of blocks, bytes of headers and of frames that carry no block."""

    messages: int = 0
    payload: int = 0
    overhead: int = 0


def name(node: int) -> str:
    return f"node{node}"


def gradient(node: int, step: int) -> int:
    """Of every partition, in units of a sum."""
    return (node + 1) * step


class Share:
    """The nodes whose index leaves ``mine`` when divided by ``shares``. ``model``: bytes, one partition a node.

    A payload's handle is the number it stands for. Raises ValueError for a model that cannot be shared out evenly,
    AssertionError where a sum is wrong.
    """

    def __init__(self, nodes: int, model: int, mine: int = 0, shares: int = 1) -> None:
        if model % (nodes * PAGE):
            raise ValueError(f"model: expected a multiple of {nodes} pages of {PAGE} bytes, got {model}")
        self.nodes, self.model, self.mine, self.shares = nodes, model, mine, shares
        self.indices = range(mine, nodes, shares)
        self.ids = [wire.node_id(name(i)) for i in range(nodes)]
        self.by_id = {node: i for i, node in enumerate(self.ids)}
        self.members = tuple(ev.Member(node, name(i), 1) for i, node in enumerate(self.ids))
        hellos = {i: messages.Hello(name(i), f"tcp://{name(i)}:7470", 1, 0, 1, "size") for i in self.indices}
        self.machines = {i: LaneMachine(LaneConfig(hello, 1000 + i)) for i, hello in hellos.items()}
        elements = model // nodes // DType.F32.itemsize
        tensors = tuple(TensorSpec(f"t{i}", (elements,), int(DType.F32)) for i in range(nodes))
        self.section = Section(0, tensors)
        # Of tensors that are not cut: one partition each.
        self.blocks = AddressSpace(nodes, 1, model, True).append(self.section)
        self.sizes = {b.key: b.nbytes for b in self.blocks}
        #: highest address first, as backward produces gradients
        self.keys = tuple(sorted(self.sizes, reverse=True))
        self.traffic = {i: Traffic() for i in self.indices}
        #: partition -> sum so far, at its owner
        self.sums: dict[int, int] = {}
        #: step -> what every partition's sum is
        self.right: dict[int, int] = {}
        #: frames by receiver, whoever of this share has got some, and packed ones to those of others
        self.inboxes: list[list[ev.FrameReceived]] = [[] for _ in range(nodes)]
        self.filled: list[int] = []
        self.away: list[list[bytes]] = [[] for _ in range(shares)]
        self.outputs = 0

    # ---------------------------------------------------------------------------------------- events
    def on(self, node: int, event: ev.LaneEvent) -> None:
        """An event of one node, and what its kernels and its control machine answer."""
        machine = self.machines[node]
        todo: list[ev.LaneEvent] = [event]
        for happened in todo:
            for e in machine.on(happened, NOW):
                kind = type(e)
                if kind is Send:
                    self._send(self.traffic[node], e)
                elif kind is Encode:
                    value, size = gradient(node, e.step), self.sizes[e.key]
                    todo.append(ev.Encoded(e.domain, e.key, e.step, value, size, 1, False, 0))
                elif kind is Accumulate:
                    self.sums[e.key] = e.handle if e.first else self.sums[e.key] + e.handle
                elif kind is Decode:
                    self._check(e.step, e.handle)
                elif kind is CommitOutput:
                    self.outputs += 1
                elif kind is Finalise:
                    value, size = self.sums.pop(e.key), self.sizes[e.key]
                    self._check(e.step, value)
                    todo.append(ev.Finalised(e.domain, e.key, e.step, value, size, 1, False, 0))
                elif kind is ReportStep:
                    todo.append(ev.Settled(e.domain, e.step, False, 0))

    def _check(self, step: int, total: int | None) -> None:
        right = self.right.get(step)
        if right is None:
            right = (gradient(0, step) + gradient(self.nodes - 1, step)) * self.nodes // 2
            self.right[step] = right
        if total != right:
            raise AssertionError(f"step {step}: the sum of a partition is {total}, expected {right}")

    def _send(self, traffic: Traffic, e: Send) -> None:
        h = e.header
        traffic.messages += 1
        traffic.overhead += wire.HEADER_BYTES
        if h.type is DATA:
            traffic.payload += h.payload_bytes
        else:
            traffic.overhead += h.payload_bytes
        receiver = self.by_id[e.peer]
        if receiver % self.shares == self.mine:
            self._put(receiver, h, e.handle, e.body)
        else:
            value = NO_SUM if e.handle is None else e.handle
            self.away[receiver % self.shares].append(_CROSSING.pack(receiver, value, len(e.body)))
            self.away[receiver % self.shares] += [wire.pack(h), e.body]

    def _put(self, receiver: int, h: Header, handle: int | None, body: bytes) -> None:
        inbox = self.inboxes[receiver]
        if not inbox:
            self.filled.append(receiver)
        inbox.append(ev.FrameReceived(h, handle, body))

    def drain(self) -> None:
        """Hand frames over until none waits here; to each node all it has got, as a daemon reads its socket.

        One after the other, of a thousand nodes in turn, each frame would find nothing of its node in a cache.
        """
        while self.filled:
            filled, self.filled = self.filled, []
            for node in filled:
                inbox, self.inboxes[node] = self.inboxes[node], []
                for frame in inbox:
                    self.on(node, frame)

    def arrive(self, batch: bytes) -> None:
        """Frames of another share, as its ``away`` held them."""
        at = 0
        while at < len(batch):
            receiver, value, length = _CROSSING.unpack_from(batch, at)
            at += _CROSSING.size
            header = wire.parse(batch[at : at + wire.HEADER_BYTES])
            at += wire.HEADER_BYTES
            self._put(receiver, header, None if value == NO_SUM else value, batch[at : at + length])
            at += length

    # ---------------------------------------------------------------------------------------- phases
    def meet(self, node: int) -> None:
        """A node hears of all others and says hello."""
        for i, peer in enumerate(self.ids):
            if i != node:
                self.on(node, ev.PeerAdded(peer, name(i)))

    def open(self, node: int) -> None:
        """The job is there, its model declared."""
        config = ev.DomainConfig(
            JOB, 0, "model", 1, self.members, node, 1, self.nodes, 2, 16 << 10, (node,), self.model, True, None
        )
        self.on(node, ev.DomainOpened(config, (PLAN,), 0, (), ((0, 0),), (), 0))
        self.on(node, ev.SectionOpened(DOMAIN, self.section, self.blocks, {}))

    def push(self, node: int, step: int) -> None:
        """The node's rank has its gradients of a step."""
        self.on(node, ev.Pushed(DOMAIN, 0, step, self.keys, True, 0))

    def beat(self, node: int) -> None:
        """A node's timer fires."""
        self.on(node, ev.Tick())
