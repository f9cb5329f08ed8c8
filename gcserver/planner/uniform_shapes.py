"""The shapes of the parameters of three models of L-GreCo's tables, by the formulas of their architectures.

What may live here: such shapes, in the order of the forward pass. What may not: weights, anything of a framework.
"""

from __future__ import annotations

Shape = tuple[int, ...]


def _norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def resnet18_cifar(classes: int = 100) -> list[Shape]:
    """ResNet-18 for 32 x 32 images: a first convolution of 3 x 3; 11,220,132 parameters with 100 classes."""
    shapes: list[Shape] = [(64, 3, 3, 3), *_norm(64)]
    before = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += [(width, before, 3, 3), *_norm(width), (width, width, 3, 3), *_norm(width)]
            if before != width:
                shapes += [(width, before, 1, 1), *_norm(width)]
            before = width
    return [*shapes, (classes, 512), (classes,)]


def resnet50(classes: int = 1000) -> list[Shape]:
    """ResNet-50 for ImageNet: 25,557,032 parameters."""
    shapes: list[Shape] = [(64, 3, 7, 7), *_norm(64)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, before, 1, 1), *_norm(width), (width, width, 3, 3), *_norm(width)]
            shapes += [(4 * width, width, 1, 1), *_norm(4 * width)]
            if block == 0:
                shapes += [(4 * width, before, 1, 1), *_norm(4 * width)]
            before = 4 * width
    return [*shapes, (classes, 2048), (classes,)]


def transformer_xl(vocabulary: int = 267_735, layers: int = 16, width: int = 512, heads: int = 8) -> list[Shape]:
    """Transformer-XL base for WikiText-103: 191,950,298 parameters, the output's weights being the embedding's."""
    shapes: list[Shape] = [(vocabulary, width), (vocabulary,)]
    # biases of content and position, shared by all layers
    shapes += [(heads, width // heads)] * 2
    for _ in range(layers):
        shapes += [(3 * width, width), (width, width), (width, width), *_norm(width)]  # q, k, v; output; positions
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), *_norm(width)]
    # the clusters of the adaptive softmax
    return [*shapes, (3, width), (3,)]
