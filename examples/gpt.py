"""A small GPT over bytes, in plain torch: what the demo trains.

What may live here: the model. What may not: anything distributed; it is the point of gradcomm that a model needs none.
"""

from __future__ import annotations

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
    vocabulary: int = 256


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.project = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(d, 2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out; output weights are those of the embedding."""

    def __init__(self, shape: Shape | None = None, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape = shape or Shape()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.initialise(seed)

    def initialise(self, seed: int) -> None:
        """The same weights for the same seed, whatever has been drawn elsewhere (as GPT-2 does it)."""
        generator = torch.Generator().manual_seed(seed)
        deep = (2 * self.shape.layers) ** -0.5
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    scale = 0.02 * (deep if name.endswith(("project.weight", "down.weight")) else 1.0)
                    p.copy_(torch.randn(p.shape, generator=generator) * scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64[sequences, length <= context] to float32[sequences, length, vocabulary]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats a byte, a scalar."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
