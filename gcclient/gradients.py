"""A parameter's gradient as it is brought to an exchange: when, what can be, and whether it stayed what it was.

What may live here: that. What may not: exchanging it (`exchange.py`, `plain_training.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

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
    """The backward passes of one DDP model, every ``passes``-th of which exchanges what all of them added up."""

    def __init__(self, passes: int) -> None:
        self._passes = self._left = passes

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
