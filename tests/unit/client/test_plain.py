"""GC_DISABLE in one process: the same calls and the same refusals. Several ranks: tests/integration."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

import gcclient
from gcclient import api
from gcclient.errors import NoAdvice


@pytest.fixture(autouse=True)
def disabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GC_DISABLE", "1")
    monkeypatch.setenv("GC_NODE_SOCKET", "/nowhere.sock")
    gcclient.init(0, 1, job="unit")
    yield
    gcclient.shutdown()


def test_who_is_there() -> None:
    assert gcclient.is_initialized()
    assert (gcclient.rank(), gcclient.size(), gcclient.local_rank(), gcclient.local_size()) == (0, 1, 0, 1)
    assert (gcclient.root_rank(), gcclient.admit()) == (0, ())
    gcclient.on_change(lambda epoch, ranks: None)
    stats = gcclient.stats()
    assert (stats["job"], stats["node"], stats["reconnects"], stats["audit"]) == ("unit", "", 0, None)


def test_single_tensors_keep_their_kind() -> None:
    for tensor in (torch.ones(3, dtype=torch.float16), torch.arange(6.0).view(2, 3).t(), torch.tensor(2.5)):
        got = gcclient.push_pull(tensor)
        assert got.dtype == tensor.dtype and torch.equal(got, tensor) and got.data_ptr() != tensor.data_ptr()
    mask = torch.tensor([True, False])
    assert torch.equal(gcclient.push_pull(mask, average=False), mask)
    small = torch.arange(4, dtype=torch.int16)
    assert gcclient.push_pull_(small, "small", average=False) is small
    assert gcclient.stats()["calls"] == 5


def test_an_input_may_be_changed_once_the_call_returned() -> None:
    tensor = torch.ones(4)
    handle = gcclient.push_pull_async(tensor, "x")
    tensor.zero_()
    assert gcclient.poll(handle)
    assert gcclient.synchronize(handle).tolist() == [1.0] * 4
    in_place = gcclient.push_pull_async_(tensor.fill_(2.0), "x")
    assert gcclient.synchronize(in_place) is in_place.result
    assert tensor.tolist() == [2.0] * 4


def test_a_name_keeps_no_memory_once_its_result_was_fetched() -> None:
    tensor = torch.ones(5)
    result = gcclient.push_pull(tensor, "x")
    kept = weakref.ref(result.untyped_storage())
    del result
    gc.collect()
    assert kept() is None
    handle = gcclient.push_pull_async_(tensor.fill_(2.0), "x")
    gcclient.push_pull_async_(tensor.fill_(3.0), "x")
    assert handle.over, "fetched by the next of its name"


def test_what_is_refused_with_a_daemon_is_refused_here() -> None:
    with pytest.raises(ValueError, match="average is not exact"):
        gcclient.push_pull(torch.ones(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="to_dense"):
        gcclient.push_pull(torch.ones(2).to_sparse())
    with pytest.raises(TypeError, match="by keyword"):
        gcclient.push_pull(torch.ones(2), 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole matrices"):
        gcclient.push_pull(torch.ones(2), "x", compression="powersgd(rank=2)")
    with pytest.raises(ValueError, match="no other reduction"):
        gcclient.allreduce(torch.ones(2), op="max")  # type: ignore[arg-type]
    net = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        gcclient.state(net, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="expected the DistributedDataParallel"):
        gcclient.state(net, backward_passes_per_step=2)
    with pytest.raises(ValueError, match="warmup_steps"):
        gcclient.state(net, warmup_steps=-1)
    with pytest.raises(ValueError, match="hierarchy"):
        gcclient.state(net, hierarchy="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only with hierarchy"):
        gcclient.state(net, node_codec="onebit")
    inner = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="scaler"):
        gcclient.DistributedOptimizer(inner, overlap_forward=True, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="dtype"):
        gcclient.empty("x", 3, dtype=torch.complex64)
    with pytest.raises(NoAdvice, match="GC_DISABLE"):
        gcclient.advise()
    with pytest.raises(gcclient.NotInitialized, match="GC_DISABLE"):
        api.current()


def test_the_calls_under_other_names() -> None:
    ones = torch.ones(2)
    handle = gcclient.grouped_allreduce_async([ones, ones * 2], name="g", compression="topk(ratio=0.01)")
    assert gcclient.poll(handle)
    assert [t.tolist() for t in gcclient.synchronize(handle)] == [[1.0, 1.0], [2.0, 2.0]]
    assert gcclient.push_pull(ones, False, "order").tolist() == [1.0, 1.0]
    assert gcclient.broadcast_object({"w": ones})["w"] is ones
    assert torch.equal(gcclient.allgather(torch.arange(3)), torch.arange(3))
    assert gcclient.allgather(torch.empty(0, 2)).shape == (0, 2)
    assert gcclient.allgather_object([1, "x"]) == [[1, "x"]]
    gcclient.barrier()


def test_a_wrapper_that_is_to_overlap_waits() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = gcclient.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), overlap_forward=True
    )
    before = net.weight.detach().clone()
    with optimizer.no_sync():
        net(torch.ones(4, 3)).sum().backward()
    net(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert type(net.weight) is torch.nn.Parameter
    assert torch.allclose(net.weight, before - 0.8)
    assert gcclient.stats()["steps"] == 1


def test_an_empty_tensor_is_the_same_at_every_call() -> None:
    made = gcclient.empty("w", 2, 3)
    assert made.shape == (2, 3) and gcclient.empty("w", (2, 3)) is made


def test_the_wrapper_trains_and_guards() -> None:
    torch.manual_seed(1)
    net, same = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    same.load_state_dict(net.state_dict())
    gcclient.broadcast_parameters(net.state_dict())
    optimizer = gcclient.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), compression="topk(ratio=0.01)"
    )
    gcclient.broadcast_optimizer_state(optimizer)
    plain = torch.optim.SGD(same.parameters(), 0.1)
    net.bias.requires_grad_(True)
    for model, stepper in ((net, optimizer), (same, plain)):
        model(torch.ones(4, 3)).pow(2).sum().backward()
        stepper.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), same.parameters(), strict=True))
    optimizer.zero_grad()
    net(torch.ones(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()
    assert net.weight.grad is not None
    net.weight.grad.data.mul_(2)
    with pytest.raises(RuntimeError, match="was changed after backward"):
        optimizer.step()


def test_after_shutdown_nothing_goes() -> None:
    calls = api.current_calls()
    gcclient.shutdown()
    with pytest.raises(gcclient.NotInitialized):
        gcclient.push_pull(torch.ones(1))
    with pytest.raises(gcclient.NotInitialized):
        calls.start(torch.ones(1), None, True, in_place=False)


def test_ranks_that_cannot_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gcclient.shutdown()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(gcclient.JoinRefused, match="MASTER_ADDR"):
        gcclient.init(0, 2, job="unit")
