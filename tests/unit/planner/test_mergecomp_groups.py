"""Groupings: the baselines, the bucket sizes torch takes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import _compute_bucket_assignment_by_size

from gcserver.planner.mergecomp_groups import (
    Grouping,
    GroupingError,
    ddp_bucket_caps,
    layer_wise,
    naive,
    whole_model,
)


def test_baselines() -> None:
    assert layer_wise(3).ends == (1, 2, 3) and whole_model(3).ends == (3,)
    assert naive(10, 3).ends == (3, 6, 10) and naive(10, 1).ends == (10,) and naive(3, 3).ends == (1, 2, 3)
    for groups in (0, 11):
        with pytest.raises(GroupingError, match=f"1 to 10 groups, got {groups}"):
            naive(10, groups)


def test_a_grouping_lists_its_tensors_and_sizes() -> None:
    grouping = Grouping((2, 5))
    assert [list(group) for group in grouping] == [[0, 1], [2, 3, 4]] and len(grouping) == 2 and grouping.tensors == 5
    assert grouping.sizes((10, 20, 30, 40, 50)) == (30, 120)
    with pytest.raises(GroupingError, match="cuts 5 tensors, got the sizes of 4"):
        grouping.sizes((1, 2, 3, 4))


@pytest.mark.parametrize("ends", [(), (0, 3), (2, 2), (3, 1), (-1,)])
def test_ends_must_rise(ends: tuple[int, ...]) -> None:
    with pytest.raises(GroupingError, match="must rise"):
        Grouping(ends)


def test_torch_cuts_its_buckets_where_the_groups_end() -> None:
    elements = [3, 1024, 250_001, 1, 16, 7]
    grouping = Grouping((2, 3, 6))
    caps = [int(cap * 1024 * 1024) for cap in ddp_bucket_caps(grouping, [4 * n for n in elements])]  # as torch converts
    assert caps == [4108, 1_000_004, 96]
    tensors = [torch.empty(n) for n in elements]
    # what DDP's reducer calls, with the order of arrival, to rebuild its buckets
    buckets, _ = _compute_bucket_assignment_by_size(tensors, caps, [False] * 6, list(range(6)))
    assert buckets == [list(group) for group in grouping]
    with pytest.raises(GroupingError, match="group 1 is empty"):
        ddp_bucket_caps(Grouping((1, 2)), [4, 0])
