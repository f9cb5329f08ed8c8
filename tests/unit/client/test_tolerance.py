"""Which optimizers stand late gradients, and that a process notices those that step.

What may live here: tests of `gcclient/tolerance.py`. What may not: the message that says so (`test_timing.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gcclient import tolerance

Parameters = Any


@pytest.fixture(autouse=True)
def no_others() -> Iterator[None]:
    """What other tests' optimizers did does not count, nor what these did for others."""
    before = dict(tolerance._stepped)
    tolerance._stepped.clear()
    tolerance.watch()
    yield
    tolerance._stepped.clear()
    tolerance._stepped.update(before)


def model() -> nn.Linear:
    made = nn.Linear(2, 2)
    made(torch.ones(1, 2)).sum().backward()
    return made


class Own(torch.optim.Optimizer):
    """An optimizer of somebody's own, of which nothing is known."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("make", "stands"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), True),
        (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1), True),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), False),
        (
            lambda p: torch.optim.SGD([{"params": [x], "momentum": m} for x, m in zip(p, (0.0, 0.9), strict=True)], 1),
            False,
        ),
        (torch.optim.Adafactor, True),
        (lambda p: torch.optim.AdamW(p, 0.1), False),
        (lambda p: torch.optim.RMSprop(p, 0.1), False),
        (Own, False),
    ],
)
def test_optimizers(make: Callable[[Parameters], torch.optim.Optimizer], stands: bool) -> None:
    optimizer = make(list(model().parameters()))
    assert not tolerance.tolerant(), "it has not stepped"
    optimizer.step()
    assert tolerance.tolerant() is stands


def test_all_that_step_have_to_stand_late_gradients() -> None:
    plain, pushed = (torch.optim.SGD(model().parameters(), 0.1, momentum=m) for m in (0.0, 0.9))
    plain.step()
    assert tolerance.tolerant()
    pushed.step()
    assert not tolerance.tolerant()
    pushed.param_groups[0]["momentum"] = 0.0
    assert not tolerance.tolerant(), "its last step was made with momentum"
    pushed.step()
    assert tolerance.tolerant()


def test_an_optimizer_that_is_gone_does_not_count() -> None:
    plain, pushed = (torch.optim.SGD(model().parameters(), 0.1, momentum=m) for m in (0.0, 0.9))
    plain.step()
    pushed.step()
    del pushed
    gc.collect()
    assert tolerance.tolerant()


def test_watching_twice_is_watching_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "register_optimizer_step_pre_hook", lambda _: pytest.fail("watched twice"))
    tolerance.watch()
