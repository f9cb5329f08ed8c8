"""What a lane computes with: reusable buffers, payloads by handle, sums of rounds, and each domain's memory.

What may live here: the bookkeeping of memory that does not outlive the process. What may not: files (`blocks.py`),
kernels over any of it (`encoding.py`, `averaging.py`, `exchanges.py`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcserver.core.events import DomainKey
from gcserver.runtime.blocks import DomainMemory


def rounded(size: int) -> int:
    """Bytes of the buffer that a pool hands out for ``size``: a power of two, a page at least."""
    return max(4096, 1 << (max(size, 1) - 1).bit_length())


class Pool:
    """Reusable buffers; one returns by itself when nothing refers to its memory any more."""

    def __init__(self, keep_bytes: int = 256 << 20) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._kept = 0
        self._keep_bytes = keep_bytes

    def take(self, size: int) -> memoryview:
        """``size`` bytes of unspecified content."""
        whole = rounded(size)
        stack = self._free.get(whole)
        if stack:
            base = stack.pop()
            self._kept -= whole
        else:
            base = np.empty(whole, np.uint8)
        # numpy collapses chains of views to the owner, so the thing whose end we watch is an array object
        # that only the memoryview (and whatever is cut from it) refers to.
        watched = base[:]
        weakref.finalize(watched, self._give, base)
        return memoryview(watched)[:size]  # type: ignore[arg-type]

    def _give(self, base: NDArray[np.uint8]) -> None:
        if self._kept + base.nbytes <= self._keep_bytes:
            self._free.setdefault(base.nbytes, []).append(base)
            self._kept += base.nbytes


@dataclass(slots=True)
class Handles:
    """Payloads by the number the machine knows them by."""

    table: dict[int, memoryview] = field(default_factory=dict)
    last: int = 0

    def add(self, payload: memoryview) -> int:
        self.last += 1
        self.table[self.last] = payload
        return self.last

    def release(self, handle: int) -> None:
        del self.table[handle]


@dataclass(slots=True)
class Accumulator:
    """Sum so far of one round: an own buffer, or references to one or two operands not yet added."""

    base: NDArray[Any] | None = None
    owned: bool = False
    pending: NDArray[Any] | None = None
    #: the sum lacks the loss scale that the result has to carry
    unscaled: bool = False
    #: a payload had the wrong length: there is no sum
    poisoned: bool = False


@dataclass(slots=True)
class Workspace:
    """What encoding, averaging and rounds of two exchanges on one lane have in common."""

    domains: dict[DomainKey, DomainMemory] = field(default_factory=dict)
    handles: Handles = field(default_factory=Handles)
    pool: Pool = field(default_factory=Pool)
    #: payload bytes of each block's newest contribution
    wire_bytes: dict[DomainKey, dict[int, int]] = field(default_factory=dict)


def as_bytes(view: memoryview) -> NDArray[np.uint8]:
    """The same memory as the codecs take it."""
    return np.frombuffer(view, np.uint8)
