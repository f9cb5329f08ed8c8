"""The workers of one node among themselves: summing a bucket's gradients, and giving out the averages of its shards.

What may live here: torch's process groups of a node's ranks, the memory that a bucket takes on its way through them.
What may not: who has which shard (`hierarchy.py`), what is encoded (`node_codec.py`), steps and threads (`sharded.py`).

The reduce-scatter is an all-to-all of shards that their receivers add up in rank order, halves in fp32, as daemons do:
bits do not depend on torch's buckets nor on a library's algorithms. It moves what a reduce-scatter has to, while gloo's
all-reduces a copy of everything and keeps a part. Averages come back by an all-gather, or by a broadcast of each shard
where not every rank has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gcclient import device
from gcclient.hierarchy import Nodes, part, summed_as


class Cut:
    """One bucket cut into shards, and its memory on the way: of a bucket under way, or of none.

    ``packed``: the shards one after the other, each with ``width`` elements of which ``lengths`` say how many are the
    bucket's (``rows``: these) and ``parts`` how many each parameter's; the gradients first, then averages. ``shard``:
    this rank's, as it is summed and exchanged (none: empty).
    """

    def __init__(self, sizes: Sequence[int], like: torch.Tensor, nodes: Nodes) -> None:
        """``sizes``: the elements of each of the bucket's parameters; ``like``: its buffer."""
        shards = nodes.shards
        self._sizes = [hi - lo for n in sizes for lo, hi in (part(n, shards, k) for k in range(shards))]
        self.parts = [self._sizes[k::shards] for k in range(shards)]
        self.lengths = [sum(parts) for parts in self.parts]
        self.width = max(self.lengths)
        self.packed = like.new_zeros(shards * self.width)
        self.rows = [self.packed[k * self.width :][:n] for k, n in enumerate(self.lengths)]
        self.shard = like.new_zeros(self.width if nodes.has_shard else 0, dtype=summed_as(like.dtype))
        self._shards = shards
        #: where each parameter's part begins in this rank's shard, elements
        self.starts = [0, *accumulate(self.parts[nodes.place])] if nodes.has_shard else []

    def pack(self, buffer: torch.Tensor) -> None:
        """Lay out a bucket's gradients by shard."""
        parts = buffer.split(self._sizes)
        for k, row in enumerate(self.rows):
            torch.cat(parts[k :: self._shards], out=row)

    def unpack(self, buffer: torch.Tensor) -> None:
        """Averages, from where they lie by shard, to where the gradients were."""
        parts = buffer.split(self._sizes)
        for k, row in enumerate(self.rows):
            torch._foreach_copy_(list(parts[k :: self._shards]), list(row.split(self.parts[k])))


class Encoded(Protocol):
    """A bucket whose shards go encoded."""

    @property
    def expected(self) -> int:
        """Bytes that each of the other ranks sends this one."""

    def encode(self, cut: Cut) -> tuple[torch.Tensor, list[int]]:
        """What a packed bucket has for others, uint8, and how many of these bytes are for each rank."""

    def add(self, cut: Cut, received: torch.Tensor) -> None:
        """What came from the others, in rank order, and this rank's own part, into ``cut.shard``."""


