"""randomk on tensors: k elements that chance picks, the same on all nodes; values only on the wire.

What may live here: the codec and its frame, which has a seed in place of indices. Equal to the daemon's to the bit.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from gcclient.gpu_codecs.base import GpuCodecError, Param, Pending, Work, register
from gcclient.gpu_codecs.ops import constant, count_nonfinite, draws, get, host_words, literal, put
from gcclient.gpu_codecs.packing import unpack_values, value_bytes
from gcclient.gpu_codecs.sparse import RATIO, WIDTH, Sparse, joined
from gcproto.layouts import EXACT, MOST_SEGMENTS, SEEDED, CodecId, value_bound, wanted, wrapped_strata

HEAD = 12  #: bytes before the table of segments


def pick(seed: int, length: int, k: int, device: torch.device) -> Tensor:
    """The k places of one segment, int64, ascending: one of each of k strata of the segment rotated by chance."""
    offset, before = wrapped_strata(seed, length, k)
    # Places beyond the end come round to the beginning: the last strata hold the lowest.
    order = torch.arange(k, device=device)
    stratum = torch.where(order < k - before, order + before, order - (k - before))
    low = stratum * length // k
    place = low + draws(seed, stratum + 1, (stratum + 1) * length // k - low) + offset
    return torch.where(order < k - before, place - length, place)


@register
class RandomK(Sparse):
    """4 bytes for each element sent, 8 a segment, 12 a frame."""

    id, name = CodecId.RANDOMK, "randomk"
    params = (RATIO, Param("unbiased", 0, 0, 1), WIDTH)
    shared_seed = True

    def __init__(self, spec: str, values: dict[str, Any], decay: float | None, *more: Any) -> None:
        if values["unbiased"] and decay:
            raise GpuCodecError("randomk.unbiased: expected 0 with error feedback; leave +ef out")
        super().__init__(spec, values, decay, *more)

    def configure(
        self, ratio: float = 0.01, packed: float = 0, values: str = "32", unbiased: float = 0, **more: Any
    ) -> None:
        super().configure(ratio, packed, values)
        self.form |= SEEDED
        self.unbiased = bool(unbiased)
        if self.unbiased:
            if self.momentum or self.form != SEEDED:
                raise GpuCodecError("randomk.unbiased: expected 0 with momentum or rounded values")
            # Nothing is missing on average, so that nothing must be kept back.
            self.decay, self.error_feedback = 0.0, False

    def bound(self, n: int, segments: int, level: int) -> int:
        return HEAD + 8 * segments + value_bound(self.most(n, segments, level), segments, self.form)

    def exact_bytes(self, n: int) -> int:
        return HEAD + 8 + value_bytes([wanted(n, self.level)], self.form >> 1 & 3)

    def compress(self, work: Work) -> Pending:
        v, out, parts, counts = work.v, work.out, work.parts, self.counts_of(work)
        table = [number for (a, b), k in zip(parts, counts, strict=True) for number in (b - a, k)]
        head = struct.pack("<IQ", len(parts) | self.form << 24, work.seed)
        at = put(out, 0, literal(head, v.device))
        at = put(out, at, constant(struct.pack(f"<{len(table)}I", *table), v.device))
        chosen = [pick(work.seed, b - a, k, v.device) + a for (a, b), k in zip(parts, counts, strict=True) if k]
        index = joined(chosen, v.device)
        values = v[index] + 0.0
        if self.unbiased and chosen:
            for (a, b), k, part in zip(parts, counts, values.split(counts), strict=True):
                part.mul_((b - a) / max(1, k))
        return self.write_values(work, at, values, counts, index, count_nonfinite(v))

    def parse(self, payload: Tensor, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if payload.numel() < HEAD:
            raise self.refuse(n, "its segment table (it is cut short)", payload)
        word, low, high = host_words(payload, 0, 3)
        m, form = word & MOST_SEGMENTS, word >> 24
        if form not in (SEEDED, SEEDED | 2, SEEDED | 4):
            raise self.refuse(n, "the form of randomk's payloads", payload)
        if payload.numel() < HEAD + 8 * m:
            raise self.refuse(n, "its segment table (it is cut short)", payload)
        table, at, width = host_words(payload, HEAD, 2 * m), HEAD + 8 * m, form >> 1 & 3
        lengths, counts = table[::2], table[1::2]
        if sum(lengths) != n or any(k > length for k, length in zip(counts, lengths, strict=True)):
            raise self.refuse(n, "segment lengths that add up to it, and no more elements than those", payload)
        if at + value_bytes(counts, width) != payload.numel():
            raise self.refuse(n, "as many values as its counts say", payload)
        if width == EXACT or not sum(counts):
            values = get(payload, at, sum(counts), torch.float32)
        else:
            values, valid = unpack_values(payload[at:], counts, width)
            if not bool(valid):
                raise self.refuse(n, "bases and shifts of values in range", payload)
        seed, first, chosen = low | high << 32, 0, []
        for length, k in zip(lengths, counts, strict=True):
            if k:
                chosen.append(pick(seed, length, k, device) + first)
            first += length
        return joined(chosen, device), values.to(device)
