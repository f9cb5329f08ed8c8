"""Kernels of uncompressed aggregation: sums, scaled sums, and loads and stores of every element type.

What may live here: exact arithmetic on dense arrays, in the order the caller fixes (member or rank order).
Nothing here knows who sent what. Every function checks its arrays (CodecError) and then makes one pass;
those that end an aggregation also count non-finite results in that pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gcproto.dtypes import DType
from gcserver.codecs.base import F32, U8, CodecError
from gcserver.codecs.casts import (
    add_bfloat,
    add_half,
    add_raw,
    load_bfloat,
    load_half,
    load_raw,
    store_bfloat,
    store_half,
    store_raw,
)
from gcserver.codecs.jit import (
    address,
    as_bytes,
    f32_address,
    f64,
    i8,
    i16,
    i32,
    i64,
    kernel,
    u8,
    u8_address,
)
from gcserver.codecs.vector import F32 as F
from gcserver.codecs.vector import Ops, elementwise


def _sum(count: int) -> Any:
    def body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
        total = values[0]
        for value in values[1:]:
            total = ops.b.fadd(total, value)
        return [total]

    return elementwise([F] * count, [F], body)


def _add_scale(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    result = ops.b.fmul(ops.b.fadd(values[0], values[1]), scalars[0])
    ops.count(ops.nonfinite(result), 0)
    return [result]


sum_two, sum_three, sum_four = _sum(2), _sum(3), _sum(4)
add_scaled = elementwise([F, F], [F], _add_scale)

ADD, ADD_SCALE, SCALE = range(3)


@kernel("int64(int64, int64, int64, int64, int64, float64)")
def combine(op, out, a, b, n, scale):
    """out = a + b, (a + b)*scale or a*scale (b unused); the latter two return the non-finite results."""
    if op == ADD:
        sum_two((a, b, out), n, (1.0,))
        return 0
    if op == ADD_SCALE:
        return add_scaled((a, b, out), n, (scale,))[0]
    return store_raw((a, out), n, (scale,))[0]


SUM_BLOCK = 4096  #: elements summed over all ranks before moving on, so that partial sums stay in L1


@kernel("void(int64, int64, int64, int64)")
def sum_table(out, table, k, n):
    """out = ((x0 + x1) + x2) + ... of the k arrays whose addresses the table holds, k >= 2."""
    x = i64(table, k)
    if k == 2:
        sum_two((x[0], x[1], out), n, (1.0,))
    elif k == 3:
        sum_three((x[0], x[1], x[2], out), n, (1.0,))
    elif k == 4:
        sum_four((x[0], x[1], x[2], x[3], out), n, (1.0,))
    else:
        for start in range(0, n, SUM_BLOCK):
            size, at = min(SUM_BLOCK, n - start), 4 * start
            o = out + at
            sum_four((x[0] + at, x[1] + at, x[2] + at, x[3] + at, o), size, (1.0,))
            for j in range(4, k):
                sum_two((o, x[j] + at, o), size, (1.0,))


def add2(out: F32, a: F32, b: F32) -> None:
    """out = a + b (float32[n]); out may be a or b."""
    _combine(ADD, out, a, b, 1.0)


def add2_scale(out: F32, a: F32, b: F32, scale: float) -> int:
    """out = (a + b)*scale (float32[n]); returns the number of non-finite results."""
    return _combine(ADD_SCALE, out, a, b, scale)


def acc_add(acc: F32, x: F32) -> None:
    """acc += x (float32[n])."""
    _combine(ADD, acc, acc, x, 1.0)


def acc_add_scale(out: F32, acc: F32, x: F32, scale: float) -> int:
    """out = (acc + x)*scale (float32[n]), the last addition of an average; returns the non-finite results."""
    return _combine(ADD_SCALE, out, acc, x, scale)


def scale_copy(out: F32, x: F32, scale: float) -> int:
    """out = x*scale (float32[n]); returns the number of non-finite results."""
    return _combine(SCALE, out, x, x, scale)


def _combine(op: int, out: F32, a: F32, b: F32, scale: float) -> int:
    n = out.size
    target = f32_address("out", out, n, write=True)
    first, second = f32_address("a", a, n), f32_address("b", b, n)
    return int(combine(op, target, first, second, n, float(scale)))


def sum_ranks(out: F32, arrays: Sequence[F32]) -> None:
    """out = arrays[0] + arrays[1] + ... in that order, in one pass over memory (float32[n] each).

    out may be the first array, no other.
    """
    n = out.size
    target = f32_address("out", out, n, write=True)
    where = [f32_address(f"arrays[{i}]", x, n) for i, x in enumerate(arrays)]
    if not where:
        raise CodecError("arrays", "at least one array", "none")
    if n and target in where[1:]:
        raise CodecError("out", "memory of its own, or that of arrays[0]", "a later array's")
    if len(where) == 1:
        np.copyto(out, arrays[0])
        return
    table = np.array(where, np.int64)
    sum_table(target, address("table", table, table.dtype), len(where), n)


_ACCUMULATE: dict[DType, np.dtype[Any]] = {
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float32),
    DType.BF16: np.dtype(np.float32),
    DType.F64: np.dtype(np.float64),
    DType.I8: np.dtype(np.int8),
    DType.I16: np.dtype(np.int16),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.uint8),
}

# numba freezes globals into compiled code, so the enumeration's values are named once here.
_F32, _F16, _BF16, _F64 = int(DType.F32), int(DType.F16), int(DType.BF16), int(DType.F64)
_I8, _I16, _I32, _I64 = int(DType.I8), int(DType.I16), int(DType.I32), int(DType.I64)
_U8, _BOOL = int(DType.U8), int(DType.BOOL)


@njit(nogil=True)
def accumulate(acc, x, n, add):
    """acc = (or +=) x for arrays of one type; integers wrap."""
    if add:
        for i in range(n):
            acc[i] += x[i]
    else:
        for i in range(n):
            acc[i] = x[i]


@njit(nogil=True)
def divide(out, acc, n, divisor):
    """out = acc/divisor for arrays of one integer type, toward zero as C and NCCL divide."""
    if divisor == 1:
        for i in range(n):
            out[i] = acc[i]
        return
    for i in range(n):
        value = np.int64(acc[i])
        quotient = value // divisor
        if quotient < 0 and quotient * divisor != value:
            quotient += 1
        out[i] = quotient


@kernel("void(int64, int64, int64, int64, boolean)")
def typed_load(dtype, acc, x, n, add):
    """acc = (or +=) x converted to the accumulator's type; booleans become 0 or 1 and add as "or"."""
    if dtype == _F32:
        if add:
            add_raw((acc, x, acc), n, (1.0,))
        else:
            load_raw((x, acc), n, (1.0,))
    elif dtype == _F16:
        if add:
            add_half((acc, x, acc), n, (1.0,))
        else:
            load_half((x, acc), n, (1.0,))
    elif dtype == _BF16:
        if add:
            add_bfloat((acc, x, acc), n, (1.0,))
        else:
            load_bfloat((x, acc), n, (1.0,))
    elif dtype == _F64:
        accumulate(f64(acc, n), f64(x, n), n, add)
    elif dtype == _I64:
        accumulate(i64(acc, n), i64(x, n), n, add)
    elif dtype == _I32:
        accumulate(i32(acc, n), i32(x, n), n, add)
    elif dtype == _I16:
        accumulate(i16(acc, n), i16(x, n), n, add)
    elif dtype == _I8:
        accumulate(i8(acc, n), i8(x, n), n, add)
    elif dtype == _U8:
        accumulate(u8(acc, n), u8(x, n), n, add)
    else:
        either, flag = u8(acc, n), u8(x, n)
        for i in range(n):
            value = np.uint8(flag[i] != 0)
            either[i] = either[i] | value if add else value


