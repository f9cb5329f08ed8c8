"""What scripts that were written for Horovod hand to the wrapper, and what parameters that nobody uses do there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import gcclient
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.wrapped import backward, equal, make_model, sections, wrap

BACKWARD = ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]


def _declared(daemon: FakeDaemon) -> tuple[list[str], tuple[int, ...]]:
    section = sections(daemon)[0].section
    return [t.name for t in section.tensors], section.cuts


def test_groups_may_be_lists_of_parameters(joined: FakeDaemon) -> None:
    model, same = make_model(), make_model()
    elsewhere = nn.Parameter(torch.ones(3))
    # As such scripts have them: in the model's order, some in none, some of another optimizer.
    groups = [list(model[0].parameters()), [model[2].weight, elsewhere, model[4].weight], [elsewhere]]
    optimizer, plain = wrap(model, groups=groups), torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    names = ["4.bias", "2.bias", "4.weight", "2.weight", "0.bias", "0.weight"]
    assert _declared(joined) == (names, (1, 2, 4))
    for step in range(2):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            backward(m, step)
            o.step()
    assert equal(model, same)


def test_parameters_that_need_no_gradient_are_in_no_group(joined: FakeDaemon) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    wrap(model, groups=[list(model[0].parameters()), list(model[2:].parameters())])
    assert _declared(joined) == (BACKWARD[:4], ())


@pytest.mark.parametrize("number", [{"num_groups": 2}, {"groups": 2}, {"groups": 2, "num_groups": 0}])
def test_a_number_of_groups_has_an_older_name(joined: FakeDaemon, number: dict[str, Any]) -> None:
    wrap(make_model(), **number)
    assert _declared(joined) == (BACKWARD, (3,))


def test_no_groups_by_the_older_name(joined: FakeDaemon) -> None:
    wrap(make_model(), num_groups=0)
    assert _declared(joined) == (BACKWARD, ())


def test_what_does_not_go_is_named(joined: FakeDaemon) -> None:
    model = make_model()
    first = model[0].weight
    for more, error, message in [
        ({"num_groups": 2, "groups": 2}, ValueError, "num_groups=2 and groups: expected one of them; groups=2 is what"),
        ({"num_groups": 7}, ValueError, "groups=7: 6 tensors can be merged into 1 to 6 groups"),
        ({"num_groups": -1}, ValueError, "num_groups=-1: expected 0 or more"),
        ({"num_groups": "2"}, TypeError, "num_groups='2': expected a whole number, got a str"),
        ({"sparse_as_dense": False}, ValueError, "sparse_as_dense=False: sparse gradients are exchanged as dense ones"),
        ({"groups": [[first], [first]]}, ValueError, "'0.weight' is given 2 times"),
        ({"groups": [[first], ["2.weight"]]}, TypeError, "groups[1]: expected parameters alone, as another group has"),
        (
            {"groups": [[first], first]},
            TypeError,
            "groups[1]: expected parameters alone, as another group has, got a Par",
        ),
        ({"groups": [first]}, TypeError, "groups[0]: expected a list, of what is in one group, got a Parameter"),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            wrap(model, **more)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("said", [{}, {"sparse_as_dense": True}, {"sparse_as_dense": None}])
def test_sparse_gradients_are_dense_ones(joined: FakeDaemon, said: dict[str, Any], overlap: bool) -> None:
    results = []
    for sparse in (True, False):
        torch.manual_seed(1)
        model = nn.Embedding(20, 6, sparse=sparse)
        optimizer = wrap(model, overlap_forward=overlap, **(said if sparse else {}))
        for step in range(3):
            optimizer.zero_grad()
            if sparse:
                with pytest.warns(UserWarning, match="the sparse gradient of 'weight' is exchanged as a dense one"):
                    model(torch.tensor([1, 3 + step, 3])).pow(2).sum().backward()
            else:
                model(torch.tensor([1, 3 + step, 3])).pow(2).sum().backward()
            optimizer.step()
        optimizer.synchronize()
        assert model.weight.grad is not None and model.weight.grad.layout is torch.strided
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_nobody_uses_does_not_move(joined: FakeDaemon, overlap: bool) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    optimizer = gcclient.DistributedOptimizer(inner, model.named_parameters(), overlap_forward=overlap)
    backward(model)  # now all of them have momentum
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    model[0](torch.ones(2, 20)).pow(2).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [True] * 2 + [False] * 4
    assert [p.grad is None for p in model.parameters()] == [False] * 2 + [True] * 4
    for p in model[2:].parameters():  # as such scripts would have it
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
