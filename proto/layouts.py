"""What both sides must agree on to write and read codec payloads: ids, words of the layouts, generators, scalar rules.

What may live here: numbers and functions of plain numbers that `docs/codecs.md` fixes. No arrays, no torch, no
numpy: the daemon's kernels and the client's GPU codecs each write the loops in their own way, and tests hold them
to one another.
"""

from __future__ import annotations

import math
from enum import IntEnum

MASK64 = (1 << 64) - 1

# --- float32 as bits ---
MAGNITUDE = 0x7FFFFFFF  #: bits without the sign
INFINITE = 0x7F800000  #: magnitudes from here on are infinity or NaN
#: the first magnitudes that round to infinity in fp16 and bf16, and the largest finite values instead
HALF_OVER, HALF_MAX = 65520.0, 65504.0
BFLOAT_OVER_BITS, BFLOAT_MAX = 0x7F7F8000, 3.3895313892515355e38


class CodecId(IntEnum):
    """Stable wire ids of the codecs that have a GPU twin. Append, never renumber."""

    FP16 = 1
    BF16 = 2
    TOPK = 16
    RANDOMK = 17
    SIDCO_E = 22
    ONEBIT = 32
    EFSIGNSGD = 35
    QSGD = 48
    TERNGRAD = 49


# --- sparse payloads ---
MILLION = 1_000_000  #: a level is a ratio in millionths
MOST_SEGMENTS = (1 << 24) - 1  #: the upper byte of a payload's first word is its form
PACKED = 1  #: bit of the form: indices as bit-packed gaps
SEEDED = 8  #: bit of the form: a seed in place of indices (randomk)
EXACT, SIXTEEN, EIGHT = 0, 1, 2  #: width of values, bits 1 and 2 of the form
GAPS = 32  #: gaps that share a width
VALUES = 128  #: rounded values that share base and shift
MAX_SHIFT = {SIXTEEN: 13, EIGHT: 20}
MOST_CODE = {SIXTEEN: 32766, EIGHT: 126}  #: the largest code, less one


def wanted(length: int, level: int) -> int:
    """k of a segment at a ratio in millionths: at least 1 of a segment that has any element."""
    return min(length, max(1, level * length // MILLION))


def index_bound(n: int, total: int, form: int) -> int:
    """Upper bound of the bytes of ``total`` ascending indices below n."""
    if not form & PACKED or not total:
        return 4 * total
    groups = -(-total // GAPS)
    # Widths are logarithms of gaps that add up to less than n: most bits if all groups' widest are equal.
    return groups + min(4 * total, math.ceil(GAPS // 8 * groups * (math.log2(n / groups + 1) + 1)))


def value_bound(total: int, segments: int, form: int) -> int:
    """Upper bound of the bytes of ``total`` values."""
    width = form >> 1 & 3
    if width == EXACT:
        return 4 * total
    return 4 * min(total, total // VALUES + segments) + (total if width == EIGHT else 2 * total)


# --- chance ---
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def bits64(seed: int, counter: int) -> int:
    """Output number ``counter`` (from 0) of splitmix64 started with ``seed``."""
    z = (seed + (counter + 1) * GOLDEN) & MASK64
    z = ((z ^ (z >> 30)) * MIX1) & MASK64
    z = ((z ^ (z >> 27)) * MIX2) & MASK64
    return z ^ (z >> 31)


def draw(seed: int, counter: int, limit: int) -> int:
    """A whole number in [0, limit), limit <= 2**31: the upper 32 bits of ``bits64``, times limit, divided by 2**32."""
    return (bits64(seed, counter) >> 32) * limit >> 32


def wrapped_strata(seed: int, length: int, k: int) -> tuple[int, int]:
    """(offset, strata whose element comes before the segment's end) of randomk's rotated choice of k of length."""
    offset = draw(seed, 0, length)
    before = min(k, (length - offset) * k // length + 1)
    low = (before - 1) * length // k
    if offset + low + draw(seed, before, before * length // k - low) >= length:
        before -= 1
    return offset, before


#: constants of the 32-bit hash that quantisers round with: a word for each element's number
SPREAD, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def rounding_keys(seed: int) -> tuple[int, int]:
    """(k0, k1): the two 32-bit keys of that hash."""
    z = bits64(seed, 0)
    return z & 0xFFFFFFFF, z >> 32


# --- uniform quantisers (qsgd, terngrad) ---
GRAIN = 64  #: buckets are multiples of it, so that each starts at a whole byte
LIMIT = 2.0**126  #: larger magnitudes saturate
TINY = 2.0**-117  #: ranges and norms below it count as 0


def quantiser_word(bits: int, steps: int, bucket: int, largest: bool = False) -> int:
    """How a segment is quantised: bits | (steps | 128 if the norm is the largest magnitude) << 8 | bucket/64 << 16.

    steps = 0 stands for minimum and maximum, bucket = 0 for the whole segment.
    """
    return bits | (steps | (128 if largest else 0)) << 8 | (bucket // GRAIN) << 16


# --- sidco: logarithm and exponential whose last bit depends on no library ---
LN2 = 0.6931471805599453
LN2_HIGH, LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10


def ln(x: float) -> float:
    """Natural logarithm of a positive, finite number."""
    m, e = math.frexp(x)
    if m < 0.7071067811865476:
        m, e = m + m, e - 1
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    total = 0.0
    for odd in range(25, 1, -2):
        total = (total + 1.0 / odd) * q
    return e * LN2_HIGH + (2.0 * (s + s * total) + e * LN2_LOW)


def exp(x: float) -> float:
    """Exponential; 0 below -700, and never above exp(700)."""
    if x < -700.0:
        return 0.0
    x = min(x, 700.0)
    k = math.floor(x / LN2 + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    total = 1.0
    for i in range(14, 0, -1):
        total = 1.0 + total * r / i
    return math.ldexp(total, k)
