"""What users call to save and load what the daemons hold back: the names that torch has for it.

What may live here: functions of `gcclient.__init__`, each a thin layer. What may not: how it is done
(`checkpoint.py`), what a checkpoint holds (`saved.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from gcclient import node_states, saved
from gcclient.api import joined
from gcclient.device import HOST
from gcclient.plain import Plain

log = logging.getLogger("gcclient")


def state_dict() -> dict[str, Any]:
    """What a later job needs to go on from here bit by bit: residuals and codec states, the plan, what chance draws
    from.

    Tensors on the CPU, and numbers and JSON texts, under names made of ranks and tensors' names, which
    ``torch.distributed.checkpoint`` and ``torch.save`` take. Every rank's is another one and has to be saved; a node's
    first rank has what its node held back, float32 as large as the model's gradients at most, and as much again for a
    momentum; each rank has what it held back itself (``node_codec``). Call it on all ranks between the same two steps.
    Waits until the last step is settled. With GC_DISABLE there is nothing to save.

    Raises RuntimeError in the middle of a step, :class:`~gcclient.StepTimeout` where a step is not settled within the
    job's deadline, and the job's failure.
    """
    session = joined()
    return {"format": saved.FORMAT} if isinstance(session, Plain) else session.checkpoints.collect()


def load_state_dict(state: Mapping[str, Any], strict: bool = True) -> None:
    """Go on from what :func:`state_dict` returned on this rank in an earlier job.

    Call it after ``init()`` and before models, optimizers and tensors are declared, on all ranks: each is given what
    was saved of it when it is declared. Nothing is exchanged here. ``strict=False``: what does not fit (other ranks,
    nodes, tensors) is dropped with a warning, and counted (``gcclient.stats()["states_dropped"]``).

    Raises :class:`~gcclient.StateMismatch` for what is no such state, and where its domain is declared already (but
    where that goes on from this very checkpoint, which is loaded again for others). What does not fit is found, and
    raised as such, where the model is declared, before anything of it is.
    """
    session = joined()
    found, within = saved.read(state, session.me.rank), node_states.read(state, session.me.rank)
    if isinstance(session, Plain):
        log.info("GC_DISABLE=1: what was held back in %d process group(s) is not loaded", len(found))
    else:
        session.checkpoints.load(found, within, strict)


def state_template(metadata: Any, prefix: str = "gradcomm") -> dict[str, Any]:
    """Room for what this rank needs of a checkpoint that ``torch.distributed.checkpoint`` has written, for its
    ``load``.

    That loads into what it is given, and how much a daemon held back is known from the checkpoint alone. ``metadata``:
    what ``FileSystemReader(path).read_metadata()`` returns. ``prefix``: the key under which :func:`state_dict` was
    saved.
    """
    rank = joined().me.rank
    names = metadata.planner_data or {}
    template: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        path = tuple(names.get(name, ()))
        if len(path) == 2 and path[0] == prefix and saved.is_for(path[1], rank):
            size = getattr(stored, "size", None)
            template[path[1]] = "" if size is None else torch.empty(size, dtype=stored.properties.dtype, device=HOST)
    return template
