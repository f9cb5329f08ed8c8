"""Reductions of a backward pass as one step, in a world of one: when a step begins and ends, what is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gcclient
from gcclient import timing
from gcclient.api import current
from gcclient.collectives import Collectives
from gcclient.passes import Passes
from gcproto.timings import TensorTimes
from tests.unit.client.fake import FakeDaemon


@pytest.fixture
def passes(joined: FakeDaemon) -> Passes:
    collectives = Collectives(current(), (0,))
    return Passes(collectives, collectives.domain("fsdp", "fp16", scoped=True))


class Reduced(torch.autograd.Function):
    """Reduces its gradient, and waits for that, as torch does with a module's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passes: Passes, name: str) -> torch.Tensor:
        ctx.passes, ctx.name = passes, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        if ctx.name == "broken":
            raise ZeroDivisionError
        grad = grad.clone()
        ctx.passes.start(grad, True, ctx.name).finish()
        return grad, None, None


def _backward(passes: Passes, *names: str) -> torch.Tensor:
    """A pass that reduces these, the last first."""
    x = torch.ones(5, requires_grad=True)
    y: Any = x
    for name in names:
        y = Reduced.apply(y * 2, passes, name)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_backward_pass_is_a_step_once_its_tensors_are_known(passes: Passes) -> None:
    domain, ends = passes.domain, []
    for _ in range(3):
        assert _backward(passes, "a", "b", "c").tolist() == [8.0] * 5
        assert domain.closed == domain.step, "a checkpoint may follow"
        ends.append(domain.step)
    assert ends == [3, 4, 5]
    _backward(passes, "a", "c")
    _backward(passes, "a", "new", "b")
    assert domain.step == 8, "what is new is declared between two steps"
    assert gcclient.stats()["steps"] == 8 and gcclient.stats()["calls"] == 14


def test_a_tensor_that_is_reduced_twice_begins_another_step(passes: Passes) -> None:
    _backward(passes, "a", "b")
    assert passes.domain.step == 2
    assert _backward(passes, "a", "b", "a").tolist() == [8.0] * 5
    assert (passes.domain.step, passes.domain.closed) == (4, 4)


def test_averages_and_sums_are_not_in_one_step_nor_what_is_in_no_pass(passes: Passes) -> None:
    _backward(passes, "a", "b")
    for average in (True, False, True):
        tensor = torch.arange(5.0)
        passes.start(tensor, average, "a").finish()
        assert tensor.tolist() == [0, 1, 2, 3, 4]
    assert (passes.domain.step, passes.domain.closed) == (5, 5)


def test_a_pass_that_ends_by_an_exception_is_over_with_the_next(passes: Passes) -> None:
    _backward(passes, "a", "b")
    with pytest.raises(ZeroDivisionError):
        _backward(passes, "broken", "b")
    assert (passes.domain.step, passes.domain.closed) == (3, 2)
    assert _backward(passes, "a", "b").tolist() == [4.0] * 5
    assert (passes.domain.step, passes.domain.closed) == (4, 4)


def test_steps_are_timed_as_a_models_are(joined: FakeDaemon, passes: Passes) -> None:
    for _ in range(timing.FIRST + 1):
        _backward(passes, "a", "b", "c")
    last = passes.domain.step
    joined.wait(lambda: any(isinstance(m, TensorTimes) and m.step == last for m in joined.heard[-1]))
    found = [m for m in joined.heard[-1] if isinstance(m, TensorTimes)]
    assert {m.domain for m in found} == {passes.domain.id}
    for m in found:
        c, b, a = m.ready  # as declared: the last first
        assert 0 == c <= b <= a
        assert m.copied == 3 * 20 and m.copying >= 0
