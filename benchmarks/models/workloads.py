"""What ``benchmarks.training`` trains, by name: a network, its batches, and the optimizer it learns with.

What may live here: these choices and their sizes. What may not: the networks themselves, anything distributed.

Sizes are such that a step of ``gpt`` or ``cnn`` computes for 0.2 to 0.3 s with one thread: less, and nothing could be
hidden behind it; more, and the slowest cells of the benchmark would take hours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import nn

from benchmarks.models import resnet, textures
from examples import gpt, text

Batch = tuple[torch.Tensor, torch.Tensor]
HELD_OUT: Final = 16  # batches for the loss at the end


class Stepper(Protocol):
    """An optimizer that clears the gradients when it has used them."""

    def step(self) -> None: ...


class Batches(Protocol):
    """Inputs and targets, decided by a generator."""

    def train(self, generator: torch.Generator) -> Batch: ...

    def held_out(self, generator: torch.Generator) -> Batch: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """``model(seed)`` has the same weights for the same seed. ``optimizer(model, momentum)``: see the classes below."""

    model: Callable[[int], nn.Module]
    batches: Callable[[], Batches]
    optimizer: Callable[[nn.Module, bool], Stepper]


class TextBatches:
    """Characters of the standard library's sources; the held-out ones come from its end."""

    def __init__(self, sequences: int, length: int) -> None:
        self.data, self.sequences, self.length = text.load(), sequences, length

    def train(self, generator: torch.Generator) -> Batch:
        inputs, targets = text.batch(self.data.train, self.sequences, self.length, generator)
        return inputs, targets

    def held_out(self, generator: torch.Generator) -> Batch:
        inputs, targets = text.batch(self.data.val, 4 * self.sequences, self.length, generator)
        return inputs, targets


class TextureBatches:
    """Pictures that nobody has seen before, also in training."""

    def __init__(self, pictures: int) -> None:
        self.data, self.pictures = textures.Textures(), pictures

    def train(self, generator: torch.Generator) -> Batch:
        return self.data.batch(self.pictures, generator)

    held_out = train


def text_optimizer(model: nn.Module, momentum: bool) -> gpt.Optimizer:
    """The demo's. It has no momentum; one of the codec's, 0.9, makes every step ten times as long, which Adafactor
    divides out again and the plain SGD of the embedding does not."""
    return gpt.Optimizer(model, embedding_rate=0.3 if momentum else 0.03)


class WarmedUp:
    """An optimizer of torch's with ten steps of warm-up."""

    WARMUP: Final = 10

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.rate, self.steps = optimizer, float(optimizer.defaults["lr"]), 0

    def step(self) -> None:
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = self.rate * min(1.0, self.steps / self.WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad()


def momentum_sgd(model: nn.Module, momentum: bool, rate: float = 0.01) -> WarmedUp:
    """SGD, momentum 0.9. ``momentum`` False: the codec brings its own (DGC), so none here."""
    return WarmedUp(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 if momentum else 0.0))


def adamw(model: nn.Module, momentum: bool, rate: float = 3e-4) -> WarmedUp:
    """What most train transformers with, which may not stand late gradients; ``momentum`` as in `momentum_sgd`."""
    return WarmedUp(torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9 if momentum else 0.0, 0.999)))


GPT: Final = gpt.Shape(layers=7, width=570, heads=6, context=64)  # 27.3 M parameters
TINY: Final = gpt.Shape(layers=2, width=64, heads=2, context=32)  # 0.1 M
DEMO: Final = gpt.Shape(context=64)  # 3.0 M

WORKLOADS: Final = {
    "gpt": Workload(lambda seed: gpt.GPT(GPT, seed), lambda: TextBatches(1, GPT.context), text_optimizer),
    "cnn": Workload(lambda seed: resnet.ResNet(seed=seed), lambda: TextureBatches(16), momentum_sgd),
    "tiny": Workload(lambda seed: gpt.GPT(TINY, seed), lambda: TextBatches(2, TINY.context), text_optimizer),
    "demo": Workload(lambda seed: gpt.GPT(DEMO, seed), lambda: TextBatches(4, DEMO.context), text_optimizer),
    "gpt-adamw": Workload(lambda seed: gpt.GPT(GPT, seed), lambda: TextBatches(1, GPT.context), adamw),
}
