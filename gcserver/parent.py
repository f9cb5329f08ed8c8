"""Processes that must not outlive the one that started them.

What may live here: asking the kernel for that. What may not: who starts whom; anything slow to import, since keepers
and lanes need this first.
"""

from __future__ import annotations

import ctypes
from typing import Final

#: prctl(2)
_PR_SET_PDEATHSIG: Final = 1


def ends_with_parent(signal: int) -> None:
    """In a child: get ``signal`` when the parent ends, however that ends. A parent that has ended already sends none;
    a child of this process forgets it, a program that it becomes does not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal)
