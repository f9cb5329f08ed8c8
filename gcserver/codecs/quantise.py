"""Uniform stochastic quantisation, the arithmetic and the payload that qsgd and terngrad share.

What may live here: the kernels and the layout. Which norm, how many levels, what a spec says: `qsgd`, `terngrad`.

A segment is cut into buckets (or is one), and each bucket is rounded at random to equally spaced levels, up with
probability equal to the fraction, so that an element's expectation is itself. With steps = 0 the levels span the
bucket's own [minimum, maximum] (CGX, L-GreCo); otherwise they are -steps..steps times norm/steps, symmetrical
about an exact zero (QSGD section 3.1; TernGrad with steps = 1). Layout (little-endian): u32 segments; for each
u32 length and u32 word (see ``word``); then for each the buckets' f32 (minimum, step), or (step) alone, and one
bit stream of all its codes (`bitpack`). An element decodes to minimum + (code - steps)*step.

Memory is passed over once: a bucket's range and its codes are found while it is in the L1 cache. Buckets longer
than that are read twice. Sums of squares are float64 in 16 lanes over blocks of 1024 elements counted from the
bucket's start, lanes then blocks added in order: the same bytes on any CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from gcproto.layouts import GRAIN, LIMIT, TINY, quantiser_word
from gcserver.codecs.bitpack import pack, unpack
from gcserver.codecs.jit import f32, hold, i64, kernel, place, u32
from gcserver.codecs.segmented import segments_check
from gcserver.codecs.stochastic import stochastic
from gcserver.codecs.stream import ordered, put
from gcserver.codecs.vector import F32 as F
from gcserver.codecs.vector import F64, I8, I32, Ops, elementwise, intrinsic
from gcserver.codecs.vector import I64 as L

BLOCK = 1024  #: elements worked on at a time: values, codes and gradient stay in the L1 cache
#: LIMIT's, above which magnitudes saturate: the difference of two may not overflow. TINY's inverse may not either.
LIMIT_BITS = (126 + 127) << 23
LANES = 16
WIDE = 32


#: the word of a segment's layout
word = quantiser_word


def _scan(squares: bool, feedback: bool) -> Any:
    """An intrinsic ``f(x, r, v, n, scale, decay)``: v = x*scale (+ r*decay) and what its bucket's scale needs.

    Returns (minimum, maximum, largest magnitude as bits), or (sum of squares, 0, bits). NaN shows in the bits alone.
    """
    result = types.Tuple((types.float64, types.float64, types.int64))
    width = LANES if squares else WIDE

    @intrinsic
    def scan(typingctx: Any, x: Any, r: Any, v: Any, n: Any, scale: Any, decay: Any) -> Any:
        def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
            px, pr, pv = (b.inttoptr(a, I8.as_pointer()) for a in args[:3])
            scales = [b.fptrunc(s, F) for s in args[4:]]

            def run(lanes: int, start: Any, stop: Any, parts: list[Any], at: Any = None) -> None:
                """One stretch; parts: accumulators in memory, at(part, i): where in them."""
                ops = Ops(b, lanes)
                vscale, vdecay = (ops.splat(s) for s in scales)
                with cgutils.for_range_slice(b, start, stop, L(lanes), inc=True) as (i, _):
                    offset = b.mul(i, L(4))
                    # Rounding the block before has asked for this one.
                    value = b.fmul(ops.load(b.gep(px, [offset]), F), vscale)
                    if feedback:
                        value = b.fadd(value, b.fmul(ops.load(b.gep(pr, [offset]), F), vdecay))
                    ops.store(value, b.gep(pv, [offset]))
                    where = [p if at is None else at(p, i) for p in parts]
                    top, rest = where[0], where[1:]
                    mag, old = ops.magnitude(value), b.load(top)
                    b.store(b.select(b.icmp_unsigned(">", mag, old), mag, old), top)
                    if squares:
                        big = b.fpext(value, ops.type(F64))
                        b.store(b.fadd(b.load(rest[0]), b.fmul(big, big)), rest[0])
                    else:
                        for part, sign in zip(rest, "<>", strict=True):
                            old = b.load(part)
                            b.store(b.select(b.fcmp_ordered(sign, value, old), value, old), part)

            ops = Ops(b, width)
            fresh = [ops.const(I32, 0)]
            fresh += [ops.const(F64, 0.0)] if squares else [ops.const(F, float("inf")), ops.const(F, float("-inf"))]
            # Accumulators of the vector loop live in registers, those of the rest in memory, lane by lane.
            sums = [cgutils.alloca_once_value(b, value) for value in fresh]
            whole = b.and_(args[3], L(-width))
            run(width, L(0), whole, sums)
            lanes_of = [cgutils.alloca_once_value(b, b.load(s)) for s in sums]

            def lane(part: Any, i: Any) -> Any:
                element = part.type.pointee.element
                first = b.bitcast(part, ir.VectorType(element, 1).as_pointer())
                return b.gep(first, [b.sub(i, whole)])

            run(1, whole, args[3], lanes_of, lane)
            totals = []
            for part, how in zip(lanes_of, ("top", "sum") if squares else ("top", "<", ">"), strict=True):
                packed = b.load(part)
                total = b.extract_element(packed, I32(0))
                for j in range(1, width):
                    one = b.extract_element(packed, I32(j))
                    if how == "sum":
                        total = b.fadd(total, one)
                    else:
                        better = b.icmp_unsigned(">", one, total) if how == "top" else b.fcmp_ordered(how, one, total)
                        total = b.select(better, one, total)
                totals.append(total)
            wide = [b.fpext(t, F64) if t.type == F else t for t in totals[1:]]
            wide += [ir.Constant(F64, 0.0)] * (2 - len(wide))
            return context.make_tuple(b, result, [*wide, b.zext(totals[0], L)])

        a, s = types.int64, types.float64
        return result(a, a, a, a, s, s), codegen

    return scan


range_plain, range_both = _scan(False, False), _scan(False, True)
squares_plain, squares_both = _scan(True, False), _scan(True, True)


def _value(ops: Ops, values: list[Any], scalars: list[Any]) -> Any:
    value = ops.b.fmul(values[0], scalars[0])
    return ops.b.fadd(value, ops.b.fmul(values[1], scalars[1])) if len(values) > 1 else value


def _odd_body(ops: Ops, values: list[Any], scalars: list[Any]) -> list[Any]:
    bad = ops.nonfinite(values[0])
    over = ops.b.icmp_signed(">", ops.magnitude(values[0]), ops.const(I32, LIMIT_BITS))
    ops.count(bad, 0)
    ops.count(ops.b.xor(bad, over), 1)
    return []


value_plain = elementwise([F], [F], lambda ops, values, scalars: [_value(ops, values, scalars)])
value_both = elementwise([F, F], [F], lambda ops, values, scalars: [_value(ops, values, scalars)])
count_odd = elementwise([F], [], _odd_body)


def floor(ops: Ops, value: Any) -> Any:
    """The largest whole numbers not above the lanes'."""
    kind = ir.FunctionType(value.type, [value.type])
    return ops.b.call(cgutils.get_or_insert_function(ops.b.module, kind, f"llvm.floor.v{ops.width}f32"), [value])


