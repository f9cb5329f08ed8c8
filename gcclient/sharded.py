"""A DDP model exchanged in shards: within the node first, then each rank's part through the daemon.

What may live here: a bucket's way through both, in which thread and order. What may not: the node's collectives
(`node_group.py`), who has which shard (`hierarchy.py`), what a bucket brings to a step (`buckets.py`).

The thread of the backward pass only lays a bucket out by shard. Two others see to the rest, in the order of the
buckets, which is the same on all ranks: one has the node's ranks sum it and pushes this rank's shard of the sum, the
other waits for the shard's average and has the node's ranks exchange those. With NCCL one thread does both, all sums of
a step before the first average.

A void step (a non-finite gradient) must be void for all shards, or some would deliver what no optimizer takes. So the
ranks of a node tell each other before they close a step, and each brings that to its own shard's step: NaN, in the
note, if a sum of any of them was not finite.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from gcclient import device
from gcclient.buckets import Backward, Bucket, Plan, State, plan_of
from gcclient.errors import GradcommError
from gcclient.hierarchy import Nodes, Shards
from gcclient.inorder import InOrder
from gcclient.node_codec import Layout, Message, NodeCodec
from gcclient.node_group import Cut, NodeGroup
from gcclient.rendezvous import find_store
from gcclient.session import Session

#: A rank that is gone breaks the node's group; its daemon says who, and within this time, seconds.
TOLD_WITHIN: Final = 5.0


class ShardBucket(Bucket):
    """A bucket under way. ``future`` completes when all averages of it, of all shards, are in ``whole``."""

    #: how it goes between the workers of the node, where that is encoded
    message: Message | None = None

    def __init__(self, state: State, plan: Plan, cut: Cut, whole: torch.Tensor, ended: threading.Event | None) -> None:
        """``ended``: what is to be waited for besides."""
        super().__init__(state, plan, cut.shard[: cut.starts[-1] if cut.starts else 0])
        self.future = device.future_for(whole)
        self.cut, self.whole = cut, whole
        self._ended = ended
        self._arrived = threading.Event()

    def complete(self) -> None:
        """This rank's shard is averaged."""
        self.state.session.counters.bytes_pulled += self.buffer.nbytes
        self._arrived.set()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._arrived.set()

    def wait(self) -> bool:
        """Until it is; False if it failed."""
        self._arrived.wait()
        if self._ended is not None:
            self._ended.wait()
        return not self._over

    def over(self, group: NodeGroup) -> None:
        """All are."""
        self.state.session.pending.discard(self)
        if self._first():
            group.complete(self.future, self.whole)


class ShardBackward(Backward):
    """One backward pass as far as this rank's shard goes."""

    def __init__(self, state: State, scale: float, ended: threading.Event) -> None:
        """``ended`` is set once the step is closed and all its results are there, or the job is over."""
        super().__init__(state, scale)
        self._ended = ended
        self._failed = False
        self.session.pending.add(self)
        if self.session.failure is not None:
            self.fail(self.session.failure)

    def fail(self, error: BaseException) -> None:
        self._failed = True
        self._ended.set()

    def counts(self) -> bool:
        """Once all results are there: whether the step was not void, on whichever node. False if the job is over."""
        self._ended.wait()
        return not (self.nonfinite or self._failed)

    def _let_go(self) -> None:
        super()._let_go()
        if self._closed_at and self.back >= self.sent:
            self.session.pending.discard(self)
            self._ended.set()

    def said_closed(self) -> None:
        """The thread of the backward pass had its end before."""


