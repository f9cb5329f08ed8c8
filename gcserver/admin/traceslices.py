"""A trace of all nodes on one clock: what GetTrace answers, as slices that can be compared.

What may live here: taking the answers, correcting times, leaving out what nobody can use. What may not: asking daemons
(`trace_command.py`), clocks' arithmetic (`traceclocks.py`), how slices are written (`tracefile.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gcproto import admin_pb2 as pb
from gcproto.spans import Kind
from gcserver.admin.spans import TraceClock
from gcserver.admin.traceclocks import Bounds, Clock, is_time

_KINDS = frozenset(Kind)
#: (job, domain)
Group = tuple[str, int]


class Slice(NamedTuple):
    """A span with its times on the asked node's clock, s. ``node``: its index; ``peer``: that of the other node, or -1;
    ``blocks``: the keys of blocks that it was one call for."""

    begin: float
    end: float
    node: int
    kind: Kind
    job: str
    domain: int
    step: int
    blocks: tuple[int, ...]
    place: int
    nbytes: int
    peer: int
    seq: int
    phase: int
    resent: bool


@dataclass(slots=True)
class Node:
    """A node as was told of it, its spans until they are slices, and why not all of them are there, if so."""

    about: pb.TracedNode
    spans: list[pb.TraceSpan] = field(default_factory=list)
    reason: str = ""
    clock: Clock = field(default_factory=lambda: Clock.of(()))


class Trace:
    """A whole trace, as :meth:`take` is given it. ``unusable``: spans that say nothing, of a foreign daemon."""

    def __init__(self) -> None:
        self.context = pb.TraceContext()
        #: in order of their indices; the first is the asked one
        self.nodes: dict[str, Node] = {}
        self.slices: list[Slice] = []
        self.unusable = 0
        self._newest: Node | None = None

    def take(self, answer: pb.GetTraceResponse) -> None:
        """One message of GetTrace."""
        if answer.HasField("context"):
            self.context = answer.context
            if not is_time(answer.context.wall_clock):
                self.context.wall_clock = 0.0
        if answer.HasField("node"):
            about = answer.node
            self._newest = self.nodes.setdefault(about.name, Node(about))
            self._newest.reason = about.reason
        if self._newest is not None:
            self._newest.spans.extend(answer.spans)

    # ------------------------------------------------------------------------------------- one clock
    def settle(self) -> None:
        """All of it was taken: bring it on one clock, and leave out steps that some node did not see whole."""
        firsts = self._firsts()
        names = {name.id: name.name for name in self.context.nodes}
        index = {name: i for i, name in enumerate(self.nodes)}
        for name, node in self.nodes.items():
            if index[name] and not node.about.clocks:
                node.reason = node.reason or "its clock is not known"
                node.spans.clear()
                continue
            try:
                node.clock = Clock.of([TraceClock(c.at, c.offset, c.error) for c in node.about.clocks])
            except ValueError as error:
                node.reason = node.reason or str(error)
                continue
            self.slices += self._usable(node, index[name], firsts, {k: index.get(n, -1) for k, n in names.items()})
            node.spans.clear()
        self._narrow()
        self.slices.sort(key=lambda s: (s.begin, -s.end))

    def _firsts(self) -> dict[Group, int]:
        """By domain the first step that nobody had begun before it recorded."""
        found: dict[Group, int] = defaultdict(int)
        for node in self.nodes.values():
            for first in node.about.firsts:
                key = first.job, first.domain
                found[key] = max(found[key], first.step)
        return found

    def _usable(self, node: Node, index: int, firsts: dict[Group, int], peers: dict[int, int]) -> Iterator[Slice]:
        steps, clock = self.context.steps, node.clock
        pushed: dict[tuple[Any, ...], list[pb.TraceSpan]] = {}
        for i, s in enumerate(node.spans):
            if s.kind not in _KINDS or not (is_time(s.begin) and is_time(s.end) and s.begin <= s.end):
                self.unusable += 1
                continue
            first = firsts.get((s.job, s.domain), 0)
            if s.step < first or (steps and s.step >= first + steps):
                continue
            # One doorbell for several blocks is one slice.
            one = (s.begin, s.end, s.job, s.domain, s.step, s.place) if s.kind == Kind.PUSH else (i,)
            pushed.setdefault(one, []).append(s)
        for same in pushed.values():
            s = same[0]
            yield Slice(
                clock.ours(s.begin), clock.ours(s.end), index, Kind(s.kind), s.job, s.domain, s.step,
                tuple(x.key for x in same), s.place, sum(x.bytes for x in same), peers.get(s.peer, -1), s.link_seq,
                s.phase, s.resent,
            )  # fmt: skip

    def _narrow(self) -> None:
        """What frames to and from the asked node say of the others' clocks."""
        bounds: dict[int, Bounds] = defaultdict(Bounds)
        for copies, received in self._frames():
            # Whichever arrived, the first left no later.
            sent = copies[0]
            if sent.node == 0:
                bounds[received.node].sent(sent.begin, received.begin)
            elif received.node == 0:
                bounds[sent.node].received(sent.begin, received.begin)
        nodes, shifts = list(self.nodes.values()), {}
        for i, of in bounds.items():
            before = nodes[i].clock
            nodes[i].clock = before.narrowed(of.least, of.most)
            shifts[i] = before.late - nodes[i].clock.late
        self.slices = [
            s._replace(begin=s.begin + d, end=s.end + d) if (d := shifts.get(s.node)) else s for s in self.slices
        ]

    def frames(self) -> Iterator[tuple[Slice, Slice]]:
        """(sent, received) of each frame both ends of which were recorded; of one that was sent again several times the
        newest copy that can be the one that arrived."""
        for copies, received in self._frames():
            yield next((s for s in reversed(copies) if s.begin <= received.begin), copies[0]), received

    def _frames(self) -> Iterator[tuple[list[Slice], Slice]]:
        """(all copies that were sent, in order; the first that arrived) of such frames."""
        left: dict[tuple[Any, ...], list[Slice]] = defaultdict(list)
        arrived: dict[tuple[Any, ...], Slice] = {}
        for s in self.slices:
            ends = (s.node, s.peer) if s.kind is Kind.SEND else (s.peer, s.node)
            key = (*ends, s.place, s.seq, s.resent, s.phase, s.job, s.domain, s.step, s.blocks)
            if s.kind is Kind.SEND:
                left[key].append(s)
            elif s.kind is Kind.RECEIVE:
                arrived.setdefault(key, s)
        return ((left[key], received) for key, received in arrived.items() if key in left)
