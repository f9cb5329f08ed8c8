"""A DDP model's buckets on their way through the daemon: what each brings to a step, and the step they share.

What may live here: that, and futures. What may not: the hook and the options of a state (`ddp.py`), where parameters
live (`parameters.py`), what the workers of a node do with a bucket first (`sharded.py`).

DDP rebuilds its buckets after the first step, so nothing here depends on them: a bucket is a list of
parameters, each with an address. A block is pushed when the last of its bytes has come, with whichever bucket
brings them (the blocks of a group together); a bucket's future completes when all blocks its parameters touch are back.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gcclient import device
from gcclient.arena import BlockPlace
from gcclient.auditor import Auditor
from gcclient.device import Memory
from gcclient.domain import Domain
from gcclient.errors import GradcommError
from gcclient.gradients import Passes
from gcclient.parameters import Parameter, Piece
from gcclient.scope import Scope
from gcclient.session import Session
from gcclient.timing import Timing


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one bucket moves: pieces in bucket order, and the same by block."""

    pieces: tuple[Piece, ...]
    by_block: dict[BlockPlace, tuple[Piece, ...]]


def plan_of(parameters: Iterable[Parameter], starts: Iterable[int]) -> Plan:
    """The plan of a bucket whose parameters begin at these bytes of what is brought."""
    pieces = [piece.shifted(at) for known, at in zip(parameters, starts, strict=False) for piece in known.pieces]
    by_block: dict[BlockPlace, tuple[Piece, ...]] = {}
    for piece in pieces:
        by_block[piece.place] = (*by_block.get(piece.place, ()), piece)
    return Plan(tuple(pieces), by_block)


class Bucket:
    """A bucket under way. Its future completes when every block it touches is copied back."""

    def __init__(self, state: State, plan: Plan, buffer: torch.Tensor) -> None:
        self.state = state
        self.plan = plan
        self.buffer = buffer
        self.memory: Memory = device.memory_of(buffer)
        self.future = device.future_for(buffer)
        self._left = len(plan.by_block)
        self._lock = threading.Lock()
        self._over = False

    def store(self, place: BlockPlace) -> None:
        """Copy out this bucket's part of a block."""
        for piece in self.plan.by_block[place]:
            self.memory.store(piece.lo, piece.hi, piece.output)

    def back(self) -> None:
        """A block's part is copied out; with the last one, complete the future."""
        self._left -= 1
        if not self._left:
            self.complete()

    def complete(self) -> None:
        self.state.session.pending.discard(self)
        self.state.session.counters.bytes_pulled += self.buffer.nbytes
        if self._first():
            device.complete(self.future, self.buffer, self.memory)

    def fail(self, error: BaseException) -> None:
        if self._first():
            self.future.set_exception(error)  # type: ignore[arg-type]

    def _first(self) -> bool:
        with self._lock:
            first, self._over = not self._over, True
            return first


class Backward(Scope):
    """One backward pass: the open step and the buckets that wait for its blocks."""

    def __init__(self, state: State, scale: float) -> None:
        super().__init__(state.session, state.domain, scale)
        self.timing = state.timing
        self.state = state
        state.skipped = False
        self.buckets: dict[BlockPlace, list[Bucket]] = {}
        self._closed_at = 0.0

    def add(self, bucket: Bucket) -> None:
        """Copy in what a bucket brings and push the blocks that are complete with it."""
        for place in bucket.plan.by_block:
            self.buckets.setdefault(place, []).append(bucket)
        self.fill(bucket.plan.pieces, bucket.memory)
        self.timing.settle(bucket.memory)
        self.step.flush()

    def close(self) -> None:
        """The backward pass is over. Blocks some of whose parameters DDP never reduces go as they are."""
        for unit in self.units:
            if unit.filled < unit.nbytes:
                self.push(unit)
        self.step.close()
        self._closed_at = time.monotonic()
        self.said_closed()
        self.session.watched[self.domain.id] = self
        self._let_go()

    def said_closed(self) -> None:
        """The step was closed just now, by the thread of the backward pass."""
        self.timing.closed(self.step.number)

    def waiting(self) -> tuple[str, int, float] | None:
        """See :class:`gcclient.waiters.Watched`."""
        if self.back >= self.sent:
            return None
        return self.domain.declared.label, self.step.number, time.monotonic() - self._closed_at

    def deliver(self, places: list[BlockPlace]) -> None:
        if self._closed_at and self.back + len(places) >= self.sent:
            # Before the last future completes: after it the next step may begin in another thread.
            self.timing.back(self.step.number)
        self.state.skipped |= places[0].skipped
        super().deliver(places)
        self._let_go()

    def take(self, place: BlockPlace) -> None:
        tracing = self.session.tracing
        began = tracing.now() if tracing.on else 0.0
        stored = []
        for bucket in self.buckets.get(place, ()):
            try:
                bucket.store(place)
                stored.append(bucket)
            except Exception as error:
                bucket.fail(error)
        if began:
            # Before the last future completes: after it the place may be another step's.
            tracing.pulled(place, began)
        for bucket in stored:
            try:
                bucket.back()
            except Exception as error:
                bucket.fail(error)

    def _let_go(self) -> None:
        """Blocks remember their newest step until the next one: it must not keep the buckets' memory."""
        if self._closed_at and self.back >= self.sent:
            self.timing.back(self.step.number)
            self.buckets = {}


