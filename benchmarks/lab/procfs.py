"""What processes use, read from /proc: families of pids, CPU time, memory, descriptors.

What may live here: reading, and killing what is left of a family. What may not: judging the numbers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> list[str]:
    # the command may hold spaces and parentheses, so the fields are counted from its closing one
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def tree(pid: int) -> list[int]:
    """``pid`` and all its descendants that live now."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                children.setdefault(int(_stat(int(entry))[1]), []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the processes with all their threads, ended ones too, in seconds at ns resolution.

    Reads the CPU-time clock of each process, where /proc/PID/stat would count in ticks of 10 ms; a process that is
    gone counts 0.
    """
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3): CPUCLOCK_SCHED of the process
    return total


class CpuClock:
    """CPU time of processes; of one that ends, what it had used when it was last looked at."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._used = dict.fromkeys(pids, 0.0)

    def seconds(self) -> float:
        """So much until now, s; never less than before."""
        for pid, used in self._used.items():
            self._used[pid] = max(used, cpu_seconds([pid]))
        return sum(self._used.values())


def anonymous_bytes(pids: Iterable[int]) -> int:
    """Resident memory that is the processes' own: heap and stacks, not files and not shared memory."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    total += int(line.split()[1]) * 1024
    return total


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of the processes (RSS), pages shared between them counted each time."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return total


def descriptors(pids: Iterable[int]) -> int:
    """Open file descriptors of the processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += len(os.listdir(f"/proc/{pid}/fd"))
    return total


def used_bytes(folder: Path) -> int:
    """Memory held by the files under a tmpfs folder: allocated blocks, whatever their length."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(root, name)).st_blocks * 512
    return total


def kill_survivors(pids: Iterable[int], grace: float = 2.0) -> list[int]:
    """SIGKILL to those of a family that still live ``grace`` seconds after their parent; returns which.

    A zombie does not live. The pids must have been listed moments ago, before numbers could be given out again.
    """
    left = list(pids)
    deadline = time.monotonic() + grace
    while left:
        left = [pid for pid in left if _alive(pid)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return left


def _alive(pid: int) -> bool:
    try:
        return _stat(pid)[0] not in "ZX"
    except (OSError, IndexError):
        return False
