"""Memory that outlives the process: files in shared memory, mapped.

What may live here: creating, prefaulting, mapping and removing files under the daemon's state directory, a bump
allocator over them, the number of a life. What may not: what is stored (`blocks.py`, `ledger.py`).

Every byte is allocated with posix_fallocate before it is mapped, so a full /dev/shm is an error where it can
be reported, never a SIGBUS in the middle of a step.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

PAGE = mmap.PAGESIZE
MIN_CHUNK = 1 << 20
#: What is larger has a file of its own in a heap; so at most this much is left over in a shared one.
OWN_CHUNK = MIN_CHUNK // 4
_POPULATE_WRITE = 23
#: Between two lives: numbers that one gives to what it begins (a job's gathering) follow its own. A millisecond, so
#: that lives are not numbered ahead of the clock.
_APART = 1 << 20


class MemoryShort(OSError):
    """Shared memory cannot be had: names the file, its size and what is free."""


class MemoryDamaged(ValueError):
    """What an earlier life left cannot be what it wrote: names the block, what is there and what could be."""


@dataclass(slots=True)
class MappedFile:
    """One file, mapped as a whole."""

    path: Path
    size: int
    view: memoryview
    fresh: bool
    _map: mmap.mmap

    def open_descriptor(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)


def map_file(path: Path, size: int) -> MappedFile:
    """Create (mode 0600) or reopen ``path`` with ``size`` bytes and map it, every page present.

    Raises :class:`MemoryShort`.
    """
    fresh = True
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = not path.exists() or path.stat().st_size != size
        if fresh:
            # One of another size is damaged: nothing of it is kept, and whoever has it mapped keeps what it has.
            path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
    except OSError as error:
        if fresh:
            path.unlink(missing_ok=True)
        raise MemoryShort(error.errno, _shortage(path, size, error)) from error
    # Kernels before 5.14 do not know this; their pages come with the first touch instead.
    with contextlib.suppress(OSError, ValueError):
        mapped.madvise(_POPULATE_WRITE)
    return MappedFile(path, size, memoryview(mapped), fresh, mapped)


def _shortage(path: Path, size: int, error: OSError) -> str:
    try:
        free = f"{shutil.disk_usage(path.parent).free >> 20} MiB are free on that file system"
    except OSError:
        free = "its folder is not there"
    return f"{size >> 20} MiB of shared memory cannot be had for {path.name}: {error.strerror}; {free}"


def incarnation(path: Path) -> int:
    """A number for this life of a process, above those of all lives that left theirs in ``path``: the time, ns, unless
    the clock was set back meanwhile.

    Peers take whatever comes from a lower one for an echo of a former life, and drop it.
    """
    try:
        before = int(path.read_text())
    except (OSError, ValueError):
        before = 0
    number = max(time.time_ns(), before + _APART)
    # A file system without a page to spare must not keep a process from starting.
    with contextlib.suppress(OSError):
        replace_file(path, str(number).encode())
    return number


def replace_file(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all, mode 0600; what was there before stays until then. Raises OSError."""
    partial = path.with_suffix(".new")
    try:
        partial.touch(mode=0o600)
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def private_directory(path: Path) -> None:
    """Make ``path`` (and what leads to it) ours alone, mode 0700. Raises PermissionError if somebody else's is there.

    Its place in a folder that everybody may write to can be guessed, so who owns it is looked at.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = path.lstat().st_uid
    if owner != os.getuid():
        raise PermissionError(f"{path} belongs to uid {owner}, not to this daemon (uid {os.getuid()}); remove it")
    path.chmod(0o700)


@dataclass(slots=True)
class Heap:
    """Bump allocator over chunk files ``<stem>.heap<i>``; a reference is (chunk, offset).

    What is large has a chunk of its own; the rest shares chunks of MIN_CHUNK, the newest of which is filled up.
    """

    directory: Path
    stem: str
    chunks: list[MappedFile] = field(default_factory=list)
    _open: int = -1
    _used: int = 0

    def reopen(self) -> None:
        """Map the chunks an earlier life left. What it used is not known, so new things go to a new chunk."""
        while (path := self._path(len(self.chunks))).exists():
            if path.stat().st_size == 0:
                # Killed between making the file and giving it its memory: nothing refers to it.
                path.unlink()
                return
            self.chunks.append(map_file(path, path.stat().st_size))

    def allocate(self, size: int) -> tuple[int, int]:
        """``size`` zeroed bytes, 64-byte aligned. Raises :class:`MemoryShort`."""
        if size > OWN_CHUNK:
            return self._new_chunk(-(-size // PAGE) * PAGE), 0
        at = -(-self._used // 64) * 64
        if self._open < 0 or at + size > MIN_CHUNK:
            self._open, at = self._new_chunk(MIN_CHUNK), 0
        self._used = at + size
        return self._open, at

    def _new_chunk(self, size: int) -> int:
        self.chunks.append(map_file(self._path(len(self.chunks)), size))
        return len(self.chunks) - 1

    def view(self, reference: tuple[int, int], size: int) -> memoryview:
        chunk, at = reference
        return self.chunks[chunk].view[at : at + size]

    def holds(self, reference: tuple[int, int], size: int) -> bool:
        """Whether there are ``size`` bytes at a reference that was read from a file."""
        chunk, at = reference
        return 0 <= chunk < len(self.chunks) and at % 64 == 0 and at + size <= self.chunks[chunk].size

    def _path(self, index: int) -> Path:
        return self.directory / f"{self.stem}.heap{index}"

    @property
    def nbytes(self) -> int:
        return sum(c.size for c in self.chunks)
