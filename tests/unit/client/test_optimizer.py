"""The optimizer wrapper: when it pushes what, and what it refuses. The fake daemon's world has one rank."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn

import gcclient
from gcclient.timing import FIRST, FIRST_STEPS
from gcproto import messages
from gcproto.lane_messages import Push
from gcproto.manifest import USED
from gcproto.messages import DeclareDomain, DeclareSection
from gcproto.timings import TensorTimes
from gcproto.wire import Flag
from tests.unit.client.fake import FakeDaemon


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 7))


def _wrap(model: nn.Module, rate: float = 0.1, **more: object) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    return gcclient.DistributedOptimizer(optimizer, model.named_parameters(), **more)


def _backward(model: nn.Module, seed: int = 0) -> None:
    model(torch.randn(4, 20, generator=torch.Generator().manual_seed(seed))).pow(2).sum().backward()


def _equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def _sections(daemon: FakeDaemon) -> list[DeclareSection]:
    return [m for m in daemon.heard[-1] if isinstance(m, DeclareSection)]


def _pushes(daemon: FakeDaemon, step: int) -> list[Push]:
    return [p for lane in (0, 1) for p in daemon.pushes(lane) if p.step == step]


def test_it_is_an_optimizer_of_the_same_kind(joined: FakeDaemon) -> None:
    model = _model()
    plain = torch.optim.Adam(model.parameters(), 0.1)
    _backward(model)
    plain.step()
    plain.zero_grad()
    optimizer = gcclient.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state_dict()["state"][1]["step"] == 1
    optimizer.load_state_dict(plain.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    _backward(model)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_parameters_are_declared_in_backward_order_and_say_who_has_gradients(joined: FakeDaemon) -> None:
    model = _model()
    model[2].requires_grad_(False)
    _wrap(model, compression="topk(ratio=0.1)")
    (domain,) = (m for m in joined.heard[-1] if isinstance(m, DeclareDomain))
    assert (domain.label, domain.ranks, domain.scoped, domain.codec) == ("optimizer.0", (0,), True, "topk(ratio=0.1)")
    assert [[t.name for t in m.section.tensors] for m in _sections(joined)] == [
        ["4.bias", "4.weight", "0.bias", "0.weight"],
        [USED],
    ]


@pytest.mark.parametrize(
    ("groups", "names", "cuts"),
    [
        (None, ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"], ()),
        ("layer-wise", ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"], (1, 2, 3, 4, 5)),
        (2, ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"], (3,)),
        (
            [["2.bias", "4.weight"], ["4.bias"], ["0.bias", "2.weight", "0.weight"]],
            ["2.bias", "4.weight", "4.bias", "0.bias", "2.weight", "0.weight"],
            (2, 3),
        ),
    ],
)
def test_training_is_what_it_is_without_a_wrapper(
    joined: FakeDaemon, groups: object, names: list[str], cuts: tuple[int, ...]
) -> None:
    model, same = _model(), _model()
    optimizer, plain = _wrap(model, groups=groups), torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    section = _sections(joined)[0].section
    assert ([t.name for t in section.tensors], section.cuts) == (names, cuts)
    domain = next(iter(joined.domains.values()))
    every = {b.key for blocks in domain.space.blocks for b in blocks}
    for step in (1, 2, 3):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            _backward(m, step)
            o.step()
        joined.wait(lambda step=step: sum(p.close for p in _pushes(joined, step)) == 2)
        pushes = _pushes(joined, step)
        assert sorted(k for p in pushes for k in p.keys) == sorted(every)
        assert all(p.flags == Flag.AVERAGE for p in pushes)
    assert _equal(model, same)
    assert gcclient.stats()["steps"] == 3


def test_a_group_goes_when_its_last_gradient_is_there(joined: FakeDaemon) -> None:
    """The blocks of 2.weight could go before 2.bias comes, but are of its group."""
    model = _model()
    parameters = dict(model.named_parameters())
    optimizer = _wrap(model, groups=[["4.bias", "4.weight"], ["2.bias", "2.weight"], ["0.bias", "0.weight"]])
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
    model = _model()
    optimizer = _wrap(model)
    (dict(model.named_parameters())["0.weight"] * 2.0).sum().backward()
    assert not joined.pushes(0) and not joined.pushes(1)
    (dict(model.named_parameters())["2.weight"] * 2.0).sum().backward()
    assert not joined.pushes(0) and not joined.pushes(1), "the first block begins with 4.bias"
    for name in ("4.bias", "4.weight", "2.bias"):
        (dict(model.named_parameters())[name] * 2.0).sum().backward()
    joined.wait(lambda: sum(len(p.keys) for lane in (0, 1) for p in joined.pushes(lane)) == 1)
    optimizer.step()


def test_gradients_add_up_before_they_are_exchanged(joined: FakeDaemon) -> None:
    model, same = _model(), _model()
    optimizer = _wrap(model, backward_passes_per_step=3)
    plain = torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        for seed in range(3):
            _backward(model, 10 * step + seed)
            _backward(same, 10 * step + seed)
            if seed == 2:
                joined.wait(lambda step=step: bool(_pushes(joined, step + 1)))
            assert bool(_pushes(joined, step + 1)) is (seed == 2)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    _backward(model, 7)  # fewer passes than announced: what there is is exchanged
    optimizer.step()
    _backward(same, 7)
    plain.step()
    assert _equal(model, same)
    assert gcclient.stats()["steps"] == 3


def test_one_pass_too_many_is_refused(joined: FakeDaemon) -> None:
    model = _model()
    optimizer = _wrap(model)
    _backward(model)
    with pytest.raises(RuntimeError, match=r"computed more than backward_passes_per_step=1 times before"):
        _backward(model)
    with pytest.raises(RuntimeError, match=r"the gradient of '4\.bias' was changed"):
        optimizer.step()


def test_between_backward_and_step_gradients_are_left_alone(joined: FakeDaemon) -> None:
    model = _model()
    optimizer = _wrap(model)
    _backward(model)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was called after backward\(\) and before"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) was called after backward"):
        optimizer.load_state_dict(optimizer.state_dict())
    with (
        pytest.raises(RuntimeError, match=r"step\(\) within skip_synchronize\(\) was called after backward"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"the gradient of '4\.bias' was changed after backward\(\)"):
        optimizer.step()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="was changed after backward"):
        optimizer.step()


@pytest.mark.parametrize("skip", [True, False])
def test_averages_can_be_clipped(joined: FakeDaemon, skip: bool) -> None:
    model, same = _model(), _model()
    optimizer, plain = _wrap(model), torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            _backward(m, step)
            if m is model:
                o.synchronize()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        if skip:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        plain.step()
    assert _equal(model, same)
    assert gcclient.stats()["steps"] == 2


def test_a_parameter_that_nobody_used_is_not_pushed(joined: FakeDaemon) -> None:
    model = _model()
    optimizer = _wrap(model, groups="layer-wise")
    hidden = model[1](model[0](torch.ones(1, 20)))
    hidden.sum().backward()
    optimizer.step()
    assert all((p.grad is None) == name.startswith(("2", "4")) for name, p in model.named_parameters())
    domain = next(iter(joined.domains.values()))
    starts = {b.key for b in domain.space.blocks[0] if b.start >= 300 * 300 + 300 + 300 * 7 + 7}
    starts |= {b.key for b in domain.space.blocks[1]}
    joined.wait(lambda: sum(p.close for p in _pushes(joined, 1)) == 2)
    assert {k for p in _pushes(joined, 1) for k in p.keys} == starts


def test_a_block_shared_with_an_unused_parameter_goes_with_zeros(joined: FakeDaemon) -> None:
    model = _model()
    optimizer = _wrap(model)
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
    assert {k for p in _pushes(joined, 2) for k in p.keys} == {b.key for b in (*others, *domain.space.blocks[1])}
    assert first.key not in {k for p in _pushes(joined, 2) for k in p.keys}


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
    optimizer, plain = _wrap(model, groups=2), torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
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


def test_a_closure_is_averaged_each_time_it_is_called(joined: FakeDaemon) -> None:
    model, same = _model(), _model()
    results = []
    for m in (model, same):
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(m.parameters(), 0.01, max_iter=3)
        if m is model:
            optimizer = gcclient.DistributedOptimizer(optimizer, m.named_parameters())

        def closure(m: nn.Module = m, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = m(torch.ones(2, 20)).pow(2).sum()
            loss.backward()
            return loss

        results.append(optimizer.step(closure).item())
    assert results[0] == results[1]
    assert _equal(model, same)
    assert gcclient.stats()["steps"] == 3


def test_the_optimizers_own_hooks_run_once_on_averages(joined: FakeDaemon) -> None:
    model = _model()
    optimizer = _wrap(model)
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(gcclient.stats()["steps"]))
    for _ in range(2):
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.__setstate__(optimizer.__getstate__())  # what patches step() again
    assert steps == [1, 2]


def test_a_scaler_unscales_averages(joined: FakeDaemon) -> None:
    model, same = _model(), _model()
    plain = torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    optimizer = _wrap(model, scaler=scaler)
    for step in range(4):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            loss = m(torch.full((4, 20), math.inf if step == 1 else 1.0 + step)).pow(2).sum()
            (scaler.scale(loss) if m is model else loss).backward()
        joined.wait(lambda step=step: bool(_pushes(joined, step + 1)))
        assert {p.grad_scale for p in _pushes(joined, step + 1)} == {256.0 if step < 2 else 128.0}
        if step == 2:
            scaler.unscale_(optimizer)  # to clip, as torch documents it
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_norm_(same.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            plain.step()
    assert gcclient.stats()["steps"] == 4
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_a_wrapper_that_is_dropped_takes_its_hooks_along(joined: FakeDaemon) -> None:
    model = _model()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = gcclient.DistributedOptimizer(plain, model.named_parameters(), groups=2)
    del optimizer
    gc.collect()
    optimizer = gcclient.DistributedOptimizer(plain, model.named_parameters(), groups=3)
    _backward(model)
    optimizer.step()
    labels = [m.label for m in joined.heard[-1] if isinstance(m, DeclareDomain)]
    assert labels == ["optimizer.0", "optimizer.1"]
    assert {p.domain for lane in (0, 1) for p in joined.pushes(lane)} == {
        m.domain for m in joined.heard[-1] if isinstance(m, DeclareDomain) and m.label == "optimizer.1"
    }


def test_it_tells_the_daemon_of_its_gradients(joined: FakeDaemon) -> None:
    model = _model()
    optimizer = _wrap(model)
    for _ in range(FIRST + FIRST_STEPS + 2):
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
    joined.wait(lambda: sum(isinstance(m, TensorTimes) for m in joined.heard[-1]) == FIRST_STEPS)
    layers = [int(t.name.partition(".")[0]) for t in _sections(joined)[0].section.tensors]
    for message in (m for m in joined.heard[-1] if isinstance(m, TensorTimes)):
        assert message.copied == sum(p.nbytes for p in model.parameters()) and message.copying > 0
        order = [layer for _, layer in sorted(zip(message.ready, layers, strict=True), key=lambda pair: pair[0])]
        assert order == [4, 4, 2, 2, 0, 0], "the last layer's gradients come first"
        assert message.between > max(message.ready) and message.forward >= 0


def test_a_failure_is_raised_where_it_is_noticed(joined: FakeDaemon) -> None:
    model = _model()
    optimizer = _wrap(model)
    fault = messages.Fault(b"", "PeerLost", "b is gone", advice="look at b")
    joined.answer = lambda m: fault if isinstance(m, Push) else None
    with pytest.raises(gcclient.PeerLost, match="b is gone"):  # noqa: PT012 - in either of them
        _backward(model)
        optimizer.step()
    with pytest.raises(gcclient.PeerLost):
        _backward(model)


def test_wrong_arguments_are_named(joined: FakeDaemon) -> None:
    model = _model()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = gcclient.DistributedOptimizer(plain)
    for arguments, error, message in [
        ((model,), TypeError, "expected a torch optimizer"),
        ((wrapped,), ValueError, "wrapped already"),
        ((plain, [("0.weight", model[0].weight)]), ValueError, "5 of the optimizer's 6 parameters have no name"),
        ((plain, [("w", p) for p in model.parameters()]), ValueError, "'w' is given twice"),
        ((torch.optim.SGD([torch.ones(1)], 0.1),), ValueError, "requires a gradient"),
        ((plain, None, object), TypeError, "compression="),
        ((plain, None, None, "all"), ValueError, "groups='all'"),
        ((plain, None, None, None, 0), ValueError, "backward_passes_per_step=0: expected 1 or more"),
    ]:
        with pytest.raises(error, match=message):
            gcclient.DistributedOptimizer(*arguments)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="before it is given to DistributedOptimizer"):
        wrapped.add_param_group({"params": [torch.ones(1, requires_grad=True)]})
    assert [t.name for t in _sections(joined)[0].section.tensors][-1] == "parameter.0.0"
