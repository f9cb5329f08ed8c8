"""What torch does to get and set the state of a wrapped optimizer is no step of training. A world of one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

import gcclient
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.wrapped import backward, equal, make_model, pushes

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
MADE: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, 0.1),
}


def _wrapped(model: nn.Module, make: Make, overlap: bool) -> Any:
    return gcclient.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), overlap_forward=overlap, warmup_steps=1
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_making_a_state_exchanges_nothing(joined: FakeDaemon, kind: str, overlap: bool) -> None:
    model, same = make_model(), make_model()
    optimizer, plain = _wrapped(model, MADE[kind], overlap), MADE[kind](same.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, plain)]  # each patches step()
    assert str(get_state_dict(model, optimizer)) == str(get_state_dict(same, plain))
    assert gcclient.stats()["steps"] == 0 and not pushes(joined, 1)
    for step in range(3):
        for m, o in ((model, optimizer), (same, plain)):
            backward(m, step)
            o.step()
            o.zero_grad()
            get_state_dict(m, o)
        for scheduler in schedulers:
            scheduler.step()
        assert gcclient.stats()["steps"] == step + 1
    assert equal(model, same)
    assert str(get_optimizer_state_dict(model, optimizer)) == str(get_optimizer_state_dict(same, plain))


def test_a_state_of_which_every_part_is_awaited_is_not_made_again(joined: FakeDaemon) -> None:
    model, same = make_model(), make_model()
    optimizer, plain = _wrapped(model, MADE["adam"], overlap=True), MADE["adam"](same.parameters())
    states = []
    for m, o in ((model, optimizer), (same, plain)):
        backward(m)
        o.step()
        o.zero_grad()
        kept: Any = get_optimizer_state_dict(m, o)["state"]
        states.append(str(sorted(kept.items())))
    assert states[0] == states[1]
    assert all(p.grad is None for p in model.parameters()) and gcclient.stats()["steps"] == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_what_was_got_is_set(joined: FakeDaemon, kind: str, overlap: bool) -> None:
    model, again = make_model(), make_model()
    optimizer = _wrapped(model, MADE[kind], overlap)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    weights, states = copy.deepcopy(get_state_dict(model, optimizer))
    other = _wrapped(again, MADE[kind], overlap)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=states)
    assert gcclient.stats()["steps"] == 1
    assert equal(model, again)
    for m, o in ((model, optimizer), (again, other)):
        backward(m, 1)
        o.step()
    assert equal(model, again) and gcclient.stats()["steps"] == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_of_training_that_looks_like_one_is_exchanged(joined: FakeDaemon, overlap: bool) -> None:
    """No gradient came from a backward pass, all are zeros, and a warm-up begins with 0: other ranks may wait."""
    model = make_model()
    optimizer = _wrapped(model, MADE["sgd"], overlap)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    assert optimizer.param_groups[0]["lr"] == 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    joined.wait(lambda: sum(p.close for p in pushes(joined, 1)) == 2)
