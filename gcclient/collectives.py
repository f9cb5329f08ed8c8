"""All-reduces of a process group through the daemon, each a step of its own; what the backend `gc` carries.

What may live here: pushing them, futures of their results, the domains they are in. What may not: torch's process
groups (`backend.py`), which tensors are compressed (`attaching.py`).

Results are copied out by whoever reads them, unlike those of `calls.py`: who waits may be inside torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gcclient import device
from gcclient.arena import BlockPlace
from gcclient.domain import Domain
from gcclient.errors import GradcommError
from gcclient.parameters import number, numbering
from gcclient.places import Places, Tensor, UnderWay, declare, push
from gcclient.session import Session
from gcclient.size_classes import ShapesDiffer, contradict
from gcproto.manifest import TensorSpec
from gcproto.messages import DeclareDomain
from gcproto.wire import Flag

PREFIX = "all_reduce.noname."
#: brings a tensor to a step of a domain, and returns that step's number
Push = Callable[[Domain, Tensor, UnderWay, device.Memory, int], int]


class Reduction(UnderWay):
    """One all-reduce under way, into the tensor that was given. ``future``: of a list of that tensor, or an exception
    as torch can carry it."""

    kind = "all_reduce"
    again = "reduce again"

    def __init__(self, session: Session, tensor: Tensor, target: torch.Tensor) -> None:
        super().__init__(session, tensor, tuple(target.shape))
        self.error: BaseException | None = None
        self._target = target.detach()
        self._flat = device.flattened(target)
        self.memory = device.memory_of(self._flat)
        self.fitted = tensor.memory(self.spec, self.memory)
        self._future: Any = device.future_for(target)
        value = lambda f: f.value()  # noqa: E731  # an exception set by itself would be cast to a tensor
        self.future = self._future.then(value)
        self._left = len(tensor.places)
        self._skipped = False
        self._lock = threading.Lock()
        session.pending.add(self)

    def deliver(self, places: list[BlockPlace]) -> None:
        """Results arrived; called by whoever reads."""
        tracing = self.session.tracing
        try:
            for place in places:
                place.op = None
                if place.skipped:
                    self._skipped = True
                else:
                    began = tracing.now() if tracing.on else 0.0
                    at = place.block.start * place.block.dtype.itemsize
                    self.fitted.store(at, at + place.block.nbytes, place.output)
                    if began:
                        tracing.pulled(place, began)
        except ShapesDiffer:
            # It stays under way until the daemons, whom who reads cannot wait for, have ended the job.
            assert self.tensor.shared is not None
            contradict(self.session, self.tensor.shared, self.spec)
            return
        except Exception as error:
            self.error = self.error or error
        self._left -= len(places)
        if not self._left:
            # Not before: until all are back lanes use its places.
            self.complete()

    def complete(self) -> None:
        """All that there will be of the result is there."""
        try:
            if self._skipped:
                self.session.counters.skipped_steps += 1
                raise self._given_up()
            if self.error is not None:
                raise self.error
            if self._flat.data_ptr() != self._target.data_ptr():
                self.memory.settle()
            device.put_back(self._flat, self._target)
        except BaseException as error:
            self.fail(error)
            return
        self.session.counters.bytes_pulled += self._flat.nbytes
        if self._first():
            device.complete(self._future, [self._target], self.memory)  # type: ignore[arg-type]

    def fail(self, error: BaseException) -> None:
        """It has no result."""
        self.error = self.error or error
        if self._first():
            self._future.set_exception(error)

    def _first(self) -> bool:
        with self._lock:
            first = not self.over
            self._end(copied=isinstance(self.memory, device.HostMemory))
        return first

    def finish(self) -> None:
        """Wait for the result. Raises :class:`StepSkipped` and the job's failure."""
        if not self.over:
            began = time.monotonic()
            self._wait(lambda: self.over, began)
            self.session.counters.wait_seconds += time.monotonic() - began
        if self.error is not None:
            raise self.error.again() if isinstance(self.error, GradcommError) else self.error
        self.memory.settle()


class Collectives:
    """The all-reduces of one process group in one session: the lossless ones in a domain of their own, declared with
    the first of them.

    ``ranks``: the group's, by their numbers in the job, ascending. ``name``: what all of its ranks know it by. Several
    groups may have the same ranks, which need not use them in the same order first.
    """

    def __init__(self, session: Session, ranks: tuple[int, ...], name: str = "") -> None:
        self.session = session
        self.ranks = ranks
        self._kind = f"group.{name}" if name else "group"
        self._domain: Domain | None = None
        self._places = Places(session, self._lossless, PREFIX)
        self._named: dict[tuple[Domain, str], Tensor] = {}
        self._lock = threading.RLock()

    def _lossless(self) -> Domain:
        if self._domain is None:
            self._domain = self.domain(self._kind, "none")
        return self._domain

    def domain(self, kind: str, codec: str, **more: Any) -> Domain:
        """A new domain of this group, in which every call is a step unless it is declared otherwise. All of its ranks
        together. ``more``: of :class:`DeclareDomain`."""
        with numbering(self.session):
            declared = self.prepare(kind, codec, **more)
        return self.session.domain(declared)

    def prepare(self, kind: str, codec: str, **more: Any) -> DeclareDomain:
        """What :meth:`domain` would declare. Raises :class:`~gcclient.StateMismatch`."""
        which, label = number(self.session, kind, self.ranks)
        declared = DeclareDomain(label, which, self.ranks, codec=codec, **more)
        self.session.checkpoints.check(declared)
        return declared

    def knows(self, domain: Domain, name: str) -> bool:
        """Whether there was a reduction of that name in ``domain``."""
        return (domain, name) in self._named

    def start(
        self,
        tensor: torch.Tensor,
        average: bool,
        domain: Domain | None = None,
        name: str = "",
        push: Push = push,
    ) -> Reduction:
        """Sum or average ``tensor`` over the group, in place: losslessly, or in ``domain`` as its tensor ``name``.

        ``push``: what takes the place of :func:`gcclient.places.push`. Raises TypeError and ValueError for what cannot
        be exchanged, and the job's failure.
        """
        session = self.session
        session.check()
        dtype = device.dtype_of(tensor, name or "(unnamed)")
        with self._lock:
            if domain is None:
                domain, known = self._lossless(), self._places.find(tuple(tensor.shape), dtype)
            else:
                known = self._find(domain, TensorSpec(name, tuple(tensor.shape), int(dtype)))
            known.vacate()
            session.check()
            known.call = op = Reduction(session, known, tensor)
            if not known.places:
                op.complete()
            session.counters.calls += 1
            session.counters.bytes_pushed += tensor.nbytes
            op.step = push(domain, known, op, op.fitted, int(Flag.AVERAGE) if average else 0)
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
