"""What `fully_shard` leaves of itself in older torch: the same objects under other names, or not there.

What may live here: making a sharded model look so while gcclient looks at it. What may not: tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


@contextmanager
def older(net: nn.Module, version: str) -> Iterator[None]:
    """Within it ``net`` is as torch 2.11 (and 2.9, 2.10) has it, where a module has one group, by a name of its own, or
    as 2.8, where reduce-scatters cannot be replaced either. Torch itself cannot train with it then."""
    states = [part._get_fsdp_state() for part in net.modules() if isinstance(part, FSDPModule)]
    groups = {state: state.__dict__.pop("_fsdp_param_groups") for state in states}
    units = [group for (group,) in groups.values()]
    kept = [(unit, unit.__dict__.pop("_reduce_scatter_comm")) for unit in units if version == "2.8"]
    setter: Any = FSDPModule.set_custom_reduce_scatter
    try:
        with (
            mock.patch.object(FSDPState, "_fsdp_param_group", property(lambda state: groups[state][0])),
            mock.patch.object(FSDPModule, "set_all_reduce_hook", _set_all_reduce_hook),
        ):
            if version == "2.8":
                del FSDPModule.set_custom_reduce_scatter
            yield
    finally:
        FSDPModule.set_custom_reduce_scatter = setter  # type: ignore[method-assign]
        for unit, comm in kept:
            unit._reduce_scatter_comm = comm
        for state, all_of_it in groups.items():
            state._fsdp_param_groups = all_of_it


def _set_all_reduce_hook(module: Any, hook: Any) -> None:
    module._get_fsdp_state()._fsdp_param_group._all_reduce_hook = hook
