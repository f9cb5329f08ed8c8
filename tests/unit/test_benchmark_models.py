"""What the training benchmark trains: sizes of the models, weights and batches decided by seeds, that they learn."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import MODELS
from benchmarks.models.resnet import ResNet
from benchmarks.models.textures import Textures
from benchmarks.models.workloads import WORKLOADS, adamw, momentum_sgd
from examples import gpt


def test_the_models_have_the_sizes_the_benchmark_names() -> None:
    with torch.device("meta"):
        counts = {n: [p.numel() for p in gpt.GPT(s).parameters()] for n, s in (("gpt", _shape("gpt")),)}
        counts["cnn"] = [p.numel() for p in ResNet().parameters()]
    assert sum(counts["gpt"]) == 27_346_890
    assert 4 * sum(counts["gpt"]) == pytest.approx(109e6, rel=0.01)
    assert sum(counts["cnn"]) == 25_557_032  # ResNet-50's, as published
    assert len(counts["cnn"]) == 161
    assert tuple(WORKLOADS) == MODELS


def _shape(name: str) -> gpt.Shape:
    from benchmarks.models import workloads

    return {"gpt": workloads.GPT, "tiny": workloads.TINY}[name]


def test_a_small_network_halves_its_picture_with_every_stage_and_learns() -> None:
    data, model = Textures(classes=3, size=24, confusion=0.0), ResNet((1, 1), width=8, classes=3)
    x, y = data.batch(24, torch.Generator().manual_seed(0))
    assert x.shape == (24, 3, 24, 24)
    assert model.blocks(torch.zeros(1, 8, 6, 6)).shape == (1, 64, 3, 3)
    optimizer, losses = momentum_sgd(model, momentum=True, rate=0.05), []
    for _ in range(25):
        loss = gpt.loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_pictures_come_from_their_generator_and_labels_are_mixed_up_at_times() -> None:
    data = Textures(classes=4, size=8, confusion=0.0)
    (x, y), (same, again) = (data.batch(64, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(x, same)
    assert torch.equal(y, again)
    assert set(y.tolist()) == {0, 1, 2, 3}
    _, mixed = Textures(classes=4, size=8, confusion=0.5).batch(64, torch.Generator().manual_seed(5))
    wrong = int((mixed != y).sum())
    assert 10 < wrong < 40  # half of them are drawn again, and every fourth of those comes out right


@pytest.mark.parametrize("name", ["cnn", "tiny"])
def test_the_same_seed_gives_the_same_weights_and_batches(name: str) -> None:
    workload = WORKLOADS[name]
    torch.manual_seed(1)
    one = workload.model(3)
    torch.manual_seed(2)
    two, other = workload.model(3), workload.model(4)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    batches = workload.batches()
    first, second = (batches.train(torch.Generator().manual_seed(9)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert gpt.loss(one.eval()(first[0]), first[1]).isfinite()


def test_a_codec_with_momentum_gets_an_optimizer_without() -> None:
    model = torch.nn.Linear(2, 2)
    assert momentum_sgd(model, momentum=True).optimizer.defaults["momentum"] == 0.9
    assert momentum_sgd(model, momentum=False).optimizer.defaults["momentum"] == 0.0
    assert adamw(model, momentum=True).optimizer.defaults["betas"] == (0.9, 0.999)
    assert adamw(model, momentum=False).optimizer.defaults["betas"] == (0.0, 0.999)


def test_a_rate_rises_over_the_first_ten_steps() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    warmed, moved = momentum_sgd(model, momentum=False, rate=1.0), []
    for _ in range(12):
        model.weight.grad = torch.ones(1, 1)
        before = model.weight.item()
        warmed.step()
        moved.append(before - model.weight.item())
    assert moved == pytest.approx([*(i / 10 for i in range(1, 11)), 1.0, 1.0], rel=1e-5)
    assert model.weight.grad is None
