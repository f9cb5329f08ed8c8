"""When each gradient of a model is ready, how long a step takes, what copying costs: measured in a few steps.

What may live here: clocks around what `ddp.py`, `optimizer.py` and `exchange.py` do and the message they end in. What
may not: what is made of it (the daemon's profiler), pushing.

Every parameter gets one hook when it is declared. It runs right after the gradient was accumulated and before DDP sees
it; in a step that is not measured it is one attribute test. All times are the host's: on CUDA a gradient then counts as
ready when its kernels are queued, which waiting for a bucket's copy puts right once a bucket. Nobody waits for that in
steps that are not measured.

What computing takes is what it takes alone: time in which the thread of the backward pass was ready to run and had no
core, because daemons and others shared them, is no part of it. It is part of a whole step. The planner puts the two
beside each other (`gcserver.planner.auto_informed.interference`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median
from time import perf_counter
from typing import Final, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from gcclient import tolerance
from gcclient.corewait import CoreWait
from gcclient.device import Memory
from gcproto.timings import TensorTimes

#: The first steps compile, allocate and let DDP rebuild its buckets: measuring begins with this one,
FIRST: Final = 4
#: for so many steps,
FIRST_STEPS: Final = 9
#: and again every so many steps,
EVERY: Final = 500
#: for so many.
AGAIN_STEPS: Final = 3
#: the typical time between steps is the median of so many
WINDOW: Final = 32
#: Where it has become so much longer or shorter, as a share,
DEPARTED: Final = 0.15
#: in so many windows one after the other, it is measured; the next time in twice as many, since steps that go on
#: changing, as plans are tried or the training takes turns, are not to be measured all the time;
WINDOWS: Final = 2
#: for so many steps: the newest are to be the most of those that the daemon looks at. So is it for a daemon that was
#: started again, which may know of none.
DEPARTED_STEPS: Final = 8
#: The time and what was waited for are read together at most so often until they are of one moment.
READINGS: Final = 8


def measured(step: int) -> bool:
    """Whether ``step`` (from 1) is one of the few that are measured."""
    return FIRST <= step < FIRST + FIRST_STEPS or (step >= EVERY and step % EVERY < AGAIN_STEPS)


class Informed(Protocol):
    """The session, as it is needed here: it takes the message of a measured step."""

    #: grows with every daemon that was started in the place of the one before
    taken: int

    def inform(self, message: TensorTimes) -> None: ...


class Timing:
    """The clocks of one state.

    ``on`` while the step to come is measured. Keeps no tensor: parameters keep it, by their hooks.
    """

    def __init__(self, domain: int, session: Informed) -> None:
        tolerance.watch()
        self.on = False
        self._domain, self._session, self._taken = domain, session, session.taken
        self._cores = CoreWait()
        #: when each gradient was ready, by the order of declaration; 0: not in this step
        self._ready: list[float] = []
        self._copying = 0.0
        self._copied = 0
        #: bytes of the buckets that were brought
        self._buckets: list[int] = []
        #: all the time that is no part of any step
        self._stood = 0.0
        self._step = 0
        self._closed_at = 0.0
        #: the newest step whose results are all there, and since when
        self._back = (0, 0.0)
        self._between: deque[float] = deque(maxlen=WINDOW)
        #: what steps took about when they were measured last, 0: not known yet; windows since in which they took longer
        #: (below 0: less), how many there have to be, the step to look at next, and the last one of a series for it
        self._usual, self._departed, self._windows = 0.0, 0, WINDOWS
        self._look_at, self._until = FIRST + FIRST_STEPS + WINDOW, 0
        #: what was said last of the optimizers; None: nothing yet
        self._tolerant: bool | None = None

    def watch(self, tensors: Iterable[torch.Tensor]) -> list[RemovableHandle]:
        """These parameters are declared next, in this order. Returns the handles of their hooks."""
        handles = []
        for tensor in tensors:
            self._ready.append(0.0)
            handles.append(tensor.register_post_accumulate_grad_hook(self._hook(len(self._ready) - 1)))
        return handles

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda _: self.ready(index)

    def ready(self, index: int, aside: float = 0.0) -> None:
        """The gradient of the tensor that was declared as number ``index`` is there; ``aside``: so many seconds of the
        step were no computing."""
        self._ready += [0.0] * (index + 1 - len(self._ready))
        if self.on:
            self._cores.here()
            now = self.clock()
            if self._ready[index]:
                # Gradients accumulate over several passes; what counts is the one that is pushed.
                self._clear()
            self._ready[index] = now - self._copying - aside

    def _clear(self) -> None:
        self._ready = [0.0] * len(self._ready)
        self._copying, self._copied, self._buckets = 0.0, 0, []

    def copied(self, nbytes: int, began: float) -> None:
        """Since ``began`` (:meth:`clock`) the pass stood still while ``nbytes`` were copied and pushed."""
        if self.on:
            self._copying += self.clock() - began
            self._copied += nbytes

    def bucket(self, nbytes: int, began: float) -> None:
        """As :meth:`copied`, of what DDP brings as one bucket."""
        self.copied(nbytes, began)
        if self.on and nbytes:
            self._buckets.append(nbytes)

    def settle(self, memory: Memory) -> None:
        """In a measured step, wait until what was copied in is there: what was computed before that is there, too."""
        if self.on:
            memory.settle()

    def stood(self, began: float) -> None:
        """Since ``began`` (``perf_counter``) training stood still for what is no part of a step: an audit."""
        self._stood += perf_counter() - began

    def _now(self) -> float:
        """The time, on a clock that stood still whenever training did."""
        return perf_counter() - self._stood

    def clock(self) -> float:
        """The same, on one that stood still also while the thread of the backward pass waited for a core."""
        waited = self._cores.seconds()
        for _ in range(READINGS):
            now, before = self._now(), waited
            waited = self._cores.seconds()
            if waited == before:
                break
            # It lost its core between the two: the wait is in one and not in the other, and time would go backward.
        return now - waited

    def closed(self, step: int) -> None:
        """The backward pass of ``step`` is over and pushed."""
        self._cores.here()
        now = self._now()
        between = now - self._closed_at if self._step == step - 1 > 0 else -1.0
        self._step, self._closed_at = step, now
        if between >= 0:
            self._between.append(between)
        if self.on:
            self._session.inform(self._message(step, between))
        if step >= self._look_at:
            self._look(step)
        if self._taken != self._session.taken:
            self._taken, self._until = self._session.taken, max(self._until, step + DEPARTED_STEPS)
        changed = self._tolerant is not None and tolerance.tolerant() is not self._tolerant
        self.on = measured(step + 1) or step < self._until or changed
        if self.on:
            self._clear()

    def _look(self, step: int) -> None:
        """Whether steps take what they took; they are measured again where they do not."""
        missing = WINDOW - len(self._between)  # as after coming into a job that has made steps
        self._look_at = step + (missing or WINDOW)
        if missing:
            return
        now = median(self._between)
        if not self._usual or (step >= EVERY and step % EVERY < WINDOW):
            self._usual, self._departed = now, 0
        elif now > self._usual * (1 + DEPARTED):
            self._departed = max(self._departed, 0) + 1
        elif now < self._usual * (1 - DEPARTED):
            self._departed = min(self._departed, 0) - 1
        else:
            self._departed = 0
        if abs(self._departed) == self._windows:
            self._usual, self._departed, self._windows = now, 0, 2 * self._windows
            self._until = step + DEPARTED_STEPS

    def back(self, step: int) -> None:
        """All results of ``step`` are there; called by whichever thread finds out, twice at most."""
        if step > self._back[0]:
            self._back = (step, self.clock())

    def _message(self, step: int, between: float) -> TensorTimes:
        self._tolerant = tolerance.tolerant()
        first = min((t for t in self._ready if t), default=0.0)
        before, at = self._back
        # Another step's end says nothing; nor does one after the first gradient, of passes that overlap.
        forward = first - at if before == step - 1 and 0.0 < at <= first else -1.0
        return TensorTimes(
            self._domain,
            step,
            tuple(_micros(t - first) if t else -1 for t in self._ready),
            _micros(forward),
            _micros(between),
            _micros(median(self._between)) if self._between else -1,
            self._copied,
            _micros(self._copying),
            tuple(self._buckets),
            self._tolerant,
        )


def _micros(seconds: float) -> int:
    return round(seconds * 1e6) if seconds >= 0 else -1
