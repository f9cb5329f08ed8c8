"""qsgd (Alistarh et al. 2017, section 3.1): stochastic rounding to equally spaced levels, in its three usual forms.

What may live here: the codec and what it shares with `terngrad` on Python's side; kernels and layout are `quantise`'s.

`kind=maxmin`, as CGX and L-GreCo use it: 2**bits levels from a bucket's minimum to its maximum. `kind=l2`, the
paper's: levels 0, ±norm/s, ..., ±norm with the Euclidean norm of the bucket; `kind=max`, the same with the largest
magnitude. s is 2**(bits-1) - 1, or `levels=s` as the paper writes it; `bucket=0` is the paper's whole vector.

Decoded values have the expectation of what was encoded, so error feedback is off unless asked for: it helps where
few bits make the variance large. It is refused where it would do harm, because the residual could grow from step to
step. An error is smaller than the distance of two levels, so with gradients bounded by g a residual stays bounded
if that distance is less than half the range (maxmin: always) or less than the norm (max: from two levels a side on);
with l2, lemma 3.1's bound of the variance, sqrt(d)/s for buckets of d elements, must be below 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gcserver.codecs.base import F32, I64, U8, U32, Codec, CodecError, Encoded, Param, register
from gcserver.codecs.jit import (
    address,
    as_bytes,
    f32_address,
    level_address,
    segment_table,
    state_addresses,
    u8_address,
)
from gcserver.codecs.quantise import GRAIN, OK, RULES, uniform_check, uniform_decode, uniform_encode, word
from gcserver.codecs.stochastic import key

BUCKET_MAX = 65535 * GRAIN
KINDS = ("auto", "maxmin", "l2", "max")


class Unbiased(Codec):
    """A stochastic codec whose error feedback is off unless a spec asks for it."""

    def __init__(self, *, decay: float = 0.0, **values: Any) -> None:
        super().__init__(decay=decay, **values)

    def _spec(self) -> str:
        return super()._spec().removesuffix("+ef(decay=0)")


class Uniform(Unbiased):
    """What qsgd and terngrad share: a payload of `quantise`, whose words say how each segment is decoded.

    ``level`` is the word of the codec's own segments.
    """

    units = "sum"
    clip: float = 0.0  #: multiple of the root mean square at which a bucket's norm is cut; 0: nowhere

    def words(self, levels: U32 | None, m: int) -> tuple[U32, int]:
        """(uint32[m]: the segments' words, largest number of bits among them)."""
        return np.full(m, self.level, np.uint32), self.level & 255

    def bucket(self, value: float) -> int:
        """A bucket length from a spec; CodecError unless buckets of it would start at whole bytes."""
        if value % GRAIN:
            allowed = f"0 (the whole segment) or a multiple of {GRAIN} up to {BUCKET_MAX}"
            raise CodecError(f"{self.name}.bucket", allowed, int(value))
        return int(value)

    def bound(self, n: int, segments: int, bits: int) -> int:
        """Upper bound of a payload's bytes at so many bits an element."""
        bucket = (self.level >> 16) * GRAIN
        buckets = segments + (n // bucket if bucket else 0)
        return 4 + 8 * segments + (4 if self.level & 0x7F00 else 8) * buckets + (n * bits + 7 * segments) // 8

    def max_bytes(self, n: int, segments: int = 1) -> int:
        return self.bound(n, segments, self.level & 255)

    def encode(
        self,
        x: F32,
        state_in: F32 | None,
        state_out: F32 | None,
        out: U8,
        segments: I64 | None,
        scale: float = 1.0,
        seed: int = 0,
        levels: U32 | None = None,
    ) -> Encoded:
        n = x.size
        table, m, alive = segment_table(segments, n)
        px, r, ro = state_addresses(self, x, state_in, state_out, m)
        level_address(self, levels, m)
        words, bits = self.words(levels, m)
        target = u8_address("out", out, self.bound(n, m, bits), write=True)
        where = address("words", words, words.dtype, m)
        result = uniform_encode(px, r, ro, target, table, where, m, self.clip, float(scale), self.decay, *key(seed))
        del alive, words
        return Encoded(*result)

    def decode(self, payload: U8, out: F32, scale: float = 1.0) -> None:
        source = self._check(payload, out.size)
        uniform_decode(source, f32_address("out", out, out.size, write=True), float(scale), False)

    def decode_add(self, payload: U8, acc: F32) -> None:
        source = self._check(payload, acc.size)
        uniform_decode(source, f32_address("acc", acc, acc.size, write=True), 1.0, True)

    def check(self, payload: U8, n: int) -> None:
        self._check(payload, n)

    def _check(self, payload: U8, n: int) -> int:
        data = as_bytes(payload)
        source = u8_address("payload", data)
        rule = uniform_check(source, data.size, n)
        if rule != OK:
            raise CodecError("payload", f"a {self.name} frame of {n} elements: {RULES[rule]}", f"{data.size} bytes")
        return source


def steps_of(bits: int) -> int:
    """Levels on either side of zero that codes of so many bits hold."""
    return int((1 << (bits - 1)) - 1)


@register
class QSGD(Uniform):
    """bits an element plus 8 bytes a bucket (maxmin) or 4 (l2, max), 8 a segment, 4 a frame."""

    id, name = 48, "qsgd"
    params = (
        Param("bits", 4, 2, 8, "bits an element", integer=True),
        Param("levels", 0, 0, 127, "levels on either side of zero (l2, max); 0: what the bits hold", integer=True),
        Param("bucket", 1024, 0, BUCKET_MAX, "elements that share a scale; 0: the whole segment", integer=True),
        Param("kind", "auto", 0, 0, "scale of a bucket; auto: maxmin, or l2 with levels", words=KINDS),
    )
    keeps_residual = True
    conserves = True
    levels = (2, 8)

    def configure(self, bits: float = 4, levels: float = 0, bucket: float = 1024, kind: str = "auto") -> None:
        if kind == "auto":
            kind = "l2" if levels else "maxmin"
        if levels and kind == "maxmin":
            raise CodecError("qsgd.kind", f"l2 or max with levels={int(levels)}", kind, "maxmin takes bits=2..8")
        self.kind, self.given = kind, int(levels)
        width, size = int(bits), self.bucket(bucket)
        steps = 0 if kind == "maxmin" else self.given or steps_of(width)
        if self.given:
            width = (2 * steps).bit_length()
        self.level = word(width, steps, size, kind == "max")
        if self.error_feedback:
            bounded = [b for b in range(2, 9) if self._bounded(steps_of(b))]
            if not self._bounded(steps):
                wanted = "levels at which a residual stays bounded (l2: levels**2 above the bucket; max: 2 or more)"
                raise CodecError("qsgd with error feedback", wanted, steps, "kind=maxmin has no such limit")
            #: of single segments too
            self.levels = (bounded[0], 8)  # type: ignore[misc]

    def _bounded(self, steps: int) -> bool:
        """Whether error feedback keeps a bounded residual at so many levels on either side of zero."""
        if self.kind == "l2":
            return 0 < (self.level >> 16) * GRAIN < steps**2
        return self.kind == "maxmin" or steps > 1

    def values(self) -> dict[str, float | str]:
        own: dict[str, float | str] = {"levels": self.given} if self.given else {"bits": self.level & 255}
        return own | {"bucket": (self.level >> 16) * GRAIN, "kind": self.kind}

    def words(self, levels: U32 | None, m: int) -> tuple[U32, int]:
        if levels is None or m == 0:
            return super().words(levels, m)
        # Levels are bits, for every kind.
        shared = np.uint32(self.level & 0xFFFF8000)
        words = levels | shared
        if self.kind != "maxmin":
            words |= ((np.uint32(1) << (levels - np.uint32(1))) - np.uint32(1)) << np.uint32(8)
        return words, int(levels.max())

    @classmethod
    def from_level(cls, level: int) -> Codec:
        bits, steps, bucket = level & 255, (level >> 8) & 127, (level >> 16) * GRAIN
        kind = ("max" if level & 0x8000 else "l2") if steps else "maxmin"
        if 2 <= bits <= 8:
            given = 0 if steps == steps_of(bits) else steps
            codec = cls(bits=bits, levels=given, bucket=bucket, kind=kind)
            if codec.level == level:
                return codec
        raise CodecError("level", "bits, levels and bucket as docs/codecs.md writes them for qsgd", level)
