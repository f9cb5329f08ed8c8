"""What the workers of test_client_optimizer.py do with options that the wrapper and the DDP state share.

What may live here: functions that return plain data. What may not: assertions that the parent can make.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gcclient
from tests.integration.ddp_workers import flatten, make_batch, make_model
from tests.integration.optimizer_workers import hook, make_sgd, train, wrap
from tests.integration.workers import digest, start

#: of the model's four weights, two and all biases are left alone
EXCLUDED = ["*.bias", "0.weight", "7.*"]
COMPRESSION = "topk(ratio=0.01)"


def _exact(net: nn.Module, rank: int, step: int) -> dict[str, torch.Tensor]:
    """The exact averages of a step's gradients."""
    x, y = make_batch(rank, step)
    nn.functional.cross_entropy(net(x), y).backward()
    found = {}
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        found[name] = gcclient.push_pull(parameter.grad)
        parameter.grad = None
    return found


def _exact_names(net: nn.Module, average: Callable[[int], None], rank: int) -> list[list[str]]:
    """By step the parameters whose gradients are the exact averages after ``average(step)``."""
    same = make_model()
    found = []
    for step in range(5):
        wanted = _exact(same, rank, step)
        average(step)
        found.append([n for n, p in net.named_parameters() if p.grad is not None and torch.equal(p.grad, wanted[n])])
        for p in net.parameters():
            p.grad = None
    return found


def compressed_in_part() -> dict[str, Any]:
    """A warm-up of two steps, and tensors that are excluded, by wrapper and hook; sums for averages."""
    rank = start()
    options: dict[str, Any] = {"compression": COMPRESSION, "exclude": EXCLUDED, "warmup_steps": 2}
    net = make_model()
    optimizer = wrap(net, rate=0.0, **options)

    def wrapped(step: int) -> None:
        x, y = make_batch(rank, step)
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    found = {"wrapper": _exact_names(net, wrapped, rank)}
    inner = make_model()
    model = DistributedDataParallel(inner, bucket_cap_mb=0.3)
    model.register_comm_hook(gcclient.state(model, **options), gcclient.ddp_hook)

    def hooked(step: int) -> None:
        x, y = make_batch(rank, step)
        nn.functional.cross_entropy(model(x), y).backward()

    found["ddp"] = _exact_names(inner, hooked, rank)
    summed = make_model()
    optimizer = wrap(summed, rate=0.0, op=gcclient.Sum)
    wanted = _exact(make_model(), rank, 0)
    x, y = make_batch(rank, 0)
    nn.functional.cross_entropy(summed(x), y).backward()
    optimizer.step()
    sums = [torch.equal(p.grad, wanted[n] * gcclient.size()) for n, p in summed.named_parameters()]  # type: ignore[arg-type]
    gcclient.shutdown()
    return {"found": found, "sums": sums, "names": list(wanted)}


def accumulated() -> dict[str, Any]:
    """Three passes a step: by the state's backward_passes_per_step, by no_sync of the wrapper, by no_sync of DDP."""
    rank = start()
    nets = [make_model() for _ in range(3)]
    by_state = DistributedDataParallel(nets[0], bucket_cap_mb=0.3)
    by_state.register_comm_hook(gcclient.state(by_state, backward_passes_per_step=3), gcclient.ddp_hook)
    wrapped, model = wrap(nets[1]), hook(nets[2])
    optimizers = [make_sgd(nets[0]), wrapped, make_sgd(nets[2])]
    for step in range(3):
        for part in range(3):
            x, y = make_batch(rank, 10 * step + part)
            nn.functional.cross_entropy(by_state(x), y).backward()
            for each, run in ((wrapped, nets[1]), (model, model)):
                if part < 2:
                    with each.no_sync():
                        nn.functional.cross_entropy(run(x), y).backward()
                else:
                    nn.functional.cross_entropy(run(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    steps = gcclient.stats()["steps"]
    gcclient.shutdown()
    return {
        "difference": max(float((flatten(net) - flatten(nets[2])).abs().max()) for net in nets),
        "hashes": [digest(flatten(net)) for net in nets],
        "steps": steps,
    }


def compiled(steps: int) -> dict[str, Any]:
    """Training of compiled models by wrapper and hook, against the same without compiling."""
    rank = start()
    expected = _by_wrapper_of(make_model(), rank, steps)
    net = make_model()
    made = torch.compile(net, backend="aot_eager")
    wrapped = train(net, made, wrap(net), steps, rank)  # type: ignore[arg-type]
    inner = make_model()
    plain = DistributedDataParallel(inner)
    plain.register_comm_hook(gcclient.state(plain), gcclient.ddp_hook)
    model = torch.compile(plain, backend="aot_eager")
    hooked = train(inner, model, make_sgd(inner), steps, rank)  # type: ignore[arg-type]
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    gcclient.shutdown()
    return {
        "differences": [float((w - expected).abs().max()) for w in (wrapped, hooked)],
        "moved": float((expected - flatten(make_model())).abs().max()),
        "hashes": [digest(wrapped), digest(hooked)],
        "compiled": frames,
    }


def _by_wrapper_of(net: nn.Module, rank: int, steps: int) -> torch.Tensor:
    return train(net, net, wrap(net), steps, rank)


def steered() -> dict[str, Any]:
    """Training with a scheduler of the inner optimizer, after a broadcast of the state, which rank 0 does not load."""
    rank = start()
    net = make_model()
    inner = make_sgd(net)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = gcclient.DistributedOptimizer(inner, net.named_parameters())
    gcclient.broadcast_optimizer_state(optimizer)
    rates = []
    for step in range(3):
        train(net, net, optimizer, 1, rank + 10 * step)
        scheduler.step()
        rates.append([each.param_groups[0]["lr"] for each in (optimizer, inner)])
    gcclient.shutdown()
    return {"rates": rates, "hash": digest(flatten(net))}


def migrated() -> list[dict[str, Any]]:
    """The examples of docs/migrate.md as they stand there; what each left behind."""
    found = []
    for example in re.findall(r"```python\n(.*?)```", Path("docs/migrate.md").read_text(), re.DOTALL):
        names: dict[str, Any] = {}
        exec(example, names)
        found.append(
            {
                "line": example.splitlines()[0],
                "hash": digest(flatten(names["model"])),
                "average": float(names["average"]),
                "loss": float(names["loss"]),
                "losses": names["losses"].tolist(),
                "steps": gcclient.stats()["steps"],
            }
        )
        gcclient.shutdown()
    return found
