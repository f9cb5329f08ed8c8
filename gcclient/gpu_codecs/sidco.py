"""sidco-e on tensors: about k elements of each segment, those above a threshold from a fitted exponential, in stages.

What may live here: the codec. It decides as the daemon's does (`docs/codecs.md`, "Estimated thresholds"), from the same
sample and the same scalar formulas; its sums are float64 in whatever order the device likes, so thresholds agree to
1e-6, and payloads are the same unless an element lies that close to one.

How many elements exceed a threshold is known only when the device has counted them. So ``encode`` launches every pass
over the data and waits for nothing; `settle` then reads the sums (one wait), checks the threshold on the candidates
(one wait a segment, and one more for each correction), and launches what is left: choosing among the candidates, the
payload, the state. A segment with nothing to fit (zeros, few elements, a sample that misled) gets the exact top-k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gcclient.gpu_codecs.base import Encoded, Pending, Work, register
from gcclient.gpu_codecs.ops import count_nonfinite, fused, magnitudes, places, upload
from gcclient.gpu_codecs.sparse import Sparse, joined, largest
from gcproto.layouts import LN2, MASK64, CodecId, exp, ln

EXACT_BELOW = 1 << 16  #: shorter segments get the exact top-k
FEW = 32  #: survivors that a fit needs, and k from which thresholds are estimated at all
LEAST_SAMPLE, MOST_SAMPLE, LINE = 1 << 14, 1 << 17, 32  #: elements sampled, and sampled together
CUTS = 3  #: thresholds of earlier stages
FIRST = 0.25  #: share that the first of several stages keeps
LOW, HIGH, STEPS = 0.9, 1.1, 8  #: k^/k outside these is corrected, in so many attempts at most
WINDOW, TOLERANCE, FADE = 5, 0.1823215567939546, 0.9  #: of the adaptation of the number of stages
STAGES, AGE, MASS, ACHIEVED, ERRORS = range(5)  #: a segment's state
SEGMENT_FLOATS = ERRORS + CUTS + 1


def sample_size(n: int, k: int) -> int:
    """Elements sampled of a segment: few cost candidates that are not sent, many cost the sample itself."""
    size = LEAST_SAMPLE
    while size < MOST_SAMPLE and float(size) * size * size < 40.0 * n * k:
        size *= 2
    return min(size, n // 8) & -LINE


@lru_cache(maxsize=256)
def sampled(n: int, lines: int, device: torch.device) -> Tensor:
    """Places (int64) of ``lines`` lines of 32 elements, one from each stride of a segment of n."""
    stride, jitter, starts = n // lines, 0x9E3779B97F4A7C15, []
    for j in range(lines):
        jitter = (jitter * 6364136223846793005 + 1442695040888963407) & MASK64
        starts.append(j * stride + (jitter >> 33) % (stride - LINE + 1))
    return (upload(starts, device)[:, None] + torch.arange(LINE, device=device)).view(-1)


@lru_cache(maxsize=256)
def stage_logarithms(ratio: float, device: torch.device) -> Tensor:
    """The logarithm of each further stage's share, for one to four stages in force; float64."""
    steps = [ln(exp(ln(ratio / FIRST) / max(1, stages - 1))) for stages in range(1, CUTS + 2)]
    return upload(steps, device, torch.float64)


@fused
def _above(magnitude: Tensor, cut: Tensor) -> tuple[Tensor, Tensor]:
    """(count, sum) of the magnitudes above a cut, float64."""
    beyond = magnitude > cut
    return beyond.sum().double(), torch.where(beyond, magnitude, 0.0).sum(dtype=torch.float64)


@dataclass(slots=True)
class _Segment:
    """One segment between the passes and the decision: where it lies, and what the device will have found."""

    first: int
    n: int
    k: int
    v: Tensor
    #: of one that is estimated: the candidates' places and magnitudes, and the numbers `_Numbers` names
    index: Tensor | None = None
    magnitude: Tensor | None = None
    numbers: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Numbers:
    """What a segment's passes found, on the host."""

    mean: float  #: of the sample
    below: float  #: magnitude bits all candidates exceed
    bound: float  #: the magnitude with those bits
    found: float  #: candidates
    mass: float  #: their sum
    total: float  #: sum of all magnitudes
    used: float  #: cuts in force
    cuts: list[float]
    counts: list[float]
    sums: list[float]

    @classmethod
    def of(cls, row: list[float]) -> _Numbers:
        return cls(*row[:7], *(row[7 + CUTS * i : 7 + CUTS * (i + 1)] for i in range(3)))  # type: ignore[arg-type]


def as_f32(value: float) -> float:
    return float(np.float32(value))


def _stages(old: Tensor | None, device: torch.device) -> Tensor:
    """The number of stages in force, float64 on the device."""
    if old is None:
        return torch.ones((), dtype=torch.float64, device=device)
    return old[STAGES].double().clamp(1, CUTS + 1).floor()