def _round_body(ops: Ops, values: list[Any], scalars: list[Any], words: Any) -> list[Any]:
    b, v = ops.b, values[0]
    low, inverse, step, least, most, steps = scalars
    y = b.fmul(b.fsub(v, low), inverse)
    y = b.select(b.fcmp_ordered(">", y, least), y, least)  # NaN becomes the least
    y = b.select(b.fcmp_ordered("<", y, most), y, most)
    whole = floor(ops, y)
    # 23 bits of chance as a float in [1, 2), against 1 + fraction; exact levels have fraction 0 and stay.
    drawn = b.bitcast(b.or_(b.lshr(words, ops.const(I32, 9)), ops.const(I32, 0x3F800000)), ops.type(F))
    up = b.fcmp_ordered("<", drawn, b.fadd(b.fsub(y, whole), ops.const(F, 1.0)))
    q = b.fadd(whole, b.select(up, ops.const(F, 1.0), ops.const(F, 0.0)))
    code = b.trunc(b.fptosi(b.fadd(q, steps), ops.type(I32)), ops.type(I8))
    return [code, b.fsub(v, b.fadd(b.fmul(q, step), low))]


# Rounding takes its time, in which what follows of gradient and residual comes to the caches.
round_plain = stochastic([F], [I8], lambda *args: _round_body(*args)[:1], asked=1)
round_feedback = stochastic([F], [I8, F], _round_body, asked=2)


