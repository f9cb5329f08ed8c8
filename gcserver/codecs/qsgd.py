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

import numpy as np

from gcproto.layouts import GRAIN
from gcserver.codecs.base import U32, Codec, CodecError, Encoded, Param, register
from gcserver.codecs.framed import ADD, CHECK, OK, Call, Graded
from gcserver.codecs.jit import address
from gcserver.codecs.quantise import uniform_check, uniform_decode, uniform_encode, word
from gcserver.codecs.segmented import PADDING, RULES, WORD
from gcserver.codecs.stochastic import key

BUCKET_MAX = 65535 * GRAIN
KINDS = ("auto", "maxmin", "l2", "max")


class Uniform(Graded):
    """What qsgd and terngrad share: a payload of `quantise`, whose words say how each segment is decoded.

    ``level`` is the word of the codec's own segments.
    """

    units = "sum"
    default_decay = 0.0
    clip: float = 0.0  #: multiple of the root mean square at which a bucket's norm is cut; 0: nowhere
    rules = RULES | {
        WORD: "2..8 bits a code and levels that fit them",
        PADDING: "zero padding bits after each segment's last code",
    }

    def words(self, levels: U32 | None, m: int) -> U32:
        """uint32[m]: the segments' words."""
        return np.full(m, self.level, np.uint32)

    def bucket(self, value: float) -> int:
        """A bucket length from a spec; CodecError unless buckets of it would start at whole bytes."""
        if value % GRAIN:
            allowed = f"0 (the whole segment) or a multiple of {GRAIN} up to {BUCKET_MAX}"
            raise CodecError(f"{self.name}.bucket", allowed, int(value))
        return int(value)

    @property
    def bits(self) -> int:
        return self.level & 255

    def bound(self, n: int, segments: int, bits: int) -> int:
        bucket = (self.level >> 16) * GRAIN
        buckets = segments + (n // bucket if bucket else 0)
        return 4 + 8 * segments + (4 if self.level & 0x7F00 else 8) * buckets + (n * bits + 7 * segments) // 8

    def write(self, call: Call, levels: U32 | None) -> Encoded:
        words = self.words(levels, call.m)
        where = address("words", words, words.dtype, call.m)
        return Encoded(*uniform_encode(*call.arrays, where, call.m, self.clip, call.scale, self.decay, *key(call.seed)))

    def apply(self, payload: int, nbytes: int, out: int, n: int, scale: float, mode: int) -> int:
        rule = int(uniform_check(payload, nbytes, n))
        if rule == OK and mode != CHECK:
            uniform_decode(payload, out, scale, mode == ADD)
        return rule


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
    exact = 8

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

    def words(self, levels: U32 | None, m: int) -> U32:
        if levels is None:
            return super().words(levels, m)
        # Levels are bits, for every kind.
        shared = np.uint32(self.level & 0xFFFF8000)
        words: U32 = levels | shared
        if self.kind != "maxmin":
            words |= ((np.uint32(1) << (levels - np.uint32(1))) - np.uint32(1)) << np.uint32(8)
        return words

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
