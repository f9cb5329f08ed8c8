"""What `fully_shard` leaves of itself in older torch: the same objects under other names, or not there.

What may live here: making a sharded model look so while gcclient looks at it. What may not: tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

#: what torch from 2.12 on calls a module's groups
GROUPS: Final = "_fsdp_param_groups"


@contextmanager
def older(net: nn.Module, version: str) -> Iterator[None]:
    """Within it ``net`` is as torch 2.11 (and 2.9, 2.10) has it, where a module has one group, by a name of its own, or
    as 2.8, where reduce-scatters cannot be replaced either. Torch itself cannot train with it then, unless it is as old
    itself."""
    states = [part._get_fsdp_state() for part in net.modules() if isinstance(part, FSDPModule)]
    groups = {state: state.__dict__.pop(GROUPS) for state in states if GROUPS in state.__dict__}
    with ExitStack() as undo:
        if groups:
            undo.callback(lambda: [setattr(state, GROUPS, all_of_it) for state, all_of_it in groups.items()])
            one = property(lambda state: groups[state][0])
            undo.enter_context(mock.patch.object(FSDPState, "_fsdp_param_group", one, create=True))
            undo.enter_context(mock.patch.object(FSDPModule, "set_all_reduce_hook", _set_all_reduce_hook))
        if version == "2.8":
            units: list[Any] = [unit for state in states if (unit := state._fsdp_param_group) is not None]
            for unit in units:
                undo.callback(setattr, unit, "_reduce_scatter_comm", unit.__dict__.pop("_reduce_scatter_comm"))
            undo.callback(setattr, FSDPModule, "set_custom_reduce_scatter", FSDPModule.set_custom_reduce_scatter)
            del FSDPModule.set_custom_reduce_scatter
        yield


def _set_all_reduce_hook(module: Any, hook: Any) -> None:
    module._get_fsdp_state()._fsdp_param_group._all_reduce_hook = hook
