"""Workers whose tensors are on another device than the CPU: the same tests, on a machine that has one.

What may live here: where a worker's tensors are made. What may not: what is tested with them.

``TEST_DEVICE=cuda`` in the environment of the tests has every worker make its models and batches there, as
``torch.set_default_device`` does for a training script.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _SameDraws(TorchFunctionMode):
    """Draws from a generator on the CPU are made there, and moved: the values are those of the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        made = given.get("generator")
        if func in (torch.rand, torch.randn, torch.randint, torch.randperm) and made is not None:
            place = given.get("device") or torch.get_default_device()
            return func(*args, **given | {"device": made.device}).to(place)
        return func(*args, **given)


def choose() -> None:
    """In a worker, once: as the environment says."""
    if name := os.environ.get("TEST_DEVICE"):
        torch.set_default_device(name)
        _SameDraws().__enter__()
