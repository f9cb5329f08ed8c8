"""The optimizer wrapper: when it exchanges, and what it refuses. The fake daemon's world has one rank."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import gcclient
from gcproto import messages
from gcproto.lane_messages import Push
from gcproto.messages import DeclareDomain
from gcproto.wire import Flag
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.wrapped import backward, equal, make_model, pushes, sections, wrap


def test_it_is_an_optimizer_of_the_same_kind(joined: FakeDaemon) -> None:
    model = make_model()
    plain = torch.optim.Adam(model.parameters(), 0.1)
    backward(model)
    plain.step()
    plain.zero_grad()
    optimizer = gcclient.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.param_groups is plain.param_groups
    assert optimizer.state_dict()["state"][1]["step"] == 1
    optimizer.load_state_dict(plain.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    backward(model)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


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
    model, same = make_model(), make_model()
    optimizer, plain = wrap(model, groups=groups), torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    section = sections(joined)[0].section
    assert ([t.name for t in section.tensors], section.cuts) == (names, cuts)
    domain = next(iter(joined.domains.values()))
    every = {b.key for blocks in domain.space.blocks for b in blocks}
    for step in (1, 2, 3):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            backward(m, step)
            o.step()
        joined.wait(lambda step=step: sum(p.close for p in pushes(joined, step)) == 2)
        pushed = pushes(joined, step)
        assert sorted(k for p in pushed for k in p.keys) == sorted(every)
        assert all(p.flags == Flag.AVERAGE for p in pushed)
    assert equal(model, same)
    assert gcclient.stats()["steps"] == 3


def test_gradients_add_up_before_they_are_exchanged(joined: FakeDaemon) -> None:
    model, same = make_model(), make_model()
    optimizer = wrap(model, backward_passes_per_step=3)
    plain = torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        for seed in range(3):
            backward(model, 10 * step + seed)
            backward(same, 10 * step + seed)
            if seed == 2:
                joined.wait(lambda step=step: bool(pushes(joined, step + 1)))
            assert bool(pushes(joined, step + 1)) is (seed == 2)
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    backward(model, 7)  # fewer passes than announced: what there is is exchanged
    optimizer.step()
    backward(same, 7)
    plain.step()
    assert equal(model, same)
    assert gcclient.stats()["steps"] == 3


def test_passes_without_sync_only_add_up(joined: FakeDaemon) -> None:
    model, same = make_model(), make_model()
    optimizer = wrap(model, backward_passes_per_step=2)
    plain = torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        with optimizer.no_sync():
            for seed in range(3):
                backward(model, 10 * step + seed)
        for seed in range(3, 5):  # as many as are announced
            assert not pushes(joined, step + 1)
            backward(model, 10 * step + seed)
        for seed in range(5):
            backward(same, 10 * step + seed)
        joined.wait(lambda step=step: bool(pushes(joined, step + 1)))
        optimizer.step()
        plain.step()
        assert equal(model, same)
        optimizer.zero_grad()
        plain.zero_grad()
    with optimizer.no_sync():  # no pass after it: what there is is exchanged
        backward(model, 7)
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.step()
    backward(same, 7)
    plain.step()
    assert equal(model, same)
    optimizer.zero_grad()
    for seed in range(2):
        backward(model, seed)
    with optimizer.no_sync(), pytest.raises(RuntimeError, match=r"'4\.bias' was computed within no_sync\(\) while"):
        backward(model, 2)


def test_sums_are_pushed_as_such(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model, op=gcclient.Sum)
    backward(model)
    optimizer.step()
    assert {p.flags for p in pushes(joined, 1)} == {0}


def test_one_pass_too_many_is_refused(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model)
    backward(model)
    with pytest.raises(RuntimeError, match=r"computed more than backward_passes_per_step=1 times before"):
        backward(model)
    with pytest.raises(RuntimeError, match=r"the gradient of '4\.bias' was changed"):
        optimizer.step()


def test_between_backward_and_step_gradients_are_left_alone(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model)
    backward(model)
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


def _scale(grad: torch.Tensor) -> None:
    grad.data.mul_(0.5)


def _replace(grad: torch.Tensor) -> None:
    grad.data = grad.data + 1.0


def _free(grad: torch.Tensor) -> None:
    grad.untyped_storage().resize_(0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("change", [_scale, _replace, _free])
def test_a_change_behind_torchs_back_is_noticed(
    joined: FakeDaemon, change: Callable[[torch.Tensor], None], overlap: bool
) -> None:
    model = make_model()
    optimizer = wrap(model, overlap_forward=overlap)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    backward(model)
    grad = model[2].weight.grad
    version = grad._version
    change(grad)
    assert change is _free or grad._version == version, "or torch would say so"
    with pytest.raises(RuntimeError, match=r"the gradient of '2\.weight' was changed after backward\(\)"):
        optimizer.step()


def test_what_was_not_changed_is_not_taken_for_changed(joined: FakeDaemon) -> None:
    """Values that are not equal to themselves, gradients whose elements lie in another order, and ones that moved."""
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 2)).to(memory_format=torch.channels_last)
    net[2].weight = nn.Parameter(net[2].weight.detach().t().contiguous().t())
    optimizer = wrap(net)
    for value in (1.0, math.nan):
        optimizer.zero_grad()
        net(torch.full((1, 3, 4, 4), value)).sum().backward()
        grads = [p.grad for p in net.parameters()]
        assert sum(not g.is_contiguous() for g in grads) == 2  # type: ignore[union-attr]
        for grad in grads:
            grad.data = grad.data.clone()  # type: ignore[union-attr]
        optimizer.step()
    assert gcclient.stats()["steps"] == 2


@pytest.mark.parametrize("skip", [True, False])
def test_averages_can_be_clipped(joined: FakeDaemon, skip: bool) -> None:
    model, same = make_model(), make_model()
    optimizer, plain = wrap(model), torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            backward(m, step)
            if m is model:
                o.synchronize()
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        if skip:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        plain.step()
    assert equal(model, same)
    assert gcclient.stats()["steps"] == 2


def test_a_closure_within_skip_synchronize_is_refused(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model)
    backward(model)
    optimizer.synchronize()
    with (
        pytest.raises(RuntimeError, match=r"step\(closure\) within skip_synchronize\(\): .* nobody would average"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step(lambda: backward(model))
    with optimizer.skip_synchronize():
        optimizer.step()
    assert gcclient.stats()["steps"] == 1


def test_a_closure_is_averaged_each_time_it_is_called(joined: FakeDaemon) -> None:
    model, same = make_model(), make_model()
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
    assert equal(model, same)
    assert gcclient.stats()["steps"] == 3


def test_the_optimizers_own_hooks_run_once_on_averages(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model)
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(gcclient.stats()["steps"]))
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.__setstate__(optimizer.__getstate__())  # what patches step() again
    assert steps == [1, 2]


def test_a_scaler_unscales_averages(joined: FakeDaemon) -> None:
    model, same = make_model(), make_model()
    plain = torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    optimizer = wrap(model, scaler=scaler)
    for step in range(4):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            loss = m(torch.full((4, 20), math.inf if step == 1 else 1.0 + step)).pow(2).sum()
            (scaler.scale(loss) if m is model else loss).backward()
        joined.wait(lambda step=step: bool(pushes(joined, step + 1)))
        (domain,) = {joined.domains[p.domain] for p in pushes(joined, step + 1)}
        joined.wait(lambda step=step, domain=domain: step + 1 in domain.scales)
        assert domain.scales[step + 1] == {256.0 if step < 2 else 128.0}
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


def test_a_scaler_that_the_wrapper_was_not_told_of_is_refused(joined: FakeDaemon) -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = wrap(model)
    scaler.scale(model(torch.ones(2, 20)).sum()).backward()
    with pytest.raises(RuntimeError, match="a GradScaler that the wrapper does not know"):
        scaler.step(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 20)).sum()).backward()
    optimizer.synchronize()  # as Horovod has it
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    assert gcclient.stats()["steps"] == 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_a_gradient_that_is_not_exchanged_is_not_stepped(joined: FakeDaemon, how: str, overlap: bool) -> None:
    model = make_model()
    late = nn.Parameter(torch.zeros(()))
    if how == "unfrozen":
        late = model[0].weight.requires_grad_(False)
    optimizer = wrap(model, overlap_forward=overlap)
    backward(model)
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()
    if how == "added":
        optimizer.param_groups[0]["params"].append(late)
    late.requires_grad_(True)
    (model(torch.ones(2, 20)).sum() + late.sum()).backward()
    before = [p.detach().clone() for p in model.parameters()]
    shape = re.escape(str(list(late.shape)))
    with pytest.raises(RuntimeError, match=f"group 0, of shape {shape}, has a gradient that is not exchanged"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_wrapper_that_is_dropped_takes_its_hooks_along(joined: FakeDaemon) -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = gcclient.DistributedOptimizer(plain, model.named_parameters(), groups=2)
    del optimizer
    gc.collect()
    optimizer = gcclient.DistributedOptimizer(plain, model.named_parameters(), groups=3)
    backward(model)
    optimizer.step()
    labels = [m.label for m in joined.heard[-1] if isinstance(m, DeclareDomain)]
    assert labels == ["optimizer.0", "optimizer.1"]
    assert {p.domain for lane in (0, 1) for p in joined.pushes(lane)} == {
        m.domain for m in joined.heard[-1] if isinstance(m, DeclareDomain) and m.label == "optimizer.1"
    }


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wrapper_goes_when_it_is_dropped(joined: FakeDaemon, overlap: bool) -> None:
    model, same = make_model(), make_model()
    optimizer = wrap(model, overlap_forward=overlap)
    plain = torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            backward(m, step)
            o.step()
    gone = weakref.ref(optimizer)
    gc.collect()
    gc.disable()  # nothing of it may wait for this
    try:
        del optimizer, o
        assert equal(model, same), "what is awaited is stepped all the same"
        assert gone() is None
        for seed in range(3):
            backward(model, seed)
    finally:
        gc.enable()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.fixture
def another(tmp_path: Path) -> Iterator[FakeDaemon]:
    """The daemon of the next job."""
    folder = tmp_path / "another"
    folder.mkdir()
    fake = FakeDaemon(folder)
    yield fake
    gcclient.shutdown()
    fake.close()


@pytest.mark.parametrize("how", ["left", "failed"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_wrapper_that_outlives_its_job_leaves_gradients_alone(
    joined: FakeDaemon, another: FakeDaemon, overlap: bool, how: str
) -> None:
    model, same = make_model(), make_model()
    inner, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, same))
    first = gcclient.DistributedOptimizer(inner, model.named_parameters(), overlap_forward=overlap)
    scheduler = torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
    for m, o in ((model, first), (same, plain)):
        backward(m)
        o.step()
        m.zero_grad()
    if how == "failed":
        assert equal(model, same)
        fault = messages.Fault(b"", "PeerLost", "b is gone", advice="look at b")
        joined.answer = lambda m: fault if isinstance(m, Push) else None
        with pytest.raises(gcclient.PeerLost):
            gcclient.push_pull(torch.ones(1))
    else:
        gcclient.shutdown()
        backward(model, 7)  # by whoever trains without a job
        model.zero_grad()
        with pytest.raises(gcclient.NotInitialized, match="the job that this optimizer was wrapped in is over"):
            first.step()
    gcclient.init(0, 1, socket=another.socket, job="unit")
    second = gcclient.DistributedOptimizer(inner, model.named_parameters(), overlap_forward=overlap)
    for step in range(1, 3):
        for m, o in ((model, second), (same, plain)):
            backward(m, step)
            o.step()
            o.zero_grad()
    assert equal(model, same) and pushes(another, 2)
    with pytest.raises(gcclient.NotInitialized, match=r"give DistributedOptimizer the optimizer that was wrapped"):
        first.step()
    assert scheduler.optimizer is first


def test_a_failure_is_raised_where_it_is_noticed(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model)
    fault = messages.Fault(b"", "PeerLost", "b is gone", advice="look at b")
    joined.answer = lambda m: fault if isinstance(m, Push) else None
    with pytest.raises(gcclient.PeerLost, match="b is gone"):  # noqa: PT012 - in either of them
        backward(model)
        optimizer.step()
    with pytest.raises(gcclient.PeerLost):
        backward(model)


def test_wrong_arguments_are_named(joined: FakeDaemon) -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = gcclient.DistributedOptimizer(plain)
    for arguments, error, message in [
        ((model,), TypeError, "expected a torch optimizer"),
        ((wrapped,), ValueError, "wrapped already"),
        ((plain, [("0.weight", model[0].weight)]), ValueError, "5 of the optimizer's 6 parameters have no name"),
        ((plain, [("w", p) for p in model.parameters()]), ValueError, "'w' is given twice"),
        ((torch.optim.SGD([torch.ones(1)], 0.1),), ValueError, "requires a gradient"),
        ((plain, None, object), TypeError, "compression="),
        ((plain, None, None, 1, "sum"), ValueError, "op='sum'"),
        ((plain, None, None, 0), ValueError, "backward_passes_per_step=0: expected 1 or more"),
    ]:
        with pytest.raises(error, match=message):
            gcclient.DistributedOptimizer(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups='all'"):
        gcclient.DistributedOptimizer(plain, groups="all")
    with pytest.raises(RuntimeError, match="before it is given to DistributedOptimizer"):
        wrapped.add_param_group({"params": [torch.ones(1, requires_grad=True)]})
    assert [t.name for t in sections(joined)[0].section.tensors][-1] == "parameter.0.0"
