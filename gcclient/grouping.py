"""How a model's tensors are merged into groups, and what that means to torch's DDP.

What may live here: what users may say of groups, read into lists of names; bucket sizes. What may not: which grouping
is best (the daemon's planner), where groups lie (`parameters.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

import torch

from gcclient import arguments

#: What ``groups`` may be: None (no groups), "layer-wise", a number of groups, or the names in each group.
Groups = str | int | Sequence[Sequence[str]] | None
LAYER_WISE: Final = "layer-wise"
_FORM: Final = f"expected {LAYER_WISE!r}, a number of groups, or lists of parameter names"
_MIB: Final = 1 << 20


def plain_name(name: str) -> str:
    """A parameter's name in the model itself: without what DDP and torch.compile put before it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def read_groups(groups: object, names: Sequence[str]) -> list[list[str]] | None:
    """The names in each group, in the order in which groups become ready; None where ``groups`` is.

    ``names``: all parameters in the order of back-propagation. A number n makes n groups of equally many tensors, the
    last with what is left over (MergeComp, section 5.2, "naive partition"). Raises TypeError for what cannot be groups,
    ValueError for a number of groups out of range, an empty group, and a name that is unknown, missing or given twice.
    """
    if groups is None:
        return None
    if isinstance(groups, str):
        if groups != LAYER_WISE:
            raise ValueError(f"groups={groups!r}: {_FORM}")
        return [[name] for name in names]
    if isinstance(groups, Iterable):
        return _read_lists(groups, names)
    try:
        count = arguments.read_whole(groups, "groups")
    except TypeError:
        raise TypeError(f"groups={groups!r}: {_FORM}, got a {type(groups).__name__}") from None
    if not 1 <= count <= len(names):
        raise ValueError(f"groups={count}: {len(names)} tensors can be merged into 1 to {len(names)} groups")
    ends = (*range(0, len(names) // count * count, len(names) // count), len(names))
    return [list(names[a:b]) for a, b in pairwise(ends)]


def name_groups(groups: object, named: Sequence[tuple[str, torch.Tensor]]) -> object:
    """``groups`` as :func:`read_groups` takes them: lists of parameters, as Horovod has them, become lists of names.

    ``named``: what is exchanged, in the model's order; others in the lists are left out, as Horovod does it. What is in
    no list is a group of its own. Groups come in the order in which back-propagation has the last of each. Raises
    TypeError for a list that has parameters and something else, ValueError for a parameter that is given twice.
    """
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        return groups
    # Whoever hands in generators has them read once.
    lists = [list(g) if isinstance(g, Iterable) and not isinstance(g, str | torch.Tensor) else g for g in groups]
    if not any(isinstance(each, torch.Tensor) for group in lists if isinstance(group, list) for each in group):
        return lists
    names = [name for name, _ in reversed(named)]
    ready = {id(p): at for at, (_, p) in enumerate(reversed(named))}
    merged: list[list[int]] = []
    for i, group in enumerate(lists):
        odd = [each for each in group if not isinstance(each, torch.Tensor)] if isinstance(group, list) else [group]
        if odd:
            raise TypeError(
                f"groups[{i}]: expected parameters alone, as another group has, got a {type(odd[0]).__name__}"
            )
        merged.append(sorted(ready[id(p)] for p in group if id(p) in ready))
    given = [at for group in merged for at in group]
    if len(given) != len(set(given)):
        twice = next(at for at in given if given.count(at) > 1)
        raise ValueError(
            f"groups: each parameter belongs to one group; {names[twice]!r} is given {given.count(twice)} times"
        )
    merged += [[at] for at in sorted(set(ready.values()) - set(given))]
    return [[names[at] for at in group] for group in sorted(filter(None, merged), key=max)]


def _read_lists(groups: Iterable[object], names: Sequence[str]) -> list[list[str]]:
    lists: list[list[str]] = []
    for i, group in enumerate(groups):
        if isinstance(group, torch.Tensor):  # a parameter itself: its rows are no names
            raise TypeError(f"groups[{i}]: expected a list, of what is in one group, got a {type(group).__name__}")
        if isinstance(group, str) or not isinstance(group, Iterable):
            raise TypeError(f"groups[{i}]={group!r}: expected a list of parameter names, got a {type(group).__name__}")
        lists.append([arguments.read_text(name, f"a name in groups[{i}]") for name in group])
        if not lists[-1]:
            raise ValueError(f"groups[{i}] is empty: expected one parameter name at least")
    given = [name for group in lists for name in group]
    if odd := sorted(set(given) ^ set(names)):
        where = "is no parameter that is exchanged" if odd[0] in given else "is in no group"
        raise ValueError(f"groups: each of the {len(names)} parameters belongs to one group; {odd[0]!r} {where}")
    if len(given) != len(names):
        twice = next(name for name in given if given.count(name) > 1)
        raise ValueError(f"groups: each parameter belongs to one group; {twice!r} is named {given.count(twice)} times")
    return lists


def bucket_caps(model: torch.nn.Module, groups: Groups) -> list[float]:
    """Bucket sizes in MiB that make torch's buckets the groups: ``DDP(model, bucket_cap_mb_list=bucket_caps(...))``.

    ``groups``: as :func:`gcclient.state` takes them, lists of names in the order in which gradients become ready. Torch
    closes a bucket as soon as it holds its size, so a group's own bytes end it behind its last tensor; MiB are a power
    of two, so that the sizes are exact. They hold from the backward pass on in which torch has seen the order of
    arrival (the second; the third with a static graph; never with ``find_unused_parameters``).
    Raises ValueError for groups that cannot be (None too), an empty one, and parameters of more than one dtype or
    device, for each of which torch has buckets of its own; TypeError for what is no grouping.
    """
    named = {plain_name(n): p for n, p in reversed(list(model.named_parameters())) if p.requires_grad}
    lists = read_groups(groups, list(named))
    if not lists:
        raise ValueError(f"groups={groups!r}: {_FORM}, and a model with parameters that require gradients")
    kinds = {(p.dtype, p.device) for p in named.values()}
    if len(kinds) > 1:
        raise ValueError(
            "bucket sizes hold for parameters of one dtype on one device, got "
            + ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        )
    sizes = [sum(named[name].nbytes for name in group) for group in lists]
    if 0 in sizes:
        raise ValueError(f"torch has no bucket of no bytes, and all of group {sizes.index(0)} is empty")
    return [size / _MIB for size in sizes]
