"""The groups in which `fully_shard` reduces parameters, and which of them patterns of names choose.

What may live here: names of groups and their parameters, matching them. What may not: how a group is exchanged
(`attaching.py`, `collectives.py`).

Of each module that `fully_shard` was applied to, torch reduces the parameters that no such module inside it has, as one
flat tensor. What is said of names therefore holds for a whole group or for nothing of it.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gcclient import arguments
from gcclient.grouping import plain_name

ROOT = "(root)"


@dataclass(frozen=True, slots=True, eq=False)
class ShardGroup:
    """Parameters that are reduced as one. ``unit``: torch's object for them; ``module``: the name of the module that
    they are of, ROOT for the outermost; ``parameters``: the names of each, of which a tied one has several."""

    unit: Any
    module: str
    parameters: tuple[tuple[str, ...], ...]


def shard_groups(module: torch.nn.Module) -> list[ShardGroup]:
    """All in ``module``, in the order of its modules, which is the same on every rank; empty: there are none."""
    names: dict[int, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(id(part), []).append(name)
    found = []
    for name, part in module.named_modules():
        if not hasattr(part, "set_all_reduce_hook"):
            continue
        for unit in _units(part._get_fsdp_state()):
            parameters = tuple(_names_of(p._module_info, names) for p in unit.fsdp_params)
            found.append(ShardGroup(unit, name or ROOT, parameters))
    return found


def _units(state: Any) -> list[Any]:
    """Torch's objects for what one module reduces together. Before 2.12 a module had one, or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _names_of(info: Any, names: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return tuple(
        plain_name(f"{module}.{name}" if module else name)
        for owner, name in owners
        for module in names.get(id(owner), ())
    )


def chosen(patterns: Iterable[str], groups: Sequence[ShardGroup], source: str) -> list[ShardGroup]:
    """Those groups whose module's name, or the names of all of whose parameters, match one of ``patterns`` (globs).

    ``source``: what the patterns were given as. Raises ValueError, which names the group, where they match some of a
    group's parameters only; warns of a pattern that matches nothing.
    """
    patterns = tuple(patterns)
    for pattern in patterns:
        if not any(_matches(name, (pattern,)) for group in groups for name in _all_names(group)):
            warnings.warn(
                f"{source}: {pattern!r} matches the name of no parameter, nor of a fully_shard group", stacklevel=3
            )
    return [group for group in groups if _whole(group, patterns, source)]


def _whole(group: ShardGroup, patterns: Sequence[str], source: str) -> bool:
    """Whether all of a group is chosen, rather than nothing of it."""
    if _matches(plain_name(group.module), patterns):
        return True
    inside = [any(_matches(name, patterns) for name in names) for names in group.parameters]
    if all(inside) or not any(inside):
        return any(inside)
    some = [names[0] for names, matches in zip(group.parameters, inside, strict=True) if matches]
    rest = [names[0] for names, matches in zip(group.parameters, inside, strict=True) if not matches]
    raise ValueError(
        f"{source}: {', '.join(map(repr, patterns))} would split the fully_shard group {group.module!r}, which is "
        f"exchanged as one tensor: {_some(some)} match and {_some(rest)} do not. Name the group ({group.module!r}) or "
        "nothing of it, or apply fully_shard to a module that has those parameters alone"
    )


def codecs(compression: object, groups: Sequence[ShardGroup]) -> dict[ShardGroup, str]:
    """The codec of each group by ``compression``: one spec for all, None (the daemon's, here empty), or specs by
    pattern, of which the last that matches counts. Raises TypeError and ValueError."""
    if not isinstance(compression, Mapping):
        codec = "" if compression is None else arguments.read_codec(compression)
        return dict.fromkeys(groups, codec)
    found = dict.fromkeys(groups, "")
    for pattern, spec in compression.items():
        (pattern,), codec = arguments.read_patterns([pattern], "compression"), arguments.read_codec(spec)
        found |= dict.fromkeys(chosen([pattern], groups, "compression"), codec)
    return found


def _all_names(group: ShardGroup) -> list[str]:
    return [plain_name(group.module), *(name for names in group.parameters for name in names)]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: Sequence[str]) -> str:
    """A few of them: a group may have hundreds."""
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
