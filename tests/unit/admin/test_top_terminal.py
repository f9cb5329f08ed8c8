"""`gcctl top` on a real terminal: each look takes the place of the one before it, in the window's size of now.

What may live here: tests of gcctl with a pseudo-terminal. What may not: what a look says (`test_gcctl.py`).
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gcserver.admin.exits import Exit
from tests.unit.admin.serving import serving
from tests.unit.admin.source import FixedSource

CLEAR = "\x1b[H\x1b[2J"


class Terminal:
    """A window and the command in it; ``wait`` reads until the screen is as asked."""

    def __init__(self, lines: int, columns: int, *arguments: str) -> None:
        self.outside, self.inside = pty.openpty()
        self.resize(lines, columns)
        environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        command = [sys.executable, "-m", "gcserver.admin.gcctl", *arguments]
        ends: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), self.inside)
        self.process = subprocess.Popen(command, env=environ, start_new_session=True, **ends)
        self.read = ""

    def resize(self, lines: int, columns: int) -> None:
        termios.tcsetwinsize(self.inside, (lines, columns))

    def screen(self) -> list[str]:
        """Lines of the newest look that is whole, which the next one has begun to replace."""
        looks = self.read.split(CLEAR)
        return looks[-2].rstrip("\r\n").splitlines() if len(looks) > 2 else []

    def wait(self, wanted: Any) -> list[str]:
        end = time.monotonic() + 60
        while not wanted(self.screen()):
            assert time.monotonic() < end, self.read[-2000:]
            if select.select([self.outside], [], [], 1.0)[0]:
                self.read += os.read(self.outside, 65536).decode()
        return self.screen()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.outside)
        os.close(self.inside)


@contextmanager
def window(lines: int, columns: int, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(lines, columns, *arguments)
    try:
        yield terminal
    finally:
        terminal.close()


def test_a_look_fits_the_window_also_when_that_changes() -> None:
    with (
        serving(FixedSource()) as server,
        window(12, 60, "--address", server.address, "top", "--every", "100ms") as seen,
    ):
        small = seen.wait(bool)
        assert len(small) <= 12 and max(map(len, small)) <= 60
        seen.resize(50, 120)
        large = seen.wait(lambda screen: len(screen) > 12)
        assert len(large) <= 50 and max(map(len, large)) <= 120
        assert any(len(line) > 60 for line in large), "what was cut is there"
        seen.process.send_signal(signal.SIGINT)
        assert seen.process.wait(60) == Exit.INTERRUPTED
