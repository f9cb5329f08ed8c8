"""The DDP state: where parameters live, what a bucket pushes. Real DDP in a world of one."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from gcclient import daemon as daemon_module
from gcclient import session as session_module
from gcclient.api import current
from gcclient.buckets import Backward
from gcclient.parameters import MATRIX_CODECS
from gcproto import lane_messages, messages
from gcproto.messages import DeclareDomain, DeclareSection
from gcproto.wire import Flag
from gcserver.codecs import names
from gcserver.codecs.base import BY_NAME
from tests.unit.client.fake import PARTITION, FakeDaemon


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Linear(300, 300), nn.Linear(300, 7).double())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _model()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[2](self.layers[1](self.layers[0](x)).double())


def test_parameters_are_declared_in_backward_order_by_dtype(joined: FakeDaemon) -> None:
    net = _Net()
    gcclient.state(net, compression="topk(ratio=0.1)")
    (domain,) = (m for m in joined.heard[-1] if isinstance(m, DeclareDomain))
    assert (domain.label, domain.ranks, domain.scoped, domain.codec) == ("ddp.0", (0,), True, "topk(ratio=0.1)")
    sections = [m.section for m in joined.heard[-1] if isinstance(m, DeclareSection)]
    assert [[t.name for t in s.tensors] for s in sections] == [
        ["layers.2.bias", "layers.2.weight"],
        ["layers.1.bias", "layers.1.weight", "layers.0.bias", "layers.0.weight"],
    ]
    gcclient.state(net)
    first, second = (m for m in joined.heard[-1] if isinstance(m, DeclareDomain))
    assert second.label == "ddp.1" and second.domain != first.domain


@pytest.mark.parametrize(
    ("compression", "given", "whole"),
    [
        (None, None, False),
        ("topk(ratio=0.1)", None, False),
        ("powersgd", None, True),
        ("powersgd(rank=2)", None, True),
        ("powersgd+ef(decay=0.9)", None, True),
        ("powersgd", False, False),
        ("mine(rank=2)", True, True),
    ],
)
def test_codecs_of_whole_matrices_get_them(
    joined: FakeDaemon, compression: str | None, given: bool | None, whole: bool
) -> None:
    state = gcclient.state(_model(), compression=compression, whole=given)
    (domain,) = (m for m in joined.heard[-1] if isinstance(m, DeclareDomain))
    assert domain.whole is state.domain.space.whole is whole
    blocks = state.domain.space.blocks[1]
    # 300 x 300 with its neighbours' small ones: more than a block's 256 KiB, which bounds what may be cut.
    assert (max(b.nbytes for b in blocks) > PARTITION) is whole


def test_matrix_codecs_are_known_by_name() -> None:
    assert {n for n in names() if BY_NAME[n].layout == "matrix"} == MATRIX_CODECS


@pytest.mark.parametrize("compression", [None, "powersgd"])
def test_pieces_cover_every_byte_once(joined: FakeDaemon, compression: str | None) -> None:
    net = _Net()
    state = gcclient.state(net, compression=compression)
    covered = {place: [0] * place.block.nbytes for place in current().domains[state.domain.id].blocks.values()}
    for parameter in state.parameters.values():
        at = 0
        for piece in parameter.pieces:
            assert piece.lo == at and piece.hi - piece.lo == piece.input.nbytes == piece.output.nbytes
            at = piece.hi
            start = piece.input.ctypes.data - piece.place.input.ctypes.data
            assert start == piece.output.ctypes.data - piece.place.output.ctypes.data
            for i in range(start, start + piece.input.nbytes):
                covered[piece.place][i] += 1
        assert at == parameter.tensor.nbytes
    assert all(set(counts) == {1} for counts in covered.values())


@pytest.mark.parametrize("compression", [None, "powersgd"])
def test_a_backward_pass_is_one_step(alone: FakeDaemon, compression: str | None) -> None:
    net = _Net()
    plain = _Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    state = gcclient.state(model, compression=compression)
    model.register_comm_hook(state, gcclient.ddp_hook)
    for step in (1, 2, 3):
        x = torch.randn(4, 20)
        for m in (model, plain):
            m.zero_grad()
            m(x).sum().backward()
        for (name, a), b in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert a.grad is None or torch.equal(a.grad, b.grad), name
        every = [b.key for blocks in state.domain.space.blocks for b in blocks]
        keys = []
        alone.wait(lambda step=step: all(sum(p.close for p in alone.pushes(i)) == step for i in (0, 1)))
        for lane in (0, 1):
            mine = [p for p in alone.pushes(lane) if p.step == step]
            assert [p.close for p in mine] == [False] * (len(mine) - 1) + [True]
            assert all(p.flags == Flag.AVERAGE for p in mine)
            keys += [k for p in mine for k in p.keys]
        assert sorted(keys) == sorted(every)
    assert gcclient.stats()["steps"] == 3
    with model.no_sync():
        model(x).sum().backward()
    assert gcclient.stats()["steps"] == 3


def test_a_step_begins_once_all_results_of_the_last_are_there(alone: FakeDaemon) -> None:
    """No bucket waits for those of blocks that hold nothing but what DDP does not reduce."""
    model = DistributedDataParallel(_Net())
    state = gcclient.state(model)
    model.register_comm_hook(state, gcclient.ddp_hook)
    model(torch.randn(4, 20)).sum().backward()
    newest, steps = state._newest, []
    assert newest is not None
    # The last result counts as there a moment after what waited for it goes on.
    alone.wait(lambda: newest.waiting() is None)
    newest.back -= 1

    def comes() -> None:
        steps.append(state.domain.step)
        newest.back += 1
        current().daemon.wake()

    threading.Timer(0.2, comes).start()
    model(torch.randn(4, 20)).sum().backward()
    assert steps == [1] and state.domain.step == 2


def test_a_step_that_cannot_be_closed_ends_the_job(alone: FakeDaemon) -> None:
    model = DistributedDataParallel(_Net())
    state = gcclient.state(model)
    model.register_comm_hook(state, gcclient.ddp_hook)
    model(torch.randn(4, 20)).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backward, "close", lambda self: next(iter(self.domain.blocks.values())).expect(9))
        for place in state.domain.blocks.values():
            patch.setattr(place, "done", False)
        with pytest.raises(RuntimeError, match="is pushed in step"):
            model(torch.randn(4, 20)).sum().backward()
    assert current().failure is not None


def test_gradients_of_several_passes_are_exchanged_in_the_last(alone: FakeDaemon) -> None:
    net, same = _Net(), _Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.05)
    model.register_comm_hook(gcclient.state(model, backward_passes_per_step=3), gcclient.ddp_hook)
    for step in range(2):
        for part in range(3):
            assert gcclient.stats()["steps"] == step
            x = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + part))
            model(x).pow(2).sum().backward()
            same(x).pow(2).sum().backward()
        assert gcclient.stats()["steps"] == step + 1
        for a, b in zip(net.layers.parameters(), same.layers.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        model.zero_grad()
        same.zero_grad()


@pytest.mark.parametrize("disabled", [False, True])
def test_what_not_all_passes_of_a_step_have_added_to_is_not_stepped(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch, disabled: bool
) -> None:
    if disabled:
        gcclient.shutdown()
        monkeypatch.setenv("GC_DISABLE", "1")
        gcclient.init(0, 1, job="disabled")
    model, other = DistributedDataParallel(_model()[0]), nn.Linear(2, 2)
    state = gcclient.state(model, backward_passes_per_step=3)
    model.register_comm_hook(state, gcclient.ddp_hook)
    optimizer, others = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for done in (1, 2):
        model(torch.ones(1, 20)).sum().backward()
        with pytest.raises(
            RuntimeError, match=rf"after {done} of backward_passes_per_step=3 backward passes: .*no_sync"
        ):
            optimizer.step()
        others.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    model(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert gcclient.stats()["steps"] == 1


@pytest.mark.parametrize("inside", [False, True])
def test_several_passes_need_a_model_that_torch_gives_all_averages(alone: FakeDaemon, inside: bool) -> None:
    """Torch forgets after each pass which parameters were used, and so would leave out those of the passes before."""

    def state(net: nn.Module, passes: int) -> object:
        return gcclient.state(nn.Sequential(net) if inside else net, backward_passes_per_step=passes)

    looking = DistributedDataParallel(_Net(), find_unused_parameters=True)
    with pytest.raises(ValueError, match=r"=2 does not go with find_unused_parameters=True.*model\.no_sync\(\)"):
        state(looking, 2)
    with pytest.raises(ValueError, match=r"=2: expected the DistributedDataParallel, got a (_Net|Sequential)"):
        state(_Net(), 2)
    assert not [m for m in alone.heard[-1] if isinstance(m, DeclareDomain)], "refused before anything is declared"
    with pytest.warns(UserWarning, match="unused parameters will not change"):
        looking._set_static_graph()
    for net, passes in ((looking, 2), (DistributedDataParallel(_Net()), 2), (_Net(), 1)):
        assert state(net, passes)


def test_the_loss_scale_goes_with_the_push(alone: FakeDaemon) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model.register_comm_hook(gcclient.state(model, scaler=scaler), gcclient.ddp_hook)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    assert {s for p in alone.pushes(0) for s in alone.domains[p.domain].scales[p.step]} == {256.0}


def test_a_failure_comes_out_of_backward_and_names_itself(alone: FakeDaemon) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    model(torch.ones(1, 3)).sum().backward()
    fault = messages.Fault(b"", "PeerLost", "b is gone", advice="look at b")
    alone.answer = lambda m: fault if isinstance(m, lane_messages.Push) else None
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"b is gone.*look at b"):
            model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(gcclient.PeerLost):
        gcclient.push_pull(torch.ones(1))


def test_a_daemon_that_says_nothing_is_reported_and_ends_the_wait(
    alone: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who waits is inside torch: the receiver thread speaks for it."""
    monkeypatch.setattr(session_module, "SAY_EVERY", 0.05)
    monkeypatch.setattr(session_module, "GRACE", -4.5)  # the job's deadline is 5 s
    monkeypatch.setattr(daemon_module, "_LOOK_EVERY", 0.05)
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    alone.silent = True
    current().daemon.wake()
    with pytest.raises(RuntimeError, match=r"no result for ddp\.0.*step 1"):
        model(torch.ones(1, 3)).sum().backward()
    assert "ddp.0: no result of step 1 since" in caplog.text
    with pytest.raises(gcclient.StepTimeout):
        gcclient.push_pull(torch.ones(1))


