"""The optimizer wrapper that does not wait: who waits for what, and what is refused. A world of one rank."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import gcclient
from gcclient.api import current
from gcclient.awaited import AwaitedParameter
from gcproto import messages
from gcproto.lane_messages import Done
from gcproto.manifest import tensors_inside
from tests.unit.client.fake import FakeDaemon
from tests.unit.client.wrapped import backward, equal, make_model, wrap


def _two(**more: Any) -> tuple[nn.Sequential, Any, nn.Sequential]:
    """A model after step(), its optimizer, and what it is to become."""
    model, same = make_model(), make_model()
    optimizer = wrap(model, overlap_forward=True, **more)
    backward(model)
    optimizer.step()
    backward(same)
    torch.optim.SGD(same.parameters(), 0.1, momentum=0.9).step()
    return model, optimizer, same


def _silent(daemon: FakeDaemon) -> tuple[nn.Sequential, Any, nn.Sequential]:
    """The same where averages are there and not announced."""
    daemon.silent = True
    return _two(groups="layer-wise")


def _announce(daemon: FakeDaemon, names: Iterable[str] | None = None, step: int = 1) -> None:
    """Tell of the results of blocks that hold something of these parameters, of all by default."""
    (domain,) = current().domains.values()
    for section, blocks in zip(domain.space.sections, domain.space.blocks, strict=True):
        for block in blocks:
            if names is None or any(t.name in names for t in tensors_inside(section, block)):
                place = domain.blocks[block.key]
                daemon.wait(lambda place=place: place.result()[0] >= step)
                daemon.say(block.lane, Done(domain.id, step, (block.key,)))


def _awaited(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if type(p) is AwaitedParameter]


@pytest.mark.parametrize("kind", ["sgd", "adam", "rmsprop"])
@pytest.mark.parametrize("groups", [None, "layer-wise", 2])
def test_weights_are_those_of_the_wrapper_that_waits(joined: FakeDaemon, kind: str, groups: Any) -> None:
    made = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adam": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
    }

    def trained(overlap: bool) -> nn.Module:
        model = make_model()
        inner = made[kind](
            [{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "weight_decay": 0.1}]
        )
        optimizer = gcclient.DistributedOptimizer(
            inner, model.named_parameters(), groups=groups, overlap_forward=overlap, backward_passes_per_step=2
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            backward(model, 2 * step)
            backward(model, 2 * step + 1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        optimizer.synchronize()
        assert not _awaited(model)
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        return model

    assert equal(trained(overlap=True), trained(overlap=False))


def test_a_layer_waits_for_its_own_average(joined: FakeDaemon) -> None:
    model, _, same = _silent(joined)
    assert len(_awaited(model)) == 6
    assert model[4].weight.shape == (7, 300) and len(_awaited(model)) == 6, "no value was asked for"
    _announce(joined, ["0.weight", "0.bias"])
    x = torch.ones(2, 20)
    assert torch.equal(model[0](x), same[0](x))
    assert _awaited(model) == ["2.weight", "2.bias", "4.weight", "4.bias"]
    _announce(joined)
    assert torch.equal(model(x), same(x))
    assert not _awaited(model) and equal(model, same)


def test_whatever_takes_a_parameter_waits(joined: FakeDaemon) -> None:
    for use in (
        lambda m: m.state_dict(),
        lambda m: [p.grad for p in m.parameters()],
        lambda m: torch.cat([p.data.flatten() for p in m.parameters()]),
        lambda m: torch._foreach_norm(list(m.parameters())),
        lambda m: repr(list(m.parameters())),
        lambda m: m.zero_grad(),
    ):
        model, _, same = _two()
        assert len(_awaited(model)) == 6
        use(model)
        assert not _awaited(model) and equal(model, same)


def test_copies_are_of_what_was_waited_for(joined: FakeDaemon) -> None:
    file = io.BytesIO()
    for make in (
        copy.deepcopy,
        lambda m: (torch.save(m, file), file.seek(0), torch.load(file, weights_only=False))[-1],
    ):
        model, optimizer, same = _two()
        made = make(model)
        assert not _awaited(made) and not _awaited(model)
        assert equal(made, same) and equal(model, same)
        assert {type(p) for p in made.parameters()} == {nn.Parameter}
        optimizer.synchronize()


def test_zeroing_waits_for_nothing(joined: FakeDaemon) -> None:
    model, optimizer, same = _silent(joined)
    optimizer.zero_grad()
    assert len(_awaited(model)) == 6
    _announce(joined)
    backward(model, 1)
    same.zero_grad()
    backward(same, 1)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), same.parameters(), strict=True))  # type: ignore[arg-type]
    _announce(joined, step=2)
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()


def test_a_step_without_some_gradients_waits(joined: FakeDaemon) -> None:
    model, same = make_model(), make_model()
    optimizer = wrap(model, overlap_forward=True)
    plain = torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        for m, o in ((model, optimizer), (same, plain)):
            o.zero_grad()
            layers = m[:1] if step == 1 else m
            layers(torch.randn(4, 20, generator=torch.Generator().manual_seed(step))).pow(2).sum().backward()
            o.step()
        assert bool(_awaited(model)) is (step != 1)
    assert equal(model, same)


def test_memory_is_written_again_once_all_that_goes_with_it_is_back(joined: FakeDaemon) -> None:
    joined.silent = True
    model, optimizer, same = _two(groups=1)
    optimizer.zero_grad()
    same.zero_grad()
    _announce(joined, ["0.weight", "0.bias"])
    for m in (model, same):
        out = m[0](torch.ones(2, 20)).sum()
        if m is model:
            assert len(_awaited(model)) == 4, "used by nobody, and in one group with what is pushed next"
            threading.Timer(0.2, _announce, (joined,)).start()
        out.backward()
    assert not _awaited(model) and equal(model, same)
    joined.silent = False
    optimizer.step()
    for ours, theirs in zip(model[0].parameters(), same[0].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_an_evaluation_may_be_what_waits(joined: FakeDaemon) -> None:
    model, same = make_model(), make_model()
    optimizer, plain = wrap(model, overlap_forward=True), torch.optim.SGD(same.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        for m, o in ((model, optimizer), (same, plain)):
            backward(m, step)
            o.step()
            o.zero_grad()
            with torch.inference_mode():
                m(torch.ones(1, 20))
    assert equal(model, same)


def test_the_end_of_the_job_is_waited_for(joined: FakeDaemon) -> None:
    model, _, same = _two()
    gcclient.shutdown()
    assert not _awaited(model) and equal(model, same)


def test_a_failure_lets_parameters_go(joined: FakeDaemon) -> None:
    model, optimizer, _ = _silent(joined)
    before = make_model()
    joined.say(-1, messages.Fault(b"", "PeerLost", "b is gone", advice="look at b"))
    with pytest.raises(gcclient.PeerLost, match="b is gone"):
        model(torch.ones(1, 20))
    assert not _awaited(model) and equal(model, before), "a checkpoint can be loaded"
    with pytest.raises(gcclient.PeerLost):
        optimizer.step()


def test_what_needs_all_averages_is_refused(joined: FakeDaemon) -> None:
    model = make_model()
    optimizer = wrap(model, overlap_forward=True)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 0)
    for refused in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        with pytest.raises(RuntimeError, match="hook"):
            refused(print)
    with pytest.raises(RuntimeError, match="skip_synchronize"), optimizer.skip_synchronize():
        pass
    scaler.scale(model(torch.ones(1, 20)).sum()).backward()
    with pytest.raises(RuntimeError, match="scaler"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"clipping by a global norm"):
        optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="was changed"):
        optimizer.step()


def test_an_optimizer_that_counts_in_its_options_is_refused(joined: FakeDaemon) -> None:
    class Counting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    model = make_model()
    optimizer = gcclient.DistributedOptimizer(
        Counting([{"params": model.parameters(), "count": 0}], 0.1), model.named_parameters(), overlap_forward=True
    )
    backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="Counting changes 'count' of its parameter groups"):
        optimizer.synchronize()


def test_what_cannot_go_with_it_is_said_when_it_is_made(joined: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    for more, message in [
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler"),
        ({"audit": gcclient.Audit(every=2)}, "audit"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrap(model, overlap_forward=True, **more)
    hooked = torch.optim.SGD(model.parameters(), 0.1)
    hooked.register_step_post_hook(print)
    with pytest.raises(ValueError, match="hooks"):
        gcclient.DistributedOptimizer(hooked, overlap_forward=True)

    class Odd(nn.Parameter):
        pass

    with pytest.raises(ValueError, match="expected torch's own parameters, got a Odd"):
        gcclient.DistributedOptimizer(torch.optim.SGD([Odd(torch.ones(2))], 0.1), overlap_forward=True)
    assert not joined.domains


def test_jobs_that_outlive_nodes_have_no_averages_before_a_step_counts(daemon: FakeDaemon) -> None:
    daemon.commits = True
    gcclient.init(0, 1, socket=daemon.socket, job="unit")
    with pytest.raises(ValueError, match="on_loss='fail'"):
        wrap(make_model(), overlap_forward=True)
    gcclient.shutdown()
