"""A parameter's gradient as it is brought to an exchange: when, what can be, and whether it stayed what it was.

What may live here: that. What may not: exchanging it (`exchange.py`, `plain_training.py`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gcclient import device
from gcclient.parameters import Parameter


@dataclass(frozen=True, slots=True, eq=False)
class Brought:
    """A gradient that was brought, at that version of it and with that `device.sample`; ``flat`` has its elements."""

    grad: torch.Tensor
    version: int
    sample: bytes
    flat: torch.Tensor


class Passes:
    """The backward passes of one DDP model, every ``passes``-th of which exchanges what all of them added up.

    Until then an optimizer's step would take what this rank alone added up, and ranks would part: where ``parameters``
    are among those of the optimizer it raises RuntimeError.
    """

    def __init__(self, passes: int, parameters: Iterable[torch.Tensor]) -> None:
        self._passes = self._left = passes
        self._parameters = tuple(parameters) if passes > 1 else ()
        if passes > 1:
            mine = weakref.ref(self)

            def check(optimizer: Optimizer, arguments: Any, more: Any) -> None:
                if (passes := mine()) is not None:
                    passes.check_whole(optimizer)

            weakref.finalize(self, register_optimizer_step_pre_hook(check).remove)

    def check_whole(self, optimizer: Optimizer) -> None:
        """Raises RuntimeError for an optimizer that is about to step what no pass has exchanged yet."""
        done = self._passes - self._left
        if not done:
            return
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in own for p in self._parameters):
            raise RuntimeError(
                f"optimizer.step() after {done} of backward_passes_per_step={self._passes} backward passes: gradients "
                "are exchanged in the last of them, and are each rank's own until then; step after every "
                f"{self._passes}-th pass only (drop_last=True where an epoch ends in between), or leave "
                "backward_passes_per_step out and run the passes before each step's last within model.no_sync()"
            )

    def exchanges(self, last: bool) -> bool:
        """Whether the pass that has a bucket now exchanges it; ``last``: the bucket is the pass's last one."""
        exchanging = self._left == 1
        if last:
            self._left = self._passes if exchanging else self._left - 1
        return exchanging


def read_gradient(parameter: Parameter) -> Brought:
    """A parameter's gradient as it is now. Raises ValueError for one of another dtype or size than its parameter."""
    grad = _dense(parameter)
    if device.DTYPES.get(grad.dtype) is not parameter.dtype or grad.shape != parameter.tensor.shape:
        raise ValueError(
            f"the gradient of {parameter.name!r} is {grad.dtype} {list(grad.shape)}, the parameter "
            f"{parameter.dtype.label} {list(parameter.tensor.shape)}: gradients are exchanged as their parameter is"
        )
    return Brought(grad, grad._version, device.sample(grad), device.flattened(grad))


def check_unchanged(brought: Mapping[Parameter, Brought]) -> None:
    """Raises RuntimeError if a gradient is not what was brought any more, as far as its version and sample tell."""
    for parameter, known in brought.items():
        grad = parameter.tensor.grad
        # What is written through .data changes no version.
        if grad is not known.grad or grad._version != known.version or device.sample(grad) != known.sample:
            raise RuntimeError(
                f"the gradient of {parameter.name!r} was changed after backward() and before it was averaged, "
                "and that would be lost: first call optimizer.synchronize(), then change it, then optimizer.step()"
            )


def _dense(parameter: Parameter) -> torch.Tensor:
    """The gradient; a sparse one is made dense, with a warning."""
    grad = parameter.tensor.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        warnings.warn(f"the sparse gradient of {parameter.name!r} is exchanged as a dense one", stacklevel=2)
        grad = parameter.tensor.grad = grad.to_dense()
    return grad
