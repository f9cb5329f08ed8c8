"""Contiguous views of inputs that lie in several slots of an arena.

What may live here: mapping the pages of a tensor's input slots a second time, side by side. What may not: steps, calls.

A tensor of several blocks has an input slot for each, maybe in arenas of several lanes. Slots of a block that is not
alone start on a page, so their pages can be mapped again one after the other: the tensor then lives in the arena, and
what is written to it needs no copy before the lane reads it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gcclient.arena import BlockPlace
from gcclient.device import Bytes
from gcproto.manifest import PAGE

_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_PROT_NONE: Final = 0
_FAILED: Final = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.syscall.restype = ctypes.c_long
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

#: The number of mremap. The system is asked itself: where UCX is in the process, as some of torch's libraries bring it,
#: it puts a function of four arguments in the place of libc's, and a fifth that is lost moves memory anywhere.
_MREMAP: Final = {"x86_64": 25, "aarch64": 216, "riscv64": 216, "ppc64le": 163, "s390x": 163}.get(platform.machine())


def inputs(places: Sequence[BlockPlace]) -> Bytes:
    """The input slots of a tensor's blocks as one uint8[sum of their bytes], in address order.

    The memory stays valid for as long as the array or a view of it is held, also after the arena was closed.
    Raises OSError when the system does not map it.
    """
    if not places:
        return np.empty(0, np.uint8)
    if len(places) == 1:
        return places[0].input
    total = sum(p.block.nbytes for p in places)
    length = -(-total // PAGE) * PAGE
    base = _libc.mmap(None, length, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    _refuse(base == _FAILED, "address space", length)
    try:
        at = base
        for place in places:
            size = -(-place.block.nbytes // PAGE) * PAGE
            # Old size 0: not moved but mapped once more, which shared mappings allow.
            source, flags = place.input.ctypes.data, _MREMAP_MAYMOVE | _MREMAP_FIXED
            _refuse(_remap(source, size, flags, at) == -1, "a second mapping of the arena", size)
            # Faults now rather than within a step; a kernel without this one faults then.
            _libc.madvise(at, size, _MADV_POPULATE_WRITE)
            at += place.block.nbytes
        view: Any = (ctypes.c_uint8 * total).from_address(base)
    except OSError:
        _libc.munmap(base, length)
        raise
    weakref.finalize(view, _libc.munmap, base, length).atexit = False
    return np.frombuffer(view, np.uint8)


def _remap(source: int, size: int, flags: int, at: int) -> int:
    if _MREMAP is None:
        ctypes.set_errno(errno.ENOSYS)
        return -1
    return int(_libc.syscall(*(ctypes.c_long(x) for x in (_MREMAP, source, 0, size, flags, at))))


def _refuse(failed: bool, what: str, nbytes: int) -> None:
    if failed:
        number = ctypes.get_errno() or errno.ENOMEM
        raise OSError(number, f"{what} of {nbytes} bytes: {os.strerror(number)}")
