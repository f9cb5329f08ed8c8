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
from gcclient.node_group import Cut, NodeGroup
from gcclient.rendezvous import find_store
from gcclient.session import Session

#: A rank that is gone breaks the node's group; its daemon says who, and within this time, seconds.
TOLD_WITHIN: Final = 5.0


class ShardBucket(Bucket):
    """A bucket under way. ``future`` completes when all averages of it, of all shards, are in ``whole``."""

    def __init__(self, state: State, plan: Plan, cut: Cut, whole: torch.Tensor, closed: threading.Event | None) -> None:
        """``closed``: what is to be waited for besides."""
        super().__init__(state, plan, cut.shard[: cut.starts[-1] if cut.starts else 0])
        self.future = device.future_for(whole)
        self.cut, self.whole = cut, whole
        self._closed = closed
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
        if self._closed is not None:
            self._closed.wait()
        return not self._over

    def over(self, group: NodeGroup) -> None:
        """All are."""
        self.state.session.pending.discard(self)
        if self._first():
            group.complete(self.future, self.whole)


class ShardBackward(Backward):
    """One backward pass as far as this rank's shard goes."""

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
    ) -> None:
        super().__init__(session, shards.domain, shards.parameters, group, scaler, ranks, None, passes)
        self.nodes = nodes
        self._note = shards.note
        limit, keys = session.job.deadline, f"gradcomm/{session.job.job.hex()}/{shards.agreed.id}/{nodes.local[0]}"
        store = find_store(limit)
        assert store is not None  # where models are exchanged in shards torch.distributed spans the job
        self._node = NodeGroup(nodes, shards.parameters[0].tensor.device, dist.PrefixStore(keys, store), limit)
        self._summing = InOrder("gcclient-sums", _failing(session))
        self._giving = InOrder("gcclient-averages", _failing(session)) if self._node.overlap else self._summing
        #: of this step's buckets, and of the last one's: DDP makes other buckets now and then
        self._cuts: dict[tuple[int, ...], tuple[Plan, Cut]] = {}
        self._before: dict[tuple[int, ...], tuple[Plan, Cut]] = {}
        #: to be given out once all of the step are summed
        self._later: list[Callable[[], None]] = []
        #: the step that is open is closed; a backward pass does not end before
        self._closed = threading.Event()
        #: of the step that is being summed; known to that thread alone
        self._finite = True

    # ------------------------------------------------------------------------------ in the backward pass
    def exchange(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """See `State.exchange`."""
        plan, cut = self._cut(bucket.parameters(), buffer)
        work = ShardBucket(self, plan, cut, buffer, self._closed if bucket.is_last() else None)
        self.session.pending.add(work)
        if self._scope is None and self.nodes.has_shard:
            self._scope = ShardBackward(self, self.scale())
        began = self.timing.clock()
        cut.pack(buffer)
        self.timing.copied(work.buffer.nbytes, began)
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
        self._after_sums(partial(_pass_on, future, later, self._closed))
        return later

    def end(self) -> None:
        """See `State.end`."""
        closed, self._closed = self._closed, threading.Event()
        if self._cuts:
            scope, self._scope = self._scope, None
            if scope is not None:
                self.timing.closed(scope.step.number)
            self._summing.put(partial(self._close, scope, closed))
            self._before, self._cuts = self._cuts, {}
            self.session.counters.steps += 1
        else:
            closed.set()  # all buckets were sparse
        for job in self._later:
            self._giving.put(job)
        self._later.clear()

    def _after_sums(self, job: Callable[[], None]) -> None:
        """Have averages given out: at once where that may go on beside sums, else once those of the step are queued."""
        if self._node.overlap:
            self._giving.put(job)
        else:
            self._later.append(job)

    def _cut(self, parameters: list[torch.Tensor], buffer: torch.Tensor) -> tuple[Plan, Cut]:
        key = tuple(map(id, parameters))
        found = self._before.get(key)
        if found is None:
            known = self.known(parameters, buffer)
            cut = Cut([t.numel() for t in parameters], buffer, self.nodes)
            size = cut.shard.element_size()
            starts = [start * size for start in cut.starts[:-1]] or [0] * len(known)
            found = plan_of(known, starts), cut
        self._cuts[key] = found
        return found

    # ------------------------------------------------------------------------------------ in other threads
    def _sum(self, work: ShardBucket, scope: Backward | None, packed: Any) -> None:
        if self.session.failure is not None:
            return
        self._node.sum(work.cut, packed)
        if scope is not None:
            if self._note is not None and self._finite:
                self._finite = self._node.is_finite(work.buffer)
            scope.add(work)
        if not work.plan.by_block:
            work.complete()

    def _close(self, scope: Backward | None, closed: threading.Event) -> None:
        try:
            if self.session.failure is not None:
                return
            if self.nodes.shards > 1:
                finite, self._finite = self._node.all_finite(self._finite), True
                if scope is not None and self._note is not None:
                    said = torch.tensor([1.0 if finite else math.nan], dtype=torch.float64)
                    scope.fill(self._note.pieces, device.memory_of(said))
            if scope is not None:
                scope.close()
        finally:
            closed.set()

    def _give_out(self, work: ShardBucket) -> None:
        if work.wait():
            self._node.give_out(work.cut, work.whole)
            work.over(self._node)


def _pass_on(
    result: torch.futures.Future[torch.Tensor], later: torch.futures.Future[torch.Tensor], closed: threading.Event
) -> None:
    """Complete ``later`` as ``result`` once the step is closed."""
    closed.wait()
    try:
        later.set_result(result.wait())
    except Exception as error:
        later.set_exception(error)  # type: ignore[arg-type]


def _failing(session: Session) -> Callable[[Exception], None]:
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
