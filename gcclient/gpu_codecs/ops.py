"""Tensor operations all GPU codecs are made of: correction by the residual, bits, compaction, bytes, chance.

What may live here: short functions on tensors with no layout and no rule of selection. None waits for the device.

*Rounding.* A multiplication and the addition after it are always two operations, never `torch.add(alpha=)`, `addcmul`
or one compiled function: contracted to a fused multiply-add they would round once, and the bytes would differ from
the daemon's. ``fused`` marks functions without such pairs, which `torch.compile` may turn into one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from gcclient.device import HOST
from gcproto.layouts import FIRST, GOLDEN, MAGNITUDE, MIX1, MIX2, SECOND, SPREAD

_compiling = False
F = TypeVar("F", bound=Callable[..., Any])


def compile_kernels(enable: bool = True) -> None:
    """Whether the elementwise parts go through `torch.compile` from now on: one kernel in place of some twenty.

    Off at first, because the first use of each then takes seconds; the payloads are the same.
    """
    global _compiling
    _compiling = enable


def fused(function: F) -> F:
    """Compile a function at its first use while `compile_kernels` is on. It must hold no multiply-add of floats."""
    compiled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any) -> Any:
        if not _compiling:
            return function(*args)
        if not compiled:
            compiled.append(torch.compile(function, dynamic=True))
        return compiled[0](*args)

    return call  # type: ignore[return-value]


def corrected(x: Tensor, residual: Tensor | None, scale: float, decay: float, target: Tensor | None = None) -> Tensor:
    """x*scale + residual*decay, every operation rounded; into target or a new tensor."""
    v = torch.mul(x, scale, out=target)
    if residual is not None:
        v.add_(residual if decay == 1.0 else residual * decay)
    return v


def magnitudes(v: Tensor) -> Tensor:
    """The bits of a float32 tensor without the sign, int32: they compare as the magnitudes do."""
    return v.view(torch.int32) & MAGNITUDE


@fused
def count_nonfinite(v: Tensor) -> Tensor:
    """How many elements are NaN or infinite, int64."""
    return torch.isfinite(v).logical_not().sum()


def places(mask: Tensor, count: int) -> Tensor:
    """Where the first ``count`` set elements of a mask are, int64, ascending; its length where there are fewer.

    `nonzero` would have to wait for the number; here it is known, and a search in the running count finds each.
    """
    order = torch.cumsum(mask, 0, dtype=torch.int32)
    wanted = torch.arange(1, count + 1, dtype=torch.int32, device=mask.device)
    return torch.searchsorted(order, wanted)


@lru_cache(maxsize=1024)
def constant(data: bytes, device: torch.device) -> Tensor:
    """Bytes as a tensor on a device, kept: headers are the same from step to step."""
    return literal(data, device)


def literal(data: bytes, device: torch.device) -> Tensor:
    """Bytes as a tensor on a device."""
    empty = torch.empty(0, dtype=torch.uint8, device=HOST)
    return _moved(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty, device)


def upload(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A few numbers of the host, or rows of them, as a tensor on a device. ``torch.tensor(..., device=)`` would wait
    for all that is queued there."""
    return _moved(torch.tensor(numbers, dtype=dtype, device=HOST), device)


def _moved(host: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        # From pinned memory the copy is one more thing in the queue; the allocator keeps the memory until it is done.
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def put(out: Tensor, at: int, values: Tensor) -> int:
    """Write a one-dimensional tensor's bytes to out from ``at``; where they end."""
    if not values.numel():
        return at
    data = values.contiguous().view(torch.uint8)
    out[at : at + data.numel()].copy_(data)
    return at + data.numel()


def get(payload: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` numbers of a payload from byte ``at``, wherever they lie."""
    if not count:
        return torch.empty(0, dtype=dtype, device=payload.device)
    part = payload[at : at + count * dtype.itemsize]
    # A view needs an aligned beginning, which payloads need not have.
    return (part.clone() if part.storage_offset() % dtype.itemsize else part).view(dtype)


def host_words(payload: Tensor, at: int, count: int) -> list[int]:
    """Unsigned 32-bit words of a payload as numbers. Of one on a device: waits for it."""
    return [word & 0xFFFFFFFF for word in get(payload, at, count, torch.int32).tolist()]


def signed(value: int, bits: int = 32) -> int:
    """An unsigned constant as the signed number with the same bits."""
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


def splitmix(seed: int, counters: Tensor) -> Tensor:
    """`gcproto.layouts.bits64` of int64 counters, as int64 with the same bits."""

    def shifted(z: Tensor, by: int) -> Tensor:
        return (z >> by) & ((1 << (64 - by)) - 1)

    z = (counters + 1) * signed(GOLDEN, 64) + signed(seed & ((1 << 64) - 1), 64)
    z = (z ^ shifted(z, 30)) * signed(MIX1, 64)
    z = (z ^ shifted(z, 27)) * signed(MIX2, 64)
    return z ^ shifted(z, 31)


def draws(seed: int, counters: Tensor, limits: Tensor) -> Tensor:
    """`gcproto.layouts.draw` of int64 counters and limits."""
    return (((splitmix(seed, counters) >> 32) & 0xFFFFFFFF) * limits) >> 32


def rounding_words(numbers: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """The quantisers' 32 bits of chance for elements of these numbers; all int32."""
    h = numbers * signed(SPREAD) + k0
    h = (h ^ ((h >> 16) & 0xFFFF)) * signed(FIRST)
    h = h ^ ((h >> 15) & 0x1FFFF) ^ k1
    return h * signed(SECOND)
