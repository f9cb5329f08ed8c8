"""qsgd and terngrad on tensors: stochastic rounding of buckets to equally spaced levels.

What may live here: these codecs and their frames. Chance is a function of seed and element number, the same as the
daemon's; with kind=maxmin or max, and terngrad with clip=0, payloads are equal to the bit. A Euclidean norm is summed
in float64 in whatever order the device likes: it agrees to 1e-6, and so do the codes but for an element that
happens to lie on the edge.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gcclient.gpu_codecs.base import GpuCodec, GpuCodecError, Param, Pending, Work, register
from gcclient.gpu_codecs.ops import constant, fused, get, host_words, put, rounding_words, signed
from gcproto.layouts import GRAIN, LIMIT, TINY, CodecId, quantiser_word, rounding_keys

BUCKET_MAX = 65535 * GRAIN


@fused
def _count_odd(v: Tensor) -> tuple[Tensor, Tensor]:
    """(non-finite, saturated) elements."""
    finite = torch.isfinite(v)
    return finite.logical_not().sum(), (finite & (v.abs() > LIMIT)).sum()


@fused
def _round(
    v: Tensor, low: Tensor, inverse: Tensor, numbers: Tensor, k0: Tensor, k1: Tensor, least: float, most: float
) -> Tensor:
    """The level (float32, whole) of each element of [buckets, size]: up with probability of the fraction."""
    y = (v - low) * inverse
    y = torch.where(y > least, y, least)  # NaN becomes the least
    y = torch.where(y < most, y, most)
    whole = torch.floor(y)
    drawn = (((rounding_words(numbers, k0, k1) >> 9) & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    return whole + torch.where(drawn < (y - whole) + 1.0, 1.0, 0.0)


@fused
def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8[groups*bits] of uint8 codes, eight a group: code i takes bits [i*bits, (i+1)*bits) of the stream."""
    if 8 % bits == 0:
        each = 8 // bits
        shifts = torch.arange(each, dtype=torch.uint8, device=codes.device) * bits
        return (codes.view(-1, each) << shifts).sum(1, dtype=torch.uint8)
    shifts = torch.arange(8, dtype=torch.int64, device=codes.device)
    word = (codes.view(-1, 8).long() << (shifts * bits)).sum(1)
    return ((word[:, None] >> (8 * shifts[:bits])) & 255).to(torch.uint8).view(-1)


