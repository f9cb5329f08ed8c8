"""Compiling every kernel before the daemon needs it, and knowing whether that has been done.

What may live here: the walk over the declared kernels. ``gcserver warmup`` and the daemon's start call
it; afterwards no kernel can compile, whatever it is called with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gcserver.codecs.jit import KERNELS, compile_kernel, is_cached
from gcserver.codecs.registry import load


def _quiet(name: str, done: int, total: int) -> None:
    pass


def kernels() -> list[Any]:
    """Every kernel the daemon uses, in order of declaration."""
    load()
    return list(KERNELS)


def warmup(progress: Callable[[str, int, int], None] = _quiet) -> None:
    """Compile every kernel, or load it from the cache (some hundred ms when warm, most of a minute when not).

    progress(name, done, total) is called before each kernel with the number done so far, and once at the
    end with an empty name. Idempotent. A kernel called after this with arguments of another type raises
    TypeError instead of compiling.
    """
    wanted = kernels()
    total = len(wanted)
    for done, dispatcher in enumerate(wanted):
        progress(dispatcher.__name__, done, total)
        compile_kernel(dispatcher)
    progress("", total, total)


def is_warm() -> bool:
    """Whether the cache holds every kernel for this CPU and these sources; compiles and loads nothing."""
    return all(is_cached(dispatcher) for dispatcher in kernels())
