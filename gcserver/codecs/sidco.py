"""SIDCo: thresholds from fitted distributions, in stages (sidco-e, sidco-gp, sidco-p).

What may live here: the way of a segment through sample, pass and threshold, the state that carries over, and the
codecs. Thresholds are `sidco_stages`', fits `sidco_fit`'s, passes over data `sidco_scan`'s, the payload `sparse`'s.

A segment of n elements with ratio d = k/n goes through one pass (Algorithm 1, corrected):
1. A sample of some cache lines goes through stages 1..M-1 alone: it places the cuts u1 < u2 < ... where the ratio
   splits, d = 0.25 * i**(M-1), and a bound that somewhat more than k elements exceed. No fit to it is used later.
2. The pass sums |v| over all elements and over each cut's exceedances, and collects the candidates above the bound.
3. Stage m is fitted to the exceedances of u(m-1), less u(m-1); its share above u(m) is what the fit says; the
   last stage's quantile, u(M-1) added back, is the threshold: eta = u(M-1) + Q(d / (share1 * ... * share(M-1))).
4. If more than 1.1 k or fewer than 0.9 k candidates exceed eta, secant steps on ln(count) correct it. So k^ is
   outside that band only where a segment has fewer elements that are not zero.
5. Every 5 steps the mean of ln(k^/k) *before* correction moves M by one, in the direction that helps.
   State is per segment, behind the residual; without one every step is a first one, of one stage.
What cannot be fitted (short segments, k below 32, ratios above a quarter, zeros, numbers at the ends of float32,
segments of few distinct magnitudes) gets the exact top-k.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numba import njit

from gcproto.layouts import LN2
from gcserver.codecs.base import register
from gcserver.codecs.collect import BLOCK
from gcserver.codecs.jit import element, f32, i64, kernel, place, u32
from gcserver.codecs.momentum import accumulated
from gcserver.codecs.select import settle
from gcserver.codecs.sidco_fit import ln
from gcserver.codecs.sidco_scan import ACCUMULATOR, CUTS, GROUP, SUM, add_all, clear, draw, rank, scan, total
from gcserver.codecs.sidco_stages import FEW, GP, E, P, as_f32, place_cuts, threshold, tune
from gcserver.codecs.sparse import finish, room, select, workspace
from gcserver.codecs.sparsifier import COMMON, FORM, RATIO, Job, Sparsifier, level_of, wanted
from gcserver.codecs.vector import INFINITE

EXACT_BELOW = 1 << 16  #: shorter segments get the exact top-k (DESIGN section 7)
LEAST_SAMPLE, MOST_SAMPLE = 1 << 14, 1 << 17  #: elements
WINDOW = 5  #: steps between adaptations of the number of stages (Q)
TOLERANCE = 0.1823215567939546  #: ln 1.2, the mean error from which the number is adapted
FADE = 0.9  #: of what is remembered of other numbers of stages, a window
#: a segment's state: stages in force (0: fresh, means 1), steps in the window, their errors' sum, last k^/k, then
#: the last mean error seen with 1, 2, 3 and 4 stages (0: never tried)
STAGES, AGE, MASS, ACHIEVED, ERRORS = range(5)
SEGMENT_FLOATS = ERRORS + CUTS + 1


@njit(nogil=True)
def choose(cut, found, ro, first, at, work):
    """Keep the candidates above a cut in the slots from ``at``, give ro the others back; returns how many stay."""
    idx, val = work[0], work[1]
    level, residual = np.float32(cut), f32(ro, 1 << 32)
    taken = at
    for i in range(at, at + found):
        value, where = val[i], idx[i]
        take = abs(value) > level
        if ro != 0 and not take:
            residual[np.int64(where) - first] = value
        idx[taken], val[taken] = where, value
        taken += take
    return taken - at


@njit(nogil=True)
def sample_size(n, k):
    """Elements sampled of a segment: few cost candidates that are not sent, many cost the sample itself."""
    size = LEAST_SAMPLE
    while size < MOST_SAMPLE and float(size) * size * size < 40.0 * n * k:
        size *= 2
    return min(size, n // 8) & -GROUP


@njit(nogil=True)
def encode_segment(method, x, r, ro, n, k, first, scale, decay, stages, at, sample, work):
    """Append what one segment sends to ``work`` from slot ``at``: (count, non-finite, ln(k^/k) uncorrected or NaN)."""
    count, bad, error = np.int64(-1), np.int64(0), np.nan
    if n >= EXACT_BELOW and k >= FEW and 4 * k <= n:
        count, bad, error = fitted(method, x, r, ro, n, k, first, scale, decay, stages, at, sample, work)
    if count < 0:
        return k, select(x, r, ro, n, k, first, scale, decay, at, work), np.nan
    return count, bad, error


@njit(nogil=True)
def fitted(method, x, r, ro, n, k, first, scale, decay, stages, at, sample, work):
    """What `encode_segment` does where a distribution can be fitted; (-1, 0, NaN) where it cannot."""
    sums, logs = np.zeros(ACCUMULATOR * (CUTS + 1)), np.empty(2)
    lanes, cuts = np.empty(16, np.float32), np.empty(CUTS)
    size = sample_size(n, k)
    draw(x, r, n, size // GROUP, scale, decay, sample, work)
    clear(sums, logs)
    for start in range(0, size, BLOCK):
        add_all(place(sample) + 4 * start, min(BLOCK, size - start), False, 1.0, sums)
    mean = total(sums, 0, SUM) / size
    if not 1e-30 < mean < 1e30:
        # Zeros, denormals, numbers near the ends of the format, NaN: nothing to fit.
        return -1, 0, np.nan
    unit = math.ldexp(1.0, -math.frexp(mean)[1])
    squares, with_logs = (method == P, method != E), method == GP
    used = place_cuts(method, stages, k / n, sample, size, unit, sums, logs, lanes, cuts)
    # A bound that more than k elements exceed with four standard deviations of what the sample counts.
    share = size * (k / n)
    below = max(0, rank(sample, size, np.int64(share + 4.0 * np.sqrt(share) + 4.0), work[6]) - 1)
    clear(sums, logs)
    found = scan(
        *(x, r, ro, n, first, scale, decay, below, at, room(n, k)),
        *(cuts, used, unit, squares, with_logs, sums, logs, work),
    )
    if not total(sums, 0, SUM) < np.inf or found < 0 or (found < k and below > 0):
        # Not finite; or the sample misled: equal magnitudes, or what is large was hidden from it.
        return -1, 0, np.nan
    if found < k:
        # Fewer elements that are not zero than wanted.
        return found, 0, np.nan
    values = place(work[1]) + 4 * at
    # Sums go over whole groups.
    f32(values, found + GROUP)[found:] = np.float32(0.0)
    eta = as_f32(threshold(method, n, k, used, unit, sums, logs, -n % BLOCK, cuts))
    work[5][0] = np.uint32(below)
    bound = np.float64(f32(place(work[5]), 1)[0])
    cut, error = tune(eta, bound, values, found, k, sums)
    if cut < 0.0:
        return k, settle(found, k, below + 1, np.int64(INFINITE), ro, first, at, work), error
    return choose(cut, found, ro, first, at, work), 0, error


@njit(nogil=True)
def adapt(old, new, error, ratio, achieved):
    """The state after a step with this error (NaN: nothing was estimated), at ``ratio``, that sent ``achieved`` k.

    Every WINDOW steps, if the mean error is large, M moves to the neighbour with the smallest remembered error; one
    never tried comes first, and of two the one of the paper's rule (too many elements: one stage less), which
    alone would be right for light tails only. What is remembered of others fades, so that they are tried again.
    """
    for i in range(SEGMENT_FLOATS):
        new[i] = old[i]
    new[ACHIEVED] = achieved
    if not abs(error) < np.inf:
        return
    most = min(CUTS + 1, np.int64(math.ceil(ln(1.0 / ratio) / LN2 - 1e-9)))
    stages: Any = min(max(np.int64(old[STAGES]), 1), most)
    age: Any
    age, mass = np.int64(old[AGE]) + 1, np.float64(old[MASS]) + error
    if age >= WINDOW:
        mean, best = mass / WINDOW, stages
        age, mass = 0, 0.0
        here = max(abs(mean), 1e-6)
        if here > TOLERANCE:
            for i in range(CUTS + 1):
                new[ERRORS + i] = np.float64(old[ERRORS + i]) * FADE
            smallest = here
            step = -1 if mean > 0.0 else 1
            for other in (stages + step, stages - step):
                if 1 <= other <= most and new[ERRORS + other - 1] < smallest:
                    best, smallest = other, np.float64(new[ERRORS + other - 1])
        new[ERRORS + stages - 1] = here
        stages = best
    new[STAGES], new[AGE], new[MASS] = stages, age, mass


@kernel(f"UniTuple(int64, 2)({COMMON}, int64, int64)")
def sidco_encode(
    x, r, u, ro, uo, out, table, m, n, levels, level, form, scale, decay, momentum, nesterov, method, behind
):
    """Encode m segments: (bytes written, non-finite elements). Arguments as in `sparsifier.Job`, then ours.

    method: E, GP or P. behind: where the segments' own state begins, in elements of r and ro; -1: there is none.
    """
    bounds, counts = i64(table, m + 1), u32(out + 4, m)
    slots, largest, longest = np.int64(0), np.int64(0), np.int64(0)
    for s in range(m):
        length = bounds[s + 1] - bounds[s]
        k = wanted(length, level_of(levels, level, s))
        slots += k + k // 10
        largest = max(largest, room(length, k))
        longest = max(longest, sample_size(length, k))
    work = workspace(slots + largest + GROUP)
    sample = np.empty(longest, np.float32)
    fresh = np.zeros(SEGMENT_FLOATS, np.float32)
    old_state = 0 if r == 0 or behind < 0 else r + 4 * behind
    new_state = 0 if ro == 0 or behind < 0 else ro + 4 * behind
    x, r, kept, scale, decay = accumulated(x, r, u, ro, uo, n, scale, decay, momentum, nesterov)
    # Of a declared type: a literal 0 would have numba compile everything it is handed to twice.
    count, sent, bad = np.int64(0), np.int64(0), np.int64(0)
    for s in range(m):
        first, length = bounds[s], bounds[s + 1] - bounds[s]
        k = wanted(length, level_of(levels, level, s))
        old = f32(place(fresh) if old_state == 0 else old_state + 4 * SEGMENT_FLOATS * s, SEGMENT_FLOATS)
        count, error = np.int64(0), np.nan
        if k > 0:
            where = element(x, first), element(r, first), element(kept, first)
            stages = max(1, min(CUTS + 1, np.int64(old[STAGES])))
            count, wrong, error = encode_segment(
                method, *where, length, k, first, scale, decay, stages, sent, sample, work
            )
            bad += wrong
        counts[s] = count
        sent += count
        if new_state != 0:
            new = f32(new_state + 4 * SEGMENT_FLOATS * s, SEGMENT_FLOATS)
            adapt(old, new, error, k / max(1, length), count / max(1, k))
    return finish(out, m, sent, form, ro, uo, work), bad


class _Sidco(Sparsifier):
    """About k elements and their indices: those above an estimated threshold, k^ within 0.9 k and 1.1 k."""

    params = (RATIO, *FORM)
    method: ClassVar[int]

    def state_floats(self, n: int, segments: int = 1) -> int:
        # Without a residual there is no state at all: every step is a first one.
        return super().state_floats(n, segments) + (SEGMENT_FLOATS * segments if self.error_feedback else 0)

    def most(self, n: int, segments: int, level: int) -> int:
        k = super().most(n, segments, level)
        return min(n, k + k // 10)

    def run(self, job: Job, seed: int) -> tuple[int, int]:
        behind = super().state_floats(job.n) if self.error_feedback else -1
        nbytes, bad = sidco_encode(*job, self.method, behind)
        return nbytes, bad


@register
class SidcoE(_Sidco):
    """SIDCo with exponential stages: one mean a stage."""

    id, name, method = 22, "sidco-e", E


@register
class SidcoGP(_Sidco):
    """SIDCo with a gamma stage, then Pareto ones: means, a mean logarithm, variances."""

    id, name, method = 23, "sidco-gp", GP


@register
class SidcoP(_Sidco):
    """SIDCo with Pareto stages: a mean and a variance a stage."""

    id, name, method = 24, "sidco-p", P
