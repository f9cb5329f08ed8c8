"""Compression methods in plain torch, for those that `gcclient.gpu_codecs` has no twin of: what a user would write.

What may live here: the methods as their papers describe them, on warm buffers of one size; no timing, no frames. They
are peers in `benchmarks.codecs`: each does the work of a codec (correct by the residual, select or quantise, keep what
was not sent, give compact tensors), with torch's operations and nothing fused.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Estimate = Callable[[Tensor, int], float]
SAMPLE = 100  #: one element in so many is looked at for DGC's threshold
FIRST_RATIO = 0.25  #: of SIDCo's stages


def dgc(magnitudes: Tensor, k: int) -> float:
    """The threshold of a sample, moved by 1.3 or 0.7 until it takes between 0.8 k and 1.25 k, at most ten times."""
    sample = magnitudes[torch.randint(0, magnitudes.numel(), (max(k // SAMPLE, magnitudes.numel() // SAMPLE, 1),))]
    wanted = max(1, sample.numel() * k // magnitudes.numel())
    threshold = float(torch.topk(sample, wanted).values[-1])
    for _ in range(10):
        found = int((magnitudes > threshold).sum())
        if 0.8 * k <= found <= 1.25 * k:
            break
        threshold *= 1.3 if found > k else 0.7
    return threshold


def redsync(magnitudes: Tensor, k: int) -> float:
    """RedSync's binary search between mean and maximum for a threshold that takes k to 2 k."""
    mean, top = float(magnitudes.mean()), float(magnitudes.max())
    low, high = 0.0, 1.0
    threshold = mean
    while high - low > 0.02:
        middle = (low + high) / 2
        threshold = mean + middle * (top - mean)
        found = int((magnitudes > threshold).sum())
        if k <= found <= 2 * k:
            break
        low, high = (middle, high) if found > 2 * k else (low, middle)
    return threshold


def gaussiank(magnitudes: Tensor, k: int) -> float:
    """GaussianK's quantile of a normal, then up to three corrections by halves."""
    share = 1 - k / magnitudes.numel()
    threshold = float(magnitudes.mean() + magnitudes.std() * math.sqrt(2) * torch.erfinv(torch.tensor(share)))
    for _ in range(3):
        found = int((magnitudes > threshold).sum())
        if 2 * k / 3 <= found <= 4 * k / 3:
            break
        threshold *= 0.5 if found < 2 * k / 3 else 1.5
    return threshold


def _pareto(magnitudes: Tensor, share: float) -> float:
    mean, var = float(magnitudes.mean()), max(float(magnitudes.var()), 1e-30)
    ratio = mean * mean / var
    shape, scale = (ratio - 1) / 2, mean / 2 * (ratio + 1)
    return scale * (1 - math.exp(shape * math.log(share))) / shape if abs(shape) > 1e-6 else -scale * math.log(share)


def _gamma(magnitudes: Tensor, share: float) -> float:
    mean = float(magnitudes.mean())
    s = math.log(mean) - float(torch.log(magnitudes + 2.2e-16).mean())
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return -mean / shape * (math.log(share) + math.lgamma(shape))


def sidco(first: Callable[[Tensor, float], float]) -> Estimate:
    """SIDCo in two stages: the first at a quarter by ``first``, then a generalised Pareto of what exceeds it."""

    def estimate(magnitudes: Tensor, k: int) -> float:
        threshold = first(magnitudes, FIRST_RATIO)
        above = magnitudes[magnitudes > threshold] - threshold
        share = k / magnitudes.numel() / FIRST_RATIO
        return threshold + (_pareto(above, share) if above.numel() > 32 else 0.0)

    return estimate


#: the threshold of each method for about k of the magnitudes
ESTIMATES: dict[str, Estimate] = {
    "dgc": dgc,
    "redsync": redsync,
    "gaussiank": gaussiank,
    "sidco-gp": sidco(_gamma),
    "sidco-p": sidco(_pareto),
}


class Thresholded:
    """A sparsifier by threshold. ``residual``: float32[n], what was not sent; None: no error feedback."""

    def __init__(self, n: int, k: int, estimate: Estimate, residual: Tensor | None) -> None:
        self.k, self.estimate, self.residual = k, estimate, residual
        self.value, self.magnitudes = (torch.ones(n) for _ in range(2))
        self.mask = torch.ones(n, dtype=torch.bool)

    def encode(self, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(indices, values) of what is sent of x*scale and the residual."""
        if self.residual is None:
            torch.mul(x, scale, out=self.value)
        else:
            torch.add(self.residual, x, alpha=scale, out=self.value)
        torch.abs(self.value, out=self.magnitudes)
        torch.gt(self.magnitudes, self.estimate(self.magnitudes, self.k), out=self.mask)
        index = self.mask.nonzero().squeeze(1)
        values = self.value[index]
        if self.residual is not None:
            self.value[index] = 0.0
            self.value, self.residual = self.residual, self.value
        return index, values

    def decode_add(self, payload: tuple[Tensor, Tensor], dense: Tensor) -> None:
        dense.index_add_(0, *payload)


class Signs:
    """signsgd, and signum with ``momentum``: one bit an element, set where it is not negative."""

    def __init__(self, n: int, momentum: bool) -> None:
        self.average = torch.zeros(n) if momentum else None
        self.powers = 2 ** torch.arange(8, dtype=torch.uint8)
        self.mask, self.bits = torch.ones(-(-n // 8) * 8, dtype=torch.bool), torch.ones(-(-n // 8), dtype=torch.uint8)
        self.n = n

    def encode(self, x: Tensor, scale: float) -> Tensor:
        """uint8[n/8]; scale is positive and changes no sign."""
        if self.average is not None:
            self.average.mul_(0.9).add_(x, alpha=0.1)
            x = self.average
        torch.ge(x, 0.0, out=self.mask[: self.n])
        torch.sum(self.mask.view(-1, 8) * self.powers, 1, dtype=torch.uint8, out=self.bits)
        return self.bits

    def decode_add(self, payload: Tensor, dense: Tensor) -> None:
        signs = (payload.unsqueeze(1) & self.powers).ne(0).view(-1)[: self.n]
        dense.add_(signs, alpha=2.0).sub_(1.0)


class Natural:
    """Powers of two, rounded up or down at random, as the upper nine bits of a float32 in an int16."""

    def __init__(self, n: int) -> None:
        self.value, self.noise = torch.ones(n), torch.ones(n, dtype=torch.int32)
        self.wire = torch.ones(n, dtype=torch.int16)

    def encode(self, x: Tensor, scale: float) -> Tensor:
        """int16[n]: sign and exponent."""
        torch.mul(x, scale, out=self.value)
        self.noise.random_(0, 1 << 23)
        self.noise.add_(self.value.view(torch.int32)).bitwise_right_shift_(23)
        return self.wire.copy_(self.noise)

    def decode_add(self, payload: Tensor, dense: Tensor) -> None:
        dense.add_(payload.to(torch.int32).bitwise_left_shift_(23).view(torch.float32))


Method = Thresholded | Signs | Natural


def make(name: str, n: int, k: int, threshold: float, residual: Tensor | None = None) -> Method | None:
    """The method of that name for n elements of which it sends about k; None where there is none here."""
    if name == "threshold":
        return Thresholded(n, k, lambda magnitudes, _: threshold, residual)
    if name in ESTIMATES:
        return Thresholded(n, k, ESTIMATES[name], residual)
    if name in ("signsgd", "signum"):
        return Signs(n, name == "signum")
    return Natural(n) if name == "natural" else None
