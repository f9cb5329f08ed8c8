"""What `fully_shard` reduces together, and which of it patterns choose."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gcclient import shardgroups
from gcclient.shardgroups import ShardGroup, chosen, codecs, shard_groups
from tests.unit.client.fake import FakeDaemon


class Tied(nn.Module):
    """An embedding whose weight is the head's too, around two layers that are sharded by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 4)
        self.head.weight = self.embedding.weight


@pytest.fixture
def groups(alone: FakeDaemon) -> list[ShardGroup]:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    net: Any = Tied()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return shard_groups(fully_shard(net, mesh=mesh))


def _modules(found: Iterable[ShardGroup]) -> list[str]:
    return [group.module for group in found]


def test_groups_and_the_names_in_them(groups: list[ShardGroup]) -> None:
    assert {group.module: {frozenset(names) for names in group.parameters} for group in groups} == {
        "(root)": {frozenset({"embedding.weight", "head.weight"}), frozenset({"head.bias"})},
        "layers.0": {frozenset({"layers.0.weight"}), frozenset({"layers.0.bias"})},
        "layers.1": {frozenset({"layers.1.weight"}), frozenset({"layers.1.bias"})},
    }
    assert shard_groups(nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("patterns", "modules"),
    [
        ([], []),
        (["layers.1"], ["layers.1"]),
        (["layers.*"], ["layers.0", "layers.1"]),
        (["*.bias", "*.weight"], ["(root)", "layers.0", "layers.1"]),
        (["(root)"], ["(root)"]),
        (["head.*"], ["(root)"]),  # the embedding by its other name
        (["embedding.*", "head.bias"], ["(root)"]),
        (["layers.1.weight", "layers.1.b*"], ["layers.1"]),
        (["*"], ["(root)", "layers.0", "layers.1"]),
    ],
)
def test_patterns_choose_whole_groups(groups: list[ShardGroup], patterns: list[str], modules: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _modules(chosen(patterns, groups, "exclude")) == modules


@pytest.mark.parametrize("pattern", ["layers.1.bias", "*.bias", "embedding.*"])
def test_a_group_is_not_split(groups: list[ShardGroup], pattern: str) -> None:
    module = "layers.1" if pattern == "layers.1.bias" else "(root)"
    with pytest.raises(ValueError, match=r"exclude: .* would split the fully_shard group") as raised:
        chosen([pattern], groups, "exclude")
    assert f"{pattern!r} would split the fully_shard group {module!r}" in str(raised.value)


def test_what_splits_a_group_is_shown_in_part() -> None:
    names = tuple((f"w{n}",) for n in range(9))
    with pytest.raises(ValueError, match=r"'w8' match and 'w0', 'w1', 'w2' and 5 more do not"):
        shardgroups._whole(ShardGroup(None, "m", names), ["w8"], "exclude")


def test_a_pattern_that_means_nothing_is_a_warning(groups: list[ShardGroup]) -> None:
    with pytest.warns(UserWarning, match=r"exclude: 'Layers\.\*' matches the name of no parameter, nor"):
        assert chosen(["Layers.*"], groups, "exclude") == []


def test_names_are_those_of_the_model_that_was_compiled(alone: FakeDaemon) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(net[0], mesh=mesh)
    compiled: Any = torch.compile(fully_shard(net, mesh=mesh))
    found = shard_groups(compiled)
    assert [[names[0] for names in group.parameters] for group in chosen(["0.*"], found, "exclude")] == [
        ["0.weight", "0.bias"]
    ]


def test_codecs_by_pattern(groups: list[ShardGroup]) -> None:
    def by_module(compression: object) -> dict[str, str]:
        return {group.module: codec for group, codec in codecs(compression, groups).items()}

    assert by_module(None) == {"(root)": "", "layers.0": "", "layers.1": ""}
    assert by_module("fp16") == {"(root)": "fp16", "layers.0": "fp16", "layers.1": "fp16"}
    assert by_module({"layers.*": "onebit", "layers.1": "bf16"}) == {
        "(root)": "", "layers.0": "onebit", "layers.1": "bf16",
    }  # fmt: skip
    assert by_module({"layers.1": "bf16", "*": "onebit"}).keys() == {"(root)", "layers.0", "layers.1"}
    assert set(by_module({"layers.1": "bf16", "*": "onebit"}).values()) == {"onebit"}, "the last that matches"
    with pytest.raises(ValueError, match=r"compression: .* would split"):
        by_module({"*.bias": "none"})
