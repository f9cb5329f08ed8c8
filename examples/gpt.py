"""A small GPT over characters, in plain torch, and the optimizer it is trained with: the demo's subject.

What may live here: the model and its optimizer. What may not: anything distributed; it is the point of gradcomm that
a model needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; the default has about 3 million parameters, 12 MB of fp32 gradients."""

    layers: int = 4
    width: int = 248
    heads: int = 4
    context: int = 64
    vocabulary: int = 97


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.width
        self.heads = shape.heads
        # norms without weights: nothing small that would have to be exempt from compression
        self.norm1, self.norm2 = (nn.LayerNorm(d, elementwise_affine=False) for _ in range(2))
        self.qkv, self.project = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).split(d, 2)
        q, k, v = (part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Characters in, logits of the next one out; sinusoidal positions; output weights are those of the embedding."""

    positions: torch.Tensor

    def __init__(self, shape: Shape | None = None, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape = shape or Shape()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, elementwise_affine=False)
        self.register_buffer("positions", 0.02 * sinusoids(shape.context, shape.width), persistent=False)
        self.initialise(seed)

    def initialise(self, seed: int) -> None:
        """The same weights for the same seed, whatever has been drawn elsewhere (scales as in GPT-2)."""
        generator = torch.Generator().manual_seed(seed)
        deep = (2 * self.shape.layers) ** -0.5
        with torch.no_grad():
            for name, p in self.named_parameters():
                scale = 0.02 * (deep if name.endswith(("project.weight", "down.weight")) else 1.0)
                p.copy_(torch.randn(p.shape, generator=generator) * scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64[sequences, length <= context] to float32[sequences, length, vocabulary]."""
        x = self.token(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a character, a scalar; float32[..., vocabulary] and int64[...]."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def sinusoids(length: int, width: int) -> torch.Tensor:
    """float32[length, width]: the fixed positions of Vaswani et al. 2017, section 3.5."""
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)


class Optimizer:
    """Adafactor for the matrices, plain SGD for the embedding, gradients clipped to norm 1, ten steps of warm-up.

    Many characters are rare, so many rows of the embedding's gradient are nearly zero, and what a lossy codec decodes
    for them is noise that error feedback takes back a step later. SGD adds it up, which cancels it; a method that
    divides by its recent size would blow it up. For the dense gradients of the matrices, Adafactor's one scale a row
    and column stands the noise where Adam's scale for each element does not.
    """

    def __init__(self, model: nn.Module, rate: float = 0.01, embedding_rate: float = 0.3, warmup: int = 10) -> None:
        matrices = [p for name, p in model.named_parameters() if "token" not in name]
        embedding = [p for name, p in model.named_parameters() if "token" in name]
        self.matrices = torch.optim.Adafactor(matrices, lr=rate)
        self.embedding = torch.optim.SGD(embedding, lr=embedding_rate)
        self.parameters = [*matrices, *embedding]
        self.rate, self.warmup, self.steps = rate, warmup, 0

    def step(self) -> None:
        """Clips, updates, and clears the gradients."""
        self.steps += 1
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.matrices.param_groups[0]["lr"] = self.rate * min(1.0, self.steps / self.warmup)
        for part in (self.matrices, self.embedding):
            part.step()
            part.zero_grad()
