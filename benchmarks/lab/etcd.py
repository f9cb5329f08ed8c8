"""A real etcd of one member on a host of a lab.

What may live here: starting and ending it. What may not: what is kept in it.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.lab import netns, processes
from benchmarks.lab.ports import free_ports

START_WITHIN = 30.0
#: said once there is a leader
READY = b"serving client traffic"


class Etcd(processes.Owner):
    """A context manager; ``url`` is where its clients connect. ``folder``: for its data and its log.

    Raises RuntimeError if it does not start within START_WITHIN seconds, FileNotFoundError where there is no etcd.
    """

    def __init__(self, folder: Path, host: netns.Host | None = None) -> None:
        self._folder = folder
        self._host = netns.Loopback(1).hosts[0] if host is None else host
        self._port = free_ports(2)
        self.url = f"http://{self._host.address}:{self._port}"
        self.process: subprocess.Popen[Any] | None = None

    def start(self) -> None:
        """Start it (again, with what it had), and wait until it serves."""
        peer = f"http://{self._host.address}:{self._port + 1}"
        log = self._folder / "etcd.log"
        before = log.stat().st_size if log.exists() else 0
        program = processes.which("etcd")
        if program is None:
            raise FileNotFoundError("etcd is not installed (Debian: etcd-server)")
        self.process = self._host.start([
            program, "--name", "one", "--data-dir", str(self._folder / "etcd"), "--listen-client-urls", self.url,
            "--advertise-client-urls", self.url, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"one={peer}", "--logger", "zap", "--log-outputs", str(log),
        ])  # fmt: skip
        end = time.monotonic() + START_WITHIN
        while not (log.exists() and READY in log.read_bytes()[before:]):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"etcd did not start; see {log}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it at once; what it has written stays."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _open(self) -> None:
        self.start()

    def close(self) -> None:
        self.stop()