def _place_cuts(sample: Tensor, mean: Tensor, ratio: float, stages: Tensor) -> tuple[list[Tensor], Tensor]:
    """The cuts (float32; infinity where there is none) and how many are in force: stages 1..M-1 on the sample."""
    # Not by indexing: with a single number from the device that would wait for it.
    step = torch.take(stage_logarithms(ratio, sample.device), stages.long() - 1)
    cuts: list[Tensor] = []
    alive = torch.ones((), dtype=torch.bool, device=sample.device)
    origin, excess, share = torch.zeros_like(mean), mean, torch.full_like(mean, ln(FIRST))
    used = torch.zeros_like(mean)
    for stage in range(CUTS):
        if stage:
            count, total = _above(sample, cuts[-1])
            alive = alive & (count >= FEW) & (total - origin * count > 0.0)
            excess, share = (total - origin * count) / count, step
        cut = (origin - excess * share).float()
        alive = alive & (stages > stage + 1) & (cut > origin) & torch.isfinite(cut)
        cuts.append(torch.where(alive, cut, torch.inf))
        used = used + alive
        origin = torch.where(alive, cut.double(), origin)
    return cuts, used


def _measure(part: _Segment, stages: Tensor) -> None:
    """Launch the passes over one segment."""
    n, k, v, ratio = part.n, part.k, part.v, part.k / part.n
    size = sample_size(n, k)
    sample = v[sampled(n, size // LINE, v.device)].abs()
    mean = sample.sum(dtype=torch.float64) / size
    cuts, used = _place_cuts(sample, mean, ratio, stages)
    # A bound that more than k elements exceed with four standard deviations of what the sample counts.
    share = size * ratio
    rank = torch.topk(magnitudes(sample), int(share + 4.0 * math.sqrt(share) + 4.0)).values[-1] & ~1023
    below = (rank - 1).clamp(min=0)
    magnitude = v.abs()
    beyond = magnitude.view(torch.int32) > below
    index = places(beyond, min(n, 4 * k + 8192))
    inside = index < n
    part.index = index
    part.magnitude = torch.where(inside, magnitude[index.clamp(max=n - 1)], 0.0)
    pairs = [_above(magnitude, cut) for cut in cuts]
    scalars = [mean, below, below.view(torch.float32), beyond.sum(), part.magnitude.sum(dtype=torch.float64)]
    scalars += [magnitude.sum(dtype=torch.float64), used, *cuts, *(c for c, _ in pairs), *(s for _, s in pairs)]
    part.numbers = torch.stack([scalar.double() for scalar in scalars])


def _threshold(seen: _Numbers, n: int, k: int) -> float:
    """SIDCo's threshold from the sums over all elements and over the exceedances of the cuts; -1 if there is none."""
    ratio, share, origin, excess = k / n, 1.0, 0.0, seen.total / n
    if not 0.0 < seen.total < math.inf:
        return -1.0
    for cut, count, total in list(zip(seen.cuts, seen.counts, seen.sums, strict=True))[: int(seen.used)]:
        beyond = share * exp(-(cut - origin) / excess)
        # Nothing left for a further stage: too few to fit, or the fit says the cut is beyond the threshold.
        if beyond <= ratio or count < max(FEW, k):
            break
        mass = total - cut * count
        if not 0.0 < mass < math.inf:
            break
        share, origin, excess = beyond, cut, mass / count
    return origin + -excess * ln(ratio / share)


def _exceeding(magnitude: Tensor, cut: float) -> tuple[float, float]:
    """(count, mean excess) of the candidates above a cut. Waits for the device."""
    count, total = torch.stack(_above(magnitude, torch.full((), cut, device=magnitude.device))).tolist()
    return count, (total / count - cut if count else 0.0)


def _tune(eta: float, seen: _Numbers, magnitude: Tensor, k: int) -> tuple[float, float, float]:
    """(threshold, elements above it, ln(k^/k) of eta): within LOW..HIGH times k, or a threshold of -1."""
    low, high = LOW * k, HIGH * k
    cut, count, excess = seen.bound, seen.found, seen.mass / seen.found - seen.bound
    lower, lower_count, lower_excess = cut, count, excess
    upper, upper_count = math.inf, 0.0
    if eta > seen.bound:
        cut = eta
        count, excess = _exceeding(magnitude, cut)
        error = ln(max(count, 0.5) / k)
    else:
        # It selects more than there are candidates: how many, the tail above the bound must tell.
        error = ln(count / k) + min(10.0, (seen.bound - eta) / max(excess, 1e-6 * seen.bound))
    for _ in range(STEPS):
        if low <= count <= high:
            return cut, count, error
        if count > high:
            lower, lower_count, lower_excess = cut, count, excess
        else:
            upper, upper_count = cut, count
        if 8.0 * upper_count >= k:
            # ln(count) as a straight line between the two.
            cut = lower + (upper - lower) * ln(lower_count / k) / ln(lower_count / upper_count)
        else:
            # Nothing useful above: what exceeds ``lower`` as one more exponential stage.
            cut = min(lower + lower_excess * ln(lower_count / k), 0.5 * (lower + upper))
        cut = as_f32(cut)
        count, excess = _exceeding(magnitude, cut)
    return -1.0, 0.0, error


def _decide(part: _Segment) -> tuple[Tensor, float]:
    """(places of what is sent within the segment, ln(k^/k) before correction or NaN)."""
    if part.numbers is None or part.index is None or part.magnitude is None:
        return largest(part.v, part.k), math.nan
    seen = _Numbers.of(part.numbers.tolist())
    hopeless = not 1e-30 < seen.mean < 1e30 or not seen.total < math.inf or seen.found > part.index.numel()
    if hopeless or (seen.found < part.k and seen.below > 0):
        return largest(part.v, part.k), math.nan
    if seen.found < part.k:
        # Fewer elements that are not zero than wanted.
        return part.index[: int(seen.found)], math.nan
    cut, count, error = _tune(as_f32(_threshold(seen, part.n, part.k)), seen, part.magnitude, part.k)
    if cut < 0.0:
        return largest(part.v, part.k), error
    return part.index[places(part.magnitude > cut, int(count))], error


def _adapt(old: list[float], error: float, ratio: float, achieved: float) -> list[float]:
    """A segment's state after a step; every number is rounded to float32 when it is stored."""
    new = list(old)
    new[ACHIEVED] = as_f32(achieved)
    if not abs(error) < math.inf:
        return new
    most = min(CUTS + 1, math.ceil(ln(1.0 / ratio) / LN2 - 1e-9))
    stages = min(max(int(old[STAGES]), 1), most)
    age, mass = int(old[AGE]) + 1, old[MASS] + error
    if age == WINDOW:
        mean, best = mass / WINDOW, stages
        age, mass = 0, 0.0
        here = max(abs(mean), 1e-6)
        if here > TOLERANCE:
            new[ERRORS:] = [as_f32(value * FADE) for value in new[ERRORS:]]
            smallest = here
            step = -1 if mean > 0.0 else 1
            for other in (stages + step, stages - step):
                if 1 <= other <= most and new[ERRORS + other - 1] < smallest:
                    best, smallest = other, new[ERRORS + other - 1]
        new[ERRORS + stages - 1] = as_f32(here)
        stages = best
    new[STAGES], new[AGE], new[MASS] = float(stages), float(age), as_f32(mass)
    return new


@register
class SidcoE(Sparse):
    """k^ elements and their indices, k^ within 0.9 k and 1.1 k."""

    id, name = CodecId.SIDCO_E, "sidco-e"

    def most(self, n: int, segments: int, level: int) -> int:
        k = super().most(n, segments, level)
        return min(n, k + k // 10)

    def exact_bytes(self, n: int) -> int:
        return -1

    def state_floats(self, n: int, segments: int = 1) -> int:
        return super().state_floats(n) + (SEGMENT_FLOATS * segments if self.error_feedback else 0)

    def compress(self, work: Work) -> Pending:
        old = self._segments_state(work.state_in, work)
        bad, parts = count_nonfinite(work.v), []
        for s, ((start, stop), k) in enumerate(zip(work.parts, self.counts_of(work), strict=True)):
            part = _Segment(start, stop - start, k, work.v[start:stop])
            if part.n >= EXACT_BELOW and k >= FEW and 4 * k <= part.n:
                _measure(part, _stages(None if old is None else old[s], work.v.device))
            parts.append(part)
        return Pending(-1, bad, finish=lambda: self._finish(work, parts, bad, old))

    def _segments_state(self, state: Tensor | None, work: Work) -> Tensor | None:
        """float32[segments, SEGMENT_FLOATS] behind residual and momentum."""
        if state is None or not self.error_feedback:
            return None
        return state[super().state_floats(work.v.numel()) :].view(len(work.parts), SEGMENT_FLOATS)

    def _finish(self, work: Work, parts: list[_Segment], bad: Tensor, old: Tensor | None) -> Encoded:
        measured = [part.numbers for part in parts if part.numbers is not None]
        if measured:
            # All segments' numbers in one wait; what is on the host already costs none.
            rows = iter(torch.stack(measured).cpu())
            for part in parts:
                part.numbers = None if part.numbers is None else next(rows)
        before = [[0.0] * SEGMENT_FLOATS] * len(parts) if old is None else old.tolist()
        counts, chosen, after = [], [], []
        for part, row in zip(parts, before, strict=True):
            where, error = _decide(part) if part.k else (None, math.nan)
            counts.append(0 if where is None else where.numel())
            after.append(_adapt(row, error, part.k / max(1, part.n), counts[-1] / max(1, part.k)))
            if where is not None:
                chosen.append(where + part.first)
        new = self._segments_state(work.state_out, work)
        if new is not None:
            new.copy_(upload(after, work.out.device, torch.float32))
        return self.write(work, counts, joined(chosen, work.out.device), bad, fixed=False).settle()