class ShardState(State):
    """What `buckets.State` is elsewhere, of a model that was declared in shards. ``skipped``: never."""

    def __init__(
        self,
        session: Session,
        shards: Shards,
        nodes: Nodes,
        group: dist.ProcessGroup | None,
        scaler: Any,
        ranks: int,
        passes: int,
        codec: NodeCodec | None = None,
    ) -> None:
        """``codec``: of what the node's ranks send each other."""
        super().__init__(session, shards.domain, shards.parameters, group, scaler, ranks, None, passes)
        self.nodes = nodes
        self._codec = codec
        self._note = shards.note
        self._node = node_group(session, shards, nodes)
        session.checkpoints.within.declare(shards.label, codec, shards.agreed, shards.parameters[0].tensor.device)
        if codec is not None:
            # Where a rank found nothing of a checkpoint the others must not take its warm-up for over.
            codec.steps = int(self._node.greatest([codec.steps])[0])
        self._summing = InOrder("gcclient-sums", failing(session))
        self._giving = InOrder("gcclient-averages", failing(session)) if self._node.overlap else self._summing
        #: of this step's buckets, and of the last one's: DDP makes other buckets now and then
        self._cuts: dict[tuple[int, ...], tuple[Plan, Cut, Layout | None]] = {}
        self._before: dict[tuple[int, ...], tuple[Plan, Cut, Layout | None]] = {}
        #: how this step's buckets go within the node, and the loss scale of its gradients
        self._encoding = False
        self._loss_scale = 1.0
        #: to be given out once all of the step are summed
        self._later: list[Callable[[], None]] = []
        #: the step that is open is closed and, where this rank has a shard, all its results are there. A backward pass
        #: does not end before: no bucket waits for the note, and the next step's would be written over it.
        self._ended = threading.Event()
        #: of the step that is being summed; known to that thread alone
        self._finite = True

    # ------------------------------------------------------------------------------ in the backward pass
    @property
    def begun(self) -> bool:
        """See `State.begun`; also of a rank without a shard."""
        return bool(self._cuts)

    def exchange(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See `State.exchange`."""
        first = not self.begun
        plan, cut, layout = self._cut(bucket.parameters(), buffer)
        work = ShardBucket(self, plan, cut, buffer, self._ended if bucket.is_last() else None)
        self.session.pending.add(work)
        if first:
            self._loss_scale = self.scale()
            if self.nodes.has_shard:
                self._scope = ShardBackward(self, self._loss_scale, self._ended)
        work.message = self._message(layout)
        began = self.timing.clock()
        cut.pack(buffer)
        self.timing.bucket(work.buffer.nbytes, began)
        self.session.counters.bytes_pushed += work.buffer.nbytes
        self._summing.put(partial(self._sum, work, self._scope, self._node.packed()))
        self._after_sums(partial(self._give_out, work))
        if self.session.failure is not None:
            work.fail(self.session.failure.again())
        return work.future

    def sparse(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See `State.sparse`."""
        future = super().sparse(bucket, buffer)
        if not bucket.is_last():
            return future
        later = device.future_for(buffer)
        self._after_sums(partial(_pass_on, future, later, self._ended))
        return later

    def end(self) -> None:
        """See `State.end`."""
        ended, self._ended = self._ended, threading.Event()
        if self.begun:
            scope, self._scope = self._scope, None
            if scope is not None:
                self.timing.closed(scope.step.number)
            self._summing.put(partial(self._close, scope, ended))
            self._before, self._cuts = self._cuts, {}
            self.session.counters.steps += 1
            if self._codec is not None:
                self._end_encoding(self._codec, scope)
        else:
            ended.set()  # all buckets were sparse
        for job in self._later:
            self._giving.put(job)
        self._later.clear()

    def _message(self, layout: Layout | None) -> Message | None:
        """How a bucket goes within the node, if that is encoded."""
        codec = self._codec
        if codec is None or layout is None or not layout.encodes or codec.steps < codec.warmup:
            return None
        self._encoding = True
        return Message(codec, layout, codec.steps, self._loss_scale, codec.settled)

    def _end_encoding(self, codec: NodeCodec, scope: Backward | None) -> None:
        codec.steps += 1
        if self._encoding:
            self._encoding, codec.settled = False, threading.Event()
            self._after_sums(partial(self._settle, codec, scope, codec.settled))

    def _after_sums(self, job: Callable[[], None]) -> None:
        """Have averages given out: at once where that may go on beside sums, else once those of the step are queued."""
        if self._node.overlap:
            self._giving.put(job)
        else:
            self._later.append(job)

    def _cut(self, parameters: list[torch.Tensor], buffer: torch.Tensor) -> tuple[Plan, Cut, Layout | None]:
        key = tuple(map(id, parameters))
        found = self._before.get(key)
        if found is None:
            known = self.known(parameters, buffer)
            cut = Cut([t.numel() for t in parameters], buffer, self.nodes)
            size = cut.shard.element_size()
            starts = [start * size for start in cut.starts[:-1]] or [0] * len(known)
            encoding = self._codec if len(self.nodes.local) > 1 else None
            found = plan_of(known, starts), cut, None if encoding is None else Layout(encoding, known, cut)
        self._cuts[key] = found
        return found

    # ------------------------------------------------------------------------------------ in other threads
    def _sum(self, work: ShardBucket, scope: Backward | None, packed: Any) -> None:
        if self.session.failure is not None:
            return
        if work.message is None:
            self._node.sum(work.cut, packed)
        else:
            work.message.after.wait()
            if self.session.failure is not None:
                return
            self._node.sum_encoded(work.cut, packed, work.message)
        self.session.counters.bytes_within_node += self._sent(work)
        if scope is not None:
            if self._note is not None and self._finite:
                self._finite = self._node.is_finite(work.buffer)
            scope.add(work)
        if not work.plan.by_block:
            work.complete()

    def _close(self, scope: Backward | None, ended: threading.Event) -> None:
        try:
            if self.session.failure is not None:
                return
            if self.nodes.shards > 1:
                finite, self._finite = self._node.all_finite(self._finite), True
                if scope is not None and self._note is not None:
                    said = torch.tensor([1.0 if finite else math.nan], dtype=torch.float64, device=device.HOST)
                    scope.fill(self._note.pieces, device.memory_of(said))
            if scope is not None:
                scope.close()
        finally:
            if scope is None:
                ended.set()

    def _sent(self, work: ShardBucket) -> int:
        """Bytes that this rank has sent to others for a bucket's sum."""
        cut, message = work.cut, work.message
        others = [k for k in range(self.nodes.shards) if k != self.nodes.place and len(self.nodes.local) > 1]
        each = cut.width * cut.packed.element_size()
        return sum(each if message is None else message.layout.sizes[k] for k in others)

    def _settle(self, codec: NodeCodec, scope: Backward | None, settled: threading.Event) -> None:
        """All averages of a step are given out: what was encoded counts, unless the step was void."""
        try:
            counts = scope.counts() if isinstance(scope, ShardBackward) else self.session.failure is None
            if self.session.failure is None and self.nodes.shards < len(self.nodes.local):
                counts = self._node.all_counted(counts)  # who has no shard has no results of its own
            codec.settle(counts)
        finally:
            settled.set()

    def _give_out(self, work: ShardBucket) -> None:
        if work.wait():
            self._node.give_out(work.cut, work.whole)
            work.over(self._node)


def _pass_on(
    result: torch.futures.Future[torch.Tensor], later: torch.futures.Future[torch.Tensor], ended: threading.Event
) -> None:
    """Complete ``later`` as ``result`` once the step has ended."""
    ended.wait()
    try:
        later.set_result(result.wait())
    except Exception as error:
        later.set_exception(error)  # type: ignore[arg-type]


def node_group(session: Session, shards: Shards, nodes: Nodes) -> NodeGroup:
    """The ranks of this node, for a model that was declared so. All of them call it. Raises what torch raises."""
    limit, keys = session.job.deadline, f"gradcomm/{session.job.job.hex()}/{shards.agreed.id}/{nodes.local[0]}"
    store = find_store(limit)
    assert store is not None  # where models are exchanged in shards torch.distributed spans the job
    return NodeGroup(nodes, shards.parameters[0].tensor.device, dist.PrefixStore(keys, store), limit)


def failing(session: Session) -> Callable[[Exception], None]:
    """What ends the job where the node's ranks could not do together what they had to."""
    # A session knows its newest steps and they their state, at whose end the thread that has this ends.
    found = weakref.ref(session)

    def failed(error: Exception) -> None:
        """The job is over, with the daemon's word for it if there is one."""
        session = found()
        if session is None:
            return
        until = time.monotonic() + TOLD_WITHIN
        while session.failure is None and time.monotonic() < until:
            time.sleep(0.01)
        session.fail(
            GradcommError(
                f"the ranks of this node could not exchange gradients among themselves: {error}",
                job=session.label,
                phase="push",
                advice="look at the logs of this node's other ranks; without hierarchy they need no group",
            )
        )

    return failed
