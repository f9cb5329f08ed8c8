"""Uniform ratios from shapes alone, beside the ones printed in L-GreCo's tables 2 and 3."""

from __future__ import annotations

import math

import pytest

from gcserver.planner.errors import TableError
from gcserver.planner.uniform import lowrank_ratio, qsgd_ratio, topk_ratio
from gcserver.planner.uniform_shapes import resnet18_cifar, resnet50, transformer_xl


def elements(shapes):
    return sum(math.prod(s) for s in shapes)


def test_models_have_their_known_numbers_of_parameters():
    assert elements(resnet18_cifar()) == 11_220_132 and len(resnet18_cifar()) == 62
    assert elements(resnet50()) == 25_557_032 and len(resnet50()) == 161
    assert elements(transformer_xl()) == 191_950_298


@pytest.mark.parametrize(
    ("ratio", "ours", "printed"),
    [
        (lambda: lowrank_ratio(resnet18_cifar(), 4), "72.2", 72.2),
        (lambda: lowrank_ratio(resnet50(), 4), "66.5", 66.5),
        (lambda: lowrank_ratio(transformer_xl(), 32), "14.1", 14.0),
        (lambda: qsgd_ratio(resnet18_cifar(), 4), "7.8", 7.8),
        (lambda: qsgd_ratio(resnet50(), 4), "7.8", 7.7),
        (lambda: qsgd_ratio(transformer_xl(), 4), "7.8", 7.8),
        (lambda: topk_ratio(resnet18_cifar(), 0.01), "48.0", 48.1),
        (lambda: topk_ratio(resnet50(), 0.01), "45.3", 45.6),
        (lambda: topk_ratio(transformer_xl(), 0.1), "5.0", 4.9),
    ],
)
def test_ratios_are_the_papers_within_two_per_cent(ratio, ours, printed):
    assert f"{ratio():.1f}" == ours
    assert ratio() == pytest.approx(printed, rel=0.02)


def test_the_rule():
    assert lowrank_ratio([(100, 100), (7,)], 4) == 10_007 / 807
    assert lowrank_ratio([(10, 10)], 4) == 1, "too thin: sent as it is"
    assert qsgd_ratio([(10, 100), (3,)], 8, 512) == 1003 / (250 + 4 + 3)
    assert topk_ratio([(10, 5), (3,)], 0.01) == 53 / 5, "one element at least"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: lowrank_ratio([(3, 3)], 0), "rank: expected at least 1"),
        (lambda: qsgd_ratio([(3, 3)], 33), "bits, bucket: expected"),
        (lambda: topk_ratio([(3, 3)], 0.0), "ratio: expected above 0"),
        (lambda: topk_ratio([], 0.1), "shapes: expected at least one"),
    ],
)
def test_refusals(call, said):
    with pytest.raises(TableError, match=said):
        call()
