"""Pictures made from random numbers that a network can learn to tell apart: each class is a texture.

What may live here: drawing them and their labels. What may not: networks.
"""

from __future__ import annotations

import math

import torch


class Textures:
    """``classes`` kinds of pictures, each a sum of coloured waves whose directions and lengths are its own.

    Where a wave begins is drawn anew for each picture, so no single pixel says anything of the class. Every label is
    with probability ``confusion`` drawn at random: the loss has a floor that no network gets below, without which
    comparing small losses by their ratio would say little.
    """

    def __init__(
        self, classes: int = 100, size: int = 48, waves: int = 3, confusion: float = 0.15, noise: float = 0.7
    ) -> None:
        generator = torch.Generator().manual_seed(20)
        angle = 2 * math.pi * torch.rand(classes, waves, generator=generator)
        cycles = size * (0.04 + 0.2 * torch.rand(classes, waves, generator=generator))  # periods of 4 to 25 pixels
        self.steps = torch.stack((angle.cos(), angle.sin()), 2) * (2 * math.pi * cycles / size)[..., None]
        self.colours = torch.randn(classes, waves, 3, generator=generator) / math.sqrt(waves)
        self.classes, self.size, self.confusion, self.noise = classes, size, confusion, noise

    def batch(self, pictures: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32[pictures, 3, size, size], labels int64[pictures]) as ``generator`` draws them."""
        kind = torch.randint(self.classes, (pictures,), generator=generator)
        steps, colours = self.steps[kind], self.colours[kind]
        at = torch.arange(self.size, dtype=torch.float32)
        start = 2 * math.pi * torch.rand(pictures, steps.shape[1], generator=generator)
        down, across = (steps[:, :, i, None] * at for i in range(2))
        phase = down[:, :, :, None] + across[:, :, None, :] + start[:, :, None, None]
        x = torch.einsum("pwyx,pwc->pcyx", phase.cos_(), colours)
        x += self.noise * torch.randn(x.shape, generator=generator)
        other = torch.randint(self.classes, (pictures,), generator=generator)
        wrong = torch.rand(pictures, generator=generator) < self.confusion
        return x, torch.where(wrong, other, kind)
