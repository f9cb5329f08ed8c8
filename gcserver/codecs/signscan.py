"""One pass over gradient and residual that packs signs and gathers what a sign codec needs besides.

What may live here: vector passes over blocks of at most 4096 elements, for `signs`; no layout, no codec.
Each pass computes v = x*scale (+ r*decay), writes one bit an element, and returns either sums (the means
decide bytes, so their order is fixed) or the smallest and largest magnitude, from which the caller sees in
passing whether a block holds zeros or non-finite elements and only then looks for them.

Order of summation: rows of 8 lanes. Eight rows are added in float32, ((0+1)+(2+3))+((4+5)+(6+7)), all of one
sign, so that nothing cancels; the row of sums is added to 8 float64 lanes; lanes are added in order.
"""

from __future__ import annotations

from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils

from gcserver.codecs.vector import F32, F64, I8, I32, I64, MAGNITUDE, Ops, elementwise, intrinsic

BLOCK = 4096  #: elements summed before their lanes are added up
STEP = 64  #: elements a turn of the loop; passes take multiples of it
ROW = 8

Kind = Literal["means", "mean", "votes"]


def _tree(b: Any, rows: list[Any]) -> Any:
    while len(rows) > 1:
        rows = [b.fadd(rows[i], rows[i + 1]) for i in range(0, len(rows), 2)]
    return rows[0]


def _pack(b: Any, masks: list[Any]) -> Any:
    """The masks of four rows as 32 bits, the first row lowest."""
    width = ROW
    while len(masks) > 1:
        order = ir.Constant(ir.VectorType(I32, 2 * width), list(range(2 * width)))
        masks = [b.shuffle_vector(masks[i], masks[i + 1], order) for i in range(0, len(masks), 2)]
        width *= 2
    return b.bitcast(masks[0], I32)


