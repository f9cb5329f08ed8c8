"""Doing the faults of a schedule to real daemons, workers and links, and undoing them.

What may live here: one class for each kind of fault. What may not: when and where (`schedule.py`), what comes of it
(`verdicts.py`).

``begin`` does it, ``end`` undoes it; both return soon. ``over`` says when a fault has had its time. Between the two the
soak goes on reading what workers log. Everything here is called from the thread that started daemons and workers: the
kernel ends those when that thread ends.
"""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab import daemons, netns, processes
from tests.soak.crew import Crew
from tests.soak.proxy import Proxy
from tests.soak.schedule import Fault

#: Share of packets that a node with packet loss does not get, per cent.
LOSS = 5
#: Bytes flipped in one fault. More would hit what is sent again as well, the only thing on a link that waits for it.
FLIPS = 2
#: Links at this part of their rate.
SLOWER = 5
#: A daemon that drains stops after this; it has the same again to be gone, seconds.
DRAIN = 2.0


class InjectionError(RuntimeError):
    """A fault could not be done or undone; ``str()`` says what failed."""


@dataclass(frozen=True, slots=True)
class Field:
    """Where faults happen. ``proxies[i]`` is on the way from node i to the next one; ``shared`` the folder of the
    daemons' /dev/shm as it is seen from here; ``rate`` that of the links in bit/s."""

    lab: netns.Lab
    cluster: daemons.Daemons
    crew: Crew
    proxies: Sequence[Proxy]
    shared: Path
    rate: int


class Injector(abc.ABC):
    """One fault. ``victim``: the rank whose worker is killed or held."""

    def __init__(self, field: Field, fault: Fault) -> None:
        self.field, self.fault = field, fault
        self.victim = -1
        self.began = 0.0

    @property
    def daemon(self) -> daemons.Daemon:
        return self.field.cluster[self.fault.node]

    @property
    def host(self) -> netns.Host:
        return self.field.lab.hosts[self.fault.node]

    def over(self) -> bool:
        """Whether it has lasted as long as it should."""
        return time.monotonic() - self.began >= self.fault.hold

    def notes(self) -> str:
        """What there is to say of it when training has recovered."""
        return ""

    @abc.abstractmethod
    def begin(self) -> None:
        """Does it. Raises InjectionError."""

    def end(self) -> None:  # noqa: B027 (most moments need no undoing)
        """Undoes it; nothing where it was a moment's. Raises InjectionError. Twice is no error."""

    def lanes(self) -> list[int]:
        """The pids of the daemon's lanes."""
        found = daemons.lane_pids(self.daemon.pids())
        if not found:
            raise InjectionError(f"{self.daemon.name} has no lane to hit")
        return found

    def run(self, *argv: str) -> None:
        """A command on the fault's node."""
        program = processes.which(argv[0])
        if program is None:
            raise InjectionError(f"{argv[0]} is not installed")
        command = [*self.host.enter, program, *argv[1:]]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InjectionError(f"{' '.join(argv)}: {done.stderr.strip() or f'exit {done.returncode}'}")


def kill(pids: Sequence[int], number: signal.Signals) -> None:
    """A signal to those that still are."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# ------------------------------------------------------------------------------------------- kill -9
class KillWorker(Injector):
    """Its process is gone without a word."""

    def begin(self) -> None:
        self.victim = self.field.crew.rank_on(self.fault.node)
        self.field.crew.workers[self.victim].kill()


class KillLane(Injector):
    """The supervisor starts it again."""

    def begin(self) -> None:
        kill(self.lanes(), signal.SIGKILL)


class KillSupervisor(Injector):
    """Started again at once, as a service manager would; its lanes end with it."""

    def begin(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.field.cluster.start(self.daemon)


class KillDaemon(Injector):
    """All its processes at the same moment, then started again."""

    def begin(self) -> None:
        family = self.daemon.pids()
        kill(family, signal.SIGKILL)
        self.daemon.process.wait()
        self.field.cluster.start(self.daemon)


# ------------------------------------------------------------------------------------------- SIGSTOP
class Stop(Injector):
    """Processes that do nothing for a while and then go on as if no time had passed."""

    def __init__(self, field: Field, fault: Fault) -> None:
        super().__init__(field, fault)
        self._held: list[int] = []

    @abc.abstractmethod
    def whom(self) -> list[int]:
        """The pids to hold."""

    def begin(self) -> None:
        self._held = self.whom()
        kill(self._held, signal.SIGSTOP)

    def end(self) -> None:
        held, self._held = self._held, []
        kill(held, signal.SIGCONT)


class StopWorker(Stop):
    """Also beyond the deadline, as "stall-worker"."""

    def whom(self) -> list[int]:
        self.victim = self.field.crew.rank_on(self.fault.node)
        return [self.field.crew.workers[self.victim].pid]


class StopLane(Stop):
    def whom(self) -> list[int]:
        return self.lanes()


class StopSupervisor(Stop):
    def whom(self) -> list[int]:
        return [self.daemon.process.pid]


class StopDaemon(Stop):
    def whom(self) -> list[int]:
        return self.daemon.pids()


# --------------------------------------------------------------------------------------------- links
class Rules(Injector):
    """Packets that the node's own packet filter drops, as long as a table of ours is in it."""

    TABLE = "gradcomm-fault"

    def __init__(self, field: Field, fault: Fault) -> None:
        super().__init__(field, fault)
        self._laid = False

    @abc.abstractmethod
    def rules(self) -> list[tuple[str, str]]:
        """(hook, rule): "input" or "output", and what is dropped there."""

    def begin(self) -> None:
        lines = [f"add table inet {self.TABLE}"]
        for hook in ("input", "output"):
            chain = f"{{ type filter hook {hook} priority 0; policy accept; }}"
            lines.append(f"add chain inet {self.TABLE} {hook} {chain}")
        lines += [f"add rule inet {self.TABLE} {hook} {rule} drop" for hook, rule in self.rules()]
        self._laid = True
        self.run("nft", "; ".join(lines))

    def end(self) -> None:
        if self._laid:
            self._laid = False
            self.run("nft", f"delete table inet {self.TABLE}")


