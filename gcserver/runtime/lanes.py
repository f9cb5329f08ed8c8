"""Lane processes as the supervisor sees them: started, heard and told, restarted when they die, stopped.

What may live here: spawning, environment, pinning, restart pauses, the supervisor's end of each socket pair. What may
not: what a lane does (`lane.py`), decisions (`gcserver.core`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gcproto import wire
from gcproto.channel import ChannelClosed
from gcproto.packed import MessageError
from gcserver.config_keys import ZMQ
from gcserver.copies import around_caches
from gcserver.core import control_events as cx
from gcserver.core.link import DEFAULT_CREDIT
from gcserver.runtime.lanelink import (
    AddPeer,
    Admit,
    BlockFacts,
    KernelTimes,
    LaneKeys,
    LaneLink,
    LaneReady,
    LaneStats,
    LaneTrouble,
    StepDelays,
    StepTimes,
)
from gcserver.runtime.linkfit import LinkFit
from gcserver.runtime.linkstates import LinksChanged, LinkState
from gcserver.runtime.recording import LaneSpans
from gcserver.runtime.setup import LaneSetup
from gcserver.runtime.steptrace import TracedStep

if TYPE_CHECKING:
    from gcserver.runtime.keyring import Keyring
    from gcserver.runtime.supervisor import Supervisor

#: A received payload of 4 MiB touches fresh pages every time unless malloc keeps what it has: one arena on the
#: heap, nothing from mmap, nothing given back. This was worth 20-40 % of throughput.
MALLOC: Final = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
THREADS: Final = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
FIRST_PAUSE: Final = 0.02
LONGEST_PAUSE: Final = 5.0
#: A lane that gives up while it starts is given this long to end by itself, which tells it from one that is killed.
DYING: Final = 1.0
log = logging.getLogger("gcserver")


@dataclass(slots=True)
class Lane:
    """One lane process and the supervisor's end of its socket pair."""

    index: int
    process: subprocess.Popen[bytes]
    link: LaneLink
    started: float
    ready: bool = False
    restarts: int = 0
    incarnation: int = 0
    cores: tuple[int, ...] = ()
    stats: LaneStats | None = None
    #: when it last said anything (``time.monotonic()``)
    heard: float = 0.0
    #: how it stands with peers, as it last said
    links: dict[int, LinkState] = field(default_factory=dict)


