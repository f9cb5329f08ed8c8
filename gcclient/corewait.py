"""How long a thread was ready to run and had no core.

What may live here: reading that from the system. What may not: what is timed with it (`timing.py`).
"""

from __future__ import annotations

import os
from threading import get_native_id
from typing import BinaryIO


class CoreWait:
    """Seconds that one thread has waited for a core since it called :meth:`here`, as the first to do so.

    Linux counts them (``/proc/.../schedstat``, its second number, ns); where it does not, they are 0. One reading takes
    about a microsecond, from whichever thread.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._watching = False
        self._before = 0.0
        self._seconds = 0.0

    def here(self) -> None:
        """The calling thread is the one, unless another was before."""
        if not self._watching:
            self._watching = True
            try:
                self._file = open(f"/proc/self/task/{get_native_id()}/schedstat", "rb", buffering=0)  # noqa: SIM115
            except OSError:
                return
            self._before = self.seconds()
            self._seconds = 0.0

    def seconds(self) -> float:
        """Never less than before; it stands still once the thread has ended."""
        if self._file is not None:
            try:
                self._seconds = int(os.pread(self._file.fileno(), 64, 0).split()[1]) * 1e-9 - self._before
            except (OSError, ValueError, IndexError):
                self._file.close()
                self._file = None
        return self._seconds
