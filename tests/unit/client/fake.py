"""A daemon for one worker in a world of one: it agrees to everything and copies inputs to outputs.

What may live here: just enough of a daemon to see what a worker says, in which order, and to break its
connections on purpose. What may not: anything a real daemon decides; tests/integration has real ones.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gcproto import advice, lane_messages, messages, packed, slots
from gcproto.audits import AuditReport
from gcproto.channel import Channel, ChannelClosed
from gcproto.epoch_messages import Admit
from gcproto.lane_messages import Attach, Done, MapSection, Push
from gcproto.manifest import AddressSpace, ArenaPlan, Block
from gcproto.messages import DeclareDomain, DeclareSection, MemberInfo
from gcproto.packed import Message
from gcproto.spans import WorkerSpans
from gcproto.timings import TensorTimes

PARTITION = 256 << 10
#: what a worker is given with Registered
TICKET = b"ticket"
_from_worker = packed.Decoder[messages.FromWorker](messages.FromWorker)
_from_lane_worker = packed.Decoder[lane_messages.FromLaneWorker](lane_messages.FromLaneWorker)


class FakeDomain:
    """Layout and memory of one domain."""

    def __init__(self, lanes: int, whole: bool) -> None:
        self.space = AddressSpace(1, lanes, PARTITION, whole)
        self.plans = [ArenaPlan(1) for _ in range(lanes)]
        self.files: list[list[int]] = [[] for _ in range(lanes)]
        self.maps: list[list[mmap.mmap]] = [[] for _ in range(lanes)]
        self.blocks: dict[int, Block] = {}
        #: by step the loss scales in the headers of what was pushed
        self.scales: dict[int, set[float]] = {}

    def append(self, section: Any) -> None:
        if section.index < len(self.space.sections):
            return
        blocks = self.space.append(section)
        for lane, plan in enumerate(self.plans):
            mine = [b for b in blocks if b.lane == lane]
            for chunk in plan.append(mine):
                file = os.memfd_create("chunk")
                os.ftruncate(file, plan.chunks[chunk])
                self.files[lane].append(file)
                self.maps[lane].append(mmap.mmap(file, plan.chunks[chunk]))
            for block in mine:
                self.blocks[block.key] = block
                slot = plan.slots[block.key]
                slots.initialise(memoryview(self.maps[lane][slot.chunk]), slot, block)

    def copy(self, key: int, step: int) -> None:
        """The average over one rank: output = input. A push told again, whose result is there, changes nothing."""
        block = self.blocks[key]
        slot = self.plans[block.lane].slots[key]
        memory = memoryview(self.maps[block.lane][slot.chunk])
        if slots.output(memory, slot)[0] >= step:
            return
        pushed, _, scale = slots.pushed(memory, slot, 0)
        assert pushed == step
        self.scales.setdefault(step, set()).add(scale)
        n, at = block.nbytes, slot.inputs[0]
        memory[slot.output : slot.output + n] = memory[at : at + n]
        slots.commit_output(memory, slot, step, 0, 0)


class FakeDaemon:
    """Listens in ``folder``. ``heard[i]``: what arrived at lane i, ``heard[-1]``: at the supervisor.

    ``silent``: results are written but not announced. ``curt``: whoever says something is hung up on. ``answer`` may
    be replaced to refuse things. ``accepted[i]``: connections made to socket i.
    """

    def __init__(self, folder: Path, lanes: int = 2) -> None:
        self.folder = folder
        self.lanes = lanes
        self.paths = [str(folder / f"lane{i}.sock") for i in range(lanes)] + [str(folder / "control.sock")]
        self.heard: list[list[Any]] = [[] for _ in range(lanes + 1)]
        self.domains: dict[int, FakeDomain] = {}
        self.silent = False
        self.deaf = False
        self.curt = False
        self.accepted = [0] * (lanes + 1)
        self.deadline = 5.0
        self.mode = "static"
        #: of a job that goes on without lost nodes; with ``skipping`` results are announced as skipped
        self.commits = self.skipping = False
        #: whose members a push's result is made with
        self.epoch: Callable[[Push], int] = lambda push: 1
        self.size = 1
        self.answer: Callable[[Any], Message | None] = lambda message: None
        self._listeners: list[socket.socket | None] = [None] * (lanes + 1)
        self._channels: dict[int, tuple[int, Channel[Any]]] = {}
        self._poll = select.epoll()
        self._lock = threading.Lock()
        self._over = False
        for index in range(lanes + 1):
            self.listen(index)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def socket(self) -> str:
        return self.paths[-1]

    def listen(self, index: int) -> None:
        """Open socket ``index`` (again)."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(self.paths[index]).unlink(missing_ok=True)
        sock.bind(self.paths[index])
        sock.listen(8)
        with self._lock:
            self._listeners[index] = sock
            self._poll.register(sock.fileno(), select.EPOLLIN)

    def crash(self, index: int) -> None:
        """Close socket ``index`` and every connection to it, and forget what was heard there."""
        with self._lock:
            listener = self._listeners[index]
            if listener is not None:
                self._poll.unregister(listener.fileno())
                listener.close()
                self._listeners[index] = None
            self._hang_up(index)
            self.heard[index] = []

    def hang_up(self, index: int) -> None:
        """Close every connection to socket ``index`` and go on listening."""
        with self._lock:
            self._hang_up(index % (self.lanes + 1))

    def _hang_up(self, index: int) -> None:
        for fd, (where, channel) in list(self._channels.items()):
            if where == index:
                self._poll.unregister(fd)
                channel.close()
                del self._channels[fd]

    def say(self, index: int, message: Message) -> None:
        """Tell whoever is connected to socket ``index``."""
        with self._lock:
            for where, channel in self._channels.values():
                if where == index % (self.lanes + 1):
                    channel.send(message)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Read nothing meanwhile."""
        with self._lock:
            yield

    def connected(self, index: int) -> bool:
        return any(where == index % (self.lanes + 1) for where, _ in self._channels.values())

    def wait(self, ready: Callable[[], bool], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < end, f"it never came to that; heard: {self.heard}"
            time.sleep(0.002)

    def pushes(self, lane: int) -> list[Push]:
        return [m for m in self.heard[lane] if isinstance(m, Push)]

    def close(self) -> None:
        self._over = True
        self._thread.join(5)
        for index in range(self.lanes + 1):
            self.crash(index)
        self._poll.close()
        for domain in self.domains.values():
            for files in domain.files:
                for file in files:
                    os.close(file)

    # ------------------------------------------------------------------------------------- serving
    def _run(self) -> None:
        while not self._over:
            for fd, _ in self._poll.poll(0.02):
                with self._lock:
                    self._serve(fd)

    def _serve(self, fd: int) -> None:
        for index, listener in enumerate(self._listeners):
            if listener is not None and listener.fileno() == fd:
                sock, _ = listener.accept()
                self.accepted[index] += 1
                decode: Any = _from_worker if index == self.lanes else _from_lane_worker
                self._channels[sock.fileno()] = (index, Channel(sock, decode))
                self._poll.register(sock.fileno(), select.EPOLLIN)
                return
        if fd not in self._channels:
            return
        index, channel = self._channels[fd]
        try:
            for message, _ in channel.receive():
                self.heard[index].append(message)
                if self.curt:
                    self._hang_up(index)
                    return
                if not self.deaf:
                    self._answer(index, channel, message)
        except ChannelClosed:
            self._poll.unregister(fd)
            channel.close()
            del self._channels[fd]

    def _answer(self, lane: int, channel: Channel[Any], message: Any) -> None:
        special = self.answer(message)
        if special is not None:
            channel.send(special)
        elif isinstance(message, messages.WhoAreYou):
            channel.send(messages.IAm("fake", "tcp://127.0.0.1:1", self.lanes))
        elif isinstance(message, messages.Register | messages.Reattach):
            others = (MemberInfo(f"other{r}", "tcp://127.0.0.1:1", (r,)) for r in range(1, self.size))
            members = (MemberInfo("fake", "tcp://127.0.0.1:1", (0,)), *others)
            channel.send(
                messages.Registered(
                    b"j" * 16, 1, "fake", members, tuple(self.paths[:-1]), PARTITION, self.deadline, self.mode, TICKET,
                    commits=self.commits,
                )
            )  # fmt: skip
        elif isinstance(message, DeclareDomain):
            self.domains.setdefault(message.domain, FakeDomain(self.lanes, message.whole))
        elif isinstance(message, DeclareSection):
            self.domains[message.domain].append(message.section)
            channel.send(messages.SectionAgreed(message.domain, message.section.index, 0))
        elif isinstance(message, MapSection):
            domain = self.domains[message.domain]
            sizes = tuple(domain.plans[lane].chunks[message.have :])
            files = domain.files[lane][message.have :]
            channel.send(lane_messages.Mapped(message.domain, message.index, message.have, sizes), files)
        elif isinstance(message, Push) and message.keys:
            for key in message.keys:
                self.domains[message.domain].copy(key, message.step)
            if not self.silent:
                epoch = self.epoch(message)
                channel.send(Done(message.domain, message.step, message.keys, skipped=self.skipping, epoch=epoch))
        else:
            measured = TensorTimes | AuditReport | WorkerSpans
            known = Attach | messages.Unregister | measured | advice.AskAdvice | Admit | Push
            assert isinstance(message, known)