def _level(ops: Ops, code: Any, scalars: list[Any]) -> Any:
    b = ops.b
    low, step, steps = scalars[:3]
    q = b.fsub(b.sitofp(b.zext(code, ops.type(I32)), ops.type(F)), steps)
    return b.fadd(b.fmul(q, step), low)


level_store = elementwise([I8], [F], lambda ops, v, s: [ops.b.fmul(_level(ops, v[0], s), s[3])])
level_add = elementwise([F, I8], [F], lambda ops, v, s: [ops.b.fadd(v[0], _level(ops, v[1], s))])


@njit(nogil=True)
def described(w):
    """(bits, steps, bucket, whether the norm is the largest magnitude) of a segment's word."""
    return w & 255, (w >> 8) & 127, (w >> 16) * GRAIN, (w >> 15) & 1


@njit(nogil=True)
def sizes(n, bits, steps, bucket):
    """(bucket length, buckets, bytes of their parameters, bytes of codes) of a segment of n elements."""
    size = n if bucket == 0 else bucket
    count = 0 if n == 0 else (n + size - 1) // size
    return size, count, count * (4 if steps else 8), (n * bits + 7) // 8


@njit(nogil=True)
def odd(x, r, v, n, scale, decay):
    """(non-finite, saturated) elements of a bucket: the rare pass that counts what the usual one found."""
    bad, over = np.int64(0), np.int64(0)
    for start in range(0, n, BLOCK):
        size, at = min(BLOCK, n - start), 4 * start
        if r:
            value_both((x + at, r + at, v), size, (scale, decay))
        else:
            value_plain((x + at, v), size, (scale, decay))
        counts = count_odd((v,), size, (1.0,))
        bad += counts[0]
        over += counts[1]
    return bad, over


@njit(nogil=True)
def measure(x, r, v, n, scale, decay, bits, steps, largest, clip):
    """(minimum, level step, its inverse, bits of the largest magnitude) of a bucket; leaves its last block in v."""
    low, high, top, total = np.inf, -np.inf, np.int64(0), 0.0
    for start in range(0, n, BLOCK):
        size, at = min(BLOCK, n - start), 4 * start
        if steps == 0:
            if r:
                least, most, peak = range_both(x + at, r + at, v, size, scale, decay)
            else:
                least, most, peak = range_plain(x + at, x, v, size, scale, decay)
            low, high = min(low, least), max(high, most)
        else:
            if r:
                squares, _, peak = squares_both(x + at, r + at, v, size, scale, decay)
            else:
                squares, _, peak = squares_plain(x + at, x, v, size, scale, decay)
            total += squares
        top = max(top, peak)
    if steps == 0:
        # + 0.0: a minimum of -0 or 0 depends on the order of comparing.
        low, high = max(low, -LIMIT) + 0.0, min(high, LIMIT)
        span, levels = high - low, (1 << bits) - 1
    else:
        low, levels = 0.0, steps
        span = np.float64(np.uint32(top).view(np.float32)) if largest else np.sqrt(total)
        if clip > 0.0:
            span = min(span, clip * np.sqrt(total / n))
        span = min(span, LIMIT)
    if not span >= TINY:
        return low, 0.0, 0.0, top
    return low, span / levels, levels / span, top


