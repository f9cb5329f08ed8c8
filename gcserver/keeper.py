"""The keeper of a private daemon: starts it again when it dies, drains it when nobody uses it any more, cleans up.

What may live here: that. What may not: what the daemon is given (`private.py`), what it serves.

A process of its own in a session of its own, so that neither a terminal's signals nor the end of whoever asked for the
daemon ends it. Started as ``python -m gcserver.keeper FOLDER ALIVE HOLD DOOR [daemon's flags]``: ALIVE is the
descriptor of the lock that says the folder is needed, HOLD one that says that the daemon is used, DOOR the link by
which others find it, or empty.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from gcserver import private_folder
from gcserver.lives import PAUSE, Lives
from gcserver.parent import ends_with_parent
from gcserver.private_folder import Door

#: Longer than a daemon drains at most (node.stop_grace is bounded by an hour), seconds.
_END_FOR: Final = 3660.0


class Keeper:
    """One daemon's keeper; :meth:`run` returns its exit status."""

    def __init__(self, folder: Path, alive: int, hold: int, door: Door | None, command: Sequence[str]) -> None:
        self.folder = folder
        self.alive = alive
        self.users = private_folder.watch(folder)
        # Only now: who begins to read when nobody writes is never told that nobody does.
        os.close(hold)
        self.door = door
        self.command = command
        self.told, self.tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> int:
        """Keep the daemon until nobody uses it, it was told to end, or it cannot be started."""
        signal.set_wakeup_fd(self.tell)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        try:
            return self._keep()
        finally:
            # The folder first: who finds its lock free removes it.
            shutil.rmtree(self.folder, ignore_errors=True)

    def _keep(self) -> int:
        lives = Lives()
        while True:
            began = time.monotonic()
            # It has the lock too: should both be killed, its folder is not needed once both are gone. Should only the
            # keeper be, the daemon drains: nobody else would tell it to.
            daemon = subprocess.Popen(
                self.command, pass_fds=(self.alive,), preexec_fn=partial(ends_with_parent, signal.SIGTERM)
            )
            if self._over(daemon):
                daemon.terminate()
                return _ended(daemon)
            status = daemon.wait()
            if not lives.another(status, time.monotonic() - began):
                return status if status >= 0 else 128 - status
            print(f"gradcomm: the private daemon ended with {status}; starting it again", file=sys.stderr, flush=True)
            time.sleep(PAUSE)

    def _over(self, daemon: subprocess.Popen[bytes]) -> bool:
        """Wait. True once nobody uses the daemon or this process was told to end, False once the daemon has ended."""
        ended = os.pidfd_open(daemon.pid)
        try:
            while True:
                ready, _, _ = select.select([self.users, ended, self.told], [], [])
                if ended in ready:
                    return False
                if self.told in ready or self._closed():
                    return True
        finally:
            os.close(ended)

    def _closed(self) -> bool:
        """Whether nobody uses the daemon, and nobody will."""
        if self.door is None:
            return private_folder.nobody_uses(self.users)
        return self.door.close(self.folder, self.users)


def _ended(daemon: subprocess.Popen[bytes]) -> int:
    try:
        return daemon.wait(_END_FOR)
    except subprocess.TimeoutExpired:
        daemon.kill()
        return daemon.wait()


def main() -> int:
    folder, alive, hold, link, *flags = sys.argv[1:]
    door = Door(Path(link)) if link else None
    command = [sys.executable, "-m", "gcserver.cli", "run", *flags]
    return Keeper(Path(folder), int(alive), int(hold), door, command).run()


if __name__ == "__main__":
    sys.exit(main())
