"""What users say of groups, read into names; bucket sizes for torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gcclient
from gcclient.grouping import name_groups, plain_name, read_groups
from gcserver.planner.mergecomp_groups import ddp_bucket_caps, naive

NAMES = ["e", "d", "c", "b", "a"]


def test_groups_are_read() -> None:
    assert read_groups(None, NAMES) is None
    assert read_groups("layer-wise", NAMES) == [["e"], ["d"], ["c"], ["b"], ["a"]]
    assert read_groups(1, NAMES) == [NAMES]
    assert read_groups(2, NAMES) == [["e", "d"], ["c", "b", "a"]]
    assert read_groups([["e", "c"], ("b", "a", "d")], NAMES) == [["e", "c"], ["b", "a", "d"]]


@pytest.mark.parametrize("count", range(1, 12))
def test_a_number_makes_the_groups_of_the_planners_naive_partition(count: int) -> None:
    names = [str(i) for i in range(11)]
    assert read_groups(count, names) == [[names[i] for i in group] for group in naive(11, count)]


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ("layers", ValueError, "groups='layers': expected 'layer-wise'"),
        (0, ValueError, "groups=0: 5 tensors can be merged into 1 to 5 groups"),
        (6, ValueError, "groups=6"),
        (2.5, TypeError, "groups=2.5: expected 'layer-wise', a number of groups, or lists .* got a float"),
        (True, TypeError, "got a bool"),
        (["e", "d"], TypeError, r"groups\[0\]='e': expected a list of parameter names, got a str"),
        ([NAMES, [1]], TypeError, r"a name in groups\[1\]=1: expected text"),
        ([NAMES, []], ValueError, r"groups\[1\] is empty"),
        ([["e", "d"], ["c", "b"]], ValueError, "each of the 5 parameters belongs to one group; 'a' is in no group"),
        ([NAMES, ["f"]], ValueError, "'f' is no parameter that is exchanged"),
        ([NAMES, ["c"]], ValueError, "'c' is named 2 times"),
    ],
)
def test_what_is_no_grouping_is_refused(groups: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_groups(groups, NAMES)


def test_lists_of_parameters_are_named_in_the_order_in_which_they_are_ready() -> None:
    named = [(name, torch.zeros(1)) for name in reversed(NAMES)]
    a, b, c, d, e = (p for _, p in named)
    assert name_groups([[a, c], [d, torch.ones(1)]], named) == [["e"], ["d"], ["b"], ["c", "a"]]
    assert name_groups([[], (a, b, c, d, e)], named) == [NAMES]
    assert name_groups(iter([iter([a]), iter([e, b])]), named) == [["d"], ["c"], ["e", "b"], ["a"]]
    for same in (None, 2, "layer-wise", [["e", "c"], ["d", "b", "a"]], ["e"], [1]):
        assert name_groups(same, named) == same
    assert name_groups(iter([iter(["e"])]), named) == [["e"]], "what was read is handed on"


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5), nn.Linear(5, 1).requires_grad_(False))


def test_bucket_caps_are_the_groups_bytes() -> None:
    nbytes = [5 * 4, 5 * 30 * 4, 30 * 4, 20 * 30 * 4]  # backwards: 1.bias, 1.weight, 0.bias, 0.weight
    assert gcclient.bucket_caps(_model(), "layer-wise") == [n / 2**20 for n in nbytes]
    assert gcclient.bucket_caps(_model(), 2) == ddp_bucket_caps(naive(4, 2), nbytes)
    lists = [["1.bias"], ["0.bias", "1.weight"], ["0.weight"]]
    assert gcclient.bucket_caps(_model(), lists) == [20 / 2**20, 720 / 2**20, 2400 / 2**20]


@pytest.mark.parametrize(
    ("model", "groups", "message"),
    [
        (_model(), None, "groups=None: expected 'layer-wise'"),
        (nn.ReLU(), [], "a model with parameters"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), 1, "torch.float32 on cpu, torch.float64 on cpu"),
        (nn.ParameterList([torch.zeros(0), torch.zeros(1)]), 2, "no bucket of no bytes, and all of group 1"),
    ],
)
def test_bucket_caps_that_torch_would_not_keep_are_refused(model: nn.Module, groups: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gcclient.bucket_caps(model, groups)  # type: ignore[arg-type]


def test_names_are_the_models_own_whatever_wraps_it() -> None:
    for name in (
        "a.weight",
        "module.a.weight",
        "_orig_mod.a.weight",
        "module._orig_mod.a.weight",
        "_orig_mod.module.a.weight",
    ):
        assert plain_name(name) == "a.weight"
    assert plain_name("head.module.weight") == "head.module.weight"
