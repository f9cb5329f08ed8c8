"""Packing of sparse payloads on tensors: gaps between indices in as few bits as they need, values in 16 or 8 bits.

What may live here: the two packings, both ways. Where the sections lie is `sparse`'s; what they are is written in
docs/codecs.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gcclient.gpu_codecs.ops import upload
from gcproto.layouts import EIGHT, EXACT, GAPS, INFINITE, MAGNITUDE, MAX_SHIFT, MOST_CODE, VALUES


def _bits(widths: Tensor) -> Tensor:
    """Where each gap of each group begins, in bits from the end of the widths."""
    before = torch.cumsum(widths, 0) - widths
    within = torch.arange(GAPS, device=widths.device)
    return before[:, None] * 32 + within * widths[:, None]


def _packed_size(widths: Tensor, total: int) -> Tensor:
    """Bytes of a section with these widths (int64)."""
    last = (total - GAPS * (widths.numel() - 1)) * widths[-1]
    return widths.numel() + 4 * widths[:-1].sum() + (last + 7) // 8


def pack_gaps(index: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """(bytes of at most ``room``, how many of them count) of ascending int64 indices, at least one."""
    total, device = index.numel(), index.device
    gaps = torch.diff(index, prepend=torch.full((1,), -1, dtype=torch.int64, device=device)) - 1
    groups = -(-total // GAPS)
    gaps = torch.nn.functional.pad(gaps, (0, groups * GAPS - total)).view(groups, GAPS)
    powers = torch.ones(32, dtype=torch.int64, device=device) << torch.arange(32, device=device)
    widths = (gaps.amax(1)[:, None] >= powers).sum(1)
    bits = _bits(widths)
    words = torch.zeros((room + 3) // 4 + GAPS + 2, dtype=torch.int64, device=device)
    # Gaps never share a bit, so that adding is or-ing.
    words.index_add_(0, (bits >> 5).view(-1), ((gaps << (bits & 31)) & 0xFFFFFFFF).view(-1))
    words.index_add_(0, (bits >> 5).view(-1) + 1, (gaps >> (32 - (bits & 31))).view(-1))
    data = torch.cat((widths.to(torch.uint8), words.to(torch.int32).view(torch.uint8)))
    return data[:room], _packed_size(widths, total)


def gap_bytes(payload: Tensor, at: int, total: int) -> int:
    """Length of a section of ``total`` packed indices, or -1 if it is none. Of a payload on a device: waits for it."""
    groups = -(-total // GAPS)
    if payload.numel() - at < groups:
        return -1
    if not total:
        return 0
    widths = payload[at : at + groups].long()
    size, widest = torch.stack((_packed_size(widths, total), widths.amax())).tolist()
    return -1 if widest > 32 or size > payload.numel() - at else size


def unpack_gaps(payload: Tensor, at: int, size: int, total: int) -> tuple[Tensor, Tensor]:
    """(int64 indices, whether all padding bits are 0) of a section that `gap_bytes` measured."""
    groups, device = -(-total // GAPS), payload.device
    widths = payload[at : at + groups].long()
    data = torch.cat((payload[at + groups : at + size].long(), torch.zeros(8, dtype=torch.int64, device=device)))
    bits = _bits(widths).view(-1)[:total]
    gaps = sum(data[(bits >> 3) + i] << (8 * i) for i in range(5)) >> (bits & 7)
    mask = (torch.ones(1, dtype=torch.int64, device=device) << widths) - 1
    gaps = gaps & mask.repeat_interleave(GAPS)[:total]
    used = (total - GAPS * (groups - 1)) * widths[-1]
    padding = data[(used + 7) // 8 - 1 + 4 * widths[:-1].sum()] >> (used & 7)
    return torch.cumsum(gaps + 1, 0) - 1, (used & 7 == 0) | (padding == 0)


def _groups(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """(start, length) of the groups of values: at most 128, none across segments."""
    starts, lengths, first = [], [], 0
    for count in counts:
        for start in range(0, count, VALUES):
            starts.append(first + start)
            lengths.append(min(VALUES, count - start))
        first += count
    return starts, lengths


def value_groups(counts: Sequence[int]) -> int:
    """How many groups of values segments with these counts have."""
    return sum(-(-count // VALUES) for count in counts)


def value_bytes(counts: Sequence[int], width: int) -> int:
    """Bytes of a section of values."""
    total = sum(counts)
    if width == EXACT:
        return 4 * total
    return 4 * value_groups(counts) + (total if width == EIGHT else 2 * total)


def pack_values(values: Tensor, counts: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """(bytes, what rounding lost of each value) of float32 values in order; width SIXTEEN or EIGHT."""
    device, limit, most = values.device, MOST_CODE[width], MAX_SHIFT[width]
    starts, lengths = (upload(part, device) for part in _groups(counts))
    lanes = torch.arange(VALUES, device=device)
    inside = lanes < lengths[:, None]
    bits = values.view(torch.int32).long()
    magnitude = bits & MAGNITUDE
    each = magnitude[(starts[:, None] + lanes).clamp(max=values.numel() - 1)]
    high = torch.where(inside, each, 0).amax(1)
    low = torch.where(inside & (each > 0), each, MAGNITUDE).amin(1)
    base = torch.minimum(low, high) & ~31
    shifts = torch.arange(most + 1, device=device)
    half = torch.where(shifts > 0, (1 << shifts) >> 1, 0)
    # The smallest shift at which the largest magnitude has a code, or the largest there is.
    more = ((high - base)[:, None] + half) >> shifts > limit
    shift = more[:, :most].long().cumprod(1).sum(1)
    # Where even that one is too small the smallest become zero.
    base = torch.where(more[:, most] & (shift == most), (high - (limit << most) + 31) & ~31, base)
    group = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=values.numel())
    base_of, shift_of = base[group], shift[group]
    # Rounding up must not turn a finite value into infinity.
    top = (((INFINITE - 1 - base_of) >> shift_of) + 1).clamp(min=0, max=limit + 1)
    code = ((magnitude - base_of + torch.where(shift_of > 0, (1 << shift_of) >> 1, 0)) >> shift_of) + 1
    code = torch.minimum(code.clamp(min=0), top) * (magnitude > 0)
    back = torch.where(code > 0, base_of + ((code - 1) << shift_of), 0)
    sign = bits < 0
    decoded = back.to(torch.int32).view(torch.float32)
    lost = values - torch.where(sign, -decoded, decoded)
    narrow = code + (sign.long() << (7 if width == EIGHT else 15))
    # A conversion keeps the low bits, whatever the sign of the narrow type.
    codes = narrow.to(torch.uint8) if width == EIGHT else narrow.to(torch.int16).view(torch.uint8)
    return torch.cat(((base | shift).to(torch.int32).view(torch.uint8), codes)), lost


def unpack_values(section: Tensor, counts: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """(float32 values, whether all headers are such as an encoder may write) of a section of the right length."""
    device, total = section.device, sum(counts)
    lengths = upload(_groups(counts)[1], device)
    headers = section[: 4 * len(lengths)].clone().view(torch.int32).long()
    base, shift = headers & ~31, headers & 31
    valid = ((headers >= 0) & (shift <= MAX_SHIFT[width])).all()
    codes = section[4 * len(lengths) :].clone()
    wide = codes.long() if width == EIGHT else codes.view(torch.int16).long() & 0xFFFF
    top = 7 if width == EIGHT else 15
    code = wide & ((1 << top) - 1)
    group = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=total)
    magnitude = (base[group] + ((code - 1) << shift[group])) & MAGNITUDE
    decoded = torch.where(code > 0, magnitude, 0).to(torch.int32).view(torch.float32)
    return torch.where(wide >> top > 0, -decoded, decoded), valid
