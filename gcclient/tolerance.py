"""Whether the optimizers of this process stand gradients of which most come many steps late.

What may live here: watching which optimizers step. What may not: what follows from it (the planner's rules), wrapping
optimizers (`optimizer.py`).

What a sparsifier does not send of a gradient, error feedback brings some 1/ratio steps later, many steps' worth at
once. A momentum carries such a lump on for many more steps, and an optimizer that scales every element by its recent
size blows it up (docs/compression-hurts.md has what that costs). SGD without momentum adds the same up in another
order, and Adafactor's one scale a row and column hardly sees it; of other optimizers nothing is known.
"""

from __future__ import annotations

import threading
from typing import Any, Final
from weakref import ref

import torch
from torch.optim import SGD, Adafactor, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

#: Classes from elsewhere may do more in a step than what they derive from.
_KNOWN_MODULES: Final = frozenset({"torch", "gcclient", "builtins"})
#: Adafactor scales rows and columns of a tensor's last two dimensions if both are so long, by about so many elements at
#: once; kernels of convolutions and vectors by next to one.
_FACTORED: Final = 16
#: and such tensors have to hold so much of the elements.
_MOST: Final = 0.9

_lock = threading.Lock()
#: optimizers that have made a step, and whether they stood late gradients in their last one, by id: those of others may
#: not be hashable
_stepped: dict[int, tuple[ref[Optimizer], bool]] = {}
_watching = False


def watch() -> None:
    """From now on it is noticed which optimizers of torch's step, wrapped ones and those of a DDP model alike."""
    global _watching
    if not _watching:
        register_optimizer_step_pre_hook(steps)
        _watching = True


def tolerant() -> bool:
    """Whether all optimizers that have made a step stand late gradients; False while none has."""
    with _lock:
        for number in [n for n, (optimizer, _) in _stepped.items() if optimizer() is None]:
            del _stepped[number]
        return bool(_stepped) and all(stands for _, stands in _stepped.values())


@torch.compiler.disable
def steps(optimizer: Optimizer, *_: Any) -> None:
    """``optimizer`` makes a step. Called by torch; by who steps in another way, too."""
    with _lock:
        known, stood = _stepped.get(id(optimizer), (None, False))
    # A schedule may change a momentum; what Adafactor holds hardly changes, and looking at all of it takes a while.
    again = known is None or known() is not optimizer or isinstance(optimizer, SGD)
    stands = _stands(optimizer) if again else stood
    with _lock:
        _stepped[id(optimizer)] = ref(optimizer), stands


def _stands(optimizer: Optimizer) -> bool:
    if not all(t.__module__.partition(".")[0] in _KNOWN_MODULES for t in type(optimizer).__mro__):
        return False
    if isinstance(optimizer, SGD):
        return not any(group["momentum"] for group in optimizer.param_groups)
    return isinstance(optimizer, Adafactor) and _factored(optimizer) >= _MOST


def _factored(optimizer: Optimizer) -> float:
    """The share of the elements in tensors that Adafactor scales by rows and columns."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    long = sum(p.numel() for p in tensors if p.dim() > 1 and min(p.shape[-2:]) >= _FACTORED)
    return long / max(sum(p.numel() for p in tensors), 1)
