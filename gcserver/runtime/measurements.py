"""What was measured of one domain of a job, and what the newest samples come to.

What may live here: keeping samples and reducing them. What may not: where they come from and whose they are
(`profiler.py`), what a profile looks like (`gcserver.planner.profile`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Final

from gcproto.timings import TensorTimes
from gcserver.planner.families import parse
from gcserver.planner.profile import CodecCost, StepTime
from gcserver.runtime.lanelink import KernelTime

#: Newest measured steps of each rank that count.
STEPS: Final = 9
#: A step so many times as long as is typical was disturbed, and says nothing about the others.
DISTURBED: Final = 2.0
#: Newest intervals between steps of each plan that count, and plans that are remembered.
INTERVALS: Final = 200
PLANS: Final = 8
#: The newest steps that are compared with all of them to see whether steps have become longer or shorter.
RECENT: Final = 8
#: Steps under a plan before its intervals count: the first ones compile and touch new memory.
SETTLING: Final = 2
#: After so many calls of one kind the old ones count half.
CALLS: Final = 1024
#: Kinds of calls that are remembered: under a controller nearly every step has levels of its own.
KINDS: Final = 512
#: standard deviations of normal noise in one median absolute deviation
ROBUST: Final = 1.4826


class Readiness:
    """Ready times of ``tensors`` gradients and what surrounds them, by rank."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors
        self._samples: dict[int, deque[TensorTimes]] = {}
        #: measured steps so far, the most of any rank
        self.count = 0
        self._counts: dict[int, int] = {}
        self._tolerant: dict[int, bool] = {}
        self._ready: list[float] | None = None

    def add(self, rank: int, sample: TensorTimes) -> bool:
        """Whether the sample counts. Raises ValueError for one of another number of tensors."""
        if len(sample.ready) != self._tensors:
            raise ValueError(f"expected the times of {self._tensors} tensors, got {len(sample.ready)}")
        self._tolerant[rank] = sample.tolerant
        if sample.between > DISTURBED * sample.typical > 0 or not any(t >= 0 for t in sample.ready):
            return False
        self._samples.setdefault(rank, deque(maxlen=STEPS)).append(sample)
        self._counts[rank] = self._counts.get(rank, 0) + 1
        self.count = max(self._counts.values())
        self._ready = None
        return True

    def ready(self) -> list[float]:
        """Seconds from a step's first gradient to each tensor's, tensors as declared: where ranks differ, the last.

        Of steps the lower quartile (`_undisturbed`). A tensor that never had a gradient is ready when the pass is over.
        Call it once something was added.
        """
        if self._ready is None:
            by_tensor = (zip(*(s.ready for s in found), strict=True) for found in self._all())
            ranks = [[_undisturbed(times) for times in tensors] for tensors in by_tensor]
            known = [max((t for t in times if t is not None), default=None) for times in zip(*ranks, strict=True)]
            last = max(t for t in known if t is not None)
            self._ready = [(last if t is None else t) / 1e6 for t in known]
        return self._ready

    def forward(self) -> float:
        """Seconds from a step's results to the next first gradient, of the slowest rank, of its steps the lower
        quartile; 0 if nobody knows."""
        ranks = (_undisturbed(s.forward for s in found) for found in self._all())
        return max((micros for micros in ranks if micros is not None), default=0) / 1e6

    def copy(self) -> float | None:
        """Bytes a second between worker and arena; None if nothing was copied."""
        samples = [s for found in self._all() for s in found if s.copying > 0 and s.copied > 0]
        return median(1e6 * s.copied / s.copying for s in samples) if samples else None

    def buckets(self) -> tuple[int, ...]:
        """Bytes of the buckets in which gradients were brought last; empty where they come as they get ready."""
        return max((found[-1] for found in self._all()), key=lambda sample: sample.step).buckets if self.count else ()

    def tolerant(self) -> bool:
        """Whether the optimizers of all ranks of this node that measured a step stand late gradients, as they said
        last."""
        return bool(self._tolerant) and all(self._tolerant.values())

    def _all(self) -> Iterable[deque[TensorTimes]]:
        return self._samples.values()


