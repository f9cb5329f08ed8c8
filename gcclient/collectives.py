"""All-reduces of a process group through the daemon, each a step of its own; what the backend `gc` carries.

What may live here: pushing them, futures of their results, the domains they are in. What may not: torch's process
groups (`backend.py`), which tensors are compressed (`attaching.py`).

Results are copied out by whoever reads them, unlike those of `calls.py`: who waits may be inside torch.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from gcclient import device
from gcclient.arena import BlockPlace
from gcclient.domain import Domain
from gcclient.errors import GradcommError, StepSkipped
from gcclient.parameters import number
from gcclient.places import Places, Tensor, declare, push
from gcclient.session import Session
from gcproto.manifest import TensorSpec
from gcproto.messages import DeclareDomain
from gcproto.wire import Flag

PREFIX = "all_reduce.noname."


class Reduction:
    """One all-reduce under way, into the tensor that was given. ``future``: of a list of that tensor, or an exception
    as torch can carry it."""

    def __init__(self, session: Session, tensor: Tensor, target: torch.Tensor) -> None:
        self.session = session
        self.tensor = tensor
        self.step = 0
        self.over = False
        self.error: BaseException | None = None
        self._target = target.detach()
        self._flat = device.flattened(target)
        self.memory = device.memory_of(self._flat)
        self._future: Any = device.future_for(target)
        value = lambda f: f.value()  # noqa: E731  # an exception set by itself would be cast to a tensor
        self.future = self._future.then(value)
        self._left = len(tensor.places)
        self._lock = threading.Lock()
        session.pending.add(self)
        if not self._left:
            self._complete()

    def deliver(self, places: list[BlockPlace]) -> None:
        """Results arrived; called by whoever reads."""
        tracing = self.session.tracing
        try:
            for place in places:
                if place.skipped:
                    raise self._given_up()
                began = tracing.now() if tracing.on else 0.0
                at = place.block.start * place.block.dtype.itemsize
                self.memory.store(at, at + place.block.nbytes, place.output)
                if began:
                    tracing.pulled(place, began)
                place.op = None
            self._left -= len(places)
            if not self._left:
                self._complete()
        except Exception as error:
            self.fail(error)

    def _complete(self) -> None:
        if self._flat.data_ptr() != self._target.data_ptr():
            self.memory.settle()
            self._target.copy_(self._flat.view(self._target.shape))
        self.session.counters.bytes_pulled += self._flat.nbytes
        if self._first():
            device.complete(self._future, [self._target], self.memory)  # type: ignore[arg-type]

    def fail(self, error: BaseException) -> None:
        """It has no result; see :class:`gcclient.waiters.Pending`."""
        self.error = self.error or error
        if self._first():
            self._future.set_exception(error)

    def _first(self) -> bool:
        with self._lock:
            first, self.over = not self.over, True
        self.session.pending.discard(self)
        return first

    def finish(self) -> None:
        """Wait for the result. Raises :class:`StepSkipped` and the job's failure."""
        if not self.over:
            began = time.monotonic()
            what = f"all_reduce of {self.tensor.spec.describe()}"
            self.session.wait_result(lambda: self.over, what, self.step, began)
            self.session.counters.wait_seconds += time.monotonic() - began
        if self.error is not None:
            raise self.error.again() if isinstance(self.error, GradcommError) else self.error
        self.memory.settle()

    def _given_up(self) -> StepSkipped:
        return StepSkipped(
            f"all_reduce of {self.tensor.spec.describe()} was given up with a lost node",
            job=self.session.label,
            step=self.step,
            phase="exchange",
            advice="reduce again if it is still wanted: all ranks that are left get this",
        )


class Collectives:
    """The all-reduces of one process group in one session: the lossless ones in a domain of their own, declared with
    the first of them.

    ``ranks``: the group's, by their numbers in the job, ascending.
    """

    def __init__(self, session: Session, ranks: tuple[int, ...]) -> None:
        self.session = session
        self.ranks = ranks
        self._domain: Domain | None = None
        self._places = Places(session, self._lossless, PREFIX)
        self._named: dict[tuple[Domain, str], Tensor] = {}
        self._lock = threading.RLock()

    def _lossless(self) -> Domain:
        if self._domain is None:
            self._domain = self.domain("group", "none")
        return self._domain

    def domain(self, kind: str, codec: str) -> Domain:
        """A new domain of this group in which every call is a step. All of its ranks together."""
        which, label = number(self.session, kind, self.ranks)
        return self.session.domain(DeclareDomain(label, which, self.ranks, codec=codec))

    def start(self, tensor: torch.Tensor, average: bool, domain: Domain | None = None, name: str = "") -> Reduction:
        """Sum or average ``tensor`` over the group, in place: losslessly, or in ``domain`` as its tensor ``name``.

        Raises ValueError for a dtype that cannot be exchanged, and the job's failure.
        """
        session = self.session
        session.check()
        dtype = device.dtype_of(tensor, name or "(unnamed)")
        with self._lock:
            if domain is None:
                domain, known = self._lossless(), self._places.find(tuple(tensor.shape), dtype)
            else:
                known = self._find(domain, TensorSpec(name, tuple(tensor.shape), int(dtype)))
            if known.call is not None:
                # Its output slot is about to be used again.
                known.call.finish()
            known.call = op = Reduction(session, known, tensor)
            session.counters.calls += 1
            session.counters.bytes_pushed += tensor.nbytes
            op.step = push(domain, known, op, op.memory, int(Flag.AVERAGE) if average else 0)
        if session.failure is not None:
            op.fail(session.failure.again())
        return op

    def _find(self, domain: Domain, spec: TensorSpec) -> Tensor:
        known = self._named.get((domain, spec.name))
        if known is None:
            known = self._named[domain, spec.name] = declare(self.session, domain, spec)
        elif known.spec != spec:
            raise ValueError(f"{spec.describe()} was {known.spec.describe()} before")
        return known