@kernel("UniTuple(int64, 2)(int64, int64, int64, int64, float64, int64)")
def typed_store(dtype, out, acc, n, scale, divisor):
    """out = acc*scale (integers: acc/divisor, toward zero) in the tensor's type; returns (non-finite, saturated)."""
    bad = np.int64(0)
    if dtype == _F32:
        bad += store_raw((acc, out), n, (scale,))[0]
        return bad, np.int64(0)
    if dtype == _F16:
        half = store_half((acc, out), n, (scale,))
        return np.int64(half[0]), np.int64(half[1])
    if dtype == _BF16:
        bfloat = store_bfloat((acc, out), n, (scale,))
        return np.int64(bfloat[0]), np.int64(bfloat[1])
    if dtype == _F64:
        target, source = f64(out, n), f64(acc, n)
        for i in range(n):
            value = source[i] * scale
            target[i] = value
            bad += not abs(value) < np.inf
        return bad, np.int64(0)
    if dtype == _I64:
        divide(i64(out, n), i64(acc, n), n, divisor)
    elif dtype == _I32:
        divide(i32(out, n), i32(acc, n), n, divisor)
    elif dtype == _I16:
        divide(i16(out, n), i16(acc, n), n, divisor)
    elif dtype == _I8:
        divide(i8(out, n), i8(acc, n), n, divisor)
    elif dtype == _U8:
        divide(u8(out, n), u8(acc, n), n, divisor)
    else:
        divide(u8(out, n), u8(acc, n), n, 1)
    return bad, np.int64(0)


