"""What of a process group of the backend `gc` is compressed: the gradients of attached modules, and nothing else.

What may live here: telling a module's reductions from all others. What may not: carrying them (`collectives.py`,
`ddp.py`), which of them patterns mean (`shardgroups.py`).

DistributedDataParallel has a hook for it. With `fully_shard` over a mesh with a replicate dimension torch reduces the
memory that it allocated through the module's reduce-scatter object just before: that object is wrapped, and marks it.
"""

from __future__ import annotations

import glob
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gcclient import arguments, backend, ddp, shardgroups
from gcclient.api import joined
from gcclient.audit import Audit
from gcclient.buckets import State
from gcclient.collectives import Collectives, Reduction
from gcclient.domain import Domain
from gcclient.grouping import Groups
from gcclient.hierarchy import Hierarchy
from gcclient.parameters import numbering
from gcclient.passes import Passes
from gcclient.plain import Plain
from gcclient.plain_training import PlainState
from gcclient.shardgroups import ShardGroup, shard_groups
from gcproto import modes
from gcproto.agreed import MAX_EXCLUDE, MAX_WARMUP

#: sums or averages a tensor by its name
Carry = Callable[[torch.Tensor, bool, str], Reduction]


def attach(
    module: torch.nn.Module,
    compression: str | Mapping[str, str] | None = None,
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
) -> State | PlainState | None:
    """Have the gradients of ``module`` compressed on their way through its process group. Call it on every rank.

    ``module``: a DistributedDataParallel, whose hook this registers, and whose state it returns (the other arguments
    are as :func:`gcclient.state` takes them); or a module to which `fully_shard` was applied with a mesh whose
    replicate dimension has the backend "gc", with all such modules in it. Each of them reduces its parameters as one
    tensor, called after the module, of the flat shard's shape. Default of ``compression``: the daemon's
    ``codec.default``.

    With `fully_shard` ``compression`` may be specs by globs, ``{"layers.*": "topk(ratio=0.01)", "head": "fp16"}``, the
    last that matches counts; these and ``exclude`` name modules, or all the parameters of one that are reduced
    together. ``warmup_steps`` counts backward passes that exchange. With a ``quality`` such a pass is one step, and
    automatic plans are made for the module, which lose no more than that; without one each reduction is a step.

    A DistributedDataParallel can be attached again in the next job (after ``shutdown()`` and ``init()``).

    Raises TypeError for another module, RuntimeError for a DistributedDataParallel that has another hook, or was
    attached in this job before, and for ``fully_shard`` with a torch before 2.9, ValueError for ``fully_shard`` with an
    argument that only DDP has, with a ``quality`` in a job whose ``on_loss`` is not "fail", with a pattern that would
    split what is reduced together or without a replicate dimension of that backend, and what :func:`gcclient.state`
    raises.
    """
    if isinstance(module, DistributedDataParallel):
        hooked = _hooked.get(module)
        _check_free(module, hooked)
        state = ddp.state(
            module,
            None,
            compression,  # type: ignore[arg-type]  # refused there
            scaler,
            whole,
            groups,
            audit,
            backward_passes_per_step=backward_passes_per_step,
            quality=quality,
            exclude=exclude,
            warmup_steps=warmup_steps,
            hierarchy=hierarchy,
            node_codec=node_codec,
        )
        if hooked is None:
            hooked = _hooked[module] = _Hooked(state)
            module.register_comm_hook(hooked, ddp.ddp_hook)
        hooked.state = state
        return state
    sharded = shard_groups(module)
    if not sharded:
        raise TypeError(
            f"attach() takes a DistributedDataParallel or a module that fully_shard was applied to, got {type(module)}"
        )
    if not all(hasattr(group.unit, "_reduce_scatter_comm") for group in sharded):
        raise RuntimeError(
            "attach() of modules that fully_shard was applied to needs torch 2.9 or newer, where a module's "
            f"reduce-scatter can be replaced; this is torch {torch.__version__}: use a newer one, or gcclient.fsdp2() "
            "of a model that is sharded over one node's ranks"
        )
    for name, given, default in (
        ("scaler", scaler, None),
        ("whole", whole, None),
        ("groups", groups, None),
        ("audit", audit, None),
        ("backward_passes_per_step", backward_passes_per_step, 1),
        ("hierarchy", hierarchy, False),
        ("node_codec", node_codec, None),
    ):
        if given != default:
            raise ValueError(f"{name}={given!r}: for DistributedDataParallel only")
    codecs = shardgroups.codecs(compression, sharded)
    left_out = shardgroups.chosen(arguments.read_patterns(exclude, "exclude"), sharded, "exclude")
    if len(left_out) > MAX_EXCLUDE:
        raise ValueError(
            f"exclude: expected at most {MAX_EXCLUDE} fully_shard groups, the patterns match {len(left_out)}"
        )
    warmup = arguments.read_whole_within(warmup_steps, "warmup_steps", 0, MAX_WARMUP // len(sharded))
    wanted = arguments.read_word(quality, "quality", {}, "", modes.QUALITIES)
    session = joined()
    if isinstance(session, Plain):
        return None
    if wanted and session.job.commits:
        # Torch waits for reductions in the middle of a pass, and committed steps have results after their end.
        raise ValueError(
            f"quality={quality!r}: automatic plans for fully_shard need on_loss='fail', since in this job every "
            "reduction has to be a step of its own; leave quality out"
        )
    # What has one codec has one domain: a codec that is given to a domain is that of all its tensors.
    alike: dict[tuple[Collectives, str], list[ShardGroup]] = {}
    for group in sharded:
        collectives = backend.collectives_of(_replicate_group(group), session)
        alike.setdefault((collectives, codecs[group]), []).append(group)
    prepared = []
    with numbering(session):
        for (collectives, codec), together in alike.items():
            excluded = tuple(glob.escape(group.module) for group in together if group in left_out)
            # Every group of it makes a step of the domain in each pass; in the first one alone where passes are steps.
            steps = warmup + len(together) - 1 if wanted and warmup else warmup * len(together)
            options = {"scoped": bool(wanted), "exclude": excluded, "warmup": steps, "quality": wanted}
            prepared.append((collectives, collectives.prepare("fsdp", codec, **options), together))
    for collectives, declared, together in prepared:
        domain = session.domain(declared)
        carry = Passes(collectives, domain).start if wanted else partial(_alone, collectives, domain)
        for group in together:
            inner = group.unit._reduce_scatter_comm
            if isinstance(inner, _Marking):  # attached in an earlier job
                inner = inner.inner
            group.unit._reduce_scatter_comm = _Marking(inner, carry, group.module)
    return None


class _Hooked:
    """What a DistributedDataParallel, which takes one hook for good, has as the hook's state: that of its job."""

    def __init__(self, state: State | PlainState) -> None:
        self.state = state

    def on_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self.state.on_bucket(bucket)


#: of the modules that were attached
_hooked: weakref.WeakKeyDictionary[DistributedDataParallel, _Hooked] = weakref.WeakKeyDictionary()


def _check_free(module: DistributedDataParallel, hooked: _Hooked | None) -> None:
    """Raises RuntimeError where a module cannot be attached; before anything is declared, which other ranks see."""
    if hooked is None and module.__dict__.get("_comm_hooks"):
        raise RuntimeError(
            "this DistributedDataParallel has a communication hook already, and torch takes one only: leave "
            "register_comm_hook() out, or attach a new DistributedDataParallel of the model"
        )
    if hooked is not None and hooked.state.session is joined():
        raise RuntimeError(
            "this DistributedDataParallel is attached already: attach it once, or again after shutdown() and init()"
        )


def _replicate_group(sharded: ShardGroup) -> backend.Group:
    """The group over which torch reduces shards."""
    group = getattr(sharded.unit.mesh_info, "replicate_process_group", None)
    if not isinstance(group, backend.Group):
        raise ValueError(
            f"module {sharded.module!r} is not replicated through the backend 'gc': give fully_shard a mesh made by "
            'init_device_mesh(..., mesh_dim_names=("replicate", "shard"), backend_override={"replicate": "gc"})'
        )
    return group


def _alone(collectives: Collectives, domain: Domain, tensor: torch.Tensor, average: bool, name: str) -> Reduction:
    return collectives.start(tensor, average, domain, name)


class _Marking:
    """A module's reduce-scatter object that marks what is going to be reduced."""

    def __init__(self, inner: Any, carry: Carry, name: str) -> None:
        self.inner = inner
        #: of the session in which the module was attached
        self._reduce = carry
        self._name = name
        self._marked: tuple[int, int] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the reduce-scatter's input and then for its output, which is what is reduced."""
        if self._marked is not None:
            backend.marked.pop(self._marked, None)
        made: torch.Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        self._marked = (made.data_ptr(), made.numel())
        backend.marked[self._marked] = backend.Mark(weakref.ref(made.untyped_storage()), self._carry)
        return made

    def _carry(self, tensor: torch.Tensor, average: bool) -> Reduction:
        return self._reduce(tensor, average, self._name)

    def __call__(self, *arguments: Any, **more: Any) -> dist.Work:
        work: dist.Work = self.inner(*arguments, **more)
        return work
