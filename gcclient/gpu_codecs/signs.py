"""onebit and efsignsgd on tensors: one bit an element, two means or one mean magnitude a segment.

What may live here: these codecs and their frames. The means are summed in float64, in whatever order the device
likes: they agree with the daemon's to 1e-6, the bits exactly.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from gcclient.gpu_codecs.base import GpuCodec, Pending, Work, register
from gcclient.gpu_codecs.ops import constant, count_nonfinite, fused, get, host_words, put
from gcproto.layouts import CodecId


@fused
def _pack(negative: Tensor) -> Tensor:
    """Bits of a mask whose length is a multiple of 8, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=negative.device)
    return (negative.view(-1, 8).to(torch.uint8) << shifts).sum(1, dtype=torch.uint8)


@fused
def _unpack(data: Tensor, low: Tensor, high: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return torch.where(((data[:, None] >> shifts) & 1).bool(), low, high).view(-1)


@fused
def _two_sums(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    negative = v < 0
    low = torch.where(negative, v, 0.0).sum(dtype=torch.float64)
    high = torch.where(negative, 0.0, v).sum(dtype=torch.float64)
    return low, high, negative.sum()


def pack_bits(mask: Tensor) -> Tensor:
    """uint8[ceil(n/8)]: bit i % 8 of byte i // 8 is element i; padding bits are 0."""
    rest = -mask.numel() % 8
    return _pack(torch.nn.functional.pad(mask, (0, rest)) if rest else mask)


class _Signs(GpuCodec):
    keeps_residual = True
    numbers: ClassVar[int]

    def bound(self, n: int, segments: int, level: int) -> int:
        return 4 + (4 + 4 * self.numbers) * segments + (n + 7 * segments) // 8

    @abstractmethod
    def means(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a negative element and another decode to, float32, and the numbers to be sent."""

    def compress(self, work: Work) -> Pending:
        v, out = work.v, work.out
        at = put(out, 0, constant(struct.pack("<I", len(work.parts)), v.device))
        bad = count_nonfinite(v)
        for start, stop in work.parts:
            part = v[start:stop]
            low, high, numbers = self.means(part)
            at = put(out, at, constant(struct.pack("<I", stop - start), v.device))
            at = put(out, at, numbers)
            negative = part < 0
            if stop > start:
                at = put(out, at, pack_bits(negative))
            if work.state_out is not None:
                part.sub_(torch.where(negative, low, high))
        return Pending(at, bad)

    def _frame(self, payload: Tensor, n: int) -> list[tuple[int, int]]:
        """(where a segment's numbers begin, its length) for each, all rules checked but the padding's."""
        if payload.numel() < 4:
            raise self.refuse(n, "all of its segments (it is cut short)", payload)
        at, left, parts = 4, n, []
        for _ in range(host_words(payload, 0, 1)[0]):
            if payload.numel() - at < 4 + 4 * self.numbers:
                raise self.refuse(n, "all of its segments (it is cut short)", payload)
            length = host_words(payload, at, 1)[0]
            if length > left:
                raise self.refuse(n, "segment lengths that add up to the partition", payload)
            parts.append((at + 4, length))
            left -= length
            at += 4 + 4 * self.numbers + (length + 7) // 8
        if left or at != payload.numel():
            raise self.refuse(n, "segments that add up to the partition, and nothing after them", payload)
        return parts

    def check(self, payload: Tensor, n: int) -> None:
        self._checked(payload, n)

    def _checked(self, payload: Tensor, n: int) -> list[tuple[int, int]]:
        parts = self._frame(payload, n)
        odd = [(at + 4 * self.numbers + length // 8, length % 8) for at, length in parts if length % 8]
        if odd:
            last = payload[torch.tensor([at for at, _ in odd], device=payload.device)].tolist()
            if any(byte >> used for byte, (_, used) in zip(last, odd, strict=True)):
                raise self.refuse(n, "zero padding bits after each segment's last sign", payload)
        return parts

    def _apply(self, payload: Tensor, target: Tensor, scale: float, add: bool) -> None:
        parts = self._checked(payload, self.target("out", target))
        payload, first = payload.to(target.device, non_blocking=True), 0
        for at, length in parts:
            numbers = get(payload, at, self.numbers, torch.float32) * scale
            low, high = (-numbers[0], numbers[0]) if self.numbers == 1 else (numbers[0], numbers[1])
            bits = payload[at + 4 * self.numbers :][: (length + 7) // 8]
            values = _unpack(bits, low, high)[:length]
            part = target[first : first + length]
            if add:
                part.add_(values)
            else:
                part.copy_(values)
            first += length

    def decode(self, payload: Tensor, out: Tensor, scale: float = 1.0) -> None:
        self._apply(payload, out, scale, False)

    def decode_add(self, payload: Tensor, acc: Tensor) -> None:
        self._apply(payload, acc, 1.0, True)


@register
class OneBit(_Signs):
    """Mean of the negative elements, mean of the others."""

    id, name, numbers = CodecId.ONEBIT, "onebit", 2

    def means(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high, negatives = _two_sums(v)
        # Where there are none the sum is 0.
        low = (low / negatives.clamp(min=1)).float()
        high = (high / (v.numel() - negatives).clamp(min=1)).float()
        return low, high, torch.stack((low, high))


@register
class EFSignSGD(_Signs):
    """Sign times mean magnitude."""

    id, name, numbers = CodecId.EFSIGNSGD, "efsignsgd", 1

    def means(self, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = (v.abs().sum(dtype=torch.float64) / max(1, v.numel())).float()
        return -mean, mean, mean[None]