class NodeGroup:
    """The ranks of this node, over gloo for gradients on the CPU and NCCL for those on CUDA. All of them make one.

    All call the same methods in the same order; those about sums and those about averages each by themselves where they
    :attr:`overlap`. The group is made by itself, since torch names its own after how many of them a process has.
    """

    def __init__(self, nodes: Nodes, place: torch.device, store: dist.Store, limit: float) -> None:
        """``store``: where the ranks meet, under keys of this group alone; ``limit``: how long they may take for
        anything, seconds. Raises what torch raises."""
        self.nodes = nodes
        self._store, self._limit = store, timedelta(seconds=limit)
        self._place = place
        self._stream = torch.cuda.Stream(place) if place.type == "cuda" else None
        self._received = torch.empty(0, device=place)
        self._sums: Any = None
        self._averages: Any = None
        if len(nodes.local) > 1:
            self._sums = self._group("sums")
            self._averages = self._group("averages") if self.overlap else self._sums

    @property
    def overlap(self) -> bool:
        """Whether averages may be given out while gradients are summed: two groups of NCCL must not be at work at once
        unless all ranks begin with the same one."""
        return self._stream is None

    def _group(self, what: str) -> Any:
        make: Any = dist.ProcessGroupGloo if self._stream is None else dist.ProcessGroupNCCL
        return make(dist.PrefixStore(what, self._store), self.nodes.place, len(self.nodes.local), self._limit)

    def _queued(self) -> AbstractContextManager[Any]:
        """What is queued within it is queued on the group's own stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def packed(self) -> Any:
        """What the calling thread has queued so far, for :meth:`sum`."""
        return None if self._stream is None else torch.cuda.current_stream(self._place).record_event()

    def sum(self, cut: Cut, packed: Any) -> None:
        """Sum a packed bucket over the ranks: their sum, as the node counts, is in ``cut.shard`` where this one has a
        shard. Raises what torch raises."""
        nodes, count = self.nodes, len(self.nodes.local)
        with self._queued():
            self._begin(packed)
            if self._sums is None:
                cut.shard.copy_(cut.packed)
            else:
                mine = cut.width if nodes.has_shard else 0
                received = self._room(count * mine, cut.packed.dtype)
                sent = [cut.width] * nodes.shards + [0] * (count - nodes.shards)
                self._sums.alltoall_base(received, cut.packed, [mine] * count, sent, dist.AllToAllOptions()).wait()
                if nodes.has_shard:
                    first, *others = received.split(cut.width) if mine else (received,)
                    cut.shard.copy_(first)
                    for other in others:
                        cut.shard.add_(other)
            self._weigh(cut)

    def sum_encoded(self, cut: Cut, packed: Any, bucket: Encoded) -> None:
        """:meth:`sum` over ranks that send each other what they encode. Not for a node of one. Raises besides what the
        codec raises."""
        nodes, count = self.nodes, len(self.nodes.local)
        with self._queued():
            self._begin(packed)
            sent, sizes = bucket.encode(cut)
            came = [0 if j == nodes.place else bucket.expected for j in range(count)]
            received = self._room(sum(came), torch.uint8)
            self._sums.alltoall_base(received, sent, came, sizes, dist.AllToAllOptions()).wait()
            if nodes.has_shard:
                bucket.add(cut, received)
            self._weigh(cut)

    def _begin(self, packed: Any) -> None:
        if self._stream is not None:
            self._stream.wait_event(packed)

    def _weigh(self, cut: Cut) -> None:
        """A sum, as the node counts; whoever copies it waits for what is queued here."""
        above, below = self.nodes.weight
        if above > 1:
            cut.shard.mul_(above)
        if below > 1:
            cut.shard.div_(below)
        if self._stream is not None:
            device.side_stream(self._place).wait_stream(self._stream)

    def _room(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """One bucket is received at a time."""
        if self._received.numel() < elements or self._received.dtype is not dtype:
            self._received = torch.empty(elements, dtype=dtype, device=self._place)
        return self._received[:elements]

    def is_finite(self, shard: torch.Tensor) -> bool:
        """Whether what was summed last is."""
        with self._queued():
            return bool(shard.isfinite().all())

    def all_finite(self, finite: bool) -> bool:
        """Whether all ranks say so, of what was summed."""
        return not any(self.greatest([not finite]))

    def all_counted(self, counts: bool) -> bool:
        """The same of a step, after its averages."""
        return not any(self._greatest(self._averages, [not counts]))

    def greatest(self, said: Sequence[float]) -> list[float]:
        """Of each number the greatest that any rank says: a sum's, in the order of sums."""
        return self._greatest(self._sums, said)

    def _greatest(self, group: Any, said: Sequence[float]) -> list[float]:
        if group is None:
            return list(said)
        with self._queued():
            numbers = torch.tensor(said, dtype=torch.float64, device=self._place)
            options: Any = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            group.allreduce([numbers], options).wait()
            return numbers.tolist()

    def give_out(self, cut: Cut, buffer: torch.Tensor) -> None:
        """Every rank's averages, which are in their ``cut.shard``, to every rank's buffer. Raises what torch raises."""
        nodes = self.nodes
        with self._queued():
            if self._stream is not None:
                self._stream.wait_stream(device.side_stream(self._place))
            if nodes.shards == len(nodes.local) > 1:
                self._averages._allgather_base(cut.packed, cut.shard.to(cut.packed.dtype)).wait()
            else:
                rows = cut.packed.view(nodes.shards, cut.width)
                if nodes.has_shard:
                    rows[nodes.place].copy_(cut.shard)
                if self._averages is not None:
                    for root, row in enumerate(rows):
                        options = dist.BroadcastOptions()
                        options.rootRank = root
                        self._averages.broadcast([row], options).wait()
            cut.unpack(buffer)

    def complete(self, future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor) -> None:
        """Complete ``future`` with ``buffer`` once what was queued here is done."""
        with self._queued():
            future.set_result(buffer)
