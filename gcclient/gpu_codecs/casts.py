"""fp16 and bf16 on tensors.

What may live here: these two codecs. The payload is n elements in the format and nothing else; finite values that
would round to infinity become the largest finite ones, and are counted.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gcclient.gpu_codecs.base import GpuCodec, GpuCodecError, Pending, Work, register
from gcclient.gpu_codecs.ops import fused, get
from gcproto.layouts import BFLOAT_MAX, BFLOAT_OVER_BITS, HALF_MAX, HALF_OVER, INFINITE, MAGNITUDE, CodecId


@fused
def _to_half(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    magnitude = v.abs()
    infinite = magnitude == torch.inf
    over = (magnitude >= HALF_OVER) & ~infinite
    limited = torch.where(infinite, v, v.clamp(-HALF_MAX, HALF_MAX))
    return limited.to(torch.float16), torch.isfinite(v).logical_not().sum(), over.sum()


@fused
def _to_bfloat(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    magnitude = v.view(torch.int32) & MAGNITUDE
    bad = magnitude >= INFINITE
    over = (magnitude >= BFLOAT_OVER_BITS) & ~bad
    limited = torch.where(over, torch.copysign(torch.full_like(v, BFLOAT_MAX), v), v)
    return limited.to(torch.bfloat16), bad.sum(), over.sum()


class _Cast(GpuCodec):
    dtype: ClassVar[torch.dtype]

    def bound(self, n: int, segments: int, level: int) -> int:
        return 2 * n

    def correct(
        self, x: Tensor, state_in: Tensor | None, state_out: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        # Without a residual and a scale the gradient is what is converted: no copy of it.
        return (x, None) if scale == 1.0 else super().correct(x, state_in, state_out, scale)

    def compress(self, work: Work) -> Pending:
        convert = _to_half if self.dtype == torch.float16 else _to_bfloat
        narrow, bad, over = convert(work.v)
        nbytes = 2 * work.v.numel()
        work.out[:nbytes].copy_(narrow.view(torch.uint8))
        return Pending(nbytes, bad, over)

    def check(self, payload: Tensor, n: int) -> None:
        if payload.numel() != 2 * n:
            raise GpuCodecError(f"payload: expected {2 * n} bytes ({self.name} of {n}), got {payload.numel()}")

    def _values(self, payload: Tensor, like: Tensor) -> Tensor:
        n = self.target("out", like)
        self.check(payload, n)
        return get(payload, 0, n, self.dtype).to(like.device).float()

    def decode(self, payload: Tensor, out: Tensor, scale: float = 1.0) -> None:
        torch.mul(self._values(payload, out), scale, out=out)

    def decode_add(self, payload: Tensor, acc: Tensor) -> None:
        acc.add_(self._values(payload, acc))


@register
class Fp16(_Cast):
    """IEEE half precision, to nearest even, saturating at +-65504."""

    id, name, dtype = CodecId.FP16, "fp16", torch.float16


@register
class Bf16(_Cast):
    """bfloat16: float32's range with 8 bits of mantissa, to nearest even."""

    id, name, dtype = CodecId.BF16, "bf16", torch.bfloat16
