"""A residual network of bottleneck blocks in plain torch; by default ResNet-50 (He et al. 2016, table 1).

What may live here: the network and its first weights. What may not: data, optimizers, anything distributed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

EXPANSION = 4  # a block's output has so many times the channels of its 3x3 convolution


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a connection around them; ``stride`` is the 3x3 one's."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.around(x))


class ResNet(nn.Module):
    """float32[images, 3, height, width] to logits, float32[images, classes].

    blocks: bottlenecks of each stage; a stage has half the resolution and twice the channels of the one before.
    The defaults have 25,557,032 parameters, as the paper's ResNet-50 for ImageNet.
    """

    def __init__(
        self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000, seed: int = 0
    ) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage and i == 0 else 1))
                inputs = EXPANSION * (width << stage)
        self.blocks = nn.Sequential(*layers)
        self.classify = nn.Linear(inputs, classes)
        self.initialise(seed)

    def initialise(self, seed: int) -> None:
        """The same weights for the same seed: He et al. 2015 for convolutions, small ones for the classifier.

        The last norm of each block starts small, so that the network begins nearly shallow and a large rate is safe;
        not at zero (Goyal et al. 2017, section 5.1), where most first gradients would be zero.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Conv2d):
                    scale = (2.0 / (module.out_channels * module.weight[0, 0].numel())) ** 0.5
                    module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * scale)
                elif isinstance(module, nn.Linear):
                    module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 0.01)
                    module.bias.zero_()
                elif isinstance(module, Bottleneck):
                    module.norm3.weight.fill_(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, padding=1)
        return self.classify(self.blocks(x).mean((2, 3)))
