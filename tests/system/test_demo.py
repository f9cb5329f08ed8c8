"""The demo as a newcomer runs it, but shorter; and that nothing of it is left, also after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from benchmarks.lab import netns

pytestmark = [pytest.mark.system, pytest.mark.timeout(540)]

MARK = "DEMO_UNDER_TEST"


def marked(mark: str) -> list[str]:
    """Command lines of processes that inherited our mark, whatever became of their parents."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if f"{MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                pass
    return found


class Demo:
    """The demo as a process, with a mark on everything it starts and its own folder for temporary files."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.mark, self.folder = uuid.uuid4().hex, folder / "tmp"
        self.folder.mkdir()
        env = os.environ | {MARK: self.mark, "TMPDIR": str(self.folder)}
        command = [sys.executable, "-m", "examples.demo", "--plot", str(folder / "demo.png"), *argv]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def nothing_left(self) -> bool:
        deadline = time.monotonic() + 20.0
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []
        assert list(self.folder.iterdir()) == []
        assert list(Path("/dev/shm").glob(f"gclab-{self.process.pid}-*")) == []
        return True


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a short name: sockets lie below it."""
    return tmp_path_factory.mktemp("demo")


def test_the_demo_from_end_to_end(folder: Path) -> None:
    report = folder / "demo.json"
    # So slow that what a busy machine takes for computing does not hide what compression saves.
    demo = Demo(folder, "--seconds", "3", "--steps", "3", "--rate", "100mbit", "--json", str(report))
    printed, _ = demo.process.communicate(timeout=520)
    assert demo.process.returncode == 0, printed
    assert demo.nothing_left()
    rows = json.loads(report.read_text())["rows"]
    by_method = {row["method"]: row for row in rows}
    assert list(by_method) == ["gloo", "gradcomm none", "gradcomm fp16", "gradcomm onebit", "set-codec fp16"]
    assert by_method["gradcomm onebit"]["step_bytes"] < by_method["gloo"]["step_bytes"] / 20
    assert by_method["gradcomm fp16"]["step_bytes"] < by_method["gloo"]["step_bytes"] * 0.6
    assert "none lost" in printed
    assert "torchrun" in printed
    assert 10_000 < (folder / "demo.png").stat().st_size < 200_000
    if netns.shaping() is None:
        assert "unshaped: no speed-up to expect here" in printed
    else:
        assert by_method["gradcomm onebit"]["speedup"] > 1.5
    # the same batches from the same weights: losses of exact averages agree
    gloo, none = (by_method[m]["loss_timed_steps"] for m in ("gloo", "gradcomm none"))
    assert none == pytest.approx(gloo, rel=1e-3)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(folder: Path, signum: signal.Signals) -> None:
    demo = Demo(folder, "--steps", "500")
    deadline = time.monotonic() + 120
    # until workers train inside, beside daemons
    while not any("train_gpt" in line for line in marked(demo.mark)):
        assert demo.process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    demo.process.send_signal(signum)
    printed, _ = demo.process.communicate(timeout=60)
    assert demo.process.returncode == 128 + signum, printed
    assert "Traceback" not in printed
    assert demo.nothing_left()