class Partition(Rules):
    """Two nodes hear nothing of each other."""

    def rules(self) -> list[tuple[str, str]]:
        other = self.field.lab.hosts[self.fault.other].address
        return [("input", f"ip saddr {other}"), ("output", f"ip daddr {other}")]


class Isolation(Rules):
    """A node hears nothing of anybody."""

    def rules(self) -> list[tuple[str, str]]:
        return [("input", f'iifname "{self.host.interface}"'), ("output", f'oifname "{self.host.interface}"')]


class Loss(Rules):
    """The kernel has to send again what is dropped at random."""

    def rules(self) -> list[tuple[str, str]]:
        return [("input", f'iifname "{self.host.interface}" numgen random mod 100 < {LOSS}')]


class Reset(Injector):
    """The kernel closes every connection of the node to another, both ends with an error."""

    def begin(self) -> None:
        self.run("ss", "-K", "dst", f"{netns.NETWORK}.0/24")


class Corruption(Injector):
    """Bytes that TCP does not miss: the relay changes them."""

    def begin(self) -> None:
        self._before = self.field.proxies[self.fault.node].flipped
        self.field.proxies[self.fault.node].flip(FLIPS, self.fault.hold, self.fault.seed)

    def notes(self) -> str:
        return f"{self.field.proxies[self.fault.node].flipped - self._before} bytes flipped"


class Rate(Injector):
    """All links slower, then as before."""

    def begin(self) -> None:
        self.field.lab.set_rate(f"{self.field.rate // SLOWER}bit")

    def end(self) -> None:
        self.field.lab.set_rate(f"{self.field.rate}bit")


# -------------------------------------------------------------------------------------------- memory
class Memory(KillDaemon):
    """Not a page of shared memory is free, and a daemon that was killed has to find its own again."""

    @property
    def _ballast(self) -> Path:
        return self.field.shared / "ballast"

    def begin(self) -> None:
        self._taken = fill(self._ballast)
        super().begin()

    def notes(self) -> str:
        return f"{self._taken >> 20} MiB taken"

    def end(self) -> None:
        self._ballast.unlink(missing_ok=True)


def fill(path: Path) -> int:
    """Takes what is free of the file system of ``path`` into that file; how many bytes that were."""
    page, taken = os.sysconf("SC_PAGE_SIZE"), 0
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        state = os.fstatvfs(descriptor)
        piece = state.f_bavail * state.f_frsize // page * page
        while piece:
            try:
                os.posix_fallocate(descriptor, taken, piece)
                taken += piece
            except OSError:
                piece = piece // 2 // page * page
    finally:
        os.close(descriptor)
    return taken


# ------------------------------------------------------------------------------------------- upgrade
class Upgrade(Injector):
    """What an operator does to put another version in place: drain, wait until it has gone, start it again."""

    def __init__(self, field: Field, fault: Fault) -> None:
        super().__init__(field, fault)
        self._gcctl: subprocess.Popen[Any] | None = None

    def begin(self) -> None:
        argv = [daemons.program("gcctl"), "--address", self.daemon.admin, "drain", "--within", f"{DRAIN:g}s"]
        self._gcctl = processes.start(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def over(self) -> bool:
        status = self.daemon.process.poll()
        if status is None and time.monotonic() - self.began > 2 * DRAIN + 10.0:
            raise InjectionError(f"{self.daemon.name} was told to drain and still runs:\n{self.daemon.log_tail()}")
        return status is not None

    def end(self) -> None:
        gcctl, self._gcctl = self._gcctl, None
        if gcctl is None:
            return
        processes.end([gcctl], grace=2.0)
        status = self.daemon.process.poll()
        if status:
            raise InjectionError(f"{self.daemon.name} left with status {status}:\n{self.daemon.log_tail()}")
        if status is not None:
            self.field.cluster.start(self.daemon)


INJECTORS: dict[str, type[Injector]] = {
    "kill-worker": KillWorker,
    "kill-lane": KillLane,
    "kill-supervisor": KillSupervisor,
    "kill-daemon": KillDaemon,
    "stop-worker": StopWorker,
    "stop-lane": StopLane,
    "stop-supervisor": StopSupervisor,
    "stop-daemon": StopDaemon,
    "stall-worker": StopWorker,
    "partition": Partition,
    "isolation": Isolation,
    "reset": Reset,
    "loss": Loss,
    "corruption": Corruption,
    "rate": Rate,
    "memory": Memory,
    "upgrade": Upgrade,
}

#: Programs that kinds of fault are done with, besides those of a lab.
PROGRAMS = {"partition": "nft", "isolation": "nft", "loss": "nft", "reset": "ss"}


def impossible() -> dict[str, str]:
    """Kinds of fault that cannot be done on this machine, each with the program that it lacks."""
    return {kind: program for kind, program in PROGRAMS.items() if processes.which(program) is None}


def injector(field: Field, fault: Fault) -> Injector:
    """What does ``fault``."""
    return INJECTORS[fault.kind](field, fault)
