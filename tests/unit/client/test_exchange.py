"""What an optimizer's exchange pushes, and when. The fake daemon's world has one rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gcclient.timing import FIRST, FIRST_STEPS
from gcproto.manifest import USED
from gcproto.messages import DeclareDomain
from gcproto.timings import TensorTimes
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.wrapped import backward, make_model, pushes, sections, wrap


def test_parameters_are_declared_in_backward_order_and_say_who_has_gradients(joined: FakeDaemon) -> None:
    model = make_model()
    model[2].requires_grad_(False)
    wrap(model, compression="topk(ratio=0.1)")
    (domain,) = (m for m in joined.heard[-1] if isinstance(m, DeclareDomain))
    assert (domain.label, domain.ranks, domain.scoped, domain.codec) == ("optimizer.0", (0,), True, "topk(ratio=0.1)")
    assert [[t.name for t in m.section.tensors] for m in sections(joined)] == [
        ["4.bias", "4.weight", "0.bias", "0.weight"],
        [USED],
    ]


def test_a_group_goes_when_its_last_gradient_is_there(joined: FakeDaemon) -> None:
    """The blocks of 2.weight could go before 2.bias comes, but are of its group."""
    model = make_model()
    parameters = dict(model.named_parameters())
    optimizer = wrap(model, groups=[["4.bias", "4.weight"], ["2.bias", "2.weight"], ["0.bias", "0.weight"]])
    domain = next(iter(joined.domains.values()))
    blocks = domain.space.blocks[0]
    ends = [300 * 7 + 7, 300 * 300 + 300 + 300 * 7 + 7]
    second = {b.key for b in blocks if ends[0] <= b.start < ends[1]}
    assert len(second) == 2

    def heard() -> set[int]:
        return {k for lane in (0, 1) for p in joined.pushes(lane) for k in p.keys}

    def gradient(name: str) -> None:
        (parameters[name] * 2.0).sum().backward()

    gradient("2.weight")
    gradient("4.weight")
    assert heard() == set()
    gradient("2.bias")
    joined.wait(lambda: heard() == second)
    for name in ("4.bias", "0.bias", "0.weight"):
        gradient(name)
    optimizer.step()
    assert len(heard()) == sum(map(len, domain.space.blocks))


def test_blocks_without_groups_go_as_soon_as_their_bytes_are_there(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model)
    (dict(model.named_parameters())["0.weight"] * 2.0).sum().backward()
    assert not joined.pushes(0) and not joined.pushes(1)
    (dict(model.named_parameters())["2.weight"] * 2.0).sum().backward()
    assert not joined.pushes(0) and not joined.pushes(1), "the first block begins with 4.bias"
    for name in ("4.bias", "4.weight", "2.bias"):
        (dict(model.named_parameters())[name] * 2.0).sum().backward()
    joined.wait(lambda: sum(len(p.keys) for lane in (0, 1) for p in joined.pushes(lane)) == 1)
    optimizer.step()


def test_a_parameter_that_nobody_used_is_not_pushed(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model, groups="layer-wise")
    hidden = model[1](model[0](torch.ones(1, 20)))
    hidden.sum().backward()
    optimizer.step()
    assert all((p.grad is None) == name.startswith(("2", "4")) for name, p in model.named_parameters())
    domain = next(iter(joined.domains.values()))
    starts = {b.key for b in domain.space.blocks[0] if b.start >= 300 * 300 + 300 + 300 * 7 + 7}
    starts |= {b.key for b in domain.space.blocks[1]}
    joined.wait(lambda: sum(p.close for p in pushes(joined, 1)) == 2)
    assert {k for p in pushes(joined, 1) for k in p.keys} == starts


def test_a_block_shared_with_an_unused_parameter_goes_with_zeros(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model)
    for used in (range(5), range(2)):
        optimizer.zero_grad()
        x = torch.ones(1, 20)
        for i in used:
            x = model[i](x)
        x.sum().backward()
        optimizer.step()
    assert model[0].weight.grad is not None and model[2].weight.grad is None and model[4].bias.grad is None
    domain = next(iter(joined.domains.values()))
    first, *others = domain.space.blocks[0]
    # the first block of 256 KiB ends within 2.weight: nothing that was used is in it
    assert {k for p in pushes(joined, 2) for k in p.keys} == {b.key for b in (*others, *domain.space.blocks[1])}
    assert first.key not in {k for p in pushes(joined, 2) for k in p.keys}


def test_gradients_of_any_layout_and_dtype(joined: FakeDaemon) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.rows = nn.Embedding(10, 4, sparse=True)
            self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.wide = nn.Linear(4, 2).double()
            self.nothing = nn.Parameter(torch.zeros(0))

        def forward(self) -> torch.Tensor:
            picture = torch.arange(75.0).view(1, 3, 5, 5).to(memory_format=torch.channels_last)
            x = self.image(picture).mean((2, 3)) + self.rows(torch.tensor([1, 1, 5])).sum(0)
            return self.wide(x.double()).sum() + self.nothing.sum()

    model, same = Mixed(), Mixed()
    optimizer, plain = wrap(model, groups=2), torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        with pytest.warns(UserWarning, match=r"sparse gradient of 'rows\.weight'"):
            model().backward()
        same().backward()
        optimizer.step()
        plain.step()
    assert not model.image.weight.grad.is_contiguous()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_it_tells_the_daemon_of_its_gradients(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model)
    for _ in range(FIRST + FIRST_STEPS + 2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    joined.wait(lambda: sum(isinstance(m, TensorTimes) for m in joined.heard[-1]) == FIRST_STEPS)
    layers = [int(t.name.partition(".")[0]) for t in sections(joined)[0].section.tensors]
    for message in (m for m in joined.heard[-1] if isinstance(m, TensorTimes)):
        assert message.copied == sum(p.nbytes for p in model.parameters()) and message.copying > 0
        order = [layer for _, layer in sorted(zip(message.ready, layers, strict=True), key=lambda pair: pair[0])]
        assert order == [4, 4, 2, 2, 0, 0], "the last layer's gradients come first"
        assert message.between > max(message.ready) and message.forward >= 0
