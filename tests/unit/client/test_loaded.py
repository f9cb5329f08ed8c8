"""States that are loaded into a wrapped optimizer, or into the one it was made from: both have them, and schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import gcclient
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.wrapped import backward, equal, make_model

# Torch asks the optimizer that a scheduler was made for whether it has stepped.
pytestmark = pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")


class _Own(torch.optim.SGD):
    """Loads by itself, and calls nobody's hooks."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        self.param_groups = [{**new, "params": old["params"]} for old, new in groups]


class _Shown(torch.optim.Optimizer):
    """Shows another optimizer's groups and state as its own, and has nothing of torch's."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def step(self, closure: Any = None) -> None:
        self.base.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.Adam([{"params": weights}, {"params": biases, "lr": 0.02}], 0.1)


def _saved(steps: int = 2) -> dict[str, Any]:
    """The state of an optimizer whose learning rates fell, as a checkpoint or another rank has it."""
    model = make_model()
    plain = _adam(model)
    scheduler = StepLR(plain, 1, 0.5)
    for step in range(steps):
        backward(model, step)
        plain.step()
        scheduler.step()
    return plain.state_dict()


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("by", ["wrapper", "inner"])
def test_both_have_what_either_loads(joined: FakeDaemon, by: str, overlap: bool) -> None:
    model = make_model()
    inner = _adam(model)
    optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters(), overlap_forward=overlap)
    groups, state, dicts, params = (
        inner.param_groups,
        inner.state,
        list(inner.param_groups),
        [group["params"] for group in inner.param_groups],
    )
    (optimizer if by == "wrapper" else inner).load_state_dict(_saved())
    for each in (optimizer, inner):
        assert each.param_groups is groups and each.state is state
        assert all(a is b for a, b in zip(groups, dicts, strict=True))
        assert all(group["params"] is own for group, own in zip(groups, params, strict=True))
        assert _rates(each) == [0.025, 0.005]
        assert {float(s["step"]) for s in each.state.values()} == {2.0}
    assert set(state) == set(model.parameters())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("by", ["wrapper", "inner"])
@pytest.mark.parametrize("made_for", ["wrapper", "inner"])
def test_schedulers_steer_what_is_stepped(joined: FakeDaemon, made_for: str, by: str, overlap: bool) -> None:
    model, same = make_model(), make_model()
    inner, plain = _adam(model), _adam(same)
    scheduler = StepLR(inner, 1, 0.5) if made_for == "inner" else None
    optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters(), overlap_forward=overlap)
    scheduler = scheduler or StepLR(optimizer, 1, 0.5)
    other = StepLR(plain, 1, 0.5)
    hooked: list[int] = []
    if not overlap:
        optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for load in (True, False, True):
        for m, o, s in ((model, optimizer, scheduler), (same, plain, other)):
            if load:
                (inner if m is model and by == "inner" else o).load_state_dict(_saved())
            backward(m, 3)
            o.step()
            s.step()
            o.zero_grad()
        assert _rates(optimizer) == _rates(inner) == _rates(plain)
    assert _rates(plain) == [0.0125, 0.0025]
    assert equal(model, same)
    assert len(hooked) == (0 if overlap else 3)


def test_other_hooks_see_what_is_shared(joined: FakeDaemon) -> None:
    model = make_model()
    inner = _adam(model)
    groups, seen = inner.param_groups, []
    inner.register_load_state_dict_post_hook(lambda o: seen.append(("before", o.param_groups is groups, _rates(o))))
    optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters())
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(("after", o.param_groups is groups, _rates(o))))
    optimizer.load_state_dict(_saved())
    assert seen == [("before", True, [0.025, 0.005]), ("after", True, [0.025, 0.005])]


def test_optimizers_that_load_in_a_way_of_their_own(joined: FakeDaemon) -> None:
    model = make_model()
    inner: torch.optim.Optimizer = _Own(model.parameters(), 0.1)
    optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters())
    given = optimizer.state_dict()
    given["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(given)
    assert optimizer.param_groups is inner.param_groups and _rates(inner) == [0.5]
    shown = _Shown(torch.optim.SGD(model.parameters(), 0.1))
    optimizer = gcclient.DistributedOptimizer(shown, model.named_parameters())
    optimizer.load_state_dict(given)
    assert optimizer.param_groups is shown.param_groups and _rates(shown) == [0.5]


def test_a_state_that_does_not_fit_changes_nothing(joined: FakeDaemon) -> None:
    model = make_model()
    inner = _adam(model)
    optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters())
    backward(model)
    optimizer.step()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(torch.optim.Adam(make_model().parameters()).state_dict())
    assert optimizer.param_groups is inner.param_groups and _rates(inner) == [0.1, 0.02]
    assert {float(s["step"]) for s in inner.state.values()} == {1.0}


def test_steps_that_are_left_come_before_what_the_inner_optimizer_loads(joined: FakeDaemon) -> None:
    model, same = make_model(), make_model()
    inner, plain = _adam(model), _adam(same)
    optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters(), overlap_forward=True)
    for m, o in ((model, optimizer), (same, plain)):
        backward(m)
        o.step()
        (inner if m is model else plain).load_state_dict(_saved())
        backward(m, 1)
        o.step()
    assert equal(model, same)
    assert {float(s["step"]) for s in inner.state.values()} == {3.0}