class Stored(NamedTuple):
    """How many results were not finite, and how many were too large for the type and became its largest value."""

    nonfinite: int
    saturated: int


def accumulate_dtype(dtype: DType) -> np.dtype[Any]:
    """The numpy type a tensor of ``dtype`` is summed in: float32 for fp16 and bf16, else its own (bool: uint8)."""
    return _ACCUMULATE[dtype]


def load_add(acc: np.ndarray[Any, Any], x_bytes: U8, dtype: DType) -> None:
    """acc += x. acc: accumulate_dtype(dtype)[n]; x_bytes: uint8[n*itemsize], any alignment.

    Integers wrap as numpy's do; booleans add as a logical or.
    """
    _load(acc, x_bytes, dtype, True)


def load_copy(acc: np.ndarray[Any, Any], x_bytes: U8, dtype: DType) -> None:
    """acc = x, as ``load_add`` into zeros."""
    _load(acc, x_bytes, dtype, False)


def _load(acc: np.ndarray[Any, Any], x_bytes: U8, dtype: DType, add: bool) -> None:
    n = acc.size
    target = address("acc", acc, _ACCUMULATE[dtype], n, write=True)
    source = _bytes("x_bytes", x_bytes, n * dtype.itemsize)
    typed_load(int(dtype), target, source, n, add)


def store(out_bytes: U8, acc: np.ndarray[Any, Any], dtype: DType, scale: float) -> Stored:
    """out = acc*scale in the tensor's own type.

    out_bytes: uint8[n*itemsize], any alignment, not acc's memory; acc: accumulate_dtype(dtype)[n]. fp16 and
    bf16 round to nearest even and saturate. Integers need scale = 1/d with a whole d (CodecError): they are
    divided by d, toward zero. Booleans ignore scale.
    """
    n, divisor = acc.size, 1
    if not (dtype.is_float or dtype is DType.BOOL):
        divisor = round(1.0 / scale) if scale > 0 else 0
        if divisor < 1 or abs(divisor * scale - 1.0) > 1e-6:
            raise CodecError("scale", f"1/d for a whole d, to average {dtype.label}", scale)
    source = address("acc", acc, _ACCUMULATE[dtype], n)
    target = _bytes("out_bytes", out_bytes, n * dtype.itemsize, write=True)
    return Stored(*typed_store(int(dtype), target, source, n, float(scale), divisor))


def _bytes(name: str, array: Any, nbytes: int, write: bool = False) -> int:
    data = as_bytes(array)
    if data.size != nbytes:
        raise CodecError(name, f"{nbytes} bytes", data.size)
    return u8_address(name, data, nbytes, write)
