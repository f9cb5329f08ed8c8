"""DistributedDataParallel through the daemon: a state made from the model, and a communication hook.

What may live here: what a bucket brings to a step, futures. What may not: where parameters live (`parameters.py`), any
other way of training.

DDP rebuilds its buckets after the first step, so nothing here depends on them: a bucket is a list of
parameters, each with an address. A block is pushed when the last of its bytes has come, with whichever bucket
brings them (the blocks of a group together); a bucket's future completes when all blocks its parameters touch are back.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gcclient import arguments, device
from gcclient.api import joined
from gcclient.arena import BlockPlace
from gcclient.audit import Audit
from gcclient.auditor import Auditor
from gcclient.device import Memory
from gcclient.domain import Domain
from gcclient.errors import GradcommError
from gcclient.gradients import Passes
from gcclient.grouping import Groups, plain_name
from gcclient.parameters import Parameter, Piece, declare, read_options
from gcclient.plain import Plain
from gcclient.plain_training import PlainState
from gcclient.scope import Scope
from gcclient.session import Session
from gcclient.timing import Timing


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What one bucket moves: pieces in bucket order, and the same by block."""

    pieces: tuple[Piece, ...]
    by_block: dict[BlockPlace, tuple[Piece, ...]]


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

    def back(self, place: BlockPlace) -> None:
        """Copy out this bucket's part of a block; with the last one, complete the future."""
        for piece in self.plan.by_block[place]:
            self.memory.store(piece.lo, piece.hi, piece.output)
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
        bucket.memory.settle()
        self.step.flush()

    def close(self) -> None:
        """The backward pass is over. Blocks some of whose parameters DDP never reduces go as they are."""
        for unit in self.units:
            if unit.filled < unit.nbytes:
                self.push(unit)
        self.step.close()
        self._closed_at = time.monotonic()
        self.timing.closed(self.step.number)
        self.session.watched[self.domain.id] = self
        self._let_go()

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
        for bucket in self.buckets.get(place, ()):
            try:
                bucket.back(place)
            except Exception as error:
                bucket.fail(error)
        if began:
            tracing.pulled(place, began)

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
        self.passes = Passes(passes)
        self.timing = Timing(domain.id, session.inform)
        self.timing.watch(p.tensor for p in parameters)
        self.parameters = {id(p.tensor): p for p in parameters}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._scope: Backward | None = None
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
        self._last_index = -1 if last else index
        buffer = bucket.buffer()
        if not self.passes.exchanges(last):
            # With this rank's gradients, those of earlier passes too.
            return device.unchanged(buffer)
        if buffer.layout is not torch.strided:
            future = self._sparse(buffer)
        else:
            work = Bucket(self, self._plan(bucket, buffer), buffer)
            self.session.pending.add(work)
            if self._scope is None:
                self._look_back()
                self._scope = Backward(self, float(self.scaler.get_scale()) if self.scaler is not None else 1.0)
            began = self.timing.clock()
            self._scope.add(work)
            self.timing.copied(buffer.nbytes, began)
            self.session.counters.bytes_pushed += buffer.nbytes
            future = work.future
            if not work.plan.by_block:
                work.complete()
            if self.session.failure is not None:
                work.fail(self.session.failure.again())
        if last and self._scope is not None:
            scope, self._scope = self._scope, None
            scope.close()
            self.session.counters.steps += 1
        return future

    def _look_back(self) -> None:
        if self.auditor is not None:
            began = time.perf_counter()
            self.auditor.look_back()
            self.timing.stood(began)

    def _broken(self) -> None:
        """A backward pass began although the one before did not reach its last bucket."""
        error = GradcommError(
            "the backward pass before this one ended before its last bucket (an exception in it, most likely)",
            job=self.session.label,
            domain=self.domain.id,
            step=self.domain.step,
            phase="push",
            advice="let the exception end the training process, and start again from the last checkpoint",
        )
        self.session.fail(error)
        raise error.again()

    def _plan(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> Plan:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(parameters, buffer)
        return plan

    def _make_plan(self, parameters: list[torch.Tensor], buffer: torch.Tensor) -> Plan:
        pieces: list[Piece] = []
        at = 0
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
            pieces.extend(piece.shifted(at) for piece in known.pieces)
            at += tensor.numel() * buffer.element_size()
        if at != buffer.nbytes:
            raise ValueError(f"a bucket of {buffer.nbytes} bytes holds parameters of {at} bytes")
        by_block: dict[BlockPlace, tuple[Piece, ...]] = {}
        for piece in pieces:
            by_block[piece.place] = (*by_block.get(piece.place, ()), piece)
        return Plan(tuple(pieces), by_block)

    def _sparse(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Sparse gradients go through torch's own reduction."""
        if not self._warned_sparse:
            self._warned_sparse = True
            warnings.warn("sparse gradients are averaged by torch's own all-reduce, uncompressed", stacklevel=2)
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None
        count = self.ranks
        return work.get_future().then(lambda f: f.value()[0] / count)


def ddp_hook(state: State | PlainState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket through the daemon: ``model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)``.

    Never raises: a failure comes out of ``backward()`` as a RuntimeError with the failure's text, and the next
    gcclient call raises the typed error.
    """
    try:
        future = state.on_bucket(bucket)
    except BaseException as error:
        future = torch.futures.Future()
        future.set_exception(error)  # type: ignore[arg-type]
    # Without this, DDP tries to cast the exception to a tensor.
    value: Callable[[torch.futures.Future[torch.Tensor]], torch.Tensor] = lambda f: f.value()  # noqa: E731
    return future.then(value)


# DDP compares these with the types themselves; deferred annotations are strings.
ddp_hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def state(
    model: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    compression: str | None = None,
    scaler: Any = None,
    whole: bool | None = None,
    groups: Groups = None,
    audit: Audit | None = None,
    *,
    backward_passes_per_step: int = 1,
    quality: str | None = None,
    exclude: Iterable[str] = (),
    warmup_steps: int = 0,
) -> State | PlainState:
    """Declare a model's gradients; returns the state for :func:`ddp_hook`. Call it on every rank of the group.

    ``group``: the process group the gradients are averaged over (default: the DDP model's own, else all ranks; all
    ranks too where torch.distributed spans less than the job, as with a torchrun for each node).
    ``compression``: a codec spec such as ``"topk(ratio=0.01)"`` (default: the daemon's ``codec.default``).
    ``scaler``: the GradScaler in use, if any: residuals are then kept unscaled while its scale changes.
    ``whole``: never cut a parameter's gradient, for codecs that take whole matrices (default: whether ``compression``
    is one of gradcomm's that does, or the job's plans are automatic and no parameter has more than 64 MiB).
    ``groups``: tensors to merge (MergeComp): "layer-wise", a number of groups of equally many tensors, or lists of
    parameter names in the order in which gradients become ready, each name once. No block crosses the end of a group,
    and all blocks of one go together; give torch the same buckets with :func:`gcclient.bucket_caps`. Default: no
    groups, each block goes as soon as its bytes have come.
    ``audit``: compare what steps deliver with the exact average now and then (default: as GC_AUDIT says, else never).
    ``backward_passes_per_step``: gradients of so many backward passes are added up before they are exchanged, in the
    last of them. ``quality``: what automatic plans for this model may lose, "safe", "balanced" or "fast" (default: what
    the job says; an operator's word comes first). ``exclude``: globs of names such as "*.bias" whose tensors travel
    uncompressed, whatever codec, plan or operator says. ``warmup_steps``: so many first exchanges are uncompressed.
    Raises TypeError for a ``compression`` that is no text, ``groups`` that are none, an ``audit`` that is no Audit or
    an ``exclude`` that is no list, ValueError for a model without gradients, with an unknown dtype, a name that no
    message can carry or one that two parameters have (without "module." and "_orig_mod." before it), for groups that
    leave out or repeat one, for numbers and words out of range, and for a GC_AUDIT that cannot be read,
    :class:`~gcclient.TensorMismatch` on every rank when models or any of these options but ``scaler`` and
    ``backward_passes_per_step`` differ,
    :class:`~gcclient.CodecError` for a codec that cannot be used.
    """
    session = joined()
    if group is None:
        group = getattr(model, "process_group", None)
    if group is not None and not (dist.is_available() and dist.is_initialized()):
        group = None
    named = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the model has no parameter that requires a gradient")
    passes = arguments.read_whole_within(backward_passes_per_step, "backward_passes_per_step", 1)
    options = read_options(compression, whole, groups, audit, quality, exclude, warmup_steps)
    if isinstance(session, Plain):
        return PlainState(session, group, passes)
    everyone = tuple(range(session.me.size))
    # Where torch's world is not the job's (a torchrun for each node), its groups say nothing of other nodes.
    local = group is None or dist.get_world_size() != session.me.size
    ranks = everyone if local else tuple(sorted(dist.get_process_group_ranks(group)))
    domain, parameters = declare(session, "ddp", named, ranks, options)
    auditor = None if options.audit is None else Auditor(session, domain, options.audit)
    return State(session, domain, parameters, group, scaler, len(ranks), auditor, passes)
