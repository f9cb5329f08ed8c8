"""Real ``gcserver`` daemons, one per host of a lab, with everything they leave behind removed.

What may live here: starting them, waiting until they are ready, ending them, what they use (pids, CPU time, memory).
What may not: workers, and anything measured with them.

Each cluster has a directory of its own for sockets and logs and another under /dev/shm for state, so that any number
of clusters can run side by side.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lab import netns, processes, procfs
from benchmarks.lab.ports import free_ports
from gcserver import keys

PORT = 7470  # in a namespace nobody else has it
READY = "ready: node"


class DaemonError(RuntimeError):
    """A daemon did not come up; ``str()`` names it and holds the end of its log."""


@dataclass(slots=True)
class Daemon:
    """One daemon: where it runs, where it is reached, its log. ``process`` is its present life."""

    name: str
    host: netns.Host
    socket: Path
    state: Path
    admin: str
    log: Path
    argv: list[str]
    process: subprocess.Popen[Any] = field(init=False)

    def pids(self) -> list[int]:
        """The daemon's processes: the supervisor, its lanes, whatever else it started."""
        return procfs.tree(self.process.pid)

    def environment(self, job: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables for a worker of ``job`` on this daemon's host."""
        return self.host.environment(base) | {"GC_NODE_SOCKET": str(self.socket), "GC_JOB": job}

    def log_tail(self, lines: int = 30) -> str:
        """The last lines it logged."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


class Daemons(processes.Owner):
    """A context manager: on entry one daemon per host, all ready; on exit all ended and their files removed.

    settings: keys of the configuration for every daemon, such as ``{"node.lanes": "2"}``. port: the first that they
    take in namespaces, where two clusters share the hosts. secured: each gets keys, and encrypts. routes: by (index,
    index of a peer) the endpoint at which the one is told to find the other, where something lies in between.
    variables: of their environment. Raises DaemonError if one ends or is not ready within ``patience`` seconds.
    """

    def __init__(
        self,
        hosts: Sequence[netns.Host],
        settings: Mapping[str, str] | None = None,
        patience: float = 30.0,
        port: int = PORT,
        secured: bool = False,
        routes: Mapping[tuple[int, int], str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts, self.settings, self.patience = tuple(hosts), dict(settings or {}), patience
        self.port, self.secured = port, secured
        self.routes, self.variables = dict(routes or {}), dict(variables or {})
        self.all: list[Daemon] = []
        self.folder = self.state = Path()

    def __getitem__(self, index: int) -> Daemon:
        return self.all[index]

    def __iter__(self) -> Iterator[Daemon]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def start(self, daemon: Daemon) -> None:
        """Starts (or, after its death, restarts) one daemon; does not wait."""
        with daemon.log.open("ab") as log:
            # numba and OpenMP threads would fight over the lane's core
            env = daemon.host.environment() | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
            for name in [n for n in env if n.startswith("GC_")]:
                del env[name]  # a worker's variables are not this daemon's configuration
            env |= self.variables
            daemon.process = daemon.host.start(daemon.argv, env=env, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        """Until every daemon says that it is ready."""
        deadline = time.monotonic() + self.patience
        for daemon in self.all:
            while READY not in daemon.log.read_text(errors="replace"):
                status = daemon.process.poll()
                if status is not None:
                    raise DaemonError(f"{daemon.name} ended with status {status}:\n{daemon.log_tail()}")
                if time.monotonic() > deadline:
                    raise DaemonError(f"{daemon.name} not ready after {self.patience:g} s:\n{daemon.log_tail()}")
                time.sleep(0.02)

    def close(self) -> None:
        """SIGTERM, then SIGKILL after 8 s (also to lanes left over); removes sockets, logs and state. Idempotent."""
        with processes.uninterrupted():
            daemons, self.all = self.all, []
            started = [d for d in daemons if hasattr(d, "process")]
            family = [pid for d in started if d.process.poll() is None for pid in d.pids()]
            processes.end([d.process for d in started], grace=8.0)
            procfs.kill_survivors(family)
            for folder in (self.folder, self.state):
                if folder != Path():
                    shutil.rmtree(folder, ignore_errors=True)

    def _open(self) -> None:
        warmup()
        self._prepare()
        for daemon in self.all:
            self.start(daemon)
        self.wait_ready()

    def _prepare(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gclab-"))
        # the process by which a test knows what was left behind from what belongs to somebody else
        self.state = Path(tempfile.mkdtemp(prefix=f"gclab-{os.getpid()}-", dir=state_folder()))
        lanes = int(self.settings.get("node.lanes", "1"))
        names = [f"n{i}" for i in range(len(self.hosts))]
        # on loopback the daemons share one set of ports
        each = lanes + 1  # the control link's
        first = free_ports(each * len(self.hosts))
        ports = [self.port if h.address != "127.0.0.1" else first + i * each for i, h in enumerate(self.hosts)]
        endpoints = [f"tcp://{h.address}:{p}" for h, p in zip(self.hosts, ports, strict=True)]
        if self.secured:
            pairs = [keys.generate(name) for name in names]
            for pair in pairs:
                keys.write(pair, self.folder)
            (self.folder / "peers").write_text("".join(keys.line(p.name, p.public) + "\n" for p in pairs))
        for i, (name, host, endpoint) in enumerate(zip(names, self.hosts, endpoints, strict=True)):
            seen = [self.routes.get((i, j), e) for j, e in enumerate(endpoints)]
            peers = ",".join(f"{n}={e}" for n, e in zip(names, seen, strict=True))
            admin = f"unix:{self.folder / name}.admin"
            given = {
                "node.name": name,
                "node.listen": endpoint,
                "node.socket": str(self.folder / f"{name}.sock"),
                "node.state": str(self.state / name),
                "node.admin": admin,
                "node.metrics": "",
                "plan.profiles": "",  # no run depends on those before it
                "cluster.peers": peers,
                "insecure": "true",
                **self.settings,
            }
            if self.secured:
                given |= {"security.key": f"{self.folder / name}.key", "security.peers": f"{self.folder}/peers"}
            argv = [program("gcserver"), "run"]
            argv += [word for key, value in given.items() for word in (f"--{key}", value)]
            paths = (self.folder / f"{name}.sock", self.state / name)
            self.all.append(Daemon(name, host, *paths, admin, self.folder / f"{name}.log", argv))


def state_folder() -> Path:
    """Where the daemons' shared memory lies."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def program(name: str) -> str:
    """The path of ``gcserver`` or ``gcctl`` in this environment."""
    return str(Path(sys.executable).with_name(name))


def lane_pids(pids: Iterable[int]) -> list[int]:
    """Those of the pids that are lanes."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"gcserver.runtime.lane" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@functools.cache
def warmup() -> None:
    """Compiles the kernels, or nothing if they are cached: daemons that had to would not be ready for a minute."""
    argv = [program("gcserver"), "warmup"]
    subprocess.run(argv, check=True, start_new_session=True, stdout=2)  # what it says is progress


def workers_stopped(workers: Sequence[subprocess.Popen[Any]], timeout: float) -> list[int]:
    """Waits for all; their exit statuses. The first failure or the timeout ends the others, whatever they wait for."""
    deadline = time.monotonic() + timeout
    try:
        while any(w.poll() is None for w in workers):
            if any(w.poll() for w in workers) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
    finally:
        processes.end(workers, grace=3.0)
    return [w.returncode for w in workers]


def job_name(prefix: str) -> str:
    """A label that no other run uses."""
    return f"{prefix}-{os.getpid()}-{random.SystemRandom().randrange(1 << 24):06x}"
