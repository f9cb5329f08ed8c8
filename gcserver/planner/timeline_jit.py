"""How the planner's kernels are declared: compiled on first use, cached, without the GIL.

What may live here: the decorator. No arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import njit


def kernel(function: Callable[..., Any]) -> Any:
    """A compiled ``function``, cached until any of the planner's kernel files changes.

    numba ties cached code to the kernel's own file and its time of change: it would miss changes in kernels called
    from other files, and compile again after every checkout.
    """
    compiled: Any = njit(cache=True, nogil=True)(function)
    try:
        compiled._cache._cache_file._source_stamp = _digest()
    except AttributeError:  # another numba: keep its own, weaker rule
        pass
    return compiled


@lru_cache(maxsize=1)
def _digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*_kernels.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
