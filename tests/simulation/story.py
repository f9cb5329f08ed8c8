"""Interpreter of the scenario scripts in ``scenarios/``: a small cluster, one thing after another, and its log.

What may live here: the commands of the scripts and how an effect reads as a line. What may not: the scripts'
content, checks (`checks.py` runs along as in every world).

A script is a list of commands, each followed by ``----`` and the log it should give. Frames between lanes wait in
their queues until a script delivers, drops or damages them; supervisors' frames, workers and pipes run by
themselves. Time stands still but for ``wait``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gcproto import messages, packed
from gcproto.manifest import Section, TensorSpec
from gcproto.wire import Flag, FrameType, Header, Phase
from gcserver.core import control_events as ce
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.control import wish_number
from tests.simulation.memory import Vector
from tests.simulation.network import Channel, Frame, Network
from tests.simulation.processes import CONTROL
from tests.simulation.program import DomainSpec, JobSpec
from tests.simulation.shape import KIB, Shape, section
from tests.simulation.world import Node, World

#: virtual seconds that a command may take until its consequences have played out
SOON = 0.3


@dataclass(frozen=True, slots=True)
class StoryDomain(DomainSpec):
    """A domain whose gradients can be checked in the head: rank r gives (10 r + step, 1)."""

    def value(self, step: int, key: int, rank: int) -> Vector:
        return (10 * rank + step, 1)

    def flags(self, key: int) -> int:
        return 0


class HeldNetwork(Network):
    """Frames between lanes wait until the script says what becomes of them."""

    hold = False

    def _launch(self, channel: Channel, frame: Frame) -> None:
        if self.hold and channel.route[2] != CONTROL and frame.header.type is not FrameType.HELLO:
            channel.queued.append(frame)
        else:
            super()._launch(channel, frame)


class StoryWorld(World):
    """A world that a script plays: it says what it does in short lines."""

    def __init__(self, shape: Shape, say: Callable[[str], None]) -> None:
        super().__init__(shape, seed=0, trace=say)
        self.network: HeldNetwork = HeldNetwork(self)
        self.allowed: dict[int, int] = {}
        self.restarts = False

    def may_begin(self, rank: int, step: int) -> bool:
        return step <= self.allowed.get(rank, 0)

    def say(self, who: str, what: object) -> None:
        if self.trace is not None and (line := line_of(what, self.names)) and (who.endswith("->") or "is " in line):
            self.trace(f"{who.removesuffix(' ->')} {line}")

    def settle(self, seconds: float = SOON) -> None:
        """Play what follows from a command."""
        until = self.now + seconds
        while self.queue and self.queue[0][0] <= until:
            self.step()
        self.now = until

    def stop_ticks(self) -> None:
        """From now on time passes only when the script says so."""
        self.queue = [q for q in self.queue if getattr(q[2], "__name__", "") != Node._tick.__name__]
        heapq.heapify(self.queue)


def line_of(what: object, names: dict[int, str]) -> str:
    """An effect as a line; "" for what a story does not tell."""
    if isinstance(what, str):
        return what
    if isinstance(what, fx.Send):
        return _frame(what.header, names[what.peer], what.body)
    if isinstance(what, fx.Encode):
        versions = f", residual {what.read} -> {what.write}" if what.codec.feedback else ""
        if what.flush:
            taken = {1: "the residual", 2: "the owner's residual", 3: "both residuals"}[what.flush]
            versions = f", takes up {taken}"
        levels = f" at {list(what.levels)}" if what.levels else ""
        return f"encodes step {what.step} of {what.key} with {what.codec.spec}{levels}{versions}"
    if isinstance(what, fx.Accumulate):
        return f"adds member {what.member} to step {what.step} of {what.key}"
    if isinstance(what, fx.Finalise):
        return f"finalises step {what.step} of {what.key}"
    if isinstance(what, fx.Decode):
        return f"decodes step {what.step} of {what.key}"
    if isinstance(what, fx.CommitOutput):
        return f"commits step {what.step} of {what.key}{' (not finite)' if what.nonfinite else ''}"
    if isinstance(what, fx.Flip):
        return f"flips {'owner ' if what.owner else ''}residual of {what.key} to version {what.version}"
    if isinstance(what, fx.Reconnect):
        return f"opens a new socket to {names[what.peer]}"
    if isinstance(what, fx.Count):
        return f"counts {what.name}"
    if isinstance(what, ce.LogSettled):
        return (
            f"settles step {what.step}{' as void' if what.void else ''}, plan {what.plan} from {what.step + what.lag}"
        )
    if isinstance(what, ce.LogReady):
        return f"is ready up to step {what.step}"
    if isinstance(what, ce.Arbitrate) and what.expected:
        lost = ", ".join(m.node for m in what.record.lost[-1])
        starts = [
            f"after step {s.committed}" + (f", skipping up to {s.settled}" if s.settled > s.committed else "")
            for s in what.record.starts
        ]
        return f"asks for epoch {what.record.epoch} without {lost}: {'; '.join(starts)}"
    if isinstance(what, fx.EnterEpoch):
        return f"takes {what.key} into epoch {what.epoch} with the output of step {what.step} at the latest"
    if isinstance(what, fx.Notify) and what.skipped:
        return f"tells workers that step {what.step} is skipped"
    if isinstance(what, ce.AnswerRequest):
        return f"answers the operator: {what.error or what.message}"
    if isinstance(what, ce.Tell) and isinstance(what.message, messages.Fault):
        f = what.message
        return f"tells a worker {f.kind} in phase {f.phase!r}, missing {list(f.missing)}: {f.message}"
    return ""


def _frame(h: Header, to: str, body: bytes) -> str:
    number = f"#{h.link_seq}" + (" again" if h.flags & Flag.RESENT else "")
    if h.type is FrameType.DATA:
        what = "contribution" if h.phase is Phase.CONTRIBUTION else "aggregate"
        return f"sends {to} {number}: {what} to step {h.step} of {h.key}"
    if h.type is FrameType.FILLER:
        return f"sends {to} {number}: a filler"
    if h.type is FrameType.NACK:
        return f"asks {to} for {list(packed.Decoder[messages.Nack](messages.Nack)(body).missing)}"
    return ""


class Story:
    """Runs one script. ``run`` takes a command line and returns its log."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.world: StoryWorld | None = None

    def run(self, line: str) -> list[str]:
        self.lines.clear()
        name, *words = line.split()
        options = dict(w.split("=", 1) for w in words if "=" in w)
        getattr(self, "do_" + name.replace("-", "_"))([w for w in words if "=" not in w], options)
        return list(self.lines) or ["ok"]

    # ------------------------------------------------------------------------------------- commands
    def do_cluster(self, words: list[str], o: dict[str, str]) -> None:
        """cluster ranks=1,1 codec=none blocks=1: form a job with one domain, ready to push.

        nan=STEP:RANK: a gradient that is not finite; other=RANK declares another shape; leaves-out=RANK does not push
        the first block in step 1; on-loss=shrink or skip.
        """
        ranks = [int(n) for n in o.get("ranks", "1,1").split(",")]
        tensors = section(0, 0, [64 * KIB] * int(o.get("blocks", "1")))
        nan = {int(s): int(r) for s, r in [o["nan"].split(":")]} if "nan" in o else {}
        domain = StoryDomain(
            0, tuple(range(sum(ranks))), True, o.get("codec", "none"), (tensors,), (1,), 99, nan, frozenset(), 1, 0
        )
        jobs = (JobSpec("train", tuple(enumerate(ranks)), (domain,), o.get("on-loss", "fail")),)
        shape = Shape(len(ranks), 1, jobs, partition_bytes=64 * KIB, everyone=True)
        w = self.world = StoryWorld(shape, self.lines.append)
        if "other" in o:
            first, *rest = tensors.tensors
            other = Section(0, (TensorSpec(first.name, (128, 64), first.dtype), *rest))
            self._differs(w, int(o["other"]), sections=(other,))
        if "leaves-out" in o:
            self._differs(w, int(o["leaves-out"]), skip=frozenset({1}))
        w.start()
        w.settle(1.0)
        w.stop_ticks()
        w.network.hold = True
        if "other" not in o:
            self.lines.clear()
            self.lines += [f"block {b.key} is owned by node{b.owner}" for b in w.workers[0].threads[0].space.blocks[0]]

    def _differs(self, w: StoryWorld, rank: int, **fields: Any) -> None:
        """One rank runs another program than the others."""
        add = w.add_worker

        def add_worker(spec: JobSpec, node: int, r: int, *more: Any) -> None:
            if r == rank:
                domain = StoryDomain(**({f: getattr(spec.domains[0], f) for f in DomainSpec.__slots__} | fields))
                spec = JobSpec(spec.label, spec.layout, (domain,))
            add(spec, node, r, *more)

        w.add_worker = add_worker  # type: ignore[method-assign, assignment]

    def do_push(self, words: list[str], o: dict[str, str]) -> None:
        """push RANK...: these ranks push their next step."""
        w = self._world()
        for rank in map(int, words):
            w.allowed[rank] = w.allowed.get(rank, 0) + 1
            for thread in w.workers[rank].threads.values():
                thread.advance()
        w.settle()

    def _route(self, words: list[str]) -> Channel:
        a, b = words[0], words[1]
        return self._world().network.channel((a, b, int(words[2]) if len(words) > 2 else 0))

    def do_deliver(self, words: list[str], o: dict[str, str]) -> None:
        """deliver FROM TO: the oldest frame that waits arrives; count=all for all of them."""
        w, channel = self._world(), self._route(words)
        count = len(channel.queued) if o.get("count") == "all" else int(o.get("count", "1"))
        for _ in range(count):
            frame = channel.queued.popleft()
            target = w.process(channel.route[1], channel.route[2])
            if target is not None:
                w.network.hand_over(target, channel.route[0], frame)
        w.settle()

    def do_corrupt(self, words: list[str], o: dict[str, str]) -> None:
        """corrupt FROM TO: the payload of the oldest frame that waits is damaged (part=header: its header)."""
        self._route(words).queued[0].damage = o.get("part", "payload")

    def do_drop(self, words: list[str], o: dict[str, str]) -> None:
        """drop FROM TO: the oldest frame that waits is lost."""
        self._route(words).queued.popleft()

    def do_run(self, words: list[str], o: dict[str, str]) -> None:
        """run: whatever waits arrives, until nothing waits any more."""
        w = self._world()
        w.settle()
        while any(c.queued for c in w.network.channels.values() if c.route[2] != CONTROL):
            for channel in list(w.network.channels.values()):
                if channel.queued and channel.route[2] != CONTROL:
                    self.do_deliver(list(channel.route[:2]) + [str(channel.route[2])], {})

    def do_wait(self, words: list[str], o: dict[str, str]) -> None:
        """wait SECONDS: virtual time passes; no timer fires by itself."""
        self._world().settle(float(words[0]))

    def do_tick(self, words: list[str], o: dict[str, str]) -> None:
        """tick NODE: its timers fire (heartbeats)."""
        w = self._world()
        for p in list(w.by_name[words[0]].processes()):
            p.deliver(ev.Tick())
        w.settle()

    def do_crash(self, words: list[str], o: dict[str, str]) -> None:
        """crash NODE/LANE or NODE/control: kill -9; before=EFFECT: when it is about to carry out that effect."""
        w = self._world()
        name, lane = words[0].split("/")
        p = w.process(name, CONTROL if lane == "control" else int(lane))
        assert p is not None
        if "before" in o:
            p.dies_before = o["before"]
        else:
            w.kill(p)

    def do_lose(self, words: list[str], o: dict[str, str]) -> None:
        """lose NODE: the machine is gone for good, its workers too."""
        w = self._world()
        node = w.by_name[words[0]]
        for worker in [x for x in w.workers if x.node is node]:
            worker.kill()
        w.strike(f"{node.name} is lost", node.name)
        w.remove(node)

    def do_restart(self, words: list[str], o: dict[str, str]) -> None:
        """restart NODE/LANE or NODE/control."""
        w = self._world()
        name, lane = words[0].split("/")
        node = w.by_name[name]
        if lane == "control":
            node.start()
        else:
            assert node.supervisor is not None
            node.start_lane(int(lane), node.supervisor)
        w.settle()
        w.stop_ticks()

    def do_set_codec(self, words: list[str], o: dict[str, str]) -> None:
        """set-codec NODE PATTERN CODEC: an operator asks there (scheme=all, replace=1)."""
        w = self._world()
        supervisor = w.by_name[words[0]].supervisor
        assert supervisor is not None
        request, rules = w.next_handle(), (messages.Rule(words[1], words[2], o.get("scheme", "")),)
        w.checks.wishes[wish_number(supervisor.incarnation, request)] = rules, "replace" in o
        supervisor.deliver(ce.SetPlan(request, "train", rules, "replace" in o))
        w.settle()

    def do_outputs(self, words: list[str], o: dict[str, str]) -> None:
        """outputs: what each node's output slots hold, in sum units, and what they were divided by."""
        w = self._world()
        for node in w.nodes:
            for (_, key), store in sorted(node.memory.blocks.items()):
                values, divisor = store.output
                self.lines.append(f"{node.name} block {key} step {store.out_step}: {list(values)} / {divisor}")

    def do_residuals(self, words: list[str], o: dict[str, str]) -> None:
        """residuals: the settled residual of each block, and the owner's."""
        w = self._world()
        for node in w.nodes:
            for (_, key), s in sorted(node.memory.blocks.items()):
                own = f", owner's {list(s.owner_residuals[s.owner_residual.current])}"
                mine = s.block.owner == node.index
                settled = list(s.residuals[s.residual.current])
                self.lines.append(f"{node.name} block {key}: {settled}{own if mine else ''}")

    def _world(self) -> StoryWorld:
        assert self.world is not None, "a script begins with `cluster`"
        return self.world
