"""Slow cores: processes that get a share of a core each, so that more of them have more, on a machine of few cores.

What may live here: that, by the system's control groups. What may not: which processes, and what is measured of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

#: where the CPU controller of version 1 is mounted
CPU = Path("/sys/fs/cgroup/cpu")
#: in every so many microseconds a process may run for its share
PERIOD_US = 10_000
PROCESSES = "cgroup.procs"


class QuotaError(RuntimeError):
    """Shares cannot be given here; ``str()`` says why."""


@contextlib.contextmanager
def slow(pids: Iterable[int], share: float, under: Path = CPU) -> Iterator[None]:
    """Within it each of ``pids``, with all of its threads, gets ``share`` of one core.

    Raises QuotaError where that cannot be: it takes root and control groups of version 1.
    """
    made: list[Path] = []
    try:
        for pid in pids:
            group = under / f"gclab-{os.getpid()}-{pid}"
            try:
                group.mkdir()
                made.append(group)
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)))
                (group / PROCESSES).write_text(str(pid))
            except OSError as error:
                raise QuotaError(f"{group}: {error.strerror}; shares take root and cgroups of version 1") from None
        yield
    finally:
        for group in made:
            for pid in (group / PROCESSES).read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (under / PROCESSES).write_text(pid)
            group.rmdir()
