"""DistributedDataParallel through the daemon: a state made from the model, and a communication hook.

What may live here: that. What may not: what a bucket brings to a step (`buckets.py`, `sharded.py`), where parameters
live (`parameters.py`), any other way of training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gcclient import arguments
from gcclient.api import joined
from gcclient.audit import Audit
from gcclient.auditor import Auditor
from gcclient.buckets import State
from gcclient.grouping import Groups, plain_name
from gcclient.hierarchy import Hierarchy, declare_shards, nodes_of, read_hierarchy
from gcclient.node_codec import codec_of, read_node_codec
from gcclient.parameters import Model, declare, read_options
from gcclient.plain import Plain
from gcclient.plain_training import PlainState
from gcclient.sharded import ShardState

log = logging.getLogger("gcclient")


class Hooked(Protocol):
    """What DDP has as the state of :func:`ddp_hook`: what :func:`state` made, or stands for it."""

    def on_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket."""


def ddp_hook(state: Hooked, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
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
    hierarchy: Hierarchy = False,
    node_codec: str | None = None,
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
    ``hierarchy``: True sums gradients within each node first, by torch's collectives (gloo; NCCL on CUDA), so that each
    of a node's workers hands its daemon a shard of the sum instead of all of its gradients (as many shards as the node
    with the fewest workers has of them); "auto" does so where gradients are on CUDA, every node has two or more workers
    and nothing else that is asked for stands against it. ``node_codec``: a codec for what the workers of a node send
    each other of gradients then, encoded on the device where they are, with error feedback: one that gcclient has for
    GPUs, with payloads of a length known in advance (default: none). Averages are given out as they are.
    Raises TypeError for a ``compression`` that is no text, ``groups`` that are none, an ``audit`` that is no Audit, an
    ``exclude`` that is no list or parameters that are DTensors, ValueError for a model without gradients, with an
    unknown dtype, a name that no message can carry or one that two parameters have (without "module." and "_orig_mod."
    before it), for groups that leave out or repeat one, for numbers and words out of range, for a model that looks for
    unused parameters (``find_unused_parameters``), or is not the DistributedDataParallel, which says so, where more
    than one backward pass makes a step or torch.distributed spans less than the job, for a GC_AUDIT that cannot be
    read, and for what does not go with ``hierarchy=True`` (audits, ``whole``, another ``on_loss`` than "fail",
    torch.distributed that spans less than the job), for a ``node_codec`` without ``hierarchy`` or one that cannot be
    used so, :class:`~gcclient.TensorMismatch` on every rank when models or any of these options but ``scaler`` and
    ``backward_passes_per_step`` differ, :class:`~gcclient.CodecError` for a codec that cannot be used,
    :class:`~gcclient.StateMismatch` for a checkpoint that does not fit.
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
    if passes > 1:
        _check_passes(model, passes)
    options = read_options(compression, whole, groups, audit, quality, exclude, warmup_steps)
    wanted = read_hierarchy(hierarchy)
    within = read_node_codec(node_codec, wanted)
    if isinstance(session, Plain):
        return PlainState(session, group, passes, [p for _, p in named])
    if dist.is_available() and dist.is_initialized() and (spanned := dist.get_world_size()) < session.me.size:
        _check_within(model, spanned, session.me.size)
    everyone = tuple(range(session.me.size))
    # Where torch's world is not the job's (a torchrun for each node), its groups say nothing of other nodes.
    local = group is None or dist.get_world_size() != session.me.size
    ranks = everyone if local else tuple(sorted(dist.get_process_group_ranks(group)))
    declared = Model("ddp", named, ranks, options)
    if (nodes := nodes_of(session, wanted, declared)) is not None:
        shards = declare_shards(session, declared, nodes, node_codec=within)
        codec = codec_of(shards, nodes, session.me.rank, options, within)
        return ShardState(session, shards, nodes, group, scaler, len(ranks), passes, codec)
    if within:
        log.warning("node_codec=%r is not used: workers of a node send each other nothing here", within)
    domain, parameters = declare(session, declared)
    auditor = None if options.audit is None else Auditor(session, domain, options.audit)
    return State(session, domain, parameters, group, scaler, len(ranks), auditor, passes)


def _check_passes(model: torch.nn.Module, passes: int) -> None:
    """Raises ValueError where torch would not give out averages that several passes added up."""
    given = f"backward_passes_per_step={passes}"
    if _looks_for_unused(model, given):
        # Every pass is one that torch takes for exchanged: it forgets after each which parameters were used.
        raise ValueError(
            f"{given} does not go with find_unused_parameters=True: of a parameter that the last of these passes does "
            "not use torch would leave the gradient as it is on each rank; run the passes before the last within "
            "model.no_sync() instead, or give static_graph=True if all passes use the same"
        )


def _check_within(model: torch.nn.Module, spanned: int, size: int) -> None:
    """Raises ValueError where torch would not give out averages because it asks ``spanned`` of ``size`` ranks only."""
    given = f"torch.distributed spans {spanned} of the job's {size} ranks"
    if _looks_for_unused(model, given):
        raise ValueError(
            f"{given}, which does not go with find_unused_parameters=True: of a parameter that only other ranks use "
            "torch would not take the average here; let every rank use every parameter, or train with "
            "gcclient.DistributedOptimizer, which asks all ranks"
        )


def _looks_for_unused(model: torch.nn.Module, given: str) -> bool:
    """Whether torch finds out in each pass which parameters were used, with which ``given`` does not go. Raises
    ValueError where no DDP module is in ``model`` to tell."""
    wrapped = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if not wrapped:
        raise ValueError(
            f"{given}: expected the DistributedDataParallel, got a {type(model).__name__}, which does not say whether "
            "unused parameters are looked for (that does not go with it); give gcclient.state() the wrapped model"
        )
    return any(m.find_unused_parameters and not m.static_graph for m in wrapped)