def _undisturbed(micros: Iterable[int]) -> int | None:
    """The lower quartile, of two neighbours the lower: what computing takes on cores that do not come out of a wait.

    The first steps of a job are dense, and where each waits for the link for long, computing takes up to twice as long
    in half of them (cores that went idle; whatever prepares the first plan), by CPU time as well. Under a plan whose
    exchanges are short it does not, and that is the step which the profile is to tell. Nothing makes it shorter.
    """
    known = sorted(t for t in micros if t >= 0)
    return known[(len(known) - 1) // 4] if known else None


class Paces:
    """Seconds from step to step, by plan."""

    def __init__(self) -> None:
        self._intervals: dict[int, deque[float]] = {}
        #: the newest step, when it settled, its plan, steps before it under that plan
        self._last = (0, 0.0, -1, 0)

    def settled(self, step: int, plan: int, now: float, void: bool = False) -> None:
        """``step``, which ran under ``plan``, settled at ``now``; a ``void`` one says nothing of the plan: its
        gradients were not finite, and hardly anything was sent."""
        before, at, under, run = self._last
        run = run + 1 if (step, plan) == (before + 1, under) else 0
        self._last = (step, now, plan, run)
        if run > SETTLING and not void:
            if plan not in self._intervals:
                while len(self._intervals) >= PLANS:
                    del self._intervals[next(iter(self._intervals))]
                self._intervals[plan] = deque(maxlen=INTERVALS)
            self._intervals[plan].append(now - at)

    def departed(self) -> float:
        """By which share the newest steps are longer or shorter than all under the same plan; 0 while it has few."""
        seconds = list(self._intervals.get(self._last[2], ()))
        typical = median(seconds) if len(seconds) >= 2 * RECENT else 0.0
        return abs(median(seconds[-RECENT:]) / typical - 1.0) if typical > 0 else 0.0

    def forget(self) -> None:
        """Steps take another time from now on: what was measured is over."""
        self._intervals.clear()

    def steps(self) -> tuple[StepTime, ...]:
        """One entry a plan, in the order in which they were first seen."""
        return tuple(_pace(plan, list(seconds)) for plan, seconds in self._intervals.items())


def _pace(plan: int, seconds: list[float]) -> StepTime:
    middle = median(seconds)
    spread = median(abs(s - middle) for s in seconds)
    return StepTime(plan, middle, ROBUST * spread / middle if middle > 0 else 0.0, len(seconds))


class Kernels:
    """What codecs' calls took in the job."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, int], tuple[float, float]] = {}

    def add(self, times: Iterable[KernelTime]) -> None:
        for t in times:
            # The newest last: of too many the one goes that was not called for longest.
            calls, seconds = self._sums.pop((t.spec, t.what, t.elements), (0.0, 0.0))
            if calls > CALLS:
                calls, seconds = calls / 2, seconds / 2
            self._sums[t.spec, t.what, t.elements] = (calls + t.calls, seconds + t.seconds)
            if len(self._sums) > KINDS:
                del self._sums[next(iter(self._sums))]

    def busy(self, codecs: Mapping[str, CodecCost]) -> float | None:
        """Seconds taken over seconds that ``codecs`` says they take alone; None where none of them was used.

        Lanes spell out what a spec leaves to defaults, so that specs are compared by what they mean.
        """
        known = {parse(text).key: cost for text, cost in codecs.items()}
        live = alone = 0.0
        for (spec, what, elements), (calls, seconds) in self._sums.items():
            cost = known.get(parse(spec).key)
            if cost is not None:
                live += seconds
                alone += calls * _alone(cost, what, elements)
        return live / alone if alone > 0 else None


def _alone(cost: CodecCost, what: str, elements: int) -> float:
    if what == "encode":
        return cost.encode(elements)
    if what == "decode_add":
        return cost.decode_add(elements)
    # At the owner: the aggregate is encoded, and what the payload decodes to is used.
    return cost.decode(elements) + (cost.encode(elements) if what == "finalise" else 0.0)
