"""How a kernel is declared, compiled ahead of time, cached and called: the numba side of all codecs.

What may live here: the ``kernel`` decorator and its register, the views of raw memory that kernels
use, and the check of arrays before their addresses are taken. No arithmetic.

Kernels take addresses (int64), lengths (int64) and float64 scalars, never arrays. So each has exactly
one signature: read-only arrays, arrays at odd addresses and subclasses are no new numba types, nothing
can compile in the middle of a step, and dispatch stays on numba's fast path. The price is that a
kernel trusts its caller: only the wrappers beside it call it, after ``address`` has checked the array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import extending, njit, types
from numba.core import cgutils, sigutils
from numba.core.registry import cpu_target
from numba.np.arrayobj import make_array, populate_array

from gcproto import layouts
from gcserver.codecs.base import CodecError

#: Every kernel of the package in order of declaration; ``warmup`` walks it.
KERNELS: list[Any] = []


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Declare a compiled, cached kernel that releases the GIL, with its only signature.

    signature: numba's notation, scalars only, e.g. ``"int64(int64, int64, float64)"``. Nothing is
    compiled or loaded here: that happens in ``warmup``, or at the first call where nobody warmed up.
    """

    def declare(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(nogil=True, cache=True)(function)
        dispatcher.declared_signature = signature
        _stamp(dispatcher, Path(function.__code__.co_filename))
        KERNELS.append(dispatcher)
        return dispatcher

    return declare


def compiled_for() -> frozenset[str]:
    """Features of the processor that kernels are compiled for, as LLVM names them; numba's cache tells them apart."""
    try:
        features = cpu_target.target_context.codegen().magic_tuple()[2]
    except AttributeError:  # another numba: the least that there is
        return frozenset()
    return frozenset(f[1:] for f in features.split(",") if f.startswith("+"))


def _stamp(dispatcher: Any, file: Path) -> None:
    """Tie cached code to the content of all sources it is made of: the package's, `layouts`, and the kernel's own file.

    numba ties it to the kernel's own file and that file's mtime: it would miss changes in the intrinsics
    of ``vector.py`` and in kernels inlined from elsewhere, and recompile after every checkout.
    """
    try:
        dispatcher._cache._cache_file._source_stamp = _sources_digest(file)
    except AttributeError:  # another numba: keep its own, weaker rule
        pass


@lru_cache(maxsize=1)
def _package_digest() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        # All of them: a helper inlined into a kernel may live in any.
        digest.update(path.read_bytes())
    digest.update(Path(layouts.__file__).read_bytes())
    return digest.digest()


@lru_cache(maxsize=64)
def _sources_digest(file: Path) -> str:
    own = b"" if file.parent == Path(__file__).parent else file.read_bytes()  # a third party's kernel
    return hashlib.sha256(_package_digest() + own).hexdigest()


def compile_kernel(dispatcher: Any) -> None:
    """Compile a kernel, or load it from the cache, and let it accept no other signature from then on."""
    if not dispatcher.signatures:
        # As types, not as written: the cache's key is the object given here, and a first call gives types.
        args, _ = sigutils.normalize_signature(dispatcher.declared_signature)
        dispatcher.compile(args)
    dispatcher.disable_compile()


def is_cached(dispatcher: Any) -> bool:
    """Whether the cache holds this kernel for this machine and these sources; reads one small file."""
    if dispatcher.signatures:
        return True
    try:
        cache = dispatcher._cache
        target = dispatcher.targetctx
        target.refresh()
        args, _ = sigutils.normalize_signature(dispatcher.declared_signature)
        key = cache._index_key(args, target.codegen())
        name = cache._cache_file._load_index().get(key)
        return name is not None and Path(cache._cache_file._data_path(name)).exists()
    except (AttributeError, OSError):
        return False


_F32, _U8, _U32, _I64 = (np.dtype(t) for t in (np.float32, np.uint8, np.uint32, np.int64))


def address(name: str, array: Any, dtype: np.dtype[Any], at_least: int = 0, write: bool = False) -> int:
    """The address of a contiguous one-dimensional array, after the checks that make it safe to use.

    dtype: exactly this one. at_least: elements it must hold. CodecError names the argument otherwise.
    """
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise CodecError(name, f"a one-dimensional {dtype} array", got)
    if array.size < at_least:
        raise CodecError(name, f"at least {at_least} elements", array.size)
    data, read_only = array.__array_interface__["data"]
    if read_only and write:
        raise CodecError(name, "a writable array", "a read-only one")
    if not array.flags.c_contiguous:
        raise CodecError(name, "a contiguous array", f"strides {array.strides}")
    return int(data)


def f32_address(name: str, array: Any, n: int, write: bool = False) -> int:
    """Address of a float32 array of exactly n elements."""
    where = address(name, array, _F32, n, write)
    if array.size != n:
        raise CodecError(name, f"{n} elements", array.size)
    return where


def state_addresses(codec: Any, x: Any, state_in: Any, state_out: Any, m: int) -> tuple[int, int, int]:
    """Addresses of gradient, old and new state of m segments, 0 where there is none; refuses one array in two roles.

    A state has exactly ``codec.state_floats(n, m)`` elements, its residual first.
    """
    n = np.size(x)
    px = f32_address("x", x, n)
    floats = codec.state_floats(n, m)
    if not floats and not codec.keeps_residual and n and not (state_in is None and state_out is None):
        raise CodecError("state", f"None ({codec.name} keeps none)", "an array")
    # Without error feedback an old residual is not looked at; a new one may still be asked for (audits).
    r = f32_address("state_in", state_in, floats) if state_in is not None and floats else 0
    wanted = floats or (n if codec.keeps_residual else 0)
    ro = f32_address("state_out", state_out, wanted, write=True) if state_out is not None else 0
    if wanted and ro and ro in (r, px):
        raise CodecError("state_out", "memory of its own (versions, not updates in place)", "an input's")
    return px, r, ro


def level_address(codec: Any, levels: Any, m: int) -> int:
    """Address of the checked levels of m segments, 0 for none: each a uint32 within ``codec.levels``."""
    if levels is None:
        return 0
    where = address("levels", levels, _U32, m)
    low, high = codec.levels
    if levels.size != m or (m and not low <= int(levels.min()) <= int(levels.max()) <= high):
        got = f"{levels.size} in [{levels.min()}, {levels.max()}]" if levels.size else "none"
        raise CodecError("levels", f"{m} in [{low}, {high}], one a segment", got)
    return where


def u8_address(name: str, array: Any, at_least: int = 0, write: bool = False) -> int:
    """Address of a uint8 array of at least so many bytes."""
    return address(name, array, _U8, at_least, write)


def as_bytes(payload: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A payload as uint8[nbytes] without a copy: an array as it is, any buffer as a view."""
    if isinstance(payload, np.ndarray):
        return payload
    return np.frombuffer(payload, np.uint8)


def segment_table(segments: Any, n: int) -> tuple[int, int, Any]:
    """(address, number of segments, array to keep alive) of a checked boundary table; None = one segment."""
    if segments is None:
        segments = np.array([0, n], np.int64)
    where = address("segments", segments, _I64, 2)
    # As a list: for the few segments of a block quicker than array operations, which cost microseconds each.
    edges = segments.tolist()
    if edges[0] != 0 or edges[-1] != n or edges != sorted(edges):
        raise CodecError("segments", f"ascending boundaries from 0 to {n}", edges[:8])
    return where, len(edges) - 1, segments


@njit(nogil=True)
def place(array):
    """Address of a kernel's own array. (As numba types it, uint64, it would turn sums into float64.)

    numba frees an array after the last line that names it, whoever still has its address: hand the array itself on
    with the address, or `hold` it. tests/unit/codecs/test_lifetimes.py reads every kernel for that.
    """
    return np.int64(array.ctypes.data)


@njit(nogil=True)
def hold(array):
    """Keeps an array alive until here."""
    return array.size


@njit(nogil=True)
def element(where, i):
    """Address of element i of a float32 array; of no array (where = 0) there is none (0)."""
    return where + 4 * i if where != 0 else where


def _view(element: Any) -> Any:
    # aligned=False: payloads start anywhere, and LLVM must not assume otherwise. It costs nothing on
    # any CPU of this decade.
    array_type = types.Array(element, 1, "C", aligned=False)

    @extending.intrinsic
    def view(typingctx: Any, where: Any, n: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array = make_array(array_type)(context, builder)
            item = context.get_data_type(element)
            size = cgutils.intp_t(context.get_abi_sizeof(item))
            populate_array(
                array,
                data=builder.inttoptr(args[0], item.as_pointer()),
                shape=[args[1]],
                strides=[size],
                itemsize=size,
                meminfo=None,
            )
            return array._getvalue()

        return array_type(types.int64, types.int64), codegen

    return view


#: ``f32(address, n)`` and so on: memory as an array inside a kernel, any alignment, not owned.
f32, f64 = _view(types.float32), _view(types.float64)
u8, u16, u32, u64 = (_view(t) for t in (types.uint8, types.uint16, types.uint32, types.uint64))
i8, i16, i32, i64 = (_view(t) for t in (types.int8, types.int16, types.int32, types.int64))
