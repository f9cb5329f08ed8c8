"""Replicas of a model that `fully_shard` shards within each node: torch within the node, the daemon between nodes.

What may live here: who replicates whom, the hook that averages shards, when a backward pass waits for averages. What
may not: the exchange itself (`collectives.py`), meshes with a replicate dimension (`attaching.py`).

A module's shard of the gradients is pushed as soon as torch has reduced it within the node, and backward goes on. The
average is written where the shard was, of which ``.grad`` is a view; the backward pass ends once all have come. Where
torch is about to copy, add or divide the shard before that, the module's hook waits instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from gcclient import api, shardgroups
from gcclient.collectives import Collectives, Reduction
from gcclient.device import HOST
from gcclient.errors import StepSkipped
from gcclient.parameters import numbering
from gcclient.plain import Plain
from gcclient.session import Session
from gcclient.shardgroups import ROOT, shard_groups

#: Of reductions in these types torch leaves the division to the collective.
_UNDIVIDED = (torch.float32, torch.bfloat16)
#: averages a shard, in place: begins that and returns what can be waited for, or does it and returns None
Average = Callable[[torch.Tensor, str], Reduction | None]


class Replicas:
    """The gradients of one model, averaged over its replicas. Made by :func:`fsdp2`.

    ``ranks``: of the job, those that have this rank's shard; ``waited``: exchanges for which a hook had to wait.
    """

    def __init__(self, model: torch.nn.Module, ranks: tuple[int, ...], average: Average) -> None:
        self.model = model
        self.ranks = ranks
        self.waited = 0
        self._average = average
        #: with the memory that torch keeps no reference to
        self._under_way: list[tuple[Reduction, torch.Tensor]] = []
        #: torch's number of the backward pass they belong to
        self._pass = -1

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes within it add gradients up, and exchange nothing: neither in the node nor between nodes.

        The first pass after it exchanges the sum. Until then every rank holds whole gradients.
        """
        self.model.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)  # type: ignore[operator]

    def hook(self, unit: Any, name: str) -> Callable[[torch.Tensor], None]:
        """What torch calls with the shard of a module's gradients."""

        def average(shard: torch.Tensor) -> None:
            op = self._average(shard, name)
            if op is None:
                return
            if _read_at_once(unit, shard):
                self.waited += 1
                op.finish()
                return
            number = torch._C._current_graph_task_id()
            if number != self._pass:
                self._abandon()
                self._pass = number
            if not self._under_way:
                # torch's own end of the pass, in which the outermost module is reduced, was queued before.
                Variable._execution_engine.queue_callback(self._end)
            self._under_way.append((op, shard))

        return average

    def _abandon(self) -> None:
        """Until nothing of a pass that an exception ended is under way. Raises the job's failure."""
        under_way, self._under_way = self._under_way, []
        for op, _ in under_way:
            with suppress(StepSkipped):
                op.finish()

    def _end(self) -> None:
        """The backward pass is over but for the averages. Raises the job's failure."""
        under_way, self._under_way = self._under_way, []
        for op, _ in under_way:
            op.finish()


def _read_at_once(unit: Any, shard: torch.Tensor) -> bool:
    """Whether torch reads the shard right after the hook, rather than handing out views of it."""
    divided = (
        shard.dtype not in _UNDIVIDED or unit.force_sum_reduction_for_comms or unit.gradient_divide_factor is not None
    )
    if divided or unit._orig_dtype not in (None, shard.dtype):
        return True
    return any(
        p.sharded_param.grad is not None
        or p.offload_to_cpu
        or bool(getattr(p.sharded_param, "_post_accumulate_grad_hooks", None))
        for p in unit.fsdp_params
    )


def fsdp2(model: torch.nn.Module, compression: str | Mapping[str, str] | None = None) -> Replicas:
    """Average the gradients of ``model`` over its replicas on other nodes. Call it on every rank of the job.

    ``model``: `fully_shard` was applied to it, and to modules in it, over a one-dimensional mesh of ranks of this node;
    its replicas are the models of ranks that have the same place in meshes of the same size. A module's gradients are
    one tensor, called after the module, of the flat padded shard's shape, exchanged in each backward pass, after which
    ``.grad`` is the average over all ranks. ``compression``: a codec spec (default: the daemon's ``codec.default``), or
    specs by globs as :func:`gcclient.attach` takes them, ``{"layers.*": "topk(ratio=0.01)", "(root)": "fp16"}``.

    Keep what is returned, and accumulate gradients within its ``accumulate()``: torch's own switches of the gradients'
    all-reduce are not told to hooks. Raises TypeError for another model, ValueError for a mesh with a replicate
    dimension, for meshes of different sizes and for a pattern that would split what is reduced together, and the job's
    failure.
    """
    parts = [part for part in model.modules() if hasattr(part, "set_all_reduce_hook")]
    if not parts or parts[0] is not model:
        raise TypeError(f"fsdp2() takes a model that fully_shard was applied to, got {type(model)}")
    groups = shard_groups(model)
    codecs = shardgroups.codecs(compression, groups)
    for group in groups:
        if hasattr(group.unit.mesh_info, "replicate_process_group"):
            raise ValueError(
                f"module {group.module!r} has a mesh with a replicate dimension, which torch reduces itself: give "
                'that dimension the backend "gc" and the model to gcclient.attach(), or shard it over one node\'s ranks'
            )
    mesh = groups[0].unit.mesh_info
    ranks, places = _replicas(mesh.shard_mesh_rank, mesh.shard_mesh_size)
    session = api.joined()
    if len(ranks) == 1:
        average: Average = lambda shard, name: None  # noqa: E731
    elif isinstance(session, Plain):
        average = _plain(mesh.shard_mesh_rank, places)
    else:
        average = _by_daemon(session, ranks, {group.module: codec for group, codec in codecs.items()})
    made, modules = Replicas(model, ranks, average), dict(model.named_modules())
    for group in groups:
        modules["" if group.module == ROOT else group.module].set_all_reduce_hook(made.hook(group.unit, group.module))
    return made


def _replicas(place: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks of the job at ``place`` of their meshes, and the places of all ranks."""
    session = api.joined()
    table = torch.zeros(session.me.size, 2, dtype=torch.int64, device=HOST)
    table[session.me.rank] = torch.tensor([place, size], device=HOST)
    places, sizes = (tuple(column.tolist()) for column in api.push_pull(table, average=False).T)
    if len(set(sizes)) != 1:
        raise ValueError(f"the meshes of ranks 0 to {len(sizes) - 1} have {list(sizes)} ranks: shards would not fit")
    return tuple(rank for rank, there in enumerate(places) if there == place), places


def _by_daemon(session: Session, ranks: tuple[int, ...], codecs: Mapping[str, str]) -> Average:
    """``codecs``: of each module. What has one has one domain."""
    collectives = Collectives(session, ranks)
    with numbering(session):
        prepared = {codec: collectives.prepare("fsdp", codec) for codec in dict.fromkeys(codecs.values())}
    domains = {codec: session.domain(declared) for codec, declared in prepared.items()}
    return lambda shard, name: collectives.start(shard, True, domains[codecs[name]], name)


def _plain(place: int, places: tuple[int, ...]) -> Average:
    """By groups of torch's own."""
    groups = {}
    for each in sorted(set(places)):
        ranks = [rank for rank, there in enumerate(places) if there == each]
        groups[each] = dist.new_group(ranks)
    group, count = groups[place], places.count(place)

    def average(shard: torch.Tensor, name: str) -> None:
        dist.all_reduce(shard.div_(count), group=group)

    return average
