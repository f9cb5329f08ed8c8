"""What of a process group of the backend `gc` is compressed: the gradients of attached modules, and nothing else.

What may live here: telling a module's reductions from all others. What may not: carrying them (`collectives.py`,
`ddp.py`).

DistributedDataParallel has a hook for it. With `fully_shard` over a mesh with a replicate dimension torch reduces the
memory that it allocated through the module's reduce-scatter object just before: that object is wrapped, and marks it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gcclient import arguments, backend, ddp
from gcclient.api import joined
from gcclient.audit import Audit
from gcclient.buckets import State
from gcclient.collectives import Collectives, Reduction
from gcclient.domain import Domain
from gcclient.grouping import Groups
from gcclient.hierarchy import Hierarchy
from gcclient.plain import Plain
from gcclient.plain_training import PlainState


def attach(
    module: torch.nn.Module,
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
) -> State | PlainState | None:
    """Have the gradients of ``module`` compressed on their way through its process group. Call it on every rank.

    ``module``: a DistributedDataParallel, whose hook this registers, and whose state it returns (the other arguments
    are as :func:`gcclient.state` takes them); or a module to which `fully_shard` was applied with a mesh whose
    replicate dimension has the backend "gc", with all such modules in it. Each of them reduces a tensor of its own,
    called after the module, of the flat shard's shape. Default of ``compression``: the daemon's ``codec.default``.

    Raises TypeError for another module, ValueError for ``fully_shard`` with an argument that only DDP has or without a
    replicate dimension of that backend, and what :func:`gcclient.state` raises.
    """
    if isinstance(module, DistributedDataParallel):
        state = ddp.state(
            module,
            None,
            compression,
            scaler,
            whole,
            groups,
            audit,
            backward_passes_per_step=backward_passes_per_step,
            quality=quality,
            exclude=exclude,
            warmup_steps=warmup_steps,
            hierarchy=hierarchy,
        )
        module.register_comm_hook(state, ddp.ddp_hook)
        return state
    sharded = [(name, part) for name, part in module.named_modules() if hasattr(part, "set_custom_reduce_scatter")]
    if not sharded:
        raise TypeError(
            f"attach() takes a DistributedDataParallel or a module that fully_shard was applied to, got {type(module)}"
        )
    for name, given, default in (
        ("scaler", scaler, None),
        ("whole", whole, None),
        ("groups", groups, None),
        ("audit", audit, None),
        ("backward_passes_per_step", backward_passes_per_step, 1),
        ("quality", quality, None),
        ("exclude", exclude or (), ()),
        ("warmup_steps", warmup_steps, 0),
        ("hierarchy", hierarchy, False),
    ):
        if given != default:
            raise ValueError(f"{name}={given!r}: for DistributedDataParallel only")
    codec = "" if compression is None else arguments.read_codec(compression)
    session = joined()
    if isinstance(session, Plain):
        return None
    domains: dict[Collectives, Domain] = {}
    for name, part in sharded:
        for unit in part._get_fsdp_state()._fsdp_param_groups:
            collectives = backend.collectives_of(_replicate_group(unit, name), session)
            if collectives not in domains:
                domains[collectives] = collectives.domain("fsdp", codec)
            inner = unit._reduce_scatter_comm
            if isinstance(inner, _Marking):  # attached in an earlier job
                inner = inner.inner
            unit._reduce_scatter_comm = _Marking(inner, collectives, domains[collectives], name or "(root)")
    return None


def _replicate_group(unit: Any, name: str) -> backend.Group:
    """The group over which torch reduces the shards of ``unit``."""
    group = getattr(unit.mesh_info, "replicate_process_group", None)
    if not isinstance(group, backend.Group):
        raise ValueError(
            f"module {name or '(root)'!r} is not replicated through the backend 'gc': give fully_shard a mesh made by "
            'init_device_mesh(..., mesh_dim_names=("replicate", "shard"), backend_override={"replicate": "gc"})'
        )
    return group


class _Marking:
    """A module's reduce-scatter object that marks what is going to be reduced."""

    def __init__(self, inner: Any, collectives: Collectives, domain: Domain, name: str) -> None:
        self.inner = inner
        #: of the session in which the module was attached
        self._collectives = collectives
        self._domain = domain
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
        return self._collectives.start(tensor, average, self._domain, self._name)

    def __call__(self, *arguments: Any, **more: Any) -> dist.Work:
        work: dist.Work = self.inner(*arguments, **more)
        return work
