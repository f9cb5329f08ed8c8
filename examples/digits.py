"""Digits as a pen would draw them, without a download: strokes, slanted, stretched and shifted at random.

What may live here: the strokes, and drawing batches of them. What may not: models.
"""

from __future__ import annotations

import itertools

import torch

SIZE = 16  # pixels a side
PEN = 0.05  # half the width of a stroke; the picture is 1 wide
#: Corners of each digit's one stroke, (right, down) in hundredths of the picture.
STROKES = (
    "50,10 28,25 25,60 40,88 62,88 76,60 72,25 50,10",
    "35,28 55,10 55,90",
    "25,30 40,12 65,14 72,32 25,90 78,90",
    "25,12 72,12 45,42 74,62 62,88 25,86",
    "65,90 65,10 22,65 82,65",
    "75,10 30,10 28,45 62,42 76,66 60,90 25,87",
    "68,10 36,38 25,68 45,90 70,82 72,58 50,48 30,60",
    "20,12 80,12 42,90",
    "50,48 28,30 50,10 72,30 50,48 25,70 50,90 75,70 50,48",
    "70,35 48,48 30,32 42,12 66,15 70,35 60,90",
)


def _segments() -> torch.Tensor:
    """float32[10, segments, 2 ends, 2 coordinates]; the shorter digits repeat their last segment."""
    digits = []
    for text in STROKES:
        points = [tuple(int(c) / 100 for c in pair.split(",")) for pair in text.split()]
        lines = list(itertools.pairwise(points))
        digits.append(lines + lines[-1:] * (8 - len(lines)))
    return torch.tensor(digits)


def batch(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures, float32[count, 1, SIZE, SIZE], ink being 1, and which digits they are, int64[count]."""
    labels = torch.randint(10, (count,), generator=generator)
    bend = torch.eye(2) + 0.15 * torch.randn(count, 1, 2, 2, generator=generator)
    shift = 0.5 + 0.06 * torch.randn(count, 1, 1, 2, generator=generator)
    lines = (_segments()[labels] - 0.5) @ bend + shift
    begin, along = lines[:, None, :, 0], (lines[:, :, 1] - lines[:, :, 0])[:, None]
    places = (torch.arange(SIZE) + 0.5) / SIZE
    pixels = torch.cartesian_prod(places, places).flip(1)[None, :, None]
    # the nearest point of each segment, as a share of its length
    share = ((pixels - begin) * along).sum(-1) / along.square().sum(-1).clamp_min(1e-6)
    distance = (pixels - begin - share.clamp(0, 1)[..., None] * along).norm(dim=-1).amin(-1)
    ink = torch.exp(-(distance / PEN).square()).view(count, 1, SIZE, SIZE)
    return ink + 0.1 * torch.randn(ink.shape, generator=generator), labels