class State:
    """What :func:`ddp_hook` needs of a model. Made by :func:`state`; give it to ``register_comm_hook``.

    ``skipped``: the newest backward pass was given up with a lost node (``on_loss="skip"``), on all ranks that are
    left: its gradients are zeros, and ``optimizer.step()`` is best left out.
    """

    def __init__(
        self,
        session: Session,
        domain: Domain,
        parameters: list[Parameter],
        group: dist.ProcessGroup | None,
        scaler: Any,
        ranks: int,
        auditor: Auditor | None,
        passes: int,
    ) -> None:
        self.session = session
        self.domain = domain
        self.group = group
        self.scaler = scaler
        self.ranks = ranks
        self.auditor = auditor
        self.passes = Passes(passes, (p.tensor for p in parameters))
        self.timing = Timing(domain.id, session)
        self.timing.watch(p.tensor for p in parameters)
        self.parameters = {id(p.tensor): p for p in parameters}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._scope: Backward | None = None
        #: the step closed last
        self._newest: Backward | None = None
        self._last_index = -1
        self._warned_sparse = False
        self.skipped = False

    # ------------------------------------------------------------------------------------- backward
    def on_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What the hook does; may raise."""
        self.session.check()
        index, last = bucket.index(), bucket.is_last()
        if index <= self._last_index:
            self._broken()
        self._last_index = index
        buffer = bucket.buffer()
        if not self.passes.exchanges(last):
            self._last_index = -1 if last else index
            # With this rank's gradients, those of earlier passes too.
            return device.unchanged(buffer)
        try:
            sparse = buffer.layout is not torch.strided
            future = self.sparse(bucket, buffer) if sparse else self.exchange(bucket, buffer)
        except Exception as error:
            alone = last and not self.begun
            if not alone and self.session.failure is None:
                # Its step would go without it, and whoever waits for the other buckets is to hear why.
                self._unbrought(error)
            self._last_index = -1 if alone else index
            raise
        self._last_index = -1 if last else index
        if last:
            try:
                self.end()
            except Exception as error:
                if self.session.failure is None:
                    self._unbrought(error)
                raise
        return future

    def exchange(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Bring a bucket to the open step."""
        work = Bucket(self, self._plan(bucket, buffer), buffer)
        self.session.pending.add(work)
        if self._scope is None:
            self._look_back()
            self._let_end()
            self._scope = Backward(self, self.scale())
        began = self.timing.clock()
        self._scope.add(work)
        self.timing.bucket(buffer.nbytes, began)
        self.session.counters.bytes_pushed += buffer.nbytes
        if not work.plan.by_block:
            work.complete()
        if self.session.failure is not None:
            work.fail(self.session.failure.again())
        return work.future

    @property
    def begun(self) -> bool:
        """Whether a bucket of the step that is open was brought."""
        return self._scope is not None

    def _let_end(self) -> None:
        """Wait until all results of the last step are there. No bucket waits for those of blocks that hold nothing but
        what DDP does not reduce, and the next step's would be written over what a daemon that restarts asks for."""
        if (last := self._newest) is not None and (waits := last.waiting()) is not None:
            what, step, _ = waits
            self.session.wait_result(lambda: last.waiting() is None, what, step, time.monotonic())

    def end(self) -> None:
        """The backward pass has brought its last bucket."""
        if self._scope is not None:
            scope, self._scope = self._scope, None
            self._newest = scope
            scope.close()
            self.session.counters.steps += 1

    def scale(self) -> float:
        """The loss scale of this step's gradients."""
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    def _look_back(self) -> None:
        if self.auditor is not None:
            began = time.perf_counter()
            self.auditor.look_back()
            self.timing.stood(began)

    def _broken(self) -> None:
        """A backward pass began although the one before did not reach its last bucket."""
        self._end_job(
            "the backward pass before this one ended before its last bucket (an exception in it, most likely)",
            "let the exception end the training process, and start again from the last checkpoint",
            step=self.domain.step,
        )

    def _unbrought(self, error: Exception) -> NoReturn:
        """A bucket of the step under way cannot be brought."""
        self._end_job(
            f"a bucket of the backward pass could not be brought to its step: {error}",
            "correct that, and start again from the last checkpoint",
            step=self.domain.step,
        )

    def _end_job(self, why: str, advice: str, step: int = 0) -> NoReturn:
        error = GradcommError(
            why, job=self.session.label, domain=self.domain.id, step=step, phase="push", advice=advice
        )  # fmt: skip
        self.session.fail(error)
        raise error.again()

    def _beyond_torch(self) -> str:
        """How far torch's collectives reach where that is not all ranks that are averaged over; empty where it is."""
        spanned = dist.get_world_size(self.group)
        return "" if spanned >= self.ranks else f"torch.distributed spans {spanned} of {self.ranks} ranks"

    def _plan(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> Plan:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        plan = self._plans.get(key)
        if plan is None:
            self._check_used(parameters)
            plan = self._plans[key] = self._make_plan(parameters, buffer)
        return plan

    def _check_used(self, parameters: list[torch.Tensor]) -> None:
        """Ends the job where a static graph lacks a parameter here that ranks beyond torch's may use."""
        unused = [self.parameters[id(t)].name for t in parameters if t.grad is None and id(t) in self.parameters]
        if not unused or not (reach := self._beyond_torch()):
            return
        # Torch asks the ranks it knows who used a parameter, and takes no average of what none of them did.
        self._end_job(
            f"parameter {unused[0]!r} has no gradient here, and {reach}: its average would not be taken",
            "let every rank use every parameter, freeze what none uses (requires_grad_(False)), or train with "
            "gcclient.DistributedOptimizer",
        )

    def _make_plan(self, parameters: list[torch.Tensor], buffer: torch.Tensor) -> Plan:
        known = self.known(parameters, buffer)
        return plan_of(known, [0, *accumulate(p.tensor.numel() * buffer.element_size() for p in known)])

    def known(self, parameters: list[torch.Tensor], buffer: torch.Tensor) -> list[Parameter]:
        """What was declared of a bucket's parameters. Raises ValueError for what was not, or otherwise."""
        found = []
        for tensor in parameters:
            known = self.parameters.get(id(tensor))
            if known is None:
                raise ValueError(
                    f"a parameter of shape {list(tensor.shape)} is not among those given to gcclient.state(): make the "
                    "state from the same model, after requires_grad was set"
                )
            if device.DTYPES.get(buffer.dtype) is not known.dtype:
                raise ValueError(
                    f"the gradient of {known.name!r} is {buffer.dtype}, the parameter {known.dtype.label}: "
                    "gradients are exchanged in their parameter's dtype"
                )
            found.append(known)
        held = sum(tensor.numel() for tensor in parameters)
        if held != buffer.numel():
            raise ValueError(f"a bucket of {buffer.numel()} elements holds parameters of {held} elements")
        return found

    def sparse(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Sparse gradients go through torch's own reduction. Ends the job where that does not reach all ranks."""
        if reach := self._beyond_torch():
            self._end_job(
                f"sparse gradients are averaged by torch's own all-reduce, and {reach}",
                "make the layer's gradients dense (sparse=False), or train with gcclient.DistributedOptimizer, which "
                "does that",
            )
        if not self._warned_sparse:
            self._warned_sparse = True
            warnings.warn("sparse gradients are averaged by torch's own all-reduce, uncompressed", stacklevel=2)
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None
        count = self.ranks
        return work.get_future().then(lambda f: f.value()[0] / count)
