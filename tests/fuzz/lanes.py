"""Two lanes of two nodes over memory of their own, joined by lists instead of sockets, for the targets that feed one.

What may live here: making them, a job between them, carrying its frames. What may not: hostile inputs.

They are the real thing from the frame inwards: `LaneProcess` with its machine, kernels and files. Whatever is sent is
encoded as it would be for a socket.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from gcproto import manifest, slots, wire
from gcproto.manifest import Section, TensorSpec
from gcproto.messages import Hello, Rule
from gcproto.wire import Flag
from gcserver.codecs.warmup import warmup
from gcserver.core import effects as fx
from gcserver.core import events as ev
from gcserver.core.control_events import OpenSection
from gcserver.core.lane import LaneMachine
from gcserver.core.lane_config import LaneConfig
from gcserver.core.plan import compiled
from gcserver.runtime import incoming, lanelink, statefiles
from gcserver.runtime import lane as lane_process
from gcserver.runtime.lane import LaneProcess
from gcserver.runtime.lanelink import AddPeer, ForgetJob
from gcserver.runtime.resolve import resolve
from gcserver.runtime.setup import LaneSetup
from tests.fuzz.tickets import lay_key
from tests.fuzz.wires import Frame, Pipe, crossed, received

NAMES: Final = ("a", "b")
NODES: Final = tuple(map(wire.node_id, NAMES))
JOB, NEXT_JOB = b"j" * 16, b"k" * 16
STEPS: Final = 2
#: the highest number that a life can have at first, as daemons know by the time
LATEST: Final = 1 << 20
PARTITION: Final = 4096
#: codec of the job, whether its blocks are whole tensors, dtype of its tensors
KINDS: Final = (
    ("none", False, 0), ("none", False, 3), ("topk(ratio=0.05)", False, 0), ("onebit", False, 0), ("qsgd", False, 0),
    ("powersgd(rank=1)", True, 0), ("randomk(ratio=0.1)", False, 0), ("fp16", False, 0),
    ("powersgd(rank=1,values=16)", True, 0),
)  # fmt: skip
#: kinds of faults by which a lane may end a job
FAULTS: Final = frozenset({"CorruptFrame", "TensorMismatch", "OutOfMemory", "PeerLost", "CodecError"})


class Clock:
    """Time that passes when a target says so: what an input leads to must not depend on how busy a machine is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class _Pipe(Pipe):
    """What is to be received lies in ``waiting``."""

    readable = False

    def __init__(self) -> None:
        super().__init__()
        self.waiting: deque[Frame] = deque()
        self.bytes_in = self.bytes_out = 0

    def receive(self) -> Iterator[tuple[memoryview, memoryview | None]]:
        while self.waiting:
            yield received(self.waiting.popleft())


class Above:
    """Stands where the supervisor is."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.channel = SimpleNamespace(backlog=False)

    def send(self, *messages: Any) -> None:
        self.heard += map(crossed, messages)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a job is like: one of ``KINDS``."""

    spec: str
    whole: bool
    dtype: int

    @property
    def section(self) -> Section:
        shape = (32, 32) if self.whole else (1024 if self.dtype == 0 else 512,)
        return Section(0, (TensorSpec("w", shape, self.dtype), TensorSpec("v", shape, self.dtype)))


class Lane:
    """One life of one node's lane. ``folder`` outlives it."""

    def __init__(self, me: int, incarnation: int, folder: Path) -> None:
        self.me, self.folder = me, folder
        self.pipe, self.above = _Pipe(), Above()
        hello = Hello(NAMES[me], f"tcp://{NAMES[me]}:1", 1, 0, 1, "fuzz")
        setup = LaneSetup(hello, "", "", str(folder), -1, (), 1 << 20)
        machine = LaneMachine(LaneConfig(hello, incarnation))
        lay_key(folder)
        self.process = LaneProcess(setup, machine, self.pipe, self.above, None)  # type: ignore[arg-type]
        self.process.feed(ev.Tick(LATEST))
        self.process.orders.take(AddPeer(NAMES[1 - me], "tcp://x:1"))

    def close(self) -> None:
        self.process.workers.close()
        self.process.poller.close()

    def open(self, job: bytes, shape: Shape, settled: int = 0) -> None:
        """What a supervisor says of a new job, or of one of before to a new life."""
        (self.folder / "jobs" / job.hex()).mkdir(parents=True, exist_ok=True)
        members = tuple(ev.Member(node, name, 1) for node, name in zip(NODES, NAMES, strict=True))
        config = ev.DomainConfig(
            job, 0, "ddp", 1, members, self.me, 1, 2, 2, 0, (self.me,), PARTITION, shape.whole, seed=1
        )
        rules = (compiled(Rule("*", shape.spec), resolve),)
        self.process.orders.take(ev.DomainOpened(config, (ev.Plan(0, rules, resolve("none")),), settled))
        self.process.orders.take(OpenSection((job, 0), shape.section))

    def end(self, job: bytes) -> None:
        self.process.orders.take(ev.DomainClosed((job, 0)))
        self.process.orders.take(ForgetJob(job))

    def push(self, job: bytes, step: int) -> None:
        """The worker's gradients of a step: whole numbers, so that sums are exact."""
        memory = self.process.executor.domains[job, 0]
        for key, state in memory.blocks.items():
            out = np.frombuffer(state.inputs[0], _NUMPY[int(state.block.dtype)])
            out[:] = (np.arange(out.size) * (7 + self.me) + 13 * step + key) % 61 - 30
            slots.commit_push(state.arena, state.slot, 0, step, Flag.AVERAGE, 1.0)
        self.process.feed(ev.Pushed((job, 0), 0, step, tuple(memory.blocks), True, Flag.AVERAGE))

    def outputs(self, job: bytes, step: int = STEPS) -> bytes | None:
        """What the worker would copy out; None before all blocks of ``step`` are there."""
        memory = self.process.executor.domains.get((job, 0))
        if memory is None or any(slots.output(s.arena, s.slot)[0] != step for s in memory.blocks.values()):
            return None
        return b"".join(bytes(s.output) for s in memory.blocks.values())

    def heard(self, kind: type, job: bytes) -> list[Any]:
        """What it said to its supervisor of a job."""
        return [m for m in self.above.heard if isinstance(m, kind) and m.domain[0] == job]  # type: ignore[attr-defined]

    def faults(self, job: bytes) -> list[str]:
        found = [m.kind for m in self.heard(fx.ReportFault, job)]
        return found + [m.kind for m in self.above.heard if isinstance(m, lanelink.LaneTrouble) and m.job == job]