def test_another_models_parameters_are_refused_without_a_raise_in_the_hook(alone: FakeDaemon) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(gcclient.state(nn.Linear(3, 2)), gcclient.ddp_hook)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not among those given"):
            model(torch.ones(1, 3)).sum().backward()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_bucket_that_cannot_be_brought_ends_the_step_that_others_wait_in(alone: FakeDaemon, failing: int) -> None:
    net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    state = gcclient.state(model)
    model.register_comm_hook(state, gcclient.ddp_hook)
    for _ in range(2):
        model(torch.ones(1, 300)).sum().backward()
    unknown = list(net)[2 - failing].weight  # buckets come in backward order
    known = state.parameters.pop(id(unknown))
    state._plans.clear()
    with pytest.raises(RuntimeError, match="not among those given"):
        model(torch.ones(1, 300)).sum().backward()
    state.parameters[id(unknown)] = known
    with pytest.raises(gcclient.GradcommError, match="a bucket of the backward pass could not be brought"):
        gcclient.push_pull(torch.ones(1))


def test_a_backward_pass_that_was_cut_short_is_noticed(alone: FakeDaemon) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("a bug in backward")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)
            self.broken = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            return self.second(Breaks.apply(hidden) if self.broken else hidden)

    net = Model()
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    model.register_comm_hook(gcclient.state(model), gcclient.ddp_hook)
    for _ in range(2):
        model(torch.ones(1, 300)).sum().backward()
    net.broken = True
    with pytest.raises(ValueError, match="a bug"):
        model(torch.ones(1, 300)).sum().backward()
    net.broken = False
    with pytest.raises(RuntimeError, match=r"before its last bucket|prior|previous"):
        model(torch.ones(1, 300)).sum().backward()


def test_a_model_without_gradients_is_refused(joined: FakeDaemon) -> None:
    with pytest.raises(ValueError, match="requires a gradient"):
        gcclient.state(nn.ReLU())


def test_two_parameters_of_one_name_are_refused(joined: FakeDaemon) -> None:
    """Names are taken without the "module." that wrappers put before them, also where it is the model's own."""
    model = nn.Linear(2, 2, bias=False)
    model.module = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="'weight' is given twice"):
        gcclient.state(model)


def test_the_hook_has_the_signature_ddp_checks() -> None:
    parameters = inspect.signature(gcclient.ddp_hook).parameters
    assert list(parameters) == ["state", "bucket"] and parameters["bucket"].annotation is dist.GradBucket