@kernel("UniTuple(int64, 3)(int64, int64, int64, int64, int64, int64, int64, float64, float64, float64, int64, int64)")
def uniform_encode(x, r, ro, out, table, words, m, clip, scale, decay, k0, k1):
    """Encode m segments by their words; r and ro are 0 for none. Returns (bytes, non-finite, saturated)."""
    bounds, how, head = i64(table, m + 1), u32(words, m), u32(out + 4, 2 * m)
    u32(out, 1)[0] = m
    values, codes = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.uint8)
    v, pc = place(values), place(codes)
    at: Any = out + 4 + 8 * m
    bad, saturated = np.int64(0), np.int64(0)
    for s in range(m):
        first, n = bounds[s], bounds[s + 1] - bounds[s]
        head[2 * s], head[2 * s + 1] = n, how[s]
        bits, steps, bucket, largest = described(np.int64(how[s]))
        size, count, param_bytes, code_bytes = sizes(n, bits, steps, bucket)
        stream: Any = at + param_bytes
        for q in range(count):
            start = q * size
            length = min(size, n - start)
            px = x + 4 * (first + start)
            pr = r + 4 * (first + start) if r else 0
            low, step, inverse, top = measure(px, pr, v, length, scale, decay, bits, steps, largest, clip)
            if top > LIMIT_BITS:
                more = odd(px, pr, v, length, scale, decay)
                bad += more[0]
                saturated += more[1]
            if steps:
                f32(at, 1)[0] = step
                at += 4
            else:
                params = f32(at, 2)
                params[0], params[1] = low, step
                at += 8
            least, most = np.float64(-steps), np.float64(steps if steps else (1 << bits) - 1)
            scalars = (low, inverse, step, least, most, np.float64(steps))
            for block in range(0, length, BLOCK):
                part, where = min(BLOCK, length - block), first + start + block
                if length > BLOCK or top > LIMIT_BITS:
                    if r:
                        value_both((x + 4 * where, r + 4 * where, v), part, (scale, decay))
                    else:
                        value_plain((x + 4 * where, v), part, (scale, decay))
                target = stream if bits == 8 else pc
                following = 4 * (where + part)
                if ro:
                    asked = x + following, (r or x) + following
                    round_feedback((v, target, v, *asked), part, (where, k0, k1), scalars)
                    put(v, ro + 4 * where, part)
                else:
                    round_plain((v, target, x + following), part, (where, k0, k1), scalars)
                if bits != 8:
                    pack(bits, pc, stream, part)
                stream += (part * bits + 7) // 8
        at += code_bytes
    ordered()
    hold(values)
    hold(codes)
    return at - out, bad, saturated


@njit(nogil=True)
def extent(length, word):
    """(bytes, bits of the last one in use) of a segment's data; -1 bytes for a word that describes none."""
    bits, steps, bucket, largest = described(word)
    if not 2 <= bits <= 8 or 2 * steps >= 1 << bits or (largest and not steps):
        return -1, 0
    _, _, param_bytes, code_bytes = sizes(length, bits, steps, bucket)
    return param_bytes + code_bytes, (length * bits) % 8


check_frame = segments_check(extent)


@kernel("int64(int64, int64, int64)")
def uniform_check(payload, nbytes, n):
    """OK if the payload is exactly a frame of n elements, else which rule it breaks."""
    return check_frame(payload, nbytes, n)


@kernel("void(int64, int64, float64, boolean)")
def uniform_decode(payload, out, scale, add):
    """out = decoded*scale, or out += decoded, for a checked payload."""
    m = np.int64(u32(payload, 1)[0])
    head = u32(payload + 4, 2 * m)
    codes, decoded = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.float32)
    at: Any = payload + 4 + 8 * m
    target: Any = out
    for s in range(m):
        n = np.int64(head[2 * s])
        bits, steps, bucket, _ = described(np.int64(head[2 * s + 1]))
        size, count, param_bytes, code_bytes = sizes(n, bits, steps, bucket)
        stream: Any = at + param_bytes
        for q in range(count):
            length = min(size, n - q * size)
            if steps:
                low, step = 0.0, np.float64(f32(at, 1)[0])
                at += 4
            else:
                params = f32(at, 2)
                low, step = np.float64(params[0]), np.float64(params[1])
                at += 8
            for block in range(0, length, BLOCK):
                part = min(BLOCK, length - block)
                source = stream if bits == 8 else place(codes)
                if bits != 8:
                    unpack(bits, stream, source, part)
                if add:
                    level_add((target, source, target), part, (low, step, np.float64(steps)))
                else:
                    level_store((source, place(decoded)), part, (low, step, np.float64(steps), scale))
                    put(place(decoded), target, part)
                stream += (part * bits + 7) // 8
                target += 4 * part
        at += code_bytes
    ordered()
    hold(decoded)