_NUMPY: Final = {0: np.float32, 3: np.float64}


class Pair:
    """Both lanes. ``before`` is called with the number of each frame that is about to reach lane a."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        # Files as small as the blocks in them: a million pairs of lanes would otherwise wait for memory to be zeroed.
        self.clock = Clock()
        self._patches = (
            patch.object(manifest, "MIN_CHUNK_BYTES", 4096),
            patch.object(statefiles, "MIN_CHUNK", 1 << 14),
            patch.object(lane_process, "time", self.clock),
            patch.object(incoming, "time", self.clock),
            patch.object(lane_process, "lane_transport", lambda setup, pipe, guard, say: pipe),
        )
        for changed in self._patches:
            changed.start()
        self.root = Path(tempfile.mkdtemp(prefix="gradcomm-fuzz-", dir="/dev/shm"))
        self.latest = LATEST
        self.before = before
        #: what reached lane a, in order
        self.taken: list[Frame] = []
        self.a = Lane(0, 100, self.root / "a")
        self.b = Lane(1, 200, self.root / "b")

    def close(self) -> None:
        self.a.close()
        self.b.close()
        shutil.rmtree(self.root, ignore_errors=True)
        for changed in self._patches:
            changed.stop()

    def again(self, me: int, incarnation: int) -> None:
        """One of them is a new process."""
        lane = Lane(me, incarnation, self.root / NAMES[me])
        old = self.b if me else self.a
        old.close()
        if me:
            self.b = lane
        else:
            self.a = lane

    def carry(self) -> None:
        """Frames in both directions until there are none."""
        # What goes on forever is for the watch to find.
        while self.a.pipe.sent or self.b.pipe.sent:
            while self.a.pipe.sent:
                self.b.pipe.waiting.append(self.a.pipe.sent.popleft())
            incoming.receive(self.b.process, True)
            while self.b.pipe.sent:
                self.before(len(self.taken))
                if not self.b.pipe.sent:
                    break
                frame = self.b.pipe.sent.popleft()
                self.taken.append(frame)
                self.give(frame)

    def give(self, frame: Frame) -> None:
        """One frame to lane a."""
        self.a.pipe.waiting.append(frame)
        incoming.receive(self.a.process, True)

    def tick(self) -> None:
        self.clock.now += 0.5
        for lane in (self.a, self.b):
            lane.process.feed(ev.Tick(self.latest))
        self.carry()

    def play(self, job: bytes, shape: Shape, last: int = STEPS) -> None:
        """Open a job on both and run its steps up to ``last``, as far as they go."""
        for lane in (self.a, self.b):
            lane.open(job, shape)
        self.carry()
        for step in range(1, last + 1):
            for lane in (self.a, self.b):
                lane.push(job, step)
            self.carry()
            # What was lost shows with the next heartbeats.
            if not self._reported(job, step):
                self.tick()
            if not self._reported(job, step):
                return
            for lane in (self.a, self.b):
                lane.process.orders.take(ev.Settled((job, 0), step, False, 0))
            self.carry()

    def next(self, shape: Shape) -> tuple[bytes | None, bytes | None]:
        """The outputs of both lanes of another job, of one step: enough to see that jobs are served."""
        self.play(NEXT_JOB, shape, 1)
        return self.a.outputs(NEXT_JOB, 1), self.b.outputs(NEXT_JOB, 1)

    def _reported(self, job: bytes, step: int) -> bool:
        return all(any(r.step == step for r in lane.heard(fx.ReportStep, job)) for lane in (self.a, self.b))

    def end(self, job: bytes) -> None:
        for lane in (self.a, self.b):
            lane.end(job)


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A job nobody disturbs: the frames that reached lane a, and the outputs of both lanes."""

    frames: tuple[Frame, ...]
    outputs: bytes
    next_outputs: bytes


def undisturbed(shape: Shape) -> Undisturbed:
    """How a job of this shape and the next one come out."""
    warmup()
    pair = Pair()
    try:
        pair.play(JOB, shape)
        outputs, frames = pair.a.outputs(JOB), tuple(pair.taken)
        assert outputs is not None and outputs == pair.b.outputs(JOB)
        pair.end(JOB)
        following, theirs = pair.next(shape)
        assert following is not None and following == theirs
        return Undisturbed(frames, outputs, following)
    finally:
        pair.close()