@fused
def _unpack_codes(data: Tensor, bits: int) -> Tensor:
    """The codes (uint8) of a whole number of groups of bytes."""
    if 8 % bits == 0:
        shifts = torch.arange(8 // bits, dtype=torch.uint8, device=data.device) * bits
        return ((data[:, None] >> shifts) & ((1 << bits) - 1)).view(-1)
    shifts = torch.arange(8, dtype=torch.int64, device=data.device)
    word = (data.view(-1, bits).long() << (8 * shifts[:bits])).sum(1)
    return ((word[:, None] >> (shifts * bits)) & ((1 << bits) - 1)).to(torch.uint8).view(-1)


def described(word: int) -> tuple[int, int, int, bool]:
    """(bits, steps, bucket, whether the norm is the largest magnitude) of a segment's word."""
    return word & 255, word >> 8 & 127, (word >> 16) * GRAIN, bool(word >> 15 & 1)


def buckets_of(length: int, bucket: int) -> tuple[int, int]:
    """(elements of a bucket, buckets) of a segment."""
    size = bucket or length
    return size, -(-length // size) if length else 0


class _Uniform(GpuCodec):
    default_decay = 0.0
    clip: float = 0.0

    def bucket_of(self, value: float) -> int:
        if value % GRAIN:
            raise GpuCodecError(f"{self.name}.bucket: expected 0 or a multiple of {GRAIN}, got {value}")
        return int(value)

    def bound(self, n: int, segments: int, level: int) -> int:
        # Segments' words differ in bits and steps only, and more bits are more steps: the highest has the most.
        bits, steps, bucket, _ = described(level)
        buckets = segments + (n // bucket if bucket else 0)
        return 4 + 8 * segments + (4 if steps else 8) * buckets + (n * bits + 7 * segments) // 8

    def exact_bytes(self, n: int) -> int:
        bits, steps, bucket, _ = described(self.level)
        return 12 + (4 if steps else 8) * buckets_of(n, bucket)[1] + (n * bits + 7) // 8

    def compress(self, work: Work) -> Pending:
        v, m, kept = work.v, len(work.parts), work.state_out is not None
        bad, over = _count_odd(v)
        # A segment's level is the word that says how it is quantised.
        pieces = list(zip(work.parts, work.levels, strict=True))
        head = [number for (start, stop), word in pieces for number in (stop - start, word)]
        at = put(work.out, 0, constant(struct.pack(f"<{1 + 2 * m}I", m, *head), v.device))
        k0, k1 = (torch.full((), signed(k), dtype=torch.int32, device=v.device) for k in rounding_keys(work.seed))
        for (start, stop), word in pieces:
            if stop > start:
                at = self._segment(v[start:stop], start, word, work.out, at, k0, k1, kept)
        return Pending(at, bad, over)

    def _segment(
        self, v: Tensor, first: int, word: int, out: Tensor, at: int, k0: Tensor, k1: Tensor, kept: bool
    ) -> int:
        bits, steps, bucket, largest = described(word)
        size, count = buckets_of(v.numel(), bucket)
        rest = count * size - v.numel()
        table = _padded(v, rest, steps == 0).view(count, size)
        low, step, inverse = self._measure(table, v.numel() - (count - 1) * size, bits, steps, largest)
        params = step[:, None] if steps else torch.stack((low, step), 1)
        at = put(out, at, params.view(-1))
        least, most = float(-steps), float(steps if steps else (1 << bits) - 1)
        # Beyond 2**31 numbers wrap, as the daemon's do.
        numbers = torch.arange(first, first + count * size, device=v.device).to(torch.int32).view(count, size)
        level = _round(table, low[:, None], inverse[:, None], numbers, k0, k1, least, most)
        codes = (level + steps).to(torch.uint8).view(-1)[: v.numel()]
        ragged = -codes.numel() % 8
        packed = _pack_codes(torch.nn.functional.pad(codes, (0, ragged)) if ragged else codes, bits)
        at = put(out, at, packed[: (v.numel() * bits + 7) // 8])
        if kept:
            sent = (level * step[:, None]).add_(low[:, None])
            v.sub_(sent.view(-1)[: v.numel()])
        return at

    def _measure(self, table: Tensor, last: int, bits: int, steps: int, largest: bool) -> tuple[Tensor, Tensor, Tensor]:
        """float32[buckets]: minimum, step between levels, its inverse; last: elements of the last bucket."""
        if steps == 0:
            # + 0.0: a minimum of -0 or 0 depends on the order of comparing.
            low = table.amin(1).double().clamp(min=-LIMIT) + 0.0
            span, levels = table.amax(1).double().clamp(max=LIMIT) - low, (1 << bits) - 1
        else:
            peak = table.abs().amax(1).double()
            low, levels, span = torch.zeros_like(peak), steps, peak
            if not largest or self.clip > 0.0:
                squares = table.double().square().sum(1)
                if not largest:
                    span = squares.sqrt()
                if self.clip > 0.0:
                    sizes = torch.full_like(squares, table.shape[1])
                    sizes[-1:].fill_(last)  # by index the number would be copied from the host, and waited for
                    span = torch.minimum(span, self.clip * (squares / sizes).sqrt())
            span = span.clamp(max=LIMIT)
        usable = span >= TINY
        step = torch.where(usable, span / levels, 0.0)
        inverse = torch.where(usable, levels / span, 0.0)
        return low.float(), step.float(), inverse.float()

    def _frame(self, payload: Tensor, n: int) -> list[tuple[int, int]]:
        """(length, word) of each segment, all rules checked."""
        if payload.numel() < 4 or payload.numel() < 4 + 8 * (m := host_words(payload, 0, 1)[0]):
            raise self.refuse(n, "all of its segments (it is cut short)", payload)
        head = host_words(payload, 4, 2 * m)
        at, left, padded = 4 + 8 * m, n, []
        for length, word in zip(head[::2], head[1::2], strict=True):
            bits, steps, bucket, largest = described(word)
            left -= length
            if left < 0:
                raise self.refuse(n, "segment lengths that add up to the partition", payload)
            if not 2 <= bits <= 8 or 2 * steps >= 1 << bits or (largest and not steps):
                raise self.refuse(n, "2..8 bits a code and levels that fit them", payload)
            at += buckets_of(length, bucket)[1] * (4 if steps else 8) + (length * bits + 7) // 8
            if at > payload.numel():
                raise self.refuse(n, "all of its segments (it is cut short)", payload)
            if length * bits % 8:
                padded.append((at - 1, length * bits % 8))
        if left or at != payload.numel():
            raise self.refuse(n, "segments that add up to the partition, and nothing after them", payload)
        if padded:
            last = payload[torch.tensor([at for at, _ in padded], device=payload.device)].tolist()
            if any(byte >> used for byte, (_, used) in zip(last, padded, strict=True)):
                raise self.refuse(n, "zero padding bits after each segment's last code", payload)
        return list(zip(head[::2], head[1::2], strict=True))

    def check(self, payload: Tensor, n: int) -> None:
        self._frame(payload, n)

    def _apply(self, payload: Tensor, target: Tensor, scale: float, add: bool) -> None:
        parts = self._frame(payload, self.target("out", target))
        payload, at, first = payload.to(target.device, non_blocking=True), 4 + 8 * len(parts), 0
        for length, word in parts:
            if not length:
                continue
            bits, steps, bucket, _ = described(word)
            size, count = buckets_of(length, bucket)
            params = get(payload, at, count * (1 if steps else 2), torch.float32).view(count, -1)
            at += 4 * params.numel()
            data = payload[at : at + (length * bits + 7) // 8]
            at += data.numel()
            ragged = -data.numel() % bits if 8 % bits else 0
            codes = _unpack_codes(torch.nn.functional.pad(data, (0, ragged)) if ragged else data, bits)[:length]
            level = _padded(codes, count * size - length, False).view(count, size).float() - steps
            values = (level * params[:, -1:]).add_(0.0 if steps else params[:, :1]).view(-1)[:length]
            part = target[first : first + length]
            if add:
                part.add_(values)
            else:
                torch.mul(values, scale, out=part)
            first += length

    def decode(self, payload: Tensor, out: Tensor, scale: float = 1.0) -> None:
        self._apply(payload, out, scale, False)

    def decode_add(self, payload: Tensor, acc: Tensor) -> None:
        self._apply(payload, acc, 1.0, True)


def _padded(v: Tensor, rest: int, repeat: bool) -> Tensor:
    """A vector with ``rest`` more elements: its last one, which changes no minimum, or zeros, which change no sum."""
    if not rest:
        return v
    return torch.cat((v, v[-1:].expand(rest) if repeat else torch.zeros(rest, dtype=v.dtype, device=v.device)))


@register
class QSGD(_Uniform):
    """bits an element, 8 bytes a bucket (maxmin) or 4 (l2, max), 8 a segment, 4 a frame."""

    id, name = CodecId.QSGD, "qsgd"
    params = (
        Param("bits", 4, 2, 8),
        Param("levels", 0, 0, 127),
        Param("bucket", 1024, 0, BUCKET_MAX),
        Param("kind", "auto", words=("auto", "maxmin", "l2", "max")),
    )
    keeps_residual = True
    widths: ClassVar[tuple[int, int]] = (2, 8)  #: bits an element that a level may ask for

    def configure(
        self, bits: float = 4, levels: float = 0, bucket: float = 1024, kind: str = "auto", **more: Any
    ) -> None:
        if kind == "auto":
            kind = "l2" if levels else "maxmin"
        if levels and kind == "maxmin":
            raise GpuCodecError("qsgd.kind: expected l2 or max with levels, got maxmin")
        steps = 0 if kind == "maxmin" else int(levels) or (1 << (int(bits) - 1)) - 1
        width = (2 * steps).bit_length() if levels else int(bits)
        self.kind = kind
        self.level = quantiser_word(width, steps, self.bucket_of(bucket), kind == "max")

    def levels_of(self, levels: Sequence[int] | None, m: int) -> list[int]:
        if levels is None:
            return [self.level] * m
        shared, words = self.level & 0xFFFF8000, []
        for bits in self.given_levels(levels, m, *self.widths):
            words.append(bits | shared | (0 if self.kind == "maxmin" else ((1 << (bits - 1)) - 1) << 8))
        return words


@register
class TernGrad(_Uniform):
    """2 bits an element, 4 bytes a bucket, 8 a segment, 4 a frame."""

    id, name = CodecId.TERNGRAD, "terngrad"
    params = (Param("clip", 2.5, 0.0, 1e6), Param("bucket", 0, 0, BUCKET_MAX))

    def configure(self, clip: float = 2.5, bucket: float = 0, **more: Any) -> None:
        self.clip = clip
        self.level = quantiser_word(2, 1, self.bucket_of(bucket), largest=True)
