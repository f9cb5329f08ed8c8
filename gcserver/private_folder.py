"""The folder of a private daemon: how it is made, who still needs it, how others find it.

What may live here: files, locks and the FIFO in it. What may not: processes (`private.py`, `keeper.py`), anything slow
to import, since a keeper lives as long as its daemon.

It is this user's alone, mode 0700, on a tmpfs: sockets, the daemon's state, and three files of its own. ``users`` is a
FIFO: the daemon lives for as long as anybody has it open for writing, which ends with a process however that ends.
``alive`` is locked by whoever still needs the folder. ``cores`` lists the cores the daemon is pinned to, which other
private daemons leave alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gcproto.paths import USERS
from gcserver.runtime.statefiles import private_directory

#: where folders of all users lie
SHARED: Final = Path("/dev/shm")
_PREFIX: Final = "job-"
_ALIVE: Final = "alive"
_CORES: Final = "cores"
_LOCK: Final = "private.lock"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file that its holder may remove."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)


def _is(descriptor: int, path: Path) -> bool:
    """Whether what is open as ``descriptor`` is still what lies at ``path``."""
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def base() -> Path:
    """Where this user's folders are. Raises PermissionError where somebody else's is in its place."""
    mine = SHARED / f"gradcomm-{os.getuid()}"
    private_directory(mine)
    # What lies beside it is called after nodes, whose names begin with no dot.
    folder = mine / ".private"
    private_directory(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Folder:
    """A new one. ``alive``: descriptor of the lock that says it is needed, ``hold``: one that keeps its daemon."""

    path: Path
    alive: int
    hold: int


def make() -> Folder:
    """A new folder; those that nobody needs any more are removed. Raises OSError."""
    root = base()
    with locked(root / _LOCK):
        _sweep(root)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        alive = os.open(path / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(alive, fcntl.LOCK_EX)
        os.mkfifo(path / USERS, 0o600)
        # For reading too: a FIFO cannot be opened for writing alone before its reader is there.
        return Folder(path, alive, os.open(path / USERS, os.O_RDWR | os.O_CLOEXEC))


def _sweep(root: Path) -> None:
    """Remove folders whose keeper and daemon were killed."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder / _ALIVE, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


def reserve_cores(folder: Path, lanes: int, allowed: set[int]) -> tuple[int, ...]:
    """The cores for the lanes of the daemon in ``folder``: the last of those allowed that no other private daemon has.

    None where the job would be left with less than as many again and two more: then nothing is pinned.
    """
    with locked(folder.parent / _LOCK):
        taken: set[int] = set()
        for file in folder.parent.glob(f"{_PREFIX}*/{_CORES}"):
            with suppress(OSError):
                taken |= {int(word) for word in file.read_text().split()}
        free = sorted(allowed - taken)
        cores = tuple(free[-lanes:]) if len(free) >= 2 * lanes + 2 else ()
        (folder / _CORES).write_text(" ".join(map(str, cores)))
        return cores


# ------------------------------------------------------------------------------------------------ users
def join(folder: Path) -> int:
    """A descriptor that keeps the daemon of ``folder`` alive. Raises OSError where its keeper is gone."""
    return os.open(folder / USERS, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def watch(folder: Path) -> int:
    """The keeper's end of the FIFO: readable once nobody uses the daemon any more."""
    return os.open(folder / USERS, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def nobody_uses(users: int) -> bool:
    """Whether nobody has the FIFO open for writing any more."""
    return bool(select.select([users], [], [], 0)[0])


# ------------------------------------------------------------------------------------------------ doors
@dataclass(frozen=True, slots=True)
class Door:
    """Where those who say the same name find one daemon: a link to its folder."""

    link: Path

    @classmethod
    def named(cls, name: str) -> Door:
        return cls(base() / f"auto-{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}")

    @property
    def lock(self) -> Path:
        return self.link.with_name(f"{self.link.name}.lock")

    def enter(self) -> tuple[Path, int] | None:
        """The folder behind it and a descriptor that keeps its daemon alive; None if there is none. Locked."""
        try:
            folder = self.link.resolve(strict=True)
            return folder, join(folder)
        except OSError:  # nobody reads its FIFO: it is about to end, or did
            return None

    def open(self, folder: Path) -> None:
        """From now on it leads to ``folder``. Locked."""
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(folder)

    def close(self, folder: Path, users: int) -> bool:
        """Close it if nobody uses the daemon of ``folder``: who asks from now on starts another one.

        ``users``: the keeper's end of its FIFO. Returns whether nobody uses it.
        """
        with locked(self.lock):
            if not nobody_uses(users):
                return False
            if self.link.is_symlink() and self.link.readlink() == folder:
                self.link.unlink()
            self.lock.unlink(missing_ok=True)
            return True
