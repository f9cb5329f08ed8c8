"""Which optimizers stand late gradients, and that a process notices those that step.

What may live here: tests of `gcclient/tolerance.py`. What may not: the message that says so (`test_timing.py`).
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import gcclient
from gcclient import tolerance
from tests.unit.client.fake import FakeDaemon

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


class Matrices(nn.Module):
    """Of which Adafactor scales rows and columns; ``kernels``: of convolutions besides, which hold most elements."""

    def __init__(self, kernels: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(64, 64))
        self.b = nn.Parameter(torch.ones(64))
        if kernels:
            self.c = nn.Parameter(torch.ones(128, 128, 3, 3))


class Extended(torch.optim.SGD):
    """Somebody's own: what it does in a step besides is not known."""


@dataclass
class Unhashable(torch.optim.SGD):
    rate: float

    def __post_init__(self) -> None:
        super().__init__(list(model().parameters()), self.rate)


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
        (lambda _: torch.optim.Adafactor(Matrices(kernels=False).parameters()), True),
        (lambda _: torch.optim.Adafactor(Matrices(kernels=True).parameters()), False),
        (lambda p: torch.optim.Adafactor([nn.Parameter(torch.ones(64))]), False),
        (lambda p: Extended(p, 0.1), False),
        (lambda _: Unhashable(0.1), False),
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


def test_a_compiled_step_is_noticed() -> None:
    plain, adam = torch.optim.SGD(model().parameters(), 0.1), torch.optim.AdamW(model().parameters(), 0.1)
    torch.compile(plain.step, backend="eager")()
    assert tolerance.tolerant()
    torch.compile(adam.step, backend="eager")()
    assert not tolerance.tolerant()


def test_a_wrapped_optimizer_counts_as_what_it_wraps(alone: FakeDaemon) -> None:
    for momentum, overlap in ((0.0, False), (0.0, True), (0.9, True), (0.9, False)):
        tolerance._stepped.clear()
        net = nn.Linear(20, 3)
        inner = torch.optim.SGD(net.parameters(), 0.1, momentum=momentum)
        wrapped = gcclient.DistributedOptimizer(inner, net.named_parameters(), overlap_forward=overlap)
        net(torch.ones(2, 20)).sum().backward()
        wrapped.step()
        assert tolerance.tolerant() is (not momentum), (momentum, overlap)


def test_steps_of_several_threads_are_noticed_while_others_ask() -> None:
    made = [torch.optim.SGD(model().parameters(), 0.1) for _ in range(200)]
    threads = [threading.Thread(target=lambda part=made[i::4]: [o.step() for o in part]) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tolerance.tolerant()
    assert tolerance.tolerant() and len(tolerance._stepped) == len(made)


def test_watching_twice_is_watching_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "register_optimizer_step_pre_hook", lambda _: pytest.fail("watched twice"))
    tolerance.watch()