class Lanes:
    """All lanes of one supervisor. ``table[i]`` is None while lane i is about to be started again."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._s = supervisor
        self.table: list[Lane | None] = [None] * supervisor.config.node.lanes
        #: seconds before the next restart of a lane; they grow while it keeps dying young
        self._pauses: dict[int, float] = {}
        #: what all lanes together saw of this node's way to the others
        self.link = LinkFit(probes=supervisor.config.plan.probe_every > 0)

    @property
    def _keys(self) -> Keyring | None:
        """What lanes use of this node's keys: nothing, where their transport has none."""
        return self._s.keys if self._s.config.node.transport == ZMQ else None

    def admit(self, admitted: dict[str, bytes]) -> None:
        """Another list of nodes, to all lanes."""
        if self._keys is not None:
            self.tell(Admit(admitted))

    def start(self) -> None:
        for index in range(len(self.table)):
            self._start(index)

    def time_trips(self) -> None:
        """The heartbeats' round trips, as they are now."""
        for peer in self._s.peers.addresses:
            link = self._s.machine.links.get(wire.node_id(peer))
            if link is not None and link.rtt is not None:
                self.link.on_trip(peer, link.rtt)

    def sockets(self) -> list[str]:
        """Where workers reach each lane."""
        return [f"{self._s.config.node.socket}.lane{i}" for i in range(len(self.table))]

    def close(self) -> None:
        for lane in self.table:
            if lane is not None:
                self._close(lane)
        for path in self.sockets():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _close(self, lane: Lane, patience: float = 0.0) -> int:
        """Returns the exit status; a process that has not ended by itself after ``patience`` seconds is killed."""
        # The next socket may get the same number: asyncio must not go on watching it for this one.
        self._s.loop.remove_reader(lane.link.fileno())
        self._s.loop.remove_writer(lane.link.fileno())
        lane.link.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return lane.process.wait(patience)
        lane.process.kill()
        return lane.process.wait()

    def _start(self, index: int, restarts: int = 0) -> None:
        c, hello = self._s.config.node, msgspec.structs.replace(self._s.hello, lane=index)
        setup = LaneSetup(
            hello, str(c.listen.plus(index)), self.sockets()[index], str(self._s.state), -1,
            cores_for(index, c.lanes, c.cores), DEFAULT_CREDIT, self._keys is not None,
            self._s.config.voice(index), c.transport,
        )  # fmt: skip
        lane = self.table[index] = _spawn(setup, restarts)
        if (keys := self._keys) is not None:
            self.send(lane, LaneKeys(keys.pair.name, keys.pair.public, keys.pair.secret, keys.admitted))
        self._s.loop.add_reader(lane.link.fileno(), self._receive, lane)

    def _receive(self, lane: Lane) -> None:
        try:
            received = lane.link.receive()
        except (ChannelClosed, MessageError):
            self._gone(lane)
            return
        lane.heard = time.monotonic()
        for message in received:
            if isinstance(message, LaneReady):
                self._ready(lane, message)
            elif isinstance(message, LaneStats):
                lane.stats = message
                self.link.on_arrivals(lane.index, message.arrivals, time.monotonic())
            elif isinstance(message, LinksChanged):
                lane.links.update((link.peer, link) for link in message.links)
            elif isinstance(message, LaneTrouble):
                self._s.trouble(message, lane.index)
            elif isinstance(message, StepTimes):
                self._s.status.on_times(message)
            elif isinstance(message, KernelTimes):
                self._s.profiler.on_kernels(message)
            elif isinstance(message, StepDelays):
                # Of a job that is over nobody would forget them.
                if message.domain[0] in self._s.machine.jobs:
                    self._s.steering.measured(message)
            elif isinstance(message, BlockFacts | TracedStep | LaneSpans):
                self._s.questions.answered(lane.index, message)
            else:
                self._s.feed(cx.LaneSaid(lane.index, message))

    def _ready(self, lane: Lane, message: LaneReady) -> None:
        lane.ready, lane.incarnation, lane.cores = True, message.incarnation, message.cores
        if self._keys is not None:
            self.send(lane, Admit(self._keys.admitted))  # it may have changed while the lane started
        for name, address in self._s.peers.addresses.items():
            self.send(lane, AddPeer(name, address))
        self._s.feed(cx.LaneUp(lane.index))
        self._s.steering.lane_up()
        self._s.traces.lane_up(lane)
        if all(other is not None and other.ready for other in self.table):
            self._s.ready.set()

    def _gone(self, lane: Lane) -> None:
        first = not lane.ready and not lane.restarts
        status = self._close(lane, DYING if first else 0.0)
        if self.table[lane.index] is not lane or self._s.stopped.is_set():
            return
        self.table[lane.index] = None
        self._s.questions.lane_gone(lane.index)
        # One that was killed is like any other; one that gives up by itself would do so again.
        if first and status >= 0:
            self._s.fail(f"lane {lane.index} could not start (exit status {status}); its message is above")
            return
        pause = self._pause(lane)
        log.warning("lane %d died (status %d); starting it again in %.2f s", lane.index, status, pause)
        self._s.loop.call_later(pause, self._restart, lane.index, lane.restarts + 1)

    def renew(self) -> None:
        """End all lanes and start them again."""
        for index, lane in enumerate(self.table):
            if lane is not None:
                self.table[index] = None
                self._close(lane)
                self._s.questions.lane_gone(index)
                log.info("lane %d begins a new life", index)
                self._restart(index, lane.restarts + 1)

    def _restart(self, index: int, restarts: int) -> None:
        if self._s.stopped.is_set():
            return
        try:
            self._start(index, restarts)
        except OSError as error:
            # No descriptors or no memory for another process now; jobs wait for it, up to their deadlines.
            self._s.warn_once(f"lane {index} cannot be started again yet: {error}")
            self._s.loop.call_later(LONGEST_PAUSE, self._restart, index, restarts)

    def send(self, lane: Lane, message: Any) -> None:
        with contextlib.suppress(ChannelClosed):
            lane.link.send(message)
        if lane.link.channel.backlog:
            self._s.loop.add_writer(lane.link.fileno(), self._flush, lane)

    def _flush(self, lane: Lane) -> None:
        with contextlib.suppress(ChannelClosed):
            lane.link.channel.flush()
        if not lane.link.channel.backlog:
            self._s.loop.remove_writer(lane.link.fileno())

    def tell(self, message: Any, index: int | None = None) -> None:
        """To one lane, or all. A lane that is not ready hears everything when it is."""
        for lane in self.table:
            if lane is not None and lane.ready and index in (None, lane.index):
                self.send(lane, message)

    def _pause(self, lane: Lane) -> float:
        """Seconds to wait before starting this lane again."""
        if time.monotonic() - lane.started > 10.0:
            self._pauses[lane.index] = FIRST_PAUSE
        pause = self._pauses.get(lane.index, FIRST_PAUSE)
        self._pauses[lane.index] = min(2 * pause, LONGEST_PAUSE)
        return pause


def start_process(argv: Sequence[str], link: int) -> subprocess.Popen[bytes]:
    """An interpreter of its own for a lane, with these arguments and the descriptor ``link`` of ours."""
    return subprocess.Popen(
        [sys.executable, "-m", "gcserver.runtime.lane", *argv],
        pass_fds=[link],
        env={**os.environ, **MALLOC, **THREADS, **around_caches(os.environ)},
        stdin=subprocess.DEVNULL,
    )


def _spawn(setup: LaneSetup, restarts: int) -> Lane:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    setup = msgspec.structs.replace(setup, link=theirs.fileno())
    try:
        process = start_process([msgspec.json.encode(setup).decode()], setup.link)
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return Lane(setup.hello.lane, process, LaneLink(ours), time.monotonic(), restarts=restarts)


def cores_for(index: int, lanes: int, configured: tuple[int, ...] | None) -> tuple[int, ...]:
    """The cores lane ``index`` is pinned to: its share of the configured ones that we may use.

    With "auto" nothing is pinned: whoever shares a machine between lanes and training says which cores are
    whose. More lanes than cores share them in turn.
    """
    if configured is None:
        return ()
    allowed = sorted(set(configured) & os.sched_getaffinity(0))
    if not allowed:
        return ()
    share = max(1, len(allowed) // lanes)
    start = (index * share) % len(allowed)
    return tuple(allowed[start : start + share])