def _scan(kind: Kind, residual: bool, store: bool) -> Any:
    """An intrinsic ``f(where, n, scale, decay)``; where: addresses of x, r, v and the bits; n: multiple of STEP.

    means: (sum of the negative, sum of the others, number of the negative). mean: (sum of magnitudes, 0.0, 0). A
    non-finite v makes a sum non-finite; so may finite ones near the end of float32's range. votes: (0.0, 0.0,
    smallest magnitude | largest << 32), as integers of float32's bits.
    """
    result = types.Tuple((types.float64, types.float64, types.int64))

    @intrinsic
    def scan(typingctx: Any, where: Any, n: Any, scale: Any, decay: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            ops = Ops(b, ROW)
            px, pr, pv, pbits = (b.inttoptr(a, I8.as_pointer()) for a in cgutils.unpack_tuple(b, args[0]))
            vscale, vdecay = (ops.splat(b.fptrunc(a, F32)) for a in args[2:])
            zero = ops.const(F32, 0.0)

            def variable(start: Any) -> Any:
                place = cgutils.alloca_once(b, start.type)
                b.store(start, place)
                return place

            sums = [variable(ops.const(F64, 0.0)) for _ in range(2)]
            least, most = variable(ops.const(I32, MAGNITUDE)), variable(ops.const(I32, 0))
            negatives = variable(I64(0))

            with cgutils.for_range_slice(b, I64(0), args[1], I64(STEP), inc=True) as (i, _):
                masks: list[Any] = []
                parts: tuple[list[Any], list[Any]] = [], []
                for row in range(STEP // ROW):
                    at = b.mul(b.add(i, I64(ROW * row)), I64(4))
                    # A line holds two rows, and is asked for twice: once takes a fifth longer.
                    v = b.fmul(ops.stream(b.gep(px, [at]), F32), vscale)
                    if residual:
                        v = b.fadd(v, b.fmul(ops.stream(b.gep(pr, [at]), F32), vdecay))
                    if store:
                        ops.store(v, b.gep(pv, [at]))
                    magnitude = ops.magnitude(v)
                    if kind == "votes":
                        # Zeros, of either sign, are looked at again: here the sign's bit will do.
                        mask = b.icmp_signed("<", ops.bits(v), ops.const(I32, 0))
                        low, high = b.load(least), b.load(most)
                        b.store(b.select(b.icmp_signed("<", magnitude, low), magnitude, low), least)
                        b.store(b.select(b.icmp_signed(">", magnitude, high), magnitude, high), most)
                    else:
                        mask = b.fcmp_ordered("<", v, zero)
                    if kind == "means":
                        parts[0].append(b.select(mask, v, zero))
                        parts[1].append(b.select(mask, zero, v))
                    elif kind == "mean":
                        parts[0].append(b.bitcast(magnitude, ops.type(F32)))
                    masks.append(mask)
                for total, part in zip(sums, parts, strict=True):
                    if part:
                        b.store(b.fadd(b.load(total), b.fpext(_tree(b, part), ops.type(F64))), total)
                for half in range(2):
                    word = _pack(b, masks[4 * half : 4 * half + 4])
                    if kind == "means":
                        b.store(b.add(b.load(negatives), b.zext(b.ctpop(word), I64)), negatives)
                    target = b.gep(pbits, [b.add(b.lshr(i, I64(3)), I64(4 * half))])
                    b.store(word, b.bitcast(target, I32.as_pointer()), align=1)

            results = [_lanes(b, total) for total in sums]
            count = b.load(negatives)
            if kind == "votes":
                count = b.or_(_extreme(b, least, "<"), b.shl(_extreme(b, most, ">"), I64(32)))
            return context.make_tuple(b, result, [*results, count])

        return result(where, types.int64, types.float64, types.float64), codegen

    return scan


def _lanes(b: Any, place: Any) -> Any:
    lanes = b.load(place)
    total = b.extract_element(lanes, I32(0))
    for lane in range(1, ROW):
        total = b.fadd(total, b.extract_element(lanes, I32(lane)))
    return total


def _extreme(b: Any, place: Any, better: str) -> Any:
    lanes = b.load(place)
    best = b.extract_element(lanes, I32(0))
    for lane in range(1, ROW):
        other = b.extract_element(lanes, I32(lane))
        best = b.select(b.icmp_signed(better, other, best), other, best)
    return b.zext(best, I64)


means_plain, means_residual = _scan("means", False, False), _scan("means", True, False)
mean_plain, mean_residual = _scan("mean", False, False), _scan("mean", True, False)
votes_plain, votes_state = _scan("votes", False, False), _scan("votes", True, True)


@intrinsic
def zero_words(typingctx: Any, source: Any, words: Any, n: Any, scale: Any) -> Any:
    """One bit an element, set where source*scale is zero of either sign; n: a multiple of STEP."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        ops = Ops(b, 32)
        pointer, out = (b.inttoptr(a, I8.as_pointer()) for a in args[:2])
        vscale = ops.splat(b.fptrunc(args[3], F32))
        with cgutils.for_range_slice(b, I64(0), args[2], I64(32), inc=True) as (i, _):
            v = b.fmul(ops.load(b.gep(pointer, [b.mul(i, I64(4))]), F32), vscale)
            word = b.bitcast(b.fcmp_ordered("==", v, ops.const(F32, 0.0)), I32)
            b.store(word, b.bitcast(b.gep(out, [b.lshr(i, I64(3))]), I32.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float64), codegen


def _nonfinite_body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    ops.count(ops.nonfinite(ops.fma_free(values[0], scalars[0], values[1], scalars[1])), 0)
    return []


def _residual_body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    scale, decay, low, high = scalars
    v = ops.fma_free(values[0], scale, values[1], decay)
    mask = ops.b.fcmp_ordered("<", v, ops.const(F32, 0.0))
    return [ops.b.fsub(v, ops.b.select(mask, low, high))]


count_nonfinite = elementwise([F32, F32], [], _nonfinite_body)
residual_block = elementwise([F32, F32], [F32], _residual_body)
