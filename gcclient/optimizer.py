"""The optimizer wrapper: gradients are averaged while the backward pass runs, and before the optimizer steps.

What may live here: making a wrapper from an optimizer and options. What may not: what it then does (`averaging.py`).

    optimizer = gcclient.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gcclient import arguments
from gcclient.api import joined
from gcclient.audit import Audit
from gcclient.auditor import Auditor
from gcclient.averaging import Averaging, Distributed
from gcclient.exchange import Layout
from gcclient.grouping import Groups, name_groups
from gcclient.hierarchy import Hierarchy, declare_shards, nodes_of, read_hierarchy
from gcclient.loaded import Shared
from gcclient.overlap import Overlapped, PlainOverlapped, check_fit, check_flat
from gcclient.parameters import Model, Options, declare, read_options
from gcclient.plain import Plain
from gcclient.plain_training import PlainLayout
from gcclient.reductions import Op, read_op
from gcclient.session import Session
from gcclient.sharded_exchange import ShardLayout


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: str | None = None,
    backward_passes_per_step: int = 1,
    op: Op | None = None,
    *,
    groups: Groups | Sequence[Sequence[torch.Tensor]] = None,
    scaler: Any = None,
    whole: bool | None = None,
    audit: Audit | None = None,
    quality: str | None = None,
    exclude: Iterable[str] = (),
    warmup_steps: int = 0,
    overlap_forward: bool = False,
    hierarchy: Hierarchy = False,
    sparse_as_dense: bool | None = None,
    num_groups: int = 0,
) -> Any:
    """``optimizer`` with gradients averaged over all ranks of the job before each step. Call it on every rank.

    The result is of a class derived from the optimizer's own and shares its state and parameter groups, also once
    either has loaded a state. Gradients are copied out as the backward pass makes them; ``step()`` waits for the
    averages and writes them to ``.grad``. It must be called equally often on every rank; without a backward pass before
    it a rank brings the gradients it has.

    ``named_parameters``: ``model.named_parameters()``, the same names on every rank (default: names by position);
    parameters that need no gradient are left out. ``compression``, ``whole``, ``groups``, ``audit``, ``quality``,
    ``exclude``, ``warmup_steps`` and ``hierarchy``: as :func:`gcclient.state` takes them; a group's gradients are
    pushed (with ``hierarchy`` summed within the node) when the last of them is there.
    ``backward_passes_per_step``: gradients of so many passes are added up before they are exchanged, in the last of
    them. ``op``: gcclient.Average (default) or gcclient.Sum. ``scaler``: the GradScaler in use, if any: it then
    unscales averages, and residuals are kept unscaled. ``overlap_forward``: ``step()`` does not wait; each parameter is
    stepped when its average has come, and whatever uses one waits for that one (:class:`gcclient.overlap.Overlapped`
    says what does not go with it).

    As Horovod has them: ``groups`` may also be lists of parameters (what is in none is a group of its own),
    ``num_groups`` is an older name for a number of ``groups`` (0: none), and ``sparse_as_dense=True`` says what happens
    anyway; False is a ValueError.

    Raises TypeError and ValueError that name the argument, and what :func:`gcclient.state` raises.
    """
    session = joined()
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={optimizer!r}: expected a torch optimizer, got a {type(optimizer).__name__}")
    if isinstance(optimizer, Distributed):
        raise ValueError("the optimizer is wrapped already: give DistributedOptimizer the one it was made from")
    passes = arguments.read_whole_within(backward_passes_per_step, "backward_passes_per_step", 1)
    average = read_op(op)
    _check_sparse(sparse_as_dense)
    named = _named(optimizer, named_parameters)
    wanted_groups = name_groups(_either(groups, num_groups), named)
    options = read_options(compression, whole, wanted_groups, audit, quality, exclude, warmup_steps)
    wanted = read_hierarchy(hierarchy)
    if overlap_forward:
        check_fit(session, optimizer, scaler, options.audit, [p for _, p in named])
        wanted = check_flat(wanted)
    mixin: type[Distributed] = Distributed
    if overlap_forward:
        mixin = PlainOverlapped if isinstance(session, Plain) else Overlapped
    if isinstance(session, Plain):
        averaging = Averaging(PlainLayout(session, named, average), passes, scaler, None)
    else:
        layout = _declared(session, named, options, wanted, average)
        auditor = None if options.audit is None else Auditor(session, layout.domain, options.audit, average)
        averaging = Averaging(layout, passes, scaler, auditor)
    base = type(optimizer)
    made: Any = object.__new__(type(base.__name__, (mixin, base), {"__module__": base.__module__}))
    # A learning rate scheduler's patch of step() belongs to the optimizer it was made for.
    made.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    made._averaging, made._shared = averaging, Shared(optimizer)
    made._shared.keep(optimizer)
    made._prepare()
    averaging.watch()
    if scaler is not None:
        _average_before_unscaling(scaler, made)
    return made


def _check_sparse(as_dense: object) -> None:
    """Raises ValueError where sparse gradients are to be exchanged as such, which nothing here does."""
    if as_dense is not None and not as_dense:
        raise ValueError(
            f"sparse_as_dense={as_dense!r}: sparse gradients are exchanged as dense ones, whatever is said here; give "
            "True, or leave it out"
        )


def _either(groups: object, num_groups: object) -> object:
    """``groups``, or the number that Horovod's older name for it gives. Raises TypeError, and ValueError for both."""
    count = arguments.read_whole_within(num_groups, "num_groups", 0)
    if not count:
        return groups
    if groups is not None:
        raise ValueError(f"num_groups={count} and groups: expected one of them; groups={count} is what the former says")
    return count


def _declared(
    session: Session, named: list[tuple[str, torch.Tensor]], options: Options, hierarchy: Hierarchy, average: bool
) -> Layout | ShardLayout:
    model = Model("optimizer", named, tuple(range(session.me.size)), options)
    nodes = nodes_of(session, hierarchy, model)
    if nodes is None:
        return Layout(session, *declare(session, model), average)
    # Of each parameter whether it is used, and whether all was finite.
    shards = declare_shards(session, model, nodes, said=len(named) + 1)
    return ShardLayout(session, shards, nodes, average, options.groups, [name for name, _ in named])


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters that need gradients. Raises ValueError where names are missing, or nothing is left."""
    own = {
        id(p): (f"parameter.{i}.{j}", p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    }
    named = list(own.values())
    if named_parameters is not None:
        named = [(name.replace("_orig_mod.", ""), p) for name, p in named_parameters if id(p) in own]
        if missing := own.keys() - {id(p) for _, p in named}:
            raise ValueError(
                f"named_parameters: {len(missing)} of the optimizer's {len(own)} parameters have no name; give "
                "model.named_parameters() of the model that the optimizer was made for"
            )
    named = [(name, p) for name, p in named if p.requires_grad]
    if not named:
        raise ValueError("the optimizer has no parameter that requires a gradient")
    return named


def _average_before_unscaling(scaler: Any, optimizer: Distributed) -> None:
    """Make ``scaler`` unscale averages: what it finds in them, infinities above all, is then the same on all ranks."""
    unscale, wrapped = scaler.unscale_, weakref.ref(optimizer)

    def unscale_(given: Optimizer) -> None:
        if given is wrapped() and not given._averaging.averaged:
            given.synchronize()
        unscale(given)

    scaler.unscale_ = unscale_
