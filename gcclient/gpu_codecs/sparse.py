"""What all sparsifiers share on tensors: momentum correction, the payload, and decoding it.

What may live here: the layout of sparse payloads and their common base class. What is selected: each codec's own file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gcclient.gpu_codecs.base import GpuCodec, GpuCodecError, Param, Pending, Work
from gcclient.gpu_codecs.ops import constant, get, host_words, literal, magnitudes, put
from gcclient.gpu_codecs.packing import gap_bytes, pack_gaps, pack_values, unpack_gaps, unpack_values, value_bytes
from gcproto.layouts import (
    EXACT,
    MILLION,
    MOST_SEGMENTS,
    PACKED,
    index_bound,
    value_bound,
    wanted,
)

WIDTHS = {"32": 0, "16": 1, "8": 2}
RATIO, WIDTH = Param("ratio", None, 1e-6, 1.0), Param("values", "32", words=tuple(WIDTHS))


def largest(v: Tensor, k: int) -> Tensor:
    """Places (int64, ascending) of the k elements of largest magnitude, the lowest place first among equals."""
    if k >= v.numel():
        return torch.arange(v.numel(), device=v.device)
    bits = magnitudes(v)
    kth = torch.topk(bits, k, sorted=False).values.amin()
    above = bits > kth
    # Running counts of what is taken: all above, and of the equals as many as are missing, the first ones.
    order = torch.cumsum(above, 0, dtype=torch.int32)
    equals = torch.cumsum(bits == kth, 0, dtype=torch.int32)
    order += torch.minimum(equals, k - order[-1])
    return torch.searchsorted(order, torch.arange(1, k + 1, dtype=torch.int32, device=v.device))


def joined(chosen: list[Tensor], device: torch.device) -> Tensor:
    """The places (int64) chosen in each segment that has any, as one tensor."""
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=device)


class Sparse(GpuCodec):
    """Some elements, nothing of the others."""

    params = (RATIO, Param("packed", 0, 0, 1), WIDTH)
    keeps_residual = True
    takes_momentum = True

    form: int

    def configure(self, ratio: float = 0.01, packed: float = 0, values: str = "32", **more: Any) -> None:
        self.level = round(ratio * MILLION)
        self.form = PACKED * int(packed) | WIDTHS[values] << 1

    def most(self, n: int, segments: int, level: int) -> int:
        """Upper bound of the elements sent of n in so many segments."""
        return min(n, level * n // MILLION + segments)

    def bound(self, n: int, segments: int, level: int) -> int:
        total = self.most(n, segments, level)
        return 4 + 4 * segments + index_bound(n, total, self.form) + value_bound(total, segments, self.form)

    def exact_bytes(self, n: int) -> int:
        k = wanted(n, self.level)
        return -1 if self.form & PACKED else 8 + 4 * k + value_bytes([k], self.form >> 1 & 3)

    def levels_of(self, levels: Sequence[int] | None, m: int) -> list[int]:
        if m > MOST_SEGMENTS:
            raise GpuCodecError(f"segments: expected at most {MOST_SEGMENTS}, got {m}")
        return self.given_levels(levels, m, 1, MILLION)

    def counts_of(self, work: Work) -> list[int]:
        """k of each segment."""
        return [wanted(stop - start, level) for (start, stop), level in zip(work.parts, work.levels, strict=True)]

    def correct(
        self, x: Tensor, state_in: Tensor | None, state_out: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        if not self.momentum:
            return super().correct(x, state_in, state_out, scale)
        n = x.numel()
        state = torch.empty(2 * n, device=x.device) if state_out is None else state_out
        v, u = state[:n], state[n : 2 * n]
        gradient = x * scale
        if state_in is None:
            u.zero_()
        else:
            u.copy_(state_in[n : 2 * n])
        if self.nesterov:
            u.add_(gradient).mul_(self.momentum)
        else:
            u.mul_(self.momentum).add_(gradient)
        if state_in is None:
            v.copy_(u)
        else:
            torch.mul(state_in[:n], self.decay, out=v).add_(u)
        if self.nesterov:
            v.add_(gradient)
        return v, u

    def head(self, out: Tensor, counts: Sequence[int], fixed: bool) -> int:
        """Write the number of segments, the form and the counts; where they end."""
        data = struct.pack(f"<{1 + len(counts)}I", len(counts) | self.form << 24, *counts)
        return put(out, 0, (constant if fixed else literal)(data, out.device))

    def write(self, work: Work, counts: Sequence[int], index: Tensor, nonfinite: Tensor, fixed: bool = True) -> Pending:
        """The payload of the elements at ``index`` (int64, ascending), and the state without what is sent.

        counts: elements of each segment. fixed: they are the same at every step.
        """
        v, out = work.v, work.out
        at, total = self.head(out, counts, fixed), index.numel()
        # Without an old residual v may be -0, which the daemon never sends.
        values = v[index] + 0.0
        size: Tensor | None = None
        if self.form & PACKED and total:
            data, size = pack_gaps(index, index_bound(v.numel(), total, self.form))
            put(out, at, data)
            at += size  # type: ignore[assignment]  # from here on a number on the device
        else:
            at = put(out, at, index.to(torch.int32))
        return self.write_values(work, at, values, counts, index, nonfinite, moving=size is not None)

    def write_values(
        self,
        work: Work,
        at: Any,
        values: Tensor,
        counts: Sequence[int],
        index: Tensor,
        nonfinite: Tensor,
        moving: bool = False,
    ) -> Pending:
        """The values' section from byte ``at`` (moving: a number on the device), and the new state."""
        out, width = work.out, self.form >> 1 & 3
        lost: Any = 0.0
        data = values.view(torch.uint8)
        if width != EXACT and values.numel():
            data, lost = pack_values(values, counts, width)
        if moving:
            out.index_copy_(0, at + torch.arange(data.numel(), device=out.device), data)
        else:
            put(out, at, data)
        if work.state_out is not None:
            if isinstance(lost, Tensor):
                work.v.index_copy_(0, index, lost)
            else:
                work.v.index_fill_(0, index, 0.0)
            if work.momentum is not None:
                work.momentum.index_fill_(0, index, 0.0)
        end = at + data.numel()
        return Pending(-1, nonfinite, size=end) if moving else Pending(end, nonfinite)

    def check(self, payload: Tensor, n: int) -> None:
        self.parse(payload, n, payload.device)

    def parse(self, payload: Tensor, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(places, values) of a frame of n elements, on a device; GpuCodecError if it is none."""
        if payload.numel() < 4:
            raise self.refuse(n, "its segment counts (it is cut short)", payload)
        word = host_words(payload, 0, 1)[0]
        m, form = word & MOST_SEGMENTS, word >> 24
        if form > 5:
            raise self.refuse(n, "a form of packing that exists", payload)
        if payload.numel() < 4 + 4 * m:
            raise self.refuse(n, "its segment counts (it is cut short)", payload)
        counts, at, width = host_words(payload, 4, m), 4 + 4 * m, form >> 1
        total, rule = sum(counts), "as many indices and values as its counts say, in sections of their exact length"
        if total > n or total > payload.numel() - at:
            raise self.refuse(n, rule, payload)
        sized = gap_bytes(payload, at, total) if form & PACKED else 4 * total
        if sized < 0 or at + sized + value_bytes(counts, width) != payload.numel():
            raise self.refuse(n, rule, payload)
        index, values, good = self._sections(payload, at, sized, counts, form)
        if total:
            ascending = (index[1:] > index[:-1]).all() & (index[-1] < n)
            if not bool(good & ascending):
                raise self.refuse(n, "ascending indices inside it, values and padding bits in range", payload)
        return index.to(device), values.to(device)

    def _sections(
        self, payload: Tensor, at: int, sized: int, counts: list[int], form: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        total, width = sum(counts), form >> 1
        good = torch.ones((), dtype=torch.bool, device=payload.device)
        if form & PACKED and total:
            index, good = unpack_gaps(payload, at, sized, total)
        else:
            index = get(payload, at, total, torch.int32).long() & 0xFFFFFFFF
        if width == EXACT or not total:
            return index, get(payload, at + sized, total, torch.float32), good
        values, valid = unpack_values(payload[at + sized :], counts, width)
        return index, values, good & valid

    def decode(self, payload: Tensor, out: Tensor, scale: float = 1.0) -> None:
        index, values = self.parse(payload, self.target("out", out), out.device)
        out.zero_().index_copy_(0, index, values * scale)

    def decode_add(self, payload: Tensor, acc: Tensor) -> None:
        index, values = self.parse(payload, self.target("acc", acc), acc.device)
        acc.index_copy_(0, index, acc[index] + values)
