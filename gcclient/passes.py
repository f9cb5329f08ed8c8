"""The reductions of an attached module as steps of a domain: those of one backward pass are one step.

What may live here: when such a step begins and ends, what is timed of it. What may not: the reductions themselves
(`collectives.py`), which of a group's there are (`attaching.py`).

A model's step is what plans are made for and compared by, so with automatic plans a pass has to be one. Torch waits
for each reduction before the pass goes on, hence results must come while the step is open: only where a step's results
need not count together (``on_loss="fail"``).

Tensors are declared with their first reduction, and a section belongs to the steps after it was declared. So the first
pass has a step for each of its tensors. A tensor that is reduced twice in a pass begins another step too.
"""

from __future__ import annotations

import threading

import torch
from torch.autograd import Variable

from gcclient import device
from gcclient.bell import Wait
from gcclient.collectives import Collectives, Reduction
from gcclient.domain import Domain, Step
from gcclient.places import Tensor, UnderWay, fill
from gcclient.timing import Timing


class Passes:
    """The steps of one domain of attached modules. All of its ranks reduce the same tensors in the same order."""

    def __init__(self, collectives: Collectives, domain: Domain) -> None:
        self.domain = domain
        self.timing = Timing(domain.id, collectives.session)
        self._collectives = collectives
        self._counters = collectives.session.counters
        self._step: Step | None = None
        #: torch's number of the backward pass it belongs to; -1: of none
        self._pass = -1
        #: what it has brought, by name
        self._brought: dict[str, Reduction] = {}
        self._memory: device.Memory | None = None
        #: how much of the step was waiting for reductions, seconds; when its last push was over, by the timing's clock,
        #: and for how long anything had been waited for then
        self._stood = self._since = self._waited = 0.0
        self._lock = threading.RLock()

    def start(self, tensor: torch.Tensor, average: bool, name: str) -> Reduction:
        """Sum or average ``tensor`` over the group, in place, as the domain's tensor ``name``. See
        :meth:`Collectives.start`."""
        with self._lock:
            if name in self._brought or not self._collectives.knows(self.domain, name):
                self._close()
            op = self._collectives.start(tensor, average, self.domain, name, self._push)
            if self._step is not None:
                self._brought[name] = op
            return op

    def _push(self, domain: Domain, tensor: Tensor, op: UnderWay, memory: device.Memory, flags: int) -> int:
        """See :func:`gcclient.places.push`."""
        number, timing = torch._C._current_graph_task_id(), self.timing
        if self._step is not None and (number != self._pass or flags != self._step.flags):
            self._close()
        with domain.pushing:
            if self._step is None:
                self._step, self._pass = Step(domain, flags, 1.0, self._queued), number
                self._stood, self._since, self._waited = 0.0, timing.clock(), self._counters.wait_seconds
                if number >= 0:
                    # torch's own end of the pass, in which the outermost module is reduced, was queued before.
                    Variable._execution_engine.queue_callback(lambda: self._end(number))
            # Time in which the pass stood still for the reductions before this one is no part of computing it.
            self._stood += min(self._counters.wait_seconds - self._waited, timing.clock() - self._since)
            timing.ready(tensor.index, self._stood)
            step, self._memory, began = self._step, memory, timing.clock()
            fill(step, tensor, op, memory)
            timing.settle(memory)
            step.flush()
            timing.copied(sum(place.block.nbytes for place in tensor.places), began)
            self._since, self._waited = timing.clock(), self._counters.wait_seconds
            if number < 0:
                self._close()
        return step.number

    def _queued(self) -> Wait | None:
        return None if self._memory is None else self._memory.queued()

    def _end(self, number: int) -> None:
        """A backward pass is over."""
        with self._lock:
            if self._pass == number:
                self._close()

    def _close(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        brought, self._brought, self._memory, self._pass = self._brought, {}, None, -1
        with self.domain.pushing:
            step.close()
        self._counters.steps += 1
        self.timing.closed(step.number)
        if all(op.over for op in brought.values()):
            self.timing.back(step.number)
