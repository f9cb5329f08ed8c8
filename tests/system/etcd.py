"""A real etcd of one member on loopback, for tests.

What may live here: starting and ending it. What may not: what is kept in it, assertions.
"""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType

import pytest

from benchmarks.lab.daemons import free_ports
from tests.integration.forked import ends_with_parent

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)")
START_WITHIN = 30.0


class Etcd:
    """Use as a context manager; ``url`` is where its clients connect."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_ports(2)
        self.url = f"http://127.0.0.1:{self._port}"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Etcd:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Start it (again, with what it had), and wait until it answers."""
        peer = f"http://127.0.0.1:{self._port + 1}"
        argv = [
            "etcd", "--name", "one", "--data-dir", str(self._folder / "etcd"), "--listen-client-urls", self.url,
            "--advertise-client-urls", self.url, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"one={peer}", "--logger", "zap", "--log-outputs", str(self._folder / "etcd.log"),
        ]  # fmt: skip
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=ends_with_parent)
        end = time.monotonic() + START_WITHIN
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2.0) as response:
                    if b"true" in response.read():
                        return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"etcd did not start; see {self._folder / 'etcd.log'}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it as a crash would."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
