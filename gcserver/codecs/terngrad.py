"""terngrad (Wen et al. 2017): every element becomes -s, 0 or s at random, with its own expectation.

What may live here: the codec. Arithmetic and payload are `quantise`'s, with one level on either side of zero.

s is the largest magnitude of the segment (the paper's layer-wise scaling, section 3.2) or bucket, cut at `clip`
times the root mean square (section 3.3: gradient clipping, 2.5). What lies beyond is rounded to ±s: a small bias
that buys much less variance; `clip=0` is unbiased. There is no error feedback: the variance of a ternary value is
several times its square, so a residual would grow from step to step.
"""

from __future__ import annotations

from gcproto.layouts import GRAIN
from gcserver.codecs.base import Codec, CodecError, Param, register
from gcserver.codecs.qsgd import BUCKET_MAX, Uniform
from gcserver.codecs.quantise import word


@register
class TernGrad(Uniform):
    """2 bits an element plus 4 bytes a bucket, 8 a segment, 4 a frame."""

    id, name = 49, "terngrad"
    params = (
        Param("clip", 2.5, 0.0, 1e6, "multiple of the root mean square at which s is cut; 0: nowhere"),
        Param("bucket", 0, 0, BUCKET_MAX, "elements that share s; 0: the whole segment", integer=True),
    )
    conserves = False

    def configure(self, clip: float = 2.5, bucket: float = 0) -> None:
        self.clip = clip
        self.level = word(2, 1, self.bucket(bucket), largest=True)

    def values(self) -> dict[str, float | str]:
        return {"clip": self.clip, "bucket": (self.level >> 16) * GRAIN}

    @classmethod
    def from_level(cls, level: int) -> Codec:
        codec = cls(bucket=(level >> 16) * GRAIN)
        if codec.level != level:
            raise CodecError("level", "2 bits, one level and a bucket as docs/codecs.md says", level)
        return codec
