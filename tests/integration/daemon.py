"""One real daemon on loopback, for tests.

What may live here: starting, killing and restarting it, its log. What may not: daemons that know each other, workers
(`cluster.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.lab.daemons import lane_pids
from gcserver import ports
from tests.integration.forked import Forked, ends_with_parent

ROOT = Path(__file__).resolve().parents[2]
START_WITHIN = 120.0
#: `comm` of a lane of a forked daemon
LANE = "gc-test-lane"


def _serve(argv: Sequence[str], lanes: int) -> None:
    # Whoever starts daemons stays light: only what is forked has loaded it.
    from tests.integration.forked_daemon import serve

    serve(argv, lanes)


class Daemon:
    """One `gcserver run`. Its log is ``log``; ``pid`` is the supervisor's. ``forked``: see `forked_daemon.py`."""

    def __init__(self, name: str, port: int, folder: Path, options: Mapping[str, str], forked: bool) -> None:
        self.name = name
        self.address = f"tcp://127.0.0.1:{port}"
        self.socket = folder / f"{name}.sock"
        self.log = folder / f"{name}.log"
        self.state = Path("/dev/shm") / f"gradcomm-test-{name}"
        self.options = dict(options)
        self.forked = forked
        self.process: subprocess.Popen[bytes] | Forked | None = None
        self.lives = 0

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start it (again); returns at once."""
        self.lives += 1
        flags = {
            "node.name": self.name,
            "node.listen": self.address,
            "node.socket": str(self.socket),
            "node.state": str(self.state),
            **dict.fromkeys(("node.admin", "node.metrics", "plan.profiles"), ""),
            **self.options,
        }
        argv = ["run"]
        for key, value in flags.items():
            argv += [f"--{key}", value]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("GC_")}
        if self.forked:
            self.process = Forked(
                functools.partial(_serve, tuple(argv), int(flags["node.lanes"])), environ, ROOT, self.log
            )
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gcserver.cli", *argv], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, preexec_fn=ends_with_parent,
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Until this life says it is ready. Raises RuntimeError with its log if it ends or takes too long."""
        end = time.monotonic() + START_WITHIN
        while self.text().count("ready: node") < self.lives:
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"daemon {self.name} did not become ready; its log:\n{self.text()}")
            time.sleep(0.02)

    def text(self) -> str:
        """All lives' log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def lane_pids(self) -> list[int]:
        """Processes of its lanes."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        comms = {int(child): Path(f"/proc/{child}/comm") for child in children}
        forked = [pid for pid, comm in comms.items() if comm.exists() and comm.read_text().strip() == LANE]
        return forked + lane_pids(comms)

    def kill(self) -> None:
        """SIGKILL the supervisor and its lanes, as a crash of the whole daemon would."""
        for pid in self._kill():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._wait_free()

    def kill_lane(self) -> None:
        """SIGKILL its first lane; the supervisor starts it again by itself."""
        os.kill(self.lane_pids()[0], signal.SIGKILL)

    def kill_supervisor(self) -> None:
        """SIGKILL the supervisor alone; its lanes end with it."""
        self._kill()
        self._wait_free()

    def _wait_free(self) -> None:
        """Until its ports are: one that is forked asks for them sooner than one that was killed gives them back."""
        host, port = self.address.removeprefix("tcp://").split(":")
        end = time.monotonic() + START_WITHIN
        while not ports.free(host, int(port), int(self.options["node.lanes"]) + 1):
            assert time.monotonic() < end, f"{self.address} is still bound by a daemon that was killed"
            time.sleep(0.002)

    def _kill(self) -> list[int]:
        """The lanes that it had."""
        assert self.process is not None
        lanes = self.lane_pids()
        self.process.kill()
        self.process.wait()
        return lanes

    def restart(self) -> None:
        """:meth:`kill`, and start it again."""
        self.kill()
        self.start()

    def restart_supervisor(self) -> None:
        """:meth:`kill_supervisor`, and start it again, as a service manager would."""
        self.kill_supervisor()
        self.start()

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL after ten seconds; removes its memory. Returns the exit status."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.state, ignore_errors=True)
        return self.process.returncode
