"""MergeComp by measured step times: which cut to measure next, told how long its steps took.

What may live here: the search as an object a daemon can drive over minutes, and what to measure for a fit. What may
not: measuring, costs, timelines.

For two groups the paper bisects on the sign of the slope (proof of Theorem 3: F falls with the first group's size until
its exchange no longer fits behind the computation of the second, then rises). Over real tensors F has stretches where
it hardly changes, and where encoding has cores of its own it may fall and rise twice, so the bisection here begins
between the best of some cuts spread over the model, compares cuts an eighth of the bracket apart, and ends by trying
the best cut's neighbours.
For more groups the paper tries every place of the first y - 2 cuts, O(N^(y - 2) log N) measured steps. Here each cut is
searched between its neighbours, in turn, from the cuts of y - 1 groups with one behind them and from equal parts:
O(y log N) steps, and up to 8 % from the best on the traces. Above two groups a fit and `mergecomp.merge` do better.

Of cuts that differ by less than a time's noise the one that was lucky would win. So where times are noisy what is left
of the budget goes to the cuts into two groups that may be best, and all their times together say which is
(`mergecomp_valley.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterable, Sequence
from itertools import accumulate
from typing import Final

from gcserver.planner.mergecomp import ALPHA, Merged, check_limits, check_sizes
from gcserver.planner.mergecomp_groups import Grouping, GroupingError, naive
from gcserver.planner.mergecomp_valley import best_cut, next_cut

#: What the paper's evaluation stayed under with Y = 2.
BUDGET: Final = 50
_SPREAD: Final = 8
_ROUNDS: Final = 2

_Cuts = tuple[int, ...]
_Measure = Generator[Grouping, float, float]


class _BudgetSpent(Exception):
    """No more may be asked for."""


class MeasuredSearch:
    """Algorithm 2 on measured step times.

        search = MeasuredSearch(elements)
        while (grouping := search.next()) is not None:
            search.tell(seconds of a step with that grouping, a mean or a median over some)
        search.best

    Deterministic: the same times give the same questions, so ``told`` (all times so far) is its whole state, and a
    search made with it goes on where the other was. Only one node searches; the others take what it asks for.
    ``elements`` are the tensors' in the order of back-propagation, ``most`` and ``alpha`` Algorithm 2's Y and alpha,
    ``budget`` the most questions, ``noise`` the relative standard deviation of a time that is told: above 0 cuts into
    two groups are asked for again, until none may be better than the best, as far as their times fall and then rise
    (encoding on the device that computes; ``mergecomp_valley``). Raises :class:`GroupingError` for values out of range.
    """

    def __init__(
        self,
        elements: Sequence[int],
        most: int = 2,
        alpha: float = ALPHA,
        budget: int = BUDGET,
        told: Iterable[float] = (),
        noise: float = 0.0,
    ) -> None:
        check_sizes(elements)
        check_limits(most, alpha)
        if budget < 1:
            raise GroupingError(f"a search asks for one grouping at least, got a budget of {budget}")
        if not 0.0 <= noise < 1.0:
            raise GroupingError(f"noise is relative, 0 or more and below 1, got {noise}")
        self._sums = [0, *accumulate(elements)]
        self._most = min(most, len(elements))
        self._alpha = alpha
        self._budget = budget
        self._noise = noise
        self._seconds: dict[_Cuts, list[float]] = {}
        self._told: list[float] = []
        self._reason = "measured"
        self._steps = self._search()
        self._asked: Grouping | None = next(self._steps)
        for seconds in told:
            self.tell(seconds)

    @property
    def told(self) -> tuple[float, ...]:
        return tuple(self._told)

    @property
    def best(self) -> Merged:
        """The best grouping measured so far, of noisy times by what they fit. Raises :class:`GroupingError` before the
        first time was told."""
        if not self._seconds:
            raise GroupingError("nothing was measured yet: measure next() and tell() its time")
        seconds = {cuts: sum(told) / len(told) for cuts, told in self._seconds.items()}
        if self._noise and (halves := self._halves()):
            cut, fitted = best_cut(halves, self._noise)
            seconds = {cuts: mean for cuts, mean in seconds.items() if len(cuts) != 1} | {(cut,): fitted}
        cuts = min(seconds, key=lambda c: (seconds[c], len(c)))
        return Merged(self._grouping(cuts), seconds[cuts], self._reason)

    def next(self) -> Grouping | None:
        """The grouping to measure; the same one until its time is told; None when the search is over."""
        return self._asked

    def tell(self, seconds: float) -> None:
        """A step with the grouping asked for took that long. Raises :class:`GroupingError` if none was asked for."""
        if self._asked is None:
            raise GroupingError("the search is over, it asked for nothing")
        if not 0.0 < seconds < float("inf"):
            raise GroupingError(f"a step takes a finite time greater than 0, got {seconds} s")
        self._told.append(seconds)
        self._seconds.setdefault(self._asked.ends[:-1], []).append(seconds)
        try:
            self._asked = self._steps.send(seconds)
        except StopIteration:
            self._asked = None
        except _BudgetSpent:
            self._asked, self._reason = None, f"the best when {self._budget} measurements were spent"

    def _grouping(self, cuts: _Cuts) -> Grouping:
        return Grouping((*cuts, len(self._sums) - 1))

    def _measure(self, cuts: _Cuts) -> _Measure:
        """The time with these cuts: known, or asked for. Raises :class:`_BudgetSpent`."""
        known = self._seconds.get(cuts)
        if known is not None:
            return known[0]
        if len(self._told) >= self._budget:
            raise _BudgetSpent
        return (yield self._grouping(cuts))

    def _halves(self) -> dict[int, list[float]]:
        """The times of cuts into two groups."""
        return {cuts[0]: told for cuts, told in self._seconds.items() if len(cuts) == 1}

    def _search(self) -> Generator[Grouping, float, None]:
        yield from self._count()
        if self._noise and self._halves():
            self._reason = "the best of times that are noisy"
            while len(self._told) < self._budget and (cut := next_cut(self._halves(), self._noise)) is not None:
                yield self._grouping((cut,))

    def _count(self) -> Generator[Grouping, float, None]:
        """One group more for as long as that is faster."""
        cuts: _Cuts = ()
        seconds = yield from self._measure(cuts)
        self._reason = "groups: 1; as many as were asked for"
        for y in range(2, self._most + 1):
            cuts, new = yield from self._next_count(cuts)
            gain = seconds - new
            if gain <= 0.0:
                self._reason = f"groups: {y - 1}; one more is no faster"
                return
            self._reason = f"groups: {y}; as many as were asked for"
            if gain < self._alpha * seconds:
                self._reason = f"groups: {y}; the last gained under {self._alpha:.2%}"
                return
            seconds = new

    def _next_count(self, old: _Cuts) -> Generator[Grouping, float, tuple[_Cuts, float]]:
        """The best cuts found with one more, and their time: from the old ones, and from parts of equal size."""
        n = len(self._sums) - 1
        free = max(set(range(1, n)) - set(old))
        cuts = tuple(sorted((*old, free)))
        best = yield from self._settle(cuts, cuts.index(free))
        if old:
            parts = len(old) + 2
            equal = {min(max(bisect_left(self._sums, self._sums[n] * i // parts), 1), n - 1) for i in range(1, parts)}
            if len(equal) == len(cuts):
                best = min(best, (yield from self._settle(tuple(sorted(equal)), 0)), key=lambda found: found[1])
        return best

    def _settle(self, cuts: _Cuts, at: int) -> Generator[Grouping, float, tuple[_Cuts, float]]:
        """Cut ``at`` placed anew, then the others in turn, until none moves or for some rounds."""
        seconds = float("inf")
        for _ in range(_ROUNDS if len(cuts) > 1 else 1):
            before = cuts
            for i in (at, *(i for i in range(len(cuts)) if i != at)):
                cuts, seconds = yield from self._place(cuts, i)
            if cuts == before:
                break
        return cuts, seconds

    def _place(self, cuts: _Cuts, i: int) -> Generator[Grouping, float, tuple[_Cuts, float]]:
        """Cut ``i`` searched anew between its neighbours; the best cuts, and their time."""
        n = len(self._sums) - 1
        lo, hi = (cuts[i - 1] if i else 0), (cuts[i + 1] if i + 1 < len(cuts) else n)
        times: dict[int, float] = {lo: float("inf"), hi: float("inf")}

        def time(cut: int) -> _Measure:
            if cut not in times:
                times[cut] = yield from self._measure((*cuts[:i], cut, *cuts[i + 1 :]))
            return times[cut]

        spread = self._spread(lo, hi)
        for cut in spread:
            yield from time(cut)
        best = min(spread, key=times.__getitem__)
        marks = [lo, *spread, hi]
        at = marks.index(best)
        left, right = marks[at - 1], marks[at + 1]
        while right - left > 2:
            step = max((right - left) // 8, 1)
            first = (left + right - step) // 2
            a = yield from time(first)
            b = yield from time(first + step)
            # at a tie towards the end of the bracket that is lower
            if a > b or (a == b and times[left] > times[right]):
                left = first
            else:
                right = first + step
        best = min(times, key=times.__getitem__)
        moved = True
        while moved:
            for cut in (best - 1, best + 1):
                if lo < cut < hi:
                    yield from time(cut)
            nearest = min(times, key=times.__getitem__)
            moved, best = nearest != best, nearest
        return (*cuts[:i], best, *cuts[i + 1 :]), times[best]

    def _spread(self, lo: int, hi: int) -> list[int]:
        """Cuts between ``lo`` and ``hi``, about equally far apart by elements, and as many by tensors."""
        cuts = set()
        for part in range(1, _SPREAD):
            size = self._sums[lo] + (self._sums[hi] - self._sums[lo]) * part // _SPREAD
            cuts.add(bisect_left(self._sums, size))
            cuts.add(lo + (hi - lo) * part // _SPREAD)
        return sorted(cut for cut in cuts if lo < cut < hi) or [lo + 1]


def probe_groupings(tensors: int, counts: Sequence[int] = (1, 2, 4, 8, 16, 32)) -> tuple[Grouping, ...]:
    """What to measure for a fit: groups of many sizes, in as few steps as there are ``counts``.

    Equal counts of tensors; every group of a step is one sample of encoding and one of exchanging. Counts above
    ``tensors`` are left out. Raises :class:`GroupingError` for a count below one.
    """
    return tuple(naive(tensors, count) for count in counts if count <= tensors)
