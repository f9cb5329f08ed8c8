"""What users call to move tensors and values unchanged: broadcasts and gathers.

What may live here: functions of `gcclient.__init__`, each a thin layer. What may not: how it is done (`broadcasts.py`,
`gather.py`).

All are bit exact for every dtype and never compressed. All ranks must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gcclient import broadcasts, gather
from gcclient.api import current_calls
from gcclient.calls import LOSSLESS
from gcclient.device import HOST


def broadcast(tensor: torch.Tensor, root_rank: int = 0, name: str | None = None) -> torch.Tensor:
    """Rank ``root_rank``'s ``tensor``, as a new one on the same device. See :func:`broadcast_`."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int = 0, name: str | None = None) -> torch.Tensor:
    """Overwrite ``tensor`` with rank ``root_rank``'s (its number at the start of the job), bit by bit, and return it.

    ``name`` is for messages only. Raises :class:`~gcclient.TensorMismatch` on every rank when shapes, dtypes, names or
    roots differ, TypeError on every rank for a tensor whose bytes are not all there is to it (sparse, DTensor),
    :class:`~gcclient.PeerLost` when the root was lost.
    """
    broadcasts.tensors(current_calls(), [(name or "(unnamed)", tensor)], root_rank)
    return tensor


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0) -> None:
    """Overwrite the tensors of ``params`` (a state_dict, or named parameters) with rank ``root_rank``'s, bit by bit.

    ``root_rank``: its number at the start of the job. Raises :class:`~gcclient.TensorMismatch` on every rank when
    names, shapes or dtypes differ, TypeError on every rank for a tensor whose bytes are not all there is to it (sparse,
    DTensor), :class:`~gcclient.PeerLost` when the root was lost.
    """
    items = params.items() if isinstance(params, Mapping) else params
    tensors = [(str(n), t) for n, t in items if isinstance(t, torch.Tensor)]
    broadcasts.tensors(current_calls(), tensors, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Make ``optimizer``'s state and options (learning rates, momentum buffers, ...) those of rank ``root_rank``.

    State that only the root has is created here. Tensors travel bit by bit, everything else as JSON: numbers,
    strings, booleans, None and lists of them; anything else raises TypeError on every rank.
    """
    broadcasts.optimizer_state(current_calls(), optimizer, root_rank)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Rank ``root_rank``'s ``obj``; what the others give is not looked at.

    Nothing is pickled: numbers, strings, booleans, None, tensors, and lists, tuples and dictionaries of them (with keys
    that are text or whole numbers) can be sent; anything else is a TypeError on every rank. Tensors arrive on the CPU.
    ``name`` is taken for Horovod's sake. Raises :class:`~gcclient.PeerLost` when the root was lost.
    """
    return broadcasts.value(current_calls(), obj, root_rank)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Every rank's ``tensor``, in rank order one after the other along the first dimension, on the same device.

    First dimensions may differ and be 0; all else must not (:class:`~gcclient.TensorMismatch` on every rank). The
    result is the same bytes on every rank. It passes through the daemons as a sum in which each rank has zeros in the
    others' places, so it costs what an uncompressed average of the result's size does. ``name`` is taken for Horovod's
    sake. Raises ValueError for a tensor without dimensions and a sparse one, TypeError for another whose bytes are not
    all there is to it (DTensor), :class:`~gcclient.PeerLost` when a rank is lost meanwhile.
    """
    return gather.tensors(current_calls(), tensor)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's ``obj``, in rank order; what can be sent is what :func:`broadcast_object` sends."""
    return gather.values(current_calls(), obj)


def barrier() -> None:
    """Return once every rank has called it. Raises the job's failure."""
    here = torch.ones(1, dtype=torch.int64, device=HOST)
    current_calls().start(here, "gcclient.barrier", average=False, in_place=True, codec=LOSSLESS).finish()
