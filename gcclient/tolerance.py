"""Whether the optimizers of this process stand gradients of which most come many steps late.

What may live here: watching which optimizers step. What may not: what follows from it (the planner's rules), wrapping
optimizers (`optimizer.py`).

What a sparsifier does not send of a gradient, error feedback brings some 1/ratio steps later, many steps' worth at
once. A momentum carries such a lump on for many more steps, and an optimizer that scales every element by its recent
size blows it up (docs/compression-hurts.md has what that costs). SGD without momentum adds the same up in another
order, and Adafactor's one scale a row and column hardly sees it; of other optimizers nothing is known.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import SGD, Adafactor, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

#: optimizers that have made a step and are still there, and whether they stood late gradients in their last one
_stepped: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
_watching = False


def watch() -> None:
    """From now on it is noticed which optimizers of torch's step, wrapped ones and those of a DDP model alike."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(_steps)
        _watching = True


def tolerant() -> bool:
    """Whether all optimizers that have made a step stand late gradients; False while none has."""
    found = list(_stepped.values())
    return bool(found) and all(found)


def _steps(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _stepped[optimizer] = _stands(optimizer)


def _stands(optimizer: Optimizer) -> bool:
    plain = isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)
    return plain or isinstance(optimizer, Adafactor)
