"""Memory for new results, used again once nobody holds the old one.

What may live here: buffers of large results on the CPU. What may not: calls, copies, other devices (torch keeps CUDA
memory itself).

Fresh memory costs a page fault for every page, as long as the exchange itself for a large tensor. A result is
therefore a view of a buffer that comes back here when the tensor's storage is freed: not before the last tensor,
view or numpy array that shares it is gone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Final

import numpy as np
import torch

from gcclient.device import Bytes

#: Smaller results are allocated by torch, whose memory the C library keeps itself.
LEAST: Final = 1 << 20
#: What is kept without being used: at most this many buffers, and this many bytes.
MOST_BUFFERS: Final = 4
MOST_BYTES: Final = 512 << 20
_ALIGN: Final = 64  # what torch gives


class Results:
    """Buffers of freed results. Safe to use from several threads."""

    def __init__(self) -> None:
        self._idle: list[Bytes] = []  # oldest first
        self._lock = threading.Lock()
        # Storages are freed anywhere, also in the middle of a method of this class; what they return waits here.
        self._returned: deque[Bytes] = deque()

    def like(self, flat: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor like flat, contiguous ``flat``. A large one on the CPU cannot be resized."""
        n = flat.nbytes
        if flat.device.type != "cpu" or not LEAST <= n <= MOST_BYTES - _ALIGN:
            return torch.empty_like(flat)
        base = self._take(n)
        at = -base.ctypes.data % _ALIGN
        view = base[at : at + n]
        # torch's storage holds exactly this object.
        weakref.finalize(view, _give, weakref.ref(self), base).atexit = False
        return torch.from_numpy(view).view(flat.dtype)

    def _take(self, n: int) -> Bytes:
        """A buffer that fits ``n`` bytes and is not more than twice as large."""
        self._tidy()
        with self._lock:
            fits = [i for i, b in enumerate(self._idle) if n + _ALIGN <= b.nbytes <= 2 * n + _ALIGN]
            found = self._idle.pop(min(fits, key=lambda i: self._idle[i].nbytes)) if fits else None
        self._tidy()
        return np.empty(n + _ALIGN, np.uint8) if found is None else found

    def give(self, base: Bytes) -> None:
        self._returned.append(base)
        self._tidy()

    def _tidy(self) -> None:
        # Without waiting: whoever has the lock (maybe this very thread, interrupted) looks again after releasing it.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    self._idle.append(self._returned.popleft())
                while len(self._idle) > MOST_BUFFERS or sum(b.nbytes for b in self._idle) > MOST_BYTES:
                    del self._idle[0]
            finally:
                self._lock.release()


def _give(results: weakref.ref[Results], base: Bytes) -> None:
    """Return ``base``, unless the job it served is over."""
    known = results()
    if known is not None:
        known.give(base)
